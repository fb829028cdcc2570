"""Run folders and logs as training leaves them, made by hand for what reads them."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

EVERY = 5  # logging_steps


def manifest(name: str = "tulu", stage: str = "dpo", **changes: Any) -> dict[str, Any]:
    args = {
        "model_name_or_path": {"value": "local/7b", "origin": "configs/a.yaml:12"},
        "learning_rate": {"value": 5e-7, "origin": "override: learning_rate=5e-7"},
        "gradient_accumulation_steps": {"value": 4, "origin": "derived: batch of 128"},
        "dataset_mixer_list": {"value": ["a/b", 0.25], "origin": "configs/a.yaml:14"},
        "max_grad_norm": {"value": 1.0, "origin": "default: trl/trainer/dpo_config.py:9"},
        "hub_model_id": {"value": None, "origin": "default: trl/trainer/dpo_config.py:10"},
    }
    plan = {
        "gpus": 1,
        "nodes": 1,
        "per_device": 4,
        "accumulation": 32,
        "global": 128,
        "rows": 5120,
        "steps": 40,
    }
    finding = {
        "severity": "warning",
        "layer": "run",
        "code": "conditional-key",
        "key": "args.x",
        "message": "`x` does nothing here",
        "help": "leave it out",
        "file": "configs/a.yaml",
        "line": 9,
    }
    usual = {
        "schema_version": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "attempt": 1,
        "stage": stage,
        "backend": "trl",
        "name": name,
        "config": "configs/a.yaml",
        "output": "out/a",
        "expect": {"loss": "finite", "memory": "ok", "finish": "completed", "liger": "off"},
        "plan": plan,
        "args": args,
        "argv": ["python", "-m", "accelerate", "--run_name", "it's"],
        "env": ["CUDA_VISIBLE_DEVICES"],
        "cwd": "/data",
        "upstream": {"backend": "trl", "root": "/site", "version": "trl 1.16.0", "pinned": True},
        "launch_commit": "c0ffee",
        "trainer": {"python": "/bin/python", "version": "3.11.7", "packages": {"torch": "2.13.0"}},
        "machine": {"host": "node7", "system": "Linux", "cpus": 8, "gpus": ["H200, 143771 MiB"]},
        "findings": [finding],
    }
    return {**usual, **changes}


def loss(step: int, steps: int = 40) -> float:
    return 0.69 * math.exp(-step / steps) + 0.01 * math.sin(step * 7)


def write_run(
    path: Path,
    *,
    record: Mapping[str, Any] | None = None,
    attempt: int = 1,
    first: int = 1,
    steps: int = 40,
    bad: Collection[int] = (),
    ended: bool = True,
    extra: str = "",
    scale: float = 1,
) -> Path:
    """Write a run folder of one attempt, or a further attempt into the same folder.

    `record` is what run.json holds. `bad` steps are NaN, seconds and memory are `scale` times as
    many, and the console ends with `extra`.
    """
    (path / "probe").mkdir(parents=True, exist_ok=True)
    infix = "" if attempt == 1 else f".{attempt}"
    if record is None:
        record = manifest()
    (path / "run.json").write_text(json.dumps(record))
    with (path / "probe" / "rank-0.jsonl").open("a") as file:
        for event in events(first, steps, attempt, bad, scale):
            file.write(json.dumps(event) + "\n")
    (path / f"console{infix}.log").write_text(console(first, steps, bad) + extra)
    if ended:
        end = {
            "returncode": 0,
            "signal": None,
            "stopped": None,
            "attempt": attempt,
            "started": "2026-01-02T03:04:05+00:00",
            "ended": "2026-01-02T04:34:05+00:00",
        }
        (path / f"exit{infix}.json").write_text(json.dumps(end))
    return path


def events(
    first: int, steps: int, attempt: int = 1, bad: Collection[int] = (), scale: float = 1
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"event": "start", "rank": 0, "world": 1, "attempt": attempt, "target": "dpo.py"},
        {"event": "model", "class": "Qwen2ForCausalLM", "attention": "sdpa"},
    ]
    for step in range(first, steps + 1):
        is_finite = step not in bad
        event = {
            "event": "step",
            "step": step,
            "loss": loss(step, steps) if is_finite else None,
            "finite": is_finite,
            "tokens": 3000,
            "positions": 4000,
            "wasted": 1000,
            "rows": 256,
            "micro_batches": 32,
            "seconds": 0.5 * scale,
            "allocated_gib": 61.25 * scale,
            "reserved_gib": 70.5 * scale,
        }
        events.append(event)
    events.append({"event": "end", "exit": 0})
    return events


def console(first: int, steps: int, bad: Collection[int] = ()) -> str:
    lines = []
    for step in range(first, steps + 1):
        if step % EVERY:
            continue
        done = step / steps
        numbers = {
            "loss": math.nan if step in bad else loss(step, steps),
            "grad_norm": 1.5,
            "learning_rate": 5e-7 * (1 - done),
            "rewards/chosen": -done,
            "rewards/rejected": -3 * done,
            "rewards/accuracies": 0.5 + done / 3,
            "rewards/margins": 2 * done,
            "logps/chosen": -280.5,
            "epoch": done,
        }
        logged = {name: f"{number:.4g}" for name, number in numbers.items()}
        percent = step * 100 // steps
        lines.append(f"{logged}\n{percent}%|###| {step}/{steps} [00:10<00:05, 2.0it/s]")
    return "\n".join([*lines, "💾 Model saved to out/a.", ""])
