"""Ask a training to save and end before its machine is taken away.

The request and its answer are files beside the probe's records, which every rank can read. The
probe uses the same names and content (`probe/watching/preemption.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launcher import files
from launcher.errors import shorten, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine.codec import LARGEST
from launcher.runs import attempt as attempts
from launcher.runs import rundir
from launcher.runs.record import Record

GRACE_S = 600.0
"""Seconds for the current step and its save; then the run is stopped without a save."""
GRACE_VARIABLE = "LAUNCH_SAVE_GRACE"  # overrides GRACE_S
SAVE_BYTES_PER_S = 10**9
"""Assumed speed of a save where none was measured: a shared file system, or one NVMe disk."""


def save_seconds(size: int) -> float:
    """Seconds that saving a checkpoint of `size` bytes takes, at the assumed speed."""
    return size / SAVE_BYTES_PER_S


def parse_save_grace(text: str | None) -> float:
    """The value of GRACE_VARIABLE in seconds. Raises UsageError if it is no such number."""
    if not text:
        return GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LARGEST:
        help = f"seconds until a run that was to save is stopped without: {GRACE_VARIABLE}=120"
        raise usage("bad-grace", f"`{shorten(text)}` is not a number of seconds", help)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Asks an attempt to save and end within `grace_s` seconds; `folder` holds the probe's records.

    `on_term`: SIGTERM asks for it too. Not in a Slurm job: there TERM goes to every process, and
    the training ends before it could save.
    """

    folder: Path
    attempt: int
    grace_s: float = GRACE_S
    on_term: bool = True

    def write(self) -> None:
        """Ask. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(self.folder / "save.json", {"attempt": self.attempt})

    def is_heard(self) -> bool:
        """Whether the probe listens; before that there is nothing to save."""
        return self._names_attempt("listens.json")

    def is_written(self) -> bool:
        """Whether anybody has asked, on any machine of the run."""
        return self._names_attempt("save.json")

    def is_answered(self) -> bool:
        """Whether every rank has saved."""
        return self._names_attempt("saved.json")

    def _names_attempt(self, name: str) -> bool:
        record = Record(rundir.read_json(self.folder / name))
        return record.number("attempt") == self.attempt


def save_request(env: Mapping[str, str], attempt: int) -> SaveRequest | None:
    """The request for the training that a command with `env` starts; None without a probe."""
    folder = attempts.read_probe_settings(env).text("out")
    if folder is None:
        return None
    return SaveRequest(
        folder=Path(folder),
        attempt=attempt,
        grace_s=parse_save_grace(os.environ.get(GRACE_VARIABLE)),
        on_term="SLURM_JOB_ID" not in os.environ,
    )
