"""Stand-ins for what upstream takes for granted and this machine lacks, each recorded.

All but `supply_snapshot` are used on a CPU only.
"""

import os
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .hooks import wrap, wrap_if_present
from .process import EventLog


def return_constant(record: EventLog, what: str, why: str, value: Any = None) -> Callable[..., Any]:
    """A new function that returns `value`: torch.compile refuses one under two of its names."""

    def call(*_: Any, **__: Any) -> Any:
        record.supply(what, why)
        return value

    return call


def supply_snapshot(record: EventLog, module: ModuleType) -> None:
    """finetune.py::main[snapshot_download] asks the hub for a model in a local folder, too."""

    def download(original: Any, repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(repo_id, str) and os.path.isdir(repo_id):
            record.supply("snapshot_download", f"{repo_id} is a local folder, not a hub name")
            return repo_id
        return original(repo_id, *args, **kwargs)

    wrap(module, "snapshot_download", download)


def supply_process_group(record: EventLog) -> None:
    """DeepSpeed creates a group on a GPU, also for one process; on a CPU nothing does."""
    with record.quietly("process group"):
        import torch.distributed as dist

        if dist.is_available() and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            # dpo_utils.py::build_reference_logprobs_cache[dist.barrier #1]
            record.supply("process_group", "the reference pass calls barrier (dpo_utils.py)")


def supply_gloo(record: EventLog, module: ModuleType) -> None:
    """OLMo-core asks for NCCL beside gloo; torch for the CPU has no NCCL."""

    def group(original: Any, backend: str = "gloo", *args: Any, **kwargs: Any) -> Any:
        record.supply("process_group", f"gloo in place of `{backend}`")
        return original("gloo", *args, **kwargs)

    wrap(module, "init_distributed", group)


def supply_memory_monitor(record: EventLog, module: ModuleType) -> None:
    """dpo.py watches the memory of a GPU that may not exist
    (olmo_core_utils.py::build_base_callbacks[GPUMemoryMonitorCallback]).
    """
    nothing = return_constant(record, "memory_monitor", "OLMo-core's memory monitor needs a GPU")
    for method in ("pre_train", "pre_step", "post_step"):
        wrap_if_present(module.GPUMemoryMonitorCallback, method, nothing)


def supply_documents(record: EventLog, module: ModuleType) -> None:
    """OLMo-core keeps the documents of a row apart with flash-attn, and refuses them without it.

    torch's attention with a mask in which each document sees itself gives the same numbers, slower.
    """
    why = "torch's attention, with a mask for each document: flash-attn needs a GPU"

    def attend(original: Any, backend: Any, qkv: Any, cu_doc_lens: Any = None, **more: Any) -> Any:
        if cu_doc_lens is None:
            return original(backend, qkv, **more)
        record.supply("documents", why)
        return _attend_by_document(backend, qkv, cu_doc_lens)

    wrap(module.TorchAttentionBackend, "forward", attend)


def _attend_by_document(backend: Any, qkv: Any, cu_doc_lens: Any) -> Any:
    """Attention of each token to those before it in its document; shapes as flash-attn has them."""
    import torch

    queries, keys, values = qkv
    rows, length = queries.shape[:2]
    places = torch.arange(rows * length, device=queries.device)
    ends = cu_doc_lens[1:].to(places.dtype)
    documents = torch.searchsorted(ends, places, right=True).view(rows, length)
    is_same_document = documents[:, :, None] == documents[:, None, :]
    order = places[:length]
    distance = order[:, None] - order[None, :]
    mask = is_same_document & (distance >= 0)
    window = backend.window_size[0]
    if window >= 0:
        mask = mask & (distance <= window)
    repeated = backend.n_heads // backend.n_kv_heads
    keys = keys.repeat_interleave(repeated, dim=2)
    values = values.repeat_interleave(repeated, dim=2)
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None],
        scale=backend.scale,
    )
    return attended.transpose(1, 2).contiguous()


def supply_cuda_counters(record: EventLog, module: ModuleType) -> None:
    """finetune.py::main[reserved_mem_GiB] and
    dpo_utils.py::build_reference_logprobs_cache[mem_GB] read them without asking for a GPU.
    """
    values: dict[str, object] = {
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "current_device": 0,
        # olmo_core/distributed/utils.py chooses its device without asking, too
        "set_device": 0,
        # upstream divides by the memory
        "get_device_properties": types.SimpleNamespace(name="cpu", total_memory=1),
    }
    why = "upstream reads CUDA memory counters at every log line"
    for name, value in values.items():
        setattr(module, name, return_constant(record, "cuda_counters", why, value))


def supply_locations(record: EventLog, module: ModuleType) -> None:
    """accelerate numbers the CPUs of several processes; torch cannot load onto those."""

    def load(storage: Any, location: str) -> Any:
        if not location.startswith("cpu:"):
            return None
        record.supply("cpu_location", f"torch does not load onto `{location}`")
        return storage

    module.register_package(11, lambda _: None, load)


def supply_mfu(record: EventLog, module: ModuleType) -> None:
    """utils.py::ModelDims.device_flops[return GPU_SPECS]: MFU needs the name of a known GPU."""
    why = "MFU needs a known GPU; reported as 0"
    mfu = return_constant(record, "mfu", why, 0.0)
    utilization = return_constant(record, "mfu", why, {"mfu": 0.0})
    wrap(module.ModelDims, "calculate_mfu", mfu)
    wrap(module.ModelDims, "approximate_learner_utilization", utilization)
