"""Which folders the runs of this machine write into, and what lies inside or above one of them.

Leases tell it of whatever was trained, by whom and from which machine ever: those above a folder lie on its path,
those below are looked for. The state folder has a list beside, a line a run, which is read in a few milliseconds
where manifests of ten thousand runs would take seconds.
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
from dataclasses import dataclass
from pathlib import Path

from launcher import files
from launcher.errors import not_ready
from launcher.machine import trees
from launcher.machine.trees import Budget
from launcher.paths import canonical
from launcher.runs import lease, rundir
from launcher.runs.lease import Lease
from launcher.runs.rundir import RunFolder

_LIST = "outputs.jsonl"
_LONGEST = 2**26  # bytes of the list that are read: three hundred thousand runs
CATCH_UP_S = 0.5  # seconds that a start may take to read manifests that are not on the list yet
START = (20_000, 1.0)  # names and seconds that a start looks through below an output folder
# how `files.write_json` writes it, near the beginning of a manifest
_OUTPUT = re.compile(rb'^  "output": ("(?:[^"\\]|\\.)*"|null),?$', re.MULTILINE)
_HEAD = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another run whose output lies `where` of a folder; `live` where it trains, or may train, into it now."""

    output: Path
    run: str
    where: str
    live: bool

    @property
    def name(self) -> str:
        return Path(self.run).name or "another run"

    @property
    def gone(self) -> bool:
        """Whether its run folder is no longer there: only its lease tells of it."""
        return not os.path.isdir(self.run)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the list: a run folder, where it writes without links, and what the index of runs calls it."""

    run: str
    output: str | None
    entry: str


def _row(run: str, output: str | None) -> _Row:
    return _Row(run, output, rundir.entry_name(Path(run)))


def enter(run: Path, output: str | None) -> None:
    """Note where a run writes, by its manifest."""
    _append([_row(str(run.absolute()), _canonical(output))])


def _canonical(output: str | None) -> str | None:
    return None if output is None else str(canonical(Path(output)))


def _append(rows: Iterable[_Row]) -> None:
    lines = "".join(json.dumps([row.run, row.output, row.entry]) + "\n" for row in rows)
    folder = rundir.state_folder()
    # a read-only home costs time at the next start
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(folder / _LIST, flags, 0o600)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)


def recorded(*, seconds: float | None = CATCH_UP_S) -> Mapping[str, str]:
    """The output folder of every run that has one, by its run folder; without links in it.

    Runs that are on no list are read from their manifests, the newest first, for so many seconds: the rest the next
    time. None: all of them.
    """
    changed = _changes()
    if changed == _last.changed:
        return _last.found
    rows = _read_list()
    began = time.monotonic()
    allowed = math.inf if seconds is None else seconds - _last.spent
    added = []
    whole = True
    for run in _not_in(rows):
        if time.monotonic() - began > allowed:
            whole = False
            break
        added.append(_row(run, _output_of(run)))
    _last.spent += time.monotonic() - began
    if added:
        _append(added)
        changed = _changes()
    _last.found = {row.run: row.output for row in (*rows, *added) if row.output is not None}
    _last.changed = changed if whole else ()
    return _last.found


class _Last:
    """What was read last: one command may ask for several stages."""

    changed: tuple[int | None, ...] = ()
    found: Mapping[str, str] = {}
    spent: float = 0.0  # seconds on manifests, over all questions of this command


_last = _Last()


def _changes() -> tuple[int | None, ...]:
    """Another value whenever a run was begun since, here or elsewhere."""
    state = rundir.state_folder()
    times: list[int | None] = [hash(str(state)), hash(str(rundir.runs_root()))]
    for path in (state / _LIST, state / "runs", rundir.runs_root()):
        try:
            status = os.stat(path)
        except OSError:
            times.append(None)
        else:
            times += [status.st_mtime_ns, status.st_size]
    return tuple(times)


def _read_list() -> list[_Row]:
    """The last line of each run."""
    rows: dict[str, _Row] = {}
    try:
        raw = files.read_bytes(rundir.state_folder() / _LIST, _LONGEST)
    except OSError:
        return []
    for line in raw.splitlines():
        # a torn line costs that line
        with contextlib.suppress(ValueError, RecursionError):
            row = _parsed(json.loads(line))
            if row is not None:
                rows[row.run] = row
    return list(rows.values())


def _parsed(line: object) -> _Row | None:
    if not isinstance(line, list) or len(line) != 3:
        return None
    run, output, entry = line
    if not isinstance(run, str) or not isinstance(entry, str):
        return None
    return _Row(run, output if isinstance(output, str) else None, entry)


def _not_in(rows: Iterable[_Row]) -> Iterator[str]:
    """Run folders that are on no list, the newest first: of the runs folder here, then of the index."""
    runs = {row.run for row in rows}
    entries = {row.entry for row in rows}
    root = rundir.runs_root()
    for name in reversed(files.names(root)):
        run = f"{root}/{name}"
        if run not in runs:
            entries.add(rundir.entry_name(Path(run)))
            yield run
    index = rundir.state_folder() / "runs"
    for name in reversed(files.names(index)):
        if name not in entries:
            with contextlib.suppress(OSError):
                yield os.fsdecode(files.read_bytes(index / name))


def _output_of(run: str) -> str | None:
    try:
        with files.open_regular(Path(run, "run.json"), 0) as stream:
            head = stream.read(_HEAD)
    except OSError:
        return None
    match = _OUTPUT.search(head)
    if match is not None:
        with contextlib.suppress(ValueError):
            return _canonical(json.loads(match[1]))
    output = rundir.read_manifest(RunFolder(Path(run))).output
    return None if output is None else _canonical(str(output))


def neighbours(
    output: Path, own: Path, *, budget: Budget | None = None, seconds: float | None = CATCH_UP_S
) -> list[Neighbour]:
    """Other runs whose output lies inside or above a folder, or is that folder.

    `own` is the run folder that the folder belongs to. `budget` bounds the search for leases below, `seconds` that
    in manifests. A run whose output is no longer there is none.
    """
    place = canonical(output)
    budget = budget or Budget(names=START[0], seconds=START[1])
    found: dict[tuple[str, str], Neighbour] = {}
    for other in (*_leased_above(place), *_leased_below(place, budget), *_listed(place, seconds)):
        if _same_run(other.run, own):
            continue
        key = (other.name, str(other.output))
        if key not in found or other.live:
            found[key] = other
    return sorted(found.values(), key=lambda one: (not one.live, str(one.output)))


def _same_run(run: str, own: Path) -> bool:
    # a run folder can be moved, and keeps its name
    return Path(run).name == own.name


def _leased_above(place: Path) -> Iterator[Neighbour]:
    for above in (place, *place.parents):
        yield from _of_leases(above, "here" if above == place else "above")


def _leased_below(place: Path, budget: Budget) -> Iterator[Neighbour]:
    """Those nearest to the folder first, on its own file system, through no link."""
    try:
        device = os.lstat(place).st_dev
    except OSError:
        return
    waiting = deque([place])
    while waiting:
        folder = waiting.popleft()
        if folder != place:
            yield from _of_leases(folder, "inside")
        for below in _folders(folder, budget):
            with contextlib.suppress(OSError):
                if os.lstat(below).st_dev == device:
                    waiting.append(below)


def _folders(folder: Path, budget: Budget) -> list[Path]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        for entry in listing:
            if not budget.allows():
                break
            if entry.is_dir(follow_symlinks=False):
                found.append(folder / entry.name)
    return found


def _of_leases(output: Path, where: str) -> Iterator[Neighbour]:
    """The runs that have leases in a folder, each once; only the newest can be live."""
    last = lease.newest(output)
    if last is None:
        return
    for granted in lease.all_of(output):
        live = granted.path == last.path and lease.held(last) is not None
        yield Neighbour(output=output, run=granted.run, where=where, live=live)


def _listed(place: Path, seconds: float | None) -> Iterator[Neighbour]:
    text = str(place)
    name = place.name.casefold()
    for run, output in recorded(seconds=seconds).items():
        where = _relation(output, text)
        # a file system may not tell upper from lower case
        alike = where is None and output.casefold().endswith(name)
        if alike and trees.same_place(Path(output), place):
            where = "here"
        if where is None or not os.path.isdir(output):
            continue
        # the list is a memory of manifests; the run may be gone, or write elsewhere since
        now = rundir.read_manifest(RunFolder(Path(run))).output
        if now is not None and str(canonical(now)) == output:
            yield Neighbour(output=Path(output), run=run, where=where, live=False)


def _relation(output: str, place: str) -> str | None:
    """Where one folder lies of another, by their names without links."""
    if output == place:
        return "here"
    if output.startswith(f"{place.rstrip('/')}/"):
        return "inside"
    if place.startswith(f"{output.rstrip('/')}/"):
        return "above"
    return None


def require_apart(output: Path, own: Path) -> None:
    """Raise NotReady where another run trains inside or above an output folder now."""
    for other in neighbours(output, own, seconds=0.0):
        if other.live and other.where != "here":
            message = f"the run {other.name} trains into {other.output}, which lies {other.where} {output}"
            help = f"wait for it, stop it (launch stop {other.name}), or choose another output_dir"
            raise not_ready("run-is-live", message, help, file=other.run)


def leases_of(output: Path, own: Path) -> list[Lease]:
    """The leases that a run has in an output folder, the oldest first."""
    return [granted for granted in lease.all_of(output) if _same_run(granted.run, own)]
