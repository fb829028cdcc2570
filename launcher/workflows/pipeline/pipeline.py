"""Stages run in turn, each on the model of the one before; what has not changed is not trained again.

Whether something has changed is asked of contents, by the same comparison that a resume makes
(`resume.Decision.changes`): data, model, tokenizer, arguments, upstream's code. A model that was trained
again has another content, so whatever was made of it is made again, in a folder beside the old one.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher import redaction
from launcher.artifacts import checkpoints
from launcher.config.pipeline import placed
from launcher.errors import Exit, Finding, LaunchError, brief, errors, launch_finding
from launcher.lifecycle import conclude, follow
from launcher.plan import plan
from launcher.planning import forecast, prepare
from launcher.planning.collect import Facts, Scope
from launcher.planning.prepare import Prepared
from launcher.redaction import Redactor
from launcher.report import console
from launcher.report.page import Lead
from launcher.runs import evaluation as records
from launcher.runs import rundir
from launcher.runs.evaluation import EvaluationRecord
from launcher.verdict import check
from launcher.workflows import experiment
from launcher.workflows.experiment import Campaign, Outcome
from launcher.workflows.pipeline import evaluation
from launcher.workflows.pipeline import plan as plans
from launcher.workflows.pipeline.plan import PipelinePlan, PipelineRequest, PlannedStage

RECORD = rundir.PIPELINE_RECORD
PAGE = "report.html"
KIND = "pipeline"
SUMMARY = ("stage", "status", "steps", "loss", "seconds", "model", "run")
"""The columns of the table at the end."""
EVALUATED = "eval"
"""One more column of it, where a stage was evaluated."""

Status = Literal["pending", "running", "passed", "skipped", "failed", "refused", "interrupted"]

# how it is trained, and on what: none of it is what a stage depends on
_NO_INPUT = frozenset({"gpus", "packages", "position", "reference"})


@dataclass(slots=True, kw_only=True)
class StageRow:
    """One stage in the record. `seconds` is wall time of this start of the pipeline; `reason` is why it did
    not pass, was refused, or was trained again; `whole` is whether a trained model lies there. `evaluation` is that of
    its model, None where its pipeline has none or it has not begun.
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
    evaluation: EvaluationRecord | None = None

    def as_json(self) -> dict[str, Any]:
        row = {**asdict(self), "skipped": self.status == "skipped", "seconds": round(self.seconds, 1)}
        del row["whole"]
        del row["evaluation"]
        if self.evaluation is not None:
            row["eval"] = self.evaluation.as_json()
        return row

    def shown(self) -> dict[str, Any]:
        losses = [self.metrics.get(name) for name in ("first_loss", "last_loss")]
        known = [f"{one:.4g}" for one in losses if isinstance(one, int | float)]
        seconds = f"{self.seconds:.0f}" if self.seconds else None
        loss = " -> ".join(known) or None
        cells = (self.name, self.status, self.steps, loss, seconds, self.output, self.run)
        shown = dict(zip(SUMMARY, cells, strict=True))
        if self.evaluation is not None:
            shown[EVALUATED] = evaluation.summary(self.evaluation) or self.evaluation.state
        return shown

    def ending(self) -> str:
        if self.status == "skipped":
            return f"{self.name}: finished before, nothing that it depends on has changed: {self.output}"
        why = f": {brief(self.reason, 300)}" if self.reason and self.status != "passed" else ""
        return f"{self.name}: {self.status}{why}"


@dataclass(slots=True, kw_only=True)
class PipelineResult:
    """What came of one start; `exit` is the command's, `findings` what stopped it, if that was one."""

    folder: Path
    order: PipelineRequest
    rows: list[StageRow]
    key: str
    began: str
    state: str = "running"
    exit: Exit = Exit.OK
    findings: tuple[Finding, ...] = ()
    ended: str | None = None
    redactor: Redactor = field(default_factory=redaction.of_process)

    def as_json(self) -> dict[str, Any]:
        """The record; the envelope's data is the same."""
        chain = self.order.chain
        record: dict[str, Any] = self.redactor.redact(
            {
                "pipeline": str(self.folder),
                "name": chain.name,
                "file": str(chain.path.absolute()),
                "key": self.key,
                "cwd": os.getcwd(),
                "from": self.order.first,
                "until": self.order.last,
                "state": self.state,
                "exit": int(self.exit),
                "began": self.began,
                "ended": self.ended,
                "report": None if self.page is None else str(self.page),
                "stages": [row.as_json() for row in self.rows],
            }
        )
        return record

    def table(self) -> list[dict[str, Any]]:
        """A row a stage, each with the same columns."""
        shown = [row.shown() for row in self.rows]
        if any(EVALUATED in row for row in shown):
            return [{**row, EVALUATED: row.get(EVALUATED)} for row in shown]
        return shown

    @property
    def page(self) -> Path | None:
        """The page of all stages; None where none has begun."""
        page = self.folder / PAGE
        return page if page.exists() else None

    @property
    def stopped_at(self) -> StageRow | None:
        return next((row for row in self.rows if row.status in ("failed", "refused", "interrupted")), None)

    def advice(self) -> list[str]:
        """How to go on, a way a line; nothing where all has passed."""
        row = self.stopped_at
        if row is None:
            return []
        if row.evaluation is not None and not row.evaluation.passed:
            return self._advice_after_evaluation(row, row.evaluation)
        if row.status != "failed" or row.exit != Exit.VERDICT or not row.whole:
            return [f"the same command continues with {row.name}; what is finished is skipped"]
        # trained to its end: the same command would judge it again, not train it
        lines = [f"the same command with `--from {row.name} --fresh` trains it again"]
        if row.verdict == "unproven":
            lines.append("with `--allow-unproven` an unproven verdict counts as success")
        after = self.rows[self.rows.index(row) + 1 :]
        return [*lines, *(f"with `--from {one.name}` it takes its model as it is" for one in after[:1])]

    def _advice_after_evaluation(self, row: StageRow, record: EvaluationRecord) -> list[str]:
        if record.state != "measured":
            return [f"the same command evaluates {row.name} again; what is trained is skipped"]
        lines = ["with another `expect` the same command judges the same numbers again"]
        lines.append(f"the same command with `--from {row.name} --fresh` trains it again")
        after = self.rows[self.rows.index(row) + 1 :]
        return [*lines, *(f"with `--from {one.name}` it takes its model as it is" for one in after[:1])]


def run(order: PipelineRequest, planned: PipelinePlan, *, quiet: bool = False) -> PipelineResult:
    """Run the stages of an order that are to run, one after the other; stops where one does not pass.

    Raises NotReady where the pipeline is running already.
    """
    root = order.common.runs or rundir.runs_root()
    key = experiment.key_of([str(order.chain.path.absolute()), os.getcwd()])
    redactor = planned.redactor
    series = Campaign(kind=KIND, key=key, name=redactor.redact(order.chain.name), root=root)
    message, help = "this pipeline is running already", "launch runs shows its stage; launch stop ends it"
    running = launch_finding("error", "pipeline-running", message, help, file=str(order.chain.path))
    # one that came to its end has its record
    before = series.earlier()
    over = before is not None and rundir.read_json(before / RECORD).get("state") == "finished"
    with series.opened(fresh=over, taken=running) as folder:
        rows = []
        for step in (planned.steps[link.name] for link in planned.links):
            stage, model = step.plan.stage, str(step.plan.values.get(step.plan.stage.entry.names.model))
            name, config, output = step.link.name, str(step.link.config), str(step.output)
            rows.append(StageRow(name=name, stage=stage.options.stage, config=config, model=model, output=output))
        result = PipelineResult(
            folder=folder, order=order, rows=rows, key=key, began=rundir.utc_now(), redactor=redactor
        )
        _Runner(order, planned, result, quiet).run()
    return result


def dry_run(order: PipelineRequest) -> PipelinePlan:
    """What would be started, in order, and what of it earlier runs have. Raises like `plans.plan_stages`."""
    planned = plans.plan_stages(order, Scope.PLAN)
    # printed commands that would write into the outputs of earlier runs
    runs = [(link, planned.steps[link.name].prepared) for link in planned.links]
    earlier = [placed(link, one) for link, prepared in runs for one in prepare.of_earlier_run(prepared)]
    return replace(planned, findings=(*planned.findings, *earlier))


class _Runner:
    def __init__(self, order: PipelineRequest, planned: PipelinePlan, result: PipelineResult, quiet: bool) -> None:
        self.order, self.planned, self.result, self.quiet = order, planned, result, quiet
        self.models = {name: step.model for name, step in planned.steps.items()}
        self.joined = {step.link.name for step in planned.live}
        # of the stage whose turn it is, as it was started or skipped
        self.ready: Prepared | None = None

    def run(self) -> None:
        result = self.result
        self._write()
        with experiment.interruptible() as stop:
            self._run_stages()
        if stop.requested:
            result.exit = Exit.INTERRUPTED
            for row in result.rows:
                row.status = "interrupted" if row.status == "running" else row.status
        states = {Exit.OK: "finished", Exit.INTERRUPTED: "interrupted"}
        result.state = states.get(result.exit, "stopped")
        result.ended = rundir.utc_now()
        self._page()
        self._write()

    def _run_stages(self) -> None:
        rows = self.result.rows
        # first of all: until it is over, no other stage gets its GPUs
        waiting = [row for row in rows if row.name in self.joined]
        if not all(self._went_well(row, self._join) for row in waiting):
            return
        for number, row in enumerate(rows, 1):
            self._say(f"stage {number} of {len(rows)}: {row.name}  ({row.stage}, {row.config})")
            if not self._went_well(row, self._outcome) or not self._evaluated(row):
                return

    def _evaluated(self, row: StageRow) -> bool:
        """Evaluate the model of a stage that has passed, where its pipeline asks for that; whether to go on."""
        step = self.planned.steps[row.name]
        if step.link.evaluation is None or self.ready is None:
            return True
        task = evaluation.planned(step.link, self.ready, self.models[row.name])
        assert task is not None
        reused = evaluation.is_finished(task)
        if not reused:
            self._say(f"{row.name}: evaluating, log: {task.folder.console(task.folder.attempts() + 1)}")
        trained, row.status = row.status, "running"
        self._write()
        began = time.monotonic()
        try:
            record = evaluation.evaluate(task, self.ready.start.devices, self.ready.folder.attempts())
        except LaunchError as error:
            row.evaluation = records.read_evaluation(task.run)
            self._stopped(row, "refused", error.exit_code, error.findings)
            return False
        row.seconds += time.monotonic() - began
        row.evaluation = record
        row.status = trained
        row.verdict = conclude.finish(task.run).status
        code = evaluation.exit_code(record)
        if code is not Exit.OK:
            state: Status = "interrupted" if code is Exit.INTERRUPTED else "failed"
            self._stopped(row, state, code, evaluation.faults(task, record))
        self._page()
        self._write()
        self._say(evaluation.ending(row.name, record, reused=reused))
        return code is Exit.OK

    def _stopped(self, row: StageRow, status: Status, code: Exit, findings: Sequence[Finding]) -> None:
        """Record that a stage is where the pipeline ends, and why."""
        row.status = status
        row.exit = int(code)
        stops = errors(findings) or tuple(findings)
        reason = str(stops[0].message) if stops else f"its evaluation was {status}"
        # a finding names its stage; the row is that of the stage
        row.reason = reason.removeprefix(f"{row.name}: ")
        self.result.exit = code
        self.result.findings = tuple(findings)
        self._show(list(findings))

    def _went_well(self, row: StageRow, work: Callable[[PlannedStage, StageRow], Outcome | None]) -> bool:
        """Do one thing with a stage; what comes of it stands in its row, of None nothing."""
        began, row.status = time.monotonic(), "running"
        self._write()
        try:
            outcome = work(self.planned.steps[row.name], row)
        except LaunchError as error:
            row.status, row.exit = "refused", int(error.exit_code)
            # where it never began there is no folder
            row.run = row.run if row.run and os.path.isdir(row.run) else None
            stops = errors(error.findings) or error.findings
            row.reason = str(stops[0].message) if stops else str(error)
            self.result.exit, self.result.findings = error.exit_code, error.findings
            self._show(list(error.findings))
        else:
            row.seconds += time.monotonic() - began
            if outcome is None:
                row.status = "pending"
                return True
            self._came_of(row, outcome)
        self._page()
        self._write()
        self._say(row.ending())
        return self.result.exit is Exit.OK

    def _say(self, line: str) -> None:
        # machines get one answer at the end
        if not self.quiet:
            console.say(line, self.result.redactor)

    def _show(self, findings: list[Finding]) -> None:
        if not self.quiet:
            console.print_findings(findings, self.result.redactor)

    def _came_of(self, row: StageRow, outcome: Outcome) -> None:
        row.exit, row.verdict = int(outcome.exit), outcome.verdict.status
        row.steps, row.metrics = outcome.verdict.steps, dict(outcome.verdict.metrics)
        row.whole = checkpoints.model_fault(self.models[row.name]) is None
        self.result.exit = outcome.exit
        if outcome.exit is Exit.OK:
            row.status = "skipped" if outcome.finished_before else "passed"
        else:
            row.status = "interrupted" if outcome.interrupted else "failed"
            row.reason = outcome.reason

    def _outcome(self, step: PlannedStage, row: StageRow) -> Outcome:
        link, more = step.link, list[str]()
        if link.source is not None:
            source = self.models[link.source]
            more, row.model = plans.handed(step.plan.stage.options.backend, source), str(source)
        known = plans.known_changes(step.plan.stage.schema.fields)
        allowed = tuple(name for name in self.order.common.allowed if name in known)
        resolved = step.resolved.with_request(allowed=allowed, fresh=False)
        if more:
            # now that its model is there
            file = step.file.with_overrides(*more, allowed=allowed)
            resolved = resolved.with_file(file, file.read())
        resolved = resolved.look_again()
        # nothing has happened since it was judged
        is_first = row is self.result.rows[0] and not self.joined
        judged = step.judged if is_first and not more else None
        prepared, why = _prepared(resolved, step, judged, fresh=self.order.common.fresh)
        prepared = forecast.with_forecast(prepared)
        self.ready = prepared
        output = prepared.output or step.output
        self.models[link.name] = plan.model_in(prepared.plan, output)
        row.output, row.run = str(output), str(prepared.folder.path)
        if why is not None:
            row.reason = f"trained again, beside the old one: {why}"
            message = f"{link.name} is trained again, into {prepared.output}: {why}"
            self._show([launch_finding("note", "pipeline-restarts", message, **link.origin().place)])
        self._write()
        # what validation said has been shown, and that a stage is finished is shown at its end
        shown = {"already-finished", *(one.message for one in self.planned.findings)}
        self._show([one for one in prepared.findings if not {one.code, one.message} & shown])
        if not self.quiet and prepared.decision.kind != "finished":
            console.print_plan(prepared.plan, prepared.folder.console(prepared.attempt))
        allow = self.order.allow_unproven
        outcome = experiment.of_prepared(prepared, allow_unproven=allow)
        row.run = str(outcome.run.path)
        self.ready = replace(prepared, folder=outcome.run)
        if not outcome.finished_before:
            return outcome
        # by what is expected of it now: that may have been changed since
        verdict = conclude.judge_by_plan(outcome.run, outcome.plan, outcome.verdict)
        # an evaluation is judged after it, by what is expected of it now
        verdict = verdict.with_points(point for point in verdict.points if point.name != records.POINT)
        code = check.exit_code(verdict, allow_unproven=allow)
        # its training ended while we looked on
        mine = link.name in self.joined and code is Exit.OK
        return replace(outcome, verdict=verdict, exit=code, finished_before=not mine)

    def _join(self, step: PlannedStage, row: StageRow) -> Outcome | None:
        """Wait for a stage that is being trained already; what came of it, where that is no good."""
        folder = step.prepared.folder
        row.run = str(folder.path)
        self._write()
        attempt = follow.newest_attempt(folder)
        self._say(f"{step.link.name} is being trained: {folder.path}")
        interrupted = follow.until_over(folder, attempt, forward=True)
        # by what is allowed now
        attempt = replace(attempt, allow_unproven=self.order.allow_unproven)
        verdict, code = conclude.verdict_and_exit_code(folder, attempt)
        if interrupted:
            code = Exit.INTERRUPTED
        return None if code is Exit.OK else Outcome(run=folder, plan=step.plan, verdict=verdict, exit=code)

    def _write(self) -> None:
        # a full disk costs the record, not the run that goes on
        with contextlib.suppress(LaunchError):
            experiment.write(self.result.folder / RECORD, self.result.as_json(), self.result.redactor)

    def _page(self) -> None:
        """The stages so far on one page, and how far they came at its top."""
        rows = [{key: cell for key, cell in row.items() if key != "run"} for row in self.result.table()]
        state = self.result.state
        colour = {"finished": "pass", "stopped": "fail"}.get(state, "")
        lead = Lead(title=f"pipeline {self.order.chain.name}", decision=state, colour=colour, tables=(rows,))
        runs = [Path(row.run) for row in self.result.rows if row.run]
        try:
            experiment.page(runs, self.result.folder / PAGE, lead)
        except LaunchError as error:
            self._show(list(error.findings))


def _prepared(
    resolved: Facts, step: PlannedStage, judged: plan.Plan | None, *, fresh: bool
) -> tuple[Prepared, str | None]:
    """Ready to start: as it is, or started over with the reason why."""
    anew, dry = resolved.with_request(fresh=True), step.prepared
    if fresh:
        prepared = prepare.complete(anew)
        return prepared, None if prepared.output == prepared.requested_output else "--fresh"
    if dry.attempt <= 1 and dry.output and checkpoints.model_fault(plan.model_in(dry.plan, dry.output)) is None:
        return prepare.complete(anew), f"{dry.output} holds a model, and no run is known that made it"
    planned = prepare.plan_start(resolved, judged=judged)
    # with every change allowed
    decision = planned.decide(plans.known_changes(resolved.stage.schema.fields))
    passing = {*resolved.request.allowed, *_NO_INPUT}
    changes = () if decision.kind == "new" else decision.changes
    # for these its own result, or what there is of it, is not what was requested
    differs = [one.differs for one in changes if one.severity != "note" and one.what not in passing]
    if differs:
        return prepare.complete(anew), "; ".join(differs[:4])
    return planned.prepare(planned.decide(resolved.request.allowed)), None
