"""Every question to the outside world, answered as frozen values."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from launcher.errors import RESOURCE_LIMITS, not_ready
from launcher.files import parse_line
from launcher.machine import isolation, tools
from launcher.machine.git import Repository
from launcher.paths import expanded

# Runs in the trainer's interpreter; stdlib only, so that any Python answers it. Of a package's metadata
# only the head is read: parsing whole ones, descriptions included, takes longer than all else that
# plans do.
_QUESTION = (
    isolation.HEAD
    + """
import importlib.metadata as m, json
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
)
# What a Python is asked where only its source files are wanted: listing its packages takes several times as long.
_PATH_QUESTION = (
    isolation.HEAD
    + """
import json
print(json.dumps({"path": sys.path}))
"""
)
PYTHON_LIMIT_S = 60.0
"""Seconds that a Python may take to list its packages: on a network file system they are many small files."""
CARD_S = 1.0
"""Seconds that nvidia-smi may take longer for each card: without persistence mode it starts them all."""
_CARDS = Path("/proc/driver/nvidia/gpus")

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
    """`fault` is nvidia-smi's complaint where it shows no GPU; divided GPUs (MIG) are left out.

    `silent` where it did not answer in time.
    """

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    fault: str | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The Python of training; `packages` are versions by normalised name, `own`: it is a virtual environment."""

    python: Path
    source: str
    version: tuple[int, ...] = ()
    path: tuple[Path, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that the user named; `source` says where, `path` is where it looks for packages."""

    python: Path
    source: str
    path: tuple[Path, ...]


def ask_driver() -> Driver:
    """What nvidia-smi says of the GPUs here; nothing where it is not installed."""
    try:
        answer = tools.ask(["nvidia-smi", "-q", "-x"], seconds=_driver_limit_s())
    except FileNotFoundError:
        return Driver()
    except tools.NoAnswer as error:
        return Driver(fault=str(error), silent=True)
    except OSError as error:
        return Driver(fault=str(error))
    said = answer.out.decode(errors="replace")
    document = said[said.find("<nvidia_smi_log") :]
    try:
        log = ElementTree.fromstring(document.partition("</nvidia_smi_log>")[0] + "</nvidia_smi_log>")
    except ElementTree.ParseError:
        complaint = f"{said}\n{answer.err.decode(errors='replace')}"
        lines = filter(None, map(str.strip, complaint.split("\n")))
        return Driver(fault=next(lines, f"exit code {answer.returncode}"))
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


def _driver_limit_s() -> float | None:
    try:
        cards = len(os.listdir(_CARDS))
    except OSError:
        return None
    return tools.limit_s() + CARD_S * cards


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
    if (choice := _named_python(named, environ)) is not None:
        return ask_trainer(*choice)
    if checkout is not None and (checkout / ".venv" / "bin" / "python").exists():
        return ask_trainer(checkout / ".venv" / "bin" / "python", "the checkout's .venv")
    return ask_trainer(Path(sys.executable), "launch's own")


def find_interpreter(named: Path | None, environ: Mapping[str, str]) -> Interpreter | None:
    """`--python` or LAUNCH_PYTHON, asked for its search path alone; None where neither names a Python.

    Raises NotReady where that does not run.
    """
    choice = _named_python(named, environ)
    if choice is None:
        return None
    python, source = choice
    python = expanded(python).absolute()
    answer = _ask(python, source, _PATH_QUESTION, "did not answer")
    return Interpreter(python=python, source=source, path=_folders(answer["path"]))


def _named_python(named: Path | None, environ: Mapping[str, str]) -> tuple[Path, str] | None:
    if named is not None:
        # not resolved: a virtual environment is known by the link, not by what it points to
        program = isolation.find_program(str(expanded(named)))
        return named if program is None else Path(program), "--python"
    if variable := environ.get("LAUNCH_PYTHON"):
        return _python_of_variable(variable), "LAUNCH_PYTHON"
    return None


def _python_of_variable(text: str) -> Path:
    """A name without a folder is looked up in PATH, never in the current folder. Raises NotReady."""
    program = isolation.find_program(str(expanded(text)))
    if program is not None and (os.sep in text or os.path.isabs(program)):
        return Path(program)
    if os.sep in text:
        return Path(text)
    message = f"LAUNCH_PYTHON names a Python that is not in PATH: {text}"
    raise not_ready("no-python", message, "give the trainer's interpreter with --python PATH", file=text)


def ask_trainer(python: Path, source: str) -> Trainer:
    """The version and packages of a Python. Raises NotReady where it does not run."""
    python = expanded(python).absolute()
    data = _ask(python, source, _QUESTION, "did not list its packages")
    return Trainer(
        python=python,
        source=source,
        version=tuple(data["version"]),
        path=_folders(data["path"]),
        packages=data["packages"],
        own=data["own"],
    )


def _folders(path: list[str]) -> tuple[Path, ...]:
    return tuple(Path(entry) for entry in path if entry)


def _ask(python: Path, source: str, question: str, silent: str) -> dict[str, Any]:
    """What a Python answers to a program; `silent` says what it did not do where the time ran out.

    Raises NotReady where it does not run.
    """
    data: dict[str, Any] = {}
    fault = "does not run"
    try:
        argv = [str(python), "-c", question]
        answer = tools.ask(argv, environ=isolation.isolated(os.environ), seconds=PYTHON_LIMIT_S)
        # a site file may print something of its own first
        if answer.returncode == 0:
            data = parse_line(answer.out.strip().rpartition(b"\n")[2])
    except tools.NoAnswer:
        fault = f"{silent} in {PYTHON_LIMIT_S:.0f} s"
    except ValueError:
        pass
    except OSError as error:
        if error.errno in RESOURCE_LIMITS:
            raise
    if not data:
        message = f"{source} names a Python that {fault}: {python}"
        help = "give the trainer's interpreter with --python PATH"
        raise not_ready("no-python", message, help, file=str(python))
    return data


def describe() -> dict[str, object]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in ask_driver().gpus],
    }
