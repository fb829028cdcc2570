"""The parts of a page below its curves: verdict, plan and measurement, arguments, findings, versions."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.plan.plan import titled
from launcher.report import progress, series
from launcher.report.charts import PageRun
from launcher.report.html import Html, details, figure, join, table, tag
from launcher.report.series import Run
from launcher.runs.record import as_list, as_mapping
from launcher.verdict import summary

_CITATIONS = 4
_PACKAGES = "torch transformers trl accelerate deepspeed peft datasets liger-kernel flash-attn olmo-core".split()
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
            badge = [" ", word(summary.outcome(entry.run.verdict))] if judged else []
            opened = {"open": "open"} if judged and entry.run.verdict.get("status") != "pass" else {}
            parts.append(details(tag("h3", join([entry.heading, *badge])), inner, **opened))
    return join(parts)


def word(status: object) -> Html:
    key = str(status)
    colour = {"ok": "pass"}.get(key, key) if key in _MARKS else ""
    return tag("span", f"{_MARKS.get(key, '')} {key}".strip(), class_=f"word {colour}")


def right(text: str) -> Html:
    return tag("th", text, scope="col", class_="number")


def clock(hours: float | None) -> str:
    return "–" if hours is None else progress.clock(round(hours * 3600))


def link(address: str) -> Html:
    """A link that leaves the page; anything but http(s) is text."""
    is_link = address.startswith(("https://", "http://"))
    return tag("a", address, href=address, rel="noreferrer") if is_link else tag("span", address)


def verdicts(entries: Sequence[PageRun]) -> Html:
    """Each point with what it rests on; of several runs a table of points first."""
    judged, by_run = [], []
    for entry in entries:
        if points := summary.points(entry.run.verdict):
            judged.append(entry)
            by_run.append({str(point.get("name")): _ok(point, entry.run, point.get("state")) for point in points})
    names = dict.fromkeys(name for points in by_run for name in points)
    rows = [[name, *(points.get(name, "–") for points in by_run)] for name in names]
    matrix = table(["point", *(entry.mark for entry in judged)], rows) if len(judged) > 1 else ""
    each = _each(entries, _points, judged=True) if judged else ""
    return _section("verdict", "Verdict", join([matrix, each]))


def _points(entry: PageRun) -> Html:
    rows = [
        [
            point.get("name"),
            tag("td", point.get("state"), class_="mono", data_label="state"),
            tag("td", point.get("expected") or "–", class_="mono", data_label="expected"),
            tag("td", _ok(point, entry.run)),
            _why(point),
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
    """What is known of a point, in sentences; the evidence itself is folded below."""
    detail = as_mapping(point.get("detail"))
    reasons = () if point.get("ok") is True else summary.reasons(detail)
    lines = filter(None, (summary.sentence(point), *reasons, detail.get("wasted")))
    sentences = [tag("p", line, class_="why") for line in dict.fromkeys(map(str, lines))]
    if cites := [as_mapping(cite) for cite in as_list(point.get("evidence"))]:
        count = "1 line of evidence" if len(cites) == 1 else f"{len(cites)} lines of evidence"
        sentences.append(details(count, citations(cites), class_="evidence"))
    return join(sentences)


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


_ENDS = {"length": "cut off", "interrupted": "interrupted"}


def samples(entries: Sequence[PageRun]) -> Html:
    """What a model answered before and after its training, and what the data set answers."""
    return _section("samples", "Before and after", _each(entries, _samples, judged=False))


def _samples(entry: PageRun) -> Html:
    record = entry.run.samples
    if not record:
        return Html("")
    parts: list[object] = []
    base = as_mapping(record.get("base")).get("name")
    if origin := record.get("from"):
        words = f"Prompts from {origin}; the likeliest tokens, at most {record.get('max_new_tokens')}."
        parts.append(tag("p", f"{words} Before: {base}." if base else words, class_="soft"))
    if record.get("failed"):
        parts.append(tag("p", f"There are not all answers: {record['failed']}", class_="soft"))
    for prompt in map(as_mapping, as_list(record.get("prompts"))):
        if prompt.get("before") or prompt.get("after"):
            parts.append(_sample(prompt))
    return join(parts)


def _sample(prompt: Mapping[str, Any]) -> Html:
    messages = [as_mapping(message) for message in as_list(prompt.get("messages"))]
    texts = [str(message.get("content")) for message in messages]
    if len(messages) > 1:
        texts = [f"{message.get('role')}: {message.get('content')}" for message in messages]
    answers = [
        _sample_answer(title, as_mapping(prompt.get(when)).get("text"), as_mapping(prompt.get(when)).get("ended"))
        for title, when in (("before", "before"), ("after", "after"))
    ]
    if prompt.get("expected"):
        answers.append(_sample_answer("in the data set", prompt["expected"], None))
    shown = [
        tag("pre", "\n\n".join(texts), class_="prompt", tabindex="0"),
        tag("div", join(answers), class_="answers"),
    ]
    return tag("article", join(shown), class_="sample")


def _sample_answer(title: str, text: object, ended: object) -> Html:
    note = _ENDS.get(str(ended))
    head = [title, *([" ", tag("small", f"({note})")] if note else [])]
    shown = text if text else tag("span", "nothing" if text == "" else "–", class_="soft")
    return tag("div", join([tag("h4", join(head)), tag("pre", shown, tabindex="0")]))


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


def plans(entries: Sequence[PageRun]) -> Html:
    """The plan of each run beside what was measured, and where both are known their ratio; of several, a row a run."""
    if not any(entry.run.manifest or entry.run.series.steps for entry in entries):
        return Html("")
    figures = [(series.planned(entry.run), series.measured(entry.run)) for entry in entries]
    keys = [key for key in _QUANTITIES if any(part.get(key) is not None for pair in figures for part in pair)]
    rows: list[list[object]] = []
    if len(entries) == 1:
        ((planned, measured),) = figures
        for key in keys:
            plan, value = planned.get(key), measured.get(key)
            ratio = f"{value / plan:.0%}" if plan and plan > 0 and value is not None else ""
            cells = [tag("td", _in_words(key, one), class_="number") for one in (plan, value)]
            rows.append([_QUANTITIES[key], *cells, tag("td", ratio, class_="number soft")])
        head = ["", *map(right, ("plan", "measured", "ratio"))]
    else:
        for entry, (planned, measured) in zip(entries, figures, strict=True):
            row: list[object] = [tag("th", entry.heading, scope="row", class_="run")]
            for key in keys:
                plan, value = planned.get(key), measured.get(key)
                below = [] if plan in (None, value) else [Html("<br>"), tag("small", f"plan {_in_words(key, plan)}")]
                row.append(tag("td", join([_in_words(key, value), *below]), class_="number"))
            rows.append(row)
        head = ["", *(tag("th", _QUANTITIES[key], scope="col", class_="number fold") for key in keys)]
    return _section("plan", "Plan and measurement", table(head, rows, "figures"))


def _in_words(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key == "hours":
        return clock(value)
    return f"{figure(value * 100, 3)} %" if key in ("wasted_share", "mfu") else figure(value)


def arguments(entries: Sequence[PageRun]) -> Html:
    """What was set and by whom, the defaults folded; of several runs what differs first."""
    differing: list[Sequence[Html]] = []
    alike: dict[bool, list[Sequence[object]]] = {True: [], False: []}
    for key in dict.fromkeys(name for entry in entries for name in entry.run.arguments):
        items = [entry.run.arguments.get(key) for entry in entries]
        runs: dict[str | None, list[Html]] = {}
        for entry, item in zip(entries, items, strict=True):
            runs.setdefault(None if item is None else _yaml(item.get("value")), []).append(entry.mark)
        known = [item for item in items if item is not None]
        is_set = not all(str(item.get("origin", "")).startswith("default: ") for item in known)
        if len(runs) > 1 and (is_set or len(runs.keys() - {None}) > 1):
            lines = (
                tag("li", join([*marks, tag("code", "–" if value is None else value)], " "))
                for value, marks in runs.items()
            )
            differing.append([tag("code", key), tag("td", tag("ul", join(lines), class_="cites"))])
        else:
            value = tag("td", tag("code", _yaml(known[0].get("value"))), class_="value")
            alike[is_set].append([tag("code", key), value, str(known[0].get("origin", ""))])
    if not (differing or alike[True] or alike[False]):
        return Html("")
    tables = [table(("argument", "value", "set by"), alike[is_set], "wide") for is_set in (True, False)]
    parts = tables[:1]
    if len(entries) > 1:
        parts = [tag("h3", f"{len(differing)} that differ"), table(("argument", "value"), differing, "wide")]
        parts += [details(f"{len(alike[True])} set alike", tables[0])] if alike[True] else []
    parts += [details(f"{len(alike[False])} defaults", tables[1])] if alike[False] else []
    return _section("arguments", "Arguments", join(parts))


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def findings(entries: Sequence[PageRun]) -> Html:
    several = len(entries) > 1
    rows: list[list[object]] = []
    for entry in entries:
        for finding in map(as_mapping, as_list(entry.run.manifest.get("findings"))):
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
    manifest, trainer = entry.run.manifest, as_mapping(entry.run.manifest.get("trainer"))
    if not manifest:
        return Html("")
    source, machine = as_mapping(manifest.get("upstream")), as_mapping(manifest.get("machine"))
    packages, ended = as_mapping(trainer.get("packages")), entry.run.ended
    pinned = "" if source.get("pinned", True) else f", not the pin {source.get('pin')}"
    signal = f", signal {ended['signal']}" if ended.get("signal") else ""
    when = f", {ended['ended']}" if ended.get("ended") else ""
    backend, version = (str(source.get(key) or "") for key in ("backend", "version"))
    facts: list[tuple[str, object]] = [
        ("source", titled(backend, version) + pinned),
        ("changed files", ", ".join(map(str, as_list(source.get("changed_files"))))),
        ("where", source.get("root")),
        ("launch", manifest.get("launch_commit")),
        ("trainer", f"Python {trainer.get('version')}, {trainer.get('python')}" if trainer else None),
        ("packages", ", ".join(f"{n} {packages[n]}" for n in (*_PACKAGES, "ai2-olmo-core") if n in packages)),
        ("machine", ", ".join(str(machine[key]) for key in ("host", "system") if machine.get(key))),
        ("GPUs", "; ".join(map(str, as_list(machine.get("gpus"))))),
        ("stage file", manifest.get("config")),
        ("model folder", manifest.get("output")),
        ("attempt", manifest.get("attempt")),
        ("ended", ended and f"exit code {ended.get('returncode')}{signal}{when}"),
    ]
    if entry.run.tracker:
        facts.append(("tracker", link(entry.run.tracker)))
    parts: list[object] = [table(("", ""), [row for row in facts if row[1]], "wide facts")]
    where = f"in {manifest.get('cwd')}"
    if typed := as_list(manifest.get("launch_argv")):
        parts += _command(f"typed-{entry.number}", "Command", where, typed)
    if argv := as_list(manifest.get("argv")):
        variables = ", ".join(map(str, as_list(manifest.get("env")))) or "no variable"
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
