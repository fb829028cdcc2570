"""open-instruct's SFT on OLMo-core: tokenised, trained on the CPU, written for transformers."""

import json
import shutil
from pathlib import Path

import pytest
from real_answers import Answer, launch, succeed, supplied
from real_training import needs_open_instruct, needs_training
from recorded_events import read_events

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
TRAIN = ("sft", "stage.yaml", "--gpus", "0", "--no-rehearse")
END_OF_TEXT = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
SMALLEST_SHAPE = {
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "hidden_size": 12,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "bos_token_id": None,
}
"""That of OLMo-core's `olmo2_1M`."""


def write_stage(folder: Path, lines: list[str]) -> None:
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "stage.yaml").write_text(STAGE)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    """A small model, whose tokenizer ends a conversation with its end of text, and 150 chats."""
    from transformers import AutoTokenizer, Olmo2Config, Olmo2ForCausalLM

    folder = tmp_path_factory.mktemp("olmo")
    tokenizer = AutoTokenizer.from_pretrained(demo_assets / "model")
    tokenizer.eos_token = END_OF_TEXT
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Olmo2Config(**SMALLEST_SHAPE, **ends)
    Olmo2ForCausalLM(config).save_pretrained(folder / "model")
    lines = (demo_assets / "data/sft/train.jsonl").read_text().splitlines(keepends=True)
    write_stage(folder, lines[:150])
    return folder


@pytest.fixture(scope="module")
def trained(project: Path) -> Answer:
    return succeed(project, *TRAIN)


def test_its_points_are_proved(trained: Answer) -> None:
    expected = {
        "packing": "isolated",
        "batch": "planned",
        "dataset_cache": "miss",
        "finish": "completed",
        "model": "saved",
    }
    assert expected.items() <= trained.states.items()
    # something stood in for what keeps the documents of a row apart, and the record has that
    assert "documents" in supplied(trained.run)


def test_its_steps_are_those_of_the_packed_rows_and_planned(trained: Answer) -> None:
    manifest = json.loads((trained.run / "run.json").read_text())
    plan = manifest["plan"]
    # none is half full
    steps = read_events(trained.run / "probe", "step")
    assert len(steps) == plan["steps"]
    assert plan["steps"] == plan["rows"] // 8
    assert manifest["script"] == "sft_olmo_core"


def test_it_writes_a_model_of_transformers_with_the_trained_weights(
    project: Path, trained: Answer
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (export,) = read_events(trained.run / "probe", "export")
    assert export["state"] == "agrees"
    written = project / "out/hf_model"
    assert AutoModelForCausalLM.from_pretrained(written).config.num_hidden_layers == 4
    assert AutoTokenizer.from_pretrained(written).eos_token == END_OF_TEXT


def test_the_same_data_are_found_again(project: Path, trained: Answer) -> None:
    words = ("output_dir=again", "max_train_steps=2", "expect.dataset_cache=hit")
    assert succeed(project, *TRAIN, *words).states["dataset_cache"] == "hit"


def test_data_that_make_no_step_are_refused(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "model", tmp_path / "model")
    lines = (project / "data.jsonl").read_text().splitlines(keepends=True)
    write_stage(tmp_path, lines[:4])
    # with a number of steps OLMo-core would begin epochs without a step for ever
    answer = launch(tmp_path, *TRAIN, "max_train_steps=2")
    assert answer.code == 5
    assert answer.finding("too-few-rows")["severity"] == "error"
    assert not (tmp_path / "out").exists()
