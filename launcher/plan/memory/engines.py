"""What weights, gradients and the optimizer take: each engine enters its allocations into a `Ledger`.

What DeepSpeed's stages keep follows "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(Rajbhandari et al., 2020), the temporary copies are read from DeepSpeed 0.18.9 and measured there: a
test runs its engine and counts every allocation.

In formulas P are all parameters, A those of adapters, N the ranks, V and H the embedding's sides.
"""

import math
from collections.abc import Sequence

from launcher.plan.memory import phases as at
from launcher.plan.memory.setup import FULL, HALF, Setup, Sharding, Zero, undescribed


def enter(setup: Setup, ledger: at.Ledger) -> None:
    """All that the engine of this setup allocates; raises InvalidConfig (`unknown-memory`)."""
    zero = setup.zero
    if setup.sharding is not None:
        _fsdp(setup, setup.sharding, ledger)
    elif zero is None:
        _plain(setup, ledger)
    elif setup.quantised is not None:
        raise undescribed("DeepSpeed with quantised weights is not described")
    elif zero.stage in (1, 2):
        _partitioned(setup, zero, ledger)
    elif zero.stage == 3:
        _sharded(setup, zero, ledger)
    else:
        raise undescribed(f"DeepSpeed without ZeRO (stage {zero.stage}) is not described")


def _steps(setup: Setup) -> list[str]:
    """The phases of a step, from the second one on: a reference pass beforehand is none."""
    return [name for name in at.PHASES if name != at.REFERENCE or setup.reference != "cache"]


def _ahead(setup: Setup) -> list[str]:
    """The phases of a step up to the backward pass: gradients of earlier micro-batches wait."""
    return [name for name in (at.REFERENCE, at.FORWARD, at.LOSS, at.OUTPUT) if name in _steps(setup)]


def _plain(setup: Setup, ledger: at.Ledger) -> None:
    """No DeepSpeed: one process, or torch's DistributedDataParallel."""
    width = setup.weight_bytes
    steps = _steps(setup)
    shape = setup.shape
    add = ledger.add
    trained = setup.trained
    own = setup.gradient_bytes
    few = shape.linear_elements
    if (quantised := setup.quantised) is None:
        add(at.PHASES, "weights", "weights", width * shape.parameters, f"{width}P")
    else:
        name = "linear weights (4 bits and their scales)"
        why = f"{quantised.bytes:.3f} x {few:,}"
        add(at.PHASES, "weights", name, quantised.bytes * few, why, "bitsandbytes/functional.py")
        add(at.PHASES, "weights", "other weights", width * (shape.parameters - few), f"{width} x the rest")
    _beside(setup, ledger, width, f"{width}P")
    states = setup.states
    add(steps, "optimizer", "Adam's two states", states * trained, f"{states:g} x trained parameters")
    if setup.processes > 1:
        why = "DistributedDataParallel's buckets: one copy of the gradients"
        add(steps, "communication", "gradient buckets", own * trained, why)
    ahead = [*_ahead(setup), at.OUTPUT_SENT, at.LAYER] if setup.accumulation > 1 else []
    add([at.EMBEDDING, at.STEP, *ahead], "gradients", "gradients", own * trained, f"{own} x trained")
    if not setup.fused_optimizer:
        _roots(ledger, states / 2 * trained, f"{states / 2:g} x trained")
    _embedding_gradient(setup, ledger)
    if setup.casts:
        why = "bf16 copies that autocast keeps: 2 x the layers' linear weights"
        whole = HALF * few
        if setup.checkpointing:
            # forgotten at the end of the pass; the backward pass casts a layer's again
            add([at.FORWARD], "weights", "autocast's copies", whole, why)
            add([at.OUTPUT_SENT, at.LAYER], "weights", "autocast's copies", whole // shape.layers, f"{why}, of one")
        else:
            live = [at.LOSS, at.OUTPUT, at.OUTPUT_SENT, at.LAYER]
            add(live, "weights", "autocast's copies", whole, why)


def _beside(setup: Setup, ledger: at.Ledger, width: int, formula: str, ranks: int = 1) -> None:
    """Adapters, and the second model that TRL's DPO compares with."""
    if setup.adapters is not None:
        ledger.add(at.PHASES, "weights", "adapters", setup.adapter_bytes, f"{setup.adapters.bytes}A")
    if setup.reference == "model":
        size = width * setup.shape.parameters / ranks
        ledger.add(at.PHASES, "weights", "reference model", size, formula)


def _roots(ledger: at.Ledger, size: float, formula: str) -> None:
    """What torch's Adam makes beside its states where it is not the fused one."""
    ledger.add(
        [at.STEP],
        "optimizer",
        "square roots of a state",
        size,
        formula,
        "torch/optim/adam.py::_multi_tensor_adam[exp_avg_sq_sqrt = torch._foreach_sqrt #4]",
    )


def _embedding_gradient(setup: Setup, ledger: at.Ledger, *copies: tuple[float, str]) -> None:
    """A dense gradient; a tied output layer's is added to it, out of place, before it is sent.

    `copies` are those made to send it, or a bucket: the larger one counts.
    """
    width = setup.gradient_bytes
    one = width * setup.shape.embedding
    added = 2 * one if setup.shape.tied else 0
    sent, why = max(copies, default=(0.0, ""))
    if added > sent:
        formula = f"3 x {width}VH: its own, the output layer's, their sum"
        ledger.add([at.EMBEDDING], "gradients", "embedding's gradient", one + added, formula)
        return
    ledger.add([at.EMBEDDING], "gradients", "embedding's gradient", one, f"{width}VH")
    ledger.add([at.EMBEDDING], "communication", "gradient being sent", sent, why)


def _fsdp(setup: Setup, sharding: Sharding, ledger: at.Ledger) -> None:
    """FSDP2 with a group a layer: fp32 weights, gradients and states in parts, bf16 where they are used.

    The embedding is a group of its own, the output layer belongs to the root (olmo_core's
    `Transformer.apply_fsdp`, wrapping strategy `blocks`). Neither is given anything that has a gradient: both
    wait for the end of the backward pass (torch/distributed/fsdp/_fully_shard/_fsdp_state.py:
    `_root_post_backward_final_callback`), where they are reduced in turn.
    """
    shape = setup.shape
    add = ledger.add
    own = shape.parameters / sharding.shards
    large = FULL * shape.embedding
    add(at.PHASES, "weights", "weights (fp32), this rank's", FULL * own, "4P/N")
    # every layer has its own, for good: an empty cache is taken for none
    # (olmo_core/nn/rope.py::RotaryEmbeddingBase.__init__[self._cache = (cache])
    width = max(setup.batch.width, (setup.reference_batch or setup.batch).width)
    name = "rope: sines and cosines of each layer (fp32)"
    why = f"{shape.layers} x 8 x {width:,} x {shape.head_dim}"
    add(at.PHASES, "other", name, shape.layers * 2 * FULL * width * shape.head_dim, why)
    add(_steps(setup), "optimizer", "Adam's two states (fp32)", 2 * FULL * own, "8P/N")
    live = [at.EMBEDDING, at.STEP, *([*_ahead(setup), at.LAYER] if setup.accumulation > 1 else [])]
    add(live, "gradients", "gradients (fp32), this rank's", FULL * own, "4P/N")
    # the output layer, for all of the backward pass, and the next layer ahead: a layer itself is let go
    # before its gradients are reduced, which is its fullest point
    ahead = shape.layer_parameters + shape.embedding
    for phases, elements in (([at.REFERENCE], shape.embedding), ([at.LOSS, at.OUTPUT, at.LAYER], ahead)):
        add(phases, "weights", "gathered weights (bf16)", HALF * elements, f"2 x {elements:,}")
    reduced = (HALF + FULL) * shape.layer_parameters
    why = "6 x one layer, bf16 and fp32"
    add([at.LAYER], "communication", "gradients being reduced", reduced, why)
    add([at.EMBEDDING], "communication", "large gradient being reduced", large, "4VH")
    name = "embedding's and output layer's gradients, whole"
    whole = large * (1 - 1 / sharding.shards)
    add([at.EMBEDDING], "gradients", name, whole, "4VH - 4VH/N")
    if not setup.fused_optimizer:
        _roots(ledger, FULL * own, "4P/N")


def _partitioned(setup: Setup, zero: Zero, ledger: at.Ledger) -> None:
    """ZeRO-2: bf16 weights everywhere, gradients, fp32 weights and states cut into one part a rank.

    ZeRO-1: gradients are whole until all micro-batches' have been reduced, once
    (deepspeed/runtime/engine.py::DeepSpeedEngine.allreduce_gradients[elif self.is_gradient_accumulation_boundary]).
    The last rank owns what the backward pass begins with and the first what it ends with: each phase is that of the
    rank that has most then.
    """
    shape = setup.shape
    trained = setup.trained
    steps = _steps(setup)
    add = ledger.add
    own = trained / setup.processes
    on_card = not zero.offload_optimizer
    owned = [(own, own)] if setup.adapters else cut(shape.sizes, setup.processes)
    add(at.PHASES, "weights", "weights (bf16)", HALF * shape.parameters, "2P")
    _beside(setup, ledger, HALF, "2P")
    if on_card:
        add(
            at.PHASES,
            "optimizer",
            "weights (fp32)",
            FULL * own,
            "4P/N",
            "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.__init__[weights_partition = #1]",
        )
        add(steps, "optimizer", "Adam's two states (fp32)", 2 * FULL * own, "8P/N", "made in the first step")
    else:
        buffer = HALF * (trained if setup.adapters else max(shape.sizes))
        add(steps, "communication", "buffer for offloaded gradients", buffer, "2 x the largest weight")
    _partitioned_gradients(setup, zero, ledger, max(kept for kept, _ in owned))
    buckets = 2 if zero.overlap else 1
    # under ZeRO-1 nothing lets them go before the reduction
    # (deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer._release_ipg_buffers)
    ahead = _ahead(setup) if zero.stage == 1 and setup.accumulation > 1 else []
    live = {at.OUTPUT_SENT, at.LAYER, *at.BUCKETS, at.EMBEDDING, *ahead}
    why = f"{buckets} x 2 x {zero.bucket:,}"
    add(live, "communication", "gradient buckets", HALF * buckets * zero.bucket, why)
    # a flat copy where several ranks' parts are in it, one more in the communication type
    elements = min(zero.bucket, trained)
    width = zero.communication
    sent = HALF * elements if setup.processes > 1 and elements == zero.bucket else 0
    sent += width * elements if width != HALF else 0
    why = f"{width} x {elements:,.0f} to send"
    add(at.BUCKETS, "communication", "bucket being sent", sent, why)
    large = width * shape.embedding if width != HALF and shape.embedding > zero.bucket else 0
    add([at.OUTPUT_SENT], "communication", "large gradient being sent", large, f"{width}VH")
    _embedding_gradient(setup, ledger, (large, f"{width}VH"), (sent, why))
    if on_card:
        kept, largest = max(owned, key=lambda one: HALF * one[0] + 2 * FULL * one[1])
        add([at.NORM], "gradients", "gradients of this rank", HALF * kept, f"2 x {kept:,.0f}")
        add(
            [at.NORM],
            "gradients",
            "one of them in fp64",
            2 * FULL * largest,
            "8 x the largest",
            "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.get_grad_norm_direct[get_norm_dtype]",
        )
        add(
            [at.STEP],
            "gradients",
            "the same, flat",
            HALF * own,
            "2P/N",
            "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.step[self.flatten(self.averaged_gradients]",
        )
        add(
            [at.STEP],
            "gradients",
            "the same, fp32",
            FULL * own,
            "4P/N",
            "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.step[self.flatten(self.averaged_gradients]",
        )


def _partitioned_gradients(setup: Setup, zero: Zero, ledger: at.Ledger, fullest: float) -> None:
    """Gradients of ZeRO-1 and ZeRO-2: room for all of a rank's is made when the first have been sent."""
    shape = setup.shape
    add = ledger.add
    so_far = "gradients so far"
    early = at.SECOND_BUCKET not in bucket_phases(setup)
    on_card = not zero.offload_optimizer
    filled = [at.EMBEDDING, at.STEP, *([at.LAYER, at.FIRST_BUCKET] if early else [at.SECOND_BUCKET])]
    part = HALF * fullest
    source = "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.copy_grads_in_partition[int(total_size]"
    formula = f"2 x {fullest:,.0f}: P/N, and the rest of weights that the boundaries cut"
    if on_card:
        add(filled, "gradients", "gradients of this rank", part, formula, source)
    if zero.stage == 2:
        if setup.accumulation > 1 and on_card:
            live = {*_ahead(setup), at.OUTPUT_SENT, at.LAYER, *at.BUCKETS, at.EMBEDDING}
            add(live, "gradients", so_far, part, formula, source)
        return
    # those of other ranks stay to the end, unless they fitted into a bucket and live there
    large = 0 if setup.adapters else setup.trained - shape.smaller_than(zero.bucket + 1)
    name = "gradients of other ranks, reduced"
    why = "2 x weights larger than a bucket, less this rank's"
    add(
        [at.EMBEDDING],
        "gradients",
        name,
        HALF * (large - fullest),
        why,
        "deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.reduce_ipg_grads[only optimizer]",
    )
    if setup.accumulation > 1:
        whole = HALF * setup.trained
        embedding = 0 if setup.adapters else HALF * shape.embedding
        add({*_ahead(setup), at.OUTPUT_SENT}, "gradients", so_far, whole, "2P, not cut")
        left = whole - (0 if shape.tied else embedding)
        why = "2P, without the output layer's that has gone"
        add({at.LAYER, *at.BUCKETS}, "gradients", so_far, left, why)
        add([at.EMBEDDING], "gradients", "the embedding's so far", embedding, "2VH")


def bucket_phases(setup: Setup) -> dict[str, int]:
    """When full buckets are sent during the layers' backward pass: the layers that are through by then.

    The output layer's gradient is in the first, if not too large; adapters fill none. The second counts
    where nothing has been sent before the last layer is through.
    """
    shape = setup.shape
    zero = setup.zero
    if zero is None:
        return {}
    passed = shape.layers
    large = not shape.tied and shape.embedding > zero.bucket
    if setup.adapters is None:
        ahead = 0 if shape.tied or large else shape.embedding
        passed = min(passed, (zero.bucket - ahead) // shape.layer_parameters)
    phases = {at.FIRST_BUCKET: passed}
    if zero.stage < 3 and passed and not large:
        phases[at.SECOND_BUCKET] = 2 * passed
    return phases


def cut(sizes: Sequence[int], ranks: int) -> list[tuple[float, float]]:
    """Elements of the weights that each rank has a part of; the largest part."""
    # deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.get_partition_info cuts them, all in a row,
    # evenly
    own = -(-sum(sizes) // ranks)
    start = 0
    owned = [(0.0, 0.0)] * ranks
    for size in sizes:
        end = start + size
        for rank in range(start // own, (end - 1) // own + 1):
            part = min(end, (rank + 1) * own) - max(start, rank * own)
            kept, largest = owned[rank]
            owned[rank] = (kept + size, max(largest, part))
        start = end
    return owned


def _sharded(setup: Setup, zero: Zero, ledger: at.Ledger) -> None:
    """ZeRO-3: everything cut into one part a rank; weights are gathered where they are used."""
    shape = setup.shape
    ranks = setup.processes
    steps = _steps(setup)
    add = ledger.add
    own = setup.trained / ranks
    if not zero.offload_params:
        add(at.PHASES, "weights", "weights (bf16), this rank's", HALF * shape.parameters / ranks, "2P/N")
    small = HALF * shape.smaller_than(zero.persistence)
    add(at.PHASES, "weights", "small weights, whole", small, f"2 x weights under {zero.persistence:,}")
    _beside(setup, ledger, HALF, "2P/N", ranks)
    if not zero.offload_optimizer:
        add(at.PHASES, "gradients", "gradients (bf16), this rank's", HALF * own, "2P/N")
        add(at.PHASES, "optimizer", "weights (fp32)", FULL * own, "4P/N")
        add(steps, "optimizer", "Adam's two states (fp32)", 2 * FULL * own, "8P/N")
        group = min(own, zero.sub_group)
        why = f"4 x {group:,.0f}"
        add([at.STEP], "gradients", "fp32, one sub-group", FULL * group, why)
        if setup.fused_optimizer:
            add([at.STEP], "gradients", "flat, one sub-group", HALF * group, f"2 x {group:,.0f}")
        else:
            # by then the flat one has gone
            _roots(ledger, FULL * group, why)
    width = zero.communication
    # made with the engine, for good, however small the model is
    why = f"{width} x {zero.bucket:,}"
    source = "deepspeed/runtime/zero/stage3.py::DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer[= torch.empty]"
    add(at.PHASES, "communication", "gradient bucket", width * zero.bucket, why, source)
    if ranks > 1 or zero.offload_params:
        # a single rank takes its own as they are
        # (deepspeed/runtime/zero/partition_parameters.py::Init._allgather_params_coalesced[_no_gather_coalesced])
        _gathered(setup, zero, ledger)
    elements = min(zero.bucket, setup.trained)
    sent = width * elements
    why = f"{width} x {elements:,.0f} to send"
    add([at.FIRST_BUCKET], "communication", "bucket being sent", sent, why)
    # in the communication type; once more where it has to be filled up to be cut evenly
    # (deepspeed/runtime/comm/coalesced_collectives.py::reduce_scatter_coalesced[if len(tensors])
    copies = int(width != HALF) + int(shape.embedding % ranks > 0)
    large = copies * width * shape.embedding if shape.embedding > zero.bucket else 0
    add([at.OUTPUT_SENT], "communication", "large gradient being sent", large, f"{copies * width}VH")
    _embedding_gradient(setup, ledger, (large, f"{copies * width}VH"), (sent, why))
    if zero.overlap and ranks > 1 and not shape.tied and not setup.adapters and shape.embedding > zero.bucket:
        # Sent on a stream of its own, the output layer's gradient and weight are still there when the layer
        # before it computes: 1.9 to 2.0 GiB in seven measured runs of 7B, on two and on four cards.
        add([at.LAYER], "communication", "output layer's gradient, being sent", HALF * shape.embedding, "2VH")
        add([at.LAYER], "weights", "output layer's weight, gathered", HALF * shape.embedding, "2VH")


def _gathered(setup: Setup, zero: Zero, ledger: at.Ledger) -> None:
    """Weights of other ranks: one stays while it is used again within the reuse distance."""
    shape = setup.shape
    parameters = setup.shape.parameters
    layer = setup.shape.layer_parameters
    reach = min(zero.reuse, 2 * parameters)
    # at the loss: from a layer's end to its backward pass lie twice what is after it, and the output layer
    left = reach - 2.0 * shape.embedding
    at_loss = float(shape.embedding)
    near = math.ceil(left / (2 * layer))
    count = min(shape.layers, near)
    if count > 0:
        at_loss += (count - 1) * layer + min(left - 2 * (count - 1) * layer, layer)
    # the embedding itself, which a tied model has counted
    at_loss += 0 if near < shape.layers or shape.tied else shape.embedding
    widest = max(out * into for out, into in shape.linears().values())
    in_layer = min((layer if setup.checkpointing else widest) + zero.prefetch, parameters)
    if zero.reuse >= 2 * parameters:
        in_layer = parameters
    reference = [at.REFERENCE]
    beforehand = at.REFERENCE not in _steps(setup)
    for elements, phases in (
        (at_loss, {at.LOSS, at.OUTPUT, *(reference if beforehand else [])}),
        # the output layer has been let go again
        (at_loss - shape.embedding, {at.OUTPUT_SENT}),
        (in_layer, {at.LAYER, at.FIRST_BUCKET, *([] if beforehand else reference)}),
        (shape.embedding, {at.EMBEDDING}),
    ):
        ledger.add(phases, "weights", "gathered weights", HALF * elements, f"2 x {elements:,.0f}")
    if zero.plain_linears and not setup.checkpointing:
        # a view of the gathered weight is saved for the backward pass and outlives the release of the parameter
        # (deepspeed/runtime/zero/linear.py has the function that saves the parameter itself)
        phases = {at.LOSS, at.OUTPUT, at.OUTPUT_SENT, at.LAYER, at.FIRST_BUCKET}
        elements = shape.linear_elements
        ledger.add(phases, "weights", "weights kept by autograd", HALF * elements, f"2 x {elements:,}")
