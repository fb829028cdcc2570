"""What a short run must show before more is spent: thresholds -> a flag for each, green, yellow or red.

A red flag stops, a yellow one is said. What is noise counts for neither: a mean over a few steps is
below a red threshold only where it is so by twice its standard error. What the limits are, and how they
were chosen: docs/planning.md.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from launcher.config.keys import PAIRED, nearest
from launcher.errors import Complain, Finding, brief
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission

Colour = Literal["green", "yellow", "red"]

LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Limit:
    """Where a gate turns red and where yellow; None where it never does."""

    red: float | None = None
    yellow: float | None = None


GATES: Mapping[str, tuple[Limit, str]] = {
    "loss_fall": (
        Limit(red=0.01, yellow=0.10),
        "share by which the loss falls, mean of the first fifth against the "
        "last: more than (these two for 100 steps of SFT)",
    ),
    "grad_norm": (Limit(red=1000.0, yellow=10.0), "gradient norm at most: of any step (red), the median (yellow)"),
    "grad_norm_least": (Limit(red=0.0, yellow=0.1), "gradient norm more than: of any step (red), the median (yellow)"),
    "tokens_per_second": (Limit(red=0.0), "tokens a second on all devices, more than"),
    "efficiency": (
        Limit(red=0.5, yellow=0.8),
        "tokens a second and device, as a share of the first rung's, more than",
    ),
    "memory": (Limit(red=1.0, yellow=0.95), "reserved peak as a share of the card, at most"),
    "memory_over_plan": (Limit(yellow=1.1), "allocated peak as a share of the planned one, at most"),
    "first_loss": (Limit(red=0.2, yellow=0.02), "DPO: how far the first loss may be from ln 2, as a share of it"),
    "rewards_accuracy": (
        Limit(red=0.5, yellow=0.55),
        "DPO: share of pairs whose chosen answer has the higher reward, more than, over the last fifth",
    ),
    "rewards_margin": (Limit(red=0.0), "DPO: chosen less rejected reward, more than, over the last fifth"),
}
"""Every gate with its defaults and what it means; those of `loss_fall` follow stage and steps."""

_AT_MOST = frozenset({"grad_norm", "memory", "memory_over_plan", "first_loss"})
# of the fall that is asked of SFT, in as many steps
_FALL_OF = {"sft": 1.0, "dpo": 0.2}
# with fewer the standard error itself is a guess
_FEWEST_LOSSES = 8
# with fewer a sound loss may not have moved yet: red is only one that rises
_TELLS_FLAT = 20
# by which a loss falls at least that a verdict calls falling (points.TREND_CHANGE)
_FALLING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RungFacts:
    """What one run showed. Losses, norms and rewards are one a step, memory is in GiB.

    `devices` is how many trained, `accelerated` whether they were GPUs. `failed` is why the verdict
    did not pass, `unproven` why it could not tell. `trend` is the verdict's state of that point, where
    the stage file expects a falling loss.
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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RungFacts:
        """Raises Misfit where it is damaged; what a later launch has written beside is left out."""
        left_out: list[Omission] = []
        found: RungFacts = codec.read_record(cls, data, left_out)
        if left_out:
            raise Misfit(str(left_out[0]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What one gate says of a run; `value` is None where it was not measured."""

    gate: str
    colour: Colour
    text: str
    value: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"value": None if self.value is None else float(f"{self.value:.6g}")}


def read(given: Any, complain: Complain) -> tuple[dict[str, Limit], list[Finding]]:
    """The limits of a `gates:` mapping, and everything wrong with it.

    A number is where the gate turns red, `{red, yellow}` gives both, `off` switches it off. Of a gate
    that is named, only what is named changes.
    """
    if given is None:
        return {}, []
    if not isinstance(given, Mapping):
        message = f"`gates` is a mapping of gates to limits, not `{brief(given)}`"
        return {}, [complain("bad-gates", "", message, "gates: {loss_fall: 0.05}")]
    limits: dict[str, Limit] = {}
    findings = []
    for key, value in given.items():
        name = str(key)
        if name not in GATES:
            findings.append(complain("unknown-gate", name, f"`{brief(name)}` is not a gate", nearest(name, [*GATES])))
        elif value is not None:
            try:
                limits[name] = _limit(GATES[name][0], value)
            except ValueError:
                help = f"a number, `off`, or {{red: …, yellow: …}} ({GATES[name][1]})"
                message = f"`gates.{name}` cannot be `{brief(value)}`"
                findings.append(complain("bad-gate", name, message, help))
    return limits, findings


def _limit(usual: Limit, value: Any) -> Limit:
    if value is True or value == "on":
        return usual
    if value is False or value == "off":
        return Limit()
    named = value if isinstance(value, Mapping) else {"red": value}
    if not named or not set(named) <= {"red", "yellow"}:
        raise ValueError
    for one in named.values():
        number = isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
        if one is not None and not number:
            raise ValueError
    return replace(usual, **{key: None if one is None else float(one) for key, one in named.items()})


class Mean(NamedTuple):
    """A value and its standard error; the steps it is made of are taken as independent."""

    value: float
    error: float = 0.0


def fallen(losses: Sequence[float]) -> Mean | None:
    """By what share the mean of the last fifth lies below that of the first; None without two losses.

    The noise is taken from the differences of neighbouring steps, so that the fall itself is none.
    """
    seen = [loss for loss in losses if math.isfinite(loss)]
    if len(seen) < 2:
        return None
    count = max(1, len(seen) // 5)
    first, last = statistics.fmean(seen[:count]), statistics.fmean(seen[-count:])
    level = abs(first) or 1e-12
    return Mean((first - last) / level, _noise(seen) * math.sqrt(2 / count) / level)


def settled(series: Sequence[float]) -> Mean | None:
    """The mean of the last fifth."""
    seen = [value for value in series if math.isfinite(value)]
    if not seen:
        return None
    count = max(1, len(seen) // 5)
    return Mean(statistics.fmean(seen[-count:]), _noise(seen) / math.sqrt(count))


def _noise(series: Sequence[float]) -> float:
    """The standard deviation of one step about a smooth curve."""
    steps = [after - before for before, after in itertools.pairwise(series)]
    return math.sqrt(math.fsum(d * d for d in steps) / (2 * len(steps))) if steps else 0.0


def _flag(
    limits: Mapping[str, Limit], gate: str, text: str, red: Mean, yellow: float | None = None, *, stuck: bool = False
) -> Flag:
    """What one gate says; `yellow` is the value that counts there, where it is another.

    With `stuck` it is red too where noise hides on which side of red it is, but not that it is far
    from what is usual.
    """
    limit, sign = limits[gate], -1 if gate in _AT_MOST else 1
    within = "" if not red.error else f", give or take {2 * red.error:.2g}"
    value, most = sign * red.value, sign * red.value + 2 * red.error
    soft = value if yellow is None else sign * yellow
    colour: Colour = "green"
    # for `more than`, the limit itself is red
    past = operator.lt if gate in _AT_MOST else operator.le
    if limit.red is not None and past(value, sign * limit.red):
        far = stuck and limit.yellow is not None and most < sign * limit.yellow
        if far or past(most, sign * limit.red):
            asked = f"{'at most' if sign < 0 else 'more than'} {limit.red:g} is asked for"
            colour, text = "red", f"{text}{within}: {asked}"
        else:
            hidden = f"noise hides whether it is past {limit.red:g}"
            colour, text = "yellow", f"{text}{within}: {hidden}"
    elif limit.yellow is not None and soft < sign * limit.yellow:
        words = "at most" if sign < 0 else "at least"
        colour, text = "yellow", f"{text}: {words} {limit.yellow:.2g} is usual"
    return Flag(gate=gate, colour=colour, value=red.value, text=text)


def judge(facts: RungFacts, limits: Mapping[str, Limit], base: RungFacts | None = None) -> list[Flag]:
    """What every gate that can be asked says; `base` is the run that efficiency is measured against."""
    whole = {name: usual for name, (usual, _) in GATES.items()} | dict(limits)
    whole["loss_fall"] = _asked_fall(facts, whole["loss_fall"])
    ask = functools.partial(_flag, whole)
    return [*_of_loss(facts, ask), *_of_machine(facts, base, ask), *_of_rewards(facts, ask)]


def _asked_fall(facts: RungFacts, given: Limit) -> Limit:
    usual, steps = GATES["loss_fall"][0], len(facts.losses)
    share = _FALL_OF.get(facts.stage, 0.0) * min(1.0, steps / 100)
    red, yellow = given.red, given.yellow
    if red is not None and red == usual.red:
        red = red * share if steps >= _TELLS_FLAT else 0.0 if steps >= _FEWEST_LOSSES else None
    if yellow is not None and yellow == usual.yellow:
        yellow *= share
    return Limit(red, yellow)


def colour_of(flags: Sequence[Flag]) -> Colour:
    return max((flag.colour for flag in flags), key=("green", "yellow", "red").index, default="green")


def _of_loss(facts: RungFacts, ask: Callable[..., Flag]) -> Iterator[Flag]:
    fall = fallen(facts.losses)
    if facts.failed is not None:
        yield Flag(gate="verdict", colour="red", text=facts.failed)
    elif facts.unproven is not None:
        yield Flag(gate="verdict", colour="yellow", text=f"unproven: {facts.unproven}")
    if facts.nonfinite:
        steps = ", ".join(map(str, facts.nonfinite[:3])) + (", …" if facts.nonfinite[3:] else "")
        yield Flag(gate="loss", colour="red", text=f"NaN or infinite at step {steps}")
    elif fall is not None:
        word, first, last = "falls" if fall.value >= 0 else "rises", facts.losses[0], facts.losses[-1]
        yield ask("loss_fall", f"loss {word} by {abs(fall.value):.1%} ({first:.4g} -> {last:.4g})", fall)
    elif facts.failed is None:
        yield Flag(gate="loss_fall", colour="yellow", text="fewer than two losses were seen")
    if facts.trend is not None and not facts.nonfinite:
        yield _of_trend(facts.trend, fall, len(facts.losses))
    if facts.norms:
        most, median = max(facts.norms), statistics.median(facts.norms)
        text = f"gradient norm {median:.3g} in the median, {most:.3g} at most"
        yield ask("grad_norm", text, Mean(most), median)
        yield ask("grad_norm_least", text, Mean(most), median)


def _of_trend(state: str, fall: Mean | None, steps: int) -> Flag:
    """`expect: {trend: falling}`: red where the short run already shows that it does not."""
    asked = "`expect: {trend: falling}` asks for a loss that falls"
    if state == "falling":
        return Flag(gate="trend", colour="green", text="the loss is falling")
    if state == "too_short":
        return Flag(gate="trend", colour="yellow", text=f"too few losses to tell: {asked}")
    least = _FALLING * min(1.0, steps / 100) if steps >= _TELLS_FLAT else 0.0
    if state == "flat" and (fall is None or fall.value + 2 * fall.error >= least):
        return Flag(gate="trend", colour="yellow", text=f"not seen to fall yet: {asked}")
    return Flag(gate="trend", colour="red", text=f"the trend is `{state}`: {asked}")


def _of_machine(facts: RungFacts, base: RungFacts | None, ask: Callable[..., Flag]) -> Iterator[Flag]:
    rate = facts.tokens_per_second
    if rate is not None:
        yield ask("tokens_per_second", f"{rate:,.0f} tokens/s", Mean(rate))
        share = efficiency(facts, base)
        if share is not None and base is not facts:
            yield ask("efficiency", f"{share:.0%} of the first rung's tokens/s on each device", Mean(share))
    elif facts.failed is None:
        yield Flag(gate="tokens_per_second", colour="yellow", text="the speed was not measured")
    peak = facts.reserved_gib if facts.reserved_gib is not None else facts.allocated_gib
    if peak is not None and facts.card_gib:
        yield ask("memory", f"{peak:.1f} of {facts.card_gib:.1f} GiB", Mean(peak / facts.card_gib))
    if facts.allocated_gib is not None and facts.planned_gib:
        text = f"{facts.allocated_gib:.1f} GiB allocated, {facts.planned_gib:.1f} planned"
        yield ask("memory_over_plan", text, Mean(facts.allocated_gib / facts.planned_gib))


def efficiency(facts: RungFacts, base: RungFacts | None) -> float | None:
    """Tokens a second and device as a share of the base's; None for a CPU against a GPU."""
    if base is None or base.accelerated != facts.accelerated:
        return None
    if facts.tokens_per_second is None or not base.tokens_per_second:
        return None
    return (facts.tokens_per_second / facts.devices) / (base.tokens_per_second / base.devices)


def _of_rewards(facts: RungFacts, ask: Callable[..., Flag]) -> Iterator[Flag]:
    if facts.stage not in PAIRED:
        return
    if facts.starts_at_ln2 and facts.losses and math.isfinite(facts.losses[0]):
        text = f"first loss {facts.losses[0]:.4f}, ln 2 is {LN2:.4f}"
        yield ask("first_loss", text, Mean(abs(facts.losses[0] - LN2) / LN2))
    accuracy, margin = settled(facts.accuracies), settled(facts.margins)
    if accuracy is not None:
        text = f"the chosen answer has the higher reward in {accuracy.value:.0%} of pairs"
        yield ask("rewards_accuracy", text, accuracy, stuck=True)
    if margin is not None:
        yield ask("rewards_margin", f"chosen less rejected reward is {margin.value:.3g}", margin)
