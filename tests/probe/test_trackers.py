"""The runs of W&B, MLflow and trackio, as the probe records and continues them.

The packages are stubs that keep what they were called with.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from probed_scripts import Training
from probed_scripts import training as training  # a fixture

from launcher.runs import trackers
from launcher.runs.rundir import RunFolder
from launcher.runs.trackers import TrackerRun

STUBS = {
    "wandb.py": """
        import os
        class Run:
            def __init__(self, project, id):
                self.project, self.id, self.name = project, id, "calm-sea-1"
        def init(project=None, id=None, **more):
            return Run(project, id or os.environ.get("WANDB_RUN_ID") or "ab12cd34")
    """,
    "mlflow.py": """
        class Info: run_id, experiment_id, run_name = "f" * 32, "7", "sunny-goat"
        class Run: info = Info
        def start_run(run_id=None, **more): return Run
    """,
    "trackio.py": """
        import json
        class Run:
            def __init__(self, project, name): self.project, self.name = project, name
        def init(project, name=None, resume="never", **more):
            print(json.dumps([project, name, resume]))
            return Run(project, name or "brave-panda-3")
    """,
}


@pytest.fixture
def tracked(training: Training) -> Training:
    for name, text in STUBS.items():
        training.write_package(name, text)
    return training


def test_the_run_of_each_tracker_is_recorded(tracked: Training) -> None:
    done = tracked.run(
        """
        import importlib.util
        # as transformers asks whether it is installed
        assert importlib.util.find_spec("wandb") is not None
        import mlflow, trackio, wandb
        wandb.init(project="p")
        mlflow.start_run()
        trackio.init(project="t", name=None)
        """
    )
    assert done.returncode == 0, done.stderr
    assert tracked.values("tracker", "tracker") == ["wandb", "mlflow", "trackio"]
    assert tracked.values("tracker", "id") == ["ab12cd34", "f" * 32, "brave-panda-3"]
    assert tracked.values("tracker", "project") == ["p", "7", "t"]
    assert tracked.values("tracker", "name") == ["calm-sea-1", "sunny-goat", "brave-panda-3"]


@pytest.mark.parametrize(
    ("call", "continued", "arguments"),
    [
        ("trackio.init(project='t')", None, ["t", None, "never"]),
        ("trackio.init(project='t')", "brave-panda-3", ["t", "brave-panda-3", "allow"]),
        # as transformers calls it, and accelerate
        ("trackio.init(project='t', name=None, resume='allow')", "a-b", ["t", "a-b", "allow"]),
        ("trackio.init('t', name='a-b')", "a-b", ["t", "a-b", "allow"]),
        # a name of the stage file is the user's
        ("trackio.init(project='t', name='mine')", "brave-panda-3", ["t", "mine", "never"]),
        ("trackio.init('t', 'mine')", "brave-panda-3", ["t", "mine", "never"]),
    ],
)
def test_trackio_continues_the_run_of_a_name(
    tracked: Training, call: str, continued: str | None, arguments: list[Any]
) -> None:
    if continued is not None:
        tracked.environ["LAUNCH_TRACKIO_RUN"] = continued
    done = tracked.run(f"import trackio\n{call}")
    assert json.loads(done.stdout) == arguments, done.stderr


@pytest.mark.parametrize(
    "stub",
    [
        "def init(**more): return None",
        "class Run: disabled, id = True, 'x'\ndef init(**more): return Run",
        "other = 7",
    ],
)
def test_a_tracker_that_tells_nothing_stops_nothing(tracked: Training, stub: str) -> None:
    tracked.write_package("wandb.py", stub)
    done = tracked.run("import wandb\ngetattr(wandb, 'init', dict)(project='p')\nprint('trained')")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert tracked.events("tracker") == []


def recorded_trackers(folder: Path, *events: dict[str, Any]) -> tuple[TrackerRun, ...]:
    run = RunFolder(folder)
    run.probe.mkdir()
    lines = [json.dumps({"event": "tracker", **event}) for event in events]
    lines += ["{", "[]", '{"event": "start"}']
    (run.probe / "rank-0.jsonl").write_text("\n".join(lines))
    return trackers.read_trackers(run)


def test_the_last_run_of_each_tracker_is_continued(tmp_path: Path) -> None:
    runs = recorded_trackers(
        tmp_path,
        {"tracker": "wandb", "id": "first", "project": "p"},
        {"tracker": "trackio", "id": "brave panda"},
        {"tracker": "wandb", "id": "second"},
        {"tracker": "comet", "id": "x"},
        {"tracker": "mlflow"},
        {"tracker": "mlflow", "id": "a\nb"},
    )
    trackio = {"LAUNCH_TRACKIO_RUN": "brave panda"}
    wandb = {"WANDB_RUN_ID": "second", "WANDB_RESUME": "allow"}
    assert trackers.list_tracker_variables(runs, {}) == {**wandb, **trackio}


@pytest.mark.parametrize(
    ("environ", "variables"),
    [({"WANDB_RUN_ID": "own"}, {}), ({"WANDB_RESUME": "must"}, {"WANDB_RUN_ID": "second"})],
)
def test_the_users_environment_takes_precedence(
    tmp_path: Path, environ: dict[str, str], variables: dict[str, str]
) -> None:
    runs = recorded_trackers(tmp_path, {"tracker": "wandb", "id": "second"})
    assert trackers.list_tracker_variables(runs, environ) == variables
