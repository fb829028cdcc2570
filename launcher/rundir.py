"""The folder of a run: the names of its files, the manifest, and the index of all runs.

A run is identified by the folder that its model goes to: starting the same stage into the same
folder again is a new attempt of the same run.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import files, locks
from launcher.errors import Finding, NotReady, not_ready, usage
from launcher.files import parse_line as parse_line
from launcher.files import read_json as read_json
from launcher.paths import canonical
from launcher.redaction import redact

if TYPE_CHECKING:
    # looking at runs must not pay for importing what starts them
    from launcher.command import Command
    from launcher.machine import Trainer
    from launcher.plan import Plan

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
JOB = "slurm.json"
"""Which job of Slurm's a run was submitted as."""
_NONE = "none"
_HEAD = 16384
OWN = 0o755
"""The mode of run folders, whatever the umask: what others could write is not run."""
_OUTLINE = ("stage", "backend", "output", "asked_output")
_ARGS = b'\n  "args": {'
_NUMBERED = re.compile(r"(?:console|exit)(?:\.(\d{1,4}))?\.(?:log|json)\Z")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The only place that knows what the files of a run are called."""

    path: Path

    @property
    def manifest(self) -> Path:
        """Everything that was decided before the start."""
        return self.path / "run.json"

    @property
    def probe(self) -> Path:
        """One `rank-N.jsonl` a training process."""
        return self.path / "probe"

    @property
    def metrics(self) -> Path:
        """One line a step, over all attempts."""
        return self.path / "metrics.jsonl"

    @property
    def verdict(self) -> Path:
        """What `check` found."""
        return self.path / "verdict.json"

    @property
    def process(self) -> Path:
        """Which process the attempt that began last is."""
        return self.path / "process.json"

    @property
    def lock(self) -> Path:
        """Held, through the kernel, by the process of the attempt that runs."""
        return self.path / "lock"

    @property
    def start(self) -> Path:
        """What the keeper of the next attempt starts, environment included; for the owner alone."""
        return self.path / "start.json"

    @property
    def stage_file(self) -> Path:
        """The stage file as it was resolved: `launch sft RUN/stage.yaml` starts it again."""
        return self.path / "stage.yaml"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed config that was used, where it is none that ships."""
        return self.path / "deepspeed.json"

    @property
    def stop(self) -> Path:
        """That, and how, somebody asked for this attempt to be stopped."""
        return self.path / "stop.json"

    @property
    def diary(self) -> Path:
        """What the keeper had to say, and what the command at the end printed."""
        return self.path / "keeper.log"

    @property
    def report(self) -> Path:
        """The verdict, the plan and the arguments as a page."""
        return self.path / "report.html"

    def node(self, rank: int) -> RunFolder:
        """What machine number `rank` keeps to itself: its log, its processes, its lock, its end."""
        return RunFolder(self.path / f"node{rank}") if rank else self

    def nodes(self) -> list[RunFolder]:
        """This one, and those of the other machines that have begun."""
        others = sorted(self.path.glob("node[1-9]*"), key=lambda path: (len(path.name), path.name))
        return [self, *map(RunFolder, others)]

    def console(self, attempt: int) -> Path:
        """What the training processes wrote, raw."""
        return self.path / _numbered("console", attempt, "log")

    def exit(self, attempt: int) -> Path:
        """How the attempt ended."""
        return self.path / _numbered("exit", attempt, "json")

    def inputs(self, attempt: int) -> Path:
        """What of data and model was not at the attempt's end what it was at its start."""
        return self.path / _numbered("inputs", attempt, "json")

    @property
    def checksums(self) -> Path:
        """The digests of the files of every checkpoint that was complete."""
        return self.path / "checksums.json"

    def concluded(self, attempt: int) -> Path:
        """There once somebody sees to the end of the attempt, and locked until that is done."""
        return self.path / _numbered(".concluded", attempt, "mark")

    def attempts(self) -> int:
        """How many attempts have begun; a log that was tidied away still counts."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return 0
        found = (_NUMBERED.match(name) for name in names)
        return max((int(match[1] or 1) for match in found if match), default=0)


def _numbered(stem: str, attempt: int, suffix: str) -> str:
    return f"{stem}.{suffix}" if attempt == 1 else f"{stem}.{attempt}.{suffix}"


def runs_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where runs live: LAUNCH_RUNS, else `./runs`."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("LAUNCH_RUNS") or "runs").expanduser().absolute()


def state_folder() -> Path:
    """The user's state folder, where the index of runs is kept (XDG)."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "launch"


def choose(
    stage: str, name: str, output: Path | None, root: Path, *, reserve: bool = False, rank: int = 0
) -> tuple[RunFolder, int]:
    """The folder of this start and the number of the attempt.

    The newest run of this stage into the same output folder is continued, any other start is a new
    run. `rank` is the number of this machine among several, which count their attempts each. Nothing
    is created, unless `reserve` asks for the empty folder of a new run: then two starts in the same
    second get two. Raises NotReady where that cannot be made.
    """
    wanted = None if output is None else redact(str(output))
    for folder, told in [] if wanted is None else outlines(newest_first(root)):
        named = told.get("output")
        if told.get("stage") != stage or not isinstance(named, str):
            continue
        if named == wanted or _one_folder(named, str(wanted)):
            return folder, folder.node(rank).attempts() + 1
    return RunFolder(new_folder(root, stage, name, reserve=reserve)), 1


def _one_folder(one: str, other: str) -> bool:
    """Whether both are the same folder, however it is written."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        named = os.path.basename(one) == os.path.basename(other)
        return named and canonical(Path(one)) == canonical(Path(other))


def new_folder(root: Path, kind: str, name: str, *, reserve: bool = True) -> Path:
    """A place for a new run, or for several that belong together: `<UTC time>-<kind>-<name>`.

    It is made unless only looked for. Raises NotReady where it cannot be.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{now}-{kind}-{dashed(redact(name)).strip('-')[:100] or 'run'}"
    path, count = root / stem, 1
    while not _free(path, reserve):
        count += 1
        path = root / f"{stem}-{count}"
    return path


def dashed(text: str) -> str:
    """A text as (part of) a file's name."""
    return _UNSAFE.sub("-", text)


def _free(path: Path, reserve: bool) -> bool:
    if not reserve:
        return not path.exists()
    try:
        path.parent.mkdir(OWN, parents=True, exist_ok=True)
        path.mkdir(OWN)
    except FileExistsError:
        if not path.parent.is_dir():
            raise not_writable(path.parent, "it is a file") from None
        return False
    except OSError as error:
        raise not_writable(path, error.strerror) from None
    return True


def release(folder: RunFolder) -> None:
    """Take back a reserved folder that nothing was written into."""
    with contextlib.suppress(OSError):
        folder.path.rmdir()


def not_writable(path: Path, reason: str | None) -> NotReady:
    """What to raise where a run folder cannot be made or written."""
    return not_ready(
        "runs-not-writable", f"the run folder cannot be written: {reason}",
        "set LAUNCH_RUNS to a writable folder", file=str(path),
    )  # fmt: skip


def newest_first(root: Path) -> Iterator[RunFolder]:
    """The runs of a runs folder."""
    try:
        names = sorted(os.listdir(root), reverse=True)
    except OSError:
        return
    for name in names:
        if os.path.isfile(f"{root}/{name}/run.json"):
            yield RunFolder(root / name)


def create(
    folder: RunFolder, attempt: int, plan: Plan, command: Command, trainer: Trainer,
    output: Path | None, caches: list[dict[str, Any]] | None = None, *,
    devices: dict[str, Any] | None = None, warnings: Sequence[Finding] = (),
    more: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Make the folder, write the manifest and what else it is to hold, enter the run in the index.

    Raises NotReady where the folder cannot be written.
    """
    from launcher.manifest import manifest

    try:
        folder.path.mkdir(OWN, parents=True, exist_ok=True)
        told = manifest(
            attempt, now(), plan, command, trainer, output, caches, devices=devices,
            warnings=warnings,
        )  # fmt: skip
        write_json(folder.manifest, {**told, **redact(dict(more or {}))})
    except OSError as error:
        raise not_writable(folder.path, error.strerror) from None
    enter("runs", folder.path)


def read_manifest(folder: RunFolder) -> dict[str, Any]:
    """The manifest, or an empty mapping where it is missing or half written."""
    return read_json(folder.manifest)


def read_head(folder: RunFolder) -> dict[str, Any]:
    """What the manifest says before it lists every argument: all that a list of runs needs."""
    try:
        with files.open_regular(folder.manifest) as stream:
            head, found, _ = stream.read(_HEAD).partition(_ARGS)
        told = files.parse_json(head.rstrip().rstrip(b",") + b"}") if found else None
    except (OSError, ValueError):
        told = None
    return told if isinstance(told, dict) else read_manifest(folder)


def outlines(folders: Iterable[RunFolder]) -> list[tuple[RunFolder, dict[str, Any]]]:
    """Of each manifest what tells whose run it is; remembered, as long as the manifests are as they were."""
    memory = state_folder() / "outlines.json"
    known, found, changed = files.read_json(memory), list[tuple[RunFolder, dict[str, Any]]](), False
    for folder in folders:
        key = str(folder.path)
        stamp, was = stamp_of(f"{key}/run.json"), known.get(key)
        if not (isinstance(was, dict) and was.get("stamp") == stamp):
            told, changed = read_manifest(folder), True
            known[key] = was = {"stamp": stamp, **{k: told[k] for k in _OUTLINE if k in told}}
        found.append((folder, was))
    if changed:
        remember(memory, known)
    return found


def stamp_of(path: str) -> list[int] | None:
    """What changes whenever a file or a folder is written; None where there is none."""
    try:
        told = os.stat(path)
    except (OSError, ValueError):
        return None
    return [told.st_ino, told.st_mtime_ns, told.st_size]


def remember(memory: Path, known: Mapping[str, Any]) -> None:
    """Write what is only kept to be quick: a state folder that is read-only or full costs the speed alone."""
    with contextlib.suppress(OSError, ValueError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(memory, json.dumps(known).encode())


def write_json(path: Path, data: Any) -> None:
    """Write atomically: a reader sees the old file or the new one, never a half."""
    try:
        raw = json.dumps(data, indent=2, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        # a path that is no UTF-8: escaped, it is still JSON
        raw = json.dumps(data, indent=2, default=str).encode()
    write_bytes(path, raw + b"\n")


def write_text(path: Path, text: str) -> None:
    """Write atomically, by renaming a finished file over the old one."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, raw: bytes, *, durable: bool = False) -> None:
    """Write atomically, by renaming a finished file over the old one; `durable` also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(raw)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def judged(folder: RunFolder, number: int) -> bool:
    """Whether verdict.json is what was found at the end of this attempt: by content, not by any clock."""
    return _mark(folder, number)[:1] == [_digest(folder.verdict)] != [_NONE]


def concluded(folder: RunFolder, number: int) -> bool:
    """Whether an attempt was judged and whoever asked for it was told."""
    return len(_mark(folder, number)) == 1


def seal(folder: RunFolder, number: int, *, untold: bool = False) -> None:
    """Say that verdict.json is what was found at the end of this attempt, and who has still to be told."""
    with contextlib.suppress(OSError):
        # in place: the file is locked
        words = [_digest(folder.verdict), *(["untold"] if untold else [])]
        folder.concluded(number).write_text(" ".join(words))


def note_told(folder: RunFolder, number: int) -> None:
    """Say that whoever asked for this attempt was told of its end, judged or not."""
    with contextlib.suppress(OSError):
        folder.concluded(number).write_text((_mark(folder, number) or [_NONE])[0])


@contextlib.contextmanager
def concluding(folder: RunFolder, number: int) -> Iterator[bool]:
    """Hold the right to conclude an attempt; yields whether that is still to be done, and by nobody else.

    The kernel takes it back from one that is killed: then the next one does what is left.
    """
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
    """UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def enter(index: str, path: Path) -> None:
    """Note a folder in an index of the user's: `runs`, or `caches`.

    One small file each, named by its folder: no lock, no file that two starts could tear.
    """
    folder, place = state_folder() / index, os.fsencode(path.absolute())
    # a read-only home costs the overview from elsewhere, not the run
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / _entry(path), place)


def _entry(path: Path) -> str:
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return f"{dashed(path.name)[-100:]}-{digest}"


def entered(index: str, known: Iterable[Path] = ()) -> Iterator[Path]:
    """The folders of an index, be they there or not, but for those that are `known`."""
    there = {_entry(path) for path in known}
    try:
        entries = [one for one in (state_folder() / index).iterdir() if one.name not in there]
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError, ValueError):
            path = Path(os.fsdecode(files.read_bytes(entry)))
            if path.is_absolute():
                yield path


def known_runs() -> list[RunFolder]:
    """Every run of the index and of the runs folder here, oldest first."""
    paths = {folder.path for folder in newest_first(runs_root())}
    for path in list(entered("runs", paths)):
        if path not in paths and os.path.isfile(f"{path}/run.json"):
            paths.add(path)
    return sorted(map(RunFolder, paths), key=lambda folder: (folder.path.name, folder.path))


def find(name: str) -> RunFolder | None:
    """A run by its folder, its name, a unique prefix of it, or `last`: the one started last.

    Raises UsageError where several begin so.
    """
    path = Path(name)
    # a further machine of a run keeps no manifest of its own
    if name and ((path / "run.json").is_file() or (path / "start.json").is_file()):
        return RunFolder(path.absolute())
    runs = known_runs()
    if name == "last":
        newest = sorted(runs, key=_started, reverse=True)
        return next(filter(begun, newest), next(iter(newest), None))
    matching = [folder for folder in runs if name and folder.path.name.startswith(name)]
    exact = [folder for folder in matching if folder.path.name == name]
    found = exact or matching
    if len(found) > 1:
        listed = ", ".join(str(f.path) if exact else f.path.name for f in found[-5:])
        raise usage(
            "ambiguous-run", f"{len(found)} runs are meant by `{name}`", f"such as {listed}",
        )  # fmt: skip
    return found[0] if found else None


def begun(folder: RunFolder) -> bool:
    """Whether a process of the run was ever started, or a job submitted: else its start was cut short."""
    return folder.attempts() > 0 or folder.process.exists() or (folder.path / JOB).exists()


def _started(folder: RunFolder) -> tuple[float, str]:
    # every attempt writes its manifest anew
    try:
        return folder.manifest.stat().st_mtime, folder.path.name
    except OSError:
        return 0.0, folder.path.name


def json_line(value: Mapping[str, Any]) -> str:
    """One line of a JSONL file."""
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"
