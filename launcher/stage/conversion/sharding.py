"""DeepSpeed files, accelerate's config files and FSDP -> launch's `deepspeed:`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.files import read_bytes
from launcher.lazy_dataclass import dataclass
from launcher.stage.conversion.settings import Recipe, find_near, is_off

_MOST_BYTES = 2**18
_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".conf"})
_STAGE = re.compile(r"(?:zero|stage|z|ds)[_-]?(?:stage)?[_-]?([0123])(?!\d)")


@dataclass(frozen=True, slots=True)
class ShardingName:
    """`name` is launch's; `advice` says what it does not say of the source."""

    name: str
    advice: str = ""


_OFFLOAD_TWO = (
    "launch has no ZeRO-2 that offloads: write a DeepSpeed file, and its path as `deepspeed:`"
)
_FULL = "FSDP shards parameters, gradients and optimizer as ZeRO-3 does"
_HALF = "FSDP's SHARD_GRAD_OP shards gradients and optimizer as ZeRO-2 does"


def read_text(path: str, recipe: Recipe) -> str | None:
    """The text of a file that a source names, or writes; None if there is none."""
    if path in recipe.texts:
        return recipe.texts[path]
    file = find(path, recipe)
    if file is None:
        return None
    try:
        return read_bytes(file, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def find(path: str, recipe: Recipe) -> Path | None:
    """The config file that a source means by a path."""
    # whoever wrote the source may not be who may read what it names
    is_hidden = re.search(r"(^|/)\.(?!\.?(/|$))", path)
    if Path(path).suffix not in _SUFFIXES or is_hidden:
        return None
    return find_near(path, recipe.path)


def read_mapping(path: str, recipe: Recipe) -> dict[str, Any] | None:
    """What a file of JSON or YAML holds; None if there is none or it is no mapping."""
    text = read_text(path, recipe)
    if text is None:
        return None
    try:
        # with tabs for blanks JSON is YAML too
        value = yaml.safe_load(text.replace("\t", " "))
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    if not isinstance(value, dict):
        return None
    return value


def name_deepspeed(value: Any, recipe: Recipe) -> ShardingName | None:
    """launch's name for a DeepSpeed config: a mapping, a file, or the name of one."""
    if isinstance(value, Mapping):
        return _find_sharding(value)
    text = str(value)
    content = read_mapping(text, recipe)
    # without a stage of ZeRO in it, the name alone tells
    return _find_sharding(content or {}) or recognise_name(text)


def _find_sharding(content: Mapping[str, Any]) -> ShardingName | None:
    zero = content.get("zero_optimization", content)
    if not isinstance(zero, Mapping):
        return None
    stage = zero.get("stage", zero.get("zero_stage"))
    offloads = False
    for key in ("offload_optimizer", "offload_param"):
        device = zero.get(key)
        if isinstance(device, Mapping):
            device = device.get("device")
        offloads = offloads or not is_off(device) or not is_off(zero.get(f"{key}_device"))
    return name_stage(stage, offloads=offloads)


def recognise_name(text: str) -> ShardingName | None:
    """launch's name for a DeepSpeed or accelerate config whose name tells its stage."""
    name = text.lower().rpartition("/")[2]
    match = _STAGE.search(name) or _STAGE.search(text.lower())
    if match is None and "fsdp" in name:
        return ShardingName("zero3", _FULL)
    if match is None:
        return None
    offloads = "offload" in name and not re.search(r"(?:no|without)[_-]?offload", name)
    return name_stage(match[1], offloads=offloads)


def name_stage(stage: Any, *, offloads: bool) -> ShardingName | None:
    text = str(stage)
    if text not in ("0", "1", "2", "3"):
        return None
    if text == "0":
        return ShardingName("none")
    if offloads and text == "3":
        return ShardingName("zero3_offload")
    if offloads:
        return ShardingName(f"zero{text}", _OFFLOAD_TWO)
    return ShardingName(f"zero{text}")


def name_fsdp(strategy: Any) -> ShardingName | None:
    """launch's name for FSDP's sharding strategy."""
    text = str(strategy).upper()
    if is_off(strategy) or "NO_SHARD" in text:
        return None
    if "SHARD_GRAD_OP" in text or text == "2":
        return ShardingName("zero2", _HALF)
    return ShardingName("zero3", _FULL)
