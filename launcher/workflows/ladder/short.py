"""A stage, short and without consequences: what `launch ladder`, `bench` and `tune` train."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.config.load import spelt
from launcher.config.points import POINTS
from launcher.errors import Finding, launch_finding
from launcher.plan import plan
from launcher.stage.stage import Stage
from launcher.upstream.citations import rendered
from launcher.upstream.schema import Values

RESERVE = 1.25
"""Rows cut for each that is trained on: upstream leaves out those with nothing to learn."""
FEWEST_ROWS = 64
SHORTEST_MEAN = 64
"""Tokens a row, below which no data set of chats is expected: what fills a packed row is cut by it."""
ASSUMED_DEVICES = 8
"""Taken where neither the caller nor `batch:` says how many rows a step takes."""


def short_overrides(stage: Stage, *, steps: int, output: Path, batch: int | None = None) -> tuple[str, ...]:
    """`key=value` texts after which training does exactly `steps` optimizer steps into `output`.

    What stays: model, precision, batch, DeepSpeed, kernels, the peak learning rate. What changes: it reads a
    slice of the data where upstream can cut one, uploads, evaluates and tracks nothing, saves no checkpoint
    and writes every loss down. The final model is saved: no argument of either backend leaves it out (the
    probe does, for `bench` and `tune`). The learning rate goes through its whole schedule, which neither
    backend counts otherwise than the steps (finetune.py::main[num_training_steps_for_scheduler =]): such runs compare
    with each other, on any number of GPUs, and not with the first steps of the full run.

    `batch` is the rows of one step, where `batch:` does not say so. Several numbers of GPUs share a
    tokenised slice where they are given the largest of theirs. Data sets are cut in proportion; one
    whose size is not known here is cut to a count, which upstream fills up by repeating rows where it
    has fewer.
    """
    names, values = stage.entry.names, stage.values
    changes: dict[str, Any] = {names.max_steps: steps, names.logging_steps: 1}
    if "checkpointing_steps" in stage.schema.fields:
        # DPO's is a number, which no run of so many steps comes to
        changes["checkpointing_steps"] = steps + 1
    listed = values.get(names.data) if stage.entry.mixes else None
    words = [str(word) for word in listed] if isinstance(listed, list) else []
    # None where they cannot be counted here
    pairs = [words[at : at + 2] for at in range(0, len(words), 2)]
    sizes = [plan.count_rows(stage, Values(stage.schema, {names.data: pair})) for pair in pairs]
    cut = _cut(words, sizes, rows_needed(stage, steps, batch)) if words else None
    if cut is not None:
        changes[names.data] = cut
    warm = values.get("warmup_steps")
    if isinstance(warm, int | float) and warm >= 1:
        step = batch or (stage.options.batch and stage.options.batch.total)
        rows = plan.count_rows(stage, values) if step else None
        full = plan.total_steps(stage, values, rows, step or 1)
        # the share that it has of the full run; where that is not known, never most of this one
        changes["warmup_steps"] = min(int(warm), round(steps * warm / full) if full else steps // 10)
    changes |= {**_harmless(stage), names.output: str(output)}
    # what a slice, or a run that is too short for it, cannot be asked for
    expected = [point.name for point in POINTS if point.full_length and point.name in stage.options.expect]
    return (*(f"{k}={spelt(v)}" for k, v in changes.items()), *(f"expect.{name}=any" for name in expected))


def short_findings(stage: Stage, steps: int) -> tuple[Finding, ...]:
    """What is not as small as it should be, and what such a run cannot show; notes."""
    schedule = _note(
        stage,
        "short-schedule",
        "learning_rate",
        f"the learning rate goes through warm-up and decay within {steps} steps: losses compare with "
        "those of other short runs, not with the first steps of the full one",
    )
    if stage.entry.mixes or stage.values.get("dataset_streaming"):
        return (schedule,)
    rows, needed = plan.count_rows(stage, stage.values), rows_needed(stage, steps)
    if rows is not None and rows <= 2 * needed:
        return (schedule,)
    cited = rendered("trl/scripts/sft.py::main[train_dataset=dataset]")
    cited = rendered("trl/scripts/sft.py::main[train_dataset=dataset]")
    uncut = _note(
        stage,
        "uncut-data",
        stage.entry.names.data,
        f"{'all rows' if rows is None else f'all {rows:,} rows'} are tokenised for {steps} steps: TRL takes a split "
        f"whole, `train[:{needed}]` is not the name of one ({cited})",
        "it trains on no more than it needs; the tokenised rows are cached for the full run",
    )
    return (uncut, schedule)


def rows_needed(stage: Stage, steps: int, batch: int | None = None) -> int:
    """Rows to cut for that many steps, reserve included."""
    step = batch or (stage.options.batch and stage.options.batch.total)
    if not step:
        names, values = stage.entry.names, stage.values
        own = stage.options.batch and stage.options.batch.per_device
        step = (own or int(values[names.per_device])) * int(values[names.accumulation]) * ASSUMED_DEVICES
    rows = math.ceil(steps * step * RESERVE) + step
    limit = stage.values.get(stage.entry.names.max_length)
    if stage.entry.packing == "always" and isinstance(limit, int):
        # a step counts packed rows, and each holds as many samples as fit
        rows *= math.ceil(limit / SHORTEST_MEAN)
    return max(FEWEST_ROWS, rows)


def _cut(listed: Sequence[str], sizes: Sequence[int | None], needed: int) -> tuple[str, ...] | None:
    """A mixer list cut to about so many rows in all; None where it has no more than that already.

    `sizes` are the rows that each entry gives, None where that is not known. Sets keep their
    proportions as far as they are known; of the rest each gets its part by the shares asked for. No set
    that had any rows loses all, and none gets more than it had.
    """
    known = sum(size for size in sizes if size is not None)
    if None not in sizes and known <= needed:
        return None
    entries = list(zip(listed[::2], listed[1::2], sizes, strict=True))
    shares = math.fsum(float(amount) for _, amount, size in entries if size is None)
    # where some are not known, each set counts as much as any other
    unknown = max(needed * sum(size is None for size in sizes) / len(sizes), needed - known)
    words = []
    for name, amount, size in entries:
        if size is None:
            rows = unknown * float(amount) / shares
        else:
            rows = min(size, (needed - unknown) * size / max(1, known))
        # a count of 1 is what a slip of the pen looks like
        count = max(2, math.ceil(rows))
        count = count if size is None else min(size, count)
        words += [name, str(count) if count else amount]
    return tuple(words)


def _harmless(stage: Stage) -> dict[str, Any]:
    """What differs from the value that the stage has, among the fields that there are."""
    values = stage.values
    return {
        name: value
        for name, value in stage.backend.SHORT_RUN.items()
        if name in (stage.args if value is None else stage.schema.fields)
        and not (values[name] is None if value is None else str(_only(values[name])) == str(value))
    }


def _only(value: Any) -> Any:
    """A list of one says what its element does."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _note(stage: Stage, code: str, name: str, message: str, help: str | None = None) -> Finding:
    key = f"args.{name}"
    return launch_finding("note", code, message, help, key=key, **stage.config.origin(key).place)
