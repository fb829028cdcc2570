"""Stopping a run from anywhere: what it will cost, the request, waiting for the end."""

import contextlib
import math
import signal
import time
from pathlib import Path
from typing import NamedTuple

from launcher.artifacts import checkpoints
from launcher.errors import NotReady, UsageError, not_ready, usage
from launcher.lifecycle import conclude, follow, supervisor
from launcher.report import overview
from launcher.report.progress import Progress
from launcher.runs import attempt, evaluation, lease, preemption, rundir, runner, slurm
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder

POLL_S = 0.1


class Cost(NamedTuple):
    """What a stop loses: `step` is the last one done, `saved` the step of the last complete checkpoint."""

    step: int
    saved: int | None
    checkpoint: str | None
    lost: int

    def line(self) -> str:
        if not self.step:
            return "no step has been done yet: nothing is lost"
        if self.checkpoint is None:
            return f"no checkpoint has been saved: all {self.step} steps are lost"
        if self.saved is None:
            return f"the last complete checkpoint is {Path(self.checkpoint).name}; step {self.step} was the last"
        last = f"the last complete checkpoint is of step {self.saved}"
        return f"{last}: {self.lost} of {self.step} steps are lost"


def cost(folder: RunFolder) -> Cost:
    record = rundir.read_manifest(folder)
    found = checkpoints.find(str(record.backend), record.output, ranks=record.processes or 1)
    last = next((one for one in reversed(found) if one.complete), None)
    saved = last.number if last is not None and last.kind == "step" else None
    progress = Progress(total=None)
    overview.read_last_steps(folder, progress)
    step, checkpoint = progress.step, None if last is None else str(last.path)
    return Cost(step=step, saved=saved, checkpoint=checkpoint, lost=max(0, step - (saved or 0)))


def stop(folder: RunFolder, *, after_checkpoint: bool = False, checkpoint: bool = False) -> runner.ProcessExit | None:
    """Have a run stopped, and wait until every process of it has gone; returns how it ended.

    With `checkpoint` it saves one first, with `after_checkpoint` the next one that it saves anyway is waited for.

    One that is about to begin is stopped as soon as it has. Where its keeper does not do it in time, its processes
    are ended from here. Raises UsageError where it does not run, NotReady where it is out of reach.
    """
    job = slurm.job(folder)
    if job is not None and (state := slurm.state(job)) is not None:
        last = max(1, folder.attempts())
        waits = runner.StopRequest(attempt=last, after_checkpoint=after_checkpoint, checkpoint=checkpoint)
        # one that is queued has no checkpoint to wait for
        return _stop_job(folder, job, waits if state == "running" and waits.is_patient else None)
    runner.require_sight(folder)
    number = max(1, folder.attempts()) if runner.alive(folder.path) else _starting(folder)
    if number is None and runner.alive(evaluation.folder_of(folder).path):
        return _stop_evaluation(folder)
    if number is None:
        state = overview.read_state(folder)
        raise usage("not-running", f"{folder.path.name} is not running: {state}", "launch runs")
    request = runner.StopRequest(attempt=number, after_checkpoint=after_checkpoint, checkpoint=checkpoint)
    if checkpoint:
        _require_saves(folder)
    earlier = runner.request(folder)
    # one that is in no hurry does not slow down another that is
    if earlier is None or earlier.attempt != number or not after_checkpoint:
        _ask(folder, request)
    _wait_elsewhere(folder, request)
    until = math.inf if request.is_patient else time.monotonic() + _patience(folder)
    while runner.keeper_lives(folder) or _begins(folder, number):
        # what a keeper that has concluded waits for is the command at the end, no part of the run
        if rundir.concluded(folder, number) or time.monotonic() > until:
            break
        time.sleep(POLL_S)
    if runner.alive(folder.path):
        _end_orphan(folder, request)
    if folder.attempts() < number:
        # it never began; the next one gets its number, and must not be stopped
        with contextlib.suppress(OSError):
            folder.stop.unlink(missing_ok=True)
    return runner.recorded(folder, number)


def _stop_evaluation(run: RunFolder) -> runner.ProcessExit | None:
    """End the evaluation of a run's model: by the pipeline that waits for it, or from here where that has gone."""
    folder = evaluation.folder_of(run)
    number = max(1, folder.attempts())
    _ask(folder, runner.StopRequest(attempt=number))
    until = time.monotonic() + sum(_waits(run)) + 2 * runner.KILLED_S
    while runner.alive(folder.path) and time.monotonic() < until:
        known = runner.processes(folder)
        if known.keeper is None or not known.keeper.lives():
            break
        time.sleep(POLL_S)
    if runner.alive(folder.path):
        runner.end_orphans(folder, _waits(run), number)
    return runner.recorded(folder, number)


def _patience(folder: RunFolder) -> float:
    """Seconds that a keeper may take: one that stands still, or hangs, is done without."""
    return sum(_waits(folder)) + 2 * runner.KILLED_S


def _waits(folder: RunFolder) -> runner.Grace:
    environ = Record(rundir.read_json(folder.start)).part("environ")
    try:
        return runner.grace(environ.text(runner.GRACE_VARIABLE))
    except UsageError:
        return runner.GRACE_S


def _require_saves(folder: RunFolder) -> None:
    """Raise UsageError where nothing in a training hears that it is to save."""
    started = follow.newest_attempt(folder)
    if preemption.request_for(started.env, started.number) is None:
        message = f"{folder.path.name} cannot be asked to save: it runs without the probe"
        help = f"launch stop {folder.path.name} --after-checkpoint waits for the next checkpoint"
        raise usage("no-probe", message, help)


def _stop_job(folder: RunFolder, job: str, waits: runner.StopRequest | None) -> runner.ProcessExit | None:
    """Slurm ends a job on all its machines; for a checkpoint, their keepers wait themselves."""
    number = max(1, folder.attempts())
    if waits is not None:
        if waits.checkpoint:
            _require_saves(folder)
        for node in folder.nodes():
            _ask(node, waits)
    else:
        slurm.require_own(folder)
        slurm.cancel(job)
    while slurm.state(job) is not None:
        time.sleep(POLL_S * 5)
    return runner.recorded(folder, number)


def _ask(folder: RunFolder, request: runner.StopRequest) -> None:
    try:
        request.write(folder)
    except OSError as error:
        if not runner.keeper_lives(folder):
            return
        try:
            if request.is_patient:
                raise PermissionError
            # a full disk: a signal asks for the same, but with the keeper's own patience
            runner.signal_keeper(folder, signal.SIGINT)
        except PermissionError:
            raise rundir.not_writable(folder.path, error.strerror) from None


def _starting(folder: RunFolder) -> int | None:
    """The number of the attempt that is about to begin; None where none is."""
    while lease.is_locked(folder.lock):
        if runner.alive(folder.path):
            return max(1, folder.attempts())
        if runner.keeper_lives(folder):
            # its training is over
            return None
        with contextlib.suppress(NotReady):
            number = attempt.read(folder).number
            if _begins(folder, number):
                return number
        time.sleep(POLL_S)
    return None


def _begins(folder: RunFolder, number: int) -> bool:
    known = runner.processes(folder).attempt
    return known != number and runner.recorded(folder, number) is None and lease.is_locked(folder.lock)


def _end_orphan(folder: RunFolder, request: runner.StopRequest) -> None:
    """Its keeper was killed, or stands still: do what that would have done."""
    attempt, number = follow.newest_attempt(folder), request.attempt
    if request.checkpoint:
        _await_save(folder, attempt)
    due = supervisor.Due(attempt)
    while not due.now(request) and runner.alive(folder.path):
        time.sleep(POLL_S)
    runner.end_orphans(folder, _waits(folder), number)
    _require_ended(folder)
    # not before: until then, it is what keeps orphans together
    runner.kill_keeper(folder)
    conclude.conclude(folder, attempt, runner.recorded(folder, number))


def _await_save(folder: RunFolder, started: attempt.Attempt) -> None:
    """Ask a training that nobody supervises to save, and wait until it has ended, or the time is up."""
    save = preemption.request_for(started.env, started.number)
    if save is None:
        return
    with contextlib.suppress(OSError):
        save.write()
        until = time.monotonic() + save.grace_s
        while runner.alive(folder.path) and time.monotonic() < until:
            time.sleep(POLL_S)


def _require_ended(folder: RunFolder) -> None:
    """Raise NotReady where a process that the record names goes on: it is not known to be one of this run."""
    known = runner.processes(folder)
    if known.leader is None or not known.leader_lives:
        return
    why = runner.distrust(folder) or f"the environment of process {known.leader.pid} does not name {known.mark}"
    message = f"{folder.path.name} was not stopped: {why}"
    help = f"look at process {known.leader.pid}; if it is the training: kill {known.leader.pid}"
    raise not_ready("not-your-process", message, help, file=str(folder.process))


def _wait_elsewhere(folder: RunFolder, request: runner.StopRequest) -> None:
    """Wait for a keeper on another machine; raises NotReady where that stops nothing: it may not see the folder."""
    known = runner.processes(folder)
    if known.leader is None or not known.out_of_sight:
        return
    until = time.monotonic() + sum(runner.GRACE_S) + lease.SILENT_S
    while runner.alive(folder.path):
        if time.monotonic() > until and not request.is_patient:
            name, place = folder.path.name, known.leader.place
            message = f"the supervisor of {name} on {place} does not answer the request"
            help = f"stop it there: launch stop {name}"
            raise not_ready("run-is-elsewhere", message, help, file=str(folder.path))
        time.sleep(POLL_S * 5)
    if runner.recorded(folder, request.attempt) is None:
        runner.require_sight(folder)
