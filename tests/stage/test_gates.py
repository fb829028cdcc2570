"""Thresholds: read from a stage file, and what they say of runs made up here."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from conftest import REPOSITORY

from launcher.errors import Finding
from launcher.machine.codec import Misfit
from launcher.stage import gates
from launcher.stage.gates import Limit, RungFacts
from launcher.verdict import evidence, metrics

GOOD = RungFacts(
    stage="sft", devices=1, accelerated=True, tokens_per_second=1000.0, step_seconds=0.5,
    losses=tuple(2.0 - 0.01 * step for step in range(50)), norms=(1.0,) * 50, allocated_gib=40.0,
    reserved_gib=44.0, planned_gib=41.0, card_gib=80.0,
)  # fmt: skip


def read(given: Any) -> tuple[dict[str, Limit], list[str]]:
    def complain(code: str, key: str, message: str, help: str | None) -> Finding:
        assert message and "\n" not in message
        return Finding(severity="error", layer="launch", code=code, key=key, message=message)

    limits, found = gates.read(given, complain)
    return limits, [f"{one.code} {one.key}".strip() for one in found]


def flags(facts: RungFacts, base: RungFacts | None = None, **limits: Limit) -> dict[str, str]:
    """Colours other than green by gate."""
    found = gates.judge(facts, limits, base or facts)
    json.dumps([flag.as_json() for flag in found], allow_nan=False)
    return {flag.gate: flag.colour for flag in found if flag.colour != "green"}


@pytest.mark.parametrize(
    ("given", "limits", "wrong"),
    [
        (None, {}, []),
        ({"loss_fall": 0.05}, {"loss_fall": Limit(0.05, 0.1)}, []),
        ({"efficiency": {"red": 0.3}}, {"efficiency": Limit(0.3, 0.8)}, []),
        ({"efficiency": {"yellow": 0.9}}, {"efficiency": Limit(0.5, 0.9)}, []),
        ({"efficiency": {"red": None, "yellow": 1}}, {"efficiency": Limit(None, 1.0)}, []),
        ({"memory": False, "grad_norm": "off"}, {"memory": Limit(), "grad_norm": Limit()}, []),
        (3, {}, ["bad-gates"]),
        ({"los_fall": 1}, {}, ["unknown-gate los_fall"]),
        ({"loss_fall": "much"}, {}, ["bad-gate loss_fall"]),
        ({"loss_fall": math.nan}, {}, ["bad-gate loss_fall"]),
        ({"loss_fall": {}}, {}, ["bad-gate loss_fall"]),
        ({"loss_fall": {"red": "x"}}, {}, ["bad-gate loss_fall"]),
        ({"loss_fall": {"blue": 1}, "x": 1}, {}, ["bad-gate loss_fall", "unknown-gate x"]),
    ],
)
def test_limits(given: Any, limits: dict[str, Limit], wrong: list[str]) -> None:
    assert read(given) == (limits, wrong)


def test_a_good_run_is_green() -> None:
    assert flags(GOOD) == {}
    assert gates.colour_of(gates.judge(GOOD, {}, GOOD)) == "green"
    # limits of the file win
    flat = replace(GOOD, losses=tuple(noisy(0.001, 0.001, 200, 1)))
    assert flags(flat) == {"loss_fall": "red"}
    assert flags(flat, loss_fall=Limit(0.0, 0.1)) == {"loss_fall": "yellow"}
    assert flags(GOOD, loss_fall=Limit(0.5)) == {"loss_fall": "red"}
    assert flags(replace(GOOD, losses=(2.0,) * 50), loss_fall=Limit()) == {}
    assert flags(GOOD, loss_fall=Limit(0.0, 0.5)) == {"loss_fall": "yellow"}
    assert flags(GOOD, memory=Limit(0.5)) == {"memory": "red"}


@pytest.mark.parametrize(
    ("changes", "gate", "colour"),
    [
        ({"failed": "CUDA out of memory"}, "verdict", "red"),
        ({"unproven": "packing: unknown"}, "verdict", "yellow"),
        ({"nonfinite": (3,)}, "loss", "red"),
        ({"losses": ()}, "loss_fall", "yellow"),
        ({"losses": (2.0,) * 50}, "loss_fall", "red"),  # flat
        ({"losses": tuple(2 + 0.01 * s for s in range(50))}, "loss_fall", "red"),
        ({"losses": tuple(2 - 1e-4 * s for s in range(50))}, "loss_fall", "red"),  # hardly falls
        ({"losses": tuple(2 - 0.0004 * s for s in range(50))}, "loss_fall", "yellow"),
        ({"losses": (2.0,) * 7}, "loss_fall", "yellow"),  # too few to tell
        ({"losses": (2.0, 2.001) * 9}, "loss_fall", "yellow"),
        ({"losses": tuple(2 + 0.1 * s for s in range(10))}, "loss_fall", "red"),
        ({"trend": "falling"}, None, "green"),
        ({"trend": "too_short"}, "trend", "yellow"),
        ({"trend": "rising"}, "trend", "red"),
        ({"trend": "still"}, "trend", "red"),
        ({"norms": (1.0,) * 49 + (1001.0,)}, "grad_norm", "red"),
        ({"norms": (1.0,) * 49 + (20.0,)}, None, "green"),  # a spike of no harm
        ({"norms": (20.0,) * 50}, "grad_norm", "yellow"),
        ({"norms": (0.0,) * 50}, "grad_norm_least", "red"),
        ({"norms": (0.01,) * 50}, "grad_norm_least", "yellow"),
        ({"tokens_per_second": 0.0}, "tokens_per_second", "red"),
        ({"tokens_per_second": None}, "tokens_per_second", "yellow"),
        ({"reserved_gib": 81.0}, "memory", "red"),
        ({"reserved_gib": 78.0}, "memory", "yellow"),
        ({"planned_gib": 30.0}, "memory_over_plan", "yellow"),
    ],
)
def test_what_is_not(changes: dict[str, Any], gate: str | None, colour: str) -> None:
    expected = {} if gate is None else {gate: colour}
    assert flags(replace(GOOD, **changes)) == expected


def test_efficiency_is_measured_against_the_first_rung() -> None:
    def on_two(rate: float, **changes: Any) -> dict[str, str]:
        return flags(replace(GOOD, devices=2, tokens_per_second=rate, **changes), GOOD)

    assert on_two(1900) == {}
    assert on_two(1500) == {"efficiency": "yellow"}
    assert on_two(900) == {"efficiency": "red"}
    # a GPU against a CPU says nothing
    assert flags(GOOD, replace(GOOD, accelerated=False, tokens_per_second=1e9)) == {}


def noisy(fall: float, noise: float, steps: int, seed: int) -> Sequence[float]:
    chance = random.Random(seed)
    return [2 * (1 - fall * s / steps) + chance.gauss(0, noise) for s in range(steps)]


@pytest.mark.parametrize(
    ("fall", "noise", "steps", "least", "most"),
    [
        # a loss that falls a little under much noise is stopped in few of many runs
        (0.03, 0.2, 20, 0, 4), (0.03, 0.2, 200, 0, 4), (0.015, 0.03, 50, 0, 4),
        # one that rises by more than its noise always is, a flat one mostly
        (-0.8, 0.1, 20, 100, 100), (-0.02, 0.03, 200, 99, 100), (0.0, 0.03, 200, 75, 100),
    ],
)  # fmt: skip
def test_noise_is_no_red_flag_and_hides_no_loss_that_rises(
    fall: float, noise: float, steps: int, least: int, most: int
) -> None:
    runs = (replace(GOOD, losses=tuple(noisy(fall, noise, steps, seed))) for seed in range(100))
    red = sum(flags(run).get("loss_fall") == "red" for run in runs)
    assert least <= red <= most


def test_a_flat_trend_is_red_where_noise_does_not_hide_it() -> None:
    def of(fall: float, noise: float, steps: int = 50) -> str | None:
        facts = replace(GOOD, losses=tuple(noisy(fall, noise, steps, 1)), trend="flat")
        return flags(facts, loss_fall=Limit()).get("trend")

    assert of(0.001, 0.001) == "red"
    assert of(0.001, 0.1) == "yellow"
    assert of(0.02, 0.001) == of(0.001, 0.001, 14) == "yellow"


@pytest.mark.parametrize(
    ("log", "colour"),
    [("dpo_two_ranks.log", "yellow"), ("h200_sft_liger_packing.log", "yellow"),
     ("h200_sft_7b_two_ranks.log", "yellow"), ("h200_dpo_flash_two_ranks.log", "yellow"),
     ("h200_trl_sft_liger.log", None), ("trl_dpo.log", None)],
)  # fmt: skip
def test_losses_of_sound_runs(log: str, colour: str | None) -> None:
    losses = tuple(metrics.losses(evidence.read_log(REPOSITORY / "tests" / "corpus" / log)))
    stage = "dpo" if "dpo" in log else "sft"
    facts = RungFacts(stage=stage, losses=losses, tokens_per_second=1.0)
    assert flags(facts).get("loss_fall") == colour


DPO = replace(
    GOOD, stage="dpo", losses=tuple(math.log(2) - 0.001 * s for s in range(50)), starts_at_ln2=True,
    accuracies=(0.5,) + (0.7,) * 49, margins=tuple(0.01 * s for s in range(50)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"accuracies": (0.5,) * 50}, {"rewards_accuracy": "red"}),
        ({"accuracies": (0.52,) * 50}, {"rewards_accuracy": "yellow"}),
        ({"accuracies": (0.3, 0.7) * 25}, {"rewards_accuracy": "yellow"}),  # noise
        ({"accuracies": (0.49, 0.51) * 25}, {"rewards_accuracy": "red"}),  # stuck
        ({"accuracies": (0.47, 0.55) * 25}, {"rewards_accuracy": "yellow"}),
        ({"accuracies": (), "margins": ()}, {}),
        ({"margins": (-0.1,) * 50}, {"rewards_margin": "red"}),
        ({"losses": tuple(1.4 - 0.001 * s for s in range(50))}, {"first_loss": "red"}),
        ({"losses": tuple(0.74 - 0.001 * s for s in range(50))}, {"first_loss": "yellow"}),
        ({"losses": tuple(1.4 - 0.001 * s for s in range(50)), "starts_at_ln2": False}, {}),
    ],
)
def test_dpo(changes: dict[str, Any], found: dict[str, str]) -> None:
    assert flags(replace(DPO, **changes)) == found


def test_facts_are_kept_and_series_may_be_degenerate() -> None:
    told = json.loads(json.dumps(asdict(DPO), allow_nan=False))
    assert RungFacts.from_json({**told, "of a later launch": 1}) == DPO
    with pytest.raises(Misfit):
        RungFacts.from_json({})
    # degenerate series
    assert gates.fallen([]) is None and gates.fallen([1.0]) is None
    assert gates.settled([math.nan]) is None
    zero = gates.fallen([0.0] * 10)
    assert zero is not None and zero.value == 0
    assert gates.fallen([math.nan, 2.0, 1.0]) == gates.fallen([2.0, 1.0])
