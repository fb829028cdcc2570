"""The part of a page about the machine: how busy GPUs, processor and memory were during the run.

The charts are SVG over the clock, made here: these samples have no steps, and no script is needed.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from launcher.lazy_dataclass import dataclass
from launcher.report.charts import COLOURS, PageRun
from launcher.report.html import (
    Html,
    escape_text,
    format_number,
    join,
    render_details,
    render_section,
    render_table,
    render_tag,
)
from launcher.runs import usage
from launcher.runs.rundir import RunFolder
from launcher.runs.usage import GpuSample, UsageSample

KEY = "machine"
_WIDTH = 520
_HEIGHT = 170
_LEFT = 44
_BOTTOM = 20
_TOP = 8
_PLOT_WIDTH = _WIDTH - _LEFT
_PLOT_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_POINTS = 400
"""Points of a line at most: neighbours are drawn as their mean."""
_GAP = 4.0
"""A line is broken where two samples are this many usual intervals apart, as between attempts."""


class UsagePoint(NamedTuple):
    """`seconds` are those since the first sample."""

    seconds: float
    value: float


@dataclass(frozen=True, slots=True)
class UsageLine:
    label: str
    points: Sequence[UsagePoint]


@dataclass(frozen=True, slots=True)
class UsageChart:
    """`top` is the end of its axis, None for the largest value."""

    title: str
    unit: str
    lines: Sequence[UsageLine]
    top: float | None = None


def render_usage(entries: Sequence[PageRun]) -> Html:
    """The charts of each sampled run, a machine at a time; empty if no run was sampled."""
    parts: list[object] = []
    for entry in entries:
        path = entry.run.path
        if not path.is_dir():
            continue
        for machine in RunFolder(path).nodes():
            charts = _build_charts(usage.read_usage(machine))
            if not charts:
                continue
            node = ""
            if machine.path != path:
                node = f" {machine.path.name}"
            if len(entries) > 1 or node:
                parts.append(render_tag("h3", entry.heading, node))
            parts.append(render_tag("div", *map(_render_chart, charts), class_="grid"))
            parts.append(_render_statistics(charts))
    return render_section(KEY, "Machine", *parts)


def _build_charts(samples: Sequence[UsageSample]) -> list[UsageChart]:
    if len(samples) < 2:
        return []
    totals = [sample.memory_total_gib or 0.0 for sample in samples]
    memory_top = max(totals) or None
    gpu_busy = _build_gpu_lines(samples, lambda gpu: _to_percent(gpu.busy))
    gpu_memory = _build_gpu_lines(samples, lambda gpu: gpu.memory_gib)
    gpu_power = _build_gpu_lines(samples, lambda gpu: gpu.power_w)
    cpu = _build_host_line(samples, lambda sample: _to_percent(sample.cpu))
    memory = _build_host_line(samples, lambda sample: sample.memory_gib)
    charts = [
        UsageChart("GPU busy", "%", gpu_busy, 100.0),
        UsageChart("GPU memory", "GiB", gpu_memory),
        UsageChart("GPU power", "W", gpu_power),
        UsageChart("processor busy", "%", cpu, 100.0),
        UsageChart("host memory", "GiB", memory, memory_top),
    ]
    return [chart for chart in charts if chart.lines]


def _build_host_line(
    samples: Sequence[UsageSample], value_of: Callable[[UsageSample], float | None]
) -> list[UsageLine]:
    start = samples[0].t
    points = []
    for sample in samples:
        value = value_of(sample)
        if value is not None:
            points.append(UsagePoint(sample.t - start, value))
    return _keep_drawable({"": points})


def _build_gpu_lines(
    samples: Sequence[UsageSample], value_of: Callable[[GpuSample], float | None]
) -> list[UsageLine]:
    start = samples[0].t
    by_gpu: dict[int, list[UsagePoint]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            value = value_of(gpu)
            if value is not None:
                points = by_gpu.setdefault(gpu.index, [])
                points.append(UsagePoint(sample.t - start, value))
    return _keep_drawable({f"GPU {index}": by_gpu[index] for index in sorted(by_gpu)})


def _keep_drawable(by_label: Mapping[str, Sequence[UsagePoint]]) -> list[UsageLine]:
    """The lines of two points or more."""
    return [UsageLine(label, points) for label, points in by_label.items() if len(points) > 1]


def _to_percent(share: float | None) -> float | None:
    if share is None:
        return None
    return 100 * share


def _render_chart(chart: UsageChart) -> Html:
    labels = []
    for number, line in enumerate(chart.lines):
        if line.label:
            labels.append(render_tag("span", line.label, class_=_choose_colour(number)))
    unit = render_tag("span", f" {chart.unit}", class_="unit")
    title = join([chart.title, unit])
    caption = [render_tag("h3", title)]
    if labels:
        caption.append(render_tag("span", *labels, class_="lines"))
    figcaption = render_tag("figcaption", *caption)
    return render_tag("figure", figcaption, _render_svg(chart), class_="usage")


def _choose_colour(number: int) -> str:
    return f"line{number % COLOURS}"


def _render_svg(chart: UsageChart) -> Html:
    duration = max(line.points[-1].seconds for line in chart.lines) or 1.0
    values = [point.value for line in chart.lines for point in line.points]
    top = chart.top or max(values) or 1.0
    parts = list(_render_axes(duration, top))
    for number, line in enumerate(chart.lines):
        points = _thin_points(line.points)
        for stretch in _split_at_gaps(points):
            places = " ".join(_place_point(point, duration, top) for point in stretch)
            parts.append(f'<polyline class="{_choose_colour(number)}" points="{places}"/>')
    label = escape_text(f"{chart.title} over {_format_duration(duration)}")
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
    return Html(f'<svg class="usage" {box}>{"".join(parts)}</svg>')


def _render_axes(duration: float, top: float) -> Iterable[str]:
    """Three horizontal rules with their values, and the clock below."""
    for share in (0.0, 0.5, 1.0):
        y = _TOP + _PLOT_HEIGHT * (1 - share)
        value = escape_text(format_number(share * top, 3))
        yield f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>'
    end = escape_text(_format_duration(duration))
    yield f'<text x="{_LEFT}" y="{_HEIGHT - 4}">0</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">{end}</text>'


def _place_point(point: UsagePoint, duration: float, top: float) -> str:
    x = _LEFT + _PLOT_WIDTH * max(0.0, point.seconds) / duration
    y = _TOP + _PLOT_HEIGHT * (1 - min(1.0, point.value / top))
    return f"{x:.1f},{y:.1f}"


def _thin_points(points: Sequence[UsagePoint]) -> list[UsagePoint]:
    """At most `_POINTS` points: of each group of neighbours the end and the mean."""
    size = math.ceil(len(points) / _POINTS)
    thinned = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        mean = statistics.fmean(point.value for point in group)
        thinned.append(UsagePoint(group[-1].seconds, mean))
    return thinned


def _split_at_gaps(points: Sequence[UsagePoint]) -> list[list[UsagePoint]]:
    """The stretches between gaps without samples."""
    stretches: list[list[UsagePoint]] = [[]]
    usual_interval = 0.0
    for point in points:
        if stretches[-1]:
            interval = point.seconds - stretches[-1][-1].seconds
            if usual_interval and interval > _GAP * usual_interval:
                stretches.append([])
            else:
                usual_interval = max(usual_interval, interval)
        stretches[-1].append(point)
    return stretches


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _render_statistics(charts: Sequence[UsageChart]) -> Html:
    rows = []
    for chart in charts:
        for line in chart.lines:
            name = chart.title
            if line.label:
                name += f", {line.label}"
            values = [point.value for point in line.points]
            row = [name]
            for value in (statistics.fmean(values), min(values), max(values)):
                row.append(f"{format_number(value, 3)} {chart.unit}")
            rows.append(row)
    head = ("", "mean", "least", "most")
    return render_details("mean, least and most", render_table(head, rows))
