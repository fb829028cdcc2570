"""Pieces of a log -> what is worth reading of each: a `LogSurvey`. A piece is surveyed by itself, so that a large file
is never in memory. The lines of a survey are counted from 0 where the piece begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from launcher.upstream.logs.common import EVERYWHERE, Pattern
from launcher.verdict.logs.segments import BAR, BAR_BYTES, Pieces, bounds
from launcher.verdict.logs.tracebacks import FIRST_LINE, FRAMES_FIRST, Tracebacks

KEPT_SIGNALS = 50  # of each name: from the beginning, from the last step on, and from the end
KEPT_STEPS = 50_000
SAMPLED_STEPS = 20_000  # lines of steps of a large log, at even distances
SAMPLED = ("step", "metrics")
NUMBERED = "metrics"  # the sampled pattern whose lines tell by their number what they belong to
RAISED = -1  # the index of no pattern: what a traceback raised

_EDGE_PIECES = 2  # at either end of a log, searched for every pattern
_STARTS = (b"TokenizerConfig(", b"Total optimization steps = ")  # a piece with one of these is too
_TRIED = 8_000  # lines with a needle, where none of them matches
_ALWAYS = 64  # lines of a piece that are read whatever the sample, or as many as that is
_LAST = 17  # lines of a piece that are read too: the last steps, as eight ranks print them
_LAST_BARS = 400  # of a piece, looked through from its end
_DUMP_LINES = 4_000


class Hit(NamedTuple):
    """A segment that a pattern is about; of a pattern that is not sampled, one that it matches. `skipped` counts the
    segments of a numbered pattern that were left out since its last hit, `whole` is False where the log ends before
    the segment does, and `bar` is the progress bar beside it: (done, total). `fields` are those of an exception."""

    pattern: int
    line: int
    segment: bytes
    whole: bool = True
    skipped: int = 0
    bar: tuple[int, int] | None = None
    fields: Mapping[str, str] | None = None


def survey(pieces: Pieces, patterns: Sequence[Pattern]) -> Iterator[LogSurvey]:
    count = len(pieces)
    few = count <= 2 * _EDGE_PIECES
    share = KEPT_STEPS if few else max(_ALWAYS, SAMPLED_STEPS // count)
    for index in range(count):
        edge = not _EDGE_PIECES <= index < count - _EDGE_PIECES
        block, start, stop = pieces.read(index)
        if index and not _has_break(block, start, stop):
            # the middle of a line of which only the begin is looked at
            block, start, stop = b"", 0, 0
        yield LogSurvey(block, start, stop, patterns, share, edge, index == 0)


def _has_break(block: bytes, start: int, stop: int) -> bool:
    return block.find(b"\n", start, stop) >= 0 or block.find(b"\r", start, stop) >= 0


class _Place(NamedTuple):
    start: int
    pattern: int
    end: int
    skipped: int = 0


class LogSurvey:
    """What one piece holds: its line feeds, its hits, and where each bar stands last: total, done, line."""

    def __init__(
        self, block: bytes, start: int, stop: int, patterns: Sequence[Pattern], share: int, edge: bool, first: bool
    ) -> None:
        self.block, self.start, self.stop, self.patterns, self.share = block, start, stop, patterns, share
        self.edge = edge or any(map(self._holds, _STARTS))
        self.hits, self.bars = list[Hit](), list[tuple[int, int, int]]()
        at, line, done = start, 0, 0
        for place in sorted(self._places(first)):
            line += block.count(b"\n", at, place.start)
            at = place.start
            if place.pattern == RAISED:
                if place.start >= done:
                    done, raised = Tracebacks().follow(block, at, stop, line)
                    self.hits += (Hit(RAISED, found.line, found.segment, fields=found.fields) for found in raised)
            elif self.patterns[place.pattern].name == "arguments":
                self._dump(place, line)
            else:
                bar = self._bar(place) if self.patterns[place.pattern].name == NUMBERED else None
                whole = place.end < len(block)
                self.hits.append(Hit(place.pattern, line, block[at : place.end], whole, place.skipped, bar))
        self.feeds = line + block.count(b"\n", at, stop)
        self._bars()

    def _holds(self, needle: bytes) -> bool:
        return self.block.find(needle, self.start, self.stop) >= 0

    def _places(self, first: bool) -> list[_Place]:
        there = [
            (index, known)
            for index, known in enumerate(self.patterns)
            if (self.edge or known.name in EVERYWHERE) and self._holds(known.needle)
        ]
        found = [place for index, known in there if known.name in SAMPLED for place in self._sample(index, known)]
        work = sorted(place.start for place in found)[-2:-1]
        for index, known in there:
            if known.name not in SAMPLED:
                found += self._ends(index, known.needle, known.regex, work)
        if self._holds(FIRST_LINE):
            found += self._ends(RAISED, FIRST_LINE, None, work)
        if first and (frame := FRAMES_FIRST.match(self.block)):
            found.append(_Place(frame.start("frame"), RAISED, frame.end()))
        return list(dict.fromkeys(found))

    def _sample(self, index: int, known: Pattern) -> list[_Place]:
        """All segments with the needle, or evenly spaced ones, with the first and the last."""
        block, needle = self.block, known.needle
        few = list(islice(self._walk(index, needle, self.start), self.share + 1))
        if len(few) <= self.share:
            return few
        first, last = few[0].start, block.rfind(needle, self.start, self.stop)
        points = (first + (last - first) * n // self.share for n in range(self.share + 1))
        found = {block.find(needle, point, self.stop) for point in points}
        # how the last step differs from the one before it says what happened after work had ended
        found |= {place.start for place in islice(self._back(index, needle), _LAST)}
        for always in known.always:
            matches = always.finditer(block, self.start, self.stop)
            found |= {match.start() for match in islice(matches, max(_ALWAYS, self.share))}
        places: list[_Place] = []
        before = self.start
        for at in sorted(found):
            start, end = bounds(block, at)
            if start < before or (here := block.find(needle, start, end)) < 0:
                continue
            skipped = block.count(needle, before, here) if known.name == NUMBERED else 0
            places.append(_Place(start, index, end, skipped))
            before = end
        return places

    def _walk(self, index: int, needle: bytes, low: int) -> Iterator[_Place]:
        """The segments with the needle from there on."""
        at = self.block.find(needle, low, self.stop)
        while at >= 0:
            start, end = bounds(self.block, at)
            if start >= 0:
                yield _Place(start, index, end)
            at = self.block.find(needle, end, self.stop)

    def _back(self, index: int, needle: bytes) -> Iterator[_Place]:
        at = self.block.rfind(needle, self.start, self.stop)
        while at >= 0:
            start, end = bounds(self.block, at)
            if start >= 0:
                yield _Place(start, index, end)
            at = self.block.rfind(needle, self.start, start if start >= 0 else at)

    def _ends(self, index: int, needle: bytes, regex: re.Pattern[bytes] | None, since: Sequence[int]) -> list[_Place]:
        """The first and the last segments that match, and the first ones from each of `since` on."""
        found: dict[int, _Place] = {}

        def take(walk: Iterable[_Place]) -> bool:
            """Whether the walk came to its end."""
            kept = 0
            for tried, place in enumerate(walk):
                if kept >= KEPT_SIGNALS or tried >= _TRIED:
                    return False
                if regex is None or regex.search(self.block[place.start : place.end]):
                    found[place.start] = place
                    kept += 1
            return True

        if not take(self._walk(index, needle, self.start)):
            for low in since:
                take(self._walk(index, needle, low))
            take(self._back(index, needle))
        return list(found.values())

    def _bar(self, place: _Place) -> tuple[int, int] | None:
        """The progress bar that was redrawn right behind a segment, or last before it."""
        block, end = self.block, place.end
        found = BAR.match(block, end, end + BAR_BYTES) or BAR.match(block, end + 1)
        low, at = max(0, place.start - BAR_BYTES), place.start
        while found is None and (at := block.rfind(b"%|", low, at)) >= 0:
            start, stop = bounds(block, at)
            # where the view is cut, a description may have stood before
            cut = start < low or (start == 0 and self.start > 0)
            found = None if cut else BAR.match(block[start:stop])
        return (int(found["done"]), int(found["total"])) if found else None

    def _bars(self) -> None:
        """Where each bar without a description stands last; training's has none."""
        block, at, totals = self.block, self.stop, set[int]()
        known: re.Pattern[bytes] | None = None
        if not (self._holds(b"%") and self._holds(b"|")):  # far faster to see than that both are
            return
        for _ in range(_LAST_BARS):
            at = block.rfind(b"%|", self.start, at)
            if at < 0 or len(totals) >= KEPT_SIGNALS:
                return
            if known is not None and known.match(block, at):
                continue
            start, end = bounds(block, at)
            bar = BAR.match(block[start:end]) if start >= 0 else None
            if bar is None or (total := int(bar["total"])) in totals:
                continue
            totals.add(total)
            known = re.compile(rb"%%\|[^|\r\n]*\|[ \t]*\d+/%d \[" % total)
            line = self.feeds - block.count(b"\n", start, self.stop)
            self.bars.append((total, int(bar["done"]), line))

    def _dump(self, place: _Place, line: int) -> None:
        """The lines of one block of the dump, as far as its closing bracket."""
        known, at = self.patterns[place.pattern], place.start
        for nth in range(_DUMP_LINES):
            stop = self.block.find(b"\n", at)
            stop = stop if stop >= 0 else len(self.block)
            if at >= len(self.block):
                return
            if match := known.regex.search(self.block, at, stop):
                if match["block"] is not None and nth:
                    return
                whole = stop < len(self.block)
                self.hits.append(Hit(place.pattern, line, self.block[at:stop], whole))
                if match["other"] is not None:
                    return
            at, line = stop + 1, line + 1
