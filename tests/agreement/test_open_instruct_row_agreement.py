"""What launch says of rows against what open-instruct's own functions make of the same files.

They refuse the file exactly where launch has an error (also where every row is dropped), and rows are dropped, lack
the question or have equal answers exactly where launch warns.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, STAND_INS, SUPPORT
from row_files import (
    BAD,
    GOOD,
    QUESTION,
    array,
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

pytestmark = [pytest.mark.slow, pytest.mark.training]

DROPPING = frozenset(
    """
    bad-data data-columns data-types no-prompt no-answers empty-answers odd-messages odd-roles equal-pairs
    """.split()
)
SYSTEM = {"role": "system", "content": "s"}


def with_row(rows: list[dict[str, Any]], row: Any, at: int = -1) -> bytes:
    changed: list[Any] = list(rows)
    changed[at] = row
    return lines(changed)


def answered(content: Any) -> dict[str, Any]:
    return {"messages": [user(), {"role": "assistant", "content": content}]}


# name, stage, file, content, and whether launch may warn of what is refused, or the other way round
CASES: list[tuple[str, str, str, bytes, bool]] = [
    ("chats", "sft", "a.jsonl", lines(chats()), False),
    ("array", "sft", "a.jsonl", array(chats()), False),
    ("parquet", "sft", "a.parquet", parquet(chats()), False),
    ("broken line", "sft", "a.jsonl", lines(chats()) + b"{\n" + lines(chats()), False),
    ("empty file", "sft", "a.jsonl", b"", False),
    ("texts", "sft", "a.jsonl", lines(texts()), False),
    ("pairs for sft", "sft", "a.jsonl", lines(pairs()), False),
    ("from and value", "sft", "a.jsonl", lines([{"messages": [{"from": "human", "value": "x"}]}] * 4), False),
    ("conversations", "sft", "a.jsonl", lines([{"conversations": chat()}] * 4), False),
    ("messages as text", "sft", "a.jsonl", lines([{"messages": json.dumps(chat())}] * 4), False),
    ("text in one row", "sft", "a.jsonl", with_row(chats(), {"messages": "x"}), False),
    ("null messages", "sft", "a.jsonl", with_row(chats(), {"messages": None}), False),
    ("missing messages", "sft", "a.jsonl", with_row(chats(), {"x": 1}), False),
    ("empty messages", "sft", "a.jsonl", with_row(chats(), {"messages": []}), False),
    ("texts as messages", "sft", "a.jsonl", with_row(chats(), {"messages": ["x"]}), False),
    ("question alone", "sft", "a.jsonl", with_row(chats(), {"messages": [user()]}), False),
    ("questions alone", "sft", "a.jsonl", lines([{"messages": [user()]}] * 4), False),
    ("empty answer", "sft", "a.jsonl", with_row(chats(), answered("")), True),
    ("null content", "sft", "a.jsonl", with_row(chats(), answered(None)), True),
    ("number content", "sft", "a.jsonl", with_row(chats(), answered(5)), True),
    ("odd role", "sft", "a.jsonl", with_row(chats(), {"messages": [user(), {"role": "bot", "content": GOOD}]}), False),
    ("answers of bot", "sft", "a.jsonl", lines([{"messages": [user(), {"role": "bot", "content": GOOD}]}] * 4), False),
    ("system late", "sft", "a.jsonl", with_row(chats(200), {"messages": [SYSTEM, *chat()]}, 160), False),
    ("prompt beside messages", "sft", "a.jsonl", lines([{"prompt": QUESTION, **row} for row in chats()]), False),
    ("pairs", "dpo", "a.jsonl", lines(pairs()), False),
    ("pairs in parquet", "dpo", "a.parquet", parquet(pairs()), False),
    ("prompt beside pairs", "dpo", "a.jsonl", lines([{"prompt": QUESTION, **row} for row in pairs()]), False),
    ("text pairs", "dpo", "a.jsonl", lines(text_pairs()), False),
    ("chats for dpo", "dpo", "a.jsonl", lines(chats()), False),
    ("answers alone", "dpo", "a.jsonl", lines(
        [{"prompt": [user()], "chosen": [assistant()], "rejected": [assistant(BAD)]}] * 4), False),
    ("answers alone in one row", "dpo", "a.jsonl", with_row(
        pairs(), {"chosen": [assistant()], "rejected": [assistant(BAD)]}), False),
    ("equal pair", "dpo", "a.jsonl", with_row(pairs(), {"chosen": chat(), "rejected": chat()}), False),
    ("null rejected", "dpo", "a.jsonl", with_row(pairs(), {"chosen": chat(), "rejected": None}), False),
    ("empty rejected", "dpo", "a.jsonl", with_row(pairs(), {"chosen": chat(), "rejected": []}), False),
    ("rejected without an answer", "dpo", "a.jsonl", with_row(
        pairs(), {"chosen": chat(), "rejected": [user()]}), False),
    ("text rejected", "dpo", "a.jsonl", lines([{"chosen": chat(), "rejected": BAD}] * 4), False),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for number, (_, _, file, content, _) in enumerate(CASES):
        path = folder / str(number) / file
        path.parent.mkdir()
        path.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def truth(place: Path, demo_assets: Path, checkout: Path) -> list[dict[str, Any]]:
    requests = [
        json.dumps({"stage": stage, "data": f"{number}/{file}"})
        for number, (_, stage, file, _, _) in enumerate(CASES)
    ]
    script = str(SUPPORT / "real_open_instruct_rows.py")
    words = [sys.executable, script, str(checkout), str(demo_assets / "model")]
    done = subprocess.run(
        words, cwd=place, input="\n".join(requests), capture_output=True, text=True, timeout=2 * PATIENCE_S,
        env={**os.environ, "PYTHONPATH": STAND_INS, "HF_HOME": str(place / "hf")},
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES), done.stderr
    return answers


def unmeant(answer: Mapping[str, Any]) -> set[str]:
    """What becomes of rows that was not meant."""
    wrongs = set()
    if len(answer["rows"]) < answer["total"]:
        wrongs.add("dropped rows")
    for row in answer["rows"]:
        if QUESTION not in row[0]:
            wrongs.add("no question")
        if GOOD not in row[1]:
            wrongs.add("no answer")
        if row[2:] == row[:2]:
            wrongs.add("equal answers")
    return wrongs


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{case[1]}-{case[0]}" for case in CASES]
)
def test_rows_are_judged_as_open_instruct_takes_them(
    number: int, place: Path, truth: list[dict[str, Any]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, stage, file, _, warns = CASES[number]
    answer = truth[number]
    monkeypatch.chdir(place)
    key = "dataset_mixer_list" if stage == "sft" else "mixer_list"
    args = {
        "model_name_or_path": "org/model", "output_dir": "output", key: [f"{number}/{file}", "1.0"],
        "push_to_hub": False, "try_launch_beaker_eval_jobs": False,
    }  # fmt: skip
    content = {"stage": stage, "backend": "open_instruct", "deepspeed": "none", "args": args}
    Path("stage.yaml").write_text(json.dumps(content))
    main(["validate-config", "stage.yaml", "--format", "json"])
    told = [
        one for one in json.loads(capsys.readouterr().out)["findings"] if one["code"] in DROPPING
    ]
    severities = {one["severity"] for one in told} - {"note"}
    if answer["error"] is not None or not answer["rows"]:
        assert "error" in severities or (warns and severities), (answer, told)
        return
    wrongs = unmeant(answer)
    assert "error" not in severities, (wrongs, told)
    if wrongs:
        assert severities, (wrongs, answer["rows"][-1])
    elif not warns:
        assert not severities, told
