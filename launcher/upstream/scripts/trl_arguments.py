"""Arguments that TRL's scripts share, and what became of those that they had."""

from collections.abc import Iterator
from typing import Any

from launcher.upstream.entry import Lost, Moved
from launcher.upstream.schema import Values

SCRIPT_ARGUMENTS = ("trl.scripts.utils", "ScriptArguments")
MODEL = ("trl.trainer.model_config", "ModelConfig")
MIXTURE = ("trl.scripts.utils", "DatasetMixtureConfig")

_OPEN_INSTRUCT = "open-instruct's name"
MOVED = {
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
    "use_flash_attn": Moved(
        "attn_implementation", "spelt `attn_implementation: flash_attention_2`"
    ),
}
# Of transformers' arguments; those of launchers, devices, logs and the hub change nothing of what
# is trained.
LOST = {
    "split_batches": Lost(
        did="it divided each batch among the GPUs, so that the global batch did not grow with them",
        now="every GPU takes `per_device_train_batch_size` rows",
        instead="""write `accelerator_config: '{"split_batches": true}'`""",
    ),
    "adafactor": Lost(
        did="it trained with Adafactor",
        now="`optim` alone names the optimizer",
        instead="write `optim: adafactor`",
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
# They compare these values, or copy them into the trainer's state, by computed names
# (transformers/trainer_utils.py::compare_trainer_and_checkpoint_args[arg_value = getattr],
# transformers/trainer_callback.py::TrainerState.compute_steps[num_steps = getattr]): that is no use
# of them.
RECORDERS = frozenset({"compare_trainer_and_checkpoint_args", "compute_steps"})


def settle(values: Values, gpus: int) -> Iterator[tuple[str, Any, str]]:
    if gpus:
        return
    refuses = "transformers/training_args.py::TrainingArguments._validate_args[if not self.use_cpu]"
    why = f"without a GPU transformers refuses its defaults ({refuses})"
    if "use_cpu" in values:
        yield "use_cpu", True, why
    if "bf16" in values and not values.given("fp16"):
        yield "bf16", False, why
