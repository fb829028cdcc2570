"""The right to train into an output folder: one at a time.

Who trains into an output folder has its lease. What the kernel's locks tell confirms that: they are on a
file beside the lease and on one of the run folder, and the started process inherits them, so they are free
as soon as that process has gone, however it went, and never before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from launcher import lease, locks, process, rundir, runner
from launcher.errors import not_ready
from launcher.rundir import RunFolder


@contextlib.contextmanager
def claimed(
    folder: RunFolder, attempt: int, output: Path | None
) -> Iterator[tuple[lease.Lease | None, tuple[int, ...]]]:
    """Hold the run folder and the output folder for this attempt, until a keeper has taken them over.

    Yields the lease of the output folder, and the descriptors that `runner.run` passes on. Raises NotReady
    where another start holds either, or where they cannot be written.
    """
    process.hold_standard_streams()
    with contextlib.ExitStack() as held:
        granted, descriptors = None, tuple[int, ...]()
        if output is not None:
            granted = lease.take(output, folder.path, attempt)
            held.callback(_give_back, granted)
        try:
            folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
            files = [folder.lock] if granted is None else [folder.lock, granted.lock]
            for file in files:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
                descriptors = (*descriptors, os.open(file, flags, 0o666))
                held.callback(os.close, descriptors[-1])
        except OSError as error:
            raise rundir.not_writable(folder.path, error.strerror) from None
        # the attempt: another start may have been quicker, and be over already
        free = [locks.locked(one, seconds=locks.GLANCE_S) for one in descriptors]
        taken = False in free or runner.alive(folder.path)
        if taken or folder.attempts() >= attempt:
            where = f" into {output}" if output is not None else ""
            raise not_ready(
                "run-is-live", f"the run {folder.path.name} was started before and trains{where}",
                "wait for it, stop it, or choose another output_dir", file=str(folder.path),
            )  # fmt: skip
        yield granted, descriptors


def _give_back(granted: lease.Lease) -> None:
    last = lease.read(granted.path)
    if last is not None and last.owner == granted.owner:
        # no keeper has taken it over
        granted.discard()


def place(kind: str, key: str) -> Path:
    """The lock file, in the user's state folder, of what `key` names."""
    return rundir.state_folder() / kind / hashlib.sha256(os.fsencode(key)).hexdigest()[:32]
