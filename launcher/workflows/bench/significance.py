"""Whether one group of runs is faster than another, or only by chance: an exact permutation test.

If both groups were the same, any of the runs could have been in either. So the runs are dealt out
to two groups in every way, and each way is measured as the observed one: the share of ways that
look at least as fast is the chance of calling faster what is not (Pitman 1937; Lehmann and Romano,
"Testing Statistical Hypotheses", chapter 15). Nothing is assumed of how speeds scatter, only that
runs took turns.

Other work on a machine slows steps down and never speeds them up. So at each step a group is
measured by the faster two thirds of its runs: a burst that hits one run at some steps does not
count, but what a setting itself costs at a step, in every run, does.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Sequence

ERROR = 0.05
"""How often a variant that is not faster may be called so."""
LEAST_RUNS = 3
"""With fewer runs of each group nothing can be told: 3 and 3 can be dealt out in 20 ways."""

STEADY = 0.8
"""With fewer runs than `LEAST_RUNS`, the share of steps at which they must be ahead."""

_KEPT = 2 / 3
_BLOCKS = 16

Pace = Sequence[float]
"""One run: seconds per token of each of its steps, above 0; or only their mean."""


def compute_chance(runs: Sequence[Pace], base: Sequence[Pace]) -> float:
    """The share of ways to deal the runs out that look at least as fast as this one."""
    blocks = _split_into_blocks([*runs, *base])
    observed = _measure_lead(blocks, range(len(runs)))
    ways = itertools.combinations(range(len(blocks)), len(runs))
    # sums in another order differ by rounding
    alike = [_measure_lead(blocks, way) >= observed - 1e-12 for way in ways]
    return statistics.fmean(alike)


def is_steadily_ahead(runs: Sequence[Pace], base: Sequence[Pace]) -> bool:
    """Whether these runs are ahead at nearly all steps."""
    blocks = _split_into_blocks([*runs, *base])
    count = len(runs)
    ahead = 0
    for step in zip(*blocks, strict=True):
        if _average_fastest(step[:count]) < _average_fastest(step[count:]):
            ahead += 1
    return ahead >= STEADY * len(blocks[0])


def _measure_lead(blocks: Sequence[Pace], chosen: Collection[int]) -> float:
    """How far the chosen runs are ahead of the others, as a share of their time per token."""
    times: list[float] = []
    other_times: list[float] = []
    for step in zip(*blocks, strict=True):
        group = []
        others = []
        for run, seconds in enumerate(step):
            if run in chosen:
                group.append(seconds)
            else:
                others.append(seconds)
        times.append(_average_fastest(group))
        other_times.append(_average_fastest(others))
    return statistics.fmean(other_times) / statistics.fmean(times) - 1


def _average_fastest(times: Pace) -> float:
    """The mean seconds per token of a group's faster part, at one step."""
    kept = math.ceil(_KEPT * len(times))
    return math.fsum(sorted(times)[:kept]) / kept


def _split_into_blocks(runs: Sequence[Pace]) -> list[list[float]]:
    """Cut each run's pace into equally many stretches, and average each."""
    count = min(_BLOCKS, *map(len, runs))
    blocks = []
    for run in runs:
        averages = []
        begin = 0
        for number in range(1, count + 1):
            end = round(number * len(run) / count)
            averages.append(statistics.fmean(run[begin:end]))
            begin = end
        blocks.append(averages)
    return blocks
