"""Run folders -> evidence, and evidence -> numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA
from judged_runs import Event

from launcher.verdict.evidence import Evidence, read_log, read_run
from launcher.verdict.metrics import compute_metrics, find_memory_phases

LOGS = DATA / "logs"


def step(number: int, loss: float | None = 2.0, **more: Any) -> Event:
    measured = {"tokens": 100, "positions": 128, "seconds": 0.5, "allocated_gib": 10.0}
    return {"event": "step", "step": number, "loss": loss, "finite": True, **measured, **more}


def append_lines(folder: Path, rank: int, *lines: str) -> None:
    path = folder / "probe" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)


def write_rank(folder: Path, rank: int, *events: Event, world: int = 1, attempt: int = 1) -> None:
    start = {"event": "start", "rank": rank, "world": world, "attempt": attempt, "target": "sft.py"}
    lines = [json.dumps({"t": 1.5, **event}) + "\n" for event in (start, *events)]
    append_lines(folder, rank, *lines)


def write_exit(folder: Path, code: int, attempt: int = 1) -> None:
    name = "exit.json" if attempt == 1 else f"exit.{attempt}.json"
    record = {"returncode": code, "signal": None, "attempt": attempt}
    (folder / name).write_text(json.dumps(record))


def logged_step(number: int, loss: float) -> str:
    return (
        "2026-11-20 15:41:37 - INFO - finetune.py:956 - [RANK 0]   "
        f"Step: {number}, LR: 1e-05, Loss: {loss}, TPS: 50\n"
    )


def step_numbers(evidence: Evidence) -> list[int]:
    """Of the first rank."""
    assert evidence.probe is not None
    return [step.step for step in evidence.probe.ranks[0].steps]


def test_an_empty_folder_is_no_evidence(tmp_path: Path) -> None:
    assert read_run(tmp_path) == Evidence()


def test_log_probe_and_exit_are_read(tmp_path: Path) -> None:
    log = (LOGS / "sft_cpu_hit.log").read_bytes()
    (tmp_path / "console.log").write_bytes(log)
    write_rank(tmp_path, 0, step(1), {"event": "end", "exit": 0})
    write_exit(tmp_path, 0)

    evidence = read_run(tmp_path)

    assert evidence.log and evidence.log.last_step == 50
    assert evidence.probe and evidence.probe.last_step == 1
    assert evidence.exit and evidence.exit.returncode == 0
    assert (evidence.stage, evidence.last_step, evidence.total_steps) == ("sft", 50, 50)


def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    append_lines(tmp_path, 0, "what\n", "[1]\n", "\n")
    write_rank(tmp_path, 0, step(1))
    append_lines(tmp_path, 0, '{"event": "step", "ste')
    (row,) = read_run(tmp_path).rank_steps
    assert (row.step, row.line) == (1, 5)


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text("first\n")
    (tmp_path / "console.2.log").write_text("second\nand more\n")
    write_exit(tmp_path, 1)
    write_exit(tmp_path, 0, attempt=2)
    for rank in range(4):
        write_rank(tmp_path, rank, step(1), step(2), world=4)
    for rank in range(2):
        write_rank(tmp_path, rank, step(2), step(3), world=2, attempt=2)

    last = read_run(tmp_path)
    assert last.log and last.log.lines == 2
    assert last.exit and last.exit.returncode == 0
    assert last.probe and set(last.probe.ranks) == {0, 1}
    assert step_numbers(last) == [2, 3]

    first = read_run(tmp_path, attempt=1)
    assert first.exit and first.exit.returncode == 1
    assert first.probe and set(first.probe.ranks) == {0, 1, 2, 3}
    assert step_numbers(first) == [1, 2]


def test_rows_merge_log_and_probe(tmp_path: Path) -> None:
    log = logged_step(2, 2.25) + logged_step(3, math.nan)
    (tmp_path / "console.log").write_text(log)
    first_rank = [step(1), step(2), step(3, None, finite=False)]
    second_rank = [step(1, 4.0), step(2, seconds=0.75), step(2), step(3)]
    write_rank(tmp_path, 0, *first_rank, world=2)
    write_rank(tmp_path, 1, *second_rank, world=2)

    rows = read_run(tmp_path).rows
    first, second, third = rows

    assert (first["step"], second["step"], third["step"]) == (1, 2, 3)
    # the log holds means
    assert (first["loss"], second["loss"], third.get("loss")) == (3.0, 2.0, None)
    assert first["tokens"] == 200
    assert second["learning_rate"] == 1e-05
    assert second["seconds"] == 0.75
    assert third["finite"] is False
    json.dumps(rows, allow_nan=False)


FRAME = '  File "/x/lib/python3.11/site-packages/trl/trainer/{}_trainer.py", line 9, in f\n'
REWARDS = {"rewards/chosen": 0.1, "rewards/margins": 0.2}


def hf_step(**metrics: float) -> str:
    values = {"loss": 0.69, "grad_norm": 1.0, **metrics, "epoch": 0.1}
    return f"{values}\n"


def logged(prefix: str) -> str:
    return f"2026-11-20 15:41:37 - INFO - {prefix}  Step: 1, LR: 5e-07, Loss: 0.69\n"


def deprecated(trainer: str) -> str:
    return f"x.py:9: FutureWarning: `tokenizer` is deprecated for `{trainer}.__init__`. Use\n"


SFT_WARNING = "/x/trl/trainer/sft_trainer.py:202: UserWarning: You passed a model_id\n"
DPO_WARNING = "/x/trl/trainer/dpo_trainer.py:402: UserWarning: `max_length` is not set\n"


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        # a classifier's, a reward model's, a pretraining's
        (hf_step(), None),
        (SFT_WARNING + hf_step(), "sft"),
        (DPO_WARNING, "dpo"),
        (FRAME.format("base") + FRAME.format("sft"), "sft"),
        (FRAME.format("sft") + FRAME.format("gkd") + hf_step(), None),
        (FRAME.format("sft") + hf_step(**{"objective/kl": 0.1}), None),
        (deprecated("DPOTrainer"), "dpo"),
        (deprecated("CPOTrainer"), None),
        ("Command '['/x/trl/scripts/sft.py']' returned non-zero exit status 1.\n", "sft"),
        (logged("finetune.py:956 - [RANK 0]"), "sft"),
        (logged("- INFO - __main__ - "), None),
        (hf_step(num_tokens=1263.0), "sft"),
        (hf_step(**REWARDS, num_tokens=1263.0), "dpo"),
        (hf_step(**REWARDS, log_odds_ratio=-0.6), None),
        (hf_step(min_reward=-1.0, margin=0.2), None),
    ],
)
def test_tells_the_stage_by_what_is_named_and_logged(
    tmp_path: Path, text: str, stage: str | None
) -> None:
    (tmp_path / "log").write_text(text)
    assert read_log(tmp_path / "log").stage == stage


def model(**more: Any) -> Event:
    return {
        "event": "model", "parameters": 1100, "trainable": 1100, "experts": None, "layers": 2,
        "hidden": 8, "heads": 2, "head_dim": None, "embedding": 100, "tied": False, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "flops"),
    [
        ({}, 6 * 1000 + 6 * 2 * 8 * 50),
        ({"tied": True}, 6 * 1100 + 6 * 2 * 8 * 50),
        ({"trainable": 300}, 6 * 300 + 4 * 700 + 6 * 2 * 8 * 50),
        ({"head_dim": 16}, 6 * 1000 + 6 * 2 * 32 * 50),
        ({"experts": 8}, None),
    ],
)
def test_the_share_of_the_peak(tmp_path: Path, more: Event, flops: float | None) -> None:
    device = {"event": "device", "name": "NVIDIA H200"}
    steps = [step(number, rows=2, wasted=28) for number in range(1, 7)]
    # neither the first step nor one that saved is a measure of the speed
    steps[0]["seconds"] = 60.0
    steps[3] |= {"seconds": 9.0, "interrupted": True}
    for rank in range(2):
        write_rank(tmp_path, rank, device, model(**more), *steps, world=2)

    numbers = compute_metrics(read_run(tmp_path))

    assert numbers["tokens_per_second"] == 400.0
    assert numbers["tokens_per_row"] == 50.0
    assert numbers["wasted_share"] == 28 / 128
    if flops is None:
        assert numbers["mfu"] is None
    else:
        peak_of_two = 2 * 989.5e12
        assert numbers["mfu"] == pytest.approx(flops * 400 / peak_of_two)


def test_memory_by_phase_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    memory = {"event": "memory", "phase": "optimizer", "step": 1}
    write_rank(tmp_path, 0, {**memory, "peak_allocated_gib": 3.0}, step(1), world=2)
    write_rank(tmp_path, 1, {**memory, "peak_allocated_gib": 5.0}, step(1), world=2)
    phases = find_memory_phases(read_run(tmp_path))
    assert phases == {"optimizer": {"peak_allocated_gib": 5.0}}
