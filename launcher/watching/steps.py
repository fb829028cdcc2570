"""Optimizer steps that were taken, on their way from the device into the record: nobody waits for them."""

from __future__ import annotations

import collections
import math
import sys
from typing import Any

from .caches import Caches
from .contract import Contract
from .memory import torch_in_use
from .pairs import Pairs
from .process import Process
from .record import finite


class Reading:
    """The numbers of one step: `scalars` that may lie on a device, and what is `known` on the host."""

    def __init__(
        self, scalars: dict[str, list[Any]], known: dict[str, Any], *, at_once: bool = False
    ) -> None:
        self.known = known
        self.values: dict[str, list[float]] = {}
        self.places: list[tuple[str, int]] = []
        self.event: Any = None
        self.host: Any = None
        waiting = []
        for name, items in scalars.items():
            self.values[name] = [0.0] * len(items)
            for index, item in enumerate(items):
                if getattr(item, "is_cuda", False) and not at_once:
                    self.places.append((name, index))
                    waiting.append(item.detach())
                else:
                    self.values[name][index] = float(item)
        if waiting:
            torch = sys.modules["torch"]
            stacked = torch.stack([item.double().reshape(()) for item in waiting])
            # one copy into pinned memory, behind everything that the step has queued
            self.host = torch.empty(len(waiting), dtype=torch.float64, pin_memory=True)
            self.host.copy_(stacked, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def take(self) -> dict[str, list[float]]:
        """The values; waits for the device where they have not arrived."""
        if self.event is not None and self.host is not None:
            self.event.synchronize()
            for (name, index), value in zip(self.places, self.host.tolist(), strict=True):
                self.values[name][index] = value
            self.host = None
        return self.values


class Steps:
    """The steps whose numbers have not arrived yet, and what is made of those that have."""

    def __init__(self, process: Process, contract: Contract, caches: Caches, pairs: Pairs) -> None:
        self.process = process
        self.record = process.record
        self.contract = contract
        self.caches = caches
        self.pairs = pairs
        self.readings: collections.deque[Reading] = collections.deque()
        self.timing: Any = None

    def start_clock(self) -> None:
        """The first step begins; the device's own clock is read where there is one."""
        with self.record.quietly("timing"):
            torch = torch_in_use(self.process.settings.cpu)
            if torch is not None:
                self.timing = torch.cuda.Event(enable_timing=True)
                self.timing.record()

    def add(self, scalars: dict[str, list[Any]], known: dict[str, Any]) -> None:
        # at most the step before this one is still on its way: no bubble, and no more than one step late
        self.settle(wait=True)
        try:
            reading = Reading(scalars, known)
        except Exception as error:
            self.record.trouble("reading without waiting", error)
            reading = Reading(scalars, known, at_once=True)
        self.readings.append(reading)

    def settle(self, *, wait: bool = False) -> None:
        """Write the steps whose numbers have arrived; with `wait`, all of them."""
        while self.readings and (wait or self.readings[0].ready()):
            with self.record.quietly("step"):
                self.finish(self.readings.popleft())

    def finish(self, reading: Reading) -> None:
        values, known, process = reading.take(), reading.known, self.process
        seconds = known["seconds"]
        if reading.event is not None:
            if self.timing is not None:
                seconds = self.timing.elapsed_time(reading.event) / 1000
            self.timing = reading.event
        losses = values["loss"]
        valid = all(math.isfinite(loss) for loss in losses)
        mean = sum(losses) / known["parts"] if losses and valid else None
        norm = values["norm"][0] if values["norm"] else None
        gradient = next((v for v in (norm, *values.get("sampled", ())) if v is not None), 0.0)
        # a loss scaler meets overflows and skips the step: that is its business
        whole = valid and (known["scaled"] or math.isfinite(gradient))
        tokens, rows = int(sum(values["tokens"])), int(sum(values["rows"]))
        if known["step"] == process.base + process.settings.within:
            longer = max(values.get("longer", [0]))
            self.pairs.tell_waste(tokens, known["positions"], rows // 2, longer)
        self.record.write(
            "step", step=known["step"], loss=mean, finite=whole,
            micro_batches=known["micro_batches"], rows=rows, tokens=tokens,
            positions=known["positions"], wasted=known["positions"] - tokens,
            grad_norm=finite(norm), learning_rate=known["learning_rate"],
            seconds=round(seconds, 4), elapsed=round(known["elapsed"], 4),
            interrupted=known["interrupted"],
            allocated_gib=known["allocated_gib"], reserved_gib=known["reserved_gib"],
        )  # fmt: skip
        if not valid:
            value = next(str(loss) for loss in losses if not math.isfinite(loss))
            self.contract.nonfinite("loss", value, known["step"])
        elif not whole:
            self.contract.nonfinite("gradient", str(gradient), known["step"])
        elif mean is not None:
            process.last = {"step": known["step"], "loss": mean, "grad_norm": finite(norm)}
            if known["step"] == 1:
                self.caches.check_first_loss(mean)
