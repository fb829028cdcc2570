"""Questions to the machine, answered by fakes on PATH and by real git repositories."""

import sys
from pathlib import Path

import pytest
from fake_smi import Smi, uuid
from repositories import git

from launcher.errors import NotReady
from launcher.machine import python
from launcher.machine.python import Driver, Gpu, GpuProcess


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


@pytest.fixture
def smi(programs: Path) -> Smi:
    return Smi(programs)


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def write_python(path: Path) -> Path:
    return write_program(path, f'exec "{sys.executable}" "$@"')


def test_gpus_as_nvidia_smi_reports_them(smi: Smi) -> None:
    smi.cards(4, 70000, name="NVIDIA H100 80GB HBM3", memory=81559)
    smi.processes((1, 4711, 70000))
    driver = python.ask_driver()
    assert driver.fault is None
    assert driver.gpus[0] == Gpu(
        index=0,
        uuid=uuid(0),
        name="NVIDIA H100 80GB HBM3",
        memory_mib=81559,
        used_mib=4,
        driver="580.159.04",
        cuda=(13, 0),
    )
    process = GpuProcess(uuid=uuid(1), pid=4711, used_mib=70000, name="/usr/bin/python3")
    assert driver.processes == (process,)
    assert python.describe()["gpus"] == ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 2

    # what draws on a screen is no competitor
    smi.processes((1, 4711, 70000), type="G")
    assert python.ask_driver().processes == ()


def test_a_driver_that_does_not_answer(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    smi.fails(fault, 9)
    assert python.ask_driver() == Driver(fault=fault)
    smi.fails("<nvidia_smi_log><gpu>", 0)
    assert python.ask_driver().gpus == ()

    smi.path.unlink()
    monkeypatch.setenv("PATH", str(smi.folder))
    assert python.ask_driver() == Driver()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "a repository"
    write_program(root / "package" / "code.py", "1")
    (root / "notes").write_text("1")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def test_the_version_is_the_commit_with_edits_below(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert python.read_git_version(repository) == commit
    (repository / "untracked").touch()
    # a git hook names another repository
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert python.read_git_version(repository) == commit

    (repository / "notes").write_text("2")
    assert python.read_git_version(repository) == f"{commit}+edited"
    assert python.read_git_version(repository, "package") == commit
    (tmp_path / "link").symlink_to(repository)
    assert python.read_git_version(tmp_path / "link") == f"{commit}+edited"


def test_without_a_commit_of_its_own_there_is_no_version(repository: Path, tmp_path: Path) -> None:
    assert python.read_git_version(repository / "package") is None
    assert python.read_git_version(tmp_path / "none") is None
    git(tmp_path, "init", "-q")
    assert python.read_git_version(tmp_path) is None


def test_the_order_of_interpreters(tmp_path: Path) -> None:
    named = write_python(tmp_path / "named")
    variable = write_python(tmp_path / "variable")
    checkout = tmp_path / "checkout"
    inside = write_python(checkout / ".venv" / "bin" / "python")
    environ = {"LAUNCH_PYTHON": str(variable)}

    assert python.find_trainer(named, checkout, environ).python == named
    trainer = python.find_trainer(None, checkout, environ)
    assert trainer.python == variable
    assert trainer.source == "LAUNCH_PYTHON"
    trainer = python.find_trainer(None, checkout, {"LAUNCH_PYTHON": ""})
    assert trainer.python == inside
    assert trainer.source == "the checkout's .venv"
    for without_venv in (None, tmp_path):
        trainer = python.find_trainer(None, without_venv, {})
        assert trainer.python == Path(sys.executable)
        assert trainer.source == "launch's own"


@pytest.mark.parametrize("name", ["python9", "bin/python9", "~/bin/python9"])
def test_an_interpreter_by_a_name_on_path_or_a_relative_path(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    interpreter = write_python(programs / "python9")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert python.find_trainer(Path(name), None, {}).python == interpreter


def test_a_virtual_environment_is_known_by_its_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(sys.executable)
    assert python.find_trainer(link, None, {}).python == link


def test_what_an_interpreter_says_of_itself() -> None:
    own = python.ask_trainer(Path(sys.executable), "a test")
    assert own.version == sys.version_info[:3]
    assert "typer" in own.packages
    assert own.own is (sys.prefix != sys.base_prefix)
    assert all(isinstance(entry, Path) for entry in own.path)


@pytest.mark.parametrize("text", ["exit 1", "echo no json"])
def test_a_program_that_is_no_python_is_refused(tmp_path: Path, text: str) -> None:
    program = write_program(tmp_path / "python", text)
    with pytest.raises(NotReady) as refused:
        python.ask_trainer(program, "LAUNCH_PYTHON")
    (finding,) = refused.value.findings
    assert finding.code == "no-python"
    assert finding.file == str(program)
    assert "LAUNCH_PYTHON" in finding.message


def test_a_python_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotReady, match="--python names"):
        python.find_trainer(Path("no-such-python"), None, {})
