"""An option that would be taken and ignored is refused; a job's own GPU counts for more than ours."""

import os
import stat
from pathlib import Path

import pytest
from conftest import REPOSITORY
from typer.testing import CliRunner

from launcher import files
from launcher.cli.commands import app
from launcher.errors import LaunchError, NotReady, UsageError
from launcher.lifecycle import start
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

STAGE = str(REPOSITORY / "configs" / "demo" / "sft.yaml")


@pytest.mark.parametrize("words", [("--on-finish-limit", "5m"), ("--slurm", "--devices", "0")])
def test_what_would_be_ignored_is_refused(words: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, ["sft", STAGE, "--gpus", "0", *words])
    assert isinstance(told.exception, UsageError)
    assert {finding.code for finding in told.exception.findings} == {"useless-option"}


def test_other_machines_gpus_are_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    told = CliRunner().invoke(
        app, ["sft", STAGE, "model_name_or_path=some/model", "dataset_name=some/set", "--slurm"]
    )
    assert isinstance(told.exception, LaunchError)
    assert "no-gpus" in {finding.code for finding in told.exception.findings}


def test_the_jobs_own_gpu() -> None:
    job = {"SLURM_JOB_ID": "5", "CUDA_VISIBLE_DEVICES": "3,4"}
    for planned, environ, gpus in (("0", job, "3"), ("0", {}, "0"), ("", job, "")):
        one = Attempt(
            number=1, argv=("true",), env={"CUDA_VISIBLE_DEVICES": planned}, environ={}, cwd="/", stage="sft",
            backend="trl", title="t",
        )  # fmt: skip
        assert one.command(environ).env["CUDA_VISIBLE_DEVICES"] == gpus


def test_a_job_is_not_queued_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "bin" / "squeue"
    asked.parent.mkdir()
    asked.write_text("#!/bin/sh\necho 41 PENDING\n")
    asked.chmod(asked.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{asked.parent}{os.pathsep}{os.environ['PATH']}")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    start._require_not_queued(folder)
    files.write_json(folder.job, {"job": "41", "nodes": 1})
    with pytest.raises(NotReady, match="job 41"):
        start._require_not_queued(folder)
    files.write_json(folder.job, {"job": "40", "nodes": 1})
    start._require_not_queued(folder)
