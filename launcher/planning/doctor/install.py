"""The packages in the trainer's Python: what is missing, what does not import, what installs it.

Before each run only metadata and files are read. `launch doctor` also imports the entry script itself, in
a process of its own, which takes 15 to 60 seconds for open-instruct.
Packages are installed in the versions that launch was tested with, as `make install-open-instruct` does.
"""

import importlib.machinery
import json
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.files import parse_line
from launcher.machine import isolation, process
from launcher.machine.python import Trainer
from launcher.paths import PACKAGE, shipped

CHILD = PACKAGE / "machine" / "importing.py"
TIMEOUT_S = 300.0
MODULES: Mapping[str, str] = {
    "absl-py": "absl",
    "ai2-olmo-core": "olmo_core",
    "beaker-py": "beaker",
    "openenv-core": "openenv",
    "pillow": "PIL",
    "python-dateutil": "dateutil",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}
"""Distributions whose module has another name."""
# these import the torch that is there while they are built
BUILT = ("deepspeed", "flash-attn")
# DeepSpeed's kernels are compiled when they are first used
BUILD_ENV = {"DS_BUILD_OPS": "0"}
# its mistral-common wants an older numpy than constraints.txt has
UNCONSTRAINED = ("vllm",)
# what such a build needs beside torch, where it may not fetch it for itself
BUILD = ("setuptools", "wheel", "ninja", "py-cpuinfo", "hjson", "pydantic", "packaging", "psutil")


def missing(names: Sequence[str], trainer: Trainer) -> tuple[str, ...]:
    """Those distributions that the trainer's Python holds neither as such nor as a file."""
    path = [str(folder) for folder in trainer.path]
    return tuple(name for name in names if name not in trainer.packages and not _has_module(name, path))


def _has_module(name: str, path: list[str]) -> bool:
    try:
        module = MODULES.get(name, name.replace("-", "_"))
        spec = importlib.machinery.PathFinder.find_spec(module, path)
    except (ImportError, OSError, ValueError):
        return False
    # any folder of that name (`wandb` makes one) would do for a namespace
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An import that fails: the exception, and `file:line` of where it was raised.

    `missing` is the top-level module that is not installed; None where something that is there fails.
    """

    module: str
    error: str
    message: str
    file: str | None = None
    line: int | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """How importing went; `cuda` is what torch says of the GPUs, `fault` why nothing could be tried."""

    modules: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    cuda: Mapping[str, Any] | None = None
    fault: str | None = None


def try_imports(
    modules: Sequence[str], trainer: Trainer, *, environ: Mapping[str, str], timeout_s: float, cuda: bool = False
) -> Imports:
    """Import modules in turn, in one process of the trainer's Python.

    One in which the process dies or does not come back (within `timeout_s` for all together) is the last.
    """
    try:
        child = subprocess.Popen(
            [str(trainer.python), str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=isolation.isolated(environ),
            start_new_session=True,
        )
    except OSError as error:
        return Imports(modules=tuple(modules), fault=f"OSError: {error}")
    end = ""
    try:
        question = json.dumps({"modules": list(modules), "cuda": cuda})
        out, err = child.communicate(question.encode(), timeout=timeout_s)
        if child.returncode:
            end = f"exit code {child.returncode}"
        if child.returncode < 0:
            end = signal.Signals(-child.returncode).name
    except subprocess.TimeoutExpired:
        started = process.descendants(child.pid)
        process.signal_group(child.pid, signal.SIGKILL)
        process.signal_all(started, signal.SIGKILL)
        out, err = child.communicate()
        end = f"TimeoutError after {timeout_s:.0f} s"
    words = (err.decode(errors="replace").strip().splitlines() or [""])[-1]
    answers = [answer for line in out.splitlines() if (answer := parse_line(line))]
    begun = next((one.get("module") for one in reversed(answers)), None)
    failures = [Failure(module=one["module"], **one["fault"]) for one in answers if "fault" in one]
    if end and begun is not None:
        failures.append(Failure(module=begun, error=end, message=words))
    # several modules fail for the same reason: the first of them is shown
    distinct = {one.missing or (one.file and (one.file, one.line)) or one.module: one for one in reversed(failures)}
    return Imports(
        modules=tuple(modules),
        failures=tuple(one for one in failures if one in distinct.values()),
        cuda=next((one["cuda"] for one in answers if "cuda" in one), None),
        fault=f"{end}: {words}" if end and begun is None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallStep:
    """One command as an argv list, never a shell; `env` is added to the environment."""

    argv: tuple[str, ...]
    why: str
    env: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])

    def as_json(self) -> dict[str, object]:
        return {"argv": list(self.argv), "env": dict(self.env), "why": self.why}


@cache
def extras() -> Mapping[str, Sequence[str]]:
    """The requirements of launch's extras; none where it lies without its pyproject.toml."""
    try:
        text = shipped("pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        return dict(project["optional-dependencies"]) if project["name"] == "launcher" else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@cache
def tested() -> Mapping[str, str]:
    texts = [text for extra in ("gpu", "trl", "open-instruct") for text in extras().get(extra, ())]
    return {_name(text): text for text in texts}


def steps(trainer: Trainer, extra: str, *, gpus: bool, more: Sequence[str] = ()) -> tuple[InstallStep, ...]:
    """What installs everything that a backend needs (`extra` is its name among launch's), and `more`."""
    listed = [text for name in dict.fromkeys(("trl", extra)) for text in extras().get(name, ())]
    listed += extras().get("gpu", ()) if gpus else ()
    names = set(map(_name, listed))
    listed += [tested().get(name, name) for name in more if name not in names]
    return install(trainer, listed, f"the packages of `{extra}`")


def install(trainer: Trainer, requirements: Sequence[str], why: str = "") -> tuple[InstallStep, ...]:
    """What installs these: the ordinary ones together, then those that torch must be there for."""
    distinct = list(dict.fromkeys(requirements))
    built = [text for text in distinct if _name(text) in BUILT]
    last = [text for text in distinct if _name(text) in UNCONSTRAINED]
    plain = [text for text in distinct if text not in (*built, *last)]
    tools = [*BUILD, *(() if "torch" in map(_name, plain) else (tested().get("torch", "torch"),))]
    lacking = [text for text in tools if _name(text) not in trainer.packages]
    plain += lacking if built else []
    pip = pip_install(trainer)
    steps = list[InstallStep]()
    if "pip" not in trainer.packages and pip[0] == str(trainer.python):
        ensure = (str(trainer.python), "-m", "ensurepip", "--upgrade")
        steps.append(InstallStep(argv=ensure, why="this Python has no pip"))
    if plain:
        steps.append(InstallStep(argv=(*pip, *plain), why=why or ", ".join(map(_name, plain))))
    if built:
        argv = (*pip, "--no-build-isolation", *built)
        listed = ", ".join(map(_name, built))
        steps.append(InstallStep(argv=argv, env=BUILD_ENV, why=f"{listed}: their builds import torch"))
    if last:
        present = {name: f"{name}=={version}" for name, version in trainer.packages.items()}
        names = ("torch", "transformers", "accelerate", "datasets")
        kept = [present.get(name) or tested().get(name, name) for name in names]
        pip = pip_install(trainer, constrained=False)
        steps.append(InstallStep(argv=(*pip, *last, *kept), why=", ".join(map(_name, last))))
    return tuple(steps)


def _name(text: str) -> str:
    return str(canonicalize_name(Requirement(text).name))


def pip_install(trainer: Trainer, *, constrained: bool = True) -> tuple[str, ...]:
    """The beginning of a command that installs packages, in the tested versions where `constrained`."""
    python = str(trainer.python)
    uv = None if "pip" in trainer.packages else isolation.find_program("uv")
    head = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    versions = shipped("constraints.txt")
    return (*head, *(("-c", str(versions)) if constrained and versions.is_file() else ()))
