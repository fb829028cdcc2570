"""The verdict of a run on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launcher.config.points import BY_NAME
from launcher.printable import indent_lines
from launcher.report.console import echo, style
from launcher.verdict import summary

if TYPE_CHECKING:
    from launcher.verdict.check import Verdict

_COLOUR_OF_STATUS = {"pass": "green", "fail": "red", "unproven": "yellow", "stopped": "yellow"}
_FIGURES_WIDTH = 76
"""Columns of the figures below a verdict, on a terminal of 80."""
_POINT_WORDS = {True: "ok", False: "FAIL", None: "unproven"}
_POINT_COLOUR = {"ok": "green", "FAIL": "red", "unproven": "yellow", "stopped": "yellow"}


def print_verdict(verdict: Verdict, name: str) -> None:
    """Print one line for a run that passed; else also the cause, what is not proved, the figures.

    A point that is as expected is left out unless it has something to say.
    """
    record = verdict.as_json()
    outcome = summary.describe_outcome(record)
    stage = verdict.stage or "unknown stage"
    heading = f"  {name}  ({stage}, {verdict.steps or 0} steps)"
    echo("verdict: ", style(outcome, _COLOUR_OF_STATUS[outcome]), indent_lines(heading))
    printed: set[str | None] = set()
    cause = summary.find_cause(record)
    if cause is not None:
        label = "stopped" if verdict.stopped is not None else "cause"
        echo("  ", style(label, _COLOUR_OF_STATUS[outcome]), indent_lines(f": {cause.text}"))
        _print_evidence(cause)
        printed = {cause.text, cause.help, *cause.repeated}
    unreached = summary.list_unreached(record)
    for point in summary.sort_failed_first(record):
        lines = _describe_point(point)
        if point["name"] in unreached or (point["ok"] is True and not lines):
            continue
        _print_point(point, outcome)
        for line in lines:
            if line not in printed:
                echo(indent_lines(f"    {line}"))
    if unreached:
        # each of them would say the same
        echo(f"  not shown, training never reached step 1: {', '.join(unreached)}")
    if verdict.status != "pass":
        _print_metrics(verdict.metrics)


def _print_evidence(cause: summary.Cause) -> None:
    """Print the place and the line that show a cause, and what to do about it."""
    if cause.line:
        place = f"    {cause.line.get('file')}"
        if cause.line.get("line"):
            place += f":{cause.line['line']}"
        if cause.line.get("text"):
            place += f": {cause.line['text']}"
        echo(indent_lines(place))
    if cause.help:
        echo(indent_lines(f"    help: {cause.help}"))


def _print_metrics(metrics: Mapping[str, float | None]) -> None:
    figures = []
    for name, value in metrics.items():
        if value is None:
            continue
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        # a line break must not part a figure from its name
        figures.append(f"{name}\xa0{shown}")
    for line in textwrap.wrap(", ".join(figures), _FIGURES_WIDTH):
        echo(f"  {line}".replace("\xa0", " "))


def _print_point(point: summary.Point, outcome: str) -> None:
    word = _POINT_WORDS[point["ok"]]
    if word == "FAIL" and outcome == "stopped":
        # of a stopped run, the only point that fails is its end
        word = "stopped"
    expected = ""
    if summary.is_wanted(point):
        expected = f"expected {point['expected']}"
    elif point["ok"] is True:
        echo(indent_lines(f"  {point['name']:<16}{point['state']!s}"))
        return
    mark = style(f"{word:<10}", _POINT_COLOUR[word], bold=False)
    state = f"  {point['name']:<16}{point['state']!s:<18}"
    echo(indent_lines(state), mark, indent_lines(expected))


def _describe_point(point: summary.Point) -> list[str]:
    lines = []
    kind = BY_NAME.get(str(point["name"]))
    if kind is not None and kind.on_terminal:
        sentence = summary.describe_point(point)
        if sentence:
            lines.append(sentence)
    detail = point["detail"]
    if point["ok"] is not True:
        lines += summary.list_reasons(detail)
    # also of a point that is as expected: half of the batch may be empty
    if detail.get("wasted"):
        lines.append(detail["wasted"])
    if detail.get("stand_in"):
        lines.append(f"stand-in: {detail['stand_in']}")
    return lines
