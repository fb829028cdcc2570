"""`Part` -> `Moment` -> `Memory`: what is in a card's memory, by part and by point of a run, in GiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30

KINDS = ("weights", "gradients", "optimizer", "communication", "activations", "logits", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing in memory at a moment: `kind` is one of KINDS."""

    kind: str
    name: str
    gib: float
    formula: str
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        """The part as `--format json` shows it."""
        return {
            "kind": self.kind, "name": self.name, "gib": round(self.gib, 3),
            "formula": self.formula, "source": self.source,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is in memory at one point of a run; `spared` where there is no room: then the host takes it."""

    name: str
    parts: tuple[Part, ...]
    spared: bool = False

    @property
    def gib(self) -> float:
        """All parts together."""
        return sum(part.gib for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The moments of a run; the fullest is its peak."""

    moments: tuple[Moment, ...]

    @property
    def fullest(self) -> Moment:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: moment.gib)

    @property
    def peak(self) -> float:
        """GiB allocated at most."""
        return self.fullest.gib

    def within(self, gib: float) -> Memory:
        """The same where so many GiB can be used: without what is spared then."""
        return Memory(moments=tuple(m for m in self.moments if not m.spared or m.gib <= gib))

    def of(self, kind: str) -> float:
        """GiB of one kind at the peak."""
        return sum(part.gib for part in self.fullest.parts if part.kind == kind)

    def as_json(self) -> dict[str, Any]:
        """`memory_gib` of the plan's JSON contract: the peak, and its parts by kind."""
        kinds = {kind: round(self.of(kind), 2) for kind in KINDS}
        return {"peak": round(self.peak, 2), **kinds, "moment": self.fullest.name}

    def why(self) -> list[dict[str, Any]]:
        """Every moment with its parts and their formulas, the fullest first."""
        ordered = sorted(self.moments, key=lambda moment: -moment.gib)
        return [
            {"moment": m.name, "gib": round(m.gib, 2), "parts": [p.as_json() for p in m.parts]}
            for m in ordered
        ]


def summed(parts: Sequence[Part]) -> float:
    """GiB of several parts."""
    return sum(part.gib for part in parts)
