"""Which set of a dataset cache folder open-instruct would take: by what its own key is made of.

Upstream writes beside each set what its key was made of (`config.json`,
dataset_transformation.py::LocalDatasetTransformationCache.save_config[= os.path.join]). Whoever holds that against the
arguments knows, without starting anything, whether a run would find its set. The rest (contents of local data, code,
versions) is in the name of the folder.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import model_config
from launcher.cache import folders, keys
from launcher.paths import exists, is_dir, is_file
from launcher.plan.plan import Plan
from launcher.runs import rundir

# dataset_transformation.py::TokenizerConfig.tokenizer[filenames=]
_HASHED = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "vocab.json")
_TOKENIZER_FIELDS = (*keys.TOKENIZER_KEY, "use_slow_tokenizer", "tokenizer_name")
# dataset_transformation.py::load_dataset_configs[dataset_revision]
_REVISION = "main"


def hit(folder: Path, plan: Plan) -> Path | None:
    expected = key(plan)
    found = folders.opened(folder)
    names = found.entries() if found is not None else ()
    return next((folder / name for name in names if _alike(expected, folder / name)), None)


def _alike(expected: Mapping[str, Any], entry: Path) -> bool:
    config = rundir.read_json(entry / "config.json")
    tokenizer, data = config.get("tokenizer_config"), config.get("dataset_configs")
    if not isinstance(tokenizer, dict) or not isinstance(data, list) or len(data) != len(expected["data"]):
        return False
    # upstream leaves out of its key what is None
    pairs = zip(data, expected["data"], strict=True)
    return all(tokenizer.get(name, value) == value for name, value in expected["tokenizer"].items()) and all(
        there.get(name) == value for there, requested in pairs for name, value in requested.items()
    )


def key(plan: Plan) -> dict[str, Any]:
    """What upstream's key would be made of now, as it stands in `config.json`."""
    values = plan.values
    prefix = "dataset_" if "dataset_local_cache_dir" in values else ""
    name = values.get("tokenizer_name_or_path") or values.get("model_name_or_path")
    revision = values.get("tokenizer_revision") or values.get("model_revision")
    tokenizer = {
        **{field: values[field] for field in _TOKENIZER_FIELDS if field in values},
        "tokenizer_name_or_path": name,
        "tokenizer_revision": revision,
        "tokenizer_files_hash": [_hash(str(name), revision, file) for file in _HASHED],
    }
    listed = values.get(plan.stage.entry.names.data)
    pairs = listed if isinstance(listed, list) else []
    splits = list(values.get(f"{prefix}mixer_list_splits") or ["train"])
    phase = plan.stage.entry.tokenising
    columns = values.get(f"{prefix}target_columns") if phase is None else list(phase.columns)
    data = [
        {
            "dataset_name": pairs[at],
            "dataset_split": splits[0] if len(splits) == 1 else splits[at],
            "dataset_revision": _REVISION,
            "transform_fn": values.get(f"{prefix}transform_fn"),
            "transform_fn_args": [{"max_seq_length": values.get("max_seq_length")}, {}],
            "target_columns": columns,
            "frac_or_num_samples": float(amount) if "." in (amount := str(pairs[at + 1])) else int(amount),
            "dataset_commit_hash": _commit(str(pairs[at])),
        }
        for at in range(0, len(pairs) - 1, 2)
        if len(splits) == 1 or at < len(splits)
    ]
    plain: dict[str, Any] = json.loads(json.dumps({"tokenizer": tokenizer, "data": data}, default=str))
    return plain


def _commit(name: str) -> str | None:
    """The commit of a data set on the hub, as upstream reads it: where its README.md is in the cache."""
    if exists(name) or model_config.is_path(name):
        return None
    snapshot = model_config.snapshot(name, os.environ, _REVISION, "datasets")
    # the folder is named by the commit
    return snapshot.name if snapshot is not None and is_file(snapshot / "README.md") else None


def _hash(name: str, revision: str | None, file: str) -> str:
    local = Path(name)
    folder = local if is_dir(local) else model_config.snapshot(name, os.environ, revision)
    if folder is None or not is_file(folder / file):
        return f"{file} not found"
    return hashlib.sha256((folder / file).read_bytes()).hexdigest()
