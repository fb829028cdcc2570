"""What a walk writes down: reads and refusals, and which arguments the script itself changes.

A condition is kept only while nothing has changed the values that it is about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.upstream.schema import Shadow
from launcher.upstream.source import conditions
from launcher.upstream.source.conditions import PERHAPS
from launcher.upstream.source.packages import mark
from launcher.upstream.source.values import Frame, Text, Values

Guards = frozenset[str]
"""The conditions that hold at a place."""
ANYHOW: Guards = frozenset()
UNSURE: Guards = frozenset({PERHAPS})


class Passed(str):
    """A condition that holds because the path would have ended in a `raise` otherwise."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the walk is: in which function, and the conditions that hold there."""

    frame: Frame
    guards: Guards

    def under(self, guards: Guards) -> Spot:
        return Spot(self.frame, self.guards | guards)

    def perhaps(self) -> Spot:
        return self.under(UNSURE)

    def place(self, node: ast.AST) -> str:
        """`package/file.py:LINE` of a node here."""
        return f"{self.frame.module.label}:{getattr(node, 'lineno', 0)}"


@dataclass(slots=True)
class WalkRecord:
    """What one walk has met so far. `fields` are the arguments' names.

    `reads` and `refusals` are by place; `silent` while what is read does not count.
    """

    fields: frozenset[str]
    reads: dict[str, dict[str, set[Guards]]] = field(default_factory=dict)
    refusals: dict[str, set[tuple[Guards, str]]] = field(default_factory=dict)
    shadows: dict[str, Shadow] = field(default_factory=dict)
    # arguments that the script itself gives other values, as far as it was walked, and how often
    written: dict[str, int] = field(default_factory=dict)
    # those of them that keep their truth: entries of a list are given another form
    reshaped: set[str] = field(default_factory=set)
    # the places of refusals inside `__post_init__`
    parsing: set[str] = field(default_factory=set)
    silent: bool = False

    def clear(self) -> None:
        """Forget what another pass will meet again."""
        self.reads.clear()
        self.refusals.clear()
        self.written.clear()
        self.reshaped.clear()

    @contextmanager
    def muted(self, silent: bool = True) -> Iterator[None]:
        """Without a record of what is read; what a silent test calls is recorded again."""
        before = self.silent
        self.silent = silent
        try:
            yield
        finally:
            self.silent = before

    def add_read(self, name: str, node: ast.AST, at: Spot) -> None:
        if not self.silent:
            places = self.reads.setdefault(name, {})
            places.setdefault(at.place(node), set()).add(at.guards)

    def add_refusal(self, node: ast.Raise, at: Spot) -> None:
        """A `raise`: worth knowing if nothing but arguments decides whether it is reached."""
        if node.exc is None or PERHAPS in at.guards:
            return
        if all(map(self.stands, at.guards)):
            refusals = self.refusals.setdefault(at.place(node), set())
            refusals.add((at.guards, mark(node.exc)))

    def add_shadow(self, text: str | None, node: ast.expr, at: Spot) -> None:
        """A branch that cannot be reached: what its test reads loses against what excludes it."""
        rivals: set[str] = set()
        for guard in at.guards:
            if conditions.negate(guard) in at.guards:
                rivals |= _find_arguments(guard)
        shadow = Shadow(where=at.place(node), by=tuple(sorted(rivals)))
        tested = set() if text is None else _find_arguments(text)
        for name in tested - rivals:
            self.shadows[name] = shadow

    def add_write(self, name: str) -> None:
        if name in self.fields:
            self.written[name] = self.written.get(name, 0) + 1

    def add_change(self, values: Values) -> None:
        """A value is changed in place: that of an argument, perhaps."""
        for value in values:
            if isinstance(value, Text):
                for name in _find_arguments(value.text):
                    self.add_write(name)

    def stands(self, text: str) -> bool:
        """Whether a condition is about the stage file's values, as far as the script was walked."""
        names = conditions.list_arguments(text)
        if not names <= self.fields - self.written.keys():
            return False
        return names.isdisjoint(self.reshaped) or not conditions.compares(text)

    def version_name(self, name: str) -> str:
        """An argument's name in conditions: each write of it makes a new name."""
        count = self.written.get(name)
        return name if count is None else f"{name}·{count}"

    def drop_outdated(self, at: Spot) -> Spot:
        """The conditions that are known after arguments may have got other values."""
        outdated = frozenset(text for text in at.guards if not self._is_current(text))
        if not outdated:
            return at
        kept = Spot(at.frame, at.guards - outdated)
        # with a condition less, what follows happens for certain no longer
        return kept if _are_passed(outdated) else kept.perhaps()

    def _is_current(self, text: str) -> bool:
        names = conditions.list_arguments(text)
        return all(self.version_name(_strip_version(name)) == name for name in names)


def _are_passed(guards: Guards) -> bool:
    return all(isinstance(text, Passed) for text in guards)


def _strip_version(name: str) -> str:
    """The argument of a name in conditions; see `WalkRecord.version_name`."""
    return name.partition("·")[0]


def _find_arguments(text: str) -> set[str]:
    return set(map(_strip_version, conditions.list_arguments(text)))
