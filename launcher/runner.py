"""Start a `Command` in a session of its own, follow its log for display, end it, record the exit.

The training processes write straight into `console.log`: no pipe runs through the launcher, so
nothing is lost and nothing stops when it dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launcher import rundir
from launcher.command import Command
from launcher.errors import Finding, NotReady
from launcher.rundir import RunFolder

POLL_S = 0.2
# what a stop waits for before it gets harder: after INT, after TERM
GRACE_S = (20.0, 10.0)


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
    command: Command, folder: RunFolder, attempt: int, tick: Callable[[], None] | None = None
) -> Exit:
    """Run to the end; INT and TERM to the launcher stop the whole process group.

    `tick` is called about five times a second, for display. Raises NotReady where the trainer's
    Python cannot be started at all.
    """
    started = rundir.now()
    environment = {**os.environ, **command.env, "LAUNCH_ATTEMPT": str(attempt)}
    with folder.console(attempt).open("ab") as console:
        try:
            process = subprocess.Popen(
                command.argv, env=environment, cwd=command.cwd, stdin=subprocess.DEVNULL,
                stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise NotReady(_not_started(command, error)) from None
    rundir.write_json(
        folder.path / "process.json",
        {"pid": process.pid, "attempt": attempt, "started": started, "host": os.uname().nodename},
    )
    stopped = _watch(process, tick)
    code = process.wait()
    ended = Exit(
        returncode=code if code >= 0 else 128 - code, signal=-code if code < 0 else None,
        stopped=stopped, started=started, ended=rundir.now(), attempt=attempt,
    )  # fmt: skip
    rundir.write_json(folder.exit(attempt), {name: getattr(ended, name) for name in Exit.__slots__})
    return ended


def _watch(process: subprocess.Popen[bytes], tick: Callable[[], None] | None) -> int | None:
    """Wait for the end; returns the signal by which we were asked to stop, if we were."""
    stop = _Stop()
    with stop.listening():
        while process.poll() is None:
            if stop.asked is not None:
                end_group(process, stop.asked)
                return stop.asked
            if tick is not None:
                tick()
            time.sleep(POLL_S)
    # the leader is gone; workers that outlived it are not part of any result
    _signal_group(process.pid, signal.SIGKILL)
    return stop.asked


class _Stop:
    """Remembers the first INT or TERM instead of raising in the middle of something."""

    def __init__(self) -> None:
        self.asked: int | None = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = number

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        previous = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def end_group(process: subprocess.Popen[bytes], first: int) -> None:
    """INT or TERM, then TERM, then KILL to the process group, with time to go quietly in between."""
    for number, grace in ((first, GRACE_S[0]), (signal.SIGTERM, GRACE_S[1])):
        _signal_group(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
            break
    # torchrun's grandchildren too, whether or not the leader has gone
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _not_started(command: Command, error: OSError) -> Finding:
    return Finding(
        severity="error", layer="launch", code="not-started", file=command.argv[0],
        message=f"{command.argv[0]} cannot be started: {error.strerror}",
        help="give the trainer's interpreter with --python PATH",
    )  # fmt: skip


def alive(folder: Path) -> bool:
    """Whether the attempt of a run folder that began last still runs on this machine."""
    data = rundir.read_json(folder / "process.json")
    if data.get("host") != os.uname().nodename or not isinstance(data.get("pid"), int):
        return False
    try:
        os.kill(data["pid"], 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
