"""Which values of levers make trials fail, out of the trials that failed and those that did not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from launcher.candidates import Candidate, Item


@dataclass(slots=True)
class Suspects:
    """`guilty` are sets of values that fail wherever all of them are; `open` are failures not settled yet.

    Of each of those: what was changed, and which of it may still be to blame.
    """

    guilty: list[frozenset[Item]] = field(default_factory=list)
    open: list[tuple[frozenset[Item], set[Item]]] = field(default_factory=list)

    def speak_against(self, candidate: Candidate) -> bool:
        """Whether a candidate would probably fail as well."""
        items = candidate.items
        if any(bad <= items for bad in self.guilty):
            return True
        return any(
            whole <= items or len(left & items) > max(1, len(left) // 2)
            for whole, left in self.open
        )

    def accuse(self, candidate: Candidate, name: str) -> None:
        """A verdict's point names the lever: packing leaks under one attention, not under another."""
        found = {(name, candidate.settings[name])}
        if name == "packing" and "attention" in candidate.settings:
            found.add(("attention", candidate.settings["attention"]))
        self.guilty.append(frozenset(found))

    def suspect(
        self, candidate: Candidate, changed: frozenset[Item], proved: Iterable[Candidate]
    ) -> None:
        """It failed, and one of what was `changed` is to blame, but for what is in those `proved` to run."""
        left = set(changed)
        for one in proved:
            left -= one.items
        for _, other in self.open:
            # one culprit explains more than two do
            if shared := other & left:
                left &= shared
                other &= shared
        self.open.append((changed or candidate.items, left))
        self._settle()

    def clear(self, candidate: Candidate) -> None:
        """It ran: nothing in it is to blame by itself."""
        for _, left in self.open:
            left -= candidate.items
        self._settle()

    def _settle(self) -> None:
        """Suspects of which one is left are guilty; those of which none is, only together."""
        for whole, left in list(self.open):
            if len(left) <= 1:
                self.open.remove((whole, left))
                self.guilty.append(frozenset(left) if left else whole)
