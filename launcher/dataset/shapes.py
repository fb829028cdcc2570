"""Forms of rows that people have and no trainer reads, and what to write instead -> `RowForm`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.dataset.survey import Survey

Row = Mapping[str, Any]

_QUESTIONS = ("question", "query", "instruction", "prompt", "input", "problem", "user", "human")
_ANSWERS = ("answer", "response", "output", "completion", "solution", "assistant", "reply", "target")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}


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
    is_pairs = {"chosen", "rejected"} <= survey.columns
    return _recognise_pairs(survey) if is_pairs else _recognise_answers(survey)


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


def _recognise_pairs(survey: Survey) -> RowForm | None:
    columns = survey.columns
    kind = survey.kind("chosen")
    into = "`chosen` and `rejected`, each a conversation with its prompt"
    if "conversations" in columns and survey.kind("conversations") == "list":
        return RowForm(name="ShareGPT pairs", into=into, convert=_convert_sharegpt_pair)
    if kind == "list" and survey.count("chosen", "from-value"):
        return RowForm(name="ShareGPT pairs", into=into, convert=_convert_sharegpt_pair)
    if survey.count("chosen", "json-messages"):
        return RowForm(name="messages as text", into=into, convert=_convert_json_text)
    if survey.kind("prompt") == "text" and kind == "list":
        return RowForm(name="a text prompt beside conversations", into=into, convert=_convert_text_prompt)
    questions = [name for name in prompt_columns(survey) if name != "conversations"]
    if "prompt" not in columns and kind == "text" and questions:
        return RowForm(name="Alpaca pairs", into=into, convert=_convert_alpaca_pair)
    if "prompt" not in columns and kind == "list" and "messages" in questions:
        return RowForm(name="a `messages` prompt beside answers", into=into, convert=_convert_messages_prompt)
    return None


def _recognise_answers(survey: Survey) -> RowForm | None:
    columns = survey.columns
    for name in ("messages", "conversations"):
        if survey.kind(name) == "text" and survey.count(name, "json-messages"):
            return RowForm(name="messages as text", into="`messages`", convert=_convert_json_text)
    for name in ("conversations", "messages"):
        if survey.kind(name) == "list" and survey.count(name, "from-value"):
            return RowForm(name="ShareGPT", into="`messages`", convert=_convert_sharegpt)
    if survey.kind("conversations") == "list" and "messages" not in columns:
        return RowForm(name="`conversations`", into="`messages`", convert=_convert_sharegpt)
    if survey.kind("messages") == "list" and "prompt" in columns:
        return RowForm(name="`messages` beside a prompt", into="`messages`", convert=_keep_messages)
    if survey.kind("instruction") == "text" and survey.kind("output") == "text":
        return RowForm(name="Alpaca", into="`messages`", convert=_convert_alpaca)
    question = next((name for name in _QUESTIONS if survey.kind(name) is not None), None)
    answer = next((name for name in _ANSWERS if survey.kind(name) is not None), None)
    if question is not None and answer is not None and not ("prompt" in columns and "completion" in columns):
        return RowForm(
            name=f"`{question}` and `{answer}`",
            into="`messages`",
            convert=lambda row: _chat(_text(row, question), _text(row, answer), row.get("system")),
        )
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


def _instruction(row: Row) -> str:
    """The question of an Alpaca row: the instruction, and the input below it where there is one."""
    name = next((name for name in ("instruction", "question", "query", "problem", "input") if row.get(name)), None)
    if name is None:
        raise CannotConvert("has no `instruction`")
    below = row.get("input") if name != "input" else None
    question = _text(row, name)
    return f"{question}\n\n{below}" if isinstance(below, str) and below.strip() else question


def _convert_alpaca(row: Row) -> dict[str, Any]:
    return _chat(_instruction(row), _text(row, "output"), row.get("system"))


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


def _messages(value: object) -> list[dict[str, Any]]:
    """Messages with `role` and `content`, whatever they were called."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise CannotConvert("has no messages")
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise CannotConvert("has a message that is no object")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str):
            raise CannotConvert("has a message without a role")
        rest = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
        messages.append({"role": _ROLES.get(role, role), "content": content, **rest})
    return messages


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
    prompt = _messages(row.get("messages"))
    chosen = _messages(row.get("chosen"))
    rejected = _messages(row.get("rejected"))
    return {**_pair(prompt, chosen, rejected), **_kept(row)}


def _convert_json_text(row: Row) -> dict[str, Any]:
    decoded = dict(row)
    for name, value in row.items():
        if isinstance(value, str) and value[:1] in "[{":
            try:
                decoded[name] = json.loads(value)
            except ValueError:
                raise CannotConvert(f"its `{name}` is not JSON") from None
    if "chosen" in decoded:
        return _convert_sharegpt_pair(decoded)
    return _convert_sharegpt(decoded)
