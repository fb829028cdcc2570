"""A config.json -> the sizes of a model's weights, held against transformers' own modules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.artifacts import architecture
from launcher.errors import InvalidConfig

Build = Callable[[dict[str, object]], Any]
BASE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "pad_token_id": 0,
}
ABSENT = object()
CONFIGS: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 32}),
    ("mistral", {}),
    ("mistral", {"num_key_value_heads": ABSENT}),
    ("mistral", {"head_dim": None}),
    ("mistral", {"head_dim": 32}),
    ("granite", {}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": ABSENT}),
    ("qwen2", {"num_key_value_heads": None}),
    ("qwen3", {}),
    ("qwen3", {"num_key_value_heads": ABSENT}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {}),
]


@pytest.fixture(autouse=True)
def torch_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Importing torch's compiler sets this variable; it must not outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def build() -> Build:
    """transformers' model of a config, without data."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def build_model(config: dict[str, object]) -> Any:
        with torch.device("meta"):
            built = transformers.AutoConfig.for_model(**config)
            return transformers.AutoModelForCausalLM.from_config(built)

    return build_model


def test_every_family_is_tried() -> None:
    assert {family for family, _ in CONFIGS} == set(architecture.FAMILIES)


@pytest.mark.parametrize("family, changes", CONFIGS)
def test_weights_are_those_of_transformers(
    family: str, changes: dict[str, object], build: Build
) -> None:
    config = {"model_type": family, **BASE, **changes}
    config = {key: value for key, value in config.items() if value is not ABSENT}
    model = build(config)
    layer = {}
    outer = {}
    for name, weight in model.named_parameters():
        if name.startswith("model.layers.0."):
            layer[name.removeprefix("model.layers.0.")] = tuple(weight.shape)
        elif ".layers." not in name:
            outer[name] = tuple(weight.shape)
    complete = json.loads(model.config.to_json_string(use_diff=False))
    shape = architecture.parse_shape(complete, name=family)
    assert dict(shape.layer) == layer
    assert dict(shape.outer) == outer
    assert shape.parameters == model.num_parameters()
    # what a config.json leaves out is what transformers' class says
    assert architecture.parse_shape(config).parameters == shape.parameters


@pytest.mark.parametrize("family", architecture.FAMILIES)
@pytest.mark.parametrize(
    "key, value",
    [
        ("num_key_value_heads", None),
        ("head_dim", None),
        ("tie_word_embeddings", None),
        ("attention_bias", None),
        ("mlp_bias", None),
        ("tie_word_embeddings", "false"),
        ("num_attention_heads", 5),
        ("hidden_size", 100),
    ],
)
def test_odd_configs_are_counted_as_transformers_does_or_refused(
    family: str, key: str, value: object, build: Build
) -> None:
    config = {"model_type": family, **BASE, key: value}
    try:
        count = architecture.parse_shape(config).parameters
    except InvalidConfig:
        return
    assert count == build(config).num_parameters()


ASKED_WINDOW = {"sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize(
    "family, changes, window",
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, 0),
        ("qwen2", ASKED_WINDOW, 0),
        ("qwen2", {**ASKED_WINDOW, "use_sliding_window": True}, 64),
        ("olmo3", {"num_hidden_layers": 32}, 4096),
        ("llama", {"sliding_window": 64}, 0),
    ],
)
def test_windows(family: str, changes: dict[str, object], window: int) -> None:
    assert architecture.parse_shape({"model_type": family, **BASE, **changes}).window == window


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        architecture.find(str(tmp_path), {})
    assert "config.json is not a model config" in caught.value.findings[0].message


@pytest.mark.parametrize(
    "name, count",
    [
        ("HuggingFaceTB/SmolLM2-360M", 361_821_120),
        ("qwen/qwen2.5-7b", 7_615_616_512),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-2-70b-hf", 68_976_648_192),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("Qwen/Qwen3-8B", 8_190_735_360),
    ],
)
def test_a_model_of_the_table_has_its_published_count(name: str, count: int) -> None:
    shape = architecture.find(name, {})
    assert shape.parameters == count
    assert "shapes.json" in shape.source


def test_every_model_of_the_table_can_be_counted() -> None:
    for name in architecture.load_known_shapes():
        assert architecture.find(name, {}).parameters > 1e8


def test_small_weights_are_norms_and_biases() -> None:
    shape = architecture.find("Qwen/Qwen2.5-7B", {})
    assert shape.smaller_than(10 * 3584) == 28 * (2 * 3584 + 3584 + 512 + 512) + 3584


@pytest.mark.parametrize("name", ["nobody/nothing", None, "", 5])
def test_an_unknown_model_is_refused(name: object) -> None:
    with pytest.raises(InvalidConfig):
        architecture.find(name, {"HOME": "/nonexistent"})


def test_a_folder_wins_over_the_table_and_arguments_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen2.5-7B"
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **BASE}))
    shape = architecture.find(name, {})
    assert shape.hidden == 256
    assert "shapes.json" not in shape.source
    assert architecture.find(name, {}, replaced={"num_hidden_layers": 5}).layers == 5


LLAMA = {"model_type": "llama", **BASE}


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "no `model_type`"),
        ({"model_type": "rwkv"}, "`model_type: rwkv`"),
        ({"model_type": "llama"}, "`num_attention_heads` is missing"),
        ({**LLAMA, "hidden_size": "96"}, "`hidden_size` is '96'"),
        ({**LLAMA, "vocab_size": None}, "`vocab_size` is null"),
        ({**LLAMA, "vocab_size": 10**200}, "`vocab_size` is 1000"),
        ({**LLAMA, "num_key_value_heads": 5}, "is not a multiple of"),
        ({**LLAMA, "model_type": "qwen3", "head_dim": None}, "`head_dim` is null"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "`tie_word_embeddings` is 'yes'"),
        ({**LLAMA, "vision_config": {}}, "more than a language model"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_config_without_a_shape_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        architecture.parse_shape(config, name="some/model")
    (finding,) = caught.value.findings
    assert finding.code == "unknown-shape"
    assert message in finding.message
