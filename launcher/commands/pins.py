"""`launch pin`: the checkout and other commits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    Format,
    Shared,
    answer,
    app,
    files_of,
    named_stage,
    takes,
)
from launcher.errors import Exit

pins = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What the open-instruct checkout is, and what another commit would change.",
)
app.add_typer(pins, name="pin")


@pins.command("status", epilog="Example: launch pin status")
@takes("open_instruct", "format")
def pin_status(shared: Shared) -> Exit:
    """Say which checkout would be used, and whether it is the pinned commit, unedited."""
    from launcher import pin

    status = pin.status(shared.open_instruct, os.environ)
    data, lines = status.as_json(), status.lines()
    return answer("pin status", shared.format, data, lines, status.findings, status.exit_code)


@pins.command("diff", epilog="Example: launch pin diff pin HEAD -c configs/tulu/sft_qwen7b.yaml")
@takes("stage", "open_instruct", "format")
def pin_diff(
    shared: Shared,
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
        typer.Option(
            "--config",
            "-c",
            help="a stage file, a pipeline or a folder (several times); none: all fields",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="also what does not concern these files")
    ] = False,
) -> Exit:
    """Show what changes between two commits: arguments, defaults, reads, refusals."""
    from launcher import difference, pin, report

    found = pin.find_commits(commits, shared.open_instruct, os.environ)
    paths = [file for path in configs or () for file in files_of(path)]
    told = difference.between(found, paths, stage=named_stage(shared.stage))
    if shared.format is Format.json:
        new = [finding for one in told.configs for finding in one.appeared]
        report.envelope("pin diff", not told.worse, new, told.as_json())
    else:
        report.say("\n".join(difference.lines(told, everything=everything)))
    return told.exit_code
