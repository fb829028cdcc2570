"""The rows of a stage's local data that show what its first rows do not -> by the name that the trainer loads."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.dataset import exemplars, mixture, sources, survey
from launcher.dataset.exemplars import Exemplar
from launcher.dataset.mixer import LOCAL_SUFFIXES
from launcher.dataset.mixture import MixedSet
from launcher.dataset.sources import Source
from launcher.dataset.survey import Survey
from launcher.paths import is_dir
from launcher.upstream.trainers import Entry
from launcher.workflows.rehearse.arguments import ROWS

_MOST_CHARACTERS = 1 << 20
"""Characters of all rows together, as JSON: they are sent with every request."""

Further = Mapping[str, tuple[Exemplar, ...]]


def of_stage(args: Mapping[str, Any], entry: Entry) -> Further:
    """Rows beyond the first `ROWS` of each data set that lies here; rows that JSON cannot hold are left out."""
    left = _MOST_CHARACTERS
    further: dict[str, tuple[Exemplar, ...]] = {}
    for name, surveyed in _surveys(args, entry):
        if name in further:
            continue
        kept = []
        for exemplar in exemplars.beyond(surveyed, ROWS):
            size = _size(exemplar.row)
            if size is not None and size <= left:
                left -= size
                kept.append(exemplar)
        if kept:
            further[name] = tuple(kept)
    return further


def as_json(further: Further) -> dict[str, list[dict[str, Any]]]:
    return {name: [exemplar.row for exemplar in kept] for name, kept in further.items()}


def mixture_as_json(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sets of a mixture that lie here: how each is loaded, and which rows of which splits it gives."""
    mixed = mixture.of_values(args, os.environ)
    sets = []
    for one in () if mixed is None else mixed.sets:
        entry = one.entry
        if any(piece.rows is None for piece in one.pieces):
            continue
        splits = [part.split for part in entry.slices()]
        pieces = [
            (split, piece.rows) for split, piece in zip(splits, one.pieces, strict=True) if piece.rows is not None
        ]
        sets.append(
            {
                "key": entry.key,
                "call": [entry.path, entry.name, entry.data_dir, entry.data_files, entry.split],
                "pieces": [[split, rows.start, rows.stop] for split, rows in pieces],
                "total": one.rows,
                "bytes": _bytes(one),
            }
        )
    return sets


def _bytes(mixed: MixedSet) -> int | None:
    """The size of the files of a set; None where one of them has gone."""
    files = {file for piece in mixed.pieces for file in piece.source.files}
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return None


def _of_mixture(args: Mapping[str, Any]) -> Iterator[tuple[str, Survey]]:
    mixed = mixture.of_values(args, os.environ)
    for one in () if mixed is None else mixed.sets:
        for piece in one.pieces:
            if piece.rows is not None:
                yield one.entry.key, piece.survey(None)


def _surveys(args: Mapping[str, Any], entry: Entry) -> Iterator[tuple[str, Survey]]:
    """What lies here of the data, by the name that the trainer loads, or the key of a mixture's set."""
    yield from _of_mixture(args)
    for source in sources_of(args, entry):
        yield source.name, survey.look(source.files)


def sources_of(args: Mapping[str, Any], entry: Entry) -> Iterator[Source]:
    """What a stage trains on, as its trainer loads it; without files where it is no local file or folder."""
    named = args.get(entry.names.data)
    if not entry.mixes:
        if isinstance(named, str) and not args.get("datasets"):
            yield from _folder(named, args.get("dataset_train_split"), args.get("dataset_config"))
        return
    words = [str(word) for word in named] if isinstance(named, list) else []
    splits = args.get(f"{entry.names.data}_splits")
    split = splits[0] if isinstance(splits, list) and len(splits) == 1 else None
    for word in words[::2]:
        if word.endswith(LOCAL_SUFFIXES):
            yield sources.of_file(word)
        else:
            yield from _folder(word, split, None)


def _folder(name: str, split: Any, config: Any) -> Iterator[Source]:
    if not is_dir(name):
        yield Source(name=name, unseen="it is no folder here")
        return
    config = None if config is None else str(config)
    yield sources.of_name(name, str(split or "train"), config, os.environ)


def _size(row: Mapping[str, Any]) -> int | None:
    """Characters of a row as JSON; None where it holds what JSON does not: bytes, times."""
    try:
        return len(json.dumps(row))
    except (TypeError, ValueError, RecursionError):
        return None
