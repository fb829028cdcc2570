"""Results as text for people, or as JSON for programs. Only `style` knows colour."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from launcher import redaction
from launcher.errors import Finding
from launcher.printable import escape_controls, indent_lines, make_printable
from launcher.redaction import Redactor

if TYPE_CHECKING:
    # only for annotations: validation must not pay for importing what judges a run
    from launcher.plan.plan import Plan
    from launcher.runs.attempt import Command
    from launcher.upstream.schema import Schema

SCHEMA_VERSION = 1
_COLOUR = {"error": "red", "warning": "yellow", "note": "cyan"}
_PLAN_WIDTH = 80


class _Styled(str):
    """A word of launch in colour: nothing else reaches a terminal with an escape sequence."""


def style(word: str, colour: str, *, bold: bool = True) -> _Styled:
    return _Styled(typer.style(word, fg=colour, bold=bold))


def echo(*parts: str, err: bool = False, nl: bool = True, redactor: Redactor | None = None) -> None:
    """Print text without secrets: most of what is shown quotes what users wrote."""
    redactor = _choose_redactor(redactor)
    clean: list[str] = []
    for part in parts:
        if isinstance(part, _Styled):
            clean.append(part)
        else:
            # invisible characters go first: they may part a secret
            clean.append(redactor.redact(make_printable(part)))
    _write("".join(clean), err=err, nl=nl)


def _choose_redactor(redactor: Redactor | None) -> Redactor:
    """What is secret to a plan or a run; without either, to the environment of this process."""
    if redactor is None:
        return redaction.find_process_secrets()
    return redactor


def _write(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print clean text; a reader that has gone must end neither a run nor change its exit code."""
    try:
        try:
            typer.echo(text, err=err, nl=nl)
        except UnicodeEncodeError:
            # a path that is not UTF-8
            typer.echo(text.encode(errors="backslashreplace").decode(), err=err, nl=nl)
    except OSError as error:
        if error.errno not in {errno.EPIPE, errno.EIO}:
            raise
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2 if err else 1)
        os.close(sink)


def print_envelope(
    command: str, ok: bool, findings: Iterable[Finding], data: Any, redactor: Redactor | None = None
) -> None:
    redactor = _choose_redactor(redactor)
    envelope = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "ok": ok,
        "findings": [finding.naming_variables(redactor).as_json() for finding in findings],
        "data": data,
    }
    # redacted as data, not as text: there `"hub_token": {` would be a name and its value
    clean = redactor.redact(envelope)

    def redacted_text(value: object) -> str:
        return redactor.redact(str(value))

    text = json.dumps(clean, indent=2, ensure_ascii=False, default=redacted_text)
    _write(escape_controls(text))


def print_raw(text: str, redactor: Redactor | None = None) -> None:
    echo(text, nl=False, redactor=redactor)


def print_json(data: Any) -> None:
    _write(escape_controls(json.dumps(data, indent=1, ensure_ascii=False, default=str)))


def annotate(findings: Iterable[Finding], redactor: Redactor | None = None) -> None:
    """Print findings as GitHub's workflow commands: annotations of a pull request."""
    redactor = _choose_redactor(redactor)
    for finding in findings:
        command = render_workflow_command(finding.naming_variables(redactor), Path.cwd())
        _write(redactor.redact(make_printable(command, commands=True)))


def render_workflow_command(finding: Finding, root: Path) -> str:
    properties: dict[str, str] = {}
    if finding.file is not None:
        path = Path(os.path.abspath(root / finding.file))
        if path.is_relative_to(root):
            path = path.relative_to(root)
        properties["file"] = str(path)
        if finding.line is not None:
            properties["line"] = str(finding.line)
    properties["title"] = finding.code
    escaped = []
    for name, value in properties.items():
        value = _escape_data(value)
        value = value.replace(":", "%3A").replace(",", "%2C")
        escaped.append(f"{name}={value}")
    message = finding.message
    if finding.help is not None:
        message += f"\nhelp: {finding.help}"
    kind = "notice" if finding.severity == "note" else finding.severity
    return f"::{kind} {','.join(escaped)}::{_escape_data(message)}"


def _escape_data(text: str) -> str:
    """Escape text for a workflow command; lone surrogates of a name that is not UTF-8 go first."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def print_arguments(
    schemas: Sequence[Schema], notes: Mapping[str, Mapping[str, Sequence[str]]]
) -> None:
    """Print every argument of some stages; `notes` are lines by script and name."""
    for schema in schemas:
        echo(f"{schema.stage} on {schema.backend}: {schema.script} at {schema.named}")
        rows = []
        for name, argument in schema.fields.items():
            note = "; ".join(notes[schema.script].get(name, ()))
            rows.append(
                {
                    "name": name,
                    "type": argument.type,
                    "default": argument.default_text or argument.default,
                    "defined": argument.where,
                    "note": note or None,
                }
            )
        print_table(rows, ("name", "type", "default", "defined", "note"))


def say(text: str, redactor: Redactor | None = None) -> None:
    echo(text, redactor=redactor)


def say_aside(text: str) -> None:
    """Print how far a command is, to stderr: its answer goes to stdout."""
    echo(text, err=True)


def print_findings(findings: Sequence[Finding], redactor: Redactor | None = None) -> None:
    redactor = _choose_redactor(redactor)
    # what launch sets is said by the lines of the plan
    printed = [finding for finding in findings if finding.code != "derived"]
    named = tuple(finding.naming_variables(redactor) for finding in printed)
    for finding in redactor.redact(named):
        head = style(f"{finding.severity}[{finding.code}]", _COLOUR[finding.severity])
        _write(head + indent_lines(f": {finding.message}"), err=True)
        if finding.place is not None:
            _write(indent_lines(f"  --> {finding.place}"), err=True)
        if finding.help is not None:
            _write(indent_lines(f"  help: {finding.help}"), err=True)


def count_gpus(count: int) -> str:
    if not count:
        return "the CPU"
    if count == 1:
        return "1 GPU"
    return f"{count} GPUs"


def _format_title(plan: Plan) -> str:
    machine = count_gpus(plan.gpus)
    if plan.nodes > 1:
        machine += f" on each of {plan.nodes} nodes"
    return f"{plan.title} on {machine}, deepspeed {plan.stage.options.deepspeed_name}"


def _format_rows_and_steps(plan: Plan) -> str:
    rows = "unknown number of rows"
    if plan.rows is not None:
        rows = f"{plan.rows:,} rows"
    steps = "steps unknown until the data is read"
    if plan.steps is not None:
        steps = f"{plan.steps:,} steps"
    return f"{rows}, {steps}"


def _format_batch(plan: Plan) -> str:
    processes = "1 process"
    if plan.processes != 1:
        processes = f"{plan.processes} processes"
    each = f"{plan.per_device} rows x {plan.accumulation} accumulated"
    return f"{each} x {processes} = {plan.global_batch} rows"


def plan_lines(plan: Plan) -> list[str]:
    """The plan, the source and the derived values with their reasons, one fact a line."""
    lines = [
        _format_title(plan),
        f"source: {plan.stage.upstream.describe()}",
        f"batch: {_format_batch(plan)} a step",
        f"data: {_format_rows_and_steps(plan)}",
    ]
    for name, derived in plan.derived.items():
        lines.append(f"set: {name}={derived.value}  ({derived.why})")
    return lines


def print_plan(plan: Plan, log: Path) -> None:
    """Print what starts, in a few lines of 80 columns: a dry run shows the reasons."""
    source = plan.stage.upstream
    place = ""
    if source.is_checkout and source.root is not None:
        place = f", {shorten_path(source.root)}"
    lines = [
        f"{_format_title(plan)}, {source.name}{place}",
        f"batch: {_format_batch(plan)}; {_format_rows_and_steps(plan)}",
    ]
    names = plan.stage.entry.names
    values = []
    for name, derived in plan.derived.items():
        if name not in {names.per_device, names.accumulation}:
            values.append(f"{name}={derived.value}")
    if values:
        lines.append(f"set: {', '.join(values)}")
    lines.append(f"log: {shorten_path(log)}")
    for line in lines:
        # paths stay whole: they are copied
        wrapped = textwrap.wrap(line, _PLAN_WIDTH, subsequent_indent="  ", break_long_words=False)
        echo("\n".join(wrapped), err=True)


def shorten_path(path: Path) -> str:
    """A path as it is written in this folder or below the user's own."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    if path.is_relative_to(Path.home()):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def print_dry_run(plan: Plan, command: Command, script: str | None = None) -> None:
    """Print the plan as comments, then the command in one line to paste, or its batch script."""
    lines = plan_lines(plan)
    source = plan.stage.upstream
    if source.is_checkout and source.root is None:
        from launcher.pin import pin

        lines.append(
            f"no open-instruct checkout was found, training needs one: {pin.get_checkout()}"
        )
    secrets = set(command.variables.values()) - os.environ.keys()
    for variable in sorted(secrets):
        lines.append(f"{variable} is a secret: export it before you paste this")
    words = command.redacted(plan.redactor).shell()
    if script is not None:
        lines.append(f"what trains on each node: {words}")
    # each line of a value is a comment: pasted text must not run the second one
    for line in "\n".join(lines).splitlines():
        echo(f"# {line}")
    if script is None:
        echo(words)
    else:
        print_raw(script)


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], redactor: Redactor | None = None
) -> None:
    """Print plain columns, without the empty ones; paths below the working directory are relative.

    If a terminal is too narrow, the further columns follow below, beside the first one again.
    """
    padded: list[list[str]] = []
    for name in columns:
        values = [row.get(name) for row in rows]
        if values.count(None) < len(values):
            padded.append(_pad_texts([name, *map(_format_cell, values)]))
    widths = [len(column[0]) for column in padded]
    lines: list[str] = []
    for band in _split_into_bands(widths):
        if lines:
            lines.append("")
        band_columns = [padded[number] for number in band]
        for cells in zip(*band_columns, strict=True):
            lines.append("  ".join(cells).rstrip())
    for line in _choose_redactor(redactor).redact(lines):
        _write(line)


def _pad_texts(texts: Sequence[str]) -> list[str]:
    width = max(map(len, texts))
    return [text.ljust(width) for text in texts]


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    text = make_printable(str(value)).replace("\n", " ")
    return text.removeprefix(f"{os.getcwd()}/")


def _split_into_bands(widths: Sequence[int]) -> list[list[int]]:
    """The columns that stand beside each other, by number; the first one leads every band."""
    room = math.inf
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
    bands = [[0]]
    for number in range(1, len(widths)):
        band = [*bands[-1], number]
        needed = sum(widths[column] + 2 for column in band) - 2
        if len(bands[-1]) > 1 and needed > room:
            band = [0, number]
            bands.append(band)
        bands[-1] = band
    return bands
