"""What a shell completes: names and values of arguments, from the committed snapshots alone.

Every press of the key starts a process, so nothing of launch is imported that is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.files import read_bytes

Facts = Mapping[str, Any]

_BACKEND = re.compile(r"^backend:\s*(\w+)", re.M)
_EXTENDS = re.compile(r"^extends:", re.M)
_PLAIN = re.compile(r"[\w./+-]+")


def complete_key(incomplete: str) -> list[str]:
    """The arguments, of any stage and backend, that start like this; sorted."""
    return sorted({name for name, _ in _fields() if name.startswith(incomplete)})


def complete_override(
    stage: str, config: Path | None, before: Sequence[str], incomplete: str
) -> list[str]:
    """The `key=value` words of `launch STAGE CONFIG ...` that start like this; `before` are the others.

    Names end in `=`; where one name is left its values follow. bash hands over `key`, `=` and `value`
    as three words and puts back only the last; click makes the `=`, where it is the last, an empty one.
    """
    known = _known(stage, config)
    if not incomplete and before and before[-1] in known:
        return list(known[before[-1]])
    if len(before) > 1 and before[-1] == "=":
        return [value for value in known.get(before[-2], ()) if value.startswith(incomplete)]
    key, equals, given = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in known.get(key, ()) if value.startswith(given)]
    found = sorted(name for name in known if name.startswith(incomplete))
    if len(found) == 1 and known[found[0]]:
        return [f"{found[0]}={value}" for value in known[found[0]]]
    return [f"{name}=" for name in found]


def _known(stage: str, config: Path | None) -> dict[str, tuple[str, ...]]:
    """Everything that an override can name, with the values that are worth offering."""
    from launcher import keys

    known = {
        name: ("on", "off") if key.kind == "switch" or key.switch else key.words
        for name, key in keys.leaves()
    }
    for name, field in _fields(stage, _backend(config)):
        known.setdefault(name, _offered(field))
    return known


def _offered(field: Facts) -> tuple[str, ...]:
    """The values of a field: all of them where they are few, else its default and none at all."""
    if field.get("kind") == "bool":
        return ("true", "false")
    if field.get("choices"):
        return tuple(str(choice) for choice in field["choices"] if _is_itself(str(choice)))
    default = str(field.get("default"))
    # two, so that a shell puts no blank after the `=` that they share
    return (default, "null") if default != "None" and _is_itself(default) else ()


def _is_itself(word: str) -> bool:
    """Whether a word needs no quotes, neither the shell's nor YAML's (a plain `no` is a bool)."""
    from launcher.document import plain

    return _PLAIN.fullmatch(word) is not None and str(plain(word)) == word


def _backend(config: Path | None) -> str | None:
    """The backend that a stage file names; None where it cannot be told from the file alone."""
    try:
        text = "" if config is None else read_bytes(Path(config)).decode()
    except (OSError, ValueError):
        text = ""
    if (named := _BACKEND.search(text)) is not None:
        return named.group(1)
    return None if not text or _EXTENDS.search(text) else "open_instruct"


def _fields(stage: str | None = None, backend: str | None = None) -> Iterator[tuple[str, Facts]]:
    for facts in _snapshots():
        if backend in {None, facts["backend"]}:
            for name, keys in facts["stages"].items():
                if stage in {None, name}:
                    for key in keys:
                        yield key.rpartition(".")[2], facts["fields"][key]


def _snapshots() -> Iterator[Facts]:
    for path in files("launcher.snapshots").iterdir():
        if path.name.endswith(".json"):
            facts = json.loads(path.read_text(encoding="utf-8"))
            if "stages" in facts and "fields" in facts:
                yield facts
