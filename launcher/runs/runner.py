"""Start a `Command` in a session of its own, follow its log for display, end it, record the `ProcessExit`.

The training processes write straight into `console.log`: no pipe runs through the launcher, so
nothing is lost and nothing stops when it dies.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, BinaryIO

from launcher import files
from launcher.errors import DISK_FULL, Finding, NotReady, brief, launch_finding, not_ready, usage
from launcher.machine import codec, locks, process
from launcher.machine.codec import LARGEST, Between, Count, Misfit, Positive
from launcher.machine.process import Identity
from launcher.runs import lease, outputs, rundir
from launcher.runs.attempt import ATTEMPT, Command
from launcher.runs.preemption import SaveRequest
from launcher.runs.rundir import RunFolder

POLL_S = 0.2
GRACE_S = (20.0, 10.0, 5.0)
"""Seconds that a stop waits before it gets harder: after INT, after TERM, after TERM to the rest."""
GRACE_VARIABLE = "LAUNCH_GRACE"  # such seconds, as `20,10,5`; fewer numbers change the first ones only
KILLED_S = 10.0  # seconds that a killed process may take to be gone: it has memory to give back
SUPERVISOR = "launcher.lifecycle.supervisor"  # the module in the command line of every keeper
RESERVED = 256 * 2**10
"""Bytes kept free in the run folder, so that a full disk leaves room to record how the run ended."""
Grace = tuple[float, float, float]
Write = Callable[[Path, Any], None]
Living = Callable[[], frozenset[int]]  # the processes of a run
ExitCode = Annotated[int, Between(-255, 255)]
SignalNumber = Annotated[int, Between(1, 64)]


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How an attempt ended; `signal` is the one that killed the process, `stopped` the one we sent.

    `preempted` where it saved a checkpoint and ended because that was requested; `grace_s` are the seconds within
    which such a save was not done, so that it was stopped without.
    """

    returncode: ExitCode
    signal: SignalNumber | None = None
    stopped: SignalNumber | None = None
    started: str = ""
    ended: str = ""
    attempt: Count = 1
    preempted: bool = False
    grace_s: Annotated[float, Between(0, LARGEST)] | None = None


def grace(text: str | None) -> Grace:
    """`20,10,5` as seconds. Raises UsageError where it is none of that."""
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = [-1.0]
    if len(numbers) > len(GRACE_S) or not all(0 <= number < 1e6 for number in numbers):
        help = f"seconds after INT, after TERM, and for what is left: {GRACE_VARIABLE}=20,10,5"
        raise usage("bad-grace", f"`{brief(text)}` is not a number of seconds", help)
    first, second, third = (*numbers, *GRACE_S[len(numbers) :])
    return first, second, third


# Who trains into an output folder has its lease. The kernel's locks confirm that: they are on a file beside
# the lease and on one of the run folder, and the started process inherits them, so they are free as soon as
# that process has gone, however it went, and never before.


@contextlib.contextmanager
def lock_run(
    folder: RunFolder, attempt: int, output: Path | None
) -> Iterator[tuple[lease.Lease | None, tuple[int, ...]]]:
    """Hold run and output folder until a keeper has them; yields lease and descriptors to pass on. Raises NotReady."""
    process.hold_standard_streams()
    with contextlib.ExitStack() as stack:
        granted, descriptors = None, tuple[int, ...]()
        if output is not None:
            granted = lease.take(output, folder.path)
            stack.callback(granted.give_back)
            # two that begin at once see each other's lease at the latest now
            outputs.require_apart(output, folder.path)
        with rundir.writing(folder.path):
            folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
            for file in [folder.lock] if granted is None else [folder.lock, granted.lock]:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
                descriptors = (*descriptors, os.open(file, flags, 0o666))
                stack.callback(os.close, descriptors[-1])
        free = [locks.locked(one, seconds=locks.GLANCE_S) for one in descriptors]
        # the attempt: another start may have been quicker, and be over already
        if False in free or alive(folder.path) or folder.attempts() >= attempt:
            where = f" into {output}" if output is not None else ""
            message = f"the run {folder.path.name} was started before and trains{where}"
            help = "wait for it, stop it, or choose another output_dir"
            raise not_ready("run-is-live", message, help, file=str(folder.path))
        yield granted, descriptors


def run(
    command: Command,
    folder: RunFolder,
    attempt: int,
    pass_fds: Sequence[int] = (),
    *,
    due: Callable[[StopRequest], bool] = lambda _: True,
    began: Callable[[], None] = lambda: None,
    inherited: Mapping[str, str] | None = None,
    adopting: bool = False,
    save: SaveRequest | None = None,
    stands_still: Callable[[Living], bool] = lambda _: False,
) -> ProcessExit:
    """Run to the end; INT and TERM to this process stop every process of the run, HUP none.

    With `save`, TERM and USR1 ask the training to save a checkpoint and end; what has not done so in time is stopped.
    `stands_still` is asked every few seconds whether the processes of the run are to be ended as they hang.
    So does a `StopRequest` in the run folder, as soon as it is `due`. `began` is called once the process is
    there, which keeps the descriptors `pass_fds` open as long as it lives. `inherited` is the environment that
    the command's own adds to, this process's unless given. With `adopting`, all children of this process are
    the run's, orphans that it has adopted too. Raises NotReady where the trainer's Python cannot be started, or
    the run folder cannot be written.
    """
    started = rundir.now()
    inherited = os.environ if inherited is None else inherited
    watch = _Watch(folder, attempt, due, save, stands_still)
    noted = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), watch.note)
    with (
        # a terminal that goes stops nothing; no SIG_IGN: that would be inherited by the training
        process.handling({**noted, signal.SIGHUP: process.ignore}),
        _Reserve(folder.path / ".reserve") as reserve,
    ):
        with rundir.writing(folder.path):
            console = private(folder.console(attempt))
        with console:
            try:
                child = subprocess.Popen(
                    command.argv,
                    env={**inherited, **command.env, ATTEMPT: str(attempt), process.MARK: str(folder.path)},
                    cwd=command.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=tuple(pass_fds),
                )
            except (OSError, ValueError) as error:
                reserve.write(folder.exit(attempt), asdict(_ended(127, None, started, attempt)))
                reason = error.strerror if isinstance(error, OSError) else str(error)
                message = f"{command.argv[0]} cannot be started: {reason}"
                help = "give the trainer's interpreter with --python PATH"
                raise not_ready("not-started", message, help, file=command.argv[0]) from None
        leader, keeper = process.identify(child.pid), process.identify(os.getpid())
        origin = {"mark": str(folder.path), "attempt": attempt, "started": started, "keeper": keeper.as_json()}
        # for its owner alone: it says which processes a stop ends
        named = {**leader.as_json(), **origin, "folder": _inode(folder.path)}
        reserve.write(folder.process, named, files.write_private_json)
        began()
        stopped = watch.until_over(child.pid, process.Family(leader, str(folder.path), keeper if adopting else None))
        if watch.hangs:
            # nobody asked for it
            stopped = None
        ended = _ended(child.wait(), stopped, started, attempt)
        if save is not None:
            late = save.grace_s if watch.late else None
            ended = replace(ended, preempted=save.is_answered(), grace_s=late)
        if stopped is None:
            reserve.explain(folder.console(attempt))
        reserve.write(folder.exit(attempt), asdict(ended))
    return ended


@dataclass(slots=True)
class _Reserve:
    """Room for the records of a run whose disk becomes full: a file, given up where it is needed."""

    path: Path

    def __enter__(self) -> _Reserve:
        """Raises NotReady where there is no such room to begin with."""
        try:
            # a hole would keep no room; nor do zeros, on a file system that compresses
            self.path.write_bytes(os.urandom(RESERVED))
        except OSError as error:
            self.release()
            raise rundir.not_writable(self.path.parent, error.strerror) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def write(self, path: Path, data: Mapping[str, Any], write: Write | None = None) -> None:
        """A record, written whole or not at all: a disk that fails must not take the watch with it."""
        for _ in range(2):
            try:
                return (write or files.write_json)(path, data)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    return
                self.release()

    def explain(self, console: Path) -> None:
        """Say in the log that the disk is full at its end: the training could not."""
        probing = self.path.with_name(".room")
        try:
            probing.write_bytes(b"\0" * 8192)
        except OSError as error:
            if error.errno not in DISK_FULL:
                return
            self.release()
            line = f"\nlaunch: no room to write on: {os.strerror(error.errno)}: {console.name}\n"
            with contextlib.suppress(OSError), console.open("ab") as log:
                log.write(line.encode())
        finally:
            with contextlib.suppress(OSError):
                probing.unlink(missing_ok=True)


def private(path: Path) -> BinaryIO:
    """A file to append to, for its owner alone: a trainer prints what it likes, its environment too."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o600))


def _ended(code: int, stopped: int | None, started: str, attempt: int) -> ProcessExit:
    signal, returncode = (-code, 128 - code) if code < 0 else (None, code)
    return ProcessExit(returncode, signal, stopped, started, rundir.now(), attempt)


def recorded(folder: RunFolder, attempt: int) -> ProcessExit | None:
    """How an attempt ended, as its keeper recorded it; None where nobody lived to do that."""
    try:
        ended = codec.read(ProcessExit, rundir.read_json(folder.exit(attempt)))
    except Misfit:
        return None
    return replace(ended, attempt=attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of the attempt that began last: the one that was started, and its supervisor.

    `mark` is the folder that stands in their environment. `copy_of` is the run that they belong to, where this folder
    is a copy of that: then it has none itself.
    """

    leader: Identity | None
    keeper: Identity | None
    attempt: int | None
    mark: str
    started: str
    copy_of: str | None = None

    @property
    def out_of_sight(self) -> bool:
        return self.leader is not None and self.leader.elsewhere()

    @property
    def leader_lives(self) -> bool:
        """Whether it runs, and is of this run: its environment names it, or cannot be read."""
        leader = self.leader
        return leader is not None and leader.lives() and process.mark_of(leader.pid) in (None, self.mark)

    @property
    def keeper_lives(self) -> bool:
        return self.keeper is not None and self.keeper.lives() and self._keeps(self.keeper.pid)

    def _keeps(self, pid: int) -> bool:
        """Whether a process is a supervisor of this run, by its command line; one that cannot be read may be."""
        words = process.command_of(pid)
        return not any(words) or (SUPERVISOR in words and self.mark in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessRecord:
    """`process.json` beside the fields of the leader's identity; `folder` is device and inode of the run folder."""

    mark: str | None = None
    attempt: Positive | None = None
    started: str = ""
    keeper: object = None
    folder: tuple[int, ...] = ()


def processes(folder: RunFolder) -> Processes:
    data = rundir.read_json(folder.process)
    record = codec.read(_ProcessRecord, data)
    mark, copy_of = _owner(folder, record)
    return Processes(
        leader=None if copy_of else process.identity(data),
        keeper=None if copy_of else process.identity(record.keeper),
        attempt=record.attempt,
        mark=mark,
        started=record.started,
        copy_of=copy_of,
    )


def _owner(folder: RunFolder, record: _ProcessRecord) -> tuple[str, str | None]:
    """The folder that the processes of a record name, and the same again where this one is a copy of it."""
    own, mark = str(folder.path), record.mark or str(folder.path)
    if mark == own or _inode(Path(mark)) == _inode(folder.path):
        return mark, None
    # one that was moved has its inode still; older records hold none
    moved = not os.path.exists(mark) and list(record.folder) in ([], _inode(folder.path))
    return mark, None if moved else mark


def _inode(path: Path) -> list[int]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return []
    return [status.st_dev, status.st_ino]


def distrust(folder: RunFolder) -> str | None:
    """Why no process is ended because `process.json` names it; None where it can be believed."""
    return files.writable_by_others(folder.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """That an attempt be stopped, as a file: whoever asks need not know which process to ask.

    `checkpoint` has it save one first, `after_checkpoint` waits for the next one that it saves anyway.
    """

    attempt: Positive
    after_checkpoint: bool = False
    checkpoint: bool = False

    @property
    def is_patient(self) -> bool:
        """Whether the run may take as long as its training needs."""
        return self.after_checkpoint or self.checkpoint

    def write(self, folder: RunFolder) -> None:
        files.write_private_json(folder.stop, {**asdict(self), "asked": rundir.now()})


def request(folder: RunFolder) -> StopRequest | None:
    try:
        return codec.read(StopRequest, rundir.read_json(folder.stop))
    except Misfit:
        return None


class _Watch:
    """Waits for the end of a training; INT and TERM are counted instead of raising in the middle of something."""

    def __init__(
        self,
        folder: RunFolder,
        attempt: int,
        due: Callable[[StopRequest], bool],
        save: SaveRequest | None,
        stands_still: Callable[[Living], bool],
    ) -> None:
        self.folder, self.attempt, self.due = folder, attempt, due
        self.stands_still = stands_still
        self.hangs = False
        self.save = save
        self.waits = grace(os.environ.get(GRACE_VARIABLE))
        self.signal: int | None = None
        self.times = 0
        self.saves = self.late = False
        self.deadline: float | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None and self._is_notice(number):
            # said again, it is the same notice
            self.saves = True
            return
        if number == signal.SIGUSR1:
            number = signal.SIGTERM
        self.signal = self.signal or number
        self.times += 1

    def _is_notice(self, number: int) -> bool:
        if self.save is None:
            return False
        return number == signal.SIGUSR1 or (number == signal.SIGTERM and self.save.on_term)

    def until_over(self, pid: int, family: process.Family) -> int | None:
        """Returns the signal that requested a stop, if one did."""
        stopped = None
        while not process.over(pid):
            self._look()
            self._hurry_save()
            self._look_for_hang(family)
            if self.signal is not None:
                stopped = self.signal
                self._end(pid, family, stopped)
                break
            if family.keeper is not None:
                process.bury(but=pid)
            time.sleep(POLL_S)
        self._outlast_save(pid, family)
        # what outlived the process that was started: no part of any result comes from it, and torchrun's
        # workers are in sessions of their own: the group alone would leave them behind
        times = self.times
        process.signal_group(pid, signal.SIGTERM)
        _vanish(family, signal.SIGTERM, self.waits[2], lambda: self.times > times)
        process.signal_group(pid, signal.SIGKILL)
        _vanish(family, signal.SIGKILL, KILLED_S)
        return stopped

    def _look(self) -> None:
        found = None if self.signal is not None else request(self.folder)
        if found is None or found.attempt != self.attempt:
            return
        if found.checkpoint and self.save is not None:
            self.saves = True
            return
        try:
            due = self.due(found)
        except Exception:
            # whatever kept us from looking for a checkpoint: the stop was requested
            due = True
        if due:
            # upstream handles neither; INT at least shows where it stood
            self.signal = signal.SIGINT

    def _hurry_save(self) -> None:
        """Hand a notice on to the training; have it stopped once the time is up."""
        if self.save is None or self.signal is not None:
            return
        if self.deadline is None:
            # on another machine of the run somebody else may have been told
            if not self.saves and not self.save.is_written():
                return
            if not self.save.is_heard():
                self.signal = signal.SIGTERM
                return
            self.deadline = time.monotonic() + self.save.grace_s
            try:
                self.save.write()
            except OSError:
                self.signal = signal.SIGTERM
        elif time.monotonic() > self.deadline:
            self.late = True
            self.signal = signal.SIGINT
            line = f"\nlaunch: no checkpoint was saved within {self.save.grace_s:g} s: stopping without\n"
            with contextlib.suppress(OSError), self.folder.console(self.attempt).open("a") as log:
                log.write(line)

    def _look_for_hang(self, family: process.Family) -> None:
        if self.signal is not None:
            return
        # whatever keeps us from looking is no hang
        with contextlib.suppress(OSError, ValueError):
            if self.stands_still(family.living):
                self.hangs = True
                self.signal = signal.SIGINT

    def _outlast_save(self, pid: int, family: process.Family) -> None:
        """Let ranks save whose launcher was ended before them: Slurm tells every process of a job."""
        if self.deadline is None or self.signal is not None:
            return
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_KILLED or ended.si_status != signal.SIGTERM:
            return
        while time.monotonic() < self.deadline and self.signal is None and family.living():
            if family.keeper is not None:
                process.bury(but=pid)
            time.sleep(POLL_S / 4)

    def _end(self, pid: int, family: process.Family, first: int) -> None:
        """INT or TERM to the group, TERM to everything, then KILL; a further signal ends each wait."""
        # known from now on, whatever becomes of their parents
        family.living()
        process.signal_group(pid, first)
        self._wait(pid, 0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.over(pid):
                return
            process.signal_all(family.living(), number)
            process.signal_group(pid, number)
            if number == signal.SIGTERM:
                self._wait(pid, 1)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def _wait(self, pid: int, which: int) -> None:
        until = time.monotonic() + self.waits[which]
        while not process.over(pid) and self.times <= which + 1 and time.monotonic() < until:
            time.sleep(POLL_S / 4)


def _vanish(family: process.Family, number: int, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Signal each of them, also those that come meanwhile, until none is left or the time is up."""
    until, signalled = time.monotonic() + seconds, set[int]()
    while left := family.living():
        process.signal_all(left - signalled, number)
        signalled |= left
        if time.monotonic() >= until or hurry():
            return
        time.sleep(POLL_S / 4)


def end_orphans(folder: RunFolder, waits: Grace, attempt: int) -> None:
    """End the processes of a run whose keeper has gone, or stands still: INT, TERM, KILL; record it."""
    known = processes(folder)
    family, last = _family_of(folder, known), None
    for number, seconds in ((signal.SIGINT, waits[0]), (signal.SIGTERM, waits[1]), (signal.SIGKILL, KILLED_S)):
        if family.living():
            last = number
            _vanish(family, number, seconds)
    if last is not None:
        ended = _ended(-last, signal.SIGINT, known.started, attempt)
        with contextlib.suppress(OSError):
            files.write_json(folder.exit(attempt), asdict(ended))


def _family_of(folder: RunFolder, known: Processes) -> process.Family:
    """Those that a stop may end: what bears the mark of this run, and what descends from that.

    What the record names counts only where it can be believed, and is what the record says: the leader by the mark in
    its environment, the keeper by its command line.
    """
    if distrust(folder) is not None:
        return process.Family(None, str(folder.path))
    leader = keeper = None
    if known.leader is not None and known.leader_lives and process.mark_of(known.leader.pid) == known.mark:
        leader = known.leader
    if known.keeper is not None and known.keeper_lives and any(process.command_of(known.keeper.pid)):
        keeper = known.keeper
    return process.Family(leader, known.mark, keeper)


def signal_keeper(folder: RunFolder, number: int) -> bool:
    """Send a signal to the keeper of a run; whether it lives and is one. Raises PermissionError from the kernel."""
    keeper = _family_of(folder, processes(folder)).keeper
    if keeper is None:
        return False
    try:
        os.kill(keeper.pid, number)
    except ProcessLookupError:
        return False
    return True


def keeper_lives(folder: RunFolder) -> bool:
    return processes(folder).keeper_lives


def kill_keeper(folder: RunFolder) -> None:
    until = time.monotonic() + KILLED_S
    with contextlib.suppress(PermissionError):
        while time.monotonic() < until and signal_keeper(folder, signal.SIGKILL):
            time.sleep(POLL_S / 4)


def orphaned(folder: RunFolder) -> bool:
    """Whether the keeper that a run had has gone; one of an older launch never had any."""
    known = processes(folder)
    return known.keeper is not None and not known.keeper_lives and not known.keeper.elsewhere()


def alive(folder: Path, marks: Callable[[], frozenset[str]] = process.marks, known: Processes | None = None) -> bool:
    """Whether the attempt that began last still runs: by its processes and their mark, else by heartbeat and lock.
    `known` is what `processes` read of it just now."""
    run = RunFolder(folder)
    known = known or processes(run)
    if known.leader is None or known.leader_lives:
        return known.leader is not None
    if run.exit(known.attempt or 1).exists():
        return False
    if known.mark in marks() or (known.out_of_sight and lease.is_locked(run.lock)):
        return True
    last = lease.newest(rundir.read_manifest(run).output) if known.out_of_sight else None
    return last is not None and Path(last.run).name == folder.name and last.beats()


def unknown(folder: RunFolder, known: Processes | None = None) -> Finding | None:
    """That the state of a run is unknown here, where it is: out of sight, and without a heartbeat. `known` is what
    `processes` read of it just now."""
    known = known or processes(folder)
    name = folder.path.name
    visible = not known.out_of_sight or folder.exit(known.attempt or 1).exists()
    if known.leader is None or visible or alive(folder.path, known=known):
        return None
    message = f"the state of {name} is unknown here: it was started on {known.leader.place}, whose processes "
    message += f"are not visible from here, and it had no heartbeat for {lease.SILENT_S:.0f} s or more"
    help = f"ask there: launch runs, launch stop {name}; the same launch command resumes it here"
    return launch_finding("error", "run-is-elsewhere", message, help, file=str(folder.path))


def require_sight(folder: RunFolder) -> None:
    """Raise NotReady where nothing can be concluded of the run: it may go on where nobody here can look, or it is the
    copy of one whose end it does not hold."""
    known = processes(folder)
    if known.copy_of is not None and not folder.exit(known.attempt or 1).exists():
        message = f"{folder.path.name} is a copy of {known.copy_of}, whose processes are not its own"
        help = f"launch stop {shlex.quote(known.copy_of)}, or launch attach; launch check judges the copy"
        raise not_ready("run-is-a-copy", message, help, file=str(folder.path))
    if (why := unknown(folder, known)) is not None:
        raise NotReady(why)
