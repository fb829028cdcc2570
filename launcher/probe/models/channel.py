"""JSON lines from and to whoever started this process."""

import json
import os
import sys
import traceback
from typing import Any

LONGEST_MESSAGE = 2000


class ModelRefused(Exception):
    """Something that this package itself refuses; `code` is the finding's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Channel:
    """Requests from stdin, events to what was stdout: from here on, that is where packages print their errors."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._in = sys.stdin

    def receive(self) -> Any:
        """The next request; None where there is no more."""
        line = self._in.readline()
        if not line:
            return None
        return json.loads(line)

    def send(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._out, flush=True)

    def send_failure(self, error: Exception) -> None:
        traceback.print_exc()
        kind = type(error).__name__
        message = str(error)[:LONGEST_MESSAGE]
        code = error.code if isinstance(error, ModelRefused) else None
        is_memory = kind == "OutOfMemoryError" or isinstance(error, MemoryError)
        self.send("failed", type=kind, message=message, code=code, out_of_memory=is_memory)
