"""What a line of a log means, as data: a `Pattern`. `backends/*_log.py` hold them all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LEAST = 23  # bytes of a text that is found at no cost of its own (see `sieve`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One line that means something: `regex` is tried only on segments that hold `needle`.

    `where` names the upstream `file:line` that prints it. `anchors` are longer texts of which one
    stands on such a line or right beside it: they are what a large log is searched for, the needle
    alone only near its beginning and its end. A needle shorter than 23 bytes that is its own anchor
    costs every log a search of its own. `always` finds, among lines of which only a sample is read,
    those that must all be read.
    """

    name: str
    needle: bytes
    regex: re.Pattern[bytes]
    where: str
    anchors: tuple[bytes, ...]
    always: tuple[re.Pattern[bytes], ...] = ()


def pattern(
    name: str,
    needle: str,
    regex: str,
    where: str,
    *,
    anchors: Iterable[str] | None = None,
    always: Iterable[str] = (),
) -> Pattern:
    """A `Pattern` from readable text; `regex` is searched for within one segment of a line.

    The needle is its own anchor unless some are given, be it none.
    """
    return Pattern(
        name=name,
        needle=needle.encode(),
        regex=re.compile(regex.encode()),
        where=where,
        anchors=tuple(anchor.encode() for anchor in ([needle] if anchors is None else anchors)),
        always=tuple(re.compile(found.encode()) for found in always),
    )
