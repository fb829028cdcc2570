"""The part of a page about the evaluation of the models: their metrics, and what was expected."""

from collections.abc import Sequence

from launcher.report import sections
from launcher.report.charts import PageRun
from launcher.report.html import (
    Html,
    format_number,
    join,
    render_details,
    render_section,
    render_table,
    render_tag,
)
from launcher.runs.evaluation import POINT
from launcher.runs.record import Json, as_list, as_mapping
from launcher.verdict import summary

KEY = "evaluation"
_SHOWN = 40
"""Rows that are not folded: a benchmark may have a hundred subjects."""
_WORDS = {"passed": "pass", "failed": "fail"}


def render_evaluations(entries: Sequence[PageRun]) -> Html:
    """A table of metrics for each evaluated run; empty if there is none."""
    parts: list[object] = []
    for entry in entries:
        for point in summary.list_points(entry.run.verdict):
            if point.get("name") == POINT:
                if len(entries) > 1:
                    parts.append(render_tag("h3", entry.heading))
                parts.append(_render_evaluation(point))
                break
    return render_section(KEY, "Evaluation", *parts)


def _render_evaluation(point: Json) -> Html:
    """The outcome with its reason, the metrics, and the files that hold more."""
    detail = as_mapping(point.get("detail"))
    parts = [_render_outcome(point, detail.get("seconds"))]
    if point.get("ok") is False and detail.get("reason"):
        parts.append(render_tag("p", detail["reason"], class_="why"))
    rows = _build_rows(detail)
    parts.append(_render_metrics_table(rows[:_SHOWN]))
    folded = rows[_SHOWN:]
    if folded:
        title = f"{len(folded)} more numbers"
        parts.append(render_details(title, _render_metrics_table(folded)))
    parts.append(_render_path("metrics", detail.get("metrics_file")))
    parts.append(_render_path("log", detail.get("log")))
    return join(parts)


def _render_outcome(point: Json, seconds: object) -> Html:
    state = str(point.get("state"))
    word = _WORDS.get(state, state.replace("_", " "))
    time = ""
    if isinstance(seconds, int | float):
        time = f" in {seconds:,.0f} s"
    return render_tag("p", sections.render_word(word), time)


def _render_path(title: str, path: object) -> Html:
    if not path:
        return Html("")
    return render_tag("p", f"{title}: ", render_tag("code", path), class_="soft")


def _render_metrics_table(rows: Sequence[Sequence[object]]) -> Html:
    head = ("metric", sections.render_right("value"), sections.render_right("±"), "expected", "")
    return render_table(head, rows, "wide")


def _build_rows(detail: Json) -> list[list[Html]]:
    """The gates first, under the names of the pipeline file, then the other metrics."""
    metrics = as_mapping(detail.get("metrics"))
    rows = []
    gated = set()
    for gate in map(as_mapping, as_list(detail.get("gates"))):
        gated.add(gate.get("name"))
        name = str(gate.get("name") or gate.get("metric"))
        expected = str(gate.get("expected"))
        status = "ok" if gate.get("ok") is True else "fail"
        row = _render_metric(metrics, name, gate.get("value"))
        row += _render_gate(expected, sections.render_word(status))
        rows.append(row)
    for name, value in metrics.items():
        if name not in gated and not _is_error(name):
            row = _render_metric(metrics, name, value)
            row += _render_gate("", "")
            rows.append(row)
    return rows


def _render_metric(metrics: Json, name: str, value: object) -> list[Html]:
    """The cells of a metric: its name, value and standard error."""
    error = metrics.get(_derive_error_name(name))
    return [
        render_tag("th", render_tag("code", name), scope="row"),
        _render_number(value, "value"),
        _render_number(error, "±"),
    ]


def _render_gate(expected: str, word: str) -> list[Html]:
    """The cells of what was expected of a metric; empty without a gate."""
    return [
        render_tag("td", expected, class_="mono", data_label="expected"),
        render_tag("td", word),
    ]


def _render_number(value: object, label: str) -> Html:
    shown = "–"
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = format_number(float(value))
    return render_tag("td", shown, class_="number", data_label=label)


def _derive_error_name(name: str) -> str:
    """The name of a metric's standard error in lm-evaluation-harness: `task/acc_stderr,none`."""
    measure, comma, kind = name.partition(",")
    return f"{measure}_stderr{comma}{kind}"


def _is_error(name: str) -> bool:
    return name.partition(",")[0].endswith("_stderr")
