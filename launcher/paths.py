"""Paths that a stage file names: any text may stand there, so nothing here raises."""

from __future__ import annotations

from pathlib import Path

from launcher.files import open_regular

POINTER = b"version https://git-lfs"
"""What the note begins with that git-lfs leaves of a file that was not fetched."""


def expanded(text: str | Path) -> Path:
    """The path with `~` expanded, or as it is where there is no such user or no home."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_file(path: Path) -> bool:
    """Whether a file is there; False for names that no file can have (too long, a NUL inside)."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_pointer(path: Path) -> bool:
    """Whether git-lfs has left its note of a file where the file should be."""
    try:
        with open_regular(path) as file:
            return file.read(len(POINTER)) == POINTER
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether anything is there; False for names that nothing can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def canonical(path: Path) -> Path:
    """The path without links and `..`, or as it is where that cannot be told (a loop of links)."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path
