"""The command line: each command parses, calls, reports and returns an exit code."""

from __future__ import annotations

import datetime
import errno
import os
import platform
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    UsageError,
    errors,
)

if TYPE_CHECKING:
    # only for annotations: validation must not pay for importing what starts a run
    from launcher.attempt import Attempt
    from launcher.fix import Fix
    from launcher.preparation import Request
    from launcher.rundir import RunFolder
    from launcher.upstream import Locator

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Start SFT and DPO stages from YAML, and prove afterwards that what was asked for is what ran.",
)


def complete_key(incomplete: str) -> list[str]:
    """Names of arguments that start like this, for the shell."""
    from launcher import completion

    return completion.complete_key(incomplete)


class Format(str, Enum):  # noqa: UP042 - StrEnum is not what typer looks for
    """How to answer."""

    text = "text"
    json = "json"


class Findings(str, Enum):  # noqa: UP042
    """How to answer where findings are all that there is to say."""

    text = "text"
    json = "json"
    github = "github"
    sarif = "sarif"


FindingsOption = Annotated[
    Findings, typer.Option("--format", help="text, json, github (annotations) or sarif")
]
FormatOption = Annotated[Format, typer.Option("--format", help="text, or json for machines")]
Config = Annotated[Path, typer.Argument(help="the stage file", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)
]


def _completed(stage: str) -> Callable[[typer.Context, str], list[str]]:
    """What the shell offers after `launch STAGE CONFIG`."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        from launcher import completion

        given = context.params
        before = given.get("overrides") or ()
        return completion.complete_override(stage, given.get("config"), before, incomplete)

    return complete


Gpus = Annotated[
    int | None, typer.Option("--gpus", min=0, help="GPUs on this machine; 0 is the CPU")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="machines")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print the plan and the command, start nothing")
]
Python = Annotated[Path | None, typer.Option("--python", help="the trainer's Python")]
Checkout = Annotated[
    Path | None, typer.Option("--open-instruct", help="the open-instruct checkout")
]
Unpinned = Annotated[
    bool, typer.Option("--allow-unpinned", help="go on at another commit than the pin")
]
Unproven = Annotated[
    bool, typer.Option("--allow-unproven", help="an unproven verdict is good enough")
]
StageOption = Annotated[
    str | None, typer.Option("--stage", help="sft or dpo, where the file does not say")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="open_instruct or trl, where no file says")
]
Strict = Annotated[bool, typer.Option("--strict", help="warnings stop too")]
NoProbe = Annotated[
    bool, typer.Option("--no-probe", help="upstream's script alone: nothing is counted or enforced")
]


DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="2,3", help="these GPUs; default: free ones, as many as --gpus"
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="start over, into a folder beside what is there")
]
Changed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-changed-resume", metavar="NAME", help="go on although NAME is not as it was"
    ),
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, help="which of several machines this is, from 0")
]
MainAddress = Annotated[
    str | None,
    typer.Option("--main-address", metavar="HOST[:PORT]", help="the first of several machines"),
]
Slurm = Annotated[
    bool, typer.Option("--slurm", help="queue it as a Slurm job, on --nodes machines")
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="KEY=VALUE", help="an option of sbatch (several times)"),
]
SkyPilot = Annotated[
    Path | None,
    typer.Option("--skypilot", metavar="FILE", help="write a SkyPilot task, start nothing"),
]
Accelerator = Annotated[
    str | None, typer.Option("--accelerator", help="which GPU, for --skypilot: H100")
]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="come back at once; the run is in a tmux session of its own"),
]
StageFile = Annotated[Path | None, typer.Argument(help="the stage file", show_default=False)]
Repeat = Annotated[
    str | None,
    typer.Option(
        "--repeat", metavar="RUN", help="this run again, into a new folder; no CONFIG then"
    ),
]
OnFinish = Annotated[
    str | None,
    typer.Option(
        "--on-finish", metavar="CMD", help="run this at the end, however it ends; no shell"
    ),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="a run, a unique prefix of its name, or `last`")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """What is to happen once a run has begun."""

    detach: bool = False
    on_finish: str | None = None
    allow_unproven: bool = False
    before: Mapping[str, Any] | None = None


_NEEDS = {"--sbatch": "--slurm", "--accelerator": "--skypilot"}
_APART = {
    "--slurm": ("--skypilot", "--detach", "--devices", "--node-rank", "--main-address"),
    "--skypilot": (
        "--detach", "--devices", "--node-rank", "--main-address", "--on-finish", "--fresh",
        "--allow-changed-resume",
    ),
}  # fmt: skip


def _require_sense(given: Mapping[str, object]) -> None:
    """Options that would be taken and ignored. Raises UsageError with all of them."""
    # 0 is a value
    said = {n for n, value in given.items() if value is not None and value is not False}
    wrong = [
        _usage("useless-option", f"{one} says nothing without {other}")
        for one, other in _NEEDS.items()
        if one in said and other not in said
    ]
    wrong += [
        _usage("useless-option", f"{other} says nothing with {one}")
        for one, others in _APART.items()
        for other in others
        if {one, other} <= said
    ]
    if wrong:
        raise UsageError(wrong)


def _repeated(
    stage: str,
    run: str,
    config: Path | None,
    overrides: list[str] | None,
    gpus: int | None,
    nodes: int,
) -> tuple[Path, list[str] | None, int | None, int, Mapping[str, Any]]:
    """`--repeat RUN`: its resolved stage file, its GPUs and machines unless others are named."""
    from launcher import repeat

    # what stands first is taken for the file, and there is none
    words = [*([str(config)] if config is not None else []), *(overrides or [])]
    folder = _found(run)
    told = repeat.of_run(folder, stage)
    repeat.enter(told)
    plan = told.get("plan") or {}
    asked = gpus if gpus is not None else plan.get("gpus")
    return folder.stage_file, words, asked, nodes if nodes > 1 else plan.get("nodes", 1), told


def _stage_command(stage: str) -> Callable[..., None]:
    """The command that starts one stage: the same for each, but for its name."""

    def command(
        config: StageFile = None, overrides: Overrides = None, gpus: Gpus = None, nodes: Nodes = 1,
        dry_run: DryRun = False, python: Python = None, open_instruct: Checkout = None,
        allow_unpinned: Unpinned = False, allow_unproven: Unproven = False, strict: Strict = False,
        no_probe: NoProbe = False, devices: DevicesOption = None, detach: Detach = False,
        on_finish: OnFinish = None, repeat: Repeat = None, node_rank: NodeRank = None,
        main_address: MainAddress = None, slurm: Slurm = False, sbatch: Sbatch = None,
        skypilot: SkyPilot = None, accelerator: Accelerator = None, fresh: Fresh = False,
        allow_changed_resume: Changed = None,
        format: FormatOption = Format.text,
    ) -> None:  # fmt: skip
        from launcher.preparation import Request

        _require_sense(
            {
                "--slurm": slurm, "--skypilot": skypilot, "--sbatch": sbatch,
                "--accelerator": accelerator, "--detach": detach, "--devices": devices,
                "--node-rank": node_rank, "--main-address": main_address, "--on-finish": on_finish,
                "--fresh": fresh, "--allow-changed-resume": allow_changed_resume,
            }
        )  # fmt: skip
        before = None
        if repeat is not None:
            # relative to where this was said, not to where the run was
            python, open_instruct, skypilot = (
                one.absolute() if one is not None and (one.exists() or one is skypilot) else one
                for one in (python, open_instruct, skypilot)
            )
            config, overrides, gpus, nodes, before = _repeated(
                stage, repeat, config, overrides, gpus, nodes
            )
        elif config is None:
            help = f"launch {stage} CONFIG, or launch {stage} --repeat RUN"
            raise UsageError(_usage("no-config", "which stage file?", help))
        request = Request(
            stage=stage, config=config, overrides=overrides or (), gpus=gpus, nodes=nodes,
            python=python, checkout=open_instruct, allow_unpinned=allow_unpinned, strict=strict,
            probe=not no_probe, devices=devices, node_rank=node_rank, main_address=main_address,
            elsewhere=slurm or skypilot is not None, fresh=fresh or repeat is not None,
            allowed=tuple(allow_changed_resume or ()),
        )  # fmt: skip
        if dry_run:
            _dry_run(request, format)
            return
        if skypilot is not None:
            raise typer.Exit(_task(request, skypilot, accelerator, format))
        after = After(detach=detach, on_finish=on_finish, allow_unproven=allow_unproven,
                      before=before)  # fmt: skip
        if slurm:
            raise typer.Exit(_queued(request, format, after, sbatch or []))
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
    if format is Format.json:
        report.envelope(str(request.stage), True, prepared.findings, prepared.as_json())
    else:
        report.findings(prepared.findings)
        report.dry_run(prepared.plan, prepared.command)


def _run(request: Request, format: Format, after: After) -> Exit:
    from launcher import on_finish, preparation, report, runner, start

    told = on_finish.parsed(after.on_finish)
    # the keeper reads it too late to say so
    runner.grace(os.environ.get(runner.GRACE_VARIABLE))
    prepared = preparation.prepare(request, running=True)
    folder = prepared.folder
    found = prepared.findings
    if after.before is not None:
        differing = start.differences(prepared, after.before)
        found = (*found, *differing)
        if format is Format.text and not differing:
            report.say("repeated: nothing differs here from what the run recorded")
    if format is Format.text:
        report.findings(found)
    if prepared.decision.kind == "finished":
        return _finished(str(request.stage), folder, found, format)
    if format is Format.text:
        report.beginning(prepared.plan, folder.console(prepared.attempt))
    folder, attempt = start.begin(prepared, on_finish=told, allow_unproven=after.allow_unproven)
    if after.detach:
        return _detached(str(request.stage), folder, found, format, first=not attempt.rank)
    return _until_over(str(request.stage), folder, attempt, found, format)


def _finished(stage: str, folder: RunFolder, found: tuple[Finding, ...], format: Format) -> Exit:
    """Nothing is left to train; the verdict and the numbers are there, whoever died before."""
    from launcher import report, start

    verdict = start.finish(folder)
    if format is Format.json:
        report.envelope(stage, True, found, {**verdict.as_json(), "run": str(folder.path)})
    else:
        report.say(f"run: {folder.path}\nreport: {folder.report}")
    return Exit.OK


def _queued(request: Request, format: Format, after: After, words: list[str]) -> Exit:
    """Hand the run to Slurm."""
    from launcher import on_finish, preparation, report, sbatch, start

    def complain(code: str, key: str, message: str, help: str | None) -> Finding:
        return _usage(code, message, help)

    options, wrong = sbatch.pairs(words, complain)
    if wrong:
        raise UsageError(wrong)
    told = on_finish.parsed(after.on_finish)
    prepared = preparation.prepare(request, running=True)
    options = {**prepared.plan.stage.options.slurm, **options}
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
        return _finished(str(request.stage), prepared.folder, found, format)
    job = start.queue(prepared, options, on_finish=told, allow_unproven=after.allow_unproven)
    folder = prepared.folder
    if format is Format.json:
        data = {"run": str(folder.path), "job": job.id}
        report.envelope(str(request.stage), True, found, data)
    else:
        report.findings(found)
        name = folder.path.name
        report.say(f"run: {folder.path}\njob: {job.id}\nlaunch runs\nlaunch stop {name}")
    return Exit.OK


def _task(request: Request, path: Path, accelerator: str | None, format: Format) -> Exit:
    """Write the run as a SkyPilot task."""
    from launcher import clouds, report

    found = clouds.write(request, path, accelerator)
    if format is Format.json:
        report.envelope(str(request.stage), True, found, {"task": str(path)})
    else:
        report.findings(found)
        report.say(f"sky launch {path}")
    return Exit.OK


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


def _until_over(
    command: str, folder: RunFolder, attempt: Attempt, found: tuple[Finding, ...], format: Format,
    *, forward: bool = True,
) -> Exit:  # fmt: skip
    """Look on until an attempt is over, say what came of it."""
    from launcher import following, report, start

    try:
        following.until_over(folder, attempt, forward=forward)
    except following.Detached:
        if format is Format.json:
            report.envelope(command, True, found, {"run": str(folder.path), "detached": True})
        else:
            report.say(f"the run goes on: launch attach {folder.path.name}")
        return Exit.OK
    if attempt.rank:
        code = start.of_a_further_machine(folder, attempt)
        if format is Format.json:
            data = {"run": str(folder.path), "rank": attempt.rank}
            report.envelope(command, code is Exit.OK, found, data)
        return code
    verdict, code = start.conclusion(folder, attempt)
    if format is Format.json:
        data = {**verdict.as_json(), "run": str(folder.path)}
        report.envelope(command, code is Exit.OK, found, data)
    else:
        report.verdict(verdict)
        report.say(f"run: {folder.path}\nreport: {folder.report}")
    return code


@app.command(
    epilog="Example: launch plan configs/tulu/sft_qwen7b_25pct.yaml --gpus 1,2,8 --row-tokens 290:1100"
)
def plan(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="1,2,8", help="counts on each machine")
    ] = "8",
    nodes: Nodes = 1,
    row_tokens: Annotated[
        str | None, typer.Option("--row-tokens", metavar="MEAN:MAX", help="tokens a row")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="rows of the data set")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="which one: H100, A100")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GIB", help="default: of the GPUs here")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="of one GPU and hour")] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option("--tokens-per-second", help="on all GPUs together, as measured")
    ] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help="flash_2, flash_3, flash_4, sdpa or eager")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="MODEL", help="as large as this model")
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="the largest per-device batch that fits, global batch kept"),
    ] = False,
    why: Annotated[bool, typer.Option("--why", help="every part with its formula")] = False,
    stage: StageOption = None,
    python: Python = None,
    open_instruct: Checkout = None,
    allow_unpinned: Unpinned = False,
    format: FormatOption = Format.text,
) -> None:
    """Say what a stage needs on so many GPUs: batch, steps, memory by part, time, cost, disk."""
    from launcher import forecast, report
    from launcher.preparation import Request

    request = Request(
        stage=_stage(stage), config=config, overrides=overrides or (), nodes=nodes, python=python,
        checkout=open_instruct, allow_unpinned=allow_unpinned,
    )  # fmt: skip
    terms = forecast.Terms(
        row_tokens=row_tokens, rows=rows, gpu=gpu, gpu_memory=gpu_memory, price=price,
        tokens_per_second=tokens_per_second, attention=attention, shape=shape, fit=fit,
    )  # fmt: skip
    told = forecast.make(request, forecast.counts(gpus), terms)
    if format is Format.json:
        report.envelope("plan", True, told.findings, told.as_json(why=why))
    else:
        report.findings(told.findings)
        report.say("\n".join(told.lines(why=why)))


@app.command(
    "validate-config", epilog="Example: launch validate-config configs/tulu/*.yaml --strict"
)
def validate_config(
    paths: Annotated[list[Path], typer.Argument(help="stage files", show_default=False)],
    stage: StageOption = None,
    open_instruct: Checkout = None,
    allow_unpinned: Unpinned = False,
    strict: Strict = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="rewrite what is mechanical, keep comments")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="show what --fix would rewrite, write nothing")
    ] = False,
    format: FindingsOption = Findings.text,
) -> None:
    """Say everything that upstream would refuse, ignore or misread; no GPU, no packages needed."""
    from launcher import upstream

    locator = upstream.Locator(checkout=open_instruct, allow_unpinned=allow_unpinned)
    stage = _stage(stage)
    mended: dict[Path, Fix] = {}
    found: list[Finding] = []
    if fix or diff:
        quiet = format is not Findings.text
        mended, found = _fix(paths, stage, locator, write=not diff, quiet=quiet)
    not_ready = bool(found)
    files: list[dict[str, object]] = []
    for path in paths:
        told, mine = _judge_file(path, stage, locator)
        if path in mended:
            told["fix"] = mended[path].as_json()
            mine = mended[path].with_reasons(mine)
        files.append({"path": str(path), "valid": not errors(mine, strict=strict), **told})
        found += mine
    ok = all(entry["valid"] for entry in files)
    _told("validate-config", ok and not not_ready, found, files, format)
    raise typer.Exit(Exit.NOT_READY if not_ready else Exit.OK if ok else Exit.CONFIG)


def _told(
    command: str, ok: bool, found: list[Finding], files: list[dict[str, object]], format: Findings
) -> None:
    """What was found in each file, in the form that was asked for."""
    from launcher import report
    from launcher.redaction import redact

    # a message may quote what was given
    found = redact(found)
    if format is Findings.json:
        report.envelope(command, ok, found, {"files": files})
    elif format in {Findings.sarif, Findings.github}:
        from launcher import annotations

        if format is Findings.sarif:
            report.plain_json(annotations.sarif(found))
        elif found:
            report.say(annotations.github(found))
    else:
        report.findings(found)
        for entry in files:
            state = "valid" if entry["valid"] else "invalid"
            report.say(f"{entry['path']}: {state}{_checked(entry)}")


def _fix(
    paths: list[Path], stage: str | None, locator: Locator, *, write: bool, quiet: bool
) -> tuple[dict[Path, Fix], list[Finding]]:
    """Mend what is mechanical in each file, or only show it; what was done, and what went wrong."""
    from launcher import fix, report

    done: dict[Path, Fix] = {}
    failed: list[Finding] = []
    for path in paths:
        try:
            mended = fix.of_file(path, stage_name=stage, locator=locator)
            if write:
                fix.apply(mended)
        except InvalidConfig:
            # judging the file says why it cannot be read
            continue
        except NotReady as error:
            failed += error.findings
            continue
        done[path] = mended
        if not quiet and not write:
            report.raw(mended.diff())
        for change in mended.changes if write and not quiet else ():
            report.say(f"{path}:{change.line}: {change.what}")
    return done, failed


def _judge_file(
    path: Path, stage: str | None, locator: Locator
) -> tuple[dict[str, object], tuple[Finding, ...]]:
    """What is known of one file, and everything found about it."""
    from launcher import config
    from launcher import stage as stages

    try:
        loaded = config.load(path)
        judged = stages.judge(loaded, stage=stage, locator=locator)
    except InvalidConfig as error:
        return {}, error.findings
    source = judged.upstream.as_json() if judged.upstream else None
    return {"stage": judged.stage, "shape": loaded.shape, "upstream": source}, judged.findings


def _checked(entry: dict[str, object]) -> str:
    source = entry.get("upstream")
    if not isinstance(source, dict):
        return ""
    where = source["root"] if source["root"] else "the committed snapshot"
    return f" ({entry['stage']}, {source['backend']} {source['version']}, {where})"


@app.command(epilog="Example: launch explain use_liger_kernel --stage sft")
def explain(
    key: Annotated[
        str, typer.Argument(help="an argument of upstream's", autocompletion=complete_key)
    ],
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="a stage file", show_default=False)
    ] = None,
    overrides: Overrides = None,
    stage: StageOption = None,
    backend: BackendOption = None,
    open_instruct: Checkout = None,
    allow_unpinned: Unpinned = False,
    format: FormatOption = Format.text,
) -> None:
    """Say what an argument is, who reads it, its value here and who set it, and what became of it."""
    from launcher import config as configs
    from launcher import explain, report, upstream

    locator = upstream.Locator(checkout=open_instruct, allow_unpinned=allow_unpinned)
    loaded = configs.load(config, overrides or ()) if config is not None else None
    told = explain.explain(
        key, locator=locator, config=loaded, asked=_stage(stage), backend=_backend(backend)
    )
    if not any(one.known for one in told):
        near = " or ".join(f"`{name}`" for name in explain.near(key))
        help = f"did you mean {near}?" if near else "launch schema lists them all"
        raise UsageError(_usage("no-such-key", f"`{key}` never was an argument here", help))
    if format is Format.json:
        report.envelope("explain", True, (), {"explained": [one.as_json() for one in told]})
    else:
        report.say("\n\n".join("\n".join(one.lines()) for one in told))


@app.command(epilog="Example: launch schema --json-schema > stage.schema.json")
def schema(
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="for editors: completion, hover, red underlines")
    ] = False,
    stage: StageOption = None,
    backend: BackendOption = None,
    open_instruct: Checkout = None,
    allow_unpinned: Unpinned = False,
    format: FormatOption = Format.text,
) -> None:
    """List every argument of a stage, or print the JSON Schema of stage files."""
    from launcher import explain, options, report, upstream
    from launcher.backends import BACKENDS

    stages = [chosen] if (chosen := _stage(stage)) else list(options.STAGES)
    named = [one] if (one := _backend(backend)) else list(BACKENDS)
    locator = upstream.Locator(checkout=open_instruct, allow_unpinned=allow_unpinned)
    schemas = [locator.schema(name, one) for name in named for one in stages]
    if json_schema:
        from launcher import json_schema as schemes

        notes = {(one.backend, one.stage): explain.notes(one) for one in schemas}
        report.plain_json(schemes.combined(schemas, notes=notes))
    elif format is Format.json:
        report.envelope("schema", True, (), {"schemas": [one.as_json() for one in schemas]})
    else:
        report.arguments(schemas, {one.script: explain.notes(one) for one in schemas})


pins = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What the open-instruct checkout is, and what another commit would change.",
)
app.add_typer(pins, name="pin")


@pins.command("status", epilog="Example: launch pin status")
def pin_status(open_instruct: Checkout = None, format: FormatOption = Format.text) -> None:
    """Say which checkout would be used, and whether it is the pinned commit, unedited."""
    from launcher import pin, report

    told = pin.status(open_instruct, os.environ)
    if format is Format.json:
        report.envelope("pin status", told.exit_code is Exit.OK, told.findings, told.as_json())
    else:
        report.findings(told.findings)
        report.say("\n".join(told.lines()))
    raise typer.Exit(told.exit_code)


@pins.command("diff", epilog="Example: launch pin diff pin HEAD -c configs/tulu/sft_qwen7b.yaml")
def pin_diff(
    commits: Annotated[
        list[str],
        typer.Argument(
            metavar="OLD NEW",
            help="two commits, OLD..NEW, or NEW alone; `pin` is the pinned one",
            show_default=False,
        ),
    ],
    configs: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="a stage file (several times); none: all fields"),
    ] = None,
    stage: StageOption = None,
    gpus: Gpus = None,
    everything: Annotated[
        bool, typer.Option("--all", help="also what does not concern these files")
    ] = False,
    open_instruct: Checkout = None,
    format: FormatOption = Format.text,
) -> None:
    """Show what changes between two commits: arguments, defaults, reads, log lines, commands."""
    from launcher import diff_report, impact, pin, report

    found = pin.find_commits(commits, open_instruct, os.environ)
    told = impact.between(found, configs or (), stage=_stage(stage), gpus=gpus)
    if format is Format.json:
        new = [finding for one in told.configs for finding in one.appeared]
        report.envelope("pin diff", not told.worse, new, told.as_json())
    else:
        report.say("\n".join(diff_report.lines(told, everything=everything)))
    raise typer.Exit(told.exit_code)


@pins.command("snapshot", epilog="Example: launch pin snapshot --open-instruct ~/open-instruct")
def pin_snapshot(
    backend: BackendOption = None,
    open_instruct: Checkout = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the file; default: the committed one")
    ] = None,
    allow_edited: Annotated[
        bool, typer.Option("--allow-edited", help="also of a checkout with local changes")
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Write the facts of a source (arguments, types, defaults, reads, log lines) as JSON."""
    from launcher import report
    from launcher.snapshots import taking

    told = taking.take(
        _backend(backend) or "open_instruct", checkout=open_instruct, output=output,
        allow_edited=allow_edited,
    )  # fmt: skip
    if format is Format.json:
        report.envelope("pin snapshot", True, (), told.as_json())
    else:
        report.say("\n".join(told.lines()))


@app.command(epilog="Example: launch check runs/20260101T000000Z-sft-demo --format json")
def check(
    target: Annotated[str, typer.Argument(metavar="RUN|LOG", help="a run, or any console log")],
    allow_unproven: Unproven = False,
    format: FormatOption = Format.text,
) -> None:
    """Judge a run of ours, or what a stranger's log alone can prove."""
    from launcher import report, rundir, start

    unpinned: tuple[Finding, ...] = ()
    if Path(target).is_file():
        verdict = start.judge_log(Path(target))
    else:
        folder = rundir.find(target)
        if folder is None:
            raise UsageError(
                _usage("no-such-run", f"there is no run or log `{target}`", "launch runs")
            )
        verdict = start.finish(folder)
        unpinned = start.unpinned_note(folder)
    code = start.exit_code(None, verdict, allow_unproven=allow_unproven)
    if format is Format.json:
        report.envelope("check", code is Exit.OK, unpinned, verdict.as_json())
    else:
        report.findings(unpinned)
        report.verdict(verdict)
    raise typer.Exit(code)


@app.command("report", epilog="Example: launch report last --png curves.png")
def report_command(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="RUN|LOG...", help="runs, or console logs", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the HTML file; default: beside the run")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="also draw the curves as a PNG")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="also write event files into this folder")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Write one HTML page about runs: curves, verdicts with their evidence, plan, config."""
    from launcher import publish, report, series

    runs = publish.gather(targets)
    if format is Format.json:
        report.envelope("report", True, (), series.as_json(runs))
    else:
        page = output or publish.usual_place(runs)
        publish.write_page(runs, page)
        report.say(f"report: {page}")
    for path, write in ((png, publish.write_png), (tensorboard, publish.write_events)):
        if path is not None:
            write(runs, path)
            report.say(f"report: {path}") if format is Format.text else None


@app.command(epilog="Example: launch doctor configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
def doctor(
    config: StageFile = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    devices: DevicesOption = None,
    python: Python = None,
    open_instruct: Checkout = None,
    backend: BackendOption = None,
    allow_unpinned: Unpinned = False,
    install: Annotated[
        bool, typer.Option("--install", help="print what builds the trainer's environment")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="with --install: run it")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Say whether this machine is ready, for a stage file or at all; import what training imports."""
    from launcher import install as installing
    from launcher import readiness, report

    asked = readiness.Question(
        config=config, overrides=overrides or (), gpus=gpus, devices=devices, python=python,
        checkout=open_instruct, backend=_backend(backend), allow_unpinned=allow_unpinned,
    )  # fmt: skip
    told = readiness.examine(asked, importing=not install)
    if install and yes:
        installing.run(told.install)
        told = readiness.examine(asked)
    if format is Format.json:
        report.envelope("doctor", told.exit_code is Exit.OK, told.findings, told.as_json())
    elif install and not yes:
        report.say("\n".join(step.shell() for step in told.install))
        raise typer.Exit(Exit.OK)
    else:
        report.findings(told.findings)
        report.say("\n".join(told.lines()))
    raise typer.Exit(told.exit_code)


def _found(name: str) -> RunFolder:
    """The run of that name. Raises UsageError where there is none, or several."""
    from launcher import rundir

    folder = rundir.find(name)
    if folder is None:
        raise UsageError(_usage("no-such-run", f"there is no run `{name}`", "launch runs"))
    return folder


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
    from launcher import report, start

    folder = _found(run)
    if prepare:
        waiting = start.prepare_again(folder)
        if format is Format.json:
            told = {"run": str(folder.path), "attempt": waiting.number}
            report.envelope("exec", True, (), told)
        return
    folder, attempt = start.execute(folder, node_rank, main_address)
    raise typer.Exit(_until_over("exec", folder, attempt, (), format))


@app.command(epilog="Example: launch attach last")
def attach(run: RunName = "last", format: FormatOption = Format.text) -> None:
    """Show a run that goes on, from anywhere; Ctrl-C leaves it alone."""
    from launcher import following

    folder = _found(run)
    attempt = following.newest_attempt(folder)
    if not following.has_begun(folder, attempt):
        message = f"{folder.path.name} has not begun: there is nothing to show yet"
        raise UsageError(_usage("not-begun", message, "launch runs"))
    raise typer.Exit(_until_over("attach", folder, attempt, (), format, forward=False))


@app.command(epilog="Example: launch logs last -f")
def logs(
    run: RunName = "last",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the end")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=1, help="only the last so many")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="which one; default: the last")
    ] = None,
) -> None:
    """Print what training wrote, as it is."""
    from launcher import following

    folder = _found(run)
    number = attempt or max(1, folder.attempts())
    try:
        following.print_log(folder, number, last=lines, follow=follow)
    except FileNotFoundError:
        message = f"{folder.path.name} has no log of attempt {number}"
        raise UsageError(_usage("no-such-log", message)) from None


@app.command(epilog="Example: launch stop last --after-checkpoint")
def stop(
    run: RunName,
    after_checkpoint: Annotated[
        bool, typer.Option("--after-checkpoint", help="wait until one more has been saved")
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="S,S,S", help="seconds after INT, after TERM, for the rest"
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Stop a run: INT, TERM, KILL to every process of it; say what that loses."""
    from launcher import overview, report, runner, stopping

    folder = _found(run)
    waits = runner.grace(grace) if grace is not None else None
    told = stopping.cost(folder)
    if format is Format.text and overview.state(folder) in {"running", "orphaned", "queued"}:
        report.say(told.line() if not after_checkpoint else "waiting for the next checkpoint")
    ended = stopping.stop(folder, after_checkpoint=after_checkpoint, waits=waits)
    told = stopping.cost(folder)
    if format is Format.json:
        report.envelope("stop", True, (), {"run": str(folder.path), **told.as_json()})
    else:
        how = "stopped" if ended is None or ended.stopped is not None else "was over before that"
        report.say(f"{folder.path.name}: {how}; {told.line()}")


@app.command(epilog="Example: launch runs --format json")
def runs(format: FormatOption = Format.text) -> None:
    """List every run that is known on this machine."""
    from launcher import overview, report, rundir

    rows = [overview.row(folder) for folder in rundir.known_runs()]
    if format is Format.json:
        report.envelope("runs", True, (), rows)
    elif rows:
        report.table(rows, overview.COLUMNS)
    else:
        report.say("no runs yet")


cache = typer.Typer(
    no_args_is_help=True, help="Which caches there are, why one was hit or missed, and their end."
)
app.add_typer(cache, name="cache")
CacheKind = Annotated[str | None, typer.Option("--kind", help="dataset or reference")]


@cache.command("list", epilog="Example: launch cache list --format json")
def cache_list(format: FormatOption = Format.text) -> None:
    """List the cache folders that launch has made."""
    from launcher import cache_folders, report

    rows = [folder.row() for folder in cache_folders.known()]
    if format is Format.json:
        report.envelope("cache list", True, (), rows)
    elif rows:
        report.table([cache_folders.shown(row) for row in rows], cache_folders.COLUMNS)
    else:
        report.say("no caches yet")


@cache.command("why", epilog="Example: launch cache why last")
def cache_why(
    target: Annotated[str, typer.Argument(metavar="RUN", help="a run, or `last`")],
    format: FormatOption = Format.text,
) -> None:
    """Say why the caches of a run were hit or missed: what differed from the nearest run before."""
    from launcher import cache_reasons, report, rundir

    folder = rundir.find(target)
    if folder is None:
        raise UsageError(_usage("no-such-run", f"there is no run `{target}`", "launch runs"))
    told = cache_reasons.why(folder)
    if format is Format.json:
        report.envelope("cache why", True, (), [one.as_json() for one in told])
    else:
        report.say(
            "\n".join(line for one in told for line in one.lines())
            or "it had no caches of launch's"
        )


@cache.command(
    "clear", epilog="Example: launch cache clear --older-than 30d --kind reference --dry-run"
)
def cache_clear(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="not used for 30d, 12h, 2w")
    ] = None,
    kind: CacheKind = None,
    dry_run: DryRun = False,
    format: FormatOption = Format.text,
) -> None:
    """Remove cache folders that no run uses; never anything else."""
    from launcher import cache_folders, caches, report

    if kind not in {None, *caches.KINDS}:
        raise UsageError(
            _usage(
                "bad-kind", f"`{kind}` is no kind of cache", "--kind dataset or --kind reference"
            )
        )
    seconds = None if older_than is None else cache_folders.age(older_than)
    done = cache_folders.clear(
        cache_folders.known(), kind=kind, older_than_s=seconds, dry_run=dry_run
    )
    if format is Format.json:
        report.envelope("cache clear", True, (), [one.as_json() for one in done])
    else:
        report.say("\n".join(one.line() for one in done) or "nothing to clear")


def _stage(given: str | None) -> str | None:
    if given not in {None, "sft", "dpo"}:
        raise UsageError(
            _usage("bad-stage", f"`{given}` is no stage", "--stage sft or --stage dpo")
        )
    return given


def _backend(given: str | None) -> str | None:
    from launcher.backends import BACKENDS

    if given is not None and given not in BACKENDS:
        names = " or ".join(f"--backend {name}" for name in BACKENDS)
        raise UsageError(_usage("bad-backend", f"`{given}` is no backend", names))
    return given


def _usage(code: str, message: str, help: str | None = None) -> Finding:
    return Finding(severity="error", layer="launch", code=code, message=message, help=help)


def main(argv: list[str] | None = None) -> int:
    """The console entry: every way out is one of the documented exit codes."""
    arguments = sys.argv[1:] if argv is None else argv
    code = _guarded(lambda: app(args=arguments, prog_name="launch"), arguments)
    if argv is None:
        sys.exit(code)
    return code


def _guarded(call: Callable[[], object], arguments: list[str]) -> int:
    try:
        call()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except LaunchError as error:
        _refused(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except OSError as error:
        if not _has_cwd():
            _refused(NotReady(_no_cwd()), arguments)
            return Exit.NOT_READY
        if error.errno not in {errno.EPIPE, errno.EIO}:
            return _bug(error, arguments)
        # the reader has gone: nothing is left to say, and Python must not complain at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.OK
    except Exception as error:
        return _bug(error, arguments)
    return Exit.OK


def _has_cwd() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _no_cwd() -> Finding:
    return Finding(
        severity="error", layer="launch", code="no-cwd",
        message="the folder that this shell is in has been removed", help="cd to one that is there",
    )  # fmt: skip


def _refused(error: LaunchError, arguments: list[str]) -> None:
    """What stopped a command, in the form that its command line asked for."""
    from launcher import report

    line = " ".join(arguments).replace("--format=", "--format ") + " "
    form = next((f for f in Findings if f"--format {f.value} " in line), Findings.text)
    if form is Findings.json:
        report.envelope(arguments[0], False, error.findings, None)
    else:
        _told(arguments[0], False, list(error.findings), [], form)


def _bug(error: Exception, arguments: list[str]) -> int:
    """Traceback and versions to a file, ready for an issue; one line on the screen."""
    from launcher import rundir
    from launcher.redaction import redact

    folder = rundir.state_folder()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    text = "".join(traceback.format_exception(error))
    path = folder / f"bug-{now}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        head = f"launch {' '.join(arguments)}\nPython {platform.python_version()}, {platform.platform()}\n\n"
        path.write_text(redact(head + text), encoding="utf-8")
    except OSError:
        typer.echo(redact(text), err=True)
    told = redact(f"{type(error).__name__}: {error}")
    typer.echo(f"bug in launch: {told}  (traceback in {path})", err=True)
    return Exit.BUG


if __name__ == "__main__":
    main()
