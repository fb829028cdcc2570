"""One run from start to verdict, for whatever starts several: what came of it, its time, its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from fake_world import World, looks_on, made, needs_trl

from launcher.errors import Exit
from launcher.lifecycle import follow, prepare
from launcher.lifecycle.prepare import Request
from launcher.report.live import View
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.workflows import experiment

pytestmark = needs_trl


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as one:
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(one.root)
        yield one


def run(request: Request, timeout_s: float | None = None, root: Path | None = None) -> experiment.Outcome:
    prepared = prepare.prepare(replace(request, runs=root), running=True)
    return experiment.of_prepared(prepared, timeout_s=timeout_s)


def asked(world: World, monkeypatch: pytest.MonkeyPatch, *steps: str, **args: object) -> Request:
    monkeypatch.setenv("FAKE_STEPS", json.dumps(steps))
    return Request(stage="sft", config=world.config(**args), gpus=0, python=world.python())


def test_a_run_lies_below_the_folder_that_several_share(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = rundir.new_folder(world.runs, "ladder", "a b/c")
    told = run(asked(world, monkeypatch, "print=2"), root=shared)
    assert told.run.path.parent == shared
    assert shared.name.endswith("-ladder-a-b-c")
    assert told.run in rundir.known_runs()
    # it ended well, and trained nothing: that is not proof of anything
    assert told.exit is Exit.VERDICT and told.verdict.status != "pass"
    assert told.reason is not None and "loss" in told.reason
    assert told.as_json()["exit"] == 1 and not told.interrupted
    assert world.quiet()


def test_one_whose_time_is_up_is_stopped_with_all_its_processes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_GRACE", "1,1,1")
    request = asked(world, monkeypatch, "ignore=INT", "child=same", "pid=leader", "sleep=600")
    told = run(request, timeout_s=2)
    assert told.timed_out and not told.interrupted
    assert told.reason is not None and "time was up" in told.reason
    assert world.quiet()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("kill=KILL", "SIGKILL: killed from outside, most often because host memory ran out"),
        (f"raise=Command '{['python', *200 * ['--x']]}' returned non-zero exit status 3.",
         "the training process returned non-zero exit status 3."),
    ],
)  # fmt: skip
def test_an_end_is_told_in_a_few_words(world: World, monkeypatch: pytest.MonkeyPatch, step: str, reason: str) -> None:
    told = run(asked(world, monkeypatch, step))
    assert told.reason is not None and told.reason.startswith(reason)


def command(world: World, code: str, *steps: str) -> subprocess.Popen[bytes]:
    """Python with what a trial needs, and `request` for one."""
    head = (
        "import os, signal\nfrom pathlib import Path\n"
        "from launcher.lifecycle import prepare as preparation, start\nfrom launcher.workflows import experiment\n"
        f"request = preparation.Request(stage='sft', config=Path({str(world.config())!r}), gpus=0, "
        f"python=Path({str(world.python())!r}))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code], cwd=world.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        bufsize=0, env={**world.environ, "FAKE_STEPS": json.dumps(steps)},
        # a background shell may have it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_the_user_stops_it(world: World) -> None:
    code = (
        "told = experiment.of_prepared(preparation.prepare(request, running=True))\n"
        "print(told.interrupted, int(told.exit), told.timed_out)\n"
    )
    running = command(world, code, "pid=leader", "sleep=600")
    world.pid("leader")
    looks_on(running)
    os.kill(running.pid, signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert out.split() == [b"True", b"130", b"False"]
    assert world.quiet()


def test_term_while_it_is_being_started_leaves_nothing(world: World) -> None:
    code = (
        "begin = start.begin\n"
        "def told(*words, **more):\n"
        "    try:\n        return begin(*words, **more)\n"
        "    finally:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "start.begin = told\n"
        "try:\n    experiment.of_prepared(preparation.prepare(request, running=True))\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    out, err = command(world, code, "sleep=600").communicate(timeout=PATIENCE_S)
    assert out.split() == [b"interrupted"], err
    assert world.quiet()


def test_an_end_that_is_asked_for_while_it_is_judged_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    look_on = follow._look_on

    def judged(folder: RunFolder, view: View) -> None:
        look_on(folder, view)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(follow, "_look_on", judged)
    # what its time is up for besides does not hide it
    told = run(asked(world, monkeypatch, "sleep=600"), timeout_s=2)
    assert told.interrupted and not told.timed_out
    told = run(asked(world, monkeypatch, "print=1", output_dir="b"))
    assert told.interrupted and rundir.read_json(told.run.exit(1))["stopped"] is None
