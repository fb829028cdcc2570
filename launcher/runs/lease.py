"""Who trains into an output folder -> `Lease`: a file in that folder with an owner, a number and a heartbeat.

A run folder can vanish, a home or a host can be another one, and /proc shows one PID namespace: all who
could train into a folder share that folder alone. Each start that gets it creates `lease-N.json`, N one
above the last, which a file system lets only one process do. Its supervisor touches that file every few
seconds, and stops its training once another lease is in force: N is a fencing number. Beside it lies
`run-N.json`, the manifest of that start: what a resume has to know outlives the run folder.

The files are where huggingface_hub never uploads from (DEFAULT_IGNORE_PATTERNS in its utils/_paths.py):
the names of hosts are not for the model's page.
"""

import contextlib
import json
import os
import re
import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import Finding, NotReady, launch_finding, not_ready
from launcher.machine import locks, process
from launcher.machine.process import Identity
from launcher.runs import rundir
from launcher.runs.record import Manifest, Record

FOLDER = Path(".cache", "huggingface", "launch")  # below the output folder
BEAT_S = 5.0  # seconds between two heartbeats
SILENT_S = 60.0  # seconds without a heartbeat after which an owner on another machine has lost its lease
_MODE = 0o644  # who shares the folder reads whose it is; nobody else writes it, whatever the umask
_NAME = re.compile(r"lease-([1-9][0-9]*)\.json\Z", re.ASCII)
LARGEST_FENCE = 10**9  # starts into one folder; a higher number is nobody's
_LARGEST = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`run` is the folder of the run that has it, `state` running or how that ended, with exit `code`."""

    path: Path
    run: str = ""
    owner: Identity | None = None
    state: str = "running"
    code: int | None = None
    beaten: float = 0.0

    @property
    def fence(self) -> int:
        return int(self.path.stem.partition("-")[2])

    @property
    def manifest(self) -> Path:
        return self.path.with_name(f"run-{self.fence}.json")

    @property
    def lock(self) -> Path:
        return self.path.with_name("lock")

    @property
    def in_force(self) -> bool:
        """Whether a run took the folder with it: it lives, or left its manifest, and nobody else wrote the lease."""
        if not self.run or self.owner is None or self.fence > LARGEST_FENCE or not self._is_ours():
            return False
        if Manifest(rundir.read_json(self.manifest)).stage is not None:
            return True
        return self.owner.lives() if self.owner.here() else self.beats()

    def _is_ours(self) -> bool:
        """Whether it is a file, no link, of this user, of root, or of whose folder this is, and theirs alone."""
        try:
            status, folder = self.path.lstat(), self.path.parent.stat()
        except OSError:
            return False
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        owners = (os.geteuid(), 0, folder.st_uid)
        return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not others

    @property
    def described(self) -> str:
        owner = "an unknown host" if self.owner is None else self.owner.place
        return f"started on {owner}"

    def silence(self) -> float | None:
        """Seconds since the last heartbeat by the file system's clock: those of two machines are never compared."""
        import tempfile

        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.path.parent) as probe:
            # a clock that was set back leaves the last heartbeat in the future
            return abs(os.fstat(probe.fileno()).st_mtime - self.beaten)
        return None

    def beats(self) -> bool:
        silence = self.silence() if self.state == "running" else None
        return silence is not None and silence < SILENT_S

    def write(self) -> None:
        content = {name: getattr(self, name) for name in ("run", "state")}
        content |= {"returncode": self.code, "owner": self.owner and self.owner.as_json()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(self.path, json.dumps(content, indent=1).encode(), durable=True, mode=_MODE)

    def give_back(self) -> None:
        """Discard it, unless a keeper has taken it over."""
        last = read(self.path)
        if last is not None and last.owner == self.owner:
            self.discard()

    def discard(self) -> None:
        folder = self.path.parent
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.manifest.unlink(missing_ok=True)
            if not _fences(folder):
                self.lock.unlink(missing_ok=True)
                for empty in (folder, *folder.parents[: len(FOLDER.parts) - 1]):
                    empty.rmdir()


def read(path: Path) -> Lease | None:
    """A lease; None where there is none. One that cannot be read has no known owner."""
    try:
        # NFS asks its server for the times of a file when that is opened
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            raw = file.read(_LARGEST) if stat.S_ISREG(status.st_mode) else b""
    except OSError:
        return None
    content = Record(rundir.parse_line(raw))
    return Lease(
        path=path,
        run=content.text("run") or "",
        beaten=status.st_mtime,
        owner=process.identity(content.part("owner")),
        state=content.text("state") or "running",
        code=content.number("returncode"),
    )


def newest(output: Path | None) -> Lease | None:
    """The lease that is, or was last, in force for an output folder."""
    fences = [] if output is None else _fences(output / FOLDER)
    return read(output / FOLDER / f"lease-{fences[-1]}.json") if output and fences else None


def all_of(output: Path) -> list[Lease]:
    """Every lease of an output folder that can be read, the oldest first."""
    folder = output / FOLDER
    leases = []
    for fence in _fences(folder):
        granted = read(folder / f"lease-{fence}.json")
        if granted is not None:
            leases.append(granted)
    return leases


def manifests(output: Path | None) -> list[Manifest]:
    folder = Path() if output is None else output / FOLDER
    found = [rundir.read_json(folder / f"run-{n}.json") for n in (_fences(folder) if output else ())]
    return [Manifest(one) for one in found if one]


def _fences(folder: Path) -> list[int]:
    return sorted(int(match[1]) for name in files.names(folder) if (match := _NAME.match(name)))


def require_free(output: Path | None) -> int:
    """The number of a lease that begins now. Raises NotReady where somebody trains, or may train, into this folder.

    Also where something else lies in the place of a lease, or of its folder.
    """
    if output is not None:
        _require_no_obstacle(output)
    last = newest(output)
    if output is None or last is None:
        return 1
    if last.fence >= LARGEST_FENCE:
        message = f"{last.path.name} has the highest number that a lease can have, and no run takes that many starts"
        help = f"delete it: rm {shlex.quote(str(last.path))}"
        raise not_ready("bad-lease", message, help, file=str(last.path))
    # not the newest alone: a file that is no lease may lie above that of a run
    for fence in reversed(_fences(output / FOLDER)):
        lease = read(output / FOLDER / f"lease-{fence}.json")
        if lease is not None and (why := held(lease)) is not None:
            raise NotReady(_taken(lease, str(output), why))
    return last.fence + 1


def overtaking(mine: Lease) -> Lease | None:
    """The lease that is in force in the place of an older one; None where none is."""
    for fence in reversed(_fences(mine.path.parent)):
        if fence <= mine.fence:
            return None
        lease = read(mine.path.with_name(f"lease-{fence}.json"))
        if lease is not None and lease.owner != mine.owner and lease.in_force:
            return lease
    return None


def _require_no_obstacle(output: Path) -> None:
    """Raise NotReady where a lease could be neither read nor made: what is in the way, and what to do about it."""
    folder = output / FOLDER
    for path in (*reversed(folder.parents), folder):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise _obstacle(output, path, "a folder")
    leases = [folder / f"lease-{fence}.json" for fence in _fences(folder)]
    for path in (*leases, folder / "lock"):
        # anything else counts as a lease that cannot be read, until it is silent for long enough
        if os.path.islink(path) or os.path.isdir(path):
            raise _obstacle(output, path, "a file")


def _obstacle(output: Path, path: Path, needed: str) -> NotReady:
    kind = "is something else"
    if os.path.isdir(path):
        kind = "is a folder"
    elif os.path.isfile(path) and not os.path.islink(path):
        kind = "is a file"
    elif os.path.islink(path):
        kind = f"is a link to {os.readlink(path)}"
        if not os.path.exists(path):
            kind += ", which leads nowhere"
    message = f"{output} cannot be reserved for this run: {path} {kind}, and must be {needed}"
    command = "rm -r" if os.path.isdir(path) and not os.path.islink(path) else "rm"
    help = f"delete it ({command} {shlex.quote(str(path))}), or choose another output_dir"
    if path == output or path in output.parents:
        help = f"choose another output_dir, or put {needed} there"
    return not_ready("bad-lease", message, help, file=str(path))


def outlast(output: Path, run: Path) -> None:
    """Wait until the lease of an earlier attempt of this run counts no more: its job came back on another machine."""
    until = time.monotonic() + SILENT_S + BEAT_S
    while time.monotonic() < until:
        last = newest(output)
        if last is None or last.run != str(run) or held(last) is None:
            return
        time.sleep(1)


def held(last: Lease) -> str | None:
    """Why a lease still counts, in words; None where its owner is known to be gone."""
    if last.state != "running":
        return None
    owner, silence = last.owner, last.silence()
    why = "" if silence is None else f", last heartbeat {silence:.0f} s ago"
    if owner is not None and owner.lives():
        return why
    if last.run in process.marks() or is_locked(last.lock):
        gone = owner is not None and owner.here()
        return why + ("; its supervisor is gone, and its training continues" if gone else "")
    if owner is not None and owner.here():
        return None
    if silence is None:
        return "; its heartbeat cannot be judged, as the folder is not writable"
    # the machine was started anew since, or nobody here can look
    gone = owner is not None and not owner.elsewhere()
    allowed = 3 * BEAT_S if gone else SILENT_S
    return None if silence >= allowed else f"{why} (without one for {allowed:.0f} s it is free)"


def is_locked(lock_file: Path) -> bool:
    try:
        lock = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return locks.locked(lock, shared=True) is False
    finally:
        os.close(lock)


def _taken(last: Lease, output: str, why: str) -> Finding:
    name = Path(last.run).name or "another run"
    there = " there" if last.owner is not None and last.owner.elsewhere() else ""
    stop = f"launch stop {name}"
    if last.owner is not None and not os.path.isdir(last.run):
        stop = f"its run folder is gone: kill {last.owner.pid}"
    message = f"the run {name} trains into {output}: {last.described}{why}"
    help = f"wait for it, stop it{there} ({stop}), or choose another output_dir"
    return launch_finding("error", "run-is-live", message, help, file=last.run or str(last.path))


def take(output: Path, run: Path) -> Lease:
    """Take the lease of an output folder. Raises NotReady where another has it, or the folder cannot be written."""
    # the one above what was found free: whoever else found the same wants the same file
    path = output / FOLDER / f"lease-{require_free(output)}.json"
    lease = Lease(path=path, run=str(run), owner=process.identify(os.getpid()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
        lease.write()
    except FileExistsError:
        # another start was quicker by a moment
        raise NotReady(_taken(read(path) or Lease(path=path), str(output), "")) from None
    except OSError as error:
        message = f"the output folder cannot be written: {error.strerror}"
        help = "choose another output_dir"
        raise not_ready("not-writable", message, help, file=str(output)) from None
    return lease


@contextlib.contextmanager
def kept(granted: Lease | None, overtaken: Callable[[Lease], None]) -> Iterator[Callable[[str, int], None]]:
    """Keep a lease for this process, with a heartbeat of another thread's: whatever this one waits for.

    Yields what says how the run ended; a NotReady says that nothing was trained: the lease is given back.
    `overtaken` is called once, with the lease that is in force instead.
    """
    if granted is None:
        yield lambda _state, _code: None
        return
    mine, over = replace(granted, owner=process.identify(os.getpid())), threading.Event()
    # a full disk must not cost the run
    with contextlib.suppress(OSError):
        mine.write()
    threading.Thread(target=_beat, args=(mine, over, overtaken), daemon=True).start()

    def end(state: str, code: int) -> None:
        over.set()
        with contextlib.suppress(OSError):
            replace(mine, state=state, code=code).write()

    try:
        yield end
    except NotReady:
        over.set()
        mine.discard()
        raise


def _beat(mine: Lease, over: threading.Event, overtaken: Callable[[Lease], None]) -> None:
    manifest = rundir.read_json(mine.manifest)
    while not over.wait(BEAT_S):
        newer = overtaking(mine)
        if newer is not None:
            overtaken(newer)
            return
        with contextlib.suppress(OSError):
            if not mine.path.exists():
                # somebody tidied the folder
                mine.write()
                files.write_json(mine.manifest, manifest)
            os.utime(mine.path)


def keep_manifest(lease: Lease, manifest: Mapping[str, Any]) -> None:
    """Keep the manifest of a start beside its lease; a full disk costs a comparison later, not the start."""
    with contextlib.suppress(OSError):
        files.write_json(lease.manifest, manifest)
