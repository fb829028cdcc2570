"""Rules about DeepSpeed under open-instruct: its file, its stages, what it cannot train.

Line numbers are those of the pin and of the packages named in tests/test_upstream_facts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.backends import model_config, trl_resolved
from launcher.backends.context import Context, StageRule, caches_only, section
from launcher.backends.rule import say
from launcher.errors import Finding, Severity

# attention with biases whatever else their config says; `attention_bias` tells for the others
_BIASED = frozenset({"qwen2", "qwen2_moe"})


# --- the engine in use ----------------------------------------------------------------------------


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


# --- the DeepSpeed file ---------------------------------------------------------------------------


def zero_section(context: Context) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1277."""
    if context.file is not None and "zero_optimization" not in context.file:
        yield _of_file(
            "deepspeed-no-zero",
            "the DeepSpeed file has no `zero_optimization`: accelerate refuses it",
            'add `"zero_optimization": {"stage": 2}`',
        )


def refused_file(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:2253, accelerate/accelerator.py:2268: the scripts bring their own optimizer.

    accelerate/utils/dataclasses.py:1369: an `auto` batch is filled from the micro-batch alone.
    accelerate/utils/dataclasses.py:1440: the precision.
    model_utils.py:555: saving. All of it comes to light once the data are tokenised.
    """
    file = context.file
    if file is None:
        return
    for key in ("optimizer", "scheduler"):
        if key in file:
            yield _of_file(
                "deepspeed-optimizer",
                f"the DeepSpeed file sets `{key}`, and so does upstream: accelerate refuses both",
                f"delete `{key}` from the file; the arguments decide",
            )
    gathers = "stage3_gather_16bit_weights_on_model_save"
    zero = section(file, "zero_optimization")
    if context.zero_stage == 3 and zero.get(gathers) is not True and not caches_only(context):
        yield _of_file(
            "zero3-unsaved",
            f"ZeRO-3 without `{gathers}: true` crashes when the trained model is saved",
            "add it to `zero_optimization` in the DeepSpeed file",
        )
    if file.get("train_micro_batch_size_per_gpu") is None and file.get("train_batch_size") in (
        None,
        "auto",
    ):
        yield _of_file(
            "deepspeed-no-batch",
            "the DeepSpeed file has no `train_micro_batch_size_per_gpu`",
            'add `"train_micro_batch_size_per_gpu": "auto"` and `"train_batch_size": "auto"`',
        )
    other = {"bf16": "fp16", "fp16": "bf16"}.get(context.mixed_precision or "", "")
    if str(section(file, other).get("enabled", False)).lower() == "true":
        yield _of_file(
            "deepspeed-precision",
            f"the DeepSpeed file enables {other}, `mixed_precision` is {context.mixed_precision}",
            f'set `mixed_precision: {other}`, or `"enabled": "auto"` in the file',
        )


def batch_of_the_file(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:2219: the file's accumulation wins, a missing one is 1, and upstream goes on
    counting with its own argument (finetune.py:692). accelerate/accelerator.py:2230 fills in what is
    `auto`; DeepSpeed asserts that the batch multiplies.
    """
    file, ours = context.file, context.accumulation
    if file is None or ours is None:
        return
    passes = file.get("gradient_accumulation_steps", 1)
    if isinstance(passes, int) and passes != ours:
        verb = "sets" if "gradient_accumulation_steps" in file else "is silent, which means"
        yield _of_file(
            "deepspeed-accumulation",
            f"the DeepSpeed file {verb} `gradient_accumulation_steps: {passes}`: {ours} would not be used, "
            "and the steps be counted wrongly",
            'write `"gradient_accumulation_steps": "auto"` in the file',
            severity="warning",
        )
    total = file.get("train_batch_size")
    rows = _number(file.get("train_micro_batch_size_per_gpu"), context.per_device)
    times = _number(passes, ours)
    devices = (context.gpus or 0) // max(1, context.values.get("sequence_parallel_size") or 1)
    if isinstance(total, int) and rows and times and devices and total != rows * times * devices:
        yield _of_file(
            "deepspeed-batch",
            f"the DeepSpeed file sets `train_batch_size: {total}`, but {rows} rows x {times} passes x "
            f"{devices} devices is {rows * times * devices}",
            'write `"train_batch_size": "auto"` in the file',
        )


def _number(given: Any, ours: int | None) -> int | None:
    if given in ("auto", None):
        return ours
    return given if isinstance(given, int) else None


def _of_file(code: str, message: str, help: str, *, severity: Severity = "error") -> Finding:
    """A finding about launch's own option instead of one of upstream's arguments."""
    return Finding(
        severity=severity, layer="run", code=code, key="deepspeed", message=message, help=help
    )


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


# --- adapters and quantised models ----------------------------------------------------------------


def quantised(context: Context) -> Iterator[Finding]:
    """finetune.py:560, dpo_tune_cache.py:300: a device_map, see transformers/integrations/accelerate.py:135.

    upstream calls DeepSpeed incompatible (finetune.py:209, dpo_utils.py:269).
    """
    if not context.values["use_qlora"] or not context.distributed or caches_only(context):
        return
    crashes = context.zero_stage == 3
    yield say(
        "error" if crashes else "warning", "run", "qlora-deepspeed", "use_qlora",
        "`use_qlora` with ZeRO-3 crashes: a quantised model is placed by a device_map" if crashes
        else "`use_qlora` is not compatible with DeepSpeed, upstream says",
        "write `deepspeed: none`, or leave out `use_qlora`",
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
            f"LoRA on a {kind} model crashes with ZeRO-{context.zero_stage}: the frozen biases are an "
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
            "`gradient_checkpointing` with LoRA and ZeRO-3 crashes in the first backward pass: the frozen "
            "weights have been released when a layer is computed again",
            "leave out one of the three: `deepspeed: none` has LoRA's small optimizer state on each GPU",
        )  # fmt: skip


_SHARED: tuple[StageRule, ...] = (
    zero_section, refused_file, batch_of_the_file, clipping, half_precision, quantised, frozen_biases,
)  # fmt: skip

RULES: Mapping[str, tuple[StageRule, ...]] = {
    "sft": (*_SHARED, frozen_released),
    "dpo": (*_SHARED, two_zero_stages),
}
