"""What launch says of rows against what TRL's trainers make of the same files.

The real trainer refuses the rows exactly where launch has an error; it trains on something else
than what was meant (the question is missing or stands twice, an answer is missing, both answers are
equal) exactly where launch warns.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_process import ask_process
from row_files import BAD, GOOD, QUESTION
from trl_row_cases import CASES, Case

from launcher.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.training]

HARMLESS = frozenset({"repeated-rows", "no-chat-format", "unseen-data"})
"""What is said of rows that train as they are meant."""


@dataclass(frozen=True)
class Answer:
    """What the real trainer makes of a folder: why it refuses it, or the texts of each row."""

    error: str | None
    rows: list[list[str]]

    @property
    def is_refusal(self) -> bool:
        """A trainer that has dropped every row ends at its first step."""
        return self.error is not None or not self.rows


def folder_of(case: Case) -> str:
    return f"data/{CASES.index(case)}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of all cases."""
    root = tmp_path_factory.mktemp("rows")
    for case in CASES:
        for name, content in case.files.items():
            path = root / folder_of(case) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return root


@pytest.fixture(scope="module")
def answers(place: Path, demo_assets: Path) -> dict[str, Answer]:
    """The real trainers' answer to each case, by its folder; one process judges all."""
    requests = []
    for case in CASES:
        requests.append({"stage": case.stage, "data": folder_of(case), "args": case.args})
    model = str(demo_assets / "model")
    answers = ask_process("real_rows.py", model, requests=requests, folder=place)
    by_folder = {}
    for request, answer in zip(requests, answers, strict=True):
        by_folder[request["data"]] = Answer(**answer)
    return by_folder


def fault_of(stage: str, row: list[str]) -> str | None:
    """What a row trains on that was not meant."""
    prompt = row[0]
    prompt_and_answer = "".join(row[:2])
    if "<|im_start|>human" in prompt:
        return "roles that the template writes as they are"
    if stage == "dpo" and prompt.startswith('[{"'):
        return "messages as text"
    if QUESTION not in prompt:
        return "no question"
    if prompt_and_answer.count(QUESTION) > 1:
        return "the question twice"
    if GOOD not in prompt_and_answer:
        return "no answer"
    if stage == "dpo" and row[1] == row[2]:
        return "equal answers"
    if stage == "dpo" and BAD not in prompt + row[2]:
        return "no rejected answer"
    return None


def faults_of(stage: str, rows: Iterable[list[str]]) -> set[str]:
    faults = {fault_of(stage, row) for row in rows}
    return {fault for fault in faults if fault is not None}


def severities_of(case: Case, model: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The severities of what launch says of the rows of a case."""
    args = {
        "model_name_or_path": str(model),
        "dataset_name": folder_of(case),
        "output_dir": "output",
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        **case.args,
    }
    content = {"stage": case.stage, "backend": "trl", "deepspeed": "none", "args": args}
    Path("stage.yaml").write_text(json.dumps(content))
    main(["validate-config", "stage.yaml", "--format", "json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return {finding["severity"] for finding in findings if finding["code"] not in HARMLESS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.stage}-{case.name}")
def test_rows_are_judged_as_the_trainer_takes_them(
    case: Case,
    place: Path,
    answers: dict[str, Answer],
    demo_assets: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    answer = answers[folder_of(case)]

    severities = severities_of(case, demo_assets / "model", capsys)

    if answer.is_refusal:
        assert "error" in severities or (case.warns and "warning" in severities), answer.error
        return
    faults = faults_of(case.stage, answer.rows)
    if faults and case.refused:
        assert "error" in severities, faults
        return
    assert "error" not in severities, answer.rows[-1]
    if faults:
        assert "warning" in severities, (faults, answer.rows[-1])
    elif not case.warns:
        assert "warning" not in severities, answer.rows[-1]
