"""The process that keeps a run: starts its training, waits, records the end, judges, tells.

It lives in a session of its own and needs no terminal: the launcher, tmux and the ssh connection may
die. Training would go on without it too (it writes its own log and holds the locks), as an orphan.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.errors import Finding, LaunchError, NotReady, brief, not_ready
from launcher.lifecycle import conclude, on_finish, standstill, usage
from launcher.machine import isolation, process
from launcher.paths import PROJECT
from launcher.planning import checksums
from launcher.report import overview
from launcher.runs import attempt as attempts
from launcher.runs import inventory, lease, preemption, rundir, runner
from launcher.runs.attempt import Attempt
from launcher.runs.lease import Lease
from launcher.runs.rundir import RunFolder

_STARTED = b"started\n"
_STARTED_HERE: list[subprocess.Popen[bytes]] = []


def spawn(
    folder: RunFolder, number: int, locks: Sequence[int] = (), digest: str | None = None, granted: Lease | None = None
) -> process.Identity:
    """Start the keeper of an attempt; returns as soon as training is there. Raises NotReady with what stopped it.

    `locks` are file descriptors that keeper and training hold open from now on, `granted` is the lease that
    the keeper takes over. With `digest`, it starts nothing but that attempt, whoever may write in the folder.
    """
    process.hold_standard_streams()
    listening, telling = os.pipe()
    words = [str(folder.path), str(number), str(telling), ",".join(map(str, locks))]
    words += [] if granted is None else [str(granted.path)]
    more = {on_finish.KEEPER: digest or ""}
    environ = isolation.isolated(os.environ)
    # this package may be running from a folder that is nowhere else named
    path = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), str(PROJECT))))
    early: list[int] = []
    # no exception may come between the start of a child and its name
    noted = dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, _: early.append(number))
    try:
        with rundir.writing(folder.path), process.handling(noted), runner.private(folder.diary) as diary:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.lifecycle.supervisor", *words],
                stdin=subprocess.DEVNULL,
                stdout=diary,
                stderr=diary,
                start_new_session=True,
                pass_fds=(telling, *locks),
                env={**environ, "PYTHONPATH": path, **more},
            )
            _STARTED_HERE.append(child)
    except BaseException:
        os.close(listening)
        raise
    finally:
        os.close(telling)
    with interruptible(), os.fdopen(listening, "rb") as pipe:
        if early:
            raise KeyboardInterrupt
        answer = pipe.read()
    if answer == _STARTED:
        return process.identify(child.pid)
    child.wait()
    with contextlib.suppress(ValueError, TypeError):
        raise NotReady([Finding(**fields) for fields in json.loads(answer)])
    last: list[str] = []
    with contextlib.suppress(OSError):
        last = folder.diary.read_text(errors="replace").splitlines()[-1:]
    help = f"its last line: {brief(last[0], 300)}" if last else None
    raise not_ready(
        "no-keeper", "the process that keeps the run ended before training began", help, file=str(folder.path)
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """INT and TERM raise KeyboardInterrupt once what was started is stopped; a terminal that goes stops nothing."""
    try:
        with process.handling({signal.SIGHUP: process.ignore, signal.SIGTERM: signal.default_int_handler}):
            yield
    except KeyboardInterrupt:
        # the run was cancelled; a second signal ends the keeper's wait
        def hand_on(*_: object) -> None:
            process.signal_all([one.pid for one in left], signal.SIGINT)

        left = [one for one in _STARTED_HERE if one.poll() is None]
        with process.handling({signal.SIGINT: hand_on, signal.SIGTERM: hand_on}):
            hand_on()
            for one in left:
                one.wait()
        raise


def main(words: Sequence[str]) -> int:
    """Keep one attempt. `words`: run folder, number, descriptors to tell and to hold, the lease to take over."""
    folder, number, telling = RunFolder(Path(words[0])), int(words[1]), int(words[2])
    locks = [int(one) for one in words[3].split(",") if one]
    digest = os.environ.pop(on_finish.KEEPER, "") or None
    granted = lease.read(Path(words[4])) if words[4:] else None
    process.adopt_orphans()
    for descriptor in (telling, *locks):
        os.set_inheritable(descriptor, False)
    with os.fdopen(telling, "wb", buffering=0) as pipe:

        def tell(answer: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):
                pipe.write(answer)
                pipe.close()

        try:
            attempt = attempts.read(folder)
            if digest not in (None, attempt.digest()):
                message = f"{folder.start.name} is not what was written at the start"
                help = "have runs in a folder that nobody else can write"
                raise not_ready("start-changed", message, help, file=str(folder.start))
            try:
                # a tmux session, a job or another shell may have started us anywhere
                os.chdir(attempt.cwd)
            except OSError as error:
                message = f"the folder that launch was started in cannot be entered: {error.strerror}"
                raise not_ready("not-started", message, file=attempt.cwd) from None
            output = None if attempt.output is None or attempt.rank else Path(attempt.output)
            meter = usage.UsageThread(folder, attempt)
            sums = checksums.ChecksumThread(folder, attempt.backend, output, attempt.world)
            with lease.kept(granted, partial(_overtaken, folder.console(number))) as end:
                command = attempt.command(os.environ)
                where = {} if granted is None else {attempts.LEASE: str(granted.path)}
                sums.start()
                meter.start()
                for earlier in range(1, number):
                    inventory.end(folder, earlier, late=True)
                inventory.begin(folder, number, output)
                ended = runner.run(
                    replace(command, env={**command.env, **where}),
                    folder,
                    number,
                    pass_fds=locks,
                    due=Due(attempt).now,
                    began=lambda: tell(_STARTED),
                    inherited={},
                    adopting=True,
                    save=preemption.request_for(command.env, number),
                    stands_still=_hang_detector(command),
                )
                meter.end()
                sums.end(resumable=ended.returncode != 0 or ended.preempted)
                # while nobody else may begin there
                inventory.end(folder, number)
                end(overview.read_end_state(folder), ended.returncode)
        except LaunchError as error:
            tell(json.dumps([one.as_json() for one in error.findings]).encode())
            return error.exit_code
    # a signal now belongs to the command at the end, and a verdict takes seconds
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with process.handling(dict.fromkeys(ignored, process.ignore)):
        return conclude.conclude(folder, attempt, ended, locks=locks, own=True)


def _hang_detector(command: attempts.Command) -> Callable[[runner.Living], bool]:
    found = standstill.of_command(command.env)
    return (lambda _: False) if found is None else found.look


def _overtaken(console: Path, by: Lease) -> None:
    message = f"launch: stopped: the output folder was taken over by the run {by.run} ({by.described}), "
    message += f"fencing number {by.fence}"
    print(message, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), console.open("a") as log:
        log.write(f"\n{message}\n")
    # at once: what it would save now is the other run's
    os.kill(os.getpid(), signal.SIGINT)


class Due:
    """Whether a request to stop is to be met now: at once, or once one more checkpoint is complete."""

    EVERY_S = 2.0

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.before: frozenset[Path] | None = None
        self.looked = -self.EVERY_S

    def now(self, request: runner.StopRequest) -> bool:
        if not request.after_checkpoint or time.monotonic() - self.looked < self.EVERY_S:
            return not request.after_checkpoint
        from launcher.artifacts import checkpoints

        self.looked = time.monotonic()
        output = None if self.attempt.output is None else Path(self.attempt.output)
        found = checkpoints.find(self.attempt.backend, output, ranks=self.attempt.world)
        complete = frozenset(one.path for one in found if one.complete)
        if self.before is None:
            self.before = complete
        return bool(complete - self.before)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        # a disk or a network that fails; who started the run shows the last line
        sys.exit(f"launch: the keeper of the run failed: {error}")
