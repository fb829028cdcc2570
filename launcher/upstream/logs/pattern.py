"""What a line of a log means, as data: a `Pattern`. `backends/*_log.py` hold them all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]

EVERYWHERE = {"step", "metrics", "mean_nonfinite", "warned"}
"""The names that are looked for in the middle of a large log too; all others only near both its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One line that means something: `regex` is tried only on segments that hold `needle`.

    `always` finds, among lines of which only a sample is read, those that must all be read.
    """

    name: str
    needle: bytes
    regex: re.Pattern[bytes]
    always: tuple[re.Pattern[bytes], ...] = ()


def pattern(name: str, regex: str, needle: str | None = None, *, always: Iterable[str] = ()) -> Pattern:
    """A `Pattern` from readable text; without a needle it is the longest text that every match holds."""
    return Pattern(
        name=name,
        needle=(_longest_literal(regex) if needle is None else needle).encode(),
        regex=re.compile(regex.encode()),
        always=tuple(re.compile(found.encode()) for found in always),
    )


def _longest_literal(regex: str) -> str:
    runs = [""]
    for operation, value in _parser.parse(regex):
        runs += [runs.pop() + chr(value)] if operation is _constants.LITERAL else [""]
    return max(runs, key=len)
