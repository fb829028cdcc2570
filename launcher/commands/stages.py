"""`launch sft`, `launch dpo`, `launch exec`: starting a stage and looking on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from launcher.commands.vocabulary import (
    Changed,
    Checkout,
    Config,
    CorruptingOverlap,
    Detach,
    DevicesOption,
    DryRun,
    Format,
    FormatOption,
    Fresh,
    Gpus,
    MainAddress,
    NodeRank,
    Nodes,
    NoProbe,
    OnFinish,
    OnFinishLimit,
    Overrides,
    Python,
    RunName,
    SkyPilot,
    Slurm,
    Strict,
    Unpinned,
    Unproven,
    answer,
    app,
    found_run,
)
from launcher.errors import Exit, Finding, UsageError, said, usage

if TYPE_CHECKING:
    from launcher.attempt import Attempt
    from launcher.check import Verdict
    from launcher.preparation import Prepared, Request
    from launcher.rundir import RunFolder


# options that would be taken and ignored beside another one
_APART = {
    "slurm": ("skypilot", "detach", "devices", "node_rank", "main_address"),
    "skypilot": (
        "detach", "devices", "node_rank", "main_address", "on_finish", "fresh", "allow_changed_resume",
    ),
}  # fmt: skip


def _completed(stage: str) -> Callable[[typer.Context, str], list[str]]:
    """What the shell offers after `launch STAGE CONFIG`."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        from launcher import completion

        given = context.params
        before = given.get("overrides") or ()
        return completion.complete_override(stage, given.get("config"), before, incomplete)

    return complete


def _require_sense(given: Mapping[str, object]) -> None:
    """Raise UsageError with every option that says nothing beside another one."""
    # 0 is a value
    named = {name for name, value in given.items() if value or (value == 0 and value is not False)}
    pairs = [(one, other) for one, others in _APART.items() for other in others]
    wrong = [
        said("error", "useless-option", f"{_flag(other)} says nothing with {_flag(one)}", None)
        for one, other in pairs
        if {one, other} <= named
    ]
    if wrong:
        raise UsageError(wrong)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _stage_command(stage: str) -> Callable[..., None]:
    """The command that starts one stage: the same for each, but for its name."""

    def command(
        context: typer.Context, config: Config, overrides: Overrides = None, gpus: Gpus = None,
        nodes: Nodes = 1, dry_run: DryRun = False, python: Python = None,
        open_instruct: Checkout = None, allow_unpinned: Unpinned = False,
        allow_unproven: Unproven = False, strict: Strict = False, no_probe: NoProbe = False,
        devices: DevicesOption = None, detach: Detach = False, on_finish: OnFinish = None,
        on_finish_limit: OnFinishLimit = None, node_rank: NodeRank = None,
        main_address: MainAddress = None, slurm: Slurm = False, skypilot: SkyPilot = None,
        fresh: Fresh = False, allow_changed_resume: Changed = None,
        allow_corrupting_overlap: CorruptingOverlap = False, format: FormatOption = Format.text,
    ) -> None:  # fmt: skip
        from launcher.preparation import Request

        _require_sense(context.params)
        request = Request(
            stage=stage, config=config, overrides=overrides or (), gpus=gpus, nodes=nodes,
            python=python, checkout=open_instruct, allow_unpinned=allow_unpinned, strict=strict,
            allow_corrupting_overlap=allow_corrupting_overlap,
            probe=not no_probe, devices=devices, node_rank=node_rank, main_address=main_address,
            elsewhere=slurm or skypilot is not None, fresh=fresh,
            allowed=tuple(allow_changed_resume or ()),
        )  # fmt: skip
        after = After(on_finish, on_finish_limit, allow_unproven)
        if dry_run:
            _dry_run(request, format)
        elif skypilot is not None:
            raise typer.Exit(_task(request, skypilot, format))
        elif slurm:
            raise typer.Exit(_queued(request, format, after))
        else:
            raise typer.Exit(
                _run(
                    request,
                    format,
                    After(on_finish, on_finish_limit, allow_unproven),
                    detach=detach,
                )
            )

    # what the shell can complete is different for each stage
    argument = typer.Argument(
        metavar="[KEY=VALUE]...", show_default=False, autocompletion=_completed(stage)
    )
    command.__annotations__["overrides"] = Annotated[list[str] | None, argument]
    command.__doc__ = f"Validate, plan and run one {stage.upper()} stage, then judge it."
    return command


app.command(
    "sft",
    epilog="Example: launch sft configs/tulu/sft_qwen7b_25pct.yaml learning_rate=1e-5 --gpus 8",
)(_stage_command("sft"))
app.command("dpo", epilog="Example: launch dpo configs/tulu/dpo_qwen7b.yaml --gpus 8 --dry-run")(
    _stage_command("dpo")
)


def _dry_run(request: Request, format: Format) -> None:
    from launcher import preparation, report

    prepared = preparation.prepare(request, running=False)
    found = (*prepared.findings, *preparation.of_earlier_run(prepared))
    if format is Format.json:
        report.envelope(str(request.stage), True, found, prepared.as_json())
    else:
        report.findings(found)
        report.dry_run(prepared.plan, prepared.command)


class After(NamedTuple):
    """What is to happen once a run has ended."""

    on_finish: str | None
    limit: str | None
    allow_unproven: bool

    def hook(self) -> tuple[tuple[str, ...], float]:
        """The command as an argv, and the seconds it may take. Raises UsageError."""
        from launcher import on_finish

        if self.limit is not None and self.on_finish is None:
            raise usage("useless-option", "--on-finish-limit says nothing without --on-finish")
        return on_finish.parsed(self.on_finish), on_finish.limit(self.limit)


def _run(request: Request, format: Format, after: After, *, detach: bool) -> Exit:
    from launcher import forecast, keeper, preparation, rundir, runner, start
    from launcher import on_finish as endings

    words, seconds = after.hook()
    endings.require_here(words)
    # the keeper reads it too late to say so
    runner.grace(os.environ.get(runner.GRACE_VARIABLE))
    with keeper.interruptible():
        prepared = preparation.prepare(request, running=True)
        try:
            prepared = forecast.with_forecast(prepared)
            begin = partial(
                start.begin,
                on_finish=words,
                on_finish_s=seconds,
                allow_unproven=after.allow_unproven,
            )
            return _begun(prepared, format, begin, after.allow_unproven, detach=detach)
        finally:
            # the folder that was reserved, if nothing came of it
            rundir.release(prepared.folder)


def _begun(
    prepared: Prepared, format: Format, begin: Callable[[Prepared], tuple[RunFolder, Attempt]],
    allow_unproven: bool, *, detach: bool,
) -> Exit:  # fmt: skip
    from launcher import lease, report

    stage, folder, found = str(prepared.request.stage), prepared.folder, prepared.findings
    if prepared.decision.kind != "finished" and not (prepared.here and prepared.here.rank):
        lease.require_free(prepared.output)
    if format is Format.text:
        report.findings(found)
    if prepared.decision.kind == "finished":
        return _finished(prepared, format, allow_unproven)
    if format is Format.text:
        report.beginning(prepared.plan, folder.console(prepared.attempt))
    folder, attempt = begin(prepared)
    if detach:
        return _detached(stage, folder, found, format, first=not attempt.rank)
    return until_over(stage, folder, attempt, found, format)


def _finished(prepared: Prepared, format: Format, allow_unproven: bool) -> Exit:
    """Nothing is left to train; the verdict and the numbers are there, whoever died before."""
    from launcher import check, start

    folder, stage = prepared.folder, str(prepared.request.stage)
    verdict = start.judged_now(folder, prepared.plan, start.finish(folder))
    code = check.exit_code(verdict, allow_unproven=allow_unproven)
    return _conclude(stage, folder, verdict, code, prepared.findings, format)


def _queued(request: Request, format: Format, after: After) -> Exit:
    """Hand the run to Slurm."""
    from launcher import forecast, keeper, preparation, report, sbatch, start

    words, seconds = after.hook()
    prepared = forecast.with_forecast(preparation.prepare(request, running=True))
    options, found = prepared.plan.stage.options.slurm, prepared.findings
    few = sbatch.one_cpu(options, prepared.plan.gpus)
    if few is not None:
        message = "the job asks for one core of each machine"
        found = (*found, said("warning", "slurm-one-cpu", message, few))
    if prepared.decision.kind == "finished":
        report.findings(found if format is Format.text else ())
        return _finished(prepared, format, after.allow_unproven)
    folder = prepared.folder
    with keeper.interruptible():
        job = start.queue(
            prepared, options, on_finish=words, on_finish_s=seconds,
            allow_unproven=after.allow_unproven,
        )  # fmt: skip
    name = folder.path.name
    lines = (f"run: {folder.path}", f"job: {job.id}", "launch runs", f"launch stop {name}")
    data = {"run": str(folder.path), "job": job.id}
    return answer(str(request.stage), Exit.OK, found, data, lines, format)


def _task(request: Request, path: Path, format: Format) -> Exit:
    """Write the run as a SkyPilot task."""
    from launcher import skypilot

    found = skypilot.write(request, path)
    data = {"task": str(path)}
    return answer(str(request.stage), Exit.OK, found, data, (f"sky launch {path}",), format)


def _detached(
    stage: str, folder: RunFolder, found: tuple[Finding, ...], format: Format, *, first: bool
) -> Exit:
    """Say where the run can be looked at; only the first of several machines has it by its name."""
    from launcher import report, tmux

    session = tmux.opened(folder) if first else None
    if format is Format.json:
        data = {"run": str(folder.path), "session": session}
        report.envelope(stage, True, found, data)
        return Exit.OK
    name = folder.path.name if first else str(folder.path)
    report.say(f"run: {folder.path}")
    if session is not None:
        report.say(f"tmux attach -t {session}")
    report.say(f"launch attach {name}\nlaunch logs {name} -f\nlaunch stop {name}")
    return Exit.OK


def until_over(
    command: str, folder: RunFolder, attempt: Attempt, found: tuple[Finding, ...], format: Format,
    *, forward: bool = True,
) -> Exit:  # fmt: skip
    """Look on until an attempt is over, say what came of it."""
    from launcher import following, report

    try:
        following.until_over(folder, attempt, forward=forward)
    except following.Detached:
        if format is Format.json:
            report.envelope(command, True, found, {"run": str(folder.path), "detached": True})
        else:
            report.say(f"the run goes on: launch attach {folder.path.name}")
        return Exit.OK
    # not before: what is looked at should be shown at once, and all that starts runs is slow to import
    from launcher import start

    if attempt.rank:
        code = start.of_a_further_machine(folder, attempt)
        if format is Format.json:
            data = {"run": str(folder.path), "rank": attempt.rank}
            report.envelope(command, code is Exit.OK, found, data)
        return code
    verdict, code = start.conclusion(folder, attempt)
    return _conclude(command, folder, verdict, code, found, format)


def _conclude(
    command: str, folder: RunFolder, verdict: Verdict, code: Exit, found: tuple[Finding, ...],
    format: Format,
) -> Exit:  # fmt: skip
    """What came of a run that is over."""
    from launcher import report

    if format is Format.json:
        data = {**verdict.as_json(), "run": str(folder.path)}
        report.envelope(command, code is Exit.OK, found, data)
    else:
        report.verdict(verdict)
        report.say(f"run: {folder.path}\nreport: {folder.report}")
    return code


@app.command("exec", epilog="Example: launch exec runs/20260101T000000Z-sft-demo")
def exec_command(
    run: RunName,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="only have a further attempt wait, if none does")
    ] = False,
    node_rank: NodeRank = None,
    main_address: MainAddress = None,
    format: FormatOption = Format.text,
) -> None:
    """Start the attempt that waits in a run folder and show it; what tmux and Slurm start."""
    from launcher import keeper, report, start

    folder = found_run(run)
    if prepare:
        waiting = start.prepare_again(folder)
        if format is Format.json:
            told = {"run": str(folder.path), "attempt": waiting.number}
            report.envelope("exec", True, (), told)
        return
    with keeper.interruptible():
        folder, attempt = start.execute(folder, node_rank, main_address)
        raise typer.Exit(until_over("exec", folder, attempt, (), format))
