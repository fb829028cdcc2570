"""What a terminal shows of a live run: a panel of a few lines; elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launcher import redaction
from launcher.config.durations import format_age
from launcher.config.points import POINTS
from launcher.printable import make_printable
from launcher.redaction import Redactor, redact
from launcher.report.progress import ENDED, TRACKER, Progress, Tail, find_tracker, format_clock
from launcher.runs import events
from launcher.upstream.logs import open_instruct
from launcher.verdict.logs.segments import BAR

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_ANNOUNCED = next(p.regex for p in open_instruct.PATTERNS if p.name == "total_steps")
# upstream shows a row of the data before it trains, and that may say anything
_DATA_MARK = re.compile(rb"['\"{}]")
_USUAL = {"importing": "usually 15 to 60 s"}
"""How long phases take, where that does not depend on the stage."""
PLAIN_EVERY_S = 5.0
"""Seconds between plain lines in the first minute; later up to twelve times as many."""
CAUGHT_UP = 64 * 2**10
"""Bytes at the end of a record that are enough to say where a run stands."""
BACKLOG = 16 * 2**20
"""Bytes of the log that the view reads at most after falling behind."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 30
_LEAST_BAR_CELLS = 4
_CURVE_CELLS = 20


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
        # a terminal is seen by others, and its lines end up in logs of jobs
        self.redactor = redactor or redaction.find_process_secrets()
        self.title = self.redactor.redact(title)
        self.log = Tail(console)
        self.events = Tail(probe / "rank-0.jsonl")
        self.probe = probe
        self.others: list[tuple[Tail, Progress]] = []
        self.progress = progress
        self.tracker = find_tracker(console, self.redactor)
        self.announced = False
        self.terminal = terminal
        self.live: Live | None = None
        self.begun = time.monotonic()
        self.printed_at = 0.0
        self.printed = ""
        self.tracker_printed = False
        self._catch_up()

    def _catch_up(self) -> None:
        """Read the beginning of the record, which has the proofs, and leave out all but its end."""
        self.log.skip(CAUGHT_UP)
        for raw in self.events.read(CAUGHT_UP):
            self.progress.add_event(events.parse_event(raw) or {})
        beginning = self.events.offset
        self.events.skip(CAUGHT_UP)
        if self.events.offset > beginning:
            # an attempt that began in between is the one to show
            self.progress.foreign = False

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
                self.progress.enter_phase(ENDED)
        finally:
            # a terminal that has gone must not take the verdict with it
            with contextlib.suppress(OSError, ValueError):
                self.read_new()
                self.show(last=True)
            if self.live is not None:
                with contextlib.suppress(OSError, ValueError):
                    self.live.stop()

    def tick(self) -> None:
        self.read_new()
        self.show()

    def read_new(self) -> None:
        """Read what the training has written since the last call."""
        for raw in self.events.read():
            self.progress.add_event(events.parse_event(raw) or {})
        self._read_losses_of_other_ranks()
        self.log.skip(BACKLOG)
        for raw in self.log.read():
            self._read_total(raw)
            self.progress.read_phase(raw)
            self.progress.read_logged_step(raw)
            if self.tracker is None and TRACKER.search(raw):
                self.tracker = find_tracker(self.log.path, self.redactor)

    def _read_losses_of_other_ranks(self) -> None:
        first = len(self.others) + 1
        for rank in range(first, self.progress.world):
            tail = Tail(self.probe / f"rank-{rank}.jsonl")
            tail.skip(CAUGHT_UP)
            progress = Progress(None, self.progress.attempt)
            self.others.append((tail, progress))
        for tail, other in self.others:
            for raw in tail.read():
                before = other.step
                other.add_event(events.parse_event(raw) or {})
                if other.step not in (before, 0):
                    self.progress.add_loss(other.step, other.loss)

    def _read_total(self, raw: bytes) -> None:
        """Take the number of steps from a line of the log, if it says one."""
        announced = _ANNOUNCED.search(raw)
        if announced and not _DATA_MARK.search(raw, 0, announced.start()):
            # upstream knows it better than the plan, and its last word counts
            self.progress.total = int(announced["total"])
            self.announced = True
            return
        bar = BAR.match(raw)
        if bar is None or self.progress.total is not None or self.announced:
            return
        # a bar that is further than the training is of something else
        total = int(bar["total"])
        step = self.progress.step
        if 0 < step <= total and int(bar["done"]) <= step + 1:
            self.progress.total = total

    def show(self, *, last: bool = False) -> None:
        """Draw the panel, or print a line if it changed and one is due."""
        if self.live is not None:
            from rich.console import Group

            lines = render_panel(
                self.title, self.progress, self.live.console, self.tracker, self.redactor
            )
            self.live.update(Group(*lines))
            return
        if self.tracker and not self.tracker_printed:
            self.tracker_printed = True
            typer.echo(f"{self.title}   {self.tracker}", err=True)
        parts = [self.title, self.progress.describe()]
        if not self.progress.step and self.progress.hang is None:
            # a wait without a word looks like a hang
            parts = [self.title, *_format_phase(self.progress)]
        text = "   ".join(parts)
        line = self.redactor.redact(make_printable(text)).replace("\n", " ")
        now = time.monotonic()
        minutes = (now - self.begun) / 60
        interval = PLAIN_EVERY_S * min(12.0, max(1.0, minutes))
        is_due = last or not self.printed or now - self.printed_at >= interval
        if is_due and line != self.printed:
            self.printed_at = now
            self.printed = line
            typer.echo(line, err=True)


def render_panel(
    title: str, progress: Progress, console: Console, tracker: str | None, redactor: Redactor
) -> list[Text]:
    """The lines on a terminal: progress, loss, machine, what is proved, where it is tracked."""
    plain = console.options.ascii_only
    head = _format_head(progress, console.width - len(title), plain=plain)
    first = _format_line([title, *head])
    first.stylize("bold", 0, len(title))
    lines = [first]
    if progress.step:
        figures = _format_figures(progress, plain=plain)
        lines.append(_format_line(figures))
        machine = _format_machine(progress)
        if machine:
            lines.append(_format_line(machine))
    if progress.hang is not None:
        reason = redactor.redact(progress.hang)
        hang = _format_line([f"hangs: {reason}"])
        hang.stylize("bold red")
        lines.append(hang)
    if progress.shown:
        lines.append(_format_proofs(progress))
    if tracker:
        lines.append(_format_line([tracker]))
    return lines


def _format_line(parts: Sequence[str]) -> Text:
    from rich.text import Text

    return Text(_clean_line("   ".join(parts)), no_wrap=True, overflow="ellipsis")


def _clean_line(text: str) -> str:
    return redact(make_printable(text)).replace("\n", " ")


def _format_head(progress: Progress, width: int, *, plain: bool) -> list[str]:
    """Bar, step and both clocks within `width` columns; before the first step the phase."""
    if not progress.step:
        return _format_phase(progress)
    parts = progress.position() + _format_elapsed(progress)
    if progress.step == progress.total or progress.phase == ENDED:
        parts.append(progress.phase)
    elif progress.left_s is not None:
        parts.append(f"{format_clock(progress.left_s)} left")
    taken = sum(len(part) + 3 for part in parts) + 3
    cells = min(_BAR_CELLS, width - taken)
    if not progress.total or cells < _LEAST_BAR_CELLS:
        return parts
    done = min(cells, cells * progress.step // progress.total)
    bar = "█" * done + "░" * (cells - done)
    if plain:
        bar = bar.replace("█", "#").replace("░", "-")
    return [bar, *parts]


def _format_phase(progress: Progress) -> list[str]:
    parts = [progress.phase]
    if progress.phase in _USUAL:
        parts = [f"{progress.phase} ({_USUAL[progress.phase]})"]
    if progress.since is not None and progress.since != progress.began:
        parts.append(_format_clock_since(progress.since))
    return parts + _format_elapsed(progress)


def _format_elapsed(progress: Progress) -> list[str]:
    if progress.began is None:
        return []
    return [f"{_format_clock_since(progress.began)} elapsed"]


def _format_clock_since(moment: float) -> str:
    """How long ago a moment was, in seconds since the epoch."""
    return format_clock(max(0.0, time.time() - moment))


def _format_figures(progress: Progress, *, plain: bool) -> list[str]:
    loss = progress.loss_text()
    curve = ""
    if not plain:
        curve = render_sparkline(progress.losses)
    parts = [f"{loss} {curve}".strip(), *progress.preferences()]
    if progress.grad_norm is not None:
        parts.append(f"gradient norm {progress.grad_norm:.3g}")
    if progress.learning_rate is not None:
        parts.append(f"learning rate {progress.learning_rate:.2e}")
    return parts


def _format_machine(progress: Progress) -> list[str]:
    parts = []
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.memory_gib:
        memory = f"{progress.memory_gib:.1f}"
        if progress.card_gib:
            memory += f" of {progress.card_gib:.0f}"
        parts.append(f"{memory} GiB")
    if progress.saved is not None:
        step, moment = progress.saved
        age = format_age(time.time() - moment)
        parts.append(f"checkpoint of step {step:,}, {age} ago")
    return parts


def _format_proofs(progress: Progress) -> Text:
    proofs = ", ".join(f"{name} {state}" for name, state in progress.shown.items())
    line = _format_line([f"so far: {proofs}"])
    line.stylize("dim")
    for point in POINTS:
        line.highlight_words(point.alarming, "bold red")
    return line


def render_sparkline(values: Sequence[float]) -> str:
    """Values as a curve one line high; each cell is the mean of a group of values."""
    if len(values) < 2:
        return ""
    size = math.ceil(len(values) / _CURVE_CELLS)
    means = []
    for begin in range(0, len(values), size):
        group = values[begin : begin + size]
        means.append(statistics.fmean(group))
    low = min(means)
    height = max(means) - low
    scale = 0.0
    if height:
        scale = (len(_BLOCKS) - 1) / height
    curve = ""
    for mean in means:
        level = round((mean - low) * scale)
        curve += _BLOCKS[level]
    return curve
