"""What an argument does, in upstream's own words: read from its source when asked, never stored."""

import ast
import inspect
import re

from launcher.upstream.locate import Upstream
from launcher.upstream.schema import Field


def find_meaning(source: Upstream, field: Field) -> str | None:
    """Upstream's help text of an argument; None if it has none, or only the snapshot is here.

    That is the `help` of the field's metadata, else the text below the field, else the class's
    docstring.
    """
    label, _, line = field.where.rpartition(":")
    package, _, path = label.partition("/")
    tree = source.packages.get(package)
    raw = None if tree is None else tree.read(path)
    try:
        module = ast.parse(raw or b"")
    except (SyntaxError, ValueError):
        return None
    for owner in module.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for number, node in enumerate(owner.body):
            match node:
                case ast.AnnAssign(target=ast.Name(id=field.name), lineno=first, end_lineno=last):
                    if owner.name == field.owner or first <= int(line or 0) <= (last or 0):
                        return _read_text(owner, number, node, field.name)
    return None


def _read_text(owner: ast.ClassDef, number: int, node: ast.AnnAssign, name: str) -> str | None:
    """What a class says about its field, which is the statement of this number, in one line."""
    text = _read_help(node) or _read_text_below(owner, number) or _read_docstring_entry(owner, name)
    return " ".join(text.split()) if text else None


def _read_help(node: ast.AnnAssign) -> str | None:
    """`metadata={"help": ...}` of a `field(...)`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            for key, value in zip(inner.keys, inner.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "help":
                    return _join_text(value)
    return None


def _join_text(node: ast.AST) -> str | None:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first = _join_text(left)
            second = _join_text(right)
            return None if first is None or second is None else first + second
        case ast.Constant(value=str() as text):
            return text
    return None


def _read_text_below(owner: ast.ClassDef, number: int) -> str | None:
    """A text that stands alone after the field."""
    match owner.body[number + 1 :]:
        case [ast.Expr(value=value), *_]:
            return _join_text(value)
    return None


def _read_docstring_entry(owner: ast.ClassDef, name: str) -> str | None:
    """The entry `name (type):` of the class's docstring."""
    text = inspect.cleandoc(ast.get_docstring(owner) or "")
    entry = re.search(rf"^( *){name} \(.*\):\n((?:\1 +.*\n?)+)", text, re.M)
    return entry[2] if entry else None
