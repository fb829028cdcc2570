"""Every question to the outside world, answered as frozen values."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import Finding, NotReady

# Read once in the trainer's interpreter; stdlib only, so that any Python answers it.
_QUESTION = """
import importlib.metadata as m, json, sys
names = {}
for d in m.distributions():
    n = d.metadata["Name"]
    if n:
        names.setdefault(n.lower().replace("_", "-"), d.version)
print(json.dumps({"version": list(sys.version_info[:3]), "path": sys.path, "packages": names}))
"""


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


def run(argv: Sequence[str], timeout_s: float = 10.0) -> str | None:
    """The output of a short command; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = "--query-gpu=index,name,memory.total,memory.used"
    listed = run(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or ""
    found = []
    for line in listed.splitlines():
        index, name, total, used = (part.strip() for part in line.split(","))
        found.append(Gpu(index=int(index), name=name, memory_mib=int(total), used_mib=int(used)))
    return tuple(found)


def git_version(root: Path, below: str = ".") -> str | None:
    """The commit checked out in `root`, `+edited` where tracked files under `below` differ from it."""
    commit = run(["git", "-C", str(root), "rev-parse", "HEAD"])
    top = run(["git", "-C", str(root), "rev-parse", "--show-toplevel"])
    # a folder without its own history would answer for the repository around it
    if commit is None or top is None or Path(top).resolve() != root.resolve():
        return None
    status = run(["git", "-C", str(root), "status", "--porcelain", "-uno", "--", below])
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
            return ask_trainer(Path(shutil.which(str(path.expanduser())) or path), source)
    if checkout is not None and (checkout / ".venv" / "bin" / "python").exists():
        return ask_trainer(checkout / ".venv" / "bin" / "python", "the checkout's .venv")
    return ask_trainer(Path(sys.executable), "launch's own")


def ask_trainer(python: Path, source: str) -> Trainer:
    """Ask an interpreter for its version, import path and packages; raises NotReady if it fails."""
    python = python.expanduser().absolute()
    answer = run([str(python), "-c", _QUESTION], timeout_s=30)
    if answer is None:
        raise NotReady(
            Finding(
                severity="error", layer="launch", code="no-python", file=str(python),
                message=f"{source} names a Python that does not run: {python}",
                help="give the trainer's interpreter with --python PATH",
            )
        )  # fmt: skip
    told = json.loads(answer.splitlines()[-1])
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
