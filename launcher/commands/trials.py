"""`launch ladder`, `launch bench`, `launch tune`: short runs that are compared before the long one."""

from __future__ import annotations

from pathlib import Path
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
    """Try a stage on 1, 2, 8 GPUs, stop at the first red flag, say what the full run takes."""
    from launcher import ladder as ladders
    from launcher import report

    counts = ladders.counts(gpus)
    terms = ladders.terms(
        counts, price=shared.price, rows=shared.rows, row_tokens=shared.row_tokens
    )
    quiet = shared.format is Format.json
    planned = ladders.plan_rungs(
        shared.request(), counts, steps=steps, terms=terms, running=not shared.dry_run
    )
    if shared.dry_run:
        rungs = [rung.prepared.as_json() for rung in planned.rungs]

        def show() -> None:
            for rung in planned.rungs:
                report.say(f"# rung: {ladders.label(rung.gpus)}")
                report.dry_run(rung.prepared.plan, rung.prepared.command)

        return answer("ladder", shared.format, {"rungs": rungs}, show, planned.findings)
    if not quiet:
        report.findings(planned.findings)
    result = ladders.climb(
        planned, fresh=shared.fresh, allow_unproven=shared.allow_unproven, quiet=quiet
    )
    return answer(
        "ladder",
        shared.format,
        result.as_json(),
        lambda: ladders.show(result),
        code=result.exit,
        before=planned.findings,
    )


@app.command(
    epilog="Example: launch bench configs/tulu/sft_qwen7b.yaml --vary packing=false,true --gpus 8"
)
@takes(*REQUEST, "gpus", "devices", "strict", "fresh")
def bench(
    shared: Shared,
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
) -> Exit:  # fmt: skip
    """Measure settings side by side: speed, memory, waste, and the loss a token."""
    from launcher import bench as benches
    from launcher import comparison, report, variants

    asked = variants.combinations(vary or (), variant or ())
    expressions = [comparison.assertion(text) for text in asserted or ()]
    limit = benches.seconds(timeout)
    planned = benches.plan(
        benches.require_gpu(shared.request(), cpu=cpu), asked, steps=steps, repeats=repeats,
        timeout_s=limit, assertions=expressions, running=True,
    )  # fmt: skip
    text = shared.format is Format.text
    report.findings(planned.findings if text else ())
    with benches.opened(planned, fresh=shared.fresh) as opened:
        code = benches.run(opened, show=shared.show_progress)
        benches.write_page(opened)
        found = (*planned.findings, *comparison.baseline_fault(opened.samples))
        data = opened.as_json()
        answer("bench", shared.format, data, lambda: benches.show(opened), code=code, before=found)
        if text and code is Exit.INTERRUPTED:
            report.say(benches.interrupted(opened))
    return code


@app.command(epilog="Example: launch tune configs/bench/hand_recipe.yaml --gpus 2 -o tuned.yaml")
@takes(*REQUEST, "gpus", "devices", "row_tokens", "fresh")
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
) -> Exit:  # fmt: skip
    """Search the fastest setting at the same global batch and loss; write it as a stage file."""
    from launcher import bench, comparison
    from launcher import tune as tuning

    terms = tuning.Terms(
        budget_s=bench.seconds(budget), steps=steps, row_tokens=shared.row_tokens,
        output=output, fresh=shared.fresh,
    )  # fmt: skip
    with tuning.opened(tuning.prepare(shared.request(), terms, cpu=cpu)) as opened:
        code = tuning.run(opened, show=shared.show_progress)
        trials = opened.bench() if opened.search.runs else None
        if trials is not None:
            bench.write_page(trials)
        found = opened.findings
        if shared.format is Format.json:
            found = (*found, *comparison.baseline_fault([one.sample for one in opened.search.runs]))
        elif trials is not None:
            bench.show(trials)
        data, lines = opened.as_json(), tuning.ending(opened)
        answer("tune", shared.format, data, lines, found, code)
    return code
