"""What of a stage file memory depends on: quantised weights and bitsandbytes' optimizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.cli.commands import app
from launcher.errors import LaunchError

Write = Callable[[str, str], Path]
ROWS = ("--row-tokens", "4096:4096")
MISTRAL = "mistralai/Mistral-7B-v0.1"
TRL = """
stage: sft
backend: trl
deepspeed: none
batch: {{global: 16, per_device: 4}}
args:
  model_name_or_path: {model}
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


def parts(path: Path, *words: str, gpus: str = "1") -> dict[str, float]:
    told = CliRunner().invoke(
        app,
        ["plan", str(path), "--gpus", gpus, *words, *ROWS, "--why", "--format", "json"],
        catch_exceptions=False,
    )
    (one,) = json.loads(told.stdout)["data"]["gpus"]
    fullest: list[dict[str, Any]] = one["why"][0]["parts"]
    return {"peak": one["memory_gib"]["peak"], **{part["name"]: part["gib"] for part in fullest}}


def trl(write: Write, more: str, model: str = MISTRAL, *words: str) -> dict[str, float]:
    return parts(write("stage.yaml", TRL.format(model=model, more=more)), *words)


def open_instruct(write: Write, more: str, *, stage: str = "sft") -> dict[str, float]:
    mixer = "dataset_mixer_list" if stage == "sft" else "mixer_list"
    text = OPEN_INSTRUCT.format(stage=stage, mixer=mixer, more=more)
    # DPO's reference pass needs a process group
    return parts(write("stage.yaml", text), gpus="1" if stage == "sft" else "2")


def test_trl_with_4_bits_is_what_was_measured(write: Write) -> None:
    """fms-acceleration's runs of these settings: 12.1 GiB with a loss that makes no logits."""
    found = trl(
        write, FOUR_BITS, MISTRAL, "attn_implementation=flash_attention_2", "optim=adamw_torch"
    )
    assert found["peak"] == pytest.approx(12.14, rel=0.03)
    # TRL makes the adapters bf16
    assert found["adapters"] == pytest.approx(2 * 13_631_488 / 2**30, abs=0.001)
    wide = trl(write, FOUR_BITS, MISTRAL, "dtype=float32")
    assert wide["linear weights (4 bits and their scales)"] == pytest.approx(
        found["linear weights (4 bits and their scales)"]
    )
    assert wide["other weights"] == pytest.approx(2 * found["other weights"], abs=0.01)
    assert wide["peak"] > 1.4 * found["peak"]


def test_open_instruct_prepares_4_bit_models_in_fp32(write: Write) -> None:
    sft = open_instruct(write, "use_qlora: true\n  gradient_checkpointing: true")
    # embedding, output layer and norms
    assert sft["other weights"] == pytest.approx(4 * (2 * 128256 + 65) * 4096 / 2**30, abs=0.01)
    # the states are in pages
    assert "Adam's two states" not in sft
    # Liger is not applied to them (finetune.py::main[elif args.use_liger_kernel]), `activation_memory_budget` acts on
    # them alone
    asked = "use_qlora: true\n  gradient_checkpointing: true\n  use_liger_kernel: true"
    assert open_instruct(write, asked) == sft
    budget = "use_qlora: true\n  activation_memory_budget: "
    dpo = [open_instruct(write, f"{budget}{one}", stage="dpo")["peak"] for one in ("0.5", "1.0")]
    assert dpo[0] < dpo[1]
    plain = "activation_memory_budget: "
    assert open_instruct(write, f"{plain}0.5", stage="dpo") == open_instruct(
        write, f"{plain}1.0", stage="dpo"
    )


def test_states_of_8_bits_are_smaller_but_the_embeddings(write: Write) -> None:
    found = trl(write, "optim: adamw_8bit")
    rest = 7_241_732_096 - 32000 * 4096
    assert found["Adam's two states"] * 2**30 == pytest.approx(
        8 * 32000 * 4096 + (2 + 8 / 256) * rest, rel=0.001
    )
    # in pages none of them is torch's
    assert "Adam's two states" not in trl(write, "optim: paged_adamw_32bit")
    lora = trl(write, f"{LORA}\n  optim: adamw_bnb_8bit")
    assert lora["Adam's two states"] * 2**30 == pytest.approx((2 + 8 / 256) * 13_631_488, rel=0.05)


def test_what_is_not_described_is_refused(write: Write) -> None:
    for more, words in (
        (f"{LORA}\n  load_in_8bit: true", "8 bits"),
        ("optim: adamw_torch_8bit", "`optim: adamw_torch_8bit`"),
    ):
        path = write("stage.yaml", TRL.format(model=MISTRAL, more=more))
        told = CliRunner().invoke(app, ["plan", str(path), "--gpus", "1", *ROWS])
        assert isinstance(told.exception, LaunchError), told.output
        (finding,) = told.exception.findings
        assert finding.code == "unknown-memory" and words in finding.message
