"""Samples with a process that stands in for the one that loads models: whatever it does, a record is left."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved

from launcher.lifecycle import sampling
from launcher.machine.python import Trainer
from launcher.runs import rundir
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder
from launcher.trained import model, samples

PROMPTS = ("What is a list?", "What is a set?")

ANSWER = """
def answer(number, when):
    say(event="sample", number=number, when=when, text=f"{when} {number}", tokens=3, ended="stop")
"""
ALL = (
    ANSWER + "for when in ('after', 'before'): answer(0, when); answer(1, when)\nsay(event='done')"
)
DIES = ANSWER + "answer(0, 'after'); sys.exit(3)"
HANGS = ANSWER + "answer(0, 'after'); time.sleep(600)"
TORN = ANSWER + "answer(0, 'after'); print('{\"event\": \"sam', flush=True)"
FAILS = "say(event='failed', type='OutOfMemoryError', message='CUDA out of memory', code=None, out_of_memory=True)"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run that asks for two samples."""
    monkeypatch.chdir(tmp_path)
    saved.model(tmp_path / "out")
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}
        for text in PROMPTS
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "dataset_name": "data",
        "dataset_train_split": "train",
    }
    manifest = made_runs.manifest(
        stage="sft", output=str(tmp_path / "out"), cwd=str(tmp_path), samples=2,
        args={name: {"value": value, "origin": "a.yaml:3"} for name, value in given.items()},
    )  # fmt: skip
    return RunFolder(made_runs.made(rundir.runs_root() / "20260101T000000Z-sft-a", told=manifest))


@pytest.fixture
def standing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a script with this body take the place of the trainer's Python."""

    def stand_in(body: str) -> None:
        python = tmp_path / "python"
        head = f"#!{sys.executable}\nimport json, sys, time\nsys.stdin.readline()\n"
        head += "def say(**event): print(json.dumps(event), flush=True)\n"
        python.write_text(head + body)
        python.chmod(0o755)
        monkeypatch.setattr(
            model, "trainer_of", lambda *_: Trainer(python=python, source="a stand-in")
        )

    return stand_in


def record_of(run: RunFolder) -> dict[str, Any]:
    samples.take(run, {}, lambda _: None)
    record: dict[str, Any] = json.loads(run.samples.read_text())
    return record


def answers(record: dict[str, Any]) -> list[str | None]:
    kept = [prompt[when] for prompt in record["prompts"] for when in ("before", "after")]
    return [None if answer is None else answer["text"] for answer in kept]


def test_each_prompt_has_both_answers(run: RunFolder, standing_in: Callable[[str], None]) -> None:
    standing_in(ALL)
    record = record_of(run)
    assert record["failed"] is None
    assert [prompt["messages"][0]["content"] for prompt in record["prompts"]] == [*PROMPTS]
    assert answers(record) == ["before 0", "after 0", "before 1", "after 1"]


@pytest.mark.parametrize(
    ("body", "reason", "kept"),
    [
        (DIES, "ended with 3", True),
        (TORN, "the process that had loaded the model", True),
        (HANGS, "it took longer than", True),
        (FAILS, "does not fit: CUDA out of memory", False),
    ],
    ids=["dies", "torn", "hangs", "out of memory"],
)
def test_what_there_is_stays_with_the_reason(
    body: str, reason: str, kept: bool, run: RunFolder, standing_in: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(samples, "LIMIT_S", 2.0)
    standing_in(body)
    record = record_of(run)
    assert reason in record["failed"]
    assert answers(record) == [None, "after 0" if kept else None, None, None]


def test_an_interrupt_ends_it(
    run: RunFolder, standing_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "_ask", interrupt)
    assert record_of(run)["failed"] == "it was interrupted"


def attempt_of(run: RunFolder) -> Attempt:
    return Attempt(
        number=1, argv=(), env={}, environ={}, cwd=str(Path.cwd()), stage="sft", backend="trl", title="sft"
    )  # fmt: skip


def test_the_page_shows_them_and_the_verdict_stays(
    run: RunFolder, standing_in: Callable[[str], None]
) -> None:
    standing_in(ALL)
    run.verdict.write_text('{"status": "fail"}')
    sampling.take_samples(run, attempt_of(run))
    assert "after 1" in run.report.read_text()
    assert run.verdict.read_text() == '{"status": "fail"}'


def test_no_error_leaves_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("whatever")

    monkeypatch.setattr(samples, "take", fail)
    sampling.take_samples(run, attempt_of(run))
    assert not run.samples.exists()


@pytest.mark.parametrize("changes", [{"samples": 0}, {}])
def test_a_run_that_asks_for_none_has_none(changes: dict[str, Any], tmp_path: Path) -> None:
    manifest = made_runs.manifest(**changes)
    run = RunFolder(made_runs.made(rundir.runs_root() / "20260101T000000Z-sft-a", told=manifest))
    assert not samples.is_due(run)


def test_trials_have_none(run: RunFolder) -> None:
    assert samples.is_due(run)
    (run.path.parent / rundir.BENCH_RECORD).write_text("{}")
    assert not samples.is_due(run)
