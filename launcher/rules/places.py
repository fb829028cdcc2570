"""Output folders that nobody means: `/`, a home folder, a literal `~`, the data's own folder and
their like.

Upstream makes whatever folder it is told, writes over files in it, deletes old checkpoints there,
and may upload all of it. What only the records of a machine tell, such as other runs, is asked at
a start.
"""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.dataset import mixture
from launcher.errors import Finding, shorten
from launcher.machine.trees import ResolvedFolder, is_same_place
from launcher.paths import can_be_name, exists, is_dir, resolve_path
from launcher.rules.context import Context
from launcher.rules.protected import Place
from launcher.rules.rule import cites, say

CODE = "unintended-output"
_SYSTEM = "/usr /bin /boot /dev /etc /lib /lib32 /lib64 /proc /sbin /sys"  # nor anything in them
_SHARED_NAMES = "/home /media /mnt /opt /root /run /srv /tmp /usr/local /var /var/tmp /dev/shm"
_SHARED = tuple(map(Path, _SHARED_NAMES.split()))  # folders in them are fine
_WITHIN = (Path("/usr/local"), Path("/dev/shm"))  # of `_SYSTEM`, and free for folders all the same
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})", re.ASCII)


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
    output = ResolvedFolder.of(folder)
    for place in (*context.protected.find(context.source), *_list_own_places(context)):
        if place.folder.is_within(output):
            if output.is_same(place.folder):
                return f"is {place.name}, {place.folder.path}"
            return f"holds {place.name}, {place.folder.path}"
        if place.below and output.is_within(place.folder):
            return f"lies in {place.name}, {place.folder.path}"
    if exists(output.path / ".git"):
        return f"is the checkout {output.path}"
    return _find_system_fault(output)


def _find_system_fault(output: ResolvedFolder) -> str | None:
    for shared in _SHARED:
        if output.path == shared or (output.identity and is_same_place(output.path, shared)):
            return f"is {output.path}, which belongs to the system or to all users"
    if any(free in output.paths for free in _WITHIN):
        return None
    for name, folder in _resolve_system_folders().items():
        if folder in output.paths:
            return f"lies in {name}, which belongs to the system"
    return None


@functools.cache
def _resolve_system_folders() -> dict[str, Path]:
    """The folders of `_SYSTEM` without links: `/bin` is one to `/usr/bin` on most machines."""
    return {name: resolve_path(Path(name)) for name in _SYSTEM.split()}


def _list_own_places(context: Context) -> Iterator[Place]:
    """What this run itself reads: data, model."""
    for name in _list_data(context):
        path = Path(str(name))
        if not name or not exists(path):
            continue
        if not is_dir(path):
            path = path.parent
        yield Place(ResolvedFolder.of(path), "the folder of the data")
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
    folder = ResolvedFolder.of(model)
    named = Path(str(context.values[context.entry.names.output]))
    # a checkpoint of the folder itself may be what to go on from
    if folder.is_same(ResolvedFolder.of(named)):
        yield Place(folder, "the folder of the model that training begins from")
