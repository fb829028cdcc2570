"""Upstream's script, run as `__main__` under watch; its exit code and exceptions stay its own."""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

from .hooks import Watcher
from .probe import Probe
from .record import Console, spare_streams
from .table import watched


def word(shown: str) -> str:
    """A word of the command line: a secret is not on it, but in a variable that it names."""
    if not shown.startswith("$LAUNCH_ARG_"):
        return shown
    return os.environ.get(shown[1:], shown)


def run(target: str) -> None:
    """The script with the words of this command line, and its folder as the first import path."""
    sys.argv = [target, *map(word, sys.argv[1:])]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def main() -> None:
    """What a training process does, from its first event to its last."""
    spare_streams()
    probe = Probe(json.loads(os.environ["LAUNCH_PROBE"]))
    process, record, target = probe.process, probe.record, probe.settings.target
    record.write(
        "start", rank=process.rank, world=process.world, pid=os.getpid(), target=target,
        attempt=int(os.environ.get("LAUNCH_ATTEMPT") or 1),
        python=".".join(map(str, sys.version_info[:3])),
    )  # fmt: skip
    sys.meta_path.insert(0, Watcher(record, watched(probe)))
    probe.watchdog.start()
    code: Any = 0
    try:
        run(target)
    except SystemExit as stop:
        code = stop.code
        raise
    except BaseException as error:
        code = 1
        record.write("error", type=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        probe.ends()
        if Console.lost:
            record.write(
                "note", text=f"the disk was full: {Console.lost} bytes of the log are lost"
            )
        record.write("end", exit=code if isinstance(code, int) else int(code is not None))
