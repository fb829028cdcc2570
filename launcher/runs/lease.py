"""Who trains into an output folder -> `Lease`: a file there with an owner, a number, a heartbeat.

A run folder can be removed, homes and hosts differ, and /proc shows one PID namespace: the output
folder is all that every possible trainer shares. Each start that gets it creates `lease-N.json`, N
one above the last; a file system lets only one process do that. Its supervisor touches the file
every few seconds, and stops its training once another lease is in force: N is a fencing token.
Beside it lies `run-N.json`, the manifest of that start, so that a resume can be compared without
the run folder.

The files are in a folder that huggingface_hub never uploads (DEFAULT_IGNORE_PATTERNS in its
utils/_paths.py): the names of hosts do not belong on the model's page.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.config.durations import format_age
from launcher.errors import Finding, NotReady, launch_finding, not_ready
from launcher.lazy_dataclass import dataclass
from launcher.machine import locks, process
from launcher.machine.process import Identity
from launcher.runs import rundir
from launcher.runs.record import Manifest, Record

FOLDER = Path(".cache", "huggingface", "launch")  # below the output folder
BEAT_S = 5.0  # seconds between heartbeats
SILENT_S = (
    60.0  # seconds without a heartbeat after which an owner on another machine loses its lease
)
_MODE = 0o644  # all who share the folder read it, only its owner writes it, whatever the umask
_NAME = re.compile(r"lease-([1-9][0-9]*)\.json\Z", re.ASCII)
LARGEST_FENCE = 10**9  # starts into one folder; a higher number is nobody's
_MAX_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease of the run folder `run`.

    `state` is running, or how the run ended, with exit `code`. `last_beat` is in seconds since the
    epoch, by the clock of the file system.
    """

    path: Path
    run: str = ""
    owner: Identity | None = None
    state: str = "running"
    code: int | None = None
    last_beat: float = 0.0

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
    def is_in_force(self) -> bool:
        """Whether a run took the folder with it: it lives, or left its manifest.

        A file that somebody else may have written is not in force.
        """
        if not self.run or self.owner is None or self.fence > LARGEST_FENCE:
            return False
        if not self._is_trusted():
            return False
        if Manifest(rundir.read_json(self.manifest)).stage is not None:
            return True
        if self.owner.is_local():
            return self.owner.is_alive()
        return self.is_beating()

    def _is_trusted(self) -> bool:
        """Whether only this user, root or the owner of the folder can have written the file."""
        try:
            status = self.path.lstat()
            folder_owner = self.path.parent.stat().st_uid
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        return status.st_uid in (os.geteuid(), 0, folder_owner)

    @property
    def description(self) -> str:
        if self.owner is None:
            return "started on an unknown host"
        return f"started on {self.owner.place}"

    def silence_s(self) -> float | None:
        """Seconds since the last heartbeat; None if the folder is not writable.

        Both times are by the clock of the file system: the clocks of two machines may differ.
        """
        import tempfile

        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.path.parent) as probe:
            # after a clock is set back, the last heartbeat is in the future
            return abs(os.fstat(probe.fileno()).st_mtime - self.last_beat)
        return None

    def is_beating(self) -> bool:
        if self.state != "running":
            return False
        silence_s = self.silence_s()
        return silence_s is not None and silence_s < SILENT_S

    def write(self) -> None:
        owner = None
        if self.owner is not None:
            owner = self.owner.as_json()
        content = {"run": self.run, "state": self.state, "returncode": self.code, "owner": owner}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1)
        files.write_bytes(self.path, text.encode(), durable=True, mode=_MODE)

    def release(self) -> None:
        """Delete it, unless a supervisor has taken it over."""
        current = read_lease(self.path)
        if current is not None and current.owner == self.owner:
            self.delete()

    def delete(self) -> None:
        folder = self.path.parent
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.manifest.unlink(missing_ok=True)
            if not _read_fences(folder):
                self.lock.unlink(missing_ok=True)
                for empty in (folder, *folder.parents[: len(FOLDER.parts) - 1]):
                    empty.rmdir()


def read_lease(path: Path) -> Lease | None:
    """A lease; None if there is none. An unreadable one has no known owner."""
    try:
        # opening makes NFS ask its server for the times of a file
        with open(path, "rb", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            raw = b""
            if stat.S_ISREG(status.st_mode):
                raw = file.read(_MAX_BYTES)
    except OSError:
        return None
    content = Record(rundir.parse_line(raw))
    return Lease(
        path=path,
        run=content.text("run") or "",
        last_beat=status.st_mtime,
        owner=process.parse_identity(content.part("owner")),
        state=content.text("state") or "running",
        code=content.number("returncode"),
    )


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def find_newest_lease(output: Path | None) -> Lease | None:
    """The lease that is, or was last, in force for an output folder."""
    if output is None:
        return None
    fences = _read_fences(output / FOLDER)
    if not fences:
        return None
    return read_lease(_locate_lease(output, fences[-1]))


def list_leases(output: Path) -> list[Lease]:
    """Every readable lease of an output folder, oldest first."""
    leases = []
    for fence in _read_fences(output / FOLDER):
        lease = read_lease(_locate_lease(output, fence))
        if lease is not None:
            leases.append(lease)
    return leases


def read_manifests(output: Path | None) -> list[Manifest]:
    """The manifests that the starts into an output folder left there, oldest first."""
    if output is None:
        return []
    manifests = []
    for fence in _read_fences(output / FOLDER):
        content = rundir.read_json(output / FOLDER / f"run-{fence}.json")
        if content:
            manifests.append(Manifest(content))
    return manifests


def _locate_lease(output: Path, fence: int) -> Path:
    return output / FOLDER / f"lease-{fence}.json"


def _read_fences(folder: Path) -> list[int]:
    fences = []
    for name in files.list_names(folder):
        match = _NAME.match(name)
        if match is not None:
            fences.append(int(match[1]))
    return sorted(fences)


def require_free(output: Path | None) -> int:
    """The number of the next lease. Raises NotReady if somebody trains, or may train, there.

    Also if something else lies where a lease or its folder belongs.
    """
    if output is None:
        return 1
    _require_no_obstacle(output)
    newest = find_newest_lease(output)
    if newest is None:
        return 1
    if newest.fence >= LARGEST_FENCE:
        message = f"{newest.path.name} has the highest number that a lease can have, "
        message += "and no run takes that many starts"
        help = f"delete it: rm {shlex.quote(str(newest.path))}"
        raise not_ready("bad-lease", message, help, file=str(newest.path))
    # all of them: a file that is no lease may have a higher number than that of a run
    for lease in reversed(list_leases(output)):
        reason = explain_hold(lease)
        if reason is not None:
            raise NotReady(_report_held(lease, str(output), reason))
    return newest.fence + 1


def find_successor(own: Lease) -> Lease | None:
    """A newer lease of another owner that is in force; None if there is none."""
    for fence in reversed(_read_fences(own.path.parent)):
        if fence <= own.fence:
            return None
        lease = read_lease(own.path.with_name(f"lease-{fence}.json"))
        if lease is not None and lease.owner != own.owner and lease.is_in_force:
            return lease
    return None


def _require_no_obstacle(output: Path) -> None:
    """Raise NotReady if a lease could be neither read nor made."""
    folder = output / FOLDER
    for path in (*reversed(folder.parents), folder):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise _report_obstacle(output, path, "a folder")
    must_be_files = [folder / "lock"]
    for fence in _read_fences(folder):
        must_be_files.append(_locate_lease(output, fence))
    for path in must_be_files:
        # any other kind counts as an unreadable lease until it has been silent for long enough
        if os.path.islink(path) or os.path.isdir(path):
            raise _report_obstacle(output, path, "a file")


def _report_obstacle(output: Path, path: Path, needed: str) -> NotReady:
    message = f"{output} cannot be reserved for this run: {path} {_describe_kind(path)}, "
    message += f"and must be {needed}"
    remove = "rm"
    if os.path.isdir(path) and not os.path.islink(path):
        remove = "rm -r"
    help = f"delete it ({remove} {shlex.quote(str(path))}), or choose another output_dir"
    if path == output or path in output.parents:
        help = f"choose another output_dir, or put {needed} there"
    return not_ready("bad-lease", message, help, file=str(path))


def _describe_kind(path: Path) -> str:
    if os.path.isdir(path):
        return "is a folder"
    if os.path.islink(path):
        target = os.readlink(path)
        if os.path.exists(path):
            return f"is a link to {target}"
        return f"is a link to {target}, which leads nowhere"
    if os.path.isfile(path):
        return "is a file"
    return "is something else"


def wait_for_expiry(output: Path, run: Path) -> None:
    """Wait until the lease of an earlier attempt of this run expires.

    Its job may have been queued again and started on another machine.
    """
    until = time.monotonic() + SILENT_S + BEAT_S
    while time.monotonic() < until:
        newest = find_newest_lease(output)
        if newest is None or newest.run != str(run) or explain_hold(newest) is None:
            return
        time.sleep(1)


def explain_hold(lease: Lease) -> str | None:
    """Why a lease still counts, for a message; None if its owner is known to be gone."""
    if lease.state != "running":
        return None
    owner = lease.owner
    silence_s = lease.silence_s()
    last_beat = ""
    if silence_s is not None:
        last_beat = f", last heartbeat {format_age(silence_s)} ago"
    if owner is not None and owner.is_alive():
        return last_beat
    owner_is_local = owner is not None and owner.is_local()
    if lease.run in process.find_live_marks() or is_locked(lease.lock):
        if owner_is_local:
            return f"{last_beat}; its supervisor is gone, and its training continues"
        return last_beat
    if owner_is_local:
        return None
    if silence_s is None:
        return "; its heartbeat cannot be judged, as the folder is not writable"
    # an owner that is neither local nor remote is gone: its machine has rebooted
    owner_is_gone = owner is not None and not owner.is_remote()
    allowed_s = 3 * BEAT_S if owner_is_gone else SILENT_S
    if silence_s >= allowed_s:
        return None
    return f"{last_beat} (without one for {allowed_s:.0f} s it is free)"


def is_locked(lock_file: Path) -> bool:
    """Whether a process holds the lock of a lease. False if the file or its locks cannot tell."""
    try:
        lock = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return locks.try_lock(lock, shared=True) is False
    finally:
        os.close(lock)


def _report_held(lease: Lease, output: str, reason: str) -> Finding:
    name = Path(lease.run).name or "another run"
    owner = lease.owner
    where = ""
    stop = f"launch stop {name}"
    if owner is not None:
        if owner.is_remote():
            where = " there"
        if not os.path.isdir(lease.run):
            stop = f"its run folder is gone: kill {owner.pid}"
    message = f"the run {name} trains into {output}: {lease.description}{reason}"
    help = f"wait for it, stop it{where} ({stop}), or choose another output_dir"
    file = lease.run or str(lease.path)
    return launch_finding("error", "run-is-live", message, help, file=file)


def acquire(output: Path, run: Path) -> Lease:
    """Take the lease of an output folder. Raises NotReady if it is held, or cannot be written."""
    # two starts that found the same number want the same file, and one of them gets it
    path = _locate_lease(output, require_free(output))
    lease = Lease(path=path, run=str(run), owner=process.identify(os.getpid()))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, flags, _MODE))
        lease.write()
    except FileExistsError:
        winner = read_lease(path) or Lease(path=path)
        raise NotReady(_report_held(winner, str(output), "")) from None
    except OSError as error:
        message = f"the output folder cannot be written: {error.strerror}"
        help = "choose another output_dir"
        raise not_ready("not-writable", message, help, file=str(output)) from None
    return lease


@contextlib.contextmanager
def heartbeat(
    acquired: Lease | None, overtaken: Callable[[Lease], None]
) -> Iterator[Callable[[str, int], None]]:
    """Take a lease over for this process, and touch it from another thread.

    Yields a function that records how the run ended. On NotReady nothing was trained, and the lease
    is deleted. `overtaken` is called once, with the lease that is in force instead.
    """
    if acquired is None:
        yield lambda _state, _code: None
        return
    own = replace(acquired, owner=process.identify(os.getpid()))
    ended = threading.Event()
    # a full disk must not end the run
    with contextlib.suppress(OSError):
        own.write()
    threading.Thread(target=_renew_until_ended, args=(own, ended, overtaken), daemon=True).start()

    def record_end(state: str, code: int) -> None:
        ended.set()
        with contextlib.suppress(OSError):
            replace(own, state=state, code=code).write()

    try:
        yield record_end
    except NotReady:
        ended.set()
        own.delete()
        raise


def _renew_until_ended(
    own: Lease, ended: threading.Event, overtaken: Callable[[Lease], None]
) -> None:
    manifest = rundir.read_json(own.manifest)
    while not ended.wait(BEAT_S):
        successor = find_successor(own)
        if successor is not None:
            overtaken(successor)
            return
        with contextlib.suppress(OSError):
            if not own.path.exists():
                # somebody deleted it
                own.write()
                files.write_json(own.manifest, manifest)
            os.utime(own.path)


def keep_manifest(lease: Lease, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a start beside its lease. A full disk costs a later comparison only."""
    with contextlib.suppress(OSError):
        files.write_json(lease.manifest, manifest)
