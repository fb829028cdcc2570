"""The same command again -> `Decision`: a new run, a further attempt from a checkpoint, or finished.

Upstream decides by what lies in the output folder alone: open-instruct continues from the newest checkpoint
there (utils.py::get_last_checkpoint_path), whoever made it and even if something changed; TRL starts over without
`resume_from_checkpoint` (trl/scripts/sft.py::main[trainer.train(resume_from_checkpoint]). Here the run's own record
counts too. What has changed is reported, and what would go on at the wrong place, or with other weights, is an error
until it is allowed by name. Where the newest checkpoint cannot be resumed exactly and an older one can, that one is
taken.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from launcher import files
from launcher.artifacts import checkpoints
from launcher.artifacts.checkpoints import Checkpoint
from launcher.cache.inputs import Contents
from launcher.cache.keys import Cache
from launcher.errors import Finding, Severity, errors, launch_finding, not_ready, usage
from launcher.machine import codec
from launcher.machine.codec import Between, Count, Positive
from launcher.machine.python import Trainer
from launcher.paths import canonical, exists
from launcher.plan.derive import Derived
from launcher.plan.plan import Plan, model_in
from launcher.planning import checksums
from launcher.planning.resume import changes, epochs
from launcher.planning.resume.changes import ResumeChange
from launcher.planning.resume.epochs import DataPosition, EpochLayout, ResumeMismatch
from launcher.runs import lease, rundir, runner
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.stage.stage import Stage
from launcher.upstream.citations import rendered
from launcher.upstream.logs import open_instruct
from launcher.upstream.schema import Values
from launcher.upstream.trainers import Entry
from launcher.verdict import evidence

Kind = Literal["new", "resume", "finished"]

_LOOKED_AT = 64 * 2**20  # bytes of a log: training begins long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What saying a command again comes to.

    `step` is the optimizer step that training continues from, 0 for a new run, and `place` where upstream
    then is in the data; `requested` is the checkpoint that the stage file names, under TRL. `kept` are the
    checkpoints that stay where they are, `aside` those that `set_aside` has to move before the start,
    `derived` the arguments that upstream needs for it. `findings` hold errors where the decision must not be
    carried out.
    """

    kind: Kind = "new"
    checkpoint: Checkpoint | None = None
    step: int = 0
    place: DataPosition = field(default_factory=lambda: DataPosition(0, 0))
    changes: tuple[ResumeChange, ...] = ()
    allowed: tuple[str, ...] = ()
    requested: str | None = None
    kept: tuple[str, ...] = ()
    aside: tuple[Path, ...] = ()
    derived: Mapping[str, Derived] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "step": self.step,
            "place": [self.place.epoch, self.place.micro],
            "asked": self.requested,
            "kept": list(self.kept),
            "aside": [path.name for path in self.aside],
            "changes": [one.as_json() for one in self.changes],
            "allowed": list(self.allowed),
        }


class OutputChoice(NamedTuple):
    """Where the model of this start goes; `derived` holds the `output_dir` if it is not the file's own."""

    output: Path | None
    derived: Mapping[str, Derived] = MappingProxyType({})


def choose_output(stage: Stage, configured: Path | None, runs: Iterable[RunFolder], *, fresh: bool) -> OutputChoice:
    """The output folder of this start: the file's, or the one beside it that `--fresh` began last.

    `configured` is the folder that the stage file names, `runs` the runs here, newest first. A run that was
    started over is the one that the same command continues from then on. With `fresh` it is a folder that
    nobody has used: upstream resumes from whatever lies in its folder, so nothing else starts over.
    """
    if configured is None:
        return OutputChoice(None)
    earlier = rundir.summarize(runs)
    name = stage.entry.names.output
    if fresh:
        used = {one.output for one in earlier}
        places = itertools.chain([(None, configured)], _beside(stage))
        value, folder = next(one for one in places if not exists(one[1]) and _text(one[1], stage) not in used)
        if value is None:
            return OutputChoice(configured)
        why = f"--fresh: {configured} is left as it is"
        return OutputChoice(folder, {name: Derived(value=value, why=why)})
    wanted = _text(configured, stage)
    # only manifests that name the folder are read: there may be ten thousand others
    folders = [RunFolder(one.path) for one in earlier if (one.requested_output or one.output) == wanted]
    known = list(map(rundir.read_manifest, folders))
    # of runs whose folders are gone, their output folders tell
    beside = itertools.takewhile(lambda one: exists(one[1]), _beside(stage))
    for folder in reversed([configured, *(folder for _, folder in beside)]):
        known += lease.manifests(folder)[-1:]
    for record in known:
        if record.stage != stage.options.stage:
            continue
        if (record.requested_output or str(record.output)) != _text(configured, stage):
            continue
        value = record.argument(name)
        if record.output in (None, Path(_text(configured, stage))) or not isinstance(value, str):
            break
        why = "the run that --fresh started continues there"
        return OutputChoice(record.output, {name: Derived(value=value, why=why)})
    return OutputChoice(configured)


def _text(path: Path, stage: Stage) -> str:
    # as a manifest holds it
    return stage.config.redactor.redact(str(path))


def _beside(stage: Stage) -> Iterator[tuple[str, Path]]:
    """Values of `output_dir` next to the file's own, and the folders that they come to."""
    name = stage.entry.names.output
    begin = str(stage.values[name]).rstrip("/")
    if begin.startswith("-"):
        # with a number behind it, `-` would be read as a flag
        begin = f"./{begin}"
    for number in itertools.count(2):
        folder = stage.backend.output_folder(Values(stage.schema, {**stage.args, name: f"{begin}-{number}"}))
        assert folder is not None
        yield f"{begin}-{number}", folder.absolute()


def aside_folder(output: Path) -> Path:
    """Where checkpoints go that upstream must not find: not inside, where upstream would upload them."""
    return output.with_name(f"{output.name}.set-aside")


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
            message = f"{path} is in the way of a resume and cannot be moved: {error.strerror}"
            raise not_ready("not-set-aside", message, f"move it to {target}", file=str(path)) from None
        moved.append(target)
    return moved


def _taken_by_upstream(plan: Plan, output: Path | None) -> Path | None:
    try:
        return checkpoints.taken_by_upstream(plan.stage.options.backend, output)
    except ValueError:
        return None


def manifests(stage: str, folder: RunFolder | None, output: Path | None) -> list[Manifest]:
    """The manifests of the attempts of a stage so far, the oldest first, without those that cannot be read.

    They are in the run folder, and in the output folder too: there those of all starts into it, whichever
    run folder these had, and whatever has become of that.
    """
    kept = [record for record in lease.manifests(output) if record.stage == stage]
    if folder is None:
        return kept
    last = rundir.read_manifest(folder)
    own = [*(rundir.read_kept_manifest(folder, n) for n in range(1, last.attempt or 1)), last]
    return max([record for record in own if record], kept, key=len)


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
        message = f"--allow-changed-resume: no argument or group is named {', '.join(map(repr, wrong))}"
        help = f"one of {', '.join(changes.NAMES)}, or the name of an argument"
        raise usage("unknown-change", message, help)
    if plan.values.get("cache_dataset_only") is True:
        return Decision()
    judge = _Judge(plan, output, history, folder, trainer, frozenset(allowed), caches, now)
    decision = judge.again() if history else judge.first()
    found = tuple(plan.stage.config.placed(finding) for finding in judge.findings)
    return replace(decision, findings=found, allowed=tuple(allowed), requested=judge.named)


@dataclass(slots=True)
class _Judge:
    """The checkpoints in an output folder, by the attempts that made them, the oldest first.

    A checkpoint is compared with the settings it was saved under, not with those of the last attempt: that
    one may have been started with others and saved nothing. `allowed` are the changes that the user allows by
    name, `now` is what data and models hold. What there is to say gathers in `findings`.
    """

    plan: Plan
    output: Path | None
    history: Sequence[Manifest]
    folder: RunFolder | None
    trainer: Trainer
    allowed: frozenset[str]
    caches: Sequence[Cache]
    now: Contents
    findings: list[Finding] = field(default_factory=list)

    @property
    def last(self) -> Manifest:
        return self.history[-1] if self.history else Manifest()

    def maker(self, checkpoint: Checkpoint) -> Manifest:
        """The manifest of the attempt that saved it: the last that did not find it there."""
        makers = (record for record in reversed(self.history) if checkpoint.name not in record.kept)
        return next(makers, self.history[0] if self.history else Manifest())

    def shape(self, record: Manifest | None = None) -> EpochLayout | None:
        """How epochs are cut into steps, now or under an earlier manifest; None where rows are unknown.

        The log of an earlier attempt says how many rows were left after filtering.
        """
        logged = self._in_logs(open_instruct.TRAINING_ROWS)
        plan = self.plan
        names = self.plan.stage.entry.names
        rows = plan.rows if logged is None else int(logged.replace(b",", b""))
        if rows is None:
            return None
        value: Callable[[str], Any] = plan.values.get
        per_device = plan.per_device
        accumulation = plan.accumulation
        count = plan.processes
        if record is not None:
            value = record.argument
            count = record.processes or 1
            per_device = record.per_device or per_device
            accumulation = record.accumulation or accumulation
        shared = value(names.shared)
        limit = value(names.max_steps)
        epochs = value(names.epochs)
        return EpochLayout(
            rows=rows,
            per_device=per_device,
            devices=max(1, count // codec.fit(shared, Positive, 1)),
            accumulation=accumulation,
            epochs=codec.fit(epochs, Annotated[float, Between(0, 10**9)], 1),
            limit=codec.fit(limit, Positive),
        )

    def _in_logs(self, pattern: re.Pattern[bytes]) -> bytes | None:
        if self.folder is None:
            return None
        for attempt in range(self.folder.attempts(), 0, -1):
            with contextlib.suppress(OSError), files.open_regular(self.folder.console(attempt)) as file:
                if found := pattern.findall(file.read(_LOOKED_AT)):
                    return bytes(found[-1])
        return None

    def steps(self, checkpoint: Checkpoint) -> int:
        if checkpoint.step is not None:
            return checkpoint.step
        shape = self.shape(self.maker(checkpoint) or None)
        return (checkpoint.number + 1) * (shape.updates if shape is not None else 1)

    def total(self, record: Manifest | None = None) -> int | None:
        if not self.plan.stage.entry.by_trainer:
            shape = self.shape(record)
            return None if shape is None else shape.total
        return self.plan.steps if record is None else record.steps

    def finished(self) -> bool:
        """Whether the last attempt ended well and its model lies in the output folder."""
        fault = checkpoints.model_fault(self.output and model_in(self.plan, self.output))
        if self.last.argument("cache_dataset_only") is True or fault is not None:
            return False
        if self.folder is None:
            # as far as the output folder tells
            last = lease.newest(self.output)
            return last is not None and last.code == 0
        ended = runner.recorded(self.folder, max(1, self.folder.attempts()))
        if ended is not None:
            return ended.returncode == 0
        # whoever had to write that record did not live to: the probe's last word
        with contextlib.suppress(OSError):
            probe = evidence.read_run(self.folder.path).probe
            records = probe.ranks.values() if probe is not None else ()
            ends = [event.number("exit") for one in records if (event := one.last("end"))]
            return bool(ends) and all(code == 0 for code in ends)
        return False

    @property
    def entry(self) -> Entry:
        return self.plan.stage.entry

    @property
    def named(self) -> str | None:
        """The checkpoint that the stage file names; open-instruct never gets to look at it."""
        named = self.plan.stage.args.get(self.entry.names.resume or "")
        return named if isinstance(named, str) and named.lower() not in ("", "true", "false") else None

    def _say(self, severity: Severity, code: str, message: str, help: str | None, key: str | None = None) -> None:
        key = f"args.{key or self.entry.names.output}"
        finding = launch_finding(severity, code, message, help, key=key)
        self.findings.append(replace(finding, layer="run") if severity == "error" else finding)

    def first(self) -> Decision:
        """No run of ours has been here: what to know of checkpoints before there are any."""
        found = checkpoints.find(self.plan.stage.options.backend, self.output)
        self._check_names()
        self._check_schedule()
        if self.named is not None:
            return self._as_named(Path(self.named), found)
        taken = None if errors(self.findings) else _taken_by_upstream(self.plan, self.output)
        chosen = next((one for one in found if one.path == taken), None)
        if chosen is None:
            whole = [one for one in found if one.complete]
            if whole and not self.entry.unjudged:
                help = "--fresh starts over in a new folder"
                key = self.entry.names.resume
                if key is not None:
                    help = f"`{key}: {whole[-1].path}` continues from it; {help}"
                message = f"{self.output} holds {whole[-1].name}, and no record of the run that saved it: "
                message += "training would begin at step 0, and rotation would delete what is there"
                self._say("error", "not-resumed", message, help, key)
            return Decision(kept=_names(found))
        # open-instruct resumes by itself; that it is somebody else's is a rule of its own
        fault = chosen.why_incomplete or checksums.fault(None, chosen)
        if fault is not None:
            message = f"upstream would resume from {chosen.path}, and {fault}"
            self._say("error", "broken-checkpoint", message, "move it out of the output folder")
        self._check_reference(())
        step = self.steps(chosen)
        place = self._place(chosen)
        return Decision(kind="resume", checkpoint=chosen, step=step, place=place, kept=_names(found))

    def again(self) -> Decision:
        """The run has been here: finished, to be continued, or with nothing to continue from."""
        found = self._found()
        if self.finished():
            return self._over(found)
        before = self.last.resume.requested
        if self.named is not None and self.named != before:
            return self._as_named(Path(self.named), found)
        while whole := [one for one in found if one.complete]:
            chosen, wrong = self._chosen(whole)
            fault = checksums.fault(self.folder, chosen)
            if fault is None:
                return self._go_on(found, chosen, whole[-1], wrong)
            help = "look at the disk; an older checkpoint is taken where one is whole"
            self._say("warning", "damaged-checkpoint", f"{chosen.name} is not used: {fault}", help)
            found = [replace(one, why_incomplete=fault) if one is chosen else one for one in found]
        self._check_names()
        self._check_schedule()
        if self.entry.unjudged and self.output is not None and any(self.output.glob(self.entry.unjudged)):
            # OLMo-core continues from there, which a rule says (`resume-unjudged`)
            return Decision()
        why = f": {found[-1].name}: {found[-1].why_incomplete}" if found else ""
        message = f"the attempt before left no complete checkpoint in {self.output}{why}; it starts over"
        self._say("note", "nothing-to-resume", message, None)
        aside = self._aside(found, None)
        return Decision(kept=_names(found, aside), aside=aside)

    def _go_on(
        self, found: Sequence[Checkpoint], chosen: Checkpoint, newest: Checkpoint, wrong: ResumeMismatch | None
    ) -> Decision:
        """From a checkpoint of this run; `wrong` is about the newest one, in whose place an older may be taken."""
        total = self.total()
        at = self.steps(chosen)
        left = "" if total is None else f", {max(0, total - at)} of {total} steps are left"
        message = f"continues from {chosen.path}{left}"
        if not checksums.recorded(self.folder, chosen):
            message += "; not verified: no checksums of it were recorded, and a changed byte of its weights "
            message += "(`.safetensors`) would show nowhere"
        self._say("note", "resumes", message, "--fresh starts over in a new folder")
        changed = self._changed(chosen, wrong if chosen is newest else None)
        self._check_names()
        for one in changed:
            names = {one.what, "position"} if one.what in changes.BATCH else {one.what}
            severity = one.severity
            help = None
            if severity == "error" and names & self.allowed:
                severity = "warning"
            elif severity == "error":
                help = f"bring it back, start over with --fresh, or --allow-changed-resume {one.what}"
            code = "resume-inexact" if one.what == "position" else "resume-changed"
            self._say(severity, code, f"continuing from {chosen.name}: {one.text}", help, one.key)
        if chosen is not newest and wrong is not None:
            message = f"goes back to {chosen.name}, {self.steps(newest) - at} steps are trained again; "
            message += f"from {newest.name} upstream would continue wrongly: {wrong.text}"
            help = f"--allow-changed-resume position continues from {newest.name} all the same"
            self._say("warning", "resume-earlier", message, help)
        self._check_reference(changed)
        aside = self._aside(found, chosen)
        derived = {
            one.what: Derived(value=one.before, why=f"it comes out of {chosen.name}, not {one.after}")
            for one in changed
            if one.restored
        }
        if self.entry.names.resume is not None:
            # without it TRL begins anew, and `true` takes the highest number, whole or not
            why = "the same command continues from the last complete checkpoint"
            derived[self.entry.names.resume] = Derived(value=str(chosen.path), why=why)
        return Decision(
            kind="resume",
            checkpoint=chosen,
            step=at,
            place=self._place(chosen),
            changes=tuple(changed),
            kept=_names(found, aside),
            aside=aside,
            derived=derived,
        )

    def _as_named(self, named: Path, found: Sequence[Checkpoint]) -> Decision:
        """The stage file names a checkpoint for the first time: that one, whatever else is there."""
        same = next((one for one in found if canonical(one.path) == canonical(named)), None)
        if same is not None and (fault := checksums.fault(self.folder, same)) is not None:
            message = f"{named}: {fault}"
            help = "name an older one"
            self._say("error", "broken-checkpoint", message, help, "resume_from_checkpoint")
        # what a run did not continue from, it must not rotate away
        aside = self._aside(found, same)
        step = same.number if same else 0
        return Decision(kind="resume", checkpoint=same, step=step, kept=_names(found, aside), aside=aside)

    def _over(self, found: Sequence[Checkpoint]) -> Decision:
        """The run is finished; unless something that matters has changed, that is the answer."""
        last = self.last
        repeated = [(one.get("what"), one.get("after")) for one in last.resume.changes]
        changed = [
            one
            for one in self._since(last)
            # what training would be done with now is no reason to do it again
            if one.severity != "note"
            and one.what not in ("packages", "gpus", "reference")
            # nor what the last attempt requested already, and the checkpoint's value was used
            and not (one.restored and (one.what, one.after) in repeated)
        ]
        again = "--fresh trains again in a new folder"
        if not all(one.what in self.allowed for one in changed):
            differs = "; ".join(one.differs for one in changed[:6])
            message = f"{self.output} holds the finished model of this run, and the stage has changed: {differs}"
            help = "--fresh trains with the new settings in a new folder"
            self._say("error", "finished-changed", message, help, changed[0].key)
        elif self.folder is None:
            message = f"{self.output} holds the model of a run that finished; its run folder is gone, and with it "
            message += "what its weights could be compared with: they are not verified"
            self._say("error", "already-finished", message, again)
        else:
            self._say("note", "already-finished", f"this run is finished: {self.output}", again)
        step = self.total() or 0
        return Decision(kind="finished", kept=_names(found), changes=tuple(changed), step=step)

    def _found(self) -> list[Checkpoint]:
        """All of them, in the order of training, with what ranks of their own attempt left out."""
        found = []
        for one in checkpoints.find(self.plan.stage.options.backend, self.output):
            ranks = self.maker(one).processes
            if one.complete and ranks is not None and (one.ranks or 0) < ranks:
                why = f"{ranks} processes were training, {one.ranks or 0} left their random states"
                one = replace(one, why_incomplete=why)
            found.append(one)
        return sorted(found, key=lambda one: (self.steps(one), one.kind))

    def _chosen(self, whole: Sequence[Checkpoint]) -> tuple[Checkpoint, ResumeMismatch | None]:
        """The newest that can be resumed exactly, else the newest; and what is wrong with the newest."""
        newest = whole[-1]
        wrong = self._wrong(whole[-1])
        if wrong is None or wrong.reason == "again" or "position" in self.allowed:
            return newest, wrong
        return next((one for one in reversed(whole[:-1]) if self._wrong(one) is None), newest), wrong

    def _wrong(self, one: Checkpoint) -> ResumeMismatch | None:
        maker = self.maker(one)
        if self.entry.by_trainer:
            skips = not self.plan.values.get("ignore_data_skip")
            rows = (maker.global_batch, self.plan.global_batch)
            total = self.total()
            wrong = epochs.of_trl(one.number, one.epochs, *rows, total, skips=skips)
            if wrong is None and skips and maker.argument("ignore_data_skip") and maker.resumed_step:
                text = "the attempt that saved it had begun an epoch again, and rows that it never "
                return ResumeMismatch("skipped", f"{text}reached would be skipped")
            return wrong
        was = self.shape(maker)
        now = self.shape()
        if was is None or now is None:
            return None
        if one.kind == "epoch":
            return epochs.of_epoch(one.number, was, now)
        # its attempt counted from where that began
        begun = maker.part("resume")
        at = codec.fit(begun.get("place"), list[Count], [])
        step = begun.number("step")
        if len(at) != 2 or step is None or step > one.number:
            at = [0, 0]
            step = 0
        saved = epochs.advanced(was, DataPosition(at[0], at[1]), one.number - step)
        kept = epochs.keeps_order(self.trainer)
        return epochs.of_step(self.entry.skips_each_epoch, one.number, saved, was, now, keeps_order=kept)

    def _place(self, one: Checkpoint) -> DataPosition:
        if one.kind == "epoch":
            return DataPosition(one.number + 1, 0)
        shape = self.shape() if not self.entry.by_trainer else None
        return DataPosition(0, 0) if shape is None else epochs.counted(shape, one.number)

    def _aside(self, found: Sequence[Checkpoint], chosen: Checkpoint | None) -> tuple[Path, ...]:
        """What upstream must not see: all that is newer, and steps where an epoch is resumed.

        A half-written one that this attempt writes next stays: it is written over.
        """
        at = -1 if chosen is None else self.steps(chosen)
        steps_too = chosen is not None and chosen.kind == "epoch"
        newer = [
            one for one in found if one is not chosen and (self.steps(one) > at or (steps_too and one.kind == "step"))
        ]
        every = epochs.interval(self.plan)
        written_over = None
        if isinstance(every, int):
            following = (max(at, 0) // every + 1) * every
            written_over = checkpoints.folder_name(self.plan.stage.options.backend, "step", following)
        elif every == "epoch":
            following = chosen.number + 1 if chosen is not None and steps_too else 0
            written_over = checkpoints.folder_name(self.plan.stage.options.backend, "epoch", following)
        aside = tuple(one.path for one in newer if one.marked or one.name != written_over)
        if aside and self.output is not None:
            names = ", ".join(path.name for path in aside[:4])
            message = f"{names} would be resumed from or marked wrongly by "
            message += f"upstream, and moves to {aside_folder(self.output)}"
            self._say("note", "set-aside", message, "delete it there if nobody needs it")
        return aside

    def _since(self, record: Manifest) -> Iterator[ResumeChange]:
        steps = self.total(record), self.total()
        return changes.since(record, self.plan, steps, self.trainer, self.caches, self.now)

    def _changed(self, chosen: Checkpoint, wrong: ResumeMismatch | None) -> list[ResumeChange]:
        """The changes, with the place that they come to; a wrong place without any is one of its own."""
        found = list(self._since(self.maker(chosen)))
        if wrong is None:
            return found
        batch = [one for one in found if one.what in changes.BATCH]
        if wrong.reason in ("place", "count") and batch:
            worse = [replace(one, effect=wrong.text, severity="error") for one in batch]
            return [one for one in found if one not in batch] + worse
        if wrong.reason == "again":
            more = ResumeChange("position", chosen.name, None, wrong.text, "warning", "ignore_data_skip")
        else:
            more = ResumeChange("position", chosen.name, None, wrong.text, "error")
        return [*found, more]

    def _check_reference(self, changed: Sequence[ResumeChange]) -> None:
        cache = next((one for one in self.caches if one.kind == "reference"), None)
        other = any(one.what == "reference" for one in changed)
        if cache is None or other or not self.entry.caches_reference:
            return
        logged = self._in_logs(open_instruct.REFERENCE_CACHE)
        used = None if logged is None else Path(os.fsdecode(logged))
        if exists(used) if used is not None else any(cache.path.glob("*.pt")):
            return
        # nobody can allow it for checkpoints without a record: what they were trained against is not known
        severity: Severity = "warning" if used is not None and "reference" in self.allowed else "error"
        message = f"{used or cache.path} is gone: the checkpoint is loaded before the reference is computed "
        loads = "dpo_tune_cache.py::main[accelerator.load_state]"
        computes = "dpo_tune_cache.py::main[dpo_utils.build_reference_logprobs_cache]"
        message += rendered(f"({loads}, {computes}), and the half-trained model would be its own reference")
        help = "bring it back, or start over with --fresh"
        self._say(severity, "reference-gone", message, help, "model_name_or_path")

    def _check_names(self) -> None:
        names = checkpoints.strange_names(self.plan.stage.options.backend, self.output)
        if names:
            message = f"{self.output} holds {', '.join(names[:3])}, which upstream takes for a checkpoint "
            self._say(
                "error",
                "checkpoint-name",
                rendered(rendered(f"{message}(utils.py::get_last_checkpoint[checkpoint_steps =])")),
                "move or rename it",
            )

    def _check_schedule(self) -> None:
        self.findings += epochs.findings(self.plan, self.shape(), self.trainer)


def _names(found: Iterable[Checkpoint], aside: Collection[Path] = ()) -> tuple[str, ...]:
    return tuple(one.name for one in found if one.path not in aside)
