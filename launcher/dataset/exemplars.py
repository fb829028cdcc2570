"""Rows that show what the first rows of a data set do not: a role, a kind of value, a fault -> list of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.dataset import reading
from launcher.dataset.survey import RowPlace, Survey

_MOST_ROWS = 64
_MOST_CHARACTERS = 100_000  # of one row; a longer one is left out
# facts that no template or trainer meets: they compare rows with each other
_NOT_SHOWN = frozenset({"copy", "equal-pair"})


def beyond(survey: Survey, count: int) -> list[dict[str, Any]]:
    """The first row of each kind that is not among the first `count` rows of the first file, in their order.

    Only of files whose rows are read as the trainer's reader types them: cells of CSV are not.
    """
    places = _places(survey)
    files = list(dict.fromkeys(place.file for place in places))
    if not files or any(reading.data_suffix(Path(file)) in reading.TEXT_FORMATS for file in files):
        return []
    further = {place for place in places if place.number and (place.file != files[0] or place.number > count)}
    rows: list[dict[str, Any]] = []
    for file in files:
        wanted = {place.number for place in further if place.file == file}
        rows += _rows_at(Path(file), wanted)
    return rows[:_MOST_ROWS]


def _places(survey: Survey) -> list[RowPlace]:
    kinds = [seen.first for (_, kind), seen in survey.kinds.items() if kind != "absent"]
    facts = [seen.first for (_, fact), seen in survey.facts.items() if fact not in _NOT_SHOWN]
    return kinds + facts


def _rows_at(path: Path, numbers: set[int]) -> list[dict[str, Any]]:
    if not numbers:
        return []
    last = max(numbers)
    rows = []
    for number, row in reading.read_rows(path):
        if number in numbers and isinstance(row, dict) and len(repr(row)) <= _MOST_CHARACTERS:
            rows.append(row)
        if number >= last:
            break
    return rows
