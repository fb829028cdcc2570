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
    """How much of the processors' time has gone to others since this was made; 0 where it is not told."""

    def __init__(self) -> None:
        self._begun, self._busy, self._own = time.monotonic(), _busy(), _own()

    def share(self) -> float:
        """Of all processors, 0 to 1; a process of ours that nobody waited for counts as another's."""
        passed = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
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
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def about(others: float) -> dict[str, Any]:
    """Versions, date, processors; no name of a machine or of a person."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
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
