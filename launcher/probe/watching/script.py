"""Upstream's script, run as `__main__` under watch; its exit code and exceptions stay its own."""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from . import supplies, trainers
from .hooks import Watcher
from .probe import Probe
from .process import Console, spare_streams


def watched(probe: Probe) -> dict[str, Callable[[types.ModuleType], None]]:
    """Module name -> what to do once it is there."""
    settings, caches = probe.settings, probe.caches
    after: dict[str, Callable[[types.ModuleType], None]] = {
        "datasets.arrow_dataset": caches.watch_maps,
        "accelerate.accelerator": partial(trainers.watch_accelerate, probe),
        "accelerate.optimizer": partial(trainers.watch_optimizer, probe),
        "transformers.modeling_utils": partial(trainers.watch_saving, probe),
        "transformers.trainer": partial(trainers.watch_trainer, probe),
        "open_instruct.dataset_transformation": caches.watch_dataset,
        "open_instruct.dpo_utils": caches.watch_reference,
        "open_instruct.model_utils": partial(trainers.watch_final_save, probe),
        "open_instruct.olmo_core_train_modules": partial(trainers.watch_olmo_module, probe),
        "olmo_core.train.train_module.transformer.train_module": partial(trainers.watch_olmo_step, probe),
        "olmo_core.train.trainer": partial(trainers.watch_olmo_trainer, probe),
        **probe.liger.watched(),
    }
    supplied = {"huggingface_hub": supplies.supply_snapshot}
    if settings.cpu:
        supplied["torch.serialization"] = supplies.supply_locations
    if settings.cpu and settings.stand_ins:
        supplied["torch.cuda"] = supplies.supply_cuda_counters
        supplied["open_instruct.utils"] = supplies.supply_mfu
        supplied["olmo_core.distributed.utils"] = supplies.supply_gloo
        monitor = "olmo_core.train.callbacks.gpu_memory_monitor"
        supplied[monitor] = supplies.supply_memory_monitor
    return after | {name: partial(supply, probe.record) for name, supply in supplied.items()}


def word(shown: str) -> str:
    """A word of the command line: a secret is not on it, but in a variable that it names."""
    return os.environ.get(shown[1:], shown) if shown.startswith("$LAUNCH_ARG_") else shown


def run(target: str) -> None:
    """The script with the words of this command line, and its folder as the first import path."""
    sys.argv = [target, *map(word, sys.argv[1:])]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def main() -> None:
    """What a training process does, from its first event to its last."""
    spare_streams()
    probe = Probe(json.loads(os.environ["LAUNCH_PROBE"]))
    process, record, target = probe.process, probe.record, probe.settings.target
    record.write(
        "start",
        rank=process.rank,
        world=process.world,
        pid=os.getpid(),
        target=target,
        attempt=int(os.environ.get("LAUNCH_ATTEMPT") or 1),
        python=".".join(map(str, sys.version_info[:3])),
    )
    sys.meta_path.insert(0, Watcher(record, watched(probe)))
    probe.watchdog.start()
    code: Any = 0
    try:
        run(target)
    except SystemExit as stop:
        code = stop.code
        raise
    except BaseException as error:
        code = 1
        record.write("error", type=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        probe.ends()
        if lost := Console.lost:
            record.write("note", text=f"the disk was full: {lost} bytes of the log are lost")
        record.write("end", exit=code if isinstance(code, int) else int(code is not None))
