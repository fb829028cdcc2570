"""Paths that a stage file names: any text may stand there, so nothing here raises."""

import os
from pathlib import Path

from launcher.files import open_regular

MODULE_FLAG = "--module"  # `launcher/__main__.py --module NAME` runs another module of this package
# what the note begins with that git-lfs leaves of a file that was not fetched
POINTER = b"version https://git-lfs"
# the folder of this package: scripts and tables lie in it
PACKAGE = Path(__file__).resolve().parent
SNAPSHOTS = PACKAGE / "upstream" / "snapshots"  # the committed facts of the trainers' source
PROJECT = PACKAGE.parent  # the checkout of launch, or the folder that it is installed in
IS_CLONE = os.path.isfile(PROJECT / "pyproject.toml")  # not among installed packages
# False also for names that no file can have: too long, a NUL inside. pathlib's own methods raise
# there.
is_file = os.path.isfile
is_dir = os.path.isdir
exists = os.path.exists


_MOST_BYTES = 4095  # of a path, PATH_MAX without the NUL at its end
_MOST_BYTES_OF_NAME = 255  # of each part between slashes, NAME_MAX


def can_be_name(text: str) -> bool:
    """Whether a file or folder could have this path: no NUL, nothing in it too long."""
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    if b"\0" in raw or len(raw) > _MOST_BYTES:
        return False
    return all(len(part) <= _MOST_BYTES_OF_NAME for part in raw.split(b"/"))


def expand_user(text: str | Path) -> Path:
    """The path with `~` expanded, or as it is where there is no such user or no home."""
    return Path(os.path.expanduser(text))


def resolve_path(path: Path) -> Path:
    """The path without links and `..`, or as it is where that cannot be told (a NUL inside)."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return path


def is_pointer(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(POINTER)) == POINTER
    except (OSError, ValueError):
        return False


def find_shipped(name: str) -> Path:
    """A file or folder of the project: in the clone, or below PREFIX/share/launch."""
    places = []
    if IS_CLONE:
        places.append(PROJECT / name)
    for above in (PROJECT, *PROJECT.parents[:3]):
        places.append(above / "share" / "launch" / name)
    for place in places:
        if exists(place):
            return place
    return places[0]
