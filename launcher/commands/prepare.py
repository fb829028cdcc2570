"""`launch prepare`: downloads and tokenising, before GPUs are paid for."""

from __future__ import annotations

import typer

from launcher.commands.vocabulary import (
    Checkout,
    Config,
    Format,
    FormatOption,
    Gpus,
    Nodes,
    Overrides,
    Python,
    StageOption,
    Strict,
    Unpinned,
    answer,
    app,
    named_stage,
)


@app.command(epilog="Example: launch prepare configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
def prepare(
    config: Config,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = 1,
    stage: StageOption = None,
    python: Python = None,
    open_instruct: Checkout = None,
    allow_unpinned: Unpinned = False,
    strict: Strict = False,
    format: FormatOption = Format.text,
) -> None:
    """Download, tokenise and check what a run on --gpus GPUs needs; no GPU is used."""
    from launcher import prefetch, report
    from launcher.preparation import Request

    request = Request(
        stage=named_stage(stage), config=config, overrides=overrides or (), gpus=gpus, nodes=nodes,
        python=python, checkout=open_instruct, allow_unpinned=allow_unpinned, strict=strict,
    )  # fmt: skip
    told = prefetch.prepare(request, report.aside)
    raise typer.Exit(
        answer("prepare", told.exit, told.findings, told.as_json(), told.lines(), format)
    )
