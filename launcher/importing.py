"""Imports what it is told to, one after the other, and says how each went.

A file of its own that the trainer's Python runs, whatever its version from 3.10: standard library
alone, nothing of launch. It reads JSON from stdin, `{"paths": [...], "imports": [[module, [names]]]}`,
and answers with a JSON line before and after each import: what was begun and not ended is what the
interpreter died in. What packages print goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any


def fault(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: what it says, and the innermost place in a file that is not Python's own.

    `absent` is the top-level module that is not there at all, where that is what it says.
    """
    told: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "absent": absent(error.name) if isinstance(error, ModuleNotFoundError) else None,
        "file": None,
        "line": None,
    }
    for frame in traceback.extract_tb(error.__traceback__):
        if not (
            frame.filename == __file__ or frame.filename.startswith("<") or own(frame.filename)
        ):
            told["file"], told["line"] = frame.filename, frame.lineno
    if isinstance(error, SyntaxError) and error.filename:
        told["file"], told["line"], told["message"] = error.filename, error.lineno, error.msg
    # a package that loads lazily raises something of its own from the true cause
    cause, raised = error.__cause__, True
    if cause is None and isinstance(error, ImportError) and not error.__suppress_context__:
        cause, raised = error.__context__, False
    if cause is not None:
        told["cause"], told["raised_from"] = fault(cause), raised
    return told


def own(path: str) -> bool:
    """Whether a file is the standard library's."""
    inside = path.startswith(os.path.dirname(os.__file__) + os.sep)
    return inside and "site-packages" not in path and "dist-packages" not in path


def absent(name: str | None) -> str | None:
    """The top-level part of a module's name, where nothing of that name can be found."""
    top = (name or "").partition(".")[0]
    try:
        return top if top and importlib.util.find_spec(top) is None else None
    except (ImportError, ValueError):
        return None


def attempt(module: str, names: list[str]) -> None:
    """Import a module and take the names from it, as the statement in a file would."""
    found = importlib.import_module(module)
    for name in names:
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{module}.{name}":
                    raise
                # the statement's own words, and what a lazy attribute raised
                getattr(found, name)


def cuda() -> dict[str, Any] | None:
    """What torch says of the GPUs here, with a sum on the first one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    told: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    try:
        told["count"] = torch.cuda.device_count()
        told["sum"] = (
            int((torch.ones(8, device="cuda") + 1).sum().item()) if told["count"] else None
        )
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return told


def main() -> None:
    """Answer what was asked on stdin."""
    asked = json.loads(sys.stdin.read())
    answer = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    # the folder of this file holds modules with common names
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*asked["paths"], *(path for path in sys.path if path != here)]
    for number, (module, names) in enumerate(asked["imports"]):
        answer.write(json.dumps({"begun": number}) + "\n")
        told: dict[str, Any] = {"ended": number}
        try:
            attempt(module, names)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            told["fault"] = fault(error)
        answer.write(json.dumps(told) + "\n")
    if asked.get("cuda"):
        answer.write(json.dumps({"cuda": cuda()}) + "\n")
    answer.flush()
    # threads that packages started have nothing to finish
    os._exit(0)


if __name__ == "__main__":
    main()
