"""Which processes belong to a run, and which of them live -> `Identity`, `ProcessTree`.

A process is identified by its number, its start and the boot: numbers are reused. torchrun puts
every worker into a session of its own
(torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py::SubprocessHandler._popen[start_new_session]),
so the process group of the started process is not all of a run: a variable in the environment,
which every descendant inherits, marks the others.

This reads /proc and not psutil: its `create_time` moves when the clock of the machine is set, and
it knows neither sessions nor the descendants of several processes in one pass.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, field
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Misfit, Positive

PROC = Path("/proc")
LARGEST_PID = 2**22  # PID_MAX_LIMIT of the kernel
MARK = "LAUNCH_RUN"  # the variable that holds the run folder in every process of a run
Handler = Callable[[int, FrameType | None], object]  # called with the number of a signal
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """A handler that does nothing. Started processes do not inherit it, as they would SIG_IGN."""


@contextlib.contextmanager
def install_handlers(handlers: Mapping[Any, Handler | signal.Handlers]) -> Iterator[None]:
    """Install handlers, and restore those before at the end."""
    before = {}
    for number, handler in handlers.items():
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process. `began` is in clock ticks since `boot`, `namespace` the inode of its PIDs."""

    pid: Positive
    host: str
    boot: str | None
    began: int | None
    namespace: int | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def is_alive(self) -> bool:
        """Whether exactly this process runs on this machine now; a zombie does not."""
        if not self.is_local():
            return False
        row = _read_row(self.pid)
        return row is not None and row.began == self.began and not row.is_dead

    def is_local(self) -> bool:
        """Whether it was started on this machine since it booted, and in this PID namespace."""
        if self.namespace not in (None, _read_namespace()):
            return False
        return self._is_of_this_boot()

    def is_remote(self) -> bool:
        """Whether it may live out of sight: on another host, or in another container."""
        if self.host == _read_host() and not self._is_of_this_boot():
            # the machine has rebooted since
            return False
        return not self.is_local()

    def _is_of_this_boot(self) -> bool:
        return self.host == _read_host() and self.boot == _read_boot()

    @property
    def place(self) -> str:
        place = f"{self.host}, pid {self.pid}"
        if self.namespace is not None and self.is_remote():
            place += f" in PID namespace {self.namespace}"
        return place


def identify(pid: int) -> Identity:
    row = _read_row(pid)
    began = None
    if row is not None:
        began = row.began
    return Identity(
        pid=pid, host=_read_host(), boot=_read_boot(), began=began, namespace=_read_namespace()
    )


def parse_identity(content: object) -> Identity | None:
    """A process as `Identity.as_json` describes it; None if that is damaged."""
    try:
        identity = codec.read_record(Identity, content)
    except Misfit:
        return None
    if identity.pid > LARGEST_PID:
        return None
    return identity


def hold_standard_streams() -> None:
    """Open those of stdin, stdout, stderr that are closed: a lock would get their number."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _read_host() -> str:
    return os.uname().nodename


def _read_boot() -> str | None:
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return None


def _read_namespace() -> int | None:
    with contextlib.suppress(OSError):
        return (PROC / "self/ns/pid").stat().st_ino
    return None


@dataclass(frozen=True, slots=True)
class _ProcessRow:
    """A process in /proc, see proc(5), `stat`. `began` is in clock ticks since boot."""

    pid: int
    state: bytes
    parent: int
    group: int
    session: int
    began: int

    @property
    def is_dead(self) -> bool:
        return self.state in b"ZX"


def _read_row(pid: int) -> _ProcessRow | None:
    try:
        raw = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # after the name of the command, in brackets, which may hold blanks and brackets itself
    fields = raw[raw.rindex(b")") + 2 :].split()
    return _ProcessRow(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        began=int(fields[19]),
    )


def _read_table() -> dict[int, _ProcessRow]:
    table = {}
    for name in os.listdir(PROC):
        if not name.isdigit():
            continue
        row = _read_row(int(name))
        if row is not None:
            table[row.pid] = row
    return table


@dataclass(slots=True)
class ProcessTree:
    """The processes of a run: leader, its session, those with the mark, descendants of all these.

    If a `supervisor` is given, which adopts orphans, its children too, but not itself. A process
    that was seen once stays a member, even without environment and parent in a session of its own.
    """

    leader: Identity | None
    mark: str
    supervisor: Identity | None = None
    seen: dict[int, int] = field(default_factory=dict)  # pid -> start

    def living(self) -> frozenset[int]:
        """Those that live now; never this process or one above it."""
        table = _read_table()
        leader = _find_pid(table, self.leader)
        supervisor = _find_pid(table, self.supervisor)
        members = set[int]()
        for row in table.values():
            was_seen = self.seen.get(row.pid) == row.began
            of_leader = leader is not None and leader in (row.pid, row.session, row.group)
            adopted = supervisor is not None and row.parent == supervisor
            if was_seen or of_leader or adopted or run_mark(row.pid) == self.mark:
                members.add(row.pid)
        members |= _find_descendants(table, members)
        members -= set(_find_ancestors(table, os.getpid()))
        members.discard(supervisor or 0)
        self.seen = {}
        for pid in members:
            row = table[pid]
            if not row.is_dead:
                self.seen[pid] = row.began
        return frozenset(self.seen)


def _find_pid(table: Mapping[int, _ProcessRow], identity: Identity | None) -> int | None:
    """The number of a process if it is in the table, and not another with its number."""
    if identity is None:
        return None
    row = table.get(identity.pid)
    if row is None or row.began != identity.began:
        return None
    return row.pid


def _find_descendants(table: Mapping[int, _ProcessRow], pids: Iterable[int]) -> set[int]:
    descendants = set[int]()
    generation = set(pids)
    while generation:
        children = {row.pid for row in table.values() if row.parent in generation}
        generation = children - descendants
        descendants |= generation
    return descendants


def _find_ancestors(table: Mapping[int, _ProcessRow], pid: int) -> Iterator[int]:
    """A process and those above it."""
    while pid in table:
        yield pid
        pid = table[pid].parent


def find_descendants(pid: int) -> frozenset[int]:
    """The living processes below one, as far as their parents live."""
    living = {row.pid: row for row in _read_table().values() if not row.is_dead}
    return frozenset(_find_descendants(living, [pid]))


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parent ends.

    Without parent and environment, they could not be told from a stranger's processes.
    """
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphans inside, and afterwards only if this process did before."""
    import ctypes

    adopted_before = ctypes.c_int(1)
    _call_prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopted_before))
    adopt_orphans()
    try:
        yield
    finally:
        if not adopted_before.value:
            _call_prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _call_prctl(option: int, argument: object) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def has_exited(pid: int) -> bool:
    """Whether a child has ended. It stays a zombie, so that its number is not reused meanwhile."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_except(child: int) -> None:
    """Reap adopted children that have ended, up to one's own `child`."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    ended = os.waitid(os.P_ALL, 0, options)
    while ended is not None and ended.si_pid != child:
        os.waitpid(ended.si_pid, 0)
        ended = os.waitid(os.P_ALL, 0, options)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def find_live_marks() -> frozenset[str]:
    """The run folders that living processes were started for."""
    marks = set[str]()
    for row in _read_table().values():
        mark = None
        if not row.is_dead:
            mark = run_mark(row.pid)
        if mark:
            marks.add(mark)
    return frozenset(marks)


def run_mark(pid: int) -> str | None:
    """The run folder that a process was started for; None without one, or if unreadable."""
    return read_variable(pid, MARK)


def read_variable(pid: int, name: str) -> str | None:
    """A variable in the environment that a process was started with; None if unreadable."""
    prefix = os.fsencode(f"{name}=")
    for word in _read_words(pid, "environ"):
        if word.startswith(prefix):
            return os.fsdecode(word.removeprefix(prefix))
    return None


def read_command_line(pid: int) -> list[str]:
    """The words of a process; none if they cannot be read."""
    words = [os.fsdecode(word) for word in _read_words(pid, "cmdline")]
    if not any(words):
        return []
    return words


def _read_words(pid: int, name: str) -> list[bytes]:
    try:
        return (PROC / str(pid) / name).read_bytes().split(b"\0")
    except OSError:
        return []
