"""Bytes: what the files of a folder take, and how people read it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def below(folder: Path) -> int:
    """Bytes of all files below a folder, links not followed; what cannot be asked counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def sized(count: float) -> str:
    """1.2 GiB, or 12 KiB."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit in {"B", "KiB"} else f"{size:.1f} {unit}"
