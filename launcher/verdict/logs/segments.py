"""A console file of any size -> `Pieces` of it, and the segments between line feeds and carriage returns: a bar
redraws itself behind a carriage return, so that one physical line may hold thousands of segments."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 4 << 20
SEGMENT_BYTES = 1 << 16  # as much of one segment as is ever looked at
BAR_BYTES = 2_000  # a bar on a wide terminal
BEYOND_BYTES = 1 << 17  # of what follows a piece, for a traceback that is open where it ends
TEXT_CHARS = 300

# Training's bar is the one without a description before the percentage.
BAR = re.compile(rb"(?:\A|[\r\n])[ \t]*\d+%\|[^|\r\n]*\|[ \t]*(?P<done>\d{1,12})/(?P<total>\d{1,12}) \[")
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_LEADING_BAR = re.compile(r"^[^|]{0,120}%\|[^|]*\|[^\[]{1,40}\[[^\]]*\]")
_BREAK = re.compile(rb"[\r\n]")


@dataclass(frozen=True, slots=True)
class Pieces:
    """A file as it was when it was opened: what is written to it later is not read. Every piece can be read by itself;
    a file that was cut short since gives less."""

    file: int
    size: int

    def __len__(self) -> int:
        return -(-self.size // PIECE_BYTES)

    @property
    def cut_off(self) -> bool:
        return self.size > 0 and self._read(self.size - 1, self.size) != b"\n"

    def read(self, index: int) -> tuple[bytes, int, int]:
        """The segments that begin in one part of the file: a block, without colours, from where to where. Before them
        stands as much as a progress bar takes, behind them as much as a traceback does."""
        begin, end = self._edge(index * PIECE_BYTES), self._edge((index + 1) * PIECE_BYTES)
        low = max(0, begin - BAR_BYTES)
        block = self._read(low, min(self.size, end + BEYOND_BYTES))
        start, stop = begin - low, end - low
        if b"\x1b" in block:
            # faster than `sub`
            parts = [b"".join(_ANSI.split(part)) for part in (block[:start], block[start:stop], block[stop:])]
            block, start = b"".join(parts), len(parts[0])
            stop = start + len(parts[1])
        return block, start, stop

    def _edge(self, at: int) -> int:
        """Where the first segment from here on begins; a very long one is cut in two."""
        if at == 0 or at >= self.size:
            return min(at, self.size)
        found = _BREAK.search(self._read(at - 1, at + SEGMENT_BYTES))
        return at - 1 + found.end() if found else at

    def _read(self, start: int, stop: int) -> bytes:
        return os.pread(self.file, min(stop, self.size) - start, start)


@contextmanager
def opened(path: Path) -> Iterator[Pieces]:
    """The pieces of a file; a pipe, which has no beginning to look at, is copied first. Raises OSError."""
    with path.open("rb") as file:
        if path.is_file():
            yield Pieces(file.fileno(), os.fstat(file.fileno()).st_size)
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            yield Pieces(copy.fileno(), os.fstat(copy.fileno()).st_size)


def bounds(block: bytes, at: int) -> tuple[int, int]:
    """Start and end of the segment around `at`; start is -1 where it begins too far back. Then `end` is where the
    next segment may begin."""
    low = max(0, at - SEGMENT_BYTES)
    feed = block.rfind(b"\n", low, at)
    carriage = block.rfind(b"\r", max(low, feed), at)
    start = max(feed, carriage) + 1
    if start == 0 and low > 0:
        return -1, _next_break(block, at)
    high = min(len(block), start + SEGMENT_BYTES)
    for separator in (b"\n", b"\r"):
        found = block.find(separator, at, high)
        high = found if found >= 0 else high
    return start, max(high, at + 1)


def _next_break(block: bytes, at: int) -> int:
    feed = block.find(b"\n", at)
    if feed < 0:
        feed = len(block)
    carriage = block.find(b"\r", at, feed)
    return carriage if carriage >= 0 else feed


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").strip()


def clean(segment: bytes) -> str:
    """At most 300 printable characters, without the progress bar that the text stands behind."""
    whole = text(segment)
    rest = _LEADING_BAR.sub("", whole).strip() if "%|" in whole else whole
    shown = (rest or whole)[:TEXT_CHARS]
    return shown if shown.isprintable() else "".join(c for c in shown if c.isprintable())
