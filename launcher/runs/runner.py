"""Start a `Command` in a session of its own, wait for its end or stop it, record the `ProcessExit`.

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
from dataclasses import asdict, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, BinaryIO

from launcher import files
from launcher.errors import DISK_FULL, Finding, NotReady, launch_finding, not_ready, shorten, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec, locks, process
from launcher.machine.codec import LARGEST, Between, Count, Misfit, Positive
from launcher.machine.process import Identity, ProcessTree
from launcher.runs import lease, outputs, rundir
from launcher.runs.attempt import ATTEMPT, Command
from launcher.runs.lease import Lease
from launcher.runs.preemption import SaveRequest
from launcher.runs.rundir import RunFolder

POLL_S = 0.2
SHORT_POLL_S = 0.05
GRACE_S = (20.0, 10.0, 5.0)
"""Seconds that a stop waits: after INT, after TERM, after TERM to the remaining processes."""
GRACE_VARIABLE = "LAUNCH_GRACE"  # overrides GRACE_S, as `20,10,5`; fewer numbers override the first
KILLED_S = 10.0  # seconds that a killed process may take to be gone: it has memory to release
SUPERVISOR = "launcher.lifecycle.supervisor"  # the module in the command line of every supervisor
RESERVED_BYTES = 256 * 2**10
"""Kept free in the run folder, so that on a full disk there is room to record the end of a run."""
Grace = tuple[float, float, float]
Write = Callable[[Path, Any], None]
Living = Callable[[], frozenset[int]]  # the live processes of a run
ExitCode = Annotated[int, Between(-255, 255)]
SignalNumber = Annotated[int, Between(1, 64)]


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How an attempt ended.

    `signal` killed the process, `stopped` is the signal that launch sent. `preempted`: it was asked
    to save a checkpoint and end, and did. `grace_s`: it did not save within so many seconds, and
    was stopped.
    """

    returncode: ExitCode
    signal: SignalNumber | None = None
    stopped: SignalNumber | None = None
    started: str = ""
    ended: str = ""
    attempt: Count = 1
    preempted: bool = False
    grace_s: Annotated[float, Between(0, LARGEST)] | None = None


def parse_stop_grace(text: str | None) -> Grace:
    """The value of GRACE_VARIABLE as seconds. Raises UsageError."""
    numbers = list[float]()
    try:
        if text:
            numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if len(numbers) > len(GRACE_S) or any(not 0 <= number < 1e6 for number in numbers):
        help = f"seconds after INT, after TERM, and for what is left: {GRACE_VARIABLE}=20,10,5"
        raise usage("bad-grace", f"`{shorten(text)}` is not a number of seconds", help)
    first, second, third = [*numbers, *GRACE_S[len(numbers) :]]
    return first, second, third


# Who trains into an output folder has its lease. Locks of the kernel confirm that: on a file beside
# the lease, and on one of the run folder. The started process inherits them, so they are released
# when that process has gone, however it ended, and never before.


@contextlib.contextmanager
def lock_run(
    folder: RunFolder, attempt: int, output: Path | None
) -> Iterator[tuple[Lease | None, tuple[int, ...]]]:
    """Hold run and output folder until a supervisor does. Raises NotReady.

    Yields the lease, and the descriptors to pass on.
    """
    process.hold_standard_streams()
    with contextlib.ExitStack() as stack:
        acquired = None
        if output is not None:
            acquired = lease.acquire(output, folder.path)
            stack.callback(acquired.release)
            # of two starts at the same time, each sees the other's lease at the latest now
            outputs.require_apart(output, folder.path)
        lock_files = [folder.lock]
        if acquired is not None:
            lock_files.append(acquired.lock)
        descriptors = []
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        with rundir.writing(folder.path):
            folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
            for file in lock_files:
                descriptor = os.open(file, flags, 0o666)
                stack.callback(os.close, descriptor)
                descriptors.append(descriptor)
        _require_not_running(folder, attempt, output, descriptors)
        yield acquired, tuple(descriptors)


def _require_not_running(
    folder: RunFolder, attempt: int, output: Path | None, descriptors: Sequence[int]
) -> None:
    locked = [locks.try_lock(each, seconds=locks.GLANCE_S) for each in descriptors]
    # by the attempts: another start may have been quicker, and be over already
    if False in locked or is_alive(folder.path) or folder.attempts() >= attempt:
        message = f"the run {folder.path.name} was started before and trains"
        if output is not None:
            message += f" into {output}"
        help = "wait for it, stop it, or choose another output_dir"
        raise not_ready("run-is-live", message, help, file=str(folder.path))


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
    """Run a command to its end; INT and TERM to this process stop all of it, HUP is ignored.

    With `save`, TERM and USR1 ask the training to save a checkpoint and end; if it does not in
    time, it is stopped. A `StopRequest` in the run folder stops it as soon as it is `due`, and so
    does `stands_still`, which is asked regularly whether the processes hang. `began` is called once
    the process exists. The process keeps the descriptors `pass_fds` open as long as it lives.
    `inherited` is the environment that the command's own adds to, by default this process's. With
    `adopting`, all children of this process belong to the run, adopted orphans too. Raises NotReady
    if the trainer's Python cannot be started, or the run folder cannot be written.
    """
    started = rundir.format_utc_now()
    if inherited is None:
        inherited = os.environ
    mark = str(folder.path)
    env = {**inherited, **command.env, ATTEMPT: str(attempt), process.MARK: mark}
    watch = _Watch(folder, attempt, due=due, save=save, stands_still=stands_still)
    handlers: dict[signal.Signals, process.Handler] = {
        signal.SIGINT: watch.note_signal,
        signal.SIGTERM: watch.note_signal,
        signal.SIGUSR1: watch.note_signal,
        # not SIG_IGN, which the training would inherit
        signal.SIGHUP: process.ignore_signal,
    }
    with process.install_handlers(handlers), _Reserve(folder.path / ".reserve") as reserve:
        with rundir.writing(folder.path):
            console = open_private_log(folder.console(attempt))
        with console:
            try:
                child = _start_command(command, env, console, pass_fds)
            except NotReady:
                ended = _make_exit(127, None, started, attempt)
                reserve.write(folder.exit(attempt), asdict(ended))
                raise
        leader = process.identify(child.pid)
        supervisor = process.identify(os.getpid())
        record = {
            **leader.as_json(),
            "mark": mark,
            "attempt": attempt,
            "started": started,
            "keeper": supervisor.as_json(),
            "folder": _read_device_and_inode(folder.path),
        }
        # private: a stop ends the processes that it names
        reserve.write(folder.process, record, files.write_private_json)
        began()
        tree = ProcessTree(leader, mark, supervisor if adopting else None)
        stopped = watch.wait(child.pid, tree)
        if watch.hangs:
            # nobody asked for it
            stopped = None
        ended = _make_exit(child.wait(), stopped, started, attempt)
        if save is not None:
            late_s = save.grace_s if watch.late else None
            ended = replace(ended, preempted=save.is_answered(), grace_s=late_s)
        if stopped is None:
            reserve.explain(folder.console(attempt))
        reserve.write(folder.exit(attempt), asdict(ended))
    return ended


def _start_command(
    command: Command, env: Mapping[str, str], console: BinaryIO, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in `console`. Raises NotReady."""
    try:
        return subprocess.Popen(
            command.argv,
            env=env,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        reason = str(error)
    program = command.argv[0]
    message = f"{program} cannot be started: {reason}"
    help = "give the trainer's interpreter with --python PATH"
    raise not_ready("not-started", message, help, file=program)


@dataclass(slots=True)
class _Reserve:
    """A file that holds room for the records of a run; deleted when the disk is full."""

    path: Path

    def __enter__(self) -> _Reserve:
        """Raises NotReady if there is no room to begin with."""
        try:
            # random: a hole takes no room, nor do zeros on a file system that compresses
            self.path.write_bytes(os.urandom(RESERVED_BYTES))
        except OSError as error:
            self.release()
            raise rundir.make_not_writable(self.path.parent, error.strerror) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def write(
        self, path: Path, content: Mapping[str, Any], write: Write = files.write_json
    ) -> None:
        """Write a record, or nothing: a disk that fails must not end the supervision."""
        try:
            write(path, content)
        except OSError as error:
            if error.errno in DISK_FULL:
                self.release()
                with contextlib.suppress(OSError):
                    write(path, content)

    def explain(self, console: Path) -> None:
        """Say in the log that the disk is full, if it is: the training could not."""
        probe = self.path.with_name(".room")
        try:
            probe.write_bytes(b"\0" * 8192)
        except OSError as error:
            if error.errno not in DISK_FULL:
                return
            self.release()
            reason = f"{os.strerror(error.errno)}: {console.name}"
            _append_line(console, f"launch: no room to write on: {reason}")
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


def _append_line(console: Path, line: str) -> None:
    with contextlib.suppress(OSError), console.open("ab") as log:
        log.write(f"\n{line}\n".encode())


def open_private_log(path: Path) -> BinaryIO:
    """A file to append to that only its owner can read: a trainer may print its environment."""
    return open(path, "ab", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def _make_exit(code: int, stopped: int | None, started: str, attempt: int) -> ProcessExit:
    """`code` is negative for a signal, as `subprocess` has it."""
    killed_by = None
    returncode = code
    if code < 0:
        killed_by = -code
        returncode = 128 - code
    return ProcessExit(
        returncode=returncode,
        signal=killed_by,
        stopped=stopped,
        started=started,
        ended=rundir.format_utc_now(),
        attempt=attempt,
    )


def read_exit(folder: RunFolder, attempt: int) -> ProcessExit | None:
    """How an attempt ended; None if its supervisor did not live to record that."""
    try:
        ended = codec.read_record(ProcessExit, rundir.read_json(folder.exit(attempt)))
    except Misfit:
        return None
    return replace(ended, attempt=attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of the attempt that began last: the started one, and its supervisor.

    `mark` is the run folder in their environment. If this folder is a copy of that one, `copy_of`
    names it, and the copy has no processes itself.
    """

    leader: Identity | None
    supervisor: Identity | None
    attempt: int | None
    mark: str
    started: str
    copy_of: str | None = None

    @property
    def is_remote(self) -> bool:
        return self.leader is not None and self.leader.is_remote()

    @property
    def leader_is_alive(self) -> bool:
        """Whether the process runs and has the mark of the run, or an unreadable environment."""
        leader = self.leader
        if leader is None or not leader.is_alive():
            return False
        return process.run_mark(leader.pid) in (None, self.mark)

    @property
    def supervisor_is_alive(self) -> bool:
        """Whether the process runs and has the command line of a supervisor of this run.

        A command line that cannot be read may be one.
        """
        supervisor = self.supervisor
        if supervisor is None or not supervisor.is_alive():
            return False
        words = process.read_command_line(supervisor.pid)
        return not words or (SUPERVISOR in words and self.mark in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessRecord:
    """The fields of `process.json` beside those of the leader's identity.

    `folder` is device and inode of the run folder.
    """

    mark: str | None = None
    attempt: Positive | None = None
    started: str = ""
    supervisor: object = field(default=None, metadata={codec.KEY: "keeper"})
    folder: tuple[int, ...] = ()


def read_processes(folder: RunFolder) -> Processes:
    content = rundir.read_json(folder.process)
    record = codec.read_record(_ProcessRecord, content)
    mark = record.mark or str(folder.path)
    leader = process.parse_identity(content)
    supervisor = process.parse_identity(record.supervisor)
    copy_of = None
    if _is_copy(folder, mark, record.folder):
        copy_of = mark
        leader = None
        supervisor = None
    return Processes(
        leader=leader,
        supervisor=supervisor,
        attempt=record.attempt,
        mark=mark,
        started=record.started,
        copy_of=copy_of,
    )


def _is_copy(folder: RunFolder, mark: str, recorded: Sequence[int]) -> bool:
    """Whether a run folder is a copy of `mark`, where it was recorded: not the same, nor moved."""
    current = _read_device_and_inode(folder.path)
    if mark == str(folder.path) or _read_device_and_inode(Path(mark)) == current:
        return False
    if os.path.exists(mark):
        return True
    was_moved = not recorded or list(recorded) == current
    return not was_moved


def _read_device_and_inode(path: Path) -> list[int]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return []
    return [status.st_dev, status.st_ino]


def find_reason_to_distrust(folder: RunFolder) -> str | None:
    """Why no process is ended because `process.json` names it; None if it can be trusted."""
    return files.find_other_writer(folder.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A file that asks for an attempt to be stopped, on whatever machine its supervisor is.

    `checkpoint`: save one first. `after_checkpoint`: wait for the next regular one.
    """

    attempt: Positive
    after_checkpoint: bool = False
    checkpoint: bool = False

    @property
    def is_patient(self) -> bool:
        """Whether the run may take as long as its training needs."""
        return self.after_checkpoint or self.checkpoint

    def write(self, folder: RunFolder) -> None:
        content = {**asdict(self), "asked": rundir.format_utc_now()}
        files.write_private_json(folder.stop, content)


def read_stop_request(folder: RunFolder) -> StopRequest | None:
    try:
        return codec.read_record(StopRequest, rundir.read_json(folder.stop))
    except Misfit:
        return None


class _Watch:
    """Waits for the end of a training, and stops it when asked to.

    Signals are counted, so that none raises in the middle of something.
    """

    def __init__(
        self,
        folder: RunFolder,
        attempt: int,
        *,
        due: Callable[[StopRequest], bool],
        save: SaveRequest | None,
        stands_still: Callable[[Living], bool],
    ) -> None:
        self.folder = folder
        self.attempt = attempt
        self.due = due
        self.save = save
        self.stands_still = stands_still
        self.grace = parse_stop_grace(os.environ.get(GRACE_VARIABLE))
        self.signal: int | None = None  # the first that asked for a stop
        self.signals = 0  # how many asked for it
        self.hangs = False
        self.save_requested = False
        self.save_deadline: float | None = None  # set once the training was asked to save
        self.late = False

    def note_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None and self._asks_to_save(number):
            # a repeated notice is the same notice
            self.save_requested = True
            return
        if number == signal.SIGUSR1:
            number = signal.SIGTERM
        self.signal = self.signal or number
        self.signals += 1

    def _asks_to_save(self, number: int) -> bool:
        if self.save is None:
            return False
        return number == signal.SIGUSR1 or (number == signal.SIGTERM and self.save.on_term)

    def wait(self, pid: int, tree: ProcessTree) -> int | None:
        """Wait until no process of the run is left; returns the signal that stopped it, if any."""
        stopped = None
        while not process.has_exited(pid):
            self._check_stop_request()
            self._check_save()
            self._check_hang(tree)
            if self.signal is not None:
                stopped = self.signal
                self._stop_processes(pid, tree, stopped)
                break
            self._reap_orphans(pid, tree)
            time.sleep(POLL_S)
        self._wait_for_ranks_to_save(pid, tree)
        # The training is over, and nothing of it may outlive it. The group alone does not do:
        # torchrun's workers have sessions of their own.
        signals = self.signals
        process.signal_group(pid, signal.SIGTERM)
        _signal_until_gone(tree, signal.SIGTERM, self.grace[2], lambda: self.signals > signals)
        process.signal_group(pid, signal.SIGKILL)
        _signal_until_gone(tree, signal.SIGKILL, KILLED_S)
        return stopped

    def _reap_orphans(self, pid: int, tree: ProcessTree) -> None:
        if tree.supervisor is not None:
            process.reap_except(pid)

    def _check_stop_request(self) -> None:
        if self.signal is not None:
            return
        request = read_stop_request(self.folder)
        if request is None or request.attempt != self.attempt:
            return
        if request.checkpoint and self.save is not None:
            self.save_requested = True
            return
        try:
            due = self.due(request)
        except Exception:
            # whatever prevented the search for a checkpoint: the stop was requested
            due = True
        if due:
            # trainers handle neither INT nor TERM; INT at least shows where they were
            self.signal = signal.SIGINT

    def _check_save(self) -> None:
        """Ask the training to save if that was requested; stop it once its time is up."""
        if self.save is None or self.signal is not None:
            return
        if self.save_deadline is None:
            self._ask_to_save(self.save)
        elif time.monotonic() > self.save_deadline:
            self.late = True
            self.signal = signal.SIGINT
            line = f"launch: no checkpoint was saved within {self.save.grace_s:g} s: "
            line += "stopping without"
            _append_line(self.folder.console(self.attempt), line)

    def _ask_to_save(self, save: SaveRequest) -> None:
        # the request may come from another machine of the run
        if not self.save_requested and not save.is_written():
            return
        if not save.is_heard():
            self.signal = signal.SIGTERM
            return
        self.save_deadline = time.monotonic() + save.grace_s
        try:
            save.write()
        except OSError:
            self.signal = signal.SIGTERM

    def _check_hang(self, tree: ProcessTree) -> None:
        if self.signal is not None:
            return
        # a failure to look is no hang
        with contextlib.suppress(OSError, ValueError):
            if self.stands_still(tree.living):
                self.hangs = True
                self.signal = signal.SIGINT

    def _wait_for_ranks_to_save(self, pid: int, tree: ProcessTree) -> None:
        """Let ranks save whose launcher was ended first: Slurm sends TERM to every process."""
        if self.save_deadline is None or self.signal is not None:
            return
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_KILLED:
            return
        if ended.si_status != signal.SIGTERM:
            return
        while self.signal is None and tree.living():
            if time.monotonic() >= self.save_deadline:
                return
            self._reap_orphans(pid, tree)
            time.sleep(SHORT_POLL_S)

    def _stop_processes(self, pid: int, tree: ProcessTree, first: int) -> None:
        """`first` to the group, TERM to all, KILL to all; a further signal ends each wait."""
        # remember them all, even if they lose their parents meanwhile
        tree.living()
        process.signal_group(pid, first)
        self._wait_for_exit(pid, self.grace[0], 1)
        if process.has_exited(pid):
            return
        self._signal_all(pid, tree, signal.SIGTERM)
        self._wait_for_exit(pid, self.grace[1], 2)
        if process.has_exited(pid):
            return
        self._signal_all(pid, tree, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def _signal_all(self, pid: int, tree: ProcessTree, number: int) -> None:
        process.signal_all(tree.living(), number)
        process.signal_group(pid, number)

    def _wait_for_exit(self, pid: int, seconds: float, max_signals: int) -> None:
        until = time.monotonic() + seconds
        while not process.has_exited(pid) and self.signals <= max_signals:
            if time.monotonic() >= until:
                return
            time.sleep(SHORT_POLL_S)


def _signal_until_gone(
    tree: ProcessTree, number: int, seconds: float, is_hurried: Callable[[], bool] = lambda: False
) -> None:
    """Signal each process of a run once, new ones too, until none is left or the time is up."""
    until = time.monotonic() + seconds
    signalled = set[int]()
    living = tree.living()
    while living:
        process.signal_all(living - signalled, number)
        signalled |= living
        if time.monotonic() >= until or is_hurried():
            return
        time.sleep(SHORT_POLL_S)
        living = tree.living()


def end_orphans(folder: RunFolder, grace: Grace, attempt: int) -> None:
    """End the processes of a run without a working supervisor: INT, TERM, KILL; record that."""
    processes = read_processes(folder)
    tree = _find_trusted_tree(folder, processes)
    last_signal = None
    steps = [(signal.SIGINT, grace[0]), (signal.SIGTERM, grace[1]), (signal.SIGKILL, KILLED_S)]
    for number, seconds in steps:
        if tree.living():
            last_signal = number
            _signal_until_gone(tree, number, seconds)
    if last_signal is not None:
        ended = _make_exit(-last_signal, signal.SIGINT, processes.started, attempt)
        with contextlib.suppress(OSError):
            files.write_json(folder.exit(attempt), asdict(ended))


def _find_trusted_tree(folder: RunFolder, processes: Processes) -> ProcessTree:
    """The processes that a stop may end: those with the mark of this run, and what they started.

    The leader and the supervisor that `process.json` names are added if nobody else can have
    written that file, and they are still the processes that it describes.
    """
    if find_reason_to_distrust(folder) is not None:
        return ProcessTree(None, str(folder.path))
    leader = processes.leader
    if leader is not None:
        has_mark = process.run_mark(leader.pid) == processes.mark
        if not has_mark or not processes.leader_is_alive:
            leader = None
    supervisor = processes.supervisor
    if supervisor is not None:
        is_readable = bool(process.read_command_line(supervisor.pid))
        if not is_readable or not processes.supervisor_is_alive:
            supervisor = None
    return ProcessTree(leader, processes.mark, supervisor)


def signal_supervisor(folder: RunFolder, number: int) -> bool:
    """Signal the supervisor of a run; whether it lives. Raises PermissionError from the kernel."""
    supervisor = _find_trusted_tree(folder, read_processes(folder)).supervisor
    if supervisor is None:
        return False
    try:
        os.kill(supervisor.pid, number)
    except ProcessLookupError:
        return False
    return True


def has_live_supervisor(folder: RunFolder) -> bool:
    return read_processes(folder).supervisor_is_alive


def kill_supervisor(folder: RunFolder) -> None:
    """Kill the supervisor of a run, and wait until it has gone."""
    until = time.monotonic() + KILLED_S
    with contextlib.suppress(PermissionError):
        while time.monotonic() < until and signal_supervisor(folder, signal.SIGKILL):
            time.sleep(SHORT_POLL_S)


def is_orphaned(folder: RunFolder) -> bool:
    """Whether the supervisor that a run had on this machine has gone."""
    processes = read_processes(folder)
    supervisor = processes.supervisor
    if supervisor is None or supervisor.is_remote():
        return False
    return not processes.supervisor_is_alive


def is_alive(
    folder: Path,
    marks: Callable[[], frozenset[str]] = process.find_live_marks,
    processes: Processes | None = None,
) -> bool:
    """Whether the attempt that began last still runs.

    By its processes and their marks; by lock and heartbeat if they are out of sight. `processes` is
    what `read_processes` returned just now.
    """
    run = RunFolder(folder)
    processes = processes or read_processes(run)
    if processes.leader is None:
        return False
    if processes.leader_is_alive:
        return True
    if run.exit(processes.attempt or 1).exists():
        return False
    if processes.mark in marks():
        return True
    if not processes.is_remote:
        return False
    if lease.is_locked(run.lock):
        return True
    newest = lease.find_newest_lease(rundir.read_manifest(run).output)
    if newest is None or Path(newest.run).name != folder.name:
        return False
    return newest.is_beating()


def check_known_state(folder: RunFolder, processes: Processes | None = None) -> Finding | None:
    """The error that a run's state is unknown: its processes are out of sight and silent.

    None if it is known. `processes` is what `read_processes` returned just now.
    """
    processes = processes or read_processes(folder)
    leader = processes.leader
    if leader is None or not processes.is_remote:
        return None
    if folder.exit(processes.attempt or 1).exists():
        return None
    if is_alive(folder.path, processes=processes):
        return None
    name = folder.path.name
    message = f"the state of {name} is unknown here: it was started on {leader.place}, "
    message += "whose processes are not visible from here, "
    message += f"and it had no heartbeat for {lease.SILENT_S:.0f} s or more"
    help = f"ask there: launch runs, launch stop {name}; "
    help += "the same launch command resumes it here"
    return launch_finding("error", "run-is-elsewhere", message, help, file=str(folder.path))


def require_known_state(folder: RunFolder) -> None:
    """Raise NotReady if nothing is known of a run's state.

    It may continue out of sight, or the folder is a copy that does not hold its end.
    """
    processes = read_processes(folder)
    original = processes.copy_of
    if original is not None and not folder.exit(processes.attempt or 1).exists():
        message = f"{folder.path.name} is a copy of {original}, "
        message += "whose processes are not its own"
        help = f"launch stop {shlex.quote(original)}, or launch attach; "
        help += "launch check judges the copy"
        raise not_ready("run-is-a-copy", message, help, file=str(folder.path))
    finding = check_known_state(folder, processes)
    if finding is not None:
        raise NotReady(finding)
