"""Runs in turn: the folder that they share, begun once; and each from start to verdict, its time and its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY
from fake_world import World, made, needs_trl

from launcher import files
from launcher.errors import Exit, NotReady, not_ready
from launcher.lifecycle import follow, supervisor
from launcher.planning import prepare
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.report.live import View
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.workflows import experiment
from launcher.workflows.experiment import Campaign

pytestmark = needs_trl


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Campaign(kind="bench", key="k", name="a b/c", root=tmp_path / "runs")


def test_the_newest_of_the_same_key_is_found_again(about: Campaign) -> None:
    folders = [rundir.make_folder(about.root, about.kind, about.name) for _ in range(3)]
    assert len(set(folders)) == 3 and folders[0].name.endswith("-bench-a-b-c")
    for folder, key in zip(folders, ("k", "k", "other"), strict=True):
        files.write_json(folder / "bench.json", {"key": key})
    assert about.earlier() == folders[1]
    assert replace(about, kind="tune").earlier() is None
    with about.opened() as folder:
        assert folder == folders[1]
    with about.opened(fresh=True) as folder:
        assert folder not in folders


def test_a_folder_that_cannot_be_made_is_refused(about: Campaign) -> None:
    about.root.write_text("")
    with pytest.raises(NotReady), about.opened():
        pass


_TWO = """
import sys, time
from pathlib import Path
from launcher.workflows.experiment import Campaign
from launcher.errors import NotReady
try:
    with Campaign(kind="bench", key="k", name="x", root=Path(sys.argv[1])).opened():
        print("in", flush=True)
        sys.stdin.read()
except NotReady as error:
    print(error.findings[0].code, flush=True)
"""


def test_two_that_begin_at_once_do_not_begin_twice(about: Campaign) -> None:
    """Before either has a record, and so a folder that the other could find."""
    words = [sys.executable, "-c", _TWO, str(about.root)]
    both = [
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        for _ in range(4)
    ]
    said = [one.stdout.readline().strip() for one in both if one.stdout]
    for one in both:
        one.communicate()
    assert sorted(said) == ["in", *["under-way"] * 3]
    assert len(list(about.root.iterdir())) == 1
    # and whoever was killed holds nothing
    with about.opened() as folder:
        assert [folder] == list(about.root.iterdir())


def test_a_record_that_cannot_be_written_is_said_and_the_old_one_stays(about: Campaign) -> None:
    with about.opened() as folder:
        record = folder / "bench.json"
        before = record.read_text()
        (folder / "in-the-way").mkdir()
        with pytest.raises(NotReady):
            experiment.write(folder / "in-the-way", {"key": "k"})
        assert record.read_text() == before
        assert sorted(one.name for one in folder.iterdir()) == [".lock", "bench.json", "in-the-way"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as one:
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(one.root)
        yield one


def run(
    request: Request, timeout_s: float | None = None, root: Path | None = None
) -> experiment.Outcome:
    prepared = prepare.prepare_start(replace(request, runs=root), Scope.START)
    return experiment.of_prepared(prepared, timeout_s=timeout_s)


def asked(world: World, monkeypatch: pytest.MonkeyPatch, *steps: str, **args: object) -> Request:
    monkeypatch.setenv("FAKE_STEPS", json.dumps(steps))
    return Request(stage="sft", config=world.config(**args), gpus=0, python=world.python())


def test_a_run_lies_below_the_folder_that_several_share(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = rundir.make_folder(world.runs, "ladder", "a b/c")
    told = run(asked(world, monkeypatch, "print=2"), root=shared)
    assert told.run.path.parent == shared
    assert shared.name.endswith("-ladder-a-b-c")
    assert told.run in rundir.known_runs()
    # it ended well, and trained nothing: that is not proof of anything
    assert told.exit is Exit.VERDICT and told.verdict.status != "pass"
    assert told.reason is not None and "loss" in told.reason
    assert told.as_json()["exit"] == 1 and not told.interrupted
    assert world.quiet()


def test_nothing_is_on_disk_before_a_run_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(world, monkeypatch, "print=2")
    prepared = prepare.prepare_start(replace(request, runs=world.runs), Scope.START)
    assert not world.runs.exists()
    # nor is anything left of a start that is refused
    with monkeypatch.context() as refused, pytest.raises(NotReady):
        refused.setattr(supervisor, "spawn", refuse)
        experiment.of_prepared(prepared)
    assert not list(world.runs.iterdir())


def refuse(*_words: object) -> None:
    raise not_ready("run-is-live", "no process can be started")


def test_two_starts_that_planned_the_same_folder_get_one_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(asked(world, monkeypatch, "print=2", output_dir=None), runs=world.runs)
    first = prepare.prepare_start(request, Scope.START)
    second = prepare.prepare_start(request, Scope.START).in_folder(first.folder)
    runs = [experiment.of_prepared(prepared).run for prepared in (first, second)]
    assert runs[1].path.name == f"{runs[0].path.name}-2"
    # each has its probe and its model in its own folder
    for folder in runs:
        attempt = json.loads(folder.start.read_text())
        assert json.loads(attempt["env"]["LAUNCH_PROBE"])["out"] == str(folder.path / "probe")
        assert attempt["output"] == str(folder.path / "model")
        assert str(folder.path / "model") in attempt["argv"]


def test_one_whose_time_is_up_is_stopped_with_all_its_processes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_an_end_is_told_in_a_few_words(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, reason: str
) -> None:
    told = run(asked(world, monkeypatch, step))
    assert told.reason is not None and told.reason.startswith(reason)


def command(world: World, code: str, *steps: str) -> subprocess.Popen[bytes]:
    """Python with what a trial needs, and `request` for one."""
    head = (
        "import os, signal\nfrom pathlib import Path\n"
        "from launcher.lifecycle import start\n"
        "from launcher.planning import prepare as preparation\nfrom launcher.planning.collect import Scope\n"
        "from launcher.planning.request import Request\nfrom launcher.workflows import experiment\n"
        f"request = Request(stage='sft', config=Path({str(world.config())!r}), gpus=0, "
        f"python=Path({str(world.python())!r}))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code], cwd=world.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        bufsize=0, env={**world.environ, "FAKE_STEPS": json.dumps(steps)},
    )  # fmt: skip


def test_term_while_it_is_being_started_leaves_nothing(world: World) -> None:
    code = (
        "begin = start.begin\n"
        "def told(*words, **more):\n"
        "    try:\n        return begin(*words, **more)\n"
        "    finally:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "start.begin = told\n"
        "try:\n    experiment.of_prepared(preparation.prepare(request, Scope.START))\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    out, err = command(world, code, "sleep=600").communicate(timeout=PATIENCE_S)
    assert out.split() == [b"interrupted"], err
    assert world.quiet()


def test_an_end_that_is_asked_for_while_it_is_judged_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_on = follow._update_view

    def judged(folder: RunFolder, view: View) -> None:
        look_on(folder, view)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(follow, "_update_view", judged)
    # what its time is up for besides does not hide it
    told = run(asked(world, monkeypatch, "sleep=600"), timeout_s=2)
    assert told.interrupted and not told.timed_out
    told = run(asked(world, monkeypatch, "print=1", output_dir="b"))
    assert told.interrupted and rundir.read_json(told.run.exit(1))["stopped"] is None
