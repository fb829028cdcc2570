"""`launch sft`, `launch dpo`, `launch exec`: starting a stage and looking on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from launcher.errors import Exit, Finding, UsageError, usage

if TYPE_CHECKING:
    from launcher.attempt import Attempt
    from launcher.check import Verdict
    from launcher.preparation import Prepared, Request
    from launcher.rundir import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """What is to happen once a run has begun."""

    detach: bool = False
    on_finish: str | None = None
    on_finish_limit: str | None = None
    allow_unproven: bool = False


_NEEDS = {"--on-finish-limit": "--on-finish"}
_APART = {
    "--slurm": ("--skypilot", "--detach", "--devices", "--node-rank", "--main-address"),
    "--skypilot": (
        "--detach", "--devices", "--node-rank", "--main-address", "--on-finish", "--fresh",
        "--allow-changed-resume",
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
    """Options that would be taken and ignored. Raises UsageError with all of them."""
    # 0 is a value
    said = {n for n, value in given.items() if value is not None and value is not False}
    wrong = [
        _fault("useless-option", f"{one} says nothing without {other}")
        for one, other in _NEEDS.items()
        if one in said and other not in said
    ]
    wrong += [
        _fault("useless-option", f"{other} says nothing with {one}")
        for one, others in _APART.items()
        for other in others
        if {one, other} <= said
    ]
    if wrong:
        raise UsageError(wrong)


def _fault(code: str, message: str, help: str | None = None) -> Finding:
    return usage(code, message, help).findings[0]


def _stage_command(stage: str) -> Callable[..., None]:
    """The command that starts one stage: the same for each, but for its name."""

    def command(
        config: Config, overrides: Overrides = None, gpus: Gpus = None, nodes: Nodes = 1,
        dry_run: DryRun = False, python: Python = None, open_instruct: Checkout = None,
        allow_unpinned: Unpinned = False, allow_unproven: Unproven = False, strict: Strict = False,
        no_probe: NoProbe = False, devices: DevicesOption = None, detach: Detach = False,
        on_finish: OnFinish = None, on_finish_limit: OnFinishLimit = None,
        node_rank: NodeRank = None, main_address: MainAddress = None, slurm: Slurm = False,
        skypilot: SkyPilot = None, fresh: Fresh = False,
        allow_changed_resume: Changed = None, allow_corrupting_overlap: CorruptingOverlap = False,
        format: FormatOption = Format.text,
    ) -> None:  # fmt: skip
        from launcher.preparation import Request

        _require_sense(
            {
                "--slurm": slurm, "--skypilot": skypilot, "--detach": detach, "--devices": devices,
                "--node-rank": node_rank, "--main-address": main_address, "--on-finish": on_finish,
                "--on-finish-limit": on_finish_limit, "--fresh": fresh,
                "--allow-changed-resume": allow_changed_resume,
            }
        )  # fmt: skip
        request = Request(
            stage=stage, config=config, overrides=overrides or (), gpus=gpus, nodes=nodes,
            python=python, checkout=open_instruct, allow_unpinned=allow_unpinned, strict=strict,
            allow_corrupting_overlap=allow_corrupting_overlap,
            probe=not no_probe, devices=devices, node_rank=node_rank, main_address=main_address,
            elsewhere=slurm or skypilot is not None, fresh=fresh,
            allowed=tuple(allow_changed_resume or ()),
        )  # fmt: skip
        if dry_run:
            _dry_run(request, format)
            return
        if skypilot is not None:
            raise typer.Exit(_task(request, skypilot, format))
        after = After(
            detach=detach, on_finish=on_finish, on_finish_limit=on_finish_limit,
            allow_unproven=allow_unproven,
        )  # fmt: skip
        if slurm:
            raise typer.Exit(_queued(request, format, after))
        raise typer.Exit(_run(request, format, after))

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


def _run(request: Request, format: Format, after: After) -> Exit:
    from launcher import foresight, keeper, on_finish, preparation, rundir, runner

    told = on_finish.parsed(after.on_finish)
    on_finish.require_here(told)
    # the keeper reads it too late to say so
    runner.grace(os.environ.get(runner.GRACE_VARIABLE))
    limit = _limit(after)
    with keeper.interruptible():
        prepared = preparation.prepare(request, running=True)
        try:
            return _begun(foresight.foreseen(prepared), format, after, told, limit)
        finally:
            # the folder that was reserved, if nothing came of it
            rundir.release(prepared.folder)


def _limit(after: After) -> float:
    from launcher.attempt import ON_FINISH_S

    if after.on_finish_limit is None:
        return ON_FINISH_S
    from launcher import bench

    return bench.seconds(after.on_finish_limit) or ON_FINISH_S


def _begun(
    prepared: Prepared, format: Format, after: After, told: tuple[str, ...], limit: float
) -> Exit:
    from launcher import lease, report, start

    request, folder, found = prepared.request, prepared.folder, prepared.findings
    if prepared.decision.kind != "finished" and not (prepared.here and prepared.here.rank):
        lease.require_free(prepared.output)
    if format is Format.text:
        report.findings(found)
    if prepared.decision.kind == "finished":
        return _finished(prepared, found, format, after)
    if format is Format.text:
        report.beginning(prepared.plan, folder.console(prepared.attempt))
    folder, attempt = start.begin(
        prepared, on_finish=told, on_finish_s=limit, allow_unproven=after.allow_unproven
    )
    if after.detach:
        return _detached(str(request.stage), folder, found, format, first=not attempt.rank)
    return until_over(str(request.stage), folder, attempt, found, format)


def _finished(prepared: Prepared, found: tuple[Finding, ...], format: Format, after: After) -> Exit:
    """Nothing is left to train; the verdict and the numbers are there, whoever died before."""
    from launcher import check, start

    folder = prepared.folder
    verdict = start.judged_now(folder, prepared.plan, start.finish(folder))
    code = check.exit_code(verdict, allow_unproven=after.allow_unproven)
    return _told(str(prepared.request.stage), folder, verdict, code, found, format)


def _queued(request: Request, format: Format, after: After) -> Exit:
    """Hand the run to Slurm."""
    from launcher import foresight, keeper, on_finish, preparation, report, sbatch, start

    told, limit = on_finish.parsed(after.on_finish), _limit(after)
    prepared = foresight.foreseen(preparation.prepare(request, running=True))
    options = prepared.plan.stage.options.slurm
    few = sbatch.one_cpu(options, prepared.plan.gpus)
    found = prepared.findings
    if few is not None:
        message = "the job asks for one core of each machine"
        warned = Finding(
            severity="warning", layer="launch", code="slurm-one-cpu", message=message, help=few
        )
        found = (*found, warned)
    if prepared.decision.kind == "finished":
        report.findings(found if format is Format.text else ())
        return _finished(prepared, found, format, after)
    folder = prepared.folder
    with keeper.interruptible():
        job = start.queue(
            prepared, options, on_finish=told, on_finish_s=limit,
            allow_unproven=after.allow_unproven,
        )  # fmt: skip
    data = {"run": str(folder.path), "job": job.id}
    lines = (
        f"run: {folder.path}",
        f"job: {job.id}",
        "launch runs",
        f"launch stop {folder.path.name}",
    )
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
    return _told(command, folder, verdict, code, found, format)


def _told(
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
