"""`launch init --from FILE --model NAME --data NAME`: model and data in place of the source's."""

from __future__ import annotations

from launcher.lazy_dataclass import dataclass
from launcher.stage.conversion import data_sets
from launcher.stage.conversion.data_sets import DataSet, SourceData
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import SourceSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """A model and a data set, each a name on the hub or a path; None leaves that of the source."""

    model: str | None = None
    data: str | None = None


NONE = Replacements()

_MODEL = "model_name_or_path"
# what is said of one model: its commit, and a tokenizer of its own
_OF_MODEL = ("model_revision", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_revision")
# what is said of one data set: which part of it is read
_OF_DATA = (
    "datasets",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_mixer_list",
    "dataset_mixer_list_splits",
    "mixer_list",
    "mixer_list_splits",
)


def apply(ledger: ConversionLedger, replacements: Replacements) -> None:
    """Write the model and the data that a person names, and leave out those of the source."""
    if replacements.model is not None:
        _replace_model(ledger, replacements.model)
    if replacements.data is not None:
        _replace_data(ledger, replacements.data)


def _replace_model(ledger: ConversionLedger, model: str) -> None:
    for name in (_MODEL, *_OF_MODEL):
        _forget(ledger, name, "`--model` takes its place")
    ledger.carry(_build_option("--model", model), _MODEL, model, note="--model")


def _replace_data(ledger: ConversionLedger, path: str) -> None:
    draft = ledger.draft
    had_test_split = "dataset_test_split" in draft.rows
    for name in _OF_DATA:
        _forget(ledger, name, "`--data` takes its place")
    draft.remarks = tuple(
        remark for remark in draft.remarks if not remark.startswith("first: launch data convert ")
    )
    ledger.kinds.clear()
    option = _build_option("--data", path)
    data = ledger.entry.names.data
    if ledger.schema.fields[data].many:
        ledger.carry(option, data, [path, 1.0], note="--data")
        return
    mixture = SourceData(setting=option, sets=[DataSet(path=path)])
    held_out = draft.rows.get("test_split_size")
    if held_out is not None:
        mixture.test_size = held_out.value
    data_sets.carry_sets(ledger, mixture)
    for name in ledger.carried["--data"]:
        draft.rows[name] = draft.rows[name]._replace(comment="--data")
    if held_out is not None:
        draft.rows["test_split_size"] = held_out
    elif had_test_split and "eval_strategy" in draft.rows:
        evaluated = f"it is evaluated on the split `test` of {path}"
        ledger.check(option, f"{evaluated}: `dataset_test_split` names another one")
    _mask_as_rows_need(ledger)


def _mask_as_rows_need(ledger: ConversionLedger) -> None:
    """Mask questions by the argument for the kind of rows: chats, or prompts and completions."""
    rows = ledger.draft.rows
    row = rows.pop("assistant_only_loss", None)
    if row is None:
        return
    if ledger.kinds != {"completions"}:
        # at the end, as what is carried later
        rows["assistant_only_loss"] = row
        return
    rows["completion_only_loss"] = row
    ledger.rename("assistant_only_loss", "completion_only_loss")


def _build_option(written: str, value: str) -> SourceSetting:
    return SourceSetting(key=written, value=value, written=written, file="")


def _forget(ledger: ConversionLedger, target: str, reason: str) -> None:
    """Take an argument of the source's out, with what a person would have had to look at in it."""
    ledger.drop(target, reason, matters=False)
    ledger.checks = [check for check in ledger.checks if check.target != target]
