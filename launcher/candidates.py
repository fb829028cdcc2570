"""A setting that may be tried, what is expected of it, and what came of trying it: values of a search."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launcher.levers import ORDER, Setting, Settings

Status = Literal[
    "ok", "oom", "crash", "hang", "diverged", "contract", "unproven", "loss changed", "timeout",
    "refused", "no speed",
]  # fmt: skip
"""What became of a trial; only `ok` counts. `contract` was disproved, `unproven` neither way."""

Item = tuple[str, Setting]
"""A lever with its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of one setting: the peak in GiB (None: not known), and one step's seconds and real tokens.

    `peak` is that of the whole run, which meets longer rows than a trial of a few steps: `short` is the
    trial's, which its measured peak compares with.
    """

    peak: float | None
    seconds: float
    tokens: float
    short: float | None = None

    @property
    def measurable(self) -> float | None:
        """What a trial should show."""
        return self.peak if self.short is None else self.short


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting with what is expected of it; `purpose` says what a trial of it is for, `why` in words."""

    settings: Settings
    expected: Expected
    purpose: str = "search"
    why: str = ""

    @property
    def key(self) -> tuple[Item, ...]:
        """What tells it from others."""
        return tuple((name, self.settings[name]) for name in ORDER if name in self.settings)

    @property
    def items(self) -> frozenset[Item]:
        """Its levers with their values."""
        return frozenset(self.key)

    def differing(self, other: Candidate) -> list[str]:
        """The levers that are not as in another."""
        return [name for name in ORDER if self.settings.get(name) != other.settings.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of a trial. `speed` is in tokens a second and GPU, `step` in seconds, `peak` in GiB.

    `seconds` is wall time with the start. `blamed` are the levers that a verdict names.
    `loss_change` is against the file as written, as a share. `cut`: it was the budget that ended it,
    which says nothing of the setting.
    """

    status: Status
    speed: float | None = None
    step: float | None = None
    peak: float | None = None
    seconds: float = 0.0
    loss_change: float | None = None
    blamed: tuple[str, ...] = ()
    reason: str | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate that was tried, and what was learned of it, in one line."""

    candidate: Candidate
    measured: Measured
    learned: str = ""

    @property
    def ok(self) -> bool:
        """Whether it may be proposed."""
        return self.measured.status == "ok" and bool(self.measured.speed)

    @property
    def counts(self) -> bool:
        """Whether how it ended says something of the setting: the budget's end and no start do not."""
        return not self.measured.cut and self.measured.status != "refused"

    @property
    def speed(self) -> float:
        """Tokens a second and GPU; 0 where none was measured."""
        return self.measured.speed or 0.0

    def of(self, candidate: Candidate) -> bool:
        """Whether it is one of this setting."""
        return self.candidate.key == candidate.key


def together(runs: Sequence[Trial]) -> Trial:
    """The runs of a setting as one trial: medians, and the largest peak; one that failed stands for all."""
    counted = [one for one in runs if one.counts]
    failed = [one for one in counted if not one.ok]
    if failed or not counted:
        return replace(runs[0], measured=(failed or runs)[-1].measured)
    told = [one.measured for one in counted]
    steps = [one.step for one in told if one.step]
    measured = replace(
        told[-1], speed=statistics.median(one.speed for one in counted),
        step=statistics.median(steps) if steps else None,
        peak=max((one.peak for one in told if one.peak is not None), default=None),
    )  # fmt: skip
    return replace(runs[0], measured=measured)
