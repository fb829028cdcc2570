"""The right to train into an output folder, or to work at anything else alone: one at a time.

The locks are the kernel's. That of a run is on a file of its folder, and the started process inherits it:
it is free as soon as that process has gone, however it went, and never before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from launcher import process, rundir, runner
from launcher.errors import Finding, NotReady
from launcher.redaction import redact
from launcher.rundir import RunFolder

# somebody may only be looking whether it is held
_TRIES, _LOOK_S = 5, 0.02


@contextlib.contextmanager
def claimed(folder: RunFolder, attempt: int, output: Path | None) -> Iterator[int | None]:
    """Hold the run folder for this attempt; yields the descriptor that `runner.run` passes on.

    Raises NotReady where another start holds it, where another run trains into the same output, or
    where the folder cannot be written.
    """
    process.hold_standard_streams()
    with _beginning(output):
        require_free(output)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise rundir.not_writable(folder.path, error.strerror) from None
        try:
            # the attempt: another start may have been quicker, and be over already
            if not _locked(lock) or runner.alive(folder.path) or folder.attempts() >= attempt:
                raise NotReady(_live(folder, output))
            yield lock
        finally:
            os.close(lock)


def require_free(output: Path | None) -> None:
    """Raise NotReady where a run trains into this folder now: asked before a start is told of."""
    if (other := live_run_into(output)) is not None:
        raise NotReady(_live(other, output))


@contextlib.contextmanager
def _beginning(output: Path | None) -> Iterator[None]:
    """One start into an output folder at a time: until its process is known, nobody could see it.

    Two starts at once have run folders of their own, and so no lock in common but this one.
    """
    if output is None:
        yield
        return
    taken = Finding(
        severity="error", layer="launch", code="run-is-live", file=str(output),
        message=f"another run is being started into {output}",
        help="wait for it, stop it, or choose another output_dir",
    )  # fmt: skip
    with alone(place("outputs", os.path.realpath(output)), taken):
        yield


def place(kind: str, key: str) -> Path:
    """The lock file, in the user's state folder, of what `key` names."""
    return rundir.state_folder() / kind / hashlib.sha256(os.fsencode(key)).hexdigest()[:32]


@contextlib.contextmanager
def alone(lock_file: Path, taken: Finding) -> Iterator[None]:
    """Hold a lock file; the kernel takes it back, however this process ends.

    Raises NotReady with `taken` where another process holds it. Where it cannot be made, as in a home
    that is read-only, that costs the lock and nothing else.
    """
    lock = None
    with contextlib.suppress(OSError):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if lock is not None and not _locked(lock):
            raise NotReady(taken)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def live_run_into(output: Path | None) -> RunFolder | None:
    """The run on this machine that trains into `output` right now, wherever its folder is."""
    if output is None:
        return None
    # the same folder may have been named by another way to it
    wanted = {redact(str(output)), os.path.realpath(output)}
    live = (folder for folder in rundir.known_runs() if runner.alive(folder.path))
    for folder in live:
        named = rundir.read_manifest(folder).get("output")
        if isinstance(named, str) and {named, os.path.realpath(named)} & wanted:
            return folder
    return None


def held(folder: RunFolder) -> bool:
    """Whether somebody holds a run folder: who is about to start it, its keeper, or its training."""
    try:
        lock = os.open(folder.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _locked(lock: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError:
            # a file system without locks: the process record has to do
            return True
        else:
            return True
    return False


def _live(folder: RunFolder, output: Path | None) -> Finding:
    where = f" into {output}" if output is not None else ""
    return Finding(
        severity="error", layer="launch", code="run-is-live", file=str(folder.path),
        message=f"the run {folder.path.name} was started before and trains{where}",
        help="wait for it, stop it, or choose another output_dir",
    )  # fmt: skip
