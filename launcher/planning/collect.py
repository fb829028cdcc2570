"""A request and the machine, read once -> `Facts`: the only step of planning that reads the stage file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from launcher.config import load
from launcher.config.load import Config
from launcher.errors import Finding, usage
from launcher.machine import devices, python
from launcher.machine.devices import Devices, Look
from launcher.machine.python import Interpreter, Trainer
from launcher.planning.request import Request
from launcher.rules import deepspeed
from launcher.stage import stage as stages
from launcher.upstream.locate import Locator, no_trainer
from launcher.upstream.trainers import BACKENDS


class Scope(Enum):
    """How far a request is read: the stage file and the source, or this machine too, on which it will start."""

    PLAN = auto()
    START = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was read for a request. Other settings are planned by other values of it, and nothing is read again.

    `devices` are the GPUs that the request names, `look` what this machine has, if asked. `packages` are those of
    the trainer's Python; None where another machine may train, so that what is installed here says nothing.
    """

    request: Request
    checked: stages.Judged
    stage: stages.Stage
    trainer: Trainer
    gpus: int
    devices: tuple[str, ...] | None = None
    look: Look | None = None
    packages: Mapping[str, str] | None = None

    def choose_devices(self) -> Devices:
        """The GPUs that it would get now; see `devices.choose` for how that is refused."""
        return devices.choose(self.gpus, self.devices, self.look or devices.look(os.environ))

    def of_any_machine(self) -> Facts:
        """Without what was read of this machine: for a plan that makes no use of it."""
        return replace(self, look=None, packages=None)

    def with_request(self, **changes: Any) -> Facts:
        """For a request that differs in where it runs and how it goes on, but not in its stage."""
        return replace(self, request=replace(self.request, **changes))


def judge(
    request: Request, scope: Scope = Scope.PLAN, *, loaded: Config | None = None
) -> tuple[stages.Judged, Trainer]:
    """Check a stage file, read unless `loaded`; find the Python that trains it. Raises InvalidConfig or NotReady."""
    loaded = loaded or load.load(request.config, request.overrides)
    locator, trainer = find_source(request, stages.backend_of(loaded))
    judged = stages.judge(loaded, stage=request.stage, locator=locator, running=scope is Scope.START)
    findings = accept_overlap(request, judged.findings)
    if scope is Scope.PLAN:
        findings = (*_without_trainer(request, judged, trainer), *findings)
    return replace(judged, findings=findings), trainer


def _without_trainer(request: Request, judged: stages.Judged, trainer: Trainer) -> Iterator[Finding]:
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
    return of_checked(request, *judge(request, scope, loaded=loaded), scope)


def of_checked(request: Request, checked: stages.Judged, trainer: Trainer, scope: Scope) -> Facts:
    """`collect` of a stage file that was judged already."""
    named, count = _named_devices(request)
    stage = stages.validate(checked, strict=request.strict)
    watch = stage.options.probe if request.probe else None
    if watch is not None and not request.final_save:
        watch = replace(watch, final_save=False)
    stage = replace(stage, options=replace(stage.options, probe=watch))
    count = count if count is not None else stage.options.gpus
    # eight cards can take ten seconds to answer: they are asked only where the answer counts
    # and not where other machines will train
    looks = not request.elsewhere and (scope is Scope.START or (count is None and stage.backend.ONE_GPU))
    look = devices.look(os.environ) if looks else None
    if count is None and look is not None and stage.backend.ONE_GPU:
        count = min(1, len(look.visible))
    if count is None or count < 0:
        raise usage("no-gpus", "how many GPUs?", "--gpus 8, or --gpus 0 for the CPU")
    return Facts(
        request=request,
        checked=checked,
        stage=stage,
        trainer=trainer,
        gpus=count,
        devices=named,
        look=look,
        packages=trainer.packages if scope is Scope.START else None,
    )


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
