"""What the probe counts of the data: over fake data sets, and over batches of real tensors."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from launcher.probe.watching.data import Data, is_repeated
from launcher.probe.watching.packing import UNLABELLED
from launcher.probe.watching.packing import batch_of as token_batch
from launcher.probe.watching.process import Process, Settings
from launcher.probe.watching.steps import Tally

BOS, END, PAD = 1, 2, 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "probe"


def probe(folder: Path, **settings: Any) -> Data:
    data = Data(Process(Settings("sft.py", str(folder), **settings)))
    data.saw_tokenizer(
        types.SimpleNamespace(bos_token_id=BOS, eos_token_id=END, get_added_vocab=dict)
    )
    return data


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def batch_of(rows: list[tuple[list[int], int]]) -> tuple[Any, dict[str, Any]]:
    """Padded rows, each of tokens and the number of those at its start that have no label."""
    torch = pytest.importorskip("torch")
    width = max(len(tokens) for tokens, _ in rows)
    ids, labels, mask = [], [], []
    for tokens, prompt in rows:
        rest = width - len(tokens)
        ids.append(tokens + [PAD] * rest)
        labels.append([UNLABELLED] * prompt + tokens[prompt:] + [UNLABELLED] * rest)
        mask.append([1] * len(tokens) + [0] * rest)
    return torch.tensor(ids), {"labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


def counted(folder: Path, rows: list[tuple[list[int], int]], **settings: Any) -> dict[str, Any]:
    data, tally = probe(folder, **settings), Tally()
    ids, kwargs = batch_of(rows)
    data.count_batch(token_batch(ids, kwargs), tally)
    data.add_sums(
        {name: [float(value) for value in values] for name, values in tally.scalars.items()}
    )
    data.report()
    (event,) = [event for event in events(folder) if event["event"] == "data"]
    return event


PROMPT = [BOS, *range(10, 20)]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([([*PROMPT, 30, 31, END], 11)] * 4, {"ended": 4}),
        ([([*PROMPT, 30, 31], 11)] * 4, {"endless": 4}),
        # an end that has no label is none that is trained
        (
            [([*PROMPT, 30, 31], 11), ([BOS, BOS, 10, 30, END], 3)],
            {"endless": 1, "begun_twice": 1, "ended": 1},
        ),
    ],
)
def test_rows_are_read_one_by_one(
    folder: Path, rows: list[tuple[list[int], int]], count: dict[str, int]
) -> None:
    assert counted(folder, rows)["first"] == {"rows": len(rows), **count}


def test_rows_of_the_maximal_length_are_cut_where_they_do_not_end(folder: Path) -> None:
    cut = [*PROMPT, 30, 31, 32]
    event = counted(
        folder, [(cut, 11), ([*PROMPT, 30, 31, END], 11), ([*PROMPT, END], 11)], max_length=14
    )
    assert event["first"] == {"rows": 3, "ended": 2, "cut": 1}
    assert (event["full_rows"], event["rows"]) == (2, 3)


def test_micro_batches_without_a_label_are_counted(folder: Path) -> None:
    assert counted(folder, [(PROMPT, 11)] * 2)["unlabelled"] == 1


def test_pairs_that_are_equal_or_empty_or_hold_their_prompt_twice(folder: Path) -> None:
    good = [([*PROMPT, 30, END], 11), ([*PROMPT, 31, END], 11)]
    equal = [([*PROMPT, 40, END], 11)] * 2
    empty = [([*PROMPT, 50, END], 11), ([*PROMPT, END], 11)]
    twice = [([*PROMPT, *PROMPT, 60, END], 11), ([*PROMPT, *PROMPT, 61, END], 11)]
    bare = [([BOS, 70, END], 1), ([BOS, 71, END], 1)]
    pairs = [good, equal, empty, twice, bare]
    event = counted(folder, [pair[0] for pair in pairs] + [pair[1] for pair in pairs], pairs=True)
    assert (event["pairs"], event["equal_pairs"]) == (5, 1)
    first = event["first"]
    shown = {
        name: first[name]
        for name in ("pairs", "equal", "empty", "prompt_twice", "promptless", "searched")
    }
    assert shown == {
        "pairs": 5,
        "equal": 1,
        "empty": 1,
        "prompt_twice": 1,
        "promptless": 1,
        "searched": 4,
    }


def test_packed_samples_are_read_apart(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[BOS, 10, 30, END, BOS, 11, 31, 32]])
    labels = torch.tensor([[UNLABELLED, UNLABELLED, 30, END, UNLABELLED, UNLABELLED, 31, 32]])
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    data, tally = probe(folder), Tally()
    data.count_batch(token_batch(ids, {"labels": labels, "position_ids": places}), tally)
    assert (data.first["rows"], data.first["ended"], data.first["endless"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ([*PROMPT, 30, 31], True),
        ([7, 8, *PROMPT, 30], True),
        ([30, 31, 10, 11, 12], False),
        ([], False),
    ],
)
def test_a_prompt_is_found_where_most_of_it_stands_again(answer: list[int], found: bool) -> None:
    assert is_repeated(PROMPT, answer) is found


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
def test_samples_are_counted_before_and_after_the_preparation(folder: Path, packing: bool) -> None:
    data = probe(folder)
    trainer = type("SFTTrainer", (SFTTrainer,), {"_prepare_dataset": SFTTrainer._prepare_dataset})
    sets = type("Dataset", (FakeSet,), {"filter": FakeSet.filter})
    data.watch_filters(types.SimpleNamespace(Dataset=sets))  # type: ignore[arg-type]
    data.watch_preparation(types.SimpleNamespace(SFTTrainer=trainer))  # type: ignore[arg-type]
    for name in ("train", "eval"):
        trainer(packing=packing)._prepare_dataset(sets(range(40)), None, None, packing, None, name)
    (event,) = events(folder)
    assert (event["event"], event["given"], event["kept"], event["max_length"]) == (
        "data_rows",
        40,
        20,
        128,
    )
    assert [entry["rows"] for entry in event["dropped"]] == [20]
