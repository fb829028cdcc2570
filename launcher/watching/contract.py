"""What was expected of this run, held against what is seen while it trains."""

from __future__ import annotations

import os
from collections.abc import Callable

from .liger import Liger
from .process import Process, say


class Contract:
    """What was expected of this run, held against what is seen; ends the process where it is broken."""

    def __init__(self, process: Process, liger: Liger, leave: Callable[..., None]) -> None:
        self.process = process
        self.settings = process.settings
        self.liger = liger
        self.leave = leave
        self.states: dict[str, str] = {}
        self.told: set[str] = set()
        if self.settings.stage == "sft":
            self.settings.expect.pop("reference_cache", None)
        # one rank of a machine fills a cache, and the others find it
        if int(os.environ.get("LOCAL_RANK") or 0):
            for point in ("dataset_cache", "reference_cache"):
                self.settings.expect.pop(point, None)

    def wanted(self, point: str) -> str | None:
        return self.settings.expect.get(point)

    def seen(
        self, point: str, state: str | None, *, final: bool = True, step: int | None = None,
        found: str | None = None,
    ) -> None:  # fmt: skip
        """Note a state; where it is `final` and not the one expected, the contract is broken.

        `found` is what to say of it, in place of the two states; `step` is the one it was met in.
        """
        if state is None:
            return
        self.states[point] = state
        if final and not self.met(point):
            self.broken(point, self.wanted(point), state, step=step, found=found)

    def met(self, point: str) -> bool:
        wanted, state = self.wanted(point), self.states.get(point)
        met = {wanted, "isolated"} if (point, wanted) == ("packing", "on") else {wanted}
        return wanted is None or state in met

    def after_step(self, step: int) -> None:
        """What has to be proved within the first steps is proved now, or it is not."""
        if step > self.settings.within:
            return
        # what was to be saved is the logits': without the loss that was asked for, the others are not it
        whole = self.liger.losses <= self.liger.calls.keys()
        if self.liger.calls and (whole or self.wanted("liger") != "engaged"):
            self.seen("liger", "engaged")
        if step < self.settings.within:
            return
        self.states.setdefault(
            "liger", "not_engaged" if self.wanted("liger") == "engaged" else "off"
        )
        for point in ("liger", "packing", "attention", "dataset_cache", "reference_cache"):
            switched_off = point == "packing" and not self.settings.isolation
            if switched_off and self.wanted(point) == "isolated" and self.states.get(point) == "on":
                # whoever switches the test off wants no proof
                continue
            if not self.met(point):
                self.broken(point, self.wanted(point), self.states.get(point, "unknown"))

    def nonfinite(self, what: str, value: str, step: int) -> None:
        self.process.record.write("nonfinite", step=step, what=what, value=value)
        if self.settings.checks_loss:
            self.broken("loss", "finite", f"{what} {value}", step=step)

    def broken(
        self, point: str, expected: str | None, seen: str, step: int | None = None,
        found: str | None = None,
    ) -> None:  # fmt: skip
        if point in self.told:
            return
        self.told.add(point)
        process, last = self.process, self.process.last
        # a step in the making is the one that the user will look for
        begun = process.base + 1 if process.step_begun is not None else None
        at = step if step is not None else process.at if process.step else begun
        when = f"step {at}" if at else "before the first step"
        message = found or f"{point} expected {expected}, seen {seen}"
        message += f" ({when}, rank {process.rank})"
        if point == "loss":
            message = f"{seen.replace(' ', ' is ', 1)} ({when}, rank {process.rank})"
            if last:
                norm = last.get("grad_norm")
                told = f", gradient norm {norm:.4g}" if norm is not None else ""
                message += f"; last finite: loss {last['loss']:.6g}{told} at step {last['step']}"
        process.record.write(
            "violation", point=point, expected=expected, seen=seen, step=at, rank=process.rank,
            last=last or None, message=message, stopped=self.settings.stops,
        )  # fmt: skip
        if self.settings.stops:
            self.leave(f"stopped: {message}")
        else:
            say(f"warning: {message}")
