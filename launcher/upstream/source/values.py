"""What names may hold on the path of an entry script: the values that `Walk` follows, its frames, and
what is known of classes and modules.

A set of values says what an expression may be. The empty set is anything else; `UNKNOWN` beside
others says that it may also be anything else, so that no condition is drawn from it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from launcher.upstream.source import conditions
from launcher.upstream.source.packages import UNKNOWN as NO_VALUE
from launcher.upstream.source.packages import Module, Sources, enum_members, mark

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]
"""A class: its module and its name."""


class Value:
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Args(Value):
    """An object of the parsed dataclasses, by its place among them."""

    index: int


@dataclass(frozen=True, slots=True)
class Items(Value):
    """The attributes of such an object as a mapping: `vars(args)`, `asdict(args)`."""

    index: int


@dataclass(frozen=True, slots=True)
class Default(Value):
    """None, or an instance of a parsed dataclass that the source makes itself: not the stage's."""


@dataclass(frozen=True, slots=True)
class Unknown(Value):
    """Anything else, beside the other values of a set."""


@dataclass(frozen=True, slots=True)
class Object(Value):
    """An instance of any other class."""

    key: Key


@dataclass(frozen=True, slots=True)
class Class(Value):
    key: Key


@dataclass(frozen=True, slots=True)
class Function(Value):
    """A function; `bound` is what its first parameter holds, `owner` the class that defines it.

    `scope` is the frame that a function inside a function sees.
    """

    module: str
    node: FunctionNode
    bound: Value | None = None
    owner: str | None = None
    scope: Frame | None = None


@dataclass(frozen=True, slots=True)
class ModuleName(Value):
    name: str


@dataclass(frozen=True, slots=True)
class Several(Value):
    """A tuple, list or mapping; `exact` where its entries stand in this order and are all there are.

    `keys` are those of a mapping with texts as keys, such as what `**kwargs` collects.
    """

    items: tuple[Values, ...]
    exact: bool = True
    keys: tuple[str, ...] | None = None

    @property
    def pairs(self) -> dict[str, Values]:
        return dict(zip(self.keys or (), self.items, strict=False))


@dataclass(frozen=True, slots=True)
class Text(Value):
    """A value that is an expression over argument names."""

    text: str


@dataclass(frozen=True, slots=True)
class Super(Value):
    """What `super()` is inside a method of `owner`."""

    bound: Value
    owner: str


Values = frozenset[Value]
NOTHING: Values = frozenset()
UNKNOWN = Unknown()
DEFAULT = Default()
ANY = "*"
"""In the place of an attribute's name: any of an object's."""
_MAX_DEPTH = 3  # containers inside containers


@dataclass(slots=True, eq=False)
class Frame:
    """One function being walked: where its names come from, and what they may hold."""

    module: Module
    shape: FunctionFacts
    env: dict[str, Values] = field(default_factory=dict)
    given: dict[str, Values] = field(default_factory=dict)  # what its parameters got in any call
    outer: Frame | None = None
    owner: str | None = None
    bound: Value | None = None
    returned: set[Value] = field(default_factory=set)
    node: FunctionNode | None = None
    top: bool = False  # the level of the script itself

    def find(self, name: str) -> Values | None:
        """What a local name may hold, here or in a function around; None for any other name."""
        return next((frame.env[name] for frame in self.chain() if name in frame.env), None)

    def chain(self) -> Iterator[Frame]:
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.outer


@dataclass(slots=True)
class Given:
    """What a call hands over; any parameter may get one of `rest`."""

    positional: list[Values] = field(default_factory=list)
    named: dict[str, Values] = field(default_factory=dict)
    rest: Values = NOTHING

    def everything(self) -> Iterator[Values]:
        yield from (*self.positional, *self.named.values(), *([self.rest] if self.rest else []))


@dataclass(slots=True, eq=False)
class FunctionFacts:
    """What the body of a function says about itself, before anything is known of its callers."""

    # names that are given a value more than once: what they hold is not one expression
    assigned: frozenset[str] = frozenset()
    globals: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()  # that it uses
    mentioned: frozenset[str] = frozenset()  # these, and attributes
    generator: bool = False  # a generator runs only as far as somebody asks
    single: bool = False  # one `return`, its last statement
    refuses: bool = False  # it raises or asserts something itself


def shape_of(body: Sequence[ast.stmt], parameters: Iterable[str] = ()) -> FunctionFacts:
    bound, twice, shared = set(parameters), set[str](), set[str]()
    names, attributes, generator = set[str](), set[str](), False
    for node in (inner for statement in body for inner in ast.walk(statement)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                names.add(name)
            case (
                ast.Name(id=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=str() as name)
                | ast.MatchAs(name=str() as name)
            ):
                (twice if name in bound else bound).add(name)
            case ast.Attribute(attr=name):
                attributes.add(name)
            case ast.Global(names=listed):
                shared |= set(listed)
            case ast.Nonlocal(names=listed):
                twice |= set(listed)
            case ast.Yield() | ast.YieldFrom():
                generator = True
    own = [node for statement in body for node in within(statement)]
    returns = sum(isinstance(node, ast.Return) for node in own)
    return FunctionFacts(
        assigned=frozenset(twice | shared),
        globals=frozenset(shared),
        names=frozenset(names),
        mentioned=frozenset(names | attributes),
        generator=generator,
        single=returns == 1 and isinstance(body[-1], ast.Return),
        refuses=any(isinstance(node, ast.Raise | ast.Assert) for node in own),
    )


def within(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all that it holds, except the insides of functions and classes."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, FunctionNode | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(one))


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def merged(*sides: Iterable[Value]) -> Values:
    """One of several: where a side is anything else, so may the whole be."""
    sets = [frozenset(side) for side in sides]
    whole = NOTHING.union(*sets)
    return whole | {UNKNOWN} if whole and not all(sets) else whole


def contents(values: Iterable[Value]) -> Values:
    """What any entry of the containers among these values may be."""
    return without_texts(merged(*(part for value in values if isinstance(value, Several) for part in value.items)))


def leaves(values: Iterable[Value]) -> Values:
    """The values with what containers hold, at any depth, in the place of the containers."""
    found: set[Value] = set()
    for value in values:
        found |= leaves(merged(*value.items)) if isinstance(value, Several) else {value}
    return without_texts(found)


def listed(values: Iterable[Value]) -> Values:
    """A list of such values, of any length."""
    return frozenset({Several((leaves(values),), exact=False)})


def shallow(values: Values) -> Values:
    """The values, those that are nested deeply without their structure: nothing grows for ever."""
    return listed(values) if any(_depth(value) > _MAX_DEPTH for value in values) else values


def _depth(value: Value) -> int:
    match value:
        case Several(items=items):
            parts = [one for part in items for one in part]
        case Function(bound=bound) if bound is not None:
            parts = [bound]
        case _:
            return 0
    return 1 + max(map(_depth, parts), default=0)


def entries(values: Values) -> Values:
    """What a loop over these values meets: the entries of containers, anything else as it is."""
    return contents(values) | {v for v in values if not isinstance(v, Several | Text | Items | Function)}


def without_texts(values: Iterable[Value]) -> Values:
    """The values without expressions, which are known no longer."""
    known = frozenset(values)
    texts = {value for value in known if isinstance(value, Text)}
    return known - texts | {UNKNOWN} if texts else known


def objects(values: Iterable[Value]) -> Values:
    """What is worth following beyond the place where it was made: no texts, nothing else alone."""
    known = frozenset(value for value in values if not isinstance(value, Text))
    return known if known != {UNKNOWN} else NOTHING


def followable(values: Iterable[Value]) -> list[Value]:
    """Functions among these values, also inside containers."""
    functions: list[Value] = []
    for value in values:
        if isinstance(value, Function):
            functions.append(value)
        elif isinstance(value, Several):
            functions += [one for part in value.items for one in followable(part)]
    return functions


def carried(values: Iterable[Values]) -> Values:
    """What of the values handed to somebody who is not followed may come back."""
    return frozenset(v for part in values for v in leaves(part) if isinstance(v, Args | Items | Object))


_Method = tuple[Module, ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]
_Answer = TypeVar("_Answer")


def last(node: ast.expr) -> str:
    """The last part of a function's dotted name; nothing where it has none."""
    return "" if isinstance(node, ast.Call) else mark(node)


def remembered(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """A method of `Lookup` that is asked once for the same arguments."""

    @wraps(method)
    def ask(self: Lookup, *arguments: object) -> _Answer:
        key = (method.__name__, *arguments)
        if key not in self.answers:
            self.answers[key] = method(self, *arguments)
        answer: _Answer = self.answers[key]
        return answer

    return ask


@dataclass(slots=True)
class Lookup:
    """What is known of the classes and modules on the path, and of what their instances hold."""

    sources: Sources
    classes: Sequence[Key]
    # what an attribute of an instance, or a name of a module, may hold
    attributes: dict[tuple[Key, str], set[Value]] = field(default_factory=dict)
    globals: dict[Key, set[Value]] = field(default_factory=dict)
    keepers: set[Key] = field(default_factory=set)  # classes whose instances have been given the arguments to keep
    # the classes whose annotations mean the parsed dataclasses: these and their bases
    ancestors: dict[Key, int] = field(default_factory=dict)
    answers: dict[object, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, key in enumerate(self.classes):
            for owner, node in self.order(key):
                self.ancestors.setdefault((owner.name, node.name), index)

    def known(self) -> int:
        """How much has been learnt of what is kept where; it only ever grows."""
        kept = (*self.attributes.values(), *self.globals.values())
        return sum(map(len, kept)) + len(self.keepers)

    @remembered
    def order(self, key: Key) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases, the class itself first."""
        module = self.sources.module(key[0])
        node = module.classes.get(key[1]) if module else None
        return self.sources.linearised(module, node)[::-1] if module and node else []

    def class_of(self, value: Value) -> Key | None:
        match value:
            case Args(index):
                return self.classes[index]
            case Object(key) | Class(key):
                return key
        return None

    @remembered
    def method(self, key: Key, name: str, after: str | None) -> _Method | None:
        """A method by name, in the order in which Python looks; `after` a class, for `super()`."""
        order = self.order(key)
        names = [f"{module.name}:{node.name}" for module, node in order]
        start = names.index(after) + 1 if after in names else 0
        for module, node in order[start:]:
            found = [one for one in node.body if isinstance(one, FUNCTIONS) and one.name == name]
            found = [one for one in found if "setter" not in map(mark, one.decorator_list)]
            if found:
                return module, node, found[-1]
        return None

    def bound(self, value: Value, name: str, after: str | None = None) -> set[Value]:
        """The method of an object or class, with what its first parameter holds."""
        key = self.class_of(value)
        found = self.method(key, name, after) if key else None
        if key is None or found is None:
            return set()
        module, node, statement = found
        marks = {mark(one) for one in statement.decorator_list}
        first: Value | None = None if isinstance(value, Class) or "staticmethod" in marks else value
        if "classmethod" in marks:
            first = Class(key)
        return {Function(module.name, statement, first, f"{module.name}:{node.name}")}

    def stored(self, key: Key, name: str) -> set[Value]:
        """What any class of an instance's line has put into an attribute."""
        line = [(module.name, node.name) for module, node in self.order(key)]
        kept = (self.attributes.get((one, about), ()) for one in (key, *line) for about in (name, ANY))
        return set().union(*kept)

    def keep(self, key: Key, name: str, values: Values) -> None:
        """Remember what an attribute of an instance may hold."""
        kept = without_texts(values) or {UNKNOWN}
        self.attributes.setdefault((key, name), set()).update(kept)
        if self.carries(kept):
            self.keepers.add(key)

    def carries(self, values: Iterable[Value]) -> bool:
        """Whether a value is, holds or can get at one of the parsed dataclasses."""
        return any(map(self._carries, values))

    def _carries(self, value: Value) -> bool:
        match value:
            case Args() | Items():
                return True
            case Object(key):
                return self.keeps(key)
            case Function(bound=bound, scope=scope):
                return scope is not None or (bound is not None and self._carries(bound))
            case Several(items=items):
                return any(map(self.carries, items))
        return False

    def keeps(self, key: Key) -> bool:
        """Whether an object has been given the arguments to keep."""
        return key in self.keepers or any((m.name, n.name) in self.keepers for m, n in self.order(key))

    def literal(self, module: Module, node: ast.expr) -> ast.Constant | ast.Tuple | None:
        """A constant or a member of an enum, by its value; several of them as a tuple."""
        return self._literal(module.name, ast.unparse(node))

    @remembered
    def _literal(self, module_name: str, text: str) -> ast.Constant | ast.Tuple | None:
        module, node = self.sources.module(module_name), conditions.parsed(text)
        assert module is not None
        if isinstance(node, ast.Name):
            found = self.sources.resolve(module, node.id)
            if found is None or found[1] in self.shape(found[0].tree).globals:
                return None
        elif isinstance(node, ast.Attribute):
            owner = self.sources.module_of(module, node.value)
            if owner is not None:
                return self.literal(owner, ast.Name(node.attr, ast.Load()))
            known = self.sources.resolve_class(module, node.value)
            members = enum_members(self.sources, *known) if known is not None else None
            if members is not None and isinstance(members.get(node.attr), str | int | float):
                return ast.Constant(members[node.attr])
            return None
        value = self.sources.evaluate(module, node)
        if isinstance(value, list) and value and all(isinstance(one, str | int | float) for one in value):
            return ast.Tuple([ast.Constant(one) for one in value], ast.Load())
        if value is NO_VALUE or not isinstance(value, str | int | float | bool | None):
            return None
        return ast.Constant(value)

    def is_enum(self, module: Module, node: ast.expr) -> bool:
        found = self.sources.resolve_class(module, node)
        return found is not None and enum_members(self.sources, *found) is not None

    def annotated(self, parameter: ast.arg, module: Module) -> Values:
        """What a parameter holds by its annotation: one of the parsed dataclasses, or a base of one."""
        return self._by_annotation(parameter.annotation, module.name) if parameter.annotation else NOTHING

    @remembered
    def _by_annotation(self, node: ast.expr, module_name: str) -> Values:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = conditions.parsed(node.value)
        module = self.sources.module(module_name)
        assert module is not None
        named = (one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute))
        found = filter(None, (self.sources.resolve_class(module, one) for one in named))
        keys = ((owner.name, known.name) for owner, known in found)
        return frozenset(Args(self.ancestors[key]) for key in keys if key in self.ancestors)

    @remembered
    def shape(self, node: FunctionNode | ast.Module) -> FunctionFacts:
        if isinstance(node, ast.Module):
            return shape_of(node.body)
        body = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        return shape_of(body, [parameter.arg for parameter in parameters_of(node.args)])
