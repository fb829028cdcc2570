"""A model's own `config.json` and tokenizer, where they lie here: a folder or the hub's cache. No
network.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.files import read_bytes, read_json
from launcher.paths import exists, is_file
from launcher.upstream.schema import Values

_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?", re.ASCII)
_LONGEST_HUB_NAME = 96


def read_model_config(
    name: object, environ: Mapping[str, str], revision: str | None = None
) -> Mapping[str, Any]:
    """The config of a model by folder or hub name; empty where none is here, or it is broken."""
    path = find_config_file(name, environ, revision)
    if path is None:
        return {}
    return read_json(path)


def find_config_file(
    name: object, environ: Mapping[str, str], revision: str | None = None
) -> Path | None:
    """The file that holds it, readable or not; None where none is here."""
    if not isinstance(name, str) or not name:
        return None
    # a folder of that name takes precedence over the hub, as in transformers; `~` is not expanded
    # there
    path = _join_path(name, "config.json")
    if is_file(path):
        return path
    if is_path(name):
        return None
    folder = find_snapshot(name, environ, revision)
    if folder is None or not is_file(folder / "config.json"):
        return None
    return folder / "config.json"


def build_config(values: Values, environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The config that the model is built by: `config_name` wins, and single keys may be replaced.

    Of a script that builds models of its own library `config_name` names one of that library's
    shapes, no model.
    """
    name = values["model_name_or_path"]
    if not values.schema.models:
        name = values.get("config_name") or name
    config = read_model_config(name, environ, values.get("model_revision"))
    if not config:
        return {}
    return {**config, **parse_replacements(values.get("additional_model_arguments"))}


def parse_replacements(arguments: Any) -> Mapping[str, Any]:
    """The keys of the config that a mapping, or its JSON text, replaces; none if unreadable."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    if isinstance(arguments, dict):
        return arguments
    return {}


def take_text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that also describes an image encoder."""
    part = config.get("text_config")
    if isinstance(part, Mapping):
        return part
    return config


def find_weights_type(config: Mapping[str, Any]) -> str:
    """The type of a model's weights, such as `bfloat16`; empty where its config names none.

    transformers 5 writes `dtype`, earlier ones `torch_dtype`; some only in the language model's
    part.
    """
    for part in (config, take_text_part(config)):
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            return str(name).removeprefix("torch.")
    return ""


def is_path(name: str) -> bool:
    """Whether a name can only be a folder: a hub name has at most one slash, and no dots."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def is_hub_name(name: str) -> bool:
    """Whether the hub could have such a repository (huggingface_hub's `validate_repo_id`)."""
    return len(name) <= _LONGEST_HUB_NAME and _HUB_NAME.fullmatch(name) is not None


def is_local(name: str) -> bool:
    """Whether anything of that name is here, as transformers looks: from the working directory."""
    return exists(Path(name))


def is_cached(name: str, environ: Mapping[str, str]) -> bool:
    return exists(find_repository(name, environ) / "snapshots")


@functools.lru_cache(maxsize=1024)
def _join_path(*parts: str) -> Path:
    """A dozen rules ask for the same few places, of each of a thousand files."""
    return Path(*parts)


def find_repository(name: str, environ: Mapping[str, str], kind: str = "models") -> Path:
    return _join_path(str(find_hub_cache(environ)), f"{kind}--{name.replace('/', '--')}")


def find_commit(
    name: str, environ: Mapping[str, str], revision: str | None = None, kind: str = "models"
) -> str | None:
    """The commit that the hub's cache holds for a name and revision; None where it holds none."""
    cache = str(find_repository(name, environ, kind))
    branch = revision or "main"
    if ".." in branch:
        return None
    try:
        commit = read_bytes(_join_path(cache, "refs", branch)).decode().strip()
    except (OSError, ValueError):
        commit = ""
    if commit:
        return commit
    if exists(_join_path(cache, "snapshots", branch)):
        # it is a commit itself
        return branch
    return None


def find_snapshot(
    name: str, environ: Mapping[str, str], revision: str | None = None, kind: str = "models"
) -> Path | None:
    """The folder of that commit, if one is known; it may be missing or incomplete."""
    folder = find_commit(name, environ, revision, kind)
    if folder is None:
        return None
    return _join_path(str(find_repository(name, environ, kind)), "snapshots", folder)


def find_hub_cache(environ: Mapping[str, str]) -> Path:
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return _join_path(cache or str(find_hub_home(environ) / "hub"))


def find_hub_home(environ: Mapping[str, str]) -> Path:
    """huggingface_hub's own folder: its cache, and the token of who is logged in."""
    base = environ.get("XDG_CACHE_HOME") or str(find_home(environ) / ".cache")
    return _join_path(environ.get("HF_HOME") or f"{base}/huggingface")


def is_offline(environ: Mapping[str, str]) -> bool:
    return find_offline_variable(environ) is not None


def find_offline_variable(environ: Mapping[str, str]) -> str | None:
    """The variable that keeps the hub off: the first that holds anything
    (huggingface_hub/constants.py::[HF_HUB_OFFLINE]).
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        value = environ.get(name)
        if not value:
            continue
        if value.upper() in {"1", "ON", "YES", "TRUE"}:
            return name
        return None
    return None


def find_home(environ: Mapping[str, str]) -> Path:
    """The user's home as the environment names it; a folder that is not there where it does not."""
    return Path(environ.get("HOME") or "/nonexistent")
