"""What becomes of records: mutations of the files that a run leaves, by their JSON and by their bytes."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
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

RAW = {"@1e400": "1e400", "@-1e400": "-1e400", "@digits": "9" * 5000, "@negative": "-" + "9" * 5000, "@nan": "NaN",
       "@infinity": "Infinity", "@-infinity": "-Infinity", "@long": "9" * 19, "@exponent": "1e18"}  # fmt: skip
"""Numbers that json.dumps does not write."""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


EXOTIC: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -7, 2, 0.5, 1e308, -1e308, 10**9, 10**18, 2**63, *RAW,
    "", "x", " ", "nan", "None", "0", "1", "true", "..", "../../..", "/", "/etc/passwd", "/dev/zero", ".", "~",
    "a\0b", "\ud800", "\udc80", "\x1b[31m\x1b]0;t\x07", "a\n::error::b", "9" * 5000, "x" * 100_000, "é" * 300,
    "٣", "2026-01-02T03:04:05", "9999-99-99T99:99:99+99:99", "pass", "fail", "running", "SIGKILL",
    [], {}, [1], [[]], [{}], {"a": 1}, {"": None}, [None, None], ["a", 1, None, {}], {"event": {}}, {"value": {}},
    {"run": "/"}, nested(20), nested(200),
)  # fmt: skip


def dumped(value: Any) -> str:
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value inside, its keys and numbers."""
    yield at
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in pairs:
        yield from places(below, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at that place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def without(value: Any, at: tuple[Any, ...]) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(at) == 1:
        del copy[at[0]]
    else:
        copy[at[0]] = without(value[at[0]], at[1:])
    return copy


def renamed(value: Any, at: tuple[Any, ...], key: str) -> Any:
    if not isinstance(value, dict) or len(at) > 1:
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[at[0]] = renamed(value[at[0]], at[1:], key)
        return copy
    return {key if name == at[0] else name: below for name, below in value.items()}


@dataclass
class Mutation:
    """What was done to which file, to be said when a command fails, and how to do it again."""

    path: Path
    what: str
    apply: Callable[[], object]


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def structural(raw: bytes, chance: random.Random) -> tuple[str, bytes] | None:
    """Another value, or none, or another key, at one place of the JSON; None where there is no JSON."""
    lines, number = [raw], 0
    value = _json(raw)
    if value is None:
        lines = raw.splitlines(keepends=True)
        number = chance.randrange(len(lines)) if lines else 0
        value = _json(lines[number]) if lines else None
        if value is None:
            return None
    at = chance.choice(list(places(value)))
    new = chance.choice(EXOTIC)
    kind = chance.choice(("replace", "replace", "replace", "replace", "remove", "rename", "twice"))
    if kind == "remove" and at:
        text = dumped(without(value, at))
    elif kind == "rename" and at and isinstance(at[-1], str):
        text = dumped(renamed(value, at, new if isinstance(new, str) and new not in RAW else "x"))
    elif kind == "twice" and isinstance(value, dict) and value:
        key = chance.choice(list(value))
        text = dumped(value)[:-1] + f", {json.dumps(key)}: {dumped(new)}}}"
    else:
        kind, text = "replace", dumped(replaced(value, at, new))
    lines[number] = text.encode() + b"\n"
    return f"{kind} {number}:{at} by {dumped(new)[:60]}", b"".join(lines)


def bytewise(raw: bytes, chance: random.Random) -> tuple[str, bytes]:
    kind = chance.choice(("flip", "flip", "cut", "insert", "drop", "empty", "noise", "double"))
    at = chance.randrange(len(raw) + 1)
    if kind == "flip" and raw:
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 1, 3, 20))):
            changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        return "flip", bytes(changed)
    if kind == "cut":
        return f"cut at {at}", raw[:at]
    if kind == "insert":
        more = chance.choice(
            (
                b"\0",
                b"\xff\xfe",
                b"{",
                b"[" * 5000,
                b'"',
                b"\n",
                b"\xe2\x82",
                b"1" * 5000,
                b"\r\n{}\r\n",
            )
        )
        return f"insert {more[:9]!r} at {at}", raw[:at] + more + raw[at:]
    if kind == "drop":
        end = min(len(raw), at + chance.randrange(1, 50))
        return f"drop {at} to {end}", raw[:at] + raw[end:]
    if kind == "noise":
        return "noise", chance.randbytes(chance.choice((1, 50, 3000)))
    if kind == "double":
        return "double", raw + raw
    return "empty", b""


def _instead(path: Path, make: Callable[[], object]) -> None:
    path.unlink(missing_ok=True)
    make()


def in_its_place(path: Path, chance: random.Random) -> tuple[str, Callable[[], object]]:
    kinds: dict[str, Callable[[], object]] = {
        "missing": lambda: path.unlink(missing_ok=True),
        "folder": lambda: _instead(path, path.mkdir),
        "fifo": lambda: _instead(path, lambda: os.mkfifo(path)),
        "dangling": lambda: _instead(path, lambda: path.symlink_to("/nowhere/at all")),
        "loop": lambda: _instead(path, lambda: path.symlink_to(path.name)),
        "zero": lambda: _instead(path, lambda: path.symlink_to("/dev/zero")),
        "huge line": lambda: path.write_bytes(b'{"event": "' + b"x" * 2**22 + b'"}\n'),
    }
    kind = chance.choice(list(kinds))
    return kind, kinds[kind]


def mutation(paths: list[Path], chance: random.Random) -> Mutation:
    """One at random; the same for the same state of `chance`."""
    path = chance.choice(paths)
    raw = path.read_bytes()
    way = chance.random()
    found = structural(raw, chance) if way < 0.7 else None
    if found is None and way > 0.93:
        return Mutation(path, *in_its_place(path, chance))
    what, changed = found or bytewise(raw, chance)
    return Mutation(path, what, lambda: path.write_bytes(changed))


class Kept:
    """The files below a folder as they are now, and as they are to be again."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self.files = {path: path.read_bytes() for path in self._files()}
        self.modes = {path: path.stat().st_mode & 0o777 for path in self.files}
        self.stamps = {path: self._stamp(path) for path in self.files}

    def _files(self) -> list[Path]:
        return [
            path
            for root in self.roots
            for path in root.rglob("*")
            if path.is_file() and not path.is_symlink()
        ]

    @staticmethod
    def _stamp(path: Path) -> tuple[int, ...]:
        status = path.lstat()
        return (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)

    def restore(self) -> None:
        import shutil

        for root in self.roots:
            for path in sorted(root.rglob("*"), reverse=True):
                if path in self.files and (path.is_symlink() or not path.is_file()):
                    shutil.rmtree(
                        path
                    ) if path.is_dir() and not path.is_symlink() else path.unlink()
                elif path not in self.files and (path.is_symlink() or not path.is_dir()):
                    path.unlink()
        for path, raw in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or self._stamp(path) != self.stamps[path]:
                path.write_bytes(raw)
                path.chmod(self.modes[path])
                self.stamps[path] = self._stamp(path)


RUNS = ["runs", "--format", "json"]


class Sleeper:
    """A process that stands for the training of a run: it bears the run's mark, and is as it is recorded."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.child = folder, None
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
        told = {
            **process.identify(self.child.pid).as_json(),
            "mark": str(self.folder.path),
            "attempt": 1,
        }
        self.folder.process.unlink(missing_ok=True)
        files.write_bytes(
            self.folder.process,
            json.dumps({**told, "started": rundir.utc_now()}).encode(),
            mode=0o600,
        )

    def is_alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def end(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()


@dataclass
class Failure:
    mutation: Mutation
    words: list[str]
    why: str

    def __str__(self) -> str:
        return f"{self.mutation.path}: {self.mutation.what}\n  launch {' '.join(self.words)}\n  {self.why}"


@dataclass
class Scene:
    """Runs, campaigns, caches and an index, all below `root`; `live` and `healthy` run, `healthy` stays as it is.

    `over` are names for commands about runs that are over, `dry` the words of a dry run into an output that is there.
    """

    root: Path
    live: RunFolder
    healthy: RunFolder
    over: list[str]
    campaigns: list[str]
    dry: list[list[str]]
    seconds: float = 20.0
    commands: int = 2  # of those that have to do with a file, as many are run


class Fuzz:
    """Mutates one file of a scene at a time and runs the commands that read it, in this process."""

    def __init__(self, scene: Scene, patch: pytest.MonkeyPatch) -> None:
        self.scene, self.failures = scene, list[Failure]()
        self.sleepers = {folder.path: Sleeper(folder) for folder in (scene.live, scene.healthy)}
        self.words: list[str] = []
        self.bug: str | None = None
        self.count = 0
        patch.setattr(main, "_bug", self._bug)
        # building the command line anew for each command takes longer than most commands
        patch.setattr(main, "app", _Built())
        kill, killpg = os.kill, os.killpg
        patch.setattr(os, "kill", lambda pid, number: self._guarded(kill, pid, number))
        patch.setattr(os, "killpg", lambda pid, number: self._guarded(killpg, pid, number))
        signal.signal(signal.SIGALRM, self._hangs)
        self.kept = Kept(scene.root)
        self.paths = [path for path in sorted(self.kept.files) if self._is_record(path)]

    def _is_record(self, path: Path) -> bool:
        inside = path.relative_to(self.scene.root).parts
        skipped = {"lock", ".lock", ".launch-lock", "demo", "data", "home", "model", "assets"}
        large = self.kept.files[path].__len__() > 2**20
        return not (skipped & {*inside} or large or path.is_relative_to(self.scene.healthy.path)
                    or path.suffix in {".lock", ".arrow", ".safetensors", ".bin", ".html", ".jinja", ".py"}
                    or path.name.startswith("tokenizer"))  # fmt: skip

    def _bug(self, error: Exception, _arguments: object) -> int:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/launcher/" in frame.filename][-3:]
        at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own))
        self.bug = f"{type(error).__name__}: {str(error)[:100]} at {at}"
        return 70

    def _guarded(self, kill: Callable[[int, int], None], pid: int, number: int) -> None:
        if number and pid not in {one.child.pid for one in self.sleepers.values() if one.child} | {
            os.getpid()
        }:
            self.bug = f"it would signal {pid}"
            raise ProcessLookupError
        if (
            number
            and pid == self.sleepers[self.scene.healthy.path].child.pid
            and not self.stops_healthy
        ):
            self.bug = "it would end the healthy run"
            raise ProcessLookupError
        kill(pid, number)

    stops_healthy = False

    def _hangs(self, *_: object) -> None:
        raise TimeoutError("".join(traceback.format_stack()[-4:-1]))

    def launch(self, *words: str, limit: float | None = None) -> tuple[int, str]:
        self.words, self.bug = list(words), None
        out, err = io.StringIO(), io.StringIO()
        signal.setitimer(signal.ITIMER_REAL, limit or self.scene.seconds)
        overview._marks.cache_clear()
        try:
            with contextlib.redirect_stdout(_Stream(out)), contextlib.redirect_stderr(_Stream(err)):
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
            mutation_ = mutation(self.paths, chance)
            self._try(mutation_, chance)
            self.count += 1
        self.stops_healthy = True
        for one in self.sleepers.values():
            one.end()
        return self.failures

    def _try(self, change: Mutation, chance: random.Random) -> None:
        for sleeper in self.sleepers.values():
            if not sleeper.is_alive():
                sleeper.begin()
        live, healthy = self.scene.live, self.scene.healthy
        for folder in (live, healthy):
            self.kept.files[folder.process] = folder.process.read_bytes()
            self.kept.stamps[folder.process] = self.kept._stamp(folder.process)
        if change.path == live.process:
            # it names another process than when the mutation was made
            change = mutation([live.process], chance)
        change.apply()
        try:
            for words in self._commands(change, chance):
                limit = 0.15 if words[0] == "attach" and words[1] == live.path.name else None
                code, out = self.launch(*words, limit=limit)
                interrupted = limit is not None and "TimeoutError" in (self.bug or "")
                if (code == 70 or self.bug) and not interrupted:
                    self.failures.append(Failure(change, words, self.bug or "exit 70"))
                if words == RUNS:
                    self._require_listed(change, words, out)
            if change.path.is_relative_to(live.path) and change.path != live.process:
                code, _ = self.launch("stop", live.path.name)
                if code or self.sleepers[live.path].is_alive():
                    self.failures.append(
                        Failure(change, ["stop"], f"a live run is not stopped: {code} {self.bug}")
                    )
            elif change.path == live.process:
                self.launch("stop", live.path.name)
                if self.bug:
                    self.failures.append(Failure(change, ["stop"], self.bug))
            if self.count % 97 == 0:
                self.stops_healthy = True
                code, _ = self.launch("stop", healthy.path.name)
                self.stops_healthy = False
                if code or self.sleepers[healthy.path].is_alive():
                    self.failures.append(Failure(change, ["stop healthy"], f"{code} {self.bug}"))
        finally:
            self.kept.restore()

    def _require_listed(self, change: Mutation, words: list[str], out: str) -> None:
        with contextlib.suppress(ValueError):
            rows = {row["run"]: row for row in json.loads(out)["data"]}
            if rows.get(self.scene.healthy.path.name, {}).get("state") == "running":
                return
        self.failures.append(Failure(change, words, "the healthy run is not listed as running"))

    def _commands(self, change: Mutation, chance: random.Random) -> Iterator[list[str]]:
        yield RUNS
        commands = list(self._related(change, chance))
        yield from chance.sample(commands, min(len(commands), self.scene.commands))

    def _related(self, change: Mutation, chance: random.Random) -> Iterator[list[str]]:
        inside = change.path.relative_to(self.scene.root).parts
        own = [name for name in (*self.scene.over, self.scene.live.path.name) if name in inside]
        own = own or [chance.choice(self.scene.over)]
        for name in own:
            for verb in ("check", "report", "logs", "attach"):
                yield [verb, name, "-n", "3"] if verb == "logs" else [verb, name]
            if name != self.scene.live.path.name:
                yield ["stop", name]
                yield ["rm", name]
            yield ["cache", "why", name]
        for name in self.scene.campaigns:
            if name in inside or chance.random() < 0.05:
                yield ["check", name]
                yield ["report", name]
                yield ["rm", name]
        if "cache" in inside or "state" in inside or chance.random() < 0.1:
            yield ["cache", "list"]
            yield ["cache", "clear", "--dry-run"]
            yield ["runs"]
        if chance.random() < 0.3:
            yield ["check", self.scene.healthy.path.name]
        if self.scene.dry and (".cache" in inside or change.path.name in ("run.json", "run-1.json", "lease-1.json")
                               or chance.random() < 0.05):  # fmt: skip
            yield chance.choice(self.scene.dry)


class _Built:
    """The command line, built once."""

    registered_groups = app.registered_groups

    def __init__(self) -> None:
        self.command = typer.main.get_command(app)

    def __call__(self, **settings: Any) -> Any:
        return self.command(**settings)


class _Stream(io.TextIOWrapper):
    """A standard stream with a buffer of bytes below it, as `launch logs` writes to."""

    def __init__(self, text: io.StringIO) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.text = text

    def write(self, text: str) -> int:
        # as standard output takes it: what is no text is an error
        text.encode("utf-8", "surrogateescape")
        return self.text.write(text)
