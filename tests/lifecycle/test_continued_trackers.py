"""A resume reports to the tracker's run of before; what begins anew reports to a new one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_world import World, made, needs_trl

from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

pytestmark = [pytest.mark.slow, needs_trl]

VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID", "LAUNCH_TRACKIO_RUN")
SHOWN = tuple(f"env={name}" for name in VARIABLES)
REPORTED = (
    {"event": "start", "rank": 0, "world": 1, "attempt": 1},
    {
        "event": "tracker",
        "tracker": "wandb",
        "id": "ab12cd34",
        "project": "p",
        "name": "calm-sea-1",
    },
    {"event": "tracker", "tracker": "mlflow", "id": "f" * 32},
    {"event": "tracker", "tracker": "trackio", "id": "brave-panda-3"},
)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    root = tmp_path / "world"
    with made(root / "unused"):
        one = World(root)
        for name in VARIABLES:
            one.environ.pop(name, None)
            monkeypatch.delenv(name, raising=False)
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        yield one


def begun(world: World, *steps: str) -> tuple[Path, RunFolder]:
    """A run that reported to trackers, did these steps and crashed."""
    config = world.config(save_steps=2, save_strategy="steps")
    assert world.trained(str(config), steps=(*steps, "raise=the lights went out")).returncode == 4
    (folder,) = rundir.newest_first(world.runs)
    folder.probe.mkdir(exist_ok=True)
    record = folder.probe / "rank-0.jsonl"
    record.write_text("".join(f"{json.dumps(event)}\n" for event in REPORTED))
    return config, folder


def variables(folder: RunFolder, attempt: int) -> dict[str, str]:
    lines = folder.console(attempt).read_text().splitlines()
    return {
        name: value
        for name, value in (line.split("=", 1) for line in lines if line.startswith(VARIABLES))
    }


def test_a_resume_continues_the_runs_of_before(world: World) -> None:
    config, folder = begun(world, "checkpoint=out:2", *SHOWN)
    assert set(variables(folder, 1).values()) == {"None"}
    assert "trackers" not in rundir.read_json(folder.manifest)
    world.trained(str(config), steps=(*SHOWN, "model=out"))
    assert variables(folder, 2) == {
        "WANDB_RUN_ID": "ab12cd34",
        "WANDB_RESUME": "allow",
        "MLFLOW_RUN_ID": "f" * 32,
        "LAUNCH_TRACKIO_RUN": "brave-panda-3",
    }
    record = rundir.read_json(folder.manifest)
    assert [one["id"] for one in record["trackers"]] == ["ab12cd34", "f" * 32, "brave-panda-3"]
    assert "WANDB_RUN_ID" in record["env"]


def test_the_users_own_run_comes_first(world: World) -> None:
    config, folder = begun(world, "checkpoint=out:2")
    world.trained(
        str(config),
        steps=(*SHOWN, "model=out"),
        env={"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"},
    )
    told = variables(folder, 2)
    assert (told["WANDB_RUN_ID"], told["WANDB_RESUME"]) == ("mine", "must")


def test_a_run_that_begins_anew_reports_to_a_new_one(world: World) -> None:
    # it crashed before its first checkpoint
    config, folder = begun(world)
    world.trained(str(config), steps=(*SHOWN, "model=out"))
    assert set(variables(folder, 2).values()) == {"None"}
