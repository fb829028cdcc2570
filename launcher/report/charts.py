"""The charts of a page: which curve goes where, grouped by stage, and their data for the page's script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

from launcher.report import series
from launcher.report.html import Html, details, join, tag
from launcher.report.series import Run, any_number

COLOURS = 8
_TOOLS = Html(
    '<div class="tools"><label class="soft">x <select id="x-axis" autocomplete="off">'
    '<option value="step" selected>steps</option><option value="tokens">tokens</option>'
    '<option value="time">training time</option></select></label>'
    '<button type="button" id="log-y" aria-pressed="false">log scale</button>'
    '<label class="soft">smoothing <input type="range" id="smoothing" min="0" '
    'max="0.99" step="0.01" value="0" autocomplete="off"> <output id="smoothing-is">0.00</output></label>'
    '<button type="button" id="reset" title="drag over a chart to zoom">all steps</button>'
    '<a id="csv" class="button" href="#curves" title="all curves, a row a step">CSV</a>'
    '<output id="at" class="at soft">last step</output></div>'
)


class PageRun(NamedTuple):
    """A run as the page shows it: its number, which gives it its colour, and the name of its stage file."""

    number: int
    name: str
    run: Run

    @property
    def heading(self) -> Html:
        return join([self.mark, self.name])

    @property
    def mark(self) -> Html:
        swatch = f'<span class="swatch k{self.number % COLOURS}" aria-hidden="true"></span>'
        return join([Html(swatch), tag("span", self.number + 1, class_="no", title=self.name)])


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart over the optimizer steps. Of a run each line draws the first of its columns that the run has; a second
    line is dashed. The y axis begins at the `floor` "zero", or is a "share" of 1. `marks` shows where a step was not
    finite; what is not `noisy` is never smoothed; `clips` leaves a few spikes off the scale, and says so; `log` has a
    logarithmic scale where the reader asks for one."""

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

    def of(self, runs: Iterable[Run]) -> Panel:
        """The panel with those of its lines that there are; one alone needs no name."""
        present = {
            label: columns
            for label, columns in self.lines.items()
            if any(any_number(run.series.columns.get(name, ())) for run in runs for name in columns)
        }
        first = next(iter(self.lines))
        if list(present) == [first] and len(self.lines) > 1:
            present = {"": self.lines[first]}
        return replace(self, lines=present or self.lines)

    def drawn(self, runs: Iterable[Run]) -> set[str]:
        """The columns that it draws of any of these runs."""
        first = (
            next((name for name in columns if any_number(run.series.columns.get(name, ()))), None)
            for columns in self.lines.values()
            for run in runs
        )
        return {name for name in first if name is not None}

    def as_json(self, suffix: str, runs: Sequence[int], *, folded: bool) -> dict[str, object]:
        lines = [
            {"columns": columns, "label": label, "second": number > 0}
            for number, (label, columns) in enumerate(self.lines.items())
        ]
        options = {name: getattr(self, name) for name in ("floor", "marks", "noisy", "clips", "log")}
        return {"key": f"{self.key}{suffix}", "lines": lines, **options, "folded": folded, "runs": runs}

    def figure(self, suffix: str) -> Html:
        key, unit = f"panel-{self.key}{suffix}", tag("span", f" {self.unit}", class_="unit")
        lines = [
            tag("span", label, **({"class_": "second"} if number else {}))
            for number, label in enumerate(self.lines)
            if label
        ]
        title = tag("h3", join([self.title, unit if self.unit else ""]), id=f"{key}-title")
        caption = [title, tag("span", join(lines), class_="lines") if lines else ""]
        return Html(
            f'<figure id="{key}" role="group" aria-labelledby="{key}-title">'
            f"<figcaption>{join(caption)}</figcaption>"
            '<ul class="readout" aria-hidden="true"></ul>'
            '<div class="plot" aria-hidden="true"></div></figure>\n'
        )


_MEMORY = {"allocated": ("allocated_gib",), "reserved": ("reserved_gib",)}
PANELS: tuple[Panel, ...] = (
    Panel("loss", "loss", {"training": ("loss",), "validation": ("eval_loss",)}, marks=True, log=True),
    Panel("learning_rate", "learning rate", {"": ("learning_rate",)}, floor="zero", noisy=False, log=True),
    Panel("tokens", "tokens/s", {"": ("tokens_per_second", "logged_tokens_per_second")}, floor="zero"),
    Panel("memory", "peak memory", _MEMORY, unit="GiB", floor="zero", noisy=False),
    Panel("rewards", "rewards", {"chosen": ("rewards/chosen",), "rejected": ("rewards/rejected",)}),
    Panel("margin", "reward margin", {"": ("rewards/margins", "rewards/margin")}),
    Panel("accuracy", "reward accuracy", {"": ("rewards/accuracies", "rewards/accuracy")}, floor="share"),
    Panel("grad_norm", "gradient norm", {"": ("grad_norm",)}, floor="zero", clips=True, log=True),
    Panel("wasted", "wasted share", {"": ("wasted_share",)}, floor="zero"),
)
"""The charts that everybody looks at; any other column has one of its own, folded away."""


def section(entries: Sequence[PageRun]) -> Html:
    """A grid of charts a stage: losses of SFT and DPO have nothing in common."""
    if not any(entry.run.series.steps for entry in entries):
        return Html("")
    stages = dict.fromkeys(entry.run.stage or "" for entry in entries)
    data: list[dict[str, object]] = []
    grids: list[Html] = []
    for number, stage in enumerate(stages):
        own = [entry for entry in entries if (entry.run.stage or "") == stage]
        suffix, numbers, runs = f"-{number}" if number else "", [one.number for one in own], [one.run for one in own]
        shown = [panel.of(runs) for panel in PANELS if panel.drawn(runs)]
        drawn = {name for panel in shown for name in panel.drawn(runs)}
        names = dict.fromkeys(name for run in runs for name, one in run.series.columns.items() if any_number(one))
        folded = [
            Panel(f"column-{n}", name, {"": (name,)}, log=True) for n, name in enumerate(names) if name not in drawn
        ]
        data += [panel.as_json(suffix, numbers, folded=panel in folded) for panel in (*shown, *folded)]
        if len(stages) > 1:
            grids.append(tag("h3", stage.upper() or "other", class_="stage"))
        grid, more = (
            tag("div", join(panel.figure(suffix) for panel in panels), class_="grid") for panels in (shown, folded)
        )
        grids.append(grid)
        if folded:
            grids.append(details(f"{len(folded)} more", more, id=f"more-curves{suffix}", class_="more-curves"))
    switches = [Html('<legend class="visually-hidden">runs</legend>')]
    for entry in entries:
        box = f'<input type="checkbox" data-run="{entry.number}" checked autocomplete="off">'
        switches.append(Html(f"<label>{box}{entry.heading}</label>"))
    fieldset = tag("fieldset", join(switches)) if len(entries) > 1 else ""
    curves = ",".join(f'{{"name":{json.dumps(entry.name)},{series.compact(entry.run.series)[1:]}' for entry in entries)
    # no text in it can end it early
    whole = f'{{"version":1,"panels":{json.dumps(data)},"runs":[{curves}]}}'.replace("<", "\\u003c")
    parts = [
        tag("h2", "Curves", id="curves"),
        tag("div", join([fieldset, _TOOLS]), class_="controls"),
        Html("<noscript><p>The curves need scripts; everything else does not.</p></noscript>"),
        *grids,
        Html(f'<script type="application/json" id="curves-data">{whole}</script>'),
    ]
    return tag("section", join(parts))
