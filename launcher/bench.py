"""Settings side by side: short real runs in turn, each measured, written down, and compared.

One trial is one run of the stage as `rehearsal` makes it: it goes through keeper, probe and verdict as
any other. What fails ends that trial alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import (
    cards,
    checkouts,
    claim,
    comparison,
    contents,
    devices,
    evidence,
    machine,
    measures,
    noops,
    preparation,
    rehearsal,
    rundir,
    runner,
    stopping,
    trial,
    utilisation,
    variants,
)  # fmt: skip
from launcher.backends.open_instruct_log import ATTENTION
from launcher.comparison import (
    Assertion,
    Broken,
    Cause,
    Row,
    Sample,
    Spread,
    Step,
    Variant,
    compare,
)  # fmt: skip
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    UsageError,
    brief,
    errors,
    not_ready,
    usage,
)  # fmt: skip
from launcher.evidence import Evidence, RankRecord
from launcher.options import EXPECT, SWITCHED
from launcher.overrides import OPTIONS, spelt
from launcher.plan import Plan
from launcher.preparation import Prepared, Request
from launcher.redaction import redact
from launcher.rundir import RunFolder
from launcher.stage import Stage
from launcher.trial import Outcome

__all__ = ["METRICS", "Bench", "Row", "Sample", "Spread", "Variant", "compare", "measure"]

BENCH_VERSION = 1
FILE, PAGE = "bench.json", "bench.html"
METRICS: Mapping[str, str] = {
    "tokens_per_second_per_gpu": "tokens/s per GPU over the steady steps, as counted, no padding",
    "seconds_per_step": "seconds, mean of the steady steps, of the slowest rank",
    "seconds_before_steps": "seconds from the training process's start to its first step",
    "tokens_per_step": "tokens without padding, all ranks, mean of the steady steps",
    "mfu": "share of the peak that the model needs: weights that multiply, and attention (as in a verdict)",
    "mfu_6n": "share of the peak by 6 x parameters x tokens; None where weights are frozen",
    "wasted_share": "share of all positions that hold no token",
    "wasted_tokens": "positions without a token, all ranks, all steps",
    "gpu_utilisation_p50": "share of the time in which a kernel ran, median over steady steps",
    "gpu_utilisation_p95": "the same, 95th percentile",
    "peak_allocated_gib": "peak of torch's allocated memory, GiB, on the fullest rank",
    "peak_reserved_gib": "peak of torch's reserved memory, GiB, on the fullest rank",
    "loss_per_token": "mean loss of all tokens that the trial has seen (DPO: of all rows)",
    "steps": "optimizer steps done",
    "steady_steps": "those that the speed was taken from",
    "tokens": "tokens without padding, all ranks, all steps",
}
"""What a sample's metrics are; every one is always there, None where nobody can know it."""

AGAIN: tuple[Cause, ...] = ("refused", "interrupted")
"""What is tried again when the same comparison goes on: it says nothing of the setting."""
_LONGEST_S = 366 * 24 * 3600.0
_NOT_OF_A_TRIAL = frozenset({"name", "batch", "slurm", "skypilot"})
"""Options that a trial does not see; `batch` comes to arguments."""


# --- one trial ------------------------------------------------------------------------------------


def measure(
    request: Request, variant: Variant, *, steps: int, root: Path, timeout_s: float | None,
    repeat: int = 0, batch: int | None = None, profile: bool = True,
) -> Sample:  # fmt: skip
    """One short real run of a variant, judged and measured; its folder is made below `root`.

    `batch` is the rows of a step that data are cut for: the largest of all variants, so that all see
    the same rows. `timeout_s` counts from this call. Without `profile` no kernels are recorded, whatever
    the file says. Never raises for a training that fails, or that cannot be started: the sample says
    so. It ends before its model is saved. INT and TERM stop the run: then its cause is `interrupted`.
    """
    began, models = time.monotonic(), root / "models"
    place = models / f"{rundir.dashed(variant.name)[:60]}-{repeat + 1}"
    busy = utilisation.Sampler()
    try:
        asked = _short(_of_variant(request, variant), steps, place, batch, profile=profile)
        prepared = preparation.prepare(replace(asked, runs=root), running=True)
        left = None if timeout_s is None else timeout_s - (time.monotonic() - began)
        with busy:
            outcome = trial.of_prepared(prepared, timeout_s=left, allow_unproven=True, quiet=True)
    except LaunchError as error:
        stops = errors(error.findings) or error.findings
        reason = "; ".join(finding.message for finding in stops)
        return Sample(variant=variant.name, repeat=repeat, cause="refused", reason=reason)
    finally:
        # all of it: one that was killed before may have left its own
        shutil.rmtree(models, ignore_errors=True)
    return sample_of(outcome, variant.name, repeat, busy.readings)


def _of_variant(request: Request, variant: Variant) -> Request:
    overrides = (*request.overrides, *variant.overrides)
    if variant.checkout is None:
        return replace(request, overrides=overrides)
    # whoever names commits to compare knows that they are not all the pin
    return replace(request, overrides=overrides, checkout=variant.checkout, allow_unpinned=True)


def _short(asked: Request, steps: int, place: Path, batch: int | None, *, profile: bool) -> Request:
    """The same, short and harmless, watched by the probe, stopped where it hangs, without its model."""
    stage = preparation.ask(asked, running=False).stage
    watch = stage.options.probe
    watched = ["on_hang=stop"]
    if watch is None:
        watched.append("probe=on")
    elif watch.profile is not None and not profile:
        watched.append("probe.profile=null")
    if stage.options.expect.get("loss") == "any":
        # what diverges would be compared by the steps before
        watched.append("expect.loss=finite")
    short = rehearsal.overrides(stage, steps=steps, output=place, batch=batch)
    return replace(
        asked,
        overrides=(*asked.overrides, *short, *watched),
        fresh=True,
        probe=True,
        # to gather and write a model of 7B takes 10 to 20 s of a trial
        final_save=False,
        # what a short run is warned of says nothing of the stage file
        strict=False,
    )


def sample_of(
    outcome: Outcome, variant: str, repeat: int = 0,
    readings: Sequence[utilisation.Reading] = (),
) -> Sample:  # fmt: skip
    """What one run says: its figures, or why it has none."""
    found = evidence.read_run(outcome.run.path)
    cause = _cause(outcome)
    points = outcome.verdict.points if cause == "ok" else ()
    figures = dict(outcome.verdict.metrics)
    return Sample(
        variant=variant, repeat=repeat, cause=cause,
        flaws=tuple(f"{p.name} is {p.state}" for p in points if p.ok is False),
        unproved=tuple(p.name for p in points if p.ok is None),
        reason=None if cause == "ok" else outcome.reason or "it did not come to its end",
        metrics=_metrics(found, figures, outcome.run, readings),
        curve=_curve(found, outcome.verdict.stage), run=str(outcome.run.path),
        seconds=outcome.seconds, outcome=outcome,
    )  # fmt: skip


def _cause(outcome: Outcome) -> Cause:
    """What a trial ended of, by its verdict; a flaw that let it run to its end is none."""
    if outcome.timed_out:
        return "timeout"
    if outcome.interrupted:
        return "interrupted"
    points = {point.name: point for point in outcome.verdict.points}
    if outcome.exit in (Exit.OK, Exit.VERDICT) and points["finish"].state == "completed":
        return "diverged" if points["loss"].ok is False else "ok"
    if points["memory"].state == "oom":
        return "oom"
    if points["loss"].state == "nonfinite":
        return "diverged"
    if outcome.verdict.stopped is None:
        return "crash"
    return "hang" if points["finish"].detail.get("reason") == "hang" else "contract"


def _metrics(
    found: Evidence, figures: Mapping[str, float | None], folder: RunFolder,
    readings: Sequence[utilisation.Reading],
) -> dict[str, float | None]:  # fmt: skip
    ranks = list(found.probe.ranks.values()) if found.probe else []
    steady = {record.rank: measures.steady(record) for record in ranks}
    speed, processes = figures.get("tokens_per_second"), max(1, len(ranks))
    each = None if speed is None else speed / processes
    busy = _busy(folder, ranks, readings)
    curve = _curve(found, None)
    tokens = math.fsum(step.tokens for step in curve) or None
    return {
        "tokens_per_second_per_gpu": each,
        "seconds_per_step": max(
            (statistics.fmean(known) for steps in steady.values()
             if (known := [s.seconds for s in steps if s.seconds is not None])), default=None,
        ),
        "seconds_before_steps": _before(ranks),
        "tokens_per_step": _tokens_per_step(list(steady.values())),
        "mfu": figures.get("mfu"),
        "mfu_6n": _mfu_6n(ranks, each),
        "wasted_share": figures.get("wasted_share"),
        "wasted_tokens": _sum(step.wasted for record in ranks for step in record.steps),
        "gpu_utilisation_p50": utilisation.percentile(busy, 0.5),
        "gpu_utilisation_p95": utilisation.percentile(busy, 0.95),
        "peak_allocated_gib": figures.get("peak_allocated_gib"),
        "peak_reserved_gib": figures.get("peak_reserved_gib"),
        "loss_per_token": comparison.loss_within(_curve(found, folder_stage(folder)), tokens or 0.0),
        "steps": found.last_step,
        "steady_steps": min(map(len, steady.values()), default=None),
        "tokens": tokens,
    }  # fmt: skip


def folder_stage(folder: RunFolder) -> str | None:
    """`sft` or `dpo`, as the run was started."""
    told = rundir.read_head(folder).get("stage")
    return None if told is None else str(told)


def _sum(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def _tokens_per_step(steady: Sequence[Sequence[evidence.ProbeStep]]) -> float | None:
    known = [[s.tokens for s in steps if s.tokens is not None] for steps in steady]
    return math.fsum(map(statistics.fmean, known)) if known and all(known) else None


def _before(ranks: Sequence[RankRecord]) -> float | None:
    """From when the probe was loaded to the first step: data, weights, and what is computed beforehand."""
    start, begun = (ranks[0].last(name) if ranks else None for name in ("start", "device"))
    moments = [None if event is None else event.number("t") for event in (start, begun)]
    return moments[1] - moments[0] if moments[0] is not None and moments[1] is not None else None


def _mfu_6n(ranks: Sequence[RankRecord], speed: float | None) -> float | None:
    model = ranks[0].first("model") if ranks else None
    device = ranks[0].last("device") if ranks else None
    peak = cards.peak_flops(device.text("name") if device else None)
    if model is None or peak is None or speed is None or model.number("experts"):
        return None
    size = model.number("parameters")
    return 6 * size * speed / peak if size and size == model.number("trainable") else None


def _busy(
    folder: RunFolder, ranks: Sequence[RankRecord], readings: Sequence[utilisation.Reading]
) -> list[float]:
    """The readings of this run's GPUs during its steady steps."""
    told = rundir.read_manifest(folder).get("devices")
    listed = told.get("gpus") if isinstance(told, dict) else None
    gpus = {str(one.get("id")) for one in listed or () if isinstance(one, dict)}
    begun = ranks[0].last("device") if ranks else None
    start = begun.number("t") if begun else None
    if not gpus or start is None:
        return []
    busy, steady = list[float](), {step.step for step in measures.steady(ranks[0])}
    # each step lasts from the end of the one before; the first begins when the device is noted
    for step in ranks[0].steps:
        end = start + (step.seconds or 0.0)
        if step.step in steady:
            busy += utilisation.within(readings, gpus, start, end)
        start = end
    return sorted(busy)


def _curve(found: Evidence, stage: str | None) -> tuple[Step, ...]:
    """The steps that every rank finished: tokens of all ranks, the mean of their losses."""
    by_step: dict[int, list[evidence.ProbeStep]] = {}
    ranks = found.probe.ranks if found.probe else {}
    for record in ranks.values():
        for step in record.steps:
            by_step.setdefault(step.step, []).append(step)
    curve = []
    for number in sorted(by_step):
        parts = by_step[number]
        losses = [part.loss for part in parts if part.finite and part.loss is not None]
        tokens = math.fsum(part.tokens or 0.0 for part in parts)
        rows = math.fsum(part.rows or 0.0 for part in parts)
        if len(losses) < len(ranks):
            break
        weight = rows if stage == "dpo" else tokens
        curve.append(Step(tokens, weight, math.fsum(losses) / len(losses)))
    return tuple(curve)


# --- what is to be compared -----------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Bench:
    """One comparison: what is compared, and what is known so far.

    `key` names settings, contents and machine: what was measured under another key is another
    comparison. `batch` is the rows of a step, of the largest variant. `proposed` is what a search has
    chosen, which need not be the fastest.
    """

    request: Request
    variants: tuple[Variant, ...]
    steps: int
    repeats: int
    timeout_s: float | None = None
    tolerance: float = comparison.TOLERANCE
    assertions: tuple[Assertion, ...] = ()
    key: str = ""
    batch: int | None = None
    findings: tuple[Finding, ...] = ()
    folder: Path = Path()
    samples: list[Sample] = field(default_factory=list)
    proposed: str | None = None

    @property
    def rows(self) -> list[Row]:
        """One a variant, in the order in which they were named; those without a sample are left out."""
        order = {variant.name: nth for nth, variant in enumerate(self.variants)}
        known = sorted(self.samples, key=lambda one: (order.get(one.variant, 0), one.repeat))
        rows = compare(known, self.tolerance)
        if self.proposed is None:
            return rows
        return [
            replace(row, recommended=row.standing == "faster" and row.variant == self.proposed)
            for row in rows
        ]

    @property
    def broken(self) -> list[Broken]:
        """Assertions that do not hold, judged once everything is measured."""
        rows = self.rows
        first = rows[:1] and rows[0].variant == self.variants[0].name
        return comparison.broken(self.assertions, rows) if first else []

    def order(self) -> list[tuple[int, Variant]]:
        """Every trial: round by round, every second round backwards, so that drift hits all alike."""
        return [
            (repeat, variant)
            for repeat in range(self.repeats)
            for variant in (self.variants[::-1] if repeat % 2 else self.variants)
        ]

    def due(self) -> list[tuple[int, Variant]]:
        """Trials that are still to be run: what failed for a reason of its own would fail again."""
        done = {(s.repeat, s.variant) for s in self.samples}
        failed = {s.variant for s in self.samples if not s.measured}
        return [(n, v) for n, v in self.order() if (n, v.name) not in done and v.name not in failed]

    def as_json(self) -> dict[str, Any]:
        """The record, and the data of `--format json`."""
        return {
            "bench_version": BENCH_VERSION, "key": self.key, "config": str(self.request.config),
            "overrides": list(self.request.overrides), "gpus": self.request.gpus,
            "steps": self.steps, "repeats": self.repeats, "batch": self.batch,
            "variants": [variant.as_json() for variant in self.variants],
            "compared": {
                "loss": f"mean of the probe's loss a step, weighted by {self.weights()}",
                "tokens": comparison.common_tokens(self.samples), "tolerance": self.tolerance,
                "asserted": [one.text for one in self.assertions],
            },
            "complete": not self.due(), "rows": [row.as_json() for row in self.rows],
            "broken": [one.as_json() for one in self.broken],
            "samples": [one.as_json() for one in self.samples], "folder": str(self.folder),
        }  # fmt: skip

    def weights(self) -> str:
        """What each step's loss is weighted by."""
        return "rows" if self.request.stage == "dpo" else "tokens"

    def write(self) -> None:
        """The record, whole or not at all. Raises NotReady where it cannot be written."""
        try:
            rundir.write_json(self.folder / FILE, redact(self.as_json()))
        except OSError as error:
            raise rundir.not_writable(self.folder, error.strerror) from None


def plan(
    request: Request, asked: Sequence[variants.Asked], *, steps: int, repeats: int,
    timeout_s: float | None = None, assertions: Sequence[Assertion] = (),
) -> Bench:  # fmt: skip
    """Judge every variant before the first one starts.

    The global batch stays as the file has it where a variant changes only the rows of a device; what
    the file expects of a switch follows the variant that turns it. Raises InvalidConfig with the
    findings of all variants, each with its name, NotReady, or UsageError, also for a key that bench
    itself sets.
    """
    relative = [one.text for one in assertions if one.relative]
    if relative and len(asked) < 2:
        raise usage(
            "bad-assert", f"`{brief(relative[0])}` holds the others to the first variant: there is one",
            "--vary KEY=A,B, or figures that stand by themselves: mfu>=48%",
        )  # fmt: skip
    places = checkouts.Checkouts(request)
    if any(one.split()[1] is not None for one in asked):
        request = replace(request, python=request.python or places.python())
    base = _base(request)
    prepared: list[tuple[Variant, Prepared]] = []
    found: dict[Finding, list[str]] = {}
    wrong = False
    for one in asked:
        overrides, named = one.split()
        try:
            checkout = None if named is None else places.find(named)
            variant = _adapted(request, Variant(one.name, overrides, checkout), base)
            made = preparation.prepare(_of_variant(request, variant), running=False)
        except InvalidConfig as error:
            wrong, findings = True, error.findings
        else:
            prepared.append((variant, made))
            # how long a trial is bench says; whoever names a commit knows that it is not the pin
            known = {"profile-and-steps"} | (
                {"unpinned-checkout"} if checkout is not None else set()
            )
            findings = tuple(
                f for f in made.findings if f.severity != "note" and f.code not in known
            )
        for finding in findings:
            found.setdefault(finding, []).append(one.name)
    told = tuple(_attributed(finding, names, len(asked)) for finding, names in found.items())
    if wrong:
        raise InvalidConfig(told)
    stage = prepared[0][1].plan.stage.options.stage
    batch = max(made.plan.global_batch for _, made in prepared)
    short = [
        (variant, _shortened(request, variant, made, steps, batch)) for variant, made in prepared
    ]
    varied = {variants.bare(text) for one in asked for text in one.split()[0]}
    unvaried = tuple(_unvaried(varied, prepared, short, steps))
    if refused := errors(unvaried):
        raise UsageError(refused)
    limits = [one.tolerance for one in assertions if one.tolerance is not None]
    return Bench(
        request=replace(request, stage=stage, gpus=prepared[0][1].plan.gpus),
        variants=tuple(variant for variant, _ in prepared), steps=steps, repeats=repeats,
        timeout_s=timeout_s, tolerance=min(limits, default=comparison.TOLERANCE),
        assertions=tuple(assertions),
        key=_key(prepared, steps), batch=batch,
        findings=(*told, *_noted(prepared, steps), *unvaried, *_alike(short)),
    )  # fmt: skip


def _shortened(
    request: Request, variant: Variant, made: Prepared, steps: int, batch: int
) -> Prepared:
    """A variant as its trials have it; as it is where they will be refused, which the first one says."""
    # one place for all: what differs is then the variant's own
    place = (request.runs or rundir.runs_root()) / "models"
    try:
        asked = _short(_of_variant(request, variant), steps, place, batch, profile=True)
        return preparation.prepare(asked, running=False)
    except LaunchError:
        return made


def _unvaried(
    keys: set[str], asked: Sequence[tuple[Variant, Prepared]],
    short: Sequence[tuple[Variant, Prepared]], steps: int,
) -> Iterator[Finding]:  # fmt: skip
    """Keys of which values that differ come to the same in a trial; an error unless it scales them."""
    names = short[0][1].plan.stage.entry.names
    # these follow what is asked in longer trials, and a variant may be about more than them
    scaled = {names.data, "warmup_steps"}
    for key in sorted(keys):
        wanted = dict.fromkeys(_value(made.plan.stage, key) for _, made in asked)
        had = dict.fromkeys(_value(made.plan.stage, key) for _, made in short)
        if len(had) >= len(wanted):
            continue
        come = "" if key == names.output else f": {', '.join(wanted)} come to {', '.join(had)}"
        help = "leave it out: a trial is short, watched, saves nothing and reports nowhere"
        if key == names.max_steps:
            help = f"--steps {steps} is how many each trial has"
        elif key in scaled:
            help = f"more --steps: it is scaled to the {steps} of a trial"
        told = f"`{key}` is nothing to compare, bench sets it itself{come}"
        yield Finding(
            severity="warning" if key in scaled else "error", layer="launch", code="set-by-bench",
            message=brief(told, 300), help=help,
        )  # fmt: skip


def _value(stage: Stage, key: str) -> str:
    """What a stage has for a key of an override, as text that compares."""
    first = re.split(r"[.\[]", key, maxsplit=1)[0]
    value: Any = stage.config.options
    if key == "probe":
        # a trial is always watched, by what a file says of it
        value = stage.options.probe is not None
    elif first in stage.schema.fields and first not in OPTIONS:
        value = stage.values[first]
    else:
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else spelt(value)


def _alike(short: Sequence[tuple[Variant, Prepared]]) -> Iterator[Finding]:
    """Variants whose trials are the same."""
    seen = dict[str, str]()
    for variant, made in short:
        text = json.dumps(_acting(made), sort_keys=True, default=str)
        same = seen.setdefault(text, variant.name)
        if same != variant.name:
            yield Finding(
                severity="warning", layer="launch", code="same-variant",
                message=f"[{variant.name}] its trial is the same as that of {same}: what differs is "
                "noise",
            )  # fmt: skip


def _acting(made: Prepared) -> dict[str, Any]:
    """The identity of a trial, without what does nothing in it."""
    told, stage = identity(made), made.plan.stage
    idle = {finding.key for finding in noops.find(stage.values, stage.entry)}
    # its steps are counted out
    idle.add(f"args.{stage.entry.names.epochs}")
    options = {k: v for k, v in told["options"].items() if k not in _NOT_OF_A_TRIAL}
    given = {k: v for k, v in told["arguments"].items() if f"args.{k}" not in idle}
    return {**told, "options": options, "arguments": given}


def _base(request: Request) -> Plan | None:
    """The stage file as it is written; None where only its variants stand."""
    try:
        return preparation.prepare(request, running=False).plan
    except InvalidConfig:
        return None


def _adapted(request: Request, variant: Variant, base: Plan | None) -> Variant:
    """The variant with what follows from it. Raises InvalidConfig where its batch cannot be kept."""
    asked = _of_variant(request, variant)
    # what it expects of a switch that is turned is not wrong before it has followed
    asked = replace(asked, overrides=(*asked.overrides, "on_violation=warn"))
    stage = preparation.ask(asked, running=False).stage
    changed = {variants.bare(text) for text in variant.overrides}
    more = [*_expected(asked, stage, changed), *_batch(asked, stage, changed, base)]
    return replace(variant, overrides=(*variant.overrides, *more))


def _expected(asked: Request, stage: Stage, changed: set[str]) -> Iterator[str]:
    """A file that expects packing expects none of the variant without."""
    told, entry, batch = stage.options.expect, stage.entry, stage.options.batch
    split = entry.names.per_device
    names = {
        "liger": (entry.names.liger,),
        # with one row a micro-batch packing may be asked for, and there is none
        "packing": (entry.names.packing, "padding_free", "batch", "batch.per_device", split),
    }
    rows = (batch and batch.per_device) or stage.values[split]
    on = {
        "liger": bool(stage.values.get(entry.names.liger)),
        "packing": entry.packs(stage.values, rows),
    }
    if "expect" in changed:
        return
    for point, states in SWITCHED.items():
        wanted = told.get(point)
        if not changed.intersection(names[point]) or f"expect.{point}" in changed:
            continue
        if wanted not in (None, "any") and on[point] != (wanted != "off"):
            yield f"expect.{point}={states[0 if on[point] else 1]}"
    turned = {"attn_implementation", "attention"} & changed
    if turned and told.get("attention") not in (None, "any") and "expect.attention" not in changed:
        yield f"expect.attention={_attention(asked, stage)}"


def _attention(asked: Request, stage: Stage) -> str:
    """What a verdict calls the attention that is asked for; `any` where it has no word for it."""
    chosen = preparation.prepare(asked, running=False).plan.attention
    named = str(chosen or stage.values.get("attn_implementation"))
    state = ATTENTION.get(named, named)
    return state if state in EXPECT["attention"] else "any"


def _batch(asked: Request, stage: Stage, changed: set[str], base: Plan | None) -> Iterator[str]:
    """Accumulation that keeps the rows of a step, where only the rows of a device were changed."""
    names = stage.entry.names
    settled = {names.accumulation, "batch", "batch.global"} & changed
    if (
        base is None
        or settled
        or names.per_device not in changed
        or stage.options.batch is not None
    ):
        return
    made = preparation.prepare(asked, running=False).plan
    rows = made.global_batch // made.accumulation
    if base.global_batch % rows:
        raise InvalidConfig(
            Finding(
                severity="error", layer="launch", code="impossible-batch", key=f"args.{names.per_device}",
                message=f"{rows} rows at once do not divide the global batch of {base.global_batch}",
                help=f"or say {names.accumulation} too: then the global batch is another",
            )
        )  # fmt: skip
    yield f"{names.accumulation}={base.global_batch // rows}"


def _attributed(finding: Finding, names: Sequence[str], of: int) -> Finding:
    if of == 1:
        return finding
    whose = "every variant" if len(names) == of else ", ".join(names)
    return replace(finding, message=f"[{whose}] {finding.message}")


def _noted(prepared: Sequence[tuple[Variant, Prepared]], steps: int) -> Iterator[Finding]:
    """What makes a comparison another one than it looks like."""
    first = prepared[0]
    for variant, made in prepared:
        watch = made.plan.stage.options.probe
        if watch is not None and watch.profile is not None and made.plan.gpus:
            yield from _profiled(variant.name, watch.profile, steps)
        if made.plan.global_batch != first[1].plan.global_batch:
            yield Finding(
                severity="warning", layer="launch", code="other-global-batch",
                message=f"[{variant.name}] {made.plan.global_batch} rows a step, "
                f"{first[1].plan.global_batch} in {first[0].name}: after the same tokens it has taken "
                "another number of steps, and its loss says so",
            )  # fmt: skip


def _profiled(variant: str, profile: int, steps: int) -> Iterator[Finding]:
    """A record of kernels that no step is left beside to tell the speed, or that never begins."""
    if profile > steps:
        what = f"there is no step {profile} in a run of {steps}: no kernels are recorded"
    elif not measures.tells_speed(steps, profile):
        what = (
            f"in a run of {steps} steps none is left that tells a speed: the first is warm-up, and the "
            f"record of step {profile} spoils it and the next"
        )
    else:
        return
    enough = next(n for n in itertools.count(profile) if measures.tells_speed(n, profile))
    yield Finding(
        severity="warning", layer="launch", code="profile-and-steps", key="probe.profile",
        message=f"[{variant}] {what}", help=f"--steps {enough} or more",
    )  # fmt: skip


def identity(made: Prepared) -> dict[str, Any]:
    """What a measurement is one of: settings, source, contents, packages, machine."""
    planned, source = made.plan, made.plan.stage.upstream
    # the place of the model is another in every trial
    given = {k: w for k, w in planned.arguments().items() if k != planned.stage.entry.names.output}
    return {
        "stage": planned.stage.options.stage, "backend": planned.stage.options.backend,
        "options": {k: v for k, v in planned.stage.config.options.items() if k != "name"},
        "arguments": given, "gpus": planned.gpus, "source": source.version,
        "changed": checkouts.edits(source.root) if not source.pinned else None,
        "contents": contents.of_plan(planned), "python": str(made.trainer.python),
        "packages": dict(made.trainer.packages), "machine": machine.describe(),
    }  # fmt: skip


def _key(prepared: Sequence[tuple[Variant, Prepared]], steps: int) -> str:
    told = [[variant.name, identity(made)] for variant, made in prepared]
    text = json.dumps([BENCH_VERSION, steps, told], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


# --- going through with it ------------------------------------------------------------------------


def require_gpu(request: Request, *, cpu: bool) -> Request:
    """The request on the GPUs that it asks for, or on the CPU where that is said.

    Raises NotReady without a GPU, UsageError where both are asked for.
    """
    if cpu:
        refuse_gpus(request)
        return replace(request, gpus=0)
    if request.gpus == 0 or devices.look(os.environ).visible:
        return request
    raise not_ready(
        "no-gpu-here", "no GPU is to be seen here, and speed is measured on GPUs",
        "--cpu tries the mechanics: "
        "launch bench configs/demo/sft.yaml --cpu --vary batch.per_device=8,16",
    )  # fmt: skip


def refuse_gpus(request: Request) -> None:
    """Raise UsageError for what says which GPUs, beside `--cpu`."""
    for option, given in (("--gpus", request.gpus), ("--devices", request.devices)):
        if given:
            raise usage("useless-option", f"{option} says nothing with --cpu")


@contextlib.contextmanager
def opened(bench: Bench, *, fresh: bool = False, resume: bool = False) -> Iterator[Bench]:
    """The bench in its folder, with what an earlier start of the same measured.

    Raises NotReady where the folder cannot be made, or where another process is at it; UsageError where
    it is to `resume` what never began; as `require_startable` does.
    """
    root = bench.request.runs or rundir.runs_root()
    require_startable(bench, root)
    earlier = None if fresh else _earlier(bench, root)
    if resume:
        trial.require_earlier(earlier, "bench")
    bench.folder = earlier or trial.new_folder("bench", bench.request.config.stem, root)
    with trial.alone(bench.folder):
        end_left_over(bench.folder)
        told = rundir.read_json(bench.folder / FILE)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            bench.samples = [
                sample for one in told.get("samples") or ()
                if not _again(sample := Sample.from_json(one), bench.timeout_s)
            ]  # fmt: skip
        yield bench


def require_startable(bench: Bench, root: Path) -> None:
    """Judge every variant's trial for a start on this machine, whatever its GPUs do now.

    Raises InvalidConfig with what is wrong with any of them, each with its name, and what nothing here is
    ready for; a single variant that this machine is not ready for is left to its trial, which says so.
    """
    wrong: dict[Finding, list[str]] = {}
    unready: dict[Finding, list[str]] = {}
    refused = 0
    for variant in bench.variants:
        place = root / "models"
        try:
            asked = _short(
                _of_variant(bench.request, variant), bench.steps, place, bench.batch, profile=True
            )
            # a trial that a killed command left may have the GPUs: it is ended later
            asked = replace(asked, runs=root, elsewhere=True)
            rundir.release(preparation.prepare(asked, running=True).folder)
        except LaunchError as error:
            refused += 1
            found = wrong if isinstance(error, InvalidConfig) else unready
            for finding in errors(error.findings) or error.findings:
                found.setdefault(finding, []).append(variant.name)
    of = len(bench.variants)
    if wrong:
        raise InvalidConfig(_attributed(one, names, of) for one, names in wrong.items())
    if unready and refused == of:
        raise NotReady(_attributed(one, names, of) for one, names in unready.items())


def end_left_over(folder: Path) -> None:
    """Stop a trial whose command was killed: nobody waits for it, and it has the GPUs of the next."""
    for run in rundir.newest_first(folder):
        if runner.alive(run.path) or claim.held(run):
            with contextlib.suppress(LaunchError, OSError):
                stopping.stop(run, waits=(5, 5, 5))


def _again(sample: Sample, timeout_s: float | None) -> bool:
    """Whether a trial is to be run again: nothing of it was measured, or it gets more time now."""
    longer = timeout_s is None or timeout_s > sample.seconds
    return sample.cause in AGAIN or (sample.cause == "timeout" and longer)


def _earlier(bench: Bench, root: Path) -> Path | None:
    records = trial.records("bench", FILE, root)
    return next((folder for folder, told in records if told.get("key") == bench.key), None)


def run(bench: Bench, *, told: Callable[[str], None] = lambda _: None) -> Exit:
    """Run every trial that is due; the record is up to date after each. Returns the exit code.

    Needs `opened`. What the user stops ends the comparison, whatever else happens only its trial.
    """
    bench.write()
    try:
        with trial.unwatched():
            while due := bench.due():
                repeat, variant = due[0]
                told(f"{variant.name}, run {repeat + 1} of {bench.repeats} ({len(due)} to go)")
                sample = measure(
                    bench.request, variant, steps=bench.steps, root=bench.folder, repeat=repeat,
                    timeout_s=bench.timeout_s, batch=bench.batch,
                )  # fmt: skip
                if sample.cause == "interrupted":
                    return Exit.INTERRUPTED
                bench.samples.append(sample)
                bench.write()
                told(f"  {_said(sample)}")
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return conclusion(bench)


def conclusion(bench: Bench) -> Exit:
    """0 where something was measured and every assertion holds."""
    if not any(sample.measured for sample in bench.samples):
        refused = all(sample.cause == "refused" for sample in bench.samples)
        return Exit.NOT_READY if refused else Exit.TRAINING
    unproven = bench.assertions and not any(s.measured for s in _of_first(bench))
    return Exit.VERDICT if bench.broken or unproven else Exit.OK


def interrupted(bench: Bench) -> list[str]:
    """What is left to do where the user has stopped it."""
    done = len(bench.samples)
    return [
        f"interrupted: the same command goes on here, {done} of {done + len(bench.due())} runs are done",
        f"runs: {bench.folder / FILE}",
    ]


def _of_first(bench: Bench) -> list[Sample]:
    return [sample for sample in bench.samples if sample.variant == bench.variants[0].name]


def _said(sample: Sample) -> str:
    if not sample.measured:
        return f"{sample.cause}: {sample.reason}"
    speed, loss = (sample.metrics.get(k) for k in ("tokens_per_second_per_gpu", "loss_per_token"))
    shown = "no speed" if speed is None else f"{speed:,.0f} tokens/s per GPU"
    return f"{shown}, loss {'unknown' if loss is None else format(loss, '.4f')}, {sample.seconds:.0f} s"


def seconds(text: str | None) -> float | None:
    """`90`, `90s`, `10m`, `1h30m` in seconds. Raises UsageError for what is no time."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    total = 0.0
    if found is not None:
        total = sum(float(n or 0) * u for n, u in zip(found.groups(), (3600, 60, 1), strict=True))
    # timers take no more than the platform's
    if not 0 < total <= _LONGEST_S:
        raise usage("bad-time", f"`{brief(text)}` is no time", "such as 90s, 10m or 1h30m")
    return total
