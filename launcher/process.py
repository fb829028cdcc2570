"""Which processes belong to a run, and whether they still live: `Identity`, from Linux's /proc.

A process is known by its number, the time it began and the boot it belongs to: a number alone is
reused. torchrun puts every worker into a session of its own (subprocess_handler.py:66), so the group
of the process that was started is not all of a run: a variable in the environment, inherited by
every descendant, marks the rest. Where there is no /proc, the number and the group have to do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

PROC = Path("/proc")
MARK = "LAUNCH_RUN"
"""The environment variable that holds the run folder in every process of a run."""

Handler = Callable[[int, FrameType | None], object]
"""What is called with the number of a signal."""


@contextlib.contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Other signal handlers inside; those from before are put back."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process, not to be taken for another that got its number later.

    `began` is in clock ticks since `boot`; both are None where there is no /proc.
    """

    pid: int
    host: str
    boot: str | None
    began: int | None

    def as_json(self) -> dict[str, object]:
        """What `process.json` keeps."""
        return asdict(self)

    def lives(self) -> bool:
        """Whether exactly this process runs on this machine now; a zombie does not."""
        if not self.here():
            return False
        if self.began is None:
            return _answers(self.pid)
        entry = _entry(self.pid)
        return entry is not None and entry.began == self.began and not entry.dead

    def here(self) -> bool:
        """Whether it was started on this machine, since it booted."""
        return self.host == host() and self.boot == boot()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of /proc/PID/stat."""

    pid: int
    dead: bool
    parent: int
    group: int
    session: int
    began: int


def identify(pid: int) -> Identity:
    """The identity of a process that is known to be the one meant now."""
    entry = _entry(pid)
    began = None if entry is None else entry.began
    return Identity(pid=pid, host=host(), boot=boot(), began=began)


def identity(data: Mapping[str, object]) -> Identity | None:
    """What `as_json` wrote; None where it is incomplete."""
    pid, began = data.get("pid"), data.get("began")
    if not isinstance(pid, int) or pid <= 0:
        return None
    read = str(data["boot"]) if isinstance(data.get("boot"), str) else None
    return Identity(
        pid=pid, host=str(data.get("host")), boot=read, began=began if isinstance(began, int) else None
    )  # fmt: skip


def hold_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed: else a lock or a pipe gets their number,
    and a process that is started finds /dev/null in its place."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def host() -> str:
    """The name of this machine."""
    return os.uname().nodename


def boot() -> str | None:
    """The id of this boot of the machine."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return None


def family(leader: int | None, mark: str) -> frozenset[int]:
    """The living processes of a run: the leader, its session, its descendants, whoever bears the mark.

    `leader` may be given only while its number cannot have been reused. Never this process or one
    above it.
    """
    table = _table()
    members = {
        entry.pid
        for entry in table.values()
        if (leader is not None and leader in (entry.pid, entry.session, entry.group))
        or _mark(entry.pid) == mark
    }
    while grown := {e.pid for e in table.values() if e.parent in members} - members:
        members |= grown
    ours = set(_upwards(table, os.getpid()))
    return frozenset(pid for pid in members - ours if not table[pid].dead)


def marks() -> frozenset[str]:
    """The marks of all living processes: which runs still have one."""
    found = (_mark(entry.pid) for entry in _table().values() if not entry.dead)
    return frozenset(mark for mark in found if mark is not None)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each; one that has gone meanwhile is nothing to speak of."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _table() -> dict[int, _Entry]:
    names = [name for name in os.listdir(PROC) if name.isdigit()] if PROC.is_dir() else []
    entries = (_entry(int(name)) for name in names)
    return {entry.pid: entry for entry in entries if entry is not None}


def _entry(pid: int) -> _Entry | None:
    try:
        raw = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # the command, in brackets, may hold blanks and brackets itself
    fields = raw[raw.rindex(b")") + 2 :].split()
    return _Entry(
        pid=pid, dead=fields[0] in (b"Z", b"X"), parent=int(fields[1]), group=int(fields[2]),
        session=int(fields[3]), began=int(fields[19]),
    )  # fmt: skip


def _mark(pid: int) -> str | None:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    prefix = os.fsencode(f"{MARK}=")
    found = (word for word in environment.split(b"\0") if word.startswith(prefix))
    return next((os.fsdecode(word[len(prefix) :]) for word in found), None)


def _upwards(table: Mapping[int, _Entry], pid: int) -> Iterable[int]:
    while pid in table:
        yield pid
        pid = table[pid].parent


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
