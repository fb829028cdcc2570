"""Bytes: how many the files of a folder take, and how people read them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def measure_size(path: Path, *, links: bool = False) -> int:
    """Bytes of a file, or of all readable files below a folder; `links` are followed."""
    ask = os.stat if links else os.lstat
    total = 0
    for file in _find_files_below(path):
        with contextlib.suppress(OSError):
            total += ask(file).st_size
    return total


def _find_files_below(path: Path) -> Iterator[str]:
    if not path.is_dir():
        yield str(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)


def format_size(count: float) -> str:
    """Bytes in words: `512 B`, `3 KiB`, `1.5 GiB`."""
    size = float(count)
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    decimals = 0 if unit < 2 else 1
    return f"{size:.{decimals}f} {_UNITS[unit]}"
