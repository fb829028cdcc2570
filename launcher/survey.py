"""Pieces of a log -> what is worth reading of each: a `Survey`.

A piece is surveyed by itself, so that two processes share a large file. What it all means is left
to `logs`. The lines of a survey are counted from 0 where the piece begins.
"""

from __future__ import annotations

import os
import re
import select
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from launcher.patterns import Pattern
from launcher.segments import BAR, BAR_BYTES, Piece, Pieces, bounds
from launcher.sieve import Sieve
from launcher.tracebacks import BEFORE_BYTES, FIRST_LINE, FRAMES_FIRST, Tracebacks

KEPT_SIGNALS = 50  # of each name: from the beginning, from the last step on, and from the end
SAMPLED = ("step", "metrics")
"""Patterns of which a long log holds more lines than are read: evenly spaced ones then."""
NUMBERED = "metrics"
"""The sampled pattern whose lines tell by their number what they belong to."""
RAISED = -1
"""The index of no pattern: what a traceback raised."""

_TRIED = 512  # lines with a needle, where none of them matches
_ALWAYS = 64  # lines of a piece that are read whatever the sample, or as many as that is
_LAST = 17  # lines of a piece that are read too: the last steps, as told by eight ranks
_LAST_BARS = 400  # of a piece, looked through from its end
_KEPT_BARS = 50
_DUMPS, _DUMP_LINES = 4, 4_000  # of a piece, from its beginning and from its end
_EDGE_PIECES = 2  # at either end of a log, searched for short needles too
_SHARED_PIECES = 12  # fewer are not worth a second process
_DUMP = "arguments"
_LENGTH = struct.Struct("=I")


class Hit(NamedTuple):
    """A segment that a pattern is about; of a pattern that is not sampled, one that it matches.

    `skipped` counts the segments that were left out since the last hit of this pattern, `whole` is
    False where the log ends before the segment does, and `bar` is the progress bar beside it:
    (done, total).
    """

    pattern: int
    line: int
    segment: bytes
    whole: bool = True
    skipped: int = 0
    bar: tuple[int, int] | None = None
    fields: Mapping[str, str] | None = None


@dataclass(slots=True, kw_only=True)
class Survey:
    """What one piece holds: its hits in order, its line feeds, where each bar stands last as
    (total, done, line), and about how many lines there are of each sampled pattern. `beyond` are hits
    that stand in a later piece."""

    feeds: int = 0
    hits: list[Hit] = field(default_factory=list)
    beyond: list[Hit] = field(default_factory=list)
    bars: list[tuple[int, int, int]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)


class Surveyor:
    """Surveys the pieces of one log.

    Of a sampled pattern it takes at most `share` lines of each piece; how many there are is guessed
    where they are far more than `most` in the whole log.
    """

    def __init__(
        self, pieces: Pieces, patterns: Sequence[Pattern], *, share: int, most: int
    ) -> None:
        self.pieces, self.patterns, self.share, self.most = pieces, patterns, share, most
        self.sieve = Sieve(((FIRST_LINE,), *(p.anchors for p in patterns)))

    def all(self) -> list[Survey]:
        """The surveys of all pieces, in order; of a large file by two processes."""
        count = len(self.pieces)
        shared = count >= _SHARED_PIECES and _may_fork()
        found: list[Survey] = []
        with _helped(self._from_the_end) if shared else _alone() as helper:
            while len(found) < count:
                if len(found) in helper.take():
                    found += [helper.done[index] for index in range(len(found), count)]
                else:
                    found.append(self.one(len(found)))
        return found

    def one(self, index: int, share: int | None = None) -> Survey:
        """The survey of one piece."""
        piece = self.pieces.read(index)
        edge = not _EDGE_PIECES <= index < len(self.pieces) - _EDGE_PIECES
        search = _Search(
            surveyor=self, piece=piece, share=share or self.share, edge=edge, survey=Survey()
        )
        return search.run()

    def _from_the_end(self) -> Iterator[tuple[int, Survey]]:
        for index in reversed(range(len(self.pieces))):
            yield index, self.one(index)


class _Place(NamedTuple):
    """Where a segment with a needle lies in the block."""

    start: int
    pattern: int
    end: int
    skipped: int = 0


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search of one piece."""

    surveyor: Surveyor
    piece: Piece
    share: int
    edge: bool
    survey: Survey

    def run(self) -> Survey:
        """Find the places that matter, then take them in order."""
        block, places = self.piece.block, self._places()
        at = line = done = 0
        for place in places:
            line += block.count(b"\n", at, place.start)
            at = place.start
            if place.pattern == RAISED:
                done = self._follow(place, line) if place.start >= done else done
            elif self.surveyor.patterns[place.pattern].name == _DUMP:
                self._dump(place, line)
            else:
                self.survey.hits.append(self._hit(place, line))
        # a traceback that stays open is followed past what stands between: another run may begin there
        self.survey.hits.sort(key=lambda hit: hit.line)
        self.survey.feeds = line + block.count(b"\n", at) + self.piece.gap
        self._bars()
        return self.survey

    def _places(self) -> list[_Place]:
        block, patterns = self.piece.block, self.surveyor.patterns
        held = self.surveyor.sieve.sift(block)
        found: list[_Place] = []
        rest: list[int] = []
        for index, known in enumerate(patterns):
            anchored = bool(held & 2 << index)
            if known.name == _DUMP:
                found += self._dumps(index, known) if anchored else ()
            elif known.name in SAMPLED and anchored:
                found += self._sample(index, known)
            elif anchored or (self.edge and _hidden(known) and known.needle in block):
                rest.append(index)
        work = sorted(place.start for place in found)[-2:-1]
        for index in rest:
            known = patterns[index]
            found += self._ends(index, known.needle, known.regex, work)
        if held & 1:
            found += self._ends(RAISED, FIRST_LINE, None, work)
        if self.piece.begin == 0 and (frame := FRAMES_FIRST.match(block)):
            found.append(_Place(frame.start("frame"), RAISED, frame.end()))
        return sorted(found)

    def _sample(self, index: int, known: Pattern) -> list[_Place]:
        """All segments with the needle, or evenly spaced ones, with the first and the last."""
        block, needle = self.piece.block, known.needle
        few = list(islice(self._walk(index, needle, 0, len(block)), self.share + 1))
        self.survey.counts[index] = len(few)
        if len(few) <= self.share:
            return few
        first, last = few[0].start, block.rfind(needle)
        points = [first + (last - first) * n // self.share for n in range(self.share + 1)]
        found = {block.find(needle, point) for point in points}
        # how the last step differs from the one before it says what happened after work had ended
        found |= {place.start for place in islice(self._back(index, needle, 0, len(block)), _LAST)}
        for always in known.always:
            found |= {
                match.start() for match in islice(always.finditer(block), max(_ALWAYS, self.share))
            }
        places: list[_Place] = []
        before = 0
        for at in sorted(found):
            start, end = bounds(block, at)
            if start < before or (here := block.find(needle, start, end)) < 0:
                continue
            skipped = block.count(needle, before, here) if known.name == NUMBERED else 0
            places.append(_Place(start, index, end, skipped))
            before = end
        if known.name == NUMBERED:
            count = len(places) + sum(place.skipped for place in places)
        else:
            count = self._about(needle, points)
        self.survey.counts[index] = count
        return places

    def _about(self, needle: bytes, points: Sequence[int]) -> int:
        """How often the needle comes, exactly unless it is beyond all doubt that it comes too often.

        By how far it is from each point to the next one it is not guessed to come more often than it
        does: where it comes in heaps, most points are far from any.
        """
        block = self.piece.block
        far = sum(block.find(needle, point) - point for point in points) / len(points)
        guess = int((points[-1] - points[0]) / (2 * far + 1))
        beyond_doubt = guess > 2 * self.surveyor.most // len(self.surveyor.pieces)
        return guess if beyond_doubt else block.count(needle)

    def _walk(self, index: int, needle: bytes, low: int, high: int) -> Iterator[_Place]:
        """The segments with the needle between two positions."""
        block = self.piece.block
        at = block.find(needle, low, high)
        while at >= 0:
            start, end = bounds(block, at)
            if start >= 0:
                yield _Place(start, index, end)
            at = block.find(needle, end, high)

    def _back(self, index: int, needle: bytes, low: int, high: int) -> Iterator[_Place]:
        """The same from the end."""
        block = self.piece.block
        at = block.rfind(needle, low, high)
        while at >= 0:
            start, end = bounds(block, at)
            if start >= 0:
                yield _Place(start, index, end)
            at = block.rfind(needle, low, max(low, start if start >= 0 else at))

    def _ends(
        self, index: int, needle: bytes, regex: re.Pattern[bytes] | None, since: Sequence[int]
    ) -> list[_Place]:
        """The first and the last segments that match, and the first ones from each of `since` on.

        The last of them carries how many were left out.
        """
        block = self.piece.block
        found: dict[int, _Place] = {}

        def take(walk: Iterable[_Place]) -> bool:
            """Whether the walk came to its end."""
            kept = 0
            for tried, place in enumerate(walk):
                if kept >= KEPT_SIGNALS or tried >= _TRIED:
                    return False
                if regex is None or regex.search(block[place.start : place.end]):
                    found[place.start] = place
                    kept += 1
            return True

        if take(self._walk(index, needle, 0, len(block))):
            return list(found.values())
        for low in since:
            take(self._walk(index, needle, low, len(block)))
        take(self._back(index, needle, 0, len(block)))
        places = [found[start] for start in sorted(found)]
        left_out = max(0, block.count(needle) - len(places))
        return [*places[:-1], *(place._replace(skipped=left_out) for place in places[-1:])]

    def _hit(self, place: _Place, line: int) -> Hit:
        block, known = self.piece.block, self.surveyor.patterns[place.pattern]
        return Hit(
            pattern=place.pattern,
            line=line,
            segment=block[place.start : place.end],
            whole=place.end < len(block),
            skipped=place.skipped,
            bar=self._bar(place.start, place.end) if known.name == NUMBERED else None,
        )

    def _bar(self, start: int, end: int) -> tuple[int, int] | None:
        """The progress bar that was redrawn right behind a segment, or last before it."""
        block = self.piece.block
        after = BAR.match(block, end, end + BAR_BYTES) or BAR.match(block, end + 1)
        if after is None and end + 1 >= len(block):
            beyond = block[end:] + self.surveyor.pieces.beyond(self.piece)[:BAR_BYTES]
            after = BAR.match(beyond) or BAR.match(beyond, 1)
        lead, cut = block[max(0, start - BAR_BYTES) : start], start > BAR_BYTES
        if after is None and start < BAR_BYTES:
            lead = self.surveyor.pieces.before(self.piece) + lead
            cut = self.piece.begin > BAR_BYTES
        at = len(lead) if after is None else -1
        while after is None and (at := lead.rfind(b"%|", 0, at)) >= 0:
            low, high = bounds(lead, at)
            # where the lead is cut, a description may have stood before
            after = BAR.match(lead[low:high]) if low > 0 or not cut else None
        return (int(after["done"]), int(after["total"])) if after else None

    def _bars(self) -> None:
        """Where each bar without a description stands last; training's has none."""
        block, at, seen = self.piece.block, len(self.piece.block), set[int]()
        known: re.Pattern[bytes] | None = None
        if b"%" not in block or b"|" not in block:  # far faster to see than that both are together
            return
        for _ in range(_LAST_BARS):
            at = block.rfind(b"%|", 0, at)
            if at < 0 or len(seen) >= _KEPT_BARS:
                return
            if known is not None and known.match(block, at):
                continue
            start, end = bounds(block, at)
            bar = BAR.match(block[start:end]) if start >= 0 else None
            if bar is None or (total := int(bar["total"])) in seen:
                continue
            seen.add(total)
            known = re.compile(rb"%%\|[^|\r\n]*\|[ \t]*\d+/%d \[" % total)
            line = self.survey.feeds - self.piece.gap - block.count(b"\n", start)
            self.survey.bars.append((total, int(bar["done"]), line))

    def _follow(self, place: _Place, line: int) -> int:
        """Follow a traceback, and those of other ranks in between; the position reached."""
        block, start, tracebacks = self.piece.block, place.start, Tracebacks()
        before = block[max(0, start - BEFORE_BYTES) : start]
        if start < BEFORE_BYTES:
            before = self.surveyor.pieces.before(self.piece) + before
        tracebacks.recall(before)
        reached, raised = tracebacks.follow(block, start, line)
        inside = len(raised)
        if tracebacks.open:
            beyond = self.surveyor.pieces.beyond(self.piece)
            line += block.count(b"\n", start) + self.piece.gap
            raised += tracebacks.follow(beyond, 0, line, opening=False)[1]
        skipped = place.skipped
        for nth, found in enumerate(raised):
            fields = found.as_fields()
            hit = Hit(RAISED, found.line, found.segment, skipped=skipped, fields=fields)
            (self.survey.hits if nth < inside else self.survey.beyond).append(hit)
            skipped = 0
        return reached

    def _dumps(self, index: int, known: Pattern) -> list[_Place]:
        """Where blocks of the arguments dump begin."""
        block = self.piece.block
        found = set[_Place]()
        for anchor in known.anchors:
            found |= set(islice(self._walk(index, anchor, 0, len(block)), _DUMPS))
            found |= set(islice(self._back(index, anchor, 0, len(block)), _DUMPS))
        return list(found)

    def _dump(self, place: _Place, line: int) -> None:
        """The lines of one block of the dump, as far as its closing bracket."""
        known = self.surveyor.patterns[place.pattern]
        text = self.piece.block
        at, lines, first = place.start, 0, True
        while lines < _DUMP_LINES:
            if at >= len(text):
                if text is not self.piece.block:
                    return
                line += self.piece.gap
                text, at = self.surveyor.pieces.beyond(self.piece), 0
            stop = text.find(b"\n", at)
            stop = stop if stop >= 0 else len(text)
            match = known.regex.search(text, at, stop) if known.needle in text[at:stop] else None
            if match is not None:
                if match["block"] is not None and not first:
                    return
                segment = text[at:stop]
                self.survey.hits.append(Hit(place.pattern, line, segment, stop < len(text)))
                if match["other"] is not None:
                    return
                first = False
            at, line, lines = stop + 1, line + 1, lines + 1


def _hidden(known: Pattern) -> bool:
    """Whether the needle may stand where none of the anchors does."""
    return known.anchors != (known.needle,)


class _Helper:
    """What the other process has done so far, by index."""

    def __init__(self, pipe: int | None) -> None:
        self.done: dict[int, Survey] = {}
        self._pipe, self._partial = pipe, bytearray()

    def take(self) -> Mapping[int, Survey]:
        """All surveys that have come until now."""
        if self._pipe is None and not self._partial:
            return self.done
        import pickle  # only large logs need it

        while self._pipe is not None and select.select([self._pipe], [], [], 0)[0]:
            data = os.read(self._pipe, 1 << 20)
            if not data:
                self._pipe = None
            self._partial += data
        while len(self._partial) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._partial)[0]
            if len(self._partial) < end:
                break
            index, found = pickle.loads(self._partial[_LENGTH.size : end])
            self.done[index] = found
            del self._partial[:end]
        return self.done


@contextmanager
def _alone() -> Iterator[_Helper]:
    yield _Helper(None)


@contextmanager
def _helped(work: Callable[[], Iterator[tuple[int, Survey]]]) -> Iterator[_Helper]:
    """Another process that does the same work from the other end; it is gone afterwards."""
    import pickle

    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(out)
            with os.fdopen(into, "wb") as pipe:
                for found in work():
                    data = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
                    pipe.write(_LENGTH.pack(len(data)) + data)
                    pipe.flush()
        finally:
            os._exit(0)  # whatever happened: the parent does what is missing by itself
    os.close(into)
    try:
        yield _Helper(out)
    finally:
        os.close(out)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _may_fork() -> bool:
    """Whether there is a second core, and no thread that a copy of this process would lack."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return hasattr(os, "fork") and (cores or 1) > 1 and threading.active_count() == 1
