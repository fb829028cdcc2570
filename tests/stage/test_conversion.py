"""`launch init --from`: what other people train with becomes a valid stage file, and no flag of theirs is lost."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.config.load import Config, load

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Form:
    """A small source in one of the forms that people have; `name` is the file's."""

    name: str
    text: str
    stage: str = "sft"
    backend: str = "trl"


TRL_SCRIPT = Form(
    "train.sh",
    """#!/bin/bash
    set -e
    MODEL="org/tiny"
    OUT=out/$(basename $MODEL)
    CUDA_VISIBLE_DEVICES=0,1 accelerate launch \\
        --num_processes 2 \\
        --mixed_precision=bf16 \\
        --main_process_port 29501 \\
        trl/scripts/sft.py \\
        --model_name_or_path ${MODEL} \\
        --dataset_name org/chats \\
        --max_seq_length 1024 \\
        --warmup_ratio 0.1 \\
        --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \\
        --output_dir "$OUT" --bf16 --packing=True --report_to none \\
        --unheard_of 3 2>&1 | tee train.log
    """,
)
MODULE = Form(
    "run_dpo.sh",
    """
    export WANDB_PROJECT=mine
    uv run --frozen python -m torch.distributed.run --nproc_per_node=4 --nnodes 2 --rdzv_backend c10d \\
        -m trl.scripts.dpo --model_name_or_path org/tiny --dataset_name org/pairs --beta 0.2 \\
        --max_prompt_length 512 --learning_rate 5e-7 --output_dir out
    """,
    stage="dpo",
)
ARRAYS = Form(
    "arrays.sh",
    """
    common=(
      --model_name_or_path org/tiny   # the model
      --dataset_name org/chats
      # --packing
    )
    extra="--learning_rate 1e-5 --num_train_epochs 2"
    common+=(--output_dir out)
    if [[ $LONG == 1 ]]; then
      common+=(--max_length 8192)
    fi
    trl sft "${common[@]}" $extra --num_processes 2 --accelerate_config zero3
    """,
)
BATCH_SCRIPT = Form(
    "job.sbatch",
    """#!/bin/bash
    #SBATCH --job-name=tuning
    #SBATCH -p gpu --account=me
    #SBATCH --nodes=2
    #SBATCH --gres=gpu:8
    #SBATCH --time=12:00:00
    #SBATCH -o logs/%j.out
    module load cuda
    srun --cpu-bind=none torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE \\
      --rdzv_endpoint $HEAD:29500 \\
      train_sft.py --model_name org/tiny --data_path data/rows.json --lr 2e-5 --epochs 3 \\
      --batch_size 2 --grad_accum $((64 / (2 * SLURM_NNODES * SLURM_GPUS_ON_NODE))) --save_path out/$SLURM_JOB_ID
    """,
)
DEEPSPEED = Form(
    "ds.sh",
    """
    deepspeed --include localhost:0,1,2,3 --master_port 9901 fastchat/train/train_lora.py \\
        --model_name_or_path org/tiny --data_path rows.json --lora_r 8 --lora_alpha 16 --use_lora \\
        --model_max_length 2048 --evaluation_strategy no --flash_attn True --lazy_preprocess True \\
        --deepspeed configs/zero2.json --output_dir out --tf32 True --fp16 False
    """,
)
HERE_DOCUMENT = Form(
    "heredoc.sh",
    """
    cat > /tmp/config.yaml <<EOF
model_name_or_path: org/tiny
dataset_name: org/chats
learning_rate: 1.0e-5
output_dir: out
EOF
    read -r -d '' flags <<EOF
      --config /tmp/config.yaml
      --gradient_checkpointing
EOF
    accelerate launch -m trl.scripts.sft $flags --save_strategy epoch
    """,
)
FUNCTION = Form(
    "function.sh",
    """
    train() {
      local model=$1
      bash -c "torchrun --nproc_per_node 2 train.py --model_path $model --dataset org/chats --lora_rank 16"
    }
    train org/tiny
    """,
)
LLAMA_FACTORY_COMMAND = Form(
    "lf.sh",
    """
    FORCE_TORCHRUN=1 llamafactory-cli train \\
        --stage sft --do_train --model_name_or_path org/tiny --dataset org/chats --template qwen \\
        --finetuning_type lora --lora_target all --cutoff_len 2048 --max_samples 1000 --val_size 0.1 \\
        --eval_strategy steps --eval_steps 50 --output_dir out --deepspeed ds_z3_config.json --plot_loss
    """,
)
LLAMA_FACTORY_FILE = Form(
    "lf.yaml",
    """
model_name_or_path: org/tiny
stage: dpo
do_train: true
finetuning_type: full
dataset: org/pairs, org/more
template: llama3
pref_beta: 0.2
pref_loss: sigmoid
overwrite_cache: true
output_dir: out
""",
    stage="dpo",
)
AXOLOTL_FILE = Form(
    "axolotl.yml",
    """
base_model: org/tiny
datasets:
  - {path: org/chats, type: chat_template}
  - {path: org/more, type: alpaca, split: "train[:20%]"}
val_set_size: 0.05
evals_per_epoch: 2
train_on_inputs: false
adapter: lora
lora_r: 8
lora_target_linear: true
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_checkpointing: offload
special_tokens: {pad_token: "<pad>"}
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true}
wandb_project: mine
flash_attention: true
""",
)
AXOLOTL_COMMAND = Form(
    "axolotl.sh",
    """
    cat <<'EOF' > config.yml
base_model: org/tiny
datasets: [{path: org/chats, type: chat_template}]
sequence_len: 512
EOF
    accelerate launch -m axolotl.cli.train config.yml --learning_rate 1e-4
    """,
)
HANDBOOK_MIXER = Form(
    "handbook.yaml",
    """
model_name_or_path: org/tiny
torch_dtype: bfloat16
use_flash_attention_2: true
dataset_mixer: {org/chats: 0.5, org/more: 1.0}
dataset_splits: [train_sft, test_sft]
preprocessing_num_workers: 12
bf16: true
do_eval: true
evaluation_strategy: epoch
max_seq_length: 2048
chat_template: "{% for m in messages %}{{ m.content }}{% endfor %}"
output_dir: out
overwrite_output_dir: true
""",
)
HANDBOOK_MIXTURE = Form(
    "handbook_dpo.yaml",
    """
model_name_or_path: org/tiny
dataset_mixture:
  datasets:
    - {id: org/pairs, config: default, split: train_prefs, columns: [chosen, rejected], weight: 1.0}
    - {id: org/more, split: train, columns: [chosen, rejected], weight: 0.25}
  test_split_size: 0.1
  seed: 0
beta: 0.01
max_prompt_length: 512
eval_strategy: steps
eval_steps: 100
output_dir: out
""",
    stage="dpo",
)
TORCHTUNE_FILE = Form(
    "torchtune.yaml",
    """
output_dir: /tmp/out
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: x, max_seq_len: 2048}
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: org/tiny, model_type: LLAMA3}
dataset: {_component_: torchtune.datasets.chat_dataset, source: org/chats, packed: true, split: "train[:95%]"}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
epochs: 1
gradient_accumulation_steps: 8
dtype: bf16
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: false}
""",
)
OPEN_INSTRUCT_SCRIPT = Form(
    "finetune.sh",
    """
    python mason.py --cluster ai2/x --num_nodes 2 --gpus 8 --preemptible -- source profile.sh \\&\\& \\
      accelerate launch \\
      --mixed_precision bf16 --num_processes 8 --use_deepspeed \\
      --deepspeed_config_file configs/ds_configs/stage3_no_offloading_accelerate.conf \\
      open_instruct/finetune.py --model_name_or_path org/tiny --tokenizer_name org/tiny --use_slow_tokenizer \\
      --dataset_mixer_list org/chats 1.0 org/more 200 --max_seq_length 4096 --use_flash_attn \\
      --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --learning_rate 5e-06 --logging_steps 1
    """,
    backend="open_instruct",
)
OPEN_INSTRUCT_FILE = Form(
    "tulu_dpo.yaml",
    """
model_name_or_path: org/tiny
dataset_mixer: {org/pairs: 1.0}
tokenizer_name: org/tiny
use_slow_tokenizer: true
max_seq_length: 2048
preprocessing_num_workers: 16
num_epochs: 1
with_tracking: true
report_to: [wandb]
loss_type: dpo_norm
beta: 5
use_flash_attn: true
""",
    stage="dpo",
    backend="open_instruct",
)
OPENRLHF_SCRIPT = Form(
    "openrlhf.sh",
    """
    deepspeed --module openrlhf.cli.train_sft --max_len 2048 --dataset org/chats --input_key question \\
      --output_key answer --train_batch_size 128 --micro_train_batch_size 2 --pretrain org/tiny \\
      --save_path out --zero_stage 3 --adam_offload --bf16 --max_epochs 1 --packing_samples --use_wandb $WANDB_TOKEN
    """,
)
SWIFT_SCRIPT = Form(
    "swift.sh",
    """
    NPROC_PER_NODE=2 swift sft --model org/tiny --train_type lora --dataset 'org/chats#500' 'org/more' \\
      --lora_rank 8 --target_modules all-linear --split_dataset_ratio 0.01 --eval_steps 100 --torch_dtype bfloat16 \\
      --system 'You are kind.' --deepspeed zero2 --max_length 2048 --warmup_ratio 0.05
    """,
)
OWN_SCRIPT = Form(
    "own.sh",
    """
    DATE=$(date +%F)
    nohup python -u finetune.py --model_name_or_path "$1" --dataset_name org/chats --splits "train,test" \\
      --use_peft_lora True --use_4bit_quantization True --use_reentrant False --use_flash_attn True \\
      --lora_target_modules "q_proj,v_proj" --output_dir "runs/sft-$DATE" \\
      --hf_token hf_abcdefghijklmnopqrstuvwx > log &
    """,
)
FORMS = [
    TRL_SCRIPT, MODULE, ARRAYS, BATCH_SCRIPT, DEEPSPEED, HERE_DOCUMENT, FUNCTION, LLAMA_FACTORY_COMMAND,
    LLAMA_FACTORY_FILE, AXOLOTL_FILE, AXOLOTL_COMMAND, HANDBOOK_MIXER, HANDBOOK_MIXTURE, TORCHTUNE_FILE,
    OPEN_INSTRUCT_SCRIPT, OPEN_INSTRUCT_FILE, OPENRLHF_SCRIPT, SWIFT_SCRIPT, OWN_SCRIPT,
]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What `launch init --from` wrote and said."""

    code: int
    path: Path
    data: dict[str, Any]
    findings: list[dict[str, Any]]

    @property
    def config(self) -> Config:
        return load(self.path)

    @property
    def text(self) -> str:
        return self.path.read_text()

    def findings_of(self, code: str) -> list[dict[str, Any]]:
        return [finding for finding in self.findings if finding["code"] == code]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def init(capsys: Capture, source: Path, *words: str) -> Answer:
    path = next(
        path for path in (source.parent / f"stage_{n}.yaml" for n in range(9)) if not path.exists()
    )
    code = main.main(["init", *words, "--from", str(source), "-o", str(path), "--format", "json"])
    answer = json.loads(capsys.readouterr().out)
    return Answer(code, path, answer.get("data") or {}, answer["findings"])


def write(tmp_path: Path, form: Form) -> Path:
    source = tmp_path / "their" / form.name
    source.parent.mkdir(exist_ok=True)
    source.write_text(form.text)
    return source


def convert(form: Form, tmp_path: Path, capsys: Capture, *words: str) -> Answer:
    answer = init(capsys, write(tmp_path, form), *words)
    assert answer.code == 0, answer.findings
    return answer


def script(text: str, name: str = "train.sh") -> Form:
    return Form(name, text)


def flags_of(form: Form) -> set[str]:
    """The flags and keys of a source, by a reading of its own that knows no tool."""
    if form.name.endswith(("yaml", "yml")):
        return {
            line.partition(":")[0] for line in form.text.splitlines() if re.match(r"\w+:", line)
        }
    lines = [line for line in form.text.splitlines() if not re.match(r"\s*#(?!SBATCH)", line)]
    text = "\n".join(line.replace("#SBATCH", "") for line in lines)
    flags = set(re.findall(r"(?:^|[\s\"(])(--[A-Za-z][\w-]*)", text))
    return flags - {"--config", "--module"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_source_of_each_form_becomes_a_valid_stage(
    form: Form, tmp_path: Path, capsys: Capture
) -> None:
    answer = convert(form, tmp_path, capsys)
    assert (answer.data["stage"], answer.data["backend"]) == (form.stage, form.backend)
    assert main.main(["validate-config", str(answer.path)]) == 0
    model = str(answer.config.args["model_name_or_path"])
    assert model == "org/tiny" or (model.startswith("SET_ME") and "$1" in form.text)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_flag_of_a_source_is_carried_or_named_with_the_reason(
    form: Form, tmp_path: Path, capsys: Capture
) -> None:
    answer = convert(form, tmp_path, capsys)
    carried = answer.data["carried"]
    left_out = answer.data["left_out"]
    written = {name.rpartition(" ")[2].partition(".")[0] for name in (*carried, *left_out)}
    assert flags_of(form) <= written
    assert not carried.keys() & left_out.keys()
    # what is carried stands in the file, and what is left out stands in its comments
    config = answer.config
    for targets in carried.values():
        for target in targets:
            first = target.partition(".")[0]
            is_option = target.startswith("--") or first in config.options
            assert is_option or target in config.args or (tmp_path / "their" / target).exists(), (
                target
            )
    for name, reason in left_out.items():
        assert reason
        assert f"#   {name}" in answer.text


def test_a_name_with_token_in_it_is_no_secret(tmp_path: Path, capsys: Capture) -> None:
    command = (
        "python sft.py --model_name_or_path org/tiny --dataset_name org/chats --save_steps 20_000"
    )
    answer = convert(script(f"{command} --append_concat_token False"), tmp_path, capsys)
    assert answer.config.args["save_steps"] == 20000
    assert "--append_concat_token: False" in answer.text


def test_options_of_launchers_become_launchs_own_keys(tmp_path: Path, capsys: Capture) -> None:
    answer = convert(TRL_SCRIPT, tmp_path, capsys)
    assert answer.config.options["batch"] == {"global": 64, "per_device": 4}
    assert answer.config.options["mixed_precision"] == "bf16"
    assert answer.data["gpus"] == 2
    assert "--main_process_port" in " ".join(answer.data["left_out"])
    assert answer.config.args["warmup_steps"] == 0.1
    assert answer.config.args["max_length"] == 1024
    assert answer.config.args["output_dir"] == "out/tiny"
    assert "--unheard_of" in answer.data["lost"]


def test_a_batch_script_carries_its_directives(tmp_path: Path, capsys: Capture) -> None:
    answer = convert(BATCH_SCRIPT, tmp_path, capsys)
    options = answer.config.options
    assert options["slurm"] == {"account": "me", "partition": "gpu", "time": "12:00:00"}
    assert options["name"] == "tuning"
    assert (answer.data["gpus"], answer.data["nodes"]) == (8, 2)
    assert options["batch"] == {"global": 64, "per_device": 2}
    assert answer.config.args["output_dir"] == "out"


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (ARRAYS, "zero3"),
        (DEEPSPEED, "zero2"),
        (LLAMA_FACTORY_COMMAND, "zero3"),
        (AXOLOTL_FILE, "zero3"),
        (OPEN_INSTRUCT_SCRIPT, "zero3"),
        (OPENRLHF_SCRIPT, "zero3_offload"),
        (SWIFT_SCRIPT, "zero2"),
        (TRL_SCRIPT, "none"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_sharding_becomes_launchs_deepspeed(
    form: Form, name: str, tmp_path: Path, capsys: Capture
) -> None:
    assert convert(form, tmp_path, capsys).config.options["deepspeed"] == name


def test_files_of_accelerate_and_deepspeed_beside_the_script_are_read(
    tmp_path: Path, capsys: Capture
) -> None:
    source = write(
        tmp_path,
        script("accelerate launch --config_file accelerate.yaml trl/scripts/sft.py --model_name_or_path org/tiny "
               "--dataset_name org/chats --per_device_train_batch_size 2\n"),
    )  # fmt: skip
    (source.parent / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\n"
        "dynamo_config: {dynamo_backend: INDUCTOR}\ndeepspeed_config: {deepspeed_config_file: mine.json}\n"
    )
    (source.parent / "mine.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    )
    answer = init(capsys, source)
    options = answer.config.options
    assert (options["deepspeed"], options["mixed_precision"]) == ("zero3_offload", "bf16")
    assert options["batch"] == {"global": 8, "per_device": 2}
    assert answer.config.args["torch_compile"] is True
    assert answer.config.args["torch_compile_backend"] == "inductor"


def test_the_batch_of_a_source_stays_whatever_the_gpus_are(tmp_path: Path, capsys: Capture) -> None:
    for gpus in (1, 4):
        answer = convert(TRL_SCRIPT, tmp_path, capsys, "--gpus", str(gpus))
        assert answer.config.options["batch"] == {"global": 64, "per_device": 4}
        assert f"--gpus {gpus}" in answer.text


def test_an_accumulation_that_counts_gpus_keeps_the_global_batch(
    tmp_path: Path, capsys: Capture
) -> None:
    text = """
    GPUS=$(nvidia-smi -L | wc -l)
    torchrun --nproc_per_node=$GPUS train.py --model_name_or_path org/tiny --dataset_name org/chats \\
      --per_device_train_batch_size 2 --gradient_accumulation_steps $((128 / (GPUS * 2)))
    """
    for gpus in ("1", "8"):
        answer = convert(script(text), tmp_path, capsys, "--gpus", gpus)
        assert answer.config.options["batch"] == {"global": 128, "per_device": 2}


def test_a_script_that_only_divides_by_its_gpus_keeps_the_global_batch(
    tmp_path: Path, capsys: Capture
) -> None:
    text = """
    DEVICES=""
    GPUS=$(echo $DEVICES | awk -F',' '{print NF}')
    deepspeed --include localhost:$DEVICES train.py --model_path org/tiny --data_path org/chats \\
      --per_device_train_batch_size 1 --gradient_accumulation_steps $((512 / $GPUS / 1))
    """
    answer = convert(script(text), tmp_path, capsys)
    assert answer.config.options["batch"] == {"global": 512, "per_device": 1}


def test_flags_of_ones_own_script_mean_what_their_names_say(
    tmp_path: Path, capsys: Capture
) -> None:
    text = """
    CMD="deepspeed main.py \\
      --model_name org/tiny --train_file_dir org/chats --max_train_samples 100 \\
      --mask_user --lora_dim 16 --zero_stage 3 --offload --deepspeed \\
      --run_name run-$(date +%s) --conv_template vicuna"
    $CMD > log
    """
    answer = convert(script(text), tmp_path, capsys)
    args = answer.config.args
    assert args["datasets"] == [{"path": "org/chats", "split": "train[:100]"}]
    assert (args["assistant_only_loss"], args["use_peft"], args["lora_r"]) == (True, True, 16)
    assert answer.config.options["deepspeed"] == "zero3_offload"
    assert args["run_name"] == "run"
    assert "--conv_template" in answer.data["left_out"]


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        (
            "launch.py loss=dpo model=llama ++model.name_or_path=org/tiny datasets=[org/pairs]",
            "dpo",
        ),
        ("train.py --beta 0.1 --model_name_or_path org/tiny --dataset_name org/pairs", "dpo"),
        ("run_dpo.py --model_name_or_path org/tiny --dataset_name org/pairs", "dpo"),
        (
            "qlora.py --bits 4 --double_quant --model_name_or_path org/tiny --dataset org/chats",
            "sft",
        ),
        ("main.py --model org/tiny --dataset org/chats --lr 1e-4", "sft"),
    ],
)
def test_the_stage_is_told_by_the_program_or_by_its_flags(
    command: str, stage: str, tmp_path: Path, capsys: Capture
) -> None:
    answer = convert(script(f"accelerate launch {command} --learning_rate 1e-5"), tmp_path, capsys)
    assert answer.data["stage"] == stage
    assert answer.config.args["model_name_or_path"] == "org/tiny"
    assert answer.config.args["dataset_name"] in ("org/chats", "org/pairs")


def test_verls_overrides_are_read(tmp_path: Path, capsys: Capture) -> None:
    text = """
    torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=rows.parquet \\
      data.micro_batch_size_per_gpu=4 data.train_batch_size=64 model.partial_pretrain=org/tiny optim.lr=1e-4 \\
      model.lora_rank=8 trainer.default_local_dir=out trainer.total_epochs=2
    """
    config = convert(script(text), tmp_path, capsys).config
    assert config.options["batch"] == {"global": 64, "per_device": 4}
    expected = {"learning_rate": 1e-4, "lora_r": 8, "num_train_epochs": 2, "output_dir": "out"}
    assert expected.items() <= config.args.items()


def test_a_variable_that_the_script_does_not_set_is_named(tmp_path: Path, capsys: Capture) -> None:
    text = """
    python sft.py --model_name_or_path $1 --dataset_name $DATA --learning_rate $LR \\
      --output_dir "out/${NAME:-plain}-$(date +%s)"
    """
    answer = convert(script(text), tmp_path, capsys)
    args = answer.config.args
    assert args["output_dir"] == "out/plain"
    assert args["model_name_or_path"] == "SET_ME_1"
    assert args["dataset_name"] == "SET_ME_DATA"
    assert "learning_rate" not in args
    assert "`$LR`" in answer.data["left_out"]["--learning_rate"]
    notes = answer.findings_of("converted")
    assert {finding["line"] for finding in notes} >= {2, 3}


def test_arguments_of_the_script_can_be_given(tmp_path: Path, capsys: Capture) -> None:
    text = """
    MODEL=""
    while [[ $# -gt 0 ]]; do
      case $1 in
        --model) MODEL="$2"; shift 2 ;;
        --lr) LR="$2"; shift 2 ;;
        *) exit 1 ;;
      esac
    done
    python sft.py --model_name_or_path $MODEL --dataset_name org/chats --learning_rate $LR --output_dir out
    """
    answer = convert(script(text), tmp_path, capsys, "--script-args", "--model org/tiny --lr 1e-4")
    assert answer.config.args["model_name_or_path"] == "org/tiny"
    assert answer.config.args["learning_rate"] == 1e-4


def test_a_comment_between_continued_lines_is_carried_with_a_warning(
    tmp_path: Path, capsys: Capture
) -> None:
    text = (
        "trl sft --model_name_or_path org/tiny \\\n  # the data\n  --dataset_name org/chats \\\n"
        "  # --packing \\\n  --output_dir out\n"
    )
    answer = convert(script(text), tmp_path, capsys)
    assert answer.config.args["dataset_name"] == "org/chats"
    assert "packing" not in answer.config.args
    assert [finding["line"] for finding in answer.findings_of("cut-command")] == [2, 4]


@pytest.mark.parametrize(
    "secret",
    [
        "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz",
        "WANDB_API_KEY=0123456789012345678901234567890123456789",
        "export OPENAI_API_KEY='sk-abcdefghijklmnopqrstuvwxyz'",
    ],
)
def test_secrets_are_named_and_never_written(secret: str, tmp_path: Path, capsys: Capture) -> None:
    name = secret.removeprefix("export ").partition("=")[0]
    value = secret.partition("=")[2].strip("'")
    command = f"trl sft --model_name_or_path org/tiny --dataset_name org/chats --hub_token ${name}"
    text = f"{secret}\nexport {name}\n{command}\n"
    answer = convert(script(text), tmp_path, capsys)
    assert {name, "--hub_token"} <= set(answer.data["left_out"])
    assert value not in answer.text + json.dumps(answer.data) + json.dumps(answer.findings)


@pytest.mark.parametrize("name", [".hidden/config.yaml", "words.txt", "words"])
def test_a_source_cannot_show_what_any_file_holds(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("private_words: 17\nnum_processes: 3\n")
    command = f"accelerate launch --config_file {file} train_sft.py {file} --model_name_or_path org/tiny --lr 1e-5"
    answer = init(capsys, write(tmp_path, script(f"{command}\nbash {file}\n. {file}\n")))
    assert answer.code == 0
    assert "private_words" not in answer.text + json.dumps(answer.data) + json.dumps(
        answer.findings
    )


def test_nothing_of_a_script_is_run(tmp_path: Path, capsys: Capture) -> None:
    mark = tmp_path / "ran"
    text = f"""
    touch {mark}
    X=$(touch {mark})
    eval "touch {mark}"
    trl sft --model_name_or_path org/tiny --dataset_name `touch {mark}` --output_dir out
    """
    assert init(capsys, write(tmp_path, script(text))).code == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "ssh node 'cd work; {command}'",
        'tmux new-session -d -s train "{command}"',
        "sbatch --nodes=1 --wrap='{command}'",
        "sbatch <<EOF\n#!/bin/bash\n{command}\nEOF",
        "cat > job.sh <<EOF\n{command}\nEOF\nsbatch job.sh",
        "LOG=$({command})",
        "if ! {command}; then exit 1; fi",
        "{command} && echo done",
        "( cd work && {command} ) > log 2>&1 &",
        "for seed in 1 2; do\n{command}\ndone",
        "nohup stdbuf -oL timeout 3h numactl -N 0 {command} | tee log",
        "docker run --gpus all -v /a:/b image:latest {command}",
        "conda run -n env {command}",
        "CMD='{command}'\necho $CMD\neval $CMD",
        "WRAP='uv run --frozen'\n$WRAP {command}",
        "{command} ; python evaluate.py --model out",
    ],
)
def test_a_command_is_seen_wherever_it_stands(text: str, tmp_path: Path, capsys: Capture) -> None:
    command = "trl sft --model_name_or_path org/tiny --dataset_name org/chats --output_dir out"
    answer = convert(script(text.format(command=command)), tmp_path, capsys)
    args = answer.config.args
    assert (args["model_name_or_path"], args["dataset_name"], args["output_dir"]) == (
        "org/tiny",
        "org/chats",
        "out",
    )


@pytest.mark.parametrize(
    ("start", "gpus", "nodes"),
    [
        ("torchrun --nproc_per_node=4 -m trl.scripts.sft", 4, 1),
        ("torchrun --nproc-per-node 2 --nnodes 1:2 trl/scripts/sft.py", 2, 2),
        (
            "python3 -u -m torch.distributed.launch --use_env --nproc_per_node 8 trl/scripts/sft.py",
            8,
            1,
        ),
        ("deepspeed --num_gpus=4 trl/scripts/sft.py", 4, 1),
        ("accelerate launch --num_machines 2 --num_processes 16 trl/scripts/sft.py", 8, 2),
        ("python -m accelerate.commands.launch --num_processes=2 trl/scripts/sft.py", 2, 1),
        ("CUDA_VISIBLE_DEVICES=0,3,5 python trl/scripts/sft.py", 3, 1),
        ("ARGS='--nproc_per_node 2'\ntorchrun $ARGS trl/scripts/sft.py", 2, 1),
        ("trl sft --num_processes 4", 4, 1),
    ],
)
def test_devices_are_those_of_the_launcher(
    start: str, gpus: int, nodes: int, tmp_path: Path, capsys: Capture
) -> None:
    flags = "--model_name_or_path org/tiny --dataset_name org/chats --per_device_train_batch_size 2"
    answer = convert(script(f"{start} {flags}".replace("\\n", "\n")), tmp_path, capsys)
    assert (answer.data["gpus"], answer.data["nodes"]) == (gpus, nodes)
    assert answer.config.options["batch"] == {"global": 2 * gpus * nodes, "per_device": 2}


def test_torchtunes_command_line_names_the_recipe_that_is_not_here(
    tmp_path: Path, capsys: Capture
) -> None:
    text = "tune run --nproc_per_node 4 lora_finetune_distributed --config llama3_1/8B_lora epochs=2 optimizer.lr=1e-4\n"
    answer = convert(script(text), tmp_path, capsys)
    assert answer.findings_of("missing-source")
    assert answer.config.args["num_train_epochs"] == 2
    assert answer.config.args["learning_rate"] == 1e-4
    source = write(tmp_path, script(text.replace("llama3_1/8B_lora", "mine.yaml")))
    (source.parent / "mine.yaml").write_text(TORCHTUNE_FILE.text)
    args = init(capsys, source).config.args
    assert (args["num_train_epochs"], args["learning_rate"], args["lora_r"]) == (2, 1e-4, 8)


def test_a_script_that_starts_another_one_is_followed(tmp_path: Path, capsys: Capture) -> None:
    source = write(
        tmp_path, script("export MODEL=org/tiny\nsrun --nodes=2 -p gpu bash inner.sh out/x\n")
    )
    (source.parent / "inner.sh").write_text(
        "#SBATCH --time=1:00:00\ntrl sft --model_name_or_path $MODEL --dataset_name org/chats --output_dir $1\n"
    )
    answer = init(capsys, source)
    assert answer.config.args["output_dir"] == "out/x"
    assert answer.config.options["slurm"] == {"partition": "gpu", "time": "1:00:00"}
    assert answer.data["nodes"] == 2


def test_the_training_of_the_stage_is_taken_and_the_others_are_named(
    tmp_path: Path, capsys: Capture
) -> None:
    text = """
    trl sft --model_name_or_path org/tiny --dataset_name org/chats --output_dir a
    trl dpo --model_name_or_path org/tiny --dataset_name org/pairs --output_dir b
    """
    first = convert(script(text), tmp_path, capsys)
    assert (first.data["stage"], first.config.args["output_dir"]) == ("sft", "a")
    assert any("trl dpo" in remark for remark in first.data["remarks"])
    second = convert(script(text), tmp_path, capsys, "dpo")
    assert (second.data["stage"], second.config.args["output_dir"]) == ("dpo", "b")


@pytest.mark.parametrize(
    ("text", "code", "finding", "line"),
    [
        ("echo hello\n", 3, "no-training", 1),
        ("\npython serve.py --port 80\n", 3, "no-training", 2),
        (
            "accelerate launch grpo.py --model_name_or_path a --learning_rate 1\n",
            3,
            "no-training",
            1,
        ),
        ("bash nowhere.sh\n", 3, "missing-file", 1),
        ("accelerate launch scripts/$1.py --config $C\n", 3, "no-training", 1),
        ("accelerate launch run_sft.py --config $C\n", 0, "missing-source", 1),
        ("accelerate launch run_sft.py nowhere.yaml\n", 0, "missing-source", 1),
    ],
)
def test_a_script_without_a_training_is_an_error_with_its_line(
    text: str, code: int, finding: str, line: int, tmp_path: Path, capsys: Capture
) -> None:
    answer = init(capsys, write(tmp_path, script(text)))
    assert answer.code == code
    assert [found["line"] for found in answer.findings_of(finding)] == [line]
    assert answer.path.exists() is (code == 0)


def test_a_config_that_the_command_names_is_read_with_its_overrides(
    tmp_path: Path, capsys: Capture
) -> None:
    source = write(
        tmp_path, script("accelerate launch run_sft.py recipes/sft.yaml --learning_rate=3e-5\n")
    )
    recipe = source.parent / "recipes" / "sft.yaml"
    recipe.parent.mkdir()
    recipe.write_text(HANDBOOK_MIXER.text + "learning_rate: 1.0e-5\n")
    answer = init(capsys, source)
    assert answer.config.args["learning_rate"] == 3e-5
    assert answer.config.args["datasets"][0]["path"] == "org/chats"


def test_an_inline_template_is_written_beside(tmp_path: Path, capsys: Capture) -> None:
    answer = convert(HANDBOOK_MIXER, tmp_path, capsys)
    template = Path(answer.config.args["chat_template_path"])
    assert template.parent == answer.path.parent
    assert template.read_text() == "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_mixers_keep_their_shares_and_splits(tmp_path: Path, capsys: Capture) -> None:
    older = convert(HANDBOOK_MIXER, tmp_path, capsys).config.args["datasets"]
    assert older == [
        {"path": "org/chats", "split": "train_sft[:50%]"},
        {"path": "org/more", "split": "train_sft"},
    ]
    newer = convert(HANDBOOK_MIXTURE, tmp_path, capsys).config.args
    assert newer["datasets"][1] == {
        "path": "org/more",
        "split": "train[:25%]",
        "columns": ["chosen", "rejected"],
    }
    assert newer["test_split_size"] == 0.1
    assert newer["eval_strategy"] == "steps"


def test_a_single_set_keeps_its_test_split(tmp_path: Path, capsys: Capture) -> None:
    text = HANDBOOK_MIXER.text.replace("org/chats: 0.5, org/more: 1.0", "org/chats: 1.0")
    args = convert(Form("one.yaml", text), tmp_path, capsys).config.args
    names = ("dataset_name", "dataset_train_split", "dataset_test_split", "eval_strategy")
    assert [args[name] for name in names] == ["org/chats", "train_sft", "test_sft", "epoch"]


def test_what_trl_can_say_of_sets_is_carried(tmp_path: Path, capsys: Capture) -> None:
    """trl/scripts/utils.py:get_dataset takes several sets, each with a split, and splits off a part of them."""
    args = convert(AXOLOTL_FILE, tmp_path, capsys).config.args
    assert args["datasets"] == [{"path": "org/chats"}, {"path": "org/more", "split": "train[:20%]"}]
    assert args["test_split_size"] == 0.05
    samples = convert(LLAMA_FACTORY_COMMAND, tmp_path, capsys).config.args
    assert samples["datasets"] == [{"path": "org/chats", "split": "train[:1000]"}]
    assert (samples["test_split_size"], samples["eval_strategy"]) == (0.1, "steps")
    swift = convert(SWIFT_SCRIPT, tmp_path, capsys).config.args
    assert swift["datasets"] == [
        {"path": "org/chats", "split": "train[:500]"},
        {"path": "org/more"},
    ]
    assert (swift["test_split_size"], swift["eval_strategy"], swift["eval_steps"]) == (
        0.01,
        "steps",
        100,
    )


@pytest.mark.parametrize(
    ("form", "key"),
    [(LLAMA_FACTORY_COMMAND, "assistant_only_loss"), (AXOLOTL_FILE, "assistant_only_loss"),
     (OPENRLHF_SCRIPT, "assistant_only_loss"), (SWIFT_SCRIPT, "assistant_only_loss"),
     (TORCHTUNE_FILE, "assistant_only_loss")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_tools_that_mask_questions_still_do(
    form: Form, key: str, tmp_path: Path, capsys: Capture
) -> None:
    assert convert(form, tmp_path, capsys).config.args[key] is True


@pytest.mark.parametrize("form", [LLAMA_FACTORY_COMMAND, AXOLOTL_FILE], ids=lambda form: form.name)
def test_tools_that_are_asked_to_train_on_questions_do(
    form: Form, tmp_path: Path, capsys: Capture
) -> None:
    text = form.text.replace("train_on_inputs: false", "train_on_inputs: true")
    text = text.replace("--plot_loss", "--train_on_prompt")
    args = convert(Form(form.name, text), tmp_path, capsys).config.args
    assert args["completion_only_loss"] is False
    assert "assistant_only_loss" not in args


def dataset_info(folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (data / "chats.json").write_text(json.dumps([{"messages": chats}]))
    (data / "alpaca.json").write_text(
        json.dumps([{"instruction": "hi", "input": "", "output": "yes"}])
    )
    info = {
        "mine": {"file_name": "chats.json", "formatting": "sharegpt"},
        "questions": {"file_name": "alpaca.json"},
        "public": {"hf_hub_url": "org/public", "subset": "en", "split": "train_sft"},
    }
    (data / "dataset_info.json").write_text(json.dumps(info))


def test_dataset_info_beside_the_file_tells_the_sets(tmp_path: Path, capsys: Capture) -> None:
    source = write(tmp_path, Form("lf.yaml", LLAMA_FACTORY_FILE.text.replace("dpo", "sft")))
    source.write_text(source.read_text().replace("org/pairs, org/more", "mine, public"))
    dataset_info(source.parent)
    answer = init(capsys, source)
    assert answer.code == 0, answer.findings
    own = str(source.parent / "data" / "chats.json")
    assert answer.config.args["datasets"] == [
        {"path": "json", "data_files": own},
        {"path": "org/public", "name": "en", "split": "train_sft"},
    ]


def test_rows_that_lie_here_are_to_be_converted_first(tmp_path: Path, capsys: Capture) -> None:
    source = write(tmp_path, Form("lf.yaml", LLAMA_FACTORY_FILE.text.replace("dpo", "sft")))
    source.write_text(source.read_text().replace("org/pairs, org/more", "questions"))
    dataset_info(source.parent)
    answer = init(capsys, source)
    assert answer.code == 0, answer.findings
    assert answer.config.args["datasets"] == [
        {"path": "json", "data_files": "converted/alpaca.jsonl"}
    ]
    assert answer.config.args["assistant_only_loss"] is True
    command = next(remark for remark in answer.data["remarks"] if "launch data convert" in remark)
    words = command.partition("launch ")[2].split()
    assert main.main(words) == 0
    assert main.main(["validate-config", str(answer.path), "--strict"]) == 0


def test_a_local_file_is_data_of_its_reader(tmp_path: Path, capsys: Capture) -> None:
    source = write(
        tmp_path,
        script("python train.py --model_name_or_path org/tiny --data_path rows.jsonl --lr 1e-5\n"),
    )
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = source.parent / "rows.jsonl"
    rows.write_text(json.dumps({"messages": chats}) + "\n")
    answer = init(capsys, source)
    assert answer.config.args["datasets"] == [{"path": "json", "data_files": str(rows)}]
    rows.unlink()
    answer = init(capsys, source)
    assert answer.code == 0
    assert answer.findings_of("missing-data")


def test_open_instructs_own_names_are_renewed(tmp_path: Path, capsys: Capture) -> None:
    answer = convert(OPEN_INSTRUCT_FILE, tmp_path, capsys)
    args = answer.config.args
    assert args["mixer_list"] == ["org/pairs", 1.0]
    assert args["tokenizer_name_or_path"] == "org/tiny"
    assert args["use_fast"] is False
    assert args["report_to"] == "wandb"
    assert "use_flash_attn" in answer.data["left_out"]
    script_args = convert(OPEN_INSTRUCT_SCRIPT, tmp_path, capsys).config
    assert script_args.args["dataset_mixer_list"] == ["org/chats", 1.0, "org/more", 200]
    assert script_args.options["batch"] == {"global": 32, "per_device": 1}


def test_the_global_batch_of_openrlhf_is_launchs(tmp_path: Path, capsys: Capture) -> None:
    options = convert(OPENRLHF_SCRIPT, tmp_path, capsys).config.options
    assert options["batch"] == {"global": 128, "per_device": 2}


def test_findings_name_file_and_line_of_the_source(tmp_path: Path, capsys: Capture) -> None:
    answer = convert(TRL_SCRIPT, tmp_path, capsys)
    unknown = [
        finding
        for finding in answer.findings_of("no-counterpart")
        if "--unheard_of" in finding["message"]
    ]
    assert [(finding["file"], finding["line"]) for finding in unknown] == [
        (str(tmp_path / "their" / "train.sh"), 16)
    ]


@pytest.mark.parametrize(
    "text",
    ["", "\0", "if then fi ((", "$( $( $(", "cat <<EOF\n", "${", "a=(\n" * 200, "{ " * 200, "x() { x; }; x\n",
     "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "trl sft --model_name_or_path $A\n", "while true; do trl; done\n",
     "x() { x; x; x; x; x; }; x\n", "while [ 1 ]; do set -- a $@ $@; done\n", "case $1 in", "'unclosed",
     '"unclosed', "`", "for x in 1 2 3", "[[ -n", "((1+"],
)  # fmt: skip
def test_a_broken_script_ends_in_an_error_and_nothing_else(
    text: str, tmp_path: Path, capsys: Capture
) -> None:
    answer = init(capsys, write(tmp_path, script(text)))
    assert answer.code in (0, 3)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (
            "torchrun --nproc_per_node 8 src/scripts/train/sft/OLMo-sft.py train run ckpt ai2/x --seq_len=4096",
            "OLMo-core",
        ),
        (
            "python OLMo/src/scripts/train/sft/Olmo-3-7B-SFT.py launch run ckpt x --dataset_path d",
            "OLMo-core",
        ),
        (
            'torchrun "${OLMOCORE_PATH}/src/scripts/train/sft/OLMo-sft.py" train --save_folder=o',
            "OLMo-core",
        ),
    ],
)
def test_sft_on_olmo_core_is_named_as_not_supported(
    command: str, name: str, tmp_path: Path, capsys: Capture
) -> None:
    answer = init(capsys, write(tmp_path, script(f"set -e\n{command}\n")))
    (finding,) = answer.findings
    assert (answer.code, finding["code"], finding["line"]) == (3, "no-training", 2)
    assert name in finding["message"] and "not support" in finding["message"]
    assert "launch init sft --model NAME --data NAME" in finding["help"]
    assert not answer.path.exists()


@pytest.mark.parametrize(
    "program", ["src/scripts/train/sft.py", "olmo_sft.py", "train_sft_olmo.py"]
)
def test_a_script_of_ones_own_about_olmo_is_none_of_olmo_core(
    program: str, tmp_path: Path, capsys: Capture
) -> None:
    command = (
        f"python {program} --model_name_or_path org/tiny --dataset_name org/chats --output_dir o"
    )
    assert (
        convert(script(command), tmp_path, capsys).config.args["model_name_or_path"] == "org/tiny"
    )


NEW_MODEL_AND_DATA = ("--model", "org/other", "--data", "org/rows")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_model_and_data_that_are_named_take_the_place_of_the_sources(
    form: Form, tmp_path: Path, capsys: Capture
) -> None:
    answer = convert(form, tmp_path, capsys, *NEW_MODEL_AND_DATA)
    args = answer.config.args
    assert args["model_name_or_path"] == "org/other"
    data = [
        args.get(name) for name in ("dataset_name", "dataset_mixer_list", "mixer_list", "datasets")
    ]
    assert [value for value in data if value is not None] in (
        ["org/rows"],
        [["org/rows", 1.0]],
        [[{"path": "org/rows"}]],
    )
    assert "SET_ME" not in answer.text
    named = answer.data["carried"].keys() | answer.data["left_out"].keys()
    assert flags_of(form) - {name.split(" ")[-1] for name in named} == set()
    assert main.main(["validate-config", str(answer.path)]) == 0


def test_what_was_said_of_the_sources_model_and_data_goes_with_them(
    tmp_path: Path, capsys: Capture
) -> None:
    text = (
        "trl sft --model_name_or_path $1 --model_revision abc --dataset_name org/chats "
        "--dataset_train_split train_sft --learning_rate 1e-5 --output_dir o"
    )
    answer = convert(script(text), tmp_path, capsys, *NEW_MODEL_AND_DATA)
    assert answer.config.args == {
        "model_name_or_path": "org/other", "dataset_name": "org/rows", "learning_rate": 1e-5, "output_dir": "o",
    }  # fmt: skip
    assert answer.findings_of("converted") == []
    for flag in ("--model_name_or_path", "--model_revision"):
        assert answer.data["left_out"][flag] == "`--model` takes its place"
    for flag in ("--dataset_name", "--dataset_train_split"):
        assert answer.data["left_out"][flag] == "`--data` takes its place"
    assert answer.data["lost"] == []


def test_one_of_both_leaves_the_other(tmp_path: Path, capsys: Capture) -> None:
    form = script("trl sft --model_name_or_path org/tiny --dataset_name org/chats --output_dir o")
    args = convert(form, tmp_path, capsys, "--data", "org/rows").config.args
    assert (args["model_name_or_path"], args["dataset_name"]) == ("org/tiny", "org/rows")
    args = convert(form, tmp_path, capsys, "--model", "org/other").config.args
    assert (args["model_name_or_path"], args["dataset_name"]) == ("org/other", "org/chats")


def test_local_rows_that_are_named_are_loaded_by_their_file(
    tmp_path: Path, capsys: Capture
) -> None:
    pair = {"prompt": "What is it?", "completion": "A list."}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(pair)}\n" * 4)
    form = script(
        "python train.py --model_name_or_path org/tiny --data_path org/chats --mask_prompt True --output_dir o"
    )
    args = convert(form, tmp_path, capsys, "--data", str(rows)).config.args
    assert args["datasets"] == [{"path": "json", "data_files": str(rows)}]
    # the argument of rows with `prompt` and `completion`, not that of chats
    assert args["completion_only_loss"] is True
    assert "assistant_only_loss" not in args


def test_the_part_that_is_held_out_is_taken_of_the_data_that_are_named(
    tmp_path: Path, capsys: Capture
) -> None:
    args = convert(AXOLOTL_FILE, tmp_path, capsys, *NEW_MODEL_AND_DATA).config.args
    before = convert(AXOLOTL_FILE, tmp_path, capsys).config.args
    assert args.get("test_split_size") == before.get("test_split_size")
    assert args.get("datasets", args.get("dataset_name")) in ([{"path": "org/rows"}], "org/rows")


def test_the_trainer_is_that_of_the_source(tmp_path: Path, capsys: Capture) -> None:
    form = script("trl sft --model_name_or_path org/tiny --dataset_name org/chats --output_dir o")
    answer = init(capsys, write(tmp_path, form), "--backend", "open_instruct")
    assert (answer.code, answer.findings[0]["code"]) == (2, "useless-option")


def test_the_split_that_is_evaluated_then_is_named(tmp_path: Path, capsys: Capture) -> None:
    form = script(
        "trl sft --model_name_or_path org/tiny --dataset_name org/chats --dataset_test_split test_sft "
        "--eval_strategy epoch --output_dir o"
    )
    answer = convert(form, tmp_path, capsys, "--data", "org/rows")
    assert "dataset_test_split" not in answer.config.args
    assert "the split `test` of org/rows" in answer.text
    # a file has no other split: nothing is left to evaluate on
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a text"}) + "\n")
    answer = convert(form, tmp_path, capsys, "--data", str(rows))
    assert "eval_strategy" not in answer.config.args
    assert "nothing to evaluate on" in answer.data["left_out"]["--eval_strategy"]
