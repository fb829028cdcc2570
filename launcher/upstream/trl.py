"""TRL's own SFT and DPO scripts (`trl/scripts`), for laptops, CI and LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.upstream.entry import Entry, Moved, Names
from launcher.upstream.schema import Values

NAME = "trl"
PACKAGES: tuple[str, ...] = ("trl", "transformers")
CHECKOUT = False
PIN = "trl 1.16.0, transformers 5.17.0"
TAKES_NONE = True
NEEDS: tuple[str, ...] = ("torch", "transformers", "trl", "accelerate", "datasets")
GPU_NEEDS: tuple[str, ...] = ()
EXTRA = "trl"
ENVIRON: Mapping[str, str] = {}
ONE_GPU = True
# transformers/training_args.py:64 builds it by calls, transformers/utils/logging.py:44 holds the names
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "trainer_log_levels.keys()": (
        "detail", "debug", "info", "warning", "error", "critical", "passive",
    )
}  # fmt: skip

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
    "use_flash_attn": Moved(
        "attn_implementation", "spelt `attn_implementation: flash_attention_2`"
    ),
}
# They compare these values, or copy them into the trainer's state, by computed names
# (transformers/trainer_utils.py:1153, transformers/trainer_callback.py:163): that is no use of them.
_RECORDERS = frozenset({"compare_trainer_and_checkpoint_args", "compute_steps"})
_NAMES = Names(data="dataset_name", max_steps="max_steps", max_length="max_length")

STAGES: Mapping[str, Entry] = {
    "sft": Entry(
        script="trl/scripts/sft.py",
        classes=(_SCRIPT, ("trl.trainer.sft_config", "SFTConfig"), _MODEL, _MIXTURE),
        owner="SFTConfig",
        imports=("trl.trainer.sft_trainer",),
        names=_NAMES,
        moved=_MOVED,
        recorders=_RECORDERS,
    ),
    "dpo": Entry(
        script="trl/scripts/dpo.py",
        classes=(_SCRIPT, ("trl.trainer.dpo_config", "DPOConfig"), _MODEL, _MIXTURE),
        owner="DPOConfig",
        imports=("trl.trainer.dpo_trainer",),
        names=Names(
            data="dataset_name",
            max_steps="max_steps",
            max_length="max_length",
            packing="padding_free",
        ),
        recorders=_RECORDERS,
        moved={
            **_MOVED,
            "chat_template_name": Moved(
                None, "open-instruct's name; TRL's DPO takes the tokenizer's own template"
            ),
        },
    ),
}


def output_folder(values: Values) -> Path | None:
    """`output_dir`; where it is not given, transformers writes to `trainer_output`."""
    given = values["output_dir"]
    return Path(str(given)) if given else None
