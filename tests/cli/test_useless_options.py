"""An option that would have no effect is refused; a job uses its own GPUs."""

import os
from pathlib import Path

import pytest
from answers import Ask
from answers import ask as ask  # a fixture
from conftest import REPOSITORY

from launcher import files
from launcher.errors import NotReady
from launcher.lifecycle import start
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

STAGE = str(REPOSITORY / "configs" / "demo" / "sft.yaml")


@pytest.mark.parametrize("words", [("--on-finish-limit", "5m"), ("--slurm", "--devices", "0")])
def test_an_option_without_effect_is_refused(words: tuple[str, ...], ask: Ask) -> None:
    answer = ask("sft", STAGE, "--gpus", "0", *words)
    assert answer.code == 2
    assert answer.codes == {"useless-option"}


def test_other_machines_gpus_are_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["model_name_or_path=some/model", "dataset_name=some/set"]
    assert "no-gpus" in ask("sft", STAGE, *overrides, "--slurm").codes


JOB = {"SLURM_JOB_ID": "5", "CUDA_VISIBLE_DEVICES": "3,4"}


@pytest.mark.parametrize(
    ("planned", "environ", "gpus"), [("0", JOB, "3"), ("0", {}, "0"), ("", JOB, "")]
)
def test_the_job_s_own_gpu_is_used(planned: str, environ: dict[str, str], gpus: str) -> None:
    attempt = Attempt(
        number=1,
        argv=("true",),
        env={"CUDA_VISIBLE_DEVICES": planned},
        environ={},
        cwd="/",
        stage="sft",
        backend="trl",
        title="t",
    )
    assert attempt.command(environ).env["CUDA_VISIBLE_DEVICES"] == gpus


def test_a_job_is_not_queued_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho 41 PENDING\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}{os.pathsep}{os.environ['PATH']}")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    start._require_not_queued(folder)
    files.write_json(folder.job, {"job": "41", "nodes": 1})
    with pytest.raises(NotReady, match="job 41"):
        start._require_not_queued(folder)
    files.write_json(folder.job, {"job": "40", "nodes": 1})
    start._require_not_queued(folder)
