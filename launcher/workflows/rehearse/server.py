"""A server in the trainer's Python: it imports the training script's packages once, then forks.

Standard library alone until the packages are imported; nothing of launch. Its arguments are its
folder and the process that asks: when that has gone, both go. The first line of stdin is the setup,
`{"backend": ..., "paths": [...], "script": {...}}`; every further line is a list of requests
(`inside/records.py`) and is answered by one line with the list of responses. What packages print
goes to stderr.
"""

import dataclasses
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
# functions of `inside/calls.py`, whose frames show where the trainer's code begins
TRAINER = "call_trainer"
REPLACEMENT = "pass_on"
LARGEST_RESPONSE = 1 << 20
JOBS = 2
POLL_S = 0.1
REMOVING_S = 10.0


def begin(stage: Any, request: Any, shared: mmap.mmap) -> int:
    """Fork a process that answers a request; returns its number.

    It answers into shared memory: the disk may be full.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(name_file(request, "stack"), "w") as stack:
            faulthandler.enable(stack)
            faulthandler.dump_traceback_later(request.limit_s, exit=True, file=stack)
            response = dataclasses.asdict(respond(stage, request))
            shared.write(json.dumps(response, default=str).encode() + b"\n")
        os._exit(0)
    finally:
        # whatever goes wrong, no second server goes on
        os._exit(1)


def name_file(request: Any, kind: str) -> str:
    return os.path.join(request.scratch, f"{request.id}.{kind}")


def collect(request: Any, shared: mmap.mmap, status: int) -> Any:
    """The response of a process that has ended, as JSON; how it ended where there is none."""
    records = importlib.import_module("inside.records")
    shutil.rmtree(os.path.join(request.scratch, str(request.id)), ignore_errors=True)
    line = shared.readline()
    if line.endswith(b"\n"):
        return json.loads(line)
    with open(name_file(request, "stack"), errors="replace") as file:
        stack = file.read()
    response = records.ServerResponse(id=request.id)
    response.ended = os.waitstatus_to_exitcode(status)
    response.hung = stack.startswith("Timeout") or "\nTimeout" in stack
    response.stack = stack[-4000:]
    return dataclasses.asdict(response)


def respond(stage: Any, request: Any) -> Any:
    """Answer one request, in the forked process.

    `OWN` in the words of the request stands for a folder that is gone afterwards.
    """
    records = importlib.import_module("inside.records")
    folder = os.path.join(request.scratch, str(request.id))
    log = os.open(name_file(request, "log"), os.O_RDWR | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    response = records.ServerResponse(id=request.id, phase="parse")
    try:
        os.chdir(request.folder)
        request.words = [word.replace(OWN, folder) for word in request.words]
        import_module(stage, request.kind).run(request, response)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            message = read_exit_message(log) or f"exit code {stop.code}"
            response.refusal = records.ErrorRecord(type="SystemExit", message=message)
    except BaseException as error:
        response.refusal = records.ErrorRecord(**describe_error(error))
    return response


def import_module(stage: Any, kind: str) -> Any:
    if kind == "run":
        return stage
    if kind == "shrink":
        return importlib.import_module("inside.shrink")
    return importlib.import_module(stage.__name__.replace("_stage", "_preview"))


def read_exit_message(log: int) -> str | None:
    """What argparse wrote to stderr before it exited."""
    sys.stderr.flush()
    text = os.pread(log, 1 << 20, 0).decode(errors="replace")
    for line in reversed(text.splitlines()):
        if "error: " in line:
            return line.partition("error: ")[2]
    return None


def describe_error(error: BaseException) -> dict[str, Any]:
    """The fields of an `ErrorRecord`."""
    by_launch = is_launchs_fault(error)
    frames = list(traceback.extract_tb(error.__traceback__))
    places = frames
    if by_launch:
        places = [frame for frame in frames if is_launchs(frame.filename)]
    message = str(error)
    if isinstance(error, KeyError):
        message = f"KeyError: {error}"
    fields = {
        "type": type(error).__name__,
        "message": message[:4000],
        "errno": getattr(error, "errno", None),
        "by_launch": by_launch,
        "code": [frame.line or "" for frame in frames[-6:]],
    }
    if places:
        fields["file"] = "/".join(places[-1].filename.split("/")[-3:])
        fields["line"] = places[-1].lineno
    return fields


def is_launchs_fault(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, came out of launch's own code."""
    if type(error).__name__ == "Refused":
        # launch's word about what the trainer did
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
    """Whether launch's innermost frame called what failed for itself, not for the trainer."""
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


def answer_all(stage: Any, requests: list[Any]) -> list[Any]:
    """Answer some requests, several at once."""
    waiting = requests[::-1]
    responses = []
    running: dict[int, tuple[Any, mmap.mmap]] = {}
    while waiting or running:
        while waiting and len(running) < JOBS:
            request = waiting.pop()
            shared = mmap.mmap(-1, LARGEST_RESPONSE)
            running[begin(stage, request, shared)] = (request, shared)
        pid, status = os.wait()
        if pid in running:
            request, shared = running.pop(pid)
            responses.append(collect(request, shared, status))
    return responses


def outlast(owner: int, scratch: str) -> None:
    """Wait until the process that asks has gone; then end all that is left of the rehearsal."""
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
        records = importlib.import_module("inside.records")
        script = records.ScriptFacts(**setup["script"])
        stage = importlib.import_module(f"inside.{setup['backend']}_stage")
        stage.load(script)
    except BaseException as error:
        out.write(json.dumps({"failed": describe_error(error)}) + "\n")
        return
    out.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        requests = [records.ServerRequest.from_json(entry, script) for entry in json.loads(line)]
        out.write(json.dumps(answer_all(stage, requests)) + "\n")


if __name__ == "__main__":
    main()
