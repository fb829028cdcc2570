"""`${...}` in values -> what it stands for; omegaconf's syntax, and its only user."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import Any

from launcher.config.document import Origin, Steps, join, leaves, misplaced
from launcher.errors import Finding, InvalidConfig
from launcher.redaction import Redactor, holds_secret

MAX_CHARS = 2**15
"""Characters of all texts of a file that hold a `${`: omegaconf's parser takes 100 us for each."""
MAX_DEPTH = 16
"""`${` inside each other."""
MAX_COST = 2**19
"""What all of a file may expand to, in characters; a value costs as much as 16, a reference as 256."""
_TOO_MUCH = "it expands to too much"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpolated:
    """The tree of a file with every `${...}` resolved.

    `secrets` are the texts, by key, that took a secret from the environment, `borrowed` all variables that any took.
    """

    value: dict[str, Any]
    secrets: Mapping[str, str] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()


def interpolate(
    path: Path, tree: dict[str, Any], origins: Mapping[str, Origin], named: Mapping[str, Any] | None = None
) -> Interpolated:
    """Resolve every `${...}` of a file. Raises InvalidConfig naming each that cannot be resolved.

    `named` are further values that may be named.
    """
    texts = {k: text for k, text in leaves(tree) if isinstance(text, str) and "${" in text}
    if not texts:
        return Interpolated(value=tree)
    left, faults = MAX_CHARS, []
    for steps, text in texts.items():
        left -= len(text)
        if left < 0 or _depth(text) > MAX_DEPTH:
            long = f"the texts with `${{` are longer than {MAX_CHARS} characters in all"
            reason = long if left < 0 else f"`${{` is nested more than {MAX_DEPTH} deep"
            raise InvalidConfig(_unresolved(path, origins, steps, reason))
    # omegaconf costs 70 ms to import: paid only by files that interpolate
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    read: set[str] = set()
    borrowed: set[str] = set()

    def env(variable: str, *default: Any) -> Any:
        value = oc.env(variable, *default)
        if variable in os.environ:
            read.add(variable)
            borrowed.add(variable)
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
    with _metered() as spend:
        for steps, text in texts.items():
            read.clear()
            try:
                _at(resolved, steps[:-1])[steps[-1]] = _plain(_at(container, steps), spend)
            except Exception as error:
                # of one that is circular omegaconf raises whatever comes first
                faults.append(_unresolved(path, origins, steps, error, read))
                if _TOO_MUCH in str(error):
                    break
            if any(holds_secret(name, os.environ[name]) for name in read):
                secrets[reduce(join, steps, "")] = text
    if faults:
        redactor = Redactor.of(os.environ, borrowed)
        raise InvalidConfig(fault.naming_variables(redactor) for fault in faults)
    return Interpolated(value=resolved, secrets=secrets, borrowed=frozenset(borrowed))


@contextmanager
def _metered() -> Iterator[Callable[[int], None]]:
    """Bound what omegaconf does: it resolves a value anew for each reference, which doubles with every
    step of `a: ${b}${b}`, `b: ${c}${c}`. Yields what spends of the budget, and raises where that is over.
    """
    from omegaconf import Container
    from omegaconf.errors import InterpolationResolutionError

    resolve, left = Container.resolve_parse_tree, MAX_COST

    def spend(cost: int) -> None:
        nonlocal left
        left -= cost
        if left < 0:
            raise InterpolationResolutionError(_TOO_MUCH)

    def metered(self: Container, parse_tree: Any, node: Any, **more: Any) -> Any:
        spend(256)
        found = resolve(self, parse_tree, node, **more)
        spend(len(found) if isinstance(found, str) else 0)
        return found

    Container.resolve_parse_tree = metered  # type: ignore[method-assign, assignment]
    try:
        yield spend
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _plain(value: Any, spend: Callable[[int], None]) -> Any:
    spend(16 + (len(value) if isinstance(value, str) else 0))
    if isinstance(value, Mapping):
        return {key: _plain(value[key], spend) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(value[index], spend) for index in range(len(value))]
    return value


def _depth(text: str) -> int:
    steps = (1 if mark == "${" else -1 for mark in re.findall(r"\$\{|\}", text))
    return max(accumulate(steps, lambda depth, step: max(0, depth + step), initial=0))


def _unresolved(
    path: Path, origins: Mapping[str, Origin], steps: Steps, error: Exception | str, read: Collection[str] = ()
) -> Finding:
    key = reduce(join, steps, "")
    circle = isinstance(error, RecursionError) or not str(error)
    reason = "it is circular" if circle else str(error).splitlines()[0]
    if read and _TOO_MUCH not in reason:
        # the error would quote what the variables hold
        reason = f"not with the value of {', '.join(sorted(read))}"
    message = f"`{key}` cannot be interpolated: {reason}"
    return misplaced(path, origins, key, "interpolation", message, "write \\${ for a literal ${")


def _at(node: Any, steps: Steps) -> Any:
    for step in steps:
        node = node[step]
    return node
