"""OpenRLHF's, ms-swift's and verl's command lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.stage.conversion import data_sets, names, sharding, templates
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import Recipe, is_off, is_on, words

_OPENRLHF_REASONS: Mapping[str, str] = {
    "tokenizer_chat_template": "TRL takes the template of the tokenizer",
    "input_template": "TRL takes the template of the tokenizer",
    "use_wandb": "write `report_to: wandb`, and set WANDB_API_KEY where it runs",
    "wandb_project": "set WANDB_PROJECT where it runs",
    "ref_pretrain": "TRL takes the model itself for the reference",
    "ref_offload": "TRL keeps the reference where the model is",
}
_OPENRLHF_UNNEEDED: Mapping[str, str] = {
    "zpg": "`deepspeed:` covers it",
    "load_checkpoint": "the same command continues a run",
    "load_enable": "the same command continues a run",
    "ckpt_path": "checkpoints lie in `output_dir`",
    "apply_chat_template": "TRL applies the template to rows of messages",
}
_SWIFT_REASONS: Mapping[str, str] = {
    "system": "put it into the rows' messages",
    "model_author": "it only fills ms-swift's self-cognition set",
    "model_name": "it only fills ms-swift's self-cognition set",
    "template": "TRL takes the template of the tokenizer",
    "template_type": "TRL takes the template of the tokenizer",
    "deepspeed_autotp_size": "launch splits no layer among GPUs with TRL",
}
_SWIFT_UNNEEDED: Mapping[str, str] = {
    "load_from_cache_file": "launch knows data by content",
    "model_type": "transformers tells it from the model",
    "use_hf": "data and model come from Hugging Face's hub",
    "add_version": "launch names the run folder",
}


def flatten_openrlhf(recipe: Recipe) -> None:
    """Newer names have a section in front: `--data.max_len` is `--max_len`."""
    recipe.settings = [replace(setting, key=setting.key.rpartition(".")[2]) for setting in recipe.settings]
    for index, setting in enumerate(recipe.settings):
        written = setting.written.lstrip("-")
        section = written.partition(".")[0] if "." in written else ""
        key = {("eval", "steps"): "eval_steps"}.get((section, setting.key), setting.key)
        recipe.settings[index] = replace(setting, key=key)


def convert_openrlhf(ledger: ConversionLedger) -> None:
    """Settle the settings of openrlhf.cli.train_sft and train_dpo."""
    _openrlhf_batch(ledger)
    _openrlhf_sharding(ledger)
    _openrlhf_data(ledger)
    precision = ledger.take("param_dtype", "bf16")
    if precision is not None and (str(precision.value) == "bf16" or is_on(precision.value)):
        ledger.carry(precision, "bf16", value=True)
        ledger.carry(precision, "dtype", "bfloat16")
    rank = ledger.take("lora_rank")
    if rank is not None and isinstance(rank.value, int) and rank.value > 0:
        ledger.carry(rank, "use_peft", value=True)
        ledger.carry(rank, "lora_r", rank.value)
    for key in ("save_steps", "eval_steps"):
        setting = ledger.take(key)
        if setting is not None and setting.value == -1:
            ledger.leave(setting, "-1: never while it trains", matters=False)
            if key == "save_steps":
                ledger.draft.add_defaults({"save_strategy": "no"})
    packing = ledger.take("packing_samples")
    if packing is not None and "packing" not in ledger.schema.fields and "padding_free" in ledger.schema.fields:
        ledger.carry(packing, "padding_free", value=is_on(packing.value))
    names.warmup(ledger)
    data_sets.settle_evaluation(ledger)
    names.carry_rest(ledger, names.OPENRLHF, _OPENRLHF_REASONS, _OPENRLHF_UNNEEDED)


def _openrlhf_batch(ledger: ConversionLedger) -> None:
    """`train_batch_size` is the global one there."""
    whole = ledger.take("train_batch_size", "batch_size")
    each = ledger.take("micro_train_batch_size", "micro_batch_size")
    if whole is None or each is None:
        return
    if isinstance(whole.value, int) and isinstance(each.value, int):
        ledger.draft.batch = (whole.value, each.value)
        ledger.point(whole, "batch.global")
        ledger.point(each, "batch.per_device")


def _openrlhf_sharding(ledger: ConversionLedger) -> None:
    stage = ledger.take("zero_stage")
    offload = ledger.take("adam_offload")
    if stage is None:
        return
    result = sharding.of_stage(stage.value, offloads=offload is not None and is_on(offload.value))
    if result is None:
        return
    ledger.draft.deepspeed = result.name
    ledger.point(stage, "deepspeed")
    if offload is not None and result.name == "zero3_offload":
        ledger.point(offload, "deepspeed")
    if result.advice:
        ledger.check(stage, result.advice)


def _openrlhf_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("dataset", "preference_dataset")
    if setting is None:
        return
    limit = ledger.take("max_samples")
    split = ledger.take("dataset_split", "train_split")
    count = limit.value if limit is not None and isinstance(limit.value, int) else None
    mixture = SourceData(setting=setting)
    for text in words(setting.value):
        path, _, _ = text.partition("@")
        mixture.sets.append(DataSet(path=path, split=None if split is None else str(split.value)))
    if limit is not None and count is not None:
        mixture.sets = [replace(data, rows=count) for data in mixture.sets]
    also = [item for item in (limit, split) if item is not None]
    data_sets.write(ledger, mixture, *also)
    columns = []
    for key in ("input_key", "output_key", "prompt_key", "chosen_key", "rejected_key"):
        column = ledger.take(key)
        if column is not None:
            columns.append(f"`{column.value}`")
            ledger.leave(column, "TRL reads columns of fixed names: `launch data convert`, or rename it")
    if columns and "completion_only_loss" in ledger.schema.fields:
        data_sets.mask_questions(ledger, setting, "OpenRLHF's loss counts answers alone")


def convert_swift(ledger: ConversionLedger) -> None:
    """Settle the settings of `swift sft` and `swift rlhf --rlhf_type dpo`."""
    kind = ledger.take("rlhf_type")
    if kind is not None:
        ledger.point(kind, "stage")
    _swift_data(ledger)
    method = ledger.take("train_type", "tuner_type", "sft_type")
    about = method or ledger.take("lora_rank", "target_modules", "model", "model_id_or_path")
    if method is not None and str(method.value) == "full":
        ledger.leave(method, "all weights are trained, as without LoRA here", matters=False)
    elif method is not None and str(method.value) != "lora":
        ledger.leave(method, f"`{method.value}`: TRL trains all weights, or LoRA")
    elif about is not None:
        ledger.carry(about, "use_peft", value=True, note="LoRA is ms-swift's default")
        _lora_defaults(ledger)
    bits = ledger.take("quant_bits", "quantization_bit")
    if bits is not None and bits.value in (4, 8):
        ledger.carry(bits, f"load_in_{bits.value}bit", value=True)
    templates.settle(ledger)
    names.warmup(ledger)
    data_sets.settle_evaluation(ledger)
    evaluates = "test_split_size" in ledger.draft.rows and ledger.recipe.get("eval_strategy") is None
    if evaluates and ledger.recipe.get("eval_steps") is not None:
        ledger.draft.add_defaults({"eval_strategy": "steps"})
    names.carry_rest(ledger, names.SWIFT, _SWIFT_REASONS, _SWIFT_UNNEEDED)
    ledger.draft.add_defaults({"lr_scheduler_type": "cosine", "num_train_epochs": 3, "per_device_train_batch_size": 1})


def _lora_defaults(ledger: ConversionLedger) -> None:
    target = ledger.take("target_modules", "lora_target_modules")
    if target is None:
        ledger.draft.add_defaults({"lora_target_modules": ["all-linear"]})
    defaults: dict[str, Any] = {}
    for ours, theirs, value in (("lora_r", "lora_rank", 8), ("lora_alpha", "lora_alpha", 32)):
        if ledger.recipe.get(theirs) is None:
            defaults[ours] = value
    ledger.draft.add_defaults(defaults)


def _swift_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("dataset")
    if setting is None:
        return
    values = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    size = ledger.take("split_dataset_ratio")
    share = size.value if size is not None and isinstance(size.value, int | float) and size.value else None
    mixture = SourceData(setting=setting, test_size=share, test_setting=size)
    for text in values:
        data = data_sets.of_text(str(text))
        if data_sets.is_file(data.path):
            path = data_sets.local_path(data.path, [ledger.recipe.path.parent])
            data = DataSet(path=path, name=data.name, rows=data.rows)
        mixture.sets.append(data)
    also = [size] if size is not None and share is not None else []
    data_sets.write(ledger, mixture, *also)
    if size is not None and share is None:
        ledger.leave(size, "no rows are set aside", matters=False)
    ledger.check(
        setting, "ms-swift makes rows of many forms: TRL needs `messages`, or pairs; `launch data convert` makes them"
    )
    if "assistant_only_loss" in ledger.schema.fields and _masks(ledger):
        data_sets.mask_questions(ledger, setting, "ms-swift's loss counts answers alone")


def _masks(ledger: ConversionLedger) -> bool:
    setting = ledger.take("loss_scale")
    if setting is None or is_off(setting.value):
        return True
    if str(setting.value) == "all":
        ledger.leave(setting, "every token counts, as in TRL by default", matters=False)
        return False
    return True


_VERL_REASONS: Mapping[str, str] = {
    "trainer.project_name": "set WANDB_PROJECT where it runs",
    "data.val_files": "TRL's script evaluates on a split or a part of the training sets alone",
    "ulysses_sequence_parallel_size": "launch splits no sequence among GPUs with TRL",
    "data.truncation": "TRL cuts rows at `max_length`",
}
_VERL_UNNEEDED: Mapping[str, str] = {
    "use_remove_padding": "`packing` or `padding_free` say it in TRL",
    "trainer.default_hdfs_dir": "launch copies nothing to HDFS",
    "trainer.resume_mode": "the same command continues a run",
}


def convert_verl(ledger: ConversionLedger) -> None:
    """Settle the settings of verl's SFT trainer, which are overrides of hydra's."""
    whole = ledger.take("data.train_batch_size")
    each = ledger.take("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    if each is not None and isinstance(each.value, int):
        size = whole.value if whole is not None and isinstance(whole.value, int) else 256
        ledger.draft.batch = (size, each.value)
        ledger.point(each, "batch.per_device")
        if whole is not None:
            ledger.point(whole, "batch.global")
    rank = ledger.take("model.lora_rank")
    if rank is not None and isinstance(rank.value, int) and rank.value > 0:
        ledger.carry(rank, "use_peft", value=True)
        ledger.carry(rank, "lora_r", rank.value)
    _verl_data(ledger)
    _verl_sharding(ledger)
    scheduler = ledger.take("optim.lr_scheduler")
    if scheduler is None:
        ledger.draft.add_defaults({"lr_scheduler_type": "cosine"})
    names.carry_rest(ledger, names.VERL, _VERL_REASONS, _VERL_UNNEEDED)


def _verl_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("data.train_files")
    if setting is None:
        return
    mixture = SourceData(setting=setting)
    for path in words(str(setting.value).strip("[]")):
        local = data_sets.local_path(path.strip("'\""), [ledger.recipe.path.parent])
        mixture.sets.append(DataSet(path=local))
    data_sets.write(ledger, mixture)
    for key in ("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys"):
        column = ledger.take(key)
        if column is not None:
            ledger.leave(column, "TRL reads columns of fixed names: `launch data convert`, or rename it")
    if ledger.recipe.get("data.prompt_key") is not None:
        data_sets.mask_questions(ledger, setting, "verl's loss counts answers alone")


def _verl_sharding(ledger: ConversionLedger) -> None:
    """Its trainer shards with FSDP."""
    ledger.draft.deepspeed = "zero3"
    setting = ledger.take("model.strategy")
    if setting is not None:
        ledger.point(setting, "deepspeed")
