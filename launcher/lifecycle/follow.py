"""Follow a run from any terminal: the view, until the run is over.

Nothing here touches the run, except that INT and TERM are passed on with `forward`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import BinaryIO

from launcher import files
from launcher.errors import NotReady, unreadable
from launcher.lifecycle.log_lines import BLOCK_BYTES, LogLines, find_last_lines
from launcher.machine import process
from launcher.report.live import View
from launcher.report.progress import Progress
from launcher.runs import attempt as attempts
from launcher.runs import rundir, runner
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

POLL_S = 0.2


class Detached(Exception):
    """The user stopped following; the run continues."""


def until_over(folder: RunFolder, attempt: Attempt, *, forward: bool) -> bool:
    """Show an attempt until it and its keeper are gone; returns whether a stop was requested here.

    With `forward`, INT and TERM stop the run (twice: without waiting); else INT raises Detached. If
    the keeper was killed, this looks after the orphan: it judges it and calls `--on-finish`. Raises NotReady
    where the run's state is unknown here.
    """
    requests: list[int] = []
    runner.require_sight(folder)
    if _goes_on(folder):
        with _signals(folder, requests, forward=forward):
            progress = Progress(total=attempt.total, attempt=attempt.number, world=attempt.world)
            _know_epoch(progress, folder)
            terminal = sys.stderr is not None and sys.stderr.isatty()
            redactor = attempts.redactor(folder)
            view = View(attempt.title, folder.console(attempt.number), folder.probe, progress, terminal, redactor)
            with view.showing():
                _look_on(folder, view)
        runner.require_sight(folder)
    # where the keeper did not live to do that, nor lives where nobody here can look
    began = folder.attempts() >= attempt.number
    if began and not runner.processes(folder).out_of_sight and not rundir.concluded(folder, attempt.number):
        # only here: who looks on should see the run at once
        from launcher.lifecycle import conclude

        conclude.conclude(folder, attempt, runner.recorded(folder, attempt.number))
    return bool(requests)


def _know_epoch(progress: Progress, folder: RunFolder) -> None:
    """Have it know the rows of a step and of an epoch, where steps could be planned: packing makes other rows."""
    record = rundir.read_manifest(folder)
    if record.steps is None:
        return
    progress.rows_per_step = record.global_batch
    progress.rows = record.plan.rows


def _look_on(folder: RunFolder, view: View) -> None:
    shows = True
    while _goes_on(folder):
        try:
            if shows:
                view.tick()
        except Exception:
            # a terminal that has gone: what it cannot show is in the run folder
            shows = False
        time.sleep(POLL_S)


def _goes_on(folder: RunFolder) -> bool:
    return runner.keeper_lives(folder) or runner.alive(folder.path)


@contextlib.contextmanager
def _signals(folder: RunFolder, requests: list[int], *, forward: bool) -> Iterator[None]:
    def hand_on(number: int, _frame: FrameType | None) -> None:
        requests.append(number)
        with contextlib.suppress(PermissionError):
            if runner.signal_keeper(folder, number):
                return
        attempt = max(1, folder.attempts())
        if runner.keeper_lives(folder):
            # its record cannot be believed enough to signal it: ask it
            with contextlib.suppress(OSError):
                runner.StopRequest(attempt=attempt).write(folder)
        elif runner.alive(folder.path):
            runner.end_orphans(folder, (0, 0, 0), attempt)

    # a terminal that has gone: there is nothing to show any more, and a verdict still to come
    handlers: dict[int, process.Handler | signal.Handlers] = {signal.SIGHUP: process.ignore}
    # Slurm signals every process of a job itself: passed on, it would count as two requests
    if forward and "SLURM_JOB_ID" not in os.environ:
        handlers |= dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), hand_on)
    else:
        handlers[signal.SIGTERM] = signal.SIG_DFL
    with process.handling(handlers):
        try:
            yield
        except KeyboardInterrupt:
            raise Detached from None


def print_log(folder: RunFolder, number: int, *, last: int | None, follow: bool) -> None:
    """Write an attempt's console log to stdout without tokens: its `last` lines, or all, and what comes.

    A log that is moved or removed is read on, one that was truncated from its new beginning. Raises
    FileNotFoundError, NotReady where it cannot be read, OSError where the reader has gone.
    """
    if sys.stdout is None:
        return
    path = folder.console(number)
    shown = LogLines(attempts.redactor(folder).values, frames=follow or last is None)
    try:
        opened = files.open_regular(path, buffering=0)
    except OSError as error:
        raise error if isinstance(error, FileNotFoundError) else unreadable(path, error) from None
    with opened as log:
        if last is not None:
            _print_last_lines(log, shown, last)
        _print_on(log, shown, folder, follow=follow)


def _print_last_lines(log: BinaryIO, shown: LogLines, count: int) -> None:
    """Print the last lines of a log as far as the last of those that are cut."""
    found = find_last_lines(log.fileno(), count)
    log.seek(found.start)
    for gap in found.gaps:
        while left := gap.start - log.tell():
            block = log.read(min(BLOCK_BYTES, left))
            if not block:
                # it was truncated meanwhile
                return
            sys.stdout.buffer.write(shown.of(block))
        shown.leave_out(gap.stop - gap.start, at_least=gap.at_least)
        log.seek(gap.stop)


def _print_on(log: BinaryIO, shown: LogLines, folder: RunFolder, *, follow: bool) -> None:
    """Print a log from where it is read, until it ends, or with `follow` until the run ends."""
    out = sys.stdout.buffer
    while True:
        # determined before reading: what was written until then is not missed
        over = not follow or not _goes_on(folder)
        if os.fstat(log.fileno()).st_size < log.tell():
            log.seek(0)
            out.write(shown.rest())
        while block := log.read(BLOCK_BYTES):
            out.write(shown.of(block))
        if over:
            out.write(shown.rest())
        out.flush()
        if over:
            return
        time.sleep(POLL_S)


def has_begun(folder: RunFolder, attempt: Attempt) -> bool:
    known = runner.processes(folder).attempt
    return folder.attempts() >= attempt.number or known == attempt.number or _goes_on(folder)


def newest_attempt(folder: RunFolder) -> Attempt:
    """The attempt that began last, as far as it is known; a run of an older launch has no private file."""
    with contextlib.suppress(NotReady):
        return attempts.read(folder)
    manifest = rundir.read_manifest(folder)
    return Attempt(
        number=max(1, folder.attempts()),
        argv=(),
        env={},
        environ={},
        cwd=str(folder.path),
        stage=str(manifest.stage),
        backend=str(manifest.backend),
        title=folder.path.name,
        output=None if manifest.output is None else str(manifest.output),
        total=manifest.steps,
        world=manifest.processes or 1,
    )
