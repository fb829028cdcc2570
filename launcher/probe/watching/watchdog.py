"""A thread that notices that nothing moves any more."""

import collections
import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Callable

from .process import Process

LEASE = "LAUNCH_LEASE"  # the environment variable that names the lease of the output folder, for its heartbeat


class Watchdog(threading.Thread):
    """Notices that nothing moves any more: no forward pass and no step for far longer than a step.

    It watches from the end of the first step on, and is not `armed` while something is saved, evaluated or
    uploaded; the next training forward ends that. What hangs is told from every rank's own stacks.
    """

    def __init__(self, process: Process, leave: Callable[..., None]) -> None:
        super().__init__(name="launch-watchdog", daemon=True)
        self.process, self.settings, self.leave = process, process.settings, leave
        self.moved = time.monotonic()
        self.armed = self.reported = False
        self.seconds: collections.deque[float] = collections.deque(maxlen=101)

    def beat(self) -> None:
        self.moved = time.monotonic()

    def step(self, seconds: float, first: bool) -> None:
        """A step is over; the first one compiles, and says nothing of the others."""
        if not first:
            self.seconds.append(seconds)
        self.beat()
        self.armed = True

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
        waited, median = time.monotonic() - self.moved, statistics.median(self.seconds) if self.seconds else None
        limit = max(self.settings.hang_seconds, self.settings.hang_factor * (median or 0.0))
        before, self.reported = self.reported, self.armed and waited >= limit
        if self.reported and not before:
            self.report(waited, limit, median)
        elif before and not self.reported:
            self.process.record.write("hang_over", step=self.process.at)

    def report(self, waited: float, limit: float, median: float | None) -> None:
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
            median=None if median is None else round(median, 4),
            message=message,
            stopped=stops,
        )
        self.leave(message, stops=stops, settle=False)
