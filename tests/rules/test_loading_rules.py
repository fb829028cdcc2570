"""What a model is loaded with beside its name, under both backends."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import Write
from rule_findings import QWEN2, THIS_MACHINE, judge_run

from launcher.rules.context import Machine


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)
    write("model/config.json", json.dumps(QWEN2))


INCOMPLETE = ["incomplete-model", "incomplete-tokenizer"]
INDEX = "model.safetensors.index.json"
SHARD = "model-0000{}-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def describe_faults(
    script: str = "trl-sft", *, machine: Machine | None = THIS_MACHINE, **known: Any
) -> list[str]:
    """What is said of the folder `model`, which is the same for every script."""
    args = {"model_name_or_path": "model", **known.pop("args", {})}
    findings = judge_run(script, args, machine=machine, **known)
    assert all(finding.layer == "run" for finding in findings)
    assert {finding.severity for finding in findings} <= {"warning" if machine is None else "error"}
    return [f"{finding.code}: {finding.message}" for finding in findings]


def save_sharded() -> None:
    """Two parts and their index."""
    names = {"a": SHARD.format(1), "b": SHARD.format(2)}
    for name in names.values():
        saved.tensors(Path("model", name))
    Path("model", INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft", "trl-dpo"])
def test_a_model_that_cannot_be_loaded_does_not_reach_a_gpu(write: Write, script: str) -> None:
    write("model/config.json", '{"model_type": "unknown"}')
    # a folder to plan with
    assert describe_faults(script, machine=None) == []
    said = describe_faults(script)
    assert [line.partition(":")[0] for line in said] == INCOMPLETE
    assert "holds no weights" in said[0] and "knows no word" in said[1]
    saved.loadable(Path("model"))
    assert describe_faults(script) == []
    faults = (
        ("model.safetensors", POINTER, "git-lfs"),
        ("tokenizer.json", POINTER, "git-lfs"),
        ("tokenizer.json", '{"a": [', "cut off"),
        ("tokenizer_config.json", '{"a": [', "cannot be read"),
        ("config.json", "{}", "model_type"),
        ("config.json", "", "cannot be read"),
    )
    for machine, (name, content, words) in itertools.product((THIS_MACHINE, None), faults):
        (line,) = with_file(script, name, content, machine=machine)
        part = "tokenizer" if name.startswith("tokenizer") else "model"
        assert line.startswith(f"incomplete-{part}") and words in line
    assert describe_faults(script) == []


def with_file(script: str, name: str, text: str, *, machine: Machine | None) -> list[str]:
    """What is said while a file holds another text."""
    path = Path("model", name)
    before = path.read_bytes() if path.exists() else None
    path.write_text(text)
    said = describe_faults(script, machine=machine)
    if before is None:
        path.unlink()
    else:
        path.write_bytes(before)
    return said


def test_weights_are_looked_for_as_transformers_does(write: Write) -> None:
    write("model/config.json", '{"model_type": "unknown"}')
    saved.loadable(Path("model"))
    whole = Path("model", "model.safetensors")
    saved.cut(whole)
    (line,) = describe_faults()
    assert "cut off" in line
    whole.unlink()
    save_sharded()
    assert describe_faults() == []
    saved.cut(Path("model", SHARD.format(2)))
    assert "cut off" in describe_faults()[0]
    Path("model", SHARD.format(2)).unlink()
    assert "is missing" in describe_faults()[0]
    # whole weights win over an index
    saved.tensors(whole)
    assert describe_faults() == []
    whole.unlink()
    Path("model", INDEX).write_text("{")
    assert "cannot be read" in describe_faults()[0]
    Path("model", INDEX).unlink()
    (line,) = describe_faults()
    assert "under a name that is looked for" in line and SHARD.format(1) in line
    saved.archive(Path("model", "pytorch_model.bin"))
    assert describe_faults() == []
    Path("model", "pytorch_model.bin").unlink()
    saved.tensors(Path("model", "model.fp16.safetensors"))
    assert "holds no weights" in describe_faults()[0]
    assert describe_faults(args={"model_init_kwargs": '{"variant": "fp16"}'}) == []


def test_an_adapter_is_no_model(write: Write) -> None:
    Path("model", "config.json").unlink()
    write("model/adapter_config.json", "{}")
    saved.tensors(Path("model", "adapter_model.safetensors"))
    write("model/tokenizer.json", "{}")
    (line,) = describe_faults()
    assert "an adapter alone" in line
    write("model/config.json", '{"model_type": "unknown"}')
    saved.loadable(Path("model"))
    (line,) = describe_faults()
    assert "adapter beside" in line
    # without the package it is not looked at
    assert describe_faults(packages={"torch": "2.13.0"}) == []


def test_of_the_hub_what_is_missing_is_fetched(write: Write) -> None:
    home = Path.cwd() / "home"
    kept = home / ".cache/huggingface/hub/models--org--name"
    write(str(kept / "refs/main"), "abc")
    write(str(kept / "snapshots/abc/config.json"), '{"model_type": "unknown"}')
    args = {"model_name_or_path": "org/name"}
    assert judge_run("sft", args, machine=THIS_MACHINE, environ={"HOME": str(home)}) == []
    offline = {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    findings = judge_run("sft", args, machine=THIS_MACHINE, environ=offline)
    assert [finding.code for finding in findings] == INCOMPLETE


def test_weights_are_those_of_the_config(write: Write) -> None:
    saved.loadable(Path("model"))
    assert describe_faults() == []
    (line,) = with_file(
        "sft", "config.json", json.dumps({**QWEN2, "vocab_size": 7}), machine=THIS_MACHINE
    )
    assert "model.embed_tokens.weight" in line
    # layers that no file has begin at random
    more = {**QWEN2, "num_hidden_layers": QWEN2["num_hidden_layers"] + 1}
    Path("model", "config.json").write_text(json.dumps(more))
    (warned,) = judge_run("dpo", {"model_name_or_path": "model"}, machine=THIS_MACHINE)
    assert warned.severity == "warning" and "begin at random" in warned.message
    # and nothing at all is another model
    Path("model", "config.json").write_text(json.dumps(QWEN2))
    saved.tensors(Path("model", "model.safetensors"))
    (refused,) = judge_run("dpo", {"model_name_or_path": "model"}, machine=THIS_MACHINE)
    assert refused.severity == "error" and "begin at random" in refused.message


def test_data_that_git_lfs_has_not_fetched(write: Write) -> None:
    for name, script in (("train.parquet", "trl-sft"), ("train.jsonl", "trl-dpo")):
        write(f"{name}d/{name}", POINTER)
        findings = judge_run(script, {"dataset_name": f"{name}d"})
        (bad,) = [finding for finding in findings if finding.code == "bad-data"]
        assert "git-lfs" in bad.message
