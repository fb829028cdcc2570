"""What a decoder layer and the loss keep for the backward pass, in bytes.

Counted operator by operator from transformers' modules (5.17), liger_kernel 0.7.0, flash-attn 2 and
trl 1.16, and compared by a test with a run of those modules in which every allocation is counted. The
form of the formulas is that of "Reducing Activation Recomputation in Large Transformer Models"
(Korthikanti et al., 2022); the numbers differ because these modules keep fp32 copies in their norms and
the three products of a gated MLP.
"""

from launcher.artifacts.architecture import Shape
from launcher.artifacts.lengths import MicroBatch
from launcher.plan.memory.setup import FULL, HALF, Adapters, Setup


def layer(setup: Setup) -> float:
    """What one layer keeps from its forward pass to its backward pass, without checkpointing."""
    # quantised linears give fp32 for fp32
    wide = 2 if setup.quantised is not None and setup.wide else 1
    times = ((6 if setup.liger else 8) - (HALF if setup.frozen else 0)) * wide
    adapters = 0 if setup.adapters is None else _adapters(setup, setup.adapters)
    a_token = _norms(setup) + times * setup.shape.intermediate + adapters
    return a_token * setup.batch.tokens + _attention(setup)


def compiled_layer(setup: Setup, share: float) -> float:
    """What one layer keeps under torch.compile with a share of the memory budget.

    The partitioner computes again what is fused into other kernels, and keeps what a matrix product takes
    or makes: four states of the residual's width (the layer's input and what is between its parts, before
    or behind their norms), Q and K also before norms of their own, Q, K, V and the attention's result, both
    inputs of the gated product and the product. Held against torch's own partitioner by a test. The budget
    counts between keeping the layer's input alone (0) and all of that (1).
    """
    shape = setup.shape
    q, k, norms = shape.query, shape.key, bool(shape.layout.qk_norm)
    # OLMo-core repeats keys and values for the queries' heads where no flash kernel does
    repeated = k if setup.attention == "flash" else q
    a_token = 4 * shape.hidden + 2 * q + 2 * repeated + norms * (q + k) + 3 * shape.intermediate
    whole = (HALF * a_token + FULL * shape.heads) * setup.batch.tokens
    least = checkpoint(setup)
    return whole if share >= 1 else least + share * (whole - least)


def selected_modules(setup: Setup) -> float:
    """What one layer keeps where each of its modules is computed again by itself: their inputs.

    These are six states of the residual's width: the layer's input, and what norms, attention, the gated product and
    the sum of the residual hand on (olmo_core_utils.py::TrainingConfig[activation_checkpointing_modules: list]).
    """
    return 6 * HALF * setup.shape.hidden * setup.batch.tokens


def widest_module(setup: Setup) -> float:
    """What the largest of these modules keeps while it is computed again: the gated product's parts."""
    return 3 * HALF * setup.shape.intermediate * setup.batch.tokens


def checkpoint(setup: Setup) -> float:
    """What one checkpointed layer keeps: its input."""
    return setup.state_width * setup.shape.hidden * setup.batch.tokens


def passing(setup: Setup) -> float:
    """What a layer needs in a forward pass that keeps nothing: the MLP's widths."""
    return (6 * setup.shape.intermediate + setup.state_width * setup.shape.hidden) * setup.batch.tokens


def needs_mask(setup: Setup) -> bool:
    """Whether SDPA needs a mask: for padding, packed rows, or a window that rows reach.

    (transformers/masking_utils.py::_ignore_causal_mask_sdpa[if local_attention_size]). Where some layers alone see a
    window, all are taken for such.
    """
    reached = 0 < setup.shape.window <= setup.batch.width
    # it parts packed rows where keys and values are not kept
    # (transformers/masking_utils.py::_preprocess_mask_arguments[find_packed_sequence_indices]); DPO keeps them as for
    # generating: dpo_utils.py::concatenated_forward[logits = model] does not say `use_cache`
    kept = setup.loss == "logprobs" and not setup.checkpointing and setup.sharding is None
    padded = setup.batch.real < setup.batch.tokens
    return setup.attention == "sdpa" and (padded or (setup.packed and not kept) or reached)


def _norms(setup: Setup) -> float:
    """Bytes a token in norms and what the linear layers after them keep of their input."""
    shape = setup.shape
    # an autocast linear casts its fp32 input for itself: q, k, v and gate, up; a frozen one keeps none
    outputs = 0 if setup.frozen else HALF * (5 if setup.wide else 2)
    kept, extra = norm_kept(setup, setup.state_width), 0.0
    if shape.layout.qk_norm:
        extra = norm_kept(setup, HALF) * (shape.query + shape.key)
        extra += FULL * (shape.heads + shape.kv_heads if shape.layout.qk_norm == "head" else 2)
    return (2 * kept + outputs) * shape.hidden + FULL * 2 + extra


def norm_kept(setup: Setup, state: int) -> int:
    """Bytes an element that one norm keeps beside its output; `state` are those of its input."""
    if setup.liger:
        return state
    if setup.adapters is not None:
        # without a gradient for the norm's weight the normalised values need not be kept
        return FULL
    kept = setup.shape.layout.norm_kept
    return kept + (FULL - HALF if state == FULL and kept == 6 else 0)


def _attention(setup: Setup) -> float:
    """Bytes in all: q, k, v, the output, the log-sum-exp, and masks."""
    shape, batch = setup.shape, setup.batch
    q, k, heads, tokens = shape.query, shape.key, shape.heads, batch.tokens
    plain = 4 * (q + k + heads)
    if setup.attention == "flash" and batch.real < tokens:
        # transformers takes the padding out of q, k and v and puts it back into the output
        return plain * batch.real + HALF * q * tokens
    if needs_mask(setup):
        # k and v are repeated for every query head; the mask is made additive in every layer
        repeated = shape.kv_heads != heads
        mask = HALF * batch.rows * batch.width * (-(-batch.width // 8) * 8)
        return 4 * (q + (q if repeated else k) + heads) * tokens + mask
    return plain * tokens


def _adapters(setup: Setup, adapters: Adapters) -> float:
    """LoRA keeps each pair's dropped-out input (bf16), the dropout's mask, and the narrow product."""
    shape, targets = setup.shape, set(adapters.targets)
    inputs = [into for name, (_, into) in shape.linears().items() if name in targets]
    narrow, width = HALF * adapters.rank * len(inputs), sum(inputs)
    if adapters.dropout:
        return 3 * width + narrow
    if setup.autocast and (adapters.bytes == FULL or setup.wide):
        return HALF * width + narrow
    if not setup.frozen:
        return narrow
    # the same tensor serves q, k and v; the attention keeps o's input anyway
    shared = shape.hidden * bool({"q_proj", "k_proj", "v_proj"} & targets)
    shared += shape.hidden * bool({"gate_proj", "up_proj"} & targets)
    shared += shape.intermediate * ("down_proj" in targets)
    return HALF * shared + narrow


def backward(setup: Setup) -> float:
    """The most that one layer's backward pass needs beside what was kept."""
    shape, adapters, state = setup.shape, setup.adapters, setup.state_width
    hidden, inner, tokens = shape.hidden, shape.intermediate, setup.batch.tokens
    total: float
    if adapters is not None and (setup.quantised is not None or not setup.wide):
        # around fp32 states the same in fp32, whatever the adapters are of
        times, width = (2, HALF) if setup.wide else (1, adapters.bytes)
        points = [(times * i, times * h) for i, h in _adapted_backward(setup, adapters, width)]
        total = max(i * inner + h * hidden for i, h in points) * tokens
    elif adapters is not None and "down_proj" in adapters.targets:
        share = 11.5 if adapters.bytes == FULL else 4.0
        total = (share * inner + state * hidden) * tokens
    elif setup.liger:
        # the product's gradient and the down projection's; SwiGLU and RMSNorm write in place
        total = (2 * inner + state * hidden) * tokens + HALF * hidden * inner
    elif shape.layout.post_norm:
        # fp32 gradients of a norm
        total = max(4 * inner + (state - 8) * hidden, 16 * hidden) * tokens
    else:
        # gradients of the MLP's product
        total = (4 * inner + state * hidden) * tokens
    return total + 2 * HALF * shape.head_dim * setup.batch.width


def _adapted_backward(setup: Setup, adapters: Adapters, width: int) -> list[tuple[int, int]]:
    """Bytes an element of I and of H a token at each of the fullest points, on 16-bit weights.

    Read off traces: a frozen linear keeps no input, an adapter's own (`width` bytes) is cast and dropped out.
    """
    wide, liger, dropped = width == FULL, setup.liger, adapters.dropout
    norms, targets = 8 if liger else 10, set(adapters.targets)
    if "down_proj" in targets:
        if wide:
            return [(10 if dropped else 6, norms)]
        return [(4, 2), (2, norms)] if dropped else [(4, 2)]
    if {"gate_proj", "up_proj"} & targets:
        if liger:
            return [(4, norms if wide else 4 if dropped else 2)]
        return [(6, 2), (4, norms)] if wide else [(6, 2)]
    return [(2, 4)] if liger else [(6, 2)]


def logits(shape: Shape, batch: MicroBatch, element: int) -> tuple[float, str]:
    return element * shape.vocab * batch.tokens, f"{element} x {batch.tokens:,} x {shape.vocab:,}"


def fused_loss(setup: Setup) -> float:
    """liger_kernel/ops/fused_linear_cross_entropy.py::fused_linear_cross_entropy_forward[= triton.cdiv(V]: the
    gradients are made in the forward pass.

    The output layer's is summed up in its own type, from a product in bf16 and that again in fp32; a
    weight in fp32 is cast beside it.
    """
    shape, tokens, width = setup.shape, setup.batch.tokens, setup.weight_bytes
    factor = -(-shape.vocab // shape.hidden)
    chunk = 1 << (-(-tokens // factor) - 1).bit_length()
    times = (0 if setup.adapters else width + HALF + FULL) + (HALF if setup.wide else 0)
    return width * shape.hidden * tokens + HALF * shape.vocab * min(chunk, tokens) + times * shape.embedding


# trl/kernels/chunked_logprob.py::[TOKEN_CHUNK_SIZE] and trl/trainer/utils.py::[_CHUNKED_LOGPROB_CHUNK_SIZE]
_TILE_TOKENS, _TILE_WORDS = 4096, 32768


def tiles(setup: Setup) -> float:
    """One tile of logits, and the output layer's rows for it where they must be cast."""
    tile = HALF * min(_TILE_TOKENS, setup.batch.tokens) * _TILE_WORDS
    cast = HALF * min(_TILE_WORDS, setup.shape.vocab) * setup.shape.hidden if setup.wide else 0
    return tile + cast


def tiled_loss(setup: Setup, *, trained: bool) -> float:
    """TRL's own output layer: log-probabilities in tiles, gradients summed up in fp32."""
    gradient = (FULL + (0 if setup.wide else HALF)) * setup.shape.embedding if trained else 0
    states = (FULL + 2 * HALF) * setup.shape.hidden * setup.batch.tokens
    return tiles(setup) + gradient + states
