"""TRL's `datasets:` -> `Mixture`: its entries, the rows that each of them gives, and those of the
test split.

Follows trl/scripts/utils.py::get_dataset (`get_dataset`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.dataset import slices, sources, survey
from launcher.dataset.slices import BadSplit, Slice
from launcher.dataset.sources import Source
from launcher.dataset.survey import Survey
from launcher.lazy_dataclass import dataclass

KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
"""The keys of an entry (trl/scripts/utils.py::DatasetConfig[path: str])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEntry:
    """One set of a mixture, as the stage file names it; `index` is its place in the list."""

    index: int
    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: tuple[str, ...] | None = None
    fraction: float | None = None

    @property
    def key(self) -> str:
        return f"datasets[{self.index}]"

    def slices(self) -> tuple[Slice, ...]:
        """The parts of its split. Raises BadSplit."""
        return slices.parse_slices(self.split)

    def first_split(self) -> str:
        """The name of the split that is read first, `train` where it names none."""
        try:
            return self.slices()[0].split
        except BadSplit:
            return "train"

    def source(self, split: str, environ: Mapping[str, str]) -> Source:
        """The files of one of its splits."""
        return sources.find_set_source(
            self.path, split, self.name, environ, data_dir=self.data_dir, data_files=self.data_files
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The rows that are read of one split of a set; None where their number is unknown."""

    source: Source
    rows: range | None

    @property
    def count(self) -> int | None:
        if self.rows is None:
            return None
        return len(self.rows)

    def survey(self, columns: Sequence[str] | None) -> Survey:
        """What its rows are like, in the columns that are selected."""
        whole = survey.look(self.source.files, self.rows)
        if columns is None:
            return whole
        return whole.of_columns(columns)


def _add_counts(counts: Iterable[int | None]) -> int | None:
    """The sum of all counts; None where one of them is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSet:
    """One set of a mixture and the rows that it gives, in order."""

    entry: SetEntry
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int | None:
        return _add_counts(piece.count for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The sets in order, and what is split off for evaluation: rows, or a share of them."""

    sets: tuple[MixedSet, ...]
    test_split_size: float | None = None

    def names(self) -> list[str]:
        """What the data are read from, each once: folders, named files, names of the hub."""
        names: list[str] = []
        for mixed in self.sets:
            entry = mixed.entry
            files: list[Path] = []
            if entry.data_files or entry.data_dir or not os.path.isdir(entry.path):
                for piece in mixed.pieces:
                    files += [*piece.source.files, *piece.source.beside]
            if files:
                names += map(str, files)
            else:
                names.append(entry.path)
        return list(dict.fromkeys(names))

    @property
    def rows(self) -> int | None:
        """The rows of all sets together; None where that is unknown."""
        return _add_counts(mixed.rows for mixed in self.sets)

    @property
    def test_rows(self) -> int | None:
        """datasets/arrow_dataset.py::Dataset.train_test_split[n_test = ceil(test_size]: a share is
        rounded up.
        """
        size = self.test_split_size
        rows = self.rows
        if size is None or isinstance(size, int):
            return size or 0
        if rows is None:
            return None
        return math.ceil(size * rows)

    @property
    def train_rows(self) -> int | None:
        rows = self.rows
        test_rows = self.test_rows
        if rows is None or test_rows is None:
            return None
        return max(0, rows - test_rows)


def parse_entries(listed: Any) -> tuple[SetEntry, ...]:
    """The valid entries of a list as a stage file holds it."""
    if not isinstance(listed, list):
        return ()
    read = []
    for index, item in enumerate(listed):
        if isinstance(item, str):
            read.append(SetEntry(index=index, path=item))
        elif isinstance(item, dict) and _is_valid(item):
            read.append(_build_entry(index, item))
    return tuple(read)


def _is_valid(item: dict[str, Any]) -> bool:
    if not isinstance(item.get("path"), str):
        return False
    return not any(find_type_fault(key, value) for key, value in item.items())


def _build_entry(index: int, item: Mapping[str, Any]) -> SetEntry:
    fields = {key: value for key, value in item.items() if key in KEYS}
    if fields.get("columns") is not None:
        fields["columns"] = tuple(fields["columns"])
    return SetEntry(index=index, **fields)


def find_type_fault(key: str, value: Any) -> str | None:
    """Why TRL or `datasets` cannot use the type of a key's value; None where they can."""
    if value is None and key in ("path", "split"):
        # these have to be there, or the default is meant and null is none
        return "is empty"
    if value is None:
        return None
    if key in ("path", "name", "data_dir", "split"):
        fits = isinstance(value, str)
        fault = "is not text"
    elif key == "fraction":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fault = "is not a number"
    elif key == "columns":
        fits = isinstance(value, list) and all(isinstance(name, str) for name in value)
        fault = "is not a list of names"
    elif key == "data_files":
        fits = _is_files(value)
        fault = "is neither a path, a list of paths, nor a mapping of splits to paths"
    else:
        return None
    if fits:
        return None
    return fault


def _is_files(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_is_paths(paths) for paths in value.values())
    return _is_paths(value)


def _is_paths(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(path, str) for path in value)
    return isinstance(value, str)


def read_mixture(values: Mapping[str, Any], environ: Mapping[str, str]) -> Mixture | None:
    """The mixture of a stage; None where it names none."""
    listed = parse_entries(values.get("datasets"))
    if not listed:
        return None
    sets = [MixedSet(entry=entry, pieces=_find_pieces(entry, environ)) for entry in listed]
    size = values.get("test_split_size")
    return Mixture(sets=tuple(_limit_by_fraction(sets)), test_split_size=size)


def _find_pieces(entry: SetEntry, environ: Mapping[str, str]) -> tuple[Piece, ...]:
    try:
        parts = entry.slices()
        return tuple(_survey_piece(part, entry.source(part.split, environ)) for part in parts)
    except BadSplit as error:
        return (Piece(source=Source(name=entry.path, unseen=str(error)), rows=None),)


def _survey_piece(part: Slice, source: Source) -> Piece:
    if not source.files:
        return Piece(source=source, rows=None)
    surveyed = survey.look(source.files)
    if surveyed.unread or surveyed.faults:
        return Piece(source=source, rows=None)
    return Piece(source=source, rows=part.rows(surveyed.rows))


def _limit_by_fraction(sets: Sequence[MixedSet]) -> list[MixedSet]:
    """trl/scripts/utils.py::get_dataset[if any(fraction is not]: the first rows of each set, by its
    share of the largest mixture without copies.
    """
    fractions: list[float] = []
    for mixed in sets:
        fraction = mixed.entry.fraction
        if fraction is None or not 0 <= fraction < math.inf:
            return list(sets)
        fractions.append(fraction)
    whole = sum(fractions)
    if not whole:
        return list(sets)
    weights = [fraction / whole for fraction in fractions]
    limits: list[float] = []
    for mixed, weight in zip(sets, weights, strict=True):
        if mixed.rows is None:
            return [_forget_rows(other) for other in sets]
        if weight > 0:
            limits.append(mixed.rows / weight)
    total = min(limits)
    limited = []
    for mixed, weight in zip(sets, weights, strict=True):
        limited.append(_take_first(mixed, round(weight * total)))
    return limited


def _forget_rows(mixed: MixedSet) -> MixedSet:
    pieces = tuple(replace(piece, rows=None) for piece in mixed.pieces)
    return replace(mixed, pieces=pieces)


def _take_first(mixed: MixedSet, count: int) -> MixedSet:
    pieces: list[Piece] = []
    for piece in mixed.pieces:
        rows = (piece.rows or range(0))[:count]
        count -= len(rows)
        pieces.append(replace(piece, rows=rows))
    return replace(mixed, pieces=tuple(pieces))
