"""`launch ladder`: the same stage, short, on 1, 2, 8 GPUs, before the full run is paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.vocabulary import REQUEST, Format, Shared, answer, app, takes
from launcher.errors import Exit


@app.command(
    epilog="Example: launch ladder configs/tulu/sft_qwen7b.yaml --gpus 1,2,8 --steps 50 --price 2.5"
)
@takes(*REQUEST, "price", "rows", "row_tokens", "dry_run", "allow_unproven", "strict", "fresh")
def ladder(
    shared: Shared,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="1,2,8", help="the rungs, in turn; 0 is the CPU")
    ] = "1,2,8",
    steps: Annotated[int, typer.Option("--steps", min=5, help="optimizer steps of each rung")] = 50,
) -> Exit:
    """Rehearse a stage on more and more GPUs, stop at the first red flag, say what the full run takes."""
    from launcher import ladder as ladders
    from launcher import report

    counts = ladders.counts(gpus)
    terms = ladders.terms(
        counts, price=shared.price, rows=shared.rows, row_tokens=shared.row_tokens
    )
    quiet = shared.format is Format.json
    with ladders.prepared(
        shared.request(), counts, steps=steps, terms=terms, fresh=shared.fresh,
        running=not shared.dry_run,
    ) as planned:  # fmt: skip
        if shared.dry_run:
            rungs = [rung.prepared.as_json() for rung in planned.rungs]

            def show() -> None:
                for rung in planned.rungs:
                    report.say(f"# rung: {rung.name}")
                    report.dry_run(rung.prepared.plan, rung.prepared.command)

            return answer("ladder", shared.format, {"rungs": rungs}, show, planned.findings)
        if not quiet:
            report.findings(planned.findings)
        result = ladders.climb(planned, allow_unproven=shared.allow_unproven, quiet=quiet)
    return answer(
        "ladder", shared.format, result.as_json(), lambda: ladders.show(result),
        result.findings if quiet else (), result.exit,
    )  # fmt: skip
