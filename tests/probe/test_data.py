"""What the probe counts of the data: over fake data sets, and over batches of real tensors."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recorded_events import Event, read_events

from launcher.probe.watching.data import Data, is_repeated
from launcher.probe.watching.packing import UNLABELLED
from launcher.probe.watching.packing import read_batch as token_batch
from launcher.probe.watching.process import Process, Settings
from launcher.probe.watching.steps import Tally

BOS = 1
END = 2
PAD = 0
PROMPT = [BOS, *range(10, 20)]


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens without labels, and tokens with labels behind them."""

    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def labels(self) -> list[int]:
        return [UNLABELLED] * len(self.prompt) + self.answer


def tensor(values: object) -> Any:
    return pytest.importorskip("torch").tensor(values)


def data_of(folder: Path, **settings: Any) -> Data:
    data = Data(Process(Settings("sft.py", str(folder), **settings)))
    tokenizer = types.SimpleNamespace(bos_token_id=BOS, eos_token_id=END, get_added_vocab=dict)
    data.saw_tokenizer(tokenizer)
    return data


def padded_batch(rows: list[Row]) -> Any:
    width = max(len(row.tokens) for row in rows)
    ids = []
    labels = []
    mask = []
    for row in rows:
        length = len(row.tokens)
        padding = width - length
        ids.append(row.tokens + [PAD] * padding)
        labels.append(row.labels + [UNLABELLED] * padding)
        mask.append([1] * length + [0] * padding)
    return token_batch(tensor(ids), {"labels": tensor(labels), "attention_mask": tensor(mask)})


def packed_batch(rows: list[Row]) -> Any:
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for row in rows:
        ids += row.tokens
        labels += row.labels
        positions += range(len(row.tokens))
    return token_batch(
        tensor([ids]), {"labels": tensor([labels]), "position_ids": tensor([positions])}
    )


def counted(folder: Path, rows: list[Row], **settings: Any) -> Event:
    """What is reported of one micro-batch of these rows."""
    data = data_of(folder, **settings)
    tally = Tally()
    data.count_batch(padded_batch(rows), tally)
    sums = {}
    for name, values in tally.scalars.items():
        sums[name] = [float(value) for value in values]
    data.add_sums(sums)
    data.report()
    (event,) = read_events(folder, "data")
    return event


ENDED = Row(PROMPT, [30, 31, END])
ENDLESS = Row(PROMPT, [30, 31, 32])
BEGUN_TWICE = Row([BOS, BOS, 10], [30, END])
# an end that has no label is none that is trained
END_IN_PROMPT = Row([*PROMPT, END], [30])


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([ENDED] * 4, {"ended": 4}),
        ([ENDLESS] * 4, {"endless": 4}),
        ([END_IN_PROMPT], {"endless": 1}),
        ([ENDLESS, BEGUN_TWICE], {"endless": 1, "begun_twice": 1, "ended": 1}),
    ],
)
def test_rows_are_read_one_by_one(tmp_path: Path, rows: list[Row], count: dict[str, int]) -> None:
    assert counted(tmp_path, rows)["first"] == {"rows": len(rows), **count}


def test_rows_of_the_maximal_length_are_cut_where_they_do_not_end(tmp_path: Path) -> None:
    short = Row(PROMPT, [END])
    event = counted(tmp_path, [ENDLESS, ENDED, short], max_length=14)
    assert event["first"] == {"rows": 3, "ended": 2, "cut": 1}
    assert (event["full_rows"], event["rows"]) == (2, 3)


def test_micro_batches_without_a_label_are_counted(tmp_path: Path) -> None:
    assert counted(tmp_path, [Row(PROMPT, [])] * 2)["unlabelled"] == 1


def test_pairs_that_are_equal_or_empty_or_hold_their_prompt_twice(tmp_path: Path) -> None:
    no_prompt = [BOS]
    pairs = [
        (Row(PROMPT, [30, END]), Row(PROMPT, [31, END])),
        # equal
        (Row(PROMPT, [40, END]), Row(PROMPT, [40, END])),
        # empty
        (Row(PROMPT, [50, END]), Row(PROMPT, [END])),
        # with their prompt twice
        (Row(PROMPT, [*PROMPT, 60, END]), Row(PROMPT, [*PROMPT, 61, END])),
        (Row(no_prompt, [70, END]), Row(no_prompt, [71, END])),
    ]
    chosen = [pair[0] for pair in pairs]
    rejected = [pair[1] for pair in pairs]

    event = counted(tmp_path, chosen + rejected, pairs=True)

    assert (event["pairs"], event["equal_pairs"]) == (5, 1)
    counts = {"equal": 1, "empty": 1, "prompt_twice": 1, "promptless": 1}
    assert event["first"].items() >= {"pairs": 5, "searched": 4, **counts}.items()


def test_packed_samples_are_read_apart(tmp_path: Path) -> None:
    batch = packed_batch([Row([BOS, 10], [30, END]), Row([BOS, 11], [31, 32])])
    data = data_of(tmp_path)
    data.count_batch(batch, Tally())
    assert data.first.items() >= {"rows": 2, "ended": 1, "endless": 1}.items()


@pytest.mark.parametrize(
    ("answer", "is_twice"),
    [
        ([*PROMPT, 30, 31], True),
        ([7, 8, *PROMPT, 30], True),
        ([30, 31, 10, 11, 12], False),
        ([], False),
    ],
)
def test_a_prompt_is_found_where_most_of_it_stands_again(answer: list[int], is_twice: bool) -> None:
    assert is_repeated(PROMPT, answer) is is_twice


class FakeSet(list[int]):
    def filter(self, keep: Any, desc: str | None = None) -> FakeSet:
        return FakeSet(row for row in self if keep(row))


class SFTTrainer:
    """Drops the odd rows, then packs what is left by fours."""

    _tokenizer = None

    def __init__(self, *, packing: bool) -> None:
        self.args = types.SimpleNamespace(max_length=128, packing=packing)

    def _prepare_dataset(self, dataset: FakeSet, *_: Any) -> FakeSet:
        kept = dataset.filter(
            lambda row: row % 2 == 0, desc="Dropping fully masked examples from train dataset"
        )
        return FakeSet(kept[::4]) if self.args.packing else kept


@pytest.mark.parametrize("packing", [False, True])
def test_samples_are_counted_before_and_after_the_preparation(
    tmp_path: Path, packing: bool
) -> None:
    data = data_of(tmp_path)
    trainer = type("SFTTrainer", (SFTTrainer,), {"_prepare_dataset": SFTTrainer._prepare_dataset})
    sets = type("Dataset", (FakeSet,), {"filter": FakeSet.filter})
    data.watch_filters(types.SimpleNamespace(Dataset=sets))  # type: ignore[arg-type]
    data.watch_preparation(types.SimpleNamespace(SFTTrainer=trainer))  # type: ignore[arg-type]
    for name in ("train", "eval"):
        rows = sets(range(40))
        trainer(packing=packing)._prepare_dataset(rows, None, None, packing, None, name)

    (event,) = read_events(tmp_path, "data_rows")
    assert (event["given"], event["kept"], event["max_length"]) == (40, 20, 128)
    (dropped,) = event["dropped"]
    assert dropped["rows"] == 20
