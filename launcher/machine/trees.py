"""Folders held open by descriptor: no link is followed, no mount point crossed.

A path names whatever lies there at the moment; a descriptor stays with the folder that was opened.
So the folder that is compared is the folder that is deleted from, whoever renames what in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from launcher.lazy_dataclass import dataclass
from launcher.paths import resolve_path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# for the folders above, which this user may be unable to list
_PASSED_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 32  # of folders that are entered: a run writes five levels at most


class Foreign(OSError):
    """A folder that must not be entered: a link, a mount point, or another user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One name in a tree. `path` is relative to the root, `parent` a descriptor.

    The descriptor is open while the entry is yielded. `closed`: a folder that could not be entered.
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
    """How many names and seconds a walk may take; `spent` once it had to leave something out."""

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
def open_tree(path: Path) -> Iterator[int]:
    """A folder by its whole path, none of whose parts may be a link. Raises OSError."""
    parts = path.absolute().parts[1:]
    descriptor = os.open("/", _PASSED_FOLDER if parts else _FOLDER)
    try:
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)
            below = _open_folder(part, descriptor, _FOLDER if is_last else _PASSED_FOLDER)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def enter_folder(name: str, parent: int) -> Iterator[int]:
    """A folder below an open one, on the same mount. Raises OSError."""
    descriptor = _open_folder(name, parent)
    try:
        if _read_mount(descriptor) != _read_mount(parent):
            raise Foreign(errno.EXDEV, "it is a mount point", name)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(name: str, parent: int, flags: int = _FOLDER) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    except OSError as error:
        # Linux says ENOTDIR of a link that should be a folder
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Foreign(error.errno, "it is a link, or no folder", name) from None
        raise


def _read_mount(descriptor: int) -> tuple[int, str]:
    """Which mount a folder lies on: bind mounts share a device, and have another number."""
    device = os.fstat(descriptor).st_dev
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
            if line.startswith("mnt_id:"):
                return device, line
    return device, ""


def _enter_all(_entry: TreeEntry) -> bool:
    return True


def walk(
    root: int, budget: Budget, is_entered: Callable[[TreeEntry], bool] = _enter_all
) -> Iterator[TreeEntry]:
    """Every name below an open folder, a folder after its content; `is_entered` selects folders.

    Links and other mounts are yielded, and not followed.
    """
    yield from _Walk(budget, is_entered).below(root, "", MAX_DEPTH)


@dataclass(frozen=True, slots=True)
class _Walk:
    budget: Budget
    is_entered: Callable[[TreeEntry], bool]

    def below(self, folder: int, prefix: str, depth: int) -> Iterator[TreeEntry]:
        for name in _list_names(folder, self.budget):
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            path = prefix + name
            entry = TreeEntry(path=path, name=name, parent=folder, status=status)
            if entry.is_folder and self.is_entered(entry):
                try:
                    if depth == 0:
                        raise Foreign(errno.ELOOP, "it lies too deep", name)
                    with enter_folder(name, folder) as inner:
                        yield from self.below(inner, f"{path}/", depth - 1)
                except OSError:
                    entry = replace(entry, closed=True)
            yield entry


def _list_names(folder: int, budget: Budget) -> list[str]:
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not budget.allows():
                break
            names.append(entry.name)
    return sorted(names)


def is_same_place(first: Path, second: Path) -> bool:
    """Whether two paths are one folder: by name, or by what lies there (case, bind mounts)."""
    if first == second:
        return True
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return False


Identity = tuple[int, int]
"""What a folder is known by under every name of it: its device and inode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedFolder:
    """A folder and all that it lies in, looked at once; it need not exist.

    `paths` and `identities` are those of the folder and of all above it.
    """

    path: Path
    identity: Identity | None
    paths: frozenset[Path]
    identities: frozenset[Identity]

    @classmethod
    def of(cls, path: Path) -> ResolvedFolder:
        path = resolve_path(path)
        paths = (path, *path.parents)
        identities = list(map(_identify, paths))
        return cls(
            path=path,
            identity=identities[0],
            paths=frozenset(paths),
            identities=frozenset(filter(None, identities)),
        )

    def is_same(self, other: ResolvedFolder) -> bool:
        """By name, or by what lies there (case, bind mounts)."""
        if self.path == other.path:
            return True
        return self.identity is not None and self.identity == other.identity

    def is_within(self, other: ResolvedFolder) -> bool:
        """Whether it is the other folder or lies in it."""
        return other.path in self.paths or other.identity in self.identities


def _identify(path: Path) -> Identity | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino
