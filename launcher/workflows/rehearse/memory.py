"""Rehearsals remembered by content: stage, model, data and packages."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.artifacts.fingerprint import cache_home
from launcher.artifacts.model_config import find_commit, is_hub_name
from launcher.dataset import mixture
from launcher.errors import select_errors
from launcher.files import read_json, write_json
from launcher.machine import codec
from launcher.machine.python import DECISIVE, Trainer
from launcher.paths import is_dir, is_file
from launcher.stage.stage import Judged
from launcher.upstream.trainers import find_entry
from launcher.workflows.rehearse import arguments
from launcher.workflows.rehearse.result import Rehearsal

_MOST_FILES = 1000


def recall(judged: Judged, trainer: Trainer) -> Rehearsal | None:
    """The result of the same rehearsal; None where there was none."""
    with contextlib.suppress(codec.Misfit):
        return codec.read_record(Rehearsal, read_json(_compute_path(judged, trainer)))
    return None


def keep(judged: Judged, trainer: Trainer, result: Rehearsal) -> None:
    """Remember a rehearsal if the cache can be written."""
    path = _compute_path(judged, trainer)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(result))


def _compute_path(judged: Judged, trainer: Trainer) -> Path:
    parts = json.dumps(list(_list_dependencies(judged, trainer)), sort_keys=True, default=str)
    name = hashlib.sha256(parts.encode()).hexdigest()[:32]
    return cache_home() / "rehearsals" / f"{name}.json"


def _list_dependencies(judged: Judged, trainer: Trainer) -> Iterator[Any]:
    """All that a rehearsal depends on, including this package."""
    schema = judged.schema
    assert schema is not None
    assert judged.upstream is not None
    assert judged.options is not None
    args = judged.config.args
    whole = arguments.fit_for_cpu(args, judged.options, schema, find_entry(schema))
    yield [schema.key, judged.upstream.as_json()]
    packages = (*DECISIVE, "safetensors")
    yield {name: trainer.packages.get(name) for name in packages}
    # what is left out of the steps is parsed all the same
    yield [dict(args), whole.added, whole.left_out]
    yield [[finding.code, finding.key] for finding in select_errors(judged.findings)]
    yield _read_file_state(Path(__file__).parent)
    for text in _walk_texts(whole.kept):
        if is_hub_name(text):
            yield [find_commit(text, os.environ, kind=kind) for kind in ("models", "datasets")]
        yield _read_file_state(Path(os.path.expanduser(text)))
    mixed = mixture.read_mixture(whole.kept, os.environ)
    if mixed is not None:
        yield [_read_file_state(Path(name)) for name in mixed.names()]


def _walk_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for below in value:
            yield from _walk_texts(below)
    elif isinstance(value, str):
        yield value


def _read_file_state(path: Path) -> Any:
    """What every write to a file changes; for a folder, that of each file in it."""
    with contextlib.suppress(OSError, ValueError):
        if is_dir(path):
            below = sorted(path.rglob("*"))[:_MOST_FILES]
            return [_read_file_state(file) for file in below if is_file(file)]
        status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return [str(path), status.st_ino, status.st_size, *times]
    return None
