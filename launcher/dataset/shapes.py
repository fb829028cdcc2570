"""Forms of rows that people have and no trainer reads, and what to write instead -> `RowForm`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.dataset.survey import Survey

Row = Mapping[str, Any]

_QUESTIONS = tuple("question query instruction prompt input problem user human user_input message_1 title".split())
_ANSWERS = tuple(
    "answer response output completion solution assistant reply target assistant_response message_2".split()
)
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
    pair = pair_columns(survey)
    if pair is not None:
        return _recognise_pairs(survey, *pair)
    return _recognise_answers(survey)


def pair_columns(survey: Survey) -> tuple[str, str] | None:
    """The columns of the better and the worse answer; None where rows are no pairs."""
    for better, worse in _PAIRS:
        if {better, worse} <= survey.columns:
            return better, worse
    return None


def readable(survey: Survey) -> RowForm | None:
    """The form of rows that a trainer reads already: they are written as they are, in another file format."""
    if survey.kind("messages") == "list":
        return RowForm(name="`messages`", into="`messages`", convert=dict)
    if survey.kind("chosen") == "list" and survey.kind("rejected") == "list":
        return RowForm(name="pairs", into="`chosen` and `rejected`", convert=dict)
    return None


def prompt_columns(survey: Survey) -> tuple[str, ...]:
    """Columns beside `chosen` and `rejected` that hold the question, under another name than `prompt`."""
    names = ("instruction", "question", "query", "problem", "input", "system", "conversations", "messages", "history")
    used = [name for name in names if survey.kind(name) in ("text", "list") and _has_text(survey, name)]
    return tuple(used)


def _has_text(survey: Survey, column: str) -> bool:
    filled = sum(tally.count for kind, tally in survey.kinds_of(column).items() if kind not in ("null", "absent"))
    return filled > survey.count(column, "empty") + survey.count(column, "empty-list")


def _recognise_pairs(survey: Survey, better: str, worse: str) -> RowForm | None:
    columns = survey.columns
    kind = survey.kind(better)
    if survey.named(better, "items:"):
        return None
    written_out = survey.count(better, "json-messages") or survey.count(better, "python-messages")
    questions = [name for name in prompt_columns(survey) if name != "conversations"]

    def form(name: str, convert: Callable[[Row], dict[str, Any]]) -> RowForm:
        def renamed(row: Row) -> dict[str, Any]:
            return convert({**row, "chosen": row.get(better), "rejected": row.get(worse)})

        into = "`chosen` and `rejected`, each a conversation with its prompt"
        return RowForm(name=name, into=into, convert=renamed)

    if survey.kind("conversations") == "list":
        return form("ShareGPT pairs", _convert_sharegpt_pair)
    if kind == "list" and survey.count(better, "from-value"):
        return form("ShareGPT pairs", _convert_sharegpt_pair)
    if written_out:
        return form("messages as text", _convert_written_out)
    if survey.kind("prompt") == "text" and kind in ("list", "object"):
        return form("a text prompt beside conversations", _convert_text_prompt)
    if survey.kind("prompt") == "list" and kind in ("list", "object"):
        return form("a `prompt` beside answers", _convert_prompt_beside)
    if survey.kind("prompt") == "text" and kind == "text":
        return form("pairs of texts", _convert_text_pair)
    if survey.kind("input") == "object" and kind == "list":
        return form("preferences as OpenAI has them", _convert_openai_pair)
    if "prompt" not in columns and kind == "text" and survey.kind("messages") == "list":
        return form("a `messages` prompt beside answers", _convert_messages_prompt)
    if "prompt" not in columns and kind == "text" and questions:
        return form("Alpaca pairs", _convert_alpaca_pair)
    if "prompt" not in columns and kind == "list" and "messages" in questions:
        return form("a `messages` prompt beside answers", _convert_messages_prompt)
    if kind == "text" and survey.count(better, "human-assistant"):
        return form("dialogues of `Human:` and `Assistant:`", _convert_dialogue_pair)
    return None


def _recognise_answers(survey: Survey) -> RowForm | None:
    columns = survey.columns
    plain = {name.strip().lower(): name for name in sorted(columns, reverse=True)}
    for name in _CHATS:
        column = plain.get(name)
        if column is None:
            continue
        shape = _recognise_chats(survey, column)
        if shape is not None:
            return shape
    if survey.kind("messages") == "list" and "prompt" in columns:
        return RowForm(name="`messages` beside a prompt", into="`messages`", convert=_keep_messages)
    instruction = plain.get("instruction")
    output = plain.get("output")
    if instruction is not None and output is not None and survey.kind(instruction) == survey.kind(output) == "text":
        return RowForm(name="Alpaca", into="`messages`", convert=_convert_alpaca)
    if is_labelled(survey):
        # some of these answers are bad ones
        return None
    question = _first_column(survey, plain, _QUESTIONS)
    answer = _first_column(survey, plain, _ANSWERS)
    if question is None or answer is None:
        return None
    if survey.named(question, "items:") or survey.named(answer, "items:"):
        return None
    if survey.kind(question) == "list" or survey.kind(answer) == "list":
        name = f"`{question}` and `{answer}`, one of them a list"
        return RowForm(name=name, into="`messages`", convert=lambda row: _joined(row, question, answer))

    def convert(row: Row) -> dict[str, Any]:
        prompt = _below(_text(row, question), row.get("context"))
        return _chat(prompt, _text(row, answer), row.get("system"))

    return RowForm(name=f"`{question}` and `{answer}`", into="`messages`", convert=convert)


def is_labelled(survey: Survey) -> bool:
    """Answers that are marked as good or bad, as KTO trains on them."""
    return survey.kind("label") == "bool" and {"prompt", "completion"} <= survey.columns


def _first_column(survey: Survey, plain: Mapping[str, str], names: Iterable[str]) -> str | None:
    for name in names:
        column = plain.get(name)
        if column is not None and survey.kind(column) is not None:
            return column
    return None


def _recognise_chats(survey: Survey, column: str) -> RowForm | None:
    """The form of the conversations in a column; None where a trainer reads them, or they are none."""
    kind = survey.kind(column)

    def form(name: str, convert: Callable[[Row], dict[str, Any]]) -> RowForm:
        def renamed(row: Row) -> dict[str, Any]:
            return convert({**row, "messages": row.get(column), "conversations": None})

        return RowForm(name=name, into="`messages`", convert=renamed)

    if kind == "text":
        if survey.count(column, "json-messages") or survey.count(column, "python-messages"):
            return form("messages as text", _convert_written_out)
        return None
    if kind == "object" and column.lower() == "messages":
        return form("`messages` as an object of lists", _convert_columns)
    if kind != "list":
        return None
    if survey.count(column, "items:text"):
        return form(f"`{column}`, questions and answers in turn", _convert_turns)
    if survey.count(column, "from-value"):
        return form("ShareGPT", _convert_sharegpt)
    if survey.named(column, "items:"):
        return None
    if survey.count(column, "no-role") or survey.count(column, "no-content") == survey.rows:
        if column.lower() in _UNSURE_CHATS and set(survey.named(column, "role:")) == {"?"}:
            return None
        return form(f"`{column}` with other keys", _convert_sharegpt)
    if column != "messages":
        return form(f"`{column}`", _convert_sharegpt)
    roles = survey.named(column, "role:")
    if any(_role(role) != role for role in roles):
        return form("`messages` with other roles", _convert_sharegpt)
    return None


def _chat(question: str, answer: str, system: object = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        raise CannotConvert(f"has no `{name}`")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise CannotConvert(f"its `{name}` is no text")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _below(question: str, context: object) -> str:
    """A question, and below it what it is about."""
    if isinstance(context, str) and context.strip():
        return f"{question}\n\n{context}"
    return question


def _instruction(row: Row) -> str:
    """The question of an Alpaca row: the instruction, and the input below it where there is one."""
    name = next((name for name in ("instruction", "question", "query", "problem", "input") if row.get(name)), None)
    if name is None:
        raise CannotConvert("has no `instruction`")
    question = _text(row, name)
    if name != "input":
        question = _below(question, row.get("input"))
    return _below(question, row.get("context"))


def _convert_alpaca(row: Row) -> dict[str, Any]:
    plain = {name.strip().lower(): value for name, value in row.items()}
    chat = _chat(_instruction(plain), _text(plain, "output"), plain.get("system"))
    messages = chat["messages"]
    earlier = _history(plain.get("history"))
    return {"messages": [*messages[:-2], *earlier, *messages[-2:]]}


def _history(history: object) -> list[dict[str, Any]]:
    """Earlier turns, each a question and its answer."""
    messages = []
    for turn in history if isinstance(history, list) else []:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise CannotConvert("its `history` is no list of a question and an answer each")
        question, answer = turn
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _convert_alpaca_pair(row: Row) -> dict[str, Any]:
    prompt = _chat(_instruction(row), "", row.get("system"))["messages"][:-1]
    chosen = [{"role": "assistant", "content": _text(row, "chosen")}]
    rejected = [{"role": "assistant", "content": _text(row, "rejected")}]
    return _pair(prompt, chosen, rejected)


def _pair(
    prompt: list[dict[str, Any]], chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]
) -> dict[str, Any]:
    """Two conversations that hold their prompt: open-instruct reads no column `prompt`, and TRL needs none."""
    return {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}


def _role(role: str) -> str:
    """The role that templates know for one that is written otherwise; the same where there is none."""
    plain = role.strip().lower()
    plain = _ROLES.get(plain, plain)
    if plain in _TEMPLATE_ROLES or plain in _CALLS:
        return plain
    return role


def _messages(value: object) -> list[dict[str, Any]]:
    """Messages with `role` and `content`, whatever they were called."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise CannotConvert("has no messages")
    messages: list[dict[str, Any]] = []
    for message in value:
        if not isinstance(message, dict):
            raise CannotConvert("has a message that is no object")
        if isinstance(message.get("input"), str) and isinstance(message.get("output"), str):
            messages.append({"role": "user", "content": message["input"]})
            messages.append({"role": "assistant", "content": message["output"]})
        else:
            messages.append(_message(message))
    return messages


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role_key = _first_filled(message, _ROLE_KEYS)
    content_key = _first_filled(message, _CONTENT_KEYS)
    role = message.get(role_key)
    content = message.get(content_key)
    if not isinstance(role, str):
        raise CannotConvert("has a message without a role")
    if content is None and not message.get("tool_calls"):
        raise CannotConvert("has a message without content")
    role = _role(role)
    replaced = {role_key, content_key, "role", "content", "from", "value"}
    rest = {key: value for key, value in message.items() if key not in replaced}
    if role in _CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content), **rest}
    return {"role": role, "content": content, **rest}


def _first_filled(message: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        if message.get(key) is not None:
            return key
    return keys[0]


def _calls(content: object) -> list[dict[str, Any]]:
    """ShareGPT's `function_call`: JSON of one call, or of several."""
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        raise CannotConvert("has a function call that is not JSON") from None
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise CannotConvert("has a function call without a name")
    return [{"type": "function", "function": call} for call in calls]


def _with_system(messages: list[dict[str, Any]], row: Row) -> list[dict[str, Any]]:
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _kept(row: Row) -> dict[str, Any]:
    """Columns that the trainers read beside the messages."""
    return {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}


def _convert_sharegpt(row: Row) -> dict[str, Any]:
    value = row.get("conversations") or row.get("messages")
    return {"messages": _with_system(_messages(value), row), **_kept(row)}


def _convert_turns(row: Row) -> dict[str, Any]:
    """Texts of the user and the assistant in turn."""
    messages = []
    for index, text in enumerate(row.get("messages") or []):
        if not isinstance(text, str):
            raise CannotConvert("has a turn that is no text")
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    if len(messages) < 2:
        raise CannotConvert("has no answer")
    return {"messages": _with_system(messages, row), **_kept(row)}


def _convert_columns(row: Row) -> dict[str, Any]:
    """`{"role": [...], "content": [...]}`: the columns of messages instead of messages."""
    columns = row.get("messages")
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        raise CannotConvert("has no messages")
    if len({len(column) for column in columns.values()}) != 1:
        raise CannotConvert("its messages have not as many roles as contents")
    messages = []
    for values in zip(*columns.values(), strict=True):
        messages.append(dict(zip(columns, values, strict=True)))
    return _convert_sharegpt({**row, "messages": messages})


def _joined(row: Row, question: str, answer: str) -> dict[str, Any]:
    """A question and an answer, of which one is a list of messages and the other perhaps a text."""
    prompt = row.get(question)
    reply = row.get(answer)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(reply, str):
        reply = [{"role": "assistant", "content": reply}]
    messages = _messages(reply)
    if messages[: len(_messages(prompt))] != _messages(prompt):
        messages = [*_messages(prompt), *messages]
    return {"messages": _with_system(messages, row), **_kept(row)}


def _keep_messages(row: Row) -> dict[str, Any]:
    return {"messages": _messages(row.get("messages")), **_kept(row)}


def _whole_pair(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> dict[str, Any]:
    """Two conversations that begin with the same prompt, as they are."""
    if min(len(chosen), len(rejected)) < 2 or chosen[0] != rejected[0]:
        raise CannotConvert("its two conversations begin differently: there is no prompt")
    return _pair([], chosen, rejected)


def _convert_sharegpt_pair(row: Row) -> dict[str, Any]:
    chosen = _messages(row.get("chosen"))
    rejected = _messages(row.get("rejected"))
    if row.get("conversations"):
        prompt = _with_system(_messages(row["conversations"]), row)
        return {**_pair(prompt, chosen, rejected), **_kept(row)}
    return {**_whole_pair(_with_system(chosen, row), _with_system(rejected, row)), **_kept(row)}


def _convert_text_prompt(row: Row) -> dict[str, Any]:
    chosen = _messages(row.get("chosen"))
    rejected = _messages(row.get("rejected"))
    if chosen[0]["role"] == "assistant":
        prompt = [{"role": "user", "content": _text(row, "prompt")}]
        return {**_pair(prompt, chosen, rejected), **_kept(row)}
    return {**_whole_pair(chosen, rejected), **_kept(row)}


def _convert_messages_prompt(row: Row) -> dict[str, Any]:
    prompt = _with_system(_messages(row.get("messages")), row)
    return {**_answered(prompt, row), **_kept(row)}


def _convert_prompt_beside(row: Row) -> dict[str, Any]:
    prompt = _with_system(_messages(row.get("prompt")), row)
    return {**_answered(prompt, row), **_kept(row)}


def _convert_text_pair(row: Row) -> dict[str, Any]:
    prompt = _with_system([{"role": "user", "content": _text(row, "prompt")}], row)
    return {**_answered(prompt, row), **_kept(row)}


def _convert_openai_pair(row: Row) -> dict[str, Any]:
    request = row.get("input")
    if not isinstance(request, dict):
        raise CannotConvert("has no `input`")
    return {**_answered(_messages(request.get("messages")), row), **_kept(request)}


def _answered(prompt: list[dict[str, Any]], row: Row) -> dict[str, Any]:
    """A prompt with each of the two answers, texts or messages, below it."""
    answers = {}
    for name in ("chosen", "rejected"):
        answer = row.get(name)
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        messages = _messages(answer)
        if messages[: len(prompt)] != prompt:
            messages = [*prompt, *messages]
        answers[name] = messages
    return answers


def _convert_dialogue_pair(row: Row) -> dict[str, Any]:
    """HH-RLHF: a dialogue as one text, in each of the two columns."""
    return _whole_pair(_dialogue(row.get("chosen")), _dialogue(row.get("rejected")))


def _dialogue(text: object) -> list[dict[str, Any]]:
    if not isinstance(text, str):
        raise CannotConvert("has no dialogue")
    before, *parts = _TURN.split(text)
    if before.strip() or not parts:
        raise CannotConvert("does not begin with `Human:`")
    messages = []
    for speaker, words in zip(parts[::2], parts[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        messages.append({"role": role, "content": words.strip()})
    return messages


def _convert_written_out(row: Row) -> dict[str, Any]:
    decoded = dict(row)
    for name, value in row.items():
        if isinstance(value, str) and value[:1] in ("[", "{"):
            decoded[name] = _decode(name, value)
    if decoded.get("chosen") is not None:
        return _convert_sharegpt_pair(decoded)
    return _convert_sharegpt(decoded)


def _decode(name: str, text: str) -> Any:
    """Messages that were written as JSON, or as Python shows them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        # numpy writes no commas between the items of an array; a line break inside a text would be escaped
        return ast.literal_eval(text.replace("}\n {", "},\n {"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise CannotConvert(f"its `{name}` is neither JSON nor a list as Python shows it") from None
