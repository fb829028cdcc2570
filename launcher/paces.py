"""How fast a setting should be, and how long a trial of it takes: expectations, corrected by trials.

The ratio of measured to expected speed is taken as a linear function of the levers in logarithms, with a
prior (Bayesian linear regression).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.candidates import Candidate
from launcher.levers import FLASH, Settings
from launcher.regression import Regression
from launcher.results import Results

SLOWEST = 2.5
"""How many times as long as the best a trial may take before it is ended."""
START_S = 60.0
"""What a start takes, in seconds, before one was seen."""

# how far a lever's effect may lie from what is expected of it: standard deviations of the logarithm
_DOUBT: Mapping[str, float] = {
    "flash": 0.15, "packed": 0.2, "packed_masked": 0.5, "bfd": 0.05, "liger": 0.15, "micro": 0.1,
    "checkpointing": 0.08, "sharded": 0.15, "offload": 0.15, "whole": 0.1, "wide": 0.05,
    "optimizer": 0.03, "workers": 0.02, "compile": 0.1,
}  # fmt: skip
# the chance that a lever runs and is proved, before it has been seen to
_CHANCE: Mapping[str, float] = {
    "flash": 0.95, "packed": 0.95, "packed_masked": 0.6, "bfd": 0.9, "liger": 0.93, "sharded": 0.95,
    "offload": 0.9, "optimizer": 0.9, "compile": 0.6,
}  # fmt: skip
_LEVEL, _NOISE = 1.5, 0.015
_PATIENCE = 1.5


@dataclass(slots=True)
class Paces:
    """Speeds in tokens a second and GPU. `masked`: without an attention lever there is no flash attention.

    `steps` are those of a trial; `start_s` are the seconds that one is taken to begin with.
    """

    results: Results
    steps: int
    masked: bool = False
    start_s: float = START_S
    _regression: Regression = field(init=False, default_factory=Regression)

    def predicted(self, candidate: Candidate) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of a candidate's speed."""
        mean, deviation = self._regression.at(self._vector(candidate))
        return _expected(candidate) + mean, deviation

    def observe(self, candidate: Candidate, speed: float, noise: float = _NOISE) -> None:
        """One measurement; `noise` is the standard deviation of its logarithm."""
        target = math.log(speed) - _expected(candidate)
        self._regression.add(self._vector(candidate), target, noise)

    def observe_slow(self, candidate: Candidate, best: float) -> None:
        """It was ended before it was done, as it was so much slower than the best."""
        self.observe(candidate, best / SLOWEST, noise=0.2)

    def chance(self, candidate: Candidate) -> float:
        """That a candidate runs and is proved."""
        told, zero = self._numbers(candidate.settings), self._numbers(self.results.base.settings)
        proved = [self._numbers(one.candidate.settings) for one in self.results.trials if one.ok]
        chance = 1.0
        for name, value in _CHANCE.items():
            if told[name] and not zero[name] and not any(seen[name] for seen in proved):
                chance *= value
        return chance

    def trial_seconds(self, candidate: Candidate) -> float:
        """Wall time of a trial, learned from those before."""
        runs = self.results.runs
        own = [one.measured.seconds for one in runs[1:] if one.ok and one.of(candidate)]
        if own:
            return max(own)
        starts = [
            one.measured.seconds - self.steps * one.measured.step
            for one in runs
            if one.measured.step and one.ok
        ]
        # the first one fills caches that the others find
        start = statistics.median(starts[1:] or starts) if starts else self.start_s
        return max(0.0, start) + self.steps * self._step_seconds(candidate)

    def timeout(self, candidate: Candidate, left: float) -> float:
        """Seconds after which a trial is ended: it hangs, or is so slow that it cannot be the best."""
        best = self.results.best
        if best is None or best.measured.step is None:
            return left
        start = self.trial_seconds(candidate) - self.steps * self._step_seconds(candidate)
        same = candidate.expected.tokens / best.candidate.expected.tokens
        slowest = self.steps * best.measured.step * same * SLOWEST
        expected = self.steps * self._step_seconds(candidate) * _PATIENCE
        return min(left, _PATIENCE * start + max(slowest, expected) + 30)

    def _step_seconds(self, candidate: Candidate) -> float:
        if not self._regression.seen:
            return candidate.expected.seconds
        return candidate.expected.tokens / math.exp(self.predicted(candidate)[0]) / self._devices()

    def _devices(self) -> float:
        """What speeds are divided by: measured ones are of one GPU, expected ones of all."""
        seen = [
            one.candidate.expected.tokens / one.measured.step / one.speed
            for one in self.results.trials
            if one.ok and one.measured.step
        ]
        return statistics.median(seen) if seen else 1.0

    def _vector(self, candidate: Candidate) -> list[float]:
        told, zero = self._numbers(candidate.settings), self._numbers(self.results.base.settings)
        return [_LEVEL, *(doubt * (told[name] - zero[name]) for name, doubt in _DOUBT.items())]

    def _numbers(self, settings: Settings) -> dict[str, float]:
        """The levers as numbers, for the regression."""
        packing = settings.get("packing", False)
        flash = settings.get("attention") in FLASH or (
            "attention" not in settings and not self.masked
        )
        zero = str(settings.get("deepspeed", ""))
        packed = packing not in (False, "off")
        return {
            "flash": float(flash), "packed": float(packed),
            "packed_masked": float(packed and not flash), "bfd": float(packing == "bfd"),
            "liger": float(bool(settings.get("liger"))),
            "micro": math.log2(int(settings.get("per_device", 1))),
            "checkpointing": float(bool(settings.get("checkpointing"))),
            "sharded": float(zero.startswith("zero3")), "offload": float(zero == "zero3_offload"),
            "whole": float(zero.startswith("zero1")), "wide": float(zero.endswith("fp32_comm")),
            "optimizer": float("8bit" in str(settings.get("optimizer", ""))),
            "workers": float(int(settings.get("workers", 0)) > 0),
            "compile": float(bool(settings.get("compile"))),
        }  # fmt: skip


def _expected(candidate: Candidate) -> float:
    return math.log(candidate.expected.tokens / candidate.expected.seconds)
