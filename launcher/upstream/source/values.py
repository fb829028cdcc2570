"""What names may hold on the path of an entry script: values, frames, classes and modules.

A set of values says what an expression may be. The empty set is anything else; `UNKNOWN` beside
others says that it may also be anything else, so that no condition is drawn from it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import wraps
from typing import Any, TypeVar

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source import conditions
from launcher.upstream.source.packages import UNKNOWN as NO_VALUE
from launcher.upstream.source.packages import Module, Sources, enum_members, mark

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
ClassKey = tuple[Module, ast.ClassDef]


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

    key: ClassKey


@dataclass(frozen=True, slots=True)
class Class(Value):
    key: ClassKey


@dataclass(frozen=True, slots=True)
class Function(Value):
    """A function; `bound` is what its first parameter holds, `owner` the class that defines it.

    `scope` is the frame that a function inside a function sees.
    """

    module: Module
    node: FunctionNode
    bound: Value | None = None
    owner: ast.ClassDef | None = None
    scope: Frame | None = None


@dataclass(frozen=True, slots=True)
class ModuleValue(Value):
    module: Module


@dataclass(frozen=True, slots=True)
class Container(Value):
    """A tuple, list or mapping; `exact` if its entries stand in this order and are all there are.

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
    owner: ast.ClassDef


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
    shape: FunctionShape
    function: Function | None = None
    env: dict[str, Values] = field(default_factory=dict)
    parameters: dict[str, Values] = field(default_factory=dict)  # what they hold in any call
    returned: set[Value] = field(default_factory=set)
    top: bool = False  # the level of the script itself

    @property
    def bound(self) -> Value | None:
        return None if self.function is None else self.function.bound

    def find(self, name: str) -> Values | None:
        """What a local name may hold, also in a function around; None for any other name."""
        for frame in self.chain():
            if name in frame.env:
                return frame.env[name]
        return None

    def chain(self) -> Iterator[Frame]:
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = None if frame.function is None else frame.function.scope


@dataclass(slots=True)
class CallArguments:
    """What a call hands over; any parameter may get one of `rest`."""

    positional: list[Values] = field(default_factory=list)
    named: dict[str, Values] = field(default_factory=dict)
    rest: Values = NOTHING

    def sets(self) -> list[Values]:
        sets = [*self.positional, *self.named.values()]
        if self.rest:
            sets.append(self.rest)
        return sets


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


def shape_of(body: Sequence[ast.stmt], parameters: Iterable[str] = ()) -> FunctionShape:
    shape = FunctionShape()
    bound = set(parameters)
    for statement in body:
        for node in ast.walk(statement):
            _add_node(shape, node, bound)
    shape.assigned |= shape.globals
    shape.mentioned |= shape.names
    # without what functions inside it do
    inside = (node for statement in body for node in within(statement))
    shape.refuses = any(isinstance(node, ast.Raise | ast.Assert) for node in inside)
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


def within(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all that it holds, except the insides of functions and classes."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, FunctionNode | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def merged(*sides: Iterable[Value]) -> Values:
    """One of several: if a side is anything else, so may the whole be."""
    sets = [frozenset(side) for side in sides]
    whole = NOTHING.union(*sets)
    if whole and not all(sets):
        return whole | {UNKNOWN}
    return whole


def contents(values: Iterable[Value]) -> Values:
    """What any entry of the containers among these values may be."""
    parts: list[Values] = []
    for value in values:
        if isinstance(value, Container):
            parts += value.items
    return without_texts(merged(*parts))


def leaves(values: Iterable[Value]) -> Values:
    """The values, each container replaced by what it holds, at any depth."""
    plain: set[Value] = set()
    for value in values:
        if isinstance(value, Container):
            plain |= leaves(merged(*value.items))
        else:
            plain.add(value)
    return without_texts(plain)


def listed(values: Iterable[Value]) -> Values:
    """A list of such values, of any length."""
    return frozenset({Container((leaves(values),), exact=False)})


def shallow(values: Values) -> Values:
    """The values, those that are nested deeply without their structure: nothing grows for ever."""
    if any(_measure_depth(value) > _MAX_DEPTH for value in values):
        return listed(values)
    return values


def _measure_depth(value: Value) -> int:
    match value:
        case Container(items=items):
            return 1 + max((_measure_depth(inner) for part in items for inner in part), default=0)
        case Function(bound=Value() as bound):
            return 1 + _measure_depth(bound)
    return 0


def entries(values: Values) -> Values:
    """What a loop over these values meets: the entries of containers, anything else as it is."""
    others = {v for v in values if not isinstance(v, Container | Text | Items | Function)}
    return contents(values) | others


def without_texts(values: Iterable[Value]) -> Values:
    """The values without expressions, which are known no longer."""
    others: set[Value] = set()
    for value in values:
        others.add(UNKNOWN if isinstance(value, Text) else value)
    return frozenset(others)


def objects(values: Iterable[Value]) -> Values:
    """What is worth following beyond the place where it was made: no texts, nothing else alone."""
    others = frozenset(value for value in values if not isinstance(value, Text))
    return NOTHING if others == {UNKNOWN} else others


def functions_in(values: Iterable[Value]) -> list[Value]:
    """Functions among these values, also inside containers."""
    functions: list[Value] = []
    for value in values:
        if isinstance(value, Function):
            functions.append(value)
        elif isinstance(value, Container):
            for part in value.items:
                functions += functions_in(part)
    return functions


def carried(sets: Iterable[Values]) -> Values:
    """What of the values handed to somebody who is not followed may come back."""
    values = leaves(value for part in sets for value in part)
    return frozenset(value for value in values if isinstance(value, Args | Items | Object))


Method = tuple[Module, ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]
_Answer = TypeVar("_Answer")


def remembered(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """A method of `Lookup` that is asked once for the same arguments."""

    @wraps(method)
    def ask(self: Lookup, *arguments: object) -> _Answer:
        key = (method, *arguments)
        if key not in self.answers:
            self.answers[key] = method(self, *arguments)
        answer: _Answer = self.answers[key]
        return answer

    return ask


@dataclass(slots=True)
class Lookup:
    """What is known of the classes and modules on the path, and of what their instances hold."""

    sources: Sources
    classes: Sequence[ClassKey]
    # what an attribute of an instance, or a name of a module, may hold
    attributes: dict[tuple[ClassKey, str], set[Value]] = field(default_factory=dict)
    globals: dict[tuple[Module, str], set[Value]] = field(default_factory=dict)
    # classes whose instances have been given the arguments to keep
    keepers: set[ClassKey] = field(default_factory=set)
    # the classes whose annotations mean the parsed dataclasses: these and their bases
    ancestors: dict[ClassKey, int] = field(default_factory=dict)
    answers: dict[object, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, key in enumerate(self.classes):
            for ancestor in self.order(key):
                self.ancestors.setdefault(ancestor, index)

    def size(self) -> int:
        """How much has been learnt of what is kept where; it only ever grows."""
        kept = [*self.attributes.values(), *self.globals.values()]
        return sum(map(len, kept)) + len(self.keepers)

    @remembered
    def order(self, key: ClassKey) -> list[ClassKey]:
        """The class and its bases, the class itself first."""
        return self.sources.linearised(*key)[::-1]

    def class_of(self, value: Value) -> ClassKey | None:
        match value:
            case Args(index):
                return self.classes[index]
            case Object(key) | Class(key):
                return key
        return None

    @remembered
    def method(self, key: ClassKey, name: str, after: ast.ClassDef | None) -> Method | None:
        """A method by name, in the order in which Python looks; `after` a class, for `super()`."""
        order = self.order(key)
        nodes = [node for _, node in order]
        if after in nodes:
            order = order[nodes.index(after) + 1 :]
        for module, node in order:
            for statement in reversed(node.body):
                if not isinstance(statement, FUNCTIONS) or statement.name != name:
                    continue
                if "setter" not in map(mark, statement.decorator_list):
                    return module, node, statement
        return None

    def bound(self, value: Value, name: str, after: ast.ClassDef | None = None) -> set[Value]:
        """The method of an object or class, with what its first parameter holds."""
        key = self.class_of(value)
        method = None if key is None else self.method(key, name, after)
        if key is None or method is None:
            return set()
        module, owner, node = method
        marks = [mark(decorator) for decorator in node.decorator_list]
        first: Value | None = value
        if "classmethod" in marks:
            first = Class(key)
        elif isinstance(value, Class) or "staticmethod" in marks:
            first = None
        return {Function(module, node, first, owner)}

    def stored(self, key: ClassKey, name: str) -> set[Value]:
        """What any class of an instance's line has put into an attribute."""
        values: set[Value] = set()
        for ancestor in self.order(key):
            values |= self.attributes.get((ancestor, name), set())
            values |= self.attributes.get((ancestor, ANY), set())
        return values

    def keep(self, key: ClassKey, name: str, values: Values) -> None:
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
            case Container(items=items):
                return any(map(self.carries, items))
        return False

    def keeps(self, key: ClassKey) -> bool:
        """Whether an object has been given the arguments to keep."""
        return not self.keepers.isdisjoint(self.order(key))

    @remembered
    def literal(self, module: Module, node: ast.expr) -> ast.Constant | ast.Tuple | None:
        """A constant or a member of an enum, by its value; several of them as a tuple."""
        if isinstance(node, ast.Attribute):
            return self._find_literal_attribute(module, node)
        if isinstance(node, ast.Name):
            origin = self.sources.resolve(module, node.id)
            if origin is None or origin[1] in self.shape(origin[0].tree).globals:
                return None
        value = self.sources.evaluate(module, node)
        if (
            isinstance(value, list)
            and value
            and all(isinstance(v, str | int | float) for v in value)
        ):
            return ast.Tuple([ast.Constant(item) for item in value], ast.Load())
        if value is NO_VALUE or not isinstance(value, str | int | float | bool | None):
            return None
        return ast.Constant(value)

    def _find_literal_attribute(
        self, module: Module, node: ast.Attribute
    ) -> ast.Constant | ast.Tuple | None:
        owner = self.sources.module_of(module, node.value)
        if owner is not None:
            return self.literal(owner, ast.Name(node.attr, ast.Load()))
        members = self.members(module, node.value)
        if members is None:
            return None
        member = members.get(node.attr)
        return ast.Constant(member) if isinstance(member, str | int | float) else None

    def members(self, module: Module, node: ast.expr) -> dict[str, Any] | None:
        """Names and values of the enum that an expression names; None for anything else."""
        key = self.sources.resolve_class(module, node)
        return None if key is None else enum_members(self.sources, *key)

    def annotated(self, parameter: ast.arg, module: Module) -> Values:
        """What a parameter holds by its annotation: a parsed dataclass, or a base of one."""
        if parameter.annotation is None:
            return NOTHING
        return self._find_annotated_arguments(parameter.annotation, module)

    @remembered
    def _find_annotated_arguments(self, node: ast.expr, module: Module) -> Values:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = conditions.parsed(node.value)
        values: set[Value] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute):
                key = self.sources.resolve_class(module, inner)
                if key in self.ancestors:
                    values.add(Args(self.ancestors[key]))
        return frozenset(values)

    @remembered
    def shape(self, node: FunctionNode | ast.Module) -> FunctionShape:
        if isinstance(node, ast.Module):
            return shape_of(node.body)
        names = [parameter.arg for parameter in parameters_of(node.args)]
        body = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        return shape_of(body, names)
