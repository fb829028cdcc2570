"""How long an optimizer step should take, before anything was measured: arithmetic, bytes,
launches.

Of 33 measured steps of 0.5B and 7B (docs/benchmarks.md) each is within 20 %; what short runs then
measure corrects it (`search`). Arithmetic counts as in "PaLM: Scaling Language Modeling with
Pathways" (Chowdhery et al., 2022, appendix B), the traffic of the ZeRO stages as in "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020, section 7).
"""

from launcher.machine.datasheets import Card
from launcher.plan.footprint import Footprint
from launcher.plan.memory.setup import HALF, count_trained

# shares of the peak that large kernels of each kind reach
_MATMUL = 0.78
_FLASH = 0.45
_SDPA = 0.25
# what DeepSpeed's buckets reach of a link's data sheet, and how much of that nothing hides: 135 of
# 450 GB/s and 16 of 27 % of a step on two H200 (docs/benchmarks.md)
_LINK = 0.3
_SHOWN = 0.6
# positions at which matrix products reach half of that
_HALF_FULL = 150
# kernels of one layer and pass, and of one micro-batch beside the layers
_KERNELS = 22
_KERNELS_AROUND = 150
# Seconds that Python takes for one layer and pass, on hosts of H100 and H200: a smaller micro-batch
# takes no less (0.5B, and LoRA on 7B). With LoRA it runs about twice as many modules.
_EAGER = 0.0028
# What DeepSpeed adds to it: it calls hooks around every module, while the device waits. Under
# ZeRO-3 they gather and release weights, which shows in the backward pass and in what a
# checkpointed layer computes again; its own linears take three times as long as plain ones.
_HOOKS = 0.0013
_GATHERS = 0.015
_GATHERS_OF_PLAIN_LINEARS = 0.0045
# With plain linears the host works beside the device, but a pass through a layer takes it so long
# at least.
_FEEDING = 0.009
# bytes a second to the host and back, and of its own memory
_HOST_LINK = 25e9
_HOST_MEMORY = 60e9


def predict_step_seconds(footprint: Footprint, card: Card) -> float:
    """Seconds of one optimizer step on these cards."""
    zero = footprint.zero
    accumulation = footprint.plan.accumulation
    sent = _count_sent_bytes(footprint) / (_LINK * card.link)
    if zero is not None:
        # the rest hides behind the backward pass; ZeRO-1 reduces once a step, as does no ZeRO at
        # all:
        # deepspeed/runtime/engine.py::DeepSpeedEngine.allreduce_gradients[Communicate only at]
        times = accumulation if zero.stage > 1 else 1
        sent *= _SHOWN * times
    devices = accumulation * _time_micro_batch(footprint, card) + sent
    # what is sent hides while the devices wait for the host
    host = accumulation * _time_host_alone(footprint)
    return max(devices, host) + _time_optimizer(footprint, card)


def _count_passes(footprint: Footprint) -> float:
    """Forward passes that a micro-batch costs: a backward pass is two, one on frozen weights."""
    passes = 3.0
    if footprint.adapters is not None:
        passes = 2.0
    if footprint.checkpointing:
        passes += 1
    is_referred = footprint.plan.stage.refers and not footprint.entry.caches_reference
    if is_referred and not footprint.values.get("precompute_ref_log_probs"):
        passes += 1
    return passes


def _time_micro_batch(footprint: Footprint, card: Card) -> float:
    shape = footprint.shape
    tokens = footprint.typical.tokens
    passes = _count_passes(footprint)
    rate = card.flops * _MATMUL * tokens / (tokens + _HALF_FULL)
    a_pass = 2 * shape.multiplied * tokens / rate
    a_pass += shape.layers * _time_attention(footprint, card)
    a_pass += _count_moved_bytes(footprint) * tokens / card.bandwidth
    kernels = passes * (_KERNELS * shape.layers + _KERNELS_AROUND)
    if footprint.adapters is not None:
        kernels *= 2
    # what runs between launches is hidden, what is shorter is not
    launches = kernels * card.launch
    device = max(passes * a_pass, launches) + 0.02 * kernels * card.launch
    return _add_host_time(footprint, passes, device)


def _time_host_alone(footprint: Footprint) -> float:
    """Seconds that Python takes for a micro-batch of any size; what ZeRO-3 adds is in
    `_add_host_time`.
    """
    if not footprint.plan.gpus:
        return 0.0
    layer = _EAGER
    if footprint.adapters is not None:
        layer *= 2
    zero = footprint.zero
    if zero is not None and zero.stage < 3:
        layer += _HOOKS
    return footprint.shape.layers * _count_passes(footprint) * layer


def _time_attention(footprint: Footprint, card: Card) -> float:
    """Seconds of the attention of one layer in one pass."""
    batch = footprint.typical
    query = footprint.shape.query
    if not footprint.attention.startswith("flash"):
        return 4 * batch.tokens * batch.width * query / (card.flops * _SDPA)
    width: float = batch.width
    if footprint.packed:
        # flash follows the rows, a mask makes a square of all of it
        width = footprint.rows.mean
    return 2 * batch.tokens * width * query / (card.flops * _FLASH)


def _add_host_time(footprint: Footprint, passes: float, device: float) -> float:
    """Seconds of a micro-batch with what DeepSpeed's Python code adds to those on the card."""
    zero = footprint.zero
    layers = footprint.shape.layers
    if zero is None:
        return device
    if zero.stage < 3:
        return device + layers * passes * _HOOKS
    gathered = device + layers * (passes - 2) * _GATHERS
    if not zero.plain_linears:
        return gathered
    fed = max(device, layers * passes * _FEEDING)
    return min(gathered, fed + layers * (passes - 2) * _GATHERS_OF_PLAIN_LINEARS)


def _count_moved_bytes(footprint: Footprint) -> float:
    """What a position moves through memory in one pass, beside matrix products and attention."""
    shape = footprint.shape
    if footprint.liger:
        layer: float = HALF * (10 * shape.hidden + 3 * shape.intermediate)
        logits = 2 * shape.vocab
    else:
        layer = HALF * (22 * shape.hidden + 6 * shape.intermediate)
        logits = 6 * shape.vocab
    if footprint.autocast:
        # casts of every operand
        layer *= 1.5
    return shape.layers * layer + logits


def _count_sent_bytes(footprint: Footprint) -> float:
    """What one device sends at a time: gradients, and what ZeRO-3 gathers too.

    All but ZeRO-3 all-reduce, which sends everything twice
    (deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.allreduce_bucket[dist.all_reduce]).
    What ZeRO-3 gathers to compute a checkpointed layer again it keeps for that layer's backward
    pass.
    """
    zero = footprint.zero
    processes = footprint.plan.processes
    share = (processes - 1) / processes
    width = HALF if zero is None else zero.communication
    trained = count_trained(footprint.shape, footprint.adapters)
    reduced = trained * width * share
    if zero is None or zero.stage < 3:
        return 2 * reduced
    return reduced + 2 * HALF * footprint.shape.parameters * share


def _time_optimizer(footprint: Footprint, card: Card) -> float:
    """The optimizer's pass over its states, and sending the new weights around."""
    zero = footprint.zero
    processes = footprint.plan.processes
    trained = count_trained(footprint.shape, footprint.adapters)
    if zero is None:
        return 30 * trained / card.bandwidth
    part = trained / processes
    seconds = 30 * part / card.bandwidth
    if zero.offload_optimizer:
        # states on the host: gradients there, weights back, Adam at the host's speed
        seconds += part * (2 * HALF / _HOST_LINK + 30 / _HOST_MEMORY)
    if zero.offload_params:
        seconds += 3 * HALF * part / _HOST_LINK
    if zero.stage < 3 and processes > 1:
        seconds += HALF * trained / (_LINK * card.link)
    return seconds
