"""What a rule is: a short generator over typed values that says what is wrong, and edits nothing."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from launcher.errors import Finding, Layer, Severity, brief
from launcher.rules import premises
from launcher.upstream.schema import Schema, Values

Rule = Callable[[Values], Iterator[Finding]]


_Function = TypeVar("_Function", bound=Callable[..., Iterator[Finding]])


def cites(*places: str) -> Callable[[_Function], _Function]:
    """Name the upstream lines that a rule is about, as `package/file.py:LINE,FIRST-LAST`.

    Without a package they are open-instruct's. Where a source lacks one of them, what the rule
    finds counts less (`as_it_stands`).
    """

    def mark(rule: _Function) -> _Function:
        rule.__dict__["cites"] = places
        return rule

    return mark


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a field can hold, and what happens to the others; `needs` is a switch it acts under."""

    holds: Callable[[float], bool]
    severity: Severity
    otherwise: str
    needs: str | None = None
    code: str = "out-of-range"


def plain(value: float) -> str:
    """A number for a message; an int of hundreds of digits is no float, and is cut."""
    return f"{value:g}" if isinstance(value, float) else brief(str(value))


def outside(
    values: Values, table: Mapping[str, tuple[Range, ...]], show: Callable[[float], str] = plain
) -> Iterator[Finding]:
    for key, ranges in table.items():
        value = number(values.get(key))
        if value is None or not values.given(key):
            continue
        for one in ranges:
            if not one.holds(value) and (one.needs is None or values[one.needs]):
                yield say(one.severity, one.code, key, f"`{key}: {show(value)}`: {one.otherwise}")


def say(
    severity: Severity, code: str, key: str, message: str, help: str | None = None, *, layer: Layer = "run"
) -> Finding:
    """A finding about one argument; `stage` fills in the place in the file."""
    return Finding(severity=severity, layer=layer, code=code, key=f"args.{key}", message=message, help=help)


def say_of_option(
    severity: Severity, code: str, key: str, message: str, help: str | None = None, *, layer: Layer = "run"
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
) -> Rule:
    """A rule of one condition; `{name}` in its message stands for the value of that argument.

    `cited` names the upstream lines that it is about. `tested`: other releases may know more, so
    that it only speaks at the tested one.
    """

    @cites(cited)
    def rule(values: Values) -> Iterator[Finding]:
        if (values.schema.tested or not tested) and when(values):
            filled = re.sub(r"\{(\w+)\}", lambda name: brief(values[name[1]]), message)
            yield say(severity, code, key, filled, help, layer=layer)

    return rule


warn = partial(check, severity="warning")


def unread(cited: str, key: str, read: Callable[[Values], object], where: str, help: str = "delete the line") -> Rule:
    """A rule about an argument that acts under one condition, where it is given without that."""

    def idle(values: Values) -> bool:
        given = values.given(key) and values[key]
        return bool(given and values[key] != values.schema.fields[key].default and not read(values))

    message = f"`{key}` does nothing here: it is read only {where}"
    return warn(cited, "conditional-key", key, idle, message, help)


def no_model(cited: str, when: Callable[[Values], object] = lambda v: not v["model_name_or_path"]) -> Rule:
    help = "add `model_name_or_path: <hub name or folder>`"
    return check(cited, "no-model", "model_name_or_path", when, "no model named", help)


def as_it_stands(
    rule: Callable[..., Iterator[Finding]], found: Iterator[Finding], schema: Schema
) -> Iterator[Finding]:
    """What a rule found; where this source is not the pin, only with what it cites counting in full.

    A rule that names behaviours of upstream's (`premises`) is about the sources that have them.
    """
    if not premises.applies(rule, schema):
        return
    if schema.stands is None or premises.settled(rule, schema):
        yield from found
        return
    from launcher.upstream import citations

    for one in found:
        # what is launch's own does not hang on upstream's lines
        places = () if one.layer == "launch" else citations.of_rule(rule)
        gone = [place for place in places if not schema.stands(place)]
        yield citations.downgrade(one, gone) if gone else one
