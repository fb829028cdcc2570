"""allenai/open-instruct at the pin: its SFT and DPO scripts, as data.

Line numbers are those of the pin; tests/agreement/test_upstream_facts.py holds them against a checkout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launcher.upstream.entry import DATA_FILE, Checkpoints, Entry, Lost, Moved, Names, Release
from launcher.upstream.schema import Values

NAME = "open_instruct"
PACKAGES: tuple[str, ...] = ("open_instruct",)
CHECKOUT = True
PIN = "e6c3044aa6201c8bfa4573c1b03142af599e730d"
BASELINE = "45901fd00593422a366dc303012b55b4fe5f4241"
# the commits that stay known, the newest first, with their dates: whatever the pin is (docs/pin.md)
KEPT: Mapping[str, str] = {
    "e6c3044aa6201c8bfa4573c1b03142af599e730d": "2026-08-20",
    "45901fd00593422a366dc303012b55b4fe5f4241": "2026-04-07",
}


def _known() -> tuple[Release, ...]:
    releases = []
    for commit in dict.fromkeys((PIN, *KEPT)):
        date = KEPT.get(commit, "")
        releases.append(Release(version=commit, snapshot=f"{NAME}_{commit[:12]}.json", date=date))
    return tuple(releases)


KNOWN: tuple[Release, ...] = _known()
TAKES_NONE = False
# an enum of OLMo-core's that arguments of commits after the pin have as their type
COMPUTED: Mapping[str, tuple[str, ...]] = {"olmo_core.nn.lm_head.LMLossImplementation": ("default", "fused_linear")}
# finetune.py::[import deepspeed] and what those modules import in turn
NEEDS: tuple[str, ...] = (
    *("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "ai2-olmo-core", "absl-py", "bettermap"),
    *("beaker-py", "immutabledict", "langdetect", "litellm", "nltk", "ray", "wandb"),
)
# with CUDA and no such package the detection of commits before eb9c5ff24 raises; later ones take torch's attention
# (model_utils.py::detect_attn_implementation[transformers.utils.is_flash_attn_2_available])
GPU_NEEDS: tuple[str, ...] = ("flash-attn",)
EXTRA = "open-instruct"
# importing litellm would otherwise ask the network for model prices, 5 s where there is none
ENVIRON: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
CHECKPOINTS: Checkpoints = "accelerate"
DATA_CACHE: Literal["own", "datasets"] = "own"
MODEL_ARGUMENTS: tuple[str, ...] = ("model_name_or_path", "tokenizer_name_or_path")
ONE_GPU = False
_NO_SERVICES = dict.fromkeys(("push_to_hub", "try_launch_beaker_eval_jobs", "try_auto_save_to_beaker"), False)
SHORT_RUN: Mapping[str, Any] = {
    **_NO_SERVICES,
    **dict.fromkeys(("send_slack_alerts", "profiling", "cache_dataset_only", "cache_logprobs_only"), False),
    **dict.fromkeys(("resume_from_checkpoint", "ephemeral_save_interval")),
    **dict.fromkeys(("dataset_config_hash", "config_hash")),  # the slice would be kept under the name of the whole
    "do_not_randomize_output_dir": True,
    "with_tracking": False,
}
REHEARSAL: Mapping[str, Any] = {
    "with_tracking": None,
    **_NO_SERVICES,
    **dict.fromkeys(("send_slack_alerts", "profiling")),
    "do_not_randomize_output_dir": True,
    "max_train_steps": 2,
    "logging_steps": 1,
    **dict.fromkeys(("checkpointing_steps", "ephemeral_save_interval", "resume_from_checkpoint")),
    **dict.fromkeys(("dataset_config_hash", "config_hash", "hf_entity", "trust_remote_code")),
}

_TOKENIZER = ("open_instruct.dataset_transformation", "TokenizerConfig")

# The same idea under two names, on purpose upstream: (SFT's, DPO's).
_PAIRS = (
    ("dataset_mixer_list", "mixer_list"),
    ("dataset_mixer_list_splits", "mixer_list_splits"),
    ("dataset_transform_fn", "transform_fn"),
    ("dataset_target_columns", "target_columns"),
    ("dataset_cache_mode", "cache_mode"),
    ("dataset_local_cache_dir", "local_cache_dir"),
    ("dataset_config_hash", "config_hash"),
    ("dataset_skip_cache", "skip_cache"),
    ("num_train_epochs", "num_epochs"),
    ("wandb_project_name", "wandb_project"),
    ("clip_grad_norm", "max_grad_norm"),
    ("gradient_checkpointing", "activation_memory_budget"),
)

_REMOVED = {
    "use_flash_attn": Moved(
        None, "removed upstream by #1567 (9e8e2187c): attention is detected from what is installed"
    ),
    "chat_template": Moved("chat_template_name", "the tokenizer's argument has another name"),
    "model_name": Moved("model_name_or_path", "upstream's name"),
    "max_length": Moved("max_seq_length", "TRL's name"),
    "max_steps": Moved("max_train_steps", "TRL's name"),
    "use_peft": Moved("use_lora", "TRL's name"),
    "lora_r": Moved("lora_rank", "TRL's name"),
}


# What does what the argument says, where the argument itself does nothing.
_INSTEAD = {
    "tokenizer_name": "write `tokenizer_name_or_path`",
    "use_slow_tokenizer": "write `use_fast: false`",
    "use_8bit_optimizer": "without QLoRA the optimizer keeps 32 bits: delete the line",
}


def _data_hints(listed: str) -> dict[str, str]:
    help = f"write the sets as `{listed}: [name, amount, name, amount, ...]`"
    return {"dataset_mixer": help, "dataset_name": help}


def _data_file(listed: str) -> dict[str, Lost]:
    return {
        DATA_FILE: Lost(
            did="it named the file of the data",
            now=f"`{listed}` alone names data, by default others than yours",
            instead=f"write `{listed}: [FILE, 1.0]`, of a .jsonl or .parquet file",
        )
    }


# of DPO it was an argument that nothing read
_SUMMED_LOSS = Lost(
    did="`sum` added up the losses of all tokens, so that each token of a step weighed the same",
    now="the loss is the mean over the tokens of a micro-batch, and accumulation and GPUs average these means "
    "(open_instruct/finetune.py::main[loss = outputs.loss]): a learning rate tuned for the sum is far too low, and "
    "how a step is split into micro-batches changes the weights of rows",
    instead="choose the learning rate anew, with few accumulation steps and micro-batches of like size",
    harmless=("mean",),
)


_TABLES = ("open_instruct.dataset_transformation", ("CHAT_TEMPLATES", "GET_TOKENIZER_FN", "TRANSFORM_FNS"))

# finetune.py::main[if args.cache_dataset_only], dpo_tune_cache.py::main[if args.cache_dataset_only],
# dpo.py::main[if args.cache_dataset_only]
_CACHES_DATA = {"cache_dataset_only": "data set"}

_DPO = Entry(
    script="open_instruct/dpo_tune_cache.py",
    classes=(("open_instruct.dpo_utils", "DPOExperimentConfig"), _TOKENIZER),
    owner="DPOExperimentConfig",
    names=Names(
        data="mixer_list",
        epochs="num_epochs",
        max_steps="max_train_steps",
        max_length="max_seq_length",
        save_every="checkpointing_steps",
        exact_output="do_not_randomize_output_dir",
    ),
    splits=frozenset({"mixer_list"}),
    loop="accelerate",
    runs_on_cpu=False,
    needs_process_group=True,
    skips_each_epoch=True,
    ends_after=_CACHES_DATA,
    packing="paired",
    dtype="bfloat16",
    liger_dtype="auto",
    strict_liger=True,
    best_attention=True,
    caches_reference=True,
    without_reference=("simpo",),  # dpo_utils.py::DPOLossType.needs_reference_model[return self in]
    lost=_data_file("mixer_list"),
    hints={**_data_hints("mixer_list"), "checkpointing_steps": "DPO counts steps: write a number (`epoch` is SFT's)"},
    moved={**_REMOVED, **{theirs: Moved(ours, f"SFT's name; DPO has `{ours}`") for theirs, ours in _PAIRS}},
    older={"data": ("dataset_mixer_list",), "epochs": ("num_train_epochs",)},
    tables=_TABLES,
    recorders=frozenset({"compute_reference_cache_hash"}),  # a hash of the key is no use of a value
    beside=("open_instruct/dpo.py",),
    instead={
        **_INSTEAD,
        "overwrite_cache": "`skip_cache: true` rebuilds the dataset cache",
        "report_to": "this script reports to wandb only (dpo_tune_cache.py::main[log_with])",
    },
    partial=frozenset({"cache_dataset_only", "cache_logprobs_only"}),
)


def _settle_olmo_core(values: Values, gpus: int) -> Iterator[tuple[str, Any, str]]:
    if not values["with_tracking"]:
        asks = "utils.py::setup_experiment_paths[args.wandb_entity]"
        why = f"without it dpo.py asks wandb who is logged in, tracking or not ({asks})"
        yield "wandb_entity", "none", why


OLMO_CORE = "dpo_olmo_core"
"""The key of upstream's second DPO script: OLMo-core models under FSDP, started by torchrun."""

STAGES: Mapping[str, Entry] = {
    "sft": Entry(
        script="open_instruct/finetune.py",
        classes=(("open_instruct.finetune", "FlatArguments"), _TOKENIZER),
        owner="FlatArguments",
        names=replace(_DPO.names, data="dataset_mixer_list", epochs="num_train_epochs"),
        splits=frozenset({"dataset_mixer_list"}),
        loop="accelerate",
        runs_on_cpu=False,
        epoch_checkpoints=True,
        ends_after=_CACHES_DATA,
        packing="flattened",
        dtype="bfloat16",  # finetune.py::main[AutoLigerKernelForCausalLM.from_pretrained] names no type there
        liger_dtype="auto",
        strict_liger=True,
        best_attention=True,
        whole_model=True,  # finetune.py::main[snapshot_download]
        hints=_data_hints("dataset_mixer_list"),
        lost={"reduce_loss": _SUMMED_LOSS, **_data_file("dataset_mixer_list")},
        tables=_TABLES,
        moved={**_REMOVED, **{theirs: Moved(ours, f"DPO's name; SFT has `{ours}`") for ours, theirs in _PAIRS}},
        derived={
            "logging_steps": (
                1,
                "upstream's default prints no loss line at all (finetune.py::FlatArguments[Log the training])",
            )
        },
        partial=frozenset({"cache_dataset_only"}),
        instead={
            **_INSTEAD,
            "overwrite_cache": "`dataset_skip_cache: true` rebuilds the dataset cache",
            "max_train_samples": "give a number of samples in `dataset_mixer_list`: [name, 200]",
        },
    ),
    "dpo": _DPO,
    OLMO_CORE: replace(
        _DPO,
        script="open_instruct/dpo.py",
        stage="dpo",
        # it has the argument for Liger and reads it nowhere; recomputed is only what is compiled
        # (olmo_core_utils.py::build_ac_config[if activation_memory_budget]); GPUs may share each matrix product
        # (dpo.py::main[dp_world_size = world_size])
        names=replace(
            _DPO.names, liger=None, shared="tensor_parallel_degree", exact_output=None, recompute_needs="compile_model"
        ),
        settle=_settle_olmo_core,
        launcher="torchrun",
        loop="olmo_core",
        rehearsal={"attn_implementation": "torch", "compile_model": False, "wandb_entity": "none"},
        sharding="fsdp",
        packing="one-row",
        needs_process_group=False,
        # dpo.py::main[drop_last=True], data_loader.py::HFDataLoader._reshard[usable_size = total_batches #1]
        drops_last=True,
        # dpo.py::main[if args.cache_logprobs_only]: of the DPO scripts only this one ends after the reference
        ends_after={**_CACHES_DATA, "cache_logprobs_only": "reference pass"},
        unjudged="step[1-9]*",
        final_model="hf_model",  # dpo.py::_handle_post_training[hf_model_path = os.path.join]
        without_reference=(),  # dpo.py::main[train_module.reference_cache] computes a reference for simpo too
        models=(
            ("open_instruct.olmo_core_utils", "OLMO_MODEL_CONFIG_MAP"),
            ("olmo_core.nn.transformer.config", "TransformerConfig"),
        ),
        own_shapes=("open_instruct.olmo_core_hybrid", "LOCAL_TRANSFORMER_CONFIGS"),
        beside=(_DPO.script,),
        needs=("vllm", "backoff", "docker", "openenv-core"),  # data_loader.py imports what GRPO needs
        instead={
            **_INSTEAD,
            "overwrite_cache": "`skip_cache: true` rebuilds the dataset cache",
            "report_to": "this script reports to wandb only "
            "(olmo_core_utils.py::build_base_callbacks[if with_tracking])",
            "model_revision": "download the revision and name its folder",
            "max_train_samples": "give a number of samples in `mixer_list`: [name, 200]",
            "resume_from_checkpoint": "OLMo-core resumes from what the output folder holds",
            "gradient_checkpointing": "write `activation_memory_budget`",
        },
    ),
}


def output_folder(values: Values) -> Path | None:
    """`output_dir`, with `exp_name` below it unless `do_not_randomize_output_dir`
    (finetune.py::main[if not args.do_not_randomize_output_dir]).

    dpo.py has no such switch, and adds the seed (utils.py::setup_experiment_paths[args.exp_name = f],
    utils.py::setup_experiment_paths[args.output_dir = os.path.join]). A commit that has no such switch and is no
    dpo.py puts nothing below.
    """
    folder = Path(str(values["output_dir"]))
    if values.schema.key == OLMO_CORE:
        return folder / f"{values['exp_name']}__{values['seed']}"
    as_it_is = "do_not_randomize_output_dir"
    if as_it_is not in values.schema.fields or values[as_it_is]:
        return folder
    return folder / str(values["exp_name"])
