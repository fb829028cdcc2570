"""A thread that notices that nothing moves any more."""

import collections
import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Callable

from .process import LEASE, Process, read_attempt_number, read_json, write_json

FIRST_STEP = "the first step"
TRAINING = "training"
SAVING = "a save"
EVALUATION = "an evaluation"
PATIENCE = {FIRST_STEP: 12, TRAINING: 1, SAVING: 6, EVALUATION: 6}
"""Times `hang_seconds` that each phase may stand still: nothing is seen of compiling or writing."""

LONGEST_FACTOR = 5
"""Times the longest save, or evaluation, so far."""

HANG = "hang.json"  # in the folder of the records: {"attempt": N, "step": N}


class Watchdog(threading.Thread):
    """Notices that there was no forward pass and no step for far longer than a step takes.

    Each phase has a limit: training by its steps, a save and an evaluation by those before, the
    first step by `hang_seconds` alone. Nothing is watched while the model is loaded or uploaded.
    The rank that notices a hang announces it, and all ranks write their stacks.
    """

    def __init__(self, process: Process, leave: Callable[..., None]) -> None:
        super().__init__(name="launch-watchdog", daemon=True)
        self.process = process
        self.settings = process.settings
        self.record = process.record
        self.leave = leave
        self.interval = min(5.0, self.settings.hang_seconds / 4)
        self.attempt = read_attempt_number()
        self.moved = time.monotonic()
        self.entered = self.moved
        self.phase: str | None = None
        self.reported = False
        self.shown = False
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

    def end_step(self, seconds: float, first: bool) -> None:
        # the first one compiles
        if not first:
            self.seconds.append(seconds)
        self.enter(TRAINING)

    def run(self) -> None:
        lease = os.environ.get(LEASE)
        # the supervisor reads a sign of life from the time of the record
        signs = [self.record.stacks.replace(".stacks.txt", ".jsonl")]
        if lease is not None and self.process.rank == 0:
            # and another launch that the output folder is in use, even if the supervisor was killed
            signs.append(lease)
        while True:
            time.sleep(self.interval)
            with self.record.quietly("watchdog"):
                self.look()
            for path in signs:
                with contextlib.suppress(OSError):
                    os.utime(path)

    def limit(self, phase: str) -> float:
        """Seconds that a phase may stand still."""
        least = float(PATIENCE[phase] * self.settings.hang_seconds)
        if phase == TRAINING:
            return max(least, self.settings.hang_factor * (self._compute_median() or 0.0))
        if phase == FIRST_STEP:
            return least
        return max(least, LONGEST_FACTOR * self.longest.get(phase, 0.0))

    def _compute_median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else None

    def look(self) -> None:
        phase = self.phase
        waited = time.monotonic() - self.moved
        if phase is not None and waited >= self.limit(phase):
            if not self.reported:
                self.reported = True
                self.report(phase, waited)
        elif self.reported:
            self.reported = False
            self.shown = False
            self.record.write("hang_over", step=self.process.at)
        elif phase is not None and not self.shown and self.is_announced():
            self.show_stacks(phase, waited)

    def is_announced(self) -> bool:
        """Whether a rank of this attempt hangs at the step of this one, or at one beside it."""
        announcement = read_json(os.path.join(self.settings.out, HANG))
        step = announcement.get("step")
        if announcement.get("attempt") != self.attempt or not isinstance(step, int):
            return False
        return abs(step - self.process.at) <= 1

    def announce(self) -> None:
        with self.record.quietly("announcing a hang"):
            path = os.path.join(self.settings.out, HANG)
            write_json(path, {"attempt": self.attempt, "step": self.process.at})

    def show_stacks(self, phase: str, waited: float) -> None:
        """Append the stacks of all threads of this rank to its file."""
        self.shown = True
        path = self.record.stacks
        with self.record.quietly("stacks"), open(path, "a", encoding="utf-8") as stream:
            step = self.process.at
            stream.write(f"# step {step}, {phase}: nothing moved for {waited:.0f} s\n")
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)

    def report(self, phase: str, waited: float) -> None:
        self.announce()
        self.show_stacks(phase, waited)
        step = self.process.at
        path = self.record.stacks
        limit = self.limit(phase)
        during = "" if phase == TRAINING else f" in {phase}"
        message = (
            f"nothing moved for {waited:.0f} s after step {step}{during} (limit {limit:.0f} s), "
            f"rank {self.process.rank}; stacks in {path}"
        )
        median = self._compute_median()
        stops = self.settings.on_hang == "stop"
        self.record.write(
            "hang",
            step=step,
            during=phase,
            waited=round(waited, 1),
            limit=round(limit, 1),
            stacks=path,
            median=None if median is None else round(median, 4),
            message=message,
            stopped=stops,
        )
        if stops and self.process.world > 1:
            # the other ranks end with this one: they write their stacks first
            time.sleep(2 * self.interval)
        self.leave(message, stops=stops, settle=False)
