"""Settings side by side: what is asked for, how it is compared, and real comparisons from the CLI."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY, Write
from fake_smi import Smi, uuid
from fake_world import World, made, needs_trl, until
from hypothesis import given
from hypothesis import strategies as st

from launcher import (
    assertions,
    bench,
    bench_plan,
    checkouts,
    comparison,
    evidence,
    measurement,
    measures,
    rundir,
    upstream,
    utilisation,
    variants,
)  # fmt: skip
from launcher.comparison import Sample, Spread, Step, compare, loss_within
from launcher.errors import NotReady, UsageError, usage
from launcher.git import Repository
from launcher.preparation import Request

pytestmark = pytest.mark.slow

# --- what is asked for ----------------------------------------------------------------------------


def overrides(*vary: str, variant: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    return {one.name: one.overrides for one in variants.combinations(vary, variant)}


def test_the_values_of_a_key_are_variants() -> None:
    assert overrides("packing=false,true") == {
        "packing=false": ("packing=false",), "packing=true": ("packing=true",),
    }  # fmt: skip


def test_several_keys_make_every_combination() -> None:
    assert list(overrides("a=1,2", "b=x,y")) == ["a=1, b=x", "a=1, b=y", "a=2, b=x", "a=2, b=y"]


def test_one_setting_of_several_keys_has_a_name() -> None:
    told = overrides(variant=("base:", "packed:packing=true,batch.per_device=2"))
    assert told == {"base": (), "packed": ("packing=true", "batch.per_device=2")}


def test_variants_are_one_axis_beside_the_others() -> None:
    told = overrides("a=1,2", variant=("x:b=1", "y:b=2"))
    assert list(told) == ["x, a=1", "x, a=2", "y, a=1", "y, a=2"]
    assert told["y, a=2"] == ("b=2", "a=2")


def test_one_alone_is_held_against_the_file_as_it_is() -> None:
    assert overrides("packing=true") == {"as written": (), "packing=true": ("packing=true",)}
    assert overrides() == {"as written": ()}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=[a,b],[c]", ["k=[a,b]", "k=[c]"]),
        ("k={a: 1, b: 2},null", ["k={a: 1, b: 2}", "k=null"]),
        ("k='a,b',c", ["k='a,b'", "k=c"]),
        ('k="x]",y', ['k="x]"', "k=y"]),
        ("k=it's,1e-5", ["k=it's", "k=1e-5"]),
        ("k=a=b,c", ["k=a=b", "k=c"]),
    ],
)
def test_commas_in_brackets_and_quotes_are_part_of_the_value(text: str, values: list[str]) -> None:
    assert [one.overrides[0] for one in variants.combinations([text], [])] == values


@pytest.mark.parametrize(
    ("vary", "variant", "words"),
    [
        (["packing"], [], "key=a,b"),
        (["=1,2"], [], "key=a,b"),
        (["a=1,"], [], "empty"),
        (["a=1,1"], [], "twice"),
        (["a=[1,2"], [], "bracket"),
        (["a='1,2"], [], "quote"),
        (["a=1,2", "args.a=3,4"], [], "varied twice"),
        (["a=1,2"], ["x:a=1", "y:a=2"], "varied twice"),
        (["a=1,2", "open_instruct.args.a=3,4"], [], "varied twice"),
        ([], ["packing=true"], "needs a name"),
        ([], ["x:packing"], "`packing`"),
        ([], ["x:a=q_proj,v_proj"], "`v_proj`"),
        ([], ["x:a=1", "x:a=2"], "two variants"),
        ([f"k{n}=1,2" for n in range(7)], [], "128 variants"),
        ([f"k{n}=0,1,2,3,4,5,6,7,8,9" for n in range(12)], [], f"{10**12} variants"),
    ],
)
def test_what_makes_no_sense_is_refused(vary: list[str], variant: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=r".") as refused:
        variants.combinations(vary, variant)
    assert words in str(refused.value)


@given(st.lists(st.text(alphabet="abc1.-+ ", min_size=1), min_size=1, max_size=5))
def test_pieces_of_plain_texts_come_back(texts: list[str]) -> None:
    assert variants.pieces(",".join(texts)) == texts


@given(st.text(alphabet="ab,[]{}'\"= "))
def test_pieces_lose_nothing(text: str) -> None:
    try:
        found = variants.pieces(text)
    except ValueError:
        return
    assert ",".join(found) == text


def test_times() -> None:
    assert [bench.seconds(t) for t in ("90", "90s", "10m", "1h30m", "0.5")] == [
        90,
        90,
        600,
        5400,
        0.5,
    ]
    # no timer takes a longer one
    for text in ("", "0", "ten", "1d", "-5", "99999999999", "9" * 400):
        with pytest.raises(UsageError):
            bench.seconds(text)


# --- how it is compared ---------------------------------------------------------------------------


def sample(
    name: str, speed: float | None = 100.0, loss: float = 2.0, steps: int = 10, tokens: float = 50.0,
    **more: Any,
) -> Sample:  # fmt: skip
    curve = tuple(Step(tokens, tokens, loss) for _ in range(steps))
    figures = {"tokens_per_second_per_gpu": speed, "peak_allocated_gib": 10.0, "mfu": 0.4}
    return Sample(variant=name, curve=curve, metrics=figures, **more)


def test_faster_and_the_same_loss_is_recommended() -> None:
    rows = compare([sample("a"), sample("a", 102), sample("b", 150), sample("b", 148)])
    assert [row.standing for row in rows] == ["baseline", "faster"]
    assert rows[1].recommended and not rows[0].recommended
    assert rows[1].speed_ratio == pytest.approx(149 / 101)


def test_faster_with_another_loss_is_marked_and_not_recommended() -> None:
    rows = compare([sample("a"), sample("b", 300, loss=2.2), sample("c", 150)])
    assert [row.standing for row in rows] == ["baseline", "loss changed", "faster"]
    assert [row.recommended for row in rows] == [False, False, True]
    assert "+10.0%" in rows[1].why and rows[1].loss_change == pytest.approx(0.1)
    assert compare([sample("a"), sample("b", 300, loss=2.2)], tolerance=0.11)[1].recommended


def test_a_better_loss_is_another_loss() -> None:
    assert compare([sample("a"), sample("b", 300, loss=1.5)])[1].standing == "loss changed"


def test_ranges_that_overlap_show_no_difference() -> None:
    rows = compare([sample("a", 100), sample("a", 120), sample("b", 118), sample("b", 130)])
    assert rows[1].standing == "no difference" and not rows[1].recommended
    rows = compare(
        [sample("a", 100 + n) for n in range(3)] + [sample("b", n) for n in (101.5, 120, 121)]
    )
    assert rows[1].standing == "no difference" and rows[1].chance == 0.1
    assert "+18.8% by the medians, which chance alone does in 10% of cases" in rows[1].why


def test_what_each_step_took_is_kept_and_judged_by(tmp_path: Path) -> None:
    """A burst in one trial of three hides nothing, where steps are known."""
    quiet, burst = [0.01] * 8, [0.01] * 5 + [0.03] * 3
    runs = [
        sample(name, 8 / sum(pace) / share, pace=tuple(share * one for one in pace))
        for name, share in (("a", 1.0), ("b", 0.9))
        for pace in (quiet, burst if name == "b" else quiet, [1.01 * one for one in quiet])
    ]
    assert Spread.of(run.metrics[comparison.SPEED] for run in runs[3:]).min < 100  # type: ignore[union-attr]
    kept = [Sample.from_json(json.loads(json.dumps(run.as_json()))) for run in runs]
    assert kept == runs
    row = compare(kept)[1]
    assert (row.standing, row.chance) == ("faster", 0.05)


def test_slower() -> None:
    rows = compare([sample("a", 100), sample("a", 101), sample("b", 50), sample("b", 51)])
    assert rows[1].standing == "slower"


def test_one_run_each_has_no_spread_to_tell_by() -> None:
    assert compare([sample("a", 100), sample("b", 102)])[1].standing == "no difference"
    assert compare([sample("a", 100), sample("b", 104)])[1].standing == "faster"
    assert "no spread" in compare([sample("a", 100), sample("b", 104)])[1].why


def test_two_runs_each_are_apart_by_chance_too_often() -> None:
    def judged(ratio: float, runs: int) -> str:
        speeds = [sample("a", 100 + n / 10) for n in range(runs)]
        return compare(
            [*speeds, *(sample("b", 100 * ratio + n / 10) for n in range(runs))]
        )[1].standing  # fmt: skip

    assert [judged(1.02, runs) for runs in (2, 3)] == ["no difference", "faster"]
    assert [judged(1.04, runs) for runs in (2, 3)] == ["faster", "faster"]


def test_a_loss_before_the_first_update_tells_nothing_of_training() -> None:
    def sized(name: str, speed: float, tokens: float, steps: int = 10) -> Sample:
        return sample(name, speed, tokens=tokens, steps=steps)

    rows = compare([sized("a", 100, 50), sized("b", 300, 600), sized("c", 150, 50)])
    assert [row.standing for row in rows] == ["baseline", "unproven", "faster"]
    assert "first step of b" in rows[1].why and "--steps" in rows[1].why
    assert [row.recommended for row in rows] == [False, False, True]
    # what another variant has not seen is compared of none
    rows = compare([sized("a", 100, 50), sized("b", 300, 50), sized("c", 10, 20, steps=2)])
    assert [row.standing for row in rows] == ["baseline", "unproven", "unproven"]
    # another loss is the graver thing
    rows = compare([sized("a", 100, 50), sample("b", 300, loss=3, tokens=600)])
    assert rows[1].standing == "loss changed"


def test_what_is_wrong_with_the_first_is_said_too() -> None:
    (row,) = compare(
        [sample("a", unproved=("packing",)), sample("a", cause="crash", reason="bang")]
    )
    assert row.standing == "baseline"
    assert "packing" in row.why and "1 of its runs failed: crash: bang" in row.why


def test_what_a_faster_one_does_before_its_steps_is_told() -> None:
    def begins(name: str, speed: float, *moments: float) -> list[Sample]:
        figures = {comparison.SPEED: speed, "seconds_per_step": 100 / speed}
        curve = (Step(50, 50, 2.0), Step(50, 50, 2.0))
        return [
            Sample(variant=name, curve=curve, metrics={**figures, "seconds_before_steps": moment})
            for moment in moments
        ]

    first = begins("a", 100, 10, 11)
    # a step of 0.8 s saves 0.2 s
    rows = compare([*first, *begins("b", 125, 14.4, 14.6)])
    assert rows[1].standing == "faster" and rows[1].recommended
    assert rows[1].why == "begins 4 s later, which 20 steps make up for"
    for unsure in ((10.5, 20), (11.1, 11.2)):
        assert compare([*first, *begins("b", 125, *unsure)])[1].why == ""


def test_what_failed_or_is_not_what_was_asked_is_never_recommended() -> None:
    rows = compare(
        [
            sample("a"),
            sample("b", 500, cause="oom", reason="CUDA out of memory"),
            sample("c", 500, flaws=("packing is leaking",)),
            sample("d", 500), sample("d", None, cause="crash", reason="bang"),
        ]
    )  # fmt: skip
    assert [row.standing for row in rows] == ["baseline", "failed", "flawed", "flawed"]
    assert rows[1].why == "oom: CUDA out of memory" and "leaking" in rows[2].why
    assert not any(row.recommended for row in rows)


def test_what_is_not_proved_is_never_recommended() -> None:
    rows = compare([sample("a"), sample("b", 300, unproved=("packing",)), sample("c", 150)])
    assert [row.standing for row in rows] == ["baseline", "unproven", "faster"]
    assert "packing" in rows[1].why and rows[2].recommended
    # another loss is the graver thing
    assert (
        compare([sample("a"), sample("b", 9, loss=3, unproved=("x",))])[1].standing
        == "loss changed"
    )


def test_a_first_variant_that_failed_leaves_nothing_to_hold_others_to() -> None:
    rows = compare([sample("a", cause="oom", reason="full"), sample("b")])
    assert [row.standing for row in rows] == ["failed", "unknown"]
    assert not rows[1].recommended


def test_losses_are_compared_over_the_same_tokens() -> None:
    falling = tuple(Step(10, 10, loss) for loss in (4, 3, 2, 1))
    large = (Step(40, 40, 4.0), Step(40, 40, 2.0))
    rows = compare(
        [
            Sample(variant="a", curve=falling, metrics={"tokens_per_second_per_gpu": 1.0}),
            Sample(variant="b", curve=large, metrics={"tokens_per_second_per_gpu": 9.0}),
        ]
    )
    assert rows[0].median("loss_per_token") == pytest.approx(2.5)
    assert rows[1].median("loss_per_token") == pytest.approx(4.0)
    assert [row.steps_within for row in rows] == [4, 1]
    assert "1 steps against 4" in rows[1].why


curves = st.lists(
    st.builds(
        lambda tokens, loss: Step(tokens, tokens, loss), st.floats(1, 1e6), st.floats(0.01, 20)
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@given(curves, st.floats(0.01, 1))
def test_a_mean_loss_lies_within_its_steps(curve: list[Step], share: float) -> None:
    found = loss_within(curve, share * math.fsum(s.tokens for s in curve))
    losses = [step.loss for step in curve]
    assert found is not None and min(losses) - 1e-9 <= found <= max(losses) + 1e-9


@given(curves)
def test_how_tokens_are_cut_into_steps_does_not_matter(curve: list[Step]) -> None:
    """The same losses of the same tokens, in steps half as large."""
    halves = [Step(s.tokens / 2, s.weight / 2, s.loss) for s in curve for _ in range(2)]
    tokens = 0.7 * math.fsum(s.tokens for s in curve)
    assert loss_within(halves, tokens) == pytest.approx(loss_within(curve, tokens))


@given(curves)
def test_beyond_its_end_a_curve_says_nothing(curve: list[Step]) -> None:
    assert loss_within(curve, 1.1 * math.fsum(s.tokens for s in curve)) is None


@given(st.lists(st.floats(1, 1e6), min_size=1), st.lists(st.floats(1, 1e6), min_size=1))
def test_ranges_are_apart_both_ways_or_not_at_all(left: list[float], right: list[float]) -> None:
    one, other = Spread.of(left), Spread.of(right)
    assert one and other and one.apart(other) == other.apart(one)
    assert not one.apart(one) and one.min <= one.median <= one.max and one.n == len(left)


def test_a_sample_survives_its_record() -> None:
    one = sample("a", cause="oom", reason="x", flaws=("y",), run="/r", seconds=1.5, repeat=3)
    assert Sample.from_json(json.loads(json.dumps(one.as_json()))) == one


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss<=1%", True), ("loss<=0.4%", False), ("loss <= 1.01", True),
        ("tokens_per_second>=1.5", True), ("tokens_per_second>=50%", True),
        ("tokens_per_second>1.5", False), ("peak_memory<=1.0", True), ("mfu>=40%", True),
        ("mfu>0.4", False), ("seconds_per_step<1", None),
    ],
)  # fmt: skip
def test_assertions(text: str, holds: bool | None) -> None:
    rows = compare([sample("a"), sample("b", 150, loss=1.99)])
    assert assertions.assertion(text).holds(rows[1], rows[0]) is holds


@pytest.mark.parametrize("text", ["loss", "loss=1", "los<1", "loss<=1%%", "loss<=x", "<1", ""])
def test_what_cannot_be_asserted_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be asserted"):
        assertions.assertion(text)


def test_an_assertion_speaks_of_the_others_or_of_all() -> None:
    rows = compare([sample("a"), sample("b", 90), sample("c", cause="oom")])
    asserted = [assertions.assertion(text) for text in ("tokens_per_second>=1", "mfu>=50%")]
    told = [(one.text, one.variant, one.unknown) for one in assertions.broken(asserted, rows)]
    assert told == [
        ("tokens_per_second>=1", "b", False), ("tokens_per_second>=1", "c", True),
        ("mfu>=50%", "a", False), ("mfu>=50%", "b", False), ("mfu>=50%", "c", True),
    ]  # fmt: skip


@given(st.integers(2, 130), st.integers(1, 140))
def test_whether_a_step_tells_the_speed_is_known_beforehand(steps: int, profile: int) -> None:
    known: dict[str, Any] = dict.fromkeys(evidence.MEASURED)
    record = evidence.RankRecord(
        rank=0, path=Path("x"), events=(), garbage=0,
        steps=tuple(
            evidence.ProbeStep(
                line=n, step=n, loss=1.0, finite=True, interrupted=n in (profile, profile + 1), **known
            )
            for n in range(1, steps + 1)
        ),
    )  # fmt: skip
    assert measures.tells_speed(steps, profile) == bool(measures.steady(record))


def test_percentiles_are_values_that_were_read() -> None:
    ordered = [n / 100 for n in range(1, 101)]
    assert utilisation.percentile(ordered, 0.5) == 0.5
    assert utilisation.percentile(ordered, 0.95) == 0.95
    assert utilisation.percentile([0.3], 0.95) == 0.3 and utilisation.percentile([], 0.5) is None


# --- from the command line, around a trainer of no brains -----------------------------------------

TRAINER = Path(__file__).with_name("bench_trainer.py")
_BEGIN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-u", {trainer!r}, *sys.argv[1:]])
"""
_BUSY = """#!/bin/sh
case "$*" in
  *--query-gpu=uuid,utilization.gpu*) printf '{first}, 97\\n{second}, 12\\n'
    printf . >> "$FAKE_WORLD/asked" ;;
  *) exec {real} "$@" ;;
esac
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A machine with two cards, and an interpreter whose training is made up."""
    with made(tmp_path / "world") as one:
        smi = Smi(one.root / "smi")
        smi.cards(0, 0)
        busy = one.root / "bin" / "nvidia-smi"
        busy.parent.mkdir()
        real = shlex.quote(str(smi.path))
        busy.write_text(_BUSY.format(first=uuid(0), second=uuid(1), real=real))
        busy.chmod(0o755)
        one.environ["PATH"] = f"{busy.parent}:{os.environ['PATH']}"
        one.cuda_torch()
        (one.root / "begin.py").write_text(_BEGIN.format(trainer=str(TRAINER)))
        yield one


SHORT = ("--steps", "10", "--repeats", "2")


def words_for(world: World, *words: str) -> list[str]:
    path = world.root / "stage.yaml"
    path = path if path.exists() else world.config(learning_rate=0.1)
    return ["bench", str(path), "--python", str(world.root / "python"), *words]


def benched(
    world: World, *words: str, scenes: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """`launch bench` with JSON answers; the exit code and the envelope."""
    env = {"BENCH_SCENES": json.dumps(scenes or {})}
    done = world.launch(*words_for(world, *words, "--format", "json"), env=env)
    return done.returncode, json.loads(done.stdout)


def started(world: World) -> list[str]:
    """The learning rates that were trained with, in turn."""
    path = world.root / "started"
    return path.read_text().split() if path.exists() else []


VARY = ("--vary", "learning_rate=0.1,0.2")


@needs_trl
def test_runs_take_turns_and_the_order_alternates(world: World) -> None:
    code, told = benched(
        world, *VARY, *SHORT, "--gpus", "1", scenes={"0.2": {"speed": 2000, "loss": 2.02}}
    )
    assert code == 0, told["findings"]
    assert started(world) == ["0.1", "0.2", "0.2", "0.1"]
    data = told["data"]
    first, second = data["rows"]
    assert second["standing"] == "faster" and second["recommended"]
    # a step of a minute at the start does not count
    assert first["tokens_per_second_per_gpu"] == {"median": 1000, "min": 1000, "max": 1000, "n": 2}
    assert second["tokens_per_second_per_gpu"]["median"] == 2000
    assert second["loss_per_token"]["median"] == pytest.approx(2.02)
    assert second["wasted_share"]["median"] == pytest.approx(1 / 6)
    assert second["wasted_tokens"]["median"] == 1000
    assert data["compared"]["tokens"] == 5000 and data["complete"]
    folder = Path(data["folder"])
    assert json.loads((folder / "bench.json").read_text())["rows"] == data["rows"]
    page = (folder / "bench.html").read_text()
    assert '<span class="word pass">recommended</span>' in page and "learning_rate=0.2" in page
    assert "16.7 %, 1,000" in page
    # weights are not what a comparison leaves behind
    assert not list(folder.rglob("model.safetensors"))
    assert world.quiet()


@needs_trl
def test_a_token_is_neither_shown_nor_kept(world: World) -> None:
    token = "hf_" + "aB3" * 11
    words = words_for(
        world, "hub_token=a-plain-password", f"dataset_text_field={token}", "--variant", "plain:",
        "--variant", f"{token}:learning_rate=0.2", *SHORT[:2], "--repeats", "1", "--gpus", "1",
    )  # fmt: skip
    shown = ""
    for form in ("text", "json"):
        done = world.launch(*words, "--format", form, env={"BENCH_SCENES": "{}"})
        assert done.returncode == 0, done.stderr
        shown += done.stdout + done.stderr
    (kept,) = world.root.rglob("bench.json")
    shown += kept.read_text() + kept.with_name("bench.html").read_text()
    assert "<redacted>" in shown
    assert token not in shown and "a-plain-password" not in shown


@needs_trl
def test_the_same_command_again_measures_nothing_twice(world: World) -> None:
    words = (*VARY, "--steps", "10", "--gpus", "1")
    assert benched(world, *words, "--repeats", "1")[0] == 0
    _, again = benched(world, *words, "--repeats", "1")
    assert len(started(world)) == 2
    # more of the same goes on from there, fresh does not
    _, more = benched(world, *words, "--repeats", "2")
    assert len(started(world)) == 4 and more["data"]["folder"] == again["data"]["folder"]
    # fewer repeats lose nothing
    _, told = benched(world, *words, "--repeats", "1")
    assert len(told["data"]["samples"]) == 4
    benched(world, *words, "--repeats", "2")
    assert len(started(world)) == 4
    _, fresh = benched(world, *words, "--repeats", "1", "--fresh")
    assert len(started(world)) == 6 and fresh["data"]["folder"] != again["data"]["folder"]
    # another length is another comparison
    benched(world, *VARY, "--steps", "11", "--gpus", "1", "--repeats", "1")
    assert len(started(world)) == 8


@needs_trl
def test_what_was_ended_too_early_is_tried_again_with_more_time(world: World) -> None:
    words = ("--steps", "10", "--gpus", "1", "--repeats", "1", "--timeout")
    slow = {"0.1": {"sleep": 600}}

    def runs(told: dict[str, Any]) -> int:
        # what is ended so early may not even have begun
        return len(list(rundir.newest_first(Path(told["data"]["folder"]))))

    code, told = benched(world, *words, "2s", scenes=slow)
    assert (code, runs(told)) == (4, 1)
    assert told["data"]["samples"][0]["cause"] == "timeout"
    code, told = benched(world, *words, "2s")
    assert (code, runs(told)) == (4, 1)
    code, told = benched(world, *words, f"{PATIENCE_S:.0f}s")
    assert (code, runs(told)) == (0, 2)


@needs_trl
def test_a_trial_that_fails_ends_alone(world: World) -> None:
    scenes = {
        "0.2": {"says": "CUDA out of memory. Tried to allocate 12.25 GiB."},
        "0.3": {"sleep": 600},
        "0.4": {"nan": 4, "says": "the loss is NaN"},
        "0.5": {"says": "bang"},
    }
    code, told = benched(
        world, "--vary", "learning_rate=0.1,0.2,0.3,0.4,0.5", *SHORT, "--gpus", "1",
        "--timeout", "15s", scenes=scenes,
    )  # fmt: skip
    assert code == 0
    causes = {s["variant"]: s["cause"] for s in told["data"]["samples"]}
    assert causes == {
        "learning_rate=0.1": "ok", "learning_rate=0.2": "oom", "learning_rate=0.3": "timeout",
        "learning_rate=0.4": "diverged", "learning_rate=0.5": "crash",
    }  # fmt: skip
    # what failed would fail again
    assert started(world) == ["0.1", "0.2", "0.3", "0.4", "0.5", "0.1"]
    assert [row["standing"] for row in told["data"]["rows"]] == ["baseline", *["failed"] * 4]
    assert all(row["failures"] for row in told["data"]["rows"][1:])
    assert world.quiet()


@needs_trl
def test_what_diverges_is_no_measurement_although_the_file_does_not_care(world: World) -> None:
    path = world.config(learning_rate=0.1)
    path.write_text(path.read_text() + "expect: {loss: any}\n")
    # by the steps before it would be faster and the same
    scenes = {"0.2": {"speed": 2000, "nan": 4}}
    _, told = benched(world, *VARY, "--steps", "10", "--repeats", "1", "--gpus", "1", scenes=scenes)
    assert [one["cause"] for one in told["data"]["samples"]] == ["ok", "diverged"]
    assert not any(row["recommended"] for row in told["data"]["rows"])


@needs_trl
def test_a_trial_whose_command_was_killed_is_ended_before_the_next(world: World) -> None:
    words = ("--gpus", "2", "--steps", "10", "--repeats", "1", "batch.global=4")
    env = {"BENCH_SCENES": json.dumps({"0.1": {"sleep": 600}})}
    running = world.started(*words_for(world, *words), env=env)
    until((world.root / "pids" / "trainer-0.1").exists)
    running.kill()
    running.communicate()
    code, told = benched(world, *words)
    assert code == 0, told["findings"]
    assert len(started(world)) == 2 and world.quiet()


def test_the_time_of_a_trial_counts_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[float | None] = []

    def refuse(_prepared: Any, *, timeout_s: float | None, **_more: Any) -> Any:
        seen.append(timeout_s)
        raise usage("x", "enough")

    clock = iter([100.0, 130.0])
    monkeypatch.setattr(measurement, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(measurement, "short", lambda request, *_words, **_more: request)
    monkeypatch.setattr(measurement.preparation, "prepare", lambda *_words, **_more: None)
    monkeypatch.setattr(measurement.trial, "of_prepared", refuse)
    request = Request(stage=None, config=Path("x.yaml"), gpus=0)
    variant = comparison.Variant("one")
    found = measurement.measure(request, variant, steps=5, root=tmp_path, timeout_s=90)
    assert seen == [60.0] and found.cause == "refused"


def test_a_full_disk_is_no_fault_of_a_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_words: Any, **_more: Any) -> Any:
        raise rundir.not_writable(tmp_path, "No space left on device")

    monkeypatch.setattr(measurement, "short", lambda request, *_words, **_more: request)
    monkeypatch.setattr(measurement.preparation, "prepare", full)
    request = Request(stage=None, config=Path("x.yaml"), gpus=0)
    with pytest.raises(NotReady):
        measurement.measure(
            request, comparison.Variant("one"), steps=5, root=tmp_path, timeout_s=None
        )


@needs_trl
def test_nothing_measured_is_a_failure(world: World) -> None:
    code, told = benched(world, *SHORT, "--gpus", "1", scenes={"0.1": {"says": "bang"}})
    assert code == 4 and not told["ok"]
    assert "bang" in told["data"]["rows"][0]["why"]


@needs_trl
def test_going_on_may_be_asked_for(world: World) -> None:
    words = (*VARY, "--steps", "10", "--gpus", "1", "--repeats", "1", "--resume")
    code, told = benched(world, *words)
    assert (code, told["findings"][0]["code"]) == (2, "no-earlier-start") and not started(world)
    assert not list(world.runs.glob("*"))
    assert benched(world, *words[:-1])[0] == 0
    code, told = benched(world, *words)
    assert code == 0 and told["data"]["complete"] and len(started(world)) == 2
    assert benched(world, *words, "--fresh")[0] == 2


@needs_trl
def test_an_assertion_that_does_not_hold(world: World) -> None:
    words = (
        *VARY,
        *SHORT,
        "--gpus",
        "1",
        "--assert",
        "loss<=1%",
        "--assert",
        "tokens_per_second>=1.2",
    )
    code, told = benched(world, *words, scenes={"0.2": {"speed": 2000, "loss": 2.1}})
    assert code == 1
    assert told["data"]["broken"] == [
        {"assert": "loss<=1%", "variant": "learning_rate=0.2", "unknown": False}
    ]
    assert told["data"]["rows"][1]["standing"] == "loss changed"
    assert told["data"]["compared"]["tolerance"] == pytest.approx(0.01)


@needs_trl
def test_ctrl_c_says_what_is_known_and_the_same_command_goes_on(world: World) -> None:
    env = {"BENCH_SCENES": json.dumps({"0.2": {"sleep": 600}})}
    words = words_for(world, *VARY, *SHORT, "--gpus", "1", "--format", "json")
    running = world.started(*words, env=env)
    until(
        lambda: started(world) == ["0.1", "0.2"] and (world.root / "pids" / "trainer-0.2").exists()
    )
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    told = json.loads(out)["data"]
    assert [s["variant"] for s in told["samples"]] == ["learning_rate=0.1"] and not told["complete"]
    assert world.quiet()
    code, after = benched(world, *VARY, *SHORT, "--gpus", "1")
    assert code == 0 and after["data"]["complete"]
    assert started(world) == ["0.1", "0.2", "0.2", "0.2", "0.1"]


@needs_trl
def test_ctrl_c_says_that_the_same_command_goes_on(world: World) -> None:
    env = {"BENCH_SCENES": json.dumps({"0.1": {"sleep": 600}})}
    running = world.started(*words_for(world, *VARY, *SHORT, "--gpus", "1"), env=env)
    until(lambda: (world.root / "pids" / "trainer-0.1").exists())
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert b"the same command goes on here, 0 of 4 runs are done" in out
    # how figures are to be read says nothing where there are none
    assert b"speed:" not in out and b"bench.json" in out


@needs_trl
def test_utilisation_is_of_the_gpus_of_the_run(world: World) -> None:
    # it is asked once a second, whenever that is: steps of 100 s, the second of which is over
    scenes = {"0.1": {"speed": 5, "first": 0.1, "ago": 150, "asked": 3}}
    words = ("--gpus", "1", "--steps", "10", "--repeats", "1")
    _, told = benched(world, *words, scenes=scenes)
    (row,) = told["data"]["rows"]
    assert row["gpu_utilisation_p50"]["median"] == row["gpu_utilisation_p95"]["median"] == 0.97


@needs_trl
def test_steps_that_tell_no_speed_tell_no_utilisation_either(world: World) -> None:
    # the third step is under way, the last two followed a record of kernels
    scenes = {"0.1": {"speed": 5, "first": 0.1, "ago": 150, "asked": 3, "rested": [9, 10]}}
    words = ("--gpus", "1", "--steps", "10", "--repeats", "1")
    _, told = benched(world, *words, scenes=scenes)
    (row,) = told["data"]["rows"]
    assert row["steady_steps"]["median"] == 6
    assert row["gpu_utilisation_p50"]["median"] == 0.97


def test_readings_outside_the_steady_steps_do_not_count() -> None:
    readings = [utilisation.Reading(float(n), "GPU-1", 10.0 * n) for n in range(10)]
    readings += [utilisation.Reading(5.0, "GPU-2", 100.0)]
    assert utilisation.within(readings, {"GPU-1"}, 3, 5) == [0.3, 0.4, 0.5]


@needs_trl
def test_two_processes_count_together_and_speed_is_that_of_one(world: World) -> None:
    _, told = benched(world, "--gpus", "2", "--steps", "10", "--repeats", "1", "batch.global=4")
    (row,) = told["data"]["rows"]
    assert row["tokens_per_second_per_gpu"]["median"] == 1000
    assert row["tokens_per_step"]["median"] == 1000
    (one,) = told["data"]["samples"]
    assert one["pace"] == pytest.approx([1 / 2000] * 8)


# --- before anything starts -----------------------------------------------------------------------


@needs_trl
def test_every_variant_is_judged_before_the_first_starts(world: World) -> None:
    code, told = benched(
        world, "--variant", "good:", "--variant", "typo:learning_rat=1", "--variant",
        "batch:batch.per_device=3", "--gpus", "1",
    )  # fmt: skip
    assert code == 3 and not started(world)
    messages = " ".join(finding["message"] for finding in told["findings"])
    assert "[typo]" in messages and "[batch]" in messages and "[good]" not in messages


@needs_trl
def test_what_is_not_here_is_said_of_all_variants_before_the_first_starts(world: World) -> None:
    code, told = benched(
        world,
        "--vary",
        "model_name_or_path=/nowhere/a,nobody/tiny,/nowhere/b",
        *SHORT,
        "--gpus",
        "1",
    )
    assert code == 3 and not started(world) and not list(world.runs.glob("*"))
    assert {one["code"] for one in told["findings"]} == {"missing-model"}
    messages = " ".join(one["message"] for one in told["findings"])
    assert "=/nowhere/a]" in messages and "=/nowhere/b]" in messages and "tiny]" not in messages


@needs_trl
def test_a_machine_that_no_variant_can_start_on_makes_no_folder(world: World) -> None:
    needs = ("use_peft=true", "load_in_4bit=true")
    code, told = benched(world, *VARY, *SHORT, "--gpus", "1", *needs)
    assert code == 5 and not started(world) and not list(world.runs.glob("*"))
    assert "missing-packages" in {one["code"] for one in told["findings"]}
    # beside one that it is ready for, the other is a row
    code, told = benched(
        world, "--variant", "plain:", "--variant", f"four:{','.join(needs)}", *SHORT, "--gpus", "1"
    )
    assert code == 0 and started(world) == ["0.1", "0.1"]
    assert {s["variant"]: s["cause"] for s in told["data"]["samples"]} == {
        "plain": "ok",
        "four": "refused",
    }


@needs_trl
def test_the_global_batch_stays_as_the_file_has_it(world: World) -> None:
    path = world.config(
        learning_rate=0.1, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    path.write_text(path.read_text().replace("batch:\n  global: 2\n  per_device: 2\n", ""))
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    asked = variants.combinations(["per_device_train_batch_size=1,2,8"], [])
    planned = bench_plan.plan(request, asked, steps=5, repeats=1)
    assert [one.overrides[1:] for one in planned.variants] == [
        ("gradient_accumulation_steps=8",), ("gradient_accumulation_steps=4",),
        ("gradient_accumulation_steps=1",),
    ]  # fmt: skip
    assert planned.batch == 8
    asked = variants.combinations([], ["one:", "two:gradient_accumulation_steps=2"])
    warned = bench_plan.plan(request, asked, steps=5, repeats=1).findings
    assert "other-global-batch" in {finding.code for finding in warned}


@needs_trl
def test_what_the_file_expects_follows_the_switch(world: World) -> None:
    path = world.config(learning_rate=0.1, packing=True)
    path.write_text(path.read_text() + "expect: {packing: isolated}\n")
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    planned = bench_plan.plan(
        request, variants.combinations(["packing=true,false"], []), steps=5, repeats=1
    )
    assert [one.overrides[1:] for one in planned.variants] == [(), ("expect.packing=off",)]


@needs_trl
def test_what_the_file_expects_of_packing_follows_the_split(world: World) -> None:
    path = world.config(learning_rate=0.1, padding_free=True, max_length="none")
    path.write_text(path.read_text() + "expect: {packing: isolated}\n")
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    axes = variants.combinations(["batch.per_device=1,2"], [])
    one, two = bench_plan.plan(request, axes, steps=5, repeats=1).variants
    assert (one.overrides[1:], two.overrides[1:]) == (("expect.packing=off",), ())


@needs_trl
@pytest.mark.parametrize(
    ("expected", "override", "told"),
    [
        ("packing: isolated", "packing=true", ()),
        ("packing: off", "args.packing=true", ("expect.packing=isolated",)),
        ("packing: off", "expect.packing=any,packing=true", ()),
        ("packing: off", "padding_free=true,max_length='none'", ("expect.packing=isolated",)),
        ("attention: sdpa", "attn_implementation=eager", ("expect.attention=eager",)),
        ("attention: sdpa", "attention=eager", ("expect.attention=eager",)),
        ("attention: any", "attn_implementation=eager", ()),
    ],
)
def test_what_is_expected_follows_whichever_key_turns_it(
    world: World, expected: str, override: str, told: tuple[str, ...]
) -> None:
    path = world.config(learning_rate=0.1)
    # as it is written, some of these could not hold
    more = f"expect: {{{expected}}}\non_violation: warn\n"
    path.write_text(path.read_text() + more)
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    asked = variants.combinations([], [f"one:{override}"])
    planned = bench_plan.plan(request, asked, steps=5, repeats=1)
    assert planned.variants[1].overrides == (*override.split(","), *told)


@needs_trl
def test_two_variants_that_are_the_same_are_said_to_be(world: World) -> None:
    request = Request(
        stage=None, config=world.config(learning_rate=0.1), gpus=0, python=Path(sys.executable)
    )
    planned = bench_plan.plan(request, variants.combinations([], ["a:", "b:"]), steps=5, repeats=1)
    assert [finding.code for finding in planned.findings] == ["same-variant"]


@needs_trl
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("batch.per_device=2", "name=another"),
        ("batch.global=4", "batch.global=4,batch.per_device=2"),
    ],
)
def test_two_variants_that_are_the_same_once_they_are_short_are_said_to_be(
    world: World, one: str, other: str
) -> None:
    request = Request(
        stage=None, config=world.config(learning_rate=0.1), gpus=0, python=Path(sys.executable)
    )
    asked = variants.combinations([], [f"a:{one}", f"b:{other}"])
    planned = bench_plan.plan(request, asked, steps=5, repeats=1)
    assert [f.message for f in planned.findings if f.code == "same-variant"] == [
        "[b] its trial is the same as that of a: what differs is noise"
    ]


@needs_trl
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("max_steps=3", "max_steps=6"), "3, 6 come to 5"),
        (("", "args.max_steps=6"), "-1, 6 come to 5"),
        (("output_dir=out", "output_dir=other"), "`output_dir`"),
        (("save_strategy='no'", "save_strategy=steps"), "no, steps come to no"),
        (("num_train_epochs=1", "num_train_epochs=2"), "`num_train_epochs`"),
        (("save_steps=5", "save_steps=10"), "`save_steps`"),
        (("logging_steps=1", "logging_steps=10"), "`logging_steps`"),
        (("report_to=none", "report_to=tensorboard"), "come to none"),
        (("on_hang=report", "on_hang=stop"), "come to stop"),
        (("probe=off", "probe={profile: 2}"), "`probe`"),
        (("expect.loss=any", "expect.loss=finite"), "come to finite"),
    ],
)
def test_what_a_trial_has_whatever_is_asked_is_nothing_to_compare(
    world: World, values: tuple[str, str], said: str
) -> None:
    request = Request(
        stage=None, config=world.config(learning_rate=0.1), gpus=0, python=Path(sys.executable)
    )
    asked = variants.combinations([], [f"v{nth}:{text}" for nth, text in enumerate(values)])
    with pytest.raises(UsageError) as refused:
        bench_plan.plan(request, asked, steps=5, repeats=1)
    assert {finding.code for finding in refused.value.findings} == {"set-by-bench"}
    assert said in str(refused.value)


@needs_trl
def test_warm_up_that_comes_to_the_same_in_so_few_steps_is_said(world: World) -> None:
    """What else the variant is about can be compared all the same."""
    path = world.config(learning_rate=0.1, warmup_steps=10, max_steps=1000)
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    asked = variants.combinations([], ["a:", "b:warmup_steps=20,learning_rate=0.2"])
    planned = bench_plan.plan(request, asked, steps=5, repeats=1)
    (finding,) = planned.findings
    assert (finding.code, finding.severity) == ("set-by-bench", "warning")
    assert "10, 20 come to 0" in finding.message.replace(".0", "")
    assert not bench_plan.plan(request, asked, steps=200, repeats=1).findings


@needs_trl
def test_steps_that_bench_sets_are_refused_before_the_first_run(world: World) -> None:
    code, told = benched(world, "--vary", "max_steps=3,6", "--steps", "3", "--gpus", "1")
    assert code == 2 and not started(world)
    (finding,) = told["findings"]
    assert finding["code"] == "set-by-bench" and "--steps 3" in finding["help"]


@needs_trl
def test_what_every_variant_has_alike_is_not_compared_by_it(world: World) -> None:
    request = Request(
        stage=None, config=world.config(learning_rate=0.1), gpus=0, python=Path(sys.executable)
    )
    both = ["a:max_steps=9,learning_rate=0.1", "b:max_steps=9,learning_rate=0.2"]
    planned = bench_plan.plan(request, variants.combinations([], both), steps=5, repeats=1)
    assert not {finding.code for finding in planned.findings} & {"set-by-bench", "same-variant"}


def test_open_instructs_steps_are_nothing_to_compare(checkout: Path) -> None:
    config = REPOSITORY / "configs" / "tulu" / "sft_qwen7b.yaml"
    request = Request(
        stage=None, config=config, gpus=8, python=Path(sys.executable), checkout=checkout
    )
    asked = variants.combinations(["max_train_steps=3,6", "checkpointing_steps=10,20"], [])
    with pytest.raises(UsageError) as refused:
        bench_plan.plan(request, asked, steps=3, repeats=1)
    assert [finding.message for finding in refused.value.findings] == [
        "`checkpointing_steps` is nothing to compare, bench sets it itself: 10, 20 come to 4",
        "`max_train_steps` is nothing to compare, bench sets it itself: 3, 6 come to 3",
    ]


@needs_trl
@pytest.mark.parametrize(
    ("steps", "profile", "gpus", "said"),
    [
        (3, 2, 1, ("none is left that tells a speed", "--steps 4")),
        (8, 9, 1, ("there is no step 9", "--steps 9")),
        (3, 3, 1, None),
        (5, 2, 1, None),
        (3, 2, 0, None),
    ],
)
def test_a_record_of_kernels_that_leaves_no_speed_is_said(
    world: World, steps: int, profile: int, gpus: int, said: tuple[str, str] | None
) -> None:
    path = world.config(learning_rate=0.1)
    path.write_text(path.read_text() + f"probe: {{profile: {profile}}}\n")
    request = Request(stage=None, config=path, gpus=gpus, python=Path(sys.executable))
    planned = bench_plan.plan(request, variants.combinations([], []), steps=steps, repeats=1)
    found = [one for one in planned.findings if one.code == "profile-and-steps"]
    assert [one.severity for one in found] == (["warning"] if said else [])
    if said:
        assert said[0] in found[0].message and said[1] in str(found[0].help)


@needs_trl
def test_an_assertion_that_nothing_could_break_is_refused(world: World) -> None:
    done = world.launch(*words_for(world, "--gpus", "1", "--assert", "tokens_per_second>=1.2"))
    assert done.returncode == 2 and "there is one" in done.stderr
    assert not started(world)


def test_without_a_gpu_it_is_refused_and_says_how_to_try_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.environ["PATH"] = os.environ["PATH"]
    if Path("/usr/bin/nvidia-smi").exists():
        pytest.skip("there is a GPU here")
    done = world.launch(*words_for(world, *VARY))
    assert done.returncode == 5 and "--cpu" in done.stderr
    for option in (("--gpus", "2"), ("--devices", "0")):
        done = world.launch(*words_for(world, *VARY, "--cpu", *option))
        assert done.returncode == 2 and "useless-option" in done.stderr


def documented() -> list[str]:
    text = (REPOSITORY / "docs" / "bench.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("launch bench ")]


@pytest.mark.parametrize("command", documented())
def test_the_commands_of_the_page_are_valid(
    command: str, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    if "backend: trl" in command or "/lora/" in command or "/demo/" in command:
        pytest.importorskip("trl")
    words = shlex.split(command)[2:]
    told: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(words):
        if name.startswith("--"):
            told.setdefault(name, []).append(value)
    monkeypatch.chdir(REPOSITORY)
    gpus = int(told.get("--gpus", ["0"])[0])
    request = Request(stage=None, config=Path(words[0]), gpus=gpus, python=Path(sys.executable))
    vary = told.get("--vary", [])
    if any(text.startswith("open_instruct=") for text in vary):
        if Repository(checkout).commit("HEAD~1") is None:
            pytest.skip("the checkout has no history")
        # another commit may refuse what this one takes: that they are found is what is asked here
        (one, other) = (a.split()[1] for a in variants.combinations(vary, []))
        assert (one, other) == ("HEAD~1", "HEAD")
        return
    asked = variants.combinations(vary, told.get("--variant", []))
    planned = bench_plan.plan(request, asked, steps=20, repeats=3)
    assert len(planned.variants) == len(asked) > 1
    assert len({variant.name for variant in planned.variants}) == len(asked)


# --- commits --------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def history(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with two commits."""
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "cache"))
    root = write("source/open_instruct/finetune.py", "first\n").parent.parent
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    write("source/open_instruct/finetune.py", "second\n")
    git(root, "commit", "-q", "-am", "second")
    return root


def test_a_commit_is_checked_out_beside_what_is_there(history: Path) -> None:
    first = git(history, "rev-parse", "HEAD~1")
    place = checkouts.materialised(history, first)
    assert (place / "open_instruct" / "finetune.py").read_text() == "first\n"
    assert (history / "open_instruct" / "finetune.py").read_text() == "second\n"
    assert Repository(place).commit("HEAD") == first
    assert git(history, "worktree", "list").count("\n") == 0 and not git(history, "status", "-s")
    assert checkouts.materialised(history, first) == place
    # one that was edited is made anew
    (place / "open_instruct" / "finetune.py").write_text("mine\n")
    assert checkouts.edits(place) is not None
    checkouts.materialised(history, first)
    assert (place / "open_instruct" / "finetune.py").read_text() == "first\n"


def test_commits_of_the_pinned_checkout_are_compared(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "cache"))
    pin = str(upstream.snapshot("open_instruct")["version"])
    if Repository(checkout).commit(pin) is None:
        pytest.skip("the checkout has no history")
    request = Request(
        stage=None, config=REPOSITORY / "configs" / "bench" / "hand_recipe.yaml", gpus=2,
        checkout=checkout, python=Path(sys.executable),
    )  # fmt: skip
    asked = variants.combinations([f"open_instruct={checkout},{pin}"], [])
    planned = bench_plan.plan(request, asked, steps=5, repeats=1)
    first, second = (variant.checkout for variant in planned.variants)
    assert first == checkout and second is not None and second != checkout
    assert not any(variant.overrides for variant in planned.variants)
    with pytest.raises(Exception, match="neither a folder nor a commit"):
        bench_plan.plan(
            request, variants.combinations(["open_instruct=nowhere,HEAD"], []), steps=5, repeats=1
        )


@needs_trl
def test_trl_has_no_checkout_to_compare(world: World) -> None:
    done = world.launch(*words_for(world, "--vary", "open_instruct=a,b", "--gpus", "1"))
    assert done.returncode == 2 and "open-instruct" in done.stderr


# --- real training --------------------------------------------------------------------------------


@pytest.mark.training
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "trl", "datasets")),
    reason="no training packages",
)
def test_real_trials_on_the_cpu(tmp_path: Path, demo_assets: Path) -> None:
    shutil.copytree(demo_assets, tmp_path / "build" / "demo")
    environment = {
        **os.environ, "LAUNCH_RUNS": str(tmp_path / "runs"), "XDG_STATE_HOME": str(tmp_path / "state"),
        "LAUNCH_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "hf"),
    }  # fmt: skip
    config = REPOSITORY / "configs" / "demo" / "sft.yaml"
    words = (
        "bench", str(config), "--cpu", "--steps", "5", "--repeats", "1", "--format", "json",
        "batch.global=8", "batch.per_device=8",
        "--variant", "base:", "--variant", "small:batch.per_device=4",
        "--variant", "wild:learning_rate=1e30,warmup_steps=0",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", *words], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["data"]
    base, small, wild = told["samples"]
    assert (base["cause"], small["cause"], wild["cause"]) == ("ok", "ok", "diverged")
    # a loss of nan ends the run, though Trainer prints 0 for it
    told_of = json.loads((Path(wild["run"]) / "verdict.json").read_text())["points"]
    points = {point["name"]: point for point in told_of}
    assert (points["loss"]["state"], points["finish"]["state"]) == ("nonfinite", "stopped")
    assert points["loss"]["detail"]["first_step"] == 2
    assert points["loss"]["detail"]["last_finite"]["step"] == 1
    message = points["finish"]["detail"]["error"]["message"]
    assert message.startswith("loss is nan (step 2, rank 0)") and message in wild["reason"]
    # the same rows in half the micro-batches: the same tokens and, but for rounding, the same loss
    assert base["metrics"]["tokens"] == small["metrics"]["tokens"]
    first, second, _ = told["rows"]
    assert second["loss_change"] == pytest.approx(0, abs=0.01)
    assert first["tokens_per_second_per_gpu"]["median"] > 0
    # fewer rows side by side need less padding
    assert second["wasted_share"]["median"] < first["wasted_share"]["median"]
    runs = [folder.path for folder in rundir.newest_first(Path(told["folder"]))]
    assert len(runs) == 3 and not list(Path(told["folder"]).rglob("*.safetensors"))
