"""`eval:` of a stage in a pipeline: a command that measures the stage's model, and what its
metrics must be.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from launcher.config import durations, keys
from launcher.errors import UsageError, shorten
from launcher.lazy_dataclass import dataclass

KEYS = ("command", "metrics", "expect", "timeout")
PLACEHOLDERS: Mapping[str, str] = {
    "model": "the folder of the stage's model",
    "gpus": "how many GPUs the stage has; 0 on the CPU",
    "run": "the run folder of the stage",
    "folder": "the folder of this evaluation, in which its results belong",
    "stage": "the name of the stage in the pipeline",
    "python": "the trainer's Python",
}
"""What may stand in braces in the words of a command, and what it is replaced by."""
TIMEOUT_S = 24 * 3600.0
"""How long an evaluation may take where its file says nothing."""

Complain = Callable[[str, str, str | None], None]
"""Takes the dotted key of a fault, the message and the help."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_GATE = re.compile(rf"\s*(?P<sign>>=|<=|==|>|<)\s*(?P<bound>{_NUMBER})\s*")
_PLACEHOLDER = re.compile(r"\{\{(?P<literal>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")
_TESTS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """What a metric must be: `>= 0.4`."""

    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        return _TESTS[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation: the words of its command, the file (a path or a pattern) with its metrics,
    and its gates.

    A relative `metrics` is one below the folder of the evaluation. `timeout_s` is in seconds.
    """

    command: tuple[str, ...]
    metrics: str | None = None
    expect: Mapping[str, Gate] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    def argv(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """The words of the command with `values` in the place of placeholders. A value never
        becomes several words.
        """
        return tuple(fill(word, values) for word in self.command)


def fill(word: str, values: Mapping[str, str]) -> str:
    """A word with its placeholders replaced; `{{model}}` is the text `{model}`, other braces
    are themselves.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return f"{{{match['literal']}}}"
        return values.get(match["name"], match[0])

    return _PLACEHOLDER.sub(replaced, word)


def read_evaluation_key(where: str, entry: Any, complain: Complain) -> Evaluation | None:
    """The evaluation below the key `where`; None where it is none. Each fault goes to
    `complain`.
    """
    if not isinstance(entry, dict):
        help = 'eval: {command: [lm_eval, --model_args, "pretrained={model}"], '
        help += 'metrics: "**/results_*.json"}'
        complain(where, f"`eval` is a mapping, not `{shorten(entry)}`", help)
        return None
    for key in entry:
        if key not in KEYS:
            message = f"`{shorten(key)}` is not a key of an evaluation"
            complain(f"{where}.{key}", message, keys.suggest_name(str(key), KEYS))
    command = _read_command(f"{where}.command", entry.get("command"), complain)
    metrics = _read_metrics(f"{where}.metrics", entry.get("metrics"), complain)
    expect = _read_gates(f"{where}.expect", entry.get("expect"), complain)
    timeout_s = _read_timeout(f"{where}.timeout", entry.get("timeout"), complain)
    if expect and entry.get("metrics") is None:
        help = "metrics: results.json, the file that the command writes; "
        help += "a pattern such as `**/results_*.json` too"
        message = "`expect` needs `metrics`, the file that the numbers are read from"
        complain(f"{where}.expect", message, help)
    if command is None:
        return None
    return Evaluation(command=command, metrics=metrics, expect=expect, timeout_s=timeout_s)


def _read_command(where: str, value: Any, complain: Complain) -> tuple[str, ...] | None:
    help = 'command: [lm_eval, --model, hf, --model_args, "pretrained={model}"]'
    if isinstance(value, str):
        complain(where, "`command` is a list of words: no shell reads it", help)
        return None
    if not isinstance(value, list) or not value:
        complain(where, "`command` is the list of the words of a command", help)
        return None
    words: list[str] = []
    for number, word in enumerate(value):
        place = f"{where}[{number}]"
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            message = f"a word of `command` is a text, not `{shorten(word)}`"
            complain(place, message, "put it in quotes")
            continue
        _check_placeholders(place, str(word), complain)
        words.append(str(word))
    if words and not words[0].strip():
        complain(f"{where}[0]", "the first word of `command` names a program, and is empty", help)
    return tuple(words)


def _check_placeholders(where: str, word: str, complain: Complain) -> None:
    for match in _PLACEHOLDER.finditer(word):
        name = match["name"]
        if name is not None and name not in PLACEHOLDERS:
            help = (
                keys.suggest_name(name, tuple(PLACEHOLDERS)) or f"one of {', '.join(PLACEHOLDERS)}"
            )
            message = f"`{{{name}}}` is not a placeholder of `eval`"
            complain(where, message, f"{help}; {{{{{name}}}}} stands for the text itself")


def _read_metrics(where: str, value: Any, complain: Complain) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        message = f"`metrics` is the path of a JSON file, not `{shorten(value)}`"
        complain(where, message, 'metrics: "**/results_*.json", below the folder of the evaluation')
        return None
    _check_placeholders(where, value, complain)
    return value


def _read_gates(where: str, value: Any, complain: Complain) -> dict[str, Gate]:
    if value is None:
        return {}
    help = 'expect: {gsm8k: ">= 0.4"}'
    if not isinstance(value, dict):
        message = f"`expect` is a mapping of metrics to what they must be, not `{shorten(value)}`"
        complain(where, message, help)
        return {}
    gates: dict[str, Gate] = {}
    for name, text in value.items():
        place = f"{where}.{name}"
        match = None
        if isinstance(text, str):
            match = _GATE.fullmatch(text)
        if match is None:
            message = f"`{shorten(name)}: {shorten(text)}` is not a sign and a number"
            signs = f"one of {', '.join(_TESTS)} and a number, in quotes: {help}"
            complain(place, message, signs)
            continue
        bound = float(match["bound"])
        if not math.isfinite(bound):
            complain(place, f"the number of `{shorten(name)}` is too large", help)
            continue
        gates[str(name)] = Gate(match["sign"], bound)
    return gates


def _read_timeout(where: str, value: Any, complain: Complain) -> float:
    if value is None:
        return TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        complain(
            where, f"`timeout` is a duration, not `{shorten(value)}`", "such as 90s, 10m or 1h30m"
        )
        return TIMEOUT_S
    try:
        return durations.parse_seconds(str(value))
    except UsageError as error:
        fault = error.findings[0]
        complain(where, fault.message, fault.help)
        return TIMEOUT_S
