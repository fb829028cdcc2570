"""What parses for TRL's DPO and then stops, or does nothing, in its losses: known from the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from launcher.backends.rule import Range, Rule, check, outside, plain, say, unread
from launcher.errors import Finding, brief
from launcher.schema import Values

# trl/trainer/dpo_trainer.py:1513
_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# trl/trainer/dpo_trainer.py:810
_ANY_DIVERGENCE = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)
_OF_PAIRS = frozenset(_LOSSES) - {"sft"}
# which losses read a number: trl/trainer/dpo_trainer.py:1388,1410,1431,1454,1487,1498
_READ_BY: Mapping[str, frozenset[str]] = {
    "beta": _OF_PAIRS,
    "ld_alpha": _OF_PAIRS,
    "f_divergence_type": _OF_PAIRS,
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


def out_of_range(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1388."""
    if not _OF_PAIRS.isdisjoint(losses_of(values)):
        for key, value, one in outside(values, _RANGES):
            yield say(
                one.severity, "run", one.code, key, f"`{key}: {plain(value)}`: {one.otherwise}"
            )


def unread_numbers(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1386: each loss reads its own numbers, and the others do nothing."""
    losses = {*losses_of(values)}
    if not values.schema.tested or not losses <= {*_LOSSES}:
        return
    for key, readers in _READ_BY.items():
        idle = not values.given(key) or values[key] in (values.schema.fields[key].default, None)
        if not idle and losses.isdisjoint(readers):
            some = "any loss of pairs" if readers == _OF_PAIRS else " or ".join(sorted(readers))
            yield say(
                "warning", "run", "conditional-key", key,
                f"`{key}` does nothing here: the loss {', '.join(sorted(losses))} does not read it",
                f"it is read by {some}: delete the line, or name another `loss_type`",
            )  # fmt: skip


def unknown_loss(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1513, in the first step."""
    for word in losses_of(values):
        if values.schema.tested and word not in _LOSSES:
            yield say(
                "error", "run", "unknown-loss", "loss_type",
                f"`loss_type: {brief(word)}` is no loss of TRL's DPO", f"one of {', '.join(_LOSSES)}",
            )  # fmt: skip


def divergence_of_loss(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:811."""
    kind, losses = values["f_divergence_type"], losses_of(values)
    others = [loss for loss in losses if loss in _LOSSES and loss not in _ANY_DIVERGENCE]
    if kind in _DIVERGENCES[1:] and others:
        yield say(
            "error", "run", "divergence-of-loss", "f_divergence_type",
            f"`f_divergence_type: {kind}` is not defined for the loss {others[0]}",
            "write `f_divergence_type: reverse_kl`",
        )  # fmt: skip


def zero_beta(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1404,1443 divide by it; the others multiply what they compare with it."""
    losses = losses_of(values)
    divided = [loss for loss in losses if loss in ("ipo", "sppo_hard")]
    if values["beta"] != 0 or _OF_PAIRS.isdisjoint(losses):
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
    unknown_loss, divergence_of_loss, zero_beta, out_of_range, unread_numbers,
    # in the first step
    check(
        "trl/trainer/dpo_trainer.py:1381", "unknown-divergence", "f_divergence_type",
        lambda v: v["f_divergence_type"] not in _DIVERGENCES,
        "`f_divergence_type: {f_divergence_type}` is not known to TRL",
        f"one of {', '.join(_DIVERGENCES)}", tested=True,
    ),
    check(
        "trl/trainer/dpo_trainer.py:829", "exo-smoothing", "label_smoothing",
        lambda v: "exo_pair" in losses_of(v) and v["label_smoothing"] == 0,
        "the loss exo_pair needs `label_smoothing` above 0", "add `label_smoothing: 1.0e-3`",
    ),
    check(
        "trl/trainer/dpo_trainer.py:819", "weighting-of-loss", "use_weighting",
        lambda v: v["use_weighting"] and {"aot", "aot_unpaired"} & {*losses_of(v)},
        "`use_weighting` is not implemented for the losses aot and aot_unpaired",
    ),
    unread(
        "trl/trainer/dpo_trainer.py:1366", "f_alpha_divergence_coef",
        lambda v: v["f_divergence_type"] == "alpha_divergence",
        "with `f_divergence_type: alpha_divergence`",
    ),
)  # fmt: skip
