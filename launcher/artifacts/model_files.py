"""Whether a model's folder can be loaded: its config, its tokenizer and its weights, as transformers looks."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import digest
from launcher.files import open_regular, parse_json, read_bytes
from launcher.paths import is_file, is_pointer

TOKENIZERS = """
    tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model sentencepiece.bpe.model tekken.json
""".split()
ADAPTER = "adapter_config.json"
_CONFIG, _TOKENIZER = "config.json", "tokenizer_config.json"
_SAFE, _TORCH = "model.safetensors", "pytorch_model.bin"
_LARGEST_INDEX = 2**28
NO_WEIGHTS = "it holds no weights"


def is_bare(folder: Path) -> bool:
    """Whether a folder has neither weights nor a tokenizer: it describes a model, to plan with."""
    return next(_weights(folder), None) is None and not _tokenizers(folder)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model: peft writes no config.json, and somebody may have copied one."""
    return is_file(folder / ADAPTER) and (not is_file(folder / _CONFIG) or not _holds_model(folder))


def _holds_model(folder: Path) -> bool:
    return any(not path.name.startswith("adapter_") for path in _weights(folder))


def adapter_base(folder: Path) -> str | None:
    """The model that an adapter was made for, as its config names it."""
    config = _read(folder / ADAPTER)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if isinstance(base, str) and base else None


def has_tokenizer(folder: Path) -> bool:
    return bool(_tokenizers(folder))


def config_fault(folder: Path) -> str | None:
    """What is wrong with the config of a model
    (transformers/models/auto/configuration_auto.py::AutoConfig.from_pretrained[Unrecognized model]).
    """
    if not is_file(folder / _CONFIG):
        return f"it holds no {_CONFIG}"
    config = _read(folder / _CONFIG)
    if not isinstance(config, dict):
        return _unread(folder / _CONFIG)
    return None if "model_type" in config or "auto_map" in config else f"its {_CONFIG} names no `model_type`"


def tokenizer_fault(folder: Path) -> str | None:
    """What is wrong with a tokenizer; without a vocabulary transformers makes one that knows no word."""
    path, there = folder / _TOKENIZER, _tokenizers(folder)
    config = _read(path) if is_file(path) else {}
    if not isinstance(config, dict):
        return _unread(path)
    if "auto_map" in config:
        # code of its own may read anything
        return None
    if not there:
        return "it holds no tokenizer, and one that knows no word would be made"
    if (pointer := next(filter(is_pointer, there), None)) is not None:
        return _unread(pointer)
    whole = there[0].suffix != ".json" or _closed(there[0])
    return None if whole else f"its {there[0].name} is cut off"


def weights_fault(folder: Path) -> str | None:
    """What is wrong with the weights: the first of four names decides
    (transformers/modeling_utils.py::_get_resolved_checkpoint_files[elif use_safetensors is not False and #1]).
    """
    found = first(folder)
    if found is None:
        others = sorted(path.name for path in _weights(folder))
        beside = f" under a name that is looked for, only {', '.join(others[:3])}" if others else ""
        return f"{NO_WEIGHTS}{beside}"
    if not found.name.endswith(".json"):
        return file_fault(found)
    shards = _shards(found)
    # transformers/utils/hub.py::get_checkpoint_shard_files[sharded_metadata = index]
    if not shards or "metadata" not in _read(found):
        return _unread(found)
    faults = [fault for path in shards if (fault := file_fault(path)) is not None]
    more = f" ({len(faults)} of its {len(shards)} files)" if len(faults) > 1 else ""
    return f"{faults[0]}{more}" if faults else None


def sizes(folder: Path) -> Mapping[str, tuple[int, ...]] | None:
    """The size of each weight that is loaded, under its name in the files; None where no header tells."""
    found = first(folder)
    if found is None or found.name.startswith("pytorch_model"):
        return None
    paths = _shards(found) if found.name.endswith(".json") else [found]
    try:
        tensors = {name: one for path in paths for name, one in _header(path)[2].items()}
        return {name: tuple(map(int, one["shape"])) for name, one in tensors.items()} if paths else None
    except _UNREADABLE:
        return None


_FORMATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def number_format(folder: Path) -> str:
    """The format of the first weight in the files, such as `bfloat16`; empty where no header tells."""
    path = first(folder)
    if path is None or path.name.startswith("pytorch_model"):
        return ""
    paths = [path]
    if path.name.endswith(".json"):
        paths = _shards(path)
    try:
        for tensor in _header(paths[0])[2].values():
            if tensor["dtype"] in _FORMATS:
                return _FORMATS[tensor["dtype"]]
    except _UNREADABLE:
        return ""
    return ""


def file_fault(path: Path) -> str | None:
    """What is wrong with one file of weights; None where it ends where it says that it does."""
    if is_pointer(path):
        return f"{path.name} is a git-lfs pointer, not the file"
    return _tensors_fault(path) if path.suffix == ".safetensors" else archive_fault(path)


_UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError)


def _header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """The size of a safetensors file, where its data begin, and its tensors; raises _UNREADABLE."""
    with open_regular(path, 0) as file:
        size = os.fstat(file.fileno()).st_size
        return size, *digest.header(file.fileno(), size)


def blank(path: Path) -> bool:
    """Whether all floating-point tensors of a safetensors file are 0, as far as samples of each tell."""
    try:
        size, _, tensors = _header(path)
        if not tensors or not all("F" in one["dtype"] for one in tensors.values()):
            return False
        with open_regular(path, 0) as file:
            regions = digest.sampled_regions(file.fileno(), size) or []
            return bool(regions) and not any(os.pread(file.fileno(), n, at).strip(b"\0") for at, n in regions[1:])
    except _UNREADABLE:
        return False


def _tensors_fault(path: Path) -> str | None:
    """Whether a safetensors file ends where its header says that the last tensor ends.

    Weights without a value are what ZeRO-3 leaves in a parameter that was not gathered for the save
    (deepspeed/runtime/zero/partition_parameters.py); whole numbers of a quantised model may have none.
    """
    try:
        size, data, tensors = _header(path)
        ends = [int(one["data_offsets"][1]) for one in tensors.values()]
        empty = [n for n, one in tensors.items() if 0 in one["shape"] and "F" in one["dtype"]]
    except OSError as error:
        return _unreadable(path, error)
    except _UNREADABLE as error:
        return f"{path.name} {'is cut off' if isinstance(error, EOFError) else 'cannot be read'}"
    if data + max(ends, default=0) != size:
        return f"{path.name} is cut off"
    if empty:
        return f"{len(empty)} of the {len(tensors)} tensors in {path.name} have no values, such as {empty[0]}"
    return None


def archive_fault(path: Path) -> str | None:
    """Whether a file of torch's is whole: its zip directory stands at its end and fits what is before.

    The form before torch 1.6 has no end that could be looked for: not being empty has to do.
    """
    try:
        with open_regular(path) as file:
            begin = file.read(4)
            if not begin:
                return f"{path.name} is empty"
            if not begin.startswith(b"PK"):
                # a file that was made long and never written is full of zeros
                return None if begin.strip(b"\0") else f"{path.name} cannot be read"
            with zipfile.ZipFile(file) as archive:
                return None if archive.namelist() else f"{path.name} is empty"
    except OSError as error:
        return _unreadable(path, error)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return f"{path.name} is cut off"


def _unreadable(path: Path, error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError)
    return f"{path.name} is missing" if missing else f"{path.name} cannot be read: {error.strerror}"


def first(folder: Path) -> Path | None:
    """The file that transformers loads, or its index."""
    names = (f"{name}{index}" for name in (_SAFE, _TORCH) for index in ("", ".index.json"))
    return next((path for name in names if is_file(path := folder / name)), None)


def _shards(index: Path) -> list[Path]:
    """The files that an index names; empty where it cannot be read."""
    data = _read(index)
    placed = data.get("weight_map") if isinstance(data, dict) else None
    names = sorted({str(one) for one in placed.values()}) if isinstance(placed, dict) else []
    return [index.parent / name for name in names]


def _weights(folder: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "*.bin", "*.gguf", "*.index.json"):
        yield from (
            p for p in folder.glob(pattern) if not p.name.startswith(("training_args", "optimizer", "scheduler"))
        )


def _tokenizers(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZERS if is_file(folder / name)]


def _closed(path: Path) -> bool:
    """Whether a text that is a JSON mapping ends like one."""
    try:
        with open_regular(path) as file:
            begin = file.read(64).lstrip()
            file.seek(max(0, path.stat().st_size - 64))
            return begin.startswith(b"{") and file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _unread(path: Path) -> str:
    what = "is a git-lfs pointer, not the file" if is_pointer(path) else "cannot be read"
    return f"its {path.name} {what}"


def _read(path: Path) -> Any:
    try:
        return parse_json(read_bytes(path, _LARGEST_INDEX))
    except (OSError, ValueError):
        return None
