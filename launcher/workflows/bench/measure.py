"""One short real run of a setting, judged and measured -> `Sample`. What fails ends that trial alone."""

import itertools
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.cache import inputs
from launcher.config.keys import PAIRED
from launcher.errors import Exit, LaunchError, errors
from launcher.machine import python
from launcher.machine.git import Repository
from launcher.machine.python import Trainer
from launcher.plan.plan import Plan
from launcher.planning import prepare
from launcher.planning.collect import Facts
from launcher.runs import rundir
from launcher.verdict import evidence, metrics
from launcher.verdict.evidence import Evidence, ProbeStep
from launcher.workflows import experiment
from launcher.workflows.bench import comparison
from launcher.workflows.bench.comparison import Cause, CurveStep, Sample
from launcher.workflows.bench.variants import Variant
from launcher.workflows.experiment import Outcome
from launcher.workflows.ladder.short import short_overrides


def measure(
    facts: Facts,
    variant: Variant,
    *,
    overrides: Sequence[str] = (),
    steps: int,
    root: Path,
    timeout_s: float | None,
    repeat: int = 0,
    batch: int | None = None,
) -> Sample:
    """One short real run of a variant, judged and measured; its folder is made below `root`.

    `facts` are the variant's, whole, but for the `overrides`; `batch` the rows of a step that data are cut
    for: the largest of all variants, so that all see the same rows. `timeout_s` counts from this call. Never
    raises for a training that fails, or that cannot be started: the sample says so. It ends before its model is
    saved. Raises KeyboardInterrupt where INT or TERM stopped it, and NotReady where its folder cannot be written:
    then nothing else can be started either.
    """
    began, models = time.monotonic(), root / "models"
    place = models / f"{rundir.replace_unsafe(variant.name)[:60]}-{repeat + 1}"
    try:
        turned = facts.with_overrides(*overrides) if overrides else facts
        prepared = prepare.complete(short(turned, steps, place, batch, runs=root).look_again())
        left = None if timeout_s is None else timeout_s - (time.monotonic() - began)
        outcome = experiment.of_prepared(prepared, timeout_s=left, allow_unproven=True)
    except LaunchError as error:
        stops = errors(error.findings) or error.findings
        if any(finding.code == "runs-not-writable" for finding in stops):
            raise
        reason = "; ".join(finding.message for finding in stops)
        return Sample(variant=variant.name, repeat=repeat, cause="refused", reason=reason)
    finally:
        # all of it: one that was killed before may have left its own
        shutil.rmtree(models, ignore_errors=True)
    if outcome.interrupted:
        raise KeyboardInterrupt
    found = evidence.read_run(outcome.run.path)
    cause, points = _cause(outcome), outcome.verdict.points
    curve = _curve(found, outcome.verdict.stage)
    # why a trial ended early is in its cause; what it broke is the setting's fault
    failed = [p for p in points if p.ok is False and cause in ("ok", "contract")]
    return Sample(
        variant=variant.name,
        repeat=repeat,
        cause=cause,
        flaws=tuple(f"{p.name} is {p.state}" for p in failed),
        unproved=tuple(p.name for p in points if p.ok is None and cause == "ok"),
        gradients=next((p.state for p in points if p.name == "gradients"), None),
        reason=None if cause == "ok" else outcome.reason or "it did not come to its end",
        metrics=_metrics(found, outcome, curve),
        curve=curve,
        pace=_pace(found),
        run=str(outcome.run.path),
        seconds=outcome.seconds,
    )


def short(facts: Facts, steps: int, place: Path, batch: int | None, *, runs: Path) -> Facts:
    """The same, short and harmless, watched by the probe, stopped where it hangs, its model unsaved, for `place`."""
    stage = facts.stage
    watched = ["on_hang=stop"]
    if stage.options.probe is None:
        watched.append("probe=on")
    if stage.options.expect.get("loss") == "any":
        # what diverges would be compared by the steps before
        watched.append("expect.loss=finite")
    shorter = short_overrides(stage, steps=steps, output=place, batch=batch)
    return facts.with_overrides(
        *shorter,
        *watched,
        runs=runs,
        fresh=True,
        probe=True,
        # to gather and write a model of 7B takes 10 to 20 s of a trial
        final_save=False,
        # what a short run is warned of says nothing of the stage file
        strict=False,
    )


def _cause(outcome: Outcome) -> Cause:
    """What a trial ended of, by its verdict; a flaw that let it run to its end is none."""
    if outcome.timed_out:
        return "timeout"
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


def _metrics(found: Evidence, outcome: Outcome, curve: Sequence[CurveStep]) -> dict[str, float | None]:
    ranks = list(found.probe.ranks.values()) if found.probe else []
    figures, steady = outcome.verdict.metrics, [metrics.steady_steps(record) for record in ranks]
    speed = figures.get("tokens_per_second")
    timed = [[s.seconds for s in steps if s.seconds is not None] for steps in steady]
    counted = [[s.tokens for s in steps if s.tokens is not None] for steps in steady]
    wasted = [s.wasted for record in ranks for s in record.steps if s.wasted is not None]
    # from when the probe was loaded to the first step: data, weights, and what is computed beforehand
    events = [ranks[0].last(name) if ranks else None for name in ("start", "device")]
    start, begun = (None if event is None else event.number("t") for event in events)
    tokens = math.fsum(step.tokens for step in curve) or None
    return {
        "tokens_per_second_per_gpu": None if speed is None else speed / max(1, len(ranks)),
        "seconds_per_step": max((statistics.fmean(one) for one in timed if one), default=None),
        "seconds_before_steps": None if start is None or begun is None else begun - start,
        "tokens_per_step": math.fsum(map(statistics.fmean, counted)) if counted and all(counted) else None,
        "mfu": figures.get("mfu"),
        "wasted_share": figures.get("wasted_share"),
        "wasted_tokens": math.fsum(wasted) if wasted else None,
        "peak_allocated_gib": figures.get("peak_allocated_gib"),
        "peak_reserved_gib": figures.get("peak_reserved_gib"),
        "loss_per_token": comparison.within(curve, tokens or 0.0)[0],
        "steps": found.last_step,
        "steady_steps": min(map(len, steady), default=None),
        "tokens": tokens,
    }


def _by_step(some: Iterable[Iterable[ProbeStep]]) -> Iterator[list[ProbeStep]]:
    by_step: dict[int, list[ProbeStep]] = {}
    for step in itertools.chain.from_iterable(some):
        by_step.setdefault(step.step, []).append(step)
    return (parts for _, parts in sorted(by_step.items()))


def _pace(found: Evidence) -> tuple[float, ...]:
    """Seconds a token of each steady step: of the slowest rank, over the tokens of all."""
    ranks = found.probe.ranks.values() if found.probe else ()
    pace = []
    for parts in _by_step(map(metrics.steady_steps, ranks)):
        seconds = max(part.seconds or 0.0 for part in parts)
        tokens = math.fsum(part.tokens or 0.0 for part in parts)
        pace.append(seconds / tokens if tokens else 0.0)
    return tuple(pace) if all(pace) else ()


def _curve(found: Evidence, stage: str | None) -> tuple[CurveStep, ...]:
    """The steps that every rank finished: tokens of all ranks, the mean of their losses."""
    ranks = found.probe.ranks if found.probe else {}
    curve = []
    for parts in _by_step(record.steps for record in ranks.values()):
        losses = [part.loss for part in parts if part.finite and part.loss is not None]
        if len(losses) < len(ranks):
            break
        tokens = math.fsum(part.tokens or 0.0 for part in parts)
        weight = math.fsum(part.rows or 0.0 for part in parts) if stage in PAIRED else tokens
        # an engine's norm is of all ranks' gradients, and the same on each
        norm, micro_batches = parts[0].grad_norm, parts[0].micro_batches
        curve.append(CurveStep(tokens, weight, math.fsum(losses) / len(losses), norm, micro_batches))
    return tuple(curve)


def identity(planned: Plan, trainer: Trainer) -> dict[str, Any]:
    """What a measurement is one of: settings, source, contents, packages, machine."""
    stage = planned.stage
    source, output = stage.upstream, stage.entry.names.output
    edited = not source.pinned and source.root is not None and Repository(source.root).ask("diff", "HEAD")
    return {
        "stage": stage.options.stage,
        "backend": stage.options.backend,
        "options": {k: v for k, v in stage.config.options.items() if k != "name"},
        # the place of the model is another in every trial
        "arguments": {k: v for k, v in {**planned.arguments(), **planned.file_arguments()}.items() if k != output},
        "gpus": planned.gpus,
        "source": source.version,
        "changed": edited or None,
        "contents": inputs.of_plan(planned),
        "python": str(trainer.python),
        "packages": dict(trainer.packages),
        "machine": python.describe(),
    }
