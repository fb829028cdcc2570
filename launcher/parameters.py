"""How many parameters a model has, from files that are here: its weights' headers, or its config.

Nothing is downloaded and no weight is read. Where only a config of an unknown kind is here, or
nothing at all, the answer is None: no number is better than a made-up one.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends import model_config
from launcher.paths import exists, is_file

_LARGEST_HEADER = 2**27
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# decoders of one shape: attention with grouped heads, a gated MLP, and nothing else that counts
_DENSE = frozenset({"llama", "mistral", "olmo", "olmo2", "olmo3", "qwen2", "qwen3", "smollm3"})
# norms over the width, a layer; norms over queries and keys: of the head's size, or of all heads
_NORMS = {"olmo": 0}
_MLP_BIAS = frozenset({"llama", "smollm3"})
_QK_NORM = {"qwen3": "head", "olmo2": "all", "olmo3": "all"}


@dataclass(frozen=True, slots=True)
class Count:
    """A number of parameters, tied ones once, and the file that tells it."""

    parameters: int
    source: str


def of_model(name: object, environ: Mapping[str, str], revision: str | None = None) -> Count | None:
    """The parameters of a model by folder or hub name; None where that cannot be known from here."""
    folder = _folder(name, environ, revision)
    if folder is None:
        return None
    return _of_safetensors(folder) or _of_index(folder) or _of_config(folder)


def _folder(name: object, environ: Mapping[str, str], revision: str | None) -> Path | None:
    """A folder of that name wins over the hub's cache, as in transformers."""
    if not isinstance(name, str) or not name:
        return None
    if is_file(Path(name) / "config.json"):
        return Path(name)
    if model_config.is_path(name):
        return None
    repository = model_config.hub_cache(environ) / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    with contextlib.suppress(OSError, ValueError):
        wanted = (repository / "refs" / wanted).read_text(encoding="utf-8").strip() or wanted
    snapshot = repository / "snapshots" / wanted
    return snapshot if exists(snapshot) else None


def _of_safetensors(folder: Path) -> Count | None:
    """From the headers of the weights: they hold every tensor's shape."""
    index = _json(folder / "model.safetensors.index.json")
    mapped = index.get("weight_map")
    names = sorted(set(map(str, mapped.values()))) if isinstance(mapped, Mapping) else []
    files = [folder / one for one in names or ["model.safetensors"]]
    total = 0
    for path in files:
        header = _header(path)
        if not header:
            return None
        total += sum(_elements(header))
    return Count(total, str(folder / ("model.safetensors.index.json" if names else files[0].name)))


def _header(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            told = json.loads(file.read(size)) if 0 < size <= _LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _elements(header: Mapping[str, Any]) -> Iterator[int]:
    for name, told in header.items():
        shape = told.get("shape") if isinstance(told, Mapping) else None
        if name != "__metadata__" and isinstance(shape, list):
            yield math.prod(int(size) for size in shape)


def _of_index(folder: Path) -> Count | None:
    """From an index whose files are not all here: their size in all, in the config's type."""
    size = _BYTES.get(str(_json(folder / "config.json").get("torch_dtype")))
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        told = _json(folder / name).get("metadata")
        if not isinstance(told, Mapping):
            continue
        if isinstance(told.get("total_parameters"), int):
            return Count(told["total_parameters"], str(folder / name))
        total = told.get("total_size")
        if size and isinstance(total, int | float) and total > 0:
            return Count(int(total) // size, str(folder / name))
    return None


def _of_config(folder: Path) -> Count | None:
    config = _json(folder / "config.json")
    try:
        total = _dense(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return None if total is None else Count(total, str(folder / "config.json"))


def _dense(config: Mapping[str, Any]) -> int | None:
    """The sum over the shapes of a plain decoder; None for any other kind of model."""
    kind = str(config["model_type"])
    if kind not in _DENSE or config.get("quantization_config"):
        return None
    width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
    groups = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or width // heads)
    inner = int(config["intermediate_size"])
    queries, keys = heads * size, groups * size
    layer = 2 * width * queries + 2 * width * keys + 3 * width * inner
    if kind == "qwen2":
        layer += queries + 2 * keys
    elif config.get("attention_bias") and kind != "mistral":
        layer += queries + 2 * keys + width
    if config.get("mlp_bias") and kind in _MLP_BIAS:
        layer += 2 * inner + width
    layer += _NORMS.get(kind, 2) * width
    layer += {"head": 2 * size, "all": queries + keys}.get(_QK_NORM.get(kind, ""), 0)
    tied = bool(config.get("tie_word_embeddings", kind == "smollm3"))
    last = 0 if kind == "olmo" else width
    return vocabulary * width * (1 if tied else 2) + layers * layer + last


def _json(path: Path) -> Mapping[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
