"""What chance alone makes of runs that are the same."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.workflows.bench.comparison import SPEED, Sample, compare_speed
from launcher.workflows.bench.significance import ERROR, compute_chance

STEPS = 16
seconds_of_runs = st.lists(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=6, max_size=6
)


@settings(max_examples=10)
@given(seconds_of_runs)
def test_at_most_one_deal_of_the_same_runs_in_twenty_is_called_faster(
    runs: list[list[float]],
) -> None:
    """Exact, whatever the runs are: this is what the error rate means."""
    deals = list(itertools.combinations(range(6), 3))
    faster = 0
    for deal in deals:
        dealt = [runs[number] for number in deal]
        others = [runs[number] for number in range(6) if number not in deal]
        faster += compute_chance(dealt, others) <= ERROR
    assert faster <= ERROR * len(deals)


@pytest.mark.parametrize(
    ("runs", "base", "expected"),
    [
        ([1.0, 1.1], [2.0, 2.1], 1 / 6),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], 1 / 20),
        # they overlap
        ([1.0, 1.1, 2.05], [2.0, 2.1, 2.2], 2 / 20),
        # a run that was held up as a whole needs five of each
        ([1.0, 1.01, 1.02, 1.03, 3.0], [1.1, 1.11, 1.12, 1.13, 1.14], 6 / 252),
    ],
)
def test_the_chance_of_single_figures(
    runs: Sequence[float], base: Sequence[float], expected: float
) -> None:
    probability = compute_chance([[value] for value in runs], [[value] for value in base])
    assert probability == pytest.approx(expected)


def as_sample(pace: Sequence[float]) -> Sample:
    return Sample(variant="", metrics={SPEED: len(pace) / sum(pace)}, pace=tuple(pace))


@pytest.mark.parametrize(
    ("pace", "standing"),
    [
        ([0.95] * 16, "faster"),
        ([1.05] * 16, "slower"),
        # a few steps make the mean another
        ([1.0] * 10 + [1.5] * 6, "no difference"),
        ([1.01] * 8 + [0.8] * 8, "no difference"),
    ],
)
def test_one_run_of_each_has_to_be_ahead_at_nearly_all_steps(
    pace: list[float], standing: str
) -> None:
    test = compare_speed([as_sample(pace)], [as_sample([1.0] * STEPS)])
    assert test is not None
    assert test.standing == standing


def test_a_burst_in_one_run_hides_nothing_and_a_stall_in_all_counts() -> None:
    base = [[1.0 + 0.001 * run] * STEPS for run in range(3)]
    fast = [[0.9 + 0.001 * run] * STEPS for run in range(3)]
    fast[1][3:9] = [2.5] * 6
    assert compute_chance(fast, base) == pytest.approx(1 / 20)
    for run in fast:
        run[5] = 4.0
    assert compute_chance(fast, base) > 0.5
