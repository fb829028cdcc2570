"""This training process: the probe's settings, its place in the run, and its record."""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# The environment variables by which launch passes values. `launcher/runs/attempt.py` has the same
# names: it cannot be imported here, and tests/probe/test_handover.py compares them.
SETTINGS = "LAUNCH_PROBE"
ATTEMPT = "LAUNCH_ATTEMPT"
LEASE = "LAUNCH_LEASE"
ARGUMENT = "LAUNCH_ARG_"
TOKENISED = "LAUNCH_TOKENISED"
NOTES = 20  # written at most: what fails in every step fails in the same way
ROOM = 2**20  # bytes of events that are kept while the disk is full
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

Tensor = Any
"""A tensor of torch, which the probe does not import."""
Module = Any
"""A module of torch: the model, in most places."""


class Console(io.FileIO):
    """A console log that drops what a full disk does not take, instead of ending the training."""

    lost = 0

    def write(self, block: Any, /) -> int:
        rest = memoryview(block)
        try:
            while rest:
                written = super().write(rest)
                rest = rest[written:]
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            Console.lost += len(rest)
        return len(block)


def protect_streams() -> None:
    """Let stdout and stderr survive a full disk."""
    for name in ("stdout", "stderr"):
        # a notebook or a test may have put anything there
        with contextlib.suppress(Exception):
            stream = getattr(sys, name)
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, _wrap_console(stream))


def _wrap_console(stream: Any) -> io.TextIOWrapper:
    raw: Any = Console(stream.fileno(), "w", closefd=False)
    if not isinstance(stream.buffer, io.FileIO):
        raw = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class EventLog:
    """Appends events to this rank's file and flushes each."""

    def __init__(self, folder: str, rank: int) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.troubles = 0
        self.stream: Any = None
        self.stacks = os.path.join(folder, f"rank-{rank}.stacks.txt")
        self.supplied: set[str] = set()
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{rank}.jsonl")
            # events that a full disk does not take stay in this buffer until there is room
            self.stream = open(path, "a", ROOM, encoding="utf-8")  # noqa: SIM115 - open until the end

    def is_owner(self) -> bool:
        """False in forked data workers: their events would tear the lines of this process."""
        return os.getpid() == self.pid

    def write(self, event: str, **fields: Any) -> None:
        if self.stream is None or not self.is_owner():
            return
        # neither a bad disk nor a bad value may stop the training
        with contextlib.suppress(Exception):
            content = {"t": round(time.time(), 3), "event": event, **fields}
            line = json.dumps(content, default=str)
            with self.lock:
                self.stream.write(line + "\n")
                self.stream.flush()

    def trouble(self, where: str, error: BaseException) -> None:
        self.troubles += 1
        if self.troubles <= NOTES:
            self.write("note", text=f"probe: {where}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def quietly(self, where: str) -> Iterator[None]:
        """Record an exception as a note instead of raising it into training."""
        try:
            yield
        except Exception as error:
            self.trouble(where, error)

    def supply(self, what: str, why: str) -> None:
        if what not in self.supplied:
            self.supplied.add(what)
            self.write("supplied", what=what, why=why)


def say(message: str) -> None:
    """Write one line to stderr, the run's console log; a progress bar may stand on the line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nlaunch: {message}\n".encode(errors="replace"))


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a file that other processes read, at once. Raises OSError."""
    # ranks may share the folder, and containers have the same process ids
    rank = os.environ.get("RANK") or 0
    part = f"{path}.{rank}"
    with open(part, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    os.replace(part, path)


def read_json(path: str) -> dict[str, Any]:
    """The object in a file of another process; empty if there is none or it is not whole yet."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_attempt_number() -> int:
    """The attempt of the run that this process belongs to, counted from 1."""
    return int(os.environ.get(ATTEMPT) or 1)


def read_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or 0)


def keep_finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True, slots=True)
class Settings:
    """What `launch` asks of the probe (`plan/command.py`).

    `target` is upstream's script, `out` the folder of the records. `watchers` are functions of
    `trainers` by the module that each watches; `stand_ins` those of `supplies`, used on a CPU only.
    `divides_loss`: the loop divides the loss of each micro-batch by their number. `packed`: packing
    was requested; the same on every rank, so collectives may depend on it. `expect` has states by
    point; they must be proved `within` so many optimizer steps. `isolation`: test whether packed
    samples see each other. `first_loss` is the loss of a policy that still is its own reference.
    `pairs`: a row is a chosen and a rejected answer. `max_length` is in tokens. `export` names a
    function of `models/exporting.py` with its settings. Without `final_save` the run ends after its
    last step.
    """

    target: str
    out: str
    cpu: bool = False
    watchers: dict[str, str] = field(default_factory=dict)
    stand_ins: dict[str, str] = field(default_factory=dict)
    divides_loss: bool = False
    packed: bool = False
    expect: dict[str, str] = field(default_factory=dict)
    on_violation: str = "warn"
    on_hang: str = "report"
    within: int = 3
    isolation: bool = True
    hang_factor: float = 20
    hang_seconds: float = 300
    first_loss: float | None = None
    final_save: bool = True
    pairs: bool = False
    max_length: int | None = None
    export: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Settings":
        # an attempt that waited in a queue may have been written by another release of launch
        names = {setting.name for setting in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def checks(self, point: str) -> bool:
        return self.expect.get(point) != "any"

    @property
    def stops(self) -> bool:
        return self.on_violation == "stop"


@dataclass(frozen=True, slots=True)
class FiniteStep:
    """A step whose loss is a number."""

    step: int
    loss: float
    grad_norm: float | None

    def describe(self) -> str:
        text = f"loss {self.loss:.6g}"
        if self.grad_norm is not None:
            text += f", gradient norm {self.grad_norm:.4g}"
        return f"{text} at step {self.step}"


class Process:
    """What all pieces share: the settings, the record, the rank, and the optimizer step.

    `step` counts the steps of this process, `base` those before the checkpoint that it resumed
    from. `testing` is set during passes that are no training. `last` is the last step with a finite
    loss.
    """

    def __init__(self, settings: Settings) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.world = int(os.environ.get("WORLD_SIZE") or 1)
        self.settings = settings
        self.record = EventLog(settings.out, self.rank)
        self.begun = time.perf_counter()
        self.step_begun: float | None = None
        self.step = 0
        self.base = 0
        self.resumed = False
        self.testing = False
        self.last: FiniteStep | None = None

    @property
    def at(self) -> int:
        """The step of the whole run."""
        return self.base + self.step

    def resume(self, path: str, step: int) -> None:
        """A checkpoint was loaded: from now on the policy is not its own reference."""
        self.resumed = True
        self.base = step
        self.record.write("resumed", path=path, step=step)


class ProbePiece:
    """One part of the probe, with what all parts share."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.settings = process.settings
        self.record = process.record
