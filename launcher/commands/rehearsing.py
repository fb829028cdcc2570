"""`launch rehearse`: a stage's own script on the CPU, before a GPU is taken."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands.vocabulary import REQUEST, Shared, answer, app, takes
from launcher.errors import Exit, errors


@app.command(epilog="Example: launch rehearse configs/tulu/sft_qwen7b_25pct.yaml")
@takes(*REQUEST, "strict")
def rehearse(
    shared: Shared,
    again: Annotated[
        bool, typer.Option("--again", help="do not reuse the result of the same rehearsal")
    ] = False,
) -> Exit:
    """Run two steps of the real script on the CPU: a tiny model of the same kind, your first 64 rows."""
    from launcher import preparation
    from launcher.rehearse import rehearsal

    judged, trainer = preparation.judge(shared.request())
    if judged.schema is not None:
        shared.show_progress("rehearsing; the trainer's packages are imported first")
    done = rehearsal.rehearse(judged, trainer, anew=again)
    found = rehearsal.combined(judged.findings, done.findings)
    code = Exit.CONFIG if errors(found, strict=shared.strict) else Exit.OK
    return answer("rehearse", shared.format, done.as_json(), done.lines(), found, code)
