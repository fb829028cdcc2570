"""The record of one rank: events as JSON lines, and what fails inside the probe as notes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

NOTES = 20  # of trouble: what fails in every step fails in the same way
ROOM = 2**20  # bytes of events that are kept while the disk is full


class Console(io.FileIO):
    """A console log that loses what a full disk does not take, and does not end the training."""

    lost = 0

    def write(self, block: Any, /) -> int:
        """All of it counts as written where there is no room."""
        left = memoryview(block)
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            Console.lost += len(left)
        return len(block)


def spare_streams() -> None:
    """Have stdout and stderr go on when the disk that they are written to is full."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):
            before = getattr(sys, name)
            if not stat.S_ISREG(os.fstat(before.fileno()).st_mode):
                continue
            before.flush()
            raw: Any = Console(before.fileno(), "w", closefd=False)
            plain = isinstance(before.buffer, io.FileIO)
            stream = io.TextIOWrapper(
                raw if plain else io.BufferedWriter(raw), encoding=before.encoding,
                errors=before.errors, line_buffering=before.line_buffering,
                write_through=before.write_through,
            )  # fmt: skip
            setattr(sys, name, stream)


class Record:
    """Appends events to this rank's file; flushes each; only in the process that opened it."""

    def __init__(self, folder: str, rank: int) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.stream: Any = None
        self.stacks = os.path.join(folder, f"rank-{rank}.stacks.txt")
        self.troubles = 0
        self.supplied: set[str] = set()
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{rank}.jsonl")
            # what a full disk does not take is kept, and written once there is room again
            self.stream = open(path, "a", ROOM, encoding="utf-8")  # noqa: SIM115 - open until the end

    def ours(self) -> bool:
        """False in forked data workers, which inherit the stream: their events would tear lines."""
        return os.getpid() == self.pid

    def write(self, event: str, **fields: Any) -> None:
        if self.stream is None or not self.ours():
            return
        # whatever is wrong, with the disk or with a value, is no reason to stop training
        with contextlib.suppress(Exception):
            line = json.dumps({"t": round(time.time(), 3), "event": event, **fields}, default=str)
            with self.lock:
                self.stream.write(line + "\n")
                self.stream.flush()

    def trouble(self, where: str, error: BaseException) -> None:
        self.troubles += 1
        if self.troubles <= NOTES:
            self.write("note", text=f"probe: {where}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def quietly(self, where: str) -> Iterator[None]:
        """What fails in here is noted, and not raised into training."""
        try:
            yield
        except Exception as error:
            self.trouble(where, error)

    def supply(self, what: str, why: str) -> None:
        """Note once that something was supplied that this machine lacks."""
        if what not in self.supplied:
            self.supplied.add(what)
            self.write("supplied", what=what, why=why)


def say(message: str) -> None:
    """One line on stderr, which goes into the run's console log; a bar may stand on the line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nlaunch: {message}\n".encode(errors="replace"))


def finite(value: float | None) -> float | None:
    """As JSON can hold it."""
    return None if value is None or not math.isfinite(value) else value
