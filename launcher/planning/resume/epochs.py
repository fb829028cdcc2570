"""Which checkpoints there will be, where in the data each is, and where upstream would continue
from it.

open-instruct multiplies the step of a checkpoint by the accumulation and divides by the
micro-batches of an epoch (finetune.py::main[resume_batch_idx = int],
dpo_tune_cache.py::main[resume_step = int]). The last step of an epoch may have fewer micro-batches
than the accumulation, so from the second epoch on that is another place wherever the accumulation
does not divide an epoch. DPO then skips as many batches again in each epoch that follows
(dpo_tune_cache.py::main[if last_checkpoint_path and]). Both train one step too many where the last
step lies inside an epoch: the limit is looked at after a step
(finetune.py::main[if completed_steps], dpo_tune_cache.py::main[if completed_steps]). transformers
counts in steps of an epoch
(transformers/trainer.py::Trainer._init_training_state[epochs_trained = int]), which is exact as
long as a step takes as many rows.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from launcher.errors import Finding, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.machine.python import Trainer
from launcher.paths import expand_user
from launcher.plan.plan import Plan

_KEEPS_ORDER = re.compile(r"iteration\s*=\s*dataloader\.iteration")
_OVER = "step {} is the last one, inside an epoch: one more would be trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLayout:
    """How an epoch is cut into steps.

    `rows` of the data, `per_device` rows a micro-batch on each of `devices` (those that share a
    sequence count once), `accumulation` micro-batches a step; `epochs` and `limit` (steps) as they
    are given.
    """

    rows: int
    per_device: int
    devices: int
    accumulation: int
    epochs: float = 1
    limit: int | None = None

    @property
    def micro(self) -> int:
        """Micro-batches of an epoch on each device: the last is filled up, none is dropped."""
        return max(1, -(-self.rows // (self.per_device * self.devices)))

    @property
    def updates(self) -> int:
        """Optimizer steps of an epoch
        (finetune.py::main[num_update_steps_per_epoch = math.ceil #2]).
        """
        return -(-self.micro // max(1, self.accumulation))

    @property
    def total(self) -> int:
        """Optimizer steps in all."""
        return self.limit or math.ceil(self.epochs * self.updates)

    @property
    def passes(self) -> int:
        """Epochs that are begun (finetune.py::main[args.num_train_epochs = math.ceil])."""
        return -(-self.total // self.updates)

    def rows_of(self, micro: int) -> int:
        """The rows of so many micro-batches of an epoch, on all devices."""
        return min(micro * self.per_device * self.devices, self.rows)


@dataclass(frozen=True, slots=True)
class DataPosition:
    """`micro` micro-batches into epoch `epoch`, both counted from 0."""

    epoch: int
    micro: int


@dataclass(frozen=True, slots=True)
class ResumeMismatch:
    """Why a resume would not go on where the checkpoint was saved; `reason` is stable.

    `place` (other rows), `order` (rows of another epoch's order), `skips` (rows left out later),
    `over` (a step after the last one), `count` (steps counted wrongly), `again` (the epoch from its
    beginning), `skipped` (rows that were never reached).
    """

    reason: str
    text: str


def advance(shape: EpochLayout, begin: DataPosition, steps: int) -> DataPosition:
    """Where training is `steps` optimizer steps after `begin`, nothing skipped."""
    epoch = begin.epoch
    micro = begin.micro
    if micro and steps:
        left = -(-(shape.micro - micro) // shape.accumulation)
        if steps < left:
            return DataPosition(epoch, micro + steps * shape.accumulation)
        epoch += 1
        micro = 0
        steps -= left
    whole, rest = divmod(steps, shape.updates)
    return DataPosition(epoch + whole, micro + rest * shape.accumulation)


def find_counted_position(shape: EpochLayout, step: int) -> DataPosition:
    """Where open-instruct continues from `step_N` (finetune.py::main[resume_batch_idx = int])."""
    return DataPosition(*divmod(step * shape.accumulation, shape.micro))


def check_step(
    skips_each: bool,
    step: int,
    saved: DataPosition,
    was: EpochLayout,
    now: EpochLayout,
    *,
    keeps_order: bool = True,
) -> ResumeMismatch | None:
    """What goes wrong when open-instruct resumes from `step_N`, saved at a place of shape `was`.

    `skips_each` is `Entry.skips_each_epoch`, `keeps_order` is whether accelerate's skipping keeps
    the epoch's order. None where nothing does.
    """
    then = find_counted_position(now, step)
    if step >= now.total:
        if then.epoch >= now.passes:
            return None
        return ResumeMismatch("over", _OVER.format(step))
    # rows, not micro-batches: those may have another size now
    rows = was.rows_of(saved.micro)
    taken = now.rows_of(then.micro)
    if (saved.epoch, rows) != (then.epoch, taken):
        text = f"it was saved {rows} rows into epoch {saved.epoch + 1}, upstream would continue "
        return ResumeMismatch("place", f"{text}{taken} rows into epoch {then.epoch + 1}")
    if skips_each:
        # DPO takes the skipping loader for every epoch that follows, SFT for the first one only
        skipping = now.passes > 1
    else:
        skipping = then.micro > 0 and then.epoch > 0
    if skipping and not keeps_order:
        text = "accelerate here forgets which epoch it is when it skips batches, "
        text += "and the data would come in the order of the first epoch"
        return ResumeMismatch("order", text)
    if skips_each and then.micro and then.epoch < now.passes - 1:
        text = f"the {taken} rows that epoch {then.epoch + 1} has behind it "
        text += "would be skipped again in each later epoch"
        return ResumeMismatch("skips", text)
    return None


def check_epoch(epoch: int, was: EpochLayout, now: EpochLayout) -> ResumeMismatch | None:
    """What goes wrong when open-instruct resumes from `epoch_N`: only the count can."""
    if was.updates == now.updates or epoch + 1 >= now.passes:
        return None
    done = (epoch + 1) * was.updates
    counted = (epoch + 1) * now.updates
    text = f"it was saved after {done} steps, which upstream would count as {counted}"
    return ResumeMismatch("count", text)


def check_trl(
    step: int,
    epochs: float | None,
    was: int | None,
    now: int,
    total: int | None,
    skips: bool = True,
) -> ResumeMismatch | None:
    """What goes wrong when transformers resumes from `checkpoint-N`.

    `epochs` is what the state says of the place, `was` and `now` are the rows of a step, `total`
    the last step. Unless it `skips` (not `ignore_data_skip`), the epoch begins again.
    """
    inside = epochs is None or not math.isclose(epochs, round(epochs), abs_tol=1e-9)
    is_over = total is not None and step >= total
    if is_over and inside:
        return ResumeMismatch("over", _OVER.format(step))
    if is_over:
        return None
    if step and was not in (None, now):
        text = f"a step took {was} rows and takes {now}: {step} steps are another place"
        return ResumeMismatch("place", text)
    if step and inside and not skips:
        text = "it was saved inside an epoch, and `ignore_data_skip` would begin that again "
        return ResumeMismatch("again", f"{text}at its first rows")
    return None


def find_inexact(
    skips_each: bool, shape: EpochLayout, every: int, *, keeps_order: bool = True
) -> Iterator[tuple[int, ResumeMismatch]]:
    """The steps, of those that are saved, from which a resume would go wrong, and how.

    The last step of all is left out: it is resumed from only where the final save failed.
    """
    for step in range(every, shape.total, every):
        saved = advance(shape, DataPosition(0, 0), step)
        mismatch = check_step(skips_each, step, saved, shape, shape, keeps_order=keeps_order)
        if mismatch is not None:
            yield step, mismatch


def keeps_order(trainer: Trainer) -> bool:
    """Whether accelerate's `skip_first_batches` hands the epoch on to the loader that it makes.

    Releases before 1.15 do not (the pin's lock file names 1.12.0), and begin the epoch that is
    resumed in the order of the first one. True if accelerate's source is not found.
    """
    for place in trainer.path:
        path = expand_user(place) / "accelerate" / "data_loader.py"
        with contextlib.suppress(OSError, ValueError):
            return _KEEPS_ORDER.search(path.read_text(encoding="utf-8")) is not None
    return True


def find_interval(plan: Plan) -> int | str | None:
    """Optimizer steps between two checkpoints; None if none is saved; else what decides.

    That is `epoch`, `best` (the score), or `share` of steps whose number is unknown.
    """
    values = plan.values
    names = plan.stage.entry.names
    if names.save_strategy is not None:
        strategy = str(values.get(names.save_strategy)).rpartition(".")[2].lower()
        if strategy in ("epoch", "best"):
            return strategy
        if strategy != "steps":
            return None
    every = values.get(names.save_every)
    if str(every).lower() == "epoch":
        return "epoch"
    try:
        steps = float(every or 0)
    except (TypeError, ValueError):
        return None
    if not 0 < steps < 1:
        return int(steps) or None
    # transformers takes a share of all steps
    if plan.steps is None:
        return "share"
    return math.ceil(steps * plan.steps) or None


def check_first_start(
    plan: Plan, layout: EpochLayout | None, trainer: Trainer
) -> Iterator[Finding]:
    """What to say at the first start; `layout` is how epochs will be cut, None if unknown."""
    every = find_interval(plan)
    yield from _report_no_checkpoints(plan, every)
    if plan.stage.entry.counts_in_script and isinstance(every, int) and layout is not None:
        yield from _report_inexact_checkpoints(plan, layout, every, keeps_order(trainer))


def _report_no_checkpoints(plan: Plan, every: int | str | None) -> Iterator[Finding]:
    names = plan.stage.entry.names
    key = names.save_every
    if every is None:
        message = "checkpointing is off: if the run stops, all progress is lost"
        help = f"`{key}: N` saves one every N steps"
        if names.save_strategy is not None:
            help = f"`{names.save_strategy}: steps` and {help}"
            key = names.save_strategy
    elif isinstance(every, int) and plan.steps is not None and every > plan.steps:
        message = f"the first checkpoint comes at step {every}, and the run has {plan.steps}: "
        message += "if it stops before, all progress is lost"
        help = f"a smaller `{key}`"
    elif plan.values.get("save_only_model"):
        message = "checkpoints hold no optimizer: if the run stops, all progress is lost"
        key = "save_only_model"
        help = "`save_only_model: false`"
    else:
        return
    yield launch_finding("note", "no-checkpoints", message, help, key=f"args.{key}")


def _report_inexact_checkpoints(
    plan: Plan, layout: EpochLayout, every: int, keeps_order: bool
) -> Iterator[Finding]:
    """Checkpoints from which a resume would go wrong, and which would be exact."""
    entry = plan.stage.entry
    skips_each = entry.skips_each_epoch
    wrong = list(find_inexact(skips_each, layout, every, keeps_order=keeps_order))
    if not wrong:
        return
    step, first = wrong[0]
    number = len(range(every, layout.total, every))
    message = f"a resume from {len(wrong)} of the {number} checkpoints would go wrong, the first "
    message += f"of them step_{step}: {first.text}"
    ways = []
    updates = layout.updates
    by_epoch = find_inexact(skips_each, layout, updates, keeps_order=keeps_order)
    if updates < layout.total and not any(by_epoch):
        ways.append(f"`checkpointing_steps: {updates}` is exact")
    if entry.epoch_checkpoints:
        ways.append("`checkpointing_steps: epoch` is exact")
    if layout.micro % layout.accumulation:
        way = f"choose a batch whose accumulation divides the {layout.micro} micro-batches "
        ways.append(f"{way}of an epoch (now {layout.accumulation})")
    if not keeps_order:
        ways.append("an accelerate that keeps the order: `pip install 'accelerate>=1.15'`")
    help = "; or ".join(ways) or "train a single epoch"
    key = "args.checkpointing_steps"
    finding = launch_finding("warning", "resume-inexact", message, help, key=key)
    yield replace(finding, layer="run")
