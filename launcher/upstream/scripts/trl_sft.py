"""trl/scripts/sft.py: SFT by TRL's `SFTTrainer`."""

from launcher.upstream.entry import Entry, Names, RehearsalRecipe
from launcher.upstream.scripts.trl_arguments import (
    LOST,
    MIXTURE,
    MODEL,
    MOVED,
    RECORDERS,
    SCRIPT_ARGUMENTS,
    settle,
)

SCRIPT = Entry(
    script="trl/scripts/sft.py",
    classes=(SCRIPT_ARGUMENTS, ("trl.trainer.sft_config", "SFTConfig"), MODEL, MIXTURE),
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
    moved=MOVED,
    lost=LOST,
    recorders=RECORDERS,
    instead={
        "test_split_size": "in the place of `dataset_name` write `datasets:` with `- path: ...`",
        "streaming": "`dataset_streaming` is that of `dataset_name`",
        "dataset_streaming": "`streaming` is that of `datasets`",
        "dataset_config": "each entry of `datasets` has a `name` of its own",
    },
    settle=settle,
    watchers={"trl.trainer.sft_trainer": "watch_preparation"},
    rehearsal=RehearsalRecipe(trainer="SFTTrainer"),
    loop="transformers",
    divides_loss=True,
    # transformers/trainer.py::Trainer.set_initial_training_values[if args.max_steps > 0 #1]
    zero_is_limit=False,
    packing="refilled",
    own_precision=True,
    dtype="float32",
    liger_dtype="float32",
    attentions=("sdpa", "flash_attention_2"),
    tiled_loss=True,  # trl/kernels/chunked_logprob.py::[TOKEN_CHUNK_SIZE]
    # transformers/modeling_utils.py::PreTrainedModel.gradient_checkpointing_enable[gradient_checkpointing_kwargs =]
    reentrant=True,
)
