"""Follow a run from any terminal: the view, until the run is over.

Nothing here touches the run, except that INT and TERM are passed on with `forward`.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

from launcher import files
from launcher.errors import NotReady, unreadable
from launcher.machine import process
from launcher.printable import printable_bytes
from launcher.redaction import KEY_BLOCK, known_values, redact_bytes
from launcher.report.live import View
from launcher.report.progress import Progress
from launcher.runs import attempt, rundir, runner
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

POLL_S = 0.2
_FRAME = re.compile(rb"[^\r\n]*\r(?=[^\r\n])")  # of a progress bar, which another one follows
LINE_BYTES = 2**20  # bytes of a line that are looked at together


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
            terminal = sys.stderr is not None and sys.stderr.isatty()
            view = View(attempt.title, folder.console(attempt.number), folder.probe, progress, terminal)
            with view.showing():
                _look_on(folder, view)
        runner.require_sight(folder)
    # where the keeper did not live to do that, nor lives where nobody here can look
    began = folder.attempts() >= attempt.number
    if began and not runner.processes(folder).out_of_sight and not rundir.concluded(folder, attempt.number):
        # only here: who looks on should see the run at once
        from launcher.lifecycle import supervisor

        supervisor.conclude(folder, attempt, runner.recorded(folder, attempt.number))
    return bool(requests)


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
        handlers |= {signal.SIGINT: hand_on, signal.SIGTERM: hand_on}
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
    out, path = sys.stdout.buffer, folder.console(number)
    shown = Shown(known_values(attempt.tokens(folder)), frames=follow or last is None)
    try:
        opened = files.open_regular(path, buffering=0)
    except OSError as error:
        raise error if isinstance(error, FileNotFoundError) else unreadable(path, error) from None
    with opened as log:
        log.seek(0 if last is None else _tail(log, last))
        while True:
            # determined before reading: what was written until then is not missed
            over = not follow or not _goes_on(folder)
            if os.fstat(log.fileno()).st_size < log.tell():
                log.seek(0)
                out.write(shown.rest())
            while block := log.read(2**20):
                out.write(shown.of(block))
            out.write(shown.rest() if over else b"")
            out.flush()
            if over:
                return
            time.sleep(POLL_S)


@dataclass(slots=True)
class Shown:
    """A log in blocks, by lines, without tokens, which a block may cut; without `frames` only the last of a bar."""

    known: Sequence[str]
    frames: bool = True
    line: bytes = b""

    def of(self, block: bytes) -> bytes:
        whole = self.line + block
        end = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        if not self.frames:
            whole = _FRAME.sub(b"", whole)
            end = whole.rfind(b"\n") + 1
        if len(whole) - end > LINE_BYTES:
            # it has no end; a word has
            end = max(whole.rfind(b" "), end - 1, len(whole) - LINE_BYTES) + 1
        block_at = whole.rfind(KEY_BLOCK, 0, end)
        if max(0, end - LINE_BYTES) <= block_at and b"-----END" not in whole[block_at:end]:
            # a private key goes over many lines
            end = whole.rfind(b"\n", 0, block_at) + 1
        self.line = whole[end:]
        return redact_bytes(printable_bytes(whole[:end]), self.known)

    def rest(self) -> bytes:
        line, self.line = self.line, b""
        return redact_bytes(printable_bytes(line), self.known)


def _tail(log: BinaryIO, lines: int) -> int:
    """The offset of the last so many lines; of a line without end, the last 64 MiB at most."""
    end, size = log.seek(0, os.SEEK_END), 2**16
    while True:
        begin = max(0, end - size)
        log.seek(begin)
        # the last line's own end is none that begins another
        ends = [one.start() for one in re.finditer(b"\n", log.read(max(0, end - 1 - begin)))]
        if len(ends) >= lines or begin == 0 or size >= 64 * 2**20:
            return begin + ends[-lines] + 1 if len(ends) >= lines else begin
        size *= 2


def has_begun(folder: RunFolder, attempt: Attempt) -> bool:
    known = runner.processes(folder).attempt
    return folder.attempts() >= attempt.number or known == attempt.number or _goes_on(folder)


def newest_attempt(folder: RunFolder) -> Attempt:
    """The attempt that began last, as far as it is known; a run of an older launch has no private file."""
    with contextlib.suppress(NotReady):
        return attempt.read(folder)
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
