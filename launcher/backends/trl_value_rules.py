"""Rules for TRL about single values that parse and then crash, or do nothing.

What happens with each was seen on the demo's model: TRL 1.16, transformers 5.17, torch 2.13, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.backends import trl_resolved
from launcher.backends.context import Context, StageRule
from launcher.backends.rule import Range, Rule, outside, say
from launcher.backends.trl_mappings import inline
from launcher.backends.trl_training_rules import number
from launcher.errors import Finding, Severity, brief
from launcher.schema import Values

_RANGES: Mapping[str, tuple[Range, ...]] = {
    "learning_rate": (Range(lambda n: n != 0, "warning", "nothing is learnt"),),
    # transformers/trainer.py:1248: as a group's own it is not looked at by torch
    "weight_decay": (
        Range(lambda n: n >= 0, "warning", "the weights grow with every step, which nothing refuses"),
    ),
    # accelerate/data_loader.py:96
    "data_seed": (Range(lambda n: -(2**63) <= n < 2**64, "error", "torch takes 64 bits"),),
    # transformers/training_args.py:2127
    "warmup_steps": (Range(math.isfinite, "error", "no number of steps can be made of it"),),
    # transformers/trainer.py:1863
    "max_grad_norm": (Range(lambda n: n >= 0, "warning", "gradients are not clipped, as with 0"),),
    # torch/nn/modules/dropout.py:24, peft/tuners/lora/layer.py:255
    "lora_dropout": (
        Range(lambda n: not n > 1, "error", "torch refuses it", needs="use_peft"),
        Range(
            lambda n: n != 1, "warning", "nothing reaches the adapter, and nothing is learnt",
            needs="use_peft",
        ),
        Range(lambda n: not n < 0, "warning", "there is no dropout, as with 0", needs="use_peft"),
    ),
    "lora_alpha": (
        Range(
            lambda n: n != 0, "warning", "the adapter counts for nothing, and nothing is learnt",
            needs="use_peft",
        ),
    ),
    # transformers/integrations/neftune.py:50
    "neftune_noise_alpha": (Range(lambda n: n >= 0, "error", "torch refuses it"),),
    # trl/trainer/dpo_trainer.py:1017; 0 stands for the batch of training
    "precompute_ref_batch_size": (
        Range(
            lambda n: n >= 0, "error", "torch's loader refuses it", needs="precompute_ref_log_probs"
        ),
    ),
    # datasets/arrow_dataset.py:3364
    "dataset_num_proc": (Range(lambda n: n >= 0, "error", "datasets refuses it"),),
    # trl/trainer/callbacks.py:151
    "ref_model_sync_steps": (
        Range(lambda n: n != 0, "error", "upstream divides by it", needs="sync_ref_model"),
    ),
    # trl/trainer/callbacks.py:132
    "ref_model_mixup_alpha": (
        Range(math.isfinite, "error", "no number is left of the reference", needs="sync_ref_model"),
        Range(
            lambda n: not math.isfinite(n) or 0 < n <= 1, "warning",
            "it is the model's share in the reference, above 0 and up to 1", needs="sync_ref_model",
        ),
    ),
}  # fmt: skip

_TORCH_ADAM = ("adamw_torch", "adamw_torch_fused")
_TORCH = (*_TORCH_ADAM, "sgd", "adagrad", "rmsprop")
_OPTIMIZER: Mapping[str, Callable[[float], bool]] = {
    "learning_rate": lambda n: n >= 0,
    "adam_beta1": lambda n: 0 <= n < 1,
    "adam_beta2": lambda n: 0 <= n < 1,
    "adam_epsilon": lambda n: n >= 0,
}
_COSINE = frozenset({"num_cycles", "last_epoch"})
_MIN_LR = _COSINE | {"min_lr", "min_lr_rate"}
_PLATEAU = frozenset({
    "mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps",
})  # fmt: skip
# transformers/optimization.py:107 and below it: what each schedule takes beside the steps
_SCHEDULES: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"last_epoch"}),
    "cosine": _COSINE,
    "cosine_with_restarts": _COSINE,
    "polynomial": frozenset({"lr_end", "power", "last_epoch"}),
    "inverse_sqrt": frozenset({"timescale", "last_epoch"}),
    "reduce_lr_on_plateau": _PLATEAU,
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": _MIN_LR | {"warmup_lr_rate"},
    "warmup_stable_decay": frozenset({
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio",
        "num_cycles", "last_epoch",
    }),
    "greedy": _PLATEAU | {"warmup", "max_lr", "verbose", "smooth", "window_size", "reset_start"},
}  # fmt: skip
_UNREAD = ("constant", "constant_with_warmup")
# transformers/optimization.py:560,563
_SHAPES = ("linear", "cosine", "1-sqrt")


def _said(
    severity: Severity, key: str, value: float, otherwise: str, help: str | None = None
) -> Finding:
    return say(severity, "run", "out-of-range", key, f"`{key}: {value:g}`: {otherwise}", help)


# --- numbers ---------------------------------------------------------------------------------------


def out_of_range(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:1863 and the places that the table above names."""
    for key, value, one in outside(values, _RANGES, number):
        yield _said(one.severity, key, value, one.otherwise)


def optimizer_numbers(context: Context) -> Iterator[Finding]:
    """torch/optim/adam.py:58,60,62,64; an optimizer of DeepSpeed's own config is another one."""
    values = context.values
    # transformers/training_args.py:804: the default is one of torch's two
    name = str(values["optim"] or _TORCH_ADAM[0])
    replaced = "optimizer" in (trl_resolved.engine(context) or {})
    for key, holds in _OPTIMIZER.items():
        value, adams = number(values[key]), key != "learning_rate"
        if value is None or holds(value) or (adams and "adam" not in name):
            continue
        certain = not replaced and name in (_TORCH_ADAM if adams else _TORCH)
        yield _said(
            "error" if certain else "warning", key, value,
            "the optimizer refuses it" if certain else "no optimizer learns with it",
        )  # fmt: skip


def no_steps(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:2428: below 0 epochs are counted; trainer.py:1600 goes through them."""
    steps, epochs = number(values["max_steps"]), number(values["num_train_epochs"])
    if steps is None or epochs is None:
        return
    if steps <= 0 and epochs <= 0:
        yield _said("warning", "num_train_epochs", epochs, "the model is saved untrained")
    elif steps == 0:
        yield _said(
            "warning", "max_steps", steps, "one step is trained, and no more",
            "delete the line, and `num_train_epochs` decides",
        )  # fmt: skip
    elif steps > 0 and values.given("num_train_epochs"):
        yield say(
            "warning", "run", "conditional-key", "num_train_epochs",
            f"`num_train_epochs` does nothing here: `max_steps`, which is {steps:g}, comes before it",
            "delete one of the two lines",
        )  # fmt: skip
    elif steps < -1:
        yield _said(
            "warning", "max_steps", steps,
            f"there is no such limit: `num_train_epochs` decides, which is {epochs:g}",
            "delete the line, or write a number of steps",
        )  # fmt: skip


def endless_warmup(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:2127: from 1 on it is a number of steps."""
    warmup, steps = number(values["warmup_steps"]), number(values["max_steps"])
    if warmup is None or not math.isfinite(warmup) or values["lr_scheduler_type"] == "constant":
        return
    if steps is not None and warmup >= 1 and 0 < steps <= int(warmup):
        yield _said(
            "warning", "warmup_steps", warmup,
            f"with `max_steps: {steps:g}` the learning rate never gets to its value",
            "below 1 it is a share of all steps: `warmup_steps: 0.1`",
        )  # fmt: skip


def intervals(values: Values) -> Iterator[Finding]:
    """transformers/trainer_callback.py:166: what is below 1 is multiplied by the number of all steps."""
    for what in ("logging", "eval"):
        key = f"{what}_steps"
        value = number(values[key])
        if values[f"{what}_strategy"] == "steps" and value is not None and value < 0:
            yield _said(
                "warning", key, value, "below 1 it is a share of all steps, and not below 0"
            )
    # transformers/trainer_callback.py:586
    value = number(values["save_steps"])
    if values["save_strategy"] == "steps" and value is not None and value <= 0:
        yield _said(
            "warning", "save_steps", value, "there is no checkpoint before the end of training",
            'write a number of steps, or `save_strategy: "no"`',
        )  # fmt: skip


def evaluation(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:2929; torch/utils/data/sampler.py:320."""
    if values["eval_strategy"] == "no":
        return
    size = number(values["per_device_eval_batch_size"])
    if size is not None and size <= 0:
        yield _said("error", "per_device_eval_batch_size", size, "torch's loader refuses it")
    passes = number(values["eval_accumulation_steps"])
    if passes == 0:
        yield _said("error", "eval_accumulation_steps", passes, "upstream divides by it")


def never_reached(values: Values) -> Iterator[Finding]:
    """transformers/trainer_callback.py:579,599,614, trl/trainer/callbacks.py:151: a step, or an epoch, beyond
    the last one.
    """
    steps, epochs = number(values["max_steps"]), number(values["num_train_epochs"])
    strategy, delay = values["eval_strategy"], number(values["eval_delay"])
    counted = steps if strategy == "steps" else epochs if steps is None or steps <= 0 else None
    if strategy != "no" and delay is not None and counted is not None and 0 < counted < delay:
        unit = "max_steps" if strategy == "steps" else "num_train_epochs"
        yield _said(
            "warning", "eval_delay", delay, f"nothing is evaluated: `{unit}` is {counted:g}",
            "delete the line",
        )  # fmt: skip
    every = number(values.get("ref_model_sync_steps"))
    if not values.get("sync_ref_model") or steps is None or every is None:
        return
    if 0 < steps < abs(every):
        yield say(
            "warning", "run", "conditional-key", "sync_ref_model",
            f"`sync_ref_model` does nothing here: `ref_model_sync_steps` is {every:g}, and `max_steps` "
            f"{steps:g}", "write fewer `ref_model_sync_steps`",
        )  # fmt: skip


def no_length(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1441,1443,1480, dpo_trainer.py:155,157,1140."""
    length = number(values["max_length"])
    ready = (inline(values.get("dataset_kwargs")) or {}).get("skip_prepare_dataset")
    if length is None or length > 0 or ready:
        return
    end = values["truncation_mode"] == "keep_end"
    if values.get("packing"):
        yield _said("error", "max_length", length, "no row can be packed into it")
    elif not end and (length == 0 or values.schema.stage == "dpo"):
        yield _said("error", "max_length", length, "it leaves nothing of any row")
    else:
        lost = f"every row loses its {'first' if end else 'last'} {-length:g} tokens, however long it is"
        yield _said(
            "warning", "max_length", length, lost if length else "rows are not cut at all",
            'write `max_length: "none"` for rows as they are',
        )  # fmt: skip


# --- names -----------------------------------------------------------------------------------------


def scheduler_names(context: Context) -> Iterator[Finding]:
    """transformers/optimization.py:1049,71; a schedule of DeepSpeed's own config is another one."""
    values, key = context.values, "lr_scheduler_kwargs"
    kind, kwargs = values["lr_scheduler_type"], inline(values[key])
    own = "scheduler" in (trl_resolved.engine(context) or {})
    if not kwargs or own or not values.schema.tested:
        return
    taken = _SCHEDULES.get(str(kind))
    if kind in _UNREAD:
        yield say(
            "warning", "run", "scheduler-kwargs", key,
            f"`{key}` is not read with `lr_scheduler_type: {kind}`", "delete the line",
        )  # fmt: skip
    elif taken is not None and (unknown := sorted(kwargs.keys() - taken)):
        told = sorted(taken - {"last_epoch"})
        yield say(
            "error", "run", "scheduler-kwargs", key,
            f"`lr_scheduler_type: {kind}` takes no `{brief(unknown[0])}`",
            f"it takes {', '.join(told)}" if told else "delete the line",
        )  # fmt: skip
    else:
        yield from _scheduler_values(values, str(kind), kwargs)


def _scheduler_values(values: Values, kind: str, kwargs: Mapping[str, Any]) -> Iterator[Finding]:
    """transformers/optimization.py:275,560,563: what a schedule refuses once the model is loaded."""
    key = "lr_scheduler_kwargs"
    shapes = ("warmup_type", "decay_type") if kind == "warmup_stable_decay" else ()
    for name in shapes:
        if kwargs.get(name, _SHAPES[0]) not in _SHAPES:
            yield say(
                "error", "run", "scheduler-kwargs", key,
                f"`{key}`: there is no `{name}: {brief(kwargs[name])}`", f"one of {', '.join(_SHAPES)}",
            )  # fmt: skip
    end, rate = number(kwargs.get("lr_end")), number(values["learning_rate"])
    if kind == "polynomial" and end is not None and rate is not None and not rate > end:
        yield say(
            "error", "run", "scheduler-kwargs", key,
            f"`{key}`: `lr_end` ({end:g}) is not below `learning_rate` ({rate:g})",
            "write a lower `lr_end`",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    out_of_range, no_steps, endless_warmup, intervals, evaluation, never_reached, no_length,
)  # fmt: skip
STAGE_RULES: tuple[StageRule, ...] = (optimizer_numbers, scheduler_names)
