"""A run again, exactly: the stage file as it was resolved, and what differs on this machine.

The resolved file lies in the run folder (`stage.yaml`), with the DeepSpeed config that was used beside
it where that is none that ships.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from launcher import rundir
from launcher.command import HUB
from launcher.errors import Finding, UsageError, brief
from launcher.keys import DEEPSPEED, KEYS
from launcher.options import Watch
from launcher.plan import Plan
from launcher.redaction import redact
from launcher.rundir import RunFolder

_HEAD = "# What `{stage}` was resolved to: inheritance, overrides and interpolation done.\n"


def write_stage_file(
    plan: Plan, folder: RunFolder, restored: Mapping[str, Any] | None = None
) -> None:
    """Write the resolved stage file of a plan, with the values that are `restored` from a checkpoint.

    Tokens are taken out. Raises OSError.
    """
    options = plan.stage.options
    given: dict[str, Any] = {
        "stage": options.stage,
        "backend": options.backend,
        "script": options.script,
        "name": plan.stage.name,
        "deepspeed": options.deepspeed_name,
        "attention": list(options.attention) or None,
        "mixed_precision": options.mixed_precision,
        "expect": dict(options.expect) or None,
        "on_violation": options.on_violation,
        "on_hang": options.on_hang,
        "slurm": {k: True if v is None else v for k, v in options.slurm.items()} or None,
        "skypilot": dict(options.skypilot) or None,
        "probe": "off" if options.probe is None else _told(options.probe),
    }
    if options.batch is not None:
        batch = {"global": options.batch.total, "per_device": options.batch.per_device}
        given["batch"] = {key: value for key, value in batch.items() if value is not None}
    if options.deepspeed is not None and options.deepspeed_name not in DEEPSPEED:
        rundir.write_bytes(folder.deepspeed, options.deepspeed.read_bytes())
        given["deepspeed"] = folder.deepspeed.name
    shown = {key: value for key, value in given.items() if value is not None}
    told = escaped(redact({**shown, "args": {**plan.stage.args, **(restored or {})}}))
    for name, value in told["args"].items():
        # what is started again takes it from where it was taken, or from where huggingface_hub looks
        whole = plan.stage.config.secrets.get(f"args.{name}")
        if whole is None and name == "hub_token" and value is not None:
            whole = f"${{oc.env:{HUB},null}}"
        told["args"][name] = value if whole is None else whole
    text = yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=100)
    rundir.write_text(folder.stage_file, _HEAD.format(stage=plan.stage.config.path) + text)


def _told(watch: Watch) -> dict[str, Any]:
    """What a stage file can say of the probe."""
    told = asdict(watch)
    return {
        part.name: told[part.name] for part in KEYS["probe"].parts if told[part.name] is not None
    }


def escaped(value: Any) -> Any:
    """Values as they are, for a file that will be interpolated once more."""
    if isinstance(value, Mapping):
        return {str(key): escaped(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(below) for below in value]
    if isinstance(value, str):
        return value.replace("${", "\\${")
    return value if isinstance(value, bool | int | float) or value is None else str(value)


def of_run(folder: RunFolder, stage: str) -> dict[str, Any]:
    """The manifest of a run that is to be repeated. Raises UsageError where that cannot be."""
    told = rundir.read_manifest(folder)
    if told.get("stage") is None:
        message = f"{folder.manifest} is gone or damaged: what {folder.path.name} was is not known"
        raise UsageError(
            _fault(message, f"launch {stage} {folder.stage_file}, if that is its stage")
        )
    if told["stage"] != stage:
        kind = brief(told.get("stage"))
        help = f"launch {kind} --repeat {folder.path.name}"
        raise UsageError(_fault(f"{folder.path.name} is a run of {kind}", help))
    if not folder.stage_file.is_file():
        message = f"{folder.path.name} keeps no stage file: an older launch started it"
        raise UsageError(_fault(message, f"launch {stage} {brief(told.get('config'))}"))
    return told


def _fault(message: str, help: str) -> Finding:
    return Finding(
        severity="error", layer="launch", code="not-repeatable", message=message, help=help
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Finding]:
    """What is not as it was when the run began, from the two manifests: one note each."""
    for what, path in _COMPARED:
        before, after = _at(old, path), _at(new, path)
        if before != after:
            yield _differs(what, _shown(before), _shown(after))
    packages = _at(old, "trainer.packages") or {}, _at(new, "trainer.packages") or {}
    changed = [
        f"{name} {packages[0].get(name, 'absent')} -> {packages[1].get(name, 'absent')}"
        for name in sorted(packages[0].keys() | packages[1].keys())
        if packages[0].get(name) != packages[1].get(name)
    ]
    if changed:
        more = f" and {len(changed) - 10} more" if len(changed) > 10 else ""
        yield _differs("packages", None, ", ".join(changed[:10]) + more)
    yield from _contents(old, new)


_COMPARED = (
    ("launch's commit", "launch_commit"),
    ("upstream", "upstream.version"),
    ("upstream's checkout", "upstream.root"),
    ("the trainer's Python", "trainer.version"),
    ("GPUs", "machine.gpus"),
    ("GPUs asked for", "plan.gpus"),
    ("machines", "plan.nodes"),
    ("rows per device", "plan.per_device"),
    ("accumulation", "plan.accumulation"),
    ("steps", "plan.steps"),
    ("host", "machine.host"),
    ("working directory", "cwd"),
)


def _contents(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Finding]:
    """Data, models and tokenizers of the same name and another content."""
    before, after = _inputs(old), _inputs(new)
    for key in before.keys() & after.keys():
        if before[key] != after[key]:
            yield _differs(" ".join(key), before[key][:12], after[key][:12])


def _inputs(manifest: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {
        (str(one["role"]), str(one["name"])): str(one["digest"])
        for cache in manifest.get("caches") or ()
        for one in cache.get("inputs") or ()
        if one.get("role") in {"data", "model", "tokenizer", "config", "template"}
    }


def _at(data: Mapping[str, Any], path: str) -> Any:
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _differs(what: str, before: str | None, after: str) -> Finding:
    change = after if before is None else f"{brief(before)} then, {brief(after)} now"
    return Finding(
        severity="note", layer="launch", code="repeat-differs", message=f"{what}: {change}"
    )


def enter(manifest: Mapping[str, Any]) -> None:
    """Go where the run was started, for its relative paths; stay where that is not on this machine."""
    folder = Path(str(manifest.get("cwd")))
    if folder.is_dir():
        os.chdir(folder)
