"""The parts of a page below its curves: verdict, plan and measurement, arguments, findings, versions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.plan.plan import titled
from launcher.report import progress, series
from launcher.report.charts import PageRun
from launcher.report.html import Html, details, figure, join, number_cell, table, tag
from launcher.report.series import Run
from launcher.runs.record import listed, mapping
from launcher.verdict import summary

_CITATIONS = 4
_MANY = 2
"""Runs that still have a column each beside the others; of more, each has a row."""
_MAIN_PACKAGES = (
    *("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets"),
    *("liger-kernel", "flash-attn", "olmo-core", "ai2-olmo-core"),
)
_MARKS = {"pass": "✓", "ok": "✓", "fail": "✗", "unproven": "?", "stopped": "■"}


def _section(key: str, title: str, inner: object) -> Html:
    return tag("section", join([tag("h2", title, id=key), inner])) if inner else Html("")


def _each(entries: Sequence[PageRun], inner_of: Callable[[PageRun], Html], *, judged: bool) -> Html:
    """A part of every run, of several below their names; open where a judgement needs a look."""
    if len(entries) == 1:
        return inner_of(entries[0])
    parts = []
    for entry in entries:
        if inner := inner_of(entry):
            attributes, badge = {}, []
            if judged:
                badge = [" ", word(summary.outcome(entry.run.verdict))]
                passed = entry.run.verdict.get("status") == "pass"
                attributes = {} if passed else {"open": "open"}
            parts.append(details(tag("h3", join([entry.heading, *badge])), inner, **attributes))
    return join(parts)


def word(status: object) -> Html:
    """A judgement: by colour, by sign and by word."""
    key = str(status)
    colour = {"ok": "pass"}.get(key, key) if key in _MARKS else ""
    return tag("span", f"{_MARKS.get(key, '')} {key}".strip(), class_=f"word {colour}")


def right(text: str) -> Html:
    return tag("th", text, scope="col", class_="number")


def clock(hours: float | None) -> Html:
    shown = "–" if hours is None else progress.clock(round(hours * 3600))
    return tag("td", shown, class_="number")


def link(address: str) -> Html:
    """A link that leaves the page; anything but http(s) is text."""
    if not address.startswith(("https://", "http://")):
        return tag("span", address)
    return tag("a", address, href=address, rel="noreferrer")


# ---- verdict


def verdicts(entries: Sequence[PageRun]) -> Html:
    """Each point with what it rests on; of several runs a table of points first."""
    judged = [entry for entry in entries if summary.points(entry.run.verdict)]
    matrix = _matrix(judged) if len(judged) > 1 else ""
    points = _each(entries, _points, judged=True) if judged else ""
    return _section("verdict", "Verdict", join([matrix, points]))


def _headings(entries: Sequence[PageRun]) -> list[Html]:
    return [entry.heading if len(entries) <= _MANY else entry.mark for entry in entries]


def _matrix(judged: Sequence[PageRun]) -> Html:
    by_run = [
        {
            str(point.get("name")): _ok(point, entry.run, point.get("state"))
            for point in summary.points(entry.run.verdict)
        }
        for entry in judged
    ]
    names = dict.fromkeys(name for points in by_run for name in points)
    rows = [[name, *(points.get(name, "–") for points in by_run)] for name in names]
    return table(["point", *_headings(judged)], rows)


def _points(entry: PageRun) -> Html:
    rows = [
        [
            point.get("name"),
            tag("td", point.get("state"), class_="mono", data_label="state"),
            tag("td", point.get("expected") or "–", class_="mono", data_label="expected"),
            tag("td", _ok(point, entry.run)),
            join([_why(point), _evidence(point)]),
        ]
        for point in summary.failed_first(entry.run.verdict)
    ]
    return table(("point", "state", "expected", "", "what it rests on"), rows, "wide")


def _ok(point: Mapping[str, Any], run: Run, words: object = None) -> Html:
    """By colour and sign whether a point is as requested, beside other words if there are any."""
    ok = point.get("ok")
    if ok is True and point.get("expected") in (None, "any"):
        return tag("span", words or "–", class_="soft")
    # what fails of a run that was stopped is that it was
    failed = "stopped" if summary.outcome(run.verdict) == "stopped" else "fail"
    shown = word("ok" if ok is True else failed if ok is False else "unproven")
    return shown if words is None else join([shown, " ", words])


def _why(point: Mapping[str, Any]) -> Html:
    detail = mapping(point.get("detail"))
    lines = [] if point.get("ok") is True else [*summary.reasons(detail)]
    if (sentence := summary.sentence(point)) is not None:
        lines.insert(0, sentence)
    lines += [str(detail[key]) for key in ("wasted",) if detail.get(key)]
    return join(tag("p", line, class_="why") for line in dict.fromkeys(lines))


def _evidence(point: Mapping[str, Any]) -> Html:
    lines = [mapping(cite) for cite in listed(point.get("evidence"))]
    if not lines:
        return Html("")
    count = "1 line of evidence" if len(lines) == 1 else f"{len(lines)} lines of evidence"
    return details(count, citations(lines), class_="evidence")


def citations(lines: Sequence[Mapping[str, Any]]) -> Html:
    items = []
    for line in lines[:_CITATIONS]:
        file, number = str(line.get("file") or ""), line.get("line")
        place = file.rpartition("/")[2] + ("" if number is None else f":{number}")
        shown = tag("span", place, class_="place mono", title=f"{line.get('source')}: {file}")
        code = tag("code", line["text"]) if line.get("text") else ""
        items.append(tag("li", join([shown, code])))
    if len(lines) > _CITATIONS:
        items.append(tag("li", f"and {len(lines) - _CITATIONS} more", class_="soft"))
    return tag("ul", join(items), class_="cites") if items else Html("")


# ---- plan beside measurement


class _Quantity(NamedTuple):
    key: str
    words: str
    digits: int = 4
    scale: float = 1
    unit: str = ""


_QUANTITIES = (
    _Quantity("rows_per_step", "batch, rows a step"),
    _Quantity("steps", "steps"),
    _Quantity("tokens_per_second", "tokens/s, steady"),
    _Quantity("peak_gib", "peak memory allocated, GiB"),
    _Quantity("reserved_gib", "peak memory reserved, GiB"),
    _Quantity("processes", "processes"),
    _Quantity("tokens_per_step", "tokens a step"),
    _Quantity("logged_tokens_per_second", "tokens/s as logged"),
    _Quantity("wasted_share", "wasted positions", 3, 100, " %"),
    _Quantity("mfu", "MFU", 3, 100, " %"),
    _Quantity("hours", "time"),
)

Figures = tuple[Mapping[str, float | None], Mapping[str, float | None]]
"""What was planned and what was measured of a run."""


def plans(entries: Sequence[PageRun]) -> Html:
    """The plan of each run beside what was measured, and where both are known their ratio."""
    if not any(entry.run.manifest or entry.run.series.steps for entry in entries):
        return Html("")
    figures = [(series.planned(entry.run), series.measured(entry.run)) for entry in entries]
    shown = [
        quantity
        for quantity in _QUANTITIES
        if any(part.get(quantity.key) is not None for pair in figures for part in pair)
    ]
    if len(entries) > 1:
        inner = _plan_rows(entries, figures, shown)
    else:
        head = ["", *map(right, ("plan", "measured", "ratio"))]
        plan, measured = figures[0]
        rows = [[q.words, *_plan_cells(q, plan.get(q.key), measured.get(q.key))] for q in shown]
        inner = table(head, rows, "figures")
    return _section("plan", "Plan and measurement", inner)


def _plan_rows(entries: Sequence[PageRun], figures: Sequence[Figures], shown: Sequence[_Quantity]) -> Html:
    rows = []
    for entry, (plan, measured) in zip(entries, figures, strict=True):
        cells = []
        for quantity in shown:
            value, planned = measured.get(quantity.key), plan.get(quantity.key)
            cell = _figure_cell(quantity, value)
            if planned is not None and planned != value:
                below = tag("small", f"plan {_words_of(quantity, planned)}")
                cell = tag("td", join([_words_of(quantity, value), Html("<br>"), below]), class_="number")
            cells.append(cell)
        rows.append([tag("th", entry.heading, scope="row", class_="run"), *cells])
    head = ["", *(tag("th", q.words, scope="col", class_="number fold") for q in shown)]
    return table(head, rows, "figures")


def _plan_cells(quantity: _Quantity, plan: float | None, measured: float | None) -> list[Html]:
    known = plan is not None and measured is not None and plan > 0
    ratio = f"{measured / plan:.0%}" if known and measured is not None and plan else ""
    cells = [_figure_cell(quantity, value) for value in (plan, measured)]
    return [*cells, tag("td", ratio, class_="number soft")]


def _figure_cell(quantity: _Quantity, value: float | None) -> Html:
    if quantity.key == "hours":
        return clock(value)
    return number_cell(value, quantity.digits, quantity.scale, quantity.unit)


def _words_of(quantity: _Quantity, value: float | None) -> str:
    if value is None:
        return "–"
    if quantity.key == "hours":
        return f"{value:.3g} h"
    return f"{figure(value * quantity.scale, quantity.digits)}{quantity.unit}"


# ---- arguments


def arguments(entries: Sequence[PageRun]) -> Html:
    if not any(entry.run.arguments for entry in entries):
        return Html("")
    inner = _own_arguments(entries[0].run) if len(entries) == 1 else _compared(entries)
    return _section("arguments", "Arguments", inner)


def _is_default(entry: Mapping[str, Any] | None) -> bool:
    return entry is None or str(entry.get("origin", "")).startswith("default: ")


def _own_arguments(run: Run) -> Html:
    own, rest = (
        [item for item in run.arguments.items() if _is_default(item[1]) is default] for default in (False, True)
    )
    folded = details(f"{len(rest)} defaults", _argument_table(rest)) if rest else ""
    return join([_argument_table(own), folded])


def _argument_table(items: Iterable[tuple[str, Mapping[str, Any]]]) -> Html:
    rows = [
        [
            tag("code", name),
            tag("td", tag("code", _yaml(item.get("value"))), class_="value"),
            str(item.get("origin", "")),
        ]
        for name, item in items
    ]
    return table(("argument", "value", "set by"), rows, "wide")


def _compared(entries: Sequence[PageRun]) -> Html:
    """What differs between runs first, then what was set alike, the defaults folded."""
    groups: dict[str, list[list[object]]] = {"that differ": [], "set alike": [], "defaults": []}
    for key in dict.fromkeys(name for entry in entries for name in entry.run.arguments):
        items = [entry.run.arguments.get(key) for entry in entries]
        values = {_yaml(item.get("value")) for item in items if item is not None}
        is_set = not all(map(_is_default, items))
        differs = len(values) > 1 or (is_set and None in items)
        group = "that differ" if differs else "set alike" if is_set else "defaults"
        if differs and len(entries) <= _MANY:
            groups[group].append([tag("code", key), *map(_value_cell, items)])
        else:
            groups[group].append([tag("code", key), *_values(entries, items, differs=differs)])
    wide = len(entries) > _MANY
    head = ["argument", *(("value",) if wide else (entry.heading for entry in entries))]
    differing = groups.pop("that differ")
    parts = [tag("h3", f"{len(differing)} that differ"), table(head, differing, "wide" if wide else "")]
    for words, rows in groups.items():
        if rows:
            parts.append(details(f"{len(rows)} {words}", table(("argument", "value", "set by"), rows, "wide")))
    return join(parts)


def _values(entries: Sequence[PageRun], items: Sequence[Mapping[str, Any] | None], *, differs: bool) -> list[Html]:
    """Every value once: with the runs that have it, or where all have the same with who set it."""
    first = next(item for item in items if item is not None)
    if not differs:
        value = tag("td", tag("code", _yaml(first.get("value"))), class_="value")
        return [value, tag("td", first.get("origin", ""))]
    runs: dict[str | None, list[Html]] = {}
    for entry, item in zip(entries, items, strict=True):
        runs.setdefault(None if item is None else _yaml(item.get("value")), []).append(entry.mark)
    lines = [
        tag("li", join([*marks, tag("code", "–" if value is None else value)], " ")) for value, marks in runs.items()
    ]
    return [tag("td", tag("ul", join(lines), class_="cites"))]


def _value_cell(item: Mapping[str, Any] | None) -> Html:
    if item is None:
        return tag("td", "–", class_="soft")
    origin = tag("small", item.get("origin", ""))
    parts = [tag("code", _yaml(item.get("value"))), Html("<br>"), origin]
    return tag("td", join(parts), class_="value")


def _yaml(value: object) -> str:
    """A value as a stage file would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- findings, versions, command


def findings(entries: Sequence[PageRun]) -> Html:
    several = len(entries) > 1
    rows: list[list[object]] = []
    for entry in entries:
        for finding in map(mapping, listed(entry.run.manifest.get("findings"))):
            file, line = finding.get("file") or "", finding.get("line")
            help = [Html("<br>"), tag("small", finding["help"])] if finding.get("help") else []
            row = [
                tag("code", f"{finding.get('severity')}[{finding.get('code')}]"),
                tag("small", f"{file}:{line}" if line else file),
                join([finding.get("message") or "", *help]),
            ]
            rows.append([entry.mark, *row] if several else [*row])
    head = ["run"] * several + ["finding", "place", ""]
    return _section("findings", "Findings", table(head, rows, "wide"))


def versions(entries: Sequence[PageRun]) -> Html:
    return _section("versions", "Versions and command", _each(entries, _versions, judged=False))


def _versions(entry: PageRun) -> Html:
    manifest, trainer = entry.run.manifest, mapping(entry.run.manifest.get("trainer"))
    if not manifest:
        return Html("")
    source, machine = mapping(manifest.get("upstream")), mapping(manifest.get("machine"))
    packages, ended = mapping(trainer.get("packages")), entry.run.ended
    pinned = "" if source.get("pinned", True) else f", not the pin {source.get('pin')}"
    signal = f", signal {ended['signal']}" if ended.get("signal") else ""
    when = f", {ended['ended']}" if ended.get("ended") else ""
    backend, version = (str(source.get(key) or "") for key in ("backend", "version"))
    facts: list[tuple[str, object]] = [
        ("source", titled(backend, version) + pinned),
        ("changed files", ", ".join(map(str, listed(source.get("changed_files"))))),
        ("where", source.get("root")),
        ("launch", manifest.get("launch_commit")),
        ("trainer", f"Python {trainer.get('version')}, {trainer.get('python')}" if trainer else None),
        ("packages", ", ".join(f"{n} {packages[n]}" for n in _MAIN_PACKAGES if n in packages)),
        ("machine", ", ".join(str(machine[key]) for key in ("host", "system") if machine.get(key))),
        ("GPUs", "; ".join(map(str, listed(machine.get("gpus"))))),
        ("stage file", manifest.get("config")),
        ("model folder", manifest.get("output")),
        ("attempt", manifest.get("attempt")),
        ("ended", ended and f"exit code {ended.get('returncode')}{signal}{when}"),
    ]
    if entry.run.tracker:
        facts.append(("tracker", link(entry.run.tracker)))
    parts: list[object] = [table(("", ""), [row for row in facts if row[1]], "wide facts")]
    where = f"in {manifest.get('cwd')}"
    if typed := listed(manifest.get("launch_argv")):
        parts += _command(f"typed-{entry.number}", "Command", where, typed)
    if argv := listed(manifest.get("argv")):
        variables = ", ".join(map(str, listed(manifest.get("env")))) or "no variable"
        title = "What it started" if typed else "Command"
        command = _command(f"command-{entry.number}", title, f"{where}, with {variables} set", argv)
        parts += [details(command[0], join(command[1:]))] if typed else command
    return join(parts)


def _command(key: str, title: str, where: str, argv: Sequence[Any]) -> list[Html]:
    return [
        tag("h3", title),
        tag("p", where, class_="soft"),
        tag("pre", shlex.join(map(str, argv)), id=key, tabindex="0"),
        tag("p", tag("button", "copy", type="button", data_copy=key)),
    ]
