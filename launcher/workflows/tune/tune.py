"""`launch tune`: short real runs of a stage until the fastest setting is found that trains the same."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.errors import Exit, Finding, NotReady, usage
from launcher.machine import devices
from launcher.machine.datasheets import CPU, card_of
from launcher.plan import footprint
from launcher.plan.plan import Plan
from launcher.planning import check, collect, forecast
from launcher.planning.collect import Facts, Scope
from launcher.planning.request import Request
from launcher.runs import rundir
from launcher.workflows import experiment
from launcher.workflows.bench import comparison, measure
from launcher.workflows.bench.bench import Bench, require_gpu
from launcher.workflows.bench.comparison import TOLERANCE, Sample, VariantSummary
from launcher.workflows.bench.variants import AS_WRITTEN, Variant
from launcher.workflows.tune import space
from launcher.workflows.tune.search import RUNS, Search, SettingRuns, Status, Trial
from launcher.workflows.tune.space import Candidate, Space

TUNE_VERSION = 2
FILE = rundir.TUNE_RECORD
STOPPING_S = 15.0
"""What ending a trial may take after its time is up: INT, TERM, KILL."""
_POINTS = ("liger", "packing", "attention", "batch", "loss", "memory")
"""Points of the verdict that a setting has to prove; the others are not about settings."""


@dataclass(slots=True, kw_only=True)
class Tuning:
    """One search on one machine; `key` names settings, contents and machine: another key is another search."""

    resolved: Facts
    space: Space
    key: str
    budget_s: float = 600.0
    output: Path | None = None
    search: Search = field(init=False)
    folder: Path = Path()
    state: str = "running"
    findings: tuple[Finding, ...] = ()
    place: Path | None = None

    def __post_init__(self) -> None:
        self.search = Search(self.space, self.space.grid())

    @property
    def request(self) -> Request:
        return self.resolved.request

    @property
    def plan(self) -> Plan:
        return self.space.plan

    def take_up(self, record: Mapping[str, Any]) -> None:
        """Learn again what an earlier start has measured; a record that cannot be read is none.

        A trial that could not be started, or that a smaller budget ended, is run again.
        """
        try:
            more = self.budget_s > record.get("budget_s", 0)
            for data in record.get("trials") or ():
                sample = Sample.from_json(data["sample"])
                if sample.cause == "refused" or (sample.cause == "timeout" and more):
                    continue
                candidate = self.space.candidate({**self.space.base, **data["settings"]})
                candidate = replace(candidate, purpose=data["purpose"], why=data["why"])
                self.learn(candidate, sample)
        except (AttributeError, KeyError, TypeError, ValueError):
            self.search = Search(self.space, self.search.grid.values())

    def learn(self, candidate: Candidate, sample: Sample) -> Trial:
        passed = [one for one in self.search.runs if one.ok]
        runs = [*(one.sample for one in passed if one.candidate.key == candidate.key), sample]
        # losses are compared with those of the file as written, or of the first setting that could be measured
        first = passed[0].candidate.key if passed else candidate.key
        reference = [one.sample for one in passed if one.candidate.key == first != candidate.key]
        return self.search.learn(judge(candidate, runs, reference))

    @property
    def used(self) -> float:
        """Seconds of the budget, those of earlier starts included."""
        return sum(one.sample.seconds for one in self.search.runs)

    @property
    def chosen(self) -> SettingRuns | None:
        """The best that the judge of `launch bench` calls faster than the file as written; else that file.

        Where that file does not pass every time, the best.
        """
        good = self.search.good
        for one in good:
            row = self.row(one)
            if row is None or row.standing in ("baseline", "faster"):
                return one
        return next(iter(good), None)

    def row(self, one: SettingRuns) -> VariantSummary | None:
        """A setting beside the file as written, by all runs of both; None where that was not measured."""
        first = self.search.first
        if first is None or not any(run.ok for run in first.runs):
            return None
        return comparison.compare([*first.samples, *one.samples])[-1]

    def bench(self) -> Bench:
        chosen = self.chosen
        return Bench(
            request=replace(self.request, stage=self.plan.stage.options.stage, gpus=self.plan.gpus),
            variants=tuple(Variant(one.name) for one in self.search.results),
            steps=self.space.steps,
            repeats=RUNS,
            key=self.key,
            batch=self.plan.global_batch,
            folder=self.folder,
            samples=[sample for one in self.search.results for sample in one.samples],
            proposed=None if chosen is None else chosen.name,
        )

    def as_json(self) -> dict[str, Any]:
        best, rows = self.chosen, self.space.rows
        return {
            "tune_version": TUNE_VERSION,
            "key": self.key,
            "config": str(self.request.config),
            "overrides": list(self.request.overrides),
            "gpus": self.plan.gpus,
            "steps": self.space.steps,
            "budget_s": self.budget_s,
            "used_s": round(self.used, 1),
            "tolerance": TOLERANCE,
            "state": self.state,
            "stopped": self.search.stopped,
            "card": {"name": self.space.card.name, "gib": self.space.card.gib},
            "rows": {"mean": rows.mean, "longest": rows.longest, "source": rows.source},
            "attention": self.space.attention,
            "shape": self.space.shape.source,
            **self.space.as_json(),
            "grid": self.search.summary(),
            "trials": [self._trial_json(one) for one in self.search.runs],
            "best": None if best is None else self._best_json(best),
            "proposal": None if self.place is None else str(self.place),
            "bench": [row.as_json() for row in self.bench().rows] if self.search.runs else [],
            "folder": str(self.folder),
        }

    def _trial_json(self, one: Trial) -> dict[str, Any]:
        candidate = one.candidate
        return {
            "name": one.sample.variant,
            "purpose": candidate.purpose,
            "why": candidate.why,
            "settings": dict(candidate.settings),
            "overrides": list(self.space.overrides(candidate.settings)),
            "expected": {
                "peak_gib": candidate.peak,
                "trial_peak_gib": candidate.short,
                "seconds_per_step": candidate.seconds,
                "tokens_per_step": candidate.tokens,
            },
            "status": one.status,
            "reason": one.reason,
            "blamed": list(one.blamed),
            "cut": one.status == "timeout",
            "tokens_per_second_per_gpu": one.speed or None,
            "seconds_per_step": one.step,
            "peak_allocated_gib": one.peak,
            "loss_change": one.loss_change,
            "learned": one.learned,
            "seconds": round(one.sample.seconds, 1),
            "sample": one.sample.as_json(),
        }

    def _best_json(self, best: SettingRuns) -> dict[str, Any]:
        first, row = self.search.first, self.row(best)
        base = None if row is None or first is None else asdict(first.spread)
        return {
            "settings": dict(best.candidate.settings),
            "changes": self.space.changes(best.candidate.settings),
            "tokens_per_second_per_gpu": best.speed,
            "spread": asdict(best.spread),
            "spread_as_written": base,
            # the file as written is itself what others are held to
            "speed_ratio": None if row is None else round(row.speed_ratio or 1.0, 4),
            "loss_change": self.loss_change(best),
            "peak_allocated_gib": best.peak,
        }

    def loss_change(self, best: SettingRuns) -> float | None:
        row = self.row(best)
        return best.decisive.loss_change if row is None else row.loss_change or 0.0

    def write(self) -> None:
        """Raises NotReady where it cannot be written."""
        experiment.write(self.folder / FILE, self.as_json(), self.resolved.redactor)


def prepare(
    request: Request, *, cpu: bool, steps: int, row_tokens: str | None, budget_s: float, output: Path | None
) -> Tuning:
    """Judge the stage file, look at the machine, and make the grid; nothing starts.

    Raises InvalidConfig (also where rows or shape are not known), NotReady or UsageError.
    """
    if budget_s <= STOPPING_S:
        message = f"not even one trial fits into {budget_s:g} s: ending one takes {STOPPING_S:g} s"
        raise usage("bad-time", message, "--budget 10m")
    if output is not None:
        space.require_ours(output, request.config)
    request = require_gpu(request, cpu=cpu)
    resolved = collect.collect(request, Scope.START)
    # those that are merely in use may be a killed command's own: `opened` asks again
    idle = replace(resolved.look or devices.look(os.environ), uses={}) if resolved.gpus else None
    chosen = _choose(replace(resolved, look=idle))
    stage, packages = resolved.stage, resolved.trainer.packages
    made = check.require(resolved, output=Path("model"))
    rows = forecast.row_lengths(made, packages, forecast.ForecastOptions(row_tokens=row_tokens))
    slots = chosen.slots if chosen is not None else ()
    smallest = min((slot.gpu.memory_mib / 1024 for slot in slots if slot.gpu.memory_mib), default=None)
    # what the file's own attention comes to on this machine
    upstreams = made.values.get("attn_implementation") is None and made.stage.entry.best_attention
    plain = not made.gpus or (upstreams and "flash-attn" not in packages)
    levers = Space(
        plan=made,
        packages=packages,
        rows=rows,
        shape=footprint.shape_of(made),
        card=card_of(slots[0].gpu.name, smallest) if slots else CPU,
        steps=steps,
        attention="sdpa" if plain else footprint.attention_of(made),
    )
    settings = [TUNE_VERSION, steps, row_tokens, levers.card.name, levers.card.gib]
    key = [*settings, levers.as_json(), measure.identity(made, resolved.trainer)]
    return Tuning(
        resolved=resolved.with_request(stage=stage.options.stage, gpus=made.gpus),
        space=levers,
        budget_s=budget_s,
        output=output,
        key=experiment.key_of(key),
        findings=tuple(finding for finding in check.beyond_file(made) if finding.severity != "note"),
    )


@contextlib.contextmanager
def opened(tuning: Tuning, *, fresh: bool = False) -> Iterator[Tuning]:
    """The search in its folder, with what an earlier start has learned. Raises what `Campaign.opened` raises."""
    root = tuning.request.runs or rundir.runs_root()
    series = experiment.Campaign(kind="tune", key=tuning.key, name=tuning.request.config.stem, root=root)
    with series.opened(fresh=fresh) as tuning.folder:
        _choose(tuning.resolved.look_again())
        tuning.take_up(rundir.read_json(tuning.folder / FILE))
        yield tuning


def _choose(resolved: Facts) -> devices.Devices | None:
    """The GPUs that a trial would get, None on the CPU. Raises NotReady where they are not to be had."""
    chosen = resolved.choose_devices() if resolved.gpus else None
    if chosen is not None and chosen.refused:
        raise NotReady(chosen.findings)
    return chosen


def run(tuning: Tuning, *, show: Callable[[str], None] = lambda _: None) -> Exit:
    """Run trials until nothing better is to be expected, or the budget is used up; then propose.

    The record is up to date after each. What the user stops ends the search, whatever else happens only its trial.
    """
    tuning.write()
    for line in beginning(tuning):
        show(line)
    before = len(tuning.search.runs)
    with experiment.interruptible() as stop:
        _run_trials(tuning, show)
    if stop.requested:
        tuning.state = "interrupted"
        tuning.write()
        return Exit.INTERRUPTED
    show(f"end: {tuning.search.stopped}")
    if before and before == len(tuning.search.runs):
        show("nothing new was tried: --fresh starts over")
    tuning.state, best = "finished", tuning.chosen
    if best is not None:
        place = tuning.output or tuning.folder / "tuned.yaml"
        head, given = _head(tuning, best, place), tuning.request.overrides
        try:
            space.write(place, tuning.space, best.candidate.settings, head=head, given=given)
            tuning.place = place
        except NotReady as error:
            # what was measured is there all the same
            tuning.findings = (*tuning.findings, *error.findings)
    tuning.write()
    if tuning.place:
        return Exit.OK
    # nothing was tried, nothing could be started, or written
    nothing = {one.status for one in tuning.search.runs} <= {"refused"}
    return Exit.NOT_READY if best is not None or nothing else Exit.TRAINING


def _run_trials(tuning: Tuning, show: Callable[[str], None]) -> None:
    """Trial after trial. Raises KeyboardInterrupt where the user stops one."""
    search, used, began = tuning.search, tuning.used, time.monotonic()
    while True:
        # planning between trials counts too
        gone = max(tuning.used, used + time.monotonic() - began)
        left = tuning.budget_s - gone - STOPPING_S
        if (candidate := search.propose(left)) is None:
            return
        show(f"trial {len(search.runs) + 1}: {candidate.why}")
        start, earlier = time.monotonic(), search.runs_of(candidate)
        words = search.words(candidate, search.base) or AS_WRITTEN
        name = earlier[0].sample.variant if earlier else f"{len(search.runs) + 1}: {words}"
        overrides = tuning.space.overrides(candidate.settings)
        sample = measure.measure(
            tuning.resolved,
            Variant(name, overrides),
            overrides=overrides,
            steps=tuning.space.steps,
            root=tuning.folder,
            repeat=len(earlier),
            timeout_s=left,
            batch=tuning.plan.global_batch,
        )
        if sample.cause == "refused":
            # that another took the GPUs is no setting's fault
            _choose(tuning.resolved.look_again())
        unproved = tuple(point for point in sample.unproved if point in _POINTS)
        # with what preparing took
        seconds = max(sample.seconds, time.monotonic() - start)
        one = tuning.learn(candidate, replace(sample, unproved=unproved, seconds=seconds))
        speed = f"{one.speed:,.0f} tokens/s per GPU, " if one.speed else ""
        show(f"  {speed}{one.learned} ({one.sample.seconds:.0f} s)")
        tuning.write()


_STATUS: Mapping[str, Status] = {
    "flawed": "contract",
    "unproven": "unproven",
    "loss changed": "loss changed",
    "unknown": "no speed",
}
"""What the judge of `launch bench` says of runs that came to their end, as the status of a trial."""


def judge(candidate: Candidate, runs: Sequence[Sample], reference: Sequence[Sample]) -> Trial:
    """What the last of a setting's runs means: it counts only if everything that it asks for was proved.

    Losses are compared by the medians of all. No `reference`: this setting is what others are held to.
    """
    sample = runs[-1]
    base = reference or [replace(one, variant="itself") for one in runs]
    row = comparison.compare([*base, *runs])[-1]
    status, reason = _STATUS.get(row.standing, "ok"), sample.reason
    if not sample.measured:
        status = sample.cause
    elif status != "ok":
        reason = row.why
    points = [flaw.partition(" is ")[0] for flaw in sample.flaws] if status == "contract" else []
    points += [*sample.unproved, "gradients"] if status == "unproven" else []
    return Trial(
        candidate=candidate,
        sample=sample,
        status=status,
        reason=reason,
        blamed=tuple(point for point in points if point in candidate.settings),
        loss_change=row.loss_change,
    )


def beginning(tuning: Tuning) -> list[str]:
    counts, space, card = tuning.search.summary(), tuning.space, tuning.space.card
    values = [f"{one.name} ({', '.join(map(_value, one.values))})" for one in space.levers]
    room = "" if card.gib is None else f" of {card.gib:.0f} GiB"
    lines = [
        f"levers: {'; '.join(values)}",
        f"{counts['settings']} settings on {card.name or 'this GPU'}{room}; the plan leaves out "
        f"{counts['too_large']} that do not fit",
        f"rows: {space.rows.source}",
        *(f"{name} stays: {why}" for name, why in space.fixed.items()),
    ]
    if count := len(tuning.search.runs):
        lines.append(f"{count} trials of an earlier start, {tuning.used:.0f} s: {tuning.folder}")
    return lines


def ending(tuning: Tuning) -> list[str]:
    best, record = tuning.chosen, f"trials: {tuning.folder / FILE}"
    if tuning.state == "interrupted":
        return ["interrupted: the same command continues here", record]
    if best is None:
        return [f"nothing to propose: {tuning.search.stopped}", record]
    not_written = "not written; the same command with another -o does no trial twice"
    tuned = _command(tuning, tuning.place) if tuning.place else not_written
    return [*_summary(tuning, best), record, f"tuned: {tuned}"]


def _head(tuning: Tuning, best: SettingRuns, place: Path) -> list[str]:
    on = f"{tuning.plan.gpus} x {tuning.space.card.name or 'GPU'}" if tuning.plan.gpus else "the CPU"
    name, count = tuning.plan.stage.config.path.name, len(tuning.search.runs)
    return [
        f"{name} on {on}, {count} trials of {tuning.space.steps} steps.",
        f"  {_command(tuning, place)}",
        *_summary(tuning, best),
        f"Every trial: {tuning.folder / FILE}",
    ]


def _summary(tuning: Tuning, best: SettingRuns) -> list[str]:
    """The figures of the best setting, and its changes, each with what it was."""
    row, first, loss = tuning.row(best), tuning.search.first, tuning.loss_change(best)
    speed = f"{best.spread} tokens/s per GPU"
    if row is not None and first is not None and row.standing != "baseline":
        speed = f"{first.spread} -> {speed}, {row.speed_ratio:.2f}x"
    if loss is not None:
        # no minus before a zero
        speed += f", loss per token {round(loss, 4) + 0.0:+.2%} after the same tokens"
    if best.peak is not None and tuning.space.card.gib:
        speed += f", peak {best.peak:.0f} of {tuning.space.card.gib:.0f} GiB"
    base, settings = tuning.search.base.settings, best.candidate.settings
    changes = [
        f"{space.described(name, settings[name])} (was {_value(base.get(name, 'as it is'))})"
        for name in best.candidate.differing(tuning.search.base)
    ] or ["nothing that was tried is faster than the file as it is written"]
    return [f"{speed}.", *changes]


def _command(tuning: Tuning, place: Path) -> str:
    stage = tuning.plan.stage.options.stage
    return f"launch {stage} {shlex.quote(str(place))} --gpus {tuning.plan.gpus}"


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
