"""A model of the same kind as the run's, of few thin layers with random weights."""

import contextlib
import copy
import os
import shutil
from typing import Any

# with the marks by which TRL finds the answers: whether the run's own template has them is not known
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|begin_of_text|>", "<|eot_id|>")
SIZES = {
    0: "num_kv_shared_layers",
    1: "n_group topk_group",
    2: "max_window_layers linear_num_key_heads num_experts_per_tok moe_k moe_topk top_k_experts",
    4: "num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads n_head num_heads n_mamba_heads",
    8: "mamba_n_heads",
    16: "head_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim rotary_dim mamba_d_head mamba_d_state",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank mamba_headdim",
    64: "hidden_size n_embd d_model word_embed_proj_dim embedding_size",
    128: "intermediate_size n_inner d_ff ffn_dim mamba_d_ssm",
}
"""The widest that a shrunk model is, and the names that configs have for each size."""
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
        config.vocab_size = write_tokenizer(out, config.model_type)
        notes.append("tokenizer")
    shrink(config).save_pretrained(out)
    return notes


def write_tokenizer(out: str, model_type: str) -> int:
    """Write a tokenizer of single bytes with a ChatML template into a folder; how many tokens it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    first = {"bos_token": "<|begin_of_text|>"} if model_type == "llama" else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", **first)
    fast.chat_template = CHATML
    fast.save_pretrained(out)
    return len(vocabulary)


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
    for size, names in SIZES.items():
        for name in names.split():
            old = of(part, name)
            if isinstance(old, int) and not isinstance(old, bool):
                put(part, name, min(size, old))
    if isinstance(shared, int) and isinstance(heads, int):
        put(part, "num_key_value_heads", part.num_attention_heads if shared == heads else 2)
    expand, head = of(part, "expand"), of(part, "head_dim")
    if isinstance(expand, int) and isinstance(head, int):
        put(part, "num_heads", expand * part.hidden_size // head)


def of(part: Any, name: str) -> Any:
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
