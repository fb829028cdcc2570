"""Which checkpoint a run goes on from, and what upstream must not see beside it: `Selection`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import changes, checkpointing, checkpoints, earlier, position
from launcher.checkpoints import Checkpoint
from launcher.earlier import Attempts, Manifest
from launcher.machine import Trainer
from launcher.plan import Derived, Plan
from launcher.position import Place, Wrong


@dataclass(frozen=True, slots=True)
class Selection:
    """Over the checkpoints in an output folder, by the attempts that made them.

    `allowed` are the changes that the user allows by name.
    """

    plan: Plan
    output: Path | None
    attempts: Attempts
    trainer: Trainer
    allowed: frozenset[str]

    @property
    def backend(self) -> str:
        """`open_instruct` or `trl`."""
        return self.plan.stage.options.backend

    def asked(self) -> str | None:
        """The checkpoint that the stage file names; open-instruct never gets to look at it."""
        named = self.plan.stage.args.get("resume_from_checkpoint")
        plain = isinstance(named, str) and named.lower() not in ("", "true", "false")
        return str(named) if plain and self.backend == "trl" else None

    def found(self) -> list[Checkpoint]:
        """All of them, in the order of training, with what the ranks of their own attempt left out."""
        whole = []
        for one in checkpoints.find(self.backend, self.output):
            ranks = earlier.processes(self.attempts.maker(one))
            if one.complete and ranks is not None and (one.ranks or 0) < ranks:
                why = f"{ranks} processes were training, {one.ranks or 0} left their random states"
                one = replace(one, why_incomplete=why)
            whole.append(one)
        return sorted(whole, key=lambda one: (self.attempts.steps(one), one.kind))

    def chosen(
        self, whole: Sequence[Checkpoint]
    ) -> tuple[Checkpoint, Wrong | None, tuple[Checkpoint, Wrong] | None]:
        """The newest that can be resumed exactly; where none can, the newest, and what is wrong there.

        The last part is the newest one where an older one was taken instead.
        """
        newest = whole[-1]
        first = self._wrong(newest)
        allowed = (
            {"position", changes.SKIPPING} if first and first.reason == "again" else {"position"}
        )
        if first is None or allowed & self.allowed:
            return newest, first, None
        for one in reversed(whole[:-1]):
            if self._wrong(one) is None:
                return one, None, (newest, first)
        return newest, first, None

    def _wrong(self, one: Checkpoint) -> Wrong | None:
        """Why upstream would not go on where this checkpoint was saved."""
        told = self.attempts.maker(one)
        if self.backend == "trl":
            return self._wrong_of_trl(one, told)
        was, now = self.attempts.shape(told), self.attempts.shape()
        if was is None or now is None:
            return None
        if one.kind == "epoch":
            return position.of_epoch(one.number, was, now)
        return position.of_step(
            self.plan.stage.options.stage, one.number, self.attempts.saved_at(one, told, was), was, now,
            keeps_order=checkpointing.keeps_order(self.trainer),
        )  # fmt: skip

    def _wrong_of_trl(self, one: Checkpoint, told: Manifest) -> Wrong | None:
        before = earlier.number(earlier.mapping(told.get("plan")).get("global"))
        ignored, ignores = self.skipping(told)
        # what it ignored from the start is what was asked for, and said (see `Remarks.begins_again`)
        wrong = position.of_trl(
            one.number, one.epochs, before, self.plan.global_batch, self.attempts.total(),
            skips=ignored or not ignores,
        )  # fmt: skip
        if wrong is None and ignored and not ignores and begun(told):
            return Wrong(
                "again",
                "the attempt that saved it had begun an epoch again, and rows that it never reached would be "
                "skipped",
            )
        return wrong

    def skipping(self, told: Manifest) -> tuple[bool, bool]:
        """Whether an attempt ignored the place in the data, and whether this one does."""
        name = changes.SKIPPING
        return bool(earlier.value_of(told, name)), bool(self.plan.values.get(name))

    def taken(self, one: Checkpoint) -> Place:
        """Where upstream goes on in the data."""
        if one.kind == "epoch":
            return Place(one.number + 1, 0)
        shape = self.attempts.shape() if self.backend == "open_instruct" else None
        return Place(0, 0) if shape is None else position.counted(shape, one.number)

    def told(self, chosen: Checkpoint) -> dict[str, Derived]:
        """What upstream has to be told to go on from there."""
        if self.backend != "trl":
            return {}
        # told nothing it begins anew, told `true` it takes the highest number, whole or not
        why = "the same command goes on from the last complete checkpoint"
        return {"resume_from_checkpoint": Derived(value=str(chosen.path), why=why)}

    def in_the_way(self, found: Sequence[Checkpoint], chosen: Checkpoint | None) -> list[Path]:
        """What upstream must not see: all that is newer, and steps where an epoch is resumed.

        A half-written one that this attempt writes next stays: it is written over.
        """
        at = -1 if chosen is None else self.attempts.steps(chosen)
        newer = [
            one
            for one in found
            if one is not chosen
            and (
                self.attempts.steps(one) > at
                or (chosen is not None and chosen.kind == "epoch" and one.kind == "step")
            )
        ]
        following = self._next_saved(chosen)
        return [one.path for one in newer if one.marked or one.name != following]

    def _next_saved(self, chosen: Checkpoint | None) -> str | None:
        """What this attempt will save first."""
        every = checkpointing.interval(self.plan)
        at = 0 if chosen is None else self.attempts.steps(chosen)
        if isinstance(every, int):
            stem = "checkpoint-" if self.backend == "trl" else "step_"
            return f"{stem}{(at // every + 1) * every}"
        if every == "epoch" and self.backend == "open_instruct":
            return f"epoch_{chosen.number + 1 if chosen and chosen.kind == 'epoch' else 0}"
        return None


def begun(told: Manifest) -> int:
    """The step that an attempt went on from."""
    return earlier.number(earlier.mapping(told.get("resume")).get("step")) or 0
