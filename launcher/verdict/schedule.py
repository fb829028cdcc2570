"""What is odd about the learning rates of a run: mostly 0, rising again, an endless warm-up."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEAST = 6
"""Learning rates that show a course."""
MOSTLY = 0.5
"""Of the steps with a learning rate of 0."""
DECAYED = 0.7
"""Of the highest rate: below it a rate has decayed."""
RISEN = 0.2
"""Of the highest rate: by so much a rate has risen again."""
AT_ONCE = 0.5
"""Of the highest rate, in one step: a restart."""
REACHED = 0.9
"""Of the rate that was requested."""

_RESTARTS = ("restart", "cycl")
"""Parts of the names of schedules that are to rise again."""


class Oddity(NamedTuple):
    reason: str
    help: str


def find_rises(rates: Sequence[float], *, restarts: bool = True) -> list[int]:
    """Where the rate rose again after a decay; without `restarts` only if it rose step by step."""
    places: list[int] = []
    highest = 0.0
    lowest = 0.0
    steepest = 0.0
    before = 0.0
    for place, rate in enumerate(rates):
        steepest = max(steepest, rate - before)
        before = rate
        has_decayed = lowest < DECAYED * highest
        has_risen = has_decayed and rate > lowest + RISEN * highest
        if has_risen and (restarts or steepest < AT_ONCE * highest):
            places.append(place)
        if has_risen or rate >= highest:
            highest = rate
            lowest = rate
            steepest = 0.0
        elif rate < lowest:
            lowest = rate
            steepest = 0.0
    return places


def find_oddities(
    rates: Sequence[float], *, schedule: str | None, requested: float | None, is_complete: bool
) -> Iterator[Oddity]:
    """What is odd; `is_complete`: the run came to its end.

    A rate of 0 in every step is the `trend` point's.
    """
    if len(rates) < LEAST or not any(rates):
        return
    zeros = sum(rate == 0 for rate in rates)
    if zeros > MOSTLY * len(rates):
        yield Oddity(
            f"the learning rate was 0 in {zeros} of {len(rates)} logged steps: those trained "
            "nothing",
            "the schedule ended too early: check `max_steps`, the epochs, and whether every "
            "process steps it",
        )
    rises = find_rises(rates, restarts=schedule is not None)
    if rises and not _may_rise(schedule):
        times = "1 time" if len(rises) == 1 else f"{len(rises)} times"
        never = ""
        if schedule is not None:
            never = f", which `{schedule}` never does"
        yield Oddity(
            f"the learning rate rises again after it has decayed, {times}{never}",
            "the scheduler is stepped more often than it was planned for, such as once a process "
            "or once a micro-batch: check the total steps that it was given",
        )
    highest = max(rates)
    still_rises = rates[-1] == highest > rates[0]
    if is_complete and still_rises and requested and highest < REACHED * requested:
        yield Oddity(
            f"the learning rate never reached {requested:g}: it was still rising at the end, "
            f"at {highest:g}",
            "the warm-up is longer than the run: lower `warmup_steps` or `warmup_ratio`",
        )


def _may_rise(schedule: str | None) -> bool:
    name = (schedule or "").lower()
    return any(part in name for part in _RESTARTS)
