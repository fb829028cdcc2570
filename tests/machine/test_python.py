"""Questions to the outside, answered by fakes on PATH and by real git repositories."""

import sys
from pathlib import Path

import pytest
from fake_smi import Smi, uuid
from repositories import git

from launcher.errors import NotReady
from launcher.machine import python as machine
from launcher.machine.python import Driver, Gpu, GpuProcess


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


@pytest.fixture
def smi(bin_folder: Path) -> Smi:
    return Smi(bin_folder)


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_gpus_as_nvidia_smi_reports_them(smi: Smi) -> None:
    smi.cards(4, 70000, name="NVIDIA H100 80GB HBM3", memory=81559)
    smi.processes((1, 4711, 70000))
    driver = machine.ask_driver()
    assert driver.fault is None
    assert driver.gpus[0] == Gpu(
        index=0, uuid=uuid(0), name="NVIDIA H100 80GB HBM3", memory_mib=81559, used_mib=4,
        driver="580.159.04", cuda=(13, 0),
    )  # fmt: skip
    assert driver.processes == (
        GpuProcess(uuid=uuid(1), pid=4711, used_mib=70000, name="/usr/bin/python3"),
    )
    assert machine.describe()["gpus"] == ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 2
    # what draws on a screen is no competitor
    smi.processes((1, 4711, 70000), type="G")
    assert machine.ask_driver().processes == ()


def test_a_driver_that_does_not_answer(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    smi.fails(words, 9)
    assert machine.ask_driver() == Driver(fault=words)
    smi.fails("<nvidia_smi_log><gpu>", 0)
    assert machine.ask_driver().gpus == ()
    # without nvidia-smi
    smi.path.unlink()
    monkeypatch.setenv("PATH", str(smi.folder))
    assert machine.ask_driver() == Driver()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "a repository"
    (root / "package").mkdir(parents=True)
    (root / "package" / "code.py").write_text("1")
    (root / "notes").write_text("1")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def test_the_commit_and_edits_below(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert machine.git_version(repository) == commit
    (repository / "untracked").touch()
    # a git hook names another repository
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert machine.git_version(repository) == commit
    (repository / "notes").write_text("2")
    assert machine.git_version(repository) == f"{commit}+edited"
    assert machine.git_version(repository, "package") == commit
    (tmp_path / "link").symlink_to(repository)
    assert machine.git_version(tmp_path / "link") == f"{commit}+edited"


def test_no_commit_of_its_own(repository: Path, tmp_path: Path) -> None:
    assert machine.git_version(repository / "package") is None
    assert machine.git_version(tmp_path / "none") is None
    git(tmp_path, "init", "-q")
    assert machine.git_version(tmp_path) is None


def python(folder: Path, name: str = "python") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return script(folder, name, f'exec "{sys.executable}" "$@"')


def test_the_order_of_interpreters(tmp_path: Path) -> None:
    named = python(tmp_path / "named")
    variable = python(tmp_path / "variable")
    checkout = tmp_path / "checkout"
    inside = python(checkout / ".venv" / "bin")
    environ = {"LAUNCH_PYTHON": str(variable)}
    own = (Path(sys.executable), "launch's own")
    for asked, place, given, python_and_source in (
        (named, checkout, environ, (named, "--python")), (None, checkout, environ, (variable, "LAUNCH_PYTHON")),
        (None, checkout, {"LAUNCH_PYTHON": ""}, (inside, "the checkout's .venv")), (None, None, {}, own),
        (None, tmp_path, {}, own),
    ):  # fmt: skip
        found = machine.find_trainer(asked, place, given)
        assert (found.python, found.source) == python_and_source


def test_a_name_on_path_and_a_relative_path(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(bin_folder, "python9")
    assert machine.find_trainer(Path("python9"), None, {}).python == bin_folder / "python9"
    monkeypatch.chdir(tmp_path)
    assert machine.find_trainer(Path("bin/python9"), None, {}).python == bin_folder / "python9"
    # a virtual environment is known by the link
    (tmp_path / "link").symlink_to(sys.executable)
    assert machine.find_trainer(tmp_path / "link", None, {}).python == tmp_path / "link"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.find_trainer(Path("~/bin/python9"), None, {}).python == bin_folder / "python9"


def test_what_an_interpreter_says_of_itself() -> None:
    own = machine.ask_trainer(Path(sys.executable), "us")
    assert own.version == tuple(sys.version_info[:3])
    assert "typer" in own.packages
    assert own.own is (sys.prefix != sys.base_prefix)
    assert all(isinstance(entry, Path) for entry in own.path)


@pytest.mark.parametrize("text", ["exit 1", "echo no json"])
def test_a_python_that_is_none(tmp_path: Path, text: str) -> None:
    fake = script(tmp_path, "python", text)
    with pytest.raises(NotReady) as caught:
        machine.ask_trainer(fake, "LAUNCH_PYTHON")
    (finding,) = caught.value.findings
    assert (finding.code, finding.file) == ("no-python", str(fake))
    assert "LAUNCH_PYTHON" in finding.message
    with pytest.raises(NotReady, match="--python names"):
        machine.find_trainer(Path("no-such-python"), None, {})
