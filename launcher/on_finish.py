"""What a user wants done when a run is over: a message, an upload, a pod shut down."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from launcher import overview, process
from launcher.attempt import Attempt
from launcher.errors import brief, usage
from launcher.redaction import redact
from launcher.rundir import RunFolder
from launcher.view import Progress


def parsed(command: str | None) -> tuple[str, ...]:
    """`--on-finish`'s text as an argv: split like a shell would, and never given to one.

    Raises UsageError where quotes are left open, or nothing is in it.
    """
    if command is None:
        return ()
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        words, why = (), str(error)
    else:
        why = "it is empty"
    if not words:
        raise usage(
            "bad-on-finish", f"--on-finish holds no command: {why}",
            "a program and its arguments in one word: --on-finish 'notify-send done'; for pipes and the "
            "like name a script",
        )  # fmt: skip
    return words


def require_here(command: Sequence[str]) -> None:
    """Raises UsageError where nothing can be started of a command that this machine is to call."""
    if command and shutil.which(command[0]) is None:
        raise usage(
            "bad-on-finish", f"--on-finish: there is no program `{brief(command[0])}` that can be started",
            "the path of a file that may be executed, or the name of a program in PATH",
        )  # fmt: skip


def environment(folder: RunFolder, code: int) -> Mapping[str, str]:
    """What the command learns of the run."""
    progress = Progress(total=None)
    overview.last_steps(folder, progress)
    return {
        "LAUNCH_FINISHED": folder.path.name,
        "LAUNCH_FINISHED_FOLDER": str(folder.path),
        "LAUNCH_FINISHED_STATE": overview.ended_state(folder, progress),
        "LAUNCH_FINISHED_VERDICT": str(folder.verdict),
        "LAUNCH_FINISHED_CODE": str(code),
    }


def call(folder: RunFolder, attempt: Attempt, code: int) -> int | None:
    """Run the attempt's command to its end; what it prints goes where this process prints.

    Returns its exit code; None where there is no command, or it cannot be started.
    """
    if not attempt.on_finish:
        return None
    inherited = {**attempt.environ, **environment(folder, code)}
    # it is no part of the run that is over, nor of one it may start
    inherited.pop(process.MARK, None)
    # its folder may have gone with what was done in it
    cwd = attempt.cwd if os.path.isdir(attempt.cwd) else folder.path
    try:
        done = subprocess.run(
            attempt.on_finish, env=inherited, cwd=cwd, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, ValueError) as error:
        told = f"--on-finish {attempt.on_finish[0]} cannot be started: {error}"
        print(redact(told, attempt.environ), file=sys.stderr)
        return None
    if done.returncode:
        told = f"--on-finish {os.path.basename(attempt.on_finish[0])} ended with {done.returncode}"
        print(redact(told, attempt.environ), file=sys.stderr)
    return done.returncode
