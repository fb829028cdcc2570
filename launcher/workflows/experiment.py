"""Several runs that belong together: their folder, their record, and each run to its verdict."""

import contextlib
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher import files, redaction
from launcher.errors import Exit, Finding, LaunchError, launch_finding, shorten
from launcher.lazy_dataclass import dataclass
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

# an error of whatever waited for the training process begins with its whole command line
_COMMAND = re.compile(r"Command '\[.*\]' (?=died|returned)", re.DOTALL)


def digest_values(about: Any) -> str:
    """A digest that is the same for the same values."""
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One ladder, pipeline, bench or search, known by its `key`; its record is `<kind>.json`."""

    kind: str
    key: str
    name: str
    root: Path

    def earlier(self) -> Path | None:
        """Its newest folder; None if it has never begun."""
        records = self.root.glob(f"*-{self.kind}-*/{self.kind}.json")
        for record in sorted(records, reverse=True):
            if rundir.read_json(record).get("key") == self.key:
                return record.parent
        return None

    @contextlib.contextmanager
    def opened(self, *, fresh: bool = False, taken: Finding | None = None) -> Iterator[Path]:
        """The campaign's folder, `<UTC time>-<kind>-<name>`, locked for this command.

        The folder of an earlier command with the same key is used again, unless `fresh` asks for a
        new one; runs that it left are stopped. Raises NotReady if the folder cannot be made, or if
        another process uses it: then with `taken`.
        """
        if taken is None:
            taken = launch_finding(
                "error",
                "under-way",
                "the same command is under way in another process",
                "wait for it, or --fresh for a folder of its own",
                file=str(self.root),
            )
        # two commands that begin at once have no folder in common yet
        name = hashlib.sha256(os.fsencode(f"{self.root}\0{self.key}")).hexdigest()[:32]
        place = rundir.find_state_folder() / f"{self.kind}s" / name
        with contextlib.ExitStack() as stack:
            with locks.hold_exclusive(place, taken=taken):
                earlier = None if fresh else self.earlier()
                folder = earlier or rundir.make_folder(self.root, self.kind, self.name)
                stack.enter_context(locks.hold_exclusive(folder / ".lock", taken=taken))
                if earlier is None:
                    # from now on the same command finds the folder, and its lock
                    write(folder / f"{self.kind}.json", {"key": self.key})
            for run in rundir.list_newest_first(folder):
                # its command is gone, and nobody waits for it
                if runner.is_alive(run.path) or lease.is_locked(run.lock):
                    _stop_run(run)
            yield folder


def write(file: Path, record: Mapping[str, Any], redactor: Redactor | None = None) -> None:
    """Write a record atomically, without secrets. Raises NotReady if it cannot be written."""
    redactor = redactor or redaction.find_process_secrets()
    try:
        files.write_json(file, redactor.redact(dict(record)))
    except OSError as error:
        raise rundir.make_not_writable(file.parent, error.strerror) from None


def write_page(runs: Iterable[Path], path: Path, lead: report_page.Lead) -> Path | None:
    """Write a page of the runs that began and still exist; None if none does. Raises NotReady."""
    begun = [str(run) for run in runs if RunFolder(run).attempts()]
    if not begun:
        return None
    report_page.write(series.load_runs(begun), path, lead)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one run ended. `seconds` is wall time from the start to the verdict, start-up included.

    `finished_before`: nothing was started, because an earlier attempt had finished. `timed_out`: it
    was stopped because its time was up.
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
        """Whether the user stopped it: then nothing else may start."""
        return self.exit is Exit.INTERRUPTED and not self.timed_out

    @property
    def reason(self) -> str | None:
        """Why it did not pass, in one line; None if it did."""
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
            return shorten(_COMMAND.sub("the training process ", str(error["message"])), 300)
        reasons = []
        for point in self.verdict.points:
            if point.ok is not True:
                reasons.append(f"{point.name}: {point.state}, expected {point.expected}")
        if reasons:
            return "; ".join(reasons)
        return "interrupted" if self.interrupted else f"exit code {int(self.exit)}"

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


def run_prepared(
    prepared: Prepared, *, timeout_s: float | None = None, allow_unproven: bool = False
) -> Outcome:
    """Start and judge one run; returns when all its processes have ended.

    INT and TERM stop the run, and the outcome says so; before the run listens to them, they raise
    KeyboardInterrupt and leave nothing behind. Raises what `start.begin` raises: then nothing was
    started.
    """
    prepared = forecast.add_forecast(prepared)
    folder = prepared.folder
    plan = prepared.plan
    if prepared.decision.kind == "finished":
        verdict = conclude.finish(folder)
        return Outcome(run=folder, plan=plan, verdict=verdict, exit=Exit.OK, finished_before=True)
    began = time.monotonic()
    try:
        with ignore_hangup():
            folder, attempt = start.begin(prepared, allow_unproven=allow_unproven)
            with _limit_time(timeout_s, folder) as is_up:
                interrupted = follow.follow_until_over(folder, attempt, forward=True)
    except (KeyboardInterrupt, follow.Detached):
        # before anybody listened, or if a batch system signals every process of a job itself
        _stop_run(prepared.folder)
        raise KeyboardInterrupt from None
    verdict, code = conclude.judge_attempt(folder, attempt)
    timed_out = is_up.is_set() and not interrupted and code is Exit.INTERRUPTED
    if interrupted:
        # a run that was over by then keeps its verdict, but nothing follows
        code = Exit.INTERRUPTED
    return Outcome(
        run=folder,
        plan=plan,
        verdict=verdict,
        exit=code,
        seconds=time.monotonic() - began,
        timed_out=timed_out,
    )


@contextlib.contextmanager
def _limit_time(seconds: float | None, folder: RunFolder) -> Iterator[threading.Event]:
    """Stop the run when its time is up; the event says whether that happened."""
    is_up = threading.Event()
    if seconds is None:
        yield is_up
        return

    def end() -> None:
        is_up.set()
        _stop_run(folder)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    try:
        yield is_up
    finally:
        timer.cancel()


def _stop_run(run: RunFolder) -> None:
    """Stop a run, unless it has ended by itself."""
    with contextlib.suppress(LaunchError, OSError):
        stop.stop(run)


@dataclass(slots=True)
class Stop:
    requested: bool = False


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Runs in turn: INT and TERM leave the block, and what is yielded says so. HUP is ignored."""
    stop = Stop()
    with ignore_hangup():
        try:
            yield stop
        except (KeyboardInterrupt, follow.Detached):
            # between two runs there is none to stop
            stop.requested = True


def ignore_hangup() -> contextlib.AbstractContextManager[None]:
    """Ignore SIGHUP and treat SIGTERM as SIGINT, also while a run is being started."""
    handlers = {signal.SIGHUP: lambda *_: None, signal.SIGTERM: signal.default_int_handler}
    return process.install_handlers(handlers)
