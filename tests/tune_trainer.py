"""A trainer that only records what a trial of a setting is to have looked like, by the arguments it gets.

TUNE_SCENE changes what happens: which setting crashes, hangs, diverges or moves the loss; `flat`: none is
faster than another; `speeds`: what a setting's runs are faster by, one after the other; and where to look
for the files `gate-1`, `gate-2` ..., each of which the trial of that number waits for.
"""

import json
import os
import sys
import time
from pathlib import Path

import saved

SCENE = {"room": 60.0, "crash": "", "hang": "", "moves": "", "nan": "", "gates": "",
         "flat": False, "speeds": {}}  # fmt: skip


class OutOfMemoryError(RuntimeError):
    """As torch's own ends a traceback."""

    __module__ = "torch"


def given(name: str, usual: str) -> str:
    """What an argument was set to."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


def main() -> None:
    scene = {**SCENE, **json.loads(os.environ.get("TUNE_SCENE", "{}"))}
    world, steps = int(given("--num_processes", "1")), int(given("--max_steps", "1"))
    rows = int(given("--per_device_train_batch_size", "1"))
    times = int(given("--gradient_accumulation_steps", "1"))
    checkpointing = given("--gradient_checkpointing", "True") == "True"
    compiled = given("--torch_compile", "False") == "True"
    workers = given("--dataloader_num_workers", "0") != "0"
    about = f"rows={rows},checkpointing={checkpointing},compile={compiled},workers={workers}"
    with (Path(os.environ["FAKE_WORLD"]) / "started").open("a+") as stream:
        stream.seek(0)
        before = stream.read().splitlines().count(about)
        stream.write(f"{about}\n")
    speeds = next((told for name, told in scene["speeds"].items() if name in about), [1.0])
    faster = speeds[min(before, len(speeds) - 1)]
    (Path(os.environ["FAKE_PIDS"]) / "trainer").write_text(str(os.getpid()))
    peak = 5.0 + rows * (2.0 if checkpointing else 6.0)
    if peak > scene["room"]:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    if scene["crash"] and scene["crash"] in about:
        raise RuntimeError("this setting does not work")
    if scene["hang"] and scene["hang"] in about:
        time.sleep(600)
    if scene["gates"]:
        number = len((Path(os.environ["FAKE_WORLD"]) / "started").read_text().splitlines())
        while not Path(scene["gates"], f"gate-{number}").exists():
            time.sleep(0.02)
    tokens = 100.0 * rows * times
    micro = (0.05 + 0.02 * rows) * (1.3 if checkpointing else 1.0) * (0.97 if compiled else 1.0)
    micro = (0.035 * rows if scene["flat"] else micro) / faster
    moved = bool(scene["moves"]) and scene["moves"] in about
    nan = bool(scene["nan"]) and scene["nan"] in about
    run = Path(os.environ["LAUNCH_RUN"])
    (run / "probe").mkdir(exist_ok=True)
    for rank in range(world):
        told = events(
            rank, world, steps, tokens, micro * times, peak, 3.0 if moved else 2.0, nan, rows, times
        )
        with (run / "probe" / f"rank-{rank}.jsonl").open("w") as stream:
            for event in told:
                stream.write(json.dumps({"t": time.time(), **event}) + "\n")
    for _ in range(steps):
        print(
            {"loss": "nan" if nan else "2.0", "learning_rate": "1e-5", "epoch": "0.1"}, flush=True
        )
    output = Path(given("--output_dir", "out"))
    output.mkdir(parents=True, exist_ok=True)
    saved.model(output)
    print(f"Model saved to {output}.", flush=True)


def events(rank, world, steps, tokens, seconds, peak, loss, nan, rows, times):
    yield {"event": "start", "rank": rank, "world": world, "attempt": 1}
    yield {
        "event": "model", "class": "M", "parameters": 1_000_000, "trainable": 1_000_000,
        "layers": 2, "hidden": 64, "heads": 4, "head_dim": 16, "embedding": 0, "attention": "sdpa",
    }  # fmt: skip
    yield {"event": "device", "name": "NVIDIA H200", "total_gib": 140.0}
    yield {"event": "packing", "state": "off", "detail": "padded"}
    yield {
        "event": "gradients",
        "state": "true",
        "checks": 1,
        "largest_error": 0.0,
        "allowed": 0.02,
    }
    for step in range(1, steps + 1):
        yield {
            "event": "step", "step": step, "loss": None if nan else loss, "finite": not nan,
            "micro_batches": times, "rows": rows * times, "tokens": tokens, "positions": tokens * 1.5,
            "wasted": tokens * 0.5, "grad_norm": 1.0, "learning_rate": 1e-5,
            "elapsed": step * seconds, "seconds": 60.0 if step == 1 else seconds,
            "interrupted": False, "allocated_gib": peak, "reserved_gib": peak + 1,
        }  # fmt: skip
    yield {"event": "saved", "path": "out"}
    yield {"event": "end", "exit": 0}


if __name__ == "__main__":
    main()
