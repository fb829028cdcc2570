"""Rotary frequencies that loading rounded are put right before training, and said."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from probed_scripts import PROBE
from real_training import needs_packages

from launcher.probe.watching.model import ROUNDED, Frequency, Rotary, frequencies
from launcher.probe.watching.process import Process, Settings

pytestmark = [pytest.mark.slow, needs_packages]

LOAD = """
    import os
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, dtype="bfloat16",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    ZERO
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
    CAST
    Accelerator(cpu=True).prepare(model)
    print(model.model.rotary_emb.inv_freq.dtype)
    """
ZERO_3 = """
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    deepspeed.init_distributed(dist_backend="gloo")
    sizes = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
    zero = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, **sizes})
    """


def load(folder: Path, *, zero: str = "", cast: str = "") -> tuple[str, dict[str, Any]]:
    """Load a model under the probe; returns what the script printed last, and the event about the frequencies."""
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(LOAD).replace("ZERO", textwrap.dedent(zero)).replace("CAST", cast)
    )
    settings = {"target": str(script), "out": str(folder / "probe"), "cpu": True}
    environ = {
        **os.environ,
        "LAUNCH_PROBE": json.dumps(settings),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, PROBE],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "probe" / "rank-0.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["event"] == "rotary"]
    return done.stdout.split()[-1], event


def test_frequencies_of_a_plain_load_are_left_as_they_are(tmp_path: Path) -> None:
    dtype, event = load(tmp_path)
    assert dtype == "torch.float32"
    assert (event["state"], event["largest_error"]) == ("exact", 0.0)


def test_frequencies_that_zero_3_computed_in_bfloat16_are_restored(tmp_path: Path) -> None:
    dtype, event = load(tmp_path, zero=ZERO_3)
    assert dtype == "torch.float32"
    assert event["state"] == "restored"
    assert 1e-3 < event["largest_error"] < 2**-7


def test_frequencies_that_a_cast_of_the_model_rounded_are_restored(tmp_path: Path) -> None:
    dtype, event = load(tmp_path, cast="model.bfloat16()")
    assert dtype == "torch.float32"
    assert event["state"] == "restored"


def test_a_frequency_of_0_does_not_hide_that_others_are_rounded() -> None:
    torch = pytest.importorskip("torch")
    true = torch.tensor([1.0, 0.3, 0.0])
    assert Frequency(None, "inv_freq", true.clone(), true).error() == 0.0
    assert Frequency(None, "inv_freq", true.bfloat16(), true).error() > 1e-3


def test_frequencies_of_a_class_that_no_config_makes_are_told_by_their_precision() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    module.config = "none"
    module.register_buffer("inv_freq", torch.ones(2, dtype=torch.bfloat16))
    (frequency,) = frequencies(module)
    assert frequency.true is None
    assert frequency.error() > ROUNDED


def test_a_prepared_model_is_restored_and_reported_with_one_computation(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    computed = []

    class Embedding(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, config: str) -> None:
            super().__init__()
            computed.append(config)
            self.config = config
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.3]))

    model = Embedding("the config").bfloat16()
    computed.clear()
    Rotary(Process(Settings("sft.py", str(tmp_path)))).report(model)
    assert model.inv_freq.dtype == torch.float32
    assert computed == ["the config"]
    (line,) = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(line)["state"] == "restored"
