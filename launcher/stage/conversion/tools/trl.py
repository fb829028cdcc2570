"""Sources with TRL's names: its scripts and files, the alignment handbook's, and own scripts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.stage.conversion import data_sets, names, templates
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import PLACEHOLDER, ConversionLedger
from launcher.stage.conversion.settings import (
    Recipe,
    SourceSetting,
    is_off,
    is_on,
    split_words,
    value_or,
)

_VARIABLE = "set WANDB_PROJECT and WANDB_ENTITY where it runs"
REASONS: Mapping[str, str] = {
    "env": "set the variables where it runs",
    "wandb_project": _VARIABLE,
    "wandb_entity": _VARIABLE,
    "auto_insert_empty_system_msg": "the tokenizer's template decides it",
    "gamma_beta_ratio": "SimPO's margin: TRL's DPO has no such loss",
    "simpo_gamma": "SimPO's margin: TRL's DPO has no such loss",
}
UNNEEDED: Mapping[str, str] = {
    "config_file": "`deepspeed:` covers it",
    "overwrite_output_dir": "launch decides whether a run continues: `--fresh` starts over",
    "do_train": "a stage trains",
    "use_chat_template": "TRL applies the template to rows of messages",
    "lazy_preprocess": "TRL prepares the rows before it trains",
    "use_fast_tokenizer": "transformers takes the fast tokenizer",
}
_OWN_REASONS: Mapping[str, str] = {
    **REASONS,
    **dict.fromkeys(
        "conversation_template template conv_template prompt_template_name prompt_type "
        "conv_type".split(),
        "TRL takes the template of the tokenizer",
    ),
    **dict.fromkeys(
        "eval_data_path validation_file validation_file_dir eval_file val_file eval_dir "
        "eval_dataset test_file eval_dataset_path validation_data val_data_path eval_data".split(),
        data_sets.EVALUATES_ON_A_PART,
    ),
    "cache_dir": "set HF_HOME where it runs",
    "chat_template_format": templates.BY_NAME,
    "template_path": templates.BY_NAME,
}
_DATA = (
    "dataset_name dataset dataset_path data_path dataset_name_or_path train_file train_files "
    "train_data train_data_path train_dir train_file_dir data_dir train_file_path train_dataset "
    "dataset_id data data_file data_files sft_data_path train_path dataset_dir training_data "
    "dataset_names datasets"
).split()


def convert(ledger: ConversionLedger) -> None:
    """Settle the settings of TRL's own scripts and files."""
    _carry_sets(ledger)
    _settle_common(ledger)
    names.carry_rest(ledger, names.TRL, REASONS, UNNEEDED)


def _settle_common(ledger: ConversionLedger) -> None:
    templates.settle(ledger)
    names.carry_warmup(ledger)
    names.carry_lora(ledger)
    names.carry_reentrant(ledger)
    data_sets.settle_evaluation(ledger)


def _carry_sets(ledger: ConversionLedger) -> None:
    """The sets of TRL's own file, and a file that TRL loads as a set of `datasets` alone."""
    listed = ledger.take("datasets")
    if listed is not None and isinstance(listed.value, list):
        ledger.carry(listed, "datasets", listed.value)
    named = ledger.take("dataset_name")
    if named is None or not isinstance(named.value, str):
        return
    if data_sets.is_file(named.value):
        path = data_sets.find_local_path(named.value, ledger.recipe)
        data = DataSet(path=path)
        data_sets.carry_sets(ledger, SourceData(setting=named, sets=[data]))


def convert_handbook(ledger: ConversionLedger) -> None:
    """Settle the settings of a recipe of the alignment handbook."""
    _carry_mixture(ledger)
    _carry_mixer(ledger)
    _settle_common(ledger)
    names.carry_rest(ledger, names.TRL, REASONS, UNNEEDED)


def _carry_mixture(ledger: ConversionLedger) -> None:
    """`dataset_mixture: {datasets: [{id, config, split, weight}], test_split_size, seed}`."""
    setting = ledger.take("dataset_mixture")
    if setting is None or not isinstance(setting.value, Mapping):
        return
    content = setting.value
    mixture = SourceData(setting=setting, test_size=content.get("test_split_size"))
    for item in content.get("datasets") or ():
        if isinstance(item, Mapping):
            mixture.sets.append(_build_data_set(item))
    data_sets.carry_sets(ledger, mixture)
    data_sets.check_shares(ledger, mixture)
    if content.get("seed") is not None:
        seed = f"`seed: {content['seed']}` of the mixture"
        ledger.check(setting, f"{seed} is not carried: TRL shuffles with `seed`")


def _build_data_set(item: Mapping[str, Any]) -> DataSet:
    return DataSet(
        path=str(item.get("id") or item.get("path") or PLACEHOLDER),
        name=item.get("config") or item.get("name"),
        split=item.get("split"),
        columns=tuple(item.get("columns") or ()),
        share=_read_share(item.get("weight")),
    )


def _read_share(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return None


def _carry_mixer(ledger: ConversionLedger) -> None:
    """`dataset_mixer: {name: share}` with `dataset_splits` and `dataset_configs`."""
    setting = ledger.take("dataset_mixer")
    if setting is None or not isinstance(setting.value, Mapping):
        return
    splits = ledger.take("dataset_splits")
    configs = ledger.take("dataset_configs")
    split_names = split_words(value_or(splits, ["train", "test"]))
    train = _choose_train_splits(split_names)
    config_names: list[str | None] = [*split_words(value_or(configs, []))]
    mixture = SourceData(setting=setting)
    for (path, share), config in itertools.zip_longest(setting.value.items(), config_names):
        for split in train:
            data = DataSet(path=str(path), name=config, split=split, share=_read_share(share))
            mixture.sets.append(data)
    test: list[str] = []
    if _evaluates(ledger):
        test = [name for name in split_names if "test" in name]
    is_single = len(mixture.sets) == 1 and mixture.sets[0].share in (None, 1.0)
    if is_single and test:
        mixture.test_split = test[0]
    mixture.also += filter(None, [splits, configs])
    data_sets.carry_sets(ledger, mixture)
    data_sets.check_shares(ledger, mixture)
    if test and not is_single and splits is not None:
        split_off = "of several sets TRL's script splits off `test_split_size`"
        ledger.check(splits, f"{', '.join(test)} is not evaluated: {split_off}")


def _choose_train_splits(names: Sequence[str]) -> list[str]:
    """The splits whose names say training, else those that do not say test."""
    train = [name for name in names if "train" in name]
    if not train:
        train = [name for name in names if "test" not in name]
    return train or ["train"]


def _evaluates(ledger: ConversionLedger) -> bool:
    setting = ledger.recipe.get("eval_strategy", "evaluation_strategy")
    if setting is not None:
        return not is_off(setting.value)
    setting = ledger.recipe.get("do_eval")
    return setting is not None and is_on(setting.value)


def flatten(recipe: Recipe) -> None:
    """Give hydra's overrides, such as `model.name_or_path=...`, the last part of their names."""
    for index, setting in enumerate(recipe.settings):
        recipe.settings[index] = replace(setting, key=setting.key.rpartition(".")[2])


def convert_own(ledger: ConversionLedger) -> None:
    """Settle the settings of a script that nobody knows: names that say what they mean."""
    model = ledger.take("name_or_path")
    short = ledger.take("model")
    if model is not None and short is not None:
        ledger.leave(short, f"`{model.written}` names the model")
    loss = ledger.take("loss", "loss_name")
    if loss is not None and str(loss.value).lower() == ledger.draft.stage:
        ledger.point(loss, "stage")
    names.carry_bits(ledger)
    setting = ledger.take(*_DATA)
    if setting is not None:
        _carry_own_data(ledger, setting)
    _settle_common(ledger)
    _carry_own_mask(ledger)
    _check_ambiguous(ledger)
    names.carry_rest(ledger, names.OWN, _OWN_REASONS, UNNEEDED)
    _say_unknown(ledger)


def _carry_own_data(ledger: ConversionLedger, setting: SourceSetting) -> None:
    values = setting.value
    if not isinstance(values, list):
        values = split_words(str(values).strip("[]"))
    splits = ledger.take("splits", "dataset_split")
    # the split to train on and, if there is one, the split to evaluate on
    train, test, *_ = [*split_words(value_or(splits, [])), None, None]
    mixture = SourceData(setting=setting)
    for value in values:
        if isinstance(value, Mapping):
            value = value.get("path")
        path = str(value)
        if data_sets.is_file(path):
            path = data_sets.find_local_path(path, ledger.recipe)
        mixture.sets.append(DataSet(path=path, split=train))
    if _evaluates(ledger):
        mixture.test_split = test
    shares = ("val_set_size", "split_dataset_ratio", "eval_split_ratio")
    data_sets.read_test_size(ledger, mixture, *shares, "validation_split_percentage")
    share = mixture.test_setting
    if share is not None and share.key not in shares:
        mixture.test_size = share.value / 100
    data_sets.limit_rows(ledger, mixture, *_LIMITS)
    if splits is not None:
        mixture.also.append(splits)
    data_sets.carry_sets(ledger, mixture)


_LIMITS = ("max_train_samples", "max_samples", "num_train_samples", "max_examples", "train_samples")
_MASKS = (
    "mask_user",
    "mask_prompt",
    "mask_inputs",
    "mask_question",
    "only_train_on_response",
    "completion_only",
)
_TRAINS_ON_ALL = ("train_on_inputs", "train_on_source", "train_on_prompt", "train_on_input")


def _carry_own_mask(ledger: ConversionLedger) -> None:
    """Flags whose names say which tokens count in the loss."""
    if "assistant_only_loss" not in ledger.schema.fields:
        return
    masks = ledger.take_on(*_MASKS)
    if masks is not None:
        data_sets.mask_questions(ledger, masks, "answers alone")
    whole = ledger.take(*_TRAINS_ON_ALL)
    if whole is not None and is_on(whole.value):
        ledger.carry(whole, "completion_only_loss", value=False)
    elif whole is not None:
        data_sets.mask_questions(ledger, whole, "answers alone")


_AMBIGUOUS = frozenset({"batch_size", "train_batch_size", "bs"})


def _check_ambiguous(ledger: ConversionLedger) -> None:
    """Names that one script means otherwise than another."""
    for setting in ledger.recipe.settings:
        if setting.key in _AMBIGUOUS and not ledger.is_settled(setting) and not setting.missing:
            ledger.check(
                setting, "taken as rows per device; of all devices together it is `batch.global`"
            )


def _say_unknown(ledger: ConversionLedger) -> None:
    """What a script of one's own does with rows is in its code, which is not read."""
    setting = ledger.recipe.get(*_DATA) or ledger.recipe.get(*ledger.carried)
    if setting is None and ledger.recipe.settings:
        setting = ledger.recipe.settings[0]
    if setting is None:
        return
    program = f"{ledger.recipe.program} is a script of its own"
    unread = "how it writes rows, and which tokens count in its loss, is not read"
    ledger.check(setting, f"{program}: {unread}; `launch preview` shows what TRL does")
