"""What names may hold on the path of an entry script: the values that `walk` follows, its frames, and
what is known of classes and modules.

A set of values says what an expression may be. The empty set is anything else; `UNKNOWN` beside
others says that it may also be anything else, so that no condition is drawn from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.upstream.schema import Read, Refusal
from launcher.upstream.source import conditions
from launcher.upstream.source.packages import UNKNOWN as NO_VALUE
from launcher.upstream.source.packages import Module, Sources, enum_members

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
    Args
    | Items
    | Default
    | Unknown
    | Object
    | Class
    | Function
    | Partial
    | ModuleName
    | Several
    | Keywords
    | Text
    | Super
)
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
    shape: FunctionFacts
    env: dict[str, Values] = field(default_factory=dict)
    # what its parameters got in any call
    given: dict[str, Values] = field(default_factory=dict)
    outer: Frame | None = None
    owner: str | None = None
    bound: Value | None = None
    returned: set[Value] = field(default_factory=set)
    node: FunctionNode | None = None
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

    def home(self) -> Frame:
        """The frame in which an assignment here takes effect: a comprehension has no names of its own."""
        frame = self
        while frame.outer is not None and frame.shape.inline:
            frame = frame.outer
        return frame

    def chain(self) -> Iterator[Frame]:
        """This frame and those around it."""
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
    where: str = ""

    def everything(self) -> Iterator[Values]:
        """All values, one by one."""
        yield from self.positional
        yield from self.named.values()
        if self.rest:
            yield self.rest


@dataclass(slots=True, eq=False)
class FunctionFacts:
    """What the body of a function says about itself, before anything is known of its callers."""

    # names that are given a value more than once: what they hold is not one expression
    assigned: frozenset[str] = frozenset()
    globals: frozenset[str] = frozenset()
    # names that it uses, and with attributes
    names: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()
    # a generator runs only as far as somebody asks
    generator: bool = False
    # one `return`, its last statement
    single: bool = False
    # a comprehension: no scope of its own for assignments by `:=`
    inline: bool = False


INLINE = FunctionFacts(inline=True)


def shape_of(body: Sequence[ast.stmt], parameters: Iterable[str] = ()) -> FunctionFacts:
    """The shape of a function's, or a module's, statements."""
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
    last = body[-1] if body else None
    return FunctionFacts(
        assigned=frozenset(twice | shared),
        globals=frozenset(shared),
        names=frozenset(names),
        mentioned=frozenset(names | attributes),
        generator=generator,
        single=isinstance(last, ast.Return) and sum(_returns(body)) == 1,
    )


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


def contents(values: Iterable[Value]) -> Values:
    """What any entry of the containers among these values may be."""
    parts: list[Values] = []
    for value in values:
        if isinstance(value, Several):
            parts += value.items
        elif isinstance(value, Keywords):
            parts += [part for _, part in value.items]
    return without_texts(merged(*parts)) if parts else NOTHING


def leaves(values: Iterable[Value]) -> Values:
    """The values with what containers hold, at any depth, in the place of the containers."""
    found: set[Value] = set()
    for value in values:
        match value:
            case Several(items=items):
                found.update(leaves(merged(*items)))
            case Keywords(items=pairs):
                found.update(leaves(merged(*(part for _, part in pairs))))
            case _:
                found.add(value)
    return without_texts(found)


def listed(values: Iterable[Value]) -> Values:
    """A list of such values, of any length."""
    return frozenset({Several((leaves(values),), exact=False)})


def shallow(values: Values) -> Values:
    """The values, those that are nested deeply without their structure: nothing grows for ever."""
    if any(_depth(value) > _MAX_DEPTH for value in values):
        return listed(values)
    return values


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


def entries(values: Iterable[Value]) -> Values:
    """What a loop over these values meets: the entries of containers, anything else as it is."""
    known = frozenset(values)
    rest = {v for v in known if not isinstance(v, Several | Keywords | Text | Items | Function)}
    return contents(known) | rest


def without_texts(values: Iterable[Value]) -> Values:
    """The values without expressions, which are known no longer."""
    known = frozenset(values)
    texts = {value for value in known if isinstance(value, Text)}
    return known - texts | {UNKNOWN} if texts else known


def objects(values: Iterable[Value]) -> Values:
    """What is worth following beyond the place where it was made: no texts, nothing else alone."""
    known = frozenset(value for value in values if not isinstance(value, Text))
    return known if known != {UNKNOWN} else NOTHING


def forgotten(values: Values, names: Iterable[str]) -> Values:
    """The values after arguments got others: expressions over those are known no longer."""
    changed = set(names)
    stale = {v for v in values if isinstance(v, Text) and conditions.names(v.text) & changed}
    return values - stale | {UNKNOWN} if stale else values


def mapping(pairs: Mapping[str, Values]) -> Keywords:
    """A table with texts as keys."""
    return Keywords(tuple(pairs.items()))


# --- classes, modules and names -------------------------------------------------------------------

_Method = tuple[Module, ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]
_Key = tuple[str, str]


def mark(node: ast.expr) -> str:
    """The last part of a decorator's or a function's name."""
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def last(node: ast.expr) -> str:
    """The last part of a function's dotted name; nothing where it has none."""
    return "" if isinstance(node, ast.Call) else mark(node)


@dataclass(slots=True)
class Lookup:
    """What is known of the classes and modules on the path, and of what their instances hold."""

    sources: Sources
    classes: Sequence[_Key]
    # what an attribute of an instance, or a name of a module, may hold
    attributes: dict[tuple[str, str, str], set[Value]] = field(default_factory=dict)
    globals: dict[_Key, set[Value]] = field(default_factory=dict)
    # classes whose instances have been given the arguments to keep
    keepers: set[_Key] = field(default_factory=set)
    ancestors: dict[_Key, int] = field(default_factory=dict)
    _orders: dict[_Key, list[tuple[Module, ast.ClassDef]]] = field(default_factory=dict)
    _methods: dict[tuple[_Key, str | None, str], _Method | None] = field(default_factory=dict)
    _annotations: dict[ast.arg, Values] = field(default_factory=dict)
    _shapes: dict[ast.AST, FunctionFacts] = field(default_factory=dict)
    _literals: dict[tuple[str, str], ast.Constant | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Find the classes whose annotations mean the parsed dataclasses: these and their bases."""
        for index, key in enumerate(self.classes):
            for owner, node in self.order(key):
                self.ancestors.setdefault((owner.name, node.name), index)

    def known(self) -> int:
        """How much has been learnt of what is kept where; it only ever grows."""
        tables = (self.attributes, self.globals)
        return sum(len(values) for table in tables for values in table.values()) + len(self.keepers)

    # --- classes ----------------------------------------------------------------------------------

    def order(self, key: _Key) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases, the class itself first."""
        if key not in self._orders:
            module = self.sources.module(key[0])
            node = module.classes.get(key[1]) if module else None
            line = self.sources.linearised(module, node) if module and node else []
            self._orders[key] = line[::-1]
        return self._orders[key]

    def class_of(self, value: Value) -> _Key | None:
        """The class of an object, or the class itself."""
        match value:
            case Args(index):
                return self.classes[index]
            case Object(module, name) | Class(module, name):
                return module, name
        return None

    def method(self, value: Value, name: str, *, after: str | None = None) -> _Method | None:
        """A method by name, in the order in which Python looks; `after` a class, for `super()`."""
        key = self.class_of(value)
        if key is None:
            return None
        lookup = (key, after, name)
        if lookup not in self._methods:
            self._methods[lookup] = self._find_method(key, name, after)
        return self._methods[lookup]

    def _find_method(self, key: _Key, name: str, after: str | None) -> _Method | None:
        order = self.order(key)
        names = [f"{module.name}:{node.name}" for module, node in order]
        start = names.index(after) + 1 if after in names else 0
        for module, node in order[start:]:
            found = None
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    marks = {mark(one) for one in statement.decorator_list}
                    if statement.name == name and "setter" not in marks:
                        found = statement
            if found is not None:
                return module, node, found
        return None

    def bound(self, value: Value, name: str, *, after: str | None = None) -> set[Value]:
        """The method of an object or class, with what its first parameter holds."""
        found = self.method(value, name, after=after)
        if found is None:
            return set()
        module, node, statement = found
        marks = {mark(one) for one in statement.decorator_list}
        first: Value | None = None if isinstance(value, Class) else value
        if "staticmethod" in marks:
            first = None
        elif "classmethod" in marks:
            key = self.class_of(value)
            first = Class(*key) if key else None
        return {Function(module.name, statement, first, f"{module.name}:{node.name}")}

    def stored(self, value: Value, name: str) -> set[Value]:
        """What any class of an instance's line has put into an attribute."""
        key = self.class_of(value)
        values: set[Value] = set()
        if key is not None:
            for module, node in self.order(key):
                values |= self.attributes.get((module.name, node.name, name), set())
            values |= self.attributes.get((*key, name), set())
        return values

    def keep(self, value: Value, name: str, values: Values) -> None:
        """Remember what an attribute of an instance may hold."""
        key = self.class_of(value)
        if key is not None:
            kept = without_texts(values) or {UNKNOWN}
            self.attributes.setdefault((*key, name), set()).update(kept)
            if self.carries(kept):
                self.keepers.add(key)

    def carries(self, values: Iterable[Value]) -> bool:
        """Whether a value is, holds or can get at one of the parsed dataclasses."""
        for value in values:
            match value:
                case Args() | Items():
                    return True
                case Object():
                    if self.keeps(value):
                        return True
                case Function(bound=bound, scope=scope):
                    if scope is not None or (bound is not None and self.carries({bound})):
                        return True
                case Partial(function=function, positional=items, named=pairs):
                    parts = [*items, *(values for _, values in pairs)]
                    if self.carries({function}) or any(self.carries(part) for part in parts):
                        return True
                case Several(items=items):
                    if any(self.carries(part) for part in items):
                        return True
                case Keywords(items=pairs):
                    if any(self.carries(part) for _, part in pairs):
                        return True
        return False

    def keeps(self, made: Object) -> bool:
        """Whether an object has been given the arguments to keep."""
        key = (made.module, made.name)
        line = self.order(key)
        return key in self.keepers or any((m.name, n.name) in self.keepers for m, n in line)

    # --- names ------------------------------------------------------------------------------------

    def literal(self, module: Module, node: ast.expr) -> ast.Constant | None:
        """A constant or a member of an enum, by its value."""
        key = (module.name, ast.unparse(node))
        if key not in self._literals:
            self._literals[key] = self._literal(module, node)
        return self._literals[key]

    def _literal(self, module: Module, node: ast.expr) -> ast.Constant | None:
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
        if value is NO_VALUE or not isinstance(value, str | int | float | bool | None):
            return None
        return ast.Constant(value)

    def is_enum(self, module: Module, node: ast.expr) -> bool:
        """Whether a name stands for an enum."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        found = self.sources.resolve_class(module, node)
        return found is not None and enum_members(self.sources, *found) is not None

    def annotated(self, parameter: ast.arg, module: Module) -> Values:
        """What a parameter holds by its annotation: one of the parsed dataclasses, or a base of one."""
        if parameter.annotation is None:
            return NOTHING
        if parameter not in self._annotations:
            self._annotations[parameter] = self._by_annotation(parameter.annotation, module)
        return self._annotations[parameter]

    def _by_annotation(self, node: ast.expr | None, module: Module) -> Values:
        match node:
            case None:
                return NOTHING
            case ast.Constant(value=str() as quoted):
                try:
                    return self._by_annotation(ast.parse(quoted, mode="eval").body, module)
                except SyntaxError:
                    return NOTHING
            case ast.BinOp(left=left, right=right):
                return self._by_annotation(left, module) | self._by_annotation(right, module)
            case ast.Subscript(value=owner, slice=inner):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if mark(owner) in {"Optional", "Union", "Annotated", "Final"}:
                    return NOTHING.union(*(self._by_annotation(part, module) for part in parts))
                return NOTHING
        found = self.sources.resolve_class(module, node)
        if found is None or (found[0].name, found[1].name) not in self.ancestors:
            return NOTHING
        return frozenset({Args(self.ancestors[found[0].name, found[1].name])})

    def shape(self, node: ast.AST) -> FunctionFacts:
        """The shape of a function or of a module."""
        if node not in self._shapes:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    shape = shape_of(node.body, [p.arg for p in parameters_of(node.args)])
                case ast.Lambda():
                    shape = shape_of([ast.Expr(node.body)], [p.arg for p in parameters_of(node.args)])
                case ast.Module():
                    shape = shape_of(node.body)
                case _:
                    shape = FunctionFacts()
            self._shapes[node] = shape
        return self._shapes[node]


def by_place(read: Read | Refusal) -> tuple[str, int, tuple[str, ...]]:
    """For sorting: file, line, conditions."""
    file, _, line = read.where.rpartition(":")
    return file, int(line), read.when


def followable(values: Iterable[Value]) -> list[Value]:
    """Functions among these values, also inside containers."""
    functions: list[Value] = []
    for value in values:
        match value:
            case Function() | Partial():
                functions.append(value)
            case Several(items=items):
                functions += [one for part in items for one in followable(part)]
            case Keywords(items=pairs):
                functions += [one for _, part in pairs for one in followable(part)]
    return functions


def carried(values: Iterable[Values]) -> Values:
    """What of the values handed to somebody who is not followed may come back."""
    found = {value for part in values for value in leaves(part)}
    return frozenset(v for v in found if isinstance(v, Args | Items | Object))
