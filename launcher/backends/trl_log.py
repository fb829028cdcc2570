"""What TRL's scripts and HF Trainer print (trl 1.16, transformers 5.17), as patterns."""

from __future__ import annotations

from launcher.backends import any_log
from launcher.logs import Pattern, pattern

_OWN: tuple[Pattern, ...] = (
    pattern(
        "metrics",
        "{'loss': ",
        r"(?P<pairs>\{'loss': [^{}]*\})",
        "transformers/trainer_callback.py ProgressCallback.on_log; PrinterCallback without a bar",
        always=(r"\{'loss': '?-?[niNI]", r"_norm': '?-?[niNI]"),
    ),
    pattern(
        "metrics",
        "{'train_runtime': ",
        r"(?P<pairs>\{'train_runtime': [^{}]*\})",
        "transformers/trainer.py _finalize_training, through the same callback",
        anchors=("'train_samples_per_second': ", "'train_steps_per_second': "),
    ),
    *(
        # a mean over the run or an evaluation; the losses of steps are in the dicts of `metrics`
        pattern(
            "mean_nonfinite",
            f"_loss': {value}",
            r"'(?P<what>train_loss|eval_(?:\w+_)?loss)': '?(?P<value>nan|inf)\b",
            "transformers/trainer.py _finalize_training, evaluation_loop, through the same callback",
            anchors=(
                *("'train_samples_per_second': ", "'eval_samples_per_second': "),
                "_samples_per_second': '",
            ),
        )
        for value in ("'nan", "nan", "'inf", "inf")
    ),
    pattern(
        "training_completed",
        "Training completed.",
        r"✅ Training completed\.",
        "trl/scripts/sft.py:116, dpo.py:122",
        anchors=("✅ Training completed.",),
    ),
    *(
        pattern(
            "saved",
            needle,
            r"\b[Mm]odel (?:successfully )?saved (?:to|in)[: ]+(?P<path>\S.*?)\.?$",
            "trl/scripts/sft.py:120, dpo.py:126; alignment-handbook, axolotl, and many own scripts",
            anchors=anchors,
        )
        for needle, anchors in (
            ("odel saved ", ("Model saved to",)),
            ("odel successfully saved ", ("Model successfully saved to ",)),
        )
    ),
    pattern(
        "saving",
        "Saving model checkpoint to ",
        r"Saving model checkpoint to (?P<path>\S+)$",
        "transformers/trainer.py _save, where it logs at INFO",
    ),
    pattern(
        "tokenizer_saved",
        "tokenizer config file saved in ",
        r"tokenizer config file saved in (?P<path>\S+)/tokenizer_config\.json$",
        "transformers/tokenization_utils_base.py, in trainer.py _save after the model",
    ),
    pattern(
        "planned",
        "Total optimization steps = ",
        r">>\s+Total optimization steps = (?P<total>[\d,]{1,15})$",
        "transformers/trainer.py, where it logs at INFO",
    ),
    pattern(
        "trainer",
        "/trainer",
        r"/transformers/trainer\w*\.py\b|/trl/trainer/(?:(?P<of>\w+)_trainer\.py\b)?"
        r"|/llamafactory/train/(?P<kind>\w+)/trainer\.py\b",
        "HF Trainer, TRL's and LLaMA-Factory's, as a frame or a warning names it",
        anchors=("/site-packages/transformers/trainer", "/site-packages/trl/trainer/"),
    ),
    pattern(
        "trainer_of",
        "/trl/scripts/",
        r"/trl/scripts/(?P<of>sft|dpo|kto|grpo|rloo|reward)\.py\b",
        "TRL's scripts, as a frame or accelerate's last word names them",
        anchors=("/site-packages/trl/scripts/",),
    ),
    pattern(
        "trainer_of",
        "Trainer",
        r"\b(?:for|to the|in the) `?(?P<of>[A-Z][A-Za-z]+)Trainer\b",
        "what TRL before 1.0 says of an argument that was passed to its trainer",
        anchors=(),
    ),
    pattern(
        "trainer_of",
        "llamafactory.train.",
        r"\bllamafactory\.train\.(?P<of>\w+)\.(?:workflow|trainer)\b",
        "LLaMA-Factory's own logger",
        anchors=(),
    ),
    pattern(
        "labelled",
        "label_ids:",
        r"^label_ids:$",
        "llamafactory/data/processor/supervised.py, feedback.py, unsupervised.py: its first example",
        anchors=(),
    ),
    pattern(
        "factory",
        ".hparams.parser",
        r"\b(?:llamafactory|llmtuner)\.hparams\.parser\b",
        "LLaMA-Factory's own logger, of each process",
        anchors=(),
    ),
    pattern(
        "begun",
        " train dataset",
        r"\b(?:Tokenizing|Extracting prompt from|Adding EOS to) train dataset[^:%|]*: +0%\|",
        "trl/trainer/sft_trainer.py, dpo_trainer.py: the first bars of the data set",
        anchors=(" train dataset:   0%|  ", " train dataset (num_proc="),
    ),
    pattern(
        "loading",
        "Loading ",
        r"\bLoading (?:weights|checkpoint shards): +0%\|",
        "transformers/core_model_loading.py, modeling_utils.py: the bar over a model's weights",
        anchors=("Loading checkpoint shards:   0%|", "Loading weights:   0%|  "),
    ),
    pattern(
        "bar_begun",
        "| 0/",
        r"^[ \t]*0%\|[^|]*\| +0/(?P<total>\d{1,12}) \[00:00<\?",
        "tqdm: the training's bar, before the first step",
        anchors=(),
    ),
    pattern(
        "liger_asked",
        "`use_liger_kernel=True` is deprecated",
        r"`use_liger_kernel=True` is deprecated",
        "trl/trainer/sft_trainer.py, dpo_trainer.py",
    ),
    pattern(
        "packing",
        "Packing train dataset",
        r"Packing train dataset(?: \(num_proc=\d+\))?:",
        "trl/trainer/sft_trainer.py, the bar of pack_dataset",
        anchors=("Packing train dataset:   0%|", "Packing train dataset (num_proc="),
    ),
    pattern(
        "reference_missed",
        "reference log probs for ",
        r"(?:Computing|Caching) reference log probs for \w+ dataset",
        "trl/trainer/dpo_trainer.py:1209,1237",
    ),
)

PATTERNS: tuple[Pattern, ...] = (*_OWN, *any_log.PATTERNS)
