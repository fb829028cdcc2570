"""What parses for TRL and then stops, or does nothing, in its trainers: known from the arguments alone.

Names that other releases may have more of are only judged where the pinned pair is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.backends.rule import Rule, say
from launcher.backends.trl_mappings import inline, plain_texts
from launcher.backends.trl_training_rules import number
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
_SEEDS = 2**32
_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
# trl/trainer/dpo_trainer.py:1513
_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# trl/trainer/dpo_trainer.py:810
_ANY_DIVERGENCE = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)


def _tested(values: Values) -> bool:
    """Whether the names that these rules know are those of the release that will run."""
    return values.schema.source == "snapshot"


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


# --- both stages -----------------------------------------------------------------------------------


def unknown_report(values: Values) -> Iterator[Finding]:
    """transformers/integrations/integration_utils.py:2674."""
    for word in _words(values["report_to"]) if values.given("report_to") else ():
        if _tested(values) and word not in _REPORTS:
            yield say(
                "error", "run", "unknown-report", "report_to",
                f"`report_to: {brief(word)}` is no integration of transformers",
                f"one of {', '.join(_REPORTS)}",
            )  # fmt: skip


def unknown_compiler(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:768 hands it to accelerate, which knows these."""
    backend = values["torch_compile_backend"]
    if _tested(values) and backend is not None and str(backend).lower() not in _COMPILERS:
        yield say(
            "error", "run", "unknown-compiler", "torch_compile_backend",
            f"`torch_compile_backend: {brief(backend)}` is not known to accelerate",
            f"one of {', '.join(_COMPILERS)}",
        )  # fmt: skip


def optimizer_arguments(values: Values) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:71."""
    text = values["optim_args"]
    if isinstance(text, str) and text:
        for part in text.replace(" ", "").split(","):
            if part.count("=") != 1:
                yield say(
                    "error", "run", "optim-args", "optim_args",
                    f"`optim_args` is name=value, name=value: `{brief(part)}` is not",
                )  # fmt: skip
                return


def low_rank_optimizer(values: Values) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:122,166."""
    name = str(values["optim"])
    if not name.startswith(("galore", "apollo")):
        return
    if values["optim_target_modules"] is None:
        yield say(
            "error", "run", "optim-targets", "optim_target_modules",
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


def lora_rank(values: Values) -> Iterator[Finding]:
    """trl/trainer/utils.py:297; PEFT takes no other."""
    rank = values["lora_r"]
    if values["use_peft"] and isinstance(rank, int) and rank <= 0:
        message = f"`lora_r` is 1 or more, not {rank}"
        yield say("error", "run", "lora-rank", "lora_r", message)


def lora_on_head(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1070, dpo_trainer.py:839."""
    if values["use_peft"] and "lm_head" in (values["lora_target_modules"] or ()):
        yield say(
            "error", "run", "lora-on-head", "lora_target_modules",
            "an adapter on `lm_head` is refused: the losses read its own weights",
            "leave lm_head out of `lora_target_modules`",
        )  # fmt: skip


def two_engines(values: Values) -> Iterator[Finding]:
    """transformers/trainer.py:461."""
    if values["fsdp"] and values["deepspeed"]:
        message = "`fsdp` and `deepspeed` exclude each other"
        yield say("error", "run", "two-engines", "fsdp", message)


# --- SFT -------------------------------------------------------------------------------------------


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


def unknown_loss(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1513, in the first step."""
    for word in _words(values["loss_type"]):
        if _tested(values) and word not in _LOSSES:
            yield say(
                "error", "run", "unknown-loss", "loss_type",
                f"`loss_type: {brief(word)}` is no loss of TRL's DPO", f"one of {', '.join(_LOSSES)}",
            )  # fmt: skip


def unknown_divergence(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1381, in the first step."""
    kind = values["f_divergence_type"]
    if _tested(values) and kind not in _DIVERGENCES:
        yield say(
            "error", "run", "unknown-divergence", "f_divergence_type",
            f"`f_divergence_type: {brief(kind)}` is not known to TRL",
            f"one of {', '.join(_DIVERGENCES)}",
        )  # fmt: skip


def divergence_of_loss(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:811."""
    kind, losses = values["f_divergence_type"], _words(values["loss_type"])
    others = [loss for loss in losses if loss in _LOSSES and loss not in _ANY_DIVERGENCE]
    if kind in _DIVERGENCES[1:] and others:
        yield say(
            "error", "run", "divergence-of-loss", "f_divergence_type",
            f"`f_divergence_type: {kind}` is not defined for the loss {others[0]}",
            "write `f_divergence_type: reverse_kl`",
        )  # fmt: skip


def smoothing_of_exo(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:829."""
    if "exo_pair" in _words(values["loss_type"]) and values["label_smoothing"] == 0:
        yield say(
            "error", "run", "exo-smoothing", "label_smoothing",
            "the loss exo_pair needs `label_smoothing` above 0", "add `label_smoothing: 1.0e-3`",
        )  # fmt: skip


def smoothing_of_robust(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:824; dpo_trainer.py:1431 divides by 1 - 2 * label_smoothing."""
    share = number(values["label_smoothing"])
    if "robust" in _words(values["loss_type"]) and share is not None and not 0 <= share < 0.5:
        yield say(
            "warning", "run", "robust-smoothing", "label_smoothing",
            f"the loss robust divides by 1 - 2 * label_smoothing: with {share:g} it is no loss",
            "write `label_smoothing` from 0 to below 0.5",
        )  # fmt: skip


def zero_beta(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:1404,1443 divide by it."""
    divided = [loss for loss in _words(values["loss_type"]) if loss in ("ipo", "sppo_hard")]
    if values["beta"] == 0 and divided:
        message = f"`beta: 0` divides by zero in the loss {divided[0]}"
        yield say("error", "run", "zero-beta", "beta", message)


def weighted_transport(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_trainer.py:819."""
    losses = [loss for loss in _words(values["loss_type"]) if loss in ("aot", "aot_unpaired")]
    if values["use_weighting"] and losses:
        yield say(
            "error", "run", "weighting-of-loss", "use_weighting",
            f"`use_weighting` is not implemented for the loss {losses[0]}",
        )  # fmt: skip


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
    if values["padding_free"] and _tested(values):
        yield say(
            "warning", "run", "padding-free-off", "padding_free",
            "`padding_free` does nothing for DPO in this release: the batches are padded",
            "delete the line",
        )  # fmt: skip


_SHARED: tuple[Rule, ...] = (
    plain_texts, unknown_report, unknown_compiler, optimizer_arguments, low_rank_optimizer, seed_range,
    no_workers, negative_workers, empty_output, eval_on_start, best_without_metric, best_without_eval,
    scheduler_arguments, constant_without_warmup, resume_word, streamed, mixture_split, quantised_whole,
    quantised_twice, lora_rank, lora_on_head, two_engines,
)  # fmt: skip

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_SHARED, packing_without_length, padding_free_length, selective_checkpointing),
    "dpo": (
        *_SHARED, unknown_loss, unknown_divergence, divergence_of_loss, smoothing_of_exo,
        smoothing_of_robust, zero_beta, weighted_transport, moving_reference, streamed_reference,
        padding_free_off,
    ),
}  # fmt: skip
