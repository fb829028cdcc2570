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
from launcher.errors import brief, usage
from launcher.machine import isolation, process
from launcher.printable import printable
from launcher.redaction import redact
from launcher.report import overview
from launcher.report.progress import Progress
from launcher.runs import rundir
from launcher.runs.attempt import ON_FINISH_S, Attempt, writable_by_others
from launcher.runs.rundir import RunFolder

KEEPER = "LAUNCH_START_DIGEST"  # the variable that every keeper of a run is started with
POLL_S = 0.05
KILLING_S = 10.0  # seconds that killed processes may take to be gone, where more of them come all the time
ENDING_S = 10.0  # seconds after TERM that a command whose time is up has left before KILL


def parsed(command: str | None) -> tuple[str, ...]:
    """`--on-finish` as an argv, split like a shell would and never given to one. Raises UsageError."""
    why, words = "it is empty", tuple[str, ...]()
    try:
        words = () if command is None else tuple(shlex.split(command))
    except ValueError as error:
        why = str(error)
    if not words and command is not None:
        help = "a program and its arguments in one word: --on-finish 'notify-send done'"
        help += "; for pipes and the like name a script"
        raise usage("bad-on-finish", f"--on-finish has no command: {why}", help)
    return words


def limit(text: str | None) -> float:
    return ON_FINISH_S if text is None else durations.seconds(text)


def require_here(command: Sequence[str]) -> None:
    """Raises UsageError where nothing can be started of a command that this machine is to call."""
    if command and _program(command[0], os.environ) is None:
        message = f"--on-finish: there is no program `{brief(command[0])}` that can be started"
        help = "the path of a file that may be executed, or the name of a program in PATH"
        raise usage("bad-on-finish", message, help)


def _program(word: str, environ: Mapping[str, str]) -> str | None:
    """The program that the first word of a command names: one in the current folder only by its path."""
    if os.sep in word:
        return word if shutil.which(word) else None
    return isolation.find_program(word, environ)


def call(
    folder: RunFolder, attempt: Attempt, code: int, *, own: bool = False, began: Callable[[], None] = lambda: None
) -> int | None:
    """Run an attempt's command; where it is not the user's `own`, and others may have written it, only name it."""
    if not attempt.on_finish:
        return None
    if not own and (why := writable_by_others(folder)) is not None:
        words = shlex.join(map(str, attempt.on_finish))
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
        _say(attempt.environ, f"`{brief(shown)}` was not run: {why}")
        return None
    progress = Progress(total=None)
    overview.read_last_steps(folder, progress)
    about = {
        "LAUNCH_FINISHED": folder.path.name,
        "LAUNCH_FINISHED_FOLDER": str(folder.path),
        "LAUNCH_FINISHED_STATE": overview.read_end_state(folder, progress),
        "LAUNCH_FINISHED_VERDICT": str(folder.verdict),
        "LAUNCH_FINISHED_STATUS": str(rundir.read_json(folder.verdict).get("status", "")),
        "LAUNCH_FINISHED_CODE": str(code),
    }
    # its folder may have gone with what was done in it
    cwd = Path(attempt.cwd) if os.path.isdir(attempt.cwd) else folder.path
    return run(attempt.on_finish, {**attempt.environ, **about}, cwd, attempt.on_finish_s, began)


def run(
    words: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
    limit_s: float,
    began: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command to its end; what it prints goes where this process prints.

    INT and TERM are handed on to it and what it has started; after `limit_s` seconds it gets TERM, then KILL, and so
    does everything below it, in whatever session. Runs that it has started go on: they are ended by `launch stop`.
    `began` is called once it runs, or cannot be started. Returns its exit code; None where it did not run.
    """
    # it is no part of the run that is over, nor of one it may start
    inherited = {name: value for name, value in environ.items() if name != process.MARK}
    groups, early = list[int](), list[int]()

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if not groups:
            early.append(number)
        for group in groups:
            process.signal_group(group, number)

    earlier = process.descendants(os.getpid())
    with (
        process.handling({signal.SIGINT: hand_on, signal.SIGTERM: hand_on}),
        # what loses its parent stays below this process, where it is found
        process.adopting_orphans(),
    ):
        try:
            child = _start(words, inherited, cwd)
        except (OSError, ValueError) as error:
            _say(environ, f"{words[0]} cannot be started: {error}")
            return None
        finally:
            began()
        groups.append(child.pid)
        for number in early:
            process.signal_group(child.pid, number)
        name = os.path.basename(words[0])
        try:
            returned = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            _say(environ, f"{name} is ended: it took longer than {limit_s:g} s")
            _end(child.pid, earlier)
            returned = child.wait()
    if returned:
        _say(environ, f"{name} ended with {returned}")
    return returned


def _start(words: Sequence[str], environ: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own. Raises OSError or ValueError."""
    program = words[0] if os.sep in words[0] else _program(words[0], environ)
    if program is None:
        raise FileNotFoundError("there is no such program in PATH")
    argv = [program, *words[1:]]
    return subprocess.Popen(argv, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True)


def _end(leader: int, earlier: frozenset[int]) -> None:
    """TERM, then KILL to a command and everything that it has started, until nothing of it is left."""
    signalled: set[int] = set()
    until = time.monotonic() + ENDING_S
    process.signal_group(leader, signal.SIGTERM)
    while time.monotonic() < until:
        left = _started(earlier)
        if not left:
            break
        process.signal_all(left - signalled, signal.SIGTERM)
        signalled |= left
        time.sleep(POLL_S)
    # as long as it is not waited for, its number is that of its group and of no other
    process.signal_group(leader, signal.SIGKILL)
    until = time.monotonic() + KILLING_S
    while left := _started(earlier):
        process.signal_all(left, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(POLL_S / 10)
    process.bury(but=leader)


def _started(earlier: frozenset[int]) -> frozenset[int]:
    """The processes below this one that were not there before, but for runs and their keepers."""
    started = process.descendants(os.getpid()) - earlier
    of_runs: set[int] = set()
    for pid in started:
        if process.has_variable(pid, KEEPER) or process.has_variable(pid, process.MARK):
            of_runs |= process.descendants(pid) | {pid}
    return started - of_runs


def _say(environ: Mapping[str, str], what: str) -> None:
    print(redact(printable(f"--on-finish {what}"), environ), file=sys.stderr)
