"""`${...}` in values -> what it stands for; omegaconf's syntax, and its only user."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import field
from functools import reduce
from pathlib import Path
from typing import Any

from launcher.config.document import Origin, Steps, join, report_misplaced, walk_leaves
from launcher.errors import Finding, InvalidConfig
from launcher.lazy_dataclass import dataclass
from launcher.redaction import Redactor, holds_secret

MAX_CHARS = 2**15
"""Characters of all texts of a file that hold a `${`: omegaconf's parser takes 100 us for each."""
MAX_REFERENCES = 256
"""`${` in a file: 300 of them inside each other take its parser a second."""
MAX_COST = 2**19
"""What all of a file may expand to, in characters; a value costs as much as 16, a reference as
256.
"""
_TOO_MUCH = "it expands to too much"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpolated:
    """The tree of a file with every `${...}` resolved.

    `secrets` are the texts, by key, that took a secret from the environment, `borrowed` all
    variables that any took.
    """

    value: dict[str, Any]
    secrets: Mapping[str, str] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()


def interpolate(
    path: Path,
    tree: dict[str, Any],
    origins: Mapping[str, Origin],
    named: Mapping[str, Any] | None = None,
) -> Interpolated:
    """Resolve every `${...}` of a file. Raises InvalidConfig naming each that cannot be resolved.

    `named` are further values that may be named.
    """
    texts: dict[Steps, str] = {}
    for steps, text in walk_leaves(tree):
        if isinstance(text, str) and "${" in text:
            texts[steps] = text
    if not texts:
        return Interpolated(value=tree)
    _require_short(path, origins, texts)
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
    faults = []
    for steps, text in texts.items():
        try:
            # each by itself: omegaconf stops at the first text that it cannot read
            OmegaConf.create([text])
        except Exception as error:
            faults.append(_report_unresolved(path, origins, steps, _explain_error(error)))
    if faults:
        raise InvalidConfig(faults)
    secrets: dict[str, str] = {}
    container = OmegaConf.create({**(named or {}), **tree})
    resolved = deepcopy(tree)
    with _limit_expansion() as spend:
        for steps, text in texts.items():
            read.clear()
            try:
                value = _resolve_value(_follow_steps(container, steps), spend)
            except Exception as error:
                # of one that is circular omegaconf raises whatever comes first
                reason = _explain_error(error)
                is_endless = _TOO_MUCH in reason
                if read and not is_endless:
                    # the error would quote what the variables hold
                    reason = f"not with the value of {', '.join(sorted(read))}"
                faults.append(_report_unresolved(path, origins, steps, reason))
                if is_endless:
                    break
            else:
                _follow_steps(resolved, steps[:-1])[steps[-1]] = value
            if any(holds_secret(name, os.environ[name]) for name in read):
                secrets[_join_steps(steps)] = text
    if faults:
        redactor = Redactor.of(os.environ, borrowed)
        raise InvalidConfig(fault.naming_variables(redactor) for fault in faults)
    return Interpolated(value=resolved, secrets=secrets, borrowed=frozenset(borrowed))


def _require_short(path: Path, origins: Mapping[str, Origin], texts: Mapping[Steps, str]) -> None:
    """Raise InvalidConfig for more than omegaconf's parser reads in a moment."""
    length = 0
    references = 0
    for steps, text in texts.items():
        length += len(text)
        references += text.count("${")
        if length > MAX_CHARS:
            reason = f"the texts with `${{` are longer than {MAX_CHARS} characters in all"
            raise InvalidConfig(_report_unresolved(path, origins, steps, reason))
        if references > MAX_REFERENCES:
            reason = f"the file holds more than {MAX_REFERENCES} `${{`"
            raise InvalidConfig(_report_unresolved(path, origins, steps, reason))


@contextmanager
def _limit_expansion() -> Iterator[Callable[[int], None]]:
    """Bound what omegaconf does: it resolves a value anew for each reference, which doubles
    with every step of `a: ${b}${b}`, `b: ${c}${c}`. Yields what spends of the budget, and
    raises where that is over.
    """
    from omegaconf import Container
    from omegaconf.errors import InterpolationResolutionError

    resolve = Container.resolve_parse_tree
    left = MAX_COST

    def spend(cost: int) -> None:
        nonlocal left
        left -= cost
        if left < 0:
            raise InterpolationResolutionError(_TOO_MUCH)

    def metered(self: Container, parse_tree: Any, node: Any, **more: Any) -> Any:
        spend(256)
        value = resolve(self, parse_tree, node, **more)
        if isinstance(value, str):
            spend(len(value))
        return value

    Container.resolve_parse_tree = metered  # type: ignore[method-assign, assignment]
    try:
        yield spend
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _resolve_value(value: Any, spend: Callable[[int], None]) -> Any:
    spend(16)
    if isinstance(value, str):
        spend(len(value))
        return value
    if isinstance(value, Mapping):
        return {key: _resolve_value(value[key], spend) for key in value}
    if isinstance(value, Sequence):
        return [_resolve_value(value[index], spend) for index in range(len(value))]
    return value


def _explain_error(error: Exception) -> str:
    if isinstance(error, RecursionError) or not str(error):
        return "it is circular"
    return str(error).splitlines()[0]


def _report_unresolved(
    path: Path, origins: Mapping[str, Origin], steps: Steps, reason: str
) -> Finding:
    key = _join_steps(steps)
    message = f"`{key}` cannot be interpolated: {reason}"
    return report_misplaced(
        path, origins, key, "interpolation", message, "write \\${ for a literal ${"
    )


def _join_steps(steps: Steps) -> str:
    return reduce(join, steps, "")


def _follow_steps(node: Any, steps: Steps) -> Any:
    for step in steps:
        node = node[step]
    return node
