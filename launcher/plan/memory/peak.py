"""The peak of torch's allocated memory on the fullest rank, in GiB, by allocation and by phase.

A run has a few phases that can be its peak: the engine's start, the reference pass, the loss, a layer's
backward pass, the embedding's gradient, the optimizer's step. Each is a sum of allocations; each of those
carries its formula and where that comes from. The largest phase is the peak. What is not described raises,
instead of being guessed. `activations` has the formulas of layers and loss, `engines` the weights,
gradients and the optimizer; here is what a pass has in memory at which phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from launcher.artifacts.lengths import MicroBatch
from launcher.plan.memory import activations, engines
from launcher.plan.memory.activations import Amount
from launcher.plan.memory.phases import (
    EMBEDDING,
    FIRST_BUCKET,
    FLATTENED,
    FORWARD,
    LAYER,
    LOSS,
    NORM,
    OUTPUT,
    OUTPUT_SENT,
    PHASES,
    REFERENCE,
    SECOND_BUCKET,
    START,
    STEP,
    Ledger,
    Memory,
)
from launcher.plan.memory.setup import FULL, HALF, Setup

# cuBLAS keeps one workspace a thread that multiplies on Hopper: forward and backward
_WORKSPACE = 2 * 32 * 2**20


def estimate(setup: Setup) -> Memory:
    """The peak of a run and what it is made of; raises InvalidConfig (`unknown-memory`)."""
    ledger = Ledger()
    engines.enter(setup, ledger)
    after = [name for name in PHASES if name not in (START, FLATTENED)]
    ledger.add(after, "other", "cuBLAS workspaces", _WORKSPACE, "2 x 32 MiB")
    phases = _phases(setup)
    _kept(setup, ledger)
    _reference(setup, ledger)
    _forward(setup, ledger)
    _loss(setup, ledger)
    _backward(setup, ledger)
    return ledger.memory(name for name in PHASES if name in phases)


def _phases(setup: Setup) -> set[str]:
    """Those that this run comes to."""
    phases = {START, LOSS, LAYER, STEP}
    if setup.zero is not None and setup.zero.stage < 3:
        phases |= {FLATTENED, NORM}
    if setup.reference:
        phases.add(REFERENCE)
    if setup.adapters is None:
        phases |= {OUTPUT, EMBEDDING}
        if setup.checkpointing and setup.casts:
            phases.add(FORWARD)
        if not setup.shape.tied and setup.sharding is None:
            # when the next gradient is there; a tied one, and FSDP's, wait for the embedding's
            phases.add(OUTPUT_SENT)
    sent = engines.bucket_phases(setup).items()
    return phases | {name for name, passed in sent if passed < setup.shape.layers}


def _add(ledger: Ledger, phases: Iterable[str], kind: str, name: str, amount: Amount, source: str = "") -> None:
    ledger.add(phases, kind, name, amount.bytes, amount.formula, source)


def _kept(setup: Setup, ledger: Ledger) -> None:
    """What the layers keep when the loss is there; while buckets are sent, some are through again."""
    shape, batch = setup.shape, setup.batch
    if setup.checkpointing:
        amount, name = activations.checkpoint(setup), "inputs of checkpointed layers"
    elif setup.share is not None:
        amount = activations.compiled_layer(setup, setup.share)
        name = f"kept by the layers, activation budget {setup.share:g}"
    else:
        amount, name = activations.layer(setup), "kept by the layers"
    through = {REFERENCE, FORWARD, LOSS, OUTPUT, OUTPUT_SENT, LAYER}
    buckets = engines.bucket_phases(setup)
    if setup.reference == "cache":
        # the pass beforehand keeps nothing
        through.discard(REFERENCE)
    _add(ledger, through, "activations", name, amount.times(shape.layers))
    for phase, passed in buckets.items():
        _add(ledger, [phase], "activations", name, amount.times(shape.layers - passed))
    through |= {*buckets}
    if setup.sharding is None:
        rope = 2 * setup.state_width * shape.head_dim * batch.width
        ledger.add(through, "activations", "rope", rope, "cosines and sines")
    if activations.needs_mask(setup):
        size = batch.rows * batch.width**2
        ledger.add(through, "activations", "attention mask", size, "BS^2, the mask")
    if setup.share is not None and setup.share < 1:
        whole = activations.compiled_layer(setup, 1).bytes
        again = Amount(whole - amount.bytes, f"{1 - setup.share:g} x a layer")
    elif setup.checkpointing:
        again = activations.layer(setup)
        if setup.liger:
            # its first norm keeps the layer's input itself, which is counted already
            shared = HALF * shape.hidden * batch.tokens
            again = Amount(again.bytes - shared, f"{again.formula} - 2HT")
    else:
        return
    _add(ledger, {LAYER, *buckets}, "activations", "one layer, computed again", again)


def _reference(setup: Setup, ledger: Ledger) -> None:
    """The reference pass keeps nothing but its logits (dpo_utils.py:462), and before them a cache of keys."""
    shape, batch = setup.shape, setup.reference_batch or setup.batch
    live = [REFERENCE]
    if setup.loss == "tiled":
        tiled = activations.tiled_loss(setup, trained=False)
        _add(ledger, live, "logits", "log-probabilities in tiles", tiled)
        return
    if setup.compiles_loss:
        _compiled_loss(setup, ledger, live, batch)
        return
    half = activations.logits(shape, batch, HALF)
    full = activations.logits(shape, batch, FULL)
    if setup.sharding is None:
        state, tokens = setup.state_width, batch.tokens
        width = FULL if setup.wide and setup.quantised is not None else HALF
        keys = 2 * width * shape.layers * shape.key * tokens
        # what the last layer passes through, the embedded tokens, the residual and its norm
        last = activations.passing(replace(setup, batch=batch))
        states = 3 * state * shape.hidden * tokens
        last = Amount(last.bytes + states, f"{last.formula} + {3 * state}HT")
        if keys + max(last.bytes, half.bytes) > half.bytes + 2 * full.bytes:
            # until the logits are there
            why = f"{2 * width} x {shape.layers}KT"
            name = "keys and values of all layers"
            ledger.add(live, "activations", name, keys, why, "dpo_utils.py:865")
            if last.bytes > half.bytes:
                _add(ledger, live, "activations", "the last layer, passing", last)
            else:
                _add(ledger, live, "logits", "logits (bf16)", half)
            return
    _add(ledger, live, "logits", "logits (bf16)", half)
    _add(ledger, live, "logits", "logits (fp32)", full, "padding_free_collator.py:14")
    _add(ledger, live, "logits", "log-softmax (fp32)", full, "padding_free_collator.py:16")


def _forward(setup: Setup, ledger: Ledger) -> None:
    """The end of a checkpointed forward pass: the last layer's own, or a tile of logits after it."""
    kind, name, amount = "activations", "the last layer, passing", activations.passing(setup)
    if setup.loss == "tiled" and activations.tiles(setup).bytes > amount.bytes:
        kind, name, amount = "logits", "a tile of logits", activations.tiles(setup)
    _add(ledger, [FORWARD], kind, name, amount)


def _loss(setup: Setup, ledger: Ledger) -> None:
    """The final norm and the loss at its fullest point, forward or backward."""
    live, kind = [LOSS], "logits"
    norm = activations.final_norm(setup)
    _add(ledger, [LOSS, OUTPUT, OUTPUT_SENT], "activations", "final norm", norm)
    if setup.loss == "liger":
        _add(ledger, live, kind, "fused linear cross entropy", activations.fused_loss(setup))
    elif setup.loss == "tiled":
        tiled = activations.tiled_loss(setup, trained=setup.adapters is None)
        _add(ledger, live, kind, "log-probabilities in tiles", tiled)
    elif setup.compiles_loss:
        _compiled_loss(setup, ledger, live, setup.batch)
    else:
        for name in (
            "log-softmax, kept (fp32)",
            "gradient of the log-softmax (fp32)",
            "gradient of the logits (fp32)",
        ):
            _add(ledger, live, kind, name, activations.logits(setup.shape, setup.batch, FULL))


def _compiled_loss(setup: Setup, ledger: Ledger, phases: Iterable[str], batch: MicroBatch) -> None:
    """6 bytes a position and word, measured on an H200: 56.9 GiB for 2 x 16,384 positions of Qwen3-0.6B."""
    for name, element in (("logits (bf16)", HALF), ("log-softmax, compiled (fp32)", FULL)):
        amount = activations.logits(setup.shape, batch, element)
        _add(ledger, phases, "logits", name, amount, "olmo_core_train_modules.py:32")


def _backward(setup: Setup, ledger: Ledger) -> None:
    """The output layer's weight gradient, those inside a layer, and what they are made from."""
    shape, width = setup.shape, setup.gradient_bytes
    output = "output layer's gradient"
    waits = setup.adapters is None and (shape.tied or setup.sharding is not None)
    # a tied one waits for the embedding's; under FSDP any: it is the root's
    live = {OUTPUT, OUTPUT_SENT, *((LAYER, FIRST_BUCKET, SECOND_BUCKET) if waits else ())}
    ledger.add(live, "gradients", output, width * shape.embedding, f"{width}VH")
    if setup.loss in {"full", "logprobs"}:
        # until the weight's is made
        half = activations.logits(shape, setup.batch, HALF)
        _add(ledger, [OUTPUT], "logits", "gradient of the logits (bf16)", half)
    inside = activations.backward(setup)
    _add(ledger, [LAYER], "activations", "gradients inside a layer", inside)
    if setup.quantised is not None:
        # a linear weight while it is multiplied with, in its former type and cast, before or behind the
        # MLP's gradients: what it has more
        widest = max(out * into for out, into in shape.linears().values())
        state = setup.weight_bytes
        element = HALF if state == HALF else HALF + FULL
        less = 2 * state * shape.intermediate * setup.batch.tokens
        ledger.add(
            [LAYER],
            "weights",
            "one weight, dequantised",
            element * widest - less,
            f"{element} x {widest:,} - {2 * state}IT",
            "bitsandbytes/autograd/_functions.py",
        )
