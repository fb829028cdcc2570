"""Attention and packing under TRL: which implementation a run can have, what packing costs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.errors import Finding, shorten
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import cites, say
from launcher.rules.trl import resolved
from launcher.rules.trl.resolved import inline

# transformers/modeling_utils.py::AttentionInterface[_global_mapping], beside eager
NAMES = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
_OLDEST = (
    2,
    3,
    3,
)  # transformers/utils/import_utils.py::is_flash_attn_2_available[return version.parse]
# transformers/integrations/hub_kernels.py::is_kernel[and re.search(r]
_KERNEL = re.compile(r"[^/:]+/[^/:]+(?:@[^/:]+)?(?::[^/:]+)?\Z")
_MASKED = (None, "sdpa", "eager")


class Choice(NamedTuple):
    """The first implementation that can be had, or None; why those before it cannot."""

    name: str | None
    why: str = ""


def choose(preferred: Sequence[str], context: Context) -> Choice:
    """The first of these that can be had here; what is not known speaks for it."""
    reasons: list[str] = []
    for name in preferred:
        reason = lacking(name, context) or _explain_unfit(name, context)
        if reason is None:
            return Choice(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return Choice(None, "; ".join(reasons))


def lacking(name: str, context: Context) -> str | None:
    """Why an implementation cannot be had; None where it can be, or where that is not known.

    A flash attention is its own package here. transformers would also fetch a kernel from the hub
    (transformers/modeling_utils.py::PreTrainedModel._check_and_adjust_attn_implementation[is_kernels_available]),
    under another name: one that is meant is named itself.
    """
    if name in ("eager", "sdpa"):
        return None
    if context.gpus == 0:
        return "there is no GPU"
    if name == "flex_attention":
        return None
    package = PACKAGES.get(name, "kernels")
    if context.lacks(package):
        return f"the trainer's Python has no {package}"
    version = (context.packages or {}).get(package) or ""
    if name == "flash_attention_2" and version and _parse_release(version) < _OLDEST:
        return f"flash-attn {version} is older than {'.'.join(map(str, _OLDEST))}"
    return None


def _explain_unfit(name: str, context: Context) -> str | None:
    """transformers/integrations/flash_attention.py::get_target_dtype[return next(layer]: float32
    goes to kernels that refuse it at the first step.
    """
    values = context.values
    kwargs = inline(values["model_init_kwargs"]) or {}
    if name not in PACKAGES or kwargs.get("dtype", values["dtype"]) != "float32":
        return None
    if resolved.precision(values) is not None or context.mixed_precision not in (None, "no"):
        return None
    if values["load_in_4bit"] or values["load_in_8bit"]:
        return None
    return "it takes 16 bits only, and the model is float32 with neither `bf16` nor `fp16`"


def _parse_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@cites("transformers/modeling_utils.py::PreTrainedModel.get_correct_attn_implementation[Specified]")
def unknown(context: Context) -> Iterator[Finding]:
    name, key = resolved.attention(context.values)
    tested = context.values.schema.tested
    if tested and name is not None and name not in NAMES and not _KERNEL.match(name):
        message = f"`{shorten(name)}` is not an attention implementation"
        help = f"one of {', '.join(NAMES)}, or the name of a kernel's repository"
        yield say("error", "unknown-attention", key, message, help)


@cites(
    "transformers/modeling_utils.py::PreTrainedModel._flash_attn_can_dispatch[self._flash_attn_import_error]",
    "transformers/modeling_utils.py::PreTrainedModel._check_and_adjust_attn_implementation[is_kernels_available]",
)
def missing(context: Context) -> Iterator[Finding]:
    """Without its package, only `kernels` can bring it."""
    name, key = resolved.attention(context.values)
    if name not in NAMES and "/" not in str(name):
        return
    why = lacking(str(name), context)
    if why is not None and (name == "flex_attention" or context.lacks("kernels")):
        severity = context.at_start
        if context.gpus == 0:
            severity = "error"
        message = f"`attn_implementation: {name}` cannot be had: {why}"
        yield say(severity, "attention-missing", key, message, "leave it out: sdpa is the default")


@cites("transformers/integrations/flash_attention.py::get_target_dtype[return next(layer]")
def flash_in_full_precision(context: Context) -> Iterator[Finding]:
    name, key = resolved.attention(context.values)
    why = _explain_unfit(str(name), context)
    # on the CPU there is none at all
    if why is not None and context.gpus != 0:
        help = "write `bf16: true`"
        yield say("error", "flash-in-float32", key, f"`attn_implementation: {name}`: {why}", help)


@cites("trl/trainer/sft_config.py::SFTConfig[is only supported]")
def packing(context: Context) -> Iterator[Finding]:
    """`sft_config.py` calls a flattened batch supported by flash attention only. Whether examples
    see each other is measured in the run, for any model.
    """
    values = context.values
    key = "padding_free"
    if values["packing"]:
        key = "packing"
    if not values[key] or resolved.prepared(values):
        return
    if key == "padding_free" and context.per_device == 1:
        # TRL says so too
        # (trl/trainer/sft_trainer.py::SFTTrainer.__init__[if args.per_device_train_batch_size])
        message = (
            "`padding_free` does nothing here: it joins the rows of a device, which is one row"
        )
        help = "`batch: {per_device: 2}` or more, or `padding_free: false`"
        yield say("warning", "packing-of-one", key, message, help)
        return
    # trl/trainer/sft_trainer.py::SFTTrainer.__init__[self.padding_free = args.padding_free]: all
    # rows of a device become one
    flattened = values["padding_free"] or values["packing_strategy"] in ("bfd", "bfd_split")
    name, _ = resolved.attention(values)
    if values["packing"] and values["packing_strategy"] == "wrapped" and values.schema.tested:
        message = (
            f"`{key}`: examples in a row attend to each other: `packing_strategy: wrapped` keeps "
            "no boundary"
        )
        help = "leave `packing_strategy` out: bfd keeps them whole and apart"
        yield say("warning", "packing-leaks", key, message, help)
    elif flattened and context.gpus != 0 and name in _MASKED:
        message = (
            f"`{key}` without flash attention: the rows of a device become one with a full mask"
        )
        help = "write `attn_implementation: flash_attention_2`, or fewer rows a device"
        yield say("warning", "packing-without-flash", key, message, help)


_SHARED: tuple[StageRule, ...] = (unknown, missing, flash_in_full_precision)

RULES: Mapping[str, tuple[StageRule, ...]] = {"sft": (*_SHARED, packing), "dpo": _SHARED}
