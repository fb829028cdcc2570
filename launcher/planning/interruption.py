"""What an interruption costs by the plan: the work between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from launcher.errors import Finding, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.machine.sizes import format_size
from launcher.plan.plan import Plan
from launcher.planning.resume import epochs

LONG_GPU_HOURS = 8.0
"""A run that loses as much is warned of if it saves no checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The risk of a plan.

    `interval` is in steps, None without checkpoints or if it is not a number of steps. `hours` are
    those of the whole run, None if unknown; `size` is that of a checkpoint in bytes.
    """

    saves: bool
    interval: int | None
    steps: int | None
    hours: float | None
    gpus: int
    size: int

    @property
    def lost_gpu_hours(self) -> float | None:
        """GPU-hours that a crash loses at most."""
        if self.hours is None or (self.saves and self.interval is None):
            return None
        share = 1.0
        if self.interval is not None and self.steps:
            share = min(1.0, self.interval / self.steps)
        return self.hours * share * self.gpus

    def as_json(self) -> dict[str, Any]:
        lost = self.lost_gpu_hours
        if lost is not None:
            lost = round(lost, 2)
        return {"interval": self.interval, "lost_gpu_hours": lost}

    def line(self) -> str:
        lost = self.lost_gpu_hours
        hours = ""
        if lost is not None:
            hours = f", up to {lost:.2f} GPU-hours"
        if not self.saves:
            return f"no checkpoints: a crash loses everything{hours}"
        size = format_size(self.size)
        if self.interval is None:
            return f"a crash loses what came after the last checkpoint ({size})"
        if hours:
            hours += " lost by a crash"
        return f"a checkpoint of {size} every {self.interval:,} steps{hours}"

    def findings(self, key: str) -> Iterator[Finding]:
        """A warning about a long run that saves nothing until its end."""
        lost = self.lost_gpu_hours
        if self.saves or lost is None or lost < LONG_GPU_HOURS:
            return
        message = f"checkpointing is off: a crash loses up to {lost:.0f} GPU-hours"
        help = f"`{key}`: with a checkpoint an hour, it loses an hour"
        yield launch_finding("warning", "no-checkpoints", message, help, key=f"args.{key}")


def estimate_interruption(planned: Plan, hours: float | None, size: int) -> Interruption:
    """The risk of a plan that takes so many hours, and whose checkpoints have `size` bytes."""
    every = epochs.find_interval(planned)
    steps = planned.steps
    interval = None
    passes = planned.values.get(planned.stage.entry.names.epochs)
    if isinstance(every, int):
        interval = every
    elif every == "epoch" and steps and isinstance(passes, int | float) and passes >= 1:
        interval = math.ceil(steps / passes)
    return Interruption(
        saves=every is not None,
        interval=interval,
        steps=steps,
        hours=hours,
        gpus=planned.gpus * planned.nodes,
        size=size,
    )
