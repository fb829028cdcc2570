"""What `--dry-run` prints: comments, one command, and the batch script of a Slurm job."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY

from launcher.cli import main
from launcher.upstream import locate, open_instruct

STAGE = str(REPOSITORY / "configs" / "tulu" / "sft_qwen7b.yaml")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "external")
    monkeypatch.setattr(locate, "FOUND_IN", ("~/open-instruct",))


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], list[str]]:
    """The comments, and the other lines."""
    assert main.main(["sft", STAGE, "--gpus", "8", "--dry-run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("# ")], [
        line for line in lines if not line.startswith("# ")
    ]


def test_without_a_checkout_a_comment_says_how_to_get_one(
    nowhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    comments, (command,) = dry_run(capsys)
    (advice,) = [line for line in comments if "no open-instruct checkout" in line]
    assert f"checkout {open_instruct.PIN}" in advice
    # the probe's settings stand in the command alone, commits are shortened
    assert "LAUNCH_PROBE" in command and "LAUNCH_PROBE" not in "".join(comments)
    assert f"# source: open_instruct {open_instruct.PIN[:12]}, the committed snapshot" in comments


def test_a_slurm_job_is_shown_as_its_batch_script(
    nowhere: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--slurm", "--nodes", "2", "batch.per_device=8")
    assert main.main(["sft", STAGE, "--gpus", "8", "--dry-run", *words, "--format", "json"]) == 0
    script = json.loads(capsys.readouterr().out)["data"]["batch_script"]
    assert "#SBATCH --nodes=2\n" in script and " exec " in script
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    comments, others = dry_run(capsys, *words)
    assert others[0] == "#!/bin/sh"
    assert [
        line for line in comments if line.startswith("# what trains on each node: LAUNCH_PROBE")
    ]
    assert not [*tmp_path.glob("runs/*")]
