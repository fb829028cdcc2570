"""The peak of torch's allocated memory on the fullest rank, in GiB, by allocation and by phase.

A run has a few phases that can be its peak: the reference pass, the loss, a layer's backward pass,
the embedding's gradient, the optimizer's step. Each is a sum of allocations; each of those carries
its formula and where that comes from. The largest phase is the peak. What is not described raises,
instead of being guessed. `activations` has the formulas of layers and loss, `engines` the weights,
gradients and the optimizer; here is what a pass has in memory at which phase.
"""

from launcher.artifacts.lengths import MicroBatch
from launcher.plan.memory import activations, engines
from launcher.plan.memory.phases import (
    BUCKETS,
    EMBEDDING,
    FORWARD,
    LAYER,
    LOSS,
    NORM,
    OUTPUT,
    OUTPUT_SENT,
    PHASES,
    REFERENCE,
    STEP,
    Ledger,
    Memory,
)
from launcher.plan.memory.setup import FULL, HALF, Setup

# cuBLAS keeps one workspace a thread that multiplies on Hopper: forward and backward
_WORKSPACE = 2 * 32 * 2**20


def estimate(setup: Setup) -> Memory:
    """The peak of a run and what it is made of; raises InvalidConfig (`unknown-memory`)."""
    ledger = Ledger(setup.batch.tokens)
    engines.enter(setup, ledger)
    ledger.add(PHASES, "other", "cuBLAS workspaces", _WORKSPACE, "2 x 32 MiB")
    _enter_kept(setup, ledger)
    _enter_reference(setup, ledger)
    _enter_end_of_forward(setup, ledger)
    _enter_loss(setup, ledger)
    _enter_backward(setup, ledger)
    phases = _list_phases(setup)
    return Memory(phases=tuple(ledger.alive(name) for name in PHASES if name in phases))


def _list_phases(setup: Setup) -> set[str]:
    """The phases that this run has."""
    phases = {LOSS, LAYER, STEP}
    if setup.zero is not None and setup.zero.stage < 3:
        phases.add(NORM)
    if setup.reference:
        phases.add(REFERENCE)
    if setup.adapters is None:
        phases |= {OUTPUT, EMBEDDING}
        if setup.checkpointing and setup.casts:
            phases.add(FORWARD)
        if not setup.shape.tied and setup.sharding is None:
            # when the next gradient is there; a tied one, and FSDP's, wait for the embedding's
            phases.add(OUTPUT_SENT)
    for name, passed in engines.find_bucket_phases(setup).items():
        if passed < setup.shape.layers:
            phases.add(name)
    return phases


def _enter_kept(setup: Setup, ledger: Ledger) -> None:
    """What the layers keep at the loss; while buckets are sent, some are done again."""
    shape = setup.shape
    batch = setup.batch
    if setup.checkpointing:
        kept = activations.compute_checkpoint(setup)
        name = "inputs of checkpointed layers"
        recomputed = activations.compute_layer(setup)
        if setup.liger:
            # its first norm keeps the layer's input itself, which is counted already
            recomputed -= HALF * shape.hidden * batch.tokens
    elif setup.selects_modules:
        kept = activations.compute_selected_modules(setup)
        name = "inputs of checkpointed modules"
        recomputed = activations.compute_widest_module(setup)
    elif setup.share is not None:
        kept = activations.compute_compiled_layer(setup, setup.share)
        name = f"kept by the layers, activation budget {setup.share:g}"
        recomputed = activations.compute_compiled_layer(setup, 1) - kept
    else:
        kept = activations.compute_layer(setup)
        name = "kept by the layers"
        recomputed = 0
    buckets = engines.find_bucket_phases(setup)
    live = {FORWARD, LOSS, OUTPUT, OUTPUT_SENT, LAYER}
    if setup.reference != "cache":
        # the pass beforehand keeps nothing
        live.add(REFERENCE)
    ledger.add(live, "activations", name, shape.layers * kept)
    for phase, passed in buckets.items():
        ledger.add({phase}, "activations", name, (shape.layers - passed) * kept)
    live |= {*buckets}
    if setup.sharding is None:
        rope = 2 * setup.state_width * shape.head_dim * batch.width
        ledger.add(live, "activations", "rope", rope, "cosines and sines")
    if activations.needs_mask(setup):
        mask = batch.rows * batch.width**2
        ledger.add(live, "activations", "attention mask", mask, "BS^2, the mask")
    ledger.add({LAYER, *buckets}, "activations", "one layer, computed again", recomputed)


def _enter_reference(setup: Setup, ledger: Ledger) -> None:
    """The reference pass keeps nothing but its logits
    (dpo_utils.py::build_reference_logprobs_cache[with torch.no_grad]), and before them a cache of
    keys.
    """
    shape = setup.shape
    batch = setup.reference_batch or setup.batch
    if setup.loss == "tiled":
        tiled = activations.compute_tiled_loss(setup, trained=False)
        ledger.add({REFERENCE}, "logits", "log-probabilities in tiles", tiled)
        return
    if setup.compiles_loss:
        _enter_compiled_loss(setup, ledger, REFERENCE, batch)
        return
    half = activations.compute_logits(shape, batch, HALF)
    full = activations.compute_logits(shape, batch, FULL)
    if setup.sharding is None:
        width = HALF
        if setup.wide and setup.quantised is not None:
            width = FULL
        keys = 2 * width * shape.layers * shape.key * batch.tokens
        # what the last layer passes through, the embedded tokens, the residual and its norm
        last = activations.compute_passing(setup, batch)
        last += 3 * setup.state_width * shape.hidden * batch.tokens
        if keys + max(last, half[0]) > half[0] + 2 * full[0]:
            # until the logits are there
            name = "keys and values of all layers"
            why = f"{2 * width} x {shape.layers}KT"
            source = "dpo_utils.py::concatenated_forward[logits = model]"
            ledger.add({REFERENCE}, "activations", name, keys, why, source)
            if last > half[0]:
                ledger.add({REFERENCE}, "activations", "the last layer, passing", last)
            else:
                ledger.add({REFERENCE}, "logits", "logits (bf16)", *half)
            return
    ledger.add({REFERENCE}, "logits", "logits (bf16)", *half)
    source = "padding_free_collator.py::calculate_per_token_logps[logits = logits.to]"
    ledger.add({REFERENCE}, "logits", "logits (fp32)", *full, source)
    source = "padding_free_collator.py::calculate_per_token_logps[return torch.gather]"
    ledger.add({REFERENCE}, "logits", "log-softmax (fp32)", *full, source)


def _enter_end_of_forward(setup: Setup, ledger: Ledger) -> None:
    """The end of a checkpointed forward pass, and the final norm."""
    batch = setup.batch
    last = activations.compute_passing(setup, batch)
    tile = activations.compute_tiles(setup)
    if setup.loss == "tiled" and tile > last:
        ledger.add({FORWARD}, "logits", "a tile of logits", tile)
    else:
        ledger.add({FORWARD}, "activations", "the last layer, passing", last)
    state = setup.state_width
    norm = (activations.count_norm_bytes(setup, state) + state) * setup.shape.hidden + FULL
    after = {LOSS, OUTPUT, OUTPUT_SENT}
    ledger.add(after, "activations", "final norm", norm * batch.tokens, "kept and output")


def _enter_loss(setup: Setup, ledger: Ledger) -> None:
    """The loss at its fullest."""
    if setup.loss == "liger":
        fused = activations.compute_fused_loss(setup)
        ledger.add({LOSS}, "logits", "fused linear cross entropy", fused)
    elif setup.loss == "tiled":
        tiled = activations.compute_tiled_loss(setup, trained=setup.adapters is None)
        ledger.add({LOSS}, "logits", "log-probabilities in tiles", tiled)
    elif setup.compiles_loss:
        _enter_compiled_loss(setup, ledger, LOSS, setup.batch)
    else:
        full = activations.compute_logits(setup.shape, setup.batch, FULL)
        for name in ("log-softmax, kept", "gradient of the log-softmax", "gradient of the logits"):
            ledger.add({LOSS}, "logits", f"{name} (fp32)", *full)


def _enter_compiled_loss(setup: Setup, ledger: Ledger, phase: str, batch: MicroBatch) -> None:
    """6 bytes a position and word, measured on an H200: 56.9 GiB for 2 x 16,384 positions of
    Qwen3-0.6B.
    """
    source = "olmo_core_train_modules.py::DPOLMHead[All DTensor handling]"
    for name, element in (("logits (bf16)", HALF), ("log-softmax, compiled (fp32)", FULL)):
        size, why = activations.compute_logits(setup.shape, batch, element)
        ledger.add({phase}, "logits", name, size, why, source)


def _enter_backward(setup: Setup, ledger: Ledger) -> None:
    """The output layer's weight gradient, those inside a layer, and what they are made from."""
    shape = setup.shape
    batch = setup.batch
    width = setup.gradient_bytes
    live = {OUTPUT, OUTPUT_SENT}
    if setup.adapters is None and (shape.tied or setup.sharding is not None):
        # a tied one waits for the embedding's; under FSDP any: it is the root's
        live |= {LAYER, *BUCKETS}
    size = width * shape.embedding
    ledger.add(live, "gradients", "output layer's gradient", size, f"{width}VH")
    if setup.loss in {"full", "logprobs"}:
        # until the weight's is made
        half = activations.compute_logits(shape, batch, HALF)
        ledger.add({OUTPUT}, "logits", "gradient of the logits (bf16)", *half)
    inside = activations.compute_backward(setup)
    ledger.add({LAYER}, "activations", "gradients inside a layer", inside)
    if setup.quantised is None:
        return
    # a linear weight while it is multiplied with, in its former type and cast, before or behind the
    # MLP's gradients: what it has more
    state = setup.weight_bytes
    element = HALF
    if state != HALF:
        element += FULL
    widest = shape.widest_linear
    weight = element * widest - 2 * state * shape.intermediate * batch.tokens
    why = f"{element} x {widest:,} - {2 * state}IT"
    source = "bitsandbytes/autograd/_functions.py"
    ledger.add({LAYER}, "weights", "one weight, dequantised", weight, why, source)
