"""Whether the data files are what they were when launch hashed them, at the time that training reads them.

`datasets` knows a local file by its path and time of last write: rows that were swapped and put back
leave no trace in it, and stay in its cache.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .hooks import wrap
from .process import Process
from .saves import content


class Data:
    """The files that the run's manifest names, around each load of data; on a machine's first process."""

    def __init__(self, process: Process) -> None:
        self.record = process.record
        self.manifest = os.path.join(os.path.dirname(process.settings.out), "run.json")
        self.digests: dict[tuple[Any, ...], str] = {}
        self.state: str | None = None

    def watch(self, module: types.ModuleType) -> None:
        """`load_dataset`, through which both backends read."""

        def load(original: Any, *args: Any, **kwargs: Any) -> Any:
            self.look()
            result = original(*args, **kwargs)
            self.look()
            return result

        wrap(module, "load_dataset", load)

    def look(self) -> None:
        """Compare; a file that nobody wrote to since the last look is not read again."""
        if int(os.environ.get("LOCAL_RANK") or 0) or self.state == "changed":
            return
        with self.record.quietly("data"):
            for path, before in self._named():
                after = self._digest(path)
                if after != before:
                    self.state = "changed"
                    self.record.write(
                        "data", state="changed", file=path, before=before, after=after
                    )
                    return
                if self.state is None:
                    self.state = "same"
                    self.record.write("data", state="same")

    def _named(self) -> Iterator[tuple[str, str]]:
        with open(self.manifest, encoding="utf-8") as stream:
            listed = json.load(stream).get("contents") or ()
        for one in listed:
            if one.get("role") != "data":
                continue
            name = one["name"]
            for file, digest in (one.get("files") or {}).items():
                yield os.path.join(name, file) if os.path.isdir(name) else name, digest

    def _digest(self, path: str) -> str | None:
        try:
            status = os.stat(path)
            state = (
                path,
                status.st_dev,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
            if state not in self.digests:
                self.digests[state] = content().read(Path(path))[0].digest
            return self.digests[state]
        except OSError:
            return None
