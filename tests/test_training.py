"""Real training processes: TRL and the pinned open-instruct, on the CPU, from the command line.

One set of tiny assets for all; every run is a few steps. Skipped, with the reason, where the
training packages or the pinned checkout are missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.upstream import locate

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "demo"
TRAINING = ("torch", "transformers", "accelerate", "datasets", "trl")
OPEN_INSTRUCT = ("deepspeed", "olmo_core", "peft", "ray", "beaker")


def missing(names: tuple[str, ...]) -> list[str]:
    """The packages that are not installed here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


pytestmark = [
    pytest.mark.training,
    pytest.mark.skipif(
        bool(missing(TRAINING)), reason=f"no training packages: {', '.join(missing(TRAINING))}"
    ),
]


def open_instruct_reason() -> str | None:
    """Why the pinned scripts cannot run here; None where they can."""
    source = locate("open_instruct")
    if source.root is None:
        return "no open-instruct checkout"
    if not source.pinned:
        return f"the checkout at {source.root} is not the pin"
    lacking = missing(OPEN_INSTRUCT)
    return f"no packages for open-instruct: {', '.join(lacking)}" if lacking else None


needs_open_instruct = pytest.mark.skipif(
    open_instruct_reason() is not None, reason=str(open_instruct_reason())
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to launch from, with the demo's assets in it."""
    folder = tmp_path_factory.mktemp("training")
    maker = ROOT / "scripts" / "make_demo_assets.py"
    made = subprocess.run(
        [sys.executable, str(maker), "build/demo"], cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return folder


def launch(place: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command line in `place` with JSON answers; the exit code and the envelope."""
    environment = {
        **os.environ,
        "LAUNCH_RUNS": str(place / "runs"),
        "XDG_STATE_HOME": str(place / "state"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(place / "hf"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", *words, "--format", "json"],
        cwd=place, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def states(answer: dict[str, Any]) -> dict[str, str]:
    """Point -> state."""
    return {point["name"]: point["state"] for point in answer["data"]["points"]}


def test_trl_sft_passes_and_says_what_ran(place: Path) -> None:
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=24", "logging_steps=1", "--gpus", "0"
    )
    assert code == 0, answer
    verdict = answer["data"]
    assert verdict["status"] == "pass"
    assert verdict["steps"] == 24
    assert verdict["metrics"]["last_loss"] < verdict["metrics"]["first_loss"]
    seen = states(answer)
    assert seen["attention"] == "sdpa"
    assert seen["dataset_cache"] == "miss"
    assert seen["finish"] == "completed"
    run = Path(verdict["run"])
    assert {path.name for path in run.iterdir()} >= {
        "run.json", "console.log", "metrics.jsonl", "exit.json", "verdict.json", "report.html",
    }  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert all(row["tokens"] <= row["positions"] for row in rows)


def test_trl_step_losses_agree_with_the_log(place: Path) -> None:
    """The probe's loss is the step's, also where Trainer has divided it by the accumulation."""
    code, answer = launch(
        place, "dpo", str(CONFIGS / "dpo.yaml"), "model_name_or_path=build/demo/model",
        "output_dir=build/demo/short_dpo", "max_steps=3", "logging_steps=1", "expect.trend=any",
        "--gpus", "0",
    )  # fmt: skip
    assert code == 0, answer
    record = Path(answer["data"]["run"]) / "probe" / "rank-0.jsonl"
    events = [json.loads(line) for line in record.read_text().splitlines()]
    first = next(event for event in events if event["event"] == "step")
    assert first["micro_batches"] == 2
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_packing_is_seen_in_the_batches(place: Path) -> None:
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=2", "packing=true", "max_length=256",
        "output_dir=build/demo/packed", "expect.trend=any", "--gpus", "0",
    )  # fmt: skip
    # measured: other tokens in one sample move nothing in the next
    assert states(answer)["packing"] == "isolated"
    assert (code, answer["data"]["status"]) == (0, "pass")


def test_a_crash_is_exit_4_with_the_reason(place: Path) -> None:
    broken = place / "build" / "demo" / "broken"
    broken.mkdir(parents=True)
    (broken / "train.jsonl").write_text('{"messages": 1}\n' * 20)
    (broken / "test.jsonl").write_text('{"messages": 1}\n')
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=2", "dataset_name=build/demo/broken",
        "output_dir=build/demo/crash", "--gpus", "0",
    )  # fmt: skip
    assert code == 4
    finish = next(p for p in answer["data"]["points"] if p["name"] == "finish")
    assert finish["state"] == "crashed"
    assert finish["detail"]["error"]["message"]


@needs_open_instruct
def test_the_pinned_finetune_runs_and_hits_its_cache_the_second_time(place: Path) -> None:
    words = ("sft", str(CONFIGS / "sft_open_instruct.yaml"), "num_train_epochs=1", "--gpus", "0")
    code, answer = launch(place, *words)
    assert code == 0, answer
    assert states(answer) | {"trend": ""} == {
        "liger": "off", "packing": "off", "attention": "sdpa", "dataset_cache": "miss",
        "loss": "finite", "trend": "", "memory": "ok", "finish": "completed",
    }  # fmt: skip
    run = Path(answer["data"]["run"])
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["upstream"]["pinned"] is True
    assert manifest["args"]["logging_steps"]["value"] == 1
    record = (run / "probe" / "rank-0.jsonl").read_text()
    assert "snapshot_download" in record

    code, answer = launch(place, *words, "--fresh")
    assert code == 0, answer
    assert states(answer)["dataset_cache"] == "hit"
    assert answer["data"]["run"] != str(run), "a run of its own, beside the old one"

    code, answer = launch(place, *words)
    assert code == 0, answer
    assert "already-finished" in [found["code"] for found in answer["findings"]]
    assert not (run / "console.2.log").exists()


@needs_open_instruct
def test_the_pinned_dpo_runs_on_the_sft_result(place: Path) -> None:
    sft = place / "build" / "demo" / "sft_open_instruct"
    model = sft if sft.is_dir() else place / "build" / "demo" / "model"
    words = (
        "dpo", str(CONFIGS / "dpo_open_instruct.yaml"), f"model_name_or_path={model}",
        "max_train_steps=4", "expect.trend=any", "--gpus", "0",
    )  # fmt: skip
    code, answer = launch(place, *words)
    assert code == 0, answer
    seen = states(answer)
    assert (seen["dataset_cache"], seen["reference_cache"]) == ("miss", "miss")
    assert answer["data"]["metrics"]["first_loss"] == pytest.approx(0.6931, abs=2e-3)
    record = (Path(answer["data"]["run"]) / "probe" / "rank-0.jsonl").read_text()
    assert "process_group" in record
