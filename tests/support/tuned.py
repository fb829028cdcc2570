"""Machines that are not there: what a setting would do on them, by arithmetic of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conftest import REPOSITORY

from launcher.artifacts import architecture, lengths
from launcher.errors import InvalidConfig
from launcher.machine import datasheets
from launcher.plan import footprint, plan
from launcher.plan.footprint import Footprint
from launcher.planning import collect
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.workflows.bench.comparison import SPEED, Sample
from launcher.workflows.tune.search import Search, Trial
from launcher.workflows.tune.space import Candidate, Settings, Space

STEPS = 8
PACKAGES = {"flash-attn": "2.8.3", "liger-kernel": "0.7.0"}


def outlook(
    config: str | Path,
    *overrides: str,
    gpus: int = 2,
    rows: str = "400:1100",
    card: str = "H200",
    gib: float | None = 139.8,
    packages: dict[str, str] | None = None,
) -> Space:
    """A stage file on so many cards."""
    path = REPOSITORY / "configs" / config
    request = Request(stage=None, config=path, gpus=gpus, overrides=overrides)
    facts = collect.collect(request, Scope.FILE)
    installed = PACKAGES if packages is None else packages
    planned = plan.make(facts.stage, gpus=gpus, output=Path("model"), packages=installed)
    has_flash = gpus > 0 and "flash-attn" in installed
    try:
        shape = footprint.find_model_shape(planned)
    except InvalidConfig:
        # a model that is not here
        shape = architecture.find("Qwen/Qwen2.5-0.5B", {})
    return Space(
        plan=planned,
        packages=installed,
        rows=lengths.parse(rows),
        shape=shape,
        card=datasheets.find_card(card, gib) if gpus else datasheets.CPU,
        steps=STEPS,
        attention="flash_2" if has_flash else "sdpa",
    )


def run_trial(candidate: Candidate, speed: float = 0.0, **parts: Any) -> Trial:
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

    `memory` multiplies what a textbook says of memory. At `half` positions matrices are half as
    fast as large ones. `hidden` is the share of the traffic behind arithmetic. `liger` and
    `recompute` multiply the bytes and the arithmetic of a pass.
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
        settings = candidate.settings
        peak = None
        if candidate.short is not None:
            batch = world.footprint(settings).typical
            peak = self.peak(world, settings, batch.tokens)
            if peak > 0.95 * self.gib:
                return run_trial(candidate, status="oom", seconds=40, reason="CUDA out of memory")
        step = self._step(world, settings)
        seconds = 50 + STEPS * step
        speed = candidate.tokens / step / world.plan.processes
        return run_trial(candidate, speed, step=step, peak=peak, seconds=seconds)

    def lasts(self, world: Space, candidate: Candidate) -> float:
        """The speed where the whole run leaves the margin free, else 0."""
        if candidate.peak is not None:
            longest = world.footprint(candidate.settings).setup().batch
            peak = self.peak(world, candidate.settings, longest.tokens)
            if peak > 0.92 * self.gib:
                return 0.0
        return self.runs(world, candidate).speed

    def peak(self, world: Space, settings: Settings, tokens: int) -> float:
        """GiB of a micro-batch of so many tokens, as textbooks count them and not as the plan does.

        States: Rajbhandari et al., 2020. Activations: those of a layer after Korthikanti et al.,
        2022, with three matrices in its MLP, or the inputs of the layers and one layer. Logits:
        2 bytes, and copies in 32 bits.
        """
        model = world.footprint(settings)
        shape = model.shape
        activations = self._activations(model, tokens)
        logits = 20.0 * shape.vocab * tokens
        if settings.get("liger") and not model.pairs:
            logits = 6.0 * shape.hidden * tokens
        return self.memory * (self._states(model) + activations + logits) / 2**30

    def _states(self, model: Footprint) -> float:
        """Bytes of weights in 16 bits, and of gradients and Adam's states."""
        weights = 2.0 * model.shape.parameters
        states = 14.0 * _trained(model)
        zero = model.zero
        if zero is None:
            return weights + states
        if zero.stage == 3:
            weights /= model.plan.processes
        if zero.stage > 0:
            states /= model.plan.processes
        if zero.offload_optimizer:
            states /= 7
        return weights + states

    def _activations(self, model: Footprint, tokens: int) -> float:
        shape = model.shape
        layer = (20.0 * shape.hidden + 8.0 * shape.intermediate) * tokens
        if model.checkpointing:
            return layer + 2.0 * shape.hidden * tokens * shape.layers
        return layer * shape.layers

    def _step(self, world: Space, settings: Settings) -> float:
        """Seconds of a step, by other arithmetic than the plan's."""
        model = world.footprint(settings)
        zero = model.zero
        accumulation = model.plan.accumulation
        compute = accumulation * self._micro_batch(model, settings)
        # ZeRO-1 sends the gradients of all micro-batches together
        times = 1
        if zero is not None and zero.stage > 1:
            times = accumulation
        traffic = times * (1 - self.hidden) * self._sent_bytes(model) / self.link
        states = _trained(model)
        if zero is not None:
            states /= model.plan.processes
        seconds = compute + traffic + 28 * states / self.bandwidth
        if zero is not None and zero.offload_optimizer:
            seconds += states * (4 / 20e9 + 30 / 50e9)
        return seconds

    def _micro_batch(self, model: Footprint, settings: Settings) -> float:
        """Seconds of the passes over a micro-batch, and of the traffic of its activations."""
        shape = model.shape
        tokens = model.typical.tokens
        passes = 3.0 if model.adapters is None else 2.0
        if model.checkpointing:
            passes *= self.recompute
        matrices = 2 * (shape.parameters - shape.embedding) * (tokens + self.half)
        arithmetic = matrices / (0.6 * self.flops) + self._attention(model)
        layer_bytes = 60 * shape.hidden + 24 * shape.intermediate
        vocabulary_bytes = 14 * shape.vocab
        if settings.get("liger"):
            layer_bytes *= self.liger
            vocabulary_bytes = 2 * shape.vocab
        moved = tokens * (shape.layers * layer_bytes + vocabulary_bytes)
        least = shape.layers * self.layer
        return passes * max(arithmetic, least) + moved / self.bandwidth

    def _attention(self, model: Footprint) -> float:
        shape = model.shape
        tokens = model.typical.tokens
        is_flash = model.attention.startswith("flash")
        width = model.typical.width
        if model.packed:
            width = model.rows.mean if is_flash else tokens
        reached = self.flops * (self.flash if is_flash else self.sdpa)
        return shape.layers * 4 * tokens * width * shape.query / reached

    def _sent_bytes(self, model: Footprint) -> float:
        """Bytes that each process exchanges with the others for a micro-batch."""
        zero = model.zero
        count = model.plan.processes
        sent = 2.0 * _trained(model)
        if zero is not None:
            sent = zero.communication * _trained(model)
            if zero.stage == 3:
                sent += 4 * model.shape.parameters
        return sent * (count - 1) / count


def _trained(model: Footprint) -> float:
    """The number of parameters that are trained."""
    if model.adapters is None:
        return model.shape.parameters
    return model.adapters.parameters(model.shape)


H200 = Machine(gib=139.8, flops=989e12, bandwidth=4.8e12, link=300e9)
A100 = Machine(gib=79.2, flops=312e12, bandwidth=2.0e12, link=180e9)
RTX4090 = Machine(gib=23.6, flops=165e12, bandwidth=1.0e12, link=20e9)


def search_of(world: Space, **terms: object) -> Search:
    """A search over everything that the stage file can be turned into; `terms` are attributes of
    it.
    """
    if id(world) not in _GRIDS:
        _GRIDS[id(world)] = (world, list(world.grid()))
    search = Search(world, _GRIDS[id(world)][1])
    for name, value in terms.items():
        setattr(search, name, value)
    return search


# estimates of hundreds of settings take seconds, and many tests want the same ones
_GRIDS = dict[int, tuple[Space, list[Candidate]]]()


def run_search(world: Space, machine: Machine, noise: Sequence[float]) -> Search:
    """Through to its end, or ten trials; `noise` are shares by which measurements are off."""
    search = search_of(world)
    while len(search.results) < 10:
        candidate = search.propose()
        if candidate is None:
            break
        trial = machine.runs(world, candidate)
        if trial.speed:
            share = noise[len(search.runs) % len(noise)]
            trial = _measured_wrongly(trial, share)
        search.learn(trial)
    return search


def _measured_wrongly(trial: Trial, share: float) -> Trial:
    metrics = {**trial.sample.metrics, SPEED: trial.speed * (1 + share)}
    return replace(trial, sample=replace(trial.sample, metrics=metrics))


def reached(world: Space, machine: Machine, search: Search) -> float:
    """The speed of what was found, as a share of the best that there is in the whole grid."""
    best = search.best
    assert best is not None
    top = max(machine.lasts(world, candidate) for candidate in search.grid.values())
    return machine.runs(world, best.candidate).speed / top


def candidate_with(search: Search, **settings: object) -> Candidate:
    """The candidate of the grid that is the file with these levers turned."""
    wanted = {**search.base.settings, **settings}
    return search.grid[Candidate(settings=wanted).key]  # type: ignore[arg-type]
