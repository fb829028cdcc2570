"""What open-instruct prints at the known commits, as patterns with the line that prints each.

What the known commits print in other words has a pattern of each.
"""

import re

from launcher.upstream.logs.common import PATTERNS as COMMON
from launcher.upstream.logs.common import Pattern, Table, make_pattern, make_patterns

STAGES = {"FlatArguments": "sft", "DPOExperimentConfig": "dpo", "ExperimentConfig": "dpo"}
"""Which stage a dataclass in the arguments dump belongs to.

Until April 2026 DPO's was called ExperimentConfig, until January 2026 FlatArguments like SFT's.
"""

ATTENTION = {
    "flash_4": "flash_attention_4",
    "flash_3": "flash_attention_3",
    "flash_2": "flash_attention_2",
    "torch": "sdpa",
    "te": "sdpa",
}
"""olmo-core's names of attention -> those of transformers
(open_instruct/model_utils.py::[_OLMO_CORE_TO_HF_ATTN]).
"""

# A logged line, not the same words in a training sample that visualize_token prints.
# Before August 2025 the logger's name stood where the file does now.
_LOGGED = r"(?:\.py:\d+ -|\[RANK \d+\]|INFO:[\w.]+:| - [A-Z]+ - [\w.]+ -)\s+"
# of a row of the data, which upstream shows as a dict, the same words are no announcement
_BARE = r"^[^'\"{}]{0,400}?"
_LIGER = (
    r"^(?:\[\w+\]:?\s*|\d+:\s+)?(?:[^'\"{}]{0,400}?(?:" + _LOGGED + r"|[A-Z]+:[\w.]+:\s*|>>\s+))?"
)

_ARGUMENT = (
    r"│   (?:(?P<block>(?P<first>FlatArguments|(?:DPO)?ExperimentConfig)|TokenizerConfig)\(|"
    r"│   (?P<deep>(?:│   )+)?(?P<field>\S.*)|(?P<other>\S.*))"
)

_LINES: tuple[Pattern, ...] = (
    # open_instruct/finetune.py::main[pprint], dpo_tune_cache.py::main[pprint] (rich.pretty.pprint)
    *(
        make_pattern("arguments", _ARGUMENT, f"{begin}(")
        for begin in ("│   FlatArguments", "ExperimentConfig", "│   TokenizerConfig")
    ),
    # open_instruct/finetune.py::main[Total optimization],
    # dpo_tune_cache.py::main[Total optimization]
    make_pattern("total_steps", _LOGGED + r"Total optimization steps = (?P<total>\d{1,12})"),
    # open_instruct/finetune.py::main[Aux Loss:], open_instruct/finetune.py::main[logger.info #14],
    # dpo_tune_cache.py::main[logger_str = f]
    make_pattern(
        "step",
        _LOGGED + r"Step: (?P<step>\d{1,12}), LR: (?P<lr>[^\s,]+), Loss: (?P<loss>[^\s,]+)"
        r"(?:,? Aux Loss: (?P<aux>[^\s,]+))?(?:, TPS: (?P<tps>[^\s,]+))?",
        "Step: ",
        always=(r"Loss: -?[niNI]",),
    ),
)

_TABLE: Table = {
    # open_instruct/finetune.py::main[using the output], dpo_tune_cache.py::main[using the output]
    "output_dir": (_LOGGED + r"using the output directory: (?P<path>.+)",),
    # accelerate/state.py, by open_instruct/finetune.py::main[logger.info(accelerator.state],
    # dpo_tune_cache.py::main[logger.info(accelerator.state]
    "processes": (r"Num processes: (?P<count>\d+)",),
    # open_instruct/finetune.py::main[Attempting to apply],
    # dpo_tune_cache.py::main.load_model[Attempting to apply]
    "liger_attempted": (
        (
            "Attempting to apply liger-kernel",
            _BARE + _LOGGED + r"Attempting to apply liger-kernel\."
            r"(?: fused_linear_cross_entropy=(?P<fused>\w+))?",
        ),
    ),
    # liger_kernel/transformers/monkey_patch.py::_apply_liger_kernel[Applying Liger] (liger-kernel
    # 0.7.0)
    "liger_applied": (
        (
            _LIGER + r"Applying Liger kernels (?:for|to model instance with) model type: "
            r"(?P<model_type>\w+)(?: with kwargs: (?P<kwargs>.*))?"
        ),
    ),
    # liger_kernel/transformers/monkey_patch.py _apply_liger_kernel
    "liger_unsupported": (
        (
            "Liger kernels",
            _LIGER + r"(?:There are currently no Liger kernels supported"
            r"|No Liger kernels will be applied).*",
        ),
    ),
    # open_instruct/model_utils.py::detect_attn_implementation[logger.info(f]
    "attention": (_LOGGED + r"Auto-detected attention implementation: (?P<value>\S+)",),
    # open_instruct/dpo_tune_cache.py::main[Using packing/padding],
    # dpo.py::main[Using packing/padding]
    "packing": ("Using packing/padding-free collation",),
    "dataset_missed": (
        # open_instruct/dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset[found or]
        # (local), :1821 (hf)
        ("Cache not found", r"Cache not found(?: or invalid)?, transforming datasets\.\.\."),
        # open_instruct/dataset_transformation.py::DatasetTransformationCache.load_or_transform_dataset[so we will]
        (
            "dataset_skip_cache is True",
            r"dataset_skip_cache is True, so we will not load the dataset from cache",
        ),
    ),
    # open_instruct/dataset_transformation.py::_tokenize_row_or_mask_out[Dropping a conversation]:
    # the whole row is masked, and dropped with those without a trained token
    "row_masked": (
        _LOGGED + r"Dropping a conversation whose assistant label spans could not be derived",
    ),
    # open_instruct/dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset[dataset to]
    # (local), :1842 (hf)
    "dataset_saved": (r"(?:Saved|Pushed) transformed dataset to (?P<path>[^🚀✅\n]+)",),
    # open_instruct/dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset[print(f #1]
    # (hit), :1996 (miss), :1805 and :1872 (hf)
    "dataset_found": (r"Found cached dataset at (?P<path>[^🚀✅\n]+)",),
    # open_instruct/dpo_utils.py::build_reference_logprobs_cache[Loading reference]
    "reference_hit": (_LOGGED + r"Loading reference logprobs cache from (?P<path>.+)",),
    "reference_missed": (
        # open_instruct/dpo_utils.py::build_reference_logprobs_cache[for batch in (pbar]. The bar,
        # as it first stands: open_instruct/dpo.py::main[Caching reference] logs the same words
        # before it looks for the cache.
        r"Caching reference logprobs:   0%\|",
        # open_instruct/dpo_utils.py::build_reference_logprobs_cache[GiB of GPU RAM],
        # open_instruct/dpo_utils.py::build_reference_logprobs_cache[GiB of RAM.]
        _LOGGED + r"Reference logprobs cached, using",
        # open_instruct/dpo_utils.py::build_reference_logprobs_cache[Saving reference]
        _LOGGED + r"Saving reference logprobs cache to (?P<path>.+)",
    ),
    # open_instruct/finetune.py::main[Resumed from checkpoint],
    # dpo_tune_cache.py::main[accelerator.print(f]
    "resumed": (r"Resumed from checkpoint: (?P<path>.+)",),
    # transformers/modeling_utils.py::PreTrainedModel.save_pretrained[logger.info(f],
    # transformers/modeling_utils.py::PreTrainedModel.save_pretrained[split in];
    # accelerate/checkpointing.py::save_accelerator_state[Model weights saved] for checkpoints
    "saved": (
        r"Model weights saved in (?P<path>.+)",
        (
            "You can find where each parameters has been saved in the index located at",
            r"saved in the index located at (?P<path>.+?)\.?$",
        ),
    ),
    # open_instruct/utils.py::clean_last_n_checkpoints[Remaining files], after every checkpoint too
    "remaining": (_LOGGED + r"Remaining files: ?\[(?P<files>.*)\]",),
}

TRAINING_ROWS = re.compile(
    rb"\*{5} Running training \*{5}.{0,400}?Num examples = ([\d,]+)", re.DOTALL
)
"""How many rows an epoch has (open_instruct/finetune.py::main[Num examples =],
dpo_tune_cache.py::main[Num examples =]): several lines, no `Pattern`.
"""
REFERENCE_CACHE = re.compile(
    rb"(?:Saving|Loading) reference logprobs cache (?:to|from) (\S[^\r\n]*)"
)
"""The file of the reference's log-probabilities, whichever of `reference_hit` and
`reference_missed` names it.
"""

PATTERNS: tuple[Pattern, ...] = (*_LINES, *make_patterns(_TABLE), *COMMON)
