"""What every trainer's rows have in common: readable, with answers, roles and real texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.artifacts import model_config
from launcher.dataset import reading, shapes, sources
from launcher.dataset.sources import Source
from launcher.dataset.survey import Occurrence, RowPlace, Survey, look
from launcher.errors import Finding, Severity, shorten
from launcher.files import read_bytes, read_json
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir, is_file
from launcher.rules.context import Context
from launcher.rules.rule import say

_SHOWN_FAULTS = 3
_ROLES = frozenset("system user assistant tool developer function ipython environment".split())
ARTICLES = {
    "text": "text",
    "list": "a list",
    "number": "a number",
    "object": "an object",
    "bool": "a bool",
    "value": "of another type",
}
# what stands for the role of a message that has none
_NO_ROLE = "?"
# what is wrong with a message, and what to do
_ODD_MESSAGES = {
    "null-content": ("a message without content", "write the text, or take the row out"),
    "content:number": ("a number as content", "write it as text"),
    "content:object": ("an object as content", "write it as text"),
    "content:list": ("a list of parts as content", "templates of text models take text alone"),
    "no-role": ("a message without `role`", "each message needs `role` and `content`"),
}
# above this share of so many rows, copies are no accident
_MANY_COPIES = 0.5
_ROWS_TO_COMPARE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A data set that a stage trains on, under `key`, and what its rows are like."""

    key: str
    source: Source
    survey: Survey

    def say(self, severity: Severity, code: str, message: str, help: str | None = None) -> Finding:
        return say(severity, code, self.key, message, help)

    def share(self, tally: Occurrence) -> str:
        """Such as `3 of 200 rows (first: data/train.jsonl:7)`."""
        rows = self.survey.rows
        if tally.count >= rows:
            return "all rows" if rows > 1 else "the only row"
        share = f"{tally.count:,} of {rows:,} rows"
        if tally.first.number:
            share += f" (first: {tally.first})"
        return share

    def facts(self, columns: Iterable[str], *names: str) -> Iterator[tuple[str, str, Occurrence]]:
        """Each column, in turn, with each of these facts that hold of it."""
        for column in columns:
            for name in names:
                tally = self.survey.fact(column, name)
                if tally is not None:
                    yield column, name, tally


def looked_at(key: str, source: Source) -> Looked:
    return Looked(key=key, source=source, survey=look(source.files))


def unseen(key: str, source: Source, context: Context) -> Iterator[Finding]:
    """What of a data set cannot be looked at, and why; a start says what is on the hub alone."""
    if source.fault is not None:
        message = f"{shorten(source.name)} {source.fault}"
        yield say("error", "bad-data", key, message, source.remedy)
    elif source.unseen is not None and (context.machine is not None or is_dir(source.name)):
        message = f"the rows of {shorten(source.name)} were not looked at: {source.unseen}"
        yield say("note", "unseen-data", key, message)


def readable(looked: Looked) -> Iterator[Finding]:
    """Rows that the trainer's reader refuses, all at once, and files that were not read."""
    survey = looked.survey
    if survey.faults:
        message = "; ".join(map(str, survey.faults[:_SHOWN_FAULTS]))
        left = survey.fault_count - _SHOWN_FAULTS
        if left > 0:
            message += f"; {left:,} more rows"
        yield looked.say(
            "error", "bad-data", message, "correct the file, or take it out of the data"
        )
    elif not survey.rows and not survey.unread:
        names = ", ".join(map(str, looked.source.files[:_SHOWN_FAULTS]))
        yield looked.say("error", "bad-data", f"{shorten(names)}: holds no rows")
    if survey.unread:
        message = f"not every row was looked at: {shorten('; '.join(survey.unread))}"
        help = "pip install pyarrow" if survey.lacks_pyarrow else None
        yield looked.say("note", "unseen-data", message, help)


def same_columns(looked: Looked) -> Iterator[Finding]:
    """datasets/table.py::cast_table_to_schema[raise CastError]: the first rows of the first file
    give the columns and their types, and what comes later, in any split, may add none.
    """
    survey = looked.survey
    beside = look(looked.source.beside)
    if beside.faults:
        message = f"{beside.faults[0]}: the files of all splits are read"
        help = "correct the file, or keep it in another folder"
        yield looked.say("error", "bad-data", message, help)
    places = _find_first_places(survey, "absent")
    with_rows = {place.file for place in places.values()}
    first = next((path for path in looked.source.files if str(path) in with_rows), None)
    if first is None:
        return
    typed_rows = reading.count_rows_typed_first(first)

    def comes_late(place: RowPlace) -> bool:
        return place.file != str(first) or place.number > typed_rows

    late = {column: place for column, place in places.items() if comes_late(place)}
    for column, place in _find_first_places(beside, "absent").items():
        if column not in survey.columns:
            late[column] = place
    if late:
        names = ", ".join(f"`{column}` ({place})" for column, place in late.items())
        message = (
            f"columns come later than the first rows of {shorten(str(first))}: {shorten(names)}"
        )
        help = (
            "`datasets` refuses that: leave these columns out, or write them in every row, null "
            "where there is none"
        )
        yield looked.say("error", "data-columns", message, help)
    for column, place in _find_first_places(survey, "absent", "null").items():
        if column not in late and comes_late(place):
            effect = "`datasets` takes it for a column of nulls, and refuses what follows"
            message = f"`{column}` is null up to {place}: {effect}"
            help = "leave the column out, or move a row that has a value there to the front"
            yield looked.say("error", "data-types", message, help)


def _find_first_places(survey: Survey, *left_out: str) -> dict[str, RowPlace]:
    """The first row that has a value in each column, of another kind than `left_out`."""
    places: dict[str, RowPlace] = {}
    for (column, kind), tally in survey.kinds.items():
        if kind not in left_out:
            places.setdefault(column, tally.first)
    return places


def convertible(looked: Looked, otherwise: str) -> str:
    """What to do about rows that the trainer does not take: the command for a known form."""
    shape = shapes.recognise(looked.survey)
    if shape is None:
        return _explain_export(looked) or otherwise
    files = looked.source.files
    source = files[0] if len(files) == 1 else looked.source.name
    command = f"`launch data convert {source} -o converted/train.jsonl`"
    return f"these rows are {shape.name}: {command} writes {shape.into}; then name what it wrote"


def _explain_export(looked: Looked) -> str | None:
    """What to do about files that were written in another way than the reader expects."""
    survey = looked.survey
    columns = sorted(survey.columns)
    for column in columns:
        if column.startswith("#") and looked.source.files[0].suffix.lower() in reading.TEXT_FORMATS:
            return f"the first line, `{column}`, is taken for the header: leave it out"
    for delimiter, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and delimiter in columns[0]:
            remedy = "write them with commas, or tabs in a .tsv file"
            return f"its cells are separated by {name}: {remedy}"
    for column in columns:
        if column != column.strip():
            return f"the name of the column `{column}` has blanks around it: leave them out"
    if reading.INDEX in survey.columns:
        help = "each row has more cells than the header, and the first is taken for an index: "
        return (
            help + "name each column in the header, or leave out the comma at the end of the rows"
        )
    if survey.rows != 1:
        return None
    for column in columns:
        if survey.kind(column) == "list" and not survey.named(column, "items:"):
            fault = f"the file is one object, and its rows stand in `{column}`"
            return f"{fault}: write that list alone into the file"
    if all(survey.kind(column) in ("object", "list", None) for column in columns):
        command = '`to_json(..., orient="records", lines=True)`'
        return f"the file is one object of columns: write rows, in pandas {command}"
    return None


def same_kinds(looked: Looked, columns: Iterable[str], kind: str) -> Iterator[Finding]:
    """Rows whose value in a column that is read is of another kind.

    The trainer ends at the first of them.
    """
    needed = ARTICLES[kind]
    states = {**ARTICLES, "absent": "missing"}
    for column in columns:
        for other, tally in looked.survey.kinds_of(column).items():
            if other == kind:
                continue
            message = f"`{column}` is {states.get(other, other)} in {looked.share(tally)}"
            if tally.count < looked.survey.rows:
                message += f" and {needed} in the others"
                help = "correct these rows, or take them out"
            else:
                message += f", where {needed} is needed"
                help = convertible(looked, f"write {needed} in each row")
            yield looked.say("error", "data-types", message, help)


def other_kinds(looked: Looked, read: Iterable[str]) -> Iterator[Finding]:
    """Columns that nothing reads and that hold different kinds.

    `datasets` may fail to make one type of them.
    """
    survey = looked.survey
    for column in sorted(survey.columns - set(read)):
        kinds = dict(survey.kinds_of(column))
        kinds.pop("null", None)
        kinds.pop("absent", None)
        if len(kinds) > 1:
            usual = survey.kind(column)
            odd = next(tally for kind, tally in kinds.items() if kind != usual)
            message = f"`{column}` holds {' and '.join(sorted(kinds))} (first: {odd.first})"
            help = "nothing reads this column: leave it out, or `datasets` may refuse the types"
            yield looked.say("warning", "data-types", message, help)


def conversations(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    """Messages that no template can write as they are meant."""
    for column in columns:
        for _, fact, tally in looked.facts([column], *_ODD_MESSAGES):
            fault, help = _ODD_MESSAGES[fact]
            message = f"`{column}` has {fault} in {looked.share(tally)}: most templates end there"
            yield looked.say("warning", "odd-messages", message, help)
        yield from _check_roles(looked, column)


def unreadable_messages(looked: Looked, columns: Iterable[str]) -> Iterator[Finding]:
    """Messages that no trainer takes for messages: none of them has `role`, or `content`."""
    survey = looked.survey
    for column in columns:
        if survey.kind(column) != "list":
            continue
        roles = set(survey.named(column, "role:"))
        if roles == {_NO_ROLE} and survey.fact(column, "no-role") is not None:
            lacking = "role"
        elif survey.count(column, "no-content") == survey.rows:
            lacking = "content"
        else:
            continue
        message = f"no message in `{column}` has a text as `{lacking}`"
        help = convertible(looked, "each message needs `role` and `content`")
        yield looked.say("error", "data-columns", message, help)


def unread_weights(looked: Looked, columns: Iterable[str]) -> Iterator[Finding]:
    """OpenAI's `weight: 0` leaves an answer out of the loss; neither trainer reads it."""
    remedy = "take these answers out, or end the conversation before them"
    for column, _, tally in looked.facts(columns, "no-weight"):
        fault = f"`{column}` has messages of `weight: 0` in {looked.share(tally)}"
        message = f"{fault}: they are trained on all the same"
        yield looked.say("warning", "odd-messages", message, f"no trainer reads `weight`: {remedy}")


def has_renamed_answers(looked: Looked, column: str) -> bool:
    """Whether rows without `assistant` have answers under a role that templates do not know."""
    renamed = max((tally.count for tally in _find_odd_roles(looked, column).values()), default=0)
    return renamed >= looked.survey.count(column, "no-answer") > 0


def _find_odd_roles(looked: Looked, column: str) -> dict[str, Occurrence]:
    roles = looked.survey.named(column, "role:")
    return {role: tally for role, tally in roles.items() if role not in _ROLES and role != _NO_ROLE}


def unlike_messages(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    """trl/data_utils.py::is_conversational[maybe_message = maybe_messages]: the items of a list are
    messages, and there is one.
    """
    yield from empty_lists(looked, columns)
    for column in columns:
        for kind, tally in looked.survey.named(column, "items:").items():
            fault = f"`{column}` is a list with {ARTICLES.get(kind, kind)} instead of a message"
            help = convertible(looked, "each item needs `role` and `content`")
            yield looked.say("error", "data-types", f"{fault} in {looked.share(tally)}", help)


def empty_lists(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    for column, _, tally in looked.facts(columns, "empty-list"):
        message = f"`{column}` is an empty list in {looked.share(tally)}"
        yield looked.say("error", "data-types", message, "take these rows out")


def _check_roles(looked: Looked, column: str) -> Iterator[Finding]:
    odd = _find_odd_roles(looked, column)
    if not odd:
        return
    names = ", ".join(f"`{role}`" for role in sorted(odd))
    tally = next(iter(odd.values()))
    message = f"`{column}` has the roles {shorten(names)} (first: {tally.first})"
    effect = "others are written as they are, or refused"
    help = convertible(looked, f"templates know `system`, `user` and `assistant`: {effect}")
    yield looked.say("warning", "odd-roles", message, help)


def empty_answers(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    """Answers without a text: the end of the turn is all that is trained on."""
    states = {"empty-answer": "holds an empty answer", "empty": "is empty"}
    help = "write the answer, or take these rows out"
    for column, fact, tally in looked.facts(columns, *states):
        message = f"`{column}` {states[fact]} in {looked.share(tally)}"
        yield looked.say("warning", "empty-answers", message, help)


def empty_prompts(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    survey = looked.survey
    for column in columns:
        tally = survey.fact(column, "empty") or survey.fact(column, "empty-question")
        if tally is None:
            continue
        state = "is empty"
        if survey.kind(column) == "list":
            state = "has an empty question"
        message = f"`{column}` {state} in {looked.share(tally)}"
        yield looked.say(
            "warning", "no-prompt", message, "write the question, or take these rows out"
        )


def messages_as_text(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    """Text that is a list of messages: it is trained on as it stands, brackets and all."""
    languages = {"json-messages": "JSON", "python-messages": "Python"}
    for column, fact, tally in looked.facts(columns, *languages):
        written = f"messages written as {languages[fact]} text"
        message = f"`{column}` holds {written} in {looked.share(tally)}"
        help = convertible(looked, "write them as lists of messages")
        yield looked.say("warning", "data-columns", message, help)


def equal_pairs(looked: Looked) -> Iterator[Finding]:
    """The gradient of a pair of equals is zero: the loss stays at ln 2.

    Rafailov et al. 2023, equation 7.
    """
    tally = looked.survey.fact("", "equal-pair")
    if tally is not None:
        message = (
            f"`chosen` equals `rejected` in {looked.share(tally)}: nothing is learnt from them"
        )
        yield looked.say("warning", "equal-pairs", message, "take these rows out")


def repeated_prompts(looked: Looked, columns: Sequence[str]) -> Iterator[Finding]:
    tally = looked.survey.fact("", "prompt-twice")
    if tally is not None:
        names = " and ".join(f"`{column}`" for column in columns)
        places = f"in `prompt`, and again at the start of {names}"
        message = f"the prompt stands twice in {looked.share(tally)}: {places}"
        help = f"leave out `prompt`, or leave its messages out of {names}"
        yield looked.say("warning", "prompt-twice", message, help)


def copies(looked: Looked) -> Iterator[Finding]:
    tally = looked.survey.fact("", "copy")
    if tally is None:
        return
    rows = looked.survey.rows
    severity: Severity = "note"
    if rows >= _ROWS_TO_COMPARE and tally.count > _MANY_COPIES * rows:
        severity = "warning"
    message = f"{looked.share(tally)} repeat an earlier row word for word"
    yield looked.say(severity, "repeated-rows", message)


def tokenizer_template(model: object, template: object, context: Context) -> str | None:
    """The chat template that a run would use, as its file says.

    Empty where there is none, None where unknown.
    """
    if isinstance(template, str) and template:
        if is_file(template):
            return _read_text(Path(template))
        model = template
    folder = _find_folder(model, context)
    if folder is None:
        return None
    for name in ("chat_template.jinja", "chat_template.json"):
        if is_file(folder / name):
            return _read_text(folder / name)
    config = folder / "tokenizer_config.json"
    if not is_file(config):
        return None
    written = read_json(config).get("chat_template")
    return "" if written is None else str(written)


def takes_pictures(model: object, context: Context) -> bool | None:
    """Whether a model reads pictures, by its config and its processor's files.

    None where neither is here.
    """
    path = model_config.find_config_file(model, context.environ)
    if path is None:
        return None
    files = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    if any(is_file(path.parent / name) for name in files):
        return True
    return any("vision" in key or "image" in key for key in read_json(path))


def _find_folder(model: object, context: Context) -> Path | None:
    where = model_config.find_config_file(model, context.environ)
    if where is not None:
        return where.parent
    return Path(model) if isinstance(model, str) and is_dir(model) else None


def _read_text(path: Path) -> str | None:
    try:
        return read_bytes(path, 2**20).decode(errors="replace")
    except OSError:
        return None


def unwritten_tools(
    looked: Looked, columns: Sequence[str], template: str | None
) -> Iterator[Finding]:
    """Calls and descriptions of tools that the template does not mention.

    It leaves them out without a word.
    """
    if not template:
        return
    code = "template-drops-tools"
    if "tool_calls" not in template:
        help = "use a template that writes `tool_calls`"
        for column, _, tally in looked.facts(columns, "tool-calls"):
            calls = f"`{column}` has tool calls in {looked.share(tally)}"
            message = f"{calls}, and the chat template writes none"
            yield looked.say("warning", code, message, help)
    if describes_tools(looked.survey) and "tools" not in template.replace("tool_calls", ""):
        message = "the rows describe `tools`, and the chat template writes none"
        yield looked.say("warning", code, message, "use a template that writes `tools`")


def describes_tools(survey: Survey) -> bool:
    """Whether any row has tools: many files hold an empty list in every row."""
    filled = sum(survey.count_kind("tools", kind) for kind in ("list", "object", "text"))
    return filled > sum(survey.count("tools", fact) for fact in ("empty", "empty-list", "none"))


def doubled_bos(
    looked: Looked, columns: Sequence[str], model: object, context: Context
) -> Iterator[Finding]:
    """Texts that begin with the token that the tokenizer adds in front of every text."""
    folder = _find_folder(model, context)
    for column in columns:
        for token, tally in looked.survey.named(column, "starts:").items():
            if token == _find_added_bos(folder):
                start = f"`{column}` begins with {token} in {looked.share(tally)}"
                message = f"{start}, and the tokenizer adds another"
                yield looked.say(
                    "warning", "doubled-bos", message, f"leave {token} out of the rows"
                )


def _find_added_bos(folder: Path | None) -> str | None:
    """The token that a tokenizer in this folder puts in front of every text.

    None where it adds none.
    """
    if folder is None:
        return None
    config = read_json(folder / "tokenizer_config.json")
    token = config.get("bos_token")
    if isinstance(token, dict):
        token = token.get("content")
    adds = config.get("add_bos_token")
    if not isinstance(token, str) or adds is False:
        return None
    if adds is True:
        return token
    processor = read_json(folder / "tokenizer.json").get("post_processor")
    if isinstance(processor, dict) and token in str(processor):
        return token
    return None


def loader_name(key: str, name: str) -> Iterator[Finding]:
    """datasets/load.py::dataset_module_factory[elif os.path.isdir]: a reader's name comes before a
    folder's.
    """
    if name in sources.LOADERS:
        reader = "the name of a reader of `datasets`, which would ask for files"
        message = f"`{key}: {name}` is {reader}"
        yield say("error", "data-file", key, message, f"for the folder write `{key}: ./{name}`")
