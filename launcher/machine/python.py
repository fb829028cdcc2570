"""Every question to the outside world, answered as frozen values."""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from launcher.errors import not_ready
from launcher.files import parse_line
from launcher.machine.git import Repository
from launcher.paths import expanded

# Runs in the trainer's interpreter; stdlib only, so that any Python answers it. Of a package's metadata
# only the head is read: parsing whole ones, descriptions included, takes longer than all else that
# plans do.
_QUESTION = """
import importlib.metadata as m, json, sys
def head(d):
    said = {}
    for line in (d.read_text("METADATA") or d.read_text("PKG-INFO") or d.read_text("") or "").splitlines():
        key, _, value = line.partition(":")
        if not line.strip() or len(said) == 2:
            break
        if key in ("Name", "Version"):
            said.setdefault(key, value.strip())
    return said
names = {}
for d in m.distributions():
    said = head(d)
    n = said.get("Name")
    if n:
        names.setdefault(n.lower().replace("_", "-").replace(".", "-"), said.get("Version"))
print(json.dumps({"version": list(sys.version_info[:3]), "path": sys.path, "packages": names,
                  "own": sys.prefix != sys.base_prefix}))
"""

# packages that losses, speed and memory may hang on: runs that had others do not compare
DECISIVE = (
    "torch transformers accelerate datasets tokenizers trl deepspeed peft liger-kernel flash-attn ai2-olmo-core "
    "bitsandbytes"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`index` is the place on the PCI bus; memory in MiB, 0 where not reported; `cuda` is the newest one served."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    used_mib: int
    driver: str = ""
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU; `used_mib` is 0 where it is not reported."""

    uuid: str
    pid: int
    used_mib: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """`fault` is nvidia-smi's complaint where it shows no GPU; divided GPUs (MIG) are left out."""

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The Python of training; `packages` are versions by normalised name, `own`: it is a virtual environment."""

    python: Path
    source: str
    version: tuple[int, ...] = ()
    path: tuple[Path, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    own: bool = False


def _answer(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Eight cards without persistence mode take ten seconds and more. Raises OSError and what subprocess raises."""
    null = subprocess.DEVNULL
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=60, stdin=null)


def ask_driver() -> Driver:
    try:
        done = _answer(["nvidia-smi", "-q", "-x"])
    except FileNotFoundError:
        return Driver()
    except (OSError, subprocess.SubprocessError) as error:
        return Driver(fault=str(error))
    document = done.stdout[done.stdout.find("<nvidia_smi_log") :]
    try:
        log = ElementTree.fromstring(document.partition("</nvidia_smi_log>")[0] + "</nvidia_smi_log>")
    except ElementTree.ParseError:
        lines = filter(None, map(str.strip, f"{done.stdout}\n{done.stderr}".split("\n")))
        return Driver(fault=next(lines, f"exit code {done.returncode}"))
    cards = log.findall("gpu")
    cuda = re.match(r"(\d+)\.(\d+)", log.findtext("cuda_version", ""))
    return Driver(
        gpus=tuple(
            Gpu(
                index=index,
                uuid=card.findtext("uuid", ""),
                name=card.findtext("product_name", ""),
                memory_mib=_mib(card.findtext("fb_memory_usage/total")),
                used_mib=_mib(card.findtext("fb_memory_usage/used")),
                driver=log.findtext("driver_version", ""),
                cuda=None if cuda is None else (int(cuda[1]), int(cuda[2])),
            )
            for index, card in enumerate(cards)
            if card.findtext("mig_mode/current_mig") != "Enabled"
        ),
        processes=tuple(
            GpuProcess(
                uuid=card.findtext("uuid", ""),
                pid=int(entry.findtext("pid", "")),
                used_mib=_mib(entry.findtext("used_memory")),
                name=entry.findtext("process_name", ""),
            )
            for card in cards
            for entry in card.findall("processes/process_info")
            if "C" in entry.findtext("type", "") and entry.findtext("pid", "").isdecimal()
        ),
        fault=None if cards else "No devices were found",
    )


def _mib(text: str | None) -> int:
    # a card that shares the host's memory answers N/A
    number = (text or "").partition(" ")[0]
    return int(number) if number.isdecimal() else 0


def git_version(root: Path, below: str = ".") -> str | None:
    """The commit checked out in `root`, `+edited` where tracked files under `below` differ from it."""
    repository = Repository(root)
    told = repository.ask("rev-parse", "HEAD", "--show-toplevel")
    commit, _, top = (told or "").partition("\n")
    # a folder without its own history would answer for the repository around it
    if not top or Path(top).resolve() != root.resolve():
        return None
    status = repository.ask("status", "--porcelain", "-uno", "--", below)
    if status is None:
        return f"{commit}+unknown"
    return f"{commit}+edited" if status else commit


def find_trainer(named: Path | None, checkout: Path | None, environ: Mapping[str, str] | None = None) -> Trainer:
    """`--python`, LAUNCH_PYTHON, the checkout's `.venv`, else ours. Raises NotReady where that does not run."""
    environ = os.environ if environ is None else environ
    variable = environ.get("LAUNCH_PYTHON")
    for path, source in ((named, "--python"), (variable and Path(variable), "LAUNCH_PYTHON")):
        if path:
            # not resolved: a virtual environment is known by the link, not by what it points to
            return ask_trainer(Path(shutil.which(expanded(path)) or path), source)
    if checkout is not None and (checkout / ".venv" / "bin" / "python").exists():
        return ask_trainer(checkout / ".venv" / "bin" / "python", "the checkout's .venv")
    return ask_trainer(Path(sys.executable), "launch's own")


def ask_trainer(python: Path, source: str) -> Trainer:
    python, data = expanded(python).absolute(), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = _answer([str(python), "-c", _QUESTION])
        # a site file may print something of its own first
        data = {} if done.returncode else parse_line(done.stdout.strip().rpartition("\n")[2].encode())
    if not data:
        message = f"{source} names a Python that does not run: {python}"
        help = "give the trainer's interpreter with --python PATH"
        raise not_ready("no-python", message, help, file=str(python))
    return Trainer(
        python=python,
        source=source,
        version=tuple(data["version"]),
        path=tuple(Path(entry) for entry in data["path"] if entry),
        packages=data["packages"],
        own=data["own"],
    )


def describe() -> dict[str, object]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in ask_driver().gpus],
    }
