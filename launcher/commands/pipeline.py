"""`launch pipeline`: stages in turn, each on the model of the one before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.commands.vocabulary import (
    Changed,
    Checkout,
    DevicesOption,
    DryRun,
    Format,
    FormatOption,
    Fresh,
    Gpus,
    NoProbe,
    Python,
    Strict,
    Unpinned,
    Unproven,
    app,
)
from launcher.errors import Exit

if TYPE_CHECKING:
    from launcher.handover import Order

PipelineFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="the pipeline file", show_default=False)
]
StageOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[STAGE.KEY=VALUE]...", show_default=False)
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="begin here; what it needs must be there"),
]
Until = Annotated[str | None, typer.Option("--until", metavar="STAGE", help="end after this one")]


@app.command(epilog="Example: launch pipeline configs/demo/pipeline.yaml --gpus 0 --until sft")
def pipeline(
    file: PipelineFile, overrides: StageOverrides = None, first: From = None, until: Until = None,
    gpus: Gpus = None, dry_run: DryRun = False, python: Python = None,
    open_instruct: Checkout = None, allow_unpinned: Unpinned = False,
    allow_unproven: Unproven = False, strict: Strict = False, no_probe: NoProbe = False,
    devices: DevicesOption = None, fresh: Fresh = False, allow_changed_resume: Changed = None,
    format: FormatOption = Format.text,
) -> None:  # fmt: skip
    """Run stages one after the other, each on the model of the one before; what is done is skipped."""
    from launcher import chain
    from launcher.handover import Order
    from launcher.preparation import Request

    common = Request(
        stage=None, config=file, gpus=gpus, python=python, checkout=open_instruct,
        allow_unpinned=allow_unpinned, strict=strict, probe=not no_probe, devices=devices, fresh=fresh,
        allowed=tuple(allow_changed_resume or ()),
    )  # fmt: skip
    order = Order(
        chain=chain.load(file, overrides or ()), common=common, first=first, last=until,
        allow_unproven=allow_unproven,
    )  # fmt: skip
    raise typer.Exit(_dry_run(order, format) if dry_run else _run(order, format))


def _dry_run(order: Order, format: Format) -> Exit:
    from launcher import pipeline, report

    seen = pipeline.dry_run(order)
    steps = [seen.steps[link.name] for link in seen.links]
    if format is Format.json:
        told = [{"name": one.link.name, **one.prepared.as_json()} for one in steps]
        report.envelope("pipeline", True, seen.findings, {"stages": told})
        return Exit.OK
    report.findings(seen.findings)
    for number, one in enumerate(steps):
        report.say(f"# stage {number + 1} of {len(steps)}: {one.link.name}")
        report.dry_run(one.plan, one.prepared.command)
    return Exit.OK


def _run(order: Order, format: Format) -> Exit:
    from launcher import pipeline, report

    text = format is Format.text
    result = pipeline.run(order, quiet=not text)
    if not text:
        report.envelope("pipeline", result.exit is Exit.OK, result.findings, result.as_json())
        return result.exit
    report.table([row.shown() for row in result.rows], pipeline.SUMMARY)
    row = result.stopped_at
    if row is not None:
        report.say(f"stopped at {row.name}: {row.reason or row.status}")
    for line in result.advice():
        report.say(f"  {line}")
    report.say(f"pipeline: {result.folder}")
    if result.page is not None:
        report.say(f"report: {result.page}")
    return result.exit
