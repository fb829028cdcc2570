"""Print logs of any size: without secrets, in bounded memory, in linear time.

A training that prints a tensor, or a progress bar without line feeds, leaves lines of gigabytes. Of
a line longer than `LINE_BYTES` the beginning and the end are shown, and how much was left out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from launcher.lazy_dataclass import dataclass
from launcher.machine.sizes import format_size
from launcher.printable import make_printable_bytes
from launcher.redaction import KEY_BLOCK, redact_bytes

BLOCK_BYTES = 2**18  # bytes that are read at a time
LINE_BYTES = 2**20  # a longer line is cut
_SHOWN_BYTES = 2**16  # of a cut line, at its beginning and again at its end
_MARGIN_BYTES = 2**14  # of those, hidden beside the cut: a secret may be cut in two there
_SEARCHED_BYTES = 2**31  # bytes that are searched for the beginning of one line
_KEY_BYTES = 2**16  # a private key is no longer


@dataclass(slots=True)
class CutLine:
    """A line too long to be kept: its first bytes, its last ones, and its length so far.

    `at_least`: it is longer, as its beginning was not found.
    """

    head: bytes
    tail: bytes
    length: int
    at_least: bool = False

    def extend(self, block: bytes) -> None:
        self.tail = (self.tail + block)[-_SHOWN_BYTES:]
        self.length += len(block)

    def printable(self, secrets: Sequence[str]) -> bytes:
        """The line as it is printed, without `secrets`."""
        head = make_printable_bytes(self.head)
        beside_cut = len(make_printable_bytes(self.head[-_MARGIN_BYTES:]))
        begin = redact_bytes(head, secrets)
        begin = begin[: max(0, len(begin) - beside_cut)]
        tail = make_printable_bytes(self.tail)
        beside_cut = len(make_printable_bytes(self.tail[:_MARGIN_BYTES]))
        end = redact_bytes(tail, secrets)[beside_cut:]
        left_out = self.length - len(self.head) - len(self.tail) + 2 * _MARGIN_BYTES
        amount = format_size(left_out)
        if self.at_least:
            amount = f"at least {amount}"
        note = f" ... {amount} of this line left out ... "
        return _drop_broken_characters(begin) + note.encode() + _drop_broken_characters(end)


def _drop_broken_characters(raw: bytes) -> bytes:
    return raw.decode(errors="ignore").encode()


@dataclass(slots=True)
class LogLines:
    """A log in blocks of any size -> what can be printed of it so far, without `secrets`.

    Without `frames`, of a progress bar the last frame is printed. What may continue waits: `line`
    is the last line, `held` are whole lines before it that may be within a private key, `cut` is
    the last line if it is too long.
    """

    secrets: Sequence[str]
    frames: bool = True
    held: bytes = b""
    line: bytes = b""
    cut: CutLine | None = None

    def of(self, block: bytes) -> bytes:
        """What can be printed after this block."""
        output = b""
        for start in range(0, len(block), BLOCK_BYTES):
            output += self._process_block(block[start : start + BLOCK_BYTES])
        return output

    def rest(self) -> bytes:
        """What waits, at the end of the log."""
        last = self._release_held(self.line)
        self.line = b""
        if self.cut is not None:
            last += self.cut.printable(self.secrets)
            self.cut = None
        return last

    def leave_out(self, count: int, *, at_least: bool = False) -> None:
        """Skip `count` bytes of the last line."""
        if self.cut is None:
            self.cut = CutLine(head=self.line[:_SHOWN_BYTES], tail=b"", length=len(self.line))
            self.line = b""
        self.cut.length += count
        self.cut.tail = b""
        self.cut.at_least = self.cut.at_least or at_least

    def _process_block(self, block: bytes) -> bytes:
        output = b""
        if self.cut is not None:
            output, block = self._continue_cut(self.cut, block)
        if self.cut is not None:
            return output
        text = self.line + block
        if not self.frames:
            text = _keep_last_frames(text)
        # only the first line may have begun in an earlier block
        first_end = self._find_line_end(text)
        if first_end > LINE_BYTES:
            output += self._render_lines(b"")
            output += _cut_line(text[:first_end]).printable(self.secrets)
            text = text[first_end:]
        last_end = self._find_last_end(text)
        self.line = text[last_end:]
        output += self._render_lines(text[:last_end])
        if len(self.line) > LINE_BYTES:
            output += self._release_held()
            self.cut = _cut_line(self.line)
            self.line = b""
        return output

    def _continue_cut(self, cut: CutLine, block: bytes) -> tuple[bytes, bytes]:
        """What can be printed, and the rest of the block after the cut line."""
        end = self._find_line_end(block)
        line = block
        if end >= 0:
            line = block[:end]
        if not self.frames:
            last = cut.tail[-1:]
            frame = _find_last_frame(last + line)
            if frame > 0:
                # another frame of the progress bar replaces the cut one
                self.cut = None
                return b"", (last + block)[frame:]
        cut.extend(line)
        if end < 0:
            return b"", b""
        self.cut = None
        return cut.printable(self.secrets), block[end:]

    def _find_line_end(self, text: bytes) -> int:
        """Where the second line begins; -1 if the first one has no end."""
        feed = text.find(b"\n")
        after_feed = -1
        search_end = None
        if feed >= 0:
            after_feed = feed + 1
            search_end = feed
        if not self.frames:
            return after_feed
        carriage = text.find(b"\r", 0, search_end)
        if carriage < 0 or carriage + 1 == feed:
            return after_feed
        return carriage + 1

    def _find_last_end(self, text: bytes) -> int:
        end = text.rfind(b"\n") + 1
        if not self.frames:
            return end
        return max(end, text.rfind(b"\r") + 1)

    def _render_lines(self, lines: bytes) -> bytes:
        """Whole lines as they are printed, after those that were held.

        Lines are held from the beginning of a private key on, until it ends.
        """
        text = self.held + lines
        end = len(text)
        key = text.rfind(KEY_BLOCK)
        if key >= 0 and end - key <= _KEY_BYTES and b"-----END" not in text[key:]:
            end = text.rfind(b"\n", 0, key) + 1
        self.held = text[end:]
        return redact_bytes(make_printable_bytes(text[:end]), self.secrets)

    def _release_held(self, more: bytes = b"") -> bytes:
        text = self.held + more
        self.held = b""
        return redact_bytes(make_printable_bytes(text), self.secrets)


def _cut_line(line: bytes) -> CutLine:
    return CutLine(head=line[:_SHOWN_BYTES], tail=line[-_SHOWN_BYTES:], length=len(line))


def _find_last_frame(line: bytes) -> int:
    """Where the last frame of a progress bar begins."""
    return line.rstrip(b"\r\n").rfind(b"\r") + 1


def _keep_last_frames(text: bytes) -> bytes:
    """The last frame of each line."""
    if b"\r" not in text:
        return text
    return b"\n".join(line[_find_last_frame(line) :] for line in text.split(b"\n"))


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a log that are not read, in the middle of a long line."""

    start: int
    stop: int
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class LastLines:
    """Where in a log its last lines begin, and the gaps in them, in the order of the file."""

    start: int
    gaps: tuple[Gap, ...] = ()


def find_last_lines(file: int, count: int) -> LastLines:
    """The last `count` lines of an open file, searched from its end in blocks."""
    size = os.fstat(file).st_size
    gaps: list[Gap] = []
    start = size
    for begin in _find_line_begins(file, size):
        length = start - begin
        if length > LINE_BYTES:
            # the search for the beginning of this line was given up
            at_least = length >= _SEARCHED_BYTES
            gap_start = begin
            if not at_least:
                gap_start += _SHOWN_BYTES
            gaps.append(Gap(gap_start, start - _SHOWN_BYTES, at_least))
        start = begin
        count -= 1
        if count == 0 or length >= _SEARCHED_BYTES:
            break
    gaps.reverse()
    return LastLines(_find_begin_before_key(file, start), tuple(gaps))


def _find_line_begins(file: int, size: int) -> Iterator[int]:
    """Where each line begins, last first; for a very long one, where the search was given up."""
    line_end = size
    # no line begins at the end of the last one
    stop = max(0, size - 1)
    while stop > 0:
        start = max(0, stop - BLOCK_BYTES)
        block = b""
        if not _is_hole(file, start, stop):
            block = os.pread(file, stop - start, start)
        feed = block.rfind(b"\n")
        while feed >= 0:
            line_end = start + feed + 1
            yield line_end
            feed = block.rfind(b"\n", 0, feed)
        stop = start
        if line_end - start >= _SEARCHED_BYTES:
            yield start
            return
    if size > 0:
        yield 0


def _is_hole(file: int, start: int, stop: int) -> bool:
    """Whether a file has a hole there: it was truncated while it was written to."""
    try:
        return os.lseek(file, start, os.SEEK_DATA) >= stop
    except OSError as error:
        # no data behind `start`, or a file system that does not know
        return error.errno == errno.ENXIO


def _find_begin_before_key(file: int, start: int) -> int:
    """Where to begin printing: `start`, or before the private key that it lies in."""
    low = max(0, start - _KEY_BYTES)
    before = os.pread(file, start - low, low)
    key = before.rfind(KEY_BLOCK)
    if key < 0 or b"-----END" in before[key:]:
        return start
    return low + before.rfind(b"\n", 0, key) + 1
