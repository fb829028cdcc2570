"""The evaluation of a run's model: log, exit and `eval.json` in `eval/` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Literal

from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Count, Misfit
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

POINT = "evaluation"
"""The point of the verdict that holds its result."""
FOLDER = "eval"
RECORD = "eval.json"

State = Literal["running", "measured", "crashed", "timed_out", "interrupted", "unreadable"]
"""`measured`: the command succeeded and its metrics were read; `unreadable`: they were not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The result of one `expect:` of an evaluation.

    `metric` is the name as the user wrote it, `name` that of the number it stands for. A missing
    number is not `ok` either; `reason` says so.
    """

    metric: str
    expected: str
    ok: bool
    name: str | None = None
    value: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation. `key` identifies command and model by content.

    `attempt` trained the model. `metrics` are all numbers of the metrics file, `main` names the one
    that stands for each task. `seconds` is wall time; `reason` says why the state is not
    `measured`.
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

    def as_json(self) -> dict[str, object]:
        gates = [asdict(gate) for gate in self.gates]
        return {**asdict(self), "command": list(self.command), "gates": gates}


def find_evaluation_folder(run: RunFolder) -> RunFolder:
    """Where an evaluation writes; its files are named like those of a run."""
    return RunFolder(run.path / FOLDER)


def record_file(run: RunFolder) -> Path:
    return run.path / FOLDER / RECORD


def read_evaluation(run: RunFolder) -> EvaluationRecord | None:
    """The record of a run's evaluation; None if it is missing or damaged."""
    left_out: list[codec.Omission] = []
    content = rundir.read_json(record_file(run))
    try:
        record = codec.read_record(EvaluationRecord, content, left_out)
    except Misfit:
        return None
    if left_out:
        return None
    return record
