"""The stage files that ship with launch, also where it is installed without its clone."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import REPOSITORY

from launcher.cli import main


def test_a_listed_file_is_copied_and_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["configs", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["data"]
    assert {"demo/sft", "tulu/sft_qwen7b"} < {row["name"] for row in rows}
    assert all(row["summary"] for row in rows)
    copy = tmp_path / "below" / "mine.yaml"
    words = ["configs", "copy", "tulu/sft_qwen7b", str(copy)]
    assert main.main(words) == 0
    assert main.main(["validate-config", str(copy)]) == 0
    assert main.main(words) == 2
    assert "mine.yaml exists" in capsys.readouterr().err


def test_a_pipeline_is_copied_with_its_stage_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["configs", "copy", "demo/pipeline", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"pipeline.yaml", "sft.yaml", "dpo.yaml"}
    assert main.main(["configs", "copy", "demo/pipelin", str(tmp_path)]) == 2
    assert "did you mean `demo/pipeline`?" in capsys.readouterr().err


def test_the_wheel_takes_every_folder_along() -> None:
    data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "data-files"
    ]
    folders = {path.name for path in (REPOSITORY / "configs").iterdir()}
    # the demo's model and data are made by a script of the clone
    assert {Path(name).name for name in data if "/configs/" in name} == folders - {"demo"}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("setuptools"), reason="needs setuptools")
def test_an_install_without_the_clone(tmp_path: Path) -> None:
    source, site, work = tmp_path / "source", tmp_path / "site", tmp_path / "work"
    work.mkdir()
    listed = ["git", "ls-files", "-z", "launcher", "configs", "pyproject.toml", "constraints.txt"]
    listed += ["README.md", "LICENSE"]
    for name in subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0"):
        if name:
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((REPOSITORY / name).read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    environ = {**os.environ, "PYTHONPATH": str(site), "HOME": str(work)}
    environ.pop("LAUNCH_OPEN_INSTRUCT", None)

    def launch(*words: str) -> str:
        command = [sys.executable, "-m", "launcher", *words]
        ran = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert f"{site}/share/launch/configs/tulu/sft_qwen7b.yaml" in launch(
        "configs", "--format", "json"
    )
    launch("configs", "copy", "tulu/pipeline_qwen7b")
    launch("init", "sft", "--model", "a/b", "--data", "c/d", "--gpus", "1")
    assert "sft.yaml: valid" in launch("validate-config", ".")
    assert "the entry script has no such argument" in launch("explain", "unknown-key")
    assert f"-c {site}/share/launch/constraints.txt" in launch(
        "doctor", "--backend", "trl", "--install"
    )
