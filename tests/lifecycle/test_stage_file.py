"""The resolved stage file of a run is the same stage, and holds no secret."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Write

from launcher.config import load
from launcher.lifecycle import manifest
from launcher.plan import plan
from launcher.runs.rundir import RunFolder
from launcher.stage import stage as stages

BASE = """
stage: sft
args:
  model_name_or_path: base/model
  dataset_mixer_list: [a/b, '1.0', c/d, '200']
  learning_rate: 1e-5
  use_liger_kernel: true
  wandb_project_name: "a \\\\${b} 'c' $(d)\\nü"
"""


DEEPSPEED = {
    "zero_optimization": {"stage": 1},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def planned(path: Path, *overrides: str) -> plan.Plan:
    stage = stages.validate(stages.judge_stage_file(load.load(path, overrides)))
    return plan.make(stage, gpus=8)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "run"
    path.mkdir()
    return RunFolder(path)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "deepspeed: zero2\nbatch: {global: 128, per_device: 16}\n",
        "expect: {liger: 'off', loss: any}\n",
        "probe: off\nmixed_precision: fp16\n",
        "probe: {within: 9, isolation: off}\non_hang: stop\non_violation: warn\nname: 'a b'\n",
        "batch: {global: 64}\n",
    ],
)
def test_the_resolved_file_is_the_same_stage(write: Write, folder: RunFolder, extra: str) -> None:
    original = planned(write("a.yaml", extra + BASE), "learning_rate=3e-6", "max_seq_length=77")
    manifest.write_stage_file(original, folder)

    again = planned(folder.stage_file)

    assert again.arguments() == original.arguments()
    assert again.stage.options == replace(original.stage.options, name=original.stage.name)
    assert again.record == original.record


def test_an_own_deepspeed_file_is_kept_with_the_run(write: Write, folder: RunFolder) -> None:
    own = write("mine.json", json.dumps(DEEPSPEED))
    original = planned(write("a.yaml", f"deepspeed: {own}\n{BASE}"))
    manifest.write_stage_file(original, folder)
    own.unlink()

    again = planned(folder.stage_file)
    assert again.stage.options.deepspeed == folder.deepspeed
    assert folder.deepspeed.read_text() == json.dumps(DEEPSPEED)


def test_no_token_gets_into_it(write: Write, folder: RunFolder) -> None:
    token = "hf_" + "a1B2" * 9
    path = write("a.yaml", BASE.replace("base/model", f"https://u:{token}@host/m"))
    manifest.write_stage_file(planned(path), folder)
    assert token not in folder.stage_file.read_text()
