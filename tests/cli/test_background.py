"""Commands that start several runs, handed to a job: the same command line, and the GPUs that it
takes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from experiment import shaped
from fake_world import World, needs_trl

from launcher.lifecycle.background import strip_background_options


def test_what_runs_elsewhere_neither_goes_elsewhere_nor_answers_machines() -> None:
    words = ["tune", "a.yaml", "--detach", "--format", "json", "--on-finish", "x --slurm", "k=1"]
    assert strip_background_options(words) == ["tune", "a.yaml", "--on-finish", "x --slurm", "k=1"]
    assert strip_background_options(["bench", "--format=json", "--slurm"]) == ["bench"]


@needs_trl
@pytest.mark.parametrize(
    "words",
    [
        ("ladder", "--gpus", "1,2"),
        ("bench", "--gpus", "2", "--vary", "learning_rate=1e-5,2e-5"),
        ("tune", "--gpus", "2", "--budget", "5m"),
    ],
)
def test_a_job_gets_the_gpus_that_the_command_takes(world: World, words: tuple[str, ...]) -> None:
    config = world.config(model_name_or_path=shaped(world), bf16=True)
    content = yaml.safe_load(config.read_text())
    content |= {"batch": {"global": 8, "per_device": 2}, "slurm": {"partition": "long"}}
    config.write_text(yaml.safe_dump(content))
    sbatch = world.root / "smi" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 41\n")
    sbatch.chmod(0o755)
    command, *options = words
    line = [command, str(config), *options, "--python", str(world.root / "python")]
    result = world.launch(*line, "--slurm", "--format", "json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)["data"]
    assert data["job"] == "41"
    script = (Path(data["folder"]) / "slurm.sh").read_text()
    assert "--gres=gpu:2\n" in script
    assert "--partition=long\n" in script
    attempt = json.loads((Path(data["folder"]) / "start.json").read_text())
    assert attempt["argv"][-len(line) :] == line
    assert attempt["cwd"] == str(world.root)
    sbatch.write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    assert world.launch(*line, "--slurm").returncode == 5
    assert len(list((world.runs / "commands").iterdir())) == 1
    # the machine that queues it is not looked at, and nothing starts
    assert not (world.root / "started").exists()
