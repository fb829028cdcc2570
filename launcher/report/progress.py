"""The live view of a running attempt, read from what the training processes write."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from launcher import files
from launcher.printable import printable
from launcher.redaction import redact
from launcher.runs import rundir
from launcher.upstream.logs import open_instruct
from launcher.verdict.logs.segments import BAR

if TYPE_CHECKING:
    from rich.live import Live

_ANNOUNCED = next(p.regex for p in open_instruct.PATTERNS if p.name == "total_steps")
# a row of the data, which upstream shows before it trains, may say anything
_OF_DATA = re.compile(rb"['\"{}]")
_END = re.compile(rb"[\r\n]")
PLAIN_EVERY_S = 5.0
WINDOW = 20
CAUGHT_UP = 64 * 2**10
"""Bytes at the end of a record that are enough to say where a run stands."""
BACKLOG = 16 * 2**20
"""Bytes of the log that the view reads at most after falling behind a very talkative training."""


@dataclass(slots=True)
class Tail:
    """New complete lines of a growing file; one that was truncated is begun anew."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self, limit: int = 4 * 2**20) -> list[bytes]:
        """The lines that were finished since the last call, at most `limit` bytes of them."""
        try:
            with files.open_regular(self.path, buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size < self.offset:
                    self.offset, self.rest = 0, b""
                stream.seek(self.offset)
                block = stream.read(limit)
        except OSError:
            return []
        self.offset += len(block)
        *lines, self.rest = _END.split(self.rest + block)
        # a line without end must not grow in memory
        self.rest = self.rest[-65536:]
        return lines

    def skip(self, backlog: int) -> None:
        """Leave out what is more than `backlog` bytes behind, up to the next line."""
        with contextlib.suppress(OSError):
            behind = self.path.stat().st_size - backlog
            if behind > self.offset:
                self.offset, self.rest = behind, b""


class Step(NamedTuple):
    """One optimizer step: when it was over, its tokens, and what it took itself, where that is recorded.

    `interrupted` steps followed a save or an evaluation, which counts into their seconds.
    """

    elapsed: float
    tokens: float
    seconds: float | None
    interrupted: bool


@dataclass(slots=True)
class Progress:
    """What is known of the run right now; seconds since the probe began, memory in GiB.

    Where an `attempt` is named, what the same record holds of others is left out.
    """

    total: int | None
    attempt: int | None = None
    foreign: bool = False
    step: int = 0
    loss: float | None = None
    memory_gib: float | None = None
    world: int = 1
    times: list[Step] = field(default_factory=list)
    note: str = "starting"
    exit: int | None = None

    def event(self, event: dict[str, Any]) -> None:
        """Take in one line of rank 0's record."""
        if event.get("event") == "start":
            self.foreign = self.attempt not in (None, event.get("attempt", self.attempt))
            self.world = int(_number(event.get("world"))) or self.world
            self.note = "starting" if self.foreign else "loading"
            self.step, self.times, self.exit = 0, [], None
            self.loss = self.memory_gib = None
        elif self.foreign:
            return
        elif event.get("event") == "step" and isinstance(event.get("step"), int):
            self.step = event["step"]
            loss, memory = event.get("loss"), event.get("allocated_gib")
            self.loss = loss if isinstance(loss, int | float) else None
            self.memory_gib = memory if isinstance(memory, int | float) else None
            self.times.append(_step(event))
            del self.times[:-WINDOW]
        elif event.get("event") == "end" and isinstance(event.get("exit"), int):
            self.exit = event["exit"]

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps, all ranks taken to do what rank 0 does; as a verdict counts it.

        Saves and evaluations take no part in it, where the record holds the seconds of a step.
        """
        if len(self.times) < 2:
            return None
        seconds, after = self.times[-1].elapsed - self.times[0].elapsed, self.times[1:]
        if all(step.seconds is not None for step in after):
            after = [step for step in after if not step.interrupted]
            seconds = sum(step.seconds or 0.0 for step in after)
        tokens = sum(step.tokens for step in after) * self.world
        return tokens / seconds if seconds > 0 and tokens else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the present pace."""
        if self.total is None or len(self.times) < 2:
            return None
        pace = (self.times[-1].elapsed - self.times[0].elapsed) / (len(self.times) - 1)
        return max(0, self.total - self.step) * pace

    def line(self) -> str:
        """One line for a person."""
        if not self.step:
            return self.note
        of = f"/{self.total:,}" if self.total else ""
        parts = [f"step {self.step:,}{of}"]
        parts.append("loss not finite" if self.loss is None else f"loss {self.loss:.4f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.left_s is not None:
            parts.append(f"{clock(self.left_s)} left")
        if self.memory_gib:
            parts.append(f"{self.memory_gib:.1f} GiB")
        return "   ".join(parts)


def _step(event: dict[str, Any]) -> Step:
    seconds = event.get("seconds")
    return Step(
        elapsed=_number(event.get("elapsed")), tokens=_number(event.get("tokens")),
        seconds=seconds if isinstance(seconds, int | float) else None,
        interrupted=event.get("interrupted") is True,
    )  # fmt: skip


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class View:
    """Shows progress while something else waits: a live line on a terminal, plain lines elsewhere."""

    def __init__(
        self, title: str, console: Path, probe: Path, total: int | None, terminal: bool,
        *, attempt: int = 1, world: int = 1,
    ):  # fmt: skip
        # a terminal is looked at over shoulders, and its lines end up in logs of jobs
        self.title = redact(title)
        self.log, self.events = Tail(console), Tail(probe / "rank-0.jsonl")
        # of a run that goes on, the last of what it has done is enough
        self.log.skip(CAUGHT_UP)
        self.events.skip(CAUGHT_UP)
        self.progress = Progress(total=total, attempt=attempt, world=world)
        self.announced = False
        self.terminal = terminal
        self.live: Live | None = None
        self.since = 0.0
        self.printed = ""

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """The context in which `tick` may draw; at its end the last line stays."""
        if self.terminal:
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
            self.live.start()
        try:
            yield
        finally:
            # a terminal that has gone must not take the verdict with it
            with contextlib.suppress(OSError, ValueError):
                self.take_in()
                self.show(last=True)
            if self.live is not None:
                with contextlib.suppress(OSError, ValueError):
                    self.live.stop()

    def tick(self) -> None:
        """Take in what is new and show it."""
        self.take_in()
        self.show()

    def take_in(self) -> None:
        """Read what has been written since the last time."""
        for raw in self.events.read():
            self.progress.event(rundir.parse_line(raw))
        self.log.skip(BACKLOG)
        for raw in self.log.read():
            self._total(raw)

    def _total(self, raw: bytes) -> None:
        told, bar = _ANNOUNCED.search(raw), BAR.match(raw)
        if told and not _OF_DATA.search(raw, 0, told.start()):
            # what upstream says counts for more than what the plan could know, and its last word for most
            self.progress.total, self.announced = int(told["total"]), True
        elif bar and self.progress.total is None and not self.announced:
            # a bar that is further than the training is of something else
            done, total = int(bar["done"]), int(bar["total"])
            here = self.progress.step
            self.progress.total = total if 0 < here <= total and done <= here + 1 else None

    def show(self, *, last: bool = False) -> None:
        """Draw the line, or print it where it is due: it changed, and not so often."""
        line = printable(f"{self.title}   {self.progress.line()}").replace("\n", " ")
        if self.live is not None:
            from rich.text import Text

            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        due = last or time.monotonic() - self.since >= PLAIN_EVERY_S or not self.printed
        if due and line != self.printed:
            self.since, self.printed = time.monotonic(), line
            typer.echo(line, err=True)
