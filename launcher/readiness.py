"""`launch doctor`: what is to be asked of this machine, for one stage file or for a backend at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import devices, doctor, keys, machine, plan, preparation
from launcher.devices import Devices
from launcher.doctor import Report, Subject
from launcher.upstream import Locator


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One command line. Without `config` it is about the backend: open_instruct unless named."""

    config: Path | None = None
    overrides: Sequence[str] = ()
    gpus: int | None = None
    devices: str | None = None
    python: Path | None = None
    checkout: Path | None = None
    backend: str | None = None
    allow_unpinned: bool = False


def examine(question: Question, *, importing: bool = True) -> Report:
    """Look at everything. Raises InvalidConfig for a stage file that is refused whatever the machine."""
    if question.config is not None:
        request = preparation.Request(
            stage=None, config=question.config, overrides=question.overrides, gpus=question.gpus,
            python=question.python, checkout=question.checkout, devices=question.devices,
            allow_unpinned=question.allow_unpinned,
        )  # fmt: skip
        wanted = preparation.ask(request, running=True)
        made = plan.make(wanted.stage, gpus=wanted.gpus)
        subject = doctor.of_plan(made, wanted.trainer)
        return doctor.examine(subject, wanted.chosen(), seen=wanted.seen, importing=importing)
    seen = devices.look(os.environ)
    asked = devices.named(question.devices)
    backend = question.backend or "open_instruct"
    locator = Locator(checkout=question.checkout, allow_unpinned=question.allow_unpinned)
    root = locator.find(backend).root if backend == "open_instruct" else None
    trainer = machine.find_trainer(question.python, root)
    locator.search = trainer.path
    count = question.gpus if question.gpus is not None or asked else len(seen.visible)
    every = Devices(slots=seen.visible, why="all that are visible")
    chosen = every if question.gpus is None and not asked else devices.choose(count, asked, seen)
    subject = Subject(
        trainer=trainer, upstream=locator.find(backend), stages=keys.STAGES,
        gpus=len(chosen.slots) or count or 0,
    )  # fmt: skip
    return doctor.examine(subject, chosen, seen=seen, importing=importing)
