"""A reference for the memory model: the real transformers model, run on tensors without data.

Every operator's outputs are counted while they live, so that a forward and backward pass of an 8B
model is measured on any machine. What has no CPU kernel (flash attention, Liger's Triton kernels)
is stood in for by functions that allocate and keep what the real ones do.
"""

import contextlib
import math
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils, modeling_utils

FLOAT, HALF = torch.float32, torch.bfloat16
Batch = dict[str, torch.Tensor]
Change = tuple[Any, str, Any]
"""An object, its attribute, and what replaces it."""
DEVICE = torch.ops.prim.device.default


class Tracker(TorchDispatchMode):
    """Bytes of all storages made since it was entered, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            # asked several times for every operator of a backward pass
            tensor = args[0]
            if tensor.fake_mode.in_kernel_invocation:
                return func(tensor)
            return tensor.fake_device
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these as nothing: they were there before."""
        for tensor in tensors:
            self.sizes[tensor.untyped_storage()] = 0

    def see(self, tensor: torch.Tensor) -> None:
        device = getattr(tensor, "fake_device", None) or tensor.device
        if device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage in self.sizes:
            return
        size = storage.nbytes()
        self.sizes[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size

    def mark(self) -> int:
        self.peak = self.now
        return self.now


class _Flash(torch.autograd.Function):
    """What flash-attn 2 keeps and allocates; q (tokens, heads, dim)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:-1], dtype=FLOAT)
        ctx.save_for_backward(q, k, v, out, lse, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, _, lse, _ = ctx.saved_tensors
        dq = torch.empty(q.shape, dtype=q.dtype)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        accumulator = torch.empty(q.shape, dtype=FLOAT)
        delta = torch.empty(lse.shape, dtype=FLOAT)
        if k.shape != q.shape:
            # one gradient a query head, summed up afterwards
            wide = [torch.empty(q.shape, dtype=q.dtype) for _ in range(2)]
            del wide
        del accumulator, delta
        return dq, dk, dv, None


def _flash_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> Any:
    """transformers' flash path: (batch, heads, length, dim) in, (batch, length, heads, dim) out."""
    # fp32 states (autocast, adapters in fp32) are cast for the kernel
    states = [state.to(HALF).transpose(1, 2) for state in (query, key, value)]
    if mask is None:
        return _Flash.apply(*states), None
    batch, length, heads, dim = states[0].shape
    tokens = batch * length
    rows = mask.flatten()[: REAL_TOKENS[0]].to(torch.int64)
    unpadded = [state.reshape(tokens, -1, dim)[rows] for state in states]
    out = _Flash.apply(*unpadded)
    padded = torch.zeros((tokens, heads, dim), dtype=out.dtype)
    padded[rows] = out
    return padded.view(batch, length, heads, dim), None


def _sdpa_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """torch's own attention: flash kernels without a mask, memory-efficient ones with a mask."""
    bias = None
    query = query.to(HALF)
    key = key.to(HALF)
    value = value.to(HALF)
    if mask is not None:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            repeat = transformers.integrations.sdpa_attention.repeat_kv
            key = repeat(key, groups)
            value = repeat(value, groups)
        # a boolean mask becomes an additive one in every layer, padded to a multiple of 8
        padded_length = math.ceil(mask.shape[-1] / 8) * 8
        bias = torch.empty((*mask.shape[:-1], padded_length), dtype=HALF)
    states = [state.transpose(1, 2) for state in (query, key, value)]
    return _Flash.apply(*states, bias), None


REAL_TOKENS = [0]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        rstd = torch.empty(x.shape[:-1], dtype=FLOAT)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        # written into the gradient that came in
        partial = torch.empty((132, x.shape[-1]), dtype=FLOAT)
        return grad.contiguous().view(x.shape), partial.sum(0).to(weight.dtype)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        return a.view(a.shape), b.view(b.shape)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
        ctx.save_for_backward(cos, sin)
        return q.view(q.shape), k.view(k.shape)

    @staticmethod
    def backward(ctx: Any, dq: Any, dk: Any) -> Any:
        dq, dk = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dq, dk))
        return dq, dk, None, None


class _FourBit(torch.autograd.Function):
    """bitsandbytes' product with 4-bit weights: they are made whole for it in their former type,
    twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.weight = weight
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        return torch.nn.functional.linear(x, whole.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        whole = torch.empty(ctx.weight.shape, dtype=ctx.weight.dtype)
        return torch.matmul(grad, whole.to(grad.dtype)), None


def _four_bits(self: Any, x: Any) -> Any:
    """Linear4bit where the other weights are fp32: the result has the type of the input."""
    return _FourBit.apply(x.to(HALF), self.weight).to(x.dtype)


class _FusedLoss(torch.autograd.Function):
    """liger_kernel's fused linear cross entropy: gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        tokens, width = hidden.shape
        factor = math.ceil(weight.shape[0] / width)
        # the next power of two
        chunk = 1 << (math.ceil(tokens / factor) - 1).bit_length()
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        for start in range(0, tokens, chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t()
            grad_hidden[start : start + chunk] = logits @ weight
            if grad_weight is not None:
                grad_weight += torch.mm(logits.t(), part).float()
        ctx.save_for_backward(grad_hidden.detach(), grad_weight)
        return torch.zeros((), dtype=FLOAT)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.saved_tensors


@contextlib.contextmanager
def _replaced(*changes: Change) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        yield


def _liger(model: Any) -> list[Change]:
    source = __import__(type(model).__module__, fromlist=["x"])
    changes: list[Change] = []
    for name, value in list(vars(source).items()):
        if name.endswith("RMSNorm"):
            changes.append((value, "forward", lambda self, x: _Norm.apply(x, self.weight)))
        if name.endswith("MLP"):
            changes.append((value, "forward", _swiglu))
    changes.append((source, "apply_rotary_pos_emb", _rotate))
    return changes


def _rotate(q: Any, k: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> Any:
    return _Rope.apply(q, k, cos, sin)


def _swiglu(self: Any, x: Any) -> Any:
    return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))


def config_of(name: str, layers: int | None = None) -> Any:
    from launcher.artifacts import architecture

    values = dict(architecture.load_known_shapes()[name.lower()])
    if layers is not None:
        values["num_hidden_layers"] = layers
    model_type = values.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **values)
    config.pad_token_id = None
    return config


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _with_adapters(
    model: Any, rank: int, dtype: Any, targets: Sequence[str], dropout: float
) -> Any:
    import peft

    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=16,
        lora_dropout=dropout,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
    )
    # parameters without data cannot be moved
    with _replaced((torch.nn.Module, "to", lambda self, *_, **__: self)):
        model = peft.get_peft_model(model, settings)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                _convert_parameter(module, name, dtype)
    return model


def _convert_parameter(module: Any, name: str, dtype: Any) -> None:
    values = module._parameters[name].detach().to(dtype)
    module._parameters[name] = torch.nn.Parameter(values)


def _without_adapters(model: Any) -> Any:
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def _hidden_states(model: Any, batch: Batch) -> Any:
    """Those of the last layer, before the output layer."""
    return model.model(**_without_labels(batch), use_cache=False)[0]


def _without_labels(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def sft_loss(model: Any, batch: Batch) -> Any:
    """As finetune.py calls it; the outputs are dropped before the backward pass."""
    return model(**batch, use_cache=False).loss


def fused_loss(model: Any, batch: Batch) -> Any:
    """As finetune.py calls it where Liger has replaced the loss."""
    base = _without_adapters(model)
    hidden = _hidden_states(base, batch)
    return _FusedLoss.apply(hidden.view(-1, hidden.shape[-1]), base.lm_head.weight)


def _logps(logits: Any, labels: Any) -> Any:
    """Allocate in the order of calculate_per_token_logps.

    open_instruct/padding_free_collator.py::calculate_per_token_logps[torch.full_like]
    """
    shifted = torch.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    logits = logits.to(FLOAT)
    safe = shifted.clamp(min=0)
    return torch.gather(logits.log_softmax(-1), 2, safe.unsqueeze(2)).squeeze(2)


class _Tiled(torch.autograd.Function):
    """TRL's output layer: tiles of logits, gradients summed up in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, grown: int) -> Any:
        ctx.save_for_backward(hidden, weight)
        tile = torch.empty((min(len(hidden), 4096), 32768), dtype=HALF)
        del tile
        return torch.empty(len(hidden), dtype=FLOAT)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        d_hidden = torch.zeros(hidden.shape, dtype=FLOAT)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight.shape, dtype=FLOAT)
        tile = torch.empty((min(len(hidden), 4096), 32768), dtype=HALF)
        assert tile.is_contiguous()
        part = hidden[:4096].to(HALF)
        words = weight[:32768].to(HALF)
        del part, words
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden.to(hidden.dtype), d_weight, None


def tiled_loss(model: Any, batch: Batch) -> Any:
    """As trl's trainers call it: positions without labels are left out (here there are none)."""
    base = _without_adapters(model)
    hidden = _hidden_states(base, batch)[:, :-1]
    chosen = hidden.reshape(-1, hidden.shape[-1]).clone()
    return _Tiled.apply(chosen, base.lm_head.weight, 0).sum()


def dpo_loss(model: Any, batch: Batch) -> Any:
    """The concatenated forward pass of the pinned scripts: the logits live until it is left."""
    logits = model(**_without_labels(batch)).logits
    return _logps(logits, batch["labels"]).sum()


class _OlmoFlash(torch.nn.Module):
    """olmo_core's attention backends take (batch, length, heads, dim), and no mask here."""

    cp_enabled = False

    def forward(self, qkv: Any, **_: Any) -> Any:
        return _Flash.apply(*qkv)


def _plain_olmo_core(name: str, *, vocab: int, layers: int) -> Any:
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.transformer import TransformerConfig

    config = getattr(TransformerConfig, name)(
        vocab_size=vocab, attn_backend=AttentionBackendName.torch
    )
    config.n_layers = layers
    return config.build(init_device="cpu")


def _olmo_core(name: str, *, vocab: int, layers: int) -> Any:
    model = _plain_olmo_core(name, vocab=vocab, layers=layers)
    for block in model.blocks.values():
        block.attention.backend = _OlmoFlash()
    head = model.lm_head

    def logps(x: Any, *, labels: Any, **_: Any) -> Any:
        """The name keeps the logits alive.

        open_instruct/olmo_core_train_modules.py::DPOLMHead.forward[h = self.norm(x]
        """
        logits = head.w_out(head.norm(x))
        return _logps(logits, labels)

    head.forward = logps
    return model


def measure_olmo_core(
    name: str, vocab: int, *, layers: int, rows: int, length: int, no_grad: bool
) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _olmo_core(name, vocab=vocab, layers=layers)
        for module in model.modules():
            for own, parameter in list(module._parameters.items()):
                if parameter is not None:
                    _convert_parameter(module, own, HALF)
        _drop_gradients(model)
        ids = torch.zeros((rows, length), dtype=torch.int64)
        with Tracker() as tracker:
            tracker.ignore([*model.parameters(), *model.buffers(), ids])
            with torch.set_grad_enabled(not no_grad):
                value = model(ids, labels=torch.zeros_like(ids)).sum()
            if not no_grad:
                value.backward()
            return tracker.peak


def measure_fsdp(
    name: str, vocab: int, *, layers: int, rows: int, length: int, ranks: int, replicas: int
) -> Any:
    """Peak bytes of a step under FSDP2 as dpo.py applies it, on one of `ranks` simulated ranks.

    Beside this rank's weights and the optimizer. FSDP frees what it gathered by making storages
    empty, which fake ones cannot: that is counted here.
    """
    import torch.distributed as dist
    from olmo_core.train.train_module.transformer.config import (
        TransformerDataParallelWrappingStrategy as Wrapping,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tracker = Tracker()
    freed = {}

    def free(tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and id(storage) not in freed:
            freed[id(storage)] = storage
            tracker.now -= storage.nbytes()

    def allocate_again(tensor: Any) -> None:
        storage = freed.pop(id(tensor.untyped_storage()), None)
        if storage is not None:
            tracker.now += storage.nbytes()
            tracker.peak = max(tracker.peak, tracker.now)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = _olmo_core(name, vocab=vocab, layers=layers)
            model.apply_fsdp(
                dp_mesh=mesh,
                param_dtype=HALF,
                reduce_dtype=FLOAT,
                wrapping_strategy=Wrapping.blocks,
            )
            ids = torch.zeros((rows, length), dtype=torch.int64)
            changes = (
                (_fsdp_param, "free_storage", free),
                (_fsdp_param, "alloc_storage", allocate_again),
                (_fsdp_param_group, "alloc_storage", allocate_again),
            )
            shards = [parameter._local_tensor for parameter in model.parameters()]
            with _replaced(*changes), tracker:
                tracker.ignore([*shards, ids])
                model(ids, labels=torch.zeros_like(ids)).sum().backward()
        return tracker.peak
    finally:
        dist.destroy_process_group()


def kept_by_compiled_layer(name: str, *, length: int, share: float) -> int:
    """Bytes that a compiled layer of OLMo-core keeps.

    torch's own partitioner decides, with `share` as its budget. Sines and cosines, which the layer
    keeps anyway, do not count.
    """
    from torch._functorch import config as functorch

    model = _plain_olmo_core(name, vocab=64, layers=1).to(HALF)
    block = model.blocks["0"]
    x = torch.randn(1, length, model.d_model, dtype=HALF, requires_grad=True)
    block(x)
    rope = block.attention.rope.get_buffers(length, x.device)
    own = [*block.parameters(), rope.pos_sin, rope.pos_cos]
    own_storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own_storages:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch._dynamo.reset()
    with _replaced((functorch, "activation_memory_budget", share)):
        compiled = torch.compile(block, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            alive = compiled(x)
    del alive
    return sum(kept.values())


def measure(
    config: Any,
    *,
    rows: int,
    length: int,
    real: int | None = None,
    stage: str = "sft",
    attention: str = "flash",
    liger: bool = False,
    checkpointing: bool = False,
    lora: int | None = None,
    packing: bool = False,
    no_grad: bool = False,
    autocast: bool = False,
    dtype: Any = HALF,
    adapter: Any = HALF,
    targets: Sequence[str] = LINEARS,
    dropout: float = 0.1,
    loss: Callable[[Any, Batch], Any] | None = None,
    quantised: bool = False,
) -> int:
    """The peak in bytes of a forward and backward pass, beside weights and gradients.

    Over `rows` x `length` tokens; `real` of them are no padding. Gradients of weights are dropped
    when they are there, as ZeRO-2 does with those of other ranks.
    """
    padded = real is not None and real < rows * length
    REAL_TOKENS[0] = real or rows * length
    _register_attention(attention, padded=padded)
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = "traced"
    if loss is None:
        loss = _usual_loss(stage, liger=liger)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        base = model
        if lora:
            model = _with_adapters(model, lora, adapter, targets, dropout)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        # CUDA's dropout keeps a boolean mask; the CPU's would keep numbers
        changes = [
            (torch.nn.functional, "dropout", _dropout),
            (masking_utils, "_ignore_causal_mask_sdpa", _no_mask_needed(padded=padded)),
        ]
        if liger:
            changes += _liger(base)
        if quantised:
            changes += _quantised(base)
        _drop_gradients(model)
        batch = _batch(rows, length, packing=packing)
        with _replaced(*changes), Tracker() as tracker:
            tracker.ignore([*model.parameters(), *model.buffers(), *batch.values()])
            cast = torch.autocast("cpu", dtype=HALF, enabled=autocast)
            with torch.set_grad_enabled(not no_grad), cast:
                value = loss(model, batch)
            if not no_grad:
                value.backward()
            return tracker.peak


def _usual_loss(stage: str, *, liger: bool) -> Callable[[Any, Batch], Any]:
    if stage == "dpo":
        return dpo_loss
    if liger:
        return fused_loss
    return sft_loss


def _register_attention(name: str, *, padded: bool) -> None:
    attention: Any = _sdpa_attention
    mask: Any = masking_utils.sdpa_mask
    if name == "flash":
        attention = _flash_attention
        mask = _flash_mask if padded else _no_mask
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register("traced", attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("traced", mask)


def _flash_mask(**kwargs: Any) -> Any:
    return kwargs["attention_mask"]


def _no_mask(**_: Any) -> None:
    return None


def _quantised(model: Any) -> list[Change]:
    """The products of its frozen matrices, with weights of 4 bits."""
    changes: list[Change] = []
    for name, module in model.named_modules():
        last_name = name.split(".")[-1]
        is_frozen = last_name == "base_layer" or last_name in LINEARS
        if is_frozen and isinstance(module, torch.nn.Linear):
            changes.append((module, "forward", types.MethodType(_four_bits, module)))
    return changes


def _batch(rows: int, length: int, *, packing: bool) -> Batch:
    if packing:
        length *= rows
        rows = 1
    ids = torch.zeros((rows, length), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if packing:
        batch["position_ids"] = torch.zeros_like(ids)
    else:
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def _drop_gradients(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)


def _no_mask_needed(*, padded: bool) -> Callable[..., bool]:
    """The real question asks data for padding, which there is none of."""

    def ignore(_: Any, q: int, kv: int, at: int, kv_at: int, local: int | None = None) -> bool:
        return not padded and (local is None or kv < local)

    return ignore


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _drop(parameter: Any) -> None:
    parameter.grad = None
