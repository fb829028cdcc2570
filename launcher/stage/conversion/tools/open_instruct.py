"""open-instruct's scripts and files, of this and earlier commits -> a stage for open-instruct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.stage.conversion import data_sets, local_rows
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import SourceSetting, is_off, is_on

_UNNEEDED: Mapping[str, str] = {
    "dataset_mix_dir": "open-instruct keeps no mixed file; launch knows data by content",
    "use_flash_attn": "removed upstream: attention is detected from what is installed",
    "overwrite_output_dir": "launch decides whether a run continues: `--fresh` starts over",
    "do_train": "a stage trains",
}
_NAMES: Mapping[str, str] = {
    "tokenizer_name": "tokenizer_name_or_path",
    "hf_repo_name": "hf_repo_id",
    "lora_r": "lora_rank",
}
_DPO_NAMES: Mapping[str, str] = {
    "num_train_epochs": "num_epochs",
    "dataset_mixer_list": "mixer_list",
    "dataset_mixer_list_splits": "mixer_list_splits",
}


def convert(ledger: ConversionLedger) -> None:
    """Settle the settings of open-instruct's own scripts."""
    names = dict(_NAMES)
    if "mixer_list" in ledger.schema.fields:
        names |= _DPO_NAMES
    _carry_data(ledger)
    _carry_tokenizer(ledger)
    _carry_report(ledger)
    _carry_recomputation(ledger)
    for setting in ledger.recipe.settings:
        ledger.carry_by_name(setting, names, {}, _UNNEEDED)
    for key in ("push_to_hub", "try_launch_beaker_eval_jobs"):
        if key in ledger.schema.fields and ledger.recipe.get(key) is None:
            note = "launch's choice: upstream's default uploads"
            ledger.draft.add_defaults({key: False}, note=note)


def _carry_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("dataset_mixer_list", "mixer_list")
    target = ledger.entry.names.data
    if setting is not None:
        value = setting.value
        if isinstance(value, str):
            value = value.split()
        ledger.carry(setting, target, value)
    for key in ("dataset_mixer", "dataset_name", "train_file"):
        other = ledger.take(key)
        if other is None or is_off(other.value):
            continue
        if target in ledger.draft.rows:
            ledger.leave(other, f"`{target}` names the data")
            continue
        ledger.carry(other, target, _list_mixer(other, ledger))


def _list_mixer(setting: SourceSetting, ledger: ConversionLedger) -> list[Any]:
    if isinstance(setting.value, Mapping):
        listed: list[Any] = []
        for name, amount in setting.value.items():
            if amount == 1:
                # the whole set there, and one row as a word of the list
                amount = 1.0
            listed += [str(name), amount]
        return listed
    path = str(setting.value)
    if data_sets.is_file(path):
        path = data_sets.find_local_path(path, ledger.recipe)
        path = local_rows.find_readable(path, setting, ledger)
    return [path, 1.0]


def _carry_tokenizer(ledger: ConversionLedger) -> None:
    slow = ledger.take("use_slow_tokenizer")
    if slow is None or "use_fast" not in ledger.schema.fields:
        return
    if is_on(slow.value):
        ledger.carry(slow, "use_fast", value=False)
    else:
        ledger.leave(slow, "off: the fast tokenizer is the default", matters=False)


def _carry_recomputation(ledger: ConversionLedger) -> None:
    """DPO recomputes activations if `activation_memory_budget` is below 1.

    open_instruct/dpo_tune_cache.py::main[elif args.activation_memory_budget]
    """
    setting = ledger.take("gradient_checkpointing")
    target = "activation_memory_budget"
    fields = ledger.schema.fields
    is_older = "gradient_checkpointing" not in fields and target in fields
    if setting is None or not is_older or ledger.recipe.get(target) is not None:
        return
    if is_on(setting.value):
        ledger.carry(setting, target, 0.5, note="gradient_checkpointing: below 1 it recomputes")
    else:
        ledger.leave(setting, f"`{target}` is 1 by default", matters=False)


def _carry_report(ledger: ConversionLedger) -> None:
    """`report_to` may be a list of one there."""
    setting = ledger.take("report_to")
    if setting is None or "report_to" not in ledger.schema.fields:
        return
    value = setting.value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    tracking = ledger.take_on("with_tracking")
    if value in ("wandb", "all"):
        ledger.carry(setting, "report_to", value)
    elif tracking is not None:
        alone = "`with_tracking` asks for wandb's tracker alone (open_instruct/finetune.py)"
        ledger.leave(setting, alone)
        none = f"`report_to: {value}` is no tracker of open-instruct's"
        ledger.leave(tracking, f"{none}: launch keeps the curves itself")
