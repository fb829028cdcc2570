"""What names may hold on the path of an entry script: the values that `walk` follows, and its frames.

A set of values says what an expression may be. The empty set is anything else; `UNKNOWN` beside
others says that it may also be anything else, so that no condition is drawn from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher import conditions
from launcher.sources import Module

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class Args:
    """An object of the parsed dataclasses, by its place among them."""

    index: int


@dataclass(frozen=True, slots=True)
class Items:
    """The attributes of such an object as a mapping: `vars(args)`, `asdict(args)`."""

    index: int


@dataclass(frozen=True, slots=True)
class Default:
    """None, or an instance of a parsed dataclass that the source makes itself: not the stage's."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Anything else, beside the other values of a set."""


@dataclass(frozen=True, slots=True)
class Object:
    """An instance of any other class."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Class:
    """A class that is none of the parsed dataclasses, or one of them."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function; `bound` is what its first parameter holds, `owner` the class that defines it.

    `scope` is the frame that a function inside a function sees.
    """

    module: str
    node: FunctionNode
    bound: Value | None = None
    owner: str | None = None
    scope: Frame | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """A function with its first arguments."""

    function: Value
    positional: tuple[Values, ...] = ()
    named: tuple[tuple[str, Values], ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module of the packages that are read."""

    name: str


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple or list; `exact` where its entries stand in this order and are all there are."""

    items: tuple[Values, ...]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Keywords:
    """A mapping with these keys: what `**kwargs` collects, a table with texts as keys."""

    items: tuple[tuple[str, Values], ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A value that is an expression over argument names."""

    text: str


@dataclass(frozen=True, slots=True)
class Super:
    """What `super()` is inside a method of `owner`."""

    bound: Value
    owner: str


Value = (
    Args | Items | Default | Unknown | Object | Class | Function | Partial | ModuleName | Several
    | Keywords | Text | Super
)  # fmt: skip
Values = frozenset[Value]
NOTHING: Values = frozenset()
UNKNOWN = Unknown()
DEFAULT = Default()
# containers inside containers
_MAX_DEPTH = 3


@dataclass(slots=True, eq=False)
class Frame:
    """One function being walked: where its names come from, and what they may hold."""

    module: Module
    shape: Shape
    env: dict[str, Values] = field(default_factory=dict)
    # what its parameters got in any call
    given: dict[str, Values] = field(default_factory=dict)
    outer: Frame | None = None
    owner: str | None = None
    bound: Value | None = None
    returned: set[Value] = field(default_factory=set)
    # the functions inside it, with the conditions under which they are defined
    nested: list[tuple[Function, frozenset[str]]] = field(default_factory=list)
    node: FunctionNode | None = None
    # names that were arguments' values once
    aliases: dict[str, set[str]] = field(default_factory=dict)
    # it may end the script
    exits: bool = False
    # the level of the script itself
    top: bool = False

    def find(self, name: str) -> Values | None:
        """What a local name may hold, here or in a function around; None for any other name."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.env:
                return frame.env[name]
            frame = frame.outer
        return None

    def home(self, name: str) -> Frame:
        """The frame in which an assignment to a name here takes effect."""
        frame = self
        while frame.outer is not None and (frame.shape.inline or name in frame.shape.nonlocals):
            frame = frame.outer
            if not frame.shape.inline and name in frame.env:
                break
        return frame

    def chain(self) -> Iterator[Frame]:
        """This frame and those around it."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.outer


@dataclass(slots=True)
class Given:
    """What a call hands over; any parameter may get one of `rest`, and an argument of `items`."""

    positional: list[Values] = field(default_factory=list)
    named: dict[str, Values] = field(default_factory=dict)
    rest: Values = NOTHING
    items: bool = False
    where: str = ""

    def everything(self) -> Iterator[Values]:
        """All values, one by one."""
        yield from self.positional
        yield from self.named.values()
        if self.rest:
            yield self.rest


@dataclass(slots=True, eq=False)
class Shape:
    """What the body of a function says about itself, before anything is known of its callers."""

    # names that are given a value more than once: what they hold is not one expression
    assigned: frozenset[str] = frozenset()
    globals: frozenset[str] = frozenset()
    nonlocals: frozenset[str] = frozenset()
    # names that it uses, with attributes, and those that are more than called
    names: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()
    passed_on: frozenset[str] = frozenset()
    # a generator runs only as far as somebody asks
    generator: bool = False
    # it computes something and changes nothing
    plain: bool = False
    # one `return`, its last statement
    single: bool = False
    # a comprehension: no scope of its own for assignments by `:=`
    inline: bool = False


INLINE = Shape(inline=True)


def shape_of(body: Sequence[ast.stmt], parameters: Iterable[str] = ()) -> Shape:
    """The shape of a function's, or a module's, statements."""
    seen, twice = set(parameters), set[str]()
    shared: dict[type, set[str]] = {ast.Global: set(), ast.Nonlocal: set()}
    mentioned, called, loaded = set[str](), set[ast.AST](), list[ast.Name]()
    generator, plain = False, True
    for node in (inner for statement in body for inner in ast.walk(statement)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                mentioned.add(name)
                loaded.append(node)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                (twice if name in seen else seen).add(name)
            case ast.Attribute(attr=name, ctx=context):
                mentioned.add(name)
                plain = plain and isinstance(context, ast.Load)
            case ast.Call(func=ast.Name() as function):
                called.add(function)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                shared[type(node)] |= set(names)
                twice |= set(names)
                plain = False
            case ast.Yield() | ast.YieldFrom():
                generator, plain = True, False
            case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name):
                (twice if name in seen else seen).add(name)
            case ast.Expr(value=value) if not isinstance(value, ast.Constant):
                plain = False
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.With() | ast.AsyncWith():
                plain = False
    last = body[-1] if body else None
    return Shape(
        assigned=frozenset(twice), globals=frozenset(shared[ast.Global]),
        nonlocals=frozenset(shared[ast.Nonlocal]), mentioned=frozenset(mentioned),
        names=frozenset(node.id for node in loaded),
        passed_on=frozenset(node.id for node in loaded if node not in called),
        generator=generator, plain=plain,
        single=isinstance(last, ast.Return) and sum(_returns(body)) == 1,
    )  # fmt: skip


def _returns(body: Sequence[ast.stmt]) -> Iterator[int]:
    for statement in body:
        for node in within(statement):
            if isinstance(node, ast.Return):
                yield 1


def within(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all that it holds, except the insides of functions and classes."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(one))


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    """The named parameters, in order."""
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def merged(*sides: Iterable[Value]) -> Values:
    """One of several: where a side is anything else, so may the whole be."""
    sets = [frozenset(side) for side in sides]
    whole = frozenset[Value]().union(*sets)
    return whole | {UNKNOWN} if whole and not all(sets) else whole


def contents(held: Iterable[Value]) -> Values:
    """What any entry of the containers among these values may be."""
    parts: list[Values] = []
    for value in held:
        if isinstance(value, Several):
            parts += value.items
        elif isinstance(value, Keywords):
            parts += [part for _, part in value.items]
    return without_texts(merged(*parts)) if parts else NOTHING


def leaves(held: Iterable[Value]) -> Values:
    """The values with what containers hold, at any depth, in the place of the containers."""
    told: set[Value] = set()
    for value in held:
        match value:
            case Several(items=items):
                told.update(leaves(merged(*items)))
            case Keywords(items=pairs):
                told.update(leaves(merged(*(part for _, part in pairs))))
            case _:
                told.add(value)
    return without_texts(told)


def listed(held: Iterable[Value]) -> Values:
    """A list of such values, of any length."""
    return frozenset({Several((leaves(held),), exact=False)})


def shallow(held: Values) -> Values:
    """The values, those that are nested deeply without their structure: nothing grows for ever."""
    if any(_depth(value) > _MAX_DEPTH for value in held):
        return listed(held)
    return held


def _depth(value: Value) -> int:
    match value:
        case Several(items=items):
            parts = [one for part in items for one in part]
        case Keywords(items=pairs):
            parts = [one for _, part in pairs for one in part]
        case Partial(function=function, positional=items, named=pairs):
            parts = [function, *(one for part in items for one in part)]
            parts += [one for _, part in pairs for one in part]
        case Function(bound=bound) if bound is not None:
            parts = [bound]
        case _:
            return 0
    return 1 + max(map(_depth, parts), default=0)


def entries(held: Iterable[Value]) -> Values:
    """What a loop over these values meets: the entries of containers, anything else as it is."""
    known = frozenset(held)
    rest = {v for v in known if not isinstance(v, Several | Keywords | Text | Items | Function)}
    return contents(known) | rest


def without_texts(held: Iterable[Value]) -> Values:
    """The values without expressions, which are known no longer."""
    known = frozenset(held)
    texts = {value for value in known if isinstance(value, Text)}
    return known - texts | {UNKNOWN} if texts else known


def objects(held: Iterable[Value]) -> Values:
    """What is worth following beyond the place where it was made: no texts, nothing else alone."""
    known = frozenset(value for value in held if not isinstance(value, Text))
    return known if known != {UNKNOWN} else NOTHING


def forgotten(held: Values, names: Iterable[str]) -> Values:
    """The values after arguments got others: expressions over those are known no longer."""
    changed = set(names)
    stale = {v for v in held if isinstance(v, Text) and conditions.names(v.text) & changed}
    return held - stale | {UNKNOWN} if stale else held


def mapping(pairs: Mapping[str, Values]) -> Keywords:
    """A table with texts as keys."""
    return Keywords(tuple(pairs.items()))
