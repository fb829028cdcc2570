"""A comparison -> a table for the terminal, and a page with the runs' curves in the same charts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import comparison, page, report, rundir, series
from launcher.bench import PAGE, Bench
from launcher.comparison import Row, Spread
from launcher.markup import Html, figure, join, table, tag
from launcher.printable import printable
from launcher.redaction import redact


@dataclass(frozen=True, slots=True)
class Column:
    """One quantity: its head, and how its cell is made of a row."""

    head: str
    cell: Callable[[Row], str]


def _spread(name: str, scale: float = 1.0, unit: str = "", digits: int = 4) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.loss if name == "loss_per_token" else row.spreads.get(name)
        return _range(found, scale, unit, digits)

    return cell


def _range(found: Spread | None, scale: float, unit: str, digits: int) -> str:
    """`median (min - max)`, or the one value."""
    if found is None:
        return "–"
    middle, low, high = (figure(v * scale, digits) for v in (found.median, found.min, found.max))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low} – {high})"


def _ratio(row: Row) -> str:
    return "–" if row.speed_ratio is None else f"{row.speed_ratio:.2f}x"


def _change(row: Row) -> str:
    return "–" if row.loss_change is None else f"{row.loss_change:+.2%}"


def _runs(row: Row) -> str:
    counted = row.spreads.get(comparison.SPEED)
    failed = f", {len(row.failures)} failed" if row.failures else ""
    return f"{0 if counted is None else counted.n}{failed}"


def _wasted(row: Row) -> str:
    """The share of positions without a token, and how many of a whole trial."""
    share, count = _spread("wasted_share", 100, " %", 3)(row), row.median("wasted_tokens")
    return share if count is None else f"{share}, {count:,.0f}"


def _utilisation(row: Row) -> str:
    values = [row.median(f"gpu_utilisation_{p}") for p in ("p50", "p95")]
    return "–" if None in values else " / ".join(f"{v:.0%}" for v in values if v is not None)


COLUMNS: tuple[Column, ...] = (
    Column("tokens/s per GPU", _spread(comparison.SPEED)),
    Column("to first", _ratio),
    Column("MFU", _spread("mfu", 100, " %", 3)),
    Column("wasted, tokens", _wasted),
    Column("tokens a step", _spread("tokens_per_step")),
    Column("s a step", _spread("seconds_per_step")),
    Column("s before", _spread("seconds_before_steps", digits=3)),
    Column("GPU p50 / p95", _utilisation),
    Column("peak GiB", _spread("peak_allocated_gib")),
    Column("loss per token", _spread("loss_per_token", digits=5)),
    Column("loss to first", _change),
    Column("runs", _runs),
)


def standing(row: Row) -> str:
    """In words what is to be thought of a variant."""
    word = f"{row.standing}{', recommended' if row.recommended else ''}"
    return f"{word}: {row.why}" if row.why else word


def facts(bench: Bench) -> list[str]:
    """What was compared, over what, and what does not hold."""
    tokens = comparison.common_tokens(bench.samples)
    unit = "row" if bench.weights() == "rows" else "token"
    lines = []
    lines += [f"error: {one.message}" for one in comparison.baseline_fault(bench.samples)]
    if tokens is not None:
        lines.append(
            f"loss: mean of the probe's losses a step, weighted by {bench.weights()}, over the first "
            f"{tokens:,.0f} tokens of every run; tolerance {comparison.share(bench.tolerance)} of the first"
        )
        if unit == "row":
            lines[0] = lines[0].replace("loss:", "loss of a pair:", 1)
    if any(sample.measured for sample in bench.samples):
        lines.append(
            "speed: real tokens of steady steps (without the first fifth, at least one, and what "
            "follows a save); median (least – most) of the runs"
        )
    for one in bench.broken:
        said = "nobody measured it" if one.unknown else "it does not hold"
        lines.append(f"assert {one.text}, {one.variant}: {said}")
    return lines


def show(bench: Bench) -> None:
    """The table to stdout."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    report.findings(comparison.baseline_fault(bench.samples))
    rows = redact(bench.rows)
    columns = _filled(rows)
    shown = Table(box=SIMPLE, pad_edge=False)
    shown.add_column("variant", overflow="fold")
    for column in columns:
        shown.add_column(column.head, justify="right")
    for row in rows:
        style = "bold" if row.recommended else None
        cells = [Text(printable(row.variant)), *(Text(column.cell(row)) for column in columns)]
        shown.add_row(*cells, style=style)
    wide = {} if sys.stdout.isatty() else {"width": 200}
    console = Console(**wide)  # type: ignore[arg-type]
    if rows:
        console.print(shown)
    for row in rows:
        console.print(Text(printable(f"{row.variant}: {standing(row)}")), soft_wrap=True)
    for line in redact(facts(bench)):
        console.print(Text(printable(line)), soft_wrap=True)
    console.print(Text(printable(f"{bench.folder / PAGE}")), soft_wrap=True)


def _filled(rows: Sequence[Row]) -> list[Column]:
    """The columns of which anything is known."""
    return [column for column in COLUMNS if any(column.cell(row) != "–" for row in rows)]


def html(bench: Bench) -> str:
    """The table above the page of one measured run of each variant."""
    runs = []
    for row in bench.rows:
        run = next((s.run for s in bench.samples if s.variant == row.variant and s.run), None)
        if run is not None and Path(run).is_dir():
            runs.append(replace(series.read_folder(Path(run)), name=redact(row.variant)))
    return page.overlay(runs, _section(bench))


def _section(bench: Bench) -> Html:
    rows = redact(bench.rows)
    columns = _filled(rows)
    head = ["variant", "", *(tag("th", c.head, scope="col", class_="number") for c in columns)]
    body = [
        [
            row.variant, _judged(row),
            *(tag("td", column.cell(row), class_="number") for column in columns),
        ]
        for row in rows
    ]  # fmt: skip
    why = join(tag("p", f"{row.variant}: {standing(row)}") for row in rows if row.why)
    title = tag("h2", f"Comparison: {bench.request.config}", id="comparison")
    notes = join(tag("p", line, class_="soft") for line in redact(facts(bench)))
    return tag("section", join([title, table(head, body, "figures"), why, notes]))


def _judged(row: Row) -> Html:
    """A variant's standing in a word or two, by colour too."""
    bad = row.standing in ("failed", "flawed", "loss changed")
    kind = "fail" if bad else "pass" if row.recommended else ""
    word = "recommended" if row.recommended else row.standing
    return tag("span", word, class_=f"word {kind}".strip())


def write(bench: Bench) -> None:
    """The page, into the folder of the bench. Raises NotReady where it cannot be written."""
    try:
        rundir.write_text(bench.folder / PAGE, html(bench))
    except OSError as error:
        raise rundir.not_writable(bench.folder, error.strerror) from None
