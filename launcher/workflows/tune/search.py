"""Which setting to try next, and when to stop: the plan's estimates, corrected by what trials measured.

One greedy pass: the file as written, the fastest setting that fits by the plan, then one lever of the best
at a time, the most promising first; each value of a lever is tried once. What is left of the budget goes into
more runs of the best and of the file. Nothing here starts, reads or waits.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launcher.plan.memory.phases import usable
from launcher.workflows.bench.comparison import SPEED, Cause, Sample, Spread
from launcher.workflows.tune.space import ORDER, Candidate, Item, Space, described

THRESHOLD = 0.005
"""The search ends where nothing that is left could gain more than this share."""
RUNS = 3
"""How often the best and the file are run, where the budget allows."""
SAME = 0.01
"""Speeds that differ by less are taken for the same: then fewer changes are better."""

_DOUBT = {
    "attention": 0.15,
    "packing": 0.2,
    "liger": 0.15,
    "per_device": 0.08,
    "checkpointing": 0.08,
    "deepspeed": 0.1,
}
"""By what share a change of a lever may gain more than the plan says."""

Status = Cause | Literal["unproven", "loss changed", "no speed"]
"""The outcome of a trial; only `ok` counts. `contract` was disproved, `unproven` neither way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a candidate, its outcome, and what was learned from it, in one line.

    `blamed` are the levers that a verdict names. `loss_change` is against the file as written, as a share.
    """

    candidate: Candidate
    sample: Sample
    status: Status = "ok"
    reason: str | None = None
    blamed: tuple[str, ...] = ()
    loss_change: float | None = None
    learned: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.speed)

    @property
    def counts(self) -> bool:
        """Whether its end says something about the setting: the budget's end and a refusal do not."""
        return self.status not in ("timeout", "refused")

    @property
    def speed(self) -> float:
        return self.sample.metrics.get(SPEED) or 0.0

    @property
    def step(self) -> float | None:
        return self.sample.metrics.get("seconds_per_step")

    @property
    def peak(self) -> float | None:
        return self.sample.metrics.get("peak_allocated_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRuns:
    """A setting with all its runs: medians, and the largest peak; a failed run decides for all."""

    candidate: Candidate
    runs: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return self.runs[0].sample.variant

    @property
    def samples(self) -> list[Sample]:
        """All runs, but for later ones that ended for a reason that is not the setting's."""
        return [run.sample for nth, run in enumerate(self.runs) if not nth or run.counts]

    @property
    def counted(self) -> list[Trial]:
        return [run for run in self.runs if run.counts]

    @property
    def decisive(self) -> Trial:
        failed = [run for run in self.counted if not run.ok]
        return (failed or self.counted or self.runs)[-1]

    @property
    def ok(self) -> bool:
        return self.decisive.counts and self.decisive.ok

    @property
    def speed(self) -> float:
        return statistics.median([run.speed for run in self.counted] or [0.0])

    @property
    def step(self) -> float | None:
        steps = [run.step for run in self.counted if run.step]
        return statistics.median(steps) if steps else None

    @property
    def peak(self) -> float | None:
        return max((run.peak for run in self.counted if run.peak is not None), default=None)

    @property
    def spread(self) -> Spread:
        spread = Spread.of(run.speed for run in self.runs if run.ok)
        assert spread is not None
        return spread


class Search:
    """Proposes candidates of a grid and learns from their trials.

    `base` is the file as written, `room` the card's memory in GiB where it is known, `start_s` the seconds of
    a start before one was measured. `runs` are all trials as they came, `results` their settings, each once;
    `guilty` are values that fail where all of a set are together, `passed` those that had their trial in the
    greedy pass. `stopped` says why nothing follows.
    """

    def __init__(self, space: Space, grid: Iterable[Candidate]) -> None:
        self.base, self.steps, self.room = space.candidate(space.base), space.steps, space.card.gib
        self.threshold, self.start_s = THRESHOLD, 60.0 if space.plan.gpus else 20.0
        self.grid = {one.key: one for one in (self.base, *grid)}
        self.runs: list[Trial] = []
        self.results: list[SettingRuns] = []
        self.guilty: list[frozenset[Item]] = []
        self.passed: set[Item] = set()
        self.stopped: str | None = None

    def runs_of(self, candidate: Candidate) -> list[Trial]:
        return [run for run in self.runs if run.candidate.key == candidate.key]

    @property
    def good(self) -> list[SettingRuns]:
        """All that may be proposed, fastest first; of those as fast, the one with the fewest changes."""
        left = [one for one in self.results if one.ok and self.fits(one)]
        ranked: list[SettingRuns] = []
        while left:
            top = max(one.speed for one in left)
            near = [one for one in left if one.speed >= top * (1 - SAME)]
            near.sort(key=lambda one: (len(one.candidate.differing(self.base)), -one.speed))
            ranked.append(near[0])
            left.remove(near[0])
        return ranked

    @property
    def best(self) -> SettingRuns | None:
        return next(iter(self.good), None)

    @property
    def first(self) -> SettingRuns | None:
        return next((one for one in self.results if one.candidate.key == self.base.key), None)

    @property
    def limit(self) -> float:
        return math.inf if self.room is None else usable(self.room)

    def fits(self, one: SettingRuns | Trial) -> bool:
        """Whether the whole run should fit, with its longer rows; the file as written is the author's own."""
        return one.candidate.key == self.base.key or (_whole_peak(one) or 0) <= self.limit

    def peak(self, candidate: Candidate) -> float | None:
        """The estimate in GiB, corrected by measured peaks: of its kind, else of any."""
        if candidate.peak is None:
            return None
        alike, others = list[float](), [1.0]
        for one in self.results:
            full = one.decisive.status == "oom"
            # what ran out wanted more than there is, whatever was counted when it failed
            peak, estimate = self.room if full else one.peak, one.candidate.short
            if estimate and peak and (one.ok or full):
                others.append(peak / estimate)
                if not {"checkpointing", "packing", "liger"} & set(candidate.differing(one.candidate)):
                    # the levers that decide which of memory's moments is the peak
                    alike.append(peak / estimate)
        return candidate.peak * max(alike or others)

    def eligible(self, candidate: Candidate) -> bool:
        if any(bad <= set(candidate.key) for bad in self.guilty):
            return False
        full = [run.candidate for run in self.runs if run.status == "oom"]
        peak, estimate = self.peak(candidate), candidate.peak
        if peak is None or estimate is None:
            return candidate.rows < min((one.rows for one in full), default=math.inf)
        least = min((one.peak for one in full if one.peak), default=math.inf)
        return estimate < least and peak <= self.limit

    def predicted(self, candidate: Candidate) -> float:
        """Tokens a second and GPU: as much faster than the best as the plan says."""
        best = self.best
        scale = best.speed / best.candidate.speed if best else 1.0
        return candidate.speed * scale

    def trial_seconds(self, candidate: Candidate) -> float:
        """Wall time of a trial, learned from those before."""
        own = [run.sample.seconds for run in self.runs_of(candidate) if run.ok]
        if self.runs and self.runs[0].candidate.key == candidate.key:
            own = own[1:]
        starts = [run.sample.seconds - self.steps * run.step for run in self.runs if run.ok and run.step]
        # the first one fills caches that the others find
        start = max(0.0, statistics.median(starts[1:] or starts)) if starts else self.start_s
        best, step = self.best, candidate.seconds
        if best is not None and best.step is not None:
            step = best.step * candidate.seconds / best.candidate.seconds
        return max(own, default=start + self.steps * step)

    def propose(self, left: float = math.inf) -> Candidate | None:
        """The next candidate, None at the end: `stopped` says why. `left` are seconds of the budget."""
        if not self.runs and (self.base.peak or 0) <= (self.room or math.inf):
            return replace(self.base, purpose="baseline", why="the file as it is written")
        run = self.first.decisive if self.first is not None and self.best is None else None
        if run is not None and run.status == "timeout":
            self.stopped = "the budget: the file as written did not end within it (a larger --budget continues)"
            return None
        if run is not None and run.status not in ("ok", "oom") and not run.blamed:
            self.stopped = f"nothing can be compared with the file as written ({run.status}): {run.reason}"
            return None
        ranked = self.ranked()
        worth = [one for gain, one in ranked if gain >= self.threshold]
        for one in worth:
            if self.trial_seconds(one) <= left:
                return replace(one, why=self._why(one))
        if (again := self._again(left)) is not None:
            return again
        seconds = f"{max(0.0, left):.0f} s are left"
        if worth:
            self.stopped = (
                f"the budget: {self._why(worth[0])} and not tried, because a trial of it takes about "
                f"{self.trial_seconds(worth[0]):.0f} s and {seconds}: a larger --budget continues here"
            )
        elif ranked:
            self.stopped = f"what is left could gain {max(0.0, ranked[0][0]):.1%} at most"
        else:
            self.stopped = "nothing is left that fits and was not tried"
        if (due := self._again(math.inf)) is not None:
            self.stopped += f"; {due.why} takes about {self.trial_seconds(due):.0f} s, {seconds}"
        return None

    def ranked(self) -> list[tuple[float, Candidate]]:
        """What may be tried next, with the share that it could gain at most; the most first."""
        best = self.best
        fresh = [one for one in self.grid.values() if self.eligible(one) and not self.runs_of(one)]
        leaps = (one for one in self.results if one.candidate.key != self.base.key)
        if best is None or all(one.decisive.status in ("oom", "refused") for one in leaps):
            # the fastest by the plan, until one runs
            fresh.sort(key=lambda one: (-one.speed, len(one.differing(self.base))))
            gains = [(self.predicted(one) / best.speed - 1 if best else 1.0, one) for one in fresh]
            if gains and gains[0][0] >= self.threshold:
                return gains
        if best is None:
            return []
        around = self._neighbours(best.candidate, fresh)
        near = [(self.predicted(one) / best.speed - 1 + _DOUBT[name], one) for name, one in around]
        return sorted(near, key=lambda pair: (-round(pair[0], 4), len(pair[1].differing(self.base))))

    def _neighbours(self, best: Candidate, fresh: Sequence[Candidate]) -> Iterator[tuple[str, Candidate]]:
        """For each value of a lever that had no trial, the fastest in micro-batches that fit."""
        for name in ORDER:
            # a micro-batch that fits may come with it
            around = [one for one in fresh if {name} <= set(one.differing(best)) <= {name, "per_device"}]
            if name == "per_device":
                # the next larger and the next smaller size
                around.sort(key=lambda one: one.rows)
                below = sum(one.rows < best.rows for one in around)
                yield from ((name, one) for one in around[max(0, below - 1) : below + 1])
                continue
            for value in dict.fromkeys(one.settings.get(name) for one in around):
                if (name, value) not in self.passed:
                    alike = [one for one in around if one.settings.get(name) == value]
                    yield name, max(alike, key=lambda one: one.speed)

    def _again(self, left: float) -> Candidate | None:
        """The best beside the file, or the file, until each was run often enough: A B, B A, A B."""
        keys = [one.candidate.key for one in self.good if one.candidate.key != self.base.key][:1]
        if keys and self.first is not None and self.first.ok:
            keys.append(self.base.key)
        contenders = [one for one in self.results if one.candidate.key in keys]
        fewest = min((len(one.runs) for one in contenders), default=RUNS)
        turns = [one for one in contenders if len(one.runs) == fewest < RUNS]
        for one in turns[::-1] if fewest % 2 else turns:
            if self.trial_seconds(one.candidate) <= left:
                words = self.words(one.candidate, self.base) or "the file as it is written"
                why = f"{words} once more: run {fewest + 1}"
                return replace(one.candidate, purpose="repeat", why=why)
        return None

    def learn(self, trial: Trial) -> Trial:
        """Take in the outcome of a trial, maybe one more of its setting; returns it with what was learned."""
        candidate, before = trial.candidate, self.best
        if before is not None and candidate.purpose == "search":
            changed = [name for name in candidate.differing(before.candidate) if name != "per_device"]
            if len(changed) == 1 and trial.counts and trial.status != "oom":
                self.passed.add((changed[0], candidate.settings[changed[0]]))
        trial = replace(trial, learned=self._learned(trial, before))
        self.runs.append(trial)
        keys = dict.fromkeys(run.candidate.key for run in self.runs)
        runs = [tuple(run for run in self.runs if run.candidate.key == key) for key in keys]
        self.results = [SettingRuns(candidate=own[0].candidate, runs=own) for own in runs]
        return trial

    def _learned(self, trial: Trial, before: SettingRuns | None) -> str:
        candidate, status, speed = trial.candidate, trial.status, trial.speed
        earlier = self.runs_of(candidate)
        failure = f"{status}: {trial.reason or 'no reason given'}"
        if status == "timeout":
            return "the budget was used up before it ended"
        if status == "oom":
            return "out of memory: nothing that needs at least as much is tried"
        if earlier and not trial.ok:
            return failure if status == "refused" else f"{failure}; no longer kept: every run has to pass"
        if earlier:
            return f"now {Spread.of([speed, *(run.speed for run in earlier if run.ok)])}"
        if not trial.ok:
            return failure + self._blame(trial)
        parts = [f"{speed / before.speed - 1:+.1%} against the best before"] if before else []
        if trial.peak is not None and candidate.short:
            parts.append(f"{trial.peak:.1f} GiB, {candidate.short:.1f} estimated")
        if not self.fits(trial):
            parts.append(
                f"not kept: with its longest rows the run needs {_whole_peak(trial):.0f} of {self.room:.0f} GiB"
            )
        elif before is not None:
            parts.append("kept" if speed > before.speed else "not kept")
        return "; ".join(parts) or "the others are compared with it"

    def _blame(self, trial: Trial) -> str:
        """Which values must not come together again: those that a verdict names, else all that is new."""
        settings, names = trial.candidate.settings, list(trial.blamed)
        for name in names:
            items = {(name, settings[name])}
            if name == "packing" and "attention" in settings:
                # packing leaks under one attention, not under another
                items.add(("attention", settings["attention"]))
            self.guilty.append(frozenset(items))
        if not names:
            proved = [one.candidate for one in self.results if one.ok] or [self.base]
            nearest = min(proved, key=lambda one: len(trial.candidate.differing(one)))
            names = [name for name in trial.candidate.differing(nearest) if name in settings]
            if len(names) > 1 and len(set(names) - {"per_device"}) == 1:
                # a micro-batch that fits comes with a lever
                names.remove("per_device")
            if names:
                self.guilty.append(frozenset((name, settings[name]) for name in names))
        words = ", ".join(described(name, settings[name]) for name in names)
        return f"; {words}: not tried again{' together' * (len(names) > 1)}" if names else ""

    def words(self, one: Candidate, other: Candidate) -> str:
        return ", ".join(described(k, one.settings[k]) for k in one.differing(other) if k in one.settings)

    def _why(self, candidate: Candidate) -> str:
        best = self.best
        if best is None:
            return "the fastest that fits, by the plan"
        gain = self.predicted(candidate) / best.speed - 1
        why = f"{self.words(candidate, best.candidate)}: {gain:+.0%} expected"
        peak = self.peak(candidate)
        return why if peak is None or not self.room else f"{why}, {peak:.0f} of {self.room:.0f} GiB"

    def summary(self) -> dict[str, Any]:
        grid = self.grid.values()
        return {
            "settings": len(self.grid),
            "too_large": sum(1 for one in grid if (one.peak or 0.0) > self.limit),
            "tried": len(self.results),
            "left": sum(1 for one in grid if self.eligible(one) and not self.runs_of(one)),
        }


def _whole_peak(one: SettingRuns | Trial) -> float | None:
    """The peak of the whole run in GiB, by what a trial measured; None where nobody can tell."""
    whole, short = one.candidate.peak, one.candidate.short
    if not whole or not short or one.peak is None:
        return None
    return whole * one.peak / short
