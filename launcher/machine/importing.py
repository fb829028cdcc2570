"""Imports modules, one after the other, and says which failed and why.

The trainer's Python runs this file, in any version from 3.10 on: it uses the standard library
alone. It reads JSON from stdin, `{"modules": [...], "cuda": false}`, and writes a JSON line before
each import, for each that failed, and at the end. What packages print goes to stderr.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any


def describe_failure(error: BaseException) -> dict[str, Any]:
    """The root of a failure: the missing module, else the first exception.

    `file` and `line` are outside of Python's own files.
    """
    root = find_root_error(error)
    message = str(root)
    file = None
    line = None
    for frame in traceback.extract_tb(root.__traceback__):
        if frame.filename == __file__ or frame.filename[:1] == "<":
            continue
        if not is_of_python(frame.filename):
            file = frame.filename
            line = frame.lineno
    if isinstance(root, SyntaxError) and root.filename:
        message = root.msg
        file = root.filename
        line = root.lineno
    return {
        "error": type(root).__name__,
        "message": " ".join(message.split()),
        "file": file,
        "line": line,
        "missing": find_missing_module(root),
    }


def find_root_error(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None:
        if find_missing_module(cause) is not None:
            return cause
        inner = cause.__cause__
        if inner is None and isinstance(cause, ImportError) and not cause.__suppress_context__:
            inner = cause.__context__
        cause = inner
    # a package that imports lazily raises an exception of its own from the true cause
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return root


def is_of_python(path: str) -> bool:
    if "site-packages" in path or "dist-packages" in path:
        return False
    return path.startswith(os.path.dirname(os.__file__) + os.sep)


def find_missing_module(error: BaseException) -> str | None:
    """The top-level module that an error says is missing, if it cannot be found."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    top = (error.name or "").partition(".")[0]
    if not top or top.startswith("_"):
        # part of Python itself or of a package: no command installs it
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is not None:
        return None
    return top


def describe_cuda() -> dict[str, Any] | None:
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
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def answer(line: object) -> None:
        output.write(json.dumps(line) + "\n")

    # the folder of this file holds modules with common names
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != own_folder]
    for module in question["modules"]:
        answer({"module": module})
        try:
            importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            answer({"module": module, "fault": describe_failure(error)})
    answer({"imported": True})
    if question["cuda"]:
        answer({"cuda": describe_cuda()})
    # without waiting for threads that packages started
    os._exit(0)


if __name__ == "__main__":
    main()
