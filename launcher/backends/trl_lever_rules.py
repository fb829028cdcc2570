"""Rules for TRL about settings that are meant to make training faster or smaller: where they do neither.

Recompilations were counted on the CPU with TRL 1.16 and torch 2.13, six steps of the demo's SFT with
`torch_compile`: 12 with padded rows, 15 with packed ones, none with `pad_to_multiple_of: 256`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from launcher.backends import trl_resolved
from launcher.backends.context import Context, StageRule, section
from launcher.backends.rule import say
from launcher.errors import Finding, brief
from launcher.schema import Values

# accelerate/utils/deepspeed.py:48,53,84: those that stay what they are where DeepSpeed offloads
_OFFLOADED = (
    "adamw_torch", "adamw_torch_fused", "paged_adamw_32bit", "adagrad", "lion_32bit",
    "paged_lion_32bit",
)  # fmt: skip
_COMPILERS = {True: ("gcc", "cc", "clang"), False: ("g++", "c++", "clang++")}
_MOST_GPUS = 8  # of one machine; of more it is not known how many there are beside each other


# what the trainers read only where another one is set, which the analysis of the scripts does not see
_NEEDS = {
    "packing_strategy": ("packing", "eval_packing"),  # trl/trainer/sft_trainer.py:1480
    "precompute_ref_batch_size": ("precompute_ref_log_probs",),  # trl/trainer/dpo_trainer.py:1013
    "ref_model_sync_steps": ("sync_ref_model",),  # trl/trainer/dpo_trainer.py:992
    "ref_model_mixup_alpha": ("sync_ref_model",),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing",),
}


# trl/scripts/sft.py:107: without a strategy the scripts hand over no set to evaluate
_WHILE_EVALUATING = (
    "do_eval", "per_device_eval_batch_size", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better",
)  # fmt: skip


def alone(context: Context) -> Iterator[Finding]:
    """Settings of something that is switched off (trl/trainer/sft_trainer.py:1480, and those named above)."""
    values = context.values
    for key, switches in _NEEDS.items():
        if key not in values.schema.fields or not values.given(key):
            continue
        idle = values[key] == values.schema.fields[key].default or not values[key]
        if not idle and not any(values.get(name) for name in switches):
            yield say(
                "warning", "run", "conditional-key", key,
                f"`{key}` does nothing here: it is read only where `{switches[0]}` is set",
                f"add `{switches[0]}: true`, or delete the line",
            )  # fmt: skip
    for key in _WHILE_EVALUATING if values["eval_strategy"] == "no" else ():
        if values.given(key) and values[key] and values[key] != values.schema.fields[key].default:
            yield say(
                "warning", "run", "conditional-key", key,
                f"`{key}` does nothing here: `eval_strategy` is no",
                "add `eval_strategy: steps`, or delete the line",
            )  # fmt: skip


# --- torch.compile ---------------------------------------------------------------------------------


def compiled(values: Values) -> bool:
    """Whether the model is compiled: a mode or a backend asks too (transformers/training_args.py:1589)."""
    named = values["torch_compile_backend"] is not None or values["torch_compile_mode"] is not None
    return bool(values["torch_compile"] or named)


def lengths_compiled(context: Context) -> Iterator[Finding]:
    """torch/_dynamo/config.py:121: a function is compiled for so many shapes, and then no more."""
    values = context.values
    padded = str(values["pad_to_multiple_of"]).lower() not in ("auto", "none", "null")
    if not compiled(values) or padded:
        return
    key = next(k for k in _COMPILE_KEYS if values.given(k)) if _given(values) else "torch_compile"
    yield say(
        "warning", "run", "compile-lengths", key,
        "batches differ in length, and what is compiled is compiled again for new ones, up to eight times: "
        "12 times were counted in the first six steps, and none with few lengths",
        "add `pad_to_multiple_of: 512`, so that there are few lengths",
    )  # fmt: skip


_COMPILE_KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def _given(values: Values) -> bool:
    return any(values.given(key) for key in _COMPILE_KEYS)


def no_compiler(context: Context) -> Iterator[Finding]:
    """Inductor writes C++ for a CPU (torch/_inductor/cpp_builder.py:395), Triton a launcher in C."""
    values, environ = context.values, context.environ
    backend = values["torch_compile_backend"]
    if (
        not context.running
        or not compiled(values)
        or str(backend or "inductor").lower() != "inductor"
    ):
        return
    on_gpus = bool(context.gpus)
    named = environ.get("CC" if on_gpus else "CXX")
    names = (named,) if named else _COMPILERS[on_gpus]
    if not any(shutil.which(name, path=environ.get("PATH")) for name in names):
        yield say(
            "error", "run", "no-compiler", "torch_compile",
            f"torch.compile builds its kernels with a compiler, and {' or '.join(names)} is not here",
            "apt-get install g++, or write `torch_compile: false`",
        )  # fmt: skip


# --- optimizers ------------------------------------------------------------------------------------


def optimizer_unread(context: Context) -> Iterator[Finding]:
    """transformers/integrations/deepspeed.py:546: a config that has one decides."""
    config, values = trl_resolved.engine(context), context.values
    theirs = section(config, "optimizer").get("type") if config else None
    if theirs is not None and values.given("optim"):
        yield say(
            "warning", "run", "optim-unread", "optim",
            f"`optim: {values['optim']}` is not read: the DeepSpeed config has its own, {brief(theirs)}",
            "delete one of them",
        )  # fmt: skip


def optimizer_replaced(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:2383: DeepSpeed's own, with other arithmetic, whatever was asked for."""
    config, name = trl_resolved.engine(context), str(context.values["optim"])
    if not config or "optimizer" in config or config.get("zero_force_ds_cpu_optimizer") is False:
        return
    if not context.values.given("optim"):
        return
    offloaded = section(section(config, "zero_optimization"), "offload_optimizer").get("device")
    if offloaded in (None, "none") or name in _OFFLOADED or name.endswith("layerwise"):
        return
    yield say(
        "warning", "run", "optim-replaced", "optim",
        f"`optim: {name}` becomes DeepSpeed's Adam on the CPU, with states of 32 bits and a weight decay "
        "that is not decoupled: its config offloads the optimizer",
        "write `optim: adamw_torch`, or a `deepspeed:` that does not offload",
    )  # fmt: skip


def small_states(context: Context) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:568: an adapter's states are small, and stay in 32 bits."""
    name = str(context.values["optim"])
    if context.values["use_peft"] and ("8bit" in name or "4bit" in name):
        yield say(
            "note", "run", "optim-on-adapter", "optim",
            f"`optim: {name}` makes the optimizer's states smaller, and with `use_peft` only the adapter "
            "has any: a few bytes for each of its parameters are all there is to save",
        )  # fmt: skip


# --- data ------------------------------------------------------------------------------------------


def persistent_once(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:997: torch's loader keeps its workers from one epoch to the next."""
    values, epochs = context.values, context.values["num_train_epochs"]
    if not values["dataloader_persistent_workers"] or not values["dataloader_num_workers"]:
        return
    once = isinstance(epochs, int | float) and epochs <= 1 and not (values["max_steps"] or -1) > 0
    if once and values["eval_strategy"] == "no":
        yield say(
            "note", "run", "persistent-once", "dataloader_persistent_workers",
            "`dataloader_persistent_workers` does nothing in a single epoch without evaluation",
        )  # fmt: skip


def many_workers(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:995: so many processes are started beside each training process."""
    each, gpus = context.values["dataloader_num_workers"], context.gpus
    if not context.running or gpus is None or gpus > _MOST_GPUS or not isinstance(each, int):
        return
    if context.cpus and each > 0 and each * max(1, gpus) > context.cpus:
        yield say(
            "note", "run", "many-workers", "dataloader_num_workers",
            f"{each * max(1, gpus)} workers for the data share {context.cpus} processors with training",
            f"write `dataloader_num_workers: {max(1, context.cpus // max(1, gpus) - 1)}`",
        )  # fmt: skip


# --- DPO -------------------------------------------------------------------------------------------


def reference_price(context: Context) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:909,1168. Measured with LoRA: Qwen2.5-7B on one GPU."""
    values, key = context.values, "precompute_ref_log_probs"
    if values.schema.stage != "dpo" or not values[key]:
        return
    told = (
        "no reference model is kept beside the trained one, which saves its weights"
        if not values["use_peft"]
        else "with LoRA there is no second model to save: 20 % faster was measured, with 63 % more memory "
        "(19 -> 31 GB for Qwen2.5-7B on one GPU)"
    )
    yield say(
        "note", "run", "reference-price", key,
        f"`{key}`: all rows pass the reference before the first step, however few are trained on; {told}",
    )  # fmt: skip


RULES: tuple[StageRule, ...] = (
    alone, lengths_compiled, no_compiler, optimizer_unread, optimizer_replaced, small_states,
    persistent_once, many_workers, reference_price,
)  # fmt: skip
