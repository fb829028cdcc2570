"""What follows the end of a run: verdict, files, exit code, and the `--on-finish` command."""

import contextlib
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from launcher import files
from launcher.cache import folders, inputs, keys
from launcher.errors import Exit, Finding, launch_finding
from launcher.lifecycle import on_finish, sampling
from launcher.machine.codec import Misfit, Omission
from launcher.plan import command
from launcher.plan.plan import Plan
from launcher.report import page, series
from launcher.runs import inventory, rundir, runner
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, judge

FIRST_MACHINE_S = 60.0  # how long a further machine waits for the first one to record the end


def conclude(
    folder: RunFolder,
    attempt: Attempt,
    ended: runner.ProcessExit | None,
    *,
    locks: Sequence[int] = (),
    own: bool = False,
) -> int:
    """Judge a run that is over and call `--on-finish`; returns the run's exit code.

    If the supervisor was killed, whoever follows the run does what is left, once. `locks` are
    released before the call. The attempt is the user's `own` unless it was read from a file that
    others may write.
    """
    if attempt.rank:
        _release_locks(locks)
        return _conclude_worker(folder, attempt, ended)
    number = attempt.number
    with rundir.conclude_once(folder, number) as due:
        if not due:
            return Exit.OK
        code: int = Exit.BUG
        try:
            # in case the supervisor did not live to do that
            inventory.record_written(folder, number, late=True)
            if not rundir.is_judged(folder, number):
                record_input_changes(folder, attempt)
            _, code = judge_attempt(folder, attempt, ended)
            rundir.mark_judged(folder, number, notify_pending=bool(attempt.on_finish))
            # after the verdict, so that it stands; only what this user started runs a model
            if own:
                sampling.take_samples(folder, attempt)
        except Exception:
            # a verdict can be repeated; the call at the end cannot
            traceback.print_exc()
        # the command may start the next run on the same cards
        _release_locks(locks)
        on_finish.call(
            folder, attempt, code, own=own, began=lambda: rundir.mark_notified(folder, number)
        )
    return code


def _release_locks(locks: Sequence[int]) -> None:
    for lock in locks:
        os.close(lock)


def _conclude_worker(folder: RunFolder, attempt: Attempt, ended: runner.ProcessExit | None) -> int:
    """The first machine judges and notifies; one that failed gives it time for that."""
    if ended is not None and not ended.returncode:
        return Exit.OK
    first = RunFolder(folder.path.parent)
    until = time.monotonic() + FIRST_MACHINE_S
    while first.manifest.exists() and not first.exit(attempt.number).exists():
        if time.monotonic() > until:
            break
        time.sleep(1)
    return Exit.TRAINING


def decide_worker_exit_code(folder: RunFolder, attempt: Attempt) -> Exit:
    """The exit code of a further machine of a run, which judges nothing."""
    ended = runner.read_exit(folder, attempt.number)
    if ended is None:
        return Exit.TRAINING
    if _was_stopped(ended):
        return Exit.INTERRUPTED
    if ended.returncode:
        return Exit.TRAINING
    return Exit.OK


def _was_stopped(ended: runner.ProcessExit) -> bool:
    return ended.stopped is not None or ended.preempted


def record_input_changes(folder: RunFolder, attempt: Attempt) -> None:
    """Record which data and models changed since the start, and delete caches made of them.

    Called at the end of an attempt, before it is judged.
    """
    # if the record cannot be written, the verdict only lacks the point `inputs`
    with contextlib.suppress(OSError):
        contents = rundir.read_manifest(folder).contents
        changed = attempt.redactor.redact(inputs.compare_inputs(contents, Path(attempt.cwd)))
        files.write_json(folder.inputs(attempt.number), {"changed": changed})
    for cache in attempt.caches:
        with contextlib.suppress(Misfit):
            folders.discard_spoiled(keys.parse_cache(cache))


def judge_attempt(
    folder: RunFolder, attempt: Attempt, ended: runner.ProcessExit | None = None
) -> tuple[check.Verdict, Exit]:
    """The verdict and the exit code of an attempt that is over; judged now if nobody has yet."""
    verdict = None
    if rundir.is_judged(folder, attempt.number):
        verdict = check.read_verdict(rundir.read_json(folder.verdict))
    if verdict is None:
        verdict = finish(folder)
    ended = ended or runner.read_exit(folder, attempt.number)
    return verdict, decide_exit_code(ended, verdict, allow_unproven=attempt.allow_unproven)


def finish(folder: RunFolder) -> check.Verdict:
    return judge_and_write(folder).verdict


def judge_and_write(folder: RunFolder) -> judge.RunJudgement:
    """Judge a run folder; write verdict.json, metrics.jsonl and report.html if possible."""
    judgement = judge.judge_run(folder)
    # a read-only or full disk costs these files, not the verdict
    with contextlib.suppress(OSError):
        files.write_json(folder.verdict, judgement.verdict.as_json())
        rows = judge.merge_rows(judgement.attempts)
        files.write_text(folder.metrics, "".join(map(rundir.render_json_line, rows)))
        run = series.run_from_judgement(folder.path, judgement)
        files.write_text(folder.report, page.render([run]))
    return judgement


def judge_by_plan(folder: RunFolder, planned: Plan, verdict: check.Verdict) -> check.Verdict:
    """The verdict of a finished run by what is expected now, which may have changed since."""
    expected = command.list_expectations(planned)
    if rundir.read_manifest(folder).expected == expected:
        return verdict
    return judge.judge_run(folder, expected).verdict


def decide_exit_code(
    ended: runner.ProcessExit | None, verdict: check.Verdict, *, allow_unproven: bool
) -> Exit:
    if ended is not None and _was_stopped(ended):
        return Exit.INTERRUPTED
    if ended is not None and ended.returncode and verdict.stopped is None:
        return Exit.TRAINING
    return check.decide_exit_code(verdict, allow_unproven=allow_unproven)


def report_left_out(judgement: judge.RunJudgement, folder: RunFolder) -> tuple[Finding, ...]:
    """What could not be used of a run's records: of each file the first, and how many more."""
    places: dict[str, list[tuple[int | None, Omission]]] = {}
    manifest = str(folder.manifest)
    for omission in judgement.manifest.left_out():
        places.setdefault(manifest, []).append((None, omission))
    for attempt in judgement.attempts:
        for record in attempt.records:
            for path, line, omission in record.left_out:
                places.setdefault(str(path), []).append((line, omission))
    notes = []
    for file, omissions in places.items():
        notes.append(_report_omissions(file, omissions))
    return tuple(notes)


def _report_omissions(file: str, faults: Sequence[tuple[int | None, Omission]]) -> Finding:
    line, fault = faults[0]
    message = str(fault)
    if len(faults) > 1:
        message += f", and {len(faults) - 1} more like it"
    help = "was it edited, or written by another version? what it says is left out"
    return launch_finding("warning", "damaged-record", message, help, file=file, line=line)


def note_unpinned(folder: RunFolder) -> tuple[Finding, ...]:
    source = rundir.read_manifest(folder).upstream
    if source.pinned is not False:
        return ()
    message = f"this run used {source.version}, the pin is {source.pin}"
    return (launch_finding("warning", "unpinned-checkout", message, file=source.root),)
