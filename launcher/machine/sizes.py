"""Bytes: what the files of a folder take, and how people read it."""

import contextlib
import os
from pathlib import Path


def below(path: Path, *, links: bool = False) -> int:
    """Bytes of a file, or of all files below a folder that can be asked; `links` are followed, or counted as such."""
    ask = os.stat if links else os.lstat
    total = 0
    files = (os.path.join(place, name) for place, _, names in os.walk(path) for name in names)
    for file in files if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += ask(file).st_size
    return total


def sized(count: float) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit in {"B", "KiB"} else f"{size:.1f} {unit}"
