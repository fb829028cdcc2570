"""Where each engine keeps the gradient that its optimizer is about to use.

A `GradientPiece` is a contiguous range of one flattened parameter that this process updates, and
the tensor with its gradient. DeepSpeed's ZeRO 1 and 2 and its bf16 optimizer keep ranges of all
parameters in one flat tensor (`_hp_mapping`, deepspeed/utils/tensor_fragment.py), ZeRO 3 in one for
each sub-group (`grad_position`, deepspeed/runtime/zero/stage3.py), FSDP2 a chunk of the first
dimension of each parameter (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Everything else
uses `parameter.grad`.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .process import Module, Tensor


class Unsupported(Exception):
    """Gradients cannot be compared here; the message says why."""


class GradientPiece(NamedTuple):
    """Elements of the parameter of `row`, from `start` on; `gradient` is flat and as long."""

    row: int
    start: int
    gradient: Tensor


class FlatRange(NamedTuple):
    """A range of a parameter, and its place in a flat tensor of DeepSpeed's; all in elements."""

    row: int
    start: int
    offset: int
    length: int


class Plain:
    """One process, or DistributedDataParallel: the whole gradient, in `parameter.grad`.

    `divisor` is what the engine divides the sum over all processes by; `formats` are the dtypes
    that a gradient passes through.
    """

    def __init__(self, parameters: Mapping[str, Tensor], world: int) -> None:
        self.parameters = list(parameters.values())
        self.divisor = float(world)
        self.formats = [parameter.dtype for parameter in self.parameters]

    def list_hooked(self) -> list[Tensor]:
        """By row, the tensor whose gradient autograd computes; None if there is none yet."""
        return self.parameters

    def iterate_pieces(self, optimizer: Any = None) -> Iterator[GradientPiece]:
        """What DeepSpeed's inner `optimizer` updates; of other engines all gradients."""
        for row, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                yield GradientPiece(row, 0, parameter.grad.reshape(-1))


class FullyShard(Plain):
    """FSDP2: a chunk of the first dimension, in the sharded parameter's gradient."""

    def __init__(self, parameters: Mapping[str, Tensor], modules: list[Module], world: int) -> None:
        super().__init__(parameters, world)
        groups = []
        for module in modules:
            state = module._get_fsdp_state()
            groups.extend(_find_parameter_groups(state))
        by_id: dict[int, Any] = {}
        for group in groups:
            for shard in group.fsdp_params:
                by_id[id(shard.sharded_param)] = shard
                # the root's parameters stay gathered between forward and backward
                gathered = getattr(shard, "_unsharded_param", None)
                by_id[id(gathered)] = shard
        self.shards = [by_id.get(id(parameter)) for parameter in self.parameters]
        for row, shard in enumerate(self.shards):
            if shard is not None:
                self._add_shard(row, shard)
        factors = {getattr(group, "gradient_divide_factor", None) for group in groups}
        if len(factors) > 1:
            raise Unsupported("FSDP divides the gradients of its groups by different numbers")
        self.divisor = float(factors.pop() or world)

    def _add_shard(self, row: int, shard: Any) -> None:
        placement = getattr(shard, "fsdp_placement", None)
        if getattr(shard, "is_dtensor", False) or getattr(placement, "dim", 0) != 0:
            raise Unsupported("parameters are sharded over more than FSDP's first dimension")
        self.parameters[row] = shard.sharded_param
        # all-gathered in one format, reduced in another
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(shard, name, None)
            if dtype is not None:
                self.formats.append(dtype)

    def list_hooked(self) -> list[Tensor]:
        """Autograd differentiates the gathered parameters, which the first forward pass creates."""
        tensors = []
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            if shard is not None:
                parameter = getattr(shard, "_unsharded_param", None)
            tensors.append(parameter)
        return tensors

    def iterate_pieces(self, optimizer: Any = None) -> Iterator[GradientPiece]:
        pairs = zip(self.parameters, self.shards, strict=True)
        for row, (parameter, shard) in enumerate(pairs):
            if parameter.grad is None:
                continue
            if shard is None:
                yield GradientPiece(row, 0, parameter.grad.reshape(-1))
                continue
            local = parameter.grad._local_tensor
            if local.numel():
                start = _find_start(parameter, shard)
                yield GradientPiece(row, start, local.reshape(-1))


def _find_start(parameter: Tensor, shard: Any) -> int:
    """The first element of a parameter that lies in this process's shard."""
    mesh = shard.mesh_info
    rows = int(shard._orig_size[0])
    # torch.chunk's parts: all as large as the first, the last ones shorter or empty
    chunk = -(-rows // mesh.shard_mesh_size)
    width = int(parameter.numel()) // max(1, rows)
    return int(mesh.shard_mesh_rank * chunk * width)


def _find_parameter_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    # older releases of torch
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


class DeepSpeed(Plain):
    """An engine of DeepSpeed: flat fp32 gradients, read when its inner optimizer is about to step.

    By then the engine has divided them by its loss scale and clipped them: `scale` is that factor.
    """

    def __init__(self, parameters: Mapping[str, Tensor], engine: Any, world: int) -> None:
        super().__init__(parameters, world)
        outer = engine.optimizer
        self.outer = outer
        if not hasattr(outer, "optimizer"):
            raise Unsupported(f"DeepSpeed's engine steps {type(outer).__name__} itself")
        group = getattr(outer, "dp_process_group", None)
        distributed = sys.modules["torch"].distributed
        if group is not None and distributed.get_world_size(group) != world:
            raise Unsupported("gradients are averaged over a part of the processes only")
        quantized = getattr(engine, "zero_quantized_gradients", None)
        if callable(quantized) and quantized():
            raise Unsupported("gradients are quantized on their way (zero_quantized_gradients)")
        self.divisor = 1.0
        if getattr(outer, "gradient_average", True):
            # processes of sequence parallelism share a row, and each has a part of its gradient
            parts = getattr(outer, "sequence_parallel_size", 1) or 1
            self.divisor = world / float(parts)
        wire = getattr(engine, "communication_data_type", None)
        if wire is not None:
            self.formats.append(wire)
        self.ranges: dict[int, list[FlatRange]] = {}
        self.steppers: list[Any] = []
        for stepper in (outer.optimizer, getattr(outer, "backup_optimizer", None)):
            if hasattr(stepper, "register_step_pre_hook"):
                self.steppers.append(stepper)
        if not self.steppers:
            raise Unsupported(f"{type(outer.optimizer).__name__} has no hook before its step")

    def scale(self) -> Tensor | float:
        """The factor on the averaged gradients: a number, or a tensor if the norm is one."""
        loss_scale = getattr(self.outer, "loss_scale", None) or 1.0
        limit = getattr(self.outer, "clip_grad", None) or 0.0
        scale = 1.0 / float(loss_scale)
        limit = float(limit)
        norm = getattr(self.outer, "_global_grad_norm", None)
        if limit <= 0 or norm is None:
            return scale
        if not sys.modules["torch"].is_tensor(norm):
            excess = (float(norm) + 1e-6) / limit
            return scale / max(1.0, excess)
        excess = (norm.detach().float() + 1e-6) / limit
        return scale / excess.clamp(min=1.0)

    def iterate_pieces(self, optimizer: Any = None) -> Iterator[GradientPiece]:
        rows = {id(parameter): row for row, parameter in enumerate(self.parameters)}
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                gradient = flat.grad.reshape(-1)
                row = rows.get(id(flat))
                if row is not None:
                    yield GradientPiece(row, 0, gradient)
                    continue
                for part in self._find_ranges(flat):
                    end = part.offset + part.length
                    yield GradientPiece(part.row, part.start, gradient[part.offset : end])

    def _find_ranges(self, flat: Tensor) -> list[FlatRange]:
        """What `flat` holds; the same in every step."""
        ranges = self.ranges.get(id(flat))
        if ranges is None:
            sharded = getattr(self.outer, "fp32_partitioned_groups_flat", None)
            if sharded is None:
                ranges = list(self._iterate_fragments(flat))
            else:
                ranges = list(self._iterate_shards(_find_index(sharded, flat)))
            self.ranges[id(flat)] = ranges
        return ranges

    def _iterate_fragments(self, flat: Tensor) -> Iterator[FlatRange]:
        """ZeRO 1 and 2, and the bf16 optimizer."""
        begin = flat.data_ptr()
        end = begin + flat.numel() * flat.element_size()
        for row, parameter in enumerate(self.parameters):
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None or mapping.hp_fragment is None:
                continue
            place = mapping.hp_fragment.data_ptr()
            if begin <= place < end:
                offset = (place - begin) // flat.element_size()
                address = mapping.lp_fragment_address
                yield FlatRange(row, int(address.start), offset, int(address.numel))

    def _iterate_shards(self, index: int | None) -> Iterator[FlatRange]:
        """ZeRO 3."""
        distributed = sys.modules["torch"].distributed
        positions = getattr(self.outer, "grad_position", {})
        for row, parameter in enumerate(self.parameters):
            position = positions.get(getattr(parameter, "ds_id", None))
            if position is None or position[0] != index:
                continue
            shard = int(parameter.ds_tensor.ds_numel)
            start = distributed.get_rank(parameter.ds_process_group) * shard
            # the last shard is padded
            length = min(shard, int(parameter.ds_numel) - start)
            if length > 0:
                yield FlatRange(row, start, int(position[1]), length)


def _find_index(tensors: list[Tensor], tensor: Tensor) -> int | None:
    for index, each in enumerate(tensors):
        if each is tensor:
            return index
    return None


def find_engine(model: Module, parameters: Mapping[str, Tensor], world: int) -> Plain:
    """The engine that stands between backward and optimizer. Raises Unsupported."""
    if hasattr(model, "zero_optimization_stage"):
        return DeepSpeed(parameters, model, world)
    modules = list(model.modules())
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise Unsupported("FSDP1 flattens parameters: `fsdp_version: 2` can be compared")
    sharded = [module for module in modules if hasattr(module, "_get_fsdp_state")]
    if sharded:
        return FullyShard(parameters, sharded, world)
    if any(hasattr(parameter, "placements") for parameter in parameters.values()):
        raise Unsupported("parameters are split over processes (tensor parallelism)")
    if getattr(model, "_comm_hooks", None):
        raise Unsupported("DistributedDataParallel has a communication hook")
    return Plain(parameters, world)
