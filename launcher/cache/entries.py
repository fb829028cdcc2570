"""Which set of a dataset cache folder open-instruct would take, by what its own key is made of.

Upstream writes beside each set what its key was made of (`config.json`,
dataset_transformation.py::LocalDatasetTransformationCache.save_config[= os.path.join]). Comparing
that with the arguments tells, without starting anything, whether a run would find its set. The rest
(contents of local data, code, versions) is in the name of the folder.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.artifacts import model_config
from launcher.cache import folders, keys
from launcher.lazy_dataclass import dataclass
from launcher.paths import exists, is_dir, is_file
from launcher.plan.plan import Plan
from launcher.runs import rundir
from launcher.upstream.schema import Values

# dataset_transformation.py::TokenizerConfig.tokenizer[filenames=]
_HASHED = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "vocab.json")
_TOKENIZER_FIELDS = (*keys.TOKENIZER_KEY, "use_slow_tokenizer", "tokenizer_name")
# dataset_transformation.py::load_dataset_configs[dataset_revision]
_REVISION = "main"


@dataclass(frozen=True, slots=True)
class EntryKey:
    """What `config.json` of an entry holds of the tokenizer, and of each data set."""

    tokenizer: Mapping[str, Any]
    data: Sequence[Mapping[str, Any]]


def find_hit(folder: Path, plan: Plan) -> Path | None:
    """The complete entry that a run would take; None if there is none."""
    cache = folders.open_folder(folder)
    if cache is None:
        return None
    expected = compute_key(plan)
    for name in cache.entries():
        if _matches(rundir.read_json(folder / name / "config.json"), expected):
            return folder / name
    return None


def _matches(config: Mapping[str, object], expected: EntryKey) -> bool:
    tokenizer = config.get("tokenizer_config")
    data = config.get("dataset_configs")
    if not isinstance(tokenizer, dict) or not isinstance(data, list):
        return False
    # upstream leaves None out of its key
    for name, value in expected.tokenizer.items():
        if tokenizer.get(name, value) != value:
            return False
    if len(data) != len(expected.data):
        return False
    for entry, requested in zip(data, expected.data, strict=True):
        for name, value in requested.items():
            if entry.get(name) != value:
                return False
    return True


def compute_key(plan: Plan) -> EntryKey:
    """What upstream's key would be made of now."""
    tokenizer = _describe_tokenizer(plan.values)
    data = list(_describe_data(plan))
    # as it is read back from `config.json`
    plain = json.loads(json.dumps([tokenizer, data], default=str))
    return EntryKey(*plain)


def _describe_tokenizer(values: Values) -> dict[str, object]:
    tokenizer = {field: values[field] for field in _TOKENIZER_FIELDS if field in values}
    name = values.get("tokenizer_name_or_path") or values.get("model_name_or_path")
    revision = values.get("tokenizer_revision") or values.get("model_revision")
    tokenizer["tokenizer_name_or_path"] = name
    tokenizer["tokenizer_revision"] = revision
    tokenizer["tokenizer_files_hash"] = [_hash_file(str(name), revision, file) for file in _HASHED]
    return tokenizer


def _describe_data(plan: Plan) -> Iterator[dict[str, object]]:
    """What upstream's key holds of each data set of a mix."""
    values = plan.values
    entry = plan.stage.entry
    prefix = "dataset_" if "dataset_local_cache_dir" in values else ""
    columns = values.get(f"{prefix}target_columns")
    if entry.tokenising is not None:
        columns = list(entry.tokenising.columns)
    words = values.get(entry.names.data)
    if not isinstance(words, list):
        return
    splits = list(values.get(f"{prefix}mixer_list_splits") or ["train"])
    if len(splits) == 1:
        splits *= len(words)
    # words and splits have a place for each name and one for its amount
    for at in range(0, min(len(words) - 1, len(splits)), 2):
        name = words[at]
        yield {
            "dataset_name": name,
            "dataset_split": splits[at],
            "dataset_revision": _REVISION,
            "transform_fn": values.get(f"{prefix}transform_fn"),
            "transform_fn_args": [{"max_seq_length": values.get("max_seq_length")}, {}],
            "target_columns": columns,
            "frac_or_num_samples": _parse_amount(str(words[at + 1])),
            "dataset_commit_hash": _find_commit(str(name)),
        }


def _parse_amount(text: str) -> float:
    """A share of the rows has a point, a number of rows has none."""
    if "." in text:
        return float(text)
    return int(text)


def _find_commit(name: str) -> str | None:
    """The commit of a data set on the hub; upstream knows it if its README.md is in the cache."""
    if exists(name) or model_config.is_path(name):
        return None
    snapshot = model_config.find_snapshot(name, os.environ, _REVISION, "datasets")
    if snapshot is None or not is_file(snapshot / "README.md"):
        return None
    # the folder is named by the commit
    return snapshot.name


def _hash_file(name: str, revision: str | None, file: str) -> str:
    folder: Path | None = Path(name)
    if not is_dir(name):
        folder = model_config.find_snapshot(name, os.environ, revision)
    if folder is None or not is_file(folder / file):
        return f"{file} not found"
    return hashlib.sha256((folder / file).read_bytes()).hexdigest()
