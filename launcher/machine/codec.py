"""JSON that anybody may have edited -> typed values.

One codec for every record: `read_record` fills a dataclass, `fit_value` converts one value. What
does not fit its type counts as absent, and is added to `left_out` if the caller passes a list. A
type is a Python annotation. Any number, finite or not, is a `float`; a whole float is an `int` too.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from launcher.lazy_dataclass import dataclass

_T = TypeVar("_T")
Reader = Callable[[Any, str, "list[Omission] | None"], Any]

LARGEST = 2**63  # no counter of a run reaches it
_MAX_SHOWN_CHARS = 60
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4096


class Misfit(ValueError):
    """A value is not of the type that a record has there."""


@dataclass(frozen=True, slots=True)
class Omission:
    """A value of a record that was not used: its keys, the value in brief, the expected type."""

    where: str
    value: str
    wanted: str

    def __str__(self) -> str:
        return f"`{self.where}` is {self.value}, not {self.wanted}"


@dataclass(frozen=True, slots=True)
class Between:
    """The smallest and the largest number that fit, for `Annotated`."""

    least: int
    most: int = LARGEST


KEY = "key"
"""In the metadata of a dataclass's field: its key in a record, if that is not the field's name."""
Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]


def read_record(
    kind: type[_T], data: object, left_out: list[Omission] | None = None, where: str = ""
) -> _T:
    """A dataclass from the mapping that holds its fields.

    Raises Misfit if a field without a default is missing or does not fit.
    """
    if not isinstance(data, Mapping):
        raise Misfit("a mapping")
    values: dict[str, Any] = {}
    record_type: Any = kind
    for field in _build_field_codecs(record_type):
        if field.key not in data:
            if field.required:
                raise Misfit(f"a mapping with `{field.key}`")
            continue
        place = f"{where}.{field.key}" if where else field.key
        try:
            values[field.name] = field.reader(data[field.key], place, left_out)
        except Misfit as misfit:
            note_omission(left_out, place, data[field.key], misfit)
            if field.required:
                raise
    return kind(**values)


def as_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass under their keys, as `read_record` reads them."""
    content = {}
    for field in fields(record):
        key = field.metadata.get(KEY, field.name)
        content[key] = getattr(record, field.name)
    return content


def fit_value(value: object, kind: Any, default: Any = None) -> Any:
    """The value if it fits the type, else the default."""
    try:
        return make_reader(kind)(value, "", None)
    except Misfit:
        return default


def note_omission(
    left_out: list[Omission] | None, where: str, value: object, misfit: Misfit
) -> None:
    if left_out is not None:
        left_out.append(Omission(where, describe_value(value), str(misfit)))


def describe_value(value: object) -> str:
    """A value for a message: what kind it is, if it is long."""
    if isinstance(value, Mapping) and value:
        return "an object"
    if isinstance(value, list) and value:
        return "a list"
    text = repr(value)
    if isinstance(value, int | float) or len(text) <= _MAX_SHOWN_CHARS:
        return text[:_MAX_SHOWN_CHARS]
    return f"a text of {len(text)} characters"


@dataclass(frozen=True, slots=True)
class _FieldCodec:
    name: str
    key: str
    required: bool
    reader: Reader


@lru_cache(maxsize=256)
def _build_field_codecs(kind: Any) -> tuple[_FieldCodec, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    codecs = []
    for field in fields(kind):
        codec = _FieldCodec(
            name=field.name,
            key=field.metadata.get(KEY, field.name),
            required=field.default is MISSING and field.default_factory is MISSING,
            reader=make_reader(hints[field.name]),
        )
        codecs.append(codec)
    return tuple(codecs)


@lru_cache(maxsize=1024)
def make_reader(kind: Any) -> Reader:
    """A function that converts a value of this type, and raises Misfit for any other."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return _make_bounded_reader(arguments[0], arguments[1])
    if origin in (Union, types.UnionType):
        return _make_union_reader(arguments)
    if origin is Literal:
        return _make_literal_reader(arguments)
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return _make_list_reader(origin, arguments[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _make_mapping_reader(arguments[1])
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _make_list_reader(tuple, Any)
    if is_dataclass(kind):
        return partial(_read_nested_record, kind)
    raise TypeError(f"no record holds {kind}")


def _read_nested_record(kind: Any, value: Any, where: str, left_out: list[Omission] | None) -> Any:
    return read_record(kind, value, left_out, where)


def _read_text(value: Any, _where: str, _left_out: object) -> str:
    if isinstance(value, str):
        return value
    raise Misfit("a text")


def _read_flag(value: Any, _where: str, _left_out: object) -> bool:
    if isinstance(value, bool):
        return value
    raise Misfit("true or false")


def _read_whole(value: Any, _where: str, _left_out: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
        return int(value)
    raise Misfit("a whole number")


def _read_number(value: Any, _where: str, _left_out: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise Misfit("a number")


def _read_path(value: Any, _where: str, _left_out: object) -> Path:
    # the kernel takes no longer ones, and pathlib raises for them where nobody expects it
    if isinstance(value, str) and 0 < len(value) < _MAX_PATH_BYTES:
        raw = os.fsencode(value)
        longest_name = max(len(name) for name in raw.split(b"/"))
        if len(raw) + 1 < _MAX_PATH_BYTES and longest_name <= _MAX_NAME_BYTES:
            return Path(value)
    raise Misfit("a path")


def _read_null(value: Any, _where: str, _left_out: object) -> None:
    if value is not None:
        raise Misfit("null")


def _read_anything(value: Any, _where: str, _left_out: object) -> Any:
    return value


_SIMPLE: dict[Any, Reader] = {
    str: _read_text,
    bool: _read_flag,
    int: _read_whole,
    float: _read_number,
    Path: _read_path,
    types.NoneType: _read_null,
    None: _read_null,
    Any: _read_anything,
    object: _read_anything,
}


def _make_bounded_reader(kind: Any, bounds: Between) -> Reader:
    inner = make_reader(kind)

    def convert(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        number = inner(value, where, left_out)
        if bounds.least <= number <= bounds.most:
            return number
        if number < bounds.least:
            raise Misfit(f"a number from {bounds.least} on")
        raise Misfit(f"at most {bounds.most}")

    return convert


def _make_union_reader(kinds: Sequence[Any]) -> Reader:
    readers = [make_reader(kind) for kind in kinds]

    def convert(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        expected = []
        for inner in readers:
            try:
                return inner(value, where, left_out)
            except Misfit as misfit:
                expected.append(str(misfit))
        raise Misfit(" or ".join(expected))

    return convert


def _make_literal_reader(words: Sequence[Any]) -> Reader:
    def convert(value: Any, _where: str, _left_out: object) -> Any:
        for word in words:
            if type(value) is type(word) and value == word:
                return value
        raise Misfit(" or ".join(f"`{word}`" for word in words))

    return convert


def _make_list_reader(origin: Any, kind: Any) -> Reader:
    inner = make_reader(kind)

    def convert(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        if not isinstance(value, list | tuple):
            raise Misfit("a list")
        items = []
        for number, item in enumerate(value):
            place = f"{where}[{number}]"
            try:
                items.append(inner(item, place, left_out))
            except Misfit as misfit:
                note_omission(left_out, place, item, misfit)
        if origin is list:
            return items
        return tuple(items)

    return convert


def _make_mapping_reader(kind: Any) -> Reader:
    inner = make_reader(kind)

    def convert(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        if not isinstance(value, Mapping):
            raise Misfit("a mapping")
        items = {}
        for key, item in value.items():
            place = f"{where}.{key}"
            try:
                items[key] = inner(item, place, left_out)
            except Misfit as misfit:
                note_omission(left_out, place, item, misfit)
        return items

    return convert
