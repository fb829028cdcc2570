"""`launch check`, `launch report`: what came of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    Format,
    FormatOption,
    Unproven,
    answer,
    app,
    not_begun,
)
from launcher.errors import Exit, Finding, usage
from launcher.paths import exists


@app.command(epilog="Example: launch check runs/20260101T000000Z-sft-demo --format json")
def check(
    target: Annotated[
        str, typer.Argument(metavar="RUN|LOG", help="a run, any console log, or - for stdin")
    ],
    allow_unproven: Unproven = False,
    format: FormatOption = Format.text,
) -> Exit:
    """Judge a run of ours, or what a stranger's log alone can prove."""
    from launcher import check as judging
    from launcher import report

    unpinned: tuple[Finding, ...] = ()
    log = Path("/dev/stdin" if target == "-" else target)
    # a pipe is a log too
    if exists(log) and not log.is_dir():
        verdict = judging.judge_log(log)
    else:
        # a log is judged without importing all that starts runs
        from launcher import rundir, start

        folder = rundir.find(target)
        if folder is None:
            raise usage("no-such-run", f"there is no run or log `{target}`", "launch runs")
        if not folder.attempts() and not exists(folder.probe):
            raise not_begun(folder)
        verdict = start.finish(folder)
        unpinned = start.unpinned_note(folder)
    code = judging.exit_code(verdict, allow_unproven=allow_unproven)
    data = verdict.as_json()
    return answer("check", format, data, lambda: report.verdict(verdict), unpinned, code)


@app.command("report", epilog="Example: launch report last -o curves.html")
def report_command(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="RUN|LOG...", help="runs, or console logs", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the HTML file; default: beside the run")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Write one HTML page about runs: curves, verdicts with their evidence, plan, config."""
    from launcher import page, report, series

    runs = series.gather(targets)
    # the JSON form says all that the page says, so no page is written beside it that nobody asked for
    path = page.usual_path(runs) if output is None and format is Format.text else output
    if path is not None:
        page.write(runs, path)
        report.say(f"report: {path}") if format is Format.text else None
    # once nothing can fail any more: a reader gets one envelope
    if format is Format.json:
        report.envelope("report", True, (), series.as_json(runs))
