"""Several runs that belong together: their folder, found again, the record in it, and each run to its verdict."""

import contextlib
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import files, redaction
from launcher.errors import Exit, Finding, LaunchError, brief, launch_finding
from launcher.lifecycle import conclude, follow, start, stop
from launcher.machine import locks, process
from launcher.plan.plan import Plan
from launcher.planning import forecast
from launcher.planning.prepare import Prepared
from launcher.redaction import Redactor
from launcher.report import page as report_page
from launcher.report import series
from launcher.runs import lease, rundir, runner
from launcher.runs.rundir import RunFolder
from launcher.verdict.check import Verdict

# whoever waited for the training process tells all of its command line first
_COMMAND = re.compile(r"Command '\[.*\]' (?=died|returned)", re.DOTALL)


def key_of(about: Any) -> str:
    """The key of what a campaign is about: the same for the same values."""
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One ladder, pipeline, comparison or search; another `key` is another. Its record is `<kind>.json`."""

    kind: str
    key: str
    name: str
    root: Path

    def earlier(self) -> Path | None:
        """The newest folder of it; None where it has never begun."""
        records = sorted(self.root.glob(f"*-{self.kind}-*/{self.kind}.json"), reverse=True)
        return next((one.parent for one in records if rundir.read_json(one).get("key") == self.key), None)

    @contextlib.contextmanager
    def opened(self, *, fresh: bool = False, taken: Finding | None = None) -> Iterator[Path]:
        """Its folder, `<UTC time>-<kind>-<name>`, for this command alone; what an earlier one left running is ended.

        `fresh` makes another one. Raises NotReady where it cannot be made, or (`taken`) where another process
        is at it.
        """
        taken = taken or launch_finding(
            "error",
            "under-way",
            "the same command is under way in another process",
            "wait for it, or --fresh for a folder of its own",
            file=str(self.root),
        )
        # two that begin at once have no folder in common yet
        name = hashlib.sha256(os.fsencode(f"{self.root}\0{self.key}")).hexdigest()[:32]
        place = rundir.state_folder() / f"{self.kind}s" / name
        with contextlib.ExitStack() as stack:
            with locks.alone(place, taken=taken):
                before = None if fresh else self.earlier()
                folder = before or rundir.new_folder(self.root, self.kind, self.name)
                stack.enter_context(locks.alone(folder / ".lock", taken=taken))
                if before is None:
                    # from now on the same command finds it, and its lock
                    write(folder / f"{self.kind}.json", {"key": self.key})
            for run in rundir.newest_first(folder):
                # of a command that has gone: nobody waits for it
                if runner.alive(run.path) or lease.is_locked(run.lock):
                    with contextlib.suppress(LaunchError, OSError):
                        stop.stop(run)
            yield folder


def write(file: Path, record: Mapping[str, Any], redactor: Redactor | None = None) -> None:
    """Whole or not at all, without secrets. Raises NotReady where it cannot be written."""
    redactor = redactor or redaction.of_process()
    try:
        files.write_json(file, redactor.redact(dict(record)))
    except OSError as error:
        raise rundir.not_writable(file.parent, error.strerror) from None


def page(runs: Iterable[Path], path: Path, lead: report_page.Lead) -> Path | None:
    """One page of those runs that began and are still there; None where none is. Raises NotReady."""
    begun = [str(run) for run in runs if RunFolder(run).attempts()]
    if not begun:
        return None
    report_page.write(series.gather(begun), path, lead)
    return path


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
        verdict = conclude.finish(prepared.folder)
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
    verdict, code = conclude.conclusion(folder, attempt)
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
