"""The point `data` of runs: rows, steps, pairs, labels and DPO's first loss beside what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_check import Run, step

from launcher.verdict.check import Point, Verdict

DONE = {"event": "end", "exit": 0}
SAVED = {"event": "saved", "path": "out/model"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def planned(run: Run, rows: int = 200, steps: int = 50, backend: str = "trl", stage: str = "sft", **args: Any) -> Run:
    """The record of a run that was to make so many steps over so many rows."""
    values = {name: {"value": value, "origin": "file:1"} for name, value in args.items()}
    record = {"stage": stage, "backend": backend, "plan": {"rows": rows, "steps": steps, "gpus": 1}, "args": values}
    (run.folder / "run.json").write_text(json.dumps(record))
    return run


def steps_of(number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**step(at, 2.0 - at / 1000), **values} for at in range(1, number + 1)]


def rows_event(given: int, kept: int, words: str = "Dropping fully masked examples") -> dict[str, Any]:
    lost = [{"rows": given - kept, "while": words}] if given != kept else []
    return {"event": "data_rows", "given": given, "kept": kept, "dropped": lost, "max_length": 128}


def batches(number: int = 50, **counts: Any) -> dict[str, Any]:
    first = counts.pop("first", {"rows": 32, "ended": 32})
    sums = {"pairs": 0, "rows": 0, "unlabelled": 0, "equal_pairs": 0, "full_rows": 0, **counts}
    return {"event": "data", "micro_batches": number, "first": first, **sums}


def judged(run: Run, *events: dict[str, Any], steps: int = 50, stage: str = "sft", **values: Any) -> Verdict:
    run.rank(0, *events, *steps_of(steps, **values), SAVED, DONE).exit(0)
    return run.judge(stage)


def data(verdict: Verdict) -> Point | None:
    return next((point for point in verdict.points if point.name == "data"), None)


@pytest.mark.parametrize(
    ("given", "kept", "steps", "state", "ok", "words"),
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
    run: Run, given: int, kept: int, steps: int, state: str, ok: bool | None, words: str
) -> None:
    found = data(judged(planned(run), rows_event(given, kept), batches(), steps=steps))
    assert found is not None
    assert (found.state, found.ok) == (state, ok)
    assert words in str(found.detail.get("reason", ""))


def test_whoever_expects_anything_gets_it(run: Run) -> None:
    judged(planned(run), rows_event(200, 100), batches(), steps=25)
    assert run.judge("sft", data="any").point("data").ok is True
    assert run.judge("sft", data="as_planned").point("data").ok is False


def test_an_older_record_says_nothing_of_its_data(run: Run) -> None:
    assert data(judged(planned(run))) is None


READ = {"rows": 32, "ended": 32, "pairs": 16, "searched": 16}


@pytest.mark.parametrize(
    ("counts", "ok", "words"),
    [
        ({"unlabelled": 50}, False, "no token had a label in 50 of 50 micro-batches"),
        ({"unlabelled": 10}, None, "no token had a label in 10 of 50"),
        ({"unlabelled": 1}, True, ""),
        ({"pairs": 96, "equal_pairs": 96}, False, "equal in 96 of 96 pairs"),
        ({"pairs": 96, "equal_pairs": 12}, None, "equal in 12 of 96 pairs"),
        ({"pairs": 96, "equal_pairs": 1}, True, ""),
        ({"first": {**READ, "prompt_twice": 16}}, None, "hold their prompt twice"),
        ({"first": {**READ, "promptless": 16}}, None, "have no prompt"),
        ({"first": {**READ, "empty": 4}}, None, "4 of 16 pairs that were read have an empty answer"),
        ({"first": {**READ, "begun_twice": 32}}, None, "begin with two BOS tokens"),
        ({"first": {"rows": 32, "endless": 32}}, None, "train no end token"),
        ({"first": {"rows": 32, "ended": 30, "endless": 2}}, True, ""),
        ({"first": {"rows": 32, "ended": 8, "cut": 24}}, None, "are cut at the maximal length"),
        # of too few rows nothing is said
        ({"first": {"rows": 2, "endless": 2}}, True, ""),
    ],
)
def test_batches_that_cannot_train_what_was_meant(
    run: Run, counts: dict[str, Any], ok: bool | None, words: str
) -> None:
    found = data(judged(planned(run), rows_event(200, 200), batches(**counts)))
    assert found is not None
    assert (found.state, found.ok) == ("as_planned" if ok else "suspect", ok)
    assert words in str(found.detail.get("reason", ""))


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
    planned(run, stage="dpo", **{"loss_type": ["sigmoid"], "label_smoothing": 0.0, "beta": 0.1, **args})
    run.rank(0, rows_event(200, 200), step(1, first), *steps_of(50)[1:], SAVED, DONE).exit(0)
    found = data(run.judge("dpo"))
    assert found is not None
    assert found.ok is ok
    assert (f"first loss was {first:.4f}" in str(found.detail.get("reason", ""))) is (ok is None)


def test_a_run_that_was_resumed_need_not_begin_at_ln_2(run: Run) -> None:
    planned(run, stage="dpo", loss_type=["sigmoid"])
    resumed = {"event": "resumed", "path": "out/checkpoint-1", "step": 1}
    run.rank(0, rows_event(200, 200), resumed, step(1, 0.4), *steps_of(50)[1:], SAVED, DONE).exit(0)
    found = data(run.judge("dpo"))
    assert found is not None and found.ok is True


@pytest.mark.parametrize(
    ("dtype", "mean", "ok"),
    [("float32", 1400.0, True), ("bfloat16", 1400.0, False), ("bfloat16", 100.0, None), ("bfloat16", 20.0, True)],
)
def test_a_reference_that_was_rounded_is_no_reference(run: Run, dtype: str, mean: float, ok: bool | None) -> None:
    planned(run, stage="dpo", loss_type=["sigmoid"], beta=0.1, precompute_ref_log_probs=True)
    seen = {"event": "reference_precision", "dtype": dtype, "mean": mean}
    run.rank(0, rows_event(200, 200), seen, step(1, 0.6931), *steps_of(50)[1:], SAVED, DONE).exit(0)
    found = data(run.judge("dpo"))
    assert found is not None
    assert found.ok is ok
    assert ("rounded to bfloat16" in str(found.detail.get("reason", ""))) is (ok is not True)


@pytest.mark.parametrize(
    ("schedule", "rates", "words"),
    [
        ("linear", [1e-5 * (1 - n / 50) for n in range(50)], None),
        ("linear", [1e-5 * (1 - n % 10 / 10) for n in range(50)], "rises again"),
        ("cosine_with_restarts", [1e-5 * (1 - n % 10 / 10) for n in range(50)], None),
        ("constant_with_warmup", [1e-7 * n for n in range(50)], "never reached"),
        ("linear", [1e-5, 5e-6, *[0.0] * 48], "was 0 in 48 of 50"),
    ],
)
def test_a_learning_rate_does_what_its_schedule_names(
    run: Run, schedule: str, rates: list[float], words: str | None
) -> None:
    planned(run, lr_scheduler_type=schedule, learning_rate=1e-5)
    steps = [{**each, "learning_rate": rate} for each, rate in zip(steps_of(50), rates, strict=True)]
    run.rank(0, rows_event(200, 200), *steps, SAVED, DONE).exit(0)
    found = data(run.judge("sft"))
    assert found is not None
    assert found.ok is (None if words else True)
    assert (words or "") in str(found.detail.get("reason", ""))
