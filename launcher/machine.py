"""Every question to the outside world, answered as frozen values."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import Finding, NotReady
from launcher.paths import expanded

# Read once in the trainer's interpreter; stdlib only, so that any Python answers it.
_QUESTION = """
import importlib.metadata as m, json, sys
names = {}
for d in m.distributions():
    n = d.metadata and d.metadata["Name"]
    if n:
        names.setdefault(n.lower().replace("_", "-").replace(".", "-"), d.version)
print(json.dumps({"version": list(sys.version_info[:3]), "path": sys.path, "packages": names}))
"""


_GPU = re.compile(r"\s*(\d+), (.+), (\[?[\w/ ]+\]?), (\[?[\w/ ]+\]?)\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as `nvidia-smi` tells it; memory in MiB."""

    index: int
    name: str
    memory_mib: int
    used_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The Python that training runs under, and what is installed there."""

    python: Path
    source: str
    version: tuple[int, ...] = ()
    path: tuple[Path, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)


def run(
    argv: Sequence[str], timeout_s: float = 10.0, environ: Mapping[str, str] | None = None
) -> str | None:
    """The output of a short command; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=True, errors="replace",
            stdin=subprocess.DEVNULL, env=environ,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = "--query-gpu=index,name,memory.total,memory.used"
    # eight cards without persistence mode take ten seconds and more to answer
    listed = run(["nvidia-smi", query, "--format=csv,noheader,nounits"], timeout_s=60) or ""
    found = (_GPU.match(line) for line in listed.splitlines())
    return tuple(
        Gpu(index=int(m[1]), name=m[2], memory_mib=_mib(m[3]), used_mib=_mib(m[4]))
        for m in found
        if m
    )


def _mib(text: str) -> int:
    # a card that shares the host's memory answers [N/A]
    return int(text) if text.isdigit() else 0


def visible_gpus(environ: Mapping[str, str] | None = None) -> int:
    """How many GPUs training would see: those of this machine that CUDA_VISIBLE_DEVICES leaves."""
    environ = os.environ if environ is None else environ
    present = len(gpus())
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not present:
        return present
    count = 0
    for name in (entry.strip() for entry in listed.split(",")):
        # CUDA ignores the first invalid entry and all that follow
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= present):
            break
        count += 1
    return count


def git_version(root: Path, below: str = ".") -> str | None:
    """The commit checked out in `root`, `+edited` where tracked files under `below` differ from it."""
    # inside a git hook these name another repository
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    git = ["git", "--no-optional-locks", "-C", str(root)]
    told = run([*git, "rev-parse", "HEAD", "--show-toplevel"], environ=environ)
    commit, _, top = (told or "").partition("\n")
    # a folder without its own history would answer for the repository around it
    if not top or Path(top).resolve() != root.resolve():
        return None
    status = run([*git, "status", "--porcelain", "-uno", "--", below], 60, environ)
    if status is None:
        return f"{commit}+unknown"
    return f"{commit}+edited" if status else commit


def find_trainer(
    named: Path | None, checkout: Path | None, environ: Mapping[str, str] | None = None
) -> Trainer:
    """The trainer's Python: `--python`, LAUNCH_PYTHON, the checkout's `.venv`, else ours.

    Raises NotReady where the one that was named does not run.
    """
    environ = os.environ if environ is None else environ
    candidates: list[tuple[Path | None, str]] = [
        (named, "--python"),
        (Path(environ["LAUNCH_PYTHON"]) if environ.get("LAUNCH_PYTHON") else None, "LAUNCH_PYTHON"),
    ]
    for path, source in candidates:
        if path is not None:
            # not resolved: a virtual environment is known by the link, not by what it points to
            return ask_trainer(Path(shutil.which(expanded(path)) or path), source)
    if checkout is not None and (checkout / ".venv" / "bin" / "python").exists():
        return ask_trainer(checkout / ".venv" / "bin" / "python", "the checkout's .venv")
    return ask_trainer(Path(sys.executable), "launch's own")


def ask_trainer(python: Path, source: str) -> Trainer:
    """Ask an interpreter for its version, import path and packages; raises NotReady if it fails."""
    python = expanded(python).absolute()
    # a site file may print something of its own first
    answer = (run([str(python), "-c", _QUESTION], timeout_s=60) or "").rpartition("\n")[2]
    try:
        told = json.loads(answer)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise NotReady(
            Finding(
                severity="error", layer="launch", code="no-python", file=str(python),
                message=f"{source} names a Python that does not run: {python}",
                help="give the trainer's interpreter with --python PATH",
            )
        )  # fmt: skip
    return Trainer(
        python=python,
        source=source,
        version=tuple(told["version"]),
        path=tuple(Path(entry) for entry in told["path"] if entry),
        packages=told["packages"],
    )


def describe() -> dict[str, object]:
    """What the manifest keeps of this machine."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in gpus()],
    }
