"""Which setting to measure next, and when to stop: a state machine that is fed with measurements.

Every setting has an expectation of its speed and memory before anything runs. What short runs measure
corrects both, and the next trial is the one with the largest expected improvement (Jones, Schonlau and
Welch, "Efficient Global Optimization", 1998), weighed by the chance that it fits and that it runs at all.
Nothing here starts, reads or waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from launcher.attribution import Attribution
from launcher.candidates import Candidate, Measured, Status, Trial
from launcher.comparison import Spread
from launcher.levers import described
from launcher.paces import SLOWEST, START_S, Paces
from launcher.peaks import Peaks
from launcher.results import Results
from launcher.suspects import Suspects

THRESHOLD = 0.005
"""The search ends where the best of what is left is expected to improve by less than this share."""
RUNS = 3
"""How often a setting is run that the proposal is about, where the budget allows."""

_WORTH = 0.02
"""What a trial is to gain to be begun in place of second runs, where not all of that fits the budget."""
_FIRST: Mapping[Status, str] = {
    "refused": "cannot be started", "unproven": "proves nothing to hold others to",
    "no speed": "tells no speed",
}  # fmt: skip
_NORMAL = NormalDist()


class Search:
    """Proposes candidates of a grid and learns from what was measured.

    `base` is the file as written, `room` the card's memory in GiB where it is known. `masked` says that
    a space without an attention lever has no flash attention. Once nothing better is to be expected (or
    affordable), what is left of the budget goes into up to `repeats` runs of the settings that the
    proposal is about and, with `attribute`, into measuring what each change gains.

    `results`, `peaks`, `paces` and `suspects` are what was learned; `stopped` says why nothing follows.
    """

    def __init__(
        self, grid: Iterable[Candidate], base: Candidate, *, steps: int, room: float | None = None,
        masked: bool = False, attribute: bool = True, repeats: int = RUNS, threshold: float = THRESHOLD,
        start_s: float = START_S,
    ) -> None:  # fmt: skip
        self.base = base
        self.attribute = attribute
        self.repeats = repeats
        self.threshold = threshold
        self.grid = {one.key: one for one in (base, *grid)}
        self.results = Results(base=base, room=room)
        self.peaks = Peaks(self.results)
        self.paces = Paces(self.results, steps, masked, start_s)
        self.suspects = Suspects()
        self.attribution = Attribution(self.grid, self.results, self.paces, self.eligible)
        self.stopped: str | None = None

    # --- the next one ---

    def propose(self, left: float = math.inf) -> Candidate | None:
        """The next candidate, None at the end: `stopped` says why. `left` are seconds of the budget."""
        if not self.results.trials:
            opening = self._opening()
            if opening is not None:
                return self._affordable(opening, left)
        if self._broken():
            return None
        ranked = self.ranked()
        if ranked and ranked[0][0] >= self.threshold:
            for gain, one in ranked:
                seconds = self.paces.trial_seconds(one)
                if gain < self.threshold or seconds > left:
                    continue
                sure = None
                if gain < _WORTH and seconds + self._second_runs() > left:
                    sure = self._again(left, min(2, self.repeats))
                return sure or replace(one, why=self._why(one))
            first = ranked[0][1]
            told = (
                f"the budget: {self._why(first)} and not tried, because a trial of it takes about "
                f"{self.paces.trial_seconds(first):.0f} s and {max(0.0, left):.0f} s are left: a larger "
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
                or (self.attribution.due(left) if self.attribute else None)
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
        peak, room = self.base.expected.peak, self.results.room
        if peak is not None and room is not None and peak > room:
            return None
        return replace(self.base, purpose="baseline", why="the file as it is written")

    def _broken(self) -> bool:
        """Whether even the file as written did not come to its end: then there is nothing to compare with."""
        first = self.results.first
        if first is not None and first.measured.cut and self.results.best is None:
            self.stopped = (
                "the budget: the file as written did not end within it (a larger --budget goes on)"
            )
            return True
        if first is None or first.measured.status in ("ok", "oom", "timeout"):
            return False
        if first.measured.blamed or any(one.ok for one in self.results.runs_of(self.base)):
            return False
        said = _FIRST.get(first.measured.status, "does not train")
        self.stopped = f"the file as written {said}: {first.measured.reason}"
        return True

    def ranked(self) -> list[tuple[float, Candidate]]:
        """What was not tried and may be, with the share that it is expected to gain; the most first."""
        best = self.results.best
        goal = None if best is None else math.log(best.speed)
        told = []
        for one in self.grid.values():
            if self.results.tried(one) or not self.eligible(one):
                continue
            mean, deviation = self.paces.predicted(one)
            # before anything ran: what surely fits, and is fast
            gain = 1.0 + mean / 100 if goal is None else _improvement(mean - goal, deviation)
            told.append((gain * self.paces.chance(one) * self.peaks.chance(one), one))
        return sorted(told, key=lambda t: (-round(t[0], 4), len(self.results.differing(t[1]))))

    def eligible(self, candidate: Candidate) -> bool:
        """Whether nothing that was learned speaks against it."""
        return not self.suspects.speak_against(candidate) and self.peaks.admit(candidate)

    # --- once more ---

    def _again(self, left: float, runs: int) -> Candidate | None:
        """The contender whose turn it is, until each was run so often: A B, B A, A B."""
        contenders = self.results.contenders()
        counted = [(len(self.results.runs_of(one.candidate)), one) for one in contenders]
        fewest = min((count for count, _ in counted), default=runs)
        turns = [one for count, one in counted if count == fewest < runs]
        for one in turns[::-1] if fewest % 2 else turns:
            if self.paces.trial_seconds(one.candidate) <= left:
                changed = self.results.differing(one.candidate)
                what = ", ".join(described(n, one.candidate.settings[n]) for n in changed)
                why = f"{what or 'the file as it is written'} once more: run {fewest + 1}"
                return replace(one.candidate, purpose="repeat", why=why)
        return None

    def _undone(self, left: float) -> str:
        """Runs that the proposal would have had, with more time."""
        due = self._again(math.inf, self.repeats)
        if due is None or math.isinf(left):
            return ""
        takes = self.paces.trial_seconds(due)
        return f"; {due.why} takes about {takes:.0f} s, {max(0.0, left):.0f} s are left"

    def _second_runs(self) -> float:
        """Seconds of those of all contenders that are still to be made."""
        about = [one.candidate for one in self.results.contenders()]
        return math.fsum(
            self.paces.trial_seconds(one) for one in about if len(self.results.runs_of(one)) < 2
        )

    # --- learning ---

    def learn(self, candidate: Candidate, measured: Measured) -> Trial:
        """Take in what came of a trial; returns it with what was learned, in one line.

        Of a setting that was tried before it is one more run, which has to pass as the others.
        """
        before, earlier = self.results.best, self.results.runs_of(candidate)
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
        self.results.add(trial)
        return trial

    def _learn_repeat(
        self, candidate: Candidate, measured: Measured, earlier: Sequence[Trial]
    ) -> str:
        if measured.status == "refused":
            return f"refused: {measured.reason}"
        if measured.status != "ok" or not measured.speed:
            reason = measured.reason or "no reason seen"
            return f"{measured.status}: {reason}; no longer kept: every run has to pass"
        self.paces.observe(candidate, measured.speed)
        speeds = Spread.of([measured.speed, *(one.speed for one in earlier if one.ok)])
        assert speeds is not None
        return f"median of {speeds.n} runs {speeds.median:,.0f} ({speeds.min:,.0f} – {speeds.max:,.0f})"

    def _learn_speed(self, candidate: Candidate, measured: Measured, before: Trial | None) -> str:
        assert measured.speed is not None
        self.paces.observe(candidate, measured.speed)
        self.suspects.clear(candidate)
        told = []
        if before is not None:
            change = measured.speed / before.speed - 1
            told.append(f"{change:+.1%} against the best before")
        if measured.peak is not None and candidate.expected.measurable:
            told.append(f"{measured.peak:.1f} GiB, {candidate.expected.measurable:.1f} estimated")
        if not self.results.lasts(Trial(candidate=candidate, measured=measured)):
            whole = self.results.whole(candidate, measured)
            told.append(
                f"not kept: with its longest rows the run needs {whole:.0f} of {self.results.room:.0f} GiB"
            )
        elif before is not None:
            told.append("kept" if measured.speed > before.speed else "not kept")
        return "; ".join(told) or "what the others are held to"

    def _learn_oom(self, candidate: Candidate) -> str:
        self.peaks.failed(candidate)
        peak = candidate.expected.peak
        if peak is None:
            return "out of memory: nothing that needs at least as much is tried"
        gone = sum(1 for one in self.grid.values() if self.peaks.above_ceiling(one))
        return f"out of memory: {gone} settings that need {peak:.1f} GiB or more by estimate are left out"

    def _learn_slow(self, candidate: Candidate, before: Trial | None) -> str:
        if before is None:
            return "it did not end in time"
        self.paces.observe_slow(candidate, before.speed)
        return f"ended: less than 1/{SLOWEST:g} of the best speed"

    def _learn_failure(self, candidate: Candidate, measured: Measured) -> str:
        what = f"{measured.status}: {measured.reason or 'no reason seen'}"
        if measured.blamed:
            for name in measured.blamed:
                self.suspects.accuse(candidate, name)
            named = ", ".join(described(n, candidate.settings[n]) for n in measured.blamed)
            return f"{what}; {named}: not tried again"
        proved = [one.candidate for one in self.results.trials if one.ok]
        nearest = min(proved or [self.base], key=lambda one: len(candidate.differing(one)))
        changed = frozenset(
            (name, candidate.settings[name])
            for name in candidate.differing(nearest)
            if name in candidate.settings
        )
        self.suspects.suspect(candidate, changed, proved)
        if not changed:
            return what
        if len(changed) == 1:
            name, value = next(iter(changed))
            return f"{what}; {described(name, value)}: not tried again"
        return f"{what}; one of {len(changed)} changes does that: fewer of them at a time"

    # --- words ---

    def _why(self, candidate: Candidate) -> str:
        best = self.results.best
        if best is None:
            return "the fastest that surely fits, by arithmetic"
        changed = candidate.differing(best.candidate)
        words = ", ".join(
            described(n, candidate.settings[n]) for n in changed if n in candidate.settings
        )
        ratio = math.exp(self.paces.predicted(candidate)[0]) / best.speed
        told = f"{words}: {ratio - 1:+.0%} expected"
        peak, room = self.peaks.of(candidate), self.results.room
        if peak is not None and room is not None:
            told += f", {peak:.0f} of {room:.0f} GiB"
        return told

    def summary(self) -> dict[str, Any]:
        """How large the grid is, and how much of it the plan and the trials have ruled out."""
        planned = math.inf if self.results.planned is None else self.results.planned
        grid, tried = self.grid.values(), self.results.tried
        return {
            "settings": len(self.grid),
            "too_large": sum(1 for one in grid if (one.expected.peak or 0.0) > planned),
            "tried": len(self.results.trials),
            "left": sum(1 for one in grid if self.eligible(one) and not tried(one)),
        }  # fmt: skip


def _improvement(ahead: float, deviation: float) -> float:
    """Expected improvement over what is `ahead` logarithms below the mean."""
    if deviation <= 0:
        return max(0.0, ahead)
    z = ahead / deviation
    return ahead * _NORMAL.cdf(z) + deviation * _NORMAL.pdf(z)
