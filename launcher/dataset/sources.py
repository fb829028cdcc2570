"""What a stage file names as data -> `Source`: the files of one split, here or in the hub's cache.

Follows datasets/data_files.py and datasets/load.py: which files of a folder are a split, by the folder's
own description, or by their names; and which of them are read, by the most common format.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.artifacts import model_config
from launcher.dataset import reading
from launcher.files import read_bytes

_MOST_ENTRIES = 20_000  # entries of a folder to look at; a larger one is not judged

# datasets/data_files.py:39: words in the names of files and folders
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_ALL_WORDS = frozenset().union(*_SPLIT_WORDS.values())
_SEPARATORS = re.compile(r"[-._ 0-9/\\]+")
# datasets/data_files.py:37: with one such file, these alone are read
_SHARD = re.compile(r"data/(?P<split>.+)-\d{5}-of-\d{5}[^/]*\Z")
# a folder that holds one is read by a script, or as another kind of data
_SPECIAL = re.compile(r"(^|/)(dataset_infos\.json|task\.toml|instruction\.md|[^/]*\.py)\Z")
SAVED_TO_DISK = ("state.json", "dataset_dict.json")

# datasets/packaged_modules/__init__.py:95, as far as launch reads them
_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
# datasets/load.py:226: of formats that are as common, the first of these
_PREFERRED = (".parquet", ".arrow", ".jsonl", ".json", ".csv")

# Names that `load_dataset` takes for a reader (datasets/packaged_modules/__init__.py:52).
LOADERS = frozenset(
    """
    csv json pandas parquet arrow text conll imagefolder audiofolder videofolder meshfolder pdffolder
    niftifolder webdataset xml hdf5 eval lance tsfile iceberg vortex mmcif pdb genbank fasta fastq harbor
    """.split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of one split of a data set.

    Without files, `unseen` says why its rows cannot be looked at, or `fault` why no trainer can read them.
    """

    name: str
    files: tuple[Path, ...] = ()
    unseen: str | None = None
    fault: str | None = None


def of_file(name: str) -> Source:
    path = Path(name)
    if not os.path.isfile(path):
        return Source(name=name, unseen="it is not here")
    return Source(name=name, files=(path,))


def of_name(name: str, split: str, config: str | None, environ: Mapping[str, str]) -> Source:
    """The source of `load_dataset(name, config)[split]`: a folder, or a data set in the hub's cache."""
    folder = Path(name)
    if not os.path.isdir(folder):
        if model_config.is_path(name) or name.count("/") != 1:
            return Source(name=name, unseen="it is not here")
        cached = model_config.snapshot(name, environ, kind="datasets")
        if cached is None or not os.path.isdir(cached):
            return Source(name=name, unseen="it is not downloaded yet")
        folder = cached
    elif any(os.path.exists(folder / file) for file in SAVED_TO_DISK):
        return Source(name=name, fault="was written by `save_to_disk`, which `load_dataset` refuses")
    return _of_folder(name, folder, split, config)


def _of_folder(name: str, folder: Path, split: str, config: str | None) -> Source:
    names = _names_below(folder)
    if names is None:
        return Source(name=name, unseen="it holds too many files, or cannot be listed")
    special = next((file for file in names if _SPECIAL.search(file.lower())), None)
    if special is not None:
        return Source(name=name, unseen=f"{special} decides how it is read")
    patterns, reason = _described(folder, split, config)
    if reason is not None:
        return Source(name=name, unseen=reason)
    if patterns is not None:
        chosen = [file for file in names if any(_matches(file, pattern) for pattern in patterns)]
    else:
        chosen = _files_by_name(names, split)
    read = _of_common_format(chosen)
    if not read:
        return Source(name=name, unseen=f"no file that launch reads is its split {split}")
    return Source(name=name, files=tuple(folder / file for file in read))


def _names_below(folder: Path) -> list[str] | None:
    """The files below a folder, hidden ones left out; None where there are too many, or it cannot be listed."""
    try:
        below = list(islice(folder.rglob("*"), _MOST_ENTRIES + 1))
        files = [str(path.relative_to(folder)) for path in below if path.is_file()]
    except (OSError, ValueError):
        return None
    if len(below) > _MOST_ENTRIES:
        return None
    return sorted(file for file in files if not file.startswith(".") and "/." not in file and "__" not in file[:2])


def _described(folder: Path, split: str, config: str | None) -> tuple[list[str] | None, str | None]:
    """The patterns that a folder's README.md gives for a split (`configs:`), or why that is not known."""
    try:
        text = read_bytes(folder / "README.md", 2**20).decode(errors="replace")
    except OSError:
        text = ""
    front = re.match(r"---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    if front is None or "configs:" not in front[1]:
        if config is not None:
            return None, f"its configuration {config} is not described here"
        return None, None
    import yaml

    try:
        card = yaml.safe_load(front[1])
    except (yaml.YAMLError, RecursionError):
        return None, "its README.md cannot be read as YAML"
    configs = card.get("configs") if isinstance(card, dict) else None
    chosen = _config(configs if isinstance(configs, list) else [], config)
    if chosen is None:
        return None, "its README.md describes no such configuration"
    data_files = chosen.get("data_files")
    if data_files is None:
        return None, "its README.md describes its files in another way"
    return _patterns(data_files, split), None


def _config(configs: Sequence[Any], name: str | None) -> Mapping[str, Any] | None:
    known = [one for one in configs if isinstance(one, dict)]
    if name is not None:
        return next((one for one in known if one.get("config_name") == name), None)
    default = next((one for one in known if one.get("default") or one.get("config_name") == "default"), None)
    if default is not None:
        return default
    return known[0] if len(known) == 1 else None


def _patterns(data_files: Any, split: str) -> list[str]:
    """The patterns of a split, in each of the forms that a card may give (datasets/utils/metadata.py)."""
    if isinstance(data_files, str):
        return [data_files] if split == "train" else []
    if isinstance(data_files, dict):
        data_files = [{"split": key, "path": value} for key, value in data_files.items()]
    patterns: list[str] = []
    for entry in data_files if isinstance(data_files, list) else []:
        if isinstance(entry, str) and split == "train":
            patterns.append(entry)
        elif isinstance(entry, dict) and entry.get("split") == split:
            path = entry.get("path")
            patterns += [path] if isinstance(path, str) else [one for one in path or [] if isinstance(one, str)]
    return patterns


def _matches(file: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./")
    if fnmatch(file, pattern):
        # a star of the hub's patterns stops at a slash, that of fnmatch does not
        return "**" in pattern or file.count("/") == pattern.count("/")
    return False


def _files_by_name(names: Sequence[str], split: str) -> list[str]:
    shards = [(match["split"], file) for file in names if (match := _SHARD.match(file)) is not None]
    if shards:
        return [file for shard_split, file in shards if shard_split == split]
    data = [file for file in names if reading.data_suffix(Path(file)) in _FORMATS]
    words = {file: {*_SEPARATORS.split(file.lower())} for file in data}
    named = [file for file in data if words[file] & _SPLIT_WORDS.get(split, set())]
    if named or split != "train":
        return named
    # where no name says anything, all of it is for training
    return [] if any(words[file] & _ALL_WORDS for file in data) else data


def _of_common_format(names: Iterable[str]) -> list[str]:
    """The files that are read: those of the most common format (datasets/load.py:202)."""
    suffixes = {name: reading.data_suffix(Path(name)) for name in names}
    counts = Counter(suffix for suffix in suffixes.values() if suffix in _FORMATS)
    if not counts:
        return []

    def rank(suffix: str) -> tuple[int, int]:
        place = _PREFERRED.index(suffix) if suffix in _PREFERRED else len(_PREFERRED)
        return counts[suffix], -place

    module = _FORMATS[max(counts, key=rank)]
    return [name for name, suffix in suffixes.items() if _FORMATS.get(suffix) == module]
