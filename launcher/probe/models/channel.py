"""JSON lines from and to whoever started this process."""

import json
import os
import sys
import traceback
from typing import Any

LONGEST_MESSAGE = 2000


class ModelRefused(Exception):
    """This package refuses something; `code` is that of the finding."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Channel:
    """Requests from stdin, events to stdout; what packages print goes to stderr from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def receive(self) -> Any:
        """The next request; None at the end."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def send(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._out, flush=True)

    def send_failure(self, error: Exception) -> None:
        traceback.print_exc()
        kind = type(error).__name__
        self.send(
            "failed",
            type=kind,
            message=str(error)[:LONGEST_MESSAGE],
            code=error.code if isinstance(error, ModelRefused) else None,
            # torch has a class of its own
            out_of_memory=kind in ("OutOfMemoryError", "MemoryError"),
        )
