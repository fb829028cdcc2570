"""`launch plan`, `launch doctor`: before a run."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    BackendOption,
    Checkout,
    Config,
    DevicesOption,
    Format,
    FormatOption,
    Gpus,
    Nodes,
    Overrides,
    Python,
    StageFile,
    StageOption,
    Unpinned,
    app,
    named_backend,
    named_stage,
)
from launcher.errors import Exit, NotReady, errors


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
        stage=named_stage(stage), config=config, overrides=overrides or (), nodes=nodes, python=python,
        checkout=open_instruct, allow_unpinned=allow_unpinned,
    )  # fmt: skip
    terms = forecast.Terms(
        row_tokens=row_tokens, rows=rows, gpu=gpu, gpu_memory=gpu_memory, price=price,
        tokens_per_second=tokens_per_second, attention=attention, shape=shape, fit=fit,
    )  # fmt: skip
    told = forecast.make(request, forecast.counts(gpus), terms)
    # a count that cannot be must not cost the table of the others
    code = Exit.CONFIG if errors(told.findings) else Exit.OK
    if format is Format.json:
        report.envelope("plan", code is Exit.OK, told.findings, told.as_json(why=why))
    else:
        report.findings(told.findings)
        report.say("\n".join(told.lines(why=why)))
    raise typer.Exit(code)


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
        checkout=open_instruct, backend=named_backend(backend), allow_unpinned=allow_unpinned,
    )  # fmt: skip
    if install and not installing.known():
        raise NotReady(installing.unknown())
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
