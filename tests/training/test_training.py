"""Real trainings through TRL on the CPU: packing, adapters, crashes."""

import json
import shutil
from pathlib import Path

import pytest
from real_answers import Answer, find_point, launch
from real_training import CONFIGS, needs_training
from real_training import place as place  # a fixture

pytestmark = [pytest.mark.slow, *needs_training]

SFT = ("sft", str(CONFIGS / "sft.yaml"), "--gpus", "0", "expect.trend=any")


@pytest.fixture(scope="module")
def packed_texts(place: Path) -> Answer:
    """A run with packing on rows without a prompt, so that its samples have nothing to ask."""
    folder = place / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "A line of text to learn."}\n' * 1000)
    packing = ("packing=true", "max_length=256")
    data = ("dataset_name=texts", "output_dir=build/demo/texts")
    return launch(place, *SFT, "max_steps=2", "samples=2", *packing, *data)


def test_packed_samples_are_measured_to_be_isolated(packed_texts: Answer) -> None:
    assert packed_texts.states["packing"] == "isolated"


def test_samples_that_fail_do_not_change_the_verdict(packed_texts: Answer) -> None:
    assert packed_texts.outcome == (0, "pass")
    record = json.loads((packed_texts.run / "samples.json").read_text())
    assert "no prompt" in record["failed"]


def test_an_adapter_at_a_learning_rate_that_moves_nothing_fails(place: Path) -> None:
    adapter = ("use_peft=true", "lora_target_modules=all-linear", "output_dir=build/demo/adapter")
    answer = launch(place, *SFT, "max_steps=2", "learning_rate=1e-30", *adapter)
    assert answer.outcome == (1, "fail")
    assert answer.states["weights"] == "still"
    assert answer.states["model"] == "saved"


def test_a_crash_is_exit_4_with_the_reason(place: Path) -> None:
    broken = place / "build" / "demo" / "broken"
    shutil.copytree(place / "build" / "demo" / "model", broken)
    # launch does not read this file
    (broken / "tokenizer.json").write_text("{}")
    model = ("model_name_or_path=build/demo/broken", "output_dir=build/demo/crash")
    answer = launch(place, *SFT, *model)
    assert answer.code == 4
    finish = find_point(answer.data, "finish")
    assert finish["state"] == "crashed"
    assert finish["detail"]["error"]["message"]
