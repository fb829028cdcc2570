"""The few facts that lists need of every run -> `RunSummary`, cached in one file.

Reading ten thousand manifests takes ten seconds, reading their summaries a tenth of one. A summary
is valid while its manifest has the same inode, time and size.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher import files
from launcher.lazy_dataclass import dataclass
from launcher.paths import resolve_path
from launcher.runs.record import Manifest

MANIFEST = "run.json"
_VERSION = 1
_FIELDS = (
    "stage",
    "backend",
    "cwd",
    "output",
    "canonical_output",
    "requested_output",
    "model",
    "card",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Part of a manifest. `written` is its modification time in seconds since the epoch.

    `output` is as the manifest has it; `canonical_output` had its links resolved when the summary
    was made. `model` is the argument `model_name_or_path`, `card` the first GPU.
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


def summarize_runs(paths: Iterable[Path], cache_file: Path) -> list[RunSummary]:
    """The summaries of the run folders that have a manifest; new ones go into `cache_file`."""
    cached = _read_cache(cache_file)
    summaries = []
    added: dict[str, object] = {}
    for path in paths:
        status = _stat_manifest(path)
        if status is None:
            continue
        stamp = [status.st_ino, status.st_mtime_ns, status.st_size]
        values = _validate_row(cached.get(str(path)), stamp)
        if values is None:
            values = _read_values(path)
            added[str(path)] = [stamp, values]
        fields = dict(zip(_FIELDS, values, strict=True))
        summaries.append(RunSummary(path=path, written=status.st_mtime, **fields))
    if added:
        _write_cache(cache_file, cached, added)
    return summaries


def list_kept_paths(cache_file: Path) -> list[Path]:
    """The run folders that have a cached summary; some may be gone."""
    return [Path(name) for name in _read_cache(cache_file)]


def _stat_manifest(path: Path) -> os.stat_result | None:
    try:
        status = os.stat(f"{path}/{MANIFEST}")
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status


def _read_cache(cache_file: Path) -> Mapping[str, object]:
    content = files.read_json(cache_file)
    runs = content.get("runs")
    if content.get("version") != _VERSION or not isinstance(runs, dict):
        return {}
    return runs


def _validate_row(row: object, stamp: list[int]) -> list[str | None] | None:
    """The values of a cached row; None if it is damaged or of another manifest."""
    if not isinstance(row, list) or len(row) != 2 or row[0] != stamp:
        return None
    values = row[1]
    if not isinstance(values, list) or len(values) != len(_FIELDS):
        return None
    for value in values:
        if value is not None and not isinstance(value, str):
            return None
    return values


def _read_values(path: Path) -> list[str | None]:
    """The values of `_FIELDS`, from the manifest."""
    manifest = Manifest(_read_content(path / MANIFEST))
    output = manifest.text("output")
    canonical_output = None
    if output is not None:
        canonical_output = str(resolve_path(Path(output)))
    model = manifest.argument("model_name_or_path")
    if not isinstance(model, str):
        model = None
    card = None
    if manifest.cards:
        card = str(manifest.cards[0])
    return [
        manifest.stage,
        manifest.backend,
        manifest.cwd,
        output,
        canonical_output,
        manifest.requested_output,
        model,
        card,
    ]


def _read_content(path: Path) -> dict[str, Any]:
    try:
        raw = files.read_bytes(path)
    except OSError:
        return {}
    try:
        # faster than `files.parse_line`: no number of it is used, so their length does not matter
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return files.parse_line(raw, files.MAX_BYTES)
    if not isinstance(content, dict):
        return {}
    return content


def _write_cache(
    cache_file: Path, cached: Mapping[str, object], added: Mapping[str, object]
) -> None:
    rows: dict[str, object] = {}
    for name, row in cached.items():
        if os.path.isdir(name):
            rows[name] = row
    rows.update(added)
    raw = json.dumps({"version": _VERSION, "runs": rows}).encode()
    # without a writable state folder the next command reads the manifests again
    with contextlib.suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(cache_file, raw, mode=0o600)
