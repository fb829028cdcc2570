"""`launch tune`: the fastest setting that trains the same, found by short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.vocabulary import REQUEST, Format, Shared, answer, app, takes
from launcher.errors import Exit


@app.command(epilog="Example: launch tune configs/bench/hand_recipe.yaml --gpus 2 -o tuned.yaml")
@takes(*REQUEST, "gpus", "devices", "row_tokens", "fresh", "resume")
def tune(
    shared: Shared,
    budget: Annotated[
        str, typer.Option("--budget", metavar="10m", help="all trials together, at most")
    ] = "10m",
    steps: Annotated[int, typer.Option("--steps", min=3, help="optimizer steps of a trial")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="only to try it: without a GPU")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the stage file; default: beside the trials")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option("--gpu-memory", metavar="GIB", help="what may be used; default: the card's"),
    ] = None,
) -> Exit:  # fmt: skip
    """Search the fastest setting at the same global batch and loss; write it as a stage file."""
    from launcher import bench, bench_report, comparison
    from launcher import tune as tuning

    shared.require_one_start()
    terms = tuning.Terms(
        budget_s=bench.seconds(budget), steps=steps, row_tokens=shared.row_tokens,
        gpu_memory=gpu_memory, output=output, fresh=shared.fresh, resume=shared.resume,
    )  # fmt: skip
    with tuning.opened(tuning.prepare(shared.request(), terms, cpu=cpu)) as opened:
        code = tuning.run(opened, show=shared.show_progress)
        trials = opened.bench() if opened.entries else None
        if trials is not None:
            bench_report.write(trials)
        found = opened.findings
        if shared.format is Format.json:
            found = (*found, *comparison.baseline_fault([one.sample for one in opened.entries]))
        elif trials is not None:
            bench_report.show(trials)
        data, lines = opened.as_json(), tuning.ending(opened)
        answer("tune", shared.format, data, lines, found, code)
    return code
