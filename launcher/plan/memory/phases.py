"""`Allocation` -> `Phase` -> `Memory`: what is in a card's memory, by name and by phase of a run,
in GiB.

An allocation is entered once, into a `Ledger`, with all the phases that it lives in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from launcher.lazy_dataclass import dataclass
from launcher.upstream.citations import render_citations

GIB = 2**30

KINDS = ("weights", "gradients", "optimizer", "communication", "activations", "logits", "other")
MARGIN = 0.08
"""The share of a card that allocated memory cannot use: CUDA's own context, NCCL's buffers, and
fragments that the allocator has reserved."""

# The phases that can be the fullest, in the order of a run. The engine's start is none: Adam's
# states are made in the first step, and weights are made flat on the host where there is no room
# (deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.__init__[= flat_buffer_bytes])
REFERENCE = "reference pass"
FORWARD = "forward pass"
LOSS = "loss"
OUTPUT = "output layer's gradient"
OUTPUT_SENT = "sending the output layer's gradient"
LAYER = "last layer's backward pass"
FIRST_BUCKET = "first bucket being sent"
SECOND_BUCKET = "second bucket being sent"
BUCKETS = (FIRST_BUCKET, SECOND_BUCKET)
EMBEDDING = "embedding's gradient"
NORM = "gradient norm"
STEP = "optimizer's step"
STEPS = (FORWARD, LOSS, OUTPUT, OUTPUT_SENT, LAYER, *BUCKETS, EMBEDDING, NORM, STEP)
PHASES = (REFERENCE, *STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One thing in memory: `kind` is one of KINDS."""

    kind: str
    name: str
    gib: float
    formula: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What is in memory at one point of a run."""

    name: str
    allocations: tuple[Allocation, ...]

    @property
    def gib(self) -> float:
        return sum(allocation.gib for allocation in self.allocations)

    def without(self, *kinds: str) -> Phase:
        left = [allocation for allocation in self.allocations if allocation.kind not in kinds]
        return Phase(name=self.name, allocations=tuple(left))

    def as_json(self) -> dict[str, Any]:
        parts = [
            {**asdict(allocation), "gib": round(allocation.gib, 3)}
            for allocation in self.allocations
        ]
        return {"moment": self.name, "gib": round(self.gib, 2), "parts": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The phases of a run; the fullest is its peak. All sizes are GiB."""

    phases: tuple[Phase, ...]

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.gib)

    @property
    def peak(self) -> float:
        return self.fullest.gib

    def without(self, *kinds: str) -> Memory:
        return Memory(phases=tuple(phase.without(*kinds) for phase in self.phases))

    def spare(self, gib: float) -> float:
        """What a card of this size has left; negative: missing."""
        return compute_usable(gib) - self.peak

    def of(self, kind: str) -> float:
        allocations = self.fullest.allocations
        return sum(allocation.gib for allocation in allocations if allocation.kind == kind)

    def as_json(self) -> dict[str, Any]:
        """`memory_gib` of the plan's JSON contract: the peak, and what it is made of by kind."""
        kinds = {kind: round(self.of(kind), 2) for kind in KINDS}
        return {"peak": round(self.peak, 2), **kinds, "moment": self.fullest.name}

    def why(self) -> list[dict[str, Any]]:
        """Every phase with its allocations and their formulas, the fullest first."""
        ordered = sorted(self.phases, key=lambda phase: -phase.gib)
        return [phase.as_json() for phase in ordered]


def compute_usable(gib: float) -> float:
    return gib * (1 - MARGIN)


class Ledger:
    """Allocations with the phases that they live in, for a micro-batch of `tokens`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._entries: list[tuple[frozenset[str], Allocation]] = []

    def add(
        self,
        phases: Iterable[str],
        kind: str,
        name: str,
        size: float,
        formula: str = "",
        source: str = "",
    ) -> None:
        """Enter an allocation of `size` bytes; nothing is entered where there are none."""
        if size <= 0:
            return
        if not formula:
            formula = f"{self.tokens:,} tokens x {size / self.tokens:,.0f} bytes"
        allocation = Allocation(
            kind=kind, name=name, gib=size / GIB, formula=formula, source=render_citations(source)
        )
        self._entries.append((frozenset(phases), allocation))

    def alive(self, phase: str) -> Phase:
        alive = [allocation for phases, allocation in self._entries if phase in phases]
        return Phase(name=phase, allocations=tuple(alive))
