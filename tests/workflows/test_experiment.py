"""Runs in turn: the folder that they share, and each from its start to its verdict."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY
from fake_world import World, needs_trl, open_world

from launcher import files
from launcher.errors import Exit, NotReady, not_ready
from launcher.lifecycle import follow, supervisor
from launcher.planning import prepare
from launcher.planning.collect import Scope
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.report.live import View
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.workflows import experiment
from launcher.workflows.experiment import Campaign, Outcome

pytestmark = needs_trl


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(kind="bench", key="k", name="a b/c", root=tmp_path / "runs")


def test_the_newest_folder_of_the_same_key_is_used_again(campaign: Campaign) -> None:
    folders = []
    for key in ("k", "k", "other"):
        folders.append(rundir.make_folder(campaign.root, campaign.kind, campaign.name))
        files.write_json(folders[-1] / "bench.json", {"key": key})
    assert len(set(folders)) == 3
    assert folders[0].name.endswith("-bench-a-b-c")
    assert replace(campaign, kind="tune").earlier() is None
    with campaign.opened() as folder:
        assert folder == folders[1]
    with campaign.opened(fresh=True) as folder:
        assert folder not in folders


def test_a_folder_that_cannot_be_made_is_refused(campaign: Campaign) -> None:
    campaign.root.write_text("")
    with pytest.raises(NotReady), campaign.opened():
        pass


OPENS_A_CAMPAIGN = """
import sys
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


def test_two_that_begin_at_once_do_not_both_begin(campaign: Campaign) -> None:
    """Before either has a record, by which the other could find its folder."""
    processes = []
    for _ in range(2):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", OPENS_A_CAMPAIGN, str(campaign.root)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY,
            )
        )  # fmt: skip
    answers = [process.stdout.readline().strip() for process in processes if process.stdout]
    for process in processes:
        process.communicate()
    assert sorted(answers) == ["in", "under-way"]
    assert len(list(campaign.root.iterdir())) == 1
    # a process that has ended holds nothing
    with campaign.opened() as folder:
        assert [folder] == list(campaign.root.iterdir())


def test_a_record_that_cannot_be_written_leaves_the_old_one(campaign: Campaign) -> None:
    with campaign.opened() as folder:
        record = folder / "bench.json"
        before = record.read_text()
        (folder / "in-the-way").mkdir()
        with pytest.raises(NotReady):
            experiment.write(folder / "in-the-way", {"key": "k"})
        assert record.read_text() == before
        names = sorted(path.name for path in folder.iterdir())
        assert names == [".lock", "bench.json", "in-the-way"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.enter(monkeypatch)
        yield world


Ask = Callable[..., Request]


@pytest.fixture
def ask(world: World, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """A request for a training that takes these steps."""

    def request(*steps: str, **args: object) -> Request:
        monkeypatch.setenv("FAKE_STEPS", json.dumps(steps))
        config = world.config(**args)
        return Request(stage="sft", config=config, gpus=0, python=world.python(), runs=world.runs)

    return request


def plan(request: Request) -> Prepared:
    return prepare.prepare_start(request, Scope.START)


def run(request: Request, timeout_s: float | None = None) -> Outcome:
    return experiment.run_prepared(plan(request), timeout_s=timeout_s)


def test_a_run_lies_below_the_folder_that_several_share(world: World, ask: Ask) -> None:
    shared = rundir.make_folder(world.runs, "ladder", "a b/c")
    outcome = run(replace(ask("print=2"), runs=shared))
    assert outcome.run.path.parent == shared
    assert outcome.run in rundir.list_known_runs()
    # it ended well and trained nothing, which proves nothing
    assert outcome.exit is Exit.VERDICT
    assert outcome.verdict.status != "pass"
    assert "loss" in (outcome.reason or "")
    assert outcome.as_json()["exit"] == 1
    assert not outcome.interrupted
    assert world.quiet()


def refuse(*_words: object) -> None:
    raise not_ready("run-is-live", "no process can be started")


def test_nothing_is_on_disk_before_a_run_begins_or_after_it_is_refused(
    world: World, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = plan(ask("print=2"))
    assert not world.runs.exists()
    monkeypatch.setattr(supervisor, "spawn", refuse)
    with pytest.raises(NotReady):
        experiment.run_prepared(prepared)
    assert not list(world.runs.iterdir())


def test_two_starts_that_planned_the_same_folder_get_one_each(world: World, ask: Ask) -> None:
    request = ask("print=2", output_dir=None)
    first = plan(request)
    second = plan(request).in_folder(first.folder)
    folders = [experiment.run_prepared(prepared).run for prepared in (first, second)]
    assert folders[1].path.name == f"{folders[0].path.name}-2"
    for folder in folders:
        attempt = json.loads(folder.start.read_text())
        assert json.loads(attempt["env"]["LAUNCH_PROBE"])["out"] == str(folder.path / "probe")
        assert attempt["output"] == str(folder.path / "model")
        assert attempt["output"] in attempt["argv"]


def test_a_run_whose_time_is_up_is_stopped_with_all_its_processes(world: World, ask: Ask) -> None:
    outcome = run(ask("ignore=INT", "child=same", "pid=leader", "sleep=600"), timeout_s=2)
    assert outcome.timed_out
    assert not outcome.interrupted
    assert "time was up" in (outcome.reason or "")
    assert world.quiet()


LONG_COMMAND = f"raise=Command '{['python', *200 * ['--x']]}' returned non-zero exit status 3."


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("kill=KILL", "SIGKILL: killed from outside, most often because host memory ran out"),
        (LONG_COMMAND, "the training process returned non-zero exit status 3."),
    ],
)
def test_the_reason_of_an_end_is_short(ask: Ask, step: str, reason: str) -> None:
    assert (run(ask(step)).reason or "").startswith(reason)


TERMINATES_ITSELF = """
import os, signal, sys
from pathlib import Path
from launcher.lifecycle import start
from launcher.planning import prepare
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.workflows import experiment

begin = start.begin
def begin_and_terminate(*words, **more):
    try:
        return begin(*words, **more)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
start.begin = begin_and_terminate
config, python = map(Path, sys.argv[1:])
request = Request(stage="sft", config=config, gpus=0, python=python)
try:
    experiment.run_prepared(prepare.prepare_start(request, Scope.START))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_term_while_a_run_is_started_leaves_nothing(world: World) -> None:
    words = [sys.executable, "-c", TERMINATES_ITSELF, str(world.config()), str(world.python())]
    environment = {**world.environ, "FAKE_STEPS": '["sleep=600"]'}
    done = subprocess.run(
        words, cwd=world.root, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert world.quiet()


@pytest.fixture
def interrupted_while_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    update = follow._update_view

    def update_and_interrupt(folder: RunFolder, view: View) -> None:
        update(folder, view)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(follow, "_update_view", update_and_interrupt)


@pytest.mark.usefixtures("interrupted_while_judged")
def test_a_run_whose_time_is_up_besides_was_interrupted(ask: Ask) -> None:
    outcome = run(ask("sleep=600"), timeout_s=2)
    assert outcome.interrupted
    assert not outcome.timed_out


@pytest.mark.usefixtures("interrupted_while_judged")
def test_an_interrupt_while_a_run_is_judged_counts(ask: Ask) -> None:
    outcome = run(ask("print=1"))
    assert outcome.interrupted
    assert rundir.read_json(outcome.run.exit(1))["stopped"] is None
