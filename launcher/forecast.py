"""`launch plan`: what a stage needs on so many GPUs - batch, steps, memory, time, money, disk.

Nothing is guessed: a number that cannot be had is null, and what memory is made of says where each part
comes from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
from launcher.budget import Bill, Fit, Speed, Tokens
from launcher.cards import Card, card_of
from launcher.disk import Saved
from launcher.errors import Finding, InvalidConfig, LaunchError, UsageError, brief, errors, usage
from launcher.footprint import (
    ATTENTIONS,
    Footprint,
    attention_of,
    mends,
    optimizer_steps,
    packed_row,
    rows_of,
    shape_of,
    trained_rows,
    unpacked,
)
from launcher.lengths import Lengths
from launcher.machine import Gpu
from launcher.moments import GIB, KINDS, Memory, Moment
from launcher.packed_rows import Packed, fuller
from launcher.plan import Plan
from launcher.preparation import Prepared, Request, ask
from launcher.setups import Setup


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
    attention: str | None = None
    fit: bool = False
    shape: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The forecast for one count of GPUs; None is what cannot be known.

    `gpu_memory` is a card's in GiB. `smallest` is the memory of one row a device where no split of the
    batch fits. On the CPU no memory is planned.
    """

    plan: Plan
    rows: int | None
    steps: int | None
    memory: Memory | None
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
        if self.gpu_memory is None or self.memory is None:
            return None
        return memory.fits(self.memory, self.gpu_memory)[1]

    def as_json(self, *, why: bool) -> dict[str, Any]:
        """One entry of the plan's JSON contract."""
        spare, speed = self.spare, self.speed
        told = {
            **self.plan.as_json(),
            "rows": self.rows,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens.real),
            "padding_share": round(self.tokens.waste, 3),
            "memory_gib": None if self.memory is None else self.memory.as_json(),
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
        return {**told, "why": self.memory.why()} if why and self.memory is not None else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The counts that can be planned, and where the numbers come from."""

    rungs: tuple[Rung, ...]
    shape: str
    lengths: str
    attention: str
    findings: tuple[Finding, ...]

    def as_json(self, *, why: bool) -> dict[str, Any]:
        """`data` of `launch plan`."""
        return {
            "gpus": [rung.as_json(why=why) for rung in self.rungs],
            "sources": {"shape": self.shape, "rows": self.lengths, "attention": self.attention},
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
        return [*table, "", *parts, "", *sources]


_HEAD = (
    "GPUs", "per device", "accumulation", "global", "steps", "tokens/step", "peak GiB", "fits",
    "hours", "cost", "disk GiB",
)  # fmt: skip


def _row(rung: Rung) -> tuple[str, ...]:
    spare, hours, cost = rung.spare, rung.bill.hours, rung.bill.cost
    count = rung.plan.gpus * rung.plan.nodes
    fits = "-"
    if spare is not None:
        fits = f"yes, {spare:.1f} left" if spare >= 0 else f"no, {-spare:.1f} over"
    return (
        f"{count or 'CPU'}", f"{rung.plan.per_device}", f"{rung.plan.accumulation}",
        f"{rung.plan.global_batch}", "-" if rung.steps is None else f"{rung.steps:,}",
        f"{rung.tokens.real:,.0f}", "-" if rung.memory is None else f"{rung.memory.peak:.1f}", fits,
        "-" if hours is None else f"{hours:.2f}", "-" if cost is None else f"{cost:.2f}",
        f"{rung.saved.most / GIB:.1f}",
    )  # fmt: skip


def _parts(rung: Rung, *, why: bool) -> Iterator[str]:
    if rung.memory is not None:
        kinds = ((kind, rung.memory.of(kind)) for kind in KINDS)
        shares = ", ".join(f"{kind} {gib:.1f}" for kind, gib in kinds if gib >= 0.05)
        peak = f"{rung.memory.peak:.1f} GiB at the {rung.memory.fullest.name}"
        yield f"{_which(rung.plan)}{peak}: {shares or 'nothing'}"
    if rung.best is not None and rung.best.per_device != rung.plan.per_device:
        yield (
            f"  --fit: per device {rung.best.per_device}, accumulation {rung.best.accumulation}"
            f"{unpacked(rung.plan, rung.best.per_device)[1]}: {rung.best.memory.peak:.1f} GiB"
        )
    elif rung.best is not None:
        yield f"  --fit: per device {rung.best.per_device} is the largest that fits"
    if why:
        moments = () if rung.memory is None else rung.memory.moments
        for moment in sorted(moments, key=lambda one: -one.gib):
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
        raise usage("fit-without-memory", "memory is planned for GPUs, not for the CPU")
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
            here = card if count else Card()
            rungs.append(_rung(planned, seen, terms, here, asked.trainer.packages))
        except InvalidConfig as error:
            lost += error.findings
    if seen is None or not rungs:
        raise InvalidConfig(list(dict.fromkeys(lost)))
    return Forecast(
        rungs=tuple(rungs), shape=shape_of(rungs[0].plan, terms.shape).source, lengths=seen.source,
        attention=attention_of(max(rungs, key=lambda one: one.plan.gpus).plan, terms.attention),
        findings=(
            *dict.fromkeys(lost), *_split(rungs), *(f for rung in rungs for f in rung.findings),
            *_unfit(rungs, terms), *_untrained(rungs), *_unpriced(rungs, terms),
        ),
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


def of_plan(
    planned: Plan, packages: Mapping[str, str], *, gpu: Gpu | None, attention: str | None = None
) -> Rung:
    """The forecast for a plan as it is about to run, on GPUs of this kind; None where that is not known.

    Raises InvalidConfig or UsageError where the model's shape or the row lengths are not known.
    """
    terms = Terms(attention=attention)
    card = Card() if gpu is None else card_of(gpu.name, gpu.memory_mib / 1024 or None)
    return _rung(planned, row_lengths(planned, packages, terms), terms, card, packages)


def with_forecast(prepared: Prepared) -> Prepared:
    """A start with its forecast, for the record, and with what that finds among the warnings.

    It stays as it is on the CPU, where the run is over, and where the model's shape or the row lengths are
    not known.
    """
    planned, chosen = prepared.plan, prepared.devices
    known_already = prepared.forecast is not None or prepared.decision.kind == "finished"
    if not planned.gpus or known_already:
        return prepared
    packages, attention = prepared.trainer.packages, None
    unset = planned.values.get("attn_implementation") is None
    if unset and planned.stage.options.backend == "open_instruct" and "flash-attn" not in packages:
        # it takes the best that is installed
        attention = "sdpa"
    try:
        rung = of_plan(
            planned, packages, attention=attention,
            gpu=chosen.slots[0].gpu if chosen is not None and chosen.slots else None,
        )  # fmt: skip
    except (LaunchError, OSError):
        return prepared
    known = {finding.code for finding in prepared.findings}
    new = [one for one in rung.findings if one.code not in known]
    return replace(prepared, forecast=rung.as_json(why=False), warnings=(*prepared.warnings, *new))


def _unfitted(terms: Terms) -> UsageError:
    """`--fit` without the size to fit into: a card's name does not tell it, most come in several."""
    said = "no GPU is here, and none is named"
    if terms.gpu is not None:
        said = f"`--gpu {brief(terms.gpu)}` names the card, and not how much memory it has"
    help = "add its memory in GiB, `--gpu-memory 80` for a card of 80 GB"
    return usage("fit-without-memory", f"how much fits is not known: {said}", help)


def _card(terms: Terms) -> Card:
    present = devices.look(os.environ).present
    name = terms.gpu or (present[0].name if present else "")
    gib = terms.gpu_memory
    if gib is None and present and terms.gpu is None:
        gib = present[0].memory_mib / 1024
    return card_of(name, gib)


def _rung(
    planned: Plan, rows: Lengths, terms: Terms, card: Card, packages: Mapping[str, str]
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
    found = _memory_of(planned, setup, card) if planned.gpus else None
    tokens = budget.tokens_per_step(footprint)
    speed = _speed(footprint, tokens, terms, card)
    bill = _bill(footprint, tokens, speed, counted, terms.price)
    best = smallest = None
    only = plan.caches_only(planned.stage, planned.values)
    if found is not None and card.gib is not None and only != "data set":
        best = budget.fit(
            footprint.setup, total=planned.global_batch, processes=planned.processes, gib=card.gib,
            memory_of=lambda setup: _memory_of(planned, setup, card),
        )  # fmt: skip
        if best is None:
            # of one row a device, the global batch kept
            one = footprint.setup(1, planned.global_batch // planned.processes)
            smallest = _memory_of(planned, one, card)
    findings = (
        *_memory_findings(footprint, found, best, card),
        *_waste_findings(planned, cut, row),
    )
    return Rung(
        plan=planned, rows=counted, steps=planned.steps, memory=found, gpu_memory=card.gib,
        tokens=tokens, speed=speed, bill=bill, best=best if terms.fit else None, smallest=smallest,
        findings=findings, saved=_saved(planned, setup),
    )  # fmt: skip


def _memory_of(planned: Plan, setup: Setup, card: Card) -> Memory:
    """The moments that the run comes to on such a card: without a step, what lies before the first one."""
    whole = memory.estimate(setup)
    whole = whole if card.gib is None else whole.within(memory.usable(card.gib))
    if plan.limited(planned.stage, planned.values) != 0:
        return whole
    if plan.caches_only(planned.stage, planned.values) == "data set":
        return Memory(moments=(Moment(name="tokenising", parts=()),))
    before = ("start", "reference pass")
    return Memory(moments=tuple(m for m in whole.moments if m.name.startswith(before)))


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


def _waste_findings(planned: Plan, rows: Lengths, row: Packed | None) -> Iterator[Finding]:
    """More than half of what a packed step computes is empty; which batch would fill it."""
    if row is None or row.filled >= 0.5:
        return
    pairs = planned.per_device * planned.accumulation
    more, full = fuller(rows, pairs=pairs, limit=row.positions // 2)
    better = f"; {more} fills {full.filled:.0%}" if more > pairs else ""
    yield planned.stage.config.placed(Finding(
        severity="warning", layer="launch", code="half-wasted", key="batch.per_device",
        message=f"batch {pairs} uses {row.filled:.0%} of each step{better}: rows of {row.positions:,} "
        "positions are computed whole, however many pairs stand in them",
        help=f"write `per_device: {more}`: a step takes the same time and memory"
        if better else "shorter `max_seq_length`, or `packing: false`",
    ))  # fmt: skip


def _reference_rows(footprint: Footprint, rows: int | None) -> int | None:
    """Rows that go through the reference: all of them beforehand, or those of every step."""
    planned, reference = footprint.plan, footprint.setup().reference
    if not footprint.dpo:
        return None
    if reference == "cache" or planned.values.get("precompute_ref_log_probs"):
        return rows
    return planned.steps * planned.global_batch if reference and planned.steps else None


def _memory_findings(
    footprint: Footprint, found: Memory | None, best: Fit | None, card: Card
) -> Iterator[Finding]:
    """Whether the memory is known, is too much, or leaves a card half empty."""
    planned = footprint.plan
    place, which = planned.stage.config.origin("batch.per_device").place, _which(planned)
    if found is None:
        yield Finding(
            severity="note", layer="launch", code="unknown-memory",
            message=f"{which}memory is planned for GPUs, not for the CPU",
        )  # fmt: skip
    elif card.gib is not None and not memory.fits(found, card.gib)[0]:
        yield Finding(
            severity="warning", layer="launch", code="out-of-memory",
            message=which + _missing(found, card.gib), help=_instead(footprint, found, card), **place,
        )  # fmt: skip
    elif (
        card.gib is not None
        and best is not None
        and best.per_device > planned.per_device
        and found.peak < 0.6 * card.gib
        and plan.limited(planned.stage, planned.values) != 0
    ):
        less = planned.accumulation / best.accumulation
        how = "halves accumulation" if less == 2 else f"divides accumulation by {less:g}"
        yield Finding(
            severity="note", layer="launch", code="half-empty", key="batch.per_device",
            message=f"{which}{found.peak:.0f} of {card.gib:g} GiB used: per-device batch "
            f"{best.per_device} fits ({best.memory.peak:.0f} GiB) and {how}",
            help=f"write `per_device: {best.per_device}`, or let --fit choose", **place,
        )  # fmt: skip


def _missing(found: Memory, gib: float) -> str:
    """By how much it does not fit, and what the peak is made of."""
    kind = max(KINDS, key=found.of)
    parts = [part for part in found.fullest.parts if part.kind == kind]
    largest, usable = max(parts, key=lambda part: part.gib), memory.usable(gib)
    return (
        f"{found.peak:.1f} GiB are planned and {usable:.1f} of {gib:g} can be used: "
        f"{found.peak - usable:.1f} GiB missing, at the {found.fullest.name}; {found.of(kind):.1f} of "
        f"it are {kind} ({largest.name}: {largest.gib:.2f} GiB = {largest.formula})"
    )


def _instead(footprint: Footprint, now: Memory, card: Card) -> str:
    """What of this set-up can be turned so that it fits, by the same estimate."""

    def peak_of(other: Footprint) -> float:
        return _memory_of(other.plan, other.setup(), card).peak

    changes = [
        f"{words} ({peak:.1f} GiB)"
        for words, peak in mends(footprint, peak_of, memory.usable(card.gib or 0.0))
    ]
    if changes:
        return f"this fits: {'; or '.join(changes[:3])}"
    shorter = ", shorter rows" if max(KINDS, key=now.of) in ("logits", "activations") else ""
    return f"nothing that can be turned fits: a card with more memory{shorter}, or a smaller model"


def _speed(footprint: Footprint, tokens: Tokens, terms: Terms, card: Card) -> Speed | None:
    planned = footprint.plan
    if terms.tokens_per_second is not None:
        return Speed(tokens=terms.tokens_per_second, source="--tokens-per-second", measured=True)
    if (seen := measured(planned, card.name)) is not None:
        return seen
    if not card.name:
        return None
    return budget.stated_speed(footprint, tokens, card.name)


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
            found = entries.hit(one.path, planned)
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
