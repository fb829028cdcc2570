"""What names may hold on the path of an entry script: values, sets of them, and frames.

A set of values says what an expression may be. The empty set is anything else; `UNKNOWN` beside
others says that it may also be anything else, so that no condition is drawn from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source.packages import Module
from launcher.upstream.source.syntax import FunctionNode, FunctionShape

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


def merge(*sides: Iterable[Value]) -> Values:
    """One of several: if a side is anything else, so may the whole be."""
    sets = [frozenset(side) for side in sides]
    whole = NOTHING.union(*sets)
    if whole and not all(sets):
        return whole | {UNKNOWN}
    return whole


def take_contents(values: Iterable[Value]) -> Values:
    """What any entry of the containers among these values may be."""
    parts: list[Values] = []
    for value in values:
        if isinstance(value, Container):
            parts += value.items
    return drop_texts(merge(*parts))


def take_leaves(values: Iterable[Value]) -> Values:
    """The values, each container replaced by what it holds, at any depth."""
    plain: set[Value] = set()
    for value in values:
        if isinstance(value, Container):
            plain |= take_leaves(merge(*value.items))
        else:
            plain.add(value)
    return drop_texts(plain)


def make_list(values: Iterable[Value]) -> Values:
    """A list of such values, of any length."""
    return frozenset({Container((take_leaves(values),), exact=False)})


def flatten_deep(values: Values) -> Values:
    """The values, those that are nested deeply without their structure: nothing grows for ever."""
    if any(_measure_depth(value) > _MAX_DEPTH for value in values):
        return make_list(values)
    return values


def _measure_depth(value: Value) -> int:
    inside: Values = NOTHING
    match value:
        case Container(items=items):
            inside = NOTHING.union(*items)
        case Function(bound=Value() as bound):
            inside = frozenset({bound})
        case _:
            return 0
    return 1 + max(map(_measure_depth, inside), default=0)


def take_entries(values: Values) -> Values:
    """What a loop over these values meets: the entries of containers, anything else as it is."""
    others = {v for v in values if not isinstance(v, Container | Text | Items | Function)}
    return take_contents(values) | others


def drop_texts(values: Iterable[Value]) -> Values:
    """The values without expressions, which are known no longer."""
    others: set[Value] = set()
    for value in values:
        others.add(UNKNOWN if isinstance(value, Text) else value)
    return frozenset(others)


def keep_objects(values: Iterable[Value]) -> Values:
    """What is worth following beyond the place where it was made: no texts, nothing else alone."""
    others = frozenset(value for value in values if not isinstance(value, Text))
    return NOTHING if others == {UNKNOWN} else others


def find_functions(values: Iterable[Value]) -> list[Value]:
    """Functions among these values, also inside containers."""
    functions: list[Value] = []
    for value in values:
        if isinstance(value, Function):
            functions.append(value)
        elif isinstance(value, Container):
            for part in value.items:
                functions += find_functions(part)
    return functions


def find_carried(sets: Iterable[Values]) -> Values:
    """What of the values handed to somebody who is not followed may come back."""
    values = take_leaves(value for part in sets for value in part)
    return frozenset(value for value in values if isinstance(value, Args | Items | Object))


def unpack(values: Values, index: int) -> Values:
    """What the target at `index` gets of a value that is unpacked."""
    parts: list[Values] = []
    for value in values:
        match value:
            case Container(items=items, exact=True) if len(items) > index:
                parts.append(items[index])
            case Container():
                parts.append(take_contents({value}))
            case Text() | Function():
                parts.append(NOTHING)
            case _:
                parts.append(frozenset({value}))
    return merge(*parts)


def pick_entry(container: Container, key: ast.expr) -> Values:
    items = container.items
    match key:
        case ast.Constant(value=int() as index) if container.exact:
            if -len(items) <= index < len(items):
                return items[index]
        case ast.Constant(value=str() as name) if name in container.pairs:
            return container.pairs[name]
    return take_contents({container}) | {UNKNOWN}


def mapping_of(pairs: Mapping[str, Values]) -> Values:
    return frozenset({Container(tuple(pairs.values()), exact=False, keys=tuple(pairs))})
