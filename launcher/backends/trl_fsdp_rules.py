"""What transformers refuses of `fsdp` and `fsdp_config` (transformers/training_args.py:2734)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.backends.rule import Rule, say
from launcher.backends.trl_mappings import Missing, Unreadable, from_file, inline, missing_file
from launcher.errors import Finding, brief
from launcher.schema import Values, json_fault

_ONLY_VERSION_1 = ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
_OPTIONS = ("offload", "auto_wrap")
_BY_LAYER, _BY_SIZE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"
_POLICIES = (_BY_LAYER, _BY_SIZE, "NO_WRAP")
_TRUTHS = frozenset({"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"})
_SWITCHES = ("cpu_ram_efficient_loading", "activation_checkpointing")
_SWITCHES_1 = (
    "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers",
)  # fmt: skip
_XLA_TYPES = ("compute_dtype", "buffer_dtype")
_TORCH_TYPES = frozenset(
    {"float", "float16", "float32", "float64", "half", "double", "bfloat16"}
    | {"bool", "uint8", "int8", "int16", "int32", "int64", "short", "int", "long"}
)


def fsdp(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:2735,2740; without `fsdp` the mapping is not looked at."""
    asked, text = values["fsdp"], values["fsdp_config"]
    if not asked or json_fault(text) is not None:
        return
    try:
        config = _config(text)
    except Missing as fault:
        yield missing_file("fsdp_config", fault)
        return
    except Unreadable as fault:
        yield say("error", "parser", "fsdp-config", "fsdp_config", f"`fsdp_config`: {fault}")
        return
    version = _whole(config.get("version", 2))
    # XLA's path ends before it asks for the version, unless words said what to shard
    if version is None and (isinstance(asked, str | list) or not config.get("xla")):
        message = f"`fsdp_config`: `version` is 1 or 2, not {_shown(config['version'])}"
        yield say("error", "parser", "fsdp-config", "fsdp_config", message)
        return
    yield from _options(asked, version)
    for reason in _faults(config, version):
        yield say("error", "parser", "fsdp-config", "fsdp_config", f"`fsdp_config`: {reason}")


def _config(text: Any) -> dict[str, Any]:
    """The mapping, without the prefix that its keys may have."""
    given = {} if text is None else inline(text)
    config = from_file(str(text)) if given is None else given
    plain = {key: value for key, value in config.items() if not key.startswith("fsdp_")}
    return plain | {k[5:]: value for k, value in config.items() if k.startswith("fsdp_")}


def _options(asked: Any, version: int | None) -> Iterator[Finding]:
    """transformers/training_args.py:2886,2896: words are an old way to say what to shard."""
    words: Sequence[Any] = asked.split() if isinstance(asked, str) else asked
    for word in words if isinstance(words, list) else ():
        upper = str(word).upper()
        if upper in (*_SHARDED, *_ONLY_VERSION_1):
            if version == 2 and (upper in _ONLY_VERSION_1 or word != upper.lower()):
                yield say(
                    "error", "parser", "fsdp-option", "fsdp",
                    f"`fsdp: {word}` is for FSDP 1 only",
                    "write full_shard or shard_grad_op, or `fsdp_config: {version: 1}`",
                )  # fmt: skip
                return
        elif word not in _OPTIONS:
            yield say(
                "error", "parser", "fsdp-option", "fsdp", f"`{brief(word)}` is no option of `fsdp`",
                "write full_shard: as a flag, true is not understood",
            )  # fmt: skip
            return


def _faults(config: dict[str, Any], version: int | None) -> Iterator[str]:
    """transformers/training_args.py:2772,2793 and what follows, each a crash or a refusal there."""
    if config.get("xla"):
        yield from _xla_faults(config.get("xla_fsdp_settings", {}))
        return
    policy = config.get("auto_wrap_policy", _BY_LAYER)
    if policy not in _POLICIES:
        yield f"`auto_wrap_policy` is one of {', '.join(_POLICIES)}, not {_shown(policy)}"
    least = config.get("min_num_params", 0)
    if policy == _BY_SIZE and not isinstance(least, int | float):
        yield f"`min_num_params` is a number, not {_shown(least)}"
    layers = config.get("transformer_layer_cls_to_wrap")
    if policy == _BY_LAYER and not _names(layers):
        yield f"`transformer_layer_cls_to_wrap` is a list of names, not {_shown(layers)}"
    switches = (*_SWITCHES, *(("reshard_after_forward",) if version == 2 else _SWITCHES_1))
    for name in switches:
        if name in config and str(config[name]).lower() not in _TRUTHS:
            yield f"`{name}` is true or false, not {_shown(config[name])}"
    if version != 2 and not isinstance(config.get("backward_prefetch", ""), str):
        yield f"`backward_prefetch` is a name, not {_shown(config['backward_prefetch'])}"


def _xla_faults(settings: Any) -> Iterator[str]:
    if not isinstance(settings, dict | list):
        yield f"`xla_fsdp_settings` is a mapping, not {_shown(settings)}"
        return
    if isinstance(settings, dict) and any(isinstance(v, list | dict) for v in settings.values()):
        settings = {k: str(v) for k, v in settings.items()}
    for name in _XLA_TYPES:
        if name in settings and (isinstance(settings, list) or settings[name] not in _TORCH_TYPES):
            yield f"`{name}` is the name of one of torch's types"


def _names(layers: Any) -> bool:
    if layers is None or isinstance(layers, str | dict):
        return True
    return isinstance(layers, list) and all(isinstance(layer, str) for layer in layers)


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    return f"`{brief(json.dumps(value))}`"


RULES: tuple[Rule, ...] = (fsdp,)
