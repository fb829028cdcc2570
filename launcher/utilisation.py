"""How busy the GPUs are while something goes on: the driver is asked now and then, by a thread.

What the driver tells is the share of its last sampling period (up to a second) in which at least one
kernel ran: 100 % does not say that a GPU does all that it could.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from launcher import machine

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment: seconds since the epoch, its id, its use in percent."""

    at: float
    gpu: str
    percent: float


@contextlib.contextmanager
def sampled(every_s: float = EVERY_S) -> Iterator[list[Reading]]:
    """Readings of the time that the `with` block lasts; none where there is no driver."""
    readings: list[Reading] = []
    over = threading.Event()

    def ask() -> None:
        # a driver that did not answer once may do so the next time
        while not over.is_set() and shutil.which("nvidia-smi") is not None:
            readings.extend(read())
            over.wait(every_s)

    thread = threading.Thread(target=ask, name="gpu-utilisation", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        over.set()
        # a question that is under way ends by itself; nobody waits for it
        thread.join(timeout=every_s)


def read() -> list[Reading]:
    """All GPUs now; empty without a driver, or where it does not tell (an instance of a divided one)."""
    answer = machine.run(
        ["nvidia-smi", "--query-gpu=uuid,utilization.gpu", "--format=csv,noheader,nounits"], 20
    )
    now = time.time()
    words = [line.rpartition(", ") for line in (answer or "").splitlines()]
    return [Reading(now, gpu.strip(), float(use)) for gpu, _, use in words if use.isdecimal()]


def within(
    readings: Sequence[Reading], gpus: Collection[str], begin: float, end: float
) -> list[float]:
    """What was read of these GPUs between two moments, as shares of 1, least first."""
    return sorted(
        one.percent / 100 for one in readings if one.gpu in gpus and begin <= one.at <= end
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value that this share of them does not exceed (nearest rank); None where there is none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
