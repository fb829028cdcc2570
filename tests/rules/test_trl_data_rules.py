"""TRL on local data: the folder, its splits, columns and templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from test_trl_machine_rules import SCRIPTS, found, told

EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_data_by_the_name_of_a_file(write: Write, script: str) -> None:
    write("data/rows.jsonl", "{}\n")
    args = {"dataset_name": "data/rows.jsonl"}
    assert told(script, args) == [("data-file", "error", "dataset_name")]
    (finding,) = found(script, args)
    assert "`dataset_name: data`" in (finding.help or "")
    assert told(script, {"dataset_name": "data"}, running=True) == []


def test_rows_of_a_folder_that_are_none(write: Write) -> None:
    write("data/train.jsonl", "")
    # what no split asks for is not read
    write("data/test.jsonl", "no")
    assert told("trl-sft", {"dataset_name": "data"}) == [("bad-data", "error", "dataset_name")]
    write("data/train.jsonl", '{"messages": [{"role": "user"}]}')
    assert told("trl-sft", {"dataset_name": "data"}) == []


def test_data_that_are_not_here() -> None:
    expected = [("missing-data", "error", "dataset_name")]
    assert told("trl-sft", {"dataset_name": "build/demo/data/sft"}, running=True) == expected
    # another step may still make it
    assert told("trl-sft", {"dataset_name": "build/demo/data/sft"}) == []
    assert told("trl-sft", {"dataset_name": "org/name"}, running=True) == []
    mixed = {"dataset_name": "build/x/y", "datasets": ["a"]}
    assert told("trl-sft", mixed, running=True) == []


EVALUATING = {"eval_strategy": "steps"}
SPLITS: list[tuple[list[str], dict[str, Any], str | None]] = [
    (["train.jsonl"], {}, None), (["train.jsonl"], EVALUATING, "dataset_test_split"),
    (["train.jsonl", "eval-0.jsonl"], EVALUATING, None),
    (["train/a.jsonl", "testing/b.jsonl"], EVALUATING, None), (["rows.jsonl"], {}, None),
    (["rows.jsonl"], {"dataset_train_split": "train_sft"}, "dataset_train_split"),
    (["test.jsonl"], {}, "dataset_train_split"),
    (["train.jsonl"], {"dataset_train_split": "train[:10%]"}, "dataset_train_split"),
    # the folder may say more about itself than names do
    (["train.jsonl", "README.md"], EVALUATING, None),
    (["data/gen-00000-of-00002.parquet"], {"dataset_train_split": "gen"}, None),
    ([], EVALUATING, None), (["train.jsonl"], {**EVALUATING, "dataset_config": "x"}, None),
]  # fmt: skip


def test_splits_of_a_local_folder(write: Write) -> None:
    for number, (files, args, key) in enumerate(SPLITS):
        for name in files:
            write(f"data{number}/{name}", "{}\n")
        expected = [] if key is None else [("no-such-split", "error", key)]
        assert told("trl-sft", {"dataset_name": f"data{number}", **args}) == expected, files


def test_a_template_that_is_not_here(write: Write) -> None:
    args = {"chat_template_path": "templates/mine.jinja"}
    expected = ("missing-template", "error", "chat_template_path")
    assert told("trl-sft", args, running=True) == [expected]
    assert told("trl-sft", args) == []
    assert told("trl-sft", {"chat_template_path": "org/name"}, running=True) == []
    write("templates/mine.jinja", "{{ messages }}")
    assert told("trl-sft", args, running=True) == []


QUESTION = [{"role": "user", "content": "hi"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "yes"}]
OTHER = [*QUESTION, {"role": "assistant", "content": "no"}]
WRONG = [("data-columns", "error", "dataset_name")]


def columns(write: Write, script: str, *rows: dict[str, Any], **args: Any) -> list[tuple[str, str, str]]:
    write("data/train.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    return told(script, {"dataset_name": "data", **args}, running=True)


# what is read was trained on
COLUMNS: list[tuple[str, dict[str, Any], bool]] = [
    ("sft", {"messages": CHAT, "chosen": CHAT, "rejected": OTHER}, True),
    ("sft", {"text": "hello"}, True), ("sft", {"prompt": "a", "completion": "b"}, True),
    ("sft", {"conversations": [{"from": "user", "value": "x"}]}, True),
    ("sft", {"input_ids": [1, 2, 3]}, True), ("sft", {"image": "x.png", "prompt": "a"}, True),
    ("sft", {"chosen": CHAT, "rejected": OTHER}, False),
    ("sft", {"prompt": "q", "chosen": "a", "rejected": "b"}, False),
    ("sft", {"prompt": "a", "messages": CHAT}, False), ("sft", {"completion": "a"}, False),
    ("sft", {"conversations": CHAT}, False), ("sft", {"instruction": "a", "output": "b"}, False),
    ("dpo", {"chosen": CHAT, "rejected": OTHER}, True),
    ("dpo", {"prompt": "q", "chosen": "a", "rejected": "b", "label": True}, True),
    ("dpo", {"messages": CHAT}, False), ("dpo", {"chosen": CHAT}, False),
    ("dpo", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, False),
]  # fmt: skip


def test_the_columns_that_are_read(write: Write) -> None:
    for stage, row, read in COLUMNS:
        assert columns(write, f"trl-{stage}", row, row) == ([] if read else WRONG), row


def test_the_rows_that_are_evaluated_are_looked_at(write: Write) -> None:
    good, bad = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a"}
    write("data/test.jsonl", json.dumps(bad))
    assert columns(write, "trl-dpo", good) == []
    assert columns(write, "trl-dpo", good, **EVALUATED) == WRONG
    write("data/test.jsonl", json.dumps(good))
    assert columns(write, "trl-dpo", good, **EVALUATED) == []


def test_columns_that_arguments_speak_of(write: Write) -> None:
    assert columns(write, "trl-sft", {"body": "a"}, dataset_text_field="body") == []
    skipped = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    assert columns(write, "trl-sft", {"body": "a"}, **skipped) == []
    assert columns(write, "trl-sft", {"body": "a"}, dataset_config="en") == []
    # a part of a split is no split
    args = {"dataset_name": "org/name", "dataset_train_split": "train[:100]"}
    assert told("trl-dpo", args) == [("no-such-split", "error", "dataset_train_split")]


def test_all_rows_bring_columns(write: Write) -> None:
    # a row that lacks one has null there
    assert columns(write, "trl-sft", {"body": "a"}, {"text": "b"}) == []
    write("data/train-2.jsonl", '{"text": "a"}\n')
    assert columns(write, "trl-sft", {"body": "a"}) == []
    write("data/train-2.jsonl", '{"body": "a"}\n')
    assert columns(write, "trl-sft", {"body": "a"}) == WRONG
    # what is not read here may bring them
    write("data/train-3.parquet", b"PAR1")
    assert columns(write, "trl-sft", {"body": "a"}) == []


def test_a_row_that_is_longer_than_what_is_read(write: Write) -> None:
    assert columns(write, "trl-sft", {"body": "a" * 2**20}) == []
    assert columns(write, "trl-sft", {"body": "a"}, {"body": "a" * 2**20}) == WRONG
