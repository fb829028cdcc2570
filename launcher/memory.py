"""The peak of torch's allocated memory on the fullest rank, in GiB, by part and by moment.

A run's memory has a few moments that can be its peak: the engine's start, the reference pass, the loss, a
layer's backward pass, the embedding's gradient, the optimizer's step. Each is a sum of parts; each part
carries its formula and where that comes from. The largest moment is the peak. What is not described
raises, instead of being guessed. `passes` has the parts of activations and loss, `engines` and
`zero_engines` those of weights, gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher import activations, passes
from launcher.activations import FULL, HALF, Amount
from launcher.engines import Engine, Fsdp, Plain
from launcher.errors import InvalidConfig
from launcher.moments import GIB, Memory, Moment, Part
from launcher.setups import Setup, undescribed
from launcher.zero_engines import Partitioned, Sharded, Whole

# cuBLAS keeps one workspace a thread that multiplies on Hopper: forward and backward
_WORKSPACE = 2 * 32 * 2**20


def estimate(setup: Setup) -> Memory:
    """The peak of a run and what it is made of; raises InvalidConfig (`unknown-memory`)."""
    if setup.shape.experts:
        _require_plain_experts(setup)
    if setup.quantised is not None and setup.zero is not None:
        raise InvalidConfig(undescribed("DeepSpeed with quantised weights is not described"))
    if setup.shape.layout.fused and setup.adapters:
        raise InvalidConfig(undescribed("LoRA on fused projections is not described"))
    if setup.zero is not None and setup.zero.stage not in {1, 2, 3}:
        raise InvalidConfig(
            undescribed(f"DeepSpeed without ZeRO (stage {setup.zero.stage}) is not described")
        )
    engine: Engine
    if setup.sharding is not None:
        engine = Fsdp(setup, setup.sharding)
    elif setup.zero is not None and setup.zero.stage == 3:
        engine = Sharded(setup, setup.zero)
    elif setup.zero is not None and setup.zero.stage == 2:
        engine = Partitioned(setup, setup.zero)
    elif setup.zero is not None and setup.zero.stage == 1:
        engine = Whole(setup, setup.zero)
    else:
        engine = Plain(setup)
    return Memory(moments=tuple(_moments(setup, engine)))


# what lies beside the experts
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def _require_plain_experts(setup: Setup) -> None:
    if setup.sharding is not None:
        raise InvalidConfig(
            undescribed("dpo.py with experts is not described: OLMo-core has its own")
        )
    if setup.weight_bytes == FULL:
        # torch's grouped products take 16 bits, what else they do depends on its version
        raise InvalidConfig(
            undescribed("experts in 32 bits are not described: `dtype: bfloat16` is, and DeepSpeed")
        )
    if setup.adapters and not set(setup.adapters.targets) <= _ATTENTION:
        raise InvalidConfig(undescribed(
            "LoRA on experts is not described: PEFT makes whole weights of it; on "
            f"{', '.join(sorted(_ATTENTION))} it is"
        ))  # fmt: skip


def _moments(setup: Setup, engine: Engine) -> Iterable[Moment]:
    work = Part(kind="other", name="cuBLAS workspaces", gib=_WORKSPACE / GIB, formula="2 x 32 MiB")
    always = (work, *setup.extra)
    yield Moment(name="start", parts=engine.start())
    if flat := engine.flattened():
        yield Moment(name="start, weights made flat", parts=flat, spared=True)
    resting = (*engine.resting(), *always)
    if setup.reference == "cache":
        yield Moment(
            name="reference pass", parts=(*engine.untrained(), *always, *passes.reference(setup))
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
    layer = activations.backward(setup.shape, setup.kernels, setup.batch)
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
    if setup.shape.experts and not setup.adapters:
        wide, _ = setup.shape.expert_weights
        if sent := engine.sent(wide):
            gradient = Amount(bytes=HALF * wide, formula="4EHI")
            yield Moment(
                name="sending of the experts' gradient",
                parts=(
                    *resting, *engine.begun(), *engine.buckets(), *engine.gathered(whole=False),
                    *passes.kept(setup), passes.part("gradients", "gate and up weights' gradient", gradient),
                    *passes.held_output(setup), *sent,
                ),
            )  # fmt: skip
    if not setup.adapters:
        yield Moment(name="embedding's gradient", parts=(*resting, *engine.at_embedding()))
    yield Moment(name="gradient norm", parts=(*resting, *engine.norm()))
    yield Moment(name="optimizer's step", parts=(*resting, *engine.step()))


def fits(memory: Memory, gib: float, *, margin: float = 0.08) -> tuple[bool, float]:
    """Whether a card of `gib` holds it, and GiB to spare (negative: missing).

    `margin` is the share of the card that allocated memory cannot use: CUDA's own context, NCCL's
    buffers, and what the allocator has reserved in pieces.
    """
    usable = gib * (1 - margin)
    peak = memory.within(usable).peak
    return peak <= usable, usable - peak
