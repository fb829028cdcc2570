"""A rule about how a TRL stage names the modules that it puts adapters on: words, lists, patterns.

Which modules the model has is PEFT's to say, in a rehearsal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.backends.rule import Rule, say
from launcher.errors import Finding, brief
from launcher.schema import Values

_KEY = "lora_target_modules"
# names between commas or spaces: no module has either, and no pattern is made of such
_SEVERAL = re.compile(r"[\w.-]+(?:\s*,\s*|\s+)[\w.,\s-]*")


def _words(values: Values) -> list[str]:
    given = values[_KEY]
    return [str(word) for word in (given if isinstance(given, list) else [given]) if word]


def lora_targets(values: Values) -> Iterator[Finding]:
    """trl/trainer/model_config.py:177: a single word is a pattern, and peft wants it to match a module."""
    words = _words(values)
    joined = [word for word in words if _SEVERAL.fullmatch(word)]
    if not values["use_peft"]:
        return
    others = values["lora_target_parameters"]
    # a word without dots or stars is the name of no module inside of another
    if len(words) == 1 and re.fullmatch(r"\w+", words[0]) and words[0] != "lm_head":
        yield say(
            "warning" if others else "error", "run", "lora-targets", _KEY,
            f"`{_KEY}: {brief(words[0])}`: a single word is a pattern for whole names, which "
            "begin with model.layers, and matches none",
            f"write `{_KEY}: .*{words[0]}`, or a list of several",
        )  # fmt: skip
    elif len(words) == 1 and (fault := _broken(words[0])) is not None:
        yield say(
            "error", "run", "lora-targets", _KEY,
            f"`{_KEY}: {brief(words[0])}`: a single word is a pattern, and this is none: {fault}",
            "write a list of several names, or a pattern such as .*q_proj",
        )  # fmt: skip
    if not joined:
        return
    alone = joined == words and not others
    names = [name for name in re.split(r"[,\s]+", joined[0]) if name]
    yield say(
        "error" if alone else "warning", "run", "lora-targets", _KEY,
        f"`{_KEY}: {brief(joined[0])}` is one name, which no module has: "
        + ("peft refuses it" if alone else "nothing is trained for it"),
        f"write a list: `{_KEY}: [{', '.join(names)}]`",
    )  # fmt: skip


def _broken(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None


RULES: tuple[Rule, ...] = (lora_targets,)
