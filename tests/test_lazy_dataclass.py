"""Dataclasses that compile their methods when needed, compared with the standard library's."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from launcher.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list, compare=False, repr=False)


@dataclass(slots=True, kw_only=True)
class Box:
    low: Point
    high: Point | None = None

    def __post_init__(self) -> None:
        if self.high is None:
            self.high = self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Point):
    name: str


def of_the_standard_library() -> type[Any]:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False, repr=False)

    return Point


def test_fields_replace_and_asdict_work() -> None:
    point = dataclasses.replace(Point(1), y=5)
    assert dataclasses.asdict(point) == {"x": 1, "y": 5, "tags": []}
    assert [entry.name for entry in dataclasses.fields(Named)] == ["x", "y", "tags", "name"]
    assert dataclasses.is_dataclass(Box)


def test_defaults_are_made_for_each_instance() -> None:
    assert Point(1).tags is not Point(1).tags
    assert Box(low=Point(1)).high == Point(1)
    assert Named(3, name="n") == Named(3, 2, name="n")


def test_comparison_and_hash_leave_out_what_is_not_compared() -> None:
    assert Point(1, tags=["a"]) == Point(1)
    assert hash(Point(1, tags=["a"])) == hash(Point(1))
    assert Point(1) != (1, 2) and Point(1) != Named(1, name="n")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Box(low=Point(1)))


def test_a_frozen_instance_can_be_copied_and_not_changed() -> None:
    point = Point(1, tags=["a"])
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    for twin in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert twin == point and twin.tags == ["a"]


@pytest.mark.parametrize(
    "call",
    [
        lambda kind: repr(kind(1, 3)).rpartition(".")[2],
        lambda kind: kind.__match_args__,
        lambda kind: kind(),
        lambda kind: kind(1, 2, [], 4),
        lambda kind: kind(1, x=2),
        lambda kind: kind(1, z=2),
    ],
    ids=["repr", "match", "missing", "too many", "twice", "unknown"],
)
def test_answers_and_refusals_are_those_of_the_standard_library(call: Callable[[Any], Any]) -> None:
    def answer(kind: type[Any]) -> Any:
        try:
            return call(kind)
        except TypeError as error:
            return str(error).rpartition(f"{kind.__qualname__}.")[2]

    assert answer(Point) == answer(of_the_standard_library())
