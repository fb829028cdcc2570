"""A console log -> what people look for in it: its last lines, and where a tracker shows the run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from launcher import files
from launcher.printable import printable
from launcher.redaction import redact

TAIL_LINES = 20
_TAIL_BYTES = 32 * 2**10
_LINE_CHARS = 400
# W&B and MLflow print the address of a run, trackio the command that shows it
TRACKER = re.compile(
    rb"View run\b.{0,200}?(https?://[^\s\x1b\"']+)|(trackio show --project [^\r\n\x1b]{1,100})", re.DOTALL
)
_TRACKER_WITHIN = 4 * 2**20


def tail(path: Path, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The last lines without secrets (see `redact`), of a progress bar its last frame; none without a log."""
    try:
        with files.open_regular(path) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - _TAIL_BYTES))
            raw = log.read(_TAIL_BYTES)
    except OSError:
        return ()
    lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in raw.split(b"\n")]
    # the first one may be cut off
    text = b"\n".join(lines[1:] if size > _TAIL_BYTES else lines).decode(errors="replace")
    shown = redact(printable(text), environ).splitlines()
    return tuple(line[:_LINE_CHARS] for line in shown if line.strip())[-TAIL_LINES:]


def tracker(path: Path) -> str | None:
    """Where W&B, MLflow or trackio shows the run: an address or a command, as the log says; else None."""
    try:
        with files.open_regular(path) as log:
            found = TRACKER.search(log.read(_TRACKER_WITHIN))
    except OSError:
        return None
    # of an anonymous run the address holds its key
    return redact((found[1] or found[2]).decode(errors="replace").strip()) if found else None
