"""Names on the path of an entry script -> the values that they stand for, over files and classes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.flow import (
    NOTHING,
    UNKNOWN,
    Args,
    Class,
    Frame,
    Function,
    FunctionNode,
    Items,
    Keywords,
    Object,
    Partial,
    Several,
    Shape,
    Value,
    Values,
    leaves,
    parameters_of,
    shape_of,
    without_texts,
)
from launcher.schema import Read, Refusal
from launcher.sources import UNKNOWN as NO_VALUE
from launcher.sources import Module, Sources, enum_members, top_level

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
    # the same by the attribute's name alone, for objects that are not followed
    loose: dict[str, set[Value]] = field(default_factory=dict)
    # classes whose instances have been given the arguments to keep
    keepers: set[_Key] = field(default_factory=set)
    ancestors: dict[_Key, int] = field(default_factory=dict)
    # classes inside functions, and the frames that their methods see
    local: dict[_Key, tuple[Module, ast.ClassDef, Frame]] = field(default_factory=dict)
    _orders: dict[_Key, list[tuple[Module, ast.ClassDef]]] = field(default_factory=dict)
    _methods: dict[tuple[_Key, str | None, str, bool], _Method | None] = field(default_factory=dict)
    _annotations: dict[ast.arg, Values] = field(default_factory=dict)
    _shapes: dict[ast.AST, Shape] = field(default_factory=dict)
    _others: dict[str, dict[str, list[ast.stmt]]] = field(default_factory=dict)
    _literals: dict[tuple[str, str], ast.Constant | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Find the classes whose annotations mean the parsed dataclasses: these and their bases."""
        for index, key in enumerate(self.classes):
            for owner, node in self.order(key):
                self.ancestors.setdefault((owner.name, node.name), index)

    def known(self) -> int:
        """How much has been learnt of what is kept where; it only ever grows."""
        tables = (self.attributes, self.globals, self.loose)
        return sum(len(held) for table in tables for held in table.values()) + len(self.keepers)

    # --- classes ----------------------------------------------------------------------------------

    def order(self, key: _Key) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases, the class itself first."""
        if key not in self._orders:
            module = self.sources.module(key[0])
            node = module.classes.get(key[1]) if module else None
            if key in self.local:
                module, node, _ = self.local[key]
            told = self.sources.linearised(module, node) if module and node else []
            self._orders[key] = told[::-1]
        return self._orders[key]

    def class_of(self, value: Value) -> _Key | None:
        """The class of an object, or the class itself."""
        match value:
            case Args(index):
                return self.classes[index]
            case Object(module, name) | Class(module, name):
                return module, name
        return None

    def method(
        self, value: Value, name: str, *, after: str | None = None, setter: bool = False
    ) -> _Method | None:
        """A method by name, in the order in which Python looks; `after` a class, for `super()`."""
        key = self.class_of(value)
        if key is None:
            return None
        asked = (key, after, name, setter)
        if asked not in self._methods:
            self._methods[asked] = self._find_method(key, name, after, setter)
        return self._methods[asked]

    def _find_method(self, key: _Key, name: str, after: str | None, setter: bool) -> _Method | None:
        order = self.order(key)
        names = [f"{module.name}:{node.name}" for module, node in order]
        start = names.index(after) + 1 if after in names else 0
        for module, node in order[start:]:
            found = None
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    marks = {mark(one) for one in statement.decorator_list}
                    if statement.name == name and ("setter" in marks) == setter:
                        found = statement
            if found is not None:
                return module, node, found
        return None

    def bound(
        self, value: Value, name: str, *, after: str | None = None, setter: bool = False
    ) -> set[Value]:
        """The method of an object or class, with what its first parameter holds."""
        found = self.method(value, name, after=after, setter=setter)
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
        return {
            Function(module.name, statement, first, f"{module.name}:{node.name}", self.scope(node))
        }

    def scope(self, node: ast.ClassDef) -> Frame | None:
        """The frame that the methods of a class inside a function see."""
        frames = (frame for _, known, frame in self.local.values() if known is node)
        return next(frames, None)

    def stored(self, value: Value, name: str) -> set[Value]:
        """What any class of an instance's line has put into an attribute."""
        key = self.class_of(value)
        held: set[Value] = set()
        if key is not None:
            for module, node in self.order(key):
                held |= self.attributes.get((module.name, node.name, name), set())
            held |= self.attributes.get((*key, name), set())
        return held

    def keep(self, value: Value, name: str, held: Values) -> None:
        """Remember what an attribute of an instance may hold."""
        key = self.class_of(value)
        if key is not None:
            kept = without_texts(held) or {UNKNOWN}
            self.attributes.setdefault((*key, name), set()).update(kept)
            if self.carries(kept):
                self.keepers.add(key)

    def carries(self, held: Iterable[Value]) -> bool:
        """Whether a value is, holds or can get at one of the parsed dataclasses."""
        for value in held:
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
                    parts = [*items, *(held for _, held in pairs)]
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

    def definitions(self, module: Module, name: str) -> list[FunctionNode]:
        """The functions of a module by a name: several where an `if` or a `try` decides."""
        told: list[FunctionNode] = [module.functions[name]] if name in module.functions else []
        for other in self._conditional(module).get(name, ()):
            if isinstance(other, ast.FunctionDef | ast.AsyncFunctionDef) and other not in told:
                told.append(other)
        return told

    def _conditional(self, module: Module) -> dict[str, list[ast.stmt]]:
        """Everything that is bound under an `if` or a `try`, or more than once, by name."""
        if module.name not in self._others:
            bound: dict[str, list[ast.stmt]] = {}
            plain = set(map(id, module.tree.body))
            often: dict[str, int] = {}
            for node in top_level(module.tree):
                for name in _bound_by(node):
                    often[name] = often.get(name, 0) + 1
                    if id(node) not in plain or isinstance(node, ast.Assign | ast.AugAssign):
                        bound.setdefault(name, []).append(node)
            self._others[module.name] = {n: b for n, b in bound.items() if often[n] > 1}
        return self._others[module.name]

    def settled(self, module: Module, name: str) -> bool:
        """Whether a name of a module always has one value: bound once, changed by no function."""
        return name not in self._conditional(module) and name not in self._rebound(module)

    def _rebound(self, module: Module) -> frozenset[str]:
        return self.shape(module.tree).globals

    def literal(self, module: Module, node: ast.expr) -> ast.Constant | None:
        """A constant or a member of an enum, by its value."""
        key = (module.name, ast.unparse(node))
        if key not in self._literals:
            self._literals[key] = self._literal(module, node)
        return self._literals[key]

    def _literal(self, module: Module, node: ast.expr) -> ast.Constant | None:
        if isinstance(node, ast.Name):
            found = self.sources.resolve(module, node.id)
            if found is None or not self.settled(*found):
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
            self._annotations[parameter] = self._meant(parameter.annotation, module)
        return self._annotations[parameter]

    def _meant(self, node: ast.expr | None, module: Module) -> Values:
        match node:
            case None:
                return NOTHING
            case ast.Constant(value=str() as quoted):
                try:
                    return self._meant(ast.parse(quoted, mode="eval").body, module)
                except SyntaxError:
                    return NOTHING
            case ast.BinOp(left=left, right=right):
                return self._meant(left, module) | self._meant(right, module)
            case ast.Subscript(value=owner, slice=inner):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if mark(owner) in {"Optional", "Union", "Annotated", "Final"}:
                    return NOTHING.union(*(self._meant(part, module) for part in parts))
                return NOTHING
        found = self.sources.resolve_class(module, node)
        if found is None or (found[0].name, found[1].name) not in self.ancestors:
            return NOTHING
        return frozenset({Args(self.ancestors[found[0].name, found[1].name])})

    def shape(self, node: ast.AST) -> Shape:
        """The shape of a function or of a module."""
        if node not in self._shapes:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    shape = shape_of(node.body, [p.arg for p in parameters_of(node.args)])
                case ast.Lambda():
                    shape = shape_of(
                        [ast.Expr(node.body)], [p.arg for p in parameters_of(node.args)]
                    )
                case ast.Module():
                    shape = shape_of(node.body)
                case _:
                    shape = Shape()
            self._shapes[node] = shape
        return self._shapes[node]


def _bound_by(node: ast.stmt) -> list[str]:
    """The names that a statement of a module gives a value to."""
    match node:
        case ast.Assign(targets=targets):
            found = [n for target in targets for n in ast.walk(target)]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            found = list(ast.walk(target))
        case ast.For(target=target):
            found = list(ast.walk(target))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
        case _:
            return []
    return [n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def by_place(read: Read | Refusal) -> tuple[str, int, tuple[str, ...]]:
    """For sorting: file, line, conditions."""
    file, _, line = read.where.rpartition(":")
    return file, int(line), read.when


def followable(held: Iterable[Value]) -> list[Value]:
    """Functions among these values, also inside containers."""
    told: list[Value] = []
    for value in held:
        match value:
            case Function() | Partial():
                told.append(value)
            case Several(items=items):
                told += [one for part in items for one in followable(part)]
            case Keywords(items=pairs):
                told += [one for _, part in pairs for one in followable(part)]
    return told


def carried(values: Iterable[Values]) -> Values:
    """What of the values handed to somebody who is not followed may come back."""
    found = {value for held in values for value in leaves(held)}
    return frozenset(v for v in found if isinstance(v, Args | Items | Object))
