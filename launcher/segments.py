"""A console file of any size -> `Pieces` of it, and the segments that lie in them.

A segment is what stands between line feeds or carriage returns: a progress bar redraws itself
behind a carriage return, so that one physical line may hold thousands of segments.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 4 << 20
SEGMENT_BYTES = 1 << 16  # as much of one segment as is ever looked at
BAR_BYTES = 2_000  # a bar on a wide terminal
BEYOND_BYTES = 1 << 18  # of a piece, for what is still open where it ends
TEXT_CHARS = 300

# Training's bar is the one without a description before the percentage.
BAR = re.compile(
    rb"(?:\A|[\r\n])[ \t]*\d+%\|[^|\r\n]*\|[ \t]*(?P<done>\d{1,12})/(?P<total>\d{1,12}) \["
)
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_LEADING_BAR = re.compile(r"^[^|]{0,120}%\|[^|]*\|[^\[]{1,40}\[[^\]]*\]")
_GZIP = b"\x1f\x8b"
_FIRST_LOOK = 1 << 12
_HEAD_BYTES = 258


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The segments that begin in one part of the file, whole, without colour codes.

    Of a segment that reaches far beyond the part only the first 64 KiB are here; `gap` is the line
    feeds (0 or 1) that stand between here and where the next piece begins.
    """

    block: bytes
    gap: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A file as it was when it was opened: what is written to it later is not read.

    Every piece can be read by itself and by any process; a file that was cut short since gives
    less.
    """

    file: int
    size: int

    def __len__(self) -> int:
        return -(-self.size // PIECE_BYTES)

    @property
    def cut_off(self) -> bool:
        """Whether the last line has no end."""
        return self.size > 0 and self._read(self.size - 1, 1) != b"\n"

    def read(self, index: int) -> Piece:
        """The piece of this index, empty where no segment begins in it."""
        at = index * PIECE_BYTES
        stop = min(at + PIECE_BYTES, self.size)
        begin = self._edge(at, stop)
        if begin is None:
            return Piece(block=b"", gap=0, begin=stop, end=stop)
        end = self._edge(stop, self.size)
        end = self.size if end is None else end
        kept = min(end, stop + SEGMENT_BYTES)
        block = _plain(self._read(begin, kept - begin))
        gap = int(kept < end and self._read(end - 1, 1) == b"\n")
        return Piece(block=block, gap=gap, begin=begin, end=end)

    def before(self, piece: Piece) -> bytes:
        """What stands right before a piece, as much as a progress bar takes."""
        start = max(0, piece.begin - BAR_BYTES)
        return _plain(self._read(start, piece.begin - start))

    def beyond(self, piece: Piece) -> bytes:
        """What follows a piece."""
        return _plain(self._read(piece.end, BEYOND_BYTES))

    def _edge(self, at: int, stop: int) -> int | None:
        """Where the first segment begins that does so between `at` and `stop`."""
        if at == 0 or at >= self.size:
            return at
        at, length = at - 1, _FIRST_LOOK
        while at < stop - 1 and (data := self._read(at, min(length, stop - 1 - at))):
            feed = data.find(b"\n")
            carriage = data.find(b"\r", 0, feed if feed >= 0 else len(data))
            if (first := carriage if carriage >= 0 else feed) >= 0:
                return at + first + 1
            at, length = at + len(data), PIECE_BYTES // 4
        return None

    def _read(self, at: int, length: int) -> bytes:
        return os.pread(self.file, min(length, self.size - at), at)


@contextmanager
def opened(path: Path) -> Iterator[Pieces]:
    """The pieces of a file, of a compressed one or one in UTF-16 those of what it holds.

    Raises OSError.
    """
    with path.open("rb") as file:
        head = os.pread(file.fileno(), _HEAD_BYTES, 0)
        packed = head.startswith(_GZIP)
        if not packed and not _is_utf_16(head):
            yield Pieces(file=file.fileno(), size=os.fstat(file.fileno()).st_size)
            return
        import tempfile

        with tempfile.TemporaryFile() as plain:
            for data in _unpacked(file) if packed else _recoded(file):
                plain.write(data)
            plain.flush()
            yield Pieces(file=plain.fileno(), size=os.fstat(plain.fileno()).st_size)


def _is_utf_16(head: bytes) -> bool:
    """Whether a file is what PowerShell writes: the mark of its encoding, then mostly ASCII."""
    mark, units = head[:2], head[2:]
    if mark not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return False
    upper = units[1::2] if mark == codecs.BOM_UTF16_LE else units[::2]
    return 2 * upper.count(0) >= len(upper)


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """What a compressed file holds; one that is cut off or damaged gives what could be read of it."""
    import gzip
    import zlib

    with suppress(EOFError, zlib.error, gzip.BadGzipFile), gzip.open(file) as packed:
        while data := packed.read1(SEGMENT_BYTES):
            yield data


def _recoded(file: BinaryIO) -> Iterator[bytes]:
    """A file in UTF-16 as UTF-8, with a replacement character for what is neither."""
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    while data := file.read(SEGMENT_BYTES):
        yield decoder.decode(data).encode("utf-8", "replace")


def bounds(block: bytes, at: int) -> tuple[int, int]:
    """Start and end of the segment around `at`; start is -1 where it begins too far back."""
    low = max(0, at - SEGMENT_BYTES)
    feed = block.rfind(b"\n", low, at)
    carriage = block.rfind(b"\r", max(low, feed), at)
    start = max(feed, carriage) + 1
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
    """Without colour codes."""
    return b"".join(_ANSI.split(block)) if b"\x1b" in block else block  # faster than `sub`
