"""A fork server in the trainer's Python: it imports the training script's packages once, then forks.

Standard library alone until the packages are imported; nothing of launch. Its words are its folder and the process
that asks: when that has gone, both go. The first line of stdin sets it up, `{"backend": ..., "paths": [...],
"stage": ...}`; every further line is a list of requests `{"id": N, ...}` and is answered by one line, the list of
their answers. What packages print goes to stderr.
"""

import faulthandler
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any

OWN = "@own"
HERE = os.path.dirname(os.path.abspath(__file__))
TRAINER = "call_trainer"
REPLACEMENT = "pass_on"
"""Functions of `inside/calls.py`, by whose frames a traceback shows where the trainer's code begins."""
LARGEST_ANSWER = 1 << 20
JOBS = 2
POLL_S = 0.1
REMOVING_S = 10.0


def begin(stage: Any, request: dict[str, Any], shared: mmap.mmap) -> int:
    """Fork a process that answers a request, into memory that it shares: the disk may be full. Its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(file_of(request, "stack"), "w") as stack:
            faulthandler.enable(stack)
            faulthandler.dump_traceback_later(request["limit_s"], exit=True, file=stack)
            shared.write(json.dumps(respond(stage, request), default=str).encode() + b"\n")
        os._exit(0)
    finally:
        # whatever goes wrong, no second server goes on
        os._exit(1)


def file_of(request: dict[str, Any], kind: str) -> str:
    return os.path.join(request["scratch"], f"{request['id']}.{kind}")


def answer(request: dict[str, Any], shared: mmap.mmap, status: int) -> dict[str, Any]:
    """What a process that is over said; where it ended without an answer, how."""
    shutil.rmtree(os.path.join(request["scratch"], str(request["id"])), ignore_errors=True)
    line = shared.readline()
    if line.endswith(b"\n"):
        return {"id": request["id"], **json.loads(line)}
    with open(file_of(request, "stack"), errors="replace") as file:
        stack = file.read()
    hung = stack.startswith("Timeout") or "\nTimeout" in stack
    ended = os.waitstatus_to_exitcode(status)
    return {"id": request["id"], "ended": ended, "hung": hung, "stack": stack[-4000:]}


def respond(stage: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, in the forked process: a refusal, or None, beside what was seen.

    `OWN` in the words of the request stands for a folder that is gone afterwards.
    """
    own = os.path.join(request["scratch"], str(request["id"]))
    log = os.open(file_of(request, "log"), os.O_RDWR | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    report: dict[str, Any] = {"phase": "parse", "notes": []}
    try:
        os.chdir(request["folder"])
        request["words"] = [word.replace(OWN, own) for word in request.get("words", ())]
        if request.get("kind") == "preview":
            preview = importlib.import_module(stage.__name__.replace("_stage", "_preview"))
            preview.run(request, report)
        else:
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
    """An exception as JSON: `file` and `line` are where it was raised, `code` the lines before it.

    `own` says whether launch's code raised it, and not the trainer's.
    """
    own = launchs_own(error)
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if is_launchs(frame.filename)] if own else frames
    place = places[-1] if places else None
    message = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    return {
        "type": type(error).__name__,
        "message": message[:4000],
        "errno": getattr(error, "errno", None),
        "own": own,
        "file": "/".join(place.filename.split("/")[-3:]) if place else None,
        "line": place.lineno if place else None,
        "code": [frame.line or "" for frame in frames[-6:]],
    }


def launchs_own(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, came out of launch's own code, or of what that called.

    `Refused` is launch's word about what the trainer did.
    """
    if type(error).__name__ == "Refused":
        return False
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if came_from_launch(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def came_from_launch(error: BaseException) -> bool:
    """Whether the innermost frame of launch's called what failed for itself, not for the trainer."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames:
        code = frames.pop().f_code
        if not is_launchs(code.co_filename):
            continue
        if code.co_name == TRAINER:
            return False
        if code.co_name != REPLACEMENT:
            return True
        # the replacement itself: whoever called it decides
        if frames:
            frames.pop()
    return False


def is_launchs(path: str) -> bool:
    return path.startswith(HERE + os.sep)


def answers(stage: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer some requests, several at once."""
    waiting, done = requests[::-1], list[dict[str, Any]]()
    running: dict[int, tuple[dict[str, Any], mmap.mmap]] = {}
    while waiting or running:
        while waiting and len(running) < JOBS:
            request, shared = waiting.pop(), mmap.mmap(-1, LARGEST_ANSWER)
            running[begin(stage, request, shared)] = request, shared
        pid, status = os.wait()
        if pid in running:
            done.append(answer(*running.pop(pid), status))
    return done


def outlast(owner: int, scratch: str) -> None:
    """Wait until the process that asks has gone, however it went; then end all that is left of the rehearsal."""
    while os.getppid() == owner:
        time.sleep(POLL_S)
    group = os.getpgrp()
    if os.fork():
        return
    try:
        # out of the group that it kills
        os.setsid()
        os.killpg(group, signal.SIGKILL)
        until = time.monotonic() + REMOVING_S
        while os.path.lexists(scratch) and time.monotonic() < until:
            shutil.rmtree(scratch, ignore_errors=True)
            time.sleep(POLL_S)
    finally:
        os._exit(0)


def main() -> None:
    scratch = sys.argv[1]
    owner = int(sys.argv[2])
    threading.Thread(target=outlast, args=(owner, scratch), daemon=True).start()
    try:
        serve()
    except BrokenPipeError:
        # whoever asks has gone
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def serve() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [HERE, *setup["paths"], *(path for path in sys.path if path != HERE)]
    try:
        stage = importlib.import_module(f"inside.{setup['backend']}_stage")
        stage.load(setup)
    except BaseException as error:
        out.write(json.dumps({"failed": described(error)}) + "\n")
        return
    out.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        out.write(json.dumps(answers(stage, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
