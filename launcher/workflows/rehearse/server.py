"""A fork server in the trainer's Python: it imports the training script's packages once, then forks.

Standard library alone until the packages are imported; nothing of launch. The first line of stdin sets
it up, `{"backend": ..., "paths": [...], "stage": ..., "jobs": 2}`; every further line is a request
`{"id": N, ...}` and is answered by one line of the same id. What packages print goes to stderr.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import selectors
import shutil
import signal
import sys
import traceback
from typing import Any

OWN = "@own"


class Child:
    """One request under way: its process, the pipe that it answers through, and what came so far."""

    def __init__(self, request: dict[str, Any], stage: Any, unrelated: list[int]) -> None:
        self.id = request["id"]
        self.stack = os.path.join(request["scratch"], f"{self.id}.stack")
        self.own = os.path.join(request["scratch"], str(self.id))
        self.read, write = os.pipe()
        self.text = b""
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        for descriptor in (self.read, *unrelated):
            os.close(descriptor)
        with os.fdopen(write, "wb") as pipe, open(self.stack, "w") as stack:
            faulthandler.enable(stack)
            faulthandler.dump_traceback_later(request["limit_s"], exit=True, file=stack)
            pipe.write(json.dumps(respond(stage, request, self.own), default=str).encode())
        os._exit(0)

    def answer(self) -> dict[str, Any]:
        """What it said; where it ended without an answer, how."""
        os.close(self.read)
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.own, ignore_errors=True)
        with contextlib.suppress(ValueError):
            return {"id": self.id, **json.loads(self.text)}
        with open(self.stack, errors="replace") as file:
            stack = file.read()
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        hung = stack.startswith("Timeout") or "\nTimeout" in stack
        return {"id": self.id, "ended": ended, "hung": hung, "stack": stack[-4000:]}


def respond(stage: Any, request: dict[str, Any], own: str) -> dict[str, Any]:
    """The answer to one request, in the forked process: a refusal, or None, beside what was seen.

    `own` is a folder that is gone afterwards: `OWN` in the words of the request stands for it.
    """
    log = os.open(os.path.join(request["scratch"], f"{request['id']}.log"), os.O_RDWR | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    report: dict[str, Any] = {"phase": "parse", "notes": []}
    try:
        os.chdir(request["folder"])
        request["words"] = [word.replace(OWN, own) for word in request.get("words", ())]
        stage.answer(request, report)
    except SystemExit as stop:
        sys.stderr.flush()
        # argparse says why on stderr, and exits with 2
        text = os.pread(log, 1 << 20, 0).decode(errors="replace")
        errors = [line.partition("error: ")[2] for line in text.splitlines() if "error: " in line]
        if stop.code not in (None, 0):
            message = errors[-1] if errors else f"exit code {stop.code}"
            report["refusal"] = {"type": "SystemExit", "message": message, "file": None, "line": None}
    except BaseException as error:
        report["refusal"] = described(error)
    return report


def described(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: `file` and `line` are where it was raised, `code` the lines before it."""
    frames = traceback.extract_tb(error.__traceback__)
    message = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    return {
        "type": type(error).__name__,
        "message": message[:4000],
        "errno": getattr(error, "errno", None),
        "file": "/".join(frames[-1].filename.split("/")[-3:]) if frames else None,
        "line": frames[-1].lineno if frames else None,
        "code": [frame.line or "" for frame in frames[-6:]],
    }


def serve(stage: Any, out: Any, jobs: int) -> None:
    """Answer requests until stdin ends, several at once."""
    selector = selectors.DefaultSelector()
    os.set_blocking(0, False)
    selector.register(0, selectors.EVENT_READ)
    waiting: list[dict[str, Any]] = []
    running: dict[int, Child] = {}
    text, open_for_more = b"", True
    while open_for_more or waiting or running:
        while waiting and len(running) < jobs:
            child = Child(waiting.pop(0), stage, list(running))
            running[child.read] = child
            selector.register(child.read, selectors.EVENT_READ)
        for key, _ in selector.select():
            piece = os.read(key.fd, 1 << 16)
            if key.fd == 0:
                text += piece
                *lines, text = text.split(b"\n")
                waiting += [json.loads(line) for line in lines if line.strip()]
                if not piece:
                    open_for_more = False
                    selector.unregister(0)
                continue
            running[key.fd].text += piece
            if not piece:
                selector.unregister(key.fd)
                out.write(json.dumps(running.pop(key.fd).answer()) + "\n")


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    line = b""
    while not line.endswith(b"\n"):
        # unbuffered: what follows the first line belongs to `serve`
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    setup = json.loads(line)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [here, *setup["paths"], *(path for path in sys.path if path != here)]
    try:
        stage = importlib.import_module(f"inside.{setup['backend']}_stage")
        stage.load(setup)
    except BaseException as error:
        out.write(json.dumps({"failed": described(error)}) + "\n")
        return
    out.write(json.dumps({"ready": True}) + "\n")
    serve(stage, out, setup["jobs"])
    # whoever asks ends this process before it comes here, unless it was killed itself
    shutil.rmtree(setup["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
