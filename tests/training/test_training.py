"""Real training processes on the CPU, from the command line."""

import shutil
from pathlib import Path

from real_training import CONFIGS, launch, needs_training, states
from real_training import place as place  # a fixture

pytestmark = needs_training


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
