"""The options of accelerate, torchrun, deepspeed, srun -> GPUs, machines and launch's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.config.keys import KEYS
from launcher.stage.conversion import sharding
from launcher.stage.conversion.commands import CONFIG
from launcher.stage.conversion.ledger import ConversionLedger, explain_missing
from launcher.stage.conversion.settings import (
    Recipe,
    SourceSetting,
    is_off,
    is_on,
    leading_number,
    split_words,
)
from launcher.stage.conversion.sharding import ShardingName

_PROCESSES = "num_processes"
_MACHINES = frozenset({"num_machines", "nnodes", "num_nodes", "nodes", "N"})
_EACH = frozenset({"nproc_per_node", "num_gpus", "gpus", "gpus_per_node", "gres", "gpus_per_task"})
_CONNECTS = "launch connects the processes itself; --main-address names the first machine"
_SHARDS = "`deepspeed:` covers it"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        "main_process_port main_process_ip main_training_function master_addr master_port "
        "machine_rank node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone "
        "same_network hostfile deepspeed_hostfile launcher deepspeed_multinode_launcher i "
        "include exclude no_ssh".split(),
        _CONNECTS,
    ),
    **dict.fromkeys(
        "max_restarts monitor_interval".split(), "the same command continues an interrupted run"
    ),
    **dict.fromkeys(
        "tee redirects log_dir role log_line_prefix_template".split(),
        "launch keeps every rank's log",
    ),
    **dict.fromkeys(
        "gradient_accumulation_steps gradient_clipping".split(),
        "the trainer's own argument counts: write it below `args:`",
    ),
    **dict.fromkeys(
        "rdzv_configs tpu_zone tpu_name commands_file command_file".split(), "launch uses GPUs"
    ),
    **dict.fromkeys(
        "debug quiet compute_environment downcast_bf16 enable_cpu_affinity use_cpu cpu gpu_ids "
        "tpu_env tpu_use_cluster tpu_use_sudo num_cpu_threads_per_process mpirun_hostfile "
        "same_network dynamo_mode config_name".split(),
        "launch decides it",
    ),
    **dict.fromkeys(("module", "m"), "launch starts the trainer's script itself"),
    CONFIG: "its keys are read one by one",
}
_CONFIG_FILES = ("config_file", "accelerate_config")
_SHARDING = frozenset(
    "use_deepspeed deepspeed_config_file zero_stage offload_optimizer_device "
    "offload_param_device zero3_init_flag zero3_save_16bit_model deepspeed_moe_layer_cls_names "
    "zero_force_ds_cpu_optimizer use_fsdp fsdp_sharding_strategy fsdp_version "
    "fsdp_offload_params fsdp_min_num_params fsdp_auto_wrap_policy fsdp_backward_prefetch "
    "fsdp_forward_prefetch fsdp_state_dict_type fsdp_use_orig_params "
    "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap "
    "fsdp_activation_checkpointing fsdp_reshard_after_forward fsdp_backward_prefetch_policy "
    "distributed_type multi_gpu".split()
)


def read_configs(recipe: Recipe) -> None:
    """Add the keys of accelerate's config file, if it exists, to the options of the launchers."""
    for setting in [*recipe.launchers]:
        if setting.key not in _CONFIG_FILES:
            continue
        path = str(setting.value)
        content = sharding.read_mapping(path, recipe) or {}
        file = str(sharding.find(path, recipe) or setting.file)
        keys = {other.key for other in recipe.launchers}
        for key, value in _flatten(content).items():
            if key not in keys:
                written = f"{path}: {key}"
                option = SourceSetting(key=key, value=value, written=written, file=file)
                recipe.launchers.append(option)


def _flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of accelerate's config file under the names of its options."""
    options: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            options |= value
        else:
            options[key] = value
    return options


def settle(recipe: Recipe, ledger: ConversionLedger) -> None:
    """Read GPUs, machines, precision and sharding, and say what became of every option."""
    _count_devices(recipe, ledger)
    _set_precision(recipe, ledger)
    _set_sharding(recipe, ledger)
    _set_compilation(recipe, ledger)
    for setting in recipe.launchers:
        if ledger.is_settled(setting):
            continue
        if setting.key == CONFIG and setting.value in recipe.absent:
            ledger.leave(setting, "it is not here: what it says is missing")
        elif setting.missing and setting.key != CONFIG:
            ledger.leave(setting, explain_missing(setting), matters=setting.key not in _REASONS)
        else:
            program = setting.written.partition(" ")[0]
            other = f"an option of {program}: launch starts the processes itself"
            ledger.leave(setting, _REASONS.get(setting.key, other), matters=False)


def _count_devices(recipe: Recipe, ledger: ConversionLedger) -> None:
    for setting in recipe.launchers:
        if setting.key in _MACHINES and not setting.missing:
            count = _parse_upper_bound(setting.value)
            if count is not None:
                recipe.nodes = count
                ledger.point(setting, "--nodes")
    recipe.gpus = _count_devices_of_launchers(recipe, ledger) or recipe.gpus
    _count_visible_devices(recipe, ledger)


def _parse_upper_bound(value: Any) -> int | None:
    """A number, or the end of torchrun's range `1:4`."""
    return leading_number(str(value).rpartition(":")[2])


def _count_devices_of_launchers(recipe: Recipe, ledger: ConversionLedger) -> int | None:
    """GPUs of one machine."""
    total: int | None = None
    each: int | None = None
    for setting in recipe.launchers:
        if setting.missing:
            continue
        if setting.key == _PROCESSES:
            total = leading_number(setting.value)
            ledger.point(setting, "--gpus")
        elif setting.key in _EACH:
            count = _parse_upper_bound(setting.value)
            if count is not None:
                each = count
                ledger.point(setting, "--gpus")
        elif setting.key in ("include", "i"):
            devices = str(setting.value).partition("@")[0].rpartition(":")[2]
            each = len(split_words(devices)) or None
            ledger.point(setting, "--gpus")
    if each is None and total is not None:
        return max(1, total // (recipe.nodes or 1))
    return each


def _count_visible_devices(recipe: Recipe, ledger: ConversionLedger) -> None:
    for setting in recipe.environment:
        if setting.missing:
            continue
        if setting.key == "NPROC_PER_NODE":
            number = leading_number(setting.value)
        elif setting.key in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
            number = len(split_words(setting.value))
        else:
            continue
        if recipe.gpus is None:
            recipe.gpus = number
        if recipe.gpus is not None:
            ledger.point(setting, "--gpus")


def _set_precision(recipe: Recipe, ledger: ConversionLedger) -> None:
    for setting in recipe.launchers:
        if setting.key != "mixed_precision" or setting.missing:
            continue
        value = str(setting.value)
        if is_off(setting.value):
            value = "no"
        precisions = KEYS["mixed_precision"].words
        if value in precisions:
            ledger.draft.mixed_precision = value
            ledger.point(setting, "mixed_precision")
        else:
            reason = f"`mixed_precision: {value}` is not one of {', '.join(precisions)}"
            ledger.leave(setting, reason)


def _set_sharding(recipe: Recipe, ledger: ConversionLedger) -> None:
    options = {setting.key: setting for setting in recipe.launchers if not setting.missing}
    result = _find_sharding({key: setting.value for key, setting in options.items()}, recipe)
    keys = [key for key in options if key in _SHARDING or key in _CONFIG_FILES]
    if result is not None:
        ledger.shard(result, *[options[key] for key in keys])
        return
    for key in keys:
        setting = options[key]
        text = str(setting.value)
        if key in _SHARDING or sharding.read_text(text, recipe) is not None:
            ledger.leave(setting, "launch decides it: no ZeRO and no FSDP", matters=False)
        elif re.search(r"multi_?gpu|single|ddp|default", text.lower()):
            reason = "without ZeRO and FSDP launch needs no such file"
            ledger.leave(setting, reason, matters=False)
        else:
            reason = "no such file here: what it says of precision and sharding is not known"
            ledger.leave(setting, reason)


def _find_sharding(options: Mapping[str, Any], recipe: Recipe) -> ShardingName | None:
    if "deepspeed_config_file" in options:
        return sharding.name_deepspeed(options["deepspeed_config_file"], recipe)
    if "zero_stage" in options:
        states = options.get("offload_optimizer_device")
        weights = options.get("offload_param_device")
        offloads = not is_off(states) or not is_off(weights)
        return sharding.name_stage(options["zero_stage"], offloads=offloads)
    kind = str(options.get("distributed_type")).upper()
    if is_on(options.get("use_fsdp")) or kind == "FSDP":
        return sharding.name_fsdp(options.get("fsdp_sharding_strategy", "FULL_SHARD"))
    config = options.get("config_file", options.get("accelerate_config"))
    if config is not None and sharding.read_text(str(config), recipe) is None:
        return sharding.recognise_name(str(config))
    if "use_deepspeed" in options:
        # accelerate/utils/dataclasses.py: without a file it is ZeRO-2
        return ShardingName("zero2")
    return None


def _set_compilation(recipe: Recipe, ledger: ConversionLedger) -> None:
    """accelerate's dynamo is transformers' `torch_compile`."""
    for setting in recipe.launchers:
        if not setting.key.startswith("dynamo_") or setting.missing or ledger.is_settled(setting):
            continue
        if setting.key != "dynamo_backend" or is_off(setting.value):
            ledger.leave(setting, "nothing is compiled", matters=False)
        elif "torch_compile" not in ledger.schema.fields:
            reason = f"{ledger.schema.script} does not compile by accelerate's option"
            ledger.leave(setting, reason)
        else:
            ledger.carry(setting, "torch_compile", value=True)
            ledger.carry(setting, "torch_compile_backend", str(setting.value).lower())


_DEEPSPEED_FILES = frozenset({"deepspeed", "deepspeed_config", "ds_config", "accelerate_config"})


def settle_arguments(recipe: Recipe, ledger: ConversionLedger) -> None:
    """`deepspeed`, `fsdp` and accelerate's options that stand among the trainer's own arguments."""
    for setting in recipe.settings:
        if ledger.is_settled(setting) or setting.missing:
            continue
        if setting.key == "deepspeed" and setting.value is True:
            ledger.leave(setting, _SHARDS, matters=False)
        elif setting.key in _DEEPSPEED_FILES and not is_off(setting.value):
            result = sharding.name_deepspeed(setting.value, recipe)
            if result is None:
                reason = "write `deepspeed:` with one of launch's names, or a path"
                ledger.leave(setting, reason)
            else:
                ledger.shard(result, setting)
        elif setting.key == "zero_stage":
            _set_zero_stage(setting, recipe, ledger)
        elif setting.key == "fsdp":
            result = sharding.name_fsdp(setting.value)
            if result is None:
                ledger.leave(setting, "no FSDP", matters=False)
            else:
                ledger.shard(result, setting)
        elif setting.key in ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version"):
            ledger.leave(setting, _SHARDS, matters=False)
        elif setting.key in ("local_rank", "ddp_find_unused_parameters", "ddp_backend"):
            ledger.leave(setting, _CONNECTS, matters=False)


def _set_zero_stage(setting: SourceSetting, recipe: Recipe, ledger: ConversionLedger) -> None:
    """`--zero_stage 3 --offload` of a script that makes its DeepSpeed config itself."""
    offload = recipe.get("offload", "cpu_offload", "offload_optimizer", "adam_offload")
    offloads = offload is not None and is_on(offload.value)
    result = sharding.name_stage(setting.value, offloads=offloads)
    if result is None or "zero_stage" in ledger.schema.fields:
        return
    ledger.shard(result, setting)
    if offload is not None and offloads:
        ledger.point(offload, "deepspeed")


_OF_ACCELERATE = frozenset(
    "num_processes num_machines mixed_precision main_process_port main_process_ip machine_rank "
    "gpu_ids multi_gpu dynamo_backend dynamo_mode use_deepspeed deepspeed_config_file zero_stage "
    "offload_optimizer_device offload_param_device use_fsdp fsdp_sharding_strategy config_file "
    "accelerate_config num_cpu_threads_per_process".split()
)


def move_launcher_options(recipe: Recipe) -> None:
    """`trl sft` takes accelerate's options among its own (trl/cli/accelerate_launcher.py)."""
    for setting in [*recipe.settings]:
        if setting.key in _OF_ACCELERATE:
            recipe.settings.remove(setting)
            recipe.launchers.append(setting)
