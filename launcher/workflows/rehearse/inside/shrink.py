"""A model of the same kind as the run's, of few thin layers with random weights."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from typing import Any

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "max_window_layers": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "n_embd": 64,
    "n_inner": 128,
    "n_head": 4,
    "d_model": 64,
    "d_ff": 128,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "rotary_dim": 16,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "n_mamba_heads": 4,
    "mamba_headdim": 32,
    "mamba_d_ssm": 128,
    "num_kv_shared_layers": 0,
}
"""The widest that a shrunk model is, by the names that configs have for it."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_PARAMETERS = 4e8
MOST_LAYERS = 12
KINDS = 6
"""Layers kept at most, where a model has layers of several kinds."""
# what a model's folder holds beside weights and other formats of them
_SKIPPED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_LARGEST_FILE = 100 << 20


class NoShrink(Exception):
    """No small model of this kind could be made; the text says why, for each way that was tried."""


def source_folder(name: str, revision: str | None) -> str | None:
    """The folder that holds a model's files, a local one or one in the hub's cache; None without either."""
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def make(folder: str | None, out: str, shape: dict[str, Any] | None) -> list[str]:
    """Write the shrunk model and the tokenizer of `folder` into `out`; what of them is not the run's own.

    Without a folder, or without a config.json in it, `shape` (a config as JSON) stands in.
    """
    import transformers

    notes = []
    os.makedirs(out)
    if folder is not None:
        copy_small_files(folder, out)
    if os.path.isfile(os.path.join(out, "config.json")):
        config = transformers.AutoConfig.from_pretrained(out)
    elif shape is not None:
        shape = dict(shape)
        config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    else:
        raise NoShrink("there is no config.json to shrink")
    if not any(name.startswith("tokenizer") for name in os.listdir(out)):
        from . import stand_ins

        config.vocab_size = stand_ins.write_tokenizer(out, config.model_type)
        notes.append("tokenizer")
    shrink(config).save_pretrained(out)
    return notes


def copy_small_files(folder: str, out: str) -> None:
    """What lies beside a model's weights: config, tokenizer, chat template, generation config."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        small = os.path.isfile(path) and os.path.getsize(path) <= _LARGEST_FILE
        if small and not name.endswith(_SKIPPED):
            shutil.copyfile(path, os.path.join(out, name))


def shrink(config: Any) -> Any:
    """A model of this config with thin layers; where a family refuses such sizes, with few full ones."""
    import torch
    from transformers import AutoModelForCausalLM

    faults = []
    for thin in (True, False):
        small = copy.deepcopy(config)
        part = small.get_text_config()
        cut_layers(part)
        if thin:
            narrow(part)
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModelForCausalLM.from_config(small).parameters())
            if count > MOST_PARAMETERS:
                raise NoShrink(f"two layers of full width have {count / 1e9:.1f} B parameters")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(small)
            ids = torch.arange(3, 12)[None] % part.vocab_size
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        except Exception as error:
            faults.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        model.zero_grad()
        return model
    raise NoShrink("; ".join(dict.fromkeys(faults)))


def cut_layers(part: Any) -> None:
    """Two layers, or one of each kind that the model has, in their order.

    Where a config computes the kinds from their places, as many layers as it takes to meet each of them.
    """
    kinds = list(of(part, "layer_types") or of(part, "layers_block_type") or ())
    first: dict[str, int] = {}
    for place, kind in enumerate(kinds):
        first.setdefault(kind, place)
    kept = sorted(first.values())[:KINDS]
    while kinds and len(kept) < 2:
        kept.append(len(kinds) - 1)
    for name in LAYERS:
        put(part, name, len(kept) or 2)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
        listed = of(part, name)
        if isinstance(listed, list) and len(listed) > max([1, *kept]):
            put(part, name, [listed[place] for place in kept or (0, 1)])
    now = of(part, "layer_types") or of(part, "layers_block_type") or ()
    if not {*first} <= {*now}:
        for name in LAYERS:
            put(part, name, min(kept[-1] + 1, MOST_LAYERS))


def narrow(part: Any) -> None:
    """Each size at most that of `SIZES`; as many key and value heads as there are heads, or half of them."""
    heads, shared = of(part, "num_attention_heads"), of(part, "num_key_value_heads")
    for name, size in SIZES.items():
        old = of(part, name)
        if isinstance(old, int) and not isinstance(old, bool):
            put(part, name, min(size, old))
    if isinstance(shared, int) and isinstance(heads, int):
        put(part, "num_key_value_heads", part.num_attention_heads if shared == heads else 2)
    expand, head = of(part, "expand"), of(part, "head_dim")
    if isinstance(expand, int) and isinstance(head, int):
        put(part, "num_heads", expand * part.hidden_size // head)


def of(part: Any, name: str) -> Any:
    """An attribute of a config; None without it, or where each layer has its own."""
    try:
        return getattr(part, name, None)
    except Exception:
        return None


def put(part: Any, name: str, value: Any) -> None:
    """Set an attribute that the config has and lets one set."""
    if of(part, name) is not None:
        # a config may compute it
        with contextlib.suppress(Exception):
            setattr(part, name, value)
