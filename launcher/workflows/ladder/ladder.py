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

from launcher import files
from launcher.artifacts import lengths
from launcher.cache import inputs
from launcher.config.load import spelt
from launcher.errors import Exit, Finding, InvalidConfig, LaunchError, errors, launch_finding, not_ready, usage
from launcher.lifecycle import forecast, prepare
from launcher.lifecycle.forecast import ForecastOptions
from launcher.lifecycle.prepare import Prepared, Request, ResolvedStage
from launcher.machine import python
from launcher.machine.devices import Look
from launcher.plan import footprint, plan
from launcher.plan.plan import Plan
from launcher.report import console
from launcher.report.page import Lead
from launcher.runs import rundir
from launcher.runs.record import Record, mapping
from launcher.stage import gates
from launcher.stage.gates import Facts, Flag
from launcher.stage.stage import Stage
from launcher.upstream.schema import Values
from launcher.verdict.metrics import REWARDS
from launcher.workflows import experiment, trial
from launcher.workflows.experiment import Campaign
from launcher.workflows.trial import Outcome

KIND, RECORD = "ladder", "ladder.json"
_VERSION = 1
_MODELS = "models"
"""The folder of a ladder into which its rungs save; it goes when one has been judged."""
_OTHERWISE = ("gates", "slurm")
"""Options of a stage file that change nothing of what a rung does."""
_NAMES_DEEPSPEED = ("deepspeed=", "deepspeed_config=", "open_instruct.deepspeed_config=")

RESERVE = 1.25
"""Rows cut for each that is trained on: upstream leaves out those with nothing to learn."""
FEWEST_ROWS = 64
ASSUMED_DEVICES = 8
"""Taken where neither the caller nor `batch:` says how many rows a step takes."""

# what a slice, or a run that is too short for it, cannot be asked for
_NOT_EXPECTED = ("dataset_cache", "reference_cache", "trend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The short run on so many GPUs, 0 being the CPU; `prepared` was looked at, and is not what starts."""

    gpus: int
    request: Request
    prepared: Prepared

    def below(self, folder: Path) -> Request:
        """Its command line, with its run and its model in this folder."""
        output = self.prepared.plan.stage.entry.names.output
        place = f"{output}={spelt(str(folder / _MODELS / _short_label(self.gpus)))}"
        return replace(self.request, runs=folder, elsewhere=False, overrides=(*self.request.overrides, place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """What is to be climbed: a valid stage, its plan for each rung, and the rungs, all of them prepared."""

    resolved: ResolvedStage
    plans: Mapping[int, Plan]
    rungs: tuple[Rung, ...]
    steps: int
    terms: ForecastOptions
    campaign: Campaign
    findings: tuple[Finding, ...]

    @property
    def stage(self) -> Stage:
        """The whole stage."""
        return self.resolved.stage


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
class LadderResult:
    """How far it went. `exit` is that of the command, `reason` why it is no go."""

    folder: Path
    standings: tuple[Standing, ...]
    exit: Exit
    reason: str | None
    estimate: FullRun | None = None
    page: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """`data` of `launch ladder`."""
        return {
            "folder": str(self.folder),
            "go": self.exit is Exit.OK,
            "reason": self.reason,
            "rungs": [one.as_json() for one in self.standings],
            "estimate": self.estimate and asdict(self.estimate),
            "report": None if self.page is None else str(self.page),
        }


def label(gpus: int) -> str:
    """A number of GPUs, for people."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "CPU"


def _short_label(gpus: int) -> str:
    return f"{gpus}gpu" if gpus else "cpu"


# --- what the command line says -------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """`--gpus 1,2,8` as numbers. Raises UsageError for what is none, or stands there twice."""
    numbers = forecast.counts(text)
    if len(set(numbers)) < len(numbers):
        raise usage("bad-gpus", f"--gpus {text}: a rung stands there twice", "--gpus 1,2,8")
    return numbers


def terms(gpus: Sequence[int], *, price: float | None, rows: int | None, row_tokens: str | None) -> ForecastOptions:
    """What the stage file does not say. Raises UsageError for what makes no sense."""
    if price is not None and not 0 < price < math.inf:
        raise usage("bad-price", f"--price is more than 0, not {price:g}")
    if price is not None and not any(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    if row_tokens is not None:
        lengths.parse(row_tokens)
    return ForecastOptions(price=price, rows=rows, row_tokens=row_tokens)


# --- what is to be climbed ------------------------------------------------------------------------


def plan_rungs(
    request: Request, gpus: Sequence[int], *, steps: int, terms: ForecastOptions, running: bool = True
) -> Climb:
    """All rungs, validated and planned before the first one starts.

    Raises InvalidConfig, NotReady or UsageError: then nothing was started, and no folder is left.
    """
    resolved = prepare.resolve(replace(request, gpus=max(gpus)), running=running)
    stage, root = resolved.stage, rundir.runs_root()
    if running:
        _require_here(gpus, resolved.look)
    plans = {count: plan.make(stage, gpus=count) for count in gpus}
    # all rungs read the same slice: that of the one with most rows a step
    batch = max(planned.global_batch for planned in plans.values())
    findings = [*stage.findings, *short_findings(stage, steps)]
    rungs = []
    for count in gpus:
        short = _request(stage, request, count, steps, batch)
        changes, notes = _without_deepspeed(stage, short)
        short = replace(short, overrides=(*short.overrides, *changes))
        prepared = prepare.prepare(short, running=running)
        known = _predicted(prepared.plan, resolved, terms)
        # only looked at: it is prepared anew when its turn comes
        rundir.release(prepared.folder)
        rungs.append(Rung(gpus=count, request=short, prepared=prepared))
        # what the short stage is told of itself is not about the file
        findings += [*notes, *(known.findings if known is not None else ())]
        findings += [one for one in (*prepared.plan.findings, *prepared.warnings) if one.severity != "note"]
    findings += _not_constant(stage, rungs)
    if stopping := errors(findings, strict=request.strict):
        raise InvalidConfig(stopping)
    # a dry run reads no model and no data
    key = _key(resolved, plans[gpus[0]], steps) if running else ""
    return Climb(
        resolved=resolved,
        plans=plans,
        rungs=tuple(rungs),
        steps=steps,
        terms=terms,
        campaign=Campaign(kind=KIND, key=key, name=stage.name, root=root),
        findings=tuple(dict.fromkeys(findings)),
    )


def _require_here(gpus: Sequence[int], look: Look | None) -> None:
    """Raise NotReady, naming the rungs that can be run, where one needs more GPUs than there are."""
    most, here = max(gpus), 0 if look is None else len(look.visible)
    if most <= here:
        return
    possible = [str(count) for count in gpus if count <= here]
    raise not_ready(
        "too-few-gpus",
        f"the rung of {label(most)} needs more than the {here} here",
        f"--gpus {','.join(possible)} can be run here" if possible else "--gpus 0 trains on the CPU",
    )


def _key(resolved: ResolvedStage, planned: Plan, steps: int) -> str:
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


def _request(stage: Stage, request: Request, count: int, steps: int, batch: int) -> Request:
    """The command line of a rung; `Rung.below` says where."""
    place = rundir.runs_root() / _MODELS / _short_label(count)
    name = json.dumps(f"{stage.name}-{_short_label(count)}", ensure_ascii=False)
    overrides = [*request.overrides, *short_overrides(stage, steps=steps, output=place, batch=batch), f"name={name}"]
    if stage.config.options.get("on_hang") is None:
        # nobody looks on, and the next rung waits
        overrides.append("on_hang=stop")
    # a rung that a killed command left may have the GPUs: it is ended later
    return replace(request, gpus=count, overrides=tuple(overrides), fresh=True, strict=False, elsewhere=True)


def _predicted(planned: Plan, resolved: ResolvedStage, terms: ForecastOptions) -> forecast.Estimate | None:
    """The forecast for one rung; None on the CPU, and where shape or row lengths are not known."""
    if not planned.gpus:
        return None
    try:
        return forecast.of_plan(planned, resolved.trainer.packages, terms)
    except (LaunchError, OSError):
        return None


def _without_deepspeed(stage: Stage, request: Request) -> tuple[list[str], list[Finding]]:
    """On one GPU: the override that leaves DeepSpeed out, or why it stays."""
    options = stage.options
    named = any(text.startswith(_NAMES_DEEPSPEED) for text in request.overrides)
    if request.gpus != 1 or options.deepspeed is None or named:
        return [], []
    # one process shards nothing: all that DeepSpeed can save there is what it keeps on the host
    keep = "offload" in options.deepspeed_name
    why = f"`{options.deepspeed_name}` keeps on the host what the card may not hold"
    if stage.entry.needs_process_group:
        keep, why = True, "without it one process has no process group (dpo_utils.py:453)"
    key = "deepspeed"
    code, message, help = "deepspeed-kept", f"DeepSpeed stays on one GPU: {why}", None
    if not keep:
        code, message = "deepspeed-off", "DeepSpeed is off on one GPU, where it would shard nothing"
        help = f"`deepspeed={options.deepspeed_name}` on the command line keeps it"
    note = launch_finding("note", code, message, help, key=key, **stage.config.origin(key).place)
    return ([] if keep else ["deepspeed=none"]), [note]


def _not_constant(stage: Stage, rungs: Sequence[Rung]) -> Iterator[Finding]:
    sizes = {label(rung.gpus): rung.prepared.plan.global_batch for rung in rungs}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{rows} on {name}" for name, rows in sizes.items())
        yield launch_finding(
            "warning",
            "batch-not-constant",
            f"the rungs train with different global batches: {each}",
            "`batch: {global: N, per_device: M}` keeps it, and accumulation follows from --gpus",
            key="batch.global",
            **stage.config.origin("batch").place,
        )


# --- the stage, short and without consequences ---------------------------------------------------


def short_overrides(stage: Stage, *, steps: int, output: Path, batch: int | None = None) -> tuple[str, ...]:
    """`key=value` texts after which training does exactly `steps` optimizer steps into `output`.

    What stays: model, precision, batch, DeepSpeed, kernels, the peak learning rate. What changes: it reads a
    slice of the data where upstream can cut one, uploads, evaluates and tracks nothing, saves no checkpoint
    and writes every loss down. The final model is saved: no argument of either backend leaves it out (the
    probe does, for `bench` and `tune`). The learning rate goes through its whole schedule, which neither
    backend counts otherwise than the steps (finetune.py:709): such runs compare with each other, on any
    number of GPUs, and not with the first steps of the full run.

    `batch` is the rows of one step, where `batch:` does not say so. Several numbers of GPUs share a
    tokenised slice where they are given the largest of theirs. Data sets are cut in proportion; one
    whose size is not known here is cut to a count, which upstream fills up by repeating rows where it
    has fewer.
    """
    changes = {**_short(stage, steps, batch), **_harmless(stage), stage.entry.names.output: str(output)}
    expected = stage.options.expect
    return (
        *(f"{name}={spelt(value)}" for name, value in changes.items()),
        *(f"expect.{name}=any" for name in _NOT_EXPECTED if name in expected),
    )


def short_findings(stage: Stage, steps: int) -> tuple[Finding, ...]:
    """What is not as small as it should be, and what such a run cannot show; notes."""
    schedule = _note(
        stage,
        "short-schedule",
        "learning_rate",
        f"the learning rate goes through warm-up and decay within {steps} steps: losses compare with "
        "those of other short runs, not with the first steps of the full one",
    )
    return (*_uncut(stage, steps), schedule)


def rows_needed(stage: Stage, steps: int, batch: int | None = None) -> int:
    """Rows to cut for that many steps, reserve included."""
    step = batch or (stage.options.batch and stage.options.batch.total)
    if not step:
        names, values = stage.entry.names, stage.values
        own = stage.options.batch and stage.options.batch.per_device
        step = (own or int(values[names.per_device])) * int(values[names.accumulation])
        step *= ASSUMED_DEVICES
    return max(FEWEST_ROWS, math.ceil(steps * step * RESERVE) + step)


def cut(listed: Sequence[str], sizes: Sequence[int | None], needed: int) -> tuple[str, ...] | None:
    """A mixer list cut to about so many rows in all; None where it has no more than that already.

    `sizes` are the rows that each entry gives, None where that is not known. Sets keep their
    proportions as far as they are known; of the rest each gets its part by the shares asked for. No set
    that had any rows loses all, and none gets more than it had.
    """
    names, amounts = listed[::2], listed[1::2]
    known = sum(size for size in sizes if size is not None)
    if None not in sizes and known <= needed:
        return None
    shares = math.fsum(float(a) for a, size in zip(amounts, sizes, strict=True) if size is None)
    # where some are not known, each set counts as much as any other
    unknown = needed * sum(size is None for size in sizes) / len(sizes)
    if needed - unknown > known:
        unknown = needed - known
    words = []
    for name, amount, size in zip(names, amounts, sizes, strict=True):
        if size is None:
            rows = unknown * float(amount) / shares
        else:
            rows = min(size, (needed - unknown) * size / max(1, known))
        # a count of 1 is what a slip of the pen looks like
        count = max(2, math.ceil(rows))
        count = count if size is None else min(size, count)
        words += [name, str(count) if count else amount]
    return tuple(words)


def _short(stage: Stage, steps: int, batch: int | None) -> dict[str, Any]:
    names, fields = stage.entry.names, stage.schema.fields
    changes: dict[str, Any] = {names.max_steps: steps, names.logging_steps: 1}
    if "checkpointing_steps" in fields:
        # DPO's is a number, which no run of so many steps comes to
        changes["checkpointing_steps"] = steps + 1
    if stage.entry.mixes:
        listed = stage.values.get(names.data)
        words = [str(word) for word in listed] if isinstance(listed, list) else []
        sliced = cut(words, _sizes(stage, words), rows_needed(stage, steps, batch))
        changes |= {} if sliced is None else {names.data: sliced}
    warm = stage.values.get("warmup_steps")
    if isinstance(warm, int | float) and warm >= 1:
        step = batch or (stage.options.batch and stage.options.batch.total)
        rows = plan.count_rows(stage, stage.values) if step else None
        full = plan.total_steps(stage, stage.values, rows, step or 1)
        # the share that it has of the full run; where that is not known, never most of this one
        share = round(steps * warm / full) if full else min(int(warm), steps // 10)
        changes["warmup_steps"] = min(int(warm), share)
    return changes


def _sizes(stage: Stage, listed: Sequence[str]) -> list[int | None]:
    """Rows that each entry of a mixer list gives; None where they cannot be counted here."""
    data = stage.entry.names.data
    return [
        plan.count_rows(stage, Values(stage.schema, {data: list(listed[at : at + 2])}))
        for at in range(0, len(listed), 2)
    ]


def _harmless(stage: Stage) -> dict[str, Any]:
    """What differs from the value that the stage has, among the fields that there are."""
    values = stage.values
    return {
        name: value
        for name, value in stage.backend.SHORT_RUN.items()
        if name in (stage.args if value is None else stage.schema.fields)
        and not (values[name] is None if value is None else str(_only(values[name])) == str(value))
    }


def _only(value: Any) -> Any:
    """A list of one says what its element does."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _uncut(stage: Stage, steps: int) -> Iterator[Finding]:
    names = stage.entry.names
    if stage.entry.mixes or stage.values.get("dataset_streaming"):
        return
    rows, needed = plan.count_rows(stage, stage.values), rows_needed(stage, steps)
    if rows is not None and rows <= 2 * needed:
        return
    many = "all rows" if rows is None else f"all {rows:,} rows"
    yield _note(
        stage,
        "uncut-data",
        names.data,
        f"{many} are tokenised for {steps} steps: TRL takes a split whole, `train[:{needed}]` is no "
        "name of one (trl/scripts/sft.py:106)",
        "it trains on no more than it needs; the tokenised rows are cached for the full run",
    )


def _note(stage: Stage, code: str, name: str, message: str, help: str | None = None) -> Finding:
    origin = stage.config.origin(f"args.{name}")
    return launch_finding("note", code, message, help, key=f"args.{name}", **origin.place)


# --- the climb ------------------------------------------------------------------------------------


def climb(climb: Climb, *, fresh: bool = False, allow_unproven: bool = False, quiet: bool = False) -> LadderResult:
    """Run the rungs that have not passed yet, in turn, until one does not.

    INT and TERM stop the rung that runs, and nothing follows; a terminal that goes stops nothing. Raises
    NotReady where another command climbs it, or a rung cannot be started now.
    """
    with climb.campaign.opened(fresh=fresh) as folder:
        record = _Record(climb, folder, allow_unproven=allow_unproven)
        record.write()
        standings = list[Standing]()
        end: tuple[Exit, str | None] = Exit.OK, None
        with trial.interruptible() as stop:
            end = _climb(climb, record, standings, quiet=quiet)
        if stop.requested:
            end = Exit.INTERRUPTED, f"{label(climb.rungs[len(standings)].gpus)}: interrupted"
        return _result(climb, folder, standings, *end)


def _climb(climb: Climb, record: _Record, standings: list[Standing], *, quiet: bool) -> tuple[Exit, str | None]:
    """The rungs in turn, and why it ends early. Raises KeyboardInterrupt."""
    for rung in climb.rungs:
        standing = record.standing(rung.gpus, standings)
        if standing is None or not standing.passed:
            if not quiet:
                console.say(f"rung {len(standings) + 1} of {len(climb.rungs)}: {label(rung.gpus)}")
            prepared = prepare.prepare(rung.below(record.folder), running=True)
            if not quiet:
                # what is to be said was said of all rungs
                console.beginning(prepared.plan, prepared.folder.console(prepared.attempt))
            outcome = trial.of_prepared(prepared, quiet=True)
            # the weights after so few steps are of no use, and large
            shutil.rmtree(record.folder / _MODELS, ignore_errors=True)
            if outcome.interrupted:
                raise KeyboardInterrupt
            record.keep(rung.gpus, outcome, _facts(prepared, outcome, climb))
            standing = record.standing(rung.gpus, standings)
            assert standing is not None
            standing = replace(standing, before=False)
        standings.append(standing)
        if not standing.passed:
            reds = "; ".join(flag.text for flag in standing.flags if flag.colour == "red")
            crashed = standing.record.get("exit") == Exit.TRAINING
            return Exit.TRAINING if crashed else Exit.VERDICT, f"{label(rung.gpus)}: {reds}"
    return Exit.OK, None


def _result(climb: Climb, folder: Path, standings: Sequence[Standing], code: Exit, reason: str | None) -> LadderResult:
    result = LadderResult(
        folder=folder,
        standings=tuple(standings),
        exit=code,
        reason=reason,
        estimate=_estimate(climb, standings[-1]) if code is Exit.OK else None,
    )
    runs = [Path(str(one.record.get("run"))) for one in standings]
    with contextlib.suppress(LaunchError):
        page = experiment.page(runs, folder / "report.html", _lead(climb.stage, result))
        result = replace(result, page=page)
    return result


def _lead(stage: Stage, result: LadderResult) -> Lead:
    """Rungs and gates, and whether to go, at the top of the page."""
    go = result.exit is Exit.OK
    flags = [
        {"rung": label(one.gpus), "gate": flag.gate, "is": flag.colour, "why": flag.text}
        for one in result.standings
        for flag in one.flags
    ]
    lines = [f"no-go: {result.reason}"] if result.reason else []
    lines += [result.estimate.line()] if result.estimate is not None else []
    return Lead(
        title=f"ladder {stage.name}",
        decision="go" if go else "no-go",
        colour="pass" if go else "fail",
        tables=([_row(one) for one in result.standings], flags),
        lines=lines,
    )


class _Record:
    """`ladder.json`: what each rung showed, written after every one."""

    def __init__(self, climb: Climb, folder: Path, *, allow_unproven: bool) -> None:
        stage = climb.stage
        self.folder, self.allow_unproven, self.limits = folder, allow_unproven, stage.options.gates
        self.rungs = dict(Record(rundir.read_json(folder / RECORD)).part("rungs"))
        self.about = {
            "version": _VERSION,
            "key": climb.campaign.key,
            "config": str(stage.config.path),
            "stage": stage.options.stage,
            "backend": stage.options.backend,
            "steps": climb.steps,
        }

    def keep(self, gpus: int, outcome: Outcome, facts: Facts) -> None:
        self.rungs[str(gpus)] = {**outcome.as_json(), "facts": facts.as_json()}
        self.write()

    def write(self) -> None:
        experiment.write(self.folder / RECORD, {**self.about, "rungs": self.rungs})

    def standing(self, gpus: int, below: Sequence[Standing]) -> Standing | None:
        """What the gates say of a rung; None where it was not run, or not with this launch."""
        known = mapping(self.rungs.get(str(gpus)))
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
            gpus=gpus,
            facts=facts,
            flags=tuple(gates.judge(facts, self.limits, base)),
            efficiency=gates.efficiency(facts, base),
            before=True,
            record={key: value for key, value in known.items() if key not in ("facts", "metrics")},
        )


# --- what a run showed ----------------------------------------------------------------------------


def _facts(prepared: Prepared, outcome: Outcome, climb: Climb) -> Facts:
    metrics, ran, verdict = outcome.verdict.metrics, outcome.plan, outcome.verdict
    rows = files.read_lines(outcome.run.metrics)
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    # by now the row lengths are known, where they were not before
    known = _predicted(prepared.plan, climb.resolved, climb.terms)
    doubt = verdict.status == "unproven" and outcome.exit is Exit.VERDICT
    unproven = outcome.reason if doubt else None
    passed = outcome.exit is Exit.OK or unproven is not None
    # the rung itself expects no trend: it is too short for what a verdict asks
    falling = climb.stage.options.expect.get("trend") == "falling"
    trends = (point.state for point in verdict.points if point.name == "trend" and falling)
    return Facts(
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
        card_gib=_card_gib(prepared),
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


def _card_gib(prepared: Prepared) -> float | None:
    """The memory of the smallest card that trained."""
    slots = () if prepared.devices is None or not prepared.plan.gpus else prepared.devices.slots
    return min((slot.gpu.memory_mib / 1024 for slot in slots), default=None)


def _starts_at_ln2(stage: Stage) -> bool:
    """Whether the first loss is -log sigmoid(0): policy and reference are still the same model."""
    values = stage.values
    if not stage.schema.pairs or values.get("load_balancing_loss"):
        return False
    kinds = values.get("loss_type")
    names = {str(getattr(k, "value", k)) for k in (kinds if isinstance(kinds, list) else [kinds])}
    return names <= {"dpo", "dpo_norm", "sigmoid"}


# --- the full run ---------------------------------------------------------------------------------


def _estimate(climb: Climb, top: Standing) -> FullRun:
    stage, step, terms = climb.stage, top.facts.step_seconds, climb.terms
    whole = climb.plans[top.gpus]
    known = _predicted(whole, climb.resolved, terms)
    repacked = plan.repacks(stage, stage.values)
    steps = known.steps if known is not None else None
    if steps is None:
        # of rows whose lengths are not known nobody can say how many packed ones they come to
        row_lengths = lengths.parse(terms.row_tokens) if repacked and terms.row_tokens else None
        rows = None if repacked else terms.rows
        if row_lengths is not None:
            rows = footprint.rows_per_epoch(whole, row_lengths, terms.rows or whole.rows)
            row_lengths = footprint.rows_of(whole, row_lengths)
        steps = footprint.optimizer_steps(whole, rows, row_lengths, override=True)
    if step is None or not steps:
        options = ["--rows N"] if whole.rows is None and terms.rows is None else []
        options += ["--row-tokens MEAN:MAX"] if repacked and terms.row_tokens is None else []
        why = f"its steps are not known: {' and '.join(options)}" if step else "no step was timed"
        return FullRun(gpus=top.gpus, steps=steps, hours=None, cost=None, formula=why)
    seconds = steps * step
    formula = f"{steps:,} steps x {step:.3g} s, as measured"
    rows = whole.rows or terms.rows
    # reference log-probabilities that are computed before the first step
    beforehand = stage.entry.caches_reference or stage.values.get("precompute_ref_log_probs")
    if rows and stage.refers and beforehand:
        # forward only: a third of a step over as many rows
        seconds += rows / whole.global_batch * step / 3
        formula += f", and {rows:,} rows through the reference"
    hours = seconds / 3600
    # a price is for GPUs
    priced = terms.price is not None and top.gpus
    cost = hours * (terms.price or 0) * top.facts.devices if priced else None
    return FullRun(gpus=top.gpus, steps=steps, hours=hours, cost=cost, formula=formula)


# --- for people -----------------------------------------------------------------------------------


def show(result: LadderResult) -> None:
    """The table, what is not green, go or no-go, and what the full run takes."""
    if rows := [_row(one) for one in result.standings]:
        console.table(rows, tuple(rows[0]))
    flags = [(one, flag) for one in result.standings for flag in one.flags]
    for one, flag in flags:
        if flag.colour != "green":
            console.say(f"  {label(one.gpus)}: {flag.colour}[{flag.gate}] {flag.text}")
    if result.exit is Exit.OK:
        yellow = sum(flag.colour == "yellow" for _, flag in flags)
        console.say("go" + (f", with {yellow} yellow flag(s)" if yellow else ""))
    else:
        console.say(f"no-go: {result.reason}")
        console.say("the same command goes on at this rung; --fresh begins anew")
    if result.estimate is not None:
        console.say(result.estimate.line())
    console.say(f"ladder: {result.folder}")
    if result.page is not None:
        console.say(f"report: {result.page}")


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
