"""The charts of a page: which curve goes where, by stage, and the data for the page's script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, replace
from typing import NamedTuple

from launcher.lazy_dataclass import dataclass
from launcher.report.html import Html, join, render_details, render_section, render_tag
from launcher.report.series import Run, has_number, render_compact_json

COLOURS = 8
_TOOLS = Html(
    '<div class="tools"><label class="soft">x <select id="x-axis" autocomplete="off">'
    '<option value="step" selected>steps</option><option value="tokens">tokens</option>'
    '<option value="time">training time</option></select></label>'
    '<button type="button" id="log-y" aria-pressed="false">log scale</button>'
    '<label class="soft">smoothing <input type="range" id="smoothing" min="0" '
    'max="0.99" step="0.01" value="0" autocomplete="off">'
    ' <output id="smoothing-is">0.00</output></label>'
    '<button type="button" id="reset" title="drag over a chart to zoom">all steps</button>'
    '<a id="csv" class="button" href="#curves" title="all curves, a row a step">CSV</a>'
    '<output id="at" class="at soft">last step</output></div>'
)


class PageRun(NamedTuple):
    """A run on the page: its number, which gives it its colour, and the name of its stage file."""

    number: int
    name: str
    run: Run

    @property
    def heading(self) -> Html:
        return join([self.mark, self.name])

    @property
    def mark(self) -> Html:
        colour = self.number % COLOURS
        swatch = Html(f'<span class="swatch k{colour}" aria-hidden="true"></span>')
        number = render_tag("span", self.number + 1, class_="no", title=self.name)
        return join([swatch, number])


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart over the optimizer steps.

    For each run, a line draws the first of its columns that the run has; the second line is dashed.
    The y axis begins at zero if `floor` is "zero"; "share" ends it at 1. `marks` shows steps that
    were not finite. Panels that are not `noisy` are never smoothed. `clips` leaves rare spikes off
    the scale and says so. `log` permits a logarithmic scale.
    """

    key: str
    title: str
    lines: Mapping[str, tuple[str, ...]]
    _: KW_ONLY
    unit: str = ""
    floor: str | None = None
    marks: bool = False
    noisy: bool = True
    clips: bool = False
    log: bool = False

    def restrict_to(self, runs: Sequence[Run]) -> Panel:
        """The panel with the lines that any of these runs has; a single line has no label."""
        lines: dict[str, tuple[str, ...]] = {}
        for label, columns in self.lines.items():
            if any(_find_first_column(run, columns) for run in runs):
                lines[label] = columns
        if not lines:
            return self
        first = next(iter(self.lines))
        is_first_alone = list(lines) == [first]
        if is_first_alone and len(self.lines) > 1:
            lines = {"": lines[first]}
        return replace(self, lines=lines)

    def drawn_columns(self, runs: Iterable[Run]) -> set[str]:
        drawn: set[str] = set()
        for run in runs:
            for columns in self.lines.values():
                name = _find_first_column(run, columns)
                if name is not None:
                    drawn.add(name)
        return drawn

    def as_json(self, suffix: str, runs: Sequence[int], *, folded: bool) -> dict[str, object]:
        lines = []
        for number, (label, columns) in enumerate(self.lines.items()):
            lines.append({"columns": columns, "label": label, "second": number > 0})
        return {
            "key": f"{self.key}{suffix}",
            "lines": lines,
            "floor": self.floor,
            "marks": self.marks,
            "noisy": self.noisy,
            "clips": self.clips,
            "log": self.log,
            "folded": folded,
            "runs": runs,
        }

    def as_html(self, suffix: str) -> Html:
        key = f"panel-{self.key}{suffix}"
        labels = []
        for number, label in enumerate(self.lines):
            if not label:
                continue
            if number:
                labels.append(render_tag("span", label, class_="second"))
            else:
                labels.append(render_tag("span", label))
        title: list[object] = [self.title]
        if self.unit:
            title.append(render_tag("span", f" {self.unit}", class_="unit"))
        caption = [render_tag("h3", *title, id=f"{key}-title")]
        if labels:
            caption.append(render_tag("span", *labels, class_="lines"))
        return Html(
            f'<figure id="{key}" role="group" aria-labelledby="{key}-title">'
            f"<figcaption>{join(caption)}</figcaption>"
            '<ul class="readout" aria-hidden="true"></ul>'
            '<div class="plot" aria-hidden="true"></div></figure>\n'
        )


def _find_first_column(run: Run, columns: Iterable[str]) -> str | None:
    for name in columns:
        if has_number(run.series.columns.get(name, ())):
            return name
    return None


_LOSS = {"training": ("loss",), "validation": ("eval_loss",)}
_SPEED = {"": ("tokens_per_second", "logged_tokens_per_second")}
_MEMORY = {"allocated": ("allocated_gib",), "reserved": ("reserved_gib",)}
_REWARDS = {"chosen": ("rewards/chosen",), "rejected": ("rewards/rejected",)}
_MARGIN = {"": ("rewards/margins", "rewards/margin")}
_ACCURACY = {"": ("rewards/accuracies", "rewards/accuracy")}

PANELS: tuple[Panel, ...] = (
    Panel("loss", "loss", _LOSS, marks=True, log=True),
    Panel(
        "learning_rate",
        "learning rate",
        {"": ("learning_rate",)},
        floor="zero",
        noisy=False,
        log=True,
    ),
    Panel("tokens", "tokens/s", _SPEED, floor="zero"),
    Panel("memory", "peak memory", _MEMORY, unit="GiB", floor="zero", noisy=False),
    Panel("rewards", "rewards", _REWARDS),
    Panel("margin", "reward margin", _MARGIN),
    Panel("accuracy", "reward accuracy", _ACCURACY, floor="share"),
    Panel("grad_norm", "gradient norm", {"": ("grad_norm",)}, floor="zero", clips=True, log=True),
    Panel("wasted", "wasted share", {"": ("wasted_share",)}, floor="zero"),
)
"""The charts in view; every other column has a chart of its own, folded away."""


@dataclass(frozen=True, slots=True)
class _StageCharts:
    """The charts of the runs of one stage."""

    suffix: str
    run_numbers: Sequence[int]
    shown: Sequence[Panel]
    folded: Sequence[Panel]

    def as_json(self) -> list[dict[str, object]]:
        panels = []
        for panel in (*self.shown, *self.folded):
            is_folded = panel in self.folded
            fields = panel.as_json(self.suffix, self.run_numbers, folded=is_folded)
            panels.append(fields)
        return panels

    def as_html(self) -> Html:
        grid = self._render_grid(self.shown)
        if not self.folded:
            return grid
        title = f"{len(self.folded)} more"
        inner = self._render_grid(self.folded)
        more = render_details(title, inner, id=f"more-curves{self.suffix}", class_="more-curves")
        return join([grid, more])

    def _render_grid(self, panels: Sequence[Panel]) -> Html:
        figures = [panel.as_html(self.suffix) for panel in panels]
        return render_tag("div", *figures, class_="grid")


def render_charts(entries: Sequence[PageRun]) -> Html:
    """The charts by stage: losses of SFT and DPO cannot be compared."""
    if not any(entry.run.series.steps for entry in entries):
        return Html("")
    by_stage: dict[str, list[PageRun]] = {}
    for entry in entries:
        by_stage.setdefault(entry.run.stage or "", []).append(entry)
    panels: list[dict[str, object]] = []
    grids: list[Html] = []
    for number, (stage, members) in enumerate(by_stage.items()):
        suffix = f"-{number}" if number else ""
        charts = _build_stage_charts(suffix, members)
        panels += charts.as_json()
        if len(by_stage) > 1:
            grids.append(render_tag("h3", stage.upper() or "other", class_="stage"))
        grids.append(charts.as_html())
    controls = [_render_run_switches(entries), _TOOLS]
    data = _build_script_data(panels, entries)
    return render_section(
        "curves",
        "Curves",
        render_tag("div", *controls, class_="controls"),
        Html("<noscript><p>The curves need scripts; everything else does not.</p></noscript>"),
        *grids,
        Html(f'<script type="application/json" id="curves-data">{data}</script>'),
    )


def _build_stage_charts(suffix: str, entries: Sequence[PageRun]) -> _StageCharts:
    runs = [entry.run for entry in entries]
    shown: list[Panel] = []
    drawn: set[str] = set()
    for panel in PANELS:
        columns = panel.drawn_columns(runs)
        if columns:
            shown.append(panel.restrict_to(runs))
            drawn |= columns
    names: dict[str, None] = {}
    for run in runs:
        for name, values in run.series.columns.items():
            if has_number(values):
                names[name] = None
    folded = []
    for number, name in enumerate(names):
        if name not in drawn:
            folded.append(Panel(f"column-{number}", name, {"": (name,)}, log=True))
    return _StageCharts(suffix, [entry.number for entry in entries], shown, folded)


def _render_run_switches(entries: Sequence[PageRun]) -> Html:
    if len(entries) == 1:
        return Html("")
    switches = [Html('<legend class="visually-hidden">runs</legend>')]
    for entry in entries:
        box = f'<input type="checkbox" data-run="{entry.number}" checked autocomplete="off">'
        switches.append(Html(f"<label>{box}{entry.heading}</label>"))
    return render_tag("fieldset", *switches)


def _build_script_data(panels: Sequence[dict[str, object]], entries: Sequence[PageRun]) -> str:
    curves = []
    for entry in entries:
        fields = render_compact_json(entry.run.series).removeprefix("{")
        curves.append(f'{{"name":{json.dumps(entry.name)},{fields}')
    data = f'{{"version":1,"panels":{json.dumps(panels)},"runs":[{",".join(curves)}]}}'
    # no text inside may close the script element
    return data.replace("<", "\\u003c")
