"""One search for the fastest setting: what it is about, every trial of it, and what they come to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import campaign, comparison, levers, rundir
from launcher.bench import Bench
from launcher.candidates import Candidate, Expected, Measured, Trial
from launcher.comparison import Row, Sample, Spread, Variant
from launcher.errors import Finding
from launcher.lengths import Lengths
from launcher.levers import Here, Space
from launcher.outlook import Outlook
from launcher.plan import Plan
from launcher.preparation import Request
from launcher.proposal import Gain
from launcher.search import Search
from launcher.shapes import Shape
from launcher.throughput import Card

TUNE_VERSION = 1
FILE = "tune.json"
STOPPING_S = 15.0
"""What ending a trial may take after its time is up: INT, TERM, KILL."""
_START_S = {"gpu": 60.0, "cpu": 20.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the command line says beside the stage file. `gpu_memory` in GiB, `budget_s` in seconds."""

    budget_s: float = 600.0
    steps: int = 8
    row_tokens: str | None = None
    gpu_memory: float | None = None
    tolerance: float = comparison.TOLERANCE
    output: Path | None = None
    fresh: bool = False
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One trial as it is written down: the candidate, its sample, what was made of it, and its cost."""

    trial: Trial
    sample: Sample
    seconds: float

    def as_json(self, space: Space) -> dict[str, Any]:
        """For the record; `learned_again` reads it."""
        candidate, measured = self.trial.candidate, self.trial.measured
        expected = candidate.expected
        return {
            "name": self.sample.variant, "purpose": candidate.purpose, "why": candidate.why,
            "settings": dict(candidate.settings),
            "overrides": list(levers.overrides(space, candidate.settings)),
            "expected": {
                "peak_gib": _rounded(expected.peak, 2), "trial_peak_gib": _rounded(expected.short, 2),
                "seconds_per_step": expected.seconds, "tokens_per_step": expected.tokens,
            },
            "status": measured.status, "reason": measured.reason, "blamed": list(measured.blamed),
            "cut": measured.cut,
            "tokens_per_second_per_gpu": measured.speed, "seconds_per_step": measured.step,
            "peak_allocated_gib": measured.peak, "loss_change": measured.loss_change,
            "learned": self.trial.learned, "seconds": round(self.seconds, 1),
            "sample": self.sample.as_json(),
        }  # fmt: skip

    @classmethod
    def learned_again(cls, data: Mapping[str, Any], search: Search) -> Entry:
        """What `as_json` wrote. Raises KeyError, TypeError or ValueError where it did not."""
        told = data["expected"]
        expected = Expected(
            peak=told["peak_gib"], short=told["trial_peak_gib"],
            seconds=float(told["seconds_per_step"]), tokens=float(told["tokens_per_step"]),
        )  # fmt: skip
        named = Candidate(settings={**search.base.settings, **data["settings"]}, expected=expected)
        if set(named.settings) != set(search.base.settings):
            raise ValueError("other levers")
        # the grid's own says the same, more precisely
        known = search.grid.get(named.key, named)
        candidate = replace(known, purpose=str(data["purpose"]), why=str(data["why"]))
        measured = Measured(
            status=data["status"], speed=data["tokens_per_second_per_gpu"],
            step=data["seconds_per_step"], peak=data["peak_allocated_gib"],
            seconds=float(data["seconds"]), loss_change=data["loss_change"],
            blamed=tuple(data["blamed"]), reason=data["reason"], cut=bool(data.get("cut")),
        )  # fmt: skip
        sample = Sample.from_json(data["sample"])
        return cls(trial=search.learn(candidate, measured), sample=sample, seconds=measured.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A trial that is under way: when it began, in seconds since the epoch, and how long it may take."""

    began: float
    limit_s: float

    def as_json(self) -> dict[str, float]:
        """For the record."""
        return {"began": self.began, "limit_s": self.limit_s}

    def lost(self, folder: Path) -> float:
        """Seconds that it took, where its command was killed and its run is over: at most what it had."""
        run = next(rundir.newest_first(folder), None)
        with contextlib.suppress(OSError):
            if run is not None and run.manifest.stat().st_mtime >= self.began:
                return min(self.limit_s, max(0.0, run.exit(1).stat().st_mtime - self.began))
        return 0.0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@dataclass(slots=True, kw_only=True)
class Tuning:
    """One search on one machine: what it is about, and what is known so far.

    `key` names settings, contents and machine: another key is another search. `assumed` says that row
    lengths are not known and the first trial has to tell them. `cut_s` are seconds of trials that are no
    entries: interrupted, killed with the command, refused, or ended by an earlier budget and to be run
    again.
    """

    request: Request
    terms: Terms
    plan: Plan
    here: Here
    card: Card
    shape: Shape | None
    rows: Lengths
    attention: str
    assumed: bool
    key: str
    search: Search = field(init=False)
    space: Space = field(init=False)
    folder: Path = Path()
    entries: list[Entry] = field(default_factory=list)
    cut_s: float = 0.0
    under_way: Begun | None = None
    state: str = "running"
    findings: tuple[Finding, ...] = ()
    place: Path | None = None

    def __post_init__(self) -> None:
        self._look_out()

    def _look_out(self) -> None:
        """The grid with its expectations, from what is known of the rows now."""
        known = None if self.assumed else self.rows
        self.space = levers.of_plan(self.plan, self.here, known)
        outlook = Outlook(
            space=self.space, shape=self.shape, rows=self.rows, card=self.card,
            attention=self.attention, steps=self.terms.steps,
        )  # fmt: skip
        self.search = Search(
            outlook.grid(), outlook.base(), steps=self.terms.steps, room=self.card.gib,
            masked=not self.attention.startswith("flash"),
            start_s=_START_S["cpu" if self.here.cpu else "gpu"],
        )  # fmt: skip

    @property
    def used(self) -> float:
        """Seconds of the budget that are gone, those of earlier starts included."""
        return self.cut_s + sum(entry.seconds for entry in self.entries)

    def seen(self, rows: Lengths) -> None:
        """Take in how long rows are: the grid is looked at anew, what was learned is learned again."""
        self.rows, self.assumed = rows, False
        self._look_out()
        again = []
        for entry in self.entries:
            old = entry.trial.candidate
            # a lever that needs to know the rows (TRL's packing) was as the file has it
            old = replace(old, settings={**self.space.base, **old.settings})
            now = self.search.grid.get(old.key, old)
            candidate = replace(now, purpose=old.purpose, why=old.why)
            again.append(replace(entry, trial=self.search.learn(candidate, entry.trial.measured)))
        self.entries = again

    def take_up(self, told: Mapping[str, Any]) -> None:
        """What an earlier start has learned, by its record; one that cannot be read is none.

        Nothing of it may be running any more: a trial that was killed with its command is paid for here.
        """
        rows = told.get("rows") or {}
        try:
            if self.assumed and rows and not rows["assumed"]:
                known = Lengths(mean=rows["mean"], longest=rows["longest"], source=rows["source"])
                self.seen(known)
            self.cut_s = float(told.get("cut_s") or 0.0)
            if told.get("under_way"):
                self.cut_s += Begun(**told["under_way"]).lost(self.folder)
            trials = told.get("trials") or ()
            used = self.cut_s + sum(float(one["seconds"]) for one in trials)
            for one in trials:
                # with more time than it had it can come to its end now
                longer = self.terms.budget_s - used - STOPPING_S > one["seconds"]
                if one["status"] == "refused" or (one.get("cut") and longer):
                    self.cut_s += float(one["seconds"])
                else:
                    self.entries.append(Entry.learned_again(one, self.search))
        except (AttributeError, KeyError, TypeError, ValueError):
            self.entries.clear()
            self.cut_s = 0.0
            self._look_out()

    def runs_of(self, candidate: Candidate) -> list[Entry]:
        """All of one setting, but for later ones that did not end for a reason that is not the setting's."""
        runs = [one for one in self.entries if one.trial.candidate.key == candidate.key]
        return runs[:1] + [one for one in runs[1:] if one.trial.counts]

    @property
    def chosen(self) -> Trial | None:
        """The best that the judge of `launch bench` calls faster than the file as written; else that file.

        Where that file does not pass every time, the best.
        """
        good = self.search.results.good
        for one in good:
            row = self.row(one)
            if row is None or row.standing in ("baseline", "faster"):
                return one
        return next(iter(good), None)

    def row(self, trial: Trial) -> Row | None:
        """A setting beside the file as written, by all runs of both; None where that was not measured."""
        first = self.runs_of(self.search.base)
        if not any(one.trial.ok for one in first):
            return None
        runs = [*first, *self.runs_of(trial.candidate)]
        return comparison.compare([one.sample for one in runs], self.terms.tolerance)[-1]

    def bench(self) -> Bench:
        """The trials as a comparison, for its table and its page."""
        request = replace(self.request, stage=self.plan.stage.options.stage, gpus=self.plan.gpus)
        runs = [self.runs_of(one.candidate) for one in self.search.results.trials]
        chosen = self.chosen
        return Bench(
            request=request, variants=tuple(Variant(own[0].sample.variant) for own in runs),
            steps=self.terms.steps, repeats=self.search.repeats, tolerance=self.terms.tolerance,
            key=self.key, batch=self.plan.global_batch, folder=self.folder,
            samples=[one.sample for own in runs for one in own],
            proposed=None if chosen is None else self.runs_of(chosen.candidate)[0].sample.variant,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The record, and the data of `--format json`."""
        best = self.chosen
        return {
            "tune_version": TUNE_VERSION, "key": self.key, "config": str(self.request.config),
            "overrides": list(self.request.overrides), "gpus": self.plan.gpus,
            "steps": self.terms.steps, "budget_s": self.terms.budget_s, "used_s": round(self.used, 1),
            "cut_s": round(self.cut_s, 1),
            "under_way": None if self.under_way is None else self.under_way.as_json(),
            "tolerance": self.terms.tolerance, "state": self.state, "stopped": self.search.stopped,
            "card": {"name": self.card.name, "gib": self.card.gib},
            "rows": {"mean": self.rows.mean, "longest": self.rows.longest, "source": self.rows.source,
                     "assumed": self.assumed},
            "attention": self.attention, "shape": None if self.shape is None else self.shape.source,
            **self.space.as_json(), "grid": self.search.summary(),
            "trials": [entry.as_json(self.space) for entry in self.entries],
            "best": None if best is None else self._best_json(best),
            "proposal": None if self.place is None else str(self.place),
            "bench": [row.as_json() for row in self.bench().rows] if self.entries else [],
            "folder": str(self.folder),
        }  # fmt: skip

    def _best_json(self, best: Trial) -> dict[str, Any]:
        first, row = self.search.results.first, self.row(best)
        # the file as written is itself what others are held to
        ratio = None if row is None else row.speed_ratio or 1.0
        base = None if row is None or first is None else self.search.results.speeds(first).as_json()
        return {
            "settings": dict(best.candidate.settings),
            "changes": levers.changes(self.space, best.candidate.settings),
            "tokens_per_second_per_gpu": best.measured.speed,
            "spread": self.search.results.speeds(best).as_json(), "spread_as_written": base,
            "speed_ratio": _rounded(ratio, 4), "loss_change": loss_change(best, row),
            "peak_allocated_gib": best.measured.peak, "withheld": self.withheld(),
            "gains": [gain.as_json() for gain in self.gains()],
        }  # fmt: skip

    def write(self) -> None:
        """The record, whole or not at all. Raises NotReady where it cannot be written."""
        campaign.write(self.folder / FILE, self.as_json())

    def gains(self) -> list[Gain]:
        """What each change of the best setting gains, in the order of the levers."""
        best, told = self.chosen, []
        if best is None:
            return []
        for name in self.search.results.differing(best.candidate):
            found = self.search.attribution.gain(best, name)
            beside = None
            if found is not None and name != "per_device":
                other = found[1].candidate.settings.get("per_device")
                own = best.candidate.settings.get("per_device")
                if other is not None and own is not None and other != own:
                    beside = f"{levers.described('per_device', own)} instead of {other}"
            told.append(
                Gain(
                    lever=name, before=self.search.base.settings.get(name),
                    after=best.candidate.settings[name], share=None if found is None else found[0],
                    beside=beside,
                )
            )  # fmt: skip
        return told

    def withheld(self) -> str | None:
        """Why the fastest setting is not what is proposed; None where it is."""
        best, first = self.search.results.best, self.search.results.first
        row = None if best is None else self.row(best)
        if best is None or best is self.chosen or row is None or first is None:
            return None
        changed = self.search.results.differing(best.candidate)
        words = ", ".join(levers.described(name, best.candidate.settings[name]) for name in changed)
        speeds = [spoken(self.search.results.speeds(one)) for one in (best, first)]
        told = f"not proposed: {words}: {speeds[0]} tokens/s per GPU against {speeds[1]} as written"
        # medians may differ by much where one run of the other lies among these
        word = "not told apart" if row.standing == "no difference" else row.standing
        return f"{told}: {word}" + (f" ({row.why})" if row.why else "")


def loss_change(best: Trial, row: Row | None) -> float | None:
    """By all runs of both, where the file as written was measured."""
    return best.measured.loss_change if row is None else row.loss_change or 0.0


def spoken(speeds: Spread) -> str:
    """`median (least – most, n runs)`."""
    if speeds.n == 1:
        return f"{speeds.median:,.0f} (one run)"
    return f"{speeds.median:,.0f} ({speeds.min:,.0f} – {speeds.max:,.0f}, {speeds.n} runs)"
