"""What an interruption costs by the plan: the work between two checkpoints, and the time that each save takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.errors import Finding, launch_finding
from launcher.machine.sizes import sized
from launcher.plan.plan import Plan
from launcher.planning.resume import epochs
from launcher.runs.preemption import SAVE_BYTES_PER_S, save_seconds

LONG_GPU_HOURS = 8.0
"""From here on a run is long: without checkpoints that is warned of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The risk of one plan. `interval` in steps, None without checkpoints or where it is not a number of steps;
    `hours` of the whole run, None where unknown; `size` of a checkpoint in bytes."""

    saves: bool
    interval: int | None
    steps: int | None
    hours: float | None
    gpus: int
    size: int

    @property
    def step_seconds(self) -> float | None:
        if self.hours is None or not self.steps:
            return None
        return self.hours * 3600 / self.steps

    @property
    def lost_gpu_hours(self) -> float | None:
        """GPU-hours that a crash loses at most."""
        if self.hours is None or (self.saves and self.interval is None):
            return None
        share = 1.0
        if self.interval is not None and self.steps:
            share = min(1.0, self.interval / self.steps)
        return self.hours * share * self.gpus

    @property
    def save_share(self) -> float | None:
        """The share of the time that goes into saves."""
        seconds = self.step_seconds
        if seconds is None or self.interval is None:
            return None
        saved = save_seconds(self.size)
        return saved / (saved + self.interval * seconds)

    def as_json(self) -> dict[str, Any]:
        lost = self.lost_gpu_hours
        share = self.save_share
        return {
            "interval": self.interval,
            "lost_gpu_hours": None if lost is None else round(lost, 2),
            "save_seconds": round(save_seconds(self.size), 1),
            "save_share": None if share is None else round(share, 4),
        }

    def line(self) -> str:
        save = f"a save of {sized(self.size)} takes about {save_seconds(self.size):,.0f} s "
        save += f"at {SAVE_BYTES_PER_S / 10**9:g} GB/s"
        if self.save_share is not None:
            save += f", {self.save_share:.1%} of the time"
        if not self.saves:
            risk = "no checkpoints: a crash loses everything"
        elif self.interval is None:
            risk = "a crash loses what came after the last checkpoint"
        else:
            risk = f"a checkpoint every {self.interval:,} steps"
        if self.lost_gpu_hours is not None:
            risk += f", up to {self.lost_gpu_hours:.2f} GPU-hours"
            if self.saves:
                risk += " lost by a crash"
        return f"{risk}; {save}"

    def findings(self, key: str) -> Iterator[Finding]:
        """That a long run saves nothing until its end."""
        lost = self.lost_gpu_hours
        if self.saves or lost is None or lost < LONG_GPU_HOURS:
            return
        message = f"checkpointing is off: a crash loses up to {lost:.0f} GPU-hours"
        help = f"`{key}`: with a checkpoint an hour, it loses an hour"
        yield launch_finding("warning", "no-checkpoints", message, help, key=f"args.{key}")


def of_plan(planned: Plan, steps: int | None, hours: float | None, size: int) -> Interruption:
    """The risk of a plan of so many steps and hours, whose checkpoints have `size` bytes."""
    every = epochs.interval(planned)
    interval = every if isinstance(every, int) else None
    passes = planned.values.get(planned.stage.entry.names.epochs)
    if every == "epoch" and steps and isinstance(passes, int | float) and passes >= 1:
        interval = math.ceil(steps / passes)
    return Interruption(
        saves=every is not None,
        interval=interval,
        steps=steps,
        hours=hours,
        gpus=planned.gpus * planned.nodes,
        size=size,
    )
