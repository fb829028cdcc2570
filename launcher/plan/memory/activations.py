"""What a decoder layer and the loss keep for the backward pass, in bytes.

Counted operator by operator from transformers' modules (5.17), liger_kernel 0.7.0, flash-attn 2 and
trl 1.16, and compared by a test with a run of those modules in which every allocation is counted.
The form of the formulas is that of "Reducing Activation Recomputation in Large Transformer Models"
(Korthikanti et al., 2022); the numbers differ because these modules keep fp32 copies in their norms
and the three products of a gated MLP.
"""

import math
from typing import NamedTuple

from launcher.artifacts.architecture import Shape
from launcher.artifacts.lengths import MicroBatch
from launcher.plan.memory.setup import FULL, HALF, Adapters, Setup


def compute_layer(setup: Setup) -> float:
    """What one layer keeps from its forward pass to its backward pass, without checkpointing."""
    products = 8
    if setup.liger:
        products = 6
    if setup.frozen:
        products -= HALF
    if setup.quantised is not None and setup.wide:
        # quantised linears return fp32 for fp32
        products *= 2
    per_token = _count_norm_bytes(setup)
    per_token += products * setup.shape.intermediate
    per_token += _count_adapter_bytes(setup)
    return per_token * setup.batch.tokens + _count_attention_bytes(setup)


def compute_compiled_layer(setup: Setup, share: float) -> float:
    """What one layer keeps under torch.compile with a share of the memory budget.

    The partitioner recomputes what is fused into other kernels, and keeps the inputs and outputs of
    matrix products: four states of the residual's width (the layer's input and what lies between
    its parts, before or behind their norms), Q and K also before norms of their own, Q, K, V and
    the attention's result, both inputs of the gated product and the product. A test compares this
    with torch's own partitioner. The budget counts between keeping the layer's input alone (0) and
    all of that (1).
    """
    shape = setup.shape
    query = shape.query
    key = shape.key
    repeated = key
    if setup.attention != "flash":
        # OLMo-core repeats keys and values for the queries' heads where no flash kernel does
        repeated = query
    elements = 4 * shape.hidden + 2 * query + 2 * repeated + 3 * shape.intermediate
    if shape.layout.qk_norm:
        elements += query + key
    whole = (HALF * elements + FULL * shape.heads) * setup.batch.tokens
    if share >= 1:
        return whole
    least = compute_checkpoint(setup)
    return least + share * (whole - least)


def compute_selected_modules(setup: Setup) -> float:
    """The inputs that one layer keeps where each of its modules is recomputed by itself.

    These are six states of the residual's width: the layer's input, and the outputs of norms,
    attention, the gated product and the sum of the residual
    (olmo_core_utils.py::TrainingConfig[activation_checkpointing_modules: list]).
    """
    return 6 * HALF * setup.shape.hidden * setup.batch.tokens


def compute_widest_module(setup: Setup) -> float:
    """What the largest of these modules keeps while it is recomputed: the gated product's parts."""
    return 3 * HALF * setup.shape.intermediate * setup.batch.tokens


def compute_checkpoint(setup: Setup) -> float:
    """What one checkpointed layer keeps: its input."""
    return setup.state_width * setup.shape.hidden * setup.batch.tokens


def compute_passing(setup: Setup, batch: MicroBatch) -> float:
    """What a layer needs in a forward pass that keeps nothing: the MLP's widths."""
    shape = setup.shape
    return (6 * shape.intermediate + setup.state_width * shape.hidden) * batch.tokens


def needs_mask(setup: Setup) -> bool:
    """Whether SDPA needs a mask: for padding, packed rows, or a window shorter than the rows.

    (transformers/masking_utils.py::_ignore_causal_mask_sdpa[if local_attention_size]). Where only
    some layers have a window, all are counted as if they had.
    """
    if setup.attention != "sdpa":
        return False
    batch = setup.batch
    if batch.real < batch.tokens or 0 < setup.shape.window <= batch.width:
        return True
    # The mask separates packed rows where keys and values are not cached
    # (transformers/masking_utils.py::_preprocess_mask_arguments[find_packed_sequence_indices]). DPO
    # caches them as for generating: dpo_utils.py::concatenated_forward[logits = model] does not
    # pass `use_cache`
    caches = setup.loss == "logprobs" and not setup.checkpointing and setup.sharding is None
    return setup.packed and not caches


def _count_norm_bytes(setup: Setup) -> float:
    """Bytes a token in norms and what the linear layers after them keep of their input."""
    shape = setup.shape
    per_hidden = 2 * count_norm_bytes(setup, setup.state_width)
    if not setup.frozen:
        inputs = 2
        if setup.wide:
            # an autocast linear casts its fp32 input for itself: q, k, v and gate, up
            inputs = 5
        per_hidden += HALF * inputs
    size = per_hidden * shape.hidden + FULL * 2
    if not shape.layout.qk_norm:
        return size
    groups = 2
    if shape.layout.qk_norm == "head":
        groups = shape.heads + shape.kv_heads
    return size + count_norm_bytes(setup, HALF) * (shape.query + shape.key) + FULL * groups


def count_norm_bytes(setup: Setup, state: int) -> int:
    """Bytes an element that one norm keeps beside its output; `state` are those of its input."""
    if setup.liger:
        return state
    if setup.adapters is not None:
        # without a gradient for the norm's weight the normalised values need not be kept
        return FULL
    kept = setup.shape.layout.norm_kept
    if state == FULL and kept == 6:
        return kept + FULL - HALF
    return kept


def _count_attention_bytes(setup: Setup) -> float:
    """Bytes in all: q, k, v, the output, the log-sum-exp, and masks."""
    shape = setup.shape
    batch = setup.batch
    plain = 4 * (shape.query + shape.key + shape.heads)
    if setup.attention == "flash" and batch.real < batch.tokens:
        # transformers removes the padding from q, k and v and puts it back into the output
        return plain * batch.real + HALF * shape.query * batch.tokens
    if not needs_mask(setup):
        return plain * batch.tokens
    # k and v are repeated for every query head; the mask is made additive in every layer
    if shape.kv_heads != shape.heads:
        plain = 4 * (2 * shape.query + shape.heads)
    padded_width = 8 * math.ceil(batch.width / 8)
    mask = HALF * batch.rows * batch.width * padded_width
    return plain * batch.tokens + mask


def _count_adapter_bytes(setup: Setup) -> float:
    """LoRA keeps each pair's dropped-out input (bf16), the dropout mask, and the narrow product."""
    adapters = setup.adapters
    if adapters is None:
        return 0
    shape = setup.shape
    targets = set(adapters.targets)
    inputs = [size[1] for name, size in shape.linears().items() if name in targets]
    narrow = HALF * adapters.rank * len(inputs)
    if adapters.dropout:
        return 3 * sum(inputs) + narrow
    if setup.autocast and (adapters.bytes == FULL or setup.wide):
        return HALF * sum(inputs) + narrow
    if not setup.frozen:
        return narrow
    # one tensor serves q, k and v; the attention keeps o's input anyway
    shared = 0
    if targets & {"q_proj", "k_proj", "v_proj"}:
        shared += shape.hidden
    if targets & {"gate_proj", "up_proj"}:
        shared += shape.hidden
    if "down_proj" in targets:
        shared += shape.intermediate
    return HALF * shared + narrow


def compute_backward(setup: Setup) -> float:
    """The most that one layer's backward pass needs beside what was kept."""
    shape = setup.shape
    batch = setup.batch
    rope = 2 * HALF * shape.head_dim * batch.width
    if setup.liger and setup.adapters is None:
        # the down projection's weight gradient
        rope += HALF * shape.hidden * shape.intermediate
    per_token = max(
        point.inner * shape.intermediate + point.hidden * shape.hidden
        for point in _find_backward_points(setup)
    )
    return per_token * batch.tokens + rope


class _BackwardPoint(NamedTuple):
    """Bytes a token at one point of the backward pass, for each element of the MLP's width and of
    the residual's.
    """

    inner: float
    hidden: int


def _find_backward_points(setup: Setup) -> list[_BackwardPoint]:
    """The fullest points of a layer's backward pass."""
    adapters = setup.adapters
    state = setup.state_width
    if adapters is not None and not setup.wide:
        return _find_adapted_backward_points(setup, adapters, adapters.bytes)
    if adapters is not None and setup.quantised is not None:
        # around fp32 states twice as much, whatever the type of the adapters
        points = _find_adapted_backward_points(setup, adapters, HALF)
        return [_BackwardPoint(2 * point.inner, 2 * point.hidden) for point in points]
    if adapters is not None and "down_proj" in adapters.targets:
        if adapters.bytes == FULL:
            return [_BackwardPoint(11.5, state)]
        return [_BackwardPoint(4, state)]
    if setup.liger:
        # the product's gradient; SwiGLU and RMSNorm write in place
        return [_BackwardPoint(2, state)]
    if setup.shape.layout.post_norm:
        # fp32 gradients of a norm
        return [_BackwardPoint(4, state - 8), _BackwardPoint(0, 16)]
    # gradients of the MLP's product
    return [_BackwardPoint(4, state)]


def _find_adapted_backward_points(
    setup: Setup, adapters: Adapters, width: int
) -> list[_BackwardPoint]:
    """The fullest points on 16-bit weights, where adapters have `width` bytes an element.

    Read off traces: a frozen linear keeps no input, an adapter's own is cast and dropped out.
    """
    norms = 10
    if setup.liger:
        norms = 8
    if "down_proj" in adapters.targets:
        return _find_points_of_adapted_output(adapters, width, norms)
    if not {"gate_proj", "up_proj"} & set(adapters.targets):
        if setup.liger:
            return [_BackwardPoint(2, 4)]
        return [_BackwardPoint(6, 2)]
    if setup.liger and width == FULL:
        return [_BackwardPoint(4, norms)]
    if setup.liger and adapters.dropout:
        return [_BackwardPoint(4, 4)]
    if setup.liger:
        return [_BackwardPoint(4, 2)]
    if width == FULL:
        return [_BackwardPoint(6, 2), _BackwardPoint(4, norms)]
    return [_BackwardPoint(6, 2)]


def _find_points_of_adapted_output(
    adapters: Adapters, width: int, norms: int
) -> list[_BackwardPoint]:
    """The same where the MLP's last linear is adapted; the norms take `norms` bytes an element."""
    if width == FULL and adapters.dropout:
        return [_BackwardPoint(10, norms)]
    if width == FULL:
        return [_BackwardPoint(6, norms)]
    if adapters.dropout:
        return [_BackwardPoint(4, 2), _BackwardPoint(2, norms)]
    return [_BackwardPoint(4, 2)]


def compute_logits(shape: Shape, batch: MicroBatch, element: int) -> tuple[float, str]:
    """Bytes of the logits of a batch, with their formula."""
    size = element * shape.vocab * batch.tokens
    return size, f"{element} x {batch.tokens:,} x {shape.vocab:,}"


def compute_fused_loss(setup: Setup) -> float:
    """The loss that makes its gradients in the forward pass
    (liger_kernel/ops/fused_linear_cross_entropy.py::fused_linear_cross_entropy_forward[triton.cdiv(V]).

    The output layer's is summed up in its own type, from a product in bf16 and a copy of that in
    fp32; an fp32 weight is cast beside it.
    """
    shape = setup.shape
    tokens = setup.batch.tokens
    width = setup.weight_bytes
    factor = -(-shape.vocab // shape.hidden)
    chunk = 1 << (-(-tokens // factor) - 1).bit_length()
    gradient = 0
    if setup.adapters is None:
        gradient = width + HALF + FULL
    if setup.wide:
        gradient += HALF
    states = width * shape.hidden * tokens
    logits = HALF * shape.vocab * min(chunk, tokens)
    return states + logits + gradient * shape.embedding


# trl/kernels/chunked_logprob.py::[TOKEN_CHUNK_SIZE] and
# trl/trainer/utils.py::[_CHUNKED_LOGPROB_CHUNK_SIZE]
_TILE_TOKENS = 4096
_TILE_WORDS = 32768


def compute_tiles(setup: Setup) -> float:
    """One tile of logits, and the output layer's rows for it where they must be cast."""
    tile = HALF * min(_TILE_TOKENS, setup.batch.tokens) * _TILE_WORDS
    if not setup.wide:
        return tile
    return tile + HALF * min(_TILE_WORDS, setup.shape.vocab) * setup.shape.hidden


def compute_tiled_loss(setup: Setup, *, trained: bool) -> float:
    """TRL's own output layer: log-probabilities in tiles, gradients summed up in fp32."""
    shape = setup.shape
    size = compute_tiles(setup) + (FULL + 2 * HALF) * shape.hidden * setup.batch.tokens
    if trained:
        width = FULL
        if not setup.wide:
            width += HALF
        size += width * shape.embedding
    return size
