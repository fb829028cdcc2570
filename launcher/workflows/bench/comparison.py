"""Measured runs of several settings -> which is faster, and whether it still trains the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any, Literal, NamedTuple

from launcher.errors import Finding
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission
from launcher.workflows.bench.significance import (
    ERROR,
    LEAST_RUNS,
    Pace,
    compute_chance,
    is_steadily_ahead,
)

SPEED = "tokens_per_second_per_gpu"
LOSS = "loss_per_token"

TOLERANCE = 0.05
"""How far the loss may lie from that of the first variant, as a share of it."""
ALONE = 0.03
"""How far medians must differ with fewer than `LEAST_RUNS` runs of either variant: with two runs
each, ranges are apart by chance in one of three comparisons, and one run has no range."""
LEAST = 0.01
"""A smaller difference of medians is no difference, however little the runs scatter."""
SAME_NORM = 0.03
"""How far the gradient norm of the first step may lie from the first variant's if the same rows
are split alike over micro-batches: other kernels round differently."""
SPLIT_NORM = 0.15
"""The same if they are split differently: a mean of means weighs rows by their micro-batch's
tokens. Measured: up to 9.6 % over 20 batches of 32 chats split into 1 to 32 parts, 5.7 % at 7B
between 16 and 32 rows."""
LESS_FALL = 0.1
"""How much less than the first variant's a loss may fall, as a share of that fall."""

Cause = Literal["ok", "oom", "diverged", "hang", "timeout", "contract", "crash", "refused"]
"""How a trial ended; `refused`: it could not start, `contract`: an expectation was broken."""
Standing = Literal[
    "baseline",
    "faster",
    "slower",
    "no difference",
    "loss changed",
    "unproven",
    "flawed",
    "failed",
    "unknown",
]


class CurveStep(NamedTuple):
    """One optimizer step over all ranks.

    `loss` is a mean weighted by `weight`: tokens for SFT, rows for DPO, whose loss is one of pairs.
    `norm` is that of the gradient, `micro_batches` the number of one rank; None if unknown.
    """

    tokens: float
    weight: float
    loss: float
    norm: float | None = None
    micro_batches: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trial. `metrics` are numbers of the whole trial, None if unknown.

    `pace` is seconds per token of each steady step, over all ranks; empty if unknown. `reason` says
    why the trial is no measurement. `flaws` are points of the verdict that failed, `unproved` those
    that nothing proved. `seconds` is wall time, start-up included.
    """

    variant: str
    repeat: int = 0
    cause: Cause = "ok"
    reason: str | None = None
    flaws: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    gradients: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    curve: tuple[CurveStep, ...] = ()
    pace: tuple[float, ...] = ()
    run: str | None = None
    seconds: float = 0.0

    @property
    def measured(self) -> bool:
        return self.cause == "ok"

    @property
    def speed(self) -> float | None:
        return self.metrics.get(SPEED)

    @property
    def tokens(self) -> float:
        return math.fsum(step.tokens for step in self.curve)

    def as_json(self) -> dict[str, Any]:
        curve = [list(step) for step in self.curve]
        return {**asdict(self), "curve": curve, "seconds": round(self.seconds, 1)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """What `as_json` wrote. Raises Misfit if any of it is damaged."""
        left_out: list[Omission] = []
        read_curve = codec.make_reader(tuple[tuple[float | None, ...], ...])
        curve = read_curve(data.get("curve"), "curve", left_out)
        sample = codec.read_record(cls, {**data, "curve": []}, left_out)
        if left_out or not math.isfinite(sample.seconds):
            raise Misfit(str(left_out[:1]))
        steps = [_read_curve_step(values) for values in curve]
        return replace(sample, curve=tuple(steps))


def _read_curve_step(values: tuple[float | None, ...]) -> CurveStep:
    if len(values) != len(CurveStep._fields):
        raise Misfit("the values of a step")
    tokens, weight, loss, norm, micro_batches = values
    if tokens is None or weight is None or loss is None:
        raise Misfit("tokens, weight and loss")
    return CurveStep(tokens, weight, loss, norm, micro_batches)


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of the same thing."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None if no value is a finite number."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if not finite:
            return None
        return cls(statistics.median(finite), min(finite), max(finite), len(finite))

    def __str__(self) -> str:
        if self.n == 1:
            return f"{self.median:,.0f} (one run)"
        return f"{self.median:,.0f} ({self.min:,.0f} – {self.max:,.0f}, {self.n} runs)"


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """The standing of a variant by its speed alone.

    `chance`: how often a variant that is not faster (or slower) would look like this one.
    """

    standing: Standing
    chance: float
    why: str
    too_few: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """The trials of one variant; ratios and changes are against the first one, None without it.

    The loss in `spreads` is over the tokens that every measured trial has trained on; they take
    `steps_within` optimizer steps, parts of one included. `chance`: see `SpeedTest`.
    """

    variant: str
    samples: Sequence[Sample]
    standing: Standing = "unknown"
    why: str = ""
    recommended: bool = False
    spreads: Mapping[str, Spread | None]
    steps_within: float | None = None
    speed_ratio: float | None = None
    chance: float | None = None
    too_few: bool = False
    loss_change: float | None = None
    failures: tuple[str, ...] = ()
    flaws: tuple[str, ...] = ()

    def median(self, name: str) -> float | None:
        spread = self.spreads.get(name)
        return None if spread is None else spread.median

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        del row["samples"]
        return {**row.pop("spreads"), **row}


def mean_within(curve: Sequence[CurveStep], tokens: float) -> tuple[float | None, float]:
    """The mean loss of the first `tokens` tokens, and how many steps they take.

    A step that reaches beyond counts by its share of tokens within. The loss is None if the curve
    ends before.
    """
    left = tokens
    total = 0.0
    weight = 0.0
    steps = 0.0
    for step in curve:
        if left <= 0:
            break
        if step.tokens > 0:
            part = min(1.0, left / step.tokens)
            total += part * step.weight * step.loss
            weight += part * step.weight
            steps += part
            left -= step.tokens
    # sums of the same tokens in another order differ by rounding
    if weight > 0 and left <= 1e-6 * tokens:
        return total / weight, steps
    return None, steps


def find_common_tokens(samples: Iterable[Sample]) -> float | None:
    """How many tokens every measured trial has trained on; None if none has a loss."""
    return min((sample.tokens for sample in _select_with_curve(samples)), default=None)


def _select_with_curve(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.measured and sample.curve]


def compare(samples: Sequence[Sample]) -> list[VariantSummary]:
    """One row per variant, in the order of their first samples; the first is the baseline.

    A variant is faster (or slower) than it if `significance` says so and the medians of their
    speeds differ by `LEAST`. With fewer than `LEAST_RUNS` runs of either: if their ranges do not
    overlap, the medians differ by `ALONE`, and it is ahead (or behind) at nearly all steps.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.variant, []).append(sample)
    tokens = find_common_tokens(samples)
    rows: list[VariantSummary] = []
    first: VariantSummary | None = None
    for group in groups.values():
        row = _summarize(group, first, tokens)
        first = first or row
        rows.append(row)
    faster = [row for row in rows if row.standing == "faster"]
    if faster:
        best = max(faster, key=lambda row: row.speed_ratio or 0.0)
        rows[rows.index(best)] = replace(best, recommended=True)
    return rows


def find_corrupt_reason(samples: Iterable[Sample]) -> str | None:
    """Why a run's gradients were not those of its batch; None if no run's were corrupt."""
    for sample in samples:
        if sample.gradients == "corrupt":
            return sample.reason or "gradients are corrupt"
    return None


def find_baseline_fault(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    """An error if nothing can be compared with the first variant."""
    name = samples[0].variant if samples else ""
    reason = find_corrupt_reason(sample for sample in samples if sample.variant == name)
    if reason is None:
        return ()
    message = f"{name} trained on corrupt gradients, nothing is compared with it: {reason}"
    help = "docs/gradients.md: another DeepSpeed, or `overlap_comm: false`"
    fault = Finding(
        severity="error", layer="run", code="corrupt-baseline", message=message, help=help
    )
    return (fault,)


def format_tolerance(tolerance: float) -> str:
    """A tolerance for people: `±5 %`."""
    return f"±{100 * tolerance:.4g} %"


def _summarize(
    samples: Sequence[Sample], first: VariantSummary | None, tokens: float | None
) -> VariantSummary:
    row = _collect_measurements(samples, tokens)
    if first is not None:
        row = _compare_to_first(row, first)
    standing, why = _judge(row, first, tokens)
    return replace(row, standing=standing, why=why)


def _collect_measurements(samples: Sequence[Sample], tokens: float | None) -> VariantSummary:
    """The row of one variant, without its standing."""
    values: dict[str, list[float | None]] = {}
    losses: list[float | None] = []
    steps: list[float] = []
    failures = []
    flaws: list[str] = []
    for sample in samples:
        if not sample.measured:
            failures.append(f"{sample.cause}: {sample.reason}")
            continue
        flaws += sample.flaws
        for name, value in sample.metrics.items():
            values.setdefault(name, []).append(value)
        if tokens is not None:
            loss, count = mean_within(sample.curve, tokens)
            losses.append(loss)
            steps.append(count)
    # the loss over everything that one trial saw cannot be compared with another's
    values.pop(LOSS, None)
    values[LOSS] = losses
    within_steps = Spread.of(steps)
    return VariantSummary(
        variant=samples[0].variant,
        samples=samples,
        spreads={name: Spread.of(numbers) for name, numbers in values.items()},
        steps_within=None if within_steps is None else within_steps.median,
        failures=tuple(failures),
        flaws=tuple(dict.fromkeys(flaws)),
    )


def _compare_to_first(row: VariantSummary, first: VariantSummary) -> VariantSummary:
    """The row with its ratio and changes; its standing is that of its speed alone."""
    speed = row.median(SPEED)
    first_speed = first.median(SPEED)
    if speed is not None and first_speed:
        row = replace(row, speed_ratio=speed / first_speed)
    loss = row.median(LOSS)
    first_loss = first.median(LOSS)
    if loss is not None and first_loss:
        row = replace(row, loss_change=(loss - first_loss) / abs(first_loss))
    test = compare_speed(row.samples, first.samples)
    if test is None:
        return row
    return replace(
        row,
        standing=test.standing,
        chance=round(test.chance, 4),
        why=test.why,
        too_few=test.too_few,
    )


def _judge(
    row: VariantSummary, first: VariantSummary | None, tokens: float | None
) -> tuple[Standing, str]:
    """The standing of a variant, and why; gravest first."""
    if first is None:
        corrupt = find_corrupt_reason(row.samples)
        if corrupt:
            return "flawed", corrupt
    elif find_corrupt_reason(first.samples):
        why = f"{first.variant} trained on corrupt gradients: nothing is compared with it"
        return "unknown", why
    if len(row.failures) == len(row.samples):
        return "failed", row.failures[0]
    if row.flaws:
        return "flawed", f"not what was asked for: {'; '.join(row.flaws)}"
    unproved = _list_unproved(row)
    doubts = []
    if unproved:
        doubts.append(f"not proved either way: {', '.join(unproved)}")
    if row.failures:
        doubts.append(f"{len(row.failures)} of its runs failed: {row.failures[0]}")
    if first is None:
        return "baseline", "; ".join(doubts)
    if row.chance is None:
        return "unknown", "no speed of both to compare"
    return _judge_against(row, first, tokens, doubts)


def _judge_against(
    row: VariantSummary, first: VariantSummary, tokens: float | None, doubts: list[str]
) -> tuple[Standing, str]:
    """The standing of a variant that is as fast as its row says: whether it trains the same."""
    word = "too few trials" if row.too_few else row.standing
    if row.loss_change is None:
        return "unknown", f"{word}; no loss of both to compare"
    if abs(row.loss_change) > TOLERANCE:
        return "loss changed", _explain_changed_loss(row, first, word)
    early = []
    for summary in (first, row):
        if summary.steps_within and summary.steps_within <= 1:
            early.append(summary.variant)
    if early:
        doubts.append(
            f"the {tokens:,.0f} tokens that all have seen are the first step of "
            f"{' and '.join(early)}: no loss after an update is compared (more --steps)"
        )
    if doubts:
        standing: Standing = "flawed"
        if early or _list_unproved(row):
            standing = "unproven"
        return standing, f"{word}, but {'; '.join(doubts)}"
    difference = _find_difference(row.samples, first.samples)
    if difference is not None:
        return "loss changed", f"{word}, but {difference}"
    return row.standing, row.why


def _list_unproved(row: VariantSummary) -> list[str]:
    measured = [sample for sample in row.samples if sample.measured]
    names: list[str] = []
    for sample in measured:
        names += sample.unproved
    if any(sample.gradients == "unknown" for sample in measured):
        names.append("gradients")
    return list(dict.fromkeys(names))


def _explain_changed_loss(row: VariantSummary, first: VariantSummary, word: str) -> str:
    but = "but" if word == "faster" else "and"
    why = f"{word}, {but} the loss is {row.loss_change:+.1%}: beyond {format_tolerance(TOLERANCE)}"
    steps = row.steps_within
    first_steps = first.steps_within
    if steps and first_steps and abs(steps / first_steps - 1) >= 0.1:
        # nothing need be wrong: more tokens a step are fewer updates
        why += f" ({steps:.3g} steps against {first_steps:.3g} within the same tokens)"
    return why


def _find_difference(samples: Sequence[Sample], base: Sequence[Sample]) -> str | None:
    """Why runs did not train as those of `base` did, although their losses are within tolerance."""
    runs = _select_with_curve(samples)
    base_runs = _select_with_curve(base)
    if not runs or not base_runs:
        return None
    return _compare_first_norm(runs[0], base_runs[0]) or _compare_loss_fall(runs, base_runs)


def _compare_first_norm(run: Sample, base_run: Sample) -> str | None:
    """Why the first gradient norms differ; None if they do not, or are of different rows."""
    step = run.curve[0]
    base_step = base_run.curve[0]
    if step.norm is None or not base_step.norm or step.tokens != base_step.tokens:
        return None
    allowed = SAME_NORM if step.micro_batches == base_step.micro_batches else SPLIT_NORM
    if abs(step.norm / base_step.norm - 1) <= allowed:
        # False for NaN
        return None
    return (
        f"the first step's gradient norm is {step.norm:.4g}, {base_step.norm:.4g} in "
        f"{base_run.variant}: beyond {format_tolerance(allowed)} for the same rows"
    )


def _compare_loss_fall(runs: Sequence[Sample], base_runs: Sequence[Sample]) -> str | None:
    """Why one loss fell less; None if it did not, or if steps hold different tokens."""
    length = min(len(run.curve) for run in (*runs, *base_runs))
    if length < 2:
        return None
    for step, base_step in zip(runs[0].curve[:length], base_runs[0].curve[:length], strict=True):
        if step.tokens != base_step.tokens:
            return None
    levels = _average_late_losses(runs, length)
    base_levels = _average_late_losses(base_runs, length)
    start = statistics.fmean(run.curve[0].loss for run in base_runs)
    fall = start - statistics.median(levels)
    base_fall = start - statistics.median(base_levels)
    scatter = max(levels) - min(levels)
    base_scatter = max(base_levels) - min(base_levels)
    tolerated = max(LESS_FALL * base_fall, max(scatter, base_scatter))
    if base_fall <= 0 or base_fall - fall <= tolerated:
        return None
    name = base_runs[0].variant
    return f"the loss falls by {fall:.4g}, {base_fall:.4g} in {name} over the same steps"


def _average_late_losses(runs: Iterable[Sample], length: int) -> list[float]:
    """Each run's mean loss over the last half of its steps, but for the first one."""
    means = []
    for run in runs:
        late = run.curve[max(1, length // 2) : length]
        means.append(statistics.fmean(step.loss for step in late))
    return means


def compare_speed(runs: Iterable[Sample], base: Iterable[Sample]) -> SpeedTest | None:
    """How fast runs are beside those of `base`, as `compare` says. None without a speed of both."""
    timed = _select_timed(runs)
    base_timed = _select_timed(base)
    speed = Spread.of(run.speed for run in timed)
    base_speed = Spread.of(run.speed for run in base_timed)
    if speed is None or base_speed is None:
        return None
    ratio = speed.median / base_speed.median
    faster = [_find_pace(run) for run in timed]
    slower = [_find_pace(run) for run in base_timed]
    if ratio <= 1:
        faster, slower = slower, faster
    by_chance = compute_chance(faster, slower)
    gain = ratio - 1
    fewest = min(speed.n, base_speed.n)
    if fewest < LEAST_RUNS:
        apart = speed.min > base_speed.max or speed.max < base_speed.min
        clear = apart and abs(gain) >= ALONE and is_steadily_ahead(faster, slower)
        why = f"{gain:+.1%} by {fewest} of {LEAST_RUNS} runs"
        return SpeedTest(_choose_standing(ratio, clear), by_chance, why, True)
    far = abs(gain) >= LEAST
    clear = by_chance <= ERROR
    why = ""
    if far and not clear:
        rare = f"chance alone does in {by_chance:.0%} of cases"
        why = f"{gain:+.1%} by the medians, which {rare}: more runs may tell"
    return SpeedTest(_choose_standing(ratio, clear and far), by_chance, why, False)


def _select_timed(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.measured and sample.speed]


def _find_pace(sample: Sample) -> Pace:
    if sample.pace or not sample.speed:
        return sample.pace
    # if steps are not known, all of them count as one
    return (1 / sample.speed,)


def _choose_standing(ratio: float, clear: bool) -> Standing:
    if not clear:
        return "no difference"
    if ratio > 1:
        return "faster"
    return "slower"
