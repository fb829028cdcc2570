"""`launch plan`: what a stage needs on so many GPUs - batch, steps, memory, time, money, disk.

Nothing is guessed: a number that cannot be had is null, and what memory is made of says where each
part comes from. Time comes from a measured speed where there is one, else from the model of a step
(`plan.speed`).
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher.artifacts import lengths
from launcher.artifacts.lengths import Lengths, fill_rows
from launcher.cache import entries, folders, keys
from launcher.errors import (
    Finding,
    InvalidConfig,
    LaunchError,
    launch_finding,
    select_errors,
    usage,
)
from launcher.lazy_dataclass import dataclass
from launcher.machine import datasheets, devices
from launcher.machine.datasheets import Card, find_card
from launcher.machine.python import Gpu
from launcher.plan import footprint, plan
from launcher.plan.alternatives import drop_packing, find_alternatives
from launcher.plan.footprint import (
    ATTENTIONS,
    Footprint,
    decide_attention,
    find_model_shape,
    measure_packed_row,
)
from launcher.plan.memory.peak import estimate
from launcher.plan.memory.phases import GIB, KINDS, Memory, compute_usable
from launcher.plan.memory.setup import Setup
from launcher.plan.plan import Plan
from launcher.plan.speed import predict_step_seconds
from launcher.planning import check, interruption
from launcher.planning.collect import Facts
from launcher.planning.doctor import disk
from launcher.planning.prepare import Prepared
from launcher.runs import rundir
from launcher.runs.record import Manifest, PlanRecord, Record
from launcher.runs.rundir import RunFolder

STATED_MFU = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """What is not in the stage file. `gpu_memory` in GiB, `price` for one GPU and hour.

    `shape` names a model whose config stands for that of one that is not here yet.
    `rehearsed_tokens` is read like `row_tokens`, where nothing better is known.
    """

    row_tokens: str | None = None
    rehearsed_tokens: str | None = None
    rows: int | None = None
    gpu_memory: float | None = None
    gpu: str | None = None
    price: float | None = None
    tokens_per_second: float | None = None
    attention: str | None = None
    fit: bool = False
    shape: str | None = None


class Fit(NamedTuple):
    """The largest per-device batch that fits, with the same global batch."""

    per_device: int
    accumulation: int
    memory: Memory
    spare: float

    def as_json(self) -> dict[str, Any]:
        return {
            "per_device": self.per_device,
            "accumulation": self.accumulation,
            "peak_gib": round(self.memory.peak, 2),
            "spare_gib": round(self.spare, 2),
        }


class Speed(NamedTuple):
    """Tokens a second over all devices, without padding; None if unknown."""

    tokens: float | None = None
    source: str | None = None


class Bill(NamedTuple):
    """Hours and money, each None if unknown; `formula` says how, or what is missing."""

    hours: float | None
    cost: float | None
    formula: str


class Estimate:
    """The forecast for one number of GPUs; None is what is unknown.

    `rows` are those of the data set. On the CPU no memory is planned. `spare` is what remains of
    the card in GiB, negative if memory is missing. `static`: the row lengths are unknown, and
    memory excludes activations. Raises InvalidConfig.
    """

    def __init__(
        self,
        footprint: Footprint,
        rows: int | None,
        terms: ForecastOptions,
        card: Card,
        *,
        static: bool,
    ) -> None:
        if not footprint.plan.gpus:
            card = Card()
        self.footprint = footprint
        self.plan = footprint.plan
        self.rows = rows
        self.terms = terms
        self.card = card
        self.static = static
        self.setup = footprint.setup()
        self.tokens = footprint.tokens
        self.memory: Memory | None = None
        self.spare: float | None = None
        self.best: Fit | None = None
        if self.plan.gpus:
            self.memory = self.memory_of(self.setup)
        if self.memory is not None and card.gib is not None:
            self.spare = self.memory.spare(card.gib)
            if static and self.spare >= 0:
                # nobody knows what activations leave
                self.spare = None
            elif not static:
                self.best = self._fit_batch(card.gib)
        self.measured = _find_measured_speed(self.plan, self.card.name)
        self.speed = self._find_speed()
        self.bill = self._compute_bill()
        saved = disk.estimate_saved(self.plan, footprint.shape.parameters, self.setup)
        assert saved is not None, "a setup tells the size of an adapter"
        self.saved = saved
        self.interruption = interruption.estimate_interruption(
            self.plan, self.bill.hours, saved.checkpoint
        )

    @property
    def steps(self) -> int | None:
        return self.plan.steps

    @property
    def count(self) -> int:
        """The GPUs of all machines."""
        return self.plan.gpus * self.plan.nodes

    @property
    def where(self) -> str:
        if not self.count:
            return "CPU: "
        return f"{self.count} GPU(s): "

    @property
    def _by_step(self) -> bool:
        """Whether `plan.speed` describes it, which includes the reference model's pass."""
        is_estimated = self.terms.tokens_per_second is None and self.measured is None
        return is_estimated and self.plan.nodes == 1 and self.setup.sharding is None

    def memory_of(self, setup: Setup) -> Memory:
        memory = estimate(setup)
        if self.static:
            return memory.without("activations", "logits")
        return memory

    def _fit_batch(self, gib: float) -> Fit | None:
        """The largest split of the batch that fits."""
        best = None
        rows = self.plan.global_batch // self.plan.processes
        for per_device in plan.list_splits(self.plan.global_batch, self.plan.processes):
            accumulation = rows // per_device
            memory = self.memory_of(self.footprint.setup(per_device, accumulation))
            spare = memory.spare(gib)
            if spare >= 0:
                best = Fit(per_device, accumulation, memory, spare)
            elif accumulation > 2:
                # larger batches take more; only the last split does without accumulated gradients
                break
        return best

    def _find_speed(self) -> Speed:
        """The measured speed, else an estimate.

        A share of the card's peak stands for the estimate where that does not apply (several
        machines, the script's own FSDP). Raises InvalidConfig for a GPU without a data sheet.
        """
        name = self.card.name
        if self.terms.tokens_per_second is not None:
            return Speed(self.terms.tokens_per_second, "--tokens-per-second")
        if self.measured is not None:
            return self.measured
        if not name or self.static:
            return Speed()
        peak = datasheets.find_peak_flops(name)
        if peak is None:
            listed = ", ".join(card.name for card in datasheets.SHEETS)
            message = f"the arithmetic speed of {name} is not known"
            help = f"known are {listed}; or give --tokens-per-second"
            finding = launch_finding("error", "unknown-device", message, help, key="gpu")
            raise InvalidConfig(finding)
        if self._by_step:
            seconds = predict_step_seconds(self.footprint, self.card)
            source = f"estimated: {seconds:,.1f} s a step, "
            source += f"from the data sheet of {name} and measured runs"
            return Speed(self.tokens.real / seconds, source)
        flops = self._compute_flops()
        computed = STATED_MFU * peak * self.plan.processes / flops
        source = f"{STATED_MFU:.0%} MFU of {peak / 1e12:,.0f} TFLOP/s a GPU, "
        source += f"{flops / 1e9:.1f} GFLOP a token"
        return Speed(computed * (1 - self.tokens.waste), source)

    def _compute_flops(self) -> float:
        """Floating-point operations of the forward and backward pass over a token."""
        shape = self.footprint.shape
        trained = shape.multiplied
        frozen = 0
        if self.footprint.adapters is not None:
            trained = 0
            frozen = shape.multiplied
        width = self.footprint.rows.mean
        row = measure_packed_row(self.plan, self.footprint.rows)
        if row is not None:
            # attention goes over the whole of a row that dpo.py packs
            width = float(row.positions)
        return datasheets.compute_flops_a_token(
            trained=trained, frozen=frozen, layers=shape.layers, query=shape.query, width=width
        )

    def _compute_bill(self) -> Bill:
        steps = self.steps
        speed = self.speed.tokens
        if self.static:
            return Bill(None, None, "the row lengths are not known: --row-tokens")
        if speed is None and self.plan.gpus:
            return Bill(None, None, "the speed is not known: --gpu H100, or --tokens-per-second")
        if speed is None:
            return Bill(None, None, "the speed is not known: --tokens-per-second")
        if steps is None:
            return Bill(None, None, "the steps are not known: --rows, or a limit of steps")
        step_s = self.tokens.real / speed
        seconds = steps * step_s
        formula = f"{steps:,} steps x {self.tokens.real:,.0f} tokens / {speed:,.0f} a second"
        rows = self._count_reference_rows()
        if rows:
            # one pass of all ranks takes four times the rows of a packed step
            wide = replace(self.plan, per_device=4 * self.plan.per_device, accumulation=1)
            row = measure_packed_row(wide, self.footprint.rows)
            rows_a_pass = self.plan.global_batch
            if row is not None:
                rows_a_pass = max(1, round(row.pairs * self.plan.processes))
            # a forward pass takes a third of a step
            seconds += rows / rows_a_pass * step_s / 3
            formula += f", and {rows:,} rows forward through the reference: a third of a step"
        hours = seconds / 3600
        cost = None
        if self.terms.price is not None:
            cost = hours * self.terms.price * self.plan.processes
        return Bill(hours, cost, formula)

    def _count_reference_rows(self) -> int | None:
        """Rows through the reference model whose time is not part of a step's."""
        if not self.footprint.pairs:
            return None
        is_precomputed = self.plan.values.get("precompute_ref_log_probs")
        if self.setup.reference == "cache" or is_precomputed:
            return self.rows
        if self.setup.reference and self.steps and not self._by_step:
            return self.steps * self.plan.global_batch
        return None

    @property
    def findings(self) -> Iterator[Finding]:
        names = self.plan.stage.entry.names
        risk = self.interruption.findings(names.save_strategy or names.save_every)
        yield from self._check_memory()
        yield from map(self.plan.stage.config.placed, (*self._check_waste(), *risk))

    def _check_memory(self) -> Iterator[Finding]:
        memory = self.memory
        gib = self.card.gib
        best = self.best
        place = self.plan.stage.config.origin("batch.per_device").place
        if memory is None:
            message = f"{self.where}memory is planned for GPUs, not for the CPU"
            yield launch_finding("note", "unknown-memory", message)
        elif gib is not None and self.spare is not None and self.spare < 0:
            help = None
            if not self.static:
                help = self._suggest_changes(memory, compute_usable(gib))
            message = self.where + _describe_shortage(memory, gib)
            yield launch_finding("warning", "out-of-memory", message, help, **place)
        elif gib is not None and best is not None and memory.peak < 0.6 * gib and self.steps != 0:
            if best.per_device <= self.plan.per_device:
                return
            factor = self.plan.accumulation / best.accumulation
            how = f"divides accumulation by {factor:g}"
            if factor == 2:
                how = "halves accumulation"
            message = f"{self.where}{memory.peak:.0f} of {gib:g} GiB used: per-device batch "
            message += f"{best.per_device} fits ({best.memory.peak:.0f} GiB) and {how}"
            help = f"write `per_device: {best.per_device}`, or let --fit choose"
            yield launch_finding(
                "note", "half-empty", message, help, key="batch.per_device", **place
            )

    def _suggest_changes(self, memory: Memory, room: float) -> str:
        """Changes with which it fits into `room` GiB."""

        def peak_of(other: Footprint) -> float:
            return self.memory_of(other.setup()).peak

        ways = find_alternatives(self.footprint, peak_of, room)
        if ways:
            listed = [f"{way} ({peak:.1f} GiB)" for way, peak in ways[:3]]
            return "this fits: " + "; or ".join(listed)
        needed = "a card with more memory"
        if max(KINDS, key=memory.of) in ("logits", "activations"):
            needed = f"{needed}, shorter rows"
        return f"no setting that launch could change makes it fit: {needed}, or a smaller model"

    def _check_waste(self) -> Iterator[Finding]:
        """More than half of what a packed step computes is empty; which batch would fill it."""
        rows = self.footprint.rows
        row = measure_packed_row(self.plan, rows)
        if row is None or row.filled >= 0.5 or self.static:
            return
        pairs = self.plan.per_device * self.plan.accumulation
        more, full = fill_rows(rows, pairs=pairs, limit=row.positions // 2)
        better = ""
        help = "shorter `max_seq_length`, or `packing: false`"
        if more > pairs:
            better = f"; {more} fills {full.filled:.0%}"
            help = f"write `per_device: {more}`: a step takes the same time and memory"
        message = f"batch {pairs} uses {row.filled:.0%} of each step{better}: rows of "
        message += f"{row.positions:,} positions are computed whole, however many pairs they hold"
        yield launch_finding("warning", "half-wasted", message, help, key="batch.per_device")

    def record(self, *, why: bool = False) -> PlanRecord:
        """`why`: with every allocation of memory; on the CPU none is planned."""
        saved = self.saved
        sizes = {"model": saved.final, "checkpoint": saved.checkpoint, "most": saved.most}
        memory = None
        allocations = None
        if self.memory is not None:
            memory = self.memory.as_json()
            if self.static:
                memory |= {"activations": None, "logits": None}
            if why:
                allocations = self.memory.why()
        fit = None
        if self.terms.fit and self.best is not None:
            fit = self.best.as_json()
        tokens = None
        padding = None
        if not self.static:
            tokens = round(self.tokens.real)
            padding = round(self.tokens.waste, 3)
        fits = None
        if self.spare is not None:
            fits = self.spare >= 0
        planned = asdict(self.plan.record) | {"rows": self.rows}
        return PlanRecord(
            **planned,
            tokens_per_step=tokens,
            padding_share=padding,
            memory_gib=memory,
            fits=fits,
            spare_gib=_round_value(self.spare),
            tokens_per_second=_round_value(self.speed.tokens, None),
            speed_source=self.speed.source,
            hours=_round_value(self.bill.hours),
            cost=_round_value(self.bill.cost),
            disk_gib={name: round(size / GIB, 2) for name, size in sizes.items()},
            interruption=self.interruption.as_json(),
            fit=fit,
            why=allocations,
        )

    def row(self) -> dict[str, str | None]:
        fits = None
        if self.spare is not None:
            fits = f"yes, {self.spare:.1f} left"
            if self.spare < 0:
                fits = f"no, {-self.spare:.1f} over"
        peak = None
        if self.memory is not None:
            bound = "> " if self.static else ""
            peak = f"{bound}{self.memory.peak:.1f}"
        tokens = None
        if not self.static:
            tokens = f"{self.tokens.real:,.0f}"
        return {
            "GPUs": str(self.count or "CPU"),
            "per device": str(self.plan.per_device),
            "accumulation": str(self.plan.accumulation),
            "global": str(self.plan.global_batch),
            "steps": _format_cell(self.steps, ","),
            "tokens/step": tokens,
            "peak GiB": peak,
            "fits": fits,
            "hours": _format_cell(self.bill.hours, ".2f"),
            "cost": _format_cell(self.bill.cost, ".2f"),
            "disk GiB": f"{self.saved.most / GIB:.1f}",
        }

    def lines(self, *, why: bool) -> Iterator[str]:
        memory = self.memory
        if memory is not None:
            sizes = {kind: memory.of(kind) for kind in KINDS}
            shares = [f"{kind} {gib:.1f}" for kind, gib in sizes.items() if gib >= 0.05]
            place = f"at the {memory.fullest.name}"
            if self.static:
                place = "without activations"
            yield f"{self.where}{memory.peak:.1f} GiB {place}: {', '.join(shares) or 'nothing'}"
        if self.best is not None and self.terms.fit:
            rows, accumulation, fullest, _ = self.best
            packing = drop_packing(self.plan, rows)[1]
            split = f"per device {rows}, accumulation {accumulation}{packing}"
            yield f"  --fit: {split}: {fullest.peak:.1f} GiB"
        if self.steps != 0:
            yield f"{self.where}{self.interruption.line()}"
        if not why:
            return
        if memory is not None:
            yield from _format_phases(memory)
        if not self.static:
            yield f"  tokens a step: {self.tokens.formula}"
        yield f"  time: {self.bill.formula}"
        yield f"  disk: {self.saved.formula}"


def _format_cell(value: float | None, form: str) -> str | None:
    if value is None:
        return None
    return format(value, form)


def _round_value(value: float | None, digits: int | None = 2) -> float | None:
    if value is None:
        return None
    return round(value, digits)


def _describe_shortage(memory: Memory, gib: float) -> str:
    """How much is missing on a card, and what takes most."""
    room = compute_usable(gib)
    phase = memory.fullest
    kind = max(KINDS, key=memory.of)
    alike = [part for part in phase.allocations if part.kind == kind]
    largest = max(alike, key=lambda part: part.gib)
    return (
        f"{memory.peak:.1f} GiB are planned and {room:.1f} of {gib:g} can be used: "
        f"{memory.peak - room:.1f} GiB missing, at the {phase.name}; {memory.of(kind):.1f} of "
        f"it are {kind} ({largest.name}: {largest.gib:.2f} GiB = {largest.formula})"
    )


def _format_phases(memory: Memory) -> Iterator[str]:
    for phase in sorted(memory.phases, key=lambda phase: -phase.gib):
        yield f"  {phase.name}: {phase.gib:.2f} GiB"
        for part in sorted(phase.allocations, key=lambda part: -part.gib):
            line = f"    {part.gib:8.2f}  {part.kind:13} {part.name}: {part.formula}"
            if part.source:
                line = f"{line}  [{part.source}]"
            yield line


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The estimates by number of GPUs; `sources` says where shape, rows and attention come from."""

    rungs: tuple[Estimate, ...]
    sources: Mapping[str, str]
    findings: tuple[Finding, ...]

    def as_json(self, *, why: bool) -> dict[str, Any]:
        records = [rung.record(why=why).as_json() for rung in self.rungs]
        return {"gpus": records, "sources": dict(self.sources)}

    def rows(self) -> list[dict[str, str | None]]:
        return [rung.row() for rung in self.rungs]

    def lines(self, *, why: bool) -> list[str]:
        """The text below the table of `rows`."""
        lines = [""]
        for rung in self.rungs:
            lines += rung.lines(why=why)
        lines.append("")
        lines += [f"{name}: {source}" for name, source in self.sources.items()]
        for source in dict.fromkeys(rung.speed.source for rung in self.rungs):
            if source is not None:
                lines.append(f"speed: {source}")
        return lines


def parse_counts(text: str) -> list[int]:
    """The numbers of a text such as `1,2,8`, each at most once. Raises UsageError."""
    words = text.replace(" ", "").split(",")
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 6]
    if len(set(numbers)) < len(words):
        message = f"`{text}` is not a list of different counts"
        raise usage("bad-gpus", message, "--gpus 1,2,8")
    return numbers


def forecast_stage(facts: Facts, gpus: Sequence[int], terms: ForecastOptions) -> Forecast:
    """Plan a stage file for each number of GPUs; a number that cannot be planned is among the
    findings.

    Raises InvalidConfig if none can be planned, UsageError or NotReady.
    """
    _require_usable_options(terms, gpus)
    card = _choose_card(terms)
    if terms.fit and card.gib is None:
        # a card's name does not tell its memory: most come in several sizes
        message = "how much fits is not known without the memory of a GPU"
        help = "give the memory of a GPU in GiB, `--gpu-memory 80` for a card of 80 GB"
        raise usage("fit-without-memory", message, help)
    rungs: list[Estimate] = []
    faults: list[Finding] = []
    rows: Lengths | None = None
    packages = facts.trainer.packages
    for count in gpus:
        try:
            planned = check.plan_with_findings(
                facts, gpus=count, output=Path("model"), rows=terms.rows
            )
            if select_errors(planned.all_findings):
                raise InvalidConfig(planned.all_findings)
            rows = rows or _try_row_lengths(planned, packages, terms, faults)
            rungs.append(_estimate_rung(planned, rows, terms, card, packages))
        except InvalidConfig as error:
            faults += error.findings
    faults = list(dict.fromkeys(faults))
    if not rungs:
        raise InvalidConfig(faults)
    own: list[Finding] = []
    for rung in rungs:
        own += rung.findings
    largest = max(rungs, key=lambda rung: rung.plan.gpus)
    sources = {
        "shape": find_model_shape(rungs[0].plan, terms.shape).source,
        "rows": "unknown",
        "attention": decide_attention(largest.plan, terms.attention),
    }
    if rows is not None:
        sources["rows"] = rows.source
    findings = (
        *faults,
        *_collect_findings(rungs),
        *dict.fromkeys(own),
        *_check_rungs(rungs, terms),
    )
    return Forecast(rungs=tuple(rungs), sources=sources, findings=findings)


def _require_usable_options(terms: ForecastOptions, gpus: Sequence[int]) -> None:
    """Raise UsageError for options that no plan can use."""
    if terms.attention not in {None, *ATTENTIONS}:
        message = f"`{terms.attention}` is not an attention implementation"
        raise usage("bad-attention", message, f"one of {', '.join(ATTENTIONS)}")
    values = {
        "bad-gpu-memory": terms.gpu_memory,
        "bad-price": terms.price,
        "bad-tokens-per-second": terms.tokens_per_second,
    }
    for code, value in values.items():
        if value is not None and not 0 < value < math.inf:
            option = code.removeprefix("bad-")
            raise usage(code, f"--{option} is more than 0, not {value:g}")
    if terms.tokens_per_second is not None and len(set(gpus)) > 1:
        message = "--tokens-per-second is the speed of one count of GPUs"
        help = "plan the count that it was measured on, or give --gpu H100 in its place"
        raise usage("speed-of-several", message, help)
    if terms.price is not None and not all(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    if terms.fit and not any(gpus):
        raise usage("fit-without-memory", "memory is planned for GPUs, not for the CPU")


# what is set for any number of GPUs, and what to do at the start
_ASIDE = frozenset({"derived", "no-probe", "several-nodes"})


def _collect_findings(rungs: Sequence[Estimate]) -> Iterator[Finding]:
    """The findings of the plans: once if all have it, else with the number of GPUs."""
    by_rung = [check.check_plan(rung.plan) for rung in rungs]
    for rung, findings in zip(rungs, by_rung, strict=True):
        for finding in findings:
            if finding.code in _ASIDE:
                continue
            if not all(finding in other for other in by_rung):
                yield replace(finding, message=f"{rung.where}{finding.message}")
            elif rung is rungs[0]:
                yield finding


def _check_rungs(rungs: Sequence[Estimate], terms: ForecastOptions) -> Iterator[Finding]:
    """Why nothing fits, why there is no step, and why there is no cost."""
    if terms.fit:
        for rung in rungs:
            yield from _check_fit(rung)
    yield from _check_steps(rungs)
    unknown = [rung for rung in rungs if rung.bill.cost is None]
    if terms.price is not None and unknown:
        numbers = ", ".join(str(rung.count) for rung in unknown)
        message = f"{numbers} GPU(s): no cost: {unknown[0].bill.formula}"
        yield launch_finding("note", "unknown-cost", message)


def _check_fit(rung: Estimate) -> Iterator[Finding]:
    if rung.best is not None or rung.spare is None:
        return
    rows = rung.plan.global_batch // rung.plan.processes
    least = rung.memory_of(rung.footprint.setup(1, rows)).peak
    message = f"{rung.where}--fit: no split of the batch fits; "
    message += f"{least:.1f} GiB with one row a device"
    yield launch_finding("note", "nothing-fits", message, key="batch.per_device")


def _check_steps(rungs: Sequence[Estimate]) -> Iterator[Finding]:
    first = rungs[0].plan
    name = first.stage.entry.names.max_steps
    if plan.find_step_limit(first.stage, first.values) == 0:
        message = f"`{name}: {first.values[name]}`: no step is trained, "
        message += "and the model is saved as it was"
        yield _build_no_steps_finding(f"args.{name}", message, "leave it out for whole epochs")
        return
    for rung in rungs:
        if rung.steps == 0:
            message = f"{rung.where}by these lengths {rung.rows or 0:,} rows are less than "
            message += "one step, and what is not full is left out"
            yield _build_no_steps_finding(
                "batch.global", message, "fewer GPUs, a smaller batch, or more rows"
            )


def _build_no_steps_finding(key: str, message: str, help: str) -> Finding:
    finding = launch_finding("warning", "no-steps", message, help, key=key)
    return replace(finding, layer="run")


def _estimate_rung(
    planned: Plan,
    rows: Lengths | None,
    terms: ForecastOptions,
    card: Card,
    packages: Mapping[str, str],
) -> Estimate:
    end = plan.find_caches_only(planned.stage, planned.values)
    if end is not None:
        message = f"the run ends after the {end}: it has no step to plan"
        help = "leave `cache_..._only` out to plan it"
        raise InvalidConfig(launch_finding("error", "caches-only", message, help))
    count, cut, steps = count_rows_and_steps(planned, rows, terms)
    needs = Footprint(
        shape=find_model_shape(planned, terms.shape, packages),
        attention=decide_attention(planned, terms.attention),
        plan=replace(planned, steps=steps),
        rows=cut,
    )
    return Estimate(needs, count, terms, card, static=rows is None)


def count_rows_and_steps(
    planned: Plan, rows: Lengths | None, terms: ForecastOptions
) -> tuple[int | None, Lengths, int | None]:
    """The rows of the data set, their lengths as they are trained on, and the optimizer steps."""
    override = terms.rows is not None
    count = planned.rows
    if override:
        count = terms.rows
    if rows is None:
        return count, _SHORTEST, planned.steps
    if count is None:
        count = rows.rows
    cut = footprint.measure_trained_rows(planned, rows)
    trained = footprint.count_rows_per_epoch(planned, rows, count)
    return count, cut, footprint.count_optimizer_steps(planned, trained, cut, override=override)


def forecast_plan(planned: Plan, packages: Mapping[str, str], terms: ForecastOptions) -> Estimate:
    """The forecast for one plan. Raises InvalidConfig if shape or row lengths are unknown."""
    faults = select_errors(planned.findings)
    if faults:
        raise InvalidConfig(faults)
    rows = find_row_lengths(planned, packages, terms)
    return _estimate_rung(planned, rows, terms, _choose_card(terms), packages)


def forecast_static_memory(
    planned: Plan, packages: Mapping[str, str], terms: ForecastOptions
) -> Estimate:
    """The forecast without activations, for rows of any length. Raises as `forecast_plan` does."""
    return _estimate_rung(planned, None, terms, _choose_card(terms), packages)


def add_forecast(prepared: Prepared) -> Prepared:
    """A start with its forecast for the record, and the forecast's findings among the warnings.

    Unchanged on the CPU, if the run is finished, and if shape or row lengths are unknown.
    """
    planned = prepared.plan
    is_finished = prepared.decision.kind == "finished"
    if not planned.gpus or prepared.forecast is not None or is_finished:
        return prepared
    packages = prepared.facts.trainer.packages
    terms = ForecastOptions()
    takes_best = planned.stage.entry.best_attention
    is_open = takes_best and planned.values.get("attn_implementation") is None
    if is_open and "flash-attn" not in packages:
        terms = ForecastOptions(attention="sdpa")
    card = Card()
    chosen = prepared.start.devices
    if chosen is not None and chosen.slots:
        card = _read_card(chosen.slots[0].gpu)
    try:
        rows = find_row_lengths(planned, packages, terms)
        rung = _estimate_rung(planned, rows, terms, card, packages)
    except (LaunchError, OSError):
        return prepared
    codes = {finding.code for finding in prepared.findings}
    new = [finding for finding in rung.findings if finding.code not in codes]
    return replace(prepared, forecast=rung.record(), warnings=(*prepared.warnings, *new))


def _choose_card(terms: ForecastOptions) -> Card:
    """The card that the options name, else the first of this machine."""
    card = find_card(terms.gpu or "", None)
    present = devices.survey_devices(os.environ).present
    if not terms.gpu and present:
        card = _read_card(present[0])
    if terms.gpu_memory is not None:
        card = replace(card, gib=terms.gpu_memory)
    return card


def _read_card(gpu: Gpu) -> Card:
    return find_card(gpu.name, gpu.memory_mib / 1024 or None)


_ALIKE = ("packing", "use_liger_kernel", "use_lora", "use_peft")


def _find_measured_speed(planned: Plan, card: str) -> Speed | None:
    """The speed of the newest like run on such GPUs, for as many GPUs as are planned."""
    if not card:
        return None
    stage = planned.stage
    model = planned.values.get("model_name_or_path")
    wanted = (stage.options.stage, stage.options.backend, model)
    for summary in reversed(rundir.summarize(rundir.list_known_runs())):
        is_like = (summary.stage, summary.backend, summary.model) == wanted
        if not is_like or card not in (summary.card or ""):
            continue
        folder = RunFolder(summary.path)
        manifest = rundir.read_manifest(folder)
        if not manifest.gpus or not _is_alike(manifest, planned):
            continue
        verdict = Record(rundir.read_json(folder.verdict))
        rate = verdict.figure("metrics", "tokens_per_second")
        if rate is not None:
            count = manifest.gpus * (manifest.nodes or 1)
            source = f"{folder.path.name}: {rate:,.0f} tokens/s on {count} GPU(s)"
            return Speed(rate / count * planned.processes, source)
    return None


def _is_alike(manifest: Manifest, planned: Plan) -> bool:
    """Whether a run has the script of a plan, and the arguments that speed hangs on."""
    if (manifest.script or manifest.stage) != planned.stage.schema.key:
        return False
    return all(manifest.argument(name) == planned.values.get(name) for name in _ALIKE)


_SHORTEST = Lengths(mean=1, deviation=0, longest=1, source="", counts=((1, 1),))


def _try_row_lengths(
    planned: Plan, packages: Mapping[str, str], terms: ForecastOptions, faults: list[Finding]
) -> Lengths | None:
    """The row lengths; without them the batch and static memory can be planned, but for `--fit`."""
    try:
        return find_row_lengths(planned, packages, terms)
    except InvalidConfig as error:
        if terms.fit or not planned.gpus:
            raise
        message = "row lengths unknown: memory excludes activations; no time estimate"
        for finding in error.findings:
            faults.append(replace(finding, severity="note", message=message))
        return None


def find_row_lengths(planned: Plan, packages: Mapping[str, str], terms: ForecastOptions) -> Lengths:
    """By `--row-tokens`, else of the tokenised data that the run would hit, else by a rehearsal.

    Raises InvalidConfig if none of them is there.
    """
    if terms.row_tokens is not None:
        return lengths.parse(terms.row_tokens)
    for folder in _find_tokenised(planned, packages):
        with contextlib.suppress(InvalidConfig):
            return lengths.measure_lengths(folder, pairs=planned.stage.schema.pairs)
    if terms.rehearsed_tokens is not None:
        rehearsed = lengths.parse(terms.rehearsed_tokens)
        return replace(rehearsed, source="the first rows, as a rehearsal saw them")
    place = planned.stage.config.origin(f"args.{planned.stage.entry.names.data}").place
    message = "row lengths unknown: this data set has not been tokenised for this run yet"
    help = "--row-tokens MEAN:MAX, in tokens a row, such as --row-tokens 290:1100; "
    help += "or run `launch rehearse` or `launch prepare` first"
    finding = launch_finding("error", "unknown-lengths", message, help, key="row_tokens", **place)
    raise InvalidConfig(finding)


def _find_tokenised(planned: Plan, packages: Mapping[str, str]) -> Iterator[Path]:
    """What the run would hit: by upstream's own key, of TRL the entries of the folder, newest
    first.
    """
    for cache in keys.derive(planned, packages, lenient=True):
        if cache.kind != "dataset":
            continue
        if planned.stage.backend.DATA_CACHE == "own":
            # one folder may hold sets of other lengths and templates too
            entry = entries.find_hit(cache.path, planned)
            if entry is not None:
                yield entry
        else:
            folder = folders.open_folder(cache.path)
            if folder is not None:
                paths = [cache.path / name for name in folder.entries()]
                yield from sorted(paths, key=lambda path: -path.stat().st_mtime)
