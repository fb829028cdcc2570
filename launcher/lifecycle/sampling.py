"""At the end of a run: answers before and after the training, on its page. They change no verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator

from launcher import files
from launcher.machine import process
from launcher.report import page, series
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder
from launcher.trained import samples


def take(folder: RunFolder, attempt: Attempt) -> None:
    """Take the samples that a run asks for, and write its page anew. Nothing is raised."""
    try:
        if not samples.is_due(folder):
            return
        with _interruptible(), contextlib.chdir(attempt.cwd):
            samples.take(folder, attempt.command(os.environ).env, lambda text: _say(folder, attempt.number, text))
        files.write_text(folder.report, page.render([series.load_run(folder.path)]))
    except Exception:
        # the verdict stands, whatever becomes of its illustration; this goes to the keeper's log
        traceback.print_exc()


def _say(folder: RunFolder, number: int, text: str) -> None:
    """Tell whoever follows the run why it goes on."""
    print(f"launch: {text}", file=sys.stderr)
    with contextlib.suppress(OSError), folder.console(number).open("a") as log:
        log.write(f"\nlaunch: {text}\n")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.default_int_handler}
    with process.handling(handlers), contextlib.suppress(KeyboardInterrupt):
        yield
