"""The peak of torch's allocated memory on the fullest rank, in GiB, by part and by moment.

A run's memory has a few moments that can be its peak: the engine's start, the reference pass, the loss, a
layer's backward pass, the embedding's gradient, the optimizer's step. Each is a sum of parts; each part
carries its formula and where that comes from. The largest moment is the peak. What is not described
raises, instead of being guessed. `passes` has the parts of activations and loss, `engines` those of
weights, gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from launcher import activations, passes
from launcher.engines import Engine, Fsdp, Partitioned, Plain, Sharded, Whole
from launcher.errors import InvalidConfig
from launcher.moments import GIB, Memory, Moment, Part
from launcher.setups import Setup, Zero, undescribed

MARGIN = 0.08
"""The share of a card that allocated memory cannot use: CUDA's own context, NCCL's buffers, and what the
allocator has reserved in pieces."""
# cuBLAS keeps one workspace a thread that multiplies on Hopper: forward and backward
_WORKSPACE = 2 * 32 * 2**20


def estimate(setup: Setup) -> Memory:
    """The peak of a run and what it is made of; raises InvalidConfig (`unknown-memory`)."""
    return Memory(moments=tuple(_moments(setup, _engine(setup))))


def _engine(setup: Setup) -> Engine:
    if setup.sharding is not None:
        return Fsdp(setup, setup.sharding)
    if setup.zero is None:
        return Plain(setup)
    if setup.quantised is not None:
        raise InvalidConfig(undescribed("DeepSpeed with quantised weights is not described"))
    engines: Mapping[int, Callable[[Setup, Zero], Engine]] = {1: Whole, 2: Partitioned, 3: Sharded}
    stage = setup.zero.stage
    if stage not in engines:
        raise InvalidConfig(undescribed(f"DeepSpeed without ZeRO (stage {stage}) is not described"))
    return engines[stage](setup, setup.zero)


def _moments(setup: Setup, engine: Engine) -> Iterable[Moment]:
    work = Part(kind="other", name="cuBLAS workspaces", gib=_WORKSPACE / GIB, formula="2 x 32 MiB")
    yield Moment(name="start", parts=engine.start())
    if flat := engine.flattened():
        yield Moment(name="start, weights made flat", parts=flat, spared=True)
    resting = (*engine.resting(), work)
    if setup.reference == "cache":
        yield Moment(
            name="reference pass", parts=(*engine.untrained(), work, *passes.reference(setup))
        )
    if setup.reference in {"model", "adapter"}:
        held = (*resting, *engine.waiting(), *engine.gathered(whole=False))
        yield Moment(
            name="reference pass", parts=(*held, *passes.kept(setup), *passes.reference(setup))
        )
    before = (*resting, *engine.accumulated(), *engine.cast())
    copies = engine.cast(passing=True)
    if setup.checkpointing and copies and not setup.adapters:
        # autocast forgets its copies at the end of the pass, whatever is checkpointed
        ahead = (*resting, *engine.waiting(), *copies)
        yield Moment(
            name="forward pass", parts=(*ahead, *passes.kept(setup), *passes.passing(setup))
        )
    # the backward pass of the loss needs none: what is checkpointed is cast again
    held = () if setup.checkpointing else engine.cast()
    at_loss = (*resting, *engine.waiting(), *held, *engine.gathered(whole=True))
    yield Moment(name="loss", parts=(*at_loss, *passes.kept(setup), *passes.head(setup)))
    if not setup.adapters:
        yield Moment(
            name="output layer's gradient",
            parts=(*at_loss, *passes.kept(setup), *passes.output_gradient(setup)),
        )
        if not setup.shape.tied and setup.sharding is None:
            # when the next gradient is there; a tied one, and FSDP's, wait for the embedding's
            held = (*before, *engine.buckets(), *engine.gathered(whole=True, output=False))
            parts = (*passes.output_gradient(setup, made=True), *engine.sent(setup.shape.embedding))
            yield Moment(
                name="sending the output layer's gradient",
                parts=(*held, *passes.kept(setup), *parts),
            )
    layer = activations.backward(setup)
    yield Moment(
        name="last layer's backward pass",
        parts=(
            *resting, *engine.begun(), *engine.cast(), *engine.buckets(),
            *engine.gathered(whole=False), *passes.kept(setup), *passes.recomputed(setup),
            passes.part("activations", "gradients inside a layer", layer), *passes.held_output(setup),
            *passes.dequantised(setup),
        ),
    )  # fmt: skip
    for name, passed, gradients in engine.sends():
        if passed < setup.shape.layers:
            yield Moment(
                name=name,
                parts=(
                    *resting, *gradients, *engine.buckets(), *engine.gathered(whole=False),
                    *passes.kept(setup, passed=passed), *passes.recomputed(setup),
                    *passes.held_output(setup),
                ),
            )  # fmt: skip
    if not setup.adapters:
        yield Moment(name="embedding's gradient", parts=(*resting, *engine.at_embedding()))
    yield Moment(name="gradient norm", parts=(*resting, *engine.norm()))
    yield Moment(name="optimizer's step", parts=(*resting, *engine.step()))


def usable(gib: float) -> float:
    """GiB of a card that allocated memory can use."""
    return gib * (1 - MARGIN)


def fits(memory: Memory, gib: float) -> tuple[bool, float]:
    """Whether a card of `gib` holds it, and GiB to spare (negative: missing)."""
    peak = memory.within(usable(gib)).peak
    return peak <= usable(gib), usable(gib) - peak
