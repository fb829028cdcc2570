"""The setting that a search found, as a stage file that `launch sft` takes as it is.

It extends the file that was tuned and holds what differs, overrides of the command line included: the
author's comments stay where they are, and the changes can be read at a glance. Files of other shapes cannot
be extended: of those the whole stage is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher import files
from launcher.config import load
from launcher.config.keys import DEEPSPEED
from launcher.config.load import Config
from launcher.errors import NotReady, not_ready, usage
from launcher.lifecycle.manifest import escaped
from launcher.redaction import redact
from launcher.workflows.tune import space as levers
from launcher.workflows.tune.space import Settings, Space

MARK = "# Tuned by launch: "
_NESTED = ("batch", "expect", "probe", "gates", "slurm")
_LINE_ENDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def write(place: Path, space: Space, settings: Settings, *, head: Sequence[str], overrides: Sequence[str]) -> None:
    """Write the file, with `head` as its comment. Raises NotReady where that cannot be done."""
    stage = space.plan.stage
    source, options = stage.config.path, stage.options
    values: dict[str, Any] = {"name": f"{stage.name}-tuned"}
    turned = levers.overrides(space, settings)
    tuned = load.load(source, (*overrides, *turned)) if turned else stage.config
    if stage.config.shape == "stage":
        values["extends"] = _relative(source, place)
        values |= _differences(load.load(source) if overrides else stage.config, tuned)
    else:
        values |= {"stage": options.stage, "backend": options.backend, **tuned.options}
        # the wrapped shape's own words; how many GPUs says `--gpus` elsewhere
        values.pop("num_gpus", None)
        values["args"] = dict(tuned.args)
    own = options.deepspeed is not None and options.deepspeed_name not in DEEPSPEED
    if own and options.deepspeed is not None and "deepspeed" not in settings:
        # a file that lies beside the stage file does not lie beside this one
        values["deepspeed"] = _relative(options.deepspeed, place)
    # a path may hold what ends a comment
    lines = [_LINE_ENDS.sub(" ", line) for line in redact(head)]
    body = yaml.safe_dump(escaped(redact(values)), sort_keys=False, allow_unicode=True, width=100)
    text = MARK + "\n# ".join(lines) + "\n" + body
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(place, text)
    except OSError as error:
        raise _unwritable(place, error.strerror) from None


def require_free(place: Path, source: Path) -> None:
    """Raise UsageError where a file of somebody's own would be overwritten, NotReady where none can be."""
    if place.exists():
        try:
            ours = place.read_text(encoding="utf-8").startswith(MARK)
        except (OSError, ValueError):
            ours = False
        if not ours or place.resolve() == source.resolve():
            message = f"{place} exists and was not written by `launch tune`"
            raise usage("would-overwrite", message, "another name with -o")
    folder = next(parent for parent in place.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise _unwritable(place, f"{folder} is a file")
    if not os.access(folder, os.W_OK):
        raise _unwritable(place, f"{folder} cannot be written into")


def _unwritable(place: Path, reason: str | None) -> NotReady:
    return not_ready(
        "unwritable-file", f"the stage file cannot be written: {reason}", "another name with -o", file=str(place)
    )


def _relative(target: Path, place: Path) -> str:
    return os.path.relpath(target.resolve(), place.absolute().parent.resolve())


def _differences(written: Config, tuned: Config) -> dict[str, Any]:
    """What has to stand in a file that extends `written` so that it comes to `tuned`."""
    changed: dict[str, Any] = {}
    for key, value in tuned.options.items():
        before = written.options.get(key)
        if value == before:
            continue
        if key in _NESTED and isinstance(value, dict) and isinstance(before, dict):
            value = {k: v for k, v in value.items() if k not in before or before[k] != v}
        changed[key] = value
    args = {key: value for key, value in tuned.args.items() if key not in written.args or written.args[key] != value}
    return {**changed, "args": args} if args else changed
