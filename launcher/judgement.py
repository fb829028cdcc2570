"""A run folder -> its `Verdict`, out of the evidence of all its attempts: one answer for whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import attempt as attempts
from launcher import (
    check,
    checkpoints,
    evidence,
    gradient_doubt,
    measures,
    rundir,
    runner,
    saved_model,
)
from launcher.check import Point, Verdict
from launcher.evidence import Evidence, Probe, RankRecord
from launcher.record import Record
from launcher.redaction import redact
from launcher.rundir import RunFolder

_WHOLE_RUN = ("liger", "packing", "attention", "batch", "gradients", "inputs")
"""What a run is asked for in each of its steps, whichever attempt made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict without tokens, the manifest, and the evidence of each attempt."""

    verdict: Verdict
    manifest: Record
    attempts: tuple[Evidence, ...]


def judge(folder: RunFolder, asked: Mapping[str, str] | None = None) -> Judged:
    """Judge a run by what it was asked for, or by what is asked of it now.

    Raises OSError if a file that is there cannot be opened.
    """
    told = rundir.read_manifest(folder)
    each = read(folder)
    found = whole(each)
    expected = _expected(told) if asked is None else asked
    stage = told.get("stage")
    if found.final_save:
        found = replace(
            found, model=saved_model.compare(found, told.get("output"), here=_here(folder))
        )
    seen = check.judge(stage if isinstance(stage, str) else None, expected, found)
    seen = _with_earlier(seen, folder, each, expected)
    seen = check.beside(seen, _planned_gib(told))
    seen = gradient_doubt.doubted(seen, told)
    if seen.point("finish").state == "running":
        if (leader := runner.unknown(folder)) is not None:
            seen = check.unknown(seen, runner.unknown_here(folder, leader))
        elif _lost(folder):
            seen = check.lost(seen)
    if seen.point("finish").state == "completed" and found.final_save:
        seen = _with_model(seen, told)
    # a token that training printed must not get from the log into what is shown and kept
    clean = redact(seen, attempts.tokens(folder))
    return Judged(verdict=clean, manifest=told, attempts=each)


def _expected(told: Mapping[str, Any]) -> Mapping[str, str | None]:
    asked = told.get("expect")
    # where the record of what was asked for is lost, nothing can have been proved of it
    return asked if isinstance(asked, Mapping) else check.UNKNOWN


def _with_earlier(
    verdict: Verdict,
    folder: RunFolder,
    each: Sequence[Evidence],
    expected: Mapping[str, str | None],
) -> Verdict:
    """A point is proved of a run only if it is of every attempt whose steps are in the weights.

    Each is held to what was asked of it: that may have been changed since, and allowed.
    """
    points = {point.name: point for point in verdict.points}
    for number, one, steps in _kept(each):
        told = rundir.read_kept_manifest(folder, number)
        before = check.judge(verdict.stage, _expected(told) if told else expected, one)
        for point in before.points:
            known = points.get(point.name) if point.name in _WHOLE_RUN else None
            if known is not None and known.ok is True and point.ok is not True:
                points[point.name] = _of_attempt(point, number, steps)
    return check.with_points(verdict, tuple(points.values()))


def _of_attempt(point: Point, number: int, steps: tuple[int, int]) -> Point:
    why = point.detail.get("reason") or f"it was {point.state}"
    reason = f"in attempt {number}, which made steps {steps[0]} to {steps[1]}: {why}"
    return replace(point, detail={**point.detail, "reason": reason})


def _kept(each: Sequence[Evidence]) -> Iterator[tuple[int, Evidence, tuple[int, int]]]:
    """The earlier attempts whose steps later ones went on from: number, evidence, first and last step."""
    begun: float | None = None
    for number in range(len(each), 0, -1):
        steps = [row["step"] for row in rows_of(each[number - 1 : number])]
        kept = [step for step in steps if begun is None or step < begun]
        if kept and number < len(each):
            yield number, each[number - 1], (int(kept[0]), int(kept[-1]))
        begun = min([*steps, *([] if begun is None else [begun])], default=None)


def _with_model(verdict: Verdict, told: Mapping[str, Any]) -> Verdict:
    """A model that was seen to be saved is none if its files are not whole.

    Of a folder that was moved or removed since nothing is said: the run is none the worse for it.
    """
    output = told.get("output")
    if isinstance(output, str):
        # dpo.py saves its model one folder below (dpo.py:111)
        for folder in (Path(output), Path(output) / "hf_model"):
            if (fault := checkpoints.damage(folder)) is not None:
                return check.damaged(verdict, folder, fault)
    return verdict


def _lost(folder: RunFolder) -> bool:
    """Whether all of a run that was started here is gone; elsewhere nobody here can look."""
    return _here(folder) and not runner.alive(folder.path)


def _here(folder: RunFolder) -> bool:
    """Whether the attempt that began last did so where its processes could be seen from here."""
    known = runner.processes(folder)
    return known.leader is not None and not known.out_of_sight


def _planned_gib(manifest: Record) -> Mapping[str, float]:
    """The parts of the peak that the record of a run foresees, `peak` among them; else empty."""
    parts = manifest.part("plan", "memory_gib")
    return {k: float(v) for k, v in parts.items() if isinstance(v, int | float)}


# --- several attempts as one run ------------------------------------------------------------------


def read(folder: RunFolder) -> tuple[Evidence, ...]:
    """The evidence of every attempt, the last one last. Raises OSError like `read_run`."""
    before = (evidence.read_run(folder.path, attempt=n) for n in range(1, folder.attempts()))
    return *before, evidence.read_run(folder.path)


def rows_of(attempts: Sequence[Evidence]) -> list[measures.Row]:
    """Every optimizer step of a run once; see `measures.merged_rows`."""
    return measures.merged_rows(measures.metrics_rows(one) for one in attempts)


def whole(attempts: Sequence[Evidence]) -> Evidence:
    """The evidence of the last attempt, with the losses and gradient norms before it.

    Where that had no step left to train, with the steps of one before: it was resumed from the last step
    of all, and only saved the model.
    """
    found = _of_the_last(attempts)
    if len(attempts) < 2:
        return found
    own = measures.metrics_rows(found)
    kept = [row for row in rows_of(attempts[:-1]) if own and row["step"] < own[0]["step"]]
    losses, norms = (
        tuple(row[name] for row in kept if name in row) for name in ("loss", "grad_norm")
    )
    bad = tuple(int(row["step"]) for row in kept if row.get("finite") is False)
    moved = max((measures.moved_share(one) or 0.0 for one in attempts[:-1]), default=0.0)
    return replace(found, before=losses, norms_before=norms, bad_before=bad, moved_before=moved)


def _of_the_last(attempts: Sequence[Evidence]) -> Evidence:
    last = attempts[-1]
    probe = last.probe
    if probe is None or probe.last_step is not None or not last.events("resumed"):
        return last
    for one in reversed(attempts[:-1]):
        before = one.probe
        if before is not None and before.last_step is not None:
            both = {rank: _joined(before.ranks.get(rank), own) for rank, own in probe.ranks.items()}
            return replace(last, probe=Probe(ranks=both))
    return last


def _joined(before: RankRecord | None, last: RankRecord) -> RankRecord:
    # one file holds both, so the lines of the later one are the higher ones
    if before is None:
        return last
    return replace(last, events=(*before.events, *last.events), steps=before.steps)
