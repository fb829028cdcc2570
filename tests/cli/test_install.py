"""launch installed without its clone."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("setuptools"), reason="needs setuptools")
def test_an_install_without_the_clone(tmp_path: Path) -> None:
    source, site, work = tmp_path / "source", tmp_path / "site", tmp_path / "work"
    work.mkdir()
    listed = ["git", "ls-files", "-z", "launcher", "docs/findings.md", "pyproject.toml", "constraints.txt"]
    listed += ["README.md", "LICENSE"]
    for name in subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0"):
        if name:
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((REPOSITORY / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    environ = {**os.environ, "PYTHONPATH": str(site), "HOME": str(work)}
    environ.pop("LAUNCH_OPEN_INSTRUCT", None)

    def launch(*words: str) -> str:
        command = [sys.executable, "-m", "launcher", *words]
        ran = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    launch("init", "sft", "--model", "a/b", "--data", "c/d", "--gpus", "1")
    assert "sft.yaml: valid" in launch("validate-config", ".")
    assert "the entry script has no such argument" in launch("explain", "unknown-key")
    assert f"-c {site}/share/launch/constraints.txt" in launch("doctor", "--backend", "trl", "--install")
