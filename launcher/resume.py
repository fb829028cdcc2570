"""The same command said again -> `Decision`: a new run, a further attempt from a checkpoint, or finished.

Upstream decides by what lies in the output folder alone: open-instruct goes on from the newest checkpoint
there (utils.py:807), whoever made it and whatever has changed since; TRL begins anew unless it is told
(trl/scripts/sft.py:113). Here the run's own record is asked too. What has changed is said, and what would
go on at the wrong place, or with other weights, is an error until it is allowed by name. Where the newest
checkpoint cannot be resumed exactly and an older one can, that one is taken.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher import changes, checkpoints, checksums, earlier, lease, rundir
from launcher.arguments import placed
from launcher.caches import Cache
from launcher.changes import Change
from launcher.checkpoints import Checkpoint
from launcher.contents import Contents
from launcher.earlier import Attempts, Manifest
from launcher.errors import Finding, errors, not_ready, usage
from launcher.machine import Trainer
from launcher.paths import canonical, exists
from launcher.plan import Derived, Plan, model_in
from launcher.position import Place, Wrong
from launcher.redaction import redact
from launcher.remarks import Remarks, aside_folder
from launcher.rundir import RunFolder
from launcher.schema import Values
from launcher.selection import Selection
from launcher.stage import Stage

Kind = Literal["new", "resume", "finished"]

SUPERSEDED: frozenset[str] = frozenset(
    {
        "foreign-checkpoints",
        "resume-position",
        "resume-world",
        "resume-skips",
        "stale-checkpoints",
        "finished-output",
        "not-resumed",
        "reference-gone",
    }
)
"""Codes of rules that know the folder alone: of a run of ours, its `Decision` says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What saying a command again comes to.

    `step` is the optimizer step that training goes on from, 0 for a new run, and `place` where upstream
    then is in the data; `asked` is the checkpoint that the stage file names, under TRL. `kept` are the
    checkpoints that stay where they are, `aside` those that `set_aside` has to move before the start,
    `derived` what upstream has to be told. `findings` hold errors where the decision must not be carried
    out.
    """

    kind: Kind = "new"
    checkpoint: Checkpoint | None = None
    step: int = 0
    place: Place = field(default_factory=lambda: Place(0, 0))
    changes: tuple[Change, ...] = ()
    allowed: tuple[str, ...] = ()
    asked: str | None = None
    kept: tuple[str, ...] = ()
    aside: tuple[Path, ...] = ()
    derived: Mapping[str, Derived] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the manifest (`resume`); the next attempt reads it."""
        return {
            "kind": self.kind,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "step": self.step,
            "place": [self.place.epoch, self.place.micro],
            "asked": self.asked,
            "kept": list(self.kept),
            "aside": [path.name for path in self.aside],
            "changes": [one.as_json() for one in self.changes],
            "allowed": list(self.allowed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where the model of this start goes; `derived` holds the `output_dir` if it is not the file's own."""

    output: Path | None
    derived: Mapping[str, Derived] = field(default_factory=dict)


# --- where -----------------------------------------------------------------------------------------


def place(stage: Stage, asked: Path | None, runs: Iterable[RunFolder], *, fresh: bool) -> Placed:
    """The output folder of this start: the file's, or the one beside it that `--fresh` began last.

    `asked` is the folder that the stage file names, `runs` the runs here, newest first. A run that was
    started over is the one that the same command continues from then on. With `fresh` it is a folder that
    nobody has used: upstream resumes from whatever lies in its folder, so nothing else starts over.
    """
    if asked is None:
        return Placed(output=None)
    told: list[tuple[RunFolder | None, Manifest]] = [*rundir.outlines(runs)]
    name = stage.entry.names.output
    if fresh:
        used = {str(one.get("output")) for _, one in told}
        if not exists(asked) and _text(asked) not in used:
            return Placed(output=asked)
        value, folder = next(
            (value, folder)
            for value, folder in _beside(stage)
            if not exists(folder) and _text(folder) not in used
        )
        why = f"--fresh: {asked} is left as it is"
        return Placed(output=folder, derived={name: Derived(value=value, why=why)})
    # of runs whose folders are gone, their output folders tell
    beside = itertools.takewhile(lambda one: exists(one[1]), _beside(stage))
    for folder in reversed([asked, *(folder for _, folder in beside)]):
        told += [(None, one) for one in lease.manifests(folder)[-1:]]
    ours = ((f, one) for f, one in told if one.get("stage") == stage.options.stage)
    begun, newest = next((pair for pair in ours if _asked(pair[1]) == _text(asked)), (None, {}))
    if begun is not None:
        newest = rundir.read_manifest(begun)
    output, value = newest.get("output"), earlier.value_of(newest, name)
    if output == _text(asked) or not isinstance(output, str) or not isinstance(value, str):
        return Placed(output=asked)
    why = "the run that was started over with --fresh goes on there"
    return Placed(output=Path(output), derived={name: Derived(value=value, why=why)})


def _asked(manifest: Manifest) -> Any:
    return manifest.get("asked_output") or manifest.get("output")


def _text(path: Path) -> str:
    # as a manifest holds it
    return redact(str(path))


def _beside(stage: Stage) -> Iterator[tuple[str, Path]]:
    """Values of `output_dir` next to the file's own, and the folders that they come to."""
    name, number = stage.entry.names.output, 1
    begin = str(stage.values[name]).rstrip("/")
    while True:
        number += 1
        values = Values(stage.schema, {**stage.args, name: f"{begin}-{number}"})
        folder = stage.backend.output_folder(values)
        assert folder is not None
        yield f"{begin}-{number}", folder.absolute()


def set_aside(decision: Decision, attempt: int) -> list[Path]:
    """Move beside the output folder what upstream would resume from, or mark as complete, wrongly.

    Only for who holds the run's lock. Returns the new places. Raises NotReady where it cannot be moved.
    """
    moved = []
    for path in decision.aside:
        target = aside_folder(path.parent) / f"{path.name}.attempt-{attempt}"
        try:
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise not_ready(
                "not-set-aside",
                f"{path} is in the way of a resume and cannot be moved: {error.strerror}",
                f"move it to {target}", file=str(path),
            ) from None  # fmt: skip
        moved.append(target)
    return moved


# --- without the decision ---------------------------------------------------------------------------


def would(decision: Decision | None) -> str | None:
    """What `launch sft` and `launch dpo` do with a decision; None where they begin anew, as a bare command.

    The decision is None while that run is still going on.
    """
    found = decision.findings if decision is not None else ()
    refused = next((one for one in found if one.severity == "error"), None)
    if decision is None:
        return "refuse it, as that run is still going on"
    if refused is not None:
        return f"refuse it ({refused.code}: {refused.message})"
    if decision.kind == "finished":
        return "train nothing, it is finished"
    return None if decision.checkpoint is None else f"go on from {decision.checkpoint.name}"


def of_a_bare_command(
    would: str, plan: Plan, output: Path | None, folder: RunFolder
) -> tuple[Finding, ...]:
    """What to know of a command that is pasted where a run has been: it carries no decision out.

    `would` is what launch itself does there.
    """
    name = plan.stage.entry.names.output
    said = Finding(
        severity="warning", layer="launch", code="earlier-run", key=f"args.{name}",
        message=f"{output} is that of {folder.path.name}: launch itself would {would}; this line "
        f"{_of_upstream(plan, output)}",
        help="say it without --dry-run, or with --fresh for a line that takes a folder beside it",
    )  # fmt: skip
    return (placed(plan.stage.config, said),)


def _of_upstream(plan: Plan, output: Path | None) -> str:
    """What upstream does in a folder that has been trained into, told nothing by us."""
    if plan.stage.options.backend == "trl":
        # trl/scripts/sft.py:113
        named = plan.values.get("resume_from_checkpoint")
        return f"goes on from {named}" if named else "begins anew and writes over what it left"
    taken = _taken_by_upstream(plan.stage.options.backend, output)
    if taken is not None:
        return f"goes on from {taken.name}, whatever has changed since"
    return "trains into the same folder"


def _taken_by_upstream(backend: str, output: Path | None) -> Path | None:
    try:
        return checkpoints.taken_by_upstream(backend, output)
    except ValueError:
        return None


# --- the decision ----------------------------------------------------------------------------------


def judge(
    plan: Plan,
    *,
    output: Path | None,
    history: Sequence[Manifest],
    folder: RunFolder | None,
    trainer: Trainer,
    caches: Sequence[Cache] = (),
    now: Contents = (),
    allowed: Collection[str] = (),
) -> Decision:
    """What this start is, given what its output folder and its run folder hold.

    `history` are the manifests of the attempts so far, `folder` is the run folder, None where it is gone or
    there is none. `caches` are the cache folders of this start, `now` its contents. Raises UsageError for a
    name in `allowed` that nothing is called.
    """
    wrong = [n for n in allowed if n not in changes.NAMES and n not in plan.stage.schema.fields]
    if wrong:
        raise usage(
            "unknown-change",
            f"--allow-changed-resume: nothing is called {', '.join(map(repr, wrong))}",
            f"one of {', '.join(changes.NAMES)}, or the name of an argument",
        )  # fmt: skip
    last = lease.newest(output)
    attempts = Attempts(plan, folder, history, None if last is None else last.code)
    selection = Selection(plan, output, attempts, trainer, frozenset(allowed))
    judged = _Judge(selection, Remarks(selection, tuple(caches)), tuple(caches), tuple(now))
    if plan.values.get("cache_dataset_only") is True:
        return Decision()
    decision = judged.again() if history else judged.first()
    found = tuple(placed(plan.stage.config, finding) for finding in decision.findings)
    return replace(decision, findings=found, allowed=tuple(allowed), asked=selection.asked())


@dataclass(frozen=True, slots=True)
class _Judge:
    """The ways out; `now` is what data and models of this start hold."""

    at: Selection
    say: Remarks
    caches: tuple[Cache, ...]
    now: tuple[Mapping[str, Any], ...]

    def first(self) -> Decision:
        """No run of ours has been here: what to know of checkpoints before there are any."""
        found = checkpoints.find(self.at.backend, self.at.output)
        kept = tuple(one.name for one in found)
        said = [*self.say.strange(), *self.say.beforehand()]
        if (named := self.at.asked()) is not None:
            decision = self._as_named(Path(named), found)
            return replace(decision, findings=(*said, *decision.findings))
        taken = (
            None if said and errors(said) else _taken_by_upstream(self.at.backend, self.at.output)
        )
        chosen = next((one for one in found if one.path == taken), None)
        if chosen is None:
            return Decision(kept=kept, findings=(*said, *self.say.no_record(found)))
        # open-instruct resumes by itself; that it is somebody else's is a rule of its own
        fault = chosen.why_incomplete or checksums.fault(None, chosen)
        if fault is not None:
            said.append(
                self.say.finding(
                    "error", "broken-checkpoint",
                    f"upstream would resume from {chosen.path}, and {fault}",
                    "move it out of the output folder",
                )
            )  # fmt: skip
        return Decision(
            kind="resume", checkpoint=chosen, step=self.at.attempts.steps(chosen),
            place=self.at.taken(chosen), kept=kept, findings=tuple(said),
        )  # fmt: skip

    def again(self) -> Decision:
        """The run has been here: finished, to be continued, or with nothing to continue from."""
        found = self.at.found()
        model = None if self.at.output is None else model_in(self.at.plan, self.at.output)
        if self.at.attempts.finished(model):
            return self._over(found)
        named = self.at.asked()
        if named is not None and named != earlier.mapping(self.at.attempts.last.get("resume")).get(
            "asked"
        ):
            return self._as_named(Path(named), found)
        damaged = []
        while whole := [one for one in found if one.complete]:
            chosen, wrong, passed = self.at.chosen(whole)
            fault = checksums.fault(self.at.attempts.folder, chosen)
            if fault is None:
                break
            broken = replace(chosen, why_incomplete=fault)
            damaged.append(self.say.damaged(broken))
            found = [broken if one is chosen else one for one in found]
        else:
            begins = self._from_zero(found)
            return replace(begins, findings=(*damaged, *begins.findings))
        told = self.at.attempts.maker(chosen)
        changed = self._changed(list(self._since(told)), chosen, wrong)
        aside = self.at.in_the_way(found, chosen)
        said = [
            *damaged, self.say.goes_on(chosen), *self.say.strange(), *self.say.changed(changed, chosen),
            *self.say.begins_again(chosen), *self.say.went_back(chosen, passed),
            *self.say.reference_gone(changed), *self.say.moved(aside),
        ]  # fmt: skip
        return Decision(
            kind="resume", checkpoint=chosen, step=self.at.attempts.steps(chosen),
            place=self.at.taken(chosen), changes=tuple(changed),
            kept=tuple(one.name for one in found if one.path not in aside), aside=tuple(aside),
            derived={**self.at.told(chosen), **_restored(changed, chosen)}, findings=tuple(said),
        )  # fmt: skip

    def _as_named(self, named: Path, found: Sequence[Checkpoint]) -> Decision:
        """The stage file names a checkpoint for the first time: that one, whatever else is there."""
        same = [one for one in found if canonical(one.path) == canonical(named)]
        # what a run did not go on from, it must not rotate away
        aside = self.at.in_the_way(found, same[0] if same else None)
        fault = checksums.fault(self.at.attempts.folder, same[0]) if same else None
        said = [] if fault is None else [
            self.say.finding(
                "error", "broken-checkpoint", f"{named}: {fault}", "name an older one",
                key="resume_from_checkpoint",
            )
        ]  # fmt: skip
        return Decision(
            kind="resume", checkpoint=same[0] if same else None, step=same[0].number if same else 0,
            kept=tuple(one.name for one in found if one.path not in aside), aside=tuple(aside),
            findings=(*said, *self.say.moved(aside)),
        )  # fmt: skip

    def _over(self, found: Sequence[Checkpoint]) -> Decision:
        """The run is finished; unless something that matters has changed, that is the answer."""
        kept = tuple(one.name for one in found)
        changed = [one for one in self._since(self.at.attempts.last) if one.severity != "note"]
        # what training would be done with now is no reason to do it again
        changed = [one for one in changed if one.what not in ("packages", "gpus", "reference")]
        # nor what the last attempt was asked for already, and told that the checkpoint's value is used
        said_before = earlier.listed(
            earlier.mapping(self.at.attempts.last.get("resume")).get("changes")
        )
        changed = [one for one in changed if not (one.restored and _repeats(one, said_before))]
        said = self.say.finding(
            "note", "already-finished", f"this run is finished: {self.at.output}",
            "--fresh trains again, beside it",
        )  # fmt: skip
        if self.at.attempts.folder is None:
            said = replace(
                said, severity="error",
                message=f"{self.at.output} holds the model of a run that finished; its run folder is gone",
            )  # fmt: skip
        if changed and not all(one.what in self.at.allowed for one in changed):
            told = "; ".join(one.differs for one in changed[:6])
            said = self.say.finding(
                "error", "finished-changed",
                f"{self.at.output} holds the finished model of this run, and since then {told}",
                "--fresh trains with what is asked for now, beside it", key=changed[0].key,
            )  # fmt: skip
        return Decision(
            kind="finished", kept=kept, changes=tuple(changed), step=self.at.attempts.total() or 0,
            findings=(said,),
        )  # fmt: skip

    def _from_zero(self, found: Sequence[Checkpoint]) -> Decision:
        aside = self.at.in_the_way(found, None)
        if (
            self.at.plan.stage.entry.torchrun
            and self.at.output
            and any(self.at.output.glob("step[1-9]*"))
        ):
            # OLMo-core goes on from there, which a rule says (`resume-unjudged`)
            return Decision(findings=(*self.say.strange(), *self.say.beforehand()))
        why = f": {found[-1].name}: {found[-1].why_incomplete}" if found else ""
        note = self.say.finding(
            "note", "nothing-to-resume",
            f"the attempt before left no complete checkpoint in {self.at.output}{why}; it begins anew", None,
        )  # fmt: skip
        return Decision(
            kept=tuple(one.name for one in found if one.path not in aside), aside=tuple(aside),
            findings=(*self.say.strange(), note, *self.say.moved(aside), *self.say.beforehand()),
        )  # fmt: skip

    def _since(self, told: Manifest) -> Iterator[Change]:
        return changes.since(told, self.at.attempts, self.at.trainer, self.caches, self.now)

    def _changed(
        self, found: list[Change], chosen: Checkpoint, wrong: Wrong | None
    ) -> list[Change]:
        """The changes, with the place that they come to; a wrong place without any is one of its own."""
        if wrong is None:
            return found
        if wrong.reason == "again":
            ignored, ignores = self.at.skipping(self.at.attempts.maker(chosen))
            more = Change(
                what=changes.SKIPPING, key=changes.SKIPPING, before=ignored, after=ignores,
                effect=wrong.text, severity="error",
            )  # fmt: skip
            return [*found, more]
        batch = [one for one in found if one.what in changes.BATCH]
        if not batch or wrong.reason not in ("place", "count"):
            more = Change(
                what="position", before=chosen.name, after=None, effect=wrong.text, severity="error"
            )
            return [*found, more]
        return [
            replace(one, effect=wrong.text, severity="error") if one in batch else one
            for one in found
        ]


def _restored(changed: Iterable[Change], chosen: Checkpoint) -> dict[str, Derived]:
    """The values that upstream takes out of the checkpoint: the record is to say what trains."""
    return {
        one.what: Derived(value=one.before, why=f"it comes out of {chosen.name}, not {one.after}")
        for one in changed
        if one.restored
    }


def _repeats(change: Change, before: Iterable[Any]) -> bool:
    was = map(earlier.mapping, before)
    return any(one.get("what") == change.what and one.get("after") == change.after for one in was)
