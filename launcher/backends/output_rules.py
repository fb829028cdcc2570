"""Rules about what the output folder holds already: upstream resumes from any checkpoint in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher import checkpoints
from launcher.backends.context import Context, StageRule, caches_only
from launcher.backends.rule import say
from launcher.checkpoints import Checkpoint
from launcher.errors import Finding

_KEY = "output_dir"
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)\Z")


def resumed_from(found: Sequence[Checkpoint]) -> Checkpoint | None:
    """Which one upstream would resume from: steps before epochs (utils.py:793), the highest number."""
    kind = "step" if any(one.kind == "step" for one in found) else "epoch"
    marked = [one for one in found if one.kind == kind and one.marked]
    return marked[-1] if marked else None


def _checkpoints(context: Context) -> list[Checkpoint]:
    return checkpoints.find("open_instruct", context.output)


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
    last = resumed_from(_checkpoints(context))
    if last is not None and not caches_only(context):
        yield say(
            "warning", "run", "foreign-checkpoints", _KEY,
            f"{context.output} holds {last.name}, which no run of launch's wrote here: upstream would "
            "resume from it", _elsewhere(context),
        )  # fmt: skip


# --- a resume that goes wrong ----------------------------------------------------------------------


def skipped_again(context: Context) -> Iterator[Finding]:
    """dpo_tune_cache.py:562: the batches that were trained on are skipped in every later epoch too."""
    last, epochs = resumed_from(_checkpoints(context)), context.values["num_epochs"]
    several = context.values["max_train_steps"] is None and isinstance(epochs, int) and epochs > 1
    if last is not None and last.kind == "step" and several and not caches_only(context):
        yield say(
            "warning", "run", "resume-skips", _KEY,
            f"resuming from {last.name} skips the same batches again in each later epoch",
            "begin anew in another folder, or train a single epoch",
        )  # fmt: skip


def finished_model(context: Context) -> Iterator[Finding]:
    """utils.py:816, finetune.py:1006: a run that ended left no checkpoint, and is begun from zero again."""
    names = _entries(context.output)
    if caches_only(context) or ("config.json" not in names and "adapter_config.json" not in names):
        return
    if not any(_WEIGHTS.match(name) for name in names):
        return
    last = resumed_from(_checkpoints(context))
    begin = "train from zero" if last is None else f"go on from {last.name}"
    yield say(
        "warning", "run", "finished-output", _KEY,
        f"{context.output} holds a trained model: upstream would {begin} and "
        "write over it", _elsewhere(context),
    )  # fmt: skip


_SHARED: tuple[StageRule, ...] = (foreign_checkpoints, finished_model)

RULES: Mapping[str, tuple[StageRule, ...]] = {"sft": _SHARED, "dpo": (*_SHARED, skipped_again)}
