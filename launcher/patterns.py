"""What a line of a log means, as data: a `Pattern`. `backends/*_log.py` hold them all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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


def pattern(
    name: str,
    needle: str,
    regex: str | None = None,
    *,
    always: Iterable[str] = (),
) -> Pattern:
    """A `Pattern` from readable text; without a regex the needle is all that it looks for."""
    return Pattern(
        name=name,
        needle=needle.encode(),
        regex=re.compile((re.escape(needle) if regex is None else regex).encode()),
        always=tuple(re.compile(found.encode()) for found in always),
    )
