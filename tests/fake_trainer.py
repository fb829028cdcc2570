"""A trainer of no brains, for tests of what surrounds one: each argument is one thing to do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = os.path.abspath(__file__)


def do(what: str, value: str) -> None:
    """One thing: print lines, ignore signals, start others, wait, end in some way."""
    if what == "print":
        for number in range(int(value)):
            print(f"line {number}")
    elif what == "ignore":
        for name in value.split(","):
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    elif what == "child":
        # like torchrun's workers, in a session of their own where `value` says so
        argv = [sys.executable, HERE, "ignore=INT,TERM", "pid=child", "sleep=60"]
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


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        do(*argument.split("=", 1))
