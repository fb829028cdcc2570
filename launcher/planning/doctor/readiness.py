"""`launch doctor`: is this machine ready, for one stage file or for a backend as such."""

import os

from launcher.config import keys
from launcher.machine import devices
from launcher.machine.devices import Devices
from launcher.planning import check, collect
from launcher.planning.collect import Scope
from launcher.planning.doctor import checks
from launcher.planning.doctor.checks import Report, Subject
from launcher.planning.request import Request


def of_stage(request: Request, *, importing: bool = True) -> Report:
    facts = collect.collect(request, Scope.START)
    subject = checks.of_plan(check.require(facts), facts.trainer)
    chosen = facts.choose_devices() or Devices()
    return checks.examine(subject, chosen, look=facts.look, importing=importing)


def of_backend(request: Request, backend: str, *, importing: bool = True) -> Report:
    """For a backend, whatever the stage: of the request only the machine's side counts."""
    look = devices.survey_devices(os.environ)
    names = devices.slots_named(request.devices)
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
