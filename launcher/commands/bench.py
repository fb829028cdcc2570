"""`launch bench`: settings, or commits of the trainer, side by side."""

from __future__ import annotations

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
    StageOption,
    Strict,
    Unpinned,
    app,
    named_stage,
    progress,
    refuse_both,
)
from launcher.errors import Exit


@app.command(
    epilog="Example: launch bench configs/tulu/sft_qwen7b.yaml --vary packing=false,true --gpus 8"
)
def bench(
    config: Config,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=A,B", help="these values; several times: all combinations"),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", metavar="NAME:KEY=A,KEY=B", help="one setting of several keys"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="optimizer steps of a run")] = 20,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each variant")] = 3,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="30m", help="of one run, start-up included")
    ] = "30m",
    asserted: Annotated[
        list[str] | None,
        typer.Option("--assert", metavar="EXPR", help="loss<=1%, tokens_per_second>=1.2 (several times)"),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="only to try it: without a GPU")] = False,
    stage: StageOption = None, gpus: Gpus = None, devices: DevicesOption = None,
    python: Python = None, open_instruct: Checkout = None, allow_unpinned: Unpinned = False,
    strict: Strict = False, fresh: Fresh = False, resume: Resume = False,
    format: FormatOption = Format.text,
) -> None:  # fmt: skip
    """Measure settings side by side: speed, memory, waste, and the loss a token."""
    from launcher import bench as benches
    from launcher import bench_report, comparison, report, variants
    from launcher.preparation import Request

    refuse_both(fresh, resume)
    asked = variants.combinations(vary or (), variant or ())
    expressions = [comparison.assertion(text) for text in asserted or ()]
    limit = benches.seconds(timeout)
    request = Request(
        stage=named_stage(stage), config=config, overrides=overrides or (), gpus=gpus,
        devices=devices, python=python, checkout=open_instruct, allow_unpinned=allow_unpinned,
        strict=strict,
    )  # fmt: skip
    planned = benches.plan(
        benches.require_gpu(request, cpu=cpu), asked, steps=steps, repeats=repeats,
        timeout_s=limit, assertions=expressions, running=True,
    )  # fmt: skip
    report.findings(planned.findings if format is Format.text else ())
    with benches.opened(planned, fresh=fresh, resume=resume) as opened:
        code = benches.run(opened, show=progress(format))
        bench_report.write(opened)
        if format is Format.json:
            found = (*planned.findings, *comparison.baseline_fault(opened.samples))
            report.envelope("bench", code is Exit.OK, found, opened.as_json())
        else:
            bench_report.show(opened)
            if code is Exit.INTERRUPTED:
                report.say(benches.interrupted(opened))
    raise typer.Exit(code)
