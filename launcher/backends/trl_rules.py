"""Rules for TRL: what parses and then stops, or does nothing, in its trainers, by the arguments alone.

What its `__post_init__`s refuse is in `trl_parser_rules`, the losses of DPO in `trl_loss_rules`. What a
rehearsal shows, and is neither common nor silent, has no rule: names of metrics, schedules, tasks, losses.
Line numbers are those of the pinned pair; tests/test_upstream_facts.py holds them against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from launcher.backends import trl_adapter_rules, trl_loss_rules, trl_parser_rules
from launcher.backends.rule import Range, Rule, check, number, outside, plain, say, unread
from launcher.backends.trl_resolved import inline, prepared
from launcher.errors import Finding, brief
from launcher.schema import Values

# --- numbers
# ---------------------------------------------------------------------------------------

RANGES: Mapping[str, tuple[Range, ...]] = {
    # torch/optim/adam.py:58
    "learning_rate": (
        Range(lambda n: n >= 0, "error", "torch's optimizers refuse it, and none learns with it"),
        Range(lambda n: n != 0, "warning", "nothing is learnt"),
    ),
    # transformers/trainer.py:1248: as a group's own it is not looked at by torch
    "weight_decay": (
        Range(lambda n: n >= 0, "warning", "the weights grow with every step, which nothing refuses"),
    ),
    # transformers/trainer.py:1863
    "max_grad_norm": (Range(lambda n: n >= 0, "warning", "gradients are not clipped, as with 0"),),
    # torch/nn/modules/dropout.py:24, peft/tuners/lora/layer.py:255
    "lora_dropout": (
        Range(lambda n: n != 1, "warning", "nothing reaches the adapter", needs="use_peft"),
    ),
    "lora_alpha": (
        Range(lambda n: n != 0, "warning", "the adapter counts for nothing", needs="use_peft"),
    ),
}  # fmt: skip


def out_of_range(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:1863 and the places that the table above names."""
    for key, value, one in outside(values, RANGES):
        yield say(one.severity, "run", one.code, key, f"`{key}: {plain(value)}`: {one.otherwise}")


def no_steps(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:2428: below 0 epochs are counted; trainer.py:1600 goes through them."""
    steps, epochs = number(values["max_steps"]), number(values["num_train_epochs"])
    if steps is None or epochs is None:
        return
    if steps <= 0 and epochs <= 0:
        yield say(
            "warning", "run", "out-of-range", "num_train_epochs",
            f"`num_train_epochs: {plain(epochs)}`: the model is saved untrained",
        )  # fmt: skip
    elif steps == 0:
        yield say(
            "warning", "run", "out-of-range", "max_steps",
            "`max_steps: 0`: one step is trained, and no more",
            "delete the line, and `num_train_epochs` decides",
        )  # fmt: skip
    elif steps > 0 and values.given("num_train_epochs"):
        yield say(
            "warning", "run", "conditional-key", "num_train_epochs",
            f"`num_train_epochs` does nothing here: `max_steps`, which is {plain(steps)}, comes "
            "before it",
            "delete one of the two lines",
        )  # fmt: skip
    elif steps < -1:
        yield say(
            "warning", "run", "out-of-range", "max_steps",
            f"`max_steps: {plain(steps)}` is no limit: `num_train_epochs` decides, which is {plain(epochs)}",
            "delete the line, or write a number of steps",
        )  # fmt: skip


def endless_warmup(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:2127: from 1 on it is a number of steps."""
    warmup, steps = number(values["warmup_steps"]), number(values["max_steps"])
    if warmup is None or steps is None or values["lr_scheduler_type"] == "constant":
        return
    if warmup >= 1 and 0 < steps < warmup + 1:
        yield say(
            "warning", "run", "out-of-range", "warmup_steps",
            f"`warmup_steps: {plain(warmup)}`: with `max_steps: {plain(steps)}` the learning rate never "
            "gets to its "
            "value", "below 1 it is a share of all steps: `warmup_steps: 0.1`",
        )  # fmt: skip


def no_length(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1441,1443,1480, dpo_trainer.py:155,157,1140."""
    length = number(values["max_length"])
    if length is not None and length <= 0 and not prepared(values):
        yield say(
            "error", "run", "out-of-range", "max_length",
            f"`max_length: {plain(length)}` leaves nothing of a row, or cuts its end off, however "
            "long it is",
            'write `max_length: "none"` for rows as they are',
        )  # fmt: skip


# --- names and mappings
# ----------------------------------------------------------------------------


def plain_texts(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py:83, dpo.py:81: a text that is no JSON stays one, and the first read crashes.

    Those that may name a file are read by their own rules.
    """
    for key in (
        "model_init_kwargs", "dataset_kwargs", "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ):  # fmt: skip
        text = values.get(key)
        if isinstance(text, str) and text and not text.startswith("{"):
            yield say(
                "error", "run", "not-a-mapping", key,
                f"`{key}` is a mapping, `{brief(text)}` would crash when it is read",
                f"write `{key}: {{name: value}}`",
            )  # fmt: skip


def model_set_twice(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py:83: the mapping wins over what the other arguments say of the model's loading."""
    key, kwargs = "model_init_kwargs", inline(values["model_init_kwargs"]) or {}
    for name in ("model_revision", "dtype", "attn_implementation", "trust_remote_code"):
        inner = name.removeprefix("model_")
        if inner in kwargs and values.given(name) and kwargs[inner] != values[name]:
            yield say(
                "warning", "run", "conditional-key", name,
                f"`{name}` does nothing here: `{key}` has a `{inner}` of its own", "keep one of them",
            )  # fmt: skip
    # transformers/modeling_utils.py:4069: the old name counts without the new one, which is always
    # given
    if "torch_dtype" in kwargs and "dtype" not in kwargs:
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}`: `torch_dtype` is not read beside `dtype`, which is {values['dtype']}",
            "write `dtype` in its place",
        )  # fmt: skip


def dataset_names(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1009 reads a single one."""
    key = "dataset_kwargs"
    others = sorted((inline(values[key]) or {}).keys() - {"skip_prepare_dataset"})
    if values.schema.tested and others:
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}`: `{brief(others[0])}` is not read, only `skip_prepare_dataset`", "leave it out",
        )  # fmt: skip


def packing_without_length(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1468; sets that are ready are not packed."""
    if values["max_length"] is not None or prepared(values):
        return
    evaluated = values["eval_strategy"] != "no" and values["eval_packing"]
    key = "packing" if values["packing"] else "eval_packing" if evaluated else None
    if key is not None:
        yield say(
            "error", "run", "packing-without-length", key,
            f"`{key}` fills rows up to `max_length`, which is none", "add `max_length: 4096`",
        )  # fmt: skip


# --- one condition, one message
# --------------------------------------------------------------------


def _both(first: str, second: str) -> Callable[[Values], bool]:
    return lambda values: bool(values[first] and values[second])


def _quantised(values: Values) -> bool:
    # both at once is refused earlier
    return bool(values["load_in_4bit"]) != bool(values["load_in_8bit"])


_EVALUATION = (
    "do_eval", "per_device_eval_batch_size", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better",
)  # fmt: skip
_SHARED: tuple[Rule, ...] = (
    *trl_parser_rules.RULES, *trl_adapter_rules.RULES, out_of_range, no_steps, endless_warmup,
    no_length, plain_texts, model_set_twice,
    check(
        "trl/scripts/sft.py:104 hands the trainer None.", "no-model", "model_name_or_path",
        lambda v: not v["model_name_or_path"], "no model named",
        "add `model_name_or_path: <hub name or folder>`",
    ),
    check(
        "trl/scripts/sft.py:100, dpo.py:98: one of both must be there.", "no-data", "dataset_name",
        lambda v: not v["dataset_name"] and not v.get("datasets"), "no data named",
        "add `dataset_name: <hub name or folder>`",
    ),
    check(
        "trl/scripts/utils.py:121: only a YAML file can give mappings.", "datasets-by-flag", "datasets",
        lambda v: any(str(word).startswith("{") for word in v.get("datasets") or ()),
        "`datasets` cannot be handed over as flags: each mapping would be read as a path",
        "write `dataset_name`",
    ),
    check(
        "Measured: 29.2 s against 15.2 s for the same steps (Qwen2.5-7B, one GPU).",
        "liger-with-lora", "use_liger_kernel", _both("use_liger_kernel", "use_peft"),
        "Liger on a LoRA model was measured at half the speed", "write `use_liger_kernel: false`",
        severity="warning",
    ),
    check(
        "transformers/trainer.py:2199", "best-without-eval", "save_strategy",
        lambda v: v["save_strategy"] == "best" and v["eval_strategy"] == "no",
        "`save_strategy: best` saves no checkpoint: `eval_strategy` is no",
        "add `eval_strategy: steps`", severity="warning",
    ),
    check(
        "transformers/trainer_callback.py:586", "out-of-range", "save_steps",
        lambda v: v["save_strategy"] == "steps" and number(v["save_steps"]) is not None
        and v["save_steps"] <= 0,
        "`save_steps: {save_steps}`: there is no checkpoint before the end of training",
        'write a number of steps, or `save_strategy: "no"`', severity="warning",
    ),
    check(
        "transformers/optimization.py:1015", "warmup-unread", "warmup_steps",
        lambda v: v["lr_scheduler_type"] == "constant" and v["warmup_steps"],
        "`warmup_steps` is not read with `lr_scheduler_type: constant`",
        "write `lr_scheduler_type: constant_with_warmup`", severity="warning",
    ),
    check(
        "transformers/trainer.py:1498,3517: as a flag, true is the name of a folder.",
        "resume-word", "resume_from_checkpoint",
        lambda v: str(v["resume_from_checkpoint"]).lower() in ("true", "false"),
        "`resume_from_checkpoint: {resume_from_checkpoint}` would be looked up as a folder",
        "name the checkpoint's folder, or delete the line",
    ),
    check(
        "transformers/trainer.py:702: a stream has no length.", "stream-without-steps",
        "dataset_streaming", lambda v: v["dataset_streaming"] and not (number(v["max_steps"]) or -1) > 0,
        "`dataset_streaming` gives no number of rows: the number of steps must be said",
        "add `max_steps: <number of steps>`",
    ),
    check(
        "transformers/trainer_utils.py:133", "quantised-whole", "load_in_4bit",
        lambda v: _quantised(v) and not v["use_peft"],
        "`load_in_4bit` and `load_in_8bit` need `use_peft`: quantised weights cannot be trained "
        "themselves", "add `use_peft: true`",
    ),
    check(
        "trl/trainer/sft_trainer.py:687, dpo_trainer.py:565", "quantised-twice", "model_init_kwargs",
        lambda v: _quantised(v) and "quantization_config" in (inline(v["model_init_kwargs"]) or {}),
        "`quantization_config` in `model_init_kwargs` beside `load_in_4bit` or `load_in_8bit`",
        "keep one of them",
    ),
    check(
        "trl/trainer/sft_trainer.py:1070, dpo_trainer.py:839", "lora-on-head", "lora_target_modules",
        lambda v: v["use_peft"] and "lm_head" in (v["lora_target_modules"] or ()),
        "an adapter on `lm_head` is refused: the losses read its own weights",
        "leave lm_head out of `lora_target_modules`",
    ),
    check(
        "transformers/trainer.py:461", "two-engines", "fsdp", _both("fsdp", "deepspeed"),
        "`fsdp` and `deepspeed` exclude each other",
    ),
    unread(
        "transformers/optimization.py:1015", "lr_scheduler_kwargs",
        lambda v: not str(v["lr_scheduler_type"]).startswith("constant"),
        "with another `lr_scheduler_type` than a constant one",
    ),
    unread(
        "transformers/trainer.py:1466", "gradient_checkpointing_kwargs",
        lambda v: v["gradient_checkpointing"], "where `gradient_checkpointing` is set",
        "add `gradient_checkpointing: true`, or delete the line",
    ),
    # the scripts give no function that computes metrics
    *(
        unread("transformers/trainer.py:2964", key, lambda v: not v.schema.tested,
               "by scripts that compute metrics of their own, as TRL's do not")
        for key in ("include_for_metrics", "batch_eval_metrics")
    ),
    # without a strategy the scripts hand over no set to evaluate
    *(
        unread("trl/scripts/sft.py:107", key, lambda v: v["eval_strategy"] != "no",
               "with another `eval_strategy` than no", "add `eval_strategy: steps`, or delete the line")
        for key in _EVALUATION
    ),
)  # fmt: skip

_SFT: tuple[Rule, ...] = (
    dataset_names, packing_without_length,
    check(
        "trl/trainer/sft_trainer.py:1001", "padding-free-length", "padding_free",
        lambda v: v["padding_free"] and not v["packing"] and v["max_length"] is not None,
        "`padding_free` without `packing` cannot cut rows, and `max_length` is {max_length}",
        'add `packing: true`, or `max_length: "none"` for rows that are short enough',
    ),
    unread(
        "trl/trainer/sft_trainer.py:1480", "packing_strategy",
        lambda v: v["packing"] or v["eval_packing"], "where `packing` is set",
        "add `packing: true`, or delete the line",
    ),
)  # fmt: skip

_DPO: tuple[Rule, ...] = (
    *trl_loss_rules.RULES,
    check(
        "trl/trainer/dpo_trainer.py:735", "padding-free-off", "padding_free",
        lambda v: v["padding_free"],
        "`padding_free` does nothing for DPO in this release: the batches are padded",
        "delete the line", severity="warning", tested=True,
    ),
    # pairs have no `input_ids` to measure, nor a column of lengths
    check(
        "transformers/trainer.py:1061", "sampling-of-pairs", "train_sampling_strategy",
        lambda v: v["train_sampling_strategy"] in ("group_by_length", "batch_rebalance")
        and v["remove_unused_columns"] and not v["dataset_streaming"],
        "`train_sampling_strategy: {train_sampling_strategy}` is refused in DPO: pairs have no "
        "single "
        "length", "delete the line",
    ),
    # its losses are its own
    unread(
        "trl/trainer/dpo_trainer.py:1386", "label_smoothing_factor", lambda v: not v.schema.tested,
        "by other trainers than DPO's", "delete the line: some losses read `label_smoothing`",
    ),
    unread(
        "trl/trainer/dpo_trainer.py:1013", "precompute_ref_batch_size",
        lambda v: v["precompute_ref_log_probs"], "where `precompute_ref_log_probs` is set",
    ),
    *(
        unread("trl/trainer/dpo_trainer.py:992", key, lambda v: v["sync_ref_model"],
               "where `sync_ref_model` is set")
        for key in ("ref_model_sync_steps", "ref_model_mixup_alpha")
    ),
)  # fmt: skip

RULES: Mapping[str, tuple[Rule, ...]] = {"sft": (*_SHARED, *_SFT), "dpo": (*_SHARED, *_DPO)}
