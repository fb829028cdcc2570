"""What a rule is: a short generator over typed values that says what is wrong, and edits nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.errors import Finding, Layer, Severity
from launcher.schema import Schema, Values

Rule = Callable[[Values], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a field can hold, and what happens to the others; `needs` is a switch it acts under."""

    holds: Callable[[float], bool]
    severity: Severity
    otherwise: str
    needs: str | None = None
    code: str = "out-of-range"


def outside(
    values: Values, table: Mapping[str, tuple[Range, ...]], number: Callable[[Any], float | None]
) -> Iterator[tuple[str, float, Range]]:
    """Each given number with a range that it is not in; `number` reads a value, None is none."""
    for key, ranges in table.items():
        value = number(values.get(key))
        if value is None or not values.given(key):
            continue
        for one in ranges:
            if not one.holds(value) and (one.needs is None or values[one.needs]):
                yield key, value, one


def say(
    severity: Severity, layer: Layer, code: str, key: str, message: str, help: str | None = None
) -> Finding:
    """A finding about one argument; `stage` fills in the place in the file."""
    return Finding(
        severity=severity, layer=layer, code=code, key=f"args.{key}", message=message, help=help
    )


def as_it_stands(
    rule: Callable[..., Iterator[Finding]], found: Iterator[Finding], schema: Schema
) -> Iterator[Finding]:
    """What a rule found; where this source is not the pin, only with what it cites counting in full."""
    if schema.stands is None:
        yield from found
        return
    from launcher import cited

    for one in found:
        # what is launch's own does not hang on upstream's lines
        places = () if one.layer == "launch" else cited.of_rule(rule)
        gone = [place for place in places if not schema.stands(place)]
        yield cited.said(one, gone) if gone else one
