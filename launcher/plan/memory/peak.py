"""The peak of torch's allocated memory on the fullest rank, in GiB, by allocation and by phase.

A run has a few phases that can be its peak: the reference pass, the loss, a layer's
backward pass, the embedding's gradient, the optimizer's step. Each is a sum of allocations; each of those
carries its formula and where that comes from. The largest phase is the peak. What is not described raises,
instead of being guessed. `activations` has the formulas of layers and loss, `engines` the weights,
gradients and the optimizer; here is what a pass has in memory at which phase.
"""

from collections.abc import Iterable
from dataclasses import replace

from launcher.artifacts.lengths import MicroBatch
from launcher.plan.memory import activations, engines
from launcher.plan.memory import phases as at
from launcher.plan.memory.setup import FULL, HALF, Setup

# cuBLAS keeps one workspace a thread that multiplies on Hopper: forward and backward
_WORKSPACE = 2 * 32 * 2**20


def estimate(setup: Setup) -> at.Memory:
    """The peak of a run and what it is made of; raises InvalidConfig (`unknown-memory`)."""
    ledger = at.Ledger(setup.batch.tokens)
    engines.enter(setup, ledger)
    ledger.add(at.PHASES, "other", "cuBLAS workspaces", _WORKSPACE, "2 x 32 MiB")
    for enter in (_kept, _reference, _loss, _backward):
        enter(setup, ledger)
    phases = _phases(setup)
    return at.Memory(phases=tuple(ledger.alive(name) for name in at.PHASES if name in phases))


def _phases(setup: Setup) -> set[str]:
    """Those that this run comes to."""
    phases = {at.LOSS, at.LAYER, at.STEP}
    if setup.zero is not None and setup.zero.stage < 3:
        phases.add(at.NORM)
    if setup.reference:
        phases.add(at.REFERENCE)
    if setup.adapters is None:
        phases |= {at.OUTPUT, at.EMBEDDING}
        if setup.checkpointing and setup.casts:
            phases.add(at.FORWARD)
        if not setup.shape.tied and setup.sharding is None:
            # when the next gradient is there; a tied one, and FSDP's, wait for the embedding's
            phases.add(at.OUTPUT_SENT)
    sent = engines.bucket_phases(setup).items()
    return phases | {name for name, passed in sent if passed < setup.shape.layers}


def _kept(setup: Setup, ledger: at.Ledger) -> None:
    """What the layers keep when the loss is there; while buckets are sent, some are through again."""
    shape, batch, kind = setup.shape, setup.batch, "activations"
    if setup.checkpointing:
        a_layer, name = activations.checkpoint(setup), "inputs of checkpointed layers"
    elif setup.selects_modules:
        a_layer, name = activations.selected_modules(setup), "inputs of checkpointed modules"
    elif setup.share is not None:
        a_layer = activations.compiled_layer(setup, setup.share)
        name = f"kept by the layers, activation budget {setup.share:g}"
    else:
        a_layer, name = activations.layer(setup), "kept by the layers"
    buckets = engines.bucket_phases(setup)
    # the pass beforehand keeps nothing
    beside = set() if setup.reference == "cache" else {at.REFERENCE}
    through = {at.FORWARD, at.LOSS, at.OUTPUT, at.OUTPUT_SENT, at.LAYER, *beside}
    ledger.add(through, kind, name, shape.layers * a_layer)
    for phase, passed in buckets.items():
        ledger.add([phase], kind, name, (shape.layers - passed) * a_layer)
    through |= {*buckets}
    if setup.sharding is None:
        rope = 2 * setup.state_width * shape.head_dim * batch.width
        ledger.add(through, kind, "rope", rope, "cosines and sines")
    if activations.needs_mask(setup):
        ledger.add(through, kind, "attention mask", batch.rows * batch.width**2, "BS^2, the mask")
    if setup.selects_modules:
        again = activations.widest_module(setup)
    elif setup.share is not None and setup.share < 1:
        again = activations.compiled_layer(setup, 1) - a_layer
    elif setup.checkpointing:
        again = activations.layer(setup)
        if setup.liger:
            # its first norm keeps the layer's input itself, which is counted already
            again -= HALF * shape.hidden * batch.tokens
    else:
        return
    ledger.add({at.LAYER, *buckets}, kind, "one layer, computed again", again)


def _reference(setup: Setup, ledger: at.Ledger) -> None:
    """The reference pass keeps nothing but its logits
    (dpo_utils.py::build_reference_logprobs_cache[with torch.no_grad]), and before them a cache of keys.
    """
    shape, batch, live = setup.shape, setup.reference_batch or setup.batch, [at.REFERENCE]
    if setup.loss == "tiled":
        tiled = activations.tiled_loss(setup, trained=False)
        ledger.add(live, "logits", "log-probabilities in tiles", tiled)
        return
    if setup.compiles_loss:
        _compiled_loss(setup, ledger, live, batch)
        return
    half, full = (activations.logits(shape, batch, element) for element in (HALF, FULL))
    if setup.sharding is None:
        state, tokens = setup.state_width, batch.tokens
        width = FULL if setup.wide and setup.quantised is not None else HALF
        keys = 2 * width * shape.layers * shape.key * tokens
        # what the last layer passes through, the embedded tokens, the residual and its norm
        last = activations.passing(replace(setup, batch=batch)) + 3 * state * shape.hidden * tokens
        if keys + max(last, half[0]) > half[0] + 2 * full[0]:
            # until the logits are there
            name, why = "keys and values of all layers", f"{2 * width} x {shape.layers}KT"
            ledger.add(live, "activations", name, keys, why, "dpo_utils.py::concatenated_forward[logits = model]")
            if last > half[0]:
                ledger.add(live, "activations", "the last layer, passing", last)
            else:
                ledger.add(live, "logits", "logits (bf16)", *half)
            return
    ledger.add(live, "logits", "logits (bf16)", *half)
    ledger.add(
        live,
        "logits",
        "logits (fp32)",
        *full,
        "padding_free_collator.py::calculate_per_token_logps[logits = logits.to]",
    )
    ledger.add(
        live,
        "logits",
        "log-softmax (fp32)",
        *full,
        "padding_free_collator.py::calculate_per_token_logps[return torch.gather]",
    )


def _loss(setup: Setup, ledger: at.Ledger) -> None:
    """The end of a checkpointed forward pass, the final norm, and the loss at its fullest, forward or backward."""
    live, kind, state, batch = [at.LOSS], "logits", setup.state_width, setup.batch
    last, tile = activations.passing(setup), activations.tiles(setup)
    if setup.loss == "tiled" and tile > last:
        ledger.add([at.FORWARD], kind, "a tile of logits", tile)
    else:
        ledger.add([at.FORWARD], "activations", "the last layer, passing", last)
    norm = (activations.norm_kept(setup, state) + state) * setup.shape.hidden + FULL
    after = [at.LOSS, at.OUTPUT, at.OUTPUT_SENT]
    ledger.add(after, "activations", "final norm", norm * batch.tokens, "kept and output")
    if setup.loss == "liger":
        ledger.add(live, kind, "fused linear cross entropy", activations.fused_loss(setup))
    elif setup.loss == "tiled":
        tiled = activations.tiled_loss(setup, trained=setup.adapters is None)
        ledger.add(live, kind, "log-probabilities in tiles", tiled)
    elif setup.compiles_loss:
        _compiled_loss(setup, ledger, live, batch)
    else:
        full = activations.logits(setup.shape, batch, FULL)
        for name in ("log-softmax, kept", "gradient of the log-softmax", "gradient of the logits"):
            ledger.add(live, kind, f"{name} (fp32)", *full)


def _compiled_loss(setup: Setup, ledger: at.Ledger, phases: Iterable[str], batch: MicroBatch) -> None:
    """6 bytes a position and word, measured on an H200: 56.9 GiB for 2 x 16,384 positions of Qwen3-0.6B."""
    for name, element in (("logits (bf16)", HALF), ("log-softmax, compiled (fp32)", FULL)):
        amount = activations.logits(setup.shape, batch, element)
        ledger.add(phases, "logits", name, *amount, "olmo_core_train_modules.py::DPOLMHead[All DTensor handling]")


def _backward(setup: Setup, ledger: at.Ledger) -> None:
    """The output layer's weight gradient, those inside a layer, and what they are made from."""
    shape, width = setup.shape, setup.gradient_bytes
    # a tied one waits for the embedding's; under FSDP any: it is the root's
    waits = setup.adapters is None and (shape.tied or setup.sharding is not None)
    live = {at.OUTPUT, at.OUTPUT_SENT, *((at.LAYER, *at.BUCKETS) if waits else ())}
    ledger.add(live, "gradients", "output layer's gradient", width * shape.embedding, f"{width}VH")
    if setup.loss in {"full", "logprobs"}:
        # until the weight's is made
        half = activations.logits(shape, setup.batch, HALF)
        ledger.add([at.OUTPUT], "logits", "gradient of the logits (bf16)", *half)
    ledger.add([at.LAYER], "activations", "gradients inside a layer", activations.backward(setup))
    if setup.quantised is not None:
        # a linear weight while it is multiplied with, in its former type and cast, before or behind the
        # MLP's gradients: what it has more
        widest = max(out * into for out, into in shape.linears().values())
        state = setup.weight_bytes
        element = HALF if state == HALF else HALF + FULL
        size = element * widest - 2 * state * shape.intermediate * setup.batch.tokens
        why, source = f"{element} x {widest:,} - {2 * state}IT", "bitsandbytes/autograd/_functions.py"
        ledger.add([at.LAYER], "weights", "one weight, dequantised", size, why, source)
