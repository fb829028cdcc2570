"""What a run takes besides memory: tokens a step, hours and money; and which batch fills the card.

Time comes from a measured speed where there is one, else from arithmetic at a stated MFU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from launcher import cards, memory
from launcher.errors import Finding, InvalidConfig
from launcher.footprint import Footprint, packed_row
from launcher.moments import Memory
from launcher.plan import divisors
from launcher.setups import Setup

STATED_MFU = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one optimizer step over all ranks: `real` ones, and `computed` with padding."""

    real: float
    computed: float
    formula: str

    @property
    def waste(self) -> float:
        """Share of computed positions that are padding."""
        return 1 - self.real / self.computed if self.computed else 0.0


def tokens_per_step(footprint: Footprint) -> Tokens:
    """What one step reads on average; DPO reads two sequences a row, as one batch.

    Rows that dpo.py packs are computed whole, however full: one a rank.
    """
    plan = footprint.plan
    if (row := packed_row(plan, footprint.rows)) is not None:
        return Tokens(
            real=row.real * plan.processes, computed=float(row.positions * plan.processes),
            formula=f"{plan.processes} rows of {row.positions:,} positions, {row.pairs:.1f} pairs and "
            f"{row.real:,.0f} tokens in each on average",
        )  # fmt: skip
    one, times = footprint.typical, plan.accumulation * plan.processes
    return Tokens(real=one.real * times, computed=one.tokens * times,
                  formula=f"{one.formula}, x {plan.accumulation} x {plan.processes}")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Real tokens a second over all devices, and where the number comes from."""

    tokens: float
    source: str
    measured: bool


def stated_speed(footprint: Footprint, tokens: Tokens, device: str) -> Speed:
    """Speed at a stated MFU; raises InvalidConfig (`unknown-device`) for a GPU without a data sheet."""
    peak = cards.peak_flops(device)
    if peak is None:
        raise InvalidConfig(Finding(
            severity="error", layer="launch", code="unknown-device", key="gpu",
            message=f"the arithmetic speed of {device or 'this GPU'} is not known",
            help="known are " + ", ".join(one.name for one in cards.SHEETS) + "; or give --tokens-per-second",
        ))  # fmt: skip
    shape, row = footprint.shape, packed_row(footprint.plan, footprint.rows)
    trained, frozen = shape.multiplied, 0
    if footprint.adapters is not None:
        trained, frozen = frozen, trained
    # attention goes over the whole of a row that dpo.py packs
    each = cards.flops_a_token(
        trained=trained, frozen=frozen, layers=shape.layers, query=shape.query,
        width=footprint.rows.mean if row is None else float(row.positions),
    )  # fmt: skip
    computed = STATED_MFU * peak * footprint.plan.processes / each
    return Speed(
        tokens=computed * (1 - tokens.waste), measured=False,
        source=f"{STATED_MFU:.0%} MFU of {peak / 1e12:,.0f} TFLOP/s a GPU, {each / 1e9:.1f} GFLOP a token",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Hours and money of a run; None is what is not known."""

    hours: float | None
    cost: float | None
    formula: str


def bill(
    *, steps: int | None, tokens: Tokens, speed: Speed, devices: int, price: float | None,
    reference_rows: int | None = None, per_step_rows: int = 1,
) -> Bill:  # fmt: skip
    """`price` is for one GPU and hour; a reference pass is a forward pass over all rows: a third."""
    if steps is None or speed.tokens <= 0:
        return Bill(
            hours=None, cost=None, formula="the steps are not known: --rows, or a limit of steps"
        )
    seconds = steps * tokens.real / speed.tokens
    formula = f"{steps:,} steps x {tokens.real:,.0f} tokens / {speed.tokens:,.0f} a second"
    if reference_rows:
        seconds += reference_rows / max(1, per_step_rows) * tokens.real / speed.tokens / 3
        formula += f", and {reference_rows:,} rows forward through the reference: a third of a step"
    hours = seconds / 3600
    cost = None if price is None else hours * price * devices
    if not math.isfinite(hours) or not math.isfinite(cost or 0.0):
        return Bill(hours=None, cost=None, formula=f"{formula}: more than can be counted")
    return Bill(hours=hours, cost=cost, formula=formula)


# --- filling the card ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest per-device batch that fits, its accumulation and memory."""

    per_device: int
    accumulation: int
    memory: Memory
    spare: float


def splits(total: int, processes: int) -> list[int]:
    """Per-device batches that keep a global batch of `total`, smallest first."""
    if total < 1 or processes < 1 or total % processes:
        return []
    return divisors(total // processes)


def fit(
    setup_of: Callable[[int, int], Setup], *, total: int, processes: int, gib: float,
    memory_of: Callable[[Setup], Memory] = memory.estimate,
) -> Fit | None:  # fmt: skip
    """The largest per-device batch that fits a card of `gib`, the global batch kept.

    `setup_of(per_device, accumulation)` describes the run. None where even one row does not fit.
    """
    best: Fit | None = None
    for per_device in splits(total, processes):
        accumulation = total // per_device // processes
        planned = memory_of(setup_of(per_device, accumulation)).within(memory.usable(gib))
        inside, spare = memory.fits(planned, gib)
        if not inside:
            # a larger batch never takes less, but accumulation's gradients fall away at the last split
            if accumulation > 2:
                break
            continue
        best = Fit(per_device=per_device, accumulation=accumulation, memory=planned, spare=spare)
    return best
