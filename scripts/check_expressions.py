"""Report expressions that pack several steps into one, for which ruff has no rule.

python scripts/check_expressions.py launcher tests      # exit code 1 if there are any
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_LINES = 4
MOST_NAMES = 2


def find_dense_expressions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of each, and what is wrong there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt):
            fault = _find_fault(node)
            if fault is not None:
                yield node.lineno, fault


def _find_fault(node: ast.expr | ast.stmt) -> str | None:
    if isinstance(node, ast.IfExp) and _holds(node, ast.IfExp):
        return "a conditional expression inside another: write `if` statements"
    if isinstance(node, ast.Lambda) and _holds(node, ast.IfExp, *COMPREHENSIONS):
        return "a lambda with a condition or a loop: write a function"
    if isinstance(node, COMPREHENSIONS):
        return _find_comprehension_fault(node)
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple()):
            if len(names) > MOST_NAMES:
                return f"more than {MOST_NAMES} values assigned at once: write a line for each"
    return None


def _find_comprehension_fault(node: Comprehension) -> str | None:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if _holds(node, ast.NamedExpr):
        return "`:=` inside a comprehension: write a loop"
    if lines > 1 and _holds(node, ast.IfExp, *COMPREHENSIONS):
        return "a comprehension inside another, or with a conditional expression: write a loop"
    conditions = [test for loop in node.generators for test in loop.ifs]
    if lines > MOST_LINES and conditions:
        return f"a comprehension with a condition on more than {MOST_LINES} lines: write a loop"
    return None


def _holds(outer: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(node, kinds) for node in ast.walk(outer) if node is not outer)


def main() -> int:
    count = 0
    for folder in sys.argv[1:]:
        for path in sorted(Path(folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for line, fault in find_dense_expressions(tree):
                print(f"{path}:{line}: {fault}")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
