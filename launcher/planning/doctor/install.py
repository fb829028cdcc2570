"""The packages in the trainer's Python: what is missing, what does not import, what installs it.

Before each run only metadata and files are read. `launch doctor` also imports the entry script
itself, in a process of its own, which takes 15 to 60 seconds for open-instruct. Packages are
installed in the versions that launch was tested with, as `make install-open-instruct` does.
"""

import importlib.machinery
import json
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.files import parse_line
from launcher.lazy_dataclass import dataclass
from launcher.machine import isolation, process
from launcher.machine.python import Trainer
from launcher.paths import PACKAGE, find_shipped

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
# an install without constraints must not change the versions of these
_KEPT = ("torch", "transformers", "accelerate", "datasets")
# what such a build needs beside torch, where it may not fetch it for itself
BUILD = ("setuptools", "wheel", "ninja", "py-cpuinfo", "hjson", "pydantic", "packaging", "psutil")


def find_missing(names: Sequence[str], trainer: Trainer) -> tuple[str, ...]:
    """The distributions that the trainer's Python has neither as metadata nor as a file."""
    path = [str(folder) for folder in trainer.path]
    absent = []
    for name in names:
        if name not in trainer.packages and not _has_module(name, path):
            absent.append(name)
    return tuple(absent)


def _has_module(name: str, path: list[str]) -> bool:
    module = MODULES.get(name, name.replace("-", "_"))
    try:
        spec = importlib.machinery.PathFinder.find_spec(module, path)
    except (ImportError, OSError, ValueError):
        return False
    # any folder of that name (`wandb` makes one) would do for a namespace
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An import that fails: the exception, and `file:line` of where it was raised.

    `missing` is the top-level module that is not installed; None where something that is there
    fails.
    """

    module: str
    error: str
    message: str
    file: str | None = None
    line: int | None = None
    missing: str | None = None

    @property
    def cause(self) -> object:
        """Equal for failures with the same reason."""
        if self.missing is None and self.file is not None:
            return self.file, self.line
        return self.missing or self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """The result of importing `modules`. Of failures with the same cause the first is kept.

    `cuda` is what torch says about the GPUs.
    """

    modules: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    cuda: Mapping[str, Any] | None = None


def try_imports(
    modules: Sequence[str],
    trainer: Trainer,
    *,
    environ: Mapping[str, str],
    timeout_s: float,
    cuda: bool = False,
) -> Imports:
    """Import modules in turn, in one process of the trainer's Python.

    If the process dies, or takes longer than `timeout_s` for all modules, the module that it was
    importing has failed and the later ones are not tried.
    """
    child = subprocess.Popen(
        [str(trainer.python), str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=isolation.isolate(environ),
        start_new_session=True,
    )
    question = json.dumps({"modules": list(modules), "cuda": cuda})
    try:
        out, err = child.communicate(question.encode(), timeout=timeout_s)
        end = _describe_end(child.returncode)
    except subprocess.TimeoutExpired:
        started = process.find_descendants(child.pid)
        process.signal_group(child.pid, signal.SIGKILL)
        process.signal_all(started, signal.SIGKILL)
        out, err = child.communicate()
        end = f"TimeoutError after {timeout_s:.0f} s"
    lines = err.decode(errors="replace").strip().splitlines() or [""]
    return _read_answers(modules, out, end, lines[-1])


def _describe_end(returncode: int) -> str:
    """How a process failed; empty if it did not."""
    if returncode < 0:
        return signal.Signals(-returncode).name
    if returncode > 0:
        return f"exit code {returncode}"
    return ""


def _read_answers(modules: Sequence[str], out: bytes, end: str, message: str) -> Imports:
    """`end` is how the process failed, `message` the last line that it wrote."""
    causes: dict[object, Failure] = {}
    cuda = None
    # torch is asked for its GPUs after all imports
    last_module = "torch"
    for line in out.splitlines():
        answer = parse_line(line)
        if not answer:
            continue
        last_module = answer.get("module", "torch")
        cuda = answer.get("cuda", cuda)
        if "fault" in answer:
            failure = Failure(module=last_module, **answer["fault"])
            causes.setdefault(failure.cause, failure)
    if end:
        failure = Failure(module=last_module, error=end, message=message)
        causes.setdefault(failure.cause, failure)
    return Imports(modules=tuple(modules), failures=tuple(causes.values()), cuda=cuda)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallStep:
    """One command as an argv list, never a shell; `env` is added to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])

    def as_json(self) -> dict[str, object]:
        return {"argv": list(self.argv), "env": dict(self.env)}


@cache
def read_extras() -> Mapping[str, Sequence[str]]:
    """The requirements of launch's extras; empty if its pyproject.toml is not there."""
    try:
        text = find_shipped("pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(tomllib.loads(text)["project"]["optional-dependencies"])


@cache
def read_tested() -> Mapping[str, str]:
    """The requirement of each package with the version that launch was tested with."""
    requirements = {}
    for extra in ("gpu", "trl", "open-instruct"):
        for text in read_extras().get(extra, ()):
            requirements[_parse_name(text)] = text
    return requirements


def find_requirement(name: str) -> str:
    """The tested requirement of a package, else its name."""
    return read_tested().get(name, name)


def list_steps(
    trainer: Trainer, extra: str, *, gpus: bool, more: Sequence[str] = ()
) -> tuple[InstallStep, ...]:
    """The commands that install all packages of a backend (`extra` of launch), and `more`."""
    wanted = ["trl", extra]
    if gpus:
        wanted.append("gpu")
    requirements: list[str] = []
    for name in dict.fromkeys(wanted):
        requirements += read_extras().get(name, ())
    names = set(map(_parse_name, requirements))
    requirements += [find_requirement(name) for name in more if name not in names]
    return install(trainer, requirements)


def install(trainer: Trainer, requirements: Sequence[str]) -> tuple[InstallStep, ...]:
    """The commands that install these: the ordinary ones, then those that need torch."""
    plain: dict[str, str] = {}
    built: dict[str, str] = {}
    unconstrained: dict[str, str] = {}
    for text in requirements:
        name = _parse_name(text)
        group = plain
        if name in BUILT:
            group = built
        elif name in UNCONSTRAINED:
            group = unconstrained
        group[name] = text
    if built:
        for name in (*BUILD, "torch"):
            if name not in trainer.packages:
                plain.setdefault(name, find_requirement(name))
    pip = pip_install(trainer)
    steps = []
    if "pip" not in trainer.packages and pip[0] == str(trainer.python):
        steps.append(InstallStep(argv=(pip[0], "-m", "ensurepip", "--upgrade")))
    if plain:
        steps.append(InstallStep(argv=(*pip, *plain.values())))
    if built:
        argv = (*pip, "--no-build-isolation", *built.values())
        steps.append(InstallStep(argv=argv, env=BUILD_ENV))
    if unconstrained:
        kept = [_format_requirement(name, trainer) for name in _KEPT]
        pip = pip_install(trainer, constrained=False)
        steps.append(InstallStep(argv=(*pip, *unconstrained.values(), *kept)))
    return tuple(steps)


def _format_requirement(name: str, trainer: Trainer) -> str:
    """The installed version of a package, else the one that launch asks for."""
    version = trainer.packages.get(name)
    if version is None:
        return find_requirement(name)
    return f"{name}=={version}"


def _parse_name(text: str) -> str:
    return str(canonicalize_name(Requirement(text).name))


def pip_install(trainer: Trainer, *, constrained: bool = True) -> tuple[str, ...]:
    """The beginning of an install command; `constrained` to the versions of constraints.txt."""
    words = [str(trainer.python), "-m", "pip", "install"]
    if "pip" not in trainer.packages:
        uv = isolation.find_program("uv")
        if uv is not None:
            words = [uv, "pip", "install", "--python", str(trainer.python)]
    versions = find_shipped("constraints.txt")
    if constrained and versions.is_file():
        words += ["-c", str(versions)]
    return tuple(words)
