"""Where each engine keeps the gradient that its optimizer is about to use.

A `GradientPiece` is a contiguous range of one parameter, flattened, that this process updates, and the tensor
that holds its gradient. DeepSpeed's ZeRO 1 and 2 and its bf16 optimizer keep ranges of all parameters in
one flat tensor (`_hp_mapping`, deepspeed/utils/tensor_fragment.py), ZeRO 3 in one a sub-group
(`grad_position`, deepspeed/runtime/zero/stage3.py), FSDP2 the first dimension's chunk of each parameter
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py); everything else leaves `parameter.grad`.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Unsupported(Exception):
    """Gradients cannot be compared here; the message says why."""


class GradientPiece(NamedTuple):
    """Elements of the parameter in row `row`, from `start` on; `gradient` is flat and as long."""

    row: int
    start: int
    gradient: Any


class Plain:
    """One process, or DistributedDataParallel: the whole gradient, in `parameter.grad`."""

    def __init__(self, parameters: Mapping[str, Any], world: int) -> None:
        self.parameters = list(parameters.values())
        self.divisor = float(world)
        self.formats = [p.dtype for p in self.parameters]

    def hooked(self) -> list[Any]:
        """The tensors, one a row, whose gradients autograd computes; None where there is none yet."""
        return list(self.parameters)

    def pieces(self, optimizer: Any = None) -> Iterator[GradientPiece]:
        """Of all parameters that have a gradient; of an engine's inner `optimizer`, what its `step` updates."""
        for row, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                yield GradientPiece(row, 0, parameter.grad.reshape(-1))


class FullyShard(Plain):
    """FSDP2 (`fully_shard`): a chunk of the first dimension, in the sharded parameter's gradient."""

    def __init__(self, parameters: Mapping[str, Any], modules: list[Any], world: int) -> None:
        groups = [g for module in modules for g in _parameter_groups(module._get_fsdp_state())]
        by_id: dict[int, Any] = {}
        for shard in (shard for group in groups for shard in group.fsdp_params):
            # the root's parameters stay gathered between forward and backward
            by_id[id(shard.sharded_param)] = by_id[id(getattr(shard, "_unsharded_param", None))] = shard
        self.shards = [by_id.get(id(p)) for p in parameters.values()]
        rows = zip(parameters.items(), self.shards, strict=True)
        super().__init__({n: p if shard is None else shard.sharded_param for (n, p), shard in rows}, world)
        factors = {getattr(group, "gradient_divide_factor", None) for group in groups}
        if len(factors) > 1:
            raise Unsupported("FSDP divides the gradients of its groups by different numbers")
        self.divisor = float(factors.pop() or world)
        for shard in filter(None, self.shards):
            placement = getattr(shard, "fsdp_placement", None)
            if getattr(shard, "is_dtensor", False) or getattr(placement, "dim", 0) != 0:
                raise Unsupported("parameters are sharded over more than FSDP's first dimension")
            # all-gathered in one format, reduced in another
            self.formats += [f for name in ("param_dtype", "reduce_dtype") if (f := getattr(shard, name, None))]

    def hooked(self) -> list[Any]:
        """Autograd differentiates what was gathered, which there is after the first forward pass."""
        return [
            parameter if shard is None else getattr(shard, "_unsharded_param", None)
            for parameter, shard in zip(self.parameters, self.shards, strict=True)
        ]

    def pieces(self, optimizer: Any = None) -> Iterator[GradientPiece]:
        for row, (parameter, shard) in enumerate(zip(self.parameters, self.shards, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                continue
            if shard is None:
                yield GradientPiece(row, 0, gradient.reshape(-1))
                continue
            local = gradient._local_tensor
            mesh = shard.mesh_info
            rows = int(shard._orig_size[0])
            # torch.chunk's parts: all as large as the first, the last ones shorter or empty
            chunk = -(-rows // mesh.shard_mesh_size)
            width = int(parameter.numel()) // max(1, rows)
            if local.numel():
                yield GradientPiece(row, mesh.shard_mesh_rank * chunk * width, local.reshape(-1))


def _parameter_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    group = getattr(state, "_fsdp_param_group", None)
    return list(groups) if groups is not None else [] if group is None else [group]


class DeepSpeed(Plain):
    """An engine of DeepSpeed: flat fp32 gradients, seen when its inner optimizer is about to step.

    By then the engine has divided them by its loss scale and clipped them: `scale` is that factor.
    """

    def __init__(self, parameters: Mapping[str, Any], engine: Any, world: int) -> None:
        super().__init__(parameters, world)
        self.outer = engine.optimizer
        if not hasattr(self.outer, "optimizer"):
            raise Unsupported(f"DeepSpeed's engine steps {type(self.outer).__name__} itself")
        group = getattr(self.outer, "dp_process_group", None)
        if group is not None and sys.modules["torch"].distributed.get_world_size(group) != world:
            raise Unsupported("gradients are averaged over a part of the processes only")
        quantized = getattr(engine, "zero_quantized_gradients", None)
        if quantized() if callable(quantized) else quantized:
            raise Unsupported("gradients are quantized on their way (zero_quantized_gradients)")
        # with sequence parallelism the processes that share a row each hold a part of its gradient
        self.divisor = world / float(getattr(self.outer, "sequence_parallel_size", 1) or 1)
        if not getattr(self.outer, "gradient_average", True):
            self.divisor = 1.0
        wire = getattr(engine, "communication_data_type", None)
        self.formats += [wire] if wire is not None else []
        self.flat: dict[int, list[tuple[int, int, int, int]]] = {}
        inner = self.outer.optimizer
        backup = getattr(self.outer, "backup_optimizer", None)
        self.steppers: list[Any] = [o for o in (inner, backup) if hasattr(o, "register_step_pre_hook")]
        if not self.steppers:
            raise Unsupported(f"{type(inner).__name__} has no hook before its step")

    def scale(self) -> Any:
        """What the engine has multiplied the averaged gradients by, as a number or a tensor."""
        scale = 1.0 / float(getattr(self.outer, "loss_scale", 1.0) or 1.0)
        limit = float(getattr(self.outer, "clip_grad", 0.0) or 0.0)
        norm = getattr(self.outer, "_global_grad_norm", None)
        if limit <= 0 or norm is None:
            return scale
        torch = sys.modules["torch"]
        if not torch.is_tensor(norm):
            return scale / max(1.0, (float(norm) + 1e-6) / limit)
        return scale / ((norm.detach().float() + 1e-6) / limit).clamp(min=1.0)

    def pieces(self, optimizer: Any = None) -> Iterator[GradientPiece]:
        own = {id(p): row for row, p in enumerate(self.parameters)}
        flats = [flat for group in optimizer.param_groups for flat in group["params"] if flat.grad is not None]
        for flat in flats:
            gradient = flat.grad.reshape(-1)
            if id(flat) in own:
                yield GradientPiece(own[id(flat)], 0, gradient)
                continue
            for row, start, offset, length in self._ranges(flat):
                yield GradientPiece(row, start, gradient[offset : offset + length])

    def _ranges(self, flat: Any) -> list[tuple[int, int, int, int]]:
        """Row, its first element, and place and length in `flat`, for all that `flat` holds."""
        if id(flat) not in self.flat:
            sharded = getattr(self.outer, "fp32_partitioned_groups_flat", None)
            index = next((i for i, one in enumerate(sharded or ()) if one is flat), None)
            self.flat[id(flat)] = list(self._fragments(flat) if sharded is None else self._shards(index))
        return self.flat[id(flat)]

    def _fragments(self, flat: Any) -> Iterator[tuple[int, int, int, int]]:
        begin = flat.data_ptr()
        end = begin + flat.numel() * flat.element_size()
        for row, parameter in enumerate(self.parameters):
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None or mapping.hp_fragment is None:
                continue
            place, address = mapping.hp_fragment.data_ptr(), mapping.lp_fragment_address
            if begin <= place < end:
                yield row, int(address.start), (place - begin) // flat.element_size(), int(address.numel)

    def _shards(self, index: int | None) -> Iterator[tuple[int, int, int, int]]:
        distributed = sys.modules["torch"].distributed
        positions = getattr(self.outer, "grad_position", {})
        for row, parameter in enumerate(self.parameters):
            position = positions.get(getattr(parameter, "ds_id", None))
            if position is None or position[0] != index:
                continue
            whole = int(parameter.ds_tensor.ds_numel)
            start = distributed.get_rank(parameter.ds_process_group) * whole
            # the last shard is padded
            length = min(whole, int(parameter.ds_numel) - start)
            if length > 0:
                yield row, start, int(position[1]), length


def engine_of(model: Any, parameters: Mapping[str, Any], world: int) -> Any:
    """The engine that stands between backward and optimizer. Raises Unsupported."""
    if hasattr(model, "zero_optimization_stage"):
        return DeepSpeed(parameters, model, world)
    modules = list(model.modules())
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise Unsupported("FSDP1 flattens parameters: `fsdp_version: 2` can be compared")
    sharded = [module for module in modules if hasattr(module, "_get_fsdp_state")]
    if sharded:
        return FullyShard(parameters, sharded, world)
    if any(hasattr(p, "placements") for p in parameters.values()):
        raise Unsupported("parameters are split over processes (tensor parallelism)")
    if getattr(model, "_comm_hooks", None):
        raise Unsupported("DistributedDataParallel has a communication hook")
    return Plain(parameters, world)
