"""How many parameters a model has, from files that are here: its weights' headers, or its config.

Nothing is downloaded and no weight is read. Where only a config of an unknown kind is here, or
nothing at all, the answer is None: no number is better than a made-up one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import checkpoints, shapes
from launcher.backends import model_config
from launcher.errors import InvalidConfig
from launcher.files import read_json
from launcher.paths import exists, is_file

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


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
    snapshot = model_config.snapshot(name, environ, revision)
    return snapshot if snapshot is not None and exists(snapshot) else None


def _of_safetensors(folder: Path) -> Count | None:
    """From the headers of the weights: they hold every tensor's shape."""
    index = read_json(folder / "model.safetensors.index.json")
    mapped = index.get("weight_map")
    names = sorted(set(map(str, mapped.values()))) if isinstance(mapped, Mapping) else []
    files = [folder / one for one in names or ["model.safetensors"]]
    total = 0
    for path in files:
        sizes = checkpoints.sizes(path)
        if not sizes:
            return None
        total += sum(map(math.prod, sizes.values()))
    return Count(total, str(folder / ("model.safetensors.index.json" if names else files[0].name)))


def _of_index(folder: Path) -> Count | None:
    """From an index whose files are not all here: their size in all, in the config's type."""
    size = _BYTES.get(model_config.weights_type(read_json(folder / "config.json")))
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        told = read_json(folder / name).get("metadata")
        if not isinstance(told, Mapping):
            continue
        if isinstance(told.get("total_parameters"), int):
            return Count(told["total_parameters"], str(folder / name))
        total = told.get("total_size")
        if size and isinstance(total, int | float) and total > 0:
            return Count(int(total) // size, str(folder / name))
    return None


def _of_config(folder: Path) -> Count | None:
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        return None
    try:
        total = shapes.shape_of(config, name=folder.name).parameters
    except InvalidConfig:
        return None
    return Count(total, str(folder / "config.json"))
