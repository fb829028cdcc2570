"""A training that stops stepping: said while it runs, with the stacks of all ranks, and ended where that is wanted."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from real_training import needs_training
from test_preemption import Training, after_steps, place, training

from launcher.runs import rundir

__all__ = ["place", "training"]  # fixtures
pytestmark = [pytest.mark.slow, *needs_training]

WATCH = ("probe.hang_seconds=6", "probe.hang_factor=3")


def processes(run: Training) -> dict[int, int]:
    """Rank -> process of the attempt that began last."""
    found = {}
    for rank in range(run.ranks):
        lines = (run.folder / "probe" / f"rank-{rank}.jsonl").read_bytes().splitlines()
        starts = [line for line in map(rundir.parse_line, lines) if line.get("event") == "start"]
        found[rank] = int(starts[-1]["pid"])
    return found


def stand_still(run: Training, rank: int) -> int:
    """Stop the process of a rank as a debugger does; returns its number."""
    after_steps(3)(run)
    pid = processes(run)[rank]
    os.kill(pid, signal.SIGSTOP)
    return pid


def stacks(run: Training, rank: int) -> str:
    path = run.folder / "probe" / f"rank-{rank}.stacks.txt"
    return path.read_text() if path.exists() else ""


def row(run: Training) -> dict[str, object]:
    rows = run.launch("runs")["data"]
    return next(one for one in rows if one["path"] == str(run.folder))


@pytest.mark.parametrize(("ranks", "stopped"), [(1, 0), (2, 1)])
def test_a_rank_that_stands_still_is_said_with_the_stacks_of_all(
    training: Callable[..., Training], ranks: int, stopped: int
) -> None:
    run = training("trl", ranks, *WATCH, "max_steps=400")
    run.start()
    pid = stand_still(run, stopped)
    run.until(lambda: "no sign of life" in stacks(run, stopped))
    # the others wait for it in the same step, and say where
    for rank in set(range(ranks)) - {stopped}:
        run.until(lambda rank=rank: "transformers/trainer.py" in stacks(run, rank))
    assert row(run)["state"] == "running"
    assert row(run)["outcome"] == "hangs"
    os.kill(pid, signal.SIGCONT)
    # it goes on, and is no hang any more
    run.until(lambda: row(run)["outcome"] is None)
    run.launch("stop", run.folder.name)
    run.end()


@pytest.mark.parametrize(("ranks", "stopped"), [(1, 0), (2, 1)])
def test_a_run_that_hangs_is_ended_and_continues_from_its_checkpoint(
    training: Callable[..., Training], ranks: int, stopped: int
) -> None:
    words = ("on_hang=stop", "save_strategy=steps", "save_steps=2")
    run = training("trl", ranks, *WATCH, *words)
    run.variables["LAUNCH_GRACE"] = "1,1,1"
    run.start()
    stand_still(run, stopped)
    codes = run.end()
    assert codes[0] not in (0, 130), run.said
    told = run.launch("check", run.folder.name)["data"]
    finish = next(point for point in told["points"] if point["name"] == "finish")
    assert (finish["state"], finish["detail"]["reason"]) == ("stopped", "hang")
    assert run.state() == "failed"
    codes = run.finish()
    assert codes == [0] * ranks, run.said
    assert run.events("resumed")


def test_a_save_that_hangs_is_said_as_such(training: Callable[..., Training]) -> None:
    run = training(
        "trl", 1, "probe.hang_seconds=1", "on_hang=stop", "save_strategy=steps", "save_steps=2"
    )
    run.slowed("transformers.trainer:Trainer:_save_optimizer_and_scheduler", seconds=600)
    assert run.finish()[0] not in (0, 130)
    (told,) = run.events("hang")
    assert (told["during"], told["step"]) == ("a save", 2)
    assert "_save_checkpoint" in Path(told["stacks"]).read_text()
