"""`launch doctor`: is this machine ready for a stage file, for one trainer, or for each of them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from launcher.config import keys
from launcher.errors import Exit, Finding, InvalidConfig
from launcher.lazy_dataclass import dataclass
from launcher.machine import devices
from launcher.machine.devices import Devices
from launcher.planning import check, collect
from launcher.planning.collect import Scope
from launcher.planning.doctor import checks
from launcher.planning.doctor.checks import Report, Subject
from launcher.planning.request import Request
from launcher.upstream.trainers import BACKENDS

_OF_TRAINER = ("python", "source", "torch", "imports")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReports:
    """The report for each trainer. A machine that is ready for one of them is ready."""

    reports: Mapping[str, Report]

    @property
    def exit_code(self) -> Exit:
        return min((report.exit_code for report in self.reports.values()), default=Exit.OK)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Each once. What keeps from one trainer alone is a note where another one is ready."""
        findings: dict[Finding, None] = {}
        for report in self.reports.values():
            for finding in report.findings:
                if self.exit_code is Exit.OK and finding.severity == "error":
                    finding = replace(finding, severity="note")
                findings[finding] = None
        return tuple(findings)

    def lines(self) -> list[str]:
        """The machine's facts once, each trainer's own, and a line for each trainer."""
        names = {fact.name for report in self.reports.values() for fact in report.facts}
        width = max(map(len, names), default=0)
        lines = []
        printed: set[str] = set()
        for report in self.reports.values():
            for fact in report.facts:
                key = fact.text if fact.name in _OF_TRAINER else fact.name
                if key not in printed:
                    printed.add(key)
                    lines.append(f"{fact.name:<{width}}  {fact.text}")
        for backend, report in self.reports.items():
            lines.append(f"{backend}: {report.lines()[-1]}")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "ready": self.exit_code is Exit.OK,
            "trainers": {backend: report.as_json() for backend, report in self.reports.items()},
        }


def examine_each_backend(request: Request, say: Callable[[str], None]) -> TrainerReports:
    """For every trainer; `say` is told whose packages are being imported."""
    reports = {}
    for number, backend in enumerate(BACKENDS, start=1):
        progress = f"{number} of {len(BACKENDS)}"
        say(f"importing what {backend} imports ({progress}); this can take a minute")
        reports[backend] = examine_backend(request, backend)
    return TrainerReports(reports=reports)


def examine_stage(request: Request, *, importing: bool = True) -> Report:
    """For a stage file on this machine.

    Raises InvalidConfig if installing packages cannot repair what is wrong with the file.
    """
    facts = collect.collect(request, Scope.START)
    faults: tuple[Finding, ...] = ()
    try:
        plan = check.require(facts)
    except InvalidConfig as error:
        # the faults of the installed packages are shown beside the commands that install others
        faults = error.findings
        plan = check.require(replace(facts, packages=None))
    subject = checks.make_subject(plan, facts.trainer)
    chosen = facts.choose_devices() or Devices()
    report = checks.examine(subject, chosen, look=facts.look, importing=importing)
    return replace(report, findings=(*faults, *report.findings))


def examine_backend(request: Request, backend: str, *, importing: bool = True) -> Report:
    """For a backend, whatever the stage: of the request only the machine's side counts."""
    look = devices.survey_devices(os.environ)
    names = devices.parse_slots(request.devices)
    locator, trainer = collect.find_source(request, backend)
    if request.gpus is None and not names:
        chosen = Devices(slots=look.visible, why="all that are visible")
    else:
        chosen = devices.choose_devices(request.gpus, names, look)
    subject = Subject(
        trainer=trainer,
        upstream=locator.find(backend),
        stages=keys.STAGES,
        gpus=len(chosen.slots) or request.gpus or 0,
    )
    return checks.examine(subject, chosen, look=look, importing=importing)
