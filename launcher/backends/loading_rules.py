"""Rules about the loading of a model: is it here and whole, and what is it loaded with beside its name?

TRL hands `model_init_kwargs` to the model's loader, which refuses what it does not know; open-instruct's
`additional_model_arguments` go to the config's, which drops it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher import shapes
from launcher.backends import model_config, model_files
from launcher.backends.context import Context, StageRule, caches_only
from launcher.backends.rule import say
from launcher.backends.trl_resolved import inline
from launcher.errors import Finding, InvalidConfig, Severity, brief
from launcher.paths import is_file
from launcher.shapes import Shape

# transformers/modeling_utils.py:3819 and what it takes from the others below; TRL's own are among
# them
_LOADER = frozenset({
    "config", "cache_dir", "ignore_mismatched_sizes", "force_download", "local_files_only", "token",
    "revision", "use_safetensors", "weights_only", "fusion_config", "disable_mmap", "state_dict",
    "proxies", "tqdm_class", "output_loading_info", "device_map", "max_memory", "offload_folder",
    "offload_buffers", "quantization_config", "subfolder", "variant", "adapter_kwargs",
    "adapter_name", "generation_config", "gguf_file", "distributed_config", "device_mesh", "tp_plan",
    "tp_size", "trust_remote_code", "allow_all_kernels", "use_kernels", "kernel_config",
    "key_mapping", "mirror", "low_cpu_mem_usage", "from_tf", "from_flax", "offload_state_dict",
    "attn_implementation", "_attn_implementation", "experts_implementation", "dtype", "torch_dtype",
})  # fmt: skip
# transformers/models/auto/configuration_auto.py: what the config's loader reads of it
_CONFIG_LOADER = frozenset({
    "cache_dir", "force_download", "local_files_only", "token", "subfolder", "proxies", "revision",
    "trust_remote_code", "code_revision", "attn_implementation", "experts_implementation", "dtype",
    "torch_dtype",
})  # fmt: skip
# transformers/configuration_utils.py:148, and what all of the classes below have
_EVERY_CONFIG = frozenset({
    "architectures", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id",
    "model_type", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "per_layer_config", "problem_type", "return_dict", "transformers_version", "use_return_dict",
    "attention_dropout", "bos_token_id", "eos_token_id", "hidden_size", "initializer_range",
    "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pad_token_id", "rope_parameters", "rope_scaling", "tie_word_embeddings",
    "use_cache", "vocab_size", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan",
    "base_model_tp_plan", "keys_to_ignore_at_inference",
})  # fmt: skip
_QWEN2 = "hidden_act layer_types max_window_layers rms_norm_eps sliding_window use_sliding_window"
# transformers/models/: what the config class of a type of model has beside those
CONFIGS: Mapping[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "llama": "attention_bias head_dim hidden_act mlp_bias pretraining_tp rms_norm_eps",
        "mistral": "head_dim hidden_act rms_norm_eps sliding_window",
        "granite": "attention_bias attention_multiplier embedding_multiplier hidden_act logits_scaling "
        "mlp_bias residual_multiplier rms_norm_eps",
        "qwen2": _QWEN2,
        "qwen3": f"attention_bias head_dim {_QWEN2}",
        "olmo2": "attention_bias hidden_act rms_norm_eps",
        "olmo3": "attention_bias hidden_act layer_types rms_norm_eps sliding_window",
    }.items()
}
_BITS = frozenset({"load_in_4bit", "load_in_8bit"})
_QUANTISERS = {
    "bitsandbytes": ("bitsandbytes",), "gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel",),
    "hqq": ("hqq",), "torchao": ("torchao",), "quanto": ("optimum-quanto",), "aqlm": ("aqlm",),
    "compressed-tensors": ("compressed-tensors",), "auto-round": ("auto-round",),
}  # fmt: skip
# what transformers wants to read files of torch.save with
_UNPICKLES = (2, 6)
_WHOLE = "finish the run that makes it, or copy it again"


def given_to_loader(context: Context) -> tuple[str, Mapping[str, Any]]:
    """The argument that holds them, and what it holds."""
    values = context.values
    if values.schema.backend == "trl":
        return "model_init_kwargs", inline(values["model_init_kwargs"]) or {}
    key = "additional_model_arguments"
    return key, model_config.replaced(values[key])


def _config(context: Context) -> Mapping[str, Any]:
    values = context.values
    name = values.get("config_name") or values["model_name_or_path"]
    return model_config.read(name, context.environ, values.get("model_revision"))


def unknown_names(context: Context) -> Iterator[Finding]:
    """transformers/configuration_utils.py:915 keeps what the config has a place for. The model's own class
    refuses the rest (transformers/modeling_utils.py:4267), which open-instruct does not hand on
    (finetune.py:544, dpo_tune_cache.py:283).
    """
    key, given = given_to_loader(context)
    config = _config(context) if given else {}
    own = CONFIGS.get(str(config.get("model_type")))
    # another release may have more of them
    if own is None or not context.values.schema.tested:
        return
    refused = context.values.schema.backend == "trl"
    # `rope_theta` goes into `rope_parameters` when the config is read
    known = _EVERY_CONFIG | own | (config.keys() - {"rope_theta"})
    known |= _LOADER if refused else _CONFIG_LOADER
    for name in sorted(given.keys() - known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        inside = "`rope_parameters: {rope_theta: ...}` holds it" if name == "rope_theta" else None
        yield say(
            "error" if refused else "warning", "run",
            "model-arguments" if refused else "model-arguments-unread", key,
            f"`{key}`: the config of {config['model_type']} models has no `{brief(name)}`: "
            + ("the model cannot be made with it" if refused else "it is dropped without a word"),
            f"did you mean `{near[0]}`?" if near else inside,
        )  # fmt: skip


def quantised(context: Context) -> Iterator[Finding]:
    """transformers/quantizers/auto.py:110: each kind of quantised weights needs its own package."""
    key, given = given_to_loader(context)
    asked = given.get("quantization_config") if context.values.schema.backend == "trl" else None
    told = asked if asked is not None else _config(context).get("quantization_config")
    key = "model_name_or_path" if asked is None else key
    if told is None or caches_only(context):
        return
    method = told.get("quant_method") if isinstance(told, dict) else None
    if method is None and isinstance(told, dict) and (told.keys() & _BITS):
        method = "bitsandbytes"
    if method is None:
        yield say(
            "error", "run", "model-arguments", key,
            f"`quantization_config: {brief(told)}` names no `quant_method`: the model cannot "
            "be loaded",
        )  # fmt: skip
        return
    missing = [name for name in _QUANTISERS.get(str(method), ()) if context.lacks(name)]
    if missing:
        yield say(
            "error", "run", "missing-packages", key,
            f"weights quantised by {method} need {' and '.join(missing)}, which the trainer's "
            "Python lacks",
            f"pip install {' '.join(missing)}",
        )  # fmt: skip


def other_weights(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:4267: what has another size in the files is refused, and what is not
    in them begins at random, which a table in the log says.
    """
    values, (_, given) = context.values, given_to_loader(context)
    name, trl = str(values["model_name_or_path"] or ""), values.schema.backend == "trl"
    own = _shape(model_config.read(name, context.environ)) if Path(name).is_dir() else None
    there = None if own is None else model_files.sizes(Path(name), given if trl else None)
    if own is None or there is None:
        return
    if not any(one.startswith("model.") for one in there):
        # a model without its head, whose names transformers completes
        there = {one if one in own.outer else f"model.{one}": size for one, size in there.items()}
    severity: Severity = "error" if context.running else "warning"
    needed = by_name(own)
    other = [one for one in needed.keys() & there.keys() if needed[one] != there[one]]
    if other and not given.get("ignore_mismatched_sizes"):
        yield say(
            severity, "run", "incomplete-model", "model_name_or_path",
            f"{brief(name)} cannot be trained from: {min(other)} is {_size(there[min(other)])} "
            "in its files, "
            f"and {_size(needed[min(other)])} by its config.json", "config.json is another model's",
        )  # fmt: skip
    asked = _shape({**_config(context), **given})
    gone = sorted(by_name(asked or own).keys() - there.keys())
    if gone:
        some = next(iter(there), None)
        yield say(
            # single ones may be meant to
            severity if not needed.keys() & there.keys() else "warning", "run", "incomplete-model",
            "model_name_or_path",
            f"{len(gone)} of the {len(by_name(asked or own))} weights of {brief(name)} are in "
            "none of its "
            f"files, and begin at random, such as {gone[0]}",
            f"its files hold {some} and others" if some else None,
        )  # fmt: skip


def by_name(shape: Shape) -> Mapping[str, tuple[int, ...]]:
    """The size of each weight of a model."""
    inner = {
        f"model.layers.{i}.{n}": s for i in range(shape.layers) for n, s in shape.layer.items()
    }
    return {**shape.outer, **inner}


def _size(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def _shape(config: Mapping[str, Any]) -> Shape | None:
    try:
        return shapes.shape_of(config)
    except InvalidConfig:
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# --- what lies here
# --------------------------------------------------------------------------------


def missing_model(context: Context) -> Iterator[Finding]:
    """finetune.py:541, dpo_tune_cache.py:279, trl/scripts/sft.py:104: neither a folder nor a hub name; nor
    what open-instruct takes the config or the tokenizer from (finetune.py:526, finetune.py:411).
    """
    if not context.running:
        return
    seen = set()
    for key in ("model_name_or_path", "config_name", "tokenizer_name_or_path"):
        name = context.values.get(key)
        if isinstance(name, str) and name and name not in seen:
            seen.add(name)
            yield from _missing(context, key, name)


def _missing(context: Context, key: str, name: str) -> Iterator[Finding]:
    # the config alone may be a file
    if is_file(Path(name)) and key != "config_name":
        yield say(
            "error", "run", "missing-model", key, f"{name} is a file, no folder",
            f"name the folder with its config.json, such as {Path(name).parent}",
        )  # fmt: skip
        return
    if model_config.here(name) or (key == "model_name_or_path" and _config(context)):
        return
    if model_config.is_path(name):
        yield say(
            "error", "run", "missing-model", key, f"there is no folder {name} here",
            "relative paths start where launch is started; `~` is not expanded",
        )  # fmt: skip
    elif model_config.offline(context.environ) and not model_config.cached(name, context.environ):
        yield say(
            "error", "run", "missing-model", key,
            f"{name} is neither here nor in the hub's cache, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, or download it first",
        )  # fmt: skip
    elif _half_here(name) and not model_config.cached(name, context.environ):
        yield say(
            "warning", "run", "missing-model", key,
            f"there is no {name} here, although there is {name.partition('/')[0]}/: it is "
            "taken for a name "
            "on the hub", "correct the path, or write ./ before it to mean a folder",
        )  # fmt: skip


def incomplete_model(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:631, transformers/models/auto/configuration_auto.py:433: seen when
    it is loaded, on every GPU. A folder with a config alone is one to plan with.
    """
    values = context.values
    model, revision = values["model_name_or_path"], values.get("model_revision")
    config = values.get("config_name")
    loader = given_to_loader(context)[1] if values.schema.backend == "trl" else {}
    if caches_only(context) or loader.get("gguf_file"):
        return
    key = "config_name" if config else "model_name_or_path"
    folder, fault = _read_from(context, config or model, revision), None
    if folder is not None and (fault := model_files.config_fault(folder)) is not None:
        yield _incomplete(context, "incomplete-model", key, fault)
    if fault is not None and not config:
        return
    if (folder := _read_from(context, model, revision)) is not None:
        fault = model_files.weights_fault(folder, loader) or _unloaded(context, folder, loader)
        if fault is not None:
            yield _incomplete(context, "incomplete-model", "model_name_or_path", fault)


def _unloaded(context: Context, folder: Path, loader: Mapping[str, Any]) -> str | None:
    """What the trainer's packages make of weights that are whole.

    transformers/integrations/peft.py:340 puts an adapter beside them on, and freezes all;
    transformers/modeling_utils.py:360 unpickles nothing with an older torch.
    """
    if is_file(folder / model_files.ADAPTER) and not context.lacks("peft"):
        return f"the adapter beside its weights ({model_files.ADAPTER}) is put on, and nothing is trained"
    pickled, torch = model_files.pickled(folder, loader), (context.packages or {}).get("torch")
    if pickled is not None and torch is not None and _release(torch) < _UNPICKLES:
        return f"torch {torch} is too old for {pickled}: transformers wants 2.6, or safetensors"
    return None


def incomplete_tokenizer(context: Context) -> Iterator[Finding]:
    """transformers/models/qwen2/tokenization_qwen2.py:53: without its files one without words is made."""
    values = context.values
    named = [key for key in ("tokenizer_name_or_path", "model_name_or_path") if values.get(key)]
    revision = values.get("tokenizer_revision") or values.get("model_revision")
    for key in (*named[:1], "chat_template_path"):
        folder = _read_from(context, values.get(key), revision)
        if folder is not None and (fault := model_files.tokenizer_fault(folder)) is not None:
            yield _incomplete(context, "incomplete-tokenizer", key, fault)


def _incomplete(context: Context, code: str, key: str, fault: str) -> Finding:
    name = str(context.values[key])
    return say(
        "error" if context.running else "warning", "run", code, key,
        f"{brief(name)} cannot be trained from: {fault}",
        f"git -C {shlex.quote(name)} lfs pull" if "git-lfs" in fault else _WHOLE,
    )  # fmt: skip


def _read_from(context: Context, name: object, revision: str | None) -> Path | None:
    """The folder that is read and nothing else: of the hub's cache what is missing is fetched.

    One that only describes a model says nothing before something is to be started.
    """
    folder = None
    if isinstance(name, str) and name and Path(name).is_dir():
        folder = Path(name)
    elif model_config.offline(context.environ):
        config = model_config.where(name, context.environ, revision)
        folder = None if config is None else config.parent
    described = folder is not None and not context.running and model_files.is_bare(folder)
    return None if described else folder


def revision_of_folder(context: Context) -> Iterator[Finding]:
    """finetune.py:411, dpo_tune_cache.py:150, trl/scripts/sft.py:77: transformers/utils/hub.py:404 reads a
    folder as it is.
    """
    values = context.values
    model, tokenizer = values["model_name_or_path"], values.get("tokenizer_name_or_path")
    own = values.get("tokenizer_revision")
    read = {
        "model_revision": {model, values.get("config_name")}
        | ({tokenizer} if own is None else set()),
        "tokenizer_revision": {tokenizer or model},
    }
    for key, names in read.items():
        revision = values.get(key)
        folders = [name for name in names if isinstance(name, str) and name]
        if revision in (None, "main") or not folders or not all(map(model_config.here, folders)):
            continue
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}: {brief(revision)}` does nothing here: {brief(folders[0])} is a folder, "
            "which has no "
            "revisions", "delete the line",
        )  # fmt: skip


def _half_here(name: str) -> bool:
    """Whether a name of two words begins with a folder that is here: a path with a mistake in it."""
    return "/" in name and model_config.here(name.partition("/")[0])


RULES: tuple[StageRule, ...] = (
    missing_model, incomplete_model, incomplete_tokenizer, revision_of_folder, unknown_names, quantised,
    other_weights,
)  # fmt: skip
