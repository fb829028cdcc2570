"""Real trainings that report to real trackers are preempted and continued: one run there, not two.

W&B runs offline, trackio and MLflow write into folders; a package that is not installed is left out.
"""

import importlib.util
import json
import signal
from collections.abc import Callable

import pytest
from real_training import known_commit as known_commit  # a fixture
from real_training import needs_open_instruct, needs_training
from test_preemption import Training
from test_preemption import place as place  # a fixture
from test_preemption import training as training  # a fixture

pytestmark = [pytest.mark.slow, *needs_training]

Begin = Callable[..., Training]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"no package {package}"
    )


def interrupted_and_continued(run: Training) -> tuple[list[str], list[str]]:
    """The ids of the trackers' runs that the first attempt reported to, and those of the second."""
    run.variables |= {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(run.place),
        "TRACKIO_DIR": str(run.place / "trackio"),
        "MLFLOW_TRACKING_URI": (run.place / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    run.start()
    run.until(lambda: len(run.events("step")) >= 3)
    first = [event["id"] for event in run.events("tracker")]
    run.notify(signal.SIGTERM)
    assert run.end() == [130], run.said
    assert run.finish() == [0], "".join(run.said)[-4000:]
    return first, [event["id"] for event in run.events("tracker")]


@pytest.mark.parametrize(
    "tracker",
    [
        pytest.param("wandb", marks=needs("wandb")),
        pytest.param("trackio", marks=needs("trackio")),
        pytest.param("mlflow", marks=needs("mlflow")),
    ],
)
def test_trl_continues_its_tracker_run(training: Begin, tracker: str) -> None:
    run = training("trl", 1, f"report_to={tracker}")
    first, second = interrupted_and_continued(run)
    assert len(first) == 1 and second == first
    record = json.loads((run.folder / "run.json").read_text())
    assert [(one["tracker"], one["id"]) for one in record["trackers"]] == [(tracker, first[0])]


@needs("wandb")
@needs_open_instruct
@pytest.mark.usefixtures("known_commit")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_open_instruct_continues_its_wandb_run(training: Begin, kind: str) -> None:
    # DPO's loss is ln 2 in the few steps before
    more = ("report_to=wandb",) if kind == "sft" else ("expect.resume=any",)
    run = training(kind, 1, "with_tracking=true", "wandb_entity=nobody", *more)
    first, second = interrupted_and_continued(run)
    assert len(first) == 1 and second == first
