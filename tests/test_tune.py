"""The search for the fastest setting: on machines that are not there, and from the command line."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tuned
import yaml
from conftest import PATIENCE_S, REPOSITORY, Write
from fake_smi import Smi
from fake_world import World, made, needs_trl, until
from tuned import A100, H200, RTX4090, Machine

from launcher import campaign, check, cli, config, levers, measurement, proposal, stage, trial, tune
from launcher.comparison import SPEED, Sample, Spread, Step, Variant
from launcher.errors import Exit, NotReady, UsageError, errors
from launcher.levers import Here
from launcher.preparation import Request
from launcher.proposal import Gain, Proposal
from launcher.rundir import RunFolder
from launcher.search import Candidate, Measured, Outlook, Search

pytestmark = pytest.mark.slow

HAND = "bench/hand_recipe.yaml"
SMALL = ("model_name_or_path=Qwen/Qwen2.5-0.5B", "use_liger_kernel=false", "batch.per_device=8",
         "expect.liger=any")  # fmt: skip
DPO = ("model_name_or_path=meta-llama/Llama-3.1-8B", "packing=false", "use_liger_kernel=false",
       "expect.packing=any", "expect.liger=any")  # fmt: skip


@functools.cache
def hand(flash: bool = True) -> Outlook:
    packages = tuned.PACKAGES if flash else {"liger-kernel": "0.7.0"}
    return tuned.outlook(HAND, packages=packages)


@functools.cache
def dpo() -> Outlook:
    path = "llama/llama31_8b_dpo_10pct.yaml"
    return tuned.outlook(path, *DPO, gpus=8, rows="600:2048", card="A100", gib=79.2)


@functools.cache
def small() -> Outlook:
    return tuned.outlook(HAND, *SMALL, gpus=1)


@functools.cache
def lora() -> Outlook:
    more = ("gradient_checkpointing=true", "expect.liger=any")
    return tuned.outlook(
        "lora/sft_qwen7b.yaml", *more, gpus=1, rows="400:1000", card="4090", gib=23.6
    )


# --- machines that are not there ------------------------------------------------------------------

MACHINES: Mapping[str, tuple[Any, Machine]] = {
    "7B on two H200": (hand, H200),
    "slow links": (hand, tuned.changed(H200, link=30e9, hidden=0.1)),
    "a better use of matrices": (hand, tuned.changed(H200, matmul=0.75, half=500.0)),
    "needs more memory than planned": (hand, tuned.changed(H200, memory=1.1)),
    "needs less": (hand, tuned.changed(H200, memory=0.9)),
    "Liger slows it down": (hand, tuned.changed(H200, liger=4.0)),
    "slow attention": (hand, tuned.changed(H200, flash=0.3, sdpa=0.05)),
    "0.5B on one H200": (small, H200),
    "8B DPO on eight A100": (dpo, A100),
    "LoRA on a small card": (lora, RTX4090),
    "8B DPO, large micro-batches count": (dpo, tuned.changed(A100, half=6000.0, memory=1.04)),
}


@needs_trl
@pytest.mark.parametrize("name", MACHINES)
def test_ten_trials_find_a_setting_near_the_best_of_all(name: str) -> None:
    build, machine = MACHINES[name]
    world = build()
    search = tuned.searched(world, machine, noise=(0.008, -0.01, 0.004), attribute=False)
    assert len(search.trials) <= 10
    assert search.first is not None or not search.base.expected.peak
    assert tuned.reached(world, machine, search) >= 0.95


@pytest.mark.parametrize("sdpa", [0.02, 0.08, 0.2])
def test_without_flash_attention_it_is_measured_whether_packing_pays(sdpa: float) -> None:
    machine = tuned.changed(H200, sdpa=sdpa)
    world = hand(flash=False)
    search = tuned.searched(world, machine, attribute=False)
    assert tuned.reached(world, machine, search) >= 0.95


def test_the_setting_that_one_h200_was_tuned_to_is_found_again() -> None:
    """docs/benchmarks.md: packing, 128 rows, no checkpointing; 12,963 to 107,532 tokens/s in two trials."""
    search = tuned.search_of(tuned.outlook(HAND, *SMALL, gpus=1, rows="301:1103"))
    search.learn(search.base, told(12_963, step=128 * 301 / 12_963, peak=10.2))
    second = search.propose()
    assert second is not None
    wanted = {"packing": True, "per_device": 128, "checkpointing": False}
    assert wanted.items() <= second.settings.items()
    search.learn(second, told(107_532, step=128 * 301 / 107_532, peak=45.3))
    assert search.best is not None and search.best.candidate.key == second.key


def test_the_file_as_written_comes_first_and_every_trial_says_why() -> None:
    search = tuned.searched(hand(), H200)
    first, *others = search.trials
    assert first.candidate.key == search.base.key and first.candidate.purpose == "baseline"
    assert all(one.candidate.why and one.learned for one in search.trials)
    assert "expected" in others[0].candidate.why
    assert len({one.candidate.key for one in search.trials}) == len(search.trials)


def test_nothing_that_the_plan_says_does_not_fit_is_tried() -> None:
    world = hand()
    search = tuned.searched(world, H200)
    room = 139.8 * 0.92
    assert any((one.expected.peak or 0) > room for one in search.grid.values())
    assert all((one.candidate.expected.peak or 0) <= room for one in search.trials)
    assert search.summary()["too_large"] > 0


def test_a_file_that_cannot_fit_is_not_tried_and_something_else_is() -> None:
    world = tuned.outlook(HAND, "batch.per_device=64", "gradient_checkpointing=false")
    search = tuned.searched(world, H200)
    assert search.first is None
    assert search.best is not None and search.best.measured.speed


# --- what goes wrong ------------------------------------------------------------------------------


def failing(search: Search, world: Outlook, machine: Machine, trials: int, wrong: Any) -> None:
    """Go on; what `wrong` says of a candidate happens in place of what the machine does."""
    while len(search.trials) < trials and (one := search.propose()) is not None:
        search.learn(one, wrong(one) or machine.runs(world, one.settings))


def test_out_of_memory_rules_out_all_that_needs_as_much() -> None:
    # the estimate is wrong by a fifth where nothing is computed again
    world = hand()
    search = tuned.search_of(world, attribute=False)
    seen: list[float] = []

    def wrong(one: Candidate) -> Measured | None:
        if not one.settings["checkpointing"] and (one.expected.short or 0) > 95:
            seen.append(one.expected.peak or 0)
            return Measured(status="oom", seconds=40, reason="CUDA out of memory")
        return None

    failing(search, world, H200, 12, wrong)
    assert seen and seen == sorted(seen, reverse=True) and len(set(seen)) == len(seen)
    assert search.best is not None
    told = next(one.learned for one in search.trials if one.measured.status == "oom")
    assert "nothing that needs at least as much is tried" in told


def test_what_the_whole_run_has_no_room_for_is_not_proposed() -> None:
    # a trial sees few rows: what it takes over the estimate the longest rows take too
    world = hand()
    search = tuned.search_of(world, room=140.0)
    search.learn(search.base, H200.runs(world, search.base.settings))
    large = tuned.one(search, packing=True, checkpointing=False, deepspeed="zero1", per_device=16)
    whole, short = large.expected.peak, large.expected.measurable
    assert whole and short and short < whole < 140 * 0.92
    told = H200.runs(world, large.settings)
    fitted = search.learn(large, replace(told, peak=short * 0.93 * 140 / whole))
    assert fitted.ok and "not kept: with its longest rows" in fitted.learned
    assert search.best is not None and search.best.candidate.key == search.base.key
    # the file as written is the author's own
    crowded = tuned.search_of(world, room=140.0)
    estimate = crowded.base.expected
    assert estimate.peak and estimate.measurable
    peak = estimate.measurable * 0.97 * 140 / estimate.peak
    crowded.learn(crowded.base, Measured(status="ok", speed=1000, step=5, peak=peak, seconds=60))
    assert crowded.best is not None


def test_a_measured_peak_corrects_those_of_its_kind() -> None:
    world = hand()
    search = tuned.search_of(world)
    base = search.base
    before = search.peak(tuned.one(search, per_device=32))
    assert base.expected.measurable and before
    peak = base.expected.measurable * 1.2
    search.learn(base, Measured(status="ok", speed=1000, step=5, peak=peak, seconds=60))
    after = search.peak(tuned.one(search, per_device=32))
    assert after == pytest.approx(1.2 * before)


def test_one_change_that_crashes_is_not_tried_again() -> None:
    world = hand()
    search = tuned.search_of(world, attribute=False)
    base = search.base
    search.learn(base, H200.runs(world, base.settings))
    search.learn(tuned.one(search, packing=True), Measured(status="crash", reason="KeyError"))
    assert not any(one.settings["packing"] for one in search.grid.values() if search.eligible(one))
    failing(search, world, H200, 12, lambda one: None)
    assert search.best is not None and not search.best.candidate.settings["packing"]


def test_of_several_changes_the_one_that_crashes_is_found() -> None:
    world = hand()
    search = tuned.search_of(world, attribute=False)
    crashed: list[Candidate] = []

    def wrong(one: Candidate) -> Measured | None:
        if one.settings["packing"]:
            crashed.append(one)
            return Measured(status="crash", reason="ValueError: cannot be packed")
        return None

    failing(search, world, H200, 14, wrong)
    assert 1 <= len(crashed) <= 3
    assert search.best is not None and not search.best.candidate.settings["packing"]
    assert not any(one.settings["packing"] for one in search.grid.values() if search.eligible(one))
    fair = {**world.space.base, "checkpointing": False, "per_device": 8}
    assert (search.best.measured.speed or 0) >= (H200.runs(world, fair).speed or 0) * 0.95


def test_a_verdict_that_names_the_lever_ends_it_at_once() -> None:
    world = dpo()
    search = tuned.search_of(world, attribute=False)

    def wrong(one: Candidate) -> Measured | None:
        if one.settings["packing"] and one.settings["attention"] == "flash_2":
            return Measured(status="contract", blamed=("packing",), reason="packing is leaking")
        return None

    failing(search, world, A100, 12, wrong)
    leaking = [one for one in search.trials if one.measured.status == "contract"]
    assert len(leaking) == 1 and "not tried again" in leaking[0].learned
    assert search.best is not None and not (
        search.best.candidate.settings["packing"]
        and search.best.candidate.settings["attention"] == "flash_2"
    )
    # what leaks under one attention may not under the other
    other = tuned.one(search, packing=True, attention="torch")
    assert search.eligible(other)


@pytest.mark.parametrize("status", ["unproven", "loss changed", "diverged", "hang", "no speed"])
def test_what_is_not_proved_is_never_the_best(status: Any) -> None:
    world = hand()
    search = tuned.search_of(world, attribute=False)

    def wrong(one: Candidate) -> Measured | None:
        if one.settings["deepspeed"] == "zero2":
            told = H200.runs(world, one.settings)
            return replace(told, status=status, speed=10 * (told.speed or 1), reason="so it was")
        return None

    failing(search, world, H200, 12, wrong)
    assert search.best is not None and search.best.candidate.settings["deepspeed"] != "zero2"


def test_a_file_that_does_not_train_ends_the_search() -> None:
    search = tuned.search_of(hand())
    search.learn(search.base, Measured(status="crash", reason="no such data set", seconds=20))
    assert search.propose() is None
    assert search.stopped == "the file as written does not train: no such data set"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("refused", "cannot be started: so it is"),
        ("no speed", "has no measured speed: so it is"),
        ("unproven", "proves nothing to compare others with: so it is"),
    ],
)
def test_of_a_first_trial_it_is_said_what_it_lacks(status: Any, said: str) -> None:
    search = tuned.search_of(hand())
    search.learn(search.base, Measured(status=status, reason="so it is"))
    assert search.propose() is None
    assert search.stopped == f"the file as written {said}"
    assert search.trials[0].learned == f"{status}: so it is"


def test_of_a_first_trial_that_the_budget_ended_no_more_is_said() -> None:
    search = tuned.search_of(hand())
    search.learn(search.base, Measured(status="timeout", seconds=585, cut=True))
    assert search.propose(0.0) is None
    assert search.stopped is not None and "did not end within it" in search.stopped


def test_without_an_estimate_micro_batches_grow_by_twos_and_what_failed_bounds_them() -> None:
    world = replace(hand(), shape=None)
    search = tuned.search_of(world)
    assert search.base.expected.peak is None
    search.learn(search.base, Measured(status="ok", speed=1000, step=5, seconds=60))
    assert search.eligible(tuned.one(search, per_device=32))
    assert not search.eligible(tuned.one(search, per_device=64))
    search.learn(tuned.one(search, per_device=32), Measured(status="oom", seconds=60))
    assert not search.eligible(tuned.one(search, per_device=32, checkpointing=False))
    assert not search.eligible(tuned.one(search, per_device=32, liger=False))
    assert search.eligible(tuned.one(search, per_device=32, deepspeed="zero3"))


# --- measured ---------------------------------------------------------------------------------------

PACKED = ("packing=true", "expect.packing=isolated")
FREE = "gradient_checkpointing=false"


@pytest.mark.parametrize(
    ("config", "overrides", "rows", "seconds"),
    [
        ("hand_recipe", (), "301:1103", 4.715),
        ("hand_recipe", (*PACKED, FREE, "deepspeed=zero2"), "301:1103", 2.045),
        ("hand_recipe", (*PACKED, FREE, "deepspeed=zero3", "batch.per_device=32"), "301:1103", 1.956),
        ("hand_recipe", (*PACKED, FREE, "batch.per_device=32"), "301:1103", 1.860),
        ("hand_recipe_dpo", (), "272:1027", 12.817),
        ("hand_recipe_dpo",
         (*PACKED, "activation_memory_budget=1.0", "deepspeed=zero2", "batch.per_device=8"),
         "272:1027", 3.249),
    ],
)  # fmt: skip
def test_a_step_takes_about_what_it_took(
    config: str, overrides: tuple[str, ...], rows: str, seconds: float
) -> None:
    """Seconds of a step on two H200 (docs/benchmarks.md): good enough for an order of settings."""
    world = tuned.outlook(f"bench/{config}.yaml", *overrides, rows=rows)
    assert world.base().expected.seconds == pytest.approx(seconds, rel=0.2)


# --- time -----------------------------------------------------------------------------------------


def test_no_trial_is_begun_that_would_not_end_within_the_budget() -> None:
    world = hand()
    search = tuned.search_of(world)
    left = 400.0
    while (one := search.propose(left)) is not None:
        expected, limit = search.trial_seconds(one), search.timeout(one, left)
        assert limit <= left
        told = H200.runs(world, one.settings)
        if search.trials:
            assert expected <= left
            assert told.seconds == pytest.approx(expected, rel=0.25)
        left -= told.seconds
        search.learn(one, told)
    assert left >= 0
    # what was left undone, and what it would have taken
    assert re.fullmatch(
        r"the budget: .+ expected, .+ of it takes about \d+ s and \d+ s are left: .+",
        search.stopped or "",
    )
    assert tuned.search_of(world).propose(0.0) is None


# --- what each change gains -----------------------------------------------------------------------


def test_what_is_left_of_the_budget_measures_what_each_change_gains() -> None:
    world = hand()
    search = tuned.searched(world, H200, trials=16)
    best = search.best
    assert best is not None
    names = search.differing(best.candidate)
    assert {"packing"} <= set(names)
    found = search.gain(best, "packing")
    assert found is not None
    share, without = found
    assert without.candidate.settings["packing"] is False
    ratio = (best.measured.speed or 0) / (without.measured.speed or 1)
    assert share.median == pytest.approx(ratio - 1)
    assert any(one.candidate.purpose == "gain" for one in search.trials)


# --- once more ------------------------------------------------------------------------------------


def told(speed: float, **parts: Any) -> Measured:
    return Measured(**{"status": "ok", "speed": speed, "step": 1.0, "seconds": 60.0, **parts})


def compared(*speeds: float) -> tuple[Search, list[Candidate]]:
    """A search of which the file as written and others have these speeds, and nothing is left to try."""
    search = tuned.search_of(hand(), attribute=False, threshold=10.0)
    sizes = (16, 32, 64, 8)
    some = [tuned.one(search, packing=True, per_device=size) for size in sizes]
    tried = [search.base, *some][: len(speeds)]
    for candidate, speed in zip(tried, speeds, strict=True):
        search.learn(candidate, told(speed))
    return search, tried


def repeated(search: Search, speeds: Mapping[int, float], tried: list[Candidate]) -> list[int]:
    """Which of those tried are run once more, in turn, until the search ends."""
    order, keys = [], [one.key for one in tried]
    while (one := search.propose()) is not None:
        assert one.purpose == "repeat" and len(order) < 20
        order.append(keys.index(one.key))
        search.learn(one, told(speeds[order[-1]]))
    return order


def test_what_is_left_of_the_budget_repeats_the_file_and_the_best_in_turns() -> None:
    search, tried = compared(1000, 1800, 2000)
    assert repeated(search, {0: 1010, 2: 1980}, tried) == [2, 0, 0, 2]
    assert search.best is not None and search.best.measured.speed == 1980
    assert search.speeds(search.best.candidate).n == 3 and len(search.trials) == 3
    assert "could gain" in (search.stopped or "")


def test_a_lucky_run_of_the_file_hides_nothing_that_is_faster() -> None:
    search, tried = compared(1000, 800, 900)
    assert repeated(search, {0: 850, 2: 905}, tried) == [2, 0, 0, 2]
    assert search.best is not None and search.best.candidate.key == tried[2].key
    # what is there to compare?
    search, tried = compared(1000)
    assert not repeated(search, {}, tried)


@pytest.mark.parametrize("status", ["oom", "crash", "contract", "loss changed", "timeout"])
def test_a_repeat_that_fails_counts_against_its_setting(status: Any) -> None:
    search, tried = compared(1000, 1800, 2000)
    again = search.propose()
    assert again is not None and again.key == tried[2].key
    search.learn(again, told(2000, status=status, reason="not this time"))
    assert search.best is not None and search.best.candidate.key == tried[1].key
    assert repeated(search, {0: 1000, 1: 1800}, tried) == [1, 0, 0, 1]
    # and of the file as written itself: it did train
    search, tried = compared(1000, 1800, 2000)
    search.learn(search.base, told(1000, status=status, reason="not this time"))
    assert repeated(search, {2: 2000}, tried) == [2, 2]


@pytest.mark.parametrize("ended", [{"status": "timeout", "cut": True}, {"status": "refused"}])
def test_a_repeat_that_nothing_of_the_setting_ended_says_nothing(ended: Any) -> None:
    search, tried = compared(1000, 2000)
    search.learn(tried[1], Measured(**ended))
    assert search.best is not None and search.best.candidate.key == tried[1].key
    # it had its turn
    assert repeated(search, {0: 1000, 1: 2000}, tried) == [0, 0, 1]


def test_only_what_ends_within_the_budget_is_repeated() -> None:
    search = tuned.search_of(hand(), attribute=False, threshold=10.0)
    fast = tuned.one(search, packing=True, per_device=32)
    search.learn(search.base, told(1000, step=10.0, seconds=150))
    search.learn(fast, told(2000, step=5.0, seconds=90))
    base, other = (search.trial_seconds(one) for one in (search.base, fast))
    assert other == 90 and base > 100
    assert search.propose(89) is None
    assert "once more: run 2 takes about 90 s, 89 s are left" in (search.stopped or "")
    again = search.propose(95)
    assert again is not None and again.key == fast.key
    search.learn(again, told(2000, step=5.0, seconds=92))
    # the file's turn, for which there is no time
    assert search.trial_seconds(fast) == 92 and search.propose(95) is None
    again = search.propose(200)
    assert again is not None and again.key == search.base.key


@pytest.mark.parametrize(
    ("gain", "left", "purpose"),
    [(0.01, 150, "repeat"), (0.01, 300, "search"), (0.05, 150, "search")],
)
def test_what_hardly_gains_gives_way_to_second_runs_where_not_all_fit(
    monkeypatch: pytest.MonkeyPatch, gain: float, left: float, purpose: str
) -> None:
    search, _ = compared(1000, 2000)
    other = tuned.one(search, packing=True, per_device=64)
    monkeypatch.setattr(search, "threshold", 0.005)
    monkeypatch.setattr(search, "ranked", lambda: [(gain, other)])
    assert search.trial_seconds(other) < 150
    following = search.propose(left)
    assert following is not None and following.purpose == purpose


# --- what a sample means --------------------------------------------------------------------------


def sample(speed: float | None = 100.0, loss: float = 2.0, **parts: Any) -> Sample:
    curve = (Step(100.0, 100.0, loss), Step(100.0, 100.0, loss))
    figures = {
        "tokens_per_second_per_gpu": speed,
        "seconds_per_step": 1.0,
        "peak_allocated_gib": 5.0,
    }
    return Sample(**{"variant": "x", "metrics": figures, "curve": curve, **parts})


def outcome(**states: tuple[str, bool | None]) -> Any:
    points = tuple(
        check.Point(name=name, state=state, expected="?", ok=ok)
        for name, (state, ok) in states.items()
    )
    told = check.Verdict(status="fail", stage="sft", steps=8, points=points, metrics={})
    return trial.Outcome(run=RunFolder(Path("x")), plan=None, verdict=told, exit=Exit.OK)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "status", "blamed"),
    [
        (sample(), "ok", ()),
        (sample(loss=2.05), "ok", ()),
        (sample(loss=2.2), "loss changed", ()),
        (sample(loss=1.8), "loss changed", ()),
        (sample(speed=None), "no speed", ()),
        (replace(sample(), curve=()), "unproven", ()),
        (sample(cause="oom", reason="CUDA out of memory"), "oom", ()),
        (sample(cause="hang", reason="nothing moves"), "hang", ()),
        (sample(cause="diverged", reason="loss is nan"), "diverged", ()),
        (sample(cause="crash", reason="KeyError"), "crash", ()),
        (sample(outcome=outcome(packing=("isolated", True))), "ok", ()),
        (sample(outcome=outcome(packing=("on", None))), "unproven", ("packing",)),
        (sample(outcome=outcome(liger=("applied", None))), "unproven", ("liger",)),
        (sample(outcome=outcome(liger=("not_engaged", False))), "contract", ("liger",)),
        (sample(outcome=outcome(trend=("too_short", None))), "ok", ()),
        (
            sample(cause="contract", reason="leaks", outcome=outcome(packing=("leaking", False))),
            "contract", ("packing",),
        ),
    ],
)  # fmt: skip
def test_a_setting_counts_only_if_everything_was_proved(
    told: Sample, status: str, blamed: tuple[str, ...]
) -> None:
    found = tune.judged([told], [sample(variant="first")], 0.05)
    assert (found.status, found.blamed) == (status, blamed)


def test_a_first_trial_without_a_loss_is_nothing_to_hold_others_to() -> None:
    assert tune.judged([sample()], [], 0.05).loss_change == 0
    assert tune.judged([replace(sample(), curve=())], [], 0.05).status == "unproven"


def test_losses_are_compared_by_the_medians_of_all_runs() -> None:
    first = [sample(variant="first", loss=loss) for loss in (2.0, 2.4, 2.0)]
    assert tune.judged([sample(loss=2.0)], first, 0.05).status == "ok"
    assert tune.judged([sample(loss=2.2)], first, 0.05).status == "loss changed"
    runs = [sample(loss=2.0), sample(loss=2.0), sample(loss=2.2)]
    found = tune.judged(runs, first, 0.05)
    assert (found.status, found.loss_change) == ("ok", 0.0)
    # but what the last one did not prove, no other proves for it
    last = sample(outcome=outcome(packing=("leaking", False)))
    assert tune.judged([*runs, last], first, 0.05).status == "contract"


# --- what is proposed -----------------------------------------------------------------------------


def tuning_of(*runs: tuple[str, float, Mapping[str, Any]]) -> tune.Tuning:
    """After these runs of settings: `base`, or the rows a device; with speeds, and what else was seen."""
    world = hand()
    found = tune.Tuning(
        request=Request(stage="sft", config=Path("x")), terms=tune.Terms(), plan=world.space.plan,
        here=Here(packages=tuned.PACKAGES, cpu=False), card=world.card, shape=world.shape,
        rows=world.rows, attention=world.attention, assumed=False, key="",
    )  # fmt: skip
    for name, speed, more in runs:
        settings = {} if name == "base" else {"packing": True, "per_device": int(name)}
        candidate = tuned.one(found.search, **settings)
        earlier = found.runs_of(candidate)
        run = sample(speed, variant=name, repeat=len(earlier), **more)
        told = tune.judged([run], [], 0.05)
        cut = run.cause == "timeout"
        learned = found.search.learn(candidate, replace(told, cut=cut, seconds=60.0))
        found.entries.append(tune.Entry(trial=learned, sample=run, seconds=60.0))
    return found


OOM: Mapping[str, Any] = {"cause": "oom", "reason": "CUDA out of memory"}


@pytest.mark.parametrize(
    ("runs", "chosen", "why"),
    [
        ([("base", 100, {}), ("16", 104, {})], "16", None),
        ([("base", 100, {}), ("16", 102, {})], "base", "one run: no spread"),
        ([("base", 100, {}), ("16", 120, {}), ("16", 96, {})], "base", "not told apart"),
        ([("base", 100, {}), ("16", 120, {}), ("32", 110, {}), ("16", 0, OOM)], "32", None),
        ([("base", 100, {}), ("base", 0, OOM), ("16", 101, {})], "16", None),
        # the first run of the file had another loss than the others have
        ([("base", 100, {}), *[("base", 100, {"loss": 2.2})] * 2, ("16", 120, {})], "base",
         "loss changed"),
        # the best by medians has runs among those of the file, the next has not
        ([("base", 100, {}), ("base", 105, {}), *[("16", 120, {}), ("16", 104, {})],
          *[("32", 110, {}), ("32", 111, {})]], "32", "not told apart"),
    ],
)  # fmt: skip
def test_what_is_proposed_is_told_to_be_faster_by_all_runs(
    runs: list[tuple[str, float, Mapping[str, Any]]], chosen: str, why: str | None
) -> None:
    found = tuning_of(*runs)
    best = found.chosen
    assert best is not None and found.runs_of(best.candidate)[0].sample.variant == chosen
    assert (why or "None") in str(found.withheld())
    assert [row.variant for row in found.bench().rows if row.recommended] == (
        [] if chosen == "base" or OOM in (more for name, _, more in runs if name == "base")
        else [chosen]
    )  # fmt: skip
    assert found.as_json()["best"]["speed_ratio"] is not None


def test_a_run_that_the_budget_ended_is_not_in_the_table() -> None:
    ended = {"cause": "timeout", "reason": "its time was up"}
    found = tuning_of(("base", 100, {}), ("16", 120, {}), ("16", 0, ended))
    row = found.bench().rows[-1]
    assert row.standing == "faster" and not row.failures and len(found.entries) == 3


# --- the stage file -------------------------------------------------------------------------------


def proposed(world: Outlook, overrides: tuple[str, ...] = (), **settings: Any) -> Proposal:
    whole = {**world.space.base, **settings}
    gains = [
        Gain(
            lever=name, before=world.space.base[name], after=value, share=Spread(0.25, 0.2, 0.3, 2)
        )
        for name, value in settings.items()
    ]
    return Proposal(
        space=world.space,
        settings=whole,
        gains=gains,
        head=["x on 2 x H200", "told"],
        overrides=overrides,
    )


def same_as_overrides(world: Outlook, told: Proposal, place: Path) -> None:
    """The file says what the same overrides on the command line say."""
    proposal.write(told, place)
    path = world.space.plan.stage.config.path
    wanted = config.load(path, (*told.overrides, *levers.overrides(world.space, told.settings)))
    found = config.load(place)
    assert found.args == wanted.args
    kept = {
        key: value
        for key, value in found.options.items()
        if key not in ("name", "stage", "backend")
    }
    assert kept == {
        k: v for k, v in wanted.options.items() if k not in ("name", "stage", "backend")
    }
    assert not errors(stage.judge(found).findings)
    assert not proposal.faults(place, "sft", None, allowed=False)


def test_the_proposal_says_what_the_overrides_say(tmp_path: Path) -> None:
    world = hand()
    told = proposed(world, packing=True, per_device=64, deepspeed="zero2")
    place = tmp_path / "deep" / "tuned.yaml"
    same_as_overrides(world, told, place)
    text = place.read_text()
    assert text.startswith("# Tuned by launch: x on 2 x H200\n# told\nextends: ")
    assert "per_device: 64" in text and "was 16; gains +25.0% (+20.0% – +30.0%)" in text
    assert "packing: isolated" in text
    assert "name: hand_recipe-tuned" in text


def test_overrides_of_the_command_line_are_in_it(tmp_path: Path) -> None:
    more = ("learning_rate=1e-5", "batch.global=256", "chat_template_name='a: b # c'")
    world = tuned.outlook(HAND, *more)
    same_as_overrides(world, proposed(world, more, packing=True), tmp_path / "tuned.yaml")


def test_a_name_of_several_lines_stays_in_its_comment(tmp_path: Path) -> None:
    world = hand()
    told = replace(proposed(world, packing=True), head=["a\nb: c.yaml", "x\u2028y\x85z"])
    same_as_overrides(world, told, tmp_path / "tuned.yaml")


def test_a_deepspeed_file_beside_the_old_one_is_found_from_the_new_one(
    write: Write, tmp_path: Path
) -> None:
    zero = (REPOSITORY / "launcher" / "deepspeed" / "zero2.json").read_text()
    write("configs/own.json", zero)
    text = (REPOSITORY / "configs" / HAND).read_text().replace("zero2_fp32_comm", "own.json")
    world = tuned.outlook(write("configs/own.yaml", text))
    place = tmp_path / "elsewhere" / "tuned.yaml"
    proposal.write(proposed(world, packing=True), place)
    judged = stage.judge(config.load(place))
    assert not errors(judged.findings)
    assert judged.options and judged.options.deepspeed
    assert judged.options.deepspeed.resolve() == tmp_path / "configs" / "own.json"


def test_the_wrapped_shape_stays_what_it_is(write: Write, tmp_path: Path) -> None:
    args = yaml.safe_load((REPOSITORY / "configs" / HAND).read_text())["args"]
    whole = {
        "num_gpus": 2,
        "open_instruct": {
            "script": "open_instruct/finetune.py", "deepspeed_config": "zero2_fp32_comm",
            "args": {**args, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
        },
    }  # fmt: skip
    world = tuned.outlook(write("wrapped.yaml", yaml.safe_dump(whole)))
    told = proposed(world, packing=True, per_device=32, deepspeed="zero2")
    same_as_overrides(world, told, tmp_path / "tuned.yaml")
    assert "deepspeed_config: zero2 " in (tmp_path / "tuned.yaml").read_text()


def test_upstreams_flat_file_becomes_a_stage_file(write: Write, tmp_path: Path) -> None:
    args = yaml.safe_load((REPOSITORY / "configs" / HAND).read_text())["args"]
    flat = {**args, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    world = tuned.outlook(write("flat.yaml", yaml.safe_dump(flat)))
    told = proposed(world, packing=True, per_device=32)
    proposal.write(told, tmp_path / "tuned.yaml")
    found = config.load(tmp_path / "tuned.yaml")
    assert found.shape == "stage" and found.args["packing"] is True
    assert {**found.args, "learning_rate": "5e-6"} == {**flat, **{
        "packing": True, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 2,
    }}  # fmt: skip
    assert not errors(stage.judge(found).findings)


def test_a_file_of_ones_own_is_not_overwritten(write: Write, tmp_path: Path) -> None:
    source = write("mine.yaml", "stage: sft\n")
    with pytest.raises(UsageError):
        proposal.require_free(source, source)
    ours = write("ours.yaml", "# Tuned by launch: x\n")
    proposal.require_free(ours, source)
    proposal.require_free(tmp_path / "new.yaml", source)


@pytest.mark.parametrize("name", ["new.yaml", "a/b/new.yaml", "ours.yaml"])
def test_whether_a_file_can_be_written_is_found_out_without_a_trace(
    write: Write, tmp_path: Path, name: str
) -> None:
    source = write("mine.yaml", "stage: sft\n")
    write("ours.yaml", "# Tuned by launch: x\n")
    before = {path: path.read_text() for path in tmp_path.rglob("*")}
    proposal.require_free(tmp_path / name, source)
    assert {path: path.read_text() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("place", ["/proc/x.yaml", "/proc/a/x.yaml", "mine.yaml/x.yaml", "x" * 250])
def test_a_file_that_cannot_be_written_is_refused(write: Write, tmp_path: Path, place: str) -> None:
    """Permissions do not tell: root may write all that it likes, but not there."""
    source = write("mine.yaml", "stage: sft\n")
    with pytest.raises(NotReady) as refused:
        proposal.require_free(tmp_path / place, source)
    assert [finding.code for finding in refused.value.findings] == ["unwritable-file"]
    assert list(tmp_path.iterdir()) == [source]


# --- from the command line ------------------------------------------------------------------------

TRAINER = Path(__file__).with_name("tune_trainer.py")
_BEGIN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-u", {trainer!r}, *sys.argv[1:]])
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A machine with two cards, and an interpreter whose training is made up."""
    with made(tmp_path / "world") as one:
        smi = Smi(one.root / "smi")
        smi.cards(0, 0)
        one.environ["PATH"] = f"{smi.folder}:{os.environ['PATH']}"
        one.cuda_torch()
        (one.root / "begin.py").write_text(_BEGIN.format(trainer=str(TRAINER)))
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(one.root)
        yield one


class Trials:
    """Trials without a process: `launch` runs here, and each is as `scene` has it. `started` in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.scene = capsys, dict[str, Any]()
        self.started: list[str] = []
        monkeypatch.setattr(measurement, "measure", self.measure)

    def launch(self, *words: str, **scene: Any) -> tuple[int, str, str]:
        """The exit code, and what was written to stdout and stderr."""
        self.scene = scene
        self.capsys.readouterr()
        code = cli.main(list(words))
        return (code, *self.capsys.readouterr())

    def measure(
        self,
        request: Request,
        variant: Variant,
        *,
        steps: int,
        repeat: int,
        timeout_s: float,
        **_: Any,
    ) -> Sample:
        given = dict(text.split("=", 1) for text in (*request.overrides, *variant.overrides))
        rows = int(given.get("batch.per_device", 2))
        checkpointing = given.get("args.gradient_checkpointing") != "false"
        compiled, workers = (
            given.get("args.torch_compile") == "true",
            "args.dataloader_num_workers" in given,
        )
        about = f"rows={rows},checkpointing={checkpointing},compile={compiled},workers={workers}"
        nth = self.started.count(about)
        self.started.append(about)
        whole = Sample(variant=variant.name, repeat=repeat, gradients="true", seconds=4.0)
        if call := self.scene.get("first"):
            call()
        for cause in ("crash", "refused", "timeout", "hang"):
            if self.scene.get(cause, "no") in about:
                return replace(whole, cause=cause, reason="this setting does not work")  # type: ignore[arg-type]
        peak = 5.0 + rows * (2.0 if checkpointing else 6.0)
        if peak > self.scene.get("room", 60.0):
            return replace(whole, cause="oom", reason="CUDA out of memory")
        step = (0.05 / rows + 0.02) * (1.3 if checkpointing else 1.0) * (0.97 if compiled else 1.0)
        if speeds := self.scene.get("speeds"):
            known = speeds.get(about, [1.0])
            step = 0.035 / known[min(nth, len(known) - 1)]
        loss = 3.0 if self.scene.get("moves", "no") in about else 2.0
        figures = {
            SPEED: 100 / step, "seconds_per_step": 4 * step, "peak_allocated_gib": peak,
            "tokens_per_step": 100.0 * int(given.get("batch.global", 8)),
        }  # fmt: skip
        return replace(whole, metrics=figures, curve=(Step(400.0, 400.0, loss),) * steps)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trials:
    return Trials(monkeypatch, capsys)


def words_for(
    world: World, *words: str, rows: tuple[str, ...] = ("--row-tokens", "100:900")
) -> list[str]:
    path = world.config(max_length=1024, gradient_checkpointing=True, bf16=True)
    whole = yaml.safe_load(path.read_text())
    whole |= {"batch": {"global": 8, "per_device": 2}, "probe": {"profile": 2}}
    path.write_text(yaml.safe_dump(whole))
    python = str(world.root / "python")
    return ["tune", str(path), "--python", python, "--gpus", "2", "--steps", "3", *rows, *words]


def record(world: World) -> dict[str, Any]:
    found = [known for _, known in campaign.records("tune", tune.FILE, world.runs)]
    return found[0] if found else {}


def started(world: World) -> list[str]:
    path = world.root / "started"
    return path.read_text().splitlines() if path.exists() else []


@needs_trl
def test_the_whole_way_with_real_processes(world: World) -> None:
    done = world.launch(
        *words_for(world), env={"TUNE_SCENE": json.dumps({"crash": "compile=True"})}
    )
    assert done.returncode == 0, done.stderr
    known = record(world)
    assert known["trials"][0]["status"] == "ok" and known["state"] == "finished"
    assert known["trials"][0]["purpose"] == "baseline"
    best, place = known["best"], Path(known["proposal"])
    assert best["speed_ratio"] > 1.5 and not best["settings"].get("compile")
    assert "tuned: launch sft" in done.stdout and "tokens/s per GPU" in done.stdout
    assert "trial 1: the file as it is written" in done.stderr
    assert (Path(known["folder"]) / "bench.html").is_file()
    # what is left of the budget tells how far the two scatter
    chosen = next(one for one in known["trials"] if one["settings"] == best["settings"])
    rows = {row["variant"]: row for row in known["bench"]}
    for name in (known["trials"][0]["name"], chosen["name"]):
        assert rows[name][SPEED]["n"] == 3
    assert [name for name, row in rows.items() if row["recommended"]] == [chosen["name"]]
    # a step whose kernels are recorded would tell no speed: trials record none
    assert "profile" not in (Path(known["trials"][0]["sample"]["run"]) / "stage.yaml").read_text()
    # and the proposal runs as it is
    ran = world.launch("sft", str(place), "--python", str(world.root / "python"), "--gpus", "2")
    assert ran.returncode in (0, 1), ran.stderr
    assert started(world)[-1].startswith(f"rows={best['settings']['per_device']},")
    assert world.quiet()


@needs_trl
def test_ctrl_c_ends_it_and_the_same_command_goes_on(world: World, trials: Trials) -> None:
    words = words_for(world)
    running = world.started(*words, env={"TUNE_SCENE": json.dumps({"gates": str(world.root)})})
    until(lambda: len(started(world)) == 1)
    # before anything is measured the same command finds what is under way
    assert record(world)["state"] == "running" and not record(world).get("trials")
    (world.root / "gate-1").touch()
    until(lambda: len(started(world)) == 2)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130 and b"the same command goes on" in out and world.quiet()
    first = record(world)
    assert first["state"] == "interrupted" and len(first["trials"]) == 1
    # what was interrupted has had its part of the budget
    assert first["cut_s"] > 0
    assert first["used_s"] == pytest.approx(first["cut_s"] + first["trials"][0]["seconds"], abs=0.3)
    assert trials.launch(*words)[0] == 0
    known = record(world)
    assert known["folder"] == first["folder"] and known["trials"][:1] == first["trials"]
    tried = [json.dumps(one["settings"]) for one in known["trials"]]
    assert max(map(tried.count, tried)) <= 3
    count = len(trials.started)
    code, _, err = trials.launch(*words, "--resume")
    assert code == 0 and len(trials.started) == count and "--fresh" in err
    assert record(world)["trials"] == known["trials"]
    trials.launch(*words, "--fresh", crash="rows=2,")
    assert record(world)["folder"] != known["folder"] and len(trials.started) > count


@needs_trl
def test_a_trial_whose_command_was_killed_is_ended_before_the_next(
    world: World, trials: Trials
) -> None:
    words = words_for(world, "--budget", "60s")
    running = world.started(*words, env={"TUNE_SCENE": json.dumps({"hang": "rows=2,"})})
    until(lambda: started(world))
    running.kill()
    running.communicate()
    assert record(world)["under_way"]["limit_s"] <= 60
    assert trials.launch(*words)[0] == 0
    known = record(world)
    assert known["trials"][0]["status"] == "ok"
    # it has had its part of the budget
    assert known["cut_s"] > 0 and known["under_way"] is None and world.quiet()


def test_a_killed_trial_costs_what_it_took_and_no_more_than_it_had(tmp_path: Path) -> None:
    lost = functools.partial(tune.killed_seconds, tmp_path, began=1000.0, limit_s=60.0)
    assert lost() == 0
    for name, began in (("1-early", 900), ("2-killed", 1002)):
        run = RunFolder(tmp_path / name)
        run.path.mkdir()
        run.manifest.write_text("{}")
        os.utime(run.manifest, (began, began))
        # how it ended is not known: it may have been the machine
        assert lost() == 0
        run.exit(1).write_text("{}")
        os.utime(run.exit(1), (began + 40, began + 40))
    assert lost() == 42
    os.utime(run.exit(1), (9000, 9000))
    assert lost() == 60


@needs_trl
def test_out_of_memory_and_another_loss_end_their_trials_alone(
    world: World, trials: Trials
) -> None:
    assert trials.launch(*words_for(world), room=20.0, moves="workers=True")[0] == 0
    known = record(world)
    assert {"oom", "loss changed"} <= {one["status"] for one in known["trials"]}
    assert known["best"]["peak_allocated_gib"] <= 20.0
    assert known["best"]["settings"]["workers"] == 0


@needs_trl
def test_one_lucky_run_proposes_nothing(world: World, trials: Trials) -> None:
    lucky = "rows=4,checkpointing=False,compile=False,workers=False"
    code, out, err = trials.launch(
        *words_for(world), crash="compile=True", speeds={lucky: [1.1, 1.03, 0.95]}
    )
    assert code == 0, err
    known = record(world)
    best = known["best"]
    assert not best["changes"] and best["speed_ratio"] == 1 and not best["gains"]
    assert not any(row["recommended"] for row in known["bench"])
    assert "nothing that was tried is faster" in out
    assert "what follows changes nothing" in Path(known["proposal"]).read_text()
    assert not any(one["purpose"] == "gain" for one in known["trials"])


@needs_trl
def test_what_could_not_be_started_is_tried_again(world: World, trials: Trials) -> None:
    code, out, _ = trials.launch(*words_for(world), refused="rows")
    assert code == 5 and "the file as written cannot be started" in out
    before = record(world)
    assert [one["status"] for one in before["trials"]] == ["refused"]
    assert trials.launch(*words_for(world))[0] == 0
    after = record(world)
    assert after["folder"] == before["folder"] and after["trials"][0]["status"] == "ok"


@needs_trl
def test_gpus_that_another_took_are_no_settings_fault(world: World, trials: Trials) -> None:
    def taken() -> None:
        if len(trials.started) == 2:
            smi = Smi(world.root / "smi")
            smi.cards(0, 0)
            smi.processes((0, 4242, 90_000))
            trials.scene["refused"] = "rows"

    code, _, err = trials.launch(*words_for(world), first=taken)
    assert code == 5 and "gpus-taken" in err
    assert [one["status"] for one in record(world)["trials"]] == ["ok"]


@needs_trl
def test_how_long_rows_are_is_learned_by_the_first_trial(world: World, trials: Trials) -> None:
    # packing is a lever as soon as rows are known; and a card may not tell its memory
    Smi(world.root / "smi").cards(0, 0, memory="[N/A]")
    words = words_for(world, "batch.global=256", "batch.per_device=64", rows=())
    assert trials.launch(*words, room=1e9)[0] == 0
    known = record(world)
    assert known["rows"]["mean"] == 100 and not known["rows"]["assumed"]
    assert known["card"]["gib"] is None and known["grid"]["too_large"] == 0
    assert "packing" in {one["name"] for one in known["levers"]}
    first = known["trials"][0]
    assert first["settings"]["packing"] == "off" and first["overrides"] == []
    count = len(trials.started)
    trials.launch(*words, room=1e9)
    assert record(world)["trials"] == known["trials"] and len(trials.started) == count


@needs_trl
def test_what_the_budget_ended_is_tried_again_with_a_larger_one(
    world: World, trials: Trials
) -> None:
    words = words_for(world)
    code, out, _ = trials.launch(*words, "--budget", "17s", timeout="rows=2,")
    known = record(world)
    assert code == 4 and "nothing to propose" in out
    assert [(one["status"], one["cut"]) for one in known["trials"]] == [("timeout", True)]
    assert trials.launch(*words, "--budget", "3m")[0] == 0
    known = record(world)
    assert (known["trials"][0]["purpose"], known["trials"][0]["status"]) == ("baseline", "ok")


@needs_trl
def test_a_file_that_crashes_is_said_to(world: World, trials: Trials) -> None:
    code, out, _ = trials.launch(*words_for(world), crash="rows=2,")
    known = record(world)
    assert code == 4 and "does not train" in out
    assert len(known["trials"]) == 1 and known["proposal"] is None


@needs_trl
def test_what_can_no_longer_be_written_loses_nothing_that_was_measured(
    world: World, trials: Trials
) -> None:
    place = world.root / "results" / "tuned.yaml"

    def block() -> None:
        if not place.parent.exists():
            place.parent.write_text("in the way")

    code, out, err = trials.launch(*words_for(world, "-o", str(place)), first=block)
    assert code == 5 and "unwritable-file" in err and "another -o" in out
    assert record(world)["state"] == "finished" and record(world)["proposal"] is None
    # the same with another name needs no trial
    count = len(trials.started)
    assert trials.launch(*words_for(world, "-o", str(world.root / "tuned.yaml")))[0] == 0
    assert len(trials.started) == count and Path(record(world)["proposal"]).is_file()


@needs_trl
def test_json_is_the_record(world: World, trials: Trials) -> None:
    code, out, _ = trials.launch(*words_for(world, "--format", "json", "--budget", "30s"))
    shown = json.loads(out)
    assert code == 0 and shown["command"] == "tune" and shown["data"]["budget_s"] == 30
    assert shown["data"]["trials"] == record(world)["trials"]


@needs_trl
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--cpu",), 2, "--gpus says nothing"),
        (("--budget", "soon"), 2, "no time"),
        (("--budget", "9s"), 2, "not even one trial"),
        (("--gpu-memory", "-1"), 2, "more than 0"),
        (("-o", "stage.yaml/tuned.yaml"), 5, "is a file"),
        (("-o", "/proc/tuned.yaml"), 5, "unwritable-file"),
        (("--gpus", "3"), 5, "3 GPU(s)"),
        (("--gpus", "0"), 5, "--cpu"),
        (("nonsense=1",), 3, "nonsense"),
        (("--row-tokens", "9:1"), 2, "MEAN:MAX"),
        (("-o", "stage.yaml"), 2, "no file that `tune` wrote"),
        (("batch.global=5",), 3, "5"),
    ],
)
def test_what_makes_no_sense_is_refused(
    world: World, trials: Trials, words: tuple[str, ...], code: int, said: str
) -> None:
    found, _, err = trials.launch(*words_for(world, *words))
    assert (found, said in err) == (code, True), err
    assert not trials.started and not list(world.root.glob("runs/*tune*"))
