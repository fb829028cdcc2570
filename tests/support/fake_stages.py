"""A trainer that trains nothing and leaves a model all the same: one that is made of what it was given.

The weights are a digest of the model that it began from, of the data and of the learning rate: whoever
begins from another model leaves another one. What else it is to do stands in `do.json` of its world, by
the name of its output folder: a list of the fake trainer's arguments, done before the model is saved.
"""

import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

# training imports nothing from the folder of its script
sys.path.insert(0, str(Path(__file__).parent))
import fake_trainer
import saved


def words(argv: list[str]) -> dict[str, str]:
    """The arguments of upstream's script."""
    pairs = itertools.pairwise(argv)
    return {name[2:]: value for name, value in pairs if name.startswith("--")}


def content(folder: str) -> bytes:
    """Every file of a model, but not where it lies."""
    read = sorted(path for path in Path(folder).iterdir() if path.is_file())
    return b"".join(path.name.encode() + path.read_bytes() for path in read)


def say(event: str, **more: object) -> None:
    """A line of the probe's."""
    record = Path(os.environ["LAUNCH_RUN"], "probe", "rank-0.jsonl")
    record.parent.mkdir(exist_ok=True)
    with record.open("a") as stream:
        stream.write(json.dumps({"t": time.time(), "event": event, **more}) + "\n")


def main(argv: list[str]) -> None:
    given = words(argv)
    output = Path(given["output_dir"])
    world = Path(os.environ["FAKE_WORLD"])
    with (world / "trained").open("a") as stream:
        stream.write(f"{output.name}\n")
    (world / f"argv.{output.name}").write_text(" ".join(argv))
    say("start", rank=0, world=1, pid=os.getpid(), attempt=int(os.environ["LAUNCH_ATTEMPT"]))
    begun = content(given["model_name_or_path"])
    told = hashlib.sha256(begun + given["learning_rate"].encode())
    for one in sorted(Path(given["dataset_name"]).iterdir()):
        told.update(one.read_bytes())
    for step in range(1, 4):
        event = {
            "loss": 3.0 - step, "finite": True, "grad_norm": 1.0, "elapsed": step, "seconds": 1.0,
        }  # fmt: skip
        say("step", step=step, tokens=10, rows=2, positions=10, wasted=0, micro_batches=1, **event)
    do = json.loads((world / "do.json").read_text()) if (world / "do.json").exists() else {}
    for one in do.get(output.name, []):
        fake_trainer.do(*one.split("=", 1))
    saved.model(output)
    (output / "tokenizer.json").write_text(json.dumps({"of": given["model_name_or_path"] != ""}))
    (output / "weights.bin").write_bytes(told.digest())
    say("saved", path=str(output))
    say("end", exit=0)


if __name__ == "__main__":
    main(sys.argv[1:])
