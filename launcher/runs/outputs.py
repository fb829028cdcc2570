"""Which folders the runs of this machine write into, and which lie inside or above one of them.

Leases in output folders tell of every run, of any user and machine: those above a folder lie on
its path, those below are searched for. The state folder also has a list, one line a run, which is
read in milliseconds where ten thousand manifests take seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from launcher import files
from launcher.errors import not_ready
from launcher.lazy_dataclass import dataclass
from launcher.machine import trees
from launcher.machine.trees import Budget
from launcher.paths import resolve_path
from launcher.runs import lease, rundir
from launcher.runs.lease import Lease
from launcher.runs.rundir import RunFolder

_LIST = "outputs.jsonl"
_MAX_LIST_BYTES = 2**26  # three hundred thousand runs
CATCH_UP_S = 0.5  # seconds that a start may take to read manifests that are not on the list yet
START_NAMES = 20_000  # names below an output folder that a start looks at
START_S = 1.0  # seconds for that
# `output` near the beginning of a manifest, as `files.write_json` writes it
_OUTPUT = re.compile(rb'^  "output": ("(?:[^"\\]|\\.)*"|null),?$', re.MULTILINE)
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another run whose output lies `where` of a folder; `live` if it trains, or may train, now."""

    output: Path
    run: str
    where: str
    live: bool

    @property
    def name(self) -> str:
        return Path(self.run).name or "another run"

    @property
    def gone(self) -> bool:
        """Whether its run folder was removed: only its lease tells of it."""
        return not os.path.isdir(self.run)


@dataclass(frozen=True, slots=True)
class _ListedRun:
    """A line of the list: a run folder, its canonical output, and its name in the index of runs."""

    run: str
    output: str | None
    entry: str


def _make_row(run: str, output: str | None) -> _ListedRun:
    return _ListedRun(run, output, rundir.name_entry(Path(run)))


def register_output(run: Path, output: str | None) -> None:
    """Add a run to the list, with the output of its manifest."""
    _append_rows([_make_row(str(run.absolute()), _resolve_output(output))])


def _resolve_output(output: str | None) -> str | None:
    if output is None:
        return None
    return str(resolve_path(Path(output)))


def _append_rows(rows: Iterable[_ListedRun]) -> None:
    lines = ""
    for row in rows:
        lines += json.dumps([row.run, row.output, row.entry]) + "\n"
    folder = rundir.find_state_folder()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # without a writable state folder the next start reads the manifests again
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LIST, flags, 0o600)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)


class _OutputsCache:
    """The last answer of `map_outputs`: one command may ask for several stages."""

    changed: tuple[int | None, ...] = ()
    outputs: Mapping[str, str] = {}
    spent_s: float = 0.0  # seconds on manifests, over all questions of this command


_cache = _OutputsCache()


def map_outputs(*, seconds: float | None = CATCH_UP_S) -> Mapping[str, str]:
    """The canonical output folder of every run that has one, by its run folder.

    Runs that are not on the list are read from their manifests, newest first, for at most `seconds`
    (None: all of them); the next call continues.
    """
    changed = _read_change_stamp()
    if changed == _cache.changed:
        return _cache.outputs
    rows = _read_list()
    started = time.monotonic()
    allowed_s = math.inf
    if seconds is not None:
        allowed_s = seconds - _cache.spent_s
    added = []
    complete = True
    for run in _find_unlisted_runs(rows):
        if time.monotonic() - started > allowed_s:
            complete = False
            break
        added.append(_make_row(run, _read_output(run)))
    _cache.spent_s += time.monotonic() - started
    if added:
        _append_rows(added)
        changed = _read_change_stamp()
    _cache.outputs = {row.run: row.output for row in [*rows, *added] if row.output is not None}
    _cache.changed = changed if complete else ()
    return _cache.outputs


def _read_change_stamp() -> tuple[int | None, ...]:
    """Another value whenever a run has started since, in this folder or elsewhere."""
    state = rundir.find_state_folder()
    root = rundir.find_runs_root()
    stamp: list[int | None] = [hash(str(state)), hash(str(root))]
    for path in (state / _LIST, state / "runs", root):
        try:
            status = os.stat(path)
        except OSError:
            stamp.append(None)
        else:
            stamp += [status.st_mtime_ns, status.st_size]
    return tuple(stamp)


def _read_list() -> list[_ListedRun]:
    """The last line of each run."""
    rows: dict[str, _ListedRun] = {}
    try:
        raw = files.read_bytes(rundir.find_state_folder() / _LIST, _MAX_LIST_BYTES)
    except OSError:
        return []
    for line in raw.splitlines():
        # a torn line is skipped
        with contextlib.suppress(ValueError, RecursionError):
            row = _parse_row(json.loads(line))
            if row is not None:
                rows[row.run] = row
    return list(rows.values())


def _parse_row(line: object) -> _ListedRun | None:
    if not isinstance(line, list) or len(line) != 3:
        return None
    run, output, entry = line
    if not isinstance(run, str) or not isinstance(entry, str):
        return None
    if not isinstance(output, str):
        output = None
    return _ListedRun(run, output, entry)


def _find_unlisted_runs(rows: Iterable[_ListedRun]) -> Iterator[str]:
    """Run folders that are not on the list, newest first: of the runs folder, then of the index."""
    listed_runs = {row.run for row in rows}
    listed_entries = {row.entry for row in rows}
    root = rundir.find_runs_root()
    for name in reversed(files.list_names(root)):
        run = f"{root}/{name}"
        if run not in listed_runs:
            listed_entries.add(rundir.name_entry(Path(run)))
            yield run
    index = rundir.find_state_folder() / "runs"
    for name in reversed(files.list_names(index)):
        if name not in listed_entries:
            with contextlib.suppress(OSError):
                yield os.fsdecode(files.read_bytes(index / name))


def _read_output(run: str) -> str | None:
    """The canonical output of a run, from the beginning of its manifest if that has it."""
    try:
        with files.open_regular(Path(run, "run.json"), 0) as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return None
    match = _OUTPUT.search(head)
    if match is not None:
        with contextlib.suppress(ValueError):
            return _resolve_output(json.loads(match[1]))
    output = rundir.read_manifest(RunFolder(Path(run))).output
    if output is None:
        return None
    return _resolve_output(str(output))


def find_neighbours(
    output: Path, own: Path, *, budget: Budget | None = None, seconds: float | None = CATCH_UP_S
) -> list[Neighbour]:
    """Other runs whose output is `output`, or lies inside or above it; live ones first.

    `own` is the run folder that `output` belongs to. `budget` limits the search for leases below,
    `seconds` that in manifests. Outputs that were removed do not count.
    """
    place = resolve_path(output)
    budget = budget or Budget(names=START_NAMES, seconds=START_S)
    candidates = [
        *_find_leased_above(place),
        *_find_leased_below(place, budget),
        *_find_listed_neighbours(place, seconds),
    ]
    neighbours: dict[tuple[str, str], Neighbour] = {}
    for neighbour in candidates:
        if _is_same_run(neighbour.run, own):
            continue
        key = (neighbour.name, str(neighbour.output))
        if key not in neighbours or neighbour.live:
            neighbours[key] = neighbour
    return sorted(neighbours.values(), key=_order_live_first)


def _order_live_first(neighbour: Neighbour) -> tuple[bool, str]:
    return not neighbour.live, str(neighbour.output)


def _is_same_run(run: str, own: Path) -> bool:
    # a run folder that is moved keeps its name
    return Path(run).name == own.name


def _find_leased_above(place: Path) -> Iterator[Neighbour]:
    yield from _find_leased_in(place, "here")
    for above in place.parents:
        yield from _find_leased_in(above, "above")


def _find_leased_below(place: Path, budget: Budget) -> Iterator[Neighbour]:
    """Breadth first, on the file system of `place`, without following links."""
    try:
        device = os.lstat(place).st_dev
    except OSError:
        return
    waiting = deque([place])
    while waiting:
        folder = waiting.popleft()
        if folder != place:
            yield from _find_leased_in(folder, "inside")
        for below in _list_folders(folder, budget):
            with contextlib.suppress(OSError):
                if os.lstat(below).st_dev == device:
                    waiting.append(below)


def _list_folders(folder: Path, budget: Budget) -> list[Path]:
    folders = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not budget.allows():
                break
            if entry.is_dir(follow_symlinks=False):
                folders.append(folder / entry.name)
    return folders


def _find_leased_in(output: Path, where: str) -> Iterator[Neighbour]:
    """The runs that have leases in a folder; only the newest can be live."""
    newest = lease.find_newest_lease(output)
    if newest is None:
        return
    for each in lease.list_leases(output):
        live = each.path == newest.path and lease.explain_hold(newest) is not None
        yield Neighbour(output=output, run=each.run, where=where, live=live)


def _find_listed_neighbours(place: Path, seconds: float | None) -> Iterator[Neighbour]:
    name = place.name.casefold()
    for run, output in map_outputs(seconds=seconds).items():
        where = _compare_places(output, str(place))
        # a file system may ignore case
        may_be_same = where is None and output.casefold().endswith(name)
        if may_be_same and trees.is_same_place(Path(output), place):
            where = "here"
        if where is None or not os.path.isdir(output):
            continue
        # the list may be outdated: the run may be gone, or write elsewhere since
        current = rundir.read_manifest(RunFolder(Path(run))).output
        if current is None or str(resolve_path(current)) != output:
            continue
        yield Neighbour(output=Path(output), run=run, where=where, live=False)


def _compare_places(output: str, place: str) -> str | None:
    """Where a canonical folder lies of another; None if neither contains the other."""
    if output == place:
        return "here"
    if output.startswith(f"{place.rstrip('/')}/"):
        return "inside"
    if place.startswith(f"{output.rstrip('/')}/"):
        return "above"
    return None


def require_apart(output: Path, own: Path) -> None:
    """Raise NotReady if another run trains inside or above an output folder now."""
    for neighbour in find_neighbours(output, own, seconds=0.0):
        if neighbour.live and neighbour.where != "here":
            message = f"the run {neighbour.name} trains into {neighbour.output}, "
            message += f"which lies {neighbour.where} {output}"
            help = f"wait for it, stop it (launch stop {neighbour.name}), "
            help += "or choose another output_dir"
            raise not_ready("run-is-live", message, help, file=neighbour.run)


def list_leases_of_run(output: Path, own: Path) -> list[Lease]:
    """The leases that a run has in an output folder, oldest first."""
    return [each for each in lease.list_leases(output) if _is_same_run(each.run, own)]
