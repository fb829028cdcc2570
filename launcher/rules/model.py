"""Rules about what a model can do, by its config where that lies here; the Liger ones serve TRL too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.artifacts import model_config
from launcher.errors import Finding, Severity
from launcher.rules.context import Context, StageRule, caches_only, section
from launcher.rules.rule import say

# liger_kernel/transformers/monkey_patch.py:2879, release 0.7.0, the one that the pin locks
LIGER_RELEASE = [0, 7]
LIGER_MODELS = frozenset(
    """
    gemma gemma2 gemma3_text gemma3 glm4 glm4v glm4v_moe gpt_oss internvl llama llama4_text llama4 llava
    granite mllama mllama_text_model mistral mixtral olmo2 pixtral olmo3 qwen2 qwen3 qwen3_moe qwen2_vl
    qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_next qwen3_vl qwen3_vl_text qwen3_vl_moe
    qwen3_vl_moe_text smollm3 phi3 paligemma falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4
    """.split()
)
_NO_LIGER = "write `use_liger_kernel: false`"


def liger_unknown(context: Context) -> Iterator[Finding]:
    """open-instruct looks the model up and fails (liger_kernel/transformers/auto_model.py:36); TRL
    patches nothing without a word (liger_kernel/transformers/monkey_patch.py:2974).
    """
    values = context.values
    if not values["use_liger_kernel"] or values.get("use_qlora") or caches_only(context):
        return
    config = model_config.read(values["model_name_or_path"], context.environ, values.get("model_revision"))
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in LIGER_MODELS:
        return
    have = (context.packages or {}).get("liger-kernel")
    # of a later release nothing is known
    known = have is not None and [int(part) for part in re.findall(r"\d+", have)[:2]] <= LIGER_RELEASE
    crashes = context.entry.strict_liger
    what = "upstream fails with a KeyError" if crashes else "nothing would be patched"
    message = f"Liger {have if known else '0.7.0'} has no kernels for {kind} models: {what}"
    severity: Severity = "error" if crashes and known else "warning"
    yield say(severity, "liger-unknown-model", "use_liger_kernel", message, _NO_LIGER)


def liger_on_cpu(context: Context) -> Iterator[Finding]:
    """liger_kernel/ops/rms_norm.py:442: its kernels are Triton's, which need a GPU."""
    if not context.values["use_liger_kernel"] or context.gpus != 0 or caches_only(context):
        return
    if not context.environ.get("TRITON_INTERPRET"):
        message = "Liger's kernels need a GPU, and `--gpus 0` has none"
        yield say("error", "liger-on-cpu", "use_liger_kernel", message, _NO_LIGER)


def beyond_positions(context: Context) -> Iterator[Finding]:
    """dataset_transformation.py:1195, trl/trainer/sft_config.py:202 cut at what is asked for; no one
    asks the model how far it reaches.
    """
    key = "max_seq_length" if "max_seq_length" in context.values else "max_length"
    length, reach = context.values.get(key), positions(model_config.built_from(context.values, context.environ))
    if context.values.given(key) and isinstance(length, int) and reach and length > reach:
        message = f"`{key}: {length}` goes beyond the {reach} positions that the model was made for"
        help = f"write `{key}: {reach}`, or a model with a longer context"
        yield say("warning", "beyond-positions", key, message, help)


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions a model was made for, the scaling of its rotary embedding included."""
    text = model_config.text_part(config)
    plain = text.get("max_position_embeddings", text.get("n_positions"))
    if not isinstance(plain, int) or plain < 1:
        return None
    scaling = section(text, "rope_parameters") or section(text, "rope_scaling")
    factor = scaling.get("factor", 1)
    # some families write the stretched length into `max_position_embeddings`, some the original
    original = scaling.get("original_max_position_embeddings", plain)
    stretched = isinstance(factor, int | float) and math.isfinite(factor) and factor > 1
    if stretched and isinstance(original, int):
        return max(plain, int(original * factor))
    return plain


def packed_without_flash(context: Context) -> Iterator[Finding]:
    """Measured: 4,209 against 6,804 tokens/s (0.5 B model, H200). finetune.py:598 detects the attention,
    as DPO does where none is given (olmo_core_utils.py:57).
    """
    values = context.values
    if not values["packing"] or context.gpus == 0 or caches_only(context):
        return
    given = values.get("attn_implementation")
    slow = f"`attn_implementation: {given}` has" if given in {"torch", "te"} else None
    if given is None and context.lacks("flash-attn", "flash-attn-3"):
        slow = "the trainer's Python has no flash-attn, so there are"
    if slow is None:
        return
    worse = "packing was measured slower than padding without"
    if values.schema.pairs:
        # measured with the pinned script: it leaves the cache on, and transformers drops the mask
        worse += ", and DPO's packed samples see each other"
    message = f"{slow} no flash-attention kernels: {worse}"
    help = "pip install flash-attn, or `packing: false`"
    yield say("warning", "packing-without-flash", "packing", message, help)


def packed_alone(context: Context) -> Iterator[Finding]:
    """finetune.py:642 packs the rows of one micro-batch (padding_free_collator.py:102), and no others."""
    if context.values["packing"] and context.per_device == 1 and not caches_only(context):
        message = "`packing` does nothing here: it joins the rows of a micro-batch, which is one row"
        help = "`batch: {per_device: 2}` or more, or `packing: false`"
        yield say("warning", "packing-of-one", "packing", message, help)


_LIGER: tuple[StageRule, ...] = (liger_unknown, liger_on_cpu, beyond_positions)

RULES: Mapping[str, Mapping[str, tuple[StageRule, ...]]] = {
    "open_instruct": {"sft": (*_LIGER, packed_without_flash, packed_alone), "dpo": (*_LIGER, packed_without_flash)},
    "trl": dict.fromkeys(("sft", "dpo"), _LIGER),
}
