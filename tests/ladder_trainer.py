"""A trainer that only records, as the probe would, what a rung's training is to have looked like.

LADDER_SCENES says what happens with so many processes: `{"2": {"speed": 0.3}}`; all else goes well.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import saved

TOKENS = 1000  # of one process and step
SCENE = {
    "fall": 0.3,  # of the loss, over the whole run
    "first": 2.0,
    "norm": 1.5,
    "speed": 1.0,  # against the perfect one
    "nan": None,  # the step
    "exit": 0,
    "sleep": 0,
    "gib": None,
    "accuracy": None,
}


def given(name: str, usual: str) -> str:
    """What an argument was set to."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


def main() -> None:
    world, steps = int(given("--num_processes", "1")), int(given("--max_steps", "1"))
    scene = {**SCENE, **json.loads(os.environ.get("LADDER_SCENES", "{}")).get(str(world), {})}
    run = Path(os.environ["LAUNCH_RUN"])
    with (Path(os.environ["FAKE_WORLD"]) / "started").open("a") as stream:
        stream.write(f"{world}\n")
    (run / "probe").mkdir(exist_ok=True)
    for rank in range(world):
        with (run / "probe" / f"rank-{rank}.jsonl").open("w") as stream:
            for event in events(scene, rank, world, steps):
                stream.write(json.dumps({"t": 1.0, **event}) + "\n")
    for step in range(1, steps + 1):
        values = {"loss": str(loss(scene, step, steps)), "learning_rate": "1e-05", "epoch": "0.1"}
        if scene["accuracy"] is not None:
            values |= {"rewards/accuracies": str(scene["accuracy"]), "rewards/margins": "0.1"}
        print(values, flush=True)
    (Path(os.environ["FAKE_PIDS"]) / f"trainer-{world}").write_text(str(os.getpid()))
    time.sleep(scene["sleep"])
    if scene["exit"]:
        raise RuntimeError("NCCL watchdog: the collective timed out")
    output = Path(given("--output_dir", "out"))
    output.mkdir(parents=True, exist_ok=True)
    saved.model(output)
    print(f"Model saved to {output}.", flush=True)


def loss(scene: dict, step: int, steps: int) -> float:
    wave = 0.001 * math.sin(7 * step)
    return math.nan if step == scene["nan"] else (
        scene["first"] * (1 - scene["fall"] * (step - 1) / max(1, steps - 1)) + wave
    )  # fmt: skip


def events(scene: dict, rank: int, world: int, steps: int) -> list[dict]:
    told = [{"event": "start", "rank": rank, "world": world, "pid": os.getpid(), "attempt": 1}]
    told.append({"event": "packing", "state": "off", "detail": "2 rows"})
    told.append(
        {"event": "gradients", "state": "true", "checks": 1, "largest_error": 0.0, "allowed": 0.02}
    )
    times = int(given("--gradient_accumulation_steps", "1"))
    rows = times * int(given("--per_device_train_batch_size", "1"))
    # a pair is two
    rows *= 1 if scene["accuracy"] is None else 2
    for step in range(1, steps + 1):
        value = loss(scene, step, steps)
        told.append(
            {
                "event": "step", "step": step, "finite": math.isfinite(value), "micro_batches": times,
                "loss": value if math.isfinite(value) else None, "rows": rows, "tokens": TOKENS,
                "positions": TOKENS, "wasted": 0, "grad_norm": scene["norm"],
                "seconds": 0.5 / scene["speed"], "allocated_gib": scene["gib"],
                "reserved_gib": scene["gib"],
            }
        )  # fmt: skip
    if not scene["exit"]:
        told += [{"event": "saved", "path": "out"}, {"event": "end", "exit": 0}]
    return told


if __name__ == "__main__":
    main()
