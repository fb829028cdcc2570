"""LoRA under TRL: how modules are named."""

from __future__ import annotations

import pytest
from test_trl_rules import found

TARGETS = "lora_target_modules"
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("pattern", ["*q_proj", "(q_proj"])
def test_a_single_word_that_is_no_pattern_is_refused(pattern: str) -> None:
    (finding,) = found("dpo", use_peft=True, **{TARGETS: [pattern]})
    assert (finding.code, finding.severity) == ("lora-targets", "error")
    assert found("dpo", use_peft=True, **{TARGETS: [pattern, "v_proj"]}) == []


@pytest.mark.parametrize(
    "words", [["q_proj", "v_proj"], [".*(q_proj|v_proj)"], ["all-linear"], ["foo", "bar"]]
)
def test_which_modules_there_are_is_left_to_peft(words: list[str]) -> None:
    assert found("dpo", use_peft=True, **{TARGETS: words}) == []
