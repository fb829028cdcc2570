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


def given(name: str, usual: str) -> str:
    """What an argument was set to."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


def main() -> None:
    world, steps = int(given("--num_processes", "1")), int(given("--max_steps", "1"))
    rows = given("--per_device_train_batch_size", "1")
    checkpointing = given("--gradient_checkpointing", "True")
    about = f"rate={given('--learning_rate', '?')},world={world},rows={rows},"
    about += f"checkpointing={checkpointing}"
    scene = dict(SCENE)
    for where, changes in json.loads(os.environ.get("SCENES", "{}")).items():
        scene |= changes if where in about else {}
    with Path(os.environ["FAKE_WORLD"], "started").open("a") as stream:
        stream.write(f"{about}\n")
    probe = Path(os.environ["LAUNCH_RUN"]) / "probe"
    probe.mkdir(exist_ok=True)
    for rank in range(world):
        with (probe / f"rank-{rank}.jsonl").open("w") as stream:
            for event in events(scene, rank, world, steps):
                stream.write(json.dumps({"t": time.time() - scene["ago"], **event}) + "\n")
    for step in range(1, steps + 1):
        print({"loss": str(loss(scene, step, steps)), "learning_rate": "1e-5"}, flush=True)
    Path(os.environ["FAKE_PIDS"], "trainer").write_text(str(os.getpid()))
    time.sleep(scene["sleep"])
    if scene["says"]:
        raise RuntimeError(scene["says"])
    output = Path(given("--output_dir", "out"))
    output.mkdir(parents=True, exist_ok=True)
    saved.model(output)
    print(f"Model saved to {output}.", flush=True)


def loss(scene: dict, step: int, steps: int) -> float:
    fallen = scene["fall"] * (step - 1) / max(1, steps - 1)
    return math.nan if step == scene["nan"] else scene["loss"] * (1 - fallen)


def events(scene: dict, rank: int, world: int, steps: int):
    yield {"event": "start", "rank": rank, "world": world, "attempt": 1}
    yield {
        "event": "model", "class": "M", "parameters": 1_000_000, "trainable": 1_000_000,
        "layers": 2, "hidden": 64, "heads": 4, "head_dim": 16, "embedding": 0, "attention": "sdpa",
    }  # fmt: skip
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
    times = int(given("--gradient_accumulation_steps", "1"))
    rows = times * int(given("--per_device_train_batch_size", "1"))
    for step in range(1, steps + 1):
        value = loss(scene, step, steps)
        yield {
            "event": "step", "step": step, "loss": value if math.isfinite(value) else None,
            "finite": math.isfinite(value), "micro_batches": times, "rows": rows,
            "tokens": scene["tokens"], "positions": scene["tokens"] + scene["waste"],
            "wasted": scene["waste"], "grad_norm": 1.0, "learning_rate": 1e-5,
            "elapsed": step * seconds,
            # the first one compiles: it must not count
            "seconds": scene["first"] if step == 1 else seconds,
            "interrupted": step in scene["rested"],
            "allocated_gib": scene["gib"], "reserved_gib": scene["gib"] + 1,
        }  # fmt: skip
    if not scene["says"]:
        yield {"event": "saved", "path": "out"}
        yield {"event": "end", "exit": 0}


if __name__ == "__main__":
    main()
