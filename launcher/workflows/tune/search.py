"""Which setting to try next, and when to stop: the plan's estimates, corrected by measurements.

One greedy pass: the file as written, the fastest setting that fits by the plan, then one lever of
the best at a time, the most promising first; each value of a lever is tried once. What is left of
the budget goes into more runs of the best and of the file. Nothing here starts, reads or waits.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from launcher.lazy_dataclass import dataclass
from launcher.plan.memory.phases import compute_usable
from launcher.workflows.bench.comparison import Cause, Sample, Spread
from launcher.workflows.tune.space import ORDER, Candidate, Item, Space, describe_setting

THRESHOLD = 0.005
"""The search ends if nothing that is left could gain more than this share."""
RUNS = 3
"""How often the best and the file are run, if the budget allows."""
SAME = 0.01
"""Speeds that differ by less count as the same: then fewer changes are better."""

_DOUBT = {
    "attention": 0.15,
    "packing": 0.2,
    "liger": 0.15,
    "per_device": 0.08,
    "checkpointing": 0.08,
    "deepspeed": 0.1,
}
"""By what share a change of a lever may gain more than the plan says."""
_SHAPE_OF_PEAK = {"checkpointing", "packing", "liger"}
"""Levers that decide which moment of a step needs the most memory."""

Status = Cause | Literal["unproven", "loss changed", "no speed"]
"""The outcome of a trial; only `ok` counts. `contract` was disproved, `unproven` neither way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a candidate, its outcome, and what was learned from it, in one line.

    `blamed` are the levers that a verdict names. `loss_change` is against the file as written, as a
    share.
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
        """Whether its end is the setting's: the budget's end and a refusal to start are not."""
        return self.status not in ("timeout", "refused")

    @property
    def speed(self) -> float:
        return self.sample.speed or 0.0

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
        """The first run, and those of the others whose end is the setting's."""
        later = [run for run in self.runs[1:] if run.counts]
        return [run.sample for run in (self.runs[0], *later)]

    @property
    def counted(self) -> list[Trial]:
        return [run for run in self.runs if run.counts]

    @property
    def decisive(self) -> Trial:
        failed = [run for run in self.counted if not run.ok]
        return (failed or self.counted or self.runs)[-1]

    @property
    def ok(self) -> bool:
        return self.decisive.ok

    @property
    def speed(self) -> float:
        return statistics.median([run.speed for run in self.counted] or [0.0])

    @property
    def step(self) -> float | None:
        steps = [run.step for run in self.counted if run.step]
        if not steps:
            return None
        return statistics.median(steps)

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

    `base` is the file as written, `room` the card's memory in GiB if known. `runs` are all trials
    in turn, `results` their settings, each once. `guilty` are sets of values that fail together,
    `passed` values that had their trial in the greedy pass. `stopped` says why nothing follows.
    """

    def __init__(self, space: Space, grid: Iterable[Candidate]) -> None:
        self.base = space.candidate(space.base)
        self.steps = space.steps
        self.room = space.card.gib
        self.threshold = THRESHOLD
        self.expected_start_s = 60.0 if space.plan.gpus else 20.0
        self.grid = {candidate.key: candidate for candidate in (self.base, *grid)}
        self.runs: list[Trial] = []
        self.results: dict[tuple[Item, ...], SettingRuns] = {}
        self.guilty: list[frozenset[Item]] = []
        self.passed: set[Item] = set()
        self.stopped: str | None = None

    def runs_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        setting = self.results.get(candidate.key)
        if setting is None:
            return ()
        return setting.runs

    @property
    def good(self) -> list[SettingRuns]:
        """All that may be proposed, fastest first; of equals, that with the fewest changes."""
        left = [setting for setting in self.results.values() if setting.ok and self.fits(setting)]
        left.sort(key=lambda setting: setting.speed, reverse=True)
        ranked: list[SettingRuns] = []
        while left:
            least = left[0].speed * (1 - SAME)
            equals = [setting for setting in left if setting.speed >= least]
            plainest = min(equals, key=lambda setting: self._count_changes(setting.candidate))
            ranked.append(plainest)
            left.remove(plainest)
        return ranked

    def _count_changes(self, candidate: Candidate) -> int:
        return len(candidate.differing(self.base))

    @property
    def best(self) -> SettingRuns | None:
        return next(iter(self.good), None)

    @property
    def first(self) -> SettingRuns | None:
        """The file as written, once it was tried."""
        return self.results.get(self.base.key)

    @property
    def limit(self) -> float:
        """The memory in GiB that a run may need."""
        if self.room is None:
            return math.inf
        return compute_usable(self.room)

    def fits(self, runs: SettingRuns | Trial) -> bool:
        """Whether the whole run fits, with its longer rows; the file as written always does."""
        peak = _scale_peak(runs)
        return peak is None or peak <= self.limit or runs.candidate.key == self.base.key

    def peak(self, candidate: Candidate) -> float | None:
        """The estimate in GiB, corrected by measured peaks: of its kind, else of any."""
        if candidate.peak is None:
            return None
        alike: list[float] = []
        others = [1.0]
        for setting in self.results.values():
            peak = setting.peak if setting.ok else None
            if setting.decisive.status == "oom":
                # it needs more than there is, whatever was counted when it failed
                peak = self.room
            estimate = setting.candidate.short
            if not peak or not estimate:
                continue
            others.append(peak / estimate)
            if _SHAPE_OF_PEAK.isdisjoint(candidate.differing(setting.candidate)):
                alike.append(peak / estimate)
        return candidate.peak * max(alike or others)

    def eligible(self, candidate: Candidate) -> bool:
        """Whether it may succeed, by what failed and by its memory."""
        values = set(candidate.key)
        if any(failing <= values for failing in self.guilty):
            return False
        peak = self.peak(candidate)
        if peak is not None and peak > self.limit:
            return False
        full = [run.candidate for run in self.runs if run.status == "oom"]
        return all(_needs_less(candidate, other) for other in full)

    def _expect_gain(self, candidate: Candidate) -> float:
        """The share by which it should be faster than the best, by the plan; 1 if there is none."""
        best = self.best
        if best is None:
            return 1.0
        return candidate.speed / best.candidate.speed - 1

    def trial_seconds(self, candidate: Candidate) -> float:
        """Wall time of a trial, learned from those before."""
        # the very first run fills caches that the others find
        earlier = [run for run in self.runs_of(candidate) if run.ok and run is not self.runs[0]]
        if earlier:
            return max(run.sample.seconds for run in earlier)
        step = candidate.seconds
        best = self.best
        if best is not None and best.step is not None:
            step *= best.step / best.candidate.seconds
        return self._expect_start() + self.steps * step

    def _expect_start(self) -> float:
        """Seconds of a trial before its first step, by the median of those before."""
        starts = []
        for run in self.runs:
            if run.ok and run.step:
                starts.append(run.sample.seconds - self.steps * run.step)
        if not starts:
            return self.expected_start_s
        warm = starts[1:] or starts
        return max(0.0, statistics.median(warm))

    def propose(self, left: float = math.inf) -> Candidate | None:
        """The next candidate, None at the end, with the reason in `stopped`.

        `left` is seconds of the budget.
        """
        if not self.runs and (self.base.peak or 0) <= (self.room or math.inf):
            return replace(self.base, purpose="baseline", why="the file as it is written")
        self.stopped = self._explain_unusable_base()
        if self.stopped is not None:
            return None
        ranked = self.ranked()
        worth = [candidate for gain, candidate in ranked if gain >= self.threshold]
        for candidate in worth:
            if self.trial_seconds(candidate) <= left:
                return replace(candidate, why=self._explain_choice(candidate))
        again = self._choose_repeat(left)
        if again is not None:
            return again
        seconds_left = f"{max(0.0, left):.0f} s are left"
        if worth:
            seconds = self.trial_seconds(worth[0])
            self.stopped = (
                f"the budget: {self._explain_choice(worth[0])} and not tried, because a trial of "
                f"it takes about {seconds:.0f} s and {seconds_left}: "
                "a larger --budget continues here"
            )
        elif ranked:
            gain, _ = ranked[0]
            self.stopped = f"what is left could gain {max(0.0, gain):.1%} at most"
        else:
            self.stopped = "nothing is left that fits and was not tried"
        due = self._choose_repeat(math.inf)
        if due is not None:
            seconds = self.trial_seconds(due)
            self.stopped += f"; {due.why} takes about {seconds:.0f} s, {seconds_left}"
        return None

    def _explain_unusable_base(self) -> str | None:
        """Why the file as written, tried without success, ends the search; None if it does not."""
        if self.first is None or self.best is not None:
            return None
        run = self.first.decisive
        if run.status == "timeout":
            return (
                "the budget: the file as written did not end within it "
                "(a larger --budget continues)"
            )
        if run.status in ("ok", "oom") or run.blamed:
            return None
        return f"nothing can be compared with the file as written ({run.status}): {run.reason}"

    def ranked(self) -> list[tuple[float, Candidate]]:
        """What may be tried next, with the share that it could gain at most; the most first."""
        best = self.best
        fresh = []
        for candidate in self.grid.values():
            if candidate.key not in self.results and self.eligible(candidate):
                fresh.append(candidate)
        if best is None or not self._has_run_leap():
            # the fastest by the plan, until one runs
            fresh.sort(key=lambda candidate: (-candidate.speed, self._count_changes(candidate)))
            gains = [(self._expect_gain(candidate), candidate) for candidate in fresh]
            if gains and gains[0][0] >= self.threshold:
                return gains
        if best is None:
            return []
        gains = []
        for name, candidate in self._find_neighbours(best.candidate, fresh):
            gains.append((self._expect_gain(candidate) + _DOUBT[name], candidate))

        def order(pair: tuple[float, Candidate]) -> tuple[float, int]:
            gain, candidate = pair
            return -round(gain, 4), self._count_changes(candidate)

        return sorted(gains, key=order)

    def _has_run_leap(self) -> bool:
        """Whether a setting other than the file's was neither refused nor out of memory."""
        for key, setting in self.results.items():
            if key != self.base.key and setting.decisive.status not in ("oom", "refused"):
                return True
        return False

    def _find_neighbours(
        self, best: Candidate, fresh: Sequence[Candidate]
    ) -> Iterator[tuple[str, Candidate]]:
        """For each value of a lever that had no trial, the fastest in micro-batches that fit."""
        for name in ORDER:
            # a micro-batch that fits may come with it
            allowed = {name, "per_device"}
            around = []
            for candidate in fresh:
                if {name} <= set(candidate.differing(best)) <= allowed:
                    around.append(candidate)
            if name == "per_device":
                chosen = _find_next_sizes(best, around)
            else:
                chosen = self._choose_values(name, around)
            for candidate in chosen:
                yield name, candidate

    def _choose_values(self, name: str, around: Iterable[Candidate]) -> list[Candidate]:
        """The fastest for each value of a lever that had no trial."""
        fastest: dict[Item, Candidate] = {}
        for candidate in around:
            item = (name, candidate.settings[name])
            if item in self.passed:
                continue
            if item not in fastest or candidate.speed > fastest[item].speed:
                fastest[item] = candidate
        return list(fastest.values())

    def _choose_repeat(self, left: float) -> Candidate | None:
        """The best or the file, until each was run `RUNS` times: A B, B A, A B."""
        contenders = self._list_contenders()
        if not contenders:
            return None
        fewest = min(len(setting.runs) for setting in contenders)
        turns = [setting for setting in contenders if len(setting.runs) == fewest < RUNS]
        if fewest % 2:
            turns.reverse()
        for setting in turns:
            candidate = setting.candidate
            if self.trial_seconds(candidate) <= left:
                words = self.words(candidate, self.base) or "the file as it is written"
                why = f"{words} once more: run {fewest + 1}"
                return replace(candidate, purpose="repeat", why=why)
        return None

    def _list_contenders(self) -> list[SettingRuns]:
        """The best other than the file, and the file itself, in the order of their first runs."""
        others = [setting for setting in self.good if setting.candidate.key != self.base.key]
        if not others:
            return []
        contenders = [others[0]]
        if self.first is not None and self.first.ok:
            contenders.append(self.first)
        return [setting for setting in self.results.values() if setting in contenders]

    def learn(self, trial: Trial) -> Trial:
        """Take in the outcome of a trial; returns it with what was learned."""
        candidate = trial.candidate
        before = self.best
        if before is not None and candidate.purpose == "search":
            changed = candidate.differing(before.candidate)
            levers = [name for name in changed if name != "per_device"]
            if len(levers) == 1 and trial.counts and trial.status != "oom":
                lever = levers[0]
                self.passed.add((lever, candidate.settings[lever]))
        trial = replace(trial, learned=self._describe_lesson(trial, before))
        self.runs.append(trial)
        runs = (*self.runs_of(candidate), trial)
        self.results[candidate.key] = SettingRuns(candidate=runs[0].candidate, runs=runs)
        return trial

    def _describe_lesson(self, trial: Trial, before: SettingRuns | None) -> str:
        if trial.status == "timeout":
            return "the budget was used up before it ended"
        if trial.status == "oom":
            return "out of memory: nothing that needs at least as much is tried"
        failure = f"{trial.status}: {trial.reason or 'no reason given'}"
        earlier = self.runs_of(trial.candidate)
        if not trial.ok:
            if not earlier:
                return failure + self._rule_out_values(trial)
            if trial.status == "refused":
                return failure
            return f"{failure}; no longer kept: every run has to pass"
        if earlier:
            speeds = [run.speed for run in earlier if run.ok]
            return f"now {Spread.of([trial.speed, *speeds])}"
        parts = []
        if before is not None:
            parts.append(f"{trial.speed / before.speed - 1:+.1%} against the best before")
        estimate = trial.candidate.short
        if trial.peak is not None and estimate:
            parts.append(f"{trial.peak:.1f} GiB, {estimate:.1f} estimated")
        if not self.fits(trial):
            needed = f"{_scale_peak(trial):.0f} of {self.room:.0f} GiB"
            parts.append(f"not kept: with its longest rows the run needs {needed}")
        elif before is not None:
            parts.append("kept" if trial.speed > before.speed else "not kept")
        return "; ".join(parts) or "the others are compared with it"

    def _rule_out_values(self, trial: Trial) -> str:
        """Rule out the values that a verdict names, else all that are new together; say which."""
        settings = trial.candidate.settings
        names = list(trial.blamed)
        for name in names:
            items = {(name, settings[name])}
            if name == "packing" and "attention" in settings:
                # packing leaks under one attention, not under another
                items.add(("attention", settings["attention"]))
            self.guilty.append(frozenset(items))
        if not names:
            names = self._find_new_levers(trial.candidate)
            if not names:
                return ""
            self.guilty.append(frozenset((name, settings[name]) for name in names))
        words = _describe_settings(trial.candidate, names)
        together = " together" if len(names) > 1 else ""
        return f"; {words}: not tried again{together}"

    def _find_new_levers(self, candidate: Candidate) -> list[str]:
        """Levers that differ from the nearest setting that runs."""
        proved = [setting.candidate for setting in self.results.values() if setting.ok]
        nearest = min(proved or [self.base], key=lambda other: len(candidate.differing(other)))
        names = candidate.values_beside(nearest)
        if len(names) == 2 and "per_device" in names:
            # a micro-batch that fits comes with a lever
            names.remove("per_device")
        return names

    def words(self, candidate: Candidate, other: Candidate) -> str:
        """What differs from another candidate, as text."""
        return _describe_settings(candidate, candidate.values_beside(other))

    def _explain_choice(self, candidate: Candidate) -> str:
        best = self.best
        if best is None:
            return "the fastest that fits, by the plan"
        words = self.words(candidate, best.candidate)
        why = f"{words}: {self._expect_gain(candidate):+.0%} expected"
        peak = self.peak(candidate)
        if peak is None or not self.room:
            return why
        return f"{why}, {peak:.0f} of {self.room:.0f} GiB"

    def summary(self) -> dict[str, int]:
        peaks = [candidate.peak or 0.0 for candidate in self.grid.values()]
        too_large = sum(peak > self.limit for peak in peaks)
        return {"settings": len(self.grid), "too_large": too_large}


def _describe_settings(candidate: Candidate, names: Iterable[str]) -> str:
    """The values of these levers, as text."""
    return ", ".join(describe_setting(name, candidate.settings[name]) for name in names)


def _find_next_sizes(best: Candidate, around: Iterable[Candidate]) -> list[Candidate]:
    """Those with the next smaller and the next larger micro-batch."""
    by_rows = sorted(around, key=lambda candidate: candidate.rows)
    smaller = [candidate for candidate in by_rows if candidate.rows < best.rows]
    larger = by_rows[len(smaller) :]
    return [*smaller[-1:], *larger[:1]]


def _needs_less(candidate: Candidate, full: Candidate) -> bool:
    """Whether the plan says less memory for a candidate than for one that ran out of it."""
    if candidate.peak is None:
        return candidate.rows < full.rows
    return not full.peak or candidate.peak < full.peak


def _scale_peak(runs: SettingRuns | Trial) -> float | None:
    """The peak of the whole run in GiB, by what a trial measured; None if nobody can tell."""
    whole = runs.candidate.peak
    short = runs.candidate.short
    if not whole or not short or runs.peak is None:
        return None
    return whole * runs.peak / short
