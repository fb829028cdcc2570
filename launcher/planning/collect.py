"""A request and the machine, read once -> `Facts`: the only step of planning that reads the stage file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from launcher.config import load
from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, errors, usage
from launcher.machine import devices, python
from launcher.machine.devices import Devices, Look
from launcher.machine.python import Interpreter, Trainer
from launcher.planning.request import Request
from launcher.redaction import Redactor
from launcher.rules import deepspeed
from launcher.rules.context import Machine
from launcher.stage import stage as stages
from launcher.upstream.locate import Locator, no_trainer
from launcher.upstream.trainers import BACKENDS


class Scope(Enum):
    """What is read for a request.

    FILE is the stage file and the source that trains it. PLAN are also the GPUs here, where nobody says how many.
    HOST is this machine without its GPUs, which are another's, or free only later. START is all of this machine.
    """

    FILE = auto()
    PLAN = auto()
    HOST = auto()
    START = auto()


class TrainerSource(NamedTuple):
    """Where the trainer of a stage file is: what reads its source, and the Python that has it."""

    locator: Locator
    trainer: Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    """The stage file of a request, read from disk once, and what trains it."""

    request: Request
    config: Config
    source: TrainerSource

    @property
    def trainer(self) -> Trainer:
        return self.source.trainer

    def with_overrides(self, *overrides: str, **changes: Any) -> StageFile:
        """The same file with further overrides, for a request with these changes. Raises InvalidConfig."""
        request = replace(self.request, overrides=(*self.request.overrides, *overrides), **changes)
        config = self.config.with_overrides(overrides)
        source = self.source
        if stages.backend_of(config) != stages.backend_of(self.config):
            source = find_source(request, stages.backend_of(config))
        return StageFile(request=request, config=config, source=source)

    def read(self) -> stages.Judged:
        """The file by the source that trains it; see `stage.read`."""
        return stages.read(self.config, stage=self.request.stage, locator=self.source.locator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was read for a request. Other settings are planned by other values of it, and nothing is read again.

    `devices` are the GPUs that the request names, `look` those that this machine has. `packages` are those of the
    trainer's Python. `machine` is this one. What was not read, because another machine may train, is None.
    """

    file: StageFile
    checked: stages.Judged
    stage: stages.Stage
    gpus: int
    devices: tuple[str, ...] | None = None
    look: Look | None = None
    packages: Mapping[str, str] | None = None
    machine: Machine | None = None

    @property
    def request(self) -> Request:
        return self.file.request

    @property
    def trainer(self) -> Trainer:
        return self.file.trainer

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of the stage file."""
        return self.file.config.redactor

    def choose_devices(self) -> Devices | None:
        """The GPUs that it would get now, None where they were not looked at; see `devices.choose` for refusals."""
        if self.look is None:
            return None
        return devices.choose(self.gpus, self.devices, self.look)

    def of_any_machine(self) -> Facts:
        """Without what was read of this machine: for a plan that makes no use of it."""
        return replace(self, look=None, packages=None, machine=None)

    def look_again(self) -> Facts:
        """With the GPUs as they are now."""
        return replace(self, look=devices.look(os.environ))

    def without_gpus(self) -> Facts:
        """For a run that gets its GPUs later, whoever has them now."""
        return replace(self, look=None)

    def with_request(self, **changes: Any) -> Facts:
        """For a request that differs in where it runs and how it goes on, but not in its stage."""
        return replace(self, file=replace(self.file, request=replace(self.request, **changes)))

    def with_overrides(self, *overrides: str, **changes: Any) -> Facts:
        """The facts of the same file with further overrides, for a request with these changes.

        Neither the file nor the machine is read again. Raises InvalidConfig.
        """
        file = self.file.with_overrides(*overrides, **changes)
        return self.with_file(file, file.read())

    def with_file(self, file: StageFile, judged: stages.Judged) -> Facts:
        """The facts of another file, or other overrides, on the same machine. Raises InvalidConfig."""
        other = _of_judged(file, judged, self.machine, default_gpus=self.gpus)
        return replace(other, look=self.look, packages=self.packages)


def open(request: Request, *, loaded: Config | None = None) -> StageFile:
    """Read the stage file of a request, unless `loaded`, and find its trainer. Raises InvalidConfig or NotReady."""
    config = loaded or load.load(request.config, request.overrides, borrowed=request.borrowed)
    return StageFile(request=request, config=config, source=find_source(request, stages.backend_of(config)))


def judge(request: Request) -> tuple[stages.Judged, Trainer]:
    """Check a stage file by what it tells alone; find the Python that trains it. Raises InvalidConfig or NotReady."""
    file = open(request)
    judged = file.read()
    return replace(judged, findings=unplanned_findings(file, judged)), file.trainer


def unplanned_findings(file: StageFile, judged: stages.Judged, machine: Machine | None = None) -> tuple[Finding, ...]:
    """All findings of a stage file that is not planned; see `stage.unplanned_findings`."""
    findings = accept_overlap(file.request, stages.unplanned_findings(judged, machine))
    if machine is None:
        findings = (*without_trainer(file, judged), *findings)
    return findings


def without_trainer(file: StageFile, judged: stages.Judged) -> Iterator[Finding]:
    """That the named Python lacks the trainer; a plan does without, and a start says which packages it needs."""
    source = judged.upstream
    trainer = file.trainer
    is_named = file.request.python is not None or os.environ.get("LAUNCH_PYTHON")
    if source is None or source.is_checkout or source.root is not None or not is_named:
        return
    interpreter = Interpreter(python=trainer.python, source=trainer.source, path=trainer.path)
    finding = no_trainer(source.backend, interpreter, "warning")
    yield replace(finding, message=f"{finding.message}; judged by {source.version}")


def find_source(request: Request, backend: str) -> TrainerSource:
    locator = Locator(checkout=request.checkout, allow_unpinned=request.allow_unpinned)
    checkout = locator.find(backend).root if BACKENDS[backend].CHECKOUT else None
    trainer = python.find_trainer(request.python, checkout)
    locator.search = trainer.path
    return TrainerSource(locator, trainer)


def collect(request: Request, scope: Scope, *, loaded: Config | None = None) -> Facts:
    """Read everything that a plan of this request needs. Raises InvalidConfig, NotReady or UsageError."""
    _named_devices(request)
    file = open(request, loaded=loaded)
    return of_read(file, file.read(), scope)


def of_read(file: StageFile, judged: stages.Judged, scope: Scope) -> Facts:
    """`collect` of a stage file that was read already."""
    machine = None
    if scope in (Scope.HOST, Scope.START):
        machine = Machine(cpus=os.cpu_count())
    # eight cards can take ten seconds to answer: they are asked only where the answer counts
    look = None
    default_gpus = None
    if scope is Scope.START or (scope is Scope.PLAN and _has_default_gpus(file.request, judged)):
        look = devices.look(os.environ)
        default_gpus = min(1, len(look.visible))
    facts = _of_judged(file, judged, machine, default_gpus=default_gpus)
    if machine is None:
        return facts
    return replace(facts, look=look, packages=file.trainer.packages)


def _has_default_gpus(request: Request, judged: stages.Judged) -> bool:
    """Whether nobody says how many GPUs, and the trainer takes one where there is one."""
    options = judged.options
    if options is None or options.gpus is not None or _named_devices(request)[1] is not None:
        return False
    return BACKENDS[options.backend].ONE_GPU


def _of_judged(file: StageFile, judged: stages.Judged, machine: Machine | None, *, default_gpus: int | None) -> Facts:
    """The facts of a stage file that was read; `default_gpus` where nobody says how many."""
    request = file.request
    if errors(judged.findings, strict=request.strict):
        # the rules say at once what else is wrong
        raise InvalidConfig(unplanned_findings(file, judged, machine))
    named, count = _named_devices(request)
    stage = stages.validate(judged)
    watch = stage.options.probe if request.probe else None
    if watch is not None and not request.final_save:
        watch = replace(watch, final_save=False)
    stage = replace(stage, options=replace(stage.options, probe=watch))
    if count is None:
        count = stage.options.gpus
    if count is None and stage.backend.ONE_GPU:
        count = default_gpus
    if count is None or count < 0:
        raise usage("no-gpus", "how many GPUs?", "--gpus 8, or --gpus 0 for the CPU")
    return Facts(file=file, checked=judged, stage=stage, gpus=count, devices=named, machine=machine)


def _named_devices(request: Request) -> tuple[tuple[str, ...] | None, int | None]:
    """The GPUs that the command line names, and how many it asks for. Raises UsageError."""
    named = devices.named(request.devices)
    count = request.gpus
    if named is not None and count not in (None, len(named)):
        # a dry run looks at no GPU, and would plan for what no start gets
        help = f"--gpus {len(named)}, or leave it out"
        raise usage("bad-devices", f"--gpus {count}, but --devices names {len(named)}", help)
    return named, count if named is None else len(named)


def accept_overlap(request: Request, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    if not request.allow_corrupting_overlap:
        return tuple(findings)
    return tuple(replace(one, severity="warning") if one.code == deepspeed.OVERLAP else one for one in findings)
