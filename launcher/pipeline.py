"""Stages run in turn, each on the model of the one before; what has not changed is not trained again.

Whether something has changed is asked of contents, by the same comparison that a resume makes
(`resume.Decision.changes`): data, model, tokenizer, arguments, upstream's code. A model that was trained
again has another content, so whatever was made of it is made again, in a folder beside the old one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher import (
    campaign,
    check,
    checkpoints,
    claim,
    following,
    forecast,
    handover,
    locks,
    plan,
    preparation,
    report,
    resume,
    rundir,
    start,
    trial,
)  # fmt: skip
from launcher.chain import placed
from launcher.changes import Change
from launcher.errors import Exit, Finding, InvalidConfig, LaunchError, brief
from launcher.handover import Order, Step, Survey
from launcher.preparation import Prepared, Request
from launcher.redaction import redact
from launcher.resume import Decision
from launcher.trial import Outcome

RECORD = "pipeline.json"
PAGE = "report.html"
KIND = "pipeline"

Status = Literal["pending", "running", "passed", "skipped", "failed", "refused", "interrupted"]

# what a resume refuses, or only warns of, because something has changed
_CHANGED = frozenset({"finished-changed", "resume-changed", "resume-inexact"})
# how it is trained, and on what: none of it is what a stage depends on
_NO_INPUT = frozenset({"gpus", "packages", "position", "reference"})


@dataclass(slots=True, kw_only=True)
class Row:
    """One stage in the record. `seconds` is wall time of this saying; `reason` is why it did not pass,
    was refused, or was trained again; `whole` is whether a trained model lies there.
    """

    name: str
    stage: str
    config: str
    model: str | None
    output: str | None
    status: Status = "pending"
    run: str | None = None
    seconds: float = 0.0
    exit: int | None = None
    reason: str | None = None
    verdict: str | None = None
    steps: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    whole: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the record and the envelope."""
        told = {**asdict(self), "skipped": self.status == "skipped"}
        del told["whole"]
        return {**told, "seconds": round(self.seconds, 1)}

    def shown(self) -> dict[str, Any]:
        """For the table at the end."""
        losses = [self.metrics.get(name) for name in ("first_loss", "last_loss")]
        known = [f"{one:.4g}" for one in losses if isinstance(one, int | float)]
        return {
            "stage": self.name, "status": self.status, "steps": self.steps,
            "loss": " -> ".join(known) or None, "model": self.output, "run": self.run,
            "seconds": f"{self.seconds:.0f}" if self.seconds else None,
        }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Result:
    """What came of one saying; `exit` is the command's, `findings` what stopped it, if that was one."""

    folder: Path
    order: Order
    rows: list[Row]
    began: str
    state: str = "running"
    exit: Exit = Exit.OK
    findings: tuple[Finding, ...] = ()
    ended: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The record; the envelope's data is the same."""
        chain = self.order.chain
        told = {
            "pipeline": str(self.folder), "name": chain.name, "file": str(chain.path.absolute()),
            "cwd": os.getcwd(), "from": self.order.first, "until": self.order.last,
            "state": self.state, "exit": int(self.exit), "began": self.began, "ended": self.ended,
            "report": None if self.page is None else str(self.page),
            "stages": [row.as_json() for row in self.rows],
        }  # fmt: skip
        shown: dict[str, Any] = redact(told)
        return shown

    @property
    def page(self) -> Path | None:
        """The page of all stages; None where none has begun."""
        page = self.folder / PAGE
        return page if page.exists() else None

    @property
    def stopped_at(self) -> Row | None:
        """The stage that did not pass."""
        bad = ("failed", "refused", "interrupted")
        return next((row for row in self.rows if row.status in bad), None)

    def advice(self) -> list[str]:
        """How to go on, one command a line with what it does; nothing where all has passed."""
        row = self.stopped_at
        if row is None:
            return []
        again, names = self.order.again, [one.name for one in self.rows]
        after = names[names.index(row.name) + 1 :]
        if row.status != "failed" or row.exit != Exit.VERDICT or not row.whole:
            return [f"{again()}    goes on with {row.name}, what is finished is skipped"]
        # trained to its end: said again it would be judged again, not trained
        lines = [f"{again('--fresh', first=row.name)}    trains {row.name} again"]
        if row.verdict == "unproven":
            lines.insert(
                0, f"{again('--allow-unproven')}    takes what is not proved as good enough"
            )
        if after:
            lines.append(f"{again(first=after[0])}    takes its model as it is")
        return lines


def run(order: Order, *, quiet: bool = False) -> Result:
    """Run the stages of an order that are to run, one after the other; stops where one does not pass.

    Everything is judged before the first one starts. Raises what `handover.survey` raises, and NotReady
    where the pipeline is running already or the model that it is to begin from is not there.
    """
    with _alone(order):
        seen = handover.survey(order, running=True)
        if not quiet:
            report.findings([one for one in seen.findings if one.severity != "note"])
        result = _opened(order, seen)
        with trial.unwatched():
            _Runner(order, seen, result, quiet).run()
        return result


def dry_run(order: Order) -> Survey:
    """What would be started, in order, and what of it earlier runs have. Raises like `handover.survey`."""
    seen = handover.survey(order, running=False)
    return replace(seen, findings=(*seen.findings, *_earlier_runs(seen)))


def _earlier_runs(seen: Survey) -> Iterator[Finding]:
    """Printed commands that would write into the outputs of earlier runs."""
    would = "skip what has not changed, and train beside it what has"
    for link in seen.links:
        dry = seen.steps[link.name].prepared
        if dry.attempt > 1 and rundir.read_manifest(dry.folder):
            found = resume.warn_pasted_command(would, dry.plan, dry.output, dry.folder)
            yield from (placed(link, one) for one in found)


class _Runner:
    def __init__(self, order: Order, seen: Survey, result: Result, quiet: bool) -> None:
        self.order = order
        self.seen = seen
        self.result = result
        self.quiet = quiet
        self.models = {name: step.model for name, step in seen.steps.items()}
        self.joined = {step.link.name for step in seen.live}

    def run(self) -> None:
        result = self.result
        self._write()
        try:
            # first of all: until it is over, no other stage gets its GPUs
            waiting = (n for n, row in enumerate(result.rows) if row.name in self.joined)
            if all(self._went_well(number, self._join) for number in waiting):
                for number in range(len(result.rows)):
                    row = result.rows[number]
                    of = f"stage {number + 1} of {len(result.rows)}"
                    self._say(f"{of}: {row.name}  ({row.stage}, {row.config})")
                    if not self._went_well(number, self._outcome):
                        break
        except (KeyboardInterrupt, following.Detached):
            # between two stages: there is no run to hand it to
            result.exit = Exit.INTERRUPTED
            for row in result.rows:
                row.status = "interrupted" if row.status == "running" else row.status
        states = {Exit.OK: "finished", Exit.INTERRUPTED: "interrupted"}
        result.state = states.get(result.exit, "stopped")
        result.ended = rundir.now()
        self._write()

    def _went_well(self, number: int, work: Callable[[Step, Row], Outcome | None]) -> bool:
        """Do one thing with a stage; what comes of it stands in its row, of None nothing."""
        row, began = self.result.rows[number], time.monotonic()
        row.status = "running"
        self._write()
        try:
            outcome = work(self.seen.steps[row.name], row)
        except LaunchError as error:
            self._refused(row, error)
        else:
            row.seconds += time.monotonic() - began
            if outcome is None:
                row.status = "pending"
                return True
            self._came_of(row, outcome)
        self._page()
        self._write()
        self._say(ending(row))
        return self.result.exit is Exit.OK

    def _say(self, line: str) -> None:
        # machines get one answer at the end
        if not self.quiet:
            report.say(line)

    def _refused(self, row: Row, error: LaunchError) -> None:
        row.status, row.exit = "refused", int(error.exit_code)
        # its folder was only reserved
        row.run = row.run if row.run and os.path.isdir(row.run) else None
        stops = [one for one in error.findings if one.severity == "error"] or error.findings
        row.reason = str(stops[0].message) if stops else str(error)
        self.result.exit, self.result.findings = error.exit_code, error.findings
        if not self.quiet:
            report.findings(error.findings)

    def _came_of(self, row: Row, outcome: Outcome) -> None:
        row.exit, row.verdict = int(outcome.exit), outcome.verdict.status
        row.steps, row.metrics = outcome.verdict.steps, dict(outcome.verdict.metrics)
        row.whole = checkpoints.model_fault(self.models[row.name]) is None
        self.result.exit = outcome.exit
        if outcome.exit is Exit.OK:
            row.status = "skipped" if outcome.finished_before else "passed"
        else:
            row.status = "interrupted" if outcome.interrupted else "failed"
            row.reason = outcome.reason

    def _outcome(self, step: Step, row: Row) -> Outcome:
        source = step.link.source
        more = [] if source is None else step.handed(self.models[source])
        if source is not None:
            row.model = str(self.models[source])
        request = replace(self.order.request(step.link, more), allowed=_allowed(self.order, step))
        prepared, why = self._prepared(request)
        prepared = forecast.with_forecast(prepared)
        output = prepared.output or step.output
        self.models[step.link.name] = plan.model_in(prepared.plan, output)
        row.output, row.run = str(output), str(prepared.folder.path)
        if why is not None:
            row.reason = f"trained again, beside the old one: {why}"
            if not self.quiet:
                message = f"{step.link.name} is trained again, into {prepared.output}: {why}"
                note = Finding(
                    severity="note", layer="launch", code="pipeline-restarts", message=message,
                    **step.link.origin().place,
                )  # fmt: skip
                report.findings([note])
        self._write()
        if not self.quiet:
            # what validation said has been shown, and that a stage is finished is shown at its end
            said = {one.message for one in self.seen.findings}
            new = [one for one in prepared.findings if one.message not in said]
            report.findings([one for one in new if one.code != "already-finished"])
            if prepared.decision.kind != "finished":
                report.beginning(prepared.plan, prepared.folder.console(prepared.attempt))
        allow = self.order.allow_unproven
        outcome = trial.of_prepared(prepared, allow_unproven=allow, quiet=True)
        if not outcome.finished_before:
            return outcome
        # by what is expected of it now: that may have been changed since
        verdict = start.judged_now(outcome.run, outcome.plan, outcome.verdict)
        code = check.exit_code(verdict, allow_unproven=allow)
        # its training ended while we looked on
        mine = step.link.name in self.joined and code is Exit.OK
        return replace(outcome, verdict=verdict, exit=code, finished_before=not mine)

    def _join(self, step: Step, row: Row) -> Outcome | None:
        """Wait for a stage that is being trained already; what came of it, where that is no good."""
        folder = step.prepared.folder
        row.run = str(folder.path)
        self._write()
        attempt = following.newest_attempt(folder)
        self._say(f"{step.link.name} is being trained: {folder.path}")
        asked = following.until_over(folder, attempt, forward=True)
        # by what is allowed now
        attempt = replace(attempt, allow_unproven=self.order.allow_unproven)
        verdict, code = start.conclusion(folder, attempt)
        if code is Exit.OK and not asked:
            return None
        code = Exit.INTERRUPTED if asked else code
        return Outcome(run=folder, plan=step.plan, verdict=verdict, exit=code)

    def _prepared(self, request: Request) -> tuple[Prepared, str | None]:
        """Ready to start: as it is, or started over with the reason why."""
        if self.order.common.fresh:
            fresh = preparation.prepare(replace(request, fresh=True), running=True)
            return fresh, None if fresh.output == fresh.asked else "--fresh"
        if (found := _of_nobody(request)) is not None:
            fresh = preparation.prepare(replace(request, fresh=True), running=True)
            return fresh, f"{found} holds a model, and no run is known that made it"
        try:
            prepared = preparation.prepare(request, running=True)
        except InvalidConfig as refused:
            if not any(one.code in _CHANGED for one in refused.findings):
                raise
            prepared = _tolerant(request)
            if not (why := _changed(prepared.decision, request)):
                rundir.release(prepared.folder)
                raise
        else:
            why = _changed(prepared.decision, request)
        if not why:
            return prepared, None
        rundir.release(prepared.folder)
        told = "; ".join(one.differs for one in why[:4])
        return preparation.prepare(replace(request, fresh=True), running=True), told

    def _write(self) -> None:
        # a full disk costs the record, not the run that goes on
        with contextlib.suppress(OSError):
            rundir.write_json(self.result.folder / RECORD, self.result.as_json())

    def _page(self) -> None:
        """The stages so far on one page."""
        runs = [Path(row.run) for row in self.result.rows if row.run]
        try:
            campaign.page(runs, self.result.folder / PAGE)
        except LaunchError as error:
            report.findings(error.findings if not self.quiet else ())


# --- has anything changed? -------------------------------------------------------------------------


def _of_nobody(request: Request) -> Path | None:
    """The output folder, where a whole model lies in it and no run here is known to have trained it."""
    dry = preparation.prepare(request, running=False)
    if dry.attempt > 1 or dry.output is None:
        return None
    whole = checkpoints.model_fault(plan.model_in(dry.plan, dry.output)) is None
    return dry.output if whole else None


def _tolerant(request: Request) -> Prepared:
    """The same start with every change allowed, for what has changed; never to be begun."""
    dry = preparation.prepare(replace(request, allowed=()), running=False)
    every = handover.known_changes(dry.plan.stage.schema.fields)
    anyhow = replace(request, allowed=tuple(sorted(every)), strict=False)
    return preparation.prepare(anyhow, running=True)


def _changed(decision: Decision, request: Request) -> list[Change]:
    """The changes for which a stage's own result, or what there is of it, is not what was asked for."""
    if decision.kind == "new":
        return []
    allowed = {*request.allowed, *_NO_INPUT}
    return [one for one in decision.changes if one.severity != "note" and one.what not in allowed]


def _allowed(order: Order, step: Step) -> tuple[str, ...]:
    """What of `--allow-changed-resume` a stage knows."""
    known = handover.known_changes(step.plan.stage.schema.fields)
    return tuple(name for name in order.common.allowed if name in known)


# --- before and around ------------------------------------------------------------------------------


def _opened(order: Order, seen: Survey) -> Result:
    """The folder of this saying: that of the last one, where that one did not come to its end."""
    rows = []
    for link in seen.links:
        step = seen.steps[link.name]
        values = step.plan.values
        rows.append(
            Row(
                name=link.name, stage=step.plan.stage.options.stage, config=str(link.config),
                model=str(values.get(step.plan.stage.entry.names.model)), output=str(step.output),
            )
        )  # fmt: skip
    root = order.common.runs or rundir.runs_root()
    file, cwd = str(order.chain.path.absolute()), os.getcwd()
    for folder, told in campaign.records(KIND, RECORD, root):
        if (told.get("file"), told.get("cwd")) == (file, cwd):
            if told.get("state") != "finished":
                return Result(folder=folder, order=order, rows=rows, began=rundir.now())
            break
    folder = rundir.new_folder(root, KIND, order.chain.name)
    return Result(folder=folder, order=order, rows=rows, began=rundir.now())


def _alone(order: Order) -> contextlib.AbstractContextManager[None]:
    """One saying of a pipeline at a time."""
    taken = Finding(
        severity="error", layer="launch", code="pipeline-running", file=str(order.chain.path),
        message="this pipeline is running already",
        help="launch runs shows its stage; launch stop ends it",
    )  # fmt: skip
    said = f"{order.chain.path.absolute()}\0{os.getcwd()}"
    return locks.alone(claim.place("pipelines", said), taken=taken)


def ending(row: Row) -> str:
    """One line after a stage."""
    if row.status == "skipped":
        return f"{row.name}: finished before, nothing that it depends on has changed: {row.output}"
    told = f": {brief(row.reason, 300)}" if row.reason and row.status != "passed" else ""
    return f"{row.name}: {row.status}{told}"


SUMMARY = ("stage", "status", "steps", "loss", "seconds", "model", "run")
