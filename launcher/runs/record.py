"""JSON objects that a run wrote: they may be torn, edited, or of another version. `Manifest` is that of `run.json`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    `trackers` are the runs of W&B and the like that a resume continues; left out where there are none. `script` is the
    key of the script where it is not the stage's own.
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
    trackers: list[Json] = field(default_factory=list)
    script: str | None = None

    def as_json(self) -> dict[str, Any]:
        record = codec.as_json(self)
        if not self.trackers:
            del record["trackers"]
        if self.script is None:
            del record["script"]
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The part of `plan` that every run has: how rows make a step, how many rows the data have, and the steps.

    `global_batch` is the rows of a step, `per_device` those of one forward pass on a device.
    """

    gpus: Count | None = None
    nodes: Count | None = None
    per_device: Count | None = None
    accumulation: Count | None = None
    global_batch: Count | None = field(default=None, metadata={codec.KEY: "global"})
    rows: Count | None = None
    steps: Count | None = None

    def as_json(self) -> dict[str, Any]:
        return codec.as_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(BatchRecord):
    """`plan` of `run.json`, and what `launch plan` says of one number of GPUs. What is not known is None.

    `memory_gib` is the `peak` of a GPU, its parts, and the `moment` of it, a text that is not read back. `spare_gib`
    are left on the card, below 0 missing. `tokens_per_step` and `tokens_per_second` are those of all GPUs without
    padding, `padding_share` the share that padding has. `cost` is in the currency of the price. `disk_gib` are the
    sizes of the `model` and a `checkpoint`, and the `most` that lies there at a time. `fit` is the largest split of
    the batch that fits. `why` are the allocations of memory by moment, left out where nobody asked.
    """

    tokens_per_step: float | None = None
    padding_share: float | None = None
    memory_gib: Mapping[str, float] | None = None
    fits: bool | None = None
    spare_gib: float | None = None
    tokens_per_second: float | None = None
    speed_source: str | None = None
    hours: float | None = None
    cost: float | None = None
    disk_gib: Mapping[str, float] = field(default_factory=dict)
    interruption: Json = field(default_factory=dict)
    fit: Json | None = None
    why: Sequence[Json] | None = None

    def as_json(self) -> dict[str, Any]:
        record = codec.as_json(self)
        if self.why is None:
            del record["why"]
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord:
    """What is read back of `resume`: where the attempt went on, the checkpoints that it left where they were, the one
    that the stage file named, and what had changed."""

    step: Count | None = None
    kept: list[str] = field(default_factory=list)
    requested: Any = field(default=None, metadata={codec.KEY: "asked"})
    changes: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRecord:
    """What is read back of `upstream`: which source trained, and whether it was the pin."""

    pinned: bool | None = None
    version: str | None = None
    pin: str | None = None
    root: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedRecord:
    """What is read back of `deepspeed`: its release, and the settings that gradients depend on."""

    version: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    gpus: list[Any] = field(default_factory=list)


class _Field(Generic[_T]):
    """A field of `RunRecord` as it is read back, under its own name or `key`."""

    def __init__(self, read: Callable[..., _T], key: str | None = None) -> None:
        self.read = read
        self.key = key or ""

    def __set_name__(self, _owner: type[Manifest], name: str) -> None:
        self.key = self.key or name
        if self.key not in RunRecord.__annotations__:
            raise TypeError(f"run.json has no `{self.key}`")

    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> _T:
        return self.read(manifest, self.key)


class _ObjectField(Generic[_T]):
    """A field of `RunRecord` that is an object, as the dataclass of what is read back of it."""

    def __init__(self, kind: type[_T]) -> None:
        self.kind = kind
        self.key = ""

    def __set_name__(self, _owner: type[Manifest], name: str) -> None:
        self.key = name
        if name not in RunRecord.__annotations__:
            raise TypeError(f"run.json has no `{name}`")

    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> _T:
        return codec.read(self.kind, manifest.part(self.key))


class Manifest(Record):
    """`run.json` as it is read back: whatever is missing or damaged, see `RunRecord`."""

    created = _Field(Record.text)
    stage = _Field(Record.text)
    backend = _Field(Record.text)
    script = _Field(Record.text)
    cwd = _Field(Record.text)
    # the output folder that the stage file names, where that is not the one of the run
    requested_output = _Field(Record.text, "asked_output")
    attempt = _Field(Record.number)
    args = _Field(Record.part)
    argv = _Field(Record.items_of)
    samples = _Field(Record.number)
    contents = _Field(Record.items_of)
    caches = _Field(Record.items_of)
    plan = _ObjectField(PlanRecord)
    resume = _ObjectField(ResumeRecord)
    upstream = _ObjectField(UpstreamRecord)
    trainer = _ObjectField(TrainerRecord)
    machine = _ObjectField(MachineRecord)

    def argument(self, name: str) -> Any:
        return self.args.value(name, "value")

    @property
    def gpus(self) -> int | None:
        return self.plan.gpus

    @property
    def nodes(self) -> int | None:
        return self.plan.nodes

    @property
    def steps(self) -> int | None:
        return self.plan.steps

    @property
    def global_batch(self) -> int | None:
        return self.plan.global_batch

    @property
    def per_device(self) -> int | None:
        return self.plan.per_device

    @property
    def accumulation(self) -> int | None:
        return self.plan.accumulation

    @property
    def resumed_step(self) -> int | None:
        return self.resume.step

    @property
    def kept(self) -> Sequence[str]:
        return self.resume.kept

    @property
    def packages(self) -> Mapping[str, str]:
        return self.trainer.packages

    @property
    def cards(self) -> Sequence[Any]:
        return self.machine.gpus

    @property
    def deepspeed(self) -> DeepSpeedRecord | None:
        """None without DeepSpeed."""
        found = self.part("deepspeed")
        return codec.read(DeepSpeedRecord, found) if found else None

    @property
    def output(self) -> Path | None:
        path: Path | None = codec.fit(self.value("output"), Path)
        return path

    @property
    def processes(self) -> int | None:
        """How many train; None where that is unknown, or more than there can be."""
        plan = self.plan
        if plan.gpus is None:
            return None
        count = max(1, plan.gpus) * (plan.nodes or 1)
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
