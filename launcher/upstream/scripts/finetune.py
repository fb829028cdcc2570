"""open_instruct/finetune.py: SFT under accelerate and DeepSpeed."""

from launcher.upstream.entry import Entry, Moved, Names
from launcher.upstream.scripts.open_instruct_arguments import (
    CACHES_DATA,
    INSTEAD,
    PAIRS,
    REMOVED,
    SUMMED_LOSS,
    TABLES,
    TOKENIZER,
    list_data_files,
    list_data_hints,
    name_output,
)

SCRIPT = Entry(
    script="open_instruct/finetune.py",
    renamed="open_instruct/sft_deepspeed.py",
    classes=(("open_instruct.finetune", "FlatArguments"), TOKENIZER),
    owner="FlatArguments",
    names=Names(
        data="dataset_mixer_list",
        max_steps="max_train_steps",
        max_length="max_seq_length",
        save_every="checkpointing_steps",
        exact_output="do_not_randomize_output_dir",
    ),
    splits=frozenset({"dataset_mixer_list"}),
    loop="accelerate",
    watchers={
        "open_instruct.dataset_transformation": "watch_tokenising",
        "open_instruct.model_utils": "watch_final_save",
    },
    stand_ins={"torch.cuda": "supply_cuda_counters", "open_instruct.utils": "supply_mfu"},
    epoch_checkpoints=True,
    ends_after=CACHES_DATA,
    output=name_output,
    packing="flattened",
    # finetune.py::main[AutoLigerKernelForCausalLM.from_pretrained] names no type there
    dtype="bfloat16",
    liger_dtype="auto",
    strict_liger=True,
    best_attention=True,
    whole_model=True,  # finetune.py::main[snapshot_download]
    hints=list_data_hints("dataset_mixer_list"),
    lost={"reduce_loss": SUMMED_LOSS, **list_data_files("dataset_mixer_list")},
    tables=TABLES,
    moved={
        **REMOVED,
        **{theirs: Moved(ours, f"DPO's name; SFT has `{ours}`") for ours, theirs in PAIRS},
    },
    derived={
        "logging_steps": (
            1,
            "upstream's default prints no loss line at all"
            " (finetune.py::FlatArguments[Log the training])",
        )
    },
    partial=frozenset({"cache_dataset_only"}),
    instead={
        **INSTEAD,
        "overwrite_cache": "`dataset_skip_cache: true` rebuilds the dataset cache",
        "max_train_samples": "give a number of samples in `dataset_mixer_list`: [name, 200]",
    },
)
