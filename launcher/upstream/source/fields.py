"""Dataclass declarations in upstream's source -> `Field`s, inheritance over files included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.upstream.schema import Field, Kind
from launcher.upstream.source.packages import UNKNOWN, Module, Sources, enum_members

# trl/scripts/_hf_argparser.py:254 wraps the converter of these optional types, and of no list
_NULLABLE = {"int", "float", "dict", "opaque"}


def read_fields(
    sources: Sources,
    classes: Sequence[tuple[str, str]],
    externals: Mapping[str, Sequence[Any]],
    *,
    takes_none: bool = False,
) -> dict[str, Field]:
    """The fields of several dataclasses, in the parser's order.

    `classes` are (module, class name); `externals` gives the choices of types by dotted name that
    no root holds, and the values of expressions that only running them would tell; `takes_none` says
    that the parser reads the word `none` for `T | None`. Raises LookupError naming the class that the
    source does not have.
    """
    fields: dict[str, Field] = {}
    for module_name, class_name in classes:
        module = sources.module(module_name)
        if module is None or class_name not in module.classes:
            raise LookupError(f"{module_name} has no class {class_name}")
        for owner, node in sources.linearised(module, module.classes[class_name]):
            for name, known in _own_fields(sources, owner, node, externals):
                # a field keeps the position of its first definition, as dataclasses do
                nullable = takes_none and known.kind in _NULLABLE and "None" in known.type
                nullable = nullable and not known.many
                fields[name] = replace(known, nullable=nullable)
    return fields


def _own_fields(
    sources: Sources, module: Module, node: ast.ClassDef, externals: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Field]]:
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name.startswith("_") or "ClassVar" in ast.unparse(statement.annotation):
            continue
        known = _field(sources, module, node.name, name, statement, externals)
        if known is not None:
            yield name, known


def _field(
    sources: Sources,
    module: Module,
    owner: str,
    name: str,
    statement: ast.AnnAssign,
    externals: Mapping[str, Sequence[Any]],
) -> Field | None:
    expression, metadata, factory = statement.value, None, False
    required = expression is None
    if isinstance(expression, ast.Call) and ast.unparse(expression.func).endswith("field"):
        keywords = {k.arg: k.value for k in expression.keywords}
        match keywords.get("init"):
            case ast.Constant(value=False):
                return None
        metadata = keywords.get("metadata")
        factory = "default_factory" in keywords
        expression = keywords.get("default") or keywords.get("default_factory")
        required = expression is None
    default = UNKNOWN if required else sources.evaluate(module, expression)
    resolved = _Annotation(sources, module, externals).resolve(statement.annotation)
    if resolved.many and not factory:
        # the parser hands a list field its factory's default and drops a plain one (hf_argparser)
        default = None
    extra = _metadata(sources, module, metadata, externals)
    choices = resolved.choices or tuple(extra.get("choices") or ())
    return Field(
        name=name,
        type=ast.unparse(statement.annotation).strip("'\""),
        kind=resolved.kind,
        many=resolved.many,
        choices=choices,
        default=None if default is UNKNOWN else default,
        default_text=ast.unparse(expression) if expression and default is UNKNOWN else None,
        # the parser takes a bool without a default for false, or for nothing
        required=required and (resolved.kind != "bool" or resolved.many),
        word_optional=extra.get("nargs") == "?",
        owner=owner,
        where=f"{module.label}:{statement.lineno}",
        external=resolved.external,
    )


def _metadata(
    sources: Sources, module: Module, node: ast.expr | None, externals: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """What of a field's metadata can be read; argparse gets it as it is."""
    if not isinstance(node, ast.Dict):
        return {}
    known = {}
    for key, expression in zip(node.keys, node.values, strict=True):
        value = sources.evaluate(module, expression)
        if value is UNKNOWN:
            value = externals.get(ast.unparse(expression), UNKNOWN)
        if isinstance(key, ast.Constant) and value is not UNKNOWN:
            known[str(key.value)] = value
    return known


@dataclass(frozen=True, slots=True)
class _Resolved:
    kind: Kind
    many: bool = False
    choices: tuple[Any, ...] = ()
    external: str | None = None


@dataclass(slots=True)
class _Annotation:
    """An annotation -> how `HfArgumentParser._parse_dataclass_field` would treat it."""

    sources: Sources
    module: Module
    externals: Mapping[str, Sequence[Any]]

    def resolve(self, node: ast.expr) -> _Resolved:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        members = self._members(node)
        if len(members) > 1:
            node = self._pick(members)
        return self._single(node)

    def _members(self, node: ast.expr) -> list[ast.expr]:
        """The members of a union, in order, however it is spelt."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return [*self._members(node.left), *self._members(node.right)]
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).rpartition(".")[2]
            if outer == "Optional":
                return [*self._members(node.slice), ast.Constant(None)]
            if outer == "Union" and isinstance(node.slice, ast.Tuple):
                return [member for item in node.slice.elts for member in self._members(item)]
        return [node]

    def _pick(self, members: list[ast.expr]) -> ast.expr:
        """The one member that the parser keeps (hf_argparser: the two "filter" branches)."""
        names = [ast.unparse(member) for member in members]
        if "None" not in names:
            return members[0] if names[1] == "str" else members[1]
        if "bool" in names:
            return next(member for member in members if ast.unparse(member) != "None")
        return members[0] if names[1] == "None" else members[1]

    def _single(self, node: ast.expr) -> _Resolved:
        name = ast.unparse(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        match name.rpartition(".")[2]:
            case "int" | "float" | "str" | "bool" as kind:
                return _Resolved(kind)
            case "dict" | "Dict":
                return _Resolved("dict")
            case "list" | "List":
                return _Resolved("str", many=True)
            case "Path" | "PathLike" | "Any":
                return _Resolved("str")
        return self._named(name)

    def _subscript(self, node: ast.Subscript) -> _Resolved:
        outer = ast.unparse(node.value).rpartition(".")[2]
        if outer == "Literal":
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            values = tuple(self.sources.evaluate(self.module, item) for item in items)
            return _Resolved("choice", choices=values)
        if outer in {"list", "List"}:
            # argparse calls the item's type on each word; calling an enum checks its values
            return replace(self._single(node.slice), many=True)
        return _Resolved("dict") if outer in {"dict", "Dict"} else _Resolved("opaque")

    def _named(self, name: str) -> _Resolved:
        found = self.sources.resolve(self.module, name)
        if found is not None and found[1] in found[0].classes:
            members = enum_members(self.sources, found[0], found[0].classes[found[1]])
            if members is not None:
                external = self._dotted(name)
                return _Resolved("choice", choices=tuple(members.values()), external=external)
            return _Resolved("opaque")
        external = self.sources.external(self.module, name)
        if external is not None and external in self.externals:
            return _Resolved("choice", choices=tuple(self.externals[external]), external=external)
        return _Resolved("opaque", external=external)

    def _dotted(self, name: str) -> str | None:
        """Set for types that live in another package than the module that uses them."""
        origin, original = self.module.imports.get(name, ("", ""))
        foreign = origin.partition(".")[0] not in {"", self.module.name.partition(".")[0]}
        return f"{origin}.{original}" if foreign else None
