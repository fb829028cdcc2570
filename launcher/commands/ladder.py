"""`launch ladder`: the same stage, short, on 1, 2, 8 GPUs, before the full run is paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    Checkout,
    Config,
    DryRun,
    Format,
    FormatOption,
    Fresh,
    Overrides,
    Price,
    Python,
    Rows,
    RowTokens,
    StageOption,
    Strict,
    Unpinned,
    Unproven,
    app,
    named_stage,
)
from launcher.errors import Exit


@app.command(
    epilog="Example: launch ladder configs/tulu/sft_qwen7b.yaml --gpus 1,2,8 --steps 50 --price 2.5"
)
def ladder(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="1,2,8", help="the rungs, in turn; 0 is the CPU")
    ] = "1,2,8",
    steps: Annotated[int, typer.Option("--steps", min=5, help="optimizer steps of each rung")] = 50,
    price: Price = None,
    rows: Rows = None,
    row_tokens: RowTokens = None,
    stage: StageOption = None,
    dry_run: DryRun = False,
    python: Python = None,
    open_instruct: Checkout = None,
    allow_unpinned: Unpinned = False,
    allow_unproven: Unproven = False,
    strict: Strict = False,
    fresh: Fresh = False,
    format: FormatOption = Format.text,
) -> None:
    """Rehearse a stage on more and more GPUs, stop at the first red flag, say what the full run takes."""
    from launcher import ladder as ladders
    from launcher import report
    from launcher.preparation import Request

    counts = ladders.counts(gpus)
    terms = ladders.terms(counts, price=price, rows=rows, row_tokens=row_tokens)
    request = Request(
        stage=named_stage(stage), config=config, overrides=overrides or (), python=python,
        checkout=open_instruct, allow_unpinned=allow_unpinned, strict=strict,
    )  # fmt: skip
    quiet = format is Format.json
    with ladders.prepared(
        request, counts, steps=steps, terms=terms, fresh=fresh, running=not dry_run
    ) as planned:
        if not quiet:
            report.findings(planned.findings)
        if dry_run:
            told = [rung.prepared.as_json() for rung in planned.rungs]
            if quiet:
                report.envelope("ladder", True, planned.findings, {"rungs": told})
            else:
                for rung in planned.rungs:
                    report.say(f"# rung: {rung.name}")
                    report.dry_run(rung.prepared.plan, rung.prepared.command)
            raise typer.Exit(Exit.OK)
        result = ladders.climb(planned, allow_unproven=allow_unproven, quiet=quiet)
    if quiet:
        report.envelope("ladder", result.exit is Exit.OK, result.findings, result.as_json())
    else:
        ladders.show(result)
    raise typer.Exit(result.exit)
