"""What `--dry-run` prints: comments, one command, and the batch script of a Slurm job."""

import subprocess
from pathlib import Path

import pytest
from answers import Ask
from answers import ask as ask  # a fixture
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
    comments = []
    others = []
    for line in capsys.readouterr().out.splitlines():
        lines = comments if line.startswith("# ") else others
        lines.append(line)
    return comments, others


def test_without_a_checkout_a_comment_says_how_to_get_one(
    nowhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    comments, (command,) = dry_run(capsys)
    (advice,) = [line for line in comments if "no open-instruct checkout" in line]
    assert f"checkout {open_instruct.PIN}" in advice
    # the probe's settings stand in the command alone, commits are shortened
    assert "LAUNCH_PROBE" in command
    assert "LAUNCH_PROBE" not in "".join(comments)
    assert f"# source: open_instruct {open_instruct.PIN[:12]}, the committed snapshot" in comments


def test_a_slurm_job_is_shown_as_its_batch_script(
    nowhere: None, tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--slurm", "--nodes", "2", "batch.per_device=8")
    script = ask("sft", STAGE, "--gpus", "8", "--dry-run", *words).data["batch_script"]
    assert "#SBATCH --nodes=2\n" in script
    assert " exec " in script
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    comments, others = dry_run(capsys, *words)
    assert others[0] == "#!/bin/sh"
    assert "# what trains on each node: LAUNCH_PROBE" in "\n".join(comments)
    assert not [*tmp_path.glob("runs/*")]
