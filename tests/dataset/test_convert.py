"""`launch data convert`: rows of each known form become rows that the trainers take as they are meant."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, SUPPORT, Write
from row_files import (
    BAD,
    GOOD,
    QUESTION,
    array,
    assistant,
    chat,
    lines,
    parquet,
    rows_of,
    table,
    user,
)

from launcher.cli.main import main
from launcher.errors import Exit


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def turn(role: str, value: str) -> dict[str, str]:
    return {"from": role, "value": value}


def human(number: int) -> dict[str, str]:
    return turn("human", f"{QUESTION} {number}?")


def gpt(number: int, word: str = GOOD) -> dict[str, str]:
    return turn("gpt", f"{word} {number}")


def asked(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{QUESTION} {number}?"}


SYSTEM = {"role": "system", "content": "be brief"}
ALPACA = rows_of(
    lambda n: {"instruction": f"{QUESTION} {n}?", "input": "", "output": f"{GOOD} {n}"}
)
WITH_INPUT = rows_of(
    lambda n: {"instruction": f"{QUESTION}", "input": f"{n}?", "output": f"{GOOD} {n}"}
)
QUESTIONS = rows_of(lambda n: {"question": f"{QUESTION} {n}?", "answer": f"{GOOD} {n}"})
CHAT = {"messages": chat(0)}
PAIR = {"chosen": chat(0), "rejected": chat(0, BAD)}

# stage, file, its content, and the first row that is written
FORMS: list[tuple[str, str, bytes, dict[str, Any]]] = [
    ("sft", "a.json", array(ALPACA), CHAT), ("sft", "a.jsonl", lines(ALPACA), CHAT),
    ("sft", "a.csv", table(ALPACA), CHAT), ("sft", "a.csv", table(QUESTIONS), CHAT),
    ("sft", "a.tsv", table(QUESTIONS, "\t"), CHAT), ("sft", "a.parquet", parquet(QUESTIONS), CHAT),
    ("sft", "a.json", array(WITH_INPUT), {"messages": [
        {"role": "user", "content": f"{QUESTION}\n\n0?"}, assistant()]}),
    ("sft", "a.jsonl", lines([{"system": "be brief", **row} for row in ALPACA]), {"messages": [SYSTEM, *chat()]}),
    ("sft", "a.json", array(rows_of(lambda n: {"conversations": [human(n), gpt(n)]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"messages": [human(n), gpt(n)]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"system": "be brief", "conversations": [human(n), gpt(n)]})),
     {"messages": [SYSTEM, *chat()]}),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"conversations": chat(n)})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"messages": json.dumps(chat(n))})), CHAT),
    ("sft", "a.csv", table(rows_of(lambda n: {"messages": json.dumps(chat(n))})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"prompt": f"{QUESTION} {n}?", "messages": chat(n)})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"prompt": f"{QUESTION} {n}?", "response": f"{GOOD} {n}"})), CHAT),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "instruction": f"{QUESTION} {n}?", "input": "", "chosen": f"{GOOD} {n}", "rejected": f"{BAD} {n}"})), PAIR),
    ("dpo", "a.csv", table(rows_of(lambda n: {
        "question": f"{QUESTION} {n}?", "chosen": f"{GOOD} {n}", "rejected": f"{BAD} {n}"})), PAIR),
    ("dpo", "a.json", array(rows_of(lambda n: {
        "conversations": [human(n)], "chosen": gpt(n), "rejected": gpt(n, BAD)})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {"chosen": [human(n), gpt(n)], "rejected": [human(n), gpt(n, BAD)]})),
     PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "prompt": f"{QUESTION} {n}?", "chosen": chat(n), "rejected": chat(n, BAD)})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "prompt": f"{QUESTION} {n}?", "chosen": [assistant(GOOD, n)], "rejected": [assistant(BAD, n)]})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "messages": [asked(n)], "chosen": [assistant(GOOD, n)], "rejected": [assistant(BAD, n)]})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "chosen": json.dumps(chat(n)), "rejected": json.dumps(chat(n, BAD))})), PAIR),
    # what stands beside the question goes with it
    ("sft", "a.jsonl", lines([{"history": [["a", "b"]], **row} for row in ALPACA]), {"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *chat()]}),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {
        "instruction": QUESTION, "context": f"{n}?", "response": f"{GOOD} {n}"})),
     {"messages": [{"role": "user", "content": f"{QUESTION}\n\n0?"}, assistant()]}),
    # other names of columns, keys and roles
    ("sft", "a.csv", table(rows_of(lambda n: {"Question": f"{QUESTION} {n}?", "Answer": f"{GOOD} {n}"})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"message_1": f"{QUESTION} {n}?", "message_2": f"{GOOD} {n}"})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"Messages": chat(n)})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"conversation": chat(n)})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"items": [human(n), gpt(n)]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {
        "conversation": [{"input": f"{QUESTION} {n}?", "output": f"{GOOD} {n}"}]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"data": [f"{QUESTION} {n}?", f"{GOOD} {n}"]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"conversations": [turn("human", f"{QUESTION} {n}?"),
        turn("bard", f"{GOOD} {n}")]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"messages": [
        {"role": "Human", "content": f"{QUESTION} {n}?"}, {"role": "AI", "content": f"{GOOD} {n}"}]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"messages": [
        {"author": "user", "text": f"{QUESTION} {n}?"}, {"author": "assistant", "text": f"{GOOD} {n}"}]})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"messages": {
        "role": ["user", "assistant"], "content": [f"{QUESTION} {n}?", f"{GOOD} {n}"]}})), CHAT),
    ("sft", "a.jsonl", lines(rows_of(lambda n: {"prompt": [asked(n)], "completion": f"{GOOD} {n}"})), CHAT),
    # messages as Python and numpy show them
    ("sft", "a.csv", table(rows_of(lambda n: {"messages": repr(chat(n))})), CHAT),
    ("sft", "a.csv", table(rows_of(lambda n: {"messages": repr(chat(n)).replace("}, {", "}\n {")})), CHAT),
    # pairs
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "prompt": f"{QUESTION} {n}?", "chosen": f"{GOOD} {n}", "rejected": f"{BAD} {n}"})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "prompt": [asked(n)], "chosen": [assistant(GOOD, n)], "rejected": [assistant(BAD, n)]})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "prompt": [asked(n)], "chosen": assistant(GOOD, n), "rejected": assistant(BAD, n)})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "messages": [asked(n)], "chosen": f"{GOOD} {n}", "rejected": f"{BAD} {n}"})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "question": f"{QUESTION} {n}?", "response_j": f"{GOOD} {n}", "response_k": f"{BAD} {n}"})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "input": {"messages": [asked(n)], "tools": []}, "preferred_output": [assistant(GOOD, n)],
        "non_preferred_output": [assistant(BAD, n)]})), PAIR),
    ("dpo", "a.jsonl", lines(rows_of(lambda n: {
        "chosen": f"\n\nHuman: {QUESTION} {n}?\n\nAssistant: {GOOD} {n}",
        "rejected": f"\n\nHuman: {QUESTION} {n}?\n\nAssistant: {BAD} {n}"})), PAIR),
]  # fmt: skip


def convert(name: str, *words: str) -> list[dict[str, Any]]:
    assert main(["data", "convert", name, "-o", "converted/train.jsonl", *words]) == Exit.OK
    return [json.loads(line) for line in Path("converted/train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("stage", "name", "content", "first"), FORMS)
def test_known_forms_are_converted(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    name: str,
    content: bytes,
    first: dict[str, Any],
) -> None:
    write(name, content)
    rows = convert(name)
    assert len(rows) == 8
    assert rows[0] == first
    capsys.readouterr()
    for backend, data in (("trl", "converted"), ("open_instruct", "converted/train.jsonl")):
        told = findings(capsys, stage, backend, data)
        assert not [one for one in told if one["severity"] != "note"], told


def findings(
    capsys: pytest.CaptureFixture[str], stage: str, backend: str, data: str
) -> list[dict[str, Any]]:
    args: dict[str, Any] = {"model_name_or_path": "org/model", "output_dir": "output"}
    if backend == "trl":
        args |= {"dataset_name": data, "report_to": "none"}
    else:
        key = "dataset_mixer_list" if stage == "sft" else "mixer_list"
        args |= {key: [data, "1.0"], "push_to_hub": False, "try_launch_beaker_eval_jobs": False}
    Path("s.yaml").write_text(
        json.dumps({"stage": stage, "backend": backend, "deepspeed": "none", "args": args})
    )
    main(["validate-config", "s.yaml", "--format", "json"])
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return [one for one in told if one["code"] in CODES]


CODES = frozenset(
    """
    bad-data data-columns data-types data-file no-prompt prompt-twice no-answers empty-answers odd-roles odd-messages
    equal-pairs no-chat-format
    """.split()
)


@pytest.mark.slow
@pytest.mark.training
def test_the_trainer_takes_what_was_converted(
    write: Write, demo_assets: Path, tmp_path: Path
) -> None:
    requests = []
    for number, (stage, name, content, _) in enumerate(FORMS):
        write(f"{number}/{name}", content)
        output = f"converted{number}/train.jsonl"
        assert main(["data", "convert", f"{number}/{name}", "-o", output]) == Exit.OK
        requests.append(json.dumps({"stage": stage, "data": f"converted{number}", "args": {}}))
    words = [sys.executable, str(SUPPORT / "real_rows.py"), str(demo_assets / "model")]
    done = subprocess.run(
        words, input="\n".join(requests), capture_output=True, text=True, timeout=PATIENCE_S
    )
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(FORMS), done.stderr
    for (stage, _, _, first), answer in zip(FORMS, answers, strict=True):
        assert answer["error"] is None, (first, answer)
        assert len(answer["rows"]) == 8
        for row in answer["rows"]:
            assert "<|im_start|>user" in row[0]
            assert QUESTION in row[0]
            assert GOOD in "".join(row[:2])
            assert stage == "sft" or BAD in row[2]


def test_init_offers_no_rows_of_the_other_stage(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("pairs/train.jsonl", lines([{"prompt": QUESTION, "messages": chat(), **PAIR}] * 8))
    write("alpaca/train.jsonl", lines(ALPACA))
    for stage, data, remedy in (("sft", "pairs", "`stage: dpo`"), ("dpo", "alpaca", "`chosen`")):
        words = [
            "init",
            stage,
            "--model",
            "org/model",
            "--data",
            data,
            "--gpus",
            "1",
            "-o",
            f"{data}.yaml",
        ]
        assert main(words) == Exit.CONFIG
        told = capsys.readouterr().err
        assert remedy in told
        assert "data convert" not in told


def test_tools_of_sharegpt_become_calls(write: Write) -> None:
    call = {"name": "add", "arguments": {"x": 1}}
    turns = [human(0), turn("function_call", json.dumps(call)), turn("observation", "4"), gpt(0)]
    write("a.jsonl", lines([{"conversations": turns, "tools": "[]"}]))
    (row,) = convert("a.jsonl")
    assert row["messages"] == [
        user(),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "4"},
        assistant(),
    ]


def test_rows_of_another_form_are_refused_all_at_once(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: list[Any] = [{"instruction": "x", "input": ""}, [1], {"instruction": None, "output": "x"}]
    write("a.jsonl", lines([*ALPACA, *odd]))
    assert main(["data", "convert", "a.jsonl", "-o", "converted/train.jsonl"]) == Exit.CONFIG
    told = capsys.readouterr().err
    assert all(f"a.jsonl:{line}" in told for line in (9, 10, 11))
    assert "--skip" in told
    assert not list(Path("converted").glob("*"))
    assert len(convert("a.jsonl", "--skip")) == 8
    assert "3 rows left out" in capsys.readouterr().out


def test_what_cannot_be_converted(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("odd.jsonl", lines([{"x": 1}]))
    write("good.jsonl", lines(ALPACA))
    write("empty.jsonl", b"")
    (Path("folder")).mkdir()
    for words, code in (
        (("odd.jsonl", "b.jsonl"), "unknown-form"), (("gone.jsonl", "b.jsonl"), "no-such-data"),
        (("good.jsonl", "good.jsonl"), "output-exists"), (("good.jsonl", "b.json"), "bad-output"),
        (("folder", "b.jsonl"), "no-such-data"), (("empty.jsonl", "b.jsonl"), "unknown-form"),
    ):  # fmt: skip
        assert main(["data", "convert", words[0], "-o", words[1]]) == Exit.USAGE
        assert code in capsys.readouterr().err, words
    assert Path("good.jsonl").read_bytes() == lines(ALPACA)


def test_a_folder_is_converted_by_its_split(write: Write) -> None:
    write("data/train.jsonl", lines(ALPACA))
    write("data/test.jsonl", lines(ALPACA[:2]))
    assert len(convert("data")) == 8
    Path("converted/train.jsonl").unlink()
    assert len(convert("data", "--split", "test")) == 2
