"""A comparison -> a table for the terminal, and a page with the runs' curves in the same charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from launcher import comparison, page, report, rundir, series
from launcher.bench import PAGE, Bench
from launcher.comparison import LOSS, Row
from launcher.markup import Html, figure, join, table, tag
from launcher.redaction import redact


def _spread(name: str, scale: float = 1.0, unit: str = "", digits: int = 4) -> Callable[[Row], str]:
    """`median (least – most)`, or the one value."""

    def cell(row: Row) -> str:
        found = row.loss if name == LOSS else row.spreads.get(name)
        if found is None:
            return "–"
        middle, low, high = (
            figure(v * scale, digits) for v in (found.median, found.min, found.max)
        )
        return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low} – {high})"

    return cell


def _wasted(row: Row) -> str:
    """The share of positions without a token, and how many of a whole trial."""
    share, count = _spread("wasted_share", 100, " %", 3)(row), row.median("wasted_tokens")
    return share if count is None else f"{share}, {count:,.0f}"


def _runs(row: Row) -> str:
    speed = row.spreads.get(comparison.SPEED)
    failed = f", {len(row.failures)} failed" if row.failures else ""
    return f"{0 if speed is None else speed.n}{failed}"


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "tokens/s per GPU": _spread(comparison.SPEED),
    "to first": lambda row: "–" if row.speed_ratio is None else f"{row.speed_ratio:.2f}x",
    "MFU": _spread("mfu", 100, " %", 3),
    "wasted, tokens": _wasted,
    "tokens a step": _spread("tokens_per_step"),
    "s a step": _spread("seconds_per_step"),
    "s before": _spread("seconds_before_steps", digits=3),
    "peak GiB": _spread("peak_allocated_gib"),
    "loss per token": _spread(LOSS, digits=5),
    "loss to first": lambda row: "–" if row.loss_change is None else f"{row.loss_change:+.2%}",
    "runs": _runs,
}


def cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns of which anything is known, and each row's cells."""
    heads = [head for head, cell in COLUMNS.items() if any(cell(row) != "–" for row in rows)]
    return heads, [[COLUMNS[head](row) for head in heads] for row in rows]


def standing(row: Row) -> str:
    """In words what is to be thought of a variant."""
    word = f"{row.standing}{', recommended' if row.recommended else ''}"
    return f"{word}: {row.why}" if row.why else word


def facts(bench: Bench) -> list[str]:
    """What was compared, over what, and what does not hold."""
    tokens = comparison.common_tokens(bench.samples)
    lines = [f"error: {fault.message}" for fault in comparison.baseline_fault(bench.samples)]
    if tokens is not None:
        pair = " of a pair" if bench.weights == "rows" else ""
        lines.append(
            f"loss{pair}: mean of the probe's losses a step, weighted by {bench.weights}, over the first "
            f"{tokens:,.0f} tokens of every run; tolerance {comparison.share(bench.tolerance)} of the first"
        )
    if any(sample.measured for sample in bench.samples):
        lines.append(
            "speed: real tokens of steady steps (without the first fifth, at least one, and what "
            "follows a save); median (least – most) of the runs"
        )
    for one in bench.broken:
        why = "its figure was not measured" if one["unknown"] else "it does not hold"
        lines.append(f"assert {one['assert']}, {one['variant']}: {why}")
    return lines


def show(bench: Bench) -> None:
    """The table to stdout."""
    report.findings(comparison.baseline_fault(bench.samples))
    rows = redact(bench.rows)
    heads, body = cells(rows)
    lines = [
        {"variant": row.variant, **dict(zip(heads, texts, strict=True))}
        for row, texts in zip(rows, body, strict=True)
    ]
    if lines:
        report.table(lines, ("variant", *heads))
    for line in [*(f"{row.variant}: {standing(row)}" for row in rows), *redact(facts(bench))]:
        report.say(line)
    report.say(str(bench.folder / PAGE))


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
    heads, body = cells(rows)
    head = ["variant", "", *(tag("th", one, scope="col", class_="number") for one in heads)]
    lines = [
        [row.variant, _word(row), *(tag("td", text, class_="number") for text in texts)]
        for row, texts in zip(rows, body, strict=True)
    ]
    why = join(tag("p", f"{row.variant}: {standing(row)}") for row in rows if row.why)
    title = tag("h2", f"Comparison: {bench.request.config}", id="comparison")
    notes = join(tag("p", line, class_="soft") for line in redact(facts(bench)))
    return tag("section", join([title, table(head, lines, "figures"), why, notes]))


def _word(row: Row) -> Html:
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
