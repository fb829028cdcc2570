"""`launch tune`: short real runs until the fastest setting that trains the same is found."""

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
from launcher.machine.datasheets import CPU, Card, find_card
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

TUNE_VERSION = 3
FILE = rundir.TUNE_RECORD
STOPPING_S = 15.0
"""What ending a trial may take after its time is up: INT, TERM, KILL."""
_POINTS = ("liger", "packing", "attention", "batch", "loss", "memory")
"""Points of the verdict that a setting has to prove; the others are not about settings."""


@dataclass(slots=True, kw_only=True)
class Tuning:
    """One search on one machine; `key` names settings, contents and machine.

    `place` is the stage file that was written.
    """

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

    def restore(self, record: Mapping[str, Any]) -> None:
        """Learn again what an earlier start measured; nothing if the record is damaged.

        A trial that could not start, or that a smaller budget ended, is run again.
        """
        try:
            has_more_time = self.budget_s > record.get("budget_s", 0)
            for data in record.get("trials") or ():
                sample = Sample.from_json(data["sample"])
                if sample.cause == "refused":
                    continue
                if sample.cause == "timeout" and has_more_time:
                    continue
                candidate = self.space.candidate({**self.space.base, **data["settings"]})
                candidate = replace(candidate, purpose=data["purpose"], why=data["why"])
                self.learn(candidate, sample)
        except (AttributeError, KeyError, TypeError, ValueError):
            self.search = Search(self.space, self.search.grid.values())

    def learn(self, candidate: Candidate, sample: Sample) -> Trial:
        samples = [*self._list_samples(candidate), sample]
        # losses are compared with those of the file, or of the first setting that was measured
        reference = []
        measured = [run.candidate for run in self.search.runs if run.ok]
        if measured and measured[0].key != candidate.key:
            reference = self._list_samples(measured[0])
        return self.search.learn(judge_candidate(candidate, samples, reference))

    def _list_samples(self, candidate: Candidate) -> list[Sample]:
        """The samples of the trials of a setting that ran to their end."""
        samples = []
        for run in self.search.runs:
            if run.ok and run.candidate.key == candidate.key:
                samples.append(run.sample)
        return samples

    @property
    def used(self) -> float:
        """Seconds of the budget, those of earlier starts included."""
        return sum(run.sample.seconds for run in self.search.runs)

    @property
    def chosen(self) -> SettingRuns | None:
        """The best that the comparison calls faster than the file as written; else that file.

        If the file does not pass every time, the best.
        """
        good = self.search.good
        for setting in good:
            row = self.row(setting)
            if row is None or row.standing in ("baseline", "faster"):
                return setting
        return next(iter(good), None)

    def row(self, setting: SettingRuns) -> VariantSummary | None:
        """A setting beside the file as written, by all runs of both; None without that."""
        first = self.search.first
        if first is None or not any(run.ok for run in first.runs):
            return None
        return comparison.compare([*first.samples, *setting.samples])[-1]

    def bench(self) -> Bench:
        chosen = self.chosen
        variants = []
        samples: list[Sample] = []
        for setting in self.search.results.values():
            variants.append(Variant(setting.name))
            samples += setting.samples
        return Bench(
            request=replace(self.request, stage=self.plan.stage.options.stage, gpus=self.plan.gpus),
            variants=tuple(variants),
            steps=self.space.steps,
            repeats=RUNS,
            key=self.key,
            batch=self.plan.global_batch,
            folder=self.folder,
            samples=samples,
            proposed=None if chosen is None else chosen.name,
        )

    def as_json(self) -> dict[str, object]:
        best = self.chosen
        rows = self.space.rows
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
            "trials": [self._render_trial(run) for run in self.search.runs],
            "best": None if best is None else self._render_best(best),
            "proposal": None if self.place is None else str(self.place),
            "bench": [row.as_json() for row in self.bench().rows],
            "folder": str(self.folder),
        }

    def _render_trial(self, trial: Trial) -> dict[str, object]:
        candidate = trial.candidate
        return {
            "name": trial.sample.variant,
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
            "status": trial.status,
            "reason": trial.reason,
            "blamed": list(trial.blamed),
            "loss_change": trial.loss_change,
            "learned": trial.learned,
            "sample": trial.sample.as_json(),
        }

    def _render_best(self, best: SettingRuns) -> dict[str, object]:
        row = self.row(best)
        first = self.search.first
        as_written = None
        speed_ratio = None
        if row is not None and first is not None:
            as_written = asdict(first.spread)
            # the file itself is what others are compared with
            speed_ratio = round(row.speed_ratio or 1.0, 4)
        settings = best.candidate.settings
        return {
            "settings": dict(settings),
            "changes": self.space.changes(settings),
            "tokens_per_second_per_gpu": best.speed,
            "spread": asdict(best.spread),
            "spread_as_written": as_written,
            "speed_ratio": speed_ratio,
            "loss_change": self.loss_change(best),
            "peak_allocated_gib": best.peak,
        }

    def loss_change(self, best: SettingRuns) -> float | None:
        row = self.row(best)
        if row is None:
            return best.decisive.loss_change
        return row.loss_change or 0.0

    def write(self) -> None:
        """Write `tune.json`. Raises NotReady if that is impossible."""
        experiment.write(self.folder / FILE, self.as_json(), self.resolved.redactor)


def prepare_tuning(
    request: Request,
    *,
    cpu: bool,
    steps: int,
    row_tokens: str | None,
    budget_s: float,
    output: Path | None,
) -> Tuning:
    """Judge the stage file, look at the machine, and make the grid; nothing starts.

    Raises InvalidConfig (also if row lengths or the model's shape are unknown), NotReady or
    UsageError.
    """
    if budget_s <= STOPPING_S:
        message = f"not even one trial fits into {budget_s:g} s: ending one takes {STOPPING_S:g} s"
        raise usage("bad-time", message, "--budget 10m")
    if output is not None:
        space.require_own(output, request.config)
    resolved = collect.collect(require_gpu(request, cpu=cpu), Scope.START)
    card = _find_smallest_card(resolved)
    packages = resolved.trainer.packages
    plan = check.require(resolved, output=Path("model"))
    rows = forecast.find_row_lengths(
        plan, packages, forecast.ForecastOptions(row_tokens=row_tokens)
    )
    shape = footprint.find_model_shape(plan)
    attention = _resolve_attention(plan, packages)
    levers = Space(
        plan=plan,
        packages=packages,
        rows=rows,
        shape=shape,
        card=card,
        steps=steps,
        attention=attention,
    )
    settings = [TUNE_VERSION, steps, row_tokens, card.name, card.gib]
    key = [*settings, levers.as_json(), measure.identify_measurement(plan, resolved.trainer)]
    findings = [finding for finding in check.check_plan(plan) if finding.severity != "note"]
    return Tuning(
        resolved=resolved.with_request(stage=plan.stage.options.stage, gpus=plan.gpus),
        space=levers,
        budget_s=budget_s,
        output=output,
        key=experiment.digest_values(key),
        findings=tuple(findings),
    )


def _find_smallest_card(resolved: Facts) -> Card:
    """The card with the least memory among those that trials get, even if they are in use now.

    A killed command's trial may use them; `opened` ends it and looks again.
    """
    if not resolved.gpus:
        return CPU
    look = resolved.look or devices.survey_devices(os.environ)
    chosen = _choose_gpus(replace(resolved, look=replace(look, uses={})))
    if chosen is None or not chosen.slots:
        return CPU
    memory = [slot.gpu.memory_mib / 1024 for slot in chosen.slots if slot.gpu.memory_mib]
    return find_card(chosen.slots[0].gpu.name, min(memory, default=None))


def _resolve_attention(plan: Plan, packages: Mapping[str, str]) -> str:
    """The attention that the file as written uses on this machine."""
    if not plan.gpus:
        return "sdpa"
    takes_best = plan.values.get("attn_implementation") is None and plan.stage.entry.best_attention
    if takes_best and "flash-attn" not in packages:
        return "sdpa"
    return footprint.decide_attention(plan)


@contextlib.contextmanager
def open_campaign(tuning: Tuning, *, fresh: bool = False) -> Iterator[Tuning]:
    """Open the folder of a search, and restore the trials of an earlier start.

    Raises NotReady, as `Campaign.opened` does.
    """
    root = tuning.request.runs or rundir.find_runs_root()
    name = tuning.request.config.stem
    campaign = experiment.Campaign(kind="tune", key=tuning.key, name=name, root=root)
    with campaign.opened(fresh=fresh) as folder:
        tuning.folder = folder
        # raises before the first trial if the GPUs are not free
        _choose_gpus(tuning.resolved.look_again())
        record = rundir.read_json(tuning.folder / FILE)
        tuning.restore(record)
        yield tuning


def _choose_gpus(resolved: Facts) -> devices.Devices | None:
    """The GPUs that a trial would get, None on the CPU. Raises NotReady if it cannot get them."""
    if not resolved.gpus:
        return None
    chosen = resolved.choose_devices()
    if chosen is not None and chosen.refused:
        raise NotReady(chosen.findings)
    return chosen


def run(tuning: Tuning, *, show: Callable[[str], None]) -> Exit:
    """Run trials until nothing better is to be expected, or the budget is used up; then propose.

    The record is written after each. An interrupt ends the search, any other failure its trial.
    """
    tuning.write()
    for line in _describe_search(tuning):
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
    tuning.state = "finished"
    best = tuning.chosen
    if best is not None:
        _write_proposal(tuning, best)
    tuning.write()
    if tuning.place:
        return Exit.OK
    if best is not None or all(run.status == "refused" for run in tuning.search.runs):
        # nothing could be written, or started
        return Exit.NOT_READY
    return Exit.TRAINING


def _write_proposal(tuning: Tuning, best: SettingRuns) -> None:
    place = tuning.output or tuning.folder / "tuned.yaml"
    head = _render_head(tuning, best, place)
    settings = best.candidate.settings
    try:
        space.write(place, tuning.space, settings, head=head, requested=tuning.request.overrides)
        tuning.place = place
    except NotReady as error:
        # the measurements are kept all the same
        tuning.findings = (*tuning.findings, *error.findings)


def _run_trials(tuning: Tuning, show: Callable[[str], None]) -> None:
    """Run trial after trial. Raises KeyboardInterrupt if the user stops one."""
    search = tuning.search
    used = tuning.used
    began = time.monotonic()
    while True:
        # planning between trials counts too
        elapsed = max(tuning.used, used + time.monotonic() - began)
        left = tuning.budget_s - elapsed - STOPPING_S
        candidate = search.propose(left)
        if candidate is None:
            return
        show(f"trial {len(search.runs) + 1}: {candidate.why}")
        trial = _try_candidate(tuning, candidate, left)
        outcome = f"{trial.learned} ({trial.sample.seconds:.0f} s)"
        if trial.speed:
            outcome = f"{trial.speed:,.0f} tokens/s per GPU, {outcome}"
        show(f"  {outcome}")
        tuning.write()


def _try_candidate(tuning: Tuning, candidate: Candidate, timeout_s: float) -> Trial:
    search = tuning.search
    start = time.monotonic()
    earlier = search.runs_of(candidate)
    if earlier:
        name = earlier[0].sample.variant
    else:
        words = search.words(candidate, search.base) or AS_WRITTEN
        name = f"{len(search.runs) + 1}: {words}"
    overrides = tuning.space.overrides(candidate.settings)
    sample = measure.measure(
        tuning.resolved,
        Variant(name, overrides),
        overrides=overrides,
        steps=tuning.space.steps,
        root=tuning.folder,
        repeat=len(earlier),
        timeout_s=timeout_s,
        batch=tuning.plan.global_batch,
    )
    if sample.cause == "refused":
        # GPUs that another process took say nothing of the setting
        # raises before the first trial if the GPUs are not free
        _choose_gpus(tuning.resolved.look_again())
    unproved = tuple(point for point in sample.unproved if point in _POINTS)
    # preparing it counts too
    seconds = max(sample.seconds, time.monotonic() - start)
    return tuning.learn(candidate, replace(sample, unproved=unproved, seconds=seconds))


_STATUS: Mapping[str, Status] = {
    "flawed": "contract",
    "unproven": "unproven",
    "loss changed": "loss changed",
    "unknown": "no speed",
}
"""The standing of a variant that came to its end, as the status of a trial."""


def judge_candidate(
    candidate: Candidate, runs: Sequence[Sample], reference: Sequence[Sample]
) -> Trial:
    """What the last of a setting's runs means: it counts only if everything asked for was proved.

    Losses are compared by the medians of all. Without `reference`, with the setting itself.
    """
    sample = runs[-1]
    base = reference or [replace(run, variant="itself") for run in runs]
    row = comparison.compare([*base, *runs])[-1]
    status: Status = sample.cause
    reason = sample.reason
    if sample.measured and row.standing in _STATUS:
        status = _STATUS[row.standing]
        reason = row.why
    points: list[str] = []
    if status == "contract":
        points = [flaw.partition(" is ")[0] for flaw in sample.flaws]
    if status == "unproven":
        points = [*sample.unproved, "gradients"]
    return Trial(
        candidate=candidate,
        sample=sample,
        status=status,
        reason=reason,
        blamed=tuple(point for point in points if point in candidate.settings),
        loss_change=row.loss_change,
    )


def _describe_search(tuning: Tuning) -> list[str]:
    levers = []
    for lever in tuning.space.levers:
        values = ", ".join(map(_format_value, lever.values))
        levers.append(f"{lever.name} ({values})")
    counts = tuning.search.summary()
    card = tuning.space.card
    device = card.name or "this GPU"
    if card.gib is not None:
        device += f" of {card.gib:.0f} GiB"
    lines = [
        f"levers: {'; '.join(levers)}",
        f"{counts['settings']} settings on {device}; the plan leaves out "
        f"{counts['too_large']} that do not fit",
        f"rows: {tuning.space.rows.source}",
    ]
    lines += [f"{name} stays: {why}" for name, why in tuning.space.fixed.items()]
    count = len(tuning.search.runs)
    if count:
        lines.append(f"{count} trials of an earlier start, {tuning.used:.0f} s: {tuning.folder}")
    return lines


def describe_ending(tuning: Tuning) -> list[str]:
    best = tuning.chosen
    record = f"trials: {tuning.folder / FILE}"
    if tuning.state == "interrupted":
        return ["interrupted: the same command continues here", record]
    if best is None:
        return [f"nothing to propose: {tuning.search.stopped}", record]
    command = "not written; the same command with another -o does no trial twice"
    if tuning.place:
        command = _format_command(tuning, tuning.place)
    return [*_summarize_best(tuning, best), record, f"tuned: {command}"]


def _render_head(tuning: Tuning, best: SettingRuns, place: Path) -> list[str]:
    on = "the CPU"
    if tuning.plan.gpus:
        on = f"{tuning.plan.gpus} x {tuning.space.card.name or 'GPU'}"
    name = tuning.plan.stage.config.path.name
    count = len(tuning.search.runs)
    return [
        f"{name} on {on}, {count} trials of {tuning.space.steps} steps.",
        f"  {_format_command(tuning, place)}",
        *_summarize_best(tuning, best),
        f"Every trial: {tuning.folder / FILE}",
    ]


def _summarize_best(tuning: Tuning, best: SettingRuns) -> list[str]:
    """A line of figures, then a line for each change with its old value."""
    row = tuning.row(best)
    first = tuning.search.first
    loss = tuning.loss_change(best)
    gib = tuning.space.card.gib
    figures = f"{best.spread} tokens/s per GPU"
    if row is not None and first is not None and row.standing != "baseline":
        figures = f"{first.spread} -> {figures}, {row.speed_ratio:.2f}x"
    if loss is not None:
        # no minus before a zero
        loss = round(loss, 4) + 0.0
        figures += f", loss per token {loss:+.2%} after the same tokens"
    if best.peak is not None and gib:
        figures += f", peak {best.peak:.0f} of {gib:.0f} GiB"
    base = tuning.search.base
    changes = []
    for name in best.candidate.differing(base):
        words = space.describe_setting(name, best.candidate.settings[name])
        changes.append(f"{words} (was {_format_value(base.settings.get(name, 'as it is'))})")
    if not changes:
        changes = ["nothing that was tried is faster than the file as it is written"]
    return [f"{figures}.", *changes]


def _format_command(tuning: Tuning, place: Path) -> str:
    stage = tuning.plan.stage.options.stage
    return f"launch {stage} {shlex.quote(str(place))} --gpus {tuning.plan.gpus}"


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
