"""The parts of a page below its curves: verdict, plan, arguments, findings, versions."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.plan.plan import format_title
from launcher.report import series
from launcher.report.charts import PageRun
from launcher.report.html import (
    Html,
    format_number,
    join,
    render_details,
    render_section,
    render_small_below,
    render_table,
    render_tag,
)
from launcher.report.progress import format_clock
from launcher.report.series import Run
from launcher.runs.record import Json, as_list, as_mapping
from launcher.verdict import summary

_CITATIONS = 4
_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "deepspeed",
    "peft",
    "datasets",
    "liger-kernel",
    "flash-attn",
    "olmo-core",
    "ai2-olmo-core",
)
_MARKS = {"pass": "✓", "ok": "✓", "fail": "✗", "unproven": "?", "stopped": "■"}


def _render_each(
    entries: Sequence[PageRun], render: Callable[[PageRun], Html], *, is_judged: bool = False
) -> Html:
    """A part of every run; of several, each is folded below its name.

    With `is_judged` the name has the outcome beside it, and what did not pass is unfolded.
    """
    if len(entries) == 1:
        return render(entries[0])
    parts = []
    for entry in entries:
        inner = render(entry)
        if not inner:
            continue
        heading: list[object] = [entry.heading]
        is_open = False
        if is_judged:
            verdict = entry.run.verdict
            heading += [" ", render_word(summary.describe_outcome(verdict))]
            is_open = verdict.get("status") != "pass"
        parts.append(render_details(render_tag("h3", *heading), inner, is_open=is_open))
    return join(parts)


def render_word(status: object) -> Html:
    """A word that judges, with its mark and in its colour; other words are plain."""
    key = str(status)
    if key not in _MARKS:
        return render_tag("span", key.strip(), class_="word ")
    colour = "pass" if key == "ok" else key
    return render_tag("span", f"{_MARKS[key]} {key}", class_=f"word {colour}")


def render_right(title: str) -> Html:
    """The head of a column of numbers."""
    return render_tag("th", title, scope="col", class_="number")


def format_hours(hours: float | None) -> str:
    return "–" if hours is None else format_clock(round(hours * 3600))


def render_link(address: str) -> Html:
    """A link that leaves the page; anything but http(s) is text."""
    if address.startswith(("https://", "http://")):
        return render_tag("a", address, href=address, rel="noreferrer")
    return render_tag("span", address)


def render_verdicts(entries: Sequence[PageRun]) -> Html:
    """Each point with what it rests on; of several runs, a table of points first."""
    judged = [entry for entry in entries if summary.list_points(entry.run.verdict)]
    if not judged:
        return Html("")
    parts = []
    if len(judged) > 1:
        parts.append(_render_points_matrix(judged))
    parts.append(_render_each(entries, _render_points_table, is_judged=True))
    return render_section("verdict", "Verdict", join(parts))


def _render_points_matrix(entries: Sequence[PageRun]) -> Html:
    """A row for each point, a column for each run."""
    head = ["point"]
    rows: dict[str, list[object]] = {}
    dashes = ["–"] * len(entries)
    for column, entry in enumerate(entries, start=1):
        head.append(entry.mark)
        for point in summary.list_points(entry.run.verdict):
            name = str(point.get("name"))
            row = rows.setdefault(name, [name, *dashes])
            row[column] = _render_ok(point, entry.run, point.get("state"))
    return render_table(head, rows.values())


def _render_points_table(entry: PageRun) -> Html:
    rows = []
    for point in summary.sort_failed_first(entry.run.verdict):
        expected = point.get("expected") or "–"
        rows.append(
            [
                point.get("name"),
                render_tag("td", point.get("state"), class_="mono", data_label="state"),
                render_tag("td", expected, class_="mono", data_label="expected"),
                render_tag("td", _render_ok(point, entry.run)),
                _render_reasons(point),
            ]
        )
    return render_table(("point", "state", "expected", "", "what it rests on"), rows, "wide")


def _render_ok(point: Json, run: Run, state: object = None) -> Html:
    """Whether a point is as expected, by colour and sign, and beside it the state, if given."""
    ok = point.get("ok")
    if ok is True and not summary.is_wanted(point):
        return render_tag("span", state or "–", class_="soft")
    status = "unproven"
    if ok is True:
        status = "ok"
    elif ok is False:
        status = "fail"
        if summary.describe_outcome(run.verdict) == "stopped":
            # of a stopped run, the only point that fails is its end
            status = "stopped"
    if state is None:
        return render_word(status)
    return join([render_word(status), " ", state])


def _render_reasons(point: Json) -> Html:
    """What is known of a point, in sentences; the evidence is folded below."""
    detail = as_mapping(point.get("detail"))
    lines: list[object] = [summary.describe_point(point)]
    if point.get("ok") is not True:
        lines += summary.list_reasons(detail)
    lines.append(detail.get("wasted"))
    unique = dict.fromkeys(str(line) for line in lines if line)
    parts = [render_tag("p", line, class_="why") for line in unique]
    evidence = [as_mapping(citation) for citation in as_list(point.get("evidence"))]
    if evidence:
        count = "1 line of evidence"
        if len(evidence) > 1:
            count = f"{len(evidence)} lines of evidence"
        parts.append(render_details(count, render_evidence(evidence), class_="evidence"))
    return join(parts)


def render_evidence(lines: Sequence[Json]) -> Html:
    items = []
    for line in lines[:_CITATIONS]:
        file = str(line.get("file") or "")
        place = file.rpartition("/")[2]
        if line.get("line") is not None:
            place += f":{line['line']}"
        title = f"{line.get('source')}: {file}"
        parts = [render_tag("span", place, class_="place mono", title=title)]
        if line.get("text"):
            parts.append(render_tag("code", line["text"]))
        items.append(render_tag("li", *parts))
    if len(lines) > _CITATIONS:
        items.append(render_tag("li", f"and {len(lines) - _CITATIONS} more", class_="soft"))
    return render_tag("ul", *items, class_="cites")


_ENDS = {"length": "cut off", "interrupted": "interrupted"}


def render_samples(entries: Sequence[PageRun]) -> Html:
    """What a model answered before and after its training, and what the data set answers."""
    return render_section("samples", "Before and after", _render_each(entries, _render_samples))


def _render_samples(entry: PageRun) -> Html:
    record = entry.run.samples
    parts: list[object] = []
    if record.get("from"):
        limit = record.get("max_new_tokens")
        origin = f"Prompts from {record['from']}; the likeliest tokens, at most {limit}."
        base = as_mapping(record.get("base")).get("name")
        if base:
            origin += f" Before: {base}."
        parts.append(render_tag("p", origin, class_="soft"))
    if record.get("failed"):
        parts.append(
            render_tag("p", f"There are not all answers: {record['failed']}", class_="soft")
        )
    for prompt in map(as_mapping, as_list(record.get("prompts"))):
        if prompt.get("before") or prompt.get("after"):
            parts.append(_render_sample(prompt))
    return join(parts)


def _render_sample(prompt: Json) -> Html:
    messages = as_list(prompt.get("messages"))
    texts = []
    for message in map(as_mapping, messages):
        content = str(message.get("content"))
        if len(messages) > 1:
            content = f"{message.get('role')}: {content}"
        texts.append(content)
    answers = []
    for when in ("before", "after"):
        answer = as_mapping(prompt.get(when))
        answers.append(_render_answer(when, answer.get("text"), answer.get("ended")))
    if prompt.get("expected"):
        answers.append(_render_answer("in the data set", prompt["expected"], None))
    parts = [
        render_tag("pre", "\n\n".join(texts), class_="prompt", tabindex="0"),
        render_tag("div", *answers, class_="answers"),
    ]
    return render_tag("article", *parts, class_="sample")


def _render_answer(title: str, text: object, ended: object) -> Html:
    heading: list[object] = [title]
    note = _ENDS.get(str(ended))
    if note:
        heading += [" ", render_tag("small", f"({note})")]
    shown = text
    if text == "":
        shown = render_tag("span", "nothing", class_="soft")
    elif not text:
        shown = render_tag("span", "–", class_="soft")
    answer = render_tag("pre", shown, tabindex="0")
    return render_tag("div", render_tag("h4", *heading), answer)


_QUANTITIES = {
    "rows_per_step": "batch, rows a step",
    "steps": "steps",
    "tokens_per_second": "tokens/s, steady",
    "peak_gib": "peak memory allocated, GiB",
    "reserved_gib": "peak memory reserved, GiB",
    "processes": "processes",
    "tokens_per_step": "tokens a step",
    "logged_tokens_per_second": "tokens/s as logged",
    "wasted_share": "wasted positions",
    "mfu": "MFU",
    "hours": "time",
}


@dataclass(frozen=True, slots=True)
class _Figures:
    """What was planned of a run, and what was measured."""

    entry: PageRun
    planned: Mapping[str, float | None]
    measured: Mapping[str, float | None]

    def has(self, key: str) -> bool:
        return self.planned.get(key) is not None or self.measured.get(key) is not None


def render_plans(entries: Sequence[PageRun]) -> Html:
    """The plan of each run beside the measurement; one run has a row a quantity."""
    if not any(entry.run.manifest or entry.run.series.steps for entry in entries):
        return Html("")
    runs = []
    for entry in entries:
        planned = series.list_planned_figures(entry.run)
        measured = series.list_measured_figures(entry.run)
        runs.append(_Figures(entry, planned, measured))
    keys = [key for key in _QUANTITIES if any(run.has(key) for run in runs)]
    if len(runs) == 1:
        shown = _render_plan_of_one(runs[0], keys)
    else:
        shown = _render_plan_of_several(runs, keys)
    return render_section("plan", "Plan and measurement", shown)


def _render_plan_of_one(run: _Figures, keys: Sequence[str]) -> Html:
    rows: list[list[object]] = []
    for key in keys:
        planned = run.planned.get(key)
        measured = run.measured.get(key)
        ratio = ""
        if planned and planned > 0 and measured is not None:
            ratio = f"{measured / planned:.0%}"
        rows.append(
            [
                _QUANTITIES[key],
                render_tag("td", _format_quantity(key, planned), class_="number"),
                render_tag("td", _format_quantity(key, measured), class_="number"),
                render_tag("td", ratio, class_="number soft"),
            ]
        )
    head = ["", render_right("plan"), render_right("measured"), render_right("ratio")]
    return render_table(head, rows, "figures")


def _render_plan_of_several(runs: Sequence[_Figures], keys: Sequence[str]) -> Html:
    head: list[object] = [""]
    for key in keys:
        head.append(render_tag("th", _QUANTITIES[key], scope="col", class_="number fold"))
    rows = []
    for run in runs:
        row = [render_tag("th", run.entry.heading, scope="row", class_="run")]
        for key in keys:
            row.append(_render_figure_cell(run, key))
        rows.append(row)
    return render_table(head, rows, "figures")


def _render_figure_cell(run: _Figures, key: str) -> Html:
    """What was measured, with the plan below it if that differs."""
    planned = run.planned.get(key)
    measured = run.measured.get(key)
    shown: object = _format_quantity(key, measured)
    if planned is not None and planned != measured:
        shown = render_small_below(shown, f"plan {_format_quantity(key, planned)}")
    return render_tag("td", shown, class_="number")


def _format_quantity(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key == "hours":
        return format_hours(value)
    if key in ("wasted_share", "mfu"):
        return f"{format_number(value * 100, 3)} %"
    return format_number(value)


@dataclass(slots=True)
class _ArgumentTables:
    """Rows of arguments: those in which runs differ, those set alike in all, and the defaults."""

    differing: list[Sequence[Html]] = field(default_factory=list)
    alike: list[Sequence[object]] = field(default_factory=list)
    defaults: list[Sequence[object]] = field(default_factory=list)

    def add(self, key: str, entries: Sequence[PageRun]) -> None:
        marks_by_value: dict[str | None, list[Html]] = {}
        origins = []
        for entry in entries:
            item = entry.run.arguments.get(key)
            value = None
            if item is not None:
                value = _format_yaml(item.get("value"))
                origins.append(str(item.get("origin", "")))
            marks = marks_by_value.setdefault(value, [])
            marks.append(entry.mark)
        name = render_tag("code", key)
        values = [value for value in marks_by_value if value is not None]
        is_default = all(origin.startswith("default: ") for origin in origins)
        # a default that some runs do not have is that of another trainer
        is_missing = None in marks_by_value and not is_default
        if len(values) > 1 or is_missing:
            self.differing.append([name, _render_values_cell(marks_by_value)])
            return
        cell = render_tag("td", render_tag("code", values[0]), class_="value")
        rows = self.defaults if is_default else self.alike
        rows.append([name, cell, origins[0]])


def render_arguments(entries: Sequence[PageRun]) -> Html:
    """What was set and by whom, with the defaults folded; of several runs what differs first."""
    tables = _ArgumentTables()
    names: dict[str, None] = {}
    for entry in entries:
        names.update(dict.fromkeys(entry.run.arguments))
    for name in names:
        tables.add(name, entries)
    if not names:
        return Html("")
    head = ("argument", "value", "set by")
    alike = render_table(head, tables.alike, "wide")
    if len(entries) == 1:
        parts = [alike]
    else:
        parts = [
            render_tag("h3", f"{len(tables.differing)} that differ"),
            render_table(("argument", "value"), tables.differing, "wide"),
        ]
        if alike:
            parts.append(render_details(f"{len(tables.alike)} set alike", alike))
    if tables.defaults:
        title = f"{len(tables.defaults)} defaults"
        parts.append(render_details(title, render_table(head, tables.defaults, "wide")))
    return render_section("arguments", "Arguments", join(parts))


def _render_values_cell(marks_by_value: Mapping[str | None, Sequence[Html]]) -> Html:
    """The values of an argument, each beside the runs that have it."""
    items = []
    for value, marks in marks_by_value.items():
        shown = render_tag("code", "–" if value is None else value)
        items.append(render_tag("li", join([*marks, shown], " ")))
    return render_tag("td", render_tag("ul", *items, class_="cites"))


def _format_yaml(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def render_findings(entries: Sequence[PageRun]) -> Html:
    several = len(entries) > 1
    head = ["finding", "place", ""]
    if several:
        head.insert(0, "run")
    rows = []
    for entry in entries:
        for finding in map(as_mapping, as_list(entry.run.manifest.get("findings"))):
            row = _render_finding_row(finding)
            if several:
                row.insert(0, entry.mark)
            rows.append(row)
    return render_section("findings", "Findings", render_table(head, rows, "wide"))


def _render_finding_row(finding: Json) -> list[object]:
    place = str(finding.get("file") or "")
    if finding.get("line"):
        place += f":{finding['line']}"
    message = finding.get("message") or ""
    if finding.get("help"):
        message = render_small_below(message, finding["help"])
    code = f"{finding.get('severity')}[{finding.get('code')}]"
    return [render_tag("code", code), render_tag("small", place), join([message])]


def render_versions(entries: Sequence[PageRun]) -> Html:
    return render_section(
        "versions", "Versions and command", _render_each(entries, _render_versions)
    )


def _render_versions(entry: PageRun) -> Html:
    manifest = entry.run.manifest
    if not manifest:
        return Html("")
    rows = []
    for name, value in _collect_facts(entry.run).items():
        if value:
            rows.append([name, value])
    parts: list[object] = [render_table(("", ""), rows, "wide facts")]
    folder = f"in {manifest.get('cwd')}"
    typed = as_list(manifest.get("launch_argv"))
    if typed:
        parts.append(render_tag("h3", "Command"))
        parts.append(_render_command(f"typed-{entry.number}", folder, typed))
    argv = as_list(manifest.get("argv"))
    if argv:
        variables = _join_by_comma(manifest.get("env")) or "no variable"
        where = f"{folder}, with {variables} set"
        command = _render_command(f"command-{entry.number}", where, argv)
        if typed:
            parts.append(render_details(render_tag("h3", "What it started"), command))
        else:
            parts += [render_tag("h3", "Command"), command]
    return join(parts)


def _collect_facts(run: Run) -> dict[str, object]:
    """Where a run comes from and how it ended; what is empty is not shown."""
    manifest = run.manifest
    source = as_mapping(manifest.get("upstream"))
    machine = as_mapping(manifest.get("machine"))
    trainer = as_mapping(manifest.get("trainer"))
    packages = as_mapping(trainer.get("packages"))
    backend = str(source.get("backend") or "")
    version = str(source.get("version") or "")
    title = format_title(backend, version)
    if not source.get("pinned", True):
        title += f", not the pin {source.get('pin')}"
    python = None
    if trainer:
        python = f"Python {trainer.get('version')}, {trainer.get('python')}"
    versions = [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    host = filter(None, [machine.get("host"), machine.get("system")])
    gpus = map(str, as_list(machine.get("gpus")))
    tracker = None
    if run.tracker:
        tracker = render_link(run.tracker)
    return {
        "source": title,
        "changed files": _join_by_comma(source.get("changed_files")),
        "where": source.get("root"),
        "launch": manifest.get("launch_commit"),
        "trainer": python,
        "packages": _join_by_comma(versions),
        "machine": _join_by_comma(list(host)),
        "GPUs": "; ".join(gpus),
        "stage file": manifest.get("config"),
        "model folder": manifest.get("output"),
        "attempt": manifest.get("attempt"),
        "ended": _format_end(run.ended),
        "tracker": tracker,
    }


def _format_end(ended: Json) -> str:
    if not ended:
        return ""
    parts = [f"exit code {ended.get('returncode')}"]
    if ended.get("signal"):
        parts.append(f"signal {ended['signal']}")
    if ended.get("ended"):
        parts.append(str(ended["ended"]))
    return ", ".join(parts)


def _join_by_comma(values: object) -> str:
    return ", ".join(map(str, as_list(values)))


def _render_command(key: str, where: str, argv: Iterable[object]) -> Html:
    parts = [
        render_tag("p", where, class_="soft"),
        render_tag("pre", shlex.join(map(str, argv)), id=key, tabindex="0"),
        render_tag("p", render_tag("button", "copy", type="button", data_copy=key)),
    ]
    return join(parts)
