"""A preempted training continues the run of its tracker and does not begin a second one.

W&B works offline, trackio and MLflow write into folders; a package that is missing is left out.
"""

import importlib.util
import json
import signal
from typing import Any

import pytest
from interrupted import INTERRUPTED, Begin, Training
from interrupted import place as place  # a fixture
from interrupted import training as training  # a fixture
from real_training import needs_open_instruct, needs_training

pytestmark = [pytest.mark.slow, *needs_training]

TRACKERS = [name for name in ("mlflow", "trackio", "wandb") if importlib.util.find_spec(name)]
needs_wandb = pytest.mark.skipif("wandb" not in TRACKERS, reason="no package wandb")


def tracker_runs(run: Training) -> dict[str, Any]:
    """The id of each tracker's run that the last attempt reported to."""
    events = run.events("tracker")
    ids = {event["tracker"]: event["id"] for event in events}
    assert len(ids) == len(events)
    return ids


def interrupt_and_continue(run: Training) -> dict[str, Any]:
    """Preempt the run and finish it; returns the trackers' runs, the same before and after."""
    run.variables |= {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(run.place),
        "TRACKIO_DIR": str(run.place / "trackio"),
        "MLFLOW_TRACKING_URI": (run.place / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    run.start()
    run.wait_for_steps(3)
    before = tracker_runs(run)
    run.notify(signal.SIGTERM)
    assert run.end() == [INTERRUPTED], run.output_text
    assert run.finish() == [0], "".join(run.output_text)[-4000:]
    assert tracker_runs(run) == before
    return before


@pytest.mark.skipif(not TRACKERS, reason="no package of a tracker")
def test_trl_continues_the_run_of_each_tracker(training: Begin) -> None:
    run = training("trl", 1, f"report_to=[{','.join(TRACKERS)}]")
    ids = interrupt_and_continue(run)
    assert sorted(ids) == TRACKERS
    record = json.loads((run.folder / "run.json").read_text())
    assert {tracker["tracker"]: tracker["id"] for tracker in record["trackers"]} == ids


@needs_wandb
@needs_open_instruct
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sft", ("report_to=wandb",)),
        # the loss of the first steps is ln 2 in both attempts
        ("dpo", ("expect.resume=any",)),
    ],
)
def test_open_instruct_continues_its_wandb_run(
    training: Begin, kind: str, words: tuple[str, ...]
) -> None:
    run = training(kind, 1, "with_tracking=true", "wandb_entity=nobody", *words)
    assert len(interrupt_and_continue(run)) == 1
