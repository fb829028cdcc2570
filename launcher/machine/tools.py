"""Programs that answer a question: nvidia-smi, git, squeue, tmux, a Python.

On a sick node they hang. Then they are killed with everything that they started, and this command
does not ask them again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.lazy_dataclass import dataclass
from launcher.machine import isolation, process

if TYPE_CHECKING:
    import subprocess

LIMIT_S = 5.0
VARIABLE = "LAUNCH_TOOL_TIMEOUT"  # the environment variable with other seconds than LIMIT_S
# How long all tools together may keep a command waiting, as a multiple of the limit: on a sick node
# several hang. After that each has _SHORTEST_S.
_PATIENCE = 1.6
_SHORTEST_S = 1.0
# a long command asks a silent tool again after so many seconds
_AGAIN_S = 60.0
_POLL_S = 0.1
_HELD_S = 0.3  # to read on after a tool has ended, while something that it started holds the pipe
_KILLED_S = 0.5


class NoAnswer(OSError):
    """A tool did not answer in time, now or earlier in this command."""


@dataclass(frozen=True, slots=True)
class Answer:
    returncode: int
    out: bytes
    err: bytes


@dataclass(frozen=True, slots=True)
class _Silence:
    """A tool did not answer within `waited_s` seconds, until `at` (monotonic)."""

    tool: str
    at: float
    waited_s: float

    def __str__(self) -> str:
        return f"{self.tool} did not answer in {self.waited_s:g} s"


_silences: dict[str, _Silence] = {}


def limit_s() -> float:
    """Seconds that a tool may take to answer."""
    try:
        seconds = float(os.environ.get(VARIABLE, LIMIT_S))
    except ValueError:
        return LIMIT_S
    if not 0 < seconds < 1e6:
        return LIMIT_S
    return seconds


def describe_silences() -> list[str]:
    """A sentence for each tool that did not answer this command."""
    return [str(silence) for silence in _find_recent_silences().values()]


def forget_silences() -> None:
    """Ask every tool again, for another command in the same process."""
    _silences.clear()


def run_tool(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
    input: bytes = b"",
    seconds: float | None = None,
) -> Answer:
    """Run a tool and return its output.

    `seconds` is the limit of a tool that has its own; the others share what a command waits for
    hanging tools. Raises NoAnswer, FileNotFoundError if it is not in an absolute folder of PATH,
    OSError if it cannot run.
    """
    # imported here, as most commands run no tool
    import subprocess

    name = os.path.basename(argv[0])
    silence = _find_recent_silences().get(name)
    if silence is not None:
        raise NoAnswer(str(silence))
    program = isolation.find_program(argv[0], environ)
    if program is None:
        raise FileNotFoundError(argv[0])
    limit = _compute_remaining_s() if seconds is None else seconds
    child = subprocess.Popen(
        [program, *argv[1:]],
        env=None if environ is None else dict(environ),
        cwd=cwd,
        stdin=subprocess.PIPE if input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer = _read_answer(child, input, limit)
    except BaseException:
        _kill_tool(child)
        raise
    if answer is None:
        _kill_tool(child)
        silence = _Silence(tool=name, at=time.monotonic(), waited_s=limit)
        _silences[name] = silence
        raise NoAnswer(str(silence))
    return answer


def _find_recent_silences() -> dict[str, _Silence]:
    now = time.monotonic()
    return {name: silence for name, silence in _silences.items() if now - silence.at < _AGAIN_S}


def _compute_remaining_s() -> float:
    limit = limit_s()
    waited_s = sum(silence.waited_s for silence in _find_recent_silences().values())
    remaining_s = round(limit * _PATIENCE - waited_s, 1)
    return min(limit, max(_SHORTEST_S, remaining_s))


def _read_answer(child: subprocess.Popen[bytes], input: bytes, limit: float) -> Answer | None:
    """What a tool says until it ends; None if it does not in time."""
    import subprocess

    until = time.monotonic() + limit
    while time.monotonic() < until:
        try:
            out, err = child.communicate(input or None, timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if child.poll() is not None:
                return _read_rest(child)
        else:
            return Answer(child.returncode, out, err)
    return None


def _read_rest(child: subprocess.Popen[bytes]) -> Answer:
    """The answer of a tool that has ended, while something that it started holds its output."""
    import subprocess

    out = err = b""
    try:
        out, err = child.communicate(timeout=_HELD_S)
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        err = late.stderr or b""
        process.signal_group(child.pid, signal.SIGKILL)
        _close_pipes(child)
    return Answer(child.returncode, out, err)


def _kill_tool(child: subprocess.Popen[bytes]) -> None:
    """Kill a tool and what it started; one that the kernel does not release (state D) is left."""
    import subprocess

    started = process.find_descendants(child.pid)
    process.signal_group(child.pid, signal.SIGKILL)
    process.signal_all(started, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILLED_S)
    _close_pipes(child)


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
