"""Runs as one self-contained HTML file: what went wrong, curves, verdict, plan, arguments.

Everything but the curves is plain HTML and needs no script; all text is escaped where it enters.
The policy in the page's head allows only the style and the script that are inside.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from html import escape
from pathlib import Path

from launcher import files
from launcher.errors import unwritable
from launcher.lazy_dataclass import dataclass
from launcher.plan.plan import format_title
from launcher.report import charts, evaluation, sections, series, usage
from launcher.report.charts import PageRun
from launcher.report.html import (
    Html,
    escape_text,
    format_number,
    join,
    render_details,
    render_small_below,
    render_table,
    render_tag,
)
from launcher.report.series import Run
from launcher.runs import rundir
from launcher.runs.record import Json, as_mapping
from launcher.verdict import summary

_ASSETS = Path(__file__).resolve().parent / "assets"
_LINK_WORDS = {
    "samples": "before and after",
    "plan": "plan and measurement",
    "versions": "versions and command",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The top of a page of several runs: its title, the decision (`go`, `fail`), tables and lines.

    A table is a list of rows by column; `colour` is the class of the decision (`pass`, `fail`,
    `unproven`); `names` are what to call runs, by folder.
    """

    title: str
    decision: str = ""
    colour: str = ""
    tables: Sequence[Sequence[Json]] = ()
    lines: Sequence[str] = ()
    names: Mapping[Path, str] = field(default_factory=dict)


def render(runs: Sequence[Run], lead: Lead | None = None) -> str:
    """The page of one run, or of several with a common part at the top."""
    runs = series.rename_duplicates(runs)
    if lead is None:
        title = f"{len(runs)} runs"
        if len(runs) == 1:
            title = _choose_title(runs[0])
        lead = Lead(title=title)
    entries = _build_page_runs(runs, lead)
    body = {
        "curves": charts.render_charts(entries),
        "verdict": sections.render_verdicts(entries),
        evaluation.KEY: evaluation.render_evaluations(entries),
        "samples": sections.render_samples(entries),
        "plan": sections.render_plans(entries),
        usage.KEY: usage.render_usage(entries),
        "arguments": sections.render_arguments(entries),
        "findings": sections.render_findings(entries),
        "versions": sections.render_versions(entries),
    }
    if len(runs) == 1 and runs[0].verdict.get("status") != "pass":
        # a run that did not pass begins with its verdict
        body = {"verdict": body["verdict"], **body}
    parts = [_render_head(lead, entries, body), _render_lead(lead)]
    for entry in entries:
        parts.append(_render_banner(entry, several=len(runs) > 1))
    parts.append(_render_overview(entries))
    parts.append(render_tag("main", *body.values()))
    return _build_document(lead.title, join(parts))


def _build_page_runs(runs: Sequence[Run], lead: Lead) -> list[PageRun]:
    titles = [lead.names.get(run.path) or _choose_title(run) for run in runs]
    if len(set(titles)) < len(runs):
        titles = [run.name for run in runs]
    return [PageRun(number, titles[number], run) for number, run in enumerate(runs)]


def _build_document(title: str, body: Html) -> str:
    style = _read_asset("uPlot.min.css") + "\n" + _read_asset("report.css")
    # the licence of uPlot asks to go where its code goes
    licence = f"/*! uPlot: {_read_asset('uPlot.LICENSE')} */\n"
    script = licence + _read_asset("uPlot.min.js") + "\n" + _read_asset("report.js")
    policy = (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def choose_path(runs: Sequence[Run]) -> Path:
    """The run's own folder for one run, else `report.html` in the working directory."""
    if len(runs) == 1 and runs[0].path.is_dir():
        return rundir.RunFolder(runs[0].path).report
    return Path("report.html")


def write(runs: Sequence[Run], path: Path, lead: Lead | None = None) -> None:
    page = render(runs, lead)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, page)
    except OSError as error:
        raise unwritable(path, error) from None


@lru_cache
def _read_asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _hash_source(content: str) -> str:
    """The content as a source that the policy allows."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _choose_title(run: Run) -> str:
    if not run.manifest:
        return run.name
    name = str(run.manifest.get("name") or run.name)
    title = format_title(run.stage or "", name)
    model = _read_model(run)
    if model and title == run.stage:
        return f"{title} of {Path(str(model)).name}"
    return title


def _read_model(run: Run) -> object:
    return as_mapping(run.arguments.get("model_name_or_path")).get("value")


def _render_head(lead: Lead, entries: Sequence[PageRun], body: Mapping[str, Html]) -> Html:
    title: list[object] = [lead.title]
    subtitle: list[object] = []
    if lead.decision:
        decision = render_tag("span", lead.decision, class_=f"status word {lead.colour}")
        title += [" ", decision]
    if len(entries) == 1:
        run = entries[0].run
        if run.verdict.get("status") and not lead.decision:
            outcome = sections.render_word(summary.describe_outcome(run.verdict))
            title += [" ", render_tag("span", outcome, class_="status")]
        if run.name != lead.title:
            subtitle.append(run.name)
        if run.tracker:
            subtitle.append(sections.render_link(run.tracker))
    parts = [render_tag("h1", *title)]
    if subtitle:
        parts.append(render_tag("p", join(subtitle, " · "), class_="folder"))
    parts.append(_render_links(body))
    return render_tag("header", render_tag("div", *parts), class_="top")


def _render_links(body: Mapping[str, Html]) -> Html:
    """A link to each part of the page that has content."""
    links = []
    for key, section in body.items():
        if section:
            word = _LINK_WORDS.get(key, key)
            links.append(render_tag("a", word, href=f"#{key}"))
    return render_tag("nav", join(links, " "))


def _render_banner(entry: PageRun, *, several: bool) -> Html:
    """Why the run did not pass, what to do about it, the evidence and the end of the log."""
    run = entry.run
    cause = summary.find_cause(run.verdict)
    if cause is None:
        return Html("")
    outcome = summary.describe_outcome(run.verdict)
    head: list[object] = [sections.render_word(outcome), " "]
    if several:
        head += [entry.heading, ": "]
    parts = [render_tag("p", *head, cause.text, class_="cause")]
    if cause.help:
        parts.append(render_tag("p", render_tag("b", "What to do: "), cause.help))
    if cause.line:
        parts.append(sections.render_evidence([cause.line]))
    if run.tail:
        title = f"the last {len(run.tail)} lines of the log"
        if run.manifest:
            title += f" (all of it: launch logs {run.name})"
        log = render_tag("pre", "\n".join(run.tail), tabindex="0")
        # how a run ended that did train is not what failed
        is_open = outcome == "fail" and not several
        parts.append(render_details(title, log, is_open=is_open))
    colour = "stopped"
    if outcome in ("fail", "unproven"):
        colour = outcome
    return render_tag("section", *parts, class_=f"banner {colour}", aria_label="what went wrong")


def _render_lead(lead: Lead) -> Html:
    parts: list[Html] = [render_tag("p", line) for line in lead.lines]
    for rows in lead.tables:
        parts.append(_render_lead_table(rows))
    if not parts:
        return Html("")
    return render_tag("section", *parts, class_="result", aria_label="result")


def _render_lead_table(rows: Sequence[Json]) -> Html:
    """A table of records, with the columns of the first."""
    if not rows:
        return Html("")
    columns = list(rows[0])
    cells = []
    for row in rows:
        cells.append([_render_lead_cell(name, row.get(name)) for name in columns])
    return render_table(columns, cells, "lead")


_WORD_COLOURS = {
    "go": "pass",
    "green": "pass",
    "passed": "pass",
    "skipped": "pass",
    "no-go": "fail",
    "red": "fail",
    "failed": "fail",
    "refused": "fail",
    "yellow": "unproven",
}


def _render_lead_cell(name: str, value: object) -> Html:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = format_number(value)
    shown = "–"
    if value is not None:
        shown = str(value)
    inner: object = shown
    if " – " in shown and " (" in shown:
        # `5,865 (5,392 – 6,338)`: the range below the figure
        middle, _, limits = shown.partition(" (")
        inner = render_small_below(middle, f"({limits}")
    return render_tag("td", inner, class_=_WORD_COLOURS.get(shown, ""), data_label=name)


_FIGURES = ("steps", "first loss", "last loss", "tokens/s", "peak GiB", "time")


def _render_overview(entries: Sequence[PageRun]) -> Html:
    """One line a run: how it ended, and its main figures."""
    several = len(entries) > 1
    models = {str(_read_model(entry.run)) for entry in entries}
    # a model that all runs share would only take room
    with_model = not several or len(models) > 1
    first_column = "run" if several else "stage"
    head: list[object] = [first_column, "verdict", *map(sections.render_right, _FIGURES)]
    if with_model:
        head.append("model")
    head.append("started")
    rows = []
    first_of_stage: dict[str | None, Sequence[float | None]] = {}
    for entry in entries:
        run = entry.run
        figures = _collect_figures(run)
        reference = first_of_stage.setdefault(run.stage, figures)
        row = [_render_run_cell(entry, several=several), _render_outcome_cell(run)]
        row += _render_figure_cells(figures, reference)
        if with_model:
            model = _read_model(run) or "–"
            row.append(render_tag("td", model, data_label="model", class_="value"))
        row.append(_render_start_cell(run))
        rows.append(row)
    return render_table(head, rows, "overview")


def _render_outcome_cell(run: Run) -> Html:
    outcome = "unproven"
    if run.verdict:
        outcome = summary.describe_outcome(run.verdict)
    return render_tag("td", sections.render_word(outcome))


def _render_start_cell(run: Run) -> Html:
    created = str(run.manifest.get("created") or "–")
    created = created.replace("T", " ").replace("+00:00", " UTC")
    return render_tag("td", created, data_label="started", class_="time")


def _render_run_cell(entry: PageRun, *, several: bool) -> Html:
    run = entry.run
    if not several:
        return render_tag("th", run.stage or "–", scope="row")
    heading = entry.heading
    if entry.name != run.name:
        heading = render_small_below(heading, run.name)
    return render_tag("th", heading, scope="row", class_="run")


def _collect_figures(run: Run) -> list[float | None]:
    """The numbers of `_FIGURES`; the last one in hours."""
    measured = series.list_measured_figures(run)
    rate = measured["tokens_per_second"]
    if rate is None:
        rate = measured["logged_tokens_per_second"]
    return [
        measured["steps"],
        measured["first_loss"],
        measured["last_loss"],
        rate,
        measured["peak_gib"],
        measured["hours"],
    ]


def _render_figure_cells(
    figures: Sequence[float | None], reference: Sequence[float | None]
) -> list[Html]:
    """The figures, each with its difference from that of the first run of the stage."""
    cells = []
    for label, number, first in zip(_FIGURES, figures, reference, strict=True):
        shown: object = "–"
        if label == "time":
            shown = sections.format_hours(number)
        elif number is not None:
            shown = format_number(number)
        if number is not None and first and number != first:
            share = (number - first) / abs(first)
            shown = render_small_below(shown, f"{share:+.1%}".replace("-", "−"))
        cells.append(render_tag("td", shown, data_label=label, class_="number"))
    return cells
