"""What TRL's arguments come to once its scripts have read them: precision, attention, engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.backends.context import Context, section
from launcher.backends.trl_mappings import Unreadable, from_file, from_file_or_base64, inline
from launcher.schema import Values


def precision(values: Values) -> str | None:
    """`bf16` or `fp16`, None for neither; bfloat16 by default (trl/trainer/base_config.py:108)."""
    if values["fp16"]:
        return "fp16"
    bf16 = values["bf16"]
    return "bf16" if bf16 or bf16 is None else None


def attention(values: Values) -> tuple[str | None, str]:
    """The attention implementation asked for, and the key that says so (trl/scripts/sft.py:83)."""
    kwargs = inline(values["model_init_kwargs"]) or {}
    if "attn_implementation" in kwargs:
        given, key = kwargs["attn_implementation"], "model_init_kwargs"
    else:
        given, key = values["attn_implementation"], "attn_implementation"
    return (given.removeprefix("paged|") if isinstance(given, str) else None), key


def own_deepspeed(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mapping behind TRL's own `deepspeed`; empty where it cannot be read, None without one."""
    text = values["deepspeed"]
    if not isinstance(text, str) or not text:
        return None
    try:
        given = inline(text)
        return (from_file_or_base64(text) if given is None else given) or None
    except Unreadable:
        return {}


def engine(context: Context) -> Mapping[str, Any] | None:
    """The DeepSpeed config in use: TRL's own wins over launch's; None on the CPU and without one."""
    if context.gpus == 0:
        return None
    own = own_deepspeed(context.values)
    return context.file if own is None else own


def zero_stage(context: Context) -> int | None:
    """The ZeRO stage in use."""
    config = engine(context)
    stage = None if config is None else section(config, "zero_optimization").get("stage", 0)
    return stage if isinstance(stage, int) else None


def fsdp(values: Values) -> Mapping[str, Any] | None:
    """`fsdp_config` without its keys' prefix where FSDP is asked for; empty where it is unreadable."""
    if not values["fsdp"]:
        return None
    text = values["fsdp_config"]
    try:
        given = {} if text is None else inline(text)
        config = from_file(str(text)) if given is None else given
    except Unreadable:
        return {}
    return {key.removeprefix("fsdp_"): value for key, value in config.items()}


def alone(context: Context) -> bool:
    """Whether a single process would run, started without DeepSpeed's or torch's launcher."""
    return context.gpus == 0 or (context.gpus == 1 and context.file is None)
