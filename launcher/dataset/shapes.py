"""Forms of rows that people have and no trainer reads, and what to write instead -> `RowForm`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from launcher.dataset.survey import Survey
from launcher.lazy_dataclass import dataclass

Row = Mapping[str, Any]
Message = dict[str, object]

_QUESTIONS = (
    "question query instruction prompt input problem user human user_input message_1 title"
).split()
_ANSWERS = (
    "answer response output completion solution assistant reply target assistant_response message_2"
).split()
# questions of Alpaca's rows, the first that is filled
_INSTRUCTIONS = ("instruction", "question", "query", "problem", "input")
# columns of conversations, the first that is there; some of these names stand for other things too
_UNSURE_CHATS = ("items", "chat", "turns", "data")
_CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue", *_UNSURE_CHATS)
# the better and the worse answer
_PAIRS = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
    ("response_j", "response_k"),
    ("preferred", "dispreferred"),
    ("accepted", "rejected"),
    ("winner", "loser"),
)
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")
_ROLE_KEYS = ("role", "from", "author", "speaker", "user")
_CONTENT_KEYS = ("content", "value", "text", "message")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_TEMPLATE_ROLES = frozenset({"system", "user", "assistant", "tool"})


class CannotConvert(ValueError):
    """A row that has not the form that the others have; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """A known form of rows: its `name`, what it is converted `into`, and how."""

    name: str
    into: str
    convert: Callable[[Row], dict[str, Any]]


def recognise(survey: Survey) -> RowForm | None:
    """The form that rows have, where it is a known one that can be converted."""
    pair = find_pair_columns(survey)
    if pair is not None:
        return _recognise_pairs(survey, *pair)
    return _recognise_answers(survey)


def find_pair_columns(survey: Survey) -> tuple[str, str] | None:
    """The columns of the better and the worse answer; None where rows are no pairs."""
    for better, worse in _PAIRS:
        if {better, worse} <= survey.columns:
            return better, worse
    return None


def find_readable_form(survey: Survey) -> RowForm | None:
    """The form of rows that a trainer reads already: they are written as they are."""
    if survey.kind("messages") == "list":
        return RowForm(name="`messages`", into="`messages`", convert=dict)
    if survey.kind("chosen") == "list" and survey.kind("rejected") == "list":
        return RowForm(name="pairs", into="`chosen` and `rejected`", convert=dict)
    return None


def is_labelled(survey: Survey) -> bool:
    """Answers that are marked as good or bad, as KTO trains on them."""
    return survey.kind("label") == "bool" and {"prompt", "completion"} <= survey.columns


def find_prompt_columns(survey: Survey) -> tuple[str, ...]:
    """Columns beside `chosen` and `rejected` that hold the question, other than `prompt`."""
    names = (*_INSTRUCTIONS, "system", "conversations", "messages", "history")
    return tuple(name for name in names if _has_text(survey, name))


def _has_text(survey: Survey, column: str) -> bool:
    if survey.kind(column) not in ("text", "list"):
        return False
    filled = 0
    for kind, tally in survey.kinds_of(column).items():
        if kind not in ("null", "absent"):
            filled += tally.count
    return filled > survey.count(column, "empty") + survey.count(column, "empty-list")


def _recognise_pairs(survey: Survey, better: str, worse: str) -> RowForm | None:
    convert = _convert_pair
    name = _name_pairs(survey, better)
    if _is_written_out(survey, better):
        convert = _convert_written_out_pair
        name = "messages as text"
    if name is None or survey.named(better, "items:"):
        return None
    into = "`chosen` and `rejected`, each a conversation with its prompt"

    def renamed(row: Row) -> dict[str, Any]:
        return convert({**row, "chosen": row.get(better), "rejected": row.get(worse)})

    return RowForm(name=name, into=into, convert=renamed)


def _is_written_out(survey: Survey, column: str) -> bool:
    return survey.count(column, "json-messages") + survey.count(column, "python-messages") > 0


def _name_pairs(survey: Survey, better: str) -> str | None:
    """What pairs with a prompt are called; None where no prompt can be told from the answers."""
    answer = survey.kind(better)
    prompt = survey.kind("prompt")
    are_messages = answer in ("list", "object")
    if survey.kind("conversations") == "list" or survey.count(better, "from-value"):
        return "ShareGPT pairs"
    if prompt == "text" and are_messages:
        return "a text prompt beside conversations"
    if prompt == "list" and are_messages:
        return "a `prompt` beside answers"
    if prompt == "text" and answer == "text":
        return "pairs of texts"
    if survey.kind("input") == "object" and answer == "list":
        return "preferences as OpenAI has them"
    if "prompt" not in survey.columns and answer in ("text", "list"):
        if survey.kind("messages") == "list":
            return "a `messages` prompt beside answers"
        if answer == "text" and {*find_prompt_columns(survey)} - {"conversations"}:
            return "Alpaca pairs"
    if survey.count(better, "human-assistant"):
        return "dialogues of `Human:` and `Assistant:`"
    return None


def _recognise_answers(survey: Survey) -> RowForm | None:
    columns = {name.strip().lower(): name for name in sorted(survey.columns, reverse=True)}
    for plain in _CHATS:
        if plain in columns:
            name = _name_chats(survey, columns[plain])
            if name is not None:
                return _build_chat_form(name, columns[plain])
    instruction = columns.get("instruction", "")
    output = columns.get("output", "")
    if survey.kind(instruction) == "text" and survey.kind(output) == "text":
        return RowForm(name="Alpaca", into="`messages`", convert=_convert_alpaca)
    if is_labelled(survey):
        # some of these answers are bad ones
        return None
    question = _find_first_column(survey, columns, _QUESTIONS)
    answer = _find_first_column(survey, columns, _ANSWERS)
    if question is None or answer is None:
        return None
    if survey.named(question, "items:") or survey.named(answer, "items:"):
        return None

    def convert(row: Row) -> dict[str, Any]:
        return _convert_answer(row, question, answer)

    return RowForm(name=f"`{question}` and `{answer}`", into="`messages`", convert=convert)


def _find_first_column(survey: Survey, columns: Mapping[str, str], names: list[str]) -> str | None:
    for name in names:
        column = columns.get(name)
        if column is not None and survey.kind(column) is not None:
            return column
    return None


def _build_chat_form(name: str, column: str) -> RowForm:
    def convert(row: Row) -> dict[str, Any]:
        messages = convert_messages(_decode(column, row.get(column)))
        return _add_columns(messages, row)

    return RowForm(name=name, into="`messages`", convert=convert)


def _name_chats(survey: Survey, column: str) -> str | None:
    """The name of the conversations in a column; None where a trainer reads them."""
    kind = survey.kind(column)
    if kind == "text" and _is_written_out(survey, column):
        return "messages as text"
    if kind == "object" and column.lower() == "messages":
        return "`messages` as an object of lists"
    if kind != "list":
        return None
    if survey.count(column, "items:text"):
        return f"`{column}`, questions and answers in turn"
    if survey.count(column, "from-value"):
        return "ShareGPT"
    if survey.named(column, "items:"):
        return None
    roles = survey.named(column, "role:")
    if survey.count(column, "no-role") or survey.count(column, "no-content") == survey.rows:
        if column.lower() in _UNSURE_CHATS and set(roles) == {"?"}:
            return None
        return f"`{column}` with other keys"
    if column != "messages":
        return f"`{column}`"
    if any(_normalise_role(role) != role for role in roles):
        return "`messages` with other roles"
    if "prompt" in survey.columns:
        return "`messages` beside a prompt"
    return None


def _read_text(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        raise CannotConvert(f"has no `{name}`")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise CannotConvert(f"its `{name}` is no text")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _append_context(question: str, context: object) -> str:
    """A question, and below it what it is about."""
    if isinstance(context, str) and context.strip():
        return f"{question}\n\n{context}"
    return question


def _read_instruction(row: Row) -> str:
    """The question of an Alpaca row: the instruction, and the input below it where there is one."""
    for name in _INSTRUCTIONS:
        if row.get(name):
            question = _read_text(row, name)
            if name != "input":
                question = _append_context(question, row.get("input"))
            return _append_context(question, row.get("context"))
    raise CannotConvert("has no `instruction`")


def _convert_alpaca(row: Row) -> dict[str, Any]:
    row = {name.strip().lower(): value for name, value in row.items()}
    messages = _read_history(row.get("history"))
    messages.append({"role": "user", "content": _read_instruction(row)})
    messages.append({"role": "assistant", "content": _read_text(row, "output")})
    return _add_columns(messages, row)


def _read_history(history: object) -> list[Message]:
    """Earlier turns, each a question and its answer."""
    messages: list[Message] = []
    if not isinstance(history, list):
        return messages
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2 or not _are_texts(turn):
            raise CannotConvert("its `history` is no list of a question and an answer each")
        messages += _alternate_roles(turn)
    return messages


def _are_texts(items: list[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def _alternate_roles(texts: list[str]) -> list[Message]:
    """Messages of the user and the assistant in turn."""
    messages: list[Message] = []
    for index, text in enumerate(texts):
        role = "assistant" if index % 2 else "user"
        messages.append({"role": role, "content": text})
    return messages


def _add_columns(messages: list[Message], row: Row) -> dict[str, Any]:
    """A row of these messages, with what stands beside them."""
    return {"messages": _add_system(messages, row), **_keep_columns(row)}


def _add_system(messages: list[Message], row: Row) -> list[Message]:
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _keep_columns(row: Row) -> dict[str, Any]:
    """Columns that the trainers read beside the messages."""
    return {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}


def _normalise_role(role: str) -> str:
    """The role that templates know for one that is written otherwise, else the same."""
    plain = role.strip().lower()
    plain = _ROLES.get(plain, plain)
    if plain in _TEMPLATE_ROLES or plain in _CALLS:
        return plain
    return role


def convert_messages(value: object) -> list[Message]:
    """Messages with `role` and `content`, whatever they were called. Raises CannotConvert."""
    if isinstance(value, dict):
        value = _split_columns(value)
    if not isinstance(value, list) or not value:
        raise CannotConvert("has no messages")
    if isinstance(value[0], str):
        return _convert_texts(value)
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, dict):
            raise CannotConvert("has a message that is no object")
        question = message.get("input")
        answer = message.get("output")
        if isinstance(question, str) and isinstance(answer, str):
            messages += _alternate_roles([question, answer])
        else:
            messages.append(_convert_message(message))
    return messages


def _split_columns(columns: dict[str, Any]) -> list[Message]:
    """The messages of `{"role": [...], "content": [...]}`; another object is one message."""
    if not all(isinstance(column, list) for column in columns.values()):
        return [columns]
    if len({len(column) for column in columns.values()}) != 1:
        raise CannotConvert("its messages have not as many roles as contents")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _convert_texts(texts: list[Any]) -> list[Message]:
    if not _are_texts(texts):
        raise CannotConvert("has a turn that is no text")
    if len(texts) < 2:
        raise CannotConvert("has no answer")
    return _alternate_roles(texts)


def _convert_message(message: Message) -> Message:
    role_key = _find_filled_key(message, _ROLE_KEYS)
    content_key = _find_filled_key(message, _CONTENT_KEYS)
    role = message.get(role_key)
    content = message.get(content_key)
    if not isinstance(role, str):
        raise CannotConvert("has a message without a role")
    if content is None and not message.get("tool_calls"):
        raise CannotConvert("has a message without content")
    role = _normalise_role(role)
    replaced = {role_key, content_key, "role", "content", "from", "value"}
    rest = {key: value for key, value in message.items() if key not in replaced}
    if role in _CALLS:
        calls = _convert_calls(content)
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    return {"role": role, "content": content, **rest}


def _find_filled_key(message: Message, keys: tuple[str, ...]) -> str:
    for key in keys:
        if message.get(key) is not None:
            return key
    return keys[0]


def _convert_calls(content: object) -> list[dict[str, Any]]:
    """ShareGPT's `function_call`: JSON of one call, or of several."""
    calls: Any = content
    if isinstance(content, str):
        try:
            calls = json.loads(content)
        except (ValueError, RecursionError):
            raise CannotConvert("has a function call that is not JSON") from None
    if not isinstance(calls, list):
        calls = [calls]
    converted = []
    for call in calls:
        if not isinstance(call, dict) or "name" not in call:
            raise CannotConvert("has a function call without a name")
        converted.append({"type": "function", "function": call})
    return converted


def _read_messages(row: Row, name: str, role: str) -> list[Message]:
    """What a column holds: messages, or a text of this role."""
    value = row.get(name)
    if isinstance(value, list | dict):
        return convert_messages(value)
    return [{"role": role, "content": _read_text(row, name)}]


def _convert_answer(row: Row, question: str, answer: str) -> dict[str, Any]:
    prompt = _read_messages(row, question, "user")
    text = row.get(question)
    if isinstance(text, str):
        prompt = [{"role": "user", "content": _append_context(text, row.get("context"))}]
    messages = _join_answer(prompt, _read_messages(row, answer, "assistant"))
    return _add_columns(messages, row)


def _join_answer(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """The prompt and its answer, which may hold the prompt itself."""
    if answer[: len(prompt)] == prompt:
        return answer
    return [*prompt, *answer]


def _convert_pair(row: Row) -> dict[str, Any]:
    """Two conversations with their prompt: open-instruct reads no `prompt`, TRL needs none."""
    request = row.get("input")
    if isinstance(request, dict):
        row = {**row, **request}
    chosen = _read_answer(row, "chosen")
    rejected = _read_answer(row, "rejected")
    prompt = _find_prompt(row)
    if prompt and "assistant" in (chosen[0]["role"], rejected[0]["role"]):
        prompt = _add_system(prompt, row)
        chosen = _join_answer(prompt, chosen)
        rejected = _join_answer(prompt, rejected)
    else:
        chosen = _add_system(chosen, row)
        rejected = _add_system(rejected, row)
    if min(len(chosen), len(rejected)) < 2 or chosen[0] != rejected[0]:
        raise CannotConvert("its two conversations begin differently: there is no prompt")
    return {"chosen": chosen, "rejected": rejected, **_keep_columns(row)}


def _find_prompt(row: Row) -> list[Message]:
    """The prompt beside the two answers; empty where they hold it."""
    for name in ("conversations", "prompt", "messages"):
        if row.get(name):
            return _read_messages(row, name, "user")
    if any(row.get(name) for name in _INSTRUCTIONS):
        return [{"role": "user", "content": _read_instruction(row)}]
    return []


def _read_answer(row: Row, name: str) -> list[Message]:
    """Messages, the answer as a text, or as in HH-RLHF the dialogue as one text."""
    text = row.get(name)
    if isinstance(text, str) and _TURN.match(text):
        return _parse_dialogue(text)
    return _read_messages(row, name, "assistant")


def _parse_dialogue(text: str) -> list[Message]:
    _, *parts = _TURN.split(text)
    messages: list[Message] = []
    for speaker, words in zip(parts[::2], parts[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        messages.append({"role": role, "content": words.strip()})
    return messages


def _convert_written_out_pair(row: Row) -> dict[str, Any]:
    return _convert_pair({name: _decode(name, value) for name, value in row.items()})


def _decode(name: str, value: Any) -> Any:
    """Messages that were written as JSON, or as Python shows them; any other value as it is."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        # numpy writes no commas between the items of an array; a line break inside a text would be
        # escaped
        return ast.literal_eval(value.replace("}\n {", "},\n {"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        fault = f"its `{name}` is neither JSON nor a list as Python shows it"
        raise CannotConvert(fault) from None
