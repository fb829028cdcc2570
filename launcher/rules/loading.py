"""Rules about the loading of a model: is it here, and is all of it here?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import architecture, model_config, model_files
from launcher.artifacts.architecture import Shape
from launcher.errors import Finding, InvalidConfig, brief
from launcher.paths import is_file
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.rule import say
from launcher.rules.trl.resolved import inline

# arguments of the loader with which other files are right than the usual ones
_OTHER_FILES = {"gguf_file", "ignore_mismatched_sizes", "subfolder", "use_safetensors", "variant"}
_CODE = "incomplete-model"
_MODEL = "model_name_or_path"


def _config(context: Context) -> Mapping[str, Any]:
    values = context.values
    name = values.get("config_name") or values[_MODEL]
    return model_config.read(name, context.environ, values.get("model_revision"))


def _arguments(context: Context) -> Mapping[str, Any]:
    """What the model is loaded with beside its name."""
    values = context.values
    return inline(values.get("model_init_kwargs")) or model_config.replaced(values.get("additional_model_arguments"))


def other_weights(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:4267: what has another size in the files is refused, and what is not
    in them begins at random, which a table in the log says.
    """
    given = _arguments(context)
    name = str(context.values[_MODEL] or "")
    own = _shape(model_config.read(name, context.environ)) if Path(name).is_dir() else None
    there = None if own is None or given.keys() & _OTHER_FILES else model_files.sizes(Path(name))
    if own is None or there is None:
        return
    if not any(one.startswith("model.") for one in there):
        # a model without its head, whose names transformers completes
        there = {one if one in own.outer else f"model.{one}": size for one, size in there.items()}
    needed = by_name(_shape({**_config(context), **given}) or own)
    other = [one for one in needed.keys() & there.keys() if by_name(own).get(one) != there[one]]
    if other:
        found, expected = (" x ".join(map(str, sizes[min(other)])) for sizes in (there, needed))
        fault = f"{min(other)} is {found} in its files, and {expected} by its config.json"
        message = f"{brief(name)} cannot be trained from: {fault}"
        yield say(context.at_start, _CODE, _MODEL, message, "config.json is another model's")
    if gone := sorted(needed.keys() - there.keys()):
        some = next(iter(there), None)
        message = (
            f"{len(gone)} of {len(needed)} weights of {brief(name)} are in no file and begin at random: {gone[0]} ..."
        )
        help = f"its files hold {some} and others" if some else None
        # single ones may be meant to
        yield say(context.at_start if len(gone) == len(needed) else "warning", _CODE, _MODEL, message, help)


def by_name(shape: Shape) -> Mapping[str, tuple[int, ...]]:
    """The size of each weight of a model."""
    inner = {f"model.layers.{i}.{n}": s for i in range(shape.layers) for n, s in shape.layer.items()}
    return {**shape.outer, **inner}


def _shape(config: Mapping[str, Any]) -> Shape | None:
    try:
        return architecture.shape_of(config)
    except InvalidConfig:
        return None


def missing_model(context: Context) -> Iterator[Finding]:
    """finetune.py:541, dpo_tune_cache.py:279, trl/scripts/sft.py:104: neither a folder nor a hub name; nor
    what open-instruct takes the config or the tokenizer from (finetune.py:526, finetune.py:411).
    """
    if not context.running:
        return
    seen = set()
    for key in (_MODEL, "config_name", "tokenizer_name_or_path"):
        name = context.values.get(key)
        if isinstance(name, str) and name and name not in seen:
            seen.add(name)
            yield from _missing(context, key, name)


def _missing(context: Context, key: str, name: str) -> Iterator[Finding]:
    # the config alone may be a file
    if is_file(Path(name)) and key != "config_name":
        message = f"{name} is a file, no folder"
        help = f"name the folder with its config.json, such as {Path(name).parent}"
    elif model_config.here(name) or (key == _MODEL and _config(context)):
        return
    elif model_config.is_path(name):
        message = f"there is no folder {name} here"
        help = "relative paths start where launch is started; `~` is not expanded"
    elif model_config.offline(context.environ) and not model_config.cached(name, context.environ):
        message = f"{name} is neither here nor in the hub's cache, and HF_HUB_OFFLINE is set"
        help = "unset HF_HUB_OFFLINE, or download it first"
    else:
        return
    yield say("error", "missing-model", key, message, help)


def incomplete_model(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:631, transformers/models/auto/configuration_auto.py:433: seen when
    it is loaded, on every GPU. A folder with a config alone is one to plan with.
    """
    values = context.values
    revision, config = values.get("model_revision"), values.get("config_name")
    if caches_only(context) or _arguments(context).keys() & _OTHER_FILES:
        return
    folder = _read_from(context, config or values[_MODEL], revision)
    if folder is not None and (fault := model_files.config_fault(folder)) is not None:
        yield _incomplete(context, _CODE, "config_name" if config else _MODEL, fault)
        if not config:
            return
    if (folder := _read_from(context, values[_MODEL], revision)) is None:
        return
    fault = model_files.weights_fault(folder)
    # transformers/integrations/peft.py:340
    if fault is None and is_file(folder / model_files.ADAPTER) and not context.lacks("peft"):
        fault = f"the adapter beside its weights ({model_files.ADAPTER}) is put on, and nothing is trained"
    if fault is not None:
        yield _incomplete(context, _CODE, _MODEL, fault)


def incomplete_tokenizer(context: Context) -> Iterator[Finding]:
    """transformers/models/qwen2/tokenization_qwen2.py:53: without its files one without words is made."""
    values = context.values
    named = [key for key in ("tokenizer_name_or_path", _MODEL) if values.get(key)]
    revision = values.get("tokenizer_revision") or values.get("model_revision")
    for key in (*named[:1], "chat_template_path"):
        folder = _read_from(context, values.get(key), revision)
        if folder is not None and (fault := model_files.tokenizer_fault(folder)) is not None:
            yield _incomplete(context, "incomplete-tokenizer", key, fault)


def _incomplete(context: Context, code: str, key: str, fault: str) -> Finding:
    name = str(context.values[key])
    message = f"{brief(name)} cannot be trained from: {fault}"
    whole = "finish the run that makes it, or copy it again"
    help = f"git -C {shlex.quote(name)} lfs pull" if "git-lfs" in fault else whole
    return say(context.at_start, code, key, message, help)


def _read_from(context: Context, name: object, revision: str | None) -> Path | None:
    """The folder that is read and nothing else: of the hub's cache what is missing is fetched.

    One that only describes a model says nothing before something is to be started.
    """
    folder = None
    if isinstance(name, str) and name and Path(name).is_dir():
        folder = Path(name)
    elif model_config.offline(context.environ):
        config = model_config.where(name, context.environ, revision)
        folder = None if config is None else config.parent
    described = folder is not None and not context.running and model_files.is_bare(folder)
    return None if described else folder


RULES: tuple[StageRule, ...] = (missing_model, incomplete_model, incomplete_tokenizer, other_weights)
