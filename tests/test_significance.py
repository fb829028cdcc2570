"""What chance alone makes of runs that are the same, and what is told on a machine that is not quiet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from math import comb, exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.comparison import Timed, judged
from launcher.significance import ERROR, chance

STEPS = 16

paces = st.floats(0.1, 10)


@pytest.mark.parametrize("runs", [3, 4])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_of_all_ways_to_deal_the_same_runs_out_at_most_one_in_twenty_is_called_faster(
    runs: int, data: st.DataObject
) -> None:
    """Exact, whatever the runs are: this is what the error rate is."""
    one = st.lists(paces, min_size=3, max_size=3)
    every = data.draw(st.lists(one, min_size=2 * runs, max_size=2 * runs))
    called = 0
    for chosen in itertools.combinations(range(2 * runs), runs):
        ours = [every[nth] for nth in chosen]
        others = [every[nth] for nth in range(2 * runs) if nth not in chosen]
        called += chance(ours, others) <= ERROR
    assert called <= ERROR * comb(2 * runs, runs)


def test_two_of_each_tell_nothing_and_three_only_if_nothing_overlaps() -> None:
    assert chance([[1.0], [1.1]], [[2.0], [2.1]]) == pytest.approx(1 / 6)
    assert chance([[1.0], [1.1], [1.2]], [[2.0], [2.1], [2.2]]) == pytest.approx(1 / 20)
    assert chance([[1.0], [1.1], [2.05]], [[2.0], [2.1], [2.2]]) > ERROR
    assert chance([], [[1.0]]) == 1.0


def test_a_run_that_was_held_up_as_a_whole_needs_five_of_each() -> None:
    ours = [[1.0], [1.01], [1.02], [1.03], [3.0]]
    others = [[1.1], [1.11], [1.12], [1.13], [1.14]]
    assert chance(ours, others) <= ERROR
    assert chance(ours[-3:], others[:3]) > ERROR
    # as the other side's would
    assert chance(others, ours) > ERROR


def test_a_burst_within_a_run_hides_nothing_and_what_a_setting_costs_is_its_own() -> None:
    base = [[1.0 + 0.001 * run] * STEPS for run in range(3)]
    fast = [[0.9 + 0.001 * run] * STEPS for run in range(3)]
    fast[1][3:9] = [2.5] * 6
    assert chance(fast, base) == pytest.approx(1 / 20)
    # a stall that comes at the same step in every run
    for run in fast:
        run[5] = 4.0
    assert chance(fast, base) > 0.5


def test_one_run_of_each_has_to_be_ahead_at_nearly_all_steps() -> None:
    base = [1.0] * STEPS

    def word(run: list[float]) -> str:
        runs = [Timed(STEPS / sum(one), one) for one in (run, base)]
        return judged(runs[:1], runs[1:]).word

    assert word([0.95] * STEPS) == "faster" and word([1.05] * STEPS) == "slower"
    # the mean of all steps is another because of a few
    assert word([1.0] * 10 + [1.5] * 6) == "no difference"
    assert word([1.01] * 8 + [0.8] * 8) == "no difference"


def test_runs_of_which_only_the_speed_is_known_are_taken_by_it() -> None:
    steps = [[1.0, 3.0], [1.1, 3.1], [1.2, 3.2]]
    assert chance([[0.9], [0.8], [0.7]], steps) == pytest.approx(1 / 20)
    assert chance([[1.9], [1.8], [2.7]], steps) > ERROR


def test_very_many_ways_are_sampled_the_same_each_time() -> None:
    ours = [[1.0 + nth / 100] for nth in range(9)]
    others = [[1.05 + nth / 100] for nth in range(9)]
    found = chance(ours, others)
    assert 0 < found == chance(ours, others) < ERROR
    assert chance(others, ours) > 1 - ERROR


# --- a machine that does other things too ---------------------------------------------------------

Machine = Callable[[random.Random, int], list[list[float]]]
"""So many runs in turn: seconds of each step of each, as a setting of 1 s a step would take."""


def _quiet(dice: random.Random, runs: int) -> list[list[float]]:
    return [
        [exp(shift + dice.gauss(0, 0.02)) for _ in range(STEPS)]
        for shift in (dice.gauss(0, 0.01) for _ in range(runs))
    ]


def _bursts(dice: random.Random, runs: int) -> list[list[float]]:
    """One begins every 50 steps, lasts 6 on average, through the end of a run too, and slows by 1.2 to 3."""
    told, left, factor = [], 0, 1.0
    for run in _quiet(dice, runs):
        for nth in range(STEPS):
            if dice.random() < 0.02:
                left, factor = 1, dice.uniform(1.2, 3)
            run[nth] *= factor if left else 1.0
            left = int(bool(left) and dice.random() > 1 / 6)
        told.append(run)
    return told


def _held_up(dice: random.Random, runs: int) -> list[list[float]]:
    """Of eight runs one is slower by up to a half, from its first step to its last."""
    told = []
    for run in _quiet(dice, runs):
        factor = dice.uniform(1.1, 1.5) if dice.random() < 0.12 else 1.0
        told.append([factor * one for one in run])
    return told


def _drifting(dice: random.Random, runs: int) -> list[list[float]]:
    """It gets slower, or faster, by a tenth from the first run to the last."""
    slope = dice.choice([-1, 1]) * log(1.1) / runs
    return [[one * exp(slope * nth) for one in run] for nth, run in enumerate(_quiet(dice, runs))]


def _told(machine: Machine, runs: int, faster: float, trials: int) -> tuple[float, float]:
    """How often the second of two settings is called faster: by this test, and by ranges that are apart."""
    dice, found, ranges = random.Random(7), 0, 0
    for _ in range(trials):
        # A B, B A, A B, as bench has it
        order = [nth ^ (turn % 2) for turn in range(runs) for nth in (0, 1)]
        groups: list[list[Sequence[float]]] = [[], []]
        for which, run in zip(order, machine(dice, 2 * runs), strict=True):
            groups[which].append([one / (1 + faster * which) for one in run])
        base, ours = ([Timed(STEPS / sum(run), run) for run in group] for group in groups)
        found += judged(ours, base).word == "faster"
        ranges += min(one.speed for one in ours) > max(one.speed for one in base)
    return found / trials, ranges / trials


@pytest.mark.parametrize("machine", [_quiet, _bursts, _held_up, _drifting])
def test_what_is_no_faster_is_rarely_called_so_on_any_machine(machine: Machine) -> None:
    told, _ = _told(machine, 3, 0.0, 400)
    # 5 %, and what 400 throws of dice are off
    assert told <= ERROR + 0.02


@pytest.mark.parametrize(
    ("machine", "runs", "faster", "least", "before"),
    [(_quiet, 3, 0.05, 0.95, 1.0), (_bursts, 3, 0.15, 0.6, 0.6), (_bursts, 5, 0.15, 0.6, 0.35),
     (_held_up, 5, 0.15, 0.75, 0.75)],
)  # fmt: skip
def test_what_is_faster_is_told_where_ranges_overlap(
    machine: Machine, runs: int, faster: float, least: float, before: float
) -> None:
    told, ranges = _told(machine, runs, faster, 200 if runs == 3 else 60)
    assert told >= least and ranges <= before
