"""The cache folders on this disk: made for a run, locked while it lives, listed, and cleared.

Each holds a record, `launch-cache.json`, of what its name was derived from, and one small file a run
under `.launch-uses/`, so that nothing is ever written by two. A folder is protected by a lock of the
kernel's, which the training process inherits: what is locked, or was used by a run that still lives, is
never cleared, and nothing is that lacks the record of its own name.
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
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from launcher import files, redaction
from launcher.artifacts.fingerprint import cache_home
from launcher.cache.keys import KINDS, Cache
from launcher.errors import not_ready, usage
from launcher.machine import codec, locks, process, sizes
from launcher.machine.codec import Between, Misfit, Positive
from launcher.machine.sizes import sized
from launcher.redaction import Redactor
from launcher.runs import rundir, runner
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """That a run used a cache folder, as a file in it; `time` in seconds since 1970."""

    run: str
    time: Annotated[float, Between(0, 10**11)]
    attempt: Positive = 1
    config: str | None = None
    cache: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheFolder:
    path: Path
    record: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    def uses(self) -> list[dict[str, Any]]:
        """Which run used it when, oldest first: `run`, `attempt`, `time` (seconds), `cache`."""
        uses = []
        for path in _entries(self.path / USES):
            with contextlib.suppress(Misfit):
                uses.append(asdict(codec.read(_Use, rundir.read_json(path))))
        return sorted(uses, key=itemgetter("time"))

    def used(self) -> float:
        """When a run last began with it, in seconds since 1970."""
        return max([*(float(one["time"]) for one in self.uses()), seconds(self.record.get("created"))])

    def entries(self) -> list[str]:
        """Upstream's own keys that are complete in it."""
        return sorted(p.name for p in _entries(self.path) if _complete(p, self.kind))

    def live(self) -> bool:
        # one look at all processes, however many runs have used it
        marks = lru_cache(maxsize=1)(process.marks)
        runs = {str(one.get("run")) for one in self.uses()}
        return any(runner.alive(Path(run), marks) for run in runs)

    def size(self) -> int:
        return sizes.below(self.path)

    def row(self) -> dict[str, Any]:
        """One folder for `launch cache list`; sizes in bytes, ages in seconds."""
        now, record, entries = time.time(), self.record, self.entries()
        inputs = codec.fit(record.get("inputs"), list[Mapping[str, object]], [])
        of = (str(one.get("name")) for one in inputs if one.get("role") in ("data", "model"))
        return {
            "kind": self.kind,
            "folder": str(self.path),
            "size": self.size(),
            "created": codec.fit(record.get("created"), str),
            "age": max(0.0, now - seconds(record.get("created"))),
            "last used": max(0.0, now - self.used()),
            "stage": codec.fit(record.get("stage"), str),
            "backend": codec.fit(record.get("backend"), str),
            "state": "in use" if self.live() else "filled" if entries else "empty",
            "entries": entries,
            "of": list(dict.fromkeys(of)),
            "runs": list(dict.fromkeys(Path(str(one.get("run"))).name for one in self.uses())),
        }


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    runs = row["runs"]
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return {
        **{name: str(value) for name, value in row.items()},
        "size": sized(row["size"]),
        "age": aged(row["age"]),
        "last used": aged(row["last used"]),
        "of": ", ".join(row["of"]) or "-",
        "runs": f"{runs[-1]}{more}" if runs else "-",
    }


def aged(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{int(seconds / _SECONDS[unit])}{unit}"
    return f"{int(seconds)}s"


@contextlib.contextmanager
def lock(
    caches: Sequence[Cache],
    run: RunFolder,
    attempt: int,
    *,
    config: Path | None = None,
    redactor: Redactor | None = None,
) -> Iterator[tuple[int, ...]]:
    """Make the folders and lock them for an attempt; yields the descriptors for the started process.

    What an earlier run left unfinished in them is taken away first, unless another run is at it now:
    upstream would take a half-written set for a finished one and crash. Raises NotReady where a
    folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        for one in caches:
            try:
                if (lock := _hold(one)) is not None:
                    stack.callback(os.close, lock)
                    descriptors.append(lock)
                _record(one, run, attempt, config, redactor or redaction.of_process())
            except OSError as error:
                message = f"the cache folder cannot be written: {error.strerror}"
                help = "set LAUNCH_CACHE to a writable folder"
                raise not_ready("cache-not-writable", message, help, file=str(one.path)) from None
        yield tuple(descriptors)


def _hold(cache: Cache) -> int | None:
    """A shared lock on the folder, which is there when this returns; None on a disk without locks."""
    while True:
        cache.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        folder = opened(cache.path)
        # workers may outlive the process that holds the lock
        if locks.locked(lock) and not (folder is not None and folder.live()):
            _discard_unfinished(cache)
        if locks.locked(lock, shared=True, seconds=math.inf) is None:
            os.close(lock)
            return None
        if _same(cache.path / LOCK, lock):
            return lock
        # it was cleared in between
        os.close(lock)


def _same(path: Path, descriptor: int) -> bool:
    try:
        there, opened = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def _record(cache: Cache, run: RunFolder, attempt: int, config: Path | None, redactor: Redactor) -> None:
    described = redactor.redact(cache.as_json())
    uses = cache.path / USES
    uses.mkdir(exist_ok=True)
    if not _is_ours(cache.path, rundir.read_json(cache.path / RECORD)):
        head = {"launch_cache": RECORD_VERSION, "created": rundir.now()}
        files.write_json(cache.path / RECORD, {**head, **described})
    place = str(run.path.absolute())
    name = hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
    use = {"run": place, "attempt": attempt, "time": time.time(), "config": config and str(config)}
    files.write_json(uses / f"{name}-{attempt}.json", {**use, "cache": described})
    rundir.enter("caches", cache.path)


def _discard_unfinished(cache: Cache) -> None:
    """Take away what was begun and never finished; only for who holds the folder alone."""
    for path in _entries(cache.path):
        hidden = path.name.startswith(".") and not path.name.startswith(".write_test_")
        if not hidden and (_half_dataset(path) if cache.kind == "dataset" else path.suffix == ".tmp"):
            _remove(path)


def _remove(path: Path) -> bool:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError:
        return False
    return True


def discard_spoiled(cache: Cache) -> list[Path] | None:
    """Take away what a run made while contents that its folder is named by were written to.

    Upstream may have read others than launch did, also where they were put back since: the kernel's
    time of change cannot be set. What earlier runs made stays. None where nothing was written to.
    """
    # a record may name any folder: nothing is taken from one that does not say itself that it is this cache
    folder = opened(cache.path)
    if folder is None or folder.record.get("digest") != cache.digest:
        return None
    if all(_stat_time(path, "st_ctime") < cache.read - _TICK for path in _local_files(cache)):
        return None
    fresh = [
        path
        for path in _entries(cache.path)
        if path.name != RECORD and not path.name.startswith(".")
        if max(_stat_time(p, "st_mtime") for p in (path, *path.rglob("*"))) > cache.read
    ]
    return [path for path in fresh if _remove(path)]


def _local_files(cache: Cache) -> Iterator[Path]:
    """The files that its local inputs were read from; and folders of data, which may get more."""
    for one in cache.inputs:
        if isinstance(one.shown, dict) and one.shown.get("kind") in ("file", "folder"):
            path = Path(one.name)
            folder = one.shown["kind"] == "folder"
            files = codec.fit(one.shown.get("files"), list[Mapping[str, object]], [])
            yield from (path / str(file.get("name")) for file in files if folder)
            if one.role == "data" or not folder:
                yield path


def _stat_time(path: Path, name: str) -> float:
    try:
        return float(getattr(path.stat(), name))
    except OSError:
        return 0.0


def _half_dataset(path: Path) -> bool:
    # an entry is called by ten hexadecimal digits
    # (dataset_transformation.py::compute_config_hash[return hashlib.sha256])
    named = re.fullmatch(r"[0-9a-f]{10}", path.name) is not None
    return named and path.is_dir() and not path.is_symlink() and not _complete(path, "dataset")


def _complete(path: Path, kind: str) -> bool:
    if kind == "reference":
        return path.suffix == ".pt"
    if path.name.startswith((".", "_")) or not path.is_dir():
        return False
    # `datasets` keeps its own folders: builder, config, version, hash
    return is_complete(path) or any(path.glob("*/*/*/*.arrow"))


def is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in _DATASET_FILES)


def known() -> list[CacheFolder]:
    """Every cache folder of the index and of launch's own place, those used last at the end."""
    places = [*rundir.entered("caches"), *_entries(cache_home())]
    found = {folder.path: folder for folder in map(opened, places) if folder is not None}
    return sorted(found.values(), key=lambda one: (one.used(), one.path))


def opened(path: Path) -> CacheFolder | None:
    """A folder of ours; None for whatever lacks the record of its own name."""
    record = rundir.read_json(path / RECORD)
    return CacheFolder(path.absolute(), record) if _is_ours(path, record) else None


def _is_ours(path: Path, record: Mapping[str, Any]) -> bool:
    kind, digest = record.get("kind"), record.get("digest")
    known = isinstance(kind, str) and kind in KINDS
    if record.get("launch_cache") != RECORD_VERSION or not known or not isinstance(digest, str):
        return False
    # a record that was copied elsewhere speaks of another folder
    return len(digest) == 64 and path.name == f"{kind}-{digest[:16]}" and not path.is_symlink()


def _entries(folder: Path) -> list[Path]:
    return [folder / name for name in files.names(folder)]


def seconds(text: object) -> float:
    """A time as records hold it, in seconds since 1970; 0 where it is none."""
    try:
        return datetime.datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What became of one folder: `removed`, `would be removed`, or `kept` with the reason."""

    folder: str
    kind: str
    size: int
    state: str
    reason: str | None = None

    def line(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.state} {self.folder} ({sized(self.size)}){reason}"


def age(text: str) -> float:
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
    now: float | None = None,
) -> list[Cleared]:
    """Remove the folders of a kind that no run began with for that long; says of each what became of it.

    What a run uses now is kept, whatever its age. Folders of another kind are not spoken of.
    """
    now = time.time() if now is None else now
    done = []
    for folder in folders:
        if kind is not None and folder.kind != kind:
            continue
        size = folder.size()
        reason: str | None = "used since"
        if older_than_s is None or now - folder.used() >= older_than_s:
            reason = _in_the_way(folder, dry_run)
        state = "kept" if reason else "would be removed" if dry_run else "removed"
        done.append(Cleared(folder=str(folder.path), kind=folder.kind, size=size, state=state, reason=reason))
    return done


def _in_the_way(folder: CacheFolder, dry_run: bool) -> str | None:
    """Why a folder was not removed; None where it was, or in a dry run would be."""
    if opened(folder.path) is None:
        return "it holds no record of launch's"
    lock = None
    try:
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # on a disk without locks the runs themselves have to do
        if lock is not None and locks.locked(lock) is False:
            return "a run uses it"
        if folder.live():
            return "a run uses it"
        return None if dry_run else files.remove_tree(folder.path)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    finally:
        if lock is not None:
            os.close(lock)
