"""`launch runs`, `rm`, `last` and `cache clear`: which runs are listed, found and deleted."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import made_runs
import pytest
from answers import Ask
from answers import ask as ask  # a fixture
from typer.testing import CliRunner

from launcher import files
from launcher.cache import folders
from launcher.cli import main
from launcher.cli.commands import app
from launcher.machine import process
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]
BENCH = "20260101T000000Z-bench-x"


def finished_run(name: str, start: float = 0, **changes: Any) -> Path:
    """A finished run that was started so many seconds after another."""
    manifest = made_runs.manifest(**{"cwd": str(Path.cwd()), **changes})
    path = made_runs.write_run(rundir.find_runs_root() / name, record=manifest)
    os.utime(path / "run.json", (1e9 + start, 1e9 + start))
    return path


def set_exit_code(run: Path, code: int) -> None:
    files.write_json(run / "exit.json", {"returncode": code})


def set_running(run: Path) -> None:
    """Record this process as the run's."""
    own = process.identify(os.getpid()).as_json()
    files.write_json(run / "process.json", {**own, "mark": str(run), "attempt": 1})


def states(ask: Ask, *words: str) -> dict[str, str]:
    """The listed runs with their states."""
    return {row["run"]: row["state"] for row in ask("runs", *words).data}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", ["a", "b", "c"]),
        ("--last 2", ["b", "c"]),
        ("--here", ["a", "c"]),
        ("--state failed", ["b"]),
        ("--state finished --last 1", ["c"]),
        ("--state failed --here", []),
    ],
)
def test_runs_by_state_folder_and_number(ask: Ask, words: str, names: list[str]) -> None:
    finished_run("20260101T000000Z-sft-a")
    set_exit_code(finished_run("20260102T000000Z-sft-b", cwd="/elsewhere"), 1)
    finished_run("20260103T000000Z-sft-c")
    assert [run[-1] for run in states(ask, *words.split())] == names


def test_no_runs_and_no_such_state(capsys: Capture) -> None:
    assert main.main(["runs", "--state", "failed", "--here"]) == 0
    assert capsys.readouterr().out == "no such runs\n"
    assert main.main(["runs", "--state", "over"]) == 2


def test_the_row_of_a_run_that_is_over_is_kept_until_its_folder_changes(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = finished_run("20260101T000000Z-sft-a")
    os.utime(path, (1e9, 1e9))
    assert states(ask) == {path.name: "finished"}
    with monkeypatch.context() as patch:
        patch.setattr(rundir, "read_manifest", lambda _: pytest.fail("read again"))
        assert states(ask) == {path.name: "finished"}
    set_exit_code(path, 1)
    assert states(ask) == {path.name: "failed"}
    # not even a row of its own is believed once the folder has changed, or where the file is
    # damaged
    os.utime(path, (1e9 + 1, 1e9 + 1))
    states(ask)
    (rundir.find_state_folder() / "rows.json").write_text(json.dumps({str(path): [1]}))
    assert states(ask) == {path.name: "failed"}


def test_a_bench_and_a_pipeline_are_one_entry_each(ask: Ask, capsys: Capture) -> None:
    for number in range(3):
        trial = finished_run(f"{BENCH}/20260101T00000{number}Z-sft-trial")
        rundir.register("runs", trial)
    set_exit_code(trial, 1)
    files.write_json(trial.parent / "bench.json", {"trials": []})
    alone = finished_run("20260102T000000Z-sft-alone").name
    pipeline = "20260103T000000Z-pipeline-y"
    stage = finished_run("20260103T000001Z-sft-stage")
    (rundir.find_runs_root() / pipeline).mkdir()
    record = {"stages": [{"run": str(stage)}]}
    files.write_json(rundir.find_runs_root() / pipeline / "pipeline.json", record)

    campaigns = [Path(row["part_of"] or "-").name for row in ask("runs").data]
    assert campaigns == [BENCH, BENCH, BENCH, "-", pipeline]
    assert main.main(["runs"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [BENCH, alone, pipeline]
    assert "bench" in lines[0].split()
    assert "2 finished, 1 failed" in lines[0]
    assert len(ask("runs", "--last", "1").data) == 1
    assert main.main(["runs", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_last_is_the_newest_of_this_folder_and_no_trial(capsys: Capture) -> None:
    mine = finished_run("20260101T000000Z-sft-mine")
    other = finished_run("20260102T000000Z-sft-other", start=9, cwd="/elsewhere")
    trial = finished_run(f"{BENCH}/20260103T000000Z-sft-trial", start=99)
    files.write_json(trial.parent / "bench.json", {})
    rundir.register("runs", trial)
    assert rundir.find_run("last") == RunFolder(mine)
    (mine / "run.json").unlink()
    assert rundir.find_run("last") == RunFolder(other)
    assert main.main(["check", "last"]) == 0
    message = "no run was begun in this folder; the last of all is 2026"
    assert capsys.readouterr().err.startswith(message)


def test_a_shell_completes_the_names_of_runs() -> None:
    older = finished_run("20260101T000000Z-sft-a").name
    newer = finished_run("20260102T000000Z-sft-a").name
    environ = {
        "_LAUNCH_COMPLETE": "complete_bash",
        "COMP_CWORD": "2",
        "COMP_WORDS": "launch logs 2026",
    }
    result = CliRunner().invoke(app, prog_name="launch", env=environ)
    assert result.stdout.split() == [newer, older]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run with a model and no record of what it wrote."""
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.touch()
    end = datetime.datetime.fromisoformat("2026-01-02T04:34:05+00:00").timestamp()
    os.utime(config, (end, end))
    path = finished_run("20260101T000000Z-sft-a", output=str(tmp_path / "model"))
    rundir.register("runs", path)
    return RunFolder(path)


def test_a_run_is_deleted_and_its_model_stays(
    run: RunFolder, tmp_path: Path, capsys: Capture
) -> None:
    assert main.main(["rm", "2026"]) == 2
    stderr = capsys.readouterr().err
    assert f"error[not-confirmed]: this would delete {run.path} (" in stderr
    assert "add --yes" in stderr
    assert main.main(["rm", "2026", "--yes"]) == 0
    assert capsys.readouterr().out.startswith(f"deleted {run.path} (")
    assert not run.path.exists()
    assert not list(rundir.list_registered("runs"))
    assert (tmp_path / "model").is_dir()


def test_files_that_no_record_names_stay_with_model_too(run: RunFolder, tmp_path: Path) -> None:
    assert main.main(["rm", "2026", "--yes", "--model"]) == 0
    assert not run.path.exists()
    assert (tmp_path / "model" / "config.json").exists()


def test_a_terminal_is_asked(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter("ny")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: next(answers) == "y")
    assert main.main(["rm", "2026"]) == 0
    assert run.path.is_dir()
    assert main.main(["rm", "2026"]) == 0
    assert not run.path.exists()


def test_a_running_run_is_not_deleted(run: RunFolder, capsys: Capture) -> None:
    set_running(run.path)
    assert main.main(["rm", "2026", "--yes"]) == 5
    assert f"{run.path.name} is running\n  help: launch stop" in capsys.readouterr().err


def test_the_output_of_another_run_is_not_deleted(
    run: RunFolder, tmp_path: Path, capsys: Capture
) -> None:
    other = finished_run("20270101T000000Z-dpo-b", output=str(tmp_path / "model"))
    assert main.main(["rm", "2026", "--yes", "--model"]) == 2
    assert f"is the output of {other.name} too" in capsys.readouterr().err


def test_the_working_folder_is_not_deleted(
    run: RunFolder, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "model")
    assert main.main(["rm", "2026", "--yes", "--model"]) == 2
    assert "holds more than this model" in capsys.readouterr().err
    assert (tmp_path / "model").is_dir()


def test_a_run_with_its_model_inside_is_not_deleted(run: RunFolder) -> None:
    finished_run(run.path.name, output=str(run.path / "model"))
    (run.path / "model").mkdir()
    assert main.main(["rm", "2026", "--yes"]) == 2
    assert run.path.is_dir()


def test_a_bench_is_checked_and_deleted_by_its_name(capsys: Capture) -> None:
    trial = finished_run(f"{BENCH}/20260101T000001Z-sft-trial")
    rundir.register("runs", trial)
    files.write_json(trial.parent / "bench.json", {"trials": [{"run": str(trial)}]})
    assert main.main(["check", BENCH, "--allow-unproven"]) == 0
    assert trial.name in capsys.readouterr().out
    set_running(trial)
    assert main.main(["rm", BENCH, "--yes"]) == 5
    (trial / "process.json").unlink()
    (trial.parent / "models").mkdir()
    assert main.main(["rm", BENCH, "--yes"]) == 2
    assert main.main(["rm", BENCH, "--yes", "--model"]) == 0
    assert not trial.parent.exists()
    assert not list(rundir.list_registered("runs"))


def test_clearing_every_cache_is_asked_for(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "dataset-0123456789abcdef"
    record = {
        "launch_cache": folders.RECORD_VERSION,
        "kind": "dataset",
        "created": rundir.format_utc_now(),
        "digest": "0123456789abcdef" * 4,
    }
    path.mkdir()
    rundir.register("caches", path)
    files.write_json(path / folders.RECORD, record)
    assert [cache.path for cache in folders.list_folders()] == [path]
    assert main.main(["cache", "clear"]) == 2
    assert "add --all" in capsys.readouterr().err
    assert main.main(["cache", "clear", "--older-than", "1d"]) == 0
    assert path.is_dir()
    assert main.main(["cache", "clear", "--all"]) == 0
    assert not path.exists()
