"""Runs -> a PNG of their curves, the same charts as on the page, through matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher import panels
from launcher.errors import NotReady, not_ready
from launcher.panels import Line, Panel
from launcher.series import Run

COLOURS = (
    "#1f6feb", "#d1570b", "#12805c", "#8a3ffc", "#b8860b", "#c2185b", "#0e7c8b", "#56606b",
)  # fmt: skip
_ACROSS = 3
_INCHES = (5.0, 3.0)  # of one chart
_TEXT, _SOFT, _GRID = "#1b1f24", "#59626d", "#e6e9ed"
_MANY, _MORE = 600, 3000
"""From so many steps on a line is drawn through the noise, and then a smoother one."""


def draw(runs: Sequence[Run], names: Sequence[str], path: Path, dots_per_inch: int = 150) -> None:
    """Write the charts of these runs, called by these names, as one PNG.

    Raises NotReady without matplotlib, OSError where the file cannot be written.
    """
    figure_type, canvas_type = _matplotlib()
    shown = panels.first(runs)
    across = min(_ACROSS, max(1, len(shown)))
    down = max(1, -(-len(shown) // across))
    width, height = _INCHES
    # room for the legend, whatever the number of charts
    figure = figure_type(figsize=(across * width, down * height + 0.7), layout="constrained")
    canvas_type(figure)
    for number, panel in enumerate(shown, start=1):
        axes = figure.add_subplot(down, across, number)
        _chart(axes, panel, runs)
        axes.set_xlim(*_span(runs))
    _legend(figure, runs, names, lonely=not shown)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.02)
    figure.savefig(path, format="png", dpi=dots_per_inch, facecolor="white")


def _matplotlib() -> tuple[Any, Any]:
    """Figure and canvas without pyplot: no window system, no state that outlives the picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing("matplotlib", "plot", "a PNG") from None
    return Figure, FigureCanvasAgg


def missing(package: str, extra: str, what: str) -> NotReady:
    """What to raise where an optional package of launch's own Python is not there."""
    return not_ready(
        "missing-packages", f"{what} is made with {package}, which is not installed",
        f"pip install {package}, or in launch's own folder `pip install -e '.[{extra}]'`",
    )  # fmt: skip


def _chart(axes: Any, panel: Panel, runs: Sequence[Run]) -> None:
    title = f"{panel.title}, {panel.unit}" if panel.unit else panel.title
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=_TEXT)
    for line in panel.lines:
        for number, run in enumerate(runs):
            _curve(axes, panel, line, run, number)
    if panel.marks:
        _marks(axes, runs)
    labels = [(line.label, "--" if line.second else "-") for line in panel.lines if line.label]
    if labels:
        _styles(axes, labels)
    if panel.floor == "share":
        axes.set_ylim(0, 1)
    elif panel.floor == "zero":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _below_zero(panel, runs) else 0.0)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_SOFT, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.yaxis.set_major_formatter(_tick)
    for side in axes.spines.values():
        side.set_visible(False)


def _span(runs: Sequence[Run]) -> tuple[float, float]:
    """The x axis of every chart: all steps of all runs, and a little room."""
    steps = [step for run in runs for step in run.series.steps]
    first, last = min(steps), max(steps)
    room = max(0.5, (last - first) * 0.02)
    return first - room, last + room


def _tick(value: float, _position: int) -> str:
    """A number on the y axis, without a factor written elsewhere."""
    if value and abs(value) < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def _curve(axes: Any, panel: Panel, line: Line, run: Run, number: int) -> None:
    column = line.column(run.series)
    if column is None:
        return
    steps, values = run.series.points(column)
    weight = _weight(len(steps)) if panel.noisy else 0.0
    look = {"color": COLOURS[number % len(COLOURS)], "linestyle": "--" if line.second else "-"}
    lone = {"marker": "o", "markersize": 3} if len(steps) == 1 else {}
    thin = {"linewidth": 0.7, "alpha": 0.25} if weight else {"linewidth": 1.4}
    smooth = list(smoothed(values, weight))
    for piece in _unbroken(steps, run.series.nonfinite if panel.marks else ()):
        axes.plot(steps[piece], values[piece], **thin, **look, **lone)
        if weight:
            axes.plot(steps[piece], smooth[piece], linewidth=1.6, **look)


def _weight(steps: int) -> float:
    return 0.98 if steps > _MORE else 0.9 if steps > _MANY else 0.0


def smoothed(values: Iterable[float], weight: float) -> Iterator[float]:
    """The exponential moving average, as if there had been nothing before the first value."""
    mean = share = 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        yield mean / share


def _unbroken(steps: Sequence[int], breaks: Sequence[int]) -> Iterator[slice]:
    """Where a line is drawn through: from one step that was not finite to the next."""
    left, first = sorted(breaks), 0
    for number, step in enumerate(steps):
        passed = False
        while left and left[0] < step:
            left.pop(0)
            passed = True
        if passed and number > first:
            yield slice(first, number)
            first = number
    if first < len(steps):
        yield slice(first, len(steps))


def _marks(axes: Any, runs: Sequence[Run]) -> None:
    steps = sorted({step for run in runs for step in run.series.nonfinite})
    if steps:
        axes.plot(
            steps, [0.97] * len(steps), "x", color="#b3261e", markersize=5, clip_on=False,
            transform=axes.get_xaxis_transform(), label="not finite",
        )  # fmt: skip


def _styles(axes: Any, labels: Sequence[tuple[str, str]]) -> None:
    """Which of a run's two curves is which."""
    for label, style in labels:
        axes.plot([], [], color=_SOFT, linestyle=style, linewidth=1.4, label=label)
    axes.legend(fontsize=8, frameon=False, labelcolor=_SOFT, ncols=len(labels), loc="best")


def _below_zero(panel: Panel, runs: Sequence[Run]) -> bool:
    columns = [
        run.series.points(column)[1]
        for line in panel.lines
        for run in runs
        if (column := line.column(run.series)) is not None
    ]
    return any(value < 0 for values in columns for value in values)


def _legend(figure: Any, runs: Sequence[Run], names: Sequence[str], *, lonely: bool) -> None:
    """Which colour is which run, and how each was judged; also where there is nothing to draw."""
    from matplotlib.lines import Line2D

    labels = [
        _plain(f"{name}: {run.verdict.get('status') or 'not judged'}")
        for run, name in zip(runs, names, strict=True)
    ]
    handles = [
        Line2D([], [], color=COLOURS[n % len(COLOURS)], linewidth=2.5) for n in range(len(runs))
    ]
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(4, len(runs)), frameon=False,
        fontsize=9, labelcolor=_TEXT,
    )  # fmt: skip
    if lonely:
        figure.text(0.5, 0.4, "no steps to draw", ha="center", color=_SOFT, fontsize=10)


def _plain(text: str) -> str:
    """Matplotlib reads mathematics between dollar signs, and leaves out what begins with `_`."""
    seen = text.replace("$", r"\$")
    return f" {seen}" if seen.startswith("_") else seen
