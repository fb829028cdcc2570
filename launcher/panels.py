"""Which curves share a chart, what it is called, and in which order the charts stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.series import Run, Series, any_number

Floor = Literal["zero", "share"]
"""Of the y axis: it begins at zero; it is 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a run: the first of these columns that the run has.

    `second` is the lesser of two curves of the same run, drawn dashed.
    """

    columns: tuple[str, ...]
    label: str = ""
    second: bool = False

    def column(self, series: Series) -> str | None:
        """The column that is drawn of this run; None where it has none of them."""
        return next((n for n in self.columns if any_number(series.columns.get(n, ()))), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart over the optimizer steps.

    `marks` shows where a step was not finite; what is not `noisy` is never smoothed.
    """

    key: str
    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    floor: Floor | None = None
    marks: bool = False
    noisy: bool = True

    def shown(self, runs: Sequence[Run]) -> bool:
        """Whether any run has anything for it."""
        return any(line.column(run.series) is not None for line in self.lines for run in runs)


PANELS: tuple[Panel, ...] = (
    Panel(key="loss", title="loss", lines=(Line(columns=("loss", "logged_loss")),), marks=True),
    Panel(
        key="learning_rate", title="learning rate", floor="zero", noisy=False,
        lines=(Line(columns=("learning_rate",)),),
    ),
    Panel(
        key="tokens", title="tokens/s", floor="zero",
        lines=(Line(columns=("tokens_per_second", "logged_tokens_per_second")),),
    ),
    Panel(
        key="memory", title="peak memory", unit="GiB", floor="zero", noisy=False,
        lines=(
            Line(columns=("allocated_gib",), label="allocated"),
            Line(columns=("reserved_gib",), label="reserved", second=True),
        ),
    ),
    Panel(
        key="rewards", title="rewards",
        lines=(
            Line(columns=("rewards/chosen",), label="chosen"),
            Line(columns=("rewards/rejected",), label="rejected", second=True),
        ),
    ),
    Panel(
        key="margin", title="reward margin",
        lines=(Line(columns=("rewards/margins", "rewards/margin")),),
    ),
    Panel(
        key="accuracy", title="reward accuracy", floor="share",
        lines=(Line(columns=("rewards/accuracies", "rewards/accuracy")),),
    ),
    Panel(
        key="grad_norm", title="gradient norm", floor="zero",
        lines=(Line(columns=("grad_norm",)),),
    ),
    Panel(
        key="wasted", title="wasted share", floor="zero",
        lines=(Line(columns=("wasted_share",)),),
    ),
    Panel(key="mfu", title="MFU", floor="zero", lines=(Line(columns=("mfu",)),)),
)  # fmt: skip


def first(runs: Sequence[Run]) -> list[Panel]:
    """The charts that everybody looks at, of which there is anything to draw."""
    return [panel for panel in PANELS if panel.shown(runs)]


def further(runs: Sequence[Run]) -> list[Panel]:
    """A chart for each of the other columns, in the order of their first mention."""
    drawn = {name for panel in PANELS for line in panel.lines for name in line.columns}
    # what stands in for a column that another run has would be lost: these get charts of their own
    drawn -= {"logged_loss", "logged_tokens_per_second"}
    names = dict.fromkeys(name for run in runs for name in run.series.columns)
    made = (
        Panel(key=f"column-{number}", title=name, lines=(Line(columns=(name,)),))
        for number, name in enumerate(names)
        if name not in drawn
    )
    return [panel for panel in made if panel.shown(runs) and not _repeats(panel, runs)]


def _repeats(panel: Panel, runs: Sequence[Run]) -> bool:
    """Whether a chart above already draws this very column of every run that has it."""
    (name,) = panel.lines[0].columns
    having = [run for run in runs if any_number(run.series.columns.get(name, ()))]
    lines = [line for other in PANELS for line in other.lines if name in line.columns]
    return any(all(line.column(run.series) == name for run in having) for line in lines)
