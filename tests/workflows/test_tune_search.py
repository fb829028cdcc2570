"""The search for the fastest setting, on machines that are not there."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tuned
from fake_world import needs_trl
from tuned import A100, H200, RTX4090, Machine, run_trial

from launcher.stage.options import find_deepspeed_file
from launcher.workflows.tune.search import Search, SettingRuns, Trial
from launcher.workflows.tune.space import Candidate, Space

pytestmark = needs_trl

HAND = "bench/hand_recipe.yaml"
Failure = Callable[[Candidate], Trial | None]


@functools.cache
def hand() -> Space:
    return tuned.outlook(HAND)


@functools.cache
def dpo() -> Space:
    model = "model_name_or_path=meta-llama/Llama-3.1-8B"
    plain = "packing=false use_liger_kernel=false expect.packing=any expect.liger=any".split()
    path = "llama/llama31_8b_dpo_10pct.yaml"
    return tuned.outlook(path, model, *plain, gpus=8, rows="600:2048", card="A100", gib=79.2)


def lora() -> Space:
    words = ("gradient_checkpointing=true", "expect.liger=any")
    return tuned.outlook(
        "lora/sft_qwen7b.yaml", *words, gpus=1, rows="400:1000", card="4090", gib=23.6
    )


def best_of(search: Search) -> SettingRuns:
    assert search.best is not None
    return search.best


def fail_or_run(space: Space, machine: Machine, failure: Failure, trials: int) -> Search:
    """A search; `failure` may end a trial in place of what the machine does."""
    search = tuned.search_of(space)
    while len(search.results) < trials:
        candidate = search.propose()
        if candidate is None:
            break
        search.learn(failure(candidate) or machine.runs(space, candidate))
    return search


# True memory differs from the plan's by other arithmetic and the factor. Where the fastest setting
# is one that the plan takes for too large, the search does not try it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("space_of", "machine", "least_share"),
    [
        pytest.param(hand, H200, 0.93, id="7B on two H200"),
        pytest.param(hand, replace(H200, memory=1.3), 0.93, id="more memory than planned"),
        pytest.param(dpo, replace(A100, link=3e9, hidden=0.0), 0.93, id="DPO on slow links"),
        pytest.param(lora, replace(RTX4090, memory=1.2), 0.8, id="LoRA on a small card"),
    ],
)
def test_ten_trials_find_a_setting_near_the_best_of_all(
    space_of: Callable[[], Space], machine: Machine, least_share: float
) -> None:
    space = space_of()
    search = tuned.run_search(space, machine, noise=(0.008, -0.01, 0.004))
    assert len(search.results) <= 10
    assert tuned.reached(space, machine, search) >= least_share
    first, second, *_ = search.runs
    assert first.candidate.key == search.base.key
    assert first.candidate.purpose == "baseline"
    assert "expected" in second.candidate.why
    for run in search.runs:
        assert run.candidate.why
        assert run.learned


def test_the_setting_that_one_h200_was_tuned_to_is_found_again() -> None:
    """docs/benchmarks.md: 12,963 to 107,532 tokens/s in two trials."""
    model = "model_name_or_path=Qwen/Qwen2.5-0.5B"
    plain = "use_liger_kernel=false batch.per_device=8 expect.liger=any".split()
    search = tuned.search_of(tuned.outlook(HAND, model, *plain, gpus=1, rows="301:1103"))
    search.learn(run_trial(search.base, 12_963, step=128 * 301 / 12_963, peak=10.2))
    second = search.propose()
    assert second is not None
    expected = {"packing": True, "per_device": 128, "checkpointing": False}
    assert expected.items() <= second.settings.items()

    search.learn(run_trial(second, 107_532, step=128 * 301 / 107_532, peak=45.3))
    assert best_of(search).candidate.key == second.key


def test_out_of_memory_rules_out_all_that_needs_as_much() -> None:
    peaks: list[float] = []

    def run_out_of_memory(candidate: Candidate) -> Trial | None:
        # the estimate is wrong by a fifth where nothing is computed again
        if candidate.settings["checkpointing"] or (candidate.short or 0) <= 95:
            return None
        peaks.append(candidate.peak or 0)
        return run_trial(candidate, status="oom", seconds=40, reason="CUDA out of memory")

    search = fail_or_run(hand(), H200, run_out_of_memory, trials=12)
    assert peaks
    assert peaks == sorted(set(peaks), reverse=True)
    assert search.best is not None
    assert search.summary()["too_large"] > 0


def test_a_setting_without_room_for_its_longest_rows_is_not_kept() -> None:
    search = tuned.search_of(hand(), room=140.0)
    search.learn(H200.runs(hand(), search.base))
    large = tuned.candidate_with(
        search, packing=True, checkpointing=False, deepspeed="zero1", per_device=16
    )
    assert large.peak is not None
    assert large.short is not None
    assert large.short < large.peak < 140 * 0.92

    # a trial sees few rows: by what share it exceeds the estimate, the longest rows do too
    trial = search.learn(run_trial(large, 1e6, peak=large.short * 0.93 * 140 / large.peak))
    assert trial.ok
    assert "not kept: with its longest rows" in trial.learned
    assert best_of(search).candidate.key == search.base.key


def test_a_measured_peak_corrects_the_estimates_of_its_kind() -> None:
    search = tuned.search_of(hand())
    other = tuned.candidate_with(search, per_device=32)
    before = search.peak(other)
    assert before is not None
    assert search.base.short is not None
    search.learn(run_trial(search.base, 1000, peak=search.base.short * 1.2))
    assert search.peak(other) == pytest.approx(1.2 * before)


def test_of_several_changes_the_one_that_crashes_is_found() -> None:
    crashed: list[Candidate] = []

    def crash_when_packed(candidate: Candidate) -> Trial | None:
        if not candidate.settings["packing"]:
            return None
        crashed.append(candidate)
        return run_trial(candidate, status="crash", reason="ValueError: cannot be packed")

    search = fail_or_run(hand(), H200, crash_when_packed, trials=14)
    assert 1 <= len(crashed) <= 3
    assert not best_of(search).candidate.settings["packing"]
    packed = [candidate for candidate in search.grid.values() if candidate.settings["packing"]]
    assert not any(map(search.eligible, packed))


@pytest.mark.slow
def test_a_verdict_that_names_the_lever_rules_it_out_at_once() -> None:
    def leak(candidate: Candidate) -> Trial | None:
        settings = candidate.settings
        if settings["packing"] and settings["attention"] == "flash_2":
            reason = "packing is leaking"
            return run_trial(candidate, status="contract", blamed=("packing",), reason=reason)
        return None

    search = fail_or_run(dpo(), A100, leak, trials=12)
    (leaking,) = [run for run in search.runs if run.status == "contract"]
    assert "not tried again" in leaking.learned
    # what leaks under one attention may not under the other
    assert search.eligible(tuned.candidate_with(search, packing=True, attention="torch"))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("crash", "nothing can be compared with the file as written (crash): so it is"),
        ("timeout", "did not end within it"),
    ],
)
def test_a_file_that_does_not_train_ends_the_search(status: Any, reason: str) -> None:
    search = tuned.search_of(hand())
    search.learn(run_trial(search.base, reason="so it is", status=status))
    assert search.propose(0.0) is None
    assert reason in (search.stopped or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The seconds of a step on so many cards; `zero3` are the linears of a ZeRO-3 file."""

    config: str
    words: str = ""
    zero3: str | None = None
    gpus: int = 2
    seconds: float


PACKED = "packing=true expect.packing=isolated"
UNCHECKPOINTED = f"{PACKED} gradient_checkpointing=false"
SFT = "hand_recipe"
DPO = "hand_recipe_dpo"
TRL = "hand_recipe_trl"
ROWS_ON_H200 = {SFT: "301:1103", DPO: "272:1027", TRL: "303:1114"}
ROWS_ON_H100 = {SFT: "303:1114", DPO: "308:1109", TRL: "303:1114"}


def expected_seconds(folder: Path, case: Measured, card: str, rows: Mapping[str, str]) -> float:
    words = case.words.split()
    if case.zero3 is not None:
        content = json.loads(find_deepspeed_file("zero3").read_text(encoding="utf-8"))
        efficient = case.zero3 == "efficient"
        content["zero_optimization"]["memory_efficient_linear"] = efficient
        path = folder / "zero3.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        words.append(f"deepspeed={path}")
    config = f"bench/{case.config}.yaml"
    space = tuned.outlook(config, *words, rows=rows[case.config], gpus=case.gpus, card=card)
    return space.candidate(space.base).seconds


@pytest.mark.parametrize(
    "case",
    [
        Measured(config=SFT, seconds=4.715),
        Measured(config=SFT, words=f"{UNCHECKPOINTED} deepspeed=zero2", seconds=2.045),
        Measured(config=SFT, words=f"{UNCHECKPOINTED} batch.per_device=32", seconds=1.860),
        Measured(config=DPO, seconds=12.817),
        Measured(
            config=DPO,
            words=f"{PACKED} activation_memory_budget=1.0 deepspeed=zero2 batch.per_device=8",
            seconds=3.249,
        ),
        Measured(config=TRL, words=PACKED, zero3="plain", seconds=11.17),
    ],
)
def test_a_step_takes_about_what_it_took_on_two_h200(tmp_path: Path, case: Measured) -> None:
    """docs/benchmarks.md: good enough to put settings in order."""
    expected = expected_seconds(tmp_path, case, "H200", ROWS_ON_H200)
    assert expected == pytest.approx(case.seconds, rel=0.2)


@pytest.mark.parametrize(
    "case",
    [
        Measured(config=SFT, zero3="efficient", seconds=7.2),
        Measured(config=SFT, words=f"{PACKED} batch.per_device=64", zero3="efficient", seconds=2.5),
        Measured(config=SFT, words=f"{PACKED} batch.per_device=64", zero3="plain", seconds=2.0),
        Measured(config=DPO, zero3="efficient", seconds=42.3),
        Measured(config=DPO, words=f"{PACKED} batch.per_device=8", zero3="plain", seconds=10.6),
        Measured(config=TRL, words=f"{PACKED} batch.global=32", zero3="efficient", seconds=3.44),
        Measured(
            config=TRL, words=f"{PACKED} batch.global=256", zero3="plain", gpus=4, seconds=10.45
        ),
    ],
)
def test_a_step_takes_about_what_it_took_on_h100(tmp_path: Path, case: Measured) -> None:
    """docs/benchmarks.md: under ZeRO-3, where the host's time for a micro-batch counts."""
    expected = expected_seconds(tmp_path, case, "H100", ROWS_ON_H100)
    assert expected == pytest.approx(case.seconds, rel=0.25)


def test_no_trial_is_begun_that_would_not_end_within_the_budget() -> None:
    search = tuned.search_of(hand())
    left = 300.0
    while True:
        candidate = search.propose(left)
        if candidate is None:
            break
        expected = search.trial_seconds(candidate)
        trial = H200.runs(hand(), candidate)
        if search.runs:
            assert expected <= left
            assert trial.sample.seconds == pytest.approx(expected, rel=0.25)
        left -= trial.sample.seconds
        search.learn(trial)

    assert left >= 0
    undone = r"the budget: .+ expected, .+ of it takes about \d+ s and \d+ s are left: .+"
    assert re.fullmatch(undone, search.stopped or "")


@dataclass
class Compared:
    """A search in which the file as written and others have had one run, and none is left."""

    search: Search
    tried: Sequence[Candidate]

    def repeats(self, speeds: Mapping[int, float]) -> list[int]:
        """Which of those tried are run once more, in turn, until the search ends."""
        keys = [candidate.key for candidate in self.tried]
        order: list[int] = []
        while True:
            candidate = self.search.propose()
            if candidate is None:
                return order
            assert candidate.purpose == "repeat"
            assert len(order) < 20
            order.append(keys.index(candidate.key))
            self.search.learn(run_trial(candidate, speeds[order[-1]]))

    @property
    def best(self) -> int:
        keys = [candidate.key for candidate in self.tried]
        return keys.index(best_of(self.search).candidate.key)


def compare(*speeds: float) -> Compared:
    search = tuned.search_of(hand(), threshold=10.0)
    tried = [search.base]
    for size in (16, 32)[: len(speeds) - 1]:
        tried.append(tuned.candidate_with(search, packing=True, per_device=size))
    for candidate, speed in zip(tried, speeds, strict=True):
        search.learn(run_trial(candidate, speed))
    return Compared(search, tried)


def test_what_is_left_of_the_budget_repeats_the_file_and_the_best_in_turns() -> None:
    compared = compare(1000, 1800, 2000)
    assert compared.repeats({0: 1010, 2: 1980}) == [2, 0, 0, 2]
    best = best_of(compared.search)
    assert best.speed == 1980
    assert best.spread.n == 3
    assert len(compared.search.results) == 3
    assert "could gain" in (compared.search.stopped or "")


def test_a_lucky_run_of_the_file_does_not_hide_what_is_faster() -> None:
    compared = compare(1000, 800, 900)
    assert compared.repeats({0: 850, 2: 905}) == [2, 0, 0, 2]
    assert compared.best == 2


@pytest.mark.parametrize(
    ("status", "best", "order"),
    [
        ("oom", 1, [1, 0, 0, 1]),
        # the setting did not cause these, and they count as its turn
        ("timeout", 2, [0, 0, 2]),
        ("refused", 2, [0, 0, 2]),
    ],
)
def test_a_repeat_that_fails_counts_against_its_setting(
    status: Any, best: int, order: list[int]
) -> None:
    compared = compare(1000, 1800, 2000)
    again = compared.search.propose()
    assert again is not None
    assert again.key == compared.tried[2].key
    compared.search.learn(run_trial(again, 2000, status=status, reason="not this time"))
    assert compared.best == best
    assert compared.repeats({0: 1000, 1: 1800, 2: 2000}) == order


def test_only_what_ends_within_the_budget_is_repeated() -> None:
    search = tuned.search_of(hand(), threshold=10.0)
    fast = tuned.candidate_with(search, packing=True, per_device=32)
    search.learn(run_trial(search.base, 1000, step=10.0, seconds=150))
    search.learn(run_trial(fast, 2000, step=5.0, seconds=90))
    assert search.trial_seconds(fast) == 90
    assert search.trial_seconds(search.base) > 100
    assert search.propose(89) is None
    assert "once more: run 2 takes about 90 s, 89 s are left" in (search.stopped or "")

    again = search.propose(95)
    assert again is not None
    assert again.key == fast.key
    search.learn(run_trial(again, 2000, step=5.0, seconds=92))
    # the file's turn, for which there is no time
    assert search.propose(95) is None
    again = search.propose(200)
    assert again is not None
    assert again.key == search.base.key
