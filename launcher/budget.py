"""What a run takes besides memory: tokens a step, hours, money, disk; and which batch fills the card.

Time comes from a measured speed where there is one, else from arithmetic at a stated MFU, by the count
of "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al., 2022, appendix B).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from launcher import cards, lengths, memory
from launcher.errors import Finding, InvalidConfig
from launcher.lengths import Lengths
from launcher.moments import KINDS, Memory
from launcher.packed_rows import Packed
from launcher.plan import divisors
from launcher.setups import Setup
from launcher.shapes import Shape

STATED_MFU = 0.35
Change = TypeVar("Change")


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


def tokens_per_step(
    rows: Lengths, *, per_device: int, accumulation: int, processes: int, packed: bool, dpo: bool = False
) -> Tokens:  # fmt: skip
    """What one step reads on average; DPO reads two sequences a row, as one batch."""
    sequences = per_device * (2 if dpo else 1)
    one = lengths.typical(rows, rows=sequences, packed=packed)
    times = accumulation * processes
    return Tokens(real=one.real * times, computed=one.tokens * times,
                  formula=f"{one.formula}, x {accumulation} x {processes}")  # fmt: skip


def tokens_of_rows(row: Packed, processes: int) -> Tokens:
    """One step of packed rows that are computed whole, however full: one a rank."""
    return Tokens(
        real=row.real * processes, computed=float(row.positions * processes),
        formula=f"{processes} rows of {row.positions:,} positions, {row.pairs:.1f} pairs and "
        f"{row.real:,.0f} tokens in each on average",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Real tokens a second over all devices, and where the number comes from."""

    tokens: float
    source: str
    measured: bool


def flops_a_token(
    shape: Shape, width: float, *, checkpointing: bool, adapters: bool = False
) -> float:
    """Arithmetic of one token's forward and backward pass at rows of `width` tokens.

    6 a parameter (output layer included, embedding table not) and 6 L Q S for causal attention; LoRA
    leaves out the weight gradients. Checkpointing's second forward pass is real work, but not counted by
    MFU; `checkpointing` adds it.
    """
    parameters = shape.active_parameters - (0 if shape.tied else shape.embedding)
    passes = (4 if adapters else 6) + (2 if checkpointing else 0)
    attention = shape.layers * shape.query * width * (passes if not adapters else passes + 2)
    return passes * parameters + attention


def stated_speed(
    shape: Shape, tokens: Tokens, width: float, *, device: str, devices: int, mfu: float = STATED_MFU,
    adapters: bool = False, dpo: bool = False,
) -> Speed:  # fmt: skip
    """Speed at a stated MFU; raises InvalidConfig (`unknown-device`) for a GPU without a data sheet."""
    peak = cards.peak_flops(device)
    if peak is None:
        raise InvalidConfig(Finding(
            severity="error", layer="launch", code="unknown-device", key="gpu",
            message=f"the arithmetic speed of {device or 'this GPU'} is not known",
            help="known are " + ", ".join(one.name for one in cards.SHEETS) + "; or give --tokens-per-second",
        ))  # fmt: skip
    each = flops_a_token(shape, width, checkpointing=False, adapters=adapters)
    computed = mfu * peak * devices / each
    return Speed(
        tokens=computed * (1 - tokens.waste), measured=False,
        source=f"{mfu:.0%} MFU of {peak / 1e12:,.0f} TFLOP/s a GPU, {each / 1e9:.1f} GFLOP a token",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Hours, money (None without a price) and disk of a run."""

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
    margin: float = 0.08, memory_of: Callable[[Setup], Memory] = memory.estimate,
) -> Fit | None:  # fmt: skip
    """The largest per-device batch that fits a card of `gib` with the margin, the global batch kept.

    `setup_of(per_device, accumulation)` describes the run. None where even one row does not fit.
    """
    best: Fit | None = None
    for per_device in splits(total, processes):
        accumulation = total // per_device // processes
        planned = memory_of(setup_of(per_device, accumulation)).within(gib * (1 - margin))
        inside, spare = memory.fits(planned, gib, margin=margin)
        if not inside:
            # a larger batch never takes less, but accumulation's gradients fall away at the last split
            if accumulation > 2:
                break
            continue
        best = Fit(per_device=per_device, accumulation=accumulation, memory=planned, spare=spare)
    return best


def half_empty(
    now: Memory, found: Fit | None, *, per_device: int, accumulation: int, gib: float, key: str
) -> Iterator[Finding]:  # fmt: skip
    """A larger batch fits, and the card is filled to less than 60 %."""
    if found is None or found.per_device <= per_device or now.peak >= 0.6 * gib:
        return
    less = accumulation / found.accumulation
    how = "halves accumulation" if less == 2 else f"divides accumulation by {less:g}"
    yield Finding(
        severity="note", layer="launch", code="half-empty", key=key,
        message=f"{now.peak:.0f} of {gib:g} GiB used: per-device batch {found.per_device} fits "
        f"({found.memory.peak:.0f} GiB) and {how}",
        help=f"write `per_device: {found.per_device}`, or let --fit choose",
    )  # fmt: skip


def too_large(
    now: Memory, *, gib: float, margin: float = 0.08, help: str | None = None
) -> Iterator[Finding]:  # fmt: skip
    """The plan does not fit: by how much, what the peak is made of, and (`help`) what would do."""
    inside, spare = memory.fits(now, gib, margin=margin)
    if inside:
        return
    now = now.within(gib * (1 - margin))
    kind = max(KINDS, key=now.of)
    parts = [part for part in now.fullest.parts if part.kind == kind]
    largest = max(parts, key=lambda part: part.gib)
    yield Finding(
        severity="warning", layer="launch", code="out-of-memory",
        message=f"{now.peak:.1f} GiB are planned and {gib * (1 - margin):.1f} of {gib:g} can be used: "
        f"{-spare:.1f} GiB missing, at the {now.fullest.name}; {now.of(kind):.1f} of it are {kind} "
        f"({largest.name}: {largest.gib:.2f} GiB = {largest.formula})",
        help=help,
    )  # fmt: skip


def mends(
    groups: Sequence[Sequence[Change]], peak_of: Callable[[Sequence[Change]], float | None], *,
    now: float, usable: float,
) -> list[tuple[tuple[Change, ...], float]]:  # fmt: skip
    """Changes with their peaks in GiB: those that fit alone, else in pairs, else all together.

    Where nothing fits, the nearest to it, if it takes less than `now`. Of each group the first that fits.
    """
    tried: dict[tuple[Change, ...], float] = {}

    def fits(*chosen: Change) -> bool:
        peak = peak_of(chosen)
        if peak is not None:
            tried[chosen] = peak
        return peak is not None and peak <= usable

    for size in (1, 2):
        fitting = [
            next((one for one in itertools.product(*some) if fits(*one)), None)
            for some in itertools.combinations(groups, size)
        ]
        if found := [(one, tried[one]) for one in fitting if one is not None]:
            return found
    fits(*(group[-1] for group in groups))
    if not tried or min(tried.values()) >= now:
        return []
    chosen = min(tried, key=lambda one: tried[one])
    # what adds nothing is not asked for
    for one in chosen:
        rest = tuple(other for other in chosen if other is not one)
        peak = peak_of(rest)
        if peak is not None and peak <= max(usable, tried[chosen]):
            tried[rest], chosen = peak, rest
    return [(chosen, tried[chosen])]


def half_wasted(
    row: Packed, fuller: tuple[int, Packed], *, pairs: int, key: str
) -> Iterator[Finding]:  # fmt: skip
    """More than half of what a step computes is empty, and a larger batch would fill it."""
    more, full = fuller
    if row.filled >= 0.5:
        return
    better = f"; {more} fills {full.filled:.0%}" if more > pairs else ""
    yield Finding(
        severity="warning", layer="launch", code="half-wasted", key=key,
        message=f"batch {pairs} uses {row.filled:.0%} of each step{better}: rows of {row.positions:,} "
        "positions are computed whole, however many pairs stand in them",
        help=f"write `per_device: {more}`: a step takes the same time and memory"
        if better else "shorter `max_seq_length`, or `packing: false`",
    )  # fmt: skip


# --- what is not the same on other counts of GPUs --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Variance:
    """Something that changes with the number of GPUs although the global batch does not."""

    name: str
    message: str
    where: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--format json`."""
        return {"name": self.name, "message": self.message, "where": list(self.where)}


def _scheduler(*where: str) -> Variance:
    return Variance(
        name="scheduler", where=where,
        message="the scheduler is made for max_train_steps x processes, without max_train_steps for "
        "an epoch that is not yet split: warm-up and end differ by the rounding",
    )  # fmt: skip


def _resume(*where: str) -> Variance:
    return Variance(
        name="resume", where=where,
        message="the position of a checkpoint is counted in this run's accumulation and batches: "
        "after a change of GPUs other rows are skipped",
    )  # fmt: skip


_TRAINER = (
    Variance(
        name="last step",
        where=("transformers/trainer.py:1015", "accelerate/data_loader.py:266"),
        message="the last step of an epoch reads some rows twice so that every rank gets a full batch: how "
        "many depends on the ranks; with `dataloader_drop_last` an epoch may have fewer steps",
    ),
    Variance(
        name="order",
        where=("transformers/trainer.py:1071", "transformers/trainer.py:1106"),
        message="with a `train_sampling_strategy` by length, rows are put together by each rank's own share "
        "of a step: other counts read other rows together",
    ),
    Variance(
        name="random state",
        where=("transformers/trainer.py:3705",),
        message="a resume goes on at the same row, but a rank without a saved random state of its own draws "
        "other dropout",
    ),
)


VARIANCES: dict[tuple[str, str], tuple[Variance, ...]] = {
    ("open_instruct", "sft"): (
        Variance(
            name="token weighting", where=("finetune.py:832",),
            message="the loss is a mean over each micro-batch's own tokens, and micro-batches weigh the "
            "same: other splits weigh tokens differently",
        ),
        Variance(
            name="steps", where=("finetune.py:692", "finetune.py:720"),
            message="an epoch's steps are rounded up from each rank's own batches: the last step of an "
            "epoch holds a different remainder, and some rows may be read twice to fill it",
        ),
        _scheduler("finetune.py:710"),
        _resume("finetune.py:766", "finetune.py:769"),
    ),
    ("open_instruct", "dpo"): (
        Variance(
            name="steps", where=("dpo_tune_cache.py:440", "dpo_tune_cache.py:474"),
            message="an epoch's steps are rounded up from each rank's own batches: the last step of an "
            "epoch holds a different remainder",
        ),
        _scheduler("dpo_tune_cache.py:458"),
        _resume("dpo_tune_cache.py:514", "dpo_tune_cache.py:564"),
    ),
    ("open_instruct", "dpo_olmo_core"): (
        Variance(
            name="packed batch", where=("dpo.py:224", "data_loader.py:324"),
            message="packed, a step is one row a GPU however many are accumulated: more GPUs read more "
            "pairs in a step, and an epoch has fewer steps",
        ),
        Variance(
            name="pair weighting",
            where=("olmo_core_train_modules.py:191", "olmo_core_train_modules.py:223"),
            message="a micro-batch is a mean over its pairs and weighs by its tokens, ranks weigh the same: "
            "other splits weigh pairs differently",
        ),
        Variance(
            name="steps", where=("dpo.py:235", "data_loader.py:340"),
            message="an epoch's last batch, or packed its last rows, are left out where not every rank "
            "gets one",
        ),
        Variance(
            name="resume", where=("data_loader.py:184", "data_loader.py:237"),
            message="packed, the position of a checkpoint is a number of rows of this many ranks: after a "
            "change of GPUs other pairs are skipped",
        ),
    ),
    ("trl", "sft"): (
        Variance(
            name="token weighting",
            where=("trl/trainer/sft_trainer.py:1616", "transformers/trainer.py:2266"),
            message="every token of a step weighs the same; with `average_tokens_across_devices: false` each "
            "rank is a mean over its own tokens, and ranks weigh the same",
        ),
        *_TRAINER,
        Variance(
            name="evaluation", where=("transformers/trainer.py:2890", "transformers/trainer.py:2983"),
            message="the evaluation loss is a mean of batches of per_device_eval_batch_size x processes, "
            "each a mean over its own tokens",
        ),
    ),
    ("trl", "dpo"): (
        Variance(
            name="pair weighting",
            where=("trl/trainer/dpo_trainer.py:1498", "trl/trainer/dpo_trainer.py:1450"),
            message="pairs weigh the same, but for `loss_type` sft, a mean over each micro-batch's own "
            "tokens, and aot, which sorts the pairs of a micro-batch",
        ),
        *_TRAINER,
    ),
}  # fmt: skip
