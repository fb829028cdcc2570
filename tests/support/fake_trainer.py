"""A trainer of no brains, for tests of what surrounds one: each argument is one thing to do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# launch starts a trainer with PYTHONSAFEPATH, which keeps a script's own folder out
sys.path.insert(0, str(Path(__file__).parent))

import saved

HERE = os.path.abspath(__file__)


def do(what: str, value: str) -> None:
    if what == "print":
        for number in range(int(value)):
            print(f"line {number}")
    elif what == "ignore":
        for name in value.split(","):
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    elif what == "note":
        # takes them, goes on all the same, and leaves word that they came
        for name in value.split(","):
            signal.signal(getattr(signal, f"SIG{name}"), note)
    elif what == "child":
        # like torchrun's workers, in a session of their own where `value` says so
        argv = [sys.executable, HERE, "ignore=INT,TERM", "pid=child", "sleep=600"]
        subprocess.Popen(argv, start_new_session=value == "session")
    elif what == "pid":
        part = Path(os.environ["FAKE_PIDS"], f".{value}")
        part.write_text(str(os.getpid()))
        part.rename(part.with_name(value))
    elif what == "sleep":
        time.sleep(float(value))
    elif what == "wait":
        while not Path(value).exists():
            time.sleep(0.01)
    elif what == "env":
        print(f"{value}={os.environ.get(value)}")
    elif what == "stdin":
        print(f"stdin: {sys.stdin.read()!r}")
    elif what == "kill":
        os.kill(os.getpid(), getattr(signal, f"SIG{value}"))
    elif what == "raise":
        raise RuntimeError(value)
    elif what == "exit":
        sys.exit(int(value))
    else:
        write(what, value)


def note(number: int, _frame: object) -> None:
    Path(os.environ["FAKE_PIDS"]).with_name(signal.Signals(number).name).touch()


def write(what: str, value: str) -> None:
    if what == "flood":
        # so many MiB of lines, as fast as they go
        block = b"".join(b"%0127d\n" % number for number in range(8192))
        for _ in range(int(value)):
            os.write(1, block)
    elif what == "brimful":
        # as a checkpoint is written, and nothing is said of it
        with contextlib.suppress(OSError), open(value, "wb") as stream:
            while True:
                stream.write(b"x" * 65536)
                stream.flush()
        for _ in range(2):
            with contextlib.suppress(OSError):
                print("x" * 65536)
    elif what == "model":
        saved.model(Path(value))
    elif what == "checkpoint":
        # `out:20` is checkpoint-20 of out
        output, _, step = value.rpartition(":")
        saved.trl(Path(output), int(step))
    elif what == "file":
        # `path:text`
        path, _, text = value.partition(":")
        Path(path).write_text(text)
    elif what == "link":
        # `path:target`
        path, _, target = value.partition(":")
        Path(path).symlink_to(target)
    elif what == "step":
        # what the probe would record
        record = Path(os.environ["LAUNCH_RUN"], "probe", "rank-0.jsonl")
        record.parent.mkdir(exist_ok=True)
        event = {"event": "step", "step": int(value), "loss": 1.0, "elapsed": float(value)}
        with record.open("a") as stream:
            stream.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        do(*argument.split("=", 1))
