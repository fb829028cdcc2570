"""One flag, key or directive of a source, and a source as a whole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher.config import document
from launcher.config.document import Document
from launcher.lazy_dataclass import dataclass

_DASHES = re.compile(r"-{1,2}(?=[A-Za-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetting:
    """`written` is the flag or key as its author wrote it, `key` its name with underscores alone.

    `missing` are the shell's expressions in the value that the script does not tell.
    """

    key: str
    value: Any
    written: str
    file: str
    line: int | None = None
    missing: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Recipe:
    """What a source says of one training.

    `tool` is whose names the settings have, `program` what the source starts, in its own words.
    `settings` are the trainer's, `launchers` those of whatever starts the trainer (accelerate,
    torchrun, srun), `directives` those of sbatch, `environment` the variables that the source sets.
    `gpus` are those of one machine, `counted` all that a command of the script was taken to count.
    `text` is that of a script, `texts` are files that the script writes. `skipped` are flags in
    places of the source that are not reached, with the reason.
    """

    path: Path
    tool: str
    program: str = ""
    stage: str | None = None
    settings: list[SourceSetting] = field(default_factory=list)
    launchers: list[SourceSetting] = field(default_factory=list)
    directives: list[SourceSetting] = field(default_factory=list)
    environment: list[SourceSetting] = field(default_factory=list)
    gpus: int | None = None
    nodes: int | None = None
    counted: int | None = None
    text: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    mended: list[tuple[str, int]] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    others: list[SourceSetting] = field(default_factory=list)
    skipped: list[tuple[SourceSetting, str]] = field(default_factory=list)
    absent: dict[str, int | None] = field(default_factory=dict)

    def get(self, *keys: str) -> SourceSetting | None:
        """The last setting of one of these names."""
        for setting in reversed(self.settings):
            if setting.key in keys:
                return setting
        return None

    def value(self, *keys: str) -> Any:
        return value_or(self.get(*keys), None)


def value_or(setting: SourceSetting | None, default: Any) -> Any:
    """The value of a setting; `default` if the source has no such setting."""
    if setting is None:
        return default
    return setting.value


def normalise_name(flag: str) -> str:
    """`--learning-rate` as the trainers' dataclasses call it."""
    return _DASHES.sub("", flag, count=1).replace("-", "_")


def find_near(path: str, source: Path) -> Path | None:
    """What a source means by a path: from here, beside the source, or in three folders above."""
    folder = source.parent
    for place in (Path(), folder, *folder.parents[:3]):
        with contextlib.suppress(OSError, ValueError):
            if (place / path).exists():
                return place / path
    return None


def make_flag(flag: str, file: str, line: int) -> SourceSetting:
    """A flag whose value is not read."""
    return SourceSetting(key=normalise_name(flag), value=None, written=flag, file=file, line=line)


def parse_value(text: str) -> Any:
    """A word of a command line: a number, `true`, `false`, `None`, or text; `no` stays text."""
    if text in ("None", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"\d+(_\d+)+", text):
        return int(text)
    value = document.parse_scalar(text)
    if isinstance(value, bool) or value is None:
        return text
    return value


def read_document(content: Document, file: str) -> list[SourceSetting]:
    """The keys of a YAML file as settings."""
    settings = []
    for key, value in content.value.items():
        setting = SourceSetting(key=key, value=value, written=key, file=file)
        origin = content.origins.get(key)
        if origin is not None:
            setting = replace(setting, line=origin.line)
        settings.append(setting)
    return settings


def is_off(value: Any) -> bool:
    """Whether a value only says that something is not used."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "false", "no", "none", "null", "off")
    return value is None or value is False or value in ([], {})


def is_on(value: Any) -> bool:
    """Whether a switch is on: `true`, `1`, `yes`."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "y", "t", "on")
    return value is True or value == 1


def as_list(value: Any) -> list[Any]:
    """A value that may stand alone instead of in a list."""
    if isinstance(value, list):
        return value
    return [value]


def leading_number(value: Any) -> int | None:
    """The whole number that a value begins with; None if there is none."""
    match = re.match(r"\d{1,5}", str(value))
    if match is None:
        return None
    return int(match[0])


def split_words(value: Any) -> list[str]:
    """The words of a value that may be a list, or one text with commas or blanks."""
    if isinstance(value, list):
        return [str(item).strip() for item in value]
    return [word for word in re.split(r"[,\s]+", str(value)) if word]


def keep_last_of_each(
    settings: Iterable[SourceSetting],
) -> tuple[list[SourceSetting], list[SourceSetting]]:
    """The last setting of each name, and the earlier ones that it replaces."""
    latest: dict[str, SourceSetting] = {}
    earlier: list[SourceSetting] = []
    for setting in settings:
        if setting.key in latest:
            earlier.append(latest.pop(setting.key))
        latest[setting.key] = setting
    return list(latest.values()), earlier
