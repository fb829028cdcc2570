"""A thread that notices that nothing moves any more."""

import collections
import contextlib
import faulthandler
import json
import os
import statistics
import threading
import time
from collections.abc import Callable

from .process import LEASE, Process, attempt_number

FIRST_STEP, TRAINING, SAVING, EVALUATION = "the first step", "training", "a save", "an evaluation"
"""The phases that are watched; a forward pass of any kind is progress in each."""
PATIENCE = {FIRST_STEP: 12, TRAINING: 1, SAVING: 6, EVALUATION: 6}
"""`hang_seconds` at least that each phase may stand still: what compiles, gathers or writes tells nothing."""
LONGEST_FACTOR = 5
"""Times the longest save, or evaluation, so far, at least."""
WORD = "hang.json"  # in the folder of the records, by the rank that noticed first: {"attempt": N}


class Watchdog(threading.Thread):
    """Notices that nothing moves any more: no forward pass and no step for far longer than a step.

    Each phase has a limit of its own: training by its steps, a save and an evaluation by those before, the first step
    and what comes before any by `hang_seconds` alone. Nothing is watched while the model is loaded or uploaded. What
    hangs is told from every rank's own stacks: the rank that notices leaves word, and all write theirs.
    """

    def __init__(self, process: Process, leave: Callable[..., None]) -> None:
        super().__init__(name="launch-watchdog", daemon=True)
        self.process, self.settings, self.leave = process, process.settings, leave
        self.interval = min(5.0, self.settings.hang_seconds / 4)
        self.attempt = attempt_number()
        self.moved = self.entered = time.monotonic()
        self.phase: str | None = None
        self.reported = self.shown = False
        self.seconds: collections.deque[float] = collections.deque(maxlen=101)
        self.longest: dict[str, float] = {}

    def beat(self) -> None:
        self.moved = time.monotonic()

    def enter(self, phase: str | None) -> None:
        """Another phase begins; None for one that is not watched."""
        self.beat()
        if phase == self.phase:
            return
        if self.phase is not None:
            lasted = self.moved - self.entered
            self.longest[self.phase] = max(lasted, self.longest.get(self.phase, 0.0))
        self.phase = phase
        self.entered = self.moved

    def step(self, seconds: float, first: bool) -> None:
        """A step is over; the first one compiles, and says nothing of the others."""
        if not first:
            self.seconds.append(seconds)
        self.enter(TRAINING)

    def run(self) -> None:
        while True:
            time.sleep(self.interval)
            with self.process.record.quietly("watchdog"):
                self.look()
            with contextlib.suppress(OSError):
                # that this process runs at all: whoever supervises it looks at the time of the file
                os.utime(self.process.record.stacks.replace(".stacks.txt", ".jsonl"))
            if self.process.rank == 0 and LEASE in os.environ:
                # a supervisor that was killed must not seem to have left the output folder
                with contextlib.suppress(OSError):
                    os.utime(os.environ[LEASE])

    def limit(self, phase: str) -> float:
        """Seconds that a phase may stand still."""
        least = PATIENCE[phase] * self.settings.hang_seconds
        if phase == TRAINING:
            median = statistics.median(self.seconds) if self.seconds else 0.0
            return max(least, self.settings.hang_factor * median)
        if phase == FIRST_STEP:
            return least
        return max(least, LONGEST_FACTOR * self.longest.get(phase, 0.0))

    def look(self) -> None:
        phase = self.phase
        waited = time.monotonic() - self.moved
        before = self.reported
        self.reported = phase is not None and waited >= self.limit(phase)
        if self.reported and not before and phase is not None:
            self.report(phase, waited)
        elif before and not self.reported:
            self.shown = False
            self.process.record.write("hang_over", step=self.process.at)
        elif phase is not None and not self.shown and self.is_announced():
            # another rank has noticed
            self.show_stacks(phase, waited)

    def is_announced(self) -> bool:
        """Whether a rank of this attempt hangs at the step where this one is, or one beside it."""
        try:
            with open(os.path.join(self.settings.out, WORD), encoding="utf-8") as stream:
                word = json.load(stream)
        except (OSError, ValueError):
            return False
        if not isinstance(word, dict) or word.get("attempt") != self.attempt:
            return False
        step = word.get("step")
        return isinstance(step, int) and abs(step - self.process.at) <= 1

    def announce(self) -> None:
        part = os.path.join(self.settings.out, f"{WORD}.{self.process.rank}")
        with self.process.record.quietly("word of a hang"):
            with open(part, "w", encoding="utf-8") as stream:
                json.dump({"attempt": self.attempt, "step": self.process.at}, stream)
            os.replace(part, os.path.join(self.settings.out, WORD))

    def show_stacks(self, phase: str, waited: float) -> None:
        """Append the stacks of all threads of this rank to its file."""
        process, record = self.process, self.process.record
        self.shown = True
        with record.quietly("stacks"), open(record.stacks, "a", encoding="utf-8") as stream:
            stream.write(f"# step {process.at}, {phase}: nothing moved for {waited:.0f} s\n")
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)

    def report(self, phase: str, waited: float) -> None:
        process, record = self.process, self.process.record
        path, stops, limit = record.stacks, self.settings.stops_hang, self.limit(phase)
        self.announce()
        self.show_stacks(phase, waited)
        during = "" if phase == TRAINING else f" in {phase}"
        message = (
            f"nothing moved for {waited:.0f} s after step {process.at}{during} (limit {limit:.0f} s), "
            f"rank {process.rank}; stacks in {path}"
        )
        median = statistics.median(self.seconds) if self.seconds else None
        record.write(
            "hang",
            step=process.at,
            during=phase,
            waited=round(waited, 1),
            limit=round(limit, 1),
            stacks=path,
            median=None if median is None else round(median, 4),
            message=message,
            stopped=stops,
        )
        if stops and process.world > 1:
            # once this rank has gone the others are ended: they write their stacks first
            time.sleep(2 * self.interval)
        self.leave(message, stops=stops, settle=False)
