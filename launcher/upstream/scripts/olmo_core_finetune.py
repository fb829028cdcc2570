"""open_instruct/olmo_core_finetune.py: SFT of OLMo-core models under FSDP, on rows that are always packed.

It is there since #1327, and replaces finetune.py, which upstream calls deprecated.
"""

from dataclasses import replace

from launcher.upstream.entry import Entry, Moved, Names, RehearsalRecipe
from launcher.upstream.scripts import dpo
from launcher.upstream.scripts.open_instruct_arguments import (
    CACHES_DATA,
    INSTEAD,
    PAIRS,
    REMOVED,
    SUMMED_LOSS,
    TABLES,
    TOKENIZER,
    data_file,
    data_hints,
)

_UTILS = "open_instruct.olmo_core_utils"

SCRIPT = Entry(
    script="open_instruct/olmo_core_finetune.py",
    stage="sft",
    classes=(
        *(
            (_UTILS, f"{name}Config")
            for name in ("Experiment", "Model", "Training", "Dataset", "Logging", "Checkpoint")
        ),
        ("open_instruct.olmo_core_finetune", "SFTConfig"),
        TOKENIZER,
    ),
    owner="TrainingConfig",
    names=Names(
        data="mixer_list",
        epochs="num_epochs",
        max_steps="max_train_steps",
        max_length="max_seq_length",
        liger=None,
        packing=None,
        shared="cp_degree",
        save_every="checkpointing_steps",
        recompute_needs="compile_model",
    ),
    splits=frozenset({"mixer_list"}),
    launcher="torchrun",
    loop="olmo_core",
    # olmo_core_finetune.py::main[num_training_steps = len]
    drops_last=True,
    ends_after=CACHES_DATA,
    unjudged="step[1-9]*",
    final_model="hf_model",
    packing="always",
    sharding="fsdp",
    dtype="float32",
    liger_dtype="float32",
    best_attention=True,
    models=dpo.SCRIPT.models,
    own_shapes=dpo.SCRIPT.own_shapes,
    tables=TABLES,
    partial=frozenset({"cache_dataset_only"}),
    hints=data_hints("mixer_list"),
    lost={"reduce_loss": SUMMED_LOSS, **data_file("mixer_list")},
    moved={**REMOVED, **{old: Moved(new, f"finetune.py's name; this script has `{new}`") for old, new in PAIRS}},
    instead={**INSTEAD, "overwrite_cache": "`skip_cache: true` rebuilds the dataset cache"},
    rules="open_instruct.olmo_core_sft",
    watchers={
        "olmo_core.train.train_module.transformer.train_module": "watch_olmo_training",
        "olmo_core.train.trainer": "watch_olmo_trainer",
    },
    stand_ins={
        "torch.cuda": "supply_cuda_counters",
        "olmo_core.distributed.utils": "supply_gloo",
        "olmo_core.train.callbacks.gpu_memory_monitor": "supply_memory_monitor",
        "olmo_core.nn.attention.backend": "supply_documents",
    },
)
