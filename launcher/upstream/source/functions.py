"""The functions of a source file as text that only changes where their behaviour can.

Docstrings, comments, layout, bare calls of a logger and `if` statements that only guard such calls are
left out, so that two commits can be compared by meaning rather than by line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LOGGERS = frozenset({"logger", "logging", "log", "_logger", "LOGGER"})
# a test without these only reads values: nothing is lost with it
_ACTS = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)

_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Definition | ast.ClassDef


@dataclass(frozen=True, slots=True)
class UpstreamFunction:
    """One function or method: its qualified name (`Class.method`), its lines and its normalised text.

    `first` counts from 1 and includes decorators; `last` is inclusive.
    """

    name: str
    first: int
    last: int
    text: str


def functions_in(raw: bytes | str) -> tuple[UpstreamFunction, ...]:
    """Every function, method and nested function of a source file, in the order of the file.

    A name that is defined twice (an overload, a property's setter) stands here twice. Raises
    SyntaxError or ValueError for text that is no Python of this interpreter.
    """
    return tuple(_functions(ast.parse(raw), ""))


def texts_by_name(functions: tuple[UpstreamFunction, ...]) -> Mapping[str, str]:
    """The normalised text of each qualified name; of a name that is defined twice, both."""
    texts: dict[str, str] = {}
    for function in functions:
        earlier = texts.get(function.name)
        texts[function.name] = function.text if earlier is None else f"{earlier}\n\n{function.text}"
    return texts


def enclosing(functions: tuple[UpstreamFunction, ...], line: int) -> UpstreamFunction | None:
    """The innermost function that holds a line; None for a line of a class body or of the module."""
    holding = [function for function in functions if function.first <= line <= function.last]
    return min(holding, key=lambda function: function.last - function.first, default=None)


def normalised(node: ast.AST) -> str:
    """The text of a statement or an expression without docstrings, comments and log calls.

    The node itself stays as it is. "" for a statement that only logs.
    """
    if isinstance(node, ast.expr):
        return ast.unparse(node)
    copy = ast.parse(ast.unparse(node))
    return ast.unparse(_Strip().visit(copy))


def _functions(node: ast.AST, prefix: str) -> Iterator[UpstreamFunction]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Scope):
            yield from _functions(child, prefix)
            continue
        name = f"{prefix}{child.name}"
        if not isinstance(child, ast.ClassDef):
            lines = [child.lineno, *(decorator.lineno for decorator in child.decorator_list)]
            last = child.end_lineno or child.lineno
            yield UpstreamFunction(name=name, first=min(lines), last=last, text=normalised(child))
        yield from _functions(child, f"{name}.")


class _Strip(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return None
        if isinstance(node.value, ast.Call) and _is_log_call(node.value):
            return None
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        self.generic_visit(node)
        if node.body or node.orelse:
            return _filled(node)
        acts = any(isinstance(part, _ACTS) for part in ast.walk(node.test))
        return _filled(node) if acts else None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        return node if isinstance(node, ast.If) else _filled(node)


def _filled(node: ast.AST) -> ast.AST:
    """A block that lost every statement gets a `pass`, without which it would be no Python."""
    if not isinstance(node, ast.mod | ast.Match) and getattr(node, "body", None) == []:
        node.body = [ast.Pass()]  # type: ignore[attr-defined]
    return node


def _is_log_call(call: ast.Call) -> bool:
    """`print(...)`, `logger.info(...)`, `self.logger.info(...)`."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "print"
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    if isinstance(owner, ast.Attribute):
        return owner.attr in _LOGGERS
    return isinstance(owner, ast.Name) and owner.id in _LOGGERS
