"""`launch pipeline`: stages in turn, each on the model of the one before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.commands.vocabulary import SOURCE, Format, Shared, answer, app, takes
from launcher.errors import Exit

if TYPE_CHECKING:
    from launcher.handover import Order


@app.command(epilog="Example: launch pipeline configs/demo/pipeline.yaml --gpus 0 --until sft")
@takes(
    "gpus", "dry_run", "python", *SOURCE, "allow_unproven", "strict", "no_probe", "devices", "fresh",
    "allow_changed_resume", "format",
)  # fmt: skip
def pipeline(
    shared: Shared,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="the pipeline file", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[STAGE.KEY=VALUE]...", show_default=False)
    ] = None,
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="begin here; what it needs must be there"),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="STAGE", help="end after this one")
    ] = None,
) -> Exit:
    """Run stages one after the other, each on the model of the one before; what is done is skipped."""
    from launcher import chain
    from launcher.handover import Order

    common = shared.request(
        config=file, overrides=(), fresh=shared.fresh,
        allowed=tuple(shared.allow_changed_resume or ()),
    )  # fmt: skip
    order = Order(
        chain=chain.load(file, overrides or ()), common=common, first=first, last=until,
        allow_unproven=shared.allow_unproven,
    )  # fmt: skip
    return _dry_run(order, shared.format) if shared.dry_run else _run(order, shared.format)


def _dry_run(order: Order, format: Format) -> Exit:
    from launcher import pipeline, report

    plan = pipeline.dry_run(order)
    steps = [plan.steps[link.name] for link in plan.links]

    def show() -> None:
        for number, one in enumerate(steps):
            report.say(f"# stage {number + 1} of {len(steps)}: {one.link.name}")
            report.dry_run(one.plan, one.prepared.command)

    stages = [{"name": one.link.name, **one.prepared.as_json()} for one in steps]
    return answer("pipeline", format, {"stages": stages}, show, plan.findings)


def _run(order: Order, format: Format) -> Exit:
    from launcher import pipeline, report

    result = pipeline.run(order, quiet=format is Format.json)

    def show() -> None:
        report.table([row.shown() for row in result.rows], pipeline.SUMMARY)
        row = result.stopped_at
        if row is not None:
            report.say(f"stopped at {row.name}: {row.reason or row.status}")
        for line in result.advice():
            report.say(f"  {line}")
        report.say(f"pipeline: {result.folder}")
        if result.page is not None:
            report.say(f"report: {result.page}")

    data = result.as_json()
    return answer("pipeline", format, data, show, code=result.exit, before=result.findings)
