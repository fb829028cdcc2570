"""What `launch rm` deletes -> `Removal`: the files that a run wrote by its records, no others.

Records name files, not folders. A file that is not in them, or is no longer what they say, is kept
and reported; a folder goes only once it is empty. No link is followed and no mount point crossed,
and each file is compared once more right before it is deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path

from launcher.artifacts import digest, layout
from launcher.errors import NotReady, UsageError, not_ready, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine import locks, trees
from launcher.machine.sizes import format_size
from launcher.machine.trees import Budget, TreeEntry
from launcher.paths import exists, resolve_path
from launcher.planning import checksums
from launcher.report import overview
from launcher.runs import evaluation, inventory, lease, outputs, rundir
from launcher.runs.inventory import FileState
from launcher.runs.rundir import RunFolder

_LIVE = ("running", "orphaned", "queued", "unknown")
_MAX_NAMES = 200_000  # names that are looked at below one folder
_MAX_SECONDS = 30.0  # seconds for that
_MAX_SHOWN = 3  # names of files that are kept
# what launch, the probe and Slurm call their files in a run folder, or in that of a pipeline,
# bench, ladder or tune
_RECORD = re.compile(
    r"[\w.-]+\.(?:json|jsonl|log|mark|html|yaml|yml|sh|limit|stacks\.txt)\Z"
    r"|lock\Z|\.lock\Z|\.reserve\Z|\.room\Z|\.[\w.-]+\.[0-9a-f]{12}\Z"
)
_RECORD_FOLDERS = re.compile(r"probe\Z|node\d+\Z")
_MODELS = "models"  # where a bench or ladder puts the models of its runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """A file to delete, and the state that it must still have by then."""

    path: str
    state: FileState


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Files to delete below the folder `root`, which must still have `inode`.

    `kept` are names with the reason. `unsure`: there were too many files to look at all.
    """

    root: Path
    inode: int
    doomed: tuple[Doomed, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    unsure: bool = False

    @property
    def size(self) -> int:
        return sum(file.state.size for file in self.doomed)

    def lines(self) -> Iterator[str]:
        """A line for the files in the folder itself, and one for each folder in it."""
        counts = Counter[str]()
        sizes = Counter[str]()
        for file in self.doomed:
            folder, _, below = file.path.partition("/")
            if not below:
                folder = ""
            counts[folder] += 1
            sizes[folder] += file.state.size
        for folder in sorted(counts):
            count = _count_files(counts[folder])
            yield f"{self.root / folder} ({count}, {format_size(sizes[folder])})"

    def kept_lines(self) -> Iterator[str]:
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            count = _count_files(len(names))
            if self.unsure:
                count = f"{len(names)} or more files"
            shown = ", ".join(names[:_MAX_SHOWN])
            if len(names) > _MAX_SHOWN:
                shown += ", ..."
            yield f"kept in {self.root}: {count} {reason} ({shown})"


def _count_files(number: int) -> str:
    if number == 1:
        return "1 file"
    return f"{number} files"


def _make_budget() -> Budget:
    return Budget(names=_MAX_NAMES, seconds=_MAX_SECONDS)


_NOT_WRITTEN = "that this run did not write"
_CHANGED = "that changed after this run wrote it"
_CLOSED = "behind a mount point, or that cannot be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What goes with a run: the output folders first, its records last."""

    folder: RunFolder
    runs: tuple[RunFolder, ...]
    parts: tuple[Deletion, ...]

    @property
    def roots(self) -> list[Path]:
        """The run folder, then the output folders."""
        return [part.root for part in reversed(self.parts)]

    def lines(self) -> list[str]:
        lines = list[str]()
        for part in reversed(self.parts):
            lines += part.lines()
        return lines

    def kept_lines(self) -> list[str]:
        lines = list[str]()
        for part in reversed(self.parts):
            lines += part.kept_lines()
        return lines


def require_over(folder: RunFolder) -> None:
    """Raise NotReady if a run, or one of a campaign, trains, waits, or may train out of sight."""
    for run in [folder, *rundir.list_campaign_runs(folder.path)]:
        activity = _describe_activity(run)
        if activity is not None:
            name = run.path.name
            raise not_ready("run-is-live", f"{name} is {activity}", f"launch stop {name}")


def _describe_activity(run: RunFolder) -> str | None:
    """What a run does now; None if it is over."""
    if lease.is_locked(evaluation.find_evaluation_folder(run).path / ".lock"):
        return "being evaluated"
    state = overview.read_state(run)
    if state in _LIVE:
        return state
    if lease.is_locked(run.lock) or lease.is_locked(run.path / ".lock"):
        return "being started"
    return None


def plan_removal(folder: RunFolder, *, model: bool) -> Removal:
    """What would go: the records, and with `model` what the run wrote into its output.

    Raises NotReady if it runs, or another run trains inside or above; UsageError if a folder
    is not this run's alone.
    """
    require_over(folder)
    _require_own_folder(folder.path)
    runs = (folder, *rundir.list_newest_first(folder.path))
    _require_no_others(folder.path, runs, inside_only=True)
    if not model:
        _require_no_model_inside(folder)
    parts = []
    if model:
        for run in runs:
            if run != folder and not _is_output_inside(folder, run):
                continue
            part = _plan_output(run, runs)
            if part is not None:
                parts.append(part)
    parts.append(_plan_records(folder, _find_paths_inside(folder.path, parts)))
    return Removal(folder=folder, runs=runs, parts=tuple(parts))


def _is_output_inside(folder: RunFolder, run: RunFolder) -> bool:
    output = rundir.read_manifest(run).output
    return output is not None and resolve_path(output).is_relative_to(resolve_path(folder.path))


def _require_own_folder(path: Path) -> None:
    """Raise UsageError if a folder is a link, or another user's."""
    if os.path.islink(path):
        raise usage(
            "output-kept", f"{path} is a link to {os.readlink(path)}", "delete the link by hand"
        )
    status = os.lstat(path)
    if status.st_uid != os.geteuid():
        message = f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}"
        raise usage("output-kept", message, "its owner can remove it")


def _require_no_model_inside(folder: RunFolder) -> None:
    output = rundir.read_manifest(folder).output
    if exists(folder.path / _MODELS):
        raise usage("output-kept", f"models are in the folder: {folder.path}/{_MODELS}", "--model")
    if output is None or not exists(output):
        return
    if resolve_path(output).is_relative_to(resolve_path(folder.path)):
        raise usage("output-kept", f"the model is in the run folder: {output}", "--model")


def _require_no_others(
    place: Path, runs: Iterable[RunFolder], *, inside_only: bool = False
) -> None:
    """Raise if the output of a run that is none of `runs` lies in a folder, or above it."""
    own = [run.path.name for run in runs]
    budget = _make_budget()
    for other in outputs.find_neighbours(place, Path(own[0]), budget=budget, seconds=None):
        if other.name in own or (inside_only and other.where != "inside"):
            continue
        if other.live:
            message = f"the run {other.name} trains into {other.output}"
            if other.where != "here":
                message += f", which lies {other.where} {place}"
            raise not_ready("run-is-live", message, f"launch stop {other.name}", file=other.run)
        if other.where != "inside" and other.gone:
            # that run was removed, and its output left as it is
            continue
        raise _report_shared_output(place, other)


def _report_shared_output(place: Path, other: outputs.Neighbour) -> UsageError:
    if other.where == "here":
        help = f"launch rm {other.name} removes that run, and keeps the output"
        return usage("output-kept", f"{place} is the output of {other.name} too", help)
    message = f"{other.output}, the output of {other.name}, lies {other.where} {place}"
    help = f"move {other.output} elsewhere, or delete it by hand"
    if other.where == "above":
        help = f"launch rm {other.name} removes that run first, and keeps its output"
    return usage("output-kept", message, help)


def _plan_output(run: RunFolder, runs: tuple[RunFolder, ...]) -> Deletion | None:
    """What a run wrote into its output folder; None if there is none."""
    manifest = rundir.read_manifest(run)
    if manifest.output is None or not exists(manifest.output):
        return None
    output = manifest.output
    place = resolve_path(output)
    if _is_working_folder_in(place):
        raise usage(
            "output-kept",
            f"{output} holds more than this model: the working folder",
            "leave it first: cd /",
        )
    _require_own_folder(place)
    _require_no_others(place, runs)
    lease.require_free(output)
    written = _read_written(run, place)
    return _sort_files(run, place, written)


def _is_working_folder_in(place: Path) -> bool:
    try:
        return resolve_path(Path.cwd()).is_relative_to(place)
    except OSError:
        return False


@dataclass(slots=True)
class _Written:
    """The states in which the attempts of a run left each file.

    `reason` says why files that are not among them are kept.
    """

    states: dict[str, list[FileState]] = field(default_factory=dict)
    reason: str = _NOT_WRITTEN


def _read_written(run: RunFolder, place: Path) -> _Written:
    written = _Written()
    inode = os.lstat(place).st_ino
    for attempt in range(1, run.attempts() + 1):
        inventory.record_written(run, attempt, late=True)
        record = inventory.read_inventory(run, attempt)
        if record is None:
            continue
        if Path(record.output) != place or record.inode != inode:
            written.reason = "in a folder that is not the one that this run wrote into, "
            written.reason += f"{record.output},"
            continue
        for path, state in (record.written or {}).items():
            written.states.setdefault(path, []).append(state)
    return written


def _sort_files(run: RunFolder, place: Path, written: _Written) -> Deletion:
    """Every file below an output folder: to delete, or kept."""
    sums = checksums.read_checksums(run)
    own_leases = list(_find_lease_files(run, place))
    lease_paths = {file.path for file in own_leases}
    doomed = []
    kept = {}
    budget = _make_budget()
    with _report_unreadable(place), trees.open_tree(place) as root:
        inode = os.fstat(root).st_ino
        for entry in trees.walk(root, budget):
            if entry.closed:
                kept[f"{entry.path}/"] = _CLOSED
            if entry.is_folder or entry.path in lease_paths:
                continue
            states = written.states.get(entry.path)
            if not states:
                kept[entry.path] = written.reason
            elif _is_own(entry) and _is_unchanged(entry, states, sums):
                doomed.append(_make_doomed(entry.path, entry.status))
            else:
                kept[entry.path] = _CHANGED
    doomed += own_leases
    return Deletion(root=place, inode=inode, doomed=tuple(doomed), kept=kept, unsure=budget.spent)


def _is_own(entry: TreeEntry) -> bool:
    return entry.status.st_uid == os.geteuid()


def _make_doomed(path: str, status: os.stat_result) -> Doomed:
    return Doomed(path=path, state=inventory.describe_file(status))


@contextlib.contextmanager
def _report_unreadable(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_ready(
            "not-removed", f"it cannot be read: {error.strerror}", file=str(place)
        ) from None


def _is_unchanged(
    entry: TreeEntry, states: Iterable[FileState], sums: Mapping[str, Mapping[str, object]]
) -> bool:
    """Whether a file has one of the states that the run left it in."""
    return any(_has_state(entry, state, sums) for state in states)


def _has_state(
    entry: TreeEntry, recorded: FileState, sums: Mapping[str, Mapping[str, object]]
) -> bool:
    """Whether nobody wrote into a file since; if its ctime changed, the digest decides."""
    current = inventory.describe_file(entry.status)
    if not current.is_same(recorded):
        return False
    if current.ctime_ns == recorded.ctime_ns:
        return True
    # its mode or its links changed, or somebody wrote into it and set the time back
    if recorded.digest is not None:
        return inventory.digest_file(entry) == recorded.digest
    top, _, below = entry.path.partition("/")
    checksum = sums.get(top, {}).get(below)
    return checksum is not None and _digest_file(entry) == checksum


def _digest_file(entry: TreeEntry) -> str | None:
    path = Path(f"/proc/self/fd/{entry.parent}/{entry.name}")
    try:
        return digest.read_content(path, whole_below=2**63)[0].digest
    except OSError:
        return None


def _find_lease_files(run: RunFolder, place: Path) -> Iterator[Doomed]:
    """The leases of a run and the manifests beside them; lock and checksums go with the last."""
    own = outputs.list_leases_of_run(place, run.path)
    paths = []
    for each in own:
        paths += [each.path, each.manifest]
    if own and len(own) == len(lease.list_leases(place)):
        paths += [own[0].lock, checksums.find_copy_beside_lease(place)]
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                yield _make_doomed(str(path.relative_to(place)), status)


def _find_paths_inside(place: Path, parts: Iterable[Deletion]) -> set[str]:
    """The paths of output folders inside a run folder, relative to that."""
    run_folder = resolve_path(place)
    paths = set[str]()
    for part in parts:
        if part.root.is_relative_to(run_folder):
            prefix = part.root.relative_to(run_folder)
            names = [*part.kept]
            names += [file.path for file in part.doomed]
            paths.update(str(prefix / name) for name in names)
    return paths


def _plan_records(folder: RunFolder, elsewhere: set[str]) -> Deletion:
    """launch's own files in the folder of a run or a campaign, without the paths `elsewhere`."""
    doomed = []
    kept = {}
    place = resolve_path(folder.path)
    budget = _make_budget()
    with _report_unreadable(place), trees.open_tree(place) as root:
        inode = os.fstat(root).st_ino
        for entry in trees.walk(root, budget):
            if entry.closed:
                kept[f"{entry.path}/"] = _CLOSED
            if entry.is_folder or entry.path in elsewhere:
                continue
            is_file = stat.S_ISREG(entry.status.st_mode)
            if is_file and _is_own(entry) and _is_record(place, entry.path):
                doomed.append(_make_doomed(entry.path, entry.status))
            else:
                kept[entry.path] = _NOT_WRITTEN
    # the manifest last: with it, a removal that is cut short can be repeated
    doomed.sort(key=_is_manifest)
    return Deletion(root=place, inode=inode, doomed=tuple(doomed), kept=kept, unsure=budget.spent)


def _is_manifest(file: Doomed) -> bool:
    return file.path.endswith("run.json")


def _is_record(place: Path, path: str) -> bool:
    *folders, name = path.split("/")
    if folders and exists(place / folders[0] / "run.json"):
        folders = folders[1:]
    if folders[:1] == [evaluation.FOLDER]:
        # whatever the command of an evaluation writes
        return True
    return all(map(_RECORD_FOLDERS.match, folders)) and _RECORD.match(name) is not None


def remove(removal: Removal) -> list[str]:
    """Delete what was planned; returns a line for each file that was kept after all.

    Raises NotReady if a run began meanwhile, or something cannot be deleted.
    """
    with _hold_locks(removal):
        lines = list[str]()
        for part in removal.parts:
            lines += _delete_files(part)
        return lines


@contextlib.contextmanager
def _hold_locks(removal: Removal) -> Iterator[None]:
    """Prevent starts meanwhile, by the locks that a start takes."""
    files = [run.lock for run in removal.runs]
    files += [part.root / lease.FOLDER / "lock" for part in removal.parts[:-1]]
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with contextlib.ExitStack() as stack:
        require_over(removal.folder)
        for file in files:
            with contextlib.suppress(OSError):
                descriptor = os.open(file, flags)
                stack.callback(os.close, descriptor)
                if locks.try_lock(descriptor, seconds=locks.GLANCE_S) is False:
                    name = removal.folder.path.name
                    raise not_ready(
                        "run-is-live", f"{name} is being started", f"launch stop {name}"
                    )
        yield


def _delete_files(part: Deletion) -> Iterator[str]:
    """Delete the files of one folder, then empty folders in it, then itself.

    Yields a line for each file that was kept after all.
    """
    try:
        with trees.open_tree(part.root) as root:
            if os.fstat(root).st_ino != part.inode:
                yield f"kept {part.root}: another folder took its place meanwhile"
                return
            for file in part.doomed:
                reason = _unlink_unchanged(root, file)
                if reason is not None:
                    yield f"kept {part.root / file.path}: {reason}"
            _remove_empty(root, part)
        name = part.root.name
        with trees.open_tree(part.root.parent) as parent:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if status.st_ino == part.inode:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=parent)
    except OSError as error:
        raise _report_not_removed(part.root, error) from None


def _report_not_removed(path: Path, error: OSError) -> NotReady:
    message = f"it cannot be removed: {error.strerror}"
    return not_ready("not-removed", message, "delete it by hand", file=str(path))


def _unlink_unchanged(root: int, file: Doomed) -> str | None:
    """Delete a file that still has its state; else returns why it was kept."""
    *folders, name = file.path.split("/")
    with contextlib.ExitStack() as stack:
        parent = root
        try:
            for folder in folders:
                parent = stack.enter_context(trees.enter_folder(folder, parent))
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except trees.Foreign as error:
            return f"{error.filename}: {error.strerror}"
        current = inventory.describe_file(status)
        if not current.is_same(file.state) or current.ctime_ns != file.state.ctime_ns:
            return "it changed meanwhile"
        os.unlink(name, dir_fd=parent)
    return None


def _remove_empty(root: int, part: Deletion) -> None:
    """Remove the empty folders that had files of the run, or that only a run makes."""
    emptied = set[str]()
    for file in part.doomed:
        for above in Path(file.path).parents:
            emptied.add(str(above))
    for entry in trees.walk(root, _make_budget()):
        if not entry.is_folder:
            continue
        if entry.path not in emptied and not _is_made_by_run(entry.path):
            continue
        # one that still holds something stays
        with contextlib.suppress(OSError):
            os.rmdir(entry.name, dir_fd=entry.parent)


def _is_made_by_run(path: str) -> bool:
    top = path.split("/", 1)[0]
    if layout.is_checkpoint(top) or path == _MODELS:
        return True
    return _RECORD_FOLDERS.match(path) is not None
