"""Settings side by side: judged before the first starts, then short real runs in turn, compared."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import redaction
from launcher.config.keys import EXPECT, PAIRED
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, errors, launch_finding, not_ready, usage
from launcher.machine import devices
from launcher.plan.plan import Plan
from launcher.planning import check, collect, prepare
from launcher.planning.collect import Facts, Scope, StageFile
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.redaction import Redactor
from launcher.report import console
from launcher.report.html import figure
from launcher.report.page import Lead
from launcher.runs import rundir
from launcher.stage.options import SWITCHED
from launcher.stage.stage import Judged
from launcher.upstream.logs.open_instruct import ATTENTION
from launcher.workflows import experiment
from launcher.workflows.bench import comparison, measure, record
from launcher.workflows.bench.comparison import LOSS, SPEED, TOLERANCE, Sample, VariantSummary, compare
from launcher.workflows.bench.measure import identity, short
from launcher.workflows.bench.record import BENCH_VERSION, BenchRecord, Compared
from launcher.workflows.bench.variants import Variant

PAGE = "bench.html"

Stops = list[tuple[str, InvalidConfig | NotReady]]


@dataclass(slots=True, kw_only=True)
class Bench:
    """One comparison: what is compared, and what is known so far.

    `key` names settings, contents and machine: another key is another comparison. `batch` is the rows of a step,
    of the largest variant. `proposed` is what a search has chosen, which need not be the fastest.
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
        return redaction.together(facts.redactor for facts in self.resolved.values())

    @property
    def rows(self) -> list[VariantSummary]:
        """One a variant, in the order in which they were named; those without a sample are left out."""
        order = {variant.name: nth for nth, variant in enumerate(self.variants)}
        known = sorted(self.samples, key=lambda one: (order.get(one.variant, 0), one.repeat))
        rows = compare(known)
        if self.proposed is None:
            return rows
        return [replace(row, recommended=row.standing == "faster" and row.variant == self.proposed) for row in rows]

    @property
    def weights(self) -> str:
        return "rows" if self.request.stage in PAIRED else "tokens"

    def due(self) -> list[tuple[int, Variant]]:
        """Trials that are still to be run, every second round backwards, so that drift hits all alike.

        What failed for a reason of its own would fail again.
        """
        done = {(s.repeat, s.variant) for s in self.samples}
        failed = {s.variant for s in self.samples if not s.measured}
        return [
            (repeat, variant)
            for repeat in range(self.repeats)
            for variant in (self.variants[::-1] if repeat % 2 else self.variants)
            if (repeat, variant.name) not in done and variant.name not in failed
        ]

    def record(self) -> BenchRecord:
        return BenchRecord(
            key=self.key,
            config=str(self.request.config),
            overrides=tuple(self.request.overrides),
            gpus=self.request.gpus,
            steps=self.steps,
            repeats=self.repeats,
            batch=self.batch,
            variants=self.variants,
            compared=Compared(
                loss=f"mean of the probe's loss a step, weighted by {self.weights}",
                tokens=comparison.common_tokens(self.samples),
                tolerance=TOLERANCE,
            ),
            complete=not self.due(),
            rows=tuple(self.rows),
            samples=tuple(self.samples),
            folder=str(self.folder),
        )

    def as_json(self) -> dict[str, Any]:
        return self.record().as_json()

    def write(self) -> None:
        """Raises NotReady where it cannot be written."""
        self.record().write(self.folder, self.redactor)


def require_gpu(request: Request, *, cpu: bool) -> Request:
    """The request on its GPUs, or on the CPU. Raises NotReady without a GPU, UsageError where both are asked for."""
    if cpu and (request.gpus or request.devices):
        raise usage("useless-option", "--gpus and --devices have no effect with --cpu")
    if cpu:
        return replace(request, gpus=0)
    if request.gpus == 0 or devices.look(os.environ).visible:
        return request
    raise not_ready(
        "no-gpu-here",
        "no GPU is visible here, and speed is measured on GPUs",
        "--cpu tries the mechanics: launch bench configs/demo/sft.yaml --cpu --vary batch.per_device=8,16",
    )


def plan(bench: Bench, scope: Scope = Scope.PLAN) -> Bench:
    """Judge every variant of a bench, and its trial, before the first one starts; returns it complete.

    Raises InvalidConfig with the findings of all variants, each with its name; for a start
    NotReady too if no variant can start on this machine, whatever its GPUs do now.
    """
    request, requested = bench.request, bench.variants
    planner = _VariantPlanner(collect.open(request), scope)
    full: list[tuple[Variant, Facts, Prepared]] = []
    wrong: Stops = []
    lacking: Stops = []
    for one in requested:
        try:
            full.append(planner.plan(one))
        except InvalidConfig as error:
            wrong.append((one.name, error))
    _require_none(wrong, len(requested))
    batch, root = max(made.plan.global_batch for _, _, made in full), request.runs or rundir.runs_root()
    for variant, facts, _ in full:
        try:
            # a trial that a killed command left may have the GPUs: it is ended later
            prepare.complete(short(facts, bench.steps, root / "models", batch, runs=root).without_gpus())
        except InvalidConfig as error:
            wrong.append((variant.name, error))
        except NotReady as error:
            lacking.append((variant.name, error))
    _require_none(wrong, len(full))
    if len(lacking) == len(full):
        _require_none(lacking, len(full))
    first = full[0][2].plan
    key = [
        BENCH_VERSION,
        bench.steps,
        [[variant.name, identity(made.plan, facts.trainer)] for variant, facts, made in full],
    ]
    warnings = ((variant.name, f) for variant, _, made in full for f in made.findings if f.severity != "note")
    return replace(
        bench,
        request=replace(request, stage=first.stage.options.stage, gpus=first.gpus),
        variants=tuple(variant for variant, _, _ in full),
        resolved={variant.name: facts for variant, facts, _ in full},
        batch=batch,
        key=experiment.key_of(key),
        findings=tuple(_named(warnings, len(full))),
    )


def _require_none(stops: Stops, count: int) -> None:
    """Raise what stops variants as one error, each finding with the names of those that it is about."""
    if stops:
        found = [(name, finding) for name, error in stops for finding in errors(error.findings) or error.findings]
        raise type(stops[0][1])(_named(found, count))


def _named(found: Iterable[tuple[str, Finding]], count: int) -> list[Finding]:
    """Each finding once, with the names of those of the `count` variants that it is about."""
    names: dict[Finding, list[str]] = {}
    for name, finding in found:
        names.setdefault(finding, []).append(name)
    if count == 1:
        return list(names)
    return [
        replace(f, message=f"[{'every variant' if len(some) == count else ', '.join(some)}] {f.message}")
        for f, some in names.items()
    ]


class _VariantPlanner:
    """Plans the variants of one stage file, which is read once."""

    def __init__(self, file: StageFile, scope: Scope) -> None:
        self.file = file
        self.scope = scope
        self.first: Facts | None = None

    def facts(self, file: StageFile, judged: Judged) -> Facts:
        """Those of a variant; the machine is looked at once for all of them."""
        if self.first is None:
            self.first = collect.of_read(file, judged, self.scope)
            return self.first
        return self.first.with_file(file, judged)

    @functools.cached_property
    def base(self) -> Plan | None:
        """The stage file as it is written; None where only its variants stand."""
        try:
            return check.settle(self.facts(self.file, self.file.read()).of_any_machine())
        except InvalidConfig:
            return None

    def plan(self, variant: Variant) -> tuple[Variant, Facts, Prepared]:
        """A variant with what follows from it. Raises InvalidConfig, also where its batch cannot be kept."""
        file = self.file.with_overrides(*variant.overrides)
        judged = file.read()
        # what it expects of a switch that is turned is not wrong before it has followed
        findings = tuple(one for one in judged.findings if one.code != "impossible-expectation")
        facts = self.facts(file, replace(judged, findings=findings))
        more = (*_expected(facts, variant.keys), *_batch(facts, variant.keys, self))
        if more:
            variant = replace(variant, overrides=(*variant.overrides, *more))
            facts = facts.with_overrides(*more)
        else:
            facts = self.facts(file, judged)
        return variant, facts, prepare.complete(facts.of_any_machine())


def _expected(resolved: Facts, changed: set[str]) -> Iterator[str]:
    """A file that expects packing expects none of the variant without."""
    stage = resolved.stage
    expect, entry, values = stage.options.expect, stage.entry, stage.values
    names, batch = entry.names, stage.options.batch
    rows = (batch and batch.per_device) or values[names.per_device]
    # with one row a micro-batch packing may be asked for, and there is none
    packing = {names.packing, "padding_free", "batch", "batch.per_device", names.per_device}

    def is_turned(point: str, keys: Set[str | None]) -> bool:
        own = changed & {"expect", f"expect.{point}"}
        return expect.get(point) not in (None, "any") and bool(changed & keys) and not own

    switches = (("liger", {names.liger}, entry.liger(values)), ("packing", packing, entry.packs(values, rows)))
    for point, keys, on in switches:
        if is_turned(point, keys) and on != (expect[point] != "off"):
            yield f"expect.{point}={SWITCHED[point][0 if on else 1]}"
    if is_turned("attention", {"attn_implementation", "attention"}):
        # `any` where a verdict has no word for it
        chosen = check.settle(resolved.of_any_machine()).attention
        name = str(chosen or values.get("attn_implementation"))
        state = ATTENTION.get(name, name)
        yield f"expect.attention={state if state in EXPECT['attention'] else 'any'}"


def _batch(resolved: Facts, changed: set[str], planner: _VariantPlanner) -> Iterator[str]:
    """Accumulation that keeps the rows of a step, where only the rows of a device were changed."""
    names = resolved.stage.entry.names
    settled = {names.accumulation, "batch", "batch.global"} & changed
    if settled or names.per_device not in changed or resolved.stage.options.batch:
        return
    written = planner.base
    if written is None:
        return
    made = check.settle(resolved.of_any_machine())
    rows = made.global_batch // made.accumulation
    if written.global_batch % rows:
        raise InvalidConfig(
            launch_finding(
                "error",
                "impossible-batch",
                f"{rows} rows at once do not divide the global batch of {written.global_batch}",
                f"or say {names.accumulation} too: then the global batch is another",
                key=f"args.{names.per_device}",
            )
        )
    yield f"{names.accumulation}={written.global_batch // rows}"


@contextlib.contextmanager
def opened(bench: Bench, *, fresh: bool = False) -> Iterator[Bench]:
    """The bench in its folder, with what an earlier start measured. Raises what `Campaign.opened` raises."""
    root = bench.request.runs or rundir.runs_root()
    series = experiment.Campaign(kind="bench", key=bench.key, name=bench.request.config.stem, root=root)
    with series.opened(fresh=fresh) as bench.folder:
        # what was not started is tried again, and what gets more time now
        limits = {"refused": math.inf, "timeout": bench.timeout_s or math.inf}
        samples = record.read(bench.folder).samples
        bench.samples = [one for one in samples if one.seconds >= limits.get(one.cause, 0.0)]
        yield bench


def run(bench: Bench, *, show: Callable[[str], None] = lambda _: None) -> Exit:
    """Run every trial that is due, in a bench that is `opened`; the record is up to date after each.

    What the user stops ends the comparison, whatever else happens only its trial.
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
            speed, loss = (sample.metrics.get(name) for name in (SPEED, LOSS))
            figures = "no speed" if speed is None else f"{speed:,.0f} tokens/s per GPU"
            figures += f", loss {'unknown' if loss is None else format(loss, '.4f')}, {sample.seconds:.0f} s"
            show(f"  {figures if sample.measured else f'{sample.cause}: {sample.reason}'}")
    if stop.requested:
        return Exit.INTERRUPTED
    if any(sample.measured for sample in bench.samples):
        return Exit.OK
    return Exit.NOT_READY if all(sample.cause == "refused" for sample in bench.samples) else Exit.TRAINING


def interrupted(bench: Bench) -> str:
    done = len(bench.samples)
    runs = f"{done} of {done + len(bench.due())} runs are done\nruns: {bench.folder / record.FILE}"
    return f"interrupted: the same command continues here, {runs}"


def write_page(bench: Bench) -> None:
    """The curves of one measured run of each variant. Raises NotReady where it cannot be written."""
    # the first of each
    names = {s.variant: Path(s.run) for s in reversed(bench.samples) if s.run and Path(s.run).is_dir()}
    runs = {names[row.variant]: row.variant for row in bench.rows if row.variant in names}
    title = f"bench {bench.folder.name.rpartition('-bench-')[2]}"
    lead = Lead(title=title, tables=(_table(bench),), lines=remarks(bench), names=runs)
    experiment.page(runs, bench.folder / PAGE, lead)


def _median(name: str, scale: float = 1.0, unit: str = "", digits: int = 4) -> Callable[[VariantSummary], str]:

    def cell(row: VariantSummary) -> str:
        spread = row.loss if name == LOSS else row.spreads.get(name)
        if spread is None:
            return "–"
        half = (spread.max - spread.min) / 2 * scale
        around = f" ±{figure(half, 2)}" if half else ""
        return f"{figure(spread.median * scale, digits)}{unit}{around}"

    return cell


def _runs(row: VariantSummary) -> str:
    speed = row.spreads.get(SPEED)
    return f"{speed.n if speed else 0}{f', {len(row.failures)} failed' if row.failures else ''}"


COLUMNS: Mapping[str, Callable[[VariantSummary], str]] = {
    "tokens/s/GPU": _median(SPEED),
    "speed": lambda row: "–" if row.speed_ratio is None else f"{row.speed_ratio:.2f}x",
    "loss change": lambda row: "–" if row.loss_change is None else f"{row.loss_change:+.2%}",
    "peak GiB": _median("peak_allocated_gib", digits=3),
    "MFU": _median("mfu", 100, " %", 3),
    "wasted": _median("wasted_share", 100, " %", 3),
    "tokens/step": _median("tokens_per_step"),
    "s/step": _median("seconds_per_step"),
    "s before": _median("seconds_before_steps", digits=3),
    "loss/token": _median(LOSS, digits=5),
    "runs": _runs,
}
"""What decides comes first: the others may have to go below, on a narrow terminal."""


def standing(row: VariantSummary) -> str:
    word = f"{row.standing}{', recommended' if row.recommended else ''}"
    if row.too_few and row.standing in ("faster", "slower", "no difference"):
        word = f"too few trials{', fastest so far' if row.recommended else ''}"
    return f"{word}: {row.why}" if row.why else word


def _table(bench: Bench) -> list[dict[str, str]]:
    rows = bench.rows
    heads = [head for head, cell in COLUMNS.items() if any(cell(row) != "–" for row in rows)]
    return [{"variant": row.variant, **{h: COLUMNS[h](row) for h in heads}} for row in rows]


def remarks(bench: Bench) -> list[str]:
    tokens = comparison.common_tokens(bench.samples)
    lines = [f"{row.variant}: {standing(row)}" for row in bench.rows]
    lines += [f"error: {fault.message}" for fault in comparison.baseline_fault(bench.samples)]
    if tokens is not None:
        pair = " of a pair" if bench.weights == "rows" else ""
        lines.append(
            f"loss{pair}: mean, by {bench.weights}, over the first {tokens:,.0f} tokens of every run; "
            f"tolerance {comparison.share(TOLERANCE)}"
        )
    if any(sample.measured for sample in bench.samples):
        lines.append("speed: tokens of steady steps (not the first fifth, nor after a save); medians ±half the range")
    return lines


def show(bench: Bench) -> None:
    redactor = bench.redactor
    console.findings(comparison.baseline_fault(bench.samples), redactor)
    if lines := _table(bench):
        console.table(lines, tuple(lines[0]), redactor)
    for line in remarks(bench):
        console.say(line, redactor)
    if (bench.folder / PAGE).exists():
        console.say(str(bench.folder / PAGE), redactor)
