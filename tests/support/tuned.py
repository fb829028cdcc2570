"""Machines that are not there: what a setting would do on them, by other arithmetic than launch's own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conftest import REPOSITORY

from launcher.artifacts import architecture, lengths
from launcher.errors import InvalidConfig
from launcher.machine import datasheets
from launcher.plan import footprint, plan
from launcher.planning import collect
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.workflows.bench.comparison import SPEED, Sample
from launcher.workflows.tune.search import Search, Trial
from launcher.workflows.tune.space import Candidate, Settings, Space

STEPS = 8
PACKAGES = {"flash-attn": "2.8.3", "liger-kernel": "0.7.0"}


def outlook(
    config: str | Path, *overrides: str, gpus: int = 2, rows: str = "400:1100",
    card: str = "H200", gib: float | None = 139.8, packages: dict[str, str] | None = None,
) -> Space:  # fmt: skip
    """A stage file on so many cards."""
    path = REPOSITORY / "configs" / config
    request = Request(stage=None, config=path, gpus=gpus, overrides=overrides)
    asked = collect.collect(request, Scope.FILE)
    installed = PACKAGES if packages is None else packages
    made = plan.make(asked.stage, gpus=gpus, output=Path("model"), packages=installed)
    try:
        shape = footprint.shape_of(made)
    except InvalidConfig:
        # a model that is not here
        shape = architecture.find("Qwen/Qwen2.5-0.5B", {})
    return Space(
        plan=made,
        packages=installed,
        rows=lengths.parse(rows),
        shape=shape,
        card=datasheets.card_of(card, gib) if gpus else datasheets.CPU,
        steps=STEPS,
        attention="flash_2" if "flash-attn" in installed and gpus else "sdpa",
    )


def ran(candidate: Candidate, speed: float = 0.0, **parts: Any) -> Trial:
    """A run of a candidate with this speed; `step`, `peak` and `seconds` are figures of it."""
    figures = {
        SPEED: speed or None,
        "seconds_per_step": parts.pop("step", 1.0),
        "peak_allocated_gib": parts.pop("peak", None),
    }
    sample = Sample(variant="", metrics=figures, seconds=parts.pop("seconds", 60.0))
    return Trial(candidate=candidate, sample=sample, **parts)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What nobody knows beforehand: FLOP and bytes a second that are reached, and shares.

    `memory` multiplies what a textbook says of memory, `half` the positions at which matrices are half as fast as
    large ones, `hidden` the share of the traffic behind arithmetic, `liger` and `recompute` what these multiply
    the bytes and the arithmetic of a pass by.
    """

    gib: float
    flops: float
    bandwidth: float
    link: float
    memory: float = 1.0
    half: float = 1500.0
    flash: float = 0.7
    sdpa: float = 0.12
    liger: float = 0.6
    recompute: float = 4 / 3
    hidden: float = 0.5
    layer: float = 1e-3
    """Seconds that a layer takes at least, however little there is in it."""

    def runs(self, world: Space, candidate: Candidate) -> Trial:
        """What a trial of these settings shows."""
        peak = None
        if candidate.short is not None:
            peak = self.peak(
                world, candidate.settings, world.footprint(candidate.settings).typical.tokens
            )
        if peak is not None and peak > 0.95 * self.gib:
            return ran(candidate, status="oom", seconds=40, reason="CUDA out of memory")
        step = self._step(world, candidate.settings)
        speed = candidate.tokens / step / world.plan.processes
        return ran(candidate, speed, step=step, peak=peak, seconds=50 + STEPS * step)

    def lasts(self, world: Space, candidate: Candidate) -> float:
        """The speed where the whole run leaves the margin free, else 0."""
        if candidate.peak is not None:
            longest = world.footprint(candidate.settings).setup().batch.tokens
            if self.peak(world, candidate.settings, longest) > 0.92 * self.gib:
                return 0.0
        return self.runs(world, candidate).speed

    def peak(self, world: Space, settings: Settings, tokens: int) -> float:
        """GiB of a micro-batch of so many tokens, as textbooks count them and not as the plan does.

        States: Rajbhandari et al., 2020. Activations: those of a layer after Korthikanti et al., 2022, with three
        matrices in its MLP, or the inputs of the layers and one layer. Logits: 2 bytes, and copies in 32 bits.
        """
        model = world.footprint(settings)
        shape = model.shape
        count = model.plan.processes
        weights, states = 2.0 * shape.parameters, 14.0 * shape.parameters
        if model.adapters is not None:
            states = 14.0 * model.adapters.parameters(shape)
        stage = 0 if model.zero is None else model.zero.stage
        if stage == 3:
            weights /= count
        if stage > 0:
            states /= count
        if model.zero is not None and model.zero.offload_optimizer:
            states /= 7
        layer = (20.0 * shape.hidden + 8.0 * shape.intermediate) * tokens
        activations = layer * shape.layers
        if model.checkpointing:
            activations = layer + 2.0 * shape.hidden * tokens * shape.layers
        logits = 20.0 * shape.vocab * tokens
        if settings.get("liger") and not model.pairs:
            logits = 6.0 * shape.hidden * tokens
        return self.memory * (weights + states + activations + logits) / 2**30

    def _step(self, world: Space, settings: Settings) -> float:
        """Seconds of a step, by other arithmetic than the plan's."""
        found = world.footprint(settings)
        made, shape, zero, batch = found.plan, found.shape, found.zero, found.typical
        tokens, flash, count = batch.tokens, found.attention.startswith("flash"), made.processes
        passes = (2 if found.adapters else 3) * (self.recompute if found.checkpointing else 1)
        arithmetic = (
            2 * (shape.parameters - shape.embedding) * (tokens + self.half) / (0.6 * self.flops)
        )
        width = (found.rows.mean if flash else tokens) if found.packed else batch.width
        reached = self.flops * (self.flash if flash else self.sdpa)
        arithmetic += shape.layers * 4 * tokens * width * shape.query / reached
        liger = settings.get("liger")
        bytes_a_token = (
            shape.layers
            * (60 * shape.hidden + 24 * shape.intermediate)
            * (self.liger if liger else 1)
        )
        bytes_a_token += (2 if liger else 14) * shape.vocab
        micro = (
            max(passes * arithmetic, shape.layers * self.layer * passes)
            + tokens * bytes_a_token / self.bandwidth
        )
        trained = found.adapters.parameters(shape) if found.adapters else shape.parameters
        gathered = 4 * shape.parameters if zero is not None and zero.stage == 3 else 0
        sent = (
            (trained * (zero.communication if zero else 2) + gathered)
            * (count - 1)
            / count
            / self.link
        )
        # ZeRO-1 sends the gradients of all micro-batches together
        times = made.accumulation if zero is not None and zero.stage > 1 else 1
        own = trained / (count if zero else 1)
        step = (
            made.accumulation * micro + times * (1 - self.hidden) * sent + 28 * own / self.bandwidth
        )
        if zero is not None and zero.offload_optimizer:
            step += own * (4 / 20e9 + 30 / 50e9)
        return step


H200 = Machine(gib=139.8, flops=989e12, bandwidth=4.8e12, link=300e9)
A100 = Machine(gib=79.2, flops=312e12, bandwidth=2.0e12, link=180e9)
RTX4090 = Machine(gib=23.6, flops=165e12, bandwidth=1.0e12, link=20e9)


def search_of(world: Space, **terms: object) -> Search:
    """A search over everything that the stage file can be turned into; `terms` are attributes of it."""
    if id(world) not in _GRIDS:
        _GRIDS[id(world)] = (world, list(world.grid()))
    search = Search(world, _GRIDS[id(world)][1])
    for name, value in terms.items():
        setattr(search, name, value)
    return search


# estimates of hundreds of settings take seconds, and many tests want the same ones
_GRIDS = dict[int, tuple[Space, list[Candidate]]]()


def searched(
    world: Space, machine: Machine, trials: int = 10, noise: Sequence[float] = (), **terms: object
) -> Search:
    """Through to its end, or so many trials; `noise` are shares by which measurements are off."""
    search = search_of(world, **terms)
    while len(search.results) < trials and (candidate := search.propose()) is not None:
        trial = machine.runs(world, candidate)
        if noise and trial.speed:
            off = 1 + noise[len(search.runs) % len(noise)]
            figures = {**trial.sample.metrics, SPEED: trial.speed * off}
            trial = replace(trial, sample=replace(trial.sample, metrics=figures))
        search.learn(trial)
    return search


def reached(world: Space, machine: Machine, search: Search) -> float:
    """The speed of what was found, as a share of the best that there is in the whole grid."""
    best = search.best
    assert best is not None
    top = max(machine.lasts(world, candidate) for candidate in search.grid.values())
    return machine.runs(world, best.candidate).speed / top


def one(search: Search, **settings: object) -> Candidate:
    """The candidate of the grid that is the file with these levers turned."""
    wanted = {**search.base.settings, **settings}
    return search.grid[Candidate(settings=wanted).key]  # type: ignore[arg-type]
