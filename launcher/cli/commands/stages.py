"""`launch sft`, `dpo`, `pipeline`, `exec`: starting stages and looking on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from launcher.cli.options import RUN, Format, Shared, answer, app, found_run, several_runs, takes
from launcher.errors import Exit, Finding, launch_finding
from launcher.report import console

if TYPE_CHECKING:
    from launcher.planning.prepare import Prepared
    from launcher.planning.request import Request
    from launcher.runs.attempt import Attempt
    from launcher.runs.rundir import RunFolder
    from launcher.verdict.check import Verdict


def _stage_command(stage: str) -> Callable[..., Exit]:
    @takes("config", "overrides", "nodes", "node_rank", "main_address", "start", "background")
    def command(
        shared: Shared,
        allow_corrupting_overlap: bool = Option(
            False,
            "--allow-corrupting-overlap",
            help="accept a DeepSpeed that corrupts gradients (finding overlap-corrupts)",
        ),
    ) -> Exit:
        shared.require_sense()
        request = shared.request(
            stage=stage, allow_corrupting_overlap=allow_corrupting_overlap, fresh=shared.fresh
        )
        start = _dry_run if shared.dry_run else _queue if shared.slurm else _run
        return start(request, shared)

    command.__doc__ = f"""Train one {stage.upper()} stage and judge the result.

    The file is validated and planned first; nothing starts while there is an error."""
    return command


app.command(
    "sft",
    epilog="Example: launch sft configs/tulu/sft_qwen7b_25pct.yaml learning_rate=1e-5 --gpus 8",
)(_stage_command("sft"))
app.command("dpo", epilog="Example: launch dpo configs/tulu/dpo_qwen7b.yaml --gpus 8 --dry-run")(
    _stage_command("dpo")
)


def _dry_run(request: Request, shared: Shared) -> Exit:
    from launcher.lifecycle import start
    from launcher.planning import prepare
    from launcher.planning.collect import Scope

    prepared = prepare.prepare(request, Scope.FILE if shared.slurm else Scope.PLAN)
    findings = (*prepared.findings, *prepare.of_earlier_run(prepared))
    script = start.batch_script(prepared) if shared.slurm else None
    data = {**prepared.as_json(), **({} if script is None else {"batch_script": script})}

    def show() -> None:
        console.print_dry_run(prepared.plan, prepared.command, script)

    return answer(
        str(request.stage), shared.format, data, show, findings, redactor=prepared.redactor
    )


def _run(request: Request, shared: Shared) -> Exit:
    from launcher.lifecycle import on_finish, start, supervisor
    from launcher.planning import forecast, prepare
    from launcher.planning.collect import Scope
    from launcher.runs import lease, preemption, runner

    format, ending = shared.format, shared.at_end()
    on_finish.require_program(ending["on_finish"])
    # the supervisor reads it too late to say so
    runner.parse_stop_grace(os.environ.get(runner.GRACE_VARIABLE))
    preemption.parse_save_grace(os.environ.get(preemption.GRACE_VARIABLE))
    with supervisor.interruptible():
        prepared = forecast.with_forecast(prepare.prepare(request, Scope.START))
        if prepared.decision.kind == "finished":
            return _conclude_finished(prepared, shared)
        if not (prepared.start.machine and prepared.start.machine.rank):
            lease.require_free(prepared.output)
            if request.rehearse or prepared.plan.stage.options.rehearse:
                shared.rehearse_first({"": prepared.facts}, by_itself=False)
        if format == "text":
            console.print_findings(prepared.findings, prepared.redactor)
        folder, attempt = start.begin(prepared, say=console.say_aside, **ending)
        if format == "text":
            console.print_plan(prepared.plan, folder.console(attempt.number))
        started = str(request.stage), folder, attempt, prepared.findings, format
        return _detach(*started) if shared.detach else until_over(*started)


def _conclude_finished(prepared: Prepared, shared: Shared) -> Exit:
    """Nothing is left to train; the verdict and the numbers are there, whoever died before."""
    from launcher.lifecycle import conclude
    from launcher.verdict import check

    folder, findings = prepared.folder, prepared.findings
    console.print_findings(findings if shared.format == "text" else (), prepared.redactor)
    verdict = conclude.judge_by_plan(folder, prepared.plan, conclude.finish(folder))
    code = check.exit_code(verdict, allow_unproven=shared.allow_unproven)
    return _conclude(
        str(prepared.facts.request.stage), folder, verdict, code, findings, shared.format
    )


def _queue(request: Request, shared: Shared) -> Exit:
    from launcher.lifecycle import start, supervisor
    from launcher.planning import forecast, prepare
    from launcher.planning.collect import Scope
    from launcher.runs import slurm

    ending = shared.at_end()
    prepared = forecast.with_forecast(prepare.prepare(request, Scope.HOST))
    if prepared.decision.kind == "finished":
        return _conclude_finished(prepared, shared)
    shared.rehearse_first({"": prepared.facts})
    options, findings = prepared.plan.stage.options.slurm, prepared.findings
    if (help := slurm.single_cpu_help(options, prepared.plan.gpus)) is not None:
        message = "the job asks for one core of each machine"
        findings = (*findings, launch_finding("warning", "slurm-one-cpu", message, help))
    with supervisor.interruptible():
        folder, job = start.queue(prepared, **ending)
    path = folder.path
    lines = (f"run: {path}", f"job: {job}", "launch runs", f"launch stop {path.name}")
    data = {"run": str(path), "job": job}
    return answer(
        str(request.stage), shared.format, data, lines, findings, redactor=prepared.redactor
    )


def _detach(
    stage: str, folder: RunFolder, attempt: Attempt, findings: tuple[Finding, ...], format: Format
) -> Exit:
    """Say where the run can be looked at; only the first of several machines has it by its name."""
    from launcher.lifecycle import background

    first = not attempt.rank
    session = background.open_session(folder) if first else None
    name = folder.path.name if first else str(folder.path)
    lines = [f"run: {folder.path}", *([f"tmux attach -t {session}"] if session is not None else [])]
    lines += [f"launch attach {name}", f"launch logs {name} -f", f"launch stop {name}"]
    data = {"run": str(folder.path), "session": session}
    return answer(stage, format, data, lines, before=findings, redactor=attempt.redactor)


def until_over(
    command: str,
    folder: RunFolder,
    attempt: Attempt,
    findings: tuple[Finding, ...],
    format: Format,
    *,
    forward: bool = True,
) -> Exit:
    from launcher.lifecycle import follow

    try:
        follow.until_over(folder, attempt, forward=forward)
    except follow.Detached:
        data = {"run": str(folder.path), "detached": True}
        lines = [f"the run continues: launch attach {folder.path.name}"]
        return answer(command, format, data, lines, before=findings, redactor=attempt.redactor)
    # not before: what is looked at should be shown at once, and what judges runs is slow to import
    from launcher.lifecycle import conclude

    if attempt.rank:
        code = conclude.worker_exit_code(folder, attempt)
        data = {"run": str(folder.path), "rank": attempt.rank}
        return answer(
            command, format, data, (), code=code, before=findings, redactor=attempt.redactor
        )
    verdict, code = conclude.verdict_and_exit_code(folder, attempt)
    return _conclude(command, folder, verdict, code, findings, format)


def _conclude(
    command: str,
    folder: RunFolder,
    verdict: Verdict,
    code: Exit,
    findings: tuple[Finding, ...],
    format: Format,
) -> Exit:
    from launcher.runs import attempt as attempts
    from launcher.trained import next_steps

    steps = next_steps.of_finished(folder)

    def show() -> None:
        console.print_verdict(verdict, folder.path.name)
        console.say(f"run: {folder.path}\nreport: {folder.report}")
        if steps is not None:
            console.say("\n".join(steps.lines()))

    data = {
        **verdict.as_json(),
        "run": str(folder.path),
        "next": None if steps is None else steps.as_json(),
    }
    return answer(
        command, format, data, show, code=code, before=findings, redactor=attempts.redactor(folder)
    )


def _show_next_steps(runs: Sequence[str | None]) -> None:
    """Show what to do with the model of the last of some runs."""
    from launcher.runs.rundir import RunFolder
    from launcher.trained import next_steps

    last = runs[-1] if runs else None
    steps = None if last is None else next_steps.of_finished(RunFolder(Path(last)))
    if steps is not None:
        console.say("\n".join(steps.lines()))


@app.command("exec", hidden=True, epilog="Example: launch exec runs/20260101T000000Z-sft-demo")
@takes("node_rank", "main_address", "format")
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

    folder = found_run(run)
    if save:
        ended = start.save_and_end(folder)
        code = Exit.OK if ended else Exit.TRAINING
        return answer("exec", shared.format, {"run": str(folder.path)}, (), code=code)
    if prepare:
        waiting = start.prepare_again(folder)
        return answer(
            "exec", shared.format, {"run": str(folder.path), "attempt": waiting.number}, ()
        )
    with supervisor.interruptible():
        folder, attempt = start.execute(folder, shared.node_rank, shared.main_address)
        return until_over("exec", folder, attempt, (), shared.format)


@app.command(epilog="Example: launch pipeline configs/demo/pipeline.yaml --gpus 0 --until sft")
@takes("start", "background")
@several_runs
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
    from launcher.config import pipeline as chain
    from launcher.planning.collect import Scope
    from launcher.workflows.pipeline import pipeline
    from launcher.workflows.pipeline.plan import PipelineRequest, plan_stages

    order = PipelineRequest(
        chain=chain.load(file, overrides or ()),
        common=shared.request(config=file, overrides=(), fresh=shared.fresh),
        first=first,
        last=until,
        allow_unproven=shared.allow_unproven,
    )
    if shared.dry_run:
        plan = pipeline.dry_run(order)
        steps = [plan.steps[link.name] for link in plan.links]

        def show_plan() -> None:
            for number, one in enumerate(steps):
                console.say(f"# stage {number + 1} of {len(steps)}: {one.link.name}")
                console.print_dry_run(one.plan, one.prepared.command)
                for line in one.evaluation.lines() if one.evaluation is not None else ():
                    console.say(line, plan.redactor)

        data = {"stages": [one.as_json() for one in steps]}
        return answer(
            "pipeline", shared.format, data, show_plan, plan.findings, redactor=plan.redactor
        )
    quiet = shared.format == "json"
    plan = plan_stages(order, Scope.FILE if shared.slurm else Scope.START)
    console.print_findings(
        [one for one in plan.findings if one.severity != "note" and not quiet], plan.redactor
    )
    stages = plan.resolved()
    shared.rehearse_first(stages)
    if shared.hands_over:
        gpus = max(one.gpus for one in stages.values())
        options = next(iter(stages.values())).stage.options.slurm
        return shared.hand_over("pipeline", order.chain.name, gpus=gpus, options=options)
    result = pipeline.run(order, plan, quiet=quiet)

    def show() -> None:
        table = result.table()
        say = partial(console.say, redactor=plan.redactor)
        console.print_table(table, tuple(table[0]), plan.redactor)
        if (row := result.stopped_at) is not None:
            say(f"stopped at {row.name}: {row.reason or row.status}")
        for line in result.advice():
            say(f"  {line}")
        if result.exit is Exit.OK:
            _show_next_steps([row.run for row in result.rows])
        say(f"pipeline: {result.folder}")
        if result.page is not None:
            say(f"report: {result.page}")

    data = result.as_json()
    code, before = result.exit, result.findings
    return answer(
        "pipeline", shared.format, data, show, code=code, before=before, redactor=plan.redactor
    )
