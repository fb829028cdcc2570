"""Where in the data a checkpoint was saved, and where upstream would go on from it: arithmetic alone.

open-instruct multiplies the step of a checkpoint by the accumulation and divides by the micro-batches of
an epoch (finetune.py:766, dpo_tune_cache.py:514). The last step of an epoch may have fewer micro-batches
than the accumulation, so from the second epoch on that is another place wherever the accumulation does
not divide an epoch. DPO then skips as many batches again in each epoch that follows
(dpo_tune_cache.py:562). Both train one step too many where the last step lies inside an epoch: the limit
is looked at after a step (finetune.py:985, dpo_tune_cache.py:708). transformers counts in steps of an
epoch (transformers/trainer.py:1648), which is exact as long as a step takes as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How an epoch is cut into steps.

    `rows` of the data, `per_device` rows a micro-batch on each of `devices` (those that share a sequence
    count once), `accumulation` micro-batches a step; `epochs` and `limit` (steps) as they are given.
    """

    rows: int
    per_device: int
    devices: int
    accumulation: int
    epochs: float = 1
    limit: int | None = None

    @property
    def micro(self) -> int:
        """Micro-batches of an epoch on each device: the last ones are filled up, none is dropped."""
        return max(1, -(-self.rows // (self.per_device * self.devices)))

    @property
    def updates(self) -> int:
        """Optimizer steps of an epoch (finetune.py:720)."""
        return -(-self.micro // max(1, self.accumulation))

    @property
    def total(self) -> int:
        """Optimizer steps in all."""
        return self.limit or math.ceil(self.epochs * self.updates)

    @property
    def passes(self) -> int:
        """Epochs that are begun (finetune.py:723)."""
        return -(-self.total // self.updates)


@dataclass(frozen=True, slots=True)
class Place:
    """`micro` micro-batches into epoch `epoch`, both counted from 0."""

    epoch: int
    micro: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """Why a resume would not go on where the checkpoint was saved; `reason` is stable.

    `place` (other rows), `order` (rows of another epoch's order), `skips` (rows left out later), `over`
    (a step after the last one), `count` (steps counted wrongly), `again` (the epoch from its beginning),
    `skipped` (rows that were never reached).
    """

    reason: str
    text: str


def advanced(shape: Shape, begin: Place, steps: int) -> Place:
    """Where training is `steps` optimizer steps after `begin`, nothing skipped."""
    epoch, micro = begin.epoch, begin.micro
    if micro and steps:
        left = -(-(shape.micro - micro) // shape.accumulation)
        if steps < left:
            return Place(epoch, micro + steps * shape.accumulation)
        epoch, micro, steps = epoch + 1, 0, steps - left
    whole, rest = divmod(steps, shape.updates)
    return Place(epoch + whole, micro + rest * shape.accumulation)


def counted(shape: Shape, step: int) -> Place:
    """Where open-instruct goes on from `step_N` (finetune.py:766)."""
    return Place(*divmod(step * shape.accumulation, shape.micro))


def of_step(
    stage: str, step: int, saved: Place, was: Shape, now: Shape, *, keeps_order: bool = True
) -> Wrong | None:
    """What goes wrong when open-instruct resumes from `step_N`, saved at a place of shape `was`.

    `keeps_order` is whether accelerate's skipping keeps the epoch's order. None where nothing does.
    """
    then = counted(now, step)
    if step >= now.total:
        if then.epoch >= now.passes:
            return None
        return Wrong(
            "over", f"step {step} is the last one, inside an epoch: one more would be trained"
        )
    # rows, not micro-batches: those may have another size now
    true = (saved.epoch, min(saved.micro * was.per_device * was.devices, was.rows))
    taken = (then.epoch, min(then.micro * now.per_device * now.devices, now.rows))
    if true != taken:
        return Wrong(
            "place",
            f"it was saved {true[1]} rows into epoch {true[0] + 1}, upstream would go on {taken[1]} rows "
            f"into epoch {taken[0] + 1}",
        )
    # DPO takes the skipping loader for every epoch that follows, SFT for the first one only
    skipping = then.micro > 0 and then.epoch > 0
    if stage == "dpo":
        skipping = now.passes > 1
    if skipping and not keeps_order:
        return Wrong(
            "order",
            "accelerate here forgets which epoch it is when it skips batches, and the data would come in "
            "the order of the first epoch",
        )
    if stage == "dpo" and then.micro and then.epoch < now.passes - 1:
        return Wrong(
            "skips",
            f"the {taken[1]} rows that epoch {then.epoch + 1} has behind it would be skipped again in each "
            "later epoch",
        )
    return None


def of_epoch(epoch: int, was: Shape, now: Shape) -> Wrong | None:
    """What goes wrong when open-instruct resumes from `epoch_N`: only the count can."""
    if was.updates == now.updates or epoch + 1 >= now.passes:
        return None
    done = (epoch + 1) * was.updates
    return Wrong(
        "count", f"it was saved after {done} steps, which upstream would count as {(epoch + 1) * now.updates}"
    )  # fmt: skip


def of_trl(
    step: int, epochs: float | None, was: int | None, now: int, total: int | None, *,
    skips: bool = True,
) -> Wrong | None:  # fmt: skip
    """What goes wrong when transformers resumes from `checkpoint-N`.

    `epochs` is what the state says of the place, `was` and `now` are the rows of a step, `total` the
    last step. Unless it `skips` (not `ignore_data_skip`), the epoch begins again.
    """
    inside = epochs is None or not math.isclose(epochs, round(epochs), abs_tol=1e-9)
    if total is not None and step >= total and inside:
        return Wrong(
            "over", f"step {step} is the last one, inside an epoch: one more would be trained"
        )
    if was is not None and was != now and step and (total is None or step < total):
        return Wrong(
            "place", f"a step took {was} rows and takes {now}: {step} steps are another place"
        )
    if not skips and inside and step and (total is None or step < total):
        return Wrong(
            "again",
            "it was saved inside an epoch, and `ignore_data_skip` would begin that again at its first rows",
        )
    return None


def inexact(stage: str, shape: Shape, every: int, *, keeps_order: bool = True) -> Iterator[int]:
    """The checkpoints, of those saved every so many steps, from which a resume would go wrong.

    The last step of all is left out: it is resumed from only where the final save failed.
    """
    for step in range(every, shape.total, every):
        saved = advanced(shape, Place(0, 0), step)
        if of_step(stage, step, saved, shape, shape, keeps_order=keeps_order) is not None:
            yield step


def exact_steps(stage: str, shape: Shape, every: int, *, keeps_order: bool = True) -> int | None:
    """The number of steps next to `every` of which all checkpoints are exact; None where there is none.

    An epoch's steps, or a part of them; more than one epoch only where less is never exact.
    """
    parts = [n for n in range(1, shape.updates + 1) if shape.updates % n == 0]
    able = (
        n
        for n in sorted(parts, key=lambda n: (abs(n - every), n))
        if n < shape.total and next(inexact(stage, shape, n, keeps_order=keeps_order), None) is None
    )
    return next(able, None)
