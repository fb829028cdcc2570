"""open-instruct's SFT on OLMo-core for real: tokenised, trained on the CPU, written for transformers, found again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from real_training import launch, needs_open_instruct, needs_training, states

pytestmark = [pytest.mark.slow, *needs_training, needs_open_instruct]

STAGE = """
stage: sft
script: sft_olmo_core
batch: {global: 8, per_device: 2}
expect: {packing: isolated}
args:
  model_name_or_path: model
  config_name: olmo2_1M
  attn_implementation: torch
  mixer_list: [data.jsonl, 1.0]
  max_seq_length: 256
  compile_model: false
  num_epochs: 1
  checkpointing_steps: 100
  output_dir: out
"""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    """A model of OLMo-core's smallest shape, and a tokenizer that ends a whole conversation with its end of text."""
    from transformers import AutoTokenizer, Olmo2Config, Olmo2ForCausalLM

    folder = tmp_path_factory.mktemp("olmo")
    tokenizer = AutoTokenizer.from_pretrained(demo_assets / "model")
    tokenizer.eos_token, tokenizer.pad_token = "<|endoftext|>", "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 12, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 4}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
    }
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = Olmo2Config(vocab_size=1024, tie_word_embeddings=False, **sizes, **heads, **special)
    Olmo2ForCausalLM(config).save_pretrained(folder / "model")
    lines = (demo_assets / "data/sft/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "data.jsonl").write_text("".join(lines[:300]))
    (folder / "stage.yaml").write_text(STAGE)
    return folder


def start(project: Path, *words: str) -> tuple[int, dict[str, Any]]:
    return launch(project, "sft", "stage.yaml", *words, "--gpus", "0", "--no-rehearse")


def records(answer: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(answer["data"]["run"]) / "probe/rank-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_whole_way(project: Path) -> None:
    code, answer = start(project)
    assert code == 0, answer
    seen = states(answer)
    assert {
        name: seen[name] for name in ("packing", "batch", "dataset_cache", "finish", "model")
    } == {
        "packing": "isolated",
        "batch": "planned",
        "dataset_cache": "miss",
        "finish": "completed",
        "model": "saved",
    }
    events = records(answer)
    # the documents of a row were kept apart by a stand-in, and that is said
    assert "documents" in [event["what"] for event in events if event["event"] == "supplied"]
    (export,) = [event for event in events if event["event"] == "export"]
    assert export["state"] == "agrees"

    # the steps were known before the training began: those of the packed rows, none half full
    manifest = json.loads((Path(answer["data"]["run"]) / "run.json").read_text())
    steps = [event for event in events if event["event"] == "step"]
    assert manifest["plan"]["steps"] == len(steps) == manifest["plan"]["rows"] // 8
    assert manifest["script"] == "sft_olmo_core"

    # what was written is a model of transformers', with the weights that were trained
    from transformers import AutoModelForCausalLM, AutoTokenizer

    written = project / "out/hf_model"
    assert AutoModelForCausalLM.from_pretrained(written).config.num_hidden_layers == 4
    assert AutoTokenizer.from_pretrained(written).eos_token == "<|endoftext|>"

    # the same data again are found
    code, answer = start(
        project, "output_dir=again", "max_train_steps=2", "expect.dataset_cache=hit"
    )
    assert (code, states(answer)["dataset_cache"]) == (0, "hit"), answer


@pytest.mark.parametrize("overrides", [(), ("max_train_steps=2",)], ids=["epochs", "steps"])
def test_no_gpu_is_taken_for_data_that_make_no_step(
    project: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    folder = tmp_path / "few"
    shutil.copytree(project / "model", folder / "model")
    (folder / "data.jsonl").write_text(
        "".join((project / "data.jsonl").read_text().splitlines(keepends=True)[:4])
    )
    (folder / "stage.yaml").write_text(STAGE)
    code, answer = start(folder, *overrides)
    assert code == 5
    assert [
        finding["code"] for finding in answer["findings"] if finding["severity"] == "error"
    ] == ["too-few-rows"]
    assert not (folder / "out").exists()
