"""JSON objects that a run wrote. They may be torn or edited. `Manifest` reads `run.json`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Generic, TypeVar

from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Count, Misfit, Omission

_T = TypeVar("_T")
LARGEST_WORLD = 100_000  # processes of a run; a record that names more is damaged
UNREADABLE = "unknown"  # an expectation that cannot be read: nothing proves it


class Record(dict[str, Any]):
    """A JSON object. What is missing, or of another type, reads as None or as empty."""

    def value(self, *keys: str) -> Any:
        value: Any = self
        for key in keys:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value

    def part(self, *keys: str) -> Record:
        value = self.value(*keys)
        if isinstance(value, dict):
            return Record(value)
        return Record()

    def items_of(self, *keys: str) -> list[Any]:
        value = self.value(*keys)
        if isinstance(value, list):
            return value
        return []

    def text(self, *keys: str) -> str | None:
        value = self.value(*keys)
        if isinstance(value, str):
            return value
        return None

    def number(self, *keys: str) -> int | None:
        """A whole number that is not negative."""
        number: int | None = codec.fit_value(self.value(*keys), Count)
        return number

    def figure(self, *keys: str) -> float | None:
        """A finite number."""
        number: float | None = codec.fit_value(self.value(*keys), float)
        if number is None or abs(number) > sys.float_info.max:
            return None
        return number


Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What launch writes into `run.json`: everything that was decided before an attempt starts.

    `output` is the folder of this run, `asked_output` that of the stage file if it is another one.
    `tracked`: the run reports to W&B. `args` are value and origin of every argument, `env` the
    names of the variables that the command adds, `contents` the digests of what it reads,
    `samples` the number of prompts that the model answers at the end. `launch_argv` is what was
    typed; None if a program called launch. `trackers` are the runs of W&B and the like that a
    resume continues; left out if there are none. `script` is the key of the script if it is not
    the stage's own.
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
    """The part of `plan` that every run has: rows of the data, rows of a step, and steps.

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
    """`plan` of `run.json`, and what `launch plan` says of one number of GPUs; None is unknown.

    `memory_gib` is the `peak` of a GPU, its parts, and its `moment`, a text that is not read back.
    `spare_gib` is what remains on the card; negative if memory is missing. `tokens_per_step` and
    `tokens_per_second` are those of all GPUs without padding, `padding_share` is the share of
    padding. `cost` is in the currency of the price. `disk_gib` are the sizes of the `model` and a
    `checkpoint`, and the `most` on disk at a time. `fit` is the largest split of the batch that
    fits. `why` are the allocations of memory by moment; left out unless requested.
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
    """What is read back of `resume`.

    `step` is where the attempt continued, `kept` the checkpoints that it left in place, `requested`
    the one that the stage file named, `changes` what differed from the attempt before.
    """

    step: Count | None = None
    kept: list[str] = field(default_factory=list)
    requested: Any = field(default=None, metadata={codec.KEY: "asked"})
    changes: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRecord:
    """What is read back of `upstream`: the source that trained, and whether it was the pin."""

    pinned: bool | None = None
    version: str | None = None
    pin: str | None = None
    root: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedRecord:
    """What is read back of `deepspeed`: its version, and settings that gradients depend on."""

    version: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    gpus: list[Any] = field(default_factory=list)


class _Field(Generic[_T]):
    """A field of `RunRecord`, read back by a function of the manifest and the field's name."""

    def __init__(self, read: Callable[[Manifest, str], _T], key: str = "") -> None:
        self.read = read
        self.key = key

    def __set_name__(self, _owner: type[Manifest], name: str) -> None:
        self.key = self.key or name
        if self.key not in RunRecord.__annotations__:
            raise TypeError(f"run.json has no `{self.key}`")

    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> _T:
        return self.read(manifest, self.key)


def _make_reader(kind: type[_T]) -> Callable[[Manifest, str], _T]:
    def read(manifest: Manifest, key: str) -> _T:
        return codec.read_record(kind, manifest.part(key))

    return read


class Manifest(Record):
    """`run.json` as it is read back; `RunRecord` says what the fields hold."""

    created = _Field(Record.text)
    stage = _Field(Record.text)
    backend = _Field(Record.text)
    script = _Field(Record.text)
    cwd = _Field(Record.text)
    # the output folder that the stage file names, if that is not the one of the run
    requested_output = _Field(Record.text, "asked_output")
    attempt = _Field(Record.number)
    args = _Field(Record.part)
    argv = _Field(Record.items_of)
    samples = _Field(Record.number)
    contents = _Field(Record.items_of)
    caches = _Field(Record.items_of)
    plan = _Field(_make_reader(PlanRecord))
    resume = _Field(_make_reader(ResumeRecord))
    upstream = _Field(_make_reader(UpstreamRecord))
    trainer = _Field(_make_reader(TrainerRecord))
    machine = _Field(_make_reader(MachineRecord))

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
        part = self.part("deepspeed")
        if not part:
            return None
        return codec.read_record(DeepSpeedRecord, part)

    @property
    def output(self) -> Path | None:
        path: Path | None = codec.fit_value(self.value("output"), Path)
        return path

    @property
    def processes(self) -> int | None:
        """How many processes train; None if that is unknown or above LARGEST_WORLD."""
        plan = self.plan
        if plan.gpus is None:
            return None
        count = max(1, plan.gpus) * (plan.nodes or 1)
        if count > LARGEST_WORLD:
            return None
        return count

    @property
    def expected(self) -> Mapping[str, str | None] | None:
        """What was expected of each point; None if nothing was recorded.

        UNREADABLE stands for what is not a word.
        """
        expectations = self.get("expect")
        if not isinstance(expectations, dict):
            return None
        expected: dict[str, str | None] = {}
        for point, state in expectations.items():
            readable = state is None or isinstance(state, str)
            expected[point] = state if readable else UNREADABLE
        return expected

    def left_out(self) -> list[Omission]:
        """The values that are not used because they have another type than launch writes."""
        omissions: list[Omission] = []
        for name, kind in typing.get_type_hints(RunRecord, include_extras=True).items():
            if name not in self:
                continue
            try:
                codec.make_reader(kind)(self[name], name, omissions)
            except Misfit as misfit:
                codec.note_omission(omissions, name, self[name], misfit)
        return omissions


def as_mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    if isinstance(value, Mapping):
        return value
    return {}


def as_list(value: object) -> Sequence[Any]:
    """The value if it is a list or a tuple, else an empty list."""
    if isinstance(value, list | tuple):
        return value
    return []
