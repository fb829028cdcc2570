"""What parses for TRL and then stops, or does nothing, in its trainers: known from the arguments alone.

Names that other releases may have more of are only judged where the pinned pair is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.backends.rule import Rule, say
from launcher.backends.trl_mappings import inline, plain_texts
from launcher.backends.trl_training_rules import number, words
from launcher.errors import Finding, brief
from launcher.schema import Values

# transformers/integrations/integration_utils.py:2643, and the two words for none and every one
_REPORTS = (
    "azure_ml", "comet_ml", "mlflow", "neptune", "tensorboard", "trackio", "wandb", "codecarbon",
    "clearml", "dagshub", "flyte", "dvclive", "swanlab", "kubeflow", "none", "all",
)  # fmt: skip
# accelerate/utils/dataclasses.py:690
_COMPILERS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi",
    "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm",
    "hpu_backend", "neuron",
)  # fmt: skip
# torch/_inductor/__init__.py:353
_COMPILE_MODES = (
    "default", "lite", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune",
)  # fmt: skip
# transformers/trainer_optimizer.py:326,338,348: what these take of `optim_args`
_OPTIM_ARGS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
    **dict.fromkeys(
        (
            "adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit", "adamw_8bit",
            "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit", "lion_32bit", "paged_lion_32bit",
            "paged_lion_8bit",
        ),
        (),
    ),
}  # fmt: skip
# torch/utils/checkpoint.py:355, transformers/trainer.py:1466,1467
_CHECKPOINTING = frozenset({
    "use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop",
    "every_n_layers", "offload",
})  # fmt: skip
# what an evaluation gives: trl/trainer/sft_trainer.py:1657, dpo_trainer.py:1586, transformers/trainer.py:2983
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
_SEEDS = 2**32
_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


# --- both stages -----------------------------------------------------------------------------------


def unknown_report(values: Values) -> Iterator[Finding]:
    """transformers/integrations/integration_utils.py:2674."""
    for word in words(values["report_to"]) if values.given("report_to") else ():
        if values.schema.tested and word not in _REPORTS:
            yield say(
                "error", "run", "unknown-report", "report_to",
                f"`report_to: {brief(word)}` is no integration of transformers",
                f"one of {', '.join(_REPORTS)}",
            )  # fmt: skip


def unknown_compiler(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:768 hands it to accelerate, which knows these."""
    backend = values["torch_compile_backend"]
    if values.schema.tested and backend is not None and str(backend).lower() not in _COMPILERS:
        yield say(
            "error", "run", "unknown-compiler", "torch_compile_backend",
            f"`torch_compile_backend: {brief(backend)}` is not known to accelerate",
            f"one of {', '.join(_COMPILERS)}",
        )  # fmt: skip


def unknown_compile_mode(values: Values) -> Iterator[Finding]:
    """torch/_inductor/__init__.py:353, in the first step; other backends take none of these."""
    mode, backend = values["torch_compile_mode"], str(values["torch_compile_backend"] or "inductor")
    known = mode is None or mode in _COMPILE_MODES or backend.lower() != "inductor"
    if values.schema.tested and not known:
        yield say(
            "error", "run", "unknown-compiler", "torch_compile_mode",
            f"`torch_compile_mode: {brief(mode)}` is no mode of torch.compile",
            f"one of {', '.join(_COMPILE_MODES)}",
        )  # fmt: skip


def optimizer_arguments(values: Values) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:71,326,338,348: each optimizer picks the names that it knows."""
    key, text = "optim_args", values["optim_args"]
    if not isinstance(text, str) or not text:
        return
    parts = text.replace(" ", "").split(",")
    broken = next((part for part in parts if part.count("=") != 1), None)
    if broken is not None:
        yield say(
            "error", "run", "optim-args", key,
            f"`{key}` is name=value, name=value: `{brief(broken)}` is not",
        )  # fmt: skip
        return
    # transformers/training_args.py:804: the default is one of torch's two
    name = str(values["optim"] or "adamw_torch")
    taken = _OPTIM_ARGS.get(name)
    names = sorted({part.partition("=")[0] for part in parts})
    unread = [] if taken is None else [one for one in names if one not in taken]
    if values.schema.tested and unread:
        yield say(
            "warning", "run", "optim-args", key,
            f"`optim: {name}` reads no `{brief(unread[0])}` of `{key}`",
            f"it reads {', '.join(taken)}" if taken else "delete the line: it has arguments of its own",
        )  # fmt: skip


def low_rank_optimizer(values: Values) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:122,166."""
    name, key = str(values["optim"] or "adamw_torch"), "optim_target_modules"
    if not name.startswith(("galore", "apollo")):
        if values[key] is not None and values.schema.tested:
            yield say(
                "warning", "run", "optim-targets", key,
                f"`{key}` is not read with `optim: {name}`, only by galore and apollo",
                "delete the line, or name one of them",
            )  # fmt: skip
        return
    if values[key] is None:
        yield say(
            "error", "run", "optim-targets", key,
            f"`optim: {name}` needs `optim_target_modules`", "add `optim_target_modules: all-linear`",
        )  # fmt: skip
    if name.endswith("layerwise") and values["gradient_accumulation_steps"] != 1:
        yield say(
            "error", "run", "optim-accumulation", "gradient_accumulation_steps",
            f"`optim: {name}` does not accumulate gradients",
            "write `gradient_accumulation_steps: 1`",
        )  # fmt: skip


def seed_range(values: Values) -> Iterator[Finding]:
    """transformers/trainer_utils.py:191: numpy takes 32 bits."""
    seed = values["seed"]
    if isinstance(seed, int) and not 0 <= seed < _SEEDS:
        message = f"`seed` is between 0 and {_SEEDS - 1}, not {seed}"
        yield say("error", "run", "seed-range", "seed", message)


def no_workers(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:995: torch's loader refuses what only its worker processes use."""
    if values["dataloader_num_workers"] != 0:
        return
    for key in ("dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if values.get(key):
            yield say(
                "error", "run", "no-workers", key, f"`{key}` needs `dataloader_num_workers` above 0"
            )


def negative_workers(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:995: torch's loader refuses them."""
    workers, factor = values["dataloader_num_workers"], values["dataloader_prefetch_factor"]
    if isinstance(workers, int) and workers < 0:
        message = f"`dataloader_num_workers` is 0 or more, not {workers}"
        yield say("error", "run", "negative-workers", "dataloader_num_workers", message)
    elif workers and isinstance(factor, int) and factor < 0:
        message = f"`dataloader_prefetch_factor` is 0 or more, not {factor}"
        yield say("error", "run", "negative-workers", "dataloader_prefetch_factor", message)


def empty_output(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:589."""
    if values["output_dir"] == "":
        yield say(
            "error", "run", "empty-output", "output_dir", "`output_dir` is empty: no folder can be made",
            "name a folder, or delete the line",
        )  # fmt: skip


def eval_on_start(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:1597; without a strategy the scripts hand over no set to evaluate."""
    if values["eval_on_start"] and values["eval_strategy"] == "no":
        yield say(
            "error", "run", "eval-on-start", "eval_on_start",
            "`eval_on_start` has nothing to evaluate on: `eval_strategy` is no",
            "add `eval_strategy: steps`",
        )  # fmt: skip


def best_without_metric(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:661; transformers/training_args.py:1558 names one in some cases only."""
    named = values["load_best_model_at_end"] or values["metric_for_best_model"] is not None
    named = named or values["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy")
    if values["save_strategy"] == "best" and not named:
        yield say(
            "error", "run", "best-without-metric", "save_strategy",
            "`save_strategy: best` needs `metric_for_best_model`", "add `metric_for_best_model: loss`",
        )  # fmt: skip


def best_without_eval(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:2199: the best one is found by evaluating."""
    if values["save_strategy"] == "best" and values["eval_strategy"] == "no":
        yield say(
            "warning", "run", "best-without-eval", "save_strategy",
            "`save_strategy: best` saves no checkpoint: `eval_strategy` is no",
            "add `eval_strategy: steps`",
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


def own_metrics(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:2964: TRL's scripts give no function that computes metrics."""
    for key in ("include_for_metrics", "batch_eval_metrics"):
        if values[key] and values.schema.tested:
            yield say(
                "warning", "run", "conditional-key", key,
                f"`{key}` does nothing here: TRL's scripts compute no metrics of their own",
                "delete the line",
            )  # fmt: skip


def scheduler_arguments(values: Values) -> Iterator[Finding]:
    """transformers/optimization.py:373,377,511."""
    kind, kwargs = values["lr_scheduler_type"], inline(values["lr_scheduler_kwargs"]) or {}
    given = [name for name in ("min_lr", "min_lr_rate") if kwargs.get(name) is not None]
    if kind in _MIN_LR and len(given) != 1:
        yield say(
            "error", "run", "scheduler-kwargs", "lr_scheduler_kwargs",
            f"`lr_scheduler_type: {kind}` takes either `min_lr` or `min_lr_rate`, "
            f"not {'both' if given else 'none of them'}",
            "write `lr_scheduler_kwargs: {min_lr_rate: 0.1}`",
        )  # fmt: skip
    if kind == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        yield say(
            "error", "run", "scheduler-kwargs", "lr_scheduler_kwargs",
            f"`lr_scheduler_type: {kind}` needs `num_decay_steps`",
            "write `lr_scheduler_kwargs: {num_decay_steps: <number of steps>}`",
        )  # fmt: skip


def constant_without_warmup(values: Values) -> Iterator[Finding]:
    """transformers/optimization.py:1015."""
    if values["lr_scheduler_type"] == "constant" and values["warmup_steps"]:
        yield say(
            "warning", "run", "warmup-unread", "warmup_steps",
            "`warmup_steps` is not read with `lr_scheduler_type: constant`",
            "write `lr_scheduler_type: constant_with_warmup`",
        )  # fmt: skip


def resume_word(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:1498,3517: as a flag, true is the name of a folder."""
    word = values["resume_from_checkpoint"]
    if str(word).lower() in ("true", "false"):
        yield say(
            "error", "run", "resume-word", "resume_from_checkpoint",
            f"`resume_from_checkpoint: {word}` would be looked up as a folder",
            "name the checkpoint's folder, or delete the line",
        )  # fmt: skip


def streamed(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:702: a stream has no length."""
    key = "streaming" if values.get("datasets") else "dataset_streaming"
    if values[key] and not (number(values["max_steps"]) or -1) > 0:
        yield say(
            "error", "run", "stream-without-steps", key,
            f"`{key}` gives no number of rows: the number of steps must be said",
            "add `max_steps: <number of steps>`",
        )  # fmt: skip


def mixture_split(values: Values) -> Iterator[Finding]:
    """trl/scripts/utils.py:488, sft.py:107, dpo.py:105: a mixture is one split, or a shuffled two."""
    share, datasets = values["test_split_size"], values["datasets"]
    if not datasets:
        return
    if share is not None and values["streaming"]:
        message = "`test_split_size` cannot split a stream"
        yield say("error", "run", "split-of-stream", "test_split_size", message)
    splits = ("train",) if share is None else ("train", "test")
    wanted = ["dataset_train_split"]
    wanted += ["dataset_test_split"] if values["eval_strategy"] != "no" else []
    for key in wanted:
        if values[key] not in splits:
            yield say(
                "error", "run", "no-such-split", key,
                f"`datasets` without `test_split_size` has no split `{brief(values[key])}`"
                if share is None else f"`datasets` has no split `{brief(values[key])}`",
                f"write `{key}: train`, or add `test_split_size: 0.1` for a test split",
            )  # fmt: skip


def quantised_whole(values: Values) -> Iterator[Finding]:
    """transformers/trainer_utils.py:133."""
    asked = [key for key in ("load_in_4bit", "load_in_8bit") if values[key]]
    # both at once is refused earlier
    if len(asked) == 1 and not values["use_peft"]:
        yield say(
            "error", "run", "quantised-whole", asked[0],
            f"`{asked[0]}` without `use_peft`: quantised weights cannot be trained themselves",
            "add `use_peft: true`",
        )  # fmt: skip


def quantised_twice(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:687, dpo_trainer.py:565."""
    kwargs = inline(values["model_init_kwargs"]) or {}
    if "quantization_config" in kwargs and (values["load_in_4bit"] or values["load_in_8bit"]):
        yield say(
            "error", "run", "quantised-twice", "model_init_kwargs",
            "`quantization_config` in `model_init_kwargs` beside `load_in_4bit` or `load_in_8bit`",
            "keep one of them",
        )  # fmt: skip


def model_said_twice(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py:83: the mapping wins over what the other arguments say of the model's loading."""
    key, kwargs = "model_init_kwargs", inline(values["model_init_kwargs"]) or {}
    for name in ("model_revision", "dtype", "attn_implementation", "trust_remote_code"):
        inner = name.removeprefix("model_")
        if inner in kwargs and values.given(name) and kwargs[inner] != values[name]:
            yield say(
                "warning", "run", "conditional-key", name,
                f"`{name}` does nothing here: `{key}` has a `{inner}` of its own", "keep one of them",
            )  # fmt: skip
    # transformers/modeling_utils.py:4069: the old name counts without the new one, which is always given
    if "torch_dtype" in kwargs and "dtype" not in kwargs:
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}`: `torch_dtype` is not read beside `dtype`, which is {values['dtype']}",
            "write `dtype` in its place",
        )  # fmt: skip


def lora_rank(values: Values) -> Iterator[Finding]:
    """trl/trainer/utils.py:297; PEFT takes no other."""
    rank = values["lora_r"]
    if values["use_peft"] and isinstance(rank, int) and rank <= 0:
        message = f"`lora_r` is 1 or more, not {rank}"
        yield say("error", "run", "lora-rank", "lora_r", message)


def lora_task(values: Values) -> Iterator[Finding]:
    """peft/config.py:99."""
    task = values["lora_task_type"]
    if values["use_peft"] and values.schema.tested and task not in _TASKS:
        yield say(
            "error", "run", "lora-task", "lora_task_type",
            f"`lora_task_type: {brief(task)}` is no task of PEFT's", f"one of {', '.join(_TASKS)}",
        )  # fmt: skip


def lora_on_head(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1070, dpo_trainer.py:839."""
    if values["use_peft"] and "lm_head" in (values["lora_target_modules"] or ()):
        yield say(
            "error", "run", "lora-on-head", "lora_target_modules",
            "an adapter on `lm_head` is refused: the losses read its own weights",
            "leave lm_head out of `lora_target_modules`",
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


def two_engines(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:461."""
    if values["fsdp"] and values["deepspeed"]:
        message = "`fsdp` and `deepspeed` exclude each other"
        yield say("error", "run", "two-engines", "fsdp", message)


# --- SFT -------------------------------------------------------------------------------------------


def dataset_names(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1009 reads a single one."""
    key = "dataset_kwargs"
    unread = sorted((inline(values[key]) or {}).keys() - {"skip_prepare_dataset"})
    if values.schema.tested and unread:
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}`: `{brief(unread[0])}` is not read, only `skip_prepare_dataset`", "leave it out",
        )  # fmt: skip


def packing_without_length(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1468; sets that are ready are not packed."""
    ready = (inline(values["dataset_kwargs"]) or {}).get("skip_prepare_dataset")
    if values["max_length"] is not None or ready:
        return
    evaluated = values["eval_strategy"] != "no" and values["eval_packing"]
    key = "packing" if values["packing"] else "eval_packing" if evaluated else None
    if key is not None:
        yield say(
            "error", "run", "packing-without-length", key,
            f"`{key}` fills rows up to `max_length`, which is none", "add `max_length: 4096`",
        )  # fmt: skip


def padding_free_length(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1001."""
    if values["padding_free"] and not values["packing"] and values["max_length"] is not None:
        default = "" if values.given("max_length") else " by default"
        yield say(
            "error", "run", "padding-free-length", "padding_free",
            f"`padding_free` without `packing` cannot cut rows, and `max_length` is "
            f"{values['max_length']}{default}",
            'add `packing: true`, or `max_length: "none"` for rows that are short enough',
        )  # fmt: skip


def selective_checkpointing(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1088,1092."""
    key = "gradient_checkpointing_kwargs"
    kwargs = inline(values[key]) or {}
    if not kwargs.get("selective"):
        return
    if not values["gradient_checkpointing"]:
        message = f"`{key}`: `selective` needs `gradient_checkpointing: true`"
        yield say("error", "run", "selective-checkpointing", key, message)
    elif kwargs.get("use_reentrant"):
        message = f"`{key}`: `selective` and `use_reentrant` exclude each other"
        yield say("error", "run", "selective-checkpointing", key, message)


# --- DPO -------------------------------------------------------------------------------------------


def moving_reference(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:995,1004."""
    for key in ("use_peft", "precompute_ref_log_probs"):
        if values["sync_ref_model"] and values[key]:
            yield say(
                "error", "run", "moving-reference", key, f"`sync_ref_model` and `{key}` exclude each other"
            )  # fmt: skip


def streamed_reference(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1171."""
    key = "streaming" if values.get("datasets") else "dataset_streaming"
    if values["precompute_ref_log_probs"] and values[key]:
        yield say(
            "error", "run", "streamed-reference", "precompute_ref_log_probs",
            f"`precompute_ref_log_probs` cannot be used with `{key}`",
        )  # fmt: skip


def padding_free_off(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:735."""
    if values["padding_free"] and values.schema.tested:
        yield say(
            "warning", "run", "padding-free-off", "padding_free",
            "`padding_free` does nothing for DPO in this release: the batches are padded",
            "delete the line",
        )  # fmt: skip


def lengths_of_pairs(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:1061: pairs have no `input_ids` to measure, nor a column of lengths."""
    key, streamed = "train_sampling_strategy", values["dataset_streaming"] or values["streaming"]
    grouped = values[key] in ("group_by_length", "batch_rebalance")
    if grouped and not streamed and values["remove_unused_columns"]:
        yield say(
            "error", "run", "sampling-of-pairs", key,
            f"`{key}: {values[key]}` is refused in DPO: pairs have no single length", "delete the line",
        )  # fmt: skip


def unread_by_pairs(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1386: its losses are its own, and read `label_smoothing`."""
    key = "label_smoothing_factor"
    if values[key] and values.schema.tested:
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}` does nothing in DPO", "delete the line: some losses read `label_smoothing`",
        )  # fmt: skip


_SHARED: tuple[Rule, ...] = (
    plain_texts, unknown_report, unknown_compiler, unknown_compile_mode, optimizer_arguments,
    low_rank_optimizer, seed_range, no_workers, negative_workers, empty_output, eval_on_start,
    best_without_metric, best_without_eval, unknown_metric, own_metrics, scheduler_arguments,
    constant_without_warmup, resume_word, streamed, mixture_split, quantised_whole, quantised_twice,
    model_said_twice, lora_rank, lora_task, lora_on_head, checkpointing_names, two_engines,
)  # fmt: skip

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_SHARED, dataset_names, packing_without_length, padding_free_length, selective_checkpointing),
    "dpo": (
        *_SHARED, moving_reference, streamed_reference, padding_free_off, lengths_of_pairs,
        unread_by_pairs,
    ),
}  # fmt: skip
