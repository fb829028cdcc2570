"""TRL's own SFT and DPO scripts (`trl/scripts`), for laptops, CI and LoRA."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launcher.upstream.entry import Checkpoints, Entry, Lost, Moved, Names
from launcher.upstream.schema import Values

NAME = "trl"
PACKAGES: tuple[str, ...] = ("trl", "transformers")
CHECKOUT = False
PIN = "trl 1.16.0, transformers 5.17.0"
BASELINE = PIN
TAKES_NONE = True
NEEDS: tuple[str, ...] = ("torch", "transformers", "trl", "accelerate", "datasets")
GPU_NEEDS: tuple[str, ...] = ()
EXTRA = "trl"
ENVIRON: Mapping[str, str] = {}
CHECKPOINTS: Checkpoints = "transformers"
DATA_CACHE: Literal["own", "datasets"] = "datasets"
MODEL_ARGUMENTS: tuple[str, ...] = ("model_name_or_path",)
ONE_GPU = True
SHORT_RUN: Mapping[str, Any] = {
    "push_to_hub": False,
    **dict.fromkeys(("save_strategy", "eval_strategy"), "no"),
    **dict.fromkeys(("do_eval", "eval_on_start", "load_best_model_at_end"), False),
    "resume_from_checkpoint": None,
    "logging_strategy": "steps",
    "logging_first_step": False,
    # what is read while evaluating alone
    **dict.fromkeys(("metric_for_best_model", "greater_is_better", "per_device_eval_batch_size")),
    "report_to": "none",
}
REHEARSAL: Mapping[str, Any] = {
    **dict.fromkeys(("push_to_hub", "trust_remote_code", "resume_from_checkpoint"), None),
    **{"use_cpu": True, "report_to": "none"},
}
# transformers/training_args.py::[trainer_log_levels] builds it by calls, transformers/utils/logging.py::[log_levels =]
# holds the names
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "trainer_log_levels.keys()": (*("detail", "debug", "info", "warning"), *("error", "critical", "passive"))
}

_SCRIPT = ("trl.scripts.utils", "ScriptArguments")
_MODEL = ("trl.trainer.model_config", "ModelConfig")
_MIXTURE = ("trl.scripts.utils", "DatasetMixtureConfig")

_OPEN_INSTRUCT = "open-instruct's name"
_MOVED = {
    "dataset_mixer_list": Moved("dataset_name", _OPEN_INSTRUCT),
    "mixer_list": Moved("dataset_name", _OPEN_INSTRUCT),
    "max_seq_length": Moved("max_length", _OPEN_INSTRUCT),
    "max_train_steps": Moved("max_steps", _OPEN_INSTRUCT),
    "num_epochs": Moved("num_train_epochs", "open-instruct's DPO name"),
    "use_lora": Moved("use_peft", _OPEN_INSTRUCT),
    "lora_rank": Moved("lora_r", _OPEN_INSTRUCT),
    "clip_grad_norm": Moved("max_grad_norm", _OPEN_INSTRUCT),
    "checkpointing_steps": Moved("save_steps", _OPEN_INSTRUCT),
    "keep_last_n_checkpoints": Moved("save_total_limit", _OPEN_INSTRUCT),
    "chat_template_name": Moved("chat_template_path", _OPEN_INSTRUCT),
    "use_flash_attn": Moved("attn_implementation", "spelt `attn_implementation: flash_attention_2`"),
}
# Of transformers' arguments; those of launchers, devices, logs and the hub change nothing of what is trained.
_LOST = {
    "split_batches": Lost(
        did="it divided each batch among the GPUs, so that the global batch did not grow with them",
        now="every GPU takes `per_device_train_batch_size` rows",
        instead="""write `accelerator_config: '{"split_batches": true}'`""",
    ),
    "adafactor": Lost(
        did="it trained with Adafactor", now="`optim` alone names the optimizer", instead="write `optim: adafactor`"
    ),
    "group_by_length": Lost(
        did="it drew rows of like length together",
        now="rows are drawn at random",
        instead="write `train_sampling_strategy: group_by_length`",
    ),
    "per_gpu_train_batch_size": Lost(
        did="it set the rows of a GPU",
        now="`per_device_train_batch_size`, or `batch:`, alone does",
        instead="write `per_device_train_batch_size`",
        harmless=(),
    ),
}
_WHOLE_LENGTH = "prompt and answer are cut together, to `max_length`"
_LOST_OF_DPO = {
    **_LOST,
    "group_by_length": replace(
        _LOST["group_by_length"],
        instead="write `train_sampling_strategy: group_by_length` and `remove_unused_columns: false`, and each pair's "
        "length into a column `length`",
    ),
    "rpo_alpha": Lost(
        did="it added the negative log-likelihood of the chosen answers to the loss, times that number",
        now="the loss is that of `loss_type` alone",
        instead="write `loss_type: [sigmoid, sft]` with `loss_weights: [1.0, <that number>]`",
        harmless=("0", "0.0"),
    ),
    "reference_free": Lost(
        did="it left the reference model out of the loss",
        now="the policy is always held against the reference",
        instead="choose `loss_type`, `beta` and the learning rate anew",
    ),
    "max_prompt_length": Lost(
        did="it cut the beginning of longer prompts off",
        now=_WHOLE_LENGTH,
        instead="set `max_length`, and shorten long prompts in the data",
        harmless=(),
    ),
    "max_completion_length": Lost(
        did="it cut the end of longer answers off", now=_WHOLE_LENGTH, instead="set `max_length`", harmless=()
    ),
    "ref_adapter_name": Lost(
        did="it named the adapter that is the reference",
        now="the reference is the adapter as it was loaded, or the model without one",
        instead="merge the adapter that is to be the reference into the model",
        harmless=(),
    ),
    "model_adapter_name": Lost(
        did="it named the adapter that is trained",
        now="the adapter in the model's folder is trained, or a new one",
        instead="name the folder of that adapter as the model",
        harmless=("default",),
    ),
    "force_use_ref_model": Lost(
        did="it held a LoRA model against a reference model of its own",
        now="the reference of a LoRA model is the model without the new adapter",
        instead="merge what is to be the reference into the model",
    ),
    "ref_model_init_kwargs": Lost(
        did="it loaded the reference model with settings of its own",
        now="the reference is loaded with `model_init_kwargs`, in the model's type",
        instead="check type and attention of the model: they are the reference's too",
        harmless=("{}",),
    ),
    "tools": Lost(
        did="it wrote these tools into every prompt",
        now="a row's own column `tools` alone is written",
        instead="add a column `tools` to the rows",
        harmless=("[]",),
    ),
}
# They compare these values, or copy them into the trainer's state, by computed names
# (transformers/trainer_utils.py::compare_trainer_and_checkpoint_args[arg_value = getattr],
# transformers/trainer_callback.py::TrainerState.compute_steps[num_steps = getattr]): that is no use of them.
_RECORDERS = frozenset({"compare_trainer_and_checkpoint_args", "compute_steps"})


def _settle(values: Values, gpus: int) -> Iterator[tuple[str, Any, str]]:
    if gpus:
        return
    refuses = "transformers/training_args.py::TrainingArguments._validate_args[if not self.use_cpu]"
    why = f"without a GPU transformers refuses its defaults ({refuses})"
    if "use_cpu" in values:
        yield "use_cpu", True, why
    if "bf16" in values and not values.given("fp16"):
        yield "bf16", False, why


_SFT = Entry(
    script="trl/scripts/sft.py",
    classes=(_SCRIPT, ("trl.trainer.sft_config", "SFTConfig"), _MODEL, _MIXTURE),
    owner="SFTConfig",
    imports=("trl.trainer.sft_trainer",),
    names=Names(
        data="dataset_name",
        max_steps="max_steps",
        max_length="max_length",
        save_every="save_steps",
        save_strategy="save_strategy",
        resume="resume_from_checkpoint",
    ),
    by_file=frozenset({"datasets", "report_to", "test_split_size"}),
    moved=_MOVED,
    lost=_LOST,
    recorders=_RECORDERS,
    instead={
        "test_split_size": "in the place of `dataset_name` write `datasets:` with `- path: ...`",
        "streaming": "`dataset_streaming` is that of `dataset_name`",
        "dataset_streaming": "`streaming` is that of `datasets`",
        "dataset_config": "each entry of `datasets` has a `name` of its own",
    },
    settle=_settle,
    loop="transformers",
    zero_is_limit=False,  # transformers/trainer.py::Trainer.set_initial_training_values[if args.max_steps > 0 #1]
    packing="refilled",
    own_precision=True,
    dtype="float32",
    liger_dtype="float32",
    attentions=("sdpa", "flash_attention_2"),
    tiled_loss=True,  # trl/kernels/chunked_logprob.py::[TOKEN_CHUNK_SIZE]
    # transformers/modeling_utils.py::PreTrainedModel.gradient_checkpointing_enable[gradient_checkpointing_kwargs =]
    reentrant=True,
)

STAGES: Mapping[str, Entry] = {
    "sft": _SFT,
    "dpo": replace(
        _SFT,
        script="trl/scripts/dpo.py",
        classes=(_SCRIPT, ("trl.trainer.dpo_config", "DPOConfig"), _MODEL, _MIXTURE),
        owner="DPOConfig",
        imports=("trl.trainer.dpo_trainer",),
        names=replace(_SFT.names, packing="padding_free"),
        lost=_LOST_OF_DPO,
        packing="padded",  # trl/trainer/dpo_trainer.py::DPOTrainer.__init__[padding_free=True]
        moved={
            **_MOVED,
            "chat_template_name": Moved(None, "open-instruct's name; TRL's DPO takes the tokenizer's own template"),
        },
    ),
}


def output_folder(values: Values) -> Path | None:
    """`output_dir`; where it is not given, transformers writes to `trainer_output`."""
    given = values["output_dir"]
    return Path(str(given)) if given else None
