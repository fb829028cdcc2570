"""Upstream's script, run as `__main__` under watch; its exit code and exceptions stay its own."""

import importlib.util
import json
import os
import runpy
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import supplies, trainers
from .hooks import Watcher
from .probe import Probe
from .process import ARGUMENT, SETTINGS, Console, attempt_number, say, spare_streams

LIBRARIES = {
    "accelerate.accelerator": "watch_accelerate",
    "accelerate.optimizer": "watch_optimizer",
    "datasets.arrow_dataset": "watch_data_sets",
    "mlflow": "watch_mlflow",
    "trackio": "watch_trackio",
    "transformers.modeling_utils": "watch_pretrained",
    "transformers.trainer": "watch_trainer",
    "transformers.trainer_callback": "watch_callbacks",
    "wandb": "watch_wandb",
}
"""Watchers of what any script may use; those of its own modules stand in its description."""


def watched(probe: Probe) -> dict[str, Callable[[types.ModuleType], None]]:
    settings = probe.settings
    supplied = {"huggingface_hub": "supply_snapshot"}
    if settings.cpu:
        supplied |= {"torch.serialization": "supply_locations", **settings.stand_ins}
    watching = {name: watcher(trainers, action, probe) for name, action in {**LIBRARIES, **settings.watchers}.items()}
    supplying = {name: watcher(supplies, action, probe.record) for name, action in supplied.items()}
    return {**probe.liger.watched(), **watching, **supplying}


def watcher(owner: types.ModuleType, name: str, subject: Any) -> Callable[[types.ModuleType], None]:
    """The function of `trainers` or `supplies` of this name, for a module that is imported."""
    return partial(getattr(owner, name), subject)


def word(shown: str) -> str:
    """A word of the command line: a secret is not on it, but in a variable that it names."""
    return os.environ.get(shown[1:], shown) if shown.startswith(f"${ARGUMENT}") else shown


def run(target: str) -> None:
    sys.argv = [target, *map(word, sys.argv[1:])]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def export(probe: Probe) -> None:
    """Write the model that was trained in another library's form, where the script does not do that itself."""
    settings = probe.settings.export
    if not settings or probe.process.rank:
        return
    probe.rests()
    path = Path(__file__).resolve().parents[1] / "models" / "exporting.py"
    spec = importlib.util.spec_from_file_location("launch_export", path)
    assert spec is not None and spec.loader is not None
    exporting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exporting)
    say(f"writing the weights for transformers into {settings['into']}")
    getattr(exporting, settings["function"])(settings, probe.record.write)
    trainers.note_saved(probe.record, settings["into"])


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
        export(probe)
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
