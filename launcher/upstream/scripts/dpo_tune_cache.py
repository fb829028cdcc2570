"""open_instruct/dpo_tune_cache.py: DPO under accelerate and DeepSpeed, with a cached reference."""

from launcher.upstream.entry import Entry, Moved, Names
from launcher.upstream.scripts.open_instruct_arguments import (
    CACHES_DATA,
    INSTEAD,
    PAIRS,
    REMOVED,
    TABLES,
    TOKENIZER,
    list_data_files,
    list_data_hints,
    name_output,
)

SCRIPT = Entry(
    script="open_instruct/dpo_tune_cache.py",
    renamed="open_instruct/dpo_deepspeed.py",
    classes=(("open_instruct.dpo_utils", "DPOExperimentConfig"), TOKENIZER),
    owner="DPOExperimentConfig",
    names=Names(
        data="mixer_list",
        epochs="num_epochs",
        max_steps="max_train_steps",
        max_length="max_seq_length",
        save_every="checkpointing_steps",
        exact_output="do_not_randomize_output_dir",
    ),
    splits=frozenset({"mixer_list"}),
    loop="accelerate",
    watchers={
        "open_instruct.dataset_transformation": "watch_tokenising",
        "open_instruct.model_utils": "watch_final_save",
        "open_instruct.dpo_utils": "watch_pairs",
    },
    stand_ins={"torch.cuda": "supply_cuda_counters", "open_instruct.utils": "supply_mfu"},
    needs_process_group=True,
    skips_each_epoch=True,
    ends_after=CACHES_DATA,
    output=name_output,
    packing="paired",
    dtype="bfloat16",
    liger_dtype="auto",
    strict_liger=True,
    best_attention=True,
    caches_reference=True,
    without_reference=("simpo",),  # dpo_utils.py::DPOLossType.needs_reference_model[return self in]
    lost=list_data_files("mixer_list"),
    hints={
        **list_data_hints("mixer_list"),
        "checkpointing_steps": "DPO counts steps: write a number (`epoch` is SFT's)",
    },
    moved={
        **REMOVED,
        **{theirs: Moved(ours, f"SFT's name; DPO has `{ours}`") for theirs, ours in PAIRS},
    },
    older={"data": ("dataset_mixer_list",), "epochs": ("num_train_epochs",)},
    tables=TABLES,
    recorders=frozenset({"compute_reference_cache_hash"}),  # a hash of the key is no use of a value
    beside=("open_instruct/dpo.py",),
    instead={
        **INSTEAD,
        "overwrite_cache": "`skip_cache: true` rebuilds the dataset cache",
        "report_to": "this script reports to wandb only (dpo_tune_cache.py::main[log_with])",
    },
    partial=frozenset({"cache_dataset_only", "cache_logprobs_only"}),
)
