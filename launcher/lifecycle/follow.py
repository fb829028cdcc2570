"""Follow a run from any terminal until it is over, or print its log.

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


def follow_until_over(folder: RunFolder, attempt: Attempt, *, forward: bool) -> bool:
    """Show an attempt until it and its supervisor are gone; returns whether it was stopped.

    With `forward`, INT and TERM stop the run (twice: without waiting); else INT raises Detached. If
    the supervisor was killed, this judges its orphan and calls `--on-finish`. Raises NotReady if
    the state of the run is unknown here.
    """
    signals: list[int] = []
    runner.require_known_state(folder)
    if _has_live_process(folder):
        with _handle_signals(folder, signals, forward=forward):
            view = _build_view(folder, attempt)
            with view.showing():
                _update_view(folder, view)
        runner.require_known_state(folder)
    number = attempt.number
    has_begun = folder.attempts() >= number
    is_remote = runner.read_processes(folder).is_remote
    # if the supervisor did not live to do that
    if has_begun and not is_remote and not rundir.is_concluded(folder, number):
        # imported here, so that the run is shown at once
        from launcher.lifecycle import conclude

        conclude.conclude(folder, attempt, runner.read_exit(folder, number))
    return bool(signals)


def _build_view(folder: RunFolder, attempt: Attempt) -> View:
    progress = Progress(total=attempt.total, attempt=attempt.number, world=attempt.world)
    manifest = rundir.read_manifest(folder)
    # without planned steps, packing makes other rows than those of the data
    if manifest.steps is not None:
        progress.rows_per_step = manifest.global_batch
        progress.rows = manifest.plan.rows
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return View(
        attempt.title,
        folder.console(attempt.number),
        folder.probe,
        progress,
        is_terminal,
        attempts.find_redactor(folder),
    )


def _update_view(folder: RunFolder, view: View) -> None:
    """Update the view until the run is over, as long as the terminal lives."""
    is_shown = True
    while _has_live_process(folder):
        if is_shown:
            try:
                view.tick()
            except Exception:
                # the terminal has gone; all of it is in the run folder
                is_shown = False
        time.sleep(POLL_S)


def _has_live_process(folder: RunFolder) -> bool:
    return runner.has_live_supervisor(folder) or runner.is_alive(folder.path)


@contextlib.contextmanager
def _handle_signals(folder: RunFolder, signals: list[int], *, forward: bool) -> Iterator[None]:
    """With `forward`, pass signals on to the run and note them; without, INT raises Detached."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        with contextlib.suppress(PermissionError):
            if runner.signal_supervisor(folder, number):
                return
        attempt = max(1, folder.attempts())
        if runner.has_live_supervisor(folder):
            # its record cannot be trusted enough to signal it: ask it
            with contextlib.suppress(OSError):
                runner.StopRequest(attempt=attempt).write(folder)
        elif runner.is_alive(folder.path):
            runner.end_orphans(folder, (0, 0, 0), attempt)

    # without a terminal there is nothing to show, and a verdict still to come
    handlers: dict[int, process.Handler | signal.Handlers] = {signal.SIGHUP: process.ignore_signal}
    # Slurm signals every process of a job itself: passed on, it would count twice
    if forward and "SLURM_JOB_ID" not in os.environ:
        handlers |= dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), pass_on)
    else:
        handlers[signal.SIGTERM] = signal.SIG_DFL
    with process.install_handlers(handlers):
        try:
            yield
        except KeyboardInterrupt:
            raise Detached from None


def print_log(folder: RunFolder, number: int, *, last: int | None, follow: bool) -> None:
    """Write an attempt's console log to stdout without secrets: its `last` lines, or all.

    With `follow`, what is added too, until the run ends. A log that is moved or removed is read on,
    a truncated one from its new beginning. Raises FileNotFoundError, NotReady if it cannot be read,
    OSError if the reader of stdout has gone.
    """
    if sys.stdout is None:
        return
    path = folder.console(number)
    printer = LogLines(attempts.find_redactor(folder).values, frames=follow or last is None)
    try:
        log = files.open_regular(path, buffering=0)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from None
    with log:
        if last is not None:
            _print_last_lines(log, printer, last)
        _print_rest(log, printer, folder, follow=follow)


def _print_last_lines(log: BinaryIO, printer: LogLines, count: int) -> None:
    """Print the last lines of a log, up to the last gap in them."""
    lines = find_last_lines(log.fileno(), count)
    log.seek(lines.start)
    for gap in lines.gaps:
        while log.tell() < gap.start:
            missing = gap.start - log.tell()
            block = log.read(min(BLOCK_BYTES, missing))
            if not block:
                # it was truncated meanwhile
                return
            sys.stdout.buffer.write(printer.of(block))
        length = gap.stop - gap.start
        printer.leave_out(length, at_least=gap.at_least)
        log.seek(gap.stop)


def _print_rest(log: BinaryIO, printer: LogLines, folder: RunFolder, *, follow: bool) -> None:
    """Print a log from its position to its end, or with `follow` to the end of the run."""
    out = sys.stdout.buffer
    while True:
        # determined before reading, so that the last lines are not missed
        is_over = not follow or not _has_live_process(folder)
        if os.fstat(log.fileno()).st_size < log.tell():
            log.seek(0)
            out.write(printer.rest())
        block = log.read(BLOCK_BYTES)
        while block:
            out.write(printer.of(block))
            block = log.read(BLOCK_BYTES)
        if is_over:
            out.write(printer.rest())
            out.flush()
            return
        out.flush()
        time.sleep(POLL_S)


def has_begun(folder: RunFolder, attempt: Attempt) -> bool:
    if folder.attempts() >= attempt.number:
        return True
    if runner.read_processes(folder).attempt == attempt.number:
        return True
    return _has_live_process(folder)


def find_newest_attempt(folder: RunFolder) -> Attempt:
    """The attempt that began last; from the manifest if `start.json` is missing or damaged."""
    with contextlib.suppress(NotReady):
        return attempts.read_attempt(folder)
    manifest = rundir.read_manifest(folder)
    output = None
    if manifest.output is not None:
        output = str(manifest.output)
    return Attempt(
        number=max(1, folder.attempts()),
        argv=(),
        env={},
        environ={},
        cwd=str(folder.path),
        stage=str(manifest.stage),
        backend=str(manifest.backend),
        title=folder.path.name,
        output=output,
        total=manifest.steps,
        world=manifest.processes or 1,
    )
