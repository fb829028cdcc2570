"""Stages run in turn, each on the model of the one before; what has not changed is not trained
again.

Whether something has changed is asked of contents, by the same comparison that a resume makes
(`resume.Decision.changes`): data, model, tokenizer, arguments, upstream's code. A model that was
trained again has another content, so whatever was made of it is made again, in a folder beside the
old one.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher import redaction
from launcher.artifacts import checkpoints
from launcher.config.pipeline import place_finding
from launcher.errors import Exit, Finding, LaunchError, launch_finding, select_errors, shorten
from launcher.lazy_dataclass import dataclass
from launcher.lifecycle import conclude, follow
from launcher.plan import plan
from launcher.planning import forecast, prepare
from launcher.planning.collect import Scope
from launcher.planning.prepare import Prepared, StartPlan
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
EVALUATED = "eval"
"""The column of the table at the end that is there if a stage was evaluated."""
_AGAIN = "trained again, beside the old one: "

Status = Literal["pending", "running", "passed", "skipped", "failed", "refused", "interrupted"]

# how it is trained, and on what: none of it is what a stage depends on
_NO_INPUT = frozenset({"gpus", "packages", "position", "reference"})


@dataclass(slots=True, kw_only=True)
class StageRow:
    """One stage in the record. `seconds` is wall time of this start of the pipeline; `reason` is
    why it did not pass, was refused, or was trained again; `whole` is whether a trained model lies
    there. `evaluation` is that of its model, None where its pipeline has none or it has not begun.
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

    def as_json(self) -> dict[str, object]:
        row = asdict(self)
        del row["whole"]
        del row["evaluation"]
        row["skipped"] = self.status == "skipped"
        row["seconds"] = round(self.seconds, 1)
        if self.evaluation is not None:
            row["eval"] = self.evaluation.as_json()
        return row

    def shown(self) -> dict[str, object]:
        losses = []
        for name in ("first_loss", "last_loss"):
            loss = self.metrics.get(name)
            if isinstance(loss, int | float):
                losses.append(f"{loss:.4g}")
        cells: dict[str, object] = {
            "stage": self.name,
            "status": self.status,
            "steps": self.steps,
            "loss": " -> ".join(losses) or None,
            "seconds": f"{self.seconds:.0f}" if self.seconds else None,
            "model": self.output,
            "run": self.run,
        }
        if self.evaluation is not None:
            cells[EVALUATED] = evaluation.summarize(self.evaluation) or self.evaluation.state
        return cells

    def ending(self) -> str:
        if self.status == "skipped":
            reason = "finished before, nothing that it depends on has changed"
            return f"{self.name}: {reason}: {self.output}"
        why = ""
        if self.reason and self.status != "passed":
            why = f": {shorten(self.reason, 300)}"
        return f"{self.name}: {self.status}{why}"

    def stop(self, status: Status, code: Exit, reason: str) -> None:
        """Record that the pipeline ends here, and why."""
        self.status = status
        self.exit = int(code)
        # a finding names its stage; the row is that of the stage
        self.reason = reason.removeprefix(f"{self.name}: ")


@dataclass(slots=True, kw_only=True)
class PipelineResult:
    """The result of one start; `exit` is the command's, `findings` say what stopped it."""

    folder: Path
    order: PipelineRequest
    rows: list[StageRow]
    key: str
    began: str
    state: str = "running"
    exit: Exit = Exit.OK
    findings: tuple[Finding, ...] = ()
    ended: str | None = None
    redactor: Redactor = field(default_factory=redaction.find_process_secrets)

    def as_json(self) -> dict[str, Any]:
        """The record; the envelope's data is the same."""
        chain = self.order.chain
        record = {
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
        redacted: dict[str, Any] = self.redactor.redact(record)
        return redacted

    def table(self) -> list[dict[str, object]]:
        """A row a stage, each with the same columns."""
        shown = [row.shown() for row in self.rows]
        if any(EVALUATED in row for row in shown):
            for row in shown:
                row.setdefault(EVALUATED, None)
        return shown

    @property
    def page(self) -> Path | None:
        """The page of all stages; None if none has begun."""
        page = self.folder / PAGE
        return page if page.exists() else None

    @property
    def stopped_at(self) -> StageRow | None:
        for row in self.rows:
            if row.status in ("failed", "refused", "interrupted"):
                return row
        return None

    def advice(self) -> list[str]:
        """How to continue, a way a line; empty if all stages have passed."""
        row = self.stopped_at
        if row is None:
            return []
        lines = [f"the same command with `--from {row.name} --fresh` trains it again"]
        measured = row.evaluation
        if measured is not None and not measured.passed:
            if measured.state != "measured":
                return [f"the same command evaluates {row.name} again; what is trained is skipped"]
            again = "with another `expect` the same command judges the same numbers again"
            lines.insert(0, again)
        elif row.status != "failed" or row.exit != Exit.VERDICT or not row.whole:
            return [f"the same command continues with {row.name}; what is finished is skipped"]
        elif row.verdict == "unproven":
            lines.append("with `--allow-unproven` an unproven verdict counts as success")
        following = self.rows[self.rows.index(row) + 1 :]
        if following:
            lines.append(f"with `--from {following[0].name}` it takes its model as it is")
        return lines


def run(order: PipelineRequest, planned: PipelinePlan, *, quiet: bool = False) -> PipelineResult:
    """Run the stages that are to run, one after the other; stops where one does not pass.

    Raises NotReady if the pipeline is running already.
    """
    chain = order.chain
    root = order.common.runs or rundir.find_runs_root()
    key = experiment.digest_values([str(chain.path.absolute()), os.getcwd()])
    redactor = planned.redactor
    series = Campaign(kind=KIND, key=key, name=redactor.redact(chain.name), root=root)
    message = "this pipeline is running already"
    help = "launch runs shows its stage; launch stop ends it"
    running = launch_finding("error", "pipeline-running", message, help, file=str(chain.path))
    # a finished pipeline keeps its record
    before = series.earlier()
    is_over = before is not None and rundir.read_json(before / RECORD).get("state") == "finished"
    with series.opened(fresh=is_over, taken=running) as folder:
        result = PipelineResult(
            folder=folder,
            order=order,
            rows=[_create_row(planned.steps[link.name]) for link in planned.links],
            key=key,
            began=rundir.format_utc_now(),
            redactor=redactor,
        )
        _Runner(order, planned, result, quiet).run()
    return result


def _create_row(step: PlannedStage) -> StageRow:
    stage = step.plan.stage
    return StageRow(
        name=step.link.name,
        stage=stage.options.stage,
        config=str(step.link.config),
        model=str(step.plan.values.get(stage.entry.names.model)),
        output=str(step.output),
    )


def dry_run(order: PipelineRequest) -> PipelinePlan:
    """What would be started, with warnings about earlier runs. Raises like `plans.plan_stages`."""
    planned = plans.plan_stages(order, Scope.PLAN)
    findings = list(planned.findings)
    for link in planned.links:
        for finding in prepare.warn_of_earlier_run(planned.steps[link.name].prepared):
            findings.append(place_finding(link, finding))
    return replace(planned, findings=tuple(findings))


class _Runner:
    """Runs the stages of a pipeline in turn. `joined` are those that were running already."""

    def __init__(
        self, order: PipelineRequest, planned: PipelinePlan, result: PipelineResult, quiet: bool
    ) -> None:
        self.order = order
        self.planned = planned
        self.result = result
        self.quiet = quiet
        self.models = {name: step.model for name, step in planned.steps.items()}
        self.joined = {step.link.name for step in planned.live}
        # the stage whose turn it is, once it was started, or was found to have run already
        self.ready: Prepared | None = None

    def run(self) -> None:
        result = self.result
        self._write_record()
        with experiment.interruptible() as stop:
            self._run_stages()
        if stop.requested:
            result.exit = Exit.INTERRUPTED
            for row in result.rows:
                if row.status == "running":
                    row.status = "interrupted"
        states = {Exit.OK: "finished", Exit.INTERRUPTED: "interrupted"}
        result.state = states.get(result.exit, "stopped")
        result.ended = rundir.format_utc_now()
        self._write_page()

    def _run_stages(self) -> None:
        rows = self.result.rows
        # until these are over, no other stage gets their GPUs
        for row in rows:
            if row.name in self.joined and not self._do_work(row, self._join_training):
                return
        for number, row in enumerate(rows, 1):
            title = f"stage {number} of {len(rows)}: {row.name}  ({row.stage}, {row.config})"
            self._print_line(title)
            if not self._do_work(row, self._train_stage) or not self._evaluate_stage(row):
                return

    def _evaluate_stage(self, row: StageRow) -> bool:
        """Evaluate the model of a stage that has passed, if there is an evaluation; whether to go
        on.
        """
        link = self.planned.steps[row.name].link
        if self.ready is None:
            return True
        task = evaluation.plan_evaluation(link, self.ready, self.models[row.name])
        if task is None:
            return True
        reused = evaluation.is_finished(task)
        if not reused:
            log = task.folder.console(task.folder.attempts() + 1)
            self._print_line(f"{row.name}: evaluating, log: {log}")
        trained = row.status
        row.status = "running"
        self._write_record()
        began = time.monotonic()
        try:
            attempt = self.ready.folder.attempts()
            record = evaluation.evaluate(task, self.ready.start.devices, attempt)
        except LaunchError as error:
            row.evaluation = records.read_evaluation(task.run)
            self._stop_at(row, "refused", error.exit_code, error.findings)
            return False
        row.seconds += time.monotonic() - began
        row.evaluation = record
        row.status = trained
        row.verdict = conclude.finish(task.run).status
        code = evaluation.decide_exit_code(record)
        if code is not Exit.OK:
            status: Status = "interrupted" if code is Exit.INTERRUPTED else "failed"
            self._stop_at(row, status, code, evaluation.list_faults(task, record))
        self._write_page()
        self._print_line(evaluation.describe_ending(row.name, record, reused=reused))
        return code is Exit.OK

    def _stop_at(
        self, row: StageRow, status: Status, code: Exit, findings: Sequence[Finding]
    ) -> None:
        stops = select_errors(findings) or findings
        reason = stops[0].message if stops else f"its evaluation was {status}"
        row.stop(status, code, str(reason))
        self.result.exit = code
        self.result.findings = tuple(findings)
        self._print_findings(findings)

    def _do_work(
        self, row: StageRow, work: Callable[[PlannedStage, StageRow], Outcome | None]
    ) -> bool:
        """Do `work` with a stage, and record its outcome; whether the pipeline can go on."""
        began = time.monotonic()
        row.status = "running"
        self._write_record()
        try:
            outcome = work(self.planned.steps[row.name], row)
        except LaunchError as error:
            self._stop_at(row, "refused", error.exit_code, error.findings)
            if row.run is not None and not os.path.isdir(row.run):
                # it never began
                row.run = None
        else:
            row.seconds += time.monotonic() - began
            if outcome is None:
                row.status = "pending"
                return True
            self._record_outcome(row, outcome)
        self._write_page()
        self._print_line(row.ending())
        return self.result.exit is Exit.OK

    def _print_line(self, line: str) -> None:
        # machines get one answer at the end
        if not self.quiet:
            console.say(line, self.result.redactor)

    def _print_findings(self, findings: Sequence[Finding]) -> None:
        if not self.quiet:
            console.print_findings(list(findings), self.result.redactor)

    def _record_outcome(self, row: StageRow, outcome: Outcome) -> None:
        verdict = outcome.verdict
        row.exit = int(outcome.exit)
        row.verdict = verdict.status
        row.steps = verdict.steps
        row.metrics = dict(verdict.metrics)
        row.whole = checkpoints.find_model_fault(self.models[row.name]) is None
        self.result.exit = outcome.exit
        if outcome.exit is Exit.OK:
            row.status = "skipped" if outcome.finished_before else "passed"
        else:
            row.status = "interrupted" if outcome.interrupted else "failed"
            row.reason = outcome.reason

    def _train_stage(self, step: PlannedStage, row: StageRow) -> Outcome:
        link = step.link
        prepared = forecast.add_forecast(self._prepare_stage(step, row))
        self.ready = prepared
        output = prepared.output or step.output
        self.models[link.name] = plan.find_model_in(prepared.plan, output)
        row.output = str(output)
        row.run = str(prepared.folder.path)
        if row.reason is not None:
            why = row.reason.removeprefix(_AGAIN)
            message = f"{link.name} is trained again, into {output}: {why}"
            place = link.origin().place
            self._print_findings([launch_finding("note", "pipeline-restarts", message, **place)])
        self._write_record()
        # what validation said has been shown
        shown = {finding.message for finding in self.planned.findings}
        new = []
        for finding in prepared.findings:
            # that a stage is finished is shown at its end
            if finding.message not in shown and finding.code != "already-finished":
                new.append(finding)
        self._print_findings(new)
        if not self.quiet and prepared.decision.kind != "finished":
            console.print_plan(prepared.plan, prepared.folder.console(prepared.attempt))
        allow = self.order.allow_unproven
        outcome = experiment.run_prepared(prepared, allow_unproven=allow)
        row.run = str(outcome.run.path)
        self.ready = replace(prepared, folder=outcome.run)
        if not outcome.finished_before:
            return outcome
        # by what is expected now: that may have been changed since
        verdict = conclude.judge_by_plan(outcome.run, outcome.plan, outcome.verdict)
        # the evaluation comes after it
        points = [point for point in verdict.points if point.name != records.POINT]
        verdict = verdict.with_points(points)
        code = check.decide_exit_code(verdict, allow_unproven=allow)
        # its training may have ended while this pipeline waited for it
        was_joined = link.name in self.joined and code is Exit.OK
        return replace(outcome, verdict=verdict, exit=code, finished_before=not was_joined)

    def _prepare_stage(self, step: PlannedStage, row: StageRow) -> Prepared:
        """Prepare a stage to start; `row.reason` says why if it is trained again."""
        link = step.link
        names = plans.list_known_changes(step.resolved)
        allowed = tuple(name for name in self.order.common.allowed if name in names)
        facts = step.resolved.with_request(allowed=allowed, fresh=False)
        # nothing has happened since the first one was judged
        is_first = row is self.result.rows[0] and not self.joined
        judged = step.judged if is_first and link.source is None else None
        if link.source is not None:
            # now that its model is there
            source = self.models[link.source]
            row.model = str(source)
            overrides = plans.override_model(step.plan.stage.options.backend, source)
            file = step.file.with_overrides(*overrides, allowed=allowed)
            facts = facts.with_file(file, file.read())
        facts = facts.look_again()
        if self.order.common.fresh:
            prepared = prepare.complete(facts.with_request(fresh=True))
            if prepared.output != prepared.requested_output:
                row.reason = f"{_AGAIN}--fresh"
            return prepared
        if step.prepared.attempt <= 1 and checkpoints.find_model_fault(step.model) is None:
            reason = f"{step.output} holds a model, and no run is known that made it"
        else:
            start = prepare.plan_start(facts, judged=judged)
            reason = _find_changes(start)
            if not reason:
                return start.prepare(start.decide(allowed))
        row.reason = f"{_AGAIN}{reason}"
        return prepare.complete(facts.with_request(fresh=True))

    def _join_training(self, step: PlannedStage, row: StageRow) -> Outcome | None:
        """Wait for a stage that is being trained already; its outcome if it did not pass."""
        folder = step.prepared.folder
        row.run = str(folder.path)
        self._write_record()
        attempt = follow.find_newest_attempt(folder)
        self._print_line(f"{step.link.name} is being trained: {folder.path}")
        interrupted = follow.follow_until_over(folder, attempt, forward=True)
        # by what is allowed now
        attempt = replace(attempt, allow_unproven=self.order.allow_unproven)
        verdict, code = conclude.judge_attempt(folder, attempt)
        if interrupted:
            code = Exit.INTERRUPTED
        if code is Exit.OK:
            return None
        return Outcome(run=folder, plan=step.plan, verdict=verdict, exit=code)

    def _write_record(self) -> None:
        # a full disk costs the record, not the run that goes on
        with contextlib.suppress(LaunchError):
            path = self.result.folder / RECORD
            experiment.write(path, self.result.as_json(), self.result.redactor)

    def _write_page(self) -> None:
        """Write the stages so far on one page, with the state at its top, and into the record."""
        rows = self.result.table()
        for row in rows:
            del row["run"]
        state = self.result.state
        colour = {"finished": "pass", "stopped": "fail"}.get(state, "")
        title = f"pipeline {self.order.chain.name}"
        lead = Lead(title=title, decision=state, colour=colour, tables=(rows,))
        runs = [Path(row.run) for row in self.result.rows if row.run]
        try:
            experiment.write_page(runs, self.result.folder / PAGE, lead)
        except LaunchError as error:
            self._print_findings(error.findings)
        self._write_record()


def _find_changes(start: StartPlan) -> str:
    """What differs from the run that made the stage's result; empty if nothing does."""
    # with every change allowed
    decision = start.decide(plans.list_known_changes(start.facts))
    if decision.kind == "new":
        return ""
    passing = {*start.facts.request.allowed, *_NO_INPUT}
    differs = []
    for change in decision.changes:
        if change.severity != "note" and change.what not in passing:
            differs.append(change.differs)
    return "; ".join(differs[:4])
