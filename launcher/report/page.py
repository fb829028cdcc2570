"""Runs -> one self-contained HTML file: what went wrong, curves, verdict, plan, arguments. Everything but the curves
is plain HTML: it reads without scripts, and every text is escaped where it enters. The policy in the page's head
allows nothing but the style and the script that are in it."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import not_ready
from launcher.plan.plan import titled
from launcher.report import charts, evaluation, sections, series, usage
from launcher.report.charts import PageRun
from launcher.report.html import Html, details, figure, join, table, tag, text
from launcher.report.series import Run
from launcher.runs import rundir
from launcher.runs.record import as_mapping
from launcher.verdict import summary

_ASSETS = Path(__file__).resolve().parent / "assets"
_NAVIGATION = {"samples": "before and after", "plan": "plan and measurement", "versions": "versions and command"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """What a page of several runs begins with: its title, the decision (`go`, `fail`), tables and lines. A table is a
    list of rows by column; `colour` is the class of the decision (`pass`, `fail`, `unproven`); `names` are what to
    call runs, by folder."""

    title: str
    decision: str = ""
    colour: str = ""
    tables: Sequence[Sequence[Mapping[str, Any]]] = ()
    lines: Sequence[str] = ()
    names: Mapping[Path, str] = field(default_factory=dict)


def overlay(runs: Sequence[Run], lead: Lead | None = None) -> str:
    runs = series.named_apart(runs)
    lead = lead or Lead(title=_title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs")
    titles = [lead.names.get(run.path) or _title(run) for run in runs]
    if len({*titles}) < len(runs):
        titles = [run.name for run in runs]
    entries = [PageRun(number, name, run) for number, (name, run) in enumerate(zip(titles, runs, strict=True))]
    style = _asset("uPlot.min.css") + "\n" + _asset("report.css")
    # its licence asks to go where the code goes
    licence = f"/*! uPlot: {_asset('uPlot.LICENSE')} */\n"
    script = licence + _asset("uPlot.min.js") + "\n" + _asset("report.js")
    body = {
        "curves": charts.section(entries),
        "verdict": sections.verdicts(entries),
        evaluation.KEY: evaluation.section(entries),
        "samples": sections.samples(entries),
        "plan": sections.plans(entries),
        usage.KEY: usage.section(entries),
        "arguments": sections.arguments(entries),
        "findings": sections.findings(entries),
        "versions": sections.versions(entries),
    }
    if len(runs) == 1 and runs[0].verdict.get("status") != "pass":
        body = {"verdict": body["verdict"], **body}
    parts = [
        _head(lead, entries, [key for key, section in body.items() if section]),
        _lead(lead),
        *(_banner(entry, several=len(runs) > 1) for entry in entries),
        _overview(entries),
        tag("main", join(body.values())),
    ]
    policy = f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
    policy += "base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(lead.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{''.join(parts)}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def usual_path(runs: Sequence[Run]) -> Path:
    """Where the page goes when nobody says: into the run's own folder, else `report.html` here."""
    alone = len(runs) == 1 and runs[0].path.is_dir()
    return rundir.RunFolder(runs[0].path).report if alone else Path("report.html")


def write(runs: Sequence[Run], path: Path, lead: Lead | None = None) -> None:
    whole = overlay(runs, lead)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, whole)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise not_ready("unwritable-file", message, file=str(path)) from None


@lru_cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _source(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _title(run: Run) -> str:
    if not run.manifest:
        return run.name
    title = titled(run.stage or "", str(run.manifest.get("name") or run.name))
    model = as_mapping(run.arguments.get("model_name_or_path")).get("value")
    return f"{title} of {Path(str(model)).name}" if title == run.stage and model else title


def _head(lead: Lead, entries: Sequence[PageRun], keys: Sequence[str]) -> Html:
    run, alone = entries[0].run, len(entries) == 1
    title: list[object] = [lead.title]
    if lead.decision:
        title += [" ", tag("span", lead.decision, class_=f"status word {lead.colour}")]
    elif alone and run.verdict.get("status"):
        title += [" ", tag("span", sections.word(summary.outcome(run.verdict)), class_="status")]
    links = (tag("a", _NAVIGATION.get(key, key), href=f"#{key}") for key in keys)
    below: list[object] = [run.name] if alone and run.name != lead.title else []
    if alone and run.tracker:
        below.append(sections.link(run.tracker))
    folder = tag("p", join(below, " · "), class_="folder") if below else ""
    return tag(
        "header", tag("div", join([tag("h1", join(title)), folder, tag("nav", join(links, " "))])), class_="top"
    )


def _banner(entry: PageRun, *, several: bool) -> Html:
    """Why the run did not pass, what to do about it, the line that shows it and the end of the log."""
    cause = summary.cause(entry.run.verdict)
    if cause is None:
        return Html("")
    outcome = summary.outcome(entry.run.verdict)
    head = [sections.word(outcome), " ", *([entry.heading, ": "] if several else []), cause.text]
    parts = [tag("p", join(head), class_="cause")]
    if cause.help:
        parts.append(tag("p", join([tag("b", "What to do: "), cause.help])))
    parts.append(sections.citations([cause.line] if cause.line else []))
    if tail := entry.run.tail:
        lines = f"the last {len(tail)} lines of the log"
        lines += f" (all of it: launch logs {entry.run.path.name})" if entry.run.manifest else ""
        # how a run ended that did train is not what failed
        shown = {"open": "open"} if outcome == "fail" and not several else {}
        parts.append(details(lines, tag("pre", "\n".join(tail), tabindex="0"), **shown))
    colour = outcome if outcome in ("fail", "unproven") else "stopped"
    return tag("section", join(parts), class_=f"banner {colour}", aria_label="what went wrong")


def _lead(lead: Lead) -> Html:
    parts: list[Html] = [tag("p", line) for line in lead.lines]
    for rows in lead.tables:
        columns = list(rows[0]) if rows else []
        parts.append(table(columns, [[_lead_cell(name, row.get(name)) for name in columns] for row in rows], "lead"))
    return tag("section", join(parts), class_="result", aria_label="result") if parts else Html("")


_COLOURS = {  # the class of a word that judges
    **dict.fromkeys(("go", "green", "passed", "skipped"), "pass"),
    **dict.fromkeys(("no-go", "red", "failed", "refused"), "fail"),
    "yellow": "unproven",
}


def _lead_cell(name: str, value: object) -> Html:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = figure(value)
    shown = "–" if value is None else str(value)
    # `5,865 (5,392 – 6,338)`: the range below the figure
    middle, range_, rest = shown.partition(" (") if " – " in shown else (shown, "", "")
    inner = [middle, *([Html("<br>"), tag("small", f"({rest}")] if range_ else [])]
    return tag("td", join(inner), class_=_COLOURS.get(shown, ""), data_label=name)


def _overview(entries: Sequence[PageRun]) -> Html:
    """One line a run: how it ended, and the figures that people ask for first."""
    several = len(entries) > 1
    models = [as_mapping(e.run.arguments.get("model_name_or_path")).get("value") for e in entries]
    # what is the same everywhere tells nothing apart, and takes the room of what does
    named = not several or len({*map(str, models)}) > 1
    figures = ("steps", "first loss", "last loss", "tokens/s", "peak GiB", "time")
    texts = ["model"] * named + ["started"]
    head = ["run" if several else "stage", "verdict", *map(sections.right, figures), *texts]
    rows = []
    references: dict[str | None, Sequence[float | None]] = {}
    for entry, model in zip(entries, models, strict=True):
        run, measured = entry.run, series.measured(entry.run)
        rate = measured["tokens_per_second"]
        rate = measured["logged_tokens_per_second"] if rate is None else rate
        first = tag("th", run.stage or "–", scope="row")
        if several:
            folder = [] if entry.name == run.name else [Html("<br>"), tag("small", run.name)]
            first = tag("th", join([entry.heading, *folder]), scope="row", class_="run")
        numbers = [*(measured[key] for key in ("steps", "first_loss", "last_loss")), rate, measured["peak_gib"]]
        shown: list[object] = ["–" if number is None else figure(number) for number in numbers]
        shown.append(sections.clock(measured["hours"]))
        # the first run of a stage is what the others are compared with
        reference = references.setdefault(run.stage, (*numbers, measured["hours"]))
        for place, number in enumerate((*numbers, measured["hours"])):
            shown[place] = _with_difference(shown[place], number, reference[place])
        created = str(run.manifest.get("created") or "–").replace("T", " ").replace("+00:00", " UTC")
        # on a narrow screen each cell stands beside its own label
        rows.append(
            [
                first,
                tag("td", sections.word(summary.outcome(run.verdict) if run.verdict else "unproven")),
                *(
                    tag("td", cell, data_label=label, class_="number")
                    for label, cell in zip(figures, shown, strict=True)
                ),
                *([tag("td", model or "–", data_label="model", class_="value")] * named),
                tag("td", created, data_label="started", class_="time"),
            ]
        )
    return table(head, rows, "overview")


def _with_difference(shown: object, number: float | None, reference: float | None) -> object:
    """A figure, with how far it is from that of the first run below it."""
    if number is None or not reference or number == reference:
        return shown
    share = (number - reference) / abs(reference)
    return join([shown, Html("<br>"), tag("small", f"{share:+.1%}".replace("-", "−"))])
