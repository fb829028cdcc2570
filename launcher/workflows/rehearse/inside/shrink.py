"""A model of the same kind as the run's, of few thin layers with random weights."""

import contextlib
import copy
import os
import shutil
from typing import Any

from .records import ServerRequest, ServerResponse

# with the marks by which TRL finds the answers: the run's own template may have them
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<|begin_of_text|>",
    "<|eot_id|>",
)
# the widest that a shrunk model is, and the names that configs have for each size
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
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
_MOST_PARAMETERS = 4e8
_MOST_LAYERS = 12
_MOST_KINDS = 6  # layers kept, where a model has layers of several kinds
# what a model's folder holds beside weights and other formats of them
_SKIPPED = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".index.json",
)
_LARGEST_FILE = 100 << 20


class NoShrink(Exception):
    """No small model of this kind could be made; the text says why, for each way that was tried."""


def run(request: ServerRequest, response: ServerResponse) -> None:
    """Make the small model of a request; notes say what of it is not the run's own."""
    response.phase = "shrink"
    name = str(request.model)
    folder = find_source_folder(name, request.revision)
    if folder is None:
        response.notes.append(("model", name))
    if make(folder, request.out, request.shape):
        response.notes.append(("tokenizer", name))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.out)
    if tokenizer.eos_token:
        response.special[tokenizer.eos_token] = tokenizer.eos_token_id


def find_source_folder(name: str, revision: str | None) -> str | None:
    """The folder of a model's files, also in the hub's cache; None where it is not here."""
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def make(folder: str | None, out: str, shape: dict[str, Any]) -> bool:
    """Write a shrunk model and its tokenizer; returns whether the tokenizer is a stand-in.

    Without a folder, or without a config.json in it, `shape` (a config as JSON) stands in.
    """
    import transformers

    os.makedirs(out)
    if folder is not None:
        copy_small_files(folder, out)
    if os.path.isfile(os.path.join(out, "config.json")):
        config = transformers.AutoConfig.from_pretrained(out)
    else:
        config = make_config(shape)
    has_tokenizer = any(name.startswith("tokenizer") for name in os.listdir(out))
    if not has_tokenizer:
        config.vocab_size = write_tokenizer(out, config.model_type)
        # that of the family may lie beyond these few tokens
        config.pad_token_id = SPECIAL.index("<|pad|>")
    shrink(config).save_pretrained(out)
    return not has_tokenizer


def make_config(shape: dict[str, Any]) -> Any:
    import transformers

    sizes = dict(shape)
    return transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def write_tokenizer(out: str, model_type: str) -> int:
    """Write a tokenizer of single bytes with a ChatML template; returns its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    if model_type == "llama":
        special["bos_token"] = "<|begin_of_text|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = CHATML
    fast.save_pretrained(out)
    return len(tokens)


def copy_small_files(folder: str, out: str) -> None:
    """What lies beside a model's weights: config, tokenizer, chat template, generation config."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        is_small = os.path.isfile(path) and os.path.getsize(path) <= _LARGEST_FILE
        if is_small and not name.endswith(_SKIPPED):
            shutil.copyfile(path, os.path.join(out, name))


def shrink(config: Any) -> Any:
    """A model with thin layers; where its family refuses such sizes, with few full ones."""
    faults = []
    for is_thin in (True, False):
        small = copy.deepcopy(config)
        part = small.get_text_config()
        cut_layers(part)
        if is_thin:
            narrow(part)
        try:
            return build(small, part.vocab_size)
        except Exception as error:
            faults.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    raise NoShrink("; ".join(dict.fromkeys(faults)))


def build(config: Any, vocabulary: int) -> Any:
    """A model with random weights that can be trained."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > _MOST_PARAMETERS:
        raise NoShrink(f"two layers of full width have {count / 1e9:.1f} B parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(3, 12)[None] % vocabulary
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    return model


def cut_layers(part: Any) -> None:
    """Two layers, or one of each kind that the model has, in their order.

    Where a config computes the kinds from their places, as many layers as it takes to meet each of
    them.
    """
    kinds = list_layer_kinds(part)
    first: dict[str, int] = {}
    for place, kind in enumerate(kinds):
        first.setdefault(kind, place)
    kept = sorted(first.values())[:_MOST_KINDS]
    if not kinds:
        kept = [0, 1]
    elif len(kept) < 2:
        kept.append(len(kinds) - 1)
    for name in LAYERS:
        put(part, name, len(kept))
    for name in PER_LAYER:
        listed = get(part, name)
        if isinstance(listed, list) and len(listed) > max(1, *kept):
            put(part, name, [listed[place] for place in kept])
    if not first.keys() <= set(list_layer_kinds(part)):
        for name in LAYERS:
            put(part, name, min(kept[-1] + 1, _MOST_LAYERS))


def list_layer_kinds(part: Any) -> list[str]:
    return list(get(part, "layer_types") or get(part, "layers_block_type") or ())


def narrow(part: Any) -> None:
    """Reduce each size to that of `SIZES`, and keep whether heads share keys and values."""
    heads = get(part, "num_attention_heads")
    shared = get(part, "num_key_value_heads")
    for size, names in SIZES.items():
        for name in names.split():
            width = get(part, name)
            if isinstance(width, int) and not isinstance(width, bool):
                put(part, name, min(size, width))
    if isinstance(shared, int) and isinstance(heads, int):
        put(part, "num_key_value_heads", part.num_attention_heads if shared == heads else 2)
    expand = get(part, "expand")
    head = get(part, "head_dim")
    if isinstance(expand, int) and isinstance(head, int):
        put(part, "num_heads", expand * part.hidden_size // head)


def get(part: Any, name: str) -> Any:
    try:
        return getattr(part, name, None)
    except Exception:
        return None


def put(part: Any, name: str, value: Any) -> None:
    """Set an attribute that the config has and lets one set."""
    if get(part, name) is not None:
        # a config may compute it
        with contextlib.suppress(Exception):
            setattr(part, name, value)
