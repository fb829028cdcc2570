"""`launch tune`: the fastest setting that trains the same, found by short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    Checkout,
    Config,
    DevicesOption,
    Format,
    FormatOption,
    Fresh,
    Gpus,
    Overrides,
    Python,
    Resume,
    RowTokens,
    StageOption,
    Unpinned,
    app,
    named_stage,
    progress,
    refuse_both,
)
from launcher.errors import Exit


@app.command(epilog="Example: launch tune configs/bench/hand_recipe.yaml --gpus 2 -o tuned.yaml")
def tune(
    config: Config,
    overrides: Overrides = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="10m", help="all trials together, at most")
    ] = "10m",
    steps: Annotated[int, typer.Option("--steps", min=3, help="optimizer steps of a trial")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="only to try it: without a GPU")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the stage file; default: beside the trials")
    ] = None,
    row_tokens: RowTokens = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option("--gpu-memory", metavar="GIB", help="what may be used; default: the card's"),
    ] = None,
    stage: StageOption = None, gpus: Gpus = None, devices: DevicesOption = None,
    python: Python = None, open_instruct: Checkout = None, allow_unpinned: Unpinned = False,
    fresh: Fresh = False, resume: Resume = False, format: FormatOption = Format.text,
) -> None:  # fmt: skip
    """Search the fastest setting at the same global batch and loss; write it as a stage file."""
    from launcher import bench, bench_report, comparison, report
    from launcher import tune as tuning
    from launcher.preparation import Request

    refuse_both(fresh, resume)
    terms = tuning.Terms(
        budget_s=bench.seconds(budget), steps=steps, row_tokens=row_tokens, gpu_memory=gpu_memory,
        output=output, fresh=fresh, resume=resume,
    )  # fmt: skip
    request = Request(
        stage=named_stage(stage), config=config, overrides=overrides or (), gpus=gpus, devices=devices,
        python=python, checkout=open_instruct, allow_unpinned=allow_unpinned,
    )  # fmt: skip
    with tuning.opened(tuning.prepare(request, terms, cpu=cpu)) as opened:
        code = tuning.run(opened, show=progress(format))
        trials = opened.bench() if opened.trials else None
        if trials is not None:
            bench_report.write(trials)
        if format is Format.json:
            faults = comparison.baseline_fault([one.sample for one in opened.trials])
            found = (*opened.findings, *faults)
            report.envelope("tune", code is Exit.OK, found, opened.as_json())
        else:
            if trials is not None:
                bench_report.show(trials)
            report.findings(opened.findings)
            report.say("\n".join(tuning.ending(opened)))
    raise typer.Exit(code)
