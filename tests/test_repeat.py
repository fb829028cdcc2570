"""`--repeat RUN`: the resolved stage file is the same stage, and what differs is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Write
from typer.testing import CliRunner

from launcher import config, plan, repeat, rundir
from launcher import stage as stages
from launcher.commands import app
from launcher.errors import UsageError
from launcher.rundir import RunFolder

BASE = """
stage: sft
args:
  model_name_or_path: base/model
  dataset_mixer_list: [a/b, '1.0', c/d, '200']
  learning_rate: 1e-5
  use_liger_kernel: true
  wandb_project_name: "a \\\\${b} 'c' $(d)\\nü"
"""


AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)


def planned(path: Path, *overrides: str, gpus: int = 8) -> plan.Plan:
    stage = stages.validate(stages.judge(config.load(path, overrides)))
    return plan.make(stage, gpus=gpus)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "run"
    path.mkdir()
    return RunFolder(path)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "deepspeed: zero2\nbatch: {global: 128, per_device: 16}\nexpect: {liger: 'off', loss: any}\n",
        "probe: off\nmixed_precision: fp16\n",
        "probe: {within: 9, isolation: off}\non_hang: stop\non_violation: warn\nname: 'a b'\n",
        "batch: {global: 64}\n",
    ],
)
def test_the_resolved_file_is_the_same_stage(write: Write, folder: RunFolder, extra: str) -> None:
    whole = planned(write("a.yaml", extra + BASE), "learning_rate=3e-6", "max_seq_length=77")
    repeat.write_stage_file(whole, folder)
    again = planned(folder.stage_file)
    assert again.arguments() == whole.arguments()
    assert again.stage.options == whole.stage.options.__class__(
        **{
            **{name: getattr(whole.stage.options, name) for name in whole.stage.options.__slots__},
            "name": whole.stage.name,
        }
    )
    assert again.as_json() == whole.as_json()


def test_an_own_deepspeed_file_is_kept_with_the_run(write: Write, folder: RunFolder) -> None:
    own = write("mine.json", json.dumps({"zero_optimization": {"stage": 1}, **AUTO}))
    whole = planned(write("a.yaml", f"deepspeed: {own}\n{BASE}"))
    repeat.write_stage_file(whole, folder)
    text = own.read_bytes()
    own.unlink()
    again = planned(folder.stage_file)
    assert again.stage.options.deepspeed == folder.deepspeed
    assert folder.deepspeed.read_bytes() == text


def test_no_token_gets_into_it(write: Write, folder: RunFolder) -> None:
    token = "hf_" + "a1B2" * 9
    path = write("a.yaml", BASE.replace("base/model", f"https://u:{token}@host/m"))
    repeat.write_stage_file(planned(path), folder)
    assert token not in folder.stage_file.read_text()


def test_what_differs_is_said() -> None:
    old = {
        "launch_commit": "a", "upstream": {"version": "x"}, "machine": {"gpus": ["H200"]},
        "plan": {"gpus": 8, "steps": 10}, "trainer": {"packages": {"torch": "2.1", "trl": "1.0"}},
        "caches": [{"inputs": [{"role": "data", "name": "d.jsonl", "digest": "1" * 64}]}],
    }  # fmt: skip
    assert list(repeat.differences(old, old)) == []
    new = {
        "launch_commit": "b", "upstream": {"version": "x"}, "machine": {"gpus": []},
        "plan": {"gpus": 8, "steps": 10}, "trainer": {"packages": {"torch": "2.2", "peft": "1"}},
        "caches": [{"inputs": [{"role": "data", "name": "d.jsonl", "digest": "2" * 64}]}],
    }  # fmt: skip
    said = [finding.message for finding in repeat.differences(old, new)]
    assert said == [
        "launch's commit: a then, b now",
        "GPUs: H200 then, none now",
        "packages: peft absent -> 1, torch 2.1 -> 2.2, trl 1.0 -> absent",
        "data d.jsonl: 111111111111 then, 222222222222 now",
    ]


def test_what_cannot_be_repeated(folder: RunFolder) -> None:
    rundir.write_json(folder.manifest, {"stage": "sft", "config": "a.yaml"})
    with pytest.raises(UsageError, match="older launch"):
        repeat.of_run(folder, "sft")
    with pytest.raises(UsageError, match="run of sft"):
        repeat.of_run(folder, "dpo")
    folder.manifest.write_text("{")
    with pytest.raises(UsageError, match="gone or damaged"):
        repeat.of_run(folder, "sft")
    told = CliRunner().invoke(app, ["sft", "--repeat", "no such run"])
    assert isinstance(told.exception, UsageError)
    told = CliRunner().invoke(app, ["sft"])
    assert isinstance(told.exception, UsageError)


def test_relative_paths_start_where_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    repeat.enter({"cwd": str(tmp_path / "there")})
    assert Path.cwd() == tmp_path / "there"
    repeat.enter({"cwd": "/no/such/folder"})
    assert Path.cwd() == tmp_path / "there"
    assert os.getcwd() == str(tmp_path / "there")
