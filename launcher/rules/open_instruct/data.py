"""What the rows of open-instruct's data hold, and how long tokenising makes processes wait."""

import math
from collections.abc import Iterator
from pathlib import Path

from launcher.dataset import shapes, sources
from launcher.dataset.mixer import LOCAL_SUFFIXES, count_entry_rows
from launcher.errors import Finding, shorten
from launcher.paths import is_file
from launcher.rules import data
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.data import Looked
from launcher.rules.open_instruct.arguments import LOCAL_DATA, listed
from launcher.rules.premises import where
from launcher.rules.rule import cites, say
from launcher.upstream import behaviour

# Rows a second on one core, measured with upstream's own functions (chats of two turns, 556
# tokens): 572 chats, 263 pairs. Upstream reckons with 400
# (dataset_transformation.py::[APPLY_CHAT_TEMPLATE_EXAMPLE_PER_SECOND_PER_CPU]). Rounded up, so that
# the estimate is rather too short.
_CHATS_PER_SECOND = 600.0
_PAIRS_PER_SECOND = 300.0
# SFT then counts tokens row by row, on one core whatever there are
# (dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset[dataset.map])  # noqa: E501 - one citation
_COUNTED_PER_SECOND = 6000.0
# where the number of cores is not known: what would be long even on a large machine
_MANY_CPUS = 64


@cites(
    "finetune.py::main[with accelerator.main_process_first]",
    "dpo_tune_cache.py::main[with accelerator.main_process_first]",
    "finetune.py::main[timeout_kwargs = InitProcessGroupKwargs]",
    reviewed=("e6c3044aa620",),
)
def tokenising_outlasts(context: Context, seconds: int | None = None) -> Iterator[Finding]:
    """One process tokenises while the others wait in a collective, which ends after `timeout`
    seconds, or after `seconds` whatever it says.
    """
    values = context.values
    key = listed(values)
    patience = seconds or values["timeout"]
    rows = _count_known_rows(values[key] or [])
    # one process waits for nobody; 0 is the CPU, one process too
    if context.gpus in {0, 1} or not isinstance(patience, int) or caches_only(context):
        return
    cores = _MANY_CPUS
    if context.machine is not None and context.machine.cpus is not None:
        cores = context.machine.cpus
    needed = rows / (_CHATS_PER_SECOND * cores) + rows / _COUNTED_PER_SECOND
    if key == "mixer_list":
        needed = rows / (_PAIRS_PER_SECOND * cores)
    if not needed > patience > 0:
        return
    minutes = math.ceil(needed / 60)
    message = (
        f"tokenising {rows:,} rows takes about {minutes} minutes, the other processes give up "
        "after "
    )
    help = "run once with `cache_dataset_only: true`"
    if seconds is None:
        key = "timeout"
        message += f"`timeout: {patience}` seconds"
        help += ", or raise `timeout`"
    else:
        message += f"OLMo-core's {seconds} seconds"
    yield say("warning", "tokenising-outlasts", key, message, help)


def _count_known_rows(words: list[str]) -> int:
    """Rows that a mixer list asks for, at least: sets of unknown size count as nothing."""
    pairs = zip(words[::2], words[1::2], strict=False)
    return sum(count_entry_rows(str(name), str(amount)) or 0 for name, amount in pairs)


# what is read of a row without another transform
# (dataset_transformation.py::sft_tulu_tokenize_and_truncate_v1,
# dataset_transformation.py::preference_tulu_tokenize_and_truncate_v1)
_TRANSFORMS = frozenset(
    """
    sft_tulu_tokenize_and_truncate_v1 sft_tulu_filter_v1 preference_tulu_tokenize_and_truncate_v1
    preference_tulu_filter_v1
    """.split()
)


@where(behaviour.READS_MESSAGES)
@cites(
    "dataset_transformation.py::sft_tulu_tokenize_and_truncate_v1[if len(messages]",
    "dataset_transformation.py::preference_tulu_tokenize_and_truncate_v1[chosen_messages = row]",
    "dataset_transformation.py::sft_tulu_filter_v1[return any(x != MASKED_TOKEN_VALUE]",
    reviewed=("e6c3044aa620",),
)
def local_rows(context: Context) -> Iterator[Finding]:
    """Rows are read by `messages`, or `chosen` and `rejected`, and those without a message of
    `assistant` are dropped.
    """
    values = context.values
    key = listed(values)
    splits = values.get(f"{key}_splits") or ["train"]
    for index, word in enumerate((values[key] or [])[::2]):
        place = f"{key}[{2 * index}]"
        split = "train"
        if len(splits) == 1:
            split = str(splits[0])
        source = _find_source(str(word), split, context)
        if source is None:
            continue
        yield from data.unseen(place, source, context)
        if not source.files:
            continue
        looked = data.looked_at(place, source)
        yield from data.readable(looked)
        yield from data.same_columns(looked)
        yield from data.copies(looked)
        if looked.survey.rows and _has_default_transforms(context):
            yield from _check_rows(looked, context, pairs=key == "mixer_list")


def _find_source(name: str, split: str, context: Context) -> sources.Source | None:
    """Where an entry's rows lie; None for a file that is not here, of which another rule speaks."""
    if not name.endswith(LOCAL_DATA):
        return sources.find_named_source(name, split, None, context.environ)
    if name.endswith(LOCAL_SUFFIXES) and is_file(Path(name)):
        return sources.open_file_source(name)
    return None


def _has_default_transforms(context: Context) -> bool:
    functions = (
        context.values.get("dataset_transform_fn") or context.values.get("transform_fn") or []
    )
    return all(str(name) in _TRANSFORMS for name in functions)


def _check_rows(looked: Looked, context: Context, *, pairs: bool) -> Iterator[Finding]:
    survey = looked.survey
    read = ["messages"]
    if pairs:
        read = ["chosen", "rejected"]
    names = " and ".join(f"`{name}`" for name in read)
    is_chat = all(
        survey.kind(name) == "list" and not survey.count(name, "from-value") for name in read
    )
    if not is_chat:
        columns = shorten(", ".join(sorted(survey.columns)))
        message = f"{shorten(looked.source.name)} has the columns {columns}: open-instruct reads "
        message += f"{names}, lists of messages with `role` and `content`"
        otherwise = f"write {names} as lists of messages"
        is_pairs = shapes.find_pair_columns(survey) is not None
        if not pairs and is_pairs:
            help = "these are pairs: `stage: dpo` trains on them"
        elif pairs and not is_pairs:
            help = "these are single answers: `stage: sft` trains on them"
        else:
            help = data.convertible(looked, otherwise)
        yield looked.say("error", "data-columns", message, help)
        return
    for column in read:
        yield from data.same_kinds(looked, [column], "list")
        yield from _check_answers(looked, column)
    yield from data.unreadable_messages(looked, read)
    yield from data.empty_prompts(looked, read)
    yield from data.unread_weights(looked, read)
    yield from data.unlike_messages(looked, read)
    if pairs:
        yield from data.equal_pairs(looked)
        yield from _check_prompts(looked)
    yield from data.empty_answers(looked, read)
    yield from data.conversations(looked, read)
    if not pairs:
        yield from _check_tools(looked, context)
        read = [*read, "tools"]
    yield from data.other_kinds(looked, read)


def _check_answers(looked: Looked, column: str) -> Iterator[Finding]:
    survey = looked.survey
    count = survey.rows
    answered = survey.named(column, "role:").get("assistant")
    if answered is not None:
        count -= answered.count
    if count == survey.rows:
        message = f"`{column}` has no message of `assistant` in any row: all of them are dropped"
        help = data.convertible(looked, "the answers need the role `assistant`")
        yield looked.say("error", "no-answers", message, help)
    elif count:
        message = (
            f"`{column}` has no message of `assistant` in {count:,} of {survey.rows:,} rows: they "
            "are dropped"
        )
        yield looked.say(
            "warning", "no-answers", message, "take these rows out, or mend their roles"
        )


def _check_tools(looked: Looked, context: Context) -> Iterator[Finding]:
    """Until #1746 the chat template of SFT gets no `tools`; since then that column holds
    descriptions of tools.

    A text in it is read as JSON (dataset_transformation.py::_normalize_tools_for_chat_template).
    """
    gives_tools = context.values.schema.does(behaviour.GIVES_TOOLS)
    if gives_tools is False and data.describes_tools(looked.survey):
        message = (
            "the rows describe `tools`, and this commit of open-instruct gives the chat template "
            "none"
        )
        help = "write what the model has to know of them into a message of `system`"
        yield looked.say("warning", "template-drops-tools", message, help)
    if not gives_tools:
        return
    unreadable = {
        "not-json": "text that is not JSON",
        "no-schemas": "JSON, and not of tools,",
        "items:text": "a list of texts",
    }
    for fact, what in unreadable.items():
        broken = looked.survey.fact("tools", fact)
        if broken is not None:
            message = f"`tools` is {what} in {looked.share(broken)}: tokenising ends there"
            help = "write a list of tools as JSON, or null where there are none"
            yield looked.say("error", "data-types", message, help)


def _check_prompts(looked: Looked) -> Iterator[Finding]:
    """Both conversations hold the prompt themselves: a column `prompt` is not read."""
    bare = looked.survey.fact("chosen", "starts-with:assistant")
    if bare is not None:
        message = (
            f"`chosen` begins with the answer in {looked.share(bare)}: these pairs train without a "
            "prompt"
        )
        otherwise = "put the question in front of both answers: a column `prompt` is not read"
        help = data.convertible(looked, otherwise)
        yield looked.say("warning", "no-prompt", message, help)


RULES: tuple[StageRule, ...] = (tokenising_outlasts, local_rows)
