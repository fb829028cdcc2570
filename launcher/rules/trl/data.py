"""Rules about the data and templates that a TRL stage names: do they lie here, and what do the rows hold?"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.artifacts import chat_template, model_config
from launcher.dataset import reading, shapes, sources
from launcher.errors import Finding, Severity, brief
from launcher.paths import exists, is_file
from launcher.rules import data
from launcher.rules.context import Context, StageRule
from launcher.rules.data import Looked
from launcher.rules.rule import say
from launcher.rules.trl.resolved import prepared

_KEY = "dataset_name"
_TEMPLATES = (".jinja", ".j2")
# read in another way, or not prepared at all (trl/trainer/sft_trainer.py:762,1248)
_OTHER_FORMS = frozenset({"input_ids", "image", "images"})


def _named(context: Context) -> str | None:
    """The data set that `load_dataset` would be asked for (trl/scripts/sft.py:96)."""
    values = context.values
    name = values[_KEY]
    return name if isinstance(name, str) and name and not values["datasets"] else None


def data_here(context: Context) -> Iterator[Finding]:
    """datasets/load.py:1061,1184."""
    name = _named(context)
    if name is None:
        return
    if is_file(Path(name)):
        message = f"`dataset_name: {brief(name)}` is a file, which cannot be loaded by its name"
        folder = Path(name).parent
        help = f"name its folder: `dataset_name: {folder if str(folder) != '.' else './'}`"
        yield say("error", "data-file", _KEY, message, help)
    elif name in sources.LOADERS:
        yield from data.loader_name(_KEY, name)
    elif not exists(Path(name)) and _is_local(name):
        what = "file" if reading.data_suffix(Path(name)) in reading.READABLE else "folder"
        message = f"there is no {what} {brief(name)} here"
        help = "relative paths start where launch is started; `~` is not expanded"
        yield say(context.at_start, "missing-data", _KEY, message, help)


def _is_local(name: str) -> bool:
    """Whether a name can only be a path: that of no data set on the hub."""
    return model_config.is_path(name) or reading.data_suffix(Path(name)) in reading.READABLE


def _source(context: Context) -> sources.Source | None:
    """The rows that are trained on; None where the command line names them in another way."""
    values = context.values
    name, split = _named(context), values["dataset_train_split"]
    if name is None or is_file(Path(name)) or name in sources.LOADERS or prepared(values):
        return None
    if not isinstance(split, str) or re.search(r"[\[+]", split):
        return None
    if not exists(Path(name)) and _is_local(name):
        return None
    return sources.of_name(name, split, values["dataset_config"], context.environ)


def _looked_at(context: Context) -> Looked | None:
    source = _source(context)
    return data.looked_at(_KEY, source) if source is not None and source.files else None


def data_rows(context: Context) -> Iterator[Finding]:
    """datasets/packaged_modules/json/json.py:101: a file without rows ends the run in a StopIteration."""
    source = _source(context)
    if source is None:
        return
    yield from data.unseen(_KEY, source, context)
    if source.files:
        looked = data.looked_at(_KEY, source)
        yield from data.readable(looked)
        yield from data.same_columns(looked)
        yield from data.copies(looked)


def data_columns(context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1322,1375,1383, dpo_trainer.py:1063: columns are read by their names."""
    looked = _looked_at(context)
    if looked is None or not looked.survey.rows or looked.survey.columns & _OTHER_FORMS:
        return
    if context.values.schema.pairs:
        yield from _pairs(looked, context)
    else:
        yield from _answers(looked, context)


def _answers(looked: Looked, context: Context) -> Iterator[Finding]:
    """The rows of SFT: conversations, a prompt with its completion, or a text."""
    survey, values = looked.survey, context.values
    text = str(values.get("dataset_text_field"))
    chats = "messages"
    if survey.kind("conversations") == "list" and survey.count("conversations", "from-value"):
        # these alone are converted (trl/data_utils.py:927)
        chats = "conversations"
    model, template = values["model_name_or_path"], values.get("chat_template_path")
    written = data.tokenizer_template(model, template, context)
    if "prompt" in survey.columns:
        if "completion" not in survey.columns:
            message = _columns_message(looked, "`prompt` is read together with `completion`, which is not there")
            help = "add `completion`, or leave out `prompt`"
            yield looked.say("error", "data-columns", message, data.convertible(looked, help))
            return
        read = ["prompt", "completion"]
        yield from _alike(looked, read)
        yield from data.repeated_prompts(looked, ["completion"])
        yield from data.empty_answers(looked, ["completion"])
        yield from data.empty_prompts(looked, ["prompt"])
        yield from data.messages_as_text(looked, read)
        yield from _untemplated(looked, "completion", written)
    elif survey.kind(chats) == "list" and (chats == "conversations" or not survey.count(chats, "from-value")):
        read = [chats]
        yield from data.same_kinds(looked, read, "list")
        yield from _unanswered(looked, chats, values["assistant_only_loss"] is True)
        yield from data.empty_answers(looked, read)
    elif text in survey.columns:
        read = [text]
        yield from data.same_kinds(looked, read, "text")
        yield from data.empty_answers(looked, read)
        yield from data.messages_as_text(looked, read)
        yield from data.doubled_bos(looked, read, model, context)
    else:
        wanted = f"SFT reads `messages`, `prompt` and `completion`, or `{brief(text)}`"
        help = "rename the columns, or name that of the text: `dataset_text_field: <column>`"
        if {"chosen", "rejected"} <= survey.columns:
            help = "these are pairs: `stage: dpo` trains on them"
        else:
            help = data.convertible(looked, help)
        yield looked.say("error", "data-columns", _columns_message(looked, wanted), help)
        return
    yield from data.conversations(looked, read)
    yield from data.unlike_messages(looked, read)
    yield from data.unwritten_tools(looked, read, written)
    yield from _beside(looked)
    yield from data.other_kinds(looked, [*read, "tools", "chat_template_kwargs"])


def _pairs(looked: Looked, context: Context) -> Iterator[Finding]:
    """The rows of DPO: two answers, with their prompt beside them or at the start of both."""
    survey, values = looked.survey, context.values
    if not {"chosen", "rejected"} <= survey.columns:
        help = "rename the columns"
        if survey.kind("messages") == "list" or {"prompt", "completion"} <= survey.columns:
            help = "these are single answers: `stage: sft` trains on them"
        wanted = "DPO reads `chosen` and `rejected`, with or without `prompt`"
        yield looked.say("error", "data-columns", _columns_message(looked, wanted), help)
        return
    read = [name for name in ("prompt", "chosen", "rejected") if name in survey.columns]
    foreign = any(survey.count(name, "from-value") for name in read) or survey.kind("chosen") == "object"
    if foreign:
        message = "`chosen` and `rejected` are messages with `from` and `value`: DPO reads `role` and `content`"
        help = data.convertible(looked, "rename them")
        yield looked.say("error", "data-columns", message, help)
        return
    unlike = list(_alike(looked, read))
    yield from unlike
    if not unlike:
        yield from _promptless(looked)
    yield from data.repeated_prompts(looked, ["chosen", "rejected"])
    yield from data.equal_pairs(looked)
    yield from data.empty_answers(looked, ["chosen", "rejected"])
    yield from data.empty_prompts(looked, ["prompt"])
    yield from data.messages_as_text(looked, ["chosen"])
    yield from data.conversations(looked, read)
    yield from data.unlike_messages(looked, read)
    written = data.tokenizer_template(values["model_name_or_path"], None, context)
    yield from _untemplated(looked, "chosen", written)
    yield from data.unwritten_tools(looked, read, written)
    yield from _beside(looked)
    yield from data.other_kinds(looked, [*read, "tools", "chat_template_kwargs"])


def _beside(looked: Looked) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1316,1320, dpo_trainer.py:1077: what is read beside the messages."""
    broken = looked.survey.fact("tools", "not-json") or looked.survey.fact("tools", "empty")
    if broken is not None:
        message = f"`tools` is text that is not JSON in {looked.share(broken)}"
        yield looked.say("error", "data-types", message, "write a list of tools as JSON, `[]` where there are none")
    if "chat_template_kwargs" in looked.survey.columns:
        yield from data.same_kinds(looked, ["chat_template_kwargs"], "object")


def _columns_message(looked: Looked, wanted: str) -> str:
    names = brief(", ".join(sorted(looked.survey.columns)))
    return f"{brief(str(looked.source.files[0]))} has the columns {names}: {wanted}"


def _alike(looked: Looked, read: Sequence[str]) -> Iterator[Finding]:
    """Prompts and answers are added to each other: all texts, or all conversations (trl/data_utils.py:126)."""
    kinds = {name: looked.survey.kind(name) or "null" for name in read}
    if len(set(kinds.values())) > 1:
        held = ", ".join(f"`{name}` a {kind}" for name, kind in kinds.items())
        message = f"the columns do not go together: {held}; TRL adds them to each other"
        otherwise = "make them all texts, or all lists of messages"
        help = data.convertible(looked, otherwise)
        yield looked.say("error", "data-columns", message, help)
    elif kinds["completion" if "completion" in kinds else "chosen"] not in ("text", "list"):
        message = f"`{read[-1]}` holds values of the kind {kinds[read[-1]]}: it must be a text or a list of messages"
        yield looked.say("error", "data-columns", message, "write the answers as text")
    else:
        yield from data.same_kinds(looked, read, kinds[read[0]])


def _promptless(looked: Looked) -> Iterator[Finding]:
    """trl/data_utils.py:548: without `prompt`, what both answers have in common at their start is the prompt."""
    survey = looked.survey
    if "prompt" in survey.columns:
        return
    unread = shapes.prompt_columns(survey)
    alone = survey.fact("", "no-common-prompt")
    if survey.kind("chosen") == "list":
        answers = survey.fact("chosen", "starts-with:assistant")
        bare = alone or answers
        if bare is not None:
            message = f"there is no prompt in {looked.share(bare)}: `chosen` and `rejected` share no first message"
            otherwise = "put the question into `prompt`, a list of messages"
            help = data.convertible(looked, otherwise)
            yield looked.say("error", "no-prompt", message, help)
    elif unread:
        names = " and ".join(f"`{name}`" for name in unread)
        message = f"{names} would not be read: the pairs would train without their prompt"
        help = data.convertible(looked, "rename the column of the question to `prompt`")
        yield looked.say("warning", "no-prompt", message, help)
    elif alone is not None:
        message = f"there is no prompt in {looked.share(alone)}: `chosen` and `rejected` begin differently"
        yield looked.say("warning", "no-prompt", message, "add a column `prompt`")


def _unanswered(looked: Looked, column: str, answers_only: bool) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1387: a row of which nothing would be trained ends the run."""
    without = looked.survey.fact(column, "no-answer")
    if without is None:
        return
    message = f"`{column}` has no message of `assistant` in {looked.share(without)}"
    if answers_only:
        message += ", and `assistant_only_loss` trains on nothing else"
        yield looked.say("error", "no-answers", message, "take these rows out")
    else:
        yield looked.say("warning", "no-answers", message, "questions alone are trained on: take these rows out")


def _untemplated(looked: Looked, column: str, template: str | None) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1372: only lists of messages are written through the chat template."""
    if looked.survey.kind(column) == "text" and template:
        message = f"`{column}` is text: the model's chat template is not applied to it"
        help = "write messages (`role`, `content`) for a model that one talks to"
        severity: Severity = "warning" if column == "chosen" else "note"
        yield looked.say(severity, "no-chat-format", message, help)


def splits(context: Context) -> Iterator[Finding]:
    """trl/scripts/sft.py:106, trl/scripts/dpo.py:104: a split is looked up by its name."""
    for key in ("dataset_train_split", "dataset_test_split"):
        split, read = context.values[key], key != "dataset_test_split" or context.values["eval_strategy"] != "no"
        if read and _named(context) and isinstance(split, str) and re.search(r"[\[+]", split):
            message = f"`{key}: {brief(split)}` is looked up as the name of a split: parts cannot be named"
            yield say("error", "no-such-split", key, message, "name a whole split")


def template_here(context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:749: what is no template's file is a folder or a tokenizer of the hub."""
    key = "chat_template_path"
    name = context.values[key]
    if not isinstance(name, str) or not name or exists(name):
        return
    if chat_template.is_template(name):
        message = f"`{key}` holds the text of a template, and TRL takes it for the name of one"
        yield say("error", "inline-template", key, message, chat_template.WRITE_IT)
    elif name.endswith(_TEMPLATES) or not model_config.is_hub_name(name):
        message = f"`{key}`: there is no template {brief(name)} here"
        help = "relative paths start where launch is started; `~` is not expanded"
        yield say("error", "missing-template", key, message, help)


def no_template(context: Context) -> Iterator[Finding]:
    """transformers/tokenization_utils_base.py:3271: conversations, and a tokenizer that cannot write them."""
    values, looked = context.values, _looked_at(context)
    model = values["model_name_or_path"]
    if looked is None or values.get("chat_template_path") or data.tokenizer_template(model, None, context) != "":
        return
    names = ("prompt", "chosen") if values.schema.pairs else ("messages", "prompt", "conversations")
    column = next((name for name in names if looked.survey.kind(name) == "list"), None)
    if column is not None:
        file = brief(str(looked.source.files[0]))
        message = f"{file} holds conversations in `{column}`, and the tokenizer in {brief(model)} has no "
        help = "put a chat_template.jinja into the model's folder"
        if "chat_template_path" in values.schema.fields:
            help = "add `chat_template_path: <a template, or a model that has one>`"
        key = "model_name_or_path"
        yield say("error", "missing-template", key, f"{message}chat template to write them with", help)


RULES: tuple[StageRule, ...] = (data_here, data_rows, data_columns, splits, template_here, no_template)
