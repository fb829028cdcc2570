"""JSON objects that a run wrote: they may be torn, edited, or of another version. `Manifest` is that of `run.json`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from launcher.machine import codec
from launcher.machine.codec import Count, Misfit, Omission

_T = TypeVar("_T")
LARGEST_WORLD = 100_000  # processes of a run; whatever names more is no record of one
UNREADABLE = "unknown"  # what was expected, where the record has no word for it: nothing proves that


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
        """A whole number from 0 on: everything that is counted here."""
        number: int | None = codec.fit(self.value(*keys), Count)
        return number

    def figure(self, *keys: str) -> float | None:
        """A finite number."""
        number: float | None = codec.fit(self.value(*keys), float)
        return number if number is not None and abs(number) <= sys.float_info.max else None


Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What `run.json` holds, as launch writes it: everything that was decided before the start of an attempt.

    `output` is the folder of this run, `asked_output` that of the stage file where it is another one. `tracked`: it
    reports to W&B. `args` are value and origin of every argument, `env` the names of the variables that the command
    adds, `contents` the digests of what it reads, `samples` the number of prompts that the model answers at the end.
    `launch_argv` is what was typed, None where a program called launch.
    """

    schema_version: int = 1
    created: str | None
    attempt: Count
    stage: str | None
    backend: str | None
    name: str | None
    config: str | None
    output: str | None
    expect: Mapping[str, str | None]
    deepspeed: Json | None
    cwd: str | None
    plan: Json
    tracked: bool
    args: Mapping[str, Json]
    argv: list[str]
    env: list[str]
    caches: list[Json]
    upstream: Json
    launch_commit: str | None
    trainer: Json
    machine: Json
    devices: Json | None
    findings: list[Json]
    resume: Json = field(default_factory=dict)
    asked_output: str | None = None
    contents: list[Json] = field(default_factory=list)
    samples: Count = 0
    launch_argv: list[str] | None = None

    def as_json(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}


class _Field(Generic[_T]):
    """One value of `run.json`, by the field of `RunRecord` and the keys below it."""

    def __init__(self, read: Callable[..., _T], *keys: str) -> None:
        if keys[0] not in RunRecord.__annotations__:
            raise TypeError(f"run.json has no `{keys[0]}`")
        self.read, self.keys = read, keys

    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> _T:
        return self.read(manifest, *self.keys)


class Manifest(Record):
    """`run.json` as it is read back: whatever is missing or damaged, see `RunRecord`."""

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
    samples = _Field(Record.number, "samples")
    contents, caches = _Field(Record.items_of, "contents"), _Field(Record.items_of, "caches")

    def argument(self, name: str) -> Any:
        return self.value("args", name, "value")

    @property
    def output(self) -> Path | None:
        path: Path | None = codec.fit(self.value("output"), Path)
        return path

    @property
    def processes(self) -> int | None:
        """How many train; None where that is unknown, or more than there can be."""
        if self.gpus is None:
            return None
        count = max(1, self.gpus) * (self.nodes or 1)
        return count if count <= LARGEST_WORLD else None

    @property
    def expected(self) -> Mapping[str, str | None] | None:
        """What was expected of each point, UNREADABLE where that is no word; None where nothing was recorded."""
        found = self.get("expect")
        if not isinstance(found, dict):
            return None
        return {name: state if isinstance(state, str | None) else UNREADABLE for name, state in found.items()}

    def left_out(self) -> list[Omission]:
        """What is not used of it, because it is of another type than launch wrote."""
        faults: list[Omission] = []
        for name, kind in typing.get_type_hints(RunRecord, include_extras=True).items():
            if name in self:
                try:
                    codec.reader(kind)(self[name], name, faults)
                except Misfit as misfit:
                    codec.note(faults, name, self[name], misfit)
        return faults


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []
