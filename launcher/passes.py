"""What a forward pass, the loss and a backward pass have in memory at a moment, as parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher import activations
from launcher.activations import Amount
from launcher.lengths import Batch
from launcher.moments import GIB, Part, summed
from launcher.setups import FULL, HALF, Setup


def part(kind: str, name: str, amount: Amount, times: int = 1, source: str = "") -> Part:
    """So many times an amount, in GiB."""
    formula = amount.formula if times == 1 else f"{times} x ({amount.formula})"
    return Part(
        kind=kind, name=name, gib=times * amount.bytes / GIB, formula=formula, source=source
    )


def kept(setup: Setup, *, passed: int = 0) -> tuple[Part, ...]:
    """What all layers keep when the loss is there, or all but the last ones that are `passed` again."""
    shape, batch, times = setup.shape, setup.batch, setup.shape.layers
    if setup.checkpointing:
        amount, name = activations.checkpoint(setup), "inputs of checkpointed layers"
    elif setup.share is not None:
        amount = activations.budgeted(setup, setup.share)
        name = f"kept by the layers, activation budget {setup.share:g}"
    else:
        amount, name, times = activations.layers(setup), "kept by the layers", 1
    if passed:
        left = (shape.layers - passed) / shape.layers
        amount = Amount(bytes=left * amount.bytes, formula=f"{left:.3g} x ({amount.formula})")
    parts = [part("activations", name, amount, times)]
    if setup.sharding is None:
        rope = 2 * (FULL if setup.wide else HALF) * shape.head_dim * batch.width
        parts.append(part("activations", "rope", Amount(bytes=rope, formula="cosines and sines")))
    if masks := _masks(setup):
        formula = (
            "BS^2, the mask" if masks == 1 else f"{masks} x BS^2, all tokens' and the window's"
        )
        mask = Amount(bytes=masks * batch.rows * batch.width**2, formula=formula)
        parts.append(part("activations", "attention mask", mask))
    return tuple(parts)


def _masks(setup: Setup) -> int:
    """How many masks are made for all layers together: of all tokens, and of a window of them."""
    if setup.attention != "sdpa":
        return 0
    needed, windowed = setup.padded or setup.parted, setup.shape.windowed
    windows = needed or activations.masked_windows(setup)
    return int(needed and windowed < setup.shape.layers) + int(windows and windowed > 0)


def recomputed(setup: Setup) -> tuple[Part, ...]:
    """What the layer keeps that is computed again for its backward pass."""
    if setup.share is not None and setup.share < 1:
        whole = activations.compiled_layer(setup).bytes
        again = whole - activations.budgeted(setup, setup.share).bytes
        amount = Amount(bytes=again, formula=f"{1 - setup.share:g} x a layer")
    elif setup.checkpointing:
        amount = activations.layer(setup, windowed=activations.masked_windows(setup))
        if setup.liger:
            # its first norm keeps the layer's input itself, which is counted already
            shared = HALF * setup.shape.hidden * setup.batch.tokens
            amount = Amount(bytes=amount.bytes - shared, formula=f"{amount.formula} - 2HT")
    else:
        return ()
    return (part("activations", "one layer, computed again", amount),)


def head(setup: Setup) -> tuple[Part, ...]:
    """The final norm and the loss at its fullest point, forward or backward."""
    norm = part("activations", "final norm", activations.final_norm(setup))
    if setup.loss == "liger":
        return (norm, part("logits", "fused linear cross entropy", activations.fused_loss(setup)))
    if setup.loss == "tiled":
        tiled = activations.tiled_loss(setup, trained=setup.adapters is None)
        return (norm, part("logits", "log-probabilities in tiles", tiled))
    if setup.compiles_loss:
        return (norm, *_compiled_loss(setup, setup.batch))
    one = activations.logits(setup.shape, setup.batch, element=FULL)
    return (
        norm,
        part("logits", "log-softmax, kept (fp32)", one),
        part("logits", "gradient of the log-softmax (fp32)", one),
        part("logits", "gradient of the logits (fp32)", one),
    )


def _compiled_loss(setup: Setup, batch: Batch) -> tuple[Part, ...]:
    """6 bytes a position and word, measured on an H200: 56.9 GiB for 2 x 16,384 positions of Qwen3-0.6B."""
    half = activations.logits(setup.shape, batch, element=HALF)
    full = activations.logits(setup.shape, batch, element=FULL)
    source = "olmo_core_train_modules.py:32"
    return (
        part("logits", "logits (bf16)", half, source=source),
        part("logits", "log-softmax, compiled (fp32)", full, source=source),
    )


def passing(setup: Setup) -> tuple[Part, ...]:
    """At the end of a checkpointed forward pass: the last layer's own, or a tile of logits after it."""
    layer = part("activations", "the last layer, passing", activations.passing(setup))
    if setup.loss != "tiled":
        return (layer,)
    tile = part("logits", "a tile of logits", activations.tiles(setup))
    return (max(layer, tile, key=lambda one: one.gib),)


def output_gradient(setup: Setup, *, made: bool = False) -> tuple[Part, ...]:
    """The output layer's weight gradient; that of the logits lives until it is made."""
    width = setup.gradient_bytes
    weight = Amount(bytes=width * setup.shape.embedding, formula=f"{width}VH")
    parts = [
        part("gradients", "output layer's gradient", weight),
        part("activations", "final norm", activations.final_norm(setup)),
    ]
    if setup.loss in {"full", "logprobs"} and not made:
        amount = activations.logits(setup.shape, setup.batch, element=HALF)
        parts.append(part("logits", "gradient of the logits (bf16)", amount))
    return tuple(parts)


def held_output(setup: Setup) -> tuple[Part, ...]:
    """A tied output layer's gradient waits for the embedding's; under FSDP any: it is the root's."""
    if setup.adapters or not (setup.shape.tied or setup.sharding is not None):
        return ()
    size, name = setup.gradient_bytes * setup.shape.embedding, "output layer's gradient"
    return (Part(kind="gradients", name=f"tied {name}" if setup.shape.tied else name, gib=size / GIB,
                 formula=f"{setup.gradient_bytes}VH, until the embedding's is there"),)  # fmt: skip


def dequantised(setup: Setup) -> tuple[Part, ...]:
    """A linear weight while it is multiplied with, before or behind the MLP's gradients: what it has more."""
    if setup.quantised is None:
        return ()
    shape, state = setup.shape, setup.weight_bytes
    widest = max(out * into for out, into in shape.linears().values())
    # in its former type, and cast
    width = HALF if state == HALF else HALF + FULL
    gradients = 2 * state * shape.intermediate * setup.batch.tokens
    return (Part(kind="weights", name="one weight, dequantised", gib=max(0, width * widest - gradients) / GIB,
                 formula=f"{width} x {widest:,} - {2 * state}IT",
                 source="bitsandbytes/autograd/_functions.py"),)  # fmt: skip


def embedding_gradient(setup: Setup, sent: Sequence[Part]) -> tuple[Part, ...]:
    """A dense gradient; a tied output layer's is added to it, out of place, before it is sent."""
    one = setup.gradient_bytes * setup.shape.embedding
    added = 2 * one if setup.shape.tied else 0
    name, width = "embedding's gradient", setup.gradient_bytes
    if added / GIB > summed(sent):
        return (Part(kind="gradients", name=name, gib=(one + added) / GIB,
                     formula=f"3 x {width}VH: its own, the output layer's, their sum"),)  # fmt: skip
    return (Part(kind="gradients", name=name, gib=one / GIB, formula=f"{width}VH"), *sent)


def reference(setup: Setup) -> tuple[Part, ...]:
    """The reference pass keeps nothing but its logits (dpo_utils.py:462), and before them a cache of keys."""
    shape, batch = setup.shape, setup.reference_batch or setup.batch
    if setup.loss == "tiled":
        return (
            part(
                "logits", "log-probabilities in tiles", activations.tiled_loss(setup, trained=False)
            ),
        )
    if setup.compiles_loss:
        return _compiled_loss(setup, batch)
    full = activations.logits(shape, batch, element=FULL)
    at_loss = (
        part("logits", "logits (bf16)", activations.logits(shape, batch, element=HALF)),
        part("logits", "logits (fp32)", full, source="padding_free_collator.py:14"),
        part("logits", "log-softmax (fp32)", full, source="padding_free_collator.py:16"),
    )
    if setup.sharding is not None:
        return at_loss
    # until the logits are there
    keys, last = activations.cached(replace(setup, batch=batch))
    held = part("activations", "keys and values of all layers", keys, source="dpo_utils.py:865")
    layer = part("activations", "the last layer, passing", last)
    return max(at_loss, (held, max(layer, at_loss[0], key=lambda one: one.gib)), key=summed)
