"""A stage's data on this machine: their size, and rows of kinds that the first do not show."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.dataset import exemplars, mixture, sources, survey
from launcher.dataset.exemplars import Exemplar
from launcher.dataset.mixer import LOCAL_SUFFIXES
from launcher.dataset.mixture import MixedSet
from launcher.dataset.sources import Source
from launcher.dataset.survey import Survey
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir
from launcher.upstream.trainers import Entry
from launcher.workflows.rehearse.arguments import ROWS
from launcher.workflows.rehearse.inside.records import MixturePart, SetSize

_MOST_CHARACTERS = 1 << 20
"""Characters of all rows together, as JSON: they are sent with every request."""
_LARGEST = 256 << 20
"""Bytes of a set that is read to its end to look at rows from all parts."""

Further = Mapping[str, list[Exemplar]]


@dataclass(frozen=True, slots=True)
class LocalSet:
    """A data set as the trainer loads it, and what its rows are like if they are here."""

    source: Source
    survey: Survey

    @property
    def rows(self) -> int | None:
        """None where its files are not here, or cannot all be read."""
        if not self.source.files or self.survey.unread:
            return None
        return self.survey.rows

    @property
    def size(self) -> SetSize:
        size = _sum_file_sizes(self.source.files)
        if self.rows is None or size is None or size > _LARGEST:
            return SetSize(rows=self.rows)
        return SetSize(rows=self.rows, bytes=size)


def find_local_sets(args: Mapping[str, Any], entry: Entry) -> list[LocalSet]:
    """What a stage trains on, beside a mixture (`datasets`)."""
    return [LocalSet(source, survey.look(source.files)) for source in _list_sources(args, entry)]


def find_further_rows(args: Mapping[str, Any], sets: Iterable[LocalSet]) -> Further:
    """Rows beyond the first `ROWS` of each data set, by the name that the trainer loads.

    Of a mixture's set the name is its key. Rows that JSON cannot hold are left out.
    """
    surveys: list[tuple[str, Survey]] = []
    for mixed in _read_mixed_sets(args):
        for piece in mixed.pieces:
            if piece.rows is not None:
                surveys.append((mixed.entry.key, piece.survey(None)))
    for local in sets:
        surveys.append((local.source.name, local.survey))
    left = _MOST_CHARACTERS
    further: dict[str, list[Exemplar]] = {}
    for name, surveyed in surveys:
        if name in further:
            continue
        for exemplar in exemplars.list_further_rows(surveyed, ROWS):
            size = _measure_row(exemplar.row)
            if size is not None and size <= left:
                left -= size
                further.setdefault(name, []).append(exemplar)
    return further


def _measure_row(row: Mapping[str, Any]) -> int | None:
    """Characters of a row as JSON; None where it holds what JSON does not: bytes, times."""
    try:
        return len(json.dumps(row))
    except (TypeError, ValueError, RecursionError):
        return None


def _read_mixed_sets(args: Mapping[str, Any]) -> tuple[MixedSet, ...]:
    mixed = mixture.read_mixture(args, os.environ)
    return () if mixed is None else mixed.sets


def list_mixture_parts(args: Mapping[str, Any]) -> list[MixturePart]:
    """The sets of a mixture whose rows are all on this machine."""
    parts = []
    for mixed in _read_mixed_sets(args):
        if mixed.rows is None:
            continue
        entry = mixed.entry
        files = {file for piece in mixed.pieces for file in piece.source.files}
        pieces = []
        for part, piece in zip(entry.slices(), mixed.pieces, strict=True):
            if piece.rows is not None:
                pieces.append((part.split, piece.rows.start, piece.rows.stop))
        parts.append(
            MixturePart(
                key=entry.key,
                call=[entry.path, entry.name, entry.data_dir, entry.data_files, entry.split],
                pieces=pieces,
                rows=mixed.rows,
                bytes=_sum_file_sizes(files),
            )
        )
    return parts


def _sum_file_sizes(files: Iterable[Path]) -> int | None:
    """Bytes of all files; None if one has gone."""
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return None


def _list_sources(args: Mapping[str, Any], entry: Entry) -> Iterator[Source]:
    """What a stage trains on, as its trainer loads it; without files where it is not local."""
    named = args.get(entry.names.data)
    if not entry.mixes:
        if isinstance(named, str) and not args.get("datasets"):
            split = args.get("dataset_train_split")
            yield _open_folder(named, split, args.get("dataset_config"))
        return
    if not isinstance(named, list):
        return
    splits = args.get(f"{entry.names.data}_splits")
    split = None
    if isinstance(splits, list) and len(splits) == 1:
        split = splits[0]
    for name in map(str, named[::2]):
        if name.endswith(LOCAL_SUFFIXES):
            yield sources.open_file_source(name)
        else:
            yield _open_folder(name, split, None)


def _open_folder(name: str, split: Any, config: Any) -> Source:
    if not is_dir(name):
        return Source(name=name, unseen="it is no folder here")
    if config is not None:
        config = str(config)
    return sources.find_named_source(name, str(split or "train"), config, os.environ)
