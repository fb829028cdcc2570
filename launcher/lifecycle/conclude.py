"""What follows the end of a run: its verdict and files, its exit code, the command that `--on-finish` names."""

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

OTHERS_S = 60.0  # seconds that a machine whose training failed waits for the first one to have recorded its end


def conclude(
    folder: RunFolder,
    attempt: Attempt,
    ended: runner.ProcessExit | None,
    *,
    locks: Sequence[int] = (),
    own: bool = False,
) -> int:
    """Judge a run that is over and call `--on-finish`; returns the run's exit code.

    Where the keeper was killed, whoever looks on does what is left: once, however many they are, but for one that
    is killed in the moment of the call. `locks` are let go before that. The attempt is the user's `own` where it was
    not read from a file that others may write.
    """
    if attempt.rank:
        _let_go(locks)
        return _of_a_further_machine(folder, attempt, ended)
    number = attempt.number
    with rundir.concluding(folder, number) as due:
        if not due:
            return Exit.OK
        code: int = Exit.BUG
        try:
            # where the supervisor did not live to do that
            inventory.end(folder, number, late=True)
            if not rundir.judged(folder, number):
                look_back(folder, attempt)
            code = conclusion(folder, attempt, ended)[1]
            rundir.seal(folder, number, untold=bool(attempt.on_finish))
            # once the verdict is there, whatever happens; only what this user started runs a model
            if own:
                sampling.take(folder, attempt)
        except Exception:
            # a verdict can be made again; the call at the end cannot
            traceback.print_exc()
        # the command may start the next run on the same cards
        _let_go(locks)
        on_finish.call(folder, attempt, code, own=own, began=lambda: rundir.note_told(folder, number))
    return code


def _let_go(locks: Sequence[int]) -> None:
    for lock in locks:
        os.close(lock)


def _of_a_further_machine(folder: RunFolder, attempt: Attempt, ended: runner.ProcessExit | None) -> int:
    """The first machine judges and tells, for all; one that failed leaves it the time for that."""
    if ended is not None and not ended.returncode:
        return Exit.OK
    first = RunFolder(folder.path.parent)
    until = time.monotonic() + OTHERS_S
    while first.manifest.exists() and not first.exit(attempt.number).exists() and time.monotonic() <= until:
        time.sleep(1)
    return Exit.TRAINING


def of_a_further_machine(folder: RunFolder, attempt: Attempt) -> Exit:
    ended = runner.recorded(folder, attempt.number)
    if ended is not None and (ended.stopped is not None or ended.preempted):
        return Exit.INTERRUPTED
    return Exit.TRAINING if ended is None or ended.returncode else Exit.OK


def look_back(folder: RunFolder, attempt: Attempt) -> None:
    """Record what of data and models changed since the start, and remove what was cached of it meanwhile."""
    # a record that cannot be written costs a point, not the verdict
    with contextlib.suppress(OSError):
        changed = inputs.changed(rundir.read_manifest(folder).contents, Path(attempt.cwd))
        files.write_json(folder.inputs(attempt.number), {"changed": attempt.redactor.redact(changed)})
    for one in attempt.caches:
        with contextlib.suppress(Misfit):
            folders.discard_spoiled(keys.from_json(one))


def conclusion(
    folder: RunFolder, attempt: Attempt, ended: runner.ProcessExit | None = None
) -> tuple[check.Verdict, Exit]:
    """The verdict and the exit code of an attempt that is over; judged now where nobody has yet."""
    known = rundir.judged(folder, attempt.number)
    verdict = (check.from_json(rundir.read_json(folder.verdict)) if known else None) or finish(folder)
    ended = ended or runner.recorded(folder, attempt.number)
    return verdict, exit_code(ended, verdict, allow_unproven=attempt.allow_unproven)


def finish(folder: RunFolder) -> check.Verdict:
    return judged(folder).verdict


def judged(folder: RunFolder) -> judge.RunJudgement:
    """Judge a run folder; write verdict.json, metrics.jsonl and report.html where that is possible."""
    found = judge.judge(folder)
    # a read-only or full disk costs these files, not the verdict
    with contextlib.suppress(OSError):
        files.write_json(folder.verdict, found.verdict.as_json())
        files.write_text(folder.metrics, "".join(map(rundir.json_line, judge.rows_of(found.attempts))))
        files.write_text(folder.report, page.overlay([series.of_judged(folder.path, found)]))
    return found


def judged_now(folder: RunFolder, planned: Plan, verdict: check.Verdict) -> check.Verdict:
    """The verdict of a finished run by what is expected of it now: that may have been changed since."""
    expected = command.expectations(planned)
    same = rundir.read_manifest(folder).expected == expected
    return verdict if same else judge.judge(folder, expected).verdict


def exit_code(ended: runner.ProcessExit | None, verdict: check.Verdict, *, allow_unproven: bool) -> Exit:
    if ended is not None and (ended.stopped is not None or ended.preempted):
        return Exit.INTERRUPTED
    if ended is not None and ended.returncode and verdict.stopped is None:
        return Exit.TRAINING
    return check.exit_code(verdict, allow_unproven=allow_unproven)


def left_out_notes(found: judge.RunJudgement, folder: RunFolder) -> tuple[Finding, ...]:
    """What the records of a run hold that could not be used: of each file the first, and how many more."""
    places: dict[str, list[tuple[int | None, Omission]]] = {}
    for fault in found.manifest.left_out():
        places.setdefault(str(folder.manifest), []).append((None, fault))
    for attempt in found.attempts:
        for record in attempt.records:
            for path, line, fault in record.left_out:
                places.setdefault(str(path), []).append((line, fault))
    return tuple(_left_out_note(file, faults) for file, faults in places.items())


def _left_out_note(file: str, faults: Sequence[tuple[int | None, Omission]]) -> Finding:
    line, fault = faults[0]
    more = f", and {len(faults) - 1} more like it" if len(faults) > 1 else ""
    help = "was it edited, or written by another version? what it says is left out"
    return launch_finding("warning", "damaged-record", f"{fault}{more}", help, file=file, line=line)


def unpinned_note(folder: RunFolder) -> tuple[Finding, ...]:
    source = rundir.read_manifest(folder).upstream
    if source.pinned is not False:
        return ()
    message = f"this run used {source.version}, the pin is {source.pin}"
    return (launch_finding("warning", "unpinned-checkout", message, file=source.root),)
