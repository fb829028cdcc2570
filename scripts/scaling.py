"""Writes the tables and the drawing of docs/scaling.md from the code that plans."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from launcher import budget, communication, lengths, memory, setups, shapes
from launcher.communication import H100, Step
from launcher.forecast import MARGIN
from launcher.setups import Setup, Zero

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
MODELS = {"7B": "Qwen/Qwen2.5-7B", "70B": "meta-llama/Llama-3.1-70B"}
ENGINES = ("ZeRO-2", "ZeRO-3", "ZeRO-3, hpZ 8")
COUNTS = tuple(2**n for n in range(11))
CARD, GIB = "H100", 80.0
ROWS = lengths.parse("665:4096")
BATCH = 128
"""Rows a step, as long as there are no more GPUs than that."""
TOKENS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One model under one engine on so many GPUs: `rows` a step, `least` GiB at one row a device.

    `per_device` is the largest batch that fits, 1 where none does; `tokens` are those of a step.
    """

    model: str
    engine: str
    gpus: int
    rows: int
    least: float
    peak: float
    fits: bool
    per_device: int
    accumulation: int
    tokens: float
    step: Step

    def hours(self, step: float) -> float:
        """For all tokens, at so many seconds a step."""
        return TOKENS / self.tokens * step / 3600


def zero(engine: str, hidden: int) -> Zero:
    """An engine from the DeepSpeed files that ship."""
    name = "zero2.json" if engine == "ZeRO-2" else "zero3.json"
    text = resources.files("launcher").joinpath("deepspeed", name).read_text(encoding="utf-8")
    made = setups.zero_of(json.loads(text), hidden)
    assert made is not None
    return replace(made, secondary=8) if "hpZ" in engine else made


def point(model: str, engine: str, gpus: int) -> Point:
    """SFT with Liger, packing, checkpointing and flash attention."""
    shape = shapes.find(MODELS[model], {})
    rows = max(BATCH, gpus)

    def setup(per_device: int, accumulation: int) -> Setup:
        batches = round(TOKENS / ROWS.mean / per_device)
        return Setup(
            shape=shape, processes=gpus, accumulation=accumulation, zero=zero(engine, shape.hidden),
            batch=lengths.largest(ROWS, rows=per_device, batches=batches, packed=True),
            loss="liger", liger=True, checkpointing=True, packed=True,
        )  # fmt: skip

    least = memory.estimate(setup(1, rows // gpus)).within(GIB * (1 - MARGIN)).peak
    found = budget.fit(setup, total=rows, processes=gpus, gib=GIB, margin=MARGIN)
    per_device, accumulation = (
        (found.per_device, found.accumulation) if found else (1, rows // gpus)
    )
    tokens = budget.tokens_per_step(
        ROWS, per_device=per_device, accumulation=accumulation, processes=gpus, packed=True
    )
    speed = budget.stated_speed(shape, tokens, ROWS.mean, device=CARD, devices=gpus)
    sent = communication.traffic(setup(per_device, accumulation), H100)
    step = Step(compute=tokens.real / speed.tokens, communication=communication.seconds(sent))
    return Point(
        model=model, engine=engine, gpus=gpus, rows=rows, least=least,
        peak=found.memory.peak if found else least, fits=found is not None, per_device=per_device,
        accumulation=accumulation, tokens=tokens.real, step=step,
    )  # fmt: skip


@cache
def points() -> tuple[Point, ...]:
    """All models, engines and counts."""
    return tuple(
        point(model, engine, count)
        for model in MODELS
        for engine in ENGINES
        for count in COUNTS
        # a second copy in each machine is no other thing where there is but one machine
        if "hpZ" not in engine or count > H100.node
    )


def of(model: str, engine: str) -> list[Point]:
    """One curve."""
    return [p for p in points() if (p.model, p.engine) == (model, engine)]


# --- tables ----------------------------------------------------------------------------------------


def summary() -> Iterator[str]:
    """Where each engine begins to fit, and where the links take over."""
    yield (
        "| model | engine | fits from | the links decide from | at 1,024 GPUs: arithmetic, links "
        "| rows a GPU that would hide them |"
    )
    yield "|---|---|---|---|---|---|"
    for model in MODELS:
        for engine in ENGINES:
            curve = of(model, engine)
            fits = next((f"{p.gpus:,} GPUs" for p in curve if p.fits), "no count")
            bound = next((f"{p.gpus:,} GPUs" for p in curve if p.fits and p.step.bound), "-")
            yield f"| {model} | {engine} | {fits} | {bound} | {_last(curve[-1])} |"


def _last(last: Point) -> str:
    if not last.fits:
        return "- | -"
    step = last.step
    rows = math.ceil(last.per_device * step.communication / step.compute)
    return f"{step.compute:.2f} s, {step.communication:.2f} s a step | {rows}"


def table(model: str) -> Iterator[str]:
    """Every point of a model."""
    yield (
        "| GPUs | rows a step | engine | least GiB | batch x accumulation | its GiB "
        "| arithmetic, s a step | links, s a step | hours |"
    )
    yield "|--:|--:|---|--:|--:|--:|--:|--:|--:|"
    for gpus in COUNTS:
        for engine in ENGINES:
            p = next((one for one in of(model, engine) if one.gpus == gpus), None)
            if p is None:
                continue
            head = f"| {gpus:,} | {p.rows:,} | {engine} | {p.least:.1f} |"
            if not p.fits:
                yield f"{head} does not fit | | | | |"
                continue
            step = p.step
            hours = f"{p.hours(step.shortest):,.2f} to {p.hours(step.longest):,.2f}"
            yield (
                f"{head} {p.per_device} x {p.accumulation} | {p.peak:.1f} | {step.compute:.2f} "
                f"| {step.communication:.2f} | {hours} |"
            )


def renewed(page: str) -> str:
    """The page with its tables made anew."""
    made = {"summary": summary(), **{f"table {m}": table(m) for m in MODELS}}
    for name, rows in made.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        text = "\n".join(rows)
        page, count = re.subn(
            re.escape(begin) + ".*?" + re.escape(end), f"{begin}\n{text}\n\n{end}", page, flags=re.S
        )
        if count != 1:
            raise SystemExit(f"{PAGE} has no place for the {name}")
    return page


# --- the drawing -----------------------------------------------------------------------------------

_COLOURS = {"ZeRO-2": "#1b6ca8", "ZeRO-3": "#c8553d", "ZeRO-3, hpZ 8": "#5b8c5a"}


def draw(path: Path) -> None:
    """Memory above, hours below; the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "launch", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(MODELS), figsize=(10, 7), sharex=True)
    for column, model in enumerate(MODELS):
        _memory(axes[0][column], model)
        _hours(axes[1][column], model)
    axes[0][0].legend(frameon=False)
    axes[1][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def _memory(axis: Any, model: str) -> None:
    for engine in ENGINES:
        curve = of(model, engine)
        axis.plot(
            [p.gpus for p in curve],
            [p.least for p in curve],
            label=engine,
            color=_COLOURS[engine],
            marker=".",
        )
    axis.axhline(GIB * (1 - MARGIN), color="#666666", linestyle="--", linewidth=1)
    axis.text(60, GIB * (1 - MARGIN) * 1.08, "usable of 80 GiB", color="#666666")
    axis.set(title=f"{MODELS[model]}: least GiB a GPU", yscale="log", ylim=(4, 2000))
    axis.grid(alpha=0.25)


def _hours(axis: Any, model: str) -> None:
    ideal = of(model, "ZeRO-3")
    axis.plot(
        COUNTS, [p.hours(p.step.compute) for p in ideal], color="#999999", linestyle=":",
        label="arithmetic alone",
    )  # fmt: skip
    for engine in ENGINES:
        curve = [p for p in of(model, engine) if p.fits]
        if not curve:
            continue
        counts = [p.gpus for p in curve]
        low = [p.hours(p.step.shortest) for p in curve]
        high = [p.hours(p.step.longest) for p in curve]
        axis.fill_between(counts, low, high, color=_COLOURS[engine], alpha=0.3, label=engine)
        axis.plot(counts, low, color=_COLOURS[engine], linewidth=1)
    axis.axvline(BATCH, color="#666666", linewidth=1, linestyle="--")
    axis.text(BATCH * 1.1, axis.get_ylim()[1] * 0.5, "a row for each", color="#666666")
    axis.set(title=f"hours for {TOKENS / 1e9:g} billion tokens", xlabel="GPUs")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([1, 8, 64, 128, 512, 1024], ["1", "8", "64", "128", "512", "1,024"])
    axis.grid(alpha=0.25)


def main() -> None:
    """Rewrite the page's tables and the drawing beside it."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PAGE.with_suffix(".svg"))


if __name__ == "__main__":
    main()
