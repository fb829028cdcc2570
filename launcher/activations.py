"""What a decoder layer and the loss keep for the backward pass, in bytes; closed formulas.

Counted operator by operator from transformers' modules (5.17), liger_kernel 0.7.0, flash-attn 2 and
trl 1.16, and held by a test against a run of those modules in which every allocation is counted. The
form of the formulas is that of "Reducing Activation Recomputation in Large Transformer Models"
(Korthikanti et al., 2022); the numbers differ because these modules keep fp32 copies in their norms and
the three products of a gated MLP.

Of experts every layer computes each token as often as it is given to one: transformers makes one grouped
product of it (transformers/integrations/moe.py:377), Liger a loop over the experts. Tokens are
taken to be spread evenly over all experts, which matters to the loop alone.

H hidden, Q all query heads, K all key heads, I intermediate, V vocabulary, h heads, T tokens of the
micro-batch with padding, R without, S the padded width, B rows, E experts, k those that a token uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.lengths import Batch
from launcher.shapes import Shape

HALF, FULL = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What decides on the operators: `attention` is flash (2, 3, 4), sdpa or eager.

    `wide` says that the states between layers are fp32 (fp32 weights under bf16 autocast). `adapters`
    are LoRA's weights: None, or their rank and bytes an element. `quantised` linears give back what they
    were given: fp32 states make fp32 products. `cached`: keys and values are copied
    into a cache, as transformers does unless it is told not to, or layers are checkpointed.
    `linears_keep`: linears keep their input even where their weight is frozen, as those do that ZeRO-3
    puts in place of torch's (deepspeed/runtime/zero/linear.py:105).
    """

    attention: str = "flash"
    cached: bool = False
    liger: bool = False
    checkpointing: bool = False
    wide: bool = False
    autocast: bool = False
    quantised: bool = False
    adapter_rank: int = 0
    adapter_bytes: int = HALF
    adapter_dropout: bool = True
    adapter_targets: tuple[str, ...] = ()
    linears_keep: bool = False

    @property
    def forgets(self) -> bool:
        """Whether linears that adapters are put on keep nothing of their input."""
        return self.adapter_rank > 0 and not self.linears_keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Bytes, and how they come about."""

    bytes: float
    formula: str


def layers(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    """What all layers keep, those that see only a window among them."""
    few = shape.windowed if masked_windows(shape, kernels, batch) else 0
    one = layer(shape, kernels, batch)
    many = shape.layers - few
    if not few:
        return Amount(bytes=many * one.bytes, formula=f"{many} x ({one.formula})")
    other = layer(shape, kernels, batch, windowed=True)
    both = many * one.bytes + few * other.bytes
    why = f"{few} x ({other.formula}), windows of {shape.window:,}"
    return Amount(bytes=both, formula=f"{many} x ({one.formula}) + {why}" if many else why)


def masked_windows(shape: Shape, kernels: Kernels, batch: Batch) -> bool:
    """Whether layers that see only a window need a mask for it (transformers/masking_utils.py:263).

    The flash kernels take the window as a number.
    """
    return bool(shape.windowed) and kernels.attention != "flash" and batch.width >= shape.window


def layer(shape: Shape, kernels: Kernels, batch: Batch, *, windowed: bool = False) -> Amount:
    """What one layer keeps from its forward pass to its backward pass, without checkpointing.

    `windowed`: one that sees only a window, by a mask.
    """
    norms, why_norms = _norms(shape, kernels)
    attention, why_attention = _attention(shape, kernels, batch, windowed=windowed)
    mlp, why_mlp = _mlp(shape, kernels)
    adapters, why_adapters = _adapters(shape, kernels)
    a_token = norms + mlp + adapters
    terms = [why_norms, why_mlp, *([why_adapters] if adapters else [])]
    return Amount(
        bytes=a_token * batch.tokens + attention,
        formula=f"T({' + '.join(terms)}) + {why_attention}",
    )


def compiled_layer(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    """What one layer keeps under torch.compile with all of the memory budget.

    The partitioner computes again what is fused into other kernels, and keeps what a matrix product takes
    or makes: four states of the residual's width (the layer's input and what is between its parts, before
    or behind their norms), Q and K also before norms of their own, Q, K, V and the attention's result, both
    inputs of the gated product and the product. Held against torch's own partitioner by a test.
    """
    q, k, norms = shape.query, shape.key, bool(shape.layout.qk_norm)
    # OLMo-core repeats keys and values for the queries' heads where no flash kernel does
    repeated = k if kernels.attention.startswith("flash") else q
    a_token = 4 * shape.hidden + 2 * q + 2 * repeated + norms * (q + k) + 3 * shape.intermediate
    why = f"8H + 4Q + {'4K' if repeated == k else '4Q'} + 6I"
    total = (HALF * a_token + FULL * shape.heads) * batch.tokens
    return Amount(
        bytes=total,
        formula=f"T({why}{' + 2Q + 2K before norms' if norms else ''} + 4h), fused by torch.compile",
    )


def budgeted(shape: Shape, kernels: Kernels, batch: Batch, share: float) -> Amount:
    """What one compiled layer keeps with a share of the memory budget.

    torch counts the budget between keeping the layer's input alone (0) and everything (1).
    """
    least = checkpoint(shape, kernels, batch).bytes
    whole = compiled_layer(shape, kernels, batch)
    if share >= 1:
        return whole
    return Amount(
        bytes=least + share * (whole.bytes - least),
        formula=f"2HT + {share:g} x ({whole.formula} - 2HT)",
    )


def _norms(shape: Shape, kernels: Kernels) -> tuple[float, str]:
    """Bytes a token in norms and what the linear layers after them keep of their input."""
    layout, hidden, frozen = shape.layout, shape.hidden, kernels.forgets
    state = FULL if kernels.wide else HALF
    # an autocast linear casts its fp32 input for itself: q, k, v and gate, up; a frozen one keeps none
    outputs = 0 if frozen else HALF * (5 if kernels.wide and not layout.fused else 2)
    kept = _norm_kept(shape, kernels, state)
    count = 2 + 2 * (layout.pre_norm and layout.post_norm)
    if frozen and not layout.pre_norm and not kernels.liger:
        # the linears take the residual itself, which nothing keeps
        outputs = 0
    extra = 0.0
    if layout.qk_norm:
        extra = _norm_kept(shape, kernels, HALF) * (shape.query + shape.key)
        extra += FULL * (shape.heads + shape.kv_heads if layout.qk_norm == "head" else 2)
    total = (count * kept + outputs) * hidden + FULL * count + extra
    why = f"{count} norms x {kept}H + {outputs}H"
    return total, why + (f" + {extra:.0f} for q and k norms" if extra else "")


def _norm_kept(shape: Shape, kernels: Kernels, state: int) -> int:
    """Bytes an element that one norm keeps beside its output; `state` are those of its input."""
    if kernels.liger:
        return state
    if kernels.adapter_rank:
        # without a gradient for the norm's weight the normalised values need not be kept
        return FULL
    return shape.layout.norm_kept + (
        FULL - HALF if state == FULL and shape.layout.norm_kept == 6 else 0
    )


def _mlp(shape: Shape, kernels: Kernels) -> tuple[float, str]:
    if shape.experts:
        return _experts(shape, kernels)
    times = (6 if kernels.liger else 8) - (HALF if kernels.forgets else 0)
    times *= 2 if kernels.quantised and kernels.wide else 1
    return times * shape.intermediate, f"{times}I"


def _experts(shape: Shape, kernels: Kernels) -> tuple[float, str]:
    """A token's copies, gate and up, and results in each of its experts; the router; places of copies."""
    routed = _routed(shape, kernels)
    total = shape.experts_used * (routed + 36) + FULL * shape.experts
    why = f"k({routed:,} + 36) + 4E (copies, gate, up and results of the experts)"
    if shape.shared:
        times = 8 - HALF * kernels.forgets
        total += times * shape.shared + HALF * shape.hidden
        why += f" + {times} x {shape.shared} + 2H (the shared expert)"
    return total, why


def _routed(shape: Shape, kernels: Kernels) -> int:
    """Bytes that an expert keeps of one of its tokens; a frozen one keeps no inputs."""
    frozen, liger = kernels.adapter_rank > 0, kernels.liger
    # the loop keeps what it adds up, its kernel makes the product again
    return HALF * ((2 - frozen + liger) * shape.hidden + (4 - frozen - liger) * shape.intermediate)


def _attention(
    shape: Shape, kernels: Kernels, batch: Batch, *, windowed: bool
) -> tuple[float, str]:
    """Bytes in all: q, k, v, the output, the log-sum-exp, and masks."""
    q, k, heads, tokens = shape.query, shape.key, shape.heads, batch.tokens
    # v is a part of one product that is kept whole, unless it is copied out of it
    fused = HALF * (q + k) * tokens if shape.layout.fused and not kernels.cached else 0
    padded = batch.real < tokens
    plain = HALF * (2 * q + 2 * k) + FULL * heads
    if kernels.attention == "flash" and padded:
        # transformers takes the padding out of q, k and v and puts it back into the output
        total = plain * batch.real + HALF * q * tokens
        return total, "R(4Q + 4K + 4h) + 2QT (padding taken out and put back)"
    if kernels.attention == "eager":
        # the products copy their k and v for every query head; a tanh keeps its result too
        times = FULL + (2 if shape.scores_capped else 1) * HALF
        total = HALF * 4 * q * tokens + times * _scores(shape, batch)
        return total, f"8QT + {times}hBS^2 (softmax, fp32 and bf16)"
    masked = padded or windowed or (batch.rows == 1 and kernels.attention == "sdpa_packed")
    if kernels.attention in {"sdpa", "sdpa_packed"} and masked:
        # k and v are repeated for every query head, a single one of them without a copy; the mask is
        # made additive in every layer
        repeated = shape.kv_heads not in {1, heads}
        wide = q if repeated else k
        mask = HALF * batch.rows * batch.width * _eights(batch.width)
        total = (HALF * (2 * q + 2 * wide) + FULL * heads) * tokens + mask
        total += 0 if repeated else fused
        return total, f"T({'8Q' if repeated else '4Q + 4K'} + 4h) + 2BS^2 (additive mask)"
    return plain * tokens + fused, "T(4Q + 4K + 4h)"


def _scores(shape: Shape, batch: Batch) -> int:
    """One for each head, query and key."""
    return shape.heads * batch.rows * batch.width**2


def _adapters(shape: Shape, kernels: Kernels) -> tuple[float, str]:
    """LoRA keeps each pair's dropped-out input (bf16), the dropout's mask, and the narrow product."""
    if not kernels.adapter_rank:
        return 0.0, ""
    linears = {n: s for n, s in shape.linears().items() if n in kernels.adapter_targets}
    narrow = HALF * kernels.adapter_rank * len(linears)
    if kernels.adapter_dropout:
        width = sum(size[1] for size in linears.values())
        return 3 * width + narrow, f"3 x {width} (inputs of the adapters) + 2r x {len(linears)}"
    if kernels.autocast and (kernels.adapter_bytes == FULL or kernels.wide):
        width = sum(size[1] for size in linears.values())
        return HALF * width + narrow, f"2 x {width} (inputs of the adapters, cast)"
    if not kernels.forgets:
        return narrow, f"2r x {len(linears)} (adapters)"
    # the same tensor serves q, k and v; the attention keeps o's input anyway
    shared = shape.hidden * bool({"q_proj", "k_proj", "v_proj"} & set(linears))
    shared += shape.hidden * bool({"gate_proj", "up_proj"} & set(linears))
    shared += shape.intermediate * ("down_proj" in linears)
    return HALF * shared + narrow, f"2 x {shared} (inputs of the adapters)"


def checkpoint(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    """What one checkpointed layer keeps: its input."""
    size = FULL if kernels.wide else HALF
    return Amount(bytes=size * shape.hidden * batch.tokens, formula=f"{size}HT, the layer's input")


def passing(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    """What a layer needs in a forward pass that keeps nothing: the MLP's widths, or eager scores."""
    state = FULL if kernels.wide else HALF
    if shape.experts:
        # the copies, the results, the same weighed and put back into order
        times = 4 * (FULL if shape.layout.wide_routing else HALF)
        moved = times * shape.experts_used * shape.hidden * batch.tokens
        return Amount(bytes=moved, formula=f"{times}kHT")
    # Liger takes the two halves of one product apart
    times = (10 if kernels.liger else 8) if shape.layout.fused else 6
    mlp = (times * shape.intermediate + state * shape.hidden) * batch.tokens
    scores = (FULL + HALF) * _scores(shape, batch) if kernels.attention == "eager" else 0
    if scores > mlp:
        return Amount(bytes=scores, formula="6hBS^2")
    return Amount(bytes=mlp, formula=f"T({times}I + {state}H)")


def cached(shape: Shape, kernels: Kernels, batch: Batch) -> tuple[Amount, Amount]:
    """The keys and values of all layers, as kept for generating, and what the last layer needs beside them.

    That is what it passes through, the embedded tokens, the residual and its norm.
    """
    width = FULL if kernels.wide and kernels.quantised else HALF
    keys = 2 * width * shape.layers * shape.key * batch.tokens
    state, last = FULL if kernels.wide else HALF, passing(shape, kernels, batch)
    states = 3 * state * shape.hidden * batch.tokens
    return (
        Amount(bytes=keys, formula=f"{2 * width} x {shape.layers}KT"),
        Amount(bytes=last.bytes + states, formula=f"{last.formula} + {3 * state}HT"),
    )


def backward(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    """The most that one layer's backward pass needs beside what was kept."""
    most = _mlp_backward(shape, kernels, batch)
    if kernels.attention != "eager":
        return most
    # the softmax' backward pass: two more copies in fp32, when the bf16 one and the MLP's are gone
    gone = _mlp(shape, kernels)[0] * batch.tokens
    scores = (2 * FULL - HALF) * _scores(shape, batch) - gone
    if scores <= most.bytes:
        return most
    return Amount(bytes=scores, formula="6hBS^2, without the MLP's (gradients of the softmax)")


def _experts_backward(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    """The fullest of four points: results put out of order, and the gradients of the experts' weights."""
    used, tokens, frozen = shape.experts_used * batch.tokens, batch.tokens, kernels.adapter_rank > 0
    wide, narrow = (0, 0) if frozen else shape.expert_weights
    spread, again = shape.hidden * tokens, frozen and kernels.checkpointing
    h, i = shape.experts_used * spread, used * shape.intermediate
    ordered = 3 * (FULL if shape.layout.wide_routing else HALF)
    points: dict[str, float] = {
        f"{ordered}kHT{' + 4HT' * again} (results out of order)": ordered * h + again * 4 * spread,
        "2EHI + 2kIT (gradient of the down weights)": HALF * (narrow + i),
        "4EHI - 4kIT (gradient of the gate and up weights)": HALF * (wide - 2 * i),
        f"{4 + 2 * frozen}kIT - 2kHT (gradients of the product)": HALF * ((2 + frozen) * i - h),
    }
    if kernels.liger:
        # an expert's gradients are as large as all experts' weights; two have been through by the fullest
        loop = 8 * used * shape.experts + HALF * (3 * i + h) / shape.experts + 4 * spread
        gone = 0 if frozen else 2 * used * _routed(shape, kernels) / shape.experts
        points = {
            "8kET + k(6I + 2H)T/E + 4HT (the loop, computed again)": loop,
            f"{'' if frozen else '10EHI + '}4HT - {gone:,.0f} (gradients of the loop, tokens spread evenly)":
                HALF * (2 * wide + narrow + 2 * spread) - gone,
        }  # fmt: skip
    why = max(points, key=lambda one: points[one])
    times = HALF * (1 + bool(shape.shared))
    return Amount(bytes=points[why] + times * spread, formula=f"{why} + {times}HT")


def _mlp_backward(shape: Shape, kernels: Kernels, batch: Batch) -> Amount:
    if shape.experts:
        return _experts_backward(shape, kernels, batch)
    hidden, inner, tokens = shape.hidden, shape.intermediate, batch.tokens
    rope = 2 * HALF * shape.head_dim * batch.width
    weight = HALF * hidden * inner
    state = FULL if kernels.wide else HALF
    if kernels.adapter_rank and (kernels.quantised or not kernels.wide):
        points = _adapted_backward(kernels)
        if kernels.wide:
            # the same in fp32, whatever the adapters are of
            points = [
                (2 * i, 2 * h) for i, h in _adapted_backward(replace(kernels, adapter_bytes=HALF))
            ]
        i, h = max(points, key=lambda point: point[0] * inner + point[1] * hidden)
        through = (i * inner + h * hidden) * tokens + rope
        return Amount(bytes=through, formula=f"T({i}I + {h}H) (through the adapters)")
    if kernels.adapter_rank and "down_proj" in kernels.adapter_targets:
        times = 11.5 if kernels.adapter_bytes == FULL else 4
        total = (times * inner + state * hidden) * tokens + rope
        return Amount(bytes=total, formula=f"T({times}I + 2H) (through an adapter's dropout)")
    if kernels.liger:
        # the product's gradient and the down projection's; SwiGLU and RMSNorm write in place
        total = (2 * inner + state * hidden) * tokens + weight
        return Amount(bytes=total + rope, formula="T(2I + 2H) + 2HI")
    products = (4 * inner + state * hidden) * tokens
    if shape.layout.post_norm:
        products = max(products - 8 * hidden * tokens, 16 * hidden * tokens)
        return Amount(
            bytes=products + rope, formula="max(T(4I - 6H), 16HT) (fp32 gradients of a norm)"
        )
    return Amount(bytes=products + rope, formula="T(4I + 2H) (gradients of the MLP's product)")


def _adapted_backward(kernels: Kernels) -> list[tuple[int, int]]:
    """Bytes an element of I and of H a token at each of the fullest points, on 16-bit weights.

    Read off traces: a frozen linear keeps no input, an adapter's own is cast and dropped out.
    """
    wide, liger = kernels.adapter_bytes == FULL, kernels.liger
    dropped, targets = kernels.adapter_dropout, kernels.adapter_targets
    norms = 8 if liger else 10
    if "down_proj" in targets:
        if wide:
            return [(10 if dropped else 6, norms)]
        return [(4, 2), (2, norms)] if dropped else [(4, 2)]
    if {"gate_proj", "up_proj"} & set(targets):
        if liger:
            return [(4, norms if wide else 4 if dropped else 2)]
        return [(6, 2), (4, norms)] if wide else [(6, 2)]
    return [(2, 4)] if liger else [(6, 2)]


def _eights(width: int) -> int:
    return -(-width // 8) * 8


# --- the loss --------------------------------------------------------------------------------------


def final_norm(shape: Shape, kernels: Kernels, batch: Batch) -> float:
    """Bytes that the norm before the output layer keeps, its output included."""
    state = FULL if kernels.wide else HALF
    kept = _norm_kept(shape, kernels, state)
    return ((kept + state) * shape.hidden + FULL) * batch.tokens


def logits(shape: Shape, batch: Batch, *, element: int) -> Amount:
    """One copy of the logits."""
    return Amount(
        bytes=element * shape.vocab * batch.tokens,
        formula=f"{element} x {batch.tokens:,} x {shape.vocab:,}",
    )


def fused_loss(
    shape: Shape, batch: Batch, *, weight_bytes: int = HALF, trained: bool = True
) -> Amount:
    """liger_kernel/ops/fused_linear_cross_entropy.py:52: the gradients are made in the forward pass.

    The output layer's is summed up in its own type, from a product in bf16 and that again in fp32; a
    weight in fp32 is cast beside it.
    """
    factor = -(-shape.vocab // shape.hidden)
    chunk = 1 << (-(-batch.tokens // factor) - 1).bit_length()
    part = HALF * shape.vocab * min(chunk, batch.tokens)
    cast = HALF if weight_bytes == FULL else 0
    times = (weight_bytes + HALF + FULL if trained else 0) + cast
    total = weight_bytes * shape.hidden * batch.tokens + part + times * shape.embedding
    why = f"{weight_bytes}HT + 2V x {chunk} (a chunk of logits)"
    return Amount(
        bytes=total, formula=why + (f" + {times}VH (the output layer's gradient)" if times else "")
    )


# trl/kernels/chunked_logprob.py:31 and trl/trainer/utils.py:1506
_TILE_TOKENS, _TILE_WORDS = 4096, 32768


def tiles(shape: Shape, batch: Batch, *, weight_bytes: int) -> Amount:
    """One tile of logits, and the output layer's rows for it where they must be cast."""
    words = min(_TILE_WORDS, shape.vocab)
    tile = HALF * min(_TILE_TOKENS, batch.tokens) * _TILE_WORDS
    cast = HALF * words * shape.hidden if weight_bytes == FULL else 0
    return Amount(
        bytes=tile + cast, formula="2 x 4,096 x 32,768" + (" + 2H x 32,768" if cast else "")
    )


def tiled_loss(shape: Shape, batch: Batch, *, weight_bytes: int, trained: bool = True) -> Amount:
    """TRL's own output layer: log-probabilities in tiles, gradients summed up in fp32."""
    tile = tiles(shape, batch, weight_bytes=weight_bytes).bytes
    gradient = (FULL + (HALF if weight_bytes == HALF else 0)) * shape.embedding if trained else 0
    total = tile + gradient + (FULL + 2 * HALF) * shape.hidden * batch.tokens
    return Amount(
        bytes=total, formula="a tile of 4,096 x 32,768 logits + 8HT + 4VH (fp32 gradient)"
    )
