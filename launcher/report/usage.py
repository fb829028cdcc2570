"""The part of a page about the machine: how busy GPUs, processor and memory were over the time of the run.

Drawn as SVG here, over the clock: unlike the curves, these have no steps, and no script is needed to see them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launcher.report.charts import COLOURS, PageRun
from launcher.report.html import Html, details, figure, join, table, tag, text
from launcher.runs import usage
from launcher.runs.rundir import RunFolder
from launcher.runs.usage import GpuSample, UsageSample

KEY = "machine"
_WIDTH = 520
_HEIGHT = 170
_LEFT = 44
_BOTTOM = 20
_TOP = 8
_POINTS = 400
"""Points of a line at most: neighbours are drawn as their mean."""
_GAP = 4.0
"""Where this many usual intervals lie between two samples, the line is broken: nobody sampled, as between attempts."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class UsageLine:
    """One line of a chart: (seconds since the start, value)."""

    label: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class UsageChart:
    """`top` is where its axis ends, None for the largest value."""

    title: str
    unit: str
    lines: Sequence[UsageLine]
    top: float | None = None


def section(entries: Sequence[PageRun]) -> Html:
    """The charts of each run that was sampled, a machine at a time; empty where none was."""
    parts: list[object] = []
    for entry in entries:
        for machine in RunFolder(entry.run.path).nodes() if entry.run.path.is_dir() else ():
            charts = [chart for chart in _charts(usage.read_usage(machine)) if chart.lines]
            if not charts:
                continue
            name = "" if machine.path == entry.run.path else machine.path.name
            if len(entries) > 1 or name:
                parts.append(tag("h3", join([entry.heading, f" {name}" if name else ""])))
            parts.append(tag("div", join(map(_figure, charts)), class_="grid"))
            parts.append(_means(charts))
    return tag("section", join([tag("h2", "Machine", id=KEY), *parts])) if parts else Html("")


def _charts(samples: Sequence[UsageSample]) -> list[UsageChart]:
    if len(samples) < 2:
        return []
    largest = max((sample.memory_total_gib or 0.0 for sample in samples), default=0.0)
    host: tuple[tuple[str, str, Callable[[UsageSample], float | None], float | None], ...] = (
        ("processor busy", "%", lambda sample: _percent(sample.cpu), 100.0),
        ("host memory", "GiB", lambda sample: sample.memory_gib, largest or None),
    )
    gpus: tuple[tuple[str, str, Callable[[GpuSample], float | None], float | None], ...] = (
        ("GPU busy", "%", lambda gpu: _percent(gpu.busy), 100.0),
        ("GPU memory", "GiB", lambda gpu: gpu.memory_gib, None),
        ("GPU power", "W", lambda gpu: gpu.power_w, None),
    )
    charts = [UsageChart(title, unit, _gpu_lines(samples, value), top) for title, unit, value, top in gpus]
    for title, unit, of_host, top in host:
        points = _points((sample.t, of_host(sample)) for sample in samples)
        charts.append(UsageChart(title, unit, _since(samples, {"": points}), top))
    return charts


def _gpu_lines(samples: Sequence[UsageSample], value: Callable[[GpuSample], float | None]) -> list[UsageLine]:
    indices = sorted({gpu.index for sample in samples for gpu in sample.gpus})
    by_label: dict[str, list[Point]] = {}
    for index in indices:
        found = ((sample.t, value(gpu)) for sample in samples for gpu in sample.gpus if gpu.index == index)
        by_label[f"GPU {index}"] = _points(found)
    return _since(samples, by_label)


def _points(values: Iterable[tuple[float, float | None]]) -> list[Point]:
    return [(at, value) for at, value in values if value is not None]


def _since(samples: Sequence[UsageSample], by_label: dict[str, list[Point]]) -> list[UsageLine]:
    start = samples[0].t
    lines = []
    for label, points in by_label.items():
        if len(points) > 1:
            lines.append(UsageLine(label, [(at - start, value) for at, value in points]))
    return lines


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _figure(chart: UsageChart) -> Html:
    labels = [
        tag("span", line.label, class_=f"line{number % COLOURS}")
        for number, line in enumerate(chart.lines)
        if line.label
    ]
    head = tag("h3", join([chart.title, tag("span", f" {chart.unit}", class_="unit")]))
    caption = tag("figcaption", join([head, tag("span", join(labels), class_="lines") if labels else ""]))
    return tag("figure", join([caption, _svg(chart)]), class_="usage")


def _svg(chart: UsageChart) -> Html:
    last = max(line.points[-1][0] for line in chart.lines) or 1.0
    top = chart.top or max(value for line in chart.lines for _, value in line.points) or 1.0

    def place(point: Point) -> str:
        x = _LEFT + (_WIDTH - _LEFT) * max(0.0, point[0]) / last
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, point[1] / top))
        return f"{x:.1f},{y:.1f}"

    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text(figure(share * top, 3))}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">0</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">{text(_clock(last))}</text>')
    for number, line in enumerate(chart.lines):
        for stretch in _unbroken(_thinned(line.points)):
            path = " ".join(map(place, stretch))
            parts.append(f'<polyline class="line{number % COLOURS}" points="{path}"/>')
    label = f"{chart.title} over {_clock(last)}"
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(label)}"'
    return Html(f'<svg class="usage" {box}>{"".join(parts)}</svg>')


def _thinned(points: Sequence[Point]) -> list[Point]:
    size = -(-len(points) // _POINTS)
    thinned = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        mean = sum(value for _, value in group) / len(group)
        thinned.append((group[-1][0], mean))
    return thinned


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches between which nobody sampled."""
    stretches: list[list[Point]] = [[]]
    usual = 0.0
    for point in points:
        if stretches[-1]:
            passed = point[0] - stretches[-1][-1][0]
            if usual and passed > _GAP * usual:
                stretches.append([])
            else:
                usual = max(usual, passed)
        stretches[-1].append(point)
    return stretches


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _means(charts: Sequence[UsageChart]) -> Html:
    rows = []
    for chart in charts:
        for line in chart.lines:
            values = [value for _, value in line.points]
            name = f"{chart.title}, {line.label}" if line.label else chart.title
            numbers = (sum(values) / len(values), min(values), max(values))
            rows.append([name, *(f"{figure(number, 3)} {chart.unit}" for number in numbers)])
    return details("mean, least and most", table(("", "mean", "least", "most"), rows))
