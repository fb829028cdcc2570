"""Whether a model's folder can be loaded: its config, its tokenizer and its weights, as transformers looks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import checkpoints
from launcher.files import open_regular, parse_json, read_bytes
from launcher.paths import is_file, is_pointer

TOKENIZERS = """
    tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model sentencepiece.bpe.model tekken.json
""".split()
ADAPTER = "adapter_config.json"
_CONFIG, _TOKENIZER = "config.json", "tokenizer_config.json"
_SAFE, _TORCH = "model.safetensors", "pytorch_model.bin"
_LARGEST_INDEX = 2**28


def is_bare(folder: Path) -> bool:
    """Whether a folder has neither weights nor a tokenizer: it describes a model, to plan with."""
    return next(_weights(folder), None) is None and not _tokenizers(folder)


def config_fault(folder: Path) -> str | None:
    """What is wrong with the config of a model (transformers/models/auto/configuration_auto.py:433)."""
    if not is_file(folder / _CONFIG):
        if is_file(folder / ADAPTER):
            return f"it is an adapter alone, without the model that it was made for: no {_CONFIG}"
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
    """What is wrong with the weights: the first of four names decides (transformers/modeling_utils.py:594)."""
    first = _first(folder)
    if first is None:
        others = sorted(path.name for path in _weights(folder))
        beside = f" under a name that is looked for, only {', '.join(others[:3])}" if others else ""
        return f"it holds no weights{beside}"
    if not first.name.endswith(".json"):
        return checkpoints.file_fault(first)
    shards = _shards(first)
    # transformers/utils/hub.py:891
    if not shards or "metadata" not in _read(first):
        return _unread(first)
    faults = [fault for path in shards if (fault := checkpoints.file_fault(path)) is not None]
    more = f" ({len(faults)} of its {len(shards)} files)" if len(faults) > 1 else ""
    return f"{faults[0]}{more}" if faults else None


def sizes(folder: Path) -> Mapping[str, tuple[int, ...]] | None:
    """The size of each weight that is loaded, under its name in the files; None where no header tells."""
    first = _first(folder)
    if first is None or first.name.startswith("pytorch_model"):
        return None
    headers = [checkpoints.sizes(path) for path in (_shards(first) if first.name.endswith(".json") else [first])]
    if not headers or None in headers:
        return None
    return dict(item for header in headers if header for item in header.items())


def _first(folder: Path) -> Path | None:
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
        yield from (p for p in folder.glob(pattern) if p.name != "training_args.bin")


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
