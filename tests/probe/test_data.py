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

BOS = 1
END = 2
PAD = 0
Row = tuple[list[int], int]
"""Tokens, and the number of those at their start that have no label."""


def tensor(values: object) -> Any:
    return pytest.importorskip("torch").tensor(values)


def data_of(folder: Path, **settings: Any) -> Data:
    data = Data(Process(Settings("sft.py", str(folder), **settings)))
    tokenizer = types.SimpleNamespace(bos_token_id=BOS, eos_token_id=END, get_added_vocab=dict)
    data.saw_tokenizer(tokenizer)
    return data


def events_in(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def padded_batch(rows: list[Row]) -> Any:
    width = max(len(tokens) for tokens, _ in rows)
    ids = []
    labels = []
    mask = []
    for tokens, prompt in rows:
        rest = width - len(tokens)
        ids.append(tokens + [PAD] * rest)
        labels.append([UNLABELLED] * prompt + tokens[prompt:] + [UNLABELLED] * rest)
        mask.append([1] * len(tokens) + [0] * rest)
    kwargs = {"labels": tensor(labels), "attention_mask": tensor(mask)}
    return token_batch(tensor(ids), kwargs)


def counted(folder: Path, rows: list[Row], **settings: Any) -> dict[str, Any]:
    """What is reported of one micro-batch of these rows."""
    data = data_of(folder, **settings)
    tally = Tally()
    data.count_batch(padded_batch(rows), tally)
    sums = {}
    for name, values in tally.scalars.items():
        sums[name] = [float(value) for value in values]
    data.add_sums(sums)
    data.report()
    (event,) = events_in(folder, "data")
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
def test_rows_are_read_one_by_one(tmp_path: Path, rows: list[Row], count: dict[str, int]) -> None:
    assert counted(tmp_path, rows)["first"] == {"rows": len(rows), **count}


def test_rows_of_the_maximal_length_are_cut_where_they_do_not_end(tmp_path: Path) -> None:
    cut = ([*PROMPT, 30, 31, 32], 11)
    whole = ([*PROMPT, 30, 31, END], 11)
    short = ([*PROMPT, END], 11)
    event = counted(tmp_path, [cut, whole, short], max_length=14)
    assert event["first"] == {"rows": 3, "ended": 2, "cut": 1}
    assert (event["full_rows"], event["rows"]) == (2, 3)


def test_micro_batches_without_a_label_are_counted(tmp_path: Path) -> None:
    assert counted(tmp_path, [(PROMPT, 11)] * 2)["unlabelled"] == 1


def test_pairs_that_are_equal_or_empty_or_hold_their_prompt_twice(tmp_path: Path) -> None:
    pairs = {
        "good": ([*PROMPT, 30, END], [*PROMPT, 31, END]),
        "equal": ([*PROMPT, 40, END], [*PROMPT, 40, END]),
        "empty": ([*PROMPT, 50, END], [*PROMPT, END]),
        "twice": ([*PROMPT, *PROMPT, 60, END], [*PROMPT, *PROMPT, 61, END]),
        "bare": ([BOS, 70, END], [BOS, 71, END]),
    }
    chosen = [(pair[0], 11) for pair in pairs.values()]
    rejected = [(pair[1], 11) for pair in pairs.values()]
    # the one without a prompt
    chosen[-1] = (pairs["bare"][0], 1)
    rejected[-1] = (pairs["bare"][1], 1)

    event = counted(tmp_path, [*chosen, *rejected], pairs=True)

    assert (event["pairs"], event["equal_pairs"]) == (5, 1)
    counts = {"equal": 1, "empty": 1, "prompt_twice": 1, "promptless": 1}
    assert event["first"].items() >= {"pairs": 5, "searched": 4, **counts}.items()


def test_packed_samples_are_read_apart(tmp_path: Path) -> None:
    ids = tensor([[BOS, 10, 30, END, BOS, 11, 31, 32]])
    labels = ids.clone()
    labels[:, [0, 1, 4, 5]] = UNLABELLED
    places = tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    data = data_of(tmp_path)
    data.count_batch(token_batch(ids, {"labels": labels, "position_ids": places}), Tally())
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
        trainer(packing=packing)._prepare_dataset(sets(range(40)), None, None, packing, None, name)

    (event,) = events_in(tmp_path, "data_rows")
    assert (event["given"], event["kept"], event["max_length"]) == (40, 20, 128)
    (dropped,) = event["dropped"]
    assert dropped["rows"] == 20
