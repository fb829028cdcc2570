"""YAML + `extends` + `key=value` overrides -> `Config`, with the place where every key was written.

Three shapes are read: launch's own stage files, the `open_instruct: {script, args}` wrapper, and
upstream's flat files. Interpolation (`${...}`) is omegaconf's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from launcher.document import KEY, LOADER, Builder, Origin, bad, join, read_yaml
from launcher.errors import Finding, InvalidConfig

Shape = Literal["stage", "wrapped", "flat"]

MAX_EXTENDS = 16
_INTERPOLATION = re.compile(r"(?<!\\)\$\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One stage as its author wrote it: nothing checked yet beyond being YAML of a known shape.

    `args` go to upstream under exactly these names. `options` are launch's own top-level keys.
    `origins` maps dotted keys (`args.learning_rate`, `args.mixer_list[1]`) to places.
    """

    path: Path
    shape: Shape
    options: Mapping[str, Any]
    args: Mapping[str, Any]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    parents: tuple[Path, ...] = ()

    def origin(self, key: str) -> Origin:
        """The place of `key`, or of the nearest enclosing key, or of the file."""
        while key:
            if key in self.origins:
                return self.origins[key]
            head, bracket, _ = key.rpartition("[")
            key = head if bracket else key.rpartition(".")[0]
        return Origin(str(self.path))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a stage file of any of the three shapes, merge its parents and the overrides into it.

    Raises InvalidConfig with every problem of the layer that failed: unreadable file, broken YAML,
    duplicate or non-text keys, `extends` cycles, malformed overrides.
    """
    path = Path(path)
    tree, origins, parents = _with_parents(path, ())
    tree, origins = _override(path, tree, origins, overrides)
    tree = _interpolate(path, tree, origins)
    return _shape(path, tree, origins, parents)


# --- several layers -------------------------------------------------------------------------------


def _with_parents(
    path: Path, children: tuple[Path, ...]
) -> tuple[dict[str, Any], dict[str, Origin], tuple[Path, ...]]:
    tree, origins = read_yaml(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree, origins, ()
    place = origins.pop("extends")
    if not isinstance(parent, str):
        raise InvalidConfig(bad(path, "bad-extends", "`extends` names one file", place.line))
    target = path.parent / parent
    chain = (*children, path)
    if target.resolve() in {p.resolve() for p in chain}:
        loop = " -> ".join(str(p) for p in (*chain, target))
        raise InvalidConfig(
            bad(path, "extends-cycle", f"`extends` goes in a circle: {loop}", place.line)
        )
    if len(chain) >= MAX_EXTENDS:
        raise InvalidConfig(
            bad(path, "extends-depth", f"more than {MAX_EXTENDS} parents", place.line)
        )
    if not target.exists():
        raise InvalidConfig(
            bad(
                path,
                "missing-parent",
                f"`extends: {parent}`: there is no {target}",
                place.line,
                "`extends` is relative to the file that holds it",
            )
        )
    base, base_origins, parents = _with_parents(target, chain)
    return _merge(base, tree), {**base_origins, **origins}, (target, *parents)


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge, lists replaced whole."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


OPTIONS = frozenset(
    {
        "stage",
        "backend",
        "deepspeed",
        "mixed_precision",
        "batch",
        "expect",
        "args",
        "name",
        "extends",
    }
)


def _override(
    path: Path, tree: dict[str, Any], origins: dict[str, Origin], overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Origin]]:
    findings = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        finding = _override_fault(text, key, equals, raw)
        if finding is not None:
            findings.append(finding)
            continue
        try:
            value = _override_value(raw, text)
        except InvalidConfig as error:
            findings.extend(error.findings)
            continue
        dotted = _override_key(key, tree)
        node: Any = tree
        *heads, last = dotted.split(".")
        for head in heads:
            below = node.get(head)
            node[head] = below if isinstance(below, dict) else {}
            node = node[head]
        node[last] = value
        stale = [known for known in origins if known.startswith((f"{dotted}.", f"{dotted}["))]
        for known in stale:
            del origins[known]
        origins[dotted] = Origin(str(path), None, text)
    if findings:
        raise InvalidConfig(findings)
    return tree, origins


def _override_fault(text: str, key: str, equals: str, raw: str) -> Finding | None:
    def bad(message: str, help: str) -> Finding:
        return Finding(
            severity="error",
            layer="launch",
            code="bad-override",
            key=key or None,
            message=message,
            help=help,
        )

    if not equals or not KEY.match(key) or key.endswith(".") or ".." in key:
        return bad(f"`{text}` is not of the form key=value", "write for example learning_rate=1e-5")
    if raw == "None":
        return bad(f"`{text}` would be the text 'None'", f"write {key}=null")
    return None


def _override_value(raw: str, text: str) -> Any:
    """An override's value is read as YAML: `a=[x,y]` and `a=1e-5` mean what they mean in a file."""
    if "\n" in raw or not raw.strip():
        return raw if raw.strip() else None
    try:
        return Builder(f"override `{text}`", {}).build(yaml.parse(raw, Loader=LOADER))
    except (yaml.YAMLError, InvalidConfig):
        if raw[:1] in "[{":
            raise InvalidConfig(
                Finding(
                    severity="error",
                    layer="launch",
                    code="bad-override",
                    message=f"`{text}`: the value is not valid YAML",
                    help="quote the whole override",
                )
            ) from None
        return raw


def _override_key(key: str, tree: Mapping[str, Any]) -> str:
    """`args.` may be left out: what is no option of ours is an argument of upstream's."""
    head = key.partition(".")[0]
    if head == "args" or "args" not in _arg_holder(tree)[1]:
        return key
    prefix = _arg_holder(tree)[0]
    if head in OPTIONS or head in {"open_instruct", "num_gpus"}:
        return key
    return f"{prefix}args.{key}"


def _arg_holder(tree: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    wrapped = tree.get("open_instruct")
    if isinstance(wrapped, dict) and "stage" not in tree:
        return "open_instruct.", {"args": None, **wrapped}
    if "stage" in tree or "args" in tree or "backend" in tree:
        return "", {"args": None, **tree}
    return "", tree


def _interpolate(path: Path, tree: dict[str, Any], origins: Mapping[str, Origin]) -> dict[str, Any]:
    keys = [
        key
        for key, value in _leaves(tree)
        if isinstance(value, str) and _INTERPOLATION.search(value)
    ]
    if not keys:
        return tree
    # omegaconf costs 70 ms to import: paid only by files that interpolate
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    findings = []
    container = OmegaConf.create(tree)
    for key in keys:
        try:
            OmegaConf.select(container, key, throw_on_missing=True)
        except OmegaConfBaseException as error:
            origin = origins.get(key, Origin(str(path)))
            reason = str(error).splitlines()[0]
            findings.append(
                bad(
                    Path(origin.file),
                    "interpolation",
                    f"`{key}`: {reason}",
                    origin.line,
                    "write \\${ for a literal ${",
                )
            )
    if findings:
        raise InvalidConfig(findings)
    resolved: dict[str, Any] = OmegaConf.to_container(container, resolve=True)  # type: ignore[assignment]
    return resolved


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(below, join(path, str(key)))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _leaves(below, f"{path}[{index}]")
    else:
        yield path, value


# --- shapes ---


def _shape(
    path: Path, tree: dict[str, Any], origins: dict[str, Origin], parents: tuple[Path, ...]
) -> Config:
    wrapped = tree.get("open_instruct")
    if isinstance(wrapped, dict) and "stage" not in tree:
        return _wrapped(path, tree, wrapped, origins, parents)
    if "stage" in tree or "args" in tree or "backend" in tree:
        options = {key: value for key, value in tree.items() if key != "args"}
        args = tree.get("args")
        if args is not None and not isinstance(args, dict):
            place = origins.get("args")
            raise InvalidConfig(
                bad(
                    path,
                    "bad-args",
                    "`args` is a mapping of upstream's own names",
                    place.line if place else None,
                )
            )
        return Config(
            path=path,
            shape="stage",
            options=options,
            args=args or {},
            origins=origins,
            parents=parents,
        )
    moved = {f"args.{key}": origin for key, origin in origins.items()}
    return Config(path=path, shape="flat", options={}, args=tree, origins=moved, parents=parents)


def _wrapped(
    path: Path,
    tree: Mapping[str, Any],
    inner: Mapping[str, Any],
    origins: Mapping[str, Origin],
    parents: tuple[Path, ...],
) -> Config:
    """The shape `open_instruct: {script, deepspeed_config, args}` with `num_gpus` beside it."""
    options: dict[str, Any] = {k: v for k, v in tree.items() if k != "open_instruct"}
    places = {key.removeprefix("open_instruct."): origin for key, origin in origins.items()}
    options.update({key: value for key, value in inner.items() if key != "args"})
    args = inner.get("args")
    if args is not None and not isinstance(args, dict):
        raise InvalidConfig(bad(path, "bad-args", "`open_instruct.args` is a mapping", None))
    return Config(
        path=path,
        shape="wrapped",
        options=options,
        args=args or {},
        origins=places,
        parents=parents,
    )
