"""What a terminal shows while a run goes on: a panel of a few lines; elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launcher import redaction
from launcher.config.points import POINTS
from launcher.printable import printable
from launcher.redaction import Redactor, redact
from launcher.report.progress import ENDED, TRACKER, Progress, Tail, clock, tracker
from launcher.runs import events
from launcher.upstream.logs import open_instruct
from launcher.verdict.logs.segments import BAR

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_ANNOUNCED = next(p.regex for p in open_instruct.PATTERNS if p.name == "total_steps")
# a row of the data, which upstream shows before it trains, may say anything
_OF_DATA = re.compile(rb"['\"{}]")
PLAIN_EVERY_S = 5.0  # seconds between plain lines in the first minute; later up to twelve times as many
CAUGHT_UP = 64 * 2**10  # bytes at the end of a record that are enough to say where a run stands
BACKLOG = 16 * 2**20  # bytes of the log that the view reads at most after falling behind a very talkative training
_BLOCKS = "▁▂▃▄▅▆▇█"
_CELLS = 30  # of the bar, where there is room
_ALARMING = [state for point in POINTS for state in point.alarming]


class View:
    def __init__(
        self,
        title: str,
        console: Path,
        probe: Path,
        progress: Progress,
        terminal: bool,
        redactor: Redactor | None = None,
    ):
        # a terminal is looked at over shoulders, and its lines end up in logs of jobs
        self.redactor = redactor or redaction.of_process()
        self.title = self.redactor.redact(title)
        self.log, self.events = Tail(console), Tail(probe / "rank-0.jsonl")
        self.probe, self.others = probe, list[tuple[Tail, Progress]]()
        self.progress, self.tracker = progress, tracker(console, self.redactor)
        # of a run that goes on, the last of what it has done is enough
        self.log.skip(CAUGHT_UP)
        # what was proved stands at its beginning
        for raw in self.events.read(CAUGHT_UP):
            self.progress.event(events.read(raw) or {})
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
        try:
            yield
            if self.progress.step:
                self.progress.enter(ENDED)
        finally:
            # a terminal that has gone must not take the verdict with it
            with contextlib.suppress(OSError, ValueError):
                self.take_in()
                self.show(last=True)
            if self.live is not None:
                with contextlib.suppress(OSError, ValueError):
                    self.live.stop()

    def tick(self) -> None:
        self.take_in()
        self.show()

    def take_in(self) -> None:
        for raw in self.events.read():
            self.progress.event(events.read(raw) or {})
        self._take_in_losses()
        self.log.skip(BACKLOG)
        for raw in self.log.read():
            self._total(raw)
            self.progress.work(raw)
            self.progress.logged(raw)
            if self.tracker is None and TRACKER.search(raw):
                self.tracker = tracker(self.log.path)

    def _take_in_losses(self) -> None:
        """Those of the other ranks."""
        for rank in range(len(self.others) + 1, self.progress.world):
            self.others.append((Tail(self.probe / f"rank-{rank}.jsonl"), Progress(None, self.progress.attempt)))
            self.others[-1][0].skip(CAUGHT_UP)
        for tail, other in self.others:
            for raw in tail.read():
                before = other.step
                other.event(events.read(raw) or {})
                if other.step not in (before, 0):
                    self.progress.add_loss(other.step, other.loss)

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

            lines = panel(self.title, self.progress, self.live.console, self.tracker, self.redactor)
            self.live.update(Group(*lines))
            return
        if self.tracker and not self.linked:
            self.linked = True
            typer.echo(f"{self.title}   {self.tracker}", err=True)
        line = self.redactor.redact(printable(f"{self.title}   {self.progress.line()}")).replace("\n", " ")
        now = time.monotonic()
        every = PLAIN_EVERY_S * min(12.0, max(1.0, (now - self.begun) / 60))
        due = last or now - self.since >= every or not self.printed
        if due and line != self.printed:
            self.since, self.printed = now, line
            typer.echo(line, err=True)


def panel(
    title: str, progress: Progress, console: Console, tracker: str | None, redactor: Redactor | None = None
) -> list[Text]:
    """The lines on a terminal: how far, the loss, the machine, what is proved, where it is tracked."""
    plain = console.options.ascii_only
    parts = [_head(progress, console.width - len(title), plain=plain)]
    if progress.step:
        parts += [_figures(progress, plain=plain), _machine(progress)]
    lines = [_line([title, *parts[0]], bold=len(title)), *map(_line, filter(None, parts[1:]))]
    if progress.hang is not None:
        hang = progress.hang if redactor is None else redactor.redact(progress.hang)
        lines.append(_hang(hang))
    if progress.shown:
        lines.append(_proofs(progress))
    return [*lines, *([_line([tracker])] if tracker else [])]


def _line(parts: Sequence[str], *, bold: int = 0) -> Text:
    from rich.text import Text

    text = " ".join(redact(printable("   ".join(parts))).split("\n"))
    line = Text(text, no_wrap=True, overflow="ellipsis")
    line.stylize("bold", 0, bold)
    return line


def _head(progress: Progress, width: int, *, plain: bool) -> list[str]:
    """Bar, step and both clocks, in so many columns; before the first step the phase and its clock."""
    now = time.time()
    passed = [] if progress.began is None else [f"{clock(max(0.0, now - progress.began))} elapsed"]
    if not progress.step:
        whole = progress.since is None or progress.since == progress.began
        own = [] if progress.since is None or whole else [clock(max(0.0, now - progress.since))]
        return [progress.phase, *own, *passed]
    of = f"/{progress.total:,}" if progress.total else ""
    epoch = [] if progress.epoch is None else [f"epoch {progress.epoch:.2f}"]
    parts = [f"step {progress.step:,}{of}", *epoch, *passed]
    if progress.step == progress.total or progress.phase == ENDED:
        parts.append(progress.phase)
    elif progress.left_s is not None:
        parts.append(f"{clock(progress.left_s)} left")
    # the bar gives way to words
    cells = min(_CELLS, width - sum(len(part) + 3 for part in parts) - 3)
    if not progress.total or cells < 4:
        return parts
    done = min(cells, cells * progress.step // progress.total)
    full, empty = ("#", "-") if plain else ("█", "░")
    return [full * done + empty * (cells - done), *parts]


def _figures(progress: Progress, *, plain: bool) -> list[str]:
    loss = "loss not finite" if progress.loss is None else f"loss {progress.loss:.4f}"
    curve = "" if plain else sparkline(progress.losses)
    parts = [f"{loss} {curve}".strip(), *progress.preferences()]
    if progress.grad_norm is not None:
        parts.append(f"gradient norm {progress.grad_norm:.3g}")
    if progress.learning_rate is not None:
        parts.append(f"learning rate {progress.learning_rate:.2e}")
    return parts


def _machine(progress: Progress) -> list[str]:
    parts = []
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.memory_gib:
        of = f" of {progress.card_gib:.0f}" if progress.card_gib else ""
        parts.append(f"{progress.memory_gib:.1f}{of} GiB")
    if progress.saved is not None:
        step, at = progress.saved
        parts.append(f"checkpoint of step {step:,}, {clock(max(0.0, time.time() - at))} ago")
    return parts


def _hang(message: str) -> Text:
    line = _line([f"hangs: {message}"])
    line.stylize("bold red")
    return line


def _proofs(progress: Progress) -> Text:
    line = _line(["so far: " + ", ".join(f"{name} {state}" for name, state in progress.shown.items())])
    line.stylize("dim")
    line.highlight_words(_ALARMING, "bold red")
    return line


def sparkline(values: Sequence[float], cells: int = 20) -> str:
    """Values as a curve one line high, over all of them."""
    size = -(-len(values) // cells) or 1
    bins = [statistics.fmean(values[at : at + size]) for at in range(0, len(values), size)]
    if len(bins) < 2:
        return ""
    low, high = min(bins), max(bins)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in bins)
