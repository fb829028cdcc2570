"""A thread that notices that nothing moves any more."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Callable

from .process import Process, say

LEASE = "LAUNCH_LEASE"
"""The environment variable that names the lease of the output folder, for its heartbeat."""


class Watchdog(threading.Thread):
    """Notices that nothing moves any more: no forward pass and no step for far longer than a step.

    It watches from the end of the first step on, and not while something is saved, evaluated or
    uploaded. What hangs is told from every rank's own stacks.
    """

    def __init__(self, process: Process, leave: Callable[..., None]) -> None:
        super().__init__(name="launch-watchdog", daemon=True)
        self.process = process
        self.settings = process.settings
        self.leave = leave
        self.moved = time.monotonic()
        self.armed = False
        self.seconds: collections.deque[float] = collections.deque(maxlen=101)
        self.reported = False

    def beat(self) -> None:
        self.moved = time.monotonic()

    def step(self, seconds: float, first: bool) -> None:
        """A step is over; the first one compiles, and says nothing of the others."""
        if not first:
            self.seconds.append(seconds)
        self.beat()
        self.armed = True

    def rest(self) -> None:
        """Something began that is no step and may take long; the next training forward ends it."""
        self.armed = False

    def limit(self) -> float:
        median = statistics.median(self.seconds) if self.seconds else 0.0
        return max(self.settings.hang_seconds, self.settings.hang_factor * median)

    def run(self) -> None:
        while True:
            time.sleep(min(5.0, self.settings.hang_seconds / 4))
            with self.process.record.quietly("watchdog"):
                self.look()
            if self.process.rank == 0 and LEASE in os.environ:
                # a keeper that was killed must not seem to have left the output folder
                with contextlib.suppress(OSError):
                    os.utime(os.environ[LEASE])

    def look(self) -> None:
        waited, limit = time.monotonic() - self.moved, self.limit()
        if not self.armed or waited < limit:
            if self.reported:
                self.reported = False
                self.process.record.write("hang_over", step=self.process.at)
            return
        if not self.reported:
            self.reported = True
            self.report(waited, limit)

    def report(self, waited: float, limit: float) -> None:
        process, record = self.process, self.process.record
        path, stops = record.stacks, self.settings.stops_hang
        with record.quietly("stacks"), open(path, "a", encoding="utf-8") as stream:
            stream.write(f"# step {process.at}, nothing moved for {waited:.0f} s\n")
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        message = (
            f"nothing moved for {waited:.0f} s after step {process.at} (limit {limit:.0f} s), "
            f"rank {process.rank}; stacks in {path}"
        )
        record.write(
            "hang",
            step=process.at,
            waited=round(waited, 1),
            limit=round(limit, 1),
            stacks=path,
            median=round(statistics.median(self.seconds), 4) if self.seconds else None,
            message=message,
            stopped=stops,
        )
        if stops:
            self.leave(f"stopped: {message}", settle=False)
        else:
            say(f"warning: {message}")
