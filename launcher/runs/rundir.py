"""The folder of a run: the names of its files, the manifest, and the index of all runs.

A run is identified by the folder that its model goes to: starting the same stage into the same
folder again is a new attempt of the same run.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import NotReady, not_ready, usage
from launcher.files import parse_line as parse_line
from launcher.files import read_json as read_json
from launcher.machine import codec, locks
from launcher.paths import canonical
from launcher.redaction import redact
from launcher.runs import summaries
from launcher.runs.record import Manifest
from launcher.runs.summaries import RunSummary

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NONE = "none"
OWN = 0o755  # the mode of run folders, whatever the umask: what others could write is not run
_NUMBERED = re.compile(r"(?:console|exit)(?:\.([1-9][0-9]{0,3}))?\.(?:log|json)\Z")


class _RunFile:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Path:
        return folder.path / self.name


class _AttemptFile:
    """A file of one attempt: `console.log` of the first, `console.2.log` of the second."""

    def __init__(self, stem: str, suffix: str) -> None:
        self.stem, self.suffix = stem, suffix

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Callable[[int], Path]:
        return lambda n: folder.path / f"{self.stem}{'' if n == 1 else f'.{n}'}.{self.suffix}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The only place that knows what the files of a run are called."""

    path: Path

    manifest = _RunFile("run.json")  # everything that was decided before the start
    probe = _RunFile("probe")  # one `rank-N.jsonl` a training process
    metrics = _RunFile("metrics.jsonl")  # one line a step, over all attempts
    usage = _RunFile("usage.jsonl")  # how busy the machine was meanwhile, a line a few seconds
    verdict = _RunFile("verdict.json")
    process = _RunFile("process.json")  # which process the attempt that began last is
    lock = _RunFile("lock")  # held, through the kernel, by the process of the attempt that runs
    start = _RunFile("start.json")  # what the keeper of the next attempt starts, environment included; mode 0600
    stage_file = _RunFile("stage.yaml")  # as it was resolved: `launch sft RUN/stage.yaml` starts it again
    deepspeed = _RunFile("deepspeed.json")  # the DeepSpeed config that was used, where it is none that ships
    stop = _RunFile("stop.json")  # the request to stop this attempt, and how
    diary = _RunFile("keeper.log")  # what the keeper had to say, and what the command at the end printed
    report = _RunFile("report.html")
    samples = _RunFile("samples.json")  # answers before and after the training, where the stage file has `samples`
    checksums = _RunFile("checksums.json")  # digests of the files of every checkpoint that was complete
    job = _RunFile("slurm.json")  # which job of Slurm's the run was submitted as
    console = _AttemptFile("console", "log")  # what the training processes wrote, raw
    exit = _AttemptFile("exit", "json")  # how the attempt ended
    # arguments of the attempt that no flag of the trainer can carry, for its `--config`
    trainer_config = _AttemptFile("trainer", "yaml")
    inventory = _AttemptFile("written", "json")  # what the attempt found in its output folder, and what it left there
    inputs = _AttemptFile("inputs", "json")  # what of data and model changed between start and end
    # there once somebody sees to the end of the attempt, and locked until that is done
    concluded = _AttemptFile(".concluded", "mark")

    def node(self, rank: int) -> RunFolder:
        """What machine number `rank` keeps to itself: its log, its processes, its lock, its end."""
        return RunFolder(self.path / f"node{rank}") if rank else self

    def nodes(self) -> list[RunFolder]:
        others = sorted(self.path.glob("node[1-9]*"), key=lambda path: (len(path.name), path.name))
        return [self, *map(RunFolder, others)]

    def attempts(self) -> int:
        """How many attempts have begun; a log that was tidied away still counts."""
        found = map(_NUMBERED.match, files.names(self.path))
        return max((int(match[1] or 1) for match in found if match), default=0)


def runs_root() -> Path:
    return Path(os.environ.get("LAUNCH_RUNS") or "runs").expanduser().absolute()


def state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "launch"


def choose(stage: str, name: str, output: Path | None, root: Path, *, rank: int = 0) -> tuple[RunFolder, int]:
    """The newest run into this output, else a free name for one, not made; and the next attempt of this `rank`."""
    # as a manifest holds it
    wanted = None if output is None else canonical(Path(redact(str(output))))
    for folder in _runs_into(wanted, root) if wanted is not None else ():
        record = read_manifest(folder)
        if record.stage == stage and record.output is not None and canonical(record.output) == wanted:
            return folder, folder.node(rank).attempts() + 1
    return free_folder(root, stage, name), 1


def _runs_into(output: Path, root: Path) -> Iterator[RunFolder]:
    """The runs that may have trained into a canonical folder, the newest first."""
    for summary in summarize(newest_first(root)):
        if summary.output is None:
            continue
        # a link may lead elsewhere since
        same_name = Path(summary.output).name == output.name
        if same_name or summary.canonical_output == str(output):
            yield RunFolder(summary.path)


def new_folder(root: Path, kind: str, name: str) -> Path:
    """Make a folder for a new run, or several together: `<UTC time>-<kind>-<name>`. Raises NotReady."""
    return reserve(free_folder(root, kind, name)).path


def free_folder(root: Path, kind: str, name: str) -> RunFolder:
    """A name that no run here has: `<UTC time>-<kind>-<name>`. Nothing is made."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{now}-{kind}-{dashed(redact(name)).strip('-')[:100] or 'run'}"
    for path in _numbered(root / stem):
        if not path.exists():
            return RunFolder(path)
    raise AssertionError("there is a number for every folder")


def reserve(folder: RunFolder) -> RunFolder:
    """Make the folder of a new run, or one beside it where another start took its name. Raises NotReady."""
    for path in _numbered(folder.path):
        with writing(path):
            path.parent.mkdir(OWN, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(OWN)
                return RunFolder(path)
    raise AssertionError("there is a number for every folder")


def _numbered(path: Path) -> Iterator[Path]:
    """A path, and with `-2`, `-3` and so on at its end."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def dashed(text: str) -> str:
    return _UNSAFE.sub("-", text)


def release(folder: RunFolder) -> None:
    """Remove a reserved folder that nothing was written into."""
    with contextlib.suppress(OSError):
        folder.path.rmdir()


def not_writable(path: Path, reason: str | None) -> NotReady:
    message = f"the run folder cannot be written: {reason}"
    help = "set LAUNCH_RUNS to a writable folder"
    return not_ready("runs-not-writable", message, help, file=str(path))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises NotReady in the place of an OSError inside."""
    try:
        yield
    except OSError as error:
        raise not_writable(folder, error.strerror) from None


def newest_first(root: Path) -> Iterator[RunFolder]:
    for name in reversed(files.names(root)):
        if os.path.isfile(f"{root}/{name}/run.json"):
            yield RunFolder(root / name)


def read_manifest(folder: RunFolder) -> Manifest:
    return Manifest(read_json(folder.manifest))


def read_kept_manifest(folder: RunFolder, attempt: int) -> Manifest:
    return Manifest(read_json(folder.path / f"run.{attempt}.json"))


def keep_manifest(folder: RunFolder) -> None:
    last = read_manifest(folder)
    if last.attempt is not None and not read_kept_manifest(folder, last.attempt):
        # a full disk costs a comparison later, not this start
        with contextlib.suppress(OSError):
            files.write_json(folder.path / f"run.{last.attempt}.json", last)


def judged(folder: RunFolder, number: int) -> bool:
    """Whether verdict.json is what was found at the end of this attempt: by content, not by any clock."""
    return _mark(folder, number)[:1] == [_digest(folder.verdict)] != [_NONE]


def concluded(folder: RunFolder, number: int) -> bool:
    """Whether an attempt was judged and its `--on-finish` command was called."""
    return len(_mark(folder, number)) == 1


def seal(folder: RunFolder, number: int, *, untold: bool = False) -> None:
    """Record that verdict.json is of this attempt's end; `untold`: `--on-finish` is still to be called."""
    with contextlib.suppress(OSError):
        # in place: the file is locked
        words = [_digest(folder.verdict), *(["untold"] if untold else [])]
        folder.concluded(number).write_text(" ".join(words))


def note_told(folder: RunFolder, number: int) -> None:
    """Record that the `--on-finish` command of this attempt was called, judged or not."""
    with contextlib.suppress(OSError):
        folder.concluded(number).write_text((_mark(folder, number) or [_NONE])[0])


@contextlib.contextmanager
def concluding(folder: RunFolder, number: int) -> Iterator[bool]:
    """Yields whether an attempt is still to be concluded, and by nobody else: who is killed loses this right."""
    try:
        mark = os.open(folder.concluded(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # a full disk: rather twice than never
        yield True
        return
    try:
        yield locks.locked(mark) is not False and not concluded(folder, number)
    finally:
        os.close(mark)


def _mark(folder: RunFolder, number: int) -> list[str]:
    try:
        return files.read_bytes(folder.concluded(number)).decode().split()
    except (OSError, ValueError):
        return []


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(files.read_bytes(path)).hexdigest()
    except OSError:
        return _NONE


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def enter(index: str, path: Path) -> None:
    """Note a folder in an index (`runs`, `caches`), in a file of its own: none that two starts could tear."""
    folder, place = state_folder() / index, os.fsencode(path.absolute())
    # a read-only home costs the overview from elsewhere, not the run
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_bytes(folder / entry_name(path), place)


def forget(index: str, path: Path) -> None:
    with contextlib.suppress(OSError):
        (state_folder() / index / entry_name(path)).unlink(missing_ok=True)


def entry_name(path: Path) -> str:
    """What a folder's file in an index is called."""
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return f"{dashed(path.name)[-100:]}-{digest}"


def entered(index: str, known: Iterable[Path] = ()) -> Iterator[Path]:
    """The folders of an index, be they there or not, but for those that are `known`."""
    there, folder = {entry_name(path) for path in known}, state_folder() / index
    for name in files.names(folder):
        with contextlib.suppress(OSError, ValueError):
            if name not in there and (path := Path(os.fsdecode(files.read_bytes(folder / name)))).is_absolute():
                yield path


def summarize(folders: Iterable[RunFolder]) -> list[RunSummary]:
    """What is asked of many runs at once, without reading all their manifests."""
    return summaries.of_runs((folder.path for folder in folders), _summaries_file())


def _summaries_file() -> Path:
    return state_folder() / "summaries.json"


def known_runs() -> list[RunFolder]:
    """Every run of the index and of the runs folder here, oldest first."""
    paths = {path for path in _known_paths() if os.path.isfile(f"{path}/run.json")}
    return sorted(map(RunFolder, paths), key=lambda folder: (folder.path.name, folder.path))


def _known_paths() -> Iterator[Path]:
    """Folders that are, or were, those of runs."""
    root = runs_root()
    paths = [root / name for name in files.names(root)]
    yield from paths
    # an entry is named by its folder: what is known already need not be opened
    names = set(files.names(state_folder() / "runs"))
    kept = [path for path in summaries.kept_paths(_summaries_file()) if entry_name(path) in names]
    yield from kept
    yield from entered("runs", [*paths, *kept])


def find(name: str) -> RunFolder | None:
    """By folder, name, unique prefix, or `last` (here, else anywhere; no trial). Raises UsageError if several fit."""
    path = Path(name)
    # a further machine of a run keeps no manifest of its own
    if name and (os.path.isfile(path / "run.json") or os.path.isfile(path / "start.json")):
        return RunFolder(path.absolute())
    if name == "last":
        return _last()
    # of ten thousand only those of that name are looked at
    paths = {path for path in _known_paths() if name and path.name.startswith(name)}
    named = sorted((path for path in paths if os.path.isfile(f"{path}/run.json")), key=lambda path: (path.name, path))
    exact = [path for path in named if path.name == name]
    matches = exact or named
    if len(matches) > 1:
        listed = ", ".join(str(path) if exact else path.name for path in matches[-5:])
        raise usage("ambiguous-run", f"{len(matches)} runs match `{name}`", f"such as {listed}")
    return RunFolder(matches[0]) if matches else None


def _last() -> RunFolder | None:
    """The run that was started last: of those of this folder, else of all; one that began, if there is one."""
    below_campaign = lru_cache(is_campaign)
    runs = [one for one in summarize(known_runs()) if not below_campaign(one.path.parent)]
    # every attempt writes its manifest anew
    runs.sort(key=lambda one: (one.written, one.path.name), reverse=True)
    cwd = redact(os.getcwd())
    folders = [RunFolder(one.path) for one in runs if one.cwd == cwd]
    if not folders:
        folders = [RunFolder(one.path) for one in runs]
    if not folders:
        return None
    return next(filter(begun, folders), folders[0])


def begun_here(folder: RunFolder) -> bool:
    return read_manifest(folder).cwd == redact(os.getcwd())


def runs_here() -> list[RunFolder]:
    """The known runs that were begun in this folder, oldest first."""
    cwd = redact(os.getcwd())
    return [RunFolder(one.path) for one in summarize(known_runs()) if one.cwd == cwd]


PIPELINE_RECORD = "pipeline.json"
BENCH_RECORD = "bench.json"
LADDER_RECORD = "ladder.json"
TUNE_RECORD = "tune.json"
_RECORDS = (PIPELINE_RECORD, BENCH_RECORD, LADDER_RECORD, TUNE_RECORD)


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "run.json")


def is_campaign(folder: Path) -> bool:
    """Whether it is the folder of a pipeline, bench, ladder or tune."""
    return any(os.path.isfile(folder / name) for name in _RECORDS)


def campaign(name: str) -> RunFolder | None:
    """The folder of a pipeline, bench, ladder or tune, by its path or its name in the runs folder."""
    paths = (Path(name).absolute(), runs_root() / name)
    return next((RunFolder(path) for path in paths if is_campaign(path)), None)


def campaigns(runs: Iterable[RunFolder]) -> dict[Path, Path]:
    """Of each run that belongs to a pipeline, bench, ladder or tune the folder of that."""
    paths = [run.path for run in runs]
    parents = {parent: is_campaign(parent) for parent in dict.fromkeys(path.parent for path in paths)}
    found = {path: path.parent for path in paths if parents[path.parent]}
    for pipeline in (one for parent in parents for one in parent.glob("*-pipeline-*")):
        found |= {run.path: pipeline for run in members(pipeline)}
    return found


def members(folder: Path) -> list[RunFolder]:
    """The runs of a pipeline, bench, ladder or tune folder that began, each once, in its record's order."""
    known = campaign(str(folder))
    folder = known.path if known else folder
    paths = (path for name in _RECORDS for path in _runs_in(read_json(folder / name)))
    # a folder that was moved took what lies in it along
    runs = dict.fromkeys(RunFolder(path if os.path.isdir(path) else folder / path.name) for path in paths)
    return [run for run in runs if run.attempts() and _belongs(run, folder)]


def _belongs(run: RunFolder, folder: Path) -> bool:
    """Whether a run that a record names lies in its folder, beside that, or is known here: it is judged, and written
    to, and a record could name anything."""
    parent = canonical(run.path).parent
    beside = (canonical(folder), canonical(folder).parent)
    return parent in beside or entry_name(run.path) in files.names(state_folder() / "runs")


def _runs_in(record: object) -> Iterator[Path]:
    if isinstance(record, dict):
        path: Path | None = codec.fit(record.get("run"), Path)
        if path is not None:
            yield path
        record = list(record.values())
    for value in record if isinstance(record, list) else ():
        yield from _runs_in(value)


def begun(folder: RunFolder) -> bool:
    """Whether a process of the run was ever started, or a job submitted: else its start was cut short."""
    return folder.process.exists() or folder.attempts() > 0 or folder.job.exists()


def json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"
