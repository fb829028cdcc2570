"""Rules about what the output folder holds already: upstream resumes from any checkpoint in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends.context import Context, StageRule, caches_only, section
from launcher.backends.mixer_rules import listed
from launcher.backends.rule import say
from launcher.errors import Finding, brief
from launcher.paths import exists

# what stands in a manifest instead of a token
HIDDEN = "<redacted>"
_KEY = "output_dir"
_CHECKPOINT = re.compile(r"(step|epoch)_(\d+)\Z")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)\Z")
# a checkpoint of another model or of other data is another run's; other settings may be meant
_MODEL = (
    "model_name_or_path", "model_revision", "config_name", "use_lora", "lora_rank", "use_qlora",
)  # fmt: skip
_SETTINGS = ("loss_type", "chat_template_name", "max_seq_length", "learning_rate")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`step_N` or `epoch_N` in the output folder; only a complete one is resumed from."""

    kind: str
    number: int
    complete: bool

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.kind}_{self.number}"


def checkpoints(folder: Path | None) -> tuple[Checkpoint, ...]:
    """The checkpoints in a folder, by number; empty where there is none to be read."""
    found = (_CHECKPOINT.match(name) for name in _entries(folder))
    return tuple(
        sorted(
            (
                Checkpoint(m[1], int(m[2]), exists(folder / m[0] / "COMPLETED"))
                for m in found
                if m is not None and folder is not None
            ),
            key=lambda one: one.number,
        )
    )


def resumed_from(found: tuple[Checkpoint, ...]) -> Checkpoint | None:
    """Which one upstream would resume from: steps before epochs (utils.py:793), the highest number."""
    kind = "step" if any(one.kind == "step" for one in found) else "epoch"
    complete = [one for one in found if one.kind == kind and one.complete]
    return complete[-1] if complete else None


def _entries(folder: Path | None) -> list[str]:
    try:
        return os.listdir(folder) if folder is not None else []
    except (OSError, ValueError):
        return []


def _elsewhere(context: Context) -> str:
    return f"give another `output_dir` or `exp_name`, or empty {context.output}"


# --- whose checkpoints -----------------------------------------------------------------------------


def foreign_checkpoints(context: Context) -> Iterator[Finding]:
    """utils.py:813: upstream resumes from the newest checkpoint in its output folder, whoever made it."""
    last = resumed_from(checkpoints(context.output))
    if last is None or caches_only(context):
        return
    if context.earlier is None:
        yield say(
            "warning", "run", "foreign-checkpoints", _KEY,
            f"{context.output} holds {last.name}, which no run of launch's wrote here: upstream would "
            "resume from it", _elsewhere(context),
        )  # fmt: skip
        return
    data = listed(context.values)
    other = list(_differing(context, context.earlier, (data, f"{data}_splits", *_MODEL)))
    told = other or list(_differing(context, context.earlier, _SETTINGS))
    if told:
        yield say(
            "error" if other else "warning", "run", "foreign-checkpoints", _KEY,
            f"{context.output} holds {last.name} of a run with other settings, which upstream would "
            f"resume from: {'; '.join(told)}", _elsewhere(context),
        )  # fmt: skip


def _differing(context: Context, earlier: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """What makes this another run than the earlier one, as `key was x, is y`."""
    values = context.values
    if earlier.get("stage") not in (None, values.schema.stage):
        yield f"it was {earlier['stage']}"
        return
    for key in keys:
        if key not in values or not _recorded(earlier, key):
            continue
        if key == "lora_rank" and not values["use_lora"]:
            continue
        was, now = before(earlier, key), values[key]
        # what looks like a token is kept out of a manifest
        if _told(was) != _told(now) and HIDDEN not in str(was):
            yield f"`{key}` was {brief(was)}, is {brief(now)}"


def _recorded(earlier: Mapping[str, Any], key: str) -> bool:
    args = earlier.get("args")
    return isinstance(args, Mapping) and isinstance(args.get(key), Mapping)


def before(earlier: Mapping[str, Any], key: str) -> Any:
    """The value of an argument in a manifest of ours; None where it holds none."""
    return earlier["args"][key].get("value") if _recorded(earlier, key) else None


def _told(value: Any) -> Any:
    """A value as a manifest can hold it: enumerations and numbers come back as text or numbers."""
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


# --- a resume that goes wrong ----------------------------------------------------------------------


def other_batch(context: Context) -> Iterator[Finding]:
    """finetune.py:766, dpo_tune_cache.py:514: the place in the data is reckoned with the numbers of now."""
    last = resumed_from(checkpoints(context.output))
    if last is None or last.kind != "step" or context.earlier is None or caches_only(context):
        return
    pairs = (
        ("per_device_train_batch_size", context.per_device),
        ("gradient_accumulation_steps", context.accumulation),
    )
    changed = [
        f"`{key}` was {was}, is {now}"
        for key, now in pairs
        if now is not None and (was := before(context.earlier, key)) is not None and was != now
    ]
    if changed:
        yield say(
            "warning", "run", "resume-position", _KEY,
            f"resuming from {last.name} would go on at the wrong place in the data: {'; '.join(changed)}",
            "keep both numbers as they were, or begin anew in another folder",
        )  # fmt: skip


def other_world(context: Context) -> Iterator[Finding]:
    """deepspeed/runtime/engine.py:4749: ZeRO's states belong to one number of processes."""
    last = resumed_from(checkpoints(context.output))
    was = _gpus(context.earlier or {})
    if last is None or not context.zero_stage or not context.gpus or was in {None, context.gpus}:
        return
    if section(context.file or {}, "checkpoint").get("load_universal") is True:
        return
    yield say(
        "error", "run", "resume-world", _KEY,
        f"{last.name} was saved with DeepSpeed on {was} GPU(s) and cannot be resumed on {context.gpus}",
        f"use {was} GPU(s), or begin anew in another folder",
    )  # fmt: skip


def _gpus(earlier: Mapping[str, Any]) -> int | None:
    plan = earlier.get("plan")
    if not isinstance(plan, Mapping) or not isinstance(plan.get("gpus"), int):
        return None
    nodes = plan.get("nodes")
    return int(plan["gpus"]) * (nodes if isinstance(nodes, int) else 1)


def skipped_again(context: Context) -> Iterator[Finding]:
    """dpo_tune_cache.py:562: the batches that were trained on are skipped in every later epoch too."""
    last, epochs = resumed_from(checkpoints(context.output)), context.values["num_epochs"]
    several = context.values["max_train_steps"] is None and isinstance(epochs, int) and epochs > 1
    if last is not None and last.kind == "step" and several and not caches_only(context):
        yield say(
            "warning", "run", "resume-skips", _KEY,
            f"resuming from {last.name} skips the same batches again in each later epoch",
            "begin anew in another folder, or train a single epoch",
        )  # fmt: skip


def stale_checkpoints(context: Context) -> Iterator[Finding]:
    """finetune.py:979, dpo_tune_cache.py:702 mark the highest number as complete, not what was just
    saved; finetune.py:982, dpo_tune_cache.py:705 delete the lowest.
    """
    steps = context.values["checkpointing_steps"]
    if steps is None or caches_only(context):
        return
    found = checkpoints(context.output)
    last, kind = resumed_from(found), "epoch" if steps == "epoch" else "step"
    stale = [one for one in found if _in_the_way(one, last, kind, steps)]
    if stale:
        names = ", ".join(one.name for one in stale[:3])
        yield say(
            "warning", "run", "stale-checkpoints", _KEY,
            f"{names} in {context.output} would be marked as complete instead of what this run saves",
            f"delete {'it' if len(stale) == 1 else 'them'}",
        )  # fmt: skip


def _in_the_way(one: Checkpoint, last: Checkpoint | None, kind: str, steps: Any) -> bool:
    """Whether a checkpoint outranks the next one that this run would save."""
    if kind == "epoch" and one.kind == "step":
        # steps go before epochs, whatever their numbers (utils.py:793)
        return True
    if one.kind != kind or one.complete:
        return False
    begun = last.number if last is not None and last.kind == kind else None
    if kind == "epoch":
        return one.number > (0 if begun is None else begun + 1)
    interval = abs(int(steps)) if str(steps).lstrip("+-").isdecimal() else 0
    return one.number > (begun or 0) + interval > 0


def finished_model(context: Context) -> Iterator[Finding]:
    """utils.py:816, finetune.py:1006: a run that ended left no checkpoint, and is begun from zero again."""
    names = _entries(context.output)
    if caches_only(context) or ("config.json" not in names and "adapter_config.json" not in names):
        return
    if not any(_WEIGHTS.match(name) for name in names):
        return
    last = resumed_from(checkpoints(context.output))
    begin = "train from zero" if last is None else f"go on from {last.name}"
    yield say(
        "warning", "run", "finished-output", _KEY,
        f"{context.output} holds a trained model: upstream would {begin} and "
        "write over it", _elsewhere(context),
    )  # fmt: skip


_SHARED: tuple[StageRule, ...] = (
    foreign_checkpoints, other_batch, other_world, stale_checkpoints, finished_model,
)  # fmt: skip

RULES: Mapping[str, tuple[StageRule, ...]] = {"sft": _SHARED, "dpo": (*_SHARED, skipped_again)}
