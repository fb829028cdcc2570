"""The right to train into an output folder: one run at a time.

The lock is the kernel's, on a file of the run folder, and the started process inherits it: it is
free as soon as that process has gone, however it went, and never before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from launcher import rundir, runner
from launcher.errors import Finding, NotReady
from launcher.redaction import redact
from launcher.rundir import RunFolder


@contextlib.contextmanager
def claimed(folder: RunFolder, attempt: int, output: Path | None) -> Iterator[int | None]:
    """Hold the run folder for this attempt; yields the descriptor that `runner.run` passes on.

    Raises NotReady where another start holds it, where another run trains into the same output, or
    where the folder cannot be written.
    """
    other = live_run_into(output)
    if other is not None:
        raise NotReady(_live(other, output))
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


def live_run_into(output: Path | None) -> RunFolder | None:
    """The run on this machine that trains into `output` right now, wherever its folder is."""
    if output is None:
        return None
    wanted = redact(str(output))
    live = (folder for folder in rundir.known_runs() if runner.alive(folder.path))
    return next((f for f in live if rundir.read_manifest(f).get("output") == wanted), None)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: the process record has to do
        return True
    return True


def _live(folder: RunFolder, output: Path | None) -> Finding:
    where = f" into {output}" if output is not None else ""
    return Finding(
        severity="error", layer="launch", code="run-is-live", file=str(folder.path),
        message=f"the run {folder.path.name} was started before and trains{where}",
        help="wait for it, stop it, or choose another output_dir",
    )  # fmt: skip
