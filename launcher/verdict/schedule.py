"""The learning rates of a run -> what is odd about them: 0 in most steps, rising again, a warm-up that never ends."""

from collections.abc import Iterator, Sequence

LEAST = 6  # learning rates that show a course
MOSTLY = 0.5  # of the steps with a learning rate of 0
DECAYED = 0.7  # of the highest: below it a rate has decayed
RISEN = 0.2  # of the highest: by so much a rate has risen again
AT_ONCE = 0.5  # of the highest, in one step: a restart
REACHED = 0.9  # of the rate that was requested

_RESTARTS = ("restart", "cycl")  # in the name of a schedule that is to rise again


def rises(rates: Sequence[float], *, restarts: bool = True) -> list[int]:
    """Where the rate has risen again after it had decayed; without `restarts` only where it climbed step by step."""
    places: list[int] = []
    highest = 0.0
    lowest = 0.0
    steepest = 0.0
    before = 0.0
    for place, rate in enumerate(rates):
        steepest = max(steepest, rate - before)
        before = rate
        if lowest < DECAYED * highest and rate > lowest + RISEN * highest:
            if restarts or steepest < AT_ONCE * highest:
                places.append(place)
            highest = rate
            lowest = rate
            steepest = 0.0
        elif rate >= highest:
            highest = rate
            lowest = rate
            steepest = 0.0
        elif rate < lowest:
            lowest = rate
            steepest = 0.0
    return places


def oddities(
    rates: Sequence[float], *, schedule: str | None, requested: float | None, whole: bool
) -> Iterator[tuple[str, str]]:
    """Each as a reason and what to do; `whole` is whether the run came to its end. A rate of 0 in every step is the
    `trend` point's."""
    if len(rates) < LEAST or not any(rates):
        return
    zeros = sum(rate == 0 for rate in rates)
    if zeros > MOSTLY * len(rates):
        yield (
            f"the learning rate was 0 in {zeros} of {len(rates)} logged steps: those trained nothing",
            "the schedule ended too early: check `max_steps`, the epochs, and whether every process steps it",
        )
    named = schedule is not None
    may_rise = named and any(word in str(schedule).lower() for word in _RESTARTS)
    again = [] if may_rise else rises(rates, restarts=named)
    if again:
        times = f"{len(again)} time" + ("s" if len(again) > 1 else "")
        wanted = f", which `{schedule}` never does" if named else ""
        yield (
            f"the learning rate rises again after it has decayed, {times}{wanted}",
            "the scheduler is stepped more often than it was planned for, such as once a process or once a "
            "micro-batch: check the total steps that it was given",
        )
    top = max(rates)
    if whole and requested and top < REACHED * requested and rates[-1] == top > rates[0]:
        yield (
            f"the learning rate never reached {requested:g}: it was still rising at the end, at {top:g}",
            "the warm-up is longer than the run: lower `warmup_steps` or `warmup_ratio`",
        )
