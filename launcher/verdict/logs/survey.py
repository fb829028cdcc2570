"""What is worth reading of each piece of a log: a `LogSurvey`.

A piece is surveyed by itself, so that a large file is never in memory. The lines of a survey are
counted from 0 where the piece begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from launcher.upstream.logs.common import EVERYWHERE, Pattern
from launcher.upstream.logs.olmo_core import BLOCK_BEGIN
from launcher.verdict.logs.segments import BAR, BAR_BYTES, LogPiece, Pieces, find_segment
from launcher.verdict.logs.tracebacks import FIRST_LINE, FRAMES_FIRST, Tracebacks

KEPT_SIGNALS = 50
"""Signals of each name: from the beginning, from the last step on, and from the end."""
KEPT_STEPS = 50_000
SAMPLED_STEPS = 20_000
"""Lines of steps of a large log, at even distances."""
SAMPLED = ("step", "block_loss", "metrics")
NUMBERED = "metrics"
"""The sampled pattern whose lines tell by their number what they belong to."""
IN_BLOCK = "block_loss"
"""The sampled pattern whose step is named some lines above it."""
RAISED = -1
"""The index of no pattern: what a traceback raised."""

_EDGE_PIECES = 2
"""Pieces at either end of a log that are searched for every pattern."""
_STARTS = (b"TokenizerConfig(", b"Total optimization steps = ")
"""A piece with one of these is searched too."""
_TRIED = 8_000
"""Lines with a needle that are tried if none matches."""
_ALWAYS = 64
"""Lines of a piece that are read whatever the sample, or as many as that is."""
_LAST = 17
"""Last lines of a piece that are read too: the last steps, as eight ranks print them."""
_LAST_BARS = 400
"""Bars of a piece that are looked at, from its end."""
_DUMP_LINES = 4_000
_BLOCK_BYTES = 8_192


class ShownBar(NamedTuple):
    """A progress bar beside a segment."""

    done: int
    total: int


class LastBar(NamedTuple):
    """Where the bar of a total stands last."""

    total: int
    done: int
    line: int


class Hit(NamedTuple):
    """A segment that a pattern is about; if the pattern is not sampled, one that it matches.

    `heading` is what stands above a loss in the block of its step.
    `skipped` counts the segments of a numbered pattern that were left out since its last hit.
    `is_complete` is False if the log ends before the segment does. `fields` are those of an
    exception.
    """

    pattern: int
    line: int
    segment: bytes
    is_complete: bool = True
    skipped: int = 0
    bar: ShownBar | None = None
    heading: bytes = b""
    fields: Mapping[str, str] | None = None


def survey(pieces: Pieces, patterns: Sequence[Pattern]) -> Iterator[LogSurvey]:
    count = len(pieces)
    share = KEPT_STEPS
    if count > 2 * _EDGE_PIECES:
        share = max(_ALWAYS, SAMPLED_STEPS // count)
    for index in range(count):
        is_edge = not _EDGE_PIECES <= index < count - _EDGE_PIECES
        # a variable would keep this piece in memory while the next one is read
        yield LogSurvey(
            _read_piece(pieces, index), patterns, share, is_edge=is_edge, is_first=index == 0
        )


def _read_piece(pieces: Pieces, index: int) -> LogPiece:
    piece = pieces.read(index)
    if index and not _has_break(piece):
        # the middle of a line of which only the begin is looked at
        return LogPiece(b"", 0, 0)
    return piece


def _has_break(piece: LogPiece) -> bool:
    for separator in (b"\n", b"\r"):
        if piece.block.find(separator, piece.start, piece.stop) >= 0:
            return True
    return False


class _Place(NamedTuple):
    """A segment of a block that a pattern may be about."""

    start: int
    pattern: int
    end: int
    skipped: int = 0


class LogSurvey:
    """What one piece holds: its line feeds, its hits, and where each bar stands last."""

    def __init__(
        self,
        piece: LogPiece,
        patterns: Sequence[Pattern],
        share: int,
        *,
        is_edge: bool,
        is_first: bool,
    ) -> None:
        self.block = piece.block
        self.start = piece.start
        self.stop = piece.stop
        self.patterns = patterns
        self.share = share
        self.is_edge = is_edge or any(map(self._has_needle, _STARTS))
        self.hits: list[Hit] = []
        self.bars: list[LastBar] = []
        self.feeds = self._read_hits(sorted(self._choose_places(is_first)))
        self._read_bars()

    def _read_hits(self, places: Sequence[_Place]) -> int:
        """Read the hits of the places, and count the line feeds of the piece."""
        position = self.start
        line = 0
        followed_to = 0
        for place in places:
            line += self.block.count(b"\n", position, place.start)
            position = place.start
            if place.pattern != RAISED:
                self._read_hit(place, line)
            elif position >= followed_to:
                followed_to = self._follow_traceback(position, line)
        return line + self.block.count(b"\n", position, self.stop)

    def _read_hit(self, place: _Place, line: int) -> None:
        name = self.patterns[place.pattern].name
        if name == "arguments":
            self._read_dump(place, line)
            return
        bar = None
        if name == NUMBERED:
            bar = self._find_bar_beside(place)
        heading = b""
        if name == IN_BLOCK:
            heading = self._find_heading(place)
        hit = Hit(
            place.pattern,
            line,
            self.block[place.start : place.end],
            is_complete=place.end < len(self.block),
            skipped=place.skipped,
            bar=bar,
            heading=heading,
        )
        self.hits.append(hit)

    def _follow_traceback(self, position: int, line: int) -> int:
        end, exceptions = Tracebacks().follow(self.block, position, self.stop, line)
        for raised in exceptions:
            self.hits.append(Hit(RAISED, raised.line, raised.segment, fields=raised.fields))
        return end

    def _has_needle(self, needle: bytes) -> bool:
        # a byte is found far faster than a needle, and a piece often lacks one of the needle's
        for byte in set(needle):
            if self.block.find(byte, self.start, self.stop) < 0:
                return False
        # CPython finds out faster from the end that a needle is missing
        return self.block.rfind(needle, self.start, self.stop) >= 0

    def _choose_places(self, is_first: bool) -> list[_Place]:
        present: list[tuple[int, Pattern]] = []
        for index, pattern in enumerate(self.patterns):
            is_searched = self.is_edge or pattern.name in EVERYWHERE
            if is_searched and self._has_needle(pattern.needle):
                present.append((index, pattern))
        places: list[_Place] = []
        for index, pattern in present:
            if pattern.name in SAMPLED:
                places += self._sample_places(index, pattern)
        last_steps = sorted(place.start for place in places)[-2:-1]
        for index, pattern in present:
            if pattern.name not in SAMPLED:
                places += self._choose_ends(index, pattern.needle, pattern.regex, last_steps)
        if self._has_needle(FIRST_LINE):
            places += self._choose_ends(RAISED, FIRST_LINE, None, last_steps)
        if is_first:
            frame = FRAMES_FIRST.match(self.block)
            if frame is not None:
                places.append(_Place(frame.start("frame"), RAISED, frame.end()))
        return list(dict.fromkeys(places))

    def _sample_places(self, index: int, pattern: Pattern) -> list[_Place]:
        """All segments with the needle, or evenly spaced ones, with the first and the last."""
        forward = self._walk(index, pattern.needle, self.start)
        places = list(islice(forward, self.share + 1))
        if len(places) <= self.share:
            return places
        positions = self._choose_positions(index, pattern, places[0].start)
        return self._read_places_at(index, pattern, sorted(positions))

    def _choose_positions(self, index: int, pattern: Pattern, first: int) -> set[int]:
        """Positions with the needle, at even distances, and those that are always read."""
        block = self.block
        needle = pattern.needle
        last = block.rfind(needle, self.start, self.stop)
        positions = set()
        for number in range(self.share + 1):
            even = first + (last - first) * number // self.share
            positions.add(block.find(needle, even, self.stop))
        # how the last step differs from the one before says what happened after work had ended
        for place in islice(self._walk_back(index, needle), _LAST):
            positions.add(place.start)
        most = max(_ALWAYS, self.share)
        for always in pattern.always:
            matches = always.finditer(block, self.start, self.stop)
            for match in islice(matches, most):
                positions.add(match.start())
        return positions

    def _read_places_at(
        self, index: int, pattern: Pattern, positions: Iterable[int]
    ) -> list[_Place]:
        block = self.block
        needle = pattern.needle
        places = []
        end_before = self.start
        for position in positions:
            start, end = find_segment(block, position)
            if start < end_before:
                continue
            needle_start = block.find(needle, start, end)
            if needle_start < 0:
                continue
            skipped = 0
            if pattern.name == NUMBERED:
                skipped = block.count(needle, end_before, needle_start)
            places.append(_Place(start, index, end, skipped))
            end_before = end
        return places

    def _walk(self, index: int, needle: bytes, low: int) -> Iterator[_Place]:
        """The segments with the needle from a position on."""
        position = self.block.find(needle, low, self.stop)
        while position >= 0:
            start, end = find_segment(self.block, position)
            if start >= 0:
                yield _Place(start, index, end)
            position = self.block.find(needle, end, self.stop)

    def _walk_back(self, index: int, needle: bytes) -> Iterator[_Place]:
        position = self.block.rfind(needle, self.start, self.stop)
        while position >= 0:
            start, end = find_segment(self.block, position)
            high = position
            if start >= 0:
                yield _Place(start, index, end)
                high = start
            position = self.block.rfind(needle, self.start, high)

    def _choose_ends(
        self, index: int, needle: bytes, regex: re.Pattern[bytes] | None, steps: Sequence[int]
    ) -> list[_Place]:
        """The first and the last segments that match, and the first ones after each of `steps`."""
        forward = self._walk(index, needle, self.start)
        is_complete, places = self._take_matching(forward, regex)
        further = []
        if not is_complete:
            further = [self._walk(index, needle, step) for step in steps]
            further.append(self._walk_back(index, needle))
        for walk in further:
            _, matching = self._take_matching(walk, regex)
            places += matching
        unique = {place.start: place for place in places}
        return list(unique.values())

    def _take_matching(
        self, walk: Iterable[_Place], regex: re.Pattern[bytes] | None
    ) -> tuple[bool, list[_Place]]:
        """The first places of a walk that match, and whether these are all that there are."""
        places: list[_Place] = []
        for number, place in enumerate(walk):
            if len(places) >= KEPT_SIGNALS or number >= _TRIED:
                return False, places
            if regex is None or regex.search(self.block[place.start : place.end]):
                places.append(place)
        return True, places

    def _find_heading(self, place: _Place) -> bytes:
        """The lines of a block from the one that names the step to this one."""
        low = max(0, place.start - _BLOCK_BYTES)
        begin = self.block.rfind(BLOCK_BEGIN, low, place.start)
        if begin < 0:
            return b""
        return bytes(self.block[begin : place.start])

    def _find_bar_beside(self, place: _Place) -> ShownBar | None:
        """The progress bar that was redrawn right behind a segment, or last before it."""
        block = self.block
        end = place.end
        bar = BAR.match(block, end, end + BAR_BYTES) or BAR.match(block, end + 1)
        low = max(0, place.start - BAR_BYTES)
        position = block.rfind(b"%|", low, place.start)
        while bar is None and position >= 0:
            start, stop = find_segment(block, position)
            # where the view is cut, a description may have stood before
            is_cut = start < low or (start == 0 and self.start > 0)
            if not is_cut:
                bar = BAR.match(block[start:stop])
            position = block.rfind(b"%|", low, position)
        if bar is None:
            return None
        return ShownBar(int(bar["done"]), int(bar["total"]))

    def _read_bars(self) -> None:
        """Find where each bar without a description stands last; training's has none."""
        if not self._has_needle(b"%|"):
            return
        block = self.block
        totals: set[int] = set()
        same_total: re.Pattern[bytes] | None = None
        position = self.stop
        for _ in range(_LAST_BARS):
            position = block.rfind(b"%|", self.start, position)
            if position < 0 or len(totals) >= KEPT_SIGNALS:
                return
            if same_total is not None and same_total.match(block, position):
                continue
            start, end = find_segment(block, position)
            if start < 0:
                continue
            bar = BAR.match(block[start:end])
            if bar is None:
                continue
            total = int(bar["total"])
            if total in totals:
                continue
            totals.add(total)
            same_total = re.compile(rb"%%\|[^|\r\n]*\|[ \t]*\d+/%d \[" % total)
            line = self.feeds - block.count(b"\n", start, self.stop)
            self.bars.append(LastBar(total, int(bar["done"]), line))

    def _read_dump(self, place: _Place, line: int) -> None:
        """Read the lines of one block of the arguments dump, as far as its closing bracket."""
        block = self.block
        regex = self.patterns[place.pattern].regex
        position = place.start
        for number in range(_DUMP_LINES):
            if position >= len(block):
                return
            stop = block.find(b"\n", position)
            if stop < 0:
                stop = len(block)
            match = regex.search(block, position, stop)
            if match is not None:
                if number and match["block"] is not None:
                    return
                is_complete = stop < len(block)
                self.hits.append(Hit(place.pattern, line, block[position:stop], is_complete))
                if match["other"] is not None:
                    return
            position = stop + 1
            line += 1
