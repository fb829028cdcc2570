"""Measured runs of several settings -> which is faster, and whether it still trains the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from launcher.errors import Finding
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission
from launcher.workflows.bench.significance import ERROR, LEAST_RUNS, chance, steadily

SPEED, LOSS = "tokens_per_second_per_gpu", "loss_per_token"

TOLERANCE = 0.05
"""How far the loss may lie from that of the first variant, as a share of it."""
ALONE = 0.03
"""What fewer runs of either than `LEAST_RUNS` have to differ by: of two each, ranges are apart by chance in
one of three comparisons, and one alone has no spread to tell."""
LEAST = 0.01
"""What counts as no difference, however little the runs scatter."""
SAME_NORM = 0.03
"""How far the gradient norm of the first step may lie from the first variant's where the same rows are
split alike over micro-batches: other kernels round otherwise."""
SPLIT_NORM = 0.15
"""The same where they are split otherwise: a mean of means weighs rows by their micro-batch's tokens.
Measured: up to 9.6 % over 20 batches of 32 chats split into 1 to 32 parts, 5.7 % at 7B between 16 and 32
rows."""
LESS_FALL = 0.1
"""What a loss may fall less than the first variant's, as a share of that fall."""

Cause = Literal["ok", "oom", "diverged", "hang", "timeout", "contract", "crash", "refused"]
"""What became of a trial; `refused`: it could not be started, `contract`: it was not what was asked."""
Word = Literal["faster", "slower", "no difference"]
Standing = Word | Literal["baseline", "loss changed", "unproven", "flawed", "failed", "unknown"]


class CurveStep(NamedTuple):
    """One optimizer step over all ranks: its tokens, what its loss is a mean over, and that mean.

    `weight` is tokens for SFT, rows for DPO, whose loss is one of pairs. `norm` is that of the gradient,
    `micro_batches` those of one rank; None where nobody recorded it.
    """

    tokens: float
    weight: float
    loss: float
    norm: float | None = None
    micro_batches: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trial. `metrics` are numbers of the whole trial, or None where unknown.

    `pace` are seconds a token of the steady steps, of all ranks together; empty where that is not known.
    `reason` says why it is no measurement, `flaws` are points of the verdict that failed, `unproved` those that
    could not be settled either way. `seconds` is wall time, start-up included.
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

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "curve": list(map(list, self.curve)), "seconds": round(self.seconds, 1)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """What `as_json` wrote. Raises Misfit where any of it is something else: it is measured again."""
        left_out: list[Omission] = []
        curve = codec.reader_of(tuple[tuple[float | None, ...], ...])(data.get("curve"), "curve", left_out)
        sample = codec.read_record(cls, {**data, "curve": []}, left_out)
        if left_out or not math.isfinite(sample.seconds):
            raise Misfit(str(left_out[:1]))
        return replace(sample, curve=tuple(map(_curve_step, curve)))


def _curve_step(values: tuple[float | None, ...]) -> CurveStep:
    numbers = values[:3]
    if len(numbers) < 3 or len(values) > 5 or None in numbers:
        raise Misfit("tokens, weight and loss")
    tokens, weight, loss = (math.nan if number is None else number for number in numbers)
    return CurveStep(tokens, weight, loss, *values[3:])


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of the same thing."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return None
        return cls(statistics.median(known), min(known), max(known), len(known))

    def __str__(self) -> str:
        if self.n == 1:
            return f"{self.median:,.0f} (one run)"
        return f"{self.median:,.0f} ({self.min:,.0f} – {self.max:,.0f}, {self.n} runs)"


class SpeedTest(NamedTuple):
    """`chance`: how often what is no faster (no slower, where the medians say so) looks so all the same."""

    word: Word
    chance: float
    why: str
    too_few: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """What is known of one variant. Ratios and changes are against the first one, None without.

    `loss` is over the tokens that every measured trial has trained on, and `steps_within` how many optimizer steps
    (parts of one included) they take. `chance`: see `SpeedTest`.
    """

    variant: str
    samples: Sequence[Sample]
    standing: Standing = "unknown"
    why: str = ""
    recommended: bool = False
    spreads: Mapping[str, Spread | None]
    loss: Spread | None = None
    steps_within: float | None = None
    speed_ratio: float | None = None
    chance: float | None = None
    too_few: bool = False
    loss_change: float | None = None
    failures: tuple[str, ...] = ()
    flaws: tuple[str, ...] = ()

    def median(self, name: str) -> float | None:
        spread = self.loss if name == LOSS else self.spreads.get(name)
        return None if spread is None else spread.median

    def as_json(self) -> dict[str, Any]:
        row = asdict(replace(self, samples=()))
        del row["samples"]
        return {**row.pop("spreads"), LOSS: row.pop("loss"), **row}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VariantSummary:
        """What `as_json` wrote, without the trials. Raises Misfit where any of it is something else."""
        own = {part.name for part in fields(cls)} - {"samples", "spreads", "loss"}
        left_out: list[Omission] = []
        spreads = {name: value for name, value in data.items() if name not in own and name != LOSS}
        row = {name: value for name, value in data.items() if name in own}
        summary = codec.read_record(cls, {**row, "samples": [], "spreads": spreads, "loss": data.get(LOSS)}, left_out)
        if left_out:
            raise Misfit(str(left_out[:1]))
        return summary


def within(curve: Sequence[CurveStep], tokens: float) -> tuple[float | None, float]:
    """The mean loss of the first `tokens` tokens, each counted alike, and how many steps they take.

    A step that reaches beyond counts by the share of its tokens that lies within. The loss is None where
    the curve ends before, or is empty.
    """
    left, total, weight, steps = tokens, 0.0, 0.0, 0.0
    for step in curve:
        if left <= 0:
            break
        share = min(1.0, left / step.tokens) if step.tokens > 0 else 0.0
        total += share * step.weight * step.loss
        weight += share * step.weight
        steps += share
        left -= step.tokens
    # what summing in another order loses is no missing step
    whole = weight > 0 and left <= 1e-6 * tokens
    return (total / weight if whole else None), steps


def common_tokens(samples: Iterable[Sample]) -> float | None:
    """How many tokens every measured trial has trained on; None where none has a loss."""
    counts = [math.fsum(s.tokens for s in one.curve) for one in samples if one.measured and one.curve]
    return min(counts, default=None)


def compare(samples: Sequence[Sample]) -> list[VariantSummary]:
    """One row a variant, in the order of their first samples; the first is what the others are held to.

    A variant is faster (or slower) than the first where `significance` says so and the medians of their
    speeds differ by `LEAST`. With fewer than `LEAST_RUNS` runs of either: where their ranges do not overlap,
    the medians differ by `ALONE`, and it is so at nearly all steps.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.variant, []).append(sample)
    rows: list[VariantSummary] = []
    for group in groups.values():
        rows.append(_row(group, rows[0] if rows else None, common_tokens(samples)))
    faster = [row for row in rows if row.standing == "faster"]
    best = max(faster, key=lambda row: row.median(SPEED) or 0.0, default=None)
    return [replace(row, recommended=True) if row is best else row for row in rows]


def corrupt(samples: Iterable[Sample]) -> str | None:
    """Why a run's gradients were not its batch's; None where no run's were."""
    reasons = (one.reason or "gradients are corrupt" for one in samples if one.gradients == "corrupt")
    return next(reasons, None)


def baseline_fault(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    """An error where the first variant cannot be what others are held to."""
    name = samples[0].variant if samples else ""
    if (why := corrupt(one for one in samples if one.variant == name)) is None:
        return ()
    message = f"{name} trained on corrupt gradients, nothing is compared with it: {why}"
    help = "docs/gradients.md: another DeepSpeed, or `overlap_comm: false`"
    return (Finding(severity="error", layer="run", code="corrupt-baseline", message=message, help=help),)


def unlike(samples: Sequence[Sample], base: Sequence[Sample]) -> str | None:
    """Why runs did not train as those of `base` did, although no loss lies beyond the tolerance.

    By the gradient norm of the first step, where it is of the same rows; and by how far the loss fell, where
    steps hold the same tokens.
    """
    ours = [one for one in samples if one.measured and one.curve]
    others = [one for one in base if one.measured and one.curve]
    if not ours or not others:
        return None
    step, theirs = ours[0].curve[0], others[0].curve[0]
    if step.norm is not None and theirs.norm and step.tokens == theirs.tokens:
        allowed = SAME_NORM if step.micro_batches == theirs.micro_batches else SPLIT_NORM
        # a norm that is NaN is beyond too
        if not abs(step.norm / theirs.norm - 1) <= allowed:
            return (
                f"the first step's gradient norm is {step.norm:.4g}, {theirs.norm:.4g} in "
                f"{others[0].variant}: beyond {share(allowed)} for the same rows"
            )
    length = min(len(one.curve) for one in (*ours, *others))
    pairs = zip(ours[0].curve[:length], others[0].curve[:length], strict=True)
    if length < 2 or any(a.tokens != b.tokens for a, b in pairs):
        return None
    # the last half, against the first step, which was taken before any update
    late = range(max(1, length // 2), length)
    levels = [[math.fsum(one.curve[i].loss for i in late) / len(late) for one in some] for some in (ours, others)]
    start = statistics.fmean(one.curve[0].loss for one in others)
    fell, theirs_fell = (start - statistics.median(some) for some in levels)
    spread = max(max(some) - min(some) for some in levels)
    if theirs_fell <= 0 or theirs_fell - fell <= max(LESS_FALL * theirs_fell, spread):
        return None
    return f"the loss falls by {fell:.4g}, {theirs_fell:.4g} in {others[0].variant} over the same steps"


def share(tolerance: float) -> str:
    """A tolerance for people: `±5 %`."""
    return f"±{100 * tolerance:.4g} %"


def _row(samples: Sequence[Sample], first: VariantSummary | None, tokens: float | None) -> VariantSummary:
    base = samples if first is None else first.samples
    measured = [sample for sample in samples if sample.measured]
    # a loss over everything that a trial saw compares with no other's
    keys = dict.fromkeys(key for sample in measured for key in sample.metrics if key != LOSS)
    spreads = {key: Spread.of(sample.metrics.get(key) for sample in measured) for key in keys}
    means = [] if tokens is None else [within(sample.curve, tokens) for sample in measured]
    loss, steps = Spread.of(mean for mean, _ in means), Spread.of(count for _, count in means)
    ratio = change = test = None
    if first is not None:
        speed, known = spreads.get(SPEED), first.spreads.get(SPEED)
        if speed and known and known.median > 0:
            ratio = speed.median / known.median
        if loss and first.loss and first.loss.median:
            change = (loss.median - first.loss.median) / abs(first.loss.median)
        test = speed_test(samples, base)
    row = VariantSummary(
        variant=samples[0].variant,
        samples=samples,
        spreads=spreads,
        loss=loss,
        steps_within=None if steps is None else steps.median,
        speed_ratio=ratio,
        chance=test and round(test.chance, 4),
        too_few=test is not None and test.too_few,
        loss_change=change,
        failures=tuple(f"{one.cause}: {one.reason}" for one in samples if not one.measured),
        flaws=tuple(dict.fromkeys(flaw for one in measured for flaw in one.flaws)),
    )
    if wrong := corrupt(base):
        why = f"{base[0].variant} trained on corrupt gradients: nothing is compared with it"
        return replace(row, why=why) if first else replace(row, standing="flawed", why=wrong)
    if not measured:
        return replace(row, standing="failed", why=row.failures[0])
    if row.flaws:
        return replace(row, standing="flawed", why=f"not what was asked for: {'; '.join(row.flaws)}")
    standing, why = _standing(row, first, test, tokens)
    return replace(row, standing=standing, why=why)


def _standing(
    row: VariantSummary, first: VariantSummary | None, test: SpeedTest | None, tokens: float | None
) -> tuple[Standing, str]:
    """What to say of a variant that was measured and broke nothing, gravest first."""
    measured = [sample for sample in row.samples if sample.measured]
    unproved = dict.fromkeys(name for sample in measured for name in sample.unproved)
    if any(sample.gradients == "unknown" for sample in measured):
        unproved["gradients"] = None
    doubts = [f"not proved either way: {', '.join(unproved)}"] if unproved else []
    if row.failures:
        doubts.append(f"{len(row.failures)} of its runs failed: {row.failures[0]}")
    if first is None:
        return "baseline", "; ".join(doubts)
    if test is None:
        return "unknown", "no speed of both to compare"
    text, change, steps = "too few trials" if test.too_few else test.word, row.loss_change, row.steps_within
    if change is None:
        return "unknown", f"{text}; no loss of both to compare"
    if abs(change) > TOLERANCE:
        but = "but" if text == "faster" else "and"
        why = f"{text}, {but} the loss is {change:+.1%}: beyond {share(TOLERANCE)}"
        if steps and first.steps_within and abs(steps / first.steps_within - 1) >= 0.1:
            # nothing need be wrong: more tokens a step are fewer updates
            why += f" ({steps:.3g} steps against {first.steps_within:.3g} within the same tokens)"
        return "loss changed", why
    early = [one.variant for one in (first, row) if one.steps_within and one.steps_within <= 1]
    if early:
        doubts.append(
            f"the {tokens:,.0f} tokens that all have seen are the first step of {' and '.join(early)}: "
            "no loss after an update is compared (more --steps)"
        )
    if doubts:
        return ("unproven" if unproved or early else "flawed"), f"{text}, but {'; '.join(doubts)}"
    if difference := unlike(row.samples, first.samples):
        return "loss changed", f"{text}, but {difference}"
    return test.word, test.why


def speed_test(runs: Iterable[Sample], base: Iterable[Sample]) -> SpeedTest | None:
    """How fast runs are beside those of `base`: see `compare`. None without a speed of both."""
    ours, others = ([one for one in some if one.measured and one.metrics.get(SPEED)] for some in (runs, base))
    speed, known = (Spread.of(one.metrics[SPEED] for one in some) for some in (ours, others))
    if speed is None or known is None:
        return None
    ratio, fewest = speed.median / known.median, min(speed.n, known.n)
    few = fewest < LEAST_RUNS
    # where steps are not known, all of them are one
    paces = [[one.pace or (1 / (one.metrics[SPEED] or math.inf),) for one in some] for some in (ours, others)]
    ahead, behind = paces if ratio > 1 else paces[::-1]
    by_chance = chance(ahead, behind)
    apart = speed.min > known.max or speed.max < known.min
    clear = apart and steadily(ahead, behind) if few else by_chance <= ERROR
    far = abs(ratio - 1) >= (ALONE if few else LEAST)
    word: Word = "no difference" if not (clear and far) else "faster" if ratio > 1 else "slower"
    why = f"{ratio - 1:+.1%} by {fewest} of {LEAST_RUNS} runs" if few else ""
    if far and not clear and not few:
        rare = f"chance alone does in {by_chance:.0%} of cases"
        why = f"{ratio - 1:+.1%} by the medians, which {rare}: more runs may tell"
    return SpeedTest(word, by_chance, why, few)
