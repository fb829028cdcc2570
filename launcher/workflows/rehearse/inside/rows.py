"""The first rows of a run's data, and what became of them once the trainer had tokenised them."""

import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .calls import call_trainer, pass_on

TOKENS = 256
"""Tokens that are trained on of each row: the whole row has been prepared by then."""
_FILES = {"json", "csv", "parquet", "arrow", "text", "pandas"}
_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
_MASKS = ("completion_mask", "assistant_masks")


COUNTS_S = 2.0
"""Seconds after which the rows of a set are not counted any further."""


class Filtered(NamedTuple):
    """One pass of `Dataset.filter`: rows before and after it, and what it says of itself."""

    before: int
    after: int
    what: str


FILTERED: list[Filtered] = []
"""What this process, which answers one request, has filtered so far."""


class AnySplit(dict[str, Any]):
    """The splits of a data set that is not on this machine: it has every name."""

    def __missing__(self, split: str) -> Any:
        return self["train"]


def limit(load: Callable[..., Any], request: dict[str, Any], report: dict[str, Any]) -> Callable[..., Any]:
    """`load_dataset` of the first rows of each set and its `further` rows; `report` says how many there are in all.

    Counted are the rows of the split that is trained on: that of the request, or the one that is asked for.
    """
    import datasets

    absent = (ConnectionError, datasets.exceptions.DatasetNotFoundError)
    count = request["rows"]
    report["sets"] = []
    report["further"] = 0

    def load_few(path: Any, *args: Any, **kwargs: Any) -> Any:
        report["phase"] = "data"
        loaded = load_some(path, *args, **kwargs)
        report["phase"] = "construct"
        return loaded

    def load_pieces(mixed: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """The first rows of each piece of a set: a stream cannot be sliced, but its rows can be skipped."""
        parts = []
        left = count
        for split, start, stop in mixed["pieces"]:
            stream = call_trainer(load, **{**kwargs, "split": split, "streaming": True})
            part = read(stream.skip(start), min(left, stop - start))
            left -= len(part)
            parts.append(part)
        first = datasets.concatenate_datasets([part for part in parts if len(part)] or parts)
        report["sets"].append({"read": len(first), "total": mixed["total"], "more": False})
        return add(first, request.get("further", {}).get(mixed["key"], []))

    def load_some(path: Any, *args: Any, **kwargs: Any) -> Any:
        mixed = set_of_mixture(request, {"path": path, **kwargs})
        if mixed is not None and not kwargs.get("streaming"):
            return load_pieces(mixed, {"path": path, **kwargs})
        # a hub's name may be a folder's too; a saved set (`save_to_disk`) is refused as it would be
        local = is_local(path)
        if local and not kwargs.get("streaming"):
            kwargs.pop("num_proc", None)
            kwargs["streaming"] = True
            stream = call_trainer(load, path, *args, **kwargs)
            first = each(stream, lambda one: read(one, count))
            note_sizes(stream, first)
            return add_further(first, str(kwargs.get("data_files") or path))
        try:
            loaded = call_trainer(load, path, *args, **kwargs)
        except absent:
            if local or not is_hub_name(path):
                raise
            report["notes"].append(["data", str(path)])
            made = datasets.Dataset.from_list(made_up(count, pairs=request["pairs"]))
            made = made.to_iterable_dataset() if kwargs.get("streaming") else made
            return made if kwargs.get("split") else AnySplit(train=made, test=made)
        first = each(loaded, lambda one: head(one, count))
        note_sizes(loaded, first)
        return first

    def note_sizes(whole: Any, first: Any) -> None:
        if isinstance(whole, dict):
            whole = whole.get(request.get("split"))
            first = first.get(request.get("split"))
        if hasattr(first, "__len__"):
            report["sets"].append({"read": len(first), **size(whole, count=request.get("count", False))})

    def add_further(first: Any, name: str) -> Any:
        further = request.get("further", {}).get(name, [])
        if not isinstance(first, dict):
            return add(first, further)
        split = request.get("split")
        if split in first:
            first[split] = add(first[split], further)
        return first

    def add(first: Any, further: list[dict[str, Any]]) -> Any:
        whole = append(first, further)
        report["further"] += len(whole) - len(first)
        return whole

    return load_few


def is_local(path: Any) -> bool:
    """Whether what `load_dataset` is given is a folder that is here, or the format of files."""
    return path in _FILES or os.path.exists(str(path))


def is_hub_name(path: Any) -> bool:
    return _HUB_NAME.match(str(path)) is not None


def set_of_mixture(request: dict[str, Any], call: dict[str, Any]) -> dict[str, Any] | None:
    """The set of the request's mixture that is loaded by this call; None where it is another one."""
    names = ("path", "name", "data_dir", "data_files", "split")
    key = [call.get(name) for name in names]
    for mixed in request.get("mixture", ()):
        if mixed["call"] == key:
            match: dict[str, Any] = mixed
            return match
    return None


def made_up(count: int, *, pairs: bool) -> list[dict[str, Any]]:
    """Conversations as the hub's sets hold them: messages for SFT, pairs for DPO."""
    made = []
    for number in range(count):
        question = {"role": "user", "content": f"What is {number} plus {number % 7}?"}
        answer = {"role": "assistant", "content": f"It is {number + number % 7}. " * (1 + number % 3)}
        wrong = {"role": "assistant", "content": f"I do not know, perhaps {number}."}
        pair = {"chosen": [question, answer], "rejected": [question, wrong]}
        made.append(pair if pairs else {"messages": [question, answer]})
    return made


def each(loaded: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(loaded, dict):
        return change(loaded)
    import datasets

    return datasets.DatasetDict({split: change(rows) for split, rows in loaded.items()})


def read(stream: Any, count: int) -> Any:
    import datasets

    rows = call_trainer(list, stream.take(count))
    return datasets.Dataset.from_list(rows, features=stream.features if not rows else None)


def append(rows: Any, further: list[dict[str, Any]]) -> Any:
    """A data set with further rows at its end: those that are not among its own, and are of their types.

    What types the trainer's own reader does not put together, launch's rules about rows say.
    """
    import datasets

    listed = list(rows)
    for row in further if listed else ():
        if bare(row) in map(bare, listed):
            continue
        try:
            rows = datasets.Dataset.from_list([*listed, row])
        except Exception:
            # pyarrow raises errors of many classes
            continue
        listed.append(row)
    return rows


def bare(value: Any) -> Any:
    """A value without the nulls of absent keys, which a data set adds."""
    if isinstance(value, dict):
        return {key: bare(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [bare(entry) for entry in value]
    return value


def size(rows: Any, *, count: bool) -> dict[str, Any]:
    """Rows of a set as `total`, None where that is unknown; `more` where there are more than were counted.

    A stream is only read on where its rows are to be counted.
    """
    if hasattr(rows, "__len__"):
        return {"total": len(rows), "more": False}
    if not count:
        return {"total": None, "more": False}
    total = 0
    until = time.monotonic() + COUNTS_S
    try:
        for table in rows.with_format("arrow").iter(batch_size=1000):
            total += table.num_rows
            if time.monotonic() > until:
                return {"total": total, "more": True}
    except Exception:
        # a fault behind the rows that are rehearsed
        return {"total": None, "more": False}
    return {"total": total, "more": False}


def head(rows: Any, count: int) -> Any:
    return rows.select(range(min(count, len(rows)))) if hasattr(rows, "select") else rows.take(count)


def replace_everywhere(package: str, name: str, old: Any, new: Any) -> None:
    """Put `new` where modules of a package have imported `old` under a name."""
    for module in list(sys.modules.values()):
        top = getattr(module, "__name__", "").partition(".")[0]
        if top in {package, "datasets"} and module.__dict__.get(name) is old:
            setattr(module, name, new)


def prepare_in_process() -> None:
    """Have data sets keep no caches, show no bars, and start no processes: for few rows that takes longer.

    Their sockets would also lie in the temporary folder, whose path may be longer than a socket's.
    """
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    for name in ("map", "filter"):
        old = getattr(datasets.Dataset, name)

        def alone(*args: Any, old: Callable[..., Any] = old, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("num_proc"), int) and kwargs["num_proc"] > 0:
                kwargs["num_proc"] = None
            result = pass_on(old, *args, **kwargs)
            if old.__name__ == "filter":
                function = kwargs.get("function") or (*args, None)[1]
                what = str(kwargs.get("desc") or getattr(function, "__name__", ""))
                FILTERED.append(Filtered(len(args[0]), len(result), what))
            return result

        setattr(datasets.Dataset, name, alone)


def dropped(of: str = "") -> list[dict[str, Any]]:
    """The passes that left rows out, as JSON; `of` is in what they say of themselves."""
    return [entry._asdict() for entry in FILTERED if entry.after < entry.before and of in entry.what]


def shorten(rows: Any) -> Any:
    """Rows of at most `TOKENS` tokens, so that a CPU trains on them in a moment."""

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        short = {
            key: value[:TOKENS] if isinstance(value, list) and len(value) > TOKENS else value
            for key, value in row.items()
        }
        if isinstance(row.get("seq_lengths"), list):
            left, lengths = TOKENS, []
            for length in row["seq_lengths"]:
                if left > 0:
                    lengths.append(min(length, left))
                left -= length
            short["seq_lengths"] = lengths
        return short

    return rows.map(cut) if hasattr(rows, "column_names") and rows.column_names else rows


def describe(rows: Any, longest: int | None, special: dict[str, int | None]) -> dict[str, Any]:
    """Of prepared rows: how many, tokens a row, how many are cut, empty, or have no trained token.

    `longest` is the limit in tokens, `special` the ids of the tokens whose presence is counted.
    """
    if not hasattr(rows, "__len__"):
        return {}
    sequences = [tokens(row) for row in rows]
    lengths = [max(map(len, parts), default=0) for parts in sequences]
    trained = [labels(row) for row in rows]
    return {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths, default=0),
        "empty": lengths.count(0),
        "masked": trained.count(0),
        "cut": sum(longest is not None and length >= longest for length in lengths),
        "trained": sum(trained),
        "present": {
            name: sum(any(number in part for part in parts) for parts in sequences) for name, number in special.items()
        },
    }


def tokens(row: dict[str, Any]) -> list[list[int]]:
    listed = {key: as_list(value) for key, value in row.items()}
    for names in (("chosen_input_ids", "rejected_input_ids"), ("chosen_ids", "rejected_ids"), ("input_ids",)):
        if all(name in listed for name in names):
            return [listed.get("prompt_ids", []) + listed[name] for name in names]
    return []


def labels(row: dict[str, Any]) -> int:
    """How many tokens of a prepared row count in the loss; of a pair, of the answer that has fewer."""
    listed = {key: as_list(value) for key, value in row.items()}
    pairs = [listed[key] for key in ("chosen_labels", "rejected_labels") if key in listed]
    if pairs:
        return min(sum(int(label != -100) for label in part) for part in pairs)
    if "chosen_ids" in listed:
        return min(len(listed["chosen_ids"]), len(listed.get("rejected_ids", [])))
    if "labels" in listed:
        return sum(int(label != -100) for label in listed["labels"])
    masks = [listed[name] for name in _MASKS if name in listed]
    if masks:
        return sum(all(column) for column in zip(*masks, strict=False))
    return len(listed.get("input_ids", []))


def as_list(value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, list) else []
