"""A place where `launch` runs for real, with a trainer of no brains: its folders, interpreter,
processes.
"""

import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import saved
import yaml
from conftest import NO_PACKAGES, PATIENCE_S

from launcher import files
from launcher.machine import process
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

FAKE = Path(__file__).with_name("fake_trainer.py")
LAUNCH = (sys.executable, "-m", "launcher")
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason=f"{NO_PACKAGES}: trl's source is read"
)

# Asked about itself, it answers as the tests' Python does; asked to train, it does what FAKE_STEPS
# says.
_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
exec {python} {begin} "$@"
"""
_BEGIN = """
import json, os, sys
with open(os.environ["FAKE_WORLD"] + "/argv.json", "w") as stream:
    json.dump(sys.argv, stream)
steps = json.loads(os.environ["FAKE_STEPS"])
os.execv(sys.executable, [sys.executable, "-u", {fake!r}, *steps])
"""


def wait_until(true: Callable[[], object]) -> None:
    """Wait for something that comes soon, on a machine that may be slow."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def write_rows(folder: Path, count: int = 64) -> None:
    """A data set of texts, no two of them alike."""
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "text": f"This is row {number}.",
            "chosen": f"Row {number} is good.",
            "rejected": f"Row {number} is not.",
        }
        for number in range(count)
    ]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def wait_until_shown(command: subprocess.Popen[bytes]) -> None:
    """Wait until a command shows its run: from then on it takes signals as it should."""
    assert command.stderr is not None
    line = b"\n"
    while line and not re.search(rb"   (starting|loading|step \d+)", line):
        line = command.stderr.readline()
    assert line, "it ended without a word of its run"


def find_processes(variable: str, value: Path) -> set[int]:
    """The living processes with this in their environment."""
    setting = os.fsencode(f"{variable}={value}")
    alive = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes().split(b"\0")
            pid = int(entry.name)
            if setting in environ and process.identify(pid).is_alive():
                alive.add(pid)
    return alive


def kill(*pids: int) -> None:
    """Kill processes, and wait until their files are closed and their locks are free too.

    A process that is ending loses its environment before that.
    """
    killed = [process.identify(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for each in killed:
        wait_until(functools.partial(_has_ended, each))


def _has_ended(one: process.Identity) -> bool:
    return not one.is_alive()


def read_cmdline(pid: int) -> bytes:
    """The words of a process; none of one that has gone meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def prepare_run(root: Path, *steps: str, name: str = "a run", **changes: Any) -> RunFolder:
    """A run folder as a start leaves it, around a fake trainer."""
    attempt = Attempt(
        number=1,
        argv=(sys.executable, "-u", str(FAKE), *steps),
        env={},
        cwd=str(root),
        environ=dict(os.environ),
        stage="sft",
        backend="trl",
        title="sft fake",
    )
    attempt = replace(attempt, **changes)
    runs = attempt.environ.get("LAUNCH_RUNS", root / "runs")
    folder = RunFolder(Path(runs, name))
    folder.path.mkdir(parents=True, exist_ok=True)
    manifest = {
        "stage": "sft",
        "backend": "trl",
        "plan": {"gpus": 0},
        "args": {},
        "output": changes.get("output"),
    }
    files.write_json(folder.manifest, manifest)
    attempt.write(folder)
    return folder


@dataclass
class World:
    """Everything below one folder; `environ` is what every command of it gets."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.root / "pids").mkdir(parents=True)
        self.environ = {
            **os.environ,
            "LAUNCH_RUNS": str(self.root / "runs"),
            "XDG_STATE_HOME": str(self.root / "state"),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "LAUNCH_CACHE": str(self.root / "cache" / "launch"),
            "LAUNCH_GRACE": "1,1,1",
            "FAKE_WORLD": str(self.root),
            "FAKE_PIDS": str(self.root / "pids"),
            "FAKE_STEPS": "[]",
            # sessions on a server of its own; below `root` the socket's name would be too long
            "TMUX_TMPDIR": tempfile.mkdtemp(prefix="lt-", dir="/tmp"),
            "TMUX": "",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    @property
    def runs(self) -> Path:
        return Path(self.environ["LAUNCH_RUNS"])

    def prepared(self, *steps: str, **changes: Any) -> RunFolder:
        return prepare_run(self.root, *steps, **{"environ": self.environ, **changes})

    def python(self) -> Path:
        begin = self.root / "begin.py"
        begin.write_text(_BEGIN.format(fake=str(FAKE)))
        script = _PYTHON.format(python=shlex.quote(sys.executable), begin=shlex.quote(str(begin)))
        path = self.root / "python"
        path.write_text(script)
        path.chmod(0o755)
        return path

    def cuda_torch(self) -> None:
        """Its interpreter, asked about itself, has a torch that is built for CUDA."""
        version = self.root / "site" / "torch" / "version.py"
        version.parent.mkdir(parents=True)
        version.with_name("__init__.py").touch()
        version.write_text(
            "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
        )
        path = self.python()
        asked = f"export PYTHONPATH={shlex.quote(str(self.root / 'site'))}; exec"
        path.write_text(path.read_text().replace("then exec", f"then {asked}"))

    def config(self, name: str = "stage.yaml", **args: Any) -> Path:
        """A stage file through TRL, in a folder that holds what it names."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (self.root / "data" / "train.jsonl").exists():
            write_rows(self.root / "data")
        model = self.root / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(saved.UNKNOWN)
        saved.loadable(model)
        inputs = {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "out"}
        stage = {
            "stage": "sft",
            "backend": "trl",
            "deepspeed": "none",
            "batch": {"global": 2, "per_device": 2},
            "args": {**inputs, **args},
        }
        path.write_text(yaml.safe_dump(stage, allow_unicode=True), encoding="utf-8")
        return path

    def started(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        only: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> subprocess.Popen[bytes]:
        """`launch` as a process; `env` is added to this world's environment, `only` replaces it."""
        environ = self.environ if only is None else only
        usual: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            "cwd": self.root,
            # what was read of one line must not hold what comes after it
            "bufsize": 0,
        }
        settings = {**usual, **settings}
        return subprocess.Popen([*LAUNCH, *words], env={**environ, **(env or {})}, **settings)

    def launch(self, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        running = self.started(*words, **settings)
        try:
            stdout, stderr = running.communicate(timeout=PATIENCE_S)
        except BaseException:
            running.kill()
            raise
        # None where the caller's settings send it elsewhere
        out = os.fsdecode(stdout or b"")
        err = os.fsdecode(stderr or b"")
        done = subprocess.CompletedProcess(words, running.returncode, out, err)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode != 70, done.stderr
        return done

    def trained(self, *words: str, steps: tuple[str, ...] = (), **settings: Any) -> Any:
        """`launch sft ...` with the fake interpreter."""
        env = {**settings.pop("env", {}), "FAKE_STEPS": json.dumps(steps)}
        python = ("--python", str(self.python()), "--gpus", "0")
        return self.launch("sft", *python, *words, env=env, **settings)

    def pid(self, name: str) -> int:
        """The number of a fake process, as soon as it has one."""
        path = self.root / "pids" / name
        # it exists before it is written
        wait_until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def left(self) -> set[int]:
        return find_processes("FAKE_WORLD", self.root)

    def quiet(self) -> bool:
        wait_until(lambda: not self.left())
        return True

    def close_sessions(self) -> None:
        """Wait until each session of tmux, if any, shows that its command has ended, and end them
        all.
        """
        if shutil.which("tmux") is None:
            return
        for pane in self._tmux("list-panes", "-a", "-F", "#{pane_id}").split():
            wait_until(functools.partial(self._shows_the_end, pane))
        self._tmux("kill-server")

    def _shows_the_end(self, pane: str) -> bool:
        return "press Enter to close" in self._tmux("capture-pane", "-p", "-t", pane)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", *words], env=self.environ, capture_output=True, text=True
        ).stdout

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process work in the world, as the commands that are started in it do."""
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.root)

    def close(self) -> None:
        """Kill what is left."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.environ["TMUX_TMPDIR"], ignore_errors=True)


@contextlib.contextmanager
def open_world(root: Path) -> Iterator[World]:
    world = World(root)
    try:
        yield world
    finally:
        world.close()
