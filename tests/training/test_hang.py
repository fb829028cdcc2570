"""A training that stops stepping: the stacks of all ranks, and its end where that is wanted."""

import os
import signal
from pathlib import Path

import pytest
from interrupted import INTERRUPTED, Begin, Training
from interrupted import place as place  # a fixture
from interrupted import training as training  # a fixture
from real_answers import find_point
from real_training import needs_training

from launcher.runs import rundir

pytestmark = [pytest.mark.slow, *needs_training]

WATCH = ("probe.hang_seconds=6", "probe.hang_factor=3")
SAVES = ("save_strategy=steps", "save_steps=2")


def find_process(run: Training, rank: int) -> int:
    """The process of a rank in the attempt that began last."""
    record = run.folder / "probe" / f"rank-{rank}.jsonl"
    events = [rundir.parse_line(line) for line in record.read_bytes().splitlines()]
    starts = [event for event in events if event.get("event") == "start"]
    return int(starts[-1]["pid"])


def stop_process(run: Training, rank: int) -> int:
    """Stop the process of a rank as a debugger does."""
    run.wait_for_steps(3)
    pid = find_process(run, rank)
    os.kill(pid, signal.SIGSTOP)
    return pid


def read_stacks(run: Training, rank: int) -> str:
    path = run.folder / "probe" / f"rank-{rank}.stacks.txt"
    return path.read_text() if path.exists() else ""


def test_a_process_that_stands_still_hangs_until_it_goes_on(training: Begin) -> None:
    run = training("trl", 1, *WATCH, "max_steps=400")
    run.start()
    pid = stop_process(run, 0)
    run.wait_until(lambda: "no sign of life" in read_stacks(run, 0))
    row = run.listed()
    assert row["state"] == "running"
    assert row["outcome"] == "hangs"

    os.kill(pid, signal.SIGCONT)
    run.wait_until(lambda: run.listed()["outcome"] is None)
    run.launch("stop", run.folder.name)
    run.end()


def test_a_run_with_a_hanging_rank_is_ended_and_continues_from_its_checkpoint(
    training: Begin,
) -> None:
    run = training("trl", 2, *WATCH, "on_hang=stop", *SAVES)
    run.variables["LAUNCH_GRACE"] = "1,1,1"
    run.start()
    stop_process(run, 1)
    codes = run.end()
    assert codes[0] not in (0, INTERRUPTED), run.output_text
    assert "no sign of life" in read_stacks(run, 1)
    # the other rank waits in the same step, and its stack says where
    assert "transformers/trainer.py" in read_stacks(run, 0)

    finish = find_point(run.launch("check", run.folder.name)["data"], "finish")
    assert finish["state"] == "stopped"
    assert finish["detail"]["reason"] == "hang"
    assert run.listed()["state"] == "failed"

    assert run.finish() == [0, 0], run.output_text
    assert run.events("resumed")


def test_a_save_that_hangs_is_named_as_the_cause(training: Begin) -> None:
    run = training("trl", 1, "probe.hang_seconds=1", "on_hang=stop", *SAVES)
    run.delay("transformers.trainer:Trainer:_save_optimizer_and_scheduler", seconds=600)
    assert run.finish()[0] not in (0, INTERRUPTED)
    (hang,) = run.events("hang")
    assert hang["during"] == "a save"
    assert hang["step"] == 2
    assert "_save_checkpoint" in Path(hang["stacks"]).read_text()
