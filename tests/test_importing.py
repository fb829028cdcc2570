"""Imports read from source, looked for, and really tried in an interpreter of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import PATIENCE_S, Write

from launcher import imports, machine
from launcher.imports import Import, Result
from launcher.machine import Trainer
from launcher.sources import Folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A virtual environment with nothing in it, not even pip."""
    place = tmp_path_factory.mktemp("venv") / "a b"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return machine.ask_trainer(place / "bin" / "python", "--python")


def tree(tmp_path: Path, files: Mapping[str, str]) -> dict[str, Folder]:
    """A package `up` of these files."""
    for name, text in files.items():
        path = tmp_path / "up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"up": Folder(tmp_path / "up")}


def tried(
    trainer: Trainer, site: Path, *modules: str, timeout_s: float = PATIENCE_S, cuda: bool = False
) -> Result:
    wanted = [Import(name, (), "up/run.py", line + 1) for line, name in enumerate(modules)]
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return imports.attempt(wanted, trainer, environ=environ, timeout_s=timeout_s, cuda=cuda)


# --- read -----------------------------------------------------------------------------------------


def test_imports_are_followed_over_the_files_of_the_package(tmp_path: Path) -> None:
    packages = tree(
        tmp_path,
        {
            "__init__.py": "import first\n",
            "run.py": "import os\nimport second.part as s\nfrom up import one\nfrom up.two.deep import x\n"
            "from . import three\n",
            "one.py": "from third.part import a, b\n",
            "two/__init__.py": "import fourth\n",
            "two/deep.py": "from ..one import a\nx = 1\n",
            "three.py": "import fifth\n",
            "unused.py": "import never\n",
        },
    )
    found = imports.of_script("up/run.py", packages)
    assert {one.top for one in found} == {"first", "second", "third", "fourth", "fifth"}
    third = next(one for one in found if one.top == "third")
    assert third == Import("third.part", ("a", "b"), "up/one.py", 1)


def test_what_is_guarded_is_not_certain(tmp_path: Path) -> None:
    text = """
import contextlib
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import checked
try:
    import optional
except ImportError:
    import instead
try:
    import surely
finally:
    pass
with contextlib.suppress(Exception):
    import suppressed
def main():
    import inside
    if True:
        import maybe
class A:
    import in_class
def other():
    def deeper():
        import never
"""
    packages = tree(tmp_path, {"run.py": text, "b.py": "def f():\n    import lazy\n"})
    found = {one.top for one in imports.of_script("up/run.py", packages)}
    assert found == {"surely", "inside", "in_class"}
    packages = tree(tmp_path, {"run.py": "from up import b\n"})
    assert imports.of_script("up/run.py", packages) == ()


def test_what_the_pinned_scripts_import(checkout: Path) -> None:
    packages = {"open_instruct": Folder(checkout / "open_instruct")}
    for script in ("finetune", "dpo_tune_cache"):
        found = {one.top for one in imports.of_script(f"open_instruct/{script}.py", packages)}
        assert {"torch", "olmo_core", "deepspeed", "ray", "wandb", "beaker", "absl"} <= found
        # only dpo.py needs it, and only data in another language this
        assert "vllm" not in found and "open_instruct" not in found


# --- looked for -------------------------------------------------------------------------------------


def test_what_is_lacking(bare: Trainer, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "__init__.py").touch()
    (tmp_path / "single.py").touch()
    trainer = Trainer(
        python=bare.python, source="a test", path=(tmp_path,), packages={"ai2-olmo-core": "1"}
    )
    names = ("olmo_core", "here", "single", "wandb", "PIL")
    assert imports.missing(names, trainer) == ("wandb", "PIL")
    assert imports.distribution("PIL") == "pillow"
    assert imports.distribution("liger_kernel") == "liger-kernel"


# --- tried ------------------------------------------------------------------------------------------


def test_a_package_that_is_not_there(bare: Trainer, tmp_path: Path) -> None:
    # launch's folder holds a `rundir`, which an environment may have too
    told = tried(bare, tmp_path, "json", "trl.trainer", "rundir")
    assert [one.missing for one in told.failures] == ["trl", "rundir"]
    assert told.failures[0].error == "ModuleNotFoundError"
    assert told.modules == ("json", "trl", "rundir")


BROKEN = {
    "ImportError": ("from os import no_such_name\n", 1, "cannot import name 'no_such_name'"),
    "SyntaxError": ("x = 1\nprint 'old'\n", 2, "Missing parentheses"),
    "RuntimeError": ("raise RuntimeError('built for\\n torch 1')\n", 1, "built for torch 1"),
    "SystemExit": ("import sys\nsys.exit('no licence')\n", 2, "no licence"),
}


def test_packages_that_are_broken(bare: Trainer, tmp_path: Path) -> None:
    for error, (text, _, _) in BROKEN.items():
        (tmp_path / error).mkdir()
        (tmp_path / error / "__init__.py").write_text(f"from {error} import inner\n")
        (tmp_path / error / "inner.py").write_text(text)
    told = tried(bare, tmp_path, *BROKEN, "json")
    assert [one.error for one in told.failures] == list(BROKEN)
    for failure in told.failures:
        _, line, message = BROKEN[failure.error]
        assert failure.missing is None
        assert (failure.file, failure.line) == (str(tmp_path / failure.error / "inner.py"), line)
        assert message in failure.message and "\n" not in failure.message


def test_what_a_package_needs_and_does_not_find_is_what_is_missing(
    bare: Trainer, write: Write, tmp_path: Path
) -> None:
    write("olmo_core.py", "import bettermap\n")
    (failure,) = tried(bare, tmp_path, "olmo_core").failures
    assert failure.missing == "bettermap"
    assert (failure.file, failure.line) == (str(tmp_path / "olmo_core.py"), 1)


def test_lazy_packages_say_the_cause(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write(
        "lazy.py",
        "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    try:\n        import behind\n    except Exception as e:\n"
        "        raise RuntimeError('could not load') from e\n",
    )
    write("behind.py", "\nimport no_such_package\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    wanted = [Import("lazy", ("Trainer",), "a.py", 1)]
    (failure,) = imports.attempt(wanted, bare, environ=environ).failures
    assert (failure.missing, failure.line) == ("no_such_package", 2)
    write("behind.py", "1 / 0\n")
    (failure,) = imports.attempt(wanted, bare, environ=environ).failures
    assert (failure.error, failure.file) == ("ZeroDivisionError", str(tmp_path / "behind.py"))


def test_an_interpreter_that_dies_in_an_import(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("dies.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    told = tried(bare, tmp_path, "json", "no_such", "dies", "csv")
    found = {one.wanted.module: (one.error, one.missing) for one in told.failures}
    assert found == {"no_such": ("ModuleNotFoundError", "no_such"), "dies": ("SIGSEGV", None)}
    assert told.failed == ("dies", "no_such")


def test_an_import_that_hangs(bare: Trainer, write: Write, tmp_path: Path) -> None:
    write("hangs.py", "import time\ntime.sleep(600)\n")
    told = tried(bare, tmp_path, "json", "hangs", "csv", timeout_s=2)
    (failure,) = told.failures
    assert failure.wanted.module == "hangs"
    assert failure.error == "TimeoutError after 2 s"


def test_a_python_that_is_none(tmp_path: Path) -> None:
    nobody = Trainer(python=tmp_path / "none", source="a test", version=(3, 12, 1))
    told = tried(nobody, tmp_path, "json")
    assert told.fault is not None and told.failures == ()


def test_torch_is_asked_for_its_gpus(bare: Trainer, write: Write, tmp_path: Path) -> None:
    cuda = "class cuda:\n    device_count = staticmethod(lambda: 2)\n"
    cuda += "class version:\n    cuda = '13.0'\n__version__ = '2.13.0'\n"
    write(
        "torch.py", cuda + "def ones(*a, **k):\n    raise RuntimeError('driver too old\\nmore')\n"
    )
    told = tried(bare, tmp_path, "torch", cuda=True)
    assert told.cuda == {
        "version": "2.13.0", "cuda": "13.0", "count": 2, "error": "RuntimeError: driver too old",
    }  # fmt: skip
    assert tried(bare, tmp_path, "json", cuda=True).cuda is None
