"""Evidence -> the run in numbers: losses, one row a step, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.evidence import MEASURED, Evidence, ProbeStep

Row = dict[str, float]
"""One optimizer step: `step`, `finite`, and what is known of the rest."""

_REWARDS = {
    "rewards_accuracy": ("rewards/accuracies", "rewards/accuracy"),
    "rewards_margin": ("rewards/margins", "rewards/margin"),
}


def losses(evidence: Evidence) -> tuple[float, ...]:
    """The losses as logged, NaN included, or where none is logged as the probe saw them."""
    if evidence.log is not None and evidence.log.steps:
        return tuple(line.loss for line in evidence.log.steps)
    return tuple(row["loss"] for row in _probe_rows(evidence) if "loss" in row)


def peak_allocated_gib(evidence: Evidence) -> float | None:
    """The peak of torch's allocated memory on the fullest rank."""
    ranks = evidence.probe.ranks.values() if evidence.probe else ()
    peaks = [s.allocated_gib for r in ranks for s in r.steps if s.allocated_gib is not None]
    return max(peaks, default=None)


def tokens_per_second(evidence: Evidence) -> float | None:
    """Steady tokens a second of all ranks: without the first fifth, at least one step."""
    rates = []
    for record in evidence.probe.ranks.values() if evidence.probe else ():
        steady = record.steps[max(1, len(record.steps) // 5) :]
        seconds = math.fsum(s.seconds or 0.0 for s in steady)
        tokens = math.fsum(s.tokens or 0.0 for s in steady)
        rates.append(tokens / seconds if seconds > 0 else 0.0)
    return math.fsum(rates) if rates and all(rates) else None


def metrics(evidence: Evidence) -> dict[str, float | None]:
    """The whole run in numbers, None where unknown or not finite.

    `logged_tokens_per_second` is open-instruct's own, warm-up included. DPO's rewards are there
    only where the log prints them.
    """
    seen = losses(evidence)
    last = evidence.log.steps[-1] if evidence.log and evidence.log.steps else None
    rewards = {
        name: value
        for name, keys in _REWARDS.items()
        for key in keys
        if last and math.isfinite(value := last.extra.get(key, math.nan))
    }
    return {
        "first_loss": seen[0] if seen and math.isfinite(seen[0]) else None,
        "last_loss": seen[-1] if seen and math.isfinite(seen[-1]) else None,
        "min_loss": min(filter(math.isfinite, seen), default=None),
        "tokens_per_second": tokens_per_second(evidence),
        "logged_tokens_per_second": last.tokens_per_second if last else None,
        "peak_allocated_gib": peak_allocated_gib(evidence),
        **rewards,
    }


def metrics_rows(evidence: Evidence) -> list[Row]:
    """One row a step, sorted: what the log says, and of the probe what the log does not know.

    Tokens and positions are sums over the ranks, seconds and memory (GiB) the largest of them. A
    number that is not finite is left out, and `finite` is then false.
    """
    rows = {row["step"]: row for row in _probe_rows(evidence)}
    for line in evidence.log.steps if evidence.log else ():
        logged = {
            "loss": line.loss,
            "learning_rate": line.learning_rate,
            "logged_tokens_per_second": line.tokens_per_second,
            **line.extra,
        }
        finite = {k: v for k, v in logged.items() if v is not None and math.isfinite(v)}
        row = rows.setdefault(line.step, {"step": line.step})
        row["finite"] = row.get("finite", True) and math.isfinite(line.loss)
        if "loss" not in finite:
            row.pop("loss", None)
        row.update(finite)
    return [rows[step] for step in sorted(rows)]


def _probe_rows(evidence: Evidence) -> list[Row]:
    by_step: dict[int, list[ProbeStep]] = {}
    for record in evidence.probe.ranks.values() if evidence.probe else ():
        for step in record.steps:
            by_step.setdefault(step.step, []).append(step)
    return [_probe_row(number, by_step[number]) for number in sorted(by_step)]


def _probe_row(number: int, steps: Sequence[ProbeStep]) -> Row:
    row: Row = {"step": number, "finite": all(s.finite for s in steps)}
    if row["finite"] and (losses := [s.loss for s in steps if s.loss is not None]):
        row["loss"] = math.fsum(losses) / len(losses)
    for key in MEASURED:
        if parts := [v for s in steps if (v := getattr(s, key)) is not None]:
            row[key] = sum(parts) if key in ("tokens", "positions") else max(parts)
    return row
