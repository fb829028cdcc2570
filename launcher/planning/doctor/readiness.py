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
    resolved = collect.collect(request, Scope.START)
    plan = check.require(resolved)
    chosen = resolved.choose_devices() or Devices()
    subject = checks.of_plan(plan, resolved.trainer)
    return checks.examine(subject, chosen, look=resolved.look, importing=importing)


def of_backend(request: Request, backend: str, *, importing: bool = True) -> Report:
    """For a backend, with whatever stage: of the request only the machine's side counts."""
    look = devices.look(os.environ)
    named = devices.named(request.devices)
    locator, trainer = collect.find_source(request, backend)
    count = request.gpus if request.gpus is not None or named else len(look.visible)
    every = Devices(slots=look.visible, why="all that are visible")
    chosen = every if request.gpus is None and not named else devices.choose(count, named, look)
    gpus = len(chosen.slots) or count or 0
    subject = Subject(trainer=trainer, upstream=locator.find(backend), stages=keys.STAGES, gpus=gpus)
    return checks.examine(subject, chosen, look=look, importing=importing)
