"""What a stage file names as data -> `Source`: the files of one split, here or in the hub's cache.

Follows datasets/data_files.py and datasets/load.py: which files of a folder are a split, by the
folder's own description, or by their names; and which of them are read, by the most common format.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.artifacts import model_config
from launcher.dataset import reading
from launcher.files import read_bytes
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_file

_MOST_ENTRIES = 20_000  # entries of a folder to look at; a larger one is not judged

# datasets/data_files.py::[SPLIT_KEYWORDS =]: words in the names of files and folders, in the order
# in which they are tried
_SPLIT_WORDS = {
    "train": frozenset({"train", "training"}),
    "validation": frozenset({"validation", "valid", "dev", "val"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
_SEPARATORS = re.compile(r"[-._ 0-9]")
# datasets/data_files.py::[SPLIT_PATTERN_SHARDED =]: with one such file, these alone are read
_SHARD = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*\Z")
# datasets/data_files.py::[FILES_TO_IGNORE]
_IGNORED = frozenset(
    """
    README.md config.json dataset_info.json dataset_infos.json dummy_data.zip dataset_dict.json
    """.split()
)
# datasets/load.py::dataset_module_factory[data_files=data_files #3]: the file of one data set; a
# folder of several splits is read as any other
SAVED_TO_DISK = "state.json"

# datasets/packaged_modules/__init__.py::[_EXTENSION_TO_MODULE: dict], as far as launch reads them
_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
# the most usual of those that it does not read
_OTHER_FORMATS = frozenset(
    """
    .geoparquet .gpq .conll .conllu .tar .xml .hdf5 .h5 .eval .toml .md .lance .tsfile .vortex .zip
    .pdf .png .jpg .jpeg .webp .gif .bmp .tif .tiff .svg .wav .mp3 .flac .ogg .opus .m4a .mp4 .mkv
    .avi .mov .webm .nii .pdb .cif .fa .fasta .fastq .fq .gb
    """.split()
)
# datasets/load.py::infer_module_for_data_files_list.sort_key[ext == #1]: of formats that are as
# common, the last of these
_PREFERRED = (".csv", ".json", ".jsonl", ".arrow", ".vortex", ".lance", ".parquet")
# files that describe images and sounds: they count where there is nothing else
_METADATA = re.compile(r"metadata\.(jsonl|csv|parquet)\Z")

# Names that `load_dataset` takes for a reader
# (datasets/packaged_modules/__init__.py::[_PACKAGED_DATASETS_MODULES =]).
LOADERS = frozenset(
    """
    csv json pandas parquet arrow text conll imagefolder audiofolder videofolder meshfolder
    pdffolder niftifolder webdataset xml hdf5 eval lance tsfile iceberg vortex mmcif pdb genbank
    fasta fastq harbor
    """.split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of one split of a data set.

    `beside` are the files of its other splits, which the library reads too. Without files, `unseen`
    says why its rows cannot be looked at, or `fault` why no trainer can read them and `remedy` what
    to do about it; `missing` are paths that are not here.
    """

    name: str
    files: tuple[Path, ...] = ()
    beside: tuple[Path, ...] = ()
    unseen: str | None = None
    fault: str | None = None
    remedy: str | None = None
    missing: tuple[str, ...] = ()


class _NoFiles(Exception):
    """A data set whose files cannot be told; `source` says why, in the words of a `Source`."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source


def _build_unseen(reason: str, missing: Sequence[str] = ()) -> _NoFiles:
    """The error for rows that launch cannot look at."""
    return _NoFiles(Source(name="", unseen=reason, missing=tuple(missing)))


def _build_refusal(fault: str, remedy: str) -> _NoFiles:
    """The error for rows that the library refuses."""
    return _NoFiles(Source(name="", fault=fault, remedy=remedy))


def _build_source(name: str, splits: dict[str, list[Path]], split: str) -> Source:
    files = tuple(splits.pop(split))
    beside = tuple(file for others in splits.values() for file in others)
    return Source(name=name, files=files, beside=beside)


def find_reader(path: Path) -> str | None:
    """The reader of `datasets` for a file, such as `json`; None where launch knows none."""
    kind = _FORMATS.get(reading.find_data_suffix(path))
    if kind is None:
        return None
    return _name_reader(kind)


def open_file_source(name: str) -> Source:
    path = Path(name)
    if not os.path.isfile(path):
        return Source(name=name, unseen="it is not here")
    return Source(name=name, files=(path,))


def find_named_source(
    name: str, split: str, config: str | None, environ: Mapping[str, str]
) -> Source:
    """The source of `load_dataset(name, config)[split]`: a folder, or a set in the hub's cache."""
    folder = Path(name)
    if not os.path.isdir(folder):
        if model_config.is_path(name) or name.count("/") != 1:
            return Source(name=name, unseen="it is not here")
        cached = _find_cached(name, environ)
        if cached is None:
            return Source(name=name, unseen="it is not downloaded yet")
        folder = cached
    elif os.path.exists(folder / SAVED_TO_DISK):
        fault = "was written by `save_to_disk`, which `load_dataset` refuses"
        remedy = (
            "write it as Parquet (`Dataset.to_parquet`) or JSON lines (`to_json`), "
            "and name that folder"
        )
        return Source(name=name, fault=fault, remedy=remedy)
    elif is_file(folder / f"{folder.name}.py"):
        script = f"{folder.name}.py"
        fault = f"holds {script}, which `load_dataset` takes for a script of its own, and refuses"
        return Source(name=name, fault=fault, remedy="rename that file, or the folder")
    try:
        splits = _find_files_of_splits(folder, split, config)
    except _NoFiles as error:
        if error.source.fault is not None and not os.path.isdir(name):
            # of a data set of the hub, only a part may be in the cache
            reason = f"as far as it is downloaded, it {error.source.fault}"
            return Source(name=name, unseen=reason)
        return replace(error.source, name=name)
    return _build_source(name, _join_folder(folder, splits), split)


def _find_cached(name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of a data set in the hub's cache."""
    folder = model_config.find_snapshot(name, environ, kind="datasets")
    if folder is None or not os.path.isdir(folder):
        return None
    return folder


def _join_folder(folder: Path, splits: Mapping[str, Sequence[str]]) -> dict[str, list[Path]]:
    return {split: [folder / file for file in files] for split, files in splits.items()}


def split_names(name: str, config: str | None) -> tuple[str, ...] | None:
    """The splits that `load_dataset(name, config)` makes of a folder; None if unknown."""
    folder = Path(name)
    if not os.path.isdir(folder) or os.path.exists(folder / SAVED_TO_DISK):
        return None
    try:
        splits = _find_splits(folder, config)
    except _NoFiles:
        return None
    names = [split for split, files in splits.items() if _find_common_format(files) is not None]
    return tuple(names) or None


def find_set_source(
    path: str,
    split: str,
    config: str | None,
    environ: Mapping[str, str],
    *,
    data_dir: str | None = None,
    data_files: Any = None,
) -> Source:
    """The source of `load_dataset(path, config, data_dir, data_files)[split]`; `path` may name a
    reader.
    """
    if data_dir is None and data_files is None and path not in LOADERS:
        return find_named_source(path, split, config, environ)
    folder = _find_base(path, data_dir, environ)
    if folder is None:
        source = Source(name=path, unseen="it is not here")
        if model_config.is_path(path):
            return replace(source, missing=(path,))
        return source
    if split == "all":
        return Source(name=path, unseen="it is read of all splits")
    if data_files is None and not os.path.isdir(folder):
        return Source(name=path, unseen=f"there is no folder {folder}", missing=(str(folder),))
    try:
        splits = _find_files_of_set(path, folder, data_files, split)
    except _NoFiles as error:
        return replace(error.source, name=path)
    return _build_source(path, splits, split)


def _find_base(path: str, data_dir: str | None, environ: Mapping[str, str]) -> Path | None:
    """The folder at which the names of files start; None where it is not on this machine."""
    below = Path(os.path.expanduser(data_dir or ""))
    if path in LOADERS:
        return below
    if os.path.isdir(path):
        return Path(path) / below
    if model_config.is_path(path) or path.count("/") != 1:
        return None
    cached = _find_cached(path, environ)
    if cached is None:
        return None
    return cached / below


def _find_files_of_set(
    path: str, folder: Path, data_files: Any, split: str
) -> dict[str, list[Path]]:
    """The files of each split. Raises _NoFiles, also without `split`."""
    if data_files is None:
        splits = _join_folder(folder, _split_by_name(_list_names_below(folder)))
    else:
        splits = {}
        for name, patterns in _read_patterns(data_files).items():
            splits[name] = _find_named_files(folder, patterns)
    if split not in splits:
        there = ", ".join(splits)
        fault = f"has no split {split}: `data_files` and the names of the files make them {there}"
        remedy = "name a split that there is, or make `data_files` a mapping of splits to files"
        raise _build_refusal(fault, remedy)
    for name, files in splits.items():
        if path in LOADERS:
            _require_reader(files, path)
        else:
            names = [str(file) for file in files]
            selected = _select_files_of_format(names, _find_common_format(names))
            splits[name] = [Path(file) for file in selected]
    return splits


def _require_reader(files: Iterable[Path], reader: str) -> None:
    """Raises _NoFiles where the reader has a way of its own with a file."""
    for file in files:
        suffix = reading.find_data_suffix(file)
        if suffix not in reading.READABLE or _name_reader(_FORMATS[suffix]) != reader:
            raise _build_unseen(f"launch does not read {file} as `{reader}` does")


def _find_named_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """datasets/data_files.py::resolve_pattern[if is_relative_path]: the files that patterns
    name, each relative to `folder`. Raises _NoFiles.
    """
    named: list[Path] = []
    missing: list[str] = []
    for pattern in patterns:
        if "://" in pattern or "::" in pattern:
            raise _build_unseen(f"{pattern} is not a file of this machine")
        whole = os.path.join(folder, pattern)
        paths = [whole]
        if glob.has_magic(whole):
            paths = sorted(glob.glob(whole, recursive=True))
        files = [Path(path) for path in paths if os.path.isfile(path)]
        files = [file for file in files if file.name not in _IGNORED]
        if not files:
            missing.append(pattern)
        named += files
    if missing:
        raise _build_unseen(f"there is no {', '.join(missing)}", missing)
    return named


def _find_splits(folder: Path, config: str | None) -> dict[str, list[str]]:
    names = _list_names_below(folder)
    if "dataset_infos.json" in os.listdir(folder):
        raise _build_unseen("dataset_infos.json decides how it is read")
    splits = _read_splits_of_card(names, _read_card(folder), config)
    if splits is None:
        return _split_by_name(names)
    return splits


def _find_files_of_splits(folder: Path, split: str, config: str | None) -> dict[str, list[str]]:
    """datasets/load.py::LocalDatasetModuleFactory.get_module: the files of each split.

    Raises _NoFiles, also without `split`.
    """
    splits = _find_splits(folder, config)
    formats: dict[str, str] = {}
    for name, files in splits.items():
        kind = _find_common_format(files)
        if kind is not None:
            formats[name] = kind
    if not formats:
        raise _build_refusal(
            "holds no data files", "write the rows as .jsonl, .csv or .parquet files"
        )
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{name}: {formats.get(name)}" for name in splits)
        fault = f"has splits of different formats ({shown}), which `load_dataset` refuses"
        remedy = "write all splits in one format, or keep them in folders of their own"
        raise _build_refusal(fault, remedy)
    if split not in formats:
        fault = f"has no split {split}: the names of its files make them {', '.join(formats)}"
        raise _build_refusal(fault, f"name the split that there is, or rename a file to {split}")
    return {name: _select_files_of_format(splits[name], kind) for name, kind in formats.items()}


def _list_names_below(folder: Path) -> list[str]:
    """The files below a folder, without hidden ones and those that the library never takes."""
    try:
        below = list(islice(folder.rglob("*"), _MOST_ENTRIES + 1))
        files = [path.relative_to(folder) for path in below if path.is_file()]
    except (OSError, ValueError):
        raise _build_unseen("it cannot be listed") from None
    if len(below) > _MOST_ENTRIES:
        raise _build_unseen("it holds too many files")
    return sorted(str(path) for path in files if not _is_left_out(path))


def _is_left_out(path: Path) -> bool:
    if path.name in _IGNORED:
        return True
    if any(part.startswith(".") for part in path.parts):
        return True
    return any(part.startswith("__") for part in path.parts[:-1])


def _read_card(folder: Path) -> Mapping[str, Any]:
    """What the folder's README.md says in front of its text, and .huggingface.yaml."""
    import yaml

    card: dict[str, Any] = {}
    text = _read_text(folder / "README.md").replace("\r\n", "\n")
    front = re.match(r"\s*---[^\S\n]*\n(.*?)\n---[^\S\n]*(\n|\Z)", text, re.DOTALL)
    parts = [_read_text(folder / ".huggingface.yaml")]
    if front is not None:
        parts.insert(0, front[1])
    for part in parts:
        try:
            content = yaml.safe_load(part)
        except (yaml.YAMLError, RecursionError, ValueError):
            fault = "has a README.md whose head is not YAML, which `load_dataset` refuses"
            raise _build_refusal(fault, "correct what stands between the lines `---`") from None
        if isinstance(content, dict):
            card.update(content)
    return card


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, 2**20).decode(errors="replace")
    except OSError:
        return ""


def _read_splits_of_card(
    names: Sequence[str], card: Mapping[str, Any], config: str | None
) -> dict[str, list[str]] | None:
    """The files of each split as a card lists them; None where it lists none."""
    configs = card.get("configs")
    if not isinstance(configs, list) or not configs:
        if config is not None:
            raise _build_unseen(f"its configuration {config} is not described here")
        return None
    data_files = _choose_config(configs, config).get("data_files")
    if data_files is None:
        raise _build_unseen("its README.md describes its files in another way")
    splits: dict[str, list[str]] = {}
    for split, patterns in _read_patterns(data_files).items():
        splits[split] = [file for file in names if _matches_any(file, patterns)]
        if not splits[split]:
            fault = f"describes files in its README.md that are not there: {', '.join(patterns)}"
            raise _build_refusal(fault, "correct `data_files` there")
    return splits


def _matches_any(file: str, patterns: Sequence[str]) -> bool:
    return any(_matches(file, pattern) for pattern in patterns)


def _choose_config(configs: Sequence[Any], name: str | None) -> Mapping[str, Any]:
    described = [entry for entry in configs if isinstance(entry, dict)]
    names = [str(entry.get("config_name", "default")) for entry in described]
    if name is not None:
        if name not in names:
            raise _build_unseen(f"its README.md describes no configuration {name}")
        return described[names.index(name)]
    for entry, entry_name in zip(described, names, strict=True):
        if entry.get("default") or entry_name == "default":
            return entry
    if len(described) == 1:
        return described[0]
    fault = f"has the configurations {', '.join(names)}, and none of them is the default"
    remedy = "correct its README.md"
    if names:
        remedy = f"name one: `dataset_config: {names[0]}`"
    raise _build_refusal(fault, remedy)


def _read_patterns(data_files: Any) -> dict[str, list[str]]:
    """The patterns of each split, in each of the forms that a card may give
    (datasets/data_files.py::sanitize_patterns).
    """
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if isinstance(data_files, dict):
        return {str(split): _as_strings(paths) for split, paths in data_files.items()}
    patterns: dict[str, list[str]] = {}
    if not isinstance(data_files, list):
        return patterns
    for entry in data_files:
        if isinstance(entry, dict):
            split = str(entry.get("split"))
            patterns[split] = _as_strings(entry.get("path"))
        else:
            patterns.setdefault("train", []).append(str(entry))
    return patterns


def _as_strings(paths: Any) -> list[str]:
    if isinstance(paths, list):
        return [str(path) for path in paths]
    return [str(paths)]


def _matches(file: str, pattern: str) -> bool:
    """Whether a pattern of the hub names a file: `**` is folders, a star stops at a slash."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    *folders, last = parts or [""]
    regex = ""
    for folder in folders:
        if folder == "**":
            regex += "(?:[^/]+/)*"
        else:
            regex += _translate_part(folder) + "/"
    if last == "**":
        regex += ".+"
    else:
        regex += _translate_part(last)
    try:
        return re.fullmatch(regex, file) is not None
    except re.error:
        return False


def _translate_part(part: str) -> str:
    regex = ""
    for piece in re.split(r"(\*+|\?|\[[^\]]+\])", part):
        if piece.startswith("*"):
            regex += "[^/]*"
        elif piece == "?":
            regex += "[^/]"
        elif piece.startswith("[!") and piece.endswith("]"):
            regex += "[^" + piece[2:]
        elif piece.startswith("[") and piece.endswith("]"):
            regex += piece
        else:
            regex += re.escape(piece)
    return regex


def _split_by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """datasets/data_files.py::[DEFAULT_PATTERNS_SPLIT_IN_FILENAME =],
    datasets/data_files.py::_get_data_files_patterns: shards, then folders, then files that bear the
    name of a split; else all.
    """
    shards: dict[str, list[str]] = {}
    for file in names:
        shard = _SHARD.match(file)
        if shard is not None:
            shards.setdefault(shard["split"], []).append(file)
    if shards:
        return shards
    logs = [file for file in names if file.endswith(".eval")]
    if logs:
        return {"logs": logs}
    tasks = [file for file in names if Path(file).name in ("task.toml", "instruction.md")]
    if tasks:
        return {"test": tasks}
    by_folder: dict[str, list[str]] = {}
    by_file: dict[str, list[str]] = {}
    for split, words in _SPLIT_WORDS.items():
        for file in names:
            *folders, last = file.split("/")
            if any(words.intersection(_SEPARATORS.split(folder)) for folder in folders):
                by_folder.setdefault(split, []).append(file)
            # the last word of a name ends at a separator: `train` alone is none
            if words.intersection(_SEPARATORS.split(last)[:-1]):
                by_file.setdefault(split, []).append(file)
    return by_folder or by_file or {"train": list(names)}


def _split_suffixes(file: str) -> list[str]:
    return [f".{suffix}" for suffix in Path(file).name.split(".")[1:]]


def _find_common_format(files: Iterable[str]) -> str | None:
    """The format of the most common suffix (datasets/load.py::infer_module_for_data_files_list);
    None where no file is data.
    """
    counts: Counter[tuple[bool, str]] = Counter()
    for file in files:
        suffixes = _split_suffixes(file)
        if any(suffix in _FORMATS or suffix in _OTHER_FORMATS for suffix in suffixes):
            is_data = _METADATA.fullmatch(Path(file).name) is None
            counts.update((is_data, suffix.lower()) for suffix in suffixes)

    def rank(entry: tuple[bool, str]) -> tuple[bool, int, int, str]:
        is_data, suffix = entry
        preference = -1
        if suffix in _PREFERRED:
            preference = _PREFERRED.index(suffix)
        return is_data, counts[entry], preference, suffix

    for _, suffix in sorted(counts, key=rank, reverse=True):
        if suffix in _FORMATS:
            return _FORMATS[suffix]
        if suffix in _OTHER_FORMATS:
            return suffix
    return None


def _select_files_of_format(files: Iterable[str], kind: str | None) -> list[str]:
    """The files that are read. Raises _NoFiles where launch does not read them."""
    if kind is None or kind not in _FORMATS.values():
        raise _build_unseen(f"most of its files are {kind}, and they are what is read")
    # a reader takes all its suffixes: that of .csv also .tsv, and .zip
    reader = _name_reader(kind)
    read: list[str] = []
    for file in files:
        suffixes = _split_suffixes(file)
        readers = [_name_reader(_FORMATS.get(suffix, "")) for suffix in suffixes]
        if reader in readers:
            read.append(file)
        elif ".zip" in suffixes:
            raise _build_unseen(f"launch does not look into {file}")
    for file in read:
        if reading.find_data_suffix(Path(file)) not in reading.READABLE:
            raise _build_unseen(f"launch does not read {file}")
    return read


def _name_reader(kind: str) -> str:
    if kind == "tsv":
        return "csv"
    return kind
