"""Programs that answer a question: nvidia-smi, git, squeue, tmux, a Python.

On a sick node they hang. Then they are ended with everything that they started, and not asked again by this command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.machine import isolation, process

if TYPE_CHECKING:
    import subprocess

LIMIT_S = 5.0
VARIABLE = "LAUNCH_TOOL_TIMEOUT"  # the environment variable with other seconds than LIMIT_S
# Seconds that all tools together may keep a command waiting without an answer, as a multiple of the limit: on a sick
# node several hang. What is left when it is used up is SHORTEST_S for each.
_PATIENCE = 1.6
_SHORTEST_S = 1.0
# a command that goes on for long asks a tool again after so many seconds
_AGAIN_S = 60.0
_POLL_S = 0.1
_HELD_S = 0.3  # how long the output is read of a tool that has ended, where something that it started holds the pipe
_KILLED_S = 0.5


class NoAnswer(OSError):
    """A tool did not answer in time, or did not before in this command."""


@dataclass(frozen=True, slots=True)
class Answer:
    returncode: int
    out: bytes
    err: bytes


@dataclass(frozen=True, slots=True)
class _Silence:
    """That a tool did not answer: when that was noticed (monotonic), and how many seconds it was waited for."""

    at: float
    waited_s: float

    def words(self, name: str) -> str:
        return f"{name} did not answer in {self.waited_s:g} s"


_silences: dict[str, _Silence] = {}


def limit_s() -> float:
    """Seconds that a tool has for its answer."""
    try:
        seconds = float(os.environ.get(VARIABLE, LIMIT_S))
    except ValueError:
        return LIMIT_S
    return seconds if 0 < seconds < 1e6 else LIMIT_S


def silent() -> list[str]:
    """A sentence for each tool that does not answer this command: which, and how long it was waited for."""
    return [silence.words(name) for name, silence in _recent().items()]


def forget() -> None:
    """Begin anew: another command of the same process asks every tool again."""
    _silences.clear()


def ask(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
    given: bytes = b"",
    seconds: float | None = None,
) -> Answer:
    """Run a tool and return what it said.

    `seconds` are for a tool that has a limit of its own; the others share what a command waits for hanging ones.
    Raises NoAnswer, FileNotFoundError where it is not in an absolute folder of PATH, OSError where it cannot run.
    """
    # most commands never ask anything
    import subprocess

    name = os.path.basename(argv[0])
    earlier = _recent().get(name)
    if earlier is not None:
        raise NoAnswer(earlier.words(name))
    program = isolation.find_program(argv[0], environ)
    if program is None:
        raise FileNotFoundError(argv[0])
    limit = _left_s() if seconds is None else seconds
    child = subprocess.Popen(
        [program, *argv[1:]],
        env=None if environ is None else dict(environ),
        cwd=cwd,
        stdin=subprocess.PIPE if given else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer = _answer(child, given, limit)
    except BaseException:
        _end(child)
        raise
    if answer is None:
        _end(child)
        silence = _Silence(time.monotonic(), limit)
        _silences[name] = silence
        raise NoAnswer(silence.words(name))
    return answer


def _recent() -> dict[str, _Silence]:
    now = time.monotonic()
    return {name: silence for name, silence in _silences.items() if now - silence.at < _AGAIN_S}


def _left_s() -> float:
    limit = limit_s()
    waited = sum(silence.waited_s for silence in _recent().values())
    return min(limit, max(_SHORTEST_S, round(limit * _PATIENCE - waited, 1)))


def _answer(child: subprocess.Popen[bytes], given: bytes, limit: float) -> Answer | None:
    """What a tool says until it ends; None where it does not in time."""
    import subprocess

    until = time.monotonic() + limit
    while time.monotonic() < until:
        try:
            out, err = child.communicate(given or None, timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if child.poll() is not None:
                return _held(child)
        else:
            return Answer(child.returncode, out, err)
    return None


def _held(child: subprocess.Popen[bytes]) -> Answer:
    """The answer of a tool that has ended and left something behind that keeps its output open."""
    import subprocess

    out = err = b""
    try:
        out, err = child.communicate(timeout=_HELD_S)
    except subprocess.TimeoutExpired as late:
        out, err = late.stdout or b"", late.stderr or b""
        process.signal_group(child.pid, signal.SIGKILL)
        _close(child)
    return Answer(child.returncode, out, err)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a tool and what it started. One that the kernel does not let go (state D) is left."""
    import subprocess

    started = process.descendants(child.pid)
    process.signal_group(child.pid, signal.SIGKILL)
    process.signal_all(started, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILLED_S)
    _close(child)


def _close(child: subprocess.Popen[bytes]) -> None:
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
