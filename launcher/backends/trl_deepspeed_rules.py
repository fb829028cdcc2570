"""Rules about the DeepSpeed config under TRL: transformers fills what is `auto` and checks the rest.

Each was tried with DeepSpeed on the CPU. What a file leaves out is not checked, with one exception:
accelerate writes an accumulation of 1 into it before transformers looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from launcher.backends import deepspeed_rules, trl_parser_rules, trl_resolved
from launcher.backends.context import Context, StageRule, section
from launcher.backends.rule import say
from launcher.errors import Finding, brief

_GATHER = "stage3_gather_16bit_weights_on_model_save"


def _placed(context: Context, finding: Finding) -> Finding:
    """A finding at the config that is in use: launch's own option, or TRL's argument."""
    own = trl_resolved.own_deepspeed(context.values) is not None
    return finding if own else replace(finding, key="deepspeed")


def broken(context: Context) -> Iterator[Finding]:
    """accelerate/utils/deepspeed.py:188; TRL's own argument is the parser's, and said there."""
    if context.file is None or trl_resolved.own_deepspeed(context.values) is not None:
        return
    if "zero_optimization" not in context.file:
        yield from deepspeed_rules.zero_section(context)
        return
    on_each_node = bool(context.values["save_on_each_node"])
    reason = trl_parser_rules.deepspeed_fault(dict(context.file), on_each_node=on_each_node)
    if reason is not None:
        yield _placed(
            context,
            say("error", "run", "deepspeed-mapping", "deepspeed", f"the DeepSpeed file: {reason}"),
        )


def no_batch(context: Context) -> Iterator[Finding]:
    """deepspeed/runtime/config.py:650."""
    config = trl_resolved.engine(context)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if config and all(config.get(name) is None for name in names):
        yield _placed(context, say(
            "error", "run", "deepspeed-no-batch", "deepspeed",
            "the DeepSpeed config has neither `train_batch_size` nor "
            "`train_micro_batch_size_per_gpu`",
            'add both with the value "auto"',
        ))  # fmt: skip


def mismatches(context: Context) -> Iterator[Finding]:
    """transformers/integrations/deepspeed.py:129,256: raised when training begins."""
    config = trl_resolved.engine(context)
    if not config:
        return
    told = [
        f"`{name}: {brief(theirs)}` is not `{key}: {brief(ours)}`"
        for name, key, ours in _expected(context)
        if ours is not None and _differs(theirs := _given(config, name), ours)
    ]
    if told:
        yield _placed(context, say(
            "error", "run", "deepspeed-mismatch", "deepspeed",
            f"transformers refuses the DeepSpeed config: {'; '.join(told)}",
            'write "auto" for what the arguments say',
        ))  # fmt: skip


def _expected(context: Context) -> Iterator[tuple[str, str, Any]]:
    """What a config must say, under which name, and the argument that says it; None if unknown."""
    values, rows, passes = context.values, context.per_device, context.accumulation
    yield "train_micro_batch_size_per_gpu", "per_device_train_batch_size", rows
    yield "gradient_accumulation_steps", "gradient_accumulation_steps", passes
    if rows is not None and passes is not None and context.gpus:
        total = rows * passes * context.gpus
        yield "train_batch_size", "rows x passes x devices", total
    yield "gradient_clipping", "max_grad_norm", values["max_grad_norm"]
    rate, decay = values["learning_rate"], values["weight_decay"]
    yield "optimizer.params.lr", "learning_rate", rate
    betas = [values["adam_beta1"], values["adam_beta2"]]
    yield "optimizer.params.betas", "adam_beta1, adam_beta2", None if None in betas else betas
    yield "optimizer.params.eps", "adam_epsilon", values["adam_epsilon"]
    yield "optimizer.params.weight_decay", "weight_decay", decay
    yield "scheduler.params.warmup_max_lr", "learning_rate", rate
    warmup = values["warmup_steps"]
    # a share below 1 is one of steps that are not known here
    counted = isinstance(warmup, int | float) and (1 <= warmup < math.inf or warmup == 0)
    yield "scheduler.params.warmup_num_steps", "warmup_steps", int(warmup) if counted else None


def _given(config: Mapping[str, Any], name: str) -> Any:
    node: Any = config
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _differs(theirs: Any, ours: Any) -> bool:
    return theirs is not None and theirs != "auto" and bool(theirs != ours)


def accumulation_left_out(context: Context) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1275 fills in 1, which transformers then refuses; for TRL's own
    argument the check is over by then, and DeepSpeed takes a step at each pass.
    """
    config, ours = trl_resolved.engine(context), context.accumulation
    if not config or "gradient_accumulation_steps" in config or ours is None or ours == 1:
        return
    own = trl_resolved.own_deepspeed(context.values) is not None
    what = (
        "DeepSpeed takes a step at each of them" if own else "transformers refuses the difference"
    )
    yield _placed(context, say(
        "error", "run", "deepspeed-accumulation", "deepspeed",
        f"the DeepSpeed config has no `gradient_accumulation_steps`, which means 1, and {ours} "
        "passes "
        f"make a step: {what}",
        'add `"gradient_accumulation_steps": "auto"`',
    ))  # fmt: skip


def precision(context: Context) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py:1440,1446, transformers/integrations/deepspeed.py:129.

    accelerate fills a file by the precision of training, transformers then compares it with that of
    evaluation too; TRL's own argument meets them in the other order.
    """
    config, values = trl_resolved.engine(context), context.values
    if not config:
        return
    own = trl_resolved.own_deepspeed(values) is not None
    running = _running(context)
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        evaluated = bool(values[f"{name}_full_eval"])
        wanted = trl_resolved.precision(values) == name or evaluated
        stated = _given(config, f"{name}.enabled")
        open_ = stated == "auto" or not isinstance(config.get(name), Mapping)
        told = help = None
        if running == other and (
            str(stated).lower() == "true" or (own and stated == "auto" and wanted)
        ):
            told = f"enables {name}, and training runs in {other}"
            help = f"write `{name}: true`" if not evaluated else f"delete `{name}_full_eval`"
        elif stated is not None and not open_ and stated != wanted:
            told = f"has `{name}.enabled: {brief(stated)}`, and TRL's arguments say {wanted}"
            help = f'write `"enabled": "auto"`, or `{name}: {str(not wanted).lower()}`'
        elif open_ and not own and running is not None and (running == name) != wanted:
            told = f"takes {name} from training, which is {running}, and `{name}_full_eval` asks for it"
            help = f"delete `{name}_full_eval`, or write `{name}: true`"
            if not wanted:
                told = f"takes {name} from `mixed_precision`, and TRL's `{name}` is false"
                help = f"delete `mixed_precision`, or write `{name}: true`"
        if told is not None:
            yield _placed(context, say(
                "error", "run", "deepspeed-precision", "deepspeed",
                f"the DeepSpeed config {told}: that is refused", help,
            ))  # fmt: skip
            return


def _running(context: Context) -> str | None:
    """The precision of training; None where that is not known."""
    trained = trl_resolved.precision(context.values)
    if trained is not None:
        return trained
    # what stands in the stage file; once the GPUs are known its default is filled in
    return None if context.gpus is not None else context.mixed_precision or "no"


def clipping_left_out(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:3023 leaves clipping to DeepSpeed, which without a number does none."""
    config, values, key = trl_resolved.engine(context), context.values, "max_grad_norm"
    ours = values[key]
    if not config or config.get("gradient_clipping") is not None or not values.given(key):
        return
    if isinstance(ours, int | float) and ours > 0:
        yield say(
            "warning", "run", "clipping-unread", key,
            f"`{key}: {ours}` is not read with DeepSpeed, which does not clip",
            'write `"gradient_clipping": "auto"` in the DeepSpeed config',
        )  # fmt: skip


def unsaved_weights(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:3972; an adapter is gathered all the same (transformers/trainer.py:3965)."""
    config = trl_resolved.engine(context)
    if not config or trl_resolved.zero_stage(context) != 3 or context.values["use_peft"]:
        return
    if section(config, "zero_optimization").get(_GATHER) is not True:
        yield _placed(context, say(
            "warning", "run", "zero3-unsaved", "deepspeed",
            f"ZeRO-3 without `{_GATHER}: true` saves no model, only DeepSpeed's own checkpoint",
            "add it to `zero_optimization`, or run zero_to_fp32.py in the output folder",
        ))  # fmt: skip


RULES: tuple[StageRule, ...] = (
    broken, no_batch, mismatches, accumulation_left_out, precision, clipping_left_out, unsaved_weights,
)  # fmt: skip
