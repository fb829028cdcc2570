"""`${...}` in values -> what it stands for; omegaconf's syntax, and its only user."""

import os
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

from launcher import redaction
from launcher.config.document import Origin, Steps, join, leaves, misplaced
from launcher.errors import Finding, InvalidConfig


def interpolate(
    path: Path, tree: dict[str, Any], origins: Mapping[str, Origin], named: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with every `${...}` resolved, and the texts, by key, that took a secret from the environment.

    `named` are further values that may be named. Raises InvalidConfig naming each that cannot be resolved.
    """
    texts = {k: text for k, text in leaves(tree) if isinstance(text, str) and "${" in text}
    if not texts:
        return tree, {}
    faults = []
    # omegaconf costs 70 ms to import: paid only by files that interpolate
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    read: set[str] = set()

    def env(variable: str, *default: Any) -> Any:
        value = oc.env(variable, *default)
        if variable in os.environ:
            read.add(variable)
            redaction.borrow(variable)
        return value

    # the older name warns where the newer is there
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("oc.env", env, replace=True)
    for steps, text in texts.items():
        try:
            # each by itself: omegaconf stops at the first text that it cannot read
            OmegaConf.create([text])
        except Exception as error:
            faults.append(_unresolved(path, origins, steps, error))
    if faults:
        raise InvalidConfig(faults)
    secrets: dict[str, str] = {}
    container, resolved = OmegaConf.create({**(named or {}), **tree}), deepcopy(tree)
    for steps, text in texts.items():
        read.clear()
        try:
            _at(resolved, steps[:-1])[steps[-1]] = _plain(_at(container, steps))
        except Exception as error:
            # of one that is circular omegaconf raises whatever comes first
            faults.append(_unresolved(path, origins, steps, error, read))
        if any(redaction.holds_secret(name, os.environ[name]) for name in read):
            secrets[reduce(join, steps, "")] = text
    if faults:
        raise InvalidConfig(faults)
    return resolved, secrets


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(value[index]) for index in range(len(value))]
    return value


def _unresolved(
    path: Path, origins: Mapping[str, Origin], steps: Steps, error: Exception, read: Collection[str] = ()
) -> Finding:
    key = reduce(join, steps, "")
    circle = isinstance(error, RecursionError) or not str(error)
    reason = "it is circular" if circle else str(error).splitlines()[0]
    if read:
        # the error would quote what the variables hold
        reason = f"not with the value of {', '.join(sorted(read))}"
    message = f"`{key}` cannot be interpolated: {reason}"
    return misplaced(path, origins, key, "interpolation", message, "write \\${ for a literal ${")


def _at(node: Any, steps: Steps) -> Any:
    for step in steps:
        node = node[step]
    return node
