"""What an evaluation of a run's model leaves in `eval/` of the run folder: its log, its end, and `eval.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.machine import codec
from launcher.machine.codec import Count, Misfit
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

POINT = "evaluation"
"""The point of the verdict that it becomes."""
FOLDER = "eval"
RECORD = "eval.json"

State = Literal["running", "measured", "crashed", "timed_out", "interrupted", "unreadable"]
"""`measured`: the command ended well and its metrics could be read; `unreadable`: they could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What became of one `expect:` of an evaluation: `metric` is the name as it was written, `name` the full name of
    the number that it stands for. `ok` is False too where there is no such number, which `reason` says."""

    metric: str
    expected: str
    ok: bool
    name: str | None = None
    value: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation. `key` names command and model by content: with another key it is another evaluation.

    `attempt` is that of the training whose model was evaluated. `metrics` are all numbers of the file, `main` the
    name of the one that stands for each task. `seconds` is wall time, `reason` says why it is not `measured`.
    """

    schema_version: int = 1
    key: str
    attempt: Count
    state: State
    command: tuple[str, ...]
    model: str
    gpus: Count
    timeout_s: float
    began: str
    ended: str | None = None
    seconds: float = 0.0
    returncode: int | None = None
    reason: str | None = None
    log: str
    metrics_file: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    main: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[GateResult, ...] = ()

    @property
    def passed(self) -> bool:
        return self.state == "measured" and all(gate.ok for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": list(self.command), "gates": [asdict(gate) for gate in self.gates]}


def folder_of(run: RunFolder) -> RunFolder:
    """Where the evaluation of a run writes; its log and its end are named as those of a run are."""
    return RunFolder(run.path / FOLDER)


def record_file(run: RunFolder) -> Path:
    return run.path / FOLDER / RECORD


def read(run: RunFolder) -> EvaluationRecord | None:
    """The record of a run's evaluation; None where there is none, or it is damaged."""
    data = rundir.read_json(record_file(run))
    left_out: list[codec.Omission] = []
    try:
        record = codec.read(EvaluationRecord, data, left_out)
    except Misfit:
        return None
    return None if left_out else record
