"""A model's own `config.json` and tokenizer, where they lie here: a folder or the hub's cache. No network."""

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


def read(name: object, environ: Mapping[str, str], revision: str | None = None) -> Mapping[str, Any]:
    """The config of a model by folder or hub name; empty where none is here, or it is broken."""
    path = where(name, environ, revision)
    return {} if path is None else read_json(path)


def where(name: object, environ: Mapping[str, str], revision: str | None = None) -> Path | None:
    """The file that holds it, readable or not; None where none is here."""
    if not isinstance(name, str) or not name:
        return None
    places = [_joined(name, "config.json")]
    # a folder of that name wins over the hub, as in transformers; `~` is not expanded there
    if not is_path(name) and (folder := snapshot(name, environ, revision)) is not None:
        places.append(folder / "config.json")
    return next(filter(is_file, places), None)


def built_from(values: Values, environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The config that the model is built by: `config_name` wins, and single keys may be replaced.

    Of a script that builds models of its own library `config_name` names one of that library's shapes, no model.
    """
    name = values["model_name_or_path"]
    if not values.schema.models:
        name = values.get("config_name") or name
    config = read(name, environ, values.get("model_revision"))
    return {**config, **replaced(values.get("additional_model_arguments"))} if config else {}


def replaced(given: Any) -> Mapping[str, Any]:
    """The keys of the config that a mapping, or its JSON text, replaces; none where it cannot be read."""
    try:
        data = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that also describes an image encoder."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def weights_type(config: Mapping[str, Any]) -> str:
    """The type of a model's weights, such as `bfloat16`; empty where its config names none.

    transformers 5 writes `dtype`, earlier ones `torch_dtype`; some only in the language model's part.
    """
    names = ("dtype", "torch_dtype")
    found = (part.get(name) for part in (config, text_part(config)) for name in names)
    return str(next(filter(None, found), "")).removeprefix("torch.")


def is_path(name: str) -> bool:
    """Whether a model's name can only be a folder: a hub name has at most one slash, and no dots."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def is_hub_name(name: str) -> bool:
    """Whether the hub could have a repository of that name (huggingface_hub's `validate_repo_id`)."""
    return len(name) <= _LONGEST_HUB_NAME and _HUB_NAME.fullmatch(name) is not None


def here(name: str) -> bool:
    """Whether anything of that name is here, as transformers looks: from the working directory."""
    return exists(Path(name))


def cached(name: str, environ: Mapping[str, str]) -> bool:
    return exists(repository(name, environ) / "snapshots")


@functools.lru_cache(maxsize=1024)
def _joined(*parts: str) -> Path:
    """A dozen rules ask for the same few places, of each of a thousand files."""
    return Path(*parts)


def repository(name: str, environ: Mapping[str, str], kind: str = "models") -> Path:
    return _joined(str(hub_cache(environ)), f"{kind}--{name.replace('/', '--')}")


def commit(name: str, environ: Mapping[str, str], revision: str | None = None, kind: str = "models") -> str | None:
    """The commit that the hub's cache here holds for a name and revision; None where it holds none."""
    kept, branch = str(repository(name, environ, kind)), revision or "main"
    if ".." in branch:
        return None
    try:
        commit = read_bytes(_joined(kept, "refs", branch)).decode().strip()
    except (OSError, ValueError):
        commit = ""
    return commit or (branch if exists(_joined(kept, "snapshots", branch)) else None)


def snapshot(name: str, environ: Mapping[str, str], revision: str | None = None, kind: str = "models") -> Path | None:
    """The folder of that commit, where one is known; nobody says that it is there, or whole."""
    at = commit(name, environ, revision, kind)
    return None if at is None else _joined(str(repository(name, environ, kind)), "snapshots", at)


def hub_cache(environ: Mapping[str, str]) -> Path:
    own = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return _joined(own or str(hub_home(environ) / "hub"))


def hub_home(environ: Mapping[str, str]) -> Path:
    """huggingface_hub's own folder: its cache, and the token of who is logged in."""
    base = environ.get("XDG_CACHE_HOME") or str(home(environ) / ".cache")
    return _joined(environ.get("HF_HOME") or f"{base}/huggingface")


def offline(environ: Mapping[str, str]) -> bool:
    return offline_by(environ) is not None


def offline_by(environ: Mapping[str, str]) -> str | None:
    """The variable that keeps the hub off: the first that holds anything
    (huggingface_hub/constants.py::[HF_HUB_OFFLINE]).
    """
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    first = next((name for name in names if environ.get(name)), None)
    return first if first and environ[first].upper() in {"1", "ON", "YES", "TRUE"} else None


def home(environ: Mapping[str, str]) -> Path:
    """The user's home as the environment names it; a folder that is not there where it does not."""
    return Path(environ.get("HOME") or "/nonexistent")
