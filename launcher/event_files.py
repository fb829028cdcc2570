"""Runs -> TensorBoard event files, one folder a run, through tensorboardX."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.plot import missing
from launcher.series import Run

_OURS = ".launch"
"""How our event files end; those of others in the same folder are let alone."""


def write(runs: Sequence[Run], names: Sequence[str], folder: Path) -> list[Path]:
    """Write the scalars of each run into a folder of its own; those folders, in the same order.

    The wall time of a step is the run's start and the seconds of the steps up to it, loading left
    out. Raises NotReady without tensorboardX, OSError where nothing can be written.
    """
    try:
        from tensorboardX import FileWriter
        from tensorboardX.proto.summary_pb2 import Summary
    except ImportError:
        raise missing("tensorboardX", "tensorboard", "a TensorBoard event file") from None

    written = []
    for run, name in zip(runs, names, strict=True):
        place = folder / _safe(name)
        place.mkdir(parents=True, exist_ok=True)
        # what an earlier report wrote would be drawn over this one
        for old in place.glob(f"events.out.tfevents.*{_OURS}"):
            old.unlink()
        writer = FileWriter(str(place), filename_suffix=_OURS)
        # a record a step, not one a number: five times as fast
        for step, values, at in _scalars(run):
            summary = Summary(value=[Summary.Value(tag=t, simple_value=v) for t, v in values])
            writer.add_summary(summary, step, at)
        writer.close()
        written.append(place)
    return written


def _scalars(run: Run) -> Iterator[tuple[int, list[tuple[str, float]], float]]:
    """Step, tags with their values, and wall time, step by step."""
    columns = [(_tag(name), values) for name, values in run.series.columns.items()]
    for number, (step, at) in enumerate(zip(run.series.steps, _wall_times(run), strict=True)):
        values = [(tag, v) for tag, column in columns if (v := column[number]) is not None]
        yield step, values, at


def _tag(column: str) -> str:
    """TensorBoard groups by what stands before the first slash."""
    return column if "/" in column else f"train/{column}"


def _wall_times(run: Run) -> list[float]:
    """Seconds since 1970 of each step, as far as it is known how long they took."""
    at = _started(run)
    times = []
    for seconds in run.series.columns.get("seconds", (None,) * len(run.series.steps)):
        at += seconds or 0.0
        times.append(at)
    return times


def _started(run: Run) -> float:
    try:
        return datetime.datetime.fromisoformat(str(run.manifest["created"])).timestamp()
    except (KeyError, ValueError):
        pass
    try:
        return run.path.stat().st_mtime
    except OSError:
        return 0.0


def _safe(name: str) -> str:
    """A name as one folder: TensorBoard shows folders as runs."""
    kept = "".join(c if c.isalnum() or c in "._- " else "-" for c in name).strip(" .")
    return kept[:100] or "run"
