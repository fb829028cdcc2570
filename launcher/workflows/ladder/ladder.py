"""`launch ladder`: the same stage, short, on more and more GPUs: each rung gated, then go or no-go.

`ladder.json` keeps what every rung showed: the same command continues there. Rungs that passed are
not repeated, and are judged by the gates of now.
"""

import contextlib
import functools
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts import lengths
from launcher.cache import inputs
from launcher.config.load import spell_override
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    launch_finding,
    not_ready,
    select_errors,
    usage,
)
from launcher.lazy_dataclass import dataclass
from launcher.machine import python
from launcher.plan.plan import Plan
from launcher.planning import check, collect, forecast, prepare
from launcher.planning.collect import Facts, Scope
from launcher.planning.forecast import ForecastOptions
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.redaction import Redactor
from launcher.report import console
from launcher.report.page import Lead
from launcher.runs import rundir
from launcher.runs.record import Record, as_mapping
from launcher.stage import gates
from launcher.stage.gates import Flag, RungFacts
from launcher.stage.stage import Stage
from launcher.verdict.metrics import REWARDS
from launcher.workflows import experiment
from launcher.workflows.ladder.short import check_short_run, list_short_overrides

RECORD = rundir.LADDER_RECORD
_MODELS = "models"
"""The folder of a ladder into which a rung saves; it is removed when the rung has ended."""
_NOT_IN_KEY = ("gates", "slurm")
"""Options of a stage file that change nothing of what a rung does."""
_NAMES_DEEPSPEED = ("deepspeed=", "deepspeed_config=", "open_instruct.deepspeed_config=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rung that was run, now or `before`, what the gates say of it, and its run's record."""

    gpus: int
    facts: RungFacts
    flags: tuple[Flag, ...]
    efficiency: float | None
    record: Mapping[str, Any]
    before: bool = False

    @property
    def passed(self) -> bool:
        return gates.find_worst_colour(self.flags) != "red"

    def as_json(self) -> dict[str, object]:
        facts = self.facts
        losses = facts.losses or (None,)
        return {
            "rung": format_gpus(self.gpus),
            **self.record,
            "before": self.before,
            "go": self.passed,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "tokens_per_second": facts.tokens_per_second,
            "efficiency": self.efficiency,
            "step_seconds": facts.step_seconds,
            "peak_allocated_gib": facts.allocated_gib,
            "peak_reserved_gib": facts.reserved_gib,
            "planned_gib": facts.planned_gib,
            "flags": [flag.as_json() for flag in self.flags],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRun:
    """The full run from a measured step; hours and cost are None if its steps are unknown."""

    gpus: int
    steps: int | None
    hours: float | None = None
    cost: float | None = None
    formula: str

    def line(self) -> str:
        if self.hours is None:
            return f"full run: {self.formula}"
        text = f"full run on {format_gpus(self.gpus)}: {_format_hours(self.hours)}"
        if self.cost is not None:
            text += f", costs {self.cost:,.2f}"
        return f"{text}  ({self.formula})"


@dataclass(slots=True, kw_only=True)
class Ladder:
    """A valid stage, its plan for each rung, the rungs, and how far it went.

    `rungs` are prepared anew when their turn comes. `records` is what each rung showed, by its
    GPUs. `exit` is that of the command, `reason` why it is no go.
    """

    resolved: Facts
    plans: Mapping[int, Plan]
    rungs: tuple[Prepared, ...]
    steps: int
    terms: ForecastOptions
    campaign: experiment.Campaign
    findings: tuple[Finding, ...]
    folder: Path = Path()
    records: dict[str, Any] = field(default_factory=dict)
    standings: list[Standing] = field(default_factory=list)
    exit: Exit = Exit.OK
    reason: str | None = None
    estimate: FullRun | None = None
    page: Path | None = None

    @property
    def stage(self) -> Stage:
        return self.resolved.stage

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of its stage."""
        return self.stage.config.redactor

    def as_json(self) -> dict[str, object]:
        return {
            "folder": str(self.folder),
            "go": self.exit is Exit.OK,
            "reason": self.reason,
            "rungs": [standing.as_json() for standing in self.standings],
            "estimate": self.estimate and asdict(self.estimate),
            "report": None if self.page is None else str(self.page),
        }

    def write(self) -> None:
        """Write `ladder.json`. Raises NotReady if that is impossible."""
        record = {
            "version": 1,
            "key": self.campaign.key,
            "config": str(self.stage.config.path),
            "steps": self.steps,
            "rungs": self.records,
        }
        experiment.write(self.folder / RECORD, record, self.redactor)


def format_gpus(gpus: int) -> str:
    if gpus == 0:
        return "CPU"
    if gpus == 1:
        return "1 GPU"
    return f"{gpus} GPUs"


def _format_short_label(gpus: int) -> str:
    return f"{gpus}gpu" if gpus else "cpu"


def make_forecast_options(
    gpus: Sequence[int], *, price: float | None, rows: int | None, row_tokens: str | None
) -> ForecastOptions:
    """What the full run is forecast by. Raises UsageError."""
    if price is not None and not 0 < price < math.inf:
        raise usage("bad-price", f"--price is more than 0, not {price:g}")
    if price is not None and not any(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    if row_tokens is not None:
        lengths.parse(row_tokens)
    return ForecastOptions(price=price, rows=rows, row_tokens=row_tokens)


def plan_rungs(
    request: Request,
    gpus: Sequence[int],
    *,
    steps: int,
    terms: ForecastOptions,
    scope: Scope = Scope.START,
) -> Ladder:
    """All rungs, validated and planned before the first starts.

    Raises InvalidConfig, NotReady or UsageError.
    """
    resolved = collect.collect(replace(request, gpus=max(gpus)), scope)
    stage = resolved.stage
    if resolved.look is not None and max(gpus) > len(resolved.look.visible):
        visible = len(resolved.look.visible)
        message = f"the rung of {format_gpus(max(gpus))} needs more than the {visible} here"
        raise not_ready("too-few-gpus", message, f"--gpus up to {visible}; 0 trains on the CPU")
    full = {
        count: check.plan_with_findings(resolved, gpus=count, rows=terms.rows) for count in gpus
    }
    findings = [finding for plan in full.values() for finding in plan.stage.findings]
    if select_errors(findings):
        raise InvalidConfig(tuple(dict.fromkeys(findings)))
    findings += check_short_run(stage, steps)
    # all rungs read the same slice: that of the one with most rows a step
    batch = max(plan.global_batch for plan in full.values())
    rungs = []
    for count in gpus:
        rung = _plan_rung(resolved, count, steps=steps, batch=batch)
        predicted = _predict_run(rung.plan, resolved, terms)
        if count == 1:
            needed = predicted or _predict_static_memory(rung.plan, resolved, terms)
            alone = _plan_without_deepspeed(resolved, needed, terms, steps=steps, batch=batch)
            if alone is not None:
                rung, note = alone
                findings.append(note)
                predicted = _predict_run(rung.plan, resolved, terms)
        rungs.append(rung)
        if predicted is not None:
            findings += predicted.findings
        # notes on the short stage are not about the file
        for finding in (*rung.plan.findings, *rung.warnings):
            if finding.severity != "note":
                findings.append(finding)
    findings += _compare_batches(stage, rungs)
    stopping = select_errors(findings, strict=request.strict)
    if stopping:
        raise InvalidConfig(stopping)
    key = ""
    # a dry run reads no model and no data
    if resolved.packages is not None:
        key = _compute_key(resolved, full[gpus[0]], steps)
    name = stage.config.redactor.redact(stage.name)
    root = rundir.find_runs_root()
    return Ladder(
        resolved=resolved,
        plans=full,
        rungs=tuple(rungs),
        steps=steps,
        terms=terms,
        campaign=experiment.Campaign(kind="ladder", key=key, name=name, root=root),
        findings=tuple(dict.fromkeys(findings)),
    )


def _plan_rung(resolved: Facts, gpus: int, *further: str, steps: int, batch: int) -> Prepared:
    """Plan the short run on so many GPUs, with `further` overrides. Raises what prepare raises."""
    stage = resolved.stage
    suffix = _format_short_label(gpus)
    output = rundir.find_runs_root() / _MODELS / suffix
    name = json.dumps(f"{stage.name}-{suffix}", ensure_ascii=False)
    overrides = [*list_short_overrides(stage, steps=steps, output=output, batch=batch)]
    overrides.append(f"name={name}")
    if stage.config.options.get("on_hang") is None:
        # nobody looks on, and the next rung waits
        overrides.append("on_hang=stop")
    short = resolved.with_overrides(*overrides, *further, gpus=gpus, fresh=True, strict=False)
    # a rung that a killed command left may have the GPUs: it is ended later
    return prepare.complete(short.without_gpus())


def _compare_batches(stage: Stage, rungs: Sequence[Prepared]) -> list[Finding]:
    if len({rung.plan.global_batch for rung in rungs}) == 1:
        return []
    sizes = [f"{rung.plan.global_batch} on {format_gpus(rung.plan.gpus)}" for rung in rungs]
    message = f"the rungs train with different global batches: {', '.join(sizes)}"
    help = "`batch: {global: N, per_device: M}` keeps it, and accumulation follows from --gpus"
    place = stage.config.origin("batch").place
    key = "batch.global"
    return [launch_finding("warning", "batch-not-constant", message, help, key=key, **place)]


def _compute_key(resolved: Facts, plan: Plan, steps: int) -> str:
    """Equal for equal stage, source, content, length, packages and GPU, whatever the rungs are."""
    stage = resolved.stage
    options = dict(stage.config.options)
    for name in _NOT_IN_KEY:
        options.pop(name, None)
    present = resolved.look.present if resolved.look else ()
    about = {
        "options": options,
        "args": dict(stage.args),
        "steps": steps,
        "source": stage.upstream.as_json(),
        # data, model and code are the same for every number of GPUs
        "contents": inputs.record_inputs(plan),
        "gpu": present[0].name if present else None,
        "packages": {name: resolved.trainer.packages.get(name) for name in python.DECISIVE},
    }
    return experiment.digest_values(about)


def _predict_run(plan: Plan, resolved: Facts, terms: ForecastOptions) -> forecast.Estimate | None:
    """The forecast for one rung; None on the CPU, and if shape or row lengths are unknown."""
    if not plan.gpus:
        return None
    try:
        return forecast.forecast_plan(plan, resolved.trainer.packages, terms)
    except (LaunchError, OSError):
        return None


def _plan_without_deepspeed(
    resolved: Facts,
    needed: forecast.Estimate | None,
    terms: ForecastOptions,
    *,
    steps: int,
    batch: int,
) -> tuple[Prepared, Finding] | None:
    """The rung of one GPU without DeepSpeed if only so it fits, and the note `deepspeed-off`.

    DeepSpeed keeps copies of the weights in float32, which one process shares with no other.
    `needed` is the forecast with it.
    """
    stage = resolved.stage
    name = stage.options.deepspeed_name
    is_named = any(text.startswith(_NAMES_DEEPSPEED) for text in stage.config.overrides)
    # without it one process of DPO has no process group
    # (dpo_utils.py::build_reference_logprobs_cache[dist.barrier #1])
    if stage.options.deepspeed is None or is_named or stage.entry.needs_process_group:
        return None
    if needed is None or not _lacks_memory(needed):
        return None
    changes = ["deepspeed=none"]
    rung = _plan_rung(resolved, 1, *changes, steps=steps, batch=batch)
    lower = _predict_run(rung.plan, resolved, terms)
    lower = lower or _predict_static_memory(rung.plan, resolved, terms)
    if lower is None or _lacks_memory(lower):
        return None
    assert needed.memory is not None
    message = (
        "the rung of 1 GPU runs without DeepSpeed, with which it would need "
        f"{needed.memory.peak:.1f} GiB of {needed.card.gib:.1f}"
    )
    if _loses_steps(rung.plan):
        message += (
            ": do not compare its loss with that of the other rungs, which keep copies of the "
            "weights in float32"
        )
        if "weights" not in stage.options.expect:
            changes.append("expect.weights=any")
            rung = _plan_rung(resolved, 1, *changes, steps=steps, batch=batch)
    help = f"`deepspeed={name}` on the command line keeps it"
    place = stage.config.origin("deepspeed").place
    note = launch_finding("note", "deepspeed-off", message, help, key="deepspeed", **place)
    return rung, note


def _predict_static_memory(
    plan: Plan, resolved: Facts, terms: ForecastOptions
) -> forecast.Estimate | None:
    """The forecast for rows of any length, without activations; None if the shape is unknown."""
    try:
        return forecast.forecast_static_memory(plan, resolved.trainer.packages, terms)
    except (LaunchError, OSError):
        return None


def _lacks_memory(predicted: forecast.Estimate) -> bool:
    return predicted.spare is not None and predicted.spare < 0


def _loses_steps(plan: Plan) -> bool:
    """Whether most steps of the weights round to nothing."""
    return any(finding.code == "steps-rounded" for finding in plan.all_findings)


def climb(
    ladder: Ladder, *, fresh: bool = False, allow_unproven: bool = False, quiet: bool = False
) -> None:
    """Run the rungs that have not passed yet, in turn, until one does not.

    INT and TERM stop the rung that runs, and nothing follows; losing the terminal stops nothing.
    Raises NotReady.
    """
    with ladder.campaign.opened(fresh=fresh) as ladder.folder:
        ladder.records = dict(Record(rundir.read_json(ladder.folder / RECORD)).part("rungs"))
        ladder.write()
        with experiment.interruptible() as stop:
            for rung in ladder.rungs:
                _climb_rung(ladder, rung, allow_unproven=allow_unproven, quiet=quiet)
                if ladder.exit is not Exit.OK:
                    break
        if stop.requested:
            ladder.exit = Exit.INTERRUPTED
            rung = ladder.rungs[len(ladder.standings)]
            ladder.reason = f"{format_gpus(rung.plan.gpus)}: interrupted"
        if ladder.exit is Exit.OK:
            ladder.estimate = _estimate_full_run(ladder, ladder.standings[-1])
        runs = [Path(str(standing.record.get("run"))) for standing in ladder.standings]
        with contextlib.suppress(LaunchError):
            ladder.page = experiment.write_page(
                runs, ladder.folder / "report.html", _build_lead(ladder)
            )


def _climb_rung(ladder: Ladder, rung: Prepared, *, allow_unproven: bool, quiet: bool) -> None:
    """Run a rung unless it has passed before. Raises KeyboardInterrupt."""
    gpus = rung.plan.gpus
    standing = _judge_record(ladder, gpus, allow_unproven=allow_unproven)
    if standing is None or not standing.passed:
        if not quiet:
            number = len(ladder.standings) + 1
            console.say(f"rung {number} of {len(ladder.rungs)}: {format_gpus(gpus)}")
        ladder.records[str(gpus)] = _run_rung(ladder, rung, quiet=quiet)
        ladder.write()
        standing = _judge_record(ladder, gpus, allow_unproven=allow_unproven)
        assert standing is not None
        standing = replace(standing, before=False)
    ladder.standings.append(standing)
    if not standing.passed:
        reds = "; ".join(flag.text for flag in standing.flags if flag.colour == "red")
        ladder.reason = f"{format_gpus(gpus)}: {reds}"
        ladder.exit = Exit.VERDICT
        if standing.record.get("exit") == Exit.TRAINING:
            ladder.exit = Exit.TRAINING


def _run_rung(ladder: Ladder, rung: Prepared, *, quiet: bool) -> dict[str, object]:
    """Run a rung now, and return its record. Raises KeyboardInterrupt."""
    models = ladder.folder / _MODELS
    output = spell_override(str(models / _format_short_label(rung.plan.gpus)))
    place = f"{rung.plan.stage.entry.names.output}={output}"
    facts = rung.facts.with_overrides(place, runs=ladder.folder)
    prepared = prepare.complete(facts.look_again())
    if not quiet:
        # its findings were shown with those of all rungs
        console.print_plan(prepared.plan, prepared.folder.console(prepared.attempt))
    outcome = experiment.run_prepared(prepared)
    # weights after so few steps are useless, and large
    shutil.rmtree(models, ignore_errors=True)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return {**outcome.as_json(), "facts": asdict(_collect_facts(prepared, outcome, ladder))}


def _judge_record(ladder: Ladder, gpus: int, *, allow_unproven: bool) -> Standing | None:
    """Judge a rung by its record; None if it has no readable record."""
    record = dict(as_mapping(ladder.records.get(str(gpus))))
    try:
        facts = RungFacts.from_json(record.pop("facts", None))
    except ValueError:
        return None
    record.pop("metrics", None)
    if facts.unproven is not None and not allow_unproven:
        facts = replace(facts, failed=f"unproven: {facts.unproven}", unproven=None)
    earlier = [standing.facts for standing in ladder.standings]
    # a GPU is not measured against a CPU
    alike = [rung for rung in earlier if rung.accelerated == facts.accelerated]
    base = alike[0] if alike else facts
    return Standing(
        gpus=gpus,
        facts=facts,
        flags=tuple(gates.judge_rung(facts, ladder.stage.options.gates, base)),
        efficiency=gates.compute_efficiency(facts, base),
        before=True,
        record=record,
    )


def _build_lead(ladder: Ladder) -> Lead:
    flags = []
    for standing in ladder.standings:
        rung = format_gpus(standing.gpus)
        for flag in standing.flags:
            flags.append({"rung": rung, "gate": flag.gate, "is": flag.colour, "why": flag.text})
    lines = []
    if ladder.reason:
        lines.append(f"no-go: {ladder.reason}")
    if ladder.estimate is not None:
        lines.append(ladder.estimate.line())
    go = ladder.exit is Exit.OK
    return Lead(
        title=f"ladder {ladder.stage.name}",
        decision="go" if go else "no-go",
        colour="pass" if go else "fail",
        tables=([_build_row(standing) for standing in ladder.standings], flags),
        lines=lines,
    )


def _collect_facts(prepared: Prepared, outcome: experiment.Outcome, ladder: Ladder) -> RungFacts:
    plan = outcome.plan
    verdict = outcome.verdict
    metrics = verdict.metrics
    rows = files.read_lines(outcome.run.metrics)
    seconds = _read_column(rows, ("seconds",))
    speed = metrics.get("tokens_per_second") or metrics.get("logged_tokens_per_second")
    failed = outcome.reason
    unproven = None
    if verdict.status == "unproven" and outcome.exit is Exit.VERDICT:
        failed = None
        unproven = outcome.reason
    planned_gib = None
    # row lengths may have become known by the run
    predicted = _predict_run(prepared.plan, ladder.resolved, ladder.terms)
    if predicted is not None and predicted.memory is not None:
        planned_gib = predicted.memory.peak
    trend = None
    # the rung itself expects no trend: it is too short for what a verdict asks
    if ladder.stage.options.expect.get("trend") == "falling":
        for point in verdict.points:
            if point.name == "trend":
                trend = point.state
    return RungFacts(
        stage=plan.stage.options.stage,
        devices=plan.processes,
        accelerated=bool(plan.gpus),
        losses=_read_column(rows, ("loss",)),
        norms=_read_column(rows, ("grad_norm",)),
        accuracies=_read_column(rows, REWARDS["rewards_accuracy"]),
        margins=_read_column(rows, REWARDS["rewards_margin"]),
        nonfinite=tuple(int(row["step"]) for row in rows if row.get("finite") is False),
        tokens_per_second=speed,
        step_seconds=compute_usual_step(seconds[len(seconds) // 5 :]),
        allocated_gib=metrics.get("peak_allocated_gib"),
        reserved_gib=metrics.get("peak_reserved_gib"),
        planned_gib=planned_gib,
        card_gib=_find_smallest_card_gib(prepared),
        starts_at_ln2=_starts_at_ln2(plan.stage),
        failed=failed,
        unproven=unproven,
        trend=trend,
        rounded=_loses_steps(plan),
    )


def _find_smallest_card_gib(prepared: Prepared) -> float | None:
    chosen = prepared.start.devices
    if not prepared.plan.gpus or chosen is None:
        return None
    return min((slot.gpu.memory_mib / 1024 for slot in chosen.slots), default=None)


def compute_usual_step(seconds: Sequence[float]) -> float | None:
    """The mean, so that steps of long rows count, without steps that something else held up."""
    if not seconds:
        return None
    most = 3 * statistics.median(seconds)
    return statistics.fmean(value for value in seconds if value <= most)


def _read_column(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[float, ...]:
    """The numbers of each row under the first of these names that it has."""
    column = []
    for row in rows:
        present = [row[name] for name in names if name in row]
        if present and isinstance(present[0], int | float):
            column.append(float(present[0]))
    return tuple(column)


def _starts_at_ln2(stage: Stage) -> bool:
    """Whether the first loss is -log sigmoid(0): policy and reference are still the same model."""
    values = stage.values
    if not stage.schema.pairs or values.get("load_balancing_loss"):
        return False
    kinds = values.get("loss_type")
    if not isinstance(kinds, list):
        kinds = [kinds]
    names = {str(getattr(kind, "value", kind)) for kind in kinds}
    return names <= {"dpo", "dpo_norm", "sigmoid"}


def _estimate_full_run(ladder: Ladder, top: Standing) -> FullRun:
    stage = ladder.stage
    terms = ladder.terms
    step = top.facts.step_seconds
    whole = ladder.plans[top.gpus]
    repacked = stage.entry.repacks(stage.values)
    predicted = _predict_run(whole, ladder.resolved, terms)
    if predicted is not None:
        steps = predicted.steps
    else:
        row_lengths = None
        if repacked and terms.row_tokens:
            # how many packed rows they come to depends on their lengths
            row_lengths = lengths.parse(terms.row_tokens)
        _, _, steps = forecast.count_rows_and_steps(whole, row_lengths, terms)
    if not step:
        return FullRun(gpus=top.gpus, steps=steps, formula="no step was timed")
    if not steps:
        options = []
        if whole.rows is None:
            options.append("--rows N")
        if repacked and terms.row_tokens is None:
            options.append("--row-tokens MEAN:MAX")
        why = f"its steps are not known: {' and '.join(options)}"
        return FullRun(gpus=top.gpus, steps=steps, formula=why)
    seconds = steps * step
    formula = f"{steps:,} steps x {step:.3g} s, as measured"
    # reference log-probabilities that are computed before the first step
    beforehand = stage.entry.caches_reference or stage.values.get("precompute_ref_log_probs")
    if whole.rows and stage.refers and beforehand:
        # forward only: a third of a step over as many rows
        seconds += whole.rows / whole.global_batch * step / 3
        formula += f", and {whole.rows:,} rows through the reference"
    hours = seconds / 3600
    cost = None
    if terms.price is not None and top.gpus:
        cost = hours * terms.price * top.facts.devices
    return FullRun(gpus=top.gpus, steps=steps, hours=hours, cost=cost, formula=formula)


def show(ladder: Ladder) -> None:
    say = functools.partial(console.say, redactor=ladder.redactor)
    rows = [_build_row(standing) for standing in ladder.standings]
    if rows:
        console.print_table(rows, tuple(rows[0]), ladder.redactor)
    yellow = 0
    for standing in ladder.standings:
        for flag in standing.flags:
            if flag.colour != "green":
                yellow += 1
                say(f"  {format_gpus(standing.gpus)}: {flag.colour}[{flag.gate}] {flag.text}")
    if ladder.exit is not Exit.OK:
        say(f"no-go: {ladder.reason}")
        say("the same command continues at this rung; --fresh starts over")
    elif yellow:
        say(f"go, with {yellow} yellow flag(s)")
    else:
        say("go")
    if ladder.estimate is not None:
        say(ladder.estimate.line())
    say(f"ladder: {ladder.folder}")
    if ladder.page is not None:
        say(f"report: {ladder.page}")


def _build_row(standing: Standing) -> dict[str, str | None]:
    facts = standing.facts
    record = standing.record
    loss = None
    if facts.losses:
        loss = f"{facts.losses[0]:.4g} -> {facts.losses[-1]:.4g}"
    verdict = "go" if standing.passed else "no-go"
    if standing.before:
        verdict += " (before)"
    return {
        "rung": format_gpus(standing.gpus),
        "batch": f"{record.get('per_device')} x {record.get('accumulation')} x {facts.devices}",
        "loss": loss,
        "tokens/s": _format_number(facts.tokens_per_second, ",.0f"),
        "efficiency": _format_number(standing.efficiency, ".0%"),
        "peak GiB": _format_number(facts.allocated_gib, ".1f"),
        "planned GiB": _format_number(facts.planned_gib, ".1f"),
        "verdict": verdict,
    }


def _format_hours(hours: float) -> str:
    if hours >= 0.1:
        return f"{hours:.2f} h"
    minutes = hours * 60
    if minutes >= 1:
        return f"{minutes:.1f} min"
    return f"{minutes * 60:.1f} s"


def _format_number(value: float | None, form: str) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return format(value, form)
