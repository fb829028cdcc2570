"""A resume reports to the tracker's run of before; what begins anew reports to a new one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_world import World, needs_trl, open_world

from launcher.cli import main
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

pytestmark = [pytest.mark.slow, needs_trl]

VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID", "LAUNCH_TRACKIO_RUN")
UNSET = dict.fromkeys(VARIABLES, "None")
CONTINUED = {
    "WANDB_RUN_ID": "ab12cd34",
    "WANDB_RESUME": "allow",
    "MLFLOW_RUN_ID": "f" * 32,
    "LAUNCH_TRACKIO_RUN": "brave-panda-3",
}
TRACKERS = (
    {"tracker": "wandb", "id": "ab12cd34", "project": "p", "name": "calm-sea-1"},
    {"tracker": "mlflow", "id": "f" * 32},
    {"tracker": "trackio", "id": "brave-panda-3"},
)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.enter(monkeypatch)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        yield world


def train(world: World, monkeypatch: pytest.MonkeyPatch, *steps: str) -> dict[str, str]:
    """Run one more attempt, which crashes after these steps; the variables that it got."""
    config = world.config(save_steps=2, save_strategy="steps")
    shown = [f"env={name}" for name in VARIABLES]
    monkeypatch.setenv("FAKE_STEPS", json.dumps([*shown, *steps, "raise=the lights went out"]))
    words = ["sft", str(config), "--python", str(world.python()), "--gpus", "0"]
    assert main.main(words) == 4
    folder = only_run(world)
    lines = folder.console(folder.attempts()).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith(VARIABLES))


def only_run(world: World) -> RunFolder:
    (folder,) = rundir.list_newest_first(world.runs)
    return folder


def record_trackers(folder: RunFolder) -> None:
    """What the probe records of the trackers that the first attempt reports to."""
    events = [{"event": "start", "rank": 0, "world": 1, "attempt": 1}]
    for tracker in TRACKERS:
        events.append({"event": "tracker", **tracker})
    folder.probe.mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    (folder.probe / "rank-0.jsonl").write_text(text)


def test_a_resume_continues_the_runs_of_before_but_for_the_users_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(world, monkeypatch, "checkpoint=out:2") == UNSET
    folder = only_run(world)
    assert "trackers" not in rundir.read_json(folder.manifest)
    record_trackers(folder)

    assert train(world, monkeypatch) == CONTINUED
    manifest = rundir.read_json(folder.manifest)
    assert [run["id"] for run in manifest["trackers"]] == [run["id"] for run in TRACKERS]
    assert "WANDB_RUN_ID" in manifest["env"]

    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_RESUME", "must")
    variables = train(world, monkeypatch)
    assert variables["WANDB_RUN_ID"] == "mine"
    assert variables["WANDB_RESUME"] == "must"


def test_a_run_that_begins_anew_reports_to_a_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it crashed before its first checkpoint
    train(world, monkeypatch)
    record_trackers(only_run(world))
    assert train(world, monkeypatch) == UNSET
