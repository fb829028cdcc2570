"""What parses for TRL's DPO and then stops, or does nothing, in its losses: known from the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from launcher.backends.context import Context, StageRule
from launcher.backends.rule import Range, Rule, outside, say
from launcher.backends.trl_training_rules import number, words
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
    # trl/trainer/dpo_trainer.py:1315
    "ld_alpha": (
        Range(math.isfinite, "error", "the loss is no number"),
        Range(
            lambda n: not math.isfinite(n) or 0 <= n <= 1, "warning",
            "it is the share of what the longer answer has more, from 0 to 1",
        ),
    ),
    # trl/trainer/dpo_trainer.py:1487
    "discopop_tau": (
        Range(lambda n: n != 0 and math.isfinite(n), "error", "the loss divides by it"),
        Range(lambda n: not -math.inf < n < 0, "warning", "the two parts of the loss change places"),
    ),
}  # fmt: skip


def divergence_coefficient(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1366."""
    key, kind = "f_alpha_divergence_coef", values["f_divergence_type"]
    share = number(values[key])
    if not values.given(key) or share is None:
        return
    if kind in _DIVERGENCES and kind != "alpha_divergence":
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}` does nothing here: it is read only with `f_divergence_type: alpha_divergence`",
            "delete the line",
        )  # fmt: skip
    elif not math.isfinite(share):
        yield say("error", "run", "out-of-range", key, f"`{key}: {share:g}`: the loss is no number")


def out_of_range(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1388 and the places that the table above names."""
    losses = {*words(values["loss_type"])}
    for key, value, one in outside(values, _RANGES, number):
        if not losses.isdisjoint(_READ_BY[key]):
            yield say(one.severity, "run", one.code, key, f"`{key}: {value:g}`: {one.otherwise}")


def unread(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1386: each loss reads its own numbers, and the others do nothing."""
    losses = {*words(values["loss_type"])}
    if not values.schema.tested or not losses <= {*_LOSSES}:
        return
    for key, readers in _READ_BY.items():
        idle = not values.given(key) or values[key] in (values.schema.fields[key].default, None)
        if not idle and losses.isdisjoint(readers):
            told = "any loss of pairs" if readers == _OF_PAIRS else " or ".join(sorted(readers))
            yield say(
                "warning", "run", "conditional-key", key,
                f"`{key}` does nothing here: the loss {', '.join(sorted(losses))} does not read it",
                f"it is read by {told}: delete the line, or name another `loss_type`",
            )  # fmt: skip


def unknown_loss(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1513, in the first step."""
    for word in words(values["loss_type"]):
        if values.schema.tested and word not in _LOSSES:
            yield say(
                "error", "run", "unknown-loss", "loss_type",
                f"`loss_type: {brief(word)}` is no loss of TRL's DPO", f"one of {', '.join(_LOSSES)}",
            )  # fmt: skip


def unknown_divergence(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1381, in the first step."""
    kind = values["f_divergence_type"]
    if values.schema.tested and kind not in _DIVERGENCES:
        yield say(
            "error", "run", "unknown-divergence", "f_divergence_type",
            f"`f_divergence_type: {brief(kind)}` is not known to TRL",
            f"one of {', '.join(_DIVERGENCES)}",
        )  # fmt: skip


def divergence_of_loss(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:811."""
    kind, losses = values["f_divergence_type"], words(values["loss_type"])
    others = [loss for loss in losses if loss in _LOSSES and loss not in _ANY_DIVERGENCE]
    if kind in _DIVERGENCES[1:] and others:
        yield say(
            "error", "run", "divergence-of-loss", "f_divergence_type",
            f"`f_divergence_type: {kind}` is not defined for the loss {others[0]}",
            "write `f_divergence_type: reverse_kl`",
        )  # fmt: skip


def smoothing_of_exo(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:829."""
    if "exo_pair" in words(values["loss_type"]) and values["label_smoothing"] == 0:
        yield say(
            "error", "run", "exo-smoothing", "label_smoothing",
            "the loss exo_pair needs `label_smoothing` above 0", "add `label_smoothing: 1.0e-3`",
        )  # fmt: skip


def smoothing_of_robust(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:824; dpo_trainer.py:1431 divides by 1 - 2 * label_smoothing."""
    share = number(values["label_smoothing"])
    if "robust" in words(values["loss_type"]) and share is not None and not 0 <= share < 0.5:
        yield say(
            "warning", "run", "robust-smoothing", "label_smoothing",
            f"the loss robust divides by 1 - 2 * label_smoothing: with {share:g} it is no loss",
            "write `label_smoothing` from 0 to below 0.5",
        )  # fmt: skip


def zero_beta(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1404,1443 divide by it; the others multiply what they compare with it."""
    losses = words(values["loss_type"])
    divided = [loss for loss in losses if loss in ("ipo", "sppo_hard")]
    if values["beta"] != 0 or _OF_PAIRS.isdisjoint(losses):
        return
    if divided:
        message = f"`beta: 0` divides by zero in the loss {divided[0]}"
        yield say("error", "run", "zero-beta", "beta", message)
    else:
        yield say(
            "warning", "run", "zero-beta", "beta",
            "`beta: 0`: the loss does not tell chosen from rejected answers: no preference is learnt",
        )  # fmt: skip


def weighted_transport(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:819."""
    losses = [loss for loss in words(values["loss_type"]) if loss in ("aot", "aot_unpaired")]
    if values["use_weighting"] and losses:
        yield say(
            "error", "run", "weighting-of-loss", "use_weighting",
            f"`use_weighting` is not implemented for the loss {losses[0]}",
        )  # fmt: skip


def weighted_imitation(context: Context) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1526 writes into what is one number for all rows."""
    values, rows = context.values, context.per_device
    if values["use_weighting"] and "sft" in words(values["loss_type"]) and (rows or 0) > 1:
        yield say(
            "error", "run", "weighting-of-loss", "use_weighting",
            f"`use_weighting` crashes with {rows} rows a device in the loss sft",
            "leave sft out of `loss_type`, or set `per_device: 1`",
        )  # fmt: skip


def smoothing_share(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1410,1454."""
    share, losses = number(values["label_smoothing"]), words(values["loss_type"])
    if share is None:
        return
    # upstream itself refuses 0
    if "exo_pair" in losses and share != 0 and not 0 < share < 1:
        yield say(
            "warning", "run", "out-of-range", "label_smoothing",
            f"`label_smoothing: {share:g}`: the loss exo_pair takes logarithms of it and of what is left "
            "to 1: its gradients are NaN",
        )  # fmt: skip
    elif {"aot", "aot_unpaired"} & {*losses} and not 0 <= share <= 1:
        yield say(
            "warning", "run", "out-of-range", "label_smoothing",
            f"`label_smoothing: {share:g}`: the loss aot takes it for a share, from 0 to 1",
        )  # fmt: skip


def weights(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1528 multiplies each loss with its own."""
    given = [number(one) for one in values["loss_weights"] or ()]
    numbers = [one for one in given if one is not None]
    if any(not math.isfinite(one) for one in numbers):
        yield say(
            "error", "run", "out-of-range", "loss_weights", "`loss_weights`: the loss is no number"
        )
    elif numbers and not any(numbers):
        yield say(
            "warning", "run", "out-of-range", "loss_weights",
            "`loss_weights` are all 0: nothing is learnt",
        )  # fmt: skip
    elif any(one < 0 for one in numbers):
        yield say(
            "warning", "run", "out-of-range", "loss_weights",
            f"`loss_weights: {min(numbers):g}` turns a loss round: it is made larger",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    unknown_loss, unknown_divergence, divergence_of_loss, smoothing_of_exo, smoothing_of_robust,
    smoothing_share, zero_beta, weighted_transport,
    divergence_coefficient, out_of_range, weights, unread,
)  # fmt: skip
STAGE_RULES: tuple[StageRule, ...] = (weighted_imitation,)
