"""Findings about rows, through the command line: which file and row, and what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Write
from row_files import BAD, GOOD, QUESTION, assistant, chat, chats, lines, pairs, parquet, text_pairs, texts, user

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


@pytest.mark.parametrize(("stage", "rows", "severity", "code", "names"), ROWS)
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
    write("mixed/train.csv", "text\na\n")
    write("mixed/test.jsonl", lines(texts()))
    for name, word in (("saved", "save_to_disk"), ("tested", "no split train"), ("mixed", "different formats")):
        told = [one for one in findings(capsys, "sft", "trl", name) if one["code"] == "bad-data"]
        assert [one["severity"] for one in told] == ["error"], name
        assert word in told[0]["message"]
        assert told[0]["help"]


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
