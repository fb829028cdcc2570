"""Questions about the syntax of functions and statements, whatever their names hold."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source.packages import Definition, mark

FunctionNode = Definition | ast.Lambda
LOOPS = ast.For | ast.AsyncFor | ast.While
LOGS = frozenset("debug info warning warning_once warning_rank0 error exception critical".split())
"""Methods of a logger."""
SHOWS = frozenset({"print", "pprint", "warn", "warn_once", "print_rank0"})
_LEAVES = ast.Return | ast.Break | ast.Continue


@dataclass(slots=True, eq=False)
class FunctionShape:
    """What the body of a function shows, whoever calls it."""

    # names that get a value more than once: what they hold is not one expression
    assigned: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # that it uses
    mentioned: set[str] = field(default_factory=set)  # these, and attributes
    generator: bool = False  # a generator runs only as far as somebody asks
    refuses: bool = False  # it raises or asserts something itself


def describe_function(body: Sequence[ast.stmt], parameters: Iterable[str] = ()) -> FunctionShape:
    shape = FunctionShape()
    bound = set(parameters)
    for statement in body:
        for node in ast.walk(statement):
            _add_node(shape, node, bound)
        # without what functions inside it do
        for node in walk_within(statement):
            shape.refuses = shape.refuses or isinstance(node, ast.Raise | ast.Assert)
    shape.assigned |= shape.globals
    shape.mentioned |= shape.names
    return shape


def _add_node(shape: FunctionShape, node: ast.AST, bound: set[str]) -> None:
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            shape.names.add(name)
        case (
            ast.Name(id=name)
            | ast.FunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.ExceptHandler(name=str() as name)
            | ast.MatchAs(name=str() as name)
        ):
            if name in bound:
                shape.assigned.add(name)
            bound.add(name)
        case ast.Attribute(attr=name):
            shape.mentioned.add(name)
        case ast.Global(names=names):
            shape.globals.update(names)
        case ast.Nonlocal(names=names):
            shape.assigned.update(names)
        case ast.Yield() | ast.YieldFrom():
            shape.generator = True


def walk_within(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all that it holds, except the insides of functions and classes."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, FunctionNode | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def list_parameters(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def find_root(node: ast.expr) -> ast.expr:
    """The `a` of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def take_last_name(node: ast.expr) -> str:
    """The last part of a function's dotted name; nothing if it has none."""
    return "" if isinstance(node, ast.Call) else mark(node)


def list_own_attributes(node: ast.AST) -> set[str]:
    """The attributes of `self` that an expression names."""
    names: set[str] = set()
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                names.add(name)
    return names


def is_property(node: FunctionNode) -> bool:
    if isinstance(node, ast.Lambda):
        return False
    return any(mark(decorator).endswith("property") for decorator in node.decorator_list)


def trains(loop: LOOPS) -> bool:
    """Whether a loop takes a gradient or a step itself."""
    for inner in walk_within(loop):
        match inner:
            case ast.Call(func=ast.Attribute(attr="backward" | "step")):
                return True
    return False


def may_leave(node: ast.stmt) -> bool:
    """Whether a statement may end its function, or a round of the loop around it."""
    # a loop's own `break` and `continue` lead to what stands behind it
    leaves = ast.Return if isinstance(node, LOOPS) else _LEAVES
    return any(isinstance(inner, leaves) for inner in walk_within(node))


def only_complains(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch does nothing but raise or warn."""
    complains = False
    for node in body:
        match node:
            case ast.Raise():
                complains = True
            case ast.If(body=inner, orelse=other) if only_complains([*inner, *other]):
                complains = True
            case ast.Expr(value=ast.Call(func=function)) if (
                take_last_name(function) in LOGS | SHOWS
            ):
                complains = True
            case ast.Assign(
                targets=[ast.Name()], value=ast.JoinedStr() | ast.Constant(value=str())
            ):
                # the text of the complaint
                continue
            case _:
                return False
    return complains


def refuses(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch ends in a `raise`, whatever happens in it."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    for statement in body:
        if any(isinstance(node, _LEAVES) for node in walk_within(statement)):
            return False
    return True
