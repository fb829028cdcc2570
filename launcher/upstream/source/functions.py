"""A function or statement as text that changes only if its behaviour can.

Docstrings, comments, layout, bare calls of a logger and `if` statements that only guard such calls
are left out, so that two commits can be compared by meaning rather than by line.
"""

import ast

_LOGGERS = frozenset({"logger", "logging", "log", "_logger", "LOGGER"})
# a test without these only reads values: nothing is lost with it
_ACTS = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom


def normalise(node: ast.AST) -> str:
    """The text of a statement or an expression without docstrings, comments and log calls.

    The node itself stays as it is. "" for a statement that only logs.
    """
    text = ast.unparse(node)
    if isinstance(node, ast.expr):
        return text
    return ast.unparse(_Strip().visit(ast.parse(text)))


class _Strip(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) or _is_log_call(node.value) else node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        super().generic_visit(node)
        acts = any(isinstance(part, _ACTS) for part in ast.walk(node.test))
        return _fill_block(node) if node.body or node.orelse or acts else None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return _fill_block(super().generic_visit(node))


def _fill_block(node: ast.AST) -> ast.AST:
    """A block that lost every statement gets a `pass`, without which it would be no Python."""
    if not isinstance(node, ast.mod | ast.Match) and getattr(node, "body", None) == []:
        node.body = [ast.Pass()]  # type: ignore[attr-defined]
    return node


def _is_log_call(node: ast.expr) -> bool:
    """`print(...)`, `logger.info(...)`, `self.logger.info(...)`."""
    match node:
        case ast.Call(func=ast.Name(id="print")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name))) if (
            name in _LOGGERS
        ):
            return True
    return False
