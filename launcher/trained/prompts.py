"""Prompts with their answers from a run's data, from a held-out split if there is one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.dataset import mixture, reading, shapes, sources
from launcher.dataset.mixer import LOCAL_SUFFIXES
from launcher.dataset.reading import BadRow, CannotRead
from launcher.dataset.shapes import CannotConvert
from launcher.dataset.sources import Source
from launcher.lazy_dataclass import dataclass
from launcher.runs.record import Manifest, as_list

_ROWS = 2000
"""Rows of a file to choose from."""
_LONGEST = 4000
"""Characters of a prompt; a longer one is passed over."""
_HELD_BACK = ("test", "validation")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation for the assistant to continue, and the answer of the data set."""

    messages: Messages
    expected: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Some prompts and where they are from; without any, `missing` says why."""

    origin: str
    chosen: tuple[Prompt, ...] = ()
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class _RowFiles:
    origin: str
    files: tuple[Path, ...]


def choose(manifest: Manifest, count: int) -> Prompts:
    """Up to `count` prompts, evenly spread over the first rows of the data.

    Relative names of files start at the working directory.
    """
    place = _find_row_files(manifest)
    if place is None:
        missing = "the rows of the data set are not in files that launch reads"
        return Prompts(origin="", missing=missing)
    prompts: list[Prompt] = []
    try:
        for file in place.files:
            prompts += _read_prompts(file)
    except (CannotRead, OSError) as error:
        return Prompts(origin=place.origin, missing=str(error))
    if not prompts:
        missing = "its rows hold no prompt apart from the answer"
        return Prompts(origin=place.origin, missing=missing)
    step = max(1, len(prompts) // count)
    return Prompts(origin=place.origin, chosen=tuple(prompts[::step][:count]))


def _find_row_files(manifest: Manifest) -> _RowFiles | None:
    """The files to choose from: a split that was not trained on, else what was."""
    values = {name: manifest.argument(name) for name in manifest.args}
    name = values.get("dataset_name")
    trained_on: Iterable[Source | None]
    if isinstance(name, str) and name and not values.get("datasets"):
        trained = str(values.get("dataset_train_split") or "train")
        test = str(values.get("dataset_test_split") or "test")
        config = values.get("dataset_config")
        for split in (test, *_HELD_BACK):
            source = _open_split(name, split, config)
            if split != trained and source is not None and source.files:
                return _RowFiles(f"the split {split}, which was not trained on", source.files)
        trained_on = [_open_split(name, trained, config)]
    else:
        trained_on = _list_trained_sources(values)
    files: list[Path] = []
    for source in trained_on:
        if source is not None:
            files += source.files
    if not files:
        return None
    return _RowFiles("rows that were trained on", tuple(files))


def _open_split(name: str, split: str, config: Any) -> Source | None:
    split_names = sources.split_names(name, config)
    if split_names is not None and split not in split_names:
        return None
    if "[" in split or "+" in split:
        return None
    try:
        return sources.find_named_source(name, split, config, os.environ)
    except KeyError:
        # a data set of the hub without that split
        return None


def _list_trained_sources(values: Mapping[str, Any]) -> Iterator[Source]:
    mixed = mixture.read_mixture(values, os.environ)
    if mixed is not None:
        for mixed_set in mixed.sets:
            for piece in mixed_set.pieces:
                yield piece.source
        return
    for key in ("dataset_mixer_list", "mixer_list"):
        splits = as_list(values.get(f"{key}_splits"))
        split = "train"
        if len(splits) == 1:
            split = str(splits[0])
        for name in map(str, as_list(values.get(key))[::2]):
            if name.endswith(LOCAL_SUFFIXES):
                yield sources.open_file_source(name)
            else:
                yield sources.find_named_source(name, split, None, os.environ)


def _read_prompts(file: Path) -> Iterator[Prompt]:
    for _, row in islice(reading.read_rows(file), _ROWS):
        if isinstance(row, BadRow) or not isinstance(row, dict):
            continue
        prompt = read_prompt(row)
        if prompt is None:
            continue
        length = sum(len(message["content"]) for message in prompt.messages)
        if length <= _LONGEST:
            yield prompt


def read_prompt(row: Mapping[str, Any]) -> Prompt | None:
    """The prompt of a row as the trainers read it; None if it has none, or more than text."""
    if row.get("chosen") is not None:
        return _convert_pair(row.get("prompt"), row["chosen"])
    if row.get("prompt") is not None:
        return _convert_completion(row["prompt"], row.get("completion"))
    for column in ("messages", "conversations"):
        messages = _read_messages(row.get(column))
        if messages is not None:
            return _cut_at_first_answer(messages)
    return None


def _convert_pair(prompt: object, chosen: object) -> Prompt | None:
    if isinstance(chosen, str):
        return _convert_completion(prompt, chosen)
    messages = _read_messages(chosen)
    if messages is None:
        return None
    before = _as_messages(prompt) or []
    # the answers may repeat their prompt
    if messages[: len(before)] != before:
        messages = [*before, *messages]
    return _build_prompt(messages[:-1], messages[-1]["content"])


def _convert_completion(prompt: object, completion: object) -> Prompt | None:
    messages = _as_messages(prompt)
    if messages is None:
        return None
    if isinstance(completion, str):
        return _build_prompt(messages, completion)
    expected = ""
    answer = _read_messages(completion)
    if answer is not None:
        expected = answer[-1]["content"]
    return _build_prompt(messages, expected)


def _cut_at_first_answer(messages: Messages) -> Prompt | None:
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            return _build_prompt(messages[:place], message["content"])
    return None


def _build_prompt(messages: Messages, expected: str) -> Prompt | None:
    if not messages or messages[-1]["role"] != "user":
        return None
    return Prompt(messages=messages, expected=expected)


def _as_messages(prompt: object) -> Messages | None:
    if not isinstance(prompt, str):
        return _read_messages(prompt)
    if not prompt.strip():
        return None
    return [{"role": "user", "content": prompt}]


def _read_messages(value: object) -> Messages | None:
    """Messages of text with `role` and `content`; None if they are something else."""
    if not isinstance(value, list):
        return None
    try:
        converted = shapes.convert_messages(value)
    except CannotConvert:
        return None
    messages: Messages = []
    for message in converted:
        content = message["content"]
        if not isinstance(content, str) or not content:
            return None
        messages.append({"role": str(message["role"]), "content": content})
    return messages
