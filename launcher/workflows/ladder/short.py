"""A stage, short and without consequences: what `launch ladder`, `bench` and `tune` train."""

import math
from pathlib import Path

from launcher.config.load import spell_override
from launcher.config.points import POINTS
from launcher.errors import Finding, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.plan import plan
from launcher.stage.stage import Stage
from launcher.upstream.citations import render_citations
from launcher.upstream.schema import Values

RESERVE = 1.25
"""Rows cut for each that is trained on: upstream leaves out those with nothing to learn."""
FEWEST_ROWS = 64
SHORTEST_MEAN = 64
"""Tokens of a chat on average, at the least: what fills a packed row is cut by it."""
ASSUMED_DEVICES = 8
"""Taken if neither the caller nor `batch:` says how many rows a step takes."""


def list_short_overrides(
    stage: Stage, *, steps: int, output: Path, batch: int | None = None
) -> tuple[str, ...]:
    """`key=value` texts after which training does exactly `steps` optimizer steps into `output`.

    Model, precision, batch, DeepSpeed, kernels and the peak learning rate stay. The run reads a
    slice of the data if upstream can cut one, uploads, evaluates and tracks nothing, saves no
    checkpoint and logs every loss. The final model is saved: no argument of either trainer leaves
    it out (the probe does, for `bench` and `tune`). The learning rate goes through its whole
    schedule, which neither trainer counts otherwise than the steps
    (finetune.py::main[num_training_steps_for_scheduler =]): such runs compare with each other, on
    any number of GPUs, and not with the first steps of the full run.

    `batch` is the rows of one step, if `batch:` does not say so. Several numbers of GPUs share a
    tokenised slice if they get the largest of theirs. Data sets are cut in proportion; one of
    unknown size is cut to a count, which upstream fills up by repeating rows if it has fewer.
    """
    names = stage.entry.names
    changes: dict[str, object] = {names.max_steps: steps, names.logging_steps: 1}
    if "checkpointing_steps" in stage.schema.fields:
        # DPO's is a number, which no run of so many steps comes to
        changes["checkpointing_steps"] = steps + 1
    mixture = _cut_mixture(stage, count_needed_rows(stage, steps, batch))
    if mixture:
        changes[names.data] = mixture
    warm_up = _shorten_warm_up(stage, steps, batch)
    if warm_up is not None:
        changes["warmup_steps"] = warm_up
    changes |= _list_short_run_changes(stage)
    changes[names.output] = str(output)
    overrides = [f"{name}={spell_override(value)}" for name, value in changes.items()]
    for point in POINTS:
        # a slice, or so short a run, cannot prove these
        if point.full_length and point.name in stage.options.expect:
            overrides.append(f"expect.{point.name}=any")
    return tuple(overrides)


def _shorten_warm_up(stage: Stage, steps: int, batch: int | None) -> int | None:
    """The warm-up's share of the full run; if that is unknown, at most a tenth of this one.

    None if no warm-up is given in steps.
    """
    warm_up = stage.values.get("warmup_steps")
    if not isinstance(warm_up, int | float) or warm_up < 1:
        return None
    batch = _find_batch_rows(stage, batch)
    rows = plan.count_rows(stage, stage.values) if batch else None
    full = plan.count_total_steps(stage, stage.values, rows, batch or 1)
    short = steps // 10
    if full:
        short = round(steps * warm_up / full)
    return min(int(warm_up), short)


def _find_batch_rows(stage: Stage, batch: int | None) -> int | None:
    if batch or stage.options.batch is None:
        return batch
    return stage.options.batch.total


def check_short_run(stage: Stage, steps: int) -> tuple[Finding, ...]:
    """Notes on what is not as small as it should be, and what such a run cannot show."""
    notes = []
    rows = plan.count_rows(stage, stage.values)
    needed = count_needed_rows(stage, steps)
    is_cut = stage.entry.mixes or stage.values.get("dataset_streaming")
    if not is_cut and (rows is None or rows > 2 * needed):
        amount = "all rows" if rows is None else f"all {rows:,} rows"
        cited = render_citations("trl/scripts/sft.py::main[train_dataset=dataset]")
        message = (
            f"{amount} are tokenised for {steps} steps: TRL takes a split whole, "
            f"`train[:{needed}]` is not the name of one ({cited})"
        )
        help = "it trains on no more than it needs; the tokenised rows are cached for the full run"
        notes.append(_create_note(stage, "uncut-data", stage.entry.names.data, message, help))
    message = (
        f"the learning rate goes through warm-up and decay within {steps} steps: losses compare "
        "with those of other short runs, not with the first steps of the full one"
    )
    notes.append(_create_note(stage, "short-schedule", "learning_rate", message))
    return tuple(notes)


def count_needed_rows(stage: Stage, steps: int, batch: int | None = None) -> int:
    """Rows to cut for that many steps, reserve included."""
    rows = _find_batch_rows(stage, batch) or _assume_batch_rows(stage)
    needed = math.ceil(steps * rows * RESERVE) + rows
    limit = stage.values.get(stage.entry.names.max_length)
    if stage.entry.packing == "always" and isinstance(limit, int):
        # a step counts packed rows, and each holds as many samples as fit
        needed *= math.ceil(limit / SHORTEST_MEAN)
    return max(FEWEST_ROWS, needed)


def _assume_batch_rows(stage: Stage) -> int:
    names = stage.entry.names
    per_device = None
    if stage.options.batch is not None:
        per_device = stage.options.batch.per_device
    if not per_device:
        per_device = int(stage.values[names.per_device])
    return per_device * int(stage.values[names.accumulation]) * ASSUMED_DEVICES


@dataclass(frozen=True, slots=True)
class _MixedSet:
    """A data set of a mixer list; `rows` is None if they cannot be counted here."""

    name: str
    amount: str
    rows: int | None


def _cut_mixture(stage: Stage, needed: int) -> list[str]:
    """The stage's mixer list cut to about `needed` rows in all; empty if there is nothing to cut.

    Sets keep their proportions as far as their sizes are known; of the rest each gets its part by
    the shares asked for. No set that had any rows loses all, and none gets more than it had.
    """
    key = stage.entry.names.data
    listed = stage.values.get(key)
    if not stage.entry.mixes or not isinstance(listed, list):
        return []
    words = [str(word) for word in listed]
    sets = []
    rows = 0
    shares = []
    for name, amount in zip(words[::2], words[1::2], strict=True):
        size = plan.count_rows(stage, Values(stage.schema, {key: [name, amount]}))
        sets.append(_MixedSet(name, amount, size))
        if size is None:
            shares.append(float(amount))
        else:
            rows += size
    if not shares and rows <= needed:
        return []
    # sets of unknown size count as much as any others
    rest = max(needed * len(shares) / len(sets), needed - rows)
    cut = []
    for mixed in sets:
        if mixed.rows is None:
            part = rest * float(mixed.amount) / math.fsum(shares)
        else:
            part = (needed - rest) * mixed.rows / max(1, rows)
        # a count of 1 looks like a slip of the pen
        count = max(2, math.ceil(part))
        if mixed.rows is not None:
            count = min(mixed.rows, count)
        amount = mixed.amount
        if count:
            amount = str(count)
        cut += [mixed.name, amount]
    return cut


def _list_short_run_changes(stage: Stage) -> dict[str, object]:
    changes: dict[str, object] = {}
    for name, value in stage.backend.SHORT_RUN.items():
        if name not in stage.schema.fields:
            continue
        if value is None and name not in stage.args:
            continue
        now = stage.values[name]
        if isinstance(now, list) and len(now) == 1:
            now = now[0]
        if str(now) != str(value):
            changes[name] = value
    return changes


def _create_note(
    stage: Stage, code: str, name: str, message: str, help: str | None = None
) -> Finding:
    key = f"args.{name}"
    place = stage.config.origin(key).place
    return launch_finding("note", code, message, help, key=key, **place)
