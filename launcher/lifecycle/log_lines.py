"""Lines of a log of any size, made fit to be printed: without secrets, in bounded memory, in linear time.

A training that dumps a tensor or a progress bar without line feeds leaves lines of gigabytes. Of a line longer
than `LINE_BYTES` its begin and its end are shown, and how much was left out in between.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.machine.sizes import sized
from launcher.printable import printable_bytes
from launcher.redaction import KEY_BLOCK, redact_bytes

BLOCK_BYTES = 2**18  # bytes that are read at a time
LINE_BYTES = 2**20  # a longer line is cut
_SHOWN_BYTES = 2**16  # of a cut line, at its begin and again at its end
_MARGIN_BYTES = 2**14  # of those, beside the cut, that are not shown: a secret may be cut in two there
_SOUGHT_BYTES = 2**31  # bytes that are searched for the begin of one line
_KEY_BYTES = 2**16  # a private key is no longer


@dataclass(slots=True)
class CutLine:
    """A line too long to be kept: its first bytes, its last ones, and how many there are so far.

    `at_least` says that its begin was not found.
    """

    head: bytes
    tail: bytes
    length: int
    at_least: bool = False

    def extend(self, block: bytes) -> None:
        self.tail = (self.tail + block)[-_SHOWN_BYTES:]
        self.length += len(block)

    def shown(self, known: Sequence[str]) -> bytes:
        """The line as it is printed, without the secrets `known`."""
        head = printable_bytes(self.head)
        beside_cut = len(printable_bytes(self.head[-_MARGIN_BYTES:]))
        begin = redact_bytes(head, known)
        begin = begin[: max(0, len(begin) - beside_cut)]
        tail = printable_bytes(self.tail)
        beside_cut = len(printable_bytes(self.tail[:_MARGIN_BYTES]))
        end = redact_bytes(tail, known)[beside_cut:]
        left_out = self.length - len(self.head) - len(self.tail) + 2 * _MARGIN_BYTES
        amount = f"at least {sized(left_out)}" if self.at_least else sized(left_out)
        note = f" ... {amount} of this line left out ... "
        return _whole_characters(begin) + note.encode() + _whole_characters(end)


def _whole_characters(raw: bytes) -> bytes:
    return raw.decode(errors="ignore").encode()


@dataclass(slots=True)
class LogLines:
    """A log in blocks of any size -> what can be printed of it so far.

    The secrets are values `known`. Without `frames`, a progress bar is shown by its last frame. What has no end
    yet waits: `line` is the last line, `held` whole lines before it that may be within a private key, `cut` the last
    line where that is too long.
    """

    known: Sequence[str]
    frames: bool = True
    held: bytes = b""
    line: bytes = b""
    cut: CutLine | None = None

    def of(self, block: bytes) -> bytes:
        """What can be printed once this block has come."""
        shown = b""
        for start in range(0, len(block), BLOCK_BYTES):
            shown += self._of(block[start : start + BLOCK_BYTES])
        return shown

    def rest(self) -> bytes:
        """What waits; there will be no more of it."""
        last = self._release(self.line)
        self.line = b""
        if self.cut is not None:
            last += self.cut.shown(self.known)
            self.cut = None
        return last

    def leave_out(self, count: int, *, at_least: bool = False) -> None:
        """Go on behind so many bytes of the line that is open."""
        if self.cut is None:
            self.cut = CutLine(head=self.line[:_SHOWN_BYTES], tail=b"", length=len(self.line))
            self.line = b""
        self.cut.length += count
        self.cut.tail = b""
        self.cut.at_least = self.cut.at_least or at_least

    def _of(self, block: bytes) -> bytes:
        shown = b""
        if self.cut is not None:
            shown, block = self._continue_cut(self.cut, block)
        if self.cut is not None:
            return shown
        whole = self.line + block
        if not self.frames and b"\r" in whole:
            whole = b"\n".join(line[_last_frame(line) :] for line in whole.split(b"\n"))
        # of all lines only the first may have been begun by an earlier block
        first = self._line_end(whole)
        if first > LINE_BYTES:
            shown += self._printable(b"")
            shown += _cut_off(whole[:first]).shown(self.known)
            whole = whole[first:]
        end = self._last_end(whole)
        self.line = whole[end:]
        shown += self._printable(whole[:end])
        if len(self.line) > LINE_BYTES:
            shown += self._release()
            self.cut = _cut_off(self.line)
            self.line = b""
        return shown

    def _continue_cut(self, cut: CutLine, block: bytes) -> tuple[bytes, bytes]:
        """What can be printed, and what of the block comes behind the cut line."""
        end = self._line_end(block)
        line = block if end < 0 else block[:end]
        if not self.frames:
            last = cut.tail[-1:]
            frame = _last_frame(last + line)
            if frame > 0:
                # another frame of the progress bar takes the place of what was cut
                self.cut = None
                return b"", (last + block)[frame:]
        cut.extend(line)
        if end < 0:
            return b"", b""
        self.cut = None
        return cut.shown(self.known), block[end:]

    def _line_end(self, text: bytes) -> int:
        """Where the line after the first one begins; -1 where the first one has no end."""
        feed = text.find(b"\n")
        if not self.frames:
            return -1 if feed < 0 else feed + 1
        carriage = text.find(b"\r", 0, None if feed < 0 else feed)
        if carriage < 0 or carriage + 1 == feed:
            return -1 if feed < 0 else feed + 1
        return carriage + 1

    def _last_end(self, text: bytes) -> int:
        end = text.rfind(b"\n") + 1
        if not self.frames:
            return end
        return max(end, text.rfind(b"\r") + 1)

    def _printable(self, lines: bytes) -> bytes:
        """Whole lines as they are printed, with those that were held; a private key goes over many of them."""
        whole = self.held + lines
        end = len(whole)
        key = whole.rfind(KEY_BLOCK)
        if 0 <= end - key <= _KEY_BYTES and key >= 0 and b"-----END" not in whole[key:]:
            end = whole.rfind(b"\n", 0, key) + 1
        self.held = whole[end:]
        return redact_bytes(printable_bytes(whole[:end]), self.known)

    def _release(self, more: bytes = b"") -> bytes:
        whole = self.held + more
        self.held = b""
        return redact_bytes(printable_bytes(whole), self.known)


def _cut_off(line: bytes) -> CutLine:
    return CutLine(head=line[:_SHOWN_BYTES], tail=line[-_SHOWN_BYTES:], length=len(line))


def _last_frame(line: bytes) -> int:
    """Where the last frame of a progress bar begins."""
    return line.rstrip(b"\r\n").rfind(b"\r") + 1


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a log that are not read: they lie within a line that is cut."""

    start: int
    stop: int
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class LastLines:
    """Where in a log its last lines begin, and what of them is not read, in the order of the file."""

    start: int
    gaps: tuple[Gap, ...] = ()


def find_last_lines(file: int, count: int) -> LastLines:
    """The last `count` lines of a file, by its descriptor: searched from its end in blocks."""
    size = os.fstat(file).st_size
    gaps: list[Gap] = []
    start = size
    for begin in _line_begins(file, size):
        length = start - begin
        if length > LINE_BYTES:
            # the beginning of the line was not sought any further
            at_least = length >= _SOUGHT_BYTES
            first = begin if at_least else begin + _SHOWN_BYTES
            gaps.append(Gap(first, start - _SHOWN_BYTES, at_least))
        start = begin
        count -= 1
        if count == 0 or length >= _SOUGHT_BYTES:
            break
    gaps.reverse()
    return LastLines(_before_key(file, start), tuple(gaps))


def _line_begins(file: int, size: int) -> Iterator[int]:
    """Where each line begins, the last one first; of a very long one, where the search was given up."""
    line_end = size
    # the end of the last line begins no other one
    stop = max(0, size - 1)
    while stop > 0:
        start = max(0, stop - BLOCK_BYTES)
        block = b"" if _is_hole(file, start, stop) else os.pread(file, stop - start, start)
        feed = block.rfind(b"\n")
        while feed >= 0:
            line_end = start + feed + 1
            yield line_end
            feed = block.rfind(b"\n", 0, feed)
        stop = start
        if line_end - start >= _SOUGHT_BYTES:
            yield start
            return
    if size > 0:
        yield 0


def _is_hole(file: int, start: int, stop: int) -> bool:
    """Whether a file that was truncated while it was written to has nothing but a hole there."""
    try:
        return os.lseek(file, start, os.SEEK_DATA) >= stop
    except OSError as error:
        # no data behind `start`, or a file system that does not know
        return error.errno == errno.ENXIO


def _before_key(file: int, start: int) -> int:
    """The begin of the lines to print, or that of the private key which they would begin within."""
    low = max(0, start - _KEY_BYTES)
    before = os.pread(file, start - low, low)
    key = before.rfind(KEY_BLOCK)
    if key < 0 or b"-----END" in before[key:]:
        return start
    return low + before.rfind(b"\n", 0, key) + 1
