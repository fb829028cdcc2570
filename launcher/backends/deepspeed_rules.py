"""Rules about DeepSpeed under open-instruct: its file, its stages, what it cannot train.

Line numbers are those of the pin and of the packages named in tests/test_upstream_facts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from launcher.backends import model_config, trl_resolved
from launcher.backends.context import Context, StageRule, caches_only, section
from launcher.backends.rule import say
from launcher.errors import Finding, brief

# attention with biases whatever else their config says; `attention_bias` tells for the others
_BIASED = frozenset({"qwen2", "qwen2_moe"})


# --- the engine in use
# -----------------------------------------------------------------------------


def engine_config(
    values: Mapping[str, Any], file: Mapping[str, Any] | None, *, trl: bool = False
) -> Mapping[str, Any] | None:
    """The DeepSpeed config in use: the trainer's own argument wins over `file`, launch's `deepspeed`.

    None without DeepSpeed. The caller knows whether a GPU is used.
    """
    if trl:
        own = trl_resolved.own_deepspeed(values)
        return file if own is None else own
    stage = values.get("zero_stage")
    if not isinstance(stage, int) or isinstance(stage, bool):
        return file
    # as far as memory and gradients depend on it (dpo_tune_cache.py:78, dpo_tune_cache.py:82)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "zero_hpz_partition_size": values.get("zero_hpz_partition_size"),
        }  # fmt: skip
    for name in ("offload_optimizer", "offload_param"):
        if values.get(name):
            zero[name] = {"device": "cpu"}
    return {"zero_optimization": zero}


# --- the DeepSpeed file
# ----------------------------------------------------------------------------


def _of_file(finding: Finding) -> Finding:
    """A finding about launch's own option instead of one of upstream's arguments."""
    return replace(finding, key="deepspeed")


def zero_section(context: Context) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1277."""
    if context.file is not None and "zero_optimization" not in context.file:
        yield _of_file(say(
            "error", "run", "deepspeed-no-zero", "deepspeed",
            "the DeepSpeed file has no `zero_optimization`: accelerate refuses it",
            'add `"zero_optimization": {"stage": 2}`',
        ))  # fmt: skip


def own_optimizer(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:2253, accelerate/accelerator.py:2268: the scripts bring their own."""
    for key in ("optimizer", "scheduler"):
        if context.file is not None and key in context.file:
            yield _of_file(say(
                "error", "run", "deepspeed-optimizer", "deepspeed",
                f"the DeepSpeed file sets `{key}`, and so does upstream: accelerate refuses both",
                f"delete `{key}` from the file; the arguments decide",
            ))  # fmt: skip


def unsaved_weights(context: Context) -> Iterator[Finding]:
    """model_utils.py:555, when training has ended: accelerate/accelerator.py:4087."""
    if context.file is None or context.zero_stage != 3 or caches_only(context):
        return
    zero = section(context.file, "zero_optimization")
    if zero.get("stage3_gather_16bit_weights_on_model_save") is not True:
        yield _of_file(say(
            "error", "run", "zero3-unsaved", "deepspeed",
            "ZeRO-3 without `stage3_gather_16bit_weights_on_model_save: true` crashes when the "
            "trained model is saved",
            "add it to `zero_optimization` in the DeepSpeed file",
        ))  # fmt: skip


def no_batch(context: Context) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1369: an `auto` batch is filled from the micro-batch alone."""
    file = context.file
    if file is None or file.get("train_micro_batch_size_per_gpu") is not None:
        return
    if file.get("train_batch_size") in (None, "auto"):
        yield _of_file(say(
            "error", "run", "deepspeed-no-batch", "deepspeed",
            "the DeepSpeed file has no `train_micro_batch_size_per_gpu`",
            'add `"train_micro_batch_size_per_gpu": "auto"` and `"train_batch_size": "auto"`',
        ))  # fmt: skip


def accumulation_of_the_file(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:2219: the file's number wins, and a missing one is 1.

    upstream goes on counting with its own argument (finetune.py:692).
    """
    file, ours = context.file, context.accumulation
    if file is None or ours is None:
        return
    theirs = file.get("gradient_accumulation_steps", 1)
    if isinstance(theirs, int) and theirs != ours:
        told = "sets" if "gradient_accumulation_steps" in file else "is silent, which means"
        yield _of_file(say(
            "warning", "run", "deepspeed-accumulation", "deepspeed",
            f"the DeepSpeed file {told} `gradient_accumulation_steps: {theirs}`: {ours} would "
            "not be "
            "used, and the steps be counted wrongly",
            'write `"gradient_accumulation_steps": "auto"` in the file',
        ))  # fmt: skip


def batch_of_the_file(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:2230 fills in what is `auto`; DeepSpeed asserts that it multiplies."""
    file = context.file
    known = (context.gpus, context.per_device, context.accumulation)
    if file is None or None in known:
        return
    total = file.get("train_batch_size")
    micro = _number(file.get("train_micro_batch_size_per_gpu"), context.per_device)
    passes = _number(file.get("gradient_accumulation_steps", 1), context.accumulation)
    world = (context.gpus or 0) // max(1, context.values.get("sequence_parallel_size") or 1)
    if isinstance(total, int) and micro and passes and world and total != micro * passes * world:
        yield _of_file(say(
            "error", "run", "deepspeed-batch", "deepspeed",
            f"the DeepSpeed file sets `train_batch_size: {total}`, but {micro} rows x {passes} "
            f"passes x {world} devices is {micro * passes * world}",
            'write `"train_batch_size": "auto"` in the file',
        ))  # fmt: skip


def _number(given: Any, ours: int | None) -> int | None:
    if given == "auto" or given is None:
        return ours
    return given if isinstance(given, int) else None


def clipping(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:3023 leaves it to DeepSpeed; `auto` is 1.0 (accelerator.py:2224).

    What is not above 0 asks for none (finetune.py:855, dpo_tune_cache.py:592).
    """
    key = "clip_grad_norm" if "clip_grad_norm" in context.values else "max_grad_norm"
    ours = context.values[key]
    if not context.distributed or not context.values.given(key):
        return
    wanted = ours if ours > 0 else 0.0
    given = "auto" if context.file is None else context.file.get("gradient_clipping", 0.0)
    theirs = 1.0 if given == "auto" else given
    if not isinstance(theirs, int | float) or not theirs > 0:
        theirs = 0.0
    if theirs != wanted:
        what = f"clips at {theirs}" if theirs else "does not clip"
        instead = ", in place of `zero_stage`" if context.file is None else ""
        yield say(
            "warning", "run", "clipping-unread", key,
            f"`{key}: {ours}` is not read with DeepSpeed, which {what}",
            f'write `"gradient_clipping": {wanted}` in the DeepSpeed file{instead}',
        )  # fmt: skip


def precision(context: Context) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1440."""
    file, wanted = context.file, context.mixed_precision
    other = {"bf16": "fp16", "fp16": "bf16"}.get(wanted or "")
    if file is None or other is None:
        return
    if str(section(file, other).get("enabled", False)).lower() == "true":
        yield _of_file(say(
            "error", "run", "deepspeed-precision", "deepspeed",
            f"the DeepSpeed file enables {other}, `mixed_precision` is {wanted}",
            f"set `mixed_precision: {other}`, or `\"enabled\": \"auto\"` in the file",
        ))  # fmt: skip


def half_precision(context: Context) -> Iterator[Finding]:
    """finetune.py:597, dpo_tune_cache.py:337: the model is loaded in bfloat16 whatever is asked for."""
    if context.mixed_precision == "fp16":
        yield Finding(
            severity="warning", layer="run", code="fp16-over-bf16", key="mixed_precision",
            message="upstream loads the model in bfloat16: `mixed_precision: fp16` then casts its "
            "weights to half precision, or fails in the gradient scaler",
            help="write `mixed_precision: bf16`",
        )  # fmt: skip


def two_zero_stages(context: Context) -> Iterator[Finding]:
    """dpo_tune_cache.py:136 builds a config of its own, and accelerate then reads no file."""
    own = context.values["zero_stage"]
    if own is None or context.deepspeed is None or context.gpus == 0:
        return
    theirs = section(context.deepspeed, "zero_optimization").get("stage", 0)
    differs = f", and its stage {theirs} is not {own}" if theirs != own else ""
    yield say(
        "warning", "run", "two-zero-stages", "zero_stage",
        f"`zero_stage: {own}` replaces `deepspeed:`: nothing of that file is read{differs}",
        "keep one: `deepspeed:` for a file, `zero_stage` for upstream's own settings",
    )  # fmt: skip


# --- adapters and quantised models
# -----------------------------------------------------------------


def quantised(context: Context) -> Iterator[Finding]:
    """finetune.py:560, dpo_tune_cache.py:300: a device_map, see transformers/integrations/accelerate.py:135.

    upstream calls DeepSpeed incompatible (finetune.py:209, dpo_utils.py:269).
    """
    if not context.values["use_qlora"] or caches_only(context):
        return
    if context.zero_stage == 3:
        yield say(
            "error", "run", "qlora-deepspeed", "use_qlora",
            "`use_qlora` with ZeRO-3 crashes: a quantised model is placed by a device_map",
            "write `deepspeed: none`, or leave out `use_qlora`",
        )  # fmt: skip
    elif context.distributed:
        yield say(
            "warning", "run", "qlora-deepspeed", "use_qlora",
            "`use_qlora` is not compatible with DeepSpeed, upstream says", "write `deepspeed: none`",
        )  # fmt: skip
    if context.gpus == 0:
        yield say(
            "error", "run", "qlora-on-cpu", "use_qlora",
            "`use_qlora` puts the model on GPU 0: there is none with `--gpus 0`",
        )  # fmt: skip


def frozen_biases(context: Context) -> Iterator[Finding]:
    """finetune.py:670, dpo_tune_cache.py:417 put biases into a group of their own; with LoRA none of
    it is trained, and ZeRO-1 and 2 cannot take an empty group (deepspeed/runtime/zero/stage_1_and_2.py:442).
    """
    values = context.values
    if not values["use_lora"] or context.zero_stage not in {1, 2} or caches_only(context):
        return
    config = model_config.built_from(context.values, context.environ)
    kind = str(config.get("model_type"))
    if kind in _BIASED or config.get("attention_bias") is True or config.get("mlp_bias") is True:
        yield say(
            "error", "run", "lora-biases", "use_lora",
            f"LoRA on a {kind} model crashes with ZeRO-{context.zero_stage}: the frozen biases "
            "are an "
            "optimizer group with nothing to train",
            "write `deepspeed: none`, or `deepspeed: zero3` without gradient checkpointing",
        )  # fmt: skip


def frozen_released(context: Context) -> Iterator[Finding]:
    """finetune.py:624 checkpoints as transformers does by itself, not reentrant
    (transformers/modeling_utils.py:3132): when a layer is computed again, ZeRO-3 has released its
    frozen weights, and torch compares their shapes with those of the forward pass (CheckpointError).
    """
    values = context.values
    lora = values["use_lora"] and not values["use_qlora"]
    if (
        lora
        and values["gradient_checkpointing"]
        and context.zero_stage == 3
        and context.distributed
    ):
        yield say(
            "error", "run", "lora-zero3-checkpointing", "gradient_checkpointing",
            "`gradient_checkpointing` with LoRA and ZeRO-3 crashes in the first backward pass: "
            "the frozen "
            "weights have been released when a layer is computed again",
            "leave out one of the three: `deepspeed: none` has LoRA's small optimizer state on "
            "each GPU",
        )  # fmt: skip


# --- one sequence over several GPUs
# ----------------------------------------------------------------

_SEQUENCE = "sequence_parallel_size"
# accelerate builds no device mesh for DeepSpeed's sequence parallelism from here on
_NO_MESH = (1, 13)


def _split(context: Context) -> int:
    """Over how many processes a sequence is split; 1 where it is not."""
    size = context.values["sequence_parallel_size"]
    return size if isinstance(size, int) and size > 1 and not caches_only(context) else 1


def sequence_stage(context: Context) -> Iterator[Finding]:
    """finetune.py:803 finds no `shift_labels` without DeepSpeed; finetune.py:322 asks for ZeRO-3."""
    if (size := _split(context)) == 1 or context.gpus == 0:
        return
    stage = context.zero_stage
    if stage is None:
        yield say(
            "error", "run", "sequence-zero-stage", _SEQUENCE,
            f"`sequence_parallel_size: {size}` crashes without DeepSpeed, which splits the batches",
            "write `deepspeed: zero3`",
        )  # fmt: skip
    elif stage != 3:
        yield say(
            "warning", "run", "sequence-zero-stage", _SEQUENCE,
            f"`sequence_parallel_size: {size}` requires ZeRO-3, upstream says; this is stage "
            f"{stage}",
            "write `deepspeed: zero3`",
        )  # fmt: skip


def sequence_world(context: Context) -> Iterator[Finding]:
    """finetune.py:385."""
    size, gpus = _split(context), context.gpus
    if gpus is not None and (world := max(1, gpus)) % size:
        yield say(
            "error", "run", "sequence-world", _SEQUENCE,
            f"`sequence_parallel_size: {size}` does not divide {world} process(es)",
            f"use a multiple of {size} GPUs, or another size",
        )  # fmt: skip


def sequence_mesh(context: Context) -> Iterator[Finding]:
    """finetune.py:836 asks accelerate for a mesh; accelerate/parallelism_config.py:221 makes none."""
    have = (context.packages or {}).get("accelerate")
    if _split(context) > 1 and have is not None and _release(have) >= _NO_MESH:
        yield say(
            "error", "run", "sequence-accelerate", _SEQUENCE,
            f"`sequence_parallel_size` crashes with accelerate {brief(have)}: since 1.13 it "
            "makes no "
            "device mesh for it",
            "pip install 'accelerate<1.13' (the pin's own lock file has 1.12.0)",
        )  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


_SHARED: tuple[StageRule, ...] = (
    zero_section, own_optimizer, unsaved_weights, no_batch, accumulation_of_the_file,
    batch_of_the_file, clipping, precision, half_precision, quantised, frozen_biases,
)  # fmt: skip

RULES: Mapping[str, tuple[StageRule, ...]] = {
    "sft": (*_SHARED, frozen_released, sequence_stage, sequence_world, sequence_mesh),
    "dpo": (*_SHARED, two_zero_stages),
}
