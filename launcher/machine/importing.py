"""Imports modules, one after the other, and says which failed and why.

A file of its own that the trainer's Python runs, whatever its version from 3.10: standard library
alone, nothing of launch. It reads JSON from stdin, `{"modules": [...], "cuda": false}`, and writes a
JSON line before each import, for each that failed, and at the end. What packages print goes to stderr.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any


def fault(error: BaseException) -> dict[str, Any]:
    """The root of a failure: what is not installed, else the first exception; its place outside of Python's own."""
    root: BaseException | None = error
    while root is not None and absent(root) is None:
        inner = root.__cause__
        if inner is None and isinstance(root, ImportError) and not root.__suppress_context__:
            inner = root.__context__
        root = inner
    if root is None:
        # a package that loads lazily raises something of its own from the true cause
        root = error
        while root.__cause__ is not None:
            root = root.__cause__
    message, file, line = str(root), None, None
    for frame in traceback.extract_tb(root.__traceback__):
        if not (frame.filename == __file__ or frame.filename[:1] == "<" or own(frame.filename)):
            file, line = frame.filename, frame.lineno
    if isinstance(root, SyntaxError) and root.filename:
        message, file, line = root.msg, root.filename, root.lineno
    return {
        "error": type(root).__name__,
        "message": " ".join(message.split()),
        "file": file,
        "line": line,
        "missing": absent(root),
    }


def own(path: str) -> bool:
    inside = path.startswith(os.path.dirname(os.__file__) + os.sep)
    return inside and "site-packages" not in path and "dist-packages" not in path


def absent(error: BaseException) -> str | None:
    """The top-level module that an error says is missing, where nothing of that name can be found."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    top = (error.name or "").partition(".")[0]
    if top[:1] in ("", "_"):
        # a part of Python itself or of a package, which no command installs
        return None
    try:
        return top if importlib.util.find_spec(top) is None else None
    except (ImportError, ValueError):
        return None


def cuda() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    answer: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    try:
        answer["count"] = torch.cuda.device_count()
        if answer["count"]:
            (torch.ones(8, device="cuda") + 1).sum().item()
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return answer


def main() -> None:
    question = json.loads(sys.stdin.read())
    answer = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    # the folder of this file holds modules with common names
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    for module in question["modules"]:
        answer.write(json.dumps({"module": module}) + "\n")
        try:
            importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            answer.write(json.dumps({"module": module, "fault": fault(error)}) + "\n")
    answer.write(json.dumps({"imported": True}) + "\n")
    if question["cuda"]:
        answer.write(json.dumps({"cuda": cuda()}) + "\n")
    # threads that packages started have nothing to finish
    os._exit(0)


if __name__ == "__main__":
    main()
