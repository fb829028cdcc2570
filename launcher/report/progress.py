"""How far a running attempt is, and what else people look for, read from what the training processes write."""

import contextlib
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launcher import files, redaction
from launcher.artifacts.digest import CHECKPOINT
from launcher.config.points import BY_NAME, POINTS
from launcher.printable import printable
from launcher.redaction import Redactor

TAIL_LINES = 20
_TAIL_BYTES = 32 * 2**10
_LINE_CHARS = 400
# W&B and MLflow print the address of a run, trackio the command that shows it
TRACKER = re.compile(
    rb"View run\b.{0,200}?(https?://[^\s\x1b\"']+)|(trackio show --project [^\r\n\x1b]{1,100})", re.DOTALL
)
_TRACKER_WITHIN = 4 * 2**20
_END = re.compile(rb"[\r\n]")
WINDOW = 20
ENDED = "ended"  # the last phase
# what HF Trainer logs of a step: `{'loss': '0.69', ..., 'rewards/margins': '0.01', 'epoch': '0.25'}`
_LOGGED = re.compile(rb"\{'loss': [^{}]*\}")
_LOGGED_VALUE = re.compile(rb"'(epoch|rewards/margins|rewards/accuracies)': '?(-?[\d.]+(?:e[+-]?\d+)?)")
# `Tokenizing train dataset:  38%|###   | 150/400 [00:00<00:00, 1477.32 examples/s]`
_WORK = re.compile(rb"(?:\A|[ \t])([A-Za-z][^|%\r\n:]{2,60}?): +\d+%\|[^|]*\| *([\d.]+[kMGT]?)/([\d.]+[kMGT]?) \[")
# torch/utils/cpp_extension.py
_BUILD = re.compile(rb"Building extension module (\w+)")
_LABELS = {event: point.label for point in POINTS for event in point.events}
"""What the panel calls the point of which an event tells the state."""


@dataclass(slots=True)
class Tail:
    """New complete lines of a growing file; one that was truncated is begun anew."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self, limit: int = 4 * 2**20) -> list[bytes]:
        """The lines that were finished since the last call, at most `limit` bytes of them."""
        try:
            with files.open_regular(self.path, buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size < self.offset:
                    self.offset, self.rest = 0, b""
                stream.seek(self.offset)
                block = stream.read(limit)
        except OSError:
            return []
        self.offset += len(block)
        *lines, self.rest = _END.split(self.rest + block)
        # a line without end must not grow in memory
        self.rest = self.rest[-65536:]
        return lines

    def skip(self, backlog: int) -> None:
        """Leave out what is more than `backlog` bytes behind, up to the next line."""
        with contextlib.suppress(OSError):
            behind = self.path.stat().st_size - backlog
            if behind > self.offset:
                self.offset, self.rest = behind, b""


class StepTime(NamedTuple):
    """One optimizer step: when it was over, its tokens, and what it took itself, where that is recorded. `interrupted`
    steps followed a save or an evaluation, which counts into their seconds."""

    elapsed: float
    tokens: float
    seconds: float | None
    interrupted: bool


@dataclass(slots=True)
class Progress:
    """What is known of the run right now; memory in GiB. Where an `attempt` is named, what the same record holds of
    others is left out. `phase` is what happens before the first step and after the last, and `since` when that began;
    `began`, `since` and `saved` are seconds since the epoch. `shown` is what the probe has proved so far, by name.
    `sums` are the losses of a step over so many ranks: of TRL only their mean is that of the batch. `hang` says
    since when nothing moves. `rows_per_step` are those of all ranks, `rows` those of an epoch, None where unknown;
    `logged_epoch` is the last one in the log. `margin` (of rewards) and `accuracy` (a share) are those of DPO."""

    total: int | None
    attempt: int | None = None
    foreign: bool = False
    step: int = 0
    sums: dict[int, tuple[float, int]] = field(default_factory=dict)
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

    def event(self, event: dict[str, Any]) -> None:
        """Take in an event as `runs.events.read` gives it."""
        name, at, state = event.get("event"), _optional(event.get("t")), event.get("state")
        if name == "start":
            self._start(event, at)
        if self.foreign:
            return
        if name == "hang":
            # the path of the stacks is for the log
            self.hang = str(event.get("message")).partition("; stacks in")[0]
        elif name in ("hang_over", "step", "end"):
            self.hang = None
        if name == "step" and isinstance(event.get("step"), int):
            self._step(event, at)
        elif name == "end" and isinstance(event.get("exit"), int):
            self.exit = event["exit"]
            self.enter(ENDED, at)
        elif name == "model":
            self.enter("waiting for the first step", at)
            self.shown[BY_NAME["attention"].label] = str(event.get("attention"))
        elif name == "data_rows" and isinstance(event.get("kept"), int) and self.rows is not None:
            self.rows = event["kept"]
        elif name == "device":
            self.card_gib = _optional(event.get("total_gib"))
        elif name == "saved" and at is not None:
            if CHECKPOINT.search(str(event.get("path"))):
                self.saved = self.step, at
            elif self.step:
                self.enter("model saved, ending", at)
        elif name == "liger" and isinstance(event.get("calls"), dict):
            engaged = any(event["calls"].values())
            self.shown[BY_NAME["liger"].label] = "engaged" if engaged else "not engaged"
        elif name in _LABELS and state:
            self.shown[_LABELS[name]] = str(state)

    def _start(self, event: dict[str, Any], at: float | None) -> None:
        self.foreign = self.attempt not in (None, event.get("attempt", self.attempt))
        self.world = int(_optional(event.get("world")) or 0) or self.world
        self.step, self.times, self.exit, self.began = 0, [], None, at
        self.hang = None
        self.memory_gib = self.grad_norm = self.learning_rate = self.saved = None
        self.logged_epoch = self.margin = self.accuracy = None
        self.sums, self.shown = {}, {}
        self.enter("starting" if self.foreign else "importing", at)

    def _step(self, event: dict[str, Any], at: float | None) -> None:
        names = ("allocated_gib", "grad_norm", "learning_rate", "elapsed", "tokens", "seconds")
        self.memory_gib, norm, rate, elapsed, tokens, seconds = (_optional(event.get(n)) for n in names)
        self.step = event["step"]
        self.grad_norm = self.grad_norm if norm is None else norm
        self.learning_rate = self.learning_rate if rate is None else rate
        margin = _optional(event.get("margin"))
        accuracy = _optional(event.get("accuracy"))
        self.margin = self.margin if margin is None else margin
        self.accuracy = self.accuracy if accuracy is None else accuracy
        self.add_loss(self.step, _optional(event.get("loss")))
        step = StepTime(elapsed or 0.0, tokens or 0.0, seconds, interrupted=event.get("interrupted") is True)
        self.times = [*self.times, step][-WINDOW:]
        if self.began is None and at is not None:
            self.began = at - step.elapsed
        if self.step == self.total:
            self.enter("saving the model", at)

    def add_loss(self, step: int, loss: float | None) -> None:
        """The loss of one rank; None where it was not finite."""
        whole, ranks = self.sums.get(step, (0.0, 0))
        self.sums[step] = whole + (math.nan if loss is None else loss), ranks + 1

    @property
    def losses(self) -> list[float]:
        """The finite losses of all steps."""
        return [whole / ranks for whole, ranks in self.sums.values() if math.isfinite(whole)]

    @property
    def loss(self) -> float | None:
        """That of the newest step that no rank is behind of; None where it is not finite."""
        newest = [self.sums[step] for step in (self.step - 1, self.step) if step in self.sums]
        whole, ranks = max(reversed(newest), key=lambda one: one[1], default=(math.nan, 1))
        return whole / ranks if math.isfinite(whole) else None

    def enter(self, phase: str, at: float | None = None) -> None:
        """A phase begins, at this time or now."""
        if phase != self.phase:
            self.phase, self.since = phase, time.time() if at is None else at

    def logged(self, raw: bytes) -> None:
        """Take in a line of the log: what HF Trainer says of a step, and the probe does not."""
        found = _LOGGED.search(raw)
        if found is None:
            return
        for name, value in _LOGGED_VALUE.findall(found[0]):
            number = _finite(value)
            if name == b"epoch":
                self.logged_epoch = number
            elif name == b"rewards/margins":
                self.margin = number
            else:
                self.accuracy = number

    @property
    def epoch(self) -> float | None:
        """How many passes over the data are done: as the log says, else by the rows of the steps."""
        if self.logged_epoch is not None:
            return self.logged_epoch
        if not self.step or not self.rows or not self.rows_per_step:
            return None
        return self.step * self.rows_per_step / self.rows

    def work(self, raw: bytes) -> None:
        """Take in a line of the log: outside of training its bars name the phase, in the words of the log."""
        if self.exit is not None or (self.step and self.step != self.total):
            return
        if found := _WORK.search(raw):
            what, done, total = (part.decode(errors="replace") for part in found.groups())
            what = re.sub(r" *\(num_proc=\d+\)", "", what)
            # the clock is that of the whole bar
            since = self.since if self.phase.startswith(f"{what} ") else time.time()
            self.phase, self.since = f"{what} {done}/{total}", since
        elif built := _BUILD.search(raw):
            self.enter(f"building {built[1].decode()}")

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps, all ranks taken to do what rank 0 does; as a verdict counts it. Saves and evaluations
        take no part in it, where the record holds the seconds of a step."""
        if len(self.times) < 2:
            return None
        seconds, after = self.times[-1].elapsed - self.times[0].elapsed, self.times[1:]
        if all(step.seconds is not None for step in after):
            after = [step for step in after if not step.interrupted]
            seconds = sum(step.seconds or 0.0 for step in after)
        tokens = sum(step.tokens for step in after) * self.world
        return tokens / seconds if seconds > 0 and tokens else None

    @property
    def left_s(self) -> float | None:
        if self.total is None or len(self.times) < 2:
            return None
        pace = (self.times[-1].elapsed - self.times[0].elapsed) / (len(self.times) - 1)
        return max(0, self.total - self.step) * pace

    def preferences(self) -> list[str]:
        """What DPO is looked at for, in words."""
        parts = []
        if self.margin is not None:
            parts.append(f"margin {self.margin:.3g}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.0%}")
        return parts

    def line(self) -> str:
        """One line for a person."""
        if self.hang is not None:
            return f"hangs: {self.hang}"
        if not self.step:
            return self.phase
        of = f"/{self.total:,}" if self.total else ""
        parts = [f"step {self.step:,}{of}"]
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch:.2f}")
        parts.append("loss not finite" if self.loss is None else f"loss {self.loss:.4f}")
        parts += self.preferences()
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.left_s is not None:
            parts.append(f"{clock(self.left_s)} left")
        if self.memory_gib:
            parts.append(f"{self.memory_gib:.1f} GiB")
        return "   ".join(parts)


def _optional(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _finite(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def last_lines(path: Path, redactor: Redactor | None = None) -> tuple[str, ...]:
    """The last lines without secrets, of a progress bar its last frame; none without a log."""
    redactor = redactor or redaction.of_process()
    try:
        with files.open_regular(path) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - _TAIL_BYTES))
            raw = log.read(_TAIL_BYTES)
    except OSError:
        return ()
    lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in raw.split(b"\n")]
    cut = b""
    if size > len(raw):
        # where the first one is cut off, a secret may be cut in two
        cut = lines.pop(0)
    text = b"\n".join(lines).decode(errors="replace")
    shown = [_shortened(line) for line in redactor.redact(printable(text)).splitlines() if line.strip()]
    if not shown and cut:
        end = redactor.redact(printable(cut.decode(errors="replace")))[-_LINE_CHARS:]
        shown = [f"... the begin of this line left out ... {end}"]
    return tuple(shown[-TAIL_LINES:])


def _shortened(line: str) -> str:
    if len(line) <= _LINE_CHARS:
        return line
    return f"{line[:_LINE_CHARS]} ... {len(line) - _LINE_CHARS:,} characters of this line left out"


def tracker(path: Path, redactor: Redactor | None = None) -> str | None:
    """Where W&B, MLflow or trackio shows the run: an address or a command, as the log says; else None."""
    try:
        with files.open_regular(path) as log:
            found = TRACKER.search(log.read(_TRACKER_WITHIN))
    except OSError:
        return None
    # of an anonymous run the address holds its key
    if not found:
        return None
    address = (found[1] or found[2]).decode(errors="replace").strip()
    return (redactor or redaction.of_process()).redact(address)


def clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
