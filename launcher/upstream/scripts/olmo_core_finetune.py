"""open_instruct/olmo_core_finetune.py: SFT of OLMo-core models under FSDP; it always packs.

It is there since #1620, and replaces finetune.py, which upstream calls deprecated.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.upstream.entry import Entry, ExportPhase, Moved, Names, TokenisingPhase
from launcher.upstream.schema import Values
from launcher.upstream.scripts import dpo
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
)

_UTILS = "open_instruct.olmo_core_utils"
_PARTS = ("token_ids_part_*.npy", "labels_mask_part_*.npy", "token_ids_part_*.csv.gz")
_PART = re.compile(r"_part_(\d+)\.")


def _name_numpy_folder(entry: Path, values: Values) -> Path:
    """Where the script looks for tokens, by the set that they were made of
    (olmo_core_finetune.py::main[numpy_dir = os.path.join]).
    """
    about = f"{values['seed']}:{values['max_seq_length']}"
    # olmo_core_finetune.py::_seed_cache_suffix
    suffix = hashlib.sha256(about.encode()).hexdigest()[:8]
    return entry.parent / "numpy_sft" / f"{entry.name}-{suffix}"


def _is_complete(folder: Path) -> bool:
    """Whether each part has all its files (olmo_core_finetune.py::_numpy_dir_is_populated)."""
    numbers = []
    for pattern in _PARTS:
        names = [path.name for path in folder.glob(pattern)]
        numbers.append({match[1] for match in map(_PART.search, names) if match is not None})
    return bool(numbers[0]) and numbers[0] == numbers[1] == numbers[2]


def _settle(values: Values, gpus: int) -> Iterator[tuple[str, Any, str]]:
    """The script's default for temporary checkpoints is refused beside shorter intervals."""
    name = "ephemeral_save_interval"
    own, every = values[name], values["checkpointing_steps"]
    if isinstance(own, int) and isinstance(every, int) and own >= every and not values.given(name):
        why = f"the script's default, {own}, is not below `checkpointing_steps` "
        yield (
            name,
            0,
            f"{why}(olmo_core_finetune.py::[_DEFAULT_EPHEMERAL_SAVE_INTERVAL =]); 0: none",
        )


def _describe_export(values: Values) -> Mapping[str, Any] | None:
    """What the weights are written with; None where no config of transformers' is named."""
    name = str(values["model_name_or_path"])
    # olmo_core_utils.py::is_hf_checkpoint
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        return None
    settings = {
        "model": name,
        "config_name": values["config_name"],
        "tokenizer": values["tokenizer_name_or_path"],
        "trusts_code": values["trust_remote_code"],
    }
    if values["rope_scaling_factor"] is not None:
        names = ("factor", "beta_fast", "beta_slow", "old_context_len")
        settings["rope_scaling"] = {part: values[f"rope_scaling_{part}"] for part in names}
    return settings


SCRIPT = Entry(
    script="open_instruct/olmo_core_finetune.py",
    renamed="open_instruct/sft.py",
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
    # olmo_core/train/train_module/transformer/train_module.py: each loss is divided by the tokens
    # of the step
    divides_loss=True,
    ends_after=CACHES_DATA,
    tokenising=TokenisingPhase(
        arguments={"cache_dataset_only": True},
        # dataset_transformation.py::[TOKENIZED_SFT_DATASET_KEYS_WITH_SOURCE]
        columns=("input_ids", "attention_mask", "labels", "dataset_source"),
        place=_name_numpy_folder,
        is_complete=_is_complete,
    ),
    export=ExportPhase(function="export_olmo_core", settings=_describe_export),
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
    hints=list_data_hints("mixer_list"),
    lost={"reduce_loss": SUMMED_LOSS, **list_data_files("mixer_list")},
    moved={
        **REMOVED,
        **{old: Moved(new, f"finetune.py's name; this script has `{new}`") for old, new in PAIRS},
    },
    instead={**INSTEAD, "overwrite_cache": "`skip_cache: true` rebuilds the dataset cache"},
    settle=_settle,
    # its main takes seven dataclasses in one, and data that another process has tokenised
    rehearsal=None,
    rules="open_instruct.olmo_core_sft",
    behaves_as="dpo_olmo_core",
    watchers={
        "open_instruct.olmo_core_utils": "watch_olmo_utils",
        "olmo_core.train.train_module.transformer.train_module": "watch_olmo_training",
        "olmo_core.train.trainer": "watch_olmo_trainer",
        "olmo_core.train.callbacks.checkpointer": "watch_olmo_checkpoints",
    },
    stand_ins={
        "torch.cuda": "supply_cuda_counters",
        "olmo_core.distributed.utils": "supply_gloo",
        "olmo_core.train.callbacks.gpu_memory_monitor": "supply_memory_monitor",
        "olmo_core.nn.attention.backend": "supply_documents",
    },
)
