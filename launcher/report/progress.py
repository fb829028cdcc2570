"""How far a running attempt is, read from what the training processes write."""

import contextlib
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

from launcher import files, redaction
from launcher.artifacts.digest import CHECKPOINT
from launcher.config.points import BY_NAME, POINTS
from launcher.lazy_dataclass import dataclass
from launcher.printable import make_printable
from launcher.redaction import Redactor

TAIL_LINES = 20
_TAIL_BYTES = 32 * 2**10
_LINE_CHARS = 400
_READ_BYTES = 4 * 2**20
_REST_BYTES = 64 * 2**10
# W&B and MLflow print the address of a run, trackio the command that shows it
TRACKER = re.compile(
    rb"View run\b.{0,200}?(https?://[^\s\x1b\"']+)"
    rb"|(trackio show --project [^\r\n\x1b]{1,100})",
    re.DOTALL,
)
_END = re.compile(rb"[\r\n]")
WINDOW = 20
ENDED = "ended"
"""The last phase."""
# HF Trainer logs of a step: `{'loss': '0.69', ..., 'rewards/margins': '0.01', 'epoch': '0.25'}`
_LOGGED = re.compile(rb"\{'loss': [^{}]*\}")
_LOGGED_VALUE = re.compile(
    rb"'(epoch|rewards/margins|rewards/accuracies)': '?(-?[\d.]+(?:e[+-]?\d+)?)"
)
# `Tokenizing train dataset:  38%|###   | 150/400 [00:00<00:00, 1477.32 examples/s]`
_WORK = re.compile(
    rb"(?:\A|[ \t])([A-Za-z][^|%\r\n:]{2,60}?): +\d+%\|[^|]*\| *"
    rb"([\d.]+[kMGT]?)/([\d.]+[kMGT]?) \["
)
_WORKERS = re.compile(r" *\(num_proc=\d+\)")
# torch/utils/cpp_extension.py
_BUILD = re.compile(rb"Building extension module (\w+)")


@dataclass(slots=True)
class Tail:
    """New complete lines of a growing file; a file that was truncated is read from its start."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self, limit: int = _READ_BYTES) -> list[bytes]:
        """The lines that were completed since the last call, from at most `limit` bytes."""
        try:
            with files.open_regular(self.path, buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size < self.offset:
                    self.offset = 0
                    self.rest = b""
                stream.seek(self.offset)
                block = stream.read(limit)
        except OSError:
            return []
        self.offset += len(block)
        *lines, rest = _END.split(self.rest + block)
        # a line without end must not grow in memory
        self.rest = rest[-_REST_BYTES:]
        return lines

    def skip(self, backlog: int) -> None:
        """Leave out what is more than `backlog` bytes behind, up to the next line."""
        with contextlib.suppress(OSError):
            offset = self.path.stat().st_size - backlog
            if offset > self.offset:
                self.offset = offset
                self.rest = b""


class StepTime(NamedTuple):
    """One optimizer step: when it ended, its tokens, and its own seconds if they are recorded.

    An `interrupted` step followed a save or an evaluation, which counts into its seconds.
    """

    elapsed: float
    tokens: float
    seconds: float | None
    interrupted: bool


class LossSum(NamedTuple):
    """The losses of a step, added over so many ranks."""

    total: float
    ranks: int


@dataclass(slots=True)
class Progress:
    """What is known of a run right now; memory in GiB.

    With an `attempt`, what the same record holds of other attempts is left out (`foreign`).
    `phase` is what happens before the first step and after the last, `since` when it began.
    `began`, `since` and `saved` are seconds since the epoch. `shown` is what the probe has proved,
    by name. `sums` has the losses by step: of TRL, only the mean over ranks is that of the batch.
    `hang` says since when nothing moves. `rows_per_step` counts the rows of all ranks, `rows` those
    of an epoch; None if unknown. `logged_epoch` is the last one in the log. `margin` (of rewards)
    and `accuracy` (a share) are those of DPO.
    """

    total: int | None
    attempt: int | None = None
    foreign: bool = False
    step: int = 0
    sums: dict[int, LossSum] = field(default_factory=dict)
    grad_norm: float | None = None
    learning_rate: float | None = None
    memory_gib: float | None = None
    card_gib: float | None = None
    world: int = 1
    times: list[StepTime] = field(default_factory=list)
    phase: str = "starting"
    since: float | None = None
    began: float | None = None
    saved: tuple[int, float] | None = None
    shown: dict[str, str] = field(default_factory=dict)
    exit: int | None = None
    hang: str | None = None
    rows_per_step: int | None = None
    rows: int | None = None
    logged_epoch: float | None = None
    margin: float | None = None
    accuracy: float | None = None

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Add an event as `runs.events.parse_event` gives it."""
        name = event.get("event")
        moment = _read_number(event.get("t"))
        state = event.get("state")
        if name == "start":
            self._start_attempt(event, moment)
        if self.foreign:
            return
        if name == "hang":
            # the path of the stacks is for the log
            self.hang = str(event.get("message")).partition("; stacks in")[0]
        elif name in ("hang_over", "step", "end"):
            self.hang = None
        if name == "step" and isinstance(event.get("step"), int):
            self._add_step(event, moment)
        elif name == "end" and isinstance(event.get("exit"), int):
            self.exit = event["exit"]
            self.enter_phase(ENDED, moment)
        elif name == "model":
            self.enter_phase("waiting for the first step", moment)
            self.shown[BY_NAME["attention"].label] = str(event.get("attention"))
        elif name == "data_rows" and isinstance(event.get("kept"), int) and self.rows is not None:
            self.rows = event["kept"]
        elif name == "device":
            self.card_gib = _read_number(event.get("total_gib"))
        elif name == "saved" and moment is not None:
            self._add_saved(str(event.get("path")), moment)
        elif name == "liger" and isinstance(event.get("calls"), dict):
            is_engaged = any(event["calls"].values())
            self.shown[BY_NAME["liger"].label] = "engaged" if is_engaged else "not engaged"
        elif state:
            for point in POINTS:
                if name in point.events:
                    self.shown[point.label] = str(state)

    def _start_attempt(self, event: Mapping[str, Any], moment: float | None) -> None:
        """Forget what an earlier attempt did."""
        self.foreign = self.attempt not in (None, event.get("attempt", self.attempt))
        self.world = int(_read_number(event.get("world")) or 0) or self.world
        self.step = 0
        self.times = []
        self.exit = None
        self.began = moment
        self.hang = None
        self.memory_gib = None
        self.grad_norm = None
        self.learning_rate = None
        self.saved = None
        self.logged_epoch = None
        self.margin = None
        self.accuracy = None
        self.sums = {}
        self.shown = {}
        self.enter_phase("starting" if self.foreign else "importing", moment)

    def _add_step(self, event: Mapping[str, Any], moment: float | None) -> None:
        self.step = event["step"]
        self.memory_gib = _read_number(event.get("allocated_gib"))
        for name in ("grad_norm", "learning_rate", "margin", "accuracy"):
            value = _read_number(event.get(name))
            if value is not None:
                setattr(self, name, value)
        self.add_loss(self.step, _read_number(event.get("loss")))
        step = StepTime(
            elapsed=_read_number(event.get("elapsed")) or 0.0,
            tokens=_read_number(event.get("tokens")) or 0.0,
            seconds=_read_number(event.get("seconds")),
            interrupted=event.get("interrupted") is True,
        )
        self.times = [*self.times, step][-WINDOW:]
        if self.began is None and moment is not None:
            self.began = moment - step.elapsed
        if self.step == self.total:
            self.enter_phase("saving the model", moment)

    def _add_saved(self, path: str, moment: float) -> None:
        if CHECKPOINT.search(path):
            self.saved = (self.step, moment)
        elif self.step:
            self.enter_phase("model saved, ending", moment)

    def add_loss(self, step: int, loss: float | None) -> None:
        """Add the loss of one rank; None if it was not finite."""
        total, ranks = self.sums.get(step, (0.0, 0))
        if loss is None:
            loss = math.nan
        self.sums[step] = LossSum(total + loss, ranks + 1)

    @property
    def losses(self) -> list[float]:
        """The finite losses of all steps."""
        losses = []
        for loss in self.sums.values():
            if math.isfinite(loss.total):
                losses.append(loss.total / loss.ranks)
        return losses

    @property
    def loss(self) -> float | None:
        """The loss of the newest step that no rank is behind of; None if it is not finite."""
        newest = self.sums.get(self.step)
        previous = self.sums.get(self.step - 1)
        if newest is None or (previous is not None and previous.ranks > newest.ranks):
            newest = previous
        if newest is None or not math.isfinite(newest.total):
            return None
        return newest.total / newest.ranks

    def enter_phase(self, phase: str, moment: float | None = None) -> None:
        """Begin a phase, at this time or now."""
        if phase == self.phase:
            return
        self.phase = phase
        self.since = moment
        if moment is None:
            self.since = time.time()

    def read_logged_step(self, raw: bytes) -> None:
        """Take from a line of the log what HF Trainer says of a step, and the probe does not."""
        logged = _LOGGED.search(raw)
        if logged is None:
            return
        for name, value in _LOGGED_VALUE.findall(logged[0]):
            number = _parse_finite(value)
            if name == b"epoch":
                self.logged_epoch = number
            elif name == b"rewards/margins":
                self.margin = number
            else:
                self.accuracy = number

    @property
    def epoch(self) -> float | None:
        """Passes over the data that are done: as the log says, else by the rows of the steps."""
        if self.logged_epoch is not None:
            return self.logged_epoch
        if not self.step or not self.rows or not self.rows_per_step:
            return None
        return self.step * self.rows_per_step / self.rows

    def read_phase(self, raw: bytes) -> None:
        """Take the phase from a progress bar in a line of the log, outside of training."""
        if self.exit is not None or (self.step and self.step != self.total):
            return
        bar = _WORK.search(raw)
        if bar is not None:
            task, done, total = (part.decode(errors="replace") for part in bar.groups())
            task = _WORKERS.sub("", task)
            if not self.phase.startswith(f"{task} "):
                # the clock is that of the whole bar
                self.since = time.time()
            self.phase = f"{task} {done}/{total}"
            return
        build = _BUILD.search(raw)
        if build is not None:
            self.enter_phase(f"building {build[1].decode()}")

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the last steps, as a verdict counts it: every rank counts like rank 0.

        Saves and evaluations are left out if the record holds the seconds of each step.
        """
        if len(self.times) < 2:
            return None
        steps = self.times[1:]
        seconds = self.times[-1].elapsed - self.times[0].elapsed
        if all(step.seconds is not None for step in steps):
            steps = [step for step in steps if not step.interrupted]
            seconds = sum(step.seconds or 0.0 for step in steps)
        tokens = sum(step.tokens for step in steps) * self.world
        if seconds <= 0 or not tokens:
            return None
        return tokens / seconds

    @property
    def left_s(self) -> float | None:
        if self.total is None or len(self.times) < 2:
            return None
        seconds = self.times[-1].elapsed - self.times[0].elapsed
        seconds_per_step = seconds / (len(self.times) - 1)
        return max(0, self.total - self.step) * seconds_per_step

    def loss_text(self) -> str:
        if self.loss is None:
            return "loss not finite"
        return f"loss {self.loss:.4f}"

    def position(self) -> list[str]:
        """The step and the epoch, in words."""
        step = f"step {self.step:,}"
        if self.total:
            step += f"/{self.total:,}"
        if self.epoch is None:
            return [step]
        return [step, f"epoch {self.epoch:.2f}"]

    def preferences(self) -> list[str]:
        """The figures of DPO, in words."""
        parts = []
        if self.margin is not None:
            parts.append(f"margin {self.margin:.3g}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.0%}")
        return parts

    def describe(self) -> str:
        """One line for a person."""
        if self.hang is not None:
            return f"hangs: {self.hang}"
        if not self.step:
            return self.phase
        parts = [*self.position(), self.loss_text()]
        parts += self.preferences()
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.left_s is not None:
            parts.append(f"{format_clock(self.left_s)} left")
        if self.memory_gib:
            parts.append(f"{self.memory_gib:.1f} GiB")
        return "   ".join(parts)


def _read_number(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    return float(value)


def _parse_finite(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return number


def read_last_lines(path: Path, redactor: Redactor | None = None) -> tuple[str, ...]:
    """The last lines of a log without secrets, or none without a log.

    Of a progress bar, only its last frame is shown.
    """
    redactor = redactor or redaction.find_process_secrets()
    try:
        with files.open_regular(path) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - _TAIL_BYTES))
            raw = log.read(_TAIL_BYTES)
    except OSError:
        return ()
    lines = []
    for raw_line in raw.split(b"\n"):
        frames = raw_line.rstrip(b"\r").split(b"\r")
        lines.append(frames[-1])
    partial = b""
    if size > len(raw):
        # a secret in the first line may be cut in two
        partial = lines.pop(0)
    shown = []
    for line in _clean_text(b"\n".join(lines), redactor).splitlines():
        if line.strip():
            shown.append(_shorten(line))
    if not shown and partial:
        end = _clean_text(partial, redactor)[-_LINE_CHARS:]
        shown.append(f"... the begin of this line left out ... {end}")
    return tuple(shown[-TAIL_LINES:])


def _clean_text(raw: bytes, redactor: Redactor) -> str:
    return redactor.redact(make_printable(raw.decode(errors="replace")))


def _shorten(line: str) -> str:
    if len(line) <= _LINE_CHARS:
        return line
    omitted = len(line) - _LINE_CHARS
    return f"{line[:_LINE_CHARS]} ... {omitted:,} characters of this line left out"


def find_tracker(path: Path, redactor: Redactor | None = None) -> str | None:
    """The address or command by which a log says that W&B, MLflow or trackio shows the run."""
    try:
        with files.open_regular(path) as log:
            match = TRACKER.search(log.read(_READ_BYTES))
    except OSError:
        return None
    if match is None:
        return None
    # the address of an anonymous run holds its key
    address = match[1] or match[2]
    return (redactor or redaction.find_process_secrets()).redact(
        address.decode(errors="replace").strip()
    )


def format_clock(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"
