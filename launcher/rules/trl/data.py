"""Rules about the data and templates that a TRL stage names: do they lie here, and as what?"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.artifacts import model_config, rows
from launcher.errors import Finding, brief
from launcher.paths import exists, is_file
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import say
from launcher.rules.trl.resolved import prepared

_PAIRS = {"chosen", "rejected"}
# the last three are read in another way (trl/data_utils.py:927)
_EXAMPLES = ({"messages"}, {"prompt", "completion"}, {"conversations"}, {"input_ids"}, {"image"}, {"images"})


def _named(context: Context) -> str | None:
    """The data set that `load_dataset` would be asked for (trl/scripts/sft.py:96)."""
    values = context.values
    name = values["dataset_name"]
    return name if isinstance(name, str) and name and not values["datasets"] else None


def data_here(context: Context) -> Iterator[Finding]:
    """datasets/load.py:1061,1184."""
    name = _named(context)
    if name is None:
        return
    if is_file(Path(name)):
        message = f"`dataset_name: {brief(name)}` is a file, which cannot be loaded by its name"
        help = f"name its folder: `dataset_name: {Path(name).parent}`"
        yield say("error", "data-file", "dataset_name", message, help)
    elif context.running and model_config.is_path(name) and not exists(Path(name)):
        message = f"there is no folder {brief(name)} here"
        help = "relative paths start where launch is started; `~` is not expanded"
        yield say("error", "missing-data", "dataset_name", message, help)


def data_rows(context: Context) -> Iterator[Finding]:
    """datasets/packaged_modules/json/json.py:101: a file without rows ends the run in a StopIteration."""
    for file in rows.files_of_split(_named(context), "train"):
        if (what := rows.fault(file)) is not None:
            help = "correct the file, or take it out of the folder"
            yield say("error", "bad-data", "dataset_name", f"{brief(file)}: {what}", help)


def data_columns(context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1333,1375,1383, dpo_trainer.py:1063: columns are read by their names."""
    values, files = context.values, rows.files_of_split(_named(context), "train")
    if not files or values["dataset_train_split"] != "train" or prepared(values) or values["dataset_config"]:
        return
    text = str(values.get("dataset_text_field"))
    read = f"SFT reads `messages`, `prompt` and `completion`, or `{brief(text)}`"
    forms, other = [*_EXAMPLES, {text}], "name that of the text: `dataset_text_field: <column>`"
    if values.schema.pairs:
        read = "DPO reads `chosen` and `rejected`, with or without `prompt`"
        forms, other = [_PAIRS], "train on them with `stage: sft`"
    # a row that lacks a column has null there
    heads = [rows.columns(path) for path in files]
    names = frozenset[str]().union(*(head[1] for head in heads if head is not None))
    if None not in heads and names and not any(form <= names for form in forms):
        message = f"{brief(files[0])} has the columns {brief(', '.join(sorted(names)))}: {read}"
        help = f"rename the columns, or {other}"
        if names >= _PAIRS:
            help = "these are pairs: `stage: dpo` trains on them"
        yield say("error", "data-columns", "dataset_name", message, help)


def splits(context: Context) -> Iterator[Finding]:
    """trl/scripts/sft.py:106, trl/scripts/dpo.py:104: a split is looked up by its name."""
    for key in ("dataset_train_split", "dataset_test_split"):
        split, read = context.values[key], key != "dataset_test_split" or context.values["eval_strategy"] != "no"
        if read and _named(context) and isinstance(split, str) and re.search(r"[\[+]", split):
            message = f"`{key}: {brief(split)}` is looked up as the name of a split: parts cannot be named"
            yield say("error", "no-such-split", key, message, "name a whole split")


def template_here(context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:749: what is no template's file is a folder or a tokenizer of the hub."""
    name = context.values["chat_template_path"]
    if not context.running or not isinstance(name, str) or not name or exists(Path(name)):
        return
    if name.endswith((".jinja", ".j2")) or model_config.is_path(name):
        message = f"there is no template {brief(name)} here"
        help = "relative paths start where launch is started; `~` is not expanded"
        yield say("error", "missing-template", "chat_template_path", message, help)


def no_template(context: Context) -> Iterator[Finding]:
    """transformers/tokenization_utils_base.py:3271: conversations, and a tokenizer that cannot write them."""
    values, files = context.values, rows.files_of_split(_named(context), "train")
    model = values["model_name_or_path"]
    if not files or values.get("chat_template_path") or not _plain_tokenizer(model):
        return
    names = ("prompt", "chosen") if values.schema.pairs else ("messages", "prompt")
    row = (rows.columns(files[0]) or ({},))[0]
    if column := next((name for name in names if isinstance(row.get(name), list)), None):
        message = f"{brief(files[0])} holds conversations in `{column}`, and the tokenizer in {brief(model)} has no "
        help = "put a chat_template.jinja into the model's folder"
        if "chat_template_path" in values.schema.fields:
            help = "add `chat_template_path: <a template, or a model that has one>`"
        key = "model_name_or_path"
        yield say("error", "missing-template", key, f"{message}chat template to write them with", help)


def _plain_tokenizer(name: Any) -> bool:
    """Whether a folder has a tokenizer without a chat template; of the hub's cache parts may be missing."""
    folder = Path(str(name))
    config = folder / "tokenizer_config.json"
    named = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    try:
        if not is_file(config) or any(exists(folder / one) for one in named):
            return False
        return b'"chat_template"' not in config.read_bytes()
    except OSError:
        return False


RULES: tuple[StageRule, ...] = (data_here, data_rows, data_columns, splits, template_here, no_template)
