"""open_instruct/dpo.py: DPO of OLMo-core models under FSDP, started by torchrun."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.upstream.entry import RehearsalRecipe
from launcher.upstream.schema import Values
from launcher.upstream.scripts import dpo_tune_cache
from launcher.upstream.scripts.open_instruct_arguments import CACHES_DATA, INSTEAD


def _settle(values: Values, gpus: int) -> Iterator[tuple[str, Any, str]]:
    if not values["with_tracking"]:
        asks = "utils.py::setup_experiment_paths[args.wandb_entity]"
        why = f"without it dpo.py asks wandb who is logged in, tracking or not ({asks})"
        yield "wandb_entity", "none", why


def _name_output(values: Values) -> Path:
    """The name and the seed below `output_dir`
    (utils.py::setup_experiment_paths[args.exp_name = f],
    utils.py::setup_experiment_paths[args.output_dir = os.path.join]).
    """
    return Path(str(values["output_dir"])) / f"{values['exp_name']}__{values['seed']}"


SCRIPT = replace(
    dpo_tune_cache.SCRIPT,
    script="open_instruct/dpo.py",
    renamed="",  # it keeps its name
    stage="dpo",
    # it has the argument for Liger and reads it nowhere; recomputed is only what is compiled
    # (olmo_core_utils.py::build_ac_config[if activation_memory_budget]); GPUs may share each matrix
    # product (dpo.py::main[dp_world_size = world_size])
    names=replace(
        dpo_tune_cache.SCRIPT.names,
        liger=None,
        shared="tensor_parallel_degree",
        exact_output=None,
        recompute_needs="compile_model",
    ),
    settle=_settle,
    rules="open_instruct.olmo_core",
    watchers={
        **dpo_tune_cache.SCRIPT.watchers,
        "open_instruct.olmo_core_train_modules": "watch_olmo_module",
        "olmo_core.train.train_module.transformer.train_module": "watch_olmo_step",
        "olmo_core.train.trainer": "watch_olmo_trainer",
        "olmo_core.train.callbacks.checkpointer": "watch_olmo_checkpoints",
    },
    stand_ins={
        **dpo_tune_cache.SCRIPT.stand_ins,
        "olmo_core.distributed.utils": "supply_gloo",
        "olmo_core.train.callbacks.gpu_memory_monitor": "supply_memory_monitor",
    },
    launcher="torchrun",
    loop="olmo_core",
    rehearsal=RehearsalRecipe(
        values={"attn_implementation": "torch", "compile_model": False, "wandb_entity": "none"},
        parses="parse",
        adapts="shrink_olmo_core",
        imports_others=True,
    ),
    sharding="fsdp",
    packing="one-row",
    needs_process_group=False,
    # dpo.py::main[drop_last=True],
    # data_loader.py::HFDataLoader._reshard[usable_size = total_batches #1]
    drops_last=True,
    # dpo.py::main[if args.cache_logprobs_only]: of the DPO scripts only this one ends after the
    # reference
    ends_after={**CACHES_DATA, "cache_logprobs_only": "reference pass"},
    unjudged="step[1-9]*",
    output=_name_output,
    final_model="hf_model",  # dpo.py::_handle_post_training[hf_model_path = os.path.join]
    # dpo.py::main[train_module.reference_cache] computes a reference for simpo too
    without_reference=(),
    models=(
        ("open_instruct.olmo_core_utils", "OLMO_MODEL_CONFIG_MAP"),
        ("olmo_core.nn.transformer.config", "TransformerConfig"),
    ),
    own_shapes=("open_instruct.olmo_core_hybrid", "LOCAL_TRANSFORMER_CONFIGS"),
    beside=(dpo_tune_cache.SCRIPT.script,),
    needs=("vllm", "backoff", "docker", "openenv-core"),  # data_loader.py imports what GRPO needs
    instead={
        **INSTEAD,
        "overwrite_cache": "`skip_cache: true` rebuilds the dataset cache",
        "report_to": "this script reports to wandb only"
        " (olmo_core_utils.py::build_base_callbacks[if with_tracking])",
        "model_revision": "download the revision and name its folder",
        "max_train_samples": "give a number of samples in `mixer_list`: [name, 200]",
        "resume_from_checkpoint": "OLMo-core resumes from what the output folder holds",
        "gradient_checkpointing": "write `activation_memory_budget`",
    },
)
