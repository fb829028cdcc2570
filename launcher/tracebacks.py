"""Lines of a Python traceback -> what was raised in the end: a `Raised`.

Ranks write over each other, so every rank's prefix (`[rank3]: `) is followed on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from launcher.segments import SEGMENT_BYTES, text

FIRST_LINE = b"Traceback (most recent call last):"
MOST_LINES = 2_000

_RANK = re.compile(rb"(?:\[(?:rank|default)\d+\]: ?)+|\d{1,4}: ")
_FRAME = re.compile(rb'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_RAISED = re.compile(
    rb"(?P<type>(?:\w+\.)+(?:[A-Z]\w*|\w*error|timeout)"
    rb"|\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|StopIteration|Fault))"
    rb"(?::(?P<message>.*))?$"
)
# What stands before a traceback that ends no process.
_HARMLESS = re.compile(rb"Exception ignored in|--- Logging error ---|Exception in thread")
_CHAINED = re.compile(rb"During handling of the above|The above exception was the direct cause")


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The last line of a traceback; `at` is the innermost frame's `file:line`.

    `chained` says that it was raised while the exception before it was being handled.
    """

    type: str
    message: str
    at: str
    rank: str
    chained: bool
    line: int
    segment: bytes

    def as_fields(self) -> dict[str, str]:
        """As a signal's fields, which are text."""
        chained = "yes" if self.chained else ""
        fields = {"type": self.type, "message": self.message, "at": self.at}
        return {**fields, "rank": self.rank, "chained": chained}


@dataclass(slots=True, kw_only=True)
class Tracebacks:
    """The tracebacks that are open where a piece of the log ends: (innermost frame, chained)."""

    open: dict[bytes, tuple[str, bool]] = field(default_factory=dict)
    followed: int = 0

    def follow(self, block: bytes, start: int, line: int) -> tuple[int, list[Raised]]:
        """Read on from `start`, in line `line`, until every open traceback says what was raised.

        Gives the position reached and what was raised on the way.
        """
        before = block[max(0, start - 300) : start]
        chained, harmless = bool(_CHAINED.search(before)), bool(_HARMLESS.search(before))
        raised: list[Raised] = []
        while start < len(block):
            stop = block.find(b"\n", start)
            stop = stop if stop >= 0 else len(block)
            for segment in block[start : min(stop, start + SEGMENT_BYTES)].split(b"\r"):
                raised += self._line(segment.rstrip(), chained, line)
            start, line, self.followed = stop + 1, line + 1, self.followed + 1
            if self.followed > MOST_LINES:
                self.open.clear()
            if not self.open:
                break
        return start, [] if harmless else raised

    def _line(self, segment: bytes, chained: bool, line: int) -> list[Raised]:
        prefix = rank[0] if (rank := _RANK.match(segment)) else b""
        body = segment[len(prefix) :]
        if FIRST_LINE in body:
            self.open[prefix], self.followed = ("", chained), 0
        elif prefix in self.open:
            at, chained = self.open[prefix]
            if frame := _FRAME.match(body):
                self.open[prefix] = (f"{text(frame['file'])}:{text(frame['line'])}", chained)
            elif found := _RAISED.match(body):
                del self.open[prefix]
                return [
                    Raised(
                        type=text(found["type"]),
                        message=text(found["message"] or b""),
                        at=at,
                        rank=text(re.sub(rb"\D", b"", prefix)),
                        chained=chained,
                        line=line,
                        segment=segment,
                    )
                ]
        return []
