"""What TRL's scripts and HF Trainer print (trl 1.16, transformers 5.17), as patterns."""

from launcher.upstream.logs.common import PATTERNS as COMMON
from launcher.upstream.logs.common import Pattern, Table, make_pattern, make_patterns

_LINES: tuple[Pattern, ...] = (
    # transformers/trainer_callback.py ProgressCallback.on_log; PrinterCallback without a bar
    make_pattern(
        "metrics",
        r"(?P<pairs>\{'loss': [^{}]*\})",
        "{'loss': ",
        always=(r"\{'loss': '?-?[niNI]", r"_norm': '?-?[niNI]"),
    ),
    # transformers/trainer.py _finalize_training, through the same callback
    make_pattern("metrics", r"(?P<pairs>\{'train_runtime': [^{}]*\})", "{'train_runtime': "),
    # transformers/trainer.py evaluate, through the same callback
    make_pattern("evaluated", r"(?P<pairs>\{'eval_(?:\w+_)?loss': [^{}]*\})", "{'eval_"),
    # a mean over the run or an evaluation; the losses of steps are in the dicts of `metrics`
    make_pattern(
        "mean_nonfinite",
        r"'(?P<what>train_loss|eval_(?:\w+_)?loss)': '?(?P<value>nan|inf)\b",
        "_loss': ",
    ),
)

_TABLE: Table = {
    # trl/scripts/sft.py::main[Training completed.], trl/scripts/dpo.py::main[Training completed.]
    "training_completed": (r"✅ Training completed\.",),
    # trl/scripts/sft.py::main[Model saved to], trl/scripts/dpo.py::main[Model saved to];
    # alignment-handbook, axolotl, and many own scripts
    "saved": (
        r"\b[Mm]odel saved (?:to|in)[: ]+(?P<path>\S.*?)\.?$",
        r"\b[Mm]odel successfully saved (?:to|in)[: ]+(?P<path>\S.*?)\.?$",
    ),
    "saving": (
        r"Saving model checkpoint to (?P<path>\S+)$",
    ),  # transformers/trainer.py _save, where it logs at INFO
    # what other trainers say before they save: axolotl, DeepSpeed, accelerate, own scripts
    "save_begun": (
        r"\[Torch\] Saving \S+",
        r"\b[Ss]aving (?:current state|(?:the |trained |final |best )*(?:model|checkpoint|adapter|weights))\b",
    ),
    "evaluating": (
        r"\*{5} Running (?:[Ee]valuation|[Pp]rediction) \*{5}",
    ),  # transformers/trainer.py
    # transformers/tokenization_utils_base.py, in trainer.py _save after the model
    "tokenizer_saved": (r"tokenizer config file saved in (?P<path>\S+)/tokenizer_config\.json$",),
    # transformers/trainer.py, where it logs at INFO
    "planned": (r">>\s+Total optimization steps = (?P<total>[\d,]{1,15})$",),
    # HF Trainer and TRL's, as a frame or a warning names it
    "trainer": (
        ("/trainer", r"/transformers/trainer\w*\.py\b|/trl/trainer/(?:(?P<of>\w+)_trainer\.py\b)?"),
    ),
    "trainer_of": (
        r"/trl/scripts/(?P<of>sft|dpo|kto|grpo|rloo|reward)\.py\b",  # as a frame or accelerate's last word names it
        # what TRL before 1.0 says of an argument that was passed to its trainer
        r"\b(?:for|to the|in the) `?(?P<of>[A-Z][A-Za-z]+)Trainer\b",
    ),
    # trl/trainer/sft_trainer.py, dpo_trainer.py: the first bars of the data set
    "begun": (
        r"\b(?:Tokenizing|Extracting prompt from|Adding EOS to) train dataset[^:%|]*: +0%\|",
    ),
    "loading": (
        r"\bLoading (?:weights|checkpoint shards): +0%\|",
    ),  # the bar over a model's weights
    # tqdm: the training's bar, before the first step
    "bar_begun": (("| 0/", r"^[ \t]*0%\|[^|]*\| +0/(?P<total>\d{1,12}) \[00:00<\?"),),
    "liger_asked": (
        "`use_liger_kernel=True` is deprecated",
    ),  # trl/trainer/sft_trainer.py, dpo_trainer.py
    # trl/trainer/sft_trainer.py, the bar of pack_dataset
    "packing": (r"Packing train dataset(?: \(num_proc=\d+\))?:",),
    # trl/trainer/dpo_trainer.py::DPOTrainer._precompute_ref_logps[Computing reference],
    # trl/trainer/dpo_trainer.py::DPOTrainer._precompute_ref_logps[Caching reference]
    "reference_missed": (
        ("reference log probs for ", r"(?:Computing|Caching) reference log probs for \w+ dataset"),
    ),
}

PATTERNS: tuple[Pattern, ...] = (*_LINES, *make_patterns(_TABLE), *COMMON)
