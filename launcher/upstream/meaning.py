"""What an argument does, in upstream's own words: read from its source when somebody asks, never stored."""

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
    try:
        module = ast.parse((tree and tree.read(path)) or b"")
    except (SyntaxError, ValueError):
        return None
    for owner in (node for node in module.body if isinstance(node, ast.ClassDef)):
        for number, node in enumerate(owner.body):
            match node:
                case ast.AnnAssign(target=ast.Name(id=known.name), lineno=first, end_lineno=last):
                    if first <= int(line or 0) <= (last or 0) or owner.name == known.owner:
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
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = (_text(left), _text(right))
            return None if None in parts else "".join(map(str, parts))
        case ast.Constant(value=str() as text):
            return text
    return None


def _below(owner: ast.ClassDef, number: int) -> str | None:
    """A text that stands alone after the field."""
    after = owner.body[number + 1] if number + 1 < len(owner.body) else None
    return _text(after.value) if isinstance(after, ast.Expr) else None


def _listed(owner: ast.ClassDef, name: str) -> str | None:
    """The entry `name (type):` of the class's docstring."""
    text = inspect.cleandoc(ast.get_docstring(owner) or "")
    entry = re.search(rf"^( *){name} \(.*\):\n((?:\1 +.*\n?)+)", text, re.M)
    return entry[2] if entry else None
