"""`launch sft`, `dpo`, `pipeline`, `exec`: commands that start stages and follow them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from launcher.cli.options import (
    RUN,
    Format,
    Shared,
    answer,
    app,
    require_run,
    start_several_runs,
    with_options,
)
from launcher.errors import Exit, Finding, launch_finding
from launcher.report import console

if TYPE_CHECKING:
    from launcher.planning.prepare import Prepared
    from launcher.planning.request import Request
    from launcher.redaction import Redactor
    from launcher.runs.attempt import Attempt
    from launcher.runs.rundir import RunFolder
    from launcher.verdict.check import Verdict
    from launcher.workflows.pipeline.pipeline import PipelineResult
    from launcher.workflows.pipeline.plan import PipelinePlan


def _make_stage_command(stage: str) -> Callable[..., Exit]:
    @with_options(
        "config", "overrides", "nodes", "node_rank", "main_address", "start", "background"
    )
    def command(
        shared: Shared,
        allow_corrupting_overlap: bool = Option(
            False,
            "--allow-corrupting-overlap",
            help="accept a DeepSpeed that corrupts gradients (finding overlap-corrupts)",
        ),
    ) -> Exit:
        shared.reject_ignored_options()
        request = shared.request(
            stage=stage, allow_corrupting_overlap=allow_corrupting_overlap, fresh=shared.fresh
        )
        if shared.dry_run:
            return _dry_run(request, shared)
        if shared.slurm:
            return _queue_run(request, shared)
        return _run_stage(request, shared)

    command.__doc__ = f"""Train one {stage.upper()} stage and judge the result.

    The file is validated and planned first; nothing starts while there is an error."""
    return command


app.command(
    "sft",
    epilog="Example: launch sft configs/tulu/sft_qwen7b_25pct.yaml learning_rate=1e-5 --gpus 8",
)(_make_stage_command("sft"))
app.command("dpo", epilog="Example: launch dpo configs/tulu/dpo_qwen7b.yaml --gpus 8 --dry-run")(
    _make_stage_command("dpo")
)


def _dry_run(request: Request, shared: Shared) -> Exit:
    """Answer with the plan and the command of a stage, or its batch script; start nothing."""
    from launcher.lifecycle import start
    from launcher.planning import prepare
    from launcher.planning.collect import Scope

    scope = Scope.FILE if shared.slurm else Scope.PLAN
    prepared = prepare.prepare_start(request, scope)
    findings = (*prepared.findings, *prepare.warn_of_earlier_run(prepared))
    data = prepared.as_json()
    script = None
    if shared.slurm:
        script = start.write_batch_script(prepared)
        data["batch_script"] = script

    def show() -> None:
        console.print_dry_run(prepared.plan, prepared.command, script)

    stage = str(request.stage)
    return answer(stage, shared.format, data, show, findings, redactor=prepared.redactor)


def _run_stage(request: Request, shared: Shared) -> Exit:
    """Start a stage on this machine, and follow it unless it is detached."""
    from launcher.lifecycle import on_finish, start, supervisor
    from launcher.planning import forecast, prepare
    from launcher.planning.collect import Scope
    from launcher.runs import lease, preemption, runner

    ending = shared.parse_end_options()
    on_finish.require_program(ending["on_finish"])
    # a mistake is refused here: the supervisor reads these variables too late
    runner.parse_stop_grace(os.environ.get(runner.GRACE_VARIABLE))
    preemption.parse_save_grace(os.environ.get(preemption.GRACE_VARIABLE))
    with supervisor.interruptible():
        prepared = forecast.add_forecast(prepare.prepare_start(request, Scope.START))
        if prepared.decision.kind == "finished":
            return _conclude_finished(prepared, shared)
        machine = prepared.start.machine
        # the first of several machines answers for all
        if machine is None or not machine.rank:
            lease.require_free(prepared.output)
            if request.rehearse or prepared.plan.stage.options.rehearse:
                shared.rehearse_first({"": prepared.facts}, by_itself=False)
        shared.print_findings(prepared.findings, prepared.redactor)
        folder, attempt = start.begin(prepared, say=console.say_aside, **ending)
        if shared.format == "text":
            console.print_plan(prepared.plan, folder.console(attempt.number))
        show = _answer_detached if shared.detach else show_until_over
        return show(str(request.stage), folder, attempt, prepared.findings, shared.format)


def _conclude_finished(prepared: Prepared, shared: Shared) -> Exit:
    """Answer with the verdict of a run that has nothing left to train."""
    from launcher.lifecycle import conclude
    from launcher.verdict import check

    folder = prepared.folder
    findings = prepared.findings
    shared.print_findings(findings, prepared.redactor)
    verdict = conclude.judge_by_plan(folder, prepared.plan, conclude.finish(folder))
    code = check.decide_exit_code(verdict, allow_unproven=shared.allow_unproven)
    stage = str(prepared.facts.request.stage)
    return _answer_verdict(stage, folder, verdict, code, findings, shared.format)


def _queue_run(request: Request, shared: Shared) -> Exit:
    """Queue a stage as a Slurm job."""
    from launcher.lifecycle import start, supervisor
    from launcher.planning import forecast, prepare
    from launcher.planning.collect import Scope
    from launcher.runs import slurm

    ending = shared.parse_end_options()
    prepared = forecast.add_forecast(prepare.prepare_start(request, Scope.HOST))
    if prepared.decision.kind == "finished":
        return _conclude_finished(prepared, shared)
    shared.rehearse_first({"": prepared.facts})
    findings = prepared.findings
    help = slurm.warn_of_single_cpu(prepared.plan.stage.options.slurm, prepared.plan.gpus)
    if help is not None:
        message = "the job asks for one core of each machine"
        findings = (*findings, launch_finding("warning", "slurm-one-cpu", message, help))
    with supervisor.interruptible():
        folder, job = start.queue(prepared, **ending)
    path = folder.path
    lines = (f"run: {path}", f"job: {job}", "launch runs", f"launch stop {path.name}")
    data = {"run": str(path), "job": job}
    stage = str(request.stage)
    return answer(stage, shared.format, data, lines, findings, redactor=prepared.redactor)


def _answer_detached(
    stage: str, folder: RunFolder, attempt: Attempt, findings: tuple[Finding, ...], format: Format
) -> Exit:
    """Print the commands that show and stop a run in the background."""
    from launcher.lifecycle import background

    session = None
    # only the first of several machines has it by its name
    name = str(folder.path)
    lines = [f"run: {folder.path}"]
    if not attempt.rank:
        name = folder.path.name
        session = background.open_session(folder)
    if session is not None:
        lines.append(f"tmux attach -t {session}")
    lines += [f"launch attach {name}", f"launch logs {name} -f", f"launch stop {name}"]
    data = {"run": str(folder.path), "session": session}
    return answer(stage, format, data, lines, before=findings, redactor=attempt.redactor)


def show_until_over(
    command: str,
    folder: RunFolder,
    attempt: Attempt,
    findings: tuple[Finding, ...],
    format: Format,
    *,
    forward: bool = True,
) -> Exit:
    """Show a run until it is over, and answer with its verdict.

    Ctrl-C stops the run; without `forward`, it only ends the view.
    """
    from launcher.lifecycle import follow

    try:
        follow.follow_until_over(folder, attempt, forward=forward)
    except follow.Detached:
        data = {"run": str(folder.path), "detached": True}
        lines = [f"the run continues: launch attach {folder.path.name}"]
        return answer(command, format, data, lines, before=findings, redactor=attempt.redactor)
    # imported late: it is slow, and the run should be shown at once
    from launcher.lifecycle import conclude

    if attempt.rank:
        code = conclude.decide_worker_exit_code(folder, attempt)
        data = {"run": str(folder.path), "rank": attempt.rank}
        return answer(
            command, format, data, (), code=code, before=findings, redactor=attempt.redactor
        )
    verdict, code = conclude.judge_attempt(folder, attempt)
    return _answer_verdict(command, folder, verdict, code, findings, format)


def _answer_verdict(
    command: str,
    folder: RunFolder,
    verdict: Verdict,
    code: Exit,
    findings: tuple[Finding, ...],
    format: Format,
) -> Exit:
    from launcher.report import judgement
    from launcher.runs import attempt
    from launcher.trained import next_steps

    steps = next_steps.describe_finished(folder)

    def show() -> None:
        judgement.print_verdict(verdict, folder.path.name)
        console.say(f"run: {folder.path}\nreport: {folder.report}")
        if steps is not None:
            console.say("\n".join(steps.lines()))

    data = {
        **verdict.as_json(),
        "run": str(folder.path),
        "next": None if steps is None else steps.as_json(),
    }
    redactor = attempt.find_redactor(folder)
    return answer(command, format, data, show, code=code, before=findings, redactor=redactor)


@app.command("exec", hidden=True, epilog="Example: launch exec runs/20260101T000000Z-sft-demo")
@with_options("node_rank", "main_address", "format")
def exec_command(
    shared: Shared,
    run: str = RUN,
    prepare: bool = Option(False, "--prepare", help="only add a waiting attempt, if there is none"),
    save: bool = Option(
        False, "--save", help="only ask the attempt that runs to save a checkpoint and end"
    ),
) -> Exit:
    """Start the attempt that waits in a run folder and show it: the command of tmux and Slurm
    jobs.
    """
    from launcher.lifecycle import start, supervisor

    folder = require_run(run)
    data: dict[str, object] = {"run": str(folder.path)}
    if save:
        code = Exit.OK if start.save_and_end(folder) else Exit.TRAINING
        return answer("exec", shared.format, data, (), code=code)
    if prepare:
        data["attempt"] = start.prepare_again(folder).number
        return answer("exec", shared.format, data, ())
    with supervisor.interruptible():
        folder, attempt = start.execute(folder, shared.node_rank, shared.main_address)
        return show_until_over("exec", folder, attempt, (), shared.format)


@app.command(epilog="Example: launch pipeline configs/demo/pipeline.yaml --gpus 0 --until sft")
@with_options("start", "background")
@start_several_runs
def pipeline(
    shared: Shared,
    file: Path = Argument(..., metavar="FILE", help="the pipeline file", show_default=False),
    overrides: list[str] | None = Argument(
        None,
        metavar="[STAGE.KEY=VALUE]...",
        help="replace a key of one stage: sft.learning_rate=1e-5",
        show_default=False,
    ),
    first: str | None = Option(
        None, "--from", metavar="STAGE", help="first stage to run; its inputs must exist"
    ),
    until: str | None = Option(None, "--until", metavar="STAGE", help="last stage to run"),
) -> Exit:
    """Run several stages, each on the model of the one before.

    A stage whose result is already there, and has not changed, is skipped.
    """
    from launcher.config import pipeline as chains
    from launcher.planning.collect import Scope
    from launcher.workflows.pipeline import pipeline
    from launcher.workflows.pipeline.plan import PipelineRequest, plan_stages

    request = PipelineRequest(
        chain=chains.load(file, overrides or ()),
        common=shared.request(config=file, overrides=(), fresh=shared.fresh),
        first=first,
        last=until,
        allow_unproven=shared.allow_unproven,
    )
    if shared.dry_run:
        return _dry_run_pipeline(pipeline.dry_run(request), shared)
    scope = Scope.FILE if shared.slurm else Scope.START
    plan = plan_stages(request, scope)
    warnings = [finding for finding in plan.findings if finding.severity != "note"]
    shared.print_findings(warnings, plan.redactor)
    stages = plan.resolved()
    shared.rehearse_first(stages)
    if shared.hands_over:
        facts = list(stages.values())
        gpus = max(stage.gpus for stage in facts)
        options = facts[0].stage.options.slurm
        return shared.hand_over("pipeline", request.chain.name, gpus=gpus, options=options)
    result = pipeline.run(request, plan, quiet=shared.format == "json")
    return answer(
        "pipeline",
        shared.format,
        result.as_json(),
        partial(_show_pipeline, result, plan.redactor),
        code=result.exit,
        before=result.findings,
        redactor=plan.redactor,
    )


def _dry_run_pipeline(plan: PipelinePlan, shared: Shared) -> Exit:
    steps = [plan.steps[link.name] for link in plan.links]

    def show() -> None:
        count = len(steps)
        for number, step in enumerate(steps, start=1):
            console.say(f"# stage {number} of {count}: {step.link.name}")
            console.print_dry_run(step.plan, step.prepared.command)
            if step.evaluation is not None:
                evaluation = "\n".join(step.evaluation.lines())
                console.say(evaluation, plan.redactor)

    data = {"stages": [step.as_json() for step in steps]}
    return answer("pipeline", shared.format, data, show, plan.findings, redactor=plan.redactor)


def _show_pipeline(result: PipelineResult, redactor: Redactor) -> None:
    from launcher.runs.rundir import RunFolder
    from launcher.trained import next_steps

    table = result.table()
    console.print_table(table, tuple(table[0]), redactor)
    lines = []
    row = result.stopped_at
    if row is not None:
        lines.append(f"stopped at {row.name}: {row.reason or row.status}")
    lines += [f"  {line}" for line in result.advice()]
    last = result.rows[-1].run if result.rows else None
    if result.exit is Exit.OK and last is not None:
        steps = next_steps.describe_finished(RunFolder(Path(last)))
        if steps is not None:
            lines += steps.lines()
    lines.append(f"pipeline: {result.folder}")
    if result.page is not None:
        lines.append(f"report: {result.page}")
    console.say("\n".join(lines), redactor)
