"""Upstream's script, run as `__main__` under watch; its exit code and exceptions stay its own."""

import json
import os
import runpy
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from . import supplies, trainers
from .hooks import Watcher, observed, wrap_known
from .probe import Probe
from .process import ARGUMENT, SETTINGS, Console, attempt_number, spare_streams


def watched(probe: Probe) -> dict[str, Callable[[types.ModuleType], None]]:
    settings, caches, data = probe.settings, probe.caches, probe.data
    watching = {
        "accelerate.accelerator": trainers.watch_accelerate,
        "accelerate.optimizer": trainers.watch_optimizer,
        "transformers.modeling_utils": trainers.watch_pretrained,
        "transformers.trainer": watch_trainer,
        "transformers.trainer_callback": trainers.watch_callbacks,
        "open_instruct.model_utils": trainers.watch_final_save,
        "open_instruct.olmo_core_train_modules": trainers.watch_olmo_module,
        "olmo_core.train.train_module.transformer.train_module": trainers.watch_olmo_step,
        "olmo_core.train.trainer": trainers.watch_olmo_trainer,
        "wandb": trainers.watch_wandb,
        "mlflow": trainers.watch_mlflow,
        "trackio": trainers.watch_trackio,
    }
    supplied = {"huggingface_hub": supplies.supply_snapshot}
    if settings.cpu:
        supplied["torch.serialization"] = supplies.supply_locations
    if settings.cpu and settings.stand_ins:
        supplied |= supplies.STAND_INS
    return {
        "datasets.arrow_dataset": several(caches.watch_maps, data.watch_filters),
        "open_instruct.dataset_transformation": several(caches.watch_dataset, data.watch_transformation),
        "open_instruct.dpo_utils": several(caches.watch_reference, partial(watch_pairs, probe)),
        "trl.trainer.sft_trainer": data.watch_preparation,
        "trl.trainer.dpo_trainer": data.watch_preparation,
        **probe.liger.watched(),
        **{name: partial(watch, probe) for name, watch in watching.items()},
        **{name: partial(supply, probe.record) for name, supply in supplied.items()},
    }


def several(*actions: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    """All of these; one that fails, at a commit that lacks what it looks for, keeps none of the others back."""

    def watch(module: types.ModuleType) -> None:
        faults: list[Exception] = []
        for action in actions:
            try:
                action(module)
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    return watch


def watch_trainer(probe: Probe, module: types.ModuleType) -> None:
    trainers.watch_trainer(probe, module)
    probe.data.watch_inputs(module)


def watch_pairs(probe: Probe, module: types.ModuleType) -> None:
    probe.data.watch_pairs(module, lambda: probe.tally)

    def computed(result: Any, *_: Any, **__: Any) -> None:
        _, chosen, rejected = result
        probe.tally.rewards(chosen, rejected)

    wrap_known(module, ("compute_loss",), observed(probe.record, after=computed))


def word(shown: str) -> str:
    """A word of the command line: a secret is not on it, but in a variable that it names."""
    return os.environ.get(shown[1:], shown) if shown.startswith(f"${ARGUMENT}") else shown


def run(target: str) -> None:
    sys.argv = [target, *map(word, sys.argv[1:])]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def main() -> None:
    spare_streams()
    probe = Probe(json.loads(os.environ[SETTINGS]))
    process, record, target = probe.process, probe.record, probe.settings.target
    record.write(
        "start",
        rank=process.rank,
        world=process.world,
        pid=os.getpid(),
        target=target,
        attempt=attempt_number(),
        python=".".join(map(str, sys.version_info[:3])),
    )
    sys.meta_path.insert(0, Watcher(record, watched(probe)))
    probe.watchdog.start()
    probe.preemption.start()
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
