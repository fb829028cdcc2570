"""What an argument does, in upstream's own words: read from its source when somebody asks, never stored."""

from __future__ import annotations

import ast
import inspect
import re

from launcher.upstream.locate import Upstream
from launcher.upstream.schema import Field


def meaning_of(source: Upstream, known: Field) -> str | None:
    """Upstream's help text of an argument; None where it has none, or where only the snapshot is here.

    That is the `help` of the field's metadata, else the text below the field, else the class's docstring.
    """
    label, _, line = known.where.rpartition(":")
    package, _, path = label.partition("/")
    tree = source.packages.get(package)
    raw = tree.read(path) if tree is not None else None
    try:
        module = ast.parse(raw or b"")
    except (SyntaxError, ValueError):
        return None
    for owner in module.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for number, node in enumerate(owner.body):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if node.target.id == known.name:
                here = node.lineno <= int(line or 0) <= (node.end_lineno or 0)
                if here or owner.name == known.owner:
                    text = _help(node) or _below(owner, number) or _listed(owner, known.name)
                    return " ".join(text.split()) if text else None
    return None


def _help(node: ast.AnnAssign) -> str | None:
    """`metadata={"help": ...}` of a `field(...)`."""
    for found in ast.walk(node):
        if isinstance(found, ast.Dict):
            for key, value in zip(found.keys, found.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "help":
                    return _text(value)
    return None


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _below(owner: ast.ClassDef, number: int) -> str | None:
    """A text that stands alone after the field."""
    after = owner.body[number + 1] if number + 1 < len(owner.body) else None
    return _text(after.value) if isinstance(after, ast.Expr) else None


def _listed(owner: ast.ClassDef, name: str) -> str | None:
    """The entry `name (type):` of the class's docstring."""
    text = inspect.cleandoc(ast.get_docstring(owner) or "")
    entry = re.search(rf"^( *){name} \(.*\):\n((?:\1 +.*\n?)+)", text, re.M)
    return entry[2] if entry else None
