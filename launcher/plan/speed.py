"""How long an optimizer step should take, before anything was measured: arithmetic, bytes, launches.

Of 20 measured steps of 7B (docs/benchmarks.md) each is within 25 %; what short runs then measure corrects it
(`search`). Arithmetic counts as in "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al.,
2022, appendix B), the traffic of the ZeRO stages as in "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models" (Rajbhandari et al., 2020, section 7).
"""

from launcher.machine.datasheets import Card
from launcher.plan.footprint import Footprint
from launcher.plan.memory.setup import HALF

# shares of the peak that large kernels of each kind reach
_MATMUL = 0.78
_FLASH = 0.45
_SDPA = 0.25
# what DeepSpeed's buckets reach of a link's data sheet, and how much of that nothing hides: 135 of 450 GB/s
# and 16 of 27 % of a step on two H200 (docs/benchmarks.md)
_LINK = 0.3
_SHOWN = 0.6
# positions at which matrix products reach half of that
_HALF_FULL = 150
# kernels of one layer and pass, and of one micro-batch beside the layers
_KERNELS = 22
_KERNELS_AROUND = 150
# Seconds that Python takes for one layer and pass while the device waits, on hosts of H100 and H200. DeepSpeed
# calls hooks around every module. Under ZeRO-3 they gather and release weights, which shows in the backward
# pass and in what a checkpointed layer computes again; its own linears take three times as long as plain ones.
_HOOKS = 0.0013
_GATHERS = 0.015
_GATHERS_OF_PLAIN_LINEARS = 0.0045
# With plain linears the host works beside the device, but a pass through a layer takes it so long at least.
_FEEDING = 0.009
# bytes a second to the host and back, and of its own memory
_HOST_LINK = 25e9
_HOST_MEMORY = 60e9


def step_seconds(footprint: Footprint, card: Card) -> float:
    zero = footprint.zero
    times = footprint.plan.accumulation
    sent = _sent(footprint) / (_LINK * card.link)
    if zero is not None:
        # the rest hides behind the backward pass; ZeRO-1 reduces once a step, as does no ZeRO at all:
        # deepspeed/runtime/engine.py::DeepSpeedEngine.allreduce_gradients[elif self.is_gradient_accumulation_boundary]
        sent *= _SHOWN * (times if zero.stage > 1 else 1)
    return times * _micro_batch(footprint, card) + sent + _optimizer(footprint, card)


def _trained(footprint: Footprint) -> int:
    adapters = footprint.adapters
    return adapters.parameters(footprint.shape) if adapters else footprint.shape.parameters


def _micro_batch(footprint: Footprint, card: Card) -> float:
    shape = footprint.shape
    batch = footprint.typical
    tokens = batch.tokens
    adapted = footprint.adapters is not None
    # a backward pass costs two forward ones, but for frozen weights
    passes = (2.0 if adapted else 3.0) + (1.0 if footprint.checkpointing else 0.0)
    if footprint.plan.stage.refers and not footprint.plan.stage.entry.caches_reference:
        passes += 0.0 if footprint.plan.values.get("precompute_ref_log_probs") else 1.0
    rate = card.flops * _MATMUL * tokens / (tokens + _HALF_FULL)
    a_pass = 2 * shape.multiplied * tokens / rate
    # flash follows the rows, a mask makes a square of all of it
    flash = footprint.attention.startswith("flash")
    width: float = batch.width
    if footprint.packed:
        width = footprint.rows.mean if flash else tokens
    times, share = (2, _FLASH) if flash else (4, _SDPA)
    a_pass += shape.layers * (times * tokens * width * shape.query / (card.flops * share))
    a_pass += _moved(footprint) * tokens / card.bandwidth
    kernels = (2 if adapted else 1) * passes * (_KERNELS * shape.layers + _KERNELS_AROUND)
    # what runs between launches is hidden, what is shorter is not
    device = max(passes * a_pass, kernels * card.launch) + 0.02 * kernels * card.launch
    return _beside_host(footprint, passes, device)


def _beside_host(footprint: Footprint, passes: float, device: float) -> float:
    """Seconds of a micro-batch that takes `device` seconds on the card, with what DeepSpeed's Python code adds."""
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


def _moved(footprint: Footprint) -> float:
    """Bytes a position moves through memory in one pass, beside matrix products and attention."""
    shape = footprint.shape
    liger = footprint.liger
    norms, gates = (10, 3) if liger else (22, 6)
    layer: float = HALF * (norms * shape.hidden + gates * shape.intermediate)
    # casts of every operand
    layer = 1.5 * layer if footprint.autocast else layer
    return shape.layers * layer + (2 if liger else 6) * shape.vocab


def _sent(footprint: Footprint) -> float:
    """Bytes that one device sends at a time: gradients, and what ZeRO-3 gathers too.

    All but ZeRO-3 all-reduce, which sends everything twice
    (deepspeed/runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer.allreduce_bucket[dist.all_reduce]). What ZeRO-3
    gathers to compute a checkpointed layer again it keeps for that layer's backward pass.
    """
    zero = footprint.zero
    processes = footprint.plan.processes
    share = (processes - 1) / processes
    reduced = _trained(footprint) * (HALF if zero is None else zero.communication) * share
    if zero is None or zero.stage < 3:
        return 2 * reduced
    return reduced + 2 * HALF * footprint.shape.parameters * share


def _optimizer(footprint: Footprint, card: Card) -> float:
    """The optimizer's pass over its states, and sending the new weights around."""
    zero = footprint.zero
    processes = footprint.plan.processes
    trained = _trained(footprint)
    if zero is None:
        return 30 * trained / card.bandwidth
    own = trained / processes
    seconds = 30 * own / card.bandwidth
    if zero.offload_optimizer:
        # states on the host: gradients there, weights back, Adam at the host's speed
        seconds += own * (2 * HALF / _HOST_LINK + 30 / _HOST_MEMORY)
    if zero.offload_params:
        seconds += 3 * HALF * own / _HOST_LINK
    if zero.stage < 3 and processes > 1:
        seconds += HALF * trained / (_LINK * card.link)
    return seconds
