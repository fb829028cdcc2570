"""`launch ladder`: the rungs in turn, each gated, then go or no-go and what the full run will take.

`ladder.json` in the ladder's folder keeps what every rung showed. The same command goes on there: rungs
that passed are not repeated, and are judged by the gates of now.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import campaign as campaigns
from launcher import (
    contents,
    earlier,
    files,
    following,
    gates,
    machine,
    measures,
    plan,
    preparation,
    report,
    rundir,
    rungs,
    start,
    trial,
)  # fmt: skip
from launcher.campaign import Campaign
from launcher.errors import Exit, Finding, InvalidConfig, LaunchError, not_ready
from launcher.forecast import Terms
from launcher.gates import Facts, Flag
from launcher.preparation import Asked, Request
from launcher.rundir import RunFolder
from launcher.rungs import Rung
from launcher.stage import Stage
from launcher.trial import Outcome

KIND, RECORD = "ladder", "ladder.json"
_VERSION = 1
_OTHERWISE = ("gates", "slurm", "skypilot")
"""Options of a stage file that change nothing of what a rung does."""


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
    """One rung that was run, now (`outcome`) or before, and what the gates say of it."""

    gpus: int
    facts: Facts
    flags: tuple[Flag, ...]
    efficiency: float | None
    told: Mapping[str, Any]
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
            "rung": rungs.label(self.gpus), **self.told, "before": self.before, "go": self.passed,
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

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {name: getattr(self, name) for name in ("gpus", "steps", "hours", "cost", "formula")}

    def line(self) -> str:
        """For people."""
        if self.hours is None:
            return f"full run: {self.formula}"
        cost = "" if self.cost is None else f", costs {self.cost:,.2f}"
        return f"full run on {rungs.label(self.gpus)}: {_time(self.hours)}{cost}  ({self.formula})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How far it went. `exit` is that of the command, `reason` why it is no go."""

    folder: Path
    standings: tuple[Standing, ...]
    exit: Exit
    reason: str | None
    estimate: Estimate | None = None
    page: Path | None = None
    findings: tuple[Finding, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """`data` of `launch ladder`."""
        return {
            "folder": str(self.folder), "go": self.exit is Exit.OK, "reason": self.reason,
            "rungs": [one.as_json() for one in self.standings],
            "estimate": None if self.estimate is None else self.estimate.as_json(),
            "report": None if self.page is None else str(self.page),
        }  # fmt: skip


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
    with contextlib.ExitStack() as held:
        if running:
            rungs.require_here(gpus, asked.seen)
            key = _key(asked, gpus, steps)
            campaign = Campaign(kind=KIND, key=key, name=stage.name, root=rundir.runs_root())
            held.enter_context(campaign.alone("wait for it"))
            folder = (None if fresh else campaign.earlier()) or campaign.new()
            # one that nothing was written into
            held.callback(rundir.release, RunFolder(folder))
            _require_quiet(folder)
        made = rungs.prepare(
            stage, request, gpus, steps=steps, folder=folder, terms=terms, running=running
        )
        found = (*stage.findings, *rungs.findings(stage, made, steps))
        yield Climb(
            stage=stage, request=request, rungs=tuple(made), steps=steps, terms=terms,
            folder=folder, key=key, findings=tuple(dict.fromkeys(found)),
        )  # fmt: skip


def _key(asked: Asked, gpus: Sequence[int], steps: int) -> str:
    """The same for the same stage, source, content, length, packages and kind of GPU, whatever the rungs."""
    stage, present = asked.stage, () if asked.seen is None else asked.seen.present
    told = {
        "options": {k: v for k, v in stage.config.options.items() if k not in _OTHERWISE},
        "args": dict(stage.args), "steps": steps, "source": stage.upstream.as_json(),
        "contents": _contents(stage, gpus),
        "gpu": present[0].name if present else None,
        "packages": {name: asked.trainer.packages.get(name) for name in machine.DECISIVE},
    }  # fmt: skip
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _contents(stage: Stage, gpus: Sequence[int]) -> list[dict[str, Any]] | None:
    """Digests of data, model and code, which are the same for every number of GPUs."""
    for count in gpus:
        # a batch that cannot be split is said when the rungs are prepared
        with contextlib.suppress(InvalidConfig):
            return contents.of_plan(plan.make(stage, gpus=count))
    return None


def _require_quiet(folder: Path) -> None:
    """Raise NotReady where a rung still trains, or is about to, whose command was killed."""
    for run in campaigns.left_over(folder):
        raise not_ready(
            "run-is-live", f"a rung of this ladder still trains: {run.path.name}",
            f"wait for it, or launch stop {run.path.name}", file=str(run.path),
        )  # fmt: skip


# --- the climb ------------------------------------------------------------------------------------


def climb(planned: Climb, *, allow_unproven: bool = False, quiet: bool = False) -> Result:
    """Run the rungs that have not passed yet, in turn, until one does not.

    INT and TERM stop the rung that runs, and nothing follows; a terminal that goes stops nothing.
    """
    with trial.unwatched():
        return _climb(planned, allow_unproven=allow_unproven, quiet=quiet)


def _climb(planned: Climb, *, allow_unproven: bool, quiet: bool) -> Result:
    record = _Record(planned)
    # a command that is killed finds its rungs again
    record.write()
    limits, standings = planned.stage.options.gates, list[Standing]()
    for rung in planned.rungs:
        standing = record.standing(rung.gpus, limits, standings, allow_unproven=allow_unproven)
        if standing is None or not standing.passed:
            if not quiet:
                report.say(f"rung {len(standings) + 1} of {len(planned.rungs)}: {rung.name}")
            outcome = _ended_alone(rung, planned, standing) or _run(rung, planned, quiet=quiet)
            # the weights after so few steps are of no use, and large; a rung run again has them elsewhere
            shutil.rmtree(planned.folder / rungs.MODELS, ignore_errors=True)
            if outcome is None or outcome.interrupted:
                return _result(planned, standings, Exit.INTERRUPTED, f"{rung.name}: interrupted")
            record.keep(rung, outcome, _facts(rung, outcome, planned))
            standing = record.standing(
                rung.gpus, limits, standings, allow_unproven=allow_unproven, now=True
            )
            assert standing is not None
        standings.append(standing)
        if not standing.passed:
            reds = "; ".join(flag.text for flag in standing.flags if flag.colour == "red")
            code = standing.told.get("exit")
            failed = Exit.TRAINING if code == Exit.TRAINING else Exit.VERDICT
            return _result(planned, standings, failed, f"{rung.name}: {reds}")
    return _result(planned, standings, Exit.OK, None)


def _run(rung: Rung, planned: Climb, *, quiet: bool) -> Outcome | None:
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
        if earlier.mapping(rundir.read_manifest(run).get("plan")).get("gpus") != rung.gpus:
            continue
        if known is None or known.told.get("run") != str(run.path):
            verdict, code = start.conclusion(run, following.newest_attempt(run))
            if code in (Exit.OK, Exit.VERDICT):
                return Outcome(run=run, plan=rung.prepared.plan, verdict=verdict, exit=code)
        return None
    return None


def _result(
    planned: Climb, standings: Sequence[Standing], code: Exit, reason: str | None
) -> Result:
    page = _page(planned.folder, standings)
    estimate = _estimate(planned, standings[-1]) if standings and code is Exit.OK else None
    return Result(
        folder=planned.folder, standings=tuple(standings), exit=code, reason=reason, page=page,
        estimate=estimate, findings=planned.findings,
    )  # fmt: skip


def _page(folder: Path, standings: Sequence[Standing]) -> Path | None:
    runs = [Path(str(one.told.get("run"))) for one in standings]
    with contextlib.suppress(LaunchError):
        return campaigns.page(runs, folder / "report.html")
    return None


class _Record:
    """`ladder.json`: what each rung showed, written after every one."""

    def __init__(self, planned: Climb) -> None:
        self.path = planned.folder / RECORD
        self.told = rundir.read_json(self.path) or {
            "version": _VERSION, "key": planned.key, "config": str(planned.stage.config.path),
            "stage": planned.stage.options.stage, "backend": planned.stage.options.backend,
            "steps": planned.steps, "rungs": {},
        }  # fmt: skip

    def keep(self, rung: Rung, outcome: Outcome, facts: Facts) -> None:
        told = {**outcome.as_json(), "facts": facts.as_json()}
        self.told["rungs"] = {**self._rungs(), str(rung.gpus): told}
        self.write()

    def write(self) -> None:
        campaigns.write(self.path, self.told)

    def _rungs(self) -> dict[str, Any]:
        known = self.told.get("rungs")
        return known if isinstance(known, dict) else {}

    def standing(
        self, gpus: int, limits: Mapping[str, gates.Limit], below: Sequence[Standing],
        *, allow_unproven: bool, now: bool = False,
    ) -> Standing | None:  # fmt: skip
        """What the gates say of a rung; None where it was not run, or not with this launch."""
        known = self._rungs().get(str(gpus))
        try:
            facts = Facts.from_json(known["facts"]) if isinstance(known, dict) else None
        except (KeyError, TypeError):
            facts = None
        if facts is None or not isinstance(known, dict):
            return None
        if facts.unproven is not None and not allow_unproven:
            facts = replace(facts, failed=f"unproven: {facts.unproven}", unproven=None)
        # a GPU is not measured against a CPU
        alike = (one.facts for one in below if one.facts.accelerated == facts.accelerated)
        base = next(alike, facts)
        flags = tuple(gates.judge(facts, limits, base))
        told = {key: value for key, value in known.items() if key not in {"facts", "metrics"}}
        return Standing(
            gpus=gpus, facts=facts, flags=flags, efficiency=gates.efficiency(facts, base),
            told=told, before=not now,
        )  # fmt: skip


# --- what a run showed ----------------------------------------------------------------------------


def _facts(rung: Rung, outcome: Outcome, asked: Climb) -> Facts:
    metrics, planned = outcome.verdict.metrics, outcome.plan
    rows = files.read_lines(outcome.run.metrics)
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    steady = seconds[len(seconds) // 5 :]
    # by now the row lengths are known, where they were not before
    known = rungs.predicted(rung.request, asked.terms)
    proved = outcome.exit is Exit.OK
    unproven = outcome.reason if outcome.verdict.status == "unproven" else None
    unproven = unproven if outcome.exit is Exit.VERDICT else None
    speed = metrics.get("tokens_per_second") or metrics.get("logged_tokens_per_second")
    return Facts(
        stage=planned.stage.options.stage, devices=planned.processes,
        accelerated=bool(planned.gpus), losses=_column(rows, ("loss",)),
        norms=_column(rows, ("grad_norm",)), accuracies=_column(rows, measures.REWARDS["rewards_accuracy"]),
        margins=_column(rows, measures.REWARDS["rewards_margin"]),
        nonfinite=tuple(int(row["step"]) for row in rows if row.get("finite") is False),
        tokens_per_second=speed, step_seconds=usual_step(steady),
        allocated_gib=metrics.get("peak_allocated_gib"),
        reserved_gib=metrics.get("peak_reserved_gib"),
        planned_gib=known.memory.peak if known is not None and known.memory is not None else None,
        card_gib=_card_gib(rung),
        starts_at_ln2=_starts_at_ln2(planned.stage),
        failed=None if proved or unproven is not None else outcome.reason, unproven=unproven,
        trend=_trend(asked.stage, outcome),
    )  # fmt: skip


def _trend(stage: Stage, outcome: Outcome) -> str | None:
    """How the loss went, where the stage file expects it to fall: the rung itself expects nothing."""
    if stage.options.expect.get("trend") != "falling":
        return None
    return next((p.state for p in outcome.verdict.points if p.name == "trend"), None)


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
    named = {
        str(getattr(one, "value", one)) for one in (kinds if isinstance(kinds, list) else [kinds])
    }
    return named <= {"dpo", "dpo_norm", "sigmoid"}


# --- the full run ---------------------------------------------------------------------------------


def _estimate(planned: Climb, top: Standing) -> Estimate:
    stage, step = planned.stage, top.facts.step_seconds
    whole, steps = rungs.full_steps(stage, planned.request, top.gpus, planned.terms)
    if step is None or not steps:
        missing = " and ".join(rungs.missing_for_steps(stage, whole, planned.terms))
        why = f"its steps are not known: {missing}" if step else "no step was timed"
        return Estimate(gpus=top.gpus, steps=steps, hours=None, cost=None, formula=why)
    seconds = steps * step
    formula = f"{steps:,} steps x {step:.3g} s, as measured"
    passed = _reference_rows(stage, whole.rows or planned.terms.rows)
    if passed:
        # forward only: a third of a step over as many rows
        seconds += passed / whole.global_batch * step / 3
        formula += f", and {passed:,} rows through the reference"
    hours, price = seconds / 3600, planned.terms.price
    # a price is for GPUs
    cost = None if price is None or not top.gpus else hours * price * top.facts.devices
    return Estimate(gpus=top.gpus, steps=steps, hours=hours, cost=cost, formula=formula)


def _reference_rows(stage: Stage, rows: int | None) -> int | None:
    """Rows whose reference log-probabilities are computed before the first step."""
    beforehand = stage.options.backend != "trl" or stage.values.get("precompute_ref_log_probs")
    return rows if stage.refers and beforehand else None


# --- for people -----------------------------------------------------------------------------------

COLUMNS = (
    "rung", "batch", "loss", "tokens/s", "efficiency", "peak GiB", "planned GiB", "verdict",
)  # fmt: skip


def show(result: Result) -> None:
    """The table, what is not green, go or no-go, and what the full run takes."""
    if result.standings:
        report.table([_row(one) for one in result.standings], COLUMNS)
    for one in result.standings:
        for flag in one.flags:
            if flag.colour != "green":
                report.say(f"  {rungs.label(one.gpus)}: {flag.colour}[{flag.gate}] {flag.text}")
    if result.exit is Exit.OK:
        yellow = sum(f.colour == "yellow" for one in result.standings for f in one.flags)
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
    facts, told = one.facts, one.told
    word = "go" if one.passed else "no-go"
    losses = facts.losses
    return {
        "rung": rungs.label(one.gpus),
        "batch": f"{told.get('per_device')} x {told.get('accumulation')} x {facts.devices}",
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
