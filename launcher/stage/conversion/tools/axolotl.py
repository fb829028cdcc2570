"""Axolotl's files (axolotl/utils/schemas/config.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.stage.conversion import data_sets, names, templates
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import SourceSetting, as_list, is_off, is_on, value_or

_VARIABLE = "set WANDB_PROJECT and WANDB_ENTITY where it runs"
_OF_MODEL = "transformers tells it from the model"
_REASONS: Mapping[str, str] = {
    "wandb_entity": _VARIABLE,
    "wandb_log_model": "TRL uploads no model to W&B",
    "pad_to_sequence_len": "TRL pads to the longest row of a batch",
    "pad_to_sequence_length": "TRL pads to the longest row of a batch",
    "test_datasets": data_sets.EVALUATES_ON_A_PART,
    "group_by_length": "write `train_sampling_strategy: group_by_length`",
}
_UNNEEDED: Mapping[str, str] = {
    "wandb_watch": "launch watches gradients itself",
    "fsdp_version": "`deepspeed:` covers it",
    "model_type": _OF_MODEL,
    "tokenizer_type": _OF_MODEL,
    "is_llama_derived_model": _OF_MODEL,
    "is_mistral_derived_model": _OF_MODEL,
    "strict": "launch refuses every key that it does not know",
    "dataset_prepared_path": "launch keeps prepared rows by content",
    "debug": "`launch preview` shows the rows",
    "liger_rope": "`use_liger_kernel` applies Liger's kernels",
    "liger_rms_norm": "`use_liger_kernel` applies Liger's kernels",
    "liger_glu_activation": "`use_liger_kernel` applies Liger's kernels",
    "liger_layer_norm": "`use_liger_kernel` applies Liger's kernels",
    "liger_fused_linear_cross_entropy": "`use_liger_kernel` applies Liger's kernels",
}
_DEFAULTS: Mapping[str, Any] = {
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 1,
    "max_length": 512,
    "gradient_checkpointing": False,
}
_SWITCHES: Mapping[str, tuple[str, Any]] = {
    "sdp_attention": ("attn_implementation", "sdpa"),
    "eager_attention": ("attn_implementation", "eager"),
    "lora_target_linear": ("lora_target_modules", ["all-linear"]),
    "cut_cross_entropy": ("loss_type", "chunked_nll"),
}


def convert(ledger: ConversionLedger) -> None:
    """Settle the settings of a file of Axolotl's."""
    _carry_data(ledger)
    _carry_adapter(ledger)
    _carry_precision(ledger)
    for key, (target, value) in _SWITCHES.items():
        setting = ledger.take_on(key)
        if setting is None or target not in ledger.schema.fields:
            continue
        if ledger.refusal(target, value) is None:
            ledger.carry(setting, target, value)
    _carry_hub(ledger)
    _carry_plugins(ledger)
    _carry_checkpoints(ledger)
    _carry_tokens(ledger)
    _carry_recomputation(ledger)
    templates.settle(ledger)
    names.carry_warmup(ledger)
    data_sets.settle_evaluation(ledger)
    names.carry_rest(ledger, names.AXOLOTL, _REASONS, _UNNEEDED)
    ledger.draft.add_defaults(_DEFAULTS)


def _carry_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("datasets")
    if setting is None:
        return
    mixture = SourceData(setting=setting)
    data_sets.read_test_size(ledger, mixture, "val_set_size")
    entries: list[Mapping[str, Any]] = []
    for entry in as_list(setting.value):
        if not isinstance(entry, Mapping):
            entry = {"path": entry}
        entries.append(entry)
        mixture.sets.append(_build_data_set(entry, ledger))
    data_sets.carry_sets(ledger, mixture)
    _require_forms(ledger, setting, entries)
    _carry_mask(ledger, setting, entries)


def _build_data_set(entry: Mapping[str, Any], ledger: ConversionLedger) -> DataSet:
    path = str(entry.get("path") or "")
    if data_sets.is_file(path):
        path = data_sets.find_local_path(path, ledger.recipe)
    return DataSet(
        path=path, name=entry.get("name"), split=entry.get("split"), files=entry.get("data_files")
    )


_LOST_KEYS = ("shards", "preprocess_shards", "conversation", "roles_to_train")
_READ = frozenset({"", "chat_template", "completion", "pretrain"})


def _require_forms(
    ledger: ConversionLedger, setting: SourceSetting, entries: list[Mapping[str, Any]]
) -> None:
    """Say which rows have to be converted: TRL reads fewer forms."""
    unread = []
    for entry in entries:
        kind = entry.get("type") or ""
        if isinstance(kind, Mapping):
            kind = "of its own"
        column = entry.get("field_messages")
        if str(kind) not in _READ or column not in (None, "messages"):
            unread.append(f"{entry.get('path')} ({kind or column})")
    if unread:
        needs = data_sets.name_needed_columns(ledger)
        ledger.check(setting, f"`type` is not applied to {', '.join(unread)}: rows need {needs}")
    for entry in entries:
        lost = [f"`{key}`" for key in _LOST_KEYS if entry.get(key)]
        if lost:
            ledger.check(setting, f"{', '.join(lost)} of {entry.get('path')}: TRL has no such key")


def _carry_mask(
    ledger: ConversionLedger, setting: SourceSetting, entries: list[Mapping[str, Any]]
) -> None:
    """`train_on_inputs` is off there: the loss counts answers alone."""
    whole = ledger.take("train_on_inputs")
    if "assistant_only_loss" not in ledger.schema.fields:
        if whole is not None:
            ledger.leave(whole, "DPO's loss counts answers alone", matters=False)
        return
    kinds = {str(entry.get("type") or "") for entry in entries}
    if whole is not None and is_on(whole.value):
        ledger.carry(whole, "completion_only_loss", value=False)
    elif kinds - {"completion", "pretrain", ""}:
        data_sets.mask_questions(
            ledger, whole or setting, "`train_on_inputs` is off: answers alone"
        )
    elif whole is not None:
        ledger.leave(whole, "rows of one text have no question", matters=False)
    for entry in entries:
        if str(entry.get("type")) == "completion":
            ledger.carry(setting, "dataset_text_field", entry.get("field", "text"))
            break


def _carry_adapter(ledger: ConversionLedger) -> None:
    setting = ledger.take("adapter")
    if setting is None:
        return
    kind = str(setting.value)
    if kind not in ("lora", "qlora"):
        reason = f"`{kind}`: TRL trains all weights, or LoRA"
        ledger.leave(setting, reason, matters=not is_off(setting.value))
        return
    ledger.carry(setting, "use_peft", value=True)
    dropout = ledger.take("lora_dropout")
    ledger.carry(dropout or setting, "lora_dropout", value_or(dropout, None) or 0.0)
    if kind == "qlora":
        ledger.carry(setting, "load_in_4bit", value=True)
        ledger.carry(setting, "use_bnb_nested_quant", value=True)
        four = ledger.take("load_in_4bit")
        if four is not None:
            ledger.point(four, "load_in_4bit")


def _carry_precision(ledger: ConversionLedger) -> None:
    bf16 = ledger.take("bf16")
    if bf16 is not None:
        is_wanted = is_on(bf16.value) or bf16.value in ("auto", "full")
        if is_wanted:
            ledger.carry(bf16, "bf16", value=True)
            ledger.carry(bf16, "dtype", "bfloat16")
    half = ledger.take("fp16")
    if half is not None and half.value == "auto":
        ledger.leave(half, "bf16 is used", matters=False)


def _carry_hub(ledger: ConversionLedger) -> None:
    setting = ledger.take("hub_model_id")
    if setting is not None and not is_off(setting.value):
        ledger.carry(setting, "hub_model_id", setting.value)
        ledger.carry(setting, "push_to_hub", value=True)
    project = ledger.take("wandb_project")
    if project is not None and not is_off(project.value):
        ledger.carry(project, "report_to", "wandb")
        ledger.check(project, _VARIABLE)


def _carry_plugins(ledger: ConversionLedger) -> None:
    setting = ledger.take("plugins")
    if setting is None:
        return
    others = []
    for plugin in as_list(setting.value):
        if "liger" in str(plugin).lower():
            ledger.carry(setting, "use_liger_kernel", value=True)
        else:
            others.append(str(plugin))
    if others and setting.written in ledger.carried:
        ledger.check(setting, f"{', '.join(others)}: TRL has no such plugin")
    elif others:
        ledger.leave(setting, "TRL has no such plugin")


def _carry_checkpoints(ledger: ConversionLedger) -> None:
    """Saves and evaluations by epoch: steps below 1 are a share of all.

    transformers/training_args.py
    """
    saves = ledger.take("saves_per_epoch")
    if saves is not None and saves.value == 0:
        ledger.carry(saves, "save_strategy", "no")
    elif saves is not None:
        _carry_by_epoch(ledger, saves, "save")
    evaluations = ledger.take("evals_per_epoch")
    if evaluations is not None and "test_split_size" in ledger.draft.rows and evaluations.value:
        _carry_by_epoch(ledger, evaluations, "eval")


def _carry_by_epoch(ledger: ConversionLedger, setting: SourceSetting, prefix: str) -> None:
    epochs = ledger.recipe.value("num_epochs") or _DEFAULTS["num_train_epochs"]
    strategy = f"{prefix}_strategy"
    times = setting.value
    if times == 1:
        ledger.carry(setting, strategy, "epoch")
    elif isinstance(times, int) and isinstance(epochs, int | float):
        ledger.carry(setting, strategy, "steps")
        share = round(1 / (times * epochs), 6)
        note = f"{setting.key}: a share of all steps"
        ledger.carry(setting, f"{prefix}_steps", share, note=note)


def _carry_tokens(ledger: ConversionLedger) -> None:
    setting = ledger.take("special_tokens")
    if setting is None or not isinstance(setting.value, Mapping):
        return
    lost = []
    for name, token in setting.value.items():
        if name in ledger.schema.fields:
            ledger.carry(setting, name, token)
        elif token:
            lost.append(f"`{name}: {token}`")
    if lost and setting.written in ledger.carried:
        ledger.check(setting, f"{', '.join(lost)}: set it in the tokenizer's files")
    elif setting.written not in ledger.carried:
        ledger.leave(setting, "set them in the tokenizer's files", matters=bool(lost))


def _carry_recomputation(ledger: ConversionLedger) -> None:
    """`gradient_checkpointing` may say `offload` there."""
    setting = ledger.take("gradient_checkpointing")
    if setting is not None and str(setting.value).startswith("offload"):
        ledger.carry(setting, "gradient_checkpointing", value=True)
        ledger.carry(setting, "activation_offloading", value=True)
