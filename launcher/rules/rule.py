"""What a rule is: a short generator over typed values that says what is wrong; it edits nothing."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from launcher.errors import Finding, Layer, Severity, shorten
from launcher.lazy_dataclass import dataclass
from launcher.rules import premises
from launcher.upstream.citations import render_citations
from launcher.upstream.schema import Schema, Values

Rule = Callable[[Values], Iterator[Finding]]


_Function = TypeVar("_Function", bound=Callable[..., Iterator[Finding]])


def cites(*places: str, reviewed: tuple[str, ...] = ()) -> Callable[[_Function], _Function]:
    """Name the upstream lines that a rule is about, by file, symbol and anchor (see
    upstream/citations.py).

    `reviewed` are the commits, besides the backend's `BASELINE`, at which somebody has read the
    lines and the functions around them and found the rule true. In a source where they are as at
    none of these commits, what the rule finds counts less (`as_it_stands`).
    """
    return _make_marker(cites=places, reviewed=reviewed)


def _make_marker(**attributes: tuple[str, ...]) -> Callable[[_Function], _Function]:
    def mark(rule: _Function) -> _Function:
        rule.__dict__.update(attributes)
        return rule

    return mark


Fact = Literal["attempts", "machine", "packages", "split"]
"""Attributes of a `Context` that a rule can need, or that can say more than it."""


def needs(*facts: Fact) -> Callable[[_Function], _Function]:
    """Name the facts that a rule needs: it does not apply where one of them is None."""
    return _make_marker(needs=facts)


def superseded_by(*facts: Fact) -> Callable[[_Function], _Function]:
    """Name the facts that say more than a rule: it does not apply where one of them is known."""
    return _make_marker(superseded_by=facts)


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a field can hold, and what happens to the others.

    `needs` is a switch it acts under.
    """

    holds: Callable[[float], bool]
    severity: Severity
    otherwise: str
    needs: str | None = None
    code: str = "out-of-range"


def plain(value: float) -> str:
    """A number for a message; an int of hundreds of digits is no float, and is cut."""
    return f"{value:g}" if isinstance(value, float) else shorten(str(value))


def outside(
    values: Values, table: Mapping[str, tuple[Range, ...]], show: Callable[[float], str] = plain
) -> Iterator[Finding]:
    for key, ranges in table.items():
        value = number(values.get(key))
        if value is None or not values.given(key):
            continue
        for limit in ranges:
            if not limit.holds(value) and (limit.needs is None or values[limit.needs]):
                message = f"`{key}: {show(value)}`: {limit.otherwise}"
                yield say(limit.severity, limit.code, key, message)


def say(
    severity: Severity,
    code: str,
    key: str,
    message: str,
    help: str | None = None,
    *,
    layer: Layer = "run",
) -> Finding:
    """A finding about one argument; `stage` fills in the place in the file."""
    return say_of_option(severity, code, f"args.{key}", message, help, layer=layer)


def say_of_option(
    severity: Severity,
    code: str,
    key: str,
    message: str,
    help: str | None = None,
    *,
    layer: Layer = "run",
) -> Finding:
    return Finding(severity=severity, layer=layer, code=code, key=key, message=message, help=help)


def number(value: Any) -> float | None:
    """The value if it is a number: at another version a default may be unknown."""
    return value if isinstance(value, int | float) else None


def check(
    cited: str,
    code: str,
    key: str,
    when: Callable[[Values], object],
    message: str,
    help: str | None = None,
    *,
    severity: Severity = "error",
    layer: Layer = "run",
    tested: bool = False,
    reviewed: tuple[str, ...] = (),
) -> Rule:
    """A rule of one condition; `{name}` in its message stands for the value of that argument.

    `cited` and `reviewed` are those of `cites`. `tested`: other releases may know more, so that it
    only speaks at the tested one.
    """

    @cites(cited, reviewed=reviewed)
    def rule(values: Values) -> Iterator[Finding]:
        if (values.schema.tested or not tested) and when(values):
            filled = re.sub(r"\{(\w+)\}", lambda name: shorten(values[name[1]]), message)
            yield say(severity, code, key, filled, help, layer=layer)

    rule.__dict__["about"] = f"{code} of {key}"
    return rule


warn = partial(check, severity="warning")


def unread(
    cited: str,
    key: str,
    read: Callable[[Values], object],
    where: str,
    help: str = "delete the line",
    reviewed: tuple[str, ...] = (),
) -> Rule:
    """A rule about an argument that acts under one condition, where it is given without that."""

    def idle(values: Values) -> bool:
        if not values.given(key) or not values[key]:
            return False
        return values[key] != values.schema.fields[key].default and not read(values)

    message = f"`{key}` does nothing here: it is read only {where}"
    return warn(cited, "conditional-key", key, idle, message, help, reviewed=reviewed)


def no_model(
    cited: str,
    when: Callable[[Values], object] = lambda v: not v["model_name_or_path"],
    reviewed: tuple[str, ...] = (),
) -> Rule:
    help = "add `model_name_or_path: <hub name or folder>`"
    return check(
        cited, "no-model", "model_name_or_path", when, "no model named", help, reviewed=reviewed
    )


def as_it_stands(
    rule: Callable[..., Iterator[Finding]], findings: Iterator[Finding], schema: Schema
) -> Iterator[Finding]:
    """What a rule finds, for people: a note where what it cites is not as it was when the rule was
    confirmed.

    What is launch's own (layer `launch`) does not hang on upstream's lines. A rule that names
    behaviours of upstream's (`premises`) is about the sources that have them, and does not hang on
    lines where these tell all.
    """
    if not premises.applies(rule, schema):
        return
    standing = schema.standing
    settled = premises.settled(rule, schema)
    for finding in findings:
        if "::" in finding.message:
            line_of = None
            if standing is not None:
                line_of = standing.line
            finding = replace(finding, message=render_citations(finding.message, line_of))
        if standing is not None and finding.layer != "launch" and not settled:
            finding = standing.weighed(finding, standing.changed(rule))
        yield finding
