"""LLaMA-Factory's files and command lines (llamafactory/hparams, data/dataset_info.json)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.files import read_bytes
from launcher.stage.conversion import data_sets, names, templates
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import (
    SourceSetting,
    find_near,
    is_off,
    is_on,
    split_words,
    value_or,
)

_SETS = "TRL's script joins the sets whole; slices in `datasets` weigh them"
_STARTS = "launch starts the processes itself"
_REASONS: Mapping[str, str] = {
    "template": templates.BY_NAME,
    "mix_strategy": _SETS,
    "interleave_probs": _SETS,
    "loraplus_lr_ratio": "TRL has no LoRA+",
}
_UNNEEDED: Mapping[str, str] = {
    "do_train": "a stage trains",
    "overwrite_cache": "launch knows data by content",
    "overwrite_output_dir": "launch decides whether a run continues: `--fresh` starts over",
    "plot_loss": "`launch report` draws the loss",
    "tokenized_path": "launch keeps prepared rows by content",
    "include_num_input_tokens_seen": "launch counts tokens itself",
    "ray_run_name": _STARTS,
    "ray_storage_path": _STARTS,
    "ray_num_workers": _STARTS,
    "resources_per_worker": _STARTS,
    "placement_strategy": _STARTS,
}
_DEFAULTS: Mapping[str, Any] = {"learning_rate": 5e-5, "max_length": 2048}
_MOST_BYTES = 2**22


def convert(ledger: ConversionLedger) -> None:
    """Settle the settings of a file or command line of LLaMA-Factory."""
    _carry_data(ledger)
    _carry_method(ledger)
    _carry_quantization(ledger)
    _carry_attention(ledger)
    packing = ledger.take_on("neat_packing")
    if packing is not None and "packing" in ledger.schema.fields:
        ledger.carry(packing, "packing", value=True)
    pure = ledger.take_on("pure_bf16")
    if pure is not None:
        ledger.carry(pure, "dtype", "bfloat16")
    templates.settle(ledger)
    names.carry_warmup(ledger)
    data_sets.settle_evaluation(ledger)
    names.carry_rest(ledger, names.LLAMA_FACTORY, _REASONS, _UNNEEDED)
    ledger.draft.add_defaults(_DEFAULTS)


def _carry_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("dataset", "train_dataset")
    if setting is None:
        return
    folder = ledger.take("dataset_dir")
    place = str(value_or(folder, "data"))
    info = _read_dataset_info(ledger, place)
    mixture = SourceData(setting=setting)
    data_sets.read_test_size(ledger, mixture, "val_size")
    unknown: list[str] = []
    forms: set[str] = set()
    for name in split_words(setting.value):
        entry = info.get(name)
        if isinstance(entry, Mapping):
            data, form = _build_data_set(entry, place, ledger)
            forms.add(form)
        else:
            data = DataSet(path=name)
            if "/" not in name or name.endswith((".yaml", ".yml")):
                unknown.append(name)
        mixture.sets.append(data)
    data_sets.limit_rows(ledger, mixture, "max_samples")
    data_sets.carry_sets(ledger, mixture)
    if folder is not None:
        reason = "no dataset_info.json is in it here"
        if info:
            reason = "the paths of `datasets` hold it"
        ledger.leave(folder, reason, matters=False)
    if unknown:
        noun = "a name" if len(unknown) == 1 else "names"
        origin = f"{noun} of dataset_info.json, which is not here"
        advice = f"{', '.join(unknown)}: {origin}: write the hub's name, or a file"
        ledger.check(setting, advice)
    elif info and not ledger.kinds:
        needs = data_sets.name_needed_columns(ledger)
        rows_there = f"rows of the form {' and '.join(sorted(forms))}"
        advice = f"{rows_there}: `launch data convert` makes rows with {needs}"
        ledger.check(setting, advice)
    _carry_mask(ledger, setting)
    evaluation = ledger.take("eval_dataset")
    if evaluation is not None:
        ledger.leave(evaluation, data_sets.EVALUATES_ON_A_PART)


def _read_dataset_info(ledger: ConversionLedger, folder: str) -> Mapping[str, Any]:
    """The sets that dataset_info.json describes; empty where it is not here."""
    for path in (f"{folder}/dataset_info.json", "dataset_info.json"):
        file = find_near(path, ledger.recipe.path)
        if file is None:
            continue
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(read_bytes(file, _MOST_BYTES))
            if isinstance(content, dict):
                return content
    return {}


def _build_data_set(
    entry: Mapping[str, Any], folder: str, ledger: ConversionLedger
) -> tuple[DataSet, str]:
    """A set of dataset_info.json, and the form of its rows."""
    form = str(entry.get("formatting") or "alpaca")
    split = entry.get("split")
    for key in ("hf_hub_url", "ms_hub_url", "script_url"):
        if entry.get(key):
            data = DataSet(path=str(entry[key]), name=entry.get("subset"), split=split)
            return data, form
    name = str(entry.get("file_name") or "")
    path = data_sets.find_local_path(str(Path(folder) / name), ledger.recipe)
    return DataSet(path=path, split=split), form


def _carry_mask(ledger: ConversionLedger, setting: SourceSetting) -> None:
    """LLaMA-Factory's loss counts answers alone, unless `train_on_prompt`."""
    whole = ledger.take("train_on_prompt")
    if "assistant_only_loss" not in ledger.schema.fields:
        if whole is not None:
            ledger.leave(whole, "DPO's loss counts answers alone", matters=False)
    elif whole is not None and is_on(whole.value):
        ledger.carry(whole, "completion_only_loss", value=False)
    else:
        note = "LLaMA-Factory's loss counts answers alone"
        data_sets.mask_questions(ledger, whole or setting, note)


def _carry_method(ledger: ConversionLedger) -> None:
    """LoRA is the default there, with defaults of its own."""
    setting = ledger.take("finetuning_type", "peft_config")
    if setting is not None and isinstance(setting.value, Mapping):
        _carry_method_of_mapping(ledger, setting)
        return
    about = setting or ledger.take("lora_rank", "lora_target", "dataset", "model_name_or_path")
    if about is None or not names.trains_lora(ledger, setting):
        return
    # `about` may be the rank, and nothing takes a setting that is carried
    rank_setting = ledger.take("lora_rank")
    rank = value_or(rank_setting, 8)
    ledger.carry(about, "use_peft", value=True)
    ledger.carry(rank_setting or about, "lora_r", rank)
    alpha = ledger.take("lora_alpha")
    if alpha is not None and not is_off(alpha.value):
        ledger.carry(alpha, "lora_alpha", alpha.value)
    elif isinstance(rank, int):
        ledger.carry(about, "lora_alpha", 2 * rank, note="the default there: twice the rank")
    dropout = ledger.take("lora_dropout")
    ledger.carry(dropout or about, "lora_dropout", value_or(dropout, 0.0))
    target = ledger.take("lora_target")
    modules = ["all-linear"]
    if target is not None:
        modules = names.spell_for_trl("lora_target_modules", str(target.value))
    ledger.carry(target or about, "lora_target_modules", modules)
    ledger.carry(about, "dtype", "bfloat16", note="the base model's type there")


_LORA_NUMBERS = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def _carry_method_of_mapping(ledger: ConversionLedger, setting: SourceSetting) -> None:
    """`peft_config: {name: lora, r: ...}` of version 1's files."""
    content = setting.value
    if str(content.get("name", "lora")) != "lora":
        ledger.leave(setting, f"`{content.get('name')}`: TRL trains all weights, or LoRA")
        return
    ledger.carry(setting, "use_peft", value=True)
    for key, target in _LORA_NUMBERS.items():
        if isinstance(content.get(key), int | float):
            ledger.carry(setting, target, content[key])
    if content.get("target_modules"):
        modules = names.spell_for_trl("lora_target_modules", content["target_modules"])
        ledger.carry(setting, "lora_target_modules", modules)


def _carry_quantization(ledger: ConversionLedger) -> None:
    bits = ledger.take("quantization_bit")
    if bits is None or bits.value not in (4, 8):
        return
    ledger.carry(bits, f"load_in_{bits.value}bit", value=True)
    double = ledger.take("double_quantization")
    if bits.value == 4 and (double is None or is_on(double.value)):
        ledger.carry(double or bits, "use_bnb_nested_quant", value=True)
    method = ledger.take("quantization_method")
    if method is not None and str(method.value) in ("bnb", "bitsandbytes"):
        ledger.point(method, f"load_in_{bits.value}bit")


def _carry_attention(ledger: ConversionLedger) -> None:
    setting = ledger.take("flash_attn")
    if setting is None:
        return
    if str(setting.value) in ("fa2", "fa3", "sdpa", "disabled"):
        value = names.spell_for_trl("attn_implementation", setting.value)
        ledger.carry(setting, "attn_implementation", value)
    else:
        ledger.leave(setting, "the model's default attention", matters=False)
