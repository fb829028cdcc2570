"""The kernel's locks on files: it releases them when a process ends, however that ends."""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.errors import Finding, NotReady

# another process may hold the lock just to look
GLANCE_S = 0.1
_POLL_S = 0.02


def try_lock(descriptor: int, *, shared: bool = False, seconds: float = 0.0) -> bool | None:
    """Whether an open file could be locked within so many seconds; None on a disk without locks."""
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if seconds != math.inf:
        operation |= fcntl.LOCK_NB
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return None
        else:
            return True


@contextlib.contextmanager
def hold_exclusive(
    path: Path, *, taken: Finding | None = None, waiting: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold a lock file inside. If another process holds it, raise NotReady with `taken`.

    Without `taken`, call `waiting`, and wait.
    """
    lock = None
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, flags, 0o666)
    try:
        if lock is not None and try_lock(lock, seconds=GLANCE_S) is False:
            if taken is not None:
                raise NotReady(taken)
            if waiting is not None:
                waiting()
            try_lock(lock, seconds=math.inf)
        yield
    finally:
        if lock is not None:
            os.close(lock)
