"""What an attempt wrote into its output folder -> `Inventory`; `launch rm --model` deletes by it.

Before training starts, the files that a trainer could overwrite are recorded; at its end, those
that were created or changed. Both walks enter only folders that trainers make, so that a million
other files in the output folder cost nothing. A file in no inventory is never deleted.
"""

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher import files
from launcher.artifacts import digest, layout
from launcher.lazy_dataclass import dataclass
from launcher.machine import trees
from launcher.machine.trees import Budget, TreeEntry
from launcher.paths import resolve_path
from launcher.runs import lease, rundir
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder

MAX_NAMES = 50_000  # names that one walk looks at
START_S = 2.0  # seconds for the walk at the start
END_S = 30.0  # seconds for the walk at the end
DIGEST_S = 10.0  # seconds for digests at the end; a file without one is kept after a chmod
AFTER_S = 5.0  # seconds after the last activity in which a file may still be the run's own
_MAX_DIGEST_BYTES = 64 * 2**20  # a file that is larger is not read for its digest
_ROW_LENGTH = 6  # values of a file in the record


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """What distinguishes a file from another of its name.

    Times are in ns; `digest` is None if the file was too large for one.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    link: bool = False
    digest: str | None = None

    def is_same(self, other: "FileState") -> bool:
        """Whether nothing was written in between, by size, time and inode."""
        return (
            self.size == other.size
            and self.mtime_ns == other.mtime_ns
            and self.inode == other.inode
            and self.link == other.link
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One attempt in its output folder, which has `inode`.

    `began_ns` is the start by the clock of the folder's file system. `before` is what was there
    then; None if that was too much to look at. `written` is what the attempt left; None as long as
    nobody has looked.
    """

    output: str
    inode: int
    began_ns: int
    before: Mapping[str, FileState] | None
    written: Mapping[str, FileState] | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "output": self.output,
            "inode": self.inode,
            "began_ns": self.began_ns,
            "before": _encode_states(self.before),
            "written": _encode_states(self.written),
        }


def _encode_states(states: Mapping[str, FileState] | None) -> dict[str, list[object]] | None:
    if states is None:
        return None
    rows: dict[str, list[object]] = {}
    for path, state in states.items():
        rows[path] = [
            state.size,
            state.mtime_ns,
            state.ctime_ns,
            state.inode,
            state.link,
            state.digest,
        ]
    return rows


def describe_file(status: os.stat_result) -> FileState:
    return FileState(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        link=stat.S_ISLNK(status.st_mode),
    )


def read_inventory(folder: RunFolder, attempt: int) -> Inventory | None:
    """The inventory of an attempt; None if it is missing or damaged."""
    record = Record(files.read_json(folder.inventory(attempt)))
    output = record.text("output")
    inode = record.number("inode")
    began_ns = record.number("began_ns")
    if output is None or inode is None or began_ns is None:
        return None
    return Inventory(
        output=output,
        inode=inode,
        began_ns=began_ns,
        before=_parse_rows(record.value("before")),
        written=_parse_rows(record.value("written")),
    )


def _parse_rows(rows: object) -> dict[str, FileState] | None:
    if not isinstance(rows, dict):
        return None
    states = {}
    for path, row in rows.items():
        state = _parse_row(row)
        if state is not None:
            states[path] = state
    return states


def _parse_row(row: object) -> FileState | None:
    if not isinstance(row, list) or len(row) != _ROW_LENGTH:
        return None
    *numbers, link, content = row
    if any(type(number) is not int for number in numbers):
        return None
    if content is not None and not isinstance(content, str):
        return None
    size, mtime_ns, ctime_ns, inode = numbers
    return FileState(
        size=size,
        mtime_ns=mtime_ns,
        ctime_ns=ctime_ns,
        inode=inode,
        link=link is True,
        digest=content,
    )


def record_before(folder: RunFolder, attempt: int, output: Path | None) -> None:
    """Record what is in the output folder before training starts. The caller holds its lease."""
    if output is None:
        return
    # a full disk costs the record, not the start: then no file counts as written by the run
    with contextlib.suppress(OSError):
        place = resolve_path(output)
        budget = Budget(names=MAX_NAMES, seconds=START_S)
        before = {}
        with trees.open_tree(place) as root:
            inode = os.fstat(root).st_ino
            for entry in _walk_trainer_files(root, budget):
                before[entry.path] = describe_file(entry.status)
        record = Inventory(
            output=str(place),
            inode=inode,
            began_ns=_read_file_system_time_ns(place),
            before=None if budget.spent else before,
        )
        files.write_json(folder.inventory(attempt), record.as_json())


def _read_file_system_time_ns(output: Path) -> int:
    with tempfile.TemporaryFile(dir=output / lease.FOLDER) as probe:
        return os.fstat(probe.fileno()).st_mtime_ns


def record_written(folder: RunFolder, attempt: int, *, late: bool = False) -> None:
    """Add what an attempt wrote to its record, once.

    `late`: its supervisor was killed before it did. Then files that were written after the last
    activity of the run do not count.
    """
    record = read_inventory(folder, attempt)
    if record is None or record.written is not None:
        return
    last_ns = None
    if late:
        last_ns = find_last_activity_ns(folder, attempt) + int(AFTER_S * 1e9)
    with contextlib.suppress(OSError):
        completed = _add_written_files(record, last_ns)
        files.write_json(folder.inventory(attempt), completed.as_json())


def find_last_activity_ns(folder: RunFolder, attempt: int) -> int:
    """When a process of an attempt last wrote its log, the probe's records or its heartbeat."""
    paths = [folder.console(attempt), folder.exit(attempt), *folder.probe.glob("*.jsonl")]
    output = rundir.read_manifest(folder).output
    if output is not None:
        paths += _find_leases_of_attempt(output, folder, attempt)
    last = 0
    for path in paths:
        with contextlib.suppress(OSError):
            last = max(last, path.stat().st_mtime_ns)
    return last


def _find_leases_of_attempt(output: Path, folder: RunFolder, attempt: int) -> Iterator[Path]:
    for each in lease.list_leases(output):
        if Path(each.run).name != folder.path.name:
            continue
        if files.read_json(each.manifest).get("attempt") == attempt:
            yield each.path


def _add_written_files(record: Inventory, last_ns: int | None) -> Inventory:
    digest_until = time.monotonic() + DIGEST_S
    written = {}
    with trees.open_tree(Path(record.output)) as root:
        inode = os.fstat(root).st_ino
        budget = Budget(names=MAX_NAMES, seconds=END_S)
        for entry in _walk_trainer_files(root, budget):
            state = describe_file(entry.status)
            if not _is_new(record, entry.path, state):
                continue
            changed_ns = max(state.mtime_ns, state.ctime_ns)
            if last_ns is not None and changed_ns > last_ns:
                continue
            if not state.link and time.monotonic() < digest_until:
                state = replace(state, digest=digest_file(entry))
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


def digest_file(entry: TreeEntry) -> str | None:
    """The digest of a file; None if it is too large for one, or changes meanwhile."""
    if entry.status.st_size > _MAX_DIGEST_BYTES and not entry.name.endswith(".safetensors"):
        return None
    # through the open folder, whatever is renamed meanwhile
    path = Path(f"/proc/self/fd/{entry.parent}/{entry.name}")
    try:
        return digest.read_content(path)[0].digest
    except OSError:
        return None


def _walk_trainer_files(root: int, budget: Budget) -> Iterator[TreeEntry]:
    """The files and links in an output folder that have names a trainer gives."""
    for entry in trees.walk(root, budget, _is_trainer_folder):
        if stat.S_ISLNK(entry.status.st_mode):
            if layout.is_file(entry.name) or layout.is_folder(entry.name):
                yield entry
        elif stat.S_ISREG(entry.status.st_mode) and layout.is_file(entry.name):
            yield entry


def _is_trainer_folder(entry: TreeEntry) -> bool:
    if "/" in entry.path or layout.is_folder(entry.name):
        return True
    # PEFT names the folder of an adapter after the adapter
    return _holds_adapter(entry)


def _holds_adapter(entry: TreeEntry) -> bool:
    try:
        with trees.enter_folder(entry.name, entry.parent) as folder:
            os.stat("adapter_config.json", dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True
