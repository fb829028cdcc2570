"""Several runs that belong together: the folder that they share, found again, and the record in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import Finding, LaunchError, launch_finding
from launcher.lifecycle import stop
from launcher.machine import locks
from launcher.redaction import redact
from launcher.report import page as report_page
from launcher.report import series
from launcher.runs import lease, rundir, runner
from launcher.runs.rundir import RunFolder


def key_of(about: Any) -> str:
    """The key of what a campaign is about: the same for the same values."""
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One ladder, pipeline, comparison or search; another `key` is another. Its record is `<kind>.json`."""

    kind: str
    key: str
    name: str
    root: Path

    @property
    def file(self) -> str:
        return f"{self.kind}.json"

    def earlier(self) -> Path | None:
        """The newest folder of it; None where it has never begun."""
        folders = sorted(self.root.glob(f"*-{self.kind}-*"), reverse=True)
        return next((one for one in folders if rundir.read_json(one / self.file).get("key") == self.key), None)

    @contextlib.contextmanager
    def opened(self, *, fresh: bool = False, taken: Finding | None = None) -> Iterator[Path]:
        """Its folder, `<UTC time>-<kind>-<name>`, for this command alone; what an earlier one left running is ended.

        `fresh` makes another one. Raises NotReady where it cannot be made, or (`taken`) where another process
        is at it.
        """
        taken = taken or launch_finding(
            "error",
            "under-way",
            "the same command is under way in another process",
            "wait for it, or --fresh for a folder of its own",
            file=str(self.root),
        )
        # two that begin at once have no folder in common yet
        name = hashlib.sha256(os.fsencode(f"{self.root}\0{self.key}")).hexdigest()[:32]
        place = rundir.state_folder() / f"{self.kind}s" / name
        with contextlib.ExitStack() as stack:
            with locks.alone(place, taken=taken):
                before = None if fresh else self.earlier()
                folder = before or rundir.new_folder(self.root, self.kind, self.name)
                stack.enter_context(locks.alone(folder / ".lock", taken=taken))
                if before is None:
                    # from now on the same command finds it, and its lock
                    write(folder / self.file, {"key": self.key})
            for run in rundir.newest_first(folder):
                # of a command that has gone: nobody waits for it
                if runner.alive(run.path) or lease.is_locked(run.lock):
                    with contextlib.suppress(LaunchError, OSError):
                        stop.stop(run)
            yield folder


def write(file: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all. Raises NotReady where it cannot be written."""
    try:
        files.write_json(file, redact(dict(record)))
    except OSError as error:
        raise rundir.not_writable(file.parent, error.strerror) from None


def page(runs: Iterable[Path], path: Path, lead: report_page.Lead) -> Path | None:
    """One page of those runs that began and are still there; None where none is. Raises NotReady."""
    begun = [str(run) for run in runs if RunFolder(run).attempts()]
    if not begun:
        return None
    report_page.write(series.gather(begun), path, lead)
    return path
