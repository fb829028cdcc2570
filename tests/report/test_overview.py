"""`launch runs`: one row a run, whatever state its folder is in."""

import json
import os
import time
from pathlib import Path

import pytest

from launcher import files
from launcher.machine import process
from launcher.report import console, overview
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

START = {"event": "start", "world": 2}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "20250101T000000Z-sft-demo"
    (path / "probe").mkdir(parents=True)
    return RunFolder(path)


def write_manifest(folder: RunFolder, **changes: object) -> None:
    content = {
        "stage": "sft",
        "plan": {"gpus": 2, "nodes": 1, "steps": 10},
        "created": rundir.format_utc_now(),
        "output": "/models/demo",
        **changes,
    }
    files.write_json(folder.manifest, content)


def write_events(folder: RunFolder, *events: dict[str, object]) -> None:
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    (folder.probe / "rank-0.jsonl").write_text(text)


def write_exit(folder: RunFolder, returncode: int, stopped: int | None = None) -> None:
    number = max(1, folder.attempts())
    files.write_json(folder.exit(number), {"returncode": returncode, "stopped": stopped})


def step(number: int) -> dict[str, object]:
    return {"event": "step", "step": number, "loss": 1.23456, "elapsed": number, "tokens": 50}


def end(code: int) -> dict[str, object]:
    return {"event": "end", "exit": code}


def be_live(folder: RunFolder, attempt: int = 1) -> None:
    """Have this process be the training of a run."""
    identity = process.identify(os.getpid()).as_json()
    files.write_json(folder.process, {**identity, "mark": str(folder.path), "attempt": attempt})


def test_a_row_of_a_finished_run(folder: RunFolder) -> None:
    write_manifest(folder)
    # on a GPU much is recorded after the last step
    memory = {"event": "memory", "phase": "after saving" * 900}
    write_events(folder, START, step(1), step(2), step(3), *[memory] * 20)
    write_exit(folder, 0)
    files.write_json(folder.verdict, {"status": "pass", "metrics": {"tokens_per_second": 2266.4}})

    row = overview.read_row(folder)

    assert set(overview.COLUMNS) <= set(row)
    assert row.pop("age") in {"0s", "1s"}
    assert row == {
        "run": folder.path.name,
        "path": str(folder.path),
        "stage": "sft",
        "state": "finished",
        "verdict": "pass",
        "outcome": "pass",
        "step": 3,
        "steps": 10,
        "loss": 1.2346,
        "tokens/s": 2266,
        "gpus": 2,
        "output": "/models/demo",
        "checkpoint": None,
        "wandb": None,
    }


def test_the_figures_of_a_finished_run_are_its_verdicts_until_it_continues(
    folder: RunFolder,
) -> None:
    write_manifest(folder)
    write_events(folder, START, step(1), step(2), step(3))
    write_exit(folder, 0)
    metrics = {"tokens_per_second": None, "last_loss": 1.5}
    files.write_json(folder.verdict, {"status": "pass", "steps": 4, "metrics": metrics})
    row = overview.read_row(folder)
    assert row["step"] == 4
    assert row["loss"] == 1.5
    assert row["tokens/s"] is None

    folder.console(2).touch()
    be_live(folder, attempt=2)
    row = overview.read_row(folder)
    assert row["state"] == "running"
    assert row["verdict"] is None
    assert row["tokens/s"] == 100


def test_the_last_checkpoint_and_the_tracker(folder: RunFolder, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for name, age_s in {"step_2": 9999, "step_10": 3600, "step_x": 0, "logs": 0}.items():
        (output / name).mkdir(parents=True)
        os.utime(output / name, (time.time() - age_s,) * 2)
    link = "https://wandb.ai/e/p/runs/abc"
    folder.console(1).write_text(
        "wandb: ⭐️ View project at \x1b[34mhttps://wandb.ai/e/p\x1b[0m\n"
        f"wandb: 🚀 View run at \x1b[34m\x1b[4m{link}\x1b[0m\n"
    )

    write_manifest(folder, output=str(output), backend="open_instruct", tracked=True, args={})
    row = overview.read_row(folder)
    assert row["checkpoint"] == "1h"
    assert row["wandb"] == link

    write_manifest(folder, output=str(output), backend="trl", args={})
    row = overview.read_row(folder)
    assert row["checkpoint"] is None
    assert row["wandb"] is None


@pytest.mark.parametrize(
    ("returncode", "stopped", "state"),
    [(0, None, "finished"), (1, None, "failed"), (130, 2, "stopped"), (0, 15, "stopped")],
)
def test_the_state_of_a_run(
    folder: RunFolder, returncode: int, stopped: int | None, state: str
) -> None:
    write_manifest(folder)
    assert overview.read_state(folder) == "lost"
    write_exit(folder, returncode, stopped)
    assert overview.read_state(folder) == state
    be_live(folder)
    assert overview.read_state(folder) == "running"


def test_the_last_attempt_counts(folder: RunFolder) -> None:
    for attempt, code in ((1, 0), (2, 1)):
        folder.console(attempt).touch()
        write_exit(folder, code)
    assert overview.read_state(folder) == "failed"
    folder.console(3).touch()
    assert overview.read_state(folder) == "lost"


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "failed")])
def test_the_probe_records_the_end_if_nobody_else_did(
    folder: RunFolder, code: int, state: str
) -> None:
    write_manifest(folder)
    write_events(folder, START, step(1), end(code))
    assert overview.read_row(folder)["state"] == state
    write_events(folder, START, step(1), end(code), START)
    assert overview.read_row(folder)["state"] == "lost"


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_last(folder: RunFolder) -> None:
    """It was killed, and its supervisor too, before its probe wrote anything."""
    write_manifest(folder)
    first = [{"event": "start", "attempt": 1}, step(1), end(1)]
    write_events(folder, *first)
    folder.console(1).touch()
    write_exit(folder, 1)
    files.write_json(folder.verdict, {"status": "fail", "metrics": {"tokens_per_second": 7.0}})
    rundir.mark_judged(folder, 1)
    folder.console(2).touch()
    row = overview.read_row(folder)
    assert row["state"] == "lost"
    assert row["verdict"] is None
    assert row["tokens/s"] is None

    # judged since, by whoever looked
    files.write_json(folder.verdict, {"status": "unproven"})
    assert overview.read_row(folder)["verdict"] == "unproven"
    write_events(folder, *first, {"event": "start", "attempt": 2}, step(2), end(0))
    assert overview.read_row(folder)["state"] == "finished"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"plan": {"gpus": "two"}}', '{"created": 5}'])
def test_a_half_written_folder_is_a_row_too(folder: RunFolder, text: str) -> None:
    folder.manifest.write_text(text)
    row = overview.read_row(folder)
    assert row["state"] == "lost"
    assert row["step"] == 0
    assert row["age"] is None


def test_a_table_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(Path.cwd() / "runs" / "b")
    row = {"variant": "a" * 20, "tokens/s": "5,865 (5,392 to 6,338)", "run": run}
    names = ("variant", "tokens/s", "loss", "run")
    console.print_table([row], names)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["variant", "tokens/s", "run"]
    assert line.endswith("  runs/b")

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "48")
    console.print_table([row], names)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 48
    heads = [line.split() for line in lines[::3]]
    assert heads == [["variant", "tokens/s"], ["variant", "run"]]
