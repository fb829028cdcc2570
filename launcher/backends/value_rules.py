"""Rules for open-instruct about single values that parse and then crash, or do nothing.

Line numbers are those of the pin; tests/test_upstream_facts.py holds them against a checkout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from launcher.backends.open_instruct import PIN
from launcher.backends.rule import Rule, say
from launcher.errors import Finding, Severity, brief
from launcher.schema import Values

# The lists below are the pin's; at another commit they say nothing.
# dataset_transformation.py:159
CHAT_TEMPLATES = frozenset({
    "simple_concat_with_space", "simple_concat_with_new_line", "simple_chat",
    "assistant_message_only", "zephyr", "olmo", "tulu", "tulu_thinker", "tulu_thinker_r1_style",
    "olmo_old", "olmo_thinker", "olmo_thinker_no_think_7b",
    "olmo_thinker_remove_intermediate_thinking", "olmo_thinker_no_think_sft_tokenization",
    "olmo_thinker_rlzero", "olmo_thinker_code_rlzero", "r1_simple_chat",
    "r1_simple_chat_postpend_think", "r1_simple_chat_postpend_think_orz_style",
    "r1_simple_chat_postpend_think_tool_vllm", "qwen_instruct_user_boxed_math",
})  # fmt: skip
# dataset_transformation.py:869
TOKENIZERS = frozenset({
    "get_tokenizer_simple_v1", "get_tokenizer_tulu_v1", "get_tokenizer_tulu_v2_1",
    "get_tokenizer_tulu_v2_2",
})  # fmt: skip
# dataset_transformation.py:1541; those that take `max_seq_length`, which the first one is given
TRANSFORMS = frozenset({
    "sft_tokenize_v1", "sft_tokenize_mask_out_prompt_v1", "sft_filter_v1",
    "sft_tulu_tokenize_and_truncate_v1", "sft_tulu_filter_v1", "preference_tokenize_v1",
    "preference_filter_v1", "preference_tulu_tokenize_and_truncate_v1",
    "preference_tulu_filter_v1", "rlvr_tokenize_v1", "rlvr_max_length_filter_v1",
})  # fmt: skip
TAKE_LENGTH = frozenset({
    "sft_tulu_tokenize_and_truncate_v1", "preference_tulu_tokenize_and_truncate_v1",
})  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a field can hold, and what happens to the others; `needs` is a switch it acts under."""

    holds: Callable[[float], bool]
    severity: Severity
    otherwise: str
    needs: str | None = None


_RANGES: Mapping[str, tuple[Range, ...]] = {
    # finetune.py:688, dpo_tune_cache.py:435
    "learning_rate": (
        Range(lambda n: n >= 0, "error", "the optimizer refuses it"),
        Range(lambda n: n != 0, "warning", "nothing is learnt"),
    ),
    "weight_decay": (Range(lambda n: n >= 0, "error", "the optimizer refuses it"),),
    # finetune.py:356, dpo_tune_cache.py:464
    "warmup_ratio": (
        Range(lambda n: not math.isnan(n), "error", "no number of steps can be made of it"),
        Range(
            lambda n: math.isnan(n) or 0 <= n <= 1, "warning",
            "it is a share of all steps, from 0 to 1; above, the learning rate never gets to its value",
        ),
    ),
    # finetune.py:491, dpo_tune_cache.py:238
    "seed": (Range(lambda n: 0 <= n < 2**32, "error", "numpy takes 0 to 4294967295"),),
    # dataset_transformation.py:1195, dataset_transformation.py:1236
    "max_seq_length": (Range(lambda n: n > 0, "error", "it leaves nothing of any row"),),
    # finetune.py:630, dpo_tune_cache.py:369
    "lora_rank": (Range(lambda n: n > 0, "error", "peft refuses it", needs="use_lora"),),
    # finetune.py:632, dpo_tune_cache.py:371
    "lora_dropout": (Range(lambda n: n <= 1, "error", "torch refuses it", needs="use_lora"),),
    # finetune.py:737
    "sequence_parallel_size": (Range(lambda n: n != 0, "error", "upstream divides by it"),),
    # finetune.py:865, finetune.py:932, dpo_tune_cache.py:623, dpo_tune_cache.py:626
    "logging_steps": (
        Range(lambda n: n != 0, "warning", "no loss is ever printed"),
        Range(lambda n: n >= 0, "warning", "every loss is printed with the wrong sign"),
    ),
    # finetune.py:985, dpo_tune_cache.py:708
    "max_train_steps": (Range(lambda n: n > 0, "warning", "the model is saved untrained"),),
    # utils.py:831
    "keep_last_n_checkpoints": (
        Range(lambda n: n != 0, "warning", "each checkpoint is deleted as soon as it is saved"),
    ),
}  # fmt: skip


def out_of_range(values: Values) -> Iterator[Finding]:
    """finetune.py:688, dpo_tune_cache.py:435 and the places that the table above names."""
    for key, ranges in _RANGES.items():
        number = values.get(key)
        if not isinstance(number, int | float) or not values.given(key):
            continue
        for one in ranges:
            if not one.holds(number) and (one.needs is None or values[one.needs]):
                yield say(
                    one.severity, "run", "out-of-range", key, f"`{key}: {number}`: {one.otherwise}"
                )


def no_epochs(values: Values) -> Iterator[Finding]:
    """finetune.py:694, dpo_tune_cache.py:442."""
    key = "num_epochs" if "num_epochs" in values else "num_train_epochs"
    if values["max_train_steps"] is None and isinstance(values[key], int) and values[key] < 1:
        yield say(
            "warning", "run", "out-of-range", key,
            f"`{key}: {values[key]}`: the model is saved untrained",
        )  # fmt: skip


# --- names that upstream looks up ------------------------------------------------------------------


def _at_pin(values: Values) -> bool:
    return values.schema.version == PIN


def unknown_template(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:846 uses the tokenizer's own instead; dataset_transformation.py:775 stops."""
    name, function = values["chat_template_name"], values["get_tokenizer_fn"]
    if name is None or name in CHAT_TEMPLATES or function == "get_tokenizer_simple_v1":
        return
    if not _at_pin(values):
        return
    stops = function == "get_tokenizer_tulu_v2_1"
    what = "refuses it" if stops else "silently uses the tokenizer's own"
    yield say(
        "error" if stops else "warning", "run", "unknown-template", "chat_template_name",
        f"there is no chat template `{brief(name)}`: upstream {what}",
        f"one of {', '.join(sorted(CHAT_TEMPLATES))}",
    )  # fmt: skip


def unknown_tokenizer_function(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:920 looks it up."""
    name = values["get_tokenizer_fn"]
    if name not in TOKENIZERS and _at_pin(values):
        yield say(
            "error", "run", "unknown-function", "get_tokenizer_fn",
            f"there is no tokenizer function `{brief(name)}`", f"one of {', '.join(sorted(TOKENIZERS))}",
        )  # fmt: skip


def transforms(values: Values) -> Iterator[Finding]:
    """finetune.py:501, dpo_tune_cache.py:248 bring arguments for two, the first of them a length;
    dataset_transformation.py:1685 wants as many functions, dataset_transformation.py:1716 looks them up.
    """
    key = "transform_fn" if "transform_fn" in values else "dataset_transform_fn"
    names = values[key] or []
    for index, name in enumerate(names):
        if name not in TRANSFORMS and _at_pin(values):
            yield say(
                "error", "run", "unknown-function", f"{key}[{index}]",
                f"there is no transform `{brief(name)}`", f"one of {', '.join(sorted(TRANSFORMS))}",
            )  # fmt: skip
    if len(names) != 2:
        yield say(
            "error", "run", "transform-fn", key,
            f"`{key}` has {len(names)} entries: upstream has arguments for exactly two",
            "a tokenising function and a filter",
        )  # fmt: skip
    elif names[0] in TRANSFORMS - TAKE_LENGTH and _at_pin(values):
        yield say(
            "error", "run", "transform-fn", f"{key}[0]",
            f"`{names[0]}` takes no `max_seq_length`, which upstream hands to the first transform",
            f"one of {', '.join(sorted(TAKE_LENGTH))}",
        )  # fmt: skip


def model_arguments(values: Values) -> Iterator[Finding]:
    """finetune.py:544, dpo_tune_cache.py:283: only a text that starts with a brace becomes a mapping."""
    given = values["additional_model_arguments"]
    if isinstance(given, str) and not given.startswith("{"):
        yield say(
            "error", "run", "model-arguments", "additional_model_arguments",
            f"`additional_model_arguments` is a mapping, upstream reads no file: `{brief(given)}`",
            "write the mapping itself",
        )  # fmt: skip


# --- what cannot work ------------------------------------------------------------------------------


def cache_on_the_hub(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:2128 takes two things apart, dataset_transformation.py:1877 gives one."""
    key = "dataset_cache_mode" if "dataset_cache_mode" in values else "cache_mode"
    if values[key] == "hf":
        yield say(
            "error", "run", "cache-on-hub", key,
            f"`{key}: hf` crashes: upstream takes the tokenised set for a pair", f"write `{key}: local`",
        )  # fmt: skip


def quantised_without_adapter(values: Values) -> Iterator[Finding]:
    """finetune.py:619, dpo_tune_cache.py:359: adapters come with `use_lora` alone."""
    if values["use_qlora"] and not values["use_lora"]:
        yield say(
            "warning", "run", "qlora-without-lora", "use_qlora",
            "`use_qlora` without `use_lora` adds no adapter: the 4-bit weights are frozen, only "
            "embeddings, norms and the head are trained",
            "add `use_lora: true`",
        )  # fmt: skip


def packed_sequences_split(values: Values) -> Iterator[Finding]:
    """finetune.py:642: what packing adds to a batch (padding_free_collator.py:102) is not as long as a
    row, which sequence parallelism refuses (deepspeed/runtime/sequence_parallel/ulysses_sp.py:586).
    """
    size = values["sequence_parallel_size"]
    if values["packing"] and isinstance(size, int) and size > 1:
        yield say(
            "error", "run", "packing-split", "packing",
            f"`packing` crashes with `sequence_parallel_size: {size}`: packed batches cannot be split",
            "leave out one of them",
        )  # fmt: skip


def balancing_apart(values: Values) -> Iterator[Finding]:
    """dpo_utils.py:955 joins two losses that have no dimension to join along."""
    if values["load_balancing_loss"] and not values["concatenated_forward"]:
        yield say(
            "error", "run", "balancing-separate-forward", "load_balancing_loss",
            "`load_balancing_loss` crashes with `concatenated_forward: false`",
            "write `concatenated_forward: true`",
        )  # fmt: skip


def resume_unread(values: Values) -> Iterator[Finding]:
    """utils.py:813: the output folder is there by then (finetune.py:494, dpo_tune_cache.py:241), and wins."""
    if values.given("resume_from_checkpoint"):
        yield say(
            "warning", "run", "resume-unread", "resume_from_checkpoint",
            "`resume_from_checkpoint` is not read: upstream resumes from what the output folder holds",
            "put the checkpoint, with its file COMPLETED, into the output folder",
        )  # fmt: skip


_SHARED: tuple[Rule, ...] = (
    out_of_range, no_epochs, unknown_template, unknown_tokenizer_function, transforms,
    model_arguments, cache_on_the_hub, quantised_without_adapter, resume_unread,
)  # fmt: skip

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_SHARED, packed_sequences_split),
    "dpo": (*_SHARED, balancing_apart),
}
