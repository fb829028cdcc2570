"""What the source is held to, as numbers that may fall and never rise."""

import ast
import subprocess
import sys
from collections import Counter

from conftest import REPOSITORY

MODULES = {
    path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "launcher").rglob("*.py")
}
NODES = [node for text in MODULES.values() for node in ast.walk(ast.parse(text))]


def test_no_function_takes_more_than_ten_parameters() -> None:
    """Command functions aside: their parameters are their options."""
    long = []
    for node in NODES:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = node.args
            count = len([*taken.posonlyargs, *taken.args, *taken.kwonlyargs])
            if count > 10 and ".command" not in " ".join(map(ast.unparse, node.decorator_list)):
                long.append((node.name, count))
    assert not long


def test_no_class_name_twice() -> None:
    names = Counter(node.name for node in NODES if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_formatter_is_never_fought() -> None:
    assert sum(text.count("# fmt: skip") for text in MODULES.values()) == 0


def test_no_expression_packs_several_steps() -> None:
    command = [sys.executable, "scripts/check_expressions.py", "launcher", "tests", "scripts"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == done.stderr == ""
