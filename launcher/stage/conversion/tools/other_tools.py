"""OpenRLHF's, ms-swift's and verl's command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.stage.conversion import data_sets, names, sharding, templates
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import Recipe, is_on, split_words
from launcher.stage.options import Batch

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


_SWIFT_DEFAULTS: Mapping[str, Any] = {
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 1,
}


def flatten_openrlhf(recipe: Recipe) -> None:
    """Newer names have a section in front: `--data.max_len` is `--max_len`."""
    for index, setting in enumerate(recipe.settings):
        key = setting.key.rpartition(".")[2]
        if setting.key == "eval.steps":
            key = "eval_steps"
        recipe.settings[index] = replace(setting, key=key)


def convert_openrlhf(ledger: ConversionLedger) -> None:
    """Settle the settings of openrlhf.cli.train_sft and train_dpo."""
    _carry_openrlhf_batch(ledger)
    _carry_openrlhf_data(ledger)
    precision = ledger.take("param_dtype", "bf16")
    if precision is not None and (str(precision.value) == "bf16" or is_on(precision.value)):
        ledger.carry(precision, "bf16", value=True)
        ledger.carry(precision, "dtype", "bfloat16")
    ledger.switch_on_lora(ledger.take("lora_rank"))
    for key in ("save_steps", "eval_steps"):
        setting = ledger.take(key)
        if setting is not None and setting.value == -1:
            ledger.leave(setting, "-1: never while it trains", matters=False)
            if key == "save_steps":
                ledger.draft.add_defaults({"save_strategy": "no"})
    packing = ledger.take("packing_samples")
    fields = ledger.schema.fields
    if packing is not None and "packing" not in fields and "padding_free" in fields:
        ledger.carry(packing, "padding_free", value=is_on(packing.value))
    names.carry_warmup(ledger)
    data_sets.settle_evaluation(ledger)
    names.carry_rest(ledger, names.OPENRLHF, _OPENRLHF_REASONS, _OPENRLHF_UNNEEDED)


def _carry_openrlhf_batch(ledger: ConversionLedger) -> None:
    """`train_batch_size` is the global one there."""
    whole = ledger.take("train_batch_size", "batch_size")
    each = ledger.take("micro_train_batch_size", "micro_batch_size")
    if whole is None or each is None:
        return
    if isinstance(whole.value, int) and isinstance(each.value, int):
        ledger.draft.batch = Batch(total=whole.value, per_device=each.value)
        ledger.point(whole, "batch.global")
        ledger.point(each, "batch.per_device")


def _carry_openrlhf_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("dataset", "preference_dataset")
    if setting is None:
        return
    split = ledger.take("dataset_split", "train_split")
    mixture = SourceData(setting=setting)
    name_of_split = None
    if split is not None:
        name_of_split = str(split.value)
        mixture.also.append(split)
    for text in split_words(setting.value):
        path, _, _ = text.partition("@")
        mixture.sets.append(DataSet(path=path, split=name_of_split))
    data_sets.limit_rows(ledger, mixture, "max_samples")
    data_sets.carry_sets(ledger, mixture)
    keys = ("input_key", "output_key", "prompt_key", "chosen_key", "rejected_key")
    if _leave_columns(ledger, keys) and "completion_only_loss" in ledger.schema.fields:
        data_sets.mask_questions(ledger, setting, "OpenRLHF's loss counts answers alone")


def _leave_columns(ledger: ConversionLedger, keys: Sequence[str]) -> bool:
    """Leave out the names of columns; whether there are any."""
    has_columns = False
    for key in keys:
        column = ledger.take(key)
        if column is not None:
            reason = "TRL reads columns of fixed names: `launch data convert`, or rename it"
            ledger.leave(column, reason)
            has_columns = True
    return has_columns


def convert_swift(ledger: ConversionLedger) -> None:
    """Settle the settings of `swift sft` and `swift rlhf --rlhf_type dpo`."""
    kind = ledger.take("rlhf_type")
    if kind is not None:
        ledger.point(kind, "stage")
    _carry_swift_data(ledger)
    method = ledger.take("train_type", "tuner_type", "sft_type")
    about = method or ledger.take("lora_rank", "target_modules", "model", "model_id_or_path")
    if about is not None and names.trains_lora(ledger, method):
        ledger.carry(about, "use_peft", value=True, note="LoRA is ms-swift's default")
        _add_lora_defaults(ledger)
    bits = ledger.take("quant_bits", "quantization_bit")
    if bits is not None and bits.value in (4, 8):
        ledger.carry(bits, f"load_in_{bits.value}bit", value=True)
    templates.settle(ledger)
    names.carry_warmup(ledger)
    data_sets.settle_evaluation(ledger)
    is_by_steps = ledger.recipe.get("eval_steps") is not None
    has_strategy = ledger.recipe.get("eval_strategy") is not None
    if "test_split_size" in ledger.draft.rows and is_by_steps and not has_strategy:
        ledger.draft.add_defaults({"eval_strategy": "steps"})
    names.carry_rest(ledger, names.SWIFT, _SWIFT_REASONS, _SWIFT_UNNEEDED)
    ledger.draft.add_defaults(_SWIFT_DEFAULTS)


def _add_lora_defaults(ledger: ConversionLedger) -> None:
    if ledger.take("target_modules", "lora_target_modules") is None:
        ledger.draft.add_defaults({"lora_target_modules": ["all-linear"]})
    if ledger.recipe.get("lora_rank") is None:
        ledger.draft.add_defaults({"lora_r": 8})
    if ledger.recipe.get("lora_alpha") is None:
        ledger.draft.add_defaults({"lora_alpha": 32})


def _carry_swift_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("dataset")
    if setting is None:
        return
    values = setting.value
    if not isinstance(values, list):
        values = str(values).split()
    mixture = SourceData(setting=setting)
    data_sets.read_test_size(ledger, mixture, "split_dataset_ratio")
    for text in values:
        data = data_sets.parse_data_set(str(text))
        if data_sets.is_file(data.path):
            data = replace(data, path=data_sets.find_local_path(data.path, ledger.recipe))
        mixture.sets.append(data)
    data_sets.carry_sets(ledger, mixture)
    advice = "TRL needs `messages`, or pairs; `launch data convert` makes them"
    ledger.check(setting, f"ms-swift makes rows of many forms: {advice}")
    if "assistant_only_loss" in ledger.schema.fields and _masks_questions(ledger):
        data_sets.mask_questions(ledger, setting, "ms-swift's loss counts answers alone")


def _masks_questions(ledger: ConversionLedger) -> bool:
    setting = ledger.take("loss_scale")
    if setting is None or str(setting.value) != "all":
        return True
    ledger.leave(setting, "every token counts, as in TRL by default", matters=False)
    return False


_VERL_REASONS: Mapping[str, str] = {
    "trainer.project_name": "set WANDB_PROJECT where it runs",
    "data.val_files": data_sets.EVALUATES_ON_A_PART,
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
        size = 256
        if whole is not None and isinstance(whole.value, int):
            size = whole.value
        ledger.draft.batch = Batch(total=size, per_device=each.value)
        ledger.point(each, "batch.per_device")
        if whole is not None:
            ledger.point(whole, "batch.global")
    ledger.switch_on_lora(ledger.take("model.lora_rank"))
    _carry_verl_data(ledger)
    _carry_verl_sharding(ledger)
    scheduler = ledger.take("optim.lr_scheduler")
    if scheduler is None:
        ledger.draft.add_defaults({"lr_scheduler_type": "cosine"})
    names.carry_rest(ledger, names.VERL, _VERL_REASONS, _VERL_UNNEEDED)


def _carry_verl_data(ledger: ConversionLedger) -> None:
    setting = ledger.take("data.train_files")
    if setting is None:
        return
    mixture = SourceData(setting=setting)
    for path in split_words(str(setting.value).strip("[]")):
        local = data_sets.find_local_path(path.strip("'\""), ledger.recipe)
        mixture.sets.append(DataSet(path=local))
    data_sets.carry_sets(ledger, mixture)
    sides = ("prompt", "response")
    keys = [f"data.{side}_{kind}" for kind in ("key", "dict_keys") for side in sides]
    _leave_columns(ledger, keys)
    if ledger.recipe.get("data.prompt_key") is not None:
        data_sets.mask_questions(ledger, setting, "verl's loss counts answers alone")


def _carry_verl_sharding(ledger: ConversionLedger) -> None:
    """Its trainer shards with FSDP."""
    strategy = ledger.take("model.strategy")
    ledger.shard(sharding.ShardingName("zero3"), *filter(None, [strategy]))
