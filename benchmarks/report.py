"""How long a report of a DPO run of 10,000 steps takes to make."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import Pair
from launcher.report import page, series

STEPS = 10_000


def write_run(path: Path) -> None:
    """A run folder with the metrics of `STEPS` steps."""
    path.mkdir()
    origin = "default: trl/trainer/dpo_config.py:1"
    plan = {"gpus": 8, "per_device": 4, "accumulation": 4, "global": 128, "steps": STEPS}
    manifest = {
        "stage": "dpo",
        "backend": "trl",
        "name": path.name,
        "plan": plan,
        "args": {f"argument_{n}": {"value": n, "origin": origin} for n in range(160)},
    }
    verdict = {"status": "pass", "points": [], "steps": STEPS}
    (path / "run.json").write_text(json.dumps(manifest))
    (path / "verdict.json").write_text(json.dumps(verdict))
    noise = random.Random(path.name)
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = make_row(step, noise)
            file.write(json.dumps(row) + "\n")


def make_row(step: int, noise: random.Random) -> dict[str, float]:
    """One step of a DPO run that goes well."""
    done = step / STEPS
    margin = 3 * (1 - math.exp(-4 * done)) + noise.gauss(0, 0.25)
    return {
        "step": step,
        "finite": True,
        "loss": 0.69 * math.exp(-2 * done) + noise.gauss(0, 0.02),
        "learning_rate": 5e-7 * min(1, done * 10) * (1 - done),
        "tokens": 400_000 + noise.randrange(20_000),
        "positions": 430_000,
        "seconds": 3.4 + noise.random() * 0.3,
        "allocated_gib": 68.4,
        "reserved_gib": 74.1,
        "grad_norm": 1 + noise.random(),
        "rewards/chosen": -0.2 * margin,
        "rewards/rejected": -1.2 * margin,
        "rewards/margins": margin,
        "rewards/accuracies": 0.5 + 0.35 * (1 - math.exp(-5 * done)),
        "logps/chosen": -280 + noise.random(),
        "logps/rejected": -300 + noise.random(),
    }


def pairs(folder: Path) -> Iterator[Pair]:
    """A report of one long run, read and drawn, beside parsing its figures."""
    path = folder / "run"
    write_run(path)

    def render() -> None:
        page.render([series.load_run(path)])

    def parse() -> None:
        with (path / "metrics.jsonl").open(encoding="utf-8") as file:
            for line in file:
                json.loads(line)

    yield Pair(
        name="report",
        what="10,000 steps, read and drawn / parsing them as JSON",
        launch=ratio.time_call(render),
        neighbour=ratio.time_call(parse),
    )
