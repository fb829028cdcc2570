"""Rules about checkpoints under TRL: what is resumed from, and what the output folder holds already."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.backends import model_config, trl_resolved
from launcher.backends.context import Context, StageRule
from launcher.backends.rule import say
from launcher.errors import Finding, brief
from launcher.files import parse_json, read_bytes
from launcher.paths import exists, is_file
from launcher.schema import Values

_KEY = "resume_from_checkpoint"
# transformers/trainer_utils.py:267
_CHECKPOINT = re.compile(r"checkpoint-(\d+)\Z", re.ASCII)
_WHOLE = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)\Z")
_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)\Z")
# what two models must share for the weights of one to fit the other
_SHAPE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_LARGEST = 2**26  # bytes: a training state of more is not read


def _entries(folder: Path | None) -> list[str]:
    try:
        return sorted(os.listdir(folder)) if folder is not None else []
    except (OSError, ValueError):
        return []


def newest(folder: Path | None) -> str | None:
    """The checkpoint with the highest number in an output folder; None without one."""
    found = [m for name in _entries(folder) if (m := _CHECKPOINT.match(name)) is not None]
    return max(found, key=lambda m: int(m[1]))[0] if found else None


def _asked(values: Values) -> Path | None:
    """The folder to resume from; true and false have a rule of their own."""
    name = values[_KEY]
    if not isinstance(name, str) or not name or name.lower() in ("true", "false"):
        return None
    return Path(name)


def _state(folder: Path) -> Mapping[str, Any] | None:
    """trainer_state.json of a checkpoint; None where there is none to be read."""
    path = folder / "trainer_state.json"
    try:
        if path.stat().st_size > _LARGEST:
            return {}
        told = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


# --- is it a checkpoint? ---------------------------------------------------------------------------


def missing(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:3517,1509; transformers/integrations/deepspeed.py:671."""
    folder = _asked(context.values)
    if folder is None or (not exists(folder) and not context.running):
        return
    if not exists(folder):
        why = f"there is no folder {brief(folder)} here"
    elif not is_file(folder / "trainer_state.json"):
        why = f"{brief(folder)} is no checkpoint: it has no trainer_state.json"
    elif (lacking := _lacking(context, folder)) is not None:
        why = f"{brief(folder)} {lacking}"
    else:
        return
    yield say("error", "run", "resume-missing", _KEY, why, _instead(context, folder))


def _lacking(context: Context, folder: Path) -> str | None:
    """What a checkpoint lacks that the engine in use resumes from."""
    names = _entries(folder)
    if trl_resolved.engine(context) is not None:
        fits = any(name.startswith("global_step") for name in names)
        return None if fits else "was not saved with DeepSpeed, which cannot resume from it"
    if trl_resolved.fsdp(context.values) is not None or _has(names, _WHOLE):
        return None
    inside = any(_has(_entries(folder / name), _ADAPTER) for name in names)
    sharded = any("pytorch_model_fsdp" in name for name in names)
    if sharded:
        return "was saved with FSDP, and can be resumed with it only"
    index = any(name.endswith(".index.json") for name in names)
    return None if index or inside or _has(names, _ADAPTER) else "holds no weights"


def _has(names: list[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.match(name) for name in names)


def _instead(context: Context, folder: Path) -> str:
    for place in (folder, folder.parent, context.output):
        found = newest(place)
        if place is not None and found is not None and place / found != folder:
            return f"write `{_KEY}: {place / found}`"
    return "relative paths start where launch is started; delete the line to begin anew"


# --- is it this run's? -----------------------------------------------------------------------------


def other_kind(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:3555: an adapter's checkpoint and a whole model's do not fit each other."""
    folder, values = _asked(context.values), context.values
    names = _entries(folder)
    adapter = "adapter_config.json" in names or _has(names, _ADAPTER)
    if (
        folder is None
        or not (adapter or _has(names, _WHOLE))
        or adapter == bool(values["use_peft"])
    ):
        return
    what = "an adapter, and `use_peft` is off" if adapter else "a whole model, and `use_peft` is on"
    yield say(
        "error", "run", "foreign-checkpoints", _KEY, f"{brief(folder)} holds {what}",
        "resume with what it was trained with, or begin anew",
    )  # fmt: skip


def other_model(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:3555: weights that do not fit crash, or are left out without a word."""
    folder, values = _asked(context.values), context.values
    if folder is None:
        return
    theirs = model_config.text_part(model_config.read(str(folder), {}))
    name, revision = values["model_name_or_path"], values.get("model_revision")
    ours = model_config.text_part(model_config.read(name, context.environ, revision))
    told = [
        f"`{key}` is {brief(theirs[key])} there, {brief(ours[key])} here"
        for key in _SHAPE
        if key in theirs and key in ours and theirs[key] != ours[key]
    ]
    if told:
        yield say(
            "error", "run", "foreign-checkpoints", _KEY,
            f"{brief(folder)} is a checkpoint of another model: {'; '.join(told)}",
            "name the model that it was trained from, or begin anew",
        )  # fmt: skip


# --- what would come of it -------------------------------------------------------------------------


def nothing_left(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:1639: training begins at the checkpoint's step, and may be over."""
    folder, values = _asked(context.values), context.values
    state = None if folder is None else _state(folder)
    if not state:
        return
    step, epoch = state.get("global_step"), state.get("epoch")
    limit, epochs = values["max_steps"], values["num_train_epochs"]
    if isinstance(limit, int) and limit > 0:
        over = isinstance(step, int) and step >= limit
        until = f"`max_steps` is {limit}"
    else:
        over = (
            isinstance(epoch, int | float) and isinstance(epochs, int | float) and epoch >= epochs
        )
        until = f"`num_train_epochs` is {epochs}"
    if over:
        yield say(
            "error", "run", "resume-finished", _KEY,
            f"{brief(str(folder))} was saved after {step} steps, and {until}: nothing would be trained",
            "raise the limit, or delete the line to begin anew",
        )  # fmt: skip


def other_batch(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:1648: the place in the data is reckoned with the numbers of now."""
    folder = _asked(context.values)
    if folder is None or context.values["ignore_data_skip"]:
        return
    was, now = (_state(folder) or {}).get("train_batch_size"), context.per_device
    if isinstance(was, int) and now is not None and was != now:
        yield say(
            "warning", "run", "resume-position", _KEY,
            f"resuming from {brief(folder)} would go on at another place in the data: "
            f"`per_device_train_batch_size` was {was}, is {now}", "keep the number as it was",
        )  # fmt: skip


def fresh_optimizer(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:3779: a state that is not there is not missed."""
    folder = _asked(context.values)
    sharded = (
        trl_resolved.engine(context) is not None or trl_resolved.fsdp(context.values) is not None
    )
    # before the GPUs are known DeepSpeed is not either
    if folder is None or sharded or context.gpus is None:
        return
    names = _entries(folder)
    if "trainer_state.json" not in names or any(name.startswith("optimizer") for name in names):
        return
    saved = any(name.startswith("global_step") for name in names)
    what = "holds DeepSpeed's, which is not read without it" if saved else "holds none"
    yield say(
        "warning", "run", "resume-fresh-optimizer", _KEY,
        f"resuming from {brief(folder)} begins with a new optimizer and schedule: it {what}",
        "resume with DeepSpeed" if saved else "`save_only_model: false` keeps it in checkpoints",
    )  # fmt: skip


# --- the output folder -----------------------------------------------------------------------------


def not_resumed(context: Context) -> Iterator[Finding]:
    """trl/scripts/sft.py:113, trl/scripts/dpo.py:119: TRL begins anew unless it is told."""
    last, values = newest(context.output), context.values
    if values[_KEY] or context.output is None:
        return
    if last is not None:
        limit = values["save_total_limit"]
        lost = f", and `save_total_limit: {limit}` deletes them" if limit else ""
        yield say(
            "warning", "run", "not-resumed", "output_dir",
            f"{brief(context.output)} holds {last}: TRL does not resume by itself, it begins anew among "
            f"older checkpoints{lost}",
            f"add `{_KEY}: {context.output / last}`, or give another `output_dir`",
        )  # fmt: skip
        return
    names = _entries(context.output)
    configured = "config.json" in names or "adapter_config.json" in names
    if configured and (_has(names, _WHOLE) or _has(names, _ADAPTER)):
        yield say(
            "warning", "run", "finished-output", "output_dir",
            f"{brief(context.output)} holds a trained model: TRL would train from zero and write over it",
            f"give another `output_dir`, or empty {context.output}",
        )  # fmt: skip


RULES: tuple[StageRule, ...] = (
    missing, other_kind, other_model, nothing_left, other_batch, fresh_optimizer, not_resumed,
)  # fmt: skip
