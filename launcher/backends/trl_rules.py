"""Rules for TRL: what its `__post_init__`s refuse first, then what parses and goes wrong.

Line numbers are those of the pinned pair; tests/test_upstream_facts.py holds them against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.backends import (
    trl_adapter_rules,
    trl_fsdp_rules,
    trl_loss_rules,
    trl_trainer_rules,
    trl_training_rules,
    trl_value_rules,
)
from launcher.backends.rule import Rule, say
from launcher.errors import Finding, brief
from launcher.schema import Values


def two_quantisations(values: Values) -> Iterator[Finding]:
    """trl/trainer/model_config.py:174."""
    if values["load_in_8bit"] and values["load_in_4bit"]:
        message = "`load_in_8bit` and `load_in_4bit` exclude each other"
        yield say("error", "parser", "two-precisions", "load_in_8bit", message)


def loss_weights(values: Values) -> Iterator[Finding]:
    """trl/trainer/dpo_config.py:360."""
    weights, losses = values["loss_weights"], values["loss_type"]
    count = len(losses) if isinstance(losses, list) else 1
    if weights is not None and len(weights) != count:
        yield say(
            "error", "parser", "loss-weights", "loss_weights",
            f"`loss_weights` has {len(weights)} entries for {count} in `loss_type`",
        )  # fmt: skip


def padding_multiple(values: Values) -> Iterator[Finding]:
    """trl/trainer/sft_config.py:307, dpo_config.py:382: other texts go through int(), and rows are then
    divided by it (trl/trainer/utils.py:171).
    """
    given = values["pad_to_multiple_of"]
    if not isinstance(given, str) or given == "auto" or given.lower() in {"none", "null"}:
        return
    try:
        if int(given) == 0:
            yield say(
                "error", "run", "out-of-range", "pad_to_multiple_of",
                "`pad_to_multiple_of: 0`: upstream divides by it", 'write `pad_to_multiple_of: "none"`',
            )  # fmt: skip
    except ValueError:
        yield say(
            "error", "parser", "pad-multiple", "pad_to_multiple_of",
            f"`pad_to_multiple_of` is a whole number or auto, not `{brief(given)}`",
        )  # fmt: skip


def no_model(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py:104 hands the trainer None."""
    if not values["model_name_or_path"]:
        yield say(
            "error", "run", "no-model", "model_name_or_path", "no model named",
            "add `model_name_or_path: <hub name or folder>`",
        )  # fmt: skip


def no_data(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py:100, dpo.py:98: one of both must be there."""
    if not values["dataset_name"] and not values.get("datasets"):
        yield say(
            "error", "run", "no-data", "dataset_name", "no data named",
            "add `dataset_name: <hub name or folder>`",
        )  # fmt: skip


def mixture_by_flag(values: Values) -> Iterator[Finding]:
    """trl/scripts/utils.py:121: only a YAML file can give mappings; a word becomes a path."""
    if any(str(word).startswith("{") for word in values.get("datasets") or ()):
        yield say(
            "error", "run", "datasets-by-flag", "datasets",
            "`datasets` cannot be handed over as flags: each mapping would be read as a path",
            "write `dataset_name`",
        )  # fmt: skip


def liger_lora(values: Values) -> Iterator[Finding]:
    """Measured: 29.2 s against 15.2 s for the same steps (Qwen2.5-7B, one GPU)."""
    if values["use_liger_kernel"] and values["use_peft"]:
        yield say(
            "warning", "run", "liger-with-lora", "use_liger_kernel",
            "Liger on a LoRA model was measured at half the speed", "write `use_liger_kernel: false`",
        )  # fmt: skip


_SHARED: tuple[Rule, ...] = (
    *trl_training_rules.RULES, *trl_fsdp_rules.RULES, *trl_value_rules.RULES,
    *trl_adapter_rules.RULES, two_quantisations, padding_multiple, no_model, no_data,
    mixture_by_flag, liger_lora,
)  # fmt: skip

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_SHARED, *trl_trainer_rules.RULES["sft"]),
    "dpo": (*_SHARED, loss_weights, *trl_trainer_rules.RULES["dpo"], *trl_loss_rules.RULES),
}  # fmt: skip
