"""What the `__post_init__`s of TRL's and transformers' dataclasses refuse, as far as arguments
decide it.

Left to the machine, and so not said here: bfloat16 and TF32 without a GPU that has them
(transformers/training_args.py::TrainingArguments._validate_args[error_message =],
transformers/training_args.py::TrainingArguments.__post_init__[--tf32 requires]), `ddp_backend`
where a single process runs, packages that are not installed, and the environment (SageMaker, XLA,
ACCELERATE_*).
"""

import math
from collections.abc import Iterator
from functools import partial

from launcher.errors import Finding
from launcher.rules.rule import Rule, check, cites, number, plain, say
from launcher.rules.trl.resolved import words
from launcher.upstream.schema import Values, find_json_fault

_JSON = tuple(
    "accelerator_config fsdp_config deepspeed gradient_checkpointing_kwargs "
    "lr_scheduler_kwargs model_init_kwargs dataset_kwargs".split()
)
_RATIO = 1_000_000
_WITH_METRIC = ("reduce_lr_on_plateau", "greedy")

_refused = partial(check, layer="parser")


@cites("transformers/training_args.py::TrainingArguments.__post_init__[if isinstance(passed_value]")
def json_mappings(values: Values) -> Iterator[Finding]:
    """A text that starts with a brace is read as JSON."""
    for key in _JSON:
        fault = find_json_fault(values.get(key))
        if fault is not None:
            yield say("error", "bad-json", key, f"`{key}` is not JSON: {fault}", layer="parser")


def _read_eval_steps(values: Values) -> tuple[str, float | None]:
    """After how many steps to evaluate, and the key that says so: without one, `logging_steps`."""
    steps = number(values["eval_steps"])
    if steps:
        return "eval_steps", steps
    return "logging_steps", number(values["logging_steps"])


@cites("transformers/training_args.py::TrainingArguments.__post_init__[evaluation strategy]")
def eval_without_steps(values: Values) -> Iterator[Finding]:
    key, steps = _read_eval_steps(values)
    by_steps = values["eval_strategy"] == "steps" and key != "eval_steps"
    if by_steps and steps is not None and not steps > 0:
        message = (
            f"`eval_strategy: steps` without `eval_steps`, and `logging_steps` is {plain(steps)}"
        )
        help = "add `eval_steps: <number of steps>`"
        yield say("error", "eval-steps", "eval_steps", message, help, layer="parser")


@cites(
    "transformers/training_args.py::TrainingArguments._validate_args[if self.logging_steps]",
    "transformers/training_args.py::TrainingArguments._validate_args[if self.eval_steps != int]",
    "transformers/training_args.py::TrainingArguments._validate_args[if self.save_steps]",
)
def whole_steps(values: Values) -> Iterator[Finding]:
    """Below 1 a share, above 1 a whole number."""
    strategies = {
        "logging_steps": values.get("logging_strategy"),
        "save_steps": values.get("save_strategy"),
    }
    if values["eval_strategy"] == "steps":
        key, _ = _read_eval_steps(values)
        strategies[key] = "steps"
    for key, strategy in strategies.items():
        steps = number(values.get(key))
        if strategy != "steps" or steps is None or not steps > 1:
            continue
        if math.isinf(steps) or steps != int(steps):
            message = f"`{key}` is a whole number or a share below 1, not {plain(steps)}"
            yield say("error", "whole-steps", key, message, layer="parser")


@cites("transformers/training_args.py::TrainingArguments._validate_args[= self.save_strategy]")
def best_model_strategies(values: Values) -> Iterator[Finding]:
    save = values["save_strategy"]
    evaluate = values["eval_strategy"]
    if values["load_best_model_at_end"] and save not in ("best", evaluate):
        both = f"`save_strategy: {save}` and `eval_strategy: {evaluate}`"
        message = f"`load_best_model_at_end` with {both}: they must be the same"
        help = f"write `eval_strategy: {save}`, or `save_strategy: best`"
        yield say(
            "error", "best-model-strategy", "load_best_model_at_end", message, help, layer="parser"
        )


@cites(
    "transformers/training_args.py::TrainingArguments._validate_args[self.eval_steps != 0]",
    "transformers/training_args.py::TrainingArguments._validate_args[if not (self.eval_steps]",
)
def best_model_steps(values: Values) -> Iterator[Finding]:
    """A checkpoint needs an evaluation of its own."""
    strategies = {values["save_strategy"], values["eval_strategy"]}
    if not values["load_best_model_at_end"] or strategies != {"steps"}:
        return
    save = number(values["save_steps"])
    _, every = _read_eval_steps(values)
    if save is None or not every or save % every == 0:
        return
    both_shares = every < 1 and save < 1
    if not both_shares or (save * _RATIO) % (every * _RATIO) != 0:
        between = f"the steps between evaluations ({plain(every)})"
        message = (
            f"`load_best_model_at_end` needs `save_steps` ({plain(save)}) to be a multiple of "
            f"{between}"
        )
        yield say("error", "best-model-steps", "save_steps", message, layer="parser")


@cites("trl/trainer/dpo_config.py::DPOConfig.__post_init__[if self.loss_weights]")
def loss_weights(values: Values) -> Iterator[Finding]:
    weights = values.get("loss_weights")
    count = len(words(values["loss_type"]))
    if weights is not None and len(weights) != count:
        message = f"`loss_weights` has {len(weights)} entries for {count} in `loss_type`"
        yield say("error", "loss-weights", "loss_weights", message, layer="parser")


def _is_no_multiple(values: Values) -> bool:
    multiple = values["pad_to_multiple_of"]
    if not isinstance(multiple, str) or multiple == "auto" or multiple.lower() in {"none", "null"}:
        return False
    try:
        int(multiple)
    except ValueError:
        return True
    return False


def _make_exclusion_rule(cited: str, first: str, second: str) -> Rule:
    message = f"`{first}` and `{second}` exclude each other"
    return _refused(cited, "two-precisions", first, lambda v: v[first] and v[second], message)


RULES: tuple[Rule, ...] = (
    json_mappings,
    eval_without_steps,
    whole_steps,
    best_model_strategies,
    best_model_steps,
    loss_weights,
    _make_exclusion_rule(
        "transformers/training_args.py::TrainingArguments._validate_args[be True, but not]",
        "fp16",
        "bf16",
    ),
    _make_exclusion_rule(
        "transformers/training_args.py::TrainingArguments._validate_args[full eval, but]",
        "fp16_full_eval",
        "bf16_full_eval",
    ),
    _make_exclusion_rule(
        "trl/trainer/model_config.py::ModelConfig.__post_init__[if self.load_in_8bit]",
        "load_in_8bit",
        "load_in_4bit",
    ),
    _refused(
        "transformers/training_args.py::TrainingArguments._validate_args[logging strategy]",
        "logging-steps",
        "logging_steps",
        lambda v: v["logging_strategy"] == "steps" and v["logging_steps"] == 0,
        "`logging_steps` cannot be 0",
        'write `logging_strategy: "no"` for none',
    ),
    _refused(
        (
            "transformers/training_args.py::"
            "TrainingArguments._validate_args[reduce_lr_on_plateau requires an], "
            "transformers/training_args.py::"
            "TrainingArguments._validate_args[lr_scheduler_type greedy]"
        ),
        "scheduler-needs-eval",
        "lr_scheduler_type",
        lambda v: v["lr_scheduler_type"] in _WITH_METRIC and v["eval_strategy"] == "no",
        "`lr_scheduler_type: {lr_scheduler_type}` follows the evaluation, and there is none",
        "add `eval_strategy: steps`",
    ),
    _refused(
        "transformers/training_args.py::TrainingArguments._validate_args[if self.warmup_steps]",
        "negative-warmup",
        "warmup_steps",
        lambda v: (number(v["warmup_steps"]) or 0) < 0,
        "`warmup_steps` is 0 or more, not {warmup_steps}",
    ),
    _refused(
        "transformers/training_args.py::"
        "TrainingArguments._validate_args[if self.dataloader_num_workers]",
        "prefetch-workers",
        "dataloader_prefetch_factor",
        lambda v: v["dataloader_num_workers"] == 0 and v["dataloader_prefetch_factor"] is not None,
        "`dataloader_prefetch_factor` needs `dataloader_num_workers` above 0",
    ),
    _refused(
        "transformers/training_args.py::TrainingArguments._validate_args[if not (isinstance]",
        "empty-cache-steps",
        "torch_empty_cache_steps",
        lambda v: (
            number(v["torch_empty_cache_steps"]) is not None
            and not v["torch_empty_cache_steps"] > 0
        ),
        "`torch_empty_cache_steps` is a number of steps above 0, not {torch_empty_cache_steps}",
    ),
    # accelerate/parallelism_config.py::ParallelismConfig.__post_init__[if self.dp_replicate_size < 1]:  # noqa: E501 - one citation
    # no word makes one
    _refused(
        "transformers/training_args.py::TrainingArguments[parallelism_config: ParallelismConfig]",
        "parallelism-config",
        "parallelism_config",
        lambda v: v["parallelism_config"] is not None,
        "`parallelism_config` cannot be given as a flag, upstream refuses every value",
    ),
    # other texts go through int()
    _refused(
        (
            "trl/trainer/sft_config.py::"
            "SFTConfig.__post_init__[if isinstance(self.pad_to_multiple_of], "
            "trl/trainer/dpo_config.py::"
            "DPOConfig.__post_init__[if isinstance(self.pad_to_multiple_of]"
        ),
        "pad-multiple",
        "pad_to_multiple_of",
        _is_no_multiple,
        "`pad_to_multiple_of` is a whole number or auto, not `{pad_to_multiple_of}`",
    ),
)
