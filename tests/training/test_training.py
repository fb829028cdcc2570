"""Real training processes on the CPU: packing, crashes, and what somebody else has touched, which never passes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_world import until
from real_training import CONFIGS, launch, needs_training, states
from real_training import place as place  # a fixture

pytestmark = needs_training

SFT = ("sft", str(CONFIGS / "sft.yaml"), "--gpus", "0")


def status(answer: dict[str, Any]) -> str:
    return str(answer["data"]["status"])


def last_run(place: Path) -> Path:
    return max((place / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.mark.slow
def test_twenty_steps_are_twenty_losses_and_the_model_is_the_one_that_was_saved(
    place: Path,
) -> None:
    output = place / "build" / "demo" / "whole"
    code, answer = launch(place, *SFT, "max_steps=20", f"output_dir={output}")
    points = {one["name"]: one for one in answer["data"]["points"]}
    assert (code, status(answer)) == (0, "pass")
    assert (points["trend"]["state"], points["trend"]["detail"]["losses"]) == ("falling", 20)
    seen = {name: points[name]["state"] for name in ("weights", "model", "inputs")}
    assert seen == {"weights": "moved", "model": "saved", "inputs": "same"}
    shutil.copy(place / "build" / "demo" / "model" / "model.safetensors", output)
    code, answer = launch(place, "check", "last")
    assert (code, status(answer), states(answer)["model"]) == (1, "fail", "changed")
    shutil.rmtree(output)
    code, answer = launch(place, "check", "last")
    assert (code, status(answer), states(answer)["model"]) == (1, "fail", "missing")


@pytest.mark.slow
def test_an_adapter_at_a_learning_rate_that_moves_nothing_fails(place: Path) -> None:
    words = (
        "max_steps=3", "learning_rate=1e-30", "use_peft=true", "lora_target_modules=all-linear",
    )  # fmt: skip
    code, answer = launch(place, *SFT, *words, "expect.trend=any", "output_dir=build/demo/adapter")
    assert (code, status(answer), states(answer)["weights"]) == (1, "fail", "still")
    assert states(answer)["model"] == "saved"


@pytest.mark.slow
def test_a_checkpoint_with_other_bytes_is_not_resumed_from(place: Path) -> None:
    output = place / "build" / "demo" / "resumed"
    words = ("max_steps=30", "save_strategy=steps", "save_steps=4", f"output_dir={output}")
    launch(place, *SFT, *words, "expect.trend=any", "--detach")
    run = last_run(place)
    until(lambda: (output / "checkpoint-8" / "trainer_state.json").exists())
    launch(place, "stop", run.name)
    names = sorted(json.loads((run / "checksums.json").read_text())["checkpoints"])
    assert {"checkpoint-4", "checkpoint-8"} <= set(names)
    newest, older = sorted(names, key=lambda name: int(name.split("-")[1]))[-1:-3:-1]
    damaged = output / newest / "optimizer.pt"
    raw = bytearray(damaged.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 512] = b"x" * 512
    damaged.write_bytes(raw)
    code, answer = launch(place, *SFT, *words, "expect.trend=any")
    assert (code, status(answer), states(answer)["resume"]) == (0, "pass", "continuous")
    (said,) = [one for one in answer["findings"] if one["code"] == "damaged-checkpoint"]
    assert newest in said["message"] and "optimizer.pt" in said["message"]
    assert json.loads((run / "run.json").read_text())["resume"]["checkpoint"] == older


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
    shutil.copytree(place / "build" / "demo" / "model", broken)
    # what launch does not look into
    (broken / "tokenizer.json").write_text("{}")
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=2", "model_name_or_path=build/demo/broken",
        "output_dir=build/demo/crash", "--gpus", "0",
    )  # fmt: skip
    assert code == 4
    finish = next(p for p in answer["data"]["points"] if p["name"] == "finish")
    assert finish["state"] == "crashed"
    assert finish["detail"]["error"]["message"]
