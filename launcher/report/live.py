"""What a terminal shows while a run goes on: a panel of a few lines; elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launcher.printable import printable
from launcher.redaction import redact
from launcher.report.progress import ENDED, TRACKER, Progress, Tail, clock, tracker
from launcher.runs import rundir
from launcher.upstream.logs import open_instruct
from launcher.verdict.logs.segments import BAR

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_ANNOUNCED = next(p.regex for p in open_instruct.PATTERNS if p.name == "total_steps")
# a row of the data, which upstream shows before it trains, may say anything
_OF_DATA = re.compile(rb"['\"{}]")
PLAIN_EVERY_S = 5.0  # seconds between plain lines in the first minute; later up to twelve times as many
CAUGHT_UP = 64 * 2**10  # bytes at the end of a record that are enough to say where a run stands
BACKLOG = 16 * 2**20  # bytes of the log that the view reads at most after falling behind a very talkative training
_BAD = ("leaking", "stale", "corrupt", "not engaged")


class View:
    def __init__(self, title: str, console: Path, probe: Path, progress: Progress, terminal: bool):
        # a terminal is looked at over shoulders, and its lines end up in logs of jobs
        self.title = redact(title)
        self.log, self.events = Tail(console), Tail(probe / "rank-0.jsonl")
        self.progress, self.tracker = progress, tracker(console)
        # of a run that goes on, the last of what it has done is enough
        self.log.skip(CAUGHT_UP)
        # what was proved stands at its beginning
        for raw in self.events.read(CAUGHT_UP):
            self.progress.event(rundir.parse_line(raw))
        beginning = self.events.offset
        self.events.skip(CAUGHT_UP)
        if self.events.offset > beginning:
            # an attempt that began in between is the one to show
            self.progress.foreign = False
        self.announced = False
        self.terminal = terminal
        self.live: Live | None = None
        self.begun, self.since = time.monotonic(), 0.0
        self.printed, self.linked = "", False

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        if self.terminal:
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
            self.live.start()
        over = False
        try:
            yield
            over = True
        finally:
            # a terminal that has gone must not take the verdict with it
            with contextlib.suppress(OSError, ValueError):
                self.take_in()
                if over and self.progress.step:
                    self.progress.phase = ENDED
                self.show(last=True)
            if self.live is not None:
                with contextlib.suppress(OSError, ValueError):
                    self.live.stop()

    def tick(self) -> None:
        self.take_in()
        self.show()

    def take_in(self) -> None:
        for raw in self.events.read():
            self.progress.event(rundir.parse_line(raw))
        self.log.skip(BACKLOG)
        for raw in self.log.read():
            self._total(raw)
            self.progress.work(raw)
            if self.tracker is None and TRACKER.search(raw):
                self.tracker = tracker(self.log.path)

    def _total(self, raw: bytes) -> None:
        announced, bar = _ANNOUNCED.search(raw), BAR.match(raw)
        if announced and not _OF_DATA.search(raw, 0, announced.start()):
            # what upstream says counts for more than what the plan could know, and its last word for most
            self.progress.total, self.announced = int(announced["total"]), True
        elif bar and self.progress.total is None and not self.announced:
            # a bar that is further than the training is of something else
            done, total = int(bar["done"]), int(bar["total"])
            here = self.progress.step
            self.progress.total = total if 0 < here <= total and done <= here + 1 else None

    def show(self, *, last: bool = False) -> None:
        """Draw the panel, or print a line where it is due: it changed, and not so often."""
        if self.live is not None:
            from rich.console import Group

            self.live.update(Group(*panel(self.title, self.progress, self.tracker)))
            return
        if self.tracker and not self.linked:
            self.linked = True
            typer.echo(f"{self.title}   {self.tracker}", err=True)
        words = "   ".join([self.title, *self.progress.where(), *self.progress.figures()])
        line = redact(printable(words)).replace("\n", " ")
        now = time.monotonic()
        every = PLAIN_EVERY_S * min(12.0, max(1.0, (now - self.begun) / 60))
        due = last or now - self.since >= every or not self.printed
        if due and line != self.printed:
            self.since, self.printed = now, line
            typer.echo(line, err=True)


def panel(title: str, progress: Progress, tracker: str | None) -> list[Text]:
    """The lines on a terminal: how far, the figures, what is proved, where it is tracked."""
    from rich.text import Text

    began, proofs = progress.began, ", ".join(f"{name} {state}" for name, state in progress.shown.items())
    elapsed = [] if began is None else [f"{clock(max(0.0, time.time() - began))} elapsed"]
    shown = [[title, *progress.where(), *elapsed], progress.figures()]
    shown += [[f"so far: {proofs}"] if proofs else [], [tracker] if tracker else []]
    lines = []
    for parts in filter(None, shown):
        text = redact(printable("   ".join(parts))).replace("\n", " ")
        lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
        lines[-1].highlight_words(_BAD, "bold red")
    lines[0].stylize("bold", 0, len(title))
    return lines
