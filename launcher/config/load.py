"""YAML + `extends` + `key=value` overrides -> `Config`, with the place where every key was written.

Three shapes are read: launch's own stage files, the `open_instruct: {script, args}` wrapper, and
upstream's flat files. Interpolation (`${...}`) is omegaconf's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import yaml

from launcher.config import foreign
from launcher.config.document import (
    LOADER,
    SUFFIXES,
    UNUSABLE,
    Builder,
    Document,
    Origin,
    bad,
    join,
    leaves,
    misplaced,
    parse,
    place_of,
    plain,
    read_yaml,
    refused,
)
from launcher.config.interpolation import interpolate
from launcher.config.keys import KEYS
from launcher.errors import Finding, InvalidConfig, brief
from launcher.paths import canonical, exists, expanded

MAX_EXTENDS = 16
LARGEST = 10**64
"""Numbers from here on are a mistake."""
Shape = Literal["stage", "wrapped", "flat"]
"""A file's, before it is read: the values are always those of a stage file."""
_WRAPPED_DEEPSPEED = "deepspeed_config"
PIPELINE = "is-pipeline"
"""The code of what a file is refused with that holds several stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One stage as its author wrote it: nothing checked yet beyond being YAML of a known shape.

    `args` go to upstream under exactly these names. `options` are launch's own top-level keys.
    `origins` maps dotted keys (`args.learning_rate`, `args.mixer_list[1]`) to places. `faults` are
    keys that stand twice or cannot be keys; the last value of a key that stands twice is held. `secrets`
    are the texts, by dotted key, of values that took a secret from the environment.
    """

    path: Path
    shape: Shape
    options: Mapping[str, Any]
    args: Mapping[str, Any]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    parents: tuple[Path, ...] = ()
    faults: tuple[Finding, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> Origin:
        """The place of `key`, or of the nearest enclosing key, or the start of the file."""
        return place_of(self.path, self.origins, key)

    def placed(self, finding: Finding) -> Finding:
        """The finding with the file and line of its key."""
        return replace(finding, **self.origin(finding.key or "").place)


def load(path: str | Path, overrides: Sequence[str] = (), *, text: str | None = None) -> Config:
    """Read a stage file of any of the three shapes, merge its parents and the overrides into it.

    `text` is taken in the place of what the file holds, which then is not read. Raises InvalidConfig
    with every problem of the layer that failed: unreadable file, broken YAML, `extends` cycles,
    malformed overrides, unresolvable interpolation.
    """
    path = Path(path)
    document, parents = _with_parents(path, (), text)
    _require_one_stage(path, document)
    shape = _shape_of(document.value)
    value, origins, named = _as_stage_file(path, shape, document)
    if faults := [fault for text in overrides if (fault := _override(path, value, origins, text)) is not None]:
        raise InvalidConfig(faults)
    value, secrets = interpolate(path, value, origins, named)
    args = _mapping(path, origins, "args", value.pop("args", None))
    return Config(
        path=path,
        shape=shape,
        options=value,
        args=args,
        origins=origins,
        parents=parents,
        faults=(*document.faults, *_too_large(path, {**value, "args": args}, origins)),
        secrets=secrets,
    )


def _too_large(path: Path, tree: Any, origins: Mapping[str, Origin]) -> Iterator[Finding]:
    """A finding for each number that no float can hold: YAML's `1e999`, or an integer of many digits."""
    for steps, value in leaves(tree):
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            key = reduce(join, steps, "")
            yield misplaced(path, origins, key, "bad-value", f"the number of `{key}` is too large")


# --- several layers -------------------------------------------------------------------------------


def _with_parents(
    path: Path, children: tuple[Path, ...], text: str | None = None
) -> tuple[Document, tuple[Path, ...]]:
    document = read_yaml(path) if text is None else parse(path, text)
    parent = document.value.pop("extends", None)
    if parent is None:
        return document, ()
    line = document.origins.pop("extends").line
    if not isinstance(parent, str) or not parent.strip():
        raise refused(path, "bad-extends", "`extends` names one file, relative to this one", line)
    target = path.parent / expanded(parent)
    if not {target.suffix, Path(canonical(target)).suffix} <= SUFFIXES:
        # whoever wrote the file may not be who may read what it names
        raise refused(path, "bad-extends", f"`extends: {brief(parent)}` names no `.yaml` or `.yml` file", line)
    chain = (*children, path)
    if canonical(target) in {canonical(known) for known in chain}:
        loop = " -> ".join(str(known) for known in (*chain, target))
        raise refused(path, "extends-cycle", f"`extends` goes in a circle: {loop}", line)
    if len(chain) >= MAX_EXTENDS:
        raise refused(path, "extends-depth", f"`extends` goes on for more than {MAX_EXTENDS} files", line)
    if not exists(target):
        message = f"`extends: {brief(parent)}`: there is no {brief(target, 200)}"
        help = "`extends` is relative to the file that holds it"
        raise refused(path, "missing-parent", message, line, help)
    base, parents = _with_parents(target, chain)
    origins = dict(base.origins)
    value = _merge(base.value, document.value, origins)
    origins |= document.origins
    return Document(value, origins, (*base.faults, *document.faults)), (target, *parents)


def _merge(
    base: Mapping[str, Any], top: Mapping[str, Any], origins: dict[str, Origin], path: str = ""
) -> dict[str, Any]:
    """Deep merge, lists replaced whole; `origins` forget the places of what was replaced."""
    merged = dict(base)
    for key, value in top.items():
        below, where = merged.get(key), join(path, key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _merge(below, value, origins, where)
        else:
            merged[key] = value
            _forget(origins, where)
    return merged


# --- shapes ---------------------------------------------------------------------------------------


def _require_one_stage(path: Path, document: Document) -> None:
    if isinstance(document.value.get("stages"), list) and "args" not in document.value:
        help, line = f"launch pipeline {path}, or name one of its stage files", document.origins["stages"].line
        raise refused(path, PIPELINE, "this is a pipeline, not a stage file", line, help)
    if (tool := foreign.format_of(document.value)) is not None:
        message = f"this is a file of {foreign.NAMES[tool]}, not a stage file"
        raise refused(path, "foreign-file", message, 1, f"launch init --from {path} converts it")


def _shape_of(tree: Mapping[str, Any]) -> Shape:
    if "open_instruct" in tree and not tree.keys() & {"stage", "args"}:
        return "wrapped"
    return "stage" if tree.keys() & {"stage", "args", "backend"} else "flat"


def _as_stage_file(
    path: Path, shape: Shape, document: Document
) -> tuple[dict[str, Any], dict[str, Origin], Mapping[str, Any]]:
    """Any shape as the keys of a stage file: their values, their places, and what `${}` finds beside them.

    Of upstream's own shape every key is an argument: options of ours can come from overrides only. The
    wrapped one is `open_instruct: {script, deepspeed_config, args}` with `num_gpus` beside it.
    """
    value, origins = document.value, document.origins
    if shape == "stage":
        return value, origins, {}
    if shape == "flat":
        lines = [origin.line for origin in origins.values() if origin.line is not None]
        start = Origin(str(path), min(lines, default=1))
        places = {f"args.{key}": origin for key, origin in origins.items()}
        return {"args": value}, {"args": start, **places}, value
    inner = _mapping(path, origins, "open_instruct", value["open_instruct"])
    whole = {**{k: v for k, v in value.items() if k != "open_instruct"}, **inner}
    if _WRAPPED_DEEPSPEED in whole:
        whole["deepspeed"] = whole.pop(_WRAPPED_DEEPSPEED)
    places = {key.removeprefix("open_instruct."): origin for key, origin in origins.items()}
    if _WRAPPED_DEEPSPEED in places:
        places["deepspeed"] = places.pop(_WRAPPED_DEEPSPEED)
    return whole, places, {"open_instruct": inner}


def _mapping(path: Path, origins: Mapping[str, Origin], key: str, value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    found = bad(path, "bad-args", f"`{key}` is a mapping of names to values, not `{brief(value)}`")
    raise InvalidConfig(replace(found, **place_of(path, origins, key).place))


# --- overrides ------------------------------------------------------------------------------------

_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]{1,200}|\[[0-9]{1,6}\])*\Z")
_STEPS = re.compile(r"\[([0-9]+)\]|([\w-]+)")


def _override(path: Path, tree: dict[str, Any], origins: dict[str, Origin], text: str) -> Finding | None:
    """Apply one `key=value` in place; what is wrong with it instead where it cannot be."""
    key, equals, raw = text.partition("=")
    help: str | None = None
    # what is no UTF-8 cannot be printed
    shown = text.encode("utf-8", "backslashreplace").decode()
    message = f"`{brief(shown)}`"
    if UNUSABLE.search(text):
        key, message = "", f"{message} is not UTF-8"
    elif not equals or not _OVERRIDE.match(key):
        key, message, help = "", f"{message} is not of the form key=value", "write for example learning_rate=1e-5"
    elif key == "extends":
        message += ": a parent is named in the file"
    elif not raw:
        # a variable of the shell that is not set, as often as not
        message += " has no value"
        help = f"write {key}=null to leave it to upstream, or {key}='\"\"' for an empty text"
    elif raw == "None":
        message, help = f"{message} would be the text 'None'", f"write {key}=null"
    else:
        try:
            value = _override_value(raw)
        except (yaml.YAMLError, InvalidConfig) as error:
            message += f": {_reason(error)}"
            help = f"for a text, quote it for YAML too: '{key}=\"...\"'"
        else:
            key = _full_key(key)
            reason = _set(tree, origins, key, value, Origin(str(path), None, text))
            if reason is None:
                return None
            message += f": {reason}"
    return replace(bad(path, "bad-override", message, None, help), key=key or None, override=shown)


def _set(tree: dict[str, Any], origins: dict[str, Origin], key: str, value: Any, origin: Origin) -> str | None:
    """Set what a dotted key names; why not where there is no such place."""
    *above, last = [int(index) if index else name for index, name in _STEPS.findall(key)]
    node: Any = tree
    path = ""
    for written in above:
        step = _place(node, written)
        if step is None:
            return _no_place(node, path)
        path = join(path, step)
        if isinstance(node, dict) and node.get(step) is None:
            # what is empty, or not there, can become a mapping: its place is this override
            node[step] = {}
            # but for all the arguments: that is the place of those that are missing
            if path != "args":
                origins[path] = origin
        node = node[step]
    step = _place(node, last)
    if step is None:
        return _no_place(node, path)
    node[step] = value
    path = join(path, step)
    _forget(origins, path)
    origins[path] = origin
    return None


def _no_place(node: Any, path: str) -> str:
    reason = "is no list" if isinstance(node, dict) else "holds nothing that has parts"
    if isinstance(node, list):
        reason = f"is a list of {len(node)} entries, the first is [0]"
    return f"`{path.removeprefix('args.')}` {reason}"


def _place(node: Any, step: str | int) -> str | int | None:
    """The key or index that a step means in this value; None where there is no such place."""
    if isinstance(node, dict):
        return step if isinstance(step, str) else None
    # `.1`, as omegaconf writes it, is [1]
    index = int(step) if isinstance(step, str) and step.isdecimal() else step
    return index if isinstance(node, list) and isinstance(index, int) and index < len(node) else None


def _reason(error: yaml.YAMLError | InvalidConfig) -> str:
    if isinstance(error, InvalidConfig):
        return error.findings[0].message
    problem = getattr(error, "problem", None)
    return f"the value is not valid YAML{f': {problem}' if problem else ''}"


def _override_value(raw: str) -> Any:
    """What stands after `=`: a YAML list, mapping or quoted text, else one plain value.

    Text that only looks like YAML (`a: b`, `x # y`, `- z`, `{% if %}`) is kept whole.
    """
    text, builder = raw.strip(), Builder("override")
    is_quoted = text[:1] in {"'", '"'}
    if not is_quoted and (text[:1] not in {"[", "{"} or text[:2] in {"{%", "{{", "{#"}):
        value = plain(text)
        return raw if isinstance(value, str) else value
    try:
        value = builder.build(yaml.parse(text, Loader=LOADER))
        if builder.findings:
            raise InvalidConfig(builder.findings)
    except (yaml.YAMLError, InvalidConfig):
        if not is_quoted:
            raise
        return raw
    return value


def _full_key(key: str) -> str:
    """`args.` may be left out: what is no option of ours is an argument of upstream's."""
    key = re.sub(r"^deepspeed_config(?![\w-])", "deepspeed", key.removeprefix("open_instruct."))
    first = re.split(r"[.\[]", key, maxsplit=1)[0]
    return key if first in (KEYS.keys() - {"extends"}) | {"num_gpus"} else f"args.{key}"


def _forget(origins: dict[str, Origin], path: str) -> None:
    """Drop the places of everything below `path`: it was replaced."""
    for known in [known for known in origins if known.startswith((f"{path}.", f"{path}["))]:
        del origins[known]


def spelt(value: Any) -> str:
    """A value as an override on the command line spells it, so that it is read as the same value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    # a JSON text is YAML's too, and quotes keep `1e-5` or `no` a text; it is interpolated once more
    return json.dumps(value, ensure_ascii=False).replace("${", r"\\${")
