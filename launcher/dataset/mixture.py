"""TRL's `datasets:` -> `Mixture`: its entries, the rows that each of them gives, and those of the test split.

Follows trl/scripts/utils.py::get_dataset (`get_dataset`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.dataset import slices, sources, survey
from launcher.dataset.slices import BadSplit, Slice
from launcher.dataset.sources import Source
from launcher.dataset.survey import Survey

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
        return slices.read(self.split)

    def first_split(self) -> str:
        """The name of the split that is read first, `train` where it names none."""
        try:
            return self.slices()[0].split
        except BadSplit:
            return "train"

    def source(self, split: str, environ: Mapping[str, str]) -> Source:
        """The files of one of its splits."""
        return sources.of_set(self.path, split, self.name, environ, data_dir=self.data_dir, data_files=self.data_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one split of a set: those that are read of it, or None where their number is unknown."""

    source: Source
    rows: range | None

    @property
    def count(self) -> int | None:
        return None if self.rows is None else len(self.rows)

    def survey(self, columns: Sequence[str] | None) -> Survey:
        """What its rows are like, in the columns that are selected."""
        found = survey.look(self.source.files, self.rows)
        return found if columns is None else found.of_columns(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSet:
    """One set of a mixture and the rows that it gives, in order."""

    entry: SetEntry
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int | None:
        counts = [piece.count for piece in self.pieces]
        return None if None in counts else sum(count for count in counts if count is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The sets behind each other, and what is split off for evaluation: rows, or a share of them."""

    sets: tuple[MixedSet, ...]
    test_split_size: float | None = None

    def names(self) -> list[str]:
        """What the data are read from, each once: folders, single files where they are named, names of the hub."""
        named: dict[str, None] = {}
        for mixed in self.sets:
            entry = mixed.entry
            is_folder = entry.data_files is None and entry.data_dir is None and os.path.isdir(entry.path)
            files = [str(file) for piece in mixed.pieces for file in (*piece.source.files, *piece.source.beside)]
            if is_folder or not files:
                named[entry.path] = None
            named.update(dict.fromkeys([] if is_folder else files))
        return list(named)

    @property
    def rows(self) -> int | None:
        """The rows of all sets together; None where that is unknown."""
        counts = [mixed.rows for mixed in self.sets]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def test_rows(self) -> int | None:
        """datasets/arrow_dataset.py::Dataset.train_test_split[n_test = ceil(test_size]: a share is rounded up."""
        if self.test_split_size is None:
            return 0
        if isinstance(self.test_split_size, int):
            return self.test_split_size
        rows = self.rows
        return None if rows is None else math.ceil(self.test_split_size * rows)

    @property
    def train_rows(self) -> int | None:
        if self.rows is None or self.test_rows is None:
            return None
        return max(0, self.rows - self.test_rows)


def entries(listed: Any) -> tuple[SetEntry, ...]:
    """The entries of a list as a stage file holds it; those that are none, or of wrong types, are left out."""
    read = []
    for index, item in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(item, str):
            read.append(SetEntry(index=index, path=item))
        elif (
            isinstance(item, dict)
            and isinstance(item.get("path"), str)
            and not any(map(type_fault, item, item.values()))
        ):
            read.append(_entry(index, item))
    return tuple(read)


def _entry(index: int, item: Mapping[str, Any]) -> SetEntry:
    given = {key: value for key, value in item.items() if key in KEYS}
    if given.get("columns") is not None:
        given["columns"] = tuple(given["columns"])
    return SetEntry(index=index, **given)


def type_fault(key: str, value: Any) -> str | None:
    """Why the value of a key of an entry is of a type that TRL or `datasets` cannot use; None where it can."""
    if value is None:
        # these have to be there, or the default is meant and null is none
        return "is empty" if key in ("path", "split") else None
    if key in ("path", "name", "data_dir", "split"):
        return None if isinstance(value, str) else "is not text"
    if key == "fraction":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number else "is not a number"
    if key == "columns":
        is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return None if is_names else "is not a list of names"
    if key == "data_files":
        return None if _is_files(value) else "is neither a path, a list of paths, nor a mapping of splits to paths"
    return None


def _is_files(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_is_paths(paths) for paths in value.values())
    return _is_paths(value)


def _is_paths(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(path, str) for path in value)
    return isinstance(value, str)


def of_values(values: Mapping[str, Any], environ: Mapping[str, str]) -> Mixture | None:
    """The mixture of a stage; None where it names none."""
    listed = entries(values.get("datasets"))
    if not listed:
        return None
    sets = [MixedSet(entry=entry, pieces=_pieces(entry, environ)) for entry in listed]
    size = values.get("test_split_size")
    return Mixture(sets=tuple(_by_fraction(sets)), test_split_size=size)


def _pieces(entry: SetEntry, environ: Mapping[str, str]) -> tuple[Piece, ...]:
    try:
        parts = entry.slices()
        return tuple(_piece(part, entry.source(part.split, environ)) for part in parts)
    except BadSplit as error:
        return (Piece(source=Source(name=entry.path, unseen=str(error)), rows=None),)


def _piece(part: Slice, source: Source) -> Piece:
    if not source.files:
        return Piece(source=source, rows=None)
    found = survey.look(source.files)
    if found.unread or found.faults:
        return Piece(source=source, rows=None)
    return Piece(source=source, rows=part.rows(found.rows))


def _by_fraction(sets: Sequence[MixedSet]) -> list[MixedSet]:
    """trl/scripts/utils.py::get_dataset[if any(fraction is not]: the first rows of each set, by its share of the
    largest mixture without copies.
    """
    fractions = [mixed.entry.fraction for mixed in sets]
    if None in fractions or not _are_shares(fractions):
        return list(sets)
    whole = sum(fraction for fraction in fractions if fraction is not None)
    limits = []
    for mixed in sets:
        weight = (mixed.entry.fraction or 0) / whole
        if mixed.rows is None:
            return [_unknown(other) for other in sets]
        if weight > 0:
            limits.append(mixed.rows / weight)
    total = min(limits)
    return [_first(mixed, round((mixed.entry.fraction or 0) / whole * total)) for mixed in sets]


def _are_shares(fractions: Sequence[float | None]) -> bool:
    numbers = [fraction for fraction in fractions if fraction is not None]
    return all(0 <= number < math.inf for number in numbers) and sum(numbers) > 0


def _unknown(mixed: MixedSet) -> MixedSet:
    pieces = tuple(replace(piece, rows=None) for piece in mixed.pieces)
    return replace(mixed, pieces=pieces)


def _first(mixed: MixedSet, count: int) -> MixedSet:
    pieces = []
    left = count
    for piece in mixed.pieces:
        rows = (piece.rows or range(0))[:left]
        left -= len(rows)
        pieces.append(replace(piece, rows=rows))
    return replace(mixed, pieces=tuple(pieces))
