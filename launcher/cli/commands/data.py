"""`launch data`: data sets in the forms that people have them."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from launcher.cli.options import FORMAT, Format, answer, app
from launcher.errors import Exit
from launcher.report import console

data = typer.Typer(
    no_args_is_help=True, help="Convert data sets into the form that the trainers read."
)
app.add_typer(data, name="data")


@data.command("convert", epilog="Example: launch data convert alpaca.json -o data/train.jsonl")
def convert(
    source: Path = Argument(
        ..., metavar="SOURCE", help="a data file, or a folder of them", show_default=False
    ),
    output: Path = Option(
        ..., "--output", "-o", metavar="FILE", help="the .jsonl file to write", show_default=False
    ),
    split: str = Option("train", "--split", metavar="NAME", help="which split of a folder"),
    skip: bool = Option(
        False, "--skip", help="leave out rows that have not the form of the others"
    ),
    format: Format = FORMAT,
) -> Exit:
    """Convert Alpaca, ShareGPT, question and answer, and the like, into messages."""
    from launcher.dataset.convert import convert

    done = convert(source, output, split=split, skip=skip, say=console.say_aside)
    lines = [f"{done.rows:,} rows of the form {done.shape} written to {done.output} as {done.into}"]
    if done.skipped:
        lines.append(f"{len(done.skipped):,} rows left out, the first: {done.skipped[0]}")
    is_pairs = "`chosen`" in done.into
    stage = "dpo" if is_pairs else "sft"
    lines.append(f"in a stage file for TRL: `dataset_name: {done.output.parent}`, the folder")
    if not is_pairs:
        lines.append(f"in one for open-instruct: `dataset_mixer_list: [{done.output}, 1.0]`")
    lines.append(f"for a new stage file: launch init {stage} --model NAME --data {done.output}")
    content = {
        "output": str(done.output),
        "rows": done.rows,
        "form": done.shape,
        "skipped": [
            {"file": row.file, "row": row.number, "reason": row.reason} for row in done.skipped
        ],
    }
    return answer("data convert", format, content, lines)
