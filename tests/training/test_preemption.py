"""A training that is told to save and end before its machine is taken continues where it ended.

The continued run must have the weights of one that was left alone, bit for bit. One rank, and two
that meet over gloo.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupted import INTERRUPTED, STEPS, Begin, Training
from interrupted import place as place  # a fixture
from interrupted import training as training  # a fixture
from real_answers import find_point
from real_training import needs_open_instruct, needs_training

pytestmark = [pytest.mark.slow, *needs_training]

Moment = Callable[[Training], None]
Alone = Callable[[str, int], Training]

OPTIMIZER_STEP = "accelerate.optimizer:AcceleratedOptimizer:step"
TRL_SAVE = "transformers.trainer:Trainer:_save_optimizer_and_scheduler"
OPEN_INSTRUCT_SAVE = "accelerate.accelerator:Accelerator:save_state"


@pytest.fixture(scope="module")
def alone(place: Path) -> Alone:
    """A run of a kind that nobody disturbs, trained once."""
    trained: dict[tuple[str, int], Training] = {}

    def train(kind: str, ranks: int) -> Training:
        if (kind, ranks) not in trained:
            run = Training(place, kind, f"{kind}-{ranks}-alone", ranks)
            codes = run.finish()
            assert codes == [0] * ranks, run.output_text
            trained[kind, ranks] = run
        return trained[kind, ranks]

    return train


def before_the_first_step(run: Training) -> None:
    run.wait_until(lambda: run.run is not None and (run.run / "probe" / "listens.json").exists())


def after_four_steps(run: Training) -> None:
    run.wait_for_steps(4)


def after_an_earlier_notice(run: Training) -> None:
    run.wait_for_steps(3)
    run.notify()
    time.sleep(0.1)


def preempt(run: Training, moment: Moment, number: int = signal.SIGTERM, rank: int = 0) -> int:
    """Start, send the notice at a moment, and return the step that was saved."""
    if not run.variables:
        # so that the last step does not end before the notice arrives
        run.delay(OPTIMIZER_STEP, 0.3)
    run.start()
    moment(run)
    run.notify(number, rank)
    codes = run.end()
    assert codes[0] == INTERRUPTED, run.output_text
    assert run.listed()["state"] == "preempted"

    steps = [run.events("preempted", rank)[0]["step"] for rank in range(run.ranks)]
    assert len(set(steps)) == 1
    assert 0 < steps[0] < STEPS
    return int(steps[0])


def require_same(run: Training, other: Training) -> None:
    """The command again ends the run as if it had never been disturbed."""
    run.variables.clear()
    codes = run.finish()
    assert codes == [0] * run.ranks, run.output_text
    assert sorted(run.losses()) == list(range(1, STEPS + 1))
    assert run.losses() == pytest.approx(other.losses(), abs=1e-6)
    assert run.weights() == other.weights()


@pytest.mark.parametrize(
    ("kind", "moment", "number"),
    [
        pytest.param("trl", after_an_earlier_notice, signal.SIGTERM, id="trl twice"),
        pytest.param(
            "sft",
            before_the_first_step,
            signal.SIGTERM,
            id="sft before the first step",
            marks=needs_open_instruct,
        ),
        pytest.param("dpo", after_four_steps, signal.SIGUSR1, id="dpo", marks=needs_open_instruct),
    ],
)
def test_a_notice_saves_at_a_step_and_the_same_command_continues_there(
    training: Begin, alone: Alone, kind: str, moment: Moment, number: int
) -> None:
    run = training(kind)
    step = preempt(run, moment, number)
    verdict = json.loads((run.folder / "verdict.json").read_text())
    finish = find_point(verdict, "finish")
    assert finish["state"] == "preempted"
    assert Path(finish["detail"]["checkpoint"]).name.endswith(str(step))

    require_same(run, alone(kind, 1))
    assert run.events("resumed")[0]["step"] == step


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        pytest.param("trl", TRL_SAVE, ("save_strategy=steps", "save_steps=3"), id="trl"),
        pytest.param(
            "sft",
            OPEN_INSTRUCT_SAVE,
            ("checkpointing_steps=3",),
            id="sft",
            marks=needs_open_instruct,
        ),
    ],
)
def test_a_notice_during_a_save_saves_the_step_after_it(
    training: Begin, alone: Alone, kind: str, method: str, words: tuple[str, ...]
) -> None:
    run = training(kind, 1, *words)
    run.delay(method)
    assert preempt(run, Training.wait_for_delay) == 4
    require_same(run, alone(kind, 1))


# tests/runs/test_slurm.py has TRL on two nodes
@needs_open_instruct
def test_two_ranks_save_the_same_step_whichever_is_notified(training: Begin, alone: Alone) -> None:
    run = training("sft", 2)
    preempt(run, after_four_steps, signal.SIGUSR1, rank=1)
    require_same(run, alone("sft", 2))
    assert run.events("resumed")
