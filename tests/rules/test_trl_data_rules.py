"""TRL on local data: the folder, its splits, columns and templates."""

import json
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import Write
from rule_findings import THIS_MACHINE, judge_run, summarise, summarise_run

EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)


QUESTION = [{"role": "user", "content": "hi"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "yes"}]
OTHER = [*QUESTION, {"role": "assistant", "content": "no"}]
PAIR = {"chosen": CHAT, "rejected": OTHER}


def judge_here(script: str, **args: Any) -> list[str]:
    """The findings about a start on this machine, each as `code severity key`."""
    return summarise_run(script, args, machine=THIS_MACHINE)


def write_rows(write: Write, name: str, *rows: Any) -> None:
    write(name, "".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(("script", "row"), [("trl-sft", {"messages": CHAT}), ("trl-dpo", PAIR)])
def test_data_by_the_name_of_a_file(write: Write, script: str, row: Any) -> None:
    write_rows(write, "data/rows.jsonl", row)
    (finding,) = judge_run(script, {"dataset_name": "data/rows.jsonl"})
    assert summarise([finding]) == ["data-file error dataset_name"]
    assert "`dataset_name: data`" in (finding.help or "")
    assert judge_here(script, dataset_name="data") == []


@pytest.mark.parametrize("name", ["build/demo/data/sft", "./data", "data/train.jsonl", "train.csv"])
def test_data_that_are_not_here(name: str) -> None:
    assert judge_here("trl-sft", dataset_name=name) == ["missing-data error dataset_name"]
    # another step may still make it
    warned = ["missing-data warning dataset_name"]
    assert summarise_run("trl-sft", {"dataset_name": name}) == warned


def test_data_that_need_not_be_here() -> None:
    assert judge_here("trl-sft", dataset_name="org/name") == []
    # a mixture replaces the name
    assert judge_here("trl-sft", dataset_name="build/x/y", datasets=["a"]) == []


@pytest.mark.parametrize(
    "text", ["[a/b]", "[{path: a/b}]", '["a/b", "c/d"]', "{path: a/b}", " [a]"]
)
@pytest.mark.parametrize("machine", [None, THIS_MACHINE])
def test_a_list_in_quotes_is_no_data_set(text: str, machine: Any) -> None:
    def judge(**args: Any) -> list[str]:
        return summarise_run("trl-sft", args, machine=machine)

    assert judge(dataset_name=text) == ["bad-dataset error dataset_name"]
    in_mixture = ["bad-dataset error datasets[0].path"]
    assert judge(datasets=text) == in_mixture
    assert judge(datasets=[text]) == in_mixture
    assert judge(datasets=[{"path": text}]) == in_mixture


@pytest.mark.parametrize("value", ["", [""], [{"path": ""}], [{"path": " "}]])
def test_data_without_a_name(value: Any) -> None:
    expected = ["bad-dataset error datasets[0].path"]
    assert summarise_run("trl-dpo", {"datasets": value}) == expected


def test_a_folder_may_be_called_anything(write: Write) -> None:
    write_rows(write, "[a]/train.jsonl", {"messages": CHAT})
    assert judge_here("trl-sft", dataset_name="[a]") == []


@pytest.mark.parametrize(
    "name", ["buckets/org/rows", "hf://buckets/org/rows", "hf://datasets/org/rows"]
)
def test_data_on_the_hub_are_no_folder(name: str) -> None:
    assert judge_here("trl-sft", dataset_name=name) == []
    assert judge_here("trl-sft", datasets=[{"path": name}]) == []


@pytest.mark.parametrize(
    ("key", "args"), [("dataset_train_split", {}), ("dataset_test_split", EVALUATED)]
)
def test_parts_of_splits_cannot_be_named(key: str, args: Any) -> None:
    args = {"dataset_name": "org/name", **args}
    refused = [f"no-such-split error {key}"]
    assert summarise_run("trl-dpo", {**args, key: "train"}) == []
    assert summarise_run("trl-dpo", {**args, key: "train[:10%]"}) == refused
    assert summarise_run("trl-dpo", {**args, key: "train+test"}) == refused


def test_a_split_that_is_not_evaluated_is_not_read() -> None:
    assert summarise_run("trl-sft", {"dataset_test_split": "test[:5]"}) == []


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (["train.jsonl"], "data/train.jsonl"),
        (["rows.jsonl"], "data/rows.jsonl"),
        # the first file that sorts is not the one that is trained on
        (["eval-0.jsonl", "train.jsonl"], "data/train.jsonl"),
        (["testing/b.jsonl", "train/a.jsonl"], "data/train/a.jsonl"),
        (["README.md", "train.jsonl"], "data/train.jsonl"),
        (
            ["data/train-00000-of-00001.jsonl", "train.jsonl"],
            "data/data/train-00000-of-00001.jsonl",
        ),
        (["load.py", "train.jsonl"], "data/train.jsonl"),
        # the format of most files is read, the others are left out
        (["a.csv", "a.jsonl", "b.jsonl"], "data/a.jsonl, data/b.jsonl"),
    ],
)
def test_the_rows_of_a_folder_that_are_trained_on(
    write: Write, files: list[str], read: str
) -> None:
    for name in files:
        write(f"data/{name}", "")
    (finding,) = judge_run("trl-sft", {"dataset_name": "data"})
    assert finding.message == f"{read}: holds no rows"


# the library refuses these: it asks for a split that is not there
@pytest.mark.parametrize(
    "files", [["test.jsonl"], ["data/gen-00000-of-00002.jsonl"], ["train.jsonl", "test/a.jsonl"]]
)
def test_folders_without_the_split(write: Write, files: list[str]) -> None:
    for name in files:
        write(f"data/{name}", "")
    (finding,) = judge_run("trl-sft", {"dataset_name": "data"})
    assert summarise([finding]) == ["bad-data error dataset_name"]
    assert "has no split train" in finding.message


def test_an_empty_folder() -> None:
    Path("empty").mkdir()
    assert summarise_run("trl-sft", {"dataset_name": "empty"}) == ["bad-data error dataset_name"]


def test_a_template_that_is_not_here(write: Write) -> None:
    path = "templates/mine.jinja"
    missing = ["missing-template error chat_template_path"]
    assert judge_here("trl-sft", chat_template_path=path) == missing
    assert summarise_run("trl-sft", {"chat_template_path": path}) == missing
    assert judge_here("trl-sft", chat_template_path="org/name") == []
    write(path, "{{ messages }}")
    assert judge_here("trl-sft", chat_template_path=path) == []


WRONG_COLUMNS = ["data-columns error dataset_name"]
FROM_TO = [{"from": "user", "value": "x"}, {"from": "assistant", "value": "y"}]


def judge_rows(write: Write, script: str, *rows: dict[str, Any], **args: Any) -> list[str]:
    """The findings about a start on a data set of these rows."""
    write_rows(write, "data/train.jsonl", *rows)
    return judge_here(script, dataset_name="data", **args)


# each of these was trained on
@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("trl-sft", {"messages": CHAT, **PAIR}),
        ("trl-sft", {"text": "hello"}),
        ("trl-sft", {"prompt": "a", "completion": "b"}),
        ("trl-sft", {"conversations": FROM_TO}),
        ("trl-sft", {"input_ids": [1, 2, 3]}),
        ("trl-sft", {"image": "x.png", "prompt": "a"}),
        ("trl-dpo", PAIR),
        ("trl-dpo", {"prompt": "q", "chosen": "a", "rejected": "b", "label": True}),
    ],
)
def test_columns_that_are_read(write: Write, script: str, row: Any) -> None:
    assert judge_rows(write, script, row) == []


@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("trl-sft", PAIR),
        ("trl-sft", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("trl-sft", {"completion": "a"}),
        ("trl-sft", {"instruction": "a", "output": "b"}),
        ("trl-dpo", {"messages": CHAT}),
        ("trl-dpo", {"chosen": CHAT}),
        ("trl-dpo", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}),
    ],
)
def test_columns_that_are_refused(write: Write, script: str, row: Any) -> None:
    assert judge_rows(write, script, row) == WRONG_COLUMNS


@pytest.mark.parametrize(
    "args",
    [
        {"dataset_text_field": "body"},
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
        {"dataset_config": "en"},
    ],
)
def test_columns_that_arguments_speak_of(write: Write, args: Any) -> None:
    assert judge_rows(write, "trl-sft", {"body": "a"}, **args) == []


def test_a_row_that_lacks_a_column_has_null_there(write: Write) -> None:
    expected = ["data-types error dataset_name"]
    assert judge_rows(write, "trl-sft", {"body": "a"}, {"text": "b"}) == expected


def test_a_later_file_may_not_add_a_column(write: Write) -> None:
    row = {"body": "a"}
    write_rows(write, "data/train-2.jsonl", row)
    assert judge_rows(write, "trl-sft", row) == WRONG_COLUMNS
    write_rows(write, "data/train-2.jsonl", {"text": "a"})
    expected = [*WRONG_COLUMNS, "data-types error dataset_name"]
    assert judge_rows(write, "trl-sft", row) == expected


def test_rows_of_any_length_are_read(write: Write) -> None:
    long = {"body": "a" * 2**20}
    longer = {"body": "a" * 2**21}
    assert judge_rows(write, "trl-sft", long) == WRONG_COLUMNS
    assert judge_rows(write, "trl-sft", {"body": "a"}, longer) == WRONG_COLUMNS


MODEL = {"model_name_or_path": "model"}


@pytest.fixture
def without_template(write: Write) -> None:
    """A model that has no chat template."""
    write("model/config.json", saved.UNKNOWN)
    write("model/tokenizer_config.json", "{}")
    saved.loadable(Path("model"))


@pytest.mark.usefixtures("without_template")
def test_conversations_need_a_template(write: Write) -> None:
    missing = ["missing-template error model_name_or_path"]
    chat = {"messages": CHAT}
    assert judge_rows(write, "trl-sft", chat, **MODEL) == missing
    assert judge_rows(write, "trl-dpo", PAIR, **MODEL) == missing
    # nothing is known of the tokenizer of a model on the hub
    assert judge_rows(write, "trl-dpo", PAIR, model_name_or_path="elsewhere") == []

    write("other/chat_template.jinja", "{{ messages }}")
    path = "other/chat_template.jinja"
    assert judge_rows(write, "trl-sft", chat, chat_template_path=path, **MODEL) == []


@pytest.mark.usefixtures("without_template")
def test_texts_need_no_template(write: Write) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert judge_rows(write, "trl-sft", {"text": "a"}, **MODEL) == []
    assert judge_rows(write, "trl-dpo", pair, **MODEL) == []


@pytest.mark.usefixtures("without_template")
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("chat_template.jinja", "{{ messages }}"),
    ],
)
def test_where_a_model_has_its_template(write: Write, file: str, text: str) -> None:
    write(f"model/{file}", text)
    assert judge_rows(write, "trl-dpo", PAIR, **MODEL) == []


DROPPED = {"remove_unused_columns": True}
KEPT = {"remove_unused_columns": False}
WITH_LENGTH = {**PAIR, "length": 12}
UNREAD = "pair-lengths error train_sampling_strategy"
MISSING = "pair-lengths error dataset_name"
UNLIKE = "unlike-micro-batches warning train_sampling_strategy"


@pytest.mark.parametrize(
    ("strategy", "row", "columns", "expected"),
    [
        ("group_by_length", PAIR, DROPPED, [UNREAD]),
        ("group_by_length", PAIR, KEPT, [MISSING]),
        ("group_by_length", WITH_LENGTH, DROPPED, [UNREAD]),
        ("group_by_length", WITH_LENGTH, KEPT, []),
        ("batch_rebalance", PAIR, DROPPED, [UNREAD]),
        ("batch_rebalance", PAIR, KEPT, [MISSING, UNLIKE]),
        ("batch_rebalance", WITH_LENGTH, DROPPED, [UNREAD]),
        ("batch_rebalance", WITH_LENGTH, KEPT, [UNLIKE]),
    ],
)
def test_pairs_that_are_drawn_by_length_need_a_column_that_is_kept(
    write: Write, strategy: str, row: Any, columns: Any, expected: list[str]
) -> None:
    lines = judge_rows(write, "trl-dpo", row, train_sampling_strategy=strategy, **columns)
    assert lines == expected


def test_rows_of_sft_are_drawn_by_length_without_a_column(write: Write) -> None:
    lines = judge_rows(
        write, "trl-sft", {"messages": CHAT}, train_sampling_strategy="group_by_length"
    )
    assert lines == []
