"""Runs -> a PNG of their curves, through matplotlib, and event files, through tensorboardX."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher import panels
from launcher.errors import NotReady, not_ready
from launcher.panels import Panel
from launcher.series import Run

COLOURS = (
    "#1f6feb", "#d1570b", "#12805c", "#8a3ffc", "#b8860b", "#c2185b", "#0e7c8b", "#56606b",
)  # fmt: skip
_ACROSS = 3
_INCHES = (5.0, 3.0)  # of one chart
_OURS = ".launch"
"""How our event files end; those of others in the same folder are let alone."""


def draw(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Write the charts of these runs, called by these names, as one PNG.

    Raises NotReady without matplotlib, OSError where the file cannot be written.
    """
    try:
        # without pyplot: no window system, no state that outlives the picture
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        raise _missing("matplotlib", "plot", "a PNG") from None
    shown = panels.first(runs)
    across = min(_ACROSS, max(1, len(shown)))
    down = max(1, -(-len(shown) // across))
    width, height = _INCHES
    # room for the legend, whatever the number of charts
    figure = Figure(figsize=(across * width, down * height + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(shown, start=1):
        _chart(figure.add_subplot(down, across, number), panel, runs)
    if not shown:
        figure.text(0.5, 0.4, "no steps to draw", ha="center")
    labels = [
        _plain(f"{name}: {run.verdict.get('status') or 'not judged'}")
        for run, name in zip(runs, names, strict=True)
    ]
    handles = [Line2D([], [], color=_colour(n), linewidth=2.5) for n in range(len(runs))]
    figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(runs)), frameon=False)
    figure.savefig(path, format="png", dpi=150, facecolor="white")


def _missing(package: str, extra: str, what: str) -> NotReady:
    """What to raise where an optional package of launch's own Python is not there."""
    return not_ready(
        "missing-packages", f"{what} is made with {package}, which is not installed",
        f"pip install {package}, or in launch's own folder `pip install -e '.[{extra}]'`",
    )  # fmt: skip


def _chart(axes: Any, panel: Panel, runs: Sequence[Run]) -> None:
    axes.set_title(f"{panel.title}, {panel.unit}" if panel.unit else panel.title, loc="left")
    for line in panel.lines:
        style = "--" if line.second else "-"
        for number, run in enumerate(runs):
            if (column := line.column(run.series)) is not None:
                steps, values = run.series.points(column)
                mark = "o" if len(steps) == 1 else None
                axes.plot(steps, values, color=_colour(number), linestyle=style, marker=mark)
        if line.label:
            axes.plot([], [], color="grey", linestyle=style, label=line.label)
    if panel.marks and (bad := sorted({step for run in runs for step in run.series.nonfinite})):
        top = axes.get_xaxis_transform()
        axes.plot(bad, [0.97] * len(bad), "rx", transform=top, label="not finite")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    if panel.floor == "share":
        axes.set_ylim(0, 1)
    elif panel.floor == "zero":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(True, alpha=0.3)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _plain(text: str) -> str:
    """Matplotlib reads mathematics between dollar signs, and leaves out what begins with `_`."""
    seen = text.replace("$", r"\$")
    return f" {seen}" if seen.startswith("_") else seen


def write_events(runs: Sequence[Run], names: Sequence[str], folder: Path) -> list[Path]:
    """Write TensorBoard's scalars of each run into a folder of its own; those folders, in the same order.

    The wall time of a step is the run's start and the seconds of the steps up to it, loading left
    out. Raises NotReady without tensorboardX, OSError where nothing can be written.
    """
    try:
        from tensorboardX import FileWriter
        from tensorboardX.proto.summary_pb2 import Summary
    except ImportError:
        raise _missing("tensorboardX", "tensorboard", "a TensorBoard event file") from None

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
