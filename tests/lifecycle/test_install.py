"""The packages in a trainer's Python: what is missing, what really imports, what installs it."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY, Write
from packaging.requirements import Requirement

from launcher.lifecycle.doctor import install
from launcher.lifecycle.doctor.install import Imports, InstallStep
from launcher.machine import python
from launcher.machine.python import Trainer

WITH_PIP = Trainer(python=Path("/env/my bin/python"), source="a test", version=(3, 12, 1), packages={"pip": "26"})


@pytest.fixture(autouse=True)
def no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A virtual environment with nothing in it, not even pip."""
    place = tmp_path_factory.mktemp("venv") / "a b"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return python.ask_trainer(place / "bin" / "python", "--python")


def test_what_is_lacking(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "__init__.py").touch()
    (tmp_path / "absl.py").touch()
    trainer = replace(WITH_PIP, path=(tmp_path,), packages={"ai2-olmo-core": "1"})
    names = ("ai2-olmo-core", "here", "absl-py", "wandb", "pillow")
    assert install.missing(names, trainer) == ("wandb", "pillow")


def tried(trainer: Trainer, site: Path, *modules: str, timeout_s: float = PATIENCE_S, cuda: bool = False) -> Imports:
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return install.try_imports(modules, trainer, environ=environ, timeout_s=timeout_s, cuda=cuda)


def test_a_package_that_is_not_there(bare: Trainer, tmp_path: Path) -> None:
    # launch's folder holds a `rundir`, which an environment may have too
    answer = tried(bare, tmp_path, "json", "trl.trainer", "rundir")
    assert [one.missing for one in answer.failures] == ["trl", "rundir"]
    assert answer.failures[0].error == "ModuleNotFoundError"


BROKEN = {
    "ImportError": ("from os import no_such_name\n", 1, "cannot import name 'no_such_name'"),
    "SyntaxError": ("x = 1\nprint 'old'\n", 2, "Missing parentheses"),
    "RuntimeError": ("raise RuntimeError('built for\\n torch 1')\n", 1, "built for torch 1"),
    "ModuleNotFoundError": ("import _part_of_python\n", 1, "No module named '_part_of_python'"),
    "SystemExit": ("import sys\nsys.exit('no licence')\n", 2, "no licence"),
}


def test_packages_that_are_broken(bare: Trainer, tmp_path: Path) -> None:
    for error, (text, _, _) in BROKEN.items():
        (tmp_path / error).mkdir()
        (tmp_path / error / "__init__.py").write_text(f"from {error} import inner\n")
        (tmp_path / error / "inner.py").write_text(text)
    answer = tried(bare, tmp_path, *BROKEN, "json")
    assert [one.error for one in answer.failures] == list(BROKEN)
    for failure in answer.failures:
        _, line, message = BROKEN[failure.error]
        assert failure.missing is None
        assert (failure.file, failure.line) == (str(tmp_path / failure.error / "inner.py"), line)
        assert message in failure.message and "\n" not in failure.message


def test_the_cause_behind_other_exceptions(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("olmo_core.py", "import bettermap\n")
    (failure,) = tried(bare, tmp_path, "olmo_core").failures
    assert failure.missing == "bettermap"
    assert (failure.file, failure.line) == (str(tmp_path / "olmo_core.py"), 1)
    write("lazy.py", "try:\n    import behind\nexcept Exception as e:\n    raise RuntimeError('no') from e\n")
    write("behind.py", "1 / 0\n")
    (failure,) = tried(bare, tmp_path, "lazy").failures
    assert (failure.error, failure.file) == ("ZeroDivisionError", str(tmp_path / "behind.py"))


def test_an_interpreter_that_dies_or_hangs(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("dies.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    answer = tried(bare, tmp_path, "json", "no_such", "dies", "csv")
    found = {one.module: (one.error, one.missing) for one in answer.failures}
    assert found == {"no_such": ("ModuleNotFoundError", "no_such"), "dies": ("SIGSEGV", None)}
    write("hangs.py", "import time\ntime.sleep(600)\n")
    (failure,) = tried(bare, tmp_path, "json", "hangs", "csv", timeout_s=2).failures
    assert (failure.module, failure.error) == ("hangs", "TimeoutError after 2 s")
    nobody = replace(WITH_PIP, python=tmp_path / "none")
    answer = tried(nobody, tmp_path, "json")
    assert answer.fault is not None and answer.failures == ()


def test_torch_is_asked_for_its_gpus(bare: Trainer, write: Write, tmp_path: Path) -> None:
    cuda = "class cuda:\n    device_count = staticmethod(lambda: 2)\n"
    cuda += "class version:\n    cuda = '13.0'\n__version__ = '2.13.0'\n"
    write("torch.py", cuda + "def ones(*a, **k):\n    raise RuntimeError('driver too old\\nmore')\n")
    assert tried(bare, tmp_path, "torch", cuda=True).cuda == {
        "version": "2.13.0", "cuda": "13.0", "count": 2, "error": "RuntimeError: driver too old",
    }  # fmt: skip
    assert tried(bare, tmp_path, "json", cuda=True).cuda is None


def names(steps: tuple[InstallStep, ...]) -> list[list[str]]:
    """The packages of each step, without pip's own words."""
    found = []
    for step in steps:
        words = [w for w in step.argv[step.argv.index("install") + 1 :] if not w.startswith("--no")]
        words = words[2:] if words[0] == "-c" else words
        found.append([Requirement(word).name for word in words])
    return found


def test_the_order_of_what_is_installed() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = extras["optional-dependencies"]
    for extra in ("trl", "open-instruct"):
        told = {name for step in names(install.steps(WITH_PIP, extra, gpus=True)) for name in step}
        asked = {Requirement(text).name for text in (*wanted[extra], *wanted["gpu"])}
        assert asked <= told
    assert install.extras()["gpu"] == wanted["gpu"]
    # what imports torch while it is built comes after it
    steps = install.steps(WITH_PIP, "open-instruct", gpus=True)
    order = names(steps)
    assert {"torch", "setuptools", "wheel", "ninja", "hjson"} <= set(order[0])
    assert "deepspeed" not in order[0]
    assert order[1:] == [["deepspeed", "flash-attn"]]
    assert steps[1].env == {"DS_BUILD_OPS": "0"} and "--no-build-isolation" in steps[1].argv
    assert "flash-attn" not in str(names(install.steps(WITH_PIP, "open-instruct", gpus=False)))
    # Its commands install the same packages, by the names of launch's extras.
    recipe = (REPOSITORY / "Makefile").read_text().partition("$(VENV)/open-instruct:")[2]
    first, second, third = recipe.strip().splitlines()[1:4]
    steps = install.steps(WITH_PIP, "open-instruct", gpus=False)
    for tool in first.partition("constraints.txt ")[2].split():
        assert tool in names(steps)[0]
    assert "DS_BUILD_OPS=0" in second and "--no-build-isolation deepspeed" in second
    assert "'.[open-instruct]'" in third
    versions = f"-c {REPOSITORY / 'constraints.txt'}"
    assert all(versions in " ".join(step.argv) for step in steps)
    # single packages
    (step,) = install.install(WITH_PIP, ["ray>=2", "wandb"])
    assert step.argv[:4] == ("/env/my bin/python", "-m", "pip", "install")
    assert step.argv[-2:] == ("ray>=2", "wandb")
    assert step.shell().startswith("'/env/my bin/python' -m pip install")
    # the build finds no torch where none is there
    assert "torch" in names(install.install(WITH_PIP, ["flash-attn"]))[0]
    ready = replace(WITH_PIP, packages={"pip": "1", "torch": "2", **dict.fromkeys(install.BUILD, "1")})
    assert names(install.install(ready, ["flash-attn"])) == [["flash-attn"]]


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(WITH_PIP, packages={})
    first, second = install.install(bare, ["ray"])
    assert first.argv == ("/env/my bin/python", "-m", "ensurepip", "--upgrade")
    assert second.argv[1:3] == ("-m", "pip")
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (only,) = install.install(bare, ["ray"])
    assert only.argv[:5] == (str(uv), "pip", "install", "--python", "/env/my bin/python")


def test_a_step_is_pasted_as_it_is() -> None:
    step = InstallStep(argv=("/env/my bin/python", "$(id); `id`\n"), why="one", env={"SAID": "<"})
    assert step.shell() == "SAID='<' '/env/my bin/python' '$(id); `id`\n'"
