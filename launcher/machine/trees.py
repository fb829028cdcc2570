"""Folders held open by descriptor: no link is followed, no mount point crossed, no replaced folder entered.

A path names whatever lies there at the moment; a descriptor stays with the folder that was opened. So what is
compared and what is deleted is the same folder, whoever renames what in between.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PASSED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # a folder above may be one that nobody can list
DEEPEST = 32  # folders below each other that are entered: a run writes five at most


class Foreign(OSError):
    """A folder that must not be entered: a link, a mount point, or another user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One name in a tree. `path` is relative to the root, `parent` a descriptor that is open while it is yielded.

    `closed`: a folder that was to be entered and cannot be: a mount point, or nobody may read it.
    """

    path: str
    name: str
    parent: int
    status: os.stat_result
    closed: bool = False

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


@dataclass(slots=True, kw_only=True)
class Budget:
    """How many names and how many seconds a walk may take; `spent` once it had to leave something out."""

    names: int
    seconds: float
    spent: bool = False
    _until: float | None = None

    def allows(self) -> bool:
        if self._until is None:
            self._until = time.monotonic() + self.seconds
        self.names -= 1
        if self.names < 0 or time.monotonic() > self._until:
            self.spent = True
        return not self.spent


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A folder by its whole path, none of whose parts may be a link. Raises OSError."""
    parts = path.absolute().parts[1:]
    descriptor = os.open("/", _PASSED if parts else _FOLDER)
    try:
        for number, part in enumerate(parts, 1):
            below = _enter(part, descriptor, _PASSED if number < len(parts) else _FOLDER)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def entered(name: str, parent: int) -> Iterator[int]:
    """A folder below an open one, on the same mount. Raises OSError."""
    descriptor = _enter(name, parent)
    try:
        if _mount(descriptor) != _mount(parent):
            raise Foreign(errno.EXDEV, "it is a mount point", name)
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(name: str, parent: int, flags: int = _FOLDER) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    except OSError as error:
        # Linux says ENOTDIR of a link that is asked to be a folder
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Foreign(error.errno, "it is a link, or no folder", name) from None
        raise


def _mount(descriptor: int) -> tuple[int, str]:
    """Which mount a folder lies on: bind mounts of one file system have the same device and another number."""
    number = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        number = next((line for line in text.splitlines() if line.startswith("mnt_id:")), "")
    return os.fstat(descriptor).st_dev, number


def walk(root: int, budget: Budget, into: Callable[[TreeEntry], bool] = lambda _: True) -> Iterator[TreeEntry]:
    """Every name below an open folder, a folder after what is in it; folders are entered where `into` says so.

    Links are yielded and not followed; of other mounts, and of what cannot be read, only the name is.
    """
    yield from _Walk(budget, into).below(root, "", DEEPEST)


@dataclass(frozen=True, slots=True)
class _Walk:
    budget: Budget
    into: Callable[[TreeEntry], bool]

    def below(self, folder: int, prefix: str, deep: int) -> Iterator[TreeEntry]:
        with os.scandir(folder) as listing:
            names = _names(listing, self.budget)
        for name in names:
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            entry = TreeEntry(path=f"{prefix}{name}", name=name, parent=folder, status=status)
            if entry.is_folder and self.into(entry):
                try:
                    if not deep:
                        raise Foreign(errno.ELOOP, "it lies too deep", name)
                    with entered(name, folder) as below:
                        yield from self.below(below, f"{entry.path}/", deep - 1)
                except OSError:
                    entry = replace(entry, closed=True)
            yield entry


def _names(listing: Iterator[os.DirEntry[str]], budget: Budget) -> list[str]:
    names = []
    for entry in listing:
        if not budget.allows():
            break
        names.append(entry.name)
    return sorted(names)


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths are one folder: by name, or by what lies there (case, bind mounts)."""
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, both without links in them; it need not be there."""
    if path.is_relative_to(folder):
        return True
    return os.path.exists(folder) and any(same_place(above, folder) for above in (path, *path.parents))
