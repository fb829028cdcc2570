"""The runs of W&B, MLflow and trackio that a run reports to, and the variables that have a resume continue them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from launcher.machine import codec
from launcher.machine.codec import Misfit
from launcher.runs import events
from launcher.runs.rundir import RunFolder

Name = Literal["wandb", "mlflow", "trackio"]
_LONGEST = 200
"""Characters of an id: W&B's are 8, MLflow's 32, trackio's are names."""
# W&B: docs.wandb.ai/models/runs/resuming; MLflow: mlflow/tracking/fluent.py, start_run; trackio has no variable of its
# own, and is handed the name by the probe (launcher/probe/watching/trainers.py)
_VARIABLES: Mapping[Name, str] = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID", "trackio": "LAUNCH_TRACKIO_RUN"}
_WANDB_RESUME = ("WANDB_RESUME", "allow")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRun:
    """A run of a tracker, by its `id` there: of trackio that is its name."""

    tracker: Name
    id: str
    project: str | None = None
    name: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recorded(folder: RunFolder) -> tuple[TrackerRun, ...]:
    """The run of each tracker that the first process of a run reported to last, as the probe saw it."""
    latest: dict[str, TrackerRun] = {}
    for event in events.read_all(folder.probe / "rank-0.jsonl"):
        if event["event"] != "tracker":
            continue
        try:
            run = codec.read(TrackerRun, event)
        except Misfit:
            continue
        if run.id.isprintable() and len(run.id) <= _LONGEST:
            latest[run.tracker] = run
    return tuple(latest.values())


def environment(runs: Sequence[TrackerRun], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that have a training continue these; what `environ` says of a run comes before that."""
    added: dict[str, str] = {}
    for run in runs:
        variable = _VARIABLES[run.tracker]
        if environ.get(variable):
            continue
        added[variable] = run.id
        if run.tracker == "wandb" and not environ.get(_WANDB_RESUME[0]):
            added |= dict([_WANDB_RESUME])
    return added
