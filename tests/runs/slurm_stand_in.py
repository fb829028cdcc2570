"""Stands for `launch exec` in a job of Slurm: reports who started it and how, and waits.

usage: slurm_stand_in.py exec FOLDER [--prepare | --save]
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(sys.argv[2])
NODE = os.environ.get("SLURM_NODEID")


def report(**more: object) -> None:
    content = {"node": NODE, "argv": sys.argv[1:], "variables": sorted(os.environ), **more}
    with (FOLDER / "reports.jsonl").open("a") as stream:
        stream.write(json.dumps(content) + "\n")


def stop(number: int, _frame: FrameType | None) -> None:
    time.sleep(0.5)
    report(stopped=number)
    os._exit(3)


signal.signal(signal.SIGTERM, stop)
report()
print("started on", NODE, flush=True)
if "--save" in sys.argv:
    if (FOLDER / "deaf").exists():
        sys.exit(4)
    (FOLDER / "save").touch()
elif "--prepare" not in sys.argv:
    while not (FOLDER / "go").exists():
        if (FOLDER / "save").exists():
            sys.exit(130)
        time.sleep(0.05)
