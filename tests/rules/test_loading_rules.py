"""What a model is loaded with beside its name, under both backends."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import Write
from test_rules import HERE
from test_trl_machine_rules import found

from launcher.rules.context import Machine

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)
    write("model/config.json", json.dumps(QWEN2))


INDEX = "model.safetensors.index.json"
SHARD = "model-0000{}-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def lacking(script: str = "trl-sft", *, machine: Machine | None = HERE, **known: Any) -> list[str]:
    """What is said of the folder `model`, which is the same for every script."""
    args = {"model_name_or_path": "model", **known.pop("args", {})}
    findings = found(script, args, machine=machine, **known)
    assert all(finding.layer == "run" for finding in findings)
    assert {finding.severity for finding in findings} <= {"warning" if machine is None else "error"}
    return [f"{finding.code}: {finding.message}" for finding in findings]


def sharded() -> None:
    """Two parts and their index."""
    names = {"a": SHARD.format(1), "b": SHARD.format(2)}
    for name in names.values():
        saved.tensors(Path("model", name))
    Path("model", INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft", "trl-dpo"])
def test_a_model_that_cannot_be_loaded_does_not_reach_a_gpu(write: Write, script: str) -> None:
    write("model/config.json", '{"model_type": "made"}')
    # a folder to plan with
    assert lacking(script, machine=None) == []
    said = lacking(script)
    assert [one.partition(":")[0] for one in said] == ["incomplete-model", "incomplete-tokenizer"]
    assert "holds no weights" in said[0] and "knows no word" in said[1]
    saved.loadable(Path("model"))
    assert lacking(script) == []
    faults = (
        ("model.safetensors", POINTER, "git-lfs"), ("tokenizer.json", POINTER, "git-lfs"),
        ("tokenizer.json", '{"a": [', "cut off"), ("tokenizer_config.json", '{"a": [', "cannot be read"),
        ("config.json", "{}", "model_type"), ("config.json", "", "cannot be read"),
    )  # fmt: skip
    for machine, (name, content, words) in itertools.product((HERE, None), faults):
        (one,) = with_file(script, name, content, machine=machine)
        part = "tokenizer" if name.startswith("tokenizer") else "model"
        assert one.startswith(f"incomplete-{part}") and words in one
    assert lacking(script) == []


def with_file(script: str, name: str, text: str, *, machine: Machine | None) -> list[str]:
    """What is said while a file holds another text."""
    path = Path("model", name)
    before = path.read_bytes() if path.exists() else None
    path.write_text(text)
    said = lacking(script, machine=machine)
    if before is None:
        path.unlink()
    else:
        path.write_bytes(before)
    return said


def test_weights_are_looked_for_as_transformers_does(write: Write) -> None:
    write("model/config.json", '{"model_type": "made"}')
    saved.loadable(Path("model"))
    whole = Path("model", "model.safetensors")
    saved.cut(whole)
    (one,) = lacking()
    assert "cut off" in one
    whole.unlink()
    sharded()
    assert lacking() == []
    saved.cut(Path("model", SHARD.format(2)))
    assert "cut off" in lacking()[0]
    Path("model", SHARD.format(2)).unlink()
    assert "is missing" in lacking()[0]
    # whole weights win over an index
    saved.tensors(whole)
    assert lacking() == []
    whole.unlink()
    Path("model", INDEX).write_text("{")
    assert "cannot be read" in lacking()[0]
    Path("model", INDEX).unlink()
    (one,) = lacking()
    assert "under a name that is looked for" in one and SHARD.format(1) in one
    saved.archive(Path("model", "pytorch_model.bin"))
    assert lacking() == []
    Path("model", "pytorch_model.bin").unlink()
    saved.tensors(Path("model", "model.fp16.safetensors"))
    assert "holds no weights" in lacking()[0]
    assert lacking(args={"model_init_kwargs": '{"variant": "fp16"}'}) == []


def test_an_adapter_is_no_model(write: Write) -> None:
    Path("model", "config.json").unlink()
    write("model/adapter_config.json", "{}")
    saved.tensors(Path("model", "adapter_model.safetensors"))
    write("model/tokenizer.json", "{}")
    (one,) = lacking()
    assert "an adapter alone" in one
    write("model/config.json", '{"model_type": "made"}')
    saved.loadable(Path("model"))
    (one,) = lacking()
    assert "adapter beside" in one
    # without the package it is not looked at
    assert lacking(packages={"torch": "2.13.0"}) == []


def test_of_the_hub_what_is_missing_is_fetched(write: Write) -> None:
    home = Path.cwd() / "home"
    kept = home / ".cache/huggingface/hub/models--org--name"
    write(str(kept / "refs/main"), "abc")
    write(str(kept / "snapshots/abc/config.json"), '{"model_type": "made"}')
    args = {"model_name_or_path": "org/name"}
    assert found("sft", args, machine=HERE, environ={"HOME": str(home)}) == []
    offline = {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    told = [one.code for one in found("sft", args, machine=HERE, environ=offline)]
    assert told == ["incomplete-model", "incomplete-tokenizer"]


def test_weights_are_those_of_the_config(write: Write) -> None:
    saved.loadable(Path("model"))
    assert lacking() == []
    (one,) = with_file("sft", "config.json", json.dumps({**QWEN2, "vocab_size": 7}), machine=HERE)
    assert "model.embed_tokens.weight" in one
    # layers that no file has begin at random
    more = {**QWEN2, "num_hidden_layers": QWEN2["num_hidden_layers"] + 1}
    Path("model", "config.json").write_text(json.dumps(more))
    (warned,) = found("dpo", {"model_name_or_path": "model"}, machine=HERE)
    assert warned.severity == "warning" and "begin at random" in warned.message
    # and nothing at all is another model
    Path("model", "config.json").write_text(json.dumps(QWEN2))
    saved.tensors(Path("model", "model.safetensors"))
    (none,) = found("dpo", {"model_name_or_path": "model"}, machine=HERE)
    assert none.severity == "error" and "begin at random" in none.message


def test_data_that_git_lfs_has_not_fetched(write: Write) -> None:
    for name, script in (("train.parquet", "trl-sft"), ("train.jsonl", "trl-dpo")):
        write(f"{name}d/{name}", POINTER)
        findings = found(script, {"dataset_name": f"{name}d"})
        (one,) = [f for f in findings if f.code == "bad-data"]
        assert "git-lfs" in one.message
