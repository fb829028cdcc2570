"""`launch data convert`: rows of each known form become rows that both trainers take."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from real_process import ask_process
from row_files import BAD, GOOD, QUESTION, Row, array, assistant, chat, lines, parquet, table, user

from launcher.cli.main import main
from launcher.errors import Exit

ROWS = 8
ASKED = f"{QUESTION} 0?"
ANSWER = f"{GOOD} 0"
WORSE = f"{BAD} 0"

Turn = dict[str, str]
Text = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@dataclass(frozen=True)
class Form:
    """A form of rows, each of which is converted to the same."""

    name: str
    stage: str
    row: Row
    converted: Row
    file: str = "rows.jsonl"

    def content(self) -> bytes:
        """The file: eight rows like this one."""
        rows = [self.row] * ROWS
        match Path(self.file).suffix:
            case ".json":
                return array(rows)
            case ".csv":
                return table(rows)
            case ".parquet":
                return parquet(rows)
        return lines(rows)


def sft(name: str, row: Row, messages: list[Row] | None = None, **options: str) -> Form:
    return Form(name, "sft", row, {"messages": messages or chat()}, **options)


def dpo(name: str, row: Row, **options: str) -> Form:
    return Form(name, "dpo", row, {"chosen": chat(), "rejected": chat(0, BAD)}, **options)


def human() -> Turn:
    return {"from": "human", "value": ASKED}


def gpt(text: str = ANSWER) -> Turn:
    return {"from": "gpt", "value": text}


def message(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


ALPACA = {"instruction": ASKED, "input": "", "output": ANSWER}
SYSTEM = message("system", "be brief")
TWO_PARTS = [message("user", f"{QUESTION}\n\n0?"), assistant()]
EARLIER_TURN = [message("user", "a"), message("assistant", "b")]
CAPITAL_ROLES = [message("Human", ASKED), message("AI", ANSWER)]
AUTHORS = [{"author": "user", "text": ASKED}, {"author": "assistant", "text": ANSWER}]
COLUMNS_OF_MESSAGES = {"role": ["user", "assistant"], "content": [ASKED, ANSWER]}
NUMPY_MESSAGES = repr(chat()).replace("}, {", "}\n {")

SFT_FORMS = [
    sft("Alpaca", ALPACA, file="rows.json"),
    sft(
        "an instruction and its input",
        {**ALPACA, "instruction": QUESTION, "input": "0?"},
        TWO_PARTS,
    ),
    sft("Alpaca with a system prompt", {"system": "be brief", **ALPACA}, [SYSTEM, *chat()]),
    sft("Alpaca with a history", {"history": [["a", "b"]], **ALPACA}, [*EARLIER_TURN, *chat()]),
    sft("question and answer", {"question": ASKED, "answer": ANSWER}, file="rows.csv"),
    sft("columns in capitals", {"Question": ASKED, "Answer": ANSWER}, file="rows.csv"),
    sft("a Parquet file", {"question": ASKED, "answer": ANSWER}, file="rows.parquet"),
    sft("a context", {"instruction": QUESTION, "context": "0?", "response": ANSWER}, TWO_PARTS),
    sft("prompt and response", {"prompt": ASKED, "response": ANSWER}),
    sft("numbered messages", {"message_1": ASKED, "message_2": ANSWER}),
    sft("a prompt of messages", {"prompt": [user()], "completion": ANSWER}),
    sft("ShareGPT", {"conversations": [human(), gpt()]}, file="rows.json"),
    sft("ShareGPT in messages", {"messages": [human(), gpt()]}),
    sft("ShareGPT in items", {"items": [human(), gpt()]}),
    sft(
        "ShareGPT with a system prompt",
        {"system": "be brief", "conversations": [human(), gpt()]},
        [SYSTEM, *chat()],
    ),
    sft("ShareGPT of Bard", {"conversations": [human(), {"from": "bard", "value": ANSWER}]}),
    sft("conversations", {"conversations": chat()}),
    sft("one conversation", {"conversation": chat()}),
    sft("a conversation of pairs", {"conversation": [{"input": ASKED, "output": ANSWER}]}),
    sft("texts in turn", {"data": [ASKED, ANSWER]}),
    sft("messages in capitals", {"Messages": chat()}),
    sft("messages beside a prompt", {"prompt": ASKED, "messages": chat()}),
    sft("messages as JSON", {"messages": json.dumps(chat())}),
    sft("messages as Python shows them", {"messages": repr(chat())}, file="rows.csv"),
    sft("messages as numpy shows them", {"messages": NUMPY_MESSAGES}, file="rows.csv"),
    sft("roles in capitals", {"messages": CAPITAL_ROLES}),
    sft("authors and texts", {"messages": AUTHORS}),
    sft("an object of lists", {"messages": COLUMNS_OF_MESSAGES}),
]

BETTER_MESSAGE = {"chosen": [assistant()], "rejected": [assistant(BAD)]}
BETTER_TEXT = {"chosen": ANSWER, "rejected": WORSE}
PAIR = {"chosen": chat(), "rejected": chat(0, BAD)}
PAIR_AS_JSON = {"chosen": json.dumps(chat()), "rejected": json.dumps(chat(0, BAD))}
OPENAI_PAIR = {
    "input": {"messages": [user()], "tools": []},
    "preferred_output": [assistant()],
    "non_preferred_output": [assistant(BAD)],
}
DIALOGUE_PAIR = {
    "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {ANSWER}",
    "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {WORSE}",
}

DPO_FORMS = [
    dpo("Alpaca pairs", {"instruction": ASKED, "input": "", **BETTER_TEXT}),
    dpo("a question", {"question": ASKED, **BETTER_TEXT}, file="rows.csv"),
    dpo("pairs of texts", {"prompt": ASKED, **BETTER_TEXT}),
    dpo("texts below messages", {"messages": [user()], **BETTER_TEXT}),
    dpo("responses j and k", {"question": ASKED, "response_j": ANSWER, "response_k": WORSE}),
    dpo(
        "ShareGPT pairs",
        {"conversations": [human()], "chosen": gpt(), "rejected": gpt(WORSE)},
        file="rows.json",
    ),
    dpo("ShareGPT dialogues", {"chosen": [human(), gpt()], "rejected": [human(), gpt(WORSE)]}),
    dpo("a prompt that the pair repeats", {"prompt": ASKED, **PAIR}),
    dpo("a text prompt", {"prompt": ASKED, **BETTER_MESSAGE}),
    dpo("a prompt of messages", {"prompt": [user()], **BETTER_MESSAGE}),
    dpo("single messages", {"prompt": [user()], "chosen": assistant(), "rejected": assistant(BAD)}),
    dpo("messages as the prompt", {"messages": [user()], **BETTER_MESSAGE}),
    dpo("pairs as JSON", PAIR_AS_JSON),
    dpo("preferences as OpenAI has them", OPENAI_PAIR),
    dpo("dialogues as texts", DIALOGUE_PAIR),
]
FORMS = [*SFT_FORMS, *DPO_FORMS]

ABOUT_ROWS = frozenset(
    "bad-data data-columns data-types data-file no-prompt prompt-twice no-answers empty-answers "
    "odd-roles odd-messages equal-pairs no-chat-format".split()
)


def convert(source: str, *options: str) -> list[Row]:
    """Convert to converted/train.jsonl; the rows there."""
    words = ["data", "convert", source, "-o", "converted/train.jsonl", *options]
    assert main(words) == Exit.OK
    return [json.loads(line) for line in Path("converted/train.jsonl").read_text().splitlines()]


def trl_arguments() -> dict[str, Any]:
    return {"dataset_name": "converted", "report_to": "none"}


def open_instruct_arguments(stage: str) -> dict[str, Any]:
    mixer = "dataset_mixer_list" if stage == "sft" else "mixer_list"
    return {
        mixer: ["converted/train.jsonl", "1.0"],
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }


def row_findings(stage: str, backend: str, args: dict[str, Any], capsys: Text) -> list[Row]:
    """What `validate-config` says about the rows of a stage, but for its notes."""
    content = {
        "stage": stage,
        "backend": backend,
        "deepspeed": "none",
        "args": {"model_name_or_path": "org/model", "output_dir": "output", **args},
    }
    Path("stage.yaml").write_text(json.dumps(content))
    capsys.readouterr()

    main(["validate-config", "stage.yaml", "--format", "json"])

    findings = json.loads(capsys.readouterr().out)["findings"]
    about_rows = []
    for finding in findings:
        if finding["code"] in ABOUT_ROWS and finding["severity"] != "note":
            about_rows.append(finding)
    return about_rows


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.stage}-{form.name}")
def test_a_known_form_becomes_rows_without_a_finding(
    form: Form, write: Write, capsys: Text
) -> None:
    write(form.file, form.content())

    rows = convert(form.file)

    assert rows == [form.converted] * ROWS
    assert row_findings(form.stage, "trl", trl_arguments(), capsys) == []
    arguments = open_instruct_arguments(form.stage)
    assert row_findings(form.stage, "open_instruct", arguments, capsys) == []


@pytest.mark.slow
@pytest.mark.training
def test_the_trainer_takes_the_converted_rows(write: Write, demo_assets: Path) -> None:
    different = {json.dumps(form.converted): form for form in FORMS}
    requests = []
    for number, form in enumerate(different.values()):
        write(f"{number}/train.jsonl", lines([form.converted] * ROWS))
        requests.append({"stage": form.stage, "data": str(number), "args": {}})

    answers = ask_process("real_rows.py", str(demo_assets / "model"), requests=requests)

    for form, answer in zip(different.values(), answers, strict=True):
        assert answer["error"] is None, form.name
        assert len(answer["rows"]) == ROWS, form.name
        for texts in answer["rows"]:
            assert "<|im_start|>user" in texts[0], form.name
            assert QUESTION in texts[0], form.name
            assert GOOD in "".join(texts[:2]), form.name
            assert form.stage == "sft" or BAD in texts[2], form.name


@pytest.mark.parametrize(
    ("stage", "row", "remedy"),
    [
        pytest.param(
            "sft", {"prompt": QUESTION, "messages": chat(), **PAIR}, "`stage: dpo`", id="pairs"
        ),
        pytest.param("dpo", ALPACA, "`chosen`", id="answers"),
    ],
)
def test_init_offers_no_conversion_to_rows_of_the_other_stage(
    stage: str, row: Row, remedy: str, write: Write, capsys: Text
) -> None:
    write("data/train.jsonl", lines([row] * ROWS))
    words = ["init", stage, "--model", "org/model", "--data", "data", "--gpus", "1"]

    assert main([*words, "-o", "stage.yaml"]) == Exit.CONFIG

    error = capsys.readouterr().err
    assert remedy in error
    assert "data convert" not in error


def test_function_calls_of_sharegpt_become_tool_calls(write: Write) -> None:
    call = {"name": "add", "arguments": {"x": 1}}
    turns = [
        human(),
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "4"},
        gpt(),
    ]
    write("rows.jsonl", lines([{"conversations": turns, "tools": "[]"}]))

    (row,) = convert("rows.jsonl")

    tool_calls = [{"type": "function", "function": call}]
    assert row["messages"] == [
        user(),
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
        message("tool", "4"),
        assistant(),
    ]


def test_rows_of_another_form_are_refused_all_at_once(write: Write, capsys: Text) -> None:
    without_output = {"instruction": "x", "input": ""}
    without_instruction = {"instruction": None, "output": "x"}
    odd_rows: list[Any] = [without_output, [1], without_instruction]
    write("rows.jsonl", lines([ALPACA] * ROWS + odd_rows))

    words = ["data", "convert", "rows.jsonl", "-o", "converted/train.jsonl"]
    assert main(words) == Exit.CONFIG
    error = capsys.readouterr().err
    for line in (9, 10, 11):
        assert f"rows.jsonl:{line}" in error
    assert "--skip" in error
    assert not list(Path("converted").glob("*"))

    assert len(convert("rows.jsonl", "--skip")) == ROWS
    assert "3 rows left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "output", "code"),
    [
        ("odd.jsonl", "new.jsonl", "unknown-form"),
        ("empty.jsonl", "new.jsonl", "unknown-form"),
        ("missing.jsonl", "new.jsonl", "no-such-data"),
        ("folder", "new.jsonl", "no-such-data"),
        ("good.jsonl", "good.jsonl", "output-exists"),
        ("good.jsonl", "new.json", "bad-output"),
    ],
)
def test_a_conversion_that_is_refused_writes_nothing(
    source: str, output: str, code: str, write: Write, capsys: Text
) -> None:
    write("odd.jsonl", lines([{"x": 1}]))
    write("empty.jsonl", b"")
    good = write("good.jsonl", lines([ALPACA]))
    Path("folder").mkdir()

    assert main(["data", "convert", source, "-o", output]) == Exit.USAGE

    assert code in capsys.readouterr().err
    assert good.read_bytes() == lines([ALPACA])
    assert not Path("new.jsonl").exists()


def test_a_folder_is_converted_by_its_split(write: Write) -> None:
    write("data/train.jsonl", lines([ALPACA] * ROWS))
    write("data/test.jsonl", lines([ALPACA]))

    assert len(convert("data")) == ROWS
    Path("converted/train.jsonl").unlink()
    assert len(convert("data", "--split", "test")) == 1
