"""A config.json -> the sizes of a model's weights, held against transformers' own modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher import shapes
from launcher.errors import InvalidConfig

BASE: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 320, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 32},
    ],
    "mistral": [{}, {"head_dim": 32}],
    "smollm3": [{}, {"tie_word_embeddings": False, "no_rope_layers": [1, 1, 0]}],
    "granite": [{}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "qwen3": [{}, {"head_dim": 32, "attention_bias": True}],
    "olmo": [{}, {"tie_word_embeddings": True}],
    "olmo2": [{}, {"attention_bias": True}],
    "olmo3": [{}],
    "phi3": [{}],
    "gemma": [{"head_dim": 32}, {"head_dim": 16, "attention_bias": True}],
    "gemma2": [{"head_dim": 32}],
    "gemma3_text": [{"head_dim": 32}],
    "mixtral": [{"num_local_experts": 4, "num_experts_per_tok": 2}],
    "qwen3_moe": [{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}],
    "olmoe": [{"num_experts": 4, "num_experts_per_tok": 2}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def torch_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Importing torch's compiler sets this variable; it must not outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def configs() -> list[Any]:
    return [
        pytest.param(f, c, id=f"{f}-{i}") for f, cs in CONFIGS.items() for i, c in enumerate(cs)
    ]


def test_every_described_family_is_tried() -> None:
    assert set(CONFIGS) == set(shapes.FAMILIES)


@pytest.mark.parametrize(("family", "given"), configs())
def test_weights_are_those_of_transformers(family: str, given: Mapping[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **BASE, **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = {n: tuple(p.shape) for n, p in model.named_parameters()}
    shape = shapes.shape_of(json.loads(config.to_json_string(use_diff=False)), name=family)
    first = {n.removeprefix("model.layers.0."): s for n, s in real.items() if ".layers.0." in n}
    named = {n.replace(".block_sparse_moe.", ".mlp."): s for n, s in first.items()}
    assert sorted(shape.layer.values()) == sorted(named.values())
    assert {n: s for n, s in real.items() if ".layers." not in n} == dict(shape.outer)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_defaults_are_those_of_transformers(family: str) -> None:
    """What a config.json leaves out is what transformers' class says."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = {**BASE, **CONFIGS[family][0]}
    if family == "phi3":
        given["head_dim"] = 16
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(family, **given)
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shapes.shape_of({"model_type": family, **given})
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("qwen/qwen2.5-7b", 7_615_616_512),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
        ("google/gemma-2b", 2_506_172_416),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    ],
)
def test_table_has_the_published_counts(name: str, parameters: int) -> None:
    shape = shapes.find(name, {})
    assert shape.parameters == parameters
    assert "shapes.json" in shape.source


def test_every_model_of_the_table_has_a_shape() -> None:
    assert all(shapes.find(name, {}).parameters > 1e8 for name in shapes.table())


def test_a_folder_wins_over_the_table_and_arguments_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen2.5-7B"
    folder.mkdir(parents=True)
    config = {"model_type": "qwen2", **BASE}
    (folder / "config.json").write_text(json.dumps(config))
    shape = shapes.find("Qwen/Qwen2.5-7B", {})
    assert shape.hidden == 96 and "shapes.json" not in shape.source
    assert shapes.find("Qwen/Qwen2.5-7B", {}, replaced={"num_hidden_layers": 5}).layers == 5


def test_active_parameters_leave_the_idle_experts_out() -> None:
    mixtral = shapes.find("mistralai/Mixtral-8x7B-v0.1", {})
    assert 12.8e9 < mixtral.active_parameters < 13.0e9
    dense = shapes.find("Qwen/Qwen2.5-7B", {})
    assert dense.active_parameters == dense.parameters


def test_small_weights_are_norms_and_biases() -> None:
    shape = shapes.find("Qwen/Qwen2.5-7B", {})
    assert shape.smaller_than(10 * 3584) == 28 * (2 * 3584 + 3584 + 512 + 512) + 3584


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no `model_type`"),
        ({"model_type": "rwkv"}, "`model_type: rwkv`"),
        ({"model_type": "llama"}, "`num_attention_heads` is missing"),
        ({"model_type": "llama", **BASE, "num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"model_type": "llama", **BASE, "hidden_size": "96"}, "`hidden_size` is '96'"),
        ({"model_type": "llama", **BASE, "vocab_size": True}, "`vocab_size` is True"),
        ({"model_type": "qwen2", **BASE, "vision_config": {}}, "more than a language model"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        shapes.shape_of(config, name="some/model")
    assert [f.code for f in caught.value.findings] == ["unknown-shape"]
    assert said in caught.value.findings[0].message


@pytest.mark.parametrize("name", ["nobody/nothing", None, "", 5])
def test_unknown_model_is_refused(name: object) -> None:
    with pytest.raises(InvalidConfig):
        shapes.find(name, {"HOME": "/nonexistent"})
