"""Rules for TRL: what parses and then stops, or does nothing, in its trainers, by the arguments alone.

What its `__post_init__`s refuse is in `trl_parser_rules`, the losses of DPO in `trl_loss_rules`. Names that
other releases may have more of are only judged at the tested pair. Line numbers are those of the pinned
pair; tests/test_upstream_facts.py holds them against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from launcher.backends import trl_adapter_rules, trl_loss_rules, trl_parser_rules
from launcher.backends.rule import Range, Rule, check, number, outside, plain, say, unread
from launcher.backends.trl_resolved import inline, prepared
from launcher.errors import Finding, brief
from launcher.schema import Values

# transformers/integrations/integration_utils.py:2643, and the two words for none and every one
_REPORTS = (
    "azure_ml", "comet_ml", "mlflow", "neptune", "tensorboard", "trackio", "wandb", "codecarbon",
    "clearml", "dagshub", "flyte", "dvclive", "swanlab", "kubeflow", "none", "all",
)  # fmt: skip
# torch/utils/checkpoint.py:355, transformers/trainer.py:1466,1467
_CHECKPOINTING = frozenset({
    "use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop",
    "every_n_layers", "offload",
})  # fmt: skip
# what an evaluation gives: trl/trainer/sft_trainer.py:1657, dpo_trainer.py:1586,
# transformers/trainer.py:2983
_METRICS = (
    "loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "entropy",
    "mean_token_accuracy", "num_tokens", "aux_loss",
)  # fmt: skip
_METRICS_OF_PAIRS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logits/chosen",
    "logits/rejected", "logps/chosen", "logps/rejected",
)  # fmt: skip
_TASKS = (
    "SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION",
)  # fmt: skip
# trl/trainer/utils.py:1335
_TYPES = (None, "auto", "bfloat16", "float16", "float32")
_FOLLOWING = ("reduce_lr_on_plateau", "greedy")
_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
_COSINE = frozenset({"num_cycles", "last_epoch"})
_PLATEAU = frozenset({
    "mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps",
})  # fmt: skip
# transformers/optimization.py:107 and below it: what each schedule takes beside the steps
SCHEDULES: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"last_epoch"}),
    "cosine": _COSINE,
    "cosine_with_restarts": _COSINE,
    "polynomial": frozenset({"lr_end", "power", "last_epoch"}),
    "inverse_sqrt": frozenset({"timescale", "last_epoch"}),
    "reduce_lr_on_plateau": _PLATEAU,
    "cosine_with_min_lr": _COSINE | {"min_lr", "min_lr_rate"},
    "cosine_warmup_with_min_lr": _COSINE | {"min_lr", "min_lr_rate", "warmup_lr_rate"},
    "warmup_stable_decay": frozenset({
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio",
        "num_cycles", "last_epoch",
    }),
    "greedy": _PLATEAU | {"warmup", "max_lr", "verbose", "smooth", "window_size", "reset_start"},
    "constant": frozenset(),
    "constant_with_warmup": frozenset(),
}  # fmt: skip


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
    # transformers/trainer_utils.py:191
    "seed": (
        Range(lambda n: 0 <= n < 2**32, "error", "numpy takes 0 to 4294967295", code="seed-range"),
    ),
    # transformers/trainer.py:995
    "dataloader_num_workers": (
        Range(lambda n: n >= 0, "error", "torch's loader refuses it", code="negative-workers"),
    ),
    # trl/trainer/utils.py:297
    "lora_r": (
        Range(lambda n: n > 0, "error", "PEFT refuses it", needs="use_peft", code="lora-rank"),
    ),
    # torch/nn/modules/dropout.py:24, peft/tuners/lora/layer.py:255
    "lora_dropout": (
        Range(lambda n: not n > 1, "error", "torch refuses it", needs="use_peft"),
        Range(lambda n: n != 1, "warning", "nothing reaches the adapter", needs="use_peft"),
    ),
    "lora_alpha": (
        Range(lambda n: n != 0, "warning", "the adapter counts for nothing", needs="use_peft"),
    ),
    # datasets/arrow_dataset.py:3364
    "dataset_num_proc": (Range(lambda n: n >= 0, "error", "datasets refuses it"),),
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


def unknown_report(values: Values) -> Iterator[Finding]:
    """transformers/integrations/integration_utils.py:2674."""
    given = values["report_to"] if values.given("report_to") else []
    for word in given if isinstance(given, list) else [given]:
        if values.schema.tested and str(word) not in _REPORTS:
            yield say(
                "error", "run", "unknown-report", "report_to",
                f"`report_to: {brief(word)}` is no integration of transformers",
                f"one of {', '.join(_REPORTS)}",
            )  # fmt: skip


def unknown_metric(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:3300, at the first evaluation, whether a best model is asked for or not."""
    key = "metric_for_best_model"
    name = values[key]
    known = _METRICS + (_METRICS_OF_PAIRS if values.schema.stage == "dpo" else ())
    if name is None or values["eval_strategy"] == "no" or not values.schema.tested:
        return
    if str(name).removeprefix("eval_") not in known:
        yield say(
            "error", "run", "unknown-metric", key,
            f"`{key}: {brief(name)}` is nothing that TRL measures in an evaluation",
            f"one of {', '.join(known)}",
        )  # fmt: skip


def schedule(values: Values) -> Iterator[Finding]:
    """transformers/optimization.py:1049,71,373,377,511: a schedule takes what its function does."""
    key, kind = "lr_scheduler_kwargs", str(values["lr_scheduler_type"])
    kwargs, taken = inline(values[key]) or {}, SCHEDULES.get(kind)
    unknown = sorted(kwargs.keys() - taken) if taken is not None and values.schema.tested else []
    given = [name for name in ("min_lr", "min_lr_rate") if kwargs.get(name) is not None]
    if unknown and kind.startswith("constant"):
        yield say(
            "warning", "run", "scheduler-kwargs", key,
            f"`{key}` is not read with `lr_scheduler_type: {kind}`", "delete the line",
        )  # fmt: skip
    elif unknown:
        fitting = sorted((taken or set()) - {"last_epoch"})
        yield say(
            "error", "run", "scheduler-kwargs", key,
            f"`lr_scheduler_type: {kind}` takes no `{brief(unknown[0])}`",
            f"it takes {', '.join(fitting)}" if fitting else "delete the line",
        )  # fmt: skip
    elif kind in _MIN_LR and len(given) != 1:
        yield say(
            "error", "run", "scheduler-kwargs", key,
            f"`lr_scheduler_type: {kind}` takes either `min_lr` or `min_lr_rate`, "
            f"not {'both' if given else 'none of them'}",
            f"write `{key}: {{min_lr_rate: 0.1}}`",
        )  # fmt: skip
    elif kind == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        yield say(
            "error", "run", "scheduler-kwargs", key,
            f"`lr_scheduler_type: {kind}` needs `num_decay_steps`",
            f"write `{key}: {{num_decay_steps: <number of steps>}}`",
        )  # fmt: skip


def checkpointing_names(values: Values) -> Iterator[Finding]:
    """torch/utils/checkpoint.py:500 refuses names that it does not know; without `use_reentrant` it takes
    it for true (torch/utils/checkpoint.py:496), and else hands them to the model's layers.
    """
    key = "gradient_checkpointing_kwargs"
    kwargs = inline(values[key]) or {}
    # TRL's own, of its SFT alone (trl/trainer/sft_trainer.py:1088)
    own = {"selective"} if values.schema.stage == "sft" else set()
    unknown = sorted(kwargs.keys() - _CHECKPOINTING - own)
    if not values["gradient_checkpointing"] or not unknown or not values.schema.tested:
        return
    passed = kwargs.get("use_reentrant") is False
    yield say(
        "warning" if passed else "error", "run", "checkpointing-kwargs", key,
        f"`{key}` has no `{brief(unknown[0])}`: "
        + ("it reaches the model's layers, which know none either" if passed else "torch refuses it"),
        f"it has {', '.join(sorted(_CHECKPOINTING | own))}",
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
    no_length, plain_texts, unknown_report, unknown_metric, schedule, checkpointing_names,
    model_set_twice,
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
        "transformers/trainer.py:995: torch's loader refuses it.", "no-workers",
        "dataloader_persistent_workers",
        lambda v: v["dataloader_num_workers"] == 0 and v["dataloader_persistent_workers"],
        "`dataloader_persistent_workers` needs `dataloader_num_workers` above 0",
    ),
    check(
        "transformers/trainer.py:1597: the scripts hand over no set.", "eval-on-start", "eval_on_start",
        lambda v: v["eval_on_start"] and v["eval_strategy"] == "no",
        "`eval_on_start` has nothing to evaluate on: `eval_strategy` is no",
        "add `eval_strategy: steps`",
    ),
    # transformers/training_args.py:1558 names one in some cases only
    check(
        "transformers/trainer.py:661", "best-without-metric", "save_strategy",
        lambda v: v["save_strategy"] == "best" and v["metric_for_best_model"] is None
        and not v["load_best_model_at_end"] and v["lr_scheduler_type"] not in _FOLLOWING,
        "`save_strategy: best` needs `metric_for_best_model`", "add `metric_for_best_model: loss`",
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
        "trl/trainer/utils.py:1339", "model-arguments", "model_init_kwargs",
        lambda v: (inline(v["model_init_kwargs"]) or {}).get("dtype", "auto") not in _TYPES,
        "`model_init_kwargs`: TRL refuses this `dtype`", f"one of {', '.join(map(str, _TYPES[1:]))}",
    ),
    check(
        "peft/config.py:99", "lora-task", "lora_task_type",
        lambda v: v["use_peft"] and v["lora_task_type"] not in _TASKS,
        "`lora_task_type: {lora_task_type}` is no task of PEFT's", f"one of {', '.join(_TASKS)}",
        tested=True,
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
    *(
        check("trl/trainer/dpo_trainer.py:995,1004", "moving-reference", key,
              _both("sync_ref_model", key), f"`sync_ref_model` and `{key}` exclude each other")
        for key in ("use_peft", "precompute_ref_log_probs")
    ),
    check(
        "trl/trainer/dpo_trainer.py:1171", "streamed-reference", "precompute_ref_log_probs",
        lambda v: v["precompute_ref_log_probs"] and v["dataset_streaming"],
        "`precompute_ref_log_probs` cannot be used with `dataset_streaming`",
    ),
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
