"""`launch pin`: the checkout and other commits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    Checkout,
    Format,
    FormatOption,
    StageOption,
    answer,
    app,
    files_of,
    named_stage,
)

pins = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What the open-instruct checkout is, and what another commit would change.",
)
app.add_typer(pins, name="pin")


@pins.command("status", epilog="Example: launch pin status")
def pin_status(open_instruct: Checkout = None, format: FormatOption = Format.text) -> None:
    """Say which checkout would be used, and whether it is the pinned commit, unedited."""
    from launcher import pin

    told = pin.status(open_instruct, os.environ)
    raise typer.Exit(
        answer("pin status", told.exit_code, told.findings, told.as_json(), told.lines(), format)
    )


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
        typer.Option(
            "--config",
            "-c",
            help="a stage file, a pipeline or a folder (several times); none: all fields",
        ),
    ] = None,
    stage: StageOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="also what does not concern these files")
    ] = False,
    open_instruct: Checkout = None,
    format: FormatOption = Format.text,
) -> None:
    """Show what changes between two commits: arguments, defaults, reads, refusals."""
    from launcher import impact, pin, report

    found = pin.find_commits(commits, open_instruct, os.environ)
    paths = [file for path in configs or () for file in files_of(path)]
    told = impact.between(found, paths, stage=named_stage(stage))
    if format is Format.json:
        new = [finding for one in told.configs for finding in one.appeared]
        report.envelope("pin diff", not told.worse, new, told.as_json())
    else:
        report.say("\n".join(impact.lines(told, everything=everything)))
    raise typer.Exit(told.exit_code)
