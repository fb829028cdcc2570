"""This training process, and where in the run it stands."""

from __future__ import annotations

import os
import time
from typing import Any

from .record import Record
from .settings import Settings


class Process:
    """What all pieces share: the settings, the record, the rank, and the optimizer step.

    `step` counts this process's own, `base` those before the checkpoint it was resumed from. `testing`
    while passes run that are none of training. `last` is the last step whose loss was finite.
    """

    def __init__(self, settings: Settings) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.world = int(os.environ.get("WORLD_SIZE") or 1)
        self.settings = settings
        self.record = Record(settings.out, self.rank)
        self.begun = time.perf_counter()
        self.step_begun: float | None = None
        self.step = 0
        self.base = 0
        self.resumed = False
        self.testing = False
        self.last: dict[str, Any] = {}

    @property
    def at(self) -> int:
        """The optimizer step of the run: those before the checkpoint it was resumed from, and its own."""
        return self.base + self.step

    def resumes(self, path: str, step: int) -> None:
        """The policy comes out of a checkpoint: it is not its own reference any more."""
        self.resumed, self.base = True, step
        self.record.write("resumed", path=path, step=step)
