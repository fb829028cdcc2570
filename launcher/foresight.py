"""What the plan says of a run that is about to start: for its record, and for whoever looks on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher import forecast
from launcher.errors import LaunchError
from launcher.preparation import Prepared


def foreseen(prepared: Prepared) -> Prepared:
    """The same with the forecast beside it, and with what that has to say among the warnings.

    Nothing is foreseen on the CPU, of a run that is over, or where the model's shape or the row lengths
    are not known: then it is returned as it is.
    """
    planned, chosen = prepared.plan, prepared.devices
    known_already = prepared.forecast is not None or prepared.decision.kind == "finished"
    if not planned.gpus or known_already:
        return prepared
    try:
        told = forecast.of_plan(
            planned, prepared.trainer.packages,
            gpu=chosen.slots[0].gpu if chosen is not None and chosen.slots else None,
            attention=attention(prepared),
        )  # fmt: skip
    except (LaunchError, OSError):
        return prepared
    known = {finding.code for finding in prepared.findings}
    new = [one for one in told.findings if one.code not in known]
    warnings = (*prepared.warnings, *new)
    return replace(prepared, forecast=told.as_json(why=False), warnings=warnings)


def attention(prepared: Prepared) -> str | None:
    """What it will turn out to be where nobody says: open-instruct takes what is installed."""
    planned = prepared.plan
    asked = planned.values.get("attn_implementation")
    if asked is None and planned.stage.options.backend == "open_instruct":
        return None if "flash-attn" in prepared.trainer.packages else "sdpa"
    return None


def peak_of(manifest: Mapping[str, Any]) -> Mapping[str, float]:
    """The parts of the peak in GiB that the record of a run foresees, `peak` among them; else empty."""
    plan = manifest.get("plan")
    parts = plan.get("memory_gib") if isinstance(plan, dict) else None
    if not isinstance(parts, dict):
        return {}
    return {k: float(v) for k, v in parts.items() if isinstance(v, int | float)}
