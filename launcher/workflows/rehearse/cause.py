"""Which arguments a refusal may be about, and what becomes of it without one of them."""

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from launcher.workflows.rehearse.inside.records import ErrorRecord, ServerResponse

DOING = {
    "shrink": "while its model was made",
    "parse": "when it reads the arguments",
    "data": "when it loads the data",
    "construct": "when it prepares the data and the trainer",
    "train": "in the first two steps",
    "evaluate": "when it evaluates",
    "save": "when it saves",
    "load": "when the saved model is loaded",
}
_PHASES = tuple(DOING)
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"[\d.eE+-]+")
_DETAILS = re.compile(r"\d+|\[[^\]]*\]|\([^)]*\)")


class Effect(IntEnum):
    """What becomes of a refusal without an argument; from LATER on the argument is a cause."""

    NONE = 0
    ELSEWHERE = 1
    LATER = 2
    GONE = 3


def compare(before: ServerResponse, now: ServerResponse) -> Effect:
    """NONE also where nothing is known: the process ended, or launch's own code failed."""
    assert before.phase is not None and before.refusal is not None
    if now.phase is None:
        return Effect.NONE
    if now.refusal is None:
        return Effect.GONE
    if now.refusal.by_launch:
        return Effect.NONE
    if _compute_signature(now.refusal) == _compute_signature(before.refusal):
        return Effect.NONE
    if _PHASES.index(now.phase) > _PHASES.index(before.phase):
        return Effect.LATER
    # data are loaded while the trainer is prepared
    is_loading = before.phase == "construct" and now.phase == "data"
    if now.phase == before.phase or is_loading:
        return Effect.ELSEWHERE
    return Effect.NONE


def _compute_signature(refusal: ErrorRecord) -> tuple[Any, ...]:
    message = refusal.message
    if refusal.type == "Refused":
        # launch's own: one kind of fault a line, with other figures each time
        message = ""
    elif refusal.type != "KeyError":
        # the same sentence about other columns, rows or numbers
        message = _DETAILS.sub("#", message)
    return refusal.type, refusal.file, refusal.line, message[:120]


def find_suspects(refusal: ErrorRecord, args: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Arguments that a refusal names, or whose value it quotes, or that its code reads."""
    words = set(_WORD.findall(refusal.message))
    code = set(_WORD.findall("\n".join(refusal.code).replace(".", " ")))
    by_name = []
    by_value = []
    by_code = []
    for name in names:
        if name in words or f"--{name}" in refusal.message:
            by_name.append(name)
        elif quotes(refusal.message, args[name]):
            by_value.append(name)
        elif name in code:
            by_code.append(name)
    return by_name + by_value + by_code


def quotes(message: str, value: Any) -> bool:
    """Whether a message holds a text of this value; a number may stand there for anything."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return any(quotes(message, entry) for entry in value)
    if not isinstance(value, str) or len(value) <= 2 or _NUMBER.fullmatch(value):
        return False
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None
