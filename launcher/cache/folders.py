"""The cache folders on this disk: made for a run, locked while it lives, listed, and cleared.

Each holds a record, `launch-cache.json`, of what its name was derived from, and one small file
per run under `.launch-uses/`, so that nothing is ever written by two. The kernel's lock protects a
folder, and the training process inherits it: a folder that is locked, or was used by a run that is
still alive, is never cleared, nor is one that lacks the record of its own name.
"""

import contextlib
import datetime
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from launcher import files, redaction
from launcher.artifacts.fingerprint import cache_home
from launcher.cache.keys import KINDS, Cache, Input
from launcher.config.durations import format_age
from launcher.errors import not_ready, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec, locks, process, sizes
from launcher.machine.codec import Between, Misfit, Positive
from launcher.machine.sizes import format_size
from launcher.redaction import Redactor
from launcher.runs import rundir, runner
from launcher.runs.record import as_mapping
from launcher.runs.rundir import RunFolder

RECORD = "launch-cache.json"
USES = ".launch-uses"
LOCK = ".launch-lock"
RECORD_VERSION = 1
COLUMNS = ("kind", "size", "age", "last used", "state", "of", "runs", "folder")

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TICK = 0.02  # seconds that the clock of a file system may be behind
# what `Dataset.load_from_disk` needs; written last
# (datasets/arrow_dataset.py::Dataset.save_to_disk[config.DATASET_STATE_JSON_FILENAME])
_DATASET_FILES = ("state.json", "dataset_info.json")
# an entry of a dataset cache
# (dataset_transformation.py::compute_config_hash[return hashlib.sha256])
_ENTRY = re.compile(r"[0-9a-f]{10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecord:
    """A `Cache` as it was written to disk, where anybody may have edited it."""

    launch_cache: int = 0
    kind: str = ""
    path: str = ""
    digest: str = ""
    inputs: tuple[Input, ...] = ()
    stage: str | None = None
    backend: str | None = None
    key: Mapping[str, Any] = field(default_factory=dict)
    created: str | None = None

    def is_valid(self) -> bool:
        is_known = self.launch_cache == RECORD_VERSION and self.kind in KINDS
        return is_known and len(self.digest) == 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """That a run used a cache folder, as a file in it; `time` in seconds since 1970.

    `cache` is the record of the `Cache` at that time.
    """

    run: str
    time: Annotated[float, Between(0, 10**11)]
    attempt: Positive = 1
    cache: CacheRecord = field(default_factory=CacheRecord)

    @property
    def owner(self) -> tuple[object, ...]:
        """What kind of cache of what kind of stage it is."""
        return self.cache.kind, self.cache.stage, self.cache.backend


@dataclass(frozen=True, slots=True)
class CacheFolder:
    path: Path
    record: CacheRecord

    @property
    def kind(self) -> str:
        return self.record.kind

    def uses(self) -> list[CacheUse]:
        """Which run used it when, oldest first."""
        uses = []
        for path in _list_paths(self.path / USES):
            with contextlib.suppress(Misfit):
                uses.append(codec.read_record(CacheUse, rundir.read_json(path)))
        return sorted(uses, key=lambda use: use.time)

    def used(self) -> float:
        """When a run last began with it, in seconds since 1970."""
        times = [use.time for use in self.uses()]
        return max([*times, self._parse_created()])

    def _parse_created(self) -> float:
        """In seconds since 1970; 0 if the record does not say."""
        try:
            return datetime.datetime.fromisoformat(self.record.created or "").timestamp()
        except (ValueError, OverflowError, OSError):
            return 0.0

    def entries(self) -> list[str]:
        return list_entries(self.path, self.kind)

    def live(self) -> bool:
        # one look at all processes, however many runs have used it
        marks = lru_cache(maxsize=1)(process.find_live_marks)
        runs = {use.run for use in self.uses()}
        return any(runner.is_alive(Path(run), marks) for run in runs)

    def size(self) -> int:
        return sizes.measure_size(self.path)

    def row(self) -> dict[str, Any]:
        """One folder for `launch cache list`; sizes in bytes, ages in seconds."""
        now = time.time()
        record = self.record
        entries = self.entries()
        state = "filled" if entries else "empty"
        if self.live():
            state = "in use"
        of = [source.name for source in record.inputs if source.role in ("data", "model")]
        runs = [Path(use.run).name for use in self.uses()]
        return {
            "kind": self.kind,
            "folder": str(self.path),
            "size": self.size(),
            "created": record.created,
            "age": max(0.0, now - self._parse_created()),
            "last used": max(0.0, now - self.used()),
            "stage": record.stage,
            "backend": record.backend,
            "state": state,
            "entries": entries,
            "of": list(dict.fromkeys(of)),
            "runs": list(dict.fromkeys(runs)),
        }


def list_entries(folder: Path, kind: str) -> list[str]:
    """Upstream's own keys that are complete in a cache folder of a kind."""
    return sorted(path.name for path in _list_paths(folder) if _is_complete_entry(path, kind))


def describe_row(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of `launch cache list` for people."""
    texts = {name: str(value) for name, value in row.items()}
    texts["size"] = format_size(row["size"])
    for name in ("age", "last used"):
        texts[name] = format_age(row[name])
    texts["of"] = ", ".join(row["of"]) or "-"
    texts["runs"] = "-"
    runs = row["runs"]
    if runs:
        texts["runs"] = runs[-1]
    if len(runs) > 1:
        texts["runs"] += f" and {len(runs) - 1} more"
    return texts


@contextlib.contextmanager
def lock(
    caches: Sequence[Cache], run: RunFolder, attempt: int, *, redactor: Redactor | None = None
) -> Iterator[tuple[int, ...]]:
    """Make the folders and lock them for an attempt; yields descriptors for the started process.

    What an earlier run left unfinished in them is removed first, unless another run uses them now:
    upstream would take a half-written set for a finished one and crash. Raises NotReady if a folder
    cannot be written.
    """
    redactor = redactor or redaction.find_process_secrets()
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        for cache in caches:
            try:
                descriptor = _hold_folder(cache)
                if descriptor is not None:
                    stack.callback(os.close, descriptor)
                    descriptors.append(descriptor)
                _record_use(cache, run, attempt, redactor)
            except OSError as error:
                message = f"the cache folder cannot be written: {error.strerror}"
                help = "set LAUNCH_CACHE to a writable folder"
                file = str(cache.path)
                raise not_ready("cache-not-writable", message, help, file=file) from None
        yield tuple(descriptors)


def _hold_folder(cache: Cache) -> int | None:
    """Make the folder and take a shared lock on it; None on a disk without locks."""
    path = cache.path / LOCK
    while True:
        cache.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if locks.try_lock(lock):
            folder = open_folder(cache.path)
            # workers may outlive the process that holds the lock
            if folder is None or not folder.live():
                _discard_unfinished(cache)
        if locks.try_lock(lock, shared=True, seconds=math.inf) is None:
            os.close(lock)
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(lock)):
                return lock
        # the folder was cleared in between
        os.close(lock)


def _record_use(cache: Cache, run: RunFolder, attempt: int, redactor: Redactor) -> None:
    described = redactor.redact(cache.as_json())
    uses = cache.path / USES
    uses.mkdir(exist_ok=True)
    if open_folder(cache.path) is None:
        record = {"launch_cache": RECORD_VERSION, "created": rundir.format_utc_now(), **described}
        files.write_json(cache.path / RECORD, record)
    path = str(run.path.absolute())
    use = {"run": path, "time": time.time(), "attempt": attempt, "cache": described}
    # paths hold slashes, and may be longer than a name
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    files.write_json(uses / f"{name}-{attempt}.json", use)
    rundir.register("caches", cache.path)


def _discard_unfinished(cache: Cache) -> None:
    """Remove what was begun and never finished; only for who holds the folder alone."""
    for path in _list_paths(cache.path):
        if cache.kind == "dataset":
            is_entry = _ENTRY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
            is_unfinished = is_entry and not _is_complete_entry(path, "dataset")
        else:
            is_unfinished = path.suffix == ".tmp" and not path.name.startswith(".")
        if is_unfinished:
            _remove(path)


def _remove(path: Path) -> bool:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError:
        return False
    return True


def discard_spoiled(cache: Cache) -> list[Path] | None:
    """Remove what a run made while contents that its folder is named by were written to.

    Upstream may have read other contents than launch did, also if they were put back since: the
    kernel's time of change cannot be set. What earlier runs made stays. None if nothing was written
    to.
    """
    # a record may name any folder: only one that says itself that it is this cache is touched
    folder = open_folder(cache.path)
    if folder is None or folder.record.digest != cache.digest:
        return None
    begun = cache.read - _TICK
    if all(_read_time(path, "st_ctime") < begun for path in _list_local_files(cache)):
        return None
    removed = []
    for path in _list_paths(cache.path):
        if path.name == RECORD or path.name.startswith("."):
            continue
        written = max(_read_time(part, "st_mtime") for part in (path, *path.rglob("*")))
        if written > cache.read and _remove(path):
            removed.append(path)
    return removed


def _list_local_files(cache: Cache) -> Iterator[Path]:
    """The files that its local inputs were read from; and folders of data, which may get more."""
    for source in cache.inputs:
        shown = as_mapping(source.shown)
        path = Path(source.name)
        if shown.get("kind") == "file":
            yield path
        if shown.get("kind") != "folder":
            continue
        for file in codec.fit_value(shown.get("files"), list[Mapping[str, object]], []):
            yield path / str(file.get("name"))
        if source.role == "data":
            yield path


def _read_time(path: Path, name: str) -> float:
    try:
        return float(getattr(path.stat(), name))
    except OSError:
        return 0.0


def _is_complete_entry(path: Path, kind: str) -> bool:
    if kind == "reference":
        return path.suffix == ".pt"
    if path.name.startswith((".", "_")) or not path.is_dir():
        return False
    # `datasets` keeps its own folders: builder, config, version, hash
    return is_complete(path) or any(path.glob("*/*/*/*.arrow"))


def is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in _DATASET_FILES)


def list_folders() -> list[CacheFolder]:
    """Every cache folder of the index and of launch's own place, those used last at the end."""
    listed: dict[Path, CacheFolder] = {}
    for path in (*rundir.list_registered("caches"), *_list_paths(cache_home())):
        folder = open_folder(path)
        if folder is not None:
            listed[folder.path] = folder
    return sorted(listed.values(), key=lambda folder: (folder.used(), folder.path))


def open_folder(path: Path) -> CacheFolder | None:
    """A folder of launch's; None for whatever lacks the record of its own name."""
    record = codec.read_record(CacheRecord, rundir.read_json(path / RECORD))
    if not record.is_valid() or path.is_symlink():
        return None
    if path.name != f"{record.kind}-{record.digest[:16]}":
        # a record that was copied elsewhere is about another folder
        return None
    return CacheFolder(path.absolute(), record)


def _list_paths(folder: Path) -> list[Path]:
    return [folder / name for name in files.list_names(folder)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The result for one folder: `removed`, `would be removed`, or `kept` with the reason."""

    folder: str
    kind: str
    size: int
    state: str
    reason: str | None = None

    def line(self) -> str:
        line = f"{self.state} {self.folder} ({format_size(self.size)})"
        return f"{line}: {self.reason}" if self.reason else line


def parse_age(text: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `2w`; raises UsageError for anything else."""
    match = _AGE.match(text.strip())
    if match is None:
        raise usage("bad-age", f"`{text}` is not an age", "a number and a unit: 30d, 12h, 90m, 2w")
    return float(match[1]) * _SECONDS[match[2]]


def clear(
    folders: Iterable[CacheFolder],
    *,
    kind: str | None = None,
    older_than_s: float | None = None,
    dry_run: bool = False,
) -> list[Cleared]:
    """Remove the folders of a kind that no run began with for that long; the result for each.

    What a run uses now is kept, whatever its age. Folders of another kind are left out.
    """
    now = time.time()
    results = []
    for folder in folders:
        if kind is not None and folder.kind != kind:
            continue
        size = folder.size()
        if older_than_s is not None and now - folder.used() < older_than_s:
            reason: str | None = "used since"
        else:
            reason = _remove_folder(folder, dry_run)
        state = "would be removed" if dry_run else "removed"
        if reason:
            state = "kept"
        path = str(folder.path)
        results.append(
            Cleared(folder=path, kind=folder.kind, size=size, state=state, reason=reason)
        )
    return results


def _remove_folder(folder: CacheFolder, dry_run: bool) -> str | None:
    """Why a folder was not removed; None if it was, or in a dry run would be."""
    if open_folder(folder.path) is None:
        return "it holds no record of launch's"
    lock = None
    try:
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            lock = os.open(folder.path / LOCK, flags)
        # on a disk without locks the runs themselves tell
        is_locked = lock is not None and locks.try_lock(lock) is False
        if is_locked or folder.live():
            return "a run uses it"
        return None if dry_run else files.remove_tree(folder.path)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    finally:
        if lock is not None:
            os.close(lock)
