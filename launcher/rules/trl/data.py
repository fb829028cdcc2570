"""Rules about the data and templates that a TRL stage names: are they here, what do rows hold?"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.artifacts import chat_template, model_config
from launcher.dataset import mixture, reading, shapes, sources
from launcher.dataset.mixture import Piece, SetEntry
from launcher.errors import Finding, Severity, shorten
from launcher.lazy_dataclass import dataclass
from launcher.paths import exists, is_file
from launcher.rules import data
from launcher.rules.context import Context, StageRule
from launcher.rules.data import Looked
from launcher.rules.rule import cites, say
from launcher.rules.trl.mixture import STAGE_RULES, selected_columns
from launcher.rules.trl.resolved import prepared

_KEY = "dataset_name"
# trl/trainer/sft_trainer.py::SFTTrainer.__init__[self._is_vision_dataset =],
# trl/trainer/dpo_trainer.py::DPOTrainer.__init__[self._is_vision_dataset =]: rows with pictures are
# read in another way
_PICTURES = ("image", "images")
# trl/data_utils.py::is_conversational[True #2]: one of these, by chance, tells whether rows are
# conversations
_TELLING = ("prompt", "chosen", "rejected", "completion", "messages")
# the columns of which the trainer chooses what to read
_ANSWER_COLUMNS = frozenset({"messages", "conversations", "prompt", "completion", "text"})
_PAIR_COLUMNS = frozenset({"prompt", "chosen", "rejected"})
_TEMPLATES = (".jinja", ".j2")
_PAIRS_HELP = "these are pairs: `stage: dpo` trains on them"
_RELATIVE = "relative paths start where launch is started; `~` is not expanded"


def _find_data_set(context: Context) -> str | None:
    """The data set that `load_dataset` would be asked for
    (trl/scripts/sft.py::main[dataset = load_dataset]).
    """
    name = context.values[_KEY]
    if not name or not isinstance(name, str) or context.values["datasets"]:
        return None
    return name


@cites(
    "datasets/load.py::dataset_module_factory[elif os.path.isdir]",
    "datasets/load.py::dataset_module_factory[raise FileNotFoundError(f]",
)
def data_here(context: Context) -> Iterator[Finding]:
    name = _find_data_set(context)
    if name is None:
        return
    if is_file(Path(name)):
        message = f"`{_KEY}: {shorten(name)}` is a file, which cannot be loaded by its name"
        folder = str(Path(name).parent)
        if folder == ".":
            folder = "./"
        yield say("error", "data-file", _KEY, message, f"name its folder: `{_KEY}: {folder}`")
    elif name in sources.LOADERS:
        yield from data.loader_name(_KEY, name)
    elif _looks_like_list(name):
        yield _report_bad_name(_KEY, name)
    elif not exists(Path(name)) and _is_local(name):
        what = "folder"
        if _has_data_suffix(name):
            what = "file"
        yield say(
            context.at_start,
            "missing-data",
            _KEY,
            f"there is no {what} {shorten(name)} here",
            _RELATIVE,
        )


@cites("datasets/data_files.py::resolve_pattern[raise FileNotFoundError]")
def sets_here(context: Context) -> Iterator[Finding]:
    """The same of the sets of a mixture, and of their files."""
    for entry in mixture.parse_entries(context.values["datasets"]):
        key = f"{entry.key}.path"
        if is_file(Path(entry.path)):
            message = (
                f"`{key}: {shorten(entry.path)}` is a file, which cannot be loaded by its name"
            )
            reader = sources.find_reader(Path(entry.path))
            help = "name its folder"
            if reader is not None:
                help = f"write `path: {reader}` and `data_files: {entry.path}`, or name its folder"
            yield say("error", "data-file", key, message, help)
        elif entry.path in sources.LOADERS and entry.data_files is None and entry.data_dir is None:
            yield from data.loader_name(key, entry.path)
        elif _looks_like_list(entry.path):
            yield _report_bad_name(key, entry.path)
        else:
            yield from _check_missing_files(entry, context)


def _check_missing_files(entry: SetEntry, context: Context) -> Iterator[Finding]:
    key = "path"
    missing: tuple[str, ...] = (entry.path,)
    if exists(Path(entry.path)) or not _is_local(entry.path) or entry.path in sources.LOADERS:
        key = _find_files_key(entry)
        missing = entry.source(entry.first_split(), context.environ).missing
    what = "folder"
    if key == "data_files":
        what = "file"
    for name in missing:
        message = f"there is no {what} {shorten(name)} here"
        help = _RELATIVE
        if os.path.isdir(name):
            message = f"`data_files` names files, and {shorten(name)} is a folder"
            help = f"write `data_dir: {name}`, or `data_files: {os.path.join(name, '*')}`"
        elif entry.data_dir is not None:
            help = "the names of `data_files` start in `data_dir`"
        yield say(context.at_start, "missing-data", f"{entry.key}.{key}", message, help)


def _find_files_key(entry: SetEntry) -> str:
    """The key of an entry that names its files."""
    if entry.data_files is not None:
        return "data_files"
    if entry.data_dir is not None:
        return "data_dir"
    return "path"


# huggingface_hub refuses any other character in a name (huggingface_hub/utils/_validators.py:
# REPO_ID_REGEX)
_NAME_ON_HUB = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


def _looks_like_list(name: str) -> bool:
    """Whether a name that is nothing on this disk is YAML in quotes, or nothing at all."""
    text = name.strip()
    return not text or (text[0] in "[{" and not exists(Path(name)))


def _report_bad_name(key: str, name: str) -> Finding:
    if not name.strip():
        return say(
            "error",
            "bad-dataset",
            key,
            f"`{key}` is empty",
            "name a folder, or a data set on the hub",
        )
    message = f"`{key}: {shorten(name)}` is text: all of it is taken for the name of one data set"
    help = "for a list leave out the quotes: `datasets: [{path: a/b}, {path: c/d}]`"
    return say("error", "bad-dataset", key, message, help)


def _is_local(name: str) -> bool:
    """Whether a name can only be a path: that of no data set on the hub, and of no bucket there."""
    if name.startswith(("hf://", "buckets/")):
        return False
    if _NAME_ON_HUB.fullmatch(name) is None:
        return True
    return model_config.is_path(name) or _has_data_suffix(name)


def _has_data_suffix(name: str) -> bool:
    return reading.find_data_suffix(Path(name)) in reading.READABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Rows that a stage trains on: all of one source, or a piece of a set, named by `key`."""

    key: str
    piece: Piece
    entry: SetEntry | None = None

    @property
    def source(self) -> sources.Source:
        return self.piece.source

    def whole(self) -> Looked:
        """All rows of its files, which `datasets` reads whichever of them are trained on."""
        return data.looked_at(self.key, self.source)

    def trained(self) -> Looked:
        """The rows that are trained on, in the columns that are selected."""
        columns = None
        if self.entry is not None:
            columns = self.entry.columns
        return Looked(key=self.key, source=self.source, survey=self.piece.survey(columns))


def _list_parts(context: Context) -> list[_Part]:
    """The rows that are trained on; none where the command line names them in another way."""
    values = context.values
    if prepared(values):
        return []
    parts: list[_Part] = []
    mixed = mixture.read_mixture(values, context.environ)
    if mixed is not None:
        for part in mixed.sets:
            parts += [
                _Part(key=part.entry.key, piece=piece, entry=part.entry) for piece in part.pieces
            ]
        return parts
    source = _find_source(context)
    if source is not None:
        parts.append(_Part(key=_KEY, piece=Piece(source=source, rows=None)))
    return parts


def _find_source(context: Context) -> sources.Source | None:
    """The rows that `dataset_name` gives; None where it names none, or none that are here."""
    values = context.values
    name = _find_data_set(context)
    split = values["dataset_train_split"]
    if name is None or is_file(Path(name)) or name in sources.LOADERS:
        return None
    if not isinstance(split, str) or _is_slice(split):
        return None
    if not exists(Path(name)) and _is_local(name):
        return None
    return sources.find_named_source(name, split, values["dataset_config"], context.environ)


def _is_slice(split: str) -> bool:
    """Whether a text names a part of a split, or several of them."""
    return "[" in split or "+" in split


def _look_at_parts(context: Context) -> list[Looked]:
    """What is trained on, as far as there are rows to look at."""
    looked = [part.trained() for part in _list_parts(context) if part.source.files]
    return [rows for rows in looked if rows.survey.rows]


@cites("datasets/packaged_modules/json/json.py::Json._split_generators[pa_table = next]")
def data_rows(context: Context) -> Iterator[Finding]:
    """A file without rows ends the run in a StopIteration."""
    for part in _list_parts(context):
        yield from data.unseen(part.key, part.source, context)
        if part.source.files:
            whole = part.whole()
            yield from data.readable(whole)
            yield from data.same_columns(whole)
            yield from data.copies(part.trained())
            if part.entry is not None and whole.survey.rows:
                yield from selected_columns(part.entry, whole.survey.columns)


@cites(
    "trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[in example:]",
    "trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[messages]",
    "trl/trainer/sft_trainer.py::"
    "SFTTrainer._prepare_dataset.tokenize_fn[processing_class, example #2]",
    "trl/trainer/dpo_trainer.py::DPOTrainer._prepare_dataset.add_eos[if not example #1]",
)
def data_columns(context: Context) -> Iterator[Finding]:
    """Columns are read by their names."""
    for looked in _look_at_parts(context):
        columns = looked.survey.columns
        if columns.intersection(_PICTURES):
            yield from _check_pictures(looked, context)
        elif context.values.schema.pairs:
            yield from _check_pairs(looked, context)
        elif "input_ids" in columns:
            yield from _check_tokens(looked, context)
        else:
            yield from _check_answer_rows(looked, context)


@cites(
    "trl/scripts/utils.py::get_dataset[datasets.concatenate_datasets]",
    "datasets/features/features.py::_check_if_features_can_be_aligned[The features can]",
)
def like_sets(context: Context) -> Iterator[Finding]:
    """Sets are put behind each other, and columns that one lacks are filled with nulls.

    Columns of one name and different types are refused.
    """
    sets = _look_at_parts(context)
    if not sets:
        return
    first = sets[0]
    read = _ANSWER_COLUMNS
    if context.values.schema.pairs:
        read = _PAIR_COLUMNS
    for looked in sets[1:]:
        for name in sorted(read & (first.survey.columns | looked.survey.columns)):
            kind = looked.survey.kind(name)
            kind_of_first = first.survey.kind(name)
            if kind == kind_of_first or looked.key == first.key:
                continue
            message = f"`{name}` is {_describe_kind(kind)} in `{looked.key}` "
            message += f"and {_describe_kind(kind_of_first)} in `{first.key}`"
            help = (
                "sets of one mixture need the same columns: convert one of them, or select "
                "`columns`"
            )
            yield looked.say("error", "data-columns", message, help)


def _describe_kind(kind: str | None) -> str:
    if kind is None:
        return "missing"
    return data.ARTICLES.get(kind, kind)


def _check_pictures(looked: Looked, context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py::SFTTrainer.__init__[if self._is_vision_dataset and not],
    trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if self._is_vision_dataset and not]: the columns
    alone count, even where they are empty.
    """
    if data.takes_pictures(context.values["model_name_or_path"], context) is not False:
        return
    column = next(name for name in _PICTURES if name in looked.survey.columns)
    model = shorten(str(context.values["model_name_or_path"]))
    message = (
        f"the rows have a column `{column}`, and {model} takes text alone: TRL refuses such rows"
    )
    yield looked.say(
        "error",
        "data-columns",
        message,
        f"leave out `{column}`, or train a model that sees pictures",
    )


def _check_tokens(looked: Looked, context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[is_processed =],
    trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[Build a]: rows that are tokenised are
    cut and filtered, and nothing else.
    """
    survey = looked.survey
    values = context.values
    if survey.kind("input_ids") != "list":
        message = (
            "`input_ids` holds no lists of numbers: rows with this column are taken as tokenised"
        )
        yield looked.say("error", "data-types", message, "rename the column")
        return
    beside = [name for name in ("labels", "completion_mask") if name in survey.columns]
    yield from data.same_kinds(looked, ["input_ids", *beside], "list")
    yield from data.empty_lists(looked, ["input_ids"])
    for name in ("input_ids", *beside):
        for kind, tally in survey.named(name, "items:").items():
            if kind != "number":
                item = data.ARTICLES.get(kind, kind)
                message = (
                    f"`{name}` is a list with {item} instead of a number in {looked.share(tally)}"
                )
                yield looked.say("error", "data-types", message, "write one list of numbers a row")
    for name in ("labels", "completion_mask", "assistant_masks"):
        other = survey.fact(name, "other-length")
        if other is not None:
            message = f"`{name}` is not as long as `input_ids` in {looked.share(other)}"
            yield looked.say("error", "data-types", message, "write a value for each token")
    masked = survey.fact("labels", "masked")
    if masked is not None:
        severity: Severity = "warning"
        if masked.count == survey.rows:
            severity = "error"
        message = (
            f"all `labels` are -100 in {looked.share(masked)}: nothing is trained on, TRL drops "
            "them"
        )
        help = "leave the labels of the answer as they are, or take them out"
        yield looked.say(severity, "no-answers", message, help)
    unread = "completion_mask" in survey.columns and values.get("completion_only_loss") is not True
    if unread and "labels" not in survey.columns:
        message = "`completion_mask` is not read beside `input_ids`: every token is trained on"
        yield looked.say(
            "warning",
            "data-columns",
            message,
            "add `completion_only_loss: true`, or write `labels`",
        )


def _check_answer_rows(looked: Looked, context: Context) -> Iterator[Finding]:
    """The rows of SFT: conversations, a prompt with its completion, or a text."""
    survey = looked.survey
    values = context.values
    text = str(values.get("dataset_text_field"))
    chats = "messages"
    if survey.kind("conversations") == "list" and survey.count("conversations", "from-value"):
        # these alone are converted (trl/data_utils.py::is_conversational_from_value)
        chats = "conversations"
    yield from _check_labels(looked)
    model = values["model_name_or_path"]
    written = data.tokenizer_template(model, values.get("chat_template_path"), context)
    if "prompt" in survey.columns:
        if "completion" not in survey.columns:
            yield _report_without_completion(looked)
            return
        read = ["prompt", "completion"]
        yield from _check_alike(looked, read)
        yield from data.repeated_prompts(looked, ["completion"])
        yield from data.empty_answers(looked, ["completion"])
        yield from data.empty_prompts(looked, ["prompt"])
        yield from data.messages_as_text(looked, read)
        yield from _check_template(looked, "completion", written)
        yield from _check_one_form(looked, read)
        if text in survey.columns and survey.kind("completion") == "text":
            message = (
                f"`{text}` stands beside `completion`: TRL adds the end token to `{text}`, and to "
                "no completion"
            )
            help = f"leave out `{text}`, or the model never learns to stop"
            yield looked.say("error", "data-columns", message, help)
    elif survey.kind(chats) == "list" and (
        chats == "conversations" or not survey.count(chats, "from-value")
    ):
        read = [chats]
        yield from _check_one_form(looked, read)
        yield from data.same_kinds(looked, read, "list")
        yield from _check_answers(looked, chats, values.get("assistant_only_loss") is True)
        yield from data.empty_answers(looked, read)
    elif text in survey.columns:
        read = [text]
        yield from data.same_kinds(looked, read, "text")
        yield from data.empty_answers(looked, read)
        yield from data.messages_as_text(looked, read)
        yield from data.doubled_bos(looked, read, model, context)
        yield from _check_single_messages(looked, text)
        yield from _check_one_form(looked, read)
    else:
        yield _report_without_answers(looked, text)
        return
    yield from data.unreadable_messages(looked, read)
    yield from data.empty_prompts(looked, [name for name in read if survey.kind(name) == "list"])
    yield from data.conversations(looked, read)
    yield from data.unread_weights(looked, read)
    yield from data.unlike_messages(looked, read)
    yield from data.unwritten_tools(looked, read, written)
    yield from _check_beside(looked)
    yield from data.other_kinds(looked, [*read, "tools", "chat_template_kwargs"])


def _report_without_completion(looked: Looked) -> Finding:
    survey = looked.survey
    if not {"chosen", "rejected"} <= survey.columns:
        help = data.convertible(looked, "add `completion`, or leave out `prompt`")
    elif survey.kind("messages") == "list":
        help = f"{_PAIRS_HELP}; for SFT on `messages` leave out `prompt`"
    else:
        help = _PAIRS_HELP
    message = _describe_columns(
        looked, "`prompt` is read together with `completion`, which is not there"
    )
    return looked.say("error", "data-columns", message, help)


def _report_without_answers(looked: Looked, text: str) -> Finding:
    help = _PAIRS_HELP
    if shapes.find_pair_columns(looked.survey) is None:
        otherwise = "rename the columns, or name that of the text: `dataset_text_field: <column>`"
        help = data.convertible(looked, otherwise)
    expected = f"SFT reads `messages`, `prompt` and `completion`, or `{shorten(text)}`"
    return looked.say("error", "data-columns", _describe_columns(looked, expected), help)


def _check_labels(looked: Looked) -> Iterator[Finding]:
    """Columns that TRL takes for something else, or that say which answers are not to be learnt."""
    survey = looked.survey
    if "labels" in survey.columns:
        # trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[column_names = get_dataset_column_names #3]:  # noqa: E501 - one citation
        # labels that are there are left as they are
        message = "TRL takes the column `labels` for the labels of the tokens, and trains on them"
        yield looked.say("error", "data-columns", message, "rename the column, or leave it out")
    bad = survey.fact("label", "false")
    if bad is not None and shapes.is_labelled(survey):
        message = (
            f"`label` is false in {looked.share(bad)}: SFT trains on these answers too, as on any "
            "other"
        )
        yield looked.say(
            "warning", "data-columns", message, "take out the rows whose answer is bad"
        )


def _check_single_messages(looked: Looked, text: str) -> Iterator[Finding]:
    """Conversations that are spread over rows, as OASST has them."""
    survey = looked.survey
    if survey.kind("role") == "text" and survey.kind("parent_id") is not None:
        message = (
            f"each row is one message (`role`, `parent_id`), and TRL trains on `{text}` alone, row "
            "by row"
        )
        yield looked.say(
            "warning", "data-columns", message, "write each conversation as one row of `messages`"
        )


def _check_one_form(looked: Looked, read: Sequence[str]) -> Iterator[Finding]:
    """trl/data_utils.py::is_conversational[True #2]: TRL asks one of these columns, by chance,
    whether the rows are conversations.
    """
    survey = looked.survey
    names = " and ".join(f"`{column}`" for column in read)
    is_chat = any(survey.kind(name) == "list" for name in read if name in _TELLING)
    what = "is a list"
    if is_chat:
        what = "is no list"
    for name in _TELLING:
        if name in read or name not in survey.columns:
            continue
        if (survey.kind(name) == "list") is not is_chat:
            message = f"`{name}` {what} of messages, unlike {names}: "
            message += "TRL asks either whether the rows are conversations"
            help = f"leave out `{name}`: which column it asks changes from run to run"
            yield looked.say("error", "data-columns", message, help)


def _check_pairs(looked: Looked, context: Context) -> Iterator[Finding]:
    """The rows of DPO: two answers, with their prompt beside them or at the start of both."""
    survey = looked.survey
    if not {"chosen", "rejected"} <= survey.columns:
        expected = "DPO reads `chosen` and `rejected`, with or without `prompt`"
        yield looked.say(
            "error", "data-columns", _describe_columns(looked, expected), _explain_pairs(looked)
        )
        return
    read = [name for name in ("prompt", "chosen", "rejected") if name in survey.columns]
    if survey.kind("chosen") == "object":
        message = "`chosen` and `rejected` are single messages: DPO reads lists of messages"
        yield looked.say(
            "error", "data-columns", message, data.convertible(looked, "put each into a list")
        )
        return
    if any(survey.count(name, "from-value") for name in read):
        message = (
            "`chosen` and `rejected` are messages with `from` and `value`: DPO reads `role` and "
            "`content`"
        )
        help = data.convertible(looked, "rename them")
        yield looked.say("error", "data-columns", message, help)
        return
    unlike = list(_check_alike(looked, read))
    yield from unlike
    if not unlike:
        yield from _check_prompts(looked)
        yield from _check_one_form(looked, read)
        yield from _check_turns(looked)
    yield from data.repeated_prompts(looked, ["chosen", "rejected"])
    yield from data.equal_pairs(looked)
    yield from data.empty_answers(looked, ["chosen", "rejected"])
    yield from data.empty_prompts(looked, ["prompt"])
    yield from data.messages_as_text(looked, ["chosen"])
    yield from data.unreadable_messages(looked, read)
    yield from data.conversations(looked, read)
    yield from data.unlike_messages(looked, read)
    written = data.tokenizer_template(context.values["model_name_or_path"], None, context)
    yield from _check_template(looked, "chosen", written)
    yield from data.unwritten_tools(looked, read, written)
    yield from _check_beside(looked)
    yield from data.other_kinds(looked, [*read, "tools", "chat_template_kwargs"])


def _explain_pairs(looked: Looked) -> str:
    survey = looked.survey
    if shapes.is_labelled(survey):
        help = "these are answers with a `label`, as KTO reads them: "
        return help + "DPO needs a good and a bad answer to each question"
    if survey.kind("messages") == "list" or {"prompt", "completion"} <= survey.columns:
        return "these are single answers: `stage: sft` trains on them"
    if shapes.find_pair_columns(survey) is None:
        return "name the column of the better answer `chosen`, and that of the worse one `rejected`"
    return data.convertible(looked, "rename the columns")


def _check_turns(looked: Looked) -> Iterator[Finding]:
    """Turns of the user in what DPO compares: they count in the loss as the answer does."""
    survey = looked.survey
    for name in ("chosen", "rejected"):
        silent = survey.fact(name, "no-answer")
        last = survey.fact(name, "ends-with:user")
        first = survey.fact(name, "starts-with:user")
        if silent is not None:
            message = f"`{name}` has no message of `assistant` in {looked.share(silent)}"
            yield looked.say(
                "warning", "no-answers", message, "take these rows out, or correct their roles"
            )
        elif last is not None:
            message = f"`{name}` ends with a message of `user` in {looked.share(last)}, "
            message += "which counts as the answer does"
            yield looked.say(
                "warning", "odd-roles", message, "end both conversations with the answer"
            )
        elif (
            first is not None
            and "prompt" in survey.columns
            and survey.fact("", "prompt-twice") is None
        ):
            message = f"`{name}` begins with a message of `user` in {looked.share(first)}, "
            message += "which counts as the answer does"
            yield looked.say(
                "warning", "odd-roles", message, "move the question to the end of `prompt`"
            )


def _check_beside(looked: Looked) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[tools = json.loads],
    trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[**example.get],
    trl/trainer/dpo_trainer.py::DPOTrainer._prepare_dataset.tokenize_fn[tools = json.loads]: what is
    read beside the messages.
    """
    survey = looked.survey
    broken = survey.fact("tools", "not-json") or survey.fact("tools", "empty")
    if broken is not None:
        message = f"`tools` is text that is not JSON in {looked.share(broken)}"
        yield looked.say(
            "error",
            "data-types",
            message,
            "write a list of tools as JSON, `[]` where there are none",
        )
    odd = survey.fact("tools", "no-list") or survey.fact("tools", "items:text")
    odd = odd or survey.kinds.get(("tools", "object"))
    if odd is not None:
        message = f"`tools` is no list of objects in {looked.share(odd)}"
        yield looked.say(
            "error", "data-types", message, "write a list of tools, each an object with its name"
        )
    if "chat_template_kwargs" in survey.columns:
        yield from data.same_kinds(looked, ["chat_template_kwargs"], "object")


def _describe_columns(looked: Looked, expected: str) -> str:
    names = shorten(", ".join(_render_column(name) for name in sorted(looked.survey.columns)))
    return f"{shorten(str(looked.source.files[0]))} has the columns {names}: {expected}"


def _render_column(name: str) -> str:
    if name and name == name.strip():
        return name
    return f"`{name}`"


def _check_alike(looked: Looked, read: Sequence[str]) -> Iterator[Finding]:
    """Prompts and answers are added to each other: all texts, or all conversations
    (trl/data_utils.py::is_conversational).
    """
    kinds = {name: looked.survey.kind(name) or "null" for name in read}
    answer = "chosen"
    if "completion" in kinds:
        answer = "completion"
    if len(set(kinds.values())) > 1:
        held = ", ".join(f"`{name}` a {kind}" for name, kind in kinds.items())
        message = f"the columns do not go together: {held}; TRL adds them to each other"
        otherwise = "make them all texts, or all lists of messages"
        if kinds.get("prompt") == "null":
            otherwise = "leave out `prompt`: it is null in every row"
        help = data.convertible(looked, otherwise)
        yield looked.say("error", "data-columns", message, help)
    elif kinds[answer] not in ("text", "list"):
        message = (
            f"`{read[-1]}` holds values of the kind {kinds[read[-1]]}: it must be a text or a list "
            "of messages"
        )
        yield looked.say("error", "data-columns", message, "write the answers as text")
    else:
        yield from data.same_kinds(looked, read, kinds[read[0]])


def _check_prompts(looked: Looked) -> Iterator[Finding]:
    """trl/data_utils.py::extract_prompt: without `prompt`, what both answers have in common at
    their start is the prompt.
    """
    survey = looked.survey
    if "prompt" in survey.columns:
        return
    unread = shapes.find_prompt_columns(survey)
    alone = survey.fact("", "no-common-prompt")
    if survey.kind("chosen") == "list":
        bare = alone or survey.fact("chosen", "starts-with:assistant")
        if bare is not None:
            message = (
                f"there is no prompt in {looked.share(bare)}: `chosen` and `rejected` share no "
                "first message"
            )
            help = data.convertible(looked, "put the question into `prompt`, a list of messages")
            yield looked.say("error", "no-prompt", message, help)
    elif unread:
        names = " and ".join(f"`{name}`" for name in unread)
        message = f"{names} would not be read: the pairs would train without their prompt"
        help = data.convertible(looked, "rename the column of the question to `prompt`")
        yield looked.say("warning", "no-prompt", message, help)
    elif alone is not None:
        message = (
            f"there is no prompt in {looked.share(alone)}: `chosen` and `rejected` begin "
            "differently"
        )
        yield looked.say("warning", "no-prompt", message, "add a column `prompt`")


def _check_answers(looked: Looked, column: str, answers_only: bool) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[in output and 1]: a row
    of which nothing would be trained ends the run.
    """
    without = looked.survey.fact(column, "no-answer")
    if without is None:
        return
    message = f"`{column}` has no message of `assistant` in {looked.share(without)}"
    if answers_only:
        message += ", and `assistant_only_loss` trains on nothing else"
        help = "take these rows out"
        if data.has_renamed_answers(looked, column):
            help = data.convertible(looked, "rename the roles")
        yield looked.say("error", "no-answers", message, help)
    elif data.has_renamed_answers(looked, column):
        # `odd-roles` names the roles, and what to do about them
        return
    else:
        yield looked.say(
            "warning", "no-answers", message, "questions alone are trained on: take these rows out"
        )


def _check_template(looked: Looked, column: str, template: str | None) -> Iterator[Finding]:
    """Only lists of messages are written through the chat template."""
    # trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[if is_conversational(example #2]  # noqa: E501 - one citation
    if looked.survey.kind(column) == "text" and template:
        message = f"`{column}` is text: the model's chat template is not applied to it"
        help = "write messages (`role`, `content`) for a model that one talks to"
        severity: Severity = "note"
        if column == "chosen":
            severity = "warning"
        yield looked.say(severity, "no-chat-format", message, help)


@cites(
    "trl/scripts/sft.py::main[train_dataset=dataset]",
    "trl/scripts/dpo.py::main[train_dataset=dataset]",
)
def splits(context: Context) -> Iterator[Finding]:
    """A split is looked up by its name."""
    if _find_data_set(context) is None:
        return
    read = ["dataset_train_split"]
    if context.values["eval_strategy"] != "no":
        read.append("dataset_test_split")
    for key in read:
        split = context.values[key]
        if isinstance(split, str) and _is_slice(split):
            message = (
                f"`{key}: {shorten(split)}` is looked up as the name of a split: parts cannot be "
                "named"
            )
            yield say("error", "no-such-split", key, message, "name a whole split")


@cites(
    "trl/scripts/sft.py::main[eval_dataset=dataset]",
    "trl/scripts/dpo.py::main[eval_dataset=dataset]",
)
def test_split_here(context: Context) -> Iterator[Finding]:
    """A split that the data do not have is a KeyError.

    That is raised before the model is loaded. What the hub has is not known here.
    """
    values = context.values
    name = _find_data_set(context)
    split = values["dataset_test_split"]
    if (
        name is None
        or values["eval_strategy"] == "no"
        or not isinstance(split, str)
        or _is_slice(split)
    ):
        return
    names = sources.split_names(name, values["dataset_config"])
    if names is None or split in names:
        return
    message = (
        f"`eval_strategy: {values['eval_strategy']}` evaluates on the split {shorten(split)}, "
    )
    message += f"and {shorten(name)} has {', '.join(names)} alone"
    help = (
        f"put a file named {split} beside the others (such as {split}.jsonl), or write "
        '`eval_strategy: "no"`'
    )
    others = [other for other in names if other != values["dataset_train_split"]]
    if others:
        help = f"write `dataset_test_split: {others[0]}`"
    key = "eval_strategy"
    if values.given("dataset_test_split"):
        key = "dataset_test_split"
    yield say("error", "no-such-split", key, message, help)


@cites("trl/trainer/sft_trainer.py::SFTTrainer.__init__[if os.path.isfile]")
def template_here(context: Context) -> Iterator[Finding]:
    """What is no template's file is a folder or a tokenizer of the hub."""
    key = "chat_template_path"
    name = context.values.get(key)
    if not isinstance(name, str) or not name or exists(name):
        return
    if chat_template.is_template(name):
        message = f"`{key}` holds the text of a template, and TRL takes it for the name of one"
        yield say("error", "inline-template", key, message, chat_template.WRITE_IT)
    elif name.endswith(_TEMPLATES) or not model_config.is_hub_name(name):
        message = f"`{key}`: there is no template {shorten(name)} here"
        yield say("error", "missing-template", key, message, _RELATIVE)


@cites(
    "transformers/tokenization_utils_base.py::"
    "PreTrainedTokenizerBase.get_chat_template[Cannot use chat]"
)
def no_template(context: Context) -> Iterator[Finding]:
    """The rows are conversations, and the tokenizer has no chat template for them."""
    values = context.values
    model = values["model_name_or_path"]
    if values.get("chat_template_path") or data.tokenizer_template(model, None, context) != "":
        return
    names = ["messages", "prompt", "conversations"]
    if values.schema.pairs:
        names = ["prompt", "chosen"]
    for looked in _look_at_parts(context):
        column = next((name for name in names if looked.survey.kind(name) == "list"), None)
        if column is None:
            continue
        file = shorten(str(looked.source.files[0]))
        message = f"{file} holds conversations in `{column}`, and the tokenizer in "
        message += f"{shorten(model)} has no chat template to write them with"
        help = "put a chat_template.jinja into the model's folder"
        if "chat_template_path" in values.schema.fields:
            help = "add `chat_template_path: <a template, or a model that has one>`"
        key = "model_name_or_path"
        yield say("error", "missing-template", key, message, help)
        return


_BY_LENGTH = ("group_by_length", "batch_rebalance")


@cites(
    "transformers/trainer.py::Trainer._get_dataloader[sampler = sampler_fn]",
    "transformers/trainer_pt_utils.py::LengthGroupedSampler.__init__[Can only automatically infer]",
    "trl/trainer/dpo_trainer.py::"
    "DPOTrainer._set_signature_columns_if_needed[self._signature_columns = #2]",
)
def lengths_of_pairs(context: Context) -> Iterator[Finding]:
    """Rows of DPO have no `input_ids`, and a column with their lengths goes before it is read."""
    values = context.values
    strategy = values.get("train_sampling_strategy")
    if not values.schema.pairs or strategy not in _BY_LENGTH:
        return
    key = "train_sampling_strategy"
    column = values["length_column_name"]
    advice = f"add a column `{column}` with the length of each pair to the rows, "
    advice += "and write `remove_unused_columns: false`"
    if values["remove_unused_columns"] is not False:
        message = f"`{key}: {strategy}` needs the length of each pair, "
        message += "and TRL drops every column that DPO does not train on"
        yield say("error", "pair-lengths", key, message, advice)
        return
    for looked in _look_at_parts(context):
        if column not in looked.survey.columns:
            message = (
                f"`{key}: {strategy}` needs the length of each pair in a column `{column}`, and "
                "the rows lack it"
            )
            yield looked.say("error", "pair-lengths", message, advice)
    if strategy == "batch_rebalance":
        message = (
            f"`{key}: {strategy}` puts fewer pairs into a micro-batch the longer they are, and DPO "
            "weighs every micro-batch alike: a long pair counts more than a short one"
        )
        yield say(
            "warning", "unlike-micro-batches", key, message, f"write `{key}: group_by_length`"
        )


RULES: tuple[StageRule, ...] = (
    data_here,
    sets_here,
    data_rows,
    data_columns,
    like_sets,
    *STAGE_RULES,
    splits,
    test_split_here,
    template_here,
    no_template,
    lengths_of_pairs,
)
