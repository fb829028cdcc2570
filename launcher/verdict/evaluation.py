"""The point `evaluation`: what `eval.json` in the run folder says of the model."""

from __future__ import annotations

from launcher.runs.evaluation import EvaluationRecord
from launcher.verdict.evidence import Evidence
from launcher.verdict.points import UNKNOWN, Observation

_HELP = (
    "the log of the evaluation says why; `launch pipeline` with the same file evaluates the model "
    "again"
)


def observe_evaluation(evidence: Evidence, _expected: str | None) -> Observation:
    """`passed` or `failed` by its gates, `measured` without any.

    An evaluation of an earlier attempt's model, or none, is unknown.
    """
    record = evidence.evaluation
    if record is None:
        return UNKNOWN
    detail = _collect_detail(record)
    if record.state in ("running", "interrupted"):
        return Observation("unfinished", detail=detail)
    if record.state != "measured":
        reason = f"the evaluation failed: {record.reason}"
        return Observation(record.state, unwanted=True, detail=detail, reason=reason, help=_HELP)
    if not record.gates:
        return Observation("measured", detail=detail)
    if record.passed:
        return Observation("passed", detail=detail)
    reasons = [gate.reason for gate in record.gates if gate.reason is not None]
    return Observation("failed", unwanted=True, detail=detail, reason="; ".join(reasons))


def _collect_detail(record: EvaluationRecord) -> dict[str, object]:
    gates = []
    for gate in record.gates:
        gates.append(
            {
                "metric": gate.metric,
                "expected": gate.expected,
                "name": gate.name,
                "value": gate.value,
                "ok": gate.ok,
            }
        )
    return {
        "metrics": dict(record.metrics),
        "main": dict(record.main),
        "gates": gates,
        "command": list(record.command),
        "metrics_file": record.metrics_file,
        "log": record.log,
        "seconds": record.seconds,
    }
