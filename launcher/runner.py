"""Start a `Command` in a session of its own, follow its log for display, end it, record the `Exit`.

The training processes write straight into `console.log`: no pipe runs through the launcher, so
nothing is lost and nothing stops when it dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from launcher import process, rundir
from launcher.command import Command
from launcher.errors import Finding, NotReady
from launcher.rundir import RunFolder

POLL_S = 0.2
GRACE_S = (20.0, 10.0, 5.0)
"""Seconds that a stop waits before it gets harder: after INT, after TERM, after TERM to the rest."""
KILLED_S = 10.0
"""Seconds that a killed process may take to be gone: it has memory to give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an attempt ended; `signal` is the one that killed the process, `stopped` the one we sent."""

    returncode: int
    signal: int | None
    stopped: int | None
    started: str
    ended: str
    attempt: int


def run(
    command: Command,
    folder: RunFolder,
    attempt: int,
    tick: Callable[[], None] | None = None,
    lock: int | None = None,
    held: Sequence[int] = (),
) -> Exit:
    """Run to the end; INT and TERM to the launcher stop every process of the run, HUP none.

    `tick` is called about five times a second, for display; what it raises ends the display only.
    `lock` is a file descriptor that the started process holds open as long as it lives. Raises
    NotReady where the trainer's Python cannot be started at all.
    """
    started = rundir.now()
    stop = _Stop()
    with stop.listening():
        try:
            child = _start(command, folder, attempt, (*held, *(() if lock is None else (lock,))))
        except (OSError, ValueError) as error:
            _record(folder, _ended(127, None, started, attempt))
            raise NotReady(_not_started(command, error)) from None
        told = {"mark": str(folder.path), "attempt": attempt, "started": started}
        with contextlib.suppress(OSError):
            # a full disk must not take the watch from a training that runs
            rundir.write_json(folder.process, {**process.identify(child.pid).as_json(), **told})
        stopped = _watch(child, str(folder.path), stop, tick)
        ended = _ended(child.wait(), stopped, started, attempt)
        _record(folder, ended)
    return ended


def _start(
    command: Command, folder: RunFolder, attempt: int, locks: Sequence[int]
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, **command.env, "LAUNCH_ATTEMPT": str(attempt), process.MARK: str(folder.path),
    }  # fmt: skip
    with folder.console(attempt).open("ab") as console:
        return subprocess.Popen(
            command.argv, env=environment, cwd=command.cwd, stdin=subprocess.DEVNULL,
            stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
            pass_fds=tuple(locks),
        )  # fmt: skip


def _ended(code: int, stopped: int | None, started: str, attempt: int) -> Exit:
    return Exit(
        returncode=code if code >= 0 else 128 - code, signal=-code if code < 0 else None,
        stopped=stopped, started=started, ended=rundir.now(), attempt=attempt,
    )  # fmt: skip


def _record(folder: RunFolder, ended: Exit) -> None:
    with contextlib.suppress(OSError):
        rundir.write_json(folder.exit(ended.attempt), asdict(ended))


def _not_started(command: Command, error: OSError | ValueError) -> Finding:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return Finding(
        severity="error", layer="launch", code="not-started", file=command.argv[0],
        message=f"{command.argv[0]} cannot be started: {reason}",
        help="give the trainer's interpreter with --python PATH",
    )  # fmt: skip


class _Stop:
    """Counts INT and TERM instead of raising in the middle of something; lets HUP pass."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.times = 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or number
        self.times += 1

    def _hung_up(self, _number: int, _frame: FrameType | None) -> None:
        """The terminal has gone: training goes on, and so does the watch over it."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        # functions, not SIG_IGN: that would be inherited by the training processes
        wanted: Mapping[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._note, signal.SIGTERM: self._note, signal.SIGHUP: self._hung_up,
        }  # fmt: skip
        previous = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _watch(
    child: subprocess.Popen[bytes], mark: str, stop: _Stop, tick: Callable[[], None] | None
) -> int | None:
    """Wait for the end; returns the signal by which we were asked to stop, if we were."""
    while child.poll() is None:
        if stop.asked is not None:
            _end(child, mark, stop)
            return stop.asked
        if tick is not None:
            try:
                tick()
            except Exception:
                # a terminal that has gone, a full disk: nothing that training should suffer from
                tick = None
        time.sleep(POLL_S)
    _end_rest(child.pid, mark, stop, stop.times)
    return None


def _end(child: subprocess.Popen[bytes], mark: str, stop: _Stop) -> None:
    """INT or TERM to the group, TERM to everything, then KILL; asked again, it does not wait."""
    _signal_group(child.pid, stop.asked or signal.SIGTERM)
    _wait(child, GRACE_S[0], lambda: stop.times > 1)
    if child.poll() is None:
        _signal_everything(child.pid, mark, signal.SIGTERM)
        _wait(child, GRACE_S[1], lambda: stop.times > 2)
    if child.poll() is None:
        _signal_everything(child.pid, mark, signal.SIGKILL)
        child.wait()
    _end_rest(child.pid, mark, stop, stop.times)


def _end_rest(leader: int, mark: str, stop: _Stop, times: int) -> None:
    """End what outlived the process that was started: no part of any result comes from it."""
    _signal_everything(leader, mark, signal.SIGTERM)
    # asked to stop once more than `times`, it does not wait
    _vanished(leader, mark, GRACE_S[2], lambda: stop.times > times)
    _signal_everything(leader, mark, signal.SIGKILL)
    _vanished(leader, mark, KILLED_S, lambda: False)


def _vanished(leader: int, mark: str, seconds: float, hurry: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while process.family(leader, mark) and time.monotonic() < until and not hurry():
        time.sleep(POLL_S / 4)


def _wait(child: subprocess.Popen[bytes], seconds: float, hurry: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < until and not hurry():
        time.sleep(POLL_S / 4)


def _signal_everything(leader: int, mark: str, number: int) -> None:
    # torchrun's workers are in sessions of their own: the group alone would leave them behind
    process.signal_all(process.family(leader, mark), number)
    _signal_group(leader, number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def alive(folder: Path, marks: Callable[[], frozenset[str]] = process.marks) -> bool:
    """Whether the attempt of a run folder that began last still runs on this machine.

    It does as long as the process that was started lives, or any other that bears the run's mark.
    """
    run = RunFolder(folder)
    data = rundir.read_json(run.process)
    leader = process.identity(data)
    if leader is None or not leader.here():
        return False
    if leader.lives():
        return True
    attempt = data.get("attempt")
    ended = run.exit(attempt if isinstance(attempt, int) else 1).exists()
    return not ended and str(data.get("mark", folder)) in marks()
