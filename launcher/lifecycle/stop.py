"""Stop a run from anywhere: what that costs, the request, waiting for the end."""

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
from launcher.runs import attempt as attempts
from launcher.runs import evaluation, lease, preemption, rundir, runner, slurm
from launcher.runs.attempt import Attempt
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder
from launcher.runs.runner import ProcessExit, StopRequest

POLL_S = 0.1
LONG_POLL_S = 0.5


class Cost(NamedTuple):
    """What a stop loses. `step` is the last one done, `saved` that of the last full checkpoint."""

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
            name = Path(self.checkpoint).name
            return f"the last complete checkpoint is {name}; step {self.step} was the last"
        last = f"the last complete checkpoint is of step {self.saved}"
        return f"{last}: {self.lost} of {self.step} steps are lost"


def estimate_cost(folder: RunFolder) -> Cost:
    manifest = rundir.read_manifest(folder)
    ranks = manifest.processes or 1
    all_checkpoints = checkpoints.find(str(manifest.backend), manifest.output, ranks=ranks)
    complete = [each for each in all_checkpoints if each.complete]
    saved = None
    checkpoint = None
    if complete:
        checkpoint = str(complete[-1].path)
        if complete[-1].kind == "step":
            saved = complete[-1].number
    progress = Progress(total=None)
    overview.read_last_steps(folder, progress)
    step = progress.step
    lost = max(0, step - (saved or 0))
    return Cost(step=step, saved=saved, checkpoint=checkpoint, lost=lost)


def stop(
    folder: RunFolder, *, after_checkpoint: bool = False, checkpoint: bool = False
) -> ProcessExit | None:
    """Stop a run, and wait until every process of it has gone; returns how it ended.

    `checkpoint`: let it save one first. `after_checkpoint`: wait for its next regular one. A run
    that is about to begin is stopped once it has. If its supervisor does not stop it in time, its
    processes are ended from here. Raises UsageError if it does not run, NotReady if it is out of
    reach.
    """
    number = max(1, folder.attempts())
    request = StopRequest(attempt=number, after_checkpoint=after_checkpoint, checkpoint=checkpoint)
    job = slurm.find_job(folder)
    state = None
    if job is not None:
        state = slurm.ask_job_state(job)
    if job is not None and state is not None:
        # a job that is queued has no checkpoint to wait for
        if state == "running" and request.is_patient:
            return _stop_job_after_save(folder, job, request)
        return _cancel_job(folder, job)
    runner.require_known_state(folder)
    if not runner.is_alive(folder.path):
        starting = _find_starting_attempt(folder)
        if starting is None:
            return _stop_evaluation(folder)
        request = StopRequest(
            attempt=starting, after_checkpoint=after_checkpoint, checkpoint=checkpoint
        )
    return _stop_attempt(folder, request)


def _stop_attempt(folder: RunFolder, request: StopRequest) -> ProcessExit | None:
    number = request.attempt
    if request.checkpoint:
        _require_can_save(folder)
    earlier = runner.read_stop_request(folder)
    # a request to wait for a checkpoint does not replace one that waits for nothing
    if earlier is None or earlier.attempt != number or not request.after_checkpoint:
        _request_stop(folder, request)
    _wait_if_remote(folder, request)
    until = math.inf
    if not request.is_patient:
        until = time.monotonic() + _compute_patience_s(folder)
    while runner.has_live_supervisor(folder) or _is_starting(folder, number):
        # after the conclusion, a supervisor only waits for the `--on-finish` command
        if rundir.is_concluded(folder, number) or time.monotonic() > until:
            break
        time.sleep(POLL_S)
    if runner.is_alive(folder.path):
        _end_orphan(folder, request)
    if folder.attempts() < number:
        # it never began; the next attempt gets its number, and must not be stopped
        with contextlib.suppress(OSError):
            folder.stop.unlink(missing_ok=True)
    return runner.read_exit(folder, number)


def _stop_evaluation(run: RunFolder) -> ProcessExit | None:
    """End the evaluation of a run's model. Raises UsageError if there is none either.

    The pipeline that waits for it ends it; if that has gone, it is ended from here.
    """
    folder = evaluation.find_evaluation_folder(run)
    if not runner.is_alive(folder.path):
        state = overview.read_state(run)
        raise usage("not-running", f"{run.path.name} is not running: {state}", "launch runs")
    number = max(1, folder.attempts())
    _request_stop(folder, StopRequest(attempt=number))
    until = time.monotonic() + _compute_patience_s(run)
    while runner.is_alive(folder.path) and time.monotonic() < until:
        waiting = runner.read_processes(folder).supervisor
        if waiting is None or not waiting.is_alive():
            break
        time.sleep(POLL_S)
    if runner.is_alive(folder.path):
        runner.end_orphans(folder, _read_grace(run), number)
    return runner.read_exit(folder, number)


def _compute_patience_s(folder: RunFolder) -> float:
    """Seconds that a supervisor may take; after that it is taken to hang."""
    return sum(_read_grace(folder)) + 2 * runner.KILLED_S


def _read_grace(folder: RunFolder) -> runner.Grace:
    environ = Record(rundir.read_json(folder.start)).part("environ")
    try:
        return runner.parse_stop_grace(environ.text(runner.GRACE_VARIABLE))
    except UsageError:
        return runner.GRACE_S


def _require_can_save(folder: RunFolder) -> None:
    """Raise UsageError if nothing in a training would hear that it is to save."""
    attempt = follow.find_newest_attempt(folder)
    if preemption.save_request(attempt.env, attempt.number) is None:
        name = folder.path.name
        message = f"{name} cannot be asked to save: it runs without the probe"
        help = f"launch stop {name} --after-checkpoint waits for the next checkpoint"
        raise usage("no-probe", message, help)


def _stop_job_after_save(folder: RunFolder, job: str, request: StopRequest) -> ProcessExit | None:
    """Ask the supervisors on all machines of a job to stop after a checkpoint."""
    if request.checkpoint:
        _require_can_save(folder)
    for node in folder.nodes():
        _request_stop(node, request)
    return _wait_for_job(folder, job)


def _cancel_job(folder: RunFolder, job: str) -> ProcessExit | None:
    """Slurm ends a job on all its machines."""
    slurm.require_own(folder)
    slurm.cancel(job)
    return _wait_for_job(folder, job)


def _wait_for_job(folder: RunFolder, job: str) -> ProcessExit | None:
    number = max(1, folder.attempts())
    while slurm.ask_job_state(job) is not None:
        time.sleep(LONG_POLL_S)
    return runner.read_exit(folder, number)


def _request_stop(folder: RunFolder, request: StopRequest) -> None:
    try:
        request.write(folder)
    except OSError as error:
        if not runner.has_live_supervisor(folder):
            return
        try:
            if request.is_patient:
                raise PermissionError
            # a full disk: a signal asks for the same, with the supervisor's own patience
            runner.signal_supervisor(folder, signal.SIGINT)
        except PermissionError:
            raise rundir.make_not_writable(folder.path, error.strerror) from None


def _find_starting_attempt(folder: RunFolder) -> int | None:
    """The number of the attempt that is about to begin; None if there is none."""
    while lease.is_locked(folder.lock):
        if runner.is_alive(folder.path):
            return max(1, folder.attempts())
        if runner.has_live_supervisor(folder):
            # its training is over
            return None
        with contextlib.suppress(NotReady):
            number = attempts.read_attempt(folder).number
            if _is_starting(folder, number):
                return number
        time.sleep(POLL_S)
    return None


def _is_starting(folder: RunFolder, number: int) -> bool:
    if runner.read_processes(folder).attempt == number:
        return False
    if runner.read_exit(folder, number) is not None:
        return False
    return lease.is_locked(folder.lock)


def _end_orphan(folder: RunFolder, request: StopRequest) -> None:
    """Do what a supervisor would that was killed, or hangs."""
    number = request.attempt
    attempt = follow.find_newest_attempt(folder)
    if request.checkpoint:
        _wait_for_save(folder, attempt)
    due = supervisor.Due(attempt)
    while not due.now(request) and runner.is_alive(folder.path):
        time.sleep(POLL_S)
    runner.end_orphans(folder, _read_grace(folder), number)
    _require_ended(folder)
    # last: as long as it lives, it adopts orphans
    runner.kill_supervisor(folder)
    conclude.conclude(folder, attempt, runner.read_exit(folder, number))


def _wait_for_save(folder: RunFolder, attempt: Attempt) -> None:
    """Ask an orphan to save, and wait until it has ended, or the time is up."""
    save = preemption.save_request(attempt.env, attempt.number)
    if save is None:
        return
    with contextlib.suppress(OSError):
        save.write()
        until = time.monotonic() + save.grace_s
        while runner.is_alive(folder.path) and time.monotonic() < until:
            time.sleep(POLL_S)


def _require_ended(folder: RunFolder) -> None:
    """Raise NotReady if the recorded process goes on: it may not be one of this run."""
    processes = runner.read_processes(folder)
    if processes.leader is None or not processes.leader_is_alive:
        return
    pid = processes.leader.pid
    reason = runner.find_reason_to_distrust(folder)
    if reason is None:
        reason = f"the environment of process {pid} does not name {processes.mark}"
    message = f"{folder.path.name} was not stopped: {reason}"
    help = f"look at process {pid}; if it is the training: kill {pid}"
    raise not_ready("not-your-process", message, help, file=str(folder.process))


def _wait_if_remote(folder: RunFolder, request: StopRequest) -> None:
    """Wait for a supervisor on another machine to stop its run.

    Raises NotReady if it does not: it may not see this folder.
    """
    processes = runner.read_processes(folder)
    if processes.leader is None or not processes.is_remote:
        return
    until = time.monotonic() + sum(runner.GRACE_S) + lease.SILENT_S
    while runner.is_alive(folder.path):
        if time.monotonic() > until and not request.is_patient:
            name = folder.path.name
            message = f"the supervisor of {name} on {processes.leader.place} "
            message += "does not answer the request"
            help = f"stop it there: launch stop {name}"
            raise not_ready("run-is-elsewhere", message, help, file=str(folder.path))
        time.sleep(LONG_POLL_S)
    if runner.read_exit(folder, request.attempt) is None:
        runner.require_known_state(folder)
