"""Rules for TRL that need the machine: its devices and processes, packages, keys for services.

Line numbers are those of the packages named in tests/test_upstream_facts.py. What was seen to work is
left alone: quantised models on the CPU and with ZeRO-3, paged optimizers on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher.backends import service_rules, trl_attention, trl_resolved
from launcher.backends.context import Context, StageRule
from launcher.backends.model_rules import offline
from launcher.backends.rule import say
from launcher.backends.trl_mappings import inline
from launcher.errors import Finding, Severity, brief

# transformers/integrations/hub_kernels.py:648
_KERNEL = re.compile(r"[^/:]+/[^/:]+(?:@[^/:]+)?(?::[^/:]+)?\Z")
# what an optimizer's name begins with, and any package that brings it (transformers/trainer_optimizer.py:254)
_OPTIMIZERS = (
    (("galore",), ("galore-torch",)),
    (("apollo",), ("apollo-torch",)),
    (("lomo", "adalomo"), ("lomo-optim",)),
    (("grokadamw",), ("grokadamw",)),
    (("schedule_free",), ("schedulefree",)),
    (("stable_adamw",), ("torch-optimi",)),
    (("adamw_anyprecision",), ("torchdistx",)),
    (("adamw_torch_4bit", "adamw_torch_8bit"), ("torchao",)),
    (
        ("adamw_bnb", "adamw_8bit", "paged_", "ademamix", "lion", "rmsprop_bnb"),
        ("bitsandbytes",),
    ),
)
# transformers/integrations/integration_utils.py:703 and the other integrations
_REPORTS = {
    "tensorboard": ("tensorboard", "tensorboardx"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "comet_ml": ("comet-ml",),
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
    "dagshub": ("dagshub",),
    "flyte": ("flytekit",),
}
_SILENT_WANDB = {"offline", "disabled", "dryrun"}


# --- the CPU ---------------------------------------------------------------------------------------


def bf16_on_cpu(context: Context) -> Iterator[Finding]:
    """transformers/training_args.py:1746; TRL's default asks for it (trl/trainer/base_config.py:108).

    Before a start it is open what launch itself sets on the CPU.
    """
    values = context.values
    if context.gpus != 0 or not context.running or values["use_cpu"]:
        return
    trained = trl_resolved.precision(values) == "bf16"
    if not trained and not values["bf16_full_eval"]:
        return
    key = "bf16" if trained else "bf16_full_eval"
    default = "" if values.given(key) else ", TRL's default,"
    yield say(
        "error", "run", "bf16-on-cpu", key, f"`{key}`{default} is refused without a GPU",
        f"add `{key}: false`, or `use_cpu: true` for bfloat16 on the CPU",
    )  # fmt: skip


def tf32_on_cpu(context: Context) -> Iterator[Finding]:
    """transformers/training_args.py:1650."""
    if context.gpus == 0 and context.values["tf32"]:
        yield say(
            "error", "run", "tf32-on-cpu", "tf32", "`tf32: true` is refused without a GPU",
            "delete the line",
        )  # fmt: skip


def fp16_on_cpu(context: Context) -> Iterator[Finding]:
    """accelerate/accelerator.py:567."""
    if context.gpus == 0 and context.values["fp16"]:
        yield say(
            "warning", "run", "fp16-on-cpu", "fp16",
            "`fp16` does nothing on the CPU: training runs in full precision",
            "delete the line and add `bf16: false`, or `use_cpu: true` for bfloat16",
        )  # fmt: skip


def offloading_on_cpu(context: Context) -> Iterator[Finding]:
    """trl/models/activation_offloading.py:152."""
    if context.gpus == 0 and context.values["activation_offloading"]:
        yield say(
            "error", "run", "offloading-on-cpu", "activation_offloading",
            "`activation_offloading` crashes without a GPU to offload from", "delete the line",
        )  # fmt: skip


def cpu_beside_gpus(context: Context) -> Iterator[Finding]:
    """transformers/training_args.py:1844."""
    if context.gpus and context.values["use_cpu"]:
        yield say(
            "error", "run", "cpu-beside-gpus", "use_cpu",
            f"`use_cpu: true` trains on the CPU, and {context.gpus} GPU(s) are asked for",
            "delete the line, or start with --gpus 0",
        )  # fmt: skip


# --- processes and engines -------------------------------------------------------------------------


def backend_alone(context: Context) -> Iterator[Finding]:
    """accelerate/state.py:304 asks a process group that a single process never makes."""
    backend = context.values["ddp_backend"]
    own = context.gpus != 0 and trl_resolved.own_deepspeed(context.values) is not None
    if backend is not None and trl_resolved.alone(context) and not own:
        yield say(
            "error", "run", "backend-alone", "ddp_backend",
            f"`ddp_backend: {backend}` crashes where a single process runs", "delete the line",
        )  # fmt: skip


def sharding_alone(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:463."""
    config = trl_resolved.fsdp(context.values)
    if config is not None and not config.get("xla") and trl_resolved.alone(context):
        yield say(
            "error", "run", "fsdp-alone", "fsdp",
            "`fsdp` is refused where a single process runs: there is nothing to shard over",
            "delete the line, or use several GPUs",
        )  # fmt: skip


def two_engines(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:461; accelerate/utils/dataclasses.py:1265 reads launch's file where TRL
    has none of its own.
    """
    values = context.values
    if context.file is None:
        return
    if values["fsdp"]:
        yield say(
            "error", "run", "two-engines", "fsdp",
            "`fsdp` beside `deepspeed:`: transformers refuses both", "write `deepspeed: none`",
        )  # fmt: skip
    if trl_resolved.own_deepspeed(values) is not None:
        yield say(
            "warning", "run", "two-engines", "deepspeed",
            "TRL's own `deepspeed` replaces `deepspeed:` beside `args:`: nothing of that file is read",
            "keep launch's own",
        )  # fmt: skip


def own_deepspeed_alone(context: Context) -> Iterator[Finding]:
    """deepspeed/comm/comm.py:890: without a launcher's variables it looks for MPI's."""
    if trl_resolved.own_deepspeed(context.values) is None or not trl_resolved.alone(context):
        return
    help = "launch's own `deepspeed:` beside `args:` starts it as it needs"
    if context.gpus == 0:
        yield say(
            "warning", "run", "deepspeed-left-out", "deepspeed",
            "TRL's own `deepspeed` does nothing on the CPU", help,
        )  # fmt: skip
    elif context.lacks("mpi4py"):
        yield say(
            "error", "run", "deepspeed-alone", "deepspeed",
            "TRL's own `deepspeed` crashes where a single process is started without its launcher",
            help,
        )  # fmt: skip


def best_without_states(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:864."""
    values = context.values
    sharded = trl_resolved.fsdp(values) is not None
    engine = "FSDP" if sharded else "DeepSpeed"
    if not sharded and trl_resolved.engine(context) is None:
        return
    if values["save_only_model"] and values["load_best_model_at_end"]:
        yield say(
            "error", "run", "best-without-states", "save_only_model",
            f"`save_only_model` and `load_best_model_at_end` exclude each other under {engine}",
            "write `save_only_model: false`",
        )  # fmt: skip


def batch_finder(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:873."""
    if context.values["auto_find_batch_size"] and trl_resolved.zero_stage(context) == 3:
        yield say(
            "error", "run", "batch-finder-zero3", "auto_find_batch_size",
            "`auto_find_batch_size` is refused with ZeRO-3",
            "write `deepspeed: zero2`, or find the batch yourself",
        )  # fmt: skip


def sharded_settings(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:849,880,3952."""
    values, config = context.values, trl_resolved.fsdp(context.values) or {}
    key = "fsdp_config"
    twice = str(config.get("activation_checkpointing", "")).lower() in {"true", "1", "yes", "on"}
    if twice and values["gradient_checkpointing"]:
        default = "" if values.given("gradient_checkpointing") else ", TRL's default"
        yield say(
            "error", "run", "checkpointing-twice", key,
            f"`activation_checkpointing` of FSDP and `gradient_checkpointing`{default} exclude each other",
            "add `gradient_checkpointing: false`",
        )  # fmt: skip
    if "SHARDED_STATE_DICT" not in str(config.get("state_dict_type", "")).upper():
        return
    if values["save_only_model"]:
        yield say(
            "error", "run", "best-without-states", "save_only_model",
            "`save_only_model` is refused with FSDP's `state_dict_type: SHARDED_STATE_DICT`",
        )  # fmt: skip
    else:
        yield say(
            "warning", "run", "fsdp-unsaved", key,
            "with `state_dict_type: SHARDED_STATE_DICT` no model is saved when training has ended, "
            "checkpoints apart",
            "write `state_dict_type: FULL_STATE_DICT`",
        )  # fmt: skip


def layerwise_optimizer(context: Context) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:117,166."""
    name = str(context.values["optim"])
    if not name.endswith("layerwise"):
        return
    if (context.gpus or 0) > 1 or (context.gpus == 1 and context.file is not None):
        yield say(
            "error", "run", "optim-distributed", "optim",
            f"`optim: {name}` does not support several processes, nor DeepSpeed",
            f"write `optim: {name.removesuffix('_layerwise')}`",
        )  # fmt: skip
    if context.accumulation is not None and context.accumulation > 1:
        yield say(
            "error", "run", "optim-accumulation", "optim",
            f"`optim: {name}` does not accumulate gradients, and {context.accumulation} passes make a step",
            f"write `optim: {name.removesuffix('_layerwise')}`, or a batch without accumulation",
        )  # fmt: skip


def accumulation_twice(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:786."""
    key = "accelerator_config"
    kwargs = (inline(context.values[key]) or {}).get("gradient_accumulation_kwargs")
    passes = context.accumulation
    if isinstance(kwargs, dict) and "num_steps" in kwargs and passes is not None and passes > 1:
        yield say(
            "error", "run", "accumulation-twice", key,
            f"`num_steps` in `{key}` beside {passes} accumulated passes: transformers refuses both",
            "delete `num_steps`",
        )  # fmt: skip


def selective_checkpointing(context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:883."""
    key, values = "gradient_checkpointing_kwargs", context.values
    selective = (inline(values[key]) or {}).get("selective") and values["gradient_checkpointing"]
    # DPO has no such word
    if values.schema.stage != "sft" or not selective or not values["use_peft"]:
        return
    if trl_resolved.zero_stage(context) == 3:
        yield say(
            "error", "run", "selective-checkpointing", key,
            f"`{key}`: `selective` is refused with an adapter and ZeRO-3", "delete `selective`",
        )  # fmt: skip


def precision_option(context: Context) -> Iterator[Finding]:
    """transformers/training_args.py:1586: `fp16` and `bf16` win over what accelerate was told."""
    option, own = context.mixed_precision, trl_resolved.precision(context.values)
    # once the GPUs are known, the option's default is filled in
    if context.gpus is not None or option is None or own in (None, option):
        return
    default = "" if context.values.given(own) else ", its default,"
    finding = say(
        "warning", "run", "mixed-precision-unread", own,
        f"`mixed_precision: {option}` is not read: TRL's `{own}`{default} decides",
        f"write `{own}: false`" if option == "no" else f"write `{option}: true` in its place",
    )  # fmt: skip
    yield replace(finding, key="mixed_precision")


# --- attention -------------------------------------------------------------------------------------


def unknown_attention(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:1848."""
    name, key = trl_resolved.attention(context.values)
    tested = context.values.schema.tested
    if tested and name is not None and name not in trl_attention.NAMES and not _KERNEL.match(name):
        yield say(
            "error", "run", "unknown-attention", key,
            f"`{brief(name)}` is no attention implementation",
            f"one of {', '.join(trl_attention.NAMES)}, or the name of a kernel's repository",
        )  # fmt: skip


def attention_missing(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:1607,1783: without its package, only `kernels` can bring it."""
    name, key = trl_resolved.attention(context.values)
    checked = name is not None and (name in trl_attention.PACKAGES or name == "flex_attention")
    if name is None or not (checked or "/" in name):
        return
    told, help = f"`attn_implementation: {name}`", "leave it out: sdpa is the default"
    on_cpu = context.gpus == 0 and "/" not in name
    if on_cpu and (name == "flex_attention" or context.lacks("kernels")):
        yield say(
            "error", "run", "attention-missing", key,
            f"{told} cannot train without a GPU, and `--gpus 0` has none", help,
        )  # fmt: skip
        return
    needed = trl_attention.PACKAGES.get(name, "kernels")
    if name != "flex_attention" and context.lacks(needed, "kernels"):
        severity: Severity = "error" if context.running else "warning"
        yield say(
            severity, "run", "attention-missing", key,
            f"{told}: the trainer's Python has no {needed}", f"pip install {needed}, or {help}",
        )  # fmt: skip


def flash_in_full_precision(context: Context) -> Iterator[Finding]:
    """transformers/integrations/flash_attention.py:22: float32 goes to kernels that refuse it."""
    name, key = trl_resolved.attention(context.values)
    # `mixed_precision:` may ask for another one; it is seen before the GPUs are known
    if context.gpus is not None or name not in trl_attention.PACKAGES:
        return
    if trl_attention.full_precision(context.values, context.mixed_precision):
        yield say(
            "error", "run", "flash-in-float32", key,
            f"`attn_implementation: {name}` takes 16 bits only, and the model is float32 with neither "
            "`bf16` nor `fp16`",
            "write `bf16: true`, or `dtype: bfloat16`",
        )  # fmt: skip


# --- packages and services -------------------------------------------------------------------------


def optimizer_package(context: Context) -> Iterator[Finding]:
    """transformers/trainer_optimizer.py:254 and what follows there."""
    name = str(context.values["optim"])
    for starts, packages in _OPTIMIZERS:
        if name.startswith(starts) and context.lacks(*packages):
            yield say(
                "error", "run", "optim-missing", "optim",
                f"`optim: {name}`: the trainer's Python has no {packages[0]}",
                f"pip install {packages[0]}, or write `optim: adamw_torch`",
            )  # fmt: skip
            return


def report_package(context: Context) -> Iterator[Finding]:
    """transformers/integrations/integration_utils.py:703 and the other integrations."""
    for name in _reports(context.values["report_to"]):
        packages = _REPORTS.get(name, ())
        if packages and context.lacks(*packages):
            yield say(
                "error", "run", "report-missing", "report_to",
                f"`report_to: {name}`: the trainer's Python has no {packages[0]}",
                f'pip install {packages[0]}, or write `report_to: "none"`',
            )  # fmt: skip


def _reports(given: Any) -> tuple[str, ...]:
    return tuple(str(word) for word in given) if isinstance(given, list) else (str(given),)


def wandb_key(context: Context) -> Iterator[Finding]:
    """transformers/integrations/integration_utils.py:762: no one is there to answer its question."""
    values, environ = context.values, context.environ
    reports = _reports(values["report_to"])
    asked = "wandb" in reports
    # `all` stands for what is installed
    asked = asked or ("all" in reports and "wandb" in (context.packages or {}))
    if not asked or environ.get("WANDB_MODE", "online") in _SILENT_WANDB:
        return
    if not service_rules.has_wandb_key(environ):
        severity: Severity = "error" if context.running else "warning"
        yield say(
            severity, "run", "no-wandb-key", "report_to",
            "`report_to: wandb` crashes: neither WANDB_API_KEY nor an entry in ~/.netrc",
            '`wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline, or `report_to: "none"`',
        )  # fmt: skip


def hub_token(context: Context) -> Iterator[Finding]:
    """transformers/trainer.py:4099, before anything is trained."""
    values, environ = context.values, context.environ
    if not values["push_to_hub"]:
        return
    if offline(environ):
        why, help = "HF_HUB_OFFLINE is set", "unset it, or write `push_to_hub: false`"
    elif not values["hub_token"] and not service_rules.has_hub_token(environ):
        why = "no one is logged in"
        help = "`hf auth login`, or set HF_TOKEN, or `push_to_hub: false`"
    else:
        return
    severity: Severity = "error" if context.running else "warning"
    yield say(
        severity, "run", "no-hub-token", "push_to_hub",
        f"`push_to_hub` crashes before anything is trained: {why}", help,
    )  # fmt: skip


RULES: tuple[StageRule, ...] = (
    bf16_on_cpu, tf32_on_cpu, fp16_on_cpu, offloading_on_cpu, cpu_beside_gpus, backend_alone,
    sharding_alone, two_engines, own_deepspeed_alone, best_without_states, batch_finder,
    sharded_settings, layerwise_optimizer, accumulation_twice, selective_checkpointing,
    precision_option, unknown_attention, attention_missing, flash_in_full_precision,
    optimizer_package, report_package, wandb_key, hub_token, service_rules.remote_code,
)  # fmt: skip
