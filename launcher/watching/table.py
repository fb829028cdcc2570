"""Which modules are watched, and what is done once each is there."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial

from . import olmo, supplies, trainers
from .probe import Probe


def watched(probe: Probe) -> dict[str, Callable[[types.ModuleType], None]]:
    """Module name -> what to do once it is there."""
    settings, caches = probe.settings, probe.caches
    after: dict[str, Callable[[types.ModuleType], None]] = {
        "accelerate.accelerator": partial(trainers.watch_accelerate, probe),
        "accelerate.optimizer": partial(trainers.watch_optimizer, probe),
        "transformers.modeling_utils": partial(trainers.watch_saving, probe),
        "transformers.trainer": partial(trainers.watch_trainer, probe),
        "datasets.load": probe.data.watch,
        "open_instruct.dataset_transformation": caches.watch_dataset,
        "open_instruct.dpo_utils": caches.watch_reference,
        "open_instruct.model_utils": partial(trainers.watch_final_save, probe),
        "open_instruct.olmo_core_train_modules": partial(olmo.watch_module, probe),
        "olmo_core.train.train_module.transformer.train_module": partial(olmo.watch_step, probe),
        "olmo_core.train.trainer": partial(olmo.watch_trainer, probe),
        **probe.liger.watched(),
    }
    supplied: dict[str, Callable[..., None]] = {}
    if settings.cpu:
        supplied["torch.serialization"] = supplies.supply_locations
    if settings.backend == "trl":
        after["datasets.arrow_dataset"] = caches.watch_maps
    if settings.backend == "open_instruct":
        supplied["huggingface_hub"] = supplies.supply_snapshot
        if settings.cpu:
            supplied["torch.cuda"] = supplies.supply_cuda_counters
            supplied["open_instruct.utils"] = supplies.supply_mfu
            supplied["olmo_core.distributed.utils"] = supplies.supply_gloo
            supplied["olmo_core.train.callbacks.gpu_memory_monitor"] = (
                supplies.supply_memory_monitor
            )
    return after | {name: partial(supply, probe.record) for name, supply in supplied.items()}
