"""`launch plan`: what a stage needs on so many GPUs - batch, steps, memory, time, money, disk.

Nothing is guessed: a number that cannot be had is null, and what memory is made of says where each part
comes from. Time comes from a measured speed where there is one, else from the model of a step (`plan.speed`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher.artifacts import lengths
from launcher.artifacts.lengths import Lengths, fuller
from launcher.cache import entries, folders, keys
from launcher.errors import Finding, InvalidConfig, LaunchError, errors, launch_finding, usage
from launcher.machine import datasheets, devices
from launcher.machine.datasheets import Card, card_of
from launcher.plan import footprint, plan
from launcher.plan.alternatives import find_alternatives, without_packing
from launcher.plan.command import LAUNCHERS
from launcher.plan.footprint import ATTENTIONS, Footprint, attention_of, packed_row, shape_of
from launcher.plan.memory.peak import estimate
from launcher.plan.memory.phases import GIB, KINDS, Memory, usable
from launcher.plan.memory.setup import Setup
from launcher.plan.plan import Plan
from launcher.plan.speed import step_seconds
from launcher.planning import check, interruption
from launcher.planning.collect import Facts
from launcher.planning.doctor import disk
from launcher.planning.doctor.disk import Saved
from launcher.planning.prepare import Prepared
from launcher.runs import rundir
from launcher.runs.record import PlanRecord, Record
from launcher.runs.rundir import RunFolder

STATED_MFU = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """What is not in the stage file. `gpu_memory` in GiB, `price` for one GPU and hour.

    `shape` names a model whose config stands for that of one that is not here yet. `rehearsed_tokens` is read
    like `row_tokens`, where nothing better is known.
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
    """The largest per-device batch that fits, the global batch kept."""

    per_device: int
    accumulation: int
    memory: Memory
    spare: float

    def as_json(self) -> dict[str, Any]:
        split = {"per_device": self.per_device, "accumulation": self.accumulation}
        return {**split, "peak_gib": round(self.memory.peak, 2), "spare_gib": round(self.spare, 2)}


class Estimate:
    """The forecast for one count of GPUs; None is what cannot be known.

    `rows` are those of the data set. On the CPU no memory is planned. `spare` are the GiB that are left,
    below 0 what is missing; `smallest` is the memory of one row a device where no split of the batch fits.
    `static`: the row lengths are unknown, and memory is that without activations. Raises InvalidConfig.
    """

    def __init__(
        self, footprint: Footprint, rows: int | None, terms: ForecastOptions, card: Card, *, static: bool = False
    ) -> None:
        self.footprint = footprint
        self.plan = footprint.plan
        self.rows = rows
        self.terms = terms
        self.card = card
        self.static = static
        self.setup = footprint.setup()
        self.memory = self.memory_of(self.setup) if self.plan.gpus else None
        self.spare = None if card.gib is None or self.memory is None else self.memory.spare(card.gib)
        self.tokens = footprint.tokens
        self.measured = _measured_speed(self.plan, self.card.name) if self.card.name else None
        self.speed, self.speed_source = self._speed()
        self.hours, self.cost, self.bill = self._bill()
        self.best, self.smallest = self._fit()
        self.interruption = interruption.of_plan(self.plan, self.steps, self.hours, self.saved.checkpoint)
        names = self.plan.stage.entry.names
        risks = self.interruption.findings(names.save_strategy or names.save_every)
        placed = (self.plan.stage.config.placed(one) for one in risks)
        self.findings = (*self._memory_findings(), *self._waste_findings(), *placed)

    @property
    def steps(self) -> int | None:
        return self.plan.steps

    @property
    def _by_step(self) -> bool:
        """Whether the speed is that of `plan.speed`, which counts a reference model's pass beside each step."""
        named = self.terms.tokens_per_second is None and self.measured is None
        return named and self.plan.nodes == 1 and self.setup.sharding is None and not self.static

    @property
    def where(self) -> str:
        count = self.plan.gpus * self.plan.nodes
        return f"{count} GPU(s): " if count else "CPU: "

    def memory_of(self, setup: Setup) -> Memory:
        whole = estimate(setup)
        return whole.without("activations", "logits") if self.static else whole

    @property
    def saved(self) -> Saved:
        found = disk.saved(self.plan, self.footprint.shape.parameters, self.setup)
        assert found is not None, "a setup tells the size of an adapter"
        return found

    def _fit(self) -> tuple[Fit | None, Memory | None]:
        """The largest split of the batch that fits; else what one row a device takes."""
        gib = self.card.gib
        best = None
        if self.memory is None or gib is None or self.static:
            return None, None
        each = self.plan.global_batch // self.plan.processes
        for per_device in plan.splits(self.plan.global_batch, self.plan.processes):
            accumulation = each // per_device
            planned = self.memory_of(self.footprint.setup(per_device, accumulation))
            spare = planned.spare(gib)
            if spare >= 0:
                best = Fit(per_device, accumulation, planned, spare)
            elif accumulation > 2:
                # a larger batch never takes less, but accumulation's gradients fall away at the last split
                break
        if best is not None:
            return best, None
        return None, self.memory_of(self.footprint.setup(1, each))

    def _speed(self) -> tuple[float | None, str | None]:
        """Real tokens a second over all devices, as measured, else as estimated; and where that comes from.

        Where the estimate does not apply (several machines, the script's own FSDP) a share of the card's peak
        stands for it. Raises InvalidConfig for a GPU without a data sheet.
        """
        if self.terms.tokens_per_second is not None:
            return self.terms.tokens_per_second, "--tokens-per-second"
        if not self.card.name:
            return None, None
        if self.measured is not None:
            return self.measured
        peak = datasheets.peak_flops(self.card.name)
        shape = self.footprint.shape
        if peak is None:
            message = f"the arithmetic speed of {self.card.name} is not known"
            help = f"known are {', '.join(one.name for one in datasheets.SHEETS)}; or give --tokens-per-second"
            raise InvalidConfig(launch_finding("error", "unknown-device", message, help, key="gpu"))
        if self._by_step:
            seconds = step_seconds(self.footprint, self.card)
            source = f"estimated: {seconds:,.1f} s a step, from the data sheet of {self.card.name} and measured runs"
            return self.tokens.real / seconds, source
        row = packed_row(self.plan, self.footprint.rows)
        trained = shape.multiplied
        frozen = 0
        if self.footprint.adapters is not None:
            trained, frozen = 0, trained
        # attention goes over the whole of a row that dpo.py packs
        width = self.footprint.rows.mean if row is None else float(row.positions)
        each = datasheets.flops_a_token(
            trained=trained, frozen=frozen, layers=shape.layers, query=shape.query, width=width
        )
        computed = STATED_MFU * peak * self.plan.processes / each
        source = f"{STATED_MFU:.0%} MFU of {peak / 1e12:,.0f} TFLOP/s a GPU, {each / 1e9:.1f} GFLOP a token"
        return computed * (1 - self.tokens.waste), source

    def _bill(self) -> tuple[float | None, float | None, str]:
        """Hours, money and their formula; a row through the reference is a forward pass: a third of one of a step."""
        planned = self.plan
        tokens = self.tokens
        speed = self.speed
        steps = self.plan.steps
        named = "--gpu H100, or " if planned.gpus else ""
        referred = None
        if self.footprint.pairs and (
            self.setup.reference == "cache" or planned.values.get("precompute_ref_log_probs")
        ):
            # all of them beforehand
            referred = self.rows
        elif self.footprint.pairs and self.setup.reference and steps and not self._by_step:
            referred = steps * planned.global_batch
        if self.static:
            return None, None, "the row lengths are not known: --row-tokens"
        if speed is None:
            return None, None, f"the speed is not known: {named}--tokens-per-second"
        if steps is None:
            return None, None, "the steps are not known: --rows, or a limit of steps"
        seconds = steps * tokens.real / speed
        formula = f"{steps:,} steps x {tokens.real:,.0f} tokens / {speed:,.0f} a second"
        if referred:
            together = planned.global_batch
            # one pass of all ranks takes four times the rows of a packed step
            wide = replace(planned, per_device=4 * planned.per_device, accumulation=1)
            if (row := packed_row(wide, self.footprint.rows)) is not None:
                together = max(1, round(row.pairs * planned.processes))
            seconds += referred / max(1, together) * tokens.real / speed / 3
            formula += f", and {referred:,} rows forward through the reference: a third of a step"
        hours = seconds / 3600
        price = self.terms.price
        cost = None if price is None else hours * price * planned.processes
        return hours, cost, formula

    def _memory_findings(self) -> Iterator[Finding]:
        planned = self.plan
        memory = self.memory
        best = self.best
        gib = self.card.gib
        place = planned.stage.config.origin("batch.per_device").place
        if memory is None:
            message = f"{self.where}memory is planned for GPUs, not for the CPU"
            yield launch_finding("note", "unknown-memory", message, None)
        elif gib is not None and memory.spare(gib) < 0:
            help = None if self.static else self._instead(memory, gib)
            kind = max(KINDS, key=memory.of)
            room = usable(gib)
            alike = [one for one in memory.fullest.allocations if one.kind == kind]
            largest = max(alike, key=lambda one: one.gib)
            message = (
                f"{self.where}{memory.peak:.1f} GiB are planned and {room:.1f} of {gib:g} can be used: "
                f"{memory.peak - room:.1f} GiB missing, at the {memory.fullest.name}; {memory.of(kind):.1f} of "
                f"it are {kind} ({largest.name}: {largest.gib:.2f} GiB = {largest.formula})"
            )
            yield launch_finding("warning", "out-of-memory", message, help, **place)
        elif gib is not None and best is not None and memory.peak < 0.6 * gib and planned.steps != 0:
            if best.per_device <= planned.per_device:
                return
            less = planned.accumulation / best.accumulation
            how = "halves accumulation" if less == 2 else f"divides accumulation by {less:g}"
            message = (
                f"{self.where}{memory.peak:.0f} of {gib:g} GiB used: per-device batch "
                f"{best.per_device} fits ({best.memory.peak:.0f} GiB) and {how}"
            )
            help = f"write `per_device: {best.per_device}`, or let --fit choose"
            yield launch_finding("note", "half-empty", message, help, key="batch.per_device", **place)

    def _instead(self, memory: Memory, gib: float) -> str:

        def peak_of(other: Footprint) -> float:
            return self.memory_of(other.setup()).peak

        ways = find_alternatives(self.footprint, peak_of, usable(gib))
        if ways:
            return "this fits: " + "; or ".join(f"{way} ({peak:.1f} GiB)" for way, peak in ways[:3])
        large = max(KINDS, key=memory.of) in ("logits", "activations")
        shorter = ", shorter rows" if large else ""
        return (
            f"no setting that launch could change makes it fit: a card with more memory{shorter}, or a smaller model"
        )

    def _waste_findings(self) -> Iterator[Finding]:
        """More than half of what a packed step computes is empty; which batch would fill it."""
        planned = self.plan
        rows = self.footprint.rows
        row = packed_row(planned, rows)
        if row is None or row.filled >= 0.5 or self.static:
            return
        pairs = planned.per_device * planned.accumulation
        more, full = fuller(rows, pairs=pairs, limit=row.positions // 2)
        better = ""
        help = "shorter `max_seq_length`, or `packing: false`"
        if more > pairs:
            better = f"; {more} fills {full.filled:.0%}"
            help = f"write `per_device: {more}`: a step takes the same time and memory"
        message = (
            f"batch {pairs} uses {row.filled:.0%} of each step{better}: rows of {row.positions:,} "
            "positions are computed whole, however many pairs they hold"
        )
        yield planned.stage.config.placed(
            launch_finding("warning", "half-wasted", message, help, key="batch.per_device")
        )

    @property
    def record(self) -> PlanRecord:
        spare = self.spare
        speed = self.speed
        saved = self.saved
        unknown = dict.fromkeys(("activations", "logits")) if self.static else {}
        disk = {"model": saved.final, "checkpoint": saved.checkpoint, "most": saved.most}
        return PlanRecord(
            **{**asdict(self.plan.record), "rows": self.rows},
            tokens_per_step=None if self.static else round(self.tokens.real),
            padding_share=None if self.static else round(self.tokens.waste, 3),
            memory_gib=None if self.memory is None else self.memory.as_json() | unknown,
            fits=None if spare is None or (self.static and spare >= 0) else spare >= 0,
            spare_gib=None if spare is None or self.static else round(spare, 2),
            tokens_per_second=None if speed is None else round(speed),
            speed_source=self.speed_source,
            hours=None if self.hours is None else round(self.hours, 2),
            cost=None if self.cost is None else round(self.cost, 2),
            disk_gib={name: round(size / GIB, 2) for name, size in disk.items()},
            interruption=self.interruption.as_json(),
            fit=self.best.as_json() if self.best is not None and self.terms.fit else None,
        )

    def explained(self) -> PlanRecord:
        """The record with every allocation of memory; as it is on the CPU, where none is planned."""
        return self.record if self.memory is None else replace(self.record, why=self.memory.why())

    def row(self) -> dict[str, str | None]:
        spare = self.spare
        fits = None
        if spare is not None and not (self.static and spare >= 0):
            fits = f"yes, {spare:.1f} left" if spare >= 0 else f"no, {-spare:.1f} over"
        return {
            "GPUs": f"{self.plan.gpus * self.plan.nodes or 'CPU'}",
            "per device": f"{self.plan.per_device}",
            "accumulation": f"{self.plan.accumulation}",
            "global": f"{self.plan.global_batch}",
            "steps": None if self.steps is None else f"{self.steps:,}",
            "tokens/step": None if self.static else f"{self.tokens.real:,.0f}",
            "peak GiB": None if self.memory is None else f"{'> ' * self.static}{self.memory.peak:.1f}",
            "fits": fits,
            "hours": None if self.hours is None else f"{self.hours:.2f}",
            "cost": None if self.cost is None else f"{self.cost:.2f}",
            "disk GiB": f"{self.saved.most / GIB:.1f}",
        }

    def lines(self, *, why: bool) -> Iterator[str]:
        if self.memory is not None:
            kinds = ((kind, self.memory.of(kind)) for kind in KINDS)
            shares = ", ".join(f"{kind} {gib:.1f}" for kind, gib in kinds if gib >= 0.05)
            peak = f"{self.memory.peak:.1f} GiB at the {self.memory.fullest.name}"
            if self.static:
                peak = f"{self.memory.peak:.1f} GiB without activations"
            yield f"{self.where}{peak}: {shares or 'nothing'}"
        if self.best is not None and self.terms.fit:
            rows, accumulation, fullest, _ = self.best
            if rows != self.plan.per_device:
                found = f"per device {rows}, accumulation {accumulation}"
                packing = without_packing(self.plan, rows)[1]
                yield f"  --fit: {found}{packing}: {fullest.peak:.1f} GiB"
            elif accumulation == 1:
                limit = f"the global batch of {self.plan.global_batch} allows no more"
                yield f"  --fit: per device {rows} fits, and {limit}"
            else:
                yield f"  --fit: per device {rows} is the largest that fits"
        if self.steps is None or self.steps > 0:
            yield f"{self.where}{self.interruption.line()}"
        if not why:
            return
        phases = () if self.memory is None else self.memory.phases
        for phase in sorted(phases, key=lambda one: -one.gib):
            yield f"  {phase.name}: {phase.gib:.2f} GiB"
            for one in sorted(phase.allocations, key=lambda one: -one.gib):
                where = f"  [{one.source}]" if one.source else ""
                yield f"    {one.gib:8.2f}  {one.kind:13} {one.name}: {one.formula}{where}"
        if not self.static:
            yield f"  tokens a step: {self.tokens.formula}"
        yield f"  time: {self.bill}"
        yield f"  disk: {self.saved.formula}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    rungs: tuple[Estimate, ...]
    shape: str
    lengths: str
    attention: str
    findings: tuple[Finding, ...]

    def as_json(self, *, why: bool) -> dict[str, Any]:
        sources = {"shape": self.shape, "rows": self.lengths, "attention": self.attention}
        records = [rung.explained() if why else rung.record for rung in self.rungs]
        return {"gpus": [record.as_json() for record in records], "sources": sources}

    def rows(self) -> list[dict[str, str | None]]:
        return [rung.row() for rung in self.rungs]

    def lines(self, *, why: bool) -> list[str]:
        """What stands below the table of `rows`."""
        parts = [line for rung in self.rungs for line in rung.lines(why=why)]
        speeds = [rung.speed_source for rung in self.rungs if rung.speed_source is not None]
        sources = [f"shape: {self.shape}", f"rows: {self.lengths}", f"attention: {self.attention}"]
        sources += [f"speed: {one}" for one in dict.fromkeys(speeds)]
        return ["", *parts, "", *sources]


def counts(text: str) -> list[int]:
    """`1,2,8` as numbers, none of them twice. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 6 for word in words) or len(set(words)) < len(words):
        raise usage("bad-gpus", f"`{text}` is not a list of different counts", "--gpus 1,2,8")
    return [int(word) for word in words]


def make(resolved: Facts, gpus: Sequence[int], terms: ForecastOptions) -> Forecast:
    """Plan a stage file for each count of GPUs; those that it cannot be planned for are among the findings.

    Raises InvalidConfig where it cannot be for any, UsageError or NotReady.
    """
    if terms.attention not in {None, *ATTENTIONS}:
        known = ", ".join(ATTENTIONS)
        raise usage("bad-attention", f"`{terms.attention}` is not an attention implementation", f"one of {known}")
    speed = terms.tokens_per_second
    values = {"bad-gpu-memory": terms.gpu_memory, "bad-price": terms.price, "bad-tokens-per-second": speed}
    for code, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise usage(code, f"--{code.removeprefix('bad-')} is more than 0, not {value:g}")
    if speed is not None and len(set(gpus)) > 1:
        help = "plan the count that it was measured on, or give --gpu H100 in its place"
        raise usage("speed-of-several", "--tokens-per-second is the speed of one count of GPUs", help)
    if terms.price is not None and not all(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    card = _card(terms)
    if terms.fit and not any(gpus):
        raise usage("fit-without-memory", "memory is planned for GPUs, not for the CPU")
    if terms.fit and card.gib is None:
        # a card's name does not tell its memory: most come in several sizes
        help = "give the memory of a GPU in GiB, `--gpu-memory 80` for a card of 80 GB"
        raise usage("fit-without-memory", "how much fits is not known without the memory of a GPU", help)
    rungs: list[Estimate] = []
    faults: list[Finding] = []
    rows: Lengths | None = None
    packages = resolved.trainer.packages
    for count in gpus:
        try:
            planned = check.settle(resolved, gpus=count, output=Path("model"), rows=terms.rows)
            if errors(planned.all_findings):
                raise InvalidConfig(planned.all_findings)
            rows = rows or _lengths_or_none(planned, packages, terms, faults)
            rungs.append(_rung(planned, rows, terms, card if count else Card(), packages))
        except InvalidConfig as error:
            faults += error.findings
    if not rungs:
        raise InvalidConfig(list(dict.fromkeys(faults)))
    own = [finding for rung in rungs for finding in rung.findings]
    return Forecast(
        rungs=tuple(rungs),
        shape=shape_of(rungs[0].plan, terms.shape).source,
        lengths="unknown" if rows is None else rows.source,
        attention=attention_of(max(rungs, key=lambda one: one.plan.gpus).plan, terms.attention),
        findings=(*dict.fromkeys(faults), *_split(rungs), *dict.fromkeys(own), *_remarks(rungs, terms)),
    )


# what is set for any number of GPUs, and what to do at the start
_ASIDE = frozenset({"derived", "no-probe", "several-nodes"})


def _split(rungs: Sequence[Estimate]) -> Iterator[Finding]:
    """What the plans themselves say: once where all counts agree, else with the count."""
    findings_of = [tuple(f for f in check.beyond_file(rung.plan) if f.code not in _ASIDE) for rung in rungs]
    for rung, findings in zip(rungs, findings_of, strict=True):
        for one in findings:
            if not all(one in other for other in findings_of):
                yield replace(one, message=f"{rung.where}{one.message}")
            elif rung is rungs[0]:
                yield one


def _remarks(rungs: Sequence[Estimate], terms: ForecastOptions) -> Iterator[Finding]:
    """Why nothing fits, why there is not a single step, and why a price came to no cost."""
    for rung in rungs:
        if terms.fit and rung.smallest is not None:
            peak = f"{rung.smallest.peak:.1f} GiB with one row a device"
            message = f"{rung.where}--fit: no split of the batch fits; {peak}"
            yield launch_finding("note", "nothing-fits", message, None, key="batch.per_device")
    stage = rungs[0].plan.stage
    values = rungs[0].plan.values
    name = stage.entry.names.max_steps
    warning: dict[str, Any] = {"severity": "warning", "layer": "run", "code": "no-steps"}
    if plan.step_limit(stage, values) == 0:
        message = f"`{name}: {values[name]}`: no step is trained, and the model is saved as it was"
        yield Finding(**warning, key=f"args.{name}", message=message, help="leave it out for whole epochs")
    else:
        for rung in (rung for rung in rungs if rung.steps == 0):
            message = f"{rung.where}by these lengths {rung.rows or 0:,} rows are less than one step, "
            message += "and what is not full is left out"
            help = "fewer GPUs, a smaller batch, or more rows"
            yield Finding(**warning, key="batch.global", message=message, help=help)
    unknown = [rung for rung in rungs if rung.cost is None]
    if terms.price is not None and unknown:
        counts = ", ".join(str(rung.plan.gpus * rung.plan.nodes) for rung in unknown)
        message = f"{counts} GPU(s): no cost: {unknown[0].bill}"
        yield launch_finding("note", "unknown-cost", message, None)


def _rung(
    planned: Plan, rows: Lengths | None, terms: ForecastOptions, card: Card, packages: Mapping[str, str]
) -> Estimate:
    if (only := plan.caches_only(planned.stage, planned.values)) is not None:
        message = f"the run ends after the {only}: it has no step to plan"
        raise InvalidConfig(launch_finding("error", "caches-only", message, "leave `cache_..._only` out to plan it"))
    count, cut, steps = counted(planned, rows, terms)
    shape = shape_of(planned, terms.shape, packages)
    attention = attention_of(planned, terms.attention)
    planned = replace(planned, steps=steps)
    needs = Footprint(plan=planned, shape=shape, rows=cut, attention=attention)
    return Estimate(needs, count, terms, card, static=rows is None)


def counted(planned: Plan, rows: Lengths | None, terms: ForecastOptions) -> tuple[int | None, Lengths, int | None]:
    """How many rows the data set has, their lengths as they are trained on, and the optimizer steps."""
    count = terms.rows if terms.rows is not None else planned.rows
    if rows is None:
        return count, _SHORTEST, planned.steps
    count = rows.rows if count is None else count
    cut = footprint.rows_of(planned, rows)
    trained = footprint.rows_per_epoch(planned, rows, count)
    return count, cut, footprint.optimizer_steps(planned, trained, cut, override=terms.rows is not None)


def of_plan(planned: Plan, packages: Mapping[str, str], terms: ForecastOptions) -> Estimate:
    """The forecast for one plan. Raises InvalidConfig where shape or row lengths are not known."""
    if stopping := errors(planned.findings):
        raise InvalidConfig(stopping)
    card = _card(terms) if planned.gpus else Card()
    return _rung(planned, row_lengths(planned, packages, terms), terms, card, packages)


def with_forecast(prepared: Prepared) -> Prepared:
    """A start with its forecast, for the record, and with what that finds among the warnings.

    It stays as it is on the CPU, where the run is over, and where the model's shape or the row lengths are
    not known.
    """
    planned = prepared.plan
    chosen = prepared.start.devices
    if not planned.gpus or prepared.forecast is not None or prepared.decision.kind == "finished":
        return prepared
    packages = prepared.facts.trainer.packages
    terms = ForecastOptions()
    card = Card()
    unset = planned.values.get("attn_implementation") is None
    if unset and planned.stage.entry.best_attention and "flash-attn" not in packages:
        terms = ForecastOptions(attention="sdpa")
    if chosen is not None and chosen.slots:
        gpu = chosen.slots[0].gpu
        card = card_of(gpu.name, gpu.memory_mib / 1024 or None)
    try:
        rung = _rung(planned, row_lengths(planned, packages, terms), terms, card, packages)
    except (LaunchError, OSError):
        return prepared
    known = {finding.code for finding in prepared.findings}
    new = [one for one in rung.findings if one.code not in known]
    return replace(prepared, forecast=rung.record, warnings=(*prepared.warnings, *new))


def _card(terms: ForecastOptions) -> Card:
    present = devices.look(os.environ).present
    name = terms.gpu or (present[0].name if present else "")
    gib = terms.gpu_memory
    if gib is None and present and terms.gpu is None:
        gib = present[0].memory_mib / 1024
    return card_of(name, gib)


_ALIKE = ("model_name_or_path", "packing", "use_liger_kernel", "use_lora", "use_peft")


def _measured_speed(planned: Plan, card: str) -> tuple[float, str] | None:
    """What the newest like run on such GPUs did, for as many GPUs as are planned."""
    stage = planned.stage
    wanted = (stage.options.stage, stage.options.backend, planned.values.get("model_name_or_path"))
    for summary in reversed(rundir.summarize(rundir.known_runs())):
        if (summary.stage, summary.backend, summary.model) != wanted or card not in (summary.card or ""):
            continue
        folder = RunFolder(summary.path)
        manifest = rundir.read_manifest(folder)
        rate = Record(rundir.read_json(folder.verdict)).value("metrics", "tokens_per_second")
        # the stage may have another script
        is_torchrun = LAUNCHERS["torchrun"][0] in manifest.argv
        if (
            card in str([*manifest.cards, ""][0])
            and isinstance(rate, int | float)
            and manifest.gpus
            and is_torchrun == (stage.entry.launcher == "torchrun")
            and all(manifest.argument(name) == planned.values.get(name) for name in _ALIKE)
        ):
            count = manifest.gpus * (manifest.nodes or 1)
            source = f"{folder.path.name}: {rate:,.0f} tokens/s on {count} GPU(s)"
            return rate / count * planned.processes, source
    return None


_SHORTEST = Lengths(mean=1, deviation=0, longest=1, source="", counts=((1, 1),))


def _lengths_or_none(
    planned: Plan, packages: Mapping[str, str], terms: ForecastOptions, faults: list[Finding]
) -> Lengths | None:
    """The row lengths; without them batch and static memory can still be planned, unless `--fit` is given."""
    try:
        return row_lengths(planned, packages, terms)
    except InvalidConfig as error:
        if terms.fit or not planned.gpus:
            raise
        message = "how long the rows are is not known: memory is shown without activations, and no time"
        faults += [replace(one, severity="note", message=message) for one in error.findings]
        return None


def row_lengths(planned: Plan, packages: Mapping[str, str], terms: ForecastOptions) -> Lengths:
    """By `--row-tokens`, else of the tokenised data that the run would hit, else as a rehearsal saw them."""
    if terms.row_tokens is not None:
        return lengths.parse(terms.row_tokens)
    for folder in _tokenised(planned, packages):
        try:
            return lengths.of_dataset(folder, pairs=planned.stage.schema.pairs)
        except InvalidConfig:
            continue
    if terms.rehearsed_tokens is not None:
        rehearsed = lengths.parse(terms.rehearsed_tokens)
        return replace(rehearsed, source="the first rows, as a rehearsal saw them")
    place = planned.stage.config.origin(f"args.{planned.stage.entry.names.data}").place
    message = "how long the rows are is not known: the data set is in no cache that this run would hit"
    help = (
        "--row-tokens MEAN:MAX, in tokens a row, such as --row-tokens 290:1100; or run `launch "
        "rehearse` or `launch prepare` first"
    )
    raise InvalidConfig(launch_finding("error", "unknown-lengths", message, help, key="row_tokens", **place))


def _tokenised(planned: Plan, packages: Mapping[str, str]) -> Iterator[Path]:
    """What the run would hit: by upstream's own key, of TRL the entries of the folder, the newest first."""
    for one in keys.derive(planned, packages, lenient=True):
        if one.kind != "dataset":
            continue
        if planned.stage.backend.DATA_CACHE == "own":
            # one folder may hold sets of other lengths and templates too
            found = entries.hit(one.path, planned)
            yield from () if found is None else (found,)
            continue
        folder = folders.opened(one.path)
        kept = [] if folder is None else [one.path / name for name in folder.entries()]
        yield from sorted(kept, key=lambda path: -path.stat().st_mtime)
