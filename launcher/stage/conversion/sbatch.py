"""The directives of a batch script of Slurm's -> launch's `slurm:`, its name, GPUs and machines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import field, replace

from launcher.lazy_dataclass import dataclass
from launcher.runs import slurm
from launcher.stage.conversion.settings import SourceSetting, leading_number

# sbatch(1): the letters of its options
_LETTERS: Mapping[str, str] = {
    "A": "account",
    "a": "array",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
_DIRECTIVE = re.compile(r"\s*#SBATCH\s+(.*)")
_GPUS = re.compile(r"(?:gpu:)?(?:(?P<model>[A-Za-z][\w.-]*):)?(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class Job:
    """GPUs of one machine, and machines, that directives ask for."""

    gpus: int | None
    nodes: int | None


def read_directives(text: str, file: str) -> list[SourceSetting]:
    """The directives in the comments of a script."""
    settings: list[SourceSetting] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = _DIRECTIVE.match(line)
        if match is not None:
            settings += _parse_options(match[1], file, number)
    return settings


_PROGRAMS = ("srun ", "sbatch ", "salloc ")
# srun(1): what only a step has, and sbatch refuses
_OF_STEPS = frozenset(
    (
        "cpu-bind exact gpu-bind input jobid kill-on-bad-exit label mem-bind mpi multi-prog "
        "overlap pty resv-ports unbuffered wait"
    ).split()
)


def is_of_slurm(setting: SourceSetting) -> bool:
    """Whether a launcher's option is one of srun's or sbatch's on a command line."""
    return setting.written.startswith(_PROGRAMS)


def select_options(launchers: list[SourceSetting]) -> list[SourceSetting]:
    """The options of srun and sbatch among those of launchers, named as directives."""
    settings = []
    for setting in launchers:
        if not is_of_slurm(setting) or setting.missing:
            continue
        name = setting.key.replace("_", "-")
        if name in _OF_STEPS:
            continue
        value = setting.value
        short = re.fullmatch(r"([A-Za-z])(\d*)", name)
        if short is not None:
            name = _LETTERS.get(short[1], name)
            value = short[2] or value
        if value is not True:
            value = str(value)
        settings.append(replace(setting, key=name, value=value))
    return settings


def read_job(settings: list[SourceSetting]) -> Job:
    values = {setting.key: str(setting.value) for setting in settings}
    nodes = leading_number(values.get("nodes"))
    return Job(gpus=_count_gpus(values, nodes or 1), nodes=nodes)


def _parse_options(text: str, file: str, line: int) -> list[SourceSetting]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    options = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            written = f"--{name}"
        elif re.match(r"-[A-Za-z]", word):
            name = _LETTERS.get(word[1], word[1])
            value = word[2:].removeprefix("=")
            equals = value
            written = word[:2]
        else:
            continue
        if not equals:
            values = []
            while at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
                values.append(words[at])
                at += 1
            value = " ".join(values)
        option = SourceSetting(
            key=name, value=value or True, written=f"#SBATCH {written}", file=file, line=line
        )
        options.append(option)
    return options


def _count_gpus(values: Mapping[str, str], nodes: int) -> int | None:
    """GPUs of one machine."""
    numbers = {}
    for name in ("gpus-per-node", "gres", "gpus", "gpus-per-task"):
        value = values.get(name, "")
        match = _GPUS.fullmatch(value)
        if match is not None and (name != "gres" or value.startswith("gpu")):
            numbers[name] = int(match["number"])
    for name in ("gpus-per-node", "gres"):
        if name in numbers:
            return numbers[name]
    if "gpus" in numbers:
        return max(1, numbers["gpus"] // nodes)
    if "gpus-per-task" in numbers:
        tasks = leading_number(values.get("ntasks-per-node")) or 1
        return numbers["gpus-per-task"] * tasks
    return None


@dataclass(slots=True)
class Carried:
    """What becomes of directives: options of `slurm:`, the run's name, or reasons against them."""

    options: dict[str, str | bool] = field(default_factory=dict)
    name: str | None = None
    targets: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


_SETS = "launch sets it"
_REASONS: Mapping[str, str] = {
    "output": "launch keeps the log in the run folder",
    "error": "launch keeps the log in the run folder",
    "open-mode": "launch keeps the log in the run folder",
    "array": "launch starts one run; `launch tune` and `launch pipeline` start several",
    "export": "launch hands on the environment that training needs",
    "signal": f"{_SETS}: a run gets time to save before its time is up",
    "ntasks": f"{_SETS}: one task on each machine",
    "ntasks-per-node": f"{_SETS}: one task on each machine",
    "chdir": "launch runs where it is started",
}


def carry(directives: list[SourceSetting], gpus: int | None) -> Carried:
    """Directives as launch's keys, by the flag as it was written; `gpus` are those of a machine."""
    carried = Carried()
    for setting in directives:
        name = setting.key
        value = setting.value
        if name == "job-name" and isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value):
            carried.name = value
            carried.targets[setting.written] = "name"
        elif name == "nodes":
            carried.targets[setting.written] = "--nodes"
        elif name in slurm.ASKS_FOR_GPUS and gpus is not None and _is_plain(name, value):
            carried.targets[setting.written] = "--gpus"
        elif name in ("requeue", "no-requeue"):
            carried.options["requeue"] = name == "requeue"
            carried.targets[setting.written] = "slurm.requeue"
        elif slurm.is_settable(name) and _is_usable(value):
            carried.options[name.replace("-", "_")] = value
            carried.targets[setting.written] = f"slurm.{name.replace('-', '_')}"
        elif slurm.is_settable(name):
            carried.reasons[setting.written] = "its value is a placeholder: add it to `slurm:`"
        else:
            carried.reasons[setting.written] = _REASONS.get(name, _SETS)
    return carried


def _is_plain(name: str, value: object) -> bool:
    """Whether a request for GPUs says nothing but their number."""
    match = _GPUS.fullmatch(str(value))
    if match is None:
        return False
    return match["model"] is None or (name == "gres" and match["model"] == "gpu")


def _is_usable(value: object) -> bool:
    if isinstance(value, bool):
        return value
    return isinstance(value, str) and not re.search(r"[{}<>$\[\]]", value)
