"""A trainer that trains nothing and leaves a model that is made of what it was given.

The weights are a digest of the model that it began from, of the data and of the learning rate:
whoever begins from another model leaves another one. `do.json` of its world says what else it does,
by the name of its output folder: a list of the fake trainer's arguments, done before the model is
saved.
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


def arguments_of(argv: list[str]) -> dict[str, str]:
    """The arguments of upstream's script."""
    arguments = {}
    for name, value in itertools.pairwise(argv):
        if name.startswith("--"):
            arguments[name.removeprefix("--")] = value
    return arguments


def digest_of(arguments: dict[str, str]) -> bytes:
    """What the weights depend on: the files of the model and of the data, the learning rate."""
    digest = hashlib.sha256()
    model = Path(arguments["model_name_or_path"])
    for path in sorted(model.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    digest.update(arguments["learning_rate"].encode())
    data = Path(arguments["dataset_name"])
    for path in sorted(data.iterdir()):
        digest.update(path.read_bytes())
    return digest.digest()


def write_event(event: str, **fields: object) -> None:
    """A line of the probe's."""
    record = Path(os.environ["LAUNCH_RUN"], "probe", "rank-0.jsonl")
    record.parent.mkdir(exist_ok=True)
    line = json.dumps({"t": time.time(), "event": event, **fields})
    with record.open("a") as stream:
        stream.write(f"{line}\n")


def write_step(step: int) -> None:
    write_event(
        "step",
        step=step,
        loss=3.0 - step,
        finite=True,
        grad_norm=1.0,
        elapsed=step,
        seconds=1.0,
        tokens=10,
        rows=2,
        positions=10,
        wasted=0,
        micro_batches=1,
    )


def further_steps(world: Path, output: str) -> list[str]:
    """What else the training with this output is to do."""
    file = world / "do.json"
    if not file.exists():
        return []
    steps: list[str] = json.loads(file.read_text()).get(output, [])
    return steps


def main(argv: list[str]) -> None:
    arguments = arguments_of(argv)
    output = Path(arguments["output_dir"])
    world = Path(os.environ["FAKE_WORLD"])
    with (world / "trained").open("a") as stream:
        stream.write(f"{output.name}\n")
    (world / f"argv.{output.name}").write_text(" ".join(argv))
    write_event(
        "start", rank=0, world=1, pid=os.getpid(), attempt=int(os.environ["LAUNCH_ATTEMPT"])
    )
    digest = digest_of(arguments)
    for step in range(1, 4):
        write_step(step)
    for step in further_steps(world, output.name):
        name, value = step.split("=", 1)
        fake_trainer.do(name, value)
    saved.model(output)
    (output / "tokenizer.json").write_text('{"of": true}')
    (output / "weights.bin").write_bytes(digest)
    write_event("saved", path=str(output))
    write_event("end", exit=0)


if __name__ == "__main__":
    main(sys.argv[1:])
