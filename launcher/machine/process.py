"""Which processes belong to a run, and whether they still live: `Identity`, from Linux's /proc.

A process is known by its number, the time it began and the boot it belongs to: a number alone is
reused. torchrun puts every worker into a session of its own
(torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py::SubprocessHandler._popen[start_new_session]),
so the group of the process that was started is not all of a run: a variable in the environment, inherited by every
descendant, marks the rest.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from launcher.machine import codec
from launcher.machine.codec import Misfit, Positive

PROC = Path("/proc")
LARGEST_PID = 2**22  # PID_MAX_LIMIT of the kernel
MARK = "LAUNCH_RUN"  # the environment variable that holds the run folder in every process of a run
Handler = Callable[[int, FrameType | None], object]  # what is called with the number of a signal


def ignore(_number: int, _frame: FrameType | None) -> None:
    """A signal is let pass here, and not by the processes that are started, as SIG_IGN would be."""


@contextlib.contextmanager
def handling(handlers: Mapping[Any, Handler | signal.Handlers]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process, not another with its number; `began` in clock ticks since `boot`, `namespace` an inode."""

    pid: Positive
    host: str
    boot: str | None
    began: int | None
    namespace: int | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def lives(self) -> bool:
        """Whether exactly this process runs on this machine now; a zombie does not."""
        if not self.here():
            return False
        entry = _entry(self.pid)
        return entry is not None and entry.began == self.began and not entry.dead

    def here(self) -> bool:
        """Whether it was started on this machine since it booted, and in this PID namespace."""
        same = self.namespace is None or self.namespace == namespace()
        return self.host == host() and self.boot == boot() and same

    def elsewhere(self) -> bool:
        """Whether it may live where this process cannot look: on another host, or in another container."""
        return not self.here() and (self.host != host() or self.boot == boot())

    @property
    def place(self) -> str:
        inside = "" if self.namespace is None else f" in PID namespace {self.namespace}"
        return f"{self.host}, pid {self.pid}{inside if self.elsewhere() else ''}"


class _ProcessRow(NamedTuple):
    pid: int
    state: bytes
    parent: int
    group: int
    session: int
    began: int

    @property
    def dead(self) -> bool:
        return self.state in b"ZX"


def identify(pid: int) -> Identity:
    entry = _entry(pid)
    return Identity(pid=pid, host=host(), boot=boot(), began=entry and entry.began, namespace=namespace())


def identity(data: object) -> Identity | None:
    """What `as_json` wrote; None where it is incomplete."""
    try:
        named = codec.read(Identity, data)
    except Misfit:
        return None
    return named if named.pid <= LARGEST_PID else None


def hold_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed: else a lock or a pipe gets their number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def host() -> str:
    return os.uname().nodename


def boot() -> str | None:
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return None


def namespace() -> int | None:
    with contextlib.suppress(OSError):
        return (PROC / "self/ns/pid").stat().st_ino
    return None


@dataclass(slots=True)
class Family:
    """The processes of a run: leader, its session, whoever bears the mark, and the descendants of all these.

    Of a `keeper` that adopts orphans these too, but not itself. One that was found once is known from then on,
    though it has no environment, a session of its own, and no parent any more.
    """

    leader: Identity | None
    mark: str
    keeper: Identity | None = None
    known: dict[int, int] = field(default_factory=dict)

    def living(self) -> frozenset[int]:
        """Those that live now; never this process or one above it."""
        table = _table()
        leader, keeper = (
            one.pid if one is not None and _is(table, one.pid, one.began) else None
            for one in (self.leader, self.keeper)
        )
        members = {pid for pid, began in self.known.items() if _is(table, pid, began)}
        members |= {
            entry.pid
            for entry in table.values()
            if (leader is not None and leader in (entry.pid, entry.session, entry.group))
            or (keeper is not None and entry.parent == keeper)
            or _mark(entry.pid) == self.mark
        }
        while grown := {e.pid for e in table.values() if e.parent in members} - members:
            members |= grown
        members -= {*_upwards(table, os.getpid()), keeper}
        found = frozenset(pid for pid in members if not table[pid].dead)
        self.known = {pid: table[pid].began for pid in found}
        return found


def _is(table: Mapping[int, _ProcessRow], pid: int, began: int | None) -> bool:
    return pid in table and table[pid].began == began


def adopt_orphans() -> None:
    """Have what descends from this process stay so, when its parent ends (PR_SET_CHILD_SUBREAPER)."""
    import ctypes

    # whoever loses its parent and its environment is else not to be told from a stranger's process
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphans inside, and outside only if this process did before."""
    import ctypes

    before = ctypes.c_int(1)
    with contextlib.suppress(OSError, AttributeError):
        # PR_GET_CHILD_SUBREAPER
        ctypes.CDLL(None).prctl(37, ctypes.byref(before), 0, 0, 0)
    adopt_orphans()
    try:
        yield
    finally:
        if not before.value:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def over(pid: int) -> bool:
    """Whether a child has ended; it is left as a zombie, so that nobody else gets its number meanwhile."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def bury(but: int) -> None:
    """Take the exit codes of children that were adopted, up to that of one's own child `but`."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (gone := os.waitid(os.P_ALL, 0, options)) is not None and gone.si_pid != but:
        os.waitpid(gone.si_pid, 0)


def descendants(pid: int) -> frozenset[int]:
    """The living processes below one, as far as their parents live."""
    table = _table()
    below: set[int] = set()
    grown = {pid}
    while grown:
        grown = {entry.pid for entry in table.values() if entry.parent in grown and not entry.dead}
        below |= grown
    return frozenset(below)


def has_variable(pid: int, name: str) -> bool:
    """Whether a process was started with a variable in its environment; False where that cannot be read."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return any(word.startswith(os.fsencode(f"{name}=")) for word in environment.split(b"\0"))


def marks() -> frozenset[str]:
    return frozenset(filter(None, (_mark(entry.pid) for entry in _table().values() if not entry.dead)))


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _table() -> dict[int, _ProcessRow]:
    entries = (_entry(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {entry.pid: entry for entry in entries if entry is not None}


def _entry(pid: int) -> _ProcessRow | None:
    try:
        raw = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # the command, in brackets, may hold blanks and brackets itself
    fields = raw[raw.rindex(b")") + 2 :].split()
    parent, group, session, began = (int(fields[at]) for at in (1, 2, 3, 19))
    return _ProcessRow(pid, fields[0], parent, group, session, began)


def _mark(pid: int) -> str | None:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    prefix = os.fsencode(f"{MARK}=")
    found = (word for word in environment.split(b"\0") if word.startswith(prefix))
    return next((os.fsdecode(word[len(prefix) :]) for word in found), None)


def mark_of(pid: int) -> str | None:
    """The run folder that a process was started for; None where it has none, or that cannot be read."""
    return _mark(pid)


def command_of(pid: int) -> list[str]:
    """The words of a process; none where they cannot be read."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(raw).split("\0")


def _upwards(table: Mapping[int, _ProcessRow], pid: int) -> Iterable[int]:
    while pid in table:
        yield pid
        pid = table[pid].parent
