"""The same command again -> `Decision`: a new run, a further attempt from a checkpoint, or
finished.

Upstream decides by what lies in the output folder alone: open-instruct continues from the newest
checkpoint there (utils.py::get_last_checkpoint_path), whoever made it and even if something
changed; TRL starts over without `resume_from_checkpoint`
(trl/scripts/sft.py::main[trainer.train(resume_from_checkpoint]). Here the run's own record counts
too. What has changed is reported, and what would go on at the wrong place, or with other weights,
is an error until it is allowed by name. Where the newest checkpoint cannot be resumed exactly and
an older one can, that one is taken.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from launcher import files
from launcher.artifacts import checkpoints
from launcher.artifacts.checkpoints import Checkpoint
from launcher.cache.inputs import Contents
from launcher.cache.keys import Cache
from launcher.errors import Finding, Severity, launch_finding, not_ready, select_errors, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Between, Count, Positive
from launcher.machine.python import Trainer
from launcher.paths import exists, resolve_path
from launcher.plan.derive import Derived
from launcher.plan.plan import Plan, find_model_in
from launcher.planning import checksums
from launcher.planning.resume import changes, epochs
from launcher.planning.resume.changes import Comparison, ResumeChange
from launcher.planning.resume.epochs import DataPosition, EpochLayout, ResumeMismatch
from launcher.runs import lease, rundir, runner
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.stage.stage import Stage
from launcher.upstream.citations import render_citations
from launcher.upstream.logs import open_instruct
from launcher.upstream.schema import Values
from launcher.upstream.trainers import Entry
from launcher.verdict import evidence

Kind = Literal["new", "resume", "finished"]

_LOG_BYTES = 64 * 2**20  # of a log: training begins long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What saying a command again comes to.

    `step` is the optimizer step that training continues from, 0 for a new run, and `place` where
    upstream then is in the data; `requested` is the checkpoint that the stage file names, under
    TRL. `kept` are the checkpoints that stay where they are, `aside` those that `set_aside` has to
    move before the start, `derived` the arguments that upstream needs for it. `findings` hold
    errors where the decision must not be carried out.
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
            "changes": [asdict(change) for change in self.changes],
            "allowed": list(self.allowed),
        }


class OutputChoice(NamedTuple):
    """Where the model of this start goes; `derived` holds the `output_dir` if it is not the file's
    own.
    """

    output: Path | None
    derived: Mapping[str, Derived] = MappingProxyType({})


def choose_output(
    stage: Stage, configured: Path | None, runs: Iterable[RunFolder], *, fresh: bool
) -> OutputChoice:
    """The output folder of this start: the file's, or the one beside it that `--fresh` began last.

    `configured` is the folder that the stage file names, `runs` are the runs here, newest first.
    With `fresh` it is a folder that nobody has used, because upstream resumes from whatever lies
    in its folder. The same command without it then continues there.
    """
    if configured is None:
        return OutputChoice(None)
    earlier = rundir.summarize(runs)
    # as a manifest holds it
    redact = stage.config.redactor.redact
    wanted = redact(str(configured))
    name = stage.entry.names.output
    if fresh:
        used = {run.output for run in earlier}
        if not exists(configured) and wanted not in used:
            return OutputChoice(configured)
        for value, folder in _propose_outputs(stage):
            if not exists(folder) and redact(str(folder)) not in used:
                why = f"--fresh: {configured} is left as it is"
                return OutputChoice(folder, {name: Derived(value=value, why=why)})
    records = []
    for run in earlier:
        # only manifests that name the folder are read: there may be ten thousand others
        if (run.requested_output or run.output) == wanted:
            records.append(rundir.read_manifest(RunFolder(run.path)))
    # the records of runs whose folders are gone lie in their output folders
    beside = itertools.takewhile(exists, (folder for _, folder in _propose_outputs(stage)))
    for folder in reversed([configured, *beside]):
        records += lease.read_manifests(folder)[-1:]
    for record in records:
        requested = record.requested_output or str(record.output)
        if record.stage != stage.options.stage or requested != wanted:
            continue
        value = record.argument(name)
        if record.output in (None, Path(wanted)) or not isinstance(value, str):
            break
        why = "the run that --fresh started continues there"
        return OutputChoice(record.output, {name: Derived(value=value, why=why)})
    return OutputChoice(configured)


def _propose_outputs(stage: Stage) -> Iterator[tuple[str, Path]]:
    """Values of `output_dir` next to the file's own, and their folders."""
    name = stage.entry.names.output
    begin = str(stage.values[name]).rstrip("/")
    if begin.startswith("-"):
        # with a number behind it, `-` would be read as a flag
        begin = f"./{begin}"
    for number in itertools.count(2):
        value = f"{begin}-{number}"
        folder = stage.backend.output_folder(Values(stage.schema, {**stage.args, name: value}))
        assert folder is not None
        yield value, folder.absolute()


def name_aside_folder(output: Path) -> Path:
    """Where checkpoints go that upstream must not find: upstream would upload what lies inside."""
    return output.with_name(f"{output.name}.set-aside")


def set_aside(decision: Decision, attempt: int) -> list[Path]:
    """Move away the checkpoints that upstream would resume from, or mark as complete, wrongly.

    The caller holds the run's lock. Returns the new places. Raises NotReady if one cannot be moved.
    """
    moved = []
    for path in decision.aside:
        target = name_aside_folder(path.parent) / f"{path.name}.attempt-{attempt}"
        try:
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
        except FileNotFoundError:
            continue
        except OSError as error:
            message = f"{path} is in the way of a resume and cannot be moved: {error.strerror}"
            help = f"move it to {target}"
            raise not_ready("not-set-aside", message, help, file=str(path)) from None
        moved.append(target)
    return moved


def list_manifests(stage: str, folder: RunFolder | None, output: Path | None) -> list[Manifest]:
    """The readable manifests of the attempts of a stage, oldest first.

    The run folder has those of its own attempts. The output folder has copies of those of all
    starts into it, even if their run folders are gone. The place that has more is complete.
    """
    kept = [record for record in lease.read_manifests(output) if record.stage == stage]
    if folder is None:
        return kept
    last = rundir.read_manifest(folder)
    own = [rundir.read_kept_manifest(folder, number) for number in range(1, last.attempt or 1)]
    own.append(last)
    readable = [record for record in own if record]
    return max(readable, kept, key=len)


@dataclass(slots=True, kw_only=True)
class ResumeJudge:
    """The checkpoints in an output folder, and the attempts that made them, oldest first.

    `history` are the manifests of the attempts so far. `folder` is the run folder, None if it is
    gone or there is none. `caches` are the cache folders of this start, `now` is what its data and
    models hold. `allowed` are the changes that the user allows by name.

    A checkpoint is compared with the settings that it was saved under, not with those of the last
    attempt, which may have been started with others and saved nothing.
    """

    plan: Plan
    output: Path | None
    history: Sequence[Manifest]
    folder: RunFolder | None
    trainer: Trainer
    caches: Sequence[Cache] = ()
    now: Contents = ()
    allowed: Collection[str] = ()
    findings: list[Finding] = field(default_factory=list)

    def decide(self) -> Decision:
        """What this start is. Raises UsageError for a name in `allowed` that does not exist."""
        names = (*changes.NAMES, *self.plan.stage.schema.fields)
        unknown = [repr(name) for name in self.allowed if name not in names]
        if unknown:
            message = "--allow-changed-resume: no argument or group is named "
            message += ", ".join(unknown)
            help = f"one of {', '.join(changes.NAMES)}, or the name of an argument"
            raise usage("unknown-change", message, help)
        if self.plan.values.get("cache_dataset_only") is True:
            return Decision()
        if self.history:
            decision = self._decide_resume()
        else:
            decision = self._decide_first_start()
        place = self.plan.stage.config.placed
        return replace(
            decision,
            findings=tuple(map(place, self.findings)),
            allowed=tuple(self.allowed),
            requested=self.named,
        )

    @property
    def entry(self) -> Entry:
        return self.plan.stage.entry

    @property
    def backend(self) -> str:
        return self.plan.stage.options.backend

    @property
    def named(self) -> str | None:
        """The checkpoint that the stage file names; open-instruct never looks at it."""
        name = self.plan.stage.args.get(self.entry.names.resume or "")
        if isinstance(name, str) and name.lower() not in ("", "true", "false"):
            return name
        return None

    def _find_maker(self, checkpoint: Checkpoint) -> Manifest:
        """The manifest of the attempt that saved it: the last that did not find it there."""
        for record in reversed(self.history):
            if checkpoint.name not in record.kept:
                return record
        if not self.history:
            return Manifest()
        return self.history[0]

    def _compute_layout(self, record: Manifest | None = None) -> EpochLayout | None:
        """How epochs are cut into steps, now or under an earlier manifest; None if rows are
        unknown.

        The log of an earlier attempt says how many rows were left after filtering.
        """
        plan = self.plan
        rows = plan.rows
        logged = self._find_in_logs(open_instruct.TRAINING_ROWS)
        if logged is not None:
            rows = int(logged.replace(b",", b""))
        if rows is None:
            return None
        split: Plan | Manifest = plan
        value: Callable[[str], Any] = plan.values.get
        if record is not None:
            split = record
            value = record.argument
        names = self.entry.names
        shared = codec.fit_value(value(names.shared), Positive, 1)
        return EpochLayout(
            rows=rows,
            per_device=split.per_device or plan.per_device,
            devices=max(1, (split.processes or 1) // shared),
            accumulation=split.accumulation or plan.accumulation,
            epochs=codec.fit_value(value(names.epochs), Annotated[float, Between(0, 10**9)], 1),
            limit=codec.fit_value(value(names.max_steps), Positive),
        )

    def _find_in_logs(self, pattern: re.Pattern[bytes]) -> bytes | None:
        """The last match in the log of the newest attempt that has one."""
        if self.folder is None:
            return None
        for attempt in range(self.folder.attempts(), 0, -1):
            log = self.folder.console(attempt)
            with contextlib.suppress(OSError), files.open_regular(log) as file:
                matches = pattern.findall(file.read(_LOG_BYTES))
                if matches:
                    return bytes(matches[-1])
        return None

    def _find_step(self, checkpoint: Checkpoint) -> int:
        if checkpoint.step is not None:
            return checkpoint.step
        number = checkpoint.number + 1
        layout = self._compute_layout(self._find_maker(checkpoint) or None)
        if layout is None:
            return number
        return number * layout.updates

    def _count_total_steps(self, record: Manifest | None = None) -> int | None:
        """All steps, now or under an earlier manifest."""
        if self.entry.by_trainer:
            return self.plan.steps if record is None else record.steps
        layout = self._compute_layout(record)
        if layout is None:
            return None
        return layout.total

    def _is_finished(self) -> bool:
        """Whether the last attempt ended well and its model lies in the output folder."""
        model = self.output and find_model_in(self.plan, self.output)
        is_cache_only = self.history[-1].argument("cache_dataset_only") is True
        if is_cache_only or checkpoints.find_model_fault(model) is not None:
            return False
        if self.folder is None:
            # as far as the output folder tells
            last = lease.find_newest_lease(self.output)
            return last is not None and last.code == 0
        ended = runner.read_exit(self.folder, max(1, self.folder.attempts()))
        if ended is not None:
            return ended.returncode == 0
        # the supervisor was killed before it could record the end, but the ranks' probes did
        with contextlib.suppress(OSError):
            probe = evidence.read_run(self.folder.path).probe
            if probe is not None:
                ends = [rank.last("end") for rank in probe.ranks.values()]
                return {end.number("exit") for end in ends if end is not None} == {0}
        return False

    def _add_finding(
        self, severity: Severity, code: str, message: str, help: str | None, key: str | None = None
    ) -> None:
        key = f"args.{key or self.entry.names.output}"
        finding = launch_finding(severity, code, message, help, key=key)
        if severity == "error":
            finding = replace(finding, layer="run")
        self.findings.append(finding)

    def _decide_first_start(self) -> Decision:
        """No recorded run has been here; checkpoints may lie here all the same."""
        candidates = checkpoints.find(self.backend, self.output)
        self._check_first_start()
        if self.named is not None:
            return self._resume_named(Path(self.named), candidates)
        taken = None
        if not select_errors(self.findings):
            taken = checkpoints.find_upstream_resume(self.backend, self.output)
        for checkpoint in candidates:
            if checkpoint.path == taken:
                return self._resume_foreign(checkpoint, candidates)
        whole = [checkpoint for checkpoint in candidates if checkpoint.complete]
        if whole and not self.entry.unjudged:
            help = "--fresh starts over in a new folder"
            key = self.entry.names.resume
            if key is not None:
                help = f"`{key}: {whole[-1].path}` continues from it; {help}"
            message = f"{self.output} holds {whole[-1].name}, and no record of the run that saved "
            message += "it: training would begin at step 0, and rotation would delete what is there"
            self._add_finding("error", "not-resumed", message, help, key)
        return Decision(kept=_list_names(candidates))

    def _resume_foreign(self, chosen: Checkpoint, candidates: Sequence[Checkpoint]) -> Decision:
        """open-instruct resumes by itself; that it is not this run's is a rule of its own."""
        fault = chosen.why_incomplete or checksums.find_fault(None, chosen)
        if fault is not None:
            message = f"upstream would resume from {chosen.path}, and {fault}"
            self._add_finding(
                "error", "broken-checkpoint", message, "move it out of the output folder"
            )
        self._check_reference(())
        return self._resume(chosen, candidates)

    def _resume(
        self, chosen: Checkpoint, candidates: Iterable[Checkpoint], aside: tuple[Path, ...] = ()
    ) -> Decision:
        return Decision(
            kind="resume",
            checkpoint=chosen,
            step=self._find_step(chosen),
            place=self._find_data_position(chosen),
            kept=_list_names(candidates, aside),
            aside=aside,
        )

    def _decide_resume(self) -> Decision:
        """The run has been here: finished, to be continued, or with nothing to continue from."""
        candidates = self._find_checkpoints()
        if self._is_finished():
            return self._decide_finished(candidates)
        if self.named is not None and self.named != self.history[-1].resume.requested:
            return self._resume_named(Path(self.named), candidates)
        whole = [checkpoint for checkpoint in candidates if checkpoint.complete]
        while whole:
            chosen, wrong = self._choose_checkpoint(whole)
            fault = checksums.find_fault(self.folder, chosen)
            if fault is None:
                return self._continue(candidates, chosen, whole[-1], wrong)
            message = f"{chosen.name} is not used: {fault}"
            help = "look at the disk; an older checkpoint is taken where one is whole"
            self._add_finding("warning", "damaged-checkpoint", message, help)
            candidates[candidates.index(chosen)] = replace(chosen, why_incomplete=fault)
            whole.remove(chosen)
        self._check_first_start()
        if self.entry.unjudged and self.output and any(self.output.glob(self.entry.unjudged)):
            # OLMo-core continues from there, which a rule says (`resume-unjudged`)
            return Decision()
        message = f"the attempt before left no complete checkpoint in {self.output}"
        if candidates:
            last = candidates[-1]
            message += f": {last.name}: {last.why_incomplete}"
        self._add_finding("note", "nothing-to-resume", f"{message}; it starts over", None)
        aside = self._collect_aside(candidates, None)
        return Decision(kept=_list_names(candidates, aside), aside=aside)

    def _continue(
        self,
        candidates: Sequence[Checkpoint],
        chosen: Checkpoint,
        newest: Checkpoint,
        wrong: ResumeMismatch | None,
    ) -> Decision:
        """From a checkpoint of this run; `wrong` is why the newest cannot be resumed exactly."""
        total = self._count_total_steps()
        step = self._find_step(chosen)
        message = f"continues from {chosen.path}"
        if total is not None:
            message += f", {max(0, total - step)} of {total} steps are left"
        if not checksums.read_recorded(self.folder, chosen):
            message += "; not verified: no checksums of it were recorded, and a changed byte of "
            message += "its weights (`.safetensors`) would show nowhere"
        self._add_finding("note", "resumes", message, "--fresh starts over in a new folder")
        mismatch = None
        if chosen is newest:
            mismatch = wrong
        changed = self._compare_to_checkpoint(chosen, mismatch)
        self._check_names()
        derived = {}
        for change in changed:
            self._report_change(change, chosen)
            if change.restored:
                why = f"it comes out of {chosen.name}, not {change.after}"
                derived[change.what] = Derived(value=change.before, why=why)
        if chosen is not newest and wrong is not None:
            again = self._find_step(newest) - step
            message = f"goes back to {chosen.name}, {again} steps are trained again; "
            message += f"from {newest.name} upstream would continue wrongly: {wrong.text}"
            help = f"--allow-changed-resume position continues from {newest.name} all the same"
            self._add_finding("warning", "resume-earlier", message, help)
        self._check_reference(changed)
        if self.entry.names.resume is not None:
            # without it TRL begins anew, and `true` takes the highest number, whole or not
            why = "the same command continues from the last complete checkpoint"
            derived[self.entry.names.resume] = Derived(value=str(chosen.path), why=why)
        decision = self._resume(chosen, candidates, self._collect_aside(candidates, chosen))
        return replace(decision, changes=tuple(changed), derived=derived)

    def _report_change(self, change: ResumeChange, chosen: Checkpoint) -> None:
        """A change that would continue wrongly is an error until it is allowed by name."""
        names = {change.what}
        if change.what in changes.BATCH:
            names.add("position")
        severity = change.severity
        help = None
        if severity == "error" and not names.isdisjoint(self.allowed):
            severity = "warning"
        elif severity == "error":
            help = "bring it back, start over with --fresh, or "
            help += f"--allow-changed-resume {change.what}"
        code = "resume-changed"
        if change.what == "position":
            code = "resume-inexact"
        message = f"continuing from {chosen.name}: {change.text}"
        self._add_finding(severity, code, message, help, change.key)

    def _resume_named(self, named: Path, candidates: Sequence[Checkpoint]) -> Decision:
        """The checkpoint that the stage file names for the first time, whatever else is there."""
        same = None
        step = 0
        fault = None
        for checkpoint in candidates:
            if resolve_path(checkpoint.path) == resolve_path(named):
                same = checkpoint
                step = checkpoint.number
                fault = checksums.find_fault(self.folder, checkpoint)
        if fault is not None:
            key = "resume_from_checkpoint"
            self._add_finding(
                "error", "broken-checkpoint", f"{named}: {fault}", "name an older one", key
            )
        # the run must not rotate away what it did not continue from
        aside = self._collect_aside(candidates, same)
        kept = _list_names(candidates, aside)
        return Decision(kind="resume", checkpoint=same, step=step, kept=kept, aside=aside)

    def _decide_finished(self, candidates: Sequence[Checkpoint]) -> Decision:
        """The run is finished: an error if something that matters has changed."""
        last = self.history[-1]
        repeated = [(change.get("what"), change.get("after")) for change in last.resume.changes]
        changed = []
        for change in self._find_changes(last):
            if change.severity == "note" or change.what in ("packages", "gpus", "reference"):
                # how it would be trained now is no reason to do it again
                continue
            if change.restored and (change.what, change.after) in repeated:
                # the last attempt requested it too, and got the checkpoint's value
                continue
            changed.append(change)
        severity: Severity = "error"
        code = "already-finished"
        help = "--fresh trains again in a new folder"
        key = None
        if not all(change.what in self.allowed for change in changed):
            code = "finished-changed"
            differs = "; ".join(change.differs for change in changed[:6])
            message = f"{self.output} holds the finished model of this run, "
            message += f"and the stage has changed: {differs}"
            help = "--fresh trains with the new settings in a new folder"
            key = changed[0].key
        elif self.folder is None:
            message = f"{self.output} holds the model of a run that finished; its run folder is "
            message += "gone, and with it what its weights could be compared with: "
            message += "they are not verified"
        else:
            severity = "note"
            message = f"this run is finished: {self.output}"
        self._add_finding(severity, code, message, help, key)
        step = self._count_total_steps() or 0
        return Decision(
            kind="finished", kept=_list_names(candidates), changes=tuple(changed), step=step
        )

    def _find_checkpoints(self) -> list[Checkpoint]:
        """All checkpoints in the order of training; incomplete without the part of each rank."""
        candidates = []
        for checkpoint in checkpoints.find(self.backend, self.output):
            ranks = self._find_maker(checkpoint).processes
            saved = checkpoint.ranks or 0
            if checkpoint.complete and ranks is not None and saved < ranks:
                why = f"{ranks} processes were training, {saved} left their random states"
                checkpoint = replace(checkpoint, why_incomplete=why)
            candidates.append(checkpoint)
        return sorted(
            candidates, key=lambda checkpoint: (self._find_step(checkpoint), checkpoint.kind)
        )

    def _choose_checkpoint(
        self, whole: Sequence[Checkpoint]
    ) -> tuple[Checkpoint, ResumeMismatch | None]:
        """The newest that can be resumed exactly, else the newest; and what is wrong with that."""
        newest = whole[-1]
        wrong = self._find_mismatch(newest)
        if wrong is None or wrong.reason == "again" or "position" in self.allowed:
            return newest, wrong
        for checkpoint in reversed(whole):
            if self._find_mismatch(checkpoint) is None:
                return checkpoint, wrong
        return newest, wrong

    def _find_mismatch(self, checkpoint: Checkpoint) -> ResumeMismatch | None:
        """Why a resume would not continue where the checkpoint was saved."""
        maker = self._find_maker(checkpoint)
        step = checkpoint.number
        if self.entry.by_trainer:
            return self._find_trl_mismatch(checkpoint, maker)
        was = self._compute_layout(maker)
        now = self._compute_layout()
        if was is None or now is None:
            return None
        if checkpoint.kind == "epoch":
            return epochs.check_epoch(step, was, now)
        # its attempt counted from where that began
        record = maker.part("resume")
        begun = codec.fit_value(record.get("place"), list[Count], [])
        first = record.number("step")
        if len(begun) != 2 or first is None or first > step:
            begun = [0, 0]
            first = 0
        saved = epochs.advance(was, DataPosition(*begun), step - first)
        keeps_order = epochs.keeps_order(self.trainer)
        skips_each = self.entry.skips_each_epoch
        return epochs.check_step(skips_each, step, saved, was, now, keeps_order=keeps_order)

    def _find_trl_mismatch(self, checkpoint: Checkpoint, maker: Manifest) -> ResumeMismatch | None:
        skips = not self.plan.values.get("ignore_data_skip")
        wrong = epochs.check_trl(
            checkpoint.number,
            checkpoint.epochs,
            was=maker.global_batch,
            now=self.plan.global_batch,
            total=self._count_total_steps(),
            skips=skips,
        )
        began_again = maker.argument("ignore_data_skip") and maker.resumed_step
        if wrong is None and skips and began_again:
            text = "the attempt that saved it had begun an epoch again, "
            text += "and rows that it never reached would be skipped"
            return ResumeMismatch("skipped", text)
        return wrong

    def _find_data_position(self, checkpoint: Checkpoint) -> DataPosition:
        if checkpoint.kind == "epoch":
            return DataPosition(checkpoint.number + 1, 0)
        layout = self._compute_layout()
        if layout is None or self.entry.by_trainer:
            return DataPosition(0, 0)
        return epochs.find_counted_position(layout, checkpoint.number)

    def _collect_aside(
        self, candidates: Sequence[Checkpoint], chosen: Checkpoint | None
    ) -> tuple[Path, ...]:
        """What upstream must not see: all that is newer, and steps if an epoch is resumed.

        A half-written one stays if this attempt writes it next.
        """
        step = -1
        epoch = -1
        if chosen is not None:
            step = self._find_step(chosen)
            if chosen.kind == "epoch":
                epoch = chosen.number
        every = epochs.find_interval(self.plan)
        next_name = None
        if isinstance(every, int):
            following = (max(step, 0) // every + 1) * every
            next_name = checkpoints.name_checkpoint(self.backend, "step", following)
        elif every == "epoch":
            next_name = checkpoints.name_checkpoint(self.backend, "epoch", epoch + 1)
        aside = []
        for checkpoint in candidates:
            # upstream takes a step's before any epoch's
            is_hiding = epoch >= 0 and checkpoint.kind == "step"
            is_newer = self._find_step(checkpoint) > step
            if checkpoint is chosen or not (is_newer or is_hiding):
                continue
            if checkpoint.marked or checkpoint.name != next_name:
                aside.append(checkpoint.path)
        if aside and self.output is not None:
            names = ", ".join(path.name for path in aside[:4])
            message = f"{names} would be resumed from or marked wrongly by upstream, "
            message += f"and moves to {name_aside_folder(self.output)}"
            self._add_finding("note", "set-aside", message, "delete it there if nobody needs it")
        return tuple(aside)

    def _find_changes(self, record: Manifest) -> Iterator[ResumeChange]:
        comparison = Comparison(
            record=record,
            plan=self.plan,
            steps=(self._count_total_steps(record), self._count_total_steps()),
            trainer=self.trainer,
            caches=self.caches,
            now=self.now,
        )
        return comparison.changes()

    def _compare_to_checkpoint(
        self, chosen: Checkpoint, wrong: ResumeMismatch | None
    ) -> list[ResumeChange]:
        """The changes since a checkpoint, with `wrong` as their effect or as one of its own."""
        changed = list(self._find_changes(self._find_maker(chosen)))
        if wrong is None:
            return changed
        batch = [change for change in changed if change.what in changes.BATCH]
        if wrong.reason in ("place", "count") and batch:
            others = [change for change in changed if change not in batch]
            worse = [replace(change, effect=wrong.text, severity="error") for change in batch]
            return others + worse
        severity: Severity = "error"
        key = None
        if wrong.reason == "again":
            severity = "warning"
            key = "ignore_data_skip"
        return [*changed, ResumeChange("position", chosen.name, None, wrong.text, severity, key)]

    def _check_reference(self, changed: Sequence[ResumeChange]) -> None:
        """Refuse a resume of DPO without the cache of its reference."""
        caches = [cache for cache in self.caches if cache.kind == "reference"]
        is_said = any(change.what == "reference" for change in changed)
        if not caches or is_said or not self.entry.caches_reference:
            return
        place = caches[0].path
        is_there = any(place.glob("*.pt"))
        logged = self._find_in_logs(open_instruct.REFERENCE_CACHE)
        if logged is not None:
            place = Path(os.fsdecode(logged))
            is_there = exists(place)
        if is_there:
            return
        severity: Severity = "error"
        if logged is not None and "reference" in self.allowed:
            # without a record nobody can allow it: what was trained against is not known
            severity = "warning"
        loads = "dpo_tune_cache.py::main[accelerator.load_state]"
        computes = "dpo_tune_cache.py::main[dpo_utils.build_reference_logprobs_cache]"
        message = f"{place} is gone: the checkpoint is loaded before the reference is computed "
        message += render_citations(f"({loads}, {computes}), ")
        message += "and the half-trained model would be its own reference"
        help = "bring it back, or start over with --fresh"
        self._add_finding(severity, "reference-gone", message, help, "model_name_or_path")

    def _check_names(self) -> None:
        names = checkpoints.list_strange_names(self.backend, self.output)
        if names:
            crash = render_citations("(utils.py::get_last_checkpoint[checkpoint_steps =])")
            message = f"{self.output} holds {', '.join(names[:3])}, which upstream takes for a "
            message += f"checkpoint {crash}"
            self._add_finding("error", "checkpoint-name", message, "move or rename it")

    def _check_first_start(self) -> None:
        """What to know of checkpoints before there are any."""
        self._check_names()
        self.findings += epochs.check_first_start(self.plan, self._compute_layout(), self.trainer)


def _list_names(candidates: Iterable[Checkpoint], aside: Collection[Path] = ()) -> tuple[str, ...]:
    return tuple(checkpoint.name for checkpoint in candidates if checkpoint.path not in aside)
