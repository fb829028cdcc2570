"""A trainer that only records, as the probe would, what a trial is to have looked like.

BENCH_SCENES says what happens at which learning rate: `{"0.1": {"speed": 2000}}`; all else goes well.
"""

import json
import os
import sys
import time
from pathlib import Path

import saved

SCENE = {
    "speed": 1000,  # tokens a second of one process
    "tokens": 500,  # of one process and step
    "loss": 2.0,
    "waste": 100,
    "says": None,  # and crashes
    "sleep": 0,
    "asked": 0,  # it goes on for as long as the driver was not asked so often
    "ago": 0,  # seconds since what is told began
    "first": 60.0,  # seconds of the first step
    "gib": 10.0,
    "nan": None,  # the step
    "rested": (),  # steps that tell no speed
}


def given(name: str, usual: str) -> str:
    """What an argument was set to."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


def asked() -> int:
    """How often the driver was asked how busy it is."""
    path = Path(os.environ["FAKE_WORLD"], "asked")
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    world, steps = int(given("--num_processes", "1")), int(given("--max_steps", "1"))
    rate = given("--learning_rate", "?")
    scene = {**SCENE, **json.loads(os.environ.get("BENCH_SCENES", "{}")).get(rate, {})}
    run = Path(os.environ["LAUNCH_RUN"])
    with (Path(os.environ["FAKE_WORLD"]) / "started").open("a") as stream:
        stream.write(f"{rate}\n")
    (run / "probe").mkdir(exist_ok=True)
    for rank in range(world):
        with (run / "probe" / f"rank-{rank}.jsonl").open("w") as stream:
            for event in events(scene, rank, world, steps):
                stream.write(json.dumps({"t": time.time() - scene["ago"], **event}) + "\n")
    for step in range(1, steps + 1):
        shown = "nan" if step == scene["nan"] else str(scene["loss"])
        print({"loss": shown, "learning_rate": rate, "epoch": "0.1"}, flush=True)
    (Path(os.environ["FAKE_PIDS"]) / f"trainer-{rate}").write_text(str(os.getpid()))
    while scene["asked"] and asked() < scene["asked"]:
        time.sleep(0.02)
    time.sleep(scene["sleep"])
    if scene["says"]:
        raise RuntimeError(scene["says"])
    output = Path(given("--output_dir", "out"))
    output.mkdir(parents=True, exist_ok=True)
    saved.model(output)
    print(f"Model saved to {output}.", flush=True)


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
        bad = step == scene["nan"]
        yield {
            "event": "step", "step": step, "loss": None if bad else scene["loss"],
            "finite": not bad, "micro_batches": times, "rows": rows, "tokens": scene["tokens"],
            "positions": scene["tokens"] + scene["waste"], "wasted": scene["waste"],
            "grad_norm": 1.0, "learning_rate": 1e-5, "elapsed": step * seconds,
            # the first one compiles: it must not count
            "seconds": scene["first"] if step == 1 else seconds,
            "interrupted": step in scene["rested"],
            "allocated_gib": scene["gib"], "reserved_gib": scene["gib"] + 1,
        }  # fmt: skip
    yield {"event": "saved", "path": "out"}
    yield {"event": "end", "exit": 0}


if __name__ == "__main__":
    main()
