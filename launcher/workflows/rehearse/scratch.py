"""The folder of a rehearsal in the temporary directory, and those that killed rehearsals left there.

Its owner holds a lock on a file inside: a folder whose lock is free belongs to nobody any more.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.machine.locks import try_lock

PREFIX = "launch-rehearsal-"
LOCK = "owner.lock"
UNLOCKED_S = 3600.0
"""Seconds after which a folder without a lock file counts as left: its owner was killed before it made one."""


@dataclass(frozen=True, slots=True)
class Scratch:
    path: Path
    lock: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def make() -> Scratch:
    """A new folder of this process. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    try_lock(lock)
    return Scratch(path, lock)


def remove_left() -> None:
    """Remove this user's folders whose owner was killed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX) and _is_left(Path(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return time.time() - status.st_mtime > UNLOCKED_S
    except OSError:
        return False
    try:
        return try_lock(lock) is True
    finally:
        os.close(lock)
