"""Which setting to measure next, and when to stop: a state machine that is fed with measurements.

Every setting has an expectation of its speed and memory before anything runs. What short runs measure
corrects both: the ratio of measured to expected speed is taken as a linear function of the levers in
logarithms, with a prior (Bayesian linear regression), and the next trial is the one with the largest
expected improvement (Jones, Schonlau and Welch, "Efficient Global Optimization", 1998), weighed by the chance
that it fits and that it runs at all. Nothing here starts, reads or waits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal

from launcher.comparison import Spread, speed_word
from launcher.levers import FLASH, ORDER, Setting, Settings, described

Status = Literal[
    "ok", "oom", "crash", "hang", "diverged", "contract", "unproven", "loss changed", "timeout",
    "refused", "no speed",
]  # fmt: skip
"""What became of a trial; only `ok` counts. `contract` was disproved, `unproven` neither way."""

THRESHOLD = 0.005
"""The search ends where the best of what is left is expected to improve by less than this share."""
SAME = 0.01
"""Speeds that differ by less are taken for the same: then fewer changes are better."""
MARGIN = 0.08
"""The share of a card that is never planned for."""
RUNS = 3
"""How often a setting is run that the proposal is about, where the budget allows."""

# how far a lever's effect may lie from what is expected of it: standard deviations of the logarithm
_DOUBT: Mapping[str, float] = {
    "flash": 0.15, "packed": 0.2, "packed_masked": 0.5, "bfd": 0.05, "liger": 0.15, "micro": 0.1,
    "checkpointing": 0.08, "sharded": 0.15, "offload": 0.15, "whole": 0.1, "wide": 0.05,
    "optimizer": 0.03, "workers": 0.02, "compile": 0.1,
}  # fmt: skip
_LEVEL, _NOISE, _INTERACTION = 1.5, 0.015, 0.03
# the chance that a lever runs and is proved, before it has been seen to
_CHANCE: Mapping[str, float] = {
    "flash": 0.95, "packed": 0.95, "packed_masked": 0.6, "bfd": 0.9, "liger": 0.93, "sharded": 0.95,
    "offload": 0.9, "optimizer": 0.9, "compile": 0.6,
}  # fmt: skip
# how far a peak may lie from the estimate: where the kind was measured, and where it was not
_SURE, _UNSURE = 0.03, 0.05
_FULL = 0.6
_START_S, _PATIENCE, _SLOWEST = 60.0, 1.5, 2.5
_WORTH = 0.02
"""What a trial is to gain to be begun in place of second runs, where not all of that fits the budget."""
_FIRST: Mapping[Status, str] = {
    "refused": "cannot be started", "unproven": "proves nothing to hold others to",
    "no speed": "tells no speed",
}  # fmt: skip
_NORMAL = NormalDist()


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
    def key(self) -> tuple[tuple[str, Setting], ...]:
        """What tells it from others."""
        return tuple((name, self.settings[name]) for name in ORDER if name in self.settings)

    @property
    def items(self) -> frozenset[tuple[str, Setting]]:
        """Its levers with their values."""
        return frozenset(self.key)


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


def features(settings: Settings) -> dict[str, float]:
    """The levers as numbers, for the regression."""
    packing = settings.get("packing", False)
    flash = settings.get("attention") in FLASH or "attention" not in settings
    zero = str(settings.get("deepspeed", ""))
    packed = packing not in (False, "off")
    return {
        "flash": float(flash), "packed": float(packed), "packed_masked": float(packed and not flash),
        "bfd": float(packing == "bfd"), "liger": float(bool(settings.get("liger"))),
        "micro": math.log2(int(settings.get("per_device", 1))),
        "checkpointing": float(bool(settings.get("checkpointing"))),
        "sharded": float(zero.startswith("zero3")), "offload": float(zero == "zero3_offload"),
        "whole": float(zero.startswith("zero1")), "wide": float(zero.endswith("fp32_comm")),
        "optimizer": float("8bit" in str(settings.get("optimizer", ""))),
        "workers": float(int(settings.get("workers", 0)) > 0),
        "compile": float(bool(settings.get("compile"))),
    }  # fmt: skip


class Search:
    """Proposes candidates of a grid and learns from what was measured.

    `base` is the file as written, `room` the card's memory in GiB where it is known. `masked` says that
    a space without an attention lever has no flash attention. Once nothing better is to be expected (or
    affordable), what is left of the budget goes into up to `repeats` runs of the settings that the
    proposal is about and, with `attribute`, into measuring what each change gains.

    `trials` has one for each setting, which stands for all its runs; `runs` are those as they came.
    """

    def __init__(
        self, grid: Iterable[Candidate], base: Candidate, *, steps: int, room: float | None = None,
        masked: bool = False, attribute: bool = True, repeats: int = RUNS, threshold: float = THRESHOLD,
        start_s: float = _START_S,
    ) -> None:  # fmt: skip
        self.base = base
        self.steps = steps
        self.room = room
        self.masked = masked
        self.attribute = attribute
        self.repeats = repeats
        self.threshold = threshold
        self.grid = {one.key: one for one in (base, *grid)}
        self.trials: list[Trial] = []
        self.runs: list[Trial] = []
        self.stopped: str | None = None
        self._start_s = start_s
        self._zero = self._numbers(base.settings)
        self._bad: list[frozenset[tuple[str, Setting]]] = []
        self._suspects: list[tuple[frozenset[tuple[str, Setting]], set[tuple[str, Setting]]]] = []
        self._ceiling = math.inf
        self._regression = _Regression()

    # --- what is known ---

    @property
    def good(self) -> list[Trial]:
        """All that may be proposed, fastest first; of those as fast, the one with the fewest changes."""
        left = [one for one in self.trials if one.ok and self.lasts(one)]
        told: list[Trial] = []
        while left:
            top = max(map(_speed, left))
            near = [one for one in left if _speed(one) >= top * (1 - SAME)]
            told.append(
                min(near, key=lambda one: (len(self.differing(one.candidate)), -_speed(one)))
            )
            left.remove(told[-1])
        return told

    @property
    def best(self) -> Trial | None:
        """The first of `good`."""
        return next(iter(self.good), None)

    @property
    def first(self) -> Trial | None:
        """The file as written, where it was measured."""
        return next((one for one in self.trials if _same(one, self.base)), None)

    def lasts(self, trial: Trial) -> bool:
        """Whether the whole run should fit, which meets longer rows than the trial that did.

        The file as written is the author's own: that it fits a trial is enough.
        """
        whole = self._whole(trial.candidate, trial.measured)
        if whole is None or self.room is None or trial.candidate.key == self.base.key:
            return True
        return whole <= self.room * (1 - MARGIN)

    def _whole(self, candidate: Candidate, measured: Measured) -> float | None:
        """GiB of the whole run, by how far the trial's peak was from its estimate."""
        expected = candidate.expected
        if not expected.peak or not expected.measurable or measured.peak is None:
            return None
        return expected.peak * measured.peak / expected.measurable

    def differing(self, candidate: Candidate, other: Candidate | None = None) -> list[str]:
        """The levers that are not as in the file (or in another candidate)."""
        then = (other or self.base).settings
        return [name for name in ORDER if candidate.settings.get(name) != then.get(name)]

    def speed_ratio(self, candidate: Candidate) -> float | None:
        """How much faster than the best so far it is expected to be; None before anything ran."""
        best = self.best
        if best is None:
            return None
        return math.exp(self._predicted(candidate)[0] - math.log(_speed(best)))

    def expected_seconds(self, candidate: Candidate) -> float:
        """Wall time of a trial, learned from those before."""
        own = [one.measured.seconds for one in self.runs[1:] if one.ok and _same(one, candidate)]
        if own:
            return max(own)
        starts = [
            one.measured.seconds - self.steps * one.measured.step
            for one in self.runs
            if one.measured.step and one.ok
        ]
        # the first one fills caches that the others find
        start = statistics.median(starts[1:] or starts) if starts else self._start_s
        return max(0.0, start) + self.steps * self._step_seconds(candidate)

    def timeout(self, candidate: Candidate, left: float) -> float:
        """Seconds after which a trial is ended: it hangs, or is so slow that it cannot be the best."""
        best = self.best
        if best is None or best.measured.step is None:
            return left
        start = self.expected_seconds(candidate) - self.steps * self._step_seconds(candidate)
        same = candidate.expected.tokens / best.candidate.expected.tokens
        slowest = self.steps * best.measured.step * same * _SLOWEST
        expected = self.steps * self._step_seconds(candidate) * _PATIENCE
        return min(left, _PATIENCE * start + max(slowest, expected) + 30)

    # --- the next one ---

    def propose(self, left: float = math.inf) -> Candidate | None:
        """The next candidate, None at the end: `stopped` says why. `left` are seconds of the budget."""
        if not self.trials:
            opening = self._opening()
            if opening is not None:
                return self._affordable(opening, left)
        if self._broken():
            return None
        ranked = self._ranked()
        if ranked and ranked[0][0] >= self.threshold:
            for gain, one in ranked:
                seconds = self.expected_seconds(one)
                if gain < self.threshold or seconds > left:
                    continue
                sure = None
                if gain < _WORTH and seconds + self._second_runs() > left:
                    sure = self._again(left, min(2, self.repeats))
                return sure or replace(one, why=self._why(one))
            first = ranked[0][1]
            told = (
                f"the budget: {self._why(first)} and not tried, because a trial of it takes about "
                f"{self.expected_seconds(first):.0f} s and {max(0.0, left):.0f} s are left: a larger "
                "--budget goes on here"
            )
            extra = self._again(left, self.repeats)
        else:
            told = f"what is left is expected to gain {ranked[0][0]:.1%} at most" if ranked else (
                "nothing is left that fits and was not tried"
            )  # fmt: skip
            # a second run tells whether there is anything to attribute
            extra = (
                self._again(left, min(2, self.repeats))
                or (self._attribution(left) if self.attribute else None)
                or self._again(left, self.repeats)
            )
        if extra is None:
            self.stopped = told + self._undone(left)
        return extra

    def _affordable(self, candidate: Candidate, left: float) -> Candidate | None:
        if left <= 0:
            self.stopped = "the budget: not even one trial fits into it"
            return None
        return candidate

    def _opening(self) -> Candidate | None:
        peak = self.base.expected.peak
        if peak is not None and self.room is not None and peak > self.room:
            return None
        return replace(self.base, purpose="baseline", why="the file as it is written")

    def _broken(self) -> bool:
        """Whether even the file as written did not come to its end: then there is nothing to compare with."""
        first = self.first
        if first is not None and first.measured.cut and self.best is None:
            self.stopped = (
                "the budget: the file as written did not end within it (a larger --budget goes on)"
            )
            return True
        if first is None or first.measured.status in ("ok", "oom", "timeout"):
            return False
        if first.measured.blamed or any(one.ok for one in self._runs_of(first.candidate)):
            return False
        said = _FIRST.get(first.measured.status, "does not train")
        self.stopped = f"the file as written {said}: {first.measured.reason}"
        return True

    def _ranked(self) -> list[tuple[float, Candidate]]:
        tried = {one.candidate.key for one in self.trials}
        best = self.best
        goal = None if best is None else math.log(_speed(best))
        told = []
        for key, one in self.grid.items():
            if key in tried or not self.eligible(one):
                continue
            mean, deviation = self._predicted(one)
            # before anything ran: what surely fits, and is fast
            gain = 1.0 + mean / 100 if goal is None else _improvement(mean - goal, deviation)
            told.append((gain * self._chance(one) * self._fits(one), one))
        return sorted(told, key=lambda t: (-round(t[0], 4), len(self.differing(t[1]))))

    def eligible(self, candidate: Candidate) -> bool:
        """Whether nothing that was learned speaks against it."""
        items = candidate.items
        if any(bad <= items for bad in self._bad):
            return False
        for whole, left in self._suspects:
            shared = len(left & items)
            if whole <= items or shared > max(1, len(left) // 2):
                return False
        peak = self.peak(candidate)
        if peak is None:
            return not self._as_heavy_as_failed(candidate) and self._within_reach(candidate)
        if self._above_ceiling(candidate):
            return False
        return self.room is None or peak <= self.room * (1 - MARGIN)

    # --- once more ---

    def contenders(self) -> list[Trial]:
        """What the proposal is about: the best, the next where speeds do not tell them apart, and the file.

        In the order of their first runs. Where the file as written is the best, the next is that in any case:
        one lucky run of the file would hide what is faster.
        """
        good, first = self.good, self.first
        others = [one for one in good if one is not first]
        if not others:
            return []
        close = [
            one for one in others[:2]
            if one is not good[0] and (good[0] is first or self._word(one, good[0]) == "no difference")
        ][:1]  # fmt: skip
        about = [good[0], *close, *([first] if first is not None and first.ok else [])]
        return [one for one in self.trials if one in about]

    def _again(self, left: float, runs: int) -> Candidate | None:
        """The contender whose turn it is, until each was run so often: A B, B A, A B."""
        counted = [(len(self._runs_of(one.candidate)), one) for one in self.contenders()]
        fewest = min((count for count, _ in counted), default=runs)
        turns = [one for count, one in counted if count == fewest < runs]
        for one in turns[::-1] if fewest % 2 else turns:
            if self.expected_seconds(one.candidate) <= left:
                changed = self.differing(one.candidate)
                what = ", ".join(described(n, one.candidate.settings[n]) for n in changed)
                why = f"{what or 'the file as it is written'} once more: run {fewest + 1}"
                return replace(one.candidate, purpose="repeat", why=why)
        return None

    def _undone(self, left: float) -> str:
        """Runs that the proposal would have had, with more time."""
        due = self._again(math.inf, self.repeats)
        if due is None or math.isinf(left):
            return ""
        takes = self.expected_seconds(due)
        return f"; {due.why} takes about {takes:.0f} s, {max(0.0, left):.0f} s are left"

    def surpasses(self, trial: Trial) -> bool:
        """Whether it is told to be faster than the file as written, where that was measured."""
        first = self.first
        return first is None or not first.ok or self._word(trial, first) == "faster"

    def _second_runs(self) -> float:
        """Seconds of those of all contenders that are still to be made."""
        about = [one.candidate for one in self.contenders()]
        return math.fsum(self.expected_seconds(one) for one in about if len(self._runs_of(one)) < 2)

    def _word(self, one: Trial, other: Trial) -> str:
        return speed_word(self.speeds(one), self.speeds(other))

    def speeds(self, trial: Trial) -> Spread:
        """Tokens a second and GPU of all runs of a setting that passed; there has to be one."""
        found = Spread.of(one.measured.speed for one in self._runs_of(trial.candidate) if one.ok)
        assert found is not None
        return found

    def _runs_of(self, candidate: Candidate) -> list[Trial]:
        return [one for one in self.runs if _same(one, candidate)]

    # --- memory ---

    def peak(self, candidate: Candidate) -> float | None:
        """GiB, the estimate corrected by what trials of its kind measured."""
        expected = candidate.expected.peak
        return None if expected is None else expected * self._ratio(candidate)[0]

    def _ratio(self, candidate: Candidate) -> tuple[float, bool]:
        """Measured peaks over estimates, and whether they are of this kind."""
        known: list[float] = []
        around = [1.0]
        for one in self.trials:
            estimate, peak = one.candidate.expected.measurable, one.measured.peak
            if one.measured.status == "oom" and self.room is not None:
                # it wanted more than there is, whatever was counted when it failed
                peak = self.room
            if not estimate or not peak or (not one.ok and one.measured.status != "oom"):
                continue
            ratio = peak / estimate
            around.append(ratio)
            if _kind(one.candidate) == _kind(candidate):
                # a run that left most of the card empty says little of one that fills it
                full = self.room is not None and estimate >= _FULL * self.room
                known.append(ratio if ratio >= 1 or full else (1 + ratio) / 2)
        if known:
            return max(known), True
        return max(around), False

    def _fits(self, candidate: Candidate) -> float:
        peak = self.peak(candidate)
        if peak is None or self.room is None:
            return 1.0
        deviation = _SURE if self._ratio(candidate)[1] else _UNSURE
        return _NORMAL.cdf(math.log(self.room * (1 - MARGIN / 2) / peak) / deviation)

    def _as_heavy_as_failed(self, candidate: Candidate) -> bool:
        """Without an estimate: whether it needs at least what ran out of memory, lever by lever."""
        failed = [one.candidate for one in self.trials if one.measured.status == "oom"]
        return any(_heavier(candidate.settings, one.settings) for one in failed)

    def _within_reach(self, candidate: Candidate) -> bool:
        """Without an estimate: at most twice the micro-batch that was seen to fit."""
        fitted = [int(one.candidate.settings.get("per_device", 1)) for one in self.trials if one.ok]
        wanted = int(candidate.settings.get("per_device", 1))
        return wanted <= max((2 * n for n in fitted), default=wanted)

    # --- speed ---

    def _numbers(self, settings: Settings) -> dict[str, float]:
        told = features(settings)
        if self.masked and "attention" not in settings:
            told["flash"], told["packed_masked"] = 0.0, told["packed"]
        return told

    def _vector(self, candidate: Candidate) -> list[float]:
        told = self._numbers(candidate.settings)
        return [_LEVEL, *(_DOUBT[name] * (told[name] - self._zero[name]) for name in _DOUBT)]

    def _predicted(self, candidate: Candidate) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of a candidate's speed."""
        mean, deviation = self._regression.at(self._vector(candidate))
        return math.log(candidate.expected.tokens / candidate.expected.seconds) + mean, deviation

    def _step_seconds(self, candidate: Candidate) -> float:
        if not self._regression.seen:
            return candidate.expected.seconds
        return candidate.expected.tokens / math.exp(self._predicted(candidate)[0]) / self._devices()

    def _devices(self) -> float:
        """What speeds are divided by: measured ones are of one GPU, expected ones of all."""
        seen = [
            one.candidate.expected.tokens / one.measured.step / _speed(one)
            for one in self.trials
            if one.ok and one.measured.step
        ]
        return statistics.median(seen) if seen else 1.0

    def _chance(self, candidate: Candidate) -> float:
        told = self._numbers(candidate.settings)
        proved = [self._numbers(one.candidate.settings) for one in self.trials if one.ok]
        chance = 1.0
        for name, value in _CHANCE.items():
            if told[name] and not self._zero[name] and not any(seen[name] for seen in proved):
                chance *= value
        return chance

    # --- learning ---

    def learn(self, candidate: Candidate, measured: Measured) -> Trial:
        """Take in what came of a trial; returns it with what was learned, in one line.

        Of a setting that was tried before it is one more run, which has to pass as the others.
        """
        before, earlier = self.best, self._runs_of(candidate)
        if measured.status == "oom":
            told = self._learn_oom(candidate)
        elif measured.cut:
            told = "the budget was used up before it ended"
        elif earlier:
            told = self._learn_repeat(candidate, measured, earlier)
        elif measured.status == "ok" and measured.speed:
            told = self._learn_speed(candidate, measured, before)
        elif measured.status == "timeout":
            told = self._learn_slow(candidate, before)
        else:
            told = self._learn_failure(candidate, measured)
        trial = Trial(candidate=candidate, measured=measured, learned=told)
        self.runs.append(trial)
        if earlier:
            together = _together([*earlier, trial])
            self.trials = [together if _same(one, candidate) else one for one in self.trials]
        else:
            self.trials.append(trial)
        return trial

    def _observe(self, candidate: Candidate, speed: float, noise: float = _NOISE) -> None:
        expected = math.log(candidate.expected.tokens / candidate.expected.seconds)
        self._regression.add(self._vector(candidate), math.log(speed) - expected, noise)

    def _learn_repeat(
        self, candidate: Candidate, measured: Measured, earlier: Sequence[Trial]
    ) -> str:
        if measured.status == "refused":
            return f"refused: {measured.reason}"
        if measured.status != "ok" or not measured.speed:
            reason = measured.reason or "no reason seen"
            return f"{measured.status}: {reason}; no longer kept: every run has to pass"
        self._observe(candidate, measured.speed)
        speeds = Spread.of([measured.speed, *(_speed(one) for one in earlier if one.ok)])
        assert speeds is not None
        return f"median of {speeds.n} runs {speeds.median:,.0f} ({speeds.min:,.0f} – {speeds.max:,.0f})"

    def _learn_speed(self, candidate: Candidate, measured: Measured, before: Trial | None) -> str:
        assert measured.speed is not None
        self._observe(candidate, measured.speed)
        for _, left in self._suspects:
            left -= candidate.items
        self._settle()
        told = []
        if before is not None:
            change = measured.speed / _speed(before) - 1
            told.append(f"{change:+.1%} against the best before")
        if measured.peak is not None and candidate.expected.measurable:
            told.append(f"{measured.peak:.1f} GiB, {candidate.expected.measurable:.1f} estimated")
        if not self.lasts(Trial(candidate=candidate, measured=measured)):
            whole = self._whole(candidate, measured)
            told.append(
                f"not kept: with its longest rows the run needs {whole:.0f} of {self.room:.0f} GiB"
            )
        elif before is not None:
            told.append("kept" if measured.speed > _speed(before) else "not kept")
        return "; ".join(told) or "what the others are held to"

    def _learn_oom(self, candidate: Candidate) -> str:
        peak = candidate.expected.peak
        if peak is None:
            return "out of memory: nothing that needs at least as much is tried"
        # by estimate: what this trial says of the estimate itself, `_ratio` takes in
        self._ceiling = min(self._ceiling, peak)
        gone = sum(1 for one in self.grid.values() if self._above_ceiling(one))
        return f"out of memory: {gone} settings that need {peak:.1f} GiB or more by estimate are left out"

    def _above_ceiling(self, candidate: Candidate) -> bool:
        return (candidate.expected.peak or 0.0) >= self._ceiling

    def _learn_slow(self, candidate: Candidate, before: Trial | None) -> str:
        if before is None:
            return "it did not end in time"
        self._observe(candidate, _speed(before) / _SLOWEST, noise=0.2)
        return f"ended: less than 1/{_SLOWEST:g} of the best speed"

    def _learn_failure(self, candidate: Candidate, measured: Measured) -> str:
        what = f"{measured.status}: {measured.reason or 'no reason seen'}"
        if measured.blamed:
            for name in measured.blamed:
                self._bad.append(self._guilty(candidate, name))
            named = ", ".join(described(n, candidate.settings[n]) for n in measured.blamed)
            return f"{what}; {named}: not tried again"
        nearest = self._nearest(candidate)
        changed = frozenset(
            (name, candidate.settings[name])
            for name in self.differing(candidate, nearest)
            if name in candidate.settings
        )
        left = set(changed)
        for one in (t for t in self.trials if t.ok):
            left -= one.candidate.items
        for _, other in self._suspects:
            # one culprit explains more than two do
            if shared := other & left:
                left &= shared
                other &= shared
        self._suspects.append((changed or candidate.items, left))
        self._settle()
        if not changed:
            return what
        if len(changed) == 1:
            name, value = next(iter(changed))
            return f"{what}; {described(name, value)}: not tried again"
        return f"{what}; one of {len(changed)} changes does that: fewer of them at a time"

    def _settle(self) -> None:
        """Suspects of which one is left are guilty; those of which none is, only together."""
        for whole, left in list(self._suspects):
            if len(left) <= 1:
                self._suspects.remove((whole, left))
                self._bad.append(frozenset(left) if left else whole)

    def _nearest(self, candidate: Candidate) -> Candidate:
        good = [one.candidate for one in self.trials if one.ok] or [self.base]
        return min(good, key=lambda one: len(self.differing(candidate, one)))

    def _guilty(self, candidate: Candidate, name: str) -> frozenset[tuple[str, Setting]]:
        """What a verdict's point speaks against: packing leaks under one attention, not under another."""
        found = {(name, candidate.settings[name])}
        if name == "packing" and "attention" in candidate.settings:
            found.add(("attention", candidate.settings["attention"]))
        return frozenset(found)

    # --- what each change gains ---

    def _attribution(self, left: float) -> Candidate | None:
        """The best setting with one lever as the file has it: the most doubtful one first."""
        best = self.best
        if best is None or len(self.differing(best.candidate)) < 2 or not self.surpasses(best):
            # what the only change gains, the file as written tells
            return None
        open_ones = []
        for name in self.differing(best.candidate):
            without = self.without(best.candidate, name)
            if without is None or self._tried(without) or not self.eligible(without):
                continue
            if self.expected_seconds(without) > left or self._direct(best, name) is not None:
                continue
            mean, deviation = self._predicted(without)
            open_ones.append((abs(mean - math.log(_speed(best))) + deviation, name, without))
        if not open_ones:
            return None
        _, name, one = max(open_ones, key=lambda t: t[0])
        gone = described(name, best.candidate.settings[name])
        return replace(one, purpose="gain", why=f"what `{gone}` gains: the best setting without it")

    def without(self, candidate: Candidate, name: str) -> Candidate | None:
        """The same with one lever as the file has it, in micro-batches as large as then fit."""
        if name not in self.base.settings:
            # other rows need another split, which the file's do not have
            return None
        settings = {**candidate.settings, name: self.base.settings[name]}
        if name == "packing" and "bfd" in (settings[name], candidate.settings[name]):
            # other rows hold the tokens of a step: a size of the one says nothing of the other
            settings["per_device"] = self.base.settings.get("per_device", 1)
            return self.grid.get(Candidate(settings=settings, expected=candidate.expected).key)
        sizes = sorted(
            (int(one.settings["per_device"]) for one in self.grid.values()
             if "per_device" in one.settings and _same_but_batch(one.settings, settings)),
            reverse=True,
        )  # fmt: skip
        if name == "per_device" or not sizes:
            return self.grid.get(Candidate(settings=settings, expected=candidate.expected).key)
        for size in sizes:
            if size > int(candidate.settings["per_device"]):
                continue
            settings["per_device"] = size
            one = self.grid.get(Candidate(settings=settings, expected=candidate.expected).key)
            if one is not None and (self._tried(one) or self.eligible(one)):
                return one
        return None

    def _tried(self, candidate: Candidate) -> bool:
        return any(_same(one, candidate) for one in self.trials)

    def _direct(self, best: Trial, name: str) -> Trial | None:
        """The trial that has this lever as the file does, and is the best otherwise: see `without`."""
        wanted = self.without(best.candidate, name)
        if wanted is None:
            return None
        return next((one for one in self.trials if one.ok and _same(one, wanted)), None)

    def gain(self, best: Trial, name: str) -> tuple[Spread, Trial] | None:
        """What a lever of a setting gains, as a share of the speed without it, and the trial without."""
        found = self._direct(best, name)
        if found is None:
            return None
        with_it, without = self.speeds(best), self.speeds(found)
        told = Spread(
            with_it.median / without.median - 1, with_it.min / without.max - 1,
            with_it.max / without.min - 1, min(with_it.n, without.n),
        )  # fmt: skip
        return told, found

    # --- words ---

    def _why(self, candidate: Candidate) -> str:
        best = self.best
        if best is None:
            return "the fastest that surely fits, by arithmetic"
        changed = self.differing(candidate, best.candidate)
        words = ", ".join(
            described(n, candidate.settings[n]) for n in changed if n in candidate.settings
        )
        ratio = self.speed_ratio(candidate) or 1.0
        told = f"{words}: {ratio - 1:+.0%} expected"
        peak = self.peak(candidate)
        if peak is not None and self.room is not None:
            told += f", {peak:.0f} of {self.room:.0f} GiB"
        return told

    def summary(self) -> dict[str, Any]:
        """How large the grid is, and how much of it the plan and the trials have ruled out."""
        room = math.inf if self.room is None else self.room * (1 - MARGIN)
        large = sum(1 for one in self.grid.values() if (one.expected.peak or 0.0) > room)
        return {
            "settings": len(self.grid), "too_large": large, "tried": len(self.trials),
            "left": sum(1 for one in self.grid.values() if self.eligible(one) and not self._tried(one)),
        }  # fmt: skip


def _speed(trial: Trial) -> float:
    return trial.measured.speed or 0.0


def _same(trial: Trial, candidate: Candidate) -> bool:
    return trial.candidate.key == candidate.key


def _together(runs: Sequence[Trial]) -> Trial:
    """The runs of a setting as one trial: medians, and the largest peak; one that failed stands for all."""
    counted = [one for one in runs if one.counts]
    failed = [one for one in counted if not one.ok]
    if failed or not counted:
        return replace(runs[0], measured=(failed or runs)[-1].measured)
    told = [one.measured for one in counted]
    steps = [one.step for one in told if one.step]
    measured = replace(
        told[-1], speed=statistics.median(map(_speed, counted)),
        step=statistics.median(steps) if steps else None,
        peak=max((one.peak for one in told if one.peak is not None), default=None),
    )  # fmt: skip
    return replace(runs[0], measured=measured)


def _kind(candidate: Candidate) -> tuple[Setting | None, ...]:
    """What decides which of memory's moments is the peak."""
    return tuple(candidate.settings.get(name) for name in ("checkpointing", "packing", "liger"))


_ZERO_WEIGHT = ("zero3_offload", "zero3", "zero2", "zero1")
_WIDE = "_fp32_comm"


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


def _same_but_batch(one: Settings, other: Settings) -> bool:
    return all(one.get(name) == other.get(name) for name in ORDER if name != "per_device")


def _improvement(ahead: float, deviation: float) -> float:
    """Expected improvement over what is `ahead` logarithms below the mean."""
    if deviation <= 0:
        return max(0.0, ahead)
    z = ahead / deviation
    return ahead * _NORMAL.cdf(z) + deviation * _NORMAL.pdf(z)


@dataclass(slots=True)
class _Regression:
    """Bayesian linear regression with a standard normal prior on every weight, in its kernel form."""

    inputs: list[list[float]] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)
    factor: list[list[float]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def seen(self) -> int:
        """How many observations it has."""
        return len(self.targets)

    def add(self, vector: Sequence[float], target: float, noise: float = _NOISE) -> None:
        """One more observation."""
        self.inputs.append(list(vector))
        self.targets.append(target)
        self.noises.append(noise)
        size = len(self.inputs)
        kernel = [
            [
                _dot(self.inputs[i], self.inputs[j])
                + ((self.noises[i] ** 2 + _INTERACTION**2) if i == j else 0.0)
                for j in range(size)
            ]
            for i in range(size)
        ]
        self.factor = _cholesky(kernel)
        self.weights = _back(self.factor, _forward(self.factor, self.targets))

    def at(self, vector: Sequence[float]) -> tuple[float, float]:
        """Mean and standard deviation at a point, what levers do to each other included."""
        cross = [_dot(vector, one) for one in self.inputs]
        mean = _dot(cross, self.weights)
        solved = _forward(self.factor, cross)
        variance = _dot(vector, vector) - _dot(solved, solved) + _INTERACTION**2
        return mean, math.sqrt(max(variance, _INTERACTION**2))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    factor = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - _dot(factor[i][:j], factor[j][:j])
            factor[i][j] = math.sqrt(max(rest, 1e-12)) if i == j else rest / factor[j][j]
    return factor


def _forward(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    solved: list[float] = []
    for i, value in enumerate(right):
        solved.append((value - _dot(factor[i][:i], solved)) / factor[i][i])
    return solved


def _back(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    size = len(right)
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = math.fsum(factor[k][i] * solved[k] for k in range(i + 1, size))
        solved[i] = (right[i] - rest) / factor[i][i]
    return solved
