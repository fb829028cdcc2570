"""What a search has measured so far, and what it comes to: the best, and what the proposal is about."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.candidates import Candidate, Measured, Trial, together
from launcher.comparison import Spread, Timed, Word, judged

SAME = 0.01
"""Speeds that differ by less are taken for the same: then fewer changes are better."""
MARGIN = 0.08
"""The share of a card that is never planned for."""


@dataclass(slots=True, kw_only=True)
class Results:
    """All trials of a search on a card of `room` GiB (None: not known); `base` is the file as written.

    `trials` has one for each setting, which stands for all its runs; `runs` are those as they came.
    """

    base: Candidate
    room: float | None = None
    trials: list[Trial] = field(default_factory=list)
    runs: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """One more run, of a setting that was tried before or not."""
        earlier = self.runs_of(trial.candidate)
        self.runs.append(trial)
        if earlier:
            whole = together([*earlier, trial])
            self.trials = [whole if one.of(trial.candidate) else one for one in self.trials]
        else:
            self.trials.append(trial)

    def runs_of(self, candidate: Candidate) -> list[Trial]:
        """Those of one setting, as they came."""
        return [one for one in self.runs if one.of(candidate)]

    def tried(self, candidate: Candidate) -> bool:
        """Whether there is any of that setting."""
        return any(one.of(candidate) for one in self.trials)

    def differing(self, candidate: Candidate) -> list[str]:
        """The levers that are not as in the file."""
        return candidate.differing(self.base)

    @property
    def good(self) -> list[Trial]:
        """All that may be proposed, fastest first; of those as fast, the one with the fewest changes."""
        left = [one for one in self.trials if one.ok and self.lasts(one)]
        told: list[Trial] = []
        while left:
            top = max(one.speed for one in left)
            near = [one for one in left if one.speed >= top * (1 - SAME)]
            told.append(min(near, key=lambda one: (len(self.differing(one.candidate)), -one.speed)))
            left.remove(told[-1])
        return told

    @property
    def best(self) -> Trial | None:
        """The first of `good`."""
        return next(iter(self.good), None)

    @property
    def first(self) -> Trial | None:
        """The file as written, where it was measured."""
        return next((one for one in self.trials if one.of(self.base)), None)

    # --- memory of the whole run ---

    @property
    def planned(self) -> float | None:
        """GiB that may be planned for."""
        return None if self.room is None else self.room * (1 - MARGIN)

    def lasts(self, trial: Trial) -> bool:
        """Whether the whole run should fit, which meets longer rows than the trial that did.

        The file as written is the author's own: that it fits a trial is enough.
        """
        whole = self.whole(trial.candidate, trial.measured)
        if whole is None or self.planned is None or trial.of(self.base):
            return True
        return whole <= self.planned

    def whole(self, candidate: Candidate, measured: Measured) -> float | None:
        """GiB of the whole run, by how far the trial's peak was from its estimate."""
        expected = candidate.expected
        if not expected.peak or not expected.measurable or measured.peak is None:
            return None
        return expected.peak * measured.peak / expected.measurable

    # --- by all runs ---

    def speeds(self, trial: Trial) -> Spread:
        """Tokens a second and GPU of all runs of a setting that passed; there has to be one."""
        found = Spread.of(one.measured.speed for one in self.runs_of(trial.candidate) if one.ok)
        assert found is not None
        return found

    def surpasses(self, trial: Trial) -> bool:
        """Whether it is told to be faster than the file as written, where that was measured."""
        first = self.first
        return first is None or not first.ok or self._word(trial, first) == "faster"

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

    def _word(self, one: Trial, other: Trial) -> Word:
        both = ([run for run in self.runs_of(some.candidate) if run.ok] for some in (one, other))
        return judged(*([Timed.of(run.speed) for run in runs] for runs in both)).word
