"""A model's chat template: its text, and whether TRL can tell answers from questions in what it
writes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from launcher.artifacts import model_config
from launcher.files import read_bytes, read_json
from launcher.paths import SNAPSHOTS, is_dir, is_file

WRITE_IT = "write it to x.jinja, then `chat_template_path: x.jinja`"
"""What to do with the text of a template, for a trainer that takes the path of one."""
PUT_IT_BESIDE = (
    "write it to chat_template.jinja in a folder with the tokenizer's files, then "
    "`tokenizer_name_or_path: FOLDER`, and delete this line"
)
"""The same for a trainer that takes names alone, or what lies with the tokenizer."""
PUT_IT_INTO_THE_MODEL = (
    "write it to chat_template.jinja in the model's folder, and delete this line"
)
_JINJA = re.compile(r"\{[%{#]|[\r\n]")
# trl/chat_template_utils.py::has_generation_markers
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_BYTES = 2**20


def read_template(model: str, environ: Mapping[str, str]) -> str | None:
    """The chat template of a model by folder or hub name; empty where it has none, None where it is
    not here.
    """
    folder = _find_folder(model, environ)
    if folder is None:
        return None
    own_file = folder / "chat_template.jinja"
    if is_file(own_file):
        return _read_text(own_file)
    for name in ("chat_template.json", "tokenizer_config.json"):
        if is_file(folder / name):
            return _pick_default(read_json(folder / name).get("chat_template"))
    return None


def _find_folder(model: str, environ: Mapping[str, str]) -> Path | None:
    config = model_config.find_config_file(model, environ)
    if config is not None:
        return config.parent
    folder = Path(model)
    if is_dir(folder):
        return folder
    return None


def _read_text(path: Path) -> str | None:
    try:
        return read_bytes(path, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def _pick_default(template: object) -> str:
    """The template of that name where a tokenizer has several (`[{name, template}, ...]`)."""
    if isinstance(template, list):
        for variant in template:
            if isinstance(variant, dict) and variant.get("name") == "default":
                return str(variant.get("template") or "")
        return ""
    if isinstance(template, str):
        return template
    return ""


def is_template(value: object) -> bool:
    """Whether a value is the text of a template, where a name or a path of one is expected."""
    return isinstance(value, str) and _JINJA.search(value) is not None


def has_marker(template: str) -> bool:
    """Whether the template itself says which part of its text the assistant wrote."""
    return _MARKER.search(template) is not None


def is_replaced(template: str) -> bool:
    """Whether the pinned TRL knows how to change the template so that it does.

    TRL replaces the templates that it ships, by their exact text
    (trl/chat_template_utils.py::get_training_chat_template[== cohere_chat_template]).
    """
    return digest(template) in _read_replaced_templates()


def digest(template: str) -> str:
    """What a template is known by, whatever the line ends of its file."""
    return hashlib.sha256(template.replace("\r\n", "\n").encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _read_replaced_templates() -> Mapping[str, str]:
    """The templates that the pinned TRL replaces: digests and names. `scripts/snapshot.py` writes
    the table.
    """
    table = SNAPSHOTS / "trl_templates.json"
    content: dict[str, str] = json.loads(table.read_text(encoding="utf-8"))
    return content
