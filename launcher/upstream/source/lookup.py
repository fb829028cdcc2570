"""The classes and modules on the path of an entry script, and what their instances hold."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import wraps
from typing import Any, TypeVar

from launcher.lazy_dataclass import dataclass
from launcher.upstream.source import conditions
from launcher.upstream.source.packages import Definition, Module, Sources, mark, read_enum_members
from launcher.upstream.source.syntax import (
    FunctionNode,
    FunctionShape,
    describe_function,
    list_parameters,
)
from launcher.upstream.source.values import (
    ANY,
    NOTHING,
    UNKNOWN,
    Args,
    Class,
    ClassKey,
    Container,
    Function,
    Items,
    Object,
    Value,
    Values,
    drop_texts,
)

Method = tuple[Module, ast.ClassDef, Definition]
_Answer = TypeVar("_Answer")


def remember(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
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

    @remember
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

    @remember
    def method(self, key: ClassKey, name: str, after: ast.ClassDef | None) -> Method | None:
        """A method by name, in the order in which Python looks; `after` a class, for `super()`."""
        order = self.order(key)
        nodes = [node for _, node in order]
        if after in nodes:
            order = order[nodes.index(after) + 1 :]
        for module, node in order:
            for statement in reversed(node.body):
                if not isinstance(statement, Definition) or statement.name != name:
                    continue
                if "setter" not in map(mark, statement.decorator_list):
                    return module, node, statement
        return None

    def bound(self, value: Value, name: str, after: ast.ClassDef | None = None) -> set[Value]:
        """The method of an object or class, with what its first parameter holds."""
        key = self.class_of(value)
        if key is None:
            return set()
        method = self.method(key, name, after)
        if method is None:
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
        kept = drop_texts(values) or {UNKNOWN}
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

    @remember
    def literal(self, module: Module, node: ast.expr) -> ast.Constant | ast.Tuple | None:
        """A constant or a member of an enum, by its value; several of them as a tuple."""
        match node:
            case ast.Attribute():
                return self._find_literal_attribute(module, node)
            case ast.Name(id=name):
                origin = self.sources.resolve(module, name)
                if origin is None or self._is_reassigned(*origin):
                    return None
        value = self.sources.evaluate(module, node)
        if isinstance(value, list) and value:
            if not all(isinstance(item, str | int | float) for item in value):
                return None
            return ast.Tuple([ast.Constant(item) for item in value], ast.Load())
        if isinstance(value, str | int | float | None):
            return ast.Constant(value)
        return None

    def _is_reassigned(self, module: Module, name: str) -> bool:
        """Whether a function declares a name of its module as `global`."""
        return name in self.shape(module.tree).globals

    def _find_literal_attribute(
        self, module: Module, node: ast.Attribute
    ) -> ast.Constant | ast.Tuple | None:
        owner = self.sources.module_of(module, node.value)
        if owner is not None:
            return self.literal(owner, ast.Name(node.attr, ast.Load()))
        members = self.members(module, node.value) or {}
        member = members.get(node.attr)
        return ast.Constant(member) if isinstance(member, str | int | float) else None

    def members(self, module: Module, node: ast.expr) -> dict[str, Any] | None:
        """Names and values of the enum that an expression names; None for anything else."""
        key = self.sources.resolve_class(module, node)
        return None if key is None else read_enum_members(self.sources, *key)

    def annotated(self, parameter: ast.arg, module: Module) -> Values:
        """What a parameter holds by its annotation: a parsed dataclass, or a base of one."""
        if parameter.annotation is None:
            return NOTHING
        return self._find_annotated_arguments(parameter.annotation, module)

    @remember
    def _find_annotated_arguments(self, node: ast.expr, module: Module) -> Values:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = conditions.parse_condition(node.value)
        values: set[Value] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute):
                key = self.sources.resolve_class(module, inner)
                if key in self.ancestors:
                    values.add(Args(self.ancestors[key]))
        return frozenset(values)

    @remember
    def shape(self, node: FunctionNode | ast.Module) -> FunctionShape:
        if isinstance(node, ast.Module):
            return describe_function(node.body)
        names = [parameter.arg for parameter in list_parameters(node.args)]
        body = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        return describe_function(body, names)
