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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import NotReady, UsageError, not_ready, usage
from launcher.files import parse_line as parse_line
from launcher.files import read_json as read_json
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec, locks
from launcher.paths import resolve_path
from launcher.redaction import redact
from launcher.runs import summaries
from launcher.runs.places import find_runs_root as find_runs_root
from launcher.runs.places import find_state_folder as find_state_folder
from launcher.runs.record import Manifest
from launcher.runs.summaries import RunSummary

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NO_VERDICT = "none"  # in place of a digest
_PENDING = "untold"  # in the mark of an attempt: `--on-finish` is still to be called
OWN = 0o755  # the mode of run folders, whatever the umask: nothing is run that others can write
_ATTEMPT_FILE = re.compile(r"(?:console|exit)(?:\.([1-9][0-9]{0,3}))?\.(?:log|json)\Z")
_MAX_NAME_CHARS = 100


class _RunFile:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Path:
        return folder.path / self.name


class _AttemptFile:
    """A file of one attempt: `console.log` of the first, `console.2.log` of the second."""

    def __init__(self, stem: str, suffix: str) -> None:
        self.stem = stem
        self.suffix = suffix

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Callable[[int], Path]:
        def path_of(attempt: int) -> Path:
            number = "" if attempt == 1 else f".{attempt}"
            return folder.path / f"{self.stem}{number}.{self.suffix}"

        return path_of


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The only place that knows what the files of a run are called."""

    path: Path

    # everything that was decided before the start
    manifest = _RunFile("run.json")
    # one `rank-N.jsonl` per training process
    probe = _RunFile("probe")
    # one line a step, over all attempts
    metrics = _RunFile("metrics.jsonl")
    # how busy the machine was meanwhile, a line every few seconds
    usage = _RunFile("usage.jsonl")
    verdict = _RunFile("verdict.json")
    # the processes of the attempt that began last
    process = _RunFile("process.json")
    # held, through the kernel, by the process of the attempt that runs
    lock = _RunFile("lock")
    # what the supervisor of the next attempt starts, with the whole environment; mode 0600
    start = _RunFile("start.json")
    # the resolved stage file: `launch sft RUN/stage.yaml` starts it again
    stage_file = _RunFile("stage.yaml")
    # the DeepSpeed config of the run, unless it ships with launch
    deepspeed = _RunFile("deepspeed.json")
    # the request to stop an attempt, and how
    stop = _RunFile("stop.json")
    # the output of the supervisor and of the `--on-finish` command
    supervisor_log = _RunFile("keeper.log")
    report = _RunFile("report.html")
    # answers before and after training, if the stage file has `samples`
    samples = _RunFile("samples.json")
    # digests of the files of every checkpoint that was complete
    checksums = _RunFile("checksums.json")
    # the Slurm job that the run was submitted as
    job = _RunFile("slurm.json")
    # the raw output of the training processes
    console = _AttemptFile("console", "log")
    # how the attempt ended
    exit = _AttemptFile("exit", "json")
    # arguments that no flag of the trainer can carry, for its `--config`
    trainer_config = _AttemptFile("trainer", "yaml")
    # what was in the output folder at the start, and what the attempt wrote there
    inventory = _AttemptFile("written", "json")
    # what changed of data and model during the attempt
    inputs = _AttemptFile("inputs", "json")
    # exists once the end of the attempt is handled; locked until that is done
    concluded = _AttemptFile(".concluded", "mark")

    def node(self, rank: int) -> RunFolder:
        """The folder of machine number `rank`: its log, processes, lock and exit."""
        if rank == 0:
            return self
        return RunFolder(self.path / f"node{rank}")

    def nodes(self) -> list[RunFolder]:
        workers = sorted(self.path.glob("node[1-9]*"), key=_order_by_number)
        return [self, *(RunFolder(path) for path in workers)]

    def attempts(self) -> int:
        """How many attempts have begun; one whose log was deleted counts if a later one has."""
        last = 0
        for name in files.list_names(self.path):
            match = _ATTEMPT_FILE.match(name)
            if match is not None:
                last = max(last, int(match[1] or 1))
        return last


def _order_by_number(path: Path) -> tuple[int, str]:
    """The sort key by which `node10` follows `node9`."""
    return len(path.name), path.name


def choose_folder(
    stage: str, name: str, output: Path | None, root: Path, *, rank: int = 0
) -> tuple[RunFolder, int]:
    """The folder and the number of the next attempt on machine `rank`.

    That is the newest run of this stage into `output`, else a folder that does not exist yet.
    """
    if output is not None:
        # redacted, as in the manifest
        wanted = resolve_path(Path(redact(str(output))))
        for folder in _find_runs_of_output(wanted, root):
            manifest = read_manifest(folder)
            if manifest.stage != stage or manifest.output is None:
                continue
            if resolve_path(manifest.output) == wanted:
                return folder, folder.node(rank).attempts() + 1
    return free_folder(root, stage, name), 1


def _find_runs_of_output(output: Path, root: Path) -> Iterator[RunFolder]:
    """The runs that may have trained into an output folder (without links), newest first."""
    for summary in summarize(list_newest_first(root)):
        if summary.output is None:
            continue
        # links may have changed since the summary: a run of that name is a candidate too
        same_name = Path(summary.output).name == output.name
        if same_name or summary.canonical_output == str(output):
            yield RunFolder(summary.path)


def make_folder(root: Path, kind: str, name: str) -> Path:
    """Make a new folder `<UTC time>-<kind>-<name>` for one or several runs. Raises NotReady."""
    return reserve(free_folder(root, kind, name)).path


def free_folder(root: Path, kind: str, name: str) -> RunFolder:
    """A folder `<UTC time>-<kind>-<name>` that does not exist. Nothing is made."""
    time = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    safe_name = replace_unsafe(redact(name)).strip("-")[:_MAX_NAME_CHARS] or "run"
    for path in _number_paths(root / f"{time}-{kind}-{safe_name}"):
        if not path.exists():
            return RunFolder(path)
    raise AssertionError("there is a number for every folder")


def reserve(folder: RunFolder) -> RunFolder:
    """Make a run folder, under another number if the name was taken meanwhile. Raises NotReady."""
    for path in _number_paths(folder.path):
        with writing(path):
            path.parent.mkdir(OWN, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(OWN)
                return RunFolder(path)
    raise AssertionError("there is a number for every folder")


def _number_paths(path: Path) -> Iterator[Path]:
    """A path, then with `-2`, `-3` and so on appended."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def replace_unsafe(text: str) -> str:
    """The text with a dash for whatever is not plain in a file name."""
    return _UNSAFE.sub("-", text)


def remove_if_empty(folder: RunFolder) -> None:
    with contextlib.suppress(OSError):
        folder.path.rmdir()


def make_not_writable(path: Path, reason: str | None) -> NotReady:
    message = f"the run folder cannot be written: {reason}"
    help = "set LAUNCH_RUNS to a writable folder"
    return not_ready("runs-not-writable", message, help, file=str(path))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError inside into NotReady."""
    try:
        yield
    except OSError as error:
        raise make_not_writable(folder, error.strerror) from None


def list_newest_first(root: Path) -> Iterator[RunFolder]:
    for name in reversed(files.list_names(root)):
        folder = root / name
        if is_run(folder):
            yield RunFolder(folder)


def read_manifest(folder: RunFolder) -> Manifest:
    return Manifest(read_json(folder.manifest))


def read_kept_manifest(folder: RunFolder, attempt: int) -> Manifest:
    """The manifest of an earlier attempt; empty if it was not kept."""
    return Manifest(read_json(_locate_kept_manifest(folder, attempt)))


def keep_manifest(folder: RunFolder) -> None:
    """Copy the manifest of the last attempt before the next one replaces it."""
    manifest = read_manifest(folder)
    if manifest.attempt is None or read_kept_manifest(folder, manifest.attempt):
        return
    # a full disk costs a later comparison, not this start
    with contextlib.suppress(OSError):
        files.write_json(_locate_kept_manifest(folder, manifest.attempt), manifest)


def _locate_kept_manifest(folder: RunFolder, attempt: int) -> Path:
    return folder.path / f"run.{attempt}.json"


# The mark of an attempt holds the digest of its verdict, and a second word as long as `--on-finish`
# has not been called. It is written in place, as the file is locked.


def is_judged(folder: RunFolder, attempt: int) -> bool:
    """Whether verdict.json is of the end of this attempt, by its digest."""
    digest = _digest_file(folder.verdict)
    return digest != _NO_VERDICT and _read_mark(folder, attempt)[:1] == [digest]


def is_concluded(folder: RunFolder, attempt: int) -> bool:
    """Whether an attempt was judged and its `--on-finish` command was called."""
    return len(_read_mark(folder, attempt)) == 1


def mark_judged(folder: RunFolder, attempt: int, *, notify_pending: bool = False) -> None:
    """Record that verdict.json is of the end of this attempt.

    `notify_pending`: its `--on-finish` command is still to be called.
    """
    words = _digest_file(folder.verdict)
    if notify_pending:
        words += f" {_PENDING}"
    _write_mark(folder, attempt, words)


def mark_notified(folder: RunFolder, attempt: int) -> None:
    """Record that the `--on-finish` command of this attempt was called, judged or not."""
    mark = _read_mark(folder, attempt)
    _write_mark(folder, attempt, mark[0] if mark else _NO_VERDICT)


@contextlib.contextmanager
def conclude_once(folder: RunFolder, attempt: int) -> Iterator[bool]:
    """Yield whether this process is the one to conclude an attempt; the lock ends with it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        mark = os.open(folder.concluded(attempt), flags, 0o600)
    except OSError:
        # a full disk: rather twice than never
        yield True
        return
    try:
        yield locks.try_lock(mark) is not False and not is_concluded(folder, attempt)
    finally:
        os.close(mark)


def _read_mark(folder: RunFolder, attempt: int) -> list[str]:
    try:
        return files.read_bytes(folder.concluded(attempt)).decode().split()
    except (OSError, ValueError):
        return []


def _write_mark(folder: RunFolder, attempt: int, words: str) -> None:
    with contextlib.suppress(OSError):
        folder.concluded(attempt).write_text(words)


def _digest_file(path: Path) -> str:
    try:
        return hashlib.sha256(files.read_bytes(path)).hexdigest()
    except OSError:
        return _NO_VERDICT


def format_utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# An index (`runs`, `caches`) is a folder with one small file per entry: two starts at once write
# two files.


def register(index: str, path: Path) -> None:
    """Add a folder to an index. Without a writable home, commands elsewhere do not list it."""
    folder = find_state_folder() / index
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_bytes(folder / name_entry(path), os.fsencode(path.absolute()))


def unregister(index: str, path: Path) -> None:
    with contextlib.suppress(OSError):
        (find_state_folder() / index / name_entry(path)).unlink(missing_ok=True)


def name_entry(path: Path) -> str:
    """The name of a folder's file in an index."""
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return f"{replace_unsafe(path.name)[-_MAX_NAME_CHARS:]}-{digest}"


def list_registered(index: str, without: Iterable[Path] = ()) -> Iterator[Path]:
    """The folders of an index, existing or not, except those in `without`."""
    skipped = {name_entry(path) for path in without}
    folder = find_state_folder() / index
    for name in files.list_names(folder):
        if name in skipped:
            continue
        with contextlib.suppress(OSError, ValueError):
            path = Path(os.fsdecode(files.read_bytes(folder / name)))
            if path.is_absolute():
                yield path


def summarize(folders: Iterable[RunFolder]) -> list[RunSummary]:
    """The few facts that lists need of many runs, without reading all their manifests."""
    paths = (folder.path for folder in folders)
    return summaries.summarize_runs(paths, _locate_summaries())


def _locate_summaries() -> Path:
    return find_state_folder() / "summaries.json"


def list_known_runs() -> list[RunFolder]:
    """Every run of the index and of the runs folder here, oldest first."""
    return [RunFolder(path) for path in _find_existing_runs(_find_known_paths())]


def _find_existing_runs(paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that are run folders, each once, by name."""
    existing = {path for path in paths if is_run(path)}
    return sorted(existing, key=_order_by_name)


def _order_by_name(path: Path) -> tuple[str, Path]:
    return path.name, path


def _find_known_paths() -> Iterator[Path]:
    """Folders that are, or were, those of runs."""
    root = find_runs_root()
    local = [root / name for name in files.list_names(root)]
    yield from local
    # an entry is named after its folder: those of known folders need not be opened
    entries = set(files.list_names(find_state_folder() / "runs"))
    summarized = []
    for path in summaries.list_kept_paths(_locate_summaries()):
        if name_entry(path) in entries:
            summarized.append(path)
    yield from summarized
    yield from list_registered("runs", without=[*local, *summarized])


def find_run(name: str) -> RunFolder | None:
    """A run by its folder, its name, a unique prefix of that, or `last`.

    The name without date and stage is that of the newest such run. Raises UsageError if several
    runs match.
    """
    if not name:
        return None
    path = Path(name)
    # on further machines a run has no manifest
    if is_run(path) or os.path.isfile(path / "start.json"):
        return RunFolder(path.absolute())
    if name == "last":
        return _find_last_run()
    # filtered by name first: there may be ten thousand
    matches = _find_existing_runs(
        path for path in _find_known_paths() if path.name.startswith(name)
    )
    exact = [path for path in matches if path.name == name]
    if len(exact) > 1:
        raise _refuse_ambiguous(name, list(map(str, exact)))
    if exact:
        return RunFolder(exact[0])
    if len(matches) > 1:
        raise _refuse_ambiguous(name, [path.name for path in matches])
    if not matches:
        matches = _find_existing_runs(path for path in _find_known_paths() if _has_name(path, name))
    if not matches:
        return None
    # folders begin with the time, and the last is the newest
    return RunFolder(matches[-1])


def _refuse_ambiguous(name: str, matches: Sequence[str]) -> UsageError:
    message = f"{len(matches)} runs match `{name}`"
    return usage("ambiguous-run", message, f"such as {', '.join(matches[-5:])}")


def _has_name(path: Path, name: str) -> bool:
    """Whether a folder `TIME-STAGE-NAME` has that NAME, or STAGE-NAME."""
    _, _, stage_and_name = path.name.partition("-")
    return name in (stage_and_name, stage_and_name.partition("-")[2])


def _find_last_run() -> RunFolder | None:
    """The run that was started last: in this working folder if any, and begun if any.

    Runs of a pipeline, bench, ladder or tune do not count.
    """
    is_campaign_cached = lru_cache(is_campaign)
    runs = summarize(list_known_runs())
    runs = [run for run in runs if not is_campaign_cached(run.path.parent)]
    # every attempt writes its manifest anew
    runs.sort(key=_order_by_start, reverse=True)
    candidates = _select_of_working_folder(runs) or runs
    folders = [RunFolder(run.path) for run in candidates]
    for folder in folders:
        if has_begun(folder):
            return folder
    if not folders:
        return None
    return folders[0]


def _order_by_start(run: RunSummary) -> tuple[float, str]:
    return run.written, run.path.name


def _select_of_working_folder(runs: Iterable[RunSummary]) -> list[RunSummary]:
    cwd = redact(os.getcwd())
    return [run for run in runs if run.cwd == cwd]


def was_started_here(folder: RunFolder) -> bool:
    """Whether a run was started in the working folder."""
    return read_manifest(folder).cwd == redact(os.getcwd())


def list_runs_here() -> list[RunFolder]:
    """The known runs that were started in the working folder, oldest first."""
    return [RunFolder(run.path) for run in _select_of_working_folder(summarize(list_known_runs()))]


# A campaign is a pipeline, bench, ladder or tune: one folder with a record that names its runs.

PIPELINE_RECORD = "pipeline.json"
BENCH_RECORD = "bench.json"
LADDER_RECORD = "ladder.json"
TUNE_RECORD = "tune.json"
_RECORDS = (PIPELINE_RECORD, BENCH_RECORD, LADDER_RECORD, TUNE_RECORD)


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "run.json")


def is_campaign(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in _RECORDS)


def find_campaign(name: str) -> RunFolder | None:
    """A campaign by its path, or by its name where runs are kept or known runs lie.

    The name without date and kind is that of the newest such campaign.
    """
    for path in (Path(name).absolute(), find_runs_root() / name):
        if is_campaign(path):
            return RunFolder(path)
    if not name or "/" in name:
        return None
    places = {find_runs_root()}
    for path in _find_known_paths():
        # a bench holds its runs, a pipeline lies beside them
        places |= {path.parent, path.parent.parent}
    matches = []
    for place in places:
        for folder in files.list_names(place):
            path = place / folder
            if (folder == name or _has_name(path, name)) and is_campaign(path):
                matches.append(path)
    newest = max(matches, key=lambda path: path.name, default=None)
    return None if newest is None else RunFolder(newest)


def map_campaigns(runs: Iterable[RunFolder]) -> dict[Path, Path]:
    """The campaign of each run that belongs to one. Runs of a pipeline lie beside it."""
    campaigns: dict[Path, Path] = {}
    by_parent: dict[Path, list[Path]] = {}
    for run in runs:
        by_parent.setdefault(run.path.parent, []).append(run.path)
    for parent, paths in by_parent.items():
        if is_campaign(parent):
            campaigns.update(dict.fromkeys(paths, parent))
    for parent in by_parent:
        for pipeline in parent.glob("*-pipeline-*"):
            for run in list_campaign_runs(pipeline):
                campaigns[run.path] = pipeline
    return campaigns


def list_campaign_runs(folder: Path) -> list[RunFolder]:
    """The runs of a campaign that began, each once, in the order of its record."""
    campaign = find_campaign(str(folder))
    if campaign is not None:
        folder = campaign.path
    runs: dict[RunFolder, None] = {}
    for name in _RECORDS:
        for path in _find_named_runs(read_json(folder / name)):
            if not os.path.isdir(path):
                # the campaign's folder was moved, with the runs in it
                path = folder / path.name
            runs[RunFolder(path)] = None
    return [run for run in runs if run.attempts() and _belongs_to(run, folder)]


def _belongs_to(run: RunFolder, campaign: Path) -> bool:
    """Whether a run lies in a campaign, beside it, or is in the index.

    Runs of a campaign are judged and written to, and its record could name any folder.
    """
    parent = resolve_path(run.path).parent
    campaign = resolve_path(campaign)
    if parent in (campaign, campaign.parent):
        return True
    return name_entry(run.path) in files.list_names(find_state_folder() / "runs")


def _find_named_runs(record: object) -> Iterator[Path]:
    """The values of all `run` keys, at any depth."""
    values: Iterable[object] = ()
    if isinstance(record, dict):
        path: Path | None = codec.fit_value(record.get("run"), Path)
        if path is not None:
            yield path
        values = record.values()
    elif isinstance(record, list):
        values = record
    for value in values:
        yield from _find_named_runs(value)


def has_begun(folder: RunFolder) -> bool:
    """Whether a process of the run was started, or a job submitted."""
    return folder.process.exists() or folder.attempts() > 0 or folder.job.exists()


def render_json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"
