"""allenai/open-instruct at the pin, as data: what all of its SFT and DPO scripts have in common.

Line numbers are those of the pin; tests/agreement/test_upstream_facts.py holds them against a
checkout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from launcher.upstream.entry import Checkpoints, Entry, Release
from launcher.upstream.schema import Values
from launcher.upstream.scripts import dpo, dpo_tune_cache, finetune, olmo_core_finetune

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


def _list_releases() -> tuple[Release, ...]:
    releases = []
    for commit in dict.fromkeys((PIN, *KEPT)):
        date = KEPT.get(commit, "")
        releases.append(Release(version=commit, snapshot=f"{NAME}_{commit[:12]}.json", date=date))
    return tuple(releases)


KNOWN: tuple[Release, ...] = _list_releases()
TAKES_NONE = False
# an enum of OLMo-core's that arguments of commits after 45901fd0 have as their type
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "olmo_core.nn.lm_head.LMLossImplementation": ("default", "fused_linear")
}
# finetune.py::[import deepspeed] and what those modules import in turn
NEEDS: tuple[str, ...] = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "deepspeed",
        "peft",
        "ai2-olmo-core",
        "absl-py",
        "bettermap",
    ),
    *("beaker-py", "immutabledict", "langdetect", "litellm", "nltk", "ray", "wandb"),
)
# with CUDA and no such package the detection of commits before eb9c5ff24 raises; later ones take
# torch's attention
# (model_utils.py::detect_attn_implementation[transformers.utils.is_flash_attn_2_available])
GPU_NEEDS: tuple[str, ...] = ("flash-attn",)
EXTRA = "open-instruct"
# importing litellm would otherwise ask the network for model prices, 5 s where there is none
ENVIRON: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
CHECKPOINTS: Checkpoints = "accelerate"
DATA_CACHE: Literal["own", "datasets"] = "own"
MODEL_ARGUMENTS: tuple[str, ...] = ("model_name_or_path", "tokenizer_name_or_path")
ONE_GPU = False
_NO_SERVICES = dict.fromkeys(
    ("push_to_hub", "try_launch_beaker_eval_jobs", "try_auto_save_to_beaker"), False
)
SHORT_RUN: Mapping[str, Any] = {
    **_NO_SERVICES,
    **dict.fromkeys(
        ("send_slack_alerts", "profiling", "cache_dataset_only", "cache_logprobs_only"), False
    ),
    **dict.fromkeys(("resume_from_checkpoint", "ephemeral_save_interval")),
    **dict.fromkeys(
        ("dataset_config_hash", "config_hash")
    ),  # the slice would be kept under the name of the whole
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

STAGES: dict[str, Entry] = {
    "sft": finetune.SCRIPT,
    "dpo": dpo_tune_cache.SCRIPT,
    "dpo_olmo_core": dpo.SCRIPT,
    "sft_olmo_core": olmo_core_finetune.SCRIPT,
}


def output_folder(values: Values) -> Path | None:
    return STAGES[values.schema.key].output(values)
