"""Output folders that nobody means: `/`, a home folder, a literal `~`, the data's own folder and
their like.

Upstream makes whatever folder it is told, writes over files in it, deletes old checkpoints there,
and may upload all of it. What only the records of a machine tell, such as other runs, is asked at
a start.
"""

import functools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.artifacts import model_config
from launcher.artifacts.fingerprint import cache_home
from launcher.dataset import mixture
from launcher.errors import Finding, shorten
from launcher.lazy_dataclass import dataclass
from launcher.machine.trees import is_same_place, is_within
from launcher.paths import IS_CLONE, PACKAGE, PROJECT, can_be_name, exists, is_dir, resolve_path
from launcher.rules.context import Context
from launcher.rules.rule import cites, say
from launcher.runs import places

CODE = "unintended-output"
_SYSTEM = "/usr /bin /boot /dev /etc /lib /lib32 /lib64 /proc /sbin /sys"  # nor anything in them
# folders in them are fine
_SHARED = "/home /media /mnt /opt /root /run /srv /tmp /usr/local /var /var/tmp /dev/shm"
_WITHIN = ("/usr/local", "/dev/shm")  # of `_SYSTEM`, and free for folders all the same
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder that is no output; `below`: nor is any folder in it."""

    path: Path
    name: str
    below: bool = False


@cites(
    "finetune.py::main[if args.clean_checkpoints_at_end]",
    "trl/scripts/sft.py::main[trainer.train(resume_from_checkpoint]",
    reviewed=("e6c3044aa620",),
)
def unintended_output(context: Context) -> Iterator[Finding]:
    """The model is saved into whatever folder `output_dir` names."""
    key = context.entry.names.output
    if not context.values.given(key):
        return
    text = str(context.values[key])
    # `no-output` says it
    if not text:
        return
    reason = _find_literal_fault(text) or _find_place_fault(context, text)
    if reason is not None:
        message = f"`{key}: {shorten(text)}` {reason}"
        yield say("error", CODE, key, message, _explain_help(key, text), layer="launch")


def _explain_help(key: str, text: str) -> str:
    expanded = os.path.expandvars(os.path.expanduser(text))
    if expanded != text and len(Path(expanded).parts) > 3:
        return f"write the folder out: `{key}: {expanded}`"
    return f"name a folder of the run's own, such as `{key}: output/my_run`"


def _find_literal_fault(text: str) -> str | None:
    """What is wrong with the words themselves, on any machine."""
    if not can_be_name(text):
        return "is no name that a folder can have"
    parts = Path(text).parts
    if parts and parts[0].startswith("~"):
        return f"would make a folder called `{parts[0]}` here: trainers do not expand it"
    if "~" in parts:
        return "would make a folder called `~`: trainers do not expand it"
    for part in parts:
        variable = _VARIABLE.match(part)
        if variable is not None:
            return f"would make a folder called `{variable[0]}`: trainers do not expand variables"
    return None


def _find_place_fault(context: Context, text: str) -> str | None:
    """Which place of this machine a folder is, or holds."""
    from launcher.upstream.trainers import BACKENDS

    folder = BACKENDS[context.values.schema.backend].output_folder(context.values)
    if folder is None or "\0" in text:
        return None
    # as it is named too: what is appended to it does not make `/` a folder of the run's own
    if resolve_path(Path(text)) == Path("/"):
        return "is the root of the file system"
    output = resolve_path(folder)
    for place in (*_list_machine_places(), *_list_training_places(context)):
        path = resolve_path(place.path)
        if is_within(path, output):
            if is_same_place(output, path):
                return f"is {place.name}, {path}"
            return f"holds {place.name}, {path}"
        if place.below and is_within(output, path):
            return f"lies in {place.name}, {path}"
    if exists(output / ".git"):
        return f"is the checkout {output}"
    return _find_system_fault(output)


def _find_system_fault(output: Path) -> str | None:
    is_there = exists(output)
    for shared in _list_shared_folders():
        if output == shared or (is_there and is_same_place(output, shared)):
            return f"is {output}, which belongs to the system or to all users"
    if any(output.is_relative_to(free) for free in _WITHIN):
        return None
    for name, folder in _resolve_system_folders().items():
        if output.is_relative_to(folder):
            return f"lies in {name}, which belongs to the system"
    return None


@functools.cache
def _list_shared_folders() -> tuple[Path, ...]:
    return tuple(map(Path, _SHARED.split()))


@functools.cache
def _resolve_system_folders() -> dict[str, Path]:
    """The folders of `_SYSTEM` without links: `/bin` is one to `/usr/bin` on most machines."""
    return {name: resolve_path(Path(name)) for name in _SYSTEM.split()}


def _list_machine_places() -> Iterator[Place]:
    """The folders that no run may overwrite or delete, whatever it trains.

    With `below`, nor anything inside them; the others may hold output folders.
    """
    try:
        yield Place(path=Path.cwd(), name="the working folder")
    except OSError:
        return
    yield Place(path=Path(os.path.expanduser("~")), name="the home folder")
    yield Place(path=Path(tempfile.gettempdir()), name="the folder of temporary files")
    if IS_CLONE:
        yield Place(path=PROJECT, name="launch's own folder")
        yield Place(path=PROJECT / ".git", name="launch's own repository", below=True)
    yield Place(path=PACKAGE, name="launch's own package", below=True)
    yield Place(path=places.find_runs_root(), name="the folder of the runs")
    yield Place(path=places.find_state_folder(), name="launch's list of runs", below=True)
    yield Place(path=cache_home(os.environ), name="launch's cache", below=True)
    yield Place(path=model_config.find_hub_home(os.environ), name="Hugging Face's cache")


def _list_training_places(context: Context) -> Iterator[Place]:
    """What the run itself reads: checkout, data, model."""
    if context.source is not None:
        yield from _list_source_places(context.source)
    for name in _list_data(context):
        path = Path(str(name))
        if not name or not exists(path):
            continue
        if not is_dir(path):
            path = path.parent
        yield Place(path=path, name="the folder of the data")
    model = context.values.get(context.entry.names.model)
    if isinstance(model, str) and model and os.path.isdir(model):
        yield from _list_model_places(context, Path(model))


def _list_data(context: Context) -> list[Any]:
    """The names of the files and folders of data."""
    mixed = mixture.read_mixture(context.values, context.environ)
    if mixed is not None:
        return mixed.names()
    data = context.values.get(context.entry.names.data)
    return data[::2] if isinstance(data, list) else [data]


def _list_model_places(context: Context, model: Path) -> Iterator[Place]:
    folder = resolve_path(Path(str(context.values[context.entry.names.output])))
    # a checkpoint of the folder itself may be what to go on from
    if is_same_place(resolve_path(model), folder):
        yield Place(path=model, name="the folder of the model that training begins from")


def _list_source_places(source: Path) -> Iterator[Place]:
    """A checkout; what somebody who works in it puts below the working folder is their own."""
    yield Place(path=source, name="the folder of the trainer's source")
    checkout = resolve_path(source)
    if not exists(checkout / ".git"):
        yield Place(path=source, name="the trainer's packages", below=True)
        return
    if not is_within(resolve_path(Path.cwd()), checkout):
        yield Place(path=source, name="the checkout", below=True)
    yield Place(path=source / ".git", name="the checkout's repository", below=True)
    yield Place(path=source / "open_instruct", name="the checkout's source", below=True)
