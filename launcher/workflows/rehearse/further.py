"""The rows of a stage's local data that show what its first rows do not -> by the name that the trainer loads."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.dataset import exemplars, sources, survey
from launcher.dataset.exemplars import Exemplar
from launcher.dataset.mixer import LOCAL_SUFFIXES
from launcher.dataset.sources import Source
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
    for source in _sources(args, entry):
        if source.name in further:
            continue
        kept = []
        for exemplar in exemplars.beyond(survey.look(source.files), ROWS):
            size = _size(exemplar.row)
            if size is not None and size <= left:
                left -= size
                kept.append(exemplar)
        if kept:
            further[source.name] = tuple(kept)
    return further


def as_json(further: Further) -> dict[str, list[dict[str, Any]]]:
    return {name: [exemplar.row for exemplar in kept] for name, kept in further.items()}


def _sources(args: Mapping[str, Any], entry: Entry) -> Iterator[Source]:
    """The local files and folders that a stage trains on, as its trainer loads them."""
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
    if is_dir(name):
        config = None if config is None else str(config)
        yield sources.of_name(name, str(split or "train"), config, os.environ)


def _size(row: Mapping[str, Any]) -> int | None:
    """Characters of a row as JSON; None where it holds what JSON does not: bytes, times."""
    try:
        return len(json.dumps(row))
    except (TypeError, ValueError, RecursionError):
        return None
