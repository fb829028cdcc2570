"""Whose file a mapping is, where it is another tool's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"axolotl": "Axolotl", "llama_factory": "LLaMA-Factory", "trl": "TRL"}
# each set alone is a sign, together with a model
_AXOLOTL = {"datasets", "sequence_len", "micro_batch_size", "adapter", "sample_packing"}
_LLAMA_FACTORY = {"finetuning_type", "cutoff_len", "template"}
# arguments that no script of open-instruct has
_TRL = set(
    "use_peft lora_r max_length max_steps eval_strategy save_strategy save_steps bf16 optim warmup_steps dtype "
    "torch_dtype dataset_text_field datasets accelerate_config".split()
)


def format_of(tree: Mapping[str, Any]) -> str | None:
    """Whose file this looks like, a key of `NAMES`; None where it is none of them."""
    names = set(tree)
    if names & {"args", "open_instruct"}:
        return None
    if "base_model" in names and names & _AXOLOTL:
        return "axolotl"
    if "model_name_or_path" not in names:
        return None
    if names & _LLAMA_FACTORY:
        return "llama_factory"
    mixer = names & {"dataset_mixer_list", "dataset_mixer", "mixer_list", "backend", "extends"}
    return "trl" if names & _TRL and names & {"dataset_name", "datasets"} and not mixer else None
