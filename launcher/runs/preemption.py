"""Asking a training to save and end before its machine is taken away: the request, its answer, the limit.

Both are files beside the probe's records, which every rank can read wherever it runs; the probe has their names and
their content, too (`probe/watching/preemption.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import files
from launcher.errors import brief, usage
from launcher.machine.codec import LARGEST
from launcher.runs import attempt as attempts
from launcher.runs import rundir
from launcher.runs.record import Record

GRACE_S = 600.0
"""Seconds that the step and its save may take; then the run is stopped without."""
GRACE_VARIABLE = "LAUNCH_SAVE_GRACE"  # other such seconds
SAVE_BYTES_PER_S = 10**9
"""What a save is taken to write in a second where nothing was measured: a shared file system, or one NVMe disk."""


def save_seconds(size: int) -> float:
    """Seconds that a checkpoint of so many bytes takes, by an assumed speed."""
    return size / SAVE_BYTES_PER_S


def grace(text: str | None) -> float:
    """Seconds that are left for a save, as text. Raises UsageError where it is none."""
    if not text:
        return GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LARGEST:
        help = f"seconds until a run that was to save is stopped without: {GRACE_VARIABLE}=120"
        raise usage("bad-grace", f"`{brief(text)}` is not a number of seconds", help)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """How an attempt is asked to save and end within `grace_s` seconds; `folder` holds the probe's records.

    `on_term` is whether TERM asks for it. In a job of Slurm's it does not: that tells every process of the job, and
    the training is gone before it could save.
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
        """Whether the training is there to hear; until then it has done nothing that could be saved."""
        return self._names_attempt("listens.json")

    def is_written(self) -> bool:
        """Whether the save was requested, by whoever it was."""
        return self._names_attempt("save.json")

    def is_answered(self) -> bool:
        """Whether every rank has saved."""
        return self._names_attempt("saved.json")

    def _names_attempt(self, name: str) -> bool:
        return Record(rundir.read_json(self.folder / name)).number("attempt") == self.attempt


def request_for(env: Mapping[str, str], attempt: int) -> SaveRequest | None:
    """How to ask the training that a command's own environment `env` starts; None where nothing in it would answer."""
    settings = attempts.probe_settings(env)
    folder = settings.text("out")
    if folder is None:
        return None
    return SaveRequest(
        folder=Path(folder),
        attempt=attempt,
        grace_s=grace(os.environ.get(GRACE_VARIABLE)),
        on_term="SLURM_JOB_ID" not in os.environ,
    )
