"""`launch tune`: short real runs of a stage until the fastest setting is found that trains the same.

`search` proposes and learns, `measurement` measures; here are the budget, the record, and what a verdict
means for a setting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import (
    bench_plan,
    campaign,
    comparison,
    devices,
    footprint,
    forecast,
    levers,
    measurement,
    plan,
    preparation,
    proposal,
    rundir,
    throughput,
    trial,
)  # fmt: skip
from launcher.bench import Bench
from launcher.campaign import Campaign
from launcher.comparison import SPEED, Row, Sample, Spread, Variant
from launcher.devices import Devices
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, errors, usage
from launcher.footprint import ATTENTIONS
from launcher.lengths import Lengths
from launcher.levers import Here, Space
from launcher.plan import Plan
from launcher.preparation import Asked, Request
from launcher.proposal import Gain, Proposal
from launcher.search import Candidate, Expected, Measured, Outlook, Search, Status, Trial
from launcher.shapes import Shape
from launcher.throughput import Card

TUNE_VERSION = 1
FILE = "tune.json"
TUNED = "tuned.yaml"
AS_WRITTEN = "as written"
STOPPING_S = 15.0
"""What ending a trial may take after its time is up: INT, TERM, KILL."""
_START_S = {"gpu": 60.0, "cpu": 20.0}
_POINTS = ("liger", "packing", "attention", "batch", "loss", "memory")
"""Points of the verdict that a setting has to prove; the others are not about settings."""
_CAUSES: Mapping[str, Status] = {
    "oom": "oom", "diverged": "diverged", "hang": "hang", "timeout": "timeout", "crash": "crash",
    "contract": "contract", "refused": "refused",
}  # fmt: skip


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


def killed_seconds(folder: Path, began: float, limit_s: float) -> float:
    """What a trial took whose command was killed and whose run is over: at most what it had.

    `began` is in seconds since the epoch.
    """
    run = next(rundir.newest_first(folder), None)
    with contextlib.suppress(OSError):
        if run is not None and run.manifest.stat().st_mtime >= began:
            return min(limit_s, max(0.0, run.exit(1).stat().st_mtime - began))
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
    under_way: Mapping[str, float] | None = None
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
                self.cut_s += killed_seconds(self.folder, **told["under_way"])
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
        good = self.search.good
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
        runs = [self.runs_of(one.candidate) for one in self.search.trials]
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
            "under_way": self.under_way,
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
        first, row = self.search.first, self.row(best)
        # the file as written is itself what others are held to
        ratio = None if row is None else row.speed_ratio or 1.0
        base = (
            None if row is None or first is None else self.search.speeds(first.candidate).as_json()
        )
        return {
            "settings": dict(best.candidate.settings),
            "changes": levers.changes(self.space, best.candidate.settings),
            "tokens_per_second_per_gpu": best.measured.speed,
            "spread": self.search.speeds(best.candidate).as_json(), "spread_as_written": base,
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
        for name in self.search.differing(best.candidate):
            found = self.search.gain(best, name)
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
        best, first = self.search.best, self.search.first
        row = None if best is None else self.row(best)
        if best is None or best is self.chosen or row is None or first is None:
            return None
        changed = self.search.differing(best.candidate)
        words = ", ".join(levers.described(name, best.candidate.settings[name]) for name in changed)
        speeds = [spoken(self.search.speeds(one.candidate)) for one in (best, first)]
        told = f"not proposed: {words}: {speeds[0]} tokens/s per GPU against {speeds[1]} as written"
        # medians may differ by much where one run of the other lies among these
        word = "not told apart" if row.standing == "no difference" else row.standing
        return f"{told}: {word}" + (f" ({row.why})" if row.why else "")


# --- before the first trial -----------------------------------------------------------------------


def prepare(request: Request, terms: Terms, *, cpu: bool) -> Tuning:
    """Judge the stage file, look at the machine, and lay out the grid; nothing starts.

    Raises InvalidConfig, NotReady (also without a GPU, unless `cpu`) or UsageError.
    """
    _require_sense(terms, cpu=cpu)
    if terms.output is not None:
        proposal.require_free(terms.output, request.config)
    if cpu:
        bench_plan.refuse_gpus(request)
    request = replace(request, gpus=0) if cpu else request
    # what is wrong with the file is said first: that needs no GPU to see
    preparation.ask(replace(request, elsewhere=True, gpus=request.gpus or 0), running=False)
    if not cpu:
        _require_gpu(request)
    asked = preparation.ask(request, running=True)
    if not asked.gpus and not cpu:
        raise _no_gpu(request)
    chosen = asked.chosen() if asked.gpus else None
    if chosen is not None and chosen.refused:
        # those that are merely in use may be a killed command's own: `opened` asks again
        idle = replace(asked.seen or devices.look(os.environ), uses={})
        chosen = devices.choose(asked.gpus, asked.named, idle)
        if chosen.refused:
            raise NotReady(chosen.findings)
    made = plan.make(
        asked.stage, gpus=asked.gpus, output=Path("model"), packages=asked.trainer.packages
    )
    if stopping := errors(made.findings, strict=request.strict):
        raise InvalidConfig(stopping)
    return _laid_out(request, terms, asked, made, _card(terms, chosen))


def _require_sense(terms: Terms, *, cpu: bool) -> None:
    """Raise UsageError for what would be ignored, and for a budget that no trial fits into."""
    if terms.gpu_memory is not None:
        if cpu:
            raise usage("useless-option", "--gpu-memory says nothing with --cpu")
        if not 0 < terms.gpu_memory < math.inf:
            raise usage("bad-gpu-memory", f"--gpu-memory is more than 0, not {terms.gpu_memory:g}")
    if terms.budget_s <= STOPPING_S:
        told = (
            f"not even one trial fits into {terms.budget_s:g} s: ending one takes {STOPPING_S:g} s"
        )
        raise usage("bad-time", told, "--budget 10m")


def _require_gpu(request: Request) -> None:
    if request.gpus == 0 or not devices.look(os.environ).visible:
        raise _no_gpu(request)


def _no_gpu(request: Request) -> NotReady:
    said = "--gpus 0 is the CPU" if request.gpus == 0 else "no GPU is to be seen here"
    return NotReady(
        Finding(
            severity="error", layer="launch", code="no-gpu-here",
            message=f"{said}, and the fastest setting is one of the GPUs that will train",
            help="--cpu tries the mechanics: launch tune configs/demo/sft.yaml --cpu --budget 4m",
        )
    )  # fmt: skip


def _laid_out(request: Request, terms: Terms, asked: Asked, made: Plan, card: Card) -> Tuning:
    here = Here(packages=asked.trainer.packages, cpu=not made.gpus)
    rows, assumed = _rows(made, asked, terms)
    request = replace(request, stage=asked.stage.options.stage, gpus=made.gpus)
    prepared = preparation.prepare(request, running=False)
    # without rows: what is known of them may have become more since an earlier start
    space = levers.of_plan(made, here, None)
    told = [TUNE_VERSION, terms.steps, terms.row_tokens, terms.tolerance, card.name, card.gib,
            space.as_json(), measurement.identity(prepared)]  # fmt: skip
    text = json.dumps(told, sort_keys=True, default=str)
    return Tuning(
        request=request, terms=terms, plan=made, here=here, card=card, shape=_shape(made), rows=rows,
        assumed=assumed, attention=_attention(made, here),
        findings=tuple(one for one in made.findings if one.severity != "note"),
        key=hashlib.sha256(text.encode()).hexdigest(),
    )  # fmt: skip


def _card(terms: Terms, chosen: Devices | None) -> Card:
    """The GPU that trains, of several the smallest."""
    if chosen is None or not chosen.slots:
        return throughput.CPU
    known = [slot.gpu.memory_mib for slot in chosen.slots if slot.gpu.memory_mib]
    gib = terms.gpu_memory or (min(known) / 1024 if known else None)
    return throughput.card_of(chosen.slots[0].gpu.name, gib)


def _shape(made: Plan) -> Shape | None:
    try:
        return footprint.shape_of(made)
    except InvalidConfig:
        return None


def _attention(made: Plan, here: Here) -> str:
    """What the file's own attention comes to on this machine."""
    if here.cpu:
        return "sdpa"
    said = footprint.attention_of(made)
    asked = made.values.get("attn_implementation")
    backend = made.stage.options.backend
    if asked is None and backend == "open_instruct" and not here.has("flash-attn"):
        return "sdpa"
    return said if said in ATTENTIONS else "sdpa"


def _rows(made: Plan, asked: Asked, terms: Terms) -> tuple[Lengths, bool]:
    """How long rows are, and whether that is a mere assumption until the first trial."""
    try:
        terms_of_plan = forecast.Terms(row_tokens=terms.row_tokens)
        return forecast.row_lengths(made, asked.trainer.packages, terms_of_plan), False
    except (InvalidConfig, NotReady):
        limit = made.values.get(made.stage.entry.names.max_length)
        longest = limit if isinstance(limit, int) and limit > 0 else 2048
        told = "not known: half of the longest, until the first trial tells"
        return Lengths(mean=longest / 2, longest=longest, source=told), True


# --- going through with it ------------------------------------------------------------------------


@contextlib.contextmanager
def opened(tuning: Tuning) -> Iterator[Tuning]:
    """The search in its folder, with what an earlier start of the same has learned.

    Raises what `Campaign.opened` raises, and NotReady where the GPUs are another's.
    """
    root, terms = tuning.request.runs or rundir.runs_root(), tuning.terms
    found = Campaign(kind="tune", key=tuning.key, name=tuning.request.config.stem, root=root)
    if not terms.resume and (terms.fresh or found.earlier() is None):
        _require_free_gpus(tuning)
    with found.opened(fresh=terms.fresh, resume=terms.resume) as tuning.folder:
        _require_free_gpus(tuning)
        tuning.take_up(rundir.read_json(tuning.folder / FILE))
        yield tuning


def _require_free_gpus(tuning: Tuning) -> None:
    if tuning.here.cpu:
        return
    named = devices.named(tuning.request.devices)
    chosen = devices.choose(tuning.plan.gpus, named, devices.look(os.environ))
    if chosen.refused:
        raise NotReady(chosen.findings)


def run(tuning: Tuning, *, told: Callable[[str], None] = lambda _: None) -> Exit:
    """Run trials until nothing better is to be expected, or the budget is used up; then propose.

    Needs `opened`. The record is up to date after each trial. What the user stops ends the search,
    whatever else happens only its trial.
    """
    tuning.write()
    for line in beginning(tuning):
        told(line)
    before = len(tuning.entries)
    try:
        with trial.unwatched():
            _go_on(tuning, told)
    except KeyboardInterrupt:
        tuning.state = "interrupted"
        tuning.write()
        return Exit.INTERRUPTED
    return _concluded(tuning, told, before)


def _go_on(tuning: Tuning, told: Callable[[str], None]) -> None:
    """Trial after trial. Raises KeyboardInterrupt where the user stops one."""
    began, clock = tuning.used, time.monotonic()
    while True:
        # planning between trials counts too
        gone = max(tuning.used, began + time.monotonic() - clock)
        left = tuning.terms.budget_s - gone - STOPPING_S
        candidate = tuning.search.propose(left)
        if candidate is None:
            return
        told(f"trial {len(tuning.entries) + 1}: {candidate.why}")
        entry = _tried(tuning, candidate, left)
        tuning.entries.append(entry)
        told(f"  {said(entry)}")
        _tell_rows(tuning, entry.sample)
        tuning.write()


def _tried(tuning: Tuning, candidate: Candidate, left: float) -> Entry:
    """One trial, measured and learned from. Raises KeyboardInterrupt where the user stops it."""
    began, earlier = time.monotonic(), tuning.runs_of(candidate)
    name = earlier[0].sample.variant if earlier else _name(tuning, candidate)
    variant = Variant(name, levers.overrides(tuning.space, candidate.settings))
    limit = tuning.search.timeout(candidate, left)
    # who is killed now has no other way to say what it took
    tuning.under_way = {"began": time.time(), "limit_s": limit}
    tuning.write()
    try:
        sample = measurement.measure(
            tuning.request, variant, steps=tuning.terms.steps, root=tuning.folder,
            repeat=len(earlier), timeout_s=limit, batch=tuning.plan.global_batch, profile=False,
        )  # fmt: skip
        if sample.cause == "interrupted":
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        # it has had its part of the budget
        tuning.cut_s += time.monotonic() - began
        raise
    finally:
        tuning.under_way = None
    if sample.cause == "refused":
        # that another took the GPUs is no setting's fault
        _require_free_gpus(tuning)
    seconds = time.monotonic() - began
    unproved = tuple(point for point in sample.unproved if point in _POINTS)
    sample, reference = replace(sample, unproved=unproved), _reference(tuning)
    if name in (one.variant for one in reference):
        # how far its own losses scatter, the table says
        reference = []
    runs = [*(one.sample for one in earlier if one.trial.ok), sample]
    measured = replace(judged(runs, reference, tuning.terms.tolerance), seconds=seconds)
    blamed = tuple(name for name in measured.blamed if name in candidate.settings)
    cut = measured.status == "timeout" and limit < tuning.search.timeout(candidate, math.inf)
    learned = tuning.search.learn(candidate, replace(measured, blamed=blamed, cut=cut))
    return Entry(trial=learned, sample=replace(sample, outcome=None), seconds=seconds)


def _name(tuning: Tuning, candidate: Candidate) -> str:
    """What the trial is called in tables: what it changes of the file."""
    changed = tuning.search.differing(candidate)
    words = [levers.described(name, candidate.settings[name]) for name in changed]
    return f"{len(tuning.entries) + 1}: {', '.join(words) or AS_WRITTEN}"


def _reference(tuning: Tuning) -> list[Sample]:
    """What losses are held to: runs of the file as written, or of the first that could be measured."""
    good = [entry.sample for entry in tuning.entries if entry.trial.ok]
    return [one for one in good if one.variant == good[0].variant]


def judged(runs: Sequence[Sample], reference: Sequence[Sample], tolerance: float) -> Measured:
    """What the last of a setting's runs means: it counts only if everything that it asks for was proved.

    Losses are compared as `launch bench` does, by the medians of all. No `reference`: this setting is what
    others are held to.
    """
    sample = runs[-1]
    figures = sample.metrics
    told = Measured(
        status="ok", speed=figures.get(SPEED), step=figures.get("seconds_per_step"),
        peak=figures.get("peak_allocated_gib"), reason=sample.reason,
    )  # fmt: skip
    wrong, open_ones = _points(sample)
    if not sample.measured:
        status = _CAUSES.get(sample.cause, "crash")
        return replace(told, status=status, blamed=wrong if status == "contract" else ())
    if wrong or sample.flaws:
        reason = "; ".join(sample.flaws) or f"{', '.join(wrong)}: disproved"
        return replace(told, status="contract", blamed=wrong, reason=reason)
    if sample.gradients == "unknown":
        open_ones = tuple(dict.fromkeys((*open_ones, "gradients")))
    if open_ones:
        reason = f"{', '.join(open_ones)}: not proved"
        return replace(told, status="unproven", blamed=open_ones, reason=reason)
    if not told.speed:
        return replace(told, status="no speed", reason="the speed of its steps was not measured")
    if not reference:
        if not sample.curve:
            return replace(told, status="unproven", reason="no loss was seen")
        return replace(told, loss_change=0.0)
    row = comparison.compare([*reference, *runs], tolerance)[-1]
    change = row.loss_change
    if change is None:
        return replace(told, status="unproven", reason="no loss of both to compare")
    if abs(change) > tolerance:
        reason = f"the loss per token is {change:+.1%} after the same tokens"
        return replace(told, status="loss changed", loss_change=change, reason=reason)
    if row.variant != reference[0].variant and (why := comparison.unlike(runs, reference)):
        return replace(told, status="loss changed", loss_change=change, reason=why)
    return replace(told, loss_change=change)


def _points(sample: Sample) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Points of the verdict that were disproved, and those that are not proved either way."""
    if sample.outcome is None:
        return (), ()
    points = [p for p in sample.outcome.verdict.points if p.name in _POINTS]
    return (
        tuple(p.name for p in points if p.ok is False),
        tuple(p.name for p in points if p.ok is None),
    )


def _tell_rows(tuning: Tuning, sample: Sample) -> None:
    """The first trial that counted tokens says how long rows are, where nobody knew."""
    tokens = sample.metrics.get("tokens_per_step")
    if not tuning.assumed or not tokens or not sample.measured:
        return
    made = tuning.plan
    sequences = made.global_batch * (2 if made.stage.options.stage == "dpo" else 1)
    mean = tokens / sequences
    if footprint.refilled(made) is not None:
        # full rows tell nothing of those that they were made of
        return
    longest = max(tuning.rows.longest, round(mean))
    tuning.seen(
        Lengths(mean=mean, longest=longest, source=f"the first trial: {mean:.0f} on average")
    )


def _concluded(tuning: Tuning, told: Callable[[str], None], began_with: int) -> Exit:
    told(f"end: {tuning.search.stopped}")
    if began_with == len(tuning.entries) and began_with:
        told("nothing new was tried: --fresh starts over")
    tuning.state = "finished"
    best = tuning.chosen
    if best is None:
        tuning.write()
        statuses = {entry.trial.measured.status for entry in tuning.entries}
        # nothing was tried, or nothing could be started
        return Exit.NOT_READY if statuses <= {"refused"} else Exit.TRAINING
    place = tuning.terms.output or tuning.folder / TUNED
    proposed = Proposal(
        space=tuning.space, settings=best.candidate.settings, gains=tuning.gains(),
        head=head(tuning, best, place), overrides=tuning.request.overrides,
    )  # fmt: skip
    try:
        proposal.write(proposed, place)
    except NotReady as error:
        # what was measured is there all the same
        tuning.findings = (*tuning.findings, *error.findings)
        tuning.write()
        return Exit.NOT_READY
    tuning.place = place
    faults = proposal.faults(
        place, tuning.plan.stage.options.stage, tuning.request.checkout,
        allowed=tuning.request.allow_unpinned,
    )  # fmt: skip
    tuning.findings = (*tuning.findings, *faults)
    tuning.write()
    return Exit.CONFIG if faults else Exit.OK


# --- in words ---


def beginning(tuning: Tuning) -> list[str]:
    """What is known before the first trial, one fact a line."""
    counted, space = tuning.search.summary(), tuning.space
    turned = "; ".join(f"{one.name} ({', '.join(map(_value, one.values))})" for one in space.levers)
    room = "" if tuning.card.gib is None else f" of {tuning.card.gib:.0f} GiB"
    lines = [
        f"levers: {turned}",
        f"{counted['settings']} settings on {tuning.card.name or 'this GPU'}{room}; the plan leaves out "
        f"{counted['too_large']} that do not fit",
        f"rows: {tuning.rows.source}",
    ]
    lines += [f"{name} stays: {why}" for name, why in space.fixed.items()]
    if tuning.entries:
        lines.append(
            f"{len(tuning.entries)} trials of an earlier start, {tuning.used:.0f} s: {tuning.folder}"
        )
    return lines


def said(entry: Entry) -> str:
    """Of a trial that is over."""
    measured = entry.trial.measured
    speed = f"{measured.speed:,.0f} tokens/s per GPU, " if entry.trial.ok and measured.speed else ""
    return f"{speed}{entry.trial.learned} ({entry.seconds:.0f} s)"


def ending(tuning: Tuning) -> list[str]:
    """What came of it: the changes with what each gains, and what to run."""
    best = tuning.chosen
    if tuning.state == "interrupted":
        return ["interrupted: the same command goes on here", f"trials: {tuning.folder / FILE}"]
    if best is None:
        return [f"nothing to propose: {tuning.search.stopped}", f"{tuning.folder / FILE}"]
    lines = [
        f"{levers.described(gain.lever, gain.after)}: {gain.text()}" for gain in tuning.gains()
    ]
    ways = "--gpus 0" if not tuning.plan.gpus else f"--gpus {tuning.plan.gpus}"
    others = len(tuning.entries) > 1
    none = "nothing that was tried is faster than" if others else "nothing was tried but"
    lines = lines or [f"{none} the file as it is written"]
    lines += [*filter(None, [tuning.withheld()]), f"trials: {tuning.folder / FILE}"]
    if tuning.place is None:
        return [*lines, "tuned: not written; the same command with another -o does no trial twice"]
    told = f"launch {tuning.plan.stage.options.stage} {shlex.quote(str(tuning.place))} {ways}"
    return [*lines, f"tuned: {told}"]


def head(tuning: Tuning, best: Trial, place: Path) -> list[str]:
    """What the stage file says of itself."""
    stage, where = tuning.plan.stage, tuning.card.name or "GPU"
    on = "the CPU" if not tuning.plan.gpus else f"{tuning.plan.gpus} x {where}"
    ways = "--gpus 0" if not tuning.plan.gpus else f"--gpus {tuning.plan.gpus}"
    lines = [
        f"{stage.config.path.name} on {on}, {len(tuning.entries)} trials of {tuning.terms.steps} steps.",
        f"  launch {stage.options.stage} {shlex.quote(str(place))} {ways}",
    ]
    first, row = tuning.search.first, tuning.row(best)
    told = f"{spoken(tuning.search.speeds(best.candidate))} tokens/s per GPU"
    if row is not None and first is not None and row.standing != "baseline":
        told = f"{spoken(tuning.search.speeds(first.candidate))} -> {told}, {row.speed_ratio:.2f}x"
    if (loss := loss_change(best, row)) is not None:
        change = round(loss, 4) + 0.0  # no minus before a zero
        told += f", loss per token {change:+.2%} after the same tokens"
    if best.measured.peak is not None and tuning.card.gib:
        told += f", peak {best.measured.peak:.0f} of {tuning.card.gib:.0f} GiB"
    lines.append(told + ".")
    if not tuning.search.differing(best.candidate):
        lines.append("Nothing that was tried is faster: what follows changes nothing.")
    if (not_this := tuning.withheld()) is not None:
        lines.append(f"{not_this}.")
    lines.append(f"Every trial: {tuning.folder / FILE}")
    return lines


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def loss_change(best: Trial, row: Row | None) -> float | None:
    """By all runs of both, where the file as written was measured."""
    return best.measured.loss_change if row is None else row.loss_change or 0.0


def spoken(speeds: Spread) -> str:
    """`median (least – most, n runs)`."""
    if speeds.n == 1:
        return f"{speeds.median:,.0f} (one run)"
    return f"{speeds.median:,.0f} ({speeds.min:,.0f} – {speeds.max:,.0f}, {speeds.n} runs)"
