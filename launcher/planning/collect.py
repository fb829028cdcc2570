"""A request and the machine, read once -> `Facts`: the only step of planning that reads the stage file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from launcher.config import load
from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, errors, usage
from launcher.machine import devices, python
from launcher.machine.devices import Devices, Look
from launcher.machine.python import Interpreter, Trainer
from launcher.planning.request import Request
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was read for a request. Other settings are planned by other values of it, and nothing is read again.

    `devices` are the GPUs that the request names, `look` those that this machine has. `packages` are those of the
    trainer's Python. `machine` is this one. What was not read, because another machine may train, is None.
    """

    request: Request
    checked: stages.Judged
    stage: stages.Stage
    trainer: Trainer
    gpus: int
    devices: tuple[str, ...] | None = None
    look: Look | None = None
    packages: Mapping[str, str] | None = None
    machine: Machine | None = None

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
        return replace(self, request=replace(self.request, **changes))


def read(request: Request, *, loaded: Config | None = None) -> tuple[stages.Judged, Trainer]:
    """Read a stage file, unless `loaded`, and find the Python that trains it. Raises InvalidConfig or NotReady."""
    loaded = loaded or load.load(request.config, request.overrides)
    locator, trainer = find_source(request, stages.backend_of(loaded))
    judged = stages.read(loaded, stage=request.stage, locator=locator)
    return judged, trainer


def judge(request: Request) -> tuple[stages.Judged, Trainer]:
    """Check a stage file by what it tells alone; find the Python that trains it. Raises InvalidConfig or NotReady."""
    judged, trainer = read(request)
    return replace(judged, findings=unplanned_findings(request, judged, trainer)), trainer


def unplanned_findings(
    request: Request, judged: stages.Judged, trainer: Trainer, machine: Machine | None = None
) -> tuple[Finding, ...]:
    """All findings of a stage file that is not planned; see `stage.unplanned_findings`."""
    findings = accept_overlap(request, stages.unplanned_findings(judged, machine))
    if machine is None:
        findings = (*without_trainer(request, judged, trainer), *findings)
    return findings


def without_trainer(request: Request, judged: stages.Judged, trainer: Trainer) -> Iterator[Finding]:
    """That the named Python lacks the trainer; a plan does without, and a start says which packages it needs."""
    source = judged.upstream
    is_named = request.python is not None or os.environ.get("LAUNCH_PYTHON")
    if source is None or source.is_checkout or source.root is not None or not is_named:
        return
    interpreter = Interpreter(python=trainer.python, source=trainer.source, path=trainer.path)
    finding = no_trainer(source.backend, interpreter, "warning")
    yield replace(finding, message=f"{finding.message}; judged by {source.version}")


def find_source(request: Request, backend: str) -> tuple[Locator, Trainer]:
    locator = Locator(checkout=request.checkout, allow_unpinned=request.allow_unpinned)
    checkout = locator.find(backend).root if BACKENDS[backend].CHECKOUT else None
    trainer = python.find_trainer(request.python, checkout)
    locator.search = trainer.path
    return locator, trainer


def collect(request: Request, scope: Scope, *, loaded: Config | None = None) -> Facts:
    """Read everything that a plan of this request needs. Raises InvalidConfig, NotReady or UsageError."""
    _named_devices(request)
    return of_read(request, *read(request, loaded=loaded), scope)


def of_read(request: Request, judged: stages.Judged, trainer: Trainer, scope: Scope) -> Facts:
    """`collect` of a stage file that was read already."""
    named, count = _named_devices(request)
    machine = None
    if scope in (Scope.HOST, Scope.START):
        machine = Machine(cpus=os.cpu_count())
    if errors(judged.findings, strict=request.strict):
        # the rules say at once what else is wrong
        raise InvalidConfig(unplanned_findings(request, judged, trainer, machine))
    stage = stages.validate(judged)
    watch = stage.options.probe if request.probe else None
    if watch is not None and not request.final_save:
        watch = replace(watch, final_save=False)
    stage = replace(stage, options=replace(stage.options, probe=watch))
    if count is None:
        count = stage.options.gpus
    is_default = count is None and stage.backend.ONE_GPU
    # eight cards can take ten seconds to answer: they are asked only where the answer counts
    look = None
    if scope is Scope.START or (scope is Scope.PLAN and is_default):
        look = devices.look(os.environ)
    if look is not None and is_default:
        count = min(1, len(look.visible))
    if count is None or count < 0:
        raise usage("no-gpus", "how many GPUs?", "--gpus 8, or --gpus 0 for the CPU")
    facts = Facts(request=request, checked=judged, stage=stage, trainer=trainer, gpus=count, devices=named)
    if machine is None:
        return facts
    return replace(facts, look=look, packages=trainer.packages, machine=machine)


def _named_devices(request: Request) -> tuple[tuple[str, ...] | None, int | None]:
    """The GPUs that the command line names, and how many it asks for. Raises UsageError."""
    named, count = devices.named(request.devices), request.gpus
    if named is not None and count not in (None, len(named)):
        # a dry run looks at no GPU, and would plan for what no start gets
        help = f"--gpus {len(named)}, or leave it out"
        raise usage("bad-devices", f"--gpus {count}, but --devices names {len(named)}", help)
    return named, count if named is None else len(named)


def accept_overlap(request: Request, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    if not request.allow_corrupting_overlap:
        return tuple(findings)
    return tuple(replace(one, severity="warning") if one.code == deepspeed.OVERLAP else one for one in findings)
