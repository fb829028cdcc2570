"""Thresholds: read from a stage file, and what they say of runs made up here."""

import json
import math
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from conftest import REPOSITORY

from launcher.errors import Finding
from launcher.machine.codec import Misfit
from launcher.stage import gates
from launcher.stage.gates import Limit, RungFacts
from launcher.verdict import evidence, metrics

Losses = tuple[float, ...]


def line(start: float, slope: float, steps: int = 50) -> Losses:
    """Losses that change by `slope` a step."""
    return tuple(start + slope * step for step in range(steps))


def noisy(fall: float, noise: float, steps: int, seed: int = 1) -> Losses:
    """Losses from 2 that fall by a share of it in all, under noise of that deviation."""
    chance = random.Random(seed)
    losses = []
    for step in range(steps):
        losses.append(2 * (1 - fall * step / steps) + chance.gauss(0, noise))
    return tuple(losses)


def repeat(*values: float, steps: int = 50) -> Losses:
    return values * (steps // len(values))


GOOD = RungFacts(
    stage="sft",
    devices=1,
    accelerated=True,
    tokens_per_second=1000.0,
    step_seconds=0.5,
    losses=line(2, -0.01),
    norms=repeat(1.0),
    allocated_gib=40.0,
    reserved_gib=44.0,
    planned_gib=41.0,
    card_gib=80.0,
)
DPO = replace(
    GOOD,
    stage="dpo",
    losses=line(math.log(2), -0.001),
    starts_at_ln2=True,
    accuracies=(0.5, *repeat(0.7, steps=49)),
    margins=line(0, 0.01),
)


def flags(facts: RungFacts, base: RungFacts | None = None, **limits: Limit) -> str:
    """Each gate that is not green, with its colour."""
    raised = []
    for flag in gates.judge_rung(facts, limits, base or facts):
        json.dumps(flag.as_json(), allow_nan=False)
        if flag.colour != "green":
            raised.append(f"{flag.gate} {flag.colour}")
    return ", ".join(raised)


def complain(code: str, key: str, message: str, help: str | None) -> Finding:
    assert message
    assert "\n" not in message
    return Finding(severity="error", layer="launch", code=code, key=key, message=message)


@pytest.mark.parametrize(
    "content, limits",
    [
        (None, {}),
        ({"loss_fall": 0.05}, {"loss_fall": Limit(0.05, 0.1)}),
        ({"efficiency": {"red": 0.3}}, {"efficiency": Limit(0.3, 0.8)}),
        ({"efficiency": {"yellow": 0.9}}, {"efficiency": Limit(0.5, 0.9)}),
        ({"efficiency": {"red": None, "yellow": 1}}, {"efficiency": Limit(None, 1.0)}),
        ({"memory": False, "grad_norm": "off"}, {"memory": Limit(), "grad_norm": Limit()}),
    ],
)
def test_limits_of_a_file(content: Any, limits: dict[str, Limit]) -> None:
    assert gates.read_limits(content, complain) == (limits, [])


@pytest.mark.parametrize(
    "content, errors",
    [
        (3, ["bad-gates "]),
        ({"los_fall": 1}, ["unknown-gate los_fall"]),
        ({"loss_fall": "much"}, ["bad-gate loss_fall"]),
        ({"loss_fall": math.nan}, ["bad-gate loss_fall"]),
        ({"loss_fall": {}}, ["bad-gate loss_fall"]),
        ({"loss_fall": {"red": "x"}}, ["bad-gate loss_fall"]),
        ({"loss_fall": {"blue": 1}, "x": 1}, ["bad-gate loss_fall", "unknown-gate x"]),
    ],
)
def test_limits_that_are_refused(content: Any, errors: list[str]) -> None:
    limits, findings = gates.read_limits(content, complain)
    assert limits == {}
    assert [f"{finding.code} {finding.key}" for finding in findings] == errors


def test_a_good_run_is_green() -> None:
    assert flags(GOOD) == ""
    assert gates.find_worst_colour(gates.judge_rung(GOOD, {}, GOOD)) == "green"
    assert flags(DPO) == ""


def test_limits_of_the_file_win() -> None:
    flat = replace(GOOD, losses=noisy(0.001, 0.001, 200))
    assert flags(flat) == "loss_fall red"
    assert flags(flat, loss_fall=Limit(0.0, 0.1)) == "loss_fall yellow"
    assert flags(flat, loss_fall=Limit()) == ""
    assert flags(GOOD, loss_fall=Limit(0.5)) == "loss_fall red"
    assert flags(GOOD, loss_fall=Limit(0.0, 0.5)) == "loss_fall yellow"
    assert flags(GOOD, memory=Limit(0.5)) == "memory red"


def gate(expected: str, **changes: Any) -> Any:
    """A case: what is changed in a good run, and the gates that are not green then."""
    return pytest.param(changes, expected)


@pytest.mark.parametrize(
    "changes, expected",
    [
        gate("verdict red", failed="CUDA out of memory"),
        gate("verdict yellow", unproven="packing: unknown"),
        gate("loss red", nonfinite=(3,)),
        gate("loss_fall yellow", losses=()),
        # flat, rising, and hardly falling
        gate("loss_fall red", losses=repeat(2.0)),
        gate("loss_fall red", losses=line(2, 0.01)),
        gate("loss_fall red", losses=line(2, -1e-4)),
        gate("loss_fall yellow", losses=line(2, -0.0004)),
        # bfloat16 rounds the steps away: it hardly falls
        gate("loss_fall yellow", losses=line(2, -1e-4), rounded=True),
        gate("loss_fall red", losses=line(2, 0.01), rounded=True),
        # too few to tell, unless they rise
        gate("loss_fall yellow", losses=repeat(2.0, steps=7)),
        gate("loss_fall yellow", losses=repeat(2.0, 2.001, steps=18)),
        gate("loss_fall red", losses=line(2, 0.1, steps=10)),
        gate("", trend="falling"),
        gate("trend yellow", trend="too_short"),
        gate("trend red", trend="rising"),
        gate("trend red", trend="still"),
        gate("grad_norm red", norms=(*repeat(1.0), 1001.0)),
        # a spike of no harm
        gate("", norms=(*repeat(1.0), 20.0)),
        gate("grad_norm yellow", norms=repeat(20.0)),
        gate("grad_norm_least red", norms=repeat(0.0)),
        gate("grad_norm_least yellow", norms=repeat(0.01)),
        gate("tokens_per_second red", tokens_per_second=0.0),
        gate("tokens_per_second yellow", tokens_per_second=None),
        gate("memory red", reserved_gib=81.0),
        gate("memory yellow", reserved_gib=78.0),
        gate("memory_over_plan yellow", planned_gib=30.0),
    ],
)
def test_what_turns_a_gate_red_or_yellow(changes: dict[str, Any], expected: str) -> None:
    assert flags(replace(GOOD, **changes)) == expected


@pytest.mark.parametrize(
    "changes, expected",
    [
        gate("rewards_accuracy red", accuracies=repeat(0.5)),
        gate("rewards_accuracy yellow", accuracies=repeat(0.52)),
        # noise, and stuck under noise
        gate("rewards_accuracy yellow", accuracies=repeat(0.3, 0.7)),
        gate("rewards_accuracy red", accuracies=repeat(0.49, 0.51)),
        gate("rewards_accuracy yellow", accuracies=repeat(0.47, 0.55)),
        gate("", accuracies=(), margins=()),
        gate("rewards_margin red", margins=repeat(-0.1)),
        gate("first_loss red", losses=line(1.4, -0.001)),
        gate("first_loss yellow", losses=line(0.74, -0.001)),
        gate("", losses=line(1.4, -0.001), starts_at_ln2=False),
    ],
)
def test_what_turns_a_gate_of_dpo_red_or_yellow(changes: dict[str, Any], expected: str) -> None:
    assert flags(replace(DPO, **changes)) == expected


@pytest.mark.parametrize(
    "tokens_per_second, expected",
    [(1900, ""), (1500, "efficiency yellow"), (900, "efficiency red")],
)
def test_efficiency_is_measured_against_the_first_rung(
    tokens_per_second: float, expected: str
) -> None:
    on_two = replace(GOOD, devices=2, tokens_per_second=tokens_per_second)
    assert flags(on_two, GOOD) == expected
    # a GPU against a CPU says nothing
    assert flags(on_two, replace(GOOD, accelerated=False, tokens_per_second=1e9)) == ""


@pytest.mark.parametrize(
    "fall, noise, steps, least, most",
    [
        # a loss that falls a little under much noise is stopped in few of many runs
        (0.03, 0.2, 20, 0, 4),
        (0.03, 0.2, 200, 0, 4),
        (0.015, 0.03, 50, 0, 4),
        # one that rises by more than its noise always is, a flat one mostly
        (-0.8, 0.1, 20, 100, 100),
        (-0.02, 0.03, 200, 99, 100),
        (0.0, 0.03, 200, 75, 100),
    ],
)
def test_noise_is_no_red_flag_and_hides_no_loss_that_rises(
    fall: float, noise: float, steps: int, least: int, most: int
) -> None:
    red = 0
    for seed in range(100):
        run = replace(GOOD, losses=noisy(fall, noise, steps, seed))
        red += "loss_fall red" in flags(run)
    assert least <= red <= most


@pytest.mark.parametrize(
    "losses, expected",
    [
        (noisy(0.001, 0.001, 50), "trend red"),
        (noisy(0.001, 0.1, 50), "trend yellow"),
        (noisy(0.02, 0.001, 50), "trend yellow"),
        (noisy(0.001, 0.001, 14), "trend yellow"),
    ],
    ids=["flat", "noise", "falls a little", "too short"],
)
def test_a_flat_trend_is_red_where_noise_does_not_hide_it(losses: Losses, expected: str) -> None:
    assert flags(replace(GOOD, losses=losses, trend="flat"), loss_fall=Limit()) == expected


@pytest.mark.parametrize(
    "log, expected",
    [
        ("dpo_two_ranks.log", "loss_fall yellow"),
        ("h200_sft_7b_two_ranks.log", "loss_fall yellow"),
        ("h200_trl_sft_liger.log", ""),
        ("trl_dpo.log", ""),
    ],
)
def test_losses_of_sound_runs(log: str, expected: str) -> None:
    losses = metrics.list_losses(evidence.read_log(REPOSITORY / "tests" / "corpus" / log))
    stage = "dpo" if "dpo" in log else "sft"
    facts = RungFacts(stage=stage, losses=tuple(losses), tokens_per_second=1.0)
    assert flags(facts) == expected


def test_facts_are_kept_without_keys_of_a_later_launch() -> None:
    kept = json.loads(json.dumps(asdict(DPO), allow_nan=False))
    assert RungFacts.from_json({**kept, "of a later launch": 1}) == DPO
    with pytest.raises(Misfit):
        RungFacts.from_json({})


def test_degenerate_series() -> None:
    assert gates.measure_fall([]) is None
    assert gates.measure_fall([1.0]) is None
    assert gates.average_end([math.nan]) is None
    zero = gates.measure_fall([0.0] * 10)
    assert zero is not None
    assert zero.value == 0
    assert gates.measure_fall([math.nan, 2.0, 1.0]) == gates.measure_fall([2.0, 1.0])
