"""TRL on local data: the folder, its splits, columns and templates."""

import json
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import Write
from rule_findings import THIS_MACHINE, codes_of_run, judge_run, summarise, summarise_run

SCRIPTS = ("trl-sft", "trl-dpo")
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_data_by_the_name_of_a_file(write: Write, script: str) -> None:
    row = {"messages": CHAT} if script == "trl-sft" else {"chosen": CHAT, "rejected": OTHER}
    write("data/rows.jsonl", f"{json.dumps(row)}\n")
    args = {"dataset_name": "data/rows.jsonl"}
    assert summarise_run(script, args) == ["data-file error dataset_name"]
    (finding,) = judge_run(script, args)
    assert "`dataset_name: data`" in (finding.help or "")
    assert summarise_run(script, {"dataset_name": "data"}, machine=THIS_MACHINE) == []


def test_data_that_are_not_here() -> None:
    for name in ("build/demo/data/sft", "./data", "data/train.jsonl", "train.csv"):
        args = {"dataset_name": name}
        assert summarise_run("trl-sft", args, machine=THIS_MACHINE) == [
            "missing-data error dataset_name"
        ]
        # another step may still make it
        assert summarise_run("trl-sft", args) == ["missing-data warning dataset_name"]
    assert summarise_run("trl-sft", {"dataset_name": "org/name"}, machine=THIS_MACHINE) == []
    mixed = {"dataset_name": "build/x/y", "datasets": ["a"]}
    assert summarise_run("trl-sft", mixed, machine=THIS_MACHINE) == []


@pytest.mark.parametrize(
    "text", ["[a/b]", "[{path: a/b}]", '["a/b", "c/d"]', "{path: a/b}", " [a]"]
)
@pytest.mark.parametrize("machine", [None, THIS_MACHINE])
def test_a_list_in_quotes_is_no_data_set(text: str, machine: Any) -> None:
    where = {} if machine is None else {"machine": machine}
    assert summarise_run("trl-sft", {"dataset_name": text}, **where) == [
        "bad-dataset error dataset_name"
    ]
    for value in (text, [text], [{"path": text}]):
        assert summarise_run("trl-sft", {"datasets": value}, **where) == [
            "bad-dataset error datasets[0].path"
        ]


def test_data_without_a_name() -> None:
    for value in ("", [""], [{"path": ""}], [{"path": " "}]):
        assert summarise_run("trl-dpo", {"datasets": value}) == [
            "bad-dataset error datasets[0].path"
        ]


def test_a_folder_may_be_called_anything() -> None:
    Path("[a]").mkdir()
    Path("[a]/train.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    assert summarise_run("trl-sft", {"dataset_name": "[a]"}, machine=THIS_MACHINE) == []


@pytest.mark.parametrize(
    "name", ["buckets/org/rows", "hf://buckets/org/rows", "hf://datasets/org/rows"]
)
def test_data_on_the_hub_are_no_folder(name: str) -> None:
    assert summarise_run("trl-sft", {"dataset_name": name}, machine=THIS_MACHINE) == []
    assert summarise_run("trl-sft", {"datasets": [{"path": name}]}, machine=THIS_MACHINE) == []


SPLITS = [("train", True), ("train[:10%]", False), ("train+test", False)]


def test_parts_of_splits_cannot_be_named() -> None:
    for split, whole in SPLITS:
        for key, args in (("dataset_train_split", {}), ("dataset_test_split", EVALUATED)):
            lines = summarise_run("trl-dpo", {"dataset_name": "org/name", key: split, **args})
            assert lines == ([] if whole else [f"no-such-split error {key}"])
    assert summarise_run("trl-sft", {"dataset_test_split": "test[:5]"}) == []


# whose rows are trained on, where the first file that sorts is not
FOLDERS = [
    (["train.jsonl"], "train.jsonl"),
    (["eval-0.jsonl", "train.jsonl"], "train.jsonl"),
    (["testing/b.jsonl", "train/a.jsonl"], "train/a.jsonl"),
    (["rows.jsonl"], "rows.jsonl"),
    (["README.md", "train.jsonl"], "train.jsonl"),
    (["data/train-00000-of-00001.jsonl", "train.jsonl"], "data/train-00000-of-00001.jsonl"),
    # the format of most files is read, the others are left out
    (["a.csv", "a.jsonl", "b.jsonl"], "a.jsonl, data6/b.jsonl"),
    (["load.py", "train.jsonl"], "train.jsonl"),
]
# what the library refuses: it asks for a split that is not there
WITHOUT_SPLIT = [["test.jsonl"], ["data/gen-00000-of-00002.jsonl"], ["train.jsonl", "test/a.jsonl"]]


def test_the_rows_of_a_folder_that_are_trained_on(write: Write) -> None:
    for number, (files, read) in enumerate(FOLDERS):
        for name in files:
            write(f"data{number}/{name}", "")
        (finding,) = judge_run("trl-sft", {"dataset_name": f"data{number}"})
        assert finding.message == f"data{number}/{read}: holds no rows", files


def test_folders_without_the_split(write: Write) -> None:
    Path("empty").mkdir()
    assert summarise_run("trl-sft", {"dataset_name": "empty"}) == ["bad-data error dataset_name"]
    for number, files in enumerate(WITHOUT_SPLIT):
        for name in files:
            write(f"data{number}/{name}", "")
        (finding,) = judge_run("trl-sft", {"dataset_name": f"data{number}"})
        assert summarise([finding]) == ["bad-data error dataset_name"]
        assert "has no split train" in finding.message


def test_a_template_that_is_not_here(write: Write) -> None:
    args = {"chat_template_path": "templates/mine.jinja"}
    expected = "missing-template error chat_template_path"
    assert summarise_run("trl-sft", args, machine=THIS_MACHINE) == [expected]
    assert summarise_run("trl-sft", args) == [expected]
    assert summarise_run("trl-sft", {"chat_template_path": "org/name"}, machine=THIS_MACHINE) == []
    write("templates/mine.jinja", "{{ messages }}")
    assert summarise_run("trl-sft", args, machine=THIS_MACHINE) == []


QUESTION = [{"role": "user", "content": "hi"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "yes"}]
OTHER = [*QUESTION, {"role": "assistant", "content": "no"}]
WRONG = ["data-columns error dataset_name"]


def columns(write: Write, script: str, *rows: dict[str, Any], **args: Any) -> list[str]:
    write("data/train.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    return summarise_run(script, {"dataset_name": "data", **args}, machine=THIS_MACHINE)


# what is read was trained on
COLUMNS = [
    ("sft", {"messages": CHAT, "chosen": CHAT, "rejected": OTHER}, True),
    ("sft", {"text": "hello"}, True),
    ("sft", {"prompt": "a", "completion": "b"}, True),
    (
        "sft",
        {"conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": "y"}]},
        True,
    ),
    ("sft", {"input_ids": [1, 2, 3]}, True),
    ("sft", {"image": "x.png", "prompt": "a"}, True),
    ("sft", {"chosen": CHAT, "rejected": OTHER}, False),
    ("sft", {"prompt": "q", "chosen": "a", "rejected": "b"}, False),
    ("sft", {"completion": "a"}, False),
    ("sft", {"instruction": "a", "output": "b"}, False),
    ("dpo", {"chosen": CHAT, "rejected": OTHER}, True),
    ("dpo", {"prompt": "q", "chosen": "a", "rejected": "b", "label": True}, True),
    ("dpo", {"messages": CHAT}, False),
    ("dpo", {"chosen": CHAT}, False),
    ("dpo", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, False),
]


def test_the_columns_that_are_read(write: Write) -> None:
    for stage, row, read in COLUMNS:
        assert columns(write, f"trl-{stage}", row) == ([] if read else WRONG), row


def test_columns_that_arguments_speak_of(write: Write) -> None:
    assert columns(write, "trl-sft", {"body": "a"}, dataset_text_field="body") == []
    skipped = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    assert columns(write, "trl-sft", {"body": "a"}, **skipped) == []
    assert columns(write, "trl-sft", {"body": "a"}, dataset_config="en") == []


def test_a_row_that_lacks_a_column_has_null_there(write: Write) -> None:
    lacks = ["data-types error dataset_name"]
    assert columns(write, "trl-sft", {"body": "a"}, {"text": "b"}) == lacks
    # a later file may lack a column, and may not add one
    write("data/train-2.jsonl", '{"text": "a"}\n')
    assert columns(write, "trl-sft", {"body": "a"}) == [*WRONG, *lacks]
    write("data/train-2.jsonl", '{"body": "a"}\n')
    assert columns(write, "trl-sft", {"body": "a"}) == WRONG


def test_rows_of_any_length_are_read(write: Write) -> None:
    assert columns(write, "trl-sft", {"body": "a" * 2**20}) == WRONG
    assert columns(write, "trl-sft", {"body": "a"}, {"body": "a" * 2**21}) == WRONG


def test_conversations_need_a_template(write: Write) -> None:
    model = {"model_name_or_path": "model"}
    missing = ["missing-template error model_name_or_path"]
    pairs = {"chosen": CHAT, "rejected": OTHER}
    # nothing is known of its tokenizer
    assert columns(write, "trl-dpo", pairs, model_name_or_path="elsewhere") == []
    write("model/config.json", saved.UNKNOWN)
    write("model/tokenizer_config.json", "{}")
    saved.loadable(Path("model"))
    assert columns(write, "trl-dpo", pairs, **model) == missing
    assert columns(write, "trl-sft", {"messages": CHAT}, **model) == missing
    write("other/chat_template.jinja", "{{ messages }}")
    path = {"chat_template_path": "other/chat_template.jinja"}
    assert columns(write, "trl-sft", {"messages": CHAT}, **model, **path) == []
    assert columns(write, "trl-sft", {"text": "a"}, **model) == []
    texts = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert columns(write, "trl-dpo", texts, **model) == []
    write("model/tokenizer_config.json", '{"chat_template": "{{ messages }}"}')
    assert columns(write, "trl-dpo", pairs, **model) == []
    write("model/tokenizer_config.json", "{}")
    write("model/chat_template.jinja", "{{ messages }}")
    assert columns(write, "trl-dpo", pairs, **model) == []


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_pairs_that_are_drawn_by_length_need_a_column_that_is_kept(
    write: Write, strategy: str
) -> None:
    pair = {"chosen": CHAT, "rejected": OTHER}
    args = {"dataset_name": "data", "train_sampling_strategy": strategy}
    kept = {**args, "remove_unused_columns": False}
    missing = "pair-lengths error train_sampling_strategy"

    write("data/rows.jsonl", f"{json.dumps(pair)}\n")
    assert missing in summarise_run("trl-dpo", args, machine=THIS_MACHINE)
    assert "pair-lengths" in codes_of_run("trl-dpo", kept, machine=THIS_MACHINE)

    write("data/rows.jsonl", f"{json.dumps({**pair, 'length': 12})}\n")
    assert missing in summarise_run("trl-dpo", args, machine=THIS_MACHINE)
    codes = codes_of_run("trl-dpo", kept, machine=THIS_MACHINE)
    assert "pair-lengths" not in codes
    assert ("unlike-micro-batches" in codes) == (strategy == "batch_rebalance")


def test_rows_of_sft_are_drawn_by_length_without_a_column(write: Write) -> None:
    write("data/rows.jsonl", f"{json.dumps({'messages': CHAT})}\n")
    args = {"dataset_name": "data", "train_sampling_strategy": "group_by_length"}
    assert "pair-lengths" not in codes_of_run("trl-sft", args, machine=THIS_MACHINE)
