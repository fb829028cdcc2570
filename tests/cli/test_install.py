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
    summaries = {row["name"]: row["summary"] for row in rows}
    assert {"demo/sft", "tulu/sft_qwen7b"} < summaries.keys()
    assert "" not in summaries.values()

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
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    shipped = set()
    for name in project["tool"]["setuptools"]["data-files"]:
        if "/configs/" in name:
            shipped.add(Path(name).name)
    folders = {path.name for path in (REPOSITORY / "configs").iterdir()}
    # the demo's model and data are made by a script of the clone
    assert shipped == folders - {"demo"}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("setuptools"), reason="needs setuptools")
def test_an_install_without_the_clone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    site = tmp_path / "site"
    work = tmp_path / "work"
    work.mkdir()
    command = "git ls-files launcher configs pyproject.toml constraints.txt README.md LICENSE"
    names = subprocess.check_output(command.split(), cwd=REPOSITORY, text=True)
    for name in names.splitlines():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((REPOSITORY / name).read_bytes())
    options = "-q --no-deps --no-build-isolation --no-index --target".split()
    pip = [sys.executable, "-m", "pip", "install", *options, str(site), str(source)]
    subprocess.run(pip, check=True)
    environ = {**os.environ, "PYTHONPATH": str(site), "HOME": str(work)}
    environ.pop("LAUNCH_OPEN_INSTRUCT", None)

    def launch(*words: str) -> str:
        command = [sys.executable, "-m", "launcher", *words]
        process = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    configs = launch("configs", "--format", "json")
    assert f"{site}/share/launch/configs/tulu/sft_qwen7b.yaml" in configs
    launch("configs", "copy", "tulu/pipeline_qwen7b")
    launch("init", "sft", "--model", "a/b", "--data", "c/d", "--gpus", "1")
    assert "sft.yaml: valid" in launch("validate-config", ".")
    commands = launch("doctor", "--backend", "trl", "--install")
    assert f"-c {site}/share/launch/constraints.txt" in commands
