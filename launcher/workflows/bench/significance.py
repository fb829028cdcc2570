"""Whether one group of runs is faster than another, or only lay so: an exact permutation test.

Were both groups the same, any of the runs could have been in either. So the runs are dealt out to two groups
in every way, and each way is measured as the one that happened: the share of ways that look at least as fast
is the chance of saying "faster" of what is not (Pitman 1937; Lehmann and Romano, "Testing Statistical
Hypotheses", chapter 15). Nothing is assumed of how speeds scatter but that runs took turns.

A machine that does other things too slows steps down and never speeds them up. So at each step a group is
measured by the faster two thirds of its runs: a burst that hits one run at some steps does not count there,
and what a setting itself costs at a step, in every run, does.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Sequence

ERROR = 0.05
"""How often what is not faster may be called so."""
LEAST_RUNS = 3
"""Runs of each group from which on anything can be told: of 3 and 3 there are 20 ways to be dealt out."""

STEADY = 0.8
"""The share of steps at which fewer runs than that have to be ahead."""

_KEPT = 2 / 3
_BLOCKS = 16

Pace = Sequence[float]
"""One run: seconds a token of each of its steps, above 0, in the order of training; or only their mean.

At least one. Where of any run only the mean is known, all are taken by their means.
"""


def chance(runs: Sequence[Pace], base: Sequence[Pace]) -> float:
    """The share of ways to deal the runs out that look at least as fast as this one; 1 without any run."""
    if not runs or not base:
        return 1.0
    blocks = _blocks([*runs, *base])
    observed = _ahead(blocks, range(len(runs)))
    ways = itertools.combinations(range(len(blocks)), len(runs))
    # what summing in another order loses makes no way another one
    alike = [_ahead(blocks, way) >= observed - 1e-12 for way in ways]
    return sum(alike) / len(alike)


def steadily(runs: Sequence[Pace], base: Sequence[Pace]) -> bool:
    """Whether these runs are ahead at nearly all steps: what the fewest runs can show beside their means."""
    blocks = _blocks([*runs, *base])
    ours, others = blocks[: len(runs)], blocks[len(runs) :]
    # the two groups at each step
    pairs = list(zip(zip(*ours, strict=True), zip(*others, strict=True), strict=True))
    ahead = sum(_least(mine) < _least(theirs) for mine, theirs in pairs)
    return ahead >= STEADY * len(pairs)


def _ahead(blocks: Sequence[Sequence[float]], chosen: Collection[int]) -> float:
    """How far the chosen runs are ahead of the others, as a share of their time a token."""
    ours = [block for nth, block in enumerate(blocks) if nth in chosen]
    others = [block for nth, block in enumerate(blocks) if nth not in chosen]
    return _level(others) / _level(ours) - 1


def _level(blocks: Sequence[Sequence[float]]) -> float:
    """Seconds a token of a group, over all steps."""
    return statistics.fmean(map(_least, zip(*blocks, strict=True)))


def _least(at: Sequence[float]) -> float:
    """Seconds a token of a group at one step."""
    kept = math.ceil(_KEPT * len(at))
    return math.fsum(sorted(at)[:kept]) / kept


def _blocks(runs: Sequence[Pace]) -> list[list[float]]:
    """Each run's pace in as many stretches as the one with the fewest steps allows."""
    count = min(_BLOCKS, *map(len, runs))
    blocks = []
    for run in runs:
        edges = [round(nth * len(run) / count) for nth in range(count + 1)]
        blocks.append([statistics.fmean(run[begin:end]) for begin, end in itertools.pairwise(edges)])
    return blocks
