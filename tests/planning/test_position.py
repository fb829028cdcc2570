"""The arithmetic of a resume, against the pinned loops played through batch by batch."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.planning.resume import epochs
from launcher.planning.resume.epochs import DataPosition, EpochLayout

Step = list[tuple[int, int]]
"""One optimizer step: the micro-batches it takes, each as (whose order, which of that order)."""
START = DataPosition(0, 0)


def play(
    stage: str, layout: EpochLayout, resumed: int | None = None, *, keeps_order: bool = True
) -> list[Step]:
    """The steps of finetune.py and dpo_tune_cache.py, as their loops stand; those after `step_N`
    where it is resumed.
    """
    done = 0
    first_epoch = 0
    skip = 0
    if resumed is not None:
        done = resumed
        first_epoch, skip = divmod(resumed * layout.accumulation, layout.micro)
    steps: list[Step] = []
    current: Step = []
    for epoch in range(first_epoch, layout.passes):
        order = epoch
        first = 0
        skips = stage == "dpo" or (skip and epoch == first_epoch)
        if resumed is not None and skips:
            # a loader that skips, made anew
            first = skip
            if not keeps_order:
                order = 0
        for micro in range(first, layout.micro):
            current.append((order, micro))
            is_last = micro == layout.micro - 1
            # accelerate counts micro-batches since the start, and begins anew with each epoch
            if is_last or (micro - first + 1) % layout.accumulation == 0:
                steps.append(current)
                current = []
                done += 1
                if done >= layout.total:
                    break
    return steps


stages = st.sampled_from(["sft", "dpo"])
layouts = st.builds(
    EpochLayout,
    rows=st.integers(1, 60),
    per_device=st.integers(1, 4),
    devices=st.integers(1, 3),
    accumulation=st.integers(1, 5),
    epochs=st.integers(1, 4),
    limit=st.none() | st.integers(1, 60),
)


@settings(max_examples=600)
@given(stages, layouts, st.integers(1, 80), st.booleans())
def test_a_resume_is_called_exact_just_where_the_loops_agree(
    stage: str, layout: EpochLayout, step: int, keeps_order: bool
) -> None:
    uninterrupted = play(stage, layout)
    assert len(uninterrupted) == layout.total
    if step > layout.total:
        return
    saved = epochs.advance(layout, START, step)
    is_dpo = stage == "dpo"
    mismatch = epochs.check_step(is_dpo, step, saved, layout, layout, keeps_order=keeps_order)
    resumed = play(stage, layout, step, keeps_order=keeps_order)
    assert (mismatch is None) == (resumed == uninterrupted[step:])


@given(layouts, st.integers(0, 200))
def test_advancing_step_by_step_is_advancing_at_once(layout: EpochLayout, steps: int) -> None:
    position = START
    for _ in range(steps):
        position = epochs.advance(layout, position, 1)
        # the end of an epoch is the begin of the next one
        if position.micro >= layout.micro:
            position = DataPosition(position.epoch + 1, 0)
    assert position == epochs.advance(layout, START, steps)


def layout_of(
    rows: int, *, per_device: int = 4, devices: int = 1, accumulation: int = 2
) -> EpochLayout:
    """Two epochs of so many rows."""
    return EpochLayout(
        rows=rows, per_device=per_device, devices=devices, accumulation=accumulation, epochs=2
    )


@pytest.mark.parametrize(
    ("is_dpo", "rows", "interval", "keeps_order", "steps"),
    [
        (False, 44, 2, True, [6, 8, 10]),
        (False, 48, 2, True, []),
        # 12 steps became 10 when DPO went on from step 2, none was lost from step 6 or 8
        (True, 48, 2, True, [2, 4]),
        # with accelerate 1.12 SFT went on from step 4 exactly, and from step 8 elsewhere
        (False, 48, 4, False, [8]),
    ],
)
def test_positions_measured_at_the_pin(
    is_dpo: bool, rows: int, interval: int, keeps_order: bool, steps: list[int]
) -> None:
    """Real runs: of 44 rows an epoch is 11 micro-batches and 6 steps, of 48 rows 12 and 6."""
    inexact = epochs.find_inexact(is_dpo, layout_of(rows), interval, keeps_order=keeps_order)
    assert [step for step, _ in inexact] == steps


def test_a_limit_inside_an_epoch_is_passed() -> None:
    """With max_train_steps 8 a real run trained a ninth step."""
    limited = replace(layout_of(48), limit=8)
    mismatch = epochs.check_step(False, 8, DataPosition(1, 4), limited, limited)
    assert mismatch is not None
    assert mismatch.reason == "over"


@pytest.mark.parametrize(
    ("step", "epoch", "batch", "reason"),
    [(10, 0.5, 16, None), (10, 0.5, 32, "place"), (40, 1.5, 16, "over"), (40, 2.0, 16, None)],
)
def test_transformers_counts_in_steps(
    step: int, epoch: float, batch: int, reason: str | None
) -> None:
    mismatch = epochs.check_trl(step, epoch, 16, batch, 40)
    assert (mismatch and mismatch.reason) == reason


BEFORE = layout_of(64, per_device=2, devices=2, accumulation=4)
DOUBLED = replace(BEFORE, devices=4)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (replace(BEFORE, per_device=4, accumulation=2), None),
        (replace(BEFORE, devices=4, accumulation=2), None),
        (DOUBLED, "place"),
    ],
)
def test_a_step_has_the_same_rows_on_other_devices(layout: EpochLayout, reason: str | None) -> None:
    saved = epochs.advance(BEFORE, START, 3)
    mismatch = epochs.check_step(False, 3, saved, BEFORE, layout)
    assert (mismatch and mismatch.reason) == reason


def test_an_epoch_of_another_layout_has_other_steps() -> None:
    assert epochs.check_epoch(0, BEFORE, BEFORE) is None
    mismatch = epochs.check_epoch(0, BEFORE, DOUBLED)
    assert mismatch is not None
    assert "4 steps" in mismatch.text
