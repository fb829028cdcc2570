"""New stage files: from templates, and from the files of other tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.config.load import load

ASKED = ["--model", "some/model", "--data", "some/data"]

AXOLOTL = """
base_model: org/tiny
tokenizer_type: AutoTokenizer
rl: {rl}
datasets:
  - {{path: org/chats, type: chat_template, split: train_sft}}
  - {{path: org/more, type: alpaca}}
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


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of `launch init`."""
    code = main.main(["init", *words, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("backend", ["trl", "open_instruct"])
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_new_file_is_valid_and_splits_its_batch(
    stage: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for gpus in (0, 1, 3, 8):
        path = tmp_path / f"{gpus}.yaml"
        code, said = answer(
            capsys, stage, *ASKED, "--backend", backend, "--gpus", str(gpus), "-o", str(path)
        )
        assert (code, said["data"]["stage"]) == (0, stage)
        assert main.main(["validate-config", str(path), "--strict"]) == 0
        capsys.readouterr()
        options = load(path).options
        batch = options["batch"]
        assert batch["global"] % (batch["per_device"] * max(1, gpus)) == 0
        # open-instruct's DPO crashes on one GPU without it
        assert options["deepspeed"] != "none" or (stage, backend) != ("dpo", "open_instruct")
    assert main.main(["init", stage, *ASKED, "-o", str(path)]) == 2
    assert "exists" in capsys.readouterr().err


def test_without_a_terminal_model_and_data_are_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = answer(capsys, "dpo", "--gpus", "2")
    assert (code, said["findings"][0]["code"]) == (2, "no-input")
    assert not [*tmp_path.iterdir()]


def test_a_data_file_of_trl_is_alone_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data" / "chats.jsonl"
    data.parent.mkdir()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    data.write_text(json.dumps({"messages": chat}) + "\n")
    words = ("sft", "--model", "org/tiny", "--data", str(data), "-o", str(tmp_path / "sft.yaml"))
    (data.parent / "train_notes.md").write_text("")
    code, said = answer(capsys, *words)
    assert (code, said["findings"][0]["code"]) == (2, "bad-data")
    (data.parent / "train_notes.md").unlink()
    assert answer(capsys, *words)[0] == 0
    assert load(tmp_path / "sft.yaml").args["dataset_name"] == str(data.parent)


MARKED = "{% for m in messages %}{%- generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
UNMARKED = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHATS = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
NAMED_ROLES = {
    "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]
}
ALPACA = {"instruction": "hi", "input": "", "output": "yes"}
PAIR = {
    "chosen": [*CHATS["messages"]],
    "rejected": [CHATS["messages"][0], {"role": "assistant", "content": "no"}],
}


def model_folder(folder: Path, template: object) -> Path:
    """A folder with a config and a tokenizer's config, all that is looked at of a model; None: no template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 512}')
    held = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(held))
    return folder


def data_file(folder: Path, *rows: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("template", "row", "written"),
    [
        (MARKED, CHATS, "true"),
        (
            [{"name": "default", "template": MARKED}, {"name": "tool_use", "template": UNMARKED}],
            CHATS,
            "true",
        ),
        (MARKED, NAMED_ROLES, "true"),
        (UNMARKED, CHATS, "no {% generation %}"),
        (
            [{"name": "default", "template": UNMARKED}, {"name": "rag", "template": MARKED}],
            CHATS,
            "no {% generation",
        ),
        (MARKED, {"text": "yes"}, "nothing"),
        (MARKED, {"prompt": "hi", "completion": "yes"}, "nothing"),
    ],
)
def test_answers_alone_are_trained_on_where_the_template_can(
    template: object, row: object, written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder(tmp_path / "model", template)
    data, path = data_file(tmp_path / "data", row, row), tmp_path / "sft.yaml"
    code, said = answer(capsys, "sft", "--model", str(model), "--data", str(data), "-o", str(path))
    assert code == 0, said
    args, remarks = load(path).args, said["data"]["remarks"]
    assert args["max_length"] == 512
    assert args.get("assistant_only_loss") is (True if written == "true" else None)
    if written == "nothing":
        assert not remarks
        assert "assistant_only_loss" not in path.read_text()
    elif written == "true":
        assert remarks == [
            "assistant_only_loss: true: the loss counts the answers alone, not the questions"
        ]
    else:
        assert written in remarks[0] and "every token" in remarks[0]
        assert "  # assistant_only_loss: true " in path.read_text()


@pytest.mark.parametrize("place", ["model", "data"])
def test_what_is_not_here_leaves_the_line_to_a_person(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = "org/tiny" if place == "model" else str(model_folder(tmp_path / "model", MARKED))
    data = "org/chats" if place == "data" else str(data_file(tmp_path / "data", CHATS))
    path = tmp_path / "sft.yaml"
    code, said = answer(capsys, "sft", "--model", model, "--data", data, "-o", str(path))
    assert code == 0
    assert "# assistant_only_loss: true" in path.read_text()
    reason = (
        "org/tiny is not here" if place == "model" else "the rows of org/chats were not looked at"
    )
    assert reason in said["data"]["remarks"][0]


@pytest.mark.parametrize(
    ("stage", "backend", "row"),
    [
        ("sft", "trl", ALPACA),
        ("sft", "open_instruct", ALPACA),
        ("sft", "trl", SHAREGPT),
        ("sft", "trl", {"question": "hi", "answer": "yes"}),
        ("sft", "trl", {"prompt": "hi", "response": "yes"}),
        ("sft", "open_instruct", NAMED_ROLES),
        ("sft", "trl", {"messages": json.dumps(CHATS["messages"])}),
        ("dpo", "trl", {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"}),
        ("dpo", "trl", {"prompt": "hi", **PAIR}),
        (
            "dpo",
            "trl",
            {"chosen": json.dumps(PAIR["chosen"]), "rejected": json.dumps(PAIR["rejected"])},
        ),
    ],
)
def test_rows_to_convert_first_are_told_with_the_command(
    stage: str, backend: str, row: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a folder that holds other files: the converted file lies elsewhere."""
    data, path = data_file(tmp_path, row, row), tmp_path / "new.yaml"
    (tmp_path / "notes.md").write_text("")
    words = (
        stage,
        "--backend",
        backend,
        "--model",
        "org/tiny",
        "--data",
        str(data),
        "-o",
        str(path),
    )
    code, said = answer(capsys, *words)
    assert (code, said["findings"][0]["code"]) == (2, "bad-data")
    assert f"launch data convert {data} -o converted/train.jsonl" in said["findings"][0]["help"]
    assert not path.exists()


def test_a_folder_with_the_name_of_a_reader_is_written_as_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data_file(tmp_path / "json", CHATS)
    for data in ("json", "json/train.jsonl"):
        path = tmp_path / f"{len(data)}.yaml"
        code, _ = answer(capsys, "sft", "--model", "org/tiny", "--data", data, "-o", str(path))
        assert (code, load(path).args["dataset_name"]) == (0, "./json")


@pytest.mark.parametrize("backend", ["trl", "open_instruct"])
def test_pairs_that_are_read_need_no_conversion(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_file(tmp_path / "data", PAIR, PAIR)
    words = (
        "dpo",
        "--backend",
        backend,
        "--model",
        "org/tiny",
        "--data",
        str(data),
        "-o",
        str(tmp_path / "d.yaml"),
    )
    assert answer(capsys, *words)[0] == 0


def convert(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[Any, dict[str, Any], str]:
    """The config that a foreign file becomes, the answer, and the text of the new file."""
    source, path = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(text)
    code, said = answer(capsys, "--from", str(source), "-o", str(path), *words)
    assert code == 0, said
    return load(path), said, path.read_text()


def test_an_axolotl_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said, text = convert(AXOLOTL.format(rl=""), tmp_path, capsys, "--gpus", "2")
    assert config.options["stage"] == "sft"
    assert config.options["deepspeed"] == "zero3_offload"
    assert config.options["batch"] == {"global": 16, "per_device": 2}
    assert config.args["datasets"] == [
        {"path": "org/chats", "split": "train_sft"},
        {"path": "org/more"},
    ]
    expected = {
        "model_name_or_path": "org/tiny", "test_split_size": 0.05,
        "assistant_only_loss": True, "use_peft": True, "load_in_4bit": True, "lora_r": 32, "lora_dropout": 0.0,
        "lora_target_modules": ["all-linear"], "max_length": 4096, "packing": True, "num_train_epochs": 3,
        "optim": "adamw_torch", "learning_rate": 2e-4, "warmup_steps": 0.1, "lr_scheduler_type": "cosine",
        "bf16": True, "dtype": "bfloat16", "attn_implementation": "flash_attention_2", "hub_model_id": "me/out",
        "push_to_hub": True, "output_dir": "./out",
    }  # fmt: skip
    assert expected.items() <= config.args.items()
    assert "load_in_8bit" not in config.args
    assert said["data"]["lost"] == []
    # four times in each of three epochs
    assert (config.args["eval_strategy"], config.args["eval_steps"]) == ("steps", round(1 / 12, 6))
    assert "#   tokenizer_type: AutoTokenizer  (" in text


def test_a_llama_factory_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said, _ = convert(LLAMA_FACTORY, tmp_path, capsys)
    assert config.options["stage"] == "dpo"
    assert "batch" not in config.options
    expected = {
        "lora_r": 16, "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "v_proj"],
        "beta": 0.2, "max_length": 2048, "learning_rate": 5e-5, "dataset_num_proc": 16,
        "attn_implementation": "flash_attention_2", "gradient_accumulation_steps": 8,
    }  # fmt: skip
    assert expected.items() <= config.args.items()
    parts = [{"path": name, "split": "train[:1000]"} for name in ("pairs_demo", "other")]
    assert config.args["datasets"] == parts
    assert said["data"]["lost"] == ["template"]
    assert "converted" in {finding["code"] for finding in said["findings"]}


def test_a_flat_trl_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said, _ = convert(TRL, tmp_path, capsys)
    assert config.options["deepspeed"] == "zero2"
    assert config.args == {
        "model_name_or_path": "org/tiny", "datasets": [{"path": "org/text", "name": "en"}],
        "max_length": 512, "learning_rate": 1e-4,
    }  # fmt: skip
    assert said["data"]["lost"] == ["env"]


def test_validate_config_says_whose_file_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.yaml"
    for text, tool in (
        (AXOLOTL.format(rl=""), "Axolotl"),
        (LLAMA_FACTORY, "LLaMA-Factory"),
        (TRL, "TRL"),
    ):
        path.write_text(text)
        assert main.main(["validate-config", str(path)]) == 3
        said = capsys.readouterr().err
        assert said.count("error[") == 1 and f"a file of {tool}" in said
        assert f"launch init --from {path}" in said


@pytest.mark.parametrize("name", ["train.sh", "job.sbatch", "job.slurm"])
def test_validate_config_says_that_a_script_is_none_of_its_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(
        "#!/bin/bash\nexport SECRET=words\ntrl sft --model_name_or_path a \\\n  --dataset_name b\n"
    )
    assert main.main(["validate-config", str(path)]) == 3
    said = capsys.readouterr().err
    assert "error[foreign-file]: this is a script" in said
    assert f"launch init --from {path}" in said
    assert "words" not in said


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, new = tmp_path / "f.yaml", tmp_path / "o.yaml"
    for text, code, finding in (
        (AXOLOTL.format(rl="kto"), 3, "bad-stage"),
        ("stage: sft\nargs: {learning_rate: 1}\n", 2, "unknown-format"),
        ("stage: dpo\nbackend: trl\nargs: {learning_rate: 1}\n", 2, "unknown-format"),
        ("a: [\n", 3, "broken-yaml"),
    ):
        path.write_text(text)
        found = answer(capsys, "--from", str(path), "-o", str(new))
        assert (found[0], found[1]["findings"][0]["code"]) == (code, finding)
        assert not new.exists()


def test_a_stage_file_needs_no_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("stage: sft\nargs: {learning_rate: 1}\n")
    code, said = answer(capsys, "--from", str(path), "-o", str(tmp_path / "o.yaml"))
    assert code == 2
    assert "is a stage file of launch already" in said["findings"][0]["message"]
    assert said["findings"][0]["help"] == f"launch validate-config {path}"


@pytest.mark.parametrize("backend", ["trl", "open_instruct"])
def test_each_new_file_has_an_output_folder_of_its_own(
    backend: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output/second").mkdir(parents=True)
    for file, output in (
        ("first.yaml", "output/first"),
        ("below/first.yaml", "output/below/first"),
        ("second.yaml", "output/second-2"),
    ):
        assert answer(capsys, "sft", *ASKED, "--backend", backend, "-o", file)[0] == 0
        assert load(file).args["output_dir"] == output


@pytest.mark.parametrize(
    ("stage", "options", "dtype"),
    [
        ("sft", ["--gpus", "1"], "bfloat16"),
        ("sft", ["--gpus", "0"], None),
        ("dpo", ["--gpus", "1", "--lora"], "bfloat16"),
        # steps of DPO's learning rate would be lost in rounding
        ("dpo", ["--gpus", "1"], None),
    ],
)
def test_weights_are_in_bfloat16_on_a_gpu(
    stage: str,
    options: list[str],
    dtype: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "new.yaml"
    assert answer(capsys, stage, *ASKED, *options, "-o", str(path))[0] == 0
    assert load(path).args.get("dtype") == dtype


@pytest.mark.parametrize(
    ("backend", "switch"), [("trl", "use_peft"), ("open_instruct", "use_lora")]
)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_lora_is_an_option(
    stage: str, backend: str, switch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.yaml"
    assert answer(capsys, stage, *ASKED, "--lora", "--backend", backend, "-o", str(path))[0] == 0
    assert load(path).args[switch] is True
    assert main.main(["validate-config", str(path), "--strict"]) == 0


def test_rows_are_as_long_as_the_model_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder(tmp_path / "model", None)
    (model / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 32768}')
    path = tmp_path / "new.yaml"
    words = ("sft", "--model", str(model), "--data", "some/data", "-o", str(path))
    assert answer(capsys, *words)[0] == 0
    assert load(path).args["max_length"] == 32768
