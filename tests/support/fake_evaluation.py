"""An evaluation of no brains: `fake_evaluation.py MODEL FOLDER [STEP...]`.

It notes its words in `evaluated` of the world, then does the steps in turn: `write=NAME:JSON`
writes a file below FOLDER, `pid=NAME` notes its process, `wait=PATH`, `sleep=SECONDS` and
`exit=CODE` are what they say.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(model: str, folder: str, *steps: str) -> None:
    world = Path(os.environ["FAKE_WORLD"])
    record = {
        "model": model,
        "folder": folder,
        "argv": sys.argv[1:],
        "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    with (world / "evaluated").open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    assert (Path(model) / "config.json").is_file()
    for step in steps:
        name, _, value = step.partition("=")
        if name == "write":
            file, _, content = value.partition(":")
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        elif name == "pid":
            (world / "pids" / value).write_text(str(os.getpid()))
        elif name == "wait":
            while not Path(value).exists():
                time.sleep(0.02)
        elif name == "sleep":
            time.sleep(float(value))
        elif name == "exit":
            sys.exit(int(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
