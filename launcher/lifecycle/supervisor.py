"""The supervisor of a run: it starts the training, waits, records the end, judges, notifies.

It lives in a session of its own and needs no terminal: the launcher, tmux and the ssh connection
may die. Without it the training continues as an orphan: it writes its own log and holds the locks.
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

from launcher.errors import Finding, LaunchError, NotReady, not_ready, shorten
from launcher.lazy_dataclass import dataclass
from launcher.lifecycle import conclude, on_finish, standstill, usage
from launcher.machine import extensions, isolation, process
from launcher.paths import PROJECT
from launcher.planning import checksums
from launcher.report import overview
from launcher.runs import attempt as attempts
from launcher.runs import inventory, lease, preemption, rundir, runner
from launcher.runs.attempt import Attempt, Command
from launcher.runs.lease import Lease
from launcher.runs.rundir import RunFolder
from launcher.runs.runner import ProcessExit

_STARTED = b"started\n"
_CHILDREN: list[subprocess.Popen[bytes]] = []  # the supervisors that this process started


def spawn(
    folder: RunFolder,
    number: int,
    locks: Sequence[int] = (),
    digest: str | None = None,
    acquired: Lease | None = None,
) -> process.Identity:
    """Start the supervisor of an attempt; returns once training runs. Raises NotReady.

    `locks` are descriptors that supervisor and training keep open, `acquired` is the lease that the
    supervisor takes over. With `digest`, it starts that attempt alone, whoever else can write into
    the folder.
    """
    process.hold_standard_streams()
    reading, writing = os.pipe()
    words = [str(folder.path), str(number), str(writing), ",".join(map(str, locks))]
    if acquired is not None:
        words.append(str(acquired.path))
    early_signals: list[int] = []

    def note_signal(signal_number: int, _frame: object) -> None:
        # no exception may come between the start of a child and its name
        early_signals.append(signal_number)

    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), note_signal)
    try:
        with (
            rundir.writing(folder.path),
            process.install_handlers(handlers),
            runner.open_private_log(folder.supervisor_log) as log,
        ):
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", runner.SUPERVISOR, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(writing, *locks),
                env=_build_environment(digest),
            )
            _CHILDREN.append(child)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with interruptible(), os.fdopen(reading, "rb") as pipe:
        if early_signals:
            raise KeyboardInterrupt
        answer = pipe.read()
    if answer == _STARTED:
        return process.identify(child.pid)
    child.wait()
    raise _explain_failure(folder, answer)


def _build_environment(digest: str | None) -> dict[str, str]:
    environ = isolation.isolate(os.environ)
    # this package may run from a folder that nothing else names
    search_path = str(PROJECT)
    if environ.get("PYTHONPATH"):
        search_path = f"{environ['PYTHONPATH']}{os.pathsep}{search_path}"
    return {**environ, "PYTHONPATH": search_path, on_finish.START_DIGEST: digest or ""}


def _explain_failure(folder: RunFolder, answer: bytes) -> NotReady:
    """Why a supervisor ended before training began: its findings, else the end of its log."""
    with contextlib.suppress(ValueError, TypeError):
        return NotReady([Finding(**fields) for fields in json.loads(answer)])
    help = None
    with contextlib.suppress(OSError):
        lines = folder.supervisor_log.read_text(errors="replace").splitlines()
        if lines:
            help = f"its last line: {shorten(lines[-1], 300)}"
    message = "the supervisor of the run ended before training began"
    return not_ready("no-keeper", message, help, file=str(folder.path))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """INT and TERM raise KeyboardInterrupt once what was started is stopped; HUP is ignored."""
    handlers: dict[signal.Signals, process.Handler | signal.Handlers] = {
        signal.SIGHUP: process.ignore_signal,
        signal.SIGTERM: signal.default_int_handler,
    }
    try:
        with process.install_handlers(handlers):
            yield
    except KeyboardInterrupt:
        _interrupt_children()
        raise


def _interrupt_children() -> None:
    """Interrupt the supervisors and wait for them; a second signal ends their waits."""
    running = [child for child in _CHILDREN if child.poll() is None]

    def interrupt(*_: object) -> None:
        process.signal_all([child.pid for child in running], signal.SIGINT)

    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), interrupt)
    with process.install_handlers(handlers):
        interrupt()
        for child in running:
            child.wait()


@dataclass(slots=True)
class _Starter:
    """The process that waits for a supervisor: it reads one answer from a pipe."""

    descriptor: int
    is_answered: bool = False

    def answer(self, raw: bytes) -> None:
        """Send the answer, whether or not somebody still waits for it; only the first is sent."""
        if self.is_answered:
            return
        self.is_answered = True
        with contextlib.suppress(OSError):
            os.write(self.descriptor, raw)
        os.close(self.descriptor)


def main(words: Sequence[str]) -> int:
    """Supervise one attempt.

    `words`: run folder, number, the descriptor of the starter's pipe, descriptors to keep open, and
    the lease to take over, if any.
    """
    folder = RunFolder(Path(words[0]))
    number = int(words[1])
    starter = _Starter(int(words[2]))
    locks = [int(word) for word in words[3].split(",") if word]
    acquired = None
    if words[4:]:
        acquired = lease.read_lease(Path(words[4]))
    digest = os.environ.pop(on_finish.START_DIGEST, "")
    process.adopt_orphans()
    for descriptor in (starter.descriptor, *locks):
        os.set_inheritable(descriptor, False)
    overtaken = partial(_interrupt_overtaken, folder.console(number))
    try:
        attempt = _read_attempt(folder, digest)
        extensions.load()
        with lease.heartbeat(acquired, overtaken) as record_end:
            ended = _run_training(folder, attempt, number, starter, locks, acquired)
            # recorded while nobody else may begin there
            inventory.record_written(folder, number)
            record_end(overview.read_end_state(folder), ended.returncode)
    except LaunchError as error:
        findings = [finding.as_json() for finding in error.findings]
        starter.answer(json.dumps(findings).encode())
        return error.exit_code
    # from now on signals are for the command at the end, and a verdict takes seconds
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ignored = dict.fromkeys(signals, process.ignore_signal)
    with process.install_handlers(ignored):
        return conclude.conclude(folder, attempt, ended, locks=locks, own=True)


def _read_attempt(folder: RunFolder, digest: str) -> Attempt:
    """The attempt to start, in its working folder. Raises NotReady if it was changed since."""
    attempt = attempts.read_attempt(folder)
    if digest and digest != attempt.digest():
        message = f"{folder.start.name} is not what was written at the start"
        help = "have runs in a folder that nobody else can write"
        raise not_ready("start-changed", message, help, file=str(folder.start))
    try:
        # a tmux session, a job or another shell may have started this process anywhere
        os.chdir(attempt.cwd)
    except OSError as error:
        message = "the folder that launch was started in cannot be entered: "
        message += f"{error.strerror}"
        raise not_ready("not-started", message, file=attempt.cwd) from None
    return attempt


def _run_training(
    folder: RunFolder,
    attempt: Attempt,
    number: int,
    starter: _Starter,
    locks: Sequence[int],
    acquired: Lease | None,
) -> ProcessExit:
    """Run the training to its end, with checksums and usage recorded meanwhile."""
    output = None
    if attempt.output is not None and attempt.rank == 0:
        output = Path(attempt.output)
    command = attempt.command(os.environ)
    save = preemption.save_request(command.env, number)
    stands_still = _make_hang_detector(command)
    if acquired is not None:
        env = {**command.env, attempts.LEASE: str(acquired.path)}
        command = replace(command, env=env)
    sums = checksums.ChecksumThread(folder, attempt.backend, output, attempt.world)
    meter = usage.UsageThread(folder, attempt)
    sums.start()
    meter.start()
    for earlier in range(1, number):
        inventory.record_written(folder, earlier, late=True)
    inventory.record_before(folder, number, output)
    ended = runner.run(
        command,
        folder,
        number,
        pass_fds=locks,
        due=Due(attempt).now,
        began=lambda: starter.answer(_STARTED),
        inherited={},
        adopting=True,
        save=save,
        stands_still=stands_still,
    )
    meter.end()
    sums.end(resumable=ended.returncode != 0 or ended.preempted)
    return ended


def _make_hang_detector(command: Command) -> Callable[[runner.Living], bool]:
    detector = standstill.watch_standstill(command.env)
    if detector is None:
        return lambda _: False
    return detector.look


def _interrupt_overtaken(console: Path, successor: Lease) -> None:
    message = "launch: stopped: the output folder was taken over by the run "
    message += f"{successor.run} ({successor.description}), fencing number {successor.fence}"
    print(message, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), console.open("a") as log:
        log.write(f"\n{message}\n")
    # at once: what it would save now belongs to the other run
    os.kill(os.getpid(), signal.SIGINT)


class Due:
    """Whether a request to stop is to be met now: at once, or after one more checkpoint."""

    EVERY_S = 2.0

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.before: frozenset[Path] | None = None
        self.looked = -self.EVERY_S

    def now(self, request: runner.StopRequest) -> bool:
        if not request.after_checkpoint:
            return True
        if time.monotonic() - self.looked < self.EVERY_S:
            return False
        self.looked = time.monotonic()
        complete = self._complete_checkpoints()
        if self.before is None:
            self.before = complete
        return bool(complete - self.before)

    def _complete_checkpoints(self) -> frozenset[Path]:
        from launcher.artifacts import checkpoints

        attempt = self.attempt
        output = None
        if attempt.output is not None:
            output = Path(attempt.output)
        found_checkpoints = checkpoints.find(attempt.backend, output, ranks=attempt.world)
        return frozenset(each.path for each in found_checkpoints if each.complete)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        # a disk or a network that fails; who started the run shows the last line
        sys.exit(f"launch: the supervisor of the run failed: {error}")
