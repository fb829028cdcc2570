"""Rules about TRL's `datasets:`: what its entries say, and what is split off for evaluation."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

from launcher.dataset import mixture
from launcher.dataset.mixture import SetEntry
from launcher.dataset.slices import BadSplit
from launcher.errors import Finding, shorten
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import Rule, cites, needs, number, say
from launcher.upstream.schema import Values

_KEY = "datasets"
_SIZE = "test_split_size"


def _list_items(values: Values) -> list[tuple[str, Any]]:
    """The entries as the stage file holds them, each with its key."""
    listed = values.get(_KEY)
    if not isinstance(listed, list):
        return []
    return [(f"{_KEY}[{index}]", item) for index, item in enumerate(listed)]


def _has_mappings(values: Values) -> bool:
    return any(isinstance(item, dict) for _, item in _list_items(values))


@cites("trl/scripts/utils.py::DatasetMixtureConfig.__post_init__[= DatasetConfig]")
def unknown_keys(values: Values) -> Iterator[Finding]:
    """`utils.py` hands each mapping to a dataclass, which refuses any other key."""
    for place, item in _list_items(values):
        if not isinstance(item, dict):
            continue
        for key in item:
            if key in mixture.KEYS:
                continue
            help = f"an entry has {', '.join(mixture.KEYS)}"
            near = difflib.get_close_matches(str(key), mixture.KEYS, n=1, cutoff=0.6)
            if near:
                help = f"did you mean `{near[0]}`?"
            message = f"`{shorten(str(key))}` is not a key of an entry of `{_KEY}`"
            yield say("error", "unknown-key", f"{place}.{key}", message, help, layer="parser")


@cites(
    "trl/scripts/utils.py::DatasetMixtureConfig.__post_init__[= DatasetConfig]",
    "trl/scripts/utils.py::DatasetConfig[path: str]",
)
def no_path(values: Values) -> Iterator[Finding]:
    """The only key without a default."""
    for place, item in _list_items(values):
        if isinstance(item, dict) and "path" not in item:
            message = f"`{place}` has no `path`"
            help = "add `path: <folder, name on the hub, or a reader such as json>`"
            yield say("error", "bad-dataset", place, message, help, layer="parser")


@cites("trl/scripts/utils.py::get_dataset[dataset = datasets.load_dataset]")
def wrong_types(values: Values) -> Iterator[Finding]:
    """Nothing is converted, and `load_dataset` gets the values as they are."""
    if not _has_mappings(values):
        return
    for place, item in _list_items(values):
        if not isinstance(item, dict):
            help = "write a mapping with `path`"
            if isinstance(item, str):
                help = f"write `- path: {item}`"
            yield say("error", "bad-dataset", place, f"`{place}` is not a mapping", help)
            continue
        for key, value in item.items():
            fault = mixture.find_type_fault(str(key), value)
            if fault is not None:
                message = f"`{place}.{key}: {shorten(value)}` {fault}"
                yield say("error", "bad-dataset", f"{place}.{key}", message)


@cites(
    "trl/scripts/sft.py::main[if dataset_args.datasets and script_args.dataset_name]",
    "trl/scripts/dpo.py::main[if dataset_args.datasets and script_args.dataset_name]",
)
def two_sources(values: Values) -> Iterator[Finding]:
    """`datasets` wins, and a warning is all that TRL says."""
    if values[_KEY] and values["dataset_name"]:
        message = "`dataset_name` and `datasets` both name data: TRL reads `datasets` alone"
        yield say("error", "two-data-sources", "dataset_name", message, "keep one of them")


@cites("trl/scripts/utils.py::get_dataset[fractions =]")
def fractions(values: Values) -> Iterator[Finding]:
    """Shares of the mixture, for all of its sets or for none."""
    entries = mixture.parse_entries(values[_KEY])
    shares = [entry for entry in entries if entry.fraction is not None]
    if not shares:
        return
    for entry in entries:
        if entry.fraction is None:
            message = f"`{entry.key}` has no `fraction`, and other sets have one"
            yield say(
                "error",
                "bad-fraction",
                entry.key,
                message,
                "give each set a `fraction`, or none of them",
            )
        elif not 0 <= entry.fraction < math.inf:
            message = f"`{entry.key}.fraction: {entry.fraction:g}` is no share"
            yield say("error", "bad-fraction", f"{entry.key}.fraction", message, "a number above 0")
    if all(entry.fraction == 0 for entry in shares):
        message = "every `fraction` is 0: no rows are left"
        yield say("error", "bad-fraction", f"{shares[0].key}.fraction", message, "numbers above 0")
    elif len(entries) == 1:
        message = (
            "`fraction` is the share that a set has of the mixture: of the only set it is always "
            "all of it"
        )
        help = f"for a part of it write `split: {entries[0].split}[:10%]`, and no `fraction`"
        yield say("warning", "conditional-key", f"{shares[0].key}.fraction", message, help)
    if values["streaming"]:
        message = "a stream has no length of which a `fraction` could be taken"
        yield say(
            "error", "bad-fraction", "streaming", message, "leave out `streaming`, or `fraction`"
        )


@cites(
    "datasets/arrow_reader.py::_str_to_read_instruction[res = _SUB_SPEC_RE.match]",
    "datasets/builder.py::DatasetBuilder.as_streaming_dataset[raise ValueError(f #3]",
)
def bad_splits(values: Values) -> Iterator[Finding]:
    """A stream has whole splits alone."""
    for entry in mixture.parse_entries(values[_KEY]):
        key = f"{entry.key}.split"
        try:
            parts = entry.slices()
        except BadSplit as error:
            message = f"`{key}: {shorten(entry.split)}`: {error}"
            yield say("error", "no-such-split", key, message)
            continue
        if values["streaming"] and not all(part.is_whole for part in parts):
            message = f"`{key}: {shorten(entry.split)}`: a stream cannot be sliced"
            yield say(
                "error",
                "no-such-split",
                key,
                message,
                "name a whole split, or leave out `streaming`",
            )


@cites(
    "trl/scripts/utils.py::get_dataset[return combined_dataset]",
    "trl/scripts/utils.py::get_dataset[return datasets.DatasetDict]",
)
def split_names(values: Values) -> Iterator[Finding]:
    """A mixture has the split `train`, and `test` with `test_split_size`."""
    if not values[_KEY]:
        return
    names = ["train"]
    if values[_SIZE] is not None:
        names.append("test")
    read = ["dataset_train_split"]
    strategy = values["eval_strategy"]
    if strategy != "no" and values[_SIZE] is None:
        message = (
            f"`eval_strategy: {strategy}` has nothing to evaluate on: the mixture has no test split"
        )
        help = (
            f'add `{_SIZE}: 0.05` to hold a part of the rows back, or write `eval_strategy: "no"`'
        )
        yield say("error", "no-such-split", "eval_strategy", message, help)
    elif strategy != "no":
        read.append("dataset_test_split")
    for key in read:
        name = values[key]
        if name not in names:
            splits = " and ".join(names)
            message = f"`{key}: {shorten(str(name))}`: a mixture has the split {splits} alone"
            help = "leave it out; which split of a set is read its entry says: `split:`"
            yield say("error", "no-such-split", key, message, help)


@cites("datasets/arrow_dataset.py::Dataset.train_test_split[and (test_size >= n_samples]")
def test_size(values: Values) -> Iterator[Finding]:
    """Rows as a whole number, or a share between 0 and 1."""
    size = number(values[_SIZE])
    if size is None or not values[_KEY]:
        return
    if values["streaming"]:
        message = "a stream cannot be split: `test_split_size` needs all rows"
        yield say("error", "bad-test-split", _SIZE, message, "leave out `streaming`")
    is_count = isinstance(size, int)
    if (is_count and size <= 0) or (not is_count and not 0 < size < 1):
        message = f"`{_SIZE}: {size:g}` is neither a number of rows nor a share between 0 and 1"
        yield say(
            "error",
            "bad-test-split",
            _SIZE,
            message,
            "0.05 for a twentieth, or 200 for so many rows",
        )


RULES: tuple[Rule, ...] = (
    unknown_keys,
    no_path,
    wrong_types,
    two_sources,
    fractions,
    bad_splits,
    split_names,
    test_size,
)


@cites("datasets/arrow_dataset.py::Dataset.train_test_split[and (test_size >= n_samples]")
def enough_rows(context: Context) -> Iterator[Finding]:
    """The test split leaves at least one row to train on."""
    values = context.values
    mixed = mixture.read_mixture(values, context.environ)
    if mixed is None or values["streaming"]:
        return
    for part in mixed.sets:
        if part.rows == 0 and part.entry.fraction != 0:
            message = f"`{part.entry.key}` gives no rows"
            help = "check its files"
            if part.entry.split.endswith("]"):
                help = "a larger slice"
            yield say("warning", "bad-dataset", f"{part.entry.key}.split", message, help)
    rows = mixed.rows
    if rows == 0:
        yield say("error", "bad-dataset", _KEY, "the mixture holds no rows")
    elif rows is not None and mixed.test_rows is not None and mixed.test_rows >= rows:
        message = f"`{_SIZE}: {values[_SIZE]}` leaves none of {rows:,} rows to train on"
        yield say("error", "bad-test-split", _SIZE, message, "a smaller number")


@cites("trl/scripts/utils.py::get_dataset[=mixture_config.test_split_size]")
@needs("split")
def unseeded_test_split(context: Context) -> Iterator[Finding]:
    """`utils.py` gives no seed: each process and each start draws another split."""
    values = context.values
    if values[_SIZE] is None or not values[_KEY]:
        return
    message = (
        "`test_split_size` draws the test split anew in every process and at every start, "
        "whatever `seed` is"
    )
    if context.split is not None and context.split.processes > 1:
        message += (
            f": each of {context.split.processes} processes trains on rows that others evaluate on"
        )
        help = (
            "hold rows back in a split of their own: `dataset_name` with `dataset_test_split`, or "
            "one GPU"
        )
        yield say("warning", "unseeded-split", _SIZE, message, help)
    else:
        yield say(
            "note", "unseeded-split", _SIZE, f"{message}: a resumed run evaluates on other rows"
        )


STAGE_RULES: tuple[StageRule, ...] = (enough_rows,)


def selected_columns(entry: SetEntry, columns: frozenset[str]) -> Iterator[Finding]:
    """trl/scripts/utils.py::get_dataset[dataset = dataset.select_columns]: `select_columns` refuses
    a name that is not there.
    """
    absent = [name for name in entry.columns or () if name not in columns]
    if absent:
        message = f"{shorten(entry.path)} has no column {shorten(', '.join(absent))}: "
        message += f"it has {shorten(', '.join(sorted(columns)))}"
        yield say(
            "error", "data-columns", f"{entry.key}.columns", message, "name columns that are there"
        )
