"""Which share of the trained weights differs from what it was before the first step.

A learning rate below what a weight's format can add, a frozen model or an optimizer that holds other
parameters leave losses that look well. What is looked at are the weights that the optimizer updates:
the fp32 copies where an engine keeps some, for they move where their bfloat16 copies do not yet.
"""

from __future__ import annotations

import sys
from typing import Any

from .gradients import Sample, elements
from .optimizer import Optimizer
from .process import Process
from .record import finite

ELEMENTS = 2**18
"""Of all tensors together, about: 1 MiB in fp32."""
FLOOR = 2.0**-40
"""An element that moved by less has not moved: from exactly 0, every learning rate leads away."""
# deepspeed/runtime/zero/stage3.py, stage_1_and_2.py, runtime/bf16_optimizer.py
_MASTERS = (
    "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition",
)  # fmt: skip


class Movement:
    """The sample before the first step, and what has become of it."""

    def __init__(self, process: Process, optimizer: Optimizer) -> None:
        self.process = process
        self.record = process.record
        self.optimizer = optimizer
        self.begun = False
        self.before: Any = None
        self.stepping: Any = None
        self.reported = 0

    def begin(self, stepping: Any = None) -> None:
        """An optimizer is about to take its first step: the given one, or that of the engine."""
        if self.begun:
            return
        self.begun = True
        # `prepare` may have put another one in place of the one that it was given
        self.stepping = stepping or self.optimizer.given
        with self.record.quietly("weights"):
            tensors = self._tensors()
            sizes = [int(tensor.numel()) for tensor in tensors]
            if not sizes:
                self.record.write("weights", reason="the optimizer's weights were not found")
                return
            self.sample = Sample(sizes, max(16, ELEMENTS // len(sizes)))
            self.sample.draw(0)
            self.before = self._taken(tensors)

    def _tensors(self) -> list[Any]:
        """What this process's optimizer updates, without what has no element here."""
        outer = getattr(self.optimizer.engine, "optimizer", None)
        masters = next((m for name in _MASTERS if (m := getattr(outer, name, None))), None)
        if masters is None:
            groups = getattr(outer or self.stepping, "param_groups", ())
            masters = [p for group in groups for p in group["params"] if p.requires_grad]
        local = (getattr(tensor, "_local_tensor", tensor) for tensor in masters)
        return [tensor for tensor in local if tensor.numel()]

    def _taken(self, tensors: list[Any]) -> Any:
        torch, sample = sys.modules["torch"], self.sample
        if [int(tensor.numel()) for tensor in tensors] != sample.sizes:
            raise RuntimeError("the optimizer has other tensors than before its first step")
        places = zip(sample.offsets, sample.strides, sample.counts, strict=True)
        with torch.no_grad():
            parts = [elements(t, *place) for t, place in zip(tensors, places, strict=True)]
            # one device, whichever the optimizer's tensors are on
            return torch.cat([part.detach().float().to(parts[0].device) for part in parts])

    def report(self) -> None:
        """The share so far, into the record, where steps were taken since the last report."""
        step = self.process.step
        if self.before is None or step == self.reported:
            return
        self.reported = step
        with self.record.quietly("weights"):
            change = self._taken(self._tensors()) - self.before
            # what is no number has moved as well
            still = int((change.abs() <= FLOOR).sum())
            largest = float(change.abs().max())
            self.record.write(
                "weights", step=self.process.at, steps=step, sampled=int(change.numel()),
                moved=int(change.numel()) - still, largest=finite(largest),
                tensors=len(self.sample.sizes),
            )  # fmt: skip
