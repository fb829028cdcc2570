"""torchtune's recipes (recipes/configs) and `tune run`: its components tell model and data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.stage.conversion import data_sets, names
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import PLACEHOLDER, ConversionLedger
from launcher.stage.conversion.settings import Recipe, SourceSetting, is_off, is_on

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# torchtune/datasets: what its builders load
_SETS: Mapping[str, tuple[str, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", False),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", False),
    "grammar_dataset": ("liweili/c4_200m", False),
    "samsum_dataset": ("Samsung/samsum", False),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", False),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", True),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", True),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", False),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", False),
}
_SECTIONS = (
    "tokenizer",
    "model",
    "checkpointer",
    "dataset",
    "dataset_val",
    "optimizer",
    "lr_scheduler",
    "loss",
)
_UNNEEDED: Mapping[str, str] = {
    "profiler": "launch measures speed and memory itself",
    "metric_logger": "write `report_to: wandb`, trackio or mlflow",
    "device": "launch uses GPUs; `--gpus 0` is the CPU",
    "shuffle": "TRL shuffles; `shuffle_dataset` is about whole sets",
    "resume_from_checkpoint": "the same command continues a run",
    "log_peak_memory_stats": "launch reports the peak of memory",
    "log_level": "launch keeps the whole log",
    "save_adapter_weights_only": "TRL saves the adapter alone with LoRA",
    "model": "`model_name_or_path` names the architecture",
    "tokenizer": "the tokenizer lies with the model",
    "tokenizer.path": "the tokenizer lies with the model",
    "tokenizer.merges_file": "the tokenizer lies with the model",
    "checkpointer.checkpoint_files": "transformers finds the files of the folder",
    "checkpointer.model_type": "transformers tells it from the model",
    "checkpointer.recipe_checkpoint": "the same command continues a run",
    "checkpointer.output_dir": "`output_dir` holds it",
    "checkpointer": "transformers loads the model",
    "ref_checkpointer": "TRL takes the model itself for the reference",
    "optimizer.fused": "`optim` names a fused optimizer",
    "model.apply_lora_to_output": "`lora_target_modules` names the layers",
    "loss": "TRL's own loss",
    "lr_scheduler": "`lr_scheduler_type` names it",
    "optimizer": "`optim` names it",
    "dataset": "`dataset_name` names it",
    **dict.fromkeys(
        ("dataset_val", "dataset_val.source", "dataset_val.packed"),
        "TRL's script evaluates on a split or a part of the training set alone",
    ),
}
_REASONS: Mapping[str, str] = {
    "max_steps_per_epoch": "write `max_steps`",
    "dataset_val.split": "TRL's script holds back a part by `test_split_size`, or a split by name",
    "tokenizer.prompt_template": "TRL takes the template of the tokenizer",
}
_OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdamW": "paged_adamw_32bit",
}
_NOT_APPLIED = "is not applied: `launch preview` shows what TRL reads"
_LORA_LAYERS = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")


def flatten(recipe: Recipe) -> None:
    """Give the keys of torchtune's sections dotted names, and references their values."""
    flat: list[SourceSetting] = []
    for setting in recipe.settings:
        if setting.key in _SECTIONS and isinstance(setting.value, Mapping):
            for name, value in setting.value.items():
                key = setting.key
                if name != "_component_":
                    key = f"{key}.{name}"
                flat.append(_change_setting(setting, key, value))
        else:
            flat.append(setting)
    values = {setting.key: setting.value for setting in flat}
    recipe.settings = [
        _change_setting(setting, setting.key, _resolve_references(setting.value, values))
        for setting in flat
    ]


def _change_setting(setting: SourceSetting, key: str, value: Any) -> SourceSetting:
    """A setting under another key; a flag stays as it was written."""
    written = key
    if setting.written.startswith("-"):
        written = setting.written
    return replace(setting, key=key, value=value, written=written)


def _resolve_references(value: Any, values: Mapping[str, Any]) -> Any:
    for _ in range(5):
        if not isinstance(value, str):
            return value
        match = _REFERENCE.fullmatch(value)
        if match is not None and match[1] in values:
            value = values[match[1]]
            continue
        value = _REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)
    return value


def convert(ledger: ConversionLedger) -> None:
    """Settle the settings of a recipe."""
    _carry_model(ledger)
    _carry_data(ledger)
    _carry_lora(ledger)
    _carry_optimizer(ledger)
    _carry_precision(ledger)
    limit = ledger.take("max_steps_per_epoch")
    epochs = ledger.recipe.value("epochs") or 1
    if limit is not None and isinstance(limit.value, int) and isinstance(epochs, int):
        ledger.carry(limit, "max_steps", limit.value * epochs)
    logger = ledger.take("metric_logger")
    if logger is not None and "WandB" in str(logger.value):
        ledger.carry(logger, "report_to", "wandb")
    data_sets.settle_evaluation(ledger)
    if not {"test_split_size", "dataset_test_split"} & ledger.draft.rows.keys():
        for key in ("run_val_every_n_steps", "batch_size_val"):
            setting = ledger.take(key)
            if setting is not None:
                matters = key == "run_val_every_n_steps" and not is_off(setting.value)
                ledger.leave(setting, "no rows are set aside", matters=matters)
    names.carry_rest(ledger, names.TORCHTUNE, _REASONS, _UNNEEDED)


def _carry_model(ledger: ConversionLedger) -> None:
    folder = ledger.take("checkpointer.checkpoint_dir", "checkpoint_dir", "base_model_path")
    if folder is not None:
        ledger.carry(folder, "model_name_or_path", str(folder.value).rstrip("/"))
        needs = "transformers needs its config.json and safetensors"
        ledger.check(folder, f"a folder that `tune download` filled: {needs}")
    for key in ("model", "tokenizer"):
        setting = ledger.take(key)
        if setting is not None and folder is not None:
            ledger.point(setting, "model_name_or_path")


def _carry_data(ledger: ConversionLedger) -> None:
    component = ledger.take("dataset")
    if component is None:
        return
    if isinstance(component.value, list):
        _carry_several(ledger, component)
        return
    data_sets.carry_sets(ledger, _read_mixture(ledger, component))
    _carry_mask(ledger, component)


def _read_mixture(ledger: ConversionLedger, component: SourceSetting) -> SourceData:
    builder = str(component.value).rpartition(".")[2]
    mixture = SourceData(setting=component)
    path = _SETS.get(builder, ("", False))[0]
    values: dict[str, Any] = {}
    for key in ("source", "split", "data_files", "name", "subset"):
        setting = ledger.take(f"dataset.{key}")
        if setting is not None and not is_off(setting.value):
            mixture.also.append(setting)
            values[key] = setting.value
    path = str(values.get("source", path))
    if not path:
        path = f"{PLACEHOLDER}_{builder}"
        ledger.check(component, f"write the data set: launch does not know what `{builder}` loads")
    if builder in _SETS:
        needs = "`messages`, or `prompt` and `completion`"
        if _SETS[builder][1]:
            needs = "`chosen` and `rejected`"
        ledger.check(component, f"`{builder}` makes rows of {path}: TRL needs rows with {needs}")
    elif not path.startswith(PLACEHOLDER):
        ledger.check(component, f"how `{builder}` makes rows {_NOT_APPLIED}")
    data = DataSet(
        path=path,
        split=values.get("split"),
        files=values.get("data_files"),
        name=values.get("subset", values.get("name")),
    )
    mixture.sets.append(data)
    return mixture


def _carry_several(ledger: ConversionLedger, component: SourceSetting) -> None:
    """A list of components, which torchtune joins."""
    mixture = SourceData(setting=component)
    for entry in component.value:
        content: Mapping[str, Any] = {}
        if isinstance(entry, Mapping):
            content = entry
        builder = str(content.get("_component_", "")).rpartition(".")[2]
        default, _ = _SETS.get(builder, (f"{PLACEHOLDER}_{builder}", False))
        data = DataSet(
            path=str(content.get("source") or default),
            split=content.get("split"),
            files=content.get("data_files"),
        )
        mixture.sets.append(data)
    data_sets.carry_sets(ledger, mixture)
    ledger.check(component, f"how torchtune's builders make rows {_NOT_APPLIED}")


def _carry_mask(ledger: ConversionLedger, component: SourceSetting) -> None:
    """`train_on_input` is set by every builder of its own; most mask questions."""
    setting = ledger.take("dataset.train_on_input", "dataset.masking_strategy")
    if "completion_only_loss" not in ledger.schema.fields:
        return
    builder = str(component.value).rpartition(".")[2]
    note = "the loss counts answers alone there"
    if setting is None:
        if builder in ("chat_dataset", "instruct_dataset", "slimorca_dataset"):
            data_sets.mask_questions(ledger, component, note)
    elif is_on(setting.value) or setting.value == "train_on_all":
        ledger.carry(setting, "completion_only_loss", value=False)
    else:
        data_sets.mask_questions(ledger, setting, note)


def _carry_lora(ledger: ConversionLedger) -> None:
    layers = ledger.take("model.lora_attn_modules")
    about = layers or ledger.take("model.lora_rank")
    if about is None:
        return
    ledger.carry(about, "use_peft", value=True)
    modules: list[str] = []
    if layers is not None:
        modules += [_LORA_LAYERS.get(str(name), str(name)) for name in layers.value]
    mlp = ledger.take("model.apply_lora_to_mlp")
    if mlp is not None and is_on(mlp.value):
        modules += _MLP
    ledger.carry(about, "lora_target_modules", modules or ["all-linear"])
    if mlp is not None:
        ledger.point(mlp, "lora_target_modules")
    model = ledger.recipe.get("model")
    if model is not None and "qlora" in str(model.value):
        ledger.carry(model, "load_in_4bit", value=True)


def _carry_optimizer(ledger: ConversionLedger) -> None:
    setting = ledger.take("optimizer")
    if setting is not None:
        kind = str(setting.value).rpartition(".")[2]
        optim = _OPTIMIZERS.get(kind)
        fused = ledger.take_on("optimizer.fused")
        if optim == "adamw_torch" and fused is not None:
            optim = "adamw_torch_fused"
            ledger.point(fused, "optim")
        if optim is None:
            ledger.leave(setting, f"`{kind}`: write `optim`")
        else:
            ledger.carry(setting, "optim", optim)
    scheduler = ledger.take("lr_scheduler")
    if scheduler is not None and "cosine" in str(scheduler.value):
        ledger.carry(scheduler, "lr_scheduler_type", "cosine")
    elif scheduler is None:
        ledger.draft.add_defaults({"lr_scheduler_type": "constant"})


def _carry_precision(ledger: ConversionLedger) -> None:
    setting = ledger.take("dtype")
    if setting is not None:
        ledger.carry(setting, "dtype", names.spell_for_trl("dtype", setting.value))
        if str(setting.value) == "bf16":
            ledger.carry(setting, "bf16", value=True)
