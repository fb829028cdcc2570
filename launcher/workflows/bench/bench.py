"""Settings side by side: judged before the first starts, then short real runs in turn, compared."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from launcher import redaction
from launcher.config.keys import EXPECT, PAIRED
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    launch_finding,
    not_ready,
    select_errors,
    usage,
)
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec, devices
from launcher.machine.codec import Misfit
from launcher.plan.plan import Plan
from launcher.planning import check, collect, prepare
from launcher.planning.collect import Facts, Scope, StageFile
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.redaction import Redactor
from launcher.report import console
from launcher.report.html import format_number
from launcher.report.page import Lead
from launcher.runs import rundir
from launcher.stage.options import SWITCHED
from launcher.stage.stage import Judged
from launcher.upstream.logs.open_instruct import ATTENTION
from launcher.workflows import experiment
from launcher.workflows.bench import comparison, measure
from launcher.workflows.bench.comparison import LOSS, SPEED, TOLERANCE, Sample, VariantSummary
from launcher.workflows.bench.measure import identify_measurement, shorten_run
from launcher.workflows.bench.variants import Variant

BENCH_VERSION = 1
FILE = rundir.BENCH_RECORD
PAGE = "bench.html"
_NO_VALUE = "–"


@dataclass(slots=True, kw_only=True)
class Bench:
    """One comparison: what is compared, and the trials so far.

    `key` names settings, contents and machine: another key is another comparison. `batch` is the
    rows of a step, of the largest variant. `proposed` is what `launch tune` has chosen, which need
    not be the fastest.
    """

    request: Request
    variants: tuple[Variant, ...]
    steps: int
    repeats: int
    resolved: Mapping[str, Facts] = field(default_factory=dict)
    timeout_s: float | None = None
    key: str = ""
    batch: int | None = None
    findings: tuple[Finding, ...] = ()
    folder: Path = Path()
    samples: list[Sample] = field(default_factory=list)
    proposed: str | None = None

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of any variant."""
        return redaction.combine_redactors(facts.redactor for facts in self.resolved.values())

    @property
    def rows(self) -> list[VariantSummary]:
        """One per variant, in the order of `variants`, without those that have no sample."""
        order = [variant.name for variant in self.variants]
        samples = [sample for sample in self.samples if sample.variant in order]
        samples.sort(key=lambda sample: (order.index(sample.variant), sample.repeat))
        rows = comparison.compare(samples)
        if self.proposed is None:
            return rows
        marked = []
        for row in rows:
            recommended = row.standing == "faster" and row.variant == self.proposed
            marked.append(replace(row, recommended=recommended))
        return marked

    @property
    def weights(self) -> str:
        return "rows" if self.request.stage in PAIRED else "tokens"

    def due(self) -> list[tuple[int, Variant]]:
        """Trials still to run. Every second round goes backwards, so that drift hits all alike.

        A variant that failed is not tried again: it would fail for the same reason.
        """
        done = {(sample.repeat, sample.variant) for sample in self.samples}
        failed = {sample.variant for sample in self.samples if not sample.measured}
        due = []
        turns = list(self.variants)
        for repeat in range(self.repeats):
            for variant in turns:
                if (repeat, variant.name) not in done and variant.name not in failed:
                    due.append((repeat, variant))
            turns.reverse()
        return due

    def as_json(self) -> dict[str, Any]:
        return {
            "bench_version": BENCH_VERSION,
            "key": self.key,
            "config": str(self.request.config),
            "overrides": list(self.request.overrides),
            "gpus": self.request.gpus,
            "steps": self.steps,
            "repeats": self.repeats,
            "batch": self.batch,
            "variants": [asdict(variant) for variant in self.variants],
            "compared": {
                "loss": f"mean of the probe's loss a step, weighted by {self.weights}",
                "tokens": comparison.find_common_tokens(self.samples),
                "tolerance": TOLERANCE,
            },
            "complete": not self.due(),
            "rows": [row.as_json() for row in self.rows],
            "samples": [sample.as_json() for sample in self.samples],
            "folder": str(self.folder),
        }

    def write(self) -> None:
        """Write `bench.json`. Raises NotReady if that is impossible."""
        experiment.write(self.folder / FILE, self.as_json(), self.redactor)


def require_gpu(request: Request, *, cpu: bool) -> Request:
    """The request on its GPUs, or on the CPU.

    Raises NotReady without a GPU, UsageError for both.
    """
    if cpu and (request.gpus or request.devices):
        raise usage("useless-option", "--gpus and --devices have no effect with --cpu")
    if cpu:
        return replace(request, gpus=0)
    if request.gpus == 0 or devices.survey_devices(os.environ).visible:
        return request
    raise not_ready(
        "no-gpu-here",
        "no GPU is visible here, and speed is measured on GPUs",
        "--cpu tries the mechanics: "
        "launch bench configs/demo/sft.yaml --cpu --vary batch.per_device=8,16",
    )


@dataclass(frozen=True, slots=True)
class _PlannedVariant:
    variant: Variant
    facts: Facts
    prepared: Prepared

    @property
    def plan(self) -> Plan:
        return self.prepared.plan


def plan(bench: Bench, scope: Scope = Scope.PLAN) -> Bench:
    """Judge every variant of a bench, and its trial, before the first one starts.

    Raises InvalidConfig with the findings of all variants, each with its name; for a start NotReady
    too if no variant can start on this machine, whatever its GPUs do now.
    """
    request = bench.request
    variants = _plan_variants(bench, scope)
    batch = max(variant.plan.global_batch for variant in variants)
    _check_trials(bench, variants, batch)
    identities = []
    warnings = []
    for planned in variants:
        name = planned.variant.name
        identities.append([name, identify_measurement(planned.plan, planned.facts.trainer)])
        for finding in planned.prepared.findings:
            if finding.severity != "note":
                warnings.append((name, finding))
    first = variants[0].plan
    return replace(
        bench,
        request=replace(request, stage=first.stage.options.stage, gpus=first.gpus),
        variants=tuple(planned.variant for planned in variants),
        resolved={planned.variant.name: planned.facts for planned in variants},
        batch=batch,
        key=experiment.digest_values([BENCH_VERSION, bench.steps, identities]),
        findings=tuple(_name_variants(warnings, len(variants))),
    )


def _plan_variants(bench: Bench, scope: Scope) -> list[_PlannedVariant]:
    planner = _VariantPlanner(collect.open_stage_file(bench.request), scope)
    variants = []
    wrong: dict[str, LaunchError] = {}
    for variant in bench.variants:
        try:
            variants.append(planner.plan(variant))
        except InvalidConfig as error:
            wrong[variant.name] = error
    if wrong:
        raise InvalidConfig(_collect_stops(wrong, len(bench.variants)))
    return variants


def _check_trials(bench: Bench, variants: Sequence[_PlannedVariant], batch: int) -> None:
    """Plan a trial of each variant. Raises what `plan` raises."""
    root = bench.request.runs or rundir.find_runs_root()
    wrong: dict[str, LaunchError] = {}
    lacking: dict[str, LaunchError] = {}
    for planned in variants:
        try:
            trial = shorten_run(planned.facts, bench.steps, root / "models", batch, runs=root)
            # a trial that a killed command left may have the GPUs: it is ended later
            prepare.complete(trial.without_gpus())
        except InvalidConfig as error:
            wrong[planned.variant.name] = error
        except NotReady as error:
            lacking[planned.variant.name] = error
    if wrong:
        raise InvalidConfig(_collect_stops(wrong, len(variants)))
    if len(lacking) == len(variants):
        raise NotReady(_collect_stops(lacking, len(variants)))


def _collect_stops(stops: Mapping[str, LaunchError], count: int) -> list[Finding]:
    """Each finding that stops variants, with the names of those variants."""
    findings = []
    for name, error in stops.items():
        for finding in select_errors(error.findings) or error.findings:
            findings.append((name, finding))
    return _name_variants(findings, count)


def _name_variants(findings: Iterable[tuple[str, Finding]], count: int) -> list[Finding]:
    """Each finding once, with the names of those of the `count` variants that it is about."""
    names_of: dict[Finding, list[str]] = {}
    for name, finding in findings:
        names_of.setdefault(finding, []).append(name)
    if count == 1:
        return list(names_of)
    named = []
    for finding, names in names_of.items():
        about = ", ".join(names)
        if len(names) == count:
            about = "every variant"
        named.append(replace(finding, message=f"[{about}] {finding.message}"))
    return named


class _VariantPlanner:
    """Plans the variants of one stage file, which is read once."""

    def __init__(self, file: StageFile, scope: Scope) -> None:
        self.file = file
        self.scope = scope
        self.first: Facts | None = None

    def facts(self, file: StageFile, judged: Judged) -> Facts:
        """Those of a variant; the machine is looked at once for all of them."""
        if self.first is None:
            self.first = collect.collect_read(file, judged, self.scope)
            return self.first
        return self.first.with_file(file, judged)

    @functools.cached_property
    def base(self) -> Plan | None:
        """The stage file as it is written; None if it is only valid as one of the variants."""
        try:
            return check.plan_with_findings(
                self.facts(self.file, self.file.read()).of_any_machine()
            )
        except InvalidConfig:
            return None

    def plan(self, variant: Variant) -> _PlannedVariant:
        """Plan a variant, with what follows from it.

        Raises InvalidConfig, also if the global batch cannot be kept.
        """
        file = self.file.with_overrides(*variant.overrides)
        judged = file.read()
        # an expectation may still follow the switch that is turned
        findings = []
        for finding in judged.findings:
            if finding.code != "impossible-expectation":
                findings.append(finding)
        facts = self.facts(file, replace(judged, findings=tuple(findings)))
        further = list(_adapt_expectations(facts, variant.keys))
        further += _adapt_accumulation(facts, variant.keys, self)
        if further:
            overrides = (*variant.overrides, *further)
            variant = replace(variant, overrides=overrides)
            facts = facts.with_overrides(*further)
        else:
            facts = self.facts(file, judged)
        prepared = prepare.complete(facts.of_any_machine())
        return _PlannedVariant(variant, facts, prepared)


def _adapt_expectations(facts: Facts, changed: set[str]) -> Iterator[str]:
    """Expectations that follow a switch: a file that expects packing expects none without it."""
    stage = facts.stage
    entry = stage.entry
    names = entry.names
    values = stage.values
    batch = stage.options.batch
    rows = (batch and batch.per_device) or values[names.per_device]
    keys = {
        "liger": (names.liger,),
        # one row per micro-batch has none to be packed with
        "packing": (names.packing, "padding_free", "batch", "batch.per_device", names.per_device),
        "attention": ("attn_implementation", "attention"),
    }
    for point, turned_by in keys.items():
        expected = stage.options.expect.get(point)
        is_turned = bool(changed.intersection(turned_by))
        is_set = bool(changed.intersection(("expect", f"expect.{point}")))
        if expected in (None, "any") or not is_turned or is_set:
            continue
        if point == "attention":
            yield f"expect.attention={_find_attention_state(facts)}"
            continue
        is_on = entry.liger(values) if point == "liger" else entry.packs(values, rows)
        was_on = expected != "off"
        if is_on != was_on:
            on, off = SWITCHED[point]
            yield f"expect.{point}={on if is_on else off}"


def _find_attention_state(facts: Facts) -> str:
    """The state of the attention that a variant takes; `any` if a verdict has no word for it."""
    chosen = check.plan_with_findings(facts.of_any_machine()).attention
    name = str(chosen or facts.stage.values.get("attn_implementation"))
    state = ATTENTION.get(name, name)
    return state if state in EXPECT["attention"] else "any"


def _adapt_accumulation(facts: Facts, changed: set[str], planner: _VariantPlanner) -> Iterator[str]:
    """Accumulation that keeps the global batch if only the rows of a device were changed."""
    names = facts.stage.entry.names
    if names.per_device not in changed or facts.stage.options.batch:
        return
    if changed.intersection((names.accumulation, "batch", "batch.global")) or planner.base is None:
        return
    total = planner.base.global_batch
    split = check.plan_with_findings(facts.of_any_machine())
    rows = split.global_batch // split.accumulation
    if total % rows:
        raise InvalidConfig(
            launch_finding(
                "error",
                "impossible-batch",
                f"{rows} rows at once do not divide the global batch of {total}",
                f"or say {names.accumulation} too: then the global batch is another",
                key=f"args.{names.per_device}",
            )
        )
    yield f"{names.accumulation}={total // rows}"


@contextlib.contextmanager
def open_campaign(bench: Bench, *, fresh: bool = False) -> Iterator[Bench]:
    """Open the folder of a bench, and take over the samples of an earlier start that still count.

    Raises NotReady, as `Campaign.opened` does.
    """
    root = bench.request.runs or rundir.find_runs_root()
    name = bench.request.config.stem
    campaign = experiment.Campaign(kind="bench", key=bench.key, name=name, root=root)
    with campaign.opened(fresh=fresh) as folder:
        bench.folder = folder
        for sample in _read_samples(bench.folder):
            if _still_counts(sample, bench.timeout_s):
                bench.samples.append(sample)
        yield bench


def _still_counts(sample: Sample, timeout_s: float | None) -> bool:
    """Whether a trial of an earlier start is kept; one that timed out may now have more time."""
    if sample.cause == "refused":
        return False
    if sample.cause == "timeout":
        return timeout_s is not None and sample.seconds >= timeout_s
    return True


def _read_samples(folder: Path) -> list[Sample]:
    """The samples of `bench.json`; none if one of them is damaged."""
    listed = rundir.read_json(folder / FILE).get("samples")
    try:
        return [Sample.from_json(data) for data in codec.fit_value(listed, list[Any], [])]
    except Misfit:
        return []


def run(bench: Bench, *, show: Callable[[str], None]) -> Exit:
    """Run every trial that is due, in a bench that is `opened`; write the record after each.

    An interrupt ends the comparison; any other failure ends only its trial.
    """
    bench.write()
    with experiment.interruptible() as stop:
        while due := bench.due():
            repeat, variant = due[0]
            show(f"{variant.name}, run {repeat + 1} of {bench.repeats} ({len(due)} to go)")
            sample = measure.measure(
                bench.resolved[variant.name],
                variant,
                steps=bench.steps,
                root=bench.folder,
                repeat=repeat,
                timeout_s=bench.timeout_s,
                batch=bench.batch,
            )
            bench.samples.append(sample)
            bench.write()
            show(f"  {_describe_outcome(sample)}")
    if stop.requested:
        return Exit.INTERRUPTED
    if any(sample.measured for sample in bench.samples):
        return Exit.OK
    if all(sample.cause == "refused" for sample in bench.samples):
        return Exit.NOT_READY
    return Exit.TRAINING


def _describe_outcome(sample: Sample) -> str:
    if not sample.measured:
        return f"{sample.cause}: {sample.reason}"
    speed = "no speed"
    if sample.speed is not None:
        speed = f"{sample.speed:,.0f} tokens/s per GPU"
    loss = sample.metrics.get(LOSS)
    level = "unknown" if loss is None else f"{loss:.4f}"
    return f"{speed}, loss {level}, {sample.seconds:.0f} s"


def describe_interruption(bench: Bench) -> str:
    done = len(bench.samples)
    runs = f"{done} of {done + len(bench.due())} runs are done\nruns: {bench.folder / FILE}"
    return f"interrupted: the same command continues here, {runs}"


def write_page(bench: Bench) -> None:
    """The curves of one measured run of each variant. Raises NotReady if it cannot be written."""
    rows = bench.rows
    runs: dict[Path, str] = {}
    for row in rows:
        for sample in row.samples:
            if sample.run and os.path.isdir(sample.run):
                runs[Path(sample.run)] = row.variant
                break
    title = f"bench {bench.folder.name.rpartition('-bench-')[2]}"
    lead = Lead(title=title, tables=(_build_table(rows),), lines=list_remarks(bench), names=runs)
    experiment.write_page(runs, bench.folder / PAGE, lead)


Cell = Callable[[VariantSummary], str]


def _create_median_cell(name: str, scale: float = 1.0, unit: str = "", digits: int = 4) -> Cell:
    def cell(row: VariantSummary) -> str:
        spread = row.spreads.get(name)
        if spread is None:
            return _NO_VALUE
        median = f"{format_number(spread.median * scale, digits)}{unit}"
        half = (spread.max - spread.min) / 2 * scale
        if not half:
            return median
        return f"{median} ±{format_number(half, 2)}"

    return cell


def _format_speed_ratio(row: VariantSummary) -> str:
    return _NO_VALUE if row.speed_ratio is None else f"{row.speed_ratio:.2f}x"


def _format_loss_change(row: VariantSummary) -> str:
    return _NO_VALUE if row.loss_change is None else f"{row.loss_change:+.2%}"


def _count_runs(row: VariantSummary) -> str:
    speed = row.spreads.get(SPEED)
    count = 0 if speed is None else speed.n
    if not row.failures:
        return str(count)
    return f"{count}, {len(row.failures)} failed"


COLUMNS: Mapping[str, Cell] = {
    "tokens/s/GPU": _create_median_cell(SPEED),
    "speed": _format_speed_ratio,
    "loss change": _format_loss_change,
    "peak GiB": _create_median_cell("peak_allocated_gib", digits=3),
    "MFU": _create_median_cell("mfu", 100, " %", 3),
    "wasted": _create_median_cell("wasted_share", 100, " %", 3),
    "tokens/step": _create_median_cell("tokens_per_step"),
    "s/step": _create_median_cell("seconds_per_step"),
    "s before": _create_median_cell("seconds_before_steps", digits=3),
    "loss/token": _create_median_cell(LOSS, digits=5),
    "runs": _count_runs,
}
"""The decisive ones come first: on a narrow terminal the others may have to go below."""


def describe_standing(row: VariantSummary) -> str:
    word: str = row.standing
    recommended = "recommended"
    if row.too_few and word in ("faster", "slower", "no difference"):
        word = "too few trials"
        recommended = "fastest so far"
    if row.recommended:
        word += f", {recommended}"
    if row.why:
        word += f": {row.why}"
    return word


def _build_table(rows: Sequence[VariantSummary]) -> list[dict[str, str]]:
    """Columns that have no value in any row are left out."""
    table = [{"variant": row.variant} for row in rows]
    for head, render in COLUMNS.items():
        column = [render(row) for row in rows]
        if set(column) == {_NO_VALUE}:
            continue
        for cells, text in zip(table, column, strict=True):
            cells[head] = text
    return table


def list_remarks(bench: Bench) -> list[str]:
    tokens = comparison.find_common_tokens(bench.samples)
    lines = [f"{row.variant}: {describe_standing(row)}" for row in bench.rows]
    for fault in comparison.find_baseline_fault(bench.samples):
        lines.append(f"error: {fault.message}")
    if tokens is not None:
        pair = " of a pair" if bench.weights == "rows" else ""
        lines.append(
            f"loss{pair}: mean, by {bench.weights}, over the first {tokens:,.0f} tokens "
            f"of every run; tolerance {comparison.format_tolerance(TOLERANCE)}"
        )
    if any(sample.measured for sample in bench.samples):
        lines.append(
            "speed: tokens of steady steps (not the first fifth, nor after a save); "
            "medians ±half the range"
        )
    return lines


def show(bench: Bench) -> None:
    redactor = bench.redactor
    console.print_findings(comparison.find_baseline_fault(bench.samples), redactor)
    table = _build_table(bench.rows)
    if table:
        console.print_table(table, tuple(table[0]), redactor)
    for line in list_remarks(bench):
        console.say(line, redactor)
    if (bench.folder / PAGE).exists():
        console.say(str(bench.folder / PAGE), redactor)
