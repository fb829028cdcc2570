"""What upstream takes for granted on a GPU machine and a CPU lacks (and local folders on the hub), each recorded."""

import os
import types
from collections.abc import Callable
from typing import Any

from .hooks import wrap, wrap_known
from .process import EventLog


def answer(record: EventLog, what: str, why: str, value: Any = None) -> Callable[..., Any]:
    """A function that answers `value`; one each time: torch.compile refuses one object under two of its names."""

    def call(*_: Any, **__: Any) -> Any:
        record.supply(what, why)
        return value

    return call


def supply_snapshot(record: EventLog, module: types.ModuleType) -> None:
    """finetune.py::main[snapshot_download] asks the hub for whatever the model is called, folders too."""

    def download(original: Any, repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(repo_id, str) and os.path.isdir(repo_id):
            record.supply("snapshot_download", f"{repo_id} is a local folder, not a hub name")
            return repo_id
        return original(repo_id, *args, **kwargs)

    wrap(module, "snapshot_download", download)


def supply_process_group(record: EventLog) -> None:
    """One process needs no group on a GPU with DeepSpeed, which makes one; on a CPU nothing does."""
    with record.quietly("process group"):
        import torch.distributed as dist

        if dist.is_available() and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            # dpo_utils.py::build_reference_logprobs_cache[dist.barrier #1]
            record.supply("process_group", "the reference pass calls barrier (dpo_utils.py)")


def supply_gloo(record: EventLog, module: types.ModuleType) -> None:
    """OLMo-core asks for NCCL beside gloo whatever the machine has; torch for the CPU has no NCCL."""

    def group(original: Any, backend: str = "gloo", *args: Any, **kwargs: Any) -> Any:
        record.supply("process_group", f"gloo in place of `{backend}`")
        return original("gloo", *args, **kwargs)

    wrap(module, "init_distributed", group)


def supply_memory_monitor(record: EventLog, module: types.ModuleType) -> None:
    """dpo.py watches the GPU's memory whether there is one or not
    (olmo_core_utils.py::build_base_callbacks[GPUMemoryMonitorCallback]).
    """
    nothing = answer(record, "memory_monitor", "OLMo-core's memory monitor needs a GPU")
    wrap_known(module.GPUMemoryMonitorCallback, ("pre_train", "pre_step", "post_step"), nothing)


def supply_documents(record: EventLog, module: types.ModuleType) -> None:
    """OLMo-core keeps the documents of a row apart with flash-attn alone, and refuses them elsewhere.

    Torch's attention is given a mask in which each sees itself: the same numbers, without the speed.
    """
    import torch

    def attend(original: Any, backend: Any, qkv: Any, cu_doc_lens: Any = None, **kwargs: Any) -> Any:
        if cu_doc_lens is None:
            return original(backend, qkv, **kwargs)
        record.supply("documents", "torch's attention, with a mask for each document: flash-attn needs a GPU")
        queries, keys, values = qkv
        rows, length = queries.shape[:2]
        repeated = backend.n_heads // backend.n_kv_heads
        places = torch.arange(rows * length, device=queries.device)
        ends = cu_doc_lens[1:].to(places.dtype)
        documents = torch.searchsorted(ends, places, right=True).view(rows, length)
        order = torch.arange(length, device=queries.device)
        mask = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order[None, :])
        window = backend.window_size[0]
        if window >= 0:
            mask = mask & (order[:, None] - order[None, :] <= window)
        keys = keys.repeat_interleave(repeated, dim=2)
        values = values.repeat_interleave(repeated, dim=2)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (queries, keys, values)), attn_mask=mask[:, None], scale=backend.scale
        )
        return attended.transpose(1, 2).contiguous()

    wrap(module.TorchAttentionBackend, "forward", attend)


def supply_cuda_counters(record: EventLog, module: types.ModuleType) -> None:
    """finetune.py::main[reserved_mem_GiB] and dpo_utils.py::build_reference_logprobs_cache[mem_GB] read them without
    asking whether there is a GPU.
    """
    why = "upstream reads CUDA memory counters at every log line"
    # upstream divides by the memory
    properties = types.SimpleNamespace(name="cpu", total_memory=1)
    # OLMo-core chooses its device without asking, too (olmo_core/distributed/utils.py: set_device)
    zeros = ("max_memory_allocated", "max_memory_reserved", "current_device", "set_device")
    for name, value in [*((name, 0) for name in zeros), ("get_device_properties", properties)]:
        setattr(module, name, answer(record, "cuda_counters", why, value))


def supply_locations(record: EventLog, module: types.ModuleType) -> None:
    """accelerate numbers the CPU of each of several processes, and torch cannot load a checkpoint onto it."""

    def load(storage: Any, location: str) -> Any:
        if not location.startswith("cpu:"):
            return None
        record.supply("cpu_location", f"torch does not load onto `{location}`")
        return storage

    module.register_package(11, lambda _: None, load)


def supply_mfu(record: EventLog, module: types.ModuleType) -> None:
    """utils.py::ModelDims.device_flops[return GPU_SPECS]: MFU needs a known GPU name; on a CPU the figure means
    nothing and is 0.
    """
    why = "MFU needs a known GPU; reported as 0"
    for name, value in (("calculate_mfu", 0.0), ("approximate_learner_utilization", {"mfu": 0.0})):
        wrap(module.ModelDims, name, answer(record, "mfu", why, value))
