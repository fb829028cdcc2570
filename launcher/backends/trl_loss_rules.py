"""What parses for TRL's DPO and then stops, or does nothing, in its losses: known from the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from launcher.backends.rule import Range, Rule, outside, plain, say, unread
from launcher.errors import Finding
from launcher.schema import Values

# numbers that all losses read but that of SFT (trl/trainer/dpo_trainer.py:1388), and those that few do:
# trl/trainer/dpo_trainer.py:1410,1431,1454,1487,1498
_OF_PAIRS = ("beta", "ld_alpha", "f_divergence_type")
_READ_BY: Mapping[str, frozenset[str]] = {
    "label_smoothing": frozenset({"exo_pair", "robust", "aot", "aot_unpaired"}),
    "discopop_tau": frozenset({"discopop"}),
}
_RANGES: Mapping[str, tuple[Range, ...]] = {
    # trl/trainer/dpo_trainer.py:1388 and the other losses: the same as in open-instruct
    "beta": (
        Range(math.isfinite, "error", "the loss is no number"),
        Range(lambda n: not -math.inf < n < 0, "warning", "the rejected answers are preferred"),
    ),
}


def losses_of(values: Values) -> tuple[str, ...]:
    """The losses that are added up: one word, or a list of them."""
    given = values["loss_type"]
    return tuple(map(str, given)) if isinstance(given, list) else (str(given),)


def _compares(values: Values) -> bool:
    """Whether any loss compares chosen with rejected answers."""
    return any(loss != "sft" for loss in losses_of(values))


def out_of_range(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1388."""
    if _compares(values):
        for key, value, one in outside(values, _RANGES):
            yield say(
                one.severity, "run", one.code, key, f"`{key}: {plain(value)}`: {one.otherwise}"
            )


def unread_numbers(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1386: each loss reads its own numbers, and the others do nothing."""
    losses = {*losses_of(values)}
    if not values.schema.tested:
        return
    for key in (*_OF_PAIRS, *_READ_BY):
        readers = _READ_BY.get(key)
        read = _compares(values) if readers is None else not losses.isdisjoint(readers)
        idle = not values.given(key) or values[key] in (values.schema.fields[key].default, None)
        if not idle and not read:
            some = "any loss of pairs" if readers is None else " or ".join(sorted(readers))
            yield say(
                "warning", "run", "conditional-key", key,
                f"`{key}` does nothing here: the loss {', '.join(sorted(losses))} does not read it",
                f"it is read by {some}: delete the line, or name another `loss_type`",
            )  # fmt: skip


def zero_beta(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1404,1443 divide by it; the others multiply what they compare with it."""
    losses = losses_of(values)
    divided = [loss for loss in losses if loss in ("ipo", "sppo_hard")]
    if values["beta"] != 0 or not _compares(values):
        return
    if divided:
        message = f"`beta: 0` divides by zero in the loss {divided[0]}"
        yield say("error", "run", "zero-beta", "beta", message)
    else:
        yield say(
            "warning", "run", "zero-beta", "beta",
            "`beta: 0`: the loss does not tell chosen from rejected answers: no preference is "
            "learnt",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    zero_beta, out_of_range, unread_numbers,
    unread(
        "trl/trainer/dpo_trainer.py:1366", "f_alpha_divergence_coef",
        lambda v: v["f_divergence_type"] == "alpha_divergence",
        "with `f_divergence_type: alpha_divergence`",
    ),
)  # fmt: skip
