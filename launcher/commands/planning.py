"""`launch plan`, `launch doctor`: before a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
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
    Price,
    Python,
    Rows,
    RowTokens,
    StageFile,
    StageOption,
    Unpinned,
    answer,
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
    row_tokens: RowTokens = None,
    rows: Rows = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="which one: H100, A100")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GIB", help="default: of the GPUs here")
    ] = None,
    price: Price = None,
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
    from launcher import forecast
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
    data, lines = told.as_json(why=why), told.lines(why=why)
    raise typer.Exit(answer("plan", code, told.findings, data, lines, format))


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
    from launcher.preparation import Request

    request = Request(
        stage=None, config=config or Path(), overrides=overrides or (), gpus=gpus, devices=devices,
        python=python, checkout=open_instruct, allow_unpinned=allow_unpinned,
    )  # fmt: skip
    named = named_backend(backend) or "open_instruct"
    examine = partial(readiness.of_stage, request)
    if config is None:
        examine = partial(readiness.of_backend, request, named)
    if install and not installing.known():
        raise NotReady(installing.unknown())
    told = examine(importing=not install)
    if install and yes:
        installing.run(told.install)
        told = examine()
    if install and not yes and format is Format.text:
        report.say("\n".join(step.shell() for step in told.install))
        raise typer.Exit(Exit.OK)
    raise typer.Exit(
        answer("doctor", told.exit_code, told.findings, told.as_json(), told.lines(), format)
    )
