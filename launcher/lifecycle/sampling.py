"""At the end of a run: answers before and after training, for its page. They change no verdict."""

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


def take_samples(folder: RunFolder, attempt: Attempt) -> None:
    """Take the samples that a run asks for, and rewrite its page. Nothing is raised."""

    def say(text: str) -> None:
        _log_line(folder, attempt.number, text)

    try:
        if not samples.is_due(folder):
            return
        with _handle_interrupts(), contextlib.chdir(attempt.cwd):
            samples.take(folder, attempt.command(os.environ).env, say)
        files.write_text(folder.report, page.render([series.load_run(folder.path)]))
    except Exception:
        # the verdict stands without its illustration; this goes to the supervisor's log
        traceback.print_exc()


def _log_line(folder: RunFolder, number: int, text: str) -> None:
    """Tell whoever follows the run why it goes on."""
    print(f"launch: {text}", file=sys.stderr)
    with contextlib.suppress(OSError), folder.console(number).open("a") as log:
        log.write(f"\nlaunch: {text}\n")


@contextlib.contextmanager
def _handle_interrupts() -> Iterator[None]:
    interrupt = signal.default_int_handler
    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: interrupt}
    with process.install_handlers(handlers), contextlib.suppress(KeyboardInterrupt):
        yield
