"""Judge a run folder by the evidence of all its attempts: one answer for everyone who asks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from launcher.artifacts import checkpoints, digest, fingerprint, model_files
from launcher.artifacts.fingerprint import MissingContent
from launcher.config.points import BY_NAME
from launcher.lazy_dataclass import dataclass
from launcher.rules.deepspeed import fault
from launcher.runs import attempt, rundir, runner
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.runs.runner import Processes
from launcher.verdict import check, evidence, metrics
from launcher.verdict.check import Point, Verdict
from launcher.verdict.evidence import Evidence, ProbeRecords, Row

_LOST_HELP = (
    "no process of it is left and none recorded an end: the machine went down, or all were killed"
)
_LEAST_GIB = 0.05
"""Parts of the planned memory below this are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJudgement:
    verdict: Verdict
    manifest: Manifest
    attempts: tuple[Evidence, ...]


def judge_run(folder: RunFolder, requested: Mapping[str, str] | None = None) -> RunJudgement:
    """Judge a run by its own `expect:`, or by what is requested.

    Raises OSError if a file cannot be opened.
    """
    manifest = rundir.read_manifest(folder)
    attempts = read_attempts(folder, manifest)
    run = merge_attempts(attempts)
    processes = runner.read_processes(folder)
    # whether this machine could see the processes of the last attempt
    was_visible = processes.leader is not None and not processes.is_remote
    if run.final_save and _keeps_model(folder, manifest.output):
        run = run.with_facts(
            model=_inspect_saved_model(run, manifest.output, was_visible=was_visible)
        )
    expected: Mapping[str, str | None] = _read_expected(manifest)
    if requested is not None:
        expected = requested
    verdict = check.judge_evidence(manifest.stage, expected, run)
    verdict = _add_earlier_attempts(verdict, manifest, attempts, expected)
    verdict = _add_planned_memory(verdict, manifest)
    verdict = _add_known_corruption(verdict, manifest)
    finish = verdict.point("finish")
    if finish.state == "running":
        verdict = _add_lost_end(verdict, folder, processes, was_visible=was_visible)
    elif finish.state == "completed" and run.final_save and manifest.output is not None:
        verdict = _add_model_damage(verdict, manifest.output)
    # a secret that training printed must not get from the log into what is shown and kept
    clean = attempt.find_redactor(folder).redact(verdict)
    return RunJudgement(verdict=clean, manifest=manifest, attempts=attempts)


def _read_expected(manifest: Manifest) -> Mapping[str, str | None]:
    if manifest.expected is None:
        # nothing can be proved of a run without a record of what was requested
        return check.expect_nothing()
    return manifest.expected


def _keeps_model(folder: RunFolder, output: Path | None) -> bool:
    """Whether the run should still have its model: a ladder removes the weights of its rungs."""
    models = folder.path.parent / "models"
    return models.exists() or not str(output).startswith(f"{models}/")


def _add_lost_end(
    verdict: Verdict, folder: RunFolder, processes: Processes, *, was_visible: bool
) -> Verdict:
    """The verdict on a run without a recorded end, by what is known of its processes."""
    unknown = runner.check_known_state(folder, processes)
    if unknown is not None:
        detail = {"reason": unknown.message, "help": unknown.help}
        return verdict.amend("finish", detail, state="unknown", ok=None)
    help = _LOST_HELP
    if processes.copy_of is not None:
        help = f"it is a copy of {processes.copy_of}: check that one"
    elif not was_visible or runner.is_alive(folder.path, processes=processes):
        return verdict
    ok = verdict.point("finish").expected in (None, "killed")
    return verdict.amend("finish", {"reason": "lost", "help": help}, state="killed", ok=ok)


def _add_earlier_attempts(
    verdict: Verdict,
    current: Manifest,
    attempts: Sequence[Evidence],
    expected: Mapping[str, str | None],
) -> Verdict:
    """The verdict with what earlier attempts did not prove, if their steps are in the weights.

    Each attempt is judged by its own `expect:`, which may have been changed since.
    """
    points = {point.name: point for point in verdict.points}
    for earlier in _find_attempts_in_weights(attempts):
        manifest = earlier.evidence.manifest
        # an attempt without a manifest of its own has that of the run
        own = expected
        if manifest is not current:
            own = _read_expected(manifest)
        earlier_verdict = check.judge_evidence(verdict.stage, own, earlier.evidence)
        for point in earlier_verdict.points:
            latest = points.get(point.name)
            if latest is None or not BY_NAME[point.name].whole_run:
                continue
            if latest.ok is True and point.ok is not True:
                points[point.name] = _name_attempt(point, earlier)
    return verdict.with_points(points.values())


class _EarlierAttempt(NamedTuple):
    """An attempt whose steps, from the first to the last, later attempts continued from."""

    number: int
    evidence: Evidence
    first: int
    last: int


def _name_attempt(point: Point, earlier: _EarlierAttempt) -> Point:
    reason = point.detail.get("reason") or f"it was {point.state}"
    steps = f"steps {earlier.first} to {earlier.last}"
    reason = f"in attempt {earlier.number}, which made {steps}: {reason}"
    return replace(point, detail={**point.detail, "reason": reason})


def _find_attempts_in_weights(attempts: Sequence[Evidence]) -> Iterator[_EarlierAttempt]:
    """The earlier attempts whose steps are in the weights, the latest first."""
    next_start = math.inf
    for number in range(len(attempts), 0, -1):
        rows = attempts[number - 1].rows
        kept = _select_rows_before(rows, next_start)
        if kept and number < len(attempts):
            first = int(kept[0]["step"])
            last = int(kept[-1]["step"])
            yield _EarlierAttempt(number, attempts[number - 1], first, last)
        if rows:
            next_start = min(next_start, rows[0]["step"])


def _add_known_corruption(verdict: Verdict, manifest: Manifest) -> Verdict:
    """No pass for unchecked gradients of a DeepSpeed that is known to corrupt them."""
    deepspeed = manifest.deepspeed
    if deepspeed is None or not manifest.gpus or verdict.point("gradients").state != "unknown":
        return verdict
    accumulation = manifest.accumulation
    defect = fault(deepspeed.config, deepspeed.version, accumulation=accumulation)
    if defect is None:
        return verdict
    severity, _, message, _ = defect
    if severity != "error":
        return verdict
    detail = {"reason": message, "help": "train again: docs/gradients.md"}
    return verdict.amend("gradients", detail, ok=None)


def _add_model_damage(verdict: Verdict, output: Path) -> Verdict:
    """No pass for a saved model with incomplete files; that it was moved since is no fault."""
    # dpo.py saves its model one folder below
    # (dpo.py::_handle_post_training[hf_model_path = os.path.join])
    for folder in (output, output / "hf_model"):
        damage = checkpoints.find_damage(folder)
        if damage is not None:
            detail = {
                "reason": f"the saved model is not whole: {damage}",
                "help": f"{folder} cannot be loaded: save it again from a checkpoint (the same "
                "command continues from the last complete one), and check the disk",
            }
            ok = verdict.point("finish").ok
            if ok is True:
                ok = None
            return verdict.amend("finish", detail, ok=ok)
    return verdict


def _add_planned_memory(verdict: Verdict, manifest: Manifest) -> Verdict:
    """The verdict with the planned peak of memory, in GiB by part, beside the measured one."""
    parts = dict(manifest.plan.memory_gib or {})
    if "peak" not in parts:
        return verdict
    detail: dict[str, object] = {"planned_gib": {part: float(gib) for part, gib in parts.items()}}
    if verdict.point("memory").state == "oom":
        peak = parts.pop("peak")
        shares = []
        for part, gib in sorted(parts.items(), key=lambda item: -item[1]):
            if gib >= _LEAST_GIB:
                shares.append(f"{part} {gib:.1f}")
        named = ", ".join(shares)
        detail["reason"] = f"planned: {peak:.1f} GiB a GPU: {named}"
    return verdict.amend("memory", detail)


def _inspect_saved_model(
    run: Evidence, output: Path | None, *, was_visible: bool
) -> dict[str, object] | None:
    """The saved model as it is now: `path`, and if that differs from the save `state` and `reason`.

    None if nothing was fingerprinted; without a probe, only the existence of `output` counts.
    `was_visible`: the run trained on this machine. The folder of another one may not be visible.
    """
    if run.probe is None and was_visible and output is not None and not output.exists():
        return {"path": str(output), "state": "missing", "reason": f"{output} does not exist"}
    for event in run.last_events("saved_model"):
        path = event.text("path")
        files = event.fields.get("files")
        if path is None or not isinstance(files, list):
            return None
        digests = {}
        for file in files:
            if isinstance(file, Mapping):
                digests[str(file.get("name"))] = str(file.get("digest"))
        change = _find_model_change(Path(path), digests, was_visible=was_visible)
        return {"path": path, **change}
    return None


def _find_model_change(
    folder: Path, digests: Mapping[str, str], *, was_visible: bool
) -> dict[str, object]:
    """How a model differs from its `digests` by file; empty if it does not."""
    if not was_visible and not folder.is_dir():
        return {"state": "unknown", "reason": f"{folder} cannot be seen from this machine"}
    if not digests:
        return {"state": "missing", "reason": f"the save left no weights in {folder}"}
    try:
        names = set(digest.list_weights(str(folder)))
    except OSError:
        return {"state": "missing", "reason": f"{folder} is gone"}
    missing = ", ".join(sorted(digests.keys() - names))
    if missing:
        return {"state": "missing", "reason": f"{missing} in {folder} is gone"}
    added = ", ".join(sorted(names - digests.keys()))
    if added:
        return {"state": "changed", "reason": f"{folder} holds {added}, which the run did not save"}
    for name, before in digests.items():
        change = _find_file_change(folder / name, before)
        if change is not None:
            return {"state": "changed", "file": name, **change}
    return {}


def _find_file_change(path: Path, before: str) -> dict[str, str] | None:
    try:
        after = fingerprint.fingerprint_file(path).digest
    except MissingContent as error:
        return {"reason": error.findings[0].message}
    if path.suffix == ".safetensors" and model_files.is_blank(path):
        return {"reason": f"every weight in {path} is 0", "before": before, "after": after}
    if after == before:
        return None
    reason = f"{path} was changed after the save: sha256 {before[:12]}, now {after[:12]}"
    return {"reason": reason, "before": before, "after": after}


def read_attempts(folder: RunFolder, current: Manifest | None = None) -> tuple[Evidence, ...]:
    """The evidence of every attempt, the last one last; see `evidence.read_run`."""
    attempts = []
    for number in range(1, folder.attempts()):
        attempts.append(evidence.read_run(folder.path, attempt=number, current=current))
    attempts.append(evidence.read_run(folder.path, current=current))
    return tuple(attempts)


def merge_rows(attempts: Sequence[Evidence]) -> list[Row]:
    """Every optimizer step of a run once.

    An attempt continues a checkpoint: what earlier attempts did from its first step on is not in
    the weights, and is left out.
    """
    rows: list[Row] = []
    for attempt_evidence in attempts:
        further = attempt_evidence.rows
        if further:
            rows = _select_rows_before(rows, further[0]["step"])
            rows += further
    return rows


def _select_rows_before(rows: Sequence[Row], step: float) -> list[Row]:
    return [row for row in rows if row["step"] < step]


def merge_attempts(attempts: Sequence[Evidence]) -> Evidence:
    """The evidence of the last attempt, with the steps of the attempts before it."""
    *earlier, last = attempts
    last = _add_resumed_steps(last, earlier)
    if not earlier:
        return last
    kept: list[Row] = []
    if last.rows:
        kept = _select_rows_before(merge_rows(earlier), last.rows[0]["step"])
    moved = [metrics.compute_moved_share(attempt_evidence) or 0.0 for attempt_evidence in earlier]
    return last.with_facts(earlier=kept, moved_before=max(moved))


def _add_resumed_steps(last: Evidence, earlier: Sequence[Evidence]) -> Evidence:
    """The last attempt, with the steps of an earlier one if it trained none itself.

    An attempt that was resumed from the very last step only saves the model. Its verdict is about
    the steps of the attempt that trained that model.
    """
    probe = last.probe
    if probe is None or probe.last_step is not None or not last.events("resumed"):
        return last
    trained: Mapping[int, evidence.RankRecord] = {}
    for earlier_evidence in earlier:
        records = earlier_evidence.probe
        if records is not None and records.last_step is not None:
            trained = records.ranks
    ranks = dict(probe.ranks)
    for rank in ranks.keys() & trained.keys():
        before = trained[rank]
        record = ranks[rank]
        # both are in one file of the probe, in this order
        events = before.events + record.events
        ranks[rank] = replace(record, events=events, steps=before.steps)
    return replace(last, probe=ProbeRecords(ranks=ranks))
