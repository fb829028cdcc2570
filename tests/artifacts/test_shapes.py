"""A config.json -> the sizes of a model's weights, held against transformers' own modules."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.artifacts import architecture
from launcher.errors import InvalidConfig

BASE: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 320, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 32},
    ],
    "mistral": [{}, {"head_dim": 32}],
    "granite": [{}],
    "qwen2": [{}],
    "qwen3": [{}, {"head_dim": 32, "attention_bias": True}],
    "olmo2": [{}, {"attention_bias": True}],
    "olmo3": [{}],
}


@pytest.fixture(autouse=True)
def torch_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Importing torch's compiler sets this variable; it must not outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_weights_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert set(CONFIGS) == set(architecture.FAMILIES)
    for family, given in [(family, one) for family, some in CONFIGS.items() for one in some]:
        config = transformers.AutoConfig.for_model(family, **BASE, **given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        real = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        shape = architecture.shape_of(
            json.loads(config.to_json_string(use_diff=False)), name=family
        )
        prefix = "model.layers.0."
        assert dict(shape.layer) == {
            name.removeprefix(prefix): size for name, size in real.items() if prefix in name
        }
        assert dict(shape.outer) == {n: s for n, s in real.items() if ".layers." not in n}
        assert shape.parameters == sum(weight.numel() for weight in model.parameters())
        # what a config.json leaves out is what transformers' class says
        assert (
            architecture.shape_of({"model_type": family, **BASE, **given}).parameters
            == shape.parameters
        )


# as published, where they leave keys to their class: its own answer holds, not a general one
SPARSE: list[dict[str, Any]] = [
    {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
     "num_attention_heads": 32, "vocab_size": 32000},
    {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "vocab_size": 131072},
    {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
     "num_attention_heads": 64, "vocab_size": 151936},
    {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
     "num_attention_heads": 32, "num_key_value_heads": None, "vocab_size": 151936},
    {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
     "num_attention_heads": 64, "vocab_size": 151936},
    {"model_type": "olmo3", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
     "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 100278},
]  # fmt: skip


def test_absent_keys_are_what_their_class_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for given in SPARSE:
        (tmp_path / "config.json").write_text(json.dumps(given))
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(tmp_path)
            model = transformers.AutoModelForCausalLM.from_config(config)
        shape = architecture.find(str(tmp_path), {})
        assert shape.parameters == sum(p.numel() for p in model.parameters()), given
        assert (shape.heads, shape.kv_heads) == (
            config.num_attention_heads,
            config.num_key_value_heads,
        )


def test_odd_configs_are_counted_as_transformers_does_or_refused() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    odd = (
        ("num_key_value_heads", None), ("head_dim", None), ("tie_word_embeddings", None),
        ("attention_bias", None), ("mlp_bias", None), ("tie_word_embeddings", "false"),
        ("num_attention_heads", 5), ("hidden_size", 100),
    )  # fmt: skip
    for family, (key, value) in itertools.product(CONFIGS, odd):
        given = {**BASE, **CONFIGS[family][0], key: value}
        try:
            count = architecture.shape_of({"model_type": family, **given}).parameters
        except InvalidConfig:
            continue
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(family, **given)
            )
        assert count == sum(weight.numel() for weight in model.parameters()), (family, key, value)


def test_windows() -> None:
    asked = {"sliding_window": 64, "max_window_layers": 1}
    for family, given, windows in (
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, 0),
        ("qwen2", asked, 0),
        ("qwen2", {**asked, "use_sliding_window": True}, 64),
        ("olmo3", {"num_hidden_layers": 32}, 4096),
        ("llama", {"sliding_window": 64}, 0),
    ):
        shape = architecture.shape_of({"model_type": family, **BASE, **given})
        assert shape.window == windows, (family, given)


def test_quantised_weights_and_broken_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        architecture.shape_of(
            {"model_type": "llama", **BASE, "quantization_config": {"bits": 4}}, name="m"
        )
    assert "quantised" in caught.value.findings[0].message
    for text in ("{", "[]", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidConfig) as caught:
            architecture.find(str(tmp_path), {})
        assert "config.json is not a model config" in caught.value.findings[0].message


def test_every_model_of_the_table_has_its_published_count() -> None:
    published = {
        "HuggingFaceTB/SmolLM2-360M": 361_821_120, "qwen/qwen2.5-7b": 7_615_616_512,
        "meta-llama/Llama-3.1-8B": 8_030_261_248, "meta-llama/Llama-3.2-1B": 1_235_814_400,
        "meta-llama/Llama-2-70b-hf": 68_976_648_192, "mistralai/Mistral-7B-v0.1": 7_241_732_096,
        "allenai/OLMo-2-1124-7B": 7_298_617_344, "Qwen/Qwen3-8B": 8_190_735_360,
    }  # fmt: skip
    assert {name: architecture.find(name, {}).parameters for name in published} == published
    assert "shapes.json" in architecture.find("Qwen/Qwen3-8B", {}).source
    assert all(architecture.find(name, {}).parameters > 1e8 for name in architecture.table())
    # small weights are norms and biases
    shape = architecture.find("Qwen/Qwen2.5-7B", {})
    assert shape.smaller_than(10 * 3584) == 28 * (2 * 3584 + 3584 + 512 + 512) + 3584
    # unknown model is refused
    for name in ("nobody/nothing", None, "", 5):
        with pytest.raises(InvalidConfig):
            architecture.find(name, {"HOME": "/nonexistent"})


def test_a_folder_wins_over_the_table_and_arguments_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen2.5-7B"
    folder.mkdir(parents=True)
    config = {"model_type": "qwen2", **BASE}
    (folder / "config.json").write_text(json.dumps(config))
    shape = architecture.find("Qwen/Qwen2.5-7B", {})
    assert shape.hidden == 96 and "shapes.json" not in shape.source
    assert architecture.find("Qwen/Qwen2.5-7B", {}, replaced={"num_hidden_layers": 5}).layers == 5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no `model_type`"),
        ({"model_type": "rwkv"}, "`model_type: rwkv`"),
        ({"model_type": "llama"}, "`num_attention_heads` is missing"),
        ({"model_type": "llama", **BASE, "hidden_size": "96"}, "`hidden_size` is '96'"),
        ({"model_type": "llama", **BASE, "vocab_size": None}, "`vocab_size` is null"),
        ({"model_type": "llama", **BASE, "vocab_size": 10**200}, "`vocab_size` is 1000"),
        ({"model_type": "llama", **BASE, "num_key_value_heads": 4}, "is not a multiple of"),
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
        architecture.shape_of(config, name="some/model")
    assert [f.code for f in caught.value.findings] == ["unknown-shape"]
    assert said in caught.value.findings[0].message
