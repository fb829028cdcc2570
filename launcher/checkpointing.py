"""Before there is a checkpoint: whether there will be one, and whether a resume from it would be exact."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

from launcher import position
from launcher.errors import Finding
from launcher.machine import Trainer
from launcher.paths import expanded
from launcher.plan import Plan
from launcher.position import Place, Shape

_KEEPS_ORDER = re.compile(r"iteration\s*=\s*dataloader\.iteration")


def keeps_order(trainer: Trainer) -> bool:
    """Whether accelerate's `skip_first_batches` hands the epoch on to the loader that it makes.

    Releases before 1.15 do not (the pin's lock file names 1.12.0), and begin the epoch that is resumed in
    the order of the first one. True where accelerate's source is not found.
    """
    for place in trainer.path:
        path = expanded(place) / "accelerate" / "data_loader.py"
        with contextlib.suppress(OSError, ValueError):
            return _KEEPS_ORDER.search(path.read_text(encoding="utf-8")) is not None
    return True


def interval(plan: Plan) -> int | str | None:
    """Optimizer steps between two checkpoints, or None where none is saved; else what decides.

    That is `epoch`, `best` (the score), or `share` of steps whose number is not known.
    """
    values = plan.values
    if plan.stage.options.backend == "trl":
        strategy = str(values.get("save_strategy")).rpartition(".")[2].lower()
        if strategy != "steps":
            return strategy if strategy in ("epoch", "best") else None
        every = values.get("save_steps")
    else:
        every = values.get("checkpointing_steps")
        if every is not None and str(every).lower() == "epoch":
            return "epoch"
    try:
        found = float(every) if every is not None else 0.0
    except (TypeError, ValueError):
        return None
    if 0 < found < 1:
        # transformers takes a share of all steps
        return "share" if plan.steps is None else math.ceil(found * plan.steps) or None
    return int(found) or None


def findings(plan: Plan, shape: Shape | None, trainer: Trainer) -> Iterator[Finding]:
    """What to say at the first start; `shape` is how epochs will be cut, where that is known."""
    for found in (*_none(plan), *_inexact(plan, shape, trainer)):
        yield plan.stage.config.placed(found)


def _none(plan: Plan) -> Iterator[Finding]:
    every, values = interval(plan), plan.values
    trl = plan.stage.options.backend == "trl"
    key = "save_steps" if trl else "checkpointing_steps"
    if every is None:
        yield _note(
            "save_strategy" if trl else key, "no checkpoint is saved: a run that is stopped begins anew",
            f"`{'save_strategy: steps` and `' if trl else ''}{key}: N` saves one every N steps",
        )  # fmt: skip
    elif isinstance(every, int) and plan.steps is not None and every > plan.steps:
        why = f"the first checkpoint comes at step {every}, and the run has {plan.steps}"
        yield _note(key, f"{why}: stopped, it begins anew", f"a smaller `{key}`")
    elif trl and values.get("save_only_model"):
        yield _note(
            "save_only_model", "checkpoints hold no optimizer: a run that is stopped begins anew",
            "`save_only_model: false`",
        )  # fmt: skip


def _note(key: str, message: str, help: str) -> Finding:
    return Finding(
        severity="note", layer="launch", code="no-checkpoints", key=f"args.{key}", message=message,
        help=help,
    )  # fmt: skip


def _inexact(plan: Plan, shape: Shape | None, trainer: Trainer) -> Iterator[Finding]:
    every, options = interval(plan), plan.stage.options
    if (
        options.backend != "open_instruct"
        # OLMo-core's loader counts by itself, and exactly
        or plan.stage.entry.torchrun
        or not isinstance(every, int)
        or shape is None
        or every < 1
    ):
        return
    kept = keeps_order(trainer)
    wrong = list(position.inexact(options.stage, shape, every, keeps_order=kept))
    if not wrong:
        return
    saved = position.advanced(shape, Place(0, 0), wrong[0])
    first = position.of_step(options.stage, wrong[0], saved, shape, shape, keeps_order=kept)
    number = len(range(every, shape.total, every))
    yield Finding(
        severity="warning", layer="run", code="resume-inexact", key="args.checkpointing_steps",
        message=f"a resume from {len(wrong)} of the {number} checkpoints would go wrong, the first of them "
        f"step_{wrong[0]}: {first.text if first is not None else ''}",
        help=_instead(options.stage, shape, every, kept),
    )  # fmt: skip


def _instead(stage: str, shape: Shape, every: int, kept: bool) -> str:
    ways: list[str] = []
    exact = position.exact_steps(stage, shape, every, keeps_order=kept)
    if exact is not None:
        ways.append(f"`checkpointing_steps: {exact}` is exact")
    if stage == "sft":
        ways.append("`checkpointing_steps: epoch` is exact")
    if shape.micro % shape.accumulation:
        ways.append(
            f"choose a batch whose accumulation divides the {shape.micro} micro-batches of an epoch (now "
            f"{shape.accumulation})"
        )
    if not kept:
        ways.append("an accelerate that keeps the order: `pip install 'accelerate>=1.15'`")
    return "; or ".join(ways) or "train a single epoch"
