"""What weights, gradients and the optimizer take: each engine enters its allocations into a
`Ledger`.

What DeepSpeed's stages keep follows "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (Rajbhandari et al., 2020), the temporary copies are read from DeepSpeed 0.18.9 and measured
there: a test runs its engine and counts every allocation.

In formulas P are all parameters, A those of adapters, N the ranks, V and H the embedding's sides.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from launcher.artifacts.architecture import Shape
from launcher.plan.memory.phases import (
    BUCKETS,
    EMBEDDING,
    FIRST_BUCKET,
    FORWARD,
    LAYER,
    LOSS,
    NORM,
    OUTPUT,
    OUTPUT_SENT,
    PHASES,
    REFERENCE,
    SECOND_BUCKET,
    STEP,
    STEPS,
    Ledger,
)
from launcher.plan.memory.setup import FULL, HALF, Setup, Sharding, Zero, refuse_undescribed

# where each allocation is made; torch's Adam where it is not the fused one
_ADAM = "torch/optim/adam.py::_multi_tensor_adam[exp_avg_sq_sqrt = torch._foreach_sqrt #4]"
_SKIP_STEP_ADAM = (
    "olmo_core/optim/adamw.py::foreach_adamw_step[updates = torch._foreach_div(exp_avgs, denoms)]"
)
_WEIGHTS_PARTITION = (
    "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer"
    ".__init__[weights_partition = #1]"
)
_NORM = (
    "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer"
    ".get_grad_norm_direct[get_norm_dtype]"
)
_FLAT = (
    "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer"
    ".step[self.flatten(self.averaged_gradients]"
)
_COPY = (
    "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer"
    ".copy_grads_in_partition[int(total_size]"
)
_REDUCED = (
    "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer"
    ".reduce_ipg_grads[only optimizer]"
)
_BUCKET = (
    "deepspeed/runtime/zero/stage3.py::DeepSpeedZeroOptimizer_Stage3"
    "._setup_for_real_optimizer[= torch.empty]"
)


def enter(setup: Setup, ledger: Ledger) -> None:
    """Enter what the engine of this setup allocates; raises InvalidConfig (`unknown-memory`)."""
    zero = setup.zero
    if setup.sharding is not None:
        _enter_fsdp(setup, setup.sharding, ledger)
    elif zero is None:
        _enter_plain(setup, ledger)
    elif setup.quantised is not None:
        raise refuse_undescribed("DeepSpeed with quantised weights is not described")
    elif zero.stage in (1, 2):
        _enter_zero_1_and_2(setup, zero, ledger)
    elif zero.stage == 3:
        _enter_zero_3(setup, zero, ledger)
    else:
        raise refuse_undescribed(f"DeepSpeed without ZeRO (stage {zero.stage}) is not described")


def _list_phases_from_second_step(setup: Setup) -> tuple[str, ...]:
    """The phases that what the first step makes is alive in: not a reference pass beforehand."""
    if setup.reference == "cache":
        return STEPS
    return PHASES


def _list_accumulating_phases(setup: Setup) -> set[str]:
    """The phases up to the backward pass, where gradients of earlier micro-batches wait in them."""
    if setup.accumulation == 1:
        return set()
    return {REFERENCE, FORWARD, LOSS, OUTPUT} & {*_list_phases_from_second_step(setup)}


def _enter_plain(setup: Setup, ledger: Ledger) -> None:
    """No DeepSpeed: one process, or torch's DistributedDataParallel."""
    shape = setup.shape
    add = ledger.add
    width = setup.weight_bytes
    trained = setup.trained
    linears = shape.linear_elements
    quantised = setup.quantised
    if quantised is None:
        add(PHASES, "weights", "weights", width * shape.parameters, f"{width}P")
    else:
        name = "linear weights (4 bits and their scales)"
        why = f"{quantised.bytes:.3f} x {linears:,}"
        source = "bitsandbytes/functional.py"
        add(PHASES, "weights", name, quantised.bytes * linears, why, source)
        rest = shape.parameters - linears
        add(PHASES, "weights", "other weights", width * rest, f"{width} x the rest")
    _enter_other_models(setup, ledger, width, f"{width}P")
    states = setup.state_bytes
    if states is None:
        states = 2.0 * setup.gradient_bytes
    steps = _list_phases_from_second_step(setup)
    why = f"{states:g} x trained parameters"
    add(steps, "optimizer", "Adam's two states", states * trained, why)
    gradients = setup.gradient_bytes * trained
    if setup.processes > 1:
        why = "DistributedDataParallel's buckets: one copy of the gradients"
        add(steps, "communication", "gradient buckets", gradients, why)
    live = {EMBEDDING, STEP}
    if setup.accumulation > 1:
        live |= {*_list_accumulating_phases(setup), OUTPUT_SENT, LAYER}
    add(live, "gradients", "gradients", gradients, f"{setup.gradient_bytes} x trained")
    if not setup.fused_optimizer:
        _enter_square_roots(ledger, states / 2 * trained, f"{states / 2:g} x trained")
    _enter_embedding_gradient(setup, ledger)
    if not setup.casts:
        return
    name = "autocast's copies"
    why = "bf16 copies that autocast keeps: 2 x the layers' linear weights"
    copies = HALF * linears
    if setup.checkpointing:
        # released at the end of the pass; the backward pass casts a layer's again
        add({FORWARD}, "weights", name, copies, why)
        add({OUTPUT_SENT, LAYER}, "weights", name, copies // shape.layers, f"{why}, of one")
    else:
        add({LOSS, OUTPUT, OUTPUT_SENT, LAYER}, "weights", name, copies, why)


def _enter_other_models(
    setup: Setup, ledger: Ledger, width: int, formula: str, ranks: int = 1
) -> None:
    """Adapters, and the second model that TRL's DPO compares with."""
    if setup.adapters is not None:
        why = f"{setup.adapters.bytes}A"
        ledger.add(PHASES, "weights", "adapters", setup.adapter_bytes, why)
    if setup.reference == "model":
        size = width * setup.shape.parameters / ranks
        ledger.add(PHASES, "weights", "reference model", size, formula)


def _enter_square_roots(ledger: Ledger, size: float, formula: str) -> None:
    """What torch's Adam makes beside its states where it is not the fused one."""
    ledger.add({STEP}, "optimizer", "square roots of a state", size, formula, _ADAM)


def _enter_embedding_gradient(setup: Setup, ledger: Ledger, sent: float = 0, why: str = "") -> None:
    """A dense gradient; a tied output layer's is added to it, out of place, before it is sent.

    `sent` are the bytes of the copy that is made to send it.
    """
    width = setup.gradient_bytes
    size = width * setup.shape.embedding
    name = "embedding's gradient"
    if setup.shape.tied and 2 * size > sent:
        formula = f"3 x {width}VH: its own, the output layer's, their sum"
        ledger.add({EMBEDDING}, "gradients", name, 3 * size, formula)
    else:
        ledger.add({EMBEDDING}, "gradients", name, size, f"{width}VH")
        ledger.add({EMBEDDING}, "communication", "gradient being sent", sent, why)


def _enter_fsdp(setup: Setup, sharding: Sharding, ledger: Ledger) -> None:
    """FSDP2 with a group a layer: fp32 weights, gradients and states sharded, bf16 where they are
    used.

    The embedding is a group of its own, the output layer belongs to the root (olmo_core's
    `Transformer.apply_fsdp`, wrapping strategy `blocks`). Neither gets an input that has a
    gradient: both wait for the end of the backward pass
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py: `_root_post_backward_final_callback`),
    where they are reduced in turn.
    """
    shape = setup.shape
    add = ledger.add
    part = FULL * shape.parameters / sharding.shards
    add(PHASES, "weights", "weights (fp32), this rank's", part, "4P/N")
    # every layer has its own, for good: an empty cache is taken for none
    # (olmo_core/nn/rope.py::RotaryEmbeddingBase.__init__[self._cache = (cache])
    width = setup.batch.width
    if setup.reference_batch is not None:
        width = max(width, setup.reference_batch.width)
    name = "rope: sines and cosines of each layer (fp32)"
    why = f"{shape.layers} x 8 x {width:,} x {shape.head_dim}"
    add(PHASES, "other", name, shape.layers * 2 * FULL * width * shape.head_dim, why)
    steps = _list_phases_from_second_step(setup)
    add(steps, "optimizer", "Adam's two states (fp32)", 2 * part, "8P/N")
    live = {EMBEDDING, STEP, *_list_accumulating_phases(setup)}
    if setup.accumulation > 1:
        live.add(LAYER)
    add(live, "gradients", "gradients (fp32), this rank's", part, "4P/N")
    name = "gathered weights (bf16)"
    add({REFERENCE}, "weights", name, HALF * shape.embedding, f"2 x {shape.embedding:,}")
    # the output layer, for all of the backward pass, and the next layer ahead: a layer itself is
    # released before its gradients are reduced, which is its fullest point
    gathered = shape.layer_parameters + shape.embedding
    add({LOSS, OUTPUT, LAYER}, "weights", name, HALF * gathered, f"2 x {gathered:,}")
    reduced = (HALF + FULL) * shape.layer_parameters
    why = "6 x one layer, bf16 and fp32"
    add({LAYER}, "communication", "gradients being reduced", reduced, why)
    large = FULL * shape.embedding
    add({EMBEDDING}, "communication", "large gradient being reduced", large, "4VH")
    name = "embedding's and output layer's gradients, whole"
    whole = large * (1 - 1 / sharding.shards)
    add({EMBEDDING}, "gradients", name, whole, "4VH - 4VH/N")
    if not setup.fused_optimizer:
        _enter_square_roots(ledger, part, "4P/N")
    copies = setup.step_copies
    name = "squares of the gradients, denominators, updates"
    add({STEP}, "optimizer", name, copies * part, f"{copies} x 4P/N", _SKIP_STEP_ADAM)


def _enter_zero_1_and_2(setup: Setup, zero: Zero, ledger: Ledger) -> None:
    """ZeRO-2: bf16 weights everywhere, gradients, fp32 weights and states sharded over the ranks.

    ZeRO-1: gradients are whole until all micro-batches' have been reduced, once
    (deepspeed/runtime/engine.py::DeepSpeedEngine.allreduce_gradients[Communicate only at]).
    The last rank owns what the backward pass begins with and the first what it ends with: each
    phase is that of the rank that has most then.
    """
    shape = setup.shape
    add = ledger.add
    trained = setup.trained
    part = trained / setup.processes
    on_card = not zero.offload_optimizer
    parts = [OwnedPart(part, part)]
    if setup.adapters is None:
        parts = cut_evenly(shape.sizes, setup.processes)
    add(PHASES, "weights", "weights (bf16)", HALF * shape.parameters, "2P")
    _enter_other_models(setup, ledger, HALF, "2P")
    steps = _list_phases_from_second_step(setup)
    if on_card:
        add(PHASES, "optimizer", "weights (fp32)", FULL * part, "4P/N", _WEIGHTS_PARTITION)
        name = "Adam's two states (fp32)"
        add(steps, "optimizer", name, 2 * FULL * part, "8P/N", "made in the first step")
    else:
        largest = trained
        if setup.adapters is None:
            largest = max(shape.sizes)
        name = "buffer for offloaded gradients"
        add(steps, "communication", name, HALF * largest, "2 x the largest weight")
    _enter_zero_gradients(setup, zero, ledger, max(part.elements for part in parts))
    live = {OUTPUT_SENT, LAYER, *BUCKETS, EMBEDDING}
    if zero.stage == 1:
        # nothing releases them before the reduction
        # (deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer._release_ipg_buffers)
        live |= _list_accumulating_phases(setup)
    count = 2 if zero.overlap else 1
    why = f"{count} x 2 x {zero.bucket:,}"
    add(live, "communication", "gradient buckets", HALF * count * zero.bucket, why)
    # a flat copy where several ranks' parts are in it, one more in the communication type
    elements = min(zero.bucket, trained)
    width = zero.communication
    sent = 0
    if setup.processes > 1 and elements == zero.bucket:
        sent += HALF * elements
    if width != HALF:
        sent += width * elements
    why = f"{width} x {elements:,.0f} to send"
    add(BUCKETS, "communication", "bucket being sent", sent, why)
    large = 0
    large_why = f"{width}VH"
    if width != HALF and shape.embedding > zero.bucket:
        large = width * shape.embedding
    add({OUTPUT_SENT}, "communication", "large gradient being sent", large, large_why)
    _enter_embedding_gradient(setup, ledger, *max((large, large_why), (sent, why)))
    if on_card:
        fullest = max(parts, key=_count_norm_bytes)
        why = f"2 x {fullest.elements:,.0f}"
        add({NORM}, "gradients", "gradients of this rank", HALF * fullest.elements, why)
        wide = 2 * FULL * fullest.largest
        add({NORM}, "gradients", "one of them in fp64", wide, "8 x the largest", _NORM)
        add({STEP}, "gradients", "the same, flat", HALF * part, "2P/N", _FLAT)
        add({STEP}, "gradients", "the same, fp32", FULL * part, "4P/N", _FLAT)


def _enter_zero_gradients(setup: Setup, zero: Zero, ledger: Ledger, fullest: float) -> None:
    """Gradients of ZeRO-1 and 2: all of a rank's are allocated when the first have been sent.

    `fullest` are the elements of the rank that owns most.
    """
    shape = setup.shape
    add = ledger.add
    accumulating = _list_accumulating_phases(setup)
    part = HALF * fullest
    formula = f"2 x {fullest:,.0f}: P/N, and the rest of weights that the boundaries cut"
    if not zero.offload_optimizer:
        live = {EMBEDDING, STEP, SECOND_BUCKET}
        if SECOND_BUCKET not in find_bucket_phases(setup):
            live = {EMBEDDING, STEP, LAYER, FIRST_BUCKET}
        add(live, "gradients", "gradients of this rank", part, formula, _COPY)
        if zero.stage == 2 and setup.accumulation > 1:
            live = {*accumulating, OUTPUT_SENT, LAYER, *BUCKETS, EMBEDDING}
            add(live, "gradients", "gradients so far", part, formula, _COPY)
    if zero.stage == 2:
        return
    # those of other ranks stay to the end, unless they fitted into a bucket and live there
    large = 0
    if setup.adapters is None:
        large = setup.trained - shape.smaller_than(zero.bucket + 1)
    name = "gradients of other ranks, reduced"
    why = "2 x weights larger than a bucket, less this rank's"
    add({EMBEDDING}, "gradients", name, HALF * (large - fullest), why, _REDUCED)
    if setup.accumulation == 1:
        return
    whole = HALF * setup.trained
    name = "gradients so far"
    add({*accumulating, OUTPUT_SENT}, "gradients", name, whole, "2P, not cut")
    embedding = 0
    if setup.adapters is None:
        embedding = HALF * shape.embedding
    left = whole
    if not shape.tied:
        left -= embedding
    why = "2P, without the output layer's that has gone"
    add({LAYER, *BUCKETS}, "gradients", name, left, why)
    add({EMBEDDING}, "gradients", "the embedding's so far", embedding, "2VH")


def find_bucket_phases(setup: Setup) -> dict[str, int]:
    """When full buckets are sent during the layers' backward pass: the layers that are done by
    then.

    The output layer's gradient is in the first, if not too large; adapters fill none. The second
    counts where nothing has been sent before the last layer is done.
    """
    shape = setup.shape
    zero = setup.zero
    if zero is None:
        return {}
    is_sent_alone = not shape.tied and shape.embedding > zero.bucket
    passed = shape.layers
    if setup.adapters is None:
        room = zero.bucket
        if not shape.tied and not is_sent_alone:
            room -= shape.embedding
        passed = min(passed, room // shape.layer_parameters)
    phases = {FIRST_BUCKET: passed}
    if zero.stage < 3 and passed and not is_sent_alone:
        phases[SECOND_BUCKET] = 2 * passed
    return phases


class OwnedPart(NamedTuple):
    """Elements of the weights that a rank has a part of, and of the largest such part."""

    elements: float
    largest: float


def _count_norm_bytes(part: OwnedPart) -> float:
    """What the norm of a rank's gradients takes: all of them, and the largest in fp64."""
    return HALF * part.elements + 2 * FULL * part.largest


def cut_evenly(sizes: Sequence[int], ranks: int) -> list[OwnedPart]:
    """The parts of the ranks where all weights, in a row, are cut evenly
    (deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.get_partition_info).
    """
    share = -(-sum(sizes) // ranks)
    parts = [OwnedPart(0, 0)] * ranks
    start = 0
    for size in sizes:
        end = start + size
        last = (end - 1) // share
        for rank in range(start // share, last + 1):
            begin_inside = max(start, rank * share)
            end_inside = min(end, (rank + 1) * share)
            part = parts[rank]
            largest = max(part.largest, end_inside - begin_inside)
            parts[rank] = OwnedPart(part.elements + size, largest)
        start = end
    return parts


def _enter_zero_3(setup: Setup, zero: Zero, ledger: Ledger) -> None:
    """ZeRO-3: everything sharded over the ranks; weights are gathered where they are used."""
    shape = setup.shape
    ranks = setup.processes
    add = ledger.add
    part = setup.trained / ranks
    if not zero.offload_params:
        weights = HALF * shape.parameters / ranks
        add(PHASES, "weights", "weights (bf16), this rank's", weights, "2P/N")
    small = HALF * shape.smaller_than(zero.persistence)
    why = f"2 x weights under {zero.persistence:,}"
    add(PHASES, "weights", "small weights, whole", small, why)
    _enter_other_models(setup, ledger, HALF, "2P/N", ranks)
    if not zero.offload_optimizer:
        add(PHASES, "gradients", "gradients (bf16), this rank's", HALF * part, "2P/N")
        add(PHASES, "optimizer", "weights (fp32)", FULL * part, "4P/N")
        name = "Adam's two states (fp32)"
        add(_list_phases_from_second_step(setup), "optimizer", name, 2 * FULL * part, "8P/N")
        group = min(part, zero.sub_group)
        why = f"4 x {group:,.0f}"
        add({STEP}, "gradients", "fp32, one sub-group", FULL * group, why)
        if setup.fused_optimizer:
            flat_why = f"2 x {group:,.0f}"
            add({STEP}, "gradients", "flat, one sub-group", HALF * group, flat_why)
        else:
            # by then the flat one has gone
            _enter_square_roots(ledger, FULL * group, why)
    width = zero.communication
    # made with the engine, for good, however small the model is
    why = f"{width} x {zero.bucket:,}"
    add(PHASES, "communication", "gradient bucket", width * zero.bucket, why, _BUCKET)
    if ranks > 1 or zero.offload_params:
        _enter_gathered_weights(setup, zero, ledger)
    elements = min(zero.bucket, setup.trained)
    sent = width * elements
    why = f"{width} x {elements:,.0f} to send"
    add({FIRST_BUCKET}, "communication", "bucket being sent", sent, why)
    copies = 0
    if width != HALF:
        # in the communication type
        copies += 1
    if shape.embedding % ranks > 0:
        # filled up to be cut evenly:
        # deepspeed/runtime/comm/coalesced_collectives.py::reduce_scatter_coalesced[if len(tensors]
        copies += 1
    is_large = shape.embedding > zero.bucket
    large = 0
    if is_large:
        large = copies * width * shape.embedding
    large_why = f"{copies * width}VH"
    add({OUTPUT_SENT}, "communication", "large gradient being sent", large, large_why)
    _enter_embedding_gradient(setup, ledger, *max((large, large_why), (sent, why)))
    if zero.overlap and ranks > 1 and is_large and not shape.tied and not setup.adapters:
        # Sent on a stream of its own, the output layer's gradient and weight are still there when
        # the layer before it computes: 1.9 to 2.0 GiB in seven measured runs of 7B, on two and on
        # four cards.
        size = HALF * shape.embedding
        add({LAYER}, "communication", "output layer's gradient, being sent", size, "2VH")
        add({LAYER}, "weights", "output layer's weight, gathered", size, "2VH")


def _enter_gathered_weights(setup: Setup, zero: Zero, ledger: Ledger) -> None:
    """Weights of other ranks: one stays while it is used again within the reuse distance.

    A single rank takes its own as they are
    (deepspeed/runtime/zero/partition_parameters.py::Init._allgather_params_coalesced[_no_gather_coalesced]).
    """
    shape = setup.shape
    at_loss = _count_gathered_at_loss(shape, zero)
    in_layer = shape.parameters
    if zero.reuse < 2 * shape.parameters:
        used = shape.widest_linear
        if setup.checkpointing:
            used = shape.layer_parameters
        in_layer = min(used + zero.prefetch, in_layer)
    loss = {LOSS, OUTPUT}
    layers = {LAYER, FIRST_BUCKET}
    if setup.reference == "cache":
        # a pass beforehand begins as the loss does
        loss.add(REFERENCE)
    else:
        # one in each step begins as a layer's backward pass
        layers.add(REFERENCE)
    for phases, elements in (
        (loss, at_loss),
        # the output layer has been released again
        ({OUTPUT_SENT}, at_loss - shape.embedding),
        (layers, in_layer),
        ({EMBEDDING}, shape.embedding),
    ):
        why = f"2 x {elements:,.0f}"
        ledger.add(phases, "weights", "gathered weights", HALF * elements, why)
    if zero.plain_linears and not setup.checkpointing:
        # a view of the gathered weight is saved for the backward pass and outlives the release of
        # the parameter (deepspeed/runtime/zero/linear.py has the function that saves the parameter
        # itself)
        phases = {LOSS, OUTPUT, OUTPUT_SENT, LAYER, FIRST_BUCKET}
        elements = shape.linear_elements
        why = f"2 x {elements:,}"
        ledger.add(phases, "weights", "weights kept by autograd", HALF * elements, why)


def _count_gathered_at_loss(shape: Shape, zero: Zero) -> float:
    """Elements of the weights that are gathered at the loss.

    From a layer's end to its backward pass lie twice what is after it, and the output layer.
    """
    layer = shape.layer_parameters
    reach = min(zero.reuse, 2 * shape.parameters)
    left = reach - 2.0 * shape.embedding
    gathered = float(shape.embedding)
    near = math.ceil(left / (2 * layer))
    count = min(shape.layers, near)
    if count > 0:
        # all of them whole but the furthest
        whole = (count - 1) * layer
        gathered += whole + min(left - 2 * whole, layer)
    if near >= shape.layers and not shape.tied:
        # the embedding itself, which a tied model has counted
        gathered += shape.embedding
    return gathered
