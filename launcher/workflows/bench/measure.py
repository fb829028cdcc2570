"""One short real run of a setting -> `Sample`; a failure ends that trial alone."""

import math
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.cache import inputs
from launcher.config.keys import PAIRED
from launcher.errors import Exit, LaunchError, select_errors
from launcher.machine import python
from launcher.machine.git import Repository
from launcher.machine.python import Trainer
from launcher.plan.plan import Plan
from launcher.planning import prepare
from launcher.planning.collect import Facts
from launcher.runs import rundir
from launcher.verdict import evidence, metrics
from launcher.verdict.evidence import ProbeStep, RankRecord
from launcher.workflows import experiment
from launcher.workflows.bench import comparison
from launcher.workflows.bench.comparison import Cause, CurveStep, Sample
from launcher.workflows.bench.variants import Variant
from launcher.workflows.experiment import Outcome
from launcher.workflows.ladder.short import list_short_overrides


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
    """Run a variant for some steps, judge and measure it; its run folder is made below `root`.

    `facts` are the variant's but for the `overrides`; `batch` is the rows of a step that data are
    cut for: the largest of all variants, so that all see the same rows. `timeout_s` counts from
    this call. A training that fails, or cannot start, is no error: the sample says so. The model is
    not saved. Raises KeyboardInterrupt if INT or TERM stopped it, and NotReady if its folder cannot
    be written, as then nothing else can start either.
    """
    began = time.monotonic()
    models = root / "models"
    place = models / f"{rundir.replace_unsafe(variant.name)[:60]}-{repeat + 1}"
    try:
        if overrides:
            facts = facts.with_overrides(*overrides)
        trial = shorten_run(facts, steps, place, batch, runs=root).look_again()
        prepared = prepare.complete(trial)
        if timeout_s is not None:
            timeout_s -= time.monotonic() - began
        outcome = experiment.run_prepared(prepared, timeout_s=timeout_s, allow_unproven=True)
    except LaunchError as error:
        stops = select_errors(error.findings) or error.findings
        if any(finding.code == "runs-not-writable" for finding in stops):
            raise
        reason = "; ".join(finding.message for finding in stops)
        return Sample(variant=variant.name, repeat=repeat, cause="refused", reason=reason)
    finally:
        # all of it: a trial that was killed may have left its model
        shutil.rmtree(models, ignore_errors=True)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return _build_sample(variant, repeat, outcome)


def _build_sample(variant: Variant, repeat: int, outcome: Outcome) -> Sample:
    verdict = outcome.verdict
    probe = evidence.read_run(outcome.run.path).probe
    ranks = list(probe.ranks.values()) if probe else []
    cause = _find_cause(outcome)
    curve = _build_curve(ranks, paired=verdict.stage in PAIRED)
    flaws = []
    unproved = []
    gradients = None
    for point in verdict.points:
        # of a trial that ended early, the cause says why
        if point.ok is False and cause in ("ok", "contract"):
            flaws.append(f"{point.name} is {point.state}")
        if point.ok is None and cause == "ok":
            unproved.append(point.name)
        if point.name == "gradients":
            gradients = point.state
    reason = None
    if cause != "ok":
        reason = outcome.reason or "it did not come to its end"
    return Sample(
        variant=variant.name,
        repeat=repeat,
        cause=cause,
        flaws=tuple(flaws),
        unproved=tuple(unproved),
        gradients=gradients,
        reason=reason,
        metrics=_compute_metrics(ranks, outcome, curve),
        curve=curve,
        pace=_compute_pace(ranks),
        run=str(outcome.run.path),
        seconds=outcome.seconds,
    )


def shorten_run(facts: Facts, steps: int, place: Path, batch: int | None, *, runs: Path) -> Facts:
    """The facts of a short run into `place`: probed, stopped if it hangs, its model unsaved."""
    stage = facts.stage
    watched = ["on_hang=stop"]
    if stage.options.probe is None:
        watched.append("probe=on")
    if stage.options.expect.get("loss") == "any":
        # a run that diverges would be compared by the steps before
        watched.append("expect.loss=finite")
    shorter = list_short_overrides(stage, steps=steps, output=place, batch=batch)
    return facts.with_overrides(
        *shorter,
        *watched,
        runs=runs,
        fresh=True,
        probe=True,
        # gathering and writing a model of 7B takes 10 to 20 s of a trial
        final_save=False,
        # warnings about a short run are not about the stage file
        strict=False,
    )


def _find_cause(outcome: Outcome) -> Cause:
    """How a trial ended, by its verdict; a flaw that let it run to its end is no cause."""
    if outcome.timed_out:
        return "timeout"
    points = {point.name: point for point in outcome.verdict.points}
    finish = points["finish"]
    if outcome.exit in (Exit.OK, Exit.VERDICT) and finish.state == "completed":
        if points["loss"].ok is False:
            return "diverged"
        return "ok"
    if points["memory"].state == "oom":
        return "oom"
    if points["loss"].state == "nonfinite":
        return "diverged"
    if outcome.verdict.stopped is None:
        return "crash"
    if finish.detail.get("reason") == "hang":
        return "hang"
    return "contract"


def _compute_metrics(
    ranks: Sequence[RankRecord], outcome: Outcome, curve: Sequence[CurveStep]
) -> dict[str, float | None]:
    figures = outcome.verdict.metrics
    speed = figures.get("tokens_per_second")
    if speed:
        speed /= max(1, len(ranks))
    seconds: list[float | None] = []
    tokens: list[float | None] = []
    steady_counts = []
    wasted: list[float] = []
    for record in ranks:
        steady = metrics.select_steady_steps(record)
        steady_counts.append(len(steady))
        seconds.append(_compute_mean(step.seconds for step in steady))
        tokens.append(_compute_mean(step.tokens for step in steady))
        wasted += _select_numbers(step.wasted for step in record.steps)
    tokens_per_step = None
    if None not in tokens:
        tokens_per_step = math.fsum(_select_numbers(tokens)) or None
    loss, _ = comparison.mean_within(curve, math.fsum(step.tokens for step in curve))
    return {
        comparison.SPEED: speed,
        "seconds_per_step": max(_select_numbers(seconds), default=None),
        "seconds_before_steps": _measure_startup(ranks),
        "tokens_per_step": tokens_per_step,
        "mfu": figures.get("mfu"),
        "wasted_share": figures.get("wasted_share"),
        "wasted_tokens": math.fsum(wasted) if wasted else None,
        "peak_allocated_gib": figures.get("peak_allocated_gib"),
        comparison.LOSS: loss,
        "steps": outcome.verdict.steps,
        "steady_steps": min(steady_counts, default=None),
    }


def _select_numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _compute_mean(values: Iterable[float | None]) -> float | None:
    numbers = _select_numbers(values)
    if not numbers:
        return None
    return statistics.fmean(numbers)


def _measure_startup(ranks: Sequence[RankRecord]) -> float | None:
    """From when the probe was loaded to the first step: data, weights, precomputation."""
    if not ranks:
        return None
    start = ranks[0].last("start")
    device = ranks[0].last("device")
    if start is None or device is None:
        return None
    loaded_at = start.number("t")
    begun_at = device.number("t")
    if loaded_at is None or begun_at is None:
        return None
    return begun_at - loaded_at


def _group_by_step(steps_of_ranks: Iterable[Iterable[ProbeStep]]) -> list[list[ProbeStep]]:
    by_step: dict[int, list[ProbeStep]] = {}
    for steps in steps_of_ranks:
        for step in steps:
            by_step.setdefault(step.step, []).append(step)
    return [by_step[number] for number in sorted(by_step)]


def _compute_pace(ranks: Iterable[RankRecord]) -> tuple[float, ...]:
    """Seconds per token of each steady step: of the slowest rank, over the tokens of all."""
    pace = []
    for parts in _group_by_step(map(metrics.select_steady_steps, ranks)):
        seconds = max(part.seconds or 0.0 for part in parts)
        tokens = math.fsum(part.tokens or 0.0 for part in parts)
        if not seconds or not tokens:
            return ()
        pace.append(seconds / tokens)
    return tuple(pace)


def _build_curve(ranks: Sequence[RankRecord], *, paired: bool) -> tuple[CurveStep, ...]:
    """The steps that every rank finished: tokens of all ranks, the mean of their losses."""
    curve = []
    for parts in _group_by_step(record.steps for record in ranks):
        losses = _select_numbers(part.loss for part in parts if part.finite)
        if len(losses) < len(ranks):
            break
        tokens = math.fsum(part.tokens or 0.0 for part in parts)
        weight = tokens
        if paired:
            weight = math.fsum(part.rows or 0.0 for part in parts)
        # an engine's norm is of all ranks' gradients, and the same on each
        norm = parts[0].grad_norm
        curve.append(
            CurveStep(tokens, weight, statistics.fmean(losses), norm, parts[0].micro_batches)
        )
    return tuple(curve)


def identify_measurement(plan: Plan, trainer: Trainer) -> dict[str, Any]:
    """What makes measurements comparable: settings, source, contents, packages, machine."""
    stage = plan.stage
    source = stage.upstream
    edits = None
    if not source.pinned and source.root is not None:
        edits = Repository(source.root).ask("diff", "HEAD") or None
    options = {**stage.config.options}
    options.pop("name", None)
    arguments = {**plan.arguments(), **plan.file_arguments()}
    # the model's place differs from trial to trial
    arguments.pop(stage.entry.names.output, None)
    return {
        "stage": stage.options.stage,
        "backend": stage.options.backend,
        "options": options,
        "arguments": arguments,
        "gpus": plan.gpus,
        "source": source.version,
        "changed": edits,
        "contents": inputs.record_inputs(plan),
        "python": str(trainer.python),
        "packages": dict(trainer.packages),
        "machine": python.describe(),
    }
