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
    "qwen2_moe": [
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "shared_expert_intermediate_size": 128},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "shared_expert_intermediate_size": 128, "qkv_bias": False},
    ],
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


# as published, where they leave keys to their class: its own answer holds, not a general one
SPARSE: list[dict[str, Any]] = [
    {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
     "num_attention_heads": 32, "vocab_size": 32000},
    {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
     "num_attention_heads": 32, "vocab_size": 32000},
    {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "vocab_size": 131072},
    {"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
     "num_attention_heads": 16, "vocab_size": 128256},
    {"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155, "pad_token_id": 0},
    {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
     "num_attention_heads": 64, "vocab_size": 151936},
    {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
     "num_attention_heads": 32, "num_key_value_heads": None, "vocab_size": 151936},
    {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
     "num_attention_heads": 64, "vocab_size": 151936},
    {"model_type": "olmo3", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
     "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 100278},
    {"model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
     "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 32064},
    {"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
     "num_attention_heads": 16, "vocab_size": 256000},
    {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
     "num_attention_heads": 8, "vocab_size": 256000},
    {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
     "num_attention_heads": 4, "vocab_size": 262144},
    {"model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
     "num_attention_heads": 48, "num_experts": 8, "vocab_size": 32000},
    {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
     "num_attention_heads": 32, "num_experts": 128, "head_dim": 128, "vocab_size": 151936},
    {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
     "num_attention_heads": 16, "num_experts": 64, "vocab_size": 50304},
]  # fmt: skip


@pytest.mark.parametrize("given", SPARSE, ids=lambda c: c["model_type"])
def test_absent_keys_are_what_their_class_says(given: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(given))
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shapes.find(str(tmp_path), {})
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.heads, shape.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", None), ("head_dim", None), ("tie_word_embeddings", None),
        ("attention_bias", None), ("mlp_bias", None), ("tie_word_embeddings", "false"),
        ("num_attention_heads", 5), ("hidden_size", 100), ("num_experts", 5), ("num_local_experts", 5),
    ],
)  # fmt: skip
def test_odd_configs_are_counted_as_transformers_does_or_refused(
    family: str, key: str, value: object
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = {"model_type": family, **BASE, **CONFIGS[family][0], key: value}
    try:
        count = shapes.shape_of(given).parameters
    except InvalidConfig:
        return
    kind = given.pop("model_type")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **given)
        )
    assert count == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "given", "windows"),
    [
        ("mistral", {}, (4096, 3)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("phi3", {"sliding_window": 2047}, (2047, 3)),
        ("phi3", {}, (0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, (0, 0)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (64, 2)),
        ("gemma2", {}, (4096, 2)),
        ("gemma3_text", {"sliding_window": 512, "num_hidden_layers": 26}, (512, 22)),
        ("gemma3_text", {"layer_types": ["sliding_attention", *["full_attention"] * 2]}, (4096, 1)),
        ("olmo3", {"num_hidden_layers": 32}, (4096, 24)),
        ("llama", {"sliding_window": 64}, (0, 0)),
    ],
)  # fmt: skip
def test_windows(family: str, given: dict[str, Any], windows: tuple[int, int]) -> None:
    shape = shapes.shape_of({"model_type": family, **BASE, **CONFIGS[family][0], **given})
    assert (shape.window, shape.windowed) == windows


def test_quantised_weights_and_broken_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        shapes.shape_of(
            {"model_type": "llama", **BASE, "quantization_config": {"bits": 4}}, name="m"
        )
    assert "quantised" in caught.value.findings[0].message
    for text in ("{", "[]", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidConfig) as caught:
            shapes.find(str(tmp_path), {})
        assert "config.json is no config of a model" in caught.value.findings[0].message


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("google/gemma-2-2b", 2_614_341_888),
        ("google/gemma-2-9b-it", 9_241_705_984),
        ("google/gemma-2-27b", 27_227_128_320),
        ("google/gemma-3-270m", 268_098_176),
        ("google/gemma-3-1b-it", 999_885_952),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("HuggingFaceTB/SmolLM2-360M", 361_821_120),
        ("HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384),
        ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624),
        ("mistralai/Mistral-Nemo-Base-2407", 12_247_782_400),
        ("microsoft/Phi-4-mini-instruct", 3_836_021_760),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("qwen/qwen2.5-7b", 7_615_616_512),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Llama-2-70b-hf", 68_976_648_192),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030_261_248),
        ("Qwen/Qwen2-7B-Instruct", 7_615_616_512),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
        ("google/gemma-2b", 2_506_172_416),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14_315_784_192),
        ("allenai/OLMoE-1B-7B-0924", 6_919_161_856),
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
        ({"model_type": "llama", **BASE, "vocab_size": None}, "`vocab_size` is null"),
        ({"model_type": "llama", **BASE, "vocab_size": 10**200}, "`vocab_size` is 1000"),
        ({"model_type": "llama", **BASE, "num_key_value_heads": 4}, "is no multiple of"),
        ({"model_type": "qwen3", **BASE, "head_dim": None}, "`head_dim` is null"),
        (
            {"model_type": "qwen2", **BASE, "tie_word_embeddings": "yes"},
            "`tie_word_embeddings` is 'yes'",
        ),
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
