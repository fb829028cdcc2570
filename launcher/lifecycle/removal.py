"""What `launch rm` deletes -> `Removal`: the files that the records say a run wrote, and nothing else.

Records name files, not folders. A file that is not in them, or is no longer what they say, is kept and reported;
a folder goes only once it is empty. No link is followed and no mount point crossed, and each file is compared once
more right before it is deleted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.artifacts import digest, layout
from launcher.errors import NotReady, UsageError, not_ready, usage
from launcher.machine import locks, trees
from launcher.machine.sizes import sized
from launcher.machine.trees import Budget, TreeEntry
from launcher.paths import canonical, exists
from launcher.planning import checksums
from launcher.report import overview
from launcher.runs import evaluation, inventory, lease, outputs, rundir, runner
from launcher.runs.inventory import FileState
from launcher.runs.rundir import RunFolder

_LIVE = ("running", "orphaned", "queued", "unknown")
_NAMES, _SECONDS = 200_000, 30.0  # names that are looked at below one folder, and for how long
_SHOWN = 3  # names of what is kept
CLOCK_NS = 2 * 10**9  # by how much the times of a record, which are whole seconds, may be off
# what launch, the probe and Slurm call their files in a run folder, or in that of a pipeline, bench, ladder or tune
_RECORD = re.compile(
    r"[\w.-]+\.(?:json|jsonl|log|mark|html|yaml|yml|sh|limit|stacks\.txt)\Z"
    r"|lock\Z|\.lock\Z|\.reserve\Z|\.room\Z|\.[\w.-]+\.[0-9a-f]{12}\Z"
)
_RECORD_FOLDERS = re.compile(r"probe\Z|node\d+\Z")
_MODELS = "models"  # where a bench or ladder puts the models of its runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """A file to delete, and what it must still be by then."""

    path: str
    state: FileState


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Files below one folder, `root`, whose `inode` it must still have; `kept` are names with the reason."""

    root: Path
    inode: int
    doomed: tuple[Doomed, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    unsure: bool = False

    @property
    def size(self) -> int:
        return sum(one.state.size for one in self.doomed)

    def lines(self) -> Iterator[str]:
        """What will go: a line for the folder itself, and one for each folder in it."""
        counts = Counter[str]()
        sizes = Counter[str]()
        for one in self.doomed:
            top, _, below = one.path.partition("/")
            name = top if below else ""
            counts[name] += 1
            sizes[name] += one.state.size
        for name in sorted(counts):
            files = "1 file" if counts[name] == 1 else f"{counts[name]} files"
            yield f"{self.root / name} ({files}, {sized(sizes[name])})"

    def kept_lines(self) -> Iterator[str]:
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = " or more" if self.unsure else ""
            count = f"{len(names)}{more} file{'s' if len(names) > 1 or more else ''}"
            shown = ", ".join(names[:_SHOWN])
            if len(names) > _SHOWN:
                shown += ", ..."
            yield f"kept in {self.root}: {count} {reason} ({shown})"


_NOT_WRITTEN = "that this run did not write"
_CHANGED = "that changed after this run wrote it"
_CLOSED = "behind a mount point, or that cannot be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Everything that goes with a run, the output folders first and its records last."""

    folder: RunFolder
    runs: tuple[RunFolder, ...]
    parts: tuple[Deletion, ...]

    @property
    def roots(self) -> list[Path]:
        """The run folder, then the output folders."""
        return [part.root for part in reversed(self.parts)]

    def lines(self) -> list[str]:
        return [line for part in reversed(self.parts) for line in part.lines()]

    def kept_lines(self) -> list[str]:
        return [line for part in reversed(self.parts) for line in part.kept_lines()]


def require_over(folder: RunFolder) -> None:
    """Raise NotReady where the run, or any of a pipeline, bench, ladder or tune, trains, waits or may train unseen."""
    for run in [folder, *rundir.members(folder.path)]:
        state = overview.read_state(run)
        begins = any(lease.is_locked(run.path / lock) for lock in ("lock", ".lock"))
        measured = lease.is_locked(evaluation.folder_of(run).path / ".lock")
        if state in _LIVE or begins or measured:
            now = state if state in _LIVE else "being started"
            if measured:
                now = "being evaluated"
            raise not_ready("run-is-live", f"{run.path.name} is {now}", f"launch stop {run.path.name}")


def plan(folder: RunFolder, *, model: bool) -> Removal:
    """What would go: the records, with `model` what the run wrote into its output too.

    Raises NotReady where it runs, or another run trains inside or above; UsageError where a folder is not this
    run's alone.
    """
    require_over(folder)
    _require_own_folder(folder.path)
    inner = _inner_runs(folder)
    runs = (folder, *inner)
    _require_no_others(folder.path, runs, inside_only=True)
    if not model:
        _require_no_model_inside(folder)
    parts = []
    for run in runs if model else ():
        if run != folder and not _is_output_inside(folder, run):
            continue
        part = _output_part(run, runs)
        if part is not None:
            parts.append(part)
    doomed_inside = _inside(folder.path, parts)
    parts.append(_records(folder, doomed_inside))
    return Removal(folder=folder, runs=runs, parts=tuple(parts))


def _inner_runs(folder: RunFolder) -> list[RunFolder]:
    """The runs that lie in the folder of a bench, ladder or tune."""
    return [RunFolder(run.path) for run in rundir.newest_first(folder.path)]


def _is_output_inside(folder: RunFolder, run: RunFolder) -> bool:
    output = rundir.read_manifest(run).output
    return output is not None and canonical(output).is_relative_to(canonical(folder.path))


def _require_own_folder(path: Path) -> None:
    """Raise UsageError where a folder is a link, or another user's."""
    if os.path.islink(path):
        raise usage("output-kept", f"{path} is a link to {os.readlink(path)}", "delete the link by hand")
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
    if canonical(output).is_relative_to(canonical(folder.path)):
        raise usage("output-kept", f"the model is in the run folder: {output}", "--model")


def _require_no_others(place: Path, runs: Iterable[RunFolder], *, inside_only: bool = False) -> None:
    """Raise where the output of a run that is none of `runs` lies in a folder, or above it."""
    own = [run.path.name for run in runs]
    budget = Budget(names=_NAMES, seconds=_SECONDS)
    for other in outputs.neighbours(place, Path(own[0]), budget=budget, seconds=None):
        if other.name in own or (inside_only and other.where != "inside"):
            continue
        if other.live:
            message = f"the run {other.name} trains into {other.output}"
            if other.where != "here":
                message += f", which lies {other.where} {place}"
            raise not_ready("run-is-live", message, f"launch stop {other.name}", file=other.run)
        if other.where != "inside" and other.gone:
            # it has been removed, and its output left as it is
            continue
        raise _shared(place, other)


def _shared(place: Path, other: outputs.Neighbour) -> UsageError:
    if other.where == "here":
        help = f"launch rm {other.name} removes that run, and keeps the output"
        return usage("output-kept", f"{place} is the output of {other.name} too", help)
    message = f"{other.output}, the output of {other.name}, lies {other.where} {place}"
    help = f"move {other.output} elsewhere, or delete it by hand"
    if other.where == "above":
        help = f"launch rm {other.name} removes that run first, and keeps its output"
    return usage("output-kept", message, help)


def _output_part(run: RunFolder, runs: tuple[RunFolder, ...]) -> Deletion | None:
    """What a run wrote into its output folder; None where that is gone, or there never was one."""
    manifest = rundir.read_manifest(run)
    if manifest.output is None or not exists(manifest.output):
        return None
    output = manifest.output
    place = canonical(output)
    if _is_working_folder_in(place):
        raise usage("output-kept", f"{output} holds more than this model: the working folder", "leave it first: cd /")
    _require_own_folder(place)
    _require_no_others(place, runs)
    lease.require_free(output)
    written, reason = _written(run, output, place)
    return _sorted_out(run, place, written, reason)


def _is_working_folder_in(place: Path) -> bool:
    try:
        return canonical(Path.cwd()).is_relative_to(place)
    except OSError:
        return False


def _written(run: RunFolder, output: Path, place: Path) -> tuple[dict[str, list[FileState]], str]:
    """By path every state in which the attempts of a run left a file; and why others are kept."""
    written: dict[str, list[FileState]] = {}
    reason = _NOT_WRITTEN
    inode = os.lstat(place).st_ino
    for attempt in range(1, run.attempts() + 1):
        inventory.end(run, attempt, late=True)
        record = inventory.read(run, attempt)
        if record is None:
            states = _by_time(run, attempt, output, place)
        elif Path(record.output) != place or record.inode != inode:
            states = {}
            reason = f"in a folder that is not the one that this run wrote into, {record.output},"
        else:
            states = dict(record.written or {})
        for path, state in states.items():
            written.setdefault(path, []).append(state)
    return written, reason


def _by_time(run: RunFolder, attempt: int, output: Path, place: Path) -> dict[str, FileState]:
    """What an attempt without an inventory, of an older launch, must have written: names and times tell."""
    if os.path.islink(output):
        return {}
    first_ns, last_ns = _times(run, attempt)

    def fits(state: FileState) -> bool:
        return not state.link and first_ns - CLOCK_NS <= state.mtime_ns <= last_ns + CLOCK_NS

    with contextlib.suppress(OSError):
        return inventory.trained_within(place, fits)
    return {}


def _times(run: RunFolder, attempt: int) -> tuple[int, int]:
    """When an attempt began and ended, in ns; an empty stretch of time where nothing tells."""
    ended = runner.recorded(run, attempt)
    if ended is not None:
        return _ns(ended.started, 0), _ns(ended.ended, -CLOCK_NS * 3)
    began = rundir.read_kept_manifest(run, attempt) or rundir.read_manifest(run)
    if began.attempt != attempt or began.created is None:
        return 0, -CLOCK_NS * 3
    return _ns(began.created, 2**62), inventory.last_sign_of_life(run, attempt)


def _ns(text: str, unknown: int) -> int:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return unknown
    return int(moment.timestamp()) * 10**9


def _sorted_out(run: RunFolder, place: Path, written: Mapping[str, list[FileState]], reason: str) -> Deletion:
    """Every file below an output folder: to delete, or kept."""
    sums = checksums.read(run)
    doomed = []
    kept = {}
    names = list(_leases(run, place))
    own = {one.path for one in names}
    budget = Budget(names=_NAMES, seconds=_SECONDS)
    with _opening(place), trees.opened(place) as root:
        inode = os.fstat(root).st_ino
        for entry in trees.walk(root, budget):
            if entry.closed:
                kept[f"{entry.path}/"] = _CLOSED
            if entry.is_folder or entry.path in own:
                continue
            states = written.get(entry.path, [])
            if not states:
                kept[entry.path] = reason
            elif entry.status.st_uid == os.geteuid() and any(_is_unchanged(entry, one, sums) for one in states):
                doomed.append(Doomed(path=entry.path, state=inventory.of_status(entry.status)))
            else:
                kept[entry.path] = _CHANGED
    doomed += names
    return Deletion(root=place, inode=inode, doomed=tuple(doomed), kept=kept, unsure=budget.spent)


@contextlib.contextmanager
def _opening(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_ready("not-removed", f"it cannot be read: {error.strerror}", file=str(place)) from None


def _is_unchanged(entry: TreeEntry, recorded: FileState, sums: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a file is what the run left: untouched since, or touched and of the same content."""
    now = inventory.of_status(entry.status)
    if not now.is_same(recorded):
        return False
    if now.ctime_ns == recorded.ctime_ns:
        return True
    # its mode or its links changed, or somebody wrote into it and set the time back
    if recorded.digest is not None:
        return inventory.content_of(entry) == recorded.digest
    top, _, below = entry.path.partition("/")
    known = sums.get(top, {}).get(below)
    return known is not None and _whole_digest(entry) == known


def _whole_digest(entry: TreeEntry) -> str | None:
    try:
        return digest.read(Path(f"/proc/self/fd/{entry.parent}/{entry.name}"), whole_below=2**63)[0].digest
    except OSError:
        return None


def _leases(run: RunFolder, place: Path) -> Iterator[Doomed]:
    """The leases of a run in its output folder with the manifests beside them; lock and digests go with the last."""
    own = outputs.leases_of(place, run.path)
    paths = [path for one in own for path in (one.path, one.manifest)]
    if own and len(own) == len(lease.all_of(place)):
        paths += [own[0].lock, checksums.beside_lease(place)]
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                yield Doomed(path=str(path.relative_to(place)), state=inventory.of_status(status))


def _inside(place: Path, parts: Iterable[Deletion]) -> set[str]:
    """Paths below a run folder that belong to an output folder inside of it."""
    whole = canonical(place)
    found = set[str]()
    for part in parts:
        if part.root.is_relative_to(whole):
            prefix = part.root.relative_to(whole)
            found.update(str(prefix / path) for path in (*part.kept, *(one.path for one in part.doomed)))
    return found


def _records(folder: RunFolder, elsewhere: set[str]) -> Deletion:
    """The files of launch's own in a run folder, or that of a pipeline, bench, ladder or tune."""
    doomed = []
    kept = {}
    place = canonical(folder.path)
    budget = Budget(names=_NAMES, seconds=_SECONDS)
    with _opening(place), trees.opened(place) as root:
        inode = os.fstat(root).st_ino
        for entry in trees.walk(root, budget):
            if entry.closed:
                kept[f"{entry.path}/"] = _CLOSED
            if entry.is_folder or entry.path in elsewhere:
                continue
            own = stat.S_ISREG(entry.status.st_mode) and entry.status.st_uid == os.geteuid()
            if own and _is_record(place, entry.path):
                doomed.append(Doomed(path=entry.path, state=inventory.of_status(entry.status)))
            else:
                kept[entry.path] = _NOT_WRITTEN
    # with the manifest the run can be removed again, where this is cut short
    doomed.sort(key=lambda one: one.path.endswith("run.json"))
    return Deletion(root=place, inode=inode, doomed=tuple(doomed), kept=kept, unsure=budget.spent)


def _is_record(place: Path, path: str) -> bool:
    *folders, name = path.split("/")
    if folders and exists(place / folders[0] / "run.json"):
        folders = folders[1:]
    if folders[:1] == [evaluation.FOLDER]:
        # made for what the command of an evaluation writes
        return True
    return all(map(_RECORD_FOLDERS.match, folders)) and _RECORD.match(name) is not None


def carry_out(removal: Removal) -> list[str]:
    """Delete what was planned; returns what was kept although it was to go, a line each.

    Raises NotReady where a run began meanwhile, or something cannot be deleted.
    """
    with _held(removal):
        return [line for part in removal.parts for line in _delete(part)]


@contextlib.contextmanager
def _held(removal: Removal) -> Iterator[None]:
    """Keep every start out meanwhile, by the locks that a start takes."""
    files = [run.lock for run in removal.runs]
    files += [part.root / lease.FOLDER / "lock" for part in removal.parts[:-1]]
    with contextlib.ExitStack() as stack:
        require_over(removal.folder)
        for file in files:
            with contextlib.suppress(OSError):
                descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
                stack.callback(os.close, descriptor)
                if locks.locked(descriptor, seconds=locks.GLANCE_S) is False:
                    name = removal.folder.path.name
                    raise not_ready("run-is-live", f"{name} is being started", f"launch stop {name}")
        yield


def _delete(part: Deletion) -> Iterator[str]:
    """Delete the files of one folder, then what is empty in it, then itself; yields what was kept after all."""
    try:
        with trees.opened(part.root) as root:
            if os.fstat(root).st_ino != part.inode:
                yield f"kept {part.root}: another folder took its place meanwhile"
                return
            for one in part.doomed:
                if (reason := _unlink(root, one)) is not None:
                    yield f"kept {part.root / one.path}: {reason}"
            _remove_empty(root, part)
        with trees.opened(part.root.parent) as parent:
            if os.stat(part.root.name, dir_fd=parent, follow_symlinks=False).st_ino == part.inode:
                with contextlib.suppress(OSError):
                    os.rmdir(part.root.name, dir_fd=parent)
    except OSError as error:
        raise _not_removed(part.root, error) from None


def _not_removed(path: Path, error: OSError) -> NotReady:
    message = f"it cannot be removed: {error.strerror}"
    return not_ready("not-removed", message, "delete it by hand", file=str(path))


def _unlink(root: int, one: Doomed) -> str | None:
    """Delete a file that is still what it was; why it was kept, where it is not."""
    *folders, name = one.path.split("/")
    with contextlib.ExitStack() as stack:
        parent = root
        try:
            for folder in folders:
                parent = stack.enter_context(trees.entered(folder, parent))
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except trees.Foreign as error:
            return f"{error.filename}: {error.strerror}"
        now = inventory.of_status(status)
        if not now.is_same(one.state) or now.ctime_ns != one.state.ctime_ns:
            return "it changed meanwhile"
        os.unlink(name, dir_fd=parent)
    return None


def _remove_empty(root: int, part: Deletion) -> None:
    """Remove the folders that are empty now: those that files went from, and those that only a run makes."""
    emptied = set[str]()
    for one in part.doomed:
        emptied.update(str(above) for above in Path(one.path).parents)

    def trained(path: str) -> bool:
        top = path.split("/", 1)[0]
        if path in emptied or layout.is_checkpoint(top) or path == _MODELS:
            return True
        return _RECORD_FOLDERS.match(path) is not None

    for entry in trees.walk(root, Budget(names=_NAMES, seconds=_SECONDS)):
        if entry.is_folder and trained(entry.path):
            # one that still holds something stays
            with contextlib.suppress(OSError):
                os.rmdir(entry.name, dir_fd=entry.parent)
