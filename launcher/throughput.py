"""How long an optimizer step should take, before anything was measured: arithmetic, bytes, launches.

Good to tens of percent, which is enough to put settings in an order; what short runs then measure corrects
it (`search`). Arithmetic counts as in "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al.,
2022, appendix B), the traffic of the ZeRO stages as in "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models" (Rajbhandari et al., 2020, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher import budget, lengths
from launcher.cards import Card
from launcher.footprint import Footprint
from launcher.setups import HALF, Zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one optimizer step and its real tokens over all devices; `waste` is padding's share."""

    seconds: float
    tokens: float
    waste: float


# shares of the peak that large kernels of each kind reach
_MATMUL, _FLASH, _SDPA = 0.66, 0.45, 0.25
# what DeepSpeed's buckets reach of a link's data sheet, and how much of that nothing hides: 135 of 450 GB/s
# and 16 of 27 % of a step on two H200 (docs/benchmarks.md)
_LINK, _SHOWN = 0.3, 0.6
# positions at which matrix products reach half of that
_HALF_FULL = 700
# kernels of one layer and pass, and of one micro-batch beside the layers
_KERNELS, _KERNELS_AROUND = 22, 150


def pace(footprint: Footprint, card: Card) -> Pace:
    """What one step of this plan should take on such a card."""
    plan = footprint.plan
    tokens, batch = budget.tokens_per_step(footprint), footprint.typical
    micro = _micro_batch(footprint, batch, card)
    zero, processes = footprint.zero, plan.processes
    trained = _trained(footprint)
    sent = _sent(footprint.shape.parameters, trained, zero, processes)
    sent /= _LINK * card.link
    # the rest hides behind the backward pass
    shown = _SHOWN * sent if zero is not None else sent
    sends = plan.accumulation if zero is not None and zero.stage > 1 else 1
    step = _step(trained, zero, processes, card)
    return Pace(
        seconds=plan.accumulation * micro + sends * shown + step, tokens=tokens.real,
        waste=tokens.waste,
    )  # fmt: skip


def _passes(footprint: Footprint) -> float:
    """Forward passes that a backward pass costs, itself included."""
    return 3.0 + (1.0 if footprint.checkpointing else 0.0)


def _trained(footprint: Footprint) -> int:
    adapters = footprint.adapters
    return adapters.parameters(footprint.shape) if adapters else footprint.shape.parameters


def _micro_batch(footprint: Footprint, batch: lengths.Batch, card: Card) -> float:
    """Forward and backward pass of one micro-batch, in seconds."""
    shape, positions = footprint.shape, batch.tokens
    passes = _passes(footprint) - (1.0 if footprint.adapters else 0.0)
    passes += 1.0 if _reference_beside(footprint) else 0.0
    full = positions / (positions + _HALF_FULL)
    arithmetic = passes * 2 * shape.multiplied * positions / (card.flops * _MATMUL * full)
    attention = passes * shape.layers * _attention(footprint, batch, card)
    moved = passes * _moved(footprint) * positions / card.bandwidth
    doubled = 2 if footprint.adapters else 1
    kernels = doubled * passes * (_KERNELS * shape.layers + _KERNELS_AROUND)
    # what runs between launches is hidden, what is shorter is not
    return max(arithmetic + attention + moved, kernels * card.launch) + 0.02 * kernels * card.launch


def _reference_beside(footprint: Footprint) -> bool:
    """Whether DPO's reference goes forward in every step: open-instruct has its answers beforehand."""
    plan = footprint.plan
    own = plan.stage.options.backend == "trl" and footprint.dpo
    return own and not plan.values.get("precompute_ref_log_probs")


def _attention(footprint: Footprint, batch: lengths.Batch, card: Card) -> float:
    """One layer's attention in one pass: flash follows the rows, a mask makes a square of all of it."""
    shape, tokens = footprint.shape, batch.tokens
    if footprint.attention.startswith("flash"):
        width = footprint.rows.mean if footprint.packed else batch.width
        return 2 * tokens * width * shape.query / (card.flops * _FLASH)
    width = tokens if footprint.packed else batch.width
    return 4 * tokens * width * shape.query / (card.flops * _SDPA)


def _moved(footprint: Footprint) -> float:
    """Bytes a position moves through memory in one pass, beside matrix products and attention."""
    shape = footprint.shape
    liger = bool(footprint.plan.values.get(footprint.plan.stage.entry.names.liger))
    norms, gates = (10, 3) if liger else (22, 6)
    layer: float = HALF * (norms * shape.hidden + gates * shape.intermediate)
    # casts of every operand
    layer = 1.5 * layer if footprint.autocast else layer
    head = (4 if liger else 12) * shape.vocab
    return shape.layers * layer + head / 2


def _sent(parameters: int, trained: int, zero: Zero | None, processes: int) -> float:
    """Bytes that one device sends at a time: ZeRO-2 for each micro-batch, and ZeRO-3 gathers too.

    ZeRO-1 reduces once a step (deepspeed/runtime/engine.py:3089), as does no ZeRO at all. All but ZeRO-3
    all-reduce, which sends everything twice (deepspeed/runtime/zero/stage_1_and_2.py:2384). What ZeRO-3
    gathers to compute a checkpointed layer again it keeps for that layer's backward pass.
    """
    if processes < 2:
        return 0.0
    share = (processes - 1) / processes
    width = HALF if zero is None else zero.communication
    reduced = trained * width * share * (2 if zero is None or zero.stage < 3 else 1)
    if zero is None or zero.stage < 3:
        return reduced
    return reduced + 2 * HALF * parameters * share


def _step(trained: int, zero: Zero | None, processes: int, card: Card) -> float:
    """The optimizer's pass over its states, and sending the new weights around."""
    own = trained / (processes if zero is not None else 1)
    seconds = 30 * own / card.bandwidth
    if zero is not None and zero.offload_optimizer:
        # states on the host: gradients there, weights back, Adam at the host's speed
        seconds += own * (2 * HALF / 25e9 + 30 / 60e9)
    if zero is not None and zero.stage < 3 and processes > 1:
        seconds += HALF * trained / (_LINK * card.link)
    if zero is not None and zero.offload_params:
        seconds += 3 * HALF * trained / processes / 25e9
    return seconds
