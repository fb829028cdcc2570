"""All runs, one line each: state, step, loss, age."""

import contextlib
import datetime
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher import __version__, files
from launcher.config.durations import format_age
from launcher.errors import shorten
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec, process
from launcher.paths import exists
from launcher.report.progress import Progress, find_tracker
from launcher.runs import events, preemption, rundir, runner, slurm
from launcher.runs.record import Manifest, Record
from launcher.runs.rundir import RunFolder
from launcher.verdict import ending, evidence, summary

COLUMNS = (
    "run",
    "stage",
    "state",
    "verdict",
    "step",
    "loss",
    "tokens/s",
    "age",
    "gpus",
    "checkpoint",
    "output",
    "wandb",
)
_STEP = b'"event": "step"'
_CACHE_VERSION = 2
_CACHED_FIELDS = ("created", "backend", "output")
"""What the current columns of a run need of its manifest."""
_SETTLED_S = 2.0
_RECORDED = ("finished", "failed", "stopped", "preempted")
_ENDED = (*_RECORDED, "lost")
_TAIL_WINDOWS = (2**11, 2**16, 2**22)

Row = dict[str, Any]
"""The columns of one run, by name."""


def list_rows(folders: Sequence[RunFolder]) -> list[Row]:
    """The rows of the runs that have begun, oldest first.

    `part_of` is the folder of the pipeline, bench, ladder or tune that a run belongs to.
    """
    campaigns = rundir.map_campaigns(folders)
    cache = _RowCache.load()
    rows = []
    for folder in folders:
        # unreadable records of one run must not end the list of the others
        try:
            row = cache.read_row(folder)
        except Exception as error:
            row = _build_unreadable_row(folder, error)
        if row is not None:
            campaign = campaigns.get(folder.path)
            part_of = None if campaign is None else str(campaign)
            rows.append({**row, "part_of": part_of})
    cache.save()
    return rows


@dataclass(slots=True)
class _RowCache:
    """The rows of runs that are over, in one file: without it, a thousand rows take a second."""

    file: Path
    saved: Record
    added: Record = field(default_factory=Record)

    @classmethod
    def load(cls) -> "_RowCache":
        file = rundir.find_state_folder() / "rows.json"
        return cls(file, Record(rundir.read_json(file)))

    def read_row(self, folder: RunFolder) -> Row | None:
        """The row of a run; None if the run never began."""
        path = str(folder.path)
        stamp = _stamp_folder(folder)
        if stamp is not None:
            entry = self.saved.part(path)
            row = entry.part("row")
            if entry.get("stamp") == stamp and _is_row(row, path):
                manifest = Manifest(entry.part("manifest"))
                return row | _read_current_columns(manifest)
        if not rundir.has_begun(folder):
            return None
        manifest = rundir.read_manifest(folder)
        columns = _read_lasting_columns(folder, manifest)
        is_over = columns["state"] in _RECORDED and not folder.job.exists()
        if stamp is not None and is_over:
            self.added[path] = {
                "stamp": stamp,
                "manifest": {name: manifest.get(name) for name in _CACHED_FIELDS},
                "row": columns,
            }
        return columns | _read_current_columns(manifest)

    def save(self) -> None:
        if not self.added:
            return
        entries = {}
        for path, entry in self.saved.items():
            if os.path.isdir(path):
                entries[path] = entry
        entries |= self.added
        # one line: ten thousand rows take seconds to indent
        text = json.dumps(entries, default=str)
        # without a writable state folder, the next list takes longer
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(self.file, text.encode())


_ROW_KINDS: Mapping[str, Any] = {
    "run": str,
    "path": str,
    "stage": str | None,
    "state": str,
    "verdict": str | None,
    "outcome": str | None,
    "step": int,
    "steps": int | None,
    "loss": float | None,
    "tokens/s": float | None,
    "gpus": int | None,
    "output": str | None,
    "wandb": str | None,
}


def _is_row(cached: Record, path: str) -> bool:
    """Whether a cached row is one of this run, with every value of its type."""
    if cached.keys() != _ROW_KINDS.keys() or cached.get("path") != path:
        return False
    misfit = object()
    for name, kind in _ROW_KINDS.items():
        if codec.fit_value(cached.get(name), kind, misfit) is misfit:
            return False
    return True


def _build_unreadable_row(folder: RunFolder, error: Exception) -> Row:
    """The row of a run whose records cannot be read, with the reason as its outcome."""
    reason = shorten(f"{type(error).__name__}: {error}")
    row: Row = dict.fromkeys(_ROW_KINDS)
    row |= {
        "run": folder.path.name,
        "path": str(folder.path),
        "state": "unknown",
        "step": 0,
        "outcome": f"its records cannot be read: {reason}",
        "age": None,
        "checkpoint": None,
    }
    return row


def _stamp_folder(folder: RunFolder) -> str | None:
    """A text that changes with every file written into a run folder; None while it may change."""
    try:
        changed = folder.path.stat().st_mtime_ns
    except OSError:
        return None
    if time.time() - changed / 1e9 <= _SETTLED_S:
        return None
    return f"{__version__} {_CACHE_VERSION} {changed}"


def group_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by pipeline, bench, ladder or tune, each other run by itself; the newest last."""
    groups: dict[str, list[Row]] = {}
    for row in reversed(rows):
        group = groups.setdefault(row["part_of"] or row["path"], [])
        group.insert(0, row)
    return list(reversed(groups.values()))


def summarize(group: Sequence[Row], *, runs_only: bool = False) -> Row:
    """One line for a group of rows, or with `runs_only` the line of its only run.

    A campaign's folder is named `TIME-KIND-NAME`; its kind stands in the column of stages.
    """
    first = group[0]
    states = [_format_state(row) for row in group]
    if runs_only or first["part_of"] is None:
        return {**first, "state": states[0], "verdict": first["outcome"]}
    name = Path(first["part_of"]).name
    return {
        "run": name,
        "stage": name.partition("-")[2].partition("-")[0],
        "age": first["age"],
        "state": _count_words(states),
        "verdict": _count_words(row["outcome"] for row in group),
    }


def _format_state(row: Row) -> str:
    state = str(row["state"])
    if state == "unknown":
        # nothing in a table explains it
        return "unknown here"
    return state


def _count_words(words: Iterable[str | None]) -> str | None:
    counts = Counter(word for word in words if word is not None)
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or None


def read_row(folder: RunFolder) -> Row:
    manifest = rundir.read_manifest(folder)
    return _read_lasting_columns(folder, manifest) | _read_current_columns(manifest)


def _read_current_columns(manifest: Manifest) -> Row:
    """The columns that depend on the time of the question."""
    checkpoint = None
    if manifest.output is not None and exists(manifest.output):
        # imported here: it is slow, and without an output there are no checkpoints
        from launcher.artifacts import checkpoints

        written = checkpoints.find_last_write(str(manifest.backend), manifest.output)
        if written is not None:
            checkpoint = format_age(time.time() - written)
    return {"age": _format_age_since(manifest.created), "checkpoint": checkpoint}


def _read_lasting_columns(folder: RunFolder, manifest: Manifest) -> Row:
    """The columns that no longer change once a run is over."""
    progress = Progress(total=manifest.steps, world=manifest.processes or 1)
    number = max(1, folder.attempts())
    # the speed of an attempt that is over is its verdict's: that of all steady steps and ranks
    read_last_steps(folder, progress, last_only=folder.exit(number).exists())
    state = read_state(folder, progress, number)
    verdict = Record()
    if state in _ENDED:
        verdict = _read_verdict(folder, number)
    outcome = None
    if verdict:
        outcome = summary.describe_outcome(verdict)
    elif progress.hang is not None and state in ("running", "orphaned"):
        outcome = "hangs"
    tracker = None
    if manifest.get("tracked"):
        tracker = find_tracker(folder.console(number))
    return {
        "run": folder.path.name,
        "path": str(folder.path),
        "stage": manifest.stage,
        "state": state,
        "verdict": verdict.text("status"),
        "outcome": outcome,
        "step": max(progress.step, verdict.number("steps") or 0),
        "steps": progress.total,
        "loss": _read_loss(verdict, progress),
        "tokens/s": _read_speed(verdict, progress),
        "gpus": manifest.gpus,
        "output": manifest.text("output"),
        "wandb": tracker,
    }


def _read_loss(verdict: Record, progress: Progress) -> float | None:
    """The last loss by the verdict, else by the probe."""
    loss = verdict.figure("metrics", "last_loss")
    if loss is None:
        loss = progress.loss
    if loss is None:
        return None
    return round(loss, 4)


def _read_speed(verdict: Record, progress: Progress) -> int | None:
    """Tokens per second by the verdict, else by the probe."""
    speed = verdict.figure("metrics", "tokens_per_second")
    if speed is None:
        speed = progress.tokens_per_second
    if speed is None or not math.isfinite(speed):
        return None
    return round(speed)


def _read_verdict(folder: RunFolder, number: int) -> Record:
    """The verdict of an attempt; empty if the file is still that of the attempt before."""
    verdict = Record(rundir.read_json(folder.verdict))
    is_concluded = folder.concluded(number).exists()
    if verdict and not is_concluded and rundir.is_judged(folder, number - 1):
        return Record()
    return verdict


def read_state(
    folder: RunFolder, progress: Progress | None = None, number: int | None = None
) -> str:
    """The state of a run: running, queued or orphaned, unknown, or one of `read_end_state`.

    An orphan trains without its supervisor. Unknown: its processes are out of sight, and there was
    no heartbeat lately.
    """
    second = int(time.monotonic())
    job = slurm.find_job(folder)
    if job is not None:
        jobs = _list_jobs(second) or {}
        word = slurm.run_state(jobs.get(job))
        if word is not None:
            return word
    if runner.is_alive(folder.path, lambda: _list_marks(second)):
        return "orphaned" if runner.is_orphaned(folder) else "running"
    state = read_end_state(folder, progress, number)
    if state == "lost" and runner.check_known_state(folder) is not None:
        return "unknown"
    return state


def read_end_state(
    folder: RunFolder, progress: Progress | None = None, number: int | None = None
) -> str:
    """How the last attempt, the `number`-th, ended: finished, failed, stopped, preempted or lost.

    Preempted: it saved a checkpoint and ended, as requested. Lost: nothing recorded how it ended.
    If the supervisor did not live to record the end, the last event of rank 0's probe counts.
    """
    ended = runner.read_exit(folder, number or max(1, folder.attempts()))
    if ended is not None:
        if ended.preempted:
            return "preempted"
        if ended.stopped is not None:
            return "stopped"
        return "finished" if ended.returncode == 0 else "failed"
    request = preemption.SaveRequest(folder=folder.probe, attempt=max(1, folder.attempts()))
    if request.is_answered():
        return "preempted"
    if progress is None or progress.exit is None or not _is_last_attempt(folder):
        return "lost"
    if progress.exit == 0:
        return "finished"
    if _is_stopped_by_signal(folder):
        return "stopped"
    return "failed"


def _is_stopped_by_signal(folder: RunFolder) -> bool:
    """Whether the evidence of a run without a recorded end says that a signal ended it."""
    try:
        end = ending.find_ending(evidence.read_run(folder.path))
    except OSError:
        return False
    return end.state == "stopped" and end.signal is not None


def _is_last_attempt(folder: RunFolder) -> bool:
    """Whether rank 0's record ends with the last attempt."""
    number = folder.attempts()
    if number <= 1:
        return True
    attempt = None
    for event in events.read_events(folder.probe / "rank-0.jsonl"):
        if event["event"] == "start":
            attempt = event.get("attempt")
    return attempt in (None, number)


@lru_cache(maxsize=1)
def _list_jobs(_second: int) -> dict[str, str] | None:
    """The jobs of the queue; one squeue serves a whole list of runs."""
    return slurm.ask_job_states()


@lru_cache(maxsize=1)
def _list_marks(_second: int) -> frozenset[str]:
    """The marks of all processes; one look serves a whole list of runs."""
    return process.find_live_marks()


def read_last_steps(folder: RunFolder, progress: Progress, *, last_only: bool = False) -> None:
    """Fill in the progress from the end of rank 0's record; `last_only` from the last step on."""
    block = b""
    try:
        with files.open_regular(folder.probe / "rank-0.jsonl") as record:
            size = os.fstat(record.fileno()).st_size
            # what follows the last step is short, except for memory phases and files of a model
            for window in _TAIL_WINDOWS:
                record.seek(max(0, size - window))
                block = record.read()
                if _STEP in block:
                    break
    except OSError:
        return
    last = block.rfind(_STEP)
    if last_only and last >= 0:
        block = block[block.rfind(b"\n", 0, last) + 1 :]
    # the window may tear the first line, and the last may be incomplete: neither is JSON then
    for line in block.split(b"\n"):
        progress.add_event(events.parse_event(line) or {})


def _format_age_since(created: object) -> str | None:
    try:
        moment = datetime.datetime.fromisoformat(str(created))
        age = datetime.datetime.now(datetime.UTC) - moment
    except (TypeError, ValueError, OverflowError):
        return None
    return format_age(age.total_seconds())
