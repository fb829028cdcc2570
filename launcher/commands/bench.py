"""`launch bench`: settings, or commits of the trainer, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.vocabulary import REQUEST, Format, Shared, answer, app, takes
from launcher.errors import Exit


@app.command(
    epilog="Example: launch bench configs/tulu/sft_qwen7b.yaml --vary packing=false,true --gpus 8"
)
@takes(*REQUEST, "gpus", "devices", "strict", "fresh", "resume")
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
    from launcher import assertions, bench_report, comparison, report, variants
    from launcher import bench as benches

    shared.require_one_start()
    asked = variants.combinations(vary or (), variant or ())
    expressions = [assertions.assertion(text) for text in asserted or ()]
    limit = benches.seconds(timeout)
    planned = benches.plan(
        benches.require_gpu(shared.request(), cpu=cpu), asked, steps=steps, repeats=repeats,
        timeout_s=limit, assertions=expressions, running=True,
    )  # fmt: skip
    text = shared.format is Format.text
    report.findings(planned.findings if text else ())
    with benches.opened(planned, fresh=shared.fresh, resume=shared.resume) as opened:
        code = benches.run(opened, show=shared.show_progress)
        bench_report.write(opened)
        found = (*planned.findings, *comparison.baseline_fault(opened.samples))
        answer(
            "bench", shared.format, opened.as_json(), lambda: bench_report.show(opened),
            () if text else found, code,
        )  # fmt: skip
        if text and code is Exit.INTERRUPTED:
            report.say(benches.interrupted(opened))
    return code
