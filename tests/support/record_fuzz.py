"""Commands read records of runs that were damaged: their JSON, their bytes, the file itself."""

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from launcher import files
from launcher.cli import main
from launcher.cli.commands import app
from launcher.machine import process
from launcher.report import overview
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

RAW = {
    "@1e400": "1e400",
    "@-1e400": "-1e400",
    "@digits": "9" * 5000,
    "@negative": "-" + "9" * 5000,
    "@nan": "NaN",
    "@infinity": "Infinity",
    "@-infinity": "-Infinity",
    "@long": "9" * 19,
    "@exponent": "1e18",
}
"""Numbers that json.dumps does not write."""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


NUMBERS = [0, 1, -1, -7, 2, 0.5, 1e308, -1e308, 10**9, 10**18, 2**63, *RAW]
WORDS = """
x nan None 0 1 true .. ../../.. / /etc/passwd /dev/zero . ~ ٣ 2026-01-02T03:04:05
9999-99-99T99:99:99+99:99 pass fail running SIGKILL
"""
TEXTS = [
    *WORDS.split(),
    "",
    " ",
    "a\0b",
    "\ud800",
    "\udc80",
    "\x1b[31m\x1b]0;t\x07",
    "a\n::error::b",
    "9" * 5000,
    "x" * 100_000,
    "é" * 300,
]
NESTS = [
    [],
    {},
    [1],
    [[]],
    [{}],
    {"a": 1},
    {"": None},
    [None, None],
    ["a", 1, None, {}],
    {"event": {}},
    {"value": {}},
    {"run": "/"},
    nested(20),
    nested(200),
]
EXOTIC: list[Any] = [None, True, False, *NUMBERS, *TEXTS, *NESTS]
JUNK = [b"\0", b"\xff\xfe", b"{", b"[" * 5000, b'"', b"\n", b"\xe2\x82", b"1" * 5000, b"\r\n{}\r\n"]


def dumped(value: Any) -> str:
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


# -- damage


Place = tuple[Any, ...]
"""The keys and numbers that lead to a value inside of JSON."""


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """The place of every value inside."""
    yield above
    if isinstance(value, dict):
        for key, below in value.items():
            yield from places(below, (*above, key))
    if isinstance(value, list):
        for number, below in enumerate(value):
            yield from places(below, (*above, number))


def edited(value: Any, place: Place, edit: Callable[[Any], Any]) -> Any:
    """A copy in which `edit` has been applied to the value at a place."""
    if not place:
        return edit(value)
    first, *rest = place
    copy = value.copy()
    copy[first] = edited(value[first], tuple(rest), edit)
    return copy


def without(parent: Any, key: Any) -> Any:
    copy = parent.copy()
    del copy[key]
    return copy


def renamed(parent: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in parent.items()}


@dataclass
class Mutation:
    """What is done to which file."""

    path: Path
    description: str
    apply: Callable[[], object]


def read_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def damage_json(raw: bytes, chance: random.Random) -> tuple[str, bytes] | None:
    """Another value, none, or another key at one place of the JSON; None where there is no JSON."""
    lines = [raw]
    number = 0
    value = read_json(raw)
    if value is None:
        lines = raw.splitlines(keepends=True)
        if not lines:
            return None
        number = chance.randrange(len(lines))
        value = read_json(lines[number])
        if value is None:
            return None
    place = chance.choice(list(places(value)))
    new = chance.choice(EXOTIC)
    kind = chance.choice(["replace", "replace", "replace", "replace", "remove", "rename", "twice"])
    if kind == "remove" and place:
        text = dumped(edited(value, place[:-1], lambda parent: without(parent, place[-1])))
    elif kind == "rename" and place and isinstance(place[-1], str):
        name = new if isinstance(new, str) and new not in RAW else "x"
        text = dumped(edited(value, place[:-1], lambda parent: renamed(parent, place[-1], name)))
    elif kind == "twice" and isinstance(value, dict) and value:
        key = chance.choice(list(value))
        text = dumped(value).removesuffix("}") + f", {json.dumps(key)}: {dumped(new)}}}"
    else:
        kind = "replace"
        text = dumped(edited(value, place, lambda _: new))
    lines[number] = text.encode() + b"\n"
    return f"{kind} {number}:{place} by {dumped(new)[:60]}", b"".join(lines)


def damage_bytes(raw: bytes, chance: random.Random) -> tuple[str, bytes]:
    kind = chance.choice(["flip", "flip", "cut", "insert", "drop", "empty", "noise", "double"])
    place = chance.randrange(len(raw) + 1)
    match kind:
        case "flip" if raw:
            changed = bytearray(raw)
            for _ in range(chance.choice([1, 1, 3, 20])):
                changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            return kind, bytes(changed)
        case "cut":
            return f"cut at {place}", raw[:place]
        case "insert":
            junk = chance.choice(JUNK)
            return f"insert {junk[:9]!r} at {place}", raw[:place] + junk + raw[place:]
        case "drop":
            end = place + chance.randrange(1, 50)
            return f"drop {place} to {end}", raw[:place] + raw[end:]
        case "noise":
            return kind, chance.randbytes(chance.choice([1, 50, 3000]))
        case "double":
            return kind, raw + raw
    return "empty", b""


def replace_file(path: Path, kind: str) -> None:
    """Put something else than a record into its place."""
    path.unlink(missing_ok=True)
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "dangling":
            path.symlink_to("/nowhere/at all")
        case "loop":
            path.symlink_to(path.name)
        case "zero":
            path.symlink_to("/dev/zero")
        case "huge line":
            path.write_bytes(b'{"event": "' + b"x" * 2**22 + b'"}\n')


KINDS = ["missing", "folder", "fifo", "dangling", "loop", "zero", "huge line"]


def choose_mutation(paths: list[Path], chance: random.Random) -> Mutation:
    """A mutation of one of these files; the same for the same state of `chance`."""
    path = chance.choice(paths)
    raw = path.read_bytes()
    way = chance.random()
    if way > 0.93:
        kind = chance.choice(KINDS)
        return Mutation(path, kind, lambda: replace_file(path, kind))
    damaged = damage_json(raw, chance) if way < 0.7 else None
    description, changed = damaged or damage_bytes(raw, chance)
    return Mutation(path, description, lambda: path.write_bytes(changed))


# -- what is damaged


@dataclass
class Saved:
    """One file as it was."""

    raw: bytes
    mode: int
    stamp: tuple[int, ...]


def stamp_of(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns


class Backup:
    """The files below a folder as they are now, and as they are to be again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[Path, Saved] = {}
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                self.keep(path)

    def keep(self, path: Path) -> None:
        mode = path.stat().st_mode & 0o777
        self.files[path] = Saved(raw=path.read_bytes(), mode=mode, stamp=stamp_of(path))

    def restore(self) -> None:
        for path in sorted(self.root.rglob("*"), reverse=True):
            is_known = path in self.files
            is_folder = path.is_dir() and not path.is_symlink()
            is_file = path.is_file() and not path.is_symlink()
            if is_folder and is_known:
                shutil.rmtree(path)
            elif not is_folder and not (is_file and is_known):
                path.unlink()
        for path, saved in self.files.items():
            if path.exists() and stamp_of(path) == saved.stamp:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(saved.raw)
            path.chmod(saved.mode)
            self.keep(path)


class Sleeper:
    """A process that stands for the training of a run: marked, and recorded as it is."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        environ = {**os.environ, process.MARK: str(self.folder.path)}
        null = subprocess.DEVNULL
        self.child = subprocess.Popen(
            ["sleep", "600"],
            env=environ,
            start_new_session=True,
            stdin=null,
            stdout=null,
            stderr=null,
        )
        # the kernel closes the pipe that Popen waits for before it shows the new environment
        while process.read_variable(self.child.pid, process.MARK) is None:
            time.sleep(0.001)
        record = {
            **process.identify(self.child.pid).as_json(),
            "mark": str(self.folder.path),
            "attempt": 1,
            "started": rundir.format_utc_now(),
        }
        self.folder.process.unlink(missing_ok=True)
        files.write_bytes(self.folder.process, json.dumps(record).encode(), mode=0o600)

    def is_alive(self) -> bool:
        return self.child.poll() is None

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


@dataclass
class Scene:
    """Runs, campaigns, caches and an index, all below `root`.

    `live` and `healthy` run; `healthy` is not damaged. `over` are names for commands about runs
    that are over, `dry` the words of a dry run into an output that is there.
    """

    root: Path
    live: RunFolder
    healthy: RunFolder
    over: list[str]
    campaigns: list[str]
    dry: list[list[str]]
    seconds: float = 20.0
    commands: int = 2
    """As many of the commands that have to do with a file are called."""


# -- commands on damaged records


@dataclass
class Failure:
    mutation: Mutation
    words: list[str]
    reason: str

    def __str__(self) -> str:
        command = " ".join(self.words)
        mutation = self.mutation
        return f"{mutation.path}: {mutation.description}\n  launch {command}\n  {self.reason}"


RUNS = ["runs", "--format", "json"]
UNTOUCHED = {"lock", ".lock", ".launch-lock", "demo", "data", "home", "model", "assets"}
"""Folders and files that hold no records."""
NO_RECORDS = {".lock", ".arrow", ".safetensors", ".bin", ".html", ".jinja", ".py"}


class Overdue(BaseException):
    """A command took longer than it may.

    No Exception: the code under test must not take it for an error that it knows how to handle.
    """


class Fuzz:
    """Damages one file of a scene at a time and calls the commands that read it in this process."""

    def __init__(self, scene: Scene, patch: pytest.MonkeyPatch) -> None:
        self.scene = scene
        self.failures: list[Failure] = []
        self.live = Sleeper(scene.live)
        self.healthy = Sleeper(scene.healthy)
        self.may_stop_healthy = False
        self.bug: str | None = None
        patch.setattr(main, "_report_bug", self._note_bug)
        # building the command line anew for each command takes longer than most commands
        patch.setattr(main, "app", BuiltApp())
        patch.setattr(os, "kill", functools.partial(self._kill, os.kill))
        patch.setattr(os, "killpg", functools.partial(self._kill, os.killpg))
        signal.signal(signal.SIGALRM, self._time_out)
        self.backup = Backup(scene.root)
        self.paths = [path for path in sorted(self.backup.files) if self._is_record(path)]

    def _is_record(self, path: Path) -> bool:
        if path.is_relative_to(self.scene.healthy.path):
            return False
        if path.suffix in NO_RECORDS or path.name.startswith("tokenizer"):
            return False
        if len(self.backup.files[path].raw) > 2**20:
            return False
        return UNTOUCHED.isdisjoint(path.relative_to(self.scene.root).parts)

    def _note_bug(self, error: Exception, _arguments: object) -> int:
        frames = []
        for frame in traceback.extract_tb(error.__traceback__):
            if "/launcher/" in frame.filename:
                frames.insert(0, f"{Path(frame.filename).name}:{frame.lineno}")
        self.bug = f"{type(error).__name__}: {str(error)[:100]} at {' < '.join(frames[:3])}"
        return 70

    def _kill(self, kill: Callable[[int, int], None], pid: int, number: int) -> None:
        """Send a signal to no process but those of the scene."""
        allowed = {os.getpid(), self.live.child.pid}
        if self.may_stop_healthy:
            allowed.add(self.healthy.child.pid)
        if number and pid not in allowed:
            self.bug = f"it would signal {pid}"
            raise ProcessLookupError
        kill(pid, number)

    def _time_out(self, *_: object) -> None:
        raise Overdue("".join(traceback.format_stack()[-4:-1]))

    def launch(self, *words: str, limit: float | None = None) -> tuple[int, str]:
        """The exit code and stdout of a command; what must not be is noted in `bug`."""
        self.bug = None
        out = io.StringIO()
        signal.setitimer(signal.ITIMER_REAL, limit or self.scene.seconds)
        overview._list_marks.cache_clear()
        stdout = contextlib.redirect_stdout(TextOverBytes(out))
        stderr = contextlib.redirect_stderr(TextOverBytes(io.StringIO()))
        try:
            with stdout, stderr:
                code = main.main(list(words))
        except BaseException as error:
            self.bug = self.bug or f"{type(error).__name__}: {str(error)[-900:]}"
            code = 70
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return code, out.getvalue()

    def run(self, seed: int, number: int) -> list[Failure]:
        """So many mutations after this seed; each one is the same whatever came before it."""
        for nth in range(number):
            chance = random.Random(f"{seed} {nth}")
            change = choose_mutation(self.paths, chance)
            self._try(change, chance, stops_healthy=nth % 97 == 0)
        self.may_stop_healthy = True
        self.live.end()
        self.healthy.end()
        return self.failures

    def _try(self, change: Mutation, chance: random.Random, *, stops_healthy: bool) -> None:
        for sleeper in (self.live, self.healthy):
            if not sleeper.is_alive():
                sleeper.begin()
            self.backup.keep(sleeper.folder.process)
        live = self.scene.live
        if change.path == live.process:
            # it names another process than when the mutation was chosen
            change = choose_mutation([live.process], chance)
        change.apply()
        try:
            for words in self._commands(change, chance):
                self._call(change, words)
            if change.path.is_relative_to(live.path):
                code, _ = self.launch("stop", live.path.name)
                is_stopped = code == 0 and not self.live.is_alive()
                if self.bug or (not is_stopped and change.path != live.process):
                    self._fail(change, ["stop"], f"a live run is not stopped: {code} {self.bug}")
            if stops_healthy:
                self._stop_healthy(change)
        finally:
            self.backup.restore()

    def _stop_healthy(self, change: Mutation) -> None:
        self.may_stop_healthy = True
        code, _ = self.launch("stop", self.scene.healthy.path.name)
        self.may_stop_healthy = False
        if code or self.healthy.is_alive():
            self._fail(change, ["stop"], f"the healthy run is not stopped: {code} {self.bug}")

    def _call(self, change: Mutation, words: list[str]) -> None:
        attaches = words[:2] == ["attach", self.scene.live.path.name]
        limit = 0.15 if attaches else None
        code, out = self.launch(*words, limit=limit)
        if code == 70 and self.bug is None:
            self.bug = "exit 70"
        is_interrupted = attaches and "Overdue" in str(self.bug)
        if self.bug is not None and not is_interrupted:
            self._fail(change, words, self.bug)
        if words == RUNS and not self._lists_healthy(out):
            self._fail(change, words, "the healthy run is not listed as running")

    def _fail(self, change: Mutation, words: list[str], reason: str) -> None:
        self.failures.append(Failure(change, words, reason))

    def _lists_healthy(self, out: str) -> bool:
        try:
            rows = json.loads(out)["data"]
        except ValueError:
            return False
        states = {row["run"]: row["state"] for row in rows}
        return states.get(self.scene.healthy.path.name) == "running"

    def _commands(self, change: Mutation, chance: random.Random) -> list[list[str]]:
        related = list(self._related(change, chance))
        count = min(len(related), self.scene.commands)
        return [RUNS, *chance.sample(related, count)]

    def _related(self, change: Mutation, chance: random.Random) -> Iterator[list[str]]:
        """The commands that have to do with a file, and a few others."""
        scene = self.scene
        inside = change.path.relative_to(scene.root).parts
        live = scene.live.path.name
        names = [name for name in (*scene.over, live) if name in inside]
        for name in names or [chance.choice(scene.over)]:
            yield ["check", name]
            yield ["report", name]
            yield ["logs", name, "-n", "3"]
            yield ["attach", name]
            yield ["cache", "why", name]
            if name != live:
                yield ["stop", name]
                yield ["rm", name]
        for name in scene.campaigns:
            if name in inside or chance.random() < 0.05:
                yield ["check", name]
                yield ["report", name]
                yield ["rm", name]
        if "cache" in inside or "state" in inside or chance.random() < 0.1:
            yield ["cache", "list"]
            yield ["cache", "clear", "--dry-run"]
            yield ["runs"]
        if chance.random() < 0.3:
            yield ["check", scene.healthy.path.name]
        is_read_by_dry_run = change.path.name in ("run.json", "run-1.json", "lease-1.json")
        if ".cache" in inside or is_read_by_dry_run or chance.random() < 0.05:
            yield chance.choice(scene.dry)


class BuiltApp:
    """The command line, built once."""

    registered_groups = app.registered_groups

    def __init__(self) -> None:
        self.command = typer.main.get_command(app)

    def __call__(self, **settings: Any) -> Any:
        return self.command(**settings)


class TextOverBytes(io.TextIOWrapper):
    """A standard stream with a buffer of bytes below it, as `launch logs` writes to."""

    def __init__(self, text: io.StringIO) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.text = text

    def write(self, text: str) -> int:
        # as standard output takes it: what is no text is an error
        text.encode("utf-8", "surrogateescape")
        return self.text.write(text)
