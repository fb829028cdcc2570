"""A run folder -> its `Verdict`, out of the evidence of all its attempts: one answer for whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.artifacts import checkpoints, digest, fingerprint
from launcher.artifacts.fingerprint import FingerprintCache, MissingContent
from launcher.redaction import redact
from launcher.rules.deepspeed import fault
from launcher.runs import attempt, rundir, runner
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, evidence, metrics
from launcher.verdict.check import Point, Verdict
from launcher.verdict.evidence import Evidence, ProbeRecords, RankRecord

_WHOLE_RUN = ("liger", "packing", "attention", "batch", "gradients", "inputs")
"""What is expected of each step of a run, whichever attempt made it."""

_LOST_HELP = "no process of it is left and none recorded an end: the machine went down, or all were killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJudgement:
    """The verdict without tokens, the manifest, and the evidence of each attempt."""

    verdict: Verdict
    manifest: Manifest
    attempts: tuple[Evidence, ...]


def judge(folder: RunFolder, requested: Mapping[str, str] | None = None) -> RunJudgement:
    """Judge a run by its own `expect:`, or by what is requested now.

    Raises OSError if a file that is there cannot be opened.
    """
    manifest = rundir.read_manifest(folder)
    each = read(folder)
    found = whole(each)
    expected = _expected(manifest) if requested is None else requested
    output = None if manifest.output is None else str(manifest.output)
    if found.final_save:
        models = folder.path.parent / "models"
        # the weights of a ladder's rungs are removed after each: that they are gone is no fault
        if models.exists() or not str(output).startswith(f"{models}/"):
            found = replace(found, model=_saved_model(found, output, here=_here(folder)))
    verdict = check.judge(manifest.stage, expected, found)
    verdict = _with_earlier(verdict, folder, each, expected)
    verdict = _beside_plan(verdict, manifest)
    verdict = _without_known_corruption(verdict, manifest)
    if verdict.point("finish").state == "running":
        if (why := runner.unknown(folder)) is not None:
            detail = {"reason": why.message, "help": why.help}
            verdict = verdict.amended("finish", detail, state="unknown", ok=None)
        elif _here(folder) and not runner.alive(folder.path):
            ok = verdict.point("finish").expected in (None, "killed")
            verdict = verdict.amended("finish", {"reason": "lost", "help": _LOST_HELP}, state="killed", ok=ok)
    if verdict.point("finish").state == "completed" and found.final_save:
        verdict = _with_whole_model(verdict, output)
    # a token that training printed must not get from the log into what is shown and kept
    clean = redact(verdict, attempt.tokens(folder))
    return RunJudgement(verdict=clean, manifest=manifest, attempts=each)


def _expected(manifest: Manifest) -> Mapping[str, str | None]:
    # without a record of what was requested nothing can have been proved of it
    return check.UNKNOWN if manifest.expected is None else manifest.expected


def _with_earlier(
    verdict: Verdict, folder: RunFolder, each: Sequence[Evidence], expected: Mapping[str, str | None]
) -> Verdict:
    """A point is proved of a run only if it is of every attempt whose steps are in the weights.

    Each is judged by its own `expect:`: that may have been changed since, and allowed.
    """
    points = {point.name: point for point in verdict.points}
    for number, one, steps in _kept(each):
        manifest = rundir.read_kept_manifest(folder, number)
        before = check.judge(verdict.stage, _expected(manifest) if manifest else expected, one)
        for point in before.points:
            known = points.get(point.name) if point.name in _WHOLE_RUN else None
            if known is not None and known.ok is True and point.ok is not True:
                points[point.name] = _of_attempt(point, number, steps)
    return verdict.with_points(points.values())


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


def _without_known_corruption(verdict: Verdict, manifest: Manifest) -> Verdict:
    """No pass for gradients that nobody compared, of a DeepSpeed that is known to corrupt them."""
    point, recorded = verdict.point("gradients"), manifest.deepspeed
    if point.state != "unknown" or not manifest.gpus or not recorded:
        return verdict
    version = recorded.get("version")
    known = fault(
        recorded.part("config"), version if isinstance(version, str) else None, accumulation=manifest.accumulation
    )
    if known is None or known[0] != "error":
        return verdict
    detail = {"reason": known[2], "help": "train again: docs/gradients.md"}
    return verdict.amended("gradients", detail, ok=None)


def _with_whole_model(verdict: Verdict, output: object) -> Verdict:
    """A saved model is none if its files are not whole.

    A folder that was moved or removed since is no fault of the run.
    """
    # dpo.py saves its model one folder below (dpo.py:111)
    folders = (Path(output), Path(output) / "hf_model") if isinstance(output, str) else ()
    for folder in folders:
        if (fault := checkpoints.damage(folder)) is not None:
            detail = {
                "reason": f"the saved model is not whole: {fault}",
                "help": f"{folder} cannot be loaded: save it again from a checkpoint (the same command "
                "continues from the last complete one), and check the disk",
            }
            ok = verdict.point("finish").ok
            return verdict.amended("finish", detail, ok=None if ok else ok)
    return verdict


def _here(folder: RunFolder) -> bool:
    """Whether the attempt that began last did so where its processes could be seen from here."""
    known = runner.processes(folder)
    return known.leader is not None and not known.out_of_sight


def _beside_plan(verdict: Verdict, manifest: Manifest) -> Verdict:
    """The verdict with the peak that was planned, in GiB by part, beside what memory came to."""
    parts = manifest.plan.part("memory_gib")
    planned = {k: float(v) for k, v in parts.items() if isinstance(v, int | float)}
    if "peak" not in planned:
        return verdict
    detail = dict[str, object](planned_gib=planned)
    if verdict.point("memory").state == "oom":
        largest = sorted(planned.items(), key=lambda one: -one[1])
        shares = ", ".join(f"{k} {v:.1f}" for k, v in largest if k != "peak" and v >= 0.05)
        detail["reason"] = f"planned: {planned['peak']:.1f} GiB a GPU: {shares}"
    return verdict.amended("memory", detail)


def _saved_model(found: Evidence, output: object, *, here: bool) -> dict[str, Any] | None:
    """The saved model as it is now: `path` and, where that is not as it was saved, `state` and `reason`.

    None where nothing was fingerprinted; without a probe only whether the `output` folder is there
    counts. `here` is whether the run trained on this machine: of another one the folder may not be visible.
    """
    event = next(iter(found.last_events("saved_model")), None)
    path, files = (None, None) if event is None else (event.text("path"), event.fields.get("files"))
    if found.probe is None and here and isinstance(output, str) and not Path(output).exists():
        return {"path": output, "state": "missing", "reason": f"{output} does not exist"}
    if path is None or not isinstance(files, list):
        return None
    folder = Path(path)
    model = {"path": path}
    known = {str(one.get("name")): one for one in files if isinstance(one, Mapping)}
    if not folder.is_dir() and not here:
        return {**model, "state": "unknown", "reason": f"{folder} cannot be seen from this machine"}
    if not known:
        return {**model, "state": "missing", "reason": f"the save left no weights in {folder}"}
    try:
        now = digest.weights(path)
    except OSError:
        return {**model, "state": "missing", "reason": f"{folder} is gone"}
    if gone := [name for name in known if name not in now]:
        reason = f"{', '.join(gone[:4])} in {folder} is gone"
        return {**model, "state": "missing", "reason": reason}
    if more := [name for name in now if name not in known]:
        reason = f"{folder} holds {', '.join(more[:4])}, which the run did not save"
        return {**model, "state": "changed", "reason": reason}
    with fingerprint.remembered() as memory:
        for name, one in known.items():
            change = _change_of(folder / name, str(one.get("digest")), memory)
            if change is not None:
                return {**model, "state": "changed", "file": name, **change}
    return model


def _change_of(path: Path, before: str, memory: FingerprintCache) -> dict[str, Any] | None:
    try:
        after = fingerprint.of_file(path, memory).digest
    except MissingContent as error:
        return {"reason": error.findings[0].message}
    if path.suffix == ".safetensors" and checkpoints.blank(path):
        return {"reason": f"every weight in {path} is 0", "before": before, "after": after}
    if after == before:
        return None
    reason = f"{path} was changed after the save: sha256 {before[:12]}, now {after[:12]}"
    return {"reason": reason, "before": before, "after": after}


# --- several attempts as one run ------------------------------------------------------------------


def read(folder: RunFolder) -> tuple[Evidence, ...]:
    before = (evidence.read_run(folder.path, attempt=n) for n in range(1, folder.attempts()))
    return *before, evidence.read_run(folder.path)


def rows_of(attempts: Sequence[Evidence]) -> list[metrics.Row]:
    """Every optimizer step of a run once; see `measures.merged_rows`."""
    return metrics.merged_rows(metrics.metrics_rows(one) for one in attempts)


def whole(attempts: Sequence[Evidence]) -> Evidence:
    """The evidence of the last attempt, with the steps of those before it.

    Where that had no step left to train, with the steps of one before: it was resumed from the last step
    of all, and only saved the model.
    """
    found = _of_the_last(attempts)
    if len(attempts) < 2:
        return found
    own = metrics.metrics_rows(found)
    kept = [row for row in rows_of(attempts[:-1]) if own and row["step"] < own[0]["step"]]
    moved = max((metrics.moved_share(one) or 0.0 for one in attempts[:-1]), default=0.0)
    return replace(found, earlier=kept, moved_before=moved)


def _of_the_last(attempts: Sequence[Evidence]) -> Evidence:
    last = attempts[-1]
    probe = last.probe
    if probe is None or probe.last_step is not None or not last.events("resumed"):
        return last
    for one in reversed(attempts[:-1]):
        before = one.probe
        if before is not None and before.last_step is not None:
            both = {rank: _joined(before.ranks.get(rank), own) for rank, own in probe.ranks.items()}
            return replace(last, probe=ProbeRecords(ranks=both))
    return last


def _joined(before: RankRecord | None, last: RankRecord) -> RankRecord:
    # one file holds both, so the lines of the later one are the higher ones
    if before is None:
        return last
    return replace(last, events=(*before.events, *last.events), steps=before.steps)
