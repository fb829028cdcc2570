"""`launch ladder`: the same stage, short, on more and more GPUs: each rung gated, then go or no-go.

`ladder.json` keeps what every rung showed: the same command goes on there, rungs that passed are not repeated,
and are judged by the gates of now.
"""

import contextlib
import functools
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts import lengths
from launcher.cache import inputs
from launcher.config.load import spelt
from launcher.errors import Exit, Finding, InvalidConfig, LaunchError, errors, launch_finding, not_ready, usage
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
from launcher.upstream.citations import rendered
from launcher.verdict.metrics import REWARDS
from launcher.workflows import experiment
from launcher.workflows.ladder.short import short_findings, short_overrides

RECORD = rundir.LADDER_RECORD
_MODELS = "models"
"""The folder of a ladder into which its rungs save; it goes when one has been judged."""
_OTHERWISE = ("gates", "slurm")
"""Options of a stage file that change nothing of what a rung does."""
_NAMES_DEEPSPEED = ("deepspeed=", "deepspeed_config=", "open_instruct.deepspeed_config=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rung that was run, now or `before`, what the gates say of it, and the record of its run."""

    gpus: int
    facts: RungFacts
    flags: tuple[Flag, ...]
    efficiency: float | None
    record: Mapping[str, Any]
    before: bool = False

    @property
    def passed(self) -> bool:
        return gates.colour_of(self.flags) != "red"

    def as_json(self) -> dict[str, Any]:
        facts = self.facts
        first, last = (facts.losses[0], facts.losses[-1]) if facts.losses else (None, None)
        return {
            "rung": label(self.gpus),
            **self.record,
            "before": self.before,
            "go": self.passed,
            "first_loss": first,
            "last_loss": last,
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
    """The full run from a measured step; hours and cost None where its steps are not known."""

    gpus: int
    steps: int | None
    hours: float | None = None
    cost: float | None = None
    formula: str

    def line(self) -> str:
        if self.hours is None:
            return f"full run: {self.formula}"
        cost = "" if self.cost is None else f", costs {self.cost:,.2f}"
        return f"full run on {label(self.gpus)}: {_time(self.hours)}{cost}  ({self.formula})"


@dataclass(slots=True, kw_only=True)
class Ladder:
    """A valid stage, its plan for each rung, the rungs, and how far it went.

    `rungs` were looked at, and are prepared anew when their turn comes. `records` is what each rung showed, by
    its GPUs. `exit` is that of the command, `reason` why it is no go.
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

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "go": self.exit is Exit.OK,
            "reason": self.reason,
            "rungs": [one.as_json() for one in self.standings],
            "estimate": self.estimate and asdict(self.estimate),
            "report": None if self.page is None else str(self.page),
        }

    def write(self) -> None:
        """`ladder.json`. Raises NotReady where it cannot be written."""
        stage = self.stage
        record = {
            "version": 1,
            "key": self.campaign.key,
            "config": str(stage.config.path),
            "stage": stage.options.stage,
            "backend": stage.options.backend,
            "steps": self.steps,
            "rungs": self.records,
        }
        experiment.write(self.folder / RECORD, record, self.redactor)


def label(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "CPU"


def _short_label(gpus: int) -> str:
    return f"{gpus}gpu" if gpus else "cpu"


def terms(gpus: Sequence[int], *, price: float | None, rows: int | None, row_tokens: str | None) -> ForecastOptions:
    if price is not None and not 0 < price < math.inf:
        raise usage("bad-price", f"--price is more than 0, not {price:g}")
    if price is not None and not any(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    if row_tokens is not None:
        lengths.parse(row_tokens)
    return ForecastOptions(price=price, rows=rows, row_tokens=row_tokens)


def plan_rungs(
    request: Request, gpus: Sequence[int], *, steps: int, terms: ForecastOptions, scope: Scope = Scope.START
) -> Ladder:
    """All rungs, validated and planned before the first starts. Raises InvalidConfig, NotReady or UsageError."""
    resolved = collect.collect(replace(request, gpus=max(gpus)), scope)
    stage, root = resolved.stage, rundir.runs_root()
    visible = None if resolved.look is None else len(resolved.look.visible)
    if visible is not None and max(gpus) > visible:
        message = f"the rung of {label(max(gpus))} needs more than the {visible} here"
        raise not_ready("too-few-gpus", message, f"--gpus up to {visible}; 0 trains on the CPU")
    plans = {count: check.settle(resolved, gpus=count, rows=terms.rows) for count in gpus}
    # all rungs read the same slice: that of the one with most rows a step
    batch = max(planned.global_batch for planned in plans.values())
    findings = [finding for planned in plans.values() for finding in planned.stage.findings]
    if errors(findings):
        raise InvalidConfig(tuple(dict.fromkeys(findings)))
    findings += short_findings(stage, steps)
    rungs = []
    for count in gpus:
        output = root / _MODELS / _short_label(count)
        name = json.dumps(f"{stage.name}-{_short_label(count)}", ensure_ascii=False)
        # nobody looks on, and the next rung waits
        watched = () if stage.config.options.get("on_hang") is not None else ("on_hang=stop",)
        shorter = (*short_overrides(stage, steps=steps, output=output, batch=batch), f"name={name}", *watched)
        changes, notes = _without_deepspeed(stage, request, count)
        short = resolved.with_overrides(*shorter, *changes, gpus=count, fresh=True, strict=False)
        # a rung that a killed command left may have the GPUs: it is ended later
        prepared = prepare.complete(short.without_gpus())
        known = _predicted(prepared.plan, resolved, terms)
        rungs.append(prepared)
        # what the short stage is told of itself is not about the file
        findings += [*notes, *(known.findings if known is not None else ())]
        findings += [one for one in (*prepared.plan.findings, *prepared.warnings) if one.severity != "note"]
    sizes = {label(rung.plan.gpus): rung.plan.global_batch for rung in rungs}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{rows} on {name}" for name, rows in sizes.items())
        message = f"the rungs train with different global batches: {each}"
        help = "`batch: {global: N, per_device: M}` keeps it, and accumulation follows from --gpus"
        place = stage.config.origin("batch").place
        findings.append(launch_finding("warning", "batch-not-constant", message, help, key="batch.global", **place))
    if stopping := errors(findings, strict=request.strict):
        raise InvalidConfig(stopping)
    # a dry run reads no model and no data
    key = _key(resolved, plans[gpus[0]], steps) if resolved.packages is not None else ""
    return Ladder(
        resolved=resolved,
        plans=plans,
        rungs=tuple(rungs),
        steps=steps,
        terms=terms,
        campaign=experiment.Campaign(kind="ladder", key=key, name=stage.config.redactor.redact(stage.name), root=root),
        findings=tuple(dict.fromkeys(findings)),
    )


def _key(resolved: Facts, planned: Plan, steps: int) -> str:
    """The same for the same stage, source, content, length, packages and kind of GPU, whatever the rungs."""
    stage, present = resolved.stage, () if resolved.look is None else resolved.look.present
    options = stage.config.options.items()
    about = {
        "options": {key: value for key, value in options if key not in _OTHERWISE},
        "args": dict(stage.args),
        "steps": steps,
        "source": stage.upstream.as_json(),
        # data, model and code are the same for every number of GPUs
        "contents": inputs.of_plan(planned),
        "gpu": present[0].name if present else None,
        "packages": {name: resolved.trainer.packages.get(name) for name in python.DECISIVE},
    }
    return experiment.key_of(about)


def _predicted(planned: Plan, resolved: Facts, terms: ForecastOptions) -> forecast.Estimate | None:
    """The forecast for one rung; None on the CPU, and where shape or row lengths are not known."""
    if not planned.gpus:
        return None
    try:
        return forecast.of_plan(planned, resolved.trainer.packages, terms)
    except (LaunchError, OSError):
        return None


def _without_deepspeed(stage: Stage, request: Request, gpus: int) -> tuple[list[str], list[Finding]]:
    options = stage.options
    named = any(text.startswith(_NAMES_DEEPSPEED) for text in request.overrides)
    if gpus != 1 or options.deepspeed is None or named:
        return [], []
    # one process shards nothing: all that DeepSpeed can save there is what it keeps on the host
    keep = "offload" in options.deepspeed_name
    why = f"`{options.deepspeed_name}` keeps on the host what the card may not hold"
    if stage.entry.needs_process_group:
        keep = True
        barrier = rendered("dpo_utils.py::build_reference_logprobs_cache[dist.barrier #1]")
        why = f"without it one process has no process group ({barrier})"
    place: dict[str, Any] = {"key": "deepspeed", **stage.config.origin("deepspeed").place}
    if keep:
        return [], [launch_finding("note", "deepspeed-kept", f"DeepSpeed stays on one GPU: {why}", **place)]
    message = "DeepSpeed is off on one GPU, where it would shard nothing"
    help = f"`deepspeed={options.deepspeed_name}` on the command line keeps it"
    return ["deepspeed=none"], [launch_finding("note", "deepspeed-off", message, help, **place)]


def climb(ladder: Ladder, *, fresh: bool = False, allow_unproven: bool = False, quiet: bool = False) -> None:
    """Run the rungs that have not passed yet, in turn, until one does not.

    INT and TERM stop the rung that runs, and nothing follows; a terminal that goes stops nothing. Raises NotReady.
    """
    with ladder.campaign.opened(fresh=fresh) as ladder.folder:
        ladder.records = dict(Record(rundir.read_json(ladder.folder / RECORD)).part("rungs"))
        ladder.write()
        with experiment.interruptible() as stop:
            for rung in ladder.rungs:
                _climb(ladder, rung, allow_unproven=allow_unproven, quiet=quiet)
                if ladder.exit is not Exit.OK:
                    break
        if stop.requested:
            ladder.exit = Exit.INTERRUPTED
            ladder.reason = f"{label(ladder.rungs[len(ladder.standings)].plan.gpus)}: interrupted"
        if ladder.exit is Exit.OK:
            ladder.estimate = _estimate(ladder, ladder.standings[-1])
        runs = [Path(str(one.record.get("run"))) for one in ladder.standings]
        with contextlib.suppress(LaunchError):
            ladder.page = experiment.page(runs, ladder.folder / "report.html", _lead(ladder))


def _climb(ladder: Ladder, rung: Prepared, *, allow_unproven: bool, quiet: bool) -> None:
    """One rung, unless it has passed before. Raises KeyboardInterrupt."""
    gpus = rung.plan.gpus
    standing = _standing(ladder, gpus, allow_unproven=allow_unproven)
    if standing is None or not standing.passed:
        if not quiet:
            console.say(f"rung {len(ladder.standings) + 1} of {len(ladder.rungs)}: {label(gpus)}")
        place = f"{rung.plan.stage.entry.names.output}={spelt(str(ladder.folder / _MODELS / _short_label(gpus)))}"
        prepared = prepare.complete(rung.facts.with_overrides(place, runs=ladder.folder).look_again())
        if not quiet:
            # its findings were shown with those of all rungs
            console.print_plan(prepared.plan, prepared.folder.console(prepared.attempt))
        outcome = experiment.of_prepared(prepared)
        # the weights after so few steps are of no use, and large
        shutil.rmtree(ladder.folder / _MODELS, ignore_errors=True)
        if outcome.interrupted:
            raise KeyboardInterrupt
        facts = _facts(prepared, outcome, ladder)
        ladder.records[str(gpus)] = {**outcome.as_json(), "facts": asdict(facts)}
        ladder.write()
        standing = _standing(ladder, gpus, allow_unproven=allow_unproven)
        assert standing is not None
        standing = replace(standing, before=False)
    ladder.standings.append(standing)
    if not standing.passed:
        reds = "; ".join(flag.text for flag in standing.flags if flag.colour == "red")
        crashed = standing.record.get("exit") == Exit.TRAINING
        ladder.exit, ladder.reason = Exit.TRAINING if crashed else Exit.VERDICT, f"{label(gpus)}: {reds}"


def _standing(ladder: Ladder, gpus: int, *, allow_unproven: bool) -> Standing | None:
    """What the gates say of a rung by its record; None where there is none, or it cannot be read."""
    known = as_mapping(ladder.records.get(str(gpus)))
    try:
        facts = RungFacts.from_json(known["facts"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if facts.unproven is not None and not allow_unproven:
        facts = replace(facts, failed=f"unproven: {facts.unproven}", unproven=None)
    # a GPU is not measured against a CPU
    alike = (one.facts for one in ladder.standings if one.facts.accelerated == facts.accelerated)
    base = next(alike, facts)
    return Standing(
        gpus=gpus,
        facts=facts,
        flags=tuple(gates.judge(facts, ladder.stage.options.gates, base)),
        efficiency=gates.efficiency(facts, base),
        before=True,
        record={key: value for key, value in known.items() if key not in ("facts", "metrics")},
    )


def _lead(ladder: Ladder) -> Lead:
    go = ladder.exit is Exit.OK
    flags = [
        {"rung": label(one.gpus), "gate": flag.gate, "is": flag.colour, "why": flag.text}
        for one in ladder.standings
        for flag in one.flags
    ]
    lines = [f"no-go: {ladder.reason}"] if ladder.reason else []
    lines += [ladder.estimate.line()] if ladder.estimate is not None else []
    return Lead(
        title=f"ladder {ladder.stage.name}",
        decision="go" if go else "no-go",
        colour="pass" if go else "fail",
        tables=([_row(one) for one in ladder.standings], flags),
        lines=lines,
    )


def _facts(prepared: Prepared, outcome: experiment.Outcome, ladder: Ladder) -> RungFacts:
    metrics, ran, verdict = outcome.verdict.metrics, outcome.plan, outcome.verdict
    rows = files.read_lines(outcome.run.metrics)
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    # by now the row lengths are known, where they were not before
    known = _predicted(prepared.plan, ladder.resolved, ladder.terms)
    doubt = verdict.status == "unproven" and outcome.exit is Exit.VERDICT
    unproven = outcome.reason if doubt else None
    passed = outcome.exit is Exit.OK or unproven is not None
    # the rung itself expects no trend: it is too short for what a verdict asks
    falling = ladder.stage.options.expect.get("trend") == "falling"
    trends = (point.state for point in verdict.points if point.name == "trend" and falling)
    slots = () if prepared.start.devices is None or not ran.gpus else prepared.start.devices.slots
    return RungFacts(
        stage=ran.stage.options.stage,
        devices=ran.processes,
        accelerated=bool(ran.gpus),
        losses=_column(rows, ("loss",)),
        norms=_column(rows, ("grad_norm",)),
        accuracies=_column(rows, REWARDS["rewards_accuracy"]),
        margins=_column(rows, REWARDS["rewards_margin"]),
        nonfinite=tuple(int(row["step"]) for row in rows if row.get("finite") is False),
        tokens_per_second=metrics.get("tokens_per_second") or metrics.get("logged_tokens_per_second"),
        step_seconds=usual_step(seconds[len(seconds) // 5 :]),
        allocated_gib=metrics.get("peak_allocated_gib"),
        reserved_gib=metrics.get("peak_reserved_gib"),
        planned_gib=None if known is None or known.memory is None else known.memory.peak,
        card_gib=min((slot.gpu.memory_mib / 1024 for slot in slots), default=None),
        starts_at_ln2=_starts_at_ln2(ran.stage),
        failed=None if passed else outcome.reason,
        unproven=unproven,
        trend=next(trends, None),
    )


def usual_step(seconds: Sequence[float]) -> float | None:
    """The mean, so that steps of long rows count, but without those that something else held up."""
    if not seconds:
        return None
    most = 3 * statistics.median(seconds)
    return statistics.fmean(one for one in seconds if one <= most)


def _column(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[float, ...]:
    values = (next((row[name] for name in names if name in row), None) for row in rows)
    return tuple(float(one) for one in values if isinstance(one, int | float))


def _starts_at_ln2(stage: Stage) -> bool:
    """Whether the first loss is -log sigmoid(0): policy and reference are still the same model."""
    values = stage.values
    if not stage.schema.pairs or values.get("load_balancing_loss"):
        return False
    kinds = values.get("loss_type")
    names = {str(getattr(k, "value", k)) for k in (kinds if isinstance(kinds, list) else [kinds])}
    return names <= {"dpo", "dpo_norm", "sigmoid"}


def _estimate(ladder: Ladder, top: Standing) -> FullRun:
    stage, step, terms = ladder.stage, top.facts.step_seconds, ladder.terms
    whole = ladder.plans[top.gpus]
    known = _predicted(whole, ladder.resolved, terms)
    repacked = stage.entry.repacks(stage.values)
    if known is not None:
        steps = known.steps
    else:
        # of rows whose lengths are not known nobody can say how many packed ones they come to
        row_lengths = lengths.parse(terms.row_tokens) if repacked and terms.row_tokens else None
        _, _, steps = forecast.counted(whole, row_lengths, terms)
    if step is None or not steps:
        options = ["--rows N"] if whole.rows is None else []
        options += ["--row-tokens MEAN:MAX"] if repacked and terms.row_tokens is None else []
        why = f"its steps are not known: {' and '.join(options)}" if step else "no step was timed"
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
    # a price is for GPUs
    cost = hours * (terms.price or 0) * top.facts.devices if terms.price is not None and top.gpus else None
    return FullRun(gpus=top.gpus, steps=steps, hours=hours, cost=cost, formula=formula)


def show(ladder: Ladder) -> None:
    say = functools.partial(console.say, redactor=ladder.redactor)
    if rows := [_row(one) for one in ladder.standings]:
        console.print_table(rows, tuple(rows[0]), ladder.redactor)
    flags = [(label(one.gpus), flag) for one in ladder.standings for flag in one.flags if flag.colour != "green"]
    for name, flag in flags:
        say(f"  {name}: {flag.colour}[{flag.gate}] {flag.text}")
    if ladder.exit is Exit.OK:
        say("go" + (f", with {len(flags)} yellow flag(s)" if flags else ""))
    else:
        say(f"no-go: {ladder.reason}")
        say("the same command continues at this rung; --fresh starts over")
    if ladder.estimate is not None:
        say(ladder.estimate.line())
    say(f"ladder: {ladder.folder}")
    if ladder.page is not None:
        say(f"report: {ladder.page}")


def _row(one: Standing) -> dict[str, Any]:
    facts, record, losses = one.facts, one.record, one.facts.losses
    word = "go" if one.passed else "no-go"
    return {
        "rung": label(one.gpus),
        "batch": f"{record.get('per_device')} x {record.get('accumulation')} x {facts.devices}",
        "loss": f"{losses[0]:.4g} -> {losses[-1]:.4g}" if losses else None,
        "tokens/s": _shown(facts.tokens_per_second, ",.0f"),
        "efficiency": _shown(one.efficiency, ".0%"),
        "peak GiB": _shown(facts.allocated_gib, ".1f"),
        "planned GiB": _shown(facts.planned_gib, ".1f"),
        "verdict": f"{word} (before)" if one.before else word,
    }


def _time(hours: float) -> str:
    if hours >= 0.1:
        return f"{hours:.2f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None or not math.isfinite(value) else format(value, form)
