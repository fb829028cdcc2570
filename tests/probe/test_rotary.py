"""Rotary frequencies that loading rounded are restored before training, with a record of it."""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from probed_scripts import Event, Training
from probed_scripts import training as training  # a fixture
from real_training import needs_packages

from launcher.probe.watching.model import ROUNDED, Frequency, Rotary, find_frequencies
from launcher.probe.watching.process import Process, Settings

pytestmark = needs_packages

LOAD = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen2Config

config = Qwen2Config(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=32, dtype="bfloat16",
)
AutoModelForCausalLM.from_config(config).save_pretrained("model")
ZERO
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
Accelerator(cpu=True).prepare(model)
print(model.model.rotary_emb.inv_freq.dtype)
"""
ZERO_3 = """
import deepspeed
import deepspeed.comm.torch
from transformers.integrations import HfDeepSpeedConfig
# it would compile a transport of its own
deepspeed.comm.torch.build_shm_op = lambda: None
deepspeed.init_distributed(dist_backend="gloo")
sizes = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
stage_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
zero = HfDeepSpeedConfig({**stage_3, **sizes})
"""
ONE_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu",
}  # fmt: skip


def load_model(training: Training, *, zero: str = "") -> Event:
    """Load a model under the probe, which leaves its frequencies in fp32; the event about them."""
    training.packages = training.folder / "no packages"
    training.environ |= {"HOME": str(training.folder), **ONE_RANK}
    script = LOAD.replace("ZERO", zero)
    done = training.run(script, python=sys.executable, options=(), cpu=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "torch.float32"
    (event,) = training.events("rotary")
    return event


@pytest.mark.slow
def test_frequencies_that_zero_3_computed_in_bfloat16_are_restored(training: Training) -> None:
    event = load_model(training, zero=ZERO_3)
    assert event["state"] == "restored"
    assert 1e-3 < event["largest_error"] < 2**-7


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def embedding(torch: Any) -> Any:
    """A rotary embedding that notes the configs for which it was computed."""

    class Embedding(torch.nn.Module):  # type: ignore[misc, name-defined]
        computed: ClassVar[list[str]] = []

        def __init__(self, config: str) -> None:
            super().__init__()
            self.computed.append(config)
            self.config = config
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.3]))

    return Embedding("the config")


def report(folder: Path, model: Any) -> Event:
    Rotary(Process(Settings("sft.py", str(folder)))).report(model)
    event: Event = json.loads((folder / "rank-0.jsonl").read_text())
    return event


def test_exact_frequencies_are_left_as_they_are(embedding: Any, tmp_path: Path) -> None:
    event = report(tmp_path, embedding)
    assert (event["state"], event["largest_error"]) == ("exact", 0.0)


def test_rounded_frequencies_are_restored_and_reported_with_one_computation(
    embedding: Any, torch: Any, tmp_path: Path
) -> None:
    embedding.bfloat16()
    embedding.computed.clear()
    assert report(tmp_path, embedding)["state"] == "restored"
    assert embedding.inv_freq.dtype == torch.float32
    assert embedding.computed == ["the config"]


def test_a_frequency_of_0_does_not_hide_that_others_are_rounded(torch: Any) -> None:
    true = torch.tensor([1.0, 0.3, 0.0])
    assert Frequency(None, "inv_freq", true.clone(), true).error() == 0.0
    assert Frequency(None, "inv_freq", true.bfloat16(), true).error() > 1e-3


def test_frequencies_that_no_config_computes_are_judged_by_their_precision(torch: Any) -> None:
    module = torch.nn.Module()
    module.config = "none"
    module.register_buffer("inv_freq", torch.ones(2, dtype=torch.bfloat16))
    (frequency,) = find_frequencies(module)
    assert frequency.true is None
    assert frequency.error() > ROUNDED
