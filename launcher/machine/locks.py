"""The kernel's locks on files: it takes them back from a process, however that ends."""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.errors import Finding, NotReady

# somebody may only be looking whether it is locked
GLANCE_S = 0.1
_POLL_S = 0.02


def locked(descriptor: int, *, shared: bool = False, seconds: float = 0.0) -> bool | None:
    """Whether an open file could be locked within so many seconds; None on a disk without locks."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, how if end == math.inf else how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return None
        else:
            return True


@contextlib.contextmanager
def alone(path: Path, *, taken: Finding | None = None, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file. Raises NotReady with `taken` where another process does; without it waits, after `waiting`."""
    lock = None
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if lock is not None and locked(lock, seconds=GLANCE_S) is False:
            if taken is not None:
                raise NotReady(taken)
            waiting()
            locked(lock, seconds=math.inf)
        yield
    finally:
        if lock is not None:
            os.close(lock)
