"""JSON objects that a run wrote: they may be torn, edited, or of another version. `Manifest` is that of `run.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Record(dict[str, Any]):
    """What is not there, or of another type, reads as None or as empty."""

    def value(self, *keys: str) -> Any:
        found: Any = self
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def part(self, *keys: str) -> Record:
        found = self.value(*keys)
        return Record(found) if isinstance(found, dict) else Record()

    def items_of(self, *keys: str) -> list[Any]:
        found = self.value(*keys)
        return found if isinstance(found, list) else []

    def text(self, *keys: str) -> str | None:
        found = self.value(*keys)
        return found if isinstance(found, str) else None

    def number(self, *keys: str) -> int | None:
        found = self.value(*keys)
        return found if isinstance(found, int) and not isinstance(found, bool) else None


class _Field(Generic[_T]):
    def __init__(self, read: Callable[..., _T], *keys: str) -> None:
        self.read, self.keys = read, keys

    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> _T:
        return self.read(manifest, *self.keys)


class Manifest(Record):
    """`run.json`: everything that was decided before the start of an attempt."""

    created, stage = _Field(Record.text, "created"), _Field(Record.text, "stage")
    backend, cwd = _Field(Record.text, "backend"), _Field(Record.text, "cwd")
    # the output folder that the stage file names, where that is not the one of the run
    requested_output = _Field(Record.text, "asked_output")
    attempt, resumed_step = _Field(Record.number, "attempt"), _Field(Record.number, "resume", "step")
    gpus, nodes = _Field(Record.number, "plan", "gpus"), _Field(Record.number, "plan", "nodes")
    steps, global_batch = _Field(Record.number, "plan", "steps"), _Field(Record.number, "plan", "global")
    per_device = _Field(Record.number, "plan", "per_device")
    accumulation = _Field(Record.number, "plan", "accumulation")
    plan, upstream = _Field(Record.part, "plan"), _Field(Record.part, "upstream")
    deepspeed, packages = _Field(Record.part, "deepspeed"), _Field(Record.part, "trainer", "packages")
    args, argv = _Field(Record.part, "args"), _Field(Record.items_of, "argv")
    cards, kept = _Field(Record.items_of, "machine", "gpus"), _Field(Record.items_of, "resume", "kept")
    contents, caches = _Field(Record.items_of, "contents"), _Field(Record.items_of, "caches")

    def argument(self, name: str) -> Any:
        return self.value("args", name, "value")

    @property
    def output(self) -> Path | None:
        found = self.text("output")
        return None if found is None else Path(found)

    @property
    def processes(self) -> int | None:
        return None if self.gpus is None else max(1, self.gpus) * (self.nodes or 1)

    @property
    def expected(self) -> Mapping[str, str | None] | None:
        found = self.get("expect")
        return found if isinstance(found, dict) else None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []
