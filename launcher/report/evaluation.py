"""The part of a page about the evaluation of the models: their metrics, and what was expected."""

from collections.abc import Sequence

from launcher.lazy_dataclass import dataclass
from launcher.report import sections
from launcher.report.charts import PageRun
from launcher.report.html import Html, details, figure, join, page_section, table, tag
from launcher.runs.evaluation import POINT
from launcher.runs.record import Json, as_list, as_mapping
from launcher.verdict import summary

KEY = "evaluation"
_SHOWN = 40
"""Rows that are not folded: a benchmark may have a hundred subjects."""
_WORDS = {"passed": "pass", "failed": "fail"}


def section(entries: Sequence[PageRun]) -> Html:
    """A table of metrics for each evaluated run; empty if there is none."""
    parts: list[object] = []
    for entry in entries:
        for point in summary.points(entry.run.verdict):
            if point.get("name") == POINT:
                if len(entries) > 1:
                    parts.append(tag("h3", entry.heading))
                parts.append(_render_evaluation(point))
                break
    return page_section(KEY, "Evaluation", *parts)


def _render_evaluation(point: Json) -> Html:
    detail = as_mapping(point.get("detail"))
    state = str(point.get("state"))
    word = _WORDS.get(state, state.replace("_", " "))
    outcome: list[object] = [sections.word(word)]
    seconds = detail.get("seconds")
    if isinstance(seconds, int | float):
        outcome.append(f" in {seconds:,.0f} s")
    parts: list[object] = [tag("p", *outcome)]
    if point.get("ok") is False and detail.get("reason"):
        parts.append(tag("p", detail["reason"], class_="why"))
    values = as_mapping(detail.get("metrics"))
    gates = [as_mapping(gate) for gate in as_list(detail.get("gates"))]
    rows = _Metrics(values, gates).rows()
    parts.append(_render_metrics_table(rows[:_SHOWN]))
    folded = rows[_SHOWN:]
    if folded:
        title = f"{len(folded)} more numbers"
        parts.append(details(title, _render_metrics_table(folded)))
    for title, key in (("metrics", "metrics_file"), ("log", "log")):
        if detail.get(key):
            path = tag("code", detail[key])
            parts.append(tag("p", f"{title}: ", path, class_="soft"))
    return join(parts)


def _render_metrics_table(rows: Sequence[Sequence[object]]) -> Html:
    head = ("metric", sections.right("value"), sections.right("±"), "expected", "")
    return table(head, rows, "wide")


@dataclass(frozen=True, slots=True)
class _Metrics:
    """The metrics of an evaluation, and the gates that the pipeline file sets."""

    values: Json
    gates: Sequence[Json]

    def rows(self) -> list[list[object]]:
        """The gates first, under the names of the pipeline file, then the other metrics."""
        rows = []
        gated = set()
        for gate in self.gates:
            gated.add(gate.get("name"))
            name = str(gate.get("name") or gate.get("metric"))
            expected = str(gate.get("expected"))
            word = sections.word("ok" if gate.get("ok") is True else "fail")
            rows.append(self._build_row(name, gate.get("value"), expected, word))
        for name, value in self.values.items():
            if name not in gated and not _is_error(name):
                rows.append(self._build_row(name, value, "", ""))
        return rows

    def _build_row(self, name: str, value: object, expected: str, word: object) -> list[object]:
        return [
            tag("th", tag("code", name), scope="row"),
            _render_number(value, "value"),
            _render_number(self.values.get(_derive_error_name(name)), "±"),
            tag("td", expected, class_="mono", data_label="expected"),
            tag("td", word if expected else ""),
        ]


def _render_number(value: object, label: str) -> Html:
    shown = "–"
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = figure(float(value))
    return tag("td", shown, class_="number", data_label=label)


def _derive_error_name(name: str) -> str:
    """The name of a metric's standard error in lm-evaluation-harness: `task/acc_stderr,none`."""
    measure, comma, kind = name.partition(",")
    return f"{measure}_stderr{comma}{kind}"


def _is_error(name: str) -> bool:
    return name.partition(",")[0].endswith("_stderr")
