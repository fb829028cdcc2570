"""The arithmetic of a resume, against the pinned loops played through batch by batch."""

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.planning.resume import epochs
from launcher.planning.resume.epochs import DataPosition, EpochLayout, ResumeMismatch

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
    has_skipped = False
    steps: list[Step] = []
    current: Step = []
    for epoch in range(first_epoch, layout.passes):
        order = epoch
        first = 0
        if resumed is not None and (stage == "dpo" or (skip and not has_skipped)):
            # a loader that skips, made anew
            has_skipped = True
            first = skip
            order = epoch if keeps_order else 0
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


def reason(mismatch: ResumeMismatch | None) -> str | None:
    return None if mismatch is None else mismatch.reason


def inexact_steps(
    skips_each: bool, layout: EpochLayout, every: int, *, keeps_order: bool = True
) -> list[int]:
    inexact = epochs.find_inexact(skips_each, layout, every, keeps_order=keeps_order)
    return [step for step, _ in inexact]


UNEVEN = EpochLayout(rows=44, per_device=4, devices=1, accumulation=2, epochs=2)
EVEN = EpochLayout(rows=48, per_device=4, devices=1, accumulation=2, epochs=2)


def test_positions_measured_at_the_pin() -> None:
    """Real runs: 44 rows of 4, accumulation 2, two epochs: 11 micro-batches an epoch, 6 steps."""
    assert inexact_steps(False, UNEVEN, 2) == [6, 8, 10]
    assert inexact_steps(False, EVEN, 2) == []
    # 12 steps became 10 when DPO went on from step 2, none was lost from step 6 or 8
    assert inexact_steps(True, EVEN, 2) == [2, 4]
    # with accelerate 1.12 SFT went on from step 4 exactly, and from step 8 elsewhere
    assert inexact_steps(False, EVEN, 4, keeps_order=False) == [8]
    # with max_train_steps 8 step 8 is inside the second epoch: a ninth was trained
    limited = EpochLayout(rows=48, per_device=4, devices=1, accumulation=2, limit=8)
    mismatch = epochs.check_step(False, 8, DataPosition(1, 4), limited, limited)
    assert reason(mismatch) == "over"


def test_transformers_counts_in_steps() -> None:
    assert epochs.check_trl(10, 0.5, 16, 16, 40) is None
    assert reason(epochs.check_trl(10, 0.5, 16, 32, 40)) == "place"
    assert reason(epochs.check_trl(40, 1.5, 16, 16, 40)) == "over"
    assert epochs.check_trl(40, 2.0, 16, 16, 40) is None


def layout_of(per_device: int, devices: int, accumulation: int) -> EpochLayout:
    return EpochLayout(
        rows=64, per_device=per_device, devices=devices, accumulation=accumulation, epochs=2
    )


def test_other_devices_and_the_same_rows() -> None:
    before = layout_of(2, 2, 4)
    saved = epochs.advance(before, START, 3)
    for same_rows in (layout_of(4, 2, 2), layout_of(2, 4, 2)):
        assert epochs.check_step(False, 3, saved, before, same_rows) is None
    doubled = layout_of(2, 4, 4)
    assert reason(epochs.check_step(False, 3, saved, before, doubled)) == "place"
    assert epochs.check_epoch(0, before, before) is None
    counted = epochs.check_epoch(0, before, doubled)
    assert counted is not None
    assert "4 steps" in counted.text
