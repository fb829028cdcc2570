"""New stage files: from templates, and from the files of other tools."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.config.load import Config, load

AXOLOTL = """
base_model: org/tiny
tokenizer_type: AutoTokenizer
datasets:
  - {path: org/chats, type: chat_template, split: train_sft}
  - {path: org/more, type: alpaca}
val_set_size: 0.05
evals_per_epoch: 4
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
load_in_8bit: false
flash_attention: true
hub_model_id: me/out
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json
output_dir: ./out
"""
LLAMA_FACTORY = """
model_name_or_path: org/tiny
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
pref_beta: 0.2
dataset: pairs_demo, other
template: qwen
max_samples: 1000
flash_attn: fa2
preprocessing_num_workers: 16
output_dir: saves/dpo
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3.0
warmup_ratio: 0.1
bf16: true
"""
TRL = """
model_name_or_path: org/tiny
datasets: [{path: org/text, name: en}]
max_seq_length: 512
learning_rate: 1.0e-4
accelerate_config: zero2
env: {CUDA_VISIBLE_DEVICES: 0}
"""
NEW = Path("new.yaml")


@dataclass
class Init:
    """`launch init` in a folder of its own, with JSON answers."""

    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str) -> tuple[int, Any]:
        code = main.main(["init", *words, "--format", "json"])
        return code, json.loads(self.capsys.readouterr().out)

    def write(self, *words: str, output: Path = NEW) -> Config:
        """The stage file that `launch init` writes."""
        code, answer = self.run(*words, "-o", str(output))
        assert code == 0, answer
        return load(output)

    def convert(self, text: str, *words: str) -> tuple[Config, Any]:
        """The stage file that another tool's file becomes, and the answer."""
        Path("foreign.yaml").write_text(text)
        code, answer = self.run("--from", "foreign.yaml", "-o", str(NEW), *words)
        assert code == 0, answer
        return load(NEW), answer

    def refuse(self, *words: str) -> tuple[int, Any]:
        """The exit code and the first finding, where no file is written."""
        code, answer = self.run(*words, "-o", str(NEW))
        assert not NEW.exists()
        return code, answer["findings"][0]

    def validate(self, path: Path, *words: str) -> tuple[int, str]:
        """The exit code and stderr of `launch validate-config`."""
        self.capsys.readouterr()
        code = main.main(["validate-config", str(path), *words])
        return code, self.capsys.readouterr().err


@pytest.fixture
def init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Init:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Init(capsys)


def hub_words(stage: str, backend: str = "trl") -> list[str]:
    """A new file for a model and data of the hub."""
    return [stage, "--backend", backend, "--model", "some/model", "--data", "some/data"]


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize("backend", ["trl", "open_instruct"])
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_new_file_is_valid_and_splits_its_batch(
    init: Init, stage: str, backend: str, gpus: int
) -> None:
    options = init.write(*hub_words(stage, backend), "--gpus", str(gpus)).options
    assert init.validate(NEW, "--strict") == (0, "")
    assert options["stage"] == stage
    batch = options["batch"]
    assert batch["global"] % (batch["per_device"] * max(1, gpus)) == 0
    if (stage, backend) == ("dpo", "open_instruct"):
        # it crashes on one GPU without
        assert options["deepspeed"] != "none"


def test_a_file_is_not_overwritten(init: Init) -> None:
    init.write(*hub_words("sft"))
    code, answer = init.run(*hub_words("sft"), "-o", str(NEW))
    assert code == 2
    assert "exists" in answer["findings"][0]["message"]


def test_without_a_terminal_model_and_data_are_options(init: Init) -> None:
    code, finding = init.refuse("dpo", "--gpus", "2")
    assert (code, finding["code"]) == (2, "no-input")


@pytest.mark.parametrize(
    ("output", "folder"),
    [
        ("first.yaml", "output/first"),
        ("below/first.yaml", "output/below/first"),
        ("second.yaml", "output/second-2"),
    ],
)
@pytest.mark.parametrize("backend", ["trl", "open_instruct"])
def test_each_new_file_has_an_output_folder_of_its_own(
    init: Init, backend: str, output: str, folder: str
) -> None:
    Path("output/second").mkdir(parents=True)
    config = init.write(*hub_words("sft", backend), output=Path(output))
    assert config.args["output_dir"] == folder


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (["--gpus", "0"], None),
        # without DeepSpeed steps of these learning rates are lost in rounding
        (["--gpus", "1"], None),
        (["--gpus", "1", "--lora"], "bfloat16"),
        (["--gpus", "8"], "bfloat16"),
    ],
)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_weights_are_in_bfloat16_where_nothing_is_lost(
    init: Init, stage: str, options: list[str], dtype: str | None
) -> None:
    assert init.write(*hub_words(stage), *options).args.get("dtype") == dtype


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("gpus", ["0", "1", "8"])
def test_open_instruct_keeps_copies_of_the_weights_in_float32(
    init: Init, stage: str, gpus: str
) -> None:
    config = init.write(*hub_words(stage, "open_instruct"), "--gpus", gpus)
    assert config.options["deepspeed"] != "none"


@pytest.mark.parametrize(
    ("backend", "switch"), [("trl", "use_peft"), ("open_instruct", "use_lora")]
)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_lora_is_an_option(init: Init, stage: str, backend: str, switch: str) -> None:
    assert init.write(*hub_words(stage, backend), "--lora").args[switch] is True
    assert init.validate(NEW, "--strict") == (0, "")


# -- with a model or data of this machine

MARKED = "{% for m in messages %}{%- generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
UNMARKED = "{% for m in messages %}{{ m.content }}{% endfor %}"
QUESTION = {"role": "user", "content": "hi"}
CHAT = [QUESTION, {"role": "assistant", "content": "yes"}]
BAD_CHAT = [QUESTION, {"role": "assistant", "content": "no"}]
CHATS = {"messages": CHAT}
PAIR = {"chosen": CHAT, "rejected": BAD_CHAT}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
NAMED_ROLES = {
    "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]
}
ALPACA = {"instruction": "hi", "input": "", "output": "yes"}


def model_folder(template: object = None, positions: int = 512) -> str:
    """A model as far as `launch init` looks at it: its config and the chat template."""
    folder = Path("model")
    folder.mkdir()
    config = {"model_type": "qwen2", "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(folder)


def data_file(row: object, folder: str = "data") -> str:
    path = Path(folder, "train.jsonl")
    path.parent.mkdir()
    path.write_text(f"{json.dumps(row)}\n" * 2)
    return str(path)


def test_rows_are_as_long_as_the_model_allows(init: Init) -> None:
    config = init.write("sft", "--model", model_folder(positions=32768), "--data", "some/data")
    assert config.args["max_length"] == 32768


def test_trl_reads_the_folder_of_a_data_file(init: Init) -> None:
    data = data_file(CHATS)
    notes = Path("data/train_notes.md")
    notes.touch()
    code, finding = init.refuse("sft", "--model", "org/tiny", "--data", data)
    assert (code, finding["code"]) == (2, "bad-data")

    notes.unlink()
    config = init.write("sft", "--model", "org/tiny", "--data", data)
    assert config.args["dataset_name"] == "data"


def test_a_folder_with_the_name_of_a_reader_is_written_as_a_folder(init: Init) -> None:
    data_file(CHATS, folder="json")
    config = init.write("sft", "--model", "org/tiny", "--data", "json")
    assert config.args["dataset_name"] == "./json"


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (MARKED, CHATS),
        (
            [{"name": "default", "template": MARKED}, {"name": "tool_use", "template": UNMARKED}],
            CHATS,
        ),
        (MARKED, NAMED_ROLES),
    ],
    ids=["one template", "several", "other roles"],
)
def test_answers_alone_are_trained_on_where_the_template_marks_them(
    init: Init, template: object, row: object
) -> None:
    words = ("sft", "--model", model_folder(template), "--data", data_file(row), "-o", str(NEW))
    _, answer = init.run(*words)
    assert load(NEW).args["assistant_only_loss"] is True
    assert answer["data"]["remarks"] == [
        "assistant_only_loss: true: the loss counts the answers alone, not the questions"
    ]


@pytest.mark.parametrize(
    "template",
    [UNMARKED, [{"name": "default", "template": UNMARKED}, {"name": "rag", "template": MARKED}]],
    ids=["one template", "several"],
)
def test_every_token_is_trained_on_where_the_template_marks_no_answers(
    init: Init, template: object
) -> None:
    words = ("sft", "--model", model_folder(template), "--data", data_file(CHATS), "-o", str(NEW))
    _, answer = init.run(*words)
    (remark,) = answer["data"]["remarks"]
    assert "no {% generation" in remark
    assert "every token" in remark
    assert "  # assistant_only_loss: true " in NEW.read_text()


@pytest.mark.parametrize("row", [{"text": "yes"}, {"prompt": "hi", "completion": "yes"}])
def test_rows_without_roles_need_no_template(init: Init, row: object) -> None:
    init.write("sft", "--model", model_folder(MARKED), "--data", data_file(row))
    assert "assistant_only_loss" not in NEW.read_text()


def test_a_missing_model_leaves_the_loss_to_the_user(init: Init) -> None:
    words = ("sft", "--model", "org/tiny", "--data", data_file(CHATS), "-o", str(NEW))
    _, answer = init.run(*words)
    assert "# assistant_only_loss: true" in NEW.read_text()
    assert "org/tiny is not here" in answer["data"]["remarks"][0]


def test_missing_data_leave_the_loss_to_the_user(init: Init) -> None:
    words = ("sft", "--model", model_folder(MARKED), "--data", "org/chats", "-o", str(NEW))
    _, answer = init.run(*words)
    assert "# assistant_only_loss: true" in NEW.read_text()
    assert "the rows of org/chats were not looked at" in answer["data"]["remarks"][0]


@pytest.mark.parametrize(
    ("stage", "backend", "row"),
    [
        ("sft", "trl", ALPACA),
        ("sft", "open_instruct", ALPACA),
        ("sft", "trl", SHAREGPT),
        ("sft", "trl", {"question": "hi", "answer": "yes"}),
        ("sft", "trl", {"prompt": "hi", "response": "yes"}),
        ("sft", "open_instruct", NAMED_ROLES),
        ("sft", "trl", {"messages": json.dumps(CHAT)}),
        ("dpo", "trl", {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"}),
        ("dpo", "trl", {"prompt": "hi", **PAIR}),
        ("dpo", "trl", {"chosen": json.dumps(CHAT), "rejected": json.dumps(BAD_CHAT)}),
    ],
)
def test_rows_to_convert_first_are_named_with_the_command(
    init: Init, stage: str, backend: str, row: object
) -> None:
    """The converted file lies elsewhere: this folder holds other files, too."""
    data = data_file(row)
    Path("data/notes.md").touch()
    words = (stage, "--backend", backend, "--model", "org/tiny", "--data", data)
    code, finding = init.refuse(*words)
    assert (code, finding["code"]) == (2, "bad-data")
    assert f"launch data convert {data} -o converted/train.jsonl" in finding["help"]


@pytest.mark.parametrize("backend", ["trl", "open_instruct"])
def test_pairs_that_the_trainer_reads_need_no_conversion(init: Init, backend: str) -> None:
    init.write("dpo", "--backend", backend, "--model", "org/tiny", "--data", data_file(PAIR))


# -- from the files of other tools


def test_a_file_of_axolotl_is_converted(init: Init) -> None:
    config, answer = init.convert(AXOLOTL, "--gpus", "2")
    assert config.options["stage"] == "sft"
    assert config.options["deepspeed"] == "zero3_offload"
    assert config.options["batch"] == {"global": 16, "per_device": 2}
    arguments = {
        "model_name_or_path": "org/tiny",
        "datasets": [{"path": "org/chats", "split": "train_sft"}, {"path": "org/more"}],
        "test_split_size": 0.05,
        # four times in each of three epochs
        "eval_strategy": "steps",
        "eval_steps": round(1 / 12, 6),
        "assistant_only_loss": True,
        "use_peft": True,
        "load_in_4bit": True,
        "lora_r": 32,
        "lora_dropout": 0.0,
        "lora_target_modules": ["all-linear"],
        "max_length": 4096,
        "packing": True,
        "num_train_epochs": 3,
        "optim": "adamw_torch",
        "learning_rate": 2e-4,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "cosine",
        "bf16": True,
        "dtype": "bfloat16",
        "attn_implementation": "flash_attention_2",
        "hub_model_id": "me/out",
        "push_to_hub": True,
        "output_dir": "./out",
    }
    assert arguments.items() <= config.args.items()
    assert "load_in_8bit" not in config.args
    assert answer["data"]["lost"] == []
    assert "#   tokenizer_type: AutoTokenizer  (" in NEW.read_text()


def test_a_file_of_llama_factory_is_converted(init: Init) -> None:
    config, answer = init.convert(LLAMA_FACTORY)
    assert config.options["stage"] == "dpo"
    assert "batch" not in config.options
    arguments = {
        "datasets": [
            {"path": "pairs_demo", "split": "train[:1000]"},
            {"path": "other", "split": "train[:1000]"},
        ],
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "v_proj"],
        "beta": 0.2,
        "max_length": 2048,
        "learning_rate": 5e-5,
        "dataset_num_proc": 16,
        "attn_implementation": "flash_attention_2",
        "gradient_accumulation_steps": 8,
    }
    assert arguments.items() <= config.args.items()
    assert answer["data"]["lost"] == ["template"]
    assert "converted" in {finding["code"] for finding in answer["findings"]}


def test_a_flat_file_of_trl_is_converted(init: Init) -> None:
    config, answer = init.convert(TRL)
    assert config.options["deepspeed"] == "zero2"
    assert config.args == {
        "model_name_or_path": "org/tiny",
        "datasets": [{"path": "org/text", "name": "en"}],
        "max_length": 512,
        "learning_rate": 1e-4,
    }
    assert answer["data"]["lost"] == ["env"]


@pytest.mark.parametrize(
    ("text", "tool"), [(AXOLOTL, "Axolotl"), (LLAMA_FACTORY, "LLaMA-Factory"), (TRL, "TRL")]
)
def test_validate_config_names_the_tool_of_a_file(init: Init, text: str, tool: str) -> None:
    path = Path("foreign.yaml")
    path.write_text(text)
    code, stderr = init.validate(path)
    assert code == 3
    assert stderr.count("error[") == 1
    assert f"a file of {tool}" in stderr
    assert f"launch init --from {path}" in stderr


@pytest.mark.parametrize("name", ["train.sh", "job.sbatch", "job.slurm"])
def test_validate_config_names_a_script(init: Init, name: str) -> None:
    path = Path(name)
    command = "trl sft --model_name_or_path a \\\n  --dataset_name b"
    path.write_text(f"#!/bin/bash\nexport SECRET=words\n{command}\n")
    code, stderr = init.validate(path)
    assert code == 3
    assert "error[foreign-file]: this is a script" in stderr
    assert f"launch init --from {path}" in stderr
    assert "words" not in stderr


@pytest.mark.parametrize(
    ("text", "exit_code", "code"),
    [
        pytest.param(f"{AXOLOTL}rl: kto\n", 3, "bad-stage", id="another stage"),
        pytest.param("a: [\n", 3, "broken-yaml", id="no YAML"),
        pytest.param("stage: sft\nargs: {learning_rate: 1}\n", 2, "unknown-format", id="our own"),
    ],
)
def test_a_file_that_cannot_be_converted(init: Init, text: str, exit_code: int, code: str) -> None:
    Path("foreign.yaml").write_text(text)
    refused, finding = init.refuse("--from", "foreign.yaml")
    assert (refused, finding["code"]) == (exit_code, code)
    if code == "unknown-format":
        assert "is a stage file of launch already" in finding["message"]
        assert finding["help"] == "launch validate-config foreign.yaml"
