"""What one optimizer step sends between GPUs, and the least time that this takes.

Arithmetic, nothing measured: the volumes are those of "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (Rajbhandari et al., 2020, section 7), corrected where DeepSpeed 0.18.9 sends more. A
collective over N ranks is taken as rings, as NCCL does: each rank sends (N - 1)/N of the whole, in N - 1
hops; an all-reduce does so twice. Links are taken at the makers' peak, so real runs take longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.activations import HALF
from launcher.setups import Setup, Zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What connects the GPUs: bytes a second out of one GPU, in one direction; seconds a hop."""

    name: str
    node: int
    inside: float
    between: float
    hop_inside: float
    hop_between: float

    def rate(self, ranks: int) -> float:
        """Bytes a second that each rank sends in a ring over so many.

        Rings are laid so that each leaves a machine by another network card: all cards of a machine
        together carry what one GPU hands on.
        """
        return self.inside if ranks <= self.node else min(self.inside, self.node * self.between)

    def delay(self, ranks: int) -> float:
        """Seconds that one ring takes for its hops alone."""
        if ranks <= 1:
            return 0.0
        machines = math.ceil(ranks / self.node)
        crossings = machines if machines > 1 else 0
        return (ranks - 1 - crossings) * self.hop_inside + crossings * self.hop_between


H100 = Links(
    name="8 H100 a machine, NVLink 4, one 400 Gb/s InfiniBand card for each",
    # NVIDIA's data sheets say 900 GB/s, which is both directions together, and 400 Gb/s
    node=8, inside=450e9, between=50e9,
    # NCCL's own estimates for a ring in the LL128 protocol (src/graph/tuning.cc, hwLat)
    hop_inside=1.9e-6, hop_between=4.0e-6,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of message of an optimizer step: bytes that each rank sends, collectives, seconds."""

    name: str
    bytes: float
    calls: int
    seconds: float
    formula: str
    source: str = ""


def traffic(setup: Setup, links: Links = H100) -> tuple[Traffic, ...]:
    """All that a rank sends in one optimizer step, `setup.accumulation` micro-batches; () for one rank."""
    if setup.processes <= 1:
        return ()
    zero = setup.zero
    if zero is not None and zero.stage == 3:
        return _sharded(setup, zero, links)
    if zero is not None and zero.stage in (1, 2):
        return _partitioned(setup, zero, links)
    size = setup.gradient_bytes * setup.trained
    # torch's DistributedDataParallel sends buckets of 25 MiB
    calls = math.ceil(size / (25 * 2**20))
    return (_sent("gradients, all-reduced", size, setup.processes, links, calls=calls, rings=2,
                  formula=f"{setup.gradient_bytes}P"),)  # fmt: skip


def seconds(sent: Iterable[Traffic]) -> float:
    """All of them one after the other."""
    return sum(one.seconds for one in sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of one optimizer step: arithmetic alone, and communication alone."""

    compute: float
    communication: float

    @property
    def shortest(self) -> float:
        """All communication behind arithmetic, or the other way round."""
        return max(self.compute, self.communication)

    @property
    def longest(self) -> float:
        """Nothing at the same time."""
        return self.compute + self.communication

    @property
    def bound(self) -> bool:
        """Whether the links decide, however well the two overlap."""
        return self.communication >= self.compute


def _partitioned(setup: Setup, zero: Zero, links: Links) -> tuple[Traffic, ...]:
    """ZeRO-2 reduces each micro-batch's gradients at once, ZeRO-1 once a step; both gather the weights."""
    times = setup.accumulation if zero.stage == 2 else 1
    size, width = setup.trained, zero.communication
    return (
        _sent("gradients, all-reduced", times * width * size, setup.processes, links, rings=2,
              calls=times * buckets(_trained(setup), zero.bucket), formula=f"{times} x {width}P, twice",
              source="deepspeed/runtime/zero/stage_1_and_2.py:2384"),
        _sent("new weights, gathered", HALF * size, setup.processes, links, calls=1, formula="2P",
              source="deepspeed/runtime/zero/stage_1_and_2.py:3155"),
    )  # fmt: skip


def _sharded(setup: Setup, zero: Zero, links: Links) -> tuple[Traffic, ...]:
    """ZeRO-3: weights gathered for both passes of each micro-batch, gradients reduced where they belong.

    A checkpointed layer is computed again just before its backward pass and keeps its weights for it.
    """
    times, ranks = setup.accumulation, setup.processes
    size = times * HALF * setup.shape.parameters
    calls = times * sum(1 for weight in setup.shape.sizes if weight >= zero.persistence)
    near = zero.secondary if 1 < zero.secondary <= ranks else ranks
    return (
        _sent("weights, gathered forward", size, ranks, links, calls=calls, formula=f"{times} x 2P"),
        _sent("weights, gathered backward", size, near, links, calls=calls,
              formula=f"{times} x 2P" + (f", from {near} ranks (ZeRO++)" if near != ranks else "")),
        _sent("gradients, reduced and scattered", times * zero.communication * setup.trained, ranks, links,
              calls=times * buckets(_trained(setup), zero.bucket),
              formula=f"{times} x {zero.communication}P",
              source="deepspeed/runtime/zero/stage3.py:1931"),
    )  # fmt: skip


def _sent(
    name: str, size: float, ranks: int, links: Links, *, calls: int, formula: str, rings: int = 1,
    source: str = "",
) -> Traffic:  # fmt: skip
    sent = rings * size * (ranks - 1) / ranks
    time = sent / links.rate(ranks) + calls * rings * links.delay(ranks)
    return Traffic(
        name=name, bytes=sent, calls=calls, seconds=time, formula=f"{formula} x (N - 1)/N", source=source
    )  # fmt: skip


def buckets(sizes: Sequence[int], limit: int) -> int:
    """Into how many messages gradients fall: one is sent when the next would not fit; none is split."""
    count, held = 0, 0
    for size in sizes:
        if held and held + size > limit:
            count, held = count + 1, 0
        held += size
    return count + (1 if held else 0)


def _trained(setup: Setup) -> list[int]:
    """Elements of every trained weight."""
    adapters = setup.adapters
    if adapters is None:
        return setup.shape.sizes
    pairs = [s for name, s in setup.shape.linears().items() if name in adapters.targets]
    return [adapters.rank * side for pair in pairs for side in pair] * setup.shape.layers
