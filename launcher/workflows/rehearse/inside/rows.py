"""Rows that the trainer has prepared: described, and shortened before they are trained on."""

from typing import Any

from .calls import Refused, pass_on
from .records import FilterPass, PreparedRows

TOKENS = 256
"""Tokens that are trained on of each row: the whole row has been prepared by then."""
_TOKENS_OF = (
    ("chosen_input_ids", "rejected_input_ids"),
    ("chosen_ids", "rejected_ids"),
    ("input_ids",),
)
_LABELS = ("chosen_labels", "rejected_labels")
_MASKS = ("completion_mask", "assistant_masks")
DROPPING: list[FilterPass] = []
"""The passes of this process, which answers one request, that left rows out."""


def prepare_in_process() -> None:
    """Have data sets keep no caches and start no processes, which takes longer for few rows.

    Their sockets would also lie in the temporary folder, whose path may be longer than a socket's.
    """
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    transform = datasets.Dataset.map
    select = datasets.Dataset.filter

    def map_here(*args: Any, **kwargs: Any) -> Any:
        return pass_on(transform, *args, **drop_processes(kwargs))

    def filter_here(rows: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = pass_on(select, rows, function, *args, **drop_processes(kwargs))
        what = kwargs.get("desc") or getattr(function, "__name__", "")
        if len(result) < len(rows):
            DROPPING.append(FilterPass(before=len(rows), after=len(result), what=str(what)))
        return result

    datasets.Dataset.map = map_here
    datasets.Dataset.filter = filter_here


def drop_processes(options: Any) -> Any:
    """Options of `map` or `filter`; a wrong number of processes is left for them to refuse."""
    count = options.get("num_proc")
    if isinstance(count, int) and count > 0:
        return {**options, "num_proc": None}
    return options


def shorten_rows(rows: Any) -> Any:
    """Rows of at most `TOKENS` tokens, so that a CPU trains on them in a moment."""
    return rows.map(cut_row)


def cut_row(row: Any) -> Any:
    short = {}
    for key, value in row.items():
        short[key] = value[:TOKENS] if isinstance(value, list) else value
    if isinstance(row.get("seq_lengths"), list):
        short["seq_lengths"] = cut_lengths(row["seq_lengths"])
    return short


def cut_lengths(lengths: list[int]) -> list[int]:
    """The lengths of packed sequences, of which `TOKENS` tokens together are left."""
    kept = []
    left = TOKENS
    for length in lengths:
        if left <= 0:
            break
        kept.append(min(length, left))
        left -= length
    return kept


def describe(data: Any, limit: int | None, special: dict[str, int], rows: PreparedRows) -> None:
    """Note in `rows` what prepared rows are like.

    `limit` is the most tokens of a row, `special` the ids of the tokens whose presence is counted.
    Raises Refused where no row is left.
    """
    rows.rows = len(data)
    rows.present = dict.fromkeys(special, 0)
    for row in data:
        lists = take_lists(row)
        sequences = list_token_sequences(lists)
        length = max(map(len, sequences), default=0)
        trained = count_trained(lists)
        rows.tokens += length
        rows.longest = max(rows.longest, length)
        rows.trained += trained
        rows.empty += length == 0
        rows.masked += trained == 0
        rows.cut += limit is not None and length >= limit
        for name, number in special.items():
            rows.present[name] += any(number in sequence for sequence in sequences)
    if not rows.rows:
        raise Refused("no row is left after the trainer has prepared the data")


Lists = dict[str, list[Any]]


def take_lists(row: Any) -> Lists:
    """The columns of a row that hold lists or tensors."""
    lists = {}
    for name, value in row.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list):
            lists[name] = value
    return lists


def list_token_sequences(lists: Lists) -> list[list[int]]:
    prompt = lists.get("prompt_ids", [])
    for names in _TOKENS_OF:
        if all(name in lists for name in names):
            return [prompt + lists[name] for name in names]
    return []


def count_trained(lists: Lists) -> int:
    """How many tokens of a row count in the loss; of a pair, of the answer that has fewer."""
    pairs = [lists[name] for name in _LABELS if name in lists]
    if pairs:
        return min(map(count_labels, pairs))
    if "chosen_ids" in lists:
        return min(len(lists["chosen_ids"]), len(lists["rejected_ids"]))
    if "labels" in lists:
        return count_labels(lists["labels"])
    masks = [lists[name] for name in _MASKS if name in lists]
    if masks:
        return sum(all(bits) for bits in zip(*masks, strict=False))
    return len(lists.get("input_ids", []))


def count_labels(labels: list[int]) -> int:
    return len(labels) - labels.count(-100)
