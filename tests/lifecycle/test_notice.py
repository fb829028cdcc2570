"""A notice that the machine will be taken: who hears it, how long it is waited for, and what is said of the end.

Around a fake trainer that stands for one with a probe: `listens` is what the probe leaves when it is there to hear,
`saved` what it leaves when every rank has saved. Real trainings: tests/training/test_preemption.py.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from fake_world import World, looks_on, made, until

from launcher import files
from launcher.report import overview
from launcher.runs import preemption, rundir
from launcher.runs.rundir import RunFolder

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        for name in ("LAUNCH_RUNS", "XDG_STATE_HOME", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        world.environ.pop("SLURM_JOB_ID", None)
        yield world


def probe_of(world: World) -> Path:
    return Path(world.environ["LAUNCH_RUNS"]) / "a run" / "probe"


def training(world: World, *steps: str, listens: bool = True, saved: bool = False) -> RunFolder:
    """A run that waits to be started, whose trainer has a probe."""
    out = probe_of(world)
    out.mkdir(parents=True)
    if listens:
        files.write_json(out / "listens.json", {"attempt": 1})
    if saved:
        files.write_json(out / "saved.json", {"attempt": 1, "step": 7, "path": "out/checkpoint-7"})
    return world.prepared("pid=leader", *steps, env={"LAUNCH_PROBE": json.dumps({"out": str(out)})})


def started(world: World) -> "subprocess.Popen[bytes]":
    running = world.started("exec", "a run")
    world.pid("leader")
    looks_on(running)
    return running


def keeper_of(folder: RunFolder) -> int:
    return int(rundir.read_json(folder.process)["keeper"]["pid"])


def ended(running: "subprocess.Popen[bytes]") -> int:
    running.communicate(timeout=PATIENCE_S)
    return running.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("whom", ["launch", "keeper"])
def test_a_notice_is_handed_on_and_the_run_ends_as_preempted(
    world: World, number: int, whom: str
) -> None:
    folder = training(world, f"wait={probe_of(world) / 'save.json'}", "exit=0", saved=True)
    running = started(world)
    victim = running.pid if whom == "launch" else keeper_of(folder)
    for _ in range(2):
        os.kill(victim, number)
    assert ended(running) == 130
    record = rundir.read_json(folder.exit(1))
    assert (record["returncode"], record["stopped"], record["preempted"]) == (0, None, True)
    assert overview.read_end_state(folder) == "preempted"


def test_stop_with_checkpoint_waits_for_the_save(world: World) -> None:
    training(world, f"wait={probe_of(world) / 'save.json'}", "exit=0", saved=True)
    running = started(world)
    done = world.launch("stop", "a run", "--checkpoint")
    assert (done.returncode, "saved and ended" in done.stdout) == (0, True)
    assert ended(running) == 130


def test_an_orphan_is_asked_too(world: World) -> None:
    folder = training(world, f"wait={probe_of(world) / 'save.json'}", "exit=0", saved=True)
    running = started(world)
    os.kill(keeper_of(folder), signal.SIGKILL)
    world.launch("stop", "a run", "--checkpoint")
    ended(running)
    assert overview.read_end_state(folder) == "preempted"


def test_what_does_not_save_in_time_is_stopped_without(world: World) -> None:
    world.environ[preemption.GRACE_VARIABLE] = "0.5"
    folder = training(world, "sleep=600")
    running = started(world)
    running.send_signal(signal.SIGTERM)
    assert ended(running) == 130
    record = rundir.read_json(folder.exit(1))
    assert (record["stopped"], record["preempted"], record["grace_s"]) == (
        signal.SIGINT,
        False,
        0.5,
    )
    assert overview.read_end_state(folder) == "stopped"
    said = world.launch("check", "a run").stdout
    assert "no checkpoint was saved within 0.5 s of the notice" in said
    assert "no checkpoint was saved within 0.5 s" in folder.console(1).read_text()


@pytest.mark.parametrize("slurm", [False, True])
def test_a_training_that_cannot_hear_is_stopped_at_once(world: World, slurm: bool) -> None:
    """It is not up yet, or Slurm has told it the same itself."""
    if slurm:
        world.environ["SLURM_JOB_ID"] = "1"
    folder = training(world, "sleep=600", listens=slurm)
    running = started(world)
    os.kill(keeper_of(folder), signal.SIGTERM)
    assert ended(running) == 130
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGTERM


@pytest.mark.parametrize("how", ["INT", "stop"])
def test_an_ordinary_stop_does_not_wait_for_a_save(world: World, how: str) -> None:
    folder = training(world, "sleep=600")
    running = started(world)
    running.send_signal(signal.SIGTERM)
    until((probe_of(world) / "save.json").exists)
    if how == "INT":
        running.send_signal(signal.SIGINT)
    else:
        world.launch("stop", "a run")
    assert ended(running) == 130
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT


def test_who_cannot_save_is_not_asked(world: World) -> None:
    world.prepared("pid=leader", "sleep=600")
    running = started(world)
    done = world.launch("stop", "a run", "--checkpoint")
    assert (done.returncode, "without the probe" in done.stderr) == (2, True)
    assert world.launch("stop", "a run", "--checkpoint", "--after-checkpoint").returncode == 2
    assert running.poll() is None
    world.launch("stop", "a run")
    ended(running)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_is_refused_before_the_start(world: World, text: str) -> None:
    world.environ[preemption.GRACE_VARIABLE] = text
    done = world.launch("sft", str(world.config()), "--gpus", "0", "--python", str(world.python()))
    assert (done.returncode, "bad-grace" in done.stderr) == (2, True)
