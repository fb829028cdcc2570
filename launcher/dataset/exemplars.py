"""Rows that show what the first rows of a data set do not: a role, a kind of value, a fault -> list
of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.dataset import reading
from launcher.dataset.reading import CannotRead
from launcher.dataset.survey import RowPlace, Survey
from launcher.lazy_dataclass import dataclass

_MOST_ROWS = 64
_MOST_CHARACTERS = 100_000  # of one row; a longer one is left out
# facts that no template or trainer meets: they compare rows with each other
_NOT_SHOWN = frozenset({"copy", "equal-pair"})


@dataclass(frozen=True, slots=True)
class Exemplar:
    """The first row of a kind, and where it stands."""

    place: RowPlace
    row: dict[str, Any]


def list_further_rows(survey: Survey, count: int) -> list[Exemplar]:
    """The first row of each kind that is not among the first `count` rows of the first file, in
    their order.

    Only of files whose rows are read as the trainer's reader types them: cells of CSV are not.
    """
    places = list(_find_places(survey))
    files = list(dict.fromkeys(place.file for place in places))
    for file in files:
        if reading.find_data_suffix(Path(file)) in reading.TEXT_FORMATS:
            return []
    further: dict[str, dict[int, RowPlace]] = {file: {} for file in files}
    for place in places:
        is_shown = place.file == files[0] and place.index < count
        if not is_shown:
            further[place.file][place.index] = place
    exemplars: list[Exemplar] = []
    for file in files:
        exemplars += _read_exemplars(Path(file), further[file])
    return exemplars[:_MOST_ROWS]


def _find_places(survey: Survey) -> Iterator[RowPlace]:
    """The first row with each kind of value and each fact."""
    for (_, kind), seen in survey.kinds.items():
        if kind != "absent":
            yield seen.first
    for (_, fact), seen in survey.facts.items():
        if fact not in _NOT_SHOWN:
            yield seen.first


def _read_exemplars(path: Path, places: dict[int, RowPlace]) -> Iterator[Exemplar]:
    """The rows at these places, as far as the file still holds them."""
    if not places:
        return
    last = max(places)
    try:
        for index, (_, row) in enumerate(reading.read_rows(path)):
            if index in places and isinstance(row, dict) and len(repr(row)) <= _MOST_CHARACTERS:
                yield Exemplar(places[index], row)
            if index >= last:
                return
    except (CannotRead, OSError):
        # it has changed since it was looked at
        return
