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


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "20250101T000000Z-sft-demo"
    (path / "probe").mkdir(parents=True)
    return RunFolder(path)


def manifest(folder: RunFolder, **changes: object) -> None:
    plan = {"gpus": 2, "nodes": 1, "steps": 10}
    base = {"stage": "sft", "plan": plan, "created": rundir.utc_now(), "output": "/models/demo"}
    files.write_json(folder.manifest, {**base, **changes})


def record(folder: RunFolder, *lines: object) -> None:
    text = "".join(f"{json.dumps(line) if isinstance(line, dict) else line}\n" for line in lines)
    (folder.probe / "rank-0.jsonl").write_text(text)


def step(number: int) -> dict[str, object]:
    return {"event": "step", "step": number, "loss": 1.23456, "elapsed": number, "tokens": 50}


def live(folder: RunFolder, attempt: int = 1) -> None:
    own = process.identify(os.getpid()).as_json()
    files.write_json(folder.process, {**own, "mark": str(folder.path), "attempt": attempt})


def test_a_row(folder: RunFolder) -> None:
    manifest(folder)
    # on a GPU much is recorded after the last step
    after = [{"event": "memory", "phase": f"after saving {number}" * 900} for number in range(20)]
    record(folder, {"event": "start", "world": 2}, step(1), step(2), step(3), *after)
    files.write_json(folder.exit(1), {"returncode": 0, "stopped": None})
    files.write_json(folder.verdict, {"status": "pass", "metrics": {"tokens_per_second": 2266.4}})
    row = overview.read_row(folder)
    assert row.pop("age") in {"0s", "1s"}
    assert row == {
        "run": folder.path.name, "path": str(folder.path), "stage": "sft", "state": "finished",
        "verdict": "pass", "outcome": "pass", "step": 3, "steps": 10, "loss": 1.2346, "tokens/s": 2266,
        "gpus": 2, "output": "/models/demo", "checkpoint": None, "wandb": None,
    }  # fmt: skip
    assert set(overview.COLUMNS) <= {*row, "age"}
    # of one that is over the figures are its verdict's, of every rank
    files.write_json(
        folder.verdict, {"steps": 4, "metrics": {"tokens_per_second": None, "last_loss": 1.5}}
    )
    row = overview.read_row(folder)
    assert (row["step"], row["loss"], row["tokens/s"]) == (4, 1.5, None)
    # a further attempt goes on: the verdict is still that of the one before
    folder.console(2).touch()
    live(folder, attempt=2)
    row = overview.read_row(folder)
    assert (row["state"], row["verdict"], row["tokens/s"]) == ("running", None, 100)


def test_the_last_checkpoint_and_the_tracker(folder: RunFolder, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for name in ("step_2", "step_10", "step_x", "logs"):
        (output / name).mkdir(parents=True)
    hour_ago = time.time() - 3600
    os.utime(output / "step_10", (hour_ago, hour_ago))
    os.utime(output / "step_2", (hour_ago - 9999, hour_ago - 9999))
    manifest(folder, output=str(output), backend="open_instruct", tracked=True, args={})
    folder.console(1).write_bytes(
        "wandb: ⭐️ View project at \x1b[34mhttps://wandb.ai/e/p\x1b[0m\nwandb: 🚀 View run at "
        "\x1b[34m\x1b[4mhttps://wandb.ai/e/p/runs/abc\x1b[0m\n".encode()
    )
    row = overview.read_row(folder)
    assert (row["checkpoint"], row["wandb"]) == ("1h", "https://wandb.ai/e/p/runs/abc")
    manifest(folder, backend="trl", output=str(output), args={})
    row = overview.read_row(folder)
    assert (row["checkpoint"], row["wandb"]) == (None, None)


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        ({"returncode": 0, "stopped": None}, "finished"),
        ({"returncode": 1, "stopped": None}, "failed"),
        ({"returncode": 130, "stopped": 2}, "stopped"),
        ({"returncode": 0, "stopped": 15}, "stopped"),
        ({}, "lost"),
    ],
)
def test_states(folder: RunFolder, ended: dict[str, object], state: str) -> None:
    manifest(folder)
    if ended:
        files.write_json(folder.exit(1), ended)
    assert overview.read_state(folder) == state
    live(folder)
    assert overview.read_state(folder) == "running"


def test_the_last_attempt_counts(folder: RunFolder) -> None:
    for attempt, code in ((1, 0), (2, 1)):
        folder.console(attempt).touch()
        files.write_json(folder.exit(attempt), {"returncode": code, "stopped": None})
    assert overview.read_state(folder) == "failed"
    folder.console(3).touch()
    assert overview.read_state(folder) == "lost"


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "failed")])
def test_the_probe_knows_the_end_when_the_launcher_was_killed(
    folder: RunFolder, code: int, state: str
) -> None:
    manifest(folder)
    record(folder, {"event": "start"}, step(1), {"event": "end", "exit": code})
    assert overview.read_row(folder)["state"] == state
    record(folder, {"event": "start"}, step(1), {"event": "end", "exit": code}, {"event": "start"})
    assert overview.read_row(folder)["state"] == "lost"


def test_the_end_of_an_attempt_before_is_none_of_the_last(folder: RunFolder) -> None:
    """It was killed before its probe wrote anything, and whoever had to judge it with it."""
    manifest(folder)
    ended = ({"event": "start", "attempt": 1}, step(1), {"event": "end", "exit": 1})
    for attempt in (1, 2):
        folder.console(attempt).touch()
    record(folder, *ended)
    files.write_json(folder.exit(1), {"returncode": 1, "stopped": None})
    files.write_json(folder.verdict, {"status": "fail", "metrics": {"tokens_per_second": 7.0}})
    rundir.mark_judged(folder, 1)
    row = overview.read_row(folder)
    assert (row["state"], row["verdict"], row["step"], row["tokens/s"]) == ("lost", None, 1, None)
    # somebody looked since
    files.write_json(folder.verdict, {"status": "unproven"})
    assert overview.read_row(folder)["verdict"] == "unproven"
    record(folder, *ended, {"event": "start", "attempt": 2}, step(2), {"event": "end", "exit": 0})
    assert overview.read_row(folder)["state"] == "finished"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"plan": {"gpus": "two"}}', '{"created": 5}', "\0"]
)
def test_a_half_written_folder_is_a_row_too(folder: RunFolder, text: str) -> None:
    folder.manifest.write_text(text)
    row = overview.read_row(folder)
    assert (row["state"], row["step"], row["age"]) == ("lost", 0, None)


def test_a_table_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(Path.cwd() / "runs" / "b")
    rows = [{"variant": "a" * 20, "tokens/s": "5,865 (5,392 to 6,338)", "run": run}]
    names = ("variant", "tokens/s", "loss", "run")
    console.print_table(rows, names)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["variant", "tokens/s", "run"] and line.endswith("  runs/b")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "48")
    console.print_table(rows, names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[::3]] == [["variant", "tokens/s"], ["variant", "run"]]
    assert max(map(len, lines)) <= 48 and lines[2] == ""
