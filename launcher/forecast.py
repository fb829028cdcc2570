"""`launch plan`: what a stage needs on so many GPUs - batch, steps, memory, time, money, disk.

Nothing is guessed: a number that cannot be had is null, and what memory is made of says where each part
comes from.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import (
    budget,
    cache_folders,
    caches,
    devices,
    disk,
    entries,
    lengths,
    memory,
    plan,
    rundir,
)
from launcher.arguments import placed
from launcher.backends import trl_resolved
from launcher.budget import Bill, Fit, Speed, Tokens, Variance
from launcher.disk import Saved
from launcher.errors import Finding, InvalidConfig, UsageError, brief, errors, usage
from launcher.footprint import (
    ATTENTIONS,
    Footprint,
    Way,
    attention_of,
    optimizer_steps,
    packed_row,
    rows_of,
    shape_of,
    trained_rows,
    turned,
    unpacked,
    ways,
)  # fmt: skip
from launcher.lengths import Lengths
from launcher.machine import Gpu
from launcher.moments import GIB, KINDS, Memory, Moment
from launcher.packed_rows import Packed, fuller
from launcher.plan import Plan
from launcher.preparation import Request, ask
from launcher.setups import Setup
from launcher.sizes import sized

MARGIN = 0.08
"""The share of a card that is left to the allocator's gaps, NCCL and the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is not in the stage file. `gpu_memory` in GiB, `price` for one GPU and hour.

    `shape` names a model whose config stands for that of one that is not here yet.
    """

    row_tokens: str | None = None
    rows: int | None = None
    gpu_memory: float | None = None
    gpu: str | None = None
    price: float | None = None
    tokens_per_second: float | None = None
    mfu: float = budget.STATED_MFU
    attention: str | None = None
    fit: bool = False
    shape: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The forecast for one count of GPUs; None is what cannot be known.

    `gpu_memory` is a card's in GiB, on the CPU the host's; `memory` is there what is held for sure, and no
    peak. `smallest` is the memory of one row a device where no split of the batch fits.
    """

    plan: Plan
    rows: int | None
    steps: int | None
    memory: Memory
    gpu_memory: float | None
    tokens: Tokens
    speed: Speed | None
    bill: Bill
    saved: Saved
    best: Fit | None
    smallest: Memory | None
    findings: tuple[Finding, ...]

    @property
    def spare(self) -> float | None:
        """GiB that are left, below 0 what is missing."""
        if self.gpu_memory is None:
            return None
        if not self.plan.gpus:
            missing = self.gpu_memory - self.memory.peak
            return missing if missing < 0 else None
        return memory.fits(self.memory, self.gpu_memory, margin=MARGIN)[1]

    def as_json(self, *, why: bool) -> dict[str, Any]:
        """One entry of the plan's JSON contract."""
        spare, speed = self.spare, self.speed
        told = {
            **self.plan.as_json(),
            "rows": self.rows,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens.real),
            "padding_share": round(self.tokens.waste, 3),
            "memory_gib": self.memory.as_json() if self.plan.gpus else _at_least(self.memory),
            "fits": None if spare is None else spare >= 0,
            "spare_gib": None if spare is None else round(spare, 2),
            "tokens_per_second": None if speed is None else round(speed.tokens),
            "speed_source": None if speed is None else speed.source,
            "hours": None if self.bill.hours is None else round(self.bill.hours, 2),
            "cost": None if self.bill.cost is None else round(self.bill.cost, 2),
            "disk_gib": {
                "model": round(self.saved.final / GIB, 2),
                "checkpoint": round(self.saved.checkpoint / GIB, 2),
                "most": round(self.saved.most / GIB, 2),
            },
            "fit": None if self.best is None else {
                "per_device": self.best.per_device, "accumulation": self.best.accumulation,
                "peak_gib": round(self.best.memory.peak, 2), "spare_gib": round(self.best.spare, 2),
            },
        }  # fmt: skip
        return {**told, "why": self.memory.why()} if why else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The counts that can be planned, where the numbers come from, and what changes between them."""

    rungs: tuple[Rung, ...]
    shape: str
    lengths: str
    attention: str
    variances: tuple[Variance, ...]
    findings: tuple[Finding, ...]

    def as_json(self, *, why: bool) -> dict[str, Any]:
        """`data` of `launch plan`."""
        return {
            "gpus": [rung.as_json(why=why) for rung in self.rungs],
            "sources": {"shape": self.shape, "rows": self.lengths, "attention": self.attention},
            "varies": [one.as_json() for one in self.variances],
        }

    def lines(self, *, why: bool) -> list[str]:
        """The same for people."""
        shown = [_row(rung) for rung in self.rungs]
        widths = [max(len(row[i]) for row in (_HEAD, *shown)) for i in range(len(_HEAD))]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (_HEAD, *shown)
        ]
        parts = [line for rung in self.rungs for line in _parts(rung, why=why)]
        sources = [f"shape: {self.shape}", f"rows: {self.lengths}", f"attention: {self.attention}"]
        sources += [f"speed: {one}" for one in dict.fromkeys(
            rung.speed.source for rung in self.rungs if rung.speed is not None
        )]  # fmt: skip
        varies = [f"varies: {v.message} ({', '.join(v.where)})" for v in self.variances]
        return [*table, "", *parts, "", *sources, *varies]


_HEAD = (
    "GPUs", "per device", "accumulation", "global", "steps", "tokens/step", "peak GiB", "fits",
    "hours", "cost", "disk GiB",
)  # fmt: skip


def _at_least(held: Memory) -> dict[str, Any]:
    told = held.as_json()
    kinds = {kind: told[kind] if kind in _HELD else None for kind in KINDS}
    return {"peak": None, "at_least": told["peak"], **kinds, "moment": told["moment"]}


def _row(rung: Rung) -> tuple[str, ...]:
    spare = rung.spare
    fits = (
        "-"
        if spare is None
        else f"yes, {spare:.1f} left"
        if spare >= 0
        else f"no, {-spare:.1f} over"
    )
    hours, cost = rung.bill.hours, rung.bill.cost
    count, peak = rung.plan.gpus * rung.plan.nodes, f"{rung.memory.peak:.1f}"
    return (
        f"{count or 'CPU'}", f"{rung.plan.per_device}", f"{rung.plan.accumulation}",
        f"{rung.plan.global_batch}", "-" if rung.steps is None else f"{rung.steps:,}",
        f"{rung.tokens.real:,.0f}", peak if count else f">= {peak}", fits,
        "-" if hours is None else f"{hours:.2f}", "-" if cost is None else f"{cost:.2f}",
        f"{rung.saved.most / GIB:.1f}",
    )  # fmt: skip


def _parts(rung: Rung, *, why: bool) -> Iterator[str]:
    fullest = rung.memory.fullest
    kinds = ((kind, rung.memory.of(kind)) for kind in KINDS)
    told = ", ".join(f"{kind} {gib:.1f}" for kind, gib in kinds if gib >= 0.05)
    least = "" if rung.plan.gpus else "at least "
    yield f"{_which(rung.plan)}{least}{rung.memory.peak:.1f} GiB at the {fullest.name}: {told or 'nothing'}"
    if rung.best is not None and rung.best.per_device != rung.plan.per_device:
        yield (
            f"  --fit: per device {rung.best.per_device}, accumulation {rung.best.accumulation}"
            f"{unpacked(rung.plan, rung.best.per_device)[1]}: {rung.best.memory.peak:.1f} GiB"
        )
    elif rung.best is not None:
        yield f"  --fit: per device {rung.best.per_device} is the largest that fits"
    if why:
        for moment in sorted(rung.memory.moments, key=lambda one: -one.gib):
            yield f"  {moment.name}: {moment.gib:.2f} GiB"
            for part in sorted(moment.parts, key=lambda one: -one.gib):
                where = f"  [{part.source}]" if part.source else ""
                yield f"    {part.gib:8.2f}  {part.kind:13} {part.name}: {part.formula}{where}"
        yield f"  tokens a step: {rung.tokens.formula}"
        yield f"  time: {rung.bill.formula}"
        yield f"  disk: {rung.saved.formula}"


def counts(text: str) -> list[int]:
    """`1,2,8` as numbers. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        raise usage("bad-gpus", f"`{text}` is no list of counts", "--gpus 1,2,8")
    return [int(word) for word in words]


def make(request: Request, gpus: Sequence[int], terms: Terms) -> Forecast:
    """Plan a stage file for each count of GPUs; those that it cannot be planned for are among the findings.

    Raises InvalidConfig where it cannot be for any, UsageError or NotReady.
    """
    if terms.attention not in {None, *ATTENTIONS}:
        known = ", ".join(ATTENTIONS)
        raise usage("bad-attention", f"`{terms.attention}` is no attention", f"one of {known}")
    for code, value in (
        ("bad-gpu-memory", terms.gpu_memory), ("bad-price", terms.price),
        ("bad-tokens-per-second", terms.tokens_per_second),
    ):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            name = code.removeprefix("bad-")
            raise usage(code, f"--{name} is more than 0, not {value:g}")
    if terms.tokens_per_second is not None and len(set(gpus)) > 1:
        raise usage(
            "speed-of-several", "--tokens-per-second is the speed of all GPUs together: the same cannot "
            f"hold for {', '.join(map(str, gpus))} GPUs",
            "plan the count that it was measured on, or give --gpu H100 in its place",
        )  # fmt: skip
    if terms.price is not None and not all(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    card = _card(terms)
    if terms.fit and not any(gpus):
        raise usage("fit-without-memory", f"how much fits is not known: {_UNFORESEEN}")
    if terms.fit and card.gib is None:
        raise _unfitted(terms)
    asked = ask(replace(request, gpus=max(gpus)), running=False)
    rungs: list[Rung] = []
    lost: list[Finding] = []
    seen: Lengths | None = None
    for count in gpus:
        try:
            planned = plan.make(
                asked.stage, gpus=count, nodes=request.nodes, output=Path("model"), rows=terms.rows
            )
        except InvalidConfig as error:
            lost += error.findings
            continue
        stopping = errors(planned.findings)
        if stopping:
            lost += stopping
            continue
        try:
            seen = seen or row_lengths(planned, asked.trainer.packages, terms)
            here = card if count else _Card("", _host_gib())
            rungs.append(_rung(planned, seen, terms, here, asked.trainer.packages))
        except InvalidConfig as error:
            lost += error.findings
    if seen is None or not rungs:
        raise InvalidConfig(list(dict.fromkeys(lost)))
    schema = asked.stage.schema
    several = len(gpus) > 1
    return Forecast(
        rungs=tuple(rungs), shape=shape_of(rungs[0].plan, terms.shape).source, lengths=seen.source,
        attention=attention_of(max(rungs, key=lambda one: one.plan.gpus).plan, terms.attention),
        findings=(
            *dict.fromkeys(lost), *_split(rungs), *(f for rung in rungs for f in rung.findings),
            *_unfit(rungs, terms), *_untrained(rungs), *_unpriced(rungs, terms),
            *_uncompiled(rungs[0].plan),
        ),
        variances=budget.VARIANCES.get((schema.backend, schema.key), ()) if several else (),
    )  # fmt: skip


# what is set for any number of GPUs, and what to do at the start
_ASIDE = frozenset({"derived", "no-probe", "several-nodes"})


def _split(rungs: Sequence[Rung]) -> Iterator[Finding]:
    """What the plans themselves say: once where all counts agree, else with the count."""
    said = [tuple(f for f in rung.plan.findings if f.code not in _ASIDE) for rung in rungs]
    for rung, findings in zip(rungs, said, strict=True):
        for one in findings:
            if all(one in other for other in said):
                if rung is rungs[0]:
                    yield one
            else:
                yield replace(one, message=f"{_which(rung.plan)}{one.message}")


def _which(planned: Plan) -> str:
    return f"{planned.gpus * planned.nodes} GPU(s): " if planned.gpus else "CPU: "


def _unfit(rungs: Sequence[Rung], terms: Terms) -> Iterator[Finding]:
    """Where `--fit` finds nothing: how much a single row a device takes."""
    for rung in rungs:
        if not terms.fit or rung.smallest is None:
            continue
        yield Finding(
            severity="note", layer="launch", code="nothing-fits", key="batch.per_device",
            message=f"{_which(rung.plan)}--fit: no split of the batch fits; {rung.smallest.peak:.1f} GiB "
            "with one row a device",
        )  # fmt: skip


def _untrained(rungs: Sequence[Rung]) -> Iterator[Finding]:
    """Why there is not a single step."""
    stage, values = rungs[0].plan.stage, rungs[0].plan.values
    only, name = plan.caches_only(stage, values), stage.entry.names.max_steps
    if only is not None:
        key = "cache_dataset_only" if only == "data set" else "cache_logprobs_only"
        does = "tokenised" if only == "data set" else "put through the reference"
        yield Finding(
            severity="note", layer="launch", code="caches-only", key=f"args.{key}",
            message=f"`{key}`: the rows are {does}, and nothing is trained or saved",
        )  # fmt: skip
    elif plan.limited(stage, values) == 0:
        yield Finding(
            severity="warning", layer="run", code="no-steps", key=f"args.{name}",
            message=f"`{name}: {values[name]}`: no step is trained, and the model is saved as it was",
            help="leave it out for whole epochs",
        )  # fmt: skip
    else:
        for rung in rungs:
            if rung.steps == 0:
                yield Finding(
                    severity="warning", layer="run", code="no-steps", key="batch.global",
                    message=f"{_which(rung.plan)}by these lengths {rung.rows or 0:,} rows are less than one "
                    "step, and what is not full is left out",
                    help="fewer GPUs, a smaller batch, or more rows",
                )  # fmt: skip


def _unpriced(rungs: Sequence[Rung], terms: Terms) -> Iterator[Finding]:
    """Why a price came to no cost."""
    unknown = [rung for rung in rungs if rung.bill.cost is None]
    if terms.price is None or not unknown:
        return
    counts = ", ".join(str(rung.plan.gpus * rung.plan.nodes) for rung in unknown)
    yield Finding(
        severity="note", layer="launch", code="unknown-cost",
        message=f"{counts} GPU(s): no cost: {unknown[0].bill.formula}",
    )  # fmt: skip


def _uncompiled(planned: Plan) -> Iterator[Finding]:
    """What the counts leave out: of dpo.py the compiler's budget is described, of TRL nothing."""
    if planned.stage.options.backend != "trl" or not trl_resolved.compiled(planned.values):
        return
    yield Finding(
        severity="note", layer="launch", code="planned-uncompiled", key="args.torch_compile",
        message="memory and time are those of the model without torch.compile: what it fuses, and so "
        "does not keep, is not described",
    )  # fmt: skip


def of_plan(
    planned: Plan, packages: Mapping[str, str], *, gpu: Gpu | None, attention: str | None = None
) -> Rung:
    """The forecast for a plan as it is about to run, on GPUs of this kind; None where that is not known.

    Raises InvalidConfig or UsageError where the model's shape or the row lengths are not known.
    """
    terms = Terms(attention=attention)
    card = _Card("", None) if gpu is None else _Card(gpu.name, gpu.memory_mib / 1024 or None)
    return _rung(planned, row_lengths(planned, packages, terms), terms, card, packages)


@dataclass(frozen=True, slots=True)
class _Card:
    """The GPU that is planned for: its name, and its memory in GiB, where known."""

    name: str
    gib: float | None


def _unfitted(terms: Terms) -> UsageError:
    """`--fit` without the size to fit into: a card's name does not tell it, most come in several."""
    said = "no GPU is here, and none is named"
    if terms.gpu is not None:
        said = f"`--gpu {brief(terms.gpu)}` names the card, and not how much memory it has"
    help = "add its memory in GiB, `--gpu-memory 80` for a card of 80 GB"
    return usage("fit-without-memory", f"how much fits is not known: {said}", help)


def _card(terms: Terms) -> _Card:
    present = devices.look(os.environ).present
    name = terms.gpu or (present[0].name if present else "")
    gib = terms.gpu_memory
    if gib is None and present and terms.gpu is None:
        gib = present[0].memory_mib / 1024
    return _Card(name, gib)


def _host_gib() -> float | None:
    """This machine's memory in GiB, or what of it its container (cgroup v2) may take; None if unknown."""
    with suppress(OSError, ValueError):
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        with suppress(OSError, ValueError):
            # `max` where there is no limit
            whole = min(whole, int(_LIMIT.read_text(encoding="ascii")) / GIB)
        return whole
    return None


_LIMIT = Path("/sys/fs/cgroup/memory.max")


def _rung(
    planned: Plan, rows: Lengths, terms: Terms, card: _Card, packages: Mapping[str, str]
) -> Rung:
    counted = terms.rows if terms.rows is not None else planned.rows
    counted = rows.rows if counted is None else counted
    trained = trained_rows(planned, rows, counted)
    cut = rows_of(planned, rows)
    planned = replace(
        planned, steps=optimizer_steps(planned, trained, cut, told=terms.rows is not None)
    )
    row = packed_row(planned, cut)
    footprint = Footprint(
        plan=planned,
        shape=shape_of(planned, terms.shape, packages),
        rows=cut,
        attention=attention_of(planned, terms.attention),
    )
    setup = footprint.setup()
    reached = functools.partial(
        _reached, room=None if card.gib is None else card.gib * (1 - MARGIN)
    )
    found = reached(planned, setup)
    tokens = budget.tokens_per_step(
        cut, per_device=planned.per_device, accumulation=planned.accumulation,
        processes=planned.processes, packed=footprint.packed, dpo=footprint.dpo,
    ) if row is None else budget.tokens_of_rows(row, planned.processes)  # fmt: skip
    speed = _speed(footprint, tokens, terms, card)
    bill = _bill(footprint, tokens, speed, counted, terms.price)
    best = smallest = None
    only = plan.caches_only(planned.stage, planned.values)
    if planned.gpus and card.gib is not None and only != "data set":
        best = budget.fit(
            footprint.setup, total=planned.global_batch, processes=planned.processes, gib=card.gib,
            margin=MARGIN, memory_of=functools.partial(_reached, planned),
        )  # fmt: skip
        if best is None:
            # of one row a device, the global batch kept
            smallest = reached(
                planned, footprint.setup(1, planned.global_batch // planned.processes)
            )
    said = (*_said(footprint, found, best, card), *_wasted(planned, cut, row))
    return Rung(
        plan=planned, rows=counted, steps=planned.steps, memory=found, gpu_memory=card.gib,
        tokens=tokens, speed=speed, bill=bill, best=best if terms.fit else None, smallest=smallest,
        findings=said, saved=_saved(planned, setup),
    )  # fmt: skip


def _reached(planned: Plan, setup: Setup, room: float | None = None) -> Memory:
    """The moments that the run comes to with `room` GiB: without a step, what lies before the first one.

    On the CPU only what is held for sure of each: not what its operators and allocator take.
    """
    whole = memory.estimate(setup)
    if not planned.gpus:
        kept = (m for m in whole.moments if m.name.startswith((*_BEFORE, "optimizer's step")))
        whole = Memory(moments=tuple(
            replace(m, parts=tuple(p for p in m.parts if p.kind in _HELD)) for m in kept
        ))  # fmt: skip
    whole = whole if room is None else whole.within(room)
    if plan.limited(planned.stage, planned.values) != 0:
        return whole
    if plan.caches_only(planned.stage, planned.values) == "data set":
        return Memory(moments=(Moment(name="tokenising", parts=()),))
    return Memory(moments=tuple(m for m in whole.moments if m.name.startswith(_BEFORE)))


_BEFORE = ("start", "reference pass")
_HELD = ("weights", "gradients", "optimizer")
_UNFORESEEN = "what activations, operators and Python itself take on the CPU is not described"


def _bill(
    footprint: Footprint, tokens: Tokens, speed: Speed | None, rows: int | None, price: float | None
) -> Bill:
    planned = footprint.plan
    only = plan.caches_only(planned.stage, planned.values)
    referred = _reference_rows(footprint, rows)
    unknown = None
    if only == "data set":
        unknown = "the data set is only tokenised: how long that takes is not known"
    elif speed is None:
        named = "--gpu H100, or " if planned.gpus else ""
        unknown = f"the speed is not known: {named}--tokens-per-second"
    elif only is not None and referred is None:
        unknown = "the rows are not known: --rows"
    if speed is None or unknown is not None:
        return Bill(hours=None, cost=None, formula=unknown or "")
    return budget.bill(
        steps=planned.steps, tokens=tokens, speed=speed, devices=planned.processes, price=price,
        reference_rows=referred, per_step_rows=_referred(planned, footprint.rows),
    )  # fmt: skip


def _saved(planned: Plan, setup: Setup) -> Saved:
    found = None
    if plan.caches_only(planned.stage, planned.values) is None:
        found = disk.saved(planned, setup.shape.parameters, setup)
    none = "neither checkpoints nor a model"
    return found or Saved(checkpoint=0, final=0, times=0, limit=None, formula=none)


def _referred(planned: Plan, rows: Lengths) -> int:
    """Rows of the data set that one pass of all ranks takes through the reference."""
    row = packed_row(replace(planned, per_device=4 * planned.per_device, accumulation=1), rows)
    return planned.global_batch if row is None else max(1, round(row.pairs * planned.processes))


def _wasted(planned: Plan, rows: Lengths, row: Packed | None) -> Iterator[Finding]:
    """What packed rows leave empty, and which batch would fill them."""
    if row is None:
        return
    pairs = planned.per_device * planned.accumulation
    better = fuller(rows, pairs=pairs, limit=row.positions // 2)
    for one in budget.half_wasted(row, better, pairs=pairs, key="batch.per_device"):
        yield placed(planned.stage.config, one)


def _reference_rows(footprint: Footprint, rows: int | None) -> int | None:
    """Rows that go through the reference: all of them beforehand, or those of every step."""
    planned, reference = footprint.plan, footprint.setup().reference
    if not footprint.dpo:
        return None
    if reference == "cache" or planned.values.get("precompute_ref_log_probs"):
        return rows
    return planned.steps * planned.global_batch if reference and planned.steps else None


def _said(
    footprint: Footprint, found: Memory, best: Fit | None, card: _Card
) -> tuple[Finding, ...]:
    planned = footprint.plan
    if not planned.gpus:
        return _said_of_the_host(planned, found, card.gib)
    if card.gib is None:
        return ()
    origin = planned.stage.config.origin("batch.per_device")
    inside = memory.fits(found, card.gib, margin=MARGIN)[0]
    told = (
        *budget.too_large(
            found, gib=card.gib, margin=MARGIN,
            help=None if inside else _instead(footprint, found, card.gib * (1 - MARGIN)),
        ),
        *(() if plan.limited(planned.stage, planned.values) == 0 else budget.half_empty(
            found, best, per_device=planned.per_device, accumulation=planned.accumulation,
            gib=card.gib, key="batch.per_device",
        )),
    )  # fmt: skip
    which = _which(planned)
    return tuple(replace(one, message=which + one.message, **origin.place) for one in told)


def _said_of_the_host(planned: Plan, held: Memory, gib: float | None) -> tuple[Finding, ...]:
    """How far the memory of the CPU is foreseen, and whether already that is more than the host has."""
    if not held.peak:
        return ()
    which, of = _which(planned), "" if gib is None else f" of the host's {gib:.1f} GiB"
    size = sized(held.peak * GIB)
    if gib is not None and held.peak > gib:
        return (Finding(
            severity="warning", layer="launch", code="out-of-memory",
            message=f"{which}weights, gradients and optimizer alone take {size}{of}",
            help="a smaller model, or GPUs", **planned.stage.config.origin("args").place,
        ),)  # fmt: skip
    return (Finding(
        severity="note", layer="launch", code="unknown-memory",
        message=f"{which}weights, gradients and optimizer take {size}{of}; {_UNFORESEEN}",
    ),)  # fmt: skip


def _instead(footprint: Footprint, now: Memory, usable: float) -> str:
    """What of this set-up can be turned so that it fits, by the same estimate; else what comes nearest."""

    def peak_of(chosen: Sequence[Way]) -> float | None:
        other = turned(footprint, chosen)
        if other is None:
            return None
        try:
            return _reached(other.plan, other.setup(), usable).peak
        except InvalidConfig:
            return None

    found = budget.mends(ways(footprint), peak_of, now=now.peak, usable=usable)
    told = [
        f"{' with '.join(way.words for way in chosen)} ({peak:.1f} GiB)" for chosen, peak in found
    ]
    if found and found[0][1] <= usable:
        return f"this fits: {'; or '.join(told[:3])}"
    shorter = ", shorter rows" if max(KINDS, key=now.of) in ("logits", "activations") else ""
    rest = f"a card with more memory{shorter}, or a smaller model"
    if not found:
        return f"nothing that can be turned takes less: {rest}"
    return f"nothing that can be turned fits, the nearest is {told[0]}: {rest}"


def _speed(footprint: Footprint, tokens: Tokens, terms: Terms, card: _Card) -> Speed | None:
    planned = footprint.plan
    if terms.tokens_per_second is not None:
        return Speed(tokens=terms.tokens_per_second, source="--tokens-per-second", measured=True)
    if (seen := measured(planned, card.name)) is not None:
        return seen
    if not card.name:
        return None
    return budget.stated_speed(
        footprint.shape, tokens, _width(footprint), device=card.name, devices=planned.processes,
        mfu=terms.mfu, adapters=footprint.adapters is not None, dpo=footprint.dpo,
    )  # fmt: skip


def _width(footprint: Footprint) -> float:
    """Positions that attention goes over: dpo.py's packed rows are one sequence each."""
    row = packed_row(footprint.plan, footprint.rows)
    return footprint.rows.mean if row is None else float(row.positions)


_TORCHRUN = "torch.distributed.run"
_ALIKE = ("model_name_or_path", "packing", "use_liger_kernel", "use_lora", "use_peft")


def measured(planned: Plan, card: str) -> Speed | None:
    """What the newest like run on such GPUs did, for as many GPUs as are planned."""
    if not card:
        return None
    for folder in reversed(rundir.known_runs()):
        head = rundir.read_head(folder)
        options = planned.stage.options
        if (head.get("stage"), head.get("backend")) != (options.stage, options.backend):
            continue
        told = rundir.read_manifest(folder)
        cards = (told.get("machine") or {}).get("gpus") or [""]
        figures = rundir.read_json(folder.verdict).get("metrics") or {}
        rate, was = figures.get("tokens_per_second"), told.get("plan") or {}
        if card not in str(cards[0]) or not isinstance(rate, int | float) or not was.get("gpus"):
            continue
        if (_TORCHRUN in (told.get("argv") or ())) != planned.stage.entry.torchrun:
            # the other script of the stage
            continue
        args = told.get("args") or {}
        if all(_same(args.get(name), planned.values.get(name)) for name in _ALIKE):
            count = was["gpus"] * was.get("nodes", 1)
            source = f"{folder.path.name}: {rate:,.0f} tokens/s on {count} GPU(s)"
            return Speed(tokens=rate / count * planned.processes, source=source, measured=True)
    return None


def _same(told: object, value: object) -> bool:
    return (told.get("value") if isinstance(told, Mapping) else None) == value


# --- row lengths ----------------------------------------------------------------------------------


def row_lengths(planned: Plan, packages: Mapping[str, str], terms: Terms) -> Lengths:
    """By `--row-tokens`, else of the tokenised dataset that the run would hit, else of local rows."""
    if terms.row_tokens is not None:
        return lengths.parse(terms.row_tokens)
    dpo = planned.stage.options.stage == "dpo"
    columns = ("chosen_input_ids", "rejected_input_ids") if dpo else ("input_ids",)
    for folder in _tokenised(planned, packages):
        try:
            return lengths.of_dataset(folder, columns)
        except InvalidConfig:
            continue
    local, tokenizer = _local(planned)
    if local is not None and tokenizer is not None:
        return lengths.of_texts(local, tokenizer)
    origin = planned.stage.config.origin(f"args.{planned.stage.entry.names.data}")
    raise InvalidConfig(
        Finding(
            severity="error", layer="launch", code="unknown-lengths", key="row_tokens",
            message="how long the rows are is not known: the data set is neither in a cache that this run "
            "would hit nor a local .jsonl with the tokenizer beside the model",
            help="--row-tokens MEAN:MAX, in tokens a row, such as --row-tokens 290:1100",
            **origin.place,
        )
    )  # fmt: skip


def _tokenised(planned: Plan, packages: Mapping[str, str]) -> Iterator[Path]:
    """What the run would hit: by upstream's own key, of TRL the entries of the folder, the newest first."""
    for one in caches.derive(planned, packages, running=False):
        if one.kind != "dataset":
            continue
        if planned.stage.options.backend == "open_instruct":
            # one folder may hold sets of other lengths and templates too
            found = entries.hit(one.path, planned, os.environ)
            yield from () if found is None else (found,)
            continue
        folder = cache_folders.opened(one.path)
        kept = [] if folder is None else [one.path / name for name in folder.entries()]
        yield from sorted(kept, key=lambda path: -path.stat().st_mtime)


def _local(planned: Plan) -> tuple[Path | None, Path | None]:
    """The first local file of rows, and the model's own tokenizer."""
    values, names = planned.values, planned.stage.entry.names
    listed = values.get(names.data)
    named = [str(one) for one in listed[::2]] if isinstance(listed, list) else [str(listed)]
    files = [Path(name) for name in named if name.endswith(".jsonl")]
    files += [
        path
        for name in named
        if Path(name).is_dir()
        for path in sorted(Path(name).glob("train*.jsonl"))
    ]
    model = values.get("tokenizer_name_or_path") or values.get(names.model)
    tokenizer = Path(str(model)) / "tokenizer.json"
    local = next((path for path in files if path.is_file()), None)
    return local, tokenizer if tokenizer.is_file() else None
