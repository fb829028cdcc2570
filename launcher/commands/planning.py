"""`launch plan`, `launch doctor`, `launch prepare`: before a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.vocabulary import (
    REQUEST,
    SOURCE,
    Format,
    Overrides,
    Shared,
    StageFile,
    answer,
    app,
    named_backend,
    takes,
)
from launcher.errors import Exit, NotReady, errors


@app.command(
    epilog="Example: launch plan configs/tulu/sft_qwen7b_25pct.yaml --gpus 1,2,8 --row-tokens 290:1100"
)
@takes(*REQUEST, "nodes", "price", "rows", "row_tokens")
def plan(
    shared: Shared,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="1,2,8", help="counts on each machine")
    ] = "8",
    gpu: Annotated[str | None, typer.Option("--gpu", help="which one: H100, A100")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GIB", help="default: of the GPUs here")
    ] = None,
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
) -> Exit:
    """Say what a stage needs on so many GPUs: batch, steps, memory by part, time, cost, disk."""
    from launcher import forecast

    terms = forecast.Terms(
        row_tokens=shared.row_tokens, rows=shared.rows, gpu=gpu, gpu_memory=gpu_memory,
        price=shared.price, tokens_per_second=tokens_per_second, attention=attention, shape=shape,
        fit=fit,
    )  # fmt: skip
    table = forecast.make(shared.request(), forecast.counts(gpus), terms)
    # a count that cannot be must not cost the table of the others
    code = Exit.CONFIG if errors(table.findings) else Exit.OK
    data, lines = table.as_json(why=why), table.lines(why=why)
    return answer("plan", shared.format, data, lines, table.findings, code)


@app.command(epilog="Example: launch doctor configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@takes("gpus", "devices", "python", *SOURCE, "backend", "format")
def doctor(
    shared: Shared,
    config: StageFile = None,
    overrides: Overrides = None,
    install: Annotated[
        bool, typer.Option("--install", help="print what builds the trainer's environment")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="with --install: run it")] = False,
) -> Exit:
    """Say whether this machine is ready, for a stage file or at all; import what training imports."""
    from launcher import environment, readiness, report

    request = shared.request(config=config or Path(), overrides=overrides or ())
    named = named_backend(shared.backend) or "open_instruct"
    examine = partial(readiness.of_stage, request)
    if config is None:
        examine = partial(readiness.of_backend, request, named)
    if install and not environment.tested():
        raise NotReady(environment.unknown())
    state = examine(importing=not install)
    if install and yes:
        environment.run(state.install)
        state = examine()
    if install and not yes and shared.format is Format.text:
        report.say("\n".join(step.shell() for step in state.install))
        return Exit.OK
    data, lines = state.as_json(), state.lines()
    return answer("doctor", shared.format, data, lines, state.findings, state.exit_code)


@app.command(epilog="Example: launch prepare configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@takes(*REQUEST, "gpus", "nodes", "strict")
def prepare(shared: Shared) -> Exit:
    """Download, tokenise and check what a run on --gpus GPUs needs; no GPU is used."""
    from launcher import prefetch, report

    done = prefetch.prepare(shared.request(), report.aside)
    return answer("prepare", shared.format, done.as_json(), done.lines(), done.findings, done.exit)
