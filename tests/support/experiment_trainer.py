"""A trainer that only records, as the probe would, what a short run is to have looked like.

SCENES says what happens where: `{"world=2": {"speed": 300}}` for what trains in two processes,
`""` for all. What a run is stands in `started`, one line each:
`rate=0.1,world=2,rows=4,checkpointing=True`.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

# launch starts a trainer with PYTHONSAFEPATH, which keeps a script's own folder out
sys.path.insert(0, str(Path(__file__).parent))

import saved

SCENE = {
    "speed": 1000,  # tokens a second of one process
    "tokens": 500,  # of one process and step
    "loss": 2.0,
    "fall": 0.0,  # of the loss, over the whole run
    "waste": 100,
    "says": None,  # and crashes
    "sleep": 0,
    "ago": 0,  # seconds since what is told began
    "first": 60.0,  # seconds of the first step
    "gib": 10.0,
    "nan": None,  # the step
    "rested": (),  # steps that tell no speed
}


def argument(name: str, default: str) -> str:
    if name not in sys.argv:
        return default
    place = sys.argv.index(name)
    return sys.argv[place + 1]


def main() -> None:
    world = int(argument("--num_processes", "1"))
    steps = int(argument("--max_steps", "1"))
    label = describe(world)
    with Path(os.environ["FAKE_WORLD"], "started").open("a") as stream:
        stream.write(f"{label}\n")
    scene = scene_of(label)
    for rank in range(world):
        write_record(scene, rank, world, steps)
    for step in range(1, steps + 1):
        print({"loss": str(loss(scene, step, steps)), "learning_rate": "1e-5"}, flush=True)
    Path(os.environ["FAKE_PIDS"], "trainer").write_text(str(os.getpid()))
    time.sleep(scene["sleep"])
    if scene["says"]:
        raise RuntimeError(scene["says"])
    output = Path(argument("--output_dir", "out"))
    output.mkdir(parents=True, exist_ok=True)
    saved.model(output)
    print(f"Model saved to {output}.", flush=True)


def describe(world: int) -> str:
    """What this run is, as SCENES and `started` name it."""
    rate = argument("--learning_rate", "?")
    rows = argument("--per_device_train_batch_size", "1")
    checkpointing = argument("--gradient_checkpointing", "True")
    return f"rate={rate},world={world},rows={rows},checkpointing={checkpointing}"


def scene_of(label: str) -> dict:
    scene = dict(SCENE)
    scenes = json.loads(os.environ.get("SCENES", "{}"))
    for part, changes in scenes.items():
        if part in label:
            scene |= changes
    return scene


def write_record(scene: dict, rank: int, world: int, steps: int) -> None:
    probe = Path(os.environ["LAUNCH_RUN"], "probe")
    probe.mkdir(exist_ok=True)
    with (probe / f"rank-{rank}.jsonl").open("w") as stream:
        for event in events(scene, rank, world, steps):
            line = json.dumps({"t": time.time() - scene["ago"], **event})
            stream.write(f"{line}\n")


def loss(scene: dict, step: int, steps: int) -> float:
    if step == scene["nan"]:
        return math.nan
    fallen = scene["fall"] * (step - 1) / max(1, steps - 1)
    return scene["loss"] * (1 - fallen)


def events(scene: dict, rank: int, world: int, steps: int):
    yield {"event": "start", "rank": rank, "world": world, "attempt": 1}
    yield {
        "event": "model",
        "class": "M",
        "parameters": 1_000_000,
        "trainable": 1_000_000,
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "head_dim": 16,
        "embedding": 0,
        "attention": "sdpa",
    }
    yield {"event": "device", "name": "NVIDIA H200", "total_gib": 140.0}
    yield {"event": "packing", "state": "off", "detail": "4 rows"}
    yield {
        "event": "gradients",
        "state": "true",
        "checks": 1,
        "largest_error": 0.0,
        "allowed": 0.02,
    }
    seconds = scene["tokens"] / scene["speed"]
    micro_batches = int(argument("--gradient_accumulation_steps", "1"))
    rows = int(argument("--per_device_train_batch_size", "1"))
    for step in range(1, steps + 1):
        value = loss(scene, step, steps)
        is_finite = math.isfinite(value)
        yield {
            "event": "step",
            "step": step,
            "loss": value if is_finite else None,
            "finite": is_finite,
            "micro_batches": micro_batches,
            "rows": micro_batches * rows,
            "tokens": scene["tokens"],
            "positions": scene["tokens"] + scene["waste"],
            "wasted": scene["waste"],
            "grad_norm": 1.0,
            "learning_rate": 1e-5,
            "elapsed": step * seconds,
            # the first one compiles: it must not count
            "seconds": scene["first"] if step == 1 else seconds,
            "interrupted": step in scene["rested"],
            "allocated_gib": scene["gib"],
            "reserved_gib": scene["gib"] + 1,
        }
    if not scene["says"]:
        yield {"event": "saved", "path": "out"}
        yield {"event": "end", "exit": 0}


if __name__ == "__main__":
    main()
