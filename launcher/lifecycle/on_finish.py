"""What a user wants done when a run is over: a message, an upload, a pod shut down."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from launcher.config import durations
from launcher.errors import shorten, usage
from launcher.machine import isolation, process
from launcher.printable import make_printable
from launcher.redaction import redact
from launcher.report import overview
from launcher.report.progress import Progress
from launcher.runs import rundir
from launcher.runs.attempt import ON_FINISH_S, Attempt, find_other_writer_of_start
from launcher.runs.rundir import RunFolder

START_DIGEST = "LAUNCH_START_DIGEST"  # the variable that every supervisor is started with
POLL_S = 0.05
SHORT_POLL_S = 0.005
KILLING_S = 10.0  # seconds for killed processes to be gone, if they start new ones all the time
ENDING_S = 10.0  # seconds between TERM and KILL for a command whose time is up


def parse_command(command: str | None) -> tuple[str, ...]:
    """`--on-finish` as an argv, split like a shell would. Raises UsageError."""
    if command is None:
        return ()
    fault = "it is empty"
    words = list[str]()
    try:
        words = shlex.split(command)
    except ValueError as error:
        fault = str(error)
    if not words:
        help = "a program and its arguments in one word: --on-finish 'notify-send done'"
        help += "; for pipes and the like name a script"
        raise usage("bad-on-finish", f"--on-finish has no command: {fault}", help)
    return tuple(words)


def parse_limit(text: str | None) -> float:
    if text is None:
        return ON_FINISH_S
    return durations.parse_seconds(text)


def require_program(command: Sequence[str]) -> None:
    """Raise UsageError if the program of a command cannot be started on this machine."""
    if command and _find_program(command[0], os.environ) is None:
        message = f"--on-finish: there is no program `{shorten(command[0])}` that can be started"
        help = "the path of a file that may be executed, or the name of a program in PATH"
        raise usage("bad-on-finish", message, help)


def _find_program(word: str, environ: Mapping[str, str]) -> str | None:
    """A program by its path or its name; one in the current folder by its path alone."""
    if os.sep not in word:
        return isolation.find_program(word, environ)
    if shutil.which(word) is None:
        return None
    return word


def call(
    folder: RunFolder,
    attempt: Attempt,
    code: int,
    *,
    own: bool = False,
    began: Callable[[], None] = lambda: None,
) -> int | None:
    """Run an attempt's command; returns its exit code.

    A command that others may have written, and that is not the user's `own`, is only named.
    """
    if not attempt.on_finish:
        return None
    if not own:
        reason = find_other_writer_of_start(folder)
        if reason is not None:
            command = shlex.join(map(str, attempt.on_finish))
            _print_notice(
                attempt.environ, f"`{shorten(_escape_unprintable(command))}` was not run: {reason}"
            )
            return None
    progress = Progress(total=None)
    overview.read_last_steps(folder, progress)
    environ = {
        **attempt.environ,
        "LAUNCH_FINISHED": folder.path.name,
        "LAUNCH_FINISHED_FOLDER": str(folder.path),
        "LAUNCH_FINISHED_STATE": overview.read_end_state(folder, progress),
        "LAUNCH_FINISHED_VERDICT": str(folder.verdict),
        "LAUNCH_FINISHED_STATUS": str(rundir.read_json(folder.verdict).get("status", "")),
        "LAUNCH_FINISHED_CODE": str(code),
    }
    cwd = Path(attempt.cwd)
    if not os.path.isdir(cwd):
        # removed meanwhile
        cwd = folder.path
    return run(attempt.on_finish, environ, cwd, attempt.on_finish_s, began)


def _escape_unprintable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def run(
    words: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
    limit_s: float,
    began: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command to its end, with this process's output; returns its exit code.

    INT and TERM are passed on to it. After `limit_s` seconds it gets TERM, then KILL, and so does
    everything that it has started, in whatever session, except runs: those are ended by `launch
    stop`. `began` is called once it runs, or cannot be started; then None is returned.
    """
    # it belongs neither to the run that is over, nor to one that it may start
    env = {name: value for name, value in environ.items() if name != process.MARK}
    groups = list[int]()
    early_signals = list[int]()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not groups:
            early_signals.append(number)
        for group in groups:
            process.signal_group(group, number)

    earlier = process.find_descendants(os.getpid())
    with (
        process.install_handlers({signal.SIGINT: pass_on, signal.SIGTERM: pass_on}),
        # so that processes that lose their parent are still found below this one
        process.adopting_orphans(),
    ):
        try:
            child = _start_command(words, env, cwd)
        except (OSError, ValueError) as error:
            _print_notice(environ, f"{words[0]} cannot be started: {error}")
            return None
        finally:
            began()
        groups.append(child.pid)
        for number in early_signals:
            process.signal_group(child.pid, number)
        name = os.path.basename(words[0])
        try:
            returncode = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            _print_notice(environ, f"{name} is ended: it took longer than {limit_s:g} s")
            _end_command(child.pid, earlier)
            returncode = child.wait()
    if returncode:
        _print_notice(environ, f"{name} ended with {returncode}")
    return returncode


def _start_command(
    words: Sequence[str], env: Mapping[str, str], cwd: Path
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own. Raises OSError or ValueError."""
    program: str | None = words[0]
    if os.sep not in words[0]:
        program = _find_program(words[0], env)
    if program is None:
        raise FileNotFoundError("there is no such program in PATH")
    argv = [program, *words[1:]]
    return subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _end_command(leader: int, earlier: frozenset[int]) -> None:
    """TERM, then KILL to a command and all that it has started, until none is left."""
    signalled: set[int] = set()
    until = time.monotonic() + ENDING_S
    process.signal_group(leader, signal.SIGTERM)
    while time.monotonic() < until:
        living = _find_started_since(earlier)
        if not living:
            break
        process.signal_all(living - signalled, signal.SIGTERM)
        signalled |= living
        time.sleep(POLL_S)
    # until it is waited for, no other group can have its number
    process.signal_group(leader, signal.SIGKILL)
    until = time.monotonic() + KILLING_S
    living = _find_started_since(earlier)
    while living:
        process.signal_all(living, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(SHORT_POLL_S)
        living = _find_started_since(earlier)
    process.reap_except(leader)


def _find_started_since(earlier: frozenset[int]) -> frozenset[int]:
    """The processes below this one that are new, without runs and their supervisors."""
    started = process.find_descendants(os.getpid()) - earlier
    of_runs: set[int] = set()
    for pid in started:
        for name in (START_DIGEST, process.MARK):
            if process.read_variable(pid, name) is not None:
                of_runs.add(pid)
                of_runs |= process.find_descendants(pid)
    return started - of_runs


def _print_notice(environ: Mapping[str, str], text: str) -> None:
    print(redact(make_printable(f"--on-finish {text}"), environ), file=sys.stderr)
