"""LoRA under TRL: which modules an adapter is put on, and what PEFT refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from test_trl_machine_rules import found as found_of_stage
from test_trl_machine_rules import told as told_of_stage
from test_trl_rules import found

from launcher.backends import trl_adapter_rules

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip
LORA = {"use_peft": True, "model_name_or_path": "model"}
TARGETS = "lora_target_modules"


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)
    write("model/config.json", json.dumps(QWEN2))


def told(args: dict[str, Any], **known: Any) -> list[tuple[str, str, str]]:
    return told_of_stage("trl-dpo", {**LORA, **args}, **known)


@pytest.mark.parametrize(
    "words",
    [
        ["foo", "bar"],
        [".*foo.*"],
        ["layers.9.self_attn.q_proj", "layers.9.self_attn.v_proj"],
        ["base_model.model.model.layers.0.self_attn.q_proj", "x"],
        ["Q_proj", "V_proj"],
        ["q_proj.weight", "v_proj.weight"],
        ["q_proj|v_proj"],
        ["all-linear", "foo"],
        # modules that are there, and that no adapter can be put on
        ["input_layernorm", "q_proj"],
        ["act_fn", "q_proj"],
        ["mlp", "q_proj"],
        ["0", "1"],
        [".*norm"],
        ["rotary_emb", "q_proj"],
    ],
)  # fmt: skip
def test_modules_that_the_model_does_not_have_are_refused(words: list[str]) -> None:
    """Each was handed to PEFT 0.21 with the demo's model."""
    assert told({TARGETS: words}) == [("lora-targets", "error", TARGETS)]


@pytest.mark.parametrize(
    "words",
    [
        ["q_proj", "v_proj"],
        ["embed_tokens", "q_proj"],
        ["layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"],
        ["model.layers.*.q_proj"],
        [".*(q_proj|v_proj)"],
        ["all-linear"],
        ["All-Linear"],
    ],
)  # fmt: skip
def test_modules_that_the_model_has_are_left_alone(words: list[str]) -> None:
    assert told({TARGETS: words}) == []
    assert told({}) == []


def test_a_name_beside_others_that_no_module_has_is_told() -> None:
    assert told({TARGETS: ["foo", "q_proj"]}) == [("lora-targets", "warning", TARGETS)]


def test_of_a_model_that_is_not_known_nothing_is_said(write: Write) -> None:
    words = {TARGETS: ["foo", "bar"]}
    assert told({**words, "model_name_or_path": "org/elsewhere"}) == []
    classified = {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"]}
    write("other/config.json", json.dumps(classified))
    codes = {code for code, _, _ in told({**words, "model_name_or_path": "other"})}
    assert codes == set()


@pytest.mark.parametrize("pattern", ["*q_proj", "(q_proj"])
def test_a_single_word_that_is_no_pattern_is_refused(pattern: str) -> None:
    (finding,) = found("dpo", use_peft=True, **{TARGETS: [pattern]})
    assert (finding.code, finding.severity) == ("lora-targets", "error")
    assert found("dpo", use_peft=True, **{TARGETS: [pattern, "v_proj"]}) == []


def test_peft_has_modules_of_its_own_for_some_models_only(write: Write) -> None:
    write("olmo/config.json", json.dumps({**QWEN2, "model_type": "olmo2"}))
    args = {"model_name_or_path": "olmo"}
    (finding,) = found_of_stage("trl-sft", {**LORA, **args}, packages={"peft": "0.21.2"})
    assert (finding.code, finding.severity) == ("lora-targets", "error")
    assert finding.help == "add `lora_target_modules: all-linear`"
    assert told({**args, TARGETS: ["all-linear"]}) == []
    # a later one may know more of them
    assert told(args, packages={"peft": "0.22.0"}) == [("lora-targets", "warning", TARGETS)]


def test_its_models_are_those_of_the_installed_release() -> None:
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:
        pytest.skip("PEFT is not installed")
    text = Path(spec.origin).parent.joinpath("utils", "constants.py").read_text("utf-8")
    table = text.split("TO_LORA_TARGET_MODULES_MAPPING = {", 1)[1].split("\n}", 1)[0]
    names = [line.strip().split('"')[1] for line in table.splitlines() if line.strip()]
    assert {*names} == trl_adapter_rules.DEFAULTS
