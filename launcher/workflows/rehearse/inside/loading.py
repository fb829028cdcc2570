"""`load_dataset` as the trainer calls it, handing on a few rows of each set."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from .calls import call_trainer
from .records import CALL, MixturePart, ServerRequest, ServerResponse, SetSize

_READERS = {"json", "csv", "parquet", "arrow", "text", "pandas"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def replace_everywhere(package: str, name: str, old: Any, new: Any) -> None:
    """Put `new` where modules of a package have imported `old` under a name."""
    for module in list(sys.modules.values()):
        top = getattr(module, "__name__", "").partition(".")[0]
        if top in {package, "datasets"} and module.__dict__.get(name) is old:
            setattr(module, name, new)


class AnySplit(dict[str, Any]):
    """The splits of a data set that is not on this machine: it has every name."""

    def __missing__(self, split: str) -> Any:
        return self["train"]


class FirstRows:
    """Stands in for `load_dataset`: loads the first rows of each set, and its `further` rows.

    `split` is the split that is trained on, where the trainer loads all of them at once. The
    response says how many rows were read, of how many.
    """

    def __init__(self, request: ServerRequest, response: ServerResponse, split: str | None) -> None:
        self.request = request
        self.response = response
        self.split = split
        self.load: Callable[..., Any]

    def install(self, package: str) -> None:
        import datasets

        self.load = datasets.load_dataset
        replace_everywhere(package, "load_dataset", self.load, self)

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self.response.phase = "data"
        loaded = self.load_set(path, *args, **kwargs)
        self.response.phase = "construct"
        return loaded

    def load_set(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        import datasets

        call = {"path": path, **kwargs}
        part = self.part_of_mixture(call)
        if part is not None:
            return self.load_part(part, call)
        # a name of the hub may be that of a folder too
        is_local = path in _READERS or os.path.exists(str(path))
        # a stream cannot be sliced
        if is_local and "[" not in str(kwargs.get("split")):
            kwargs.pop("num_proc", None)
            kwargs["streaming"] = True
        try:
            loaded = call_trainer(self.load, path, *args, **kwargs)
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError):
            if is_local or _HUB_NAME.fullmatch(str(path)) is None:
                raise
            return self.stand_in(str(path), kwargs.get("split"))
        name = str(kwargs.get("data_files") or path)
        if not isinstance(loaded, dict):
            return self.take(loaded, name)
        splits = {}
        for split, rows in loaded.items():
            if split == self.split:
                splits[split] = self.take(rows, name)
            else:
                splits[split] = self.take_other(rows)
        return datasets.DatasetDict(splits)

    def part_of_mixture(self, call: Any) -> MixturePart | None:
        """The set of the mixture that is loaded by this call; None where it is another one."""
        key = [call.get(name) for name in CALL]
        for part in self.request.mixture:
            if part.call == key:
                return part
        return None

    def load_part(self, part: MixturePart, call: Any) -> Any:
        import datasets

        taken = []
        for split, start, stop in part.pieces:
            arguments = {**call, "split": split, "streaming": True}
            stream = call_trainer(self.load, **arguments)
            length = stop - start
            # a stream cannot be sliced, but its rows can be skipped
            piece = stream.skip(start).take(length)
            taken.append(self.take_piece(piece, length, part))
        filled = [rows for rows in taken if len(rows)]
        joined = datasets.concatenate_datasets(filled or taken)
        return self.take_part(joined, part)

    def take_piece(self, stream: Any, length: int, part: MixturePart) -> Any:
        return take_first_rows(stream, self.request.rows)

    def take_part(self, rows: Any, part: MixturePart) -> Any:
        return self.add_further(rows, part.key, part.rows)

    def take(self, rows: Any, name: str) -> Any:
        """Rows of the split that is trained on."""
        total = self.request.sizes.get(name, SetSize()).rows
        if hasattr(rows, "__len__"):
            total = len(rows)
        return self.add_further(rows, name, total)

    def take_other(self, rows: Any) -> Any:
        """Rows of another split."""
        return take_first_rows(rows, self.request.rows)

    def add_further(self, rows: Any, name: str, total: int | None) -> Any:
        first = take_first_rows(rows, self.request.rows)
        whole = append(first, self.request.further.get(name, []))
        counts = self.response.rows
        counts.read += len(first)
        counts.further += len(whole) - len(first)
        if total is None or counts.total is None:
            counts.total = None
        else:
            counts.total += total
        return whole

    def stand_in(self, name: str, split: Any) -> Any:
        """Made-up rows in place of a set of the hub that is not on this machine."""
        import datasets

        self.response.notes.append(("data", name))
        made_up = make_up_rows(self.request.rows, pairs=self.request.pairs)
        rows = datasets.Dataset.from_list(made_up)
        return rows if split else AnySplit(train=rows, test=rows)


def take_first_rows(rows: Any, count: int) -> Any:
    """The first rows of a data set or a stream, as a data set."""
    import datasets

    if hasattr(rows, "select"):
        return rows.select(range(min(count, len(rows))))
    taken = call_trainer(list, rows.take(count))
    return datasets.Dataset.from_list(taken, features=None if taken else rows.features)


def make_up_rows(count: int, *, pairs: bool) -> list[Any]:
    """Conversations as the hub's sets hold them: messages for SFT, pairs for DPO."""
    rows = []
    for number in range(count):
        question = {"role": "user", "content": f"What is {number} plus {number % 7}?"}
        text = f"It is {number + number % 7}. " * (1 + number % 3)
        answer = {"role": "assistant", "content": text}
        if pairs:
            wrong = {"role": "assistant", "content": f"I do not know, perhaps {number}."}
            rows.append({"chosen": [question, answer], "rejected": [question, wrong]})
        else:
            rows.append({"messages": [question, answer]})
    return rows


def append(rows: Any, further: list[Any]) -> Any:
    """A data set with further rows at its end, but for those that it has and those of other types.

    What types the trainer's own reader does not put together, launch's rules about rows say.
    """
    import datasets

    listed = list(rows)
    if not listed:
        return rows
    for row in further:
        if drop_nulls(row) in map(drop_nulls, listed):
            continue
        try:
            rows = datasets.Dataset.from_list([*listed, row])
        except Exception:
            # pyarrow raises errors of many classes
            continue
        listed.append(row)
    return rows


def drop_nulls(value: Any) -> Any:
    """A value without the nulls of absent keys, which a data set adds."""
    if isinstance(value, dict):
        return {key: drop_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [drop_nulls(entry) for entry in value]
    return value
