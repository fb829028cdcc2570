"""The live view of a running attempt, read from what the training processes write."""

from __future__ import annotations

import json
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.live import Live

_TOTAL = re.compile(rb"Total optimization steps = (\d+)|\b\d+/(\d+) \[")
PLAIN_EVERY_S = 5.0
WINDOW = 20


@dataclass(slots=True)
class Tail:
    """New complete lines of a growing file."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self, limit: int = 4 * 2**20) -> list[bytes]:
        """The lines that were finished since the last call, at most `limit` bytes of them."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                block = stream.read(limit)
        except OSError:
            return []
        self.offset += len(block)
        *lines, self.rest = re.split(rb"[\r\n]", self.rest + block)
        # a line without end must not grow in memory
        self.rest = self.rest[-65536:]
        return lines


@dataclass(slots=True)
class Progress:
    """What is known of the run right now; seconds since the probe began, memory in GiB."""

    total: int | None
    step: int = 0
    loss: float | None = None
    memory_gib: float | None = None
    world: int = 1
    times: list[tuple[float, int]] = field(default_factory=list)
    note: str = "starting"

    def event(self, event: dict[str, Any]) -> None:
        """Take in one line of rank 0's record."""
        if event.get("event") == "start":
            self.world = int(event.get("world") or 1)
            self.step, self.times, self.note = 0, [], "loading"
        elif event.get("event") == "step":
            self.step = int(event["step"])
            self.loss = event.get("loss")
            self.memory_gib = event.get("allocated_gib")
            self.times.append((float(event.get("elapsed") or 0.0), int(event.get("tokens") or 0)))
            del self.times[:-WINDOW]

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps, all ranks taken to do what rank 0 does."""
        if len(self.times) < 2:
            return None
        seconds = self.times[-1][0] - self.times[0][0]
        tokens = sum(count for _, count in self.times[1:]) * self.world
        return tokens / seconds if seconds > 0 and tokens else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the present pace."""
        if self.total is None or len(self.times) < 2:
            return None
        pace = (self.times[-1][0] - self.times[0][0]) / (len(self.times) - 1)
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


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class View:
    """Shows progress while something else waits: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, title: str, console: Path, probe: Path, total: int | None, terminal: bool):
        self.title = title
        self.log = Tail(console)
        record = probe / "rank-0.jsonl"
        # a further attempt appends to the same record: begin where it begins
        self.events = Tail(record, offset=record.stat().st_size if record.exists() else 0)
        self.progress = Progress(total=total)
        self.terminal = terminal
        self.live: Live | None = None
        self.printed = (0.0, -1)

    def showing(self) -> AbstractContextManager[Any]:
        """The context in which `tick` may draw."""
        if not self.terminal:
            return nullcontext()
        from rich.console import Console
        from rich.live import Live

        self.live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
        return self.live

    def tick(self) -> None:
        """Take in what is new and show it."""
        for raw in self.events.read():
            try:
                self.progress.event(json.loads(raw))
            except (ValueError, KeyError, TypeError):
                continue
        for raw in self.log.read():
            found = _TOTAL.search(raw) if self.progress.total is None else None
            # a progress bar of the tokeniser counts rows, not steps
            if found and (found[1] or (self.progress.step and b"examples" not in raw)):
                self.progress.total = int(found[1] or found[2])
        if self.live is not None:
            from rich.text import Text

            self.live.update(Text(f"{self.title}   {self.progress.line()}", no_wrap=True))
            return
        since, step = self.printed
        if self.progress.step != step and time.monotonic() - since >= PLAIN_EVERY_S:
            self.printed = (time.monotonic(), self.progress.step)
            typer.echo(f"{self.title}   {self.progress.line()}", err=True)
