"""The arithmetic of a resume, against the pinned loops played through batch by batch."""

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.planning.resume import epochs
from launcher.planning.resume.epochs import DataPosition, EpochLayout

Step = list[tuple[int, int]]
"""One optimizer step: the micro-batches it takes, each as (whose order, which of that order)."""


def played(
    stage: str, shape: EpochLayout, resumed: int | None = None, *, keeps: bool = True
) -> list[Step]:
    """What finetune.py and dpo_tune_cache.py do, as their loops stand, from the start or from `step_N`."""
    done, epoch, skip = 0, 0, 0
    if resumed is not None:
        epoch, skip = divmod(resumed * shape.accumulation, shape.micro)
        done = resumed
    skipped, steps, open_ = False, [], []  # type: bool, list[Step], Step
    for now in range(epoch, shape.passes):
        order, first = now, 0
        if resumed is not None and (stage == "dpo" or (skip and not skipped)):
            # a loader that skips, made anew
            order, first, skipped = now if keeps else 0, skip, True
        for micro in range(first, shape.micro):
            open_.append((order, micro))
            last = micro == shape.micro - 1
            # accelerate counts micro-batches since the start, and begins anew with each epoch
            if last or (micro - first + 1) % shape.accumulation == 0:
                steps.append(open_)
                open_, done = [], done + 1
                if done >= shape.total:
                    break
    return steps


shapes = st.builds(
    EpochLayout, rows=st.integers(1, 60), per_device=st.integers(1, 4), devices=st.integers(1, 3),
    accumulation=st.integers(1, 5), epochs=st.integers(1, 4),
    limit=st.none() | st.integers(1, 60),
)  # fmt: skip


@settings(max_examples=1500)
@given(st.sampled_from(["sft", "dpo"]), shapes, st.integers(1, 80), st.booleans())
def test_a_resume_is_called_exact_just_where_the_loops_agree(
    stage: str, shape: EpochLayout, step: int, keeps: bool
) -> None:
    alone = played(stage, shape)
    assert len(alone) == shape.total
    if step > shape.total:
        return
    saved = epochs.advanced(shape, DataPosition(0, 0), step)
    wrong = epochs.of_step(stage == "dpo", step, saved, shape, shape, keeps_order=keeps)
    same = played(stage, shape, step, keeps=keeps) == alone[step:]
    assert (wrong is None) == same, (wrong, alone[step:], played(stage, shape, step, keeps=keeps))


@given(shapes, st.integers(0, 200))
def test_advancing_in_two_parts_is_advancing_at_once(shape: EpochLayout, steps: int) -> None:
    at = DataPosition(0, 0)
    for _ in range(steps):
        at = epochs.advanced(shape, at, 1)
        # the end of an epoch is the begin of the next one
        if at.micro >= shape.micro:
            at = DataPosition(at.epoch + 1, 0)
    assert at == epochs.advanced(shape, DataPosition(0, 0), steps)


@settings(max_examples=300)
@given(st.sampled_from(["sft", "dpo"]), shapes, st.integers(1, 12))
def test_the_checkpoints_that_are_not_exact_are_found(
    stage: str, shape: EpochLayout, every: int
) -> None:
    wrong = list(epochs.inexact(stage == "dpo", shape, every))
    alone = played(stage, shape)
    for step in range(every, shape.total, every):
        assert (step in wrong) == (played(stage, shape, step) != alone[step:])


def test_measured_at_the_pin() -> None:
    """Real runs: 44 rows of 4, accumulation 2, two epochs: 11 micro-batches an epoch, 6 steps."""
    shape = EpochLayout(rows=44, per_device=4, devices=1, accumulation=2, epochs=2)
    assert (shape.micro, shape.updates, shape.total, shape.passes) == (11, 6, 12, 2)
    assert epochs.counted(shape, 6) == DataPosition(1, 1)
    assert epochs.counted(shape, 8) == DataPosition(1, 5)
    assert list(epochs.inexact(False, shape, 2)) == [6, 8, 10]
    even = EpochLayout(rows=48, per_device=4, devices=1, accumulation=2, epochs=2)
    assert list(epochs.inexact(False, even, 2)) == []
    # 12 steps became 10 when DPO went on from step 2, none was lost from step 6 or 8
    assert list(epochs.inexact(True, even, 2)) == [2, 4]
    # with accelerate 1.12 SFT went on from step 4 exactly, and from step 8 elsewhere
    assert list(epochs.inexact(False, even, 4, keeps_order=False)) == [8]
    # with max_train_steps 8 step 8 is inside the second epoch: a ninth was trained
    limited = EpochLayout(rows=48, per_device=4, devices=1, accumulation=2, limit=8)
    told = epochs.of_step(False, 8, DataPosition(1, 4), limited, limited)
    assert told is not None and told.reason == "over"
    # transformers counts in steps
    assert epochs.of_trl(10, 0.5, 16, 16, 40) is None
    moved = epochs.of_trl(10, 0.5, 16, 32, 40)
    assert moved is not None and moved.reason == "place"
    over = epochs.of_trl(40, 1.5, 16, 16, 40)
    assert over is not None and over.reason == "over"
    assert epochs.of_trl(40, 2.0, 16, 16, 40) is None


def test_other_devices_and_the_same_rows() -> None:
    was = EpochLayout(rows=64, per_device=2, devices=2, accumulation=4, epochs=2)
    for now in (
        EpochLayout(rows=64, per_device=4, devices=2, accumulation=2, epochs=2),
        EpochLayout(rows=64, per_device=2, devices=4, accumulation=2, epochs=2),
    ):
        assert (
            epochs.of_step(False, 3, epochs.advanced(was, DataPosition(0, 0), 3), was, now) is None
        )
    doubled = EpochLayout(rows=64, per_device=2, devices=4, accumulation=4, epochs=2)
    told = epochs.of_step(False, 3, epochs.advanced(was, DataPosition(0, 0), 3), was, doubled)
    assert told is not None and told.reason == "place"
    assert epochs.of_epoch(0, was, was) is None
    counted = epochs.of_epoch(0, was, doubled)
    assert counted is not None and "4 steps" in counted.text
