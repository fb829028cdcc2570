"""Runs of W&B, MLflow and trackio that a run reports to, and the variables that continue them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Misfit
from launcher.runs import events
from launcher.runs.rundir import RunFolder

Name = Literal["wandb", "mlflow", "trackio"]
# characters of an id: W&B's have 8, MLflow's 32, trackio's are names
_MAX_ID_CHARS = 200
# W&B: docs.wandb.ai/models/runs/resuming; MLflow: mlflow/tracking/fluent.py, start_run.
# trackio has no variable: the probe passes the name on (launcher/probe/watching/trainers.py)
_VARIABLES: Mapping[Name, str] = {
    "wandb": "WANDB_RUN_ID",
    "mlflow": "MLFLOW_RUN_ID",
    "trackio": "LAUNCH_TRACKIO_RUN",
}
_WANDB_RESUME = "WANDB_RESUME"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRun:
    """A run of a tracker. `id` is the tracker's own; trackio uses the name."""

    tracker: Name
    id: str
    project: str | None = None
    name: str | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def read_trackers(folder: RunFolder) -> tuple[TrackerRun, ...]:
    """The run of each tracker that rank 0 reported to last, as the probe recorded it."""
    latest: dict[str, TrackerRun] = {}
    for event in events.read_events(folder.probe / "rank-0.jsonl"):
        if event["event"] != "tracker":
            continue
        try:
            run = codec.read_record(TrackerRun, event)
        except Misfit:
            continue
        if run.id.isprintable() and len(run.id) <= _MAX_ID_CHARS:
            latest[run.tracker] = run
    return tuple(latest.values())


def list_tracker_variables(
    runs: Sequence[TrackerRun], environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables that make a training continue `runs`; those in `environ` take precedence."""
    variables: dict[str, str] = {}
    for run in runs:
        variable = _VARIABLES[run.tracker]
        if environ.get(variable):
            continue
        variables[variable] = run.id
        if run.tracker == "wandb" and not environ.get(_WANDB_RESUME):
            variables[_WANDB_RESUME] = "allow"
    return variables
