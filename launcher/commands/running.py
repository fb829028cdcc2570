"""`launch attach`, `logs`, `stop`, `runs`: runs that are under way, or were."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.stages import until_over
from launcher.commands.vocabulary import (
    Format,
    FormatOption,
    RunName,
    answer,
    app,
    found_run,
    not_begun,
)
from launcher.errors import Exit, usage

_IN_WORDS = {"unknown": "unknown here"}


@app.command(epilog="Example: launch attach last")
def attach(run: RunName = "last", format: FormatOption = Format.text) -> Exit:
    """Show a run that goes on, from anywhere; Ctrl-C leaves it alone."""
    from launcher import following

    folder = found_run(run)
    attempt = following.newest_attempt(folder)
    if not following.has_begun(folder, attempt):
        raise not_begun(folder)
    return until_over("attach", folder, attempt, (), format, forward=False)


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
    """Print what training wrote, without tokens."""
    from launcher import following

    folder = found_run(run)
    number = attempt or max(1, folder.attempts())
    try:
        following.print_log(folder, number, last=lines, follow=follow)
    except FileNotFoundError:
        name = folder.path.name
        left = [one for one in range(1, folder.attempts() + 1) if folder.console(one).exists()]
        which = f"launch check {name} says what is left of it"
        if left:
            known = ", ".join(map(str, left))
            which = f"it has {known}: launch logs {name} --attempt {left[-1]}"
        raise usage("no-such-log", f"{name} has no log of attempt {number}", which) from None


@app.command(epilog="Example: launch stop last --after-checkpoint")
def stop(
    run: RunName,
    after_checkpoint: Annotated[
        bool, typer.Option("--after-checkpoint", help="wait until one more has been saved")
    ] = False,
    format: FormatOption = Format.text,
) -> Exit:
    """Stop a run: INT, TERM, KILL to every process of it; say what that loses."""
    from launcher import overview, report, stopping

    folder = found_run(run)
    cost = stopping.cost(folder)
    if format is Format.text and overview.state(folder) in {"running", "orphaned", "queued"}:
        report.say(stopping.due(folder) if after_checkpoint else cost.line())
    ended = stopping.stop(folder, after_checkpoint=after_checkpoint)
    cost = stopping.cost(folder)
    if ended is None or ended.stopped is not None:
        outcome = f"stopped; {cost.line()}"
    elif ended.returncode:
        outcome = f"it had failed before that; {cost.line()}"
    else:
        outcome = "it had come to its end before that"
    data = {"run": str(folder.path), **cost.as_json()}
    return answer("stop", format, data, [f"{folder.path.name}: {outcome}"])


@app.command(epilog="Example: launch runs --format json")
def runs(format: FormatOption = Format.text) -> Exit:
    """List every run that is known on this machine."""
    from launcher import overview, report, rundir

    rows = overview.rows(rundir.known_runs())

    def show() -> None:
        # in a table beside nothing that explains it
        shown = [{**one, "state": _IN_WORDS.get(one["state"], one["state"])} for one in rows]
        report.table(shown, overview.COLUMNS)

    return answer("runs", format, rows, show if rows else ["no runs yet"])
