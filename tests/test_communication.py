"""Bytes and seconds that a step sends: against the papers' volumes, by hand, and the page made of them."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import REPOSITORY

from launcher import communication, shapes, throughput
from launcher.communication import H100, Links, Step
from launcher.lengths import Batch
from launcher.setups import Adapters, Setup, Zero

QWEN = shapes.find("Qwen/Qwen2.5-7B", {})
ONE = Batch(rows=1, width=1024, real=1024, formula="")
# no time for hops: bytes alone
PLAIN = Links(name="", node=8, inside=100e9, between=10e9, hop_inside=0, hop_between=0)


def setup(ranks: int, zero: Zero | None, accumulation: int = 1, **more: Any) -> Setup:
    return Setup(
        shape=QWEN, batch=ONE, processes=ranks, accumulation=accumulation, zero=zero, **more
    )


def sent(made: Setup) -> float:
    """Bytes a rank, in multiples of the parameters."""
    return sum(one.bytes for one in communication.traffic(made, PLAIN)) / QWEN.parameters


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_volumes(ranks: int) -> None:
    share = (ranks - 1) / ranks
    # a reduce-scatter and two gathers of bf16: one and a half times plain data parallelism
    assert sent(setup(ranks, Zero(stage=3))) == pytest.approx(6 * share)
    assert sent(setup(ranks, None)) == pytest.approx(4 * share)
    # DeepSpeed all-reduces: twice what a reduce-scatter would send
    assert sent(setup(ranks, Zero(stage=2))) == pytest.approx((4 + 2) * share)
    assert sent(setup(ranks, Zero(stage=2, communication=4))) == pytest.approx((8 + 2) * share)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_search_counts_the_same_bytes(checkpointing: bool) -> None:
    """Counted in DeepSpeed 0.18.9 on a model of 8.4 M weights: 1.52 and, checkpointed, 1.58 x P gathered.

    Less than twice, for the last layers are near enough to stay; certainly no third time.
    """
    size = QWEN.parameters
    for zero in (Zero(stage=3), Zero(stage=2), Zero(stage=2, communication=4), None):
        told = communication.traffic(setup(2, zero, checkpointing=checkpointing), PLAIN)
        each = [one.bytes for one in told if one.name != "new weights, gathered"]
        assert throughput._sent(size, size, zero, 2) == pytest.approx(sum(each))


def test_accumulation_repeats_what_each_micro_batch_sends() -> None:
    assert sent(setup(2, Zero(stage=3), 4)) == 4 * sent(setup(2, Zero(stage=3)))
    assert sent(setup(2, Zero(stage=2), 4)) == pytest.approx((4 * 4 + 2) / 2)
    assert sent(setup(2, Zero(stage=1), 4)) == sent(setup(2, Zero(stage=1)))
    assert sent(setup(2, None, 4)) == sent(setup(2, None))


def test_one_rank_sends_nothing() -> None:
    for zero in (None, Zero(stage=2), Zero(stage=3)):
        assert communication.traffic(setup(1, zero)) == ()
    assert communication.seconds(()) == 0


def test_seconds_by_hand() -> None:
    (first, second, third) = communication.traffic(setup(8, Zero(stage=3)), PLAIN)
    each = 2 * QWEN.parameters * 7 / 8 / 100e9
    assert [one.seconds for one in (first, second, third)] == pytest.approx([each] * 3)
    # all eight cards of a machine carry what one GPU hands on: 80 GB/s
    wide = communication.traffic(setup(16, Zero(stage=3)), PLAIN)
    assert communication.seconds(wide) == pytest.approx(3 * 2 * QWEN.parameters * 15 / 16 / 80e9)


def test_hops_cross_machines_once_each() -> None:
    assert H100.delay(1) == 0
    assert H100.delay(8) == pytest.approx(7 * 1.9e-6)
    assert H100.delay(16) == pytest.approx(13 * 1.9e-6 + 2 * 4.0e-6)
    assert H100.delay(1024) == pytest.approx(895 * 1.9e-6 + 128 * 4.0e-6)
    assert H100.rate(8) == 450e9 > H100.rate(16) == 400e9


def test_a_second_copy_in_each_machine_keeps_the_backward_gather_inside() -> None:
    far = communication.traffic(setup(64, Zero(stage=3)))
    near = communication.traffic(setup(64, Zero(stage=3, secondary=8)))
    assert near[0] == far[0]
    assert near[1].seconds < far[1].seconds
    # where it is not smaller than the world it says nothing
    assert communication.traffic(setup(4, Zero(stage=3, secondary=8))) == communication.traffic(
        setup(4, Zero(stage=3))
    )


def test_adapters_send_only_themselves() -> None:
    lora = Adapters(rank=16, targets=("q_proj", "v_proj"))
    made = setup(8, Zero(stage=2), adapters=lora)
    trained = lora.parameters(QWEN)
    whole = sum(one.bytes for one in communication.traffic(made))
    assert whole == pytest.approx(6 * trained * 7 / 8)
    # but ZeRO-3 gathers the frozen weights too
    forward = communication.traffic(setup(8, Zero(stage=3), adapters=lora))[0]
    assert forward.bytes == pytest.approx(2 * QWEN.parameters * 7 / 8)


def test_buckets() -> None:
    assert communication.buckets([], 10) == 0
    assert communication.buckets([3, 3, 3, 3], 10) == 2
    # a weight larger than a bucket goes by itself
    assert communication.buckets([3, 50, 3], 10) == 3
    assert communication.buckets([3, 50, 3], 1000) == 1
    small, large = (
        communication.traffic(setup(8, Zero(stage=2, bucket=n)))[0] for n in (1, 10**12)
    )
    weights = len(QWEN.layer) * QWEN.layers + len(QWEN.outer)
    assert (small.calls, large.calls) == (weights, 1)
    assert (small.bytes, large.seconds < small.seconds) == (large.bytes, True)


def test_a_step_lies_between_full_overlap_and_none() -> None:
    step = Step(compute=2.0, communication=0.5)
    assert (step.shortest, step.longest, step.bound) == (2.0, 2.5, False)
    assert replace(step, communication=3.0).bound


# --- the page --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", REPOSITORY / "scripts" / "scaling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(scaling: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert page == scaling.renewed(page), "python scripts/scaling.py renews the page"
    assert (REPOSITORY / "docs" / "scaling.svg").is_file()


def test_what_the_page_rests_on(scaling: ModuleType) -> None:
    points = {(p.model, p.engine, p.gpus): p for p in scaling.points()}
    # 2 bytes a parameter on every card: no count of GPUs helps
    heavy = [p for p in points.values() if p.model == "70B" and p.engine == "ZeRO-2"]
    assert not any(p.fits for p in heavy)
    assert all(a.least >= b.least for a, b in pairwise(heavy)), "more GPUs never take more"
    # 128 rows go to 128 GPUs at most
    for point in points.values():
        assert point.rows == max(128, point.gpus)
        assert point.per_device * point.accumulation * point.gpus == point.rows
    done = points["7B", "ZeRO-2", 8]
    assert done.fits and not done.step.bound
    assert math.isclose(done.hours(done.step.compute), 1e9 / done.tokens * done.step.compute / 3600)


def test_the_drawing(scaling: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = tmp_path / "a.svg"
    scaling.draw(made)
    first = made.read_bytes()
    scaling.draw(made)
    assert made.read_bytes() == first, "the drawing differs from run to run"
