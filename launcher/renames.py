"""Whether an argument that a commit took away was removed, or got a new name, and what to see instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from launcher.definitions import Arguments

# words that names share without being about the same thing
_COMMON = frozenset(
    {"add", "and", "args", "config", "dir", "enable", "file", "id", "is", "max", "min", "name", "no"}
    | {"num", "of", "only", "or", "path", "per", "size", "the", "to", "type", "use", "with"}
)  # fmt: skip
# with more changes than this, what came with a removal says nothing about it
_FEW = 3


@dataclass(frozen=True, slots=True)
class Change:
    """The arguments on both sides of one commit, and the lines of code that it took away and added.

    `further` are arguments that stay without being among them: those of other packages' classes.
    """

    before: Arguments
    after: Arguments
    lines_gone: frozenset[str] = frozenset()
    lines_new: frozenset[str] = frozenset()
    further: frozenset[str] = frozenset()

    @property
    def gone(self) -> list[str]:
        return [key for key in self.before if key not in self.after]

    @property
    def new(self) -> list[str]:
        return [key for key in self.after if key not in self.before]

    def renames(self) -> dict[str, str]:
        """Old name -> new name. What fits two others equally well is no rename."""
        pairs = ((old, name) for old in self.gone for name in self.new)
        scores = {pair: score for pair in pairs if (score := self._alike(*pair)) > 0}
        found = dict(self._handed_over())
        for (old, name), score in sorted(scores.items(), key=lambda item: -item[1]):
            rivals = [s for (o, n), s in scores.items() if (o == old) != (n == name)]
            if score > max(rivals, default=0.0) and old not in found:
                found[old] = name
        return found

    def _handed_over(self) -> Iterator[tuple[str, str]]:
        """Arguments that had been another one's old name already, and now went away."""
        for old in self.gone:
            names = self.before[old].handed
            if len(names) == 1 and self._stays(names[0]):
                yield old, names[0]

    def _stays(self, name: str) -> bool:
        return name in self.after or name in self.further

    def see(self, old: str, taken: Collection[str]) -> tuple[str, ...]:
        """What upstream said to use instead of a removed argument, or the commit put in its place.

        No claim that it does the same: nothing of `taken` (the renamed ones), and nothing but the
        advice in a commit that changed many.
        """
        if advised := tuple(name for name in self.before[old].advised if self._stays(name)):
            return advised
        if max(len(self.gone), len(self.new)) > _FEW:
            return ()
        about = _words(old) - _COMMON
        return tuple(
            name for name in self.new
            if name not in taken and (about & _words(name) or self._place(old, name) == 2)
        )  # fmt: skip

    def _alike(self, old: str, name: str) -> float:
        """How much speaks for a rename, 0 where too little does.

        Code that reads the one where it read the other proves it, if the type is the same. Else the
        names must tell of each other, and type, default and place must bear it out: all of them,
        unless one name holds all words of the other.
        """
        was, now = self.before[old], self.after[name]
        likeness, place = _likeness(old, name), self._place(old, name)
        same_type, same_default = _bare(was.type) == _bare(now.type), was.default == now.default
        signs = likeness + same_type + same_default + place
        if same_type and self._read_instead(old, name):
            return signs + 2.0
        if _words(old) <= _words(name) or _words(name) <= _words(old):
            borne_out = same_type + same_default + place >= 3
        else:
            borne_out = likeness >= 0.5 and same_type and same_default and place == 2
        return signs if borne_out else 0.0

    def _read_instead(self, old: str, name: str) -> bool:
        """Whether a line that read `x.old` came back with `x.name` and no other difference."""
        read = re.compile(rf"(?<=\.){re.escape(old)}\b")
        return any(
            read.sub(name, line) in self.lines_new for line in self.lines_gone if read.search(line)
        )

    def _place(self, old: str, name: str) -> int:
        """How many of the nearest arguments that stayed (or ends of the list) are the same, 0..2."""
        first = _neighbours(self.before, old, self.after)
        second = _neighbours(self.after, name, self.before)
        return sum(a == b for a, b in zip(first, second, strict=True))


def _neighbours(arguments: Arguments, key: str, others: Arguments) -> tuple[str | None, str | None]:
    """The nearest arguments before and after `key` that exist on both sides of the change."""
    names = list(arguments)
    at = names.index(key)
    earlier = next((name for name in reversed(names[:at]) if name in others), None)
    return earlier, next((name for name in names[at + 1 :] if name in others), None)


def _likeness(old: str, name: str) -> float:
    """The share of equal letters, 0..1."""
    return SequenceMatcher(None, old, name, autojunk=False).ratio()


def _words(key: str) -> frozenset[str]:
    return frozenset(word for word in key.split("_") if word)


def _bare(type_: str) -> str:
    """A type without its `None`."""
    return " | ".join(sorted(part for part in type_.split(" | ") if part != "None"))
