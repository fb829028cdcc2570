"""What an attempt wrote into its output folder -> `Inventory`: the record that `launch rm --model` goes by.

Before the training begins, the names that a trainer could write over are noted; at its end, what has such a name
and was created or changed in between. Both walks enter only the folders that trainers make, so that an output
folder with a million files of somebody else costs nothing. What stands in no inventory is nobody's to delete.
"""

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts import digest, layout
from launcher.machine import trees
from launcher.machine.trees import Budget, TreeEntry
from launcher.paths import canonical
from launcher.runs import lease, rundir
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder

NAMES = 50_000  # names that one walk looks at
START_S = 2.0  # seconds that a start may take to look
END_S = 30.0  # the same at the end
DIGEST_S = 10.0  # seconds for digests at the end: where one is missing, a chmod makes a file nobody's
AFTER_S = 5.0  # seconds behind the last sign of life that a file may still be the run's own
_LARGEST = 64 * 2**20  # bytes of a file that is read whole for its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """What tells a file from another under its name; times in ns, `digest` None where it was too large."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    link: bool = False
    digest: str | None = None

    def is_same(self, other: "FileState") -> bool:
        """Whether nothing wrote into it, as far as size, time and inode tell."""
        own = (self.size, self.mtime_ns, self.inode, self.link)
        return own == (other.size, other.mtime_ns, other.inode, other.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One attempt in its output folder: its `inode`, the times of start and end by the folder's own clock.

    `before` is what lay there at the start, None where that was too much to look at; `written` is what the attempt
    left, None as long as nobody has looked.
    """

    output: str
    inode: int
    began_ns: int
    before: Mapping[str, FileState] | None
    written: Mapping[str, FileState] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "inode": self.inode,
            "began_ns": self.began_ns,
            "before": _listed(self.before),
            "written": _listed(self.written),
        }


def _listed(found: Mapping[str, FileState] | None) -> dict[str, list[Any]] | None:
    if found is None:
        return None
    listed = {}
    for path, state in found.items():
        listed[path] = [state.size, state.mtime_ns, state.ctime_ns, state.inode, state.link, state.digest]
    return listed


def of_status(status: os.stat_result) -> FileState:
    return FileState(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        link=stat.S_ISLNK(status.st_mode),
    )


def read(folder: RunFolder, attempt: int) -> Inventory | None:
    """The inventory of an attempt; None where there is none, or it is damaged."""
    record = Record(files.read_json(folder.inventory(attempt)))
    output = record.text("output")
    inode = record.number("inode")
    began_ns = record.number("began_ns")
    if output is None or inode is None or began_ns is None:
        return None
    before = _states(record.value("before"))
    written = _states(record.value("written"))
    return Inventory(output=output, inode=inode, began_ns=began_ns, before=before, written=written)


def _states(listed: object) -> dict[str, FileState] | None:
    if not isinstance(listed, dict):
        return None
    found = {}
    for path, row in listed.items():
        state = _state(row)
        if state is not None:
            found[path] = state
    return found


def _state(row: object) -> FileState | None:
    if not isinstance(row, list) or len(row) != 6:
        return None
    *numbers, link, content = row
    if not all(type(number) is int for number in numbers):
        return None
    if content is not None and not isinstance(content, str):
        return None
    size, mtime_ns, ctime_ns, inode = numbers
    return FileState(size=size, mtime_ns=mtime_ns, ctime_ns=ctime_ns, inode=inode, link=link is True, digest=content)


def begin(folder: RunFolder, attempt: int, output: Path | None) -> None:
    """Note what lies in the output folder before training writes there; only for who holds its lease."""
    if output is None:
        return
    # a full disk costs the record, not the start: without one, nothing counts as written
    with contextlib.suppress(OSError):
        place = canonical(output)
        budget = Budget(names=NAMES, seconds=START_S)
        with trees.opened(place) as root:
            inode = os.fstat(root).st_ino
            before = {entry.path: of_status(entry.status) for entry in _trained(root, budget)}
        complete = None if budget.spent else before
        record = Inventory(output=str(place), inode=inode, began_ns=_clock(place), before=complete)
        files.write_json(folder.inventory(attempt), record.as_json())


def _clock(output: Path) -> int:
    """The time now, in ns, by the clock of the output's file system."""
    with tempfile.TemporaryFile(dir=output / lease.FOLDER) as probe:
        return os.fstat(probe.fileno()).st_mtime_ns


def end(folder: RunFolder, attempt: int, *, late: bool = False) -> None:
    """Add to the record of an attempt what it wrote, unless somebody has.

    `late`: its supervisor did not live to do it. What was written after the last sign of life is not the attempt's.
    """
    record = read(folder, attempt)
    if record is None or record.written is not None:
        return
    last_ns = None
    if late:
        last_ns = last_sign_of_life(folder, attempt) + int(AFTER_S * 1e9)
    with contextlib.suppress(OSError):
        files.write_json(folder.inventory(attempt), _ended(record, last_ns).as_json())


def last_sign_of_life(folder: RunFolder, attempt: int) -> int:
    """When a process of an attempt wrote anything last, in ns: its log, the probe's records, its heartbeat."""
    paths = [folder.console(attempt), folder.exit(attempt), *folder.probe.glob("*.jsonl")]
    output = rundir.read_manifest(folder).output
    for granted in [] if output is None else lease.all_of(output):
        own = Path(granted.run).name == folder.path.name
        if own and files.read_json(granted.manifest).get("attempt") == attempt:
            paths.append(granted.path)
    last = 0
    for path in paths:
        with contextlib.suppress(OSError):
            last = max(last, path.stat().st_mtime_ns)
    return last


def _ended(record: Inventory, last_ns: int | None) -> Inventory:
    until = time.monotonic() + DIGEST_S
    written = {}
    with trees.opened(Path(record.output)) as root:
        inode = os.fstat(root).st_ino
        for entry in _trained(root, Budget(names=NAMES, seconds=END_S)):
            state = of_status(entry.status)
            if not _is_new(record, entry.path, state):
                continue
            if last_ns is not None and max(state.mtime_ns, state.ctime_ns) > last_ns:
                continue
            if not state.link and time.monotonic() < until:
                state = replace(state, digest=content_of(entry))
            written[entry.path] = state
    return replace(record, inode=inode, written=written)


def _is_new(record: Inventory, path: str, state: FileState) -> bool:
    """Whether a file was created or changed since the start."""
    if state.mtime_ns < record.began_ns:
        return False
    if record.before is None:
        return True
    earlier = record.before.get(path)
    return earlier is None or not state.is_same(earlier)


def content_of(entry: TreeEntry) -> str | None:
    """The digest of a file; None where it is too large for one, or changes meanwhile."""
    if entry.status.st_size > _LARGEST and not entry.name.endswith(".safetensors"):
        return None
    # the descriptor stays with the folder, whatever is renamed
    path = Path(f"/proc/self/fd/{entry.parent}/{entry.name}")
    try:
        return digest.read(path)[0].digest
    except OSError:
        return None


def _trained(root: int, budget: Budget) -> Iterator[TreeEntry]:
    """What lies in an output folder under names that trainers give: files and links, no folders."""

    def into(entry: TreeEntry) -> bool:
        below = "/" in entry.path
        # PEFT gives an adapter a folder under the adapter's name
        return below or layout.is_folder(entry.name) or _holds_adapter(entry)

    for entry in trees.walk(root, budget, into):
        named = layout.is_file(entry.name)
        if stat.S_ISLNK(entry.status.st_mode):
            named = named or layout.is_folder(entry.name)
        elif not stat.S_ISREG(entry.status.st_mode):
            continue
        if named:
            yield entry


def _holds_adapter(entry: TreeEntry) -> bool:
    try:
        with trees.entered(entry.name, entry.parent) as below:
            os.stat("adapter_config.json", dir_fd=below, follow_symlinks=False)
    except OSError:
        return False
    return True


def trained_within(output: Path, fits: Callable[[FileState], bool]) -> dict[str, FileState]:
    """What lies in an output folder under trainers' names and `fits`: of runs without an inventory. Raises OSError."""
    with trees.opened(output) as root:
        budget = Budget(names=NAMES, seconds=END_S)
        states = {entry.path: of_status(entry.status) for entry in _trained(root, budget)}
    return {path: state for path, state in states.items() if fits(state)}
