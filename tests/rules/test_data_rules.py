"""Findings about rows, through the command line: which file and row, and what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Write
from row_files import (
    BAD,
    GOOD,
    QUESTION,
    arrow,
    assistant,
    chat,
    chats,
    lines,
    pairs,
    parquet,
    text_pairs,
    texts,
    user,
)

from launcher.cli.main import main

SYSTEM = {"role": "system", "content": "s"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def stage_of(stage: str, backend: str, data: str) -> str:
    args: dict[str, Any] = {"model_name_or_path": "org/model", "output_dir": "output"}
    if backend == "trl":
        args |= {"dataset_name": data, "report_to": "none"}
    else:
        key = "dataset_mixer_list" if stage == "sft" else "mixer_list"
        args |= {key: [data, "1.0"], "push_to_hub": False, "try_launch_beaker_eval_jobs": False}
    return json.dumps({"stage": stage, "backend": backend, "deepspeed": "none", "args": args})


def findings(capsys: pytest.CaptureFixture[str], stage: str, backend: str, data: str) -> list[dict[str, Any]]:
    Path("stage.yaml").write_text(stage_of(stage, backend, data))
    main(["validate-config", "stage.yaml", "--format", "json"])
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return told


def with_row(rows: list[dict[str, Any]], row: Any) -> list[Any]:
    return [*rows[:6], row, *rows[7:]]


PROMPTS = [{"prompt": f"{QUESTION} {n} is one?", "chosen": f"{GOOD} {n}", "rejected": f"{BAD}"} for n in range(9)]
TWICE = {"prompt": [user()], "chosen": chat(), "rejected": chat(0, BAD)}

# stage, rows, the finding, and what it names: the seventh line is the odd one
ROWS: list[tuple[str, list[Any], str, str, tuple[str, ...]]] = [
    ("sft", with_row(chats(), [1]), "error", "bad-data", ("train.jsonl:7 ",)),
    ("sft", with_row(chats(), {"messages": "x"}), "error", "data-types", ("`messages`", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": None}), "error", "data-types", ("null", "1 of 8", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": []}), "error", "data-types", ("empty list", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": ["x"]}), "error", "data-types", ("a list with text", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"other": 1}), "error", "data-types", ("`messages` is missing", "1 of 8")),
    ("sft", with_row(chats(), {"messages": [user()]}), "warning", "no-answers", ("train.jsonl:7)",)),
    ("sft", with_row(chats(), {"messages": [user(), assistant("")]}), "none", "", ()),
    ("sft", with_row(chats(), {"messages": [user(), {"role": "assistant", "content": " "}]}),
     "warning", "empty-answers", ("train.jsonl:7)",)),
    ("sft", with_row(chats(), {"messages": [user(), {"role": "bot", "content": "x"}]}),
     "warning", "odd-roles", ("`bot`", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": [user(), {"role": "assistant", "content": None}]}),
     "warning", "odd-messages", ("without content", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": [user(), {"role": "assistant", "content": 3}]}),
     "warning", "odd-messages", ("number", "train.jsonl:7)")),
    ("sft", with_row(texts(), {"text": ""}), "warning", "empty-answers", ("`text`", "train.jsonl:7)")),
    ("sft", [{"tools": "[]", **row} for row in chats(6)] + [{"tools": "no", **chats(1)[0]}],
     "error", "data-types", ("`tools`", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"chat_template_kwargs": {"a": 1}, **chats(1)[0]}),
     "error", "data-types", ("`chat_template_kwargs`", "7 of 8")),
    ("sft", [{"instruction": QUESTION, "input": "", "output": GOOD}] * 3,
     "error", "data-columns", ("instruction, output", "launch data convert data/train.jsonl")),
    ("sft", pairs(), "error", "data-columns", ("`stage: dpo`",)),
    ("dpo", chats(), "error", "data-columns", ("`stage: sft`",)),
    ("dpo", with_row(text_pairs(), {"prompt": "q", "chosen": "x", "rejected": "x"}),
     "warning", "equal-pairs", ("1 of 8", "train.jsonl:7)")),
    ("dpo", with_row(text_pairs(), {"prompt": "q", "chosen": "x", "rejected": ""}),
     "warning", "empty-answers", ("`rejected`", "train.jsonl:7)")),
    ("dpo", with_row(text_pairs(), {"prompt": "", "chosen": "x", "rejected": "y"}),
     "warning", "no-prompt", ("`prompt` is empty", "train.jsonl:7)")),
    ("dpo", [{"prompt": [user()], "chosen": [assistant()], "rejected": [assistant(BAD)]}] * 6 + [TWICE],
     "warning", "prompt-twice", ("train.jsonl:7)",)),
    ("dpo", [{"instruction": QUESTION, "chosen": GOOD, "rejected": f"a {BAD}"}] * 3,
     "warning", "no-prompt", ("`instruction`", "launch data convert")),
    ("dpo", with_row(pairs(), {"chosen": [assistant()], "rejected": [assistant(BAD)]}),
     "error", "no-prompt", ("train.jsonl:7)",)),
    ("dpo", with_row(PROMPTS, {"prompt": "q", "chosen": None, "rejected": "y"}),
     "error", "data-types", ("`chosen` is null", "train.jsonl:7)")),
]  # fmt: skip


def message(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def answered(**columns: Any) -> dict[str, Any]:
    """A question as a list of messages, with the columns of its answers."""
    return {"prompt": [user()], **columns}


SAME = {"chosen": [user(), message("assistant", GOOD, id=1)], "rejected": [user(), message("assistant", GOOD, id=2)]}
SPEAKERS = [{"author": "user", "content": QUESTION}, {"author": "assistant", "content": GOOD}]
TOKENS = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
# rows that TRL takes for something else than they are, or that it trains on in another way than they say
UNMEANT: list[tuple[str, list[Any], str, str, tuple[str, ...]]] = [
    ("sft", [{"labels": [1], **row} for row in texts()], "error", "data-columns", ("`labels`", "rename")),
    ("sft", [{"labels": None, **row} for row in chats()], "error", "data-columns", ("`labels`", "rename")),
    ("sft", [{"prompt": QUESTION, "completion": GOOD, **row} for row in texts()],
     "error", "data-columns", ("`text`", "end token")),
    ("sft", [{"prompt": QUESTION, "completion": GOOD, **row} for row in chats()],
     "error", "data-columns", ("`messages` is a list", "leave out `messages`")),
    ("sft", [{"chosen": GOOD, "rejected": BAD, **row} for row in chats()],
     "error", "data-columns", ("`chosen` is no list", "leave out `chosen`")),
    ("dpo", [{"messages": chat(), **row} for row in text_pairs()],
     "error", "data-columns", ("`messages` is a list", "leave out `messages`")),
    ("sft", [{"prompt": QUESTION, "messages": chat(), **row} for row in pairs()],
     "error", "data-columns", ("`stage: dpo`", "for SFT on `messages` leave out `prompt`")),
    ("sft", [{"prompt": QUESTION, "completion": GOOD, "label": n > 3} for n in range(8)],
     "warning", "data-columns", ("`label` is false in 4 of 8", "train.jsonl:1)")),
    ("dpo", [{"prompt": QUESTION, "completion": GOOD, "label": n > 3} for n in range(8)],
     "error", "data-columns", ("KTO",)),
    ("sft", [{"text": QUESTION, "role": "prompter", "parent_id": None if n == 0 else "x"} for n in range(8)],
     "warning", "data-columns", ("`parent_id`",)),
    ("sft", [{"messages": SPEAKERS}] * 8, "error", "data-columns", ("no message", "`role`", "launch data convert")),
    ("sft", [{"messages": [{"role": "user", "text": "x"}, {"role": "assistant", "text": "y"}]}] * 8,
     "error", "data-columns", ("no message", "`content`", "launch data convert")),
    ("sft", with_row(chats(), {"messages": [message("user", ""), assistant()]}),
     "warning", "no-prompt", ("empty question", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": [user(), message("assistant", GOOD, weight=0)]}),
     "warning", "odd-messages", ("`weight: 0`", "1 of 8", "train.jsonl:7)")),
    ("sft", with_row(chats(), {"messages": [message("user", None)] * 9 + [assistant()]}),
     "warning", "odd-messages", ("without content in 1 of 8", "train.jsonl:7)")),
    ("sft", with_row([TOKENS] * 8, {"input_ids": [1, 2], "labels": [-100, -100]}),
     "warning", "no-answers", ("-100 in 1 of 8", "train.jsonl:7)")),
    ("sft", [{"input_ids": [1, 2], "labels": [-100, -100]}] * 8, "error", "no-answers", ("-100 in all rows",)),
    ("sft", with_row([TOKENS] * 8, {"input_ids": [1, 2], "labels": [1]}),
     "error", "data-types", ("`labels` is not as long", "train.jsonl:7)")),
    ("sft", with_row([TOKENS] * 8, {"input_ids": None, "labels": [1]}),
     "error", "data-types", ("`input_ids` is null", "train.jsonl:7)")),
    ("sft", with_row([TOKENS] * 8, {"input_ids": [], "labels": []}),
     "error", "data-types", ("empty list", "train.jsonl:7)")),
    ("sft", [{"input_ids": [[1, 2]]}] * 8, "error", "data-types", ("instead of a number",)),
    ("sft", [{"input_ids": [1, 2], "labels": "x"}] * 8, "error", "data-types", ("`labels` is text",)),
    ("sft", [{"tools": {"name": "x"}, **row} for row in chats()], "error", "data-types", ("no list of objects",)),
    ("sft", [{"messages": [message(0, QUESTION), message(1, GOOD)]}] * 8, "error", "data-columns", ("`role`",)),
    ("sft", [{"input_ids": "1 2"}] * 8, "error", "data-types", ("`input_ids`", "tokenised")),
    ("sft", [{"input_ids": [1, 2], "completion_mask": [0, 1]}] * 8,
     "warning", "data-columns", ("`completion_mask`", "completion_only_loss")),
    ("sft", [{"tools": '{"name": "x"}', **row} for row in chats()], "error", "data-types", ("no list of objects",)),
    ("sft", [{"tools": ["x"], **row} for row in chats()], "error", "data-types", ("no list of objects",)),
    ("sft", [{"text": [QUESTION]}] * 8, "error", "data-types", ("a list in all rows, where text is needed",)),
    ("sft", [{" text": QUESTION}] * 8, "error", "data-columns", ("blanks around it",)),
    ("sft", [{"data": [{"id": 1}]}], "error", "data-columns", ("its rows stand in `data`",)),
    ("sft", [{"text": {"0": "a", "1": "b"}}], "error", "data-types", ("records",)),
    ("dpo", [SAME] * 8, "warning", "equal-pairs", ("all rows",)),
    ("dpo", with_row(pairs(), {"chosen": [user()], "rejected": [user(), assistant(BAD)]}),
     "error", "no-prompt", ("1 of 8", "train.jsonl:7)")),
    ("dpo", [answered(chosen=[user(1)], rejected=[user(2)])] * 8, "warning", "no-answers", ("`chosen`", "all rows")),
    ("dpo", [{"chosen": [*chat(), user(1)], "rejected": [*chat(0, BAD), user(1)]}] * 8,
     "warning", "odd-roles", ("ends with a message of `user`",)),
    ("dpo", [answered(chosen=[user(1), assistant()], rejected=[user(1), assistant(BAD)])] * 8,
     "warning", "odd-roles", ("begins with a message of `user`",)),
    ("dpo", [answered(chosen=assistant(), rejected=assistant(BAD))] * 8,
     "error", "data-columns", ("single messages", "launch data convert")),
    ("dpo", [{"prompt": None, **row} for row in pairs()], "error", "data-columns", ("leave out `prompt`",)),
    ("dpo", [{"question": QUESTION, "answers": [GOOD, BAD]}] * 8,
     "error", "data-columns", ("`chosen`, and that of the worse one `rejected`",)),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "rows", "severity", "code", "names"), ROWS + UNMEANT)
def test_findings_name_the_row(
    write: Write, capsys: pytest.CaptureFixture[str], stage: str, rows: list[Any], severity: str, code: str,
    names: tuple[str, ...],
) -> None:  # fmt: skip
    write("data/train.jsonl", lines(rows))
    told = findings(capsys, stage, "trl", "data")
    about = [f"{one['message']} {one['help']}" for one in told if (one["severity"], one["code"]) == (severity, code)]
    if severity == "none":
        assert {one["severity"] for one in told} <= {"note"}
        return
    assert len(about) >= 1, told
    assert any(all(name in text for name in names) for text in about), about


OPEN_INSTRUCT: list[tuple[str, list[Any], str, str, tuple[str, ...]]] = [
    ("sft", with_row(chats(), {"messages": "x"}), "error", "data-types", ("rows.jsonl:7)",)),
    ("sft", with_row(chats(), {"messages": []}), "error", "data-types", ("rows.jsonl:7)",)),
    ("sft", with_row(chats(), {"messages": ["x"]}), "error", "data-types", ("rows.jsonl:7)",)),
    ("sft", with_row(chats(), {"messages": [user()]}), "warning", "no-answers", ("1 of 8",)),
    ("sft", texts(), "error", "data-columns", ("`messages`",)),
    ("dpo", text_pairs(), "error", "data-columns", ("`chosen` and `rejected`",)),
    ("dpo", with_row(pairs(), {"chosen": chat(), "rejected": chat()}), "warning", "equal-pairs", ("rows.jsonl:7)",)),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "rows", "severity", "code", "names"), OPEN_INSTRUCT)
def test_rows_of_open_instruct(
    write: Write, capsys: pytest.CaptureFixture[str], stage: str, rows: list[Any], severity: str, code: str,
    names: tuple[str, ...],
) -> None:  # fmt: skip
    write("rows.jsonl", lines(rows))
    told = findings(capsys, stage, "open_instruct", "rows.jsonl")
    about = [f"{one['message']} {one['help']}" for one in told if (one["severity"], one["code"]) == (severity, code)]
    assert any(all(name in text for name in names) for text in about), told


ROLES: list[list[tuple[str, str]]] = [
    [("from", "value"), ("human", "bard")], [("from", "value"), ("user", "chatgpt")],
    [("role", "content"), ("User", "Assistant")], [("role", "content"), ("human", "ai")],
]  # fmt: skip


@pytest.mark.parametrize(("keys", "roles"), ROLES)
def test_answers_under_another_role_are_not_called_missing(
    write: Write, capsys: pytest.CaptureFixture[str], keys: tuple[str, str], roles: tuple[str, str]
) -> None:
    role, content = keys
    turns = [{role: roles[0], content: QUESTION}, {role: roles[1], content: GOOD}]
    write("data/train.jsonl", lines([{"conversations" if role == "from" else "messages": turns}] * 8))
    told = {one["code"]: one for one in findings(capsys, "sft", "trl", "data")}
    assert "no-answers" not in told
    assert "launch data convert" in told["odd-roles"]["help"]


def test_pictures_need_a_model_that_sees_them(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("data/train.jsonl", lines([{"images": [], **row} for row in chats()]))
    write("org/model/config.json", '{"model_type": "llama"}')
    told = [one for one in findings(capsys, "sft", "trl", "data") if one["code"] == "data-columns"]
    assert [one["severity"] for one in told] == ["error"]
    assert "leave out `images`" in told[0]["help"]
    write("org/model/preprocessor_config.json", "{}")
    assert "data-columns" not in {one["code"] for one in findings(capsys, "sft", "trl", "data")}


@pytest.mark.parametrize("tools", [[], None, "[]", "null", "{}"])
def test_rows_without_tools_drop_none(write: Write, capsys: pytest.CaptureFixture[str], tools: Any) -> None:
    write("data/train.jsonl", lines([{"tools": tools, **row} for row in chats()]))
    write("org/model/config.json", '{"model_type": "llama"}')
    write("org/model/tokenizer_config.json", '{"chat_template": "{{ messages }}"}')
    assert "template-drops-tools" not in {one["code"] for one in findings(capsys, "sft", "trl", "data")}


CSV_FILES: list[tuple[bytes, str]] = [
    (b"question;answer\na;b\n", "semicolons"), (b"question\tanswer\na\tb\n", "tabs"),
    (b"# of mine\nquestion,answer\na,b\n", "is taken for the header"),
    (b"question,answer\na,b,\nc,d,\n", "leave out the comma at the end"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "word"), CSV_FILES)
def test_what_is_wrong_with_a_csv_file(
    write: Write, capsys: pytest.CaptureFixture[str], content: bytes, word: str
) -> None:
    write("data/train.csv", content)
    told = [one for one in findings(capsys, "sft", "trl", "data") if one["code"] == "data-columns"]
    assert len(told) == 1
    assert word in told[0]["help"]


def test_rows_that_only_look_alike_are_no_copies(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [
        {"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": str(n)}]}, assistant()]}
        for n in range(80)
    ]
    write("data/train.jsonl", lines(calls))
    assert "repeated-rows" not in {one["code"] for one in findings(capsys, "sft", "trl", "data")}
    write("data/train.jsonl", lines([calls[0]] * 80))
    assert "repeated-rows" in {one["code"] for one in findings(capsys, "sft", "trl", "data")}


def test_folders_that_cannot_be_loaded(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("saved/state.json", "{}")
    write("tested/test.jsonl", lines(chats()))
    write("script/script.py", "")
    write("script/train.jsonl", lines(chats()))
    write("mixed/train.csv", "text\na\n")
    write("mixed/test.jsonl", lines(texts()))
    for name, word in (("saved", "save_to_disk"), ("tested", "no split train"), ("mixed", "different formats"),
                       ("script", "script.py")):  # fmt: skip
        told = [one for one in findings(capsys, "sft", "trl", name) if one["code"] == "bad-data"]
        assert [one["severity"] for one in told] == ["error"], name
        assert word in told[0]["message"]
        assert told[0]["help"]


def test_a_folder_of_saved_splits_is_read(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    write("data/dataset_dict.json", '{"splits": ["train"]}')
    write("data/train/state.json", "{}")
    write("data/train/data-00000-of-00001.arrow", arrow(with_row(chats(), {"messages": [user()]})))
    told = {one["code"]: one for one in findings(capsys, "sft", "trl", "data")}
    assert "bad-data" not in told
    assert "data-00000-of-00001.arrow" in told["no-answers"]["message"]


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from launcher.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_install_without_pyarrow(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    write("columns/train.parquet", parquet(texts()))
    write("lines/train.jsonl", lines(texts()))
    write("broken/train.jsonl", b"x\n")
    told = {}
    for name in ("columns", "lines", "broken"):
        Path("stage.yaml").write_text(stage_of("sft", "trl", name))
        words = [sys.executable, "-c", WITHOUT_PYARROW, "validate-config", "stage.yaml", "--format", "json"]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(words, capture_output=True, text=True, env=environ)
        told[name] = {one["code"]: one for one in json.loads(done.stdout)["findings"]}
    assert told["columns"]["unseen-data"]["severity"] == "note"
    assert "train.parquet needs pyarrow" in told["columns"]["unseen-data"]["message"]
    assert "pip install pyarrow" in told["columns"]["unseen-data"]["help"]
    assert not {"bad-data", "data-columns"} & set(told["columns"])
    assert "unseen-data" not in told["lines"]
    assert told["broken"]["bad-data"]["severity"] == "error"
    # what was not looked at is not remembered: with pyarrow, the same file is
    assert "unseen-data" not in {one["code"] for one in findings(capsys, "sft", "trl", "columns")}
