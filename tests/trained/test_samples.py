"""Samples with a process that stands for the one that loads models: a record is left always."""

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

PROMPTS = ["What is a list?", "What is a set?"]
STAND_IN = """#!{python}
import json, sys, time
sys.stdin.readline()
def say(**event):
    print(json.dumps(event), flush=True)
def answer(number, when):
    text = f"{{when}} {{number}}"
    say(event="sample", number=number, when=when, text=text, tokens=3, ended="stop")
"""
ANSWER_ALL = """
for when in ("after", "before"):
    answer(0, when)
    answer(1, when)
say(event="done")
"""
DIE = "answer(0, 'after'); sys.exit(3)"
HANG = "answer(0, 'after'); time.sleep(600)"
TEAR = "answer(0, 'after'); print('{\"event\": \"sam', flush=True)"
FAIL = "say(event='failed', type='E', message='CUDA out of memory', code=None, out_of_memory=True)"


def write_rows(path: Path) -> None:
    path.parent.mkdir()
    with path.open("w") as stream:
        for prompt in PROMPTS:
            question = {"role": "user", "content": prompt}
            answer = {"role": "assistant", "content": "b"}
            stream.write(json.dumps({"messages": [question, answer]}) + "\n")


def make_run(**manifest: Any) -> RunFolder:
    content = made_runs.manifest(stage="sft", cwd=str(Path.cwd()), **manifest)
    return RunFolder(
        made_runs.write_run(rundir.find_runs_root() / "20260101T000000Z-sft-a", record=content)
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run that asks for two samples."""
    monkeypatch.chdir(tmp_path)
    saved.model(tmp_path / "out")
    write_rows(tmp_path / "data" / "train.jsonl")
    values = {"model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "data"}
    arguments = {name: {"value": value, "origin": "a.yaml:3"} for name, value in values.items()}
    return make_run(output=str(tmp_path / "out"), samples=2, args=arguments)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a script with this body take the place of the trainer's Python."""

    def install(body: str) -> None:
        python = tmp_path / "python"
        python.write_text(STAND_IN.format(python=sys.executable) + body)
        python.chmod(0o755)
        trainer = Trainer(python=python, source="a stand-in")
        monkeypatch.setattr(model, "find_trainer", lambda *_: trainer)

    return install


def take_samples(run: RunFolder) -> dict[str, Any]:
    """The record that is left."""
    samples.take(run, {}, lambda _: None)
    record: dict[str, Any] = json.loads(run.samples.read_text())
    return record


def answers(record: dict[str, Any]) -> list[str | None]:
    texts = []
    for prompt in record["prompts"]:
        for when in ("before", "after"):
            answer = prompt[when]
            texts.append(None if answer is None else answer["text"])
    return texts


def test_each_prompt_has_both_answers(run: RunFolder, stand_in: Callable[[str], None]) -> None:
    stand_in(ANSWER_ALL)
    record = take_samples(run)
    assert record["failed"] is None
    assert [prompt["messages"][0]["content"] for prompt in record["prompts"]] == PROMPTS
    assert answers(record) == ["before 0", "after 0", "before 1", "after 1"]


@pytest.mark.parametrize(
    ("body", "reason", "kept"),
    [
        pytest.param(DIE, "ended with 3", "after 0", id="dies"),
        pytest.param(TEAR, "the process that had loaded the model", "after 0", id="torn"),
        pytest.param(HANG, "it took longer than", "after 0", id="hangs"),
        pytest.param(FAIL, "does not fit: CUDA out of memory", None, id="out of memory"),
    ],
)
def test_a_failure_keeps_the_answers_and_the_reason(
    body: str,
    reason: str,
    kept: str | None,
    run: RunFolder,
    stand_in: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "LIMIT_S", 2.0)
    stand_in(body)
    record = take_samples(run)
    assert reason in record["failed"]
    assert answers(record) == [None, kept, None, None]


def raise_error(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_an_interrupt_ends_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_ask", raise_error(KeyboardInterrupt()))
    assert take_samples(run)["failed"] == "it was interrupted"


def after_training(run: RunFolder) -> None:
    """What the supervisor does for samples once a training is over."""
    settings = {"argv": (), "env": {}, "environ": {}, "cwd": str(Path.cwd()), "title": "sft"}
    sampling.take_samples(run, Attempt(number=1, stage="sft", backend="trl", **settings))


def test_the_page_shows_the_answers_and_the_verdict_stays(
    run: RunFolder, stand_in: Callable[[str], None]
) -> None:
    stand_in(ANSWER_ALL)
    run.verdict.write_text('{"status": "fail"}')
    after_training(run)
    assert "after 1" in run.report.read_text()
    assert run.verdict.read_text() == '{"status": "fail"}'


def test_no_error_leaves_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "take", raise_error(RuntimeError("whatever")))
    after_training(run)
    assert not run.samples.exists()


@pytest.mark.parametrize("changes", [{"samples": 0}, {}])
def test_a_run_that_asks_for_none_has_none(changes: dict[str, int]) -> None:
    assert not samples.is_due(make_run(**changes))


def test_trials_have_none(run: RunFolder) -> None:
    assert samples.is_due(run)
    (run.path.parent / rundir.BENCH_RECORD).write_text("{}")
    assert not samples.is_due(run)
