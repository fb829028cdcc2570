"""What a short run must show before more is spent: limits -> flags, green, yellow or red.

A red flag stops, a yellow one is shown. Noise is neither: a mean over a few steps is past a red
limit only if it is so by twice its standard error. How the limits were chosen: docs/planning.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from launcher.config.keys import PAIRED, suggest_name
from launcher.errors import Complain, Finding, shorten
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission

Colour = Literal["green", "yellow", "red"]

LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Limit:
    """Where a gate turns red and where yellow; None if it never does."""

    red: float | None = None
    yellow: float | None = None


GATES: Mapping[str, tuple[Limit, str]] = {
    "loss_fall": (
        Limit(red=0.01, yellow=0.10),
        "share by which the loss falls, mean of the first fifth against the "
        "last: more than (these two for 100 steps of SFT)",
    ),
    "grad_norm": (
        Limit(red=1000.0, yellow=10.0),
        "gradient norm at most: of any step (red), the median (yellow)",
    ),
    "grad_norm_least": (
        Limit(red=0.0, yellow=0.1),
        "gradient norm more than: of any step (red), the median (yellow)",
    ),
    "tokens_per_second": (Limit(red=0.0), "tokens a second on all devices, more than"),
    "efficiency": (
        Limit(red=0.5, yellow=0.8),
        "tokens a second and device, as a share of the first rung's, more than",
    ),
    "memory": (Limit(red=1.0, yellow=0.95), "reserved peak as a share of the card, at most"),
    "memory_over_plan": (
        Limit(yellow=1.1),
        "allocated peak as a share of the planned one, at most",
    ),
    "first_loss": (
        Limit(red=0.2, yellow=0.02),
        "DPO: how far the first loss may be from ln 2, as a share of it",
    ),
    "rewards_accuracy": (
        Limit(red=0.5, yellow=0.55),
        "DPO: share of pairs whose chosen answer has the higher reward, more than, "
        "over the last fifth",
    ),
    "rewards_margin": (
        Limit(red=0.0),
        "DPO: chosen less rejected reward, more than, over the last fifth",
    ),
}
"""Every gate with its defaults and what it means; those of `loss_fall` follow stage and steps."""

_AT_MOST = frozenset({"grad_norm", "memory", "memory_over_plan", "first_loss"})
# as a share of what is asked of SFT
_FALL_BY_STAGE = {"sft": 1.0, "dpo": 0.2}
# of fewer losses the standard error itself is a guess
_FEWEST_LOSSES = 8
# within fewer steps a sound loss may not have moved yet: only a rising one is red
_FLAT_STEPS = 20
# the least fall that a verdict calls falling (points.TREND_CHANGE)
_FALLING = 0.01
_FULL_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RungFacts:
    """What one run showed. Losses, norms and rewards are one a step, memory is in GiB.

    `devices` counts those that trained, `accelerated`: they were GPUs. `failed` is why the verdict
    did not pass, `unproven` why it could not tell. `trend` is the verdict's state of that point if
    the stage file expects a falling loss. `rounded`: most steps of the weights round to nothing
    (`steps-rounded`), so that their loss hardly falls.
    """

    stage: str
    devices: int = 1
    accelerated: bool = False
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    accuracies: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    nonfinite: tuple[int, ...] = ()
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    planned_gib: float | None = None
    card_gib: float | None = None
    starts_at_ln2: bool = False
    failed: str | None = None
    unproven: str | None = None
    trend: str | None = None
    rounded: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RungFacts:
        """Raises Misfit if it is damaged; keys of a later launch are ignored."""
        left_out: list[Omission] = []
        facts: RungFacts = codec.read_record(cls, data, left_out)
        if left_out:
            raise Misfit(str(left_out[0]))
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What one gate says of a run; `value` is None if it was not measured."""

    gate: str
    colour: Colour
    text: str
    value: float | None = None

    def as_json(self) -> dict[str, Any]:
        data = asdict(self)
        if self.value is not None:
            data["value"] = float(f"{self.value:.6g}")
        return data


def read_limits(content: Any, complain: Complain) -> tuple[dict[str, Limit], list[Finding]]:
    """The limits of a `gates:` mapping, and everything wrong with it.

    A number is where the gate turns red, `{red, yellow}` are both, `off` switches it off. What is
    not named keeps its default.
    """
    if content is None:
        return {}, []
    if not isinstance(content, Mapping):
        message = f"`gates` is a mapping of gates to limits, not `{shorten(content)}`"
        return {}, [complain("bad-gates", "", message, "gates: {loss_fall: 0.05}")]
    limits: dict[str, Limit] = {}
    findings = []
    for key, value in content.items():
        name = str(key)
        if name not in GATES:
            message = f"`{shorten(name)}` is not a gate"
            findings.append(complain("unknown-gate", name, message, suggest_name(name, [*GATES])))
        elif value is not None:
            default, meaning = GATES[name]
            try:
                limits[name] = _parse_limit(default, value)
            except ValueError:
                message = f"`gates.{name}` cannot be `{shorten(value)}`"
                help = f"a number, `off`, or {{red: …, yellow: …}} ({meaning})"
                findings.append(complain("bad-gate", name, message, help))
    return limits, findings


def _parse_limit(default: Limit, value: Any) -> Limit:
    """Raises ValueError if it is no limit."""
    if value is True or value == "on":
        return default
    if value is False or value == "off":
        return Limit()
    content = value
    if not isinstance(value, Mapping):
        content = {"red": value}
    if not content or not content.keys() <= {"red", "yellow"}:
        raise ValueError
    changes: dict[str, float | None] = dict.fromkeys(content)
    for colour, number in content.items():
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError
        if not math.isfinite(number):
            raise ValueError
        changes[colour] = float(number)
    return replace(default, **changes)


class Mean(NamedTuple):
    """A value and its standard error; its steps count as independent."""

    value: float
    error: float = 0.0


def measure_fall(losses: Sequence[float]) -> Mean | None:
    """By what share the mean of the last fifth is below that of the first; None without two losses.

    The noise is taken from the differences of neighbouring steps, so that the fall is not noise.
    """
    finite = list(filter(math.isfinite, losses))
    if len(finite) < 2:
        return None
    count = max(1, len(finite) // 5)
    first = statistics.fmean(finite[:count])
    last = statistics.fmean(finite[-count:])
    level = abs(first) or 1e-12
    error = _measure_noise(finite) * math.sqrt(2 / count)
    return Mean((first - last) / level, error / level)


def average_end(series: Sequence[float]) -> Mean | None:
    """The mean of the last fifth."""
    finite = list(filter(math.isfinite, series))
    if not finite:
        return None
    count = max(1, len(finite) // 5)
    return Mean(statistics.fmean(finite[-count:]), _measure_noise(finite) / math.sqrt(count))


def _measure_noise(series: Sequence[float]) -> float:
    """The standard deviation of one step about a smooth curve."""
    if len(series) < 2:
        return 0.0
    squares = [(after - before) ** 2 for before, after in itertools.pairwise(series)]
    return math.sqrt(math.fsum(squares) / (2 * len(squares)))


class _Side(NamedTuple):
    """What a gate asks for: values above its limits, or below them.

    `sign` is that by which an upper limit is compared as if it were a lower one.
    """

    sign: int
    red: str
    yellow: str

    def is_past(self, value: float, red: float) -> bool:
        limit = self.sign * red
        # the limit itself is red for `more than`, and not for `at most`
        return value < limit or (value == limit and self.sign > 0)


_ABOVE = _Side(sign=1, red="more than", yellow="at least")
_BELOW = _Side(sign=-1, red="at most", yellow="at most")


class _Gates(NamedTuple):
    limits: Mapping[str, Limit]

    def flag(
        self, gate: str, text: str, mean: Mean, usual: float | None = None, *, stuck: bool = False
    ) -> Flag:
        """What one gate says of a measurement; `usual` is held against the yellow limit instead.

        `stuck`: it is red too if noise hides whether it is past the red limit, and not that it is
        past the yellow one.
        """
        red = self.limits[gate].red
        yellow = self.limits[gate].yellow
        side = _BELOW if gate in _AT_MOST else _ABOVE
        value = side.sign * mean.value
        best = value + 2 * mean.error
        colour: Colour = "green"
        if red is not None and side.is_past(value, red):
            if mean.error:
                text = f"{text}, give or take {2 * mean.error:.2g}"
            is_unusual = yellow is not None and best < side.sign * yellow
            if side.is_past(best, red) or (stuck and is_unusual):
                colour = "red"
                text = f"{text}: {side.red} {red:g} is asked for"
            else:
                colour = "yellow"
                text = f"{text}: noise hides whether it is past {red:g}"
        elif yellow is not None:
            if usual is not None:
                value = side.sign * usual
            if value < side.sign * yellow:
                colour = "yellow"
                text = f"{text}: {side.yellow} {yellow:.2g} is usual"
        return Flag(gate=gate, colour=colour, value=mean.value, text=text)


def judge_rung(
    facts: RungFacts, limits: Mapping[str, Limit], base: RungFacts | None = None
) -> list[Flag]:
    """What every gate says that has something to judge.

    `base` is the run that efficiency is measured against.
    """
    all_limits = {name: default for name, (default, _) in GATES.items()} | dict(limits)
    all_limits["loss_fall"] = _scale_fall(facts, all_limits["loss_fall"])
    gates = _Gates(all_limits)
    return [
        *_flag_loss(facts, gates),
        *_flag_machine(facts, base, gates),
        *_flag_rewards(facts, gates),
    ]


def _scale_fall(facts: RungFacts, limit: Limit) -> Limit:
    """The limits of `loss_fall`, where they are the defaults, for the stage and number of steps."""
    default, _ = GATES["loss_fall"]
    steps = len(facts.losses)
    share = _FALL_BY_STAGE.get(facts.stage, 0.0) * min(1.0, steps / _FULL_STEPS)
    red = limit.red
    yellow = limit.yellow
    if yellow is not None and yellow == default.yellow:
        yellow *= share
    if red is not None and red == default.red:
        red *= share
        if steps < _FLAT_STEPS or facts.rounded:
            red = 0.0
        if steps < _FEWEST_LOSSES:
            red = None
    return Limit(red, yellow)


def find_worst_colour(flags: Sequence[Flag]) -> Colour:
    """The worst colour."""
    colours = {flag.colour for flag in flags}
    if "red" in colours:
        return "red"
    if "yellow" in colours:
        return "yellow"
    return "green"


def _flag_loss(facts: RungFacts, gates: _Gates) -> Iterator[Flag]:
    fall = measure_fall(facts.losses)
    if facts.failed is not None:
        yield Flag(gate="verdict", colour="red", text=facts.failed)
    elif facts.unproven is not None:
        yield Flag(gate="verdict", colour="yellow", text=f"unproven: {facts.unproven}")
    if facts.nonfinite:
        steps = ", ".join(map(str, facts.nonfinite[:3]))
        if len(facts.nonfinite) > 3:
            steps += ", …"
        yield Flag(gate="loss", colour="red", text=f"NaN or infinite at step {steps}")
    elif fall is not None:
        verb = "falls" if fall.value >= 0 else "rises"
        ends = f"({facts.losses[0]:.4g} -> {facts.losses[-1]:.4g})"
        yield gates.flag("loss_fall", f"loss {verb} by {abs(fall.value):.1%} {ends}", fall)
    elif facts.failed is None:
        yield Flag(gate="loss_fall", colour="yellow", text="fewer than two losses were seen")
    if facts.trend is not None and not facts.nonfinite:
        yield _flag_trend(facts.trend, fall, len(facts.losses))
    if facts.norms:
        most = Mean(max(facts.norms))
        median = statistics.median(facts.norms)
        text = f"gradient norm {median:.3g} in the median, {most.value:.3g} at most"
        yield gates.flag("grad_norm", text, most, median)
        yield gates.flag("grad_norm_least", text, most, median)


def _flag_trend(state: str, fall: Mean | None, steps: int) -> Flag:
    """`expect: {trend: falling}`: red if the short run already shows that it does not fall."""
    expectation = "`expect: {trend: falling}` asks for a loss that falls"
    if state == "falling":
        return Flag(gate="trend", colour="green", text="the loss is falling")
    if state == "too_short":
        return Flag(gate="trend", colour="yellow", text=f"too few losses to tell: {expectation}")
    least = 0.0
    if steps >= _FLAT_STEPS:
        least = _FALLING * min(1.0, steps / _FULL_STEPS)
    if state == "flat" and (fall is None or fall.value + 2 * fall.error >= least):
        return Flag(gate="trend", colour="yellow", text=f"not seen to fall yet: {expectation}")
    return Flag(gate="trend", colour="red", text=f"the trend is `{state}`: {expectation}")


def _flag_machine(facts: RungFacts, base: RungFacts | None, gates: _Gates) -> Iterator[Flag]:
    rate = facts.tokens_per_second
    if rate is not None:
        yield gates.flag("tokens_per_second", f"{rate:,.0f} tokens/s", Mean(rate))
        share = compute_efficiency(facts, base)
        if share is not None and base is not facts:
            text = f"{share:.0%} of the first rung's tokens/s on each device"
            yield gates.flag("efficiency", text, Mean(share))
    elif facts.failed is None:
        yield Flag(gate="tokens_per_second", colour="yellow", text="the speed was not measured")
    allocated = facts.allocated_gib
    peak = facts.reserved_gib
    if peak is None:
        peak = allocated
    if peak is not None and facts.card_gib:
        text = f"{peak:.1f} of {facts.card_gib:.1f} GiB"
        yield gates.flag("memory", text, Mean(peak / facts.card_gib))
    if allocated is not None and facts.planned_gib:
        text = f"{allocated:.1f} GiB allocated, {facts.planned_gib:.1f} planned"
        yield gates.flag("memory_over_plan", text, Mean(allocated / facts.planned_gib))


def compute_efficiency(facts: RungFacts, base: RungFacts | None) -> float | None:
    """Tokens a second and device as a share of the base's; None for a CPU against a GPU."""
    if base is None or base.accelerated != facts.accelerated:
        return None
    if facts.tokens_per_second is None or not base.tokens_per_second:
        return None
    return (facts.tokens_per_second / facts.devices) / (base.tokens_per_second / base.devices)


def _flag_rewards(facts: RungFacts, gates: _Gates) -> Iterator[Flag]:
    if facts.stage not in PAIRED:
        return
    if facts.starts_at_ln2 and facts.losses and math.isfinite(facts.losses[0]):
        first = facts.losses[0]
        text = f"first loss {first:.4f}, ln 2 is {LN2:.4f}"
        yield gates.flag("first_loss", text, Mean(abs(first - LN2) / LN2))
    accuracy = average_end(facts.accuracies)
    if accuracy is not None:
        text = f"the chosen answer has the higher reward in {accuracy.value:.0%} of pairs"
        yield gates.flag("rewards_accuracy", text, accuracy, stuck=True)
    margin = average_end(facts.margins)
    if margin is not None:
        text = f"chosen less rejected reward is {margin.value:.3g}"
        yield gates.flag("rewards_margin", text, margin)
