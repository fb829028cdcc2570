"""`launch tune`: short real runs of a stage until the fastest setting is found that trains the same.

`search` proposes and learns, `measurement` measures; here are the budget, the record, and what a verdict
means for a setting.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import (
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
    trial,
)  # fmt: skip
from launcher.bench import Bench, require_gpu
from launcher.campaign import Campaign
from launcher.cards import CPU, Card, card_of
from launcher.comparison import SPEED, TOLERANCE, Row, Sample
from launcher.devices import Devices
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, errors, usage
from launcher.lengths import Lengths, log_normal
from launcher.levers import Packages, Space
from launcher.plan import Plan
from launcher.preparation import Asked, Request
from launcher.search import Candidate, Measured, Outlook, Search, Status, Trial
from launcher.shapes import Shape
from launcher.variants import AS_WRITTEN, Variant

TUNE_VERSION = 2
FILE = "tune.json"
TUNED = "tuned.yaml"
STOPPING_S = 15.0
"""What ending a trial may take after its time is up: INT, TERM, KILL."""
_START_S = {"gpu": 60.0, "cpu": 20.0}
_POINTS = ("liger", "packing", "attention", "batch", "loss", "memory")
"""Points of the verdict that a setting has to prove; the others are not about settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the command line says beside the stage file. `gpu_memory` in GiB, `budget_s` in seconds."""

    budget_s: float = 600.0
    steps: int = 8
    row_tokens: str | None = None
    gpu_memory: float | None = None
    output: Path | None = None
    fresh: bool = False
    resume: bool = False


_MEASURED = {
    "status": "status", "reason": "reason", "blamed": "blamed", "cut": "cut",
    "tokens_per_second_per_gpu": "speed", "seconds_per_step": "step", "peak_allocated_gib": "peak",
    "loss_change": "loss_change",
}  # fmt: skip
"""The words of the record for what a trial measured."""


def trial_json(one: Trial, space: Space) -> dict[str, Any]:
    """A trial for the record; `trial_from_json` reads what it needs of that."""
    candidate, expected = one.candidate, one.candidate.expected
    return {
        "name": one.sample.variant, "purpose": candidate.purpose, "why": candidate.why,
        "settings": dict(candidate.settings),
        "overrides": list(levers.overrides(space, candidate.settings)),
        "expected": {
            "peak_gib": expected.peak, "trial_peak_gib": expected.short,
            "seconds_per_step": expected.seconds, "tokens_per_step": expected.tokens,
        },
        **{key: getattr(one.measured, name) for key, name in _MEASURED.items()},
        "learned": one.learned, "seconds": round(one.measured.seconds, 1),
        "sample": one.sample.as_json(),
    }  # fmt: skip


def trial_from_json(data: Mapping[str, Any], outlook: Outlook) -> Trial:
    """Raises KeyError, TypeError or ValueError where `trial_json` did not write it."""
    # a lever that needs to know the rows (TRL's packing) was as the file has it
    candidate = outlook.candidate({**outlook.space.base, **data["settings"]})
    known: dict[str, Any] = {name: data[key] for key, name in _MEASURED.items()}
    return Trial(
        candidate=replace(candidate, purpose=data["purpose"], why=data["why"]),
        measured=Measured(seconds=float(data["seconds"]), **known),
        sample=Sample.from_json(data["sample"]),
    )


@dataclass(slots=True, kw_only=True)
class Tuning:
    """One search on one machine: what it is about, and what is known so far.

    `key` names settings, contents and machine: another key is another search. `assumed` says that row
    lengths are not known and the first trial has to tell them.
    """

    request: Request
    terms: Terms
    plan: Plan
    packages: Packages
    card: Card
    shape: Shape | None
    rows: Lengths
    attention: str
    assumed: bool
    key: str
    search: Search = field(init=False)
    space: Space = field(init=False)
    folder: Path = Path()
    state: str = "running"
    findings: tuple[Finding, ...] = ()
    place: Path | None = None

    def __post_init__(self) -> None:
        self.learn_again(())

    def outlook(self) -> Outlook:
        """The estimates, by what is known of the rows now."""
        return Outlook(
            space=self.space, shape=self.shape, rows=self.rows, card=self.card,
            attention=self.attention, steps=self.terms.steps,
        )  # fmt: skip

    def learn_again(self, trials: Iterable[Mapping[str, Any]]) -> None:
        """Make the grid from what is known of the rows now, and learn from these records again."""
        self.space = levers.of_plan(self.plan, self.packages, None if self.assumed else self.rows)
        outlook = self.outlook()
        search = Search(
            outlook.grid(), outlook.base(), steps=self.terms.steps, room=self.card.gib,
            start_s=_START_S["gpu" if self.plan.gpus else "cpu"],
        )  # fmt: skip
        for data in trials:
            one = trial_from_json(data, outlook)
            search.learn(one.candidate, one.measured, one.sample)
        self.search = search

    def take_up(self, record: Mapping[str, Any]) -> None:
        """What an earlier start has learned, by its record; one that cannot be read is none.

        A trial that could not be started, or that a smaller budget ended, is run again.
        """
        known = self.rows, self.assumed
        try:
            rows = record.get("rows") or {"assumed": True}
            if self.assumed and not rows["assumed"]:
                self.rows = log_normal(rows["mean"], rows["longest"], rows["source"])
                self.assumed = False
            more = self.terms.budget_s > record.get("budget_s", 0)
            self.learn_again(
                data for data in record.get("trials") or ()
                if data["status"] != "refused" and not (data["cut"] and more)
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError):
            self.rows, self.assumed = known
            self.learn_again(())

    @property
    def used(self) -> float:
        """Seconds of the budget that are gone, those of earlier starts included."""
        return sum(one.measured.seconds for one in self.trials)

    @property
    def trials(self) -> list[Trial]:
        """All of them, as they came."""
        return self.search.runs

    def runs_of(self, candidate: Candidate) -> list[Trial]:
        """All of one setting, but for later ones that did not end for a reason that is not the setting's."""
        runs = self.search.runs_of(candidate)
        return runs[:1] + [one for one in runs[1:] if one.counts]

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
        if not any(one.ok for one in first):
            return None
        runs = [*first, *self.runs_of(trial.candidate)]
        return comparison.compare([one.sample for one in runs])[-1]

    def bench(self) -> Bench:
        """The trials as a comparison, for its table and its page."""
        request = replace(self.request, stage=self.plan.stage.options.stage, gpus=self.plan.gpus)
        runs = [self.runs_of(one.candidate) for one in self.search.trials]
        chosen = self.chosen
        return Bench(
            request=request, variants=tuple(Variant(own[0].sample.variant) for own in runs),
            steps=self.terms.steps, repeats=self.search.repeats, key=self.key,
            batch=self.plan.global_batch, folder=self.folder,
            samples=[one.sample for own in runs for one in own],
            proposed=None if chosen is None else self.runs_of(chosen.candidate)[0].sample.variant,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The record, and the data of `--format json`."""
        best, rows = self.chosen, self.rows
        return {
            "tune_version": TUNE_VERSION, "key": self.key, "config": str(self.request.config),
            "overrides": list(self.request.overrides), "gpus": self.plan.gpus,
            "steps": self.terms.steps, "budget_s": self.terms.budget_s, "used_s": round(self.used, 1),
            "tolerance": TOLERANCE, "state": self.state, "stopped": self.search.stopped,
            "card": {"name": self.card.name, "gib": self.card.gib},
            "rows": {"mean": rows.mean, "longest": rows.longest, "source": rows.source,
                     "assumed": self.assumed},
            "attention": self.attention, "shape": None if self.shape is None else self.shape.source,
            **self.space.as_json(), "grid": self.search.summary(),
            "trials": [trial_json(one, self.space) for one in self.trials],
            "best": None if best is None else self._best_json(best),
            "proposal": None if self.place is None else str(self.place),
            "bench": [row.as_json() for row in self.bench().rows] if self.trials else [],
            "folder": str(self.folder),
        }  # fmt: skip

    def _best_json(self, best: Trial) -> dict[str, Any]:
        first, row = self.search.first, self.row(best)
        base = None if row is None or first is None else self.search.speeds(first.candidate)
        # the file as written is itself what others are held to
        ratio = None if row is None else round(row.speed_ratio or 1.0, 4)
        return {
            "settings": dict(best.candidate.settings),
            "changes": levers.changes(self.space, best.candidate.settings),
            "tokens_per_second_per_gpu": best.measured.speed,
            "spread": self.search.speeds(best.candidate).as_json(),
            "spread_as_written": None if base is None else base.as_json(), "speed_ratio": ratio,
            "loss_change": self.loss_change(best), "peak_allocated_gib": best.measured.peak,
            "withheld": self.withheld(),
        }  # fmt: skip

    def loss_change(self, best: Trial) -> float | None:
        """By all runs of both, where the file as written was measured."""
        row = self.row(best)
        return best.measured.loss_change if row is None else row.loss_change or 0.0

    def write(self) -> None:
        """The record, whole or not at all. Raises NotReady where it cannot be written."""
        campaign.write(self.folder / FILE, self.as_json())

    def withheld(self) -> str | None:
        """Why the fastest setting is not what is proposed; None where it is."""
        best, first = self.search.best, self.search.first
        row = None if best is None else self.row(best)
        if best is None or best is self.chosen or row is None or first is None:
            return None
        ours, base = (self.search.speeds(one.candidate) for one in (best, first))
        # medians may differ by much where one run of the other lies among these
        word = "not told apart" if row.standing == "no difference" else row.standing
        why = f" ({row.why})" if row.why else ""
        name = self.search.words(best.candidate, self.search.base)
        return (
            f"not proposed: {name}: {ours} tokens/s per GPU against {base} as written: {word}{why}"
        )


# --- before the first trial -----------------------------------------------------------------------


def prepare(request: Request, terms: Terms, *, cpu: bool) -> Tuning:
    """Judge the stage file, look at the machine, and make the grid; nothing starts.

    Raises InvalidConfig, NotReady (also without a GPU, unless `cpu`) or UsageError.
    """
    if terms.gpu_memory is not None and (cpu or not 0 < terms.gpu_memory < math.inf):
        raise usage("bad-gpu-memory", "--gpu-memory is more than 0, and not for --cpu")
    if terms.budget_s <= STOPPING_S:
        message = (
            f"not even one trial fits into {terms.budget_s:g} s: ending one takes {STOPPING_S:g} s"
        )
        raise usage("bad-time", message, "--budget 10m")
    if terms.output is not None:
        proposal.require_free(terms.output, request.config)
    request = require_gpu(request, cpu=cpu)
    asked = preparation.ask(request, running=True)
    chosen = None
    if asked.gpus:
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
    packages, card = asked.trainer.packages, _card(terms, chosen)
    rows, assumed = _rows(made, asked, terms)
    request = replace(request, stage=asked.stage.options.stage, gpus=made.gpus)
    # without rows: what is known of them may have become more since an earlier start
    space = levers.of_plan(made, packages, None)
    about = [TUNE_VERSION, terms.steps, terms.row_tokens, card.name, card.gib, space.as_json(),
             measurement.identity(preparation.prepare(request, running=False))]  # fmt: skip
    return Tuning(
        request=request, terms=terms, plan=made, packages=packages, card=card, shape=_shape(made), rows=rows,
        assumed=assumed, attention=_attention(made, packages),
        findings=tuple(finding for finding in made.findings if finding.severity != "note"),
        key=campaign.key_of(about),
    )  # fmt: skip


def _card(terms: Terms, chosen: Devices | None) -> Card:
    """The GPU that trains, of several the smallest."""
    if chosen is None or not chosen.slots:
        return CPU
    known = [slot.gpu.memory_mib for slot in chosen.slots if slot.gpu.memory_mib]
    gib = terms.gpu_memory or (min(known) / 1024 if known else None)
    return card_of(chosen.slots[0].gpu.name, gib)


def _shape(made: Plan) -> Shape | None:
    try:
        return footprint.shape_of(made)
    except InvalidConfig:
        return None


def _attention(made: Plan, packages: Packages) -> str:
    """What the file's own attention comes to on this machine."""
    named = made.values.get("attn_implementation")
    upstreams = named is None and made.stage.options.backend == "open_instruct"
    if not made.gpus or (upstreams and not levers.has(packages, "flash-attn")):
        return "sdpa"
    return footprint.attention_of(made)


def _rows(made: Plan, asked: Asked, terms: Terms) -> tuple[Lengths, bool]:
    """How long rows are, and whether that is a mere assumption until the first trial."""
    try:
        given = forecast.Terms(row_tokens=terms.row_tokens)
        return forecast.row_lengths(made, asked.trainer.packages, given), False
    except (InvalidConfig, NotReady):
        limit = made.values.get(made.stage.entry.names.max_length)
        longest = limit if isinstance(limit, int) and limit > 0 else 2048
        source = "not known: half of the longest, until the first trial tells"
        return log_normal(longest / 2, longest, source), True


# --- going through with it ------------------------------------------------------------------------


@contextlib.contextmanager
def opened(tuning: Tuning) -> Iterator[Tuning]:
    """The search in its folder, with what an earlier start of the same has learned.

    Raises what `Campaign.opened` raises, and NotReady where the GPUs are another's.
    """
    root, terms = tuning.request.runs or rundir.runs_root(), tuning.terms
    found = Campaign(kind="tune", key=tuning.key, name=tuning.request.config.stem, root=root)
    with found.opened(fresh=terms.fresh, resume=terms.resume) as tuning.folder:
        _require_free_gpus(tuning)
        tuning.take_up(rundir.read_json(tuning.folder / FILE))
        yield tuning


def _require_free_gpus(tuning: Tuning) -> None:
    if not tuning.plan.gpus:
        return
    named = devices.named(tuning.request.devices)
    chosen = devices.choose(tuning.plan.gpus, named, devices.look(os.environ))
    if chosen.refused:
        raise NotReady(chosen.findings)


def run(tuning: Tuning, *, show: Callable[[str], None] = lambda _: None) -> Exit:
    """Run trials until nothing better is to be expected, or the budget is used up; then propose.

    Needs `opened`. The record is up to date after each trial. What the user stops ends the search,
    whatever else happens only its trial.
    """
    tuning.write()
    for line in beginning(tuning):
        show(line)
    before = len(tuning.trials)
    try:
        with trial.unwatched():
            _run_trials(tuning, show)
    except KeyboardInterrupt:
        tuning.state = "interrupted"
        tuning.write()
        return Exit.INTERRUPTED
    show(f"end: {tuning.search.stopped}")
    if before == len(tuning.trials) and before:
        show("nothing new was tried: --fresh starts over")
    return _concluded(tuning)


def _run_trials(tuning: Tuning, show: Callable[[str], None]) -> None:
    """Trial after trial. Raises KeyboardInterrupt where the user stops one."""
    began, clock = tuning.used, time.monotonic()
    while True:
        # planning between trials counts too
        gone = max(tuning.used, began + time.monotonic() - clock)
        left = tuning.terms.budget_s - gone - STOPPING_S
        candidate = tuning.search.propose(left)
        if candidate is None:
            return
        show(f"trial {len(tuning.trials) + 1}: {candidate.why}")
        one = _tried(tuning, candidate, left)
        speed = f"{one.speed:,.0f} tokens/s per GPU, " if one.speed else ""
        show(f"  {speed}{one.learned} ({one.measured.seconds:.0f} s)")
        _learn_rows(tuning, one.sample)
        tuning.write()


def _tried(tuning: Tuning, candidate: Candidate, left: float) -> Trial:
    """One trial, measured and learned from. Raises KeyboardInterrupt where the user stops it."""
    began, earlier = time.monotonic(), tuning.runs_of(candidate)
    words = tuning.search.words(candidate, tuning.search.base) or AS_WRITTEN
    name = earlier[0].sample.variant if earlier else f"{len(tuning.trials) + 1}: {words}"
    variant = Variant(name, levers.overrides(tuning.space, candidate.settings))
    limit = tuning.search.timeout(candidate, left)
    sample = measurement.measure(
        tuning.request, variant, steps=tuning.terms.steps, root=tuning.folder,
        repeat=len(earlier), timeout_s=limit, batch=tuning.plan.global_batch,
    )  # fmt: skip
    if sample.cause == "interrupted":
        raise KeyboardInterrupt
    if sample.cause == "refused":
        # that another took the GPUs is no setting's fault
        _require_free_gpus(tuning)
    seconds = time.monotonic() - began
    unproved = tuple(point for point in sample.unproved if point in _POINTS)
    sample, reference = replace(sample, unproved=unproved), _reference(tuning)
    if name in (one.variant for one in reference):
        # how far its own losses scatter, the table says
        reference = []
    runs = [*(one.sample for one in earlier if one.ok), sample]
    measured = replace(judged(runs, reference), seconds=seconds)
    blamed = tuple(lever for lever in measured.blamed if lever in candidate.settings)
    cut = measured.status == "timeout" and limit < tuning.search.timeout(candidate, math.inf)
    return tuning.search.learn(candidate, replace(measured, blamed=blamed, cut=cut), sample)


def _reference(tuning: Tuning) -> list[Sample]:
    """What losses are held to: runs of the file as written, or of the first that could be measured."""
    good = [one.sample for one in tuning.trials if one.ok]
    return [sample for sample in good if sample.variant == good[0].variant]


def judged(runs: Sequence[Sample], reference: Sequence[Sample]) -> Measured:
    """What the last of a setting's runs means: it counts only if everything that it asks for was proved.

    Losses are compared as `launch bench` does, by the medians of all. No `reference`: this setting is what
    others are held to.
    """
    sample = runs[-1]
    figures = sample.metrics
    result = Measured(
        status="ok", speed=figures.get(SPEED), step=figures.get("seconds_per_step"),
        peak=figures.get("peak_allocated_gib"), reason=sample.reason,
    )  # fmt: skip
    failed = tuple(p for p in _POINTS if any(flaw.startswith(f"{p} is ") for flaw in sample.flaws))
    if not sample.measured:
        status: Status = "crash" if sample.cause == "interrupted" else sample.cause
        return replace(result, status=status, blamed=failed if status == "contract" else ())
    if sample.flaws:
        return replace(result, status="contract", blamed=failed, reason="; ".join(sample.flaws))
    unproved = tuple(point for point in sample.unproved if point in _POINTS)
    unproved += ("gradients",) if sample.gradients == "unknown" else ()
    if unproved:
        reason = f"{', '.join(unproved)}: not proved"
        return replace(result, status="unproven", blamed=unproved, reason=reason)
    if not result.speed:
        return replace(result, status="no speed", reason="the speed of its steps was not measured")
    if not sample.curve:
        return replace(result, status="unproven", reason="no loss was recorded")
    if not reference:
        return replace(result, loss_change=0.0)
    row = comparison.compare([*reference, *runs])[-1]
    change = row.loss_change
    if change is None:
        return replace(result, status="unproven", reason="no loss of both to compare")
    unlike = comparison.unlike(runs, reference)
    if abs(change) > TOLERANCE:
        unlike = f"the loss per token is {change:+.1%} after the same tokens"
    if unlike:
        return replace(result, status="loss changed", loss_change=change, reason=unlike)
    return replace(result, loss_change=change)


def _learn_rows(tuning: Tuning, sample: Sample) -> None:
    """The first trial that counted tokens says how long rows are, where nobody knew."""
    tokens, made = sample.metrics.get("tokens_per_step"), tuning.plan
    # full rows tell nothing of those that they were made of
    if not tuning.assumed or not tokens or not sample.measured or footprint.refilled(made):
        return
    mean = tokens / (made.global_batch * (2 if made.stage.options.stage == "dpo" else 1))
    source, longest = f"the first trial: {mean:.0f} on average", tuning.rows.longest
    tuning.rows = log_normal(mean, max(longest, round(mean)), source)
    tuning.assumed = False
    tuning.learn_again([trial_json(one, tuning.space) for one in tuning.trials])


def _concluded(tuning: Tuning) -> Exit:
    tuning.state, best = "finished", tuning.chosen
    if best is None:
        tuning.write()
        statuses = {one.measured.status for one in tuning.trials}
        # nothing was tried, or nothing could be started
        return Exit.NOT_READY if statuses <= {"refused"} else Exit.TRAINING
    place = tuning.terms.output or tuning.folder / TUNED
    try:
        proposal.write(
            place, tuning.space, best.candidate.settings, head=head(tuning, best, place),
            overrides=tuning.request.overrides,
        )  # fmt: skip
        tuning.place = place
    except NotReady as error:
        # what was measured is there all the same
        tuning.findings = (*tuning.findings, *error.findings)
    tuning.write()
    return Exit.OK if tuning.place else Exit.NOT_READY


# --- in words ---


def beginning(tuning: Tuning) -> list[str]:
    """What is known before the first trial, one fact a line."""
    counts, space, card = tuning.search.summary(), tuning.space, tuning.card
    values = {one.name: ", ".join(map(_value, one.values)) for one in space.levers}
    room = "" if card.gib is None else f" of {card.gib:.0f} GiB"
    lines = [
        f"levers: {'; '.join(f'{name} ({told})' for name, told in values.items())}",
        f"{counts['settings']} settings on {card.name or 'this GPU'}{room}; the plan leaves out "
        f"{counts['too_large']} that do not fit",
        f"rows: {tuning.rows.source}",
        *(f"{name} stays: {why}" for name, why in space.fixed.items()),
    ]
    if tuning.trials:
        lines.append(
            f"{len(tuning.trials)} trials of an earlier start, {tuning.used:.0f} s: {tuning.folder}"
        )
    return lines


def ending(tuning: Tuning) -> list[str]:
    """What came of it: the changes, and what to run."""
    best, record = tuning.chosen, tuning.folder / FILE
    if tuning.state == "interrupted":
        return ["interrupted: the same command goes on here", f"trials: {record}"]
    if best is None:
        return [f"nothing to propose: {tuning.search.stopped}", f"trials: {record}"]
    lines = [*_summary(tuning, best), f"trials: {record}"]
    if tuning.place is None:
        return [*lines, "tuned: not written; the same command with another -o does no trial twice"]
    return [*lines, f"tuned: {_command(tuning, tuning.place)}"]


def head(tuning: Tuning, best: Trial, place: Path) -> list[str]:
    """What the stage file says of itself."""
    on = f"{tuning.plan.gpus} x {tuning.card.name or 'GPU'}" if tuning.plan.gpus else "the CPU"
    name, steps = tuning.plan.stage.config.path.name, tuning.terms.steps
    return [
        f"{name} on {on}, {len(tuning.trials)} trials of {steps} steps.",
        f"  {_command(tuning, place)}", *_summary(tuning, best), f"Every trial: {tuning.folder / FILE}",
    ]  # fmt: skip


def _summary(tuning: Tuning, best: Trial) -> list[str]:
    """The figures of the best setting, its changes, and what was faster without being proved so."""
    row, first, loss = tuning.row(best), tuning.search.first, tuning.loss_change(best)
    speed = f"{tuning.search.speeds(best.candidate)} tokens/s per GPU"
    if row is not None and first is not None and row.standing != "baseline":
        speed = f"{tuning.search.speeds(first.candidate)} -> {speed}, {row.speed_ratio:.2f}x"
    if loss is not None:
        # no minus before a zero
        speed += f", loss per token {round(loss, 4) + 0.0:+.2%} after the same tokens"
    if best.measured.peak is not None and tuning.card.gib:
        speed += f", peak {best.measured.peak:.0f} of {tuning.card.gib:.0f} GiB"
    return [f"{speed}.", *_changes(tuning, best), *filter(None, [tuning.withheld()])]


def _changes(tuning: Tuning, best: Trial) -> list[str]:
    """What the best setting changes of the file, each with what it was."""
    base, settings = tuning.search.base.settings, best.candidate.settings
    changed = tuning.search.differing(best.candidate)
    lines = [
        f"{levers.described(name, settings[name])} (was {_value(base.get(name, 'as it is'))})"
        for name in changed
    ]
    return lines or ["nothing that was tried is faster than the file as it is written"]


def _command(tuning: Tuning, place: Path) -> str:
    stage = tuning.plan.stage.options.stage
    return f"launch {stage} {shlex.quote(str(place))} --gpus {tuning.plan.gpus}"


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
