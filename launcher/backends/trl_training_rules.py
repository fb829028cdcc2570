"""What transformers' `TrainingArguments.__post_init__` refuses, as far as the arguments decide it.

Left to the machine, and so not said here: bfloat16 and TF32 without a GPU that has them
(transformers/training_args.py:1747,1650), `ddp_backend` where a single process runs, packages that
are not installed, and the environment (SageMaker, XLA, ACCELERATE_*).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from launcher.backends.rule import Rule, say
from launcher.backends.trl_mappings import (
    Missing,
    Unreadable,
    from_file,
    from_file_or_base64,
    inline,
    missing_file,
)
from launcher.errors import Finding, brief
from launcher.schema import Values, json_fault

_JSON = (
    "accelerator_config", "fsdp_config", "deepspeed", "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs", "model_init_kwargs", "dataset_kwargs",
)  # fmt: skip
# transformers/trainer_pt_utils.py:1440
_ACCELERATOR = frozenset(
    {"split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"}
    | {"gradient_accumulation_kwargs", "use_configured_state"}
)
# accelerate/utils/deepspeed.py:188 steps into these without a look
_DEEPSPEED = (
    "optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16",
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param",
)  # fmt: skip
_RATIO = 1_000_000
_WITH_METRIC = ("reduce_lr_on_plateau", "greedy")
_LONGEST = 86_400 * 10**9  # seconds: what a timedelta does not hold any more


def number(value: Any) -> float | None:
    """The value if it is a number: at another version a default may be unknown."""
    return value if isinstance(value, int | float) else None


def words(value: object) -> list[str]:
    """One word, or a list of them."""
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


def json_mappings(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1510: a text that starts with a brace is read as JSON."""
    for key in _JSON:
        if (fault := json_fault(values.get(key))) is not None:
            yield say("error", "parser", "bad-json", key, f"`{key}` is not JSON: {fault}")


def two_precisions(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1753."""
    if values["fp16"] and values["bf16"]:
        message = "`fp16` and `bf16` exclude each other"
        yield say("error", "parser", "two-precisions", "fp16", message)


def two_eval_precisions(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1756."""
    if values["fp16_full_eval"] and values["bf16_full_eval"]:
        message = "`fp16_full_eval` and `bf16_full_eval` exclude each other"
        yield say("error", "parser", "two-precisions", "fp16_full_eval", message)


def zero_logging(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1701."""
    if values["logging_strategy"] == "steps" and values["logging_steps"] == 0:
        yield say(
            "error", "parser", "logging-steps", "logging_steps", "`logging_steps` cannot be 0",
            'write `logging_strategy: "no"` for none',
        )  # fmt: skip


def _eval_steps(values: Values) -> tuple[str, float | None]:
    """After how many steps to evaluate, and the key that says so: without one, `logging_steps`."""
    steps = number(values["eval_steps"])
    if steps:
        return "eval_steps", steps
    return "logging_steps", number(values["logging_steps"])


def eval_without_steps(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1549."""
    key, steps = _eval_steps(values)
    asked = values["eval_strategy"] == "steps" and key != "eval_steps"
    if asked and steps is not None and not steps > 0:
        yield say(
            "error", "parser", "eval-steps", "eval_steps",
            f"`eval_strategy: steps` without `eval_steps`, and `logging_steps` is {steps:g}",
            "add `eval_steps: <number of steps>`",
        )  # fmt: skip


def whole_steps(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1704,1708,1712: below 1 a share, above 1 a whole number."""
    asked = [
        (values.get("logging_strategy"), "logging_steps", number(values.get("logging_steps"))),
        (values["eval_strategy"], *_eval_steps(values)),
        (values.get("save_strategy"), "save_steps", number(values.get("save_steps"))),
    ]
    said = set()
    for strategy, key, steps in asked:
        if strategy != "steps" or steps is None or not steps > 1 or key in said:
            continue
        if math.isinf(steps) or steps != int(steps):
            said.add(key)
            yield say(
                "error", "parser", "whole-steps", key,
                f"`{key}` is a whole number or a share below 1, not {steps:g}",
            )  # fmt: skip


def best_model_strategies(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1718."""
    save, evaluate = values["save_strategy"], values["eval_strategy"]
    if values["load_best_model_at_end"] and save != "best" and save != evaluate:
        yield say(
            "error", "parser", "best-model-strategy", "load_best_model_at_end",
            f"`load_best_model_at_end` with `save_strategy: {save}` and `eval_strategy: {evaluate}`: "
            "they must be the same",
            f"write `eval_strategy: {save}`, or `save_strategy: best`",
        )  # fmt: skip


def best_model_steps(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1723,1725: a checkpoint needs an evaluation of its own."""
    strategies = {values["save_strategy"], values["eval_strategy"]}
    if not values["load_best_model_at_end"] or strategies != {"steps"}:
        return
    save, (_, every) = number(values["save_steps"]), _eval_steps(values)
    if save is None or not every or save % every == 0:
        return
    both_shares = every < 1 and save < 1
    if not both_shares or (save * _RATIO) % (every * _RATIO) != 0:
        yield say(
            "error", "parser", "best-model-steps", "save_steps",
            f"`load_best_model_at_end` needs `save_steps` ({save:g}) to be a multiple of the steps "
            f"between evaluations ({every:g})",
        )  # fmt: skip


def scheduler_without_eval(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1760,1766."""
    kind = values["lr_scheduler_type"]
    if kind in _WITH_METRIC and values["eval_strategy"] == "no":
        yield say(
            "error", "parser", "scheduler-needs-eval", "lr_scheduler_type",
            f"`lr_scheduler_type: {kind}` follows the evaluation, and there is none",
            "add `eval_strategy: steps`",
        )  # fmt: skip


def negative_warmup(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1768."""
    steps = number(values["warmup_steps"])
    if steps is not None and steps < 0:
        message = f"`warmup_steps` is 0 or more, not {steps:g}"
        yield say("error", "parser", "negative-warmup", "warmup_steps", message)


def prefetch_without_workers(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1771."""
    factor = values["dataloader_prefetch_factor"]
    if values["dataloader_num_workers"] == 0 and factor is not None:
        yield say(
            "error", "parser", "prefetch-workers", "dataloader_prefetch_factor",
            "`dataloader_prefetch_factor` needs `dataloader_num_workers` above 0",
        )  # fmt: skip


def empty_cache(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1694."""
    steps = number(values["torch_empty_cache_steps"])
    if steps is not None and not steps > 0:
        yield say(
            "error", "parser", "empty-cache-steps", "torch_empty_cache_steps",
            f"`torch_empty_cache_steps` is a number of steps above 0, not {steps:g}",
        )  # fmt: skip


def parallelism(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1296, accelerate/parallelism_config.py:310: no word makes one."""
    if values["parallelism_config"] is not None:
        yield say(
            "error", "parser", "parallelism-config", "parallelism_config",
            "`parallelism_config` cannot be given as a flag, upstream refuses every value",
        )  # fmt: skip


def accelerator(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1612,1620,1827."""
    key, text = "accelerator_config", values["accelerator_config"]
    if not isinstance(text, str) or json_fault(text) is not None:
        return
    try:
        given = inline(text)
        config = from_file(text) if given is None else given
    except Missing as fault:
        yield missing_file(key, fault)
        return
    except Unreadable as fault:
        yield say("error", "parser", "accelerator-config", key, f"`{key}`: {fault}")
        return
    # another version may know others
    if values.schema.tested and (unknown := sorted(config.keys() - _ACCELERATOR)):
        yield say(
            "error", "parser", "accelerator-config", key,
            f"`{key}` has no `{brief(unknown[0])}`", f"it has {', '.join(sorted(_ACCELERATOR))}",
        )  # fmt: skip
    if config.get("use_configured_state"):
        yield say(
            "error", "parser", "accelerator-config", key,
            f"`{key}`: `use_configured_state` needs a state that no script of TRL's has set up",
        )  # fmt: skip


def deepspeed(values: Values) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1276, accelerate/utils/deepspeed.py:188."""
    key, text = "deepspeed", values["deepspeed"]
    if not isinstance(text, str) or not text or json_fault(text) is not None:
        return
    try:
        given = inline(text)
        if given == {}:
            return
        config = from_file_or_base64(text) if given is None else given
    except Missing as fault:
        yield missing_file(key, fault)
        return
    except Unreadable as fault:
        yield say("error", "parser", "deepspeed-mapping", key, f"`{key}`: {fault}")
        return
    reason = deepspeed_fault(config, on_each_node=bool(values.get("save_on_each_node")))
    if reason is not None:
        yield say(
            "error", "parser", "deepspeed-mapping", key, f"`{key}`: {reason}",
            "launch's own `deepspeed:` beside `args:` names configs that work",
        )  # fmt: skip


def deepspeed_fault(config: dict[str, Any], *, on_each_node: bool) -> str | None:
    if "zero_optimization" not in config:
        return "it has no `zero_optimization`"
    nodes = {name: _node(config, name) for name in _DEEPSPEED}
    if on_each_node and "checkpoint" in config and config["checkpoint"] is None:
        return "`checkpoint` is empty, and `save_on_each_node` writes into it"
    if on_each_node:
        nodes["checkpoint"] = config.get("checkpoint")
    for name, node in nodes.items():
        if node is not None and not isinstance(node, dict):
            return f"`{name}` is a mapping, not `{brief(node)}`"
    devices = (
        _node(config, f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
    )
    if nodes["zero_optimization"] and nodes["zero_optimization"].get("stage") in (2, 3, "auto"):
        for device in devices:
            if isinstance(device, dict | list):
                return f"an offload `device` is a name, not `{brief(device)}`"
    return None


def _node(config: dict[str, Any], name: str) -> Any:
    """The entry under a dotted name; None where there is none, or where something else is above it."""
    node: Any = config
    for part in name.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def ddp_timeout(values: Values) -> Iterator[Finding]:
    """transformers/training_args.py:1859: not read on the CPU, so not the parser's in every case."""
    seconds = number(values["ddp_timeout"])
    if seconds is not None and abs(seconds) >= _LONGEST:
        yield say(
            "error", "run", "ddp-timeout", "ddp_timeout",
            f"`ddp_timeout` is in seconds: {seconds:g} overflows",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    json_mappings, two_precisions, two_eval_precisions, zero_logging, eval_without_steps, whole_steps,
    best_model_strategies, best_model_steps, scheduler_without_eval, negative_warmup,
    prefetch_without_workers, empty_cache, parallelism, accelerator, deepspeed, ddp_timeout,
)  # fmt: skip
