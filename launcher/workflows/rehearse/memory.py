"""Rehearsals remembered by content: the same stage, model, data and packages are not rehearsed twice."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts.fingerprint import cache_home
from launcher.artifacts.model_config import commit
from launcher.dataset import mixture
from launcher.files import read_json, write_json
from launcher.machine.python import DECISIVE, Trainer
from launcher.paths import is_dir, is_file
from launcher.stage.stage import Judged
from launcher.upstream.trainers import entry_of
from launcher.workflows.rehearse import arguments

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FORM = 1
KEPT = 200
_HEAD = 1 << 20


def recall(judged: Judged, trainer: Trainer) -> dict[str, Any] | None:
    """What a rehearsal of the same found; None where there was none."""
    known = read_json(_path(judged, trainer))
    return known if known.get("form") == FORM else None


def keep(judged: Judged, trainer: Trainer, found: Mapping[str, Any]) -> None:
    """Remember a rehearsal; the oldest make room. Where nothing can be written it is only not remembered."""
    path = _path(judged, trainer)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"form": FORM, **found})
        known = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in known[:-KEPT]:
            old.unlink(missing_ok=True)


def _path(judged: Judged, trainer: Trainer) -> Path:
    parts = json.dumps(list(_parts(judged, trainer)), sort_keys=True, default=str)
    return cache_home() / "rehearsals" / f"{hashlib.sha256(parts.encode()).hexdigest()[:32]}.json"


def _parts(judged: Judged, trainer: Trainer) -> Iterator[Any]:
    assert judged.schema is not None and judged.upstream is not None and judged.options is not None
    entry = entry_of(judged.schema)
    whole = arguments.of_stage(judged.config.args, judged.options, judged.schema, entry)
    yield [judged.schema.key, judged.upstream.as_json()]
    yield {name: trainer.packages.get(name) for name in (*DECISIVE, "safetensors")}
    # what is left out of the steps is parsed all the same
    yield [dict(judged.config.args), whole.added, whole.left_out]
    yield [[one.code, one.key] for one in judged.findings if one.severity == "error"]
    yield _state(Path(__file__).parent)
    for value in _texts(whole.given):
        if _HUB_NAME.fullmatch(value):
            yield [commit(value, os.environ, kind=kind) for kind in ("models", "datasets")]
        yield _state(Path(os.path.expanduser(value)))
    mixed = mixture.of_values(whole.given, os.environ)
    for name in [] if mixed is None else mixed.names():
        yield _state(Path(name))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for below in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(below)


def _state(path: Path) -> Any:
    """Of a local file its head, size and time of writing; of a folder those of the files in it."""
    with contextlib.suppress(OSError, ValueError):
        if is_dir(path):
            return [_state(one) for one in sorted(path.rglob("*"))[:1000] if is_file(one)]
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(_HEAD)).hexdigest()
        return [str(path), head, path.stat().st_size, path.stat().st_mtime_ns]
    return None
