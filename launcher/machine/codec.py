"""JSON that anybody may have edited -> typed values. One codec for every record: `read` fills a dataclass field by
field, `fit` takes one value.

What does not fit its type is left out, as if it were absent, and listed in `left_out` where the caller wants to say
so. A type is a Python annotation; of `float` any number is one, finite or not, and of `int` a whole float too.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

_T = TypeVar("_T")
Reader = Callable[[Any, str, "list[Omission] | None"], Any]

LARGEST = 2**63  # of a whole number: what no counter of a run reaches
_SHOWN_CHARS = 60
_NAME_BYTES = 255
_PATH_BYTES = 4096


class Misfit(ValueError):
    """A value is not of the type that a record has there."""


@dataclass(frozen=True, slots=True)
class Omission:
    """One value of a record that was not used: its keys, itself in brief, and what belongs there."""

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
"""In the metadata of a dataclass's field: what a record calls it, where that is no name in Python."""
Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]


def read(kind: type[_T], data: object, left_out: list[Omission] | None = None, where: str = "") -> _T:
    """A dataclass from the mapping that holds its fields. Raises Misfit where one without a default does not fit."""
    if not isinstance(data, Mapping):
        raise Misfit("a mapping")
    values: dict[str, Any] = {}
    whole: Any = kind
    for field in _fields_of(whole):
        if field.key not in data:
            if field.required:
                raise Misfit(f"a mapping with `{field.key}`")
            continue
        place = f"{where}.{field.key}" if where else field.key
        try:
            values[field.name] = field.reader(data[field.key], place, left_out)
        except Misfit as misfit:
            note(left_out, place, data[field.key], misfit)
            if field.required:
                raise
    return kind(**values)


def as_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as `read` finds them, under the names of the record."""
    return {field.metadata.get(KEY, field.name): getattr(record, field.name) for field in fields(record)}


def fit(value: object, kind: Any, default: Any = None) -> Any:
    """A value of a type; the default where it is none."""
    try:
        return reader(kind)(value, "", None)
    except Misfit:
        return default


def note(left_out: list[Omission] | None, where: str, value: object, misfit: Misfit) -> None:
    if left_out is not None:
        left_out.append(Omission(where, shown(value), str(misfit)))


def shown(value: object) -> str:
    """A value in a message: what it is where it is long."""
    if isinstance(value, Mapping):
        return "an object" if value else "{}"
    if isinstance(value, list):
        return "a list" if value else "[]"
    text = repr(value)
    if isinstance(value, int | float) or len(text) <= _SHOWN_CHARS:
        return text[:_SHOWN_CHARS]
    return f"a text of {len(text)} characters"


@dataclass(frozen=True, slots=True)
class _FieldCodec:
    name: str
    key: str
    required: bool
    reader: Reader


@lru_cache(maxsize=256)
def _fields_of(kind: Any) -> tuple[_FieldCodec, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        key = field.metadata.get(KEY, field.name)
        found.append(_FieldCodec(field.name, key, required, reader(hints[field.name])))
    return tuple(found)


@lru_cache(maxsize=1024)
def reader(kind: Any) -> Reader:
    """What takes a value of this type and raises Misfit for any other."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(arguments[0], arguments[1])
    if origin in (Union, types.UnionType):
        return _any_of(arguments)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return _listed(origin, arguments[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapped(arguments[1])
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _listed(tuple, Any)
    if is_dataclass(kind):
        return partial(_record, kind)
    raise TypeError(f"no record holds {kind}")


def _record(kind: Any, value: Any, where: str, left_out: list[Omission] | None) -> Any:
    return read(kind, value, left_out, where)


def _text(value: Any, _where: str, _left_out: object) -> str:
    if isinstance(value, str):
        return value
    raise Misfit("a text")


def _flag(value: Any, _where: str, _left_out: object) -> bool:
    if isinstance(value, bool):
        return value
    raise Misfit("true or false")


def _whole(value: Any, _where: str, _left_out: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value) if abs(value) < LARGEST else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Misfit("a whole number")


def _number(value: Any, _where: str, _left_out: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise Misfit("a number")


def _path(value: Any, _where: str, _left_out: object) -> Path:
    if isinstance(value, str) and value:
        # the kernel takes no longer ones, and pathlib raises what nobody expects of a look
        parts = os.fsencode(value).split(b"/") if len(value) < _PATH_BYTES else []
        if parts and max(map(len, parts)) <= _NAME_BYTES and sum(map(len, parts)) + len(parts) < _PATH_BYTES:
            return Path(value)
    raise Misfit("a path")


def _nothing(value: Any, _where: str, _left_out: object) -> None:
    if value is not None:
        raise Misfit("null")


def _anything(value: Any, _where: str, _left_out: object) -> Any:
    return value


_SIMPLE: dict[Any, Reader] = {
    str: _text,
    bool: _flag,
    int: _whole,
    float: _number,
    Path: _path,
    types.NoneType: _nothing,
    None: _nothing,
    Any: _anything,
    object: _anything,
}


def _bounded(kind: Any, bounds: Between) -> Reader:
    inner = reader(kind)

    def take(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        taken = inner(value, where, left_out)
        if not bounds.least <= taken <= bounds.most:
            wanted = f"a number from {bounds.least} on" if taken < bounds.least else f"at most {bounds.most}"
            raise Misfit(wanted)
        return taken

    return take


def _any_of(kinds: Sequence[Any]) -> Reader:
    readers = [reader(kind) for kind in kinds]

    def take(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        wanted = []
        for inner in readers:
            try:
                return inner(value, where, left_out)
            except Misfit as misfit:
                wanted.append(str(misfit))
        raise Misfit(" or ".join(wanted))

    return take


def _one_of(words: Sequence[Any]) -> Reader:
    def take(value: Any, _where: str, _left_out: object) -> Any:
        for word in words:
            if type(value) is type(word) and value == word:
                return value
        raise Misfit(" or ".join(f"`{word}`" for word in words))

    return take


def _listed(origin: Any, kind: Any) -> Reader:
    inner = reader(kind)

    def take(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        if not isinstance(value, list | tuple):
            raise Misfit("a list")
        items = []
        for number, item in enumerate(value):
            place = f"{where}[{number}]"
            try:
                items.append(inner(item, place, left_out))
            except Misfit as misfit:
                note(left_out, place, item, misfit)
        return items if origin is list else tuple(items)

    return take


def _mapped(kind: Any) -> Reader:
    inner = reader(kind)

    def take(value: Any, where: str, left_out: list[Omission] | None) -> Any:
        if not isinstance(value, Mapping):
            raise Misfit("a mapping")
        items = {}
        for key, item in value.items():
            place = f"{where}.{key}"
            try:
                items[key] = inner(item, place, left_out)
            except Misfit as misfit:
                note(left_out, place, item, misfit)
        return items

    return take
