"""Bytes of a console file of any size -> pieces, and the segments that lie in them.

A segment is what stands between line feeds or carriage returns: a progress bar redraws itself
behind a carriage return, so that one physical line may hold thousands of segments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
SEGMENT_BYTES = 1 << 16  # as much of one segment as is ever looked at
BAR_BYTES = 2_000  # a bar on a wide terminal
TEXT_CHARS = 300

# Training's bar is the one without a description before the percentage.
BAR = re.compile(
    rb"(?:\A|[\r\n])[ \t]*\d+%\|[^|\r\n]*\|[ \t]*(?P<done>\d{1,12})/(?P<total>\d{1,12}) \["
)
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_LEADING_BAR = re.compile(r"^[^|]{0,120}%\|[^|]*\|[^\[]{1,40}\[[^\]]*\]")


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Pieces that end where a segment ends, without colour codes.

    A segment of any length costs bounded memory: of one that fills a whole piece only the first
    64 KiB are kept. Line feeds are never lost, so that they can be counted.
    """
    carry = b""
    while data := file.read(BLOCK_BYTES):
        data = carry + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        carry = data[cut:] if cut else data[:SEGMENT_BYTES]
        if cut:
            yield _plain(data[:cut])
    if carry:
        yield _plain(carry)


def bounds(block: bytes, at: int) -> tuple[int, int]:
    """Start and end of the segment around `at`; start is -1 where it begins too far back."""
    low = max(0, at - SEGMENT_BYTES)
    start = max(block.rfind(b"\n", low, at), block.rfind(b"\r", low, at)) + 1
    if start == 0 and low > 0:
        return -1, at + 1
    high = min(len(block), start + SEGMENT_BYTES)
    for separator in (b"\n", b"\r"):
        found = block.find(separator, at, high)
        high = found if found >= 0 else high
    return start, max(high, at + 1)


def text(raw: bytes) -> str:
    """Decoded and stripped; what is no UTF-8 becomes a replacement character."""
    return raw.decode("utf-8", "replace").strip()


def clean(segment: bytes) -> str:
    """At most 300 printable characters, without the progress bar that the text stands behind."""
    whole = text(segment)
    rest = _LEADING_BAR.sub("", whole).strip() if "%|" in whole else whole
    shown = (rest or whole)[:TEXT_CHARS]
    return shown if shown.isprintable() else "".join(c for c in shown if c.isprintable())


def _plain(block: bytes) -> bytes:
    return _ANSI.sub(b"", block) if b"\x1b" in block else block
