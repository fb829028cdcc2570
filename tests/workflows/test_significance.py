"""What chance alone makes of runs that are the same."""

import itertools
from collections.abc import Sequence
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.workflows.bench.comparison import SPEED, Sample, speed_test
from launcher.workflows.bench.significance import ERROR, chance

STEPS = 16


def word(runs: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> str:
    """What is said of runs by the seconds a token of each step."""
    samples = [
        [Sample(variant="", metrics={SPEED: len(p) / sum(p)}, pace=tuple(p)) for p in some]
        for some in (runs, base)
    ]
    found = speed_test(*samples)
    assert found is not None
    return found.standing


@settings(max_examples=10)
@given(st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=6, max_size=6))
def test_of_all_ways_to_deal_the_same_runs_out_at_most_one_in_twenty_is_called_faster(
    every: list[list[float]],
) -> None:
    """Exact, whatever the runs are: this is what the error rate is."""
    called = 0
    for chosen in itertools.combinations(range(6), 3):
        ours = [every[nth] for nth in chosen]
        others = [every[nth] for nth in range(6) if nth not in chosen]
        called += chance(ours, others) <= ERROR
    assert called <= ERROR * comb(6, 3)


def test_two_of_each_tell_nothing_and_three_only_if_nothing_overlaps() -> None:
    assert chance([[1.0], [1.1]], [[2.0], [2.1]]) == pytest.approx(1 / 6)
    assert chance([[1.0], [1.1], [1.2]], [[2.0], [2.1], [2.2]]) == pytest.approx(1 / 20)
    assert chance([[1.0], [1.1], [2.05]], [[2.0], [2.1], [2.2]]) > ERROR
    # a run that was held up as a whole needs five of each
    ours = [[1.0], [1.01], [1.02], [1.03], [3.0]]
    assert chance(ours, [[1.1], [1.11], [1.12], [1.13], [1.14]]) <= ERROR
    # one run of each has to be ahead at nearly all steps
    base = [[1.0] * STEPS]
    assert word([[0.95] * STEPS], base) == "faster" and word([[1.05] * STEPS], base) == "slower"
    # the mean of all steps is another because of a few
    assert word([[1.0] * 10 + [1.5] * 6], base) == "no difference"
    assert word([[1.01] * 8 + [0.8] * 8], base) == "no difference"


def test_a_burst_within_a_run_hides_nothing_and_what_a_setting_costs_is_its_own() -> None:
    base = [[1.0 + 0.001 * run] * STEPS for run in range(3)]
    fast = [[0.9 + 0.001 * run] * STEPS for run in range(3)]
    fast[1][3:9] = [2.5] * 6
    assert chance(fast, base) == pytest.approx(1 / 20)
    # a stall that comes at the same step in every run
    for run in fast:
        run[5] = 4.0
    assert chance(fast, base) > 0.5
