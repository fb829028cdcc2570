"""`launch init --from`: a foreign script or config becomes a valid stage file, no flag is lost."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.cli.main import main
from launcher.config.load import Config, load


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
    uv run --frozen python -m torch.distributed.run --nproc_per_node=4 --nnodes 2 \\
        --rdzv_backend c10d -m trl.scripts.dpo --model_name_or_path org/tiny \\
        --dataset_name org/pairs --beta 0.2 --max_prompt_length 512 \\
        --learning_rate 5e-7 --output_dir out
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
      --batch_size 2 --grad_accum $((64 / (2 * SLURM_NNODES * SLURM_GPUS_ON_NODE))) \\
      --save_path out/$SLURM_JOB_ID
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
      bash -c "torchrun --nproc_per_node 2 train.py --model_path $model --dataset org/chats \\
        --lora_rank 16"
    }
    train org/tiny
    """,
)
LLAMA_FACTORY_COMMAND = Form(
    "lf.sh",
    """
    FORCE_TORCHRUN=1 llamafactory-cli train \\
        --stage sft --do_train --model_name_or_path org/tiny --dataset org/chats --template qwen \\
        --finetuning_type lora --lora_target all --cutoff_len 2048 --max_samples 1000 \\
        --val_size 0.1 --eval_strategy steps --eval_steps 50 --output_dir out \\
        --deepspeed ds_z3_config.json --plot_loss
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
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj]
  lora_rank: 8
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: org/tiny
  model_type: LLAMA3
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: org/chats
  packed: true
  split: "train[:95%]"
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
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
    python mason.py --cluster ai2/x --num_nodes 2 --gpus 8 --preemptible -- \\
      source profile.sh \\&\\& \\
      accelerate launch \\
      --mixed_precision bf16 --num_processes 8 --use_deepspeed \\
      --deepspeed_config_file configs/ds_configs/stage3_no_offloading_accelerate.conf \\
      open_instruct/finetune.py --model_name_or_path org/tiny --tokenizer_name org/tiny \\
      --use_slow_tokenizer --dataset_mixer_list org/chats 1.0 org/more 200 --max_seq_length 4096 \\
      --use_flash_attn --per_device_train_batch_size 1 --gradient_accumulation_steps 2 \\
      --learning_rate 5e-06 --logging_steps 1
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
    deepspeed --module openrlhf.cli.train_sft --max_len 2048 --dataset org/chats \\
      --input_key question --output_key answer --train_batch_size 128 --micro_train_batch_size 2 \\
      --pretrain org/tiny --save_path out --zero_stage 3 --adam_offload --bf16 --max_epochs 1 \\
      --packing_samples --use_wandb $WANDB_TOKEN
    """,
)
SWIFT_SCRIPT = Form(
    "swift.sh",
    """
    NPROC_PER_NODE=2 swift sft --model org/tiny --train_type lora \\
      --dataset 'org/chats#500' 'org/more' --lora_rank 8 --target_modules all-linear \\
      --split_dataset_ratio 0.01 --eval_steps 100 --torch_dtype bfloat16 \\
      --system 'You are kind.' --deepspeed zero2 --max_length 2048 --warmup_ratio 0.05
    """,
)
OWN_SCRIPT = Form(
    "own.sh",
    """
    DATE=$(date +%F)
    nohup python -u finetune.py --model_name_or_path "$1" --dataset_name org/chats \\
      --splits "train,test" --use_peft_lora True --use_4bit_quantization True \\
      --use_reentrant False --use_flash_attn True \\
      --lora_target_modules "q_proj,v_proj" --output_dir "runs/sft-$DATE" \\
      --hf_token hf_abcdefghijklmnopqrstuvwx > log &
    """,
)
FORMS = [
    TRL_SCRIPT,
    MODULE,
    ARRAYS,
    BATCH_SCRIPT,
    DEEPSPEED,
    HERE_DOCUMENT,
    FUNCTION,
    LLAMA_FACTORY_COMMAND,
    LLAMA_FACTORY_FILE,
    AXOLOTL_FILE,
    AXOLOTL_COMMAND,
    HANDBOOK_MIXER,
    HANDBOOK_MIXTURE,
    TORCHTUNE_FILE,
    OPEN_INSTRUCT_SCRIPT,
    OPEN_INSTRUCT_FILE,
    OPENRLHF_SCRIPT,
    SWIFT_SCRIPT,
    OWN_SCRIPT,
]


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
    def args(self) -> dict[str, Any]:
        return self.config.args

    @property
    def options(self) -> dict[str, Any]:
        return self.config.options

    @property
    def left_out(self) -> dict[str, str]:
        """The reason of each flag that is left out."""
        reasons: dict[str, str] = self.data["left_out"]
        return reasons

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def everything(self) -> str:
        """All that is written or said."""
        return self.text + json.dumps(self.data) + json.dumps(self.findings)

    def lines_of(self, code: str) -> list[int]:
        """The lines of the source that the findings of a code name."""
        return [finding["line"] for finding in self.findings if finding["code"] == code]


Init = Callable[..., Answer]
MODEL = "--model_name_or_path org/tiny"
FLAGS = f"{MODEL} --dataset_name org/chats --output_dir out"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def their(tmp_path: Path) -> Path:
    """The folder of the source."""
    folder = tmp_path / "their"
    folder.mkdir()
    return folder


@pytest.fixture
def init(their: Path, capsys: pytest.CaptureFixture[str]) -> Init:
    """Write a source and convert it; a text is a script."""

    def init_from(source: Form | str, *words: str) -> Answer:
        form = Form("train.sh", source) if isinstance(source, str) else source
        source_path = their / form.name
        source_path.write_text(form.text)
        path = their / "stage.yaml"
        path.unlink(missing_ok=True)
        options = ["--from", str(source_path), "-o", str(path), "--format", "json"]
        code = main(["init", *words, *options])
        answer = json.loads(capsys.readouterr().out)
        return Answer(code, path, answer.get("data") or {}, answer["findings"])

    return init_from


@pytest.fixture
def convert(init: Init) -> Init:
    """Convert a source without an error."""

    def converted(source: Form | str, *words: str) -> Answer:
        answer = init(source, *words)
        assert answer.code == 0, answer.findings
        return answer

    return converted


def flags_of(form: Form) -> set[str]:
    """The flags and keys of a source, by a reading of its own that knows no tool."""
    if form.name.endswith(("yaml", "yml")):
        return set(re.findall(r"^\w+(?=:)", form.text, re.M))
    without_comments = re.sub(r"^\s*#(?!SBATCH).*", "", form.text, flags=re.M)
    text = without_comments.replace("#SBATCH", "")
    flags = set(re.findall(r"(?:^|[\s\"(])(--[A-Za-z][\w-]*)", text, re.M))
    return flags - {"--config", "--module"}


def named_flags(answer: Answer) -> set[str]:
    """The flags and keys of the source that are carried or left out."""
    names = (*answer.data["carried"], *answer.left_out)
    return {name.rpartition(" ")[2].partition(".")[0] for name in names}


EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


@EACH_FORM
def test_a_source_of_each_form_becomes_a_valid_stage_that_accounts_for_every_flag(
    form: Form, convert: Init, their: Path
) -> None:
    answer = convert(form)
    assert answer.data["stage"] == form.stage
    assert answer.data["backend"] == form.backend
    assert main(["validate-config", str(answer.path)]) == 0
    expected_model = "SET_ME_1" if form is OWN_SCRIPT else "org/tiny"
    assert answer.args["model_name_or_path"] == expected_model

    assert flags_of(form) <= named_flags(answer)
    carried = answer.data["carried"]
    assert not carried.keys() & answer.left_out.keys()
    # what is carried stands in the file, and what is left out stands in its comments
    keys = answer.args.keys() | answer.options.keys()
    for targets in carried.values():
        for target in targets:
            is_key = target in keys or target.partition(".")[0] in answer.options
            assert is_key or target.startswith("--") or (their / target).exists()
    for name, reason in answer.left_out.items():
        assert reason
        assert f"#   {name}" in answer.text


def test_a_name_with_token_in_it_is_no_secret(convert: Init) -> None:
    answer = convert(f"python sft.py {FLAGS} --save_steps 20_000 --append_concat_token False")
    assert answer.args["save_steps"] == 20000
    assert "--append_concat_token: False" in answer.text


def test_options_of_launchers_become_launchs_own_keys(convert: Init, their: Path) -> None:
    answer = convert(TRL_SCRIPT)
    assert answer.options["batch"] == {"global": 64, "per_device": 4}
    assert answer.options["mixed_precision"] == "bf16"
    assert answer.data["gpus"] == 2
    assert "--main_process_port" in " ".join(answer.left_out)
    assert answer.args["warmup_steps"] == 0.1
    assert answer.args["max_length"] == 1024
    assert answer.args["output_dir"] == "out/tiny"
    # what launch knows nothing of is lost, with its line
    assert "--unheard_of" in answer.data["lost"]
    (finding,) = [f for f in answer.findings if "--unheard_of" in f["message"]]
    assert finding["code"] == "no-counterpart"
    assert finding["file"] == str(their / "train.sh")
    assert finding["line"] == 16


def test_a_batch_script_carries_its_directives(convert: Init) -> None:
    answer = convert(BATCH_SCRIPT)
    assert answer.options["slurm"] == {"account": "me", "partition": "gpu", "time": "12:00:00"}
    assert answer.options["name"] == "tuning"
    assert answer.options["batch"] == {"global": 64, "per_device": 2}
    assert answer.data["gpus"] == 8
    assert answer.data["nodes"] == 2
    assert answer.args["output_dir"] == "out"


@pytest.mark.parametrize(
    "form, name",
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
def test_sharding_becomes_launchs_deepspeed(form: Form, name: str, convert: Init) -> None:
    assert convert(form).options["deepspeed"] == name


ACCELERATE = """\
distributed_type: DEEPSPEED
num_processes: 4
mixed_precision: bf16
dynamo_config: {dynamo_backend: INDUCTOR}
deepspeed_config: {deepspeed_config_file: mine.json}
"""


def test_files_of_accelerate_and_deepspeed_beside_the_script_are_read(
    convert: Init, write: Write, their: Path
) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    write("their/mine.json", json.dumps({"zero_optimization": zero}))
    write("their/accelerate.yaml", ACCELERATE)
    program = "accelerate launch --config_file accelerate.yaml trl/scripts/sft.py"
    answer = convert(f"{program} {FLAGS} --per_device_train_batch_size 2")
    assert answer.options["deepspeed"] == "zero3_offload"
    assert answer.options["mixed_precision"] == "bf16"
    assert answer.options["batch"] == {"global": 8, "per_device": 2}
    assert answer.args["torch_compile"] is True
    assert answer.args["torch_compile_backend"] == "inductor"


COUNTED = f"""
    GPUS=$(nvidia-smi -L | wc -l)
    torchrun --nproc_per_node=$GPUS train.py {FLAGS} \\
      --per_device_train_batch_size 2 --gradient_accumulation_steps $((128 / (GPUS * 2)))
"""
DIVIDED = """
    DEVICES=""
    GPUS=$(echo $DEVICES | awk -F',' '{print NF}')
    deepspeed --include localhost:$DEVICES train.py --model_path org/tiny --data_path org/chats \\
      --per_device_train_batch_size 1 --gradient_accumulation_steps $((512 / $GPUS / 1))
"""


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_the_batch_of_a_source_stays_whatever_the_gpus_are(gpus: str, convert: Init) -> None:
    answer = convert(TRL_SCRIPT, "--gpus", gpus)
    assert answer.options["batch"] == {"global": 64, "per_device": 4}
    assert f"--gpus {gpus}" in answer.text
    counted = convert(COUNTED, "--gpus", gpus)
    assert counted.options["batch"] == {"global": 128, "per_device": 2}
    divided = convert(DIVIDED, "--gpus", gpus)
    assert divided.options["batch"] == {"global": 512, "per_device": 1}


def test_flags_of_ones_own_script_mean_what_their_names_say(convert: Init) -> None:
    answer = convert("""
    CMD="deepspeed main.py \\
      --model_name org/tiny --train_file_dir org/chats --max_train_samples 100 \\
      --mask_user --lora_dim 16 --zero_stage 3 --offload --deepspeed \\
      --run_name run-$(date +%s) --conv_template vicuna"
    $CMD > log
    """)
    args = answer.args
    assert args["datasets"] == [{"path": "org/chats", "split": "train[:100]"}]
    assert args["assistant_only_loss"] is True
    assert args["use_peft"] is True
    assert args["lora_r"] == 16
    assert args["run_name"] == "run"
    assert answer.options["deepspeed"] == "zero3_offload"
    assert "--conv_template" in answer.left_out


HYDRA_FLAGS = "++model.name_or_path=org/tiny datasets=[org/pairs]"
PAIR_FLAGS = f"{MODEL} --dataset_name org/pairs"


@pytest.mark.parametrize(
    "command, stage",
    [
        (f"launch.py loss=dpo model=a {HYDRA_FLAGS}", "dpo"),
        (f"train.py --beta 0.1 {PAIR_FLAGS}", "dpo"),
        (f"run_dpo.py {PAIR_FLAGS}", "dpo"),
        (f"qlora.py --bits 4 --double_quant {MODEL} --dataset org/chats", "sft"),
        ("main.py --model org/tiny --dataset org/chats --lr 1e-4", "sft"),
    ],
)
def test_the_stage_is_told_by_the_program_or_by_its_flags(
    command: str, stage: str, convert: Init
) -> None:
    answer = convert(f"accelerate launch {command} --learning_rate 1e-5")
    assert answer.data["stage"] == stage
    assert answer.args["model_name_or_path"] == "org/tiny"
    assert answer.args["dataset_name"] == ("org/pairs" if stage == "dpo" else "org/chats")


def test_verls_overrides_are_read(convert: Init) -> None:
    answer = convert("""
    torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=rows.parquet \\
      data.micro_batch_size_per_gpu=4 data.train_batch_size=64 optim.lr=1e-4 \\
      model.partial_pretrain=org/tiny model.lora_rank=8 trainer.default_local_dir=out \\
      trainer.total_epochs=2
    """)
    assert answer.options["batch"] == {"global": 64, "per_device": 4}
    expected = {"learning_rate": 1e-4, "lora_r": 8, "num_train_epochs": 2, "output_dir": "out"}
    assert expected.items() <= answer.args.items()


def test_a_variable_that_the_script_does_not_set_is_named(convert: Init) -> None:
    answer = convert("""
    python sft.py --model_name_or_path $1 --dataset_name $DATA --learning_rate $LR \\
      --output_dir "out/${NAME:-plain}-$(date +%s)"
    """)
    args = answer.args
    assert args["output_dir"] == "out/plain"
    assert args["model_name_or_path"] == "SET_ME_1"
    assert args["dataset_name"] == "SET_ME_DATA"
    assert "learning_rate" not in args
    assert "`$LR`" in answer.left_out["--learning_rate"]
    assert {2, 3} <= set(answer.lines_of("converted"))


def test_arguments_of_the_script_can_be_given(convert: Init) -> None:
    text = f"""
    while [[ $# -gt 0 ]]; do
      case $1 in
        --model) MODEL="$2"; shift 2 ;;
        --lr) LR="$2"; shift 2 ;;
        *) exit 1 ;;
      esac
    done
    python sft.py {FLAGS.replace("org/tiny", "$MODEL")} --learning_rate $LR
    """
    args = convert(text, "--script-args", "--model org/tiny --lr 1e-4").args
    assert args["model_name_or_path"] == "org/tiny"
    assert args["learning_rate"] == 1e-4


def test_a_comment_between_continued_lines_is_carried_with_a_warning(convert: Init) -> None:
    answer = convert(f"""trl sft {MODEL} \\
      # the data
      --dataset_name org/chats \\
      # --packing \\
      --output_dir out
    """)
    assert answer.args["dataset_name"] == "org/chats"
    assert "packing" not in answer.args
    assert answer.lines_of("cut-command") == [2, 4]


@pytest.mark.parametrize(
    "name, value",
    [
        ("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz"),
        ("WANDB_API_KEY", "0123456789012345678901234567890123456789"),
        ("OPENAI_API_KEY", "'sk-abcdefghijklmnopqrstuvwxyz'"),
    ],
)
def test_secrets_are_named_and_never_written(name: str, value: str, convert: Init) -> None:
    answer = convert(f"{name}={value}\nexport {name}\ntrl sft {FLAGS} --hub_token ${name}\n")
    assert {name, "--hub_token"} <= answer.left_out.keys()
    assert value.strip("'") not in answer.everything


@pytest.mark.parametrize("name", [".hidden/config.yaml", "words.txt", "words"])
def test_a_source_cannot_show_what_any_file_holds(name: str, convert: Init, write: Write) -> None:
    file = write(name, "private_words: 17\nnum_processes: 3\n")
    command = f"accelerate launch --config_file {file} train_sft.py {file} {MODEL} --lr 1e-5"
    answer = convert(f"{command}\nbash {file}\n. {file}\n")
    assert "private_words" not in answer.everything


def test_nothing_of_a_script_is_run(convert: Init, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    convert(f"""
    touch {mark}
    X=$(touch {mark})
    eval "touch {mark}"
    trl sft {MODEL} --dataset_name `touch {mark}` --output_dir out
    """)
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
def test_a_command_is_seen_wherever_it_stands(text: str, convert: Init) -> None:
    args = convert(text.format(command=f"trl sft {FLAGS}")).args
    assert args["model_name_or_path"] == "org/tiny"
    assert args["dataset_name"] == "org/chats"
    assert args["output_dir"] == "out"


@pytest.mark.parametrize(
    "start, gpus, nodes",
    [
        ("torchrun --nproc_per_node=4 -m trl.scripts.sft", 4, 1),
        ("torchrun --nproc-per-node 2 --nnodes 1:2 trl/scripts/sft.py", 2, 2),
        ("python3 -u -m torch.distributed.launch --use_env --nproc_per_node 8 sft.py", 8, 1),
        ("deepspeed --num_gpus=4 trl/scripts/sft.py", 4, 1),
        ("accelerate launch --num_machines 2 --num_processes 16 trl/scripts/sft.py", 8, 2),
        ("python -m accelerate.commands.launch --num_processes=2 trl/scripts/sft.py", 2, 1),
        ("CUDA_VISIBLE_DEVICES=0,3,5 python trl/scripts/sft.py", 3, 1),
        ("ARGS='--nproc_per_node 2'\ntorchrun $ARGS trl/scripts/sft.py", 2, 1),
        ("trl sft --num_processes 4", 4, 1),
    ],
)
def test_devices_are_those_of_the_launcher(
    start: str, gpus: int, nodes: int, convert: Init
) -> None:
    answer = convert(f"{start} {FLAGS} --per_device_train_batch_size 2")
    assert answer.data["gpus"] == gpus
    assert answer.data["nodes"] == nodes
    assert answer.options["batch"] == {"global": 2 * gpus * nodes, "per_device": 2}


TUNE = "tune run --nproc_per_node 4 lora_finetune_distributed epochs=2 optimizer.lr=1e-4 --config"


def test_torchtunes_command_line_names_the_recipe_that_is_not_here(convert: Init) -> None:
    answer = convert(f"{TUNE} llama3_1/8B_lora")
    assert answer.lines_of("missing-source") == [1]
    assert answer.args["num_train_epochs"] == 2
    assert answer.args["learning_rate"] == 1e-4


def test_a_recipe_beside_the_command_is_read_with_its_overrides(
    convert: Init, write: Write, their: Path
) -> None:
    write("their/mine.yaml", TORCHTUNE_FILE.text)
    args = convert(f"{TUNE} mine.yaml").args
    assert args["num_train_epochs"] == 2
    assert args["learning_rate"] == 1e-4
    assert args["lora_r"] == 8
    write("their/recipes/sft.yaml", f"{HANDBOOK_MIXER.text}learning_rate: 1.0e-5\n")
    args = convert("accelerate launch run_sft.py recipes/sft.yaml --learning_rate=3e-5").args
    assert args["learning_rate"] == 3e-5
    assert args["datasets"][0]["path"] == "org/chats"


def test_a_script_that_starts_another_one_is_followed(
    convert: Init, write: Write, their: Path
) -> None:
    command = "trl sft --model_name_or_path $MODEL --dataset_name org/chats --output_dir $1"
    write("their/inner.sh", f"#SBATCH --time=1:00:00\n{command}\n")
    answer = convert("export MODEL=org/tiny\nsrun --nodes=2 -p gpu bash inner.sh out/x\n")
    assert answer.args["model_name_or_path"] == "org/tiny"
    assert answer.args["output_dir"] == "out/x"
    assert answer.options["slurm"] == {"partition": "gpu", "time": "1:00:00"}
    assert answer.data["nodes"] == 2


def test_the_training_of_the_stage_is_taken_and_the_others_are_named(convert: Init) -> None:
    text = f"trl sft {FLAGS}\ntrl dpo {PAIR_FLAGS} --output_dir b\n"
    sft = convert(text)
    assert sft.data["stage"] == "sft"
    assert sft.args["output_dir"] == "out"
    assert "trl dpo" in "\n".join(sft.data["remarks"])
    dpo = convert(text, "dpo")
    assert dpo.data["stage"] == "dpo"
    assert dpo.args["output_dir"] == "b"


@pytest.mark.parametrize(
    "text, code, finding, line",
    [
        ("echo hello\n", 3, "no-training", 1),
        ("\npython serve.py --port 80\n", 3, "no-training", 2),
        (f"accelerate launch grpo.py {MODEL} --learning_rate 1\n", 3, "no-training", 1),
        ("bash nowhere.sh\n", 3, "missing-file", 1),
        ("accelerate launch scripts/$1.py --config $C\n", 3, "no-training", 1),
        ("accelerate launch run_sft.py --config $C\n", 0, "missing-source", 1),
        ("accelerate launch run_sft.py nowhere.yaml\n", 0, "missing-source", 1),
    ],
)
def test_a_script_without_a_training_is_an_error_with_its_line(
    text: str, code: int, finding: str, line: int, init: Init
) -> None:
    answer = init(text)
    assert answer.code == code
    assert answer.lines_of(finding) == [line]
    assert answer.path.exists() is (code == 0)


def test_an_inline_template_is_written_beside(convert: Init, their: Path) -> None:
    template = Path(convert(HANDBOOK_MIXER).args["chat_template_path"])
    assert template.parent == their
    assert template.read_text() == "{% for m in messages %}{{ m.content }}{% endfor %}"


def mix(path: str, split: str | None = None, **more: Any) -> dict[str, Any]:
    """An entry of TRL's `datasets`."""
    entry = {"path": path, **more}
    if split is not None:
        entry["split"] = split
    return entry


@pytest.mark.parametrize(
    "form, datasets",
    [
        (HANDBOOK_MIXER, [mix("org/chats", "train_sft[:50%]"), mix("org/more", "train_sft")]),
        (AXOLOTL_FILE, [mix("org/chats"), mix("org/more", "train[:20%]")]),
        (LLAMA_FACTORY_COMMAND, [mix("org/chats", "train[:1000]")]),
        (SWIFT_SCRIPT, [mix("org/chats", "train[:500]"), mix("org/more")]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_sets_keep_their_shares_and_splits(
    form: Form, datasets: list[dict[str, str]], convert: Init
) -> None:
    """trl/scripts/utils.py:get_dataset takes several sets, each with a split."""
    assert convert(form).args["datasets"] == datasets


@pytest.mark.parametrize(
    "form, evaluation",
    [
        (HANDBOOK_MIXTURE, {"test_split_size": 0.1, "eval_strategy": "steps"}),
        (AXOLOTL_FILE, {"test_split_size": 0.05}),
        (LLAMA_FACTORY_COMMAND, {"test_split_size": 0.1, "eval_strategy": "steps"}),
        (SWIFT_SCRIPT, {"test_split_size": 0.01, "eval_strategy": "steps", "eval_steps": 100}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_part_that_is_held_out_is_evaluated(
    form: Form, evaluation: dict[str, Any], convert: Init
) -> None:
    assert evaluation.items() <= convert(form).args.items()


def test_a_mixture_keeps_its_columns(convert: Init) -> None:
    last = convert(HANDBOOK_MIXTURE).args["datasets"][1]
    assert last == mix("org/more", "train[:25%]", columns=["chosen", "rejected"])


def test_a_single_set_keeps_its_test_split(convert: Init) -> None:
    text = HANDBOOK_MIXER.text.replace("org/chats: 0.5, org/more: 1.0", "org/chats: 1.0")
    args = convert(Form("one.yaml", text)).args
    assert args["dataset_name"] == "org/chats"
    assert args["dataset_train_split"] == "train_sft"
    assert args["dataset_test_split"] == "test_sft"
    assert args["eval_strategy"] == "epoch"


@pytest.mark.parametrize(
    "form",
    [LLAMA_FACTORY_COMMAND, AXOLOTL_FILE, OPENRLHF_SCRIPT, SWIFT_SCRIPT, TORCHTUNE_FILE],
    ids=lambda form: form.name,
)
def test_tools_that_mask_questions_still_do(form: Form, convert: Init) -> None:
    assert convert(form).args["assistant_only_loss"] is True


@pytest.mark.parametrize("form", [LLAMA_FACTORY_COMMAND, AXOLOTL_FILE], ids=lambda form: form.name)
def test_tools_that_are_asked_to_train_on_questions_do(form: Form, convert: Init) -> None:
    text = form.text.replace("train_on_inputs: false", "train_on_inputs: true")
    text = text.replace("--plot_loss", "--train_on_prompt")
    args = convert(Form(form.name, text)).args
    assert args["completion_only_loss"] is False
    assert "assistant_only_loss" not in args


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def dataset_info(write: Write, their: Path) -> None:
    """LLaMA-Factory's list of data sets beside the source."""
    alpaca = {"instruction": "hi", "input": "", "output": "yes"}
    info = {
        "mine": {"file_name": "chats.json", "formatting": "sharegpt"},
        "questions": {"file_name": "alpaca.json"},
        "public": {"hf_hub_url": "org/public", "subset": "en", "split": "train_sft"},
    }
    write("their/data/chats.json", json.dumps([{"messages": CHAT}]))
    write("their/data/alpaca.json", json.dumps([alpaca]))
    write("their/data/dataset_info.json", json.dumps(info))


def llama_factory_sft(dataset: str) -> Form:
    text = LLAMA_FACTORY_FILE.text.replace("dpo", "sft")
    return Form("lf.yaml", text.replace("org/pairs, org/more", dataset))


@pytest.mark.usefixtures("dataset_info")
def test_dataset_info_beside_the_file_tells_the_sets(convert: Init, their: Path) -> None:
    args = convert(llama_factory_sft("mine, public")).args
    assert args["datasets"] == [
        {"path": "json", "data_files": str(their / "data" / "chats.json")},
        {"path": "org/public", "name": "en", "split": "train_sft"},
    ]


@pytest.mark.usefixtures("dataset_info")
def test_rows_that_lie_here_are_to_be_converted_first(convert: Init) -> None:
    answer = convert(llama_factory_sft("questions"))
    converted = {"path": "json", "data_files": "converted/alpaca.jsonl"}
    assert answer.args["datasets"] == [converted]
    assert answer.args["assistant_only_loss"] is True
    (command,) = re.findall(r"launch (data convert .*)", "\n".join(answer.data["remarks"]))
    assert main(command.split()) == 0
    assert main(["validate-config", str(answer.path), "--strict"]) == 0


def test_a_local_file_is_data_of_its_reader(convert: Init, write: Write, their: Path) -> None:
    rows = write("their/rows.jsonl", json.dumps({"messages": CHAT}) + "\n")
    command = f"python train.py {MODEL} --data_path rows.jsonl --lr 1e-5\n"
    assert convert(command).args["datasets"] == [{"path": "json", "data_files": str(rows)}]
    rows.unlink()
    assert convert(command).lines_of("missing-data")


def test_open_instructs_own_names_are_renewed(convert: Init) -> None:
    answer = convert(OPEN_INSTRUCT_FILE)
    args = answer.args
    assert args["mixer_list"] == ["org/pairs", 1.0]
    assert args["tokenizer_name_or_path"] == "org/tiny"
    assert args["use_fast"] is False
    assert args["report_to"] == "wandb"
    assert "use_flash_attn" in answer.left_out


@pytest.mark.parametrize(
    "form, total, per_device",
    [(OPEN_INSTRUCT_SCRIPT, 32, 1), (OPENRLHF_SCRIPT, 128, 2)],
    ids=["open-instruct", "openrlhf"],
)
def test_the_batch_of_another_tool_is_launchs(
    form: Form, total: int, per_device: int, convert: Init
) -> None:
    assert convert(form).options["batch"] == {"global": total, "per_device": per_device}


def test_a_mixer_list_stays_one(convert: Init) -> None:
    args = convert(OPEN_INSTRUCT_SCRIPT).args
    assert args["dataset_mixer_list"] == ["org/chats", 1.0, "org/more", 200]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "if then fi ((",
        "$( $( $(",
        "cat <<EOF\n",
        "${",
        "a=(\n" * 200,
        "{ " * 200,
        "x() { x; }; x\n",
        "x() { x; x; x; x; x; }; x\n",
        "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "trl sft --model_name_or_path $A\n",
        "while true; do trl; done\n",
        "while [ 1 ]; do set -- a $@ $@; done\n",
        "case $1 in",
        "'unclosed",
        '"unclosed',
        "`",
        "for x in 1 2 3",
        "[[ -n",
        "((1+",
    ],
    ids=range(20),
)
def test_a_broken_script_ends_in_an_error_and_nothing_else(text: str, init: Init) -> None:
    assert init(text).code in (0, 3)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 8 src/scripts/train/sft/OLMo-sft.py train run --seq_len=4096",
        "python OLMo/src/scripts/train/sft/Olmo-3-7B-SFT.py launch run ckpt x --dataset_path d",
        'torchrun "${OLMOCORE_PATH}/src/scripts/train/sft/OLMo-sft.py" train --save_folder=o',
    ],
)
def test_sft_on_olmo_core_is_named_as_not_supported(command: str, init: Init) -> None:
    answer = init(f"set -e\n{command}\n")
    assert answer.code == 3
    (finding,) = answer.findings
    assert finding["code"] == "no-training"
    assert finding["line"] == 2
    assert "OLMo-core" in finding["message"]
    assert "not support" in finding["message"]
    assert "launch init sft --model NAME --data NAME" in finding["help"]
    assert not answer.path.exists()


@pytest.mark.parametrize(
    "program", ["src/scripts/train/sft.py", "olmo_sft.py", "train_sft_olmo.py"]
)
def test_a_script_of_ones_own_about_olmo_is_none_of_olmo_core(program: str, convert: Init) -> None:
    assert convert(f"python {program} {FLAGS}").args["model_name_or_path"] == "org/tiny"


NEW_MODEL_AND_DATA = ("--model", "org/other", "--data", "org/rows")


@EACH_FORM
def test_a_model_and_data_that_are_named_take_the_place_of_the_sources(
    form: Form, convert: Init
) -> None:
    answer = convert(form, *NEW_MODEL_AND_DATA)
    args = answer.args
    assert args["model_name_or_path"] == "org/other"
    data = []
    for name in ("dataset_name", "dataset_mixer_list", "mixer_list", "datasets"):
        if name in args:
            data.append(args[name])
    assert data in (["org/rows"], [["org/rows", 1.0]], [[mix("org/rows")]])
    assert "SET_ME" not in answer.text
    assert flags_of(form) <= named_flags(answer)
    assert main(["validate-config", str(answer.path)]) == 0


def test_what_was_said_of_the_sources_model_and_data_goes_with_them(convert: Init) -> None:
    model_flags = "--model_name_or_path $1 --model_revision abc"
    data_flags = "--dataset_name org/chats --dataset_train_split train_sft"
    command = f"trl sft {model_flags} {data_flags} --learning_rate 1e-5 --output_dir o"
    answer = convert(command, *NEW_MODEL_AND_DATA)
    assert answer.args == {
        "model_name_or_path": "org/other",
        "dataset_name": "org/rows",
        "learning_rate": 1e-5,
        "output_dir": "o",
    }
    assert answer.lines_of("converted") == []
    for flag in ("--model_name_or_path", "--model_revision"):
        assert answer.left_out[flag] == "`--model` takes its place"
    for flag in ("--dataset_name", "--dataset_train_split"):
        assert answer.left_out[flag] == "`--data` takes its place"
    assert answer.data["lost"] == []


def test_a_model_alone_leaves_the_data_and_data_alone_the_model(convert: Init) -> None:
    args = convert(f"trl sft {FLAGS}", "--data", "org/rows").args
    assert args["model_name_or_path"] == "org/tiny"
    assert args["dataset_name"] == "org/rows"
    args = convert(f"trl sft {FLAGS}", "--model", "org/other").args
    assert args["model_name_or_path"] == "org/other"
    assert args["dataset_name"] == "org/chats"


def test_local_rows_that_are_named_are_loaded_by_their_file(convert: Init, write: Write) -> None:
    pair = {"prompt": "What is it?", "completion": "A list."}
    rows = str(write("rows.jsonl", f"{json.dumps(pair)}\n" * 4))
    command = f"python train.py {MODEL} --data_path org/chats --mask_prompt True --output_dir o"
    args = convert(command, "--data", rows).args
    assert args["datasets"] == [{"path": "json", "data_files": rows}]
    # the argument of rows with `prompt` and `completion`, not that of chats
    assert args["completion_only_loss"] is True
    assert "assistant_only_loss" not in args


def test_the_part_that_is_held_out_is_taken_of_the_data_that_are_named(convert: Init) -> None:
    args = convert(AXOLOTL_FILE, *NEW_MODEL_AND_DATA).args
    assert args["test_split_size"] == 0.05
    assert args["datasets"] == [mix("org/rows")]


def test_the_trainer_is_that_of_the_source(init: Init) -> None:
    answer = init(f"trl sft {FLAGS}", "--backend", "open_instruct")
    assert answer.code == 2
    assert answer.findings[0]["code"] == "useless-option"


def test_the_split_that_is_evaluated_then_is_named(convert: Init, write: Write) -> None:
    command = f"trl sft {FLAGS} --dataset_test_split test_sft --eval_strategy epoch"
    answer = convert(command, "--data", "org/rows")
    assert "dataset_test_split" not in answer.args
    assert "the split `test` of org/rows" in answer.text
    # a file has no other split: nothing is left to evaluate on
    rows = write("rows.jsonl", json.dumps({"text": "a text"}) + "\n")
    answer = convert(command, "--data", str(rows))
    assert "eval_strategy" not in answer.args
    assert "nothing to evaluate on" in answer.left_out["--eval_strategy"]
