"""What a rule may know beside upstream's arguments: launch's options, this machine, its files."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from launcher.errors import Finding, Severity
from launcher.lazy_dataclass import dataclass
from launcher.rules.protected import ProtectedPlaces
from launcher.upstream.schema import Values
from launcher.upstream.trainers import Entry, find_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which a run would start now; `cpus` are its processors."""

    cpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A batch as it is laid over devices.

    `processes` are those of all machines, one on the CPU. `devices` are groups of them that share
    their rows. `rows` are those of the data set, None where they are not known. `total` is the
    `batch.global` of the stage file, None where it has none.
    """

    processes: int
    devices: int
    rows: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The facts about one stage that a rule may ask for; None stands for what is not known.

    `deepspeed` is the parsed DeepSpeed file in use. `gpus` counts those of all nodes, 0 is the CPU.
    `per_device` (rows) and `accumulation` (forward passes a step) are what upstream will be given.
    `mixed_precision` is what accelerate will be given, `named_precision` what the stage file says.
    `packages` are names and versions in the trainer's Python. `machine` is None where another one
    may train. `output` is where the model goes, `attempts` how many the run there has had, None
    where it is a new one, `source` the folder of the trainer's source. `protected` looks at the
    folders that no run may overwrite, once for all contexts that share it.
    """

    values: Values
    environ: Mapping[str, str] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] | None = None
    mixed_precision: str | None = None
    named_precision: str | None = None
    gpus: int | None = None
    per_device: int | None = None
    accumulation: int | None = None
    split: Split | None = None
    packages: Mapping[str, str] | None = None
    machine: Machine | None = None
    output: Path | None = None
    attempts: int | None = None
    source: Path | None = None
    protected: ProtectedPlaces = field(default_factory=ProtectedPlaces)

    @property
    def entry(self) -> Entry:
        return find_entry(self.values.schema)

    @property
    def at_start(self) -> Severity:
        """The severity of what may still come until the run is to start."""
        return "warning" if self.machine is None else "error"

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that would run: DPO's own argument wins
        (dpo_tune_cache.py::main[if args.zero_stage]).
        """
        own = self.values.get("zero_stage")
        if isinstance(own, int):
            return own
        if self.deepspeed is None or self.gpus == 0:
            return None
        stage = section(self.deepspeed, "zero_optimization").get("stage", 0)
        return stage if isinstance(stage, int) else None

    @property
    def file(self) -> Mapping[str, Any] | None:
        """The DeepSpeed file as far as it is read: not on the CPU, nor beside `zero_stage`."""
        if self.values.get("zero_stage") is not None or self.gpus == 0:
            return None
        return self.deepspeed

    @property
    def distributed(self) -> bool:
        return self.file is not None or self.values.get("zero_stage") is not None

    def lacks(self, *names: str) -> bool:
        """Whether the trainer's Python is known to hold none of these packages."""
        return self.packages is not None and not any(name in self.packages for name in names)


StageRule = Callable[[Context], Iterator[Finding]]
RuleTable = Mapping[str, Mapping[str, tuple[StageRule, ...]]]
"""Rules by backend and stage."""


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def caches_only(context: Context) -> bool:
    """Whether the run ends once the data are tokenised
    (finetune.py::main[if args.cache_dataset_only],
    dpo_tune_cache.py::main[if args.cache_dataset_only]).
    """
    return context.values.get("cache_dataset_only") is True
