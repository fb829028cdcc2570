"""Results -> text for people, the JSON envelope for machines. The only module that knows colour."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from launcher import redaction
from launcher.config.points import BY_NAME
from launcher.errors import Finding
from launcher.printable import escaped, folded, printable
from launcher.redaction import Redactor
from launcher.verdict import summary

if TYPE_CHECKING:
    # only for annotations: validation must not pay for importing what judges a run
    from launcher.plan.plan import Plan
    from launcher.runs.attempt import Command
    from launcher.upstream.schema import Schema
    from launcher.verdict.check import Verdict

SCHEMA_VERSION = 1
_COLOUR = {"error": "red", "warning": "yellow", "note": "cyan"}
_STATUS = {"pass": "green", "fail": "red", "unproven": "yellow", "stopped": "yellow"}
_FIGURES_WIDTH = 76  # columns of a terminal of 80
_MARK = {True: "ok", False: "FAIL", None: "unproven"}
_POINT_COLOUR = {"ok": "green", "FAIL": "red", "unproven": "yellow", "stopped": "yellow"}


class _Styled(str):
    """A word of launch's own in colour: nothing else reaches a terminal with an escape sequence."""


def _style(word: str, colour: str, *, bold: bool = True) -> _Styled:
    return _Styled(typer.style(word, fg=colour, bold=bold))


def _echo(*parts: str, err: bool = False, nl: bool = True, redactor: Redactor | None = None) -> None:
    """Print, without the secrets in it: most of what is shown quotes what was given."""
    redactor = _redactor(redactor)
    # first what is invisible: it may part a token
    clean = [part if isinstance(part, _Styled) else redactor.redact(printable(part)) for part in parts]
    _write("".join(clean), err=err, nl=nl)


def _redactor(redactor: Redactor | None) -> Redactor:
    """What is secret to a plan or a run; where neither is shown, by the environment of this process."""
    return redaction.of_process() if redactor is None else redactor


def _write(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print what is printable; a reader that has gone takes neither a run nor its exit code with it."""
    try:
        try:
            typer.echo(text, err=err, nl=nl)
        except UnicodeEncodeError:
            # a path that is no UTF-8
            typer.echo(text.encode(errors="backslashreplace").decode(), err=err, nl=nl)
    except OSError as error:
        if error.errno not in {errno.EPIPE, errno.EIO}:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2 if err else 1)
        os.close(nowhere)


def envelope(command: str, ok: bool, findings: Iterable[Finding], data: Any, redactor: Redactor | None = None) -> None:
    redactor = _redactor(redactor)
    found = [finding.naming_variables(redactor).as_json() for finding in findings]
    whole = {"schema_version": SCHEMA_VERSION, "command": command, "ok": ok, "findings": found, "data": data}
    # as data, not as text: there `"hub_token": {` would be a name and its value
    clean = json.dumps(
        redactor.redact(whole), indent=2, ensure_ascii=False, default=lambda value: redactor.redact(str(value))
    )
    _write(escaped(clean))


def raw(text: str, redactor: Redactor | None = None) -> None:
    _echo(text, nl=False, redactor=redactor)


def plain_json(data: Any) -> None:
    _write(escaped(json.dumps(data, indent=1, ensure_ascii=False, default=str)))


def annotate(found: Iterable[Finding], redactor: Redactor | None = None) -> None:
    """Findings as GitHub's workflow commands, which it shows as annotations of a pull request."""
    redactor = _redactor(redactor)
    for finding in found:
        line = workflow_command(finding.naming_variables(redactor), Path.cwd())
        _write(redactor.redact(printable(line, commands=True)))


def workflow_command(finding: Finding, root: Path) -> str:
    properties = {"title": finding.code}
    if finding.file is not None:
        path = Path(os.path.abspath(root / finding.file))
        name = path.relative_to(root) if path.is_relative_to(root) else path
        line = {} if finding.line is None else {"line": str(finding.line)}
        properties = {"file": str(name), **line, **properties}
    escaped = (f"{name}={_data(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in properties.items())
    help = "" if finding.help is None else f"\nhelp: {finding.help}"
    kind = "notice" if finding.severity == "note" else finding.severity
    return f"::{kind} {','.join(escaped)}::{_data(f'{finding.message}{help}')}"


def _data(text: str) -> str:
    """A text inside a workflow command; no stream takes the lone surrogates of a name that is no UTF-8."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def arguments(schemas: Sequence[Schema], notes: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Every argument of some stages, with what is to be known of it: `notes` are lines by script and name."""
    for schema in schemas:
        _echo(f"{schema.stage} on {schema.backend}: {schema.script} at {schema.named}")
        columns, rows = ("name", "type", "default", "defined", "note"), []
        for name, known in schema.fields.items():
            note = "; ".join(notes[schema.script].get(name, ())) or None
            values = (name, known.type, known.default_text or known.default, known.where, note)
            rows.append(dict(zip(columns, values, strict=True)))
        table(rows, columns)


def say(text: str, redactor: Redactor | None = None) -> None:
    _echo(text, redactor=redactor)


def aside(text: str) -> None:
    """How far a command is, to stderr: its answer goes to stdout."""
    _echo(text, err=True)


def findings(found: Sequence[Finding], redactor: Redactor | None = None) -> None:
    redactor = _redactor(redactor)
    named = tuple(finding.naming_variables(redactor) for finding in found)
    for finding in redactor.redact(named):
        head = _style(f"{finding.severity}[{finding.code}]", _COLOUR[finding.severity])
        _write(head + folded(f": {finding.message}"), err=True)
        for mark, text in (("-->", finding.place), ("help:", finding.help)):
            if text is not None:
                _write(folded(f"  {mark} {text}"), err=True)


def plan_lines(plan: Plan) -> list[str]:
    """The plan, the source and the derived values, one fact a line."""
    where = f"{plan.gpus} GPU(s)" if plan.gpus else "the CPU"
    nodes = f" on each of {plan.nodes} nodes" if plan.nodes > 1 else ""
    rows = "unknown number of" if plan.rows is None else f"{plan.rows:,}"
    steps = "steps unknown until the data is read" if plan.steps is None else f"{plan.steps:,} steps"
    lines = [
        f"{plan.title} on {where}{nodes}, deepspeed {plan.stage.options.deepspeed_name}",
        f"source: {plan.stage.upstream.describe()}",
        f"batch: {plan.per_device} rows x {plan.accumulation} accumulated x {plan.processes} "
        f"process(es) = {plan.global_batch} rows a step",
        f"data: {rows} rows, {steps}",
    ]
    return lines + [f"set: {name}={d.value}  ({d.why})" for name, d in plan.derived.items()]


def beginning(plan: Plan, console: Path) -> None:
    for line in (*plan_lines(plan), f"log: {console}"):
        _echo(line, err=True, redactor=plan.redactor)


def dry_run(plan: Plan, command: Command, script: str | None = None) -> None:
    """The plan as comments, then the command on one line, ready to paste, or its batch script."""
    lines = plan_lines(plan)
    source = plan.stage.upstream
    if source.is_checkout and source.root is None:
        from launcher.pin import pin

        lines.append(f"no open-instruct checkout was found, training needs one: {pin.get_checkout()}")
    for variable in sorted(set(command.variables.values()) - os.environ.keys()):
        lines.append(f"{variable} is a secret: export it before you paste this")
    words = command.redacted(plan.redactor).shell()
    if script is not None:
        lines.append(f"what trains on each node: {words}")
    # a comment throughout: what is pasted must not run the second line of a value
    for line in "\n".join(lines).splitlines():
        _echo(f"# {line}", redactor=plan.redactor)
    if script is None:
        _echo(words, redactor=plan.redactor)
    else:
        raw(script, plan.redactor)


def verdict(judged: Verdict, name: str) -> None:
    """The status and the name of a run, why it did not pass, its points (failed ones first), its figures."""
    record = judged.as_json()
    outcome, cause = summary.outcome(record), summary.cause(record)
    what = f"  {name}  ({judged.stage or 'unknown stage'}, {judged.steps or 0} steps)"
    _echo("verdict: ", _style(outcome, _STATUS[outcome]), folded(what))
    printed: set[str | None] = set()
    if cause is not None:
        label = "stopped" if judged.stopped is not None else "cause"
        _echo("  ", _style(label, _STATUS[outcome]), folded(f": {cause.text}"))
        if cause.line:
            place = ":".join(str(cause.line[key]) for key in ("file", "line") if cause.line.get(key))
            shown = cause.line.get("text")
            _echo(folded(f"    {place}: {shown}" if shown else f"    {place}"))
        if cause.help:
            _echo(folded(f"    help: {cause.help}"))
        printed = {cause.text, *cause.repeated, cause.help}
    unreached = summary.unreached(record)
    for point in summary.failed_first(record):
        if point["name"] not in unreached:
            _point(point, printed, outcome)
    if unreached:
        # each of them would say the same
        _echo(f"  not shown, training never reached step 1: {', '.join(unreached)}")
    known = {key: value for key, value in judged.metrics.items() if value is not None}
    # a figure stays beside its name
    figures = (f"{key}\xa0{f'{v:,.4g}' if isinstance(v, float) else v}" for key, v in known.items())
    for line in textwrap.wrap(", ".join(figures), _FIGURES_WIDTH):
        _echo(f"  {line}".replace("\xa0", " "))


def _point(point: summary.Point, printed: Container[str | None], outcome: str) -> None:
    ok, detail = point["ok"], point["detail"]
    expected = "" if point["expected"] in {None, "any"} else f"expected {point['expected']}"
    # what fails of a run that was stopped is that it was
    word = "stopped" if ok is False and outcome == "stopped" else _MARK[ok]
    mark = _style(f"{word:<10}", _POINT_COLOUR[word], bold=False)
    _echo(folded(f"  {point['name']:<16}{point['state']!s:<18}"), mark, folded(expected))
    reasons = () if ok is True else summary.reasons(detail)
    # of a point that is as expected too: half of the batch may hold nothing
    stand_in = detail.get("stand_in")
    lines = [*reasons, *filter(None, [detail.get("wasted"), stand_in and f"stand-in: {stand_in}"])]
    kind = BY_NAME.get(str(point["name"]))
    if kind is not None and kind.on_terminal:
        lines = [*filter(None, [summary.sentence(point)]), *lines]
    for line in lines:
        if line not in printed:
            _echo(folded(f"    {line}"))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], redactor: Redactor | None = None) -> None:
    """Plain columns, as wide as their widest entry, none empty; paths below the working directory are relative.
    On a terminal that is too narrow for all of them the others follow below, beside the first one again."""
    columns = [c for c in columns if any(row.get(c) is not None for row in rows)]
    here = f"{os.getcwd()}/"
    cells = [
        [printable(str("-" if row.get(c) is None else row[c])).replace("\n", " ") for c in columns] for row in rows
    ]
    whole = [columns, *([cell.removeprefix(here) for cell in row] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    bands = [[0]]
    for number in range(1, len(columns)):
        if len(bands[-1]) > 1 and sum(widths[n] + 2 for n in [*bands[-1], number]) - 2 > room:
            bands.append([0])
        bands[-1].append(number)
    for band in bands:
        lines = ["  ".join(row[n].ljust(widths[n]) for n in band).rstrip() for row in whole]
        if band is not bands[0]:
            _write("")
        for line in _redactor(redactor).redact(lines):
            _write(line)
