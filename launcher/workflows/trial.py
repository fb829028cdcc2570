"""One real run of a stage file from start to verdict, for whatever starts several in turn (see `experiment`)."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.errors import Exit, LaunchError, brief
from launcher.lifecycle import follow, forecast, start, stop
from launcher.lifecycle.prepare import Prepared
from launcher.machine import process
from launcher.plan.plan import Plan
from launcher.runs.rundir import RunFolder
from launcher.verdict.check import Verdict

# whoever waited for the training process tells all of its command line first
_COMMAND = re.compile(r"Command '\[.*\]' (?=died|returned)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one run. `seconds` is wall time from the start to the verdict, start-up included.

    `finished_before`: nothing was started, because an earlier attempt had come to its end. `timed_out`:
    it was stopped because its time was up.
    """

    run: RunFolder
    plan: Plan
    verdict: Verdict
    exit: Exit
    seconds: float = 0.0
    timed_out: bool = False
    finished_before: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped it: whatever comes next must not be started."""
        return self.exit is Exit.INTERRUPTED and not self.timed_out

    @property
    def reason(self) -> str | None:
        """Why it did not pass, in one line; None where it did."""
        if self.exit is Exit.OK:
            return None
        if self.timed_out:
            return f"stopped: its time was up after {self.seconds:.0f} s"
        if self.verdict.stopped is not None:
            return self.verdict.stopped
        finish = self.verdict.point("finish")
        if finish.state == "killed" and finish.detail.get("signal"):
            return f"{finish.detail['signal']}: {finish.detail.get('help') or 'killed'}"
        error = finish.detail.get("error")
        if isinstance(error, dict) and error.get("message"):
            return brief(_COMMAND.sub("the training process ", str(error["message"])), 300)
        bad = [point for point in self.verdict.points if point.ok is not True]
        reasons = "; ".join(f"{p.name}: {p.state}, expected {p.expected}" for p in bad)
        return reasons or ("interrupted" if self.interrupted else f"exit code {int(self.exit)}")

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run.path),
            "gpus": self.plan.gpus,
            "per_device": self.plan.per_device,
            "accumulation": self.plan.accumulation,
            "status": self.verdict.status,
            "exit": int(self.exit),
            "reason": self.reason,
            "steps": self.verdict.steps,
            "seconds": round(self.seconds, 1),
            "timed_out": self.timed_out,
            "metrics": dict(self.verdict.metrics),
        }


def of_prepared(prepared: Prepared, *, timeout_s: float | None = None, allow_unproven: bool = False) -> Outcome:
    """Start and judge one run; returns when every process of it has gone.

    INT and TERM stop the run, and the outcome says so; one that comes before the run can be told raises
    KeyboardInterrupt, with nothing left behind. Raises what `start.begin` raises: then nothing was started.
    """
    prepared = forecast.with_forecast(prepared)
    if prepared.decision.kind == "finished":
        verdict = start.finish(prepared.folder)
        return Outcome(run=prepared.folder, plan=prepared.plan, verdict=verdict, exit=Exit.OK, finished_before=True)
    began = time.monotonic()
    try:
        with unwatched():
            folder, attempt = start.begin(prepared, allow_unproven=allow_unproven)
            with _at_most(timeout_s, folder) as up:
                interrupted = follow.until_over(folder, attempt, forward=True)
    except (KeyboardInterrupt, follow.Detached):
        # before anybody listened, or where a batch system signals every process of a job itself
        _leave_nothing(prepared.folder)
        raise KeyboardInterrupt from None
    verdict, code = start.conclusion(folder, attempt)
    # one that was over by then has its verdict all the same, and nothing comes after it
    code = Exit.INTERRUPTED if interrupted else code
    return Outcome(
        run=folder,
        plan=prepared.plan,
        verdict=verdict,
        exit=code,
        seconds=time.monotonic() - began,
        timed_out=up.is_set() and not interrupted and code is Exit.INTERRUPTED,
    )


@contextlib.contextmanager
def _at_most(seconds: float | None, folder: RunFolder) -> Iterator[threading.Event]:
    """Have the run stopped when its time is up; the event says whether that was so."""
    up = threading.Event()

    def end() -> None:
        up.set()
        _leave_nothing(folder)

    timer = threading.Timer(max(0.0, seconds or 0.0), end)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield up
    finally:
        timer.cancel()


def _leave_nothing(folder: RunFolder) -> None:
    """Stop what runs there; it may have come to its end by itself in the meantime."""
    with contextlib.suppress(LaunchError, OSError):
        stop.stop(folder)


@dataclass(slots=True)
class Stop:
    requested: bool = False


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Runs in turn, ended by INT and TERM: the block is left, and what is yielded says so. The terminal may go."""
    stop = Stop()
    with unwatched():
        try:
            yield stop
        except (KeyboardInterrupt, follow.Detached):
            # between two runs there is none to hand it to
            stop.requested = True


def unwatched() -> contextlib.AbstractContextManager[None]:
    """HUP is left alone, TERM is what INT is, while a run is being started too: nothing is left behind."""
    return process.handling({signal.SIGHUP: lambda *_: None, signal.SIGTERM: signal.default_int_handler})
