"""What of a stage file memory depends on: quantised weights and bitsandbytes' optimizer."""

import json
from pathlib import Path

import pytest
from conftest import Write
from typer.testing import CliRunner

from launcher.cli.commands import app
from launcher.errors import LaunchError

GIB = 2**30
ROWS = ("--row-tokens", "4096:4096")
ADAPTER_WEIGHTS = 13_631_488
LINEAR_WEIGHTS = "linear weights (4 bits and their scales)"
TRL = """
stage: sft
backend: trl
deepspeed: none
batch: {{global: 16, per_device: 4}}
args:
  model_name_or_path: mistralai/Mistral-7B-v0.1
  dataset_name: data
  max_length: 4096
  packing: true
  dtype: bfloat16
  {more}
"""
LORA = "use_peft: true\n  lora_r: 16\n  lora_target_modules: [q_proj, k_proj, v_proj, o_proj]"
FOUR_BITS = f"{LORA}\n  load_in_4bit: true\n  use_bnb_nested_quant: true"
OPEN_INSTRUCT = """
stage: {stage}
deepspeed: none
batch: {{global: 16, per_device: 2}}
args:
  model_name_or_path: meta-llama/Llama-3.1-8B
  {mixer}: [data.jsonl, 1.0]
  max_seq_length: 2048
  use_lora: true
  lora_rank: 64
  {more}
"""


def planned_parts(path: Path, *overrides: str, gpus: int = 1) -> dict[str, float]:
    """GiB of each allocation of the fullest moment, and `peak`."""
    words = ["plan", str(path), "--gpus", str(gpus), *overrides, *ROWS, "--why", "--format", "json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    (plan,) = json.loads(result.stdout)["data"]["gpus"]
    parts = {"peak": plan["memory_gib"]["peak"]}
    for part in plan["why"][0]["parts"]:
        parts[part["name"]] = part["gib"]
    return parts


def trl(write: Write, more: str, *overrides: str) -> dict[str, float]:
    return planned_parts(write("stage.yaml", TRL.format(more=more)), *overrides)


def open_instruct_sft(write: Write, more: str) -> dict[str, float]:
    text = OPEN_INSTRUCT.format(stage="sft", mixer="dataset_mixer_list", more=more)
    return planned_parts(write("stage.yaml", text))


def open_instruct_dpo(write: Write, more: str) -> dict[str, float]:
    text = OPEN_INSTRUCT.format(stage="dpo", mixer="mixer_list", more=more)
    # its reference pass needs a process group
    return planned_parts(write("stage.yaml", text), gpus=2)


def test_trl_with_4_bits_is_what_was_measured(write: Write) -> None:
    """fms-acceleration's runs of these settings: 12.1 GiB with a loss that makes no logits."""
    measured = ("attn_implementation=flash_attention_2", "optim=adamw_torch")
    parts = trl(write, FOUR_BITS, *measured)
    assert parts["peak"] == pytest.approx(12.14, rel=0.03)
    # TRL makes the adapters bf16
    assert parts["adapters"] == pytest.approx(2 * ADAPTER_WEIGHTS / GIB, abs=0.001)

    wide = trl(write, FOUR_BITS, "dtype=float32")
    assert wide[LINEAR_WEIGHTS] == pytest.approx(parts[LINEAR_WEIGHTS])
    assert wide["other weights"] == pytest.approx(2 * parts["other weights"], abs=0.01)
    assert wide["peak"] > 1.4 * parts["peak"]


def test_open_instruct_prepares_4_bit_models_in_fp32(write: Write) -> None:
    parts = open_instruct_sft(write, "use_qlora: true\n  gradient_checkpointing: true")
    # embedding, output layer and norms
    other_weights = (2 * 128256 + 65) * 4096
    assert parts["other weights"] == pytest.approx(4 * other_weights / GIB, abs=0.01)
    # the states are in pages
    assert "Adam's two states" not in parts


def test_liger_is_not_applied_to_a_4_bit_model(write: Write) -> None:
    """finetune.py::main[elif args.use_liger_kernel]"""
    four_bits = "use_qlora: true\n  gradient_checkpointing: true"
    with_liger = f"{four_bits}\n  use_liger_kernel: true"
    assert open_instruct_sft(write, with_liger) == open_instruct_sft(write, four_bits)


def test_an_activation_budget_acts_on_4_bit_models_alone(write: Write) -> None:
    half = "activation_memory_budget: 0.5"
    whole = "activation_memory_budget: 1.0"
    assert open_instruct_dpo(write, half) == open_instruct_dpo(write, whole)

    four_bits = "use_qlora: true\n  "
    half_peak = open_instruct_dpo(write, four_bits + half)["peak"]
    assert half_peak < open_instruct_dpo(write, four_bits + whole)["peak"]


def test_states_of_8_bits_are_smaller_but_the_embeddings(write: Write) -> None:
    embedding = 32000 * 4096
    rest = 7_241_732_096 - embedding
    narrow = 2 + 8 / 256
    states = trl(write, "optim: adamw_8bit")["Adam's two states"]
    assert states * GIB == pytest.approx(8 * embedding + narrow * rest, rel=0.001)

    lora = trl(write, f"{LORA}\n  optim: adamw_bnb_8bit")["Adam's two states"]
    assert lora * GIB == pytest.approx(narrow * ADAPTER_WEIGHTS, rel=0.05)


def test_paged_states_are_none_of_torchs(write: Write) -> None:
    assert "Adam's two states" not in trl(write, "optim: paged_adamw_32bit")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (f"{LORA}\n  load_in_8bit: true", "8 bits"),
        ("optim: adamw_torch_8bit", "`optim: adamw_torch_8bit`"),
    ],
)
def test_what_is_not_described_is_refused(write: Write, more: str, words: str) -> None:
    path = write("stage.yaml", TRL.format(more=more))
    result = CliRunner().invoke(app, ["plan", str(path), "--gpus", "1", *ROWS])
    assert isinstance(result.exception, LaunchError), result.output
    (finding,) = result.exception.findings
    assert finding.code == "unknown-memory" and words in finding.message
