"""`launch runs`, `attach`, `logs`, `stop`, `rm`, `check`, `report`, `cache`: about runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import typer
from typer import Argument, Option

from launcher.cli.commands.stages import show_until_over
from launcher.cli.options import (
    FORMAT,
    LAST_RUN,
    RUN,
    UNPROVEN,
    Format,
    answer,
    app,
    confirm_deletion,
    refuse_unstarted,
    require_run,
)
from launcher.errors import Exit, Finding, usage
from launcher.paths import exists
from launcher.redaction import Redactor
from launcher.report import console

if TYPE_CHECKING:
    from launcher.runs.rundir import RunFolder

State = Literal[
    "queued", "running", "orphaned", "finished", "failed", "stopped", "preempted", "unknown", "lost"
]
# on one line, as typer writes the choices, they are wider than a terminal
_ONLY_STATE = f"only runs in this state: {', '.join(get_args(State))}"

cache = typer.Typer(no_args_is_help=True, help="List, explain and clear caches.")
app.add_typer(cache, name="cache")


@app.command(epilog="Example: launch attach last")
def attach(run: str = LAST_RUN, format: Format = FORMAT) -> Exit:
    """Watch a running job; Ctrl-C detaches."""
    from launcher.lifecycle import follow

    folder = require_run(run)
    attempt = follow.find_newest_attempt(folder)
    if not follow.has_begun(folder, attempt):
        raise refuse_unstarted(folder)
    return show_until_over("attach", folder, attempt, (), format, forward=False)


@app.command(epilog="Example: launch logs last -f")
def logs(
    run: str = LAST_RUN,
    follow: bool = Option(False, "--follow", "-f", help="follow the log until the run ends"),
    lines: int | None = Option(
        None, "--lines", "-n", min=1, metavar="N", help="show only the last N lines"
    ),
    attempt: int | None = Option(
        None, "--attempt", min=1, metavar="N", help="number of the attempt", show_default="the last"
    ),
) -> None:
    """Print the training log (secrets redacted)."""
    from launcher.lifecycle.follow import print_log

    folder = require_run(run)
    number = attempt or max(1, folder.attempts())
    try:
        print_log(folder, number, last=lines, follow=follow)
    except FileNotFoundError:
        name = folder.path.name
        help = f"launch check {name} says what is left of it"
        numbers = range(1, folder.attempts() + 1)
        logs = [str(attempt) for attempt in numbers if folder.console(attempt).exists()]
        if logs:
            help = f"it has {', '.join(logs)}: launch logs {name} --attempt {logs[-1]}"
        raise usage("no-such-log", f"{name} has no log of attempt {number}", help) from None


@app.command(epilog="Example: launch stop last --after-checkpoint")
def stop(
    run: str = RUN,
    after_checkpoint: bool = Option(
        False, "--after-checkpoint", help="wait for the next checkpoint first"
    ),
    checkpoint: bool = Option(False, "--checkpoint", help="save one first, after the current step"),
    format: Format = FORMAT,
) -> Exit:
    """Stop a run, and say how much progress that loses.

    Sends INT, then TERM, then KILL to every process of the run. With --checkpoint, it saves one
    and ends by itself.
    """
    from launcher.lifecycle import stop
    from launcher.report import overview

    if checkpoint and after_checkpoint:
        message = "--after-checkpoint has no effect with --checkpoint, which saves one now"
        raise usage("useless-option", message)
    folder = require_run(run)
    cost = stop.estimate_cost(folder)
    if format == "text" and overview.read_state(folder) in {"running", "orphaned", "queued"}:
        progress = cost.line()
        if after_checkpoint:
            progress = "waiting for the next checkpoint, or the end"
        if checkpoint:
            progress = "saving a checkpoint after the step that it is at"
        console.say(progress)
    end = stop.stop(folder, after_checkpoint=after_checkpoint, checkpoint=checkpoint)
    cost = stop.estimate_cost(folder)
    outcome = "it had ended before that"
    # of an orphan, nothing but its probe records that it saved
    if overview.read_end_state(folder) == "preempted":
        outcome = f"saved and ended; {cost.line()}"
    elif end is None or end.stopped is not None:
        outcome = f"stopped; {cost.line()}"
    elif end.returncode:
        outcome = f"it had failed before; {cost.line()}"
    data = {"run": str(folder.path), **cost._asdict()}
    return answer("stop", format, data, [f"{folder.path.name}: {outcome}"])


@app.command(epilog="Example: launch runs --here --state failed --last 5")
def runs(
    state: State | None = Option(None, "--state", metavar="STATE", help=_ONLY_STATE),
    last: int | None = Option(None, "--last", metavar="N", min=1, help="only the N newest"),
    here: bool = Option(False, "--here", help="only runs begun in this folder"),
    whole: bool = Option(
        False, "--all", help="a line for each run of a pipeline, bench, ladder or tune"
    ),
    format: Format = FORMAT,
) -> Exit:
    """List the runs known on this machine."""
    from launcher.report import overview
    from launcher.runs import rundir

    folders = rundir.list_runs_here() if here else rundir.list_known_runs()
    rows = [row for row in overview.list_rows(folders) if state in (None, row["state"])]
    groups = [[row] for row in rows] if whole else overview.group_rows(rows)
    if last is not None:
        groups = groups[-last:]
    if not groups:
        message = "no such runs" if state or here else "no runs yet"
        return answer("runs", format, [], [message])
    data = list(chain.from_iterable(groups))
    table = [overview.summarize(group, runs_only=whole) for group in groups]
    return answer("runs", format, data, partial(console.print_table, table, overview.COLUMNS))


@app.command("rm", epilog="Example: launch rm 20260101T000000Z-sft-demo --yes")
def remove(
    run: str = RUN,
    model: bool = Option(False, "--model", help="delete what it wrote into its output folder too"),
    yes: bool = Option(False, "--yes", "-y", help="do not ask"),
    format: Format = FORMAT,
) -> Exit:
    """Delete a run, bench, ladder or tune that is over.

    Only files that the run wrote, as its records say: what else lies there is kept.
    """
    from launcher.lifecycle import removal
    from launcher.runs import rundir

    folder = rundir.find_campaign(run) or require_run(run)
    members = rundir.list_campaign_runs(folder.path)
    plan = removal.plan_removal(folder, model=model)
    lines = plan.lines()
    kept = plan.kept_lines()
    if not confirm_deletion(lines, yes, "--yes", kept):
        return answer("rm", format, {"removed": [], "kept": kept}, ["nothing was deleted"])
    kept += removal.remove(plan)
    for removed in (folder, *members):
        if not removed.manifest.exists():
            rundir.unregister("runs", removed.path)
    data = {"removed": [str(path) for path in plan.roots], "kept": kept}
    deleted = [f"deleted {line}" for line in lines]
    return answer("rm", format, data, deleted + kept)


@app.command(epilog="Example: launch check runs/20260101T000000Z-sft-demo --format json")
def check(
    target: str = Argument(
        ..., metavar="RUN|LOG", help="a run, a pipeline or bench folder, a log, or -"
    ),
    allow_unproven: bool = UNPROVEN,
    format: Format = FORMAT,
) -> Exit:
    """Check a run, or any training log."""
    from launcher.report import judgement
    from launcher.verdict import check

    notes: tuple[Finding, ...] = ()
    log = Path(target)
    name = target
    if target == "-":
        log = Path("/dev/stdin")
        name = "standard input"
    # a pipe is a log too
    if exists(log) and not log.is_dir():
        verdict = check.judge_log(log, _find_log_redactor(log))
    else:
        # a log is judged without importing all that starts runs
        from launcher.lifecycle import conclude
        from launcher.runs import rundir

        members = rundir.list_campaign_runs(log)
        if members:
            return _check_each(log, members, allow_unproven, format)
        folder = require_run(target, "run or log")
        if not folder.attempts() and not exists(folder.probe):
            raise refuse_unstarted(folder)
        judged = conclude.judge_and_write(folder)
        name = folder.path.name
        verdict = judged.verdict
        notes = (*conclude.note_unpinned(folder), *conclude.report_left_out(judged, folder))
    code = check.decide_exit_code(verdict, allow_unproven=allow_unproven)
    show = partial(judgement.print_verdict, verdict, name)
    return answer("check", format, verdict.as_json(), show, notes, code)


def _find_log_redactor(log: Path) -> Redactor | None:
    """The redactor of the run whose folder holds a log; None if it is in none."""
    folder = log.absolute().parent
    if not exists(folder / "start.json"):
        return None
    from launcher.runs import attempt
    from launcher.runs.rundir import RunFolder

    return attempt.find_redactor(RunFolder(folder))


def _check_each(
    folder: Path, members: Sequence[RunFolder], allow_unproven: bool, format: Format
) -> Exit:
    """Judge every run of a pipeline, bench, ladder or tune; the code is the first that is not 0."""
    from launcher.lifecycle import conclude
    from launcher.report import judgement
    from launcher.verdict import check

    verdicts = {}
    judged = []
    code = Exit.OK
    for run in members:
        verdict = conclude.finish(run)
        verdicts[run.path] = verdict
        judged.append({"run": str(run.path), **verdict.as_json()})
        code = code or check.decide_exit_code(verdict, allow_unproven=allow_unproven)

    def show() -> None:
        for path, verdict in verdicts.items():
            judgement.print_verdict(verdict, path.name)

    data = {"folder": str(folder.absolute()), "runs": judged}
    return answer("check", format, data, show, code=code)


@app.command("report", epilog="Example: launch report last -o curves.html")
def report_command(
    targets: list[str] = Argument(
        ...,
        metavar="RUN|LOG...",
        help="runs, pipeline or bench folders, console logs",
        show_default=False,
    ),
    output: Path | None = Option(
        None, "--output", "-o", metavar="FILE", help="the HTML file", show_default="beside the run"
    ),
    format: Format = FORMAT,
) -> None:
    """Write one HTML page: curves, verdicts, plan and config."""
    from launcher.report import page, series
    from launcher.runs import rundir

    if len(targets) == 1 and output is None and format == "text":
        campaign = rundir.find_campaign(targets[0])
        pages = [] if campaign is None else sorted(campaign.path.glob("*.html"))
        if pages:
            # it begins with the table and the decision, which its runs alone do not hold
            console.say(f"report: {pages[0]}")
            return
    runs = series.load_runs(targets)
    if output is not None or format == "text":
        path = output or page.choose_path(runs)
        page.write(runs, path)
        if format == "text":
            console.say(f"report: {path}")
    # the JSON says all that the page says, and comes once nothing can fail any more
    if format == "json":
        console.print_envelope("report", True, (), series.as_json(runs))


@cache.command("list", epilog="Example: launch cache list --format json")
def cache_list(format: Format = FORMAT) -> Exit:
    """List the cache folders."""
    from launcher.cache import folders

    rows = [folder.row() for folder in folders.list_folders()]
    if not rows:
        return answer("cache list", format, rows, ["no caches yet"])
    table = [folders.describe_row(row) for row in rows]
    return answer("cache list", format, rows, partial(console.print_table, table, folders.COLUMNS))


@cache.command("why", epilog="Example: launch cache why last")
def cache_why(run: str = RUN, format: Format = FORMAT) -> Exit:
    """Explain why the caches of a run were hit or missed."""
    from launcher.cache import diagnosis

    reasons = diagnosis.explain_caches(require_run(run))
    lines: list[str] = []
    for reason in reasons:
        lines += reason.lines()
    data = [asdict(reason) for reason in reasons]
    return answer("cache why", format, data, lines or ["no cache folder that it used is here"])


@cache.command(
    "clear", epilog="Example: launch cache clear --older-than 30d --kind reference --dry-run"
)
def cache_clear(
    older_than: str | None = Option(
        None, "--older-than", metavar="AGE", help="only caches not used for 30d, 12h, 2w"
    ),
    kind: Literal["dataset", "reference"] | None = Option(
        None, "--kind", help="only caches of this kind"
    ),
    dry_run: bool = Option(False, "--dry-run", help="list what would be deleted; delete nothing"),
    whole: bool = Option(False, "--all", help="delete every unused cache without asking"),
    format: Format = FORMAT,
) -> Exit:
    """Delete cache folders that no run uses."""
    from launcher.cache import folders
    from launcher.machine.sizes import format_size

    seconds = None if older_than is None else folders.parse_age(older_than)

    def clear(dry_run: bool) -> list[folders.Cleared]:
        return folders.clear(
            folders.list_folders(), kind=kind, older_than_s=seconds, dry_run=dry_run
        )

    if not (dry_run or older_than or kind):
        unused = []
        for folder in clear(True):
            if folder.reason is None:
                unused.append(f"{folder.folder} ({format_size(folder.size)})")
        if unused and not confirm_deletion(unused, whole, "--all"):
            return answer("cache clear", format, [], ["nothing was deleted"])
    cleared = clear(dry_run)
    data = [asdict(folder) for folder in cleared]
    lines = [folder.line() for folder in cleared] or ["nothing to clear"]
    return answer("cache clear", format, data, lines)
