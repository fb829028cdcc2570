"""`launch ladder`: the same stage, short, on more and more GPUs: each rung gated, then go or no-go.

What each rung needs beyond the file is derived: no DeepSpeed on one GPU, where nothing is sharded, unless it
was asked for or cannot be done without; places of its own; an end to a hang. `ladder.json` in the ladder's
folder keeps what every rung showed: the same command goes on there, rungs that passed are not repeated, and
are judged by the gates of now.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher import campaign as campaigns
from launcher import (
    contents,
    files,
    following,
    footprint,
    forecast,
    gates,
    lengths,
    machine,
    measures,
    plan,
    preparation,
    rehearsal,
    report,
    rundir,
    start,
    trial,
)  # fmt: skip
from launcher.campaign import Campaign
from launcher.devices import Look
from launcher.errors import Exit, Finding, LaunchError, not_ready, usage
from launcher.forecast import Terms
from launcher.gates import Facts, Flag
from launcher.preparation import Asked, Prepared, Request
from launcher.record import Record
from launcher.rundir import RunFolder
from launcher.stage import Stage
from launcher.trial import Outcome

KIND, RECORD = "ladder", "ladder.json"
_VERSION = 1
_MODELS = "models"
"""The folder of a ladder into which its rungs save; it goes when one has been judged."""
_OTHERWISE = ("gates", "slurm", "skypilot")
"""Options of a stage file that change nothing of what a rung does."""
_NAMES_DEEPSPEED = ("deepspeed=", "deepspeed_config=", "open_instruct.deepspeed_config=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The short run on so many GPUs, 0 being the CPU."""

    gpus: int
    request: Request
    prepared: Prepared
    notes: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """What it is called among the others."""
        return label(self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """What is to be climbed: a valid stage, its rungs, all of them prepared, and where."""

    stage: Stage
    request: Request
    rungs: tuple[Rung, ...]
    steps: int
    terms: Terms
    folder: Path
    key: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rung that was run, now or `before`, what the gates say of it, and the record of its run."""

    gpus: int
    facts: Facts
    flags: tuple[Flag, ...]
    efficiency: float | None
    record: Mapping[str, Any]
    before: bool = False

    @property
    def passed(self) -> bool:
        """Whether the next rung may follow."""
        return gates.colour_of(self.flags) != "red"

    def as_json(self) -> dict[str, Any]:
        """One entry of the ladder's JSON."""
        facts = self.facts
        first, last = (facts.losses[0], facts.losses[-1]) if facts.losses else (None, None)
        return {
            "rung": label(self.gpus), **self.record, "before": self.before, "go": self.passed,
            "first_loss": first, "last_loss": last, "tokens_per_second": facts.tokens_per_second,
            "efficiency": self.efficiency, "step_seconds": facts.step_seconds,
            "peak_allocated_gib": facts.allocated_gib, "peak_reserved_gib": facts.reserved_gib,
            "planned_gib": facts.planned_gib, "flags": [flag.as_json() for flag in self.flags],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The full run from a measured step; hours and cost None where its steps are not known."""

    gpus: int
    steps: int | None
    hours: float | None
    cost: float | None
    formula: str

    def line(self) -> str:
        """For people."""
        if self.hours is None:
            return f"full run: {self.formula}"
        cost = "" if self.cost is None else f", costs {self.cost:,.2f}"
        return f"full run on {label(self.gpus)}: {_time(self.hours)}{cost}  ({self.formula})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How far it went. `exit` is that of the command, `reason` why it is no go."""

    folder: Path
    standings: tuple[Standing, ...]
    exit: Exit
    reason: str | None
    estimate: Estimate | None = None
    page: Path | None = None
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """`data` of `launch ladder`."""
        return {
            "folder": str(self.folder), "go": self.exit is Exit.OK, "reason": self.reason,
            "rungs": [one.as_json() for one in self.standings],
            "estimate": self.estimate and asdict(self.estimate),
            "report": None if self.page is None else str(self.page),
        }  # fmt: skip


def label(gpus: int) -> str:
    """A number of GPUs, for people."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "CPU"


# --- what the command line says -------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """`--gpus 1,2,8` as numbers. Raises UsageError for what is none, or stands there twice."""
    found = forecast.counts(text)
    if len(set(found)) < len(found):
        raise usage("bad-gpus", f"--gpus {text}: a rung stands there twice", "--gpus 1,2,8")
    return found


def terms(
    gpus: Sequence[int], *, price: float | None, rows: int | None, row_tokens: str | None
) -> Terms:
    """What the stage file does not say. Raises UsageError for what makes no sense."""
    if price is not None and not 0 < price < math.inf:
        raise usage("bad-price", f"--price is more than 0, not {price:g}")
    if price is not None and not any(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    if row_tokens is not None:
        lengths.parse(row_tokens)
    return Terms(price=price, rows=rows, row_tokens=row_tokens)


# --- what is to be climbed ------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(
    request: Request, gpus: Sequence[int], *, steps: int, terms: Terms, fresh: bool = False,
    running: bool = True,
) -> Iterator[Climb]:  # fmt: skip
    """All rungs, validated and planned before the first one starts, and nobody else at them.

    Raises InvalidConfig, NotReady or UsageError: then nothing was started, and no folder is left. A dry
    run may be made while a rung trains.
    """
    asked = preparation.ask(replace(request, gpus=max(gpus)), running=running)
    stage, key = asked.stage, ""
    folder = rundir.runs_root() / f"{KIND}-{stage.name}"
    with contextlib.ExitStack() as stack:
        if running:
            _require_here(gpus, asked.seen)
            key = _key(asked, gpus, steps)
            campaign = Campaign(kind=KIND, key=key, name=stage.name, root=rundir.runs_root())
            stack.enter_context(campaign.alone("wait for it"))
            folder = (None if fresh else campaign.earlier()) or campaign.new()
            # one that nothing was written into
            stack.callback(rundir.release, RunFolder(folder))
            _require_quiet(folder)
        # all rungs read the same slice: that of the one with most rows a step
        batch = max(plan.make(stage, gpus=count).global_batch for count in gpus)
        rungs = tuple(
            _rung(stage, request, count, steps, batch, folder, terms, running=running)
            for count in gpus
        )
        found = [*stage.findings, *rehearsal.findings(stage, steps), *_not_constant(stage, rungs)]
        for rung in rungs:
            found += rung.notes
            found += (one for one in rung.prepared.findings if one.severity != "note")
        yield Climb(
            stage=stage, request=request, rungs=rungs, steps=steps, terms=terms,
            folder=folder, key=key, findings=tuple(dict.fromkeys(found)),
        )  # fmt: skip


def _require_here(gpus: Sequence[int], seen: Look | None) -> None:
    """Raise NotReady, naming the rungs that can be run, where one needs more GPUs than there are."""
    most, here = max(gpus), 0 if seen is None else len(seen.visible)
    if most <= here:
        return
    possible = [str(count) for count in gpus if count <= here]
    raise not_ready(
        "too-few-gpus", f"the rung of {label(most)} needs more than the {here} here",
        f"--gpus {','.join(possible)} can be run here" if possible else "--gpus 0 trains on the CPU",
    )  # fmt: skip


def _require_quiet(folder: Path) -> None:
    """Raise NotReady where a rung still trains, or is about to, whose command was killed."""
    for run in campaigns.left_over(folder):
        raise not_ready(
            "run-is-live", f"a rung of this ladder still trains: {run.path.name}",
            f"wait for it, or launch stop {run.path.name}", file=str(run.path),
        )  # fmt: skip


def _key(asked: Asked, gpus: Sequence[int], steps: int) -> str:
    """The same for the same stage, source, content, length, packages and kind of GPU, whatever the rungs."""
    stage, present = asked.stage, () if asked.seen is None else asked.seen.present
    return campaigns.key_of({
        "options": {k: v for k, v in stage.config.options.items() if k not in _OTHERWISE},
        "args": dict(stage.args), "steps": steps, "source": stage.upstream.as_json(),
        # data, model and code are the same for every number of GPUs
        "contents": contents.of_plan(plan.make(stage, gpus=gpus[0])),
        "gpu": present[0].name if present else None,
        "packages": {name: asked.trainer.packages.get(name) for name in machine.DECISIVE},
    })  # fmt: skip


def _rung(
    stage: Stage, request: Request, count: int, steps: int, batch: int, folder: Path, terms: Terms,
    *, running: bool,
) -> Rung:  # fmt: skip
    short = f"{count}gpu" if count else "cpu"
    output = folder / _MODELS / short
    overrides = [
        *request.overrides,
        *rehearsal.overrides(stage, steps=steps, output=output, batch=batch),
        f"name={json.dumps(f'{stage.name}-{short}', ensure_ascii=False)}",
    ]
    if stage.config.options.get("on_hang") is None:
        # nobody looks on, and the next rung waits
        overrides.append("on_hang=stop")
    asked = replace(request, gpus=count, overrides=tuple(overrides), runs=folder, fresh=True)
    changed, notes = _without_deepspeed(stage, asked, terms)
    asked = replace(asked, overrides=(*asked.overrides, *changed))
    known = _predicted(asked, terms)
    notes += known.findings if known is not None else ()
    prepared = preparation.prepare(asked, running=running)
    # only looked at: it is prepared anew when its turn comes
    rundir.release(prepared.folder)
    return Rung(gpus=count, request=asked, prepared=prepared, notes=tuple(notes))


def _predicted(request: Request, terms: Terms) -> forecast.Rung | None:
    """The forecast for one rung; None on the CPU, and where shape or row lengths are not known."""
    if not request.gpus:
        return None
    try:
        return next(iter(forecast.make(request, [request.gpus], terms).rungs), None)
    except (LaunchError, OSError):
        return None


def _without_deepspeed(
    stage: Stage, request: Request, terms: Terms
) -> tuple[list[str], list[Finding]]:
    """On one GPU: the override that leaves DeepSpeed out, or why it stays."""
    options = stage.options
    named = any(text.startswith(_NAMES_DEEPSPEED) for text in request.overrides)
    if request.gpus != 1 or options.deepspeed is None or named:
        return [], []
    without = replace(request, overrides=(*request.overrides, "deepspeed=none"))
    known = _predicted(without, terms)
    if options.backend == "open_instruct" and options.stage == "dpo":
        keep, why = True, "without it one process has no process group (dpo_utils.py:453)"
    elif known is None or known.spare is None:
        keep = "offload" in options.deepspeed_name
        why = f"`{options.deepspeed_name}` keeps on the host what the card may not hold"
    else:
        keep, why = known.spare < 0, "without it more is planned than the card holds"
    key = "deepspeed"
    code, message, help = "deepspeed-kept", f"DeepSpeed stays on one GPU: {why}", None
    if not keep:
        code, message = "deepspeed-off", "DeepSpeed is off on one GPU, where it would shard nothing"
        help = f"`deepspeed={options.deepspeed_name}` on the command line keeps it"
    note = Finding(
        severity="note", layer="launch", code=code, key=key, message=message, help=help,
        **stage.config.origin(key).place,
    )  # fmt: skip
    return ([] if keep else ["deepspeed=none"]), [note]


def _not_constant(stage: Stage, rungs: Sequence[Rung]) -> Iterator[Finding]:
    sizes = {rung.name: rung.prepared.plan.global_batch for rung in rungs}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{rows} on {name}" for name, rows in sizes.items())
        yield Finding(
            severity="warning", layer="launch", code="batch-not-constant", key="batch.global",
            message=f"the rungs train with different global batches: {each}",
            help="`batch: {global: N, per_device: M}` keeps it, and accumulation follows from --gpus",
            **stage.config.origin("batch").place,
        )  # fmt: skip


# --- the climb ------------------------------------------------------------------------------------


def climb(planned: Climb, *, allow_unproven: bool = False, quiet: bool = False) -> Result:
    """Run the rungs that have not passed yet, in turn, until one does not.

    INT and TERM stop the rung that runs, and nothing follows; a terminal that goes stops nothing.
    """
    with trial.unwatched():
        return _climb(planned, allow_unproven=allow_unproven, quiet=quiet)


def _climb(planned: Climb, *, allow_unproven: bool, quiet: bool) -> Result:
    record = _Record(planned, allow_unproven=allow_unproven)
    # a command that is killed finds its rungs again
    record.write()
    standings = list[Standing]()
    for rung in planned.rungs:
        standing = record.standing(rung.gpus, standings)
        if standing is None or not standing.passed:
            if not quiet:
                report.say(f"rung {len(standings) + 1} of {len(planned.rungs)}: {rung.name}")
            outcome = _ended_alone(rung, planned, standing) or _run(rung, quiet=quiet)
            # the weights after so few steps are of no use, and large; a rung run again has them elsewhere
            shutil.rmtree(planned.folder / _MODELS, ignore_errors=True)
            if outcome is None or outcome.interrupted:
                return _result(planned, standings, Exit.INTERRUPTED, f"{rung.name}: interrupted")
            record.keep(rung, outcome, _facts(rung, outcome, planned))
            standing = record.standing(rung.gpus, standings)
            assert standing is not None
            standing = replace(standing, before=False)
        standings.append(standing)
        if not standing.passed:
            reds = "; ".join(flag.text for flag in standing.flags if flag.colour == "red")
            crashed = standing.record.get("exit") == Exit.TRAINING
            failed = Exit.TRAINING if crashed else Exit.VERDICT
            return _result(planned, standings, failed, f"{rung.name}: {reds}")
    return _result(planned, standings, Exit.OK, None)


def _run(rung: Rung, *, quiet: bool) -> Outcome | None:
    """One rung to its end; None where the user stopped it before there was anything to stop."""
    try:
        prepared = preparation.prepare(rung.request, running=True)
        if not quiet:
            # what is to be said was said of all rungs
            report.beginning(prepared.plan, prepared.folder.console(prepared.attempt))
        return trial.of_prepared(prepared, quiet=True)
    except KeyboardInterrupt:
        return None


def _ended_alone(rung: Rung, planned: Climb, known: Standing | None) -> Outcome | None:
    """What came of a rung whose command was killed, and which went on to its end; None where none did."""
    for run in rundir.newest_first(planned.folder):
        if rundir.read_manifest(run).number("plan", "gpus") != rung.gpus:
            continue
        if known is None or known.record.get("run") != str(run.path):
            verdict, code = start.conclusion(run, following.newest_attempt(run))
            if code in (Exit.OK, Exit.VERDICT):
                return Outcome(run=run, plan=rung.prepared.plan, verdict=verdict, exit=code)
        return None
    return None


def _result(
    planned: Climb, standings: Sequence[Standing], code: Exit, reason: str | None
) -> Result:
    page, runs = None, [Path(str(one.record.get("run"))) for one in standings]
    with contextlib.suppress(LaunchError):
        page = campaigns.page(runs, planned.folder / "report.html")
    estimate = _estimate(planned, standings[-1]) if standings and code is Exit.OK else None
    return Result(
        folder=planned.folder, standings=tuple(standings), exit=code, reason=reason, page=page,
        estimate=estimate, findings=planned.findings,
    )  # fmt: skip


class _Record:
    """`ladder.json`: what each rung showed, written after every one."""

    def __init__(self, planned: Climb, *, allow_unproven: bool) -> None:
        self.path, self.allow_unproven = planned.folder / RECORD, allow_unproven
        self.limits = planned.stage.options.gates
        self.data = rundir.read_json(self.path) or {
            "version": _VERSION, "key": planned.key, "config": str(planned.stage.config.path),
            "stage": planned.stage.options.stage, "backend": planned.stage.options.backend,
            "steps": planned.steps, "rungs": {},
        }  # fmt: skip

    def keep(self, rung: Rung, outcome: Outcome, facts: Facts) -> None:
        known = {**outcome.as_json(), "facts": facts.as_json()}
        self.data["rungs"] = {**Record(self.data).part("rungs"), str(rung.gpus): known}
        self.write()

    def write(self) -> None:
        campaigns.write(self.path, self.data)

    def standing(self, gpus: int, below: Sequence[Standing]) -> Standing | None:
        """What the gates say of a rung; None where it was not run, or not with this launch."""
        known = Record(self.data).part("rungs", str(gpus))
        try:
            facts = Facts.from_json(known["facts"])
        except (AttributeError, KeyError, TypeError):
            return None
        if facts.unproven is not None and not self.allow_unproven:
            facts = replace(facts, failed=f"unproven: {facts.unproven}", unproven=None)
        # a GPU is not measured against a CPU
        alike = (one.facts for one in below if one.facts.accelerated == facts.accelerated)
        base = next(alike, facts)
        return Standing(
            gpus=gpus, facts=facts, flags=tuple(gates.judge(facts, self.limits, base)),
            efficiency=gates.efficiency(facts, base), before=True,
            record={key: value for key, value in known.items() if key not in ("facts", "metrics")},
        )  # fmt: skip


# --- what a run showed ----------------------------------------------------------------------------


def _facts(rung: Rung, outcome: Outcome, asked: Climb) -> Facts:
    metrics, planned, verdict = outcome.verdict.metrics, outcome.plan, outcome.verdict
    rows = files.read_lines(outcome.run.metrics)
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    # by now the row lengths are known, where they were not before
    known = _predicted(rung.request, asked.terms)
    doubt = verdict.status == "unproven" and outcome.exit is Exit.VERDICT
    unproven = outcome.reason if doubt else None
    passed = outcome.exit is Exit.OK or unproven is not None
    # the rung itself expects no trend: it is too short for what a verdict asks
    falling = asked.stage.options.expect.get("trend") == "falling"
    trends = (point.state for point in verdict.points if point.name == "trend" and falling)
    return Facts(
        stage=planned.stage.options.stage, devices=planned.processes,
        accelerated=bool(planned.gpus), losses=_column(rows, ("loss",)),
        norms=_column(rows, ("grad_norm",)), accuracies=_column(rows, measures.REWARDS["rewards_accuracy"]),
        margins=_column(rows, measures.REWARDS["rewards_margin"]),
        nonfinite=tuple(int(row["step"]) for row in rows if row.get("finite") is False),
        tokens_per_second=metrics.get("tokens_per_second") or metrics.get("logged_tokens_per_second"),
        step_seconds=usual_step(seconds[len(seconds) // 5 :]),
        allocated_gib=metrics.get("peak_allocated_gib"),
        reserved_gib=metrics.get("peak_reserved_gib"),
        planned_gib=None if known is None or known.memory is None else known.memory.peak,
        card_gib=_card_gib(rung),
        starts_at_ln2=_starts_at_ln2(planned.stage), failed=None if passed else outcome.reason,
        unproven=unproven, trend=next(trends, None),
    )  # fmt: skip


def usual_step(seconds: Sequence[float]) -> float | None:
    """The mean, so that steps of long rows count, but without those that something else held up."""
    if not seconds:
        return None
    most = 3 * statistics.median(seconds)
    return statistics.fmean(one for one in seconds if one <= most)


def _column(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[float, ...]:
    found = (next((row[name] for name in names if name in row), None) for row in rows)
    return tuple(float(one) for one in found if isinstance(one, int | float))


def _card_gib(rung: Rung) -> float | None:
    """The memory of the smallest card that the rung would get."""
    chosen = rung.prepared.devices
    slots = () if chosen is None or not rung.gpus else chosen.slots
    sizes = [slot.gpu.memory_mib / 1024 for slot in slots]
    return min(sizes, default=None)


def _starts_at_ln2(stage: Stage) -> bool:
    """Whether the first loss is -log sigmoid(0): policy and reference are still the same model."""
    values = stage.values
    if stage.options.stage != "dpo" or values.get("load_balancing_loss"):
        return False
    kinds = values.get("loss_type")
    names = {str(getattr(k, "value", k)) for k in (kinds if isinstance(kinds, list) else [kinds])}
    return names <= {"dpo", "dpo_norm", "sigmoid"}


# --- the full run ---------------------------------------------------------------------------------


def _estimate(planned: Climb, top: Standing) -> Estimate:
    stage, step, terms = planned.stage, top.facts.step_seconds, planned.terms
    whole = plan.make(stage, gpus=top.gpus)
    known = _predicted(replace(planned.request, gpus=top.gpus), terms)
    repacked = plan.repacks(stage, stage.values)
    steps = known.steps if known is not None else None
    if steps is None:
        # of rows whose lengths are not known nobody can say how many packed ones they come to
        seen = lengths.parse(terms.row_tokens) if repacked and terms.row_tokens else None
        rows = None if repacked else terms.rows
        if seen is not None:
            rows = footprint.trained_rows(whole, seen, terms.rows or whole.rows)
            seen = footprint.rows_of(whole, seen)
        steps = footprint.optimizer_steps(whole, rows, seen, told=True)
    if step is None or not steps:
        options = ["--rows N"] if whole.rows is None and terms.rows is None else []
        options += ["--row-tokens MEAN:MAX"] if repacked and terms.row_tokens is None else []
        why = f"its steps are not known: {' and '.join(options)}" if step else "no step was timed"
        return Estimate(gpus=top.gpus, steps=steps, hours=None, cost=None, formula=why)
    seconds = steps * step
    formula = f"{steps:,} steps x {step:.3g} s, as measured"
    rows = whole.rows or terms.rows
    # reference log-probabilities that are computed before the first step
    beforehand = stage.options.backend != "trl" or stage.values.get("precompute_ref_log_probs")
    if rows and stage.refers and beforehand:
        # forward only: a third of a step over as many rows
        seconds += rows / whole.global_batch * step / 3
        formula += f", and {rows:,} rows through the reference"
    hours = seconds / 3600
    # a price is for GPUs
    priced = terms.price is not None and top.gpus
    cost = hours * (terms.price or 0) * top.facts.devices if priced else None
    return Estimate(gpus=top.gpus, steps=steps, hours=hours, cost=cost, formula=formula)


# --- for people -----------------------------------------------------------------------------------


def show(result: Result) -> None:
    """The table, what is not green, go or no-go, and what the full run takes."""
    if rows := [_row(one) for one in result.standings]:
        report.table(rows, tuple(rows[0]))
    flags = [(one, flag) for one in result.standings for flag in one.flags]
    for one, flag in flags:
        if flag.colour != "green":
            report.say(f"  {label(one.gpus)}: {flag.colour}[{flag.gate}] {flag.text}")
    if result.exit is Exit.OK:
        yellow = sum(flag.colour == "yellow" for _, flag in flags)
        report.say("go" + (f", with {yellow} yellow flag(s)" if yellow else ""))
    else:
        report.say(f"no-go: {result.reason}")
        report.say("the same command goes on at this rung; --fresh begins anew")
    if result.estimate is not None:
        report.say(result.estimate.line())
    report.say(f"ladder: {result.folder}")
    if result.page is not None:
        report.say(f"report: {result.page}")


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
