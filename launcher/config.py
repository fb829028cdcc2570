"""YAML + `extends` + `key=value` overrides -> `Config`, with the place where every key was written.

Three shapes are read: launch's own stage files, the `open_instruct: {script, args}` wrapper, and
upstream's flat files. Interpolation (`${...}`) is omegaconf's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from launcher.document import (
    SUFFIXES,
    Document,
    Origin,
    bad,
    join,
    leaves,
    nearest,
    parse,
    read_yaml,
    refused,
)
from launcher.errors import Finding, InvalidConfig, brief
from launcher.interpolation import interpolate
from launcher.overrides import Tree, forget
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
        return nearest(self.origins, key) or Origin(str(self.path), 1)

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
    tree = Tree(path, value, origins)
    if faults := [fault for text in overrides for fault in tree.override(text)]:
        raise InvalidConfig(faults)
    value, secrets = interpolate(path, value, origins, named)
    args = _mapping(path, origins, "args", value.pop("args", None))
    return Config(
        path=path, shape=shape, options=value, args=args, origins=origins, parents=parents,
        faults=(*document.faults, *_too_large(path, {**value, "args": args}, origins)),
        secrets=secrets,
    )  # fmt: skip


def _too_large(path: Path, tree: Any, origins: Mapping[str, Origin]) -> Iterator[Finding]:
    """A finding for each number that no float can hold: YAML's `1e999`, or an integer of many digits."""
    for steps, value in leaves(tree):
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            key = reduce(join, steps, "")
            found = bad(path, "bad-value", f"the number of `{key}` is too large", None)
            origin = nearest(origins, key) or Origin(str(path), 1)
            yield replace(found, key=key, **origin.place)


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
        message = f"`extends: {brief(parent)}` names no `.yaml` or `.yml` file"
        raise refused(path, "bad-extends", message, line)
    chain = (*children, path)
    if canonical(target) in {canonical(known) for known in chain}:
        loop = " -> ".join(str(known) for known in (*chain, target))
        raise refused(path, "extends-cycle", f"`extends` goes in a circle: {loop}", line)
    if len(chain) >= MAX_EXTENDS:
        message = f"`extends` goes on for more than {MAX_EXTENDS} files"
        raise refused(path, "extends-depth", message, line)
    if not exists(target):
        message = f"`extends: {brief(parent)}`: there is no {brief(target, 200)}"
        help = "`extends` is relative to the file that holds it"
        raise refused(path, "missing-parent", message, line, help)
    base, parents = _with_parents(target, chain)
    origins = dict(base.origins)
    value = _merge(base.value, document.value, origins)
    origins |= document.origins
    faults = (*base.faults, *document.faults)
    return Document(value=value, origins=origins, faults=faults), (target, *parents)


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
            forget(origins, where)
    return merged


# --- shapes ---------------------------------------------------------------------------------------


def _require_one_stage(path: Path, document: Document) -> None:
    if isinstance(document.value.get("stages"), list) and "args" not in document.value:
        help = f"launch pipeline {path}, or name one of its stage files"
        line = document.origins["stages"].line
        message = "this is a pipeline, not a stage file"
        raise refused(path, PIPELINE, message, line, help)


def _shape_of(tree: Mapping[str, Any]) -> Shape:
    if "stage" in tree or "args" in tree:
        return "stage"
    if "open_instruct" in tree:
        return "wrapped"
    return "stage" if "backend" in tree else "flat"


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
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    origin = origins.get(key, Origin(str(path), 1))
    message = f"`{key}` is a mapping of names to values, not `{brief(value)}`"
    raise InvalidConfig(replace(bad(path, "bad-args", message), **origin.place))
