"""A run folder -> its `Verdict`, out of the evidence of all its attempts: one answer for whoever asks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.artifacts import checkpoints, digest, fingerprint, model_files
from launcher.artifacts.fingerprint import MissingContent
from launcher.config.points import BY_NAME
from launcher.rules.deepspeed import fault
from launcher.runs import attempt, rundir, runner
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, evidence, metrics
from launcher.verdict.check import Verdict
from launcher.verdict.evidence import Evidence, ProbeRecords, Row

_LOST_HELP = "no process of it is left and none recorded an end: the machine went down, or all were killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJudgement:
    verdict: Verdict
    manifest: Manifest
    attempts: tuple[Evidence, ...]


def judge(folder: RunFolder, requested: Mapping[str, str] | None = None) -> RunJudgement:
    """Judge a run by its own `expect:`, or by what is requested. Raises OSError if a file cannot be opened."""
    manifest = rundir.read_manifest(folder)
    each = read(folder, manifest)
    found, known = whole(each), runner.processes(folder)
    # whether the attempt that began last did so where its processes could be seen from here
    here = known.leader is not None and not known.out_of_sight
    expected = _expected(manifest) if requested is None else requested
    output = manifest.output
    if found.final_save:
        models = folder.path.parent / "models"
        # the weights of a ladder's rungs are removed after each: that they are gone is no fault
        if models.exists() or not str(output).startswith(f"{models}/"):
            found = found.changed(model=_saved_model(found, output, here=here))
    verdict = check.judge(manifest.stage, expected, found)
    verdict = _with_earlier(verdict, manifest, each, expected)
    verdict = _beside_plan(verdict, manifest)
    verdict = _without_known_corruption(verdict, manifest)
    finish = verdict.point("finish")
    if finish.state == "running":
        if (why := runner.unknown(folder, known)) is not None:
            verdict = verdict.amended("finish", {"reason": why.message, "help": why.help}, state="unknown", ok=None)
        elif known.copy_of is not None or (here and not runner.alive(folder.path, known=known)):
            ok = finish.expected in (None, "killed")
            help = _LOST_HELP if known.copy_of is None else f"it is a copy of {known.copy_of}: check that one"
            verdict = verdict.amended("finish", {"reason": "lost", "help": help}, state="killed", ok=ok)
    elif finish.state == "completed" and found.final_save and output is not None:
        verdict = _with_whole_model(verdict, output)
    # a secret that training printed must not get from the log into what is shown and kept
    clean = attempt.redactor(folder).redact(verdict)
    return RunJudgement(verdict=clean, manifest=manifest, attempts=each)


def _expected(manifest: Manifest) -> Mapping[str, str | None]:
    # without a record of what was requested nothing can have been proved of it
    return check.UNKNOWN if manifest.expected is None else manifest.expected


def _with_earlier(
    verdict: Verdict, current: Manifest, each: Sequence[Evidence], expected: Mapping[str, str | None]
) -> Verdict:
    """A point is proved of a run only if it is of every attempt whose steps are in the weights. Each is judged by its
    own `expect:`: that may have been changed since, and allowed."""
    points = {point.name: point for point in verdict.points}
    for number, one, (first, last) in _kept(each):
        # where no manifest of that attempt was kept, it has the one of the run
        own = expected if one.manifest is current else _expected(one.manifest)
        before = check.judge(verdict.stage, own, one)
        for point in before.points:
            known = points.get(point.name) if BY_NAME[point.name].whole_run else None
            if known is not None and known.ok is True and point.ok is not True:
                why = point.detail.get("reason") or f"it was {point.state}"
                reason = f"in attempt {number}, which made steps {first} to {last}: {why}"
                points[point.name] = replace(point, detail={**point.detail, "reason": reason})
    return verdict.with_points(points.values())


def _kept(each: Sequence[Evidence]) -> Iterator[tuple[int, Evidence, tuple[int, int]]]:
    """The earlier attempts whose steps later ones went on from: number, evidence, first and last step."""
    begun = math.inf
    for number in range(len(each), 0, -1):
        steps = [row["step"] for row in each[number - 1].rows]
        kept = [int(step) for step in steps if step < begun]
        if kept and number < len(each):
            yield number, each[number - 1], (kept[0], kept[-1])
        begun = min([*steps, begun])


def _without_known_corruption(verdict: Verdict, manifest: Manifest) -> Verdict:
    """No pass for gradients that nobody compared, of a DeepSpeed that is known to corrupt them."""
    recorded = manifest.deepspeed
    if verdict.point("gradients").state != "unknown" or not manifest.gpus or recorded is None:
        return verdict
    known = fault(recorded.config, recorded.version, accumulation=manifest.accumulation)
    if known is None or known[0] != "error":
        return verdict
    detail = {"reason": known[2], "help": "train again: docs/gradients.md"}
    return verdict.amended("gradients", detail, ok=None)


def _with_whole_model(verdict: Verdict, output: Path) -> Verdict:
    """A saved model is none if its files are not whole; that it was moved or removed since is no fault of the run."""
    # dpo.py saves its model one folder below (dpo.py::_handle_post_training[hf_model_path = os.path.join])
    for folder in (output, output / "hf_model"):
        if (fault := checkpoints.damage(folder)) is not None:
            help = (
                f"{folder} cannot be loaded: save it again from a checkpoint (the same command continues from the "
                "last complete one), and check the disk"
            )
            detail = {"reason": f"the saved model is not whole: {fault}", "help": help}
            ok = verdict.point("finish").ok
            return verdict.amended("finish", detail, ok=None if ok else ok)
    return verdict


def _beside_plan(verdict: Verdict, manifest: Manifest) -> Verdict:
    """The verdict with the peak that was planned, in GiB by part, beside what memory came to."""
    planned = {part: float(gib) for part, gib in (manifest.plan.memory_gib or {}).items()}
    if "peak" not in planned:
        return verdict
    detail = dict[str, object](planned_gib=planned)
    if verdict.point("memory").state == "oom":
        largest = sorted(planned.items(), key=lambda one: -one[1])
        shares = ", ".join(f"{k} {v:.1f}" for k, v in largest if k != "peak" and v >= 0.05)
        detail["reason"] = f"planned: {planned['peak']:.1f} GiB a GPU: {shares}"
    return verdict.amended("memory", detail)


def _saved_model(found: Evidence, output: Path | None, *, here: bool) -> dict[str, Any] | None:
    """The saved model as it is now: `path` and, where that is not as it was saved, `state` and `reason`. None where
    nothing was fingerprinted; without a probe only whether the `output` folder is there counts. `here` is whether the
    run trained on this machine: of another one the folder may not be visible."""
    if found.probe is None and here and output is not None and not output.exists():
        return {"path": str(output), "state": "missing", "reason": f"{output} does not exist"}
    event = next(iter(found.last_events("saved_model")), None)
    path, files = (None, None) if event is None else (event.text("path"), event.fields.get("files"))
    if path is None or not isinstance(files, list):
        return None
    folder = Path(path)

    def model(state: str, reason: str) -> dict[str, Any]:
        return {"path": path, "state": state, "reason": reason}

    known = {str(one.get("name")): one for one in files if isinstance(one, Mapping)}
    if not folder.is_dir() and not here:
        return model("unknown", f"{folder} cannot be seen from this machine")
    if not known:
        return model("missing", f"the save left no weights in {folder}")
    try:
        now = {*digest.weights(path)}
    except OSError:
        return model("missing", f"{folder} is gone")
    if gone := known.keys() - now:
        return model("missing", f"{', '.join(sorted(gone))} in {folder} is gone")
    if more := now - known.keys():
        return model("changed", f"{folder} holds {', '.join(sorted(more))}, which the run did not save")
    for name, one in known.items():
        if (change := _change_of(folder / name, str(one.get("digest")))) is not None:
            return {"path": path, "state": "changed", "file": name, **change}
    return {"path": path}


def _change_of(path: Path, before: str) -> dict[str, Any] | None:
    try:
        after = fingerprint.of_file(path).digest
    except MissingContent as error:
        return {"reason": error.findings[0].message}
    if path.suffix == ".safetensors" and model_files.blank(path):
        return {"reason": f"every weight in {path} is 0", "before": before, "after": after}
    if after == before:
        return None
    reason = f"{path} was changed after the save: sha256 {before[:12]}, now {after[:12]}"
    return {"reason": reason, "before": before, "after": after}


def read(folder: RunFolder, current: Manifest | None = None) -> tuple[Evidence, ...]:
    """The evidence of every attempt, the last one last; `current` as in `read_run`, which says what it raises."""
    before = (evidence.read_run(folder.path, attempt=n, current=current) for n in range(1, folder.attempts()))
    return *before, evidence.read_run(folder.path, current=current)


def rows_of(attempts: Sequence[Evidence]) -> list[Row]:
    """Every optimizer step of a run once. An attempt continues a checkpoint, so whatever earlier ones did from its
    first step on is gone from the weights, and is left out here too."""
    rows: list[Row] = []
    for attempt_evidence in attempts:
        own = attempt_evidence.rows
        if own:
            before = [row for row in rows if row["step"] < own[0]["step"]]
            rows = [*before, *own]
    return rows


def whole(attempts: Sequence[Evidence]) -> Evidence:
    """The evidence of the last attempt, with the steps of those before it. Where that had no step left to train, with
    the steps of one before: it was resumed from the last step of all, and only saved the model."""
    found, earlier = attempts[-1], attempts[:-1]
    if found.probe is not None and found.probe.last_step is None and found.events("resumed"):
        probes = (one.probe for one in reversed(earlier))
        before = next((probe.ranks for probe in probes if probe is not None and probe.last_step is not None), {})
        ranks = dict(found.probe.ranks)
        for rank in ranks.keys() & before.keys():
            # one file holds both, so the lines of the later one are the higher ones
            events = (*before[rank].events, *ranks[rank].events)
            ranks[rank] = replace(ranks[rank], events=events, steps=before[rank].steps)
        found = replace(found, probe=ProbeRecords(ranks=ranks))
    if not earlier:
        return found
    own = found.rows
    kept = [row for row in rows_of(earlier) if own and row["step"] < own[0]["step"]]
    moved = max(metrics.moved_share(one) or 0.0 for one in earlier)
    return found.changed(earlier=kept, moved_before=moved)
