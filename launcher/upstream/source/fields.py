"""Dataclass declarations in upstream's source -> `Field`s, inheritance over files included."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.lazy_dataclass import dataclass
from launcher.upstream.schema import Field, Kind
from launcher.upstream.source.packages import UNKNOWN, Module, Sources, mark, read_enum_members

# trl/scripts/_hf_argparser.py::HfArgumentParser._parse_dataclass_field[= _accept_none] wraps the
# converter of these optional types, and of no list
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
    no root holds, and the values of expressions that only running them would tell; `takes_none`
    says that the parser reads the word `none` for `T | None`. Raises LookupError naming the class
    that the source does not have.
    """
    fields: dict[str, Field] = {}
    for module_name, class_name in classes:
        module = sources.module(module_name)
        if module is None or class_name not in module.classes:
            raise LookupError(f"{module_name} has no class {class_name}")
        for owner, node in sources.linearised(module, module.classes[class_name]):
            for field in _ClassReader(sources, owner, externals).fields(node):
                if takes_none and field.kind in _NULLABLE and not field.many:
                    field = replace(field, nullable="None" in field.type)
                # a field keeps the position of its first definition, as dataclasses do
                fields[field.name] = field
    return fields


@dataclass(frozen=True, slots=True)
class _Resolved:
    kind: Kind
    many: bool = False
    choices: tuple[Any, ...] = ()
    external: str | None = None


@dataclass(slots=True)
class _ClassReader:
    """Declarations of one module, as `HfArgumentParser._parse_dataclass_field` would treat them."""

    sources: Sources
    module: Module
    externals: Mapping[str, Sequence[Any]]

    def fields(self, node: ast.ClassDef) -> Iterator[Field]:
        decorators = map(ast.unparse, node.decorator_list)
        if not any("dataclass" in decorator for decorator in decorators):
            return
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    is_class_variable = "ClassVar" in ast.unparse(annotation)
                    if not is_class_variable and not name.startswith("_"):
                        yield from self._read_field(node.name, name, statement)

    def _read_field(self, owner: str, name: str, statement: ast.AnnAssign) -> Iterator[Field]:
        expression = statement.value
        keywords: dict[str | None, ast.expr] = {}
        if isinstance(expression, ast.Call) and ast.unparse(expression.func).endswith("field"):
            keywords = {keyword.arg: keyword.value for keyword in expression.keywords}
            expression = keywords.get("default") or keywords.get("default_factory")
        match keywords.get("init"):
            case ast.Constant(value=False):
                return
        default = self.sources.evaluate(self.module, expression)
        default_text = None
        resolved = self._resolve_annotation(statement.annotation)
        if resolved.many and "default_factory" not in keywords:
            # the parser drops the default of a list that is no factory's (hf_argparser)
            default = None
        elif default is UNKNOWN:
            default = None
            default_text = ast.unparse(expression) if expression else None
        extra = self._read_metadata(keywords.get("metadata"))
        # the parser takes a bool without a default for false, or for nothing
        optional = resolved.kind == "bool" and not resolved.many
        yield Field(
            name=name,
            type=ast.unparse(statement.annotation).strip("'\""),
            kind=resolved.kind,
            many=resolved.many,
            choices=resolved.choices or tuple(extra.get("choices") or ()),
            default=default,
            default_text=default_text,
            required=expression is None and not optional,
            word_optional=extra.get("nargs") == "?",
            owner=owner,
            where=f"{self.module.label}:{statement.lineno}",
            external=resolved.external,
        )

    def _read_metadata(self, node: ast.expr | None) -> dict[str, Any]:
        """What of a field's metadata can be read; argparse gets it as it is."""
        metadata: dict[str, Any] = {}
        if not isinstance(node, ast.Dict):
            return metadata
        for key, expression in zip(node.keys, node.values, strict=True):
            value = self.sources.evaluate(self.module, expression)
            if value is UNKNOWN:
                value = self.externals.get(ast.unparse(expression), UNKNOWN)
            if isinstance(key, ast.Constant) and value is not UNKNOWN:
                metadata[str(key.value)] = value
        return metadata

    def _resolve_annotation(self, node: ast.expr) -> _Resolved:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        members = self._split_union(node)
        if len(members) > 1:
            node = self._pick_member(members)
        return self._resolve_single(node)

    def _split_union(self, node: ast.expr) -> list[ast.expr]:
        """The members of a union, in order, however it is spelt."""
        match node:
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._split_union(left) + self._split_union(right)
            case ast.Subscript(value=outer, slice=inner):
                union = mark(outer)
            case _:
                return [node]
        if union == "Optional":
            return [*self._split_union(inner), ast.Constant(None)]
        if union != "Union" or not isinstance(inner, ast.Tuple):
            return [node]
        members: list[ast.expr] = []
        for item in inner.elts:
            members += self._split_union(item)
        return members

    def _pick_member(self, members: list[ast.expr]) -> ast.expr:
        """The one member that the parser keeps (hf_argparser: the two "filter" branches)."""
        first, second, *_ = members
        names = [ast.unparse(member) for member in members]
        if "None" not in names:
            takes_first = names[1] == "str"
        elif "bool" in names:
            takes_first = names[0] != "None"
        else:
            takes_first = names[1] == "None"
        return first if takes_first else second

    def _resolve_single(self, node: ast.expr) -> _Resolved:
        if isinstance(node, ast.Subscript):
            return self._resolve_subscript(node)
        match mark(node):
            case "int" | "float" | "str" | "bool" as kind:
                return _Resolved(kind)
            case "dict" | "Dict":
                return _Resolved("dict")
            case "list" | "List":
                return _Resolved("str", many=True)
            case "Path" | "PathLike" | "Any":
                return _Resolved("str")
        return self._resolve_name(ast.unparse(node))

    def _resolve_subscript(self, node: ast.Subscript) -> _Resolved:
        match mark(node.value):
            case "Literal":
                items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                choices = [self.sources.evaluate(self.module, item) for item in items]
                return _Resolved("choice", choices=tuple(choices))
            case "list" | "List":
                # argparse calls the item's type on each word; calling an enum checks its values
                return replace(self._resolve_single(node.slice), many=True)
            case "dict" | "Dict":
                return _Resolved("dict")
        return _Resolved("opaque")

    def _resolve_name(self, name: str) -> _Resolved:
        external = self.sources.external(self.module, name)
        key = self.sources.resolve_class(self.module, ast.Name(name))
        if key is None:
            if external is None or external not in self.externals:
                return _Resolved("opaque", external=external)
            choices = tuple(self.externals[external])
            return _Resolved("choice", choices=choices, external=external)
        members = read_enum_members(self.sources, *key)
        if members is None:
            return _Resolved("opaque")
        package = self.module.name.partition(".")[0]
        if external is not None and external.startswith(f"{package}."):
            # only a type of another package is named
            external = None
        return _Resolved("choice", choices=tuple(members.values()), external=external)
