"""What a measurement was made on, and whether others used the machine meanwhile."""

import datetime
import importlib.metadata
import os
import platform
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.ratio import ROOT

PACKAGES = ("launcher", "typer", "rich", "pyyaml", "torch", "transformers", "trl", "accelerate")
SHARED = 0.10
"""Of the processors' time: more than this taken by others, and the machine was shared."""


class Others:
    """The share of the processors' time that other processes take; 0 without /proc."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = _busy()
        self._own = _own()

    def share(self) -> float:
        """Since this was made, 0 to 1; a child that nobody waited for counts as another's."""
        passed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        taken = (_busy() - self._busy) - (_own() - self._own)
        return min(1.0, max(0.0, taken / passed)) if passed else 0.0


def _busy() -> float:
    """Seconds that the processors were not idle since the machine was started."""
    try:
        words = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    except OSError:
        return 0.0
    ticks = [int(word) for word in words[:8]]
    # the fourth and fifth are idle time and waiting for a disk
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def about(others: float) -> dict[str, Any]:
    """Versions, date, processors; no name of a machine or of a person."""
    packages = {}
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            packages[name] = version
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": packages,
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "others_share": round(others, 2),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
