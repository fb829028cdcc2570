"""`${...}` in values -> what it stands for; omegaconf's syntax, and its only user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.builder import Origin, bad, nearest
from launcher.errors import Finding, InvalidConfig


def interpolate(path: Path, tree: dict[str, Any], origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The tree with every `${...}` resolved; raises InvalidConfig naming each that cannot be."""
    keys = [steps for steps, text in _leaves(tree) if isinstance(text, str) and "${" in text]
    if not keys:
        return tree
    # omegaconf costs 70 ms to import: paid only by files that interpolate
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    faults = []
    for steps in keys:
        try:
            # each by itself: omegaconf stops at the first text that it cannot read
            OmegaConf.create([_at(tree, steps)])
        except OmegaConfBaseException as error:
            faults.append(_unresolved(path, origins, steps, error))
    if faults:
        raise InvalidConfig(faults)
    container = OmegaConf.create(tree)
    for steps in keys:
        try:
            _at(container, steps)
        except (OmegaConfBaseException, RecursionError) as error:
            faults.append(_unresolved(path, origins, steps, error))
    if faults:
        raise InvalidConfig(faults)
    resolved: dict[str, Any] = OmegaConf.to_container(container, resolve=True)  # type: ignore[assignment]
    return resolved


def _unresolved(
    path: Path, origins: Mapping[str, Origin], steps: tuple[str | int, ...], error: Exception
) -> Finding:
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
    origin = nearest(origins, key) or Origin(str(path), 1)
    reason = (str(error).splitlines() or ["it goes in a circle"])[0]
    help = "write \\${ for a literal ${"
    found = bad(
        path, "interpolation", f"`{key}` cannot be interpolated: {reason}", None, help
    )  # fmt: skip
    return replace(found, key=key, **origin.place)


def _at(node: Any, steps: tuple[str | int, ...]) -> Any:
    for step in steps:
        node = node[step]
    return node


def _leaves(
    value: Any, steps: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(below, (*steps, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _leaves(below, (*steps, index))
    else:
        yield steps, value
