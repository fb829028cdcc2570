"""`launch tune`: short real runs of a stage until the fastest setting is found that trains the same.

`search` proposes and learns, `measurement` measures; here is what lies between: the budget, and what a
verdict means for a setting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher import (
    bench,
    bench_plan,
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
    tune_report,
)  # fmt: skip
from launcher.campaign import Campaign
from launcher.candidates import Candidate, Measured, Status
from launcher.comparison import SPEED, Sample, Variant
from launcher.devices import Devices
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, errors, usage
from launcher.footprint import ATTENTIONS
from launcher.lengths import Lengths
from launcher.levers import Here
from launcher.plan import Plan
from launcher.preparation import Asked, Request
from launcher.proposal import Proposal
from launcher.shapes import Shape
from launcher.throughput import Card
from launcher.tuning import FILE, STOPPING_S, TUNE_VERSION, Begun, Entry, Terms, Tuning

TUNED = "tuned.yaml"
AS_WRITTEN = "as written"
_POINTS = ("liger", "packing", "attention", "batch", "loss", "memory")
"""Points of the verdict that a setting has to prove; the others are not about settings."""
_CAUSES: Mapping[str, Status] = {
    "oom": "oom", "diverged": "diverged", "hang": "hang", "timeout": "timeout", "crash": "crash",
    "contract": "contract", "refused": "refused",
}  # fmt: skip


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
    """The GPU that trains, of several the smallest; nobody tells how large an instance (MIG) is."""
    if chosen is None or not chosen.slots:
        return throughput.CPU
    known = [
        slot.gpu.memory_mib for slot in chosen.slots if slot.mig is None and slot.gpu.memory_mib
    ]
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
    for line in tune_report.beginning(tuning):
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
        told(f"  {tune_report.said(entry)}")
        _tell_rows(tuning, entry.sample)
        tuning.write()


def _tried(tuning: Tuning, candidate: Candidate, left: float) -> Entry:
    """One trial, measured and learned from. Raises KeyboardInterrupt where the user stops it."""
    began, earlier = time.monotonic(), tuning.runs_of(candidate)
    name = earlier[0].sample.variant if earlier else _name(tuning, candidate)
    variant = Variant(name, levers.overrides(tuning.space, candidate.settings))
    limit = tuning.search.paces.timeout(candidate, left)
    # who is killed now has no other way to say what it took
    tuning.under_way = Begun(began=time.time(), limit_s=limit)
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
    cut = measured.status == "timeout" and limit < tuning.search.paces.timeout(candidate, math.inf)
    learned = tuning.search.learn(candidate, replace(measured, blamed=blamed, cut=cut))
    return Entry(trial=learned, sample=replace(sample, outcome=None), seconds=seconds)


def _name(tuning: Tuning, candidate: Candidate) -> str:
    """What the trial is called in tables: what it changes of the file."""
    changed = tuning.search.results.differing(candidate)
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
    if open_ones:
        reason = f"{', '.join(open_ones)}: not proved"
        return replace(told, status="unproven", blamed=open_ones, reason=reason)
    if not told.speed:
        return replace(told, status="no speed", reason="the speed of its steps was not measured")
    if not reference:
        if not sample.curve:
            return replace(told, status="unproven", reason="no loss was seen")
        return replace(told, loss_change=0.0)
    change = comparison.compare([*reference, *runs], tolerance)[-1].loss_change
    if change is None:
        return replace(told, status="unproven", reason="no loss of both to compare")
    if abs(change) > tolerance:
        reason = f"the loss per token is {change:+.1%} after the same tokens"
        return replace(told, status="loss changed", loss_change=change, reason=reason)
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
        head=tune_report.head(tuning, best, place), overrides=tuning.request.overrides,
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


def seconds(text: str) -> float:
    """`--budget` in seconds. Raises UsageError for what is no time."""
    return bench.seconds(text) or 0.0
