"""`launch runs`, `rm`, `last` and `cache clear`: which runs are listed, found and deleted."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import made_runs
import pytest
from typer.testing import CliRunner

from launcher import files
from launcher.cli import main
from launcher.cli.commands import app
from launcher.machine import process
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]


def made(name: str, begun: float = 0, **changes: Any) -> Path:
    """A finished run, begun so many seconds after another."""
    changes = {"cwd": str(Path.cwd()), **changes}
    path = made_runs.made(rundir.runs_root() / name, told=made_runs.manifest(**changes))
    os.utime(path / "run.json", (1e9 + begun, 1e9 + begun))
    return path


def listed(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert main.main(["runs", *words, "--format", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["data"]
    return found


def test_runs_by_state_folder_and_number(capsys: Capture) -> None:
    made("20260101T000000Z-sft-a")
    failed = made("20260102T000000Z-sft-b", cwd="/elsewhere")
    files.write_json(failed / "exit.json", {"returncode": 1})
    made("20260103T000000Z-sft-c")

    def names(*words: str) -> str:
        return "".join(row["run"][-1] for row in listed(capsys, *words))

    assert names() == "abc"
    assert names("--last", "2") == "bc"
    assert names("--here") == "ac"
    assert names("--state", "failed") == "b"
    assert names("--state", "finished", "--last", "1") == "c"
    assert main.main(["runs", "--state", "failed", "--here"]) == 0
    assert capsys.readouterr().out == "no such runs\n"
    assert main.main(["runs", "--state", "over"]) == 2


def test_the_row_of_a_run_that_is_over_is_kept_until_its_folder_changes(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("20260101T000000Z-sft-a")
    os.utime(path, (1e9, 1e9))
    before = listed(capsys)
    with monkeypatch.context() as patch:
        patch.setattr(rundir, "read_manifest", lambda _: pytest.fail("read again"))
        assert listed(capsys) == before
    files.write_json(path / "exit.json", {"returncode": 1})
    assert [row["state"] for row in listed(capsys)] == ["failed"]
    # not even a row of its own is believed once the folder has changed, or where the file is
    # damaged
    os.utime(path, (1e9 + 1, 1e9 + 1))
    listed(capsys)
    (rundir.state_folder() / "rows.json").write_text(json.dumps({str(path): [1]}))
    assert [row["state"] for row in listed(capsys)] == ["failed"]


def test_a_bench_and_a_pipeline_are_one_entry_each(capsys: Capture) -> None:
    bench, pipeline = "20260101T000000Z-bench-x", "20260103T000000Z-pipeline-y"
    trials = [made(f"{bench}/20260101T00000{n}Z-sft-trial") for n in range(3)]
    files.write_json(trials[0] / "exit.json", {"returncode": 1})
    files.write_json(rundir.runs_root() / bench / "bench.json", {"trials": []})
    for path in trials:
        rundir.register("runs", path)
    stage = made("20260103T000001Z-sft-stage")
    (rundir.runs_root() / pipeline).mkdir()
    record = {"stages": [{"run": str(stage)}]}
    files.write_json(rundir.runs_root() / pipeline / "pipeline.json", record)
    made("20260102T000000Z-sft-alone")
    rows = listed(capsys)
    assert [Path(row["part_of"] or "-").name for row in rows] == [bench] * 3 + ["-", pipeline]
    assert main.main(["runs"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [bench, "20260102T000000Z-sft-alone", pipeline]
    assert "bench" in lines[0].split()
    assert "1 failed, 2 finished" in lines[0]
    assert len(listed(capsys, "--last", "1")) == 1
    assert main.main(["runs", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_last_is_the_newest_of_this_folder_and_no_trial(capsys: Capture) -> None:
    mine = made("20260101T000000Z-sft-mine")
    other = made("20260102T000000Z-sft-other", begun=9, cwd="/elsewhere")
    trial = made("20260103T000000Z-bench-x/20260103T000000Z-sft-trial", begun=99)
    files.write_json(trial.parent / "bench.json", {})
    rundir.register("runs", trial)
    assert rundir.find_run("last") == RunFolder(mine)
    (mine / "run.json").unlink()
    assert rundir.find_run("last") == RunFolder(other)
    assert main.main(["check", "last"]) == 0
    said = "no run was begun in this folder; the last of all is 2026"
    assert capsys.readouterr().err.startswith(said)


def test_a_shell_completes_the_names_of_runs() -> None:
    for day in (1, 2):
        made(f"2026010{day}T000000Z-sft-a")
    environ = {"_LAUNCH_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    done = CliRunner().invoke(
        app, prog_name="launch", env={**environ, "COMP_WORDS": "launch logs 2026"}
    )
    assert done.stdout.split() == ["20260102T000000Z-sft-a", "20260101T000000Z-sft-a"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run with a model and no record of what it wrote."""
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.touch()
    ended = datetime.datetime.fromisoformat("2026-01-02T04:34:05+00:00").timestamp()
    os.utime(config, (ended, ended))
    path = made("20260101T000000Z-sft-a", output=str(tmp_path / "model"))
    rundir.register("runs", path)
    return RunFolder(path)


def test_a_run_is_deleted_and_its_model_stays(
    run: RunFolder, tmp_path: Path, capsys: Capture
) -> None:
    assert main.main(["rm", "2026"]) == 2
    shown = capsys.readouterr().err
    assert f"error[not-confirmed]: this would delete {run.path} (" in shown
    assert "add --yes" in shown
    assert main.main(["rm", "2026", "--yes"]) == 0
    assert capsys.readouterr().out.startswith(f"deleted {run.path} (")
    assert not run.path.exists()
    assert not list(rundir.registered("runs"))
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


def test_what_lives_or_is_another_runs_is_not_deleted(
    run: RunFolder, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = process.identify(os.getpid()).as_json()
    files.write_json(run.process, {**own, "mark": str(run.path), "attempt": 1})
    assert main.main(["rm", "2026", "--yes"]) == 5
    assert f"{run.path.name} is running\n  help: launch stop" in capsys.readouterr().err
    run.process.unlink()
    other = made("20270101T000000Z-dpo-b", output=str(tmp_path / "model"))
    assert main.main(["rm", "2026", "--yes", "--model"]) == 2
    assert f"is the output of {other.name} too" in capsys.readouterr().err
    (other / "run.json").unlink()
    monkeypatch.chdir(tmp_path / "model")
    assert main.main(["rm", "2026", "--yes", "--model"]) == 2
    assert "holds more than this model" in capsys.readouterr().err
    assert (tmp_path / "model").is_dir()
    made(run.path.name, output=str(run.path / "model"))
    (run.path / "model").mkdir()
    assert main.main(["rm", "2026", "--yes"]) == 2
    assert run.path.is_dir()


def test_a_bench_is_checked_and_deleted_by_its_name(capsys: Capture) -> None:
    bench = "20260101T000000Z-bench-x"
    trial = made(f"{bench}/20260101T000001Z-sft-trial")
    rundir.register("runs", trial)
    files.write_json(trial.parent / "bench.json", {"trials": [{"run": str(trial)}]})
    assert main.main(["check", bench, "--allow-unproven"]) == 0
    assert trial.name in capsys.readouterr().out
    own = process.identify(os.getpid()).as_json()
    files.write_json(trial / "process.json", {**own, "mark": str(trial), "attempt": 1})
    assert main.main(["rm", bench, "--yes"]) == 5
    (trial / "process.json").unlink()
    (trial.parent / "models").mkdir()
    assert main.main(["rm", bench, "--yes"]) == 2
    assert main.main(["rm", bench, "--yes", "--model"]) == 0
    assert not trial.parent.exists()
    assert not list(rundir.registered("runs"))


def test_clearing_every_cache_is_asked_for(tmp_path: Path, capsys: Capture) -> None:
    from launcher.cache import folders

    path = tmp_path / "dataset-0123456789abcdef"
    record = {
        "launch_cache": folders.RECORD_VERSION,
        "kind": "dataset",
        "created": rundir.utc_now(),
    }
    record["digest"] = path.name[8:] * 4
    path.mkdir()
    rundir.register("caches", path)
    files.write_json(path / folders.RECORD, record)
    assert [one.path for one in folders.known()] == [path]
    assert main.main(["cache", "clear"]) == 2
    assert "add --all" in capsys.readouterr().err
    assert main.main(["cache", "clear", "--older-than", "1d"]) == 0
    assert path.is_dir()
    assert main.main(["cache", "clear", "--all"]) == 0
    assert not path.exists()
