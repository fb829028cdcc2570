"""Arguments that several of open-instruct's scripts have, had, or call by two names."""

from pathlib import Path

from launcher.upstream.entry import DATA_FILE, Lost, Moved
from launcher.upstream.schema import Values

TOKENIZER = ("open_instruct.dataset_transformation", "TokenizerConfig")

# The same idea under two names, on purpose upstream: (SFT's, DPO's).
PAIRS = (
    ("dataset_mixer_list", "mixer_list"),
    ("dataset_mixer_list_splits", "mixer_list_splits"),
    ("dataset_transform_fn", "transform_fn"),
    ("dataset_target_columns", "target_columns"),
    ("dataset_cache_mode", "cache_mode"),
    ("dataset_local_cache_dir", "local_cache_dir"),
    ("dataset_config_hash", "config_hash"),
    ("dataset_skip_cache", "skip_cache"),
    ("num_train_epochs", "num_epochs"),
    ("wandb_project_name", "wandb_project"),
    ("clip_grad_norm", "max_grad_norm"),
    ("gradient_checkpointing", "activation_memory_budget"),
)

REMOVED = {
    "use_flash_attn": Moved(
        None, "removed upstream by #1567 (9e8e2187c): attention is detected from what is installed"
    ),
    "chat_template": Moved("chat_template_name", "the tokenizer's argument has another name"),
    "model_name": Moved("model_name_or_path", "upstream's name"),
    "max_length": Moved("max_seq_length", "TRL's name"),
    "max_steps": Moved("max_train_steps", "TRL's name"),
    "use_peft": Moved("use_lora", "TRL's name"),
    "lora_r": Moved("lora_rank", "TRL's name"),
}


# What does what the argument says, where the argument itself does nothing.
INSTEAD = {
    "tokenizer_name": "write `tokenizer_name_or_path`",
    "use_slow_tokenizer": "write `use_fast: false`",
    "use_8bit_optimizer": "without QLoRA the optimizer keeps 32 bits: delete the line",
}


def list_data_hints(listed: str) -> dict[str, str]:
    help = f"write the sets as `{listed}: [name, amount, name, amount, ...]`"
    return {"dataset_mixer": help, "dataset_name": help}


def list_data_files(listed: str) -> dict[str, Lost]:
    return {
        DATA_FILE: Lost(
            did="it named the file of the data",
            now=f"`{listed}` alone names data, by default others than yours",
            instead=f"write `{listed}: [FILE, 1.0]`, of a .jsonl or .parquet file",
        )
    }


# of DPO it was an argument that nothing read
SUMMED_LOSS = Lost(
    did="`sum` added up the losses of all tokens, so that each token of a step weighed the same",
    now="the loss is the mean over the tokens of a micro-batch, and accumulation and GPUs average "
    "these means (open_instruct/finetune.py::main[loss = outputs.loss]): a learning rate tuned for "
    "the sum is far too low, and "
    "how a step is split into micro-batches changes the weights of rows",
    instead="choose the learning rate anew, with few accumulation steps and micro-batches of like "
    "size",
    harmless=("mean",),
)


TABLES = (
    "open_instruct.dataset_transformation",
    ("CHAT_TEMPLATES", "GET_TOKENIZER_FN", "TRANSFORM_FNS"),
)

# finetune.py::main[if args.cache_dataset_only],
# dpo_tune_cache.py::main[if args.cache_dataset_only], dpo.py::main[if args.cache_dataset_only]
CACHES_DATA = {"cache_dataset_only": "data set"}


def name_output(values: Values) -> Path:
    """`output_dir`, with `exp_name` below it unless `do_not_randomize_output_dir`
    (finetune.py::main[if not args.do_not_randomize_output_dir]).

    A commit that has no such switch puts nothing below.
    """
    folder = Path(str(values["output_dir"]))
    as_it_is = "do_not_randomize_output_dir"
    if as_it_is not in values.schema.fields or values[as_it_is]:
        return folder
    return folder / str(values["exp_name"])
