"""A run as a SkyPilot task, for clouds: what `skypilot:` may say, and the task as YAML.

The task takes the folder that launch was started in along, and says the same command there, on every
node. Tokens are named and never written: SkyPilot asks for them when the task is started.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from launcher.errors import Complain, Finding, brief, usage
from launcher.paths import PROJECT
from launcher.redaction import redact
from launcher.upstream.trainers import BACKENDS

if TYPE_CHECKING:
    pass

FIELDS = tuple(
    """
    accelerator config envs event_callback file_mounts name resources secrets setup volumes
    workdir
""".split()
)
"""Fields of a task that a stage file may set; SkyPilot checks what is inside."""
OURS: Mapping[str, str] = {
    "run": "the task runs the command of this stage",
    "num_nodes": "the number of machines is given with --nodes",
}
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""Secrets that a task asks for where this environment has them."""
LAUNCH, CHECKOUT = "~/launch", "~/open-instruct"
"""Where the task finds launch and the source, unless they are in the folder that goes along."""

_MAPPINGS = ("envs", "file_mounts", "resources", "secrets")
_ACCELERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_UNSAFE = re.compile(r"[^a-z0-9]+")


def read(given: Any, complain: Complain) -> tuple[dict[str, Any], list[Finding]]:
    """The `skypilot:` mapping of a stage file, and everything wrong with it; faulty keys are left out."""
    if not isinstance(given, Mapping | None):
        message = f"`skypilot` is a mapping, not `{brief(given)}`"
        help = "skypilot: {accelerator: H100, resources: {infra: aws}}"
        return {}, [complain("bad-skypilot", "", message, help)]
    settings: dict[str, Any] = {}
    findings = []
    for key, value in (given or {}).items():
        if (fault := _fault(str(key), value)) is not None:
            findings.append(complain("bad-skypilot", str(key), *fault))
        elif value is not None:
            settings[str(key)] = value
    return settings, findings


def _fault(key: str, value: Any) -> tuple[str, str | None] | None:
    """Message and help of what is wrong with a key; None where nothing is."""
    if key in OURS:
        return f"`skypilot.{key}` is not for the stage file to set", OURS[key]
    if key not in FIELDS:
        near = difflib.get_close_matches(key, FIELDS, n=1)
        help = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(FIELDS)}"
        return f"`{brief(key)}` is no part of `skypilot`", help
    kinds = Mapping | list | None if key == "secrets" else Mapping | None
    if key in _MAPPINGS and not isinstance(value, kinds):
        return f"`skypilot.{key}` is a mapping, not `{brief(value)}`", None
    if key == "accelerator" and value is not None and not _ACCELERATOR.match(str(value)):
        help = "its name alone, such as H100; how many is given with --gpus"
        return f"`{brief(value)}` is no name of an accelerator", help
    return None


def task(
    *,
    name: str,
    words: Sequence[str],
    gpus: int,
    nodes: int,
    backend: str,
    checkout: Path | None,
    settings: Mapping[str, Any],
    environ: Mapping[str, str],
    cwd: Path,
    project: Path = PROJECT,
) -> dict[str, Any]:
    """The task of a run, as SkyPilot's YAML spells it.

    `words` is the argv after `launch`, paths in it relative to `cwd`, where launch was started; `gpus` the
    number on each node; `project` what launch is installed from; `checkout` the open-instruct source, None
    where it is not here or not needed. Of `environ` only the names of tokens are taken. `settings` comes
    from `read`. Raises UsageError where it does not say which GPUs, or where a token would get into it.
    """
    launch = "." if project == cwd else LAUNCH
    mounts = {} if project == cwd else {LAUNCH: str(project)}
    if checkout is not None and not checkout.is_relative_to(project):
        mounts[CHECKOUT] = str(checkout)
    lines = [f"cd {launch}", f"make install-{backend.replace('_', '-')}"]
    if gpus and BACKENDS[backend].GPU_NEEDS:
        lines.append(".venv/bin/python -m pip install --no-build-isolation -e '.[gpu]'")
    tokens = settings.get("secrets", [name for name in SECRETS if environ.get(name)])
    made: dict[str, Any] = {
        "name": settings.get("name") or _name(name),
        "num_nodes": nodes,
        "resources": _resources(settings, gpus),
        "workdir": settings.get("workdir", str(cwd)),
        "envs": {str(k): _text(v) for k, v in (settings.get("envs") or {}).items()},
        # names alone, whatever stands behind them
        "secrets": dict.fromkeys(map(str, tokens)),
        "file_mounts": {**mounts, **(settings.get("file_mounts") or {})},
        **{key: settings.get(key) for key in ("volumes", "config", "event_callback")},
        "setup": settings.get("setup") or " &&\n".join(lines) + "\n",
        # every node runs it, and learns from SkyPilot which one it is
        "run": f"{launch}/.venv/bin/launch {shlex.join(words)}\n",
    }
    made = {key: value for key, value in made.items() if value not in (None, {}, [])}
    if redact(made) != made:
        message = "a token would be written into the task"
        help = "name its variable under `skypilot: {secrets: [...]}` instead"
        raise usage("token-in-task", message, help)
    return made


def _resources(settings: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    resources = dict(settings.get("resources") or {})
    name = settings.get("accelerator")
    if gpus and name is None and not {"any_of", "instance_type", "ordered"} & resources.keys():
        help = "`skypilot: {accelerator: H100}`, or skypilot.accelerator=H100"
        raise usage("no-accelerator", f"{gpus} GPUs on each machine: which ones?", help)
    if gpus and name is not None:
        resources["accelerators"] = {name: gpus}
    return resources


def _name(name: str) -> str:
    """A name that clouds take: letters, digits and dashes, a letter first."""
    plain = _UNSAFE.sub("-", name.lower()).strip("-")
    return plain if plain[:1].isalpha() else f"launch-{plain}".rstrip("-")


def _text(value: Any) -> str | None:
    """A variable's value; SkyPilot wants text, and null for what is given when the task is started."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""


def _represent(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if value.endswith("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent)


def text(task: Mapping[str, Any], path: Path) -> str:
    """A task as a file, with the command that starts it as its first line."""
    secrets = "".join(f" --secret {name}" for name in task.get("secrets", {}))
    shown = shlex.quote(path.name) if path.name.isprintable() else "FILE"
    body = yaml.dump(dict(task), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return f"# sky launch{secrets} {shown}\n{body}"
