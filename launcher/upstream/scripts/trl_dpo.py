"""trl/scripts/dpo.py: DPO by TRL's `DPOTrainer`."""

from dataclasses import replace

from launcher.upstream.entry import Lost, Moved, RehearsalRecipe
from launcher.upstream.scripts import trl_sft
from launcher.upstream.scripts.trl_arguments import LOST, MIXTURE, MODEL, MOVED, SCRIPT_ARGUMENTS

_WHOLE_LENGTH = "prompt and answer are cut together, to `max_length`"
_LOST = {
    **LOST,
    "group_by_length": replace(
        LOST["group_by_length"],
        instead="write `train_sampling_strategy: group_by_length` and "
        "`remove_unused_columns: false`, and each pair's "
        "length into a column `length`",
    ),
    "rpo_alpha": Lost(
        did="it added the negative log-likelihood of the chosen answers to the loss, times that "
        "number",
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
        did="it cut the end of longer answers off",
        now=_WHOLE_LENGTH,
        instead="set `max_length`",
        harmless=(),
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

SCRIPT = replace(
    trl_sft.SCRIPT,
    script="trl/scripts/dpo.py",
    classes=(SCRIPT_ARGUMENTS, ("trl.trainer.dpo_config", "DPOConfig"), MODEL, MIXTURE),
    owner="DPOConfig",
    imports=("trl.trainer.dpo_trainer",),
    names=replace(trl_sft.SCRIPT.names, packing="padding_free"),
    lost=_LOST,
    watchers={"trl.trainer.dpo_trainer": "watch_preparation"},
    rehearsal=RehearsalRecipe(trainer="DPOTrainer"),
    packing="padded",  # trl/trainer/dpo_trainer.py::DPOTrainer.__init__[padding_free=True]
    moved={
        **MOVED,
        "chat_template_name": Moved(
            None, "open-instruct's name; TRL's DPO takes the tokenizer's own template"
        ),
    },
)
