"""Whether a setting fits its card: the plan's peaks, corrected by those of the trials."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from launcher.candidates import Candidate
from launcher.levers import Setting, Settings
from launcher.results import MARGIN, Results

# how far a peak may lie from the estimate: where the kind was measured, and where it was not
_SURE, _UNSURE = 0.03, 0.05
_FULL = 0.6
_ZERO_WEIGHT = ("zero3_offload", "zero3", "zero2", "zero1")
_WIDE = "_fp32_comm"
_NORMAL = NormalDist()


@dataclass(slots=True)
class Peaks:
    """Peaks of memory in GiB; `ceiling` is the least estimate of what ran out of memory."""

    results: Results
    ceiling: float = math.inf

    def of(self, candidate: Candidate) -> float | None:
        """The estimate corrected by what trials of its kind measured."""
        expected = candidate.expected.peak
        return None if expected is None else expected * self._ratio(candidate)[0]

    def admit(self, candidate: Candidate) -> bool:
        """Whether it may be tried. Without an estimate: by what was tried, lever by lever."""
        peak = self.of(candidate)
        if peak is None:
            return not self._as_heavy_as_failed(candidate) and self._within_reach(candidate)
        if self.above_ceiling(candidate):
            return False
        return self.results.planned is None or peak <= self.results.planned

    def chance(self, candidate: Candidate) -> float:
        """That a trial of it fits."""
        peak, room = self.of(candidate), self.results.room
        if peak is None or room is None:
            return 1.0
        deviation = _SURE if self._ratio(candidate)[1] else _UNSURE
        return _NORMAL.cdf(math.log(room * (1 - MARGIN / 2) / peak) / deviation)

    def failed(self, candidate: Candidate) -> None:
        """It ran out of memory: by estimate, as much is too much.

        What its trial says of the estimate itself, the ratio takes in.
        """
        if candidate.expected.peak is not None:
            self.ceiling = min(self.ceiling, candidate.expected.peak)

    def above_ceiling(self, candidate: Candidate) -> bool:
        """Whether it needs at least what ran out of memory, by estimate."""
        return (candidate.expected.peak or 0.0) >= self.ceiling

    def _ratio(self, candidate: Candidate) -> tuple[float, bool]:
        """Measured peaks over estimates, and whether they are of this kind."""
        known: list[float] = []
        around, room = [1.0], self.results.room
        for one in self.results.trials:
            estimate, peak = one.candidate.expected.measurable, one.measured.peak
            if one.measured.status == "oom" and room is not None:
                # it wanted more than there is, whatever was counted when it failed
                peak = room
            if not estimate or not peak or (not one.ok and one.measured.status != "oom"):
                continue
            ratio = peak / estimate
            around.append(ratio)
            if _kind(one.candidate) == _kind(candidate):
                # a run that left most of the card empty says little of one that fills it
                full = room is not None and estimate >= _FULL * room
                known.append(ratio if ratio >= 1 or full else (1 + ratio) / 2)
        if known:
            return max(known), True
        return max(around), False

    def _as_heavy_as_failed(self, candidate: Candidate) -> bool:
        """Without an estimate: whether it needs at least what ran out of memory, lever by lever."""
        failed = [one.candidate for one in self.results.trials if one.measured.status == "oom"]
        return any(_heavier(candidate.settings, one.settings) for one in failed)

    def _within_reach(self, candidate: Candidate) -> bool:
        """Without an estimate: at most twice the micro-batch that was seen to fit."""
        good = (one for one in self.results.trials if one.ok)
        fitted = [int(one.candidate.settings.get("per_device", 1)) for one in good]
        wanted = int(candidate.settings.get("per_device", 1))
        return wanted <= max((2 * n for n in fitted), default=wanted)


def _kind(candidate: Candidate) -> tuple[Setting | None, ...]:
    """What decides which of memory's moments is the peak."""
    return tuple(candidate.settings.get(name) for name in ("checkpointing", "packing", "liger"))


def _heavier(one: Settings, other: Settings) -> bool:
    """Whether `one` needs at least the memory of `other`, whatever the sizes are."""
    if any(one.get(n) != other.get(n) for n in ("packing", "attention", "optimizer", "compile")):
        return False
    zero = [str(s.get("deepspeed", "")) for s in (one, other)]
    plain = [name.removesuffix(_WIDE) for name in zero]
    ranks = [_ZERO_WEIGHT.index(name) if name in _ZERO_WEIGHT else 0 for name in plain]
    return (
        int(one.get("per_device", 1)) >= int(other.get("per_device", 1))
        and bool(one.get("checkpointing")) <= bool(other.get("checkpointing"))
        and bool(one.get("liger")) <= bool(other.get("liger"))
        and ranks[0] >= ranks[1]
        and zero[0].endswith(_WIDE) >= zero[1].endswith(_WIDE)
    )
