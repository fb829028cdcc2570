"""A notice that the machine will be taken: who hears it, how long is waited, how the run ends.

The fake trainer stands for one with a probe: `listens.json` is what the probe writes once it hears,
`saved.json` what it writes when every rank has saved. tests/training/test_preemption.py has real
trainings.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from fake_world import World, open_world, wait_until, wait_until_shown

from launcher import files
from launcher.cli import main
from launcher.lifecycle import start
from launcher.report import overview
from launcher.runs import preemption, rundir
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]
Launcher = subprocess.Popen[bytes]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        for name in ("LAUNCH_RUNS", "XDG_STATE_HOME", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        world.environ.pop("SLURM_JOB_ID", None)
        yield world


def prepare(world: World, *steps: str, listens: bool = True) -> RunFolder:
    """A run that waits to be started, whose trainer has a probe."""
    probe = world.runs / "a run" / "probe"
    probe.mkdir(parents=True)
    if listens:
        files.write_json(probe / "listens.json", {"attempt": 1})
    env = {"LAUNCH_PROBE": json.dumps({"out": str(probe)})}
    return world.prepared("pid=leader", *steps, env=env)


def prepare_saving(world: World) -> RunFolder:
    """A run that ends with a checkpoint as soon as it is asked to."""
    probe = world.runs / "a run" / "probe"
    folder = prepare(world, f"wait={probe / 'save.json'}", "exit=0")
    files.write_json(probe / "saved.json", {"attempt": 1, "step": 7, "path": "out/checkpoint-7"})
    return folder


def begin(world: World, folder: RunFolder) -> None:
    """Start a run that nobody looks at."""
    start.execute(folder)
    world.pid("leader")


def start_launcher(world: World) -> Launcher:
    launcher = world.started("exec", "a run")
    world.pid("leader")
    wait_until_shown(launcher)
    return launcher


def supervisor_pid(folder: RunFolder) -> int:
    return int(rundir.read_json(folder.process)["keeper"]["pid"])


def wait(launcher: Launcher) -> int:
    launcher.communicate(timeout=PATIENCE_S)
    return launcher.returncode


def launch(*words: str) -> int:
    return main.main(list(words))


@pytest.mark.parametrize(
    ("number", "to_launcher"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)]
)
def test_a_notice_is_passed_on_and_the_run_ends_as_preempted(
    world: World, number: int, to_launcher: bool
) -> None:
    folder = prepare_saving(world)
    launcher = start_launcher(world)
    receiver = launcher.pid if to_launcher else supervisor_pid(folder)
    for _ in range(2):
        os.kill(receiver, number)

    assert wait(launcher) == 130
    ended = rundir.read_json(folder.exit(1))
    assert ended["returncode"] == 0
    assert ended["stopped"] is None
    assert ended["preempted"] is True
    assert overview.read_end_state(folder) == "preempted"


def test_stop_with_checkpoint_waits_for_the_save(world: World, capsys: Capture) -> None:
    folder = prepare_saving(world)
    begin(world, folder)
    assert launch("stop", "a run", "--checkpoint") == 0
    assert "saved and ended" in capsys.readouterr().out
    assert overview.read_end_state(folder) == "preempted"


def test_an_orphan_is_asked_too(world: World, capsys: Capture) -> None:
    folder = prepare_saving(world)
    begin(world, folder)
    os.kill(supervisor_pid(folder), signal.SIGKILL)
    assert launch("stop", "a run", "--checkpoint") == 0
    assert "saved and ended" in capsys.readouterr().out
    assert overview.read_end_state(folder) == "preempted"


def test_what_does_not_save_in_time_is_stopped(world: World, capsys: Capture) -> None:
    world.environ[preemption.GRACE_VARIABLE] = "0.5"
    folder = prepare(world, "sleep=600")
    launcher = start_launcher(world)
    launcher.send_signal(signal.SIGTERM)

    assert wait(launcher) == 130
    ended = rundir.read_json(folder.exit(1))
    assert ended["stopped"] == signal.SIGINT
    assert ended["preempted"] is False
    assert ended["grace_s"] == 0.5
    assert overview.read_end_state(folder) == "stopped"
    message = "no checkpoint was saved within 0.5 s of the notice"
    assert message.removesuffix(" of the notice") in folder.console(1).read_text()
    launch("check", "a run")
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    "in_slurm",
    [pytest.param(False, id="not up yet"), pytest.param(True, id="Slurm tells it itself")],
)
def test_a_training_that_cannot_hear_is_stopped_at_once(
    world: World, in_slurm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    folder = prepare(world, "sleep=600", listens=in_slurm)
    begin(world, folder)
    os.kill(supervisor_pid(folder), signal.SIGTERM)
    wait_until(folder.exit(1).exists)
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGTERM


@pytest.mark.parametrize("by_signal", [True, False])
def test_an_ordinary_stop_does_not_wait_for_a_save(world: World, by_signal: bool) -> None:
    folder = prepare(world, "sleep=600")
    launcher = start_launcher(world)
    launcher.send_signal(signal.SIGTERM)
    wait_until((folder.probe / "save.json").exists)
    if by_signal:
        launcher.send_signal(signal.SIGINT)
    else:
        launch("stop", "a run")
    assert wait(launcher) == 130
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT


def test_a_run_without_the_probe_is_not_asked_to_save(world: World, capsys: Capture) -> None:
    folder = world.prepared("pid=leader", "sleep=600")
    begin(world, folder)
    assert launch("stop", "a run", "--checkpoint") == 2
    assert "without the probe" in capsys.readouterr().err
    assert launch("stop", "a run", "--checkpoint", "--after-checkpoint") == 2
    assert overview.read_state(folder) == "running"
    assert launch("stop", "a run") == 0


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_is_refused_before_the_start(
    world: World, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv(preemption.GRACE_VARIABLE, text)
    words = ("sft", str(world.config()), "--gpus", "0", "--python", str(world.python()))
    assert launch(*words) == 2
    assert "bad-grace" in capsys.readouterr().err
