"""Rules for open-instruct about single values that parse and then crash, or do nothing.

Line numbers are those of the pin; tests/test_upstream_facts.py holds them against a checkout.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.backends import model_config
from launcher.backends.open_instruct import PIN
from launcher.backends.rule import Range, Rule, check, outside, say
from launcher.errors import Finding, Severity, brief
from launcher.schema import Values

# transformers/trainer_utils.py:561; those that take nothing but steps, and those that take more
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
)  # fmt: skip
SCHEDULES_WITH_SETTINGS = {
    "cosine_with_min_lr": "its lowest rate", "cosine_warmup_with_min_lr": "its lowest rate",
    "warmup_stable_decay": "its number of decay steps", "reduce_lr_on_plateau": "a metric",
    "greedy": "a metric",
}  # fmt: skip
# accelerate/utils/dataclasses.py:745
TRACKERS = (
    "all", "aim", "tensorboard", "wandb", "trackio", "comet_ml", "mlflow", "clearml", "dvclive",
    "swanlab",
)  # fmt: skip
# dataset_transformation.py:869: of its functions, the one that reads no template and the one that
# refuses
_SIMPLE, _STRICT = "get_tokenizer_simple_v1", "get_tokenizer_tulu_v2_1"
# a path that a shell would have changed
_UNEXPANDED = re.compile(r"~|.*\$\{?\w", re.DOTALL)


# --- numbers
# ---------------------------------------------------------------------------------------


_RANGES: Mapping[str, tuple[Range, ...]] = {
    # finetune.py:688, dpo_tune_cache.py:435
    "learning_rate": (
        Range(lambda n: n >= 0, "error", "the optimizer refuses it"),
        Range(lambda n: n != 0, "warning", "nothing is learnt"),
    ),
    # finetune.py:674, dpo_tune_cache.py:421: as a group's own it is not looked at by torch
    "weight_decay": (
        Range(lambda n: not math.isnan(n), "error", "no number is left of the weights"),
        Range(lambda n: not n < 0, "warning", "the weights grow with every step, which nothing refuses"),
    ),
    # finetune.py:356, dpo_tune_cache.py:464
    "warmup_ratio": (
        Range(lambda n: not math.isnan(n), "error", "no number of steps can be made of it"),
        Range(
            lambda n: math.isnan(n) or 0 <= n <= 1, "warning",
            "it is a share of all steps, from 0 to 1; above, the learning rate never gets to "
            "its value",
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
    # finetune.py:631, dpo_tune_cache.py:370
    "lora_alpha": (Range(lambda n: n != 0, "warning", "nothing is learnt", needs="use_lora"),),
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
    # dpo_utils.py:561, dpo_utils.py:608, dpo_utils.py:639
    "beta": (
        Range(math.isfinite, "error", "the loss is no number"),
        Range(lambda n: not -math.inf < n < 0, "warning", "the rejected answers are preferred"),
        Range(
            lambda n: n != 0, "warning",
            "the loss does not tell chosen from rejected answers: no preference is learnt",
            code="zero-beta",
        ),
    ),
    "label_smoothing": (
        Range(math.isfinite, "error", "the loss is no number"),
        Range(
            lambda n: not math.isfinite(n) or 0 <= n <= 1, "warning",
            "it is a share of pairs; outside 0 to 1 the loss has no lower bound",
        ),
        Range(lambda n: n != 0.5, "warning", "chosen and rejected answers weigh the same"),
        Range(lambda n: not 0.5 < n <= 1, "warning", "the rejected answers are preferred"),
    ),
}  # fmt: skip


def out_of_range(values: Values) -> Iterator[Finding]:
    """finetune.py:688, dpo_tune_cache.py:435 and the places that the table above names."""
    for key, value, one in outside(values, _RANGES):
        yield say(one.severity, "run", one.code, key, f"`{key}: {value}`: {one.otherwise}")


def no_epochs(values: Values) -> Iterator[Finding]:
    """finetune.py:694, dpo_tune_cache.py:442: read where no number of steps is given, and written over
    (finetune.py:723, dpo_tune_cache.py:478), which is why the reads of the source alone do not tell.
    """
    key = "num_epochs" if "num_epochs" in values else "num_train_epochs"
    steps = values["max_train_steps"]
    if steps is None and isinstance(values[key], int) and values[key] < 1:
        yield say(
            "warning", "run", "out-of-range", key,
            f"`{key}: {values[key]}`: the model is saved untrained",
        )  # fmt: skip
    elif steps is not None and values.given(key):
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}` does nothing here: it is read only where `max_train_steps` is not set, and "
            f"`max_train_steps` is {steps}",
            "delete one of the two lines",
        )  # fmt: skip


def checkpoint_sign(values: Values) -> Iterator[Finding]:
    """finetune.py:974, dpo_tune_cache.py:696: the sign does not change what is divisible."""
    key = "checkpointing_steps"
    try:
        steps = int(str(values[key]))
    except ValueError:
        return
    if steps < 0:
        often = "every step" if steps == -1 else f"every {-steps} steps"
        yield say(
            "warning", "run", "checkpoint-sign", key, f"`{key}: {steps}` saves a full checkpoint {often}",
            "for none, write a number that no step reaches",
        )  # fmt: skip


# --- names that upstream looks up
# ------------------------------------------------------------------


def _at_pin(values: Values) -> bool:
    return values.schema.version == PIN


def _looked_up(values: Values, table: str, name: Any) -> tuple[str, ...]:
    """The texts of a mapping of this source, where `name` is none of them; nothing without a mapping."""
    known = values.schema.tables.get(table, {})
    return () if name in known else tuple(sorted(known))


def unknown_template(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:846; dataset_transformation.py:869 has the functions: one reads no
    template, one refuses those that it does not know (dataset_transformation.py:775).
    """
    name, strict = values["chat_template_name"], values["get_tokenizer_fn"] == _STRICT
    known = _looked_up(values, "CHAT_TEMPLATES", name)
    if name is not None and known and values["get_tokenizer_fn"] != _SIMPLE:
        what = "refuses it" if strict else "silently uses the tokenizer's own"
        yield say(
            "error" if strict else "warning", "run", "unknown-template", "chat_template_name",
            f"there is no chat template `{brief(name)}`: upstream {what}", f"one of {', '.join(known)}",
        )  # fmt: skip


def unknown_tokenizer_function(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:920 looks it up."""
    name = values["get_tokenizer_fn"]
    if known := _looked_up(values, "GET_TOKENIZER_FN", name):
        yield say(
            "error", "run", "unknown-function", "get_tokenizer_fn",
            f"there is no tokenizer function `{brief(name)}`", f"one of {', '.join(known)}",
        )  # fmt: skip


def scheduler_type(values: Values) -> Iterator[Finding]:
    """dpo_tune_cache.py:460, once the model is loaded: transformers/optimization.py:986 looks it up, and
    this script hands over numbers of steps alone.
    """
    key = "lr_scheduler_type"
    name = values[key]
    if name in SCHEDULES or values["cache_dataset_only"]:
        return
    needs = SCHEDULES_WITH_SETTINGS.get(name)
    told = (
        f"there is no schedule `{brief(name)}`" if needs is None
        else f"`{key}: {name}` crashes: it needs {needs}, which upstream does not give"
    )  # fmt: skip
    # another commit may want a newer transformers, which knows more of them
    severity: Severity = "error" if needs or _at_pin(values) else "warning"
    yield say(severity, "run", "scheduler-type", key, told, f"one of {', '.join(SCHEDULES)}")


def unknown_report(values: Values) -> Iterator[Finding]:
    """finetune.py:374 hands on every word; accelerate/tracking.py:1356 looks at none beside `all`."""
    reported = values["report_to"] or ()
    if not values["with_tracking"] or "all" in reported or not _at_pin(values):
        return
    for word in reported:
        if word not in TRACKERS:
            yield say(
                "error", "run", "unknown-report", "report_to",
                f"`report_to: {brief(word)}` is no tracker of accelerate", f"one of {', '.join(TRACKERS)}",
            )  # fmt: skip


def tokenizer_revision(values: Values) -> Iterator[Finding]:
    """finetune.py:409, dpo_tune_cache.py:150; a folder has no revisions."""
    revision, name = values["model_revision"], values["tokenizer_name_or_path"]
    if revision in (None, "main") or values["tokenizer_revision"] is not None:
        return
    if name in (None, values["model_name_or_path"]):
        return
    if not model_config.is_path(name) and not model_config.here(name):
        yield say(
            "warning", "run", "tokenizer-revision", "model_revision",
            f"`model_revision: {brief(revision)}` is also looked up for the tokenizer "
            f"{brief(name)}",
            "add `tokenizer_revision: main`, or the tokenizer's own",
        )  # fmt: skip


def transforms(values: Values) -> Iterator[Finding]:
    """finetune.py:501, dpo_tune_cache.py:248 bring arguments for two, the first of them a length;
    dataset_transformation.py:1685 wants as many functions, dataset_transformation.py:1716 looks them up. Each
    reads columns of its own (dataset_transformation.py:1326).
    """
    key = "transform_fn" if "transform_fn" in values else "dataset_transform_fn"
    names = values[key] or []
    table = values.schema.tables.get("TRANSFORM_FNS", {})
    for index, name in enumerate(names):
        if known := _looked_up(values, "TRANSFORM_FNS", name):
            yield say(
                "error", "run", "unknown-function", f"{key}[{index}]",
                f"there is no transform `{brief(name)}`", f"one of {', '.join(known)}",
            )  # fmt: skip
    if len(names) != 2:
        yield say(
            "error", "run", "transform-fn", key,
            f"`{key}` has {len(names)} entries: upstream has arguments for exactly two",
            "a tokenising function and a filter",
        )  # fmt: skip
    elif names[0] in table:
        # what makes pairs says which columns are its two answers
        lengths = {name for name, given in table.items() if "max_seq_length" in given}
        pairs = {name for name in lengths if "chosen_key" in table[name]}
        fit = pairs if values.schema.stage == "dpo" else lengths - pairs
        if names[0] not in fit and "**" not in table[names[0]]:
            yield say(
                "error", "run", "transform-fn", f"{key}[0]",
                f"`{names[0]}` does not make the rows that this stage trains on, cut at "
                "`max_seq_length`",
                f"one of {', '.join(sorted(fit))}, or leave out `{key}`",
            )  # fmt: skip


def model_arguments(values: Values) -> Iterator[Finding]:
    """finetune.py:544, dpo_tune_cache.py:283: only a text that starts with a brace becomes a mapping. It goes
    into a call that has two names of its own (finetune.py:542, dpo_tune_cache.py:281), and what the model is
    then loaded with wins over the config (finetune.py:597,598, dpo_tune_cache.py:337,338).
    """
    key, given = "additional_model_arguments", values["additional_model_arguments"]
    if isinstance(given, str) and not given.startswith("{"):
        yield say(
            "error", "run", "model-arguments", key,
            f"`{key}` is a mapping, upstream reads no file: `{brief(given)}`", "write the mapping itself",
        )  # fmt: skip
        return
    # Liger's loader is given no precision
    own_precision = values["use_qlora"] or not values["use_liger_kernel"]
    for name in sorted(model_config.replaced(given)):
        if name in ("revision", "trust_remote_code"):
            argument = "model_revision" if name == "revision" else name
            yield say(
                "error", "run", "model-arguments", key,
                f"`{key}`: upstream gives `{name}` itself, and Python refuses it twice",
                f"write `{argument}` beside it",
            )  # fmt: skip
        elif name in ("dtype", "torch_dtype") and own_precision:
            yield say(
                "warning", "run", "model-arguments-unread", key,
                f"`{key}`: `{name}` is not read, the model is loaded in bfloat16", f"leave out `{name}`",
            )  # fmt: skip
        elif name == "attn_implementation":
            yield say(
                "warning", "run", "model-arguments-unread", key,
                f"`{key}`: `{name}` is not read, upstream chooses the attention when it loads "
                "the model",
                f"write `{name}` beside it" if name in values.schema.fields else f"leave out `{name}`",
            )  # fmt: skip


# --- paths
# -----------------------------------------------------------------------------------------


def unexpanded(values: Values) -> Iterator[Finding]:
    """finetune.py:494, dpo_tune_cache.py:241, finetune.py:428, dpo_tune_cache.py:168: as they are."""
    cache = "dataset_local_cache_dir" if "dataset_local_cache_dir" in values else "local_cache_dir"
    for key in ("output_dir", cache):
        if values.given(key) and _UNEXPANDED.match(text := str(values[key])):
            yield say(
                "warning", "run", "unexpanded-path", key,
                f"`{key}: {brief(text)}` would make a folder {brief(os.path.join('.', text))}: "
                "neither "
                "`~` nor variables are expanded",
                "write the path in full",
            )  # fmt: skip


def cache_on_the_hub(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:2128 takes two things apart, dataset_transformation.py:1877 gives one."""
    key = "dataset_cache_mode" if "dataset_cache_mode" in values else "cache_mode"
    if values[key] == "hf":
        yield say(
            "error", "run", "cache-on-hub", key,
            f"`{key}: hf` crashes: upstream takes the tokenised set for a pair", f"write `{key}: local`",
        )  # fmt: skip


_SHARED: tuple[Rule, ...] = (
    out_of_range, no_epochs, checkpoint_sign, unknown_template, unknown_tokenizer_function,
    tokenizer_revision, transforms, model_arguments, unexpanded, cache_on_the_hub,
    # see transformers/optimization.py:1015
    check(
        "finetune.py:359, dpo_tune_cache.py:460", "warmup-unread", "warmup_ratio",
        lambda v: v["lr_scheduler_type"] == "constant" and v.given("warmup_ratio")
        and v["warmup_ratio"] > 0,
        "`warmup_ratio` is not read with `lr_scheduler_type: constant`",
        "write `lr_scheduler_type: constant_with_warmup`", severity="warning",
    ),
    # adapters come with `use_lora` alone
    check(
        "finetune.py:619, dpo_tune_cache.py:359", "qlora-without-lora", "use_qlora",
        lambda v: v["use_qlora"] and not v["use_lora"],
        "`use_qlora` without `use_lora` adds no adapter: the 4-bit weights are frozen, only "
        "embeddings, norms and the head are trained", "add `use_lora: true`", severity="warning",
    ),
    # the output folder is there by then (finetune.py:494, dpo_tune_cache.py:241), and wins
    check(
        "utils.py:813", "resume-unread", "resume_from_checkpoint",
        lambda v: v.given("resume_from_checkpoint"),
        "`resume_from_checkpoint` is not read: upstream resumes from what the output folder holds",
        "put the checkpoint, with its file COMPLETED, into the output folder", severity="warning",
    ),
)  # fmt: skip
RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (
        *_SHARED, unknown_report,
        # what packing adds to a batch (padding_free_collator.py:102) is not as long as a row, which
        # sequence parallelism refuses (deepspeed/runtime/sequence_parallel/ulysses_sp.py:684)
        check(
            "finetune.py:642", "packing-split", "packing",
            lambda v: v["packing"] and (v["sequence_parallel_size"] or 1) > 1,
            "`packing` crashes with `sequence_parallel_size: {sequence_parallel_size}`: packed "
            "batches "
            "cannot be split", "leave out one of them",
        ),
    ),
    "dpo": (
        *_SHARED, scheduler_type,
        # it joins two losses that have no dimension to join along
        check(
            "dpo_utils.py:955", "balancing-separate-forward", "load_balancing_loss",
            lambda v: v["load_balancing_loss"] and not v["concatenated_forward"],
            "`load_balancing_loss` crashes with `concatenated_forward: false`",
            "write `concatenated_forward: true`",
        ),
    ),
}  # fmt: skip
