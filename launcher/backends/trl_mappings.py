"""TRL's arguments that hold a mapping: as JSON text, as the name of a JSON file, or as neither."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.backends.rule import say
from launcher.errors import Finding, brief
from launcher.paths import is_file
from launcher.schema import Values, json_fault

LARGEST_FILE = 4 * 2**20  # bytes; what is larger is no config


class Unreadable(ValueError):
    """A text that is neither a mapping nor a file that holds one; the message says why."""


class Missing(Unreadable):
    """A text that names a file which is not on this machine; on another it may be."""


def inline(value: Any) -> dict[str, Any] | None:
    """The mapping that a JSON text holds, None for other texts and for broken JSON.

    Numbers and bools inside texts are converted, as transformers/training_args.py:161 does.
    """
    if not isinstance(value, str) or not value.startswith("{") or json_fault(value) is not None:
        return None
    converted = _converted(json.loads(value))
    assert isinstance(converted, dict)
    return converted


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _converted(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value


def from_file(name: str) -> dict[str, Any]:
    """The mapping in a JSON file; raises Missing where no such file is here, else Unreadable."""
    if not name:
        raise Unreadable("the empty text names no file")
    path = Path(name)
    if not is_file(path):
        raise Missing(f"there is no file {brief(name)} here")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise Unreadable(f"{brief(name)} is too large for a config")
        return _mapping(json.loads(path.read_text(encoding="utf-8")), name)
    except OSError as error:
        raise Missing(f"{brief(name)} cannot be read: {error.strerror}") from None
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Unreadable(f"{brief(name)} is not JSON: {error}") from None


def from_file_or_base64(name: str) -> dict[str, Any]:
    """As `from_file`; what is no file may be the mapping itself, as JSON or in base64.

    That is how accelerate/utils/deepspeed.py:155 reads DeepSpeed's.
    """
    try:
        return from_file(name)
    except Missing as fault:
        missing = fault
    for decoded in (str, _base64):
        try:
            value = json.loads(decoded(name))
        except (RecursionError, ValueError):
            continue
        return _mapping(value, name)
    raise missing


def _base64(text: str) -> str:
    return base64.urlsafe_b64decode(text).decode()


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable(f"{brief(name)} holds no mapping")
    return value


def missing_file(key: str, fault: Missing) -> Finding:
    """What to say about a file that is not here: the machine that trains may have it."""
    return say(
        "warning", "run", "missing-config", key, f"`{key}`: {fault}",
        "relative paths start where launch is started; `~` is not expanded",
    )  # fmt: skip


def plain_texts(values: Values) -> Iterator[Finding]:
    """trl/scripts/sft.py:83, dpo.py:81: a text that is no JSON stays one, and the first read crashes.

    Those that may name a file are read by their own rules.
    """
    for key in (
        "model_init_kwargs", "dataset_kwargs", "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ):  # fmt: skip
        text = values.get(key)
        if isinstance(text, str) and text and not text.startswith("{"):
            yield say(
                "error", "run", "not-a-mapping", key,
                f"`{key}` is a mapping, `{brief(text)}` would crash when it is read",
                f"write `{key}: {{name: value}}`",
            )  # fmt: skip
