"""Rules about what a model is loaded with beside its name: keys that its config has not, or cannot take.

TRL hands `model_init_kwargs` to the model's loader, which refuses what it does not know; open-instruct's
`additional_model_arguments` go to the config's, which drops it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher import shapes
from launcher.backends import model_config, model_files
from launcher.backends.context import Context, StageRule, caches_only
from launcher.backends.rule import say
from launcher.backends.trl_resolved import inline
from launcher.errors import Finding, InvalidConfig, Severity, brief
from launcher.shapes import Shape

# transformers/modeling_utils.py:3819 and what it takes from the others below; TRL's own are among them
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
_DROPPED = frozenset({"mirror", "low_cpu_mem_usage", "from_tf", "from_flax", "offload_state_dict"})
# what only a program can give
_NO_TEXT = ("output_loading_info", "state_dict", "generation_config", "distributed_config")
_DEVICE = re.compile(r"auto|balanced|balanced_low_0|sequential|(cpu|cuda|xpu|npu|mps|hpu)(:\d+)?")
_BITS = frozenset({"load_in_4bit", "load_in_8bit"})
_QUANTISERS = {
    "bitsandbytes": ("bitsandbytes",), "gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel",),
    "hqq": ("hqq",), "torchao": ("torchao",), "quanto": ("optimum-quanto",), "aqlm": ("aqlm",),
    "compressed-tensors": ("compressed-tensors",), "auto-round": ("auto-round",),
}  # fmt: skip
# trl/trainer/utils.py:1335
_TYPES = ("auto", "bfloat16", "float16", "float32")


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


def architecture(context: Context) -> Iterator[Finding]:
    """trl/trainer/utils.py:1355 makes the class that the config names, whatever it is for."""
    values = context.values
    config = _config(context) if values.schema.backend == "trl" else {}
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else None
    name = brief(values["model_name_or_path"])
    if config.get("model_type") not in CONFIGS or "architectures" not in config:
        return
    if first is None:
        said = f"the config of {name} names no `architectures`, of which TRL takes the first"
    elif not first.endswith("ForCausalLM"):
        said = f"{name} is a {brief(first)}, which TRL loads as it is, and cannot train"
    else:
        return
    yield say(
        "error", "run", "model-arguments", "model_name_or_path", said,
        "name a causal language model, or correct `architectures` in its config.json",
    )  # fmt: skip


def precision(context: Context) -> Iterator[Finding]:
    """trl/trainer/utils.py:1339."""
    key, given = given_to_loader(context)
    name = given.get("dtype")
    if context.values.schema.backend == "trl" and name is not None and name not in _TYPES:
        yield say(
            "error", "run", "model-arguments", key,
            f"`{key}`: TRL refuses `dtype: {brief(name)}`", f"one of {', '.join(_TYPES)}",
        )  # fmt: skip


def unusable(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:4093 drops some, transformers/integrations/accelerate.py:122 knows
    devices by name; each of the others was seen to end the real trainer.
    """
    values, (key, given) = context.values, given_to_loader(context)
    if values.schema.backend != "trl":
        return
    for name in sorted(given.keys() & _DROPPED):
        yield say(
            "warning", "run", "model-arguments-unread", key,
            f"`{key}`: `{name}` is not read any more", "delete it",
        )  # fmt: skip
    crashes = [name for name in sorted(_NO_TEXT) if given.get(name) not in (None, False)]
    place = given.get("device_map")
    placed = place if isinstance(place, str) else None
    if placed is not None and not _DEVICE.fullmatch(placed):
        crashes.append("device_map")
    own = _config(context) if given else {}
    # transformers checks the types of a config
    crashes += [
        n for n, v in given.items() if isinstance(v, str) and isinstance(own.get(n), int | float)
    ]
    for name in crashes:
        yield say(
            "error", "run", "model-arguments", key,
            f"`{key}`: `{name}: {brief(given[name])}` ends in a crash when the model is loaded",
            f"leave out `{name}`",
        )  # fmt: skip
    # trl/trainer/sft_trainer.py:692, trl/trainer/dpo_trainer.py:570
    if place is not None and not crashes and context.gpus is not None and context.gpus > 1:
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}`: `device_map` is not read by {context.gpus} processes: each has the model on its GPU",
            "leave out `device_map`",
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
            f"`quantization_config: {brief(told)}` names no `quant_method`: the model cannot be loaded",
        )  # fmt: skip
        return
    missing = [name for name in _QUANTISERS.get(str(method), ()) if context.lacks(name)]
    if missing:
        yield say(
            "error", "run", "missing-packages", key,
            f"weights quantised by {method} need {' and '.join(missing)}, which the trainer's Python lacks",
            f"pip install {' '.join(missing)}",
        )  # fmt: skip


def rope(context: Context) -> Iterator[Finding]:
    """transformers/configuration_utils.py:915: it replaces the whole mapping, and nothing is filled in."""
    key, given = given_to_loader(context)
    for name in ("rope_scaling", "rope_parameters"):
        value = given.get(name)
        if not isinstance(value, dict) or context.values.schema.backend != "trl":
            continue
        # some families have a mapping for each kind of layer
        if "rope_theta" not in value and not any(isinstance(one, dict) for one in value.values()):
            yield say(
                "error", "run", "model-arguments", key,
                f"`{key}`: `{name}` replaces all that the model's config says of it, and has no `rope_theta`",
                "add `rope_theta`, as it is in the model's config.json",
            )  # fmt: skip


def unsaved(context: Context) -> Iterator[Finding]:
    """transformers/configuration_utils.py:556: a config is checked when it is saved, after training."""
    key, given = given_to_loader(context)
    if context.values.schema.backend != "trl":
        return
    config = _config(context) if given else {}
    wanted = [name for name in ("output_attentions", "output_hidden_states") if given.get(name)]
    layers = given.get("num_hidden_layers", config.get("num_hidden_layers"))
    kinds = given.get("layer_types", config.get("layer_types"))
    if {"num_hidden_layers", "layer_types"} & given.keys() and isinstance(kinds, list):
        wanted += ["num_hidden_layers"] if len(kinds) != layers else []
    for name in wanted:
        why = f": `layer_types` has {len(kinds)} entries" if name == "num_hidden_layers" else ""
        yield say(
            "error", "run", "model-arguments", key,
            f"`{key}`: a model with `{name}: {brief(given.get(name, layers))}` cannot be saved when it is "
            f"trained{why}", f"leave out `{name}`",
        )  # fmt: skip


def other_sizes(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:4267 makes the model by the changed config: its weights must fit."""
    key, given = given_to_loader(context)
    values = context.values
    name, revision = values["model_name_or_path"], values.get("model_revision")
    was = _shape(model_config.read(name, context.environ, revision)) if given else None
    now = None if was is None else _shape({**_config(context), **given})
    if was is None or now is None or given.get("ignore_mismatched_sizes"):
        return
    before, after = {**was.outer, **was.layer}, {**now.outer, **now.layer}
    other = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    if other:
        yield say(
            "error", "run", "model-arguments", key,
            f"`{key}`: the weights of {brief(name)} do not fit: "
            f"{min(other)} is {_size(before[min(other)])} in its files, and would be "
            f"{_size(after[min(other)])}",
            "leave out what changes the model's sizes",
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
            f"{brief(name)} cannot be trained from: {min(other)} is {_size(there[min(other)])} in its files, "
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
            f"{len(gone)} of the {len(by_name(asked or own))} weights of {brief(name)} are in none of its "
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


RULES: tuple[StageRule, ...] = (
    unknown_names, architecture, precision, unusable, quantised, rope, unsaved, other_sizes, other_weights,
)  # fmt: skip
