"""`launch prepare`: downloads and tokenising, before GPUs are paid for."""

from __future__ import annotations

from launcher.commands.vocabulary import REQUEST, Shared, answer, app, takes
from launcher.errors import Exit


@app.command(epilog="Example: launch prepare configs/tulu/sft_qwen7b_25pct.yaml --gpus 8")
@takes(*REQUEST, "gpus", "nodes", "strict")
def prepare(shared: Shared) -> Exit:
    """Download, tokenise and check what a run on --gpus GPUs needs; no GPU is used."""
    from launcher import prefetch, report

    done = prefetch.prepare(shared.request(), report.aside)
    return answer("prepare", shared.format, done.as_json(), done.lines(), done.findings, done.exit)
