"""The process that keeps a run: starts its training, waits, records the end, judges, tells.

It lives in a session of its own and needs no terminal: the launcher, tmux and the ssh connection may
die. Training would go on without it too (it writes its own log and holds the locks), as an orphan.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from launcher import attempt as attempts
from launcher import on_finish, process, rundir, runner
from launcher.attempt import Attempt
from launcher.errors import Exit, Finding, LaunchError, NotReady
from launcher.rundir import RunFolder

OTHERS_S = 60.0
"""Seconds that a machine whose training failed waits for the first one to have recorded its end."""
_STARTED = b"started\n"


def spawn(folder: RunFolder, number: int, locks: Sequence[int] = ()) -> process.Identity:
    """Start the keeper of an attempt; returns as soon as training is there.

    `locks` are file descriptors that keeper and training hold open from now on. Raises NotReady with
    what stopped it where training could not be started.
    """
    process.hold_standard_streams()
    listening, telling = os.pipe()
    words = [str(folder.path), str(number), str(telling), ",".join(map(str, locks))]
    try:
        with runner.private(folder.diary) as diary:
            child = subprocess.Popen(
                [sys.executable, "-m", "launcher.keeper", *words], stdin=subprocess.DEVNULL,
                stdout=diary, stderr=diary, start_new_session=True, pass_fds=(telling, *locks),
                env={**os.environ, "PYTHONPATH": _with_ours(os.environ.get("PYTHONPATH"))},
            )  # fmt: skip
    except OSError as error:
        os.close(listening)
        raise rundir.not_writable(folder.path, error.strerror) from None
    finally:
        os.close(telling)
    keeper = process.identify(child.pid)
    try:
        with os.fdopen(listening, "rb") as told:
            answer = told.read()
    except KeyboardInterrupt:
        # whoever asked for the run does not want it any more
        process.signal_all([child.pid], signal.SIGINT)
        child.wait()
        raise
    if answer == _STARTED:
        return keeper
    child.wait()
    raise NotReady(_refused(folder, answer))


def _with_ours(path: str | None) -> str:
    """PYTHONPATH with this package on it: it may be running from a folder that is nowhere else named."""
    ours = str(Path(__file__).resolve().parent.parent)
    return ours if not path else f"{path}{os.pathsep}{ours}"


def _refused(folder: RunFolder, answer: bytes) -> list[Finding]:
    try:
        return [Finding(**told) for told in json.loads(answer)]
    except (ValueError, TypeError):
        return [
            Finding(
                severity="error", layer="launch", code="no-keeper", file=str(folder.diary),
                message="the process that keeps the run ended before training began",
                help=f"its last words are in {folder.diary.name}",
            )
        ]  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Keep one attempt to its end. `words`: run folder, number, descriptor to tell, descriptors to hold."""
    folder, number = RunFolder(Path(words[0])), int(words[1])
    telling, locks = int(words[2]), [int(one) for one in words[3].split(",") if one]
    for descriptor in (telling, *locks):
        os.set_inheritable(descriptor, False)
    with os.fdopen(telling, "wb", buffering=0) as pipe:

        def tell(answer: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):
                pipe.write(answer)
                pipe.close()

        try:
            attempt = attempts.read(folder)
            # a tmux session, a job or another shell may have started us anywhere
            os.chdir(attempt.cwd)
            ended = runner.run(
                attempt.command(os.environ), folder, number, held=locks,
                due=Due(folder, attempt).now, began=lambda: tell(_STARTED), inherited={},
            )  # fmt: skip
        except OSError as error:
            tell(json.dumps([_gone(attempt.cwd, error).as_json()]).encode())
            return Exit.NOT_READY
        except LaunchError as error:
            tell(json.dumps([one.as_json() for one in error.findings]).encode())
            return error.exit_code
    return conclude(folder, attempt, ended)


def _gone(cwd: str, error: OSError) -> Finding:
    return Finding(
        severity="error", layer="launch", code="not-started", file=cwd,
        message=f"the folder that launch was started in cannot be entered: {error.strerror}",
    )  # fmt: skip


def conclude(folder: RunFolder, attempt: Attempt, ended: runner.Exit | None) -> int:
    """Judge a run that is over and tell whoever asked for it; returns the run's exit code.

    Where the keeper was killed, whoever looks on does it: once, however many they are.
    """
    from launcher import start

    if attempt.rank:
        return _of_a_further_machine(folder, attempt, ended)
    if not _first(folder.concluded(attempt.number)):
        return Exit.OK
    code: int = Exit.BUG
    try:
        start.discard_spoiled(attempt)
        verdict = start.finish(folder)
        rundir.seal(folder, attempt.number)
        code = start.exit_code(ended, verdict, allow_unproven=attempt.allow_unproven)
    except Exception:
        # a verdict can be asked for again; being told that it is over cannot
        traceback.print_exc()
    on_finish.call(folder, attempt, code)
    return code


def _of_a_further_machine(folder: RunFolder, attempt: Attempt, ended: runner.Exit | None) -> int:
    """The first machine judges and tells, for all; one that failed leaves it the time for that."""
    if ended is not None and not ended.returncode:
        return Exit.OK
    first = RunFolder(folder.path.parent)
    until = time.monotonic() + OTHERS_S
    while first.manifest.exists() and not first.exit(attempt.number).exists():
        if time.monotonic() > until:
            break
        time.sleep(1)
    return Exit.TRAINING


def _first(mark: Path) -> bool:
    try:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    except OSError:
        # a full disk: rather twice than never
        return True
    return True


class Due:
    """Whether a request to stop is to be met now: at once, or once one more checkpoint is complete."""

    EVERY_S = 2.0

    def __init__(self, folder: RunFolder, attempt: Attempt) -> None:
        self.folder = folder
        self.attempt = attempt
        self.before: frozenset[str] | None = None
        self.looked = -self.EVERY_S

    def now(self, request: runner.Request) -> bool:
        """Looks for checkpoints every two seconds; those of the first look are the old ones."""
        if not request.after_checkpoint:
            return True
        if time.monotonic() - self.looked < self.EVERY_S:
            return False
        self.looked = time.monotonic()
        complete = self._complete()
        if self.before is None:
            self.before = complete
        return bool(complete - self.before)

    def _complete(self) -> frozenset[str]:
        from launcher import checkpoints

        output = None if self.attempt.output is None else Path(self.attempt.output)
        found = checkpoints.find(self.attempt.backend, output, ranks=self.attempt.world)
        return frozenset(str(one.path) for one in found if one.why_incomplete is None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
