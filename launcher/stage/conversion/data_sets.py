"""The data sets of a source -> `dataset_name` or `datasets` of TRL's scripts.

TRL's script (trl/scripts/utils.py) takes one set by name with its splits, or several, each with a
split of its own. Of several it splits off a part for evaluation (`test_split_size`).
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher.dataset import sources
from launcher.lazy_dataclass import dataclass
from launcher.stage.conversion import local_rows
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import Recipe, SourceSetting, find_near, is_off


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One set: `path` is a name on the hub, a folder or a file. `share` is a part of 1."""

    path: str
    name: str | None = None
    split: str | None = None
    columns: tuple[str, ...] = ()
    share: float | None = None
    rows: int | None = None
    files: Any = None


@dataclass(slots=True, kw_only=True)
class SourceData:
    """The sets of a source, and what is set aside: a part, or a split of the same set.

    `also` are settings that the arguments for `setting` say too.
    """

    setting: SourceSetting
    sets: list[DataSet] = field(default_factory=list)
    test_size: float | int | None = None
    test_setting: SourceSetting | None = None
    test_split: str | None = None
    also: list[SourceSetting] = field(default_factory=list)


def is_file(path: str) -> bool:
    return sources.find_reader(Path(path)) is not None


def read_test_size(ledger: ConversionLedger, mixture: SourceData, *keys: str) -> None:
    """Read how many rows a source sets aside for evaluation: a share of all, or a number."""
    size = ledger.take(*keys)
    if size is None:
        return
    if isinstance(size.value, int | float) and size.value > 0:
        mixture.test_size = size.value
        mixture.test_setting = size
        mixture.also.append(size)
    else:
        ledger.leave(size, "no rows are set aside", matters=False)


def limit_rows(ledger: ConversionLedger, mixture: SourceData, *keys: str) -> None:
    """Take so many rows of every set."""
    limit = ledger.take(*keys)
    if limit is not None and isinstance(limit.value, int) and limit.value > 0:
        mixture.sets = [replace(data, rows=limit.value) for data in mixture.sets]
        mixture.also.append(limit)


def carry_sets(ledger: ConversionLedger, mixture: SourceData) -> None:
    """Write the sets as TRL's arguments."""
    if not mixture.sets:
        return
    for index, data in enumerate(mixture.sets):
        if is_file(data.path):
            path = local_rows.find_readable(data.path, mixture.setting, ledger)
            mixture.sets[index] = replace(data, path=path)
    first = mixture.sets[0]
    if _is_plain(mixture):
        ledger.carry(mixture.setting, "dataset_name", first.path)
        if first.name:
            ledger.carry(mixture.setting, "dataset_config", first.name)
        if first.split and first.split != "train":
            ledger.carry(mixture.setting, "dataset_train_split", first.split)
        if mixture.test_split:
            ledger.carry(mixture.setting, "dataset_test_split", mixture.test_split)
        target = "dataset_name"
    else:
        ledger.carry(mixture.setting, "datasets", [_build_entry(data) for data in mixture.sets])
        if mixture.test_size is not None:
            ledger.carry(
                mixture.test_setting or mixture.setting, "test_split_size", mixture.test_size
            )
        target = "datasets"
    for setting in mixture.also:
        ledger.point(setting, target)


EVALUATES_ON_A_PART = "TRL's script evaluates on a split or a part of the training sets alone"


def name_needed_columns(ledger: ConversionLedger) -> str:
    """The columns of rows that TRL reads for the stage."""
    if "assistant_only_loss" in ledger.schema.fields:
        return "`messages`, or `prompt` and `completion`"
    return "`chosen` and `rejected`"


def mask_questions(ledger: ConversionLedger, setting: SourceSetting, note: str) -> None:
    """Count answers alone in the loss: chats and completions have different arguments for it."""
    key = "assistant_only_loss"
    if ledger.kinds and ledger.kinds <= {"completions"}:
        key = "completion_only_loss"
    if key in ledger.schema.fields:
        ledger.carry(setting, key, value=True, note=note)


def _is_plain(mixture: SourceData) -> bool:
    """Whether `dataset_name` says it all."""
    if len(mixture.sets) != 1 or mixture.test_size is not None:
        return False
    data = mixture.sets[0]
    if data.columns or data.share not in (None, 1) or data.rows is not None:
        return False
    has_files = data.files is not None or is_file(data.path)
    return not has_files and not re.search(r"[\[+]", data.split or "")


def _build_entry(data: DataSet) -> dict[str, Any]:
    """One entry of `datasets`."""
    entry: dict[str, Any] = {"path": data.path}
    reader = sources.find_reader(Path(data.path))
    if reader is not None:
        entry = {"path": reader, "data_files": data.path}
    if data.name:
        entry["name"] = data.name
    if data.files is not None:
        entry["data_files"] = data.files
    split = _render_split(data)
    if split != "train":
        entry["split"] = split
    if data.columns:
        entry["columns"] = list(data.columns)
    return entry


def _render_split(data: DataSet) -> str:
    """A split with its part, as `datasets.load_dataset` reads it: whole percents, or rows."""
    split = data.split or "train"
    if "[" in split:
        return split
    if data.rows is not None:
        return f"{split}[:{data.rows}]"
    if data.share is not None and 0 < data.share < 1:
        return f"{split}[:{max(1, round(data.share * 100))}%]"
    return split


def check_shares(ledger: ConversionLedger, mixture: SourceData) -> None:
    """Say what the sets of a source mean that TRL's script cannot."""
    for data in mixture.sets:
        if data.share is not None and data.share > 1:
            advice = f"{data.path} is taken {data.share:g} times there; `datasets` takes it once"
            ledger.check(mixture.setting, advice, target="dataset_name")
        elif data.share is not None and data.share * 100 % 1 > 1e-6:
            rounded = max(1, round(data.share * 100))
            advice = f"{data.share:g} of {data.path} became {rounded} %: slices are whole percents"
            ledger.check(mixture.setting, advice, target="dataset_name")


_EVALUATES = ("eval_", "evals_", "per_device_eval", "do_eval", "evaluation_strategy")
_NO_TEST = "no rows are set aside: name `dataset_test_split`, or `test_split_size` with `datasets`"


def settle_evaluation(ledger: ConversionLedger) -> None:
    """Leave out the arguments of evaluation if there is nothing to evaluate on."""
    rows = ledger.draft.rows
    if "test_split_size" in rows or "dataset_test_split" in rows:
        return
    if "datasets" not in rows and _is_evaluated(ledger):
        # TRL's script evaluates on the split `test`, as the source did or did not
        return
    for setting in ledger.recipe.settings:
        if setting.key.startswith(_EVALUATES) and not ledger.is_settled(setting):
            ledger.leave(setting, _NO_TEST, matters=not is_off(setting.value))


def _is_evaluated(ledger: ConversionLedger) -> bool:
    """Whether a source for TRL evaluates on the set's own split."""
    return (
        ledger.recipe.tool in ("trl", "handbook")
        and ledger.recipe.get("dataset_test_split") is not None
    )


def parse_data_set(text: str) -> DataSet:
    """`name#500` and `name:subset` as ms-swift has them; other texts are names or paths."""
    path, _, count = text.strip().partition("#")
    rows = int(count) if count.isdecimal() else None
    name = None
    if not is_file(path) and re.fullmatch(r"[\w.-]+/[\w.-]+:[\w.,/-]+", path):
        path, _, name = path.partition(":")
    return DataSet(path=path, name=name, rows=rows)


def find_local_path(path: str, recipe: Recipe) -> str:
    """A path of the source as it is from here, if it exists."""
    return str(find_near(path, recipe.path) or path)
