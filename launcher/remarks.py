"""What there is to say of a start into a folder where a run has been, as findings: `Remarks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import changes, checkpointing, checkpoints, position
from launcher.caches import Cache
from launcher.changes import Change
from launcher.checkpoints import Checkpoint
from launcher.errors import Finding, Severity
from launcher.paths import exists
from launcher.position import Wrong
from launcher.selection import Selection, begun


def aside_folder(output: Path) -> Path:
    """Where checkpoints go that must not be seen: not inside, where upstream would upload them."""
    return output.with_name(f"{output.name}.set-aside")


@dataclass(frozen=True, slots=True)
class Remarks:
    """About what was selected (`of`); `caches` are the cache folders of this start."""

    of: Selection
    caches: tuple[Cache, ...]

    def changed(self, changed: Sequence[Change], chosen: Checkpoint) -> Iterator[Finding]:
        """One finding a change: an error where it is one and was not allowed."""
        for one in changed:
            allowed = one.what in self.of.allowed
            allowed = allowed or (one.what in changes.PLACE and "position" in self.of.allowed)
            severity: Severity = "warning" if allowed and one.severity == "error" else one.severity
            yield self.finding(
                severity, "resume-inexact" if one.what == "position" else "resume-changed",
                f"going on from {chosen.name}: {one.text}",
                f"bring it back, start over with --fresh, or --allow-changed-resume {one.what}"
                if severity == "error"
                else None,
                key=one.key,
            )  # fmt: skip

    def reference_gone(self, changed: Sequence[Change]) -> Iterator[Finding]:
        """The reference log-probabilities that the attempts before used must still be there."""
        cache = next((one for one in self.caches if one.kind == "reference"), None)
        other = any(one.what == "reference" for one in changed)
        if cache is None or other or self.of.backend != "open_instruct":
            return
        used = self.of.attempts.reference()
        if exists(used) if used is not None else any(cache.path.glob("*.pt")):
            return
        yield self.finding(
            "warning" if "reference" in self.of.allowed else "error", "reference-gone",
            f"{used or cache.path} is gone: the checkpoint is loaded before the reference is computed "
            "(dpo_tune_cache.py:503, dpo_tune_cache.py:528), and the half-trained model would be its own "
            "reference", "bring it back, or start over with --fresh", key="model_name_or_path",
        )  # fmt: skip

    def goes_on(self, chosen: Checkpoint) -> Finding:
        """From where, and how much is left."""
        total, at = self.of.attempts.total(), self.of.attempts.steps(chosen)
        left = "" if total is None else f", {max(0, total - at)} of {total} steps are left"
        message = f"goes on from {chosen.path}{left}"
        return self.finding("note", "resumes", message, "--fresh starts over, beside it")

    def begins_again(self, chosen: Checkpoint) -> Iterator[Finding]:
        """What was asked for from the start is no change, and still another place."""
        told = self.of.attempts.maker(chosen)
        if self.of.backend != "trl" or self.of.skipping(told) != (True, True):
            return
        now = self.of.plan.global_batch
        wrong = position.of_trl(
            chosen.number, chosen.epochs, now, now, self.of.attempts.total(), skips=False
        )
        if wrong is not None and wrong.reason == "again":
            yield self.finding(
                "warning", "resume-inexact", f"going on from {chosen.name}: {wrong.text}",
                None if begun(told) else "delete the line to go on where it was saved",
                key=changes.SKIPPING,
            )  # fmt: skip

    def went_back(
        self, chosen: Checkpoint, passed: tuple[Checkpoint, Wrong] | None
    ) -> Iterator[Finding]:
        """An older checkpoint was taken instead of the newest."""
        if passed is None:
            return
        newest, wrong = passed
        again = self.of.attempts.steps(newest) - self.of.attempts.steps(chosen)
        yield self.finding(
            "warning", "resume-earlier",
            f"goes back to {chosen.name}, {again} steps are trained again; from {newest.name} upstream would "
            f"go on wrongly: {wrong.text}",
            f"--allow-changed-resume position goes on from {newest.name} all the same",
        )  # fmt: skip

    def damaged(self, one: Checkpoint) -> Finding:
        """A checkpoint whose bytes are not those that were saved."""
        return self.finding(
            "warning", "damaged-checkpoint", f"{one.name} is not used: {one.why_incomplete}",
            "look at the disk; an older checkpoint is taken where one is whole",
        )  # fmt: skip

    def moved(self, aside: Sequence[Path]) -> Iterator[Finding]:
        """What is set aside."""
        if aside and self.of.output is not None:
            yield self.finding(
                "note", "set-aside",
                f"{', '.join(path.name for path in aside[:4])} would be resumed from or marked wrongly by "
                f"upstream, and moves to {aside_folder(self.of.output)}",
                "delete it there if nobody needs it",
            )  # fmt: skip

    def strange(self) -> Iterator[Finding]:
        """What upstream would take for a checkpoint, and is none."""
        names = checkpoints.strange_names(self.of.backend, self.of.output)
        if names:
            yield self.finding(
                "error", "checkpoint-name",
                f"{self.of.output} holds {', '.join(names[:3])}, which upstream takes for a checkpoint "
                "(utils.py:791)", "move or rename it",
            )  # fmt: skip

    def no_record(self, found: Sequence[Checkpoint]) -> Iterator[Finding]:
        """Checkpoints of which no record tells, and which upstream would not go on from."""
        whole = [one for one in found if one.complete]
        if whole and not self.of.plan.stage.entry.torchrun:
            key = "resume_from_checkpoint" if self.of.backend == "trl" else None
            yield self.finding(
                "error", "not-resumed",
                f"{self.of.output} holds {whole[-1].name}, and no record of the run that saved it: training "
                "would begin at step 0, and rotation would delete what is there",
                f"`{key}: {whole[-1].path}` goes on from it; --fresh begins anew, beside it" if key
                else "--fresh begins anew, beside it",
            )  # fmt: skip

    def beforehand(self) -> Iterator[Finding]:
        """Which checkpoints will be exact to go on from."""
        return checkpointing.findings(self.of.plan, self.of.attempts.shape(), self.of.trainer)

    def finding(
        self, severity: Severity, code: str, message: str, help: str | None, key: str | None = None
    ) -> Finding:
        """One of them, at the argument that it is about: by default the output folder's."""
        return Finding(
            severity=severity, layer="run" if severity == "error" else "launch", code=code,
            key=f"args.{key or self.of.plan.stage.entry.names.output}", message=message, help=help,
        )  # fmt: skip
