"""TRL's own SFT and DPO scripts (`trl/scripts`), for laptops, CI and LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from launcher.upstream.entry import Checkpoints, Entry, Release
from launcher.upstream.schema import Values
from launcher.upstream.scripts import trl_dpo, trl_sft

NAME = "trl"
PACKAGES: tuple[str, ...] = ("trl", "transformers")
CHECKOUT = False
PIN = "trl 1.16.0, transformers 5.17.0"
BASELINE = PIN
KNOWN: tuple[Release, ...] = (Release(version=PIN, snapshot="trl.json"),)
TAKES_NONE = True
NEEDS: tuple[str, ...] = ("torch", "transformers", "trl", "accelerate", "datasets")
GPU_NEEDS: tuple[str, ...] = ()
EXTRA = "trl"
ENVIRON: Mapping[str, str] = {}
CHECKPOINTS: Checkpoints = "transformers"
DATA_CACHE: Literal["own", "datasets"] = "datasets"
MODEL_ARGUMENTS: tuple[str, ...] = ("model_name_or_path",)
ONE_GPU = True
SHORT_RUN: Mapping[str, Any] = {
    "push_to_hub": False,
    **dict.fromkeys(("save_strategy", "eval_strategy"), "no"),
    **dict.fromkeys(("do_eval", "eval_on_start", "load_best_model_at_end"), False),
    "resume_from_checkpoint": None,
    "logging_strategy": "steps",
    "logging_first_step": False,
    # what is read while evaluating alone
    **dict.fromkeys(("metric_for_best_model", "greater_is_better", "per_device_eval_batch_size")),
    "report_to": "none",
}
REHEARSAL: Mapping[str, Any] = {
    **dict.fromkeys(("push_to_hub", "trust_remote_code", "resume_from_checkpoint"), None),
    "use_cpu": True,
    "report_to": "none",
}
# transformers/training_args.py::[trainer_log_levels] builds it by calls,
# transformers/utils/logging.py::[log_levels =] holds the names
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "trainer_log_levels.keys()": (
        *("detail", "debug", "info", "warning"),
        *("error", "critical", "passive"),
    )
}

STAGES: dict[str, Entry] = {"sft": trl_sft.SCRIPT, "dpo": trl_dpo.SCRIPT}


def output_folder(values: Values) -> Path | None:
    """Where it is not given, transformers writes to `trainer_output`."""
    return STAGES[values.schema.key].output(values)
