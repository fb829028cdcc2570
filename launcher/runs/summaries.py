"""What is asked of all runs at once -> `RunSummary`: out of their manifests, read once and kept in one file.

Ten thousand manifests take ten seconds to read; the file of their summaries takes a tenth of one. A summary
counts as long as its manifest is the same file, unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import files
from launcher.paths import canonical
from launcher.runs.record import Manifest

MANIFEST = "run.json"
_VERSION = 1
_FIELDS = ("stage", "backend", "cwd", "output", "canonical_output", "requested_output", "model", "card")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Some of a manifest; `written` is when it was, in seconds since the epoch.

    `output` is as the manifest has it, `canonical_output` without links as they were then. `model` is the argument
    `model_name_or_path`, `card` the first GPU.
    """

    path: Path
    written: float
    stage: str | None = None
    backend: str | None = None
    cwd: str | None = None
    output: str | None = None
    canonical_output: str | None = None
    requested_output: str | None = None
    model: str | None = None
    card: str | None = None


def of_runs(paths: Iterable[Path], kept_in: Path) -> list[RunSummary]:
    """The summaries of those run folders that have a manifest; what is new is kept in the file `kept_in`."""
    kept = _read(kept_in)
    summaries: list[RunSummary] = []
    new: dict[str, Any] = {}
    for path in paths:
        status = _status(path)
        if status is None:
            continue
        name = str(path)
        stamp = [status.st_ino, status.st_mtime_ns, status.st_size]
        fields = _fields_of(kept.get(name), stamp)
        if fields is None:
            fields = _read_fields(path)
            new[name] = [stamp, fields]
        summaries.append(RunSummary(path=path, written=status.st_mtime, **dict(zip(_FIELDS, fields, strict=True))))
    if new:
        _write(kept_in, kept, new)
    return summaries


def kept_paths(kept_in: Path) -> list[Path]:
    """The run folders whose summaries are kept; some may be gone."""
    return [Path(name) for name in _read(kept_in)]


def _status(path: Path) -> os.stat_result | None:
    try:
        status = os.stat(f"{path}/{MANIFEST}")
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _read(kept_in: Path) -> Mapping[str, Any]:
    content = files.read_json(kept_in)
    runs = content.get("runs")
    if content.get("version") != _VERSION or not isinstance(runs, dict):
        return {}
    return runs


def _fields_of(row: object, stamp: list[int]) -> list[str | None] | None:
    """What is kept of a run; None where it is of another manifest, or is no such row."""
    if not isinstance(row, list) or len(row) != 2 or row[0] != stamp:
        return None
    fields = row[1]
    if not isinstance(fields, list) or len(fields) != len(_FIELDS):
        return None
    return fields if all(value is None or isinstance(value, str) for value in fields) else None


def _read_fields(path: Path) -> list[str | None]:
    manifest = Manifest(_content(path / MANIFEST))
    output = manifest.text("output")
    model = manifest.argument("model_name_or_path")
    cards = manifest.cards
    return [
        manifest.stage,
        manifest.backend,
        manifest.cwd,
        output,
        None if output is None else str(canonical(Path(output))),
        manifest.requested_output,
        model if isinstance(model, str) else None,
        str(cards[0]) if cards else None,
    ]


def _content(path: Path) -> dict[str, Any]:
    try:
        raw = files.read_bytes(path)
    except OSError:
        return {}
    try:
        # no number of it is used: that none is too long need not be looked for
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return files.parse_line(raw, files.MAX_BYTES)
    return content if isinstance(content, dict) else {}


def _write(kept_in: Path, kept: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    rows = {name: row for name, row in kept.items() if name not in new and os.path.isdir(name)}
    rows.update(new)
    raw = json.dumps({"version": _VERSION, "runs": rows}).encode()
    # a state folder that cannot be written costs the next command some time
    with contextlib.suppress(OSError):
        kept_in.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(kept_in, raw, mode=0o600)
