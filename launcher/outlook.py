"""Settings of the levers -> what is to be expected of them: memory and speed, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher import footprint, levers, memory, shapes, throughput
from launcher.candidates import Candidate, Expected
from launcher.errors import InvalidConfig
from launcher.footprint import Footprint
from launcher.lengths import Lengths
from launcher.levers import Settings, Space
from launcher.shapes import Shape
from launcher.throughput import Card


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What expectations rest on: the levers, the model's shape, the rows, the card; a trial's `steps`."""

    space: Space
    shape: Shape | None
    rows: Lengths
    card: Card
    attention: str | None = None
    steps: int | None = None

    def grid(self) -> Iterator[Candidate]:
        """Every setting that can be planned, the file's own among them."""
        for settings in self.space.settings():
            if (told := self.expected(settings)) is not None:
                yield Candidate(settings=settings, expected=told)

    def base(self) -> Candidate:
        """The file as it is written."""
        told = self.expected(self.space.base)
        return Candidate(
            settings=self.space.base, expected=told or Expected(peak=None, seconds=1.0, tokens=1.0)
        )

    def expected(self, settings: Settings) -> Expected | None:
        """The peak and the pace; None where these settings cannot be planned.

        Without a shape the peak is unknown, and a step takes as long as its positions are many.
        """
        try:
            found = self._footprint(settings)
        except InvalidConfig:
            return None
        pace = throughput.pace(found, self.card)
        short = None if self.steps is None else self._peak(found, self.steps)
        return Expected(
            peak=self._peak(found), short=short, seconds=pace.seconds, tokens=pace.tokens
        )

    def _footprint(self, settings: Settings) -> Footprint:
        made = levers.planned(self.space, settings)
        return Footprint(
            plan=made, shape=self.shape or _some_shape(), rows=footprint.rows_of(made, self.rows),
            attention=footprint.attention_of(made, self.attention if "attention" not in settings else None),
        )  # fmt: skip

    def _peak(self, found: Footprint, steps: int | None = None) -> float | None:
        """Of the whole run, or of its first so many steps."""
        if self.shape is None:
            return None
        if steps is not None:
            found = replace(found, plan=replace(found.plan, steps=steps))
        try:
            told = memory.estimate(found.setup())
        except InvalidConfig:
            return None
        return (told if self.card.gib is None else told.within(self.card.gib)).peak


def _some_shape() -> Shape:
    """What an unknown model is taken for: only the proportions of its steps depend on it."""
    return shapes.find("Qwen/Qwen2.5-1.5B", {})
