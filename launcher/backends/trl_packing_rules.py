"""Rules about rows that TRL's SFT puts together: who can attend to whom, and what that costs.

Which models keep packed documents apart was measured with transformers 5.17: logits of a document
behind two different others, on tiny models with sdpa or eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.backends import model_config, trl_resolved
from launcher.backends.context import Context, StageRule
from launcher.backends.rule import say
from launcher.backends.trl_mappings import inline
from launcher.errors import Finding

# their masks are made without positions, such as transformers/models/gpt_oss/modeling_gpt_oss.py:475
OWN_MASKS = frozenset({
    "afmoe", "biogpt", "bloom", "falcon", "gpt_oss", "granitemoehybrid", "mpt", "opt", "xglm",
})  # fmt: skip
# states that run on from one document into the next, and nothing tells them where it begins
STATES = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "minimax",
    "nemotron_h", "recurrent_gemma", "rwkv", "zamba2",
})  # fmt: skip
# these are told, by kernels of such a package; without it the plain code runs on
_FLA, _CONV = ("flash-linear-attention", "fla-core", "kernels"), ("causal-conv1d", "kernels")
KERNELS = {
    "lfm2": _CONV,
    "olmo_hybrid": _FLA,
    "qwen3_5": _FLA,
    "qwen3_5_text": _FLA,
    "qwen3_5_moe": _FLA,
    "qwen3_5_moe_text": _FLA,
    "qwen3_next": _FLA,
}
_MASKED = (None, "sdpa", "eager")


def packing(context: Context) -> Iterator[Finding]:
    """transformers/masking_utils.py:860 tells documents apart by their positions, for most models.

    TRL says nothing when that fails; it calls a flattened batch supported by flash attention only
    (trl/trainer/sft_config.py:243).
    """
    values = context.values
    key = "packing" if values["packing"] else "padding_free"
    if not values[key] or (inline(values["dataset_kwargs"]) or {}).get("skip_prepare_dataset"):
        return
    if key == "padding_free" and context.per_device == 1:
        # TRL says so too (trl/trainer/sft_trainer.py:926)
        yield say(
            "warning", "run", "packing-of-one", key,
            "`padding_free` does nothing here: it joins the rows of a device, which is one row",
            "`batch: {per_device: 2}` or more, or `padding_free: false`",
        )  # fmt: skip
        return
    why = _leak(context) if values.schema.tested else None
    if why is not None:
        yield say(
            "warning", "run", "packing-leaks", key,
            f"`{key}`: examples in a row attend to each other: {why[0]}", why[1],
        )  # fmt: skip
    elif _flattened(context) and context.gpus != 0:
        yield from _slow(context, key)


def _flattened(context: Context) -> bool:
    """Whether all rows of a device become one (trl/trainer/sft_trainer.py:916)."""
    values = context.values
    return bool(values["padding_free"] or values["packing_strategy"] in ("bfd", "bfd_split"))


def _leak(context: Context) -> tuple[str, str] | None:
    """Why examples are not kept apart, and what to do; None where they are, or it is not known."""
    values = context.values
    if values["packing"] and values["packing_strategy"] == "wrapped":
        told = "`packing_strategy: wrapped` cuts and joins them without a boundary"
        return told, "leave `packing_strategy` out: bfd keeps them whole and apart"
    config = model_config.built_from(values, context.environ)
    named = (config.get("model_type"), model_config.text_part(config).get("model_type"))
    kinds = {kind for kind in named if isinstance(kind, str)}
    name, _ = trl_resolved.attention(values)
    if found := kinds & STATES:
        return f"the state of a {min(found)} model runs on", "write `packing: false`"
    if (found := kinds & OWN_MASKS) and name in _MASKED:
        what = f"the masks of a {min(found)} model do not see where one begins"
        return what, "write `attn_implementation: flash_attention_2`, or `packing: false`"
    for kind in sorted(kinds & KERNELS.keys()):
        if context.lacks(*KERNELS[kind]):
            package = KERNELS[kind][0]
            what = f"without {package} the state of a {kind} model runs on"
            return what, f"pip install {package}, or `packing: false`"
    return None


def _slow(context: Context, key: str) -> Iterator[Finding]:
    name, _ = trl_resolved.attention(context.values)
    if name not in _MASKED:
        return
    rows, length = context.per_device, context.values["max_length"]
    size = ""
    if rows is not None and isinstance(length, int) and not isinstance(length, bool):
        tokens = rows * length
        mib = tokens * tokens / 2**20
        size = f" of up to {tokens} tokens"
        size += f" with a mask of {mib:,.0f} MiB" if mib >= 1 else ""
    yield say(
        "warning", "run", "packing-without-flash", key,
        f"`{key}` without flash attention: the rows of a device become one{size}",
        "write `attn_implementation: flash_attention_2`, or fewer rows a device",
    )  # fmt: skip


RULES: tuple[StageRule, ...] = (packing,)
