"""Run folders -> evidence, and evidence -> numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA

from launcher.verdict.evidence import Evidence, read_log, read_run
from launcher.verdict.metrics import compute_metrics, memory_phases

LOGS = DATA / "logs"


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    measured = {"tokens": 100, "positions": 128, "seconds": 0.5, "allocated_gib": 10.0}
    return {"event": "step", "step": number, "loss": loss, "finite": True, **measured, **more}


def write_rank(
    folder: Path, rank: int, *events: dict[str, Any] | str, world: int = 1, attempt: int = 1
) -> None:
    path = folder / "probe" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = {"event": "start", "rank": rank, "world": world, "attempt": attempt, "target": "sft.py"}
    with path.open("a") as file:
        file.writelines(
            e if isinstance(e, str) else json.dumps({"t": 1.5, **e}) + "\n"
            for e in (start, *events)
        )


def write_exit(folder: Path, code: int, attempt: int = 1) -> None:
    infix = "" if attempt == 1 else f".{attempt}"
    (folder / f"exit{infix}.json").write_text(
        json.dumps({"returncode": code, "signal": None, "attempt": attempt})
    )


def test_what_a_run_left(tmp_path: Path) -> None:
    assert read_run(tmp_path) == Evidence()
    (tmp_path / "console.log").write_bytes((LOGS / "sft_cpu_hit.log").read_bytes())
    # lines that cannot be read are no trouble
    write_rank(
        tmp_path,
        0,
        "what\n",
        "[1]\n",
        "\n",
        step(1),
        {"event": "end", "exit": 0},
        '{"event": "step", "ste',
    )
    write_exit(tmp_path, 0)
    evidence = read_run(tmp_path)
    assert evidence.log and evidence.probe and evidence.exit
    assert (evidence.log.last_step, evidence.probe.last_step, evidence.exit.returncode) == (
        50,
        1,
        0,
    )
    assert (evidence.stage, evidence.last_step, evidence.total_steps) == ("sft", 50, 50)
    assert [(s.step, s.line) for s in evidence.rank_steps] == [(1, 5)]


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text("first\n")
    (tmp_path / "console.2.log").write_text("second\nand more\n")
    write_exit(tmp_path, 1)
    write_exit(tmp_path, 0, attempt=2)
    for rank in range(4):
        write_rank(tmp_path, rank, step(1), step(2), world=4)
    for rank in range(2):
        write_rank(tmp_path, rank, step(2), step(3), world=2, attempt=2)
    last, first = read_run(tmp_path), read_run(tmp_path, attempt=1)
    assert last.log and last.exit and last.probe and first.exit and first.probe
    assert (last.log.lines, last.exit.returncode, first.exit.returncode) == (2, 0, 1)
    # ranks 2 and 3 are of the first attempt
    assert [sorted(attempt.probe.ranks) for attempt in (last, first) if attempt.probe] == [
        [0, 1],
        [0, 1, 2, 3],
    ]
    assert [s.step for s in last.probe.ranks[0].steps] == [2, 3]
    assert [s.step for s in first.probe.ranks[0].steps] == [1, 2]


def test_rows_merge_log_and_probe(tmp_path: Path) -> None:
    stamp = "2026-11-20 15:41:37 - INFO - finetune.py:956 - [RANK 0]   "
    (tmp_path / "console.log").write_text(
        f"{stamp}Step: 2, LR: 1e-05, Loss: 2.25, TPS: 50\n{stamp}Step: 3, LR: 1e-05, Loss: nan, TPS: 50\n"
    )
    write_rank(tmp_path, 0, step(1), step(2), step(3, None, finite=False), world=2)
    write_rank(tmp_path, 1, step(1, 4.0), step(2, seconds=0.75), step(2), step(3), world=2)
    rows = read_run(tmp_path).rows
    assert [(row["step"], row.get("loss")) for row in rows] == [
        (1, 3.0),
        (2, 2.0),
        (3, None),
    ]  # the log holds means
    assert (rows[1]["learning_rate"], rows[1]["seconds"], rows[0]["tokens"]) == (1e-05, 0.75, 200)
    assert rows[2]["finite"] is False
    json.dumps(rows, allow_nan=False)


FRAME = '  File "/x/lib/python3.11/site-packages/trl/trainer/{}_trainer.py", line 9, in f\n'
REWARDS = {"rewards/chosen": 0.1, "rewards/margins": 0.2}


def measured(**metrics: float) -> str:
    return f"{ {'loss': 0.69, 'grad_norm': 1.0, **metrics, 'epoch': 0.1} }\n"


def logged(start: str) -> str:
    return f"2026-11-20 15:41:37 - INFO - {start}  Step: 1, LR: 5e-07, Loss: 0.69\n"


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        (measured(), None),  # a classifier's, a reward model's, a pretraining's
        (
            "/x/trl/trainer/sft_trainer.py:202: UserWarning: You passed a model_id\n" + measured(),
            "sft",
        ),
        ("/x/trl/trainer/dpo_trainer.py:402: UserWarning: `max_length` is not set\n", "dpo"),
        (FRAME.format("base") + FRAME.format("sft"), "sft"),
        (FRAME.format("sft") + FRAME.format("gkd") + measured(), None),
        (FRAME.format("sft") + measured(**{"objective/kl": 0.1}), None),
        (
            "x.py:9: FutureWarning: `tokenizer` is deprecated for `DPOTrainer.__init__`. Use\n",
            "dpo",
        ),
        ("x.py:9: FutureWarning: `tokenizer` is deprecated for `CPOTrainer.__init__`. Use\n", None),
        ("Command '['/x/trl/scripts/sft.py']' returned non-zero exit status 1.\n", "sft"),
        (logged("finetune.py:956 - [RANK 0]"), "sft"),
        (logged("- INFO - __main__ - "), None),
        (measured(num_tokens=1263.0), "sft"),
        (measured(**REWARDS, num_tokens=1263.0), "dpo"),
        (measured(**REWARDS, log_odds_ratio=-0.6), None),
        (measured(min_reward=-1.0, margin=0.2), None),
    ],
)
def test_tells_the_stage_by_what_is_named_and_logged(
    tmp_path: Path, text: str, stage: str | None
) -> None:
    (tmp_path / "log").write_text(text)
    assert read_log(tmp_path / "log").stage == stage


def model(**more: Any) -> dict[str, Any]:
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
def test_the_share_of_the_peak(tmp_path: Path, more: dict[str, Any], flops: float | None) -> None:
    for rank in range(2):
        device = {"event": "device", "name": "NVIDIA H200"}
        slow = step(1, seconds=60.0, rows=2, wasted=28)
        rest = [step(n, rows=2, wasted=28, interrupted=n == 4) for n in range(2, 7)]
        rest[2]["seconds"] = 9.0  # it followed a save
        write_rank(tmp_path, rank, device, model(**more), slow, *rest, world=2)
    numbers = compute_metrics(read_run(tmp_path))
    assert numbers["tokens_per_second"] == 400.0
    assert numbers["tokens_per_row"] == 50.0
    assert numbers["wasted_share"] == 28 / 128
    expected = None if flops is None else pytest.approx(flops * 400 / (2 * 989.5e12))
    assert numbers["mfu"] == expected


def test_memory_by_phase_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    for rank, peak in enumerate((3.0, 5.0)):
        memory = {"event": "memory", "phase": "optimizer", "step": 1, "peak_allocated_gib": peak}
        write_rank(tmp_path, rank, memory, step(1), world=2)
    assert memory_phases(read_run(tmp_path)) == {"optimizer": {"peak_allocated_gib": 5.0}}
