"""What launch says of rows against what open-instruct's own functions make of the same files.

They refuse the file exactly where launch has an error (also where every row is dropped); rows are
dropped, lack the question or have equal answers exactly where launch warns.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import STAND_INS
from real_process import ask_process
from row_files import (
    BAD,
    GOOD,
    QUESTION,
    Row,
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
from trl_row_cases import with_row

from launcher.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.training]

ABOUT_ROWS = frozenset(
    "bad-data data-columns data-types no-prompt no-answers empty-answers odd-messages odd-roles "
    "equal-pairs".split()
)


@dataclass(frozen=True)
class Case:
    """A file, and the stage that trains on it.

    With `warns` launch may warn of what is refused, or of what happens to train well.
    """

    name: str
    stage: str
    content: bytes
    warns: bool = False
    file: str = "rows.jsonl"


def sft(name: str, rows: list[Any]) -> Case:
    return Case(name, "sft", lines(rows))


def odd_chat(name: str, row: Row) -> Case:
    """Conversations, but for the last row."""
    return sft(name, with_row(chats(), row))


def odd_content(name: str, content: Any) -> Case:
    """Conversations, the last answer of which has this content."""
    messages = [user(), {"role": "assistant", "content": content}]
    rows = with_row(chats(), {"messages": messages})
    return Case(name, "sft", lines(rows), warns=True)


def dpo(name: str, rows: list[Row]) -> Case:
    return Case(name, "dpo", lines(rows))


def odd_pair(name: str, chosen: Any, rejected: Any) -> Case:
    """Pairs of conversations, but for the last row."""
    return dpo(name, with_row(pairs(), {"chosen": chosen, "rejected": rejected}))


SYSTEM = {"role": "system", "content": "s"}
BOT = {"role": "bot", "content": GOOD}
HUMAN = {"from": "human", "value": "x"}
ANSWERS = {"chosen": [assistant()], "rejected": [assistant(BAD)]}

CASES = [
    sft("chats", chats()),
    Case("array", "sft", array(chats())),
    Case("parquet", "sft", parquet(chats()), file="rows.parquet"),
    Case("broken line", "sft", lines(chats()) + b"{\n" + lines(chats())),
    Case("empty file", "sft", b""),
    sft("texts", texts()),
    sft("pairs for sft", pairs()),
    sft("from and value", [{"messages": [HUMAN]}] * 4),
    sft("conversations", [{"conversations": chat()}] * 4),
    sft("messages as text", [{"messages": json.dumps(chat())}] * 4),
    odd_chat("text in one row", {"messages": "x"}),
    odd_chat("null messages", {"messages": None}),
    odd_chat("missing messages", {"x": 1}),
    odd_chat("empty messages", {"messages": []}),
    odd_chat("texts as messages", {"messages": ["x"]}),
    odd_chat("question alone", {"messages": [user()]}),
    sft("questions alone", [{"messages": [user()]}] * 4),
    odd_content("empty answer", ""),
    odd_content("null content", None),
    odd_content("number content", 5),
    odd_chat("odd role", {"messages": [user(), BOT]}),
    sft("answers of bot", [{"messages": [user(), BOT]}] * 4),
    sft("system late", with_row(chats(200), {"messages": [SYSTEM, *chat()]}, 160)),
    sft("prompt beside messages", [{"prompt": QUESTION, **row} for row in chats()]),
    dpo("pairs", pairs()),
    Case("pairs in parquet", "dpo", parquet(pairs()), file="rows.parquet"),
    dpo("prompt beside pairs", [{"prompt": QUESTION, **row} for row in pairs()]),
    dpo("text pairs", text_pairs()),
    dpo("chats for dpo", chats()),
    dpo("answers alone", [{"prompt": [user()], **ANSWERS}] * 4),
    odd_pair("answers alone in one row", [assistant()], [assistant(BAD)]),
    odd_pair("equal pair", chat(), chat()),
    odd_pair("null rejected", chat(), None),
    odd_pair("empty rejected", chat(), []),
    odd_pair("rejected without an answer", chat(), [user()]),
    dpo("text rejected", [{"chosen": chat(), "rejected": BAD}] * 4),
]


@dataclass(frozen=True)
class Answer:
    """Why open-instruct refuses a file, else how many rows it has, and the texts of those kept."""

    error: str | None
    total: int
    rows: list[list[str]]

    @property
    def is_refusal(self) -> bool:
        return self.error is not None or not self.rows

    def faults(self) -> set[str]:
        """What becomes of rows that was not meant."""
        faults = set()
        if len(self.rows) < self.total:
            faults.add("dropped rows")
        for row in self.rows:
            if QUESTION not in row[0]:
                faults.add("no question")
            if GOOD not in row[1]:
                faults.add("no answer")
            if row[2:] == row[:2]:
                faults.add("equal answers")
        return faults


def file_of(case: Case) -> str:
    return f"{CASES.index(case)}/{case.file}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of all cases."""
    root = tmp_path_factory.mktemp("rows")
    for case in CASES:
        path = root / file_of(case)
        path.parent.mkdir()
        path.write_bytes(case.content)
    return root


@pytest.fixture(scope="module")
def answers(place: Path, demo_assets: Path, checkout: Path) -> dict[str, Answer]:
    """The answer of open-instruct's functions to each case, by its file."""
    requests = [{"stage": case.stage, "data": file_of(case)} for case in CASES]
    answers = ask_process(
        "real_open_instruct_rows.py",
        str(checkout),
        str(demo_assets / "model"),
        requests=requests,
        folder=place,
        environ={**os.environ, "PYTHONPATH": STAND_INS, "HF_HOME": str(place / "hf")},
    )
    by_file = {}
    for request, answer in zip(requests, answers, strict=True):
        by_file[request["data"]] = Answer(**answer)
    return by_file


def severities_of(case: Case, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The severities of what launch says of the rows of a case, but for notes."""
    mixer = "dataset_mixer_list" if case.stage == "sft" else "mixer_list"
    args = {
        "model_name_or_path": "org/model",
        "output_dir": "output",
        mixer: [file_of(case), "1.0"],
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }
    content = {"stage": case.stage, "backend": "open_instruct", "deepspeed": "none", "args": args}
    Path("stage.yaml").write_text(json.dumps(content))
    main(["validate-config", "stage.yaml", "--format", "json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    severities = {finding["severity"] for finding in findings if finding["code"] in ABOUT_ROWS}
    return severities - {"note"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.stage}-{case.name}")
def test_rows_are_judged_as_open_instruct_takes_them(
    case: Case,
    place: Path,
    answers: dict[str, Answer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    answer = answers[file_of(case)]

    severities = severities_of(case, capsys)

    if answer.is_refusal:
        assert "error" in severities or (case.warns and severities), answer.error
        return
    faults = answer.faults()
    assert "error" not in severities, faults
    if faults:
        assert severities, faults
    elif not case.warns:
        assert not severities
