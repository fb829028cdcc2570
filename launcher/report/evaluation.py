"""The part of a page about the evaluation of the models: their numbers, and what was expected of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report import sections
from launcher.report.charts import PageRun
from launcher.report.html import Html, details, figure, join, table, tag
from launcher.runs.evaluation import POINT
from launcher.runs.record import as_list, as_mapping
from launcher.verdict import summary

KEY = "evaluation"
_SHOWN = 40
"""Rows of numbers that are not folded: a benchmark may have a hundred subjects."""


def section(entries: Sequence[PageRun]) -> Html:
    """A table of numbers for each run that was evaluated; empty where none was."""
    parts: list[object] = []
    for entry in entries:
        point = _point(entry)
        if point is None:
            continue
        if len(entries) > 1:
            parts.append(tag("h3", entry.heading))
        parts.append(_of_run(point, entry))
    return tag("section", join([tag("h2", "Evaluation", id=KEY), *parts])) if parts else Html("")


def _point(entry: PageRun) -> Mapping[str, Any] | None:
    for point in summary.points(entry.run.verdict):
        if point.get("name") == POINT:
            return point
    return None


def _of_run(point: Mapping[str, Any], entry: PageRun) -> Html:
    detail = as_mapping(point.get("detail"))
    state = str(point.get("state"))
    shown = {"passed": "pass", "failed": "fail"}.get(state, state.replace("_", " "))
    seconds = detail.get("seconds")
    took = f" in {seconds:,.0f} s" if isinstance(seconds, int | float) else ""
    parts: list[object] = [tag("p", join([sections.word(shown), took]))]
    if point.get("ok") is False and detail.get("reason"):
        parts.append(tag("p", detail["reason"], class_="why"))
    rows = [*_gates(detail), *_numbers(detail)]
    head = ("metric", sections.right("value"), sections.right("±"), "expected", "")
    parts.append(table(head, rows[:_SHOWN], "wide"))
    if rows[_SHOWN:]:
        parts.append(details(f"{len(rows) - _SHOWN} more numbers", table(head, rows[_SHOWN:], "wide")))
    files = [("metrics", detail.get("metrics_file")), ("log", detail.get("log"))]
    for what, path in files:
        if path:
            parts.append(tag("p", join([f"{what}: ", tag("code", path)]), class_="soft"))
    return join(parts)


def _gates(detail: Mapping[str, Any]) -> list[list[object]]:
    """What was expected comes first, by the names that the pipeline file has."""
    rows: list[list[object]] = []
    for gate in map(as_mapping, as_list(detail.get("gates"))):
        name = gate.get("name") or gate.get("metric")
        rows.append(_row(detail, str(name), gate.get("value"), str(gate.get("expected")), gate.get("ok")))
    return rows


def _numbers(detail: Mapping[str, Any]) -> list[list[object]]:
    gated = {gate.get("name") for gate in map(as_mapping, as_list(detail.get("gates")))}
    rows = []
    for name, value in as_mapping(detail.get("metrics")).items():
        if name in gated or _is_error(name):
            continue
        rows.append(_row(detail, name, value, "", None))
    return rows


def _row(detail: Mapping[str, Any], name: str, value: object, expected: str, ok: object) -> list[object]:
    error = as_mapping(detail.get("metrics")).get(_error_of(name))
    verdict: object = ""
    if expected:
        verdict = sections.word("ok" if ok is True else "fail")
    return [
        tag("th", tag("code", name), scope="row"),
        _number(value, "value"),
        _number(error, "±"),
        tag("td", expected, class_="mono", data_label="expected"),
        tag("td", verdict),
    ]


def _number(value: object, label: str) -> Html:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return tag("td", figure(float(str(value))) if known else "–", class_="number", data_label=label)


def _error_of(name: str) -> str:
    """Where lm-evaluation-harness writes the standard error of a number: `task/acc_stderr,none` of `task/acc,none`."""
    measure, comma, kind = name.partition(",")
    return f"{measure}_stderr{comma}{kind}"


def _is_error(name: str) -> bool:
    return name.partition(",")[0].endswith("_stderr")
