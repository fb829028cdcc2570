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


def message(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SYSTEM = message("system", "s")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


Capture = pytest.CaptureFixture[str]


def judge(
    capsys: Capture, stage: str, data: str = "data", backend: str = "trl"
) -> list[dict[str, Any]]:
    Path("stage.yaml").write_text(stage_of(stage, backend, data))
    main(["validate-config", "stage.yaml", "--format", "json"])
    return json.loads(capsys.readouterr().out)["findings"]


def codes(capsys: Capture, data: str = "data") -> set[str]:
    return {finding["code"] for finding in judge(capsys, "sft", data)}


def only(code: str, findings: list[dict[str, Any]]) -> dict[str, Any]:
    (finding,) = [finding for finding in findings if finding["code"] == code]
    return finding


def with_row(rows: list[Any], row: Any = None, **columns: Any) -> list[Any]:
    """The rows with another in line 7."""
    return [*rows[:6], row or columns, *rows[7:]]


def sft(finding: str, rows: list[Any], *words: str) -> Any:
    """A case: rows for SFT, `severity code` of the finding, and words of its message or help."""
    return pytest.param("sft", finding, rows, words, id=f"{finding} {words[0]}")


def dpo(finding: str, rows: list[Any], *words: str) -> Any:
    return pytest.param("dpo", finding, rows, words, id=f"{finding} {words[0]}")


PROMPTS = [
    {"prompt": f"{QUESTION} {n} is one?", "chosen": f"{GOOD} {n}", "rejected": f"{BAD}"}
    for n in range(9)
]
TWICE = {"prompt": [user()], "chosen": chat(), "rejected": chat(0, BAD)}

# the seventh line is the odd one
ROWS = [
    sft("error bad-data", with_row(chats(), [1]), "train.jsonl:7 "),
    sft("error data-types", with_row(chats(), messages="x"), "`messages`", "train.jsonl:7)"),
    sft("error data-types", with_row(chats(), messages=None), "null", "1 of 8", "train.jsonl:7)"),
    sft("error data-types", with_row(chats(), messages=[]), "empty list", "train.jsonl:7)"),
    sft(
        "error data-types", with_row(chats(), messages=["x"]), "a list with text", "train.jsonl:7)"
    ),
    sft("error data-types", with_row(chats(), other=1), "`messages` is missing", "1 of 8"),
    sft("warning no-answers", with_row(chats(), messages=[user()]), "train.jsonl:7)"),
    sft(
        "warning empty-answers",
        with_row(chats(), messages=[user(), message("assistant", " ")]),
        "train.jsonl:7)",
    ),
    sft(
        "warning odd-roles",
        with_row(chats(), messages=[user(), message("bot", "x")]),
        "`bot`",
        "train.jsonl:7)",
    ),
    sft(
        "warning odd-messages",
        with_row(chats(), messages=[user(), message("assistant", None)]),
        "without content",
        "train.jsonl:7)",
    ),
    sft(
        "warning odd-messages",
        with_row(chats(), messages=[user(), message("assistant", 3)]),
        "number",
        "train.jsonl:7)",
    ),
    sft("warning empty-answers", with_row(texts(), text=""), "`text`", "train.jsonl:7)"),
    sft(
        "error data-types",
        [{"tools": "[]", **row} for row in chats(6)] + [{"tools": "no", **chats(1)[0]}],
        "`tools`",
        "train.jsonl:7)",
    ),
    sft(
        "error data-types",
        with_row(chats(), chat_template_kwargs={"a": 1}, **chats(1)[0]),
        "`chat_template_kwargs`",
        "7 of 8",
    ),
    sft(
        "error data-columns",
        [{"instruction": QUESTION, "input": "", "output": GOOD}] * 3,
        "instruction, output",
        "launch data convert data/train.jsonl",
    ),
    sft("error data-columns", pairs(), "`stage: dpo`"),
    dpo("error data-columns", chats(), "`stage: sft`"),
    dpo(
        "warning equal-pairs",
        with_row(text_pairs(), prompt="q", chosen="x", rejected="x"),
        "1 of 8",
        "train.jsonl:7)",
    ),
    dpo(
        "warning empty-answers",
        with_row(text_pairs(), prompt="q", chosen="x", rejected=""),
        "`rejected`",
        "train.jsonl:7)",
    ),
    dpo(
        "warning no-prompt",
        with_row(text_pairs(), prompt="", chosen="x", rejected="y"),
        "`prompt` is empty",
        "train.jsonl:7)",
    ),
    dpo(
        "warning prompt-twice",
        [{"prompt": [user()], "chosen": [assistant()], "rejected": [assistant(BAD)]}] * 6 + [TWICE],
        "train.jsonl:7)",
    ),
    dpo(
        "warning no-prompt",
        [{"instruction": QUESTION, "chosen": GOOD, "rejected": f"a {BAD}"}] * 3,
        "`instruction`",
        "launch data convert",
    ),
    dpo(
        "error no-prompt",
        with_row(pairs(), chosen=[assistant()], rejected=[assistant(BAD)]),
        "train.jsonl:7)",
    ),
    dpo(
        "error data-types",
        with_row(PROMPTS, prompt="q", chosen=None, rejected="y"),
        "`chosen` is null",
        "train.jsonl:7)",
    ),
]


def answered(**columns: Any) -> dict[str, Any]:
    """A question as a list of messages, with the columns of its answers."""
    return {"prompt": [user()], **columns}


SAME = {
    "chosen": [user(), message("assistant", GOOD, id=1)],
    "rejected": [user(), message("assistant", GOOD, id=2)],
}
SPEAKERS = [{"author": "user", "content": QUESTION}, {"author": "assistant", "content": GOOD}]
TOKENS = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
# rows that TRL takes for something else, or trains on in another way than they say
UNMEANT = [
    sft("error data-columns", [{"labels": [1], **row} for row in texts()], "`labels`", "rename"),
    sft("error data-columns", [{"labels": None, **row} for row in chats()], "`labels`", "rename"),
    sft(
        "error data-columns",
        [{"prompt": QUESTION, "completion": GOOD, **row} for row in texts()],
        "`text`",
        "end token",
    ),
    sft(
        "error data-columns",
        [{"prompt": QUESTION, "completion": GOOD, **row} for row in chats()],
        "`messages` is a list",
        "leave out `messages`",
    ),
    sft(
        "error data-columns",
        [{"chosen": GOOD, "rejected": BAD, **row} for row in chats()],
        "`chosen` is no list",
        "leave out `chosen`",
    ),
    dpo(
        "error data-columns",
        [{"messages": chat(), **row} for row in text_pairs()],
        "`messages` is a list",
        "leave out `messages`",
    ),
    sft(
        "error data-columns",
        [{"prompt": QUESTION, "messages": chat(), **row} for row in pairs()],
        "`stage: dpo`",
        "for SFT on `messages` leave out `prompt`",
    ),
    sft(
        "warning data-columns",
        [{"prompt": QUESTION, "completion": GOOD, "label": n > 3} for n in range(8)],
        "`label` is false in 4 of 8",
        "train.jsonl:1)",
    ),
    dpo(
        "error data-columns",
        [{"prompt": QUESTION, "completion": GOOD, "label": n > 3} for n in range(8)],
        "KTO",
    ),
    sft(
        "warning data-columns",
        [
            {"text": QUESTION, "role": "prompter", "parent_id": None},
            *[{"text": QUESTION, "role": "prompter", "parent_id": "x"}] * 7,
        ],
        "`parent_id`",
    ),
    sft(
        "error data-columns",
        [{"messages": SPEAKERS}] * 8,
        "no message",
        "`role`",
        "launch data convert",
    ),
    sft(
        "error data-columns",
        [{"messages": [{"role": "user", "text": "x"}, {"role": "assistant", "text": "y"}]}] * 8,
        "no message",
        "`content`",
        "launch data convert",
    ),
    sft(
        "warning no-prompt",
        with_row(chats(), messages=[message("user", ""), assistant()]),
        "empty question",
        "train.jsonl:7)",
    ),
    sft(
        "warning odd-messages",
        with_row(chats(), messages=[user(), message("assistant", GOOD, weight=0)]),
        "`weight: 0`",
        "1 of 8",
        "train.jsonl:7)",
    ),
    sft(
        "warning odd-messages",
        with_row(chats(), messages=[message("user", None)] * 9 + [assistant()]),
        "without content in 1 of 8",
        "train.jsonl:7)",
    ),
    sft(
        "warning no-answers",
        with_row([TOKENS] * 8, input_ids=[1, 2], labels=[-100, -100]),
        "-100 in 1 of 8",
        "train.jsonl:7)",
    ),
    sft(
        "error no-answers", [{"input_ids": [1, 2], "labels": [-100, -100]}] * 8, "-100 in all rows"
    ),
    sft(
        "error data-types",
        with_row([TOKENS] * 8, input_ids=[1, 2], labels=[1]),
        "`labels` is not as long",
        "train.jsonl:7)",
    ),
    sft(
        "error data-types",
        with_row([TOKENS] * 8, input_ids=None, labels=[1]),
        "`input_ids` is null",
        "train.jsonl:7)",
    ),
    sft(
        "error data-types",
        with_row([TOKENS] * 8, input_ids=[], labels=[]),
        "empty list",
        "train.jsonl:7)",
    ),
    sft("error data-types", [{"input_ids": [[1, 2]]}] * 8, "instead of a number"),
    sft("error data-types", [{"input_ids": [1, 2], "labels": "x"}] * 8, "`labels` is text"),
    sft(
        "error data-types",
        [{"tools": {"name": "x"}, **row} for row in chats()],
        "no list of objects",
    ),
    sft(
        "error data-columns", [{"messages": [message(0, QUESTION), message(1, GOOD)]}] * 8, "`role`"
    ),
    sft("error data-types", [{"input_ids": "1 2"}] * 8, "`input_ids`", "tokenised"),
    sft(
        "warning data-columns",
        [{"input_ids": [1, 2], "completion_mask": [0, 1]}] * 8,
        "`completion_mask`",
        "completion_only_loss",
    ),
    sft(
        "error data-types",
        [{"tools": '{"name": "x"}', **row} for row in chats()],
        "no list of objects",
    ),
    sft("error data-types", [{"tools": ["x"], **row} for row in chats()], "no list of objects"),
    sft("error data-types", [{"text": [QUESTION]}] * 8, "a list in all rows, where text is needed"),
    sft("error data-columns", [{" text": QUESTION}] * 8, "blanks around it"),
    sft("error data-columns", [{"data": [{"id": 1}]}], "its rows stand in `data`"),
    sft("error data-types", [{"text": {"0": "a", "1": "b"}}], "records"),
    dpo("warning equal-pairs", [SAME] * 8, "all rows"),
    dpo(
        "error no-prompt",
        with_row(pairs(), chosen=[user()], rejected=[user(), assistant(BAD)]),
        "1 of 8",
        "train.jsonl:7)",
    ),
    dpo(
        "warning no-answers",
        [answered(chosen=[user(1)], rejected=[user(2)])] * 8,
        "`chosen`",
        "all rows",
    ),
    dpo(
        "warning odd-roles",
        [{"chosen": [*chat(), user(1)], "rejected": [*chat(0, BAD), user(1)]}] * 8,
        "ends with a message of `user`",
    ),
    dpo(
        "warning odd-roles",
        [answered(chosen=[user(1), assistant()], rejected=[user(1), assistant(BAD)])] * 8,
        "begins with a message of `user`",
    ),
    dpo(
        "error data-columns",
        [answered(chosen=assistant(), rejected=assistant(BAD))] * 8,
        "single messages",
        "launch data convert",
    ),
    dpo("error data-columns", [{"prompt": None, **row} for row in pairs()], "leave out `prompt`"),
    dpo(
        "error data-columns",
        [{"question": QUESTION, "answers": [GOOD, BAD]}] * 8,
        "`chosen`, and that of the worse one `rejected`",
    ),
]


def assert_said(finding: str, words: tuple[str, ...], findings: list[dict[str, Any]]) -> None:
    """One of the findings has this `severity code`, and all of these words."""
    texts = []
    for other in findings:
        if f"{other['severity']} {other['code']}" == finding:
            texts.append(f"{other['message']} {other['help']}")
    assert any(all(word in text for word in words) for text in texts), findings


@pytest.mark.parametrize(("stage", "finding", "rows", "words"), ROWS + UNMEANT)
def test_findings_name_the_row(
    write: Write, capsys: Capture, stage: str, finding: str, rows: list[Any], words: tuple[str, ...]
) -> None:
    write("data/train.jsonl", lines(rows))
    assert_said(finding, words, judge(capsys, stage))


def test_an_empty_answer_of_a_chat_is_fine(write: Write, capsys: Capture) -> None:
    write("data/train.jsonl", lines(with_row(chats(), messages=[user(), assistant("")])))
    assert {finding["severity"] for finding in judge(capsys, "sft")} <= {"note"}


OPEN_INSTRUCT = [
    sft("error data-types", with_row(chats(), messages="x"), "rows.jsonl:7)"),
    sft("error data-types", with_row(chats(), messages=[]), "rows.jsonl:7)"),
    sft("error data-types", with_row(chats(), messages=["x"]), "rows.jsonl:7)"),
    sft("warning no-answers", with_row(chats(), messages=[user()]), "1 of 8"),
    sft("error data-columns", texts(), "`messages`"),
    dpo("error data-columns", text_pairs(), "`chosen` and `rejected`"),
    dpo("warning equal-pairs", with_row(pairs(), chosen=chat(), rejected=chat()), "rows.jsonl:7)"),
]


@pytest.mark.parametrize(("stage", "finding", "rows", "words"), OPEN_INSTRUCT)
def test_rows_of_open_instruct(
    write: Write, capsys: Capture, stage: str, finding: str, rows: list[Any], words: tuple[str, ...]
) -> None:
    write("rows.jsonl", lines(rows))
    assert_said(finding, words, judge(capsys, stage, "rows.jsonl", "open_instruct"))


@pytest.mark.parametrize(
    ("column", "role", "content", "asker", "answerer"),
    [
        ("conversations", "from", "value", "human", "bard"),
        ("conversations", "from", "value", "user", "chatgpt"),
        ("messages", "role", "content", "User", "Assistant"),
        ("messages", "role", "content", "human", "ai"),
    ],
)
def test_answers_under_another_role_are_not_called_missing(
    write: Write, capsys: Capture, column: str, role: str, content: str, asker: str, answerer: str
) -> None:
    turns = [{role: asker, content: QUESTION}, {role: answerer, content: GOOD}]
    write("data/train.jsonl", lines([{column: turns}] * 8))
    findings = judge(capsys, "sft")
    assert "launch data convert" in only("odd-roles", findings)["help"]
    assert "no-answers" not in {finding["code"] for finding in findings}


def test_pictures_need_a_model_that_sees_them(write: Write, capsys: Capture) -> None:
    write("data/train.jsonl", lines([{"images": [], **row} for row in chats()]))
    write("org/model/config.json", '{"model_type": "llama"}')
    finding = only("data-columns", judge(capsys, "sft"))
    assert finding["severity"] == "error"
    assert "leave out `images`" in finding["help"]
    write("org/model/preprocessor_config.json", "{}")
    assert "data-columns" not in codes(capsys)


@pytest.mark.parametrize("tools", [[], None, "[]", "null", "{}"])
def test_rows_without_tools_drop_none(write: Write, capsys: Capture, tools: Any) -> None:
    write("data/train.jsonl", lines([{"tools": tools, **row} for row in chats()]))
    write("org/model/config.json", '{"model_type": "llama"}')
    write("org/model/tokenizer_config.json", '{"chat_template": "{{ messages }}"}')
    assert "template-drops-tools" not in codes(capsys)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"question;answer\na;b\n", "semicolons"),
        (b"question\tanswer\na\tb\n", "tabs"),
        (b"# of mine\nquestion,answer\na,b\n", "is taken for the header"),
        (b"question,answer\na,b,\nc,d,\n", "leave out the comma at the end"),
    ],
)
def test_what_is_wrong_with_a_csv_file(
    write: Write, capsys: Capture, content: bytes, word: str
) -> None:
    write("data/train.csv", content)
    assert word in only("data-columns", judge(capsys, "sft"))["help"]


def test_rows_that_only_look_alike_are_no_copies(write: Write, capsys: Capture) -> None:
    calls = []
    for n in range(80):
        question = message("user", [{"type": "text", "text": str(n)}])
        calls.append({"messages": [SYSTEM, question, assistant()]})
    write("data/train.jsonl", lines(calls))
    assert "repeated-rows" not in codes(capsys)
    write("data/train.jsonl", lines([calls[0]] * 80))
    assert "repeated-rows" in codes(capsys)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"state.json": "{}"}, "save_to_disk"),
        ({"test.jsonl": lines(chats())}, "no split train"),
        ({"train.csv": "text\na\n", "test.jsonl": lines(texts())}, "different formats"),
        ({"data.py": "", "train.jsonl": lines(chats())}, "data.py"),
    ],
)
def test_folders_that_cannot_be_loaded(
    write: Write, capsys: Capture, files: dict[str, Any], words: str
) -> None:
    for name, content in files.items():
        write(f"data/{name}", content)
    finding = only("bad-data", judge(capsys, "sft"))
    assert finding["severity"] == "error"
    assert words in finding["message"]
    assert finding["help"]


def test_a_folder_of_saved_splits_is_read(write: Write, capsys: Capture) -> None:
    pytest.importorskip("pyarrow")
    write("data/dataset_dict.json", '{"splits": ["train"]}')
    write("data/train/state.json", "{}")
    write("data/train/data-00000-of-00001.arrow", arrow(with_row(chats(), messages=[user()])))
    findings = judge(capsys, "sft")
    assert "bad-data" not in {finding["code"] for finding in findings}
    assert "data-00000-of-00001.arrow" in only("no-answers", findings)["message"]


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from launcher.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def judge_without_pyarrow(data: str) -> list[dict[str, Any]]:
    Path("stage.yaml").write_text(stage_of("sft", "trl", data))
    words = ["validate-config", "stage.yaml", "--format", "json"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-c", WITHOUT_PYARROW, *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=environ)
    return json.loads(done.stdout)["findings"]


def test_columns_without_pyarrow(write: Write, capsys: Capture) -> None:
    pytest.importorskip("pyarrow")
    write("data/train.parquet", parquet(texts()))
    findings = judge_without_pyarrow("data")
    unseen = only("unseen-data", findings)
    assert unseen["severity"] == "note"
    assert "train.parquet needs pyarrow" in unseen["message"]
    assert "pip install pyarrow" in unseen["help"]
    assert not {"bad-data", "data-columns"} & {finding["code"] for finding in findings}
    # what was not looked at is not remembered: with pyarrow, the same file is
    assert "unseen-data" not in codes(capsys)


def test_lines_without_pyarrow(write: Write) -> None:
    write("data/train.jsonl", lines(texts()))
    assert "unseen-data" not in {finding["code"] for finding in judge_without_pyarrow("data")}
    write("broken/train.jsonl", b"x\n")
    assert only("bad-data", judge_without_pyarrow("broken"))["severity"] == "error"
