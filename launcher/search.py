"""Which setting to try next, and when to stop: the plan's estimates, corrected by what trials measured.

One greedy pass: the file as written, the fastest setting that fits by the plan, then one lever of the best
at a time, the most promising first; each value of a lever is tried once. What is left of the budget goes into
more runs of the best and of the file. Nothing here starts, reads or waits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launcher import footprint, levers, memory, shapes, throughput
from launcher.cards import Card
from launcher.comparison import Sample, Spread
from launcher.errors import InvalidConfig
from launcher.footprint import Footprint
from launcher.lengths import Lengths
from launcher.levers import ORDER, Setting, Settings, Space, described
from launcher.phases import usable
from launcher.shapes import Shape

THRESHOLD = 0.005
"""The search ends where nothing that is left could gain more than this share."""
RUNS = 3
"""How often the best and the file are run, where the budget allows."""
SAME = 0.01
"""Speeds that differ by less are taken for the same: then fewer changes are better."""
SLOWEST = 2.5
"""How many times as long as the best a trial may take before it is ended."""
START_S = 60.0
"""Seconds that a start takes, before one was measured."""

_DOUBT: Mapping[str, float] = {
    "attention": 0.15, "packing": 0.2, "liger": 0.15, "per_device": 0.08, "checkpointing": 0.08,
    "deepspeed": 0.1, "optimizer": 0.03, "compile": 0.1,
}  # fmt: skip
"""By what share a change of a lever may gain more than the plan says."""
_RISKY = ("optimizer", "compile")
"""Levers that are only turned alone: the plan knows least of them, or they may fail."""
_FULL = 0.6
_PATIENCE = 1.5

Status = Literal[
    "ok", "oom", "crash", "hang", "diverged", "contract", "unproven", "loss changed", "timeout",
    "refused", "no speed",
]  # fmt: skip
"""The outcome of a trial; only `ok` counts. `contract` was disproved, `unproven` neither way."""
_NO_SAMPLE = Sample(variant="")

Item = tuple[str, Setting]
"""A lever with its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The plan's estimate for one setting: peak in GiB (None: unknown), and a step's seconds and real tokens.

    `peak` is that of the whole run, which meets longer rows than a trial of a few steps; `short` is the
    trial's, with which the measured peak is compared.
    """

    peak: float | None
    seconds: float
    tokens: float
    short: float | None = None

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting with its estimate; `purpose` says what a trial of it is for, `why` in words."""

    settings: Settings
    expected: Expected
    purpose: str = "search"
    why: str = ""

    @property
    def key(self) -> tuple[Item, ...]:
        """The setting as a value that compares."""
        return tuple((name, self.settings[name]) for name in ORDER if name in self.settings)

    @property
    def rows(self) -> int:
        """Rows a device."""
        return int(self.settings.get("per_device", 1))

    def differing(self, other: Candidate) -> list[str]:
        """The levers that have another value there."""
        return [name for name in ORDER if self.settings.get(name) != other.settings.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The outcome of a trial. `speed` is in tokens a second and GPU, `step` in seconds, `peak` in GiB.

    `seconds` is wall time with the start. `blamed` are the levers that a verdict names. `loss_change` is
    against the file as written, as a share. `cut`: the budget ended it, which says nothing of the setting.
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
    """A candidate that was tried, its run, and what was learned from it, in one line."""

    candidate: Candidate
    measured: Measured
    learned: str = ""
    sample: Sample = _NO_SAMPLE

    @property
    def ok(self) -> bool:
        """Whether it may be proposed."""
        return self.measured.status == "ok" and bool(self.measured.speed)

    @property
    def counts(self) -> bool:
        """Whether its end says something about the setting: the budget's end and a refusal do not."""
        return not self.measured.cut and self.measured.status != "refused"

    @property
    def speed(self) -> float:
        """Tokens a second and GPU; 0 where none was measured."""
        return self.measured.speed or 0.0


def together(runs: Sequence[Trial]) -> Trial:
    """The runs of a setting as one trial: medians, and the largest peak; a failed one decides for all."""
    counted = [run for run in runs if run.counts]
    failed = [run for run in counted if not run.ok]
    if failed or not counted:
        return replace(runs[0], measured=(failed or runs)[-1].measured)
    steps = [run.measured.step for run in counted if run.measured.step]
    peaks = [run.measured.peak for run in counted if run.measured.peak is not None]
    measured = replace(
        counted[-1].measured, speed=statistics.median(run.speed for run in counted),
        step=statistics.median(steps) if steps else None, peak=max(peaks, default=None),
    )  # fmt: skip
    return replace(runs[0], measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The basis of estimates: the levers, the model's shape, the rows, the card; a trial's `steps`."""

    space: Space
    shape: Shape | None
    rows: Lengths
    card: Card
    steps: int
    attention: str | None = None

    def grid(self) -> Iterator[Candidate]:
        """Every setting that can be planned, the file's own among them."""
        for settings in self.space.settings():
            if (expected := self.expected(settings)) is not None:
                yield Candidate(settings=settings, expected=expected)

    def candidate(self, settings: Settings) -> Candidate:
        """One setting, whether it can be planned or not."""
        expected = self.expected(settings) or Expected(peak=None, seconds=1.0, tokens=1.0)
        return Candidate(settings=settings, expected=expected)

    def base(self) -> Candidate:
        """The file as it is written."""
        return self.candidate(self.space.base)

    def expected(self, settings: Settings) -> Expected | None:
        """The peak and the pace; None where these settings cannot be planned.

        Without a shape the peak is unknown, and the pace is that of some other model.
        """
        try:
            whole = self.footprint(settings)
        except InvalidConfig:
            return None
        short = replace(whole, plan=replace(whole.plan, steps=self.steps))
        return Expected(
            peak=self._peak(whole), short=self._peak(short),
            seconds=throughput.step_seconds(whole, self.card), tokens=whole.tokens.real,
        )  # fmt: skip

    def footprint(self, settings: Settings) -> Footprint:
        """What speed and memory follow from. Raises InvalidConfig where it cannot be planned."""
        plan = levers.planned(self.space, settings)
        asked = None if "attention" in settings else self.attention
        return Footprint(
            plan=plan, shape=self.shape or shapes.find("Qwen/Qwen2.5-1.5B", {}),
            rows=footprint.rows_of(plan, self.rows), attention=footprint.attention_of(plan, asked),
        )  # fmt: skip

    def _peak(self, found: Footprint) -> float | None:
        if self.shape is None:
            return None
        try:
            return memory.estimate(found.setup()).on(self.card.gib).peak
        except InvalidConfig:
            return None


class Search:
    """Proposes candidates of a grid and learns from their trials.

    `base` is the file as written, `room` the card's memory in GiB where it is known. `runs` are all trials
    as they came, `trials` one for each setting over all its runs; `stopped` says why nothing follows.
    """

    def __init__(
        self, grid: Iterable[Candidate], base: Candidate, *, steps: int, room: float | None = None,
        repeats: int = RUNS, threshold: float = THRESHOLD, start_s: float = START_S,
    ) -> None:  # fmt: skip
        self.base, self.steps, self.room = base, steps, room
        self.repeats, self.threshold, self.start_s = repeats, threshold, start_s
        self.grid = {one.key: one for one in (base, *grid)}
        self.runs: list[Trial] = []
        self.trials: list[Trial] = []
        self.guilty: list[frozenset[Item]] = []
        """Values that fail wherever all of a set are together."""
        self.passed: set[Item] = set()
        """Values that had their trial in the greedy pass."""
        self.stopped: str | None = None

    # --- what was measured ---

    def runs_of(self, candidate: Candidate) -> list[Trial]:
        """The trials of one setting, as they came."""
        return [run for run in self.runs if run.candidate.key == candidate.key]

    def differing(self, candidate: Candidate) -> list[str]:
        """The levers that are not as in the file."""
        return candidate.differing(self.base)

    @property
    def good(self) -> list[Trial]:
        """All that may be proposed, fastest first; of those as fast, the one with the fewest changes."""
        left = [one for one in self.trials if one.ok and self.fits(one.candidate, one.measured)]
        ranked: list[Trial] = []
        while left:
            top = max(one.speed for one in left)
            near = [one for one in left if one.speed >= top * (1 - SAME)]
            ranked.append(
                min(near, key=lambda one: (len(self.differing(one.candidate)), -one.speed))
            )
            left.remove(ranked[-1])
        return ranked

    @property
    def best(self) -> Trial | None:
        """The first of `good`."""
        return next(iter(self.good), None)

    @property
    def first(self) -> Trial | None:
        """The file as written, where it was tried."""
        runs = self.runs_of(self.base)
        return together(runs) if runs else None

    def speeds(self, candidate: Candidate) -> Spread:
        """Tokens a second and GPU of all runs of a setting that passed; there has to be one."""
        spread = Spread.of(run.measured.speed for run in self.runs_of(candidate) if run.ok)
        assert spread is not None
        return spread

    # --- memory ---

    @property
    def limit(self) -> float:
        """GiB that may be planned for."""
        return math.inf if self.room is None else usable(self.room)

    def fits(self, candidate: Candidate, measured: Measured) -> bool:
        """Whether the whole run should fit, which meets longer rows than the trial that did.

        The file as written is the author's own: that it fits a trial is enough.
        """
        whole = self._whole(candidate, measured) or 0
        return candidate.key == self.base.key or whole <= self.limit

    def _whole(self, candidate: Candidate, measured: Measured) -> float | None:
        expected = candidate.expected
        if not expected.peak or not expected.short or measured.peak is None:
            return None
        return expected.peak * measured.peak / expected.short

    def peak(self, candidate: Candidate) -> float | None:
        """The estimate in GiB, corrected by measured peaks: of its kind, else of any."""
        if candidate.expected.peak is None:
            return None
        alike, others = list[float](), [1.0]
        for one in self.trials:
            estimate, peak = one.candidate.expected.short, one.measured.peak
            if one.measured.status == "oom":
                # it wanted more than there is, whatever was counted when it failed
                peak = self.room
            if not estimate or not peak or not (one.ok or one.measured.status == "oom"):
                continue
            ratio = peak / estimate
            others.append(ratio)
            if _kind(one.candidate) == _kind(candidate):
                # a run that left most of the card empty says little of one that fills it
                full = self.room is not None and estimate >= _FULL * self.room
                alike.append(ratio if ratio >= 1 or full else (1 + ratio) / 2)
        return candidate.expected.peak * max(alike or others)

    def eligible(self, candidate: Candidate) -> bool:
        """Whether nothing that was learned speaks against it."""
        if any(bad <= set(candidate.key) for bad in self.guilty):
            return False
        full = [run.candidate for run in self.runs if run.measured.status == "oom"]
        peak, estimate = self.peak(candidate), candidate.expected.peak
        if peak is not None and estimate is not None:
            least = min((one.expected.peak for one in full if one.expected.peak), default=math.inf)
            return estimate < least and peak <= self.limit
        # without an estimate: fewer rows than what failed, at most twice those that fitted
        fitted = [run.candidate.rows for run in self.runs if run.ok]
        least = min((one.rows for one in full), default=math.inf)
        return candidate.rows < least and candidate.rows <= 2 * max(fitted, default=candidate.rows)

    # --- time ---

    def predicted(self, candidate: Candidate) -> float:
        """Tokens a second and GPU: as much faster than the best as the plan says."""
        best = self.best
        scale = best.speed / best.candidate.expected.speed if best else 1.0
        return candidate.expected.speed * scale

    def _step_seconds(self, candidate: Candidate) -> float:
        best = self.best
        if best is None or best.measured.step is None:
            return candidate.expected.seconds
        return best.measured.step * candidate.expected.seconds / best.candidate.expected.seconds

    def _start(self) -> float:
        done = [run.measured for run in self.runs if run.ok]
        starts = [one.seconds - self.steps * one.step for one in done if one.step]
        # the first one fills caches that the others find
        return max(0.0, statistics.median(starts[1:] or starts)) if starts else self.start_s

    def trial_seconds(self, candidate: Candidate) -> float:
        """Wall time of a trial, learned from those before."""
        own = [run.measured.seconds for run in self.runs_of(candidate) if run.ok]
        if self.runs and self.runs[0].candidate.key == candidate.key:
            own = own[1:]
        return max(own, default=self._start() + self.steps * self._step_seconds(candidate))

    def timeout(self, candidate: Candidate, left: float) -> float:
        """Seconds after which a trial is ended: it hangs, or is too slow to be the best."""
        best = self.best
        if best is None or best.measured.step is None:
            return left
        same = best.measured.step * candidate.expected.tokens / best.candidate.expected.tokens
        step = max(SLOWEST * same, _PATIENCE * self._step_seconds(candidate))
        return min(left, _PATIENCE * self._start() + self.steps * step + 30)

    # --- the next one ---

    def propose(self, left: float = math.inf) -> Candidate | None:
        """The next candidate, None at the end: `stopped` says why. `left` are seconds of the budget."""
        if not self.runs and (self.base.expected.peak or 0) <= (self.room or math.inf):
            if left > 0:
                return replace(self.base, purpose="baseline", why="the file as it is written")
            self.stopped = "the budget: not even one trial fits into it"
            return None
        if (fault := self._fault()) is not None:
            self.stopped = fault
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
                f"{self.trial_seconds(worth[0]):.0f} s and {seconds}: a larger --budget goes on here"
            )
        elif ranked:
            self.stopped = f"what is left could gain {max(0.0, ranked[0][0]):.1%} at most"
        else:
            self.stopped = "nothing is left that fits and was not tried"
        if (due := self._again(math.inf)) is not None:
            self.stopped += f"; {due.why} takes about {self.trial_seconds(due):.0f} s, {seconds}"
        return None

    def _fault(self) -> str | None:
        """Why there is nothing to compare with: even the file as written did not come to its end."""
        first = self.first
        if first is None or first.measured.status in ("ok", "oom") or self.best is not None:
            return None
        if first.measured.cut:
            return (
                "the budget: the file as written did not end within it (a larger --budget goes on)"
            )
        if first.measured.blamed or first.measured.status == "timeout":
            return None
        status, reason = first.measured.status, first.measured.reason
        return f"nothing can be compared with the file as written ({status}): {reason}"

    def ranked(self) -> list[tuple[float, Candidate]]:
        """What may be tried next, with the share that it could gain at most; the most first."""
        best = self.best
        fresh = [one for one in self.grid.values() if self.eligible(one) and not self.runs_of(one)]
        leaps = (one for one in self.trials if one.candidate.key != self.base.key)
        if best is None or all(one.measured.status in ("oom", "refused") for one in leaps):
            # the fastest by the plan, until one runs
            sure = [one for one in fresh if not set(self.differing(one)) & set(_RISKY)]
            sure.sort(key=lambda one: (-one.expected.speed, len(self.differing(one))))
            gains = [(self.predicted(one) / best.speed - 1 if best else 1.0, one) for one in sure]
            if gains and gains[0][0] >= self.threshold:
                return gains
        if best is None:
            return []
        near = [
            (self.predicted(one) / best.speed - 1 + _DOUBT[name], one)
            for name, one in self._neighbours(best.candidate, fresh)
        ]
        return sorted(near, key=lambda pair: (-round(pair[0], 4), len(self.differing(pair[1]))))

    def _neighbours(
        self, best: Candidate, fresh: Sequence[Candidate]
    ) -> Iterator[tuple[str, Candidate]]:
        """For each value of a lever that had no trial, the fastest in micro-batches that fit."""
        for name in ORDER:
            around = [one for one in fresh if _only(one, best, name)]
            if name == "per_device":
                # the next larger and the next smaller size
                around.sort(key=lambda one: one.rows)
                below = sum(one.rows < best.rows for one in around)
                yield from ((name, one) for one in around[max(0, below - 1) : below + 1])
                continue
            for value in dict.fromkeys(one.settings.get(name) for one in around):
                if (name, value) not in self.passed:
                    alike = [one for one in around if one.settings.get(name) == value]
                    if best.expected.peak is None:
                        # nobody knows whether more rows fit: they are tried by themselves
                        alike = [one for one in alike if len(one.differing(best)) == 1] or alike
                    yield name, max(alike, key=lambda one: one.expected.speed)

    def _contenders(self) -> list[Trial]:
        """The fastest beside the file, and the file itself, in the order of their first trials."""
        others = [one for one in self.good if one.candidate.key != self.base.key][:1]
        keys = [one.candidate.key for one in others]
        if others and self.first is not None and self.first.ok:
            keys.append(self.base.key)
        return [one for one in self.trials if one.candidate.key in keys]

    def _again(self, left: float) -> Candidate | None:
        """The contender whose turn it is, until each was run often enough: A B, B A, A B."""
        counts = [(len(self.runs_of(one.candidate)), one) for one in self._contenders()]
        fewest = min((count for count, _ in counts), default=self.repeats)
        turns = [one for count, one in counts if count == fewest < self.repeats]
        for one in turns[::-1] if fewest % 2 else turns:
            if self.trial_seconds(one.candidate) <= left:
                words = self.words(one.candidate, self.base) or "the file as it is written"
                why = f"{words} once more: run {fewest + 1}"
                return replace(one.candidate, purpose="repeat", why=why)
        return None

    # --- learning ---

    def learn(self, candidate: Candidate, measured: Measured, sample: Sample = _NO_SAMPLE) -> Trial:
        """Take in the outcome of a trial; returns it with what was learned, in one line.

        Of a setting that was tried before it is one more run, which has to pass as the others.
        """
        before, earlier = self.best, self.runs_of(candidate)
        if before is not None and candidate.purpose == "search":
            changed = [
                name for name in candidate.differing(before.candidate) if name != "per_device"
            ]
            if len(changed) == 1 and measured.status not in ("refused", "oom") and not measured.cut:
                self.passed.add((changed[0], candidate.settings[changed[0]]))
        learned = self._learned(candidate, measured, before, earlier)
        trial = Trial(candidate=candidate, measured=measured, learned=learned, sample=sample)
        self.runs.append(trial)
        keys = dict.fromkeys(run.candidate.key for run in self.runs)
        self.trials = [together([r for r in self.runs if r.candidate.key == key]) for key in keys]
        return trial

    def _learned(
        self, candidate: Candidate, measured: Measured, before: Trial | None, earlier: Sequence[Trial]
    ) -> str:  # fmt: skip
        status, speed = measured.status, measured.speed
        failure = f"{status}: {measured.reason or 'no reason given'}"
        if measured.cut:
            return "the budget was used up before it ended"
        if status == "oom":
            return "out of memory: nothing that needs at least as much is tried"
        if earlier and (status != "ok" or not speed):
            kept = status == "refused"
            return failure if kept else f"{failure}; no longer kept: every run has to pass"
        if earlier:
            return f"now {Spread.of([speed, *(run.speed for run in earlier if run.ok)])}"
        if status == "timeout" and before:
            return f"ended: less than 1/{SLOWEST:g} of the best speed"
        if status != "ok" or not speed:
            return failure + self._blame(candidate, measured)
        parts = [f"{speed / before.speed - 1:+.1%} against the best before"] if before else []
        if measured.peak is not None and candidate.expected.short:
            parts.append(f"{measured.peak:.1f} GiB, {candidate.expected.short:.1f} estimated")
        if not self.fits(candidate, measured):
            whole = self._whole(candidate, measured)
            parts.append(
                f"not kept: with its longest rows the run needs {whole:.0f} of {self.room:.0f} GiB"
            )
        elif before is not None:
            parts.append("kept" if speed > before.speed else "not kept")
        return "; ".join(parts) or "the others are compared with it"

    def _blame(self, candidate: Candidate, measured: Measured) -> str:
        """Which values must not come together again: those that a verdict names, else all that is new."""
        if measured.status == "timeout":
            return ""
        names = list(measured.blamed)
        for name in names:
            items = {(name, candidate.settings[name])}
            if name == "packing" and "attention" in candidate.settings:
                # packing leaks under one attention, not under another
                items.add(("attention", candidate.settings["attention"]))
            self.guilty.append(frozenset(items))
        if not names:
            proved = [one.candidate for one in self.trials if one.ok] or [self.base]
            nearest = min(proved, key=lambda one: len(candidate.differing(one)))
            names = [name for name in candidate.differing(nearest) if name in candidate.settings]
            if len(names) > 1 and len(set(names) - {"per_device"}) == 1:
                # a micro-batch that fits comes with a lever
                names.remove("per_device")
            if names:
                self.guilty.append(frozenset((name, candidate.settings[name]) for name in names))
        words = ", ".join(described(name, candidate.settings[name]) for name in names)
        return f"; {words}: not tried again{' together' * (len(names) > 1)}" if names else ""

    # --- words ---

    def words(self, one: Candidate, other: Candidate) -> str:
        """What one setting changes of another."""
        changed = [name for name in one.differing(other) if name in one.settings]
        return ", ".join(described(name, one.settings[name]) for name in changed)

    def _why(self, candidate: Candidate) -> str:
        best = self.best
        if best is None:
            return "the fastest that fits, by the plan"
        gain = self.predicted(candidate) / best.speed - 1
        why = f"{self.words(candidate, best.candidate)}: {gain:+.0%} expected"
        peak = self.peak(candidate)
        return why if peak is None or not self.room else f"{why}, {peak:.0f} of {self.room:.0f} GiB"

    def summary(self) -> dict[str, Any]:
        """How large the grid is, and how much of it the plan and the trials have ruled out."""
        grid = self.grid.values()
        return {
            "settings": len(self.grid),
            "too_large": sum(1 for one in grid if (one.expected.peak or 0.0) > self.limit),
            "tried": len(self.trials),
            "left": sum(1 for one in grid if self.eligible(one) and not self.runs_of(one)),
        }  # fmt: skip


def _only(one: Candidate, other: Candidate, name: str) -> bool:
    """Whether one differs from the other in this lever, and at most in the micro-batch beside."""
    changed = one.differing(other)
    return name in changed and set(changed) <= {name, "per_device"}


def _kind(candidate: Candidate) -> tuple[Setting | None, ...]:
    """The levers that decide which of memory's moments is the peak."""
    return tuple(candidate.settings.get(name) for name in ("checkpointing", "packing", "liger"))
