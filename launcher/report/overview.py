"""All runs, one line each: state, step, loss, age."""

import contextlib
import datetime
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher import __version__, files
from launcher.errors import brief
from launcher.machine import codec, process
from launcher.paths import exists
from launcher.report.progress import Progress, clock, tracker
from launcher.runs import events, preemption, rundir, runner, slurm
from launcher.runs.record import Manifest, Record
from launcher.runs.rundir import RunFolder
from launcher.verdict import ending, evidence, summary

COLUMNS = "run stage state verdict step loss tokens/s age gpus checkpoint output wandb".split()
_IN_WORDS = {"unknown": "unknown here"}  # in a table beside nothing that explains it
_STEP = b'"event": "step"'
_ROW = 2  # version of the rows of runs that are over, which are kept: read anew, a thousand take a second
_SETTLED_S = 2.0
_RECORDED = ("finished", "failed", "stopped", "preempted")
_ENDED = (*_RECORDED, "lost")


def rows(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Rows of the runs that have begun, oldest first; `part_of` is the pipeline, bench, ladder or tune."""
    campaigns, file = rundir.campaign_by_run(folders), rundir.state_folder() / "rows.json"
    known, new, found = Record(rundir.read_json(file)), dict[str, Any](), []
    for folder in folders:
        # no run's records may end the list of the others
        try:
            one = _row_or_kept(folder, known, new)
        except Exception as error:
            one = _unreadable(folder, error)
        if one is not None:
            part_of = campaigns.get(folder.path)
            found.append({**one, "part_of": str(part_of) if part_of else None})
    if new:
        there = {path: kept for path, kept in known.items() if os.path.isdir(path)}
        # a state folder that cannot be written costs the next list some time
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            # in one line: ten thousand rows take seconds to indent
            files.write_bytes(file, json.dumps(there | new, default=str).encode())
    return found


def _row_or_kept(folder: RunFolder, known: Record, new: dict[str, Any]) -> dict[str, Any] | None:
    """The row of a run, of one that is over as it was kept; into `new` goes what is to be kept. None of what never
    began."""
    path = str(folder.path)
    stamp = _stamp(folder)
    kept = known.part(path) if stamp else Record()
    if kept.get("stamp") == stamp and _is_row(kept.part("row"), path):
        return kept.part("row") | _passing(Manifest(kept.part("manifest")))
    if not rundir.has_begun(folder):
        return None
    manifest = rundir.read_manifest(folder)
    row = _lasting(folder, manifest)
    if stamp and row["state"] in _RECORDED and not folder.job.exists():
        about = {name: manifest.get(name) for name in ("created", "backend", "output")}
        new[path] = {"stamp": stamp, "manifest": about, "row": row}
    return row | _passing(manifest)


_TEXT = str | None
_ROW_KINDS: Mapping[str, Any] = {
    "run": str,
    "path": str,
    "stage": _TEXT,
    "state": str,
    "verdict": _TEXT,
    "outcome": _TEXT,
    "step": int,
    "steps": int | None,
    "loss": float | None,
    "tokens/s": float | None,
    "gpus": int | None,
    "output": _TEXT,
    "wandb": _TEXT,
}


def _is_row(kept: Record, path: str) -> bool:
    """Whether a row that was kept is one of this run, each value of its type."""
    fits = (codec.fit_value(kept.get(name), kind, kept) is not kept for name, kind in _ROW_KINDS.items())
    return kept.keys() == _ROW_KINDS.keys() and kept.get("path") == path and all(fits)


def _unreadable(folder: RunFolder, error: Exception) -> dict[str, Any]:
    """The row of a run whose records cannot be read, with the reason as its outcome."""
    row = dict.fromkeys(_ROW_KINDS)
    reason = f"its records cannot be read: {brief(f'{type(error).__name__}: {error}')}"
    about = {"run": folder.path.name, "path": str(folder.path), "state": "unknown", "step": 0, "outcome": reason}
    return {**row, **about, "age": None, "checkpoint": None}


def _stamp(folder: RunFolder) -> str | None:
    """Changes with every file that is written into a run folder; None where that may just be happening."""
    try:
        changed = folder.path.stat().st_mtime_ns
    except OSError:
        return None
    settled = time.time() - changed / 1e9 > _SETTLED_S
    return f"{__version__} {_ROW} {changed}" if settled else None


def entries(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows by pipeline, bench, ladder and tune, each other run by itself; the newest last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in reversed(rows):
        found.setdefault(one["part_of"] or one["path"], []).insert(0, one)
    return [*reversed(found.values())]


def entry(group: Sequence[Mapping[str, Any]], *, whole: bool = False) -> Mapping[str, Any]:
    """One line for a group of `entries`, or with `whole` for its first run."""
    first = group[0]
    words = [[_IN_WORDS.get(one[key], one[key]) for one in group] for key in ("state", "outcome")]
    if whole or first["part_of"] is None:
        return {**first, "state": words[0][0], "verdict": words[1][0]}
    path = Path(first["part_of"])
    counts = (Counter(word for word in column if word is not None) for column in words)
    state, verdict = (", ".join(f"{n} {word}" for word, n in count.items()) or None for count in counts)
    kind = path.name.partition("-")[2].partition("-")[0]
    return {"run": path.name, "stage": kind, "age": first["age"], "state": state, "verdict": verdict}


def row(folder: RunFolder) -> dict[str, Any]:
    manifest = rundir.read_manifest(folder)
    return _lasting(folder, manifest) | _passing(manifest)


def _passing(manifest: Manifest) -> dict[str, Any]:
    written = None
    if manifest.output is not None and exists(manifest.output):
        # what names checkpoints need not be waited for where none can be
        from launcher.artifacts import checkpoints

        written = checkpoints.last_written(str(manifest.backend), manifest.output)
    checkpoint = None if written is None else clock(max(0.0, time.time() - written))
    return {"age": age(manifest.created), "checkpoint": checkpoint}


def _lasting(folder: RunFolder, manifest: Manifest) -> dict[str, Any]:
    progress = Progress(total=manifest.steps, world=manifest.processes or 1)
    number = max(1, folder.attempts())
    # the speed of an attempt that is over is its verdict's: that of all steady steps, and of every rank
    last_steps(folder, progress, last_only=folder.exit(number).exists())
    now = state(folder, progress, number)
    judged = Record(rundir.read_json(folder.verdict) if now in _ENDED else {})
    # the file of an attempt that goes on is that of the one before; so is it where nobody lived to judge the last one
    if judged and not folder.concluded(number).exists() and rundir.is_judged(folder, number - 1):
        judged = Record()
    # a verdict counts every rank; the end of rank 0's record is all that is read of a run that goes on
    loss, rate = judged.figure("metrics", "last_loss"), judged.figure("metrics", "tokens_per_second")
    loss = progress.loss if loss is None else loss
    rate = progress.tokens_per_second if rate is None else rate
    if rate is not None and not math.isfinite(rate):
        rate = None
    return {
        "run": folder.path.name,
        "path": str(folder.path),
        "stage": manifest.stage,
        "state": now,
        "verdict": judged.text("status"),
        "outcome": _outcome(judged, progress, now),
        "step": max(progress.step, judged.number("steps") or 0),
        "steps": progress.total,
        "loss": None if loss is None else round(loss, 4),
        "tokens/s": None if rate is None else round(rate),
        "gpus": manifest.gpus,
        "output": manifest.text("output"),
        "wandb": tracker(folder.console(number)) if manifest.get("tracked") else None,
    }


def _outcome(judged: Record, progress: Progress, state: str) -> str | None:
    if judged:
        return summary.outcome(judged)
    if progress.hang is not None and state in ("running", "orphaned"):
        return "hangs"
    return None


def state(folder: RunFolder, progress: Progress | None = None, number: int | None = None) -> str:
    """queued, running, orphaned, finished, failed, stopped, preempted, unknown or lost. Preempted: it saved a
    checkpoint and ended, as requested. Unknown: its processes are out of sight, and there was no heartbeat lately.
    Lost: ended without a record of how. An orphan trains without the process that keeps it. Where that did not live to
    record the end, the last word of rank 0's probe counts."""
    job = slurm.job_of(folder)
    if job is not None and (jobs := _jobs(int(time.monotonic()))) is not None:
        word = slurm.run_state(jobs.get(job))
        if word is not None:
            return word
    if runner.is_alive(folder.path, lambda: _marks(int(time.monotonic()))):
        return "orphaned" if runner.is_orphaned(folder) else "running"
    word = ended_state(folder, progress, number)
    return "unknown" if word == "lost" and runner.unknown_state(folder) is not None else word


def ended_state(folder: RunFolder, progress: Progress | None = None, number: int | None = None) -> str:
    """finished, failed, stopped, preempted or lost, by the run's own record of its last attempt, the `number`-th."""
    ended = runner.read_exit(folder, number or max(1, folder.attempts()))
    if ended is not None:
        if ended.preempted:
            return "preempted"
        if ended.stopped is not None:
            return "stopped"
        return "finished" if ended.returncode == 0 else "failed"
    if preemption.SaveRequest(folder=folder.probe, attempt=max(1, folder.attempts())).is_answered():
        return "preempted"
    if progress is None or progress.exit is None or not _last_told(folder):
        return "lost"
    if progress.exit == 0:
        return "finished"
    return "stopped" if _stopped_by_signal(folder) else "failed"


def _stopped_by_signal(folder: RunFolder) -> bool:
    """Whether what is left of a run that nobody could record the end of says that a signal was to end it."""
    try:
        end = ending.ending(evidence.read_run(folder.path))
    except OSError:
        return False
    return end.state == "stopped" and end.signal is not None


def _last_told(folder: RunFolder) -> bool:
    """Whether what rank 0's record ends with is of the last attempt, and not of one before."""
    record = events.read_events(folder.probe / "rank-0.jsonl") if folder.attempts() > 1 else ()
    attempts = [event.get("attempt") for event in record if event["event"] == "start"]
    return not attempts or attempts[-1] in (None, folder.attempts())


@lru_cache(maxsize=1)
def _jobs(_second: int) -> dict[str, str] | None:
    """One squeue serves a whole list of runs too."""
    return slurm.job_states()


@lru_cache(maxsize=1)
def _marks(_second: int) -> frozenset[str]:
    """One look at all processes serves a whole list of runs."""
    return process.live_marks()


def last_steps(folder: RunFolder, progress: Progress, *, last_only: bool = False) -> None:
    """Fill in the progress from the end of rank 0's record, or from the last step in it."""
    block = b""
    try:
        with files.open_regular(folder.probe / "rank-0.jsonl") as record:
            size = os.fstat(record.fileno()).st_size
            # what follows the last step is short, but for the phases of a GPU's memory and the files of a model
            for window in (2**11, 2**16, 2**22):
                record.seek(max(0, size - window))
                if _STEP in (block := record.read()):
                    break
    except OSError:
        return
    if last_only and (last := block.rfind(_STEP)) >= 0:
        block = block[block.rfind(b"\n", 0, last) + 1 :]
    # the first may be torn by the window, the last not be finished: neither is JSON then
    for line in block.split(b"\n"):
        progress.event(events.parse_event(line) or {})


def age(created: object) -> str | None:
    try:
        passed = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(str(created))
    except (TypeError, ValueError, OverflowError):
        return None
    # a clock that was set back makes nothing younger than now
    return f"{passed.days}d" if passed.days > 0 else clock(max(0.0, passed.total_seconds()))
