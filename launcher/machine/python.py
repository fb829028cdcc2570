"""The trainer's Python with its packages, and the GPUs of this machine, as frozen values."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RESOURCE_LIMITS, not_ready
from launcher.files import parse_line
from launcher.lazy_dataclass import dataclass
from launcher.machine import isolation, tools
from launcher.machine.git import Repository
from launcher.paths import expand_user

if TYPE_CHECKING:
    from xml.etree import ElementTree

# Runs in the trainer's interpreter, with the standard library alone. Of a package's metadata only
# the head is read: parsing all of it, descriptions included, takes longer than the rest of a plan.
_QUESTION = (
    isolation.HEAD
    + """
import importlib.metadata as m, json
def head(d):
    fields = {}
    text = d.read_text("METADATA") or d.read_text("PKG-INFO") or d.read_text("") or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if not line.strip() or len(fields) == 2:
            break
        if key in ("Name", "Version"):
            fields.setdefault(key, value.strip())
    return fields
names = {}
for d in m.distributions():
    fields = head(d)
    n = fields.get("Name")
    if n:
        names.setdefault(n.lower().replace("_", "-").replace(".", "-"), fields.get("Version"))
print(json.dumps({"version": list(sys.version_info[:3]), "path": sys.path, "packages": names,
                  "own": sys.prefix != sys.base_prefix}))
"""
)
# For a Python whose source files are all that is read: listing packages takes several times longer.
_PATH_QUESTION = (
    isolation.HEAD
    + """
import json
print(json.dumps({"path": sys.path}))
"""
)
PYTHON_LIMIT_S = 60.0
"""For a Python to list its packages: many small files, perhaps on a network file system."""
CARD_S = 1.0
"""More for nvidia-smi per card: without persistence mode it starts them all."""
_CARDS = Path("/proc/driver/nvidia/gpus")

# packages that losses, speed and memory may depend on: runs with other versions do not compare
DECISIVE = """
    torch transformers accelerate datasets tokenizers trl deepspeed peft liger-kernel flash-attn
    ai2-olmo-core bitsandbytes
""".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`index` is the place on the PCI bus. Memory is 0 if not reported.

    `cuda` is the newest version that the driver serves.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int
    used_mib: int
    driver: str = ""
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU; `used_mib` is 0 if not reported."""

    uuid: str
    pid: int
    used_mib: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """`fault` is nvidia-smi's complaint if it shows no GPU; divided GPUs (MIG) are left out.

    `silent`: it did not answer in time.
    """

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    fault: str | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The Python of training.

    `packages` are versions by normalised name; `own`: it is a virtual environment.
    """

    python: Path
    source: str
    version: tuple[int, ...] = ()
    path: tuple[Path, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that the user named. `source` says where; `path` is its search path."""

    python: Path
    source: str
    path: tuple[Path, ...]


def ask_driver() -> Driver:
    """What nvidia-smi says of the GPUs here; nothing if it is not installed."""
    try:
        answer = tools.run_tool(["nvidia-smi", "-q", "-x"], seconds=_compute_driver_limit_s())
    except FileNotFoundError:
        return Driver()
    except tools.NoAnswer as error:
        return Driver(fault=str(error), silent=True)
    except OSError as error:
        return Driver(fault=str(error))
    log = _parse_log(answer.out)
    if log is None:
        return Driver(fault=_find_first_complaint(answer))
    cards = log.findall("gpu")
    if not cards:
        return Driver(fault="No devices were found")
    gpus: list[Gpu] = []
    processes: list[GpuProcess] = []
    for index, card in enumerate(cards):
        if card.findtext("mig_mode/current_mig") != "Enabled":
            gpus.append(_parse_gpu(index, card, log))
        processes += _parse_processes(card)
    return Driver(gpus=tuple(gpus), processes=tuple(processes))


def _parse_log(raw: bytes) -> ElementTree.Element | None:
    """The document in nvidia-smi's output; warnings may stand around it."""
    from xml.etree import ElementTree

    text = raw.decode(errors="replace")
    end = "</nvidia_smi_log>"
    document = text[text.find("<nvidia_smi_log") :].partition(end)[0] + end
    try:
        return ElementTree.fromstring(document)
    except ElementTree.ParseError:
        return None


def _find_first_complaint(answer: tools.Answer) -> str:
    for raw in (answer.out, answer.err):
        for line in raw.decode(errors="replace").split("\n"):
            if line.strip():
                return line.strip()
    return f"exit code {answer.returncode}"


def _parse_gpu(index: int, card: ElementTree.Element, log: ElementTree.Element) -> Gpu:
    cuda = None
    match = re.match(r"(\d+)\.(\d+)", log.findtext("cuda_version", ""))
    if match is not None:
        cuda = (int(match[1]), int(match[2]))
    return Gpu(
        index=index,
        uuid=card.findtext("uuid", ""),
        name=card.findtext("product_name", ""),
        memory_mib=_parse_mib(card.findtext("fb_memory_usage/total")),
        used_mib=_parse_mib(card.findtext("fb_memory_usage/used")),
        driver=log.findtext("driver_version", ""),
        cuda=cuda,
    )


def _parse_processes(card: ElementTree.Element) -> Iterator[GpuProcess]:
    """The processes that compute on a card, without those that only draw."""
    for entry in card.findall("processes/process_info"):
        pid = entry.findtext("pid", "")
        if "C" not in entry.findtext("type", "") or not pid.isdecimal():
            continue
        yield GpuProcess(
            uuid=card.findtext("uuid", ""),
            pid=int(pid),
            used_mib=_parse_mib(entry.findtext("used_memory")),
            name=entry.findtext("process_name", ""),
        )


def _compute_driver_limit_s() -> float | None:
    try:
        cards = len(os.listdir(_CARDS))
    except OSError:
        return None
    return tools.limit_s() + CARD_S * cards


def _parse_mib(text: str | None) -> int:
    number = (text or "").partition(" ")[0]
    if not number.isdecimal():
        # a card that shares the host's memory answers N/A
        return 0
    return int(number)


def read_git_version(root: Path, below: str = ".") -> str | None:
    """The commit checked out in `root`, `+edited` if tracked files under `below` differ from it."""
    repository = Repository(root)
    answer = repository.ask("rev-parse", "HEAD", "--show-toplevel") or ""
    commit, _, top = answer.partition("\n")
    # a folder without its own history would answer for the repository around it
    if not top or Path(top).resolve() != root.resolve():
        return None
    status = repository.ask("status", "--porcelain", "-uno", "--", below)
    if status is None:
        return f"{commit}+unknown"
    if status:
        return f"{commit}+edited"
    return commit


def find_trainer(
    named: Path | None, checkout: Path | None, environ: Mapping[str, str] | None = None
) -> Trainer:
    """`--python`, LAUNCH_PYTHON, the checkout's `.venv`, else launch's own Python.

    Raises NotReady if that does not run.
    """
    if environ is None:
        environ = os.environ
    choice = _find_named_python(named, environ)
    if choice is not None:
        python, source = choice
        return ask_trainer(python, source)
    if checkout is not None:
        python = checkout / ".venv" / "bin" / "python"
        if python.exists():
            return ask_trainer(python, "the checkout's .venv")
    return ask_trainer(Path(sys.executable), "launch's own")


def find_interpreter(named: Path | None, environ: Mapping[str, str]) -> Interpreter | None:
    """`--python` or LAUNCH_PYTHON, asked for its search path alone; None without either.

    Raises NotReady if it does not run.
    """
    choice = _find_named_python(named, environ)
    if choice is None:
        return None
    python, source = choice
    python = expand_user(python).absolute()
    answer = _ask_python(python, source, _PATH_QUESTION, "did not answer")
    return Interpreter(python=python, source=source, path=_list_folders(answer["path"]))


def _find_named_python(named: Path | None, environ: Mapping[str, str]) -> tuple[Path, str] | None:
    if named is not None:
        # links stay: a virtual environment is identified by the link, not by its target
        program = isolation.find_program(str(expand_user(named)))
        return Path(program or named), "--python"
    variable = environ.get("LAUNCH_PYTHON")
    if variable:
        return _find_python_of_variable(variable), "LAUNCH_PYTHON"
    return None


def _find_python_of_variable(text: str) -> Path:
    """A name without a folder is searched for in PATH alone. Raises NotReady."""
    program = isolation.find_program(str(expand_user(text)))
    if program is not None and (os.sep in text or os.path.isabs(program)):
        return Path(program)
    if os.sep in text:
        return Path(text)
    message = f"LAUNCH_PYTHON names a Python that is not in PATH: {text}"
    help = "give the trainer's interpreter with --python PATH"
    raise not_ready("no-python", message, help, file=text)


def ask_trainer(python: Path, source: str) -> Trainer:
    """The version and packages of a Python. Raises NotReady if it does not run."""
    python = expand_user(python).absolute()
    data = _ask_python(python, source, _QUESTION, "did not list its packages")
    return Trainer(
        python=python,
        source=source,
        version=tuple(data["version"]),
        path=_list_folders(data["path"]),
        packages=data["packages"],
        own=data["own"],
    )


def _list_folders(path: list[str]) -> tuple[Path, ...]:
    return tuple(Path(entry) for entry in path if entry)


def _ask_python(python: Path, source: str, question: str, silent: str) -> dict[str, Any]:
    """What a Python answers to a program; `silent` says what it did not do in time.

    Raises NotReady if it does not run.
    """
    data: dict[str, Any] = {}
    fault = "does not run"
    argv = [str(python), "-c", question]
    environ = isolation.isolate(os.environ)
    try:
        answer = tools.run_tool(argv, environ=environ, seconds=PYTHON_LIMIT_S)
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
    """This machine, for a record."""
    gpus = ask_driver().gpus
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in gpus],
    }
