"""Whether a model's folder can be loaded: its config, its tokenizer and its weights, as
transformers looks.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.artifacts import digest
from launcher.files import open_regular, parse_json, read_bytes, read_json
from launcher.paths import is_file, is_pointer

TOKENIZERS = """
    tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model sentencepiece.bpe.model
    tekken.json
""".split()
ADAPTER = "adapter_config.json"
_CONFIG = "config.json"
_TOKENIZER = "tokenizer_config.json"
_LOADED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What transformers loads, the first that is there."""
_LARGEST_INDEX = 2**28
NO_WEIGHTS = "it holds no weights"


def is_bare(folder: Path) -> bool:
    """Whether a folder has neither weights nor a tokenizer: it describes a model, to plan with."""
    return next(_list_weights(folder), None) is None and not _list_tokenizers(folder)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model: peft writes no config.json, and somebody may
    have copied one.
    """
    return is_file(folder / ADAPTER) and (not is_file(folder / _CONFIG) or not _holds_model(folder))


def _holds_model(folder: Path) -> bool:
    return any(not path.name.startswith("adapter_") for path in _list_weights(folder))


def find_adapter_base(folder: Path) -> str | None:
    """The model that an adapter was made for, as its config names it."""
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if isinstance(base, str) and base:
        return base
    return None


def has_tokenizer(folder: Path) -> bool:
    return bool(_list_tokenizers(folder))


def find_config_fault(folder: Path) -> str | None:
    """What is wrong with the config of a model
    (transformers/models/auto/configuration_auto.py::AutoConfig.from_pretrained[Unrecognized model])
    """
    if not is_file(folder / _CONFIG):
        return f"it holds no {_CONFIG}"
    config = _read_json(folder / _CONFIG)
    if not isinstance(config, dict):
        return _explain_unread(folder / _CONFIG)
    if "model_type" in config or "auto_map" in config:
        return None
    return f"its {_CONFIG} names no `model_type`"


def find_tokenizer_fault(folder: Path) -> str | None:
    """What is wrong with a tokenizer; without a vocabulary transformers makes one that knows no
    word.
    """
    path = folder / _TOKENIZER
    config: Any = {}
    if is_file(path):
        config = _read_json(path)
    if not isinstance(config, dict):
        return _explain_unread(path)
    if "auto_map" in config:
        # code of its own may read anything
        return None
    tokenizers = _list_tokenizers(folder)
    if not tokenizers:
        return "it holds no tokenizer, and one that knows no word would be made"
    for tokenizer in tokenizers:
        if is_pointer(tokenizer):
            return _explain_unread(tokenizer)
    if tokenizers[0].suffix == ".json" and not _is_closed(tokenizers[0]):
        return f"its {tokenizers[0].name} is cut off"
    return None


def find_weights_fault(folder: Path) -> str | None:
    """What is wrong with the weights: the first of four names decides
    (transformers/modeling_utils.py::_get_resolved_checkpoint_files[elif use_safetensors is not #1])
    """
    path = find_first_weights(folder)
    if path is None:
        others = sorted(path.name for path in _list_weights(folder))
        if not others:
            return NO_WEIGHTS
        return f"{NO_WEIGHTS} under a name that is looked for, only {', '.join(others[:3])}"
    if not path.name.endswith(".json"):
        return find_file_fault(path)
    shards = _list_shards(path)
    # transformers/utils/hub.py::get_checkpoint_shard_files[sharded_metadata = index]
    if not shards or "metadata" not in _read_json(path):
        return _explain_unread(path)
    faults = [fault for fault in map(find_file_fault, shards) if fault is not None]
    if not faults:
        return None
    if len(faults) > 1:
        return f"{faults[0]} ({len(faults)} of its {len(shards)} files)"
    return faults[0]


def read_sizes(folder: Path) -> Mapping[str, tuple[int, ...]] | None:
    """The size of each weight that is loaded, under its name in the files; None where no header
    tells.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in _list_safetensors(folder):
            for name, tensor in _read_header(path).tensors.items():
                shapes[name] = tuple(map(int, tensor["shape"]))
    except _UNREADABLE:
        return None
    return shapes or None


def _list_safetensors(folder: Path) -> list[Path]:
    """The safetensors files that are loaded."""
    path = find_first_weights(folder)
    if path is None or path.name.startswith("pytorch_model"):
        return []
    if path.name.endswith(".json"):
        return _list_shards(path)
    return [path]


_FORMATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_number_format(folder: Path) -> str:
    """The format of the first weight in the files, such as `bfloat16`; empty if unknown."""
    try:
        for tensor in _read_header(_list_safetensors(folder)[0]).tensors.values():
            if tensor["dtype"] in _FORMATS:
                return _FORMATS[tensor["dtype"]]
    except _UNREADABLE:
        return ""
    return ""


def find_file_fault(path: Path) -> str | None:
    """What is wrong with one file of weights; None where it ends where it says that it does."""
    if is_pointer(path):
        return f"{path.name} is a git-lfs pointer, not the file"
    if path.suffix == ".safetensors":
        return _find_tensors_fault(path)
    return find_archive_fault(path)


_UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError)


class _Header(NamedTuple):
    """The size of a safetensors file, where its data begin, and its tensors."""

    size: int
    data: int
    tensors: dict[str, Any]


def _read_header(path: Path) -> _Header:
    """Raises _UNREADABLE."""
    with open_regular(path, 0) as file:
        size = os.fstat(file.fileno()).st_size
        return _Header(size, *digest.read_header(file.fileno(), size))


def is_blank(path: Path) -> bool:
    """Whether all floating-point tensors of a safetensors file are 0, as far as samples of each
    tell.
    """
    try:
        header = _read_header(path)
        formats = [tensor["dtype"] for tensor in header.tensors.values()]
        if not formats or not all("F" in name for name in formats):
            return False
        with open_regular(path, 0) as file:
            regions = digest.choose_regions(file.fileno(), header.size) or []
            for offset, length in regions[1:]:
                if os.pread(file.fileno(), length, offset).strip(b"\0"):
                    return False
            return bool(regions)
    except _UNREADABLE:
        return False


def _find_tensors_fault(path: Path) -> str | None:
    """Whether a safetensors file ends where its header says that the last tensor ends.

    Weights without a value are what ZeRO-3 leaves in a parameter that was not gathered for the save
    (deepspeed/runtime/zero/partition_parameters.py); whole numbers of a quantised model may have
    none.
    """
    try:
        header = _read_header(path)
        end = header.data
        empty: list[str] = []
        for name, tensor in header.tensors.items():
            end = max(end, header.data + int(tensor["data_offsets"][1]))
            if 0 in tensor["shape"] and "F" in tensor["dtype"]:
                empty.append(name)
    except OSError as error:
        return _explain_unreadable(path, error)
    except EOFError:
        return f"{path.name} is cut off"
    except _UNREADABLE:
        return f"{path.name} cannot be read"
    if end != header.size:
        return f"{path.name} is cut off"
    if empty:
        count = f"{len(empty)} of the {len(header.tensors)} tensors in {path.name}"
        return f"{count} have no values, such as {empty[0]}"
    return None


def find_archive_fault(path: Path) -> str | None:
    """Whether a file of torch's is whole: its zip directory stands at its end and fits what is
    before.

    The form before torch 1.6 has no end that could be looked for: not being empty has to do.
    """
    import zipfile

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
        return _explain_unreadable(path, error)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return f"{path.name} is cut off"


def _explain_unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path.name} is missing"
    return f"{path.name} cannot be read: {error.strerror}"


def find_first_weights(folder: Path) -> Path | None:
    """The file that transformers loads, or its index."""
    for name in _LOADED:
        if is_file(folder / name):
            return folder / name
    return None


def _list_shards(index: Path) -> list[Path]:
    """The files that an index names; empty where it cannot be read."""
    content = _read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        return []
    return [index.parent / name for name in sorted(set(map(str, files.values())))]


def _list_weights(folder: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "*.bin", "*.gguf", "*.index.json"):
        for path in folder.glob(pattern):
            if not path.name.startswith(("training_args", "optimizer", "scheduler")):
                yield path


def _list_tokenizers(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZERS if is_file(folder / name)]


def _is_closed(path: Path) -> bool:
    """Whether a text that is a JSON mapping ends like one."""
    try:
        with open_regular(path) as file:
            begin = file.read(64).lstrip()
            file.seek(max(0, path.stat().st_size - 64))
            return begin.startswith(b"{") and file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _explain_unread(path: Path) -> str:
    if is_pointer(path):
        return f"its {path.name} is a git-lfs pointer, not the file"
    return f"its {path.name} cannot be read"


def _read_json(path: Path) -> Any:
    try:
        return parse_json(read_bytes(path, _LARGEST_INDEX))
    except (OSError, ValueError):
        return None
