"""The same stage, short and without consequences: the overrides that make it so.

What stays: model, precision, batch, DeepSpeed, kernels, the peak learning rate. What changes: it ends
after so many optimizer steps, reads a slice of the data where upstream can cut one, uploads, evaluates
and tracks nothing, saves no checkpoint and writes every loss down. The final model is saved all the
same: no argument of either backend leaves it out. Only the probe does, for `bench` and `tune`.

The learning rate goes through its whole schedule within the short run: warm-up keeps its share of all
steps, and decay ends with it, because neither backend counts the schedule otherwise than the steps
(finetune.py:709). So rehearsals of equal length compare with each other, on any number of GPUs, and
none compares with the first steps of the full run, which are still warming up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import noops, plan, rules
from launcher.config import spelt
from launcher.errors import Finding
from launcher.schema import Values
from launcher.stage import Stage

RESERVE = 1.25
"""Rows cut for each that is trained on: upstream leaves out those with nothing to learn."""
FEWEST_ROWS = 64
ASSUMED_DEVICES = 8
"""Taken where neither the caller nor `batch:` says how many rows a step takes."""

# as a run without consequences has them, where upstream's fields are called so; None: nothing is said of it
_HARMLESS: Mapping[str, Mapping[str, Any]] = {
    "open_instruct": {
        "push_to_hub": False, "try_launch_beaker_eval_jobs": False, "try_auto_save_to_beaker": False,
        "send_slack_alerts": False, "profiling": False, "cache_dataset_only": False,
        "cache_logprobs_only": False, "resume_from_checkpoint": None,
        "ephemeral_save_interval": None,
        # the slice would be kept under the name of the whole
        "dataset_config_hash": None, "config_hash": None,
        "do_not_randomize_output_dir": True, "with_tracking": False,
    },
    "trl": {
        "push_to_hub": False, "save_strategy": "no", "eval_strategy": "no", "do_eval": False,
        "eval_on_start": False, "load_best_model_at_end": False, "resume_from_checkpoint": None,
        "logging_strategy": "steps", "logging_first_step": False,
        # what is read while evaluating alone
        "metric_for_best_model": None, "greater_is_better": None, "per_device_eval_batch_size": None,
        "report_to": "none",
    },
}  # fmt: skip
# what a slice, or a run that is too short for it, cannot be asked for
_NOT_EXPECTED = ("dataset_cache", "reference_cache", "trend")


def overrides(
    stage: Stage, *, steps: int, output: Path, batch: int | None = None
) -> tuple[str, ...]:
    """`key=value` texts after which training does exactly `steps` optimizer steps into `output`.

    `batch` is the rows of one step, where `batch:` does not say so. Several numbers of GPUs share a
    tokenised slice where they are given the largest of theirs. Data sets are cut in proportion; one
    whose size is not known here is cut to a count, which upstream fills up by repeating rows where it
    has fewer.
    """
    changes = {
        **_short(stage, steps, batch),
        **_harmless(stage),
        stage.entry.names.output: str(output),
    }
    for name in _idle(stage, changes):
        changes[name] = None
        if name not in stage.args:
            del changes[name]
    changed = [f"{name}={spelt(value)}" for name, value in changes.items()]
    expected = stage.options.expect
    return (*changed, *(f"expect.{name}=any" for name in _NOT_EXPECTED if name in expected))


def findings(stage: Stage, steps: int) -> tuple[Finding, ...]:
    """What is not as small as it should be, and what such a run cannot show; notes and warnings."""
    rate = "learning_rate"
    schedule = _note(
        stage, "short-schedule", rate,
        f"the learning rate goes through warm-up and decay within {steps} steps: losses compare with "
        "those of other short runs, not with the first steps of the full one",
    )  # fmt: skip
    return (*_uncut(stage, steps), schedule)


def rows_wanted(stage: Stage, steps: int, batch: int | None = None) -> int:
    """Rows to cut for that many steps, reserve included."""
    step = batch or (stage.options.batch and stage.options.batch.total)
    if not step:
        names, values = stage.entry.names, stage.values
        own = stage.options.batch and stage.options.batch.per_device
        step = (own or int(values[names.per_device])) * int(values[names.accumulation])
        step *= ASSUMED_DEVICES
    return max(FEWEST_ROWS, math.ceil(steps * step * RESERVE) + step)


def cut(listed: Sequence[str], sizes: Sequence[int | None], wanted: int) -> tuple[str, ...] | None:
    """A mixer list cut to about so many rows in all; None where it has no more than that already.

    `sizes` are the rows that each entry gives, None where that is not known. Sets keep their
    proportions as far as they are known; of the rest each gets its part by the shares asked for. No set
    that had any rows loses all, and none gets more than it had.
    """
    names, amounts = listed[::2], listed[1::2]
    known = sum(size for size in sizes if size is not None)
    if None not in sizes and known <= wanted:
        return None
    shares = math.fsum(float(a) for a, size in zip(amounts, sizes, strict=True) if size is None)
    # where some are not known, each set counts as much as any other
    unknown = wanted * sum(size is None for size in sizes) / len(sizes)
    if wanted - unknown > known:
        unknown = wanted - known
    words = []
    for name, amount, size in zip(names, amounts, sizes, strict=True):
        if size is None:
            rows = unknown * float(amount) / shares
        else:
            rows = min(size, (wanted - unknown) * size / max(1, known))
        # a count of 1 is what a slip of the pen looks like
        count = max(2, math.ceil(rows))
        count = count if size is None else min(size, count)
        words += [name, str(count) if count else amount]
    return tuple(words)


def _short(stage: Stage, steps: int, batch: int | None) -> dict[str, Any]:
    names, fields = stage.entry.names, stage.schema.fields
    changes: dict[str, Any] = {names.max_steps: steps, names.logging_steps: 1}
    if "checkpointing_steps" in fields:
        # DPO's is a number, which no run of so many steps comes to
        changes["checkpointing_steps"] = steps + 1
    if stage.options.backend == "open_instruct":
        listed = stage.values.get(names.data)
        words = [str(word) for word in listed] if isinstance(listed, list) else []
        sliced = cut(words, _sizes(stage, words), rows_wanted(stage, steps, batch))
        changes |= {} if sliced is None else {names.data: sliced}
    warm = stage.values.get("warmup_steps")
    if isinstance(warm, int | float) and warm >= 1:
        step = batch or (stage.options.batch and stage.options.batch.total)
        rows = plan.count_rows(stage, stage.values) if step else None
        full = plan.total_steps(stage, stage.values, rows, step or 1)
        # the share that it has of the full run; where that is not known, never most of this one
        share = round(steps * warm / full) if full else min(int(warm), steps // 10)
        changes["warmup_steps"] = min(int(warm), share)
    return changes


def _sizes(stage: Stage, listed: Sequence[str]) -> list[int | None]:
    """Rows that each entry of a mixer list gives; None where they cannot be counted here."""
    data = stage.entry.names.data
    return [
        plan.count_rows(stage, Values(stage.schema, {data: list(listed[at : at + 2])}))
        for at in range(0, len(listed), 2)
    ]


def _harmless(stage: Stage) -> dict[str, Any]:
    """What differs from the value that the stage has, among the fields that there are."""
    backend, values = stage.options.backend, stage.values
    return {
        name: value
        for name, value in _HARMLESS[backend].items()
        if name in (stage.args if value is None else stage.schema.fields)
        and not (values[name] is None if value is None else str(_only(values[name])) == str(value))
    }


def _only(value: Any) -> Any:
    """A list of one says what its element does."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _idle(stage: Stage, changes: Mapping[str, Any]) -> list[str]:
    """Arguments of the stage that do nothing once it is short, and would be warned of."""
    before = {finding.key for finding in _unread(stage, stage.values)}
    given = {name: value for name, value in {**stage.args, **changes}.items() if value is not None}
    after = _unread(stage, Values(stage.schema, given))
    keys = [finding.key for finding in after if finding.key and finding.key not in before]
    return [key.removeprefix("args.") for key in keys]


def _unread(stage: Stage, values: Values) -> Iterator[Finding]:
    """What does nothing, by the reads of the source and by the rules that know more of them."""
    yield from noops.find(values, stage.entry)
    yield from (found for found in rules.apply(values) if found.code == "conditional-key")


def _uncut(stage: Stage, steps: int) -> Iterator[Finding]:
    names = stage.entry.names
    if stage.options.backend != "trl" or stage.values.get("dataset_streaming"):
        return
    rows, wanted = plan.count_rows(stage, stage.values), rows_wanted(stage, steps)
    if rows is not None and rows <= 2 * wanted:
        return
    many = "all rows" if rows is None else f"all {rows:,} rows"
    yield _note(
        stage, "uncut-data", names.data,
        f"{many} are tokenised for {steps} steps: TRL takes a split whole, `train[:{wanted}]` is no "
        "name of one (trl/scripts/sft.py:106)",
        "it trains on no more than it needs; the tokenised rows are cached for the full run",
    )  # fmt: skip


def _note(stage: Stage, code: str, name: str, message: str, help: str | None = None) -> Finding:
    origin = stage.config.origin(f"args.{name}")
    return Finding(
        severity="note", layer="launch", code=code, key=f"args.{name}", message=message, help=help,
        **origin.place,
    )  # fmt: skip
