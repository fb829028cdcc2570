"""All runs, one line each: state, step, loss, age."""

from __future__ import annotations

import datetime
from typing import Any

from launcher import rundir, runner
from launcher.rundir import RunFolder
from launcher.view import Progress, Tail, clock

COLUMNS = ("run", "stage", "state", "step", "loss", "tokens/s", "age", "gpus", "output")


def row(folder: RunFolder) -> dict[str, Any]:
    """One run for `launch runs`."""
    manifest = rundir.read_manifest(folder)
    verdict = rundir.read_json(folder.verdict)
    progress = Progress(total=manifest.get("plan", {}).get("steps"))
    last_steps(folder, progress)
    rate = progress.tokens_per_second
    return {
        "run": folder.path.name,
        "path": str(folder.path),
        "stage": manifest.get("stage"),
        "state": state(folder),
        "verdict": verdict.get("status"),
        "step": progress.step,
        "steps": progress.total,
        "loss": None if progress.loss is None else round(progress.loss, 4),
        "tokens/s": None if rate is None else round(rate),
        "age": age(manifest.get("created")),
        "gpus": manifest.get("plan", {}).get("gpus"),
        "output": manifest.get("output"),
    }


def state(folder: RunFolder) -> str:
    """running, finished, failed, stopped, or lost: ended without a record of how."""
    if runner.alive(folder.path):
        return "running"
    ended = rundir.read_json(folder.exit(max(1, folder.attempts())))
    if not ended:
        return "lost"
    if ended.get("stopped") is not None:
        return "stopped"
    return "finished" if ended.get("returncode") == 0 else "failed"


def last_steps(folder: RunFolder, progress: Progress, window: int = 65536) -> None:
    """Fill in the progress from the end of rank 0's record."""
    record = folder.probe / "rank-0.jsonl"
    size = record.stat().st_size if record.exists() else 0
    for raw in Tail(record, offset=max(0, size - window)).read():
        event = rundir.parse_line(raw)
        if event:
            progress.event(event)


def age(created: object) -> str | None:
    """Time since the start, short."""
    try:
        begun = datetime.datetime.fromisoformat(str(created))
    except ValueError:
        return None
    passed = datetime.datetime.now(datetime.UTC) - begun
    return f"{passed.days}d" if passed.days else clock(max(0.0, passed.total_seconds()))
