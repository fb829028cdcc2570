"""A request and the machine, read once -> `Facts`: the only step of planning that reads the stage
file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from launcher.config import load
from launcher.config.load import Config
from launcher.errors import Finding, InvalidConfig, select_errors, usage
from launcher.lazy_dataclass import dataclass
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

    FILE is the stage file and the source that trains it. PLAN are also the GPUs here, where nobody
    says how many. HOST is this machine without its GPUs, which are another's, or free only later.
    START is all of this machine.
    """

    FILE = auto()
    PLAN = auto()
    HOST = auto()
    START = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    """The stage file of a request, read from disk once.

    `locator` finds the source that trains it, `trainer` is the Python that has it.
    """

    request: Request
    config: Config
    locator: Locator
    trainer: Trainer

    def with_overrides(self, *overrides: str, **changes: Any) -> StageFile:
        """The same file with more overrides, for a request with these changes. Raises
        InvalidConfig.
        """
        overrides_so_far = self.request.overrides
        request = replace(self.request, overrides=(*overrides_so_far, *overrides), **changes)
        config = self.config.with_overrides(overrides)
        if stages.find_backend(config) != stages.find_backend(self.config):
            return _add_trainer(request, config)
        return replace(self, request=request, config=config)

    def read(self) -> stages.Judged:
        """The file by the source that trains it; see `stage.read_stage_file`."""
        return stages.read_stage_file(self.config, stage=self.request.stage, locator=self.locator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was read for a request; other settings are planned by other values of it.

    `devices` are the GPUs that the request names, `look` those that this machine has. `packages`
    are those of the trainer's Python, `machine` is this machine; they and `look` are None if
    another machine may train.
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
        """The GPUs that a start would get now; None if they were not looked at."""
        if self.look is None:
            return None
        return devices.choose_devices(self.gpus, self.devices, self.look)

    def of_any_machine(self) -> Facts:
        """Without what was read of this machine."""
        return replace(self, look=None, packages=None, machine=None)

    def look_again(self) -> Facts:
        """With the GPUs as they are now."""
        return replace(self, look=devices.survey_devices(os.environ))

    def without_gpus(self) -> Facts:
        """For a run that gets its GPUs later."""
        return replace(self, look=None)

    def with_request(self, **changes: Any) -> Facts:
        """For a request that differs in where it runs and how it continues, not in its stage."""
        return replace(self, file=replace(self.file, request=replace(self.request, **changes)))

    def with_overrides(self, *overrides: str, **changes: Any) -> Facts:
        """The facts of the same file with more overrides, for a request with these changes.

        Neither the file nor the machine is read again. Raises InvalidConfig.
        """
        file = self.file.with_overrides(*overrides, **changes)
        return self.with_file(file, file.read())

    def with_file(self, file: StageFile, judged: stages.Judged) -> Facts:
        """The facts of another file, or other overrides, on this machine. Raises InvalidConfig."""
        facts = _collect_facts(file, judged, self.machine, default_gpus=self.gpus)
        return replace(facts, look=self.look, packages=self.packages)


def open_stage_file(request: Request, *, loaded: Config | None = None) -> StageFile:
    """Read the stage file of a request, unless `loaded`, and find its trainer.

    Raises InvalidConfig or NotReady.
    """
    config = loaded or load.load(request.config, request.overrides, borrowed=request.borrowed)
    return _add_trainer(request, config)


def _add_trainer(request: Request, config: Config) -> StageFile:
    locator, trainer = find_source(request, stages.find_backend(config))
    return StageFile(request=request, config=config, locator=locator, trainer=trainer)


def find_source(request: Request, backend: str) -> tuple[Locator, Trainer]:
    """What finds the source of a trainer, and the Python that has it."""
    locator = Locator(checkout=request.checkout, allow_unpinned=request.allow_unpinned)
    checkout = None
    if BACKENDS[backend].CHECKOUT:
        checkout = locator.find(backend).root
    trainer = python.find_trainer(request.python, checkout)
    locator.search = trainer.path
    return locator, trainer


def judge_request(request: Request) -> tuple[stages.Judged, Trainer]:
    """Check a stage file without a plan, and find its trainer. Raises InvalidConfig or NotReady."""
    file = open_stage_file(request)
    judged = file.read()
    return replace(judged, findings=collect_unplanned(file, judged)), file.trainer


def collect_unplanned(
    file: StageFile, judged: stages.Judged, machine: Machine | None = None
) -> tuple[Finding, ...]:
    """All findings of a stage file that is not planned; see `stage.check_unplanned`."""
    return apply_request(file, judged, machine, stages.check_unplanned(judged, machine))


def apply_request(
    file: StageFile, judged: stages.Judged, machine: Machine | None, findings: Iterable[Finding]
) -> tuple[Finding, ...]:
    """The findings of the rules as the request wants them.

    `allow_corrupting_overlap` makes its error a warning. Where no machine trains yet, a named
    Python without the trainer is a warning too: a start says which packages it needs.
    """
    adapted = []
    source = judged.upstream
    is_named = file.request.python is not None or os.environ.get("LAUNCH_PYTHON")
    lacks_source = source is not None and source.root is None and not source.is_checkout
    if source is not None and lacks_source and is_named and machine is None:
        trainer = file.trainer
        interpreter = Interpreter(python=trainer.python, source=trainer.source, path=trainer.path)
        finding = no_trainer(source.backend, interpreter, "warning")
        message = f"{finding.message}; judged by {source.version}"
        adapted.append(replace(finding, message=message))
    for finding in findings:
        if file.request.allow_corrupting_overlap and finding.code == deepspeed.OVERLAP:
            finding = replace(finding, severity="warning")
        adapted.append(finding)
    return tuple(adapted)


def collect(request: Request, scope: Scope, *, loaded: Config | None = None) -> Facts:
    """Read what a plan of this request needs. Raises InvalidConfig, NotReady or UsageError."""
    _read_named_devices(request)
    file = open_stage_file(request, loaded=loaded)
    return collect_read(file, file.read(), scope)


def collect_read(file: StageFile, judged: stages.Judged, scope: Scope) -> Facts:
    """`collect` of a stage file that was read already."""
    look = None
    default_gpus = None
    if _needs_gpus(file.request, judged, scope):
        look = devices.survey_devices(os.environ)
        default_gpus = min(1, len(look.visible))
    if scope in (Scope.FILE, Scope.PLAN):
        return _collect_facts(file, judged, None, default_gpus=default_gpus)
    machine = Machine(cpus=os.cpu_count())
    facts = _collect_facts(file, judged, machine, default_gpus=default_gpus)
    return replace(facts, look=look, packages=file.trainer.packages)


def _needs_gpus(request: Request, judged: stages.Judged, scope: Scope) -> bool:
    """Whether the GPUs must be surveyed: a plan needs it only if their number decides.

    Eight GPUs can take ten seconds to answer.
    """
    if scope is Scope.START:
        return True
    options = judged.options
    if scope is not Scope.PLAN or options is None or options.gpus is not None:
        return False
    _, count = _read_named_devices(request)
    return count is None and BACKENDS[options.backend].ONE_GPU


def _collect_facts(
    file: StageFile, judged: stages.Judged, machine: Machine | None, *, default_gpus: int | None
) -> Facts:
    """`default_gpus` is their number if nobody says it and the trainer takes one."""
    request = file.request
    if select_errors(judged.findings, strict=request.strict):
        # the rules say at once what else is wrong
        raise InvalidConfig(collect_unplanned(file, judged, machine))
    stage = stages.validate(judged)
    options = stage.options
    watch = options.probe
    if not request.probe:
        watch = None
    if watch is not None and not request.final_save:
        watch = replace(watch, final_save=False)
    names, count = _read_named_devices(request)
    if count is None:
        count = options.gpus
    if count is None and stage.backend.ONE_GPU:
        count = default_gpus
    if count is None or count < 0:
        raise usage("no-gpus", "how many GPUs?", "--gpus 8, or --gpus 0 for the CPU")
    return Facts(
        file=file,
        checked=judged,
        stage=replace(stage, options=replace(options, probe=watch)),
        gpus=count,
        devices=names,
        machine=machine,
    )


def _read_named_devices(request: Request) -> tuple[tuple[str, ...] | None, int | None]:
    """The GPUs that the command line names, and how many it asks for. Raises UsageError."""
    names = devices.parse_slots(request.devices)
    if names is None:
        return None, request.gpus
    count = len(names)
    if request.gpus not in (None, count):
        # a dry run looks at no GPU, and would plan for what no start gets
        message = f"--gpus {request.gpus}, but --devices names {count}"
        raise usage("bad-devices", message, f"--gpus {count}, or leave it out")
    return names, count
