"""Rules about the number format of trained weights: what fp16's scaler refuses, and steps that
bfloat16 rounds away.

The scaler was tried on an H200 with torch 2.11, the trainers on the CPU with TRL 1.16,
transformers 5.17, peft 0.21.2: three steps of the demo's SFT in bfloat16 changed 1.1 % of all
weights at a rate of 5e-7 and 30 % at 2e-5, and in float32 all of them.
"""

import math
from collections.abc import Iterator

from launcher.artifacts import model_config, model_files
from launcher.errors import Finding
from launcher.lazy_dataclass import dataclass
from launcher.rules.context import Context, RuleTable, StageRule, caches_only
from launcher.rules.rule import cites, number, say, say_of_option
from launcher.rules.trl import resolved

# the standard deviation of the weights of most language models, as their `initializer_range` has it
_USUAL_SPREAD = 0.02
# bfloat16 keeps 8 bits: a change of less than 2^-9 of a weight rounds to none
_ROUNDED_BITS = 9
# Warn if a step can change less than this share of the weights. At 5e-6 it is a tenth: 12 steps of
# SFT of Qwen2.5-0.5B lowered the loss by 0.04, and by 0.28 with copies of the weights in float32
# (docs/evidence/h200x4.md).
_LEAST_CHANGED = 0.5
# Optimizers whose step is about the learning rate, whatever the gradient, and which add it to the
# weight as it is stored. Others keep what was rounded (Kahan summation), or step by the gradient's
# size.
_STEPS_OF_THE_RATE = tuple(
    "adamw_torch adamw_8bit adamw_bnb paged_adamw lion paged_lion adafactor".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The weights that are trained in a format of 16 bits.

    `what` names them, `key` is the argument that says so, and `choice` what the file, or a default,
    asks for.
    """

    what: str
    format: str
    key: str
    choice: str
    remedy: str


def _find_trained_by_trl(context: Context) -> Trained | None:
    """Adapters are made in float32 but for those of quantised models.

    `modules_to_save` stay in the model's own format.
    """
    values = context.values
    if values["load_in_4bit"] or values["load_in_8bit"]:
        if not values["use_peft"]:
            return None
        key = "load_in_4bit" if values["load_in_4bit"] else "load_in_8bit"
        return Trained(
            what="the adapter",
            format="bfloat16",
            key=key,
            choice=f"`{key}: true`",
            remedy="write `bf16: true` in place of `fp16: true`",
        )
    format, key = resolved.weights_type(values)
    choice = f"`dtype: {format}`"
    if format == "auto":
        format = _find_stored_type(context)
        choice = f"`dtype: auto`, and the model's own format {format}"
    if format not in ("float16", "bfloat16"):
        return None
    what = "the model"
    if values["use_peft"]:
        saved = values["lora_modules_to_save"]
        if not saved:
            return None
        what = f"{', '.join(map(str, saved))} of `lora_modules_to_save`"
    remedy = "write `dtype: float32`, TRL's default"
    return Trained(what=what, format=format, key=key, choice=choice, remedy=remedy)


def _find_stored_type(context: Context) -> str:
    """The format that a model is loaded in by default; empty if unknown.

    transformers/modeling_utils.py::_get_dtype[if hasattr(config].
    """
    values = context.values
    name = values["model_name_or_path"]
    revision = values.get("model_revision")
    path = model_config.find_config_file(name, context.environ, revision)
    if path is None:
        return ""
    written = model_config.find_weights_type(
        model_config.read_model_config(name, context.environ, revision)
    )
    return written or model_files.read_number_format(path.parent)


def _keeps_masters(context: Context) -> bool:
    """Whether an engine trains copies of the weights in float32: DeepSpeed, and FSDP under mixed
    precision.

    The latter does so in
    accelerate/accelerator.py::Accelerator.prepare_model[param.data = param.data.to].
    """
    if context.distributed:
        return True
    return bool(context.values["fsdp"]) and resolved.precision(context.values) is not None


@cites(
    "torch/amp/grad_scaler.py::GradScaler._unscale_grads_[raise ValueError]",
    "torch/amp/grad_scaler.py::GradScaler._unscale_grads_[torch._amp_foreach_non_finite_check_and_unscale_]",
    "trl/trainer/sft_trainer.py::SFTTrainer.__init__[if _is_quantized_model]",
    "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if _is_quantized_model]",
    "peft/tuners/tuners_utils.py::cast_adapter_dtype[dtypes_to_convert_to_fp32 =]",
)
def refused_by_scaler(context: Context) -> Iterator[Finding]:
    """Gradients have the format of their weights, and it takes float32 alone.

    The adapters of quantised models are in bfloat16; `tuners_utils.py`: others are in float32.
    """
    values = context.values
    if not values["fp16"] or values["bf16"] or _keeps_masters(context) or context.gpus == 0:
        return
    trained = _find_trained_by_trl(context)
    if trained is None:
        return
    refusal = "ValueError: Attempting to unscale FP16 gradients"
    if trained.format == "bfloat16":
        refusal = "its kernel is not implemented for BFloat16"
    message = (
        f"`fp16: true` trains {trained.what} in {trained.format} ({trained.choice}): "
        f"the gradient scaler refuses the first step ({refusal})"
    )
    help = f"{trained.remedy}, or train with `bf16: true` in place of `fp16: true`"
    if "bf16" in trained.remedy:
        help = trained.remedy
    yield say("error", "fp16-weights", "fp16", message, help)


@cites(
    "transformers/trainer.py::Trainer._run_epoch[self.optimizer.step]",
    "peft/tuners/tuners_utils.py::cast_adapter_dtype[dtypes_to_convert_to_fp32 =]",
)
def rounded_by_trl(context: Context) -> Iterator[Finding]:
    """The optimizer adds its step to the weights in the format that they have.

    Adapters are in float32.
    """
    values = context.values
    if values["fp16"] or _keeps_masters(context):
        return
    trained = _find_trained_by_trl(context)
    if trained is None or trained.format != "bfloat16":
        return
    # the half of these adapters that is 0 at first moves by steps of any size
    if values["load_in_4bit"] or values["load_in_8bit"]:
        return
    # its default depends on torch's release, and is an AdamW in all of them
    optimizer = values["optim"] or "adamw_torch"
    if not str(optimizer).startswith(_STEPS_OF_THE_RATE):
        return
    weights = f"{trained.what} in bfloat16 ({trained.choice})"
    message = _describe_rounding(number(values["learning_rate"]), weights)
    if message is not None:
        help = f"{trained.remedy}, and `bf16: true` computes in bfloat16 all the same"
        yield say("warning", "steps-rounded", trained.key, message, help)


@cites(
    "finetune.py::main[dtype=torch.bfloat16 #2]",
    "finetune.py::main[optimizer = torch.optim.AdamW]",
    "dpo_tune_cache.py::main.load_model[dtype=torch.bfloat16 #2]",
    "dpo_tune_cache.py::main[optimizer = torch.optim.AdamW]",
    "peft/tuners/tuners_utils.py::cast_adapter_dtype[dtypes_to_convert_to_fp32 =]",
    reviewed=("e6c3044aa620",),
)
def rounded_by_open_instruct(context: Context) -> Iterator[Finding]:
    """A model in bfloat16, and torch's AdamW.

    Peft makes adapters in float32, and DeepSpeed keeps copies of the weights.
    """
    values = context.values
    # on the CPU, where no file of DeepSpeed is read, a stage is only tried out
    if context.gpus == 0 or context.distributed or values["use_lora"]:
        return
    if context.mixed_precision == "fp16" or caches_only(context):
        return
    # Liger's loader names no format (finetune.py::main[AutoLigerKernelForCausalLM.from_pretrained])
    if values["use_liger_kernel"] and _find_stored_type(context) != "bfloat16":
        return
    message = _describe_rounding(number(values["learning_rate"]), "all weights in bfloat16")
    if message is not None:
        help = "set a `deepspeed:`, such as zero2, which keeps the weights in float32 beside"
        yield say("warning", "steps-rounded", "learning_rate", message, help)


def _describe_rounding(rate: float | None, trained: str) -> str | None:
    """What a learning rate does to bfloat16 weights; None where it is large enough."""
    if rate is None or not 0 < rate < math.inf:
        return None
    largest = rate * 2**_ROUNDED_BITS
    share = math.erf(largest / (_USUAL_SPREAD * math.sqrt(2)))
    if share >= _LEAST_CHANGED:
        return None
    return (
        f"`learning_rate: {rate:g}` trains {trained} without copies in float32: "
        f"a step of about {rate:g} rounds away on every weight above {largest:.2g}, "
        f"so that about {share:.1%} of weights of the usual size ({_USUAL_SPREAD}) can change"
    )


@cites(
    "finetune.py::main[dtype=torch.bfloat16 #2]",
    "dpo_tune_cache.py::main.load_model[dtype=torch.bfloat16 #2]",
    "torch/amp/grad_scaler.py::GradScaler._unscale_grads_[torch._amp_foreach_non_finite_check_and_unscale_]",
    reviewed=("e6c3044aa620",),
)
def fp16_over_bf16(context: Context) -> Iterator[Finding]:
    """The model is loaded in bfloat16 whatever is asked for.

    `grad_scaler.py` has no kernel for it; DeepSpeed casts the model instead.
    """
    if context.mixed_precision != "fp16":
        return
    values = context.values
    key = "mixed_precision"
    help = "write `mixed_precision: bf16`"
    # adapters are in float32, and those of Liger have the model's own format
    unscaled = not values["use_lora"] and not values["use_liger_kernel"]
    if unscaled and not context.distributed and context.gpus != 0 and not caches_only(context):
        message = (
            "upstream loads bfloat16: with `mixed_precision: fp16` the gradient scaler refuses "
            "the first step (its kernel is not implemented for BFloat16)"
        )
        yield say_of_option("error", "fp16-over-bf16", key, message, help)
        return
    effect = "casts it to fp16, or fails in the gradient scaler"
    message = f"upstream loads bfloat16: `mixed_precision: fp16` {effect}"
    yield say_of_option("warning", "fp16-over-bf16", key, message, help)


_OPEN_INSTRUCT: tuple[StageRule, ...] = (fp16_over_bf16, rounded_by_open_instruct)
_TRL: tuple[StageRule, ...] = (refused_by_scaler, rounded_by_trl)

RULES: RuleTable = {
    "open_instruct": dict.fromkeys(("sft", "dpo"), _OPEN_INSTRUCT),
    "trl": dict.fromkeys(("sft", "dpo"), _TRL),
}
