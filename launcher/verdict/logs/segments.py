"""A console file of any size as `Pieces`, and the segments between its line breaks.

A progress bar redraws itself behind a carriage return: one physical line may hold thousands of
segments.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from launcher.lazy_dataclass import dataclass

PIECE_BYTES = 4 << 20
SEGMENT_BYTES = 1 << 16
"""Bytes of a segment that are looked at."""
BAR_BYTES = 2_000
"""A bar on a wide terminal."""
BEYOND_BYTES = 1 << 17
"""Bytes behind a piece that belong to it, for a traceback that is open where it ends."""
TEXT_CHARS = 300

# The bar of training has no description before the percentage.
BAR = re.compile(
    rb"(?:\A|[\r\n])[ \t]*\d+%\|[^|\r\n]*\|[ \t]*(?P<done>\d{1,12})/(?P<total>\d{1,12}) \["
)
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_LEADING_BAR = re.compile(r"^[^|]{0,120}%\|[^|]*\|[^\[]{1,40}\[[^\]]*\]")
_BREAK = re.compile(rb"[\r\n]")


class LogPiece(NamedTuple):
    """The segments from `start` to `stop` of a block without colours, with what surrounds them."""

    block: bytes
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """A file as it was when it was opened: what is written later is not read.

    Every piece can be read by itself; a file that was cut short since gives less.
    """

    file: int
    size: int

    def __len__(self) -> int:
        return -(-self.size // PIECE_BYTES)

    @property
    def cut_off(self) -> bool:
        return self.size > 0 and self._read(self.size - 1, self.size) != b"\n"

    def read(self, index: int) -> LogPiece:
        """The segments that begin in one part of the file.

        Before them the block has as much as a progress bar takes, behind them as much as a
        traceback does.
        """
        begin = self._find_segment_start(index * PIECE_BYTES)
        end = self._find_segment_start((index + 1) * PIECE_BYTES)
        low = max(0, begin - BAR_BYTES)
        block = self._read(low, min(self.size, end + BEYOND_BYTES))
        start = begin - low
        stop = end - low
        if b"\x1b" not in block:
            return LogPiece(block, start, stop)
        before = _strip_colours(block[:start])
        inside = _strip_colours(block[start:stop])
        behind = _strip_colours(block[stop:])
        start = len(before)
        return LogPiece(before + inside + behind, start, start + len(inside))

    def _find_segment_start(self, position: int) -> int:
        """Where the first segment from here on begins; a very long one is cut in two."""
        if position == 0 or position >= self.size:
            return min(position, self.size)
        view = self._read(position - 1, position + SEGMENT_BYTES)
        match = _BREAK.search(view)
        if match is None:
            return position
        return position - 1 + match.end()

    def _read(self, start: int, stop: int) -> bytes:
        return os.pread(self.file, min(stop, self.size) - start, start)


def _strip_colours(raw: bytes) -> bytes:
    # faster than `sub`
    return b"".join(_ANSI.split(raw))


@contextmanager
def open_pieces(path: Path) -> Iterator[Pieces]:
    """The pieces of a file; a pipe has no beginning to go back to and is copied. Raises OSError."""
    with path.open("rb") as file:
        if path.is_file():
            yield _measure(file)
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            yield _measure(copy)


def _measure(file: IO[bytes]) -> Pieces:
    """The pieces of an open file, as long as it is now."""
    descriptor = file.fileno()
    return Pieces(descriptor, os.fstat(descriptor).st_size)


def find_segment(block: bytes, position: int) -> tuple[int, int]:
    """Start and end of the segment around a position.

    Start is -1 if the segment begins too far back; `end` is then where the next one may begin.
    """
    low = max(0, position - SEGMENT_BYTES)
    feed = block.rfind(b"\n", low, position)
    carriage = block.rfind(b"\r", max(low, feed), position)
    start = max(feed, carriage) + 1
    if start == 0 and low > 0:
        return -1, _find_next_break(block, position, len(block))
    limit = min(len(block), start + SEGMENT_BYTES)
    end = _find_next_break(block, position, limit)
    return start, max(end, position + 1)


def _find_next_break(block: bytes, position: int, limit: int) -> int:
    """The next line feed or carriage return before the limit, else the limit."""
    feed = block.find(b"\n", position, limit)
    if feed < 0:
        feed = limit
    carriage = block.find(b"\r", position, feed)
    if carriage < 0:
        return feed
    return carriage


def decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").strip()


def clean_segment(segment: bytes) -> str:
    """At most 300 printable characters, without a progress bar before them."""
    content = decode_text(segment)
    if "%|" in content:
        behind_bar = _LEADING_BAR.sub("", content).strip()
        content = behind_bar or content
    shown = content[:TEXT_CHARS]
    if shown.isprintable():
        return shown
    return "".join(filter(str.isprintable, shown))
