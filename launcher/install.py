"""What builds the trainer's environment: argv lists, in order, for one Python. Never a shell.

The packages are those of launch's own extras, in the versions it was tested with where its
constraints are here. It is what `make install-open-instruct` and `make install-trl` do, without
launch itself: the trainer's Python needs nothing of it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.errors import Finding, not_ready
from launcher.machine import Trainer
from launcher.upstream import REPOSITORY

# what a build that imports torch needs beside it, where it may not fetch it for itself
BUILD = ("setuptools", "wheel", "ninja", "py-cpuinfo", "hjson", "pydantic", "packaging", "psutil")
# these are built against the torch that is there, and import it while they are
BUILT: Mapping[str, Mapping[str, str]] = {
    # its kernels are compiled when they are first used
    "deepspeed": {"DS_BUILD_OPS": "0"},
    "flash-attn": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command; `env` is added to the environment."""

    argv: tuple[str, ...]
    why: str
    env: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """As it can be pasted into a POSIX shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])

    def as_json(self) -> dict[str, object]:
        """For envelopes."""
        return {"argv": list(self.argv), "env": dict(self.env), "why": self.why}


@cache
def wanted(extra: str) -> tuple[str, ...]:
    """The requirements of one of launch's extras, as pip takes them.

    Empty where the package was copied alone, without its pyproject.toml, and is not installed.
    """
    try:
        told = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
        if told["project"]["name"] == "launcher":
            return tuple(told["project"]["optional-dependencies"][extra])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # installed without its repository
    try:
        declared = importlib.metadata.requires("launcher") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    found = []
    for text in declared:
        one = Requirement(text)
        marker, one.marker = one.marker, None
        asked = marker is not None and marker.evaluate({"extra": extra})
        if asked and marker is not None and not marker.evaluate({"extra": ""}):
            found.append(str(one))
    return tuple(found)


@cache
def known() -> Mapping[str, str]:
    """Every requirement of the trainers' extras by the distribution's name."""
    texts = [text for extra in ("gpu", "trl", "open-instruct") for text in wanted(extra)]
    return {str(canonicalize_name(Requirement(text).name)): text for text in texts}


def unknown() -> Finding:
    """What to say where `known` is empty: no list of packages, no plan."""
    return Finding(
        severity="error", layer="launch", code="packages-unknown",
        message=f"{REPOSITORY} has no pyproject.toml, and launcher is not installed: which packages "
        "training needs is written there", help="pip install -e a clone of launch, then ask again",
    )  # fmt: skip


@cache
def tested() -> frozenset[str]:
    """The distributions that the extras bring along, by constraints.txt; empty without that file."""
    try:
        lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        str(canonicalize_name(line.partition("==")[0])) for line in lines if "==" in line
    )


def steps(
    trainer: Trainer, extra: str, *, gpus: bool, more: Sequence[str] = ()
) -> tuple[Step, ...]:
    """What installs everything that a backend needs (`extra` is its name among launch's).

    `more` is what the stages ask for beyond that, as pip takes it.
    """
    every = [*wanted("trl"), *(wanted(extra) if extra != "trl" else ())]
    every += wanted("gpu") if gpus else ()
    if every:
        named = {_name(text) for text in every}
        every += [text for text in more if _name(text) not in named]
    return packages(trainer, every, whole=extra)


def packages(
    trainer: Trainer, requirements: Sequence[str], *, whole: str = "", held: bool = True
) -> tuple[Step, ...]:
    """What installs these: the ordinary ones together, then one by one what torch must be there for.

    Last come those that launch was not tested with: vllm is not to be had for every machine, nor under
    the tested versions (its mistral-common wants an older numpy). What matters of these is `held`.
    """
    each = dict.fromkeys(requirements)
    beyond = [text for text in each if _is_beyond(_name(text))]
    plain = [text for text in each if text not in beyond and _name(text) not in BUILT]
    built = [text for text in each if _name(text) in BUILT]
    here = {*trainer.packages, *map(_name, plain)}
    made = list(_without_pip(trainer))
    pip = _pip(trainer)
    if whole and plain:
        made.append(_step(pip, plain, f"the packages of `{whole}`"))
    elif plain:
        made.append(_step(pip, plain, ", ".join(map(_name, plain))))
    if built:
        lacking = [name for name in BUILD if whole or name not in trainer.packages]
        if lacking:
            made.append(_step(pip, lacking, "what the next builds with"))
        if "torch" not in here:
            made.append(
                _step(pip, [known().get("torch", "torch")], "torch, which they build against")
            )
    for text in built:
        name = _name(text)
        made.append(
            Step(
                argv=(*pip, "--no-build-isolation", text), env=BUILT[name],
                why=f"{name}: its build imports torch",
            )
        )  # fmt: skip
    if beyond:
        kept = _kept(trainer, {_name(text): text for text in plain}) if held else []
        made.append(
            _step(_pip(trainer, tested=False), [*beyond, *kept], ", ".join(map(_name, beyond)))
        )
    return tuple(made)


def _is_beyond(name: str) -> bool:
    """Whether launch names a package nowhere; without constraints.txt nothing is known of most."""
    return bool(tested()) and name not in known() and name not in tested()


def _kept(trainer: Trainer, coming: Mapping[str, str]) -> list[str]:
    """The versions that training depends on most, as they are here or are about to be."""
    kept = []
    for name, text in known().items():
        if "==" in text and name not in BUILT:
            version = trainer.packages.get(name)
            if name in coming:
                kept.append(coming[name])
            elif version is not None:
                kept.append(f"{name}=={version}")
    return kept


def _step(pip: Sequence[str], words: Sequence[str], why: str) -> Step:
    return Step(argv=(*pip, *words), why=why)


def _name(text: str) -> str:
    return str(canonicalize_name(Requirement(text).name))


def _pip(trainer: Trainer, *, tested: bool = True) -> tuple[str, ...]:
    python = str(trainer.python)
    uv = None if "pip" in trainer.packages else shutil.which("uv")
    head = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    versions = REPOSITORY / "constraints.txt"
    return (*head, *(("-c", str(versions)) if tested and versions.is_file() else ()))


def _without_pip(trainer: Trainer) -> list[Step]:
    if "pip" in trainer.packages or shutil.which("uv"):
        return []
    argv = (str(trainer.python), "-m", "ensurepip", "--upgrade")
    return [Step(argv=argv, why="this Python has no pip")]


def run(
    todo: Sequence[Step], environ: Mapping[str, str] | None = None, to: IO[str] | None = None
) -> None:
    """Do one after the other, what they say to `to` (stderr: answers go to stdout).

    Raises NotReady at the first that fails, with what is left to be done.
    """
    environ = os.environ if environ is None else environ
    to = sys.stderr if to is None else to
    for number, step in enumerate(todo):
        print(f"+ {step.shell()}", file=to, flush=True)
        try:
            done = subprocess.run(
                step.argv, env={**environ, **step.env}, stdin=subprocess.DEVNULL, stdout=to,
                stderr=to, check=False,
            )  # fmt: skip
            reason = f"exit code {done.returncode}" if done.returncode else None
        except (OSError, ValueError) as error:
            reason = str(error)
        if reason is not None:
            left = "; then ".join(one.shell() for one in todo[number:])
            raise not_ready(
                "install-failed", f"installing {step.why} failed: {reason}",
                f"what is left: {left}",
            )  # fmt: skip
