"""The point `data`: rows, steps, pairs, labels and DPO's first loss beside the plan."""

from typing import Any

import pytest
from judged_runs import END, SAVED, Event, Run, advice, brief, step
from judged_runs import run as run  # a fixture

from launcher.verdict.check import Point


def write_plan(run: Run, *, backend: str = "trl", stage: str = "sft", **args: Any) -> None:
    """The record of a run that was to make 50 steps over 200 rows."""
    arguments = {name: {"value": value, "origin": "file:1"} for name, value in args.items()}
    plan = {"rows": 200, "steps": 50, "gpus": 1}
    run.manifest({"stage": stage, "backend": backend, "plan": plan, "args": arguments})


def falling_steps(count: int = 50) -> list[Event]:
    return [step(number, 2.0 - number / 1000) for number in range(1, count + 1)]


def steps_beginning_at(loss: float) -> list[Event]:
    return [step(1, loss), *falling_steps()[1:]]


def rows_event(read: int = 200, kept: int = 200) -> Event:
    """The rows that were read, and those that were left after a filter."""
    event: Event = {"event": "data_rows", "given": read, "kept": kept, "max_length": 128}
    event["dropped"] = []
    if read != kept:
        event["dropped"].append({"rows": read - kept, "while": "Dropping fully masked examples"})
    return event


def batches_event(**counts: Any) -> Event:
    first = {"rows": 32, "ended": 32}
    none = dict.fromkeys(("pairs", "rows", "unlabelled", "equal_pairs", "full_rows"), 0)
    return {"event": "data", "micro_batches": 50, "first": first, **none, **counts}


def rows_read(count: int, **counts: int) -> dict[str, Any]:
    """Of the first micro-batches, whose rows are read one by one."""
    return {"first": {"rows": count, **counts}}


def pairs_read(**counts: int) -> dict[str, Any]:
    return rows_read(32, ended=32, pairs=16, searched=16, **counts)


def data_point(run: Run, *events: Event, stage: str = "sft") -> Point:
    run.rank(0, *events, SAVED, END).exit(0)
    return run.judge(stage).point("data")


@pytest.mark.parametrize(
    ("read", "kept", "steps", "state", "ok", "words"),
    [
        (200, 200, 50, "as_planned", True, ""),
        # one row of 200 is as good as planned
        (200, 199, 50, "as_planned", True, ""),
        (200, 190, 48, "fewer", None, "dropped 10 of 200 rows"),
        (200, 100, 25, "fewer", False, "dropped 100 of 200 rows"),
        (200, 200, 25, "fewer", False, "25 steps were made, 50 were planned"),
        (200, 200, 100, "more", None, "100 steps were made, 50 were planned"),
        (400, 400, 50, "more", None, "read 400 rows, 200 were planned"),
        (150, 150, 50, "fewer", None, "read 150 of 200 planned rows"),
    ],
)
def test_rows_and_steps_are_those_of_the_plan(
    run: Run, read: int, kept: int, steps: int, state: str, ok: bool | None, words: str
) -> None:
    write_plan(run)
    point = data_point(run, rows_event(read, kept), batches_event(), *falling_steps(steps))
    assert brief(point) == (state, ok)
    assert words in advice(point)


def test_whoever_expects_anything_gets_it(run: Run) -> None:
    write_plan(run)
    data_point(run, rows_event(200, 100), batches_event(), *falling_steps(25))
    assert run.point("data", "any").ok is True
    assert run.point("data", "as_planned").ok is False


def test_an_older_record_says_nothing_of_its_data(run: Run) -> None:
    write_plan(run)
    run.rank(0, *falling_steps(), SAVED, END).exit(0)
    assert "data" not in {point.name for point in run.judge().points}


@pytest.mark.parametrize(
    ("counts", "ok", "words"),
    [
        ({"unlabelled": 50}, False, "no token had a label in 50 of 50 micro-batches"),
        ({"unlabelled": 10}, None, "no token had a label in 10 of 50"),
        ({"unlabelled": 1}, True, ""),
        ({"pairs": 96, "equal_pairs": 96}, False, "equal in 96 of 96 pairs"),
        ({"pairs": 96, "equal_pairs": 12}, None, "equal in 12 of 96 pairs"),
        ({"pairs": 96, "equal_pairs": 1}, True, ""),
        (pairs_read(prompt_twice=16), None, "hold their prompt twice"),
        (pairs_read(promptless=16), None, "have no prompt"),
        (pairs_read(empty=4), None, "4 of 16 pairs that were read have an empty"),
        (pairs_read(begun_twice=32), None, "begin with two BOS tokens"),
        (rows_read(32, endless=32), None, "train no end token"),
        (rows_read(32, ended=30, endless=2), True, ""),
        (rows_read(32, ended=8, cut=24), None, "are cut at the maximal length"),
        # of too few rows nothing is said
        (rows_read(2, endless=2), True, ""),
    ],
)
def test_batches_that_cannot_train_what_was_meant(
    run: Run, counts: dict[str, Any], ok: bool | None, words: str
) -> None:
    write_plan(run)
    point = data_point(run, rows_event(), batches_event(**counts), *falling_steps())
    state = "as_planned" if ok else "suspect"
    assert brief(point) == (state, ok)
    assert words in advice(point)


@pytest.mark.parametrize(
    ("first", "args", "ok"),
    [
        (0.6931, {}, True),
        (0.8796, {}, None),
        (0.70, {"precompute_ref_log_probs": True}, True),
        (0.8796, {"precompute_ref_log_probs": True}, None),
        # these begin elsewhere
        (0.8796, {"loss_type": ["ipo"]}, True),
        (0.8796, {"loss_type": ["sigmoid", "sft"]}, True),
        (0.8796, {"label_smoothing": 0.1}, True),
        (0.8796, {"use_weighting": True}, True),
    ],
)
def test_the_first_loss_of_a_sigmoid_dpo_is_ln_2(
    run: Run, first: float, args: dict[str, Any], ok: bool | None
) -> None:
    sigmoid = {"loss_type": ["sigmoid"], "label_smoothing": 0.0, "beta": 0.1}
    write_plan(run, stage="dpo", **sigmoid | args)
    point = data_point(run, rows_event(), *steps_beginning_at(first), stage="dpo")
    is_doubted = f"first loss was {first:.4f}" in advice(point)
    assert point.ok is ok
    assert is_doubted is (ok is None)


def test_a_run_that_was_resumed_need_not_begin_at_ln_2(run: Run) -> None:
    write_plan(run, stage="dpo", loss_type=["sigmoid"])
    resumed = {"event": "resumed", "path": "out/checkpoint-1", "step": 1}
    point = data_point(run, rows_event(), resumed, *steps_beginning_at(0.4), stage="dpo")
    assert point.ok is True


@pytest.mark.parametrize(
    ("dtype", "mean", "ok"),
    [
        ("float32", 1400.0, True),
        ("bfloat16", 1400.0, False),
        ("bfloat16", 100.0, None),
        ("bfloat16", 20.0, True),
    ],
)
def test_a_reference_that_was_rounded_is_no_reference(
    run: Run, dtype: str, mean: float, ok: bool | None
) -> None:
    write_plan(run, stage="dpo", loss_type=["sigmoid"], beta=0.1, precompute_ref_log_probs=True)
    precision = {"event": "reference_precision", "dtype": dtype, "mean": mean}
    steps = steps_beginning_at(0.6931)
    point = data_point(run, rows_event(), precision, *steps, stage="dpo")
    is_doubted = "rounded to bfloat16" in advice(point)
    assert point.ok is ok
    assert is_doubted is not bool(ok)


FALLING_RATES = [1e-5 * (1 - n / 50) for n in range(50)]
FIVE_CYCLES = FALLING_RATES[::5] * 5


@pytest.mark.parametrize(
    ("schedule", "rates", "words"),
    [
        ("linear", FALLING_RATES, ""),
        ("linear", FIVE_CYCLES, "rises again"),
        ("cosine_with_restarts", FIVE_CYCLES, ""),
        ("constant_with_warmup", [1e-7 * n for n in range(50)], "never reached"),
        ("linear", [1e-5, 5e-6, *[0.0] * 48], "was 0 in 48 of 50"),
    ],
)
def test_a_learning_rate_does_what_its_schedule_names(
    run: Run, schedule: str, rates: list[float], words: str
) -> None:
    write_plan(run, lr_scheduler_type=schedule, learning_rate=1e-5)
    steps = falling_steps()
    for event, rate in zip(steps, rates, strict=True):
        event["learning_rate"] = rate
    point = data_point(run, rows_event(), *steps)
    assert point.ok is (None if words else True)
    assert words in advice(point)
