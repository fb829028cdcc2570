"""This training process: what `launch` wants of its probe, where in the run it stands, and its record."""

import contextlib
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
from typing import Any

# The variables in which launch hands things over. `launcher/runs/attempt.py` names the same: nothing of it can be
# imported here, and tests/probe/test_handover.py compares them.
SETTINGS = "LAUNCH_PROBE"
ATTEMPT = "LAUNCH_ATTEMPT"
LEASE = "LAUNCH_LEASE"
ARGUMENT = "LAUNCH_ARG_"
TOKENISED = "LAUNCH_TOKENISED"
NOTES = 20  # of trouble: what fails in every step fails in the same way
# what an older launch, which did not name them, had of every script
EARLIER_WATCHERS = {
    "olmo_core.train.train_module.transformer.train_module": "watch_olmo_step",
    "olmo_core.train.trainer": "watch_olmo_trainer",
    "open_instruct.dataset_transformation": "watch_tokenising",
    "open_instruct.dpo_utils": "watch_pairs",
    "open_instruct.model_utils": "watch_final_save",
    "open_instruct.olmo_core_train_modules": "watch_olmo_module",
    "trl.trainer.dpo_trainer": "watch_preparation",
    "trl.trainer.sft_trainer": "watch_preparation",
}
EARLIER_STAND_INS = {
    "olmo_core.distributed.utils": "supply_gloo",
    "olmo_core.train.callbacks.gpu_memory_monitor": "supply_memory_monitor",
    "open_instruct.utils": "supply_mfu",
    "torch.cuda": "supply_cuda_counters",
}
ROOM = 2**20  # bytes of events that are kept while the disk is full


class Console(io.FileIO):
    """A console log that loses what a full disk does not take, and does not end the training."""

    lost = 0

    def write(self, block: Any, /) -> int:
        left = memoryview(block)
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            Console.lost += len(left)
        return len(block)


def spare_streams() -> None:
    """Have stdout and stderr go on when the disk that they are written to is full."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):
            before = getattr(sys, name)
            if not stat.S_ISREG(os.fstat(before.fileno()).st_mode):
                continue
            before.flush()
            raw: Any = Console(before.fileno(), "w", closefd=False)
            plain = isinstance(before.buffer, io.FileIO)
            stream = io.TextIOWrapper(
                raw if plain else io.BufferedWriter(raw),
                encoding=before.encoding,
                errors=before.errors,
                line_buffering=before.line_buffering,
                write_through=before.write_through,
            )
            setattr(sys, name, stream)


class EventLog:
    """Appends events to this rank's file; flushes each; only in the process that opened it."""

    def __init__(self, folder: str, rank: int) -> None:
        self.pid, self.lock, self.troubles = os.getpid(), threading.Lock(), 0
        self.stream: Any = None
        self.stacks = os.path.join(folder, f"rank-{rank}.stacks.txt")
        self.supplied: set[str] = set()
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{rank}.jsonl")
            # what a full disk does not take is kept, and written once there is room again
            self.stream = open(path, "a", ROOM, encoding="utf-8")  # noqa: SIM115 - open until the end

    def ours(self) -> bool:
        """False in forked data workers, which inherit the stream: their events would tear lines."""
        return os.getpid() == self.pid

    def write(self, event: str, **fields: Any) -> None:
        if self.stream is None or not self.ours():
            return
        # whatever is wrong, with the disk or with a value, is no reason to stop training
        with contextlib.suppress(Exception):
            line = json.dumps({"t": round(time.time(), 3), "event": event, **fields}, default=str)
            with self.lock:
                self.stream.write(line + "\n")
                self.stream.flush()

    def trouble(self, where: str, error: BaseException) -> None:
        self.troubles += 1
        if self.troubles <= NOTES:
            self.write("note", text=f"probe: {where}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def quietly(self, where: str) -> Iterator[None]:
        """What fails in here is noted, and not raised into training."""
        try:
            yield
        except Exception as error:
            self.trouble(where, error)

    def supply(self, what: str, why: str) -> None:
        if what not in self.supplied:
            self.supplied.add(what)
            self.write("supplied", what=what, why=why)


def say(message: str) -> None:
    """One line on stderr, which goes into the run's console log; a bar may stand on the line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nlaunch: {message}\n".encode(errors="replace"))


def attempt_number() -> int:
    """Which attempt of its run this process belongs to, from 1 on."""
    return int(os.environ.get(ATTEMPT) or 1)


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


class Settings:
    """What `launch` wants of the probe; whatever is missing asks for nothing.

    `target` upstream's script, `out` folder of the records, `cpu`; `watchers` are functions of `trainers` by the
    module of the script's that each watches, `stand_ins` those of `supplies` that it needs on a CPU;
    `divides_loss` whether its loop divides each micro-batch's loss by their number; `export` what a function of
    `models/exporting.py` is to write once the training is over;
    `packed` whether packing was requested (the same on every rank, so that collectives may depend on it);
    `gradients` whether those of autograd are compared with those that the optimizer uses; `expect`
    point -> state; `on_violation` stop or warn; `within` optimizer steps until what is expected must be
    proved; `isolation` whether packing is tested; `on_hang` stop or report; `hang_factor` times the
    median step, and `hang_seconds` at least, make a hang; `first_loss` is what the first step must give
    where the policy still is its own reference; without `final_save` the run ends after its last step;
    `pairs` whether a row is a chosen and a rejected answer; `max_length` the tokens that a row is cut to.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.target = str(values["target"])
        self.out = str(values["out"])
        self.cpu = bool(values.get("cpu"))
        # an attempt that waits in a queue may have the settings of an older launch
        self.watchers: dict[str, str] = values.get("watchers", EARLIER_WATCHERS)
        stand_ins = values.get("stand_ins")
        self.stand_ins: dict[str, str] = EARLIER_STAND_INS if stand_ins is True else stand_ins or {}
        self.divides_loss = bool(values.get("divides_loss", values.get("backend") == "trl"))
        self.export: dict[str, Any] = values.get("export") or {}
        self.packed = bool(values.get("packed"))
        expect = values.get("expect") or {}
        self.expect = {point: state for point, state in expect.items() if state != "any"}
        self.gradients = expect.get("gradients") != "any"
        self.checks_loss = expect.get("loss", "finite") != "any"
        self.stops = values.get("on_violation") == "stop"
        self.within = int(values.get("within") or 3)
        self.isolation = bool(values.get("isolation", True))
        self.stops_hang = values.get("on_hang") == "stop"
        self.hang_factor = float(values.get("hang_factor") or 20)
        self.hang_seconds = float(values.get("hang_seconds") or 300)
        self.first_loss = values.get("first_loss")
        self.final_save = bool(values.get("final_save", True))
        self.pairs = bool(values.get("pairs"))
        self.max_length = values.get("max_length")


class Process:
    """What all pieces share: the settings, the record, the rank, and the optimizer step.

    `step` counts this process's own, `base` those before the checkpoint it was resumed from. `testing`
    while passes run that are none of training. `last` is the last step whose loss was finite.
    """

    def __init__(self, settings: Settings) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.world = int(os.environ.get("WORLD_SIZE") or 1)
        self.settings = settings
        self.record = EventLog(settings.out, self.rank)
        self.begun = time.perf_counter()
        self.step_begun: float | None = None
        self.step = self.base = 0
        self.resumed = self.testing = False
        self.last: dict[str, Any] = {}

    @property
    def at(self) -> int:
        return self.base + self.step

    def resumes(self, path: str, step: int) -> None:
        """The policy comes out of a checkpoint: it is not its own reference any more."""
        self.resumed, self.base = True, step
        self.record.write("resumed", path=path, step=step)


class ProbePiece:
    """One piece of the probe: what all of them share, and what it tells with it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.settings = process.settings
        self.record = process.record
